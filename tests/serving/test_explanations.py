"""What a policy says about one decision: the flips really flip, a drift is allowed for, the guard
is quoted."""

import functools
import itertools
import math
import operator

import numpy as np
import pytest
import torch
from helpers import arrays, driven_apart, input_error, small_table
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed import calibration_for, teacher_beside

from knobwise.agents import DeployedController, PolicyConfig
from knobwise.agents.calibration.mean_policies import StaticMix, compare_with_mix
from knobwise.agents.deployed.promise import POLICY
from knobwise.agents.training.checkpoint import Loaded
from knobwise.envs import default_budgets
from knobwise.serving.knob_policy import EXACT, KnobPolicy

TABLE = small_table(40)
CONFIG = PolicyConfig(teacher=True, fold_networks=2, hidden=8, teacher_hidden=8, drift=0.3)
DEPLOY = [True, True, True, True, False]
MEANS = torch.tensor([9.0, 15.0, 12.0])
MIX = StaticMix.fit(TABLE, torch.arange(40), MEANS)


@functools.cache
def policy_of(kind):
    """`heads` alone; beside a `teacher`; in a `guard` too; or for `mean` budgets, in a guard."""
    constraint = "mean" if kind == "mean" else "deadline"
    controller = driven_apart(TABLE, CONFIG, constraint=constraint)
    calibration = calibration_for(TABLE, DEPLOY if kind == "guard" else None)
    if kind == "mean":
        cells = torch.tensor([[1.0, 1.0, 0.0]]).expand(40, -1)
        calibration.guard = compare_with_mix(cells, 0 * cells, 0.5 + 0 * cells, MEANS)
        calibration.mean = {f"mix.{name}": values for name, values in MIX.arrays().items()}
        calibration.mean["budgets_ms"] = MEANS.double().numpy()
        calibration.mean["worths"] = np.array([20.0, 1000.0, 50.0])
        calibration.mean["deployed"] = np.array([row["deployed"] for row in calibration.guard])
    teacher = None if kind == "heads" else teacher_beside(TABLE, controller, constraint)
    agent = DeployedController(controller, teacher, calibration).eval()
    return KnobPolicy(Loaded(agent, "small", "", {}))


@pytest.mark.parametrize(
    ("configuration", "reason"),
    [
        (3, "so what is most often on time decides; this configuration decides for all inputs"),
        (POLICY, "where the policy is most often on time; it has the highest probability of those"),
    ],
)
def test_where_nothing_is_promised_it_says_who_decides(configuration, reason):
    calibration = calibration_for(TABLE, DEPLOY)
    rule = {"budget_ms": 20.0, "planned_ms": 15.0, "promise": 0.95, "kept": False}
    calibration.promise = [rule | {"configuration": configuration, "probability": 0.0}]
    calibration.guard = []
    agent = DeployedController(driven_apart(TABLE, CONFIG), None, calibration)
    policy = KnobPolicy(Loaded(agent, "s", "", {}))
    found = policy.decide(TABLE.blocks(0), 16.0, explain=True).reason
    assert found.startswith(f"nothing can be promised here, {reason}")


def test_it_says_what_is_promised_at_a_whole_budget():
    """The rule for 20 ms decides from 15 ms on, what is left there for the answer."""
    calibration = calibration_for(TABLE, DEPLOY)
    rule = {"budget_ms": 20.0, "planned_ms": 15.0, "promise": 0.95, "kept": True}
    calibration.promise = [rule | {"configuration": 3, "probability": 0.0}]
    calibration.guard = []
    controller = driven_apart(TABLE, CONFIG)
    policy = KnobPolicy(Loaded(DeployedController(controller, None, calibration), "s", "", {}))
    reasons = {
        budget_ms: policy.decide(TABLE.blocks(0), budget_ms, explain=True).reason
        for budget_ms in (14.0, 16.0, 20.0)
    }
    assert reasons[14.0].startswith("nothing can be promised here")
    assert reasons[16.0].startswith("nothing is promised below 20 ms")
    assert reasons[20.0].startswith("at least 95% on time is promised")


