"""Differences between two runs on the same samples, at the same places (budgets or numbers of
shots)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import polars as pl

from knobwise.experiments.compare.runs import ComparedRun, place_of
from knobwise.experiments.results.decisions import SAMPLE
from knobwise.experiments.results.statistics import FEWEST, Difference, paired

KEYS = ("seed", "sample", "place")
COLUMNS = ("score", "accuracy", "latency_ms")


def decisions_of(run: ComparedRun, policy: str) -> pl.DataFrame | None:
    """A policy's `COLUMNS` sorted by `KEYS`; None if the run has none, or not for every seed,
    sample and place."""
    if run.decisions is None:
        return None
    part = _with_keys(run.decisions.filter(pl.col("policy") == policy))
    part = part.select(*KEYS, *COLUMNS).unique(KEYS, keep="first").sort(KEYS)
    complete = part.height == math.prod(part.select(pl.col(KEYS).n_unique()).row(0))
    return part if part.height and complete else None


def _with_keys(decisions: pl.DataFrame) -> pl.DataFrame:
    """The decisions with `KEYS`."""
    # only together are they unique
    sample = pl.concat_str(*SAMPLE, separator="\t", ignore_nulls=True).alias("sample")
    places = {place: place_of(place) for place in decisions["place"].unique()}
    return decisions.with_columns(sample, pl.col("place").replace_strict(places))


def judged_alike(reference: ComparedRun, run: ComparedRun, places: Sequence[float]) -> bool:
    """Whether the numbers of two runs at these places are means over the same samples, with the
    same measurements; not if that is unknown. A mean is over the samples of which every policy's
    accuracy is known."""
    sides = [side.decisions for side in (reference, run)]
    if not set(places) <= set(run.places) or other_measurements(reference, run):
        return False
    known = pl.col("accuracy").fill_nan(None).is_not_null().all()
    by = ("place", "sample")
    cells = [
        _with_keys(side).filter(pl.col("place").is_in(list(places)))
        for side in sides
        if side is not None
    ]
    samples = [side.group_by(by).agg(known).filter("accuracy").sort(by) for side in cells]
    return len(samples) == 2 and samples[0].equals(samples[1])


def differences(
    reference: ComparedRun, run: ComparedRun, policies: tuple[str, str], places: Sequence[float]
) -> tuple[list[Difference], str]:
    """A policy of `run` against one of `reference`: the mean over `places` where that has a
    meaning, then each place.

    Args:
        reference, run: of the same problem.
        policies: of the reference, of the run.
        places: sorted; only those that both runs were judged at count.

    Returns:
        the differences, and in words what is restricted, or why there are none ("" where all is
        well).
    """
    for side in (reference, run):
        if side.decisions is None:
            return [], f"{side.label} {side.missing}, so it is shown but not tested"
        if "split_seeds" in side.results:
            return [], f"{side.label} was judged on several splits, so it is shown but not tested"
    old = decisions_of(reference, policies[0])
    new = decisions_of(run, policies[1])
    if old is None or new is None:
        if old is None:
            label = reference.label
        else:
            label = run.label
        return [], f"{label}: its decisions are incomplete, so it is not tested"
    if refusal := other_measurements(reference, run):
        return [], refusal
    samples, shared = (
        set(old[key].unique()) & set(new[key].unique()) for key in ("sample", "place")
    )
    common = [place for place in places if place in shared]
    several = run.problem.place_words[1]
    if len(samples) < FEWEST:
        if samples:
            how_many = f"only {len(samples)} test samples"
        else:
            how_many = "no test sample"
        return (
            [],
            f"{run.label} has {how_many} in common with {reference.label}, so it is not tested",
        )
    if not common:
        return (
            [],
            f"{run.label} was judged at none of the {several} of {reference.label}, so it is not "
            "tested",
        )

    same_seeds = set(old["seed"].unique()) == set(new["seed"].unique())
    restrictions = []
    judged = [side["sample"].n_unique() for side in (old, new)]
    if len(samples) < max(judged):
        counts = f"{reference.label}: {judged[0]:,}, {run.label}: {judged[1]:,}"
        restrictions.append(
            f"tested on the {len(samples):,} samples that both were judged on ({counts})"
        )
    if left_out := len(places) - len(common):
        if run.problem.averaged:
            mean = ", so its mean is over the others"
        else:
            mean = ""
        restrictions.append(f"not judged at {left_out} of the {several}{mean}")
    if not same_seeds:
        restrictions.append("trained with other seeds, so seeds are not paired")

    names = (run.label, reference.label, policies[1], policies[0])
    pair = [
        side.filter(pl.col("sample").is_in(samples), pl.col("place").is_in(common))
        for side in (old, new)
    ]
    tests = _tests(_scores(reference, pair, len(common)), same_seeds, run.problem.averaged)
    if run.problem.averaged:
        columns: Sequence[float | None] = [None, *common]
    else:
        columns = common
    tested = [
        Difference(*names, columns[i], n, gap, (low, high), p)
        for i, n, (gap, low, high, p) in tests
    ]
    return tested, f"{run.label}: {'; '.join(restrictions)}" if restrictions else ""


def _tests(
    pair: Sequence[np.ndarray], same_seeds: bool, averaged: bool
) -> list[tuple[int, int, tuple[float, ...]]]:
    """The second minus the first, float [S, n, P] each, where enough is known: column, number of
    samples, and the results of `paired`. With `averaged` the mean over the places is the first
    column."""
    if averaged:
        pair = [np.concatenate([scores.mean(2, keepdims=True), scores], 2) for scores in pair]
    # columns in which the same samples are known are tested together
    known, group = np.unique(~np.isnan(np.concatenate(pair)).any(0), axis=1, return_inverse=True)
    tests = []
    for number, rows in enumerate(known.T):
        if rows.sum() >= FEWEST:
            together = np.flatnonzero(group == number)
            against, scores = (values[:, rows][:, :, together] for values in pair)
            results = paired(scores, against, same_seeds)
            tests += [
                (int(column), int(rows.sum()), result)
                for column, result in zip(together, results, strict=True)
            ]
    return sorted(tests)


def _scores(reference: ComparedRun, pair: Sequence[pl.DataFrame], places: int) -> list[np.ndarray]:
    """What is compared, float64 [S, n, P] of both, NaN where unknown: the score, or under mean
    budgets accuracy less what the static mix of the reference gains with the latency that was
    spent."""

    def cube(side: pl.DataFrame, column: str) -> np.ndarray:
        values = side[column].cast(pl.Float64).fill_null(math.nan).to_numpy()
        return values.reshape(side["seed"].n_unique(), -1, places)

    hull = reference.results.get("static_hull")
    if hull is None:
        return [cube(side, "score") for side in pair]
    costs, gains = (
        np.array([corner[key] for corner in hull]) for key in ("latency_ms", "accuracy")
    )
    latency = [cube(side, "latency_ms") for side in pair]
    spent = [cost.mean((0, 1)) for cost in latency]
    worth = [np.interp(cost, np.maximum.accumulate(costs), gains) for cost in spent]
    further = spent[1] - spent[0]
    same = np.abs(further) < 1e-9
    # what a ms more brings the static mix, between what the two spent
    price = np.where(same, 0.0, (worth[1] - worth[0]) / np.where(same, 1.0, further))
    return [cube(side, "accuracy") - price * cost for side, cost in zip(pair, latency, strict=True)]


def other_measurements(reference: ComparedRun, run: ComparedRun) -> str:
    """Why two runs were not judged on the same measurements; "" where they were.

    The digest of a profile covers its features too. Other features of the same measurements are no
    obstacle, and these are the same where the oracle, which looks the best up, has the same outcome
    for every sample.
    """
    sides = (reference.results, run.results)
    digests = [
        side.get("test_digest") or (side.get("profile") or {}).get("digest") for side in sides
    ]
    if digests[0] == digests[1]:
        return ""
    old = decisions_of(reference, "oracle")
    new = decisions_of(run, "oracle")
    if old is not None and new is not None:
        common = set(old["place"].unique()) & set(new["place"].unique())
        first, second = (
            side.filter(pl.col("place").is_in(common)).drop("seed") for side in (old, new)
        )
        # without latencies a right answer here and there is no proof
        if common and first.equals(second, null_equal=False):
            return ""
    return (
        f"{run.label} was judged on other measurements than "
        f"{reference.label}, so it is shown but not tested"
    )
