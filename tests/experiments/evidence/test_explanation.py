"""Explanations of a policy: difficulty and correlation by hand, importance, a tree of a tree,
single decisions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import WITH_TEACHER, close, deployed, small_table, table_of
from ruled import Ruled
from scipy.stats import spearmanr

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.evaluation.baselines import fit_static
from knobwise.agents.problem import Problem
from knobwise.envs.bandit.budgets import default_budgets
from knobwise.envs.bandit.rule_choice import RULES
from knobwise.envs.bandit.rules import Deadline
from knobwise.envs.tables.profile_table import Split
from knobwise.experiments.evidence import explanation
from knobwise.experiments.evidence.controllers import evaluator_of
from knobwise.experiments.evidence.explanation import (
    Explained,
    best_and_worst,
    by_difficulty,
    explain_policy,
    fit_tree,
    importance,
    rank_correlation,
    with_more_time,
)
from knobwise.experiments.evidence.profile_facts import configuration_rows

NAN = float("nan")
BUDGETS = torch.tensor([5.0, 20.0])


def explained(table, choose, budgets=BUDGETS):
    """Explain a policy that is a function of the block x and of budgets."""
    rows = torch.arange(table.num_samples)
    rule = Ruled(lambda features, limits, mask: choose(features["x"], limits).astype(int))
    return Explained(Problem.from_table(table), rows, rule, budgets, fit_static(table, rows))


# -- difficulty ------------------------------------------------------------------------------------

ACCURACY = [[0.0, 1.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.4, 0.5, 1.0], [NAN, 0.0, 1.0]]
LATENCY = [[1.0, 2.0, 4.0], [3.0, 2.5, 6.0], [1.0, 2.0, 4.0], [1.0, 3.0, 9.0], [NAN, 2.0, 5.0]]


def test_difficulty_against_latency_by_hand():
    """Difficulties are 2, 2.5, 3 and 5; the third sample has no right configuration. Means by
    configuration are 1.5, 2.3 and 5.6, so by setting difficulties are 2.3, 1.5, 2.3 and 5.6."""
    table = table_of(ACCURACY, LATENCY, torch.tensor([[1.0], [0.0], [0.0], [1.0], [2.0]]))

    def choose(x, limits):
        return np.where(limits > 10, x[:, 0].clip(1), 1)

    # under the larger budget the last gets the third: 2, 2.5, 3 and 5; by setting 2.3, 2.3, 2.3 and
    # 5.6
    setting = spearmanr([2.3, 1.5, 2.3, 5.6], [2.3, 2.3, 2.3, 5.6]).statistic
    wanted = {"unanswered": 1, "budget_ms": 20, "correlation": 1.0, "setting": setting}
    seen = by_difficulty(explained(table, choose))
    assert {name: seen[name] for name in wanted} == pytest.approx(wanted)
    groups = [(row["difficulty_ms"], row["policy_ms"]) for row in seen["groups"]]
    assert groups == [(ms, ms) for ms in (2.0, 2.5, 3.0, 5.0)]
    # under the smaller one all get the second: 2, 2.5, 3 and 2, ranks 1.5, 3, 4 and 1.5 against 1, 2,
    # 3, 4
    static = rank_correlation([2.0, 2.5, 3.0, 5.0], [2.0, 2.5, 3.0, 2.0])[0]
    assert static == pytest.approx(0.5 / np.sqrt(5 * 4.5))
    tight = by_difficulty(explained(table, choose, BUDGETS[:1]))
    assert (tight["budget_ms"], tight["groups"], tight["points"]) == (None, [], [])
    assert sorted(seen["points"]) == [[2.0, 2.0], [2.5, 2.5], [3.0, 3.0], [5.0, 5.0]]
    assert [row["difficulty_ms"] for row in seen["groups"]] == [2.0, 2.5, 3.0, 5.0]
    assert all(row["difficulty_ms"] == row["policy_ms"] for row in seen["groups"])


def test_without_two_values_there_is_no_rank_correlation():
    for sides in ([], []), ([1.0], [2.0]), ([1.0, 2.0], [3.0, 3.0]):
        assert rank_correlation(*sides) == (None, None)


def test_the_interval_of_a_rank_correlation_is_that_of_independent_draws():
    """Of 50 draws of 100 pairs with a known correlation nearly 95 % hold it."""
    inside = 0
    truth = 6 / np.pi * np.arcsin(0.6 / 2)  # of normal variables with a correlation of .6
    pairs = np.random.default_rng(0).multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]], (50, 100))
    for draw in pairs:
        value, (low, high) = rank_correlation(*draw.T)
        assert value == pytest.approx(spearmanr(draw).statistic)
        inside += low <= truth <= high
    assert 43 <= inside < 50


# -- more time -------------------------------------------------------------------------------------


def test_choices_with_more_time_by_hand():
    """The configurations take 1, 2 and 3 ms on average, and are right for 1/2, 1 and 0 of the
    samples."""
    accuracy = [[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]]
    table = table_of(accuracy, [[1.0, 2.0, 3.0]] * 2, torch.tensor([[0.0], [1.0]]))
    order = np.array([[1, 0, 2], [0, 1, 2]])  # of each sample, by budget

    def choose(x, limits):
        return order[x[:, 0].astype(int), np.digitize(limits, [4, 10])]

    # (1 → 0 is cheaper), (0 → 2 is slower and worse), (0 → 1 is neither), (1 → 2 is slower and
    # worse)
    seen = with_more_time(explained(table, choose, torch.tensor([20.0, 2.5, 5.0])))
    assert seen == {"cheaper": 1 / 4, "worse": 2 / 4, "static_cheaper": 0.0, "static_worse": 0.0}
    assert with_more_time(explained(table, choose, torch.tensor([5.0]))) is None


# -- importance ------------------------------------------------------------------------------------


def two_answers(samples=200, noise=2):
    """The first column of x says which of two configurations is right."""
    generator = torch.Generator().manual_seed(0)
    right = (torch.rand(samples, 1, generator=generator) < 0.5).float()
    x = torch.cat([right, torch.randn(samples, noise, generator=generator)], 1)
    return table_of(torch.cat([1 - right, right], 1), torch.ones(samples, 2), x)


def by_first(x, limits):
    return x[:, 0] > 0.5


def test_importance_is_the_utility_lost_with_another_samples_features():
    table = two_answers()
    table.features["unread"] = torch.randn(200, 3)
    rows = importance(explained(table, by_first))
    parts = [(row["name"], row["column"]) for row in rows[:3]]
    assert parts == [("x", None), ("unread", None), ("x", 0)]
    block, unread, column, *others = (row["lost"] for row in rows)
    low, high = rows[0]["ci95"]
    assert low < block < high
    # another sample has the other answer half the time
    assert 0.4 < min(block, column) <= max(block, column) < 0.6
    assert not any([unread, *others])


@pytest.mark.parametrize(("noise", "rows"), [(30, 11), (64, 1)])
def test_of_a_narrow_block_the_ten_most_important_columns_are_listed_of_a_wide_one_none(
    noise, rows
):
    columns = [row["column"] for row in importance(explained(two_answers(noise=noise), by_first))]
    assert columns[:2] == [None, 0][:rows]
    assert len(columns) == rows


# -- the tree --------------------------------------------------------------------------------------


def test_a_policy_that_is_a_small_tree_is_distilled_without_loss():
    tree = fit_tree(explained(two_answers(), lambda x, limits: (limits > 10) & (x[:, 1] > 0.3)))
    assert tree["fidelity"] > 0.99  # a bound lies between two samples
    assert tree["by_budget_alone"] < 0.9
    assert tree["exact"] == tree["fidelity"]  # there is one knob
    low, high = tree["beyond_budget_ci95"]
    assert 0 < low < tree["beyond_budget"] < high
    assert tree["beyond_budget"] == tree["fidelity"] - tree["by_budget_alone"]
    small = [rule["then"] for rule in tree["rules"] if ("budget", "≤", 12.5) in rule["when"]]
    assert small == [two_answers().configuration(0)]
    assert {rule["alike"] for rule in tree["rules"]} == {1.0}
    bounds = {(name, sign): value for rule in tree["rules"] for name, sign, value in rule["when"]}
    assert bounds["x[1]", "≤"] == bounds["x[1]", ">"] == pytest.approx(0.3, abs=0.1)
    assert sum(rule["share"] for rule in tree["rules"]) == pytest.approx(1)


def test_a_policy_that_decides_by_the_budget_alone_needs_no_features():
    tree = fit_tree(explained(two_answers(), lambda x, limits: limits > 10))
    assert tree["fidelity"] == tree["by_budget_alone"] == tree["exact"] == 1
    assert (tree["beyond_budget"], tree["beyond_budget_ci95"]) == (0, [0, 0])
    assert {name for rule in tree["rules"] for name, *_ in rule["when"]} == {"budget"}
    (always,) = fit_tree(explained(two_answers(), lambda x, limits: 0 * limits))["rules"]
    assert always["when"] == []


# -- the best and the worst ------------------------------------------------------------------------


def test_the_best_and_the_worst_decisions_are_those_that_gain_and_lose_most():
    accuracy = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.2], [0.0, 0.9], [0.0, 0.4]])
    x = torch.tensor([[0.0], [0.0], [1.0], [1.0], [1.0]])
    table = table_of(accuracy, [[2.0, 3.0]] * 4 + [[2.0, 7.0]], x)
    lists = best_and_worst(explained(table, lambda x, limits: x[:, 0]), {"3": "why?"})
    # static takes the first configuration under both budgets; the last sample is on time under the
    # second budget only
    (best, second), (worst,) = lists["best"], lists["worst"]
    for row, wanted in (
        (best, ("3", pytest.approx(0.9), "why?")),
        (second, ("4", pytest.approx(0.4), None)),
        (worst, ("2", pytest.approx(-0.8), None)),
    ):
        assert (row["sample_id"], row["gain"], row["question"]) == wanted
    assert second["budget_ms"] == 20
    assert worst["policy"]["accuracy"] == pytest.approx(0.2)
    static = {"configuration": table.configuration(0), "accuracy": 1.0, "latency_ms": 2.0}
    assert worst["static"] == static


def test_an_answer_above_a_limit_gains_nothing_and_is_as_right_as_it_is():
    """The second configuration is right, and too dear where x is 0."""
    costs = {"usd": torch.tensor([[1.0, 3.0], [1.0, 1.0]])}
    table = table_of([[0.5, 1.0]] * 2, [[2.0, 3.0]] * 2, torch.tensor([[0.0], [1.0]]), costs=costs)
    problem = replace(Problem.from_table(table), rule=Deadline({"usd": 2.0}))
    rule = Ruled(lambda features, limits, mask: np.ones(len(mask), int))
    static = Ruled(lambda features, limits, mask: np.zeros(len(mask), int))
    lists = best_and_worst(Explained(problem, torch.arange(2), rule, BUDGETS[:1], static), {})
    (best,), (worst,) = lists["best"], lists["worst"]
    assert (best["gain"], best["policy"]["accuracy"]) == (0.5, 1.0)
    assert (worst["gain"], worst["policy"]["accuracy"]) == (-0.5, 1.0)
    # so are the means of configurations, beside their utility
    means = configuration_rows(problem.values, torch.arange(2), [5.0], problem.cells)
    assert [(row["accuracy"], row["utility"]) for row in means] == [(0.5, 0.5), (1.0, 0.5)]


# -- real policies ---------------------------------------------------------------------------------

POLICIES = {
    "taught": WITH_TEACHER,
    "independent": PolicyConfig(hidden=8, guard=False),
    "no features": replace(WITH_TEACHER, experts=()),
    "mean": replace(WITH_TEACHER, experts=(), guard=False),
    "first look": WITH_TEACHER,
}


@pytest.mark.parametrize("kind", POLICIES)
def test_every_kind_of_controller_is_explained_by_its_own_decisions(kind, monkeypatch):
    table = small_table(60, holes=0.2, features=kind != "no features")
    look = 0.5 * table.latency_ms.nan_to_num() * (kind == "first look")
    if kind == "first look":
        table = replace(table, first_look_ms=look)
    rows = torch.arange(60)
    budgets = torch.tensor([9.0, 15.0]) if kind == "mean" else default_budgets(table)
    constraint = "mean" if kind == "mean" else "deadline"
    agent = deployed(table, POLICIES[kind], budgets, constraint)
    monkeypatch.setattr(explanation, "MAX_SAMPLES", 15)
    problem = Problem(table, Split(rows[:40], rows[:0], rows[40:]), RULES[constraint]())
    evaluator = evaluator_of(problem, budgets)
    part = Explained(problem, rows[40:], agent, *evaluator.explained_by(agent))
    assert len(part.rows) == len(part.rows.unique()) == 15
    at = part.rows[:, None], part.chosen
    accuracy, latency_ms = table.accuracy[at].double(), table.latency_ms[at]
    if kind == "mean":
        wanted = accuracy - latency_ms / torch.from_numpy(agent.calibration.mean["worths"])
    else:
        late = latency_ms - look[at] * ~part.reads > budgets
        wanted = accuracy.masked_fill(late, 0)
    close(part.utility(part.chosen, part.reads), wanted, within=1e-12)
    entry = explain_policy(part, {})
    assert entry == explain_policy(part, {})
    assert (entry["importance"] == []) == (kind == "no features")
