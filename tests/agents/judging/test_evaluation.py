from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from helpers import small_table
from torch import Tensor

from knobwise.agents.judging.evaluation import bootstrap, judge, mean_ci95
from knobwise.envs.configurations.reward import RewardConfig, RewardTable
from knobwise.envs.tables.profile_table import Knob, ProfileTable


class Always:
    """Takes one configuration, whatever comes."""

    def __init__(self, configuration: int) -> None:
        self.configuration = configuration

    def choose(self, features: Mapping[str, Tensor], budgets_ms: Tensor, mask: Tensor) -> Tensor:
        return torch.full((len(budgets_ms),), self.configuration)


def two_by_two() -> ProfileTable:
    return ProfileTable(
        name="hand",
        knobs=(Knob("k", (1, 2)),),
        configurations=torch.tensor([[0], [1]]),
        accuracy=torch.tensor([[0.5, 1.0], [0.25, 0.75]]),
        latency_ms=torch.tensor([[10.0, 20.0], [30.0, 40.0]]),
        mask=torch.ones(2, 2, dtype=torch.bool),
        sample_ids=("a", "b"),
    )


def test_judged_by_hand() -> None:
    table = two_by_two()
    rewards = RewardTable(table, RewardConfig(kind="utility"))
    judged = judge(Always(1), table, torch.arange(2), torch.tensor([15.0, 35.0]), rewards)
    assert judged.latency_ms.tolist() == [[20, 20], [40, 40]]
    assert judged.utility.tolist() == [[0, 1.0], [0, 0]]
    assert judged.feasible.tolist() == [[True, True], [False, True]]
    first = judged.row(0)
    assert first["budget_ms"] == 15
    assert (first["satisfaction"], first["satisfaction_feasible"], first["utility"]) == (0, 0, 0)
    assert first["infeasible"] == 1 / 2
    mean = judged.row(None)
    assert mean["budget_ms"] is None
    assert mean["accuracy"] == pytest.approx(0.875)
    assert mean["latency_ms_mean"] == pytest.approx(30)
    assert mean["satisfaction"] == pytest.approx(1 / 4)
    assert mean["satisfaction_feasible"] == pytest.approx((0 + 1 / 2) / 2)
    assert mean["infeasible"] == 1 / 4
    assert mean["utility"] == pytest.approx(1 / 4)
    assert mean["reward"] == pytest.approx(1 / 4)


def test_the_same_policy_scores_the_same_twice() -> None:
    table = small_table(40)
    rewards = RewardTable(table, RewardConfig())
    twice = [judge(Always(3), table, torch.arange(40), torch.tensor([9.0]), rewards) for _ in range(2)]
    assert torch.equal(twice[0].utility, twice[1].utility)
    assert torch.equal(twice[0].reward, twice[1].reward)


def test_bootstrap_intervals_hold_the_mean_and_shrink_with_the_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    widths = []
    for n in (100, 1600):
        static = torch.rand(n, generator=generator) * 0.5
        best = static + 0.4
        policy = (static + 0.1 + 0.05 * torch.randn(n, generator=generator)).expand(3, n)
        found = bootstrap(policy, static, best)
        low, high = found["gap_closed_ci95"]
        assert low < 0.25 < high or abs(low - 0.25) < 0.03
        widths.append(found["utility_ci95"][1] - found["utility_ci95"][0])
    assert widths[0] / widths[1] == pytest.approx(4, rel=0.35)


def test_bootstrap_takes_the_seeds_into_account() -> None:
    static, best = torch.zeros(50), torch.ones(50)
    apart = torch.tensor([0.2, 0.5, 0.8])[:, None].expand(3, 50)
    low, high = bootstrap(apart, static, best)["gap_closed_ci95"]
    assert low < 0.35
    assert high > 0.65
    low, high = bootstrap(torch.full((3, 50), 0.5), static, best)["gap_closed_ci95"]
    assert (low, high) == (pytest.approx(0.5), pytest.approx(0.5))


def test_intervals_of_several_means_come_from_the_same_draws() -> None:
    values = torch.rand(2, 3, 50, generator=torch.Generator().manual_seed(0))
    both = mean_ci95(values)
    assert both.shape == (2, 2)
    for one, found in zip(values, both, strict=True):
        torch.testing.assert_close(mean_ci95(one), found)
        assert found[0] < one.mean() < found[1]
        nothing = torch.zeros(50)
        assert bootstrap(one, nothing, nothing)["utility_ci95"] == pytest.approx(found.tolist())
    shifted = mean_ci95(torch.stack([values[0], values[0] + 0.25]))
    torch.testing.assert_close(shifted[1], shifted[0] + 0.25)


def test_where_nothing_can_be_gained_nothing_was_closed() -> None:
    static = torch.rand(20)
    assert bootstrap(static.expand(2, 20), static, static)["gap_closed_ci95"] == [0, 0]
    best = static.clone()
    best[0] += 0.5  # in about a third of the draws the one sample with a gain is missing
    low, high = bootstrap(best.expand(1, 20), static, best)["gap_closed_ci95"]
    assert (low, high) == (pytest.approx(1), pytest.approx(1))


def test_where_nothing_is_feasible_no_share_of_it_is_reported() -> None:
    rewards = RewardTable(two_by_two(), RewardConfig(kind="utility"))
    judged = judge(Always(0), two_by_two(), torch.arange(2), torch.tensor([1.0, 15.0]), rewards)
    assert judged.row(0)["satisfaction_feasible"] is None
    assert judged.row(0)["infeasible"] == 1
    assert judged.row(None)["satisfaction_feasible"] == 1
