"""Differences between runs that were judged on the same samples: how large, how sure, and whether by more than chance.

Everything is paired: two runs are compared sample by sample, at the same budgets or numbers of demonstrations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from knobwise.agents.judging.evaluation import resampled_means
from knobwise.experiments.compare.compared_runs import ComparedRun, Outcomes, outcomes_of

DRAWS = 2000
"""Of the bootstrap."""
FLIPS = 9999
"""Of the test; no probability comes out smaller than 1 in so many and one."""
BLOCK = 10_000_000
"""Random signs drawn at a time."""
CHANCE = 0.05
"""How often a difference may be shown where there is none, over all comparisons of a family."""
NOTHING = 1e-18
"""A variance below this one is rounding."""
FEWEST = 5
"""So many samples are needed to say anything: five signs alone give a probability of 1/16 at best."""


@dataclass(frozen=True)
class Difference:
    """What one policy of a run had more than a policy of the run that it is held against."""

    run: str
    against: str
    """The labels of both runs."""
    policy: str
    against_policy: str
    place: float | None
    """Budget in ms or number of demonstrations; None of the mean over the budgets."""
    samples: int
    """On which both were judged."""
    difference: float
    ci95: tuple[float, float]
    """Paired bootstrap over samples and seeds."""
    p: float
    """Two-sided, see `paired`."""
    p_holm: float = 1.0
    """The same, corrected for the number of comparisons of its family."""

    @property
    def nothing(self) -> bool:
        """Whether both got the same on every sample; sums of the same numbers may differ by rounding."""
        return max(map(abs, (self.difference, *self.ci95))) < 1e-12

    @property
    def sign(self) -> int:
        """1 or −1 where the interval lies above or below 0 and the corrected probability is small enough, else 0."""
        if self.p_holm >= CHANCE:
            return 0
        return int(self.ci95[0] > 0) - int(self.ci95[1] < 0)


def paired(first: np.ndarray, second: np.ndarray, same_seeds: bool, seed: int = 0) -> list[tuple[float, ...]]:
    """first − second, column by column: the difference of the means, the ends of its 95 % interval, and p.

    The interval is a bootstrap: a draw takes n samples with replacement, the same ones for both, and seeds with
    replacement, the same ones where both were trained with the same seeds. A handful of seeds, drawn from themselves,
    vary too little and are known too little: the interval is widened from the variance of S seeds to the one that they
    estimate, and from the normal distribution to Student's, with the degrees of freedom of Satterthwaite (1946). Of one
    seed nothing is known; it widens nothing.

    The test asks whether the mean over samples could come from chance alone: where nothing differs, the difference of
    each sample (of the means over seeds) might as well have had the other sign. That is about these trained policies;
    where seeds differ p is at least that of a t test with the variance of the interval.

    Args:
        first: float [S, n, C].
        second: float [T, n, C], of the same samples.
        same_seeds: whether the seeds are the same ones, in the same order.
        seed: of the draws.
    """
    sides = [first - second] if same_seeds else [first, -second]
    columns = [torch.from_numpy(np.moveaxis(one, 2, 0).astype(float)) for one in sides]
    means = [resampled_means(one, DRAWS, seed, other_seeds=i > 0).numpy() for i, one in enumerate(columns)]
    drawn = np.sum(means, 0)  # [draws, C]
    observed = np.sum([one.mean((0, 1)) for one in sides], 0)  # [C]
    wider, p = _for_seeds(sides, drawn, observed)
    ends = observed + wider * (np.quantile(drawn, [0.025, 0.975], axis=0) - observed)
    p = np.maximum(p, _sign_flips(first.mean(0) - second.mean(0), np.random.default_rng(seed)))
    return [tuple(map(float, one)) for one in zip(observed, *ends, p, strict=True)]


def _for_seeds(sides: Sequence[np.ndarray], drawn: np.ndarray, observed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By how much the interval is widened, and p of the t test, float [C] each; 1 and 0 where no seed differs.

    Args:
        sides: float [S, n, C] of what is added up, each with seeds of its own.
        drawn: float [draws, C], of the bootstrap.
        observed: float [C].
    """
    from scipy.stats import norm, t

    several = [one.mean(1) for one in sides if len(one) > 1]
    of_seeds = [one.var(0, ddof=1) / len(one) for one in several]  # of the mean over seeds
    spread = drawn.var(0)
    whole = spread + sum(one / len(values) for one, values in zip(of_seeds, several, strict=True))
    squares = sum((one**2 / (len(values) - 1) for one, values in zip(of_seeds, several, strict=True)), np.zeros(1))
    known = (whole > NOTHING) & (squares > NOTHING**2)
    freedom = np.where(known, whole**2 / np.where(known, squares, 1.0), np.inf)
    wider = np.sqrt(whole / np.where(known, spread, 1.0)) * t.ppf(0.975, freedom) / norm.ppf(0.975)
    p = 2 * t.sf(np.abs(observed) / np.sqrt(np.where(known, whole, 1.0)), freedom)
    return np.where(known, wider, 1.0), np.where(known, p, 0.0)


