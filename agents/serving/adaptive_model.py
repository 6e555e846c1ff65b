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
from pathlib import Path
from typing import Any

import numpy as np
import torch

from knobwise.agents.policy.controller import Drift, Expected, NumpyController
from knobwise.agents.serving.exploration import Drawn, Exploration, Turn
from knobwise.agents.serving.export import configurations_of
from knobwise.agents.serving.first_stages import FirstStages, Overhead, Prepared
from knobwise.agents.serving.request_log import RequestLog, Result, row_of
from knobwise.agents.serving.tracker import LatencyTracker
from knobwise.agents.serving.versions import Watched
from knobwise.common.checks import at_least
from knobwise.common.errors import InputError
from knobwise.common.progress import progress
from knobwise.envs.configurations.budgets import LEAST_LATENCY_MS
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.profiling.measuring.adaptive_model import (
    AdaptiveVLM,
    Answer,
    FirstStage,
    Request,
    check_configuration,
    clocked_by,
)


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
        controller = getattr(controller, "agent", controller)  # of a KnobPolicy
        controller = getattr(controller, "decider", controller)
        header = getattr(controller, "header", {})  # any object that decides will do
        if header.get("limit", "budget_ms") != "budget_ms":
            raise InputError(
                "runtime: the controller is for a mean over requests (budget=mean), but every "
                "request here has a deadline; train one with budget=quantiles"
            )
        self.controller: NumpyController = controller
        super().__init__(model, cache)
        self.clock = clock
        self._clocked = clocked_by(clock)  # entered with the lock only
        self._now: Callable[[], float] = time.thread_time if clock == "cpu" else time.perf_counter
        self.configurations = configurations_of(controller)
        for configuration in self.configurations:
            check_configuration(model.knobs, configuration)
        fresh = LatencyTracker(self.configurations, controller.digest)
        if isinstance(tracker, LatencyTracker):
            self.tracker = tracker
        else:
            self.tracker = fresh
        if (self.tracker.digest, self.tracker.names) != (fresh.digest, fresh.names):
            raise InputError(
                "runtime: the tracker belongs to another controller; start with tracker=True"
            )
        self._tracks = tracker is not False
        if isinstance(log, RequestLog | None):
            self.log = log
        else:
            self.log = RequestLog(log)
        self._exploration = Exploration(explore, explore_loss, seed)
        self._watched: Watched | None = None
        self._decided = Overhead()
        self._fallen_back = Overhead()

    @property
    def decision_us(self) -> float:
        """The median time of the latest decisions by features, which the next one is charged.

        It is 0 before the first."""
        return self._decided.decision_ms * 1e3

    def watch(self, path: str | Path, trial: float = 0.0) -> None:
        """Replace the controller between two requests whenever there is a new file.

        What the tracker learned is kept, since an update learns what it did not follow. A file that
        cannot be used is refused in a line, and nothing changes.

        Args:
            path: an exported `.npz`, or the folder of controller.npz, such as `current` of
                `knobwise update`.
            trial: the share of the requests that the candidate beside `current` decides, while
                there is one.

        Raises:
            InputError: see `Watched`.
        """
        watched = Watched(Path(path), self.controller, trial)
        with self._lock:
            self._watched = watched
            self._follow()

    def _follow(self) -> None:
        """Replace the controller if there is a new one."""
        if self._watched is not None:
            self._watched.refresh()
            self.controller = self._watched.controller
            self.tracker.digest = self.controller.digest

    def _turn(self) -> tuple[NumpyController | None, float, Turn]:
        """Return the candidate on trial, its share of the requests, and who decides next."""
        if self._watched and self._watched.candidate:
            watched = self._watched
        else:
            watched = None
        if not (watched or self._exploration.share):
            return None, 0.0, "exploit"
        trial = watched.trial if watched else 0.0
        return watched.candidate if watched else None, trial, self._exploration.turn(trial)

    def answer(self, request: Request, budget_ms: float, arrived: float | None = None) -> Result:
        """Answer one request under its budget.

        Args:
            budget_ms: a deadline in ms after arrival.
            arrived: a reading of `time.perf_counter()`, from which on waiting counts; None counts
                the request's own work only.

        Raises:
            InputError: a budget that is not positive, an arrival with the CPU clock.
        """
        if not 0 < budget_ms < math.inf:
            raise InputError(f"runtime: budget_ms={budget_ms}: must be positive, in ms")
        prepared = self._prepared(request)
        with self._lock, self._clocked:
            self._follow()
            return self._answer(request, prepared, budget_ms, arrived)

    def _answer(
        self, request: Request, prepared: Prepared | None, budget_ms: float, arrived: float | None
    ) -> Result:
        """Decide and answer one request, with the lock held."""
        # right after the model has run every line costs microseconds: keep only what one request
        # needs
        now = self._now
        begun = now()
        drift = self.tracker.drift
        latest = self._fallen_back
        drawn = None
        candidate, trial, turn = self._turn()
        if candidate is not None and turn == "trial":
            controller = candidate
        else:
            controller = self.controller

        # where the guard falls back, the decision needs no features
        limit = self._limit(latest, 0.0, budget_ms, arrived, begun)
        expected = controller.fall_back(limit, drift)
        seen = expected is None
        took = now() - begun
        prepared = prepared or self._take(request, seen or turn == "explore")
        stage = prepared.stage
        if expected is None:
            latest = self._decided
            start = now()
            limit = self._limit(latest, stage.extra_ms, budget_ms, arrived, begun)
            expected = self._decide(controller, prepared, budget_ms, limit, drift)
            took += now() - start
        context = self.controller, stage.features if seen else None, limit, drift
        if turn == "explore":
            start = now()
            expected, drawn = self._exploration.draw(*context, expected, turn, candidate, trial)
            took += now() - start

        (answer,) = self._answers((stage,), (expected,))
        done = now()
        decision_ms = _positive(took * 1e3)
        # what is neither in the answer nor counted yet: calls, clocks, setting knobs, tracking
        unused_ms = stage.unused_ms(self.configurations[expected[0]])
        work_ms = answer.total_ms + stage.extra_ms + unused_ms
        beyond_ms = _positive((done - begun) * 1e3 + prepared.before_ms - work_ms - decision_ms)
        latest.add(decision_ms, beyond_ms)
        facts = prepared, budget_ms, limit, drift, arrived
        result = self._result(facts, expected, answer, decision_ms, beyond_ms, done)
        if self.log is not None:
            if drawn is None and (candidate is not None or self._exploration.share):
                # the chances change nothing about the answer, so that it does not wait for them
                _, drawn = self._exploration.draw(*context, expected, turn, candidate, trial)
            self._note(result, stage, drawn)
        return result

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
        limits_ms = np.asarray(budgets_ms, np.float64)
        if limits_ms.ndim:
            budgets = limits_ms.tolist()
        else:
            budgets = [float(limits_ms)] * n
        if len(budgets) != n or (arrived is not None and len(arrived) != n):
            if arrived is None:
                arrivals = ""
            else:
                arrivals = f" and {len(arrived)} arrivals"
            raise InputError(
                f"runtime: got {n} requests, but {len(budgets)} budgets{arrivals}; give as many "
                "of each"
            )
        if arrived is None:
            moments: list[float | None] = [None] * n
        else:
            moments = list(arrived)
        if n <= 1:
            return list(map(self.answer, requests, budgets, moments))
        if not all(0 < budget < math.inf for budget in budgets):
            raise InputError(f"runtime: budgets_ms={budgets}: all must be positive, in ms")
        with self._lock, self._clocked:
            self._follow()
            return self._generate(requests, budgets, moments)

    def _generate(
        self, requests: Sequence[Request], budgets: list[float], moments: Sequence[float | None]
    ) -> list[Result]:
        """Decide and answer several requests, with the lock held."""
        prepared = [self._take(request) for request in requests]
        stages = [item.stage for item in prepared]
        start = self._now()
        limits = []
        for stage, budget, moment in zip(stages, budgets, moments, strict=True):
            # when it would have begun had it come alone
            begun = start - stage.total_ms / 1e3
            limits.append(self._limit(self._decided, stage.extra_ms, budget, moment, begun))
        drift = self.tracker.drift
        expected, drawn = self._decide_all(stages, limits, drift)
        decision_ms = _positive((self._now() - start) * 1e3)

        # the group with the least time left comes first
        groups: dict[int, list[int]] = {}
        for i in sorted(range(len(expected)), key=limits.__getitem__):
            groups.setdefault(expected[i][0], []).append(i)
        results: dict[int, Result] = {}
        for members in groups.values():
            before = self._now()
            of_group = [stages[i] for i in members]
            answers = self._answers(of_group, [expected[i] for i in members])
            done = self._now()
            # what the group took beyond its answers: setting knobs, tracking
            configuration = self.configurations[expected[members[0]][0]]
            used = 0.0
            for stage in of_group:
                used += stage.total_ms - stage.extra_ms - stage.unused_ms(configuration)
            work_ms = sum(answer.total_ms for answer in answers) - used
            beyond_ms = _positive((done - before) * 1e3 - work_ms)
            self._decided.add(decision_ms, beyond_ms)
            for i, answer in zip(members, answers, strict=True):
                facts = prepared[i], budgets[i], limits[i], drift, moments[i]
                results[i] = self._result(facts, expected[i], answer, decision_ms, beyond_ms, done)
        if self.log is not None:
            for i, stage in enumerate(stages):
                self._note(results[i], stage, drawn[i])
        return [results[i] for i in range(len(requests))]

    def _decide_all(
        self, stages: Sequence[FirstStage], limits: list[float], drift: Drift | None
    ) -> tuple[Sequence[Expected], Sequence[Drawn | None]]:
        """Return the configurations of a batch, and their chances where others were possible."""
        arrays = {}
        for name in stages[0].features:
            arrays[name] = np.stack([stage.features[name] for stage in stages])
        columns = self.controller.choose_expected(arrays, np.array(limits, np.float32), None, drift)
        expected = list(zip(*(values.tolist() for values in columns), strict=True))
        if self._exploration.share or (self._watched and self._watched.candidate):
            return self._explored(stages, limits, drift, expected)
        return expected, [None] * len(expected)

    def _explored(
        self,
        stages: Sequence[FirstStage],
        limits: Sequence[float],
        drift: Drift | None,
        best: Sequence[Expected],
    ) -> tuple[list[Expected], list[Drawn | None]]:
        """Return the configurations of a batch after exploration and trials, with the chances."""
        pairs: list[tuple[Expected, Drawn]] = []
        for stage, limit, expected in zip(stages, limits, best, strict=True):
            candidate, trial, turn = self._turn()
            if self.controller.fall_back(limit, drift) is not None:
                features = None
            else:
                features = stage.features
            if candidate is not None and turn == "trial":
                expected = candidate.decide_expected(stage.features, limit, drift)
            context = self.controller, features, limit, drift
            pairs.append(self._exploration.draw(*context, expected, turn, candidate, trial))
        return [expected for expected, _ in pairs], [chances for _, chances in pairs]

    def _note(self, result: Result, stage: FirstStage, drawn: Drawn | None) -> None:
        """Write the row of an answered request."""
        assert self.log is not None
        result.request_id = self.log.add(row_of(self.controller.digest, stage, drawn, result))

    def _answers(self, stages: Sequence[FirstStage], expected: Sequence[Expected]) -> list[Answer]:
        """Answer requests under one configuration, and learn from the times of the answers."""
        choice = expected[0][0]
        try:
            answers = self.model.answer(stages, self.configurations[choice])
        except Exception as error:
            self.tracker.ignore(f"the model raised {type(error).__name__}")
            raise
        if self._tracks:
            for (_, log_latency, spread), stage, answer in zip(
                expected, stages, answers, strict=True
            ):
                took_ms = answer.total_ms + stage.unused_ms(self.configurations[choice])
                self.tracker.update(choice, log_latency, spread, took_ms)
        return answers

    def _result(
        self,
        facts: tuple[Prepared, float, float, Drift | None, float | None],
        expected: Expected,
        answer: Answer,
        decision_ms: float,
        beyond_ms: float,
        done: float,
    ) -> Result:
        """Return the result of an answer.

        Args:
            facts: first stage, budget, limit, drift and arrival.
            done: a reading of the clock after the answer.
        """
        prepared, budget, limit, drift, arrived = facts
        stage = prepared.stage
        choice = expected[0]
        configuration = self.configurations[choice]
        overhead = stage.extra_ms + stage.unused_ms(configuration) + decision_ms + beyond_ms
        total = overhead + answer.total_ms - prepared.ahead_ms
        if arrived is None:
            waited = 0.0
        else:
            waited = _positive((done - arrived) * 1e3 - total)
        total += waited
        timed = total, waited, overhead, decision_ms * 1e3, None, prepared.ahead_ms
        return Result(answer, configuration, choice, budget, limit, drift, expected[1:], *timed)

    def _limit(
        self, latest: Overhead, extra_ms: float, budget: float, arrived: float | None, begun: float
    ) -> float:
        """Return the rest of a budget for the answer.

        The overhead of the latest decisions is subtracted, and what the first stage, which began at
        `begun`, took for features."""
        left = budget - extra_ms - latest.decision_ms - latest.beyond_ms
        if arrived is not None:
            if self.clock == "cpu":
                raise InputError(
                    "runtime: arrivals need clock=wall; clock=cpu does not count time spent waiting"
                )
            left -= (begun - arrived) * 1e3
        if left > LEAST_LATENCY_MS:
            return left
        return LEAST_LATENCY_MS

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
        rows = torch.tensor(sorted(samples), dtype=torch.int64)
        if len(rows):
            known = table.mask[rows].nonzero()
        else:
            known = torch.zeros(0, 2)
        if not len(known):
            raise InputError(
                f"runtime: nothing to calibrate on, since no sample is in profile {table.name!r}"
            )
        drawn = known[
            np.random.default_rng(seed).integers(len(known), size=warm_up + cells)
        ].tolist()
        took = []
        title = "timing this machine"
        with self._lock, self._clocked, progress(title, len(drawn), quiet_s=5) as tick:
            for done, (position, column) in enumerate(drawn, 1):
                stage = self.model.first_stage(samples[int(rows[position])])
                (answer,) = self.model.answer([stage], self.configurations[column])
                took.append(answer.total_ms)
                tick(done, "")
        choices = [column for _, column in drawn]
        straight = table.without_first_look.latency_ms[rows]
        latency_ms = straight[tuple(zip(*drawn, strict=True))]
        timed = np.log(np.maximum(took, LEAST_LATENCY_MS))
        profiled = np.log(np.maximum(latency_ms.double().numpy(), LEAST_LATENCY_MS))
        return choices[warm_up:], (timed - profiled)[warm_up:].tolist()


def _positive(ms: float) -> float:
    """Return 0 for a time that is not positive: a clock went back, or it is NaN."""
    return ms if ms > 0 else 0.0
