"""Decisions for cells that were measured repeatedly: rewards by hand, seeded draws, what
environments show."""

import math
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from helpers import repeated, small_table, table_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.envs import GymWrapper, check_env_specs

import knobwise  # noqa: F401  (registers the environment)
from knobwise.common.errors import InputError
from knobwise.envs.configurations.gymnasium_env import (
    ConfigBanditEnv,
    ConfigBanditVectorEnv,
    oracle,
)
from knobwise.envs.configurations.replay import Replay
from knobwise.envs.configurations.reward import (
    RewardTable,
    expected_utility,
    share_in_time,
    utility,
)
from knobwise.envs.configurations.settings import BudgetConfig, RewardConfig
from knobwise.envs.configurations.torchrl_env import ConfigBandit

NAN = math.nan
CELLS = [[[1, 3, 2], [4, 2, 6], [2, NAN, NAN]], [[5, 7, NAN], [NAN, NAN, NAN], [9, 8, 7]]]
TABLE = table_of([[0.6, 1.0, 0.2], [0.5, NAN, 0.9]], CELLS)
UTILITY = RewardConfig(kind="utility", miss=0.3)
LIMITS = BudgetConfig(strategy="fixed", values_ms=(2.0, 4.0, 7.0))
ROWS = torch.tensor([0, 1])
KINDS = ["shaped", "utility", "priced"]


def test_share_in_time_and_utility_by_hand() -> None:
    share = share_in_time(TABLE.measurements_ms, torch.tensor([[2.0], [7.0]]))
    torch.testing.assert_close(share, torch.tensor([[2 / 3, 1 / 3, 1.0], [1.0, 0.0, 1 / 3]]))
    worth = expected_utility(TABLE.accuracy, TABLE.measurements_ms, torch.tensor([[2.0], [7.0]]))
    torch.testing.assert_close(worth, torch.tensor([[0.4, 1 / 3, 0.2], [0.5, 0.0, 0.3]]))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.floats(1, 40, width=32))
def test_of_single_measurements_it_is_the_utility_bit_for_bit(seed: int, budget: float) -> None:
    table, limit = small_table(10, seed, holes=0.3), torch.tensor(budget)
    expected = expected_utility(table.accuracy, table.measurements_ms, limit)
    assert torch.equal(expected, utility(table.accuracy, table.latency_ms, limit))
    several = repeated(table, seed=seed)
    each = utility(several.accuracy.unsqueeze(-1), several.repeats_ms, limit).where(
        ~several.repeats_ms.isnan(), NAN
    )
    expected = expected_utility(several.accuracy, several.repeats_ms, limit)
    torch.testing.assert_close(expected, each.nanmean(-1).nan_to_num())


def test_rewards_by_hand() -> None:
    rewards, budgets = RewardTable(TABLE, UTILITY), torch.tensor([2.0, 7.0])
    # in time 2 of 3, 1 of 3 and 1 of 1 times; 2 of 2 and 1 of 3 times
    wanted = torch.tensor([[0.4 - 0.1, 1 / 3 - 0.2, 0.2], [0.5, NAN, 0.3 - 0.2]])
    torch.testing.assert_close(rewards.all(ROWS, budgets), wanted, equal_nan=True)
    chosen, repeats = torch.tensor([[0, 1, 1], [0, 2, 2]]), torch.tensor([[1, 1, 3], [3, 0, 2]])
    # numbers beyond the last measurement count from the first again
    latency_ms = torch.tensor([[3.0, 2.0, 4.0], [7.0, 9.0, 7.0]])
    accuracy, measured = rewards.outcome(ROWS, chosen, repeats)
    assert torch.equal(measured, latency_ms)
    assert torch.equal(accuracy, TABLE.accuracy.gather(1, chosen))
    wanted = torch.tensor([[-0.3, 1.0, -0.3], [0.5, -0.3, 0.9]])
    torch.testing.assert_close(rewards.chosen(ROWS, chosen, budgets, repeats), wanted)
    assert rewards.outcome(ROWS, chosen)[1].tolist() == [
        [2.0, 4.0, 4.0],
        [6.0, 8.0, 8.0],
    ]  # medians


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(KINDS))
def test_all_is_the_mean_of_each_measurement_and_of_what_is_chosen(seed: int, kind: str) -> None:
    table = repeated(small_table(9, seed, holes=0.3), most=3, seed=seed)
    rewards, rows, budgets = (
        RewardTable(table, RewardConfig(kind=kind)),
        torch.arange(9),
        torch.linspace(4, 30, 9),
    )
    every = torch.arange(12).expand(9, -1)
    torch.testing.assert_close(
        rewards.all(rows, budgets), rewards.chosen(rows, every, budgets), equal_nan=True
    )
    # six numbers meet each of 1, 2 or 3 measurements equally often
    each = [
        rewards.chosen(rows, every, budgets, torch.full((9, 12), number)) for number in range(6)
    ]
    torch.testing.assert_close(
        torch.stack(each).mean(0), rewards.all(rows, budgets), equal_nan=True
    )


