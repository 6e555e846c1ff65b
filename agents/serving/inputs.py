"""The inputs of a policy as people give them, as arrays. This file needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from knobwise.agents.policy.arrays import Array, encoded
from knobwise.common.errors import InputError


def numbers(name: str, value: Any) -> Array:
    """Return a copy as float32. Raises InputError if these are no numbers."""
    try:
        # a tensor may be on a GPU, with gradients
        if hasattr(value, "detach") and not value.is_complex():
            value = value.detach().float().cpu().numpy()
        if np.iscomplexobj(value):
            raise TypeError("complex numbers")
        # what is too large becomes infinite, which the caller refuses by the name of the field
        with np.errstate(over="ignore"):
            return np.array(value, np.float32)
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{name}: not an array of numbers ({error})") from error


def blocks_of(
    features: Any, sizes: Mapping[str, int], columns: Sequence[Any] = ()
) -> dict[str, Array]:
    """Return features as people give them as float32 blocks [d] or [n, d] by name.

    A policy that reads one block takes it without its name.

    Args:
        features: blocks by name, values of `columns` by name, a lone block, or None.
        sizes: the widths of the blocks that are read.
        columns: those of the block `features`, see `encoded`.

    Raises:
        InputError: a block is absent, unknown, infinite or of another shape, or a value by name
            cannot be used.
    """
    if features is not None and not isinstance(features, Mapping):
        name = next(iter(sizes)) if len(sizes) == 1 else "without a name"
        features = {name: features}
    features = features or {}
    if columns and "features" not in features:
        # values by name, of which only those of known blocks and columns count
        known = {name: features[name] for name in sizes if name in features}
        try:
            features = known | {"features": encoded(columns, features)}
        except ValueError as error:
            raise InputError(str(error)) from error
    blocks = {}
    for name, values in features.items():
        blocks[name] = numbers(f"features: {name}", values)
        if np.isinf(blocks[name]).any():
            raise InputError(
                f"features: {name} hold infinite values; write NaN for what is missing"
            )
    widths = {name: block.shape[-1] for name, block in blocks.items() if block.ndim in (1, 2)}
    if widths != sizes or len(blocks) > len(widths):
        wanted = [f"{name} [{width}] or [n, {width}]" for name, width in sizes.items()]
        got = [f"{name} {list(block.shape)}" for name, block in blocks.items()]
        raise InputError(
            f"features: this policy reads {', '.join(wanted) or 'none'}; "
            f"got {', '.join(got) or 'none'}"
        )
    return blocks


def budgets_of(budget_ms: Any) -> Array:
    """Return a budget, or budgets [n], float32. Raises InputError unless all are positive."""
    budgets = numbers("budget_ms", budget_ms)
    if budgets.ndim <= 1 and ((budgets > 0) & (budgets < np.inf)).all():
        return budgets
    raise InputError(
        f"budget_ms={budget_ms!r}: must be a number or [n], all positive and finite, in ms"
    )
