"""The study of the guard on sparse profiles: what a case comes to, and how guards are compared."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from helpers import looked_at, small_table

from knobwise.envs.bandit.budgets import default_budgets
from knobwise.experiments.studies import sparse, sparse_tables
from knobwise.experiments.studies import sparse_guard as study


@pytest.fixture
def brief(monkeypatch):
    """Trainings of a second, on a small profile, of which a few decisions are enough."""
    monkeypatch.setattr("knobwise.envs.tables.measured_decisions.FEWEST_MEASURED", 1)
    for module in (study, sparse, sparse_tables):
        monkeypatch.setattr(module, "profile_named", lambda profile: small_table(60))
    few = {"contexts": 16, "minibatch": 16, "iterations": 4, "evaluate_every": 4}
    taught = {"pretrain_iterations": 4, "teacher_iterations": 4}
    monkeypatch.setattr(study, "COLD_OPTIMISER", replace(study.COLD_OPTIMISER, **few))
    monkeypatch.setattr(sparse, "OPTIMISER", replace(sparse.OPTIMISER, **few, **taught))
    monkeypatch.setattr(sparse, "POLICY", replace(sparse.POLICY, experts=("ridge",)))


def test_what_is_deployed_is_the_policy_or_static_at_each_budget(brief):
    results = study.utilities(sparse.Case("small", Fraction(1, 4), 0))
    assert len(results["rows"]) == 12
    for learner in study.LEARNERS:
        for guard in study.GUARDS[1:]:
            share = float(results[f"{learner}/{guard}/share"])
            if share == 0:
                assert results[f"{learner}/{guard}"].tolist() == results["static"].tolist()
            assert results[f"{learner}/{guard}"].shape == (12,)


@pytest.mark.parametrize("table", [small_table(60), looked_at(small_table(60))])
def test_gains_are_those_that_the_guard_goes_by(brief, table):
    budgets_ms = default_budgets(table)
    problem = sparse.Case("small", Fraction(1, 4), 0).problem(table, table.split())
    setup = study.grpo_alone(problem, budgets_ms, measured_only=False)
    guard = study.guarded(setup, budgets_ms)["apart"].calibration.guard
    gains = study.held_out_gains(setup, budgets_ms)
    assert gains.mean(0).tolist() == pytest.approx([row["gain"] for row in guard], abs=1e-6)


def test_gains_by_hand(brief, tmp_path, capsys):
    for draw in range(study.DRAWS):
        results = {"rows": np.arange(20 * draw, 20 * draw + 20), "static": np.full(20, 0.5)}
        for learner in study.LEARNERS:
            results |= {
                f"{learner}/free": np.full(20, 0.55),
                f"{learner}/pooled": np.full(20, 0.54),
            }
            results |= {f"{learner}/apart": np.full(20, 0.52)}
            results |= {f"{learner}/{guard}/share": np.array(0.4) for guard in study.GUARDS[1:]}
        np.savez(sparse.Case("builtin", study.SHARES[0], draw).path(tmp_path), **results)
    study.main(["table", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "| built-in | 1/16 | 3 | 50.0 | +5.0 [5.0, 5.0] | +2.0 [2.0, 2.0] at 40 % |" in printed
    assert "imitation/pooled − imitation/apart: +2.0 [2.0, 2.0]" in printed
