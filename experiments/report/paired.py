"""Differences between two runs on the same samples and at the same conditions, which are budgets or
numbers of shots."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import polars as pl

from knobwise.envs.tables.units import MS
from knobwise.experiments.evidence.results import not_known, unit_of
from knobwise.experiments.evidence.statistics import FEWEST, Difference, paired_differences
from knobwise.experiments.report.runs import Run
from knobwise.experiments.report.sentences import Sentence

KEYS = ("seed", "sample", "condition")
"""The columns that tell the decisions of a policy apart."""
COLUMNS = ("utility", "accuracy", "latency_ms", "decision_us")
"""The columns that are compared, and the time that is taken off the latency under mean budgets."""
JUDGES = {
    "scorer": "a model's answers",
    "recorded": "recorded answers",
    "best_beam": "the scores of beams",
    None: "a measure that was not noted",
}
"""What a run of selectors was judged by, in words, by `judged_by`."""


def decisions_of(run: Run, policy: str) -> pl.DataFrame | None:
    """Return a policy's `COLUMNS`, with `KEYS` and sorted by them; None if the run has no
    decisions, or not for every seed, sample and condition."""
    if run.decisions is None:
        return None
    part = run.decisions.filter(policy=policy)
    part = part.select(*KEYS, *COLUMNS).unique(KEYS, keep="first").sort(KEYS)
    complete = part.height == math.prod(part.select(pl.col(KEYS).n_unique()).row(0))
    if part.height and complete:
        return part
    return None


def judged_alike(reference: Run, run: Run, conditions: Sequence[float]) -> bool:
    """Return whether the numbers of two runs at these conditions are means over the same samples,
    with the same measurements; False if that is unknown. A mean is over the samples of which every
    policy's accuracy is known."""
    if not same_measurements(reference, run):
        return False
    known = pl.col("accuracy").is_not_null().all()
    keys = ("condition", "sample")
    samples = []
    for side in (reference, run):
        if side.decisions is None:
            return False
        judged = pl.col("condition").is_in(list(conditions))
        decisions = side.decisions.filter(judged)
        samples.append(decisions.group_by(keys).agg(known).filter("accuracy").sort(keys))
    return samples[0].equals(samples[1])


def differences(
    reference: Run, run: Run, policies: tuple[str, str], conditions: Sequence[float]
) -> tuple[list[Difference], Sentence | None]:
    """Compare a policy of `run` with one of `reference`, a run of the same task: the mean over
    `conditions` where that has a meaning, then each condition.

    Args:
        reference: what is compared with.
        run: what is compared.
        policies: that of the reference, that of the run.
        conditions: sorted; only those that both runs were judged at count.

    Returns:
        the differences, and what is restricted, or why there are none.
    """
    sides, refusal = _comparable(reference, run, policies)
    if refusal is not None:
        return [], refusal
    seeds, samples, shared = (set(sides[0][key]) & set(sides[1][key]) for key in KEYS)
    common = [condition for condition in conditions if condition in shared]
    if len(samples) < FEWEST or not common:
        return [], Sentence(
            "little_in_common",
            run=run.label,
            samples=len(samples),
            count=len(common),
            conditions=run.task.condition_words[1],
            reference=reference.label,
        )
    # the same samples and conditions of both, in the same order
    both = pl.col("sample").is_in(samples) & pl.col("condition").is_in(common)
    scores = _scores(reference, [side.filter(both) for side in sides])
    same_seeds = all(set(side["seed"]) == seeds for side in sides)
    columns: list[float | None] = list(common)
    if run.task.averaged:
        scores = [np.concatenate([side.mean(2, keepdims=True), side], 2) for side in scores]
        columns.insert(0, None)
    tested = []
    tests = _tests(scores, same_seeds, _clusters(reference, samples))
    for column, count, (gap, low, high, p) in tests:
        difference = Difference(
            run=run.label,
            against=reference.label,
            policy=policies[1],
            against_policy=policies[0],
            condition=columns[column],
            samples=count,
            difference=gap,
            ci95=(low, high),
            p=p,
        )
        tested.append(difference)
    left_out = len(conditions) - len(common)
    return tested, _restrictions(reference, run, sides, len(samples), left_out, same_seeds)


def _comparable(
    reference: Run, run: Run, policies: tuple[str, str]
) -> tuple[list[pl.DataFrame], Sentence | None]:
    """Return the decisions of both, or why they cannot be compared."""
    sides = []
    for side, policy in zip((reference, run), policies, strict=True):
        if unknown := not_known(side.row(policy, side.task.main_condition(side.results))):
            return [], Sentence("not_known_of", run=side.label, reason=unknown)
        if "split_seeds" in side.results:
            return [], Sentence("several_splits", run=side.label)
        decisions = decisions_of(side, policy)
        if decisions is None:
            missing = side.missing or "has incomplete decisions"
            return [], Sentence("no_decisions", run=side.label, missing=missing)
        sides.append(decisions)
    judge, other = (side.results.get("judged_by") for side in (run, reference))
    if judge != other:
        judges = {"judge": JUDGES[judge], "other": JUDGES[other]}
        return [], Sentence("other_judge", run=run.label, reference=reference.label, **judges)
    if not same_measurements(reference, run):
        return [], Sentence("other_measurements", run=run.label, reference=reference.label)
    return sides, None


