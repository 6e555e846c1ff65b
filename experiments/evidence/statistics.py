"""Intervals and tests: the bootstrap over samples, seeds and splits, and differences of policies.

Everything is paired: in a draw every policy is judged on the same samples. Arrays may be tensors,
but torch is not imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

DRAWS = 2000
"""The number of draws of the bootstrap."""
FLIPS = 9999
"""The number of draws of the sign-flip test; no p is smaller than 1/(FLIPS + 1)."""
BLOCK = 10_000_000
"""Random numbers drawn at a time."""
CHANCE = 0.05
"""The chance of reporting any difference where there is none, over all comparisons of a family."""
ROUNDED = 1e-6
"""A smaller difference of means is rounding, since scores are in float32."""
NOTHING = 1e-18
"""A smaller variance is rounding."""
FEWEST = 5
"""Fewer samples are not tested: the signs of five give p = 1/16 at best."""


# -- the bootstrap ---------------------------------------------------------------------------------


def resampled_means(
    values: Sequence[ArrayLike], other_seeds: bool = False, splits: np.ndarray | None = None
) -> np.ndarray:
    """Return the mean of each array in each of `DRAWS` draws of n samples and of S seeds, both with
    replacement. Where there are several splits, these are drawn too.

    The test parts of random splits overlap. So a draw takes splits and distinct samples
    independently of each other, and a sample judged in a split counts as often as the split and the
    sample were drawn, multiplied (the pigeonhole bootstrap of Owen, 2007): a sample that three
    splits judge is one sample, not three.

    All K arrays share the draws of samples, and those with the same S also the draws of seeds.
    Memory stays near 2·BLOCK numbers for any n.

    Args:
        values: K arrays, float [S, n] (S may differ) or [n].
        other_seeds: keep the draws of samples and change those of seeds, for policies trained with
            other seeds.
        splits: int [2, n], see `splits_of`; None for one split.

    Returns:
        float64 [DRAWS, K].
    """
    # an array without seeds has one
    arrays = [np.atleast_2d(np.asarray(array, dtype=np.float64)) for array in values]
    columns = np.concatenate(arrays).T  # [n, sum of S]
    generator = np.random.default_rng(0)
    per_seed = _over_samples(columns, generator, splits)
    if other_seeds:
        generator = np.random.default_rng([0, 1])
    state = generator.bit_generator.state
    first_columns = np.cumsum([len(array) for array in arrays])[:-1]
    means = []
    for array, part in zip(arrays, np.split(per_seed, first_columns, axis=1), strict=True):
        # from the same state, so that other arrays do not change these draws
        generator.bit_generator.state = state
        seeds = len(array)
        shares = _drawn(generator, seeds, DRAWS) / seeds
        # a rounded mean may lie outside of the values
        means.append((part * shares).sum(1).clip(array.min(), array.max()))
    return np.stack(means, 1)


def _drawn(generator: np.random.Generator, size: int, draws: int) -> np.ndarray:
    """Return how often each of `size` things is drawn, with replacement, in each draw: int64
    [draws, size]."""
    return generator.multinomial(size, np.full(size, 1 / size), draws)


def _over_samples(
    columns: np.ndarray, generator: np.random.Generator, splits: np.ndarray | None
) -> np.ndarray:
    """Return the mean of each column, float [n, K], in each draw of samples and splits, float
    [DRAWS, K]; `generator` draws the samples."""
    n = len(columns)
    if splits is None:
        splits = np.stack([np.zeros(n, int), np.arange(n)])
    number, distinct = splits.max(1) + 1
    times = _drawn(np.random.default_rng([0, 2]), number, DRAWS)
    means = []
    step = max(1, BLOCK // n)
    for of_splits in np.split(times, range(step, DRAWS, step)):
        # counts of how often each sample is drawn make the means a matrix product
        counts = _drawn(generator, distinct, len(of_splits))
        counts = counts[:, splits[1]] * of_splits[:, splits[0]]
        total = counts.sum(1, keepdims=True)
        means.append((counts / np.where(total > 0, total, np.nan)) @ columns)
    return np.concatenate(means)


def ends_of(drawn: np.ndarray) -> list[list[float]]:
    """Return the 95 % intervals of K columns of draws, float [D, K]. NaN draws do not count; a
    column of NaN has the interval 0 to 0."""
    known = ~np.isnan(drawn).all(0)
    bounds = np.zeros((2, drawn.shape[1]))
    bounds[:, known] = np.nanquantile(drawn[:, known], [0.025, 0.975], axis=0)
    intervals: list[list[float]] = bounds.T.tolist()
    return intervals


def ends_of_means(values: Sequence[ArrayLike], drawn: np.ndarray) -> list[list[float]]:
    """Return the 95 % intervals of the means over samples and seeds of K arrays, float [S, n] or
    [n], of their draws, float [D, K]. A few seeds widen them, see `paired_differences`."""
    intervals = ends_of(drawn)
    for k, array in enumerate(values):
        seeds = np.atleast_2d(np.asarray(array, dtype=np.float64))
        mean = seeds.mean()
        if len(seeds) > 1 and not np.isnan(mean):
            # a draw may hold no sample of the splits that it holds
            known = drawn[~np.isnan(drawn[:, k])][:, [k]]
            (wider,), _ = _for_seeds([seeds[..., None]], known, np.array([mean]))
            if wider != 1:
                intervals[k] = [float(mean + wider * (end - mean)) for end in intervals[k]]
    return intervals


def mean_intervals(
    values: Sequence[ArrayLike], clusters: np.ndarray | None = None
) -> list[list[float]]:
    """Return 95 % bootstrap intervals of the means over samples and seeds of K arrays, float [S, n]
    or [n]; see `ends_of_means`.

    Args:
        clusters: int [n], the number of the cluster of each sample; by default each is one.
    """
    if not len(values):
        return []
    splits = None if clusters is None else np.stack([np.zeros_like(clusters), clusters])
    return ends_of_means(values, resampled_means(values, splits=splits))


def mean_interval(values: ArrayLike, clusters: np.ndarray | None = None) -> list[float]:
    """Return the 95 % bootstrap interval of the mean of an array, float [S, n] or [n], see
    `mean_intervals`. For the difference of two policies it is the paired interval."""
    return mean_intervals([values], clusters)[0]


def with_interval(
    name: str, values: np.ndarray, clusters: np.ndarray | None = None
) -> dict[str, float | list[float] | None]:
    """Return the mean of an array, float [S, n] or [n], and its 95 % interval, under `name` and
    `{name}_ci95`; None without samples. For clusters see `mean_intervals`."""
    if not values.size:
        return {name: None, f"{name}_ci95": None}
    return {name: float(values.mean()), f"{name}_ci95": mean_interval(values, clusters)}


# -- differences -----------------------------------------------------------------------------------


def sign_of(ci95: Sequence[float] | None) -> int:
    """Return 1 or −1 where the interval is above or below 0 by more than rounding in float32, else
    0, as where it is not known."""
    if not ci95:
        return 0
    return int(ci95[0] > ROUNDED) - int(ci95[1] < -ROUNDED)


@dataclass(frozen=True)
class Difference:
    """A policy's score minus that of the policy that it is compared with."""

    run: str
    against: str
    """The label of the other run; inside a run the same label."""
    policy: str
    against_policy: str
    condition: float | None
    """Budget or number of demonstrations; None for the mean over the budgets."""
    samples: int
    """The number of samples that both were judged on."""
    difference: float
    ci95: tuple[float, float]
    """Paired bootstrap over samples and seeds."""
    p: float
    """Two-sided, see `paired_differences`."""
    p_holm: float = 1.0
    """p corrected for the number of comparisons in its family."""

    @property
    def sign(self) -> int:
        """The direction that is shown: 1 or −1 where the interval lies above or below 0 and p is
        small enough; else 0."""
        if self.p_holm >= CHANCE:
            return 0
        return sign_of(self.ci95)