@settings(max_examples=25)
@given(
    st.sampled_from(["heads", "teacher", "guard"]),
    st.integers(0, 39),
    st.floats(4, 40),
    st.floats(1.5, 20),
)
def test_the_choice_flips_at_each_budget_that_is_listed(kind, row, low, factor):
    policy, blocks = policy_of(kind), TABLE.blocks(row)
    between = low, low * factor
    explanation = policy.decide(blocks, low * factor**0.5, explain=True, between_ms=between)
    starts = np.array([start for start, _ in explanation.by_budget])
    listed = [configuration for _, configuration in explanation.by_budget]
    assert starts[0] == pytest.approx(low)
    assert (np.diff(starts) > 0).all()
    assert starts[-1] <= low * factor * 1.001
    assert all(before != after for before, after in itertools.pairwise(listed))
    for start, configuration in explanation.by_budget[1:]:
        assert policy.decide(blocks, start * (1 + 1e-6)) == configuration
        # unless something else is chosen in an interval that is narrower than that
        assert policy.decide(blocks, start * (1 - 1.01 * EXACT)) in listed
    # between flips nothing changes, unless it changes back before the next budget that is looked at
    between_ms = np.geomspace(*between, 50)[1:].astype(np.float32)
    near = np.abs(np.log(between_ms[:, None] / starts)).min(1) <= 2 * EXACT
    held = [listed[i - 1] for i in np.searchsorted(starts, between_ms)]
    decided = policy.decide(blocks, between_ms)
    apart = [a != b for a, b in zip(decided, held, strict=True)]
    assert sum(apart & ~near) <= 1


def test_many_inputs_are_explained_as_each_alone():
    policy = policy_of("guard")
    limits = torch.linspace(5, 40, 40)
    together = policy.decide(TABLE.features, limits, explain=True)
    for row in (0, 39):
        assert together[row] == policy.decide(TABLE.blocks(row), float(limits[row]), explain=True)


def test_of_mean_budgets_those_that_are_calibrated_are_listed():
    policy = policy_of("mean")
    assert [row["deployed"] for row in policy.agent.calibration.guard] == [True, True, False]
    # one that is decided differently at 9 ms and at 15 ms
    decided = [policy.decide(TABLE.features, budget) for budget in (9.0, 15.0)]
    row = list(map(operator.ne, *decided)).index(True)
    blocks = TABLE.blocks(row)
    explanation = policy.decide(blocks, 15.0, explain=True)
    # at 12 ms the mix takes turns between its sides
    sides = [policy.configurations[int(side[2])] for side in (MIX.first, MIX.second)]
    assert all(policy.decide(blocks, 12.0) in sides for _ in range(20))
    chosen = {9.0: [decided[0][row]], 12.0: sides, 15.0: [decided[1][row]]}
    assert len(explanation.by_budget) > 1
    for budget, configuration in explanation.by_budget:
        assert configuration in chosen[round(budget, 4)]
    with input_error("drift"):
        policy.decide(blocks, 9.0, drift=(0.1, 1.0))
    # what is expected is at the value of the budget, 1000 ms
    for row in explanation.expected:
        assert row.keys() == {"configuration", "probability", "accuracy", "latency_ms", "utility"}
        assert row["utility"] == pytest.approx(row["accuracy"] - row["latency_ms"] / 1000, abs=1e-5)
    assert explanation.guard["budget_ms"] == 15.0
    assert "static" not in explanation.reason
    assert "static mix" in policy.decide(blocks, 12.0, explain=True).reason


def test_an_explanation_of_a_mix_uses_up_one_turn_and_lists_what_was_decided():
    policy = policy_of("mean")
    blocks = TABLE.blocks(0)
    share = float(MIX.share[2])
    sides = [policy.configurations[int(side[2])] for side in (MIX.first, MIX.second)]
    assert sides[0] != sides[1]
    assert 0 < share < 1
    policy.decider.budgets.start_over(1)
    turns = [policy.decide(blocks, 12.0) for _ in range(8)]
    policy.decider.budgets.start_over(1)
    explained = [policy.decide(blocks, 12.0, explain=True) for _ in range(8)]
    assert [each.decision for each in explained] == turns
    assert all(side in turns for side in sides)
    for each in explained:
        at_or_below = [knobs for budget, knobs in each.by_budget if budget < 12.01]
        assert at_or_below[-1] == each.decision
        part = share if each.decision == sides[1] else 1 - share
        assert each.reason.endswith(f": {100 * part:.3g}% of them get this configuration")
    # asked about another budget it lists the side that more requests get
    listed = policy.decide(blocks, 15.0, explain=True).by_budget
    assert [knobs for budget, knobs in listed if budget < 12.01][-1] == sides[share > 0.5]


