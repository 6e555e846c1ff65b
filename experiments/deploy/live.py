"""A controller in front of the real model: a simulated stream of requests, served live, beside what a replay promises.

Arrivals, budgets and the order of the requests are drawn; the model, its answers and the clock are real. Every request
is served by the controller (`knobwise.agents.serving.adaptive_model`), by budget-aware static and by fixed
configurations: a few requests in a row by one of them, then the same by the next, in random order, so that the drift
of the machine hits all alike. The controller is charged all that its way takes beyond the model's own time, the others
nothing. Then the same decisions are looked up in the profile: a replay that disagrees with the real thing would be
worth nothing.
"""

from __future__ import annotations

import bisect
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from knobwise.agents.serving.adaptive_model import AdaptiveModel
from knobwise.agents.serving.distillation import student_of
from knobwise.agents.serving.export import arrays_of_static, to_numpy
from knobwise.agents.stack.priced_policy import PricedChooser
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.common.progress import progress
from knobwise.envs.configurations.budgets import LEAST_LATENCY_MS, judged_budgets
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.deploy.live_results import live_results
from knobwise.experiments.report.live_report import print_live, write_live_page
from knobwise.experiments.settings.options import LiveConfig
from knobwise.profiling.elastic.adapter import ElasticAdaptive, request_of
from knobwise.profiling.elastic.measuring import one_thread
from knobwise.profiling.elastic.model import Configuration
from knobwise.profiling.elastic.profile import ElasticProfileConfig
from knobwise.profiling.elastic.scenes import END, TOKEN, WORDS, Scenes, draw_samples, soft_score

CONTROLLER, STATIC = "controller", "budget_aware_static"
LATELY = 100
"""Of so many timed cells the median ratio is the speed of the machine."""
IN_A_ROW = 20
"""Requests that one policy serves before the next serves the same."""


class Served(NamedTuple):
    """What one policy did with one request. Times in ms."""

    choice: int
    score: float
    inference_ms: float
    overhead_ms: float
    """What its way took beyond the model's own time; static and fixed configurations are charged nothing."""
    waited_ms: float
    limit_ms: float
    """What was decided under, in the profile's ms; NaN for a fixed configuration."""
    decision_us: float


@dataclass(frozen=True)
class Stream:
    """n requests: which sample, under which budget, when."""

    rows: NDArray[np.int64]
    """[n], rows of the table."""
    budgets_ms: NDArray[np.float64]
    """[n]."""
    arrivals_s: NDArray[np.float64] | None
    """[n], seconds after the start; None where each arrives when the one before is answered."""
    scenes: Mapping[int, Scenes]
    """By row, also of the cells that are timed to find the speed."""


@dataclass
class Record:
    """What was served: P policies, n requests, R repeats."""

    policies: list[str]
    served: dict[str, NDArray[Any]]
    """The fields of `Served`, [P, n, R] each."""
    cells: list[tuple[int, int, float]] = field(default_factory=list)
    """(row, configuration, ms) of the model alone, timed between the requests."""


def run_live(checkpoint: str | Path, table: ProfileTable, config: LiveConfig | None = None) -> dict[str, Any]:
    """Serve a simulated stream by the built-in elastic model, print what came of it, and return it.

    Args:
        checkpoint: a controller for deadlines, trained on `table`.
        table: the built-in profile.
        config: the stream; also which files to write.

    Raises:
        InputError: no controller for deadlines, one of another profile, or a profile of another model.
    """
    config = config or LiveConfig()
    loaded = load_checkpoint(checkpoint)
    controller = loaded.controller
    if isinstance(controller, PricedChooser) or controller.priced:
        raise InputError(f"{checkpoint}: keeps a mean over requests; live, every request has a deadline")
    if loaded.profile_digest != table.digest or "test_rows" not in loaded.extra:
        raise InputError(f"{checkpoint}: live needs the best.pt of a training on profile {table.name!r} as it is now")
    test, fitted = loaded.extra["test_rows"], torch.cat([loaded.extra[f"{p}_rows"] for p in ("train", "validation")])
    vlm = ElasticAdaptive()
    budgets_ms = judged_budgets(table, config.budgets_ms)
    stream = draw_stream(table, test, fitted, budgets_ms, config)
    check_features(vlm, table, stream)
    by_student = False
    if config.student and isinstance(controller, StackedController) and controller.experts:
        print("fitting a light student to the controller …", file=sys.stderr, flush=True)
        with one_thread():
            controller, by_student = student_of(controller, table, fitted, seed=0), True
    exported = to_numpy(controller)
    with one_thread(), threadpool_limits(1), _no_collector():
        model = AdaptiveModel(vlm, exported)
        others = set(stream.scenes) - set(stream.rows.tolist())
        model.calibrate(table, {row: request_of(stream.scenes[row]) for row in others}, config.calibration)
        if config.clock == "cpu":
            model.speed = _cpu_speed(vlm, table, stream, sorted(others), config)
        speed = model.speed
        stream = Stream(stream.rows, stream.budgets_ms * speed, stream.arrivals_s, stream.scenes)
        fixed = fixed_configurations(table, fitted, budgets_ms, config.fixed)
        record = serve(model, table, BudgetAwareStatic(table, fitted), fixed, stream, config)
    results = live_results(table, stream, record, exported, speed)
    results |= {"student": by_student, "repeats": config.repeats, "rate": config.rate, "clock": config.clock}
    print_live(results, Console())
    if config.json is not None:
        with written_whole(Path(config.json)) as temporary:
            temporary.write_text(json.dumps(results, indent=1))
    if config.html is not None:
        write_live_page(config.html, results)
    return results


