"""Beliefs: what was measured stays, predictions come from other samples, estimates are right on
average whatever the predictions are."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import identical, small_table
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.agents.calibration.mean_policies import Mixture, OracleAtMean, StaticMix
from knobwise.agents.evaluation.baselines import Oracle, fit_static
from knobwise.agents.evaluation.evaluation import evaluate_policy
from knobwise.agents.problem import Problem
from knobwise.agents.teacher.beliefs import fit_beliefs
from knobwise.envs.bandit.budgets import default_budgets, mean_budgets
from knobwise.envs.bandit.outcomes import Decisions
from knobwise.envs.bandit.rules import MeanBudget
from knobwise.experiments.evidence.mean_budgets import MeanBudgets
from knobwise.profiling.design.cell_design import balanced_cells, with_cells


def sparse(samples=60, per_sample=2, seed=0, **changed):
    """Return a whole table, and one with part of its cells, drawn with a known probability."""
    whole = small_table(samples)
    cells = balanced_cells(samples, whole.num_configurations, per_sample, seed)
    part = with_cells(whole, cells)
    weight = part.mask * whole.num_configurations / per_sample
    return whole, replace(part, sampling_weight=weight, **changed)


def believed(part, split):
    """The problem in which part of the cells was measured."""
    return Problem(part, split, beliefs=fit_beliefs(part, split))


def test_of_a_whole_table_nothing_is_believed():
    whole, _ = sparse()
    problem = believed(whole, whole.split())
    assert problem.beliefs is None
    assert problem.values is problem.cells is whole


def test_what_was_measured_stays_and_all_else_is_predicted():
    _, part = sparse()
    split = part.split()
    beliefs = fit_beliefs(part, split)
    assert beliefs.filled.mask.all()
    for name in ("accuracy", "latency_ms"):
        identical(getattr(beliefs.filled, name)[part.mask], getattr(part, name)[part.mask])
        assert getattr(beliefs.predicted, name).isfinite().all()
    assert beliefs.measured is part
    # a weight is 1 over the probability of a measured cell
    count = part.num_configurations
    identical(beliefs.weight.unique(), [0.0, count / 2])


def test_a_prediction_does_not_know_its_own_sample():
    _, part = sparse()
    split = part.split()
    rows = split.fitted
    known = fit_beliefs(part, split).predicted
    # another answer of one sample changes nothing that is predicted of this sample
    row = int(rows[0])
    column = int(part.mask[row].nonzero()[0])
    accuracy = part.accuracy.clone()
    accuracy[row, column] = 1 - accuracy[row, column]
    other = fit_beliefs(replace(part, accuracy=accuracy), split).predicted
    identical(known.accuracy[row], other.accuracy[row])
    assert not torch.equal(known.accuracy[rows], other.accuracy[rows])
    # what test samples hold is not used at all
    test = split.test[:1]
    accuracy = part.accuracy.clone()
    accuracy[test] = 1 - accuracy[test]
    other = fit_beliefs(replace(part, accuracy=accuracy), split).predicted
    identical(known.accuracy, other.accuracy)


def test_estimates_by_hand():
    _, part = sparse()
    beliefs = fit_beliefs(part, part.split())
    rows = torch.arange(part.num_samples)
    chosen = torch.zeros_like(rows)
    values = beliefs.estimate((rows, chosen), lambda table: table.accuracy[rows, chosen])
    predicted = beliefs.predicted.accuracy[:, 0]
    measured = part.mask[:, 0]
    weight = part.num_configurations / 2
    wanted = predicted + weight * (part.accuracy[:, 0] - predicted)
    torch.testing.assert_close(values, torch.where(measured, wanted, predicted))
    # a whole table gives what it holds
    whole, _ = sparse()
    problem = believed(whole, whole.split())
    decisions = Decisions(rows, chosen.unsqueeze(1), torch.tensor([5.0]))
    outcomes = problem.outcomes(decisions)
    identical(outcomes.accuracy, whole.accuracy[:, :1])


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000))
def test_the_mean_over_all_designs_is_the_truth_whatever_is_predicted(seed):
    whole, part = sparse(12)
    count = whole.num_configurations
    beliefs = fit_beliefs(part, part.split())
    draws = np.random.default_rng(seed)
    guess = torch.from_numpy(draws.random((12, count))).float()
    rows = torch.arange(12)
    chosen = torch.from_numpy(draws.integers(count, size=12))
    means = []
    # every cell is measured in one of as many designs as there are configurations
    for shift in range(count):
        cells = torch.zeros_like(whole.mask)
        cells[rows, (rows + shift) % count] = True
        guessed = replace(
            beliefs,
            predicted=replace(beliefs.predicted, accuracy=guess),
            measured=with_cells(whole, cells),
            weight=cells * float(count),
        )
        values = guessed.estimate((rows, chosen), lambda known: known.accuracy[rows, chosen])
        means.append(values.mean())
    torch.testing.assert_close(torch.stack(means).mean(), whole.accuracy[rows, chosen].mean())


@pytest.mark.parametrize("per_sample", [2, 4])
def test_policies_choose_what_was_not_measured_and_are_judged_by_estimates(per_sample):
    whole, part = sparse(400, per_sample)
    split = whole.split()
    budgets_ms = default_budgets(whole)
    problem = believed(part, split)
    static = fit_static(problem.cells, split.fitted)
    judged = evaluate_policy(static, problem, split.test, budgets_ms)
    truth = evaluate_policy(static, whole, split.test, budgets_ms)
    identical(judged.chosen, truth.chosen)
    difference = (judged.utility - truth.utility).double().mean(1)
    assert abs(difference.mean()) < 4 * difference.std() / len(difference) ** 0.5
    # in hindsight measured and predicted outcomes count as they are
    oracle = Oracle(problem.cells, split.test)
    oracle = evaluate_policy(oracle, problem, split.test, budgets_ms)
    assert oracle.utility.max() <= 1


def test_likely_cells_do_not_move_the_budgets():
    whole, _ = sparse(400)
    # of each sample the fastest cell for certain, and one of the others
    count = whole.num_configurations
    fastest = whole.latency_ms.argmin(1, keepdim=True)
    cells = torch.zeros_like(whole.mask).scatter(1, fastest, True)
    weight = torch.full(cells.shape, count - 1.0).scatter(1, fastest, 1.0)
    others = (fastest + 1 + torch.arange(len(fastest)).unsqueeze(1) % (count - 1)) % count
    part = with_cells(whole, cells.scatter(1, others, True))
    true = default_budgets(whole)
    naive = default_budgets(part)
    weighed = default_budgets(replace(part, sampling_weight=weight * part.mask))
    assert (weighed / true - 1).abs().mean() < 0.03
    assert (naive / true - 1).abs().mean() > 0.05


def test_mixtures_under_mean_budgets_are_judged_by_estimates():
    whole, part = sparse(400, 4)
    split = whole.split()
    budgets_ms = mean_budgets(whole, split.fitted)
    problem = replace(believed(part, split), rule=MeanBudget())
    mix = StaticMix.fit(whole, split.fitted, budgets_ms)
    truth = torch.stack(mix.expected(Problem(whole, split), split.test))
    estimates = torch.stack(mix.expected(problem, split.test))
    difference = (estimates - truth).mean(2)
    error = difference.std(1) / difference.shape[1] ** 0.5
    assert (difference.mean(1).abs() < 4 * error).all()
    # single estimates lie outside of what accuracies can be; the values themselves do not
    assert estimates[0].min() < 0
    mixture = mix.mixture(problem, split.test)
    assert mixture.expected(problem, split.test, checked=False)[0].min() >= 0
    judged = MeanBudgets(problem, budgets_ms)
    oracle = judged.outcomes(OracleAtMean(budgets_ms))
    assert oracle["accuracy"].max() <= 1
    # which tells how many of its choices were measured
    assert oracle["sampling_weight"].shape == oracle["accuracy"].shape
    # half of a cell that stands for 4, and half of one that stands for 2, or that nobody measured
    mixture = Mixture(torch.tensor([[0]]), torch.tensor([[1]]), torch.tensor([[0.5]]))
    assert mixture.weight(torch.tensor([[4.0, 2.0]])) == 3
    assert mixture.weight(torch.tensor([[4.0, 0.0]])) == 0
