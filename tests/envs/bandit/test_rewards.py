"""Rewards by hand: their formulas, cells that were measured repeatedly, functions of the user's."""

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import close, identical, input_error, repeated, small_table, table_of
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.envs import RewardConfig
from knobwise.envs.bandit.reward import (
    RewardTable,
    complexity,
    expected_utility,
    share_on_time,
)
from knobwise.envs.bandit.reward_kinds import KINDS
from knobwise.envs.tables.profile_table import Knob

NAN = math.nan
NOTHING = RewardConfig(alpha=0, beta=0, gamma=0, delta=0, epsilon=0)
UTILITY = RewardConfig(kind="utility", alpha=2.0, miss=0.3)
CELLS = [[[1, 3, 2], [4, 2, 6], [2, NAN, NAN]], [[5, 7, NAN], [NAN, NAN, NAN], [9, 8, 7]]]
TABLE = table_of([[0.6, 1.0, 0.2], [0.5, NAN, 0.9]], CELLS)
ROWS = torch.tensor([0, 1])
BUDGETS = torch.tensor([2.0, 7.0])


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


# -- formulas --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "latency", "wanted"),
    [
        (replace(NOTHING, alpha=3.0), 150.0, 2.4),
        (replace(NOTHING, beta=3.0), 150.0, -3 * sigmoid(5)),
        (replace(NOTHING, beta=3.0), 100.0, -1.5),
        (replace(NOTHING, gamma=3.0), 300.0, -12.0),
        (replace(NOTHING, gamma=3.0), 50.0, 0.0),
        (replace(NOTHING, delta=3.0), 150.0, 0.0),
        (replace(NOTHING, delta=3.0), 25.0, 2.25),
        (replace(NOTHING, epsilon=3.0), 150.0, -1.2),
        (UTILITY, 100.0, 1.6),
        (UTILITY, 100.1, -0.3),
        (RewardConfig(kind="priced"), 150.0, 0.8 - 1.5),
    ],
)
def test_formulas_by_hand(config, latency, wanted):
    # an accuracy of .8, a budget of 100 ms and a complexity of .4
    values = (torch.tensor(v, dtype=torch.float64) for v in (0.8, latency, 100.0, 0.4))
    assert KINDS[config.kind].formula(*values, config).item() == pytest.approx(wanted)


def test_another_kind_is_refused():
    with input_error(r"reward\.kind"):
        RewardConfig(kind="sparse")


@settings(max_examples=100)
@given(st.floats(2**-10, 2**17, width=32), st.integers(-2, 2))
def test_reward_and_utility_agree_on_what_is_late_to_the_last_bit(budget, steps):
    limit = latency = torch.tensor(budget)
    one = torch.tensor(1.0)
    for _ in range(abs(steps)):
        latency = latency.nextafter(torch.tensor(steps * math.inf))
    gained = KINDS["utility"].formula(one, latency, limit, one, RewardConfig(kind="utility"))
    assert gained == expected_utility(one, latency.unsqueeze(-1), limit) == (steps <= 0)


def test_complexity_by_hand():
    result = complexity(small_table())  # crops 2, 6, 10; experts 4, 8; blocks 12, 16
    wanted = [(2 / 10 + 4 / 8 + 12 / 16) / 3, (6 / 10 + 8 / 8 + 12 / 16) / 3, 1]
    assert result[[0, 6, -1]].tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("values", [("fast", "good"), (-1, 4), (0, 0.0), (False, True)])
def test_a_knob_without_a_size_counts_nothing(values):
    knobs = Knob("top_k", (2, 4)), Knob("other", values)
    table = table_of([[1.0] * 2], [[1.0] * 2], knobs=knobs, configurations=torch.eye(2).long())
    assert complexity(table).tolist() == [0.5, 0.25]


# -- cells that were measured repeatedly -----------------------------------------------------------


def test_share_in_time_and_utility_by_hand():
    limits = BUDGETS.unsqueeze(1)
    measured = TABLE.measurements_ms
    close(share_on_time(measured, limits), [[2 / 3, 1 / 3, 1.0], [1.0, 0.0, 1 / 3]])
    close(expected_utility(TABLE.accuracy, measured, limits), [[0.4, 1 / 3, 0.2], [0.5, 0.0, 0.3]])


def test_rewards_by_hand():
    rewards = RewardTable(TABLE, replace(UTILITY, alpha=1.0))
    # in time 2 of 3, 1 of 3 and 1 of 1 times; 2 of 2 and 1 of 3 times
    close(rewards.all(ROWS, BUDGETS), [[0.4 - 0.1, 1 / 3 - 0.2, 0.2], [0.5, NAN, 0.3 - 0.2]])
    chosen = torch.tensor([[0, 1, 1], [0, 2, 2]])
    # numbers beyond the last measurement count from the first again
    accuracy, measured = rewards.outcome(ROWS, chosen, torch.tensor([[1, 1, 3], [3, 0, 2]]))
    identical(measured, [[3.0, 2.0, 4.0], [7.0, 9.0, 7.0]])
    identical(accuracy, TABLE.accuracy.gather(1, chosen))
    found = rewards.reward_of(accuracy, measured, BUDGETS.unsqueeze(1), chosen)
    close(found, [[-0.3, 1.0, -0.3], [0.5, -0.3, 0.9]])
    identical(rewards.outcome(ROWS, chosen)[1], [[2.0, 4.0, 4.0], [6.0, 8.0, 8.0]])


