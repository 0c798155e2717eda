"""Measures how often a node's position is committed, by depth, and writes commitment.json.

    python -m experiments.calibrate \
        --target=checkpoints/pocket-qwen3-moe --draft=checkpoints/pocket-qwen3-moe-eagle3 \
        --pocket_prompts=400

Decodes training prompts under Standard SD (natural routing) and counts, for every verification,
which depths the accepted path reached, and fits how often a node is committed to its depth and the
drafter's probability of its path. The table belongs to this target and head, is frozen from
then on, and must never be made from prompts that a benchmark scores.

Prompts come from `--prompts` (JSONL, as in experiments.generate) or from the training split of
the generated pocket tasks.
"""

import pathlib
import random

import numpy as np
from absl import flags

from acceptmoe_jax import reporting
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.pocket import families
from acceptmoe_jax.prompts import read_prompts
from acceptmoe_jax.runtime.engine import COMMITMENT_FILE
from acceptmoe_jax.runtime.verification import Verification
from acceptmoe_jax.selection import CommitmentTable, PathTable, fit_path_commitment
from experiments import engine_flags, model_flags

_PROMPTS = flags.DEFINE_string("prompts", None, "A JSONL file of training prompts.")
_POCKET = flags.DEFINE_integer("pocket_prompts", None, "Prompts from the pocket training split.")
_LIMIT = flags.DEFINE_integer("limit", None, "Use a random choice of so many of --prompts.")
_PER_NODE = flags.DEFINE_bool("per_node", False, "Divide by the nodes of a depth (an ablation).")
_SEED = flags.DEFINE_integer("seed", 0, "Of the choice of prompts.")
_OUTPUT = flags.DEFINE_string(
    "output", None, f"The table; default: {COMMITMENT_FILE} in the head's directory."
)


def main() -> None:
    prompts, data = _training_prompts()
    engine = model_flags.load_engine(use_commitment=False)
    nodes = _Nodes()
    with reporting.progress() as bar:
        task = bar.add_task("calibrate", total=len(prompts))
        generations = engine.generate(
            prompts,
            selector="native",
            max_new_tokens=engine_flags.MAX_NEW_TOKENS.value,
            **engine_flags.chat_options(),
            on_tokens=lambda index, _: bar.update(task, completed=index),
            observe=nodes.add,
        )
    statistics = [generation.statistics for generation in generations]
    target_hash, head_hash = engine.model.hashes
    verifications = sum(s.verifications for s in statistics)
    if not verifications:
        raise UserError("no prompt led to a verification; the answers ended at their first token")
    table = CommitmentTable.from_counts(
        reach=sum(s.reach for s in statistics).tolist(),
        nodes=sum(s.nodes_by_depth for s in statistics).tolist(),
        verifications=verifications,
        target_hash=target_hash,
        head_hash=head_hash,
        data=data,
        seed=_SEED.value,
        per_node=_PER_NODE.value,
        path=nodes.fit(engine.model.setup.tree.steps),
    )
    output = pathlib.Path(_OUTPUT.value or engine.model.head.directory / COMMITMENT_FILE)
    table.save(output)
    rows = [
        {"depth": d, "reach": table.reach[d], "nodes": table.nodes[d], "phat": table.phat[d]}
        for d in range(len(table.phat))
    ]
    title = (
        f"{table.verifications} verifications on {reporting.device_description()}, {data}; "
        f"mean accepted length {table.mean_accepted_length:.3f} (before cuts)"
    )
    formats = {"depth": "d", "reach": "d", "nodes": "d", "phat": ".4f"}
    reporting.print_table(title, rows, formats)
    print(f"Written: {output}")


class _Nodes:
    """Every node that was verified: how likely the draft found it, and what became of it."""

    def __init__(self):
        self._seen: list[tuple[np.ndarray, ...]] = []

    def add(self, index: int, verification: Verification) -> None:
        del index
        of_node = (verification.depth, verification.score, verification.committed)
        self._seen.append(tuple(leaf[verification.valid] for leaf in of_node))

    def fit(self, steps: int) -> PathTable:
        """The rate of commitment by depth and path score."""
        return fit_path_commitment(*map(np.concatenate, zip(*self._seen)), depths=steps + 1)


def _training_prompts() -> tuple[list, str]:
    """The prompts and what they are, in words."""
    if (_PROMPTS.value is None) == (_POCKET.value is None):
        raise UserError("give either --prompts or --pocket_prompts")
    if _POCKET.value is not None:
        if _POCKET.value < len(families.FAMILIES):
            raise UserError(f"--pocket_prompts should be at least {len(families.FAMILIES)}")
        each = _POCKET.value // len(families.FAMILIES)
        records = [
            record
            for family in families.FAMILIES
            for record in families.generate(family, "train", _SEED.value, each)
        ]
        data = f"training split of the pocket families, {each} prompts each"
        return [record.prompt for record in records], data
    prompts = list(read_prompts(_PROMPTS.value, "--prompts").values())
    if _LIMIT.value is not None and _LIMIT.value < len(prompts):
        prompts = random.Random(_SEED.value).sample(prompts, _LIMIT.value)
    return prompts, f"{len(prompts)} prompts of {pathlib.Path(_PROMPTS.value).name}"


if __name__ == "__main__":
    reporting.run_program(main)
