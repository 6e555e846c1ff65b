"""Actors whose policy is known, and an actor with the real policy and environment."""

import torch
from helpers import small_table
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn

from knobwise.agents.controller.actor import ConfigurationCategorical, make_actor
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.envs.configurations.torchrl_env import ConfigBandit


def actor_of(net, configurations, group_size):
    draw = ProbabilisticTensorDictModule(
        in_keys=["log_probs"],
        out_keys=["action"],
        distribution_class=ConfigurationCategorical,
        distribution_kwargs={"configurations": configurations, "group_size": group_size},
        return_log_prob=True,
        log_prob_key="action_log_prob",
    )
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["observation"], ["log_probs"]), draw
    )


def certain_actor(probabilities, group_size=2):
    """A policy with these probabilities whatever it sees (the observation is 1)."""
    net = nn.Linear(1, len(probabilities), bias=False)
    net.weight.data = torch.tensor(probabilities).log().unsqueeze(1)
    return actor_of(net, torch.arange(len(probabilities)).unsqueeze(1), group_size)


def real_actor(holes, group_size=None):
    table = small_table(holes=holes)
    torch.manual_seed(0)
    controller = Controller.for_table(table, torch.arange(60), PolicyConfig(hidden=16, dropout=0.0))
    settings = {
        "batch_size": 32,
        "lean": True,
        "full_information": True,
        "reward": "shaped",
        "seed": 0,
    }
    env = ConfigBandit(table, group_size=group_size or 1, **settings)
    return make_actor(controller, table, group_size), env
