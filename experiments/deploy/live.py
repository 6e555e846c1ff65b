"""A controller in front of the real model: a simulated stream of requests served live, compared with a replay.

Arrivals, budgets and the order of the requests are drawn; the model, its answers and the clock are real. Every request
is served by the controller (`knobwise.agents.serving.adaptive_model`), by budget-aware static and by fixed
configurations. Each follows the drift of this machine by a tracker fed with its own answers; the frozen controller and
two fixed configurations, which do not depend on latencies, do not. Each is charged everything that it takes beyond the
model's own time. Then the same decisions are looked up in the profile: a replay that disagrees with the real model
would be worth nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from threadpoolctl import threadpool_limits
from torch import Tensor

from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.judging.baselines import BestStatic, BudgetAwareStatic, averages
from knobwise.agents.serving.adaptive_model import DECISIONS_KEPT, AdaptiveModel
from knobwise.agents.serving.export import arrays_of_static, to_numpy
from knobwise.agents.serving.numpy_controller import Drift, NumpyController
from knobwise.agents.serving.tracker import LatencyTracker, TrackedStatic
from knobwise.agents.stack.priced_policy import PricedChooser
from knobwise.common.errors import InputError
from knobwise.common.files import write_text
from knobwise.common.progress import progress
from knobwise.envs.configurations.budgets import LEAST_LATENCY_MS, judged_budgets
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.report.live import print_live, write_live_page
from knobwise.experiments.report.words import FROZEN, LEARNED, STATIC
from knobwise.experiments.results.statistics import mean_interval
from knobwise.experiments.settings.options import LiveConfig
from knobwise.profiling.elastic.adapter import ElasticAdaptive, request_of
from knobwise.profiling.elastic.scenes import END, WORDS, Scenes, draw_sample, share_of_right, to_words
from knobwise.profiling.elastic.settings import Configuration, ElasticProfileConfig
from knobwise.profiling.measuring.machine import cpu_name, one_thread
from knobwise.profiling.measuring.measuring import collected_between

METRICS = ("accuracy", "latency_ms", "satisfaction", "utility")
"""What is known of every request."""
BEST_STATIC = "best_static"
IN_A_ROW = 20
"""Requests that one policy serves, as a server meets them with its caches, before the next serves the same."""


def run_live(checkpoint: str | Path, table: ProfileTable, config: LiveConfig | None = None) -> dict[str, Any]:
    """Serve a simulated stream by the built-in elastic model, print the results, write and return them.

    Raises:
        InputError: the checkpoint is no controller for deadlines or of another profile, or the profile is of another
            model.
    """
    config = config or LiveConfig()
    loaded = load_checkpoint(checkpoint)
    controller = loaded.controller
    if isinstance(controller, PricedChooser) or controller.priced:
        raise InputError(f"{checkpoint}: keeps a mean over requests; live, every request has a deadline")
    if loaded.profile_digest != table.digest or "test_rows" not in loaded.extra:
        raise InputError(f"{checkpoint}: live needs the best.pt of a training on profile {table.name!r} as it is now")
    test, fitted = loaded.extra["test_rows"], torch.cat([loaded.extra[f"{p}_rows"] for p in ("train", "validation")])
    vlm, budgets_ms = ElasticAdaptive(), judged_budgets(table, config.budgets_ms)
    stream = draw_stream(table, test, fitted, budgets_ms, config)
    check_features(vlm, table, stream)
    exported = to_numpy(controller)
    with one_thread(), threadpool_limits(1), collected_between():
        model = AdaptiveModel(vlm, exported, clock=config.clock)
        samples = {row: request_of(stream.scenes[row]) for row in stream.others}
        choices, ratios = model.timed_cells(table, samples, config.calibration)
        speed = float(np.exp(np.nanmedian(ratios)))
        stream = replace(stream, budgets_ms=stream.budgets_ms * speed)
        fixed = fixed_configurations(table, fitted, budgets_ms, config.fixed)
        server = Server(model, table, BudgetAwareStatic(table, fitted), fixed, stream, config)
        for tracker in (model.tracker, server.frozen.tracker, *(each.tracker for each in server.statics.values())):
            tracker.warm_start(choices, ratios)
        record = server.serve()
    results = live_results(table, stream, record, exported, speed)
    results |= {"tracker": model.tracker.factors(), "ignored": model.tracker.ignored}
    results |= {"repeats": config.repeats, "rate": config.rate, "clock": config.clock}
    print_live(results, Console())
    if config.json is not None:
        write_text(config.json, json.dumps(results, indent=1))
    if config.html is not None:
        write_live_page(config.html, results)
    return results


def fixed_configurations(table: ProfileTable, fitted: Tensor, budgets_ms: Tensor, count: int) -> dict[str, int]:
    """Name → configuration, by what they did on the rows fitted on (int64 [n])."""
    accuracy, latency = averages(table, fitted)
    everything = torch.ones(1, table.num_configurations, dtype=torch.bool)
    best = BestStatic(table, fitted, budgets_ms).choose({}, budgets_ms[:1], everything)
    chosen = {BEST_STATIC: best, "cheapest": latency.argmin(), "most_accurate": accuracy.argmax()}
    return {name: int(choice) for name, choice in list(chosen.items())[:count]}


# -- the stream --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stream:
    """n requests: which sample, under which budget, when."""

    rows: NDArray[np.int64]
    """[n], rows of the table."""
    budgets_ms: NDArray[np.float64]
    """[n]."""
    arrivals_s: NDArray[np.float64] | None
    """[n], seconds after the start; None if each arrives when the previous one is answered."""
    scenes: Mapping[int, Scenes]
    """By row, also of the cells that are timed to find the speed."""

    @property
    def others(self) -> list[int]:
        """The rows of those cells."""
        return sorted(set(self.scenes) - set(self.rows.tolist()))


def draw_stream(table: ProfileTable, test: Tensor, fitted: Tensor, budgets_ms: Tensor, config: LiveConfig) -> Stream:
    """Draw order, budgets (still in the profile's ms) and arrivals. The scenes are those of the profile."""
    rng, profile = np.random.default_rng(config.seed), ElasticProfileConfig()
    rounds = -(-config.requests // len(test))
    rows = np.concatenate([rng.permutation(test.numpy()) for _ in range(rounds)])[: config.requests]
    drawn = rng.choice(budgets_ms.double().numpy(), config.requests)
    arrivals = None if config.rate is None else rng.exponential(1 / config.rate, config.requests).cumsum()
    needed = {*rows.tolist(), *rng.permutation(fitted.numpy())[: config.calibration].tolist()}
    if max(needed) >= profile.samples:
        raise InputError(f"profile {table.name!r}: live needs the built-in profile of {profile.samples} samples")
    return Stream(rows, drawn, arrivals, {row: draw_sample(row, profile.seed) for row in needed})


def check_features(vlm: ElasticAdaptive, table: ProfileTable, stream: Stream) -> None:
    """Raise an InputError if samples of the stream are not those of the table, by their features."""
    for row in set(stream.rows.tolist()):
        for name, block in vlm.first_stage(request_of(stream.scenes[row])).features.items():
            known = table.features[name][row].numpy() if name in table.features else block[:0]
            # other processors may round the last bit of a half otherwise
            if known.shape != block.shape or not np.allclose(block, known, atol=4e-3, rtol=4e-3):
                raise InputError(
                    f"profile {table.name!r}: sample {table.sample_ids[row]} is not what the built-in model was "
                    "measured on; live needs profile=builtin"
                )


# -- serving -----------------------------------------------------------------------------------------------------------


class Served(NamedTuple):
    """What one policy did with one request. Times in ms."""

    choice: int
    score: float
    inference_ms: float
    overhead_ms: float
    """Time beyond the model's own: for static to choose and to follow the drift, for a fixed configuration none."""
    waited_ms: float
    limit_ms: float
    """The limit that the decision had to meet; NaN for a fixed configuration."""
    decision_us: float
    drift: Drift | None
    """What the decision allowed for."""


@dataclass
class Record:
    """What was served: P policies, n requests, R repeats."""

    policies: list[str]
    served: dict[str, NDArray[Any]]
    """The fields of `Served`, [P, n, R] each."""


class Server:
    """The policies in front of the model; each serves one request at a time: row, budget, ms it waited → `Served`."""

    def __init__(
        self,
        model: AdaptiveModel,
        table: ProfileTable,
        static: BudgetAwareStatic,
        fixed: Mapping[str, int],
        stream: Stream,
        config: LiveConfig,
    ) -> None:
        assert isinstance(model.model, ElasticAdaptive)
        self.model, self.vlm, self.table, self.stream, self.config = model, model.model.model, table, stream, config
        self.frozen = AdaptiveModel(model.model, model.controller, clock=model.clock, tracker=False)
        self.clock = time.thread_time if model.clock == "cpu" else time.perf_counter
        self.requests = {row: request_of(scene) for row, scene in stream.scenes.items()}
        self.configurations = [Configuration(**chosen) for chosen in model.configurations]
        self.soft = bool(((table.accuracy > 0) & (table.accuracy < 1)).any())
        # its choices from tables: decided in torch they would slow down the answers that follow
        tables = arrays_of_static(static)
        self.statics = {
            name: TrackedStatic(tables, LatencyTracker(model.configurations, name), budgets)
            for name, budgets in ((STATIC, None), (BEST_STATIC, np.unique(stream.budgets_ms)))
        }
        # what a choice cost lately is taken off the next budget, as in the runtime
        self.latest: dict[str, deque[float]] = {name: deque(maxlen=DECISIONS_KEPT) for name in self.statics}
        self.policies: dict[str, Callable[[int, float, float], Served]] = {
            LEARNED: partial(self.by_controller, self.model),
            FROZEN: partial(self.by_controller, self.frozen),
            **{name: partial(self.by_static, static) for name, static in self.statics.items()},
            **{name: partial(self.by_configuration, fixed[name]) for name in fixed if name != BEST_STATIC},
        }
        shape = len(self.policies), len(stream.rows), config.repeats
        fields = {name: np.zeros(shape, object if name == "drift" else float) for name in Served._fields}
        self.record = Record(list(self.policies), fields)

    def by_controller(self, model: AdaptiveModel, row: int, budget: float, waited: float) -> Served:
        start = self.clock()
        result = model.answer(self.requests[row], max(budget - waited, LEAST_LATENCY_MS))
        took_ms, inference_ms = (self.clock() - start) * 1e3, result.answer.total_ms
        score = score_of(result.answer.text.split(), self.stream.scenes[row], self.soft)
        costs = max(took_ms - inference_ms, 0.0), waited
        return Served(result.choice, score, inference_ms, *costs, result.limit_ms, result.decision_us, result.drift)

    def by_static(self, static: TrackedStatic, row: int, budget: float, waited: float) -> Served:
        latest = self.latest[static.tracker.digest]
        limit = max(budget - waited - (statistics.median(latest) if latest else 0.0), LEAST_LATENCY_MS)
        drift, start = static.tracker.drift, self.clock()
        choice, decided = static.decide(limit), self.clock()
        served, answered = self.by_configuration(choice, row, budget, waited), self.clock()
        static.update(choice, served.inference_ms)
        decision_ms = max((decided - start) * 1e3, 0.0)
        overhead_ms = decision_ms + max((self.clock() - answered) * 1e3, 0.0)
        latest.append(overhead_ms)
        return served._replace(limit_ms=limit, drift=drift, overhead_ms=overhead_ms, decision_us=decision_ms * 1e3)

    def by_configuration(self, choice: int, row: int, budget: float, waited: float) -> Served:
        request = self.requests[row]
        start = self.clock()
        run = self.vlm.generate(request.image, request.question, self.configurations[choice])
        took_ms = (self.clock() - start) * 1e3
        answer = [WORDS[token] for token in run.tokens if token != END]
        score = score_of(answer, self.stream.scenes[row], self.soft)
        return Served(choice, score, took_ms, 0.0, waited, np.nan, 0.0, None)

    def serve(self) -> Record:
        """Serve the stream by every policy: `IN_A_ROW` requests by one of them, then the same by the next, in random
        order, so that the drift of the machine hits all alike."""
        n, repeats, rng = len(self.stream.rows), self.config.repeats, np.random.default_rng((self.config.seed, 1))
        for i, policy in itertools.product(range(self.config.warm_up), self.policies.values()):
            policy(int(self.stream.rows[i % n]), float(self.stream.budgets_ms[i % n]), 0.0)
        with progress("serving", n * repeats, 0) as tick:
            for repeat in range(repeats):
                free = np.zeros(len(self.policies))  # when each policy has answered all requests before, in seconds
                for first in range(0, n, IN_A_ROW):
                    block = range(first, min(first + IN_A_ROW, n))
                    for p in rng.permutation(len(self.policies)).tolist():
                        free[p] = self._serve_block(block, p, repeat, float(free[p]))
                    tick(repeat * n + block[-1] + 1, "")
        return self.record

    def _serve_block(self, block: range, p: int, repeat: int, free: float) -> float:
        """Serve some requests by policy p, which is free after so many seconds, and return when it is free again."""
        policy, arrivals = self.policies[self.record.policies[p]], self.stream.arrivals_s
        for i in block:
            arrival = 0.0 if arrivals is None else float(arrivals[i])
            waited = 0.0 if arrivals is None else max(free - arrival, 0.0) * 1e3
            served = policy(int(self.stream.rows[i]), float(self.stream.budgets_ms[i]), waited)
            free = arrival + (served.waited_ms + served.overhead_ms + served.inference_ms) / 1e3
            for name, value in served._asdict().items():
                self.record.served[name][p, i, repeat] = value
        return free


def score_of(words: list[str], scene: Scenes, soft: bool) -> float:
    """Exact match, or the share of right words, of an answer."""
    right = to_words(scene.answers[0])
    return round(share_of_right(words, right), 4) if soft else float(words == right)


# -- the results -------------------------------------------------------------------------------------------------------


def live_results(
    table: ProfileTable, stream: Stream, record: Record, controller: NumpyController, speed: float
) -> dict[str, Any]:
    """What is printed and written: a row for each policy, the replay of the same decisions, and the overhead.

    Live and replay agree if the replay lies in the interval of what was served, and for accuracy if every answer is the
    same. Only the model's part is replayed, each of its measurements, at the median speed of all answers: overhead and
    waiting stay as they were. Intervals are 95 % bootstrap intervals over requests, and ignore that requests which wait
    for one another are not independent.
    """
    served = {name: torch.from_numpy(values) for name, values in record.served.items() if name != "drift"}
    choice, rows = served["choice"].long(), torch.from_numpy(stream.rows)
    budgets = torch.from_numpy(stream.budgets_ms)[:, None]
    at = rows[:, None].expand(choice.shape), choice
    during, half_width = _speed(served["inference_ms"] / table.latency_ms[at].clamp_min(LEAST_LATENCY_MS))
    costs = served["overhead_ms"] + served["waited_ms"]
    live = _outcomes(served["score"], (served["inference_ms"] + costs).unsqueeze(-1), budgets)
    replayed = during * table.measurements_ms[at].double() + costs.unsqueeze(-1)
    replay = _outcomes(table.accuracy[at].double(), replayed, budgets)
    gained = live["utility"].mean(-1)
    fixed = [(p, name) for p, name in enumerate(record.policies) if name not in (LEARNED, FROZEN, STATIC)]
    feasible = during * table.latency_ms[rows].nan_to_num(nan=torch.inf).amin(1) <= budgets[:, 0]
    # the speed of this machine is known only as well as its answers allow
    unsure = half_width * table.latency_ms[at].double().mean((1, 2))
    learned = record.policies.index(LEARNED)
    policies, agreement = [], []
    for p, name in enumerate(record.policies):
        row: dict[str, Any] = {"policy": name}
        for what in METRICS:
            row |= _mean(what, live[what][p].mean(-1))
            width = float(unsure[p]) if what == "latency_ms" else 0.0
            compared = _agreement(live[what][p], replay[what][p], row[f"{what}_ci95"], what, width)
            agreement.append({"policy": name, "what": what, **compared})
        row["latency_ms_p95"] = float(live["latency_ms"][p].quantile(0.95))
        row |= _mean("satisfaction_feasible", live["satisfaction"][p].mean(-1)[feasible])
        row["waited_ms"] = float(served["waited_ms"][p].mean())
        row["utility_per_run"] = live["utility"][p].mean(0).tolist()
        policies.append(row | _mean("behind", gained[learned] - gained[p]))
    decisions, timeline = _replayed_decisions(table, stream, controller, record, learned)
    return {
        "kind": "simulated request stream, served live",
        "profile": {"name": table.name, "digest": table.digest},
        "machine": {"cpu": cpu_name(), "torch": torch.__version__, "threads": 1, "load": os.getloadavg()[0]},
        "requests": len(rows),
        "budgets_ms": sorted(set(stream.budgets_ms.tolist())),
        "infeasible": float((~feasible).double().mean()),
        "speed": {"before": speed, "during": during, "during_ci95": [during - half_width, during + half_width]},
        "rows": policies,
        "agreement": agreement,
        "overhead": _overhead({name: values[learned] for name, values in served.items()}),
        "decisions": decisions,
        "timeline": timeline,
        "configurations": {name: table.configuration(int(choice[p, -1, -1])) for p, name in fixed},
    }


def _speed(ratios: Tensor) -> tuple[float, float]:
    """Latency here / latency in the profile, from those of all answers, and half the width of its 95 % interval.

    Medians, since a single stall of the machine is longer than many answers. The standard error of a median is
    1.25·IQR/(1.35·√n) (McGill, Tukey and Larsen 1978, "Variations of Box Plots").
    """
    low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
    return median, 1.96 * 1.25 / 1.35 * (high - low) / ratios.numel() ** 0.5


def _outcomes(accuracy: Tensor, latency_ms: Tensor, budgets_ms: Tensor) -> dict[str, Tensor]:
    """`METRICS` of every request, [P, n, R] each, from latencies [P, n, R, M] of M measurements."""
    met = (latency_ms <= budgets_ms.unsqueeze(-1)).double().mean(-1)
    return dict(zip(METRICS, (accuracy, latency_ms.mean(-1), met, accuracy * met), strict=True))


def _agreement(live: Tensor, replay: Tensor, ci95: Sequence[float], what: str, unsure: float) -> dict[str, Any]:
    """One metric of one policy, float [n, R], live and replayed; `unsure` widens the interval of their difference."""
    mean, gap = float(replay.mean(-1).mean()), _mean("gap", (live - replay).mean(-1))
    centre, (low, high) = gap["gap"], gap["gap_ci95"]
    agrees = torch.equal(live, replay) if what == "accuracy" else ci95[0] <= mean <= ci95[1]
    interval = [centre - float(np.hypot(centre - low, unsure)), centre + float(np.hypot(high - centre, unsure))]
    live_mean = float(live.mean(-1).mean())
    return {"live": live_mean, "replay": mean, "agrees": agrees, "difference": centre, "ci95": interval}


def _overhead(served: Mapping[str, Tensor]) -> dict[str, float]:
    """What the controller adds to the model's time. Of the parts medians: a stall would count in one of them only."""
    inference, overhead = float(served["inference_ms"].mean()), served["overhead_ms"]
    decision_us, overhead_us = float(served["decision_us"].median()), float((overhead * 1e3).median())
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
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """How often a replay that allows for the same drift decides as the controller did, at its limits and at whole
    budgets; and the first run, request by request, with residuals in units of the expected spread."""
    blocks = {name: block.numpy() for name, block in table.features.items()}
    served = {name: values[learned] for name, values in record.served.items()}
    same, timeline = np.zeros((2, *served["choice"].shape), bool), []
    for (i, repeat), choice in np.ndenumerate(served["choice"]):
        features, drift = {name: block[stream.rows[i]] for name, block in blocks.items()}, served["drift"][i, repeat]
        limit, budget = float(served["limit_ms"][i, repeat]), float(stream.budgets_ms[i])
        index, log_latency, spread = controller.decide_expected(features, limit, drift)
        same[:, i, repeat] = index == choice, controller.decide_index(features, budget, drift) == choice
        if repeat == 0:
            offsets, scale = drift or (0.0, 1.0)
            offsets = np.broadcast_to(offsets, len(controller.configurations))
            inference, *costs = (float(served[name][i, 0]) for name in ("inference_ms", "overhead_ms", "waited_ms"))
            residual = np.log(max(inference, LEAST_LATENCY_MS)) - log_latency - offsets[index]
            row = {
                "latency_ms": inference + sum(costs),
                "budget_ms": budget,
                "residual": residual / max(scale * spread, 1e-3),
            }
            row |= {"level": float(np.exp(np.mean(offsets))), "spread": float(scale)}
            timeline.append({name: round(float(value), 4) for name, value in row.items()})
    names = "as_replayed_at_the_same_limit", "as_replayed_at_the_whole_budget"
    return dict(zip(names, same.mean((1, 2)).tolist(), strict=True)), timeline


def _mean(name: str, values: Tensor) -> dict[str, Any]:
    """A mean over requests, and its interval without the rounding that would make a share greater than 1."""
    interval = [round(end, 12) for end in mean_interval(values)] if len(values) else None
    return {name: float(values.mean()) if len(values) else None, f"{name}_ci95": interval}
