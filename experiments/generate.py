"""Answers prompts under several methods, side by side, and says what each costs.

    python -m experiments.generate \
        --target=checkpoints/pocket-qwen3-moe --draft=checkpoints/pocket-qwen3-moe-eagle3 \
        --selectors=autoregressive,native,acceptmoe,acceptmoe_fix,moe_spec \
        --prompts=checkpoints/demo_prompts.jsonl --max_new_tokens=64 --output_dir=runs/demo

`native` is Standard SD: the draft tree is verified with the model's own routing. The other
policies restrict the verifier's experts and are lossy, so quality stands beside every speed:
--audit_every=N compares every Nth verification with native routing, and with --max_disagreement=P a
method whose audited tokens differ more often than that goes on natively. `evict` cuts draft trees
instead, to the length that pays on this device, and is lossless. --temperature, --top_k, --top_p
and --seed draw tokens; --batch_size decodes several prompts at a time; --uniform_weights,
--noanchor, --size_rule and the like take AcceptMoE apart.

Prints a few answers and the tables, and writes `summary.json` and `generations.jsonl`. A prompts
file holds a JSON object a line, with `prompt` (text) or `messages` (a chat), and an optional
`prompt_id`.
"""

import json
import pathlib
import sys
import textwrap

from absl import flags

from acceptmoe_jax import reporting
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.files import write_atomically, write_json
from acceptmoe_jax.prompts import read_prompts
from acceptmoe_jax.runtime import cost_model
from acceptmoe_jax.runtime.engine import AUTOREGRESSIVE, Prompt
from experiments import engine_flags, method_flags, model_flags
from pallas_kernels.devices import DEVICES

_COMMITMENT = flags.DEFINE_string(
    "commitment", None, "Commitment table; default: commitment.json beside the head or the target."
)
_PROMPT = flags.DEFINE_string("prompt", None, "A prompt.")
_PROMPTS = flags.DEFINE_string("prompts", None, "A JSONL file of prompts.")
_STOP = flags.DEFINE_multi_string("stop", [], "A text that ends an answer; may be repeated.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where the files go.", required=True)

_SHOWN = 4  # prompts whose answers are printed

_MEASURED = {
    "method": "",
    "tokens": "d",
    "tokens_per_second": ".1f",
    "accepted_length": ".2f",
    "verified_nodes": ".1f",
    "natural_union": ".1f",
    "eligible": ".1f",
    "used": ".1f",
    "agreement_with_native": ".2%",
    "kl_on_accepted_rows": ".4f",
    "same_text": ".0%",
}
_MODELLED = {
    "method": "",
    "experts_used": ".1f",
    "gigabytes_per_verification": ".2f",
    "verification_milliseconds": ".2f",
    "speed_against_native_at_most": ".2f",
}


def main() -> None:
    prompts = _read_prompts()
    names = method_flags.methods(model_flags.DRAFT.value)
    engine = model_flags.load_engine(_COMMITMENT.value)
    generations, summaries = method_flags.decode(
        engine, names, list(prompts.values()), stop_strings=_STOP.value
    )
    _write(engine, prompts, generations, summaries)
    _show_answers(prompts, generations)
    _show_measured(engine, generations, summaries)
    if summaries.get("native", {}).get("verifications"):
        _show_modelled(engine, summaries)
    print(f"Written: {pathlib.Path(_OUTPUT_DIR.value) / 'summary.json'}", file=sys.stderr)


def _read_prompts() -> dict[str, Prompt]:
    """Prompts by id."""
    if (_PROMPT.value is None) == (_PROMPTS.value is None):
        raise UserError("give either --prompt or --prompts")
    if _PROMPT.value is not None:
        return {"0": _PROMPT.value}
    return read_prompts(_PROMPTS.value, "--prompts")


