"""Runs one checkpoint here and in transformers, and says how far the two are apart.

    pip install -r tests/requirements-torch.txt
    python -m experiments.compare_torch \
        --target=checkpoints/pocket-qwen3-moe --draft=checkpoints/pocket-qwen3-moe-eagle3 \
        --selector=acceptmoe --torch_threads=1 --output_dir=runs/compare_torch

The same prompts go through both: logits and each layer's router under teacher forcing, then greedy
decoding a token a forward, with the first token that differs and how clear either model's choice of
it was, and tokens a second. With --selector and --draft also the first verification block of each
prompt, both models restricted to the sets of experts that our selection chose. transformers runs on
the CPU, with eager attention and MXFP4 dequantised; both models are in memory at the same time.

Prints tables and writes `summary.json`. In float32 logits should agree to about 1e-4 and routers in
nearly every row. About a minute for the command above, on two CPU cores.
"""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from acceptmoe_jax import reporting
from acceptmoe_jax.comparison import differences
from acceptmoe_jax.comparison.passes import block_pass, prompt_pass, visible_rows
from acceptmoe_jax.comparison.torch_target import EXPERTS, TorchTarget, require_torch
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.files import write_json
from acceptmoe_jax.runtime.engine import AUTOREGRESSIVE, Engine
from acceptmoe_jax.runtime.stages import NO_COMMITMENT
from acceptmoe_jax.runtime.statistics import summarise
from acceptmoe_jax.selection import SelectorConfig
from experiments import engine_flags, model_flags, prompt_flags
from experiments.methods import METHODS, selector_of

_SELECTOR = flags.DEFINE_enum(
    "selector",
    None,
    [name for name, method in METHODS.items() if not (method.plain or method.evict)],
    "Also compare verification blocks restricted by this method; needs --draft.",
)
_BUDGET = flags.DEFINE_integer("budget", None, "Experts a layer, where --selector needs it.")
_TORCH_EXPERTS = flags.DEFINE_enum(
    "torch_experts", "grouped_mm", EXPERTS, "How transformers runs experts."
)
_TORCH_THREADS = flags.DEFINE_integer(
    "torch_threads",
    None,
    "CPU threads of torch; default: its own. Small models want 1.",
    lower_bound=1,
)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where summary.json goes.", required=True)
flags.set_default(engine_flags.DTYPE, "float32")  # where the two should be the same

_PADDED = 64  # prompts are padded to a multiple of this

_LOGITS = {
    "prompt": "",
    "positions": "d",
    "max_difference": ".2e",
    "mean_difference": ".2e",
    "same_top_token": ".2%",
}
_BLOCKS = _LOGITS | {"eligible": ".1f", "same_experts": ".2%"}
_ROUTERS = {"layer": "d", "rows": "d", "same_experts": ".3%"}
_DIVERGENCES = {
    "prompt": "",
    "position": "d",
    "ours": "",
    "theirs": "",
    "our_margin": ".2e",
    "their_margin": ".2e",
}
_SPEEDS = {"": "", "tokens": "d", "prefill_seconds": ".2f", "tokens_per_second": ".1f"}


