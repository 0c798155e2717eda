"""What the suites of commitment_select share: policies, blocks, and the checks of a kernel."""

import dataclasses
import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from acceptmoe_jax.selection import SelectorConfig
from pallas_kernels.commitment_select import SHAPES, commitment_select, random_arguments
from tests.selection_blocks import block, mask_of, members

_TRUNCATE = dict(policy="moe_spec", budget=6, moe_spec_mode="truncate")

# Every policy, ablation and size rule; two meet k = 1 and other exponents.
CONFIGS = {
    "native": SelectorConfig(policy="native", top_k=3),
    "native_not_normalised": SelectorConfig(policy="native", top_k=3, norm_topk_prob=False),
    "acceptmoe": SelectorConfig(top_k=3),
    "acceptmoe_not_normalised": SelectorConfig(top_k=3, norm_topk_prob=False),
    "unprotected_anchor": SelectorConfig(top_k=3, protect_anchor=False),
    "no_pruning": SelectorConfig(top_k=3, prune=False),
    "no_anchor": SelectorConfig(top_k=3, anchor=False),
    "uniform": SelectorConfig(top_k=3, uniform=True),
    "participation_ratio": SelectorConfig(top_k=3, size_rule="participation_ratio"),
    "mass": SelectorConfig(top_k=3, size_rule="mass", mass=0.8),
    "acceptmoe_fix": SelectorConfig(policy="acceptmoe_fix", top_k=3, budget=6),
    "fix_without_anchor": SelectorConfig(
        policy="acceptmoe_fix", top_k=3, budget=6, anchor=False, norm_topk_prob=False
    ),
    "moe_spec": SelectorConfig(policy="moe_spec", top_k=3, budget=6),
    "moe_spec_not_normalised": SelectorConfig(
        policy="moe_spec", top_k=3, budget=6, norm_topk_prob=False
    ),
    "truncate": SelectorConfig(top_k=3, **_TRUNCATE),
    "truncate_renormalised": SelectorConfig(top_k=3, renormalize_truncated=True, **_TRUNCATE),
    "truncate_renormalised_not_normalised": SelectorConfig(
        top_k=3, renormalize_truncated=True, norm_topk_prob=False, **_TRUNCATE
    ),
    "one_expert_a_token": SelectorConfig(top_k=1),
    "other_exponents": SelectorConfig(top_k=3, beta=0.7, gamma=0.0),
    "admission": SelectorConfig(top_k=3, admit=2),
    "path_and_admission": SelectorConfig(
        top_k=3, path=True, beta=0.7, admit=1, protect_anchor=False, norm_topk_prob=False
    ),
    "cache_conditional": SelectorConfig(policy="cache_conditional", top_k=3, cache_bias=0.3),
    "cache_conditional_not_normalised": SelectorConfig(
        policy="cache_conditional", top_k=3, cache_bias=0.3, cache_keep=0, norm_topk_prob=False
    ),
}


def blocks() -> tuple[np.ndarray, ...]:
    """A batch of blocks of one shape, stacked: what may differ from block to block, edges included.

    The first 14 are one block whose experts are rolled around, so that each of them is in turn
    anchor, pruned, kept, left out and let back in: a mask's entry that were never written would
    show.
    """
    nothing, everything = np.zeros(14, bool), np.ones(14, bool)
    base = block(17, padded=2)
    resident = mask_of([7], 14)
    cases = [
        _changed(base, logits=np.roll(base[0], shift, axis=1), resident=np.roll(resident, shift))
        for shift in range(14)
    ]
    cases += [block(seed, padded=seed % 5) for seed in range(10, 18)]
    cases += [_changed(block(seed), resident=nothing) for seed in (20, 21)]
    cases.append(_changed(block(22), resident=everything))
    for junk_logit, junk_depth in ((np.nan, -1), (np.inf, 2), (1e30, 99)):
        logits, depth, valid, *rest = block(23, padded=5)
        logits = np.where(valid[:, None], logits, np.float32(junk_logit))
        cases.append((logits, np.where(valid, depth, junk_depth).astype(np.int32), valid, *rest))
    # Ties: in all logits, and as bfloat16 makes them.
    cases.append(_changed(base, logits=np.zeros_like(base[0])))
    coarse = np.asarray(jnp.asarray(base[0], jnp.bfloat16), np.float32)
    cases.append(_changed(base, logits=np.round(coarse)))
    logits = base[0].copy()
    logits[1], logits[2, 6:], logits[4, 1:] = -np.inf, -np.inf, -np.inf
    logits[0, 3:] = -np.inf
    cases.append(_changed(base, logits=logits))
    for poisoned in (np.s_[5], np.s_[5, 2]):
        logits = base[0].copy()
        logits[poisoned] = np.nan
        cases.append(_changed(base, logits=logits))
    cases.append(_changed(base, valid=np.zeros(17, bool)))
    cases.append(_changed(base, valid=np.arange(17) < 1))
    cases.append(_changed(base, depth=np.arange(17, dtype=np.int32)))  # beyond the table
    return tuple(np.stack(arrays) for arrays in zip(*cases))


def _changed(case, **new):
    names = ("logits", "depth", "valid", "phat", "resident")
    return tuple(new.get(name, array) for name, array in zip(names, case))