def _restrictions(
    reference: Run,
    run: Run,
    sides: Sequence[pl.DataFrame],
    samples: int,
    left_out: int,
    same_seeds: bool,
) -> Sentence | None:
    """Say what of two runs was not compared: samples beyond those that both share, conditions that
    were left out, and whether seeds were paired; None if everything was."""
    parts = []
    judged, judged_of_run = (side["sample"].n_unique() for side in sides)
    if samples < max(judged, judged_of_run):
        parts.append(
            Sentence(
                "shared_samples",
                samples=f"{samples:,}",
                reference=reference.label,
                judged=f"{judged:,}",
                run=run.label,
                judged_of_run=f"{judged_of_run:,}",
            )
        )
    if left_out:
        words = run.task.condition_words[1]
        parts.append(Sentence("conditions_left_out", count=left_out, conditions=words))
    if not same_seeds:
        parts.append(Sentence("other_seeds"))
    if not parts:
        return None
    return Sentence("restricted", run=run.label, parts="; ".join(map(str, parts)))


def _tests(
    pair: Sequence[np.ndarray], same_seeds: bool, clusters: np.ndarray
) -> list[tuple[int, int, tuple[float, ...]]]:
    """Test the second minus the first where enough is known.

    Args:
        pair: scores, float [S, n, columns] each, NaN where unknown.
        same_seeds: whether the seeds are the same.
        clusters: of each sample, see `_clusters`.

    Returns:
        column, number of samples, and the results of `paired_differences`, by column.
    """
    # columns in which the same samples are known are tested together
    known, group = np.unique(~np.isnan(np.concatenate(pair)).any(0), axis=1, return_inverse=True)
    tests = []
    # [n] of samples that are known on both sides
    for i, rows in enumerate(known.T):
        if rows.sum() >= FEWEST:
            columns = np.flatnonzero(group == i)
            against, scores = (values[:, rows][:, :, columns] for values in pair)
            of_known = np.unique(clusters[rows], return_inverse=True)[1]
            results = paired_differences(scores, against, same_seeds, of_known)
            for column, result in zip(columns, results, strict=True):
                tests.append((int(column), int(rows.sum()), result))
    return sorted(tests)


def _clusters(run: Run, samples: set[str]) -> np.ndarray:
    """Return the number of the cluster of each of these samples, in their order, int [n]; a sample
    without one is alone."""
    assert run.decisions is not None  # or there would be no samples
    rows = run.decisions.select("sample", pl.coalesce("cluster", "sample"))
    rows = rows.filter(pl.col("sample").is_in(samples)).unique("sample").sort("sample")
    return np.unique(rows["cluster"].to_numpy(), return_inverse=True)[1]


def _scores(reference: Run, pair: Sequence[pl.DataFrame]) -> list[np.ndarray]:
    """Return the numbers of both that are compared, float64 [S, n, P], NaN where unknown: the
    score, or under mean budgets accuracy less what the static mix of the reference gains with the
    latency that was spent.

    There the time of a decision is left out. It was taken once for all samples, so that the noise
    of a machine would shift all of them alike, and look like a difference without any spread. Of
    features, which a profile says the cost of, the time counts."""
    hull = reference.results.get("static_hull")
    if hull is None:
        return [_cube(side, reference.task.score) for side in pair]
    costs = np.maximum.accumulate([corner["latency_ms"] for corner in hull])
    gains = [corner["accuracy"] for corner in hull]
    latency = [_cube(side, "latency_ms") for side in pair]
    if unit_of(reference.results) == MS:
        # what decides for free has no such time; budgets in another unit are charged none
        decision_us = [np.nan_to_num(_cube(side, "decision_us")) for side in pair]
        latency = [cost - us / 1e3 for cost, us in zip(latency, decision_us, strict=True)]
    spent = [cost.mean((0, 1)) for cost in latency]
    more = np.diff([np.interp(cost, costs, gains) for cost in spent], axis=0)[0]
    further = spent[1] - spent[0]
    same = np.abs(further) < 1e-9
    # the slope of the static mix, accuracy per ms, between the latencies that the two spent
    price = np.where(same, 0.0, more / np.where(same, 1.0, further))
    accuracy = [_cube(side, "accuracy") for side in pair]
    return [right - price * cost for right, cost in zip(accuracy, latency, strict=True)]


def _cube(decisions: pl.DataFrame, column: str) -> np.ndarray:
    """Return a column as float64 [S, n, P], NaN where it is unknown."""
    values = decisions[column].cast(pl.Float64).fill_null(math.nan).to_numpy()
    return values.reshape(decisions["seed"].n_unique(), -1, decisions["condition"].n_unique())


def same_measurements(reference: Run, run: Run) -> bool:
    """Return whether two runs were judged on the same measurements, in the same way, under the same
    limits.

    A model that is asked and records that are looked up judge the same queries differently.
    The digest of a profile covers its features too, but runs with other features of the same
    measurements can be compared. The measurements are the same where the oracle, which looks up the
    best choice, has the same outcome for every sample.
    """
    if _limits_of(reference) != _limits_of(run):
        return False
    if reference.results.get("judged_by") != run.results.get("judged_by"):
        return False
    digests = set()
    oracles = []
    for side in (reference, run):
        profile = side.results.get("profile") or {}
        digests.add(side.results.get("test_digest") or profile.get("digest"))
        oracles.append(decisions_of(side, "oracle"))
    first, second = oracles
    if len(digests) == 1 or first is None or second is None:
        return len(digests) == 1
    common = set(first["condition"]) & set(second["condition"])
    shared = pl.col("condition").is_in(common)
    columns = ("sample", "condition", reference.task.score, "accuracy", "latency_ms")
    first = first.filter(shared).select(*dict.fromkeys(columns))
    second = second.filter(shared).select(*dict.fromkeys(columns))
    # unknown latencies are not equal: accuracy alone proves nothing
    return bool(common) and first.equals(second, null_equal=False)


def _limits_of(run: Run) -> dict[str, float]:
    """Return the limits on further costs that a run was judged under."""
    costs = run.results.get("costs") or {}
    return {name: cost["limit"] for name, cost in costs.items() if "limit" in cost}
