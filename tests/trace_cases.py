"""Small random traces, every dimension another number, for the tests of traces and replay."""

import dataclasses

import numpy as np

from acceptmoe_jax.runtime.verification import Verification
from acceptmoe_jax.selection import SelectorConfig
from acceptmoe_jax.speculation import TreeConfig
from acceptmoe_jax.traces import TraceSettings, TraceWriter

SETTINGS = TraceSettings(
    target_hash="a1",
    head_hash="b2",
    target="tiny",
    family="qwen3_moe",
    dtype="float32",
    platform="cpu",
    selector=SelectorConfig(policy="native", top_k=3),
    tree=TreeConfig(steps=4, top_k=2, nodes=9),
    phat=(1.0, 0.8, 0.55, 0.3, 0.1),
    path=None,
    offload={"slots": 6, "eviction": "lru", "keep_residency": False},
    expert_bytes=700,
    max_new_tokens=32,
    num_layers=2,
    num_experts=12,
)


def verification(rng: np.random.Generator, settings: TraceSettings = SETTINGS) -> Verification:
    """A random tree with an accepted path and invalid nodes at its end; sets are random too."""
    nodes, steps = settings.tree.nodes, settings.tree.steps
    parent, depth = np.full(nodes, -1, np.int32), np.zeros(nodes, np.int32)
    for node in range(1, nodes):
        parent[node] = rng.choice([p for p in range(node) if depth[p] < steps])
        depth[node] = depth[parent[node]] + 1
    valid = np.arange(nodes) < rng.integers(nodes // 2, nodes + 1)
    path = [0]
    while children := [c for c in np.flatnonzero(parent == path[-1]) if valid[c]]:
        if rng.random() < 0.2:
            break
        path.append(int(rng.choice(children)))
    sets = rng.random((2, settings.num_layers, settings.num_experts)) < 0.5
    shape = (settings.num_layers, nodes, settings.num_experts)
    popular = rng.normal(size=settings.num_experts)
    return Verification(
        tokens=rng.integers(0, 90, nodes, np.int32),
        parent=parent,
        depth=depth,
        score=(-rng.exponential(size=nodes) * (depth > 0)).astype(np.float32),
        valid=valid,
        path=np.array(path + [0] * (steps + 1 - len(path)), np.int32),
        length=len(path),
        logits=(1.5 * rng.normal(size=shape) + popular).astype(np.float32),
        eligible=sets[0],
        used=sets[1],
    )


def requests(seed: int, lengths: tuple[int, ...]) -> dict[str, list[Verification]]:
    """Requests of so many verifications, by id."""
    rng = np.random.default_rng(seed)
    return {f"p{i}": [verification(rng) for _ in range(n)] for i, n in enumerate(lengths)}


def write(directory, of: dict[str, list[Verification]], **settings) -> TraceWriter:
    """Adds those requests that the trace of a folder does not hold yet."""
    writer = TraceWriter(directory, dataclasses.replace(SETTINGS, **settings))
    for prompt_id, verifications in of.items():
        if not writer.holds(prompt_id, token_ids(prompt_id)):
            writer.add(prompt_id, token_ids(prompt_id), verifications)
    return writer


def token_ids(prompt_id: str) -> list[int]:
    """Of a request's prompt."""
    return [len(prompt_id), *prompt_id.encode()]