def test_the_median_and_single_measurements_are_rewarded_as_ever() -> None:
    table, rows, budgets = (
        repeated(small_table(holes=0.3)),
        torch.arange(60),
        torch.linspace(4, 30, 60),
    )
    once = RewardTable(replace(table, repeats_ms=None), UTILITY)
    median = RewardTable(table, UTILITY, repeats="median")
    assert median.repeats_ms is None
    assert once.repeats_ms is None
    assert torch.equal(
        median.all(rows, budgets).nan_to_num(-9), once.all(rows, budgets).nan_to_num(-9)
    )


@pytest.mark.parametrize("unprofiled", ["nearest", "penalty"])
def test_what_is_shown_is_what_is_rewarded(unprofiled: str) -> None:
    table = repeated(small_table(holes=0.5), jitter=0.5)
    env = ConfigBandit(
        table, batch_size=200, group_size=3, reward="utility", unprofiled=unprofiled, seed=0
    )
    replay = Replay(table, unprofiled=unprofiled)
    out = env.rollout(1)
    rows, action = out["row"].squeeze(1), out["action"].squeeze(1)
    configuration = replay(rows, action, out["budget_ms"].squeeze(1)).configuration
    latency_ms = out["next", "latency_ms"].squeeze(1)
    measured = table.repeats_ms[rows.unsqueeze(1), configuration]
    assert (measured == latency_ms.unsqueeze(-1)).any(-1).all()
    assert (latency_ms != table.latency_ms[rows.unsqueeze(1), configuration]).any()
    in_time = latency_ms <= out["budget_ms"]
    wanted = torch.where(in_time, out["next", "accuracy"].squeeze(1), -0.2)
    shown = (
        slice(None)
        if unprofiled == "nearest"
        else table.mask[rows.unsqueeze(1), table.find(action)]
    )
    assert torch.equal(out["next", "reward"].squeeze(1)[shown], wanted[shown])


def test_every_measurement_is_drawn_about_equally_often() -> None:
    table = table_of([[1.0, 1.0]], [[[1.0, 2.0, 3.0], [4.0, 5.0, NAN]]])
    env = ConfigBandit(table, batch_size=6000, action="configuration", seed=0)
    context = env.reset()
    for configuration, values in ((0, [1.0, 2.0, 3.0]), (1, [4.0, 5.0])):
        action = torch.full((6000,), configuration)
        latency_ms = env.step(context.set("action", action))["next", "latency_ms"]
        share = torch.tensor([(latency_ms == value).float().mean() for value in values])
        assert (share - 1 / len(values)).abs().max() < 0.03  # some five standard errors


@pytest.mark.parametrize("repeats", ["draw", "median"])
def test_a_seed_gives_the_same_draws_in_all_three_environments(repeats: str) -> None:
    table = repeated(small_table(holes=0.3), jitter=0.5)
    made = [ConfigBanditEnv(table, repeats=repeats) for _ in range(2)]
    many = ConfigBanditVectorEnv(1, table, repeats=repeats)
    native = ConfigBandit(table, repeats=repeats, seed=5)
    (_, info), (_, again) = (env.reset(seed=5) for env in made)
    many.reset(seed=5)
    drawn, medians = [], []
    for _ in range(8):
        context = native.reset()
        row = info["row"]
        assert row == again["row"] == context["row"]
        action = table.configurations[torch.from_numpy(info["mask"])][0]
        results = [env.step(action.numpy()) for env in made]
        _, rewards, _, _, infos = many.step(action.numpy()[None])
        out = native.step(context.set("action", action[None]))["next"]
        assert results[0][1] == results[1][1] == rewards[0] == out["reward"]
        latencies = {result[4]["latency_ms"] for result in results}
        assert latencies == {infos["final_info"]["latency_ms"][0], out["latency_ms"].item()}
        drawn.append(results[0][4]["latency_ms"])
        assert results[0][4]["violation"] == (drawn[-1] > info["budget_ms"])
        medians.append(table.latency_ms[row, int(table.find(action))].item())
        (_, info), (_, again) = (env.reset() for env in made)
    assert (drawn == medians) == (repeats == "median")


