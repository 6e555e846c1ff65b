"""Distillation targets: the utility that a teacher expects of requests, for a policy to imitate.

The teacher can be asked about any request. On the samples that it was fitted on, its predictions
are too close to what was measured. So a policy learns from requests that are composed of samples;
only an eighth of these requests are unchanged samples.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from knobwise.agents.controller.drift import drift_inputs
from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.teacher.teacher import FittedTeacher, Teacher
from knobwise.common.progress import progress
from knobwise.envs.tables.drift import drawn_drift
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.tensor_file import joined_by_name

REQUESTS = 8192
"""Requests that each network learns from; fewer where training draws fewer, or memory is short."""
LIMITS = 4
"""Limits that the teacher is asked about for each request."""
MAX_CELLS = 1 << 25
"""The most cells in memory: requests × limits × configurations × networks."""
BEYOND = (0.8, 1.15)
"""Limits are drawn from the first factor × the lowest judged limit to the second × the highest."""


def distillation_targets(
    fitted: FittedTeacher,
    table: ProfileTable,
    *,
    judged: Tensor,
    draws: int,
    seed: int,
    drift: float,
    values: Tensor,
    augment: float = 0.0,
    device: torch.device | str = "cpu",
) -> TensorDict:
    """Return what the teachers of M networks expect for R requests each, under V limits each.

    Args:
        fitted: the teachers.
        table: the profile whose samples the requests are composed of.
        judged: float [B], the judged limits.
        draws: contexts that training will draw; R is never larger.
        seed: the seed of requests, limits and drift.
        drift: the largest size of drift, in ln ms; 0 for none.
        values: float [values, C], see `drift_values`.
        augment: the standard deviation of the noise on the features of every other request; 0 for
            none. The teacher is asked about the features with noise.
        device: where the result lies.

    Returns:
        float [M, R, V, …]. `x`: the normalised features, the same under all limits of a request.
        `limit`. `utility` [M, R, V, C]: the expected utility of every configuration. Under drift
        `by_value` [M, R, V, values]: what the heads read of it.
    """
    generator = torch.Generator().manual_seed(seed)
    teachers = _teachers_of_networks(fitted)
    cells = len(teachers) * LIMITS * table.num_configurations
    count = max(1, min(REQUESTS, MAX_CELLS // cells, draws))
    targets = []
    with progress("computing distillation targets", len(teachers), quiet_s=2) as tick:
        for finished, (teacher, rows) in enumerate(teachers, 1):
            x = composed_of(table, fitted.teacher.normaliser, rows, count, generator)
            if augment:
                x[::2] += fitted.teacher.normaliser.noise_like(x[::2], augment, generator)
            limits = drawn_limits(judged, (count, LIMITS), generator)
            offsets = drawn_drift(table.configurations, drift, (count, LIMITS), generator)
            target = {
                "x": x,
                "limit": limits,
                "utility": teacher.expected_utility(x, limits, offsets),
            }
            if offsets is not None:
                target["by_value"] = drift_inputs(offsets, values)
            targets.append(target)
            tick(finished, "teachers")
    parts = joined_by_name(targets, torch.stack)
    # moved before x is expanded, which takes no memory
    parts = {name: part.to(device) for name, part in parts.items()}
    parts["x"] = parts["x"].unsqueeze(2).expand(-1, -1, LIMITS, -1)
    return TensorDict(parts, parts["limit"].shape)


def _teachers_of_networks(fitted: FittedTeacher) -> list[tuple[Teacher, Tensor]]:
    """Return for each network the teacher that was fitted on the same samples, and their rows; the
    last on all."""
    teachers = []
    for teacher, held_out in zip(fitted.of_folds, fitted.folds, strict=True):
        kept = torch.ones(len(fitted.rows), dtype=torch.bool)
        kept[held_out] = False
        teachers.append((teacher, fitted.rows[kept]))
    return [*teachers, (fitted.teacher, fitted.rows)]


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
    return normaliser.project(compose_requests(samples, widths, count, generator))


def compose_requests(
    x: Tensor, widths: list[int], count: int, generator: torch.Generator
) -> Tensor:
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

    def uniform(columns: int = 1) -> Tensor:
        return torch.rand((count, columns), generator=generator)

    def half_or_less() -> Tensor:
        # 0 for half of the requests, and a share of up to a half for the others
        return 0.5 * uniform() * (uniform() < 0.5)

    def crossed() -> Tensor:
        rows = torch.randint(len(x), (count, 1), generator=generator).expand(-1, len(widths))
        others = torch.randint(len(x), (count, len(widths)), generator=generator)
        rows = torch.where(uniform() < 0.5, others, rows)
        blocks = [block[rows[:, index]] for index, block in enumerate(x.split(widths, 1))]
        return torch.cat([x.new_zeros(count, 0), *blocks], 1)

    def mixed() -> Tensor:
        share = half_or_less()
        first = crossed()
        return torch.lerp(first, crossed(), share)

    first = mixed()
    second = mixed()
    share = half_or_less()
    return torch.where(uniform(x.shape[1]) < share, second, first)
