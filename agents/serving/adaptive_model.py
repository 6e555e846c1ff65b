"""A controller in front of a model: features from the model's own first stage, a decision, knobs
set, an answer.

    first stage ─▶ rest of the budget ─▶ decision ─▶ groups of one configuration ─▶ answers

Where the controller's guard falls back to static, the decision comes first and the first stage
leaves the features out. A request pays for everything that it would not have cost without the
controller: pooling features, the decision, setting knobs, learning from the answer's time, and,
where arrivals are known, all waiting.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from knobwise.agents.policy.arrays import configurations_of
from knobwise.agents.policy.controller import MOST_MS, Drift, Expected
from knobwise.agents.serving.first_stages import FirstStages, Overhead, Prepared
from knobwise.agents.serving.request_log import RequestLog, Result
from knobwise.agents.serving.tracker import LatencyTracker
from knobwise.agents.serving.wrapper import Front
from knobwise.common.checks import at_least
from knobwise.common.errors import InputError
from knobwise.common.progress import progress
from knobwise.envs.configurations.budgets import LEAST_LATENCY_MS, log_ms
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.profiling.measuring.adaptive_model import (
    AdaptiveVLM,
    Answer,
    Configuration,
    FirstStage,
    Request,
    check_configuration,
    clocked_by,
)


@dataclass(slots=True)
class Decided:
    """A request whose configuration is decided."""

    prepared: Prepared
    budget_ms: float
    arrived: float | None
    limit_ms: float
    """The rest of the budget that the decision was made under."""
    drift: Drift | None
    best: int
    """The choice of the controller."""
    expected: Expected
    """The configuration to answer with; not the best one if the request is explored."""
    latest: Overhead
    """The latest decisions of this kind."""
    before_ms: float
    """The time of the first stage by the clock, however much of it the model says that it took."""
    result: Any = None
    """The `Result`, once there is an answer."""


class AdaptiveModel(Front, FirstStages):
    """A model that sets its own knobs, request by request.

    Threads may share it: one lock is held from the first stage to the last answer.

    Args:
        model: its knobs may have any names.
        controller: what a run deploys for deadlines, also in a `KnobPolicy`, or its exported form
            in NumPy, which decides in any case.
        tracker: follows how far latencies here are from those predicted, for the next decisions to
            allow for: True for a new one, or one for this controller to go on with. False: nothing
            but `calibrate` changes it.
        clock: wall, or cpu for the CPU time of the thread, on a machine that others use too; then
            there are no arrivals (waiting takes no CPU time), and the model must run on one thread
            and take its times from `clock_ms`.
        log: a folder, or the log in it, that gets a row for each request once it is answered.
        explore: the share of the requests that get a random configuration instead. It is expected
            to lose at most `explore_loss` utility, see `Exploration`. Without exploration a log
            shows the outcomes of the controller's choices only.
        explore_loss: in units of accuracy.
        seed: of the draws.
        cache: for how many requests features and decisions are kept (`cached_features`,
            `cached_decisions`). The least recently used leave first. Requests with equal images and
            questions are equal. A decision is used again only under the same budget, and while
            neither the controller nor the tracker has changed.

    Raises:
        InputError: a controller for mean budgets, one whose configurations the model cannot run,
            the tracker of another controller, an unknown clock, a log that cannot be written.
    """

    def __init__(
        self,
        model: AdaptiveVLM,
        controller: Any,
        *,
        tracker: bool | LatencyTracker = True,
        clock: str = "wall",
        log: RequestLog | str | Path | None = None,
        explore: float = 0.0,
        explore_loss: float = 0.05,
        seed: int | None = None,
        cache: int = 0,
    ) -> None:
        at_least("cache", cache, 0)
        FirstStages.__init__(self, model, cache)
        Front.__init__(self, controller, tracker, explore, explore_loss, seed)
        self.clock = clock
        self._clocked = clocked_by(clock)  # entered with the lock only
        self._now: Callable[[], float] = time.thread_time if clock == "cpu" else time.perf_counter
        for configuration in self.configurations:
            check_configuration(model.knobs, configuration)
        self._open(log)

    def answer(self, request: Request, budget_ms: float, arrived: float | None = None) -> Result:
        """Answer one request under its budget.

        Args:
            budget_ms: a deadline in ms after arrival.
            arrived: a reading of `time.perf_counter()`, from which on waiting counts; None counts
                the request's own work only.

        Raises:
            InputError: a budget that is not positive, an arrival with the CPU clock.
        """
        return self._serve([request], [budget_ms], [arrived])[0]

    def generate(
        self,
        requests: Sequence[Request],
        budgets_ms: float | Sequence[float],
        arrived: Sequence[float] | None = None,
    ) -> list[Result]:
        """Answer requests, each under its own budget.

        Requests with the same configuration are answered as one group. The group with the least
        time left comes first. A decision does not foresee how long other groups take.

        Args:
            requests: n of them.
            budgets_ms: n deadlines in ms after arrival, or one for all.
            arrived: n arrivals, as for `answer`.

        Returns: n results, in the order of the requests.

        Raises:
            InputError: as for `answer`, and if the numbers of requests, budgets and arrivals
                differ.
        """
        n = len(requests)
        budgets = np.asarray(budgets_ms, np.float64)
        if not budgets.ndim:
            budgets = budgets.repeat(n)
        moments = [None] * n if arrived is None else arrived
        if not n == len(budgets) == len(moments):
            raise InputError(
                f"runtime: {n} requests need as many budgets and arrivals, not {len(budgets)} and "
                f"{len(moments)}"
            )
        return self._serve(requests, budgets.tolist(), moments)

    def _serve(
        self, requests: Sequence[Request], budgets: list[float], moments: Sequence[float | None]
    ) -> list[Result]:
        """Answer requests under their budgets, with their arrivals; one of them, or a batch."""
        for budget in budgets:
            if not 0 < budget < MOST_MS:
                raise InputError(f"runtime: budget_ms={budget}: must be positive, in ms")
        prepared = [self._prepared(request) for request in requests]
        with self._lock, self._clocked:
            self._follow()
            decided, decision_ms = self._decisions(requests, prepared, budgets, moments)
            begun = self._now()
            # the group with the least time left comes first
            groups: dict[int, list[Decided]] = {}
            for item in sorted(decided, key=lambda item: item.limit_ms):
                groups.setdefault(item.expected[0], []).append(item)
            for group in groups.values():
                self._finish(group, decision_ms, begun)
                begun = self._now()
            for item in decided:
                result = item.result
                # nothing can be learned from a time that is not possible; the tracker counts it
                if not math.isnan(result.total_ms):
                    stage = item.prepared.stage
                    answer_ms = result.answer.total_ms + stage.unused_ms(result.configuration)
                    self._note(self.controller, stage.features, item.best, result, answer_ms)
        return [item.result for item in decided]

    def _decisions(
        self,
        requests: Sequence[Request],
        prepared: Sequence[Prepared | None],
        budgets: list[float],
        moments: Sequence[float | None],
    ) -> tuple[list[Decided], float]:
        """Take requests through the first stage, and decide on them.

        Returns:
            the decisions, and the time that they took in ms.
        """
        # right after the model has run, every line costs microseconds: add none without need
        now = self._now
        drift = self.tracker.drift
        explores = [self._exploration.turn() for _ in requests]
        alone = len(requests) == 1
        expected = None
        begun = now()
        if alone:
            # where the guard falls back, the decision needs no features
            limit = self._limit(self._fallen_back, 0.0, budgets[0], moments[0], begun)
            expected = self.controller.fall_back(limit, drift)
        took = now() - begun
        stages = []
        for request, ahead, explored in zip(requests, prepared, explores, strict=True):
            begun = now()
            ready = ahead or self._take(request, expected is None or explored)
            stages.append((ready, now() - begun))

        start = now()
        decided = []
        facts = zip(stages, budgets, moments, explores, strict=True)
        for (ready, stage_s), budget, arrived, explored in facts:
            latest = self._fallen_back
            if expected is None or not alone:
                latest = self._decided
                # as if it had come alone: it waited until its own first stage began
                begun = start - stage_s
                limit = self._limit(latest, ready.stage.extra_ms, budget, arrived, begun)
                expected = self._decide(ready, budget, limit, drift, alone)
            best = expected[0]
            before_ms = stage_s * 1e3 + ready.before_ms
            item = Decided(ready, budget, arrived, limit, drift, best, expected, latest, before_ms)
            if explored:
                context = self.controller, ready.stage.features, limit, drift
                item.expected = self._exploration.draw(*context)
            decided.append(item)
        return decided, max(0.0, (took + now() - start) * 1e3)

    def _finish(self, group: Sequence[Decided], decision_ms: float, begun: float) -> None:
        """Answer requests under one configuration, and learn from the times of the answers.

        Args:
            group: the requests.
            decision_ms: the time of the decision.
            begun: the reading of the clock from which all time is charged.
        """
        choice = group[0].expected[0]
        configuration = self.configurations[choice]
        stages = [request.prepared.stage for request in group]
        try:
            answers = self._answers(stages, configuration)
        except Exception as error:
            self.tracker.ignore(f"the model raised {type(error).__name__}")
            raise
        uncounted_ms = sum(request.before_ms for request in group)
        pairs = zip(stages, answers, strict=True)
        times = [_took_ms(stage, answer, configuration) for stage, answer in pairs]
        for request, stage, took_ms in zip(group, stages, times, strict=True):
            uncounted_ms -= took_ms + stage.extra_ms
            # a time that is not possible is counted in any case
            if self._tracks or math.isnan(took_ms):
                self.tracker.update(*request.expected, took_ms)
        done = self._now()
        # the time that no answer holds and nothing has counted: calls, clocks, setting knobs,
        # tracking; 0 if a clock went back, or if the difference is NaN
        beyond_ms = max(0.0, (done - begun) * 1e3 + uncounted_ms)
        group[0].latest.add(decision_ms, beyond_ms)

        for request, stage, answer, took_ms in zip(group, stages, answers, times, strict=True):
            ahead_ms = request.prepared.ahead_ms
            overhead = stage.extra_ms + stage.unused_ms(configuration) + decision_ms + beyond_ms
            total = overhead + answer.total_ms - ahead_ms
            if math.isnan(took_ms):
                total = took_ms
            waited = 0.0
            if request.arrived is not None:
                waited = max(0.0, (done - request.arrived) * 1e3 - total)
            request.result = Result(
                answer,
                configuration,
                choice,
                request.budget_ms,
                request.limit_ms,
                request.drift,
                request.expected[1:],
                total_ms=total + waited,
                waited_ms=waited,
                overhead_ms=overhead,
                decision_us=decision_ms * 1e3,
                prepared_ms=ahead_ms,
            )

    def _answers(
        self, stages: Sequence[FirstStage], configuration: Configuration
    ) -> Sequence[Answer]:
        """Have the model answer a group; raise InputError if it returns anything else than an
        `Answer` for each."""
        answers = self.model.answer(stages, configuration)
        whole = isinstance(answers, Sequence) and len(answers) == len(stages)
        if not (whole and all(isinstance(answer, Answer) for answer in answers)):
            raise InputError(
                f"runtime: answer of the model must return {len(stages)} Answer, one for each "
                f"request, not {answers!r:.80}"
            )
        return answers

    def _limit(
        self, latest: Overhead, extra_ms: float, budget: float, arrived: float | None, begun: float
    ) -> float:
        """Return what is left of a budget for the answer, in ms.

        Args:
            latest: the overhead of the latest decisions; this one is expected to cost as much.
            extra_ms: what the first stage took for features; NaN counts as 0.
            budget: in ms, from the arrival on.
            arrived: when the request arrived; None if it did not wait.
            begun: when its first stage began, which ended the wait.
        """
        left = budget - max(0.0, extra_ms) - latest.decision_ms - latest.beyond_ms
        if arrived is not None:
            if self.clock == "cpu":
                raise InputError(
                    "runtime: arrivals need clock=wall; clock=cpu does not count time spent waiting"
                )
            left -= (begun - arrived) * 1e3
        return max(LEAST_LATENCY_MS, left)

    def calibrate(
        self,
        table: ProfileTable,
        samples: Mapping[int, Request],
        cells: int = 200,
        warm_up: int = 20,
        seed: int = 0,
    ) -> float:
        """Time random cells of the controller's profile, and begin tracking anew from them.

        Arguments and errors as for `timed_cells`. Returns the median of latency here / latency in
        the profile."""
        choices, ratios = self.timed_cells(table, samples, cells, warm_up, seed)
        with self._lock:
            self.tracker.warm_start(choices, ratios)
        return float(np.exp(np.nanmedian(ratios)))

    def timed_cells(
        self,
        table: ProfileTable,
        samples: Mapping[int, Request],
        cells: int,
        warm_up: int = 20,
        seed: int = 0,
    ) -> tuple[list[int], list[float]]:
        """Time random cells of the controller's profile.

        Returns their configurations, and ln(latency here / latency in the profile).

        Args:
            table: the profile.
            samples: row of the table → the request that was measured there; about a hundred are
                enough.
            cells: pairs of sample and configuration that are timed.
            warm_up: how many are answered untimed before.

        Raises:
            InputError: a table with other configurations than the controller's, or without any of
                the samples.
        """
        if configurations_of(table) != self.configurations:
            raise InputError(
                f"runtime: profile {table.name!r} has other configurations than the controller"
            )
        # cells are drawn among those that the profile holds
        rows = torch.tensor(sorted(samples), dtype=torch.int64)
        known = table.mask[rows].nonzero()
        if not len(known):
            raise InputError(
                f"runtime: nothing to calibrate on, since no sample is in profile {table.name!r}"
            )
        drawn = np.random.default_rng(seed).integers(len(known), size=warm_up + cells)
        positions, columns = known[drawn].T
        cell = rows[positions], columns
        choices = columns.tolist()
        took = []
        title = "timing this machine"
        with self._lock, self._clocked, progress(title, len(drawn), quiet_s=5) as tick:
            for row, choice in zip(cell[0].tolist(), choices, strict=True):
                stage = self._first_stage(samples[row], True)
                (answer,) = self._answers([stage], self.configurations[choice])
                took.append(answer.total_ms)
                tick(len(took), "")
        profiled_ms = table.without_first_look.latency_ms[cell].double()
        ratios = log_ms(profiled_ms.new_tensor(took)) - log_ms(profiled_ms)
        return choices[warm_up:], ratios[warm_up:].tolist()


def _took_ms(stage: FirstStage, answer: Answer, configuration: Configuration) -> float:
    """Return the time of an answer, with what it does not continue from of the first stage; NaN if
    the model gave a time that is not possible."""
    took_ms = answer.total_ms + stage.unused_ms(configuration)
    if 0 < answer.total_ms <= took_ms < math.inf and 0 <= stage.extra_ms < math.inf:
        return took_ms
    return math.nan
