"""Offsets for other hardware: what timed cells tell, and the controller that they give."""

import copy
import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import (
    WITH_TEACHER,
    arrays,
    driven_apart,
    equal_states,
    input_error,
    small_table,
    some_configurations,
    table_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed import calibration_for, small_stack, teacher_beside

from knobwise.agents import DeployedController
from knobwise.agents.learning.adaptation import (
    FREE,
    TRIED,
    Offsets,
    Scales,
    adapt_latency,
    fit_offsets,
    log_ratios,
    posterior,
    unmatched_cells,
)
from knobwise.agents.teacher.teacher import fit_teacher
from knobwise.envs import default_budgets
from knobwise.envs.tables.profile_table import Knob

GRID = torch.cartesian_prod(torch.arange(2), torch.arange(2))


# -- what timed cells tell -------------------------------------------------------------------------


def test_the_posterior_by_hand():
    """One configuration of two timed twice; the other shares only what all share."""
    cells = torch.zeros(2, dtype=torch.int64), torch.tensor([0.5, 0.7])
    offsets = posterior(torch.tensor([[0], [1]]), *cells, Scales(0.3, 0.1, 0.1))
    # covariances with the timed configuration, and the variance of the mean of its cells
    shared = torch.tensor([FREE**2 + 0.3**2 + 0.1**2, FREE**2]).double()
    measured = shared[0] + 0.1**2 / 2
    torch.testing.assert_close(offsets.mean, 0.6 * shared / measured, rtol=1e-6, atol=0)
    left = shared[0] - shared**2 / measured
    torch.testing.assert_close(offsets.variance, left, rtol=1e-4, atol=0)


def test_the_evidence_is_that_of_a_normal_density():
    """Up to a constant that is the same for all scales: the number of each configuration's
    cells."""
    chosen = torch.randint(4, (9,))
    differences = torch.randn(9, dtype=torch.float64)
    identity = torch.eye(4).double()
    same_value = (GRID.unsqueeze(1) == GRID).sum(2)
    constants = []
    for scales in TRIED:
        prior = FREE**2 + scales.configuration**2 * identity + scales.knob**2 * same_value
        covariance = prior[chosen][:, chosen] + scales.noise**2 * torch.eye(9).double()
        density = torch.distributions.MultivariateNormal(torch.zeros(9).double(), covariance)
        evidence = posterior(GRID, chosen, differences, scales).evidence
        constants.append(float(density.log_prob(differences) - evidence))
    assert np.ptp(constants) < 1e-6


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), factor=st.floats(-2, 2))
def test_few_cells_recover_the_offsets_of_a_machine_and_a_stall_does_no_harm(seed, factor):
    torch.manual_seed(seed)
    grid = torch.cartesian_prod(*[torch.arange(4)] * 3)
    truth = factor + sum(0.25 * torch.randn(4)[values] for values in grid.T)
    chosen = torch.randperm(64)[:40]
    differences = truth[chosen] + 0.02 * torch.randn(40)
    differences[7] += 3.0  # twenty times as long, once
    error = (fit_offsets(grid, chosen, differences).mean - truth).square().mean().sqrt()
    assert error < 0.05
    assert error < 0.3 * (differences.median() - truth).square().mean().sqrt()


def test_cells_that_scatter_make_the_controller_less_sure():
    chosen = torch.arange(4).repeat(200)
    scatter = 0.2 * torch.randn(800)
    variance = fit_offsets(GRID, chosen, scatter).variance
    assert variance.tolist() == pytest.approx([0.04] * 4, rel=0.2)
    assert fit_offsets(GRID, chosen, 0 * scatter).variance.max() < 0.001


# -- cells of two profiles -------------------------------------------------------------------------


def test_cells_of_both_profiles_are_matched_by_name():
    old = small_table(40)
    columns = [11, 2, 5, 8]
    others = (f"of no profile {i}" for i in range(38))
    new = replace(some_configurations(old, columns), sample_ids=("7", "3", *others), features={})
    new.latency_ms[0] = 2 * old.latency_ms[7, columns]
    new.latency_ms[1] = old.latency_ms[3, columns]
    chosen, ratios = log_ratios(old, new)
    assert chosen.tolist() == columns * 2
    assert ratios.tolist() == pytest.approx([math.log(2)] * 4 + [0.0] * 4, abs=1e-6)


