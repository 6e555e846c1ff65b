"""What the functions of a rule say; a mistake in one of the user's own is a message."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.common.imports import in_a_line

if TYPE_CHECKING:
    from knobwise.envs.bandit.rules import Rule

LONGEST_MS = 1e30
"""The longest latency that a rule is asked about."""
ROUNDING = 1e-5
"""By so much a utility may be outside 0 … 1, or fall as the budget grows."""


def values_of(
    rule: Rule, name: str, accuracy: Tensor, measurements_ms: Tensor, limits: Tensor
) -> Tensor:
    """Ask a function of the rule about cells, as in `Rule.mean_utility`: [*, R], NaN where there is
    no measurement.

    Raises:
        InputError: it raises, or returns no tensor, one of another shape, or numbers that are
            not finite, or no utility.
    """
    cells = torch.broadcast_tensors(
        accuracy.unsqueeze(-1), measurements_ms.clamp_max(LONGEST_MS), limits.unsqueeze(-1)
    )
    values = answer(rule, name, *cells)
    known = ~(cells[0].isnan() | cells[1].isnan())
    key = f"budget={rule.name}: {name}"
    wrong = known & ~values.isfinite()
    must = "finite"
    if name == "utility":
        wrong |= known & ((values < -ROUNDING) | (values > 1 + ROUNDING))
        must = "finite, from 0 to 1"
    if wrong.any():
        first = [float(each[wrong][0]) for each in (values, *cells)]
        raise InputError(
            f"{key}: returns {first[0]:g} for accuracy, latency and budget {first[1:]}; must "
            f"be {must}"
        )
    return values.detach().to(cells[0].dtype).where(known, torch.nan)


def answer(rule: Rule, name: str, *cells: Tensor) -> Tensor:
    """Return what a function of the rule says of numbers that broadcast.

    Raises:
        InputError: it raises, or returns no tensor, or one of another shape.
    """
    cells = torch.broadcast_tensors(*cells)
    key = f"budget={rule.name}: {name}"
    try:
        # copies, which the function may write into: these may share memory with the table
        values: Tensor = getattr(rule, name)(*(each.clone() for each in cells))
    except Exception as error:
        raise InputError(f"{key}: raises {in_a_line(error, type(rule))}") from error
    returned = [*values.shape] if isinstance(values, Tensor) else type(values).__name__
    if returned != [*cells[0].shape]:
        raise InputError(
            f"{key}: returns {returned}; must return a tensor {[*cells[0].shape]}, the shape "
            "of its arguments"
        )
    return values
