"""The published comparison with experts in host memory: speed, traffic and waiting, by method.

    python -m experiments.offload \
        --target=checkpoints/pocket-qwen3-moe --draft=checkpoints/pocket-qwen3-moe-eagle3 \
        --dtype=float32 --link_gbps=0.5 --output_dir=runs/offload

Each layer has slots for a share of its experts (48 of 128 by default, as published), LRU. Methods:
`native` (Standard SD), `moe_spec` at acceptmoe's mean set size, `acceptmoe_no_pruning`, and
`acceptmoe`, which prunes what is not resident. On a CPU the real link is a copy in memory;
--link_gbps adds a simulated one, and every table and file says so. The default prompts are held-out
pocket tasks; each begins with no expert on the device.

Prints the measured table and, modelled, what the same shares of experts used and missed mean at
full size, and how the cost model compares with the published run; writes `summary.json`,
`traffic.png` and `residency.png`. Some four minutes on two CPU cores.
"""

import pathlib
from typing import Any

import numpy as np
from absl import flags

from acceptmoe_jax import reporting
from acceptmoe_jax.files import write_atomically, write_json
from acceptmoe_jax.runtime import offload_model
from acceptmoe_jax.runtime.offload_plots import residency_timeline, traffic_bars
from experiments import engine_flags, method_flags, model_flags, prompt_flags
from pallas_kernels.devices import DEVICES

_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where the files go.", required=True)

_PUBLISHED_SHARE = 48 / 128
_MEASURED = {
    "method": "",
    "tokens_per_second": ".1f",
    "accepted_length": ".2f",
    "h2d_megabytes_per_token": ".3f",
    "hit_rate": ".1%",
    "wait_share": ".1%",
    "waves": ".2f",
    "eligible": ".1f",
    "used": ".1f",
    "agreement_with_native": ".2%",
    "kl_on_accepted_rows": ".4f",
}
_FULL_SIZE = {
    "method": "",
    "tokens_per_second": ".1f",
    "wait_share": ".1%",
    "speed_against_first": ".2f",
}
_DEVICE = DEVICES["rtx-5090"]
_PREDICTED = {
    "name": "",
    "native_wait_share": ".0%",
    "rest_milliseconds": ".1f",
    "wait_share": ".1%",
    "wait_share_miss": ".1%",
    "speed_ratio": ".2f",
    "speed_ratio_miss": "+.1%",
}


def main() -> None:
    names = method_flags.methods(
        model_flags.DRAFT.value, default=("native", "moe_spec", "acceptmoe_no_pruning", "acceptmoe")
    )
    prompts = list(prompt_flags.prompts().values())
    engine = model_flags.load_engine(default_slot_share=_PUBLISHED_SHARE)
    timeline = _Timeline(engine.runner)
    _, summaries = method_flags.decode(engine, names, prompts, on_forward=timeline.observe)
    where = engine_flags.measured_on(engine)
    predictions = [
        vars(offload_model.predict(run, share))
        for share in offload_model.NATIVE_WAIT_SHARES
        for run in offload_model.PUBLISHED_RUNS
    ]
    target, head = method_flags.full_size(engine)
    full_size = _full_size_rows(engine, summaries, target, head)
    output = pathlib.Path(_OUTPUT_DIR.value)
    summary = {
        "methods": summaries,
        "device": reporting.device_description(),
        "dtype": engine_flags.DTYPE.value,
        "target": model_flags.TARGET.value,
        "draft": model_flags.DRAFT.value,
        "modelled_at_full_size": full_size,
        "modelled_against_the_paper": predictions,
        "versions": reporting.versions(),
    } | engine_flags.offload_facts(engine)
    write_json(output / "summary.json", summary)
    write_atomically(output / "traffic.png", traffic_bars(summaries, where))
    write_atomically(
        output / "residency.png", residency_timeline(timeline.owners, engine.offload.slots, where)
    )
    _show(summaries, where)
    title = f"Modelled, not measured: the same shares in {target.name} on an {_DEVICE.name}"
    reporting.print_table(title, full_size, _FULL_SIZE)
    _show_predictions(predictions)
    print(f"Written: {output / 'summary.json'}")


class _Timeline:
    """Who owns each slot of the middle MoE layer after every verification, by method."""

    def __init__(self, runner):
        layers = sorted(runner.tables)
        self._table = runner.tables[layers[len(layers) // 2]]
        self.owners: dict[str, list[list[int]]] = {}

    def observe(self, method: str) -> None:
        owners = [-1 if slot.expert is None else slot.expert for slot in self._table.slots]
        self.owners.setdefault(method, []).append(owners)


def _full_size_rows(engine, summaries, target, head) -> list[dict[str, Any]]:
    experts = engine.model.setup.target.num_experts
    rows = []
    for method, summary in summaries.items():
        loads = offload_model.MeasuredLoads(
            summary["used"] / experts,
            summary["misses"] / experts,
            summary["waves"],
            summary["accepted_length"],
        )
        speed, waiting = offload_model.tokens_per_second(loads, target, head, _DEVICE)
        rows.append(
            {
                "method": method,
                "tokens_per_second": speed,
                "wait_share": waiting,
                "speed_against_first": speed / rows[0]["tokens_per_second"] if rows else 1.0,
            }
        )
    return rows


def _show(summaries, where: str) -> None:
    rows: list[dict[str, Any]] = [
        {"method": name, "h2d_megabytes_per_token": summary["h2d_bytes_per_token"] / 1e6} | summary
        for name, summary in summaries.items()
    ]
    reporting.print_table(f"Measured on {where}", rows, _MEASURED)


def _show_predictions(predictions) -> None:
    reporting.print_table(
        "Modelled, not measured: the published run, from Standard SD's share of waiting",
        predictions,
        _PREDICTED,
    )
    ratios = {
        share: np.mean([p["speed_ratio"] for p in predictions if p["native_wait_share"] == share])
        for share in offload_model.NATIVE_WAIT_SHARES
    }
    for share, ratio in ratios.items():
        print(
            f"Fitted on {share:.0%} of waiting, AcceptMoE is predicted at {ratio:.2f}x Standard SD "
            f"({ratio / offload_model.SPEED_RATIO - 1:+.1%} of the published "
            f"{offload_model.SPEED_RATIO}x)."
        )


if __name__ == "__main__":
    reporting.run_program(main)
