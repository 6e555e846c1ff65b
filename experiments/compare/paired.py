"""Differences between two runs on the same samples, at the same places (budgets or numbers of shots)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from knobwise.experiments.compare.runs import ComparedRun, place_of
from knobwise.experiments.results.statistics import FEWEST, Difference, paired

COLUMNS = ("score", "accuracy", "latency_ms")


@dataclass(frozen=True)
class Outcomes:
    """The outcomes of one policy's decisions: S seeds, n samples, P places."""

    seeds: tuple[int | None, ...]
    samples: tuple[str, ...]
    places: tuple[float, ...]
    values: dict[str, np.ndarray]
    """The `COLUMNS` of `decisions.parquet`: float64 [S, n, P], NaN where unknown."""

    def part(self, samples: Sequence[str], places: Sequence[float]) -> Outcomes:
        """The outcomes of these samples at these places."""
        index = {name: i for i, name in enumerate(self.samples)}
        rows, columns = [index[name] for name in samples], [self.places.index(place) for place in places]
        values = {name: cube[:, rows][:, :, columns] for name, cube in self.values.items()}
        return Outcomes(self.seeds, tuple(samples), tuple(places), values)


def outcomes_of(run: ComparedRun, policy: str) -> Outcomes | None:
    """The outcomes of a policy's decisions; None if the run has none, or not for every sample and place."""
    if run.decisions is None:
        return None
    part = run.decisions.filter(pl.col("policy") == policy).with_columns(pl.col("place").round_sig_figs(6))
    # only together are data set and sample unique
    sample = pl.concat_str("dataset", "sample_id", separator="\t", ignore_nulls=True)
    keys = ["seed", "sample_id", "place"]
    part = part.with_columns(sample_id=sample).unique(keys, keep="first").sort(keys)
    seeds, samples, places = (part[name].unique().sort().to_list() for name in keys)
    shape = len(seeds), len(samples), len(places)
    if not part.height or part.height != math.prod(shape):
        return None
    cubes = {name: part[name].cast(pl.Float64).fill_null(math.nan).to_numpy().reshape(shape) for name in COLUMNS}
    return Outcomes(tuple(seeds), tuple(samples), tuple(map(place_of, places)), cubes)


def differences(
    reference: ComparedRun, run: ComparedRun, policies: tuple[str, str], places: Sequence[float]
) -> tuple[list[Difference], str]:
    """A policy of `run` against one of `reference`: the mean over `places` where that has a meaning, then each place.

    Args:
        reference, run: of the same problem.
        policies: of the reference, of the run.
        places: only those that both runs were judged at count.

    Returns:
        the differences, and in words what is restricted, or why there are none ("" where all is well).
    """
    for side in (reference, run):
        if side.decisions is None:
            return [], f"{side.label} {side.missing}, so it is shown but not tested"
    old, new = outcomes_of(reference, policies[0]), outcomes_of(run, policies[1])
    if old is None or new is None:
        label = reference.label if old is None else run.label
        return [], f"{label}: its decisions are incomplete, so it is not tested"
    if refusal := other_measurements(reference, run):
        return [], refusal
    samples = sorted(set(old.samples) & set(new.samples))
    common = [place for place in places if place in old.places and place in new.places]
    if len(samples) < FEWEST:
        how_many = f"only {len(samples)} test samples" if samples else "no test sample"
        return [], f"{run.label} has {how_many} in common with {reference.label}, so it is not tested"
    if not common:
        several = run.problem.place_words[1]
        return [], f"{run.label} was judged at none of the {several} of {reference.label}, so it is not tested"
    pair = _scores(reference, old.part(samples, common), new.part(samples, common))
    columns: list[float | None] = [*common]
    if run.problem.averaged:
        pair = [np.concatenate([scores.mean(2, keepdims=True), scores], 2) for scores in pair]
        columns = [None, *common]
    # columns in which the same samples are known are tested together
    known, group = np.unique(~np.isnan(np.concatenate(pair)).any(0), axis=1, return_inverse=True)
    tested: dict[int, Difference] = {}
    for number, rows in enumerate(known.T):
        if rows.sum() < FEWEST:
            continue
        together = np.flatnonzero(group == number)
        against, scores = (values[:, rows][:, :, together] for values in pair)
        tests = paired(scores, against, new.seeds == old.seeds)
        for column, (gap, low, high, p) in zip(together.tolist(), tests, strict=True):
            names = (run.label, reference.label, policies[1], policies[0])
            tested[column] = Difference(*names, columns[column], int(rows.sum()), gap, (low, high), p)
    left_out = len(places) - len(common)
    return [tested[i] for i in sorted(tested)], _restrictions(reference, run, old, new, len(samples), left_out)


def _scores(reference: ComparedRun, old: Outcomes, new: Outcomes) -> list[np.ndarray]:
    """What is compared, float [S, n, P] of both: the score, or under mean budgets accuracy less what the static mix of
    the reference gains with the latency that was spent."""
    hull = reference.results.get("static_hull")
    if hull is None:
        return [side.values["score"] for side in (old, new)]
    costs, gains = (np.array([corner[key] for corner in hull]) for key in ("latency_ms", "accuracy"))
    costs = np.maximum.accumulate(costs)
    spent = [side.values["latency_ms"].mean((0, 1)) for side in (old, new)]
    worth = [np.interp(cost, costs, gains) for cost in spent]
    further = spent[1] - spent[0]
    same = np.abs(further) < 1e-9
    # what a ms more brings the static mix, between what the two spent
    price = np.where(same, 0.0, (worth[1] - worth[0]) / np.where(same, 1.0, further))
    return [side.values["accuracy"] - price * side.values["latency_ms"] for side in (old, new)]


def other_measurements(reference: ComparedRun, run: ComparedRun) -> str:
    """Why two runs were not judged on the same measurements; "" where they were.

    The digest of a profile covers its features too. Other features of the same measurements are no obstacle, and these
    are the same where the oracle, which looks the best up, has the same outcome for every sample.
    """
    sides = (reference.results, run.results)
    digests = [side.get("test_digest") or (side.get("profile") or {}).get("digest") for side in sides]
    if digests[0] == digests[1]:
        return ""
    old, new = outcomes_of(reference, "oracle"), outcomes_of(run, "oracle")
    if old is not None and new is not None and old.samples == new.samples:
        common = [place for place in old.places if place in new.places]
        first, second = (side.part(old.samples, common).values for side in (old, new))
        # without latencies (NaN) a right answer here and there is no proof
        if common and all(np.array_equal(first[name], second[name]) for name in COLUMNS):
            return ""
    return f"{run.label} was judged on other measurements than {reference.label}, so it is shown but not tested"


def _restrictions(
    reference: ComparedRun, run: ComparedRun, old: Outcomes, new: Outcomes, samples: int, left_out: int
) -> str:
    notes = []
    if samples < max(len(old.samples), len(new.samples)):
        notes.append(
            f"tested on the {samples:,} samples that both were judged on ({reference.label}: {len(old.samples):,}, "
            f"{run.label}: {len(new.samples):,})"
        )
    if left_out:
        mean = ", so its mean is over the others" if run.problem.averaged else ""
        notes.append(f"not judged at {left_out} of the {run.problem.place_words[1]}{mean}")
    if new.seeds != old.seeds:
        notes.append("trained with other seeds, so seeds are not paired")
    return f"{run.label}: {'; '.join(notes)}" if notes else ""