def paired_differences(
    first: np.ndarray, second: np.ndarray, same_seeds: bool, clusters: np.ndarray | None = None
) -> list[tuple[float, ...]]:
    """Return for each column of first − second the difference of the means, the ends of its 95 %
    interval, and p.

    The interval is a bootstrap: a draw takes n samples with replacement, the same for both, and
    seeds with replacement, the same where both were trained with the same seeds. A few seeds, drawn
    with replacement, vary less than seeds do, and their variance is known only roughly. So the
    interval is widened from the variance of S seeds to the variance that they estimate, and from
    the normal distribution to Student's, with the degrees of freedom of Satterthwaite (1946). One
    seed says nothing about the variance between seeds and widens nothing.

    The test asks whether the mean over samples could come from chance alone: where nothing differs,
    the difference of each sample (of the means over seeds) might as well have had the other sign.
    That is about these trained policies; where seeds differ p is at least that of a t test with the
    variance of the interval.

    A difference that is NaN, since some score is, has a p of 1.

    Args:
        first: float [S, n, C].
        second: float [T, n, C], of the same samples.
        same_seeds: whether the seeds are the same, in the same order.
        clusters: int [n], the number of the cluster of each sample; by default each is one. Whole
            clusters are drawn, and change their sign.
    """
    n = first.shape[1]
    if clusters is None:
        clusters = np.arange(n)
    splits = np.stack([np.zeros(n, int), clusters])
    sides = [first - second] if same_seeds else [first, -second]
    draws = []
    for i, side in enumerate(sides):
        arrays = list(np.moveaxis(side, 2, 0))
        draws.append(resampled_means(arrays, other_seeds=i > 0, splits=splits))
    drawn = np.sum(draws, 0)  # [D, C]
    observed = np.sum([side.mean((0, 1)) for side in sides], 0)  # [C]
    wider, p = _for_seeds(sides, drawn, observed)
    bounds = observed + wider * (np.quantile(drawn, [0.025, 0.975], axis=0) - observed)
    p = np.maximum(p, _sign_flips(first.mean(0) - second.mean(0), clusters))
    # no comparison with NaN is true, so no draw counts as large
    p = np.where(np.isnan(observed), 1.0, p)
    return list(zip(*np.stack([observed, *bounds, p]).tolist(), strict=True))


