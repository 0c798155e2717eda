"""What a compiled step moves through memory, by its optimised HLO: bytes a stage.

Each instruction of the entry computation reads its operands and writes its result once; what a
cache holds back is not known to it. Of an operand that is only sliced, gathered from or updated in
place, the slice counts. A Pallas kernel is opaque: its operands are not what it reads (a bank
holds experts that nobody uses), so kernels are left out, and counted by their own cases.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2}
_BYTES |= {"f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_ARRAY = re.compile(rf"\b({'|'.join(_BYTES)})\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)$")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_PALLAS = re.compile(r"xla\.gpu\.triton|triton_kernel_call|mosaic_gpu")
# What names or splits values without moving them.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
_SLICES = {"dynamic-slice", "gather", "slice"}


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    size: float  # bytes of its result
    opcode: str
    operands: tuple[str, ...]
    attributes: str


_Computation = dict[str, _Instruction]


def bytes_by_stage(hlo: str, stages: Mapping[str, str]) -> dict[str, float]:
    """Bytes that XLA's own kernels read and write, by the stage that their scope names.

    Args:
      hlo: optimised, as `jax.stages.Compiled.as_text` gives it.
      stages: stage -> regular expression over jax's name stack; the first that is found counts,
        and what none of them knows is "other".
    """
    computations, entry = _parsed(hlo)
    moved: dict[str, float] = collections.defaultdict(float)
    for instruction in computations[entry].values():
        kernel = re.search(
            r"xla\.gpu\.triton|triton_kernel_call|mosaic_gpu", instruction.attributes
        )
        if instruction.opcode in _FREE or kernel:
            continue
        scope = _scope(instruction, computations)
        stage = next((key for key, test in stages.items() if re.search(test, scope)), "other")
        moved[stage] += _moved(instruction, computations[entry], computations)
    return dict(moved)


def _scope(instruction: _Instruction, computations: dict[str, _Computation]) -> str:
    """The instruction's place in jax's name stack, or that of what was fused into it."""
    called = _CALLS.search(instruction.attributes)
    inside = computations[called[1]].values() if called else ()
    scopes = (_SCOPE.search(i.attributes) for i in (instruction, *inside))
    return next((found[1] for found in scopes if found), "")


def _parsed(hlo: str) -> tuple[dict[str, _Computation], str]:
    """(computations by name, the name of the entry)."""
    computations: dict[str, _Computation] = {}
    entry, current = "", {}
    for line in hlo.splitlines():
        if found := _COMPUTATION.match(line):
            current = computations.setdefault(found[1], {})
            entry = found[1] if line.startswith("ENTRY") else entry
        elif found := _INSTRUCTION.match(line):
            name, shape, opcode, operands, attributes = found.groups()
            # A parameter's only operand is its number.
            names = (operands,) if opcode == "parameter" else tuple(_OPERAND.findall(operands))
            current[name] = _Instruction(name, _size(shape), opcode, names, attributes)
    return computations, entry


def _moved(
    instruction: _Instruction, outside: _Computation, computations: dict[str, _Computation]
) -> float:
    if called := _CALLS.search(instruction.attributes):
        inside = computations[called[1]]
        parameters = {int(i.operands[0]): i for i in inside.values() if i.opcode == "parameter"}
        reads = [parameters[at] for at in range(len(instruction.operands))]
    else:
        inside = {name: outside[name] for name in instruction.operands if name in outside}
        inside[instruction.name] = instruction
        reads = [inside[name] for name in instruction.operands if name in inside]
    written = instruction.size
    total = 0.0
    for parameter in reads:
        users = [i for i in inside.values() if parameter.name in i.operands]
        if users and all(i.opcode in _SLICES and i.operands[0] == parameter.name for i in users):
            total += sum(i.size for i in users)
        elif users and all(_updates(i, parameter.name) for i in users):
            update = sum(inside[i.operands[1]].size for i in users if i.operands[1] in inside)
            written += update - parameter.size
        else:
            total += parameter.size
    return total + max(written, 0.0)


def _updates(instruction: _Instruction, name: str) -> bool:
    return instruction.opcode == "dynamic-update-slice" and instruction.operands[0] == name


def _size(shape: str) -> float:
    return sum(
        _BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims in _ARRAY.findall(shape)
    )