def test_true_meets_its_spelling_in_a_profile_of_an_earlier_version():
    old = table_of([[1.0] * 2] * 6, [[1.0, 2.0]] * 6, knobs=(Knob("cache", ("false", "true")),))
    new = replace(old, knobs=(Knob("cache", (False, True)),))
    assert log_ratios(old, new)[0].tolist() == [0, 1] * 6


def test_cells_of_one_profile_alone_are_counted_with_an_example():
    old = table_of([[1.0] * 2] * 6, [[1.0, 2.0]] * 6, knobs=(Knob("crops", (1, 2)),))
    assert unmatched_cells(old, old) == (0, "")
    others = replace(old, sample_ids=("0", "1", *"abcd"))
    assert unmatched_cells(old, others) == (8, "has no sample 'a'")
    other_knob = replace(old, knobs=(Knob("crops", (1, 200)),))
    assert unmatched_cells(old, other_knob) == (6, "has no configuration crops=200")
    # what was not measured in the new profile is no cell of it
    mask = torch.tensor([[True, False]] + [[True, True]] * 5)
    unmeasured = [values.where(mask, math.nan) for values in (old.accuracy, old.latency_ms)]
    holes = replace(old, mask=mask, accuracy=unmeasured[0], latency_ms=unmeasured[1])
    assert unmatched_cells(old, holes) == (0, "")
    assert unmatched_cells(holes, old) == (1, "does not hold sample '0' under crops=2")


def test_profiles_without_enough_in_common_are_refused():
    old = table_of([[1.0] * 2] * 6, [[1.0, 2.0]] * 6)
    twice = replace(old, sample_ids=("0", "1", "2") * 2, datasets=("a",) * 3 + ("b",) * 3)
    with input_error("4 of its cells"):
        log_ratios(old, replace(old, sample_ids=("0", "1", *"abcd")))
    with input_error("dataset"):
        log_ratios(twice, old)
    assert len(log_ratios(twice, replace(twice, datasets=("a",) * 3 + ("c",) * 3))[0]) == 6


# -- the controller --------------------------------------------------------------------------------


@functools.cache
def taught(features=True):
    """Whose teacher has experts, and whose networks are driven apart."""
    table = small_table(90, features=features)
    config = replace(WITH_TEACHER, fold_networks=3, experts=("ridge", "knn"), layers=1, drift=0.3)
    controller = driven_apart(table, config)
    network = teacher_beside(table, controller)
    about = network, config, default_budgets(table), 0
    teacher = fit_teacher(table, torch.arange(90), *about).teacher
    teacher.weights.copy_(torch.ones(len(teacher.weights)) / len(teacher.weights))
    calibration = calibration_for(table, [True, False, True, True, True])
    calibration.guard_of_teacher = copy.deepcopy(calibration.guard)
    return table, DeployedController(controller, teacher, calibration).eval()


def chosen(agent, table, budget):
    """The decisions for all samples under a budget."""
    return agent.choose(arrays(table), np.full(table.num_samples, budget)).tolist()


def moved(agent, table, mean, variance):
    """A controller that allows for offsets, and what members of its teacher expected before and
    expect now."""
    x = agent.controller.normaliser(table.features, table.num_samples)
    mean, spread = (torch.as_tensor(values).double().expand(12) for values in (mean, variance))
    other = adapt_latency(agent, Offsets(mean, spread, torch.zeros(())), x)
    with torch.no_grad():
        old, new = (each.mixture(x).members for each in (agent.teacher, other.teacher))
    return other, old, new