# -- what is served ----------------------------------------------------------------------------------------------------


def draw_stream(table: ProfileTable, test: Tensor, fitted: Tensor, budgets_ms: Tensor, config: LiveConfig) -> Stream:
    """Draw order, budgets and arrivals; budgets still in the profile's ms. The scenes are those of the profile."""
    rng, profile = np.random.default_rng(config.seed), ElasticProfileConfig()
    rounds = -(-config.requests // len(test))
    rows = np.concatenate([rng.permutation(test.numpy()) for _ in range(rounds)])[: config.requests]
    drawn = rng.choice(budgets_ms.double().numpy(), config.requests)
    arrivals = None if config.rate is None else rng.exponential(1 / config.rate, config.requests).cumsum()
    for_speed = rng.permutation(fitted.numpy())[: config.calibration].tolist()
    if max(*rows.tolist(), *for_speed) >= profile.samples:
        raise InputError(f"profile {table.name!r}: live needs the built-in profile of {profile.samples} samples")
    scenes = draw_samples(max(*rows.tolist(), *for_speed) + 1, profile.seed)
    return Stream(rows, drawn, arrivals, {row: scenes[row] for row in {*rows.tolist(), *for_speed}})


def check_features(vlm: ElasticAdaptive, table: ProfileTable, stream: Stream) -> None:
    """See that the samples of the stream are those of the table: by their features.

    Raises:
        InputError: they are not.
    """
    for row in set(stream.rows.tolist()):
        found = vlm.first_stage(request_of(stream.scenes[row])).features
        for name, block in found.items():
            known = table.features[name][row].numpy() if name in table.features else block[:0]
            # other processors may round the last bit of a half otherwise
            if known.shape != block.shape or not np.allclose(block, known, atol=4e-3, rtol=4e-3):
                raise InputError(
                    f"profile {table.name!r}: sample {table.sample_ids[row]} is not what the built-in model was "
                    "measured on; live needs profile=builtin"
                )


def fixed_configurations(table: ProfileTable, fitted: Tensor, budgets_ms: Tensor, count: int) -> dict[str, int]:
    """Name → configuration, by what they did on the rows fitted on (int64 [n])."""
    accuracy, latency = averages(table, fitted)
    everything = torch.ones(1, table.num_configurations, dtype=torch.bool)
    found = {
        "best_static": int(BestStatic(table, fitted, budgets_ms).choose({}, budgets_ms[:1], everything)),
        "cheapest": int(latency.argmin()),
        "most_accurate": int(accuracy.argmax()),
    }
    return dict(list(found.items())[:count])


def serve(
    model: AdaptiveModel,
    table: ProfileTable,
    static: BudgetAwareStatic,
    fixed: Mapping[str, int],
    stream: Stream,
    config: LiveConfig,
) -> Record:
    """Serve the stream by the controller, budget-aware static and the fixed configurations, with cells of the profile
    timed between them: `IN_A_ROW` requests by one of them, as a server meets them with its caches, then the same by the
    next, in random order."""
    vlm = model.model
    assert isinstance(vlm, ElasticAdaptive)
    settings = [Configuration(**chosen) for chosen in model.configurations]
    requests = {row: request_of(scene) for row, scene in stream.scenes.items()}
    soft = bool(((table.accuracy > 0) & (table.accuracy < 1)).any())
    by_cpu = config.clock == "cpu"
    clock = time.thread_time if by_cpu else time.perf_counter
    # its choices as a step function of the budget: decided in torch they would slow down the answers that follow
    steps = arrays_of_static(static)
    starts, choices = steps["starts"].tolist(), steps["choices"].tolist()

    def by_controller(row: int, budget: float, waited: float) -> Served:
        arrived = None if stream.arrivals_s is None else time.perf_counter() - waited / 1e3
        start = clock()
        got = model.answer(requests[row], budget, arrived)
        took_ms = (clock() - start) * 1e3
        score = score_of(got.answer.text.split(), stream.scenes[row], soft)
        inference = got.answer.extra["cpu_ms"] if by_cpu else got.answer.total_ms
        overhead = max(took_ms - inference, 0.0)
        return Served(got.choice, score, inference, overhead, waited, got.limit_ms, got.decision_us)

    def alone(row: int, choice: int, waited: float, limit: float = np.nan) -> Served:
        start = clock()
        run = vlm.model.generate(requests[row].image, requests[row].question, settings[choice])
        took = (clock() - start) * 1e3
        said = [WORDS[token] for token in run.tokens if token != END]
        return Served(choice, score_of(said, stream.scenes[row], soft), took, 0.0, waited, limit, 0.0)

    def by_static(row: int, budget: float, waited: float) -> Served:
        limit = float(np.float32(max(budget - waited, LEAST_LATENCY_MS) / model.speed))
        return alone(row, choices[bisect.bisect_right(starts, limit) - 1], waited, limit)

    def always(choice: int) -> Callable[[int, float, float], Served]:
        return lambda row, budget, waited: alone(row, choice, waited)

    policies = {CONTROLLER: by_controller, STATIC: by_static, **{name: always(c) for name, c in fixed.items()}}
    servers, n = list(policies.values()), len(stream.rows)
    rng = np.random.default_rng((config.seed, 1))
    for i in range(config.warm_up):
        for server in servers:
            server(int(stream.rows[i % n]), float(stream.budgets_ms[i % n]), 0.0)
    shape = (len(servers), n, config.repeats)
    record = Record(list(policies), {name: np.zeros(shape) for name in Served._fields})
    others = np.array(sorted(set(requests) - set(stream.rows.tolist())))
    with progress("serving", n * config.repeats, 0) as tick:
        for repeat in range(config.repeats):
            free = np.zeros(len(servers))  # when each policy's server has answered all before, in seconds
            for first in range(0, n, IN_A_ROW):
                block = range(first, min(first + IN_A_ROW, n))
                for p in rng.permutation(len(servers) + 1).tolist():
                    for i in block:
                        if p == len(servers):
                            cell = int(rng.choice(others)), int(rng.integers(len(settings)))
                            record.cells.append((*cell, alone(*cell, 0.0).inference_ms))
                            continue
                        arrival = 0.0 if stream.arrivals_s is None else float(stream.arrivals_s[i])
                        waited = 0.0 if stream.arrivals_s is None else max(free[p] - arrival, 0.0) * 1e3
                        served = servers[p](int(stream.rows[i]), float(stream.budgets_ms[i]), waited)
                        free[p] = arrival + (served.waited_ms + served.overhead_ms + served.inference_ms) / 1e3
                        for name, value in served._asdict().items():
                            record.served[name][p, i, repeat] = value
                # a machine that others use too is not as fast as a minute ago: both that read the profile are told
                lately = [
                    ms / max(float(table.latency_ms[r, c]), LEAST_LATENCY_MS) for r, c, ms in record.cells[-LATELY:]
                ]
                if len(lately) == LATELY:
                    model.speed = float(np.median(lately))
                tick(repeat * n + block[-1] + 1, "")
    return record


def _cpu_speed(
    vlm: ElasticAdaptive, table: ProfileTable, stream: Stream, rows: Sequence[int], config: LiveConfig
) -> float:
    """CPU time here / latency in the profile, the median over random cells."""
    rng, ratios = np.random.default_rng((config.seed, 2)), []
    for _ in range(config.calibration):
        row, column = int(rng.choice(rows)), int(rng.integers(table.num_configurations))
        stage = vlm.first_stage(request_of(stream.scenes[row]))
        (answer,) = vlm.answer([stage], table.configuration(column))  # type: ignore[arg-type]
        ratios.append(answer.extra["cpu_ms"] / float(table.latency_ms[row, column]))
    return float(np.median(ratios))


def score_of(words: Sequence[str], scene: Scenes, soft: bool) -> float:
    """Exact match, or the share of right words, of an answer."""
    right = scene.answers[0]
    said = np.array([*(TOKEN[word] for word in words), END])
    if soft:
        return round(soft_score(said, right), 4)
    return float(said.tolist() == right[: right.tolist().index(END) + 1].tolist())


@contextmanager
def _no_collector() -> Iterator[None]:
    """As in measuring the profile: the garbage collector would stop the clock at random requests."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