@settings(max_examples=30)
@given(
    st.integers(0, 1000),
    st.sampled_from(sorted(kind for kind, about in KINDS.items() if about.formula)),
)
def test_rewards_are_means_over_measurements(seed, kind):
    table = repeated(small_table(9, seed, holes=0.3), most=3, seed=seed)
    rewards = RewardTable(table, RewardConfig(kind=kind))
    rows = torch.arange(9)
    budgets = torch.linspace(4, 30, 9)
    every = torch.arange(12).expand(9, -1)
    # six numbers meet each of 1, 2 or 3 measurements equally often
    total = torch.zeros(9, 12)
    for number in range(6):
        drawn = rewards.outcome(rows, every, torch.full_like(every, number))
        total += rewards.reward_of(*drawn, budgets.unsqueeze(1), every)
    close(total / 6, rewards.all(rows, budgets))


def test_the_median_is_rewarded_like_a_single_measurement():
    table = repeated(small_table(holes=0.3))
    rows = torch.arange(60)
    once = RewardTable(replace(table, repeats_ms=None), UTILITY)
    median = RewardTable(table, UTILITY, repeats="median")
    identical(median.all(rows, rows + 1.0), once.all(rows, rows + 1.0))


# -- functions of the user's -----------------------------------------------------------------------

NUMBERS = itertools.count()


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a reward function that returns an expression into a new module of this folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(returned, before=""):
        module = f"mine_{next(NUMBERS)}"
        head = "def f(accuracy, latency_ms, budget_ms, knobs):"
        Path(f"{module}.py").write_text(f"{before}\n{head}\n    return {returned}\n")
        return RewardConfig(kind="function", function=f"{module}:f")

    return write


def test_a_function_by_hand_of_each_measurement_and_their_mean(written):
    table = table_of([[0.6, 1.0], [0.5, NAN]], [[[1, 3], [4, 2]], [[5, 7], [NAN, NAN]]])
    rewards = RewardTable(table, written("accuracy - latency_ms / budget_ms + 10 * knobs['size']"))
    budgets = torch.tensor([10.0, 20.0])
    close(rewards.all(ROWS, budgets), [[0.6 - 0.2, 1.0 - 0.3 + 10], [0.5 - 0.3, NAN]])
    chosen = torch.tensor([[1, 0], [0, 0]])
    drawn = rewards.outcome(ROWS, chosen, torch.tensor([[0, 1], [1, 0]]))
    each = rewards.reward_of(*drawn, budgets.unsqueeze(1), chosen)
    close(each, [[1.0 - 0.4 + 10, 0.6 - 0.3], [0.5 - 0.35, 0.5 - 0.25]])


def test_a_knob_with_names_comes_as_indices_and_others_as_their_values(written):
    knobs = (Knob("tier", ("low", "high")), Knob("crops", (0.5, 4)), Knob("cache", (False, True)))
    configurations = torch.tensor([[0, 1, 0], [1, 0, 0], [1, 1, 1]])
    table = replace(TABLE, knobs=knobs, configurations=configurations)
    config = written("10.0 * knobs['tier'] + knobs['crops'] + knobs['cache'] / 4 + 0 * latency_ms")
    identical(RewardTable(table, config).all(ROWS[:1], BUDGETS[:1]), [[4.0, 10.5, 14.25]])


@pytest.mark.parametrize(
    ("returned", "before", "fault"),
    [
        ("knobs['sizes']", "", r"KeyError: 'sizes' \(.*\.py, line \d+\)"),
        ("int('two\\nlines')", "", "ValueError"),
        ("1.0", "", "float"),
        ("accuracy[:, :1]", "", r"\[2, 1\]"),
        ("accuracy / (latency_ms - 2)", "", "inf"),
        ("accuracy", "import no_such_package", "ModuleNotFoundError"),
        ("accuracy", "raise SystemExit(3)", "SystemExit"),
        ("accuracy", "1 +", "SyntaxError"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_in_a_line(returned, before, fault, written):
    config = written(returned, before)
    with input_error(fault) as refused:
        RewardTable(TABLE, config)
    assert str(refused.value).startswith(f"reward.function={config.function}: ")
    assert "\n" not in str(refused.value)


def test_what_shows_only_later_is_refused_where_it_shows(written):
    rewards = RewardTable(TABLE, written("accuracy / (budget_ms != 17)"))
    assert rewards.all(ROWS[:1], torch.tensor([16.0])).isfinite().all()
    with input_error("inf in 7 of 7"):
        rewards.all(ROWS[:1], torch.tensor([17.0]))


def test_a_function_that_writes_in_place_changes_no_table(written):
    table = table_of([[0.6, 1.0, 0.2], [0.5, NAN, 0.9]], CELLS)
    before = table.accuracy.clone(), table.latency_ms.clone(), table.repeats_ms.clone()
    config = written("accuracy.mul_(latency_ms.le_(budget_ms)) + 0 * knobs['size'].add_(1)")
    rewards = RewardTable(table, config)
    clean = RewardTable(TABLE, written("accuracy * (latency_ms <= budget_ms)"))
    # a second call finds what the first one did
    for _ in range(2):
        identical(rewards.all(ROWS, BUDGETS), clean.all(ROWS, BUDGETS))
    for cells, now in zip(
        before, (table.accuracy, table.latency_ms, table.repeats_ms), strict=True
    ):
        identical(cells, now)
