"""What is believed of cells that nobody measured.

Training and policies go by predictions where nothing was measured. Where decisions are judged, a
prediction counts until it is checked: the estimate is doubly robust (Dudík, Langford and Li 2011,
"Doubly Robust Policy Evaluation and Learning"), the prediction plus, where a cell was measured, its
error divided by the probability of measuring it. The mean of such estimates is right whatever the
predictions are, if the cells were drawn at random. Where few were drawn it is uncertain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from knobwise.envs.tables.profile_table import ProfileTable


@dataclass(frozen=True, eq=False)
class Beliefs:
    """Predictions beside what was measured of N samples × C configurations."""

    measured: ProfileTable
    """The profile, with holes."""
    filled: ProfileTable
    """Values in all cells: those measured, and elsewhere predictions. To choose by: the estimates
    of single cells are too noisy for that."""
    predicted: ProfileTable
    """Predictions for all cells, each from other samples than its own (cross-fitted)."""
    weight: Tensor
    """float32 [N, C], how many cells a measured cell stands for: 1 / the probability of measuring
    it; 0 where nothing was measured."""

    def estimate(
        self, cells: tuple[Tensor, Tensor], values_in: Callable[[ProfileTable], Tensor]
    ) -> Tensor:
        """Return doubly robust estimates of values, which may lie outside the range of these.

        Args:
            cells: rows int64 and configurations int64, which broadcast.
            values_in: looks the values of these cells up in a table.
        """
        expected = values_in(self.predicted)
        weight = self.weight[cells].to(expected)
        error = values_in(self.measured) - expected
        return expected + (weight * error).where(weight > 0, 0.0)


def effective_cells(weight: Tensor) -> float:
    """Return how many measured cells of equal weight would tell as much as these: (Σw)²/Σw² (Kish
    1965, "Survey Sampling"), 0 where nothing was measured."""
    total = float(weight.sum())
    return total**2 / max(float(weight.square().sum()), 1e-12)
