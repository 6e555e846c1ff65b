"""A controller in front of a model: features from the model's own first stage, a decision, knobs
set, an answer.

    first stage ─▶ rest of the budget ─▶ decision ─▶ groups of one configuration ─▶ answers

Where the controller's guard falls back to static, the decision comes first and the first stage
leaves the features out. A request pays for everything that it would not have cost without the
controller: pooling features, the decision, setting knobs, learning from the answer's time, and,
where arrivals are known, all waiting. What a model says that it waited for a rate limit
(`Answer.uncounted_ms`) is waiting.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from knobwise.agents.deployed.arrays import configurations_of
from knobwise.agents.deployed.controller import NumpyController
from knobwise.agents.learning.request_log import RequestLog
from knobwise.common.checks import at_least
from knobwise.common.errors import InputError
from knobwise.common.progress import progress
from knobwise.envs.bandit.budgets import log_measured, log_ms
from knobwise.envs.tables.cells import unread_ms
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
from knobwise.serving.first_stages import FirstStages, Prepared
from knobwise.serving.inputs import as_array, limit_in_request
from knobwise.serving.requests import Decision, Result
from knobwise.serving.runtime import Runtime, deadline_controller_of
from knobwise.serving.tracker import LatencyTracker

if TYPE_CHECKING:
    from knobwise.serving.runtime import ServedPolicy


class Staged(NamedTuple):
    """A request that the model answers, after the decision."""

    number: int
    """Its place in the batch."""
    arrived: float | None
    prepared: Prepared
    stage_ms: float
    """The time of the first stage by the clock, however much of it the model says that it took."""
    decision: Decision

    @property
    def stage(self) -> FirstStage:
        """The first stage of the request."""
        return self.prepared.stage


class AdaptiveModel(FirstStages):
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
        log: a folder, or the log in it, that gets a row for each request once it is answered, or
            the model has raised an error instead.
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
        controller: ServedPolicy,
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
        self._clocked = clocked_by(clock)  # entered with the lock only
        for configuration in configurations_of(deadline_controller_of(controller)):
            check_configuration(model.knobs, configuration)
        runtime = Runtime(
            controller,
            tracker=tracker,
            log=log,
            seed=seed,
            explore=explore,
            explore_loss=explore_loss,
        )
        if clock == "cpu":
            runtime.now = time.thread_time
        super().__init__(model, runtime, cache, clock)
        self.configurations = runtime.configurations
        self.tracker = runtime.tracker
        self.log = runtime.log
        self.watch = runtime.watch

    @property
    def controller(self) -> NumpyController:
        """The controller that decides on the next request."""
        return self.runtime.controller

    def answer(
        self,
        request: Request,
        budget_ms: float,
        arrived: float | None = None,
        limits: Mapping[str, float] | None = None,
    ) -> Result:
        """Answer one request under its budget.

        Args:
            budget_ms: a deadline in ms after arrival.
            arrived: a reading of `time.perf_counter()`, from which on waiting counts; None counts
                the request's own work only.
            limits: on further costs by name, in place of those of the training.

        Raises:
            InputError: a budget or limit that is not positive, an arrival with the CPU clock.
        """
        return self._serve([request], [limit_in_request(budget_ms)], [arrived], limits)[0]

    def generate(
        self,
        requests: Sequence[Request],
        budgets_ms: float | Sequence[float],
        arrived: Sequence[float] | None = None,
        limits: Mapping[str, float] | None = None,
    ) -> list[Result]:
        """Answer requests, each under its own budget.

        Requests with the same configuration are answered as one group. The group with the least
        time left comes first. A decision does not foresee how long other groups take.

        Args:
            requests: n of them.
            budgets_ms: n deadlines in ms after arrival, or one for all.
            arrived: n arrivals, as for `answer`.
            limits: on further costs of each of them, as for `answer`.

        Returns: n results, in the order of the requests.

        Raises:
            InputError: as for `answer`, and if the numbers of requests, budgets and arrivals
                differ.
        """
        n = len(requests)
        budgets = as_array("budgets_ms", budgets_ms, kind=np.float64)
        if not budgets.ndim:
            budgets = budgets.repeat(n)
        moments: Sequence[float | None] = [None] * n if arrived is None else arrived
        if not n == len(budgets) == len(moments):
            raise InputError(
                f"runtime: {n} requests need as many budgets and arrivals, not {len(budgets)} and "
                f"{len(moments)}"
            )
        return self._serve(requests, [*map(limit_in_request, budgets.tolist())], moments, limits)

    def _serve(
        self,
        requests: Sequence[Request],
        budgets_ms: Sequence[float],
        arrived: Sequence[float | None],
        limits: Mapping[str, float] | None,
    ) -> list[Result]:
        """Answer requests, see `generate`; each has its budget, and may have its arrival."""
        if self.clock == "cpu" and any(moment is not None for moment in arrived):
            raise InputError(
                "runtime: arrivals need clock=wall; clock=cpu does not count time spent waiting"
            )
        prepared = [self._prepared(request) for request in requests]
        now = self.runtime.now
        with self._lock, self._clocked:
            staged, decision_ms = self._decide_all(requests, budgets_ms, arrived, prepared, limits)
            begun = now()
            # the group with the least time left comes first
            groups: dict[int, list[Staged]] = {}
            for each in sorted(staged, key=lambda each: each.decision.limit_ms):
                groups.setdefault(each.decision.choice, []).append(each)
            results: dict[int, Result] = {}
            for group in groups.values():
                results |= self._finish(group, decision_ms, begun)
                begun = now()
            # no group waits for the rows of another
            return [self.runtime.record(results[number]) for number in range(len(requests))]

    def _decide_all(
        self,
        requests: Sequence[Request],
        budgets_ms: Sequence[float],
        arrived: Sequence[float | None],
        prepared: Sequence[Prepared | None],
        limits: Mapping[str, float] | None,
    ) -> tuple[list[Staged], float]:
        """Take requests through the first stage, and decide on them; return them with the time of
        the decisions in ms."""
        # right after the model has run, every line costs microseconds: add none without need
        runtime = self.runtime
        now = runtime.now
        alone = len(requests) == 1
        begun = now()
        opened = []
        for budget, moment in zip(budgets_ms, arrived, strict=True):
            # of a batch, how long the first stages of others take is not known yet
            opened.append(runtime.begin(budget, limits, arrived=moment, ask_guard=alone))
        took = now() - begun
        ready = []
        for pending, request, ahead in zip(opened, requests, prepared, strict=True):
            begun = now()
            each = ahead or self._take(request, pending.needs_features)
            ready.append((each, (now() - begun) * 1e3))

        start = now()
        staged = []
        for number, (each, stage_ms) in enumerate(ready):
            pending = opened[number]
            moment = arrived[number]
            # NaN counts as 0
            spent_ms = max(0.0, each.stage.extra_ms)
            if moment is not None:
                # as if it had come alone: it waited until its own first stage began
                spent_ms += (start - moment) * 1e3 - stage_ms
            choose = None
            # what is kept of equal requests was decided without limits of their own
            if alone and each.content is not None and not limits:
                choose = partial(self._choose, pending, each.content)
            seen = {**each.stage.features, **each.stage.texts}
            decision = runtime.decide(pending, seen, spent_ms, choose)
            staged.append(Staged(number, moment, each, stage_ms, decision))
        return staged, max(0.0, (took + now() - start) * 1e3)

    def _finish(
        self, group: Sequence[Staged], decision_ms: float, begun: float
    ) -> dict[int, Result]:
        """Answer requests under one configuration, and learn from the times of the answers; return
        results by their place in the batch, which are not logged yet.

        Args:
            group: the requests.
            decision_ms: the time of the decision.
            begun: the reading of the clock from which all time is charged.
        """
        runtime = self.runtime
        configuration = group[0].decision.configuration
        try:
            answers = self._answers([each.stage for each in group], configuration)
        except Exception as error:
            runtime.abandon("the model", error)
            # answers that cannot be read say nothing about the setting
            if not isinstance(error, InputError):
                for each in group:
                    runtime.lose(each.decision, f"the model raised {type(error).__name__}")
            raise
        # the time that no answer holds and nothing has counted yet
        rest_ms = 0.0
        took = []
        for each, answer in zip(group, answers, strict=True):
            took.append(_took_ms(each.stage, answer, configuration))
            before_ms = each.stage_ms + each.prepared.before_ms
            rest_ms += before_ms - took[-1] - answer.uncounted_ms - each.stage.extra_ms
            runtime.learn(each.decision, took[-1])
        done = runtime.now()
        # calls, clocks, setting knobs, tracking; 0 if a clock went back, or if the difference is
        # NaN
        beyond_ms = max(0.0, (done - begun) * 1e3 + rest_ms)
        runtime.charge(group[0].decision, decision_ms, beyond_ms)

        results = {}
        for each, answer, took_ms in zip(group, answers, took, strict=True):
            prepared_ms = each.prepared.ahead_ms
            total_ms = each.stage.extra_ms + decision_ms + beyond_ms + took_ms
            overhead_ms = total_ms - answer.total_ms
            total_ms -= prepared_ms
            waited_ms = 0.0
            if each.arrived is not None:
                waited_ms = max(0.0, (done - each.arrived) * 1e3 - total_ms)
            total_ms += waited_ms
            results[each.number] = Result(
                decision=each.decision,
                answer=answer,
                answer_ms=took_ms,
                total_ms=total_ms,
                overhead_ms=overhead_ms,
                decision_us=decision_ms * 1e3,
                waited_ms=waited_ms,
                prepared_ms=prepared_ms,
            )
        return results

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
        profiled_ms = unread_ms(table, cell).double()
        ratios = log_ms(profiled_ms.new_tensor(took)) - log_measured(profiled_ms)
        return choices[warm_up:], ratios[warm_up:].tolist()


def _took_ms(stage: FirstStage, answer: Answer, configuration: Configuration) -> float:
    """Return the time of an answer, with what it does not continue from of the first stage; NaN if
    the model gave a time that is not possible."""
    took_ms = answer.total_ms + stage.unused_ms(configuration)
    if 0 < answer.total_ms <= took_ms < math.inf and 0 <= stage.extra_ms < math.inf:
        return took_ms
    return math.nan
