"""What a policy says about one decision: the flips really flip, a drift is allowed for, the guard
is quoted."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import driven_apart, small_table
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed import settled_for

from knobwise.agents.checkpoint import Loaded
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.serving.knob_policy import EXACT, Explanation, KnobPolicy
from knobwise.agents.stack.deployed import DeployedController
from knobwise.agents.stack.prices import StaticMix, compared
from knobwise.agents.stack.teacher import Teacher
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import default_budgets

TABLE = small_table(40)
ROWS = torch.arange(40)
CONFIG = PolicyConfig(teacher=True, members=2, hidden=8, teacher_hidden=8, drift=0.3)
MARGINS = [0.7, 0.7, 1.0, 1.0, 1.0]
DEPLOY = [True, True, True, True, False]
MEANS = torch.tensor([9.0, 15.0, 12.0])


@functools.cache
def policy_of(kind: str) -> KnobPolicy:
    """`heads` alone; beside a `teacher`; in a `guard` too; or for `mean` budgets, in a guard."""
    sense = "mean" if kind == "mean" else "deadline"
    controller = driven_apart(TABLE, CONFIG, sense=sense)
    settled = settled_for(TABLE, MARGINS, DEPLOY) if kind == "guard" else settled_for(TABLE)
    if kind == "mean":
        mix = StaticMix.of_table(TABLE, ROWS, MEANS)
        cells = torch.tensor([[1.0, 1.0, 0.0]]).expand(40, -1)
        settled.guard = compared(cells, 0 * cells, 0.5 + 0 * cells, MEANS, 0.8)
        settled.mean = {
            "budgets_ms": MEANS.double().numpy(),
            "worths": np.array([20.0, 1000.0, 50.0]),
            "deployed": np.array([row["deployed"] for row in settled.guard]),
            **{f"mix.{name}": values for name, values in mix.arrays().items()},
        }
    teacher = None
    if kind != "heads":
        everything = torch.ones(2, 40, dtype=torch.bool)
        teacher = Teacher.for_table(TABLE, ROWS, CONFIG, controller.normaliser, everything, sense)
        for parameter in teacher.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    agent = DeployedController(controller, teacher, settled).eval()
    return KnobPolicy(Loaded(agent, "small", "", {}))


def blocks_of(row: int) -> dict[str, torch.Tensor]:
    return {name: block[row] for name, block in TABLE.features.items()}


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(["heads", "teacher", "guard"]),
    st.integers(0, 39),
    st.floats(4, 40),
    st.floats(1.5, 20),
)
def test_the_choice_flips_at_each_budget_that_is_listed(
    kind: str, row: int, low: float, factor: float
) -> None:
    policy, high = policy_of(kind), low * factor
    explanation = policy.decide(
        blocks_of(row), (low * high) ** 0.5, explain=True, between_ms=(low, high)
    )
    first, *flips = explanation.by_budget
    assert first[0] == pytest.approx(low)
    assert [budget for budget, _ in flips] == sorted(budget for budget, _ in flips)
    before = first[1]
    for budget, configuration in flips:
        assert low < budget <= high * 1.001
        assert policy.decide(blocks_of(row), budget * (1 + 1e-6)) == configuration != before
        # unless something else is chosen in an interval that is narrower than that
        assert policy.decide(blocks_of(row), budget * (1 - 1.01 * EXACT)) in [
            c for _, c in explanation.by_budget
        ]
        before = configuration
    # between flips nothing changes, unless it changes back before the next budget that is looked at
    starts = np.array([budget for budget, _ in explanation.by_budget])
    tried = [
        b for b in np.geomspace(low, high, 50)[1:] if np.abs(np.log(b / starts)).min() > 2 * EXACT
    ]
    held = [explanation.by_budget[np.searchsorted(starts, b) - 1][1] for b in tried]
    decided = policy.decide(blocks_of(row), np.array(tried, np.float32)) if tried else []
    assert sum(a != b for a, b in zip(decided, held, strict=True)) <= 1


def test_many_inputs_are_explained_as_each_alone() -> None:
    policy, limits = policy_of("guard"), torch.linspace(5, 40, 40)
    together = policy.decide(TABLE.features, limits, explain=True)
    for row in (0, 7, 39):
        alone: Explanation = policy.decide(blocks_of(row), float(limits[row]), explain=True)
        assert together[row].by_budget == alone.by_budget
        assert (together[row].decision, together[row].reason) == (alone.decision, alone.reason)
        assert together[row].guard == alone.guard


def test_of_mean_budgets_those_that_are_calibrated_are_listed() -> None:
    policy = policy_of("mean")
    assert [row["deployed"] for row in policy.agent.settled.guard] == [True, True, False]
    for row in range(40):  # one that is decided differently at 9 ms and at 15 ms
        blocks = blocks_of(row)
        chosen = {budget: policy.decide(blocks, budget) for budget in (9.0, 15.0)}
        if chosen[9.0] != chosen[15.0]:
            break
    assert chosen[9.0] != chosen[15.0]
    explanation = policy.decide(blocks, 15.0, explain=True)
    # at 12 ms the mix takes turns between its sides
    mix = StaticMix.of_table(TABLE, ROWS, MEANS)
    sides = [policy.configurations[int(side[2])] for side in (mix.first, mix.second)]
    assert all(policy.decide(blocks, 12.0) in sides for _ in range(20))
    assert len(explanation.by_budget) > 1
    for budget, configuration in explanation.by_budget:
        assert round(budget, 4) in (9.0, 12.0, 15.0)
        assert configuration in (sides if round(budget, 4) == 12 else [chosen[round(budget, 4)]])
    with pytest.raises(InputError, match=r"a drift of .*for a controller under deadlines"):
        policy.decide(blocks, 9.0, drift=(0.1, 1.0))
    # what is expected is at the worth of the budget, 1000 ms
    for row in explanation.expected:
        assert row.keys() == {"configuration", "probability", "accuracy", "latency_ms", "utility"}
        assert row["utility"] == pytest.approx(row["accuracy"] - row["latency_ms"] / 1000, abs=1e-5)
    assert explanation.guard is not None
    assert explanation.guard["budget_ms"] == 15.0
    assert explanation.reason.startswith("the policy's most probable choice")
    fallen = policy.decide(blocks, 12.0, explain=True)
    assert fallen.reason == "the guard lets the static mix decide, which treats all inputs alike"


def test_the_guard_of_the_nearest_budget_is_quoted() -> None:
    policy = policy_of("guard")
    budgets = default_budgets(TABLE)
    for place, reason in (
        (0, "the policy's most probable choice; the guard plans with 70% of the budget"),
        (2, "the policy's most probable choice"),
        (-1, "the guard lets budget-aware static decide, which treats all inputs alike"),
    ):
        explanations = policy.decide(TABLE.features, budgets[place] * 1.001, explain=True)
        for each in explanations:
            assert each.guard == policy.agent.settled.guard[place]
            more = "utility" in each.expected[0] and each.reason.endswith("expects more of another")
            assert each.reason == reason + ", though its teacher expects more of another" * more
            row = next(r for r in each.expected if r["configuration"] == each.decision)
            best = max(r["utility"] for r in each.expected)
            if place != -1:
                assert each.decision == each.expected[0]["configuration"]
                assert more == (row["utility"] < best - 1e-6)
        if place == 0:
            assert {each.reason == reason for each in explanations} == {True, False}
        if place == -1:
            assert any(each.decision != each.expected[0]["configuration"] for each in explanations)
    for kind in ("heads", "teacher"):
        assert policy_of(kind).decide(blocks_of(0), 9.0, explain=True).guard is None


def test_what_is_expected_is_what_the_policy_and_its_teacher_say() -> None:
    policy = policy_of("guard")
    budget = float(default_budgets(TABLE)[1])
    explanation = policy.decide(blocks_of(7), budget, explain=True)
    agent = policy.agent
    x = agent.controller.features({name: block[7:8] for name, block in TABLE.features.items()}, 1)
    with torch.no_grad():
        probability = agent.controller(x, torch.tensor([0.7 * budget]))[0].exp()
    assert agent.teacher is not None
    accuracy, mean, spread = agent.teacher.moments(x)
    place = {str(configuration): c for c, configuration in enumerate(policy.configurations)}
    listed = [row["probability"] for row in explanation.expected]
    assert listed == sorted(listed, reverse=True)
    assert sum(listed) == pytest.approx(1, abs=1e-5)
    for row in explanation.expected:
        c = place[str(row["configuration"])]
        assert row["probability"] == pytest.approx(float(probability[c]), abs=1e-5)
        assert row["accuracy"] == pytest.approx(float(accuracy[0, c]), abs=1e-5)
        latency_ms = math.exp(float(mean[0, c]) + float(spread[0, c]) ** 2 / 2)
        assert row["latency_ms"] == pytest.approx(latency_ms, rel=1e-4)
        z = (math.log(budget) - float(mean[0, c])) / float(spread[0, c])
        on_time = 0.5 * math.erfc(-z / math.sqrt(2))
        assert row["on_time"] == pytest.approx(on_time, abs=1e-4)
        assert row["utility"] == pytest.approx(row["accuracy"] * on_time, abs=1e-4)
    assert explanation.runner_up == explanation.expected[1]
    alone = policy_of("heads").decide(blocks_of(7), budget, explain=True)
    assert all(row.keys() == {"configuration", "probability"} for row in alone.expected)
    assert alone.reason == "the policy's most probable choice"


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(["teacher", "guard"]), st.floats(-0.5, 0.5), st.floats(6, 30), st.floats(0.5, 2)
)
def test_a_drift_slows_what_is_expected_and_is_decided_as_it_is_served(
    kind: str, level: float, budget: float, scale: float
) -> None:
    policy = policy_of(kind)
    offset = (level + 0.1 * torch.linspace(-1, 1, 12)).numpy()
    explanation = policy.decide(blocks_of(5), budget, explain=True, drift=(offset, scale))
    arrays = {name: block.numpy() for name, block in blocks_of(5).items()}
    assert explanation.decision == policy.agent.decider.decide(arrays, budget, (offset, scale))
    assert explanation.without_drift == policy.decide(blocks_of(5), budget)
    place = {str(configuration): c for c, configuration in enumerate(policy.configurations)}
    for row in explanation.expected:
        if scale == 1:
            assert row["slower"] == pytest.approx(
                np.exp(offset[place[str(row["configuration"])]]), rel=1e-5
            )
    guard = policy.agent.decider.guard
    if guard is None or guard.single(budget * float(np.exp(-offset.mean())))[1]:
        assert explanation.decision == explanation.expected[0]["configuration"]
    else:
        assert explanation.reason.startswith("the guard lets budget-aware static decide")


def test_a_drift_by_a_factor_is_a_budget_divided_by_it() -> None:
    policy = policy_of("guard")
    moved = policy.decide(blocks_of(5), 12.0, explain=True, drift=(0.2, 1.0))
    plain = policy.decide(blocks_of(5), 12.0 * np.exp(-0.2), explain=True)
    assert (moved.decision, moved.guard) == (plain.decision, plain.guard)
    for row, same in zip(moved.expected, plain.expected, strict=True):
        assert row["configuration"] == same["configuration"]
        assert (row["on_time"], row["utility"]) == pytest.approx(
            (same["on_time"], same["utility"]), abs=1e-6
        )
        assert row["latency_ms"] == pytest.approx(np.exp(0.2) * same["latency_ms"], rel=1e-5)
        assert row["slower"] == pytest.approx(np.exp(0.2), rel=1e-5)


@pytest.mark.parametrize("drift", [(np.zeros(3), 1.0), (0.1, 0.0), (float("nan"), 1.0)])
def test_a_drift_that_cannot_be_is_refused(drift: Any) -> None:
    with pytest.raises(InputError, match=r"a drift of .*finite offset"):
        policy_of("guard").decide(blocks_of(0), 9.0, explain=True, drift=drift)
