"""Experts in pinned host memory: packed without loss, read without a second copy, within limits."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.models.experts import abstract_bank, bank_weights, resident_bank
from acceptmoe_jax.models.families import target_config
from acceptmoe_jax.models.published import PUBLISHED
from acceptmoe_jax.offload import host_store
from acceptmoe_jax.offload.host_store import ExpertLayout, HostStore, check_host_memory
from acceptmoe_jax.weights.checkpoint import Checkpoint
from acceptmoe_jax.weights.loading import Part, TreePlan, load_trees, plan_tree
from acceptmoe_jax.weights.safetensors_io import TensorEntry, save_sharded
from acceptmoe_jax.weights.targets import plan_target
from tests import tiny_banks

MB, GIB = 10**6, 1 << 30


def leaf_bits(store: HostStore, layer: int, expert: int) -> list[bytes]:
    record = np.asarray(store.layers[layer][expert])
    return [leaf.tobytes() for leaf in store.layout.views(record)]


# --- Records -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny_banks.FORMATS)
def test_every_expert_is_packed_bit_for_bit_wherever_its_slot_is(name):
    banks = [None, tiny_banks.bank(name, 1), tiny_banks.bank(name, 2)]
    store = HostStore.from_banks(banks)
    assert list(store.layers) == [1, 2]
    for layer, records in store.layers.items():
        slot_of = np.asarray(banks[layer].slot_of)
        assert len(records) == tiny_banks.EXPERTS
        for expert in range(tiny_banks.EXPERTS):
            expected = tiny_banks.expert_bits(banks[layer], slot_of[expert])
            assert leaf_bits(store, layer, expert) == expected


@pytest.mark.parametrize("name", tiny_banks.FORMATS)
def test_a_record_is_unpacked_on_the_device_bit_for_bit(name):
    bank = tiny_banks.bank(name, 3)
    store = HostStore.from_banks([bank])
    on_device = jnp.asarray(np.asarray(store.layers[0][5]))
    leaves = jax.jit(store.layout.unpack)(on_device)
    weights = jax.tree.leaves(bank_weights(bank))
    assert [(leaf.shape, leaf.dtype) for leaf in leaves] == [
        (leaf.shape[1:], leaf.dtype) for leaf in weights
    ]
    expected = tiny_banks.expert_bits(bank, bank.slot_of[5])
    assert [np.asarray(leaf).tobytes() for leaf in leaves] == expected


def test_a_record_is_an_array_of_its_own_in_pinned_memory():
    store = HostStore.from_banks([tiny_banks.bank("MXFP4 with bfloat16 biases", 4)])
    assert store.layout.dtype == jnp.uint8
    for record in store.layers[0]:
        assert record.sharding.memory_kind == "pinned_host"
        assert record.nbytes == store.layout.nbytes
        assert record.ndim == 1
    assert store.nbytes == tiny_banks.EXPERTS * store.layout.nbytes
    assert store.records(0, [4, 2]) == [store.layers[0][4], store.layers[0][2]]


def test_leaves_do_not_overlap_in_a_record():
    layout = HostStore.from_banks([tiny_banks.bank("bfloat16 with float32 biases", 5)]).layout
    used = [range(place.begin, place.begin + place.nbytes) for place in layout.places]
    assert sum(map(len, used)) == len(set().union(*used)) < layout.nbytes
    assert max(map(max, used)) < layout.nbytes


@pytest.mark.parametrize(
    ("name", "nbytes"), [("qwen3-30b-a3b", 9_437_184), ("gpt-oss-120b", 13_236_480)]
)
def test_a_published_expert_has_no_gaps(name, nbytes):
    published = PUBLISHED[name]
    config = target_config(published.target, name)
    bank = abstract_bank(config, jnp.bfloat16, packed=published.mxfp4)
    layout = ExpertLayout.of(bank_weights(bank))
    assert layout.nbytes == nbytes == sum(place.nbytes for place in layout.places)


def test_layers_that_differ_in_shape_share_no_store():
    banks = [tiny_banks.bank("float32", 1), tiny_banks.bank("bfloat16", 2)]
    with pytest.raises(ValueError, match="the experts of layers 0 and 1 differ in format"):
        HostStore.from_banks(banks)


# --- Checkpoints -------------------------------------------------------------------------------


CHECKPOINTS = ("qwen3_moe_norm", "gpt_oss_mxfp4", "gpt_oss_converted")


def planned(checkpoint: Checkpoint, dtype: jnp.dtype) -> dict[int, TreePlan]:
    """Layer -> the plan of its bank."""
    config = target_config(checkpoint.config, checkpoint.config_file)
    plans = plan_target(checkpoint, config, dtype)
    return dict(zip(config.moe_layers, plans[1:], strict=True))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])  # one of them is the file's
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_is_read_as_the_loader_reads_it(data_dir, name, dtype):
    checkpoint = Checkpoint.open(data_dir / name)
    plans, read = planned(checkpoint, dtype), []
    loaded = load_trees(checkpoint, list(plans.values()), ignore=checkpoint.entries)
    store = HostStore.from_checkpoint(checkpoint, plans, read.append)
    assert list(store.layers) == list(plans)
    assert sum(read) == store.nbytes
    for records, weights, layer in zip(store.layers.values(), loaded, plans, strict=True):
        bank = resident_bank(weights, len(records))
        assert len(records) == bank.down.shape[0]
        for expert in range(len(records)):
            assert leaf_bits(store, layer, expert) == tiny_banks.expert_bits(bank, expert)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_byte_of_the_experts_is_read_once(data_dir, monkeypatch, name):
    checkpoint = Checkpoint.open(data_dir / name)
    plans = planned(checkpoint, jnp.float32)
    read_into, ranges = TensorEntry.read_into, []

    def recorded(entry, out):
        ranges.append((str(entry.file), entry.begin, entry.end))
        read_into(entry, out)

    monkeypatch.setattr(TensorEntry, "read_into", recorded)
    HostStore.from_checkpoint(checkpoint, plans)
    keys = {key for plan in plans.values() for leaf in plan.leaves for key in leaf.keys}
    assert len(set(ranges)) == len(ranges)
    assert sum(end - begin for _, begin, end in ranges) == sum(
        checkpoint.entries[key].nbytes for key in keys
    )


def test_layers_in_different_formats_are_refused_before_any_is_read(data_dir, monkeypatch):
    checkpoint = Checkpoint.open(data_dir / "qwen3_moe_norm")
    plans = planned(checkpoint, jnp.float32)
    plans[2] = planned(checkpoint, jnp.bfloat16)[2]
    monkeypatch.setattr(TensorEntry, "read_into", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(UserError, match="model.safetensors: the experts of layers 0 and 2 differ"):
        HostStore.from_checkpoint(checkpoint, plans)


@pytest.mark.parametrize(("interleaved", "experts_held"), [(False, 1), (True, 1 + 2 / 3)])
def test_one_expert_at_a_time_is_held_beside_what_is_pinned(
    tmp_path, monkeypatch, interleaved, experts_held
):
    """Experts of 3 MB, their gate and up in one tensor or not; pinned memory stands outside."""
    experts, matrices = 6, {"gate": 0, "up": 1, "down": None}
    if interleaved:
        tensors = {"gate_up": (experts, 2, MB), "down": (experts, MB)}
    else:
        tensors = {f"{matrix}.{e}": (MB,) for matrix in matrices for e in range(experts)}
    save_sharded(tmp_path, {key: np.ones(shape, np.uint8) for key, shape in tensors.items()})
    (tmp_path / "config.json").write_text("{}")

    def names(path):
        row = matrices[path[0]]
        if not interleaved:
            return [f"{path[0]}.{e}" for e in range(experts)]
        if row is None:
            return path[0]
        return Part("gate_up", (experts, 2, MB), lambda tensor: tensor[:, row])

    abstract = {matrix: jax.ShapeDtypeStruct((experts, MB), jnp.uint8) for matrix in matrices}
    plan = plan_tree(abstract, names)
    checkpoint = Checkpoint.open(tmp_path)
    monkeypatch.setattr(host_store, "_pin", lambda record: record.sum())
    tracemalloc.start()
    store = HostStore.from_checkpoint(checkpoint, {0: plan})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert store.layers[0] == (3 * MB,) * experts
    assert 3 * MB < peak < experts_held * 3 * MB + MB / 10


def test_the_cpu_pins_the_buffer_that_was_filled():
    record = HostStore.from_banks([tiny_banks.bank("float32", 6)]).layout.empty_record()
    assert host_store._pin(record).unsafe_buffer_pointer() == record.ctypes.data


# --- Limits ------------------------------------------------------------------------------------


def test_the_cpu_pins_any_amount(monkeypatch):
    monkeypatch.setenv(host_store.HOST_LIMIT, "1")
    check_host_memory(1000 * GIB)


def test_gpus_pin_the_published_experts_by_default(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv(host_store.HOST_LIMIT, raising=False)
    check_host_memory(36 * 128 * 13_236_480)
    check_host_memory(48 * 128 * 9_437_184)


def test_more_than_xla_pins_is_refused_with_the_variable_that_raises_the_limit(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv(host_store.HOST_LIMIT, raising=False)
    message = "take 60.0 GiB .* XLA would pin 64 GiB: set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=66 "
    with pytest.raises(UserError, match=message):
        check_host_memory(60 * GIB)
    monkeypatch.setenv(host_store.HOST_LIMIT, "66")
    check_host_memory(60 * GIB)
    monkeypatch.setenv(host_store.HOST_LIMIT, "plenty")
    with pytest.raises(UserError, match="LIMIT_GB=plenty is no whole number"):
        check_host_memory(GIB)


def test_experts_beyond_the_limit_are_refused_before_any_is_read(data_dir, monkeypatch):
    checkpoint = Checkpoint.open(data_dir / "qwen3_moe_norm")
    plans = planned(checkpoint, jnp.float32)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv(host_store.HOST_LIMIT, "0")
    monkeypatch.setattr(TensorEntry, "read_into", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(UserError, match="XLA would pin 0 GiB"):
        HostStore.from_checkpoint(checkpoint, plans)