class Comparison:
    """Both models and the prompts, padded to one length."""

    def __init__(self, engine: Engine, theirs: TorchTarget, prompts: dict[str, tuple[int, ...]]):
        self.engine = engine
        self.theirs = theirs
        self.prompts = prompts
        longest = max(map(len, prompts.values()))
        self._rows = -(-longest // _PADDED) * _PADDED
        # What follows a prompt is read too, where greedy answers part.
        self._all_rows = self._rows + engine_flags.MAX_NEW_TOKENS.value
        setup = engine.model.setup
        self._layers = setup.target.moe_layers
        self._prompt_pass = jax.jit(functools.partial(prompt_pass, setup, engine.dtype))

    def logits(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """A row for each prompt, and one for each MoE layer's router."""
        rows, agreeing = [], []
        for name, ids in self.prompts.items():
            ours, theirs = self._ours(ids), self.theirs.forward(ids)
            apart = differences.compare_logits(ours.logits[: len(ids)], theirs.logits)
            rows.append(_logits_row(name, apart))
            agreeing.append(
                [
                    self._same_experts(logits[: len(ids)], theirs.experts[layer])
                    for layer, logits in zip(self._layers, ours.record.logits, strict=True)
                ]
            )
        routers = [np.concatenate(of_layer) for of_layer in zip(*agreeing)]
        return rows, [
            {"layer": layer, "rows": len(same), "same_experts": float(same.mean())}
            for layer, same in zip(self._layers, routers, strict=True)
        ]

    def decoding(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """A row for each answer that differs, and one for each model's speed."""
        most, stops = engine_flags.MAX_NEW_TOKENS.value, self.engine.tokenizer.stop_ids
        prompts = list(self.prompts.values())
        ours = self.engine.generate(prompts, selector=AUTOREGRESSIVE, max_new_tokens=most)
        self.theirs.decode(prompts[0], 2, ())  # the first call of torch is slow
        theirs = [self.theirs.decode(ids, most, stops) for ids in prompts]
        rows = []
        for (name, ids), our, their in zip(self.prompts.items(), ours, theirs, strict=True):
            place = differences.first_divergence(our.token_ids, their.token_ids)
            if place is not None:
                before = ids + our.token_ids[:place]
                our_logits = self._ours(before).logits[len(before) - 1]
                their_logits = self.theirs.forward(before).logits[-1]
                rows.append(
                    {
                        "prompt": name,
                        "position": place,
                        "ours": self.engine.tokenizer.decode([our.token_ids[place]]),
                        "theirs": self.engine.tokenizer.decode([their.token_ids[place]]),
                        "our_margin": differences.top2_margin(our_logits),
                        "their_margin": differences.top2_margin(their_logits),
                    }
                )
        tokens = sum(len(answer.token_ids) for answer in ours)
        summary = summarise([answer.statistics for answer in ours], tokens)
        their_tokens = sum(len(answer.token_ids) for answer in theirs)
        seconds = sum(answer.decode_seconds for answer in theirs)
        speeds = [
            {"": "ours", "tokens": tokens}
            | {name: summary[name] for name in ("prefill_seconds", "tokens_per_second")},
            {
                "": "transformers",
                "tokens": their_tokens,
                "prefill_seconds": sum(answer.prefill_seconds for answer in theirs),
                "tokens_per_second": (their_tokens - len(theirs)) / seconds if seconds else None,
            },
        ]
        return rows, speeds

    def blocks(self, selector: SelectorConfig) -> list[dict[str, Any]]:
        """A row for each prompt's first verification block, restricted in both models."""
        model, table = self.engine.model, self.engine.commitment
        commitment = NO_COMMITMENT if table is None else table.commitment()
        run = jax.jit(functools.partial(block_pass, model.setup, selector, self.engine.dtype))
        rows = []
        for name, ids in self.prompts.items():
            tokens, count = _padded(ids, self._rows)
            done = run(model.weights, commitment, tokens, count)
            tree, ours = jax.device_get(done)
            positions = np.concatenate([np.arange(len(ids)), len(ids) + tree.depth])
            theirs = self.theirs.forward(
                [*ids, *tree.tokens.tolist()],
                positions.astype(np.int64),
                visible_rows(len(ids), tree.parent),
                dict(zip(self._layers, ours.record.eligible, strict=True)),
                len(ids),
            )
            kept = np.flatnonzero(tree.valid)
            apart = differences.compare_logits(ours.logits[kept], theirs.logits[len(ids) :][kept])
            same = [
                self._same_experts(logits[kept], theirs.experts[layer][len(ids) :][kept], eligible)
                for layer, logits, eligible in zip(
                    self._layers, ours.record.logits, ours.record.eligible, strict=True
                )
            ]
            sizes = ours.record.eligible.sum(axis=-1)
            row = {"eligible": float(sizes.mean()), "same_experts": float(np.mean(same))}
            rows.append(_logits_row(name, apart) | row)
        return rows

    def _ours(self, ids):
        tokens, count = _padded(ids, self._all_rows)
        return jax.device_get(self._prompt_pass(self.engine.model.weights, tokens, count))

    def _same_experts(self, logits, theirs, eligible=None):
        top_k = self.engine.model.setup.target.top_k
        return differences.same_experts(differences.best_experts(logits, top_k, eligible), theirs)


def main() -> None:
    torch, _ = require_torch()
    if _TORCH_THREADS.value is not None:
        torch.set_num_threads(_TORCH_THREADS.value)
    if _SELECTOR.value is not None and model_flags.DRAFT.value is None:
        raise UserError("--draft is needed by --selector: blocks are drafted")
    engine = model_flags.load_engine()
    if engine.offload is not None:
        raise UserError("--expert_slots: here all experts are on the device")
    selector = None
    if _SELECTOR.value is not None:
        selector = selector_of(engine, METHODS[_SELECTOR.value], _BUDGET.value)
    prompts = {
        name: engine.encode(prompt, **engine_flags.chat_options())
        for name, prompt in prompt_flags.prompts().items()
    }
    directory = engine.model.target.directory
    theirs = TorchTarget(directory, engine_flags.DTYPE.value, _TORCH_EXPERTS.value)
    comparison = Comparison(engine, theirs, prompts)
    where = engine_flags.measured_on(engine)
    divergences, speeds = comparison.decoding()  # first, as it refuses prompts that are too long
    logits, routers = comparison.logits()
    summary = {
        "target": str(model_flags.TARGET.value),
        "device": reporting.device_description(),
        "dtype": engine_flags.DTYPE.value,
        "torch_experts": _TORCH_EXPERTS.value,
        "torch_threads": torch.get_num_threads(),
        "versions": reporting.versions("torch", "transformers"),
        "max_new_tokens": engine_flags.MAX_NEW_TOKENS.value,
        "logits": logits,
        "routers": routers,
        "greedy": {"answers": len(prompts), "divergences": divergences},
        "speeds": speeds,
    }
    if selector is not None:
        summary |= {"selector": _SELECTOR.value, "blocks": comparison.blocks(selector)}
    write_json(pathlib.Path(_OUTPUT_DIR.value) / "summary.json", summary)
    against = f"{directory.name} here and in transformers; {where}"
    reporting.print_table(f"Logits, natural routing: {against}", [*logits, _all(logits)], _LOGITS)
    reporting.print_table(f"Rows that go to the same experts: {against}", routers, _ROUTERS)
    if selector is not None:
        blocks = summary["blocks"]
        title = f"Verification blocks under {_SELECTOR.value}: {against}"
        reporting.print_table(title, [*blocks, _all(blocks)], _BLOCKS)
    print(f"\nGreedy answers that differ: {len(divergences)} of {len(prompts)}")
    if divergences:
        title = "The first token that differs, and how far each model's best was ahead"
        reporting.print_table(title, divergences, _DIVERGENCES)
    title = (
        f"Plain greedy decoding: {against}; torch on {torch.get_num_threads()} CPU threads, "
        f"experts {_TORCH_EXPERTS.value}"
    )
    reporting.print_table(title, speeds, _SPEEDS)
    print(", ".join(f"{name} {version}" for name, version in summary["versions"].items()))


def _padded(ids: tuple[int, ...], rows: int) -> tuple[jax.Array, jax.Array]:
    tokens = np.zeros(rows, np.int32)
    tokens[: len(ids)] = ids
    return jnp.asarray(tokens), jnp.int32(len(ids))


def _logits_row(name: str, apart: differences.LogitDifference) -> dict[str, Any]:
    return {
        "prompt": name,
        "positions": len(apart.by_position),
        "max_difference": float(apart.by_position.max()),
        "mean_difference": apart.mean,
        "same_top_token": float(apart.same_top.mean()),
        "by_position": apart.by_position.tolist(),
    }


def _all(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The last row of a table: over all positions of all prompts."""
    positions = [row["positions"] for row in rows]
    means = {
        key: float(np.average([row[key] for row in rows], weights=positions))
        for key in ("mean_difference", "same_top_token", "eligible", "same_experts")
        if key in rows[0]
    }
    worst = max(row["max_difference"] for row in rows)
    return {"prompt": "all", "positions": sum(positions), "max_difference": worst} | means


if __name__ == "__main__":
    reporting.run_program(main)
