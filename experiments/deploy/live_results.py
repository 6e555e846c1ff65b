"""The results of requests that were served live, as those of a run: a row for each policy. What
only serving has, such as the replay of the same decisions from the profile, is under `live`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from knobwise.agents.deployed.controller import Drift, NumpyController
from knobwise.agents.problem import Problem
from knobwise.envs.bandit.budgets import MIN_LATENCY_MS
from knobwise.envs.bandit.reward import share_on_time
from knobwise.envs.tables.cells import Cells, unread
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.evidence.decisions import SCHEMA
from knobwise.experiments.evidence.evaluate import clusters_of
from knobwise.experiments.evidence.schema import (
    AgreementRow,
    LiveFacts,
    MachineFacts,
    OverheadFacts,
    RunResults,
    ServedRow,
)
from knobwise.experiments.evidence.summarise import summarise, with_references, with_score_of
from knobwise.experiments.evidence.task import DEADLINE, Metric, over
from knobwise.profiling.measuring.adaptive_model import Request
from knobwise.profiling.measuring.machine import cpu_name
from knobwise.serving.tracker import MIN_SPREAD

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


class ServedRequest(NamedTuple):
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
"""What P policies served in n requests: the fields of `ServedRequest`, [P, n] each."""


# keys that a stream leaves open; every request has a budget of its own
OPEN = ("condition", "seed", "split", "dataset")
# what is compared with the replay: each number is the mean of one column of the decisions
COMPARED = {
    "accuracy": "accuracy",
    "latency_ms_mean": "latency_ms",
    "satisfaction": "on_time",
    "utility": "utility",
}
MEANS = [Metric(key, value=pl.col(column)) for key, column in COMPARED.items()]
NUMBERS = (
    *MEANS,
    Metric("latency_ms_p95", aggregate=pl.quantile("latency_ms", 0.95, "linear")),
    # on the same requests, so that the intervals are paired
    Metric("over_static", value=over("utility")),
    Metric("behind", value=pl.col("of_controller") - pl.col("utility")),
    # a fixed configuration decides nothing
    Metric("decision_us_p50", aggregate=pl.col("decision_us").replace(0.0, None).median()),
)


def live_decisions(
    problem: Problem, stream: Stream, policies: Sequence[str], served: Record
) -> pl.DataFrame:
    """Return the decisions of policies that served the same requests, and where the table holds
    all samples what a replay of the same decisions would get, as `decisions.parquet` has them.

    Further columns: `inference_ms`, the model's own time, in the replay its median; and
    `overhead_ms`, what was added to it. Only the model's part is replayed, each of its
    measurements, at the median speed of all answers (`speed_of`).
    """
    took_ms = (served["inference_ms"] + served["overhead_ms"])[..., None]
    table = problem.facts
    frame = _frame(table, stream, policies, served, took_ms)
    frames = [frame.with_columns(source=pl.lit("live"))]
    # samples that the table does not hold cannot be replayed
    if (stream.rows >= 0).all():
        replayable = unread(problem.cells)
        cells = _cells(stream, served)
        _, speed, _ = speed_of(replayable, stream, served)
        measured_ms = speed * replayable.measurements_ms.double().numpy()[cells]
        replayed_ms = measured_ms + served["overhead_ms"][..., None]
        replayed = served | {
            "score": replayable.accuracy.double().numpy()[cells],
            "inference_ms": speed * replayable.latency_ms.double().numpy()[cells],
        }
        frame = _frame(table, stream, policies, replayed, replayed_ms)
        feasible = _feasible(replayable, stream, speed)
        frames.append(frame.with_columns(source=pl.lit("replay")))
        frames = [part.with_columns(feasible=np.tile(feasible, len(policies))) for part in frames]
    return pl.concat(frames)


def _frame(
    table: ProfileTable,
    stream: Stream,
    policies: Sequence[str],
    served: Record,
    latency_ms: Array,
) -> pl.DataFrame:
    """Return the decisions of P policies for n requests, with latencies [P, n, M] of up to M
    measurements, NaN for none."""
    n = len(stream.rows)
    accuracy = served["score"].astype(np.float64)
    budgets_ms = torch.from_numpy(stream.budgets_ms)
    on_time = share_on_time(torch.from_numpy(latency_ms), budgets_ms).numpy()
    labels = np.array([table.label(c) for c in range(table.num_configurations)])
    # the requests for a sample belong together, as samples of a cluster do
    names = clusters_of(table) or table.sample_ids
    pairs = zip(stream.rows.tolist(), stream.ids, strict=True)
    clusters = [names[row] if row >= 0 else name for row, name in pairs]
    columns = {
        "choice": labels[served["choice"].astype(int)],
        "accuracy": accuracy,
        "latency_ms": np.nanmean(latency_ms, -1),
        "on_time": on_time,
        "utility": accuracy * on_time,
        "decision_us": served["decision_us"],
        "inference_ms": served["inference_ms"],
        "overhead_ms": served["overhead_ms"],
    }
    return pl.DataFrame(
        {
            "policy": np.repeat(policies, n),
            "request": np.tile(np.arange(n), len(policies)),
            "sample": stream.ids * len(policies),
            "cluster": clusters * len(policies),
            "condition": np.tile(stream.budgets_ms, len(policies)),
            **{name: np.ravel(values) for name, values in columns.items()},
        }
    )


def _cells(stream: Stream, served: Record) -> tuple[Array, Array]:
    """Return the cell of each decision, by row and configuration, [P, n] each."""
    choice = served["choice"].astype(int)
    return np.broadcast_to(stream.rows, choice.shape), choice


def speed_of(replayable: Cells, stream: Stream, served: Record) -> tuple[float, float, float]:
    """Return the quartiles of how many times as long as in the profile the answers took.

    Their median is the speed, since a single stall of the machine is longer than many answers.
    """
    profiled_ms = replayable.latency_ms.double().numpy()[_cells(stream, served)]
    ratios = served["inference_ms"] / profiled_ms.clip(MIN_LATENCY_MS)
    low, speed, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
    return low, speed, high


def _feasible(replayable: Cells, stream: Stream, speed: float) -> Array:
    """Return for which requests some configuration meets the budget, bool [n]."""
    fastest_ms = np.nanmin(replayable.latency_ms.double().numpy()[stream.rows], 1)
    feasible: Array = speed * fastest_ms <= stream.budgets_ms
    return feasible


def live_results(
    problem: Problem,
    stream: Stream,
    policies: Sequence[str],
    served: Record,
    controller: NumpyController,
    speed: float,
) -> tuple[RunResults, pl.DataFrame]:
    """Return the results, with a row for each policy, its means over the requests; and the
    decisions. The first policy is the controller.

    Live and replay agree if the replay lies in the interval of what was served, and for accuracy if
    every answer is the same. Intervals are 95 % bootstrap intervals over samples, or clusters, each
    with all of its requests.
    """
    table = problem.facts
    decisions = live_decisions(problem, stream, policies, served)
    requests = decisions.with_columns(pl.lit(None, SCHEMA[key]).alias(key) for key in OPEN)
    live = requests.filter(source="live")
    rows = _rows_of_policies(live, controller=policies[0])
    # of the controller
    decided = {name: values[0] for name, values in served.items()}
    facts: LiveFacts = {
        "kind": "simulated request stream, served live",
        "requests": len(stream.rows),
        "machine": _machine(),
        "speed": {"before": speed},
        "agreement": [],
        "overhead": _overhead(decided),
        "decisions": {},
        "timeline": _timeline(stream, decided, len(controller.configurations)),
    }
    if "replay" in decisions["source"]:
        low, during, high = speed_of(unread(problem.cells), stream, served)
        # the standard error of a median is 1.25·IQR/(1.35·√n) (McGill, Tukey and Larsen 1978,
        # "Variations of Box Plots")
        off = 1.96 * 1.25 / 1.35 * (high - low) / served["choice"].size ** 0.5
        # the spread of ln ms of equal answers
        facts["machine"]["jitter"] = float(np.log(high / low)) / 1.35
        facts["speed"] |= {"during": during, "during_ci95": [during - off, during + off]}
        replay = requests.filter(source="replay")
        facts["agreement"] = _agreement(rows, live, replay, off / during)
        _add_feasible(rows, live)
        same = _replayed_decisions(table, stream, controller, decided)
        facts["decisions"] = {"as_replayed_at_the_same_limit": same}
    results = {
        "profile": {
            "name": table.name,
            "digest": table.digest,
            "samples": table.num_samples,
            "configurations": table.num_configurations,
        },
        "test_samples": len(stream.rows),
        "budgets_ms": sorted(set(stream.budgets_ms.tolist())),
        "rows": rows,
        "live": facts,
    }
    return cast(RunResults, results), decisions


def _rows_of_policies(live: pl.DataFrame, controller: str) -> list[dict[str, Any]]:
    """Return a row for each policy, its means over the requests that were served.

    Args:
        live: the decisions.
        controller: the policy that others are compared with, beside static.
    """
    with_static = with_references(DEADLINE, live)
    compared = with_score_of(with_static, controller, "utility", "of_controller")
    rows = []
    for row in summarise(compared, NUMBERS, conditions=False):
        policy = row.pop("policy")
        rows.append({"policy": policy, "budget_ms": row.pop("condition"), **row})
    return rows


def _machine() -> MachineFacts:
    """Return what is known of this machine; its jitter only a replay tells."""
    return {
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "threads": 1,
        "load": os.getloadavg()[0],
        "jitter": None,
    }


def _add_feasible(rows: list[dict[str, Any]], live: pl.DataFrame) -> None:
    """Add to each row the share on time of the feasible requests, and how many are not feasible."""
    feasible = live.filter("feasible")
    on_time = Metric("satisfaction_feasible", value=pl.col("on_time"))
    shares = {row["policy"]: row for row in summarise(feasible, [on_time], conditions=False)}
    for row in rows:
        # without feasible requests there is no share
        for key in ("satisfaction_feasible", "satisfaction_feasible_ci95"):
            row[key] = shares.get(row["policy"], {}).get(key)
        row["infeasible"] = 1 - len(feasible) / len(live)


def _agreement(
    rows: list[dict[str, Any]], live: pl.DataFrame, replay: pl.DataFrame, unsure: float
) -> list[AgreementRow]:
    """Return how well the replay of the decisions agrees with what was served.

    Args:
        rows: what was served, of each policy.
        unsure: half the width of the interval of this machine's speed, as a share of it.
    """
    columns = (*COMPARED.values(), "inference_ms")
    other = replay.select("policy", "request", pl.col(columns).name.suffix("_replay"))
    both = live.join(other, on=["policy", "request"], maintain_order="left")
    numbers = [
        Metric("model_ms", aggregate=pl.mean("inference_ms_replay")),
        Metric("same_answers", aggregate=_gap("accuracy").eq(0).all()),
    ]
    for key, column in COMPARED.items():
        numbers.append(Metric(key, value=_gap(column)))
        numbers.append(Metric(f"{key}_replay", value=pl.col(f"{column}_replay")))
    gaps = summarise(both, numbers, conditions=False)
    agreement: list[AgreementRow] = []
    for row, gap in zip(rows, gaps, strict=True):
        for what in COMPARED:
            low, high = row[f"{what}_ci95"]
            replayed = gap[f"{what}_replay"]
            agrees = low <= replayed <= high
            # the speed of this machine is known only as well as its answers allow
            off = 0.0
            if what == "accuracy":
                agrees = bool(gap["same_answers"])
            elif what == "latency_ms_mean":
                off = unsure * gap["model_ms"]
            # independent errors add up in squares
            difference = gap[what]
            bounds = np.subtract(gap[f"{what}_ci95"], difference)
            below, above = np.hypot(bounds, off).tolist()
            agreement.append(
                {
                    "policy": row["policy"],
                    "what": what,
                    "live": row[what],
                    "replay": replayed,
                    "agrees": agrees,
                    "difference": difference,
                    "ci95": [difference - below, difference + above],
                }
            )
    return agreement


def _gap(column: str) -> pl.Expr:
    """Return how much more there was live than in the replay."""
    return pl.col(column) - pl.col(f"{column}_replay")


def _overhead(served: Record) -> OverheadFacts:
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
    return cast(OverheadFacts, {name: float(value) for name, value in overhead.items()})


def _replayed_decisions(
    table: ProfileTable, stream: Stream, controller: NumpyController, served: Record
) -> float:
    """Return how often a replay at the same limits, which allows for the same drift, decides as the
    controller did, whose `ServedRequest` are [n]."""
    same = []
    decided = zip(
        stream.rows,
        stream.budgets_ms,
        served["limit_ms"],
        served["drift"],
        served["choice"],
        strict=True,
    )
    for row, budget, limit, drift, choice in decided:
        features = {name: block[row].numpy() for name, block in table.features.items()}
        settled = controller.settled(float(budget), drift)
        same.append(settled.decide_index(features, float(limit), drift) == choice)
    return float(np.mean(same))


def _timeline(stream: Stream, served: Record, configurations: int) -> list[ServedRow]:
    """Return a row for each request of the controller in their order; its `ServedRequest` are [n].

    Returns:
        `latency_ms`, `budget_ms`; `level`, the factor on expected latencies that the tracker had
        before the decision, and `spread`, that on expected spreads; `residual`: the rest of ln ms
        that was not expected, in expected spreads.
    """
    rows: list[ServedRow] = []
    for i, drift in enumerate(served["drift"]):
        offset, scale = drift or (0.0, 1.0)
        # a tracker has an offset for each configuration
        offsets = np.broadcast_to(offset, configurations)
        expected = served["log_latency"][i] + offsets[int(served["choice"][i])]
        inference_ms = max(served["inference_ms"][i], MIN_LATENCY_MS)
        row = {
            "latency_ms": inference_ms + served["overhead_ms"][i],
            "budget_ms": stream.budgets_ms[i],
            "level": np.exp(offsets.mean()),
            "spread": scale,
            "residual": (np.log(inference_ms) - expected)
            / max(scale * served["spread"][i], MIN_SPREAD),
        }
        rounded = {name: round(float(value), 4) for name, value in row.items()}
        rows.append(cast(ServedRow, rounded))
    return rows
