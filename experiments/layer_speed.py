"""Times the experts of one MoE layer at real dimensions against the number of used experts.

    python -m experiments.layer_speed --output_dir=runs/layer_speed

One block of 64 rows of a Qwen3-30B-A3B layer (128 experts of 2048 x 768, top-8) is run over 8 to
128 used experts, on the device at hand. `blocks` runs the used experts only, and is the fastest we
have on a CPU for natural sets too, so that its own time at 120 experts is what a small set is
measured against; `dense` runs every expert on every row, whatever the set. Medians over rounds
that visit all set sizes in turn, so that a noisy machine disturbs all alike. On two CPU cores it
takes about a minute and 4 GB.
"""

import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from acceptmoe_jax import reporting
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.files import write_json
from pallas_kernels.masked_expert_gemm import ExpertBank, GatedActivation, masked_expert_gemm

_ROWS = flags.DEFINE_integer("rows", 64, "Rows of the block (tree nodes).", lower_bound=1)
_USED = flags.DEFINE_list("used", ["8", "16", "28", "48", "64", "96", "120", "128"], "Set sizes.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Timed rounds over all set sizes.", lower_bound=1)
_DTYPE = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16"], "Default: float32 on the CPU, bfloat16 elsewhere."
)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where summary.json goes.", required=True)

EXPERTS, TOP_K, WIDTH, EXPERT_WIDTH = 128, 8, 2048, 768  # Qwen3-30B-A3B's config.json


def main() -> None:
    sizes = _set_sizes()
    dtype = jnp.dtype(_DTYPE.value or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    x_TD, bank = _random_layer(dtype)
    runs = {(used, "blocks"): (jax.jit(_blocks), _routing(used)) for used in sizes}
    runs[max(sizes), "dense"] = (jax.jit(_dense), _routing(max(sizes)))  # any set costs it the same
    seconds = {key: [] for key in runs}
    with reporting.progress() as bar:
        task = bar.add_task("layer_speed", total=len(runs) * (_ROUNDS.value + 1))
        for round_ in range(_ROUNDS.value + 1):
            for key, (run, routing) in runs.items():
                begin = time.perf_counter()
                jax.block_until_ready(run(x_TD, bank, routing))
                if round_:  # the first one compiles
                    seconds[key].append(time.perf_counter() - begin)
                bar.advance(task)
    rows = [
        {
            "used": used,
            "milliseconds": 1e3 * statistics.median(times),
            "implementation": name,
        }
        for (used, name), times in seconds.items()
    ]
    summary = {"rows": rows, "device": reporting.device_description(), "dtype": dtype.name}
    write_json(pathlib.Path(_OUTPUT_DIR.value) / "summary.json", summary)
    title = (
        f"Measured on {summary['device']}, {dtype.name}: experts of one Qwen3-30B-A3B layer, "
        f"{_ROWS.value} rows, medians of {_ROUNDS.value}"
    )
    formats = {"used": "d", "milliseconds": ".1f", "implementation": ""}
    reporting.print_table(title, rows, formats)


def _set_sizes() -> list[int]:
    try:
        sizes = [int(text) for text in _USED.value]
    except ValueError:
        raise UserError(f"--used: {_USED.value} are not all numbers") from None
    if not sizes or not all(TOP_K <= size <= EXPERTS for size in sizes):
        raise UserError(f"--used: sizes should lie between {TOP_K} and {EXPERTS}")
    return sizes


def _random_layer(dtype: jnp.dtype) -> tuple[jax.Array, ExpertBank]:
    rows, *keys = jax.random.split(jax.random.key(0), 4)
    shapes = {
        "gate": (EXPERTS, EXPERT_WIDTH, WIDTH),
        "up": (EXPERTS, EXPERT_WIDTH, WIDTH),
        "down": (EXPERTS, WIDTH, EXPERT_WIDTH),
    }
    weights = {
        name: 0.02 * jax.random.normal(key, shape, dtype)
        for key, (name, shape) in zip(keys, shapes.items())
    }
    slot_of = jnp.arange(EXPERTS, dtype=jnp.int32)
    x_TD = jax.random.normal(rows, (_ROWS.value, WIDTH), dtype)
    return x_TD, ExpertBank(**weights, slot_of=slot_of)


def _routing(used: int) -> dict[str, jax.Array]:
    """Random routing of the rows that uses exactly `used` experts."""
    rng = np.random.default_rng(used)
    chosen = rng.permutation(EXPERTS)[:used]
    picks = np.stack([rng.permutation(used)[:TOP_K] for _ in range(_ROWS.value)])
    # Every expert at least once: the first picks of the first rows are dealt in turn.
    for first in range(0, used, TOP_K):
        row = first // TOP_K
        if row < _ROWS.value:
            dealt = np.arange(first, first + TOP_K) % used
            picks[row] = dealt
    ids = chosen[picks]
    present = np.unique(ids)
    used_ids = np.full(EXPERTS, EXPERTS)
    used_ids[: present.size] = present
    return {
        "expert_ids": jnp.asarray(ids, jnp.int32),
        "weights": jnp.full(ids.shape, 1 / TOP_K, jnp.float32),
        "used_ids": jnp.asarray(used_ids, jnp.int32),
        "used_count": jnp.int32(present.size),
    }


def _blocks(x_TD, bank, routing):
    return masked_expert_gemm(
        x_TD,
        bank,
        routing["expert_ids"],
        routing["weights"],
        routing["used_ids"],
        routing["used_count"],
        activation=GatedActivation(),
        implementation="blocks",
    )


def _dense(x_TD, bank, routing):
    """Every expert on every row, with the weights that are not picked at zero."""
    weights_TE = jnp.zeros((_ROWS.value, EXPERTS), x_TD.dtype)
    rows = jnp.arange(_ROWS.value)[:, None]
    weights_TE = weights_TE.at[rows, routing["expert_ids"]].set(routing["weights"])
    gate = jnp.einsum("td,efd->etf", x_TD, bank.gate)
    up = jnp.einsum("td,efd->etf", x_TD, bank.up)
    return jnp.einsum("te,etf,edf->td", weights_TE, GatedActivation()(gate, up), bank.down)


if __name__ == "__main__":
    reporting.run_program(main)
