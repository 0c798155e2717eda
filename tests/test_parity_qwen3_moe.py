"""What the tiny Qwen3-MoE checkpoints show between them; `test_parity_targets` has the numbers."""

import json

from tests import parity
from tests.reference_cases import QWEN3_MOE


def test_one_checkpoint_is_one_file_and_the_other_is_sharded(data_dir):
    one, sharded = (data_dir / name for name in QWEN3_MOE)
    assert (one / "model.safetensors").exists()
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1


def test_the_checkpoints_differ_in_norm_topk_prob_and_one_has_a_dense_layer(data_dir):
    norm, nonorm = (parity.load_target(data_dir / name).config for name in QWEN3_MOE)
    assert norm.norm_topk_prob and not nonorm.norm_topk_prob
    assert norm.dense_layers == (1,) and nonorm.dense_layers == ()
