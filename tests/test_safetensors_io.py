"""The safetensors reader and writer: dtypes, bad files, interchange with the package."""

import json
import pathlib
import struct

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.weights.safetensors_io import DTYPES, SafetensorsFile, save_file, save_sharded


def mixed_tensors() -> dict[str, np.ndarray]:
    """What one file of a quantised model and a draft head holds, and the odd shapes."""
    rng = np.random.default_rng(0)
    return {
        "weight": rng.normal(size=(5, 3)).astype(ml_dtypes.bfloat16),
        "blocks": rng.integers(0, 256, (2, 7), np.uint8),
        "d2t": np.array([0, 2, 2, -(2**40)], np.int64),
        "t2d": np.array([True, False, True]),
        "half": rng.normal(size=(2, 1, 3)).astype(np.float16),
        "single": rng.normal(size=(4,)).astype(np.float32),
        "scalar": np.array(2.5, np.float64),
        "empty": np.zeros((0, 3), np.int32),
    }


def write_raw(path: pathlib.Path, header: dict | bytes, data: bytes) -> pathlib.Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


def test_every_tensor_of_a_mixed_file_keeps_its_own_dtype(tmp_path):
    tensors = mixed_tensors()
    save_file(tmp_path / "a.safetensors", tensors)
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert set(file.entries) == set(tensors)
    for name, tensor in tensors.items():
        assert_same(file.read(name), tensor)


@pytest.mark.parametrize("code", DTYPES)
def test_every_supported_dtype_survives_a_round_trip(tmp_path, code):
    tensor = np.array([[0, 1, 1], [1, 0, 1]]).astype(DTYPES[code])
    save_file(tmp_path / "a.safetensors", {"x": tensor})
    header = (tmp_path / "a.safetensors").read_bytes()[8:]
    assert f'"dtype":"{code}"'.encode() in header
    assert_same(SafetensorsFile(tmp_path / "a.safetensors").read("x"), tensor)


def test_files_of_the_package_are_read(tmp_path):
    safetensors.numpy.save_file(mixed_tensors(), tmp_path / "a.safetensors", {"format": "np"})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert file.metadata == {"format": "np"}
    for name, tensor in mixed_tensors().items():
        assert_same(file.read(name), tensor)


def test_the_package_reads_our_files(tmp_path):
    save_file(tmp_path / "a.safetensors", mixed_tensors())
    found = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    for name, tensor in mixed_tensors().items():
        assert_same(found[name], tensor)


def test_a_transposed_array_is_saved_as_it_reads_not_as_it_lies(tmp_path):
    tensor = np.arange(6, dtype=np.float32).reshape(2, 3).T
    save_file(tmp_path / "a.safetensors", {"x": tensor})
    np.testing.assert_array_equal(SafetensorsFile(tmp_path / "a.safetensors").read("x"), tensor)


def test_entries_tell_dtype_shape_and_bytes_without_reading(tmp_path):
    header = {"b": entry([3], 4, 10, "BF16"), "a": entry([2, 2], 0, 4, "U8")}
    path = write_raw(tmp_path / "a.safetensors", header, bytes(range(10)))
    found = SafetensorsFile(path).entries["b"]
    begin = path.stat().st_size - 6
    assert (found.dtype, found.shape) == (ml_dtypes.bfloat16, (3,))
    assert (found.begin, found.end, found.nbytes) == (begin, begin + 6, 6)


