"""The protocol of everything that chooses configurations: controllers, stacks, baselines, exported controllers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

Array = TypeVar("Array")
"""`torch.Tensor` in training and judging, `numpy.ndarray` in serving."""


class Policy(Protocol[Array]):
    """Chooses one configuration for each request under its limit."""

    def choose(self, features: Mapping[str, Array], limits: Array, mask: Array | None = None, /) -> Array:
        """Choose for n requests.

        Args:
            features: block name → float [n, d]; may be empty.
            limits: float [n], budgets in ms; for a policy that works at a price the worths of a right answer in ms.
            mask: bool [n, C], the configurations that may be chosen, at least one for each request; None for all.

        Returns:
            configuration indices, int64 [n], inside `mask`.
        """
        ...


class Baseline(Protocol):
    """A `Policy` of tensors that is judged under its own name."""

    name: str

    def choose(self, features: Mapping[str, Tensor], limits: Tensor, mask: Tensor | None = None, /) -> Tensor:
        """See `Policy.choose`."""
        ...


def reads_features(policy: Any, limits: Tensor) -> Tensor:
    """Whether a policy reads a request's features under each of these limits [B] → bool [B]. Static policies do not,
    nor does a guard that falls back to one."""
    if not hasattr(policy, "normaliser"):
        return torch.zeros(len(limits), dtype=torch.bool)
    guard = getattr(policy, "guard", None)
    return torch.ones(len(limits), dtype=torch.bool) if guard is None else guard.deploy[guard.groups(limits)]
