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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from knobwise.agents.deployed.arrays import configurations_of
from knobwise.agents.serving.first_stages import FirstStages, Prepared
from knobwise.agents.serving.inputs import blocks_of, limit_of, numbers
from knobwise.agents.serving.request_log import RequestLog, Result
from knobwise.agents.serving.tracker import LatencyTracker
from knobwise.agents.serving.wrapper import Front, left_of
from knobwise.common.checks import at_least
from knobwise.common.errors import InputError
from knobwise.common.progress import progress
from knobwise.envs.bandit.budgets import log_ms
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.units import check_time
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
class Staged(Result):
    """A request that the model answers."""

    arrived: float | None = None
    prepared: Any = None
    """The request after the first stage, as `Prepared`; None before."""
    stage_ms: float = 0.0
    """The time of the first stage by the clock, however much of it the model says that it took."""

    @property
    def stage(self) -> FirstStage:
        """The first stage of the request."""
        return self.prepared.stage


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
        InputError: a controller for mean budgets or for a cost that is no time, one whose
            configurations the model cannot run,
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
        if clock == "cpu":
            self._now = time.thread_time
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
        moments = None if arrived is None else [arrived]
        return self.generate([request], limit_of(budget_ms), moments)[0]

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
        budgets = numbers("budgets_ms", budgets_ms, kind=np.float64)
        if not budgets.ndim:
            budgets = budgets.repeat(n)
        moments = [None] * n if arrived is None else arrived
        if not n == len(budgets) == len(moments):
            raise InputError(
                f"runtime: {n} requests need as many budgets and arrivals, not {len(budgets)} and "
                f"{len(moments)}"
            )
        if self.clock == "cpu" and arrived is not None:
            raise InputError(
                "runtime: arrivals need clock=wall; clock=cpu does not count time spent waiting"
            )
        limits = list(map(limit_of, budgets))
        prepared = [self._prepared(request) for request in requests]
        with self._lock, self._clocked:
            self._follow()
            flights: list[Any] = []
            for budget, moment in zip(limits, moments, strict=True):
                flights.append(Staged(budget, *self._state(), arrived=moment))
            decision_ms = self._decisions(flights, requests, prepared)
            begun = self._now()
            # the group with the least time left comes first
            groups: dict[int, list[Staged]] = {}
            for flight in sorted(flights, key=lambda flight: flight.limit_ms):
                groups.setdefault(flight.choice, []).append(flight)
            for group in groups.values():
                self._finish(group, decision_ms, begun)
                begun = self._now()
            for flight in flights:
                # nothing can be learned from a time that is not possible; the tracker counts it
                if not math.isnan(flight.total_ms):
                    self._note(flight)
        return flights

    def _decisions(
        self,
        flights: Sequence[Staged],
        requests: Sequence[Request],
        prepared: Sequence[Prepared | None],
    ) -> float:
        """Take requests through the first stage, and decide on them; return the time of the
        decisions in ms."""
        # right after the model has run, every line costs microseconds: add none without need
        now = self._now
        begun = now()
        alone = len(flights) == 1
        if alone:
            # where the guard falls back, the decision needs no features
            flight = flights[0]
            flight.limit_ms = self._left(flight, 0.0, begun)
            flight.expected = self.controller.fall_back(flight.limit_ms, flight.drift)
        took = now() - begun
        for flight, request, ahead in zip(flights, requests, prepared, strict=True):
            begun = now()
            flight.prepared = ahead or self._take(request, flight.looks)
            flight.stage_ms = (now() - begun) * 1e3

        start = now()
        for flight in flights:
            flight.features = flight.stage.features
            if any(type(block) is not np.ndarray for block in flight.features.values()):
                sizes = self.controller.feature_sizes
                flight.features = flight.stage.features = blocks_of(flight.features, sizes)
            if flight.expected is None:
                flight.overhead = self._decided
                # as if it had come alone: it waited until its own first stage began
                begun = start - flight.stage_ms / 1e3
                flight.limit_ms = self._left(flight, flight.stage.extra_ms, begun)
                try:
                    flight.expected = self._decide(flight, alone)
                except ValueError as error:
                    raise InputError(f"runtime: {error}") from error
            self._settle(flight)
        return max(0.0, (took + now() - start) * 1e3)

    def _finish(self, group: Sequence[Staged], decision_ms: float, begun: float) -> None:
        """Answer requests under one configuration, and learn from the times of the answers.

        Args:
            group: the requests.
            decision_ms: the time of the decision.
            begun: the reading of the clock from which all time is charged.
        """
        configuration = group[0].configuration
        try:
            answers = self._answers([flight.stage for flight in group], configuration)
        except Exception as error:
            self.tracker.ignore(f"the model raised {type(error).__name__}")
            raise
        # the time that no answer holds and nothing has counted yet
        uncounted_ms = 0.0
        for flight, answer in zip(group, answers, strict=True):
            stage = flight.stage
            flight.answer = answer
            flight.answer_ms = took_ms = _took_ms(stage, answer, configuration)
            uncounted_ms += flight.stage_ms + flight.prepared.before_ms - took_ms - stage.extra_ms
            # a time that is not possible is counted in any case
            if self._tracks or math.isnan(took_ms):
                choice, log_latency, spread = flight.expected
                self.tracker.update(choice, log_latency, spread, took_ms)
        done = self._now()
        # calls, clocks, setting knobs, tracking; 0 if a clock went back, or if the difference is
        # NaN
        beyond_ms = max(0.0, (done - begun) * 1e3 + uncounted_ms)
        group[0].overhead.add(decision_ms, beyond_ms)

        for flight in group:
            flight.decision_us = decision_ms * 1e3
            flight.prepared_ms = flight.prepared.ahead_ms
            total_ms = flight.stage.extra_ms + decision_ms + beyond_ms + flight.answer_ms
            flight.overhead_ms = total_ms - flight.answer.total_ms
            total_ms -= flight.prepared_ms
            if flight.arrived is not None:
                flight.waited_ms = max(0.0, (done - flight.arrived) * 1e3 - total_ms)
            flight.total_ms = total_ms + flight.waited_ms

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

    def _left(self, flight: Staged, extra_ms: float, begun: float) -> float:
        """Return what is left of a budget for the answer, in ms.

        Args:
            flight: the request.
            extra_ms: what the first stage took for features; NaN counts as 0.
            begun: when the first stage began, which ended the wait.
        """
        left = flight.budget_ms - max(0.0, extra_ms)
        if flight.arrived is not None:
            left -= (begun - flight.arrived) * 1e3
        return left_of(left, flight.overhead)

    def calibrate(
        self,
        table: ProfileTable,
        samples: Mapping[int, Request],
        cells: int = 200,
        warm_up: int = 20,
    ) -> float:
        """Time random cells of the controller's profile, and begin tracking anew from them.

        Arguments and errors as for `timed_cells`. Returns the median of latency here / latency in
        the profile."""
        choices, ratios = self.timed_cells(table, samples, cells, warm_up)
        with self._lock:
            self.tracker.warm_start(choices, ratios)
        return float(np.exp(np.nanmedian(ratios)))

    def timed_cells(
        self,
        table: ProfileTable,
        samples: Mapping[int, Request],
        cells: int,
        warm_up: int = 20,
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
            InputError: a table of no times, with other configurations than the controller's, or
                without any of the samples.
        """
        check_time(f"runtime: profile {table.name!r}", table.unit)
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
        drawn = np.random.default_rng(0).integers(len(known), size=warm_up + cells)
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
