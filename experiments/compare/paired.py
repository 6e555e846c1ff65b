"""Differences between two runs on the same samples and at the same places, which are budgets or
numbers of shots."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import polars as pl

from knobwise.experiments.compare.runs import ComparedRun, place_of
from knobwise.experiments.results.decisions import SAMPLE
from knobwise.experiments.results.statistics import FEWEST, Difference, paired

KEYS = ("seed", "sample", "place")
"""The columns that tell the decisions of a policy apart."""
COLUMNS = ("score", "accuracy", "latency_ms")
"""The columns that are compared."""


def decisions_of(run: ComparedRun, policy: str) -> pl.DataFrame | None:
    """Return a policy's `COLUMNS`, with `KEYS` and sorted by them; None if the run has no
    decisions, or not for every seed, sample and place."""
    if run.decisions is None:
        return None
    part = _with_keys(run.decisions.filter(pl.col("policy") == policy))
    part = part.select(*KEYS, *COLUMNS).unique(KEYS, keep="first").sort(KEYS)
    complete = part.height == math.prod(part.select(pl.col(KEYS).n_unique()).row(0))
    return part if part.height and complete else None


def _with_keys(decisions: pl.DataFrame) -> pl.DataFrame:
    """Add the column `sample`, and round places so that those of both runs are equal."""
    # an id is unique only together with split and data set
    sample = pl.concat_str(*SAMPLE, separator="\t", ignore_nulls=True).alias("sample")
    places = {place: place_of(place) for place in decisions["place"].unique()}
    return decisions.with_columns(sample, pl.col("place").replace_strict(places))


def judged_alike(reference: ComparedRun, run: ComparedRun, places: Sequence[float]) -> bool:
    """Return whether the numbers of two runs at these places are means over the same samples, with
    the same measurements; False if that is unknown. A mean is over the samples of which every
    policy's accuracy is known."""
    if not set(places) <= set(run.places) or other_measurements(reference, run):
        return False
    known = pl.col("accuracy").fill_nan(None).is_not_null().all()
    keys = ("place", "sample")
    samples = []
    for side in (reference, run):
        if side.decisions is None:
            return False
        decisions = _with_keys(side.decisions).filter(pl.col("place").is_in(list(places)))
        samples.append(decisions.group_by(keys).agg(known).filter("accuracy").sort(keys))
    return samples[0].equals(samples[1])


