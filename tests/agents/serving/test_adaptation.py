"""Offsets for other hardware: what timed cells tell, and the controller that they give."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import driven_apart, small_table, table_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_numpy_controller import assert_same, budgets_of, stack_of, stacked

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.judging.baselines import BudgetAwareStatic
from knobwise.agents.learning.adaptation import (
    FREE,
    TRIED,
    Offsets,
    Scales,
    adapted,
    fit_offsets,
    log_ratios,
    posterior,
    prior_covariance,
)
from knobwise.agents.stack.stacked_controller import network_outcomes
from knobwise.common.errors import InputError

GRID = torch.cartesian_prod(torch.arange(2), torch.arange(2))


def certain(mean: torch.Tensor) -> Offsets:
    """Offsets without uncertainty."""
    return Offsets(mean.double(), torch.zeros(len(mean), dtype=torch.float64), 0.0)


# -- what timed cells tell ---------------------------------------------------------------------------------------------


def test_the_posterior_by_hand() -> None:
    """One configuration of two timed twice; the other shares only what all share."""
    scales = Scales(knob=0.5, configuration=0.2, noise=0.1)
    offsets = posterior(torch.tensor([[0], [1]]), torch.tensor([0, 0]), torch.tensor([0.5, 0.7]), scales)
    variance, shared = FREE**2 + 0.5**2 + 0.2**2, FREE**2
    shrunk = 0.6 / (variance + 0.1**2 / 2)
    assert offsets.mean.tolist() == pytest.approx([variance * shrunk, shared * shrunk], rel=1e-6)
    left = [variance - v**2 / (variance + 0.1**2 / 2) for v in (variance, shared)]
    assert offsets.variance.tolist() == pytest.approx(left, rel=1e-6)


def test_offsets_that_are_additive_over_knobs_are_known_for_combinations_never_timed() -> None:
    """ln 2 for all, and ln 3 more for the second value of the second knob; the fourth combination was not timed."""
    truth = math.log(2) + math.log(3) * (GRID[:, 1] == 1)
    chosen = torch.tensor([0, 1, 2]).repeat(4)
    offsets = fit_offsets(GRID, chosen, truth[chosen])
    assert offsets.mean.tolist() == pytest.approx(truth.tolist(), abs=0.1)
    assert offsets.variance[3] > offsets.variance[:3].max()


def test_the_evidence_is_that_of_a_normal_density() -> None:
    """Up to a constant that is the same for all scales: the number of each configuration's cells."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(4, (9,), generator=generator)
    differences = torch.randn(9, generator=generator, dtype=torch.float64)
    constants = []
    for scales in TRIED:
        covariance = prior_covariance(GRID, scales)[chosen][:, chosen] + scales.noise**2 * torch.eye(
            9, dtype=torch.float64
        )
        density = torch.distributions.MultivariateNormal(torch.zeros(9, dtype=torch.float64), covariance)
        constants.append(float(density.log_prob(differences)) - posterior(GRID, chosen, differences, scales).evidence)
    assert constants == pytest.approx([constants[0]] * len(TRIED), abs=1e-6)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), factor=st.floats(-2, 2))
