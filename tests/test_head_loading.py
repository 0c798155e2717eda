"""Loading draft heads: spellings, vocabulary tables, refusals; and saving them."""

import pathlib

import flax.traverse_util
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.files import write_json
from acceptmoe_jax.models import eagle3
from acceptmoe_jax.models.config import RopeConfig
from acceptmoe_jax.models.eagle3 import Eagle3Config
from acceptmoe_jax.weights.checkpoint import Checkpoint
from acceptmoe_jax.weights.eagle3 import draft_to_target_ids, load_eagle3, owns_embedding
from acceptmoe_jax.weights.key_maps import eagle3_keys
from acceptmoe_jax.weights.safetensors_io import save_file
from acceptmoe_jax.weights.saving import draft_tables, save_eagle3

TARGET_VOCAB, DRAFT_VOCAB = 31, 13


def head_config() -> Eagle3Config:
    return Eagle3Config(
        hidden_size=24,
        target_hidden_size=20,
        num_heads=4,
        num_kv_heads=2,
        head_dim=10,
        intermediate_size=28,
        vocab_size=TARGET_VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e4),
        aux_layer_ids=(0, 1, 2),
    )


def head_target_ids() -> np.ndarray:
    return np.sort(np.random.default_rng(5).permutation(TARGET_VOCAB)[:DRAFT_VOCAB])


def head_params(owns: bool = False) -> dict:
    rng = np.random.default_rng(4)
    abstract = eagle3.abstract_params(head_config(), jnp.float32, owns)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), abstract)


def head_tensors(rename=lambda key: key, owns: bool = False) -> dict[str, np.ndarray]:
    """The tensors of a random head as published heads name them; `rename` spells the keys."""
    flat = flax.traverse_util.flatten_dict(head_params(owns), sep=".")
    tensors = {rename(key): leaf for key, leaf in flat.items()}
    d2t, t2d = draft_tables(head_target_ids(), TARGET_VOCAB)
    return tensors | {"d2t": d2t, "t2d": t2d}


def load_head(directory: pathlib.Path, tensors: dict[str, np.ndarray], owns: bool = False):
    save_file(directory / "model.safetensors", tensors)
    write_json(directory / "config.json", head_config().to_hf())
    return load_eagle3(
        Checkpoint.open(directory),
        eagle3.abstract_params(head_config(), jnp.float32, owns),
        draft_vocab=DRAFT_VOCAB,
        target_vocab=TARGET_VOCAB,
    )


SPELLINGS = {
    "midlayer": lambda key: key,
    "layers.0": lambda key: key.replace("midlayer.", "layers.0."),
    "model.midlayer": lambda key: key if key.startswith("lm_head") else f"model.{key}",
    "model.layers.0": lambda key: "model." + key.replace("midlayer.", "layers.0."),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_head_loads_under_every_spelling(tmp_path, spelling):
    weights = load_head(tmp_path, head_tensors(SPELLINGS[spelling]))
    jax.tree.map(np.testing.assert_array_equal, weights.params, head_params())
    np.testing.assert_array_equal(weights.target_ids, head_target_ids())
    assert weights.target_ids.dtype == np.int32


def test_a_head_may_bring_its_own_embedding(tmp_path):
    weights = load_head(tmp_path, head_tensors(owns=True), owns=True)
    assert weights.params["embed_tokens"]["weight"].shape == (TARGET_VOCAB, 24)
    assert owns_embedding(Checkpoint.open(tmp_path))


def test_two_spellings_of_one_tensor_are_refused():
    keys = ["midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"]
    with pytest.raises(UserError, match="head: midlayer.* and layers.0.* are the same tensor"):
        eagle3_keys(keys, "head")


def test_a_recorded_head_loads(data_dir):
    checkpoint = Checkpoint.open(data_dir / "eagle3_tiny")
    config = Eagle3Config.from_hf(checkpoint.config, checkpoint.config_file)
    abstract = eagle3.abstract_params(config, jnp.float32, owns_embedding(checkpoint))
    weights = load_eagle3(
        checkpoint,
        abstract,
        draft_vocab=config.draft_vocab_size,
        target_vocab=config.vocab_size,
    )
    expected = np.arange(config.draft_vocab_size) + checkpoint.read("d2t")
    np.testing.assert_array_equal(weights.target_ids, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("d2t"), "model.safetensors holds no d2t"),
        (lambda t: t.pop("fc.weight"), r"lacks 1 tensor \(fc.weight\)"),
        (
            lambda t: t.update({"fc.weight": np.zeros((24, 66), np.float32)}),
            r"fc.weight has the shape \[24, 66\], expected \[24, 60\]",
        ),
        (
            lambda t: t.update({"midlayer.q_norm.weight": np.zeros(3), "extra": np.zeros(3)}),
            r"holds 2 tensors \(extra, midlayer.q_norm.weight\)",
        ),
        (
            lambda t: t.update({"embed_tokens.weight": np.zeros((TARGET_VOCAB, 24))}),
            r"holds 1 tensor \(embed_tokens.weight\)",
        ),
        (
            lambda t: t.update(t2d=np.zeros(TARGET_VOCAB + 1, bool)),
            r"t2d has the shape \[32\], but the target's vocabulary is 31",
        ),
        (
            lambda t: t.update(d2t=t["d2t"][:-1]),
            r"d2t is int64\[12\], expected integers \[13\]",
        ),
        (
            lambda t: t.update(d2t=t["d2t"].astype(np.float32)),
            r"d2t is float32\[13\], expected integers \[13\]",
        ),
    ],
)
def test_a_faulty_head_is_refused_by_file_and_key(tmp_path, change, message):
    tensors = head_tensors()
    change(tensors)
    with pytest.raises(UserError, match=message) as error:
        load_head(tmp_path, tensors)
    assert str(tmp_path / "model.safetensors") in str(error.value)


