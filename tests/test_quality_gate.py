"""Audits: they change nothing, and a run that they find too lossy goes on natively."""

import numpy as np
import pytest

from acceptmoe_jax.errors import UserError
from acceptmoe_jax.runtime.quality_gate import FEWEST_ROWS, AuditConfig, QualityGate
from acceptmoe_jax.runtime.statistics import summarise
from acceptmoe_jax.selection import SelectorConfig
from tests import pocket

NEW_TOKENS = 24
# So few experts that most tokens differ.
HARSH = SelectorConfig(policy="moe_spec", budget=8)


def test_every_so_manieth_verification_is_due():
    gate = QualityGate(AuditConfig(every=3))
    assert [gate.is_due() for _ in range(7)] == [False, False, True, False, False, True, False]
    assert not any(QualityGate(AuditConfig()).is_due() for _ in range(5))


def test_the_gate_closes_once_enough_rows_disagree():
    gate = QualityGate(AuditConfig(every=1, max_disagreement=0.1))
    gate.add(rows=FEWEST_ROWS - 1, agreeing=0)
    assert not gate.closed  # too few rows to judge by
    gate.add(rows=FEWEST_ROWS, agreeing=FEWEST_ROWS)
    assert gate.closed
    assert not gate.is_due()  # native routing needs no audit


def test_the_gate_stays_open_at_the_limit():
    gate = QualityGate(AuditConfig(every=1, max_disagreement=0.25))
    gate.add(rows=80, agreeing=60)
    assert gate.disagreement == 0.25 and not gate.closed
    gate.add(rows=1, agreeing=0)
    assert gate.closed


@pytest.mark.parametrize(
    "field, settings",
    [
        ("audit_every", {"every": -1}),
        ("max_disagreement", {"every": 1, "max_disagreement": 1.0}),
        ("audit_every", {"max_disagreement": 0.1}),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field, settings):
    with pytest.raises(UserError, match=field):
        AuditConfig(**settings)


def test_a_run_that_disagrees_too_much_goes_on_natively_and_says_so():
    engine, prompts = pocket.engine(), pocket.prompts(each=2, seed=3)
    native = engine.generate(prompts, selector="native", max_new_tokens=NEW_TOKENS)
    options = {"selector": HARSH, "max_new_tokens": NEW_TOKENS, "audit_every": 1}
    free = engine.generate(prompts, **options)
    gated = engine.generate(prompts, max_disagreement=0.2, **options)
    assert summarise([g.statistics for g in free], 1)["fallback_share"] == 0
    summary = summarise([g.statistics for g in gated], 1)
    assert 0 < summary["fallback_share"] < 1
    # Once closed, the gate stays so: the last prompts are answered as Standard SD answers them.
    assert gated[-1].token_ids == native[-1].token_ids != free[-1].token_ids
    last = gated[-1].statistics
    assert last.fallback_verifications == last.verifications
    assert last.audited_rows == 0


def test_an_audit_reports_what_native_routing_would_have_accepted():
    engine, prompts = pocket.engine(), pocket.prompts(each=1, seed=3)
    [one] = engine.generate(prompts[:1], selector="native", max_new_tokens=6, audit_every=1)
    assert one.statistics.natural_rows == sum(one.statistics.accepted_lengths)
    audited = engine.generate(prompts, selector=HARSH, max_new_tokens=6, audit_every=1)
    accepted, natural = (
        np.array([getattr(g.statistics, name) for g in audited])
        for name in ("audited_rows", "natural_rows")
    )
    # The first verification of a prompt is of the same tree either way.
    assert natural.sum() > accepted.sum()
