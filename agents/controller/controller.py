"""The controller: features and a limit in, log-probs of the configurations that exist out.

In the order of the data: `FeatureNormaliser` → `KnobNetwork` → log-probs of all C configurations →
`ConfigurationCategorical`, which draws actions (`knobwise.agents.controller.actor`).
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from knobwise.agents.controller.distributions import actions_by_name
from knobwise.agents.controller.drift import drift_inputs
from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.controller.networks import KnobNetwork
from knobwise.agents.controller.settings import OUTSIDE_THE_NETWORK, PolicyConfig, regularised
from knobwise.agents.controller.side_by_side import for_each
from knobwise.common.errors import InputError
from knobwise.envs.bandit.budgets import BudgetEncoding, subsample
from knobwise.envs.bandit.rule_choice import as_rule, rule_named
from knobwise.envs.bandit.rules import DEADLINES, Rule
from knobwise.envs.tables.cells import Cells
from knobwise.envs.tables.profile_table import ActionIndex, Knob, ProfileTable
from knobwise.envs.tables.units import MS


class Controller(nn.Module):
    """A light network with a head for each knob, or several of them fitted on different samples.

    It drops out inside `knobwise.losses.dropping_out` alone; `train()` and `eval()` change nothing.

    Args:
        knobs: names and values.
        configurations: int64 [C, K].
        normaliser: of the features.
        encoding: of the limit.
        config: the network; `config.networks_trained` is M, how many there are.
        rule: of the budget, or the name of one of knobwise. Under `deadline` a request has
            `budget_ms`; under `mean` it has `worth_ms`, the milliseconds that a right answer is
            worth, 1/λ.
        unit: of the limits: ms, or that of a cost that is no time.
    """

    configurations: Tensor

    def __init__(
        self,
        knobs: Sequence[Knob],
        configurations: Tensor,
        normaliser: FeatureNormaliser,
        encoding: BudgetEncoding,
        config: PolicyConfig,
        *,
        rule: Rule | str = DEADLINES,
        unit: str = MS,
    ) -> None:
        super().__init__()
        self.knobs = tuple(knobs)
        self.rule = as_rule(rule)
        self.unit = unit
        self.register_buffer("configurations", configurations)
        self.index = ActionIndex(configurations)
        self.normaliser = normaliser
        if not self.rule.late:
            config = replace(config, utility_head=False)
        self.config = config = regularised(config, normaliser.width)
        self.network = KnobNetwork(normaliser.width, configurations, encoding, config)
        self.eval()

    @classmethod
    def for_table(
        cls,
        table: ProfileTable,
        rows: Tensor,
        config: PolicyConfig,
        rule: Rule | str = DEADLINES,
        cells: Cells | None = None,
    ) -> Controller:
        """Return a fresh controller for a table.

        Statistics of features and limits are taken from these rows (int64 [n]) alone; those of
        limits from `cells`, if what counts is not what the table has.
        """
        # statistics of many rows are as good as those of all
        rows = subsample(rows)
        counted: Cells = table if cells is None else cells
        latencies_ms = counted.latency_ms[rows][counted.mask[rows]]
        limits = as_rule(rule).limits_seen(latencies_ms)
        encoding = BudgetEncoding(limits, config.budget_width)
        normaliser = FeatureNormaliser.fit(table, rows, config.project, config.dataset_input)
        return cls(
            table.knobs,
            table.configurations,
            normaliser,
            encoding,
            config,
            rule=rule,
            unit=table.unit,
        )

    @property
    def limit_key(self) -> str:
        """The key of a request's limit."""
        return self.rule.limit_key

    def forward(
        self,
        features: Tensor,
        limit: Tensor,
        mask: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> Tensor:
        """Return log-probs [*, C] of the network that is deployed, the last one.

        Args:
            features: normalised, float [*, width].
            limit: float [*].
            mask: bool [*, C], None for everything.
            offset: of ln ms, float [*, C], None for no drift.
        """
        by_value = None
        if offset is not None:
            by_value = drift_inputs(offset, self.network.values)
        # every network gets the same requests, and the last one is deployed
        inputs = (
            for_each(values, limit.shape, self.config.networks_trained)
            for values in (features, limit, mask, by_value)
        )
        log_probs = self.network(*inputs)
        return log_probs[-1].reshape(*limit.shape, -1)

    def sample_actions(self, log_probs: Tensor, deterministic: bool = False) -> dict[str, Any]:
        """Draw the knobs from what the controller returned for requests.

        Args:
            log_probs: [*, C].
            deterministic: take the most probable configuration instead.

        Returns:
            The values of each knob by its name, NumPy [*] each; of log-probs [C] single values.

        Raises:
            InputError: `log_probs` are not those of this controller's configurations.
        """
        return actions_by_name(self.knobs, self.configurations, log_probs, deterministic)

    def alone(self) -> Controller:
        """Return a copy with the deployed network alone, without teacher, experts and networks of
        folds."""
        controller = copy.deepcopy(self)
        controller.config = replace(self.config, teacher=False, experts=(), fold_networks=1)
        for parameter in controller.network.parameters():
            # [M, …] → [1, …]
            parameter.data = parameter.data[[-1]]
        return controller

    def requirements(self) -> dict[str, Any]:
        """Return what must be the same for weights to be taken over: name in a message → value."""
        settings = asdict(self.config)
        names = settings.keys() - OUTSIDE_THE_NETWORK
        parts: dict[str, Any] = {f"policy.{name}": settings[name] for name in sorted(names)}
        # the order of the configurations matters too
        count = len(self.configurations)
        checksum = zlib.crc32(self.configurations.numpy().tobytes())
        return parts | {
            "knobs": [knob.spelled for knob in self.knobs],
            "features": self.normaliser.sizes,
            "columns": {column.name: column.labels for column in self.normaliser.columns},
            "the limit of a request": (self.limit_key, self.unit),
            "the number of configurations and their checksum": (count, checksum),
        }

    def plain(self) -> dict[str, Any]:
        """Pack settings, knobs and weights into a dictionary of tensors and plain values, the part
        of a checkpoint that `restored` reads."""
        plain = {
            "policy": asdict(self.config),
            "knobs": [[knob.name, list(knob.values)] for knob in self.knobs],
            "features": self.normaliser.sizes,
            "constraint": self.rule.name,
            "unit": self.unit,
            "datasets": self.normaliser.datasets,
            "columns": [list(column) for column in self.normaliser.columns],
            "state": self.state_dict(),
        }
        if self.rule.is_own:
            plain["numbers"] = self.rule.numbers
        return plain

    @classmethod
    def restored(cls, plain: dict[str, Any]) -> Controller:
        """Build the controller from what `plain` packed, in eval mode.

        Raises:
            InputError: its settings have another number of layers than weights.
            RuntimeError: weights are missing, unknown, or of another shape.
        """
        state = plain["state"]
        config = PolicyConfig(**plain["policy"])
        layers = sum(name.startswith("network.layers.") for name in state) // 2
        if config.layers != layers:
            raise InputError(
                f"claims {config.layers:,} layers, but holds {layers}: it is damaged or forged; "
                "take another copy, or train again"
            )
        knobs = [Knob(name, tuple(values)) for name, values in plain["knobs"]]
        # statistics of limits come with the weights, below
        encoding = BudgetEncoding(torch.ones(1), config.budget_width)
        normaliser = FeatureNormaliser.restored(plain)
        controller = cls(
            knobs,
            state["configurations"],
            normaliser,
            encoding,
            config,
            rule=rule_named(plain["constraint"], plain.get("numbers")),
            unit=plain["unit"],
        )
        controller.load_state_dict(state)
        return controller
