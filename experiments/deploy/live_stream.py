"""A simulated stream of requests, served by several policies in front of the real elastic model.

Arrivals, budgets and the order of the requests are drawn; the model, its answers and the clock are real. A few requests
in a row are served by one policy, then the same by the next, in random order, so that the drift of the machine hits all
alike.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knobwise.agents.judging.baselines import BudgetAwareStatic
from knobwise.agents.serving.adaptive_model import AdaptiveModel
from knobwise.agents.serving.export import arrays_of_static
from knobwise.common.errors import InputError
from knobwise.common.progress import progress
from knobwise.envs.configurations.budgets import LEAST_LATENCY_MS
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.report.words import LEARNED as CONTROLLER
from knobwise.experiments.report.words import STATIC
from knobwise.experiments.settings.options import LiveConfig
from knobwise.profiling.elastic.adapter import ElasticAdaptive, request_of
from knobwise.profiling.elastic.scenes import END, TOKEN, WORDS, Scenes, draw_samples, soft_score
from knobwise.profiling.elastic.settings import Configuration, ElasticProfileConfig

LATELY = 100
"""The number of timed cells whose median ratio is the speed of the machine."""
IN_A_ROW = 20
"""Requests that one policy serves before the next serves the same."""


class Served(NamedTuple):
    """What one policy did with one request. Times in ms."""

    choice: int
    score: float
    inference_ms: float
    overhead_ms: float
    """Time beyond the model's own; static and fixed configurations are charged nothing."""
    waited_ms: float
    limit_ms: float
    """The limit that the decision had to meet, in the profile's ms; NaN for a fixed configuration."""
    decision_us: float


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


@dataclass
class Record:
    """What was served: P policies, n requests, R repeats."""

    policies: list[str]
    served: dict[str, NDArray[Any]]
    """The fields of `Served`, [P, n, R] each."""
    cells: list[tuple[int, int, float]] = field(default_factory=list)
    """(row, configuration, ms) of the model alone, timed between the requests."""


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
    """Check by their features that the samples of the stream are those of the table.

    Raises:
        InputError: they are not.
    """
    for row in set(stream.rows.tolist()):
        features = vlm.first_stage(request_of(stream.scenes[row])).features
        for name, block in features.items():
            known = table.features[name][row].numpy() if name in table.features else block[:0]
            # other processors may round the last bit of a half otherwise
            if known.shape != block.shape or not np.allclose(block, known, atol=4e-3, rtol=4e-3):
                raise InputError(
                    f"profile {table.name!r}: sample {table.sample_ids[row]} is not what the built-in model was "
                    "measured on; live needs profile=builtin"
                )


