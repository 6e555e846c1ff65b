"""Actors whose policy is known, and what they draw."""

import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn

from knobwise.agents.controller.distributions import ConfigurationCategorical, KnobCategoricals

GRID = torch.cartesian_prod(torch.arange(3), torch.arange(2))


def actor_of(net, configurations, group_size, knobs=None):
    """A policy that reads `observation`; with `knobs` it draws each under a key of its own."""
    settings = {"configurations": configurations, "group_size": group_size}
    if knobs:
        settings["names"] = knobs
    draw = ProbabilisticTensorDictModule(
        in_keys=["log_probs"],
        out_keys=knobs or ["action"],
        distribution_class=KnobCategoricals if knobs else ConfigurationCategorical,
        distribution_kwargs=settings,
        return_log_prob=True,
        log_prob_key=None if knobs else "action_log_prob",
    )
    read = TensorDictModule(net, ["observation"], ["log_probs"])
    return ProbabilisticTensorDictSequential(read, draw)


def certain_actor(*probabilities):
    """A policy with these probabilities whatever it sees (the observation is 1), two draws."""
    net = nn.Linear(1, len(probabilities), bias=False)
    net.weight.data = torch.tensor(probabilities).log().unsqueeze(1)
    return actor_of(net, torch.arange(len(probabilities)).unsqueeze(1), 2)


def linear_actor(group_size, seed=0, knobs=None):
    """A policy over the six configurations of `GRID`."""
    torch.manual_seed(seed)
    return actor_of(nn.Linear(3, len(GRID)).double(), GRID, group_size, knobs)


def drawn(contexts, group_size, actor=None):
    """Contexts, draws of this actor (by default of `linear_actor` with another seed), the rewards
    of draws and of every configuration, and a reference policy; the first group is empty."""
    generator = torch.Generator().manual_seed(0)
    observation = torch.randn(contexts, 3, dtype=torch.float64, generator=generator)
    reward = torch.rand(contexts, len(GRID), dtype=torch.float64, generator=generator)
    data = TensorDict({"observation": observation, "reward_per_configuration": reward}, [contexts])
    with torch.no_grad():
        log_probs = (actor or linear_actor(group_size, seed=1)).get_dist(data.clone()).log_probs
    index = torch.multinomial(log_probs.exp(), group_size, replacement=True, generator=generator)
    reference = log_probs.roll(1, -1)
    return data.update(
        {
            "action": GRID[index],
            "action_log_prob": log_probs.gather(1, index),
            "behaviour_log_probs": log_probs,
            "reference_log_prob": reference.gather(1, index),
            "reference_log_probs": reference,
            "group_mask": torch.arange(group_size) < torch.arange(contexts).unsqueeze(1),
            "next": {"reward": reward.gather(1, index)},
        }
    )


def total(out):
    """The sum of the losses, which is minimised."""
    return sum(value for name, value in out.items() if name.startswith("loss_"))
