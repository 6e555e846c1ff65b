"""Latency budgets: those that train a policy, those that judge it, and their encoding."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from knobwise.common.errors import InputError
from knobwise.envs.bandit.settings import BudgetConfig
from knobwise.envs.tables.cells import Cells, averages, unread_ms
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.time_outs import time_outs

DRAWN_BY = "quantiles"
"""The strategy where the settings name none."""
FACTORS = (0.8, 1.0, 1.2)
"""Multiples of a sample's own latency that budget=relative draws from."""
RANGE = (0.03, 0.97)
"""The quantiles of all profiled latencies that budget=quantiles and budget=uniform lie between."""
DEFAULT_QUANTILES = (0.10, 0.25, 0.50, 0.75, 0.90)
"""The quantiles of all profiled latencies that default budgets are."""
BEYOND = 0.15
"""How far budget=spread goes beyond its ends, in ln ms."""
SPARSE = 0.5
"""Where a smaller share of the cells was measured, the fastest configuration of a sample is rarely
among them."""
FEASIBLE_SHARE = 0.75
"""The share of the samples that can meet the lowest default budget."""
MAX_SAMPLES = 1 << 19
"""Statistics such as quantiles use at most this many samples, so that large tables need little
memory."""
OCTAVES = 7
"""Octaves from the lowest to the highest frequency of a budget's encoding by pairs."""
MIN_LATENCY_MS = 1e-9
"""Lower bound of budgets and of the arguments of logarithms. It is below any cost in any unit, even
USD."""


def subsample(samples: Tensor, most: int = MAX_SAMPLES) -> Tensor:
    """Keep every k-th sample, so that at most `most` are left: [n, *] → [≤ most, *]."""
    return samples[:: max(1, math.ceil(len(samples) / most))]


def log_ms(latency_ms: Tensor) -> Tensor:
    """Return ln of budgets in ms (or in the unit of the cost that stands for latency)."""
    return latency_ms.clamp_min(MIN_LATENCY_MS).log()


def log_measured(latency_ms: Tensor) -> Tensor:
    """Return ln of measured costs.

    A 0, as timers report it for very short times, counts as a tenth of the smallest value above 0.
    NaN stays.
    """
    above = latency_ms[latency_ms > 0]
    least = float(above.min()) / 10 if len(above) else MIN_LATENCY_MS
    return latency_ms.clamp_min(least).log()


