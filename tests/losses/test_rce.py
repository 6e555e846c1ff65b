import math

import pytest
import torch
from actors import certain_actor, real_actor
from tensordict import TensorDict

from knobwise.agents.controller.heads import HEADS
from knobwise.losses import RCELoss


def played(head: str) -> tuple[RCELoss, TensorDict]:
    actor, env = real_actor(head, holes=0.6)
    return RCELoss(actor, temperature=0.3, functional=False), env.reset()


def contexts(*rewards: float) -> TensorDict:
    """One context with these rewards."""
    return TensorDict({"observation": torch.ones(1, 1), "reward_per_configuration": torch.tensor([rewards])}, [1])


def test_rce_by_hand_and_its_temperature_may_be_set_between_steps() -> None:
    loss = RCELoss(certain_actor([0.2, 0.8]), temperature=0.5)
    data = contexts(0.0, math.log(3) / 2)
    found = loss(data).detach()
    assert found["loss_rce"].item() == pytest.approx(-(0.25 * math.log(0.2) + 0.75 * math.log(0.8)))  # target ¼ : ¾
    assert found["entropy"].item() == pytest.approx(-(0.2 * math.log(0.2) + 0.8 * math.log(0.8)))
    loss.temperature = 0.25
    found = loss(data).detach()
    assert found["loss_rce"].item() == pytest.approx(-(0.1 * math.log(0.2) + 0.9 * math.log(0.8)))  # ⅒ : ⁹⁄₁₀


def test_nan_means_that_a_configuration_takes_no_part() -> None:
    loss = RCELoss(certain_actor([0.2, 0.5, 0.3]), temperature=1.0)
    assert loss(contexts(0.0, math.nan, 0.0))["loss_rce"].item() == pytest.approx(-(math.log(0.2) + math.log(0.3)) / 2)


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
