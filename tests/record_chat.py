"""Records what transformers renders and tokenizes for chats, for tests without transformers.

    python -m tests.record_chat --qwen3_dir=DIR [--output=tests/data/chat_qwen3.json]

Needs transformers, and a folder with Qwen3's tokenizer.json and tokenizer_config.json. The file
holds transformers' version, and for each of `chat_cases.CASES` the text under the stand-in
template (`standin`) and the text and ids under Qwen3's (`qwen3`).
"""

import pathlib
import tempfile

import transformers
from absl import app, flags

from acceptmoe_jax.files import write_json
from tests.chat_cases import CASES, write_standin

_QWEN3_DIR = flags.DEFINE_string("qwen3_dir", None, "Folder of the tokenizer.", required=True)
_OUTPUT = flags.DEFINE_string("output", "tests/data/chat_qwen3.json", "File to write.")


def render(tokenizer: transformers.PreTrainedTokenizerBase, name: str) -> str:
    messages, variables = CASES[name]
    variables = {"add_generation_prompt": True, **variables}
    return tokenizer.apply_chat_template(messages, tokenize=False, **variables)


def main(argv: list[str]) -> None:
    del argv
    with tempfile.TemporaryDirectory() as directory:
        write_standin(pathlib.Path(directory))
        standin = transformers.AutoTokenizer.from_pretrained(directory)
    qwen3 = transformers.AutoTokenizer.from_pretrained(_QWEN3_DIR.value)
    cases = {}
    for name in CASES:
        text = render(qwen3, name)
        ids = qwen3(text, add_special_tokens=False)["input_ids"]
        cases[name] = {"standin": render(standin, name), "qwen3": text, "qwen3_ids": ids}
    write_json(_OUTPUT.value, {"transformers": transformers.__version__, "cases": cases})


if __name__ == "__main__":
    app.run(main)
