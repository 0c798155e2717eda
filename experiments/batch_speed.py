"""Tokens a second with several prompts at a time, each with its own draft tree and expert sets.

    python -m experiments.batch_speed \
        --target=checkpoints/pocket-qwen3-moe --draft=checkpoints/pocket-qwen3-moe-eagle3 \
        --dtype=float32 --output_dir=runs/batch_speed

A forward reads the union of its prompts' experts once, so a batch shares bytes; and it verifies a
tree for each of them, so it multiplies arithmetic. A GPU is bound by the bytes, a CPU by the
arithmetic. Every method answers the same held-out pocket tasks (or --prompts) at each size; the
answers of all sizes are compared. Writes `summary.json`. Some three minutes on two CPU cores.
"""

import pathlib

from absl import flags

from acceptmoe_jax import reporting
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.files import write_json
from acceptmoe_jax.runtime.statistics import summarise
from experiments import engine_flags, model_flags, prompt_flags
from experiments.methods import METHODS, selector_of

_METHODS = flags.DEFINE_list("methods", ["native", "acceptmoe"], "Methods without a budget.")
_SIZES = flags.DEFINE_list("batch_sizes", ["1", "2", "4", "8"], "Prompts at a time.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where the summary goes.", required=True)

_FORMATS = {
    "method": "",
    "batch_size": "d",
    "tokens_per_second": ".1f",
    "against_one": ".2f",
    "accepted_length": ".2f",
    "used": ".1f",
    "same_tokens": ".0%",
}


def main() -> None:
    try:
        sizes = [int(size) for size in _SIZES.value]
    except ValueError:
        raise UserError(f"--batch_sizes holds numbers, not {','.join(_SIZES.value)}") from None
    unfit = [n for n in _METHODS.value if n not in METHODS or METHODS[n].budgeted]
    if unfit:
        raise UserError(f"--methods: {unfit[0]!r} is no method, or needs a budget")
    prompts = list(prompt_flags.prompts().values())
    engine = model_flags.load_engine()
    rows = []
    with reporting.progress() as bar:
        task = bar.add_task("batches", total=len(_METHODS.value) * len(sizes))
        for name in _METHODS.value:
            selector = selector_of(engine, METHODS[name])
            of_method = []
            for size in sizes:
                options = {"selector": selector, "batch_size": size}
                options |= {"max_new_tokens": engine_flags.MAX_NEW_TOKENS.value}
                options |= engine_flags.chat_options()
                answers = engine.generate(prompts, **options)
                tokens = sum(len(answer.token_ids) for answer in answers)
                summary = summarise([answer.statistics for answer in answers], tokens)
                of_method.append((size, summary, [answer.token_ids for answer in answers]))
                bar.advance(task)
            _, first, reference = of_method[0]
            rows.extend(
                {
                    "method": name,
                    "batch_size": size,
                    "against_one": summary["tokens_per_second"] / first["tokens_per_second"],
                    "same_tokens": sum(map(_same, ids, reference)) / len(ids),
                }
                | summary
                for size, summary, ids in of_method
            )
    summary = {
        "rows": rows,
        "prompts": len(prompts),
        "device": reporting.device_description(),
        "dtype": engine_flags.DTYPE.value,
        "target": model_flags.TARGET.value,
        "versions": reporting.versions(),
    }
    write_json(pathlib.Path(_OUTPUT_DIR.value) / "summary.json", summary)
    title = (
        f"{pathlib.Path(model_flags.TARGET.value).name}, {len(prompts)} prompts, measured on "
        f"{engine_flags.measured_on(engine)}; used experts are a prompt's own"
    )
    reporting.print_table(title, rows, _FORMATS)


def _same(one, other) -> bool:
    return one == other


if __name__ == "__main__":
    reporting.run_program(main)
