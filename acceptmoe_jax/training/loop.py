"""A training loop that can be killed at any moment and goes on from its last save, exactly.

What a step does is a function of (parameters, optimiser state, step), and which rows it sees is a
function of (seed, step), so a resumed run ends with the parameters of an uninterrupted one.

A work directory holds `run.json` (the settings; others are refused), `checkpoints/` (Orbax:
parameters, optimiser state) and `metrics.jsonl` (a line every few steps).
"""

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from acceptmoe_jax import reporting
from acceptmoe_jax.errors import UserError
from acceptmoe_jax.files import read_json, write_atomically, write_json

# (parameters, batch of any kind) -> (loss to minimise, metrics: a dataclass of small arrays)
LossFunction = Callable[[Any, Any], tuple[jax.Array, Any]]


@flax.struct.dataclass
class TrainState:
    """What a checkpoint holds."""

    params: Any
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """How long, and how often what."""

    steps: int
    tokens_per_step: int  # of a batch, for the reported speed
    log_every: int = 10
    evaluate_every: int = 100
    save_seconds: float = 60.0


@dataclasses.dataclass(frozen=True)
class Run:
    """A work directory and what is saved in it."""

    work_dir: pathlib.Path

    def claim(self, settings: dict[str, Any]) -> None:
        """Makes the directory a run of these settings, or checks that it is one.

        Raises:
          UserError: naming the settings that differ from those of the run that is in it.
        """
        file = self.work_dir / "run.json"
        if not file.exists():
            write_json(file, settings)
        found = read_json(file)
        wanted = json.loads(json.dumps(settings))
        differing = sorted(
            key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key)
        )
        if differing:
            raise UserError(
                f"{file}: work_dir holds a run with other settings ({', '.join(differing)}); "
                "use another work_dir or remove it"
            )

    def manager(self) -> ocp.CheckpointManager:
        """Opens the checkpoints; a save returns when it is on disk."""
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        # Orbax refuses relative paths.
        return ocp.CheckpointManager(self.work_dir.absolute() / "checkpoints", options=options)

    @property
    def metrics_file(self) -> pathlib.Path:
        return self.work_dir / "metrics.jsonl"

    def metrics(self) -> list[dict[str, Any]]:
        """The recorded lines; a last line cut short by a kill is left out."""
        if not self.metrics_file.exists():
            return []
        text = self.metrics_file.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def initial_state(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(params=params, opt_state=optimizer.init(params))


def restore(run: Run, like: TrainState) -> tuple[int, TrainState]:
    """The last save as (steps done, state); (0, `like`) where there is none."""
    with run.manager() as manager:
        step = manager.latest_step()
        if step is None:
            return 0, like
        return step, manager.restore(step, args=ocp.args.StandardRestore(like))


@functools.partial(jax.jit, static_argnames=("optimizer", "loss_fn"), donate_argnames="state")
def update(
    state: TrainState,
    batch: Any,
    optimizer: optax.GradientTransformation,
    loss_fn: LossFunction,
) -> tuple[TrainState, Any]:
    """One step; returns the new state and the metrics of the parameters before it."""
    grads, metrics = jax.grad(loss_fn, has_aux=True)(state.params, batch)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    return TrainState(optax.apply_updates(state.params, updates), opt_state), metrics


@functools.partial(jax.jit, static_argnames="loss_fn")
def evaluate(params: Any, batch: Any, loss_fn: LossFunction) -> Any:
    """The metrics of a batch."""
    return loss_fn(params, batch)[1]


def train(
    run: Run,
    state: TrainState,
    optimizer: optax.GradientTransformation,
    loss_fn: LossFunction,
    batch_at: Callable[[int], Any],
    held_out: Callable[[Any], dict[str, Any]],
    config: LoopConfig,
) -> TrainState:
    """Trains to `config.steps`, from the last save in `run` if there is one.

    Args:
      run: where checkpoints and metrics go.
      state: `initial_state`; its buffers are consumed.
      optimizer: gradient transformation.
      loss_fn: differentiable in the parameters.
      batch_at: the batch of a step, a function of the step alone.
      held_out: metrics of parameters on data that is not trained on.
      config: see `LoopConfig`.
    """
    done, state = restore(run, state)
    records = [record for record in run.metrics() if record["step"] <= done]
    write_atomically(run.metrics_file, "".join(json.dumps(record) + "\n" for record in records))
    began = time.monotonic() - (records[-1]["seconds"] if records else 0.0)

    progress = reporting.progress()
    with run.manager() as manager, progress, run.metrics_file.open("a") as metrics_file:
        bar = progress.add_task("training", total=config.steps, completed=done)
        saved = logged = time.monotonic()
        logged_step = done
        for step in range(done, config.steps):
            state, metrics = update(state, batch_at(step), optimizer, loss_fn)
            progress.update(bar, completed=step + 1)
            last = step + 1 == config.steps
            if last or (step + 1) % config.log_every == 0:
                record = {"step": step + 1} | to_host(metrics)
                tokens = (step + 1 - logged_step) * config.tokens_per_step
                record["tokens_per_second"] = tokens / (time.monotonic() - logged)
                if last or (step + 1) % config.evaluate_every == 0:
                    record |= {f"held_out_{k}": v for k, v in held_out(state.params).items()}
                record["seconds"] = time.monotonic() - began
                metrics_file.write(json.dumps(record) + "\n")
                metrics_file.flush()
                progress.update(bar, description=_describe(record))
                if progress.disable:  # no terminal: lines for a log
                    print(_describe(record), flush=True)
                logged, logged_step = time.monotonic(), step + 1
            if last or time.monotonic() - saved > config.save_seconds:
                manager.save(step + 1, args=ocp.args.StandardSave(state), force=True)
                saved = time.monotonic()
    return state


def to_host(metrics: Any) -> dict[str, Any]:
    """The fields of a dataclass of scalars and vectors, as numbers and lists on the host."""
    return {
        field.name: np.asarray(getattr(metrics, field.name)).tolist()
        for field in dataclasses.fields(metrics)
    }


def mean_metrics(loss_fn: LossFunction, batches: list[Any]) -> Callable[[Any], dict[str, Any]]:
    """A `held_out` function: the means of `loss_fn`'s metrics over fixed batches."""

    def held_out(params: Any) -> dict[str, Any]:
        per_batch = [evaluate(params, batch, loss_fn) for batch in batches]
        return to_host(jax.tree.map(lambda *leaves: jnp.stack(leaves).mean(axis=0), *per_batch))

    return held_out


def _describe(record: dict[str, Any]) -> str:
    parts = [f"step {record['step']}", f"loss {record['loss']:.4f}"]
    if "held_out_loss" in record:
        parts.append(f"held out {record['held_out_loss']:.4f}")
    parts.append(f"{record['tokens_per_second']:.0f} tokens/s")
    return ", ".join(parts)