class Servers:
    """The policies in front of the model; each serves one request at a time: row, budget, ms it waited → `Served`."""

    def __init__(
        self, model: AdaptiveModel, table: ProfileTable, static: BudgetAwareStatic, stream: Stream, by_cpu: bool
    ) -> None:
        vlm = model.model
        assert isinstance(vlm, ElasticAdaptive)
        self.model, self.vlm, self.stream = model, vlm, stream
        self.requests = {row: request_of(scene) for row, scene in stream.scenes.items()}
        self.configurations = [Configuration(**chosen) for chosen in model.configurations]
        self.soft = bool(((table.accuracy > 0) & (table.accuracy < 1)).any())
        self.by_cpu, self.clock = by_cpu, time.thread_time if by_cpu else time.perf_counter
        # its choices as a step function of the budget: decided in torch they would slow down the answers that follow
        steps = arrays_of_static(static)
        self.starts, self.choices = steps["starts"].tolist(), steps["choices"].tolist()

    def controller(self, row: int, budget: float, waited: float) -> Served:
        arrived = None if self.stream.arrivals_s is None else time.perf_counter() - waited / 1e3
        start = self.clock()
        got = self.model.answer(self.requests[row], budget, arrived)
        took_ms = (self.clock() - start) * 1e3
        score = score_of(got.answer.text.split(), self.stream.scenes[row], self.soft)
        inference = got.answer.extra["cpu_ms"] if self.by_cpu else got.answer.total_ms
        overhead = max(took_ms - inference, 0.0)
        return Served(got.choice, score, inference, overhead, waited, got.limit_ms, got.decision_us)

    def static(self, row: int, budget: float, waited: float) -> Served:
        limit = float(np.float32(max(budget - waited, LEAST_LATENCY_MS) / self.model.speed))
        return self.fixed(row, self.choices[bisect.bisect_right(self.starts, limit) - 1], waited, limit)

    def always(self, choice: int, row: int, budget: float, waited: float) -> Served:
        return self.fixed(row, choice, waited)

    def fixed(self, row: int, choice: int, waited: float, limit: float = np.nan) -> Served:
        """By a configuration, without any policy."""
        request = self.requests[row]
        start = self.clock()
        run = self.vlm.model.generate(request.image, request.question, self.configurations[choice])
        took_ms = (self.clock() - start) * 1e3
        answer = [WORDS[token] for token in run.tokens if token != END]
        return Served(choice, score_of(answer, self.stream.scenes[row], self.soft), took_ms, 0.0, waited, limit, 0.0)


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
    servers = Servers(model, table, static, stream, config.clock == "cpu")
    policies: dict[str, Callable[[int, float, float], Served]]
    policies = {CONTROLLER: servers.controller, STATIC: servers.static}
    policies |= {name: partial(servers.always, configuration) for name, configuration in fixed.items()}
    n, rng = len(stream.rows), np.random.default_rng((config.seed, 1))
    for i in range(config.warm_up):
        for policy in policies.values():
            policy(int(stream.rows[i % n]), float(stream.budgets_ms[i % n]), 0.0)
    shape = (len(policies), n, config.repeats)
    record = Record(list(policies), {name: np.zeros(shape) for name in Served._fields})
    others = np.array(sorted(set(stream.scenes) - set(stream.rows.tolist())))
    with progress("serving", n * config.repeats, 0) as tick:
        for repeat in range(config.repeats):
            free = np.zeros(len(policies))  # when each policy has answered all requests before, in seconds
            for first in range(0, n, IN_A_ROW):
                block = range(first, min(first + IN_A_ROW, n))
                for p in rng.permutation(len(policies) + 1).tolist():
                    if p == len(policies):
                        for _ in block:
                            cell = int(rng.choice(others)), int(rng.integers(len(servers.configurations)))
                            record.cells.append((*cell, servers.fixed(*cell, 0.0).inference_ms))
                    else:
                        policy = list(policies.values())[p]
                        free[p] = _serve_block(policy, stream, block, float(free[p]), record, (p, repeat))
                _update_speed(model, table, record)
                tick(repeat * n + block[-1] + 1, "")
    return record


def _serve_block(
    policy: Callable[[int, float, float], Served],
    stream: Stream,
    block: range,
    free: float,
    record: Record,
    place: tuple[int, int],
) -> float:
    """Serve some requests by one policy, which is free after so many seconds, note them under `place` (policy, repeat),
    and return when it is free again."""
    for i in block:
        arrival = 0.0 if stream.arrivals_s is None else float(stream.arrivals_s[i])
        waited = 0.0 if stream.arrivals_s is None else max(free - arrival, 0.0) * 1e3
        served = policy(int(stream.rows[i]), float(stream.budgets_ms[i]), waited)
        free = arrival + (served.waited_ms + served.overhead_ms + served.inference_ms) / 1e3
        for name, value in served._asdict().items():
            record.served[name][place[0], i, place[1]] = value
    return free


def _update_speed(model: AdaptiveModel, table: ProfileTable, record: Record) -> None:
    """The machine may be shared and change its speed; the controller and static, which read the profile, must know."""
    cells = record.cells[-LATELY:]
    if len(cells) == LATELY:
        ratios = [ms / max(float(table.latency_ms[row, c]), LEAST_LATENCY_MS) for row, c, ms in cells]
        model.speed = float(np.median(ratios))


def score_of(words: Sequence[str], scene: Scenes, soft: bool) -> float:
    """Exact match, or the share of right words, of an answer."""
    right = scene.answers[0]
    answer = np.array([*(TOKEN[word] for word in words), END])
    if soft:
        return round(soft_score(answer, right), 4)
    return float(answer.tolist() == right[: right.tolist().index(END) + 1].tolist())
