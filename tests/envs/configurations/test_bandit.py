"""Rewards by hand, and the TorchRL bandit that gives them."""

import dataclasses
import math

import pytest
import torch
from helpers import small_table, table_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.envs import check_env_specs

from knobwise.common.errors import InputError
from knobwise.envs.configurations.reward import RewardTable, complexity, reward, utility
from knobwise.envs.configurations.settings import RewardConfig
from knobwise.envs.configurations.torchrl_env import ConfigBandit
from knobwise.envs.tables.profile_table import Knob, ProfileTable

NOTHING = RewardConfig(alpha=0, beta=0, gamma=0, delta=0, epsilon=0)


def one(
    config: RewardConfig, accuracy: float = 0.8, latency: float = 150.0, budget: float = 100.0
) -> float:
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
    assert one(dataclasses.replace(NOTHING, **{term: 1.0}), latency=latency) == pytest.approx(
        wanted
    )
    assert one(dataclasses.replace(NOTHING, **{term: 3.0}), latency=latency) == pytest.approx(
        3 * wanted
    )


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
    torch.testing.assert_close(
        utility(accuracy, latency, torch.tensor(10.0)), torch.tensor([0.5, 0.7, 0.0, 0.0])
    )


@settings(max_examples=100, deadline=None)
@given(st.floats(2**-10, 2**17, width=32), st.integers(-2, 2))
def test_reward_and_utility_agree_on_what_is_late_to_the_last_bit(
    budget: float, steps: int
) -> None:
    limit = torch.tensor(budget)
    latency = limit
    for _ in range(abs(steps)):
        latency = latency.nextafter(torch.tensor(math.copysign(math.inf, steps)))
    in_time = reward(
        torch.tensor(1.0), latency, limit, torch.tensor(0.0), RewardConfig(kind="utility")
    )
    assert in_time == utility(torch.tensor(1.0), latency, limit)


@pytest.mark.parametrize("kind", ["shaped", "utility"])
def test_what_was_not_profiled_has_reward_nan(kind: str) -> None:
    table = small_table(holes=0.5)
    budgets = torch.full((table.num_samples,), 12.0)
    result = RewardTable(table, RewardConfig(kind=kind)).all(
        torch.arange(table.num_samples), budgets
    )
    assert (result.isnan() == ~table.mask).all()


def test_complexity_by_hand() -> None:
    table = small_table()  # crops 2, 6, 10; experts 4, 8; blocks 12, 16
    result = complexity(table)
    assert result[0].item() == pytest.approx((2 / 10 + 4 / 8 + 12 / 16) / 3)
    assert result[6].item() == pytest.approx((6 / 10 + 8 / 8 + 12 / 16) / 3)
    assert result[-1].item() == 1


@pytest.mark.parametrize("values", [("fast", "good"), (-1, 4), (0, 0.0)])
def test_a_knob_without_a_size_counts_nothing(values: tuple[int | str, ...]) -> None:
    knobs, table = (
        (Knob("top_k", (2, 4)), Knob("other", values)),
        table_of([[1.0, 1.0]], [[1.0, 1.0]]),
    )
    table = dataclasses.replace(table, knobs=knobs, configurations=torch.tensor([[0, 0], [1, 1]]))
    assert complexity(table).tolist() == [0.25, 0.5]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(["shaped", "utility"]), st.floats(2.0, 40.0, width=32))
def test_all_and_of_say_the_same_of_every_configuration(
    seed: int, kind: str, budget: float
) -> None:
    table = small_table(samples=15, seed=seed, holes=0.3)
    rewards = RewardTable(table, RewardConfig(kind=kind, miss=0.1))
    rows = torch.randint(15, (9,), generator=torch.Generator().manual_seed(seed))
    budgets = budget * torch.linspace(0.5, 2, 9)
    every = torch.arange(table.num_configurations).expand(9, -1)
    chosen = rewards.chosen(rows, every, budgets)
    torch.testing.assert_close(rewards.all(rows, budgets), chosen, rtol=0, atol=0, equal_nan=True)


ONE_KNOB = table_of(
    [[0.1, 0.5, 1.0], [0.2, torch.nan, 0.8]], [[1.0, 2.0, 4.0], [1.5, torch.nan, 6.0]]
)