def test_few_cells_recover_the_offsets_of_a_machine_and_a_stall_does_no_harm(seed: int, factor: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    grid = torch.cartesian_prod(*[torch.arange(4)] * 3)
    truth = factor + sum(0.25 * torch.randn(4, generator=generator)[values] for values in grid.T)
    chosen = torch.randperm(64, generator=generator)[:40]
    differences = truth[chosen] + 0.02 * torch.randn(40, generator=generator)
    differences[7] += 3.0  # twenty times as long, once
    error = (fit_offsets(grid, chosen, differences).mean - truth).square().mean().sqrt()
    assert error < 0.05
    assert error < 0.3 * (differences.median() - truth).square().mean().sqrt()


def test_cells_that_scatter_make_the_controller_less_sure() -> None:
    chosen = torch.arange(4).repeat(200)
    scatter = 0.2 * torch.randn(800, generator=torch.Generator().manual_seed(0))
    assert fit_offsets(GRID, chosen, scatter).variance.tolist() == pytest.approx([0.04] * 4, rel=0.2)
    assert fit_offsets(GRID, chosen, 0 * scatter).variance.max() < 0.001


def test_without_cells_nothing_changes_to_the_bit() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert not fit_offsets(GRID, none, none.double()).mean.any()
    table, stack, _ = stacked("small")
    x = stack.features(table.features, 90)
    same = adapted(stack, certain(torch.zeros(12)), x)
    for limit in budgets_of(table):
        limits = limit.expand(90)
        assert torch.equal(same.choose(table.features, limits), stack.choose(table.features, limits))
        assert all(map(torch.equal, same.view(x, limits), stack.view(x, limits)))


# -- cells of two profiles ---------------------------------------------------------------------------------------------


def test_cells_of_both_profiles_are_matched_by_name() -> None:
    old = small_table(40)
    rows, columns = torch.tensor([7, 3, 30]), torch.tensor([11, 2, 5, 8])
    new = replace(
        old,
        configurations=old.configurations[columns],
        **{name: getattr(old, name)[rows][:, columns].clone() for name in ("accuracy", "mask", "latency_ms")},
        sample_ids=("7", "3", "of no profile"),
        features={},
    )
    new.latency_ms[0] *= 2
    chosen, ratios = log_ratios(old, new)
    assert chosen.tolist() == columns.tolist() * 2
    assert ratios.tolist() == pytest.approx([math.log(2)] * 4 + [0.0] * 4, abs=1e-6)


def test_profiles_without_enough_in_common_are_refused() -> None:
    old = table_of([[1.0] * 2] * 6, [[1.0, 2.0]] * 6)
    few = replace(old, sample_ids=("0", "1", *"abcd"))
    with pytest.raises(InputError, match=r"4 of its cells .* at least 5"):
        log_ratios(old, few)
    with pytest.raises(InputError, match="0 of its cells"):
        log_ratios(old, replace(old, sample_ids=tuple("abcdef")))
    with pytest.raises(InputError, match="1 of its configurations are not in 'by hand', such as size=2"):
        log_ratios(old, table_of([[1.0] * 3] * 6, [[1.0, 2.0, 3.0]] * 6))
    twice = replace(old, sample_ids=("0", "1", "2") * 2, datasets=("a",) * 3 + ("b",) * 3)
    with pytest.raises(InputError, match="add a column `dataset`, since ids of"):
        log_ratios(twice, old)
    assert len(log_ratios(twice, replace(twice, datasets=("a",) * 3 + ("c",) * 3))[0]) == 6


# -- the controller ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["small", "gappy", "no features"])
def test_a_stack_expects_every_latency_times_its_factor(name: str) -> None:
    table, stack, _ = stacked(name)
    offsets, variance = torch.linspace(-0.5, 1.0, 12), torch.linspace(0.0, 0.3, 12)
    x, limits = stack.features(table.features, 90), torch.full((90,), 12.0)
    other = adapted(stack, Offsets(offsets.double(), variance.double(), 0.0), x)
    assert torch.allclose(other.view(x, limits).log_latency, stack.view(x, limits).log_latency + offsets, atol=1e-5)
    before, after = stack.predictions(x), other.predictions(x)
    for first, second in zip(before.experts, after.experts, strict=True):
        assert torch.equal(first.accuracy, second.accuracy)
        assert torch.allclose(second.spread.square(), first.spread.square() + variance)
    assert before.outcomes is not None
    assert after.outcomes is not None
    assert torch.equal(before.outcomes.accuracy, after.outcomes.accuracy)
    assert stack.static is not None
    assert other.static is not None
    static = BudgetAwareStatic(replace(table, latency_ms=table.latency_ms * offsets.exp()), torch.arange(90))
    budgets = 1.0001 * budgets_of(table)  # beside the latencies themselves, which are rounded
    assert torch.equal(other.static.choose({}, budgets), static.choose({}, budgets))
    assert_same(other, table)


def test_a_spread_at_least_halves() -> None:
    """Members may be surer than all of them together, whose spread an update narrows."""
    table = small_table(40)
    agent = driven_apart(table, PolicyConfig(structure="utility", hidden=8, members=3))
    x = agent.features(table.features, 40)
    before = network_outcomes(agent, x).spread
    narrow = Offsets(torch.zeros(12).double(), -10 * before.square().amax((0, 1)).double(), 0.0)
    after = network_outcomes(adapted(agent, narrow, x), x).spread
    inside = (before > 0.02) & (before < 4)  # the bounds of any spread are 0.007 and 4.5
    assert inside.any()
    assert torch.allclose(after[inside], before[inside] / 2, rtol=1e-4)


@pytest.mark.parametrize("members", [1, 2])
def test_a_network_is_less_sure_by_the_variance_of_the_offsets(members: int) -> None:
    table, variance = small_table(90), torch.linspace(0.0, 0.3, 12)
    network = driven_apart(table, PolicyConfig(structure="utility", members=members, hidden=8), by=0.02)
    x = network.features(table.features, 90)
    other = adapted(network, Offsets(torch.zeros(12).double(), variance.double(), 0.0), x)
    before, after = (network_outcomes(each, x).spread.square().mean(1) for each in (network, other))
    assert torch.allclose(after, before + variance, rtol=1e-4)


@pytest.mark.parametrize("members", [1, 3])
def test_one_factor_for_all_is_the_same_as_dividing_the_budgets(members: int) -> None:
    table = small_table(90)
    stack = stack_of(table, members=3)
    alone = driven_apart(table, PolicyConfig(structure="utility", members=members, hidden=8))
    for agent in (stack, alone):
        other = adapted(agent, certain(torch.full((12,), math.log(4))), agent.features(table.features, 90))
        for budget in 1.0001 * budgets_of(table):
            limits = budget.expand(90)
            assert torch.equal(other.choose(table.features, 4 * limits), agent.choose(table.features, limits))