def log_moments(measurements_ms: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the mean and the variance of each cell's `log_measured`.

    float [N, C, R] → [N, C] each.
    """
    logs = log_measured(measurements_ms)
    mean = logs.nanmean(-1)
    return mean, (logs - mean.unsqueeze(-1)).square_().nanmean(-1)


def default_budgets(table: ProfileTable, rows: Tensor | None = None) -> Tensor:
    """Return the budgets that policies are judged by: five in ms, distinct and rising.

    They are the 10/25/50/75/90 % quantiles of all profiled latencies of these rows, none below a
    floor: the budget that three quarters of the samples can meet with their fastest configuration;
    where few configurations of a sample were measured, the fastest is estimated. Budgets with no
    latency between them are equivalent. If that happens, quantiles of the latencies above the floor
    are used and duplicates dropped, so there may be fewer than five. Time-outs, see
    `knobwise.envs.tables.time_outs`, count as not profiled, and samples that have nothing else do
    not count. None is below the smallest latency above 0.

    Args:
        table: the profile.
        rows: int64 [n], None for the whole table.

    Returns:
        float32 [B].
    """
    which = ... if rows is None else rows
    latency_ms = subsample(unread_ms(table, which))
    mask = subsample(table.mask[which])
    sparse = mask.double().mean() < SPARSE
    quantiles = torch.tensor(DEFAULT_QUANTILES)
    wrong = subsample(table.accuracy[which]) == 0
    late = torch.from_numpy(time_outs(latency_ms.numpy(), wrong.numpy()))
    mask = mask & ~late
    ordered = _sorted(latency_ms[mask])
    # three quarters of the samples can meet the floor
    fastest = latency_ms.masked_fill(~mask, torch.inf).amin(1)
    if sparse:
        fastest = _fastest_of_all(latency_ms, mask)
    floor = torch.quantile(fastest[fastest.isfinite()], FEASIBLE_SHARE, interpolation="higher")
    weights = None
    if table.sampling_weight is not None:
        weights = subsample(table.sampling_weight[which])[mask]
    budgets = _quantile(latency_ms[mask], quantiles, weights).maximum(floor)
    # no latency lies between two budgets that the same number of latencies meet
    if len(torch.searchsorted(ordered, budgets, right=True).unique()) < len(budgets):
        above = ordered[ordered >= floor.minimum(ordered[-1])]
        budgets = above[(quantiles.double() * len(above)).long()]
    above_zero = ordered[ordered > 0]
    least = float(above_zero[0]) if len(above_zero) else MIN_LATENCY_MS
    return budgets.clamp_min(least).unique()


def few_budgets(budgets_ms: Tensor) -> list[str]:
    """Return a note if the default budgets [B] are fewer than usual, else no note.

    Many latencies may be equal, or most lie below the floor of `default_budgets`; either way few
    different ones are above the smallest budget.
    """
    usual = len(DEFAULT_QUANTILES)
    note = (
        f"budgets: only {len(budgets_ms)} of {usual} default budgets left, because few different "
        "latencies lie above the smallest; choose your own with budgets_ms"
    )
    return [note] * (len(budgets_ms) < usual)


def judged_budgets(
    table: ProfileTable, budgets_ms: Sequence[float] | None, rows: Tensor | None = None
) -> Tensor:
    """Return the budgets in the settings, in ms or the unit of the table, float32 [B].

    The default is `default_budgets` of these rows, int64 [n], or of the whole table.

    Raises:
        InputError: there is no budget, or one that is not positive.
    """
    if budgets_ms is None:
        return default_budgets(table, rows)
    if not budgets_ms or not all(budget > 0 for budget in budgets_ms):
        raise InputError(
            f"budgets_ms={list(budgets_ms)}: give at least one budget in {table.unit}, all positive"
        )
    return torch.tensor(list(budgets_ms))


def mean_budgets(cells: Cells, rows: Tensor) -> Tensor:
    """Return the default mean budgets of these rows, int64 [n], in ms, float64 [B]: the distinct
    10/25/50/75/90 % quantiles of the configurations' mean latencies, so that a single configuration
    can keep each."""
    cost = averages(cells, rows)[1]
    return cost.quantile(torch.tensor(DEFAULT_QUANTILES, dtype=cost.dtype)).unique()


def _fastest_of_all(latency_ms: Tensor, mask: Tensor) -> Tensor:
    """Estimate the latency of each sample's fastest configuration from the measured ones, [n].

    ln ms is taken for a sum of a part of the sample, a part of the configuration and a residual;
    for cells that were not measured the residual is drawn from those of the others, because the
    fastest of many is faster than the fastest of their means.
    """
    logs = log_measured(latency_ms).where(mask, torch.nan)
    of_configuration = logs.nanmean(0)
    residual = logs - of_configuration
    # as if one more residual were 0
    of_sample = residual.nansum(1, True) / (mask.sum(1, True) + 1)
    residual = (residual - of_sample)[mask]
    generator = torch.Generator().manual_seed(0)
    drawn = residual[torch.randint(len(residual), logs.shape, generator=generator)]
    estimated_ms = (of_sample + of_configuration + drawn).exp()
    return latency_ms.where(mask, estimated_ms).nan_to_num(torch.inf).amin(1)


def _sorted(values: Tensor) -> Tensor:
    """Return values in order, [n]; NumPy takes a fraction of the time of torch, which returns their
    places too."""
    if values.is_cpu:
        return torch.from_numpy(np.sort(values.numpy()))
    return values.sort().values


def _quantile(values: Tensor, shares: Tensor, weights: Tensor | None = None) -> Tensor:
    # torch.quantile refuses more than 16 M values, and profiles may have more
    if weights is not None:
        ordered, order = values.sort()
        total = weights[order].double().cumsum(0)
        return ordered[torch.searchsorted(total, total[-1] * shares)]
    ordered = _sorted(values)
    position = shares.double() * (len(ordered) - 1)  # float32 cannot count that far
    low = position.floor().long()
    high = position.ceil().long()
    return torch.lerp(ordered[low], ordered[high], (position - low).to(ordered.dtype))


def value_range(latencies_ms: Tensor) -> Tensor:
    """Return the range of 1/λ to consider under a mean budget, float32 [2], in ms.

    It goes from the 3 % quantile of the latencies above 0 (only almost-free accuracy pays) to 30 ×
    their 97 % quantile (3 points of accuracy justify the slowest configuration).
    """
    paid = latencies_ms[latencies_ms > 0]
    if not len(paid):
        paid = torch.ones(1)
    low, high = _quantile(paid, torch.tensor([0.03, 0.97]))
    return torch.stack([low, 30 * high])


def judged_values(cells: Cells) -> Tensor:
    """Return five values of a right answer, in ms, float32 [5], that validate mean budgets.

    They are evenly spaced in logarithm inside `value_range`.
    """
    low, high = value_range(cells.latency_ms[cells.mask]).log().tolist()
    return torch.linspace(low, high, 7)[1:-1].exp()


class Strategy(ABC):
    """A way to draw limits for samples.

    Args:
        cells: those of the samples.
        config: the settings; they may lack what the strategy needs.
        latencies_ms: float [n], the profiled latencies of the samples that training may use.

    Raises:
        InputError: the strategy cannot use the numbers in the settings.
    """

    def __init__(self, cells: Cells, config: BudgetConfig, latencies_ms: Tensor) -> None:
        self.cells = cells
        self.numbers = self.prepared(config, latencies_ms)

    @abstractmethod
    def prepared(self, config: BudgetConfig, latencies_ms: Tensor) -> Tensor:
        """Compute what all draws need, `numbers`, float [m]."""

    @abstractmethod
    def __call__(self, rows: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw a limit in ms for each of these samples, int64 [n] → float32 [n]."""

    @property
    def largest(self) -> float:
        """The largest limit that is drawn, in ms, but for rounding."""
        return float(self.numbers.max())


class Quantiles(Strategy):
    """Evenly by rank: between two neighbours of a fine grid of the distribution."""

    points = 1025

    def prepared(self, config: BudgetConfig, latencies_ms: Tensor) -> Tensor:
        lowest, highest = RANGE
        return _quantile(latencies_ms, torch.linspace(lowest, highest, self.points))

    def __call__(self, rows: Tensor, generator: torch.Generator | None) -> Tensor:
        position = torch.rand(rows.shape[0], generator=generator) * (self.points - 1)
        below = position.long().clamp_max_(self.points - 2)
        low = self.numbers.index_select(0, below)
        high = self.numbers[1:].index_select(0, below)
        return torch.lerp(low, high, position.sub_(below))


class Uniform(Quantiles):
    """Evenly in ms: between the ends of the grid alone."""

    points = 2


class Spread(Quantiles):
    """Half of them by rank, and half evenly on a log scale over the numbers in the settings."""

    def prepared(self, config: BudgetConfig, latencies_ms: Tensor) -> Tensor:
        by_rank = super().prepared(config, latencies_ms)
        bounds = by_rank[[0, -1]]
        if config.values_ms:
            bounds = _positive_values("spread", config)
        self.low, self.high = log_ms(bounds).aminmax()
        return by_rank

    def __call__(self, rows: Tensor, generator: torch.Generator | None) -> Tensor:
        by_rank = super().__call__(rows, generator)
        share = torch.rand(len(rows), generator=generator)
        even = torch.lerp(self.low - BEYOND, self.high + BEYOND, share).exp()
        return even.where(torch.rand(len(rows), generator=generator) < 0.5, by_rank)

    @property
    def largest(self) -> float:
        return max(super().largest, float((self.high + BEYOND).exp()))


class Fixed(Strategy):
    """One of the numbers in the settings."""

    def prepared(self, config: BudgetConfig, latencies_ms: Tensor) -> Tensor:
        return _positive_values("fixed", config)

    def __call__(self, rows: Tensor, generator: torch.Generator | None) -> Tensor:
        drawn = torch.randint(len(self.numbers), (rows.shape[0],), generator=generator)
        return self.numbers[drawn]


def _positive_values(strategy: str, config: BudgetConfig) -> Tensor:
    values = config.values_ms
    if not values or not all(0 < value < math.inf for value in values):
        raise InputError(
            f"budget.strategy={strategy}: values_ms must hold at least one number, all positive, "
            f"not {values}"
        )
    return torch.tensor([*values])


class Relative(Fixed):
    """A factor times the latency of a random profiled cell of the sample."""

    def prepared(self, config: BudgetConfig, latencies_ms: Tensor) -> Tensor:
        return torch.tensor(FACTORS)

    def __call__(self, rows: Tensor, generator: torch.Generator | None) -> Tensor:
        factor = super().__call__(rows, generator)
        cell = torch.multinomial(self.cells.mask[rows].float(), 1, generator=generator)
        return factor * self.cells.latency_ms[rows].gather(1, cell).squeeze(1)

    @property
    def largest(self) -> float:
        return super().largest * float(self.cells.latency_ms[self.cells.mask].max())


class AnswerValues(Strategy):
    """Under a mean budget: values of a right answer (1/price), evenly on a log scale."""

    def prepared(self, config: BudgetConfig, latencies_ms: Tensor) -> Tensor:
        return value_range(latencies_ms).log()

    def __call__(self, rows: Tensor, generator: torch.Generator | None) -> Tensor:
        low, high = self.numbers
        return torch.lerp(low, high, torch.rand(rows.shape[0], generator=generator)).exp()

    @property
    def largest(self) -> float:
        return math.exp(super().largest)


STRATEGIES: dict[str, type[Strategy]] = {
    "relative": Relative,
    "quantiles": Quantiles,
    "spread": Spread,
    "uniform": Uniform,
    "fixed": Fixed,
}
"""By the words of `budget.strategy`. A new one is an entry here. The shorter `budget=NAME` of the
command line needs a line in `experiments/settings/choices.py` beside it."""


class BudgetEncoding(nn.Module):
    """Encode budgets in ms by their standardised logarithm z = (ln budget − μ) / σ.

    The encoding is z, and sin and cos of π·2^k·z/4 for k = 0, 1, …, as in "Attention Is All You
    Need" (Vaswani et al. 2017, section 3.5), for a real-valued position. μ and σ are those of
    `latencies_ms`, the profiled latencies of the training samples. An odd `width` is 1 +
    2·frequencies, and 1 gives z alone. An even `width` is pairs of sin and cos without z. More than
    `OCTAVES` + 1 pairs divide these octaves evenly, because single precision does not tell higher
    frequencies apart.

    Args:
        latencies_ms: float [n].
        width: the count of numbers that encode a budget.

    Shapes:
        forward: [*] → [*, width].
    """

    mean: Tensor
    scale: Tensor
    frequencies: Tensor

    def __init__(self, latencies_ms: Tensor, width: int = 9) -> None:
        super().__init__()
        logs = log_measured(latencies_ms)
        self.register_buffer("mean", logs.mean())
        self.register_buffer("scale", logs.std(correction=0).clamp_min(1e-3))
        count = width // 2
        step = 1 if width % 2 else min(1, OCTAVES / max(count - 1, 1))
        self.register_buffer("frequencies", math.pi / 4 * 2.0 ** (step * torch.arange(count)))
        self.width = width

    def standardised(self, budget_ms: Tensor) -> Tensor:
        """Return z for budgets [*], at most 4 from 0."""
        return ((log_ms(budget_ms) - self.mean) / self.scale).clamp(-4, 4)

    def forward(self, budget_ms: Tensor) -> Tensor:
        return self.encoded(self.standardised(budget_ms))

    def encoded(self, z: Tensor) -> Tensor:
        """Return the encoding of standardised budgets: [*] → [*, width]."""
        z = z.unsqueeze(-1)
        # [*, frequencies]
        angle = z * self.frequencies
        # an even width cuts z off
        return torch.cat([z, angle.sin(), angle.cos()], -1)[..., -self.width :]