def test_offsets_are_added_to_draft_ids():
    ids = draft_to_target_ids(np.array([0, 0, 3, 3]), 4, 9, "head")
    np.testing.assert_array_equal(ids, [0, 1, 5, 6])


@pytest.mark.parametrize("d2t", [None, np.zeros(4, np.int64)])
def test_zeros_and_no_table_mean_the_same_vocabulary(d2t):
    np.testing.assert_array_equal(draft_to_target_ids(d2t, 4, 4, "head"), [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (None, "head holds no d2t"),
        ([0, 1, 2, 3], "sends draft id 3 to 6, outside"),  # absolute ids taken for offsets
        ([0, -2, 0, 0], "sends draft id 1 to -1, outside"),
        ([0, 0, 2**63 - 1, 0], "sends draft id 2 to"),
        ([1, 0, 0, 0], r"sends draft ids \[0, 1\] to the same target id 1"),
    ],
)
def test_tables_that_leave_the_vocabulary_or_repeat_are_refused(d2t, message):
    table = None if d2t is None else np.array(d2t, np.int64)
    with pytest.raises(UserError, match=message):
        draft_to_target_ids(table, 4, 6, "head")


def test_a_draft_vocabulary_larger_than_the_target_is_refused():
    with pytest.raises(UserError, match="a draft vocabulary of 5 does not fit a target of 4"):
        draft_to_target_ids(None, 5, 4, "head")


def test_a_head_saved_by_us_loads_again_in_the_published_dtypes(tmp_path):
    params = head_params()
    tables = draft_tables(head_target_ids(), TARGET_VOCAB)
    save_eagle3(tmp_path, head_config().to_hf(), params, *tables)
    checkpoint = Checkpoint.open(tmp_path)
    assert Eagle3Config.from_hf(checkpoint.config, checkpoint.config_file) == head_config()
    assert checkpoint.entries["d2t"].dtype == np.int64
    assert checkpoint.entries["t2d"].dtype == np.bool_
    assert checkpoint.entries["midlayer.mlp.up_proj.weight"].dtype == ml_dtypes.bfloat16
    weights = load_eagle3(
        checkpoint,
        eagle3.abstract_params(head_config(), jnp.bfloat16),
        draft_vocab=DRAFT_VOCAB,
        target_vocab=TARGET_VOCAB,
    )
    np.testing.assert_array_equal(weights.target_ids, head_target_ids())
    jax.tree.map(
        lambda found, original: np.testing.assert_array_equal(found, original.astype(jnp.bfloat16)),
        weights.params,
        params,
    )


def test_a_save_that_is_cut_short_leaves_no_checkpoint(tmp_path):
    params = {"norm": {"weight": np.zeros(2, np.float32)}}
    save_eagle3(tmp_path, {}, params, np.zeros(2), np.ones(2))
    with pytest.raises(TypeError):
        save_eagle3(tmp_path, {"unwritable": object()}, params, np.zeros(2), np.ones(2))
    with pytest.raises(UserError, match="config.json does not exist"):
        Checkpoint.open(tmp_path)
