"""Checkpoint directories and the loader, bad input above all."""

import json
import pathlib
import tracemalloc

import flax.traverse_util
import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.weights.checkpoint import Checkpoint, resolve_directory
from acceptmoe_jax.weights.loading import Part, load_tree, load_trees, plan_tree
from acceptmoe_jax.weights.safetensors_io import (
    SafetensorsFile,
    TensorEntry,
    save_file,
    save_sharded,
)


def dotted(path: tuple[str, ...]) -> str:
    return ".".join(path)


def small_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = {"a.weight": (2, 3), "b.weight": (4,), "c.weight": (5, 1, 2)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def small_abstract() -> dict:
    return {
        name.split(".")[0]: {"weight": jax.ShapeDtypeStruct(tensor.shape, jnp.float32)}
        for name, tensor in small_tensors().items()
    }


def write_checkpoint(
    directory: pathlib.Path,
    tensors: dict[str, np.ndarray],
    max_shard_bytes: int | None = None,
) -> Checkpoint:
    save_sharded(directory, tensors, max_shard_bytes)
    (directory / "config.json").write_text('{"model_type": "small"}')
    return Checkpoint.open(directory)


def edit_index(directory: pathlib.Path, edit) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def refuse_to_place(array: np.ndarray):
    raise AssertionError("a tensor was read before the checkpoint had been checked")


# --- Directories -------------------------------------------------------------------------------


def test_a_local_directory_is_itself(tmp_path):
    assert resolve_directory(str(tmp_path)) == tmp_path


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match="model.safetensors is a file"):
        resolve_directory(str(tmp_path / "model.safetensors"))


def test_a_mistyped_path_is_no_hub_id():
    with pytest.raises(UserError, match="checkpoints/pocket/typo is no directory"):
        resolve_directory("checkpoints/pocket/typo")


def test_a_hub_id_downloads_only_what_is_read(tmp_path, monkeypatch):
    def download(name, allow_patterns, ignore_patterns):
        files = [
            *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
            *("chat_template.jinja", "model-00001-of-00002.safetensors", "pytorch_model.bin"),
            *("model.safetensors.index.json", "original/model.safetensors", "metal/model.bin"),
        ]
        chosen = huggingface_hub.utils.filter_repo_objects(
            files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        (tmp_path / "list").write_text(f"{name}: {sorted(chosen)}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_directory("owner/model") == tmp_path
    assert (tmp_path / "list").read_text() == (
        "owner/model: ['chat_template.jinja', 'config.json', 'generation_config.json', "
        "'model-00001-of-00002.safetensors', 'model.safetensors.index.json', 'tokenizer.json', "
        "'tokenizer_config.json']"
    )


def test_a_hub_id_that_cannot_be_had_is_one_clear_error(monkeypatch):
    def fail(*args, **kwargs):
        raise LocalEntryNotFoundError("no connection\nand much more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match="owner/model is no directory.*: no connection$"):
        resolve_directory("owner/model")


def test_a_sharded_checkpoint_reads_like_a_single_file(tmp_path):
    single = write_checkpoint(tmp_path / "single", small_tensors())
    sharded = write_checkpoint(tmp_path / "sharded", small_tensors(), max_shard_bytes=40)
    assert len({entry.file for entry in sharded.entries.values()}) == 2
    assert set(single.entries) == set(sharded.entries)
    for key in single.entries:
        np.testing.assert_array_equal(single.read(key), sharded.read(key))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda weight_map: weight_map.update({"a.weight": "gone.safetensors"}),
            "a.weight should lie in gone.safetensors, which does not exist",
        ),
        (
            lambda weight_map: weight_map.update({"z": weight_map["a.weight"]}),
            "z should lie in model-00001-of-00002.safetensors, which does not hold it",
        ),
        (lambda weight_map: weight_map.pop("b.weight"), "b.weight is not listed for this file"),
        (
            lambda weight_map: weight_map.update({"a.weight": "../a.safetensors"}),
            "a.weight should name a file beside the index",
        ),
        (lambda weight_map: weight_map.update({"a.weight": 3}), "a.weight should name a file"),
    ],
)
def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path, edit, message):
    write_checkpoint(tmp_path, small_tensors(), max_shard_bytes=40)
    edit_index(tmp_path, edit)
    with pytest.raises(UserError, match=message) as error:
        Checkpoint.open(tmp_path)
    assert "model.safetensors.index.json" in str(error.value)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    write_checkpoint(tmp_path, small_tensors(), max_shard_bytes=40)
    second = tmp_path / "model-00002-of-00002.safetensors"
    doubled = {key: SafetensorsFile(second).read(key) for key in SafetensorsFile(second).entries}
    save_file(second, doubled | {"a.weight": small_tensors()["a.weight"]})
    with pytest.raises(UserError, match="00002-of-00002.safetensors: a.weight is not listed"):
        Checkpoint.open(tmp_path)


