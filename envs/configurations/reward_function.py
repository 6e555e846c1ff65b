"""A reward that the user wrote: a Python function, named as `module:name`.

It is checked before it trains anything.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.common.imports import imported, in_a_line
from knobwise.envs.configurations.budgets import LEAST_LATENCY_MS
from knobwise.envs.tables.profile_table import Knob, ProfileTable

CHECKED_SHARES = (0.0, 0.5, 1.0)
"""A function is checked on every cell under these quantiles of the profiled latencies as
budgets."""


class RewardFunction:
    """The reward of each decision, `function(accuracy, latency_ms, budget_ms, knobs)`.

    The first three are float32 tensors of one shape, whatever it is. `knobs` has a tensor of this
    shape for each knob, by name: its values, or their indices where the values are names. The
    result is a tensor of the same shape. A decision's reward must depend on its own numbers alone.
    Cells that were not profiled come in as NaN, and get NaN whatever the function returns.

    Args:
        name: `module:name`; modules are looked for in the current folder first, as by `python -m`.
        table: the profile; its cells are what the function is checked on.
        device: where the arguments will be; None for where the table is.

    Raises:
        InputError: there is no such function; it raises, or returns no tensor, another shape, or
            NaN or infinity in a profiled cell, which later calls refuse too; called again it
            returns something else or opens a file; a reward depends on the other decisions in the
            batch.
    """

    def __init__(
        self, name: str, table: ProfileTable, device: torch.device | str | None = None
    ) -> None:
        self.key = f"reward.function={name}"
        self._function: Callable[..., Any] = imported(
            self.key, name, "function", "examples.rewards:late_answers"
        )
        self.knobs: dict[str, Tensor] = {}  # float32 [C], the value of each configuration
        columns = table.configurations.to(device).unbind(1)
        for knob, column in zip(table.knobs, columns, strict=True):
            self.knobs[knob.name] = _sizes(knob).to(column.device)[column]
        self._check(table.accuracy.to(device), table.latency_ms.to(device))

    def __call__(
        self, accuracy: Tensor, latency_ms: Tensor, budget_ms: Tensor, configurations: Tensor
    ) -> Tensor:
        """Return the rewards of decisions, float32, in the shape that all arguments broadcast to.

        The arguments are float tensors and int64 configurations.
        """
        values = (sizes[configurations] for sizes in self.knobs.values())
        cells = torch.broadcast_tensors(accuracy, latency_ms, budget_ms, *values)
        profiled = ~(cells[0].isnan() | cells[1].isnan())
        try:
            rewards = self._function(*cells[:3], dict(zip(self.knobs, cells[3:], strict=True)))
        except Exception as error:
            raise self._refused(f"raises {in_a_line(error)}") from error
        if not isinstance(rewards, Tensor):
            raise self._refused(f"returns {type(rewards).__name__}; must return a torch.Tensor")
        if rewards.shape != profiled.shape:
            raise self._refused(
                f"returns shape {[*rewards.shape]}; must be that of its arguments, "
                f"{[*profiled.shape]}"
            )
        bad = profiled & ~rewards.isfinite()
        if bad.any():
            right, took, limit = (float(values[bad][0]) for values in cells[:3])
            raise self._refused(
                f"returns {float(rewards[bad][0])} in {int(bad.sum())} of {int(profiled.sum())} "
                "profiled cells, the "
                f"first with accuracy {right:g}, latency {took:g} ms, budget {limit:g} ms; must "
                "be finite"
            )
        return torch.where(profiled, rewards.detach().to(torch.float32), torch.nan)

    def _refused(self, problem: str) -> InputError:
        return InputError(f"{self.key}: {problem}")

    def _check(self, accuracy: Tensor, latency_ms: Tensor) -> None:
        """Call the function on every cell under several budgets, then again, then on a part.

        Accuracy and latency are [N, C].
        """
        rows, configurations = (
            torch.arange(size, device=accuracy.device) for size in accuracy.shape
        )
        ordered = latency_ms[~latency_ms.isnan()].sort().values.clamp_min(LEAST_LATENCY_MS)
        budgets = torch.stack(
            [ordered[round(share * (len(ordered) - 1))] for share in CHECKED_SHARES]
        )
        # neighbouring samples have different budgets; after three calls each had every budget
        for shift in range(len(budgets)):
            limits = budgets[(rows + shift) % len(budgets)].unsqueeze(1)
            rewards = self(accuracy, latency_ms, limits, configurations)
        threads = _threads_without_files()
        threads.add(threading.get_ident())  # only now, because the first call may import something
        try:
            again = self(accuracy, latency_ms, limits, configurations)
        finally:
            threads.discard(threading.get_ident())
        if not torch.equal(again.nan_to_num(), rewards.nan_to_num()):
            raise self._refused(
                "returns different rewards when it is called again; must be deterministic"
            )
        # every second sample, the first configuration
        part = (slice(None, None, 2), slice(1))
        alone = self(accuracy[part], latency_ms[part], limits[::2], configurations[:1])
        if not torch.allclose(alone, rewards[part], rtol=1e-4, atol=1e-5, equal_nan=True):
            raise self._refused(
                "a decision's reward depends on the other decisions in the batch, which it must not"
            )


def _sizes(knob: Knob) -> Tensor:
    """Return the values of a knob, or their indices if they are names: float32 [values]."""
    if any(isinstance(value, str) for value in knob.values):
        return torch.arange(len(knob.values), dtype=torch.float32)
    return torch.tensor([*knob.values], dtype=torch.float32)


@functools.cache
def _threads_without_files() -> set[int]:
    """Return the set of threads that may open no file; callers add theirs.

    An audit hook (PEP 578) refuses them. It cannot be removed, so the first call sets the only one.
    """
    threads: set[int] = set()

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and threading.get_ident() in threads:
            raise PermissionError(
                f"opens {arguments[0]}; a reward must not read files; its module may, on import"
            )

    sys.addaudithook(refuse)
    return threads
