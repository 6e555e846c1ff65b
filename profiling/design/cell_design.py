"""Which cells of a profile to measure, where measuring all of them costs too much.

The first round draws cells at random, balanced (`balanced_cells`). A further round draws at random
too, and adds cells that somebody chose by the outcomes so far (`CellDesign.next_round`). Each cell
keeps its round, and the probability with which that round drew it, given the rounds before. So
every round estimates the sum over all cells without bias: what was measured before it counts once,
and what it drew by the inverse of the probability. `inverse_weights` has the mean of these
estimates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knobwise.envs.tables.profile_table import ProfileTable

AT_RANDOM = 0.25
"""At least this share of the seconds of a further round is spent on random cells."""


class Outlook(NamedTuple):
    """What a profile of part of the cells tells about measuring more of it."""

    score: Tensor
    """float64 [N, C]; cells with the highest are measured first, −inf for what must not be
    chosen."""
    latency_ms: Tensor
    """float64 [N, C], expected or measured."""
    gain: float
    """In utility, of choosing for each input over one choice for all, as far as is known."""


@dataclass(frozen=True)
class CellDesign:
    """The cells of a profile that are measured, [N, C] each."""

    probability: NDArray[np.float64]
    """With which a cell was drawn in its round; 1 if certain, NaN if it is not measured."""
    rounds: NDArray[np.int32]
    """In which it was drawn, from 1; 0 if in none."""
    sure: NDArray[np.bool_] | None = None
    """Cells that are measured whatever is drawn, and that stand for themselves alone."""

    @property
    def weight(self) -> NDArray[np.float64]:
        """How many cells each measured cell stands for, 0 where nothing is measured."""
        weights = inverse_weights(self.probability, self.rounds)
        return weights if self.sure is None else np.where(self.sure, 1.0, weights)

    def with_sure(self, cells: NDArray[np.bool_]) -> CellDesign:
        """Return a design that measures these cells, bool [N, C], whatever is drawn: they depend on
        no outcome of their own samples, as the choices of a policy that was fitted on others."""
        probability = np.where(cells & ~self.cells, 1.0, self.probability)
        return replace(self, probability=probability, sure=cells)

    @property
    def cells(self) -> NDArray[np.bool_]:
        """Mark the cells to measure, bool [N, C]."""
        drawn = self.rounds > 0
        return drawn if self.sure is None else drawn | self.sure

    @classmethod
    def first_round(
        cls, whole: NDArray[np.bool_], configurations: int, per_sample: int, seed: int = 0
    ) -> CellDesign:
        """Draw `per_sample` cells of each sample, and all cells of those that are measured whole,
        bool [N]."""
        cells = balanced_cells(len(whole), configurations, per_sample, seed).numpy()
        probability = np.where(cells, per_sample / configurations, np.nan)
        probability[whole] = 1.0
        return cls(probability, (~np.isnan(probability)).astype(np.int32))

    def added(
        self, cells: NDArray[np.bool_], probability: float = 1.0, number: int = 0
    ) -> CellDesign:
        """Return a design with further cells, bool [N, C], drawn in round `number` with this
        probability. Those that it has already stay as they are. By default they are certain, and of
        a round after the last."""
        new = cells & ~self.cells
        return replace(
            self,
            probability=np.where(new, probability, self.probability),
            rounds=np.where(new, number or self.rounds.max() + 1, self.rounds).astype(np.int32),
        )

    def next_round(
        self,
        score: NDArray[np.float64],
        cell_s: NDArray[np.float64],
        stage_s: NDArray[np.float64],
        spent_s: float,
        seed: int = 0,
    ) -> CellDesign:
        """Return a design with a further round.

        At least `AT_RANDOM` of its seconds are spent on cells that are drawn from all that are
        left, each with the same probability; the others on the cells with the highest scores.

        Args:
            score: [N, C], −inf for cells that must not be chosen.
            cell_s: [N, C], seconds that a cell takes.
            stage_s: [N], seconds that the first cell of a sample takes beyond that.
            spent_s: seconds to spend.
        """
        number = int(self.rounds.max()) + 1
        draws = np.random.default_rng((seed, number))
        free = np.flatnonzero(~self.cells)
        if not len(free):
            return self
        # how many depends on what is expected of all, not on which are drawn
        each = cell_s.ravel()[free].mean()
        of_sample = (~self.cells).sum(1)
        count = len(free)
        for _ in range(5):
            hit = 1 - (1 - count / len(free)) ** of_sample
            stages = (stage_s * hit).sum() / count
            count = min(int(np.ceil(AT_RANDOM * spent_s / (each + stages))), len(free))
        random = np.zeros(self.cells.shape, bool)
        random.flat[draws.permutation(free)[:count]] = True
        visited = random.any(1)
        random_s = cell_s[random].sum() + stage_s[visited].sum()
        # by descending score, while seconds are left
        scores = np.where(self.cells | random, -np.inf, score).ravel()
        order = np.argsort(-scores, kind="stable")
        order = order[scores[order] > -np.inf]
        samples = order // self.cells.shape[1]
        cost = cell_s.ravel()[order]
        _, first = np.unique(samples, return_index=True)
        cost[first] += np.where(visited, 0.0, stage_s)[samples[first]]
        left = min(spent_s - random_s, random_s * (1 / AT_RANDOM - 1))
        best = np.zeros(self.cells.shape, bool)
        best.flat[order[np.cumsum(cost) <= left]] = True
        return self.added(random, count / len(free), number).added(best, 1.0, number)

    def measured(self, done: NDArray[np.bool_]) -> CellDesign:
        """Return the part of the design that has been measured, bool [N, C]. Of the last round,
        which was interrupted, a random part was drawn then."""
        last = (self.rounds == self.rounds.max()) & (self.probability < 1)
        share = float(done[last].mean()) if last.any() else 1.0
        probability = np.where(last, self.probability * share, self.probability)
        return replace(
            self,
            probability=np.where(done, probability, np.nan),
            rounds=np.where(done, self.rounds, 0).astype(np.int32),
            sure=None if self.sure is None else self.sure & done,
        )


def inverse_weights(
    probability: NDArray[np.float64], rounds: NDArray[np.int32]
) -> NDArray[np.float64]:
    """Weigh the measured cells of a design, so that for each cell of the profile the expected
    weight is 1: float64 [N, C], 0 where nothing was measured.

    A weighted mean over all N·C cells is then unbiased, whatever the chosen cells were chosen by.
    In the estimate of one round a cell from an earlier round counts once, a random one of this
    round by its inverse probability, and a chosen one of this round not at all, since it stands for
    no other. The first round counts as much as `1 / AT_RANDOM` others, which draw fewer.
    """
    last = int(rounds.max())
    shares = np.zeros(last + 2)
    for number in range(1, last + 1):
        # cells that were only chosen give no estimate
        if number == 1 or (probability[rounds == number] < 1).any():
            shares[number] = 1.0 if number > 1 else 1 / AT_RANDOM
    shares /= shares.sum()
    later = shares[::-1].cumsum()[::-1]
    # [N, C]: the share of the rounds after that of the cell
    after = later[np.minimum(rounds + 1, last + 1)]
    drawn = (probability < 1) | (rounds == 1)
    of_round = np.where(drawn, shares[rounds] / np.nan_to_num(probability, nan=1.0), 0.0)
    return np.where(rounds > 0, of_round + after, 0.0)


def balanced_cells(samples: int, configurations: int, per_sample: int, seed: int = 0) -> Tensor:
    """Draw `per_sample` configurations for each sample at random, bool [samples, configurations].

    Of every C samples one after the other, C the number of configurations, each configuration is
    drawn for `per_sample`: the columns of a random Latin square. Every cell has the same
    probability, per_sample / C. With the same seed more cells include fewer.
    """
    draws = np.random.default_rng(seed)
    cells = np.zeros((samples, configurations), bool)
    for first in range(0, samples, configurations):
        # a cyclic square, its rows, columns and symbols in random order
        row = draws.permutation(configurations)[: samples - first, None]
        column = draws.permutation(configurations)[:per_sample]
        symbol = draws.permutation(configurations)
        drawn = symbol[(row + column) % configurations]
        np.put_along_axis(cells[first : first + configurations], drawn, True, axis=1)
    return torch.from_numpy(cells)


def with_cells(table: ProfileTable, cells: Tensor) -> ProfileTable:
    """Return a table without the measurements outside `cells`, bool [N, C].

    A sample or a configuration that would lose all of its measurements keeps them.
    """
    kept = cells & table.mask
    kept = kept | (table.mask & ~kept.any(1, keepdim=True))
    kept = kept | (table.mask & ~kept.any(0))
    repeats_ms = table.repeats_ms
    if repeats_ms is not None:
        repeats_ms = repeats_ms.where(kept.unsqueeze(-1), torch.nan)
    first_look_ms = table.first_look_ms
    if first_look_ms is not None:
        first_look_ms = first_look_ms.where(kept, 0.0)
    return replace(
        table,
        mask=kept,
        accuracy=table.accuracy.where(kept, torch.nan),
        latency_ms=table.latency_ms.where(kept, torch.nan),
        repeats_ms=repeats_ms,
        first_look_ms=first_look_ms,
        costs={name: cost.where(kept, torch.nan) for name, cost in table.costs.items()},
    )
