"""Policies of one's own beside loaded ones, on the same samples."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import Always, close, input_error, small_table, table_of

import knobwise
from knobwise.agents import Controller, DeployedController, PolicyConfig, evaluate_policy
from knobwise.agents.deployed.calibrated import Guard
from knobwise.agents.evaluation.baselines import fit_static
from knobwise.envs import default_budgets
from knobwise.envs.bandit.rules import MeanBudget

QUICK = {"teacher_iterations": 4, "pretrain_iterations": 4, "iterations": 4, "contexts": 32}


def test_differences_are_paired_and_those_of_a_run_are_what_its_run_says():
    table = small_table(60)
    split, budgets_ms = table.split(), default_budgets(table)
    options = {"policy": "utility", "policy.hidden": 8, "policy.fold_networks": 2}
    loaded = knobwise.fit(table, optimiser=QUICK, own_cost=False, **options)
    blocks, mask = table.blocks(split.test), table.mask[split.test].numpy()
    features = {name: block.numpy() for name, block in blocks.items()}
    limits = np.full(len(mask), 20.0)
    chosen = loaded.agent.choose(features, limits, mask)
    assert (loaded.choose(features, limits, mask) == chosen).all()

    static = fit_static(table, split.fitted)
    policies = {"static": static, "run": loaded, "first": Always(0)}
    gaps = knobwise.compare_policies(policies, table, split.test, budgets_ms)
    assert [(gap.policy, gap.against_policy) for gap in gaps] == [
        ("run", "static"),
        ("first", "static"),
    ]
    judged = {
        name: evaluate_policy(policy, table, split.test, budgets_ms).utility
        for name, policy in policies.items()
    }
    for gap in gaps:
        wanted = judged[gap.policy].mean() - judged["static"].mean()
        assert gap.difference == pytest.approx(float(wanted), abs=1e-6)
        assert gap.ci95[0] <= gap.difference <= gap.ci95[1]
        assert gap.p <= gap.p_holm
    means = {row["policy"]: row for row in loaded.judged["rows"] if row["budget_ms"] is None}
    assert means["controller"]["over_static"] == pytest.approx(gaps[0].difference, abs=1e-6)
    with input_error("run: was trained on 48 of these 60 samples"):
        knobwise.compare_policies(policies, table, torch.arange(60), budgets_ms)


def test_the_guard_of_a_loaded_policy_is_asked_with_whole_budgets():
    """What a decision costs must not make static decide, which the guard has below 20 ms."""
    table = small_table(60)
    split = table.split()
    options = {"policy": "utility", "policy.hidden": 8, "policy.fold_networks": 2}
    loaded = knobwise.fit(table, optimiser=QUICK, own_cost=False, **options)
    decider = loaded.decider
    arrays = {"budgets_ms": np.array([10.0, 40.0]), "deploy": np.array([False, True])}
    decider.guard = decider.calibrated = Guard(arrays, decider.static)
    about = table, split.test, torch.tensor([40.0])
    judged = evaluate_policy(loaded, *about, cost_ms=28.0)
    features = {name: block.numpy() for name, block in table.blocks(split.test).items()}
    decider.guard = decider.calibrated = None
    mask = table.mask[split.test].numpy()
    by_policy = decider.choose(features, np.full(len(mask), 12.0), mask)
    assert judged.chosen.squeeze(1).tolist() == by_policy.tolist()
    by_static = decider.static.choose(features, np.full(len(mask), 12.0), mask)
    assert (by_policy != by_static).any()


def test_an_interval_of_differences_that_are_all_equal_has_no_width():
    table = table_of([[0.25, 0.75]] * 6, [[1.0, 2.0]] * 6)
    about = table, torch.arange(6), torch.tensor([3.0, 4.0])
    (gap,) = knobwise.compare_policies({"a": Always(0), "b": Always(1)}, *about)
    close(torch.tensor([gap.difference, *gap.ci95]), torch.full((3,), 0.5))
    # late at the first budget
    (gap,) = knobwise.compare_policies(
        {"a": Always(0), "b": Always(1)}, *about, costs_ms={"b": torch.tensor([1.5, 0.5])}
    )
    assert gap.difference == pytest.approx((0.0 + 0.75) / 2 - 0.25)
    with input_error("1 policies"):
        knobwise.compare_policies({"a": Always(0)}, *about)


def test_samples_of_one_image_or_cluster_are_no_more_than_one():
    # 30 samples, five of each of six images, which differ
    gain = torch.tensor([0.4, 0.3, -0.2, 0.1, 0.2, -0.1]).repeat_interleave(5)
    accuracy = torch.stack([torch.full((30,), 0.5), 0.5 + gain], 1)
    names = tuple(str(row // 5) for row in range(30))
    gaps = []
    for belongs in ({}, {"clusters": names}, {"image_ids": names}):
        table = table_of(accuracy, torch.ones(30, 2), **belongs)
        about = table, torch.arange(30), torch.tensor([2.0])
        gaps += knobwise.compare_policies({"a": Always(0), "b": Always(1)}, *about)
    alone, clustered, imaged = gaps
    assert alone.ci95[0] > 0 > clustered.ci95[0]
    assert imaged == clustered
    # of the 64 signs of six images 22 give a mean at least as large
    assert imaged.p == pytest.approx(22 / 64, abs=0.02)


def test_what_the_numbers_would_not_be_about_is_refused():
    table = small_table(60)
    rows, budgets_ms = table.split().test, default_budgets(table)
    options = {"optimiser": QUICK, "policy": "utility", "own_cost": False, "policy.hidden": 8}
    loaded = knobwise.fit(table, **options, **{"policy.fold_networks": 2})
    policies = {"first": Always(0), "run": loaded}
    knobwise.compare_policies(policies, table, rows, budgets_ms)
    # the number of a configuration would mean another one
    others = replace(table, configurations=table.configurations.flip(0))
    with input_error("run: .* configurations"):
        knobwise.compare_policies(policies, others, rows, budgets_ms)
    with input_error("run: .* ms; .* USD"):
        knobwise.compare_policies(policies, replace(table, unit="USD"), rows, budgets_ms)
    with input_error("'runs'"):
        knobwise.compare_policies(policies, table, rows, budgets_ms, {"runs": 0.2})
    loaded.agent.rule = MeanBudget()
    with input_error("run: .* mean budgets"):
        knobwise.compare_policies(policies, table, rows, budgets_ms)


class Returns:
    def __init__(self, value):
        self.value = value

    def choose(self, features, budgets_ms, mask=None):
        return self.value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.full(40, 999), "Returns.choose: returns 999; configurations are 0 to"),
        (np.full(40, -1), "Returns.choose: returns -1"),
        (
            np.zeros((40, 1), int),
            r"Returns.choose: returns int64 \[40, 1\]; must return int64 \[40\]",
        ),
        (np.zeros(40), "float64"),
        (3, r"\[\]"),
    ],
)
def test_what_is_no_choice_is_named(value, message):
    table = small_table(40)
    with input_error(message):
        evaluate_policy(Returns(value), table, torch.arange(40), torch.tensor([5.0]))


def test_a_network_is_no_policy_until_it_is_deployed():
    table = small_table(40)
    rows, budgets = torch.arange(40), torch.tensor([5.0])
    network = Controller.for_table(table, rows, PolicyConfig())
    with input_error("Controller: .* DeployedController"):
        evaluate_policy(network, table, rows, budgets)
    assert (
        evaluate_policy(DeployedController(network), table, rows, budgets).utility.isfinite().all()
    )


def test_choices_that_nobody_measured_are_refused_with_their_number():
    table = table_of([[0.25, 0.75]] * 6, [[1.0, 2.0]] * 6)
    hole = [0.25, float("nan")]
    holes = table_of([hole] * 2 + [[0.25, 0.75]] * 4, [hole] * 2 + [[1.0, 2.0]] * 4)
    about = torch.arange(6), torch.tensor([3.0, 4.0])
    with input_error("Always.choose: 4 of 12 choices"):
        evaluate_policy(Always(1), holes, *about)
    with input_error("cost_ms"):
        knobwise.compare_policies(
            {"a": Always(0), "b": Always(0)}, table, *about, costs_ms={"b": float("nan")}
        )