def test_the_cpu_backend_adopts_what_was_read_without_a_copy(tmp_path):
    save_file(tmp_path / "a.safetensors", {f"t{n}": np.zeros(n, np.float32) for n in (1, 3, 70)})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    for name in file.entries:
        host = file.read(name)
        assert jax.device_put(host).unsafe_buffer_pointer() == host.ctypes.data


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        ({"k": entry([3], 0, 12)}, 11, "is truncated: k ends at byte"),
        ({"k": entry([3], 0, 8)}, 8, r"k holds 8 bytes, but F32\[3\] takes 12"),
        ({"k": entry([2], 0, 8)}, 9, "1 bytes after its last tensor"),
        ({"k": entry([2], 0, 8), "l": entry([2], 4, 12)}, 12, "l overlaps"),
        ({"k": entry([2], 0, 8), "l": entry([2], 12, 20)}, 20, "l follows a hole"),
        ({"k": entry([2], 4, 12)}, 12, "k follows a hole"),
        ({"k": entry([2], 8, 0)}, 8, "k has the impossible offsets"),
        ({"k": entry([2], -8, 0)}, 8, "k has the impossible offsets"),
        ({"k": entry([-2], 0, 8)}, 8, "the header entry of k is malformed"),
        ({"k": {"dtype": "F32", "shape": [2]}}, 8, "the header entry of k is malformed"),
        ({"k": entry([2], 0, 8, "F33")}, 8, "k has the dtype F33"),
        (b'{"k": 1, "k": 2}', 0, "the key k is listed twice"),
        (b"{k", 0, "bad safetensors header"),
        (b"\xff\xfe", 0, "bad safetensors header"),
        (b"[1]", 0, "bad safetensors header"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, header, data_bytes, message):
    path = write_raw(tmp_path / "bad.safetensors", header, bytes(data_bytes))
    with pytest.raises(UserError, match=message) as error:
        SafetensorsFile(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("size", [0, 7, 8, 40])
def test_a_file_cut_inside_its_header_is_refused(tmp_path, size):
    path = tmp_path / "cut.safetensors"
    save_file(path, mixed_tensors())
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match="cut.safetensors is truncated"):
        SafetensorsFile(path)


def test_a_file_cut_after_it_was_opened_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file(path, {"x": np.zeros(100, np.float32)})
    file = SafetensorsFile(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="x ended before its last byte"):
        file.read("x")


def test_absent_files_and_tensors_are_named(tmp_path):
    with pytest.raises(UserError, match="none.safetensors does not exist"):
        SafetensorsFile(tmp_path / "none.safetensors")
    with pytest.raises(UserError, match="is a directory"):
        SafetensorsFile(tmp_path)
    save_file(tmp_path / "a.safetensors", {"x": np.zeros(2)})
    with pytest.raises(UserError, match="a.safetensors holds no tensor y"):
        SafetensorsFile(tmp_path / "a.safetensors").read("y")


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path):
    save_file(tmp_path / "a.safetensors", {"x": np.ones(2)})
    before = (tmp_path / "a.safetensors").read_bytes()
    with pytest.raises(safetensors.SafetensorError):
        save_file(tmp_path / "a.safetensors", {"x": np.array(["text"])})
    assert (tmp_path / "a.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_shards_keep_the_order_and_the_limit(tmp_path):
    tensors = {f"t{i}": np.full(size, i, np.float32) for i, size in enumerate([2, 1, 9, 1, 2, 1])}
    save_sharded(tmp_path, tensors, max_shard_bytes=12)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = [f"model-0000{i}-of-00004.safetensors" for i in (1, 1, 2, 3, 3, 4)]
    assert index["weight_map"] == dict(zip(tensors, shards))
    assert index["metadata"]["total_size"] == 64
    for name, file in index["weight_map"].items():
        assert_same(SafetensorsFile(tmp_path / file).read(name), tensors[name])


def test_a_save_removes_the_weight_files_of_the_one_before(tmp_path):
    tensors = {f"t{i}": np.full(3, i, np.float32) for i in range(3)}

    def weight_files():
        return sorted(path.name for path in tmp_path.iterdir())

    save_sharded(tmp_path, tensors)
    assert weight_files() == ["model.safetensors"]
    save_sharded(tmp_path, tensors, max_shard_bytes=24)
    assert weight_files() == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    save_sharded(tmp_path, tensors)
    assert weight_files() == ["model.safetensors"]


def test_a_written_file_can_be_read_by_whom_the_umask_allows(tmp_path):
    plain, written = tmp_path / "plain", tmp_path / "written.safetensors"
    plain.touch()
    save_file(written, {"a": np.zeros(3, np.float32)})
    assert written.stat().st_mode == plain.stat().st_mode
