"""Latency budgets: which ones train a policy, which ones judge it, and how a network reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.envs.configurations.settings import BudgetConfig
from knobwise.envs.tables.profile_table import ProfileTable

DEFAULT_QUANTILES = (0.10, 0.25, 0.50, 0.75, 0.90)
FEASIBLE_SHARE = 0.75
TIME_OUT_SHARE = 0.01
TIME_OUT_RATIO = 5
"""The largest latency is that of time-outs if more than this share of the profiled cells have
exactly it, and more than so many times as many as have the second largest; costs that depend on the
configuration alone repeat too."""
MOST_SAMPLES = 1 << 19
"""Samples that quantiles and other statistics are taken of, so that large tables need little
memory."""
OCTAVES = 7
"""From the lowest to the highest frequency of a budget's encoding by pairs."""
LEAST_LATENCY_MS = 1e-9
"""Lower bound of budgets and of the arguments of logarithms; below any cost in any unit, even
USD."""


def thinned(samples: Tensor, most: int = MOST_SAMPLES) -> Tensor:
    """Every k-th of more samples than `most`, [n, *] → [≤ most, *]."""
    return samples[:: max(1, math.ceil(len(samples) / most))]


def log_ms(latency_ms: Tensor) -> Tensor:
    """Natural logarithm of budgets in ms (or in the unit of the cost that stands for latency)."""
    return latency_ms.clamp_min(LEAST_LATENCY_MS).log()


def log_measured(latency_ms: Tensor) -> Tensor:
    """Natural logarithm of measured costs. A 0, as timers report it for very short times, counts as
    a tenth of the smallest value above it. NaN stays."""
    above = latency_ms[latency_ms > 0]
    return latency_ms.clamp_min(float(above.min()) / 10 if len(above) else LEAST_LATENCY_MS).log()


