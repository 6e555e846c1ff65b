"""Under weights: pairs of worths are drawn and observed, and rewards weigh a further cost too."""

from dataclasses import replace

import pytest
import torch
from gymnasium.utils.env_checker import check_env
from helpers import small_table, table_of
from torchrl.envs.utils import check_env_specs

from knobwise.common.errors import InputError
from knobwise.envs import BudgetConfig, ConfigBandit, ConfigBanditEnv, ConfigBanditVectorEnv
from knobwise.envs.configurations.budgets import BudgetSampler, worth_pairs, worths_range
from knobwise.envs.configurations.gymnasium_env import oracle
from knobwise.envs.configurations.reward import RewardTable, at_worths
from knobwise.envs.configurations.settings import RewardConfig
from knobwise.envs.tables.profile_table import ProfileTable

WEIGHTS = BudgetConfig(sense="weights")
PRICED = RewardConfig(kind="priced")


def by_hand() -> ProfileTable:
    """Sample 0: cheap and wrong, or slow and right, or dear and right; sample 1 lacks the last."""
    nan = torch.nan
    table = table_of([[0.0, 1.0, 1.0], [1.0, 1.0, nan]], [[1.0, 8.0, 2.0], [1.0, 8.0, nan]])
    return replace(table, cost=torch.tensor([[1.0, 1.0, 6.0], [2.0, 0.0, nan]]), cost_name="price")


def test_rewards_by_hand() -> None:
    rewards, worths = RewardTable(by_hand(), PRICED), torch.tensor([[10.0, 20.0], [4.0, 2.0]])
    wanted = [[-0.1 - 0.05, 1 - 0.8 - 0.05, 1 - 0.2 - 0.3], [1 - 0.25 - 1, 1 - 2 - 0, torch.nan]]
    assert rewards.all(torch.tensor([0, 1]), worths)[0].tolist() == pytest.approx(wanted[0])
    assert rewards.all(torch.tensor([0, 1]), worths)[1].tolist() == pytest.approx(
        wanted[1], nan_ok=True
    )
    chosen = rewards.chosen(torch.tensor([0, 1]), torch.tensor([[2, 1], [0, 1]]), worths)
    assert chosen.tolist() == [pytest.approx([0.5, 0.15]), pytest.approx([-0.25, -1.0])]
    cells = torch.tensor([[1.0]]), torch.tensor([[8.0]]), torch.tensor([[6.0]])
    assert float(at_worths(*cells, torch.tensor([[16.0, 24.0]]))) == 1 - 0.5 - 0.25


def test_repeated_measurements_are_averaged() -> None:
    table = replace(
        table_of([[1.0]], [[[2.0, 4.0]]]), cost=torch.tensor([[3.0]]), cost_name="price"
    )
    rewards, worths = RewardTable(table, PRICED), torch.tensor([[10.0, 6.0]])
    assert float(rewards.all(torch.tensor([0]), worths)) == pytest.approx(1 - 0.3 - 0.5)
    drawn = rewards.chosen(torch.tensor([0]), torch.tensor([[0]]), worths, torch.tensor([[1]]))
    assert float(drawn) == pytest.approx(1 - 0.4 - 0.5)


def test_the_oracle_by_hand() -> None:
    worths = torch.tensor([[10.0, 20.0], [100.0, 3.0], [0.5, 0.5]])
    assert oracle(by_hand(), torch.tensor([0, 0, 0]), worths, priced=True).tolist() == [2, 1, 0]


def test_worths_are_drawn_from_the_range_of_each_cost() -> None:
    table = replace(
        small_table(40), cost=100 * small_table(40).latency_ms.square(), cost_name="energy_j"
    )
    drawn = BudgetSampler(table, WEIGHTS)(
        torch.zeros(4000, dtype=torch.int64), torch.Generator().manual_seed(0)
    )
    ranges = torch.stack(
        [worths_range(values[table.mask]) for values in (table.latency_ms, table.weighed_cost)]
    )
    torch.testing.assert_close(drawn.log().mean(0), ranges.log().mean(1), atol=0.1, rtol=0)
    assert bool(((drawn >= ranges[:, 0]) & (drawn <= ranges[:, 1])).all())
    pairs = worth_pairs(table, 3)
    torch.testing.assert_close(pairs[[0, -1]], ranges.T)
    torch.testing.assert_close(pairs[4], ranges.log().mean(1).exp())
    assert len(pairs) == 9


def test_without_a_further_cost_weights_are_refused_in_a_line() -> None:
    for table in (
        small_table(8),
        replace(small_table(8), cost=torch.zeros(8, 12), cost_name="price"),
    ):
        with pytest.raises(InputError, match="has no further cost; add a column cost"):
            ConfigBandit(table, budget=WEIGHTS)
    with pytest.raises(
        InputError, match=r"reward\.kind=utility: does not suit budget\.sense=weights"
    ):
        ConfigBandit(by_hand(), budget=WEIGHTS, reward="utility")


def test_the_gymnasium_environment_by_hand() -> None:
    env = ConfigBanditEnv(by_hand(), WEIGHTS, render_mode="ansi", action="configuration")
    check_env(ConfigBanditEnv(by_hand(), WEIGHTS), skip_render_check=True)
    observation, info = env.reset(options={"row": 0, "worths": [10.0, 20.0]})
    assert observation["worths"].tolist() == [10.0, 20.0] == info["worths"]
    assert "a right answer is worth 10 ms or 20 price" in env.render()
    _, reward, terminated, _, info = env.step(1)
    assert (reward, terminated) == (pytest.approx(0.15), True)
    assert [info[name] for name in ("accuracy", "latency_ms", "cost", "oracle_cost")] == [
        1.0,
        8.0,
        1.0,
        6.0,
    ]
    assert "violation" not in info
    with pytest.raises(
        InputError, match=r"worths=5\.0: must be a pair of positive, finite numbers"
    ):
        env.reset(options={"worths": 5.0})


def test_the_vector_environment_keeps_the_worths_of_those_not_reset() -> None:
    envs = ConfigBanditVectorEnv(3, by_hand(), WEIGHTS, autoreset_mode="Disabled")
    before = envs.reset(seed=0)[0]["worths"]
    renewed = torch.tensor([True, False, True]).numpy()
    after = envs.reset(options={"reset_mask": renewed})[0]["worths"]
    assert (before == after).all(1).tolist() == [False, True, False]


def test_the_torchrl_environment_by_hand() -> None:
    env = ConfigBandit(
        by_hand(), batch_size=2, group_size=2, budget=WEIGHTS, action="configuration", seed=0
    )
    check_env_specs(env)
    contexts = env.reset()
    assert contexts["worths"].shape == (2, 2)
    contexts["row"], contexts["worths"] = (
        torch.tensor([0, 1]),
        torch.tensor([[10.0, 20.0], [4.0, 2.0]]),
    )
    after = env.step(contexts.set("action", torch.tensor([[2, 1], [0, 1]])))["next"]
    assert after["reward"].tolist() == [pytest.approx([0.5, 0.15]), pytest.approx([-0.25, -1.0])]
    assert after["cost"].tolist() == [[6.0, 1.0], [2.0, 0.0]]