def differences(
    reference: ComparedRun, run: ComparedRun, policies: tuple[str, str], places: Sequence[float]
) -> tuple[list[Difference], str]:
    """Compare a policy of `run` with one of `reference`: the mean over `places` where that has a
    meaning, then each place.

    Args:
        reference: a run of the same problem.
        policies: that of the reference, that of the run.
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
        label = reference.label if old is None else run.label
        return [], f"{label}: its decisions are incomplete, so it is not tested"
    if refusal := other_measurements(reference, run):
        return [], refusal
    samples = set(old["sample"].unique()) & set(new["sample"].unique())
    judged = set(old["place"].unique()) & set(new["place"].unique())
    common = [place for place in places if place in judged]
    if len(samples) < FEWEST:
        how_many = f"only {len(samples)} test samples" if samples else "no test sample"
        where = f"in common with {reference.label}"
        return [], f"{run.label} has {how_many} {where}, so it is not tested"
    if not common:
        where = f"{run.problem.place_words[1]} of {reference.label}"
        return [], f"{run.label} was judged at none of the {where}, so it is not tested"

    # the same samples and places of both, in the same order
    pair = [
        side.filter(pl.col("sample").is_in(samples), pl.col("place").is_in(common))
        for side in (old, new)
    ]
    same_seeds = set(old["seed"].unique()) == set(new["seed"].unique())
    tests = _tests(_scores(reference, pair, len(common)), same_seeds, run.problem.averaged)
    columns: Sequence[float | None] = common
    if run.problem.averaged:
        columns = [None, *common]
    names = (run.label, reference.label, policies[1], policies[0])
    tested = []
    for column, count, (gap, low, high, p) in tests:
        tested.append(Difference(*names, columns[column], count, gap, (low, high), p))

    restrictions = _restrictions(reference, run, (old, new), len(samples))
    if left_out := len(places) - len(common):
        mean = ", so its mean is over the others" if run.problem.averaged else ""
        restrictions.append(f"not judged at {left_out} of the {run.problem.place_words[1]}{mean}")
    if not same_seeds:
        restrictions.append("trained with other seeds, so seeds are not paired")
    return tested, f"{run.label}: {'; '.join(restrictions)}" if restrictions else ""


def _restrictions(
    reference: ComparedRun, run: ComparedRun, pair: tuple[pl.DataFrame, pl.DataFrame], samples: int
) -> list[str]:
    """Say how many samples were tested, where these are not all."""
    judged = [side["sample"].n_unique() for side in pair]
    if samples == max(judged):
        return []
    counts = f"{reference.label}: {judged[0]:,}, {run.label}: {judged[1]:,}"
    return [f"tested on the {samples:,} samples that both were judged on ({counts})"]


def _tests(
    pair: Sequence[np.ndarray], same_seeds: bool, averaged: bool
) -> list[tuple[int, int, tuple[float, ...]]]:
    """Test the second minus the first where enough is known.

    Args:
        pair: scores, float [S, n, P] each, NaN where unknown.
        same_seeds: whether the seeds are the same.
        averaged: whether to add the mean over the places as the first column.

    Returns:
        column, number of samples, and the results of `paired`, by column.
    """
    if averaged:
        pair = [np.concatenate([scores.mean(2, keepdims=True), scores], 2) for scores in pair]
    # columns in which the same samples are known are tested together
    known, group = np.unique(~np.isnan(np.concatenate(pair)).any(0), axis=1, return_inverse=True)
    tests = []
    # [n] of samples that are known on both sides
    for i, rows in enumerate(known.T):
        if rows.sum() >= FEWEST:
            columns = np.flatnonzero(group == i)
            against, scores = (values[:, rows][:, :, columns] for values in pair)
            results = paired(scores, against, same_seeds)
            for column, result in zip(columns, results, strict=True):
                tests.append((int(column), int(rows.sum()), result))
    return sorted(tests)


def _scores(reference: ComparedRun, pair: Sequence[pl.DataFrame], places: int) -> list[np.ndarray]:
    """Return the numbers of both that are compared, float64 [S, n, P], NaN where unknown: the
    score, or under mean budgets accuracy less what the static mix of the reference gains with the
    latency that was spent."""

    # [S, n, P]
    def cube(side: pl.DataFrame, column: str) -> np.ndarray:
        values = side[column].cast(pl.Float64).fill_null(math.nan).to_numpy()
        return values.reshape(side["seed"].n_unique(), -1, places)

    hull = reference.results.get("static_hull")
    if hull is None:
        return [cube(side, "score") for side in pair]
    costs = np.array([corner["latency_ms"] for corner in hull])
    gains = np.array([corner["accuracy"] for corner in hull])
    latency = [cube(side, "latency_ms") for side in pair]
    spent = [cost.mean((0, 1)) for cost in latency]
    worth = [np.interp(cost, np.maximum.accumulate(costs), gains) for cost in spent]
    further = spent[1] - spent[0]
    same = np.abs(further) < 1e-9
    # the slope of the static mix, accuracy per ms, between the latencies that the two spent
    price = np.where(same, 0.0, (worth[1] - worth[0]) / np.where(same, 1.0, further))
    return [cube(side, "accuracy") - price * cost for side, cost in zip(pair, latency, strict=True)]


def other_measurements(reference: ComparedRun, run: ComparedRun) -> str:
    """Return why two runs were not judged on the same measurements; "" where they were.

    The digest of a profile covers its features too, but runs with other features of the same
    measurements can be compared. The measurements are the same where the oracle, which looks up the
    best choice, has the same outcome for every sample.
    """
    digests = []
    for side in (reference.results, run.results):
        digests.append(side.get("test_digest") or (side.get("profile") or {}).get("digest"))
    if digests[0] == digests[1]:
        return ""
    old = decisions_of(reference, "oracle")
    new = decisions_of(run, "oracle")
    if old is not None and new is not None:
        common = set(old["place"].unique()) & set(new["place"].unique())
        first, second = (
            side.filter(pl.col("place").is_in(common)).drop("seed") for side in (old, new)
        )
        # unknown latencies are not equal: accuracy alone proves nothing
        if common and first.equals(second, null_equal=False):
            return ""
    return (
        f"{run.label} was judged on other measurements than "
        f"{reference.label}, so it is shown but not tested"
    )
