"""Times the implementations of one op side by side, one layer at a named shape.

    python -m experiments.kernel_speed --op=masked_expert_gemm --shape=gpt-oss-120b \
        --output_dir=runs/kernel_speed

The first implementation is what the others' times are compared with. `floor` is the larger of the
bytes at the device's bandwidth and the products at its tensor cores' rate, by its data sheet;
`share of bandwidth` is what the bytes would take, over what was measured. Operands of several
layers take turns, so that a GPU's L2 does not pass for its memory. A GPU takes some ten seconds a
shape; a CPU runs the plain XLA implementations only, and knows neither floor nor share.
"""

import pathlib

import jax
from absl import flags

from acceptmoe_jax import reporting
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.files import write_json
from experiments.size_flags import set_sizes
from pallas_kernels import speed
from pallas_kernels.compat import HAS_MOSAIC
from pallas_kernels.measure import device_of
from pallas_kernels.ops import OPS, Op

_OP = flags.DEFINE_enum("op", None, list(OPS), "The op.", required=True)
_SHAPE = flags.DEFINE_string("shape", "qwen3-30b-a3b", "One of the op's named shapes.")
_IMPLEMENTATIONS = flags.DEFINE_list(
    "implementations", None, "In the order of the table; default: all that run here."
)
_DTYPE = flags.DEFINE_string("dtype", None, "One of the shape's; default: the first of them.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Timed rounds over all variants.", lower_bound=1)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where summary.json goes.", required=True)


def main() -> None:
    op = OPS[_OP.value]
    if _SHAPE.value not in op.shapes:
        raise UserError(f"--shape: {_SHAPE.value!r} is not one of {', '.join(op.shapes)}")
    shape = op.shapes[_SHAPE.value]
    if _DTYPE.value not in (None, *op.dtypes(shape)):
        raise UserError(f"--dtype: {_DTYPE.value!r} is not one of {', '.join(op.dtypes(shape))}")
    sizes = set_sizes(shape) if op.name == "masked_expert_gemm" else ()
    dtype = _DTYPE.value or op.dtypes(shape)[0]
    names = _implementations(op, dtype)
    bench = speed.bench(op.name, _SHAPE.value, dtype, sizes)
    device = device_of(jax.devices()[0].device_kind)
    with reporting.progress() as bar:
        visits = len(bench.loads) * len(names) * (_ROUNDS.value + 1)
        task = bar.add_task("kernel_speed", total=visits)
        rows = speed.speed_rows(
            bench, names, _ROUNDS.value, device, on_visit=lambda: bar.advance(task)
        )
    summary = {
        "rows": rows,
        "device": reporting.device_description(),
        "versions": reporting.versions(),
    }
    write_json(pathlib.Path(_OUTPUT_DIR.value) / "summary.json", summary)
    title = f"Measured on {summary['device']}: a layer, medians of {_ROUNDS.value} rounds"
    reporting.print_table(title, rows, speed.COLUMNS)


def _implementations(op: Op, dtype: str) -> list[str]:
    """Those asked for; all of them must run here."""
    plain, kernels = speed.plain(op.name, dtype), (*op.kernels("triton"), *op.kernels("mosaic"))
    known = [*plain, *kernels]
    on_cpu = jax.default_backend() == "cpu"
    here = [
        name
        for name in known
        if name in plain or not on_cpu and (HAS_MOSAIC or not name.startswith("mosaic"))
    ]
    names = here if _IMPLEMENTATIONS.value is None else _IMPLEMENTATIONS.value
    for name in names:
        if name not in known:
            raise UserError(f"--implementations: {name!r} is not one of {', '.join(known)}")
        if name not in here:
            needs = "a GPU" if on_cpu else "jax 0.11 or newer"
            raise UserError(f"--implementations: {name} needs {needs}; here: {', '.join(here)}")
    if not names:
        raise UserError("--implementations names none")
    return names


if __name__ == "__main__":
    reporting.run_program(main)
