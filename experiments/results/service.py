"""What policies get that serve a queue: results.json and decisions.parquet, with a row for each trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from knobwise.agents.service.baselines import Outcome
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.results.controllers import profile_of
from knobwise.experiments.results.problem import SERVICE
from knobwise.experiments.results.statistics import mean_intervals, paired

KEYS = {"utility": "utility", "accuracy": "accuracy", "latency_ms": "latency_ms_mean", "waited_ms": "waited_ms_mean"}
KEYS |= {"satisfaction": "satisfaction"}
"""Part of an `Outcome` → key of its mean in a row."""


def service_results(
    outcomes: Mapping[str, Mapping[str, Sequence[Outcome]]], seeds: Sequence[int], table: ProfileTable
) -> tuple[dict[str, Any], pl.DataFrame]:
    """The contents of `results.json` and of `decisions.parquet`, from outcomes by policy and load, one for each seed.

    Rows hold means over requests, traces and seeds; those with load None the means over the loads, every load counting
    the same. `differences`: the trained policy − every other, in utility, with intervals paired over traces.
    """
    loads, learned = list(next(iter(outcomes.values()))), SERVICE.trained[0]
    cubes = {
        policy: {part: np.stack([_traces(by_load[load], part) for load in loads], 2) for part in KEYS}
        for policy, by_load in outcomes.items()
    }  # [S, traces, loads]
    places: list[str | None] = [*loads, None]
    rows, differences, frames = [], [], []
    for policy, parts in cubes.items():
        utility = np.concatenate([parts["utility"], parts["utility"].mean(2, keepdims=True)], 2)
        gained = cubes[learned]["utility"] - parts["utility"]
        against = paired(np.concatenate([gained, gained.mean(2, keepdims=True)], 2), np.zeros_like(utility[:1]), True)
        intervals = mean_intervals(list(np.moveaxis(utility, 2, 0)))
        for number, place in enumerate(places):
            means = {
                key: float((parts[part] if place is None else parts[part][:, :, number]).mean())
                for part, key in KEYS.items()
            }
            rows.append({"policy": policy, "load": place, **means, "utility_ci95": intervals[number]})
            difference, low, high, _ = against[number]
            if policy != learned:
                compared = {"policy": learned, "against": policy, "load": place, "difference": difference}
                differences.append(compared | {"ci95": [low, high]})
        for number, seed in enumerate(seeds[: len(utility)] if policy == learned else [None]):
            frames += [
                _frame(policy, seed, load, {p: c[number, :, i] for p, c in parts.items()})
                for i, load in enumerate(loads)
            ]
    results = {"system": SERVICE.name, "profile": profile_of(table), "seeds": list(seeds), "unit": table.unit}
    results |= {"test_traces": utility.shape[1], "loads": loads, "rows": rows, "differences": differences}
    return results, pl.concat(frames)


def _traces(outcomes: Sequence[Outcome], part: str) -> np.ndarray:
    """float64 [S, traces]."""
    return np.stack([getattr(outcome, part)[:, 0].numpy() for outcome in outcomes])


def _frame(policy: str, seed: int | None, load: str, parts: Mapping[str, np.ndarray]) -> pl.DataFrame:
    """A row for each trace; the load stands where others have a data set."""
    columns = {"accuracy": parts["accuracy"], "latency_ms": parts["latency_ms"], "in_time": parts["satisfaction"]}
    ids = [str(trace) for trace in range(len(parts["utility"]))]
    named = {"policy": policy, "dataset": load, "sample_id": ids, "score": parts["utility"], **columns}
    return pl.DataFrame(named).with_columns(seed=pl.lit(seed, pl.Int64))
