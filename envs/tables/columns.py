"""What the columns of the feature block `features` are, where they have names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

FEATURES = "features"
"""The block of features that came as named columns."""


class Column(NamedTuple):
    """A column of a table as a feature: a number, or a text that becomes several numbers.

    A text becomes a 1 in the place of its value and 0 in the others ("one-hot"). The last place is
    for all values without a place of their own, which few samples have or none.
    """

    name: str
    categories: tuple[str, ...] | None
    """The values of a text that have a place; "" is a missing text. None for a number. () for free
    text, see `ProfileTable.texts`, which no block of the table holds as it is."""
    gaps: bool
    """Whether it is missing in some samples. Only then may it be missing in a request."""

    def __str__(self) -> str:
        if self.categories is None:
            return self.name
        return f"{self.name} ({len(self.categories)} values)"

    @property
    def labels(self) -> list[str]:
        """A name for each of its places in the block."""
        if self.categories is None:
            return [self.name]
        return [f"{self.name}={value or '(missing)'}" for value in (*self.categories, "(other)")]


def columns_of(plain: Iterable[Any]) -> tuple[Column, ...]:
    """Return columns from the lists that a file holds of them."""
    return tuple(Column(name, words and tuple(words), gaps) for name, words, gaps in plain)
