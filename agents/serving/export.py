"""Facts about exported controllers: their configurations, and how other forms compare."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from knobwise.agents.policy.arrays import Array, Arrays
from knobwise.agents.policy.controller import NumpyController
from knobwise.common.errors import InputError
from knobwise.common.progress import progress
from knobwise.envs.tables.profile_table import ProfileTable

Decide = Callable[[Arrays, Array], Array]
"""Blocks [n, d], budgets [n] in ms → configurations int64 [n], as `NumpyController.choose`."""
TOLERANCE = 1e-4
"""Configurations whose log-probabilities differ by at most this are equally good: rounding decides
between them."""


def agreement(
    controller: NumpyController,
    decide: Decide,
    table: ProfileTable,
    budgets_ms: Tensor,
    what: str,
    exact: bool = True,
) -> dict[str, int]:
    """Compare the decisions of another form of a controller, over all samples × budgets [B] in ms.

    Returns:
        how many `contexts` there are, and in how many the decision is the `same`, or another one
        that is as probable within `TOLERANCE` (`rounding`).

    Raises:
        InputError: a decision is different, unless `exact` is False.
    """
    counts = {"contexts": table.num_samples * len(budgets_ms), "same": 0, "rounding": 0}
    blocks = {name: block.numpy() for name, block in table.features.items()}
    rows = np.arange(table.num_samples)
    with progress("comparing decisions", len(budgets_ms), quiet_s=2) as tick:
        for done, budget in enumerate(budgets_ms.tolist(), 1):
            limits = np.full(len(rows), budget, np.float32)
            wanted = controller.choose(blocks, limits)
            other = decide(blocks, limits)
            # decisions that are equally probable may differ by rounding
            log_probs = controller.log_probs(blocks, limits)
            close = np.abs(log_probs[rows, wanted] - log_probs[rows, other]) <= TOLERANCE
            counts["same"] += int((wanted == other).sum())
            counts["rounding"] += int((close & (wanted != other)).sum())
            tick(done, "budgets")
    contexts, same, rounding = counts.values()
    if exact and same + rounding < contexts:
        raise InputError(
            f"{what}: decides differently from the controller in {contexts - same - rounding} of "
            f"{contexts} contexts of profile {table.name!r}; nothing was written"
        )
    return counts
