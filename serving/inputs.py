"""The inputs of a policy as people give them, as arrays. This file needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from knobwise.agents.deployed.arrays import Array, as_limit, as_numbers, encode_request
from knobwise.agents.deployed.controller import MAX_MS, NumpyController
from knobwise.common.errors import InputError


def as_array(
    name: str, value: object, truths: bool = False, kind: type[np.generic] = np.float32
) -> Array:
    """Return a copy, float32 or of another kind. Raises InputError if these are no numbers; truth
    values are 0 and 1 if `truths`, and else none."""
    if type(value) is np.ndarray and value.dtype == kind:
        return value.copy()
    try:
        # what is too large becomes infinite, which the caller refuses by the name of the field
        with np.errstate(over="ignore"):
            return as_numbers(f"{name}:", value, truths).astype(kind)
    except ValueError as error:
        raise InputError(str(error)) from error


def limit_in_request(value: object, unit: str = "ms", name: str = "budget_ms") -> float:
    """Return the budget of one request, or another limit of this name, as a float.

    Raises InputError if it is no single number, not positive, or too large to count in."""
    try:
        limit = as_limit(value, name)
    except ValueError as error:
        raise InputError(str(error)) from error
    if not 0 < limit < MAX_MS:
        raise InputError(f"{name}={limit}: must be positive and finite, in {unit}")
    return limit


def limits_in_request(limits: Mapping[str, object] | None) -> dict[str, float] | None:
    """Return the limits of one request on further costs, by name, as floats; None for none. Raises
    InputError as `limit_in_request`."""
    if limits is None:
        return None
    return {name: limit_in_request(limit, "its unit", name) for name, limit in limits.items()}


def blocks_of(features: Any, controller: NumpyController) -> dict[str, Array]:
    """Return features as people give them as float32 blocks by name, whose shapes the controller
    checks.

    A policy that reads one block takes it without its name. What it does not read is ignored.

    Args:
        features: blocks by name, values of columns and texts by name, a lone block, or None.
        controller: the one that is to decide.

    Raises:
        InputError: no numbers, or a value by name cannot be used.
    """
    if features is not None and not isinstance(features, Mapping):
        features = dict.fromkeys([*controller.feature_sizes][:1], features)
    features = features or {}
    try:
        if controller.columns and "features" not in features:
            features = {**features, "features": encode_request(controller.columns, features)}
        if controller.texts:
            features = controller.with_blocks(features)
    except ValueError as error:
        raise InputError(str(error)) from error
    known = [name for name in controller.feature_sizes if name in features]
    return {name: as_array(f"features: {name}", features[name], True) for name in known}
