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
    """Return features as people give them as float32 blocks by name, whose shapes the controller
    checks.

    A policy that reads one block takes it without its name. What it does not read is ignored.

    Args:
        features: blocks by name, values of `columns` by name, a lone block, or None.
        sizes: the widths of the blocks that are read.
        columns: those of the block `features`, see `encoded`.

    Raises:
        InputError: no numbers, or a value by name cannot be used.
    """
    if features is not None and not isinstance(features, Mapping):
        features = dict.fromkeys([*sizes][:1], features)
    features = features or {}
    if columns and "features" not in features:
        try:
            features = {**features, "features": encoded(columns, features)}
        except ValueError as error:
            raise InputError(str(error)) from error
    known = [name for name in sizes if name in features]
    return {name: numbers(f"features: {name}", features[name]) for name in known}
