"""A controller as a TensorDict policy: what goes in, by name, what is drawn, and what is written down.

In training contexts are row numbers of a table; stepping by hand and in deployment they are feature blocks.
"""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
)
from torch import Tensor, nn

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.distribution import ConfigurationCategorical
from knobwise.agents.controller.networks import Outcomes, UtilityNetwork
from knobwise.envs.tables.profile_table import ProfileTable


class _FromBlocks(nn.Module):
    """Feature blocks and a limit as they come with a request."""

    def __init__(self, controller: Controller) -> None:
        super().__init__()
        self.controller = controller

    def forward(self, limit: Tensor, *blocks: Tensor) -> Tensor:
        named = dict(zip(self.controller.normaliser.sizes, blocks, strict=True))
        log_probs: Tensor = self.controller(self.controller.features(named, *limit.shape), limit)
        return log_probs


class _FromRows(nn.Module):
    """Row numbers of a table and a limit, as they travel in training: features were normalised once, for all rows.

    Contexts [*] belong to the members in turn: in a flat batch number i to member i mod M. While `keep` is set, what a
    `UtilityNetwork` predicted stays in `kept`, for the regression beside GRPO to take up.
    """

    all_features: Tensor
    mask: Tensor

    def __init__(self, controller: Controller, table: ProfileTable) -> None:
        super().__init__()
        self.controller = controller
        device = controller.configurations.device
        blocks = {name: block.to(device) for name, block in table.features.items()}
        features = controller.features(blocks, table.num_samples)
        self.register_buffer("all_features", features, persistent=False)
        self.register_buffer("mask", table.mask.to(device), persistent=False)
        self.complete = bool(table.mask.all())
        self.keep = False
        self.kept: Outcomes | None = None

    def encode(self, row: Tensor) -> Tensor:
        """int64 [*] → features [M, n, width]."""
        columns = row.reshape(-1, self.controller.config.members).T
        return nn.functional.embedding(columns, self.all_features)

    def forward(self, row: Tensor, limit: Tensor) -> Tensor:
        columns = row.reshape(-1, self.controller.config.members).T
        mask = None if self.complete else self.mask[columns]
        x, limits, network = self.encode(row), limit.reshape(columns.T.shape).T, self.controller.network
        log_probs: Tensor
        if self.keep and isinstance(network, UtilityNetwork):
            self.kept = network.outcomes(x)
            log_probs = network.log_probs(self.kept, limits, mask)
        else:
            log_probs = network(x, limits, mask)
        return log_probs.transpose(0, 1).reshape(*row.shape, -1)


class OutcomesOfRows(TensorDictModuleBase):
    """What a `UtilityNetwork` predicts for row numbers of a table; reads `row`, writes what `RegressionLoss` reads.

    With `after_loss` it takes what the actor has just predicted for the same rows, and predicts nothing again.
    """

    in_keys = ["row"]
    out_keys = ["accuracy_logits", "log_latency", "spread"]

    def __init__(self, actor: Actor) -> None:
        super().__init__()
        self.rows: _FromRows = actor.module[0].module

    @property
    def after_loss(self) -> bool:
        return self.rows.keep

    @after_loss.setter
    def after_loss(self, value: bool) -> None:
        self.rows.keep = value

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        row, network = tensordict["row"], self.rows.controller.network
        assert isinstance(network, UtilityNetwork)
        outcomes, self.rows.kept = self.rows.kept, None
        if outcomes is None:
            outcomes = network.outcomes(self.rows.encode(row))
        for key in self.out_keys:
            tensordict[key] = getattr(outcomes, key).transpose(0, 1).reshape(*row.shape, -1)
        return tensordict


class Actor(ProbabilisticTensorDictSequential):
    """Encodes and draws. Of a distribution alone, as training asks for, nothing is written down on the way."""

    def get_dist(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> ConfigurationCategorical:
        encode, draw = self.module
        log_probs = encode.module(*(tensordict.get(key) for key in encode.in_keys))
        return ConfigurationCategorical(log_probs, **draw.distribution_kwargs)


def make_actor(controller: Controller, table: ProfileTable | None = None, group_size: int | None = None) -> Actor:
    """The controller as a TensorDict policy that writes `log_probs`, `action` and `action_log_prob`.

    Args:
        controller: the network.
        table: when given, the policy reads `row` and the limit (`budget_ms` or `worth_ms`) and looks features up in
            this table; contexts belong to the members of an ensemble in turn, as in training. When None it reads the
            feature blocks by name and the limit, and all members decide together (stepping by hand, deployment).
        group_size: G, number of draws for each context; None for one without a group axis.
    """
    if table is None:
        keys = [controller.limit_key, *controller.normaliser.sizes]
        encode = TensorDictModule(_FromBlocks(controller), in_keys=keys, out_keys=["log_probs"])
    else:
        keys = ["row", controller.limit_key]
        encode = TensorDictModule(_FromRows(controller, table), in_keys=keys, out_keys=["log_probs"])
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
