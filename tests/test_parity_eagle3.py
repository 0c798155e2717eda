"""Our EAGLE-3 head against a torch head built from transformers' Llama parts.

The reference has random weights of its own: a head trained here would agree with its own mistakes.
The numbers were recorded by `tests.record_references`; `test_live_torch` computes them anew.
"""

import json

import numpy as np
import pytest

from acceptmoe_jax.weights.checkpoint import Checkpoint
from acceptmoe_jax.weights.eagle3 import draft_to_target_ids
from tests import parity
from tests.reference_cases import HEAD, HEAD_CASES, HEAD_TARGET, HEAD_TOLERANCE, read_case


@pytest.fixture(scope="module", params=HEAD_CASES)
def both(request, data_dir):
    """What we compute for a case, and the case."""
    head = parity.load_head(data_dir / HEAD, HEAD_CASES[request.param])
    theirs = read_case(data_dir, request.param)
    return parity.head_arrays(head, theirs), theirs


def test_every_dimension_of_the_head_is_another_number(data_dir):
    raw = json.loads((data_dir / HEAD / "config.json").read_text())
    sizes = [value for value in raw.values() if type(value) is int]
    heads = (raw["num_attention_heads"], raw["num_key_value_heads"])
    sizes += [count * raw["head_dim"] for count in heads]
    assert len(set(sizes)) == len(sizes)


@pytest.mark.parametrize("title", ["prefill", "first", "second"])
def test_the_head_equals_the_torch_reference(both, title):
    """The prefill fuses the target's states; the tree's levels carry the head's own."""
    ours, theirs = both
    ours = {name: value for name, value in ours.items() if name.startswith(f"{title}/")}
    assert {f"{title}/hidden", f"{title}/logits"} <= ours.keys()
    assert parity.worst_error(ours, theirs) < HEAD_TOLERANCE


def test_the_embeddings_of_the_case_are_the_targets(data_dir):
    case = read_case(data_dir, HEAD)
    target = Checkpoint.open(data_dir / HEAD_TARGET).read("model.embed_tokens.weight")
    for title in ("prefill", "first", "second"):
        np.testing.assert_array_equal(case[f"{title}/embeddings"], target[case[f"{title}/tokens"]])


def test_d2t_offsets_lead_to_the_tokens_that_t2d_marks(data_dir):
    head = Checkpoint.open(data_dir / HEAD)
    marked = head.read("t2d")
    ids = draft_to_target_ids(head.read("d2t"), marked.sum(), marked.size, HEAD)
    np.testing.assert_array_equal(ids, np.flatnonzero(marked))
