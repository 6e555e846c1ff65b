"""Lessons: what a teacher makes of requests, for a policy to imitate.

The teacher can be asked about any request. A pupil learns from requests that are composed of
samples, and only an eighth of these are samples as they are: what the teacher predicts of those
that it was fitted on is too close to what was measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.agents.stack.teacher import Fitted
from knobwise.common.progress import progress
from knobwise.envs.configurations.drift import Drift
from knobwise.envs.tables.profile_table import ProfileTable

REQUESTS = 8192
"""Requests that each network learns from, fewer where they would take too much memory or would not
all be drawn."""
LIMITS = 4
"""Limits that the teacher is asked about for each of them."""
MOST_CELLS = 1 << 25
"""Requests × limits × configurations × networks."""
BEYOND = (0.8, 1.15)
"""Budgets reach from so many times the least judged one to so many times the largest."""


class Lessons:
    """Requests, limits and what a teacher makes of them, for M networks side by side.

    Attributes:
        x: normalised features, float [M, R, width].
        limits: [M, R, V], or pairs [M, R, V, 2].
        worths: float [M, R, V, C].
    """

    def __init__(
        self,
        fitted: Fitted,
        table: ProfileTable,
        normaliser: FeatureNormaliser,
        judged: Tensor,
        draws: int,
        seed: int,
        size: float = 0.0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        pupils = [*zip(fitted.of_folds, fitted.folds, strict=True), (fitted.teacher, None)]
        cells = len(pupils) * LIMITS * table.num_configurations
        count = max(1, min(REQUESTS, MOST_CELLS // cells, draws))
        x = []
        limits = []
        worths = []
        offsets: list[Tensor] = []
        drift = Drift(table.configurations, size)
        with progress("preparing lessons", len(pupils), quiet_s=2) as tick:
            for number, (teacher, held_out) in enumerate(pupils, 1):
                kept = torch.ones(len(fitted.rows), dtype=torch.bool)
                if held_out is not None:
                    kept[held_out] = False
                if kept.any():
                    rows = fitted.rows[kept]
                else:
                    rows = fitted.rows
                requests = composed_of(table, normaliser, rows, count, generator)
                under = drawn_limits(judged, (count, LIMITS), generator)
                drifts = drift.draw((count, LIMITS), generator)
                x.append(requests)
                limits.append(under)
                if drifts is not None:
                    offsets.append(drifts)
                worths.append(teacher.teach(requests, under, drifts))
                tick(number, "teachers")
        self.x = torch.stack(x)
        self.limits = torch.stack(limits)
        self.worths = torch.stack(worths)
        if offsets:
            self.offsets: Tensor | None = torch.stack(offsets)
        else:
            self.offsets = None

    def draw(
        self,
        contexts: int,
        device: torch.device | str = "cpu",
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return features [M, n, width], limits [M, n] and worths [M, n, C] of n random lessons."""
        members, requests, several = self.limits.shape[:3]
        member = torch.arange(members).unsqueeze(1)
        row = torch.randint(requests, (members, contexts))
        which = torch.randint(several, (members, contexts))
        at = member, row, which
        if self.offsets is None:
            offset = None
        else:
            offset = self.offsets[at].to(device)
        parts = self.x[member, row], self.limits[at], self.worths[at]
        x, limits, worths = (part.to(device) for part in parts)
        return x, limits, worths, offset


def drawn_limits(judged: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw limits evenly in logarithm, a third of them among the judged ones.

    Args:
        judged: float [B], or pairs [B, 2].
    """
    low = (BEYOND[0] * judged.amin(0)).log()
    high = (BEYOND[1] * judged.amax(0)).log()
    pair = judged.shape[1:]
    even = torch.lerp(low, high, torch.rand((*shape, *pair), generator=generator)).exp()
    among = judged[torch.randint(len(judged), shape, generator=generator)]
    third = torch.rand(shape, generator=generator) < 1 / 3
    return torch.where(third.reshape(*shape, *(1 for _ in pair)), among, even)


def composed_of(
    table: ProfileTable,
    normaliser: FeatureNormaliser,
    rows: Tensor,
    count: int,
    generator: torch.Generator,
) -> Tensor:
    """Return features [count, width] of requests composed of these rows (int64 [n])."""
    blocks = {name: block[rows] for name, block in table.features.items()}
    samples = normaliser.normal(blocks, len(rows))
    widths = list(normaliser.sizes.values())
    indicators = samples.shape[1] - sum(widths)  # of missing values
    if indicators:
        widths.append(indicators)
    return normaliser.project(composed(samples, widths, count, generator))


def composed(x: Tensor, widths: list[int], count: int, generator: torch.Generator) -> Tensor:
    """Compose requests of samples: features [n, width] in blocks of these widths → [count, width].

    Each is made of two: in half of these each block of columns comes from another sample; half of
    them are a mean with another sample. In half of the requests some columns, up to half of them,
    come from the second.
    """
    first = _mixed(x, widths, count, generator)
    second = _mixed(x, widths, count, generator)
    share = 0.5 * _uniform(count, 1, generator) * (_uniform(count, 1, generator) < 0.5)
    return torch.where(_uniform(count, x.shape[1], generator) < share, second, first)


def _mixed(x: Tensor, widths: list[int], count: int, generator: torch.Generator) -> Tensor:
    share = 0.5 * _uniform(count, 1, generator) * (_uniform(count, 1, generator) < 0.5)
    return torch.lerp(
        _crossed(x, widths, count, generator), _crossed(x, widths, count, generator), share
    )


def _crossed(x: Tensor, widths: list[int], count: int, generator: torch.Generator) -> Tensor:
    n = len(x)
    rows = torch.randint(n, (count, 1), generator=generator).expand(-1, len(widths))
    others = torch.randint(n, (count, len(widths)), generator=generator)
    rows = torch.where(_uniform(count, 1, generator) < 0.5, others, rows)
    blocks = [block[rows[:, number]] for number, block in enumerate(x.split(widths, 1))]
    if blocks:
        return torch.cat(blocks, 1)
    return x.new_zeros(count, 0)


def _uniform(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.rand((rows, columns), generator=generator)
