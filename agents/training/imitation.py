"""Lessons: a teacher's expectations about requests, for a policy to imitate.

The teacher can be asked about any request. On the samples that it was fitted on, its predictions
are too close to what was measured. So a policy learns from requests that are composed of samples;
only an eighth of these requests are unchanged samples.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from knobwise.agents.controller.networks import drift_inputs
from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.agents.stack.teacher import Fitted
from knobwise.common.progress import progress
from knobwise.envs.configurations.drift import drawn_drift
from knobwise.envs.tables.profile_table import ProfileTable

REQUESTS = 8192
"""Requests that each network learns from; fewer where training draws fewer, or memory is short."""
LIMITS = 4
"""Limits that the teacher is asked about for each request."""
MOST_CELLS = 1 << 25
"""The most cells in memory: requests × limits × configurations × networks."""
BEYOND = (0.8, 1.15)
"""Limits are drawn from the first factor × the lowest judged limit to the second × the highest."""


class Lessons:
    """What the teachers of M networks expect for R requests each, under V limits each.

    Args:
        fitted: the teachers.
        table: the profile whose samples the requests are composed of.
        judged: float [B], the judged limits.
        draws: lessons that training will draw; R is never larger.
        seed: the seed of requests, limits and drift.
        drift: the largest size of drift, in ln ms; 0 for none.
        values: float [values, C], see `drift_values`.

    Attributes:
        parts: float tensors by name. `x` [M, R, width]: the normalised features. `limit` [M, R, V].
            `worth` [M, R, V, C]: the expected worth of every configuration. Under drift `by_value`
            [M, R, V, values]: what the heads read of it.
    """

    def __init__(
        self,
        fitted: Fitted,
        table: ProfileTable,
        judged: Tensor,
        draws: int,
        seed: int,
        drift: float,
        values: Tensor,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        # each network learns from the teacher that was fitted on the same samples; the last on all
        teachers = [*zip(fitted.of_folds, fitted.folds, strict=True), (fitted.teacher, None)]
        cells = len(teachers) * LIMITS * table.num_configurations
        count = max(1, min(REQUESTS, MOST_CELLS // cells, draws))
        lessons = []
        with progress("preparing lessons", len(teachers), quiet_s=2) as tick:
            for finished, (teacher, held_out) in enumerate(teachers, 1):
                rows = _rows_without(fitted.rows, held_out)
                x = composed_of(table, fitted.teacher.normaliser, rows, count, generator)
                limits = drawn_limits(judged, (count, LIMITS), generator)
                offsets = drawn_drift(table.configurations, drift, (count, LIMITS), generator)
                lesson = {"x": x, "limit": limits, "worth": teacher.teach(x, limits, offsets)}
                if offsets is not None:
                    lesson["by_value"] = drift_inputs(offsets, values)
                lessons.append(lesson)
                tick(finished, "teachers")
        self.parts: dict[str, Tensor] = {}
        for name in lessons[0]:
            self.parts[name] = torch.stack([lesson[name] for lesson in lessons])

    def draw(self, contexts: int) -> dict[str, Tensor]:
        """Draw random lessons for each network: of each part a tensor [M, contexts, …]."""
        members, requests, limits = self.parts["limit"].shape
        request = torch.randint(requests, (members, contexts))
        limit = torch.randint(limits, (members, contexts))
        # positions in the flattened parts, which are looked up several times as fast
        request += requests * torch.arange(members).unsqueeze(1)
        under_limit = limits * request + limit
        # the features of a request are the same under all its limits
        drawn = {"x": functional.embedding(request, self.parts["x"].flatten(0, 1))}
        for name, part in self.parts.items():
            if name == "limit":
                drawn[name] = part.take(under_limit)
            elif name != "x":
                drawn[name] = functional.embedding(under_limit, part.flatten(0, 2))
        return drawn


def _rows_without(rows: Tensor, held_out: Tensor | None) -> Tensor:
    """Return all rows but those at the held-out positions; all rows if none would be left."""
    kept = torch.ones(len(rows), dtype=torch.bool)
    if held_out is not None:
        kept[held_out] = False
    if kept.any():
        return rows[kept]
    return rows


def drawn_limits(judged: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw limits: a third of them are judged limits, the others lie evenly on a log scale.

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
    # the last block of columns tells which values are missing, if any can be
    samples = normaliser.normal(table.blocks(rows), len(rows))
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
    """Return crossed samples; half of them are averaged with a second crossed sample."""
    share = _half_or_less(count, generator)
    first = _crossed(x, widths, count, generator)
    second = _crossed(x, widths, count, generator)
    return torch.lerp(first, second, share)


def _crossed(x: Tensor, widths: list[int], count: int, generator: torch.Generator) -> Tensor:
    """Draw samples; half of them are put together, each block from another sample."""
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
