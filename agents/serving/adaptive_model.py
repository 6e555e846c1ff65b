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
        controller: what a run deploys for deadlines, also in a `KnobPolicy`, or the same in NumPy,
            which decides in any case.
        tracker: follows how far latencies here are from those predicted, for the next decisions to
            allow for: True for a new one, or one for this controller to go on with. False: nothing
            but `calibrate` changes it.
        clock: wall, or cpu for the CPU time of the thread, on a machine that others use too; then
            there are no arrivals (waiting takes no CPU time), and the model must run on one thread
            and take its times from `clock_ms`.
        log: a folder, or the log in it, that gets a row for each request once it is answered.
        explore: the share of the requests, for which a configuration is drawn that is expected to
            lose at most `explore_loss` utility, see `Exploration`. A log without any shows the
            outcomes of the controller's choices only.
        seed: of the draws.
        cache: for how many requests features and decisions are kept (`cached_features`,
            `cached_decisions`), the least recently used leave first. Requests with equal images and
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
                "runtime: the controller is for worths or a mean over requests (budget=weights "
                "or mean), but every "
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
        """Median of the latest decisions by features, as charged to the next one; 0 before the
        first."""
        return self._decided.decision_ms * 1e3

    def watch(self, path: str | Path, trial: float = 0.0) -> None:
        """From now on go on with new controllers, between two requests. What the tracker learned is
        kept, since an update learns what it did not follow. A file that cannot be used is refused
        in a line, and nothing changes.

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
        """Go on with a new controller where there is one."""
        if self._watched is not None:
            self._watched.refresh()
            self.controller = self._watched.controller
            self.tracker.digest = self.controller.digest

    def _turn(self) -> tuple[NumpyController | None, float, Turn]:
        """The candidate on trial, its share of the requests, and who decides the next one."""
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
        now = self._now
        prepared = self._prepared(request)
        # right after the model has run every line costs microseconds: keep only what one request
        # needs
        with self._lock, self._clocked:
            self._follow()
            begun = now()
            drift = self.tracker.drift
            latest = self._fallen_back
            drawn = None
            candidate, trial, turn = self._turn()
            if candidate is not None and turn == "trial":
                controller = candidate
            else:
                controller = self.controller
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
            about = self.controller, stage.features if seen else None, limit, drift
            if turn == "explore":
                start = now()
                expected, drawn = self._exploration.draw(*about, expected, turn, candidate, trial)
                took += now() - start
            (answer,) = self._answers((stage,), (expected,))
            done = now()
            decision_ms = _positive(took * 1e3)
            # what is neither in the answer nor counted yet: calls, clocks, setting knobs, tracking
            work_ms = (
                answer.total_ms + stage.extra_ms + stage.unused_ms(self.configurations[expected[0]])
            )
            beyond_ms = _positive((done - begun) * 1e3 + prepared.before_ms - work_ms - decision_ms)
            latest.add(decision_ms, beyond_ms)
            facts = prepared, budget_ms, limit, drift, arrived
            result = self._result(facts, expected, answer, decision_ms, beyond_ms, done)
            if self.log is not None:
                if drawn is None and (candidate is not None or self._exploration.share):
                    # the chances change nothing about the answer, so that it does not wait for them
                    _, drawn = self._exploration.draw(*about, expected, turn, candidate, trial)
                self._note(result, stage, drawn)
            return result

    def generate(
        self,
        requests: Sequence[Request],
        budgets_ms: float | Sequence[float],
        arrived: Sequence[float] | None = None,
    ) -> list[Result]:
        """Answer requests, each under its own budget.

        Requests with the same configuration are answered as one group, the group with the least
        time left first; a decision does not foresee how long other groups take.

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
        prepared = [self._take(request) for request in requests]
        stages = [each.stage for each in prepared]
        start = self._now()
        # when each would have begun had it come alone
        begun = [start - stage.total_ms / 1e3 for stage in stages]
        extras = [stage.extra_ms for stage in stages]
        limits = [
            self._limit(self._decided, *each)
            for each in zip(extras, budgets, moments, begun, strict=True)
        ]
        arrays = {
            name: np.stack([stage.features[name] for stage in stages])
            for name in stages[0].features
        }
        drift = self.tracker.drift
        expected = self.controller.choose_expected(
            arrays, np.array(limits, np.float32), None, drift
        )
        each = list(zip(*(values.tolist() for values in expected), strict=True))
        drawn: list[Drawn | None] = [None] * len(each)
        if self._exploration.share or (self._watched and self._watched.candidate):
            each, drawn = self._explored(stages, limits, drift, each)
        decision_ms = _positive((self._now() - start) * 1e3)

        groups: dict[int, list[int]] = {}
        for i in sorted(range(len(each)), key=limits.__getitem__):
            groups.setdefault(each[i][0], []).append(i)
        results: dict[int, Result] = {}
        for choice, members in groups.items():
            before = self._now()
            configuration = self.configurations[choice]
            some = [stages[i] for i in members]
            answers = self._answers(some, [each[i] for i in members])
            done = self._now()
            # what the group took beyond its answers: setting knobs, tracking
            used = sum(
                stage.total_ms - stage.extra_ms - stage.unused_ms(configuration) for stage in some
            )
            work_ms = sum(answer.total_ms for answer in answers) - used
            beyond_ms = _positive((done - before) * 1e3 - work_ms)
            self._decided.add(decision_ms, beyond_ms)
            for i, answer in zip(members, answers, strict=True):
                about = prepared[i], budgets[i], limits[i], drift, moments[i]
                results[i] = self._result(about, each[i], answer, decision_ms, beyond_ms, done)
        if self.log is not None:
            for i, stage in enumerate(stages):
                self._note(results[i], stage, drawn[i])
        return [results[i] for i in range(len(requests))]

    def _explored(
        self,
        stages: Sequence[FirstStage],
        limits: Sequence[float],
        drift: Drift | None,
        best: Sequence[Expected],
    ) -> tuple[list[Expected], list[Drawn | None]]:
        """The configurations of a batch, and the chances of each."""
        pairs: list[tuple[Expected, Drawn]] = []
        for stage, limit, expected in zip(stages, limits, best, strict=True):
            candidate, trial, turn = self._turn()
            if self.controller.fall_back(limit, drift) is not None:
                features = None
            else:
                features = stage.features
            if candidate is not None and turn == "trial":
                expected = candidate.decide_expected(stage.features, limit, drift)
            about = self.controller, features, limit, drift, expected, turn
            pairs.append(self._exploration.draw(*about, candidate, trial))
        return [expected for expected, _ in pairs], [chances for _, chances in pairs]

    def _note(self, result: Result, stage: FirstStage, drawn: Drawn | None) -> None:
        """Write the row of an answered request."""
        assert self.log is not None
        result.request_id = self.log.add(row_of(self.controller.digest, stage, drawn, result))

    def _answers(self, stages: Sequence[FirstStage], expected: Sequence[Expected]) -> list[Answer]:
        """Answers under one configuration, and learn from their times."""
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
        about: tuple[Prepared, float, float, Drift | None, float | None],
        expected: Expected,
        answer: Answer,
        decision_ms: float,
        beyond_ms: float,
        done: float,
    ) -> Result:
        """`about`: first stage, budget, limit, drift, arrival."""
        prepared, budget, limit, drift, arrived = about
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
        """The rest of a budget for the answer, without the overhead of the latest decisions and
        what the first stage, which began at `begun`, took for features."""
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
        """Begin tracking anew from random cells of the controller's profile, timed here, and return
        the median of their latencies here / in the profile. Arguments and errors as for
        `timed_cells`."""
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
        """Time random cells of the controller's profile: configurations, and ln(latency here / in
        the profile).

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
        with (
            self._lock,
            self._clocked,
            progress("timing this machine", len(drawn), quiet_s=5) as tick,
        ):
            for done, (place, column) in enumerate(drawn, 1):
                stage = self.model.first_stage(samples[int(rows[place])])
                (answer,) = self.model.answer([stage], self.configurations[column])
                took.append(answer.total_ms)
                tick(done, "")
        choices = [column for _, column in drawn]
        straight = table.without_first_look.latency_ms[rows]
        latency_ms = straight[tuple(zip(*drawn, strict=True))]
        timed, profiled = (
            np.log(np.maximum(ms, LEAST_LATENCY_MS)) for ms in (took, latency_ms.double().numpy())
        )
        return choices[warm_up:], (timed - profiled)[warm_up:].tolist()


def _positive(ms: float) -> float:
    """0 for what is not: a clock went back, or a time is NaN."""
    return ms if ms > 0 else 0.0
