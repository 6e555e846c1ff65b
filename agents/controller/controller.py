"""The controller: features and a limit in, log-probs of the configurations that exist out.

In the order of the data: `FeatureNormaliser` → network (`knobwise.agents.controller.networks`) → log-probs of all C
configurations → `ConfigurationCategorical`, which draws actions (`knobwise.agents.controller.actor`). Whatever the
structure, everything after it works on log-probs over configurations; that is the one interface between structures
and the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from knobwise.agents.controller.networks import WIDEST, KnobNetwork, UtilityNetwork
from knobwise.agents.controller.parts import AT_ONCE, in_parts
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.envs.configurations.budgets import BudgetEncoding, thinned, worths_range
from knobwise.envs.tables.profile_table import ActionIndex, Knob, ProfileTable


class Controller(nn.Module):
    """A light network, or an ensemble of M of them that were fitted on different samples.

    Args:
        knobs: names and values.
        configurations: int64 [C, K].
        normaliser: of the features.
        encoding: of the limit.
        config: the network; `config.members` is M.
        priced: what limits a request is a price and not a deadline: `worth_ms`, the milliseconds that a right answer
            is worth, 1/λ, in the place of `budget_ms`.
        cost: the name of the further cost, if requests come with a pair of worths, `worths`, in ms and in its unit.
        bins: whether a `utility` network also reads the features in bins.
    """

    configurations: Tensor
    network: KnobNetwork | UtilityNetwork

    def __init__(
        self,
        knobs: Sequence[Knob],
        configurations: Tensor,
        normaliser: FeatureNormaliser,
        encoding: BudgetEncoding,
        config: PolicyConfig,
        priced: bool = False,
        bins: bool = False,
        cost: str = "",
    ) -> None:
        super().__init__()
        self.knobs, self.config, self.priced, self.cost = tuple(knobs), config, priced, cost
        self.register_buffer("configurations", configurations)
        self.index = ActionIndex(configurations)
        self.normaliser = normaliser
        if config.structure == "utility":
            self.network = UtilityNetwork(normaliser.width, configurations, encoding, config, priced, bins, bool(cost))
        else:
            self.network = KnobNetwork(normaliser.width, configurations, encoding, config)

    @classmethod
    def for_table(
        cls,
        table: ProfileTable,
        rows: Tensor,
        config: PolicyConfig,
        priced: bool = False,
        member_rows: Tensor | None = None,
        weighs: bool = False,
    ) -> Controller:
        """A fresh controller; statistics of features and latencies are taken from these rows (int64 [n]) alone, of
        which each member is fitted on `member_rows`, bool [M, n], None for all. `weighs`: a further cost."""
        if member_rows is not None:
            member_rows = thinned(member_rows.T).T
        rows = thinned(rows)
        latencies_ms = table.latency_ms[rows][table.mask[rows]]
        limits = worths_range(latencies_ms) if priced else latencies_ms
        encoding = BudgetEncoding(limits, config.budget_width)
        normaliser = FeatureNormaliser.fit(table, rows, config.project, config.dataset_input)
        x = normaliser({name: block[rows] for name, block in table.features.items()}, len(rows))
        bins = 0 < normaliser.width <= WIDEST
        cost, name = (table.weighed_cost[rows], table.cost_name) if weighs else (None, "")
        controller = cls(table.knobs, table.configurations, normaliser, encoding, config, priced, bins, name)
        if isinstance(controller.network, UtilityNetwork):
            controller.network.start_from(x, table.accuracy[rows], table.latency_ms[rows], member_rows, cost)
        else:
            controller.network.start_from(table.accuracy[rows], table.latency_ms[rows])
        return controller

    @property
    def limit_key(self) -> str:
        """What limits a request."""
        return "worths" if self.cost else "worth_ms" if self.priced else "budget_ms"

    def requests(self, limit: Tensor) -> torch.Size:
        """How many requests limits [*], or pairs of worths [*, 2], are for: *."""
        return limit.shape[:-1] if self.cost else limit.shape

    def forward(self, features: Tensor, limit: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalised features float [*, width], limits float [*] (pairs [*, 2]), mask bool [*, C] → log-probs [*, C].

        Of several members the mean of the log-probs counts.
        """
        members, shape = self.config.members, self.requests(limit)
        n, pair = math.prod(shape), limit.shape[len(shape) :]
        allowed = None if mask is None else mask.reshape(n, -1).expand(members, -1, -1)
        x = features.reshape(n, features.shape[-1]).expand(members, -1, -1)
        log_probs = self.network(x, limit.reshape(n, *pair).expand(members, n, *pair), allowed)
        joined = log_probs.mean(0).log_softmax(-1) if members > 1 else log_probs[0]
        return joined.reshape(*shape, -1)

    @torch.no_grad()
    def choose(self, features: Mapping[str, Tensor], limits: Tensor, mask: Tensor | None = None) -> Tensor:
        """Greedy decisions: feature blocks [n, d], limits [n] in ms, mask bool [n, C] → configurations int64 [n]."""
        if len(limits) > AT_ONCE:
            return in_parts(self.choose, features, limits, mask)
        training, device = self.training, self.configurations.device
        self.eval()
        normal = self.features({name: block.to(device) for name, block in features.items()}, len(limits))
        log_probs = self(normal, limits.to(device, torch.float32), None if mask is None else mask.to(device))
        self.train(training)
        return log_probs.argmax(-1)

    def features(self, blocks: Mapping[str, Tensor], *shape: int) -> Tensor:
        """Normalised features [*shape, width]; width 0 for a profile that has none."""
        return self.normaliser(blocks, *shape)

    def plain(self) -> dict[str, Any]:
        """Tensors and plain values, for a checkpoint."""
        return {
            "policy": asdict(self.config),
            "knobs": [[knob.name, list(knob.values)] for knob in self.knobs],
            "features": self.normaliser.sizes,
            "priced": self.priced,
            **({"cost": self.cost} if self.cost else {}),
            "datasets": self.normaliser.datasets,
            "state": self.state_dict(),
        }

    @classmethod
    def restored(cls, plain: dict[str, Any]) -> Controller:
        """The inverse of `plain`, in eval mode. Raises InputError: a setting that exists no more."""
        state, config = plain["state"], PolicyConfig.restored(plain["policy"])
        controller = cls(
            [Knob(name, tuple(values)) for name, values in plain["knobs"]],
            state["configurations"],
            FeatureNormaliser.restored(plain),
            BudgetEncoding(torch.ones(1), config.budget_width),
            config,
            plain["priced"],
            "network.edges" in state and state["network.edges"].shape[1] > 0,
            plain.get("cost", ""),
        )
        controller.load_state_dict(state)
        return controller.eval()
