"""Plain-Python oracles for the speculation tests, and a fake draft model both sides can run.

The oracles build trees of explicit node objects and walk them by recursion; they share no code
with `acceptmoe_jax.speculation`. The fake draft's log-probabilities depend on the whole path, once
through the hidden state that is handed on and once through the scratch rows that the ancestor mask
shows, so that a slip in either gives another tree. They are multiples of 1/64: sums are exact, and
equality with the oracle is exact too.
"""

import dataclasses
import heapq

import jax
import jax.numpy as jnp
import numpy as np

from acceptmoe_jax.speculation import DraftTree

VOCABULARY = 23
MARKER = 7  # slot 0 of every hidden state


def target_id(draft_id):
    """The target vocabulary's id of a draft id; the fake's `d2t`."""
    return 3 * draft_id + 5


def _mix(x):
    """A 32-bit integer hash, the same on NumPy and JAX arrays."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _words(x, salt):
    slots = np.arange(x.shape[-1], dtype=np.uint32) * np.uint32(0x9E3779B1)
    return _mix(x.astype(np.uint32) * np.uint32(0x85EBCA77) + slots + np.uint32(salt))


@dataclasses.dataclass(frozen=True)
class FakeDraft:
    """A draft model as a table over paths.

    Attributes:
      seed: names the table.
      levels: log-probabilities are 0, -1/64, ... -(levels - 1)/64; a low number makes ties.
      holes: of 8 entries, how many are impossible (-inf).
    """

    seed: int
    levels: int = 4096
    holes: int = 0

    def logp(self, hidden, scratch_key, token):
        """Returns the log-probabilities [..., V] after `token`, on NumPy or JAX arrays.

        hidden [..., D] encodes the path before the token; scratch_key [...] sums the visible rows.
        """
        xnp = jnp if isinstance(hidden, jax.Array) else np
        key = _words(hidden, 1).sum(-1, dtype=np.uint32) + scratch_key * np.uint32(3)
        key = key + _words(token[..., None], 2)[..., 0]
        key = key + xnp.asarray(self.seed).astype(np.uint32) * np.uint32(1013)
        entry = _words(xnp.broadcast_to(key[..., None], (*key.shape, VOCABULARY)), 3)
        levels = xnp.asarray(self.levels).astype(np.uint32)
        logp = -((entry % levels).astype(np.float32) / np.float32(64))
        return xnp.where(_mix(entry) % np.uint32(8) < self.holes, -np.inf, logp)

    def after_path(self, path, steps):
        """Returns the log-probabilities [V] after a path of target ids, the root's first."""
        hidden = np.zeros((1, steps + 1), np.float32)
        hidden[0, 0] = MARKER
        hidden[0, 1 : len(path) - 1] = np.asarray(path[1:-1]) + 1
        scratch_key = np.zeros(1, np.uint32)
        for step, token in enumerate(path[1:]):
            scratch_key += scratch_word(np.array([[token]]), step)
        return self.logp(hidden, scratch_key, np.array(path[-1:]))[0]

    def first(self, root_token, config):
        """Returns `grow`'s three `first_*` arguments: after the root, no row of scratch written."""
        hidden = jnp.zeros(config.steps + 1).at[0].set(MARKER)
        logp = self.logp(hidden, jnp.uint32(0), jnp.asarray(root_token))
        logp, ids = jax.lax.top_k(logp, config.top_k)
        return logp, target_id(ids), hidden

    def step_fn(self, config, calls=None):
        """Returns a `step_fn` for `grow`; its carry is the scratch, uint32[R].

        Each call appends what it got, (step, tokens, hidden, ancestors), to `calls`.
        """

        def step_fn(scratch, step, tokens, hidden, ancestors):
            if calls is not None:
                calls.append((step, tokens, hidden, ancestors))
            rows = slice(step * config.top_k, (step + 1) * config.top_k)
            scratch = scratch.at[rows].set(scratch_word(tokens[:, None], step))
            scratch_key = jnp.sum(jnp.where(ancestors, scratch, 0), axis=-1, dtype=jnp.uint32)
            logp, ids = jax.lax.top_k(self.logp(hidden, scratch_key, tokens), config.top_k)
            return scratch, logp, target_id(ids), hidden.at[:, step + 1].set(tokens + 1)

        return step_fn


def scratch_word(tokens, step):
    """What a beam's scratch row holds; tokens [..., 1]."""
    return _words(tokens, 100 + step)[..., 0]


