"""An ablation as it runs: rows and overlaps, measured where a journal does not hold them yet."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from acceptmoe_jax import reporting
from acceptmoe_jax.journal import Journal
from acceptmoe_jax.pocket.records import Record
from acceptmoe_jax.runtime.engine import Engine
from acceptmoe_jax.selection import SelectorConfig
from acceptmoe_jax.traces import Trace
from acceptmoe_jax.traces.replay import ReplayResult, replay_trace
from experiments import ablation_rows, ablation_sets
from experiments.ablation_variants import VARIANTS, Planned, selector

NATURAL = "natural"  # the experts with most natural assignments, among overlaps


@dataclasses.dataclass(frozen=True)
class Ablation:
    """What rows are measured with.

    Attributes:
      engine: with a draft head.
      records: the tasks.
      trace: of them under Standard SD.
      journal: of what is done.
      options: of `Engine.generate`, for the live runs.
    """

    engine: Engine
    records: Sequence[Record]
    trace: Trace
    journal: Journal
    options: Mapping[str, Any]

    def rows(self, plan: Sequence[Planned]) -> list[dict[str, Any]]:
        """A row of numbers for each variant and budget; see `ablation_rows`."""
        missing = [planned for planned in plan if _key(*planned) not in self.journal]
        each = len(self.records)
        with reporting.progress() as bar:
            task = bar.add_task("rows", total=len(missing) * each)
            for done, planned in enumerate(missing):
                bar.update(task, description=_key(*planned))
                row = self._measure(
                    *planned,
                    lambda index, _: bar.update(task, completed=done * each + index),
                )
                self.journal.add(_key(*planned), row)
                bar.update(task, completed=(done + 1) * each)
        return [self.journal[_key(*planned)] for planned in plan]

    def overlaps(self, plan: Sequence[Planned]) -> list[dict[str, Any]]:
        """Of the sets of the plan's curves and the natural favourites, budget by budget, with all
        experts resident; see `ablation_sets.overlaps`."""
        curves: dict[int, list[str]] = {}
        for name, budget in plan:
            # What truncation keeps is the set that substitution takes.
            if budget is not None and name != "moe_spec_truncate":
                curves.setdefault(budget, []).append(name)
        keys = {budget: f"overlap {budget}: {', '.join(names)}" for budget, names in curves.items()}
        missing = [budget for budget, key in keys.items() if key not in self.journal]
        if missing:
            top_k = self.engine.model.setup.target.top_k
            ranks = ablation_sets.natural_ranks(self.trace, top_k)
        counts = [shard.verifications for shard in self.trace.shards]
        with reporting.progress() as bar:
            for budget in bar.track(missing, description="overlaps"):
                sets = {NATURAL: ranks < budget}
                for name in curves[budget]:
                    config = selector(self.engine, name, budget)
                    results = self._replay(config, slots=None)
                    sets[name] = np.concatenate([result.eligible_set for result in results])
                self.journal.add(keys[budget], ablation_sets.overlaps(sets, counts))
        return [
            {"budget": budget} | row for budget, key in keys.items() for row in self.journal[key]
        ]

    def _measure(self, name: str, budget: int | None, on_tokens) -> dict[str, Any]:
        config = selector(self.engine, name, budget)
        offload = self.engine.offload
        with _weighing(self.engine, name):
            generations = self.engine.generate(
                [record.prompt for record in self.records],
                selector=config,
                audit_every=1,
                on_tokens=on_tokens,
                **self.options,
            )
            results = self._replay(config, None if offload is None else offload.slots)
            lengths = [int(verified.length.sum()) for _, verified in self.trace.requests()]
            replayed = ablation_rows.replayed(results, lengths, self.trace.settings.expert_bytes)
        row = ablation_rows.joined(ablation_rows.live(self.records, generations), replayed)
        if config.policy == "cache_conditional":
            # It leaves every expert eligible, and changes who goes where.
            row |= dict.fromkeys(ablation_rows.RECALLS)
            row["intervals"] |= dict.fromkeys(ablation_rows.RECALLS)
        return row

    def _replay(self, config: SelectorConfig, slots: int | None) -> Iterator[ReplayResult]:
        table = self.engine.commitment
        commitment = self.trace.settings.commitment() if table is None else table.commitment()
        # With sets even where they are not asked for: rows and overlaps share a program.
        return replay_trace(self.trace, commitment, config, slots, sets=slots is None)


@contextlib.contextmanager
def _weighing(engine: Engine, name: str) -> Iterator[None]:
    """The engine with the commitment probabilities of a variant."""
    table = engine.commitment
    if table is not None:
        engine.commitment = table.with_per_node(VARIANTS[name].per_node or table.per_node)
    try:
        yield
    finally:
        engine.commitment = table


def _key(name: str, budget: int | None) -> str:
    return name if budget is None else f"{name} {budget}"
