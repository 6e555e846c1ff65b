"""The results of requests that were served live: a row for each policy, the replay of the same
decisions from the profile, and what the controller added to the model's own time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from knobwise.agents.deployed.controller import Drift, NumpyController
from knobwise.agents.serving.tracker import LEAST_SPREAD
from knobwise.envs.bandit.budgets import LEAST_LATENCY_MS
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.evidence.statistics import mean_interval, with_interval
from knobwise.profiling.measuring.adaptive_model import Request
from knobwise.profiling.measuring.machine import cpu_name

Array = NDArray[Any]


@dataclass(frozen=True)
class Stream:
    """A stream of n requests: which sample, under which budget. Each request arrives when the one
    before it has been answered."""

    rows: NDArray[np.int64]
    """[n], rows of the table; −1 for a sample that it does not hold."""
    budgets_ms: NDArray[np.float64]
    """[n], the time that each request may take."""
    ids: list[str]
    """n ids of samples."""
    requests: Mapping[str, Request]
    """The request of each sample, by its id."""
    timed: Mapping[int, Request]
    """Requests by row of the table. They are timed first, to find the speed of this machine."""


class Served(NamedTuple):
    """The decision of one policy for one request, and its times in ms."""

    choice: int
    score: float
    inference_ms: float
    overhead_ms: float = 0.0
    """Time beyond the model's own: for static to choose and to follow the drift, for a fixed
    configuration none."""
    limit_ms: float = np.nan
    """The limit that the decision had to meet; NaN for a fixed configuration."""
    decision_us: float = 0.0
    log_latency: float = np.nan
    """The expected mean of ln ms, without drift; NaN where nothing was expected."""
    spread: float = np.nan
    """The expected standard deviation of ln ms, without drift; NaN where nothing was expected."""
    drift: Drift | None = None
    """The drift of the machine that the decision allowed for."""


Record = dict[str, Array]
"""What P policies served in n requests: the fields of `Served`, [P, n] each."""


def live_results(
    table: ProfileTable,
    stream: Stream,
    policies: Iterable[str],
    served: Record,
    controller: NumpyController,
    speed: float,
) -> dict[str, Any]:
    """Return a row for each policy, the replay of the same decisions, and the overhead. The first
    policy is the controller.

    Live and replay agree if the replay lies in the interval of what was served, and for accuracy if
    every answer is the same. Intervals are 95 % bootstrap intervals over requests.
    """
    took_ms = (served["inference_ms"] + served["overhead_ms"])[..., None]
    live = _metrics(served["score"], took_ms, stream)
    rows = []
    for p, name in enumerate(policies):
        row: dict[str, Any] = {"policy": name}
        for metric, values in live.items():
            row |= with_interval(metric, values[p])
        row["latency_ms_p95"] = float(np.quantile(live["latency_ms"][p], 0.95))
        # on the same requests, so that the interval is a paired one
        rows.append(row | with_interval("behind", live["utility"][0] - live["utility"][p]))
    # of the controller
    decided = {name: values[0] for name, values in served.items()}
    load = os.getloadavg()[0]
    machine = {"cpu": cpu_name(), "torch": torch.__version__, "threads": 1, "load": load}
    results = {
        "kind": "simulated request stream, served live",
        "profile": {"name": table.name, "digest": table.digest},
        "machine": machine | {"jitter": None},
        "requests": len(stream.rows),
        "budgets_ms": sorted(set(stream.budgets_ms.tolist())),
        "infeasible": None,
        "speed": {"before": speed},
        "rows": rows,
        "agreement": [],
        "overhead": _overhead(decided),
        "decisions": {},
        "timeline": _timeline(stream, decided, len(controller.configurations)),
    }
    # samples that the table does not hold cannot be replayed
    if (stream.rows >= 0).all():
        _add_replay(results, table, stream, served, live)
        same = _replayed_decisions(table, stream, controller, decided)
        results["decisions"] = {"as_replayed_at_the_same_limit": same}
    return results


def _add_replay(
    results: dict[str, Any],
    table: ProfileTable,
    stream: Stream,
    served: Record,
    live: Record,
) -> None:
    """Look the live decisions up in the profile, and add how well they agree.

    Only the model's part is replayed, each of its measurements, at the median speed of all answers:
    the overhead stays as it was. The speed is a median, since a single stall of the machine is
    longer than many answers. The standard error of a median is 1.25·IQR/(1.35·√n) (McGill, Tukey
    and Larsen 1978, "Variations of Box Plots").
    """
    table = table.without_first_look
    choice = served["choice"].astype(int)
    # the cell of each decision, by row and configuration [P, n]
    cells = np.broadcast_to(stream.rows, choice.shape), choice
    profiled_ms = table.latency_ms.double().numpy()
    ratios = served["inference_ms"] / profiled_ms[cells].clip(LEAST_LATENCY_MS)
    low, speed, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
    half_width = 1.96 * 1.25 / 1.35 * (high - low) / ratios.size**0.5
    # the spread of ln ms of equal answers
    results["machine"]["jitter"] = float(np.log(high / low)) / 1.35
    results["speed"] |= {"during": speed, "during_ci95": [speed - half_width, speed + half_width]}

    # requests whose budget some configuration meets
    feasible = speed * np.nanmin(profiled_ms[stream.rows], 1) <= stream.budgets_ms
    results["infeasible"] = float(1 - feasible.mean())
    measured_ms = speed * table.measurements_ms.double().numpy()[cells]
    took_ms = measured_ms + served["overhead_ms"][..., None]
    replay = _metrics(table.accuracy.double().numpy()[cells], took_ms, stream)
    for p, row in enumerate(results["rows"]):
        on_time = live["satisfaction"][p][feasible]
        row |= with_interval("satisfaction_feasible", on_time)
        for metric, values in live.items():
            replayed = replay[metric][p]
            gaps = values[p] - replayed
            mean = float(replayed.mean())
            low, high = row[f"{metric}_ci95"]
            agrees = low <= mean <= high
            if metric == "accuracy":
                agrees = np.array_equal(values[p], replayed)
            # the speed of this machine is known only as well as its answers allow
            unsure = half_width * profiled_ms[cells][p].mean() * (metric == "latency_ms")
            # independent errors add up in squares
            difference = float(gaps.mean())
            below, above = np.hypot(np.subtract(mean_interval(gaps), difference), unsure).tolist()
            results["agreement"].append(
                {
                    "policy": row["policy"],
                    "what": metric,
                    "live": row[metric],
                    "replay": mean,
                    "agrees": agrees,
                    "difference": difference,
                    "ci95": [difference - below, difference + above],
                }
            )


def _metrics(accuracy: Array, latency_ms: Array, stream: Stream) -> Record:
    """Return accuracy, latency in ms, satisfaction (the share of measurements that are on time) and
    utility of every request, float [P, n] each, from accuracies [P, n] and latencies [P, n, M] of M
    measurements."""
    met = (latency_ms <= stream.budgets_ms[:, None]).mean(-1)
    return {
        "accuracy": accuracy,
        "latency_ms": latency_ms.mean(-1),
        "satisfaction": met,
        "utility": accuracy * met,
    }


def _overhead(served: Record) -> dict[str, float]:
    """Return what the controller adds to the model's time. Its parts are given as medians: a stall
    of the machine would count in only one of them."""
    inference_ms = served["inference_ms"].mean()
    mean_us = 1e3 * served["overhead_ms"].mean()
    median_us = 1e3 * np.median(served["overhead_ms"])
    decision_us = np.median(served["decision_us"])
    overhead = {
        "inference_ms": inference_ms,
        "overhead_us": mean_us,
        "decision_us_p50": decision_us,
        "features_and_knobs_us_p50": median_us - decision_us,
        "share": mean_us / 1e3 / inference_ms,
        "share_p50": median_us / 1e3 / inference_ms,
    }
    return {name: float(value) for name, value in overhead.items()}


def _replayed_decisions(
    table: ProfileTable, stream: Stream, controller: NumpyController, served: Record
) -> float:
    """Return how often a replay at the same limits, which allows for the same drift, decides as the
    controller did, whose `Served` are [n]."""
    same = []
    decided = zip(stream.rows, served["limit_ms"], served["drift"], served["choice"], strict=True)
    for row, limit, drift, choice in decided:
        features = {name: block[row].numpy() for name, block in table.features.items()}
        same.append(controller.decide_index(features, float(limit), drift) == choice)
    return float(np.mean(same))


def _timeline(stream: Stream, served: Record, configurations: int) -> list[dict[str, float]]:
    """Return a row for each request of the controller, whose `Served` are [n], in their order.

    Returns:
        `latency_ms`, `budget_ms`; `level`, the factor on expected latencies that the tracker had
        before the decision, and `spread`, that on expected spreads; `residual`: the rest of ln ms
        that was not expected, in expected spreads.
    """
    rows = []
    for i, drift in enumerate(served["drift"]):
        offset, scale = drift or (0.0, 1.0)
        # a tracker has an offset for each configuration
        offsets = np.broadcast_to(offset, configurations)
        expected = served["log_latency"][i] + offsets[int(served["choice"][i])]
        inference_ms = max(served["inference_ms"][i], LEAST_LATENCY_MS)
        row = {
            "latency_ms": inference_ms + served["overhead_ms"][i],
            "budget_ms": stream.budgets_ms[i],
            "level": np.exp(offsets.mean()),
            "spread": scale,
            "residual": (np.log(inference_ms) - expected)
            / max(scale * served["spread"][i], LEAST_SPREAD),
        }
        rows.append({name: round(float(value), 4) for name, value in row.items()})
    return rows
