"""Which samples contexts are drawn from, and how often each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from knobwise.common.errors import InputError
from knobwise.envs.bandit.faster import flat_index, take
from knobwise.envs.tables.cells import Cells
from knobwise.envs.tables.profile_table import ProfileTable


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
        InputError: a list is empty, or has rows that the table lacks.
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
        if isinstance(rows, Tensor) or not len(rows) or not isinstance(rows[0], Tensor):
            rows = [torch.as_tensor(rows)]
        lists = [torch.as_tensor(part, dtype=torch.long) for part in rows]
        self._lengths = torch.tensor([len(part) for part in lists])
        if not self._lengths.all():
            raise InputError("the environment got no samples to draw from")
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
