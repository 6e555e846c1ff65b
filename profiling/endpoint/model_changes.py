"""What it costs to ask a server for another model than the one before: some hold one at a time, and
load it at each change."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

LEAST_MS = 500.0
LEAST_SHARE = 0.5
"""A change costs something if the first token then takes longer by both: so many ms, and this share
of its time without a change."""
ROUNDS = 3
"""So often must a change have cost something: one may be slow by chance."""


def costs_something(changed_ms: float, kept_ms: float) -> bool:
    """Return True if the first token after a change takes longer than without."""
    return changed_ms - kept_ms >= max(LEAST_MS, LEAST_SHARE * kept_ms)


def measure_changes(
    first_ms: Callable[[str, int], float | None], models: Sequence[str]
) -> dict[str, float]:
    """Measure what a change to each model costs: the time to the first token right after another
    model was asked, less that of the next request to the same.

    Args:
        first_ms: asks a model, the number of times that it was asked so far given, and returns the
            time to the first token in ms; None ends the measuring.
        models: at least two.

    Returns:
        The median cost in ms, by model; only of those to which each of `ROUNDS` changes cost
        something.
    """
    asked_times = dict.fromkeys(models, 0)

    def ask(model: str) -> float:
        time_ms = first_ms(model, asked_times[model])
        asked_times[model] += 1
        if time_ms is None:
            raise _NoMore
        return time_ms

    costs: dict[str, list[float]] = {model: [] for model in models}
    try:
        # the first time of each, when any server loads it
        for model in models:
            last = model
            ask(model)
        for _ in range(ROUNDS):
            for model in [*costs]:
                if last == model:
                    ask(next(other for other in models if other != model))
                changed_ms = ask(model)
                kept_ms = ask(model)
                last = model
                costs[model].append(changed_ms - kept_ms)
                if not costs_something(changed_ms, kept_ms):
                    del costs[model]
    except _NoMore:
        return {}
    return {model: statistics.median(values) for model, values in costs.items()}


class _NoMore(Exception):
    """No further request may be sent."""


def say_costs(costs_ms: Mapping[str, float]) -> str:
    """Return costs of changes as words."""
    return ", ".join(f"{ms / 1e3:.1f} s to {model}" for model, ms in costs_ms.items())
