"""The results of requests that were served live: a row for each policy, the replay of the same
decisions from the profile, and what the controller added to the model's own time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knobwise.agents.policy.controller import Drift, NumpyController
from knobwise.envs.configurations.budgets import LEAST_LATENCY_MS
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.report.words import FROZEN, LEARNED, STATIC
from knobwise.experiments.results.statistics import mean_interval
from knobwise.profiling.measuring.adaptive_model import Request
from knobwise.profiling.measuring.machine import cpu_name

METRICS = ("accuracy", "latency_ms", "satisfaction", "utility")
"""The metrics of every request; `satisfaction` is the share of measurements that are on time."""
BEST_STATIC = "best_static"


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

    def scaled(self, speed: float) -> Stream:
        """Return the stream with budgets for a machine that takes `speed` times as long."""
        return replace(self, budgets_ms=self.budgets_ms * speed)

    def first(self, n: int) -> Stream:
        """Return the first n requests of the stream."""
        return replace(self, rows=self.rows[:n], budgets_ms=self.budgets_ms[:n], ids=self.ids[:n])


class Served(NamedTuple):
    """The decision of one policy for one request, and its times in ms."""

    choice: int
    score: float
    inference_ms: float
    overhead_ms: float
    """Time beyond the model's own: for static to choose and to follow the drift, for a fixed
    configuration none."""
    limit_ms: float
    """The limit that the decision had to meet; NaN for a fixed configuration."""
    decision_us: float
    log_latency: float
    """The predicted mean of ln ms, without drift; NaN where nothing was predicted."""
    spread: float
    """The predicted standard deviation of ln ms, without drift; NaN where nothing was predicted."""
    drift: Drift | None
    """The drift of the machine that the decision allowed for."""


@dataclass
class Record:
    """A record of what P policies served in n requests and R repeats."""

    policies: list[str]
    served: dict[str, NDArray[Any]]
    """The fields of `Served`, [P, n, R] each."""


def live_results(
    table: ProfileTable, stream: Stream, record: Record, controller: NumpyController, speed: float
) -> dict[str, Any]:
    """Return a row for each policy, the replay of the same decisions, and the overhead.

    Live and replay agree if the replay lies in the interval of what was served, and for accuracy if
    every answer is the same. Only the model's part is replayed, each of its measurements, at the
    median speed of all answers: the overhead stays as it was. Intervals are 95 % bootstrap
    intervals over requests.
    """
    served = {
        name: torch.from_numpy(values) for name, values in record.served.items() if name != "drift"
    }
    budgets = torch.from_numpy(stream.budgets_ms)[:, None]
    live = _outcomes(
        served["score"], (served["inference_ms"] + served["overhead_ms"]).unsqueeze(-1), budgets
    )
    learned = record.policies.index(LEARNED)
    choice = served["choice"].long()
    # samples that the table does not hold cannot be replayed
    replay = None
    during: dict[str, Any] = {}
    decisions: dict[str, float] = {}
    if (stream.rows >= 0).all():
        replay = _Replay(table, stream, served)
        during = replay.speed()
        decisions = _replayed_decisions(table, stream, controller, record, learned)
    rows, agreement = _rows(record.policies, live, replay)
    fixed = [
        (p, name) for p, name in enumerate(record.policies) if name not in (LEARNED, FROZEN, STATIC)
    ]
    return {
        "kind": "simulated request stream, served live",
        "profile": {"name": table.name, "digest": table.digest},
        "machine": {
            "cpu": cpu_name(),
            "torch": torch.__version__,
            "threads": 1,
            "load": os.getloadavg()[0],
        },
        "requests": len(stream.rows),
        "budgets_ms": sorted(set(stream.budgets_ms.tolist())),
        "infeasible": None if replay is None else float((~replay.feasible).double().mean()),
        "speed": {"before": speed, **during},
        "rows": rows,
        "agreement": agreement,
        "overhead": _overhead({name: values[learned] for name, values in served.items()}),
        "decisions": decisions,
        "timeline": _timeline(stream, record, learned),
        "configurations": {name: table.configuration(int(choice[p, -1, -1])) for p, name in fixed},
    }


def _rows(
    policies: Sequence[str], live: Mapping[str, Tensor], replay: _Replay | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a row for each policy, and for each of its metrics how well the replay agrees."""
    gained = live["utility"].mean(-1)
    learned = policies.index(LEARNED)
    rows = []
    agreement = []
    for p, name in enumerate(policies):
        row: dict[str, Any] = {"policy": name}
        for metric in METRICS:
            row |= _mean(metric, live[metric][p].mean(-1))
            if replay is not None:
                compared = replay.agreement(p, metric, live[metric][p], row[f"{metric}_ci95"])
                agreement.append({"policy": name, "what": metric, **compared})
        row["latency_ms_p95"] = float(live["latency_ms"][p].quantile(0.95))
        if replay is not None:
            satisfaction = live["satisfaction"][p].mean(-1)
            row |= _mean("satisfaction_feasible", satisfaction[replay.feasible])
        row["utility_per_run"] = live["utility"][p].mean(0).tolist()
        rows.append(row | _mean("behind", gained[learned] - gained[p]))
    return rows, agreement


