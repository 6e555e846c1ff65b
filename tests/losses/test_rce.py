from __future__ import annotations

import math

import pytest
import torch
from helpers import small_table
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn

from knobwise.agents.controller.actor import ConfigurationCategorical, make_actor
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.heads import HEADS
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.envs.configurations.torchrl_env import ConfigBandit
from knobwise.losses import RCELoss


def certain_actor(probabilities: list[float]) -> ProbabilisticTensorDictSequential:
    """A policy with these probabilities whatever it sees (the observation is 1)."""
    net = nn.Linear(1, len(probabilities), bias=False)
    net.weight.data = torch.tensor(probabilities).log().unsqueeze(1)
    draw = ProbabilisticTensorDictModule(
        in_keys=["log_probs"],
        out_keys=["action"],
        distribution_class=ConfigurationCategorical,
        distribution_kwargs={"configurations": torch.arange(len(probabilities)).unsqueeze(1)},
    )
    return ProbabilisticTensorDictSequential(TensorDictModule(net, ["observation"], ["log_probs"]), draw)


def played(head: str) -> tuple[RCELoss, TensorDict]:
    table = small_table(holes=0.6)
    torch.manual_seed(0)
    controller = Controller.for_table(table, torch.arange(60), PolicyConfig(structure=head, hidden=16, dropout=0.0))
    env = ConfigBandit(table, batch_size=32, lean=True, full_information=True)
    return RCELoss(make_actor(controller, table), temperature=0.3, functional=False), env.reset()


def test_rce_by_hand_and_its_temperature_may_be_set_between_steps() -> None:
    loss = RCELoss(certain_actor([0.2, 0.8]), temperature=0.5)
    rewards = torch.tensor([[0.0, math.log(3) / 2]])
    data = TensorDict({"observation": torch.ones(1, 1), "reward_per_configuration": rewards}, [1])
    found = loss(data).detach()
    assert found["loss_rce"].item() == pytest.approx(-(0.25 * math.log(0.2) + 0.75 * math.log(0.8)))  # target ¼ : ¾
    assert found["entropy"].item() == pytest.approx(-(0.2 * math.log(0.2) + 0.8 * math.log(0.8)))
    loss.temperature = 0.25
    found = loss(data).detach()
    assert found["loss_rce"].item() == pytest.approx(-(0.1 * math.log(0.2) + 0.9 * math.log(0.8)))  # ⅒ : ⁹⁄₁₀


def test_nan_means_that_a_configuration_takes_no_part() -> None:
    loss = RCELoss(certain_actor([0.2, 0.5, 0.3]), temperature=1.0)
    rewards = torch.tensor([[0.0, torch.nan, 0.0]])
    data = TensorDict({"observation": torch.ones(1, 1), "reward_per_configuration": rewards}, [1])
    assert loss(data)["loss_rce"].item() == pytest.approx(-(math.log(0.2) + math.log(0.3)) / 2)


@pytest.mark.parametrize("head", sorted(HEADS))
def test_what_was_not_profiled_gives_no_nan(head: str) -> None:
    loss, data = played(head)
    assert data["reward_per_configuration"].isnan().any()
    out = loss(data)
    assert out["loss_rce"].isfinite()
    assert out["entropy"].isfinite()
    out["loss_rce"].backward()
    gradients = [p.grad for p in loss.parameters()]
    assert all(g is not None and g.isfinite().all() for g in gradients)
    assert sum(g.abs().sum() for g in gradients if g is not None) > 0


@pytest.mark.parametrize("head", sorted(HEADS))
def test_it_learns_to_prefer_what_is_rewarded(head: str) -> None:
    loss, data = played(head)
    optimiser = torch.optim.Adam(loss.parameters(), lr=0.01)
    rewards = data["reward_per_configuration"]

    def expected_reward() -> float:
        probabilities = loss.actor_network.get_dist(data.clone()).log_probs.detach().exp()
        return (probabilities * rewards.nan_to_num()).sum(-1).mean().item()

    before = expected_reward()
    for _ in range(60):
        optimiser.zero_grad()
        loss(data.clone())["loss_rce"].backward()
        optimiser.step()
    assert expected_reward() > before + 0.5
