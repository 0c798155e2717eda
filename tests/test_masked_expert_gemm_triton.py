"""masked_expert_gemm in Triton: named shapes, what it loads, and how it decodes MXFP4."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.masked_expert_gemm import bank as banks, fp4, masked_expert_gemm, triton
from pallas_kernels.masked_expert_gemm.cases import SHAPES, random_arguments
from pallas_kernels.mxfp4 import Mxfp4, dequantise

EVERYDAY = [
    ("awkward", "float32"),
    ("awkward", "bfloat16"),
    ("awkward-blocks", "mxfp4"),
    ("pocket-gpt-oss", "mxfp4"),
]
OTHERS = [
    pytest.param(name, dtype, marks=pytest.mark.slow)
    for name, shape in SHAPES.items()
    for dtype in shape.dtypes
    if (name, dtype) not in EVERYDAY
]
# Largest error and that of 99.9 % of the numbers, as fractions of the largest output. In bfloat16
# the rows, what the activation makes of them, and the output are rounded to 8 bits.
TOLERANCES = {"float32": (1e-6, 5e-7), "bfloat16": (8e-3, 4e-3)}


@pytest.mark.parametrize("name, dtype", EVERYDAY + OTHERS)
def test_named_shapes_match_the_plain_product_in_float32(name, dtype):
    """With as many slots as experts are used, permuted; the others have none."""
    shape = SHAPES[name]
    used = min(shape.used, 2 * shape.top_k)
    arguments = random_arguments(jax.random.key(1), shape, dtype, used=used, slots=used)
    actual = _run(*arguments, activation=shape.activation)
    x_TD, bank, *routing = arguments
    assert actual.dtype == x_TD.dtype
    numbers = {m: banks.numbers(getattr(bank, m)).astype(jnp.float32) for m in _MATRICES}
    plain = jax.jit(
        functools.partial(masked_expert_gemm, activation=shape.activation, implementation="blocks")
    )
    expected = plain(x_TD.astype(jnp.float32), bank.replace(**numbers), *routing)
    error = np.abs(np.asarray(actual, np.float32) - expected) / np.abs(expected).max()
    largest, most = TOLERANCES[x_TD.dtype.name]
    assert error.max() <= largest
    assert np.quantile(error, 0.999) <= most


@pytest.mark.parametrize("name, dtype", [("awkward", "float32"), ("awkward-blocks", "mxfp4")])
def test_each_tile_of_a_used_expert_is_loaded_once_and_no_other(name, dtype, monkeypatch):
    shape = SHAPES[name]
    slots = shape.experts + 2
    arguments = random_arguments(jax.random.key(2), shape, dtype, slots=slots)
    counts = collections.Counter()
    seen = []  # the matrices, as the kernels first ask for them
    load = triton.load_weights

    def counted(ref, slot, out, column, wanted=True):
        matrix = next((n for n, other in enumerate(seen) if other is ref), len(seen))
        if matrix == len(seen):
            seen.append(ref)

        def count(slot, out, column, wanted):
            if wanted:
                counts[matrix, int(slot), int(out), int(column)] += 1

        jax.debug.callback(count, slot, out[0], column[0], wanted)
        return load(ref, slot, out, column, wanted)

    monkeypatch.setattr(triton, "load_weights", counted)
    jax.block_until_ready(_run(*arguments, activation=shape.activation))
    jax.effects_barrier()

    bank, used_ids, used_count = arguments[1], arguments[4], int(arguments[5])
    used_slots = np.asarray(bank.slot_of)[np.asarray(used_ids)[:used_count]].tolist()
    per_matrix = collections.Counter(key[0] for key in counts)
    expected = [
        used_count * tiles
        for matrices in ((bank.gate, bank.up), (bank.down,))
        for tiles in _tiles(matrices, arguments[0].dtype)
    ]
    assert set(counts.values()) == {1}
    assert {key[1] for key in counts} == set(used_slots)
    assert sorted(per_matrix.values()) == sorted(expected)


def test_the_assembly_decodes_every_code_at_every_scale():
    words = np.arange(1 << 16, dtype=np.uint32)
    # What scales below 2 hold is partly subnormal, which the reference flushes on a CPU.
    for scale in (2, 120, 127, 128, 254, 255):
        _check_assembly(words, np.full(words.shape, scale))
    codes = np.arange(16, dtype=np.uint32) * 0x1111
    scales = np.arange(2, 256)
    _check_assembly(np.tile(codes, scales.size), np.repeat(scales, codes.size))


def test_interpret_mode_decodes_every_word():
    words = jnp.arange(1 << 16, dtype=jnp.uint16).reshape(256, 256)
    scales = jnp.asarray(np.random.default_rng(3).integers(1, 256, (256, 32)), jnp.uint8)
    planes = jnp.stack(fp4.decode(words, scales, interpret=True), axis=-1)
    blocks = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(256, 32, 16)
    expected = dequantise(Mxfp4(blocks, scales))
    np.testing.assert_array_equal(planes.astype(jnp.float32).reshape(256, -1), expected)


_MATRICES = ("gate", "up", "down")


def _run(*arguments, activation):
    run = functools.partial(
        masked_expert_gemm, activation=activation, implementation="triton", interpret=True
    )
    return jax.jit(run)(*arguments)


def _tiles(matrices, dtype):
    """Tiles of an expert, of each matrix and each matrix of scales."""
    tiles = triton.tiles_for(matrices, dtype)
    _, out, into = matrices[0].shape
    packed = isinstance(matrices[0], Mxfp4)
    steps = -(-into // (tiles.step * (fp4.PLANES if packed else 1)))
    return [-(-out // tiles.out) * steps] * (len(matrices) * (2 if packed else 1))


def _check_assembly(words, scales):
    """Two words a register, each with the factor of its scale, as the kernel passes them."""
    factors = np.where(scales == 255, 0x7FC0, scales << 7).astype(np.uint32)
    blocks = np.zeros((words.size, 1, 16), np.uint8)
    blocks[:, 0, :2] = words.astype("<u2").view(np.uint8).reshape(-1, 2)
    packed = Mxfp4(jnp.asarray(blocks), jnp.asarray(scales[:, None], jnp.uint8))
    expected = np.asarray(dequantise(packed))[:, : fp4.PLANES]
    for plane in range(fp4.PLANES):
        registers = {"$1": _pair(words), "$2": _pair(factors)}
        pairs = _execute(fp4.assembly(plane), registers)["$0"]
        halves = np.stack([pairs & 0xFFFF, pairs >> 16], axis=-1).reshape(-1).astype(np.uint16)
        actual = halves.view(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(actual, expected[:, plane])


def _pair(halves):
    return halves[::2] | halves[1::2] << 16


def _execute(assembly, registers):
    """Runs the few PTX instructions that the assembly has, on arrays of registers."""
    operations = {
        "shl.b32": lambda a, b: a << b,
        "shr.b32": lambda a, b: a >> b,
        "and.b32": lambda a, b: a & b,
        "or.b32": lambda a, b: a | b,
        "mov.b32": lambda a: a,
        "mul.rn.bf16x2": _multiply,
    }
    for line in re.sub(r"[{}]|\.reg[^;]*;", "", assembly).split(";"):
        if line.strip():
            name, result, *operands = re.split(r"[,\s]+", line.strip())
            values = [registers[o] if o in registers else np.uint32(int(o, 0)) for o in operands]
            registers[result] = operations[name](*values)
    return registers


def _multiply(a, b):
    """Products of bfloat16 pairs, subnormals kept."""
    halves = []
    for shift in (0, 16):
        x, y = ((np.asarray(v) >> shift << 16).astype(np.uint32).view(np.float32) for v in (a, b))
        with np.errstate(over="ignore", invalid="ignore"):
            product = (x * y).astype(ml_dtypes.bfloat16)
        halves.append(product.view(np.uint16).astype(np.uint32))
    return halves[0] | halves[1] << 16