class _Replay:
    """The live decisions, looked up in the profile. Only the model's part is replayed, each of its
    measurements, at the median speed of all answers: the overhead stays as it was."""

    def __init__(self, table: ProfileTable, stream: Stream, served: Mapping[str, Tensor]) -> None:
        table = table.without_first_look
        rows = torch.from_numpy(stream.rows)
        budgets = torch.from_numpy(stream.budgets_ms)[:, None]
        # the cell of each decision, by row and configuration [P, n, R]
        at = rows[:, None].expand(served["choice"].shape), served["choice"].long()
        self.during, self.half_width = _speed(
            served["inference_ms"] / table.latency_ms[at].clamp_min(LEAST_LATENCY_MS)
        )
        replayed = self.during * table.measurements_ms[at].double() + served[
            "overhead_ms"
        ].unsqueeze(-1)
        self._outcomes = _outcomes(table.accuracy[at].double(), replayed, budgets)
        self.feasible = (
            self.during * table.latency_ms[rows].nan_to_num(nan=torch.inf).amin(1) <= budgets[:, 0]
        )
        """bool [n], True where some configuration meets the budget."""
        # the speed of this machine is known only as well as its answers allow
        self._unsure = self.half_width * table.latency_ms[at].double().mean((1, 2))

    def speed(self) -> dict[str, Any]:
        """Return the median time of an answer as a multiple of the profile's, with its interval."""
        interval = [self.during - self.half_width, self.during + self.half_width]
        return {"during": self.during, "during_ci95": interval}

    def agreement(self, p: int, metric: str, live: Tensor, ci95: Sequence[float]) -> dict[str, Any]:
        """Compare one metric of policy p, live and replayed.

        The uncertainty about the speed widens the interval of their difference.

        Args:
            live: float [n, R].
            ci95: the interval of the live mean.
        """
        replay = self._outcomes[metric][p]
        if metric == "latency_ms":
            unsure = float(self._unsure[p])
        else:
            unsure = 0.0
        mean = float(replay.mean(-1).mean())
        gap = _mean("gap", (live - replay).mean(-1))
        centre = gap["gap"]
        low, high = gap["gap_ci95"]
        if metric == "accuracy":
            agrees = torch.equal(live, replay)
        else:
            agrees = ci95[0] <= mean <= ci95[1]
        # independent errors add up in squares
        interval = [
            centre - float(np.hypot(centre - low, unsure)),
            centre + float(np.hypot(high - centre, unsure)),
        ]
        live_mean = float(live.mean(-1).mean())
        return {
            "live": live_mean,
            "replay": mean,
            "agrees": agrees,
            "difference": centre,
            "ci95": interval,
        }