def _sign_flips(apart: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """p of the means of float [n, C], two-sided: how often random signs give one as large."""
    n, observed = len(apart), apart.mean(0)
    # scipy's permutation_test gives the same; here one set of signs serves all columns
    as_large, left = np.zeros(len(observed)), FLIPS
    while left:
        count = min(left, max(1, BLOCK // n))
        signs = 1.0 - 2.0 * generator.integers(0, 2, (count, n), dtype=np.int8)
        as_large += (np.abs(signs @ apart / n) >= np.abs(observed) - 1e-12).sum(0)
        left -= count
    return (1 + as_large) / (1 + FLIPS)


def holm(family: Sequence[Difference]) -> list[Difference]:
    """The same differences, with probabilities corrected for their number (Holm, 1979)."""
    order = sorted(range(len(family)), key=lambda i: family[i].p)
    corrected, largest = list(family), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(family) - rank) * family[i].p))
        corrected[i] = replace(family[i], p_holm=largest)
    return corrected


def differences(
    reference: ComparedRun, run: ComparedRun, policies: tuple[str, str], places: Sequence[float]
) -> tuple[list[Difference], str]:
    """A policy of `run` against one of `reference`: over the mean of `places` (of budgets, not of shots), then at each.

    Args:
        reference, run: of the same kind.
        policies: of the reference, of the run.
        places: which budgets or numbers of shots; only those that both were judged at count.

    Returns:
        the differences, and in words what is restricted, or why there are none ("" where all is well).
    """
    for one in (reference, run):
        if one.decisions is None:
            return [], f"{one.label} {one.missing}, so it is shown and not tested"
    both = [outcomes_of(one, policy) for one, policy in zip((reference, run), policies, strict=True)]
    old, new = both
    if old is None or new is None:
        return [], f"{(reference if old is None else run).label}: its decisions are incomplete, so it is not tested"
    if refused := other_measurements(reference, run):
        return [], refused
    samples = sorted(set(old.samples) & set(new.samples))
    common = [place for place in places if place in old.places and place in new.places]
    if len(samples) < FEWEST:
        why = f"only {len(samples)} test samples in common" if samples else "no test sample in common"
        return [], f"{run.label} has {why} with {reference.label}, so it is not tested"
    if not common:
        return [], f"{run.label} was judged at none of the {_places(reference)} of {reference.label}: not tested"
    values = _values(reference, run, _cut(old, samples, common), _cut(new, samples, common))
    columns: list[float | None] = [*common]
    if run.kind != "selector":
        values = [np.concatenate([one.mean(2, keepdims=True), one], 2) for one in values]
        columns = [None, *common]
    known = ~np.isnan(np.concatenate(values)).any(0)  # [n, C]
    alike: dict[bytes, list[int]] = {}
    for place in range(known.shape[1]):
        alike.setdefault(known[:, place].tobytes(), []).append(place)
    found: dict[int, Difference] = {}
    for several in alike.values():
        rows = known[:, several[0]]
        if rows.sum() < FEWEST:
            continue
        first, second = (one[:, rows][:, :, several] for one in (values[1], values[0]))
        for column, (gap, low, high, p) in zip(several, paired(first, second, new.seeds == old.seeds), strict=True):
            names = (run.label, reference.label, policies[1], policies[0])
            found[column] = Difference(*names, columns[column], int(rows.sum()), gap, (low, high), p)
    return [found[column] for column in sorted(found)], _restricted(
        reference, run, old, new, samples, [p for p in places if p not in common]
    )