@pytest.mark.parametrize("features", [True, False])
def test_without_cells_nothing_changes_to_the_bit(features):
    none = torch.zeros(0, dtype=torch.int64)
    assert not fit_offsets(GRID, none, none.double()).mean.any()
    table, agent = taught(features)
    same, before, after = moved(agent, table, 0.0, 0.0)
    assert same.decider.digest == agent.decider.digest
    assert equal_states(same, agent)
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("features", [True, False])
def test_a_controller_expects_every_latency_times_its_factor(features):
    table, agent = taught(features)
    digest = agent.decider.digest
    offsets = torch.linspace(-0.5, 1.0, 12)
    variance = torch.linspace(0.0, 0.3, 12)
    other, before, after = moved(agent, table, offsets, variance)
    assert torch.equal(after.accuracy, before.accuracy)
    assert torch.allclose(after.log_latency, before.log_latency + offsets, atol=1e-5)
    assert torch.allclose(after.spread.square(), before.spread.square() + variance)
    # what belongs to budgets moves by the mean, 0.25
    guard = agent.calibration.guard
    moved_ms = pytest.approx([row["budget_ms"] * math.exp(0.25) for row in guard])
    for rows in (other.calibration.guard, other.calibration.guard_of_teacher):
        assert [row["budget_ms"] for row in rows] == moved_ms
    by = other.controller.network.encoding.mean - agent.controller.network.encoding.mean
    assert float(by) == pytest.approx(0.25, abs=1e-5)
    # what the tracker and static expect moves by configuration
    old, new = agent.calibration, other.calibration
    np.testing.assert_allclose(
        new.latency["bias"], old.latency["bias"] + offsets.numpy(), rtol=1e-5
    )
    spread = np.sqrt(old.latency["spread"] ** 2 + variance.numpy())
    np.testing.assert_allclose(new.latency["spread"], spread, rtol=1e-5)
    times = old.static["latency_ms"] * offsets.exp().numpy()
    np.testing.assert_allclose(new.static["latency_ms"], times, rtol=1e-5)
    # the old one is as it was, and so are the networks beside the one that is deployed
    assert DeployedController.restored(agent.plain()).decider.digest == digest
    for p, q in zip(agent.controller.parameters(), other.controller.parameters(), strict=True):
        assert torch.equal(p[:-1], q[:-1])
        assert not torch.equal(p[-1], q[-1])


def test_a_spread_at_least_halves():
    """Members may be surer than all of them together, whose spread an update narrows."""
    table, agent = taught()
    other, before, after = moved(agent, table, 0.0, -1e3)
    ratios = after.spread / before.spread
    assert 0.4999 <= float(ratios.min()) < 0.5001
    assert float(ratios.max()) < 1
    spread = agent.calibration.latency["spread"]
    np.testing.assert_allclose(other.calibration.latency["spread"], spread / 2, rtol=1e-5)


def test_one_factor_for_all_is_the_same_as_dividing_the_budgets():
    table, agent = taught()
    other, *_ = moved(agent, table, math.log(4), 0.0)
    assert all(map(torch.equal, agent.controller.parameters(), other.controller.parameters()))
    kinds = set()
    # from hopeless to generous, beside the latencies themselves, which are rounded
    ends = table.latency_ms.aminmax()
    for budget in (ends.min / 3, *default_budgets(table), ends.max, 3 * ends.max):
        budget = 1.0001 * float(budget)
        decided = chosen(agent, table, budget)
        assert chosen(other, table, 4 * budget) == decided
        kinds |= set(decided)
    assert len(kinds) > 2


def test_the_heads_learn_what_the_teacher_expects_now():
    """Two of three crops take 1.8 times as long, which no other budget describes."""
    agent, table = small_stack(200)
    slow = torch.tensor([table.configuration(c)["max_crops"] > 2 for c in range(12)])
    offsets = slow * math.log(1.8)
    x = agent.controller.normaliser(table.features, 200)
    other, *_ = moved(agent, table, offsets, 0.0)
    overall, *_ = moved(agent, table, offsets.mean(), 0.0)
    ends = default_budgets(table).double() * float(offsets.mean().exp())
    budgets = torch.linspace(float(ends[0]), float(ends[-1]), 60)
    expected = other.teacher.expected_utility(x[:1], budgets.unsqueeze(0))[0].clamp_min(0)
    assert float(expected.amax(1).min()) > 0.1  # some configuration is on time
    lost = []
    for each in (other, overall):
        decided = [chosen(each, table, budget)[0] for budget in budgets.tolist()]
        utility = expected[torch.arange(60), torch.tensor(decided)]
        lost.append(float((expected.amax(1) - utility).mean()))
    taught_again, budget_alone = lost
    assert budget_alone > 0.1
    assert taught_again < budget_alone / 3  # a sum over knobs does not say everything
