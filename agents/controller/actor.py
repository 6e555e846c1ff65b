"""A controller as a TensorDict policy: its keys, its draws, and the log-probs that it writes.

In training contexts are row numbers of a table; stepping by hand and in deployment they are feature
blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
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
from knobwise.agents.controller.networks import ValueHead, drift_inputs
from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.envs.bandit.actions import ACTIONS
from knobwise.envs.tables.profile_table import ProfileTable


class _FeatureEncoder(nn.Module):
    """Reads requests as they come.

    They have limits [*] or [*, 1], feature blocks [*, d], and where it is known what was profiled
    a mask [*, C], bool or int8.
    """

    def __init__(self, controller: Controller) -> None:
        super().__init__()
        self.controller = controller

    def forward(self, limit: Any, *others: Any) -> Tensor:
        """Normalise the feature blocks, and compute log-probs of all configurations, [*, C]. Raises
        InputError: the limit is missing."""
        controller = self.controller
        *features, mask = others
        if limit is None:
            key = controller.limit_key
            raise InputError(f"the tensordict lacks {key!r}, each request's limit in ms")
        named = zip(controller.normaliser.sizes, features, strict=True)
        blocks = {name: x for name, x in named if x is not None}
        # a limit [*, 1] has as many axes as features [*, d]
        alike = any(x is not None and x.ndim == limit.ndim for x in others)
        if alike:
            limit = limit.squeeze(-1)
        limit = limit.float()
        # features and limit → log-probs
        x = controller.normaliser(blocks, *limit.shape)
        return controller(x, limit, None if mask is None else mask.bool())


class _TableEncoder(nn.Module):
    """Reads row numbers of a table and a limit; features are normalised once, for all rows.

    Rows beyond the table are copies of its samples: row i + k·N is one of sample i. In training
    `offsets` [rows, C] say how the machines of copies drift, and `noise` [*, width] is added to
    their features, the same for a row at every visit.

    With `all_networks` contexts [*] belong to the networks in turn, in a flat batch number i to
    network i mod M, as in training; without, all are for the network that is deployed.
    """

    all_features: Tensor
    mask: Tensor
    by_value: Tensor | None
    noise: Tensor | None

    def __init__(
        self,
        controller: Controller,
        table: ProfileTable,
        all_networks: bool,
        offsets: Tensor | None = None,
        noise: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.controller = controller
        self.networks = controller.config.networks_trained if all_networks else 0
        device = controller.configurations.device
        by_value = None
        if offsets is not None:
            by_value = drift_inputs(offsets.to(device), controller.network.values)
        self.register_buffer("by_value", by_value, persistent=False)
        # features of all samples, normalised once
        blocks = {name: block.to(device) for name, block in table.features.items()}
        features = controller.normaliser(blocks, table.num_samples)
        self.register_buffer("all_features", features, persistent=False)
        self.register_buffer("noise", noise, persistent=False)
        mask = table.mask if mask is None else mask
        self.register_buffer("mask", mask.to(device), persistent=False)
        self.complete = bool(mask.all())

    def forward(self, row: Tensor, limit: Tensor) -> Tensor:
        """Look features up by `row` [*], and compute log-probs of all configurations under limits
        [*]: [*, C]. Raises InputError: a key is missing."""
        keys = {"row": row, self.controller.limit_key: limit}
        missing = [key for key, values in keys.items() if values is None]
        if missing:
            raise InputError(f"the tensordict lacks {missing[0]!r}, which the policy reads")
        return self.of_controllers([self.controller], row, limit)[0]

    def features_of(self, row: Tensor) -> Tensor:
        """Return the normalised features of rows, [*, width], with noise where they are copies."""
        count = len(self.all_features)
        x = nn.functional.embedding(row % count, self.all_features)
        if self.noise is None:
            return x
        of_copy = nn.functional.embedding(row % len(self.noise), self.noise)
        return x + of_copy * (row >= count).unsqueeze(-1)

    def of_controllers(
        self, controllers: Collection[Controller], row: Tensor, limit: Tensor
    ) -> list[Tensor]:
        """Return log-probs [*, C] of controllers with the inputs of this one, looked up once."""
        shape = row.shape
        limit = limit.float()
        if self.networks:
            # every M-th context for the same network; rows are smaller than what they stand for
            row, limit = (x.reshape(-1, self.networks).T.contiguous() for x in (row, limit))
        # [*] → [*, width]
        x = self.features_of(row)
        mask = None if self.complete else self.mask[row % len(self.mask)]
        # the network that is deployed
        if not self.networks:
            return [controller(x, limit, mask) for controller in controllers]
        # the networks in training
        by_value = None
        if self.by_value is not None:
            by_value = nn.functional.embedding(row, self.by_value)
        results = []
        for controller in controllers:
            log_probs = controller.network(x, limit, mask, by_value)
            # [M, n, C] → [*, C]
            results.append(log_probs.transpose(0, 1).reshape(*shape, -1))
        return results


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
        mask = encode.module.mask
        index = mask[row % len(mask)].int().argmax(-1, keepdim=True)
        index = index.expand(-1, draw.distribution_kwargs["group_size"])
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
    noise: Tensor | None = None,
    mask: Tensor | None = None,
) -> TensorDictModule:
    """Return a value network that reads `row` and the limit, as the actor does, with the same
    noise and mask, and writes `state_value` [*, 1].

    It has layers of its own, which begin as a copy of the controller's.
    """
    # a controller whose heads are one number
    critic = copy.deepcopy(controller)
    config = controller.config
    critic.network.head = ValueHead(config.networks_trained, config.hidden)
    critic.network.utility = None
    rows = _TableEncoder(critic, table, all_networks=True, noise=noise, mask=mask)
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
    noise: Tensor | None = None,
    mask: Tensor | None = None,
) -> Actor:
    """Return a controller as a TensorDict policy that writes `log_probs`, `action` and
    `action_log_prob`.

    It draws under `ExplorationType.RANDOM`, and otherwise takes the most probable action. If the
    agent comes from `knobwise.load`, `load_checkpoint(path).controller` or `knobwise.fit`, this is
    the network inside: the guard falls back where it is served, not here.

    A policy of one's own takes its place in the losses if it is a `TensorDictModule` with
    `get_dist(tensordict)`. For contexts [P] the distribution gives `log_prob(action)` [P, G] for
    actions int64 [P, G, K], or of a `CompositeDistribution` [P, G] for each key; `entropy()` [P];
    and for `loss=exact` and RCE `log_probs` [P, C], −inf where a configuration must not be chosen.
    In a collector it reads `row` int64 [P] and `budget_ms` float [P], or unless
    `observe_features=False` the feature blocks [P, d] and `mask` bool [P, C]; it writes `action`,
    or the knobs' own keys int64 [P, G] each, and `action_log_prob` [P, G].

    Args:
        table: when given, the policy reads `row` and the limit (`budget_ms` or `worth_ms`),
            looks features up in this table, and keeps to what was profiled there. When None it
            reads the limit, the feature blocks by name and, where there is one, a `mask`.
        group_size: G, number of draws for each context; None for one without a group axis.
        action: `knobs`, int64 [*, (G), K], or `configuration`, int64 [*, (G)], as in the
            environment.
        separate: each knob under its own key (`max_crops`, …), int64 [*, (G)], in place of
            `action`, as in the environment under `action_keys="knobs"`; see `KnobCategoricals`.
            Log-probs are `max_crops_log_prob`, …; if `composite_lp_aggregate` is on here and where
            it draws, there is their sum too, `action_log_prob`.
        all_networks: contexts belong to the networks in turn, as in training.
        offsets, noise: of copies of the samples, in training.
        mask: bool [N, C], what may be chosen in a table; None for what was profiled there.

    Raises:
        InputError: an agent that is not a controller, `separate` where an action is a
            configuration.
    """
    one_of("action", action, ACTIONS)
    if separate and action != "knobs":
        raise InputError(f"separate=True: gives each knob its own key; leave out action={action}")
    controller = _controller_in(agent)
    limit = controller.limit_key
    # requests as they come, or rows of a table
    if table is None:
        encoder: nn.Module = _FeatureEncoder(controller)
        keys = [limit, *controller.normaliser.sizes, "mask"]
    else:
        encoder = _TableEncoder(controller, table, all_networks, offsets, noise, mask)
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
