"""The reward of a decision, and the utility that decisions are judged by.

`reward_kinds.py` holds the kinds of reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.common.imports import import_callable, in_a_line
from knobwise.envs.bandit.budgets import MIN_LATENCY_MS
from knobwise.envs.bandit.faster import count_true, flat_index, remainder, take
from knobwise.envs.bandit.reward_kinds import KINDS
from knobwise.envs.bandit.settings import RewardConfig
from knobwise.envs.tables.cells import Cells
from knobwise.envs.tables.profile_table import KnobValue, ProfileTable


def share_on_time(
    measurements_ms: Tensor, budget_ms: Tensor, count: Tensor | int | None = None
) -> Tensor:
    """Compute the share of a cell's measurements that are within the budget; 0 if there are none.

    Measurements [*, R], NaN for none, and budgets that broadcast with [*] → float [*]. `count` is
    how many measurements the cells have, [*] and at least 1; None counts them.
    """
    if count is None:
        count = (~measurements_ms.isnan()).sum(-1, dtype=torch.int32).clamp_min(1)
    on_time = count_true(measurements_ms <= budget_ms.unsqueeze(-1))
    return on_time.to(measurements_ms.dtype).div_(count)


def expected_utility(
    accuracy: Tensor,
    measurements_ms: Tensor,
    budget_ms: Tensor,
    count: Tensor | int | None = None,
) -> Tensor:
    """Compute accuracy · share in time: a policy is judged by accuracy on time, and 0 if late.

    Accuracy [*], measurements [*, R], budgets [*] → [*]. Shapes broadcast. NaN cells give 0. For
    `count` see `share_on_time`.
    """
    # much faster than torch.where; what was not profiled is never in time
    return share_on_time(measurements_ms, budget_ms, count) * accuracy.nan_to_num()


def complexity(table: ProfileTable) -> Tensor:
    """Compute for each configuration the mean over its knobs of value / largest value, float32 [C].

    Knobs whose values are names, true and false, or negative have no size and count 0.
    """
    columns = []
    for knob, column in zip(table.knobs, table.configurations.T, strict=True):
        sizes = torch.tensor([0.0 if isinstance(v, str | bool) else float(v) for v in knob.values])
        if sizes.min() < 0:
            sizes = torch.zeros_like(sizes)
        columns.append(sizes[column] / (sizes.max() or 1.0))
    return torch.stack(columns).mean(0)


class RewardFunction:
    """A reward that the user wrote: `function(accuracy, latency_ms, budget_ms, knobs)`.

    The first three are float32 tensors of one shape, which may be any. `knobs` holds, by name, a
    tensor of this shape for each knob: its values, 1 for True and 0 for False, or their indices if
    the values are names. The function returns a tensor of the same shape. A decision's reward must
    depend on its own numbers alone, and be the same at every call. A cell that was not profiled is
    NaN, and its reward is NaN whatever the function returns.

    Args:
        name: `module:name`; modules are looked for in the current folder first, as by `python -m`.
        table: the profile; the function is tried on its cells.
        device: where the arguments will be; None for where the table is.

    Raises:
        InputError: there is no such function; or it raises, or returns no tensor, a tensor of
            another shape, or NaN or infinity in a profiled cell. Every call may raise this.
    """

    def __init__(
        self, name: str, table: ProfileTable, device: torch.device | str | None = None
    ) -> None:
        self.key = f"reward.function={name}"
        self._function = import_callable(
            self.key, name, "function", "examples.rewards:late_answers"
        )
        self.knobs: dict[str, Tensor] = {}  # float32 [C], the value of each configuration
        configurations = table.configurations.to(device)
        for knob, column in zip(table.knobs, configurations.T, strict=True):
            values: Sequence[KnobValue] = knob.values
            if any(isinstance(value, str) for value in values):
                values = range(len(values))
            sizes = torch.tensor([*values], dtype=torch.float32, device=column.device)
            self.knobs[knob.name] = sizes[column]
        # try it on every cell, under the median latency as the budget
        latency_ms = table.latency_ms.to(device)
        budget_ms = latency_ms.nanmedian().clamp_min(MIN_LATENCY_MS)
        self(table.accuracy.to(device), latency_ms, budget_ms, torch.arange(len(configurations)))

    def __call__(
        self, accuracy: Tensor, latency_ms: Tensor, budget_ms: Tensor, configurations: Tensor
    ) -> Tensor:
        """Return the rewards of decisions, float32, in the shape that all arguments broadcast to.

        The configurations are int64, the other arguments float.
        """
        values = [sizes[configurations] for sizes in self.knobs.values()]
        cells = torch.broadcast_tensors(accuracy, latency_ms, budget_ms, *values)
        profiled = ~(cells[0].isnan() | cells[1].isnan())
        # copies, which the function may write into: these share memory with the table
        copies = [each.clone() for each in cells]
        by_knob = dict(zip(self.knobs, copies[3:], strict=True))
        try:
            rewards = self._function(*copies[:3], by_knob)
        except Exception as error:
            raise InputError(f"{self.key}: raises {in_a_line(error, self._function)}") from error
        returned = [*rewards.shape] if isinstance(rewards, Tensor) else type(rewards).__name__
        if returned != [*profiled.shape]:
            raise InputError(
                f"{self.key}: returns {returned}; must return a tensor {[*profiled.shape]}, the "
                "shape of its arguments"
            )
        bad = profiled & ~rewards.isfinite()
        if bad.any():
            first = [numbers[bad][0].item() for numbers in (rewards, *cells[:3])]
            raise InputError(
                f"{self.key}: returns {first[0]} in {int(bad.sum())} of {int(profiled.sum())} "
                f"profiled cells, the first with accuracy, latency and budget {first[1:]}; must be "
                "finite"
            )
        return torch.where(profiled, rewards.detach().to(torch.float32), torch.nan)


class OwnRule(Protocol):
    """What rewards and searches ask of a rule of the user's own, see `rules.Rule`."""

    def mean_reward(self, accuracy: Tensor, latency_ms: Tensor, limits: Tensor, /) -> Tensor: ...

    def mean_utility(
        self, accuracy: Tensor, measurements_ms: Tensor, limits: Tensor, /
    ) -> Tensor: ...


