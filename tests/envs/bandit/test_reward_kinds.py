"""A kind of reward is one entry: the environments, the settings and the command line follow."""

from dataclasses import replace

import pytest
import torch
from helpers import input_error, small_table

from knobwise.envs.bandit.reward_kinds import KINDS, RewardKind
from knobwise.envs.bandit.settings import WEIGHTS, RewardConfig
from knobwise.envs.bandit.torchrl_env import ConfigBandit
from knobwise.experiments.command_line.compose import read_settings
from knobwise.experiments.command_line.registry import names_of_choices


def linear(accuracy, latency_ms, budget_ms, complexity, config):
    return accuracy - config.beta * latency_ms / budget_ms


def test_a_new_kind_is_one_entry(monkeypatch):
    monkeypatch.setitem(KINDS, "linear", RewardKind("a line", linear, settings={"beta": 2.0}))
    env = ConfigBandit(small_table(), batch_size=5, reward="linear", seed=0)
    step = env.rollout(1)
    accuracy, latency_ms = step["next", "accuracy"], step["next", "latency_ms"]
    wanted = accuracy - 2 * latency_ms / step["budget_ms"]
    torch.testing.assert_close(step["next", "reward"].view(-1), wanted.view(-1))
    assert RewardConfig(kind="linear").beta == 0.5  # only the word sets more than the kind


@pytest.mark.parametrize("kind", ["shaped", "utility"])
def test_the_word_of_a_kind_sets_what_its_entry_says(kind):
    reward = read_settings("train", [f"reward={kind}"]).reward
    assert reward == replace(RewardConfig(kind=kind), **KINDS[kind].settings)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"miss": 1.0}, r"reward\.miss=1\.0: reward\.kind=shaped"),
        ({"kind": "utility", "beta": 0.7}, "beta"),
        ({"kind": "priced", "miss": 0.5}, "miss"),
        ({"kind": "function", "function": "a:b", "alpha": 2.0}, "alpha"),
    ],
)
def test_a_weight_that_the_kind_does_not_read_is_refused(settings, fault):
    with input_error(fault):
        RewardConfig(**settings)
    # what says as much, and what another kind's word sets, may stay
    RewardConfig(**settings | {name: 0 for name in settings if name in WEIGHTS})
    RewardConfig(kind="shaped", miss=0.2)


def test_the_command_line_offers_what_deadlines_may_have():
    assert set(names_of_choices("reward")) == {"shaped", "utility", "function"}


@pytest.mark.parametrize("kind", [kind for kind, about in KINDS.items() if about.formula])
def test_a_formula_changes_no_argument_and_keeps_what_is_missing(kind):
    values = torch.tensor([[0.5, 3.0, 2.0], [0.5, 1.0, 2.0], [torch.nan, torch.nan, 2.0]]).T
    accuracy, latency_ms, budget_ms = values.clone()
    config = RewardConfig(kind=kind, miss=0.2)
    rewards = KINDS[kind].formula(accuracy, latency_ms, budget_ms, torch.zeros(3), config)
    torch.testing.assert_close(
        torch.stack([accuracy, latency_ms, budget_ms]), values, rtol=0, atol=0, equal_nan=True
    )
    assert rewards.isnan().tolist() == [False, False, True]
    assert rewards[0] < rewards[1]
