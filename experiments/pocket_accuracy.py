"""Scores the pocket checkpoint on the held-out tasks of its four families, method by method.

    python -m experiments.pocket_accuracy \
        --target=checkpoints/pocket-qwen3-moe --draft=checkpoints/pocket-qwen3-moe-eagle3 \
        --selectors=native,acceptmoe,acceptmoe_fix,moe_spec --records=100 --dtype=float32 \
        --output_dir=runs/pocket_accuracy

This is what the method costs in quality: greedy accuracy under Standard SD (`native`) beside that
of the policies which restrict the verifier's experts. Code counts as right only where it is the
reference's syntax tree; nothing a model wrote is executed, so these are lower bounds.

Writes `summary.json`. On two CPU cores it takes about ten minutes.
"""

import pathlib

from absl import flags

from acceptmoe_jax import reporting
from acceptmoe_jax.files import write_json
from acceptmoe_jax.pocket import families, scoring
from experiments import engine_flags, method_flags, model_flags, sampling_flags

_RECORDS = flags.DEFINE_integer("records", 100, "Test tasks of each family.", lower_bound=1)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where the summary goes.", required=True)


def main() -> None:
    names = method_flags.methods(model_flags.DRAFT.value)
    engine = model_flags.load_engine()
    records = [
        record
        for family in families.FAMILIES
        for record in families.generate(family, "test", sampling_flags.SEED.value, _RECORDS.value)
    ]
    prompts = [record.prompt for record in records]
    generations, summaries = method_flags.decode(engine, names, prompts)
    for name, answers in generations.items():
        right = {family: [] for family in families.FAMILIES}
        for record, answer in zip(records, answers, strict=True):
            right[record.family].append(scoring.is_correct(record, answer.text))
        accuracy = {family: sum(scores) / len(scores) for family, scores in right.items()}
        accuracy["mean"] = sum(accuracy.values()) / len(accuracy)
        summaries[name] |= {"accuracy": accuracy}
    summary = {
        "methods": summaries,
        "records_a_family": _RECORDS.value,
        "device": reporting.device_description(),
        "dtype": engine_flags.DTYPE.value,
        "versions": reporting.versions(),
        "settings": method_flags.settings(),
    } | engine_flags.offload_facts(engine)
    write_json(pathlib.Path(_OUTPUT_DIR.value) / "summary.json", summary)
    title = (
        f"Accuracy on {_RECORDS.value} held-out tasks of each family, measured on "
        f"{engine_flags.measured_on(engine)}"
    )
    rows = [{"method": name} | summary | summary["accuracy"] for name, summary in summaries.items()]
    formats = {"method": ""} | dict.fromkeys((*families.FAMILIES, "mean"), ".1%")
    formats |= {"accepted_length": ".2f", "eligible": ".1f", "used": ".1f"}
    formats |= {"natural_union": ".1f", "agreement_with_native": ".2%"}
    reporting.print_table(title, rows, formats)


if __name__ == "__main__":
    reporting.run_program(main)