def _for_seeds(
    sides: Sequence[np.ndarray], drawn: np.ndarray, observed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the factor by which the interval is widened, and p of the t test, float [C] each; 1
    and 0 where no seed differs.

    Args:
        sides: float [S, n, C], which add up to the difference, each with its own seeds.
        drawn: the draws of the bootstrap, float [D, C].
        observed: the difference, float [C].
    """
    from scipy.stats import norm, t

    spread = drawn.var(0)
    whole = spread.copy()  # with the variance of the mean over seeds that the bootstrap misses
    squares = np.zeros_like(spread)  # the denominator of Satterthwaite's formula
    for side in sides:
        seeds = len(side)
        if seeds > 1:
            variance = side.mean(1).var(0, ddof=1) / seeds
            whole += variance / seeds
            squares += variance**2 / (seeds - 1)
    known = (whole > NOTHING) & (squares > NOTHING**2)
    with np.errstate(divide="ignore", invalid="ignore"):
        freedom = whole**2 / squares
        wider = np.sqrt(whole / spread) * t.ppf(0.975, freedom) / norm.ppf(0.975)
        p = 2 * t.sf(np.abs(observed) / np.sqrt(whole), freedom)
    return np.where(known, wider, 1.0), np.where(known, p, 0.0)


def _sign_flips(differences: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Return the two-sided p of the means of float [n, C]: the share of random signs of the
    clusters, int [n], that give a mean at least as large."""
    observed = differences.mean(0)
    # samples of a cluster share a sign, so their sum decides
    sums = np.zeros((clusters.max() + 1, differences.shape[1]))
    np.add.at(sums, clusters, differences / len(differences))
    n = len(sums)
    # scipy's permutation_test gives the same; here one set of signs serves all columns
    generator = np.random.default_rng(0)
    as_large = np.zeros(len(observed))
    left = FLIPS
    while left:
        count = min(left, max(1, BLOCK // n))
        signs = 1.0 - 2.0 * generator.integers(0, 2, (count, n), dtype=np.int8)
        as_large += (np.abs(signs @ sums) >= np.abs(observed) - ROUNDED).sum(0)
        left -= count
    return (1 + as_large) / (1 + FLIPS)


def corrected(p: ArrayLike) -> list[float]:
    """Return the p of a family of tests, float [C], corrected for their number (Holm, 1979)."""
    p = np.asarray(p, dtype=np.float64)
    # the smallest p counts as often as there are comparisons, the largest once
    order = p.argsort(kind="stable")
    raised = np.empty_like(p)
    raised[order] = np.maximum.accumulate(np.minimum(1.0, np.arange(len(p), 0, -1) * p[order]))
    values: list[float] = raised.tolist()
    return values


def holm(family: Sequence[Difference]) -> list[Difference]:
    """Return tested differences with their p `corrected`."""
    pairs = zip(family, corrected([difference.p for difference in family]), strict=True)
    return [replace(difference, p_holm=p_holm) for difference, p_holm in pairs]


def pareto_front(accuracy: np.ndarray, latency_ms: np.ndarray) -> np.ndarray:
    """Return which configurations no other beats in accuracy without costing more: bool [C] from
    two float [C]."""
    order = np.lexsort((-accuracy, latency_ms))
    best = np.maximum.accumulate(accuracy[order])
    front = np.zeros(len(order), dtype=bool)
    front[order] = np.diff(best, prepend=-np.inf) > 0
    return front
