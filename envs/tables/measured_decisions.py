"""How many decisions must be measured cells before anything is said of how good they are.

This module imports no torch, which is slow to load.
"""

from __future__ import annotations

FEWEST_MEASURED = 30
"""Where cells are missing, fewer measured decisions than this say nothing. The estimate of a policy
is then hardly more than predictions, which are some ten points off with an interval that looks
tight; with 30 measured decisions the interval of a share is about .35 wide."""


def are_known(measured: int, decisions: int) -> bool:
    """Return whether the outcomes of decisions are known well enough to be judged: all of them are
    measured cells, or at least `FEWEST_MEASURED` are."""
    return measured >= min(decisions, FEWEST_MEASURED)


def not_known_words(measured: int, decisions: int) -> str:
    """Say why nothing is said of decisions: `not known: 0 of 40 decisions were measured`."""
    return f"not known: {measured:,} of {decisions:,} decisions were measured"
