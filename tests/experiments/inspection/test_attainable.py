"""What looks learnable before any training, on tables where that is known."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import small_table, table_of, two_kinds

from knobwise.agents.problem import Problem
from knobwise.agents.teacher.experts import Experts
from knobwise.envs.bandit.budgets import default_budgets
from knobwise.experiments.inspection import attainable as module
from knobwise.experiments.inspection.attainable import (
    QUICK,
    WAYS,
    add_shares,
    attainable,
    attainable_by,
    is_scattered,
    learning_curve,
    oracle_of_halves,
    repeated_share,
    samples_of_setting,
    utilities_out_of_fold,
)
from knobwise.profiling.design.cell_design import balanced_cells, with_cells

BUDGETS = torch.tensor([11.0, 20.0])


def test_kinds_that_the_features_show_can_be_told_apart():
    # static is on time and right for half of the samples, a policy that knows the kind for all
    table = two_kinds(200, shown=True)
    estimate = attainable(table, BUDGETS)
    share = float((table.features["x"][:, 0] > 0).double().mean())
    assert estimate["gain"] == pytest.approx(min(share, 1 - share), abs=0.02)
    assert estimate["gain_ci95"][0] > 0.35
    assert estimate["samples"] == 200
    assert np.shape(estimate["learned"]) == (5, 2)


def evenly_two_kinds():
    """As many samples of each kind, each of which needs its own configuration: static is for the
    kind that is rarer among the samples that it was not chosen on."""
    kind = torch.arange(200) % 2
    accuracy = torch.stack([kind, 1 - kind], 1).float()
    return table_of(accuracy, torch.full((200, 2), 10.0), kind.float().unsqueeze(1))


@pytest.mark.parametrize(
    "table",
    [
        evenly_two_kinds(),
        replace(two_kinds(90, shown=True), features_ms=0.5),
        small_table(90),
        small_table(90, holes=0.5),
    ],
)
def test_nothing_gains_more_than_an_oracle_on_the_same_samples(table):
    found = attainable(table, BUDGETS)
    assert 0 < found["gain"] <= found["oracle"]
    for learned, most in zip(found["gain_ci95"], found["oracle_ci95"], strict=True):
        assert learned <= most


def test_static_is_no_better_for_the_oracle_than_for_the_policy():
    """Chosen on the samples that it is judged on, it has half of them right; by the other folds
    less."""
    found = attainable(evenly_two_kinds(), BUDGETS)
    assert found["oracle"] == pytest.approx(found["gain"], abs=0.02)
    assert found["oracle"] > 0.5


def scattered(samples, share):
    """Settings of which each is measured on so many samples, two on each sample."""
    of_group = torch.arange(samples) // share
    mask = torch.arange(2 * int(of_group.max() + 1)) // 2 == of_group.unsqueeze(1)
    draws = torch.rand(2, *mask.shape, generator=torch.Generator().manual_seed(0))
    accuracy, latency = draws.where(mask, torch.nan)
    return table_of(accuracy, 1 + latency, torch.randn(samples, 2))


@pytest.mark.parametrize(
    ("table", "count", "known"),
    [
        (scattered(30, 1), 1, False),
        (scattered(30, 2), 2, False),
        (scattered(30, 3), 3, True),
        # folds do not part samples of an image
        (replace(scattered(30, 3), image_ids=tuple(str(row // 3) for row in range(30))), 1, False),
        # too small to tell that it is a search
        (scattered(2, 1), 1, True),
    ],
)
def test_where_each_setting_was_seen_on_one_or_two_samples_nothing_is_estimated(
    table, count, known
):
    rows = torch.arange(table.num_samples)
    assert samples_of_setting(table, rows) == count
    assert is_scattered(table, rows) != known
    if len(rows) > 2:
        budgets_ms = default_budgets(table)
        assert (attainable(table, budgets_ms) is not None) == known
        assert known or learning_curve(table, budgets_ms) == []
        # as in training
        experts = Experts.fit(table, rows, budgets_ms[:0], QUICK, 0, ways=WAYS, on_all=False)
        assert (attainable_by(table, experts, budgets_ms) is not None) == known


def test_features_cost_what_they_take():
    table = two_kinds(200, shown=True)
    assert attainable(table, BUDGETS[:1])["gain"] > 0.4
    # 2 ms later every answer misses the deadline of 11 ms, so static decides
    paid = replace(table, features_ms=2.0)
    learned = attainable(paid, torch.tensor([11.0, 100.0]))["learned"]
    assert not any(at_tight for at_tight, _ in learned)
    experts = Experts.fit(table, torch.arange(200), BUDGETS[:0], QUICK, 0)
    policy, static = utilities_out_of_fold(Problem.from_table(paid), experts, BUDGETS[:1])
    assert (policy - static).mean() < -0.4


def test_without_features_or_folds_nothing_is_estimated():
    table = two_kinds(20, shown=True)
    assert attainable(replace(table, features={}), BUDGETS) is None
    assert attainable(replace(table, image_ids=("same",) * 20), BUDGETS) is None


def test_of_a_large_table_a_part_is_used(monkeypatch):
    monkeypatch.setattr(module, "MAX_SAMPLES", 50)
    assert attainable(two_kinds(90, shown=True), BUDGETS)["samples"] == 50


@pytest.fixture
def estimate(monkeypatch):
    """Return the estimate from the gains of four samples, [4, budgets], in two folds."""
    halves = np.array([0, 1]), np.array([2, 3])
    measured = SimpleNamespace(rows=torch.arange(4), folds=[halves[::-1], halves])

    def by_gains(gains, **about):
        zeros = np.zeros(np.shape(gains))
        utilities = np.array(gains), zeros
        monkeypatch.setattr(module, "utilities_out_of_fold", lambda *_: utilities)
        table = table_of(torch.ones(4, 2), torch.ones(4, 2), **about)
        return attainable_by(table, SimpleNamespace(measured=measured), BUDGETS)

    return by_gains


def test_no_sample_chooses_the_policy_that_it_judges(estimate):
    # at the first budget the policy is lucky in the first fold, so it decides in the second; at the
    # second one static is best in both
    found = estimate([[0.4, -0.4], [0.4, -0.4], [-0.2, -0.4], [-0.2, -0.4]])
    assert found["learned"] == [[False, False], [True, False]]
    assert found["gain"] == pytest.approx((0 + 0 - 0.2 - 0.2) / 4 / 2)


def test_samples_of_an_image_are_drawn_together(estimate):
    found = estimate([[1.0], [1.0], [0.5], [0.5]], image_ids=tuple("aabb"))
    assert found["gain_ci95"] == [0.5, 1.0]


def test_an_oracle_has_no_luck_in_latencies_that_it_does_not_know():
    # every latency is drawn alike, so nothing can be known about the other half
    latency = torch.rand(2000, 10, 4, generator=torch.Generator().manual_seed(1)) + 1
    ones, budget = torch.ones(2000, 10), torch.tensor([1.5])
    assert oracle_of_halves(table_of(ones, latency), budget) == pytest.approx(0.5, abs=0.02)
    # what is the same in every repeat is no luck
    same = latency[..., :1].expand(-1, -1, 3)
    best = float((latency[..., 0] <= 1.5).any(1).double().mean())
    assert oracle_of_halves(table_of(ones, same), budget) == pytest.approx(best)


def test_a_cell_that_was_measured_once_counts_in_both_halves():
    latency = torch.tensor([[[1.0, torch.nan], [5.0, 5.0]]])
    assert oracle_of_halves(table_of([[0.5, 1.0]], latency), torch.tensor([2.0, 9.0])) == 0.75
    once = table_of([[0.5, 1.0]], [[1.0, 5.0]])
    assert oracle_of_halves(once, default_budgets(once)) is None


def test_one_cell_that_was_repeated_says_nothing_about_luck():
    latency = torch.rand(50, 4, 2) + 1
    latency[..., 1] = torch.nan
    latency[3, 1, 1] = 1.5
    table = table_of(torch.ones(50, 4), latency)
    assert repeated_share(table) == pytest.approx(1 / 200)
    assert oracle_of_halves(table, torch.tensor([1.5])) is None


def test_wide_features_are_projected_and_many_cells_thinned(monkeypatch):
    monkeypatch.setattr(module, "WIDEST", 6)
    monkeypatch.setattr(module, "COMPONENTS", 3)
    monkeypatch.setattr(module, "MAX_CELLS", 12 * 600)
    table = small_table(700)
    found = attainable(table, default_budgets(table))
    assert (found["components"], found["samples"]) == (3, 600)


def test_a_learning_curve_ends_at_what_is_attainable_from_all_cells():
    table = small_table(150)
    table = replace(table, costs={"usd": 0.01 * table.latency_ms})
    budgets_ms = default_budgets(table)
    curve = learning_curve(table, budgets_ms)
    assert [point["cells"] for point in curve] == [1, 2, 3, 12]
    whole = curve[-1]
    assert whole["utility"] - whole["static"] == pytest.approx(
        attainable(table, budgets_ms)["gain"]
    )
    assert (whole["behind"], whole["behind_ci95"]) == (0, [0, 0])
    assert whole["cost"] == pytest.approx(float(table.latency_ms.sum()), rel=1e-6)
    for point in curve:
        assert point["behind"] == pytest.approx(whole["utility"] - point["utility"])
        assert point["costs"] == {"usd": pytest.approx(0.01 * point["cost"], rel=1e-5)}
        assert point["cost"] == pytest.approx(whole["cost"] * point["cells"] / 12, rel=0.1)
    # a twelfth of the cells is not enough here, a quarter is nearly
    assert curve[0]["behind"] > curve[2]["behind"] > -0.02


def test_where_few_cells_were_measured_the_curve_goes_up_to_these():
    whole = small_table(150)
    table = with_cells(whole, balanced_cells(150, 12, 4))
    curve = learning_curve(table, default_budgets(whole))
    assert [point["cells"] for point in curve] == [1, 2, 4]
    assert curve[-1]["behind"] == 0
    assert curve[-1]["cost"] == pytest.approx(float(table.latency_ms.nansum()), rel=1e-6)
    assert curve[0]["cost"] < curve[1]["cost"] < curve[2]["cost"]
    # policies are judged by all configurations, so these are near what the whole profile says
    judged = learning_curve(whole, default_budgets(whole))
    assert curve[-1]["utility"] == pytest.approx(judged[-1]["utility"], abs=0.1)


def test_without_features_or_folds_there_is_no_learning_curve():
    table = two_kinds(20, shown=True)
    assert learning_curve(replace(table, features={}), BUDGETS) == []
    assert learning_curve(replace(table, image_ids=("same",) * 20), BUDGETS) == []


def test_a_gain_that_very_many_features_show_together_is_found(monkeypatch):
    # few trees, so that 256 components take a second
    few = WAYS["gradient_boosting"]._replace(settings=(20,))
    monkeypatch.setitem(WAYS, "gradient_boosting", few)
    generator = torch.Generator().manual_seed(1)
    width = module.WIDEST + 8
    for shown, least, most in ((True, 0.35, 0.5), (False, -0.1, 0)):
        table = two_kinds(270, shown)
        # no single feature tells the kinds apart
        spread = table.features["x"] @ torch.randn(2, width, generator=generator)
        table.features["x"] = spread + torch.randn(270, width, generator=generator)
        found = attainable(table, BUDGETS)
        assert found["components"] == module.COMPONENTS
        assert least <= found["gain_ci95"][0] <= most


def test_shares_of_what_looked_attainable():
    for ends, share in (
        ([], {}),
        ([0.001, 0.04], {"attained": 0.5}),
        ([-0.001, 0.04], {"attained": None}),
    ):
        mean = {"budget_ms": None, "over_static": 0.01}
        tight = {"budget_ms": 5.0, "over_static": 0.01}
        results = {"rows": [dict(mean), dict(tight)]}
        if ends:
            results["attainable"] = {"gain": 0.02, "gain_ci95": ends}
        add_shares(results)
        assert results["rows"] == [mean | share, tight]