def _write(engine, prompts, generations, summaries) -> None:
    lines = [
        json.dumps(
            {
                "prompt_id": name,
                "method": method,
                "token_ids": list(generation.token_ids),
                "text": generation.text,
                "reasoning": generation.reasoning,
                "stop_reason": generation.stop_reason,
            },
            ensure_ascii=False,
        )
        for method, answers in generations.items()
        for name, generation in zip(prompts, answers, strict=True)
    ]
    output = pathlib.Path(_OUTPUT_DIR.value)
    write_atomically(output / "generations.jsonl", "\n".join(lines) + "\n")
    summary = {
        "methods": summaries,
        "device": reporting.device_description(),
        "dtype": engine_flags.DTYPE.value,
        "target": model_flags.TARGET.value,
        "draft": model_flags.DRAFT.value,
        "versions": reporting.versions(),
        "settings": method_flags.settings(),
    } | engine_flags.offload_facts(engine)
    write_json(output / "summary.json", summary)


def _show_answers(prompts, generations) -> None:
    """Prints the answers to a few of the prompts, methods with the same answer together."""
    stride = -(-len(prompts) // _SHOWN)
    for index, (name, prompt) in enumerate(prompts.items()):
        if index % stride:
            continue
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        print(f"\n{name}\n{textwrap.indent(text, '  > ')}")
        answers = {}
        for method, answered in generations.items():
            answer = answered[index].text
            if not answer and answered[index].reasoning:
                answer = f"(cut while reasoning) {answered[index].reasoning}"
            answers.setdefault(answer, []).append(method)
        for answer, agreeing in answers.items():
            print(f"  {', '.join(agreeing)}:\n{textwrap.indent(answer, '    ')}")


def _show_measured(engine, generations, summaries) -> None:
    reference = generations.get("native") or generations.get(AUTOREGRESSIVE)
    rows = []
    for method, summary in summaries.items():
        same = None
        if reference is not None:
            pairs = zip(generations[method], reference, strict=True)
            same = sum(a.token_ids == b.token_ids for a, b in pairs) / len(reference)
        rows.append({"method": method, "same_text": same} | summary)
    title = (
        f"{pathlib.Path(model_flags.TARGET.value).name}, measured on "
        f"{engine_flags.measured_on(engine)}, {summary['prompts']} prompts; set sizes are means "
        f"a layer and verification{method_flags.in_words()}"
    )
    reporting.print_table(title, rows, _MEASURED)


def _show_modelled(engine, summaries) -> None:
    """What the same shares of experts mean at full size, by the cost model."""
    experts = engine.model.setup.target.num_experts
    sets = [
        cost_model.MeasuredSets(
            method,
            summary["used"] / experts,
            summary["accepted_length"],
            drafts=method != AUTOREGRESSIVE,
        )
        for method, summary in summaries.items()
        if summary["verifications"]
    ]
    target, head = method_flags.full_size(engine)
    for device in (DEVICES["rtx-pro-6000"], DEVICES["h200"]):
        modelled = cost_model.modelled_rows(
            sets, target, head, device, draft_steps=engine.model.setup.tree.steps
        )
        title = (
            f"Modelled, not measured: the same shares of experts in {target.name} on {device.name}"
        )
        rows = [
            {
                "method": row.method,
                "experts_used": row.experts_used,
                "gigabytes_per_verification": row.bytes_per_verification / 1e9,
                "verification_milliseconds": row.floor_milliseconds,
                "speed_against_native_at_most": row.speed_ratio,
            }
            for row in modelled
        ]
        reporting.print_table(title, rows, _MODELLED)
    print(
        "\nThe modelled times are floors of the weights' bytes over the memory bandwidth. They are "
        "where the method saves: on a CPU a small model is bound by arithmetic and overhead, not "
        "by weights, so the measured tokens a second above say little about it. The method is "
        "lossy: agreement and KL compare each accepted row with native routing.",
    )


if __name__ == "__main__":
    reporting.run_program(main)