def _speed(ratios: Tensor) -> tuple[float, float]:
    """Return the median of latency here / latency in the profile, and half the width of its 95 %
    interval, from the ratios of all answers.

    Medians, since a single stall of the machine is longer than many answers. The standard error of
    a median is 1.25·IQR/(1.35·√n) (McGill, Tukey and Larsen 1978, "Variations of Box Plots").
    """
    low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
    return median, 1.96 * 1.25 / 1.35 * (high - low) / ratios.numel() ** 0.5


def _outcomes(accuracy: Tensor, latency_ms: Tensor, budgets_ms: Tensor) -> dict[str, Tensor]:
    """Return the `METRICS` of every request, [P, n, R] each, from latencies [P, n, R, M] of M
    measurements."""
    met = (latency_ms <= budgets_ms.unsqueeze(-1)).double().mean(-1)
    return dict(zip(METRICS, (accuracy, latency_ms.mean(-1), met, accuracy * met), strict=True))


def _overhead(served: Mapping[str, Tensor]) -> dict[str, float]:
    """Return what the controller adds to the model's time. Its parts are given as medians: a stall
    of the machine would count in only one of them."""
    inference = float(served["inference_ms"].mean())
    overhead = served["overhead_ms"]
    decision_us = float(served["decision_us"].median())
    overhead_us = float((overhead * 1e3).median())
    return {
        "inference_ms": inference,
        "overhead_us": float(overhead.mean()) * 1e3,
        "overhead_us_p50": overhead_us,
        "decision_us_p50": decision_us,
        "features_and_knobs_us_p50": overhead_us - decision_us,
        "share": float(overhead.mean()) / inference,
        "share_p50": float(overhead.median()) / inference,
    }


def _replayed_decisions(
    table: ProfileTable, stream: Stream, controller: NumpyController, record: Record, learned: int
) -> dict[str, float]:
    """Return how often a replay that allows for the same drift decides as the controller did: at
    its limits, and at whole budgets."""
    blocks = {name: block.numpy() for name, block in table.features.items()}
    served = {name: values[learned] for name, values in record.served.items()}
    same = np.zeros((2, *served["choice"].shape), bool)
    for (i, repeat), choice in np.ndenumerate(served["choice"]):
        features = {name: block[stream.rows[i]] for name, block in blocks.items()}
        drift = served["drift"][i, repeat]
        for k, limit in enumerate((served["limit_ms"][i, repeat], stream.budgets_ms[i])):
            same[k, i, repeat] = controller.decide_index(features, float(limit), drift) == choice
    names = "as_replayed_at_the_same_limit", "as_replayed_at_the_whole_budget"
    return dict(zip(names, same.mean((1, 2)).tolist(), strict=True))


def _timeline(stream: Stream, record: Record, learned: int) -> list[dict[str, float]]:
    """Return the first run of the controller, request by request, with residuals in units of the
    expected spread."""
    served = {name: values[learned, :, 0] for name, values in record.served.items()}
    rows = []
    for i, drift in enumerate(served["drift"]):
        offsets, scale = drift or (0.0, 1.0)
        # a tracker has an offset for each configuration, or one for all
        offsets = np.atleast_1d(offsets)
        offset = offsets[int(served["choice"][i]) if len(offsets) > 1 else 0]
        inference, overhead = (float(served[name][i]) for name in ("inference_ms", "overhead_ms"))
        residual = np.log(max(inference, LEAST_LATENCY_MS)) - served["log_latency"][i] - offset
        row = {
            "latency_ms": inference + overhead,
            "budget_ms": float(stream.budgets_ms[i]),
            "residual": residual / max(scale * served["spread"][i], 1e-3),
            "level": float(np.exp(np.mean(offsets))),
            "spread": float(scale),
        }
        rows.append({name: round(float(value), 4) for name, value in row.items()})
    return rows


def _mean(name: str, values: Tensor) -> dict[str, Any]:
    """Return the mean of a metric over requests and its interval, both None without requests."""
    if not len(values):
        return {name: None, f"{name}_ci95": None}
    # rounded, since an error in the last bit would make a share greater than 1
    interval = [round(end, 12) for end in mean_interval(values)]
    return {name: float(values.mean()), f"{name}_ci95": interval}
