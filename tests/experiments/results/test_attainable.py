"""What looks learnable before any training, on tables where that is known."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import table_of, two_kinds

from knobwise.agents.predictors.experts import Experts
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.experiments.results import attainable as module
from knobwise.experiments.results.attainable import (
    QUICK,
    add_shares,
    attainable,
    attainable_by,
    gains_out_of_fold,
    oracle_of_halves,
)

BUDGETS = torch.tensor([11.0, 20.0])


def test_kinds_that_the_features_show_can_be_told_apart():
    # static is on time and right for half of the samples, a policy that knows the kind for all
    estimate = attainable(two_kinds(200, shown=True), BUDGETS)
    kind = two_kinds(200, shown=True).features["x"][:, 0] > 0
    most = float(torch.maximum(kind.double().mean(), 1 - kind.double().mean()))
    assert estimate["gain"] == pytest.approx(1 - most, abs=0.02)
    assert estimate["gain_ci95"][0] > 0.35
    assert (estimate["samples"], len(estimate["learned"])) == (200, 5)
    assert {len(at_budgets) for at_budgets in estimate["learned"]} == {2}


def test_features_cost_what_they_take():
    table = two_kinds(200, shown=True)
    free = attainable(table, torch.tensor([11.0]))["gain"]
    # 2 ms later every answer misses the deadline of 11 ms, so static decides
    paid = attainable(replace(table, features_ms=2.0), torch.tensor([11.0, 100.0]))
    assert free > 0.4
    assert not any(at_budgets[0] for at_budgets in paid["learned"])
    experts = Experts.fit(table, torch.arange(200), BUDGETS[:0], QUICK, 0)
    gains = gains_out_of_fold(replace(table, features_ms=2.0), experts, torch.tensor([11.0]))
    assert gains.mean() < -0.4


def test_without_features_or_folds_nothing_is_estimated():
    table = two_kinds(20, shown=True)
    assert attainable(replace(table, features={}), BUDGETS) is None
    assert attainable(replace(table, image_ids=("same",) * 20), BUDGETS) is None


def test_of_a_large_table_a_part_is_used(monkeypatch):
    monkeypatch.setattr(module, "MOST_SAMPLES", 50)
    assert attainable(two_kinds(90, shown=True), BUDGETS)["samples"] == 50


class Folds:
    """Experts of four samples in two folds."""

    def __init__(self):
        self.measured = self
        self.rows = torch.arange(4)
        self.folds = [(np.array([2, 3]), np.array([0, 1])), (np.array([0, 1]), np.array([2, 3]))]


def test_no_sample_chooses_the_policy_that_it_judges(monkeypatch):
    # at the first budget the policy is lucky in the first fold, so it decides in the second
    first = [0.4, 0.4, -0.2, -0.2]
    # at the second one static is best in both
    gains = np.stack([first, [-0.4] * 4], -1)
    monkeypatch.setattr(module, "gains_out_of_fold", lambda *_: gains)
    table = table_of(torch.ones(4, 2), torch.ones(4, 2))
    estimate = attainable_by(table, Folds(), BUDGETS)
    assert estimate["learned"] == [[False, False], [True, False]]
    assert estimate["gain"] == pytest.approx((0 + 0 - 0.2 - 0.2) / 4 / 2)


def test_samples_of_an_image_are_drawn_together(monkeypatch):
    gains = np.array([1.0, 1.0, 0.5, 0.5])[:, None]
    monkeypatch.setattr(module, "gains_out_of_fold", lambda *_: gains)
    table = table_of(torch.ones(4, 2), torch.ones(4, 2), image_ids=("a", "a", "b", "b"))
    assert attainable_by(table, Folds(), BUDGETS)["gain_ci95"] == [0.5, 1.0]


def test_an_oracle_has_no_luck_in_latencies_that_it_does_not_know():
    # every latency is drawn alike, so nothing can be known about the other half
    generator = torch.Generator().manual_seed(1)
    latency = torch.rand(2000, 10, 4, generator=generator) + 1
    table = table_of(torch.ones(2000, 10), latency)
    budget = torch.tensor([1.5])
    assert oracle_of_halves(table, budget) == pytest.approx(0.5, abs=0.02)
    # what is the same in every repeat is no luck
    same = table_of(torch.ones(2000, 10), latency[..., :1].expand(-1, -1, 3))
    best = (latency[..., 0] <= 1.5).any(1).double().mean()
    assert oracle_of_halves(same, budget) == pytest.approx(float(best))


def test_a_cell_that_was_measured_once_counts_in_both_halves():
    latency = torch.tensor([[[1.0, torch.nan], [5.0, 5.0]]])
    assert oracle_of_halves(table_of([[0.5, 1.0]], latency), torch.tensor([2.0, 9.0])) == 0.75
    once = table_of([[0.5, 1.0]], [[1.0, 5.0]])
    assert oracle_of_halves(once, default_budgets(once)) is None


def test_shares_of_what_looked_attainable():
    mean = {"budget_ms": None, "over_static": 0.01}
    rows = [mean, {"budget_ms": 5.0, "over_static": 0.01}]
    results = {"rows": [dict(row) for row in rows]}
    add_shares(results)
    assert results["rows"] == rows
    results["attainable"] = {"gain": 0.02, "gain_ci95": [0.001, 0.04]}
    add_shares(results)
    assert results["rows"] == [mean | {"attained": 0.5}, rows[1]]
    results["attainable"] = {"gain": 0.02, "gain_ci95": [-0.001, 0.04]}
    add_shares(results)
    assert results["rows"][0]["attained"] is None