def run(implementation: str, config: SelectorConfig, *, batched: bool = True):
    """A compiled `commitment_select` of the positional arrays and then the override, or None."""

    def one(logits, depth, valid, phat, resident=None, override=None):
        return commitment_select(
            logits,
            depth,
            valid,
            phat,
            resident,
            config=config,
            eligible_override=override,
            path_phat=_path_phat(depth, phat) if config.path else None,
            implementation=implementation,
            interpret=implementation != "reference",
        )

    # Compiling is most of a test's time, and there is nothing here for an optimiser to win.
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(jax.vmap(one) if batched else one, compiler_options=options)


def _path_phat(depth, phat):
    """Of each node: its depth's, and less the later it comes."""
    return phat[depth.clip(0, len(phat) - 1)] * 0.9 ** jnp.arange(len(depth))


def assert_agree(ours, theirs):
    """Every field: decisions equal, floats within 1e-5 for 99.9 % and 1e-4 for all.

    Of the largest finite magnitude in the field; NaN and infinity stand where they should.
    """
    for field in dataclasses.fields(theirs):
        a, b = (np.asarray(getattr(result, field.name)) for result in (ours, theirs))
        assert a.dtype == b.dtype and a.shape == b.shape, field.name
        if a.dtype != np.float32:
            np.testing.assert_array_equal(a, b, err_msg=field.name)
            continue
        finite = np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite], err_msg=field.name)
        error = np.abs(a[finite] - b[finite])
        scale = np.abs(b[finite]).max(initial=0)
        assert (error <= 1e-4 * scale).all(), (field.name, error.max())
        assert np.mean(error <= 1e-5 * scale) >= 0.999, field.name


def check_against_select(implementation, config, arrays, override=None, batched=True):
    """The kernel's results, after they agreed with `select`'s."""
    arrays = arrays if override is None else (*arrays, override)
    ours, theirs = (
        run(which, config, batched=batched)(*arrays) for which in (implementation, "reference")
    )
    assert_agree(ours, theirs)
    return ours


def check_shape(implementation, name):
    shape = SHAPES[name]
    arguments = random_arguments(jax.random.key(7), shape)
    config = SelectorConfig(top_k=shape.top_k)
    ours = check_against_select(implementation, config, arguments, batched=False)
    assert shape.rows == 1 or 0 < ours.used_count < shape.experts


def check_root_is_exact(implementation, norm_topk_prob):
    config = SelectorConfig(top_k=3, norm_topk_prob=norm_topk_prob)
    # The set is data in both calls, so the program is one and the bits must agree.
    compiled = run(implementation, config)
    batch = tuple(np.stack(arrays) for arrays in zip(*(block(seed) for seed in range(6))))
    natural = compiled(*batch, np.ones((6, 14), bool))
    own = natural.eligible_before_pruning & ~natural.pruned
    restricted = compiled(*batch, own)
    assert not own.all()
    np.testing.assert_array_equal(natural.expert_ids, natural.natural_ids)
    np.testing.assert_array_equal(restricted.expert_ids[:, 0], natural.natural_ids[:, 0])
    np.testing.assert_array_equal(restricted.weights[:, 0], natural.weights[:, 0])


@functools.cache
def worked_cases() -> dict[str, list[dict]]:
    """The worked cases by shape; those of a shape run as one batch."""
    path = pathlib.Path(__file__).parent / "data" / "selection.json"

    def shape(case):
        rows, experts = np.shape(case["logits"])
        return f"T{rows}_E{experts}_k{case['k']}"

    cases = sorted(json.loads(path.read_text()), key=shape)
    return {name: list(group) for name, group in itertools.groupby(cases, shape)}


def case_arrays(cases: list[dict]) -> tuple[np.ndarray, ...]:
    """The arrays of cases of one shape, stacked."""
    experts = np.shape(cases[0]["logits"])[1]

    def resident(case):
        ids = range(experts) if case["resident"] is None else case["resident"]
        return mask_of(list(ids), experts)

    return (
        np.array([case["logits"] for case in cases], np.float32),
        np.array([case["depth"] for case in cases], np.int32),
        np.array([case["valid"] for case in cases]),
        np.array([case["phat"] for case in cases], np.float32),
        np.array([resident(case) for case in cases]),
    )


def case_config(case: dict, **settings) -> SelectorConfig:
    """The configuration that a case was worked with, but for the settings."""
    return SelectorConfig(top_k=case["k"], beta=case["beta"], gamma=case["gamma"], **settings)


def check_worked_cases(implementation, cases):
    """Every intermediate, against the case file."""
    result = run(implementation, case_config(cases[0]))(*case_arrays(cases))
    for at, case in enumerate(cases):
        mine, expect = jax.tree.map(lambda leaf: leaf[at], result), case["expect"]
        np.testing.assert_array_equal(mine.natural_ids, expect["natural_topk"])
        np.testing.assert_array_equal(mine.assignments, expect["assignments"])
        np.testing.assert_array_equal(mine.expert_ids, expect["expert_ids"])
        for name in ("anchor", "eligible_before_pruning", "pruned", "eligible"):
            assert members(getattr(mine, name)) == set(expect[name]), (case["name"], name)
        for name in ("effective_rank_size", "rerouting_budget"):
            assert getattr(mine, name) == expect[name], (case["name"], name)
        for name in ("alpha", "demand", "entropy", "weights"):
            np.testing.assert_allclose(getattr(mine, name), expect[name], rtol=1e-5, atol=1e-6)
        assert mine.used_ids[: mine.used_count].tolist() == expect["used"]