@pytest.mark.parametrize(("place", "reason"), [(2, "probability"), (-1, "static")])
def test_the_guard_of_the_nearest_budget_is_quoted(place, reason):
    policy = policy_of("guard")
    budget = default_budgets(TABLE)[place] * 1.001
    most_probable = []
    for each in policy.decide(TABLE.features, budget, explain=True):
        assert each.guard == policy.agent.calibration.guard[place]
        assert reason in each.reason
        first = each.expected[0]
        most_probable.append(each.decision == first["configuration"])
        if place != -1:
            best = max(row["utility"] for row in each.expected)
            more = "teacher" in each.reason
            assert more == (first["utility"] < best - 1e-6)
    assert all(most_probable) == (place != -1)
    for kind in ("heads", "teacher"):
        assert policy_of(kind).decide(TABLE.blocks(0), 9.0, explain=True).guard is None


def test_what_is_expected_is_what_the_policy_and_its_teacher_say():
    policy = policy_of("guard")
    budget = float(default_budgets(TABLE)[1])
    explanation = policy.decide(TABLE.blocks(7), budget, explain=True)
    agent = policy.agent
    x = agent.controller.normaliser(TABLE.blocks([7]), 1)
    with torch.no_grad():
        probability = agent.controller(x, torch.tensor([budget]))[0].exp()
    accuracy, mean, spread = (values[0] for values in agent.teacher.moments(x)[:3])
    on_time = torch.special.ndtr((math.log(budget) - mean) / spread)
    wanted = {
        "probability": probability,
        "accuracy": accuracy,
        "latency_ms": (mean + spread**2 / 2).exp(),
        "on_time": on_time,
        "utility": accuracy * on_time,
    }
    order = probability.argsort(descending=True)
    listed = [policy.configurations.index(row["configuration"]) for row in explanation.expected]
    assert listed == order.tolist()
    for name, values in wanted.items():
        listed = [row[name] for row in explanation.expected]
        assert listed == pytest.approx(values[order].tolist(), rel=1e-4, abs=1e-4)
    assert explanation.runner_up == explanation.expected[1]
    alone = policy_of("heads").decide(TABLE.blocks(7), budget, explain=True)
    assert alone.expected[0].keys() == {"configuration", "probability"}


@settings(max_examples=25)
@given(
    st.sampled_from(["teacher", "guard"]), st.floats(-0.5, 0.5), st.floats(6, 30), st.floats(0.5, 2)
)
def test_a_drift_is_explained_as_it_is_served(kind, level, budget, scale):
    policy = policy_of(kind)
    decider = policy.agent.decider
    drift = level + 0.1 * np.linspace(-1, 1, 12, dtype=np.float32), scale
    explanation = policy.decide(TABLE.blocks(5), budget, explain=True, drift=drift)
    assert explanation.decision == decider.decide(arrays(TABLE, 5), budget, drift)
    assert explanation.without_drift == policy.decide(TABLE.blocks(5), budget)
    if decider.fall_back(budget, drift) is None:
        assert explanation.decision == explanation.expected[0]["configuration"]
    else:
        assert "static" in explanation.reason


def test_a_drift_by_a_factor_is_a_budget_divided_by_it():
    policy = policy_of("guard")
    moved = policy.decide(TABLE.blocks(5), 12.0, explain=True, drift=(0.2, 1.0))
    plain = policy.decide(TABLE.blocks(5), 12.0 * np.exp(-0.2), explain=True)
    assert (moved.decision, moved.guard) == (plain.decision, plain.guard)
    slower = np.exp(0.2)
    for row, same in zip(moved.expected, plain.expected, strict=True):
        assert row.pop("configuration") == same.pop("configuration")
        wanted = same | {"latency_ms": slower * same["latency_ms"], "slower": slower}
        assert row == pytest.approx(wanted, rel=1e-5, abs=1e-6)