class RewardTable:
    """The rewards of a table's configurations, computed on demand.

    A cell that was measured repeatedly has a reward for each measurement.

    Args:
        table: the profile.
        config: the settings of the reward.
        device: where rewards are computed; None for where the table is.
        repeats: `draw` for all measurements of a cell; `median` for its median latency alone.
        cells: what counts of the table; None for all that it has.
        rule: that of the budget; one of the user's own says what is rewarded.
    """

    def __init__(
        self,
        table: ProfileTable,
        config: RewardConfig,
        device: torch.device | str | None = None,
        repeats: str = "draw",
        cells: Cells | None = None,
        rule: OwnRule | None = None,
    ) -> None:
        counted: Cells = table if cells is None else cells
        self.config = config
        self.kind = KINDS[config.kind]
        # only a rule of the user's own rewards by itself
        by_rule = self.kind.formula is None and not self.kind.is_function
        self.rule = rule if by_rule else None
        if by_rule and rule is None:
            raise InputError(f"reward.kind={config.kind}: is that of a rule of your own")
        self.complexity = complexity(table).to(device)
        self.function = config.function and RewardFunction(config.function, table, device)
        self.accuracy = counted.accuracy.to(device).contiguous()
        self.latency_ms = counted.latency_ms.to(device).contiguous()
        self.has_gaps = not bool(counted.mask.all())
        self.repeats_ms: Tensor | None = None
        self.count: Tensor | int = 1  # measurements of each cell, int16 [N, C], or of every cell
        if counted.repeats_ms is not None and repeats == "draw":
            self.repeats_ms = counted.repeats_ms.to(device).contiguous()
            self.count = (~self.repeats_ms.isnan()).sum(-1, dtype=torch.int16)
            counts = self.count[counted.mask.to(device)]
            if counts.min() == counts.max():
                self.count = int(counts[0])

    def all(self, rows: Tensor, budgets_ms: Tensor) -> Tensor:
        """Return the reward of every configuration, int64 [n], float [n] → float32 [n, C].

        Rewards are means over the measurements of a cell, and NaN where it was not profiled.
        """
        everything = torch.arange(len(self.complexity), device=rows.device)
        measured = self.latency_ms
        if self.repeats_ms is not None:
            measured = self.repeats_ms
        return self._mean(self.accuracy[rows], measured[rows], budgets_ms, everything)

    def draw(
        self, configurations: Tensor, generator: torch.Generator | None = None
    ) -> Tensor | None:
        """Draw a measurement for each choice of configurations, int64 [n, G], for `outcome`.

        None where cells have one latency.
        """
        if self.repeats_ms is None:
            return None
        # cells may differ in how many measurements they have: a large number modulo that
        drawn = torch.randint(1 << 62, configurations.shape, generator=generator)
        if not isinstance(self.count, Tensor):
            drawn = remainder(drawn, self.count)
        return drawn.to(configurations.device)

    def outcome(
        self, rows: Tensor, configurations: Tensor, repeats: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return accuracy and latency in ms of these choices, float32 [n, G] each.

        Args:
            rows: int64 [n].
            configurations: int64 [n, G].
            repeats: what `draw` returned; None for the median.
        """
        # accuracy[row, configuration], by the index of the cell in the flattened table
        cell = flat_index(rows.unsqueeze(-1), configurations, self.accuracy.shape[1])
        accuracy = take(self.accuracy, cell)
        if repeats is None or self.repeats_ms is None:
            return accuracy, take(self.latency_ms, cell)
        # repeats_ms[row, configuration, number]
        if isinstance(self.count, Tensor):
            repeats = repeats.fmod(take(self.count, cell).clamp_min(1))
        measurement = flat_index(cell, repeats, self.repeats_ms.shape[-1])
        return accuracy, take(self.repeats_ms, measurement)

    def chosen(
        self,
        rows: Tensor,
        configurations: Tensor,
        budgets_ms: Tensor,
        added_ms: Tensor | None = None,
    ) -> Tensor:
        """Return the rewards of these choices, means over the measurements of each cell: float32
        [n, G].

        Args:
            rows: int64 [n].
            configurations: int64 [n, G].
            budgets_ms: float [n].
            added_ms: float [n, G], what is added to each latency; None for nothing.
        """
        accuracy, measured = self.outcome(rows, configurations)
        if self.repeats_ms is not None:
            measured = self.repeats_ms[rows.unsqueeze(-1), configurations]
        if added_ms is not None:
            each = measured.ndim > accuracy.ndim
            measured = measured + (added_ms.unsqueeze(-1) if each else added_ms)
        return self._mean(accuracy, measured, budgets_ms, configurations)

    def _mean(
        self, accuracy: Tensor, measured: Tensor, budgets_ms: Tensor, configurations: Tensor
    ) -> Tensor:
        """Return the rewards of cells: means over the last axis of `measured`, if it has one more.

        That axis holds the measurements of a cell."""
        budgets_ms = budgets_ms.unsqueeze(-1)
        if measured.ndim == accuracy.ndim:
            return self.reward_of(accuracy, measured, budgets_ms, configurations)
        rewards = self.reward_of(
            accuracy.unsqueeze(-1), measured, budgets_ms.unsqueeze(-1), configurations.unsqueeze(-1)
        )
        return rewards.nanmean(-1)

    def reward_of(
        self, accuracy: Tensor, latency_ms: Tensor, budgets_ms: Tensor, configurations: Tensor
    ) -> Tensor:
        """Return the reward of each outcome. The arguments broadcast against each other, and the
        result has their common shape; configurations are int64."""
        if self.rule is not None:
            return self.rule.mean_reward(accuracy, latency_ms, budgets_ms)
        if self.function:
            return self.function(accuracy, latency_ms, budgets_ms, configurations)
        complexity: Tensor | float = 0.0
        if self.kind.uses_complexity:
            complexity = take(self.complexity, configurations)
        formula = self.kind.faster or self.kind.formula
        assert formula is not None
        return formula(accuracy, latency_ms, budgets_ms, complexity, self.config)
