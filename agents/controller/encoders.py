"""What a policy reads of a context, and the log-probs that it computes from it.

Requests as they come are feature blocks; in an environment that knows the table they are row
numbers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import embedding

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.drift import drift_inputs
from knobwise.agents.controller.side_by_side import by_network, in_turn
from knobwise.common.errors import InputError
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.losses.dropout import drops_out


class FeatureEncoder(nn.Module):
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


class TableEncoder(nn.Module):
    """Reads row numbers of a table and a limit; features are normalised once, for all rows.

    Args:
        controller: whose deployed network decides.
        table: the profile.
        mask: bool [N, C], what may be chosen; None for what was profiled.
    """

    all_features: Tensor
    mask: Tensor

    def __init__(
        self, controller: Controller, table: ProfileTable, mask: Tensor | None = None
    ) -> None:
        super().__init__()
        self.controller = controller
        device = controller.configurations.device
        blocks = {name: block.to(device) for name, block in table.features.items()}
        features = controller.normaliser(blocks, table.num_samples)
        self.register_buffer("all_features", features, persistent=False)
        mask = table.mask if mask is None else mask
        self.register_buffer("mask", mask.to(device), persistent=False)
        self.complete = bool(mask.all())

    def forward(self, row: Tensor, limit: Tensor) -> Tensor:
        """Look features up by `row` [*], and compute log-probs of all configurations under limits
        [*] or [*, 1]: [*, C]. Raises InputError: a key is missing."""
        keys = {"row": row, self.controller.limit_key: limit}
        missing = [key for key, values in keys.items() if values is None]
        if missing:
            raise InputError(f"the tensordict lacks {missing[0]!r}, which the policy reads")
        if limit.ndim > row.ndim:
            # gymnasium's environments give limits [*, 1]
            limit = limit.squeeze(-1)
        return self.of_controllers([self.controller], row, limit)[0]

    def of_controllers(
        self, controllers: Collection[Controller], row: Tensor, limit: Tensor
    ) -> list[Tensor]:
        """Return log-probs [*, C] of controllers with the inputs of this one, looked up once."""
        inputs = self.features_of(row), limit.float(), self.mask_of(row)
        return [controller(*inputs) for controller in controllers]

    def features_of(self, row: Tensor) -> Tensor:
        """Return the normalised features of rows, int64 [*] → [*, width]."""
        return embedding(row, self.all_features)

    def mask_of(self, row: Tensor) -> Tensor | None:
        """Return what may be chosen, bool [*, C]; None for everything."""
        return None if self.complete else self.mask[row]


class TrainingEncoder(TableEncoder):
    """A `TableEncoder` for all networks of a controller, which also reads copies of the samples.

    Contexts belong to the networks in turn, see `side_by_side`. Rows beyond the table are copies:
    row i + k·N is one of sample i, see `envs.tables.drift`. Where a loss drops out
    (`knobwise.losses.dropping_out`), features have noise of the size `config.augment`, drawn anew
    each time.

    Args:
        controller, table, mask: see `TableEncoder`.
        offsets: float [rows, C], how the machines of samples and copies drift, in ln ms; None for
            no drift.
    """

    by_value: Tensor | None

    def __init__(
        self,
        controller: Controller,
        table: ProfileTable,
        mask: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        super().__init__(controller, table, mask)
        by_value = None
        if offsets is not None:
            offsets = offsets.to(controller.configurations.device)
            by_value = drift_inputs(offsets, controller.network.values)
        self.register_buffer("by_value", by_value, persistent=False)

    def of_controllers(
        self, controllers: Collection[Controller], row: Tensor, limit: Tensor
    ) -> list[Tensor]:
        """As in `TableEncoder`, each context by its own network."""
        shape = row.shape
        # rows are smaller than what they stand for
        networks = self.controller.config.networks_trained
        row, limit = by_network(row, networks), by_network(limit.float(), networks)
        inputs = self.features_of(row), limit, self.mask_of(row), self.drift_of(row)
        return [in_turn(controller.network(*inputs), shape) for controller in controllers]

    def features_of(self, row: Tensor) -> Tensor:
        """Return the normalised features of rows, [*] → [*, width], those of copies too."""
        x = super().features_of(row % len(self.all_features))
        augment = self.controller.config.augment
        if augment and drops_out():
            x = x + self.controller.normaliser.noise_like(x, augment)
        return x

    def mask_of(self, row: Tensor) -> Tensor | None:
        """Return what may be chosen, bool [*, C], of a copy what its sample may; None for
        everything."""
        return None if self.complete else self.mask[row % len(self.mask)]

    def drift_of(self, row: Tensor) -> Tensor | None:
        """Return what a network is told of the drift of rows, [*] → [*, V]; None without drift."""
        return None if self.by_value is None else embedding(row, self.by_value)
