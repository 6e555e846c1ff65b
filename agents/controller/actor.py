"""A controller as a TensorDict policy: what goes in, by name, what is drawn, and what is written down.

In training contexts are row numbers of a table; stepping by hand and in deployment they are feature blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
)
from torch import Tensor, nn
from torch.distributions import Distribution, constraints

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.networks import Outcomes, UtilityNetwork
from knobwise.envs.tables.profile_table import ActionIndex, ProfileTable
from knobwise.losses.functional import entropy

OUTCOMES = "outcomes"
"""Where a tensordict may hold the `Outcomes` that were predicted for its rows, as a non-tensor."""


class ConfigurationCategorical(Distribution):
    """A categorical over the C configurations that exist, whose values are actions (a value index for each knob).

    Args:
        log_probs: [*, C], −inf where a configuration must not be chosen; `normalised` if they are known to sum to 1.
        configurations: int64 [C, K], the action of each configuration; `index` finds them by action.
        group_size: G draws belong to one context: `sample` gives [*, G, K] and `log_prob` of it [*, G]. None for no
            group axis: [*, K] and [*].
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    support = constraints.integer_interval(0, torch.iinfo(torch.int64).max)

    def __init__(
        self,
        log_probs: Tensor,
        configurations: Tensor,
        group_size: int | None = None,
        index: ActionIndex | None = None,
        normalised: bool = False,
    ) -> None:
        self.log_probs = log_probs if normalised else log_probs.log_softmax(-1)
        self.configurations, self.group_size = configurations, group_size
        self.index = index or ActionIndex(configurations)
        group = () if group_size is None else (group_size,)
        super().__init__(log_probs.shape[:-1], torch.Size([*group, configurations.shape[1]]), validate_args=False)

    def sample_index(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw configuration indices, int64 [*sample_shape, *batch, (G)]."""
        count = torch.Size(sample_shape).numel()
        flat = self.log_probs.reshape(-1, self.log_probs.shape[-1]).exp()
        group = self.event_shape[:-1]
        drawn = torch.multinomial(flat, count * group.numel(), replacement=True)
        drawn = drawn.reshape(*self.batch_shape, count, *group)
        return drawn.movedim(len(self.batch_shape), 0).reshape((*sample_shape, *self.batch_shape, *group))

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        with torch.no_grad():
            return self.configurations[self.sample_index(sample_shape)]

    rsample = sample
    """Draws of a discrete distribution carry no gradient; the name is there because collectors ask for it."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of actions; −inf for those that do not exist."""
        index = self.index(value)
        return self.log_prob_of_index(index.clamp_min(0)).masked_fill(index < 0, -torch.inf)

    def log_prob_of_index(self, index: Tensor) -> Tensor:
        """Log-probability of configuration indices, int64 [*sample_shape, *batch, (G)], in the same shape."""
        if self.group_size is None:
            return self.log_probs.expand(*index.shape, -1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
        samples = index.shape[: -1 - len(self.batch_shape)]
        return (self.log_probs.expand(*samples, *self.log_probs.shape) if samples else self.log_probs).gather(-1, index)

    def entropy(self) -> Tensor:
        """[*batch], in nats."""
        return entropy(self.log_probs)

    @property
    def mode(self) -> Tensor:
        """The most probable action: [*batch, K], or repeated along the group axis."""
        best = self.configurations[self.log_probs.argmax(-1)]
        return best if self.group_size is None else best.unsqueeze(-2).expand(*self.batch_shape, *self.event_shape)

    deterministic_sample = mode


class _FromBlocks(nn.Module):
    """Feature blocks and a limit as they come with a request."""

    def __init__(self, controller: Controller) -> None:
        super().__init__()
        self.controller = controller

    def forward(self, limit: Tensor, *blocks: Tensor) -> Tensor:
        named = dict(zip(self.controller.normaliser.sizes, blocks, strict=True))
        return self.controller(self.controller.features(named, *limit.shape), limit)


class _FromRows(nn.Module):
    """Row numbers of a table and a limit, as they travel in training: features were normalised once, for all rows.
    Contexts [*] belong to the members in turn: in a flat batch number i to member i mod M."""

    all_features: Tensor
    mask: Tensor

    def __init__(self, controller: Controller, table: ProfileTable) -> None:
        super().__init__()
        self.controller, self.members = controller, controller.config.members
        device = controller.configurations.device
        blocks = {name: block.to(device) for name, block in table.features.items()}
        self.register_buffer("all_features", controller.features(blocks, table.num_samples), persistent=False)
        self.register_buffer("mask", table.mask.to(device), persistent=False)
        self.complete = bool(table.mask.all())

    def by_member(self, contexts: Tensor) -> Tensor:
        """[*] → [M, n]."""
        return contexts.reshape(-1, self.members).T

    def encode(self, row: Tensor) -> Tensor:
        """int64 [*] → features [M, n, width]."""
        return nn.functional.embedding(self.by_member(row), self.all_features)

    def forward(self, row: Tensor, limit: Tensor, outcomes: Outcomes | None = None) -> Tensor:
        """Log-probs [*, C]; from the outcomes of these rows where they are predicted already."""
        mask = None if self.complete else self.mask[self.by_member(row)]
        limits, network = self.by_member(limit), self.controller.network
        if outcomes is not None and isinstance(network, UtilityNetwork):
            log_probs = network.log_probs(outcomes, limits, mask)
        else:
            log_probs = network(self.encode(row), limits, mask)
        return log_probs.transpose(0, 1).reshape(*row.shape, -1)


class OutcomesOfRows(TensorDictModuleBase):
    """What a `UtilityNetwork` predicts for row numbers of a table: reads `row`, writes what `RegressionLoss` reads, and
    `OUTCOMES`, from which an `Actor` goes on."""

    in_keys = ["row"]
    out_keys = ["accuracy_logits", "log_latency", "spread"]

    def __init__(self, actor: Actor) -> None:
        super().__init__()
        self.rows: _FromRows = actor.module[0].module

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        row, network = tensordict["row"], self.rows.controller.network
        assert isinstance(network, UtilityNetwork)
        outcomes = network.outcomes(self.rows.encode(row))
        tensordict.set_non_tensor(OUTCOMES, outcomes)
        for key in self.out_keys:
            tensordict[key] = getattr(outcomes, key).transpose(0, 1).reshape(*row.shape, -1)
        return tensordict


class Actor(ProbabilisticTensorDictSequential):
    """Encodes and draws. Asked for a distribution alone, as in training, it writes nothing down on the way; and where
    the tensordict holds `OUTCOMES`, the network does not predict them again."""

    def get_dist(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> ConfigurationCategorical:
        encode, draw = self.module
        inputs = [tensordict.get(key) for key in encode.in_keys]
        if OUTCOMES in tensordict:
            inputs.append(tensordict.get_non_tensor(OUTCOMES))
        return ConfigurationCategorical(encode.module(*inputs), **draw.distribution_kwargs)


class Behaviour(TensorDictModuleBase):
    """The policy that collects: draws, and writes down what `GRPOLoss` has to know of the moment of drawing.

    Writes `action` int64 [P, G, K], `configuration` int64 [P, G], and for `sampled` `action_log_prob` and
    `reference_log_prob` [P, G], for `exact` `behaviour_log_probs` and `reference_log_probs` [P, C].

    Attributes:
        with_reference: whether the reference is asked at all; off where neither a penalty nor a log needs it is faster.
    """

    def __init__(self, actor: Actor, reference: Actor, objective: str) -> None:
        super().__init__()
        self.in_keys, self.out_keys = actor.in_keys, ["action"]
        self.actor, self.reference, self.objective = actor, reference, objective
        self.with_reference = True

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        dist = self.actor.get_dist(tensordict)
        index = dist.sample_index()
        tensordict["action"], tensordict["configuration"] = dist.configurations[index], index
        exact = self.objective == "exact"
        policies = {"behaviour_log_probs" if exact else "action_log_prob": dist}
        if self.with_reference:
            policies["reference_log_probs" if exact else "reference_log_prob"] = self.reference.get_dist(tensordict)
        for key, policy in policies.items():
            tensordict[key] = policy.log_probs if exact else policy.log_prob_of_index(index)
        return tensordict


def make_actor(controller: Controller, table: ProfileTable | None = None, group_size: int | None = None) -> Actor:
    """The controller as a TensorDict policy that writes `log_probs`, `action` and `action_log_prob`.

    Args:
        table: when given, the policy reads `row` and the limit (`budget_ms` or `worth_ms`) and looks features up in
            this table; contexts belong to the members of an ensemble in turn, as in training. When None it reads the
            feature blocks by name and the limit, and all members decide together (stepping by hand, deployment).
        group_size: G, number of draws for each context; None for one without a group axis.
    """
    encoder = _FromBlocks(controller) if table is None else _FromRows(controller, table)
    limit = controller.limit_key
    keys = [limit, *controller.normaliser.sizes] if table is None else ["row", limit]
    encode = TensorDictModule(encoder, in_keys=keys, out_keys=["log_probs"])
    draw = ProbabilisticTensorDictModule(
        in_keys=["log_probs"],
        out_keys=["action"],
        distribution_class=ConfigurationCategorical,
        distribution_kwargs={
            "configurations": controller.configurations,
            "group_size": group_size,
            "index": controller.index,
            "normalised": True,
        },
        return_log_prob=True,
        log_prob_key="action_log_prob",
    )
    return Actor(encode, draw)
