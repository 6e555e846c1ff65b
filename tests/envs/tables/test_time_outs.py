"""Time-outs: a heap at the top of the times, equal or not."""

import numpy as np
import polars as pl
import pytest
import torch
from helpers import table_of

from knobwise.envs import default_budgets
from knobwise.envs.readers.long_table import table_from_frame
from knobwise.envs.tables.time_outs import time_outs
from knobwise.experiments.inspection.checks import findings_by_check
from knobwise.experiments.inspection.measured import Measured

LIMIT = 500_000.0


def solvers(spread, seed=0):
    """Times in ms of 4 solvers on 300 instances, and which were stopped up to `spread` later."""
    draws = np.random.default_rng(seed)
    times = 10 ** (1 + 7 * draws.random((300, 1)) + draws.normal(0, 0.5, (300, 4)))
    late = (times > LIMIT) | (draws.random(times.shape) < 0.1)
    return np.where(late, LIMIT * (1 + spread * draws.random(times.shape)), times), late


def table_of_solvers(times, late):
    return table_of(torch.from_numpy(1.0 - late).float(), torch.from_numpy(times).float())


@pytest.mark.parametrize("spread", [0.0, 1e-4, 6e-4, 4e-3, 0.015])
@pytest.mark.parametrize("seed", range(3))
def test_a_heap_at_the_top_is_found_whatever_its_width(spread, seed):
    times, late = solvers(spread, seed)
    assert (time_outs(times, late) == late).all()


def test_a_few_that_could_not_be_stopped_are_in_the_heap():
    times, late = solvers(1e-3)
    times[tuple(np.argwhere(late)[0])] = 3 * LIMIT
    assert (time_outs(times, late) == late).all()


def test_right_answers_and_steady_times_are_no_time_outs():
    times, late = solvers(1e-3)
    assert not time_outs(times, np.zeros_like(late)).any()
    # right answers as late as wrong ones, as of a slow configuration
    draws = np.random.default_rng(0)
    steady = [10, 20, 400] * draws.uniform(0.99, 1.01, (300, 3))
    assert not time_outs(steady, draws.random((300, 3)) < 0.4).any()
    # a slow configuration that is always wrong was not stopped
    assert not time_outs(steady, np.ones((300, 3), bool)).any()
    # what right answers of a configuration always cost is its price
    steady[:, 2] = 900.0
    steady[:20, 2] = 0.0
    wrong = draws.random((300, 3)) < 0.4
    wrong[:20] = True
    assert not time_outs(steady, wrong).any()
    # but a configuration that is always wrong then was always stopped
    wrong[:, 2] = True
    assert time_outs(steady, wrong).sum() == 280
    # the slowest of a smooth distribution may well be wrong
    smooth = np.exp(draws.normal(size=(2000, 1)))
    assert not time_outs(smooth, smooth > np.quantile(smooth, 0.97)).any()
    assert not time_outs(np.full((3, 2), np.nan), np.zeros((3, 2), bool)).any()
    assert not time_outs(np.full((30, 2), 7.0), np.ones((30, 2), bool)).any()


@pytest.mark.parametrize("spread", [6e-4, 0.02])
def test_default_budgets_are_those_of_equal_time_outs(spread):
    times, late = solvers(spread)
    equal = default_budgets(table_of_solvers(np.where(late, LIMIT, times), late))
    assert default_budgets(table_of_solvers(times, late)).tolist() == equal.tolist()
    assert equal.max() < LIMIT


def test_no_budget_is_below_the_smallest_time_above_0():
    times = torch.arange(1.0, 101).reshape(50, 2)
    times[:40] = 0.0
    assert default_budgets(table_of(torch.ones(50, 2), times)).min() >= 81


@pytest.mark.parametrize("spread", [0.0, 6e-4])
def test_nobody_is_told_to_remove_time_outs(spread):
    times, late = solvers(spread)
    table = table_of_solvers(times, late)
    found = findings_by_check(table)
    (fault,) = found["capped"]
    assert fault.what.startswith(f"{late.sum()} ")
    for check in ("wrong_clock", "usual_time", "equal_times", "cut_answers", "slower_is_worse"):
        assert found[check] == [], check
    assert (Measured(table).timed_out == late).all()


def test_a_clock_that_changed_is_noticed_beyond_the_limit():
    times, late = solvers(0.0)
    times[5, 1] = 40 * LIMIT
    late[5, 1] = False
    times[5, [0, 2, 3]] = 10.0
    late[5, [0, 2, 3]] = False
    (fault,) = findings_by_check(table_of_solvers(times, late))["wrong_clock"]
    assert fault.what.startswith("1 cells")


@pytest.mark.parametrize("spread", [0.0, 6e-4])
def test_rows_without_accuracy_that_ran_into_the_limit_are_wrong(spread):
    times, late = solvers(spread)
    # half of the time-outs have accuracy 0 already
    unscored = late & (np.arange(300) % 2 == 0)[:, None]
    rows = {
        "sample_id": np.arange(300).repeat(4),
        "solver": np.tile([*"abcd"], 300),
        "accuracy": np.where(unscored, np.nan, 1.0 - late).ravel(),
        "latency_ms": times.ravel(),
    }
    table = table_from_frame(pl.DataFrame(rows, nan_to_null=True), name="t")
    assert table.mask.all()
    assert (table.accuracy.numpy() == ~late).all()
    assert any(note.startswith(f"{unscored.sum()} rows without accuracy") for note in table.notes)


def test_slow_wrong_answers_of_any_spread_are_no_time_outs():
    """Half the answers take 40 to 42, and are wrong: nobody stopped them."""
    draws = np.random.default_rng(0)
    slow = draws.random((200, 2)) < 0.5
    times = np.where(slow, draws.uniform(40, 42, slow.shape), draws.uniform(10, 10.5, slow.shape))
    assert not time_outs(times, slow).any()