def test_a_key_listed_twice_in_the_index_is_refused(tmp_path):
    write_checkpoint(tmp_path, small_tensors(), max_shard_bytes=40)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}')
    with pytest.raises(UserError, match="index.json is not a valid .*: the key a is listed twice"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": []}', "{}"])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match="model.safetensors.index.json"):
        Checkpoint.open(tmp_path)


def test_a_directory_without_config_or_weights_says_which(tmp_path):
    with pytest.raises(UserError, match="config.json does not exist"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="config.json does not hold an object"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="holds neither model.safetensors nor"):
        Checkpoint.open(tmp_path)


# --- Trees -------------------------------------------------------------------------------------


def test_every_leaf_gets_its_tensor(tmp_path):
    checkpoint = write_checkpoint(tmp_path, small_tensors(), max_shard_bytes=40)
    tree = load_tree(checkpoint, small_abstract(), dotted)
    for path, leaf in flax.traverse_util.flatten_dict(tree, sep=".").items():
        assert isinstance(leaf, jax.Array)
        np.testing.assert_array_equal(leaf, small_tensors()[path])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("b.weight"),
            r"model.safetensors lacks 1 tensor \(b.weight\)",
        ),
        (
            lambda t: t.update(x=np.zeros(2), y=np.zeros(2)),
            r"model.safetensors holds 2 tensors \(x, y\)",
        ),
        (
            lambda t: t.update({"a.weight": t["a.weight"].T}),
            r"model.safetensors: a.weight has the shape \[3, 2\], expected \[2, 3\]",
        ),
        (
            lambda t: t.update({"b.weight": np.zeros(4, np.int32)}),
            "model.safetensors: b.weight has the dtype int32, expected float32",
        ),
    ],
)
def test_a_wrong_tensor_is_named_before_any_is_read(tmp_path, change, message):
    tensors = small_tensors()
    change(tensors)
    checkpoint = write_checkpoint(tmp_path, tensors)
    with pytest.raises(UserError, match=message):
        load_tree(checkpoint, small_abstract(), dotted, place=refuse_to_place)


def test_a_message_lists_a_few_of_many_missing_tensors(tmp_path):
    checkpoint = write_checkpoint(tmp_path, {"a": np.zeros(2, np.float32)})
    abstract = {f"n{i}": jax.ShapeDtypeStruct((2,), jnp.float32) for i in range(500)}
    with pytest.raises(UserError, match=r"lacks 500 tensors \(n0, .*\.\.\.\)") as error:
        load_tree(checkpoint, abstract, dotted)
    assert len(str(error.value)) < 600


def test_several_trees_share_one_checkpoint(tmp_path):
    checkpoint = write_checkpoint(tmp_path, small_tensors())
    abstract = small_abstract()
    first, second = {"a": abstract["a"], "b": abstract["b"]}, {"c": abstract["c"]}
    with pytest.raises(UserError, match=r"holds 1 tensor \(c.weight\)"):
        load_tree(checkpoint, first, dotted)
    trees = load_trees(checkpoint, [plan_tree(tree, dotted) for tree in (first, second)])
    np.testing.assert_array_equal(trees[1]["c"]["weight"], small_tensors()["c.weight"])


def test_keys_to_ignore_may_be_left_over(tmp_path):
    checkpoint = write_checkpoint(tmp_path, small_tensors())
    abstract = {"a": small_abstract()["a"]}
    tree = load_tree(checkpoint, abstract, dotted, ignore=("b.weight", "c.weight"))
    assert list(tree) == ["a"]


def test_tensors_stack_in_the_order_of_their_keys(tmp_path):
    tensors = {f"e{i}": np.full((2, 3), i, np.float32) for i in range(11)}
    checkpoint = write_checkpoint(tmp_path, tensors)
    abstract = {"bank": jax.ShapeDtypeStruct((11, 2, 3), jnp.bfloat16)}
    tree = load_tree(checkpoint, abstract, lambda path: [f"e{i}" for i in range(11)])
    np.testing.assert_array_equal(tree["bank"][:, 1, 2].astype(int), np.arange(11))


def test_only_floating_tensors_are_cast(tmp_path):
    tensors = {"w": np.array([1.0, 1.001], np.float32), "blocks": np.array([3, 255], np.uint8)}
    checkpoint = write_checkpoint(tmp_path, tensors)
    abstract = {
        "w": jax.ShapeDtypeStruct((2,), jnp.float32),
        "blocks": jax.ShapeDtypeStruct((2,), jnp.uint8),
    }
    tree = load_tree(checkpoint, abstract, dotted, dtype=jnp.bfloat16)
    assert {name: leaf.dtype for name, leaf in tree.items()} == {
        "w": jnp.bfloat16,
        "blocks": jnp.uint8,
    }
    np.testing.assert_array_equal(tree["w"], tensors["w"].astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(tree["blocks"], tensors["blocks"])


def test_each_leaf_goes_straight_to_its_place(tmp_path):
    checkpoint = write_checkpoint(tmp_path, small_tensors())
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    tree = load_tree(
        checkpoint, small_abstract(), dotted, place=lambda array: jax.device_put(array, sharding)
    )
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)} == {"pinned_host"}