def _values(reference: ComparedRun, run: ComparedRun, old: Outcomes, new: Outcomes) -> list[np.ndarray]:
    """What is compared, float [S, n, P] of both: correct, utility, or under mean budgets accuracy less what the static
    mix of the reference would have gained by the latency that was spent."""
    if run.kind == "selector":
        return [one.values["correct"] for one in (old, new)]
    if run.kind == "deadline":
        return [one.values["utility"] for one in (old, new)]
    hull = reference.results["static_hull"]
    costs, gains = (np.array([corner[key] for corner in hull]) for key in ("latency_ms", "accuracy"))
    costs = np.maximum.accumulate(costs)
    spent = [one.values["latency_ms"].mean((0, 1)) for one in (old, new)]
    worth = [np.interp(cost, costs, gains) for cost in spent]
    further = spent[1] - spent[0]
    same = np.abs(further) < 1e-9
    # what a ms more brought the static mix, between what the two spent
    price = np.where(same, 0.0, (worth[1] - worth[0]) / np.where(same, 1.0, further))
    return [one.values["accuracy"] - price * one.values["latency_ms"] for one in (old, new)]


def _cut(outcomes: Outcomes, samples: Sequence[str], places: Sequence[float]) -> Outcomes:
    at = {name: i for i, name in enumerate(outcomes.samples)}
    rows, columns = [at[name] for name in samples], [outcomes.places.index(place) for place in places]
    values = {name: cube[:, rows][:, :, columns] for name, cube in outcomes.values.items()}
    return Outcomes(outcomes.seeds, tuple(samples), tuple(places), values)


def other_measurements(reference: ComparedRun, run: ComparedRun) -> str:
    """Why two runs were not judged on the same measurements; "" where they were.

    The digest of a profile is of its features too. Other features of the same measurements are no obstacle, and these
    are the same where the oracle, which looks the best up, got the same of every sample.
    """
    if run.kind == "selector":
        digests = [one.results.get("test_digest") or one.results["profile"]["digest"] for one in (reference, run)]
        what = "other held-out queries or another bank"
    else:
        digests = [(one.results.get("profile") or {}).get("digest") for one in (reference, run)]
        what = "another profile"
        oracles = [outcomes_of(one, "oracle") for one in (reference, run)]
        old, new = oracles
        if digests[0] != digests[1] and old is not None and new is not None and old.samples == new.samples:
            common = [place for place in old.places if place in new.places]
            cut = [_cut(one, old.samples, common).values for one in (old, new)]
            if common and all(np.array_equal(cut[0][name], cut[1][name]) for name in cut[0]):
                return ""
    if digests[0] == digests[1]:
        return ""
    return f"{run.label} was judged on {what} than {reference.label}: its numbers are of other samples, and not tested"


def _restricted(
    reference: ComparedRun,
    run: ComparedRun,
    old: Outcomes,
    new: Outcomes,
    samples: Sequence[str],
    left_out: Sequence[float],
) -> str:
    notes = []
    if len(samples) < max(len(old.samples), len(new.samples)):
        notes.append(
            f"tested on the {len(samples):,} samples that both were judged on ({reference.label}: "
            f"{len(old.samples):,}, {run.label}: {len(new.samples):,})"
        )
    if left_out:
        mean = "" if run.kind == "selector" else ", so its mean is over the others"
        notes.append(f"not judged at {len(left_out)} of the {_places(reference)}{mean}")
    if new.seeds != old.seeds:
        notes.append("trained with other seeds, which are drawn for themselves")
    return f"{run.label}: {'; '.join(notes)}" if notes else ""


def _places(run: ComparedRun) -> str:
    return "numbers of shots" if run.kind == "selector" else "budgets"