def log_moments(measurements_ms: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each cell's `log_measured`, float [N, C, R] → [N, C] each; in parts, for
    large tables."""
    positive = (part[part > 0] for part in measurements_ms.split(MOST_SAMPLES))
    least = min(
        (float(part.min()) for part in positive if len(part)), default=10 * LEAST_LATENCY_MS
    )
    parts = [part.clamp_min(least / 10).log_() for part in measurements_ms.split(MOST_SAMPLES)]
    means = [part.nanmean(-1) for part in parts]
    spreads = [
        (p - mean.unsqueeze(-1)).square_().nanmean(-1) for p, mean in zip(parts, means, strict=True)
    ]
    return torch.cat(means), torch.cat(spreads)


def default_budgets(table: ProfileTable) -> Tensor:
    """The budgets that policies are judged on, float32 [B], in ms: `quantile_budgets` of the whole
    table."""
    return quantile_budgets(table.without_first_look.latency_ms, table.mask)


def quantile_budgets(latency_ms: Tensor, mask: Tensor) -> Tensor:
    """Five distinct budgets in ms, fewer where many latencies are equal: latencies [N, C] and the
    mask bool [N, C] → [B], rising.

    They are the 10/25/50/75/90 % quantiles of all profiled latencies, each raised if needed to the
    floor: what three quarters of the samples can meet with their fastest configuration. If no
    latency lies between two of these, which are then the same budget, the quantiles are taken of
    the latencies from the floor up instead, and equal ones count once. Time-outs count as not
    profiled, and samples that have nothing else do not count.
    """
    latency_ms = thinned(latency_ms)
    mask = thinned(mask)
    quantiles = torch.tensor(DEFAULT_QUANTILES)
    ordered = latency_ms[mask].sort().values
    values, counts = ordered.unique_consecutive(return_counts=True)
    if len(values) > 1 and counts[-1] > max(
        TIME_OUT_SHARE * len(ordered), TIME_OUT_RATIO * int(counts[-2])
    ):
        mask = mask & (latency_ms < values[-1])
        ordered = ordered[: -int(counts[-1])]
    fastest = latency_ms.masked_fill(~mask, torch.inf).amin(1)
    floor = torch.quantile(fastest[fastest.isfinite()], FEASIBLE_SHARE, interpolation="higher")
    budgets = _quantile(ordered, quantiles).maximum(floor)
    if len(torch.searchsorted(ordered, budgets, right=True).unique()) < len(budgets):
        above = ordered[ordered >= floor]
        budgets = above[(quantiles.double() * len(above)).long()]
    return budgets.clamp_min(LEAST_LATENCY_MS).unique()


def few_budgets(budgets_ms: Tensor) -> list[str]:
    """A note where default budgets [B] are fewer than usual, else []."""
    few = len(budgets_ms)
    usual = len(DEFAULT_QUANTILES)
    note = (
        f"budgets: only {few} of {usual} are distinct, because many latencies "
        "are equal; budgets_ms sets others"
    )
    return [note] if few < usual else []


def judged_budgets(
    table: ProfileTable, budgets_ms: Sequence[float] | None, rows: Tensor | None = None
) -> Tensor:
    """The budgets in the settings, in ms; the default are those of these rows (int64) or of all:
    float32 [B]. Raises InputError if there is no budget, or one that is not positive."""
    if budgets_ms is None:
        latency_ms = table.without_first_look.latency_ms
        mask = table.mask
        if rows is None:
            return default_budgets(table)
        return quantile_budgets(latency_ms[rows], mask[rows])
    if not budgets_ms or not min(budgets_ms) > 0:
        raise InputError(
            f"budgets_ms={list(budgets_ms)}: give at least one budget in ms, all positive"
        )
    return torch.tensor(list(budgets_ms))


def _quantile(values: Tensor, shares: Tensor) -> Tensor:
    # torch.quantile refuses more than 16 M values, and profiles may have more
    ordered = values.sort().values
    place = shares.double() * (len(ordered) - 1)  # float32 cannot count that far
    low = place.floor().long()
    high = place.ceil().long()
    return torch.lerp(ordered[low], ordered[high], (place - low).to(ordered.dtype))


def worths_range(latencies_ms: Tensor) -> Tensor:
    """The least and the greatest worth of a right answer that are considered, float32 [2], in ms;
    the price of a mean budget is λ = 1/worth. From the 3 % quantile of the latencies above 0, where
    only the nearly free pays, to thirty times their 97 % quantile, where a gain of some 3 points
    pays for the slowest."""
    paid = latencies_ms[latencies_ms > 0]
    low, high = _quantile(paid if len(paid) else torch.ones(1), torch.tensor([0.03, 0.97]))
    return torch.stack([low, 30 * high])


def limits_seen(table: ProfileTable, rows: Tensor, sense: str) -> Tensor:
    """Return the limits that a network's encoding of them is standardised by.

    They are the profiled latencies of these rows (int64), or under a mean budget the ends of the
    worths, [n]; under weights those of both worths, [2, n].
    """
    latencies_ms = table.latency_ms[rows][table.mask[rows]]
    if sense == "deadline":
        return latencies_ms
    if sense == "mean":
        return worths_range(latencies_ms)
    costs = table.weighed_cost[rows][table.mask[rows]]
    return torch.stack([worths_range(latencies_ms), worths_range(costs)])


def judged_worths(table: ProfileTable) -> Tensor:
    """Five worths evenly spaced in logarithm, float32 [5], in ms, to validate a policy for mean
    budgets."""
    low, high = worths_range(table.latency_ms[table.mask]).log().tolist()
    return torch.linspace(low, high, 7)[1:-1].exp()


def worth_pairs(table: ProfileTable, steps: int) -> Tensor:
    """A grid of the worths of a right answer, evenly spaced in logarithm over `worths_range`,
    float32 [steps², 2]: in ms, and in the unit of the further cost. Raises InputError if the table
    has none."""
    ranges = [
        worths_range(values[table.mask]).log() for values in (table.latency_ms, table.weighed_cost)
    ]
    return torch.cartesian_prod(*(torch.linspace(low, high, steps).exp() for low, high in ranges))


class BudgetSampler:
    """Draws budgets for samples of a table, or worths if `sense="mean"`, pairs of them if it is
    "weights". Ranges and quantiles are taken from `rows`, int64 [n]; None for all. Raises
    InputError if the strategy is unknown, or cannot use the numbers, or under weights the table has
    no further cost."""

    STRATEGIES = ("relative", "quantiles", "uniform", "fixed")

    def __init__(
        self, table: ProfileTable, config: BudgetConfig, rows: Tensor | None = None
    ) -> None:
        self.table = table
        self.config = config
        rows = thinned(torch.arange(table.num_samples) if rows is None else rows)
        latencies = table.latency_ms[rows][table.mask[rows]]
        one_of("budget.sense", config.sense, ("deadline", "mean", "weights"))
        one_of("budget.strategy", config.strategy, self.STRATEGIES)
        if config.sense == "mean":
            self._numbers = worths_range(latencies).log()
        elif config.sense == "weights":
            costs = table.weighed_cost[rows][table.mask[rows]]
            self._numbers = torch.stack([worths_range(latencies), worths_range(costs)]).log()
        elif config.strategy in ("relative", "fixed"):
            if config.strategy == "relative":
                name = "factors"
            else:
                name = "values_ms"
            numbers: tuple[float, ...] = getattr(config, name)
            valid = bool(numbers) and all(0 < number < math.inf for number in numbers)
            self._check(valid, f"{name} must hold at least one number, all positive, not", numbers)
            self._numbers = torch.tensor(list(numbers))
        else:
            self._check(
                0 <= config.low <= config.high <= 1,
                "needs 0 ≤ low ≤ high ≤ 1, not",
                (config.low, config.high),
            )
            places = 2 if config.strategy == "uniform" else 1025
            self._numbers = _quantile(latencies, torch.linspace(config.low, config.high, places))

    def _check(self, valid: bool, needs: str, value: object) -> None:
        if not valid:
            raise InputError(f"budget.strategy={self.config.strategy}: {needs} {value}")

    def __call__(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw a budget for each of these samples: int64 [n] → float32 [n], ms, positive; under
        weights [n, 2]."""
        n = len(rows)
        if self.config.sense != "deadline":
            low, high = self._numbers.unbind(-1)
            return torch.lerp(low, high, torch.rand(n, *low.shape, generator=generator)).exp()
        if self.config.strategy in ("relative", "fixed"):
            drawn = self._numbers[torch.randint(len(self._numbers), (n,), generator=generator)]
            if self.config.strategy == "relative":
                cell = torch.multinomial(self.table.mask[rows].float(), 1, generator=generator)
                drawn = drawn * self.table.latency_ms[rows].gather(1, cell).squeeze(1)
        else:
            place = torch.rand(n, generator=generator) * (len(self._numbers) - 1)
            low = place.floor().long().clamp_max(len(self._numbers) - 2)
            drawn = torch.lerp(self._numbers[low], self._numbers[low + 1], place - low)
        return drawn.clamp_min(LEAST_LATENCY_MS)


class BudgetEncoding(nn.Module):
    """Encodes budgets in ms by the standardised logarithm z = (ln budget − μ) / σ.

    They are z, and sin and cos of π·2^k·z/4 for k = 0, 1, …, the encoding of "Attention Is All You
    Need" (Vaswani et al. 2017, section 3.5) for a real-valued position. μ and σ are those of
    `latencies_ms`, the profiled latencies of the training samples. An odd `width` is 1 +
    2·frequencies, and 1 gives z alone. An even one is pairs without z; more than `OCTAVES` + 1 of
    them divide these octaves evenly, because single precision does not tell higher frequencies
    apart.

    Args:
        latencies_ms: float [n], or [L, n] for limits of L numbers, each encoded by its own row.

    Shapes:
        forward: [*] → [*, width], or [*, L] → [*, L·width].
    """

    mean: Tensor
    scale: Tensor
    frequencies: Tensor

    def __init__(self, latencies_ms: Tensor, width: int = 9) -> None:
        super().__init__()
        logs = log_measured(latencies_ms)
        self.register_buffer("mean", logs.mean(-1))
        self.register_buffer("scale", logs.std(-1, correction=0).clamp_min(1e-3))
        count = width // 2
        if width % 2:
            step: float = 1
        else:
            step = min(1, OCTAVES / max(count - 1, 1))
        self.register_buffer("frequencies", math.pi / 4 * 2.0 ** (step * torch.arange(count)))
        self.width = width

    @property
    def outputs(self) -> int:
        """How many numbers a limit is encoded by."""
        return self.width * self.mean.numel()

    def forward(self, budget_ms: Tensor) -> Tensor:
        z = ((log_ms(budget_ms) - self.mean) / self.scale).clamp(-4, 4).unsqueeze(-1)
        angle = z * self.frequencies
        encoded = torch.cat([z, angle.sin(), angle.cos()], -1)[..., -self.width :]
        if self.mean.ndim:
            return encoded.flatten(-2)
        return encoded
