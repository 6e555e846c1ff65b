"""A controller as a TensorDict policy: its keys, its draws, and the log-probs that it writes.

In training contexts are row numbers of a table; stepping by hand and in deployment they are feature
blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    composite_lp_aggregate,
)
from torch import Tensor, nn

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.distributions import ConfigurationCategorical, KnobCategoricals
from knobwise.agents.controller.encoders import FeatureEncoder, TableEncoder, TrainingEncoder
from knobwise.agents.controller.networks import ValueHead
from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.envs.bandit.actions import ACTIONS
from knobwise.envs.tables.profile_table import ProfileTable


class Actor(ProbabilisticTensorDictSequential):
    """Encodes and draws. `get_dist` gives the distribution alone and writes nothing down."""

    def get_dist(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> Any:
        # no key is written, unlike in `forward`
        encode, draw = self.module
        inputs = [tensordict.get(key, None) for key in encode.in_keys]
        return draw.distribution_class(encode.module(*inputs), **draw.distribution_kwargs)


@torch.no_grad()
def collect(
    actor: Actor,
    contexts: TensorDictBase,
    policies: Mapping[str, Controller],
    *,
    draws: bool = True,
    exact: bool = False,
) -> TensorDictBase:
    """Decide for contexts in training, and write down the log-probs that `GRPOLoss` needs.

    Writes `action` and `configuration`, both int64 [P, G], the indices of configurations.

    Args:
        actor: the policy that draws, which reads rows of a table.
        contexts: [P], what the actor reads.
        policies: controllers by the key of their log-probs: those of the draws [P, G], or of all
            configurations [P, C] if `exact`. The first is the actor's own. Whatever is not needed
            is better left out, which is faster.
        draws: False where no loss and no log needs draws; the action is then the first
            configuration that was profiled.
    """
    encode, draw = actor.module
    row, limit = (contexts[key] for key in encode.in_keys)
    distributions = {}
    if policies:
        log_probs = encode.module.of_controllers(policies.values(), row, limit)
        for key, values in zip(policies, log_probs, strict=True):
            distributions[key] = draw.distribution_class(values, **draw.distribution_kwargs)
    # the draws
    if draws:
        index = next(iter(distributions.values())).sample_index()
    else:
        mask = encode.module.mask_of(row)
        first = torch.zeros_like(row) if mask is None else mask.int().argmax(-1)
        index = first.unsqueeze(-1).expand(-1, draw.distribution_kwargs["group_size"])
    # what the environment and the losses read of them
    contexts["action"] = contexts["configuration"] = index
    for key, distribution in distributions.items():
        if exact:
            contexts[key] = distribution.log_probs
        else:
            contexts[key] = distribution.log_prob_of_index(index)
    return contexts


def make_critic(
    controller: Controller,
    table: ProfileTable,
    mask: Tensor | None = None,
) -> TensorDictModule:
    """Return a value network that reads `row` and the limit, as the actor does, with the same
    mask, and writes `state_value` [*, 1].

    It has layers of its own, which begin as a copy of the controller's.
    """
    # a controller whose heads are one number
    critic = copy.deepcopy(controller)
    config = controller.config
    critic.network.head = ValueHead(config.networks_trained, config.hidden)
    critic.network.utility = None
    rows = TrainingEncoder(critic, table, mask)
    keys = ["row", controller.limit_key]
    return TensorDictModule(rows, in_keys=keys, out_keys=["state_value"])


def make_actor(
    agent: Any,
    table: ProfileTable | None = None,
    group_size: int | None = None,
    *,
    action: str = "knobs",
    separate: bool = False,
    all_networks: bool = False,
    offsets: Tensor | None = None,
    mask: Tensor | None = None,
) -> Actor:
    """Return a controller as a TensorDict policy that writes `log_probs`, `action` and
    `action_log_prob`.

    It draws under `ExplorationType.RANDOM`, and otherwise takes the most probable action. If the
    agent comes from `knobwise.load`, `load_checkpoint(path).controller` or `knobwise.fit`, this is
    the network inside: the guard falls back where it is served, not here.

    docs/environments.md says what a policy of one's own must offer to take its place.

    Args:
        table: when given, the policy reads `row` and the limit (`budget_ms` or `worth_ms`),
            looks features up in this table, and keeps to what was profiled there. When None it
            reads the limit, the feature blocks by name and, where there is one, a `mask`.
        group_size: G, number of draws for each context; None for one without a group axis.
        action: the form of an action, `knobs` or `configuration`, see `envs.bandit.actions`.
        separate: each knob under its own key, see `KnobCategoricals`: the form of
            `action_keys="knobs"` in an environment. Log-probs are `max_crops_log_prob`, …; if
            `composite_lp_aggregate` is on here and where it draws, there is their sum too,
            `action_log_prob`.
        all_networks: for training, where each context is for one of several networks, see
            `TrainingEncoder`; `offsets` are its.
        mask: bool [N, C], what may be chosen in a table; None for what was profiled there.

    Raises:
        InputError: an agent that is not a controller, `separate` where an action is a
            configuration, `offsets` for a single network.
    """
    one_of("action", action, ACTIONS)
    if separate and action != "knobs":
        raise InputError(f"separate=True: gives each knob its own key; leave out action={action}")
    if not all_networks and offsets is not None:
        raise InputError("offsets: are for all_networks=True")
    controller = _controller_in(agent)
    limit = controller.limit_key
    # requests as they come, or rows of a table
    if table is None:
        encoder: nn.Module = FeatureEncoder(controller)
        keys = [limit, *controller.normaliser.sizes, "mask"]
    else:
        encoder = TableEncoder(controller, table, mask)
        if all_networks:
            encoder = TrainingEncoder(controller, table, mask, offsets)
        keys = ["row", limit]
    # requests → log-probs → actions
    encode = TensorDictModule(encoder, in_keys=keys, out_keys=["log_probs"])
    return Actor(encode, _draw(controller, group_size, action, separate))


def _draw(
    controller: Controller, group_size: int | None, action: str, separate: bool
) -> ProbabilisticTensorDictModule:
    """Return the module that draws actions from log-probs; arguments as in `make_actor`."""
    settings: dict[str, Any] = {"group_size": group_size, "normalised": True}
    configurations = controller.configurations
    if action == "knobs":
        settings |= {"configurations": configurations, "index": controller.index}
    else:
        settings["configurations"] = torch.arange(len(configurations)).to(configurations)
    # all knobs in one tensor, or each under its own key
    keys = ["action"]
    distribution: Any = ConfigurationCategorical
    log_prob_key: str | None = "action_log_prob"
    if separate:
        keys = [knob.name for knob in controller.knobs]
        settings["names"] = keys
        distribution = KnobCategoricals
        if not composite_lp_aggregate():
            log_prob_key = None
    return ProbabilisticTensorDictModule(
        in_keys=["log_probs"],
        out_keys=keys,
        distribution_class=distribution,
        distribution_kwargs=settings,
        return_log_prob=True,
        log_prob_key=log_prob_key,
    )


def _controller_in(agent: Any) -> Controller:
    """Return the controller inside an agent. Raises InputError: there is none."""
    for inner in ("agent", "controller"):
        agent = getattr(agent, inner, agent)
    if not isinstance(agent, Controller):
        kind = type(agent).__name__
        raise InputError(
            f"make_actor: {kind} is not a controller; give what knobwise.load or load_checkpoint "
            "returns"
        )
    return agent
