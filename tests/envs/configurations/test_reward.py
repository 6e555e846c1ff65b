import dataclasses
import math

import pytest
import torch
from helpers import small_table, table_of
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.common.errors import InputError
from knobwise.envs.configurations.reward import RewardTable, complexity, reward, utility
from knobwise.envs.configurations.settings import RewardConfig
from knobwise.envs.tables.profile_table import Knob

NOTHING = RewardConfig(alpha=0, beta=0, gamma=0, delta=0, epsilon=0)


def one(config: RewardConfig, accuracy: float = 0.8, latency: float = 150.0, budget: float = 100.0) -> float:
    values = (torch.tensor(v, dtype=torch.float64) for v in (accuracy, latency, budget, 0.4))
    return reward(*values, config).item()


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("term", "latency", "wanted"),
    [
        ("alpha", 150.0, 0.8),
        ("alpha", 50.0, 0.8),
        ("beta", 150.0, -sigmoid(5)),
        ("beta", 100.0, -0.5),
        ("beta", 50.0, -sigmoid(-5)),
        ("gamma", 150.0, -0.25),
        ("gamma", 300.0, -4.0),
        ("gamma", 100.0, 0.0),
        ("gamma", 50.0, 0.0),
        ("delta", 150.0, 0.0),
        ("delta", 100.0, 0.0),
        ("delta", 25.0, 0.75),
        ("epsilon", 150.0, -0.4),
    ],
)
def test_each_term_by_hand(term: str, latency: float, wanted: float) -> None:
    assert one(dataclasses.replace(NOTHING, **{term: 1.0}), latency=latency) == pytest.approx(wanted)
    assert one(dataclasses.replace(NOTHING, **{term: 3.0}), latency=latency) == pytest.approx(3 * wanted)


def test_the_whole_by_hand_with_the_default_coefficients() -> None:
    late = 0.8 - 0.5 * sigmoid(5) - 10 * 0.5**2 - 0.05 * 0.4
    assert one(RewardConfig()) == pytest.approx(late)
    in_time = 0.8 - 0.5 * sigmoid(-2) - 0.05 * 0.4 + 0.1 * 0.2
    assert one(RewardConfig(), latency=80.0) == pytest.approx(in_time)


def test_utility_kind_by_hand() -> None:
    config = RewardConfig(kind="utility", alpha=2.0, miss=0.3)
    assert one(config, latency=100.0) == 1.6
    assert one(config, latency=100.1) == -0.3
    with pytest.raises(InputError, match=r"reward\.kind='sparse'"):
        RewardConfig(kind="sparse")
    # the utility that everything is judged by counts accuracy only inside the budget
    latency = torch.tensor([9.0, 10.0, 10.0001, math.nan])
    accuracy = torch.tensor([0.5, 0.7, 0.9, math.nan])
    torch.testing.assert_close(utility(accuracy, latency, torch.tensor(10.0)), torch.tensor([0.5, 0.7, 0.0, 0.0]))


@settings(max_examples=100, deadline=None)
@given(st.floats(2**-10, 2**17, width=32), st.integers(-2, 2))
def test_reward_and_utility_agree_on_what_is_late_to_the_last_bit(budget: float, steps: int) -> None:
    limit = torch.tensor(budget)
    latency = limit
    for _ in range(abs(steps)):
        latency = latency.nextafter(torch.tensor(math.copysign(math.inf, steps)))
    in_time = reward(torch.tensor(1.0), latency, limit, torch.tensor(0.0), RewardConfig(kind="utility"))
    assert in_time == utility(torch.tensor(1.0), latency, limit)


@pytest.mark.parametrize("kind", ["shaped", "utility"])
def test_what_was_not_profiled_has_reward_nan(kind: str) -> None:
    table = small_table(holes=0.5)
    budgets = torch.full((table.num_samples,), 12.0)
    result = RewardTable(table, RewardConfig(kind=kind)).all(torch.arange(table.num_samples), budgets)
    assert (result.isnan() == ~table.mask).all()


def test_complexity_by_hand() -> None:
    table = small_table()  # crops 2, 6, 10; experts 4, 8; blocks 12, 16
    result = complexity(table)
    assert result[0].item() == pytest.approx((2 / 10 + 4 / 8 + 12 / 16) / 3)
    assert result[6].item() == pytest.approx((6 / 10 + 8 / 8 + 12 / 16) / 3)
    assert result[-1].item() == 1


@pytest.mark.parametrize("values", [("fast", "good"), (-1, 4), (0, 0.0)])
def test_a_knob_without_a_size_counts_nothing(values: tuple[int | str, ...]) -> None:
    knobs, table = (Knob("top_k", (2, 4)), Knob("other", values)), table_of([[1.0, 1.0]], [[1.0, 1.0]])
    table = dataclasses.replace(table, knobs=knobs, configurations=torch.tensor([[0, 0], [1, 1]]))
    assert complexity(table).tolist() == [0.25, 0.5]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(["shaped", "utility"]), st.floats(2.0, 40.0, width=32))
def test_all_and_of_say_the_same_of_every_configuration(seed: int, kind: str, budget: float) -> None:
    table = small_table(samples=15, seed=seed, holes=0.3)
    rewards = RewardTable(table, RewardConfig(kind=kind, miss=0.1))
    rows = torch.randint(15, (9,), generator=torch.Generator().manual_seed(seed))
    budgets = budget * torch.linspace(0.5, 2, 9)
    every = torch.arange(table.num_configurations).expand(9, -1)
    chosen = rewards.chosen(rows, every, budgets)
    torch.testing.assert_close(rewards.all(rows, budgets), chosen, rtol=0, atol=0, equal_nan=True)