def test_progress_adds_up_to_the_placed_bytes(tmp_path):
    checkpoint = write_checkpoint(tmp_path, small_tensors())
    steps = []
    load_tree(checkpoint, small_abstract(), dotted, dtype=jnp.bfloat16, progress=steps.append)
    assert steps == [12, 8, 20]


@pytest.mark.parametrize(("dtype", "leaves_held"), [(np.float32, 1), (ml_dtypes.bfloat16, 1.2)])
def test_host_memory_peaks_at_one_leaf(tmp_path, dtype, leaves_held):
    """Stacked leaves of 10 x 1 MB as placed; a cast holds one tensor of the file besides."""
    size = 10**6 // np.dtype(dtype).itemsize
    tensors = {f"l{i}.e{e}": np.zeros(size, np.float32) for i in range(3) for e in range(10)}
    checkpoint = write_checkpoint(tmp_path, tensors)
    del tensors
    abstract = {f"l{i}": jax.ShapeDtypeStruct((10, size), dtype) for i in range(3)}
    plan = plan_tree(
        abstract,
        lambda path: [f"{path[0]}.e{e}" for e in range(10)],
        place=lambda host: host.shape,  # stands for a device that takes the bytes away
    )
    tracemalloc.start()
    load_trees(checkpoint, [plan])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < leaves_held * 10e6 + 1e5


# --- Parts of tensors --------------------------------------------------------------------------


def parts_of_one_tensor(path: tuple[str, ...]) -> str | Part:
    """Of a tensor "both" [3, 4, 5]: its even and odd rows, the latter transposed."""
    views = {
        "even": lambda tensor: tensor[:, ::2],
        "odd": lambda tensor: tensor[:, 1::2].swapaxes(1, 2),
    }
    return Part("both", (3, 4, 5), views[path[0]]) if path[0] in views else path[0]


def abstract_parts(dtype: jnp.dtype = jnp.float32) -> dict:
    shapes = {"even": (3, 2, 5), "middle": (2,), "odd": (3, 5, 2)}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_parts_of_a_tensor_become_leaves(tmp_path, dtype):
    both = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    checkpoint = write_checkpoint(tmp_path, {"both": both, "middle": np.zeros(2, np.float32)})
    tree = load_tree(checkpoint, abstract_parts(), parts_of_one_tensor, dtype=dtype)
    assert {leaf.dtype for leaf in tree.values()} == {jnp.dtype(dtype)}
    for layer in range(3):
        for row in range(2):
            np.testing.assert_array_equal(tree["even"][layer, row], both[layer, 2 * row])
            np.testing.assert_array_equal(tree["odd"][layer, :, row], both[layer, 2 * row + 1])


def test_a_tensor_of_several_leaves_is_read_once(tmp_path, monkeypatch):
    read, names = TensorEntry.read_into, []

    def counted(entry, out):
        names.append(entry.name)
        read(entry, out)

    monkeypatch.setattr(TensorEntry, "read_into", counted)
    tensors = {"both": np.ones((3, 4, 5), np.float32), "middle": np.zeros(2, np.float32)}
    load_tree(write_checkpoint(tmp_path, tensors), abstract_parts(), parts_of_one_tensor)
    assert names == ["both", "middle"]


def test_a_part_asks_for_the_shape_of_the_whole_tensor(tmp_path):
    tensors = {"both": np.ones((3, 5, 4), np.float32), "middle": np.zeros(2, np.float32)}
    checkpoint = write_checkpoint(tmp_path, tensors)
    with pytest.raises(UserError, match=r"both has the shape \[3, 5, 4\], expected \[3, 4, 5\]"):
        load_tree(checkpoint, abstract_parts(), parts_of_one_tensor, place=refuse_to_place)


def test_host_memory_of_parts_peaks_at_a_tensor_and_a_leaf(tmp_path):
    """Three tensors of 8 MB, of two leaves of 4 MB each."""
    tensors = {f"t{i}": np.zeros((4, 2, 10**6), np.uint8) for i in range(3)}
    checkpoint = write_checkpoint(tmp_path, tensors)
    del tensors
    leaf = jax.ShapeDtypeStruct((4, 1, 10**6), np.uint8)
    plan = plan_tree(
        {side: {f"t{i}": leaf for i in range(3)} for side in ("even", "odd")},
        lambda path: Part(path[1], (4, 2, 10**6), lambda t: t[:, int(path[0] == "odd") :: 2]),
        place=lambda host: host.shape,  # stands for a device that takes the bytes away
    )
    tracemalloc.start()
    load_trees(checkpoint, [plan])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12e6 + 1e5