def test_single_measurements_take_no_draw() -> None:
    table = small_table()
    env = ConfigBandit(table, seed=3)
    context = env.reset()
    before = env.contexts.generator.get_state()
    env.step(env.rand_action(context))
    assert torch.equal(env.contexts.generator.get_state(), before)
    env = ConfigBandit(repeated(table), seed=3)
    env.step(env.rand_action(env.reset()))
    assert not torch.equal(env.contexts.generator.get_state(), before)


@pytest.mark.parametrize("make", [ConfigBandit, ConfigBanditEnv, ConfigBanditVectorEnv])
def test_other_words_are_refused(make: type) -> None:
    with pytest.raises(InputError, match=r"repeats='mean'.*draw, median"):
        make(table=TABLE, repeats="mean")


@pytest.mark.parametrize("action", ["knobs", "configuration"])
@pytest.mark.parametrize("repeats", ["draw", "median"])
def test_torchrl_and_gymnasium_check_it(action: str, repeats: str) -> None:
    table = repeated(small_table(holes=0.3))
    choices = {"action": action, "repeats": repeats}
    for lean, full in ((True, True), (False, False)):
        check_env_specs(
            ConfigBandit(
                table,
                batch_size=3,
                group_size=2,
                lean=lean,
                full_information=full,
                seed=0,
                **choices,
            )
        )
    check_env(
        gymnasium.make("knobwise/ConfigBandit-v0", table=table, **choices).unwrapped,
        skip_render_check=True,
    )
    check_env_specs(GymWrapper(ConfigBanditVectorEnv(3, table, **choices)))


def test_the_observed_rewards_are_means_over_the_measurements() -> None:
    env = ConfigBandit(TABLE, batch_size=40, budget=LIMITS, full_information=True, seed=0)
    context = env.reset()
    every = torch.stack(
        [reward.nanmean(-1) for reward in _rewards_of_each(context["row"], context["budget_ms"])]
    )
    torch.testing.assert_close(context["reward_per_configuration"], every, equal_nan=True)


def _rewards_of_each(rows: torch.Tensor, budgets: torch.Tensor) -> list[torch.Tensor]:
    """The reward of each measurement of each configuration, [C, R], for each context."""
    made = []
    for row, budget in zip(rows.tolist(), budgets.tolist(), strict=True):
        measured = TABLE.repeats_ms[row]
        reward = torch.where(measured <= budget, TABLE.accuracy[row].unsqueeze(-1), -0.2)
        made.append(reward.masked_fill(measured.isnan(), NAN))
    return made


def test_the_oracle_weighs_all_measurements_by_hand() -> None:
    # at 2.5 ms the first is in time twice of three times, and so is its median; the second once of
    # three times
    table = table_of([[0.6, 1.0, 0.5]], [[[1.0, 2.0, 9.0], [2.0, 3.0, 4.0], [1.0, 2.0, 2.0]]])
    row, budget = torch.tensor([0]), torch.tensor([2.5])
    assert oracle(table, row, budget).item() == 2  # .4, .333, .5
    assert oracle(table, row, budget, repeats="median").item() == 0
    # mean latencies 4, 3 and 1.67
    worth = torch.tensor([4.0])
    assert oracle(table, row, worth, priced=True).item() == 1  # -.4, .25, .083
    _, info = (
        env := ConfigBanditEnv(table, BudgetConfig(strategy="fixed", values_ms=(2.5,)))
    ).reset(seed=0)
    info = env.step(np.array([1]))[4]
    assert (info["oracle_configuration"], info["oracle_latency_ms"]) == ({"size": 2}, 2.0)
