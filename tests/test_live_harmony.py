"""The recorded chats, answers and ids with the openai-harmony package installed here.

Collected only where it is installed (see conftest.py); `make check` runs it there.
"""

import json

import pytest

from tests.harmony_cases import needs_gpt_oss, unpack_gpt_oss
from tests.record_harmony import record

pytestmark = pytest.mark.torch


@needs_gpt_oss
def test_what_is_recorded_is_what_the_package_installed_here_says(data_dir, tmp_path):
    recorded = json.loads((data_dir / "chat_harmony.json").read_text())
    anew = record(unpack_gpt_oss(tmp_path))
    assert {name: recorded[name] for name in anew} == anew
