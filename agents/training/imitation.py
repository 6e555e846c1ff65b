"""Lessons: a teacher's expectations about requests, for a policy to imitate.

The teacher can be asked about any request. A policy learns from requests that are composed of
samples, and only an eighth of these are unchanged samples: on the samples that it was fitted on,
the teacher predicts too closely what was measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.agents.stack.teacher import Fitted
from knobwise.common.progress import progress
from knobwise.envs.configurations.drift import drawn_drift
from knobwise.envs.tables.profile_table import ProfileTable

REQUESTS = 8192
"""Requests that each network learns from; fewer if memory would not suffice or training draws
fewer."""
LIMITS = 4
"""Limits that the teacher is asked about for each request."""
MOST_CELLS = 1 << 25
"""Most cells in memory: requests × limits × configurations × networks."""
BEYOND = (0.8, 1.15)
"""Range of the limits: factors on the least and on the largest judged limit."""


class Lessons:
    """Requests, limits and the teacher's worths for them, for M networks side by side.

    Attributes:
        parts: normalised features `x` float [M, R, width]; `limit` [M, R, V]; `worth` float
            [M, R, V, C], the expected worth of every configuration; and under drift `offset`, of
            ln ms, [M, R, V, C].
    """

    def __init__(
        self,
        fitted: Fitted,
        table: ProfileTable,
        judged: Tensor,
        draws: int,
        seed: int,
        size: float,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        # each network learns from the teacher that saw the same samples
        teachers = [*zip(fitted.of_folds, fitted.folds, strict=True), (fitted.teacher, None)]
        cells = len(teachers) * LIMITS * table.num_configurations
        count = max(1, min(REQUESTS, MOST_CELLS // cells, draws))
        lessons = []
        with progress("preparing lessons", len(teachers), quiet_s=2) as tick:
            for finished, (teacher, held_out) in enumerate(teachers, 1):
                rows = _rows_without(fitted.rows, held_out)
                x = composed_of(table, fitted.teacher.normaliser, rows, count, generator)
                limits = drawn_limits(judged, (count, LIMITS), generator)
                offsets = drawn_drift(table.configurations, size, (count, LIMITS), generator)
                lesson = {"x": x, "limit": limits, "worth": teacher.teach(x, limits, offsets)}
                if offsets is not None:
                    lesson["offset"] = offsets
                lessons.append(lesson)
                tick(finished, "teachers")
        self.parts: dict[str, Tensor] = {}
        for name in lessons[0]:
            self.parts[name] = torch.stack([lesson[name] for lesson in lessons])

    def draw(self, contexts: int) -> dict[str, Tensor]:
        """Draw n random lessons for each network, a tensor [M, n, …] of each part."""
        members, requests, count = self.parts["limit"].shape
        member = torch.arange(members).unsqueeze(1)
        row = torch.randint(requests, (members, contexts))
        # a request has several limits, but its features once
        lesson = member, row, torch.randint(count, (members, contexts))
        drawn = {name: values[lesson] for name, values in self.parts.items() if name != "x"}
        return {"x": self.parts["x"][member, row], **drawn}


def _rows_without(rows: Tensor, held_out: Tensor | None) -> Tensor:
    """Return rows without those at the held-out positions; all of them if none would be left."""
    kept = torch.ones(len(rows), dtype=torch.bool)
    if held_out is not None:
        kept[held_out] = False
    if kept.any():
        return rows[kept]
    return rows


def drawn_limits(judged: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw limits evenly on a log scale, a third of them from the judged limits.

    Args:
        judged: float [B].
        shape: the shape of the result.
        generator: the source of the draws.
    """
    # evenly on a log scale, somewhat beyond the judged limits
    low = (BEYOND[0] * judged.amin()).log()
    high = (BEYOND[1] * judged.amax()).log()
    even = torch.lerp(low, high, torch.rand(shape, generator=generator)).exp()
    from_judged = judged[torch.randint(len(judged), shape, generator=generator)]
    third = torch.rand(shape, generator=generator) < 1 / 3
    return torch.where(third, from_judged, even)


def composed_of(
    table: ProfileTable,
    normaliser: FeatureNormaliser,
    rows: Tensor,
    count: int,
    generator: torch.Generator,
) -> Tensor:
    """Return normalised features [count, width] of requests composed of these rows, int64 [n]."""
    # missing values are indicated in columns of their own, the last block
    blocks = {name: block[rows] for name, block in table.features.items()}
    samples = normaliser.normal(blocks, len(rows))
    widths = list(normaliser.sizes.values())
    indicators = samples.shape[1] - sum(widths)
    if indicators:
        widths.append(indicators)
    return normaliser.project(composed(samples, widths, count, generator))


def composed(x: Tensor, widths: list[int], count: int, generator: torch.Generator) -> Tensor:
    """Compose requests of samples: features [n, width] → [count, width].

    1. Cross: half of the time, every block of columns comes from a sample of its own.
    2. Mix: half of the time, the result is a weighted mean with a second crossed sample.
    3. In half of the requests, up to half of the columns come from a second mix.

    Args:
        x: features [n, width] of samples.
        widths: the widths of the blocks of columns.
        count: the number of requests.
        generator: the source of the draws.
    """
    first = _mixed(x, widths, count, generator)
    second = _mixed(x, widths, count, generator)
    share = _half_or_less(count, generator)
    return torch.where(_uniform(count, x.shape[1], generator) < share, second, first)


def _mixed(x: Tensor, widths: list[int], count: int, generator: torch.Generator) -> Tensor:
    """Return crossed samples, half of them as a mean with another one."""
    share = _half_or_less(count, generator)
    first = _crossed(x, widths, count, generator)
    second = _crossed(x, widths, count, generator)
    return torch.lerp(first, second, share)


def _crossed(x: Tensor, widths: list[int], count: int, generator: torch.Generator) -> Tensor:
    """Return samples, in half of which every block comes from a sample of its own."""
    n = len(x)
    rows = torch.randint(n, (count, 1), generator=generator).expand(-1, len(widths))
    others = torch.randint(n, (count, len(widths)), generator=generator)
    rows = torch.where(_uniform(count, 1, generator) < 0.5, others, rows)
    blocks = [block[rows[:, index]] for index, block in enumerate(x.split(widths, 1))]
    return torch.cat([x.new_zeros(count, 0), *blocks], 1)


def _half_or_less(count: int, generator: torch.Generator) -> Tensor:
    """Return 0 for half of the requests, and a share of up to a half for the others: [count, 1]."""
    return 0.5 * _uniform(count, 1, generator) * (_uniform(count, 1, generator) < 0.5)


def _uniform(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.rand((rows, columns), generator=generator)
