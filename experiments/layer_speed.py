"""Times the experts of one MoE layer at real dimensions against the number of used experts.

    python -m experiments.layer_speed --output_dir=runs/layer_speed

One block of 64 rows of a Qwen3-30B-A3B layer (128 experts of 2048 x 768, top-8) is run over 8 to
128 used experts, on the device at hand and with its implementation. That of a CPU, `blocks`, runs
the used experts only, and is the fastest we have there for natural sets too, so that its own time
at 120 experts is what a small set is measured against; `dense` runs every expert on every row,
whatever the set. Medians over rounds that visit all set sizes in turn, so that a noisy machine
disturbs all alike. On two CPU cores it takes about a minute and 4 GB. `experiments.kernel_speed`
times every op and implementation, at more shapes.
"""

import pathlib

import jax
from absl import flags

from acceptmoe_jax import reporting
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.files import write_json
from experiments.size_flags import set_sizes
from pallas_kernels import speed
from pallas_kernels.implementations import implementations
from pallas_kernels.masked_expert_gemm.cases import SHAPES
from pallas_kernels.measure import layered_seconds

_ROUNDS = flags.DEFINE_integer("rounds", 5, "Timed rounds over all set sizes.", lower_bound=1)
_DTYPE = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16"], "Default: float32 on the CPU, bfloat16 elsewhere."
)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where summary.json goes.", required=True)

_NAME = "qwen3-30b-a3b"
_SHAPE = SHAPES[_NAME]


def main() -> None:
    sizes = set_sizes(_SHAPE)
    dtype = _DTYPE.value or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    name = implementations().experts
    bench = speed.bench("masked_expert_gemm", _NAME, dtype, sizes)
    variants = {(load.used, name): (bench.function(name), load.layers) for load in bench.loads}
    any_set = bench.loads[-1]
    variants[any_set.used, speed.DENSE] = (bench.function(speed.DENSE), any_set.layers)
    with reporting.progress() as bar:
        task = bar.add_task("layer_speed", total=len(variants) * (_ROUNDS.value + 1))
        seconds, errors = layered_seconds(variants, _ROUNDS.value, lambda: bar.advance(task))
    if errors:
        raise UserError("; ".join(f"{key[1]}: {error}" for key, error in errors.items()))
    rows = [
        {"used": used, "milliseconds": 1e3 * taken, "implementation": implementation}
        for (used, implementation), taken in seconds.items()
    ]
    summary = {"rows": rows, "device": reporting.device_description(), "dtype": dtype}
    write_json(pathlib.Path(_OUTPUT_DIR.value) / "summary.json", summary)
    title = (
        f"Measured on {summary['device']}, {dtype}: experts of one Qwen3-30B-A3B layer, "
        f"{_SHAPE.rows} rows, medians of {_ROUNDS.value}"
    )
    formats = {"used": "d", "milliseconds": ".3f", "implementation": ""}
    reporting.print_table(title, rows, formats)


if __name__ == "__main__":
    reporting.run_program(main)
