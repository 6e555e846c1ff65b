"""What losses do beside their formulae, before and after them.

Before: exponentials stay finite where their value does not matter. After: what is not finite is
refused by its key and place. In between terms of weight 0 are left out. Where `torch.compile` or
vmap hides numbers, each guard stands aside, as it says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from tensordict.utils import NestedKey
from torch import Tensor

from knobwise.common.errors import InputError

Keys: TypeAlias = NestedKey | list[NestedKey]
"""A key, or for a `CompositeDistribution` a list of keys."""

LARGEST = 80.0
"""A ratio whose logarithm is larger counts as overflowing; e⁸⁰ is still a float32."""


# -- before ----------------------------------------------------------------------------------------


def without_level(reward: Tensor, weight: Tensor | None) -> Tensor:
    """Return rewards [*, J] less one of each group, which changes no advantage: the first, or under
    weights [*, J] that of the largest.

    Equal rewards are then 0, and so is their mean. Otherwise it is rounded, and z-scores would
    divide the rest by as little.
    """
    if weight is None:
        return reward - reward[..., :1]
    return reward - reward.gather(-1, weight.argmax(-1, keepdim=True))


def harmless_reference(
    reference_log_prob: Tensor, log_prob: Tensor, coefficient: Tensor
) -> Tensor | None:
    """Return the log-probs that the KL is taken to: those of the reference; where the coefficient
    β is 0 None, so that there is no KL.

    Where β is not known, those of the policy itself stand for the reference if β is 0: no ∞ of a
    far reference may meet the 0.
    """
    if is_zero(coefficient):
        return None
    if is_positive(coefficient):
        return reference_log_prob.detach()
    return torch.where(coefficient == 0, log_prob.detach(), reference_log_prob.detach())


# -- what is known ---------------------------------------------------------------------------------


def is_zero(coefficient: Tensor) -> bool:
    """Tell if a coefficient, a single number, is 0, so that its term need not be computed.

    Under `torch.compile` and vmap that is not known, and the term is computed.
    """
    return _is_known(lambda: coefficient == 0, otherwise=False)


def is_positive(coefficient: Tensor) -> bool:
    """Tell if a coefficient is above 0; False under `torch.compile` and vmap, where that is not
    known."""
    return _is_known(lambda: coefficient > 0, otherwise=False)


def is_finite(*values: Tensor) -> bool:
    """Tell if all numbers are finite, by one look at their sum; True under `torch.compile` and
    vmap, where that is not known."""

    def total() -> Tensor:
        with torch.no_grad():
            sums = [part.sum() if part.ndim else part for part in values]
            # two operations, where `isfinite` takes four
            return torch.as_tensor(sum(sums)).abs() < torch.inf

    return _is_known(total, otherwise=True)


def _is_known(condition: Callable[[], Tensor], *, otherwise: bool) -> bool:
    """Return what a condition says, or `otherwise` where its number is not known."""
    if torch.compiler.is_compiling():
        return otherwise
    number = condition()
    try:
        return bool(number)
    except RuntimeError:
        return otherwise


# -- after -----------------------------------------------------------------------------------------


class Read(NamedTuple):
    """What a loss read under a key, or the sum under several."""

    keys: Keys
    values: Tensor
    log_ratio: Tensor | None = None
    """The logarithm of the ratio that it is part of; None if it is part of none."""


def refuse(
    loss: str, read: Sequence[Read], losses: Sequence[Tensor], present: Tensor | None = None
) -> None:
    """Refuse what makes a loss NaN or infinite, by its key and place.

    To be called where `is_finite` says no.

    Args:
        loss: the name of the loss.
        read: all that it read.
        losses: its terms, as far as they are computed.
        present: bool [P], False for contexts that are padding, which do not count; None if none is.

    Raises:
        InputError: a number is not finite, or a ratio of probabilities overflows.
    """
    for part in read:
        finite = part.values.isfinite()
        if present is not None:
            finite |= ~present.reshape(present.shape[:1] + (1,) * (finite.ndim - 1))
        _refuse_where(~finite, loss, part, "it must be finite")
    if is_finite(*losses):
        return
    for part in read:
        if part.log_ratio is not None:
            problem = "the policy's own log-prob is so far from it that their ratio overflows"
            _refuse_where(part.log_ratio > LARGEST, loss, part, problem)
    raise InputError(
        f"{loss}: the loss is not finite, though all that it read is; so the actor's log-probs are "
        "not: look at its parameters and its inputs"
    )


def _refuse_where(wrong: Tensor, loss: str, part: Read, problem: str) -> None:
    """Raise InputError with the first number that is wrong, if any is."""
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        value = float(part.values[tuple(place)])
        raise InputError(f"{loss}: {named(part.keys)} is {value:g} at {place}; {problem}")


def listed(keys: Keys) -> list[NestedKey]:
    """Return a key as a list of one, and a list as it is."""
    return keys if isinstance(keys, list) else [keys]


def named(keys: Keys) -> str:
    """Return keys in words, for a message."""
    return " + ".join(map(repr, listed(keys)))
