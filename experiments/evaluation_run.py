"""A grid of models, tasks and methods as it runs: every sample that its files do not hold yet."""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from acceptmoe_jax import reporting
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.evaluation import comparison, samples, scoring
from acceptmoe_jax.evaluation.comparison import STANDARD_SD, Pair
from acceptmoe_jax.evaluation.tasks import Problem, Style, Task
from acceptmoe_jax.journal import Journal
from acceptmoe_jax.runtime.engine import Engine
from acceptmoe_jax.runtime.statistics import summarise
from acceptmoe_jax.weights.fingerprint import fingerprint
from experiments import ablation_flags, method_flags
from experiments.evaluation_axes import Model
from experiments.methods import METHODS, selector_of


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one method did on one model and task.

    Attributes:
      samples: by the ids of their problems, in the problems' order.
      budget: of experts a layer, for methods that have one.
    """

    samples: dict[str, Any]
    budget: int | None


@dataclasses.dataclass
class Grid:
    """What is to be run.

    Attributes:
      models, tasks, methods: the axes; methods by name.
      samples: problems of each task at most.
      seed: of their choice, and of draws.
      style: of prompts; None is chats for targets with a chat template.
      allow_code_execution: see `scoring.score`.
      settings: what answers and times depend on besides, as JSON; samples of others are refused.
      folder: where samples are kept, as MODEL/TASK/METHOD.jsonl.
      load: makes a model's engine.
    """

    models: Sequence[Model]
    tasks: Sequence[Task]
    methods: Sequence[str]
    samples: int
    seed: int
    style: Style | None
    allow_code_execution: bool
    settings: Mapping[str, Any]
    folder: pathlib.Path
    load: Callable[[Model], Engine]

    def run(self) -> dict[Pair, dict[str, Cell]]:
        """Decodes and scores what is missing; returns every cell, methods in their order.

        Prompt by prompt, methods take turns, so that a machine that slows down or speeds up does
        so for all of them. Those that take acceptmoe's mean set size for their budget come after.

        Raises:
          UserError: before any decoding of a model, if files hold samples of other settings, a
            prompt is too long, or a method lacks what it needs.
        """
        problems = {task.name: self._chosen(task) for task in self.tasks}
        runs = {
            model.name: [_Run(self, model, task, problems[task.name]) for task in self.tasks]
            for model in self.models
        }
        held = sum(run.open() for of_model in runs.values() for run in of_model)
        cells: dict[Pair, dict[str, Cell]] = {}
        with reporting.progress() as progress:
            each = sum(map(len, problems.values())) * len(self.methods)
            bar = progress.add_task("evaluate", completed=held, total=each * len(self.models))

            def advance(label: str) -> None:
                progress.update(bar, advance=1, description=label)

            for model in self.models:
                engine = _Lazy(lambda model=model: self._loaded(model, runs[model.name]))
                for run in runs[model.name]:
                    run.decode(engine, advance)
                    pair = Pair(model.name, run.task.name)
                    cells[pair] = {name: run.cell(name) for name in self.methods}
        return cells

    def _chosen(self, task: Task) -> list[Problem]:
        """A random choice of the test problems, in their order."""
        problems = task.problems("test")
        count = min(self.samples, len(problems))
        places = random.Random(self.seed).sample(range(len(problems)), count)
        return [problems[place] for place in sorted(places)]

    def _loaded(self, model: Model, runs: Sequence["_Run"]) -> Engine:
        engine = self.load(model)
        experts = engine.model.setup.target.num_experts
        for name in self.methods:  # refused now rather than at its turn
            budget = method_flags.budget_of(name, lambda: experts)
            selector_of(engine, METHODS[name], budget, ablation_flags.ablations())
        for run in runs:
            run.check_lengths(engine)
        return engine


class _Run:
    """A model and a task under every method.

    Attributes:
      task: which.
    """

    def __init__(self, grid: Grid, model: Model, task: Task, problems: Sequence[Problem]):
        self.task = task
        self._grid, self._model, self._problems = grid, model, problems
        self._settings = {
            "model": model.name,
            "checkpoint": fingerprint(*filter(None, (model.target, model.draft))),
            "task": task.name,
            "problems": _digest(json.dumps([[p.id, dict(p.fields)] for p in problems])),
            "samples": len(problems),
            "style": grid.style,
            **grid.settings,
        }
        self._journals: dict[str, Journal] = {}
        self._budgets: dict[str, int | None] = {}

    def open(self) -> int:
        """Reads what is there, of methods whose budgets are known; returns new samples found."""
        found = 0
        for name in self._grid.methods:
            waits = method_flags.needs_acceptmoe(name) and not self._finished("acceptmoe")
            if name in self._journals or waits:
                continue
            budget = self._budgets[name] = method_flags.budget_of(name, self._acceptmoe_mean)
            evict = method_flags.generation_options(name)["evict"]
            settings = {
                "method": name,
                "budget": budget,
                "evict": None if evict is None else dataclasses.asdict(evict),
                **self._settings,
            }
            path = self._grid.folder / self._model.name / self.task.name / f"{name}.jsonl"
            journal = self._journals[name] = Journal(path, settings)
            found += sum(problem.id in journal for problem in self._problems)
        return found

    def decode(self, engine: "_Lazy", advance: Callable[[str], None]) -> None:
        """Decodes and scores the samples that are not there yet.

        Args:
          engine: gives one.
          advance: called with what is being decoded after each.
        """
        with contextlib.closing(self.task.scorer):
            while not all(map(self._finished, self._grid.methods)):
                self.open()
                self._decode_opened(engine, advance)

    def _decode_opened(self, engine, advance) -> None:
        selectors: dict[str, Any] = {}
        for problem in self._problems:
            for name, journal in self._journals.items():
                if problem.id in journal:
                    continue
                if name not in selectors:
                    selectors[name] = self._selector(engine(), name)
                journal.add(problem.id, self._sample(engine(), problem, name, selectors[name]))
                advance(f"{self._model.name} {self.task.name} {name}")

    def _finished(self, name: str) -> bool:
        journal = self._journals.get(name)
        return journal is not None and all(problem.id in journal for problem in self._problems)

    def cell(self, name: str) -> Cell:
        """The samples of a method, all of them."""
        journal = self._journals[name]
        return Cell({p.id: journal[p.id] for p in self._problems}, self._budgets[name])

    def check_lengths(self, engine: Engine) -> None:
        """Refuses prompts that do not fit the engine."""
        options = method_flags.generation_options(self._grid.methods[0])
        for problem in self._problems:
            prompt, chat = self._prompt(engine, problem)
            tokens = len(engine.encode(prompt, **self._chat_options(options, chat)))
            if tokens + options["max_new_tokens"] > engine.max_length:
                raise UserError(
                    f"{self.task.name}, problem {problem.id}: its prompt has {tokens} tokens, with "
                    f"--max_new_tokens={options['max_new_tokens']} more than --max_length = "
                    f"{engine.max_length} for {self._model.name}"
                )

    def _sample(self, engine: Engine, problem: Problem, name: str, selector) -> dict[str, Any]:
        options = method_flags.generation_options(name)
        prompt, chat = self._prompt(engine, problem)
        options |= self._chat_options(options, chat)
        # Of the problem alone, so that a run that goes on draws what one without a break does.
        key = f"{self._grid.seed} {self.task.name} {problem.id}"
        options["seed"] = zlib.crc32(key.encode())
        stops = () if chat else self.task.stop_strings
        options |= {"selector": selector, "stop_strings": stops}
        [generation] = engine.generate([prompt], **options)
        if generation.statistics.compile_seconds:
            # The first runs of a new program are slow beyond its compilation.
            [generation] = engine.generate([prompt], **options)
        allowed = self._grid.allow_code_execution
        score = scoring.score_one(
            self.task.scorer, problem, generation.text, allow_code_execution=allowed
        )
        return samples.to_json(generation, score)

    def _prompt(self, engine: Engine, problem: Problem) -> tuple[Any, bool]:
        """What the model is asked, and whether that is a chat."""
        style = self._grid.style
        if style is None:
            style = "chat" if engine.tokenizer.has_chat_template else "completion"
        return self.task.prompt(problem, style), style == "chat"

    def _chat_options(self, options: Mapping[str, Any], chat: bool) -> dict[str, Any]:
        return {"chat": chat, "chat_variables": options["chat_variables"]}

    def _selector(self, engine: Engine, name: str):
        budget, ablations = self._budgets[name], ablation_flags.ablations()
        return selector_of(engine, METHODS[name], budget, ablations)

    def _acceptmoe_mean(self) -> float | None:
        held = list(self.cell("acceptmoe").samples.values())
        tokens = sum(len(sample["token_ids"]) for sample in held)
        return summarise([samples.statistics_of(sample) for sample in held], tokens)["eligible"]


class _Lazy:
    """An engine that is loaded when it is first needed: a finished model needs none."""

    def __init__(self, load: Callable[[], Engine]):
        self._load = load
        self._engine: Engine | None = None

    def __call__(self) -> Engine:
        if self._engine is None:
            self._engine = self._load()
        return self._engine


def summarised(cells: Mapping[Pair, Mapping[str, Cell]], methods: Sequence[str]) -> dict[str, Any]:
    """`rows` of every model, task and method, and the `means` of every method."""
    rows = []
    for pair, by_method in cells.items():
        native = by_method[STANDARD_SD].samples if STANDARD_SD in methods else None
        for name, cell in by_method.items():
            what = pair._asdict() | {"method": name, "budget": cell.budget}
            rows.append(what | comparison.row(cell.samples, native))
    by_method = {name: {pair: cells[pair][name].samples for pair in cells} for name in methods}
    means = [
        {"method": name} | comparison.mean_row(pairs, by_method.get(STANDARD_SD))
        for name, pairs in by_method.items()
    ]
    return {"methods": list(methods), "rows": rows, "means": means}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
