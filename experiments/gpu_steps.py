"""The section of `experiments.gpu_check` that times whole verification steps.

Random weights route nearly evenly, so the sets are imposed: one as large as the natural unions
that were published for trees of 64 nodes, and one as large as AcceptMoE's sets. They are data of
one compiled program, so that nothing else tells the two apart.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from acceptmoe_jax.files import read_json
from acceptmoe_jax.models.config import TargetConfig
from acceptmoe_jax.models.published import PUBLISHED, Published
from acceptmoe_jax.runtime import abstract, programs, stages
from acceptmoe_jax.runtime.random_weights import random_weights
from acceptmoe_jax.selection import Commitment, SelectorConfig
from acceptmoe_jax.speculation import DraftTree
from experiments.gpu_plan import POCKETS, Item, Plan, Row, pocket_pair
from pallas_kernels.implementations import KERNELS, Implementations
from pallas_kernels.measure import device_of, median_seconds

_DTYPE = jnp.bfloat16
_MOST_DEPTH = 5
_SETS = {"native": 64, "acceptmoe": 28}  # experts a layer
_RESERVE = 2 << 30  # what a step needs beside weights and caches

COLUMNS = {
    "target": "",
    "layers": "",
    "nodes": "d",
    "cached": "d",
    "kernels": "",
    "method": "",
    "used": ".1f",
    "milliseconds": ".3f",
    "ratio_to_native": ".2f",
    "gigabytes": ".2f",
    "share_of_bandwidth": ".0%",
    "error": "",
}


def steps(plan: Plan) -> Iterator[Item]:
    """Full-size verification steps with the kernels, and in plain XLA."""
    first, *others = plan.kernels_of_models
    for name in (first, "xla", *others):
        implementations = plan.kernels.get(name, KERNELS["xla"])
        for published in targets(plan):
            measure = functools.partial(_step_rows, published, implementations, plan)
            yield Item({"target": published.name, "kernels": name}, measure)


def targets(plan: Plan) -> list[Published]:
    """The published ones; for a rehearsal a pocket one."""
    if not plan.rehearsal:
        return list(PUBLISHED.values())
    name = POCKETS[0]
    config, head = (read_json(f"{directory}/config.json") for directory in pocket_pair(name))
    return [Published(name, config, head, mxfp4=False)]


def _layers_that_fit(setup: programs.Setup, mxfp4: bool, cached: int) -> int:
    layers = setup.target.num_layers
    memory = jax.devices()[0].memory_stats()
    if memory is None:
        return layers
    free = memory["bytes_limit"] - memory["bytes_in_use"] - _RESERVE

    def size(layers: int) -> int:
        cut = abstract.with_layers(setup, layers)
        rows = cached + setup.spare_rows
        state = jax.eval_shape(lambda: programs.empty_state(cut, rows, _DTYPE))
        return _bytes(abstract.abstract_weights(cut, _DTYPE, mxfp4=mxfp4)) + _bytes(state)

    few = 4  # the head reads three layers below the last
    a_layer = (size(layers) - size(few)) / (layers - few)
    return int(np.clip(few + (free - size(few)) // a_layer, few, layers))


def random_tree(setup: programs.Setup) -> DraftTree:
    """Distinct tokens, so that the rows' routing has nothing in common."""
    rng = np.random.default_rng(0)
    nodes = setup.tree.nodes
    parent, depth = np.full(nodes, -1), np.zeros(nodes, int)
    for node in range(1, nodes):
        parent[node] = rng.choice(np.flatnonzero(depth[:node] < _MOST_DEPTH))
        depth[node] = depth[parent[node]] + 1
    tokens = rng.choice(setup.target.vocab_size, nodes, replace=False)
    return DraftTree(
        tokens=jnp.asarray(tokens, jnp.int32),
        parent=jnp.asarray(parent, jnp.int32),
        depth=jnp.asarray(depth, jnp.int32),
        score=jnp.zeros(nodes),
        valid=jnp.ones(nodes, bool),
    )


def _step_rows(published: Published, implementations: Implementations, plan: Plan) -> list[Row]:
    """Both sets through one compiled program, in which they are data."""
    whole = abstract.published_setup(published, implementations)
    layers = _layers_that_fit(whole, published.mxfp4, plan.cached)
    setup = abstract.with_layers(whole, layers)
    target = setup.target
    weights = random_weights(abstract.abstract_weights(setup, _DTYPE, mxfp4=published.mxfp4))
    state = programs.empty_state(setup, plan.cached + setup.spare_rows, _DTYPE)
    states = [state.replace(length=jnp.int32(plan.cached))]
    tree = random_tree(setup)
    commitment = Commitment(jnp.ones(_MOST_DEPTH + 1))
    selector = SelectorConfig(
        policy="acceptmoe", top_k=target.top_k, norm_topk_prob=target.norm_topk_prob
    )

    def verify(weights, state, eligible):
        block = stages.tree_block(state, tree)
        out = programs.forward(setup, weights, state, block, selector, commitment, eligible)
        tokens = jnp.argmax(stages.unembed(setup, weights, out.hidden), axis=-1)
        counts, _ = stages.stack_layers(out.moe)
        return state.replace(caches=out.caches), (tokens, counts.used)

    program = jax.jit(verify, donate_argnums=1)
    results = {}

    def run(method: str, eligible: jax.Array) -> Any:
        state, results[method] = program(weights, states.pop(), eligible)
        states.append(state)
        return results[method]

    runs = {
        method: functools.partial(run, method, _imposed_sets(target, size))
        for method, size in _SETS.items()
    }
    seconds = median_seconds(runs, plan.rounds)
    device = device_of(jax.devices()[0].device_kind)
    rows = []
    for method, taken in seconds.items():
        used = np.asarray(results[method][1])
        moved = _bytes_read(target, weights, used, plan.cached)
        rows.append(
            {
                "layers": f"{target.num_layers} of {whole.target.num_layers}",
                "nodes": setup.tree.nodes,
                "cached": plan.cached,
                "moe_layers": len(target.moe_layers),
                "method": method,
                "imposed": _SETS[method],
                "used": float(used.mean()),
                "milliseconds": 1e3 * taken,
                "ratio_to_native": taken / seconds["native"],
                "gigabytes": moved / 1e9,
                "share_of_bandwidth": device and moved / taken / device.memory_bandwidth,
            }
        )
    return rows


def _imposed_sets(target, size: int) -> jax.Array:
    """`bool[L, E]`: a random set of so many experts in each MoE layer."""
    rng = np.random.default_rng(size)
    ranks = np.stack([rng.permutation(target.num_experts) for _ in target.moe_layers])
    return jnp.asarray(ranks < size)


def _bytes_read(
    target: TargetConfig, weights: programs.Weights, used: np.ndarray, cached: int
) -> int:
    """What a verification must read once: dense weights, used experts, visible keys and values."""
    dense = {name: leaf for name, leaf in weights.target.items() if name != "embed_tokens"}
    experts = sum(
        int(count) * _bytes(weights.banks[layer]) // target.num_experts
        for layer, count in zip(target.moe_layers, used)
    )
    position = 2 * target.num_kv_heads * target.head_dim * jnp.dtype(_DTYPE).itemsize
    seen = sum(min(cached, target.window(layer) or cached) for layer in range(target.num_layers))
    return _bytes(dense) + experts + seen * position


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
