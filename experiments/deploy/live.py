"""A controller in front of the real model: a simulated stream of requests served live, compared
with a replay.

Budgets and the order of the requests are drawn; the model, its answers and the clock are real. Each
request arrives when the one before it has been answered. It is served by the controller
(`knobwise.serving.adaptive_model`), by budget-aware static and by fixed configurations.
Controller and static follow the drift of this machine, each by a tracker fed with its own answers;
the frozen controller and fixed configurations do not. Each is charged everything that it takes
beyond the model's own time and what no budget pays for (`Answer.uncounted_ms`). Then the same
decisions are looked up in the profile: a replay that disagrees with the real model would be worth
nothing.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
from rich.console import Console
from threadpoolctl import threadpool_limits
from torch import Tensor

from knobwise.agents.deployed.calibrated import Static
from knobwise.agents.evaluation.baselines import BestStatic, fit_static
from knobwise.agents.evaluation.problems import problem_of
from knobwise.agents.training.checkpoint import Loaded
from knobwise.common.errors import InputError
from knobwise.common.files import write_json
from knobwise.common.imports import in_a_line
from knobwise.common.progress import progress, say
from knobwise.envs.bandit.budgets import MIN_LATENCY_MS, judged_budgets
from knobwise.envs.tables.cells import Cells, averages
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.deploy.live_promises import Slowed, kept_live
from knobwise.experiments.deploy.live_results import (
    Record,
    ServedRequest,
    Stream,
    live_results,
)
from knobwise.experiments.evidence.decisions import write_decisions
from knobwise.experiments.evidence.schema import RunResults
from knobwise.experiments.report.comparison import Comparison
from knobwise.experiments.report.report import print_comparison, write_page
from knobwise.experiments.report.runs import Run
from knobwise.experiments.report.words import FROZEN, LEARNED, STATIC
from knobwise.experiments.settings.deployment_options import EvaluateRun, LiveConfig
from knobwise.profiling.measuring.adaptive_model import (
    AdaptiveVLM,
    Answer,
    clock_ms,
    clocked_by,
)
from knobwise.profiling.measuring.machine import one_thread
from knobwise.profiling.measuring.measuring import collected_between
from knobwise.profiling.measuring.requests import Requests
from knobwise.serving.adaptive_model import AdaptiveModel
from knobwise.serving.runtime import DECISIONS_KEPT
from knobwise.serving.tracker import LatencyTracker
from knobwise.testbeds.elastic.adapter import ElasticRequests

IN_A_ROW = 20
"""Number of requests that one policy serves before the next policy serves the same ones. Caches are
then filled as in a real server."""
CALIBRATION = 200
"""Number of cells of the profile that are timed first, to find the speed of this machine and to
start the tracker."""
WARM_UP = 50
"""Number of requests that every policy serves first and that do not count."""
COMPARED = 100
"""Number of samples of a stream whose features are compared with those of the profile, before
anything is served."""


def run_live(
    checkpoint: str | Path,
    loaded: Loaded,
    table: ProfileTable,
    model: AdaptiveVLM,
    requests: Requests,
    config: EvaluateRun,
) -> RunResults:
    """Serve a simulated stream by a model, print the results, write and return them.

    Args:
        checkpoint, loaded: the controller, where it was and as it was read.
        config: with `stream`; `json` and `html` say where to write the results and a page. Budgets
            are those of the profile, scaled by the speed of this machine.

    Raises:
        InputError: the controller is not for deadlines, has limits on further costs, or is of
            another profile, as model or requests may be; or these failed, and what was served
            before is printed and written first.
    """
    _refuse_unsuited(checkpoint, loaded, table)
    split = loaded.split
    assert split is not None
    settings = config.stream
    if isinstance(requests, ElasticRequests):
        requests.soft = bool(((table.accuracy > 0) & (table.accuracy < 1)).any())
    budgets = judged_budgets(table, config.budgets_ms)
    # as in training; what was served is then replayed by predictions where nothing was measured
    problem = problem_of(table, split, unprofiled=config.unprofiled)
    if problem.beliefs is not None:
        say("the profile was measured in part; replays go by predictions elsewhere")
    stream = draw_stream(table, split.test, split.fitted, budgets, requests, settings)
    if settings.slowdown > 1:
        model = Slowed(model)
    with one_thread(), threadpool_limits(1), collected_between(), clocked_by(settings.clock):
        check_features(model, table, stream)
        served = AdaptiveModel(model, loaded.controller, clock=settings.clock)
        # budgets are scaled by the speed of this machine
        choices: list[int] = []
        ratios: list[float] = []
        if stream.timed:
            choices, ratios = served.timed_cells(table, stream.timed, CALIBRATION)
        speed = float(np.exp(np.nanmedian(ratios or [0.0])))
        stream = replace(stream, budgets_ms=stream.budgets_ms * speed)
        fixed = fixed_configurations(problem.cells, split.fitted, budgets)
        static = fit_static(problem.cells, split.fitted)
        server = Server(served, static, fixed, stream, requests, settings)
        for tracker in server.trackers:
            tracker.warm_start(choices, ratios)
        stopped = server.serve()
    # what was served before an error still counts
    stream, record = server.finished()
    results: RunResults = {}
    if server.done:
        policies = list(server.policies)
        results, decisions = live_results(
            problem,
            stream,
            policies,
            served=record,
            controller=served.controller,
            speed=speed,
        )
        results["live"] |= {
            "model": model.name,
            "clock": settings.clock,
            "configurations": {name: table.configuration(c) for name, c in fixed.items()},
            "tracker": served.tracker.factors(),
            "ignored": served.tracker.ignored,
            "slowdown": settings.slowdown,
        }
        judged = served.controller, stream, policies, record
        if settings.slowdown > 1:
            # a replay knows a single speed
            results["live"]["agreement"] = []
        if kept := kept_live(*judged, (LEARNED, FROZEN)):
            results["live"]["promises"] = kept
        _show_and_write(results, decisions, config)
    if stopped is not None:
        raise stopped
    return results


def _refuse_unsuited(checkpoint: str | Path, loaded: Loaded, table: ProfileTable) -> None:
    """Raise InputError if a controller was not trained on this profile, or not for times alone."""
    if loaded.profile_digest != table.digest or loaded.split is None:
        raise InputError(
            f"{checkpoint}: live needs a run that was trained on profile {table.name!r}"
        )
    if loaded.controller.rule.is_own:
        raise InputError(
            f"{checkpoint}: was trained under {loaded.controller.rule.name}, but a live run is "
            "judged by accuracy on time; leave out live=true, which replays the profile"
        )
    if loaded.controller.calibration.limits:
        raise InputError(
            f"{checkpoint}: was trained with budget.limits, but a live run knows only times; leave "
            "out live=true, which replays the measured costs"
        )


def _show_and_write(results: RunResults, decisions: pl.DataFrame, config: EvaluateRun) -> None:
    """Print results, and write the files that a user asks for."""
    comparison = Comparison([Run(results, results["live"]["kind"])])
    print_comparison(comparison, Console())
    write_json(config.json, results)
    if config.decisions is not None:
        write_decisions(config.decisions, decisions)
    if config.html is not None:
        write_page(comparison, config.html)


def fixed_configurations(cells: Cells, fitted: Tensor, budgets_ms: Tensor) -> dict[str, int]:
    """Choose the configurations that are served to every request: name → index.

    Only the outcomes on the rows `fitted` (int64 [n]) count.
    """
    accuracy, latency = averages(cells, fitted)
    # any budget will do, since best static takes the same for all
    best = BestStatic(fit_static(cells, fitted), budgets_ms).choose({}, np.ones(1))[0]
    return {
        "best_static": int(best),
        "cheapest": int(latency.argmin()),
        "most_accurate": int(accuracy.argmax()),
    }


# -- the stream ------------------------------------------------------------------------------------


def draw_stream(
    table: ProfileTable,
    test: Tensor,
    fitted: Tensor,
    budgets_ms: Tensor,
    requests: Requests,
    config: LiveConfig,
) -> Stream:
    """Draw the order and the budgets of the requests; the budgets are still in the profile's ms.

    Raises:
        InputError: no request is of the test samples, or with `fresh` outside the profile.
    """
    rng = np.random.default_rng(config.seed)
    row_of = {sample_id: row for row, sample_id in enumerate(table.sample_ids)}
    if config.fresh:
        fresh = (name for name in requests.ids() if name not in row_of)
        ids = list(itertools.islice(fresh, config.skip, config.skip + config.requests))
        problem = f"stream.fresh=true: every question after stream.skip={config.skip} is in"
    else:
        names = [table.sample_ids[row] for row in test.tolist()]
        ids = [name for name in names if name in requests]
        problem = "stream.fresh=false: no question is a test sample of"
    if not ids:
        raise InputError(f"{problem} profile {table.name!r}")
    # each round serves every sample once, in an order of its own
    rounds = -(-config.requests // len(ids))
    order = np.concatenate([rng.permutation(len(ids)) for _ in range(rounds)])
    ids = [ids[i] for i in order[: config.requests]]
    drawn = rng.choice(budgets_ms.double().numpy(), config.requests)
    # cells that are timed beforehand are of samples that the controller was fitted on
    known = rng.permutation([row for row in fitted.tolist() if table.sample_ids[row] in requests])
    timed = {row: requests.request(table.sample_ids[row]) for row in known[:CALIBRATION].tolist()}
    samples = {name: requests.request(name) for name in dict.fromkeys(ids)}
    return Stream(np.array([row_of.get(name, -1) for name in ids]), drawn, ids, samples, timed)


def check_features(model: AdaptiveVLM, table: ProfileTable, stream: Stream) -> None:
    """Raise an InputError if samples of the stream are not those of the table, by their
    features."""
    rows = dict(zip(stream.rows.tolist(), stream.ids, strict=True))
    rows.pop(-1, None)  # the table does not hold it
    texts = table.texts
    for row, name in itertools.islice(rows.items(), COMPARED):
        stage = model.first_stage(stream.requests[name])
        same = [stage.texts.get(text) == known[row] for text, known in texts.items()]
        for block_name, block in stage.features.items():
            known = block[:0]
            if block_name in table.features:
                known = table.features[block_name][row].numpy()
            elif texts:
                # read by its text alone
                continue
            # other processors may round the last bit of a half otherwise
            close = known.shape == block.shape
            same.append(close and np.allclose(block, known, atol=4e-3, rtol=4e-3))
        if not all(same):
            raise InputError(
                f"live=true: model {model.name!r} was not measured on profile {table.name!r} "
                f"(sample {name} does not match). Give the model=… and data=… that this "
                "profile was measured with"
            )


# -- serving ---------------------------------------------------------------------------------------


class Server:
    """The policies in front of the model. Each is a function that serves the i-th request.

    All times are those of `clock_ms`.
    """

    def __init__(
        self,
        model: AdaptiveModel,
        static: Static,
        fixed: Mapping[str, int],
        stream: Stream,
        requests: Requests,
        config: LiveConfig,
    ) -> None:
        self.model = model
        self.stream = stream
        self.config = config
        self.requests = requests
        frozen = AdaptiveModel(model.model, model.controller, clock=model.clock, tracker=False)
        self.static = static
        self.tracker = LatencyTracker(model.configurations, STATIC)
        # what the latest choices of static cost; their median is taken off the next budget, as in
        # the runtime
        self.latest: deque[float] = deque(maxlen=DECISIONS_KEPT)
        # the frozen one learns nothing, and keeps the speed that it begins with
        self.trackers = [model.tracker, frozen.tracker, self.tracker]
        self.policies: dict[str, Callable[[int], ServedRequest]] = {
            LEARNED: partial(self.by_controller, model),
            FROZEN: partial(self.by_controller, frozen),
            STATIC: self.by_static,
            **{name: partial(self.by_configuration, choice) for name, choice in fixed.items()},
        }
        shape = len(self.policies), len(stream.rows)
        self.served: Record = {name: np.zeros(shape) for name in ServedRequest._fields}
        self.served["drift"] = np.full(shape, None)
        # the number of requests that every policy has served
        self.done = 0

    def by_controller(self, model: AdaptiveModel, i: int) -> ServedRequest:
        """Serve the i-th request by a controller, tracked or frozen."""
        start = clock_ms()
        name = self.stream.ids[i]
        result = model.answer(self.stream.requests[name], float(self.stream.budgets_ms[i]))
        took_ms = clock_ms() - start
        inference_ms = result.answer.total_ms
        overhead_ms = max(took_ms - inference_ms - result.answer.uncounted_ms, 0.0)
        score = self.accuracy(name, result.answer)
        _, log_latency, spread = result.expected
        return ServedRequest(
            choice=result.choice,
            score=score,
            inference_ms=inference_ms,
            overhead_ms=overhead_ms,
            limit_ms=result.limit_ms,
            decision_us=result.decision_us,
            log_latency=log_latency,
            spread=spread,
            drift=result.drift,
        )

    def by_static(self, i: int) -> ServedRequest:
        """Serve the i-th request by budget-aware static, with the part of the budget that the level
        of its own tracker leaves.

        Offsets of knob values would often move its choice by noise: on simulated streams they cost
        .1 to .6 points of utility, except where knob values drift apart, where they gain 1.3.
        """
        tracker = self.tracker
        spent_ms = statistics.median(self.latest or [0.0])
        limit = max(float(self.stream.budgets_ms[i]) - spent_ms, MIN_LATENCY_MS)
        drift = tracker.drift
        start = clock_ms()
        choice = self.static.single(limit * math.exp(-tracker.level))
        decision_ms = clock_ms() - start
        served = self.by_configuration(choice, i)
        answered = clock_ms()
        _, log_latency, spread = self.static.expected(choice)
        tracker.update(choice, log_latency, spread, served.inference_ms)
        overhead_ms = decision_ms + clock_ms() - answered
        self.latest.append(overhead_ms)
        return served._replace(
            limit_ms=limit, drift=drift, overhead_ms=overhead_ms, decision_us=decision_ms * 1e3
        )

    def by_configuration(self, choice: int, i: int) -> ServedRequest:
        """Serve the i-th request by a fixed configuration."""
        # only a controller needs features
        vlm = self.model.model
        name = self.stream.ids[i]
        stage = vlm.first_stage(self.stream.requests[name], features=False)
        (answer,) = vlm.answer([stage], self.model.configurations[choice])
        return ServedRequest(choice, self.accuracy(name, answer), answer.total_ms)

    def accuracy(self, name: str, answer: Answer) -> float:
        """Return the accuracy of an answer to the sample of this name."""
        return self.requests.accuracy(name, answer.text, answer.extra.get("failed"))

    def serve(self) -> InputError | None:
        """Serve the stream by every policy; return what stopped it before the end, if anything.

        The policies serve the same `IN_A_ROW` requests one after the other, then the next ones. The
        order of the policies is random, so that the drift of the machine hits all alike.
        """
        n = len(self.stream.rows)
        names = list(self.policies)
        rng = np.random.default_rng((self.config.seed, 1))
        try:
            for number, policy in itertools.product(range(WARM_UP), names):
                i = number % n
                self.policies[policy](i)
            with progress("serving", n, 0) as tick:
                while self.done < n:
                    if isinstance(self.model.model, Slowed) and self.done >= n // 2:
                        self.model.model.factor = self.config.slowdown
                    block = range(self.done, min(self.done + IN_A_ROW, n))
                    order = rng.permutation(len(names)).tolist()
                    for p, i in itertools.product(order, block):
                        policy = names[p]
                        served = self.policies[policy](i)
                        for field, value in served._asdict().items():
                            self.served[field][p, i] = value
                    self.done = block.stop
                    tick(self.done)
        except Exception as error:
            problem = in_a_line(error)
            if isinstance(error, InputError):
                problem = str(error)
            request = f"serving request {self.stream.ids[i]!r} by {policy}"
            stopped = InputError(f"{request}: {problem}; served before: {self.done} requests")
            stopped.__cause__ = error
            return stopped
        return None

    def finished(self) -> tuple[Stream, Record]:
        """Return the requests that every policy has served, and what it did."""
        served = {name: values[:, : self.done] for name, values in self.served.items()}
        stream = replace(
            self.stream,
            rows=self.stream.rows[: self.done],
            budgets_ms=self.stream.budgets_ms[: self.done],
            ids=self.stream.ids[: self.done],
        )
        return stream, served
