"""The contexts that all environments draw: samples with limits, and the reward that suits these."""

from __future__ import annotations

import math
import multiprocessing
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.envs.bandit.budgets import MIN_LATENCY_MS, subsample
from knobwise.envs.bandit.faster import flat_index, take
from knobwise.envs.bandit.reward_kinds import KINDS
from knobwise.envs.bandit.rule_choice import rule_of
from knobwise.envs.bandit.settings import BudgetConfig, RewardConfig, reward_of
from knobwise.envs.tables.cells import Cells
from knobwise.envs.tables.profile_table import ProfileTable

WHOLE = {
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
}
"""The types of whole numbers; bool is none."""


def fresh_seed() -> int:
    """Draw a seed from torch's generator, so that `torch.manual_seed` fixes it.

    Processes that were forked from one another share the state of that generator. The name of the
    process is mixed into the seed, so that they still get different ones.
    """
    drawn = int(torch.randint(1 << 62, ()))
    name = multiprocessing.current_process().name
    return drawn ^ (zlib.crc32(name.encode()) if multiprocessing.parent_process() else 0)


class RowSampler:
    """Draws rows of a table, evenly or balanced.

    Where several networks are trained side by side, each has a list of rows of its own, and rows
    are drawn from the lists in turn: row i of a draw comes from list i mod M.

    Args:
        table: the profile.
        rows: int64 [n], the rows to draw from; None for all. Or M such lists.
        balance: which groups of samples are balanced, see `BalanceConfig`.
        cells: what counts of the table; None for all that it has.

    Attributes:
        together: int64 [n], the rows of all lists, each once.

    Raises:
        InputError: a list is empty, is no list of whole numbers, or has rows that the table lacks.
    """

    def __init__(
        self,
        table: ProfileTable,
        rows: Tensor | Sequence[Tensor] | Sequence[int] | None = None,
        balance: str = "none",
        cells: Cells | None = None,
    ) -> None:
        if rows is None:
            rows = torch.arange(table.num_samples)
        single = isinstance(rows, Tensor) or not len(rows) or not isinstance(rows[0], Tensor)
        lists = [_as_rows(part) for part in ([rows] if single else rows)]
        self._lengths = torch.tensor([len(part) for part in lists])
        self.together = lists[0] if len(lists) == 1 else torch.cat(lists).unique()
        if self.together.min() < 0 or self.together.max() >= table.num_samples:
            raise InputError(
                f"rows: must be from 0 to {table.num_samples - 1}, the table's samples"
            )
        self._lists = pad_sequence(lists, batch_first=True)  # [M, longest]
        self._weights: Tensor | None = None
        if balance != "none":
            weights = row_weights(table, balance, self.together, cells)
            self._weights = pad_sequence([weights[part] for part in lists], batch_first=True)

    def __call__(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw rows, int64 [count]; without a generator by torch's own."""
        if len(self._lists) > 1 or self._weights is not None:
            return self._in_turn(count, generator)
        (rows,) = self._lists
        return rows.index_select(0, torch.randint(len(rows), (count,), generator=generator))

    def _in_turn(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Draw from the lists in turn, and by weight if they have weights."""
        lists, longest = self._lists.shape
        turn = torch.arange(count) % lists  # the list that each row is drawn from
        if self._weights is None:
            # a large number modulo the length, because the lists differ in length
            drawn = torch.randint(1 << 62, (count,), generator=generator) % self._lengths[turn]
        else:
            per_list = math.ceil(count / lists)
            drawn = torch.multinomial(self._weights, per_list, True, generator=generator)
            drawn = drawn.T.flatten()[:count]
        return take(self._lists, flat_index(turn, drawn, longest))


def _as_rows(rows: Any) -> Tensor:
    """Return a list of rows as int64 [n].

    Raises:
        InputError: it is empty, or something else, such as a mask, of which True and False would
            stand for the rows 1 and 0.
    """
    try:
        numbers = torch.as_tensor(rows)
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.empty(())
    if numbers.ndim == 1 and not len(numbers):
        raise InputError("the environment got no samples to draw from")
    if numbers.ndim != 1 or numbers.dtype not in WHOLE:
        shape, kind = [*numbers.shape], str(numbers.dtype).removeprefix("torch.")
        raise InputError(
            f"rows: is {kind} {shape}; must be the numbers of samples, one after the other, such "
            "as [0, 5, 7]; of a mask give torch.as_tensor(mask).nonzero()[:, 0], of a column of "
            "numbers rows.flatten(), and for several lists a list of tensors"
        )
    return numbers.long()


def row_weights(table: ProfileTable, by: str, rows: Tensor, cells: Cells | None = None) -> Tensor:
    """Compute how often each sample is drawn, float64 [N].

    Args:
        table: the profile.
        by: which groups of samples are balanced, see `BalanceConfig`.
        rows: int64 [n], the samples to draw from; all others get 0.
        cells: what counts of the table; None for all that it has.

    Raises:
        InputError: there is only one group.
    """
    if by == "configuration":
        members = (cells or table).mask[rows].double()
    else:
        types = table.question_types or ("unknown",) * table.num_samples
        names = np.array(table.dataset_names if by == "dataset" else types)
        kinds, group = np.unique(names[rows.numpy()], return_inverse=True)
        if len(kinds) < 2:
            raise InputError(
                f"balance.by={by}: the training samples of profile {table.name!r} have fewer than "
                f"two {by}s, so there is nothing to balance"
            )
        members = torch.nn.functional.one_hot(torch.from_numpy(group)).double()
    # members [n, groups]: a sample counts 1/size for each group that it is in
    # a sample that is not drawn from has weight 0
    weights = torch.zeros(table.num_samples, dtype=torch.float64)
    weights[rows] = members @ (1 / members.sum(0).clamp_min(1))
    return weights


class BudgetSampler:
    """Draw budgets for samples.

    Under `constraint="mean"` it draws values of a right answer instead.

    Args:
        cells: those of the samples.
        config: the settings.
        rows: int64 [n], the samples that ranges and quantiles are taken from; None for all.

    Attributes:
        largest: no budget that is drawn is larger, in ms, but for rounding.

    Raises:
        InputError: the strategy is unknown, or cannot use the numbers in the settings.
    """

    def __init__(self, cells: Cells, config: BudgetConfig, rows: Tensor | None = None) -> None:
        self.config = config
        rule = rule_of(config)
        rows = subsample(torch.arange(len(cells.mask)) if rows is None else rows)
        latencies_ms = cells.latency_ms[rows][cells.mask[rows]]
        self._draw = rule.strategy(config)(cells, config, latencies_ms)
        self.largest = max(self._draw.largest, MIN_LATENCY_MS)

    def __call__(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw a positive budget in ms for each of these samples, int64 [n] → float32 [n]."""
        return self._draw(rows, generator).clamp_min(MIN_LATENCY_MS)


class ContextSampler:
    """Draw contexts: rows, uniformly or balanced, and a budget for each.

    All environments draw through this class, so that equal seeds give equal contexts.

    Args:
        table: the profile.
        budget: the settings of budgets.
        rows, balance: the samples to draw from, and how often each, see `RowSampler`.
        seed: None for a fresh one, see `fresh_seed`.
        cells: what counts of the table; None for all that it has.
    """

    def __init__(
        self,
        table: ProfileTable,
        budget: BudgetConfig,
        rows: Tensor | Sequence[Tensor] | Sequence[int] | None,
        seed: int | None,
        balance: str = "none",
        cells: Cells | None = None,
    ) -> None:
        self.draw_rows = RowSampler(table, rows, balance, cells)
        self.budgets = BudgetSampler(cells or table, budget, self.draw_rows.together)
        self.generator = torch.Generator().manual_seed(fresh_seed() if seed is None else seed)
        self.before = self.generator.get_state()  # `set_back` to it draws the last contexts again

    def __call__(self, count: int, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Draw `count` contexts.

        Args:
            count: how many.
            chosen: int64 [count], rows that take the place of the drawn ones. Their budgets are
                drawn as ever.

        Returns:
            rows int64 [count]; budgets float32 [count] in ms.

        Raises:
            InputError: a chosen row is not among those to draw from.
        """
        self.before = self.generator.get_state()
        rows = self.draw_rows(count, self.generator)
        if chosen is not None:
            if not torch.isin(chosen, self.draw_rows.together).all():
                raise InputError(
                    f"reset options: row={chosen.tolist()} is not among the rows of this "
                    "environment"
                )
            rows = chosen
        return rows, self.budgets(rows, self.generator)

    def set_back(self, before: Tensor) -> None:
        """Return to an earlier value of `before`; the contexts drawn after it come again."""
        self.generator.set_state(before)


def chosen_context(
    options: Mapping[str, Any], table: ProfileTable, limit_key: str, count: int
) -> tuple[Tensor | None, Tensor | None]:
    """Read the options of `reset`, by which a person chooses `count` contexts.

    The options are `row` or `sample_id` (with `dataset`, where data sets share ids), and
    `budget_ms`, or under a mean budget `worth_ms`. A single row, budget or value holds for every
    context; else there is one for each.

    Returns:
        rows int64 [count], and limits float32 [count] in ms; None for what is to be drawn.

    Raises:
        InputError: another option, an unknown sample, or a limit that is not positive and finite.
    """
    if not options:
        return None, None
    known = ["row", limit_key]
    if "row" not in options:
        known += ["sample_id", "dataset"]
    for name in options:
        one_of("reset options", name, known)
    rows = options.get("row")
    if options.keys() & {"sample_id", "dataset"}:
        rows = _row_of_id(str(options.get("sample_id")), options.get("dataset"), table)
    float32 = torch.finfo(torch.float32)
    return (
        _checked("row", rows, np.int64, 0, table.num_samples - 1, count),
        _checked(limit_key, options.get(limit_key), np.float32, float32.tiny, float32.max, count),
    )


def _checked(
    name: str, value: object, dtype: type[np.generic], low: float, high: float, count: int
) -> Tensor | None:
    """Return numbers from low to high as a tensor [count]; one number holds for every context."""
    if value is None:
        return None
    # whole numbers stand for floats too, but nothing else is converted
    array = np.asarray(value)
    fits = np.can_cast(array.dtype, dtype, "same_kind") and array.dtype != bool
    fits = fits and array.shape in ((), (count,))
    if not fits or not ((low <= array) & (array <= high)).all():
        raise InputError(
            f"reset options: {name}={value!r}: must be from {low:g} to {high:g}; give one for all "
            f"environments, or {count}"
        )
    return torch.from_numpy(np.broadcast_to(array, count).astype(dtype))


def _row_of_id(sample_id: str, dataset: str | None, table: ProfileTable) -> int:
    known = np.array(table.sample_ids) == sample_id
    if dataset is not None:
        known &= np.array(table.dataset_names) == dataset
    rows = known.nonzero()[0].tolist()
    if len(rows) != 1:
        raise InputError(
            f"reset options: {len(rows)} samples of {table.name!r} have sample_id={sample_id!r} "
            f"and dataset={dataset!r} (None is any)"
        )
    return int(rows[0])


def reward_for(budget: BudgetConfig, reward: RewardConfig | str | None) -> RewardConfig:
    """Return the settings of a reward that is given as such, by its kind, or not at all.

    The default is that of the constraint of the budget, see `reward_of`.

    Raises:
        InputError: the reward does not go with the constraint of the budget.
    """
    default = reward_of(rule_of(budget).name)
    reward = reward or default
    if isinstance(reward, str):
        one_of("reward.kind", reward, KINDS)
        reward = RewardConfig(kind=reward, **KINDS[reward].settings)
    constraint = KINDS[default.kind].constraint
    if KINDS[reward.kind].constraint != constraint:
        suited = [kind for kind, entry in KINDS.items() if entry.constraint == constraint]
        raise InputError(
            f"reward.kind={reward.kind}: does not suit "
            f"budget.constraint={budget.constraint}, which goes with {', '.join(suited)}"
        )
    return reward