@pytest.mark.parametrize(("lean", "full_information"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("table", [small_table(), small_table(holes=0.6, features=False), ONE_KNOB])
def test_specs_hold(lean: bool, full_information: bool, table: ProfileTable) -> None:
    env = ConfigBandit(
        table, batch_size=4, group_size=3, lean=lean, full_information=full_information
    )
    check_env_specs(env, seed=0)


def test_shapes_of_everything() -> None:
    table = small_table()
    out = (
        ConfigBandit(table, batch_size=4, group_size=3, full_information=True)
        .rollout(1)
        .squeeze(-1)
    )
    result = {key: tuple(value.shape) for key, value in out.items() if key != "next"}
    assert result == {
        **dict.fromkeys(("row", "budget_ms"), (4,)),
        **dict.fromkeys(("mask", "reward_per_configuration"), (4, 12)),
        **dict.fromkeys(("image_features", "language_features"), (4, 4)),
        **dict.fromkeys(("accuracy", "latency_ms"), (4, 3)),
        "action": (4, 3, 3),
        **dict.fromkeys(("done", "terminated"), (4, 1)),
    }
    assert out["next", "reward"].shape == (4, 3)
    lean = ConfigBandit(table, batch_size=4, lean=True).reset()
    assert set(lean.keys()) == {"row", "budget_ms", "done", "terminated"}
    out = ConfigBandit(table, batch_size=4).rollout(1).squeeze(-1)  # defaults have no group axis
    assert out["action"].shape == (4, 3)
    assert out["next", "reward"].shape == (4, 1)
    assert out["next", "accuracy"].shape == out["next", "latency_ms"].shape == (4,)


def test_every_episode_is_one_decision_on_one_context() -> None:
    env = ConfigBandit(small_table(), batch_size=4, group_size=2)
    out = env.rollout(5, break_when_any_done=False)
    assert out["next", "done"].all()
    assert torch.equal(out["next", "row"], out["row"])
    assert torch.equal(out["next", "budget_ms"], out["budget_ms"])
    assert len(out["budget_ms"].unique()) == 20  # and the next one is another


@pytest.mark.parametrize("kind", ["shaped", "utility"])
def test_a_step_gives_what_was_measured_for_the_sample_and_the_action(kind: str) -> None:
    table, config = small_table(holes=0.3), RewardConfig(kind=kind)
    env = ConfigBandit(table, batch_size=30, group_size=4, full_information=True, reward=config)
    out = env.rollout(1).squeeze(-1)
    chosen = table.find(out["action"])
    cells = out["row"][:, None], chosen
    assert torch.equal(out["next", "accuracy"], table.accuracy[cells])
    assert torch.equal(out["next", "latency_ms"], table.latency_ms[cells])
    # where a number stands in a tensor decides whether torch's sigmoid rounds its last bit up or
    # down
    last_bit = 1e-7 if kind == "shaped" else 0
    wanted = out["reward_per_configuration"].gather(1, chosen)
    torch.testing.assert_close(out["next", "reward"], wanted, rtol=0, atol=last_bit)
    assert torch.equal(out["mask"], table.mask[out["row"]])
    assert torch.equal(out["image_features"], table.features["image_features"][out["row"]])
    assert (out["reward_per_configuration"].isnan() == ~out["mask"]).all()
    assert torch.equal(
        out["next", "reward"],
        RewardTable(table, config).chosen(out["row"], chosen, out["budget_ms"]),
    )


def test_random_actions_are_drawn_evenly_among_what_was_profiled() -> None:
    table = small_table(holes=0.5)
    env = ConfigBandit(table, batch_size=1, group_size=8_000)
    torch.manual_seed(0)
    for row in range(3):
        context = env.reset().set("row", torch.tensor([row]))
        share = (
            torch.bincount(table.find(env.rand_action(context)["action"]).flatten(), minlength=12)
            / 8_000
        )
        torch.testing.assert_close(
            share, table.mask[row] / table.mask[row].sum(), rtol=0, atol=0.02
        )
        assert torch.equal(share > 0, table.mask[row])


def test_the_reward_of_a_draw_depends_on_this_draw_alone() -> None:
    table = small_table()
    env = ConfigBandit(table, batch_size=8, group_size=4, reward="shaped")
    context = env.reset()
    action = env.rand_action(context.clone())["action"]
    first = env.step(context.clone().set("action", action))["next", "reward"]
    for changed in range(4):
        other = action.clone()
        other[:, changed] = (action[:, changed] + 1) % torch.tensor(table.knob_sizes)
        reward = env.step(context.clone().set("action", other))["next", "reward"]
        same = torch.arange(4) != changed
        assert torch.equal(reward[:, same], first[:, same])
        assert (reward[:, changed] != first[:, changed]).all()


def test_a_group_is_the_same_as_flat_rows_with_repeated_contexts() -> None:
    table = small_table()
    grouped, flat = (
        ConfigBandit(table, batch_size=5, group_size=3),
        ConfigBandit(table, batch_size=15),
    )
    context = grouped.rand_action(grouped.reset())
    repeated = TensorDict({k: context[k].repeat_interleave(3) for k in ("row", "budget_ms")}, [15])
    repeated["action"] = context["action"].reshape(15, 1, 3)
    reward = grouped.step(context)["next", "reward"]
    assert torch.equal(flat.step(repeated)["next", "reward"].reshape(5, 3), reward)


def test_the_collector_gives_one_decision_for_each_context() -> None:
    env = ConfigBandit(small_table(), batch_size=8, group_size=2, lean=True)
    collector = Collector(env, frames_per_batch=8, total_frames=24, reset_at_each_iter=True)
    batches = list(collector)
    collector.shutdown()
    assert [tuple(batch["next", "reward"].shape) for batch in batches] == [(8, 1, 2)] * 3
    assert len(torch.cat([batch["budget_ms"] for batch in batches]).unique()) == 24