@dataclasses.dataclass(frozen=True)
class Node:
    """A candidate, which knows its parent and its place in the pool."""

    token: int
    score: float
    place: int
    parent: "Node | None"

    @property
    def path(self):
        return (*(self.parent.path if self.parent else ()), self.token)


def oracle_tree(draft, root_token, config):
    """Returns the tree as a list of nodes, the root first, in the order of their numbers."""
    root = Node(root_token, 0.0, -1, None)
    pool, beams = [], [root]
    for _ in range(config.steps):
        level = []
        for beam in beams:
            logp = draft.after_path(beam.path, config.steps)
            best = sorted(range(VOCABULARY), key=lambda v: (-logp[v], v))[: config.top_k]
            for v in best:
                place = len(pool) + len(level)
                level.append(Node(target_id(v), beam.score + float(logp[v]), place, beam))
        pool += level
        beams = best_nodes(level, config.top_k)
    return [root, *sorted(best_nodes(pool, config.nodes - 1), key=lambda node: node.place)]


def best_nodes(nodes, count):
    return heapq.nsmallest(count, nodes, key=lambda node: (-node.score, node.place))


def assert_same_tree(tree, nodes):
    """Compares a `DraftTree` with the oracle's nodes, field by field and exactly."""
    number = {id(node): i for i, node in enumerate(nodes)}
    parents = [number[id(node.parent)] if node.parent else -1 for node in nodes]
    np.testing.assert_array_equal(tree.tokens, [node.token for node in nodes])
    np.testing.assert_array_equal(tree.parent, parents)
    np.testing.assert_array_equal(tree.depth, [len(node.path) - 1 for node in nodes])
    np.testing.assert_array_equal(tree.score, np.float32([node.score for node in nodes]))
    np.testing.assert_array_equal(tree.valid, [node.score > -np.inf for node in nodes])


def tree_of(tokens, parent, valid=None):
    """Returns a `DraftTree` of NumPy arrays written by hand; `parent[0]` is -1."""
    depth = []
    for above in parent:
        depth.append(0 if above < 0 else depth[above] + 1)
    return DraftTree(
        tokens=np.asarray(tokens, np.int32),
        parent=np.asarray(parent, np.int32),
        depth=np.asarray(depth, np.int32),
        score=-np.asarray(depth, np.float32),
        valid=np.ones(len(parent), bool) if valid is None else np.asarray(valid),
    )


def random_tree(rng, nodes, max_depth, vocabulary):
    """Returns a random tree, parents before children; a small vocabulary repeats siblings' tokens.

    Some nodes are invalid, and so are all of their descendants.
    """
    parent, depth, valid = [-1], [0], [True]
    for _ in range(nodes - 1):
        above = int(rng.choice([i for i, d in enumerate(depth) if d < max_depth]))
        parent.append(above)
        depth.append(depth[above] + 1)
        valid.append(valid[above] and rng.random() < 0.9)
    return tree_of(rng.integers(vocabulary, size=nodes), parent, valid)


def oracle_walk(tree, target_argmax, node=0):
    """Returns the accepted path below and with `node`, by recursion."""
    for child in range(len(tree.parent)):
        agrees = tree.tokens[child] == target_argmax[node]
        if tree.parent[child] == node and tree.valid[child] and agrees:
            return [node, *oracle_walk(tree, target_argmax, child)]
    return [node]


def random_scores(rng, tree, levels):
    """Returns the tree with scores as `grow` makes them: none above its parent's, siblings falling.

    They are multiples of 1/4, exact in float32; few `levels` make ties. Invalid nodes have -inf.
    """
    score, last_child = [0.0], {}
    for node in range(1, len(tree.parent)):
        above = int(tree.parent[node])
        ceiling = min(score[above], last_child.get(above, 0.0))
        score.append(ceiling - int(rng.integers(levels)) / 4 if tree.valid[node] else -np.inf)
        if tree.valid[node]:
            last_child[above] = score[node]
    return tree.replace(score=np.asarray(score, np.float32))


def oracle_best(tree, count):
    """Returns the numbers of the root and the best `count - 1` other nodes, ascending."""
    drafts = [node for node in range(1, len(tree.parent)) if tree.valid[node]]
    drafts.sort(key=lambda node: (-tree.score[node], node))
    drafts += [node for node in range(1, len(tree.parent)) if not tree.valid[node]]
    return [0, *sorted(drafts[: count - 1])]
