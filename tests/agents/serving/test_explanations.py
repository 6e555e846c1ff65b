"""What a policy says about one decision: the flips really flip, a drift is allowed for, the guard is quoted."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import driven_apart, small_table
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.agents.checkpoint import Loaded
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.serving.knob_policy import EXACT, Explanation, KnobPolicy
from knobwise.agents.stack.priced_policy import PricedChooser
from knobwise.agents.stack.stacked_controller import StackedController, fit_stack
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import default_budgets

TABLE = small_table(40)
UTILITY = PolicyConfig(structure="utility", members=2, hidden=8)


@functools.cache
def policy_of(kind: str) -> KnobPolicy:
    agent: Any = driven_apart(TABLE, PolicyConfig(hidden=8) if kind == "independent" else UTILITY)
    if kind == "stack":
        config = replace(UTILITY, experts=("ridge", "knn"))
        agent = fit_stack(TABLE, torch.arange(40), agent, config, default_budgets(TABLE), seed=0)
        agent.guard.miss[:2], agent.guard.deploy[:2], agent.guard.deploy[-1] = 0.3, True, False
    if kind == "priced":
        stack = StackedController(driven_apart(TABLE, UTILITY, priced=True), [], torch.ones(1))
        agent = PricedChooser("controller", stack, torch.tensor([9.0, 15.0, 12.0]), torch.tensor([0.05, 0.001, 0.02]))
    return KnobPolicy(Loaded(agent, "small", "", {}))


def blocks_of(row: int) -> dict[str, torch.Tensor]:
    return {name: block[row] for name, block in TABLE.features.items()}


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(["independent", "network", "stack"]), st.integers(0, 39), st.floats(4, 40), st.floats(1.5, 20))
def test_the_choice_flips_at_each_budget_that_is_listed(kind: str, row: int, low: float, factor: float) -> None:
    policy, high = policy_of(kind), low * factor
    explanation = policy.decide(blocks_of(row), (low * high) ** 0.5, explain=True, between_ms=(low, high))
    first, *flips = explanation.by_budget
    assert first[0] == pytest.approx(low)
    assert [budget for budget, _ in flips] == sorted(budget for budget, _ in flips)
    before = first[1]
    for budget, configuration in flips:
        assert low < budget <= high * 1.001
        assert policy.decide(blocks_of(row), budget * (1 + 1e-6)) == configuration != before
        # unless something else is chosen in an interval that is narrower than that
        assert policy.decide(blocks_of(row), budget * (1 - 1.01 * EXACT)) in [c for _, c in explanation.by_budget]
        before = configuration
    # between flips nothing changes, unless it changes back before the next budget that is looked at
    starts = np.array([budget for budget, _ in explanation.by_budget])
    tried = [b for b in np.geomspace(low, high, 50)[1:] if np.abs(np.log(b / starts)).min() > 2 * EXACT]
    held = [explanation.by_budget[np.searchsorted(starts, b) - 1][1] for b in tried]
    decided = policy.decide(blocks_of(row), np.array(tried, np.float32)) if tried else []
    assert sum(a != b for a, b in zip(decided, held, strict=True)) <= 1


def test_many_inputs_are_explained_as_each_alone() -> None:
    policy, limits = policy_of("stack"), torch.linspace(5, 40, 40)
    together = policy.decide(TABLE.features, limits, explain=True)
    for row in (0, 7, 39):
        alone: Explanation = policy.decide(blocks_of(row), float(limits[row]), explain=True)
        assert together[row].by_budget == alone.by_budget
        assert (together[row].decision, together[row].reason) == (alone.decision, alone.reason)
        assert together[row].guard == alone.guard


def test_of_mean_budgets_those_that_are_calibrated_are_listed() -> None:
    policy = policy_of("priced")
    chosen = [(budget, policy.decide(blocks_of(3), budget)) for budget in (9.0, 12.0, 15.0)]
    explanation = policy.decide(blocks_of(3), 12.0, explain=True)
    changes = [step for i, step in enumerate(chosen) if not i or step[1] != chosen[i - 1][1]]
    assert [configuration for _, configuration in explanation.by_budget] == [c for _, c in changes]
    assert [budget for budget, _ in explanation.by_budget] == pytest.approx([budget for budget, _ in changes])
    with pytest.raises(InputError, match=r"drift: .*for a controller under deadlines"):
        policy.decide(blocks_of(3), 12.0, drift=(0.1, 1.0))


def test_the_guard_of_the_nearest_budget_is_quoted() -> None:
    policy = policy_of("stack")
    guard, budgets = policy.agent.guard, default_budgets(TABLE)
    for place, reason in (
        (0, "charges 0.3 of utility more for a late answer"),
        (-1, "lets budget-aware static decide"),
    ):
        explanations = policy.decide(TABLE.features, budgets[place] * 1.001, explain=True)
        reasons = {each.reason for each in explanations} - {"highest expected utility"}
        assert [reason in each for each in reasons] == [True]
        assert all(
            (each.decision == each.expected[0]["configuration"]) == (each.reason == "highest expected utility")
            for each in explanations
        )
        assert {each.guard["budget_ms"] for each in explanations} == {float(guard.budgets_ms[place])}
    tight = policy.decide(blocks_of(0), 1e-3, explain=True)
    assert tight.reason == "no configuration is likely to be on time, so the one expected to be fastest is chosen"
    assert policy_of("network").decide(blocks_of(0), 9.0, explain=True).guard is None


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(["network", "stack"]), st.floats(-0.5, 0.5), st.floats(6, 30), st.floats(0.5, 2))
def test_a_drift_slows_what_is_expected_and_is_decided_as_it_is_served(
    kind: str, level: float, budget: float, scale: float
) -> None:
    policy = policy_of(kind)
    offset = (level + 0.1 * torch.linspace(-1, 1, 12)).numpy()
    explanation = policy.decide(blocks_of(5), budget, explain=True, drift=(offset, scale))
    arrays = {name: block.numpy() for name, block in blocks_of(5).items()}
    assert explanation.decision == policy._numpy.decide(arrays, budget, (offset, scale))
    assert explanation.without_drift == policy.decide(blocks_of(5), budget)
    place = {str(configuration): c for c, configuration in enumerate(policy.configurations)}
    for row in explanation.expected:
        if scale == 1:
            assert row["slower"] == pytest.approx(np.exp(offset[place[str(row["configuration"])]]), rel=1e-5)
    if kind == "stack":  # what is decided by is what is listed
        agent = policy.agent
        deployed = bool(agent.guard.deploy[agent.guard.groups(torch.tensor([budget * np.exp(-offset.mean())]))])
        if deployed and explanation.reason == "highest expected utility":
            chosen = next(r for r in explanation.expected if r["configuration"] == explanation.decision)
            assert chosen["utility"] == pytest.approx(explanation.expected[0]["utility"], abs=1e-5)


def test_a_drift_by_a_factor_is_a_budget_divided_by_it() -> None:
    policy = policy_of("stack")
    moved = policy.decide(blocks_of(5), 12.0, explain=True, drift=(0.2, 1.0))
    plain = policy.decide(blocks_of(5), 12.0 * np.exp(-0.2), explain=True)
    assert (moved.decision, moved.guard) == (plain.decision, plain.guard)
    for row, same in zip(moved.expected, plain.expected, strict=True):
        assert row["configuration"] == same["configuration"]
        assert (row["on_time"], row["utility"]) == pytest.approx((same["on_time"], same["utility"]), abs=1e-6)
        assert row["latency_ms"] == pytest.approx(np.exp(0.2) * same["latency_ms"], rel=1e-5)
        assert row["slower"] == pytest.approx(np.exp(0.2), rel=1e-5)


@pytest.mark.parametrize("drift", [(np.zeros(3), 1.0), (0.1, 0.0), (float("nan"), 1.0)])
def test_a_drift_that_cannot_be_is_refused(drift: Any) -> None:
    with pytest.raises(InputError, match=r"drift: .*finite offset"):
        policy_of("stack").decide(blocks_of(0), 9.0, explain=True, drift=drift)
