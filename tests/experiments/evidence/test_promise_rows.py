"""What results say of a promise at each judged budget, by hand."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch
from helpers import small_table, table_of
from replayed import untrained

from knobwise.agents.calibration.promise import arrays_of, requests_of, trials_of
from knobwise.agents.deployed.promise import Promise
from knobwise.agents.evaluation.baselines import StaticUnderPromise, fit_static
from knobwise.agents.problem import Problem
from knobwise.experiments.evidence.promises import promises_on_test, share_outside


def judged(problem, test, budgets, rows, static):
    """What results say of single configurations without limits."""
    policy = StaticUnderPromise(Promise(arrays_of(rows), static))
    calibration = SimpleNamespace(promise=[], promise_of_static=rows)
    decider = SimpleNamespace(allowed=lambda features, count: (None, None), low=None)
    controller = SimpleNamespace(
        static_under_promise=policy, calibration=calibration, decider=decider
    )
    evaluator = SimpleNamespace(
        problem=problem, rows=test, conditions=budgets, labels=pl.Series(["a", "b"])
    )
    costs = {0: SimpleNamespace(charged_ms=torch.zeros(len(budgets)))}
    return promises_on_test(evaluator, [controller], [0], costs)


def test_a_rule_that_goes_on_is_judged_where_it_decides():
    """At 20 ms the second configuration is the safest of the fitted samples, and fails: of those
    that are held back, it is late for a tenth. Of the test samples the first is late for half."""
    latency = torch.tensor([[5.0, 15.0]] * 300)
    latency[:2, 0] = 30.0
    latency[100:110, 1] = 60.0
    latency[200:250, 0] = 60.0
    table = table_of(torch.tensor([0.2, 0.5]).expand(300, 2).contiguous(), latency)
    problem = Problem.from_table(table)
    fitted, held, test = torch.arange(300).split(100)
    static = fit_static(table, fitted)
    budgets = [10.0, 20.00000001]
    requests = requests_of(problem, held)
    trials = trials_of(problem, fitted, requests, torch.tensor(budgets).double(), static)
    rows = [each.row(0.95) for each in trials]
    first, second = judged(problem, test, [10.0, 20.0], rows, static)
    assert [first["kept"], second["kept"]] == [True, False]
    assert [first["rule_ms"], second["rule_ms"]] == [10.0, 10.0]
    assert [first["rule"], second["rule"]] == ["a", "a"]
    assert second["held_out"] == pytest.approx(0.9)
    # the first decides at both, and what was promised of it is not so
    for row in (first, second):
        assert (row["test"], row["broken"]) == (0.5, True)
    only_safest = [row | {"kept": False} for row in rows]
    unkept = judged(problem, test, [10.0, 20.0], only_safest, static)
    # its own rule, of a budget that is equal to six digits
    assert [row["rule_ms"] for row in unkept] == [10.0, 20.0]
    assert not any(row["broken"] for row in unkept)


def test_what_was_not_measured_of_test_samples_is_chosen_counts_as_late_and_breaks_nothing():
    """The second configuration decides. Of a hundred test samples it is late for some, and others
    were not measured with it, whatever would be predicted for them."""
    latency = torch.tensor([[5.0, 5.0]] * 200)
    accuracy = torch.tensor([0.2, 0.5]).expand(200, 2).clone()
    held, test = torch.arange(200).split(100)
    shares = {}
    for late, holes in ((0, 40), (50, 10)):
        latency[100:, 1] = 5.0
        latency[100 : 100 + late, 1] = 60.0
        accuracy[100:, 1] = 0.5
        latency[200 - holes :, 1] = accuracy[200 - holes :, 1] = torch.nan
        problem = Problem.from_table(table_of(accuracy, latency))
        static = fit_static(problem.facts, held)
        requests = requests_of(problem, held)
        (trial,) = trials_of(problem, held, requests, torch.tensor([10.0]), static)
        predicted = replace(problem, beliefs=object())
        (row,) = judged(predicted, test, [10.0], [trial.row(0.95)], static)
        assert (row["rule"], row["kept"]) == ("b", True)
        shares[late, holes] = row["test"], row["broken"]
        assert row["accuracy"] == pytest.approx(0.5 * (1 - holes / 100))
    assert shares == {(0, 40): (0.6, False), (50, 10): (0.4, True)}


def test_the_share_of_test_samples_outside_the_range_of_training_is_that_of_any_feature():
    table = small_table(40)
    values = torch.cat([*table.features.values()], 1).numpy()
    agent = untrained(table)
    low = np.full(values.shape[1], -np.inf, np.float32)
    high = np.full(values.shape[1], np.inf, np.float32)
    # the smaller half by one feature, and by another three of the rest
    low[1] = np.sort(values[:, 1])[20]
    above = values[:, 1] >= low[1]
    high[2] = np.sort(values[above, 2])[-4]
    agent.calibration.ranges = {"low": low, "high": high, "margin": np.array(0.1)}
    inside = (values[:, 1] >= low[1]) & (values[:, 2] <= high[2])
    evaluator = SimpleNamespace(problem=Problem.from_table(table), rows=torch.arange(40))
    assert inside.sum() == 17
    assert share_outside(evaluator, agent.decider) == pytest.approx(23 / 40)
    assert share_outside(evaluator, untrained(table).decider) == 0
