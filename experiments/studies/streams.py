"""How a deployed controller follows a world that is not as its profile: simulated streams of requests.

    python experiments/studies/streams.py key=value …

Trains two controllers, simulates the streams that are missing, and writes docs/streams.md. Requests are test samples of
the built-in profile under its default budgets. An answer takes one of its measured latencies times a drift and jitter,
and its accuracy is the measured one times a factor, all drawn. Decisions, tracker, exploration, trials and updates are
those of the product; a decision by features is charged what it is expected to cost.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from sklearn.decomposition import PCA

from knobwise.agents.learning.settings import UpdateConfig
from knobwise.agents.learning.update import update
from knobwise.agents.serving.exploration import Exploration
from knobwise.agents.serving.export import to_numpy
from knobwise.agents.serving.numpy_controller import Drift, Expected, NumpyController
from knobwise.agents.serving.request_log import Logged
from knobwise.agents.serving.tracker import LatencyTracker, TrackedStatic
from knobwise.common.files import write_text
from knobwise.envs.readers.builtin import builtin_profile
from knobwise.experiments.studies.running import Mean, folder_for, measured, rendered, run_from_words
from knobwise.experiments.studies.streams_world import HARDLY_PROFILED, KINDS, NEW, Array, Stream, World, draw, world_of

KNOWING, FROZEN, TRACKED = "knowing", "frozen", "tracked"
STATIC, TRACKED_STATIC = "static, frozen", "static, tracked"
UPDATED, THOMPSON = "updated", "Thompson sampling"
POLICIES = (KNOWING, FROZEN, TRACKED, STATIC, TRACKED_STATIC)
LEARNERS = (UPDATED, THOMPSON)
LEARNED = ("no drift", "× 1.40", "values", "worse answers", NEW, HARDLY_PROFILED)
"""The streams on which a controller learns from its log."""


@dataclass
class StreamsConfig:
    """The settings, each as key=value."""

    requests: int = 3000
    """Requests of each stream."""
    seeds: int = 10
    """Streams of each kind."""
    every: int = 250
    """Requests between two updates from the log."""
    explore: float = 0.05
    """Share of the requests that explore, where a controller learns from its log."""
    trial: float = 0.5
    """Share of the requests that a candidate decides, while there is one that has not been shown to be better."""
    runs: str = "runs/streams"
    """Where controllers and streams are kept; what is there is not made again."""
    out: str = "docs/streams.md"
    """The page."""
    jobs: int = 2
    """Processes at the same time, one thread each."""


# -- policies ---------------------------------------------------------------------------------------------------------


class Deployed:
    """The controller as `AdaptiveModel` serves it, perhaps with a tracker, exploration and updates from its log."""

    def __init__(
        self, world: World, config: StreamsConfig, seed: int, tracks: bool, learning: UpdateConfig | None
    ) -> None:
        self.world, self.agent, self.every, self.learning = world, world.agent, config.every, learning
        self.controller = to_numpy(self.agent)
        self.tracker = LatencyTracker(world.names) if tracks else None
        self.exploration = Exploration(config.explore, 0.05, seed) if learning else None
        self.candidate: NumpyController | None = None
        self.trial, self.since = config.trial, 0
        self.log: list[tuple[Any, ...]] = []
        self.taken_over = 0

    def decide(self, row: int, budget_ms: float) -> tuple[int, float]:
        self.drift: Drift | None = self.tracker.drift if self.tracker else None
        trial = self.trial if self.candidate else 0.0
        turn = self.exploration.turn(trial) if self.exploration else "exploit"
        controller = self.candidate if self.candidate and turn == "trial" else self.controller
        self.limit, features, cost_ms = budget_ms, None, 0.0
        expected = controller.fall_back(budget_ms, self.drift)
        if expected is None:
            cost_ms = self.world.cost_ms + (self.world.decision_ms if turn == "explore" else 0.0)
            self.limit, features = budget_ms - cost_ms, self.world.features(row)
            expected = controller.decide_expected(features, self.limit, self.drift)
        self.expected: Expected = expected
        if self.exploration:
            about = self.controller, features, self.limit, self.drift, expected, turn
            self.expected, self.drawn = self.exploration.draw(*about, self.candidate, trial)
        return self.expected[0], cost_ms

    def learn(self, row: int, budget_ms: float, choice: int, took_ms: float, accuracy: float) -> None:
        if self.tracker:
            self.tracker.update(*self.expected, took_ms)
        if self.learning is None:
            return
        offset, scale = self.drift or (0.0, 1.0)
        about = row, budget_ms, self.limit, offset, scale, self.drawn, self.expected, took_ms
        self.log.append((*about, took_ms <= self.limit, accuracy))
        if len(self.log) % self.every == 0:
            done = update(self.agent, self._logged(), self.learning)
            if done.better:
                self.agent, self.controller = done.agent, to_numpy(done.agent)
                self.taken_over, self.since = self.taken_over + 1, len(self.log)
            self.candidate = to_numpy(done.candidate) if done.promising and not done.better else None

    def _logged(self) -> Logged:
        rows, budgets, limits, offsets, scales, drawn, expected, took, met, accuracy = zip(*self.log, strict=True)
        count, shape = len(self.world.names), (len(rows), len(self.world.names))
        propensity = np.zeros(shape)
        tried = np.full(len(rows), -1)
        for place, draws in enumerate(drawn):
            propensity[place, list(draws.chances)] = list(draws.chances.values())
            if draws.tried is not None and place >= self.since:
                tried[place] = draws.tried
        return Logged(
            ids=[str(place) for place in range(len(rows))],
            features=self.world.features(np.array(rows)),
            seen=np.ones(len(rows), bool),
            budget_ms=np.array(budgets),
            limit_ms=np.array(limits),
            offset=np.stack([np.broadcast_to(each, count) for each in offsets]).astype(np.float32),
            scale=np.array(scales),
            choice=np.array([choice for choice, *_ in expected]),
            best=np.array([each.best for each in drawn]),
            tried=tried,
            propensity=propensity,
            log_latency=np.array([mean for _, mean, _ in expected]),
            answer_ms=np.array(took),
            met=np.array(met),
            accuracy=np.array(accuracy),
        )


class Knowing:
    """The controller where it knows the drift of latencies and accuracies, not the jitter."""

    def __init__(self, world: World, stream: Stream) -> None:
        self.world, self.stream, self.time = world, stream, 0
        agent = copy.deepcopy(world.agent)
        assert agent.static is not None
        agent.static = agent.static.scaled(torch.ones(len(world.names)), torch.from_numpy(stream.worth))
        self.controller = to_numpy(agent)

    def decide(self, row: int, budget_ms: float) -> tuple[int, float]:
        drift = self.stream.offset[self.time], 1.0
        if (fixed := self.controller.fall_back(budget_ms, drift)) is not None:
            return fixed[0], 0.0
        features, limit = self.world.features(row), budget_ms - self.world.cost_ms
        if (self.stream.worth == 1).all():
            return self.controller.decide_index(features, limit, drift), self.world.cost_ms
        score, *_ = self.controller.prospects(features, limit, drift)
        return int((score * self.stream.worth).argmax()), self.world.cost_ms

    def learn(self, row: int, budget_ms: float, choice: int, took_ms: float, accuracy: float) -> None:
        self.time += 1


class ThompsonSampling:
    """A linear model of the utility of each configuration, with normal draws of its weights (Agrawal and Goyal 2013,
    "Thompson Sampling for Contextual Bandits with Linear Payoffs", ICML, algorithm 1). It sees principal components of
    the features at each budget, and begins with the profile, which counts as much as `PROFILED` requests."""

    COMPONENTS, PROFILED, SCALE = 12, 300, 0.1

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.rng = world, np.random.default_rng(seed)
        fitted, profiled = world.fitted, world.profiled
        joined = torch.cat(list(profiled.features.values()), 1).numpy()
        components = PCA(self.COMPONENTS, whiten=True, random_state=0).fit(joined[fitted])
        self.x = components.transform(np.concatenate(list(world.blocks.values()), 1))
        width, count = self.COMPONENTS + 1, len(world.names)
        shape = len(world.budgets_ms), count, width
        self.precision = np.tile(np.eye(width), (*shape[:2], 1, 1))
        self.target = np.zeros(shape)
        x, share = np.insert(components.transform(joined[fitted]), 0, 1.0, 1), self.PROFILED / len(fitted)
        latency, known = profiled.measurements_ms[fitted].numpy(), profiled.mask[fitted].double().numpy()
        for place, budget in enumerate(world.budgets_ms):
            utility = np.nan_to_num(profiled.accuracy[fitted].numpy()) * (latency <= budget).mean(-1)
            self.precision[place] += share * np.einsum("nc,ni,nj->cij", known, x, x)
            self.target[place] += share * utility.T @ x
        self.factor = np.linalg.cholesky(np.linalg.inv(self.precision))

    def decide(self, row: int, budget_ms: float) -> tuple[int, float]:
        place, x = int(np.abs(self.world.budgets_ms - budget_ms).argmin()), np.insert(self.x[row], 0, 1.0)
        factor = self.factor[place]
        noise = self.SCALE * self.rng.normal(size=self.target[place].shape)
        mean = np.einsum("cij,ckj,ck->ci", factor, factor, self.target[place])
        return int(((mean + np.einsum("cij,cj->ci", factor, noise)) @ x).argmax()), self.world.cost_ms

    def learn(self, row: int, budget_ms: float, choice: int, took_ms: float, accuracy: float) -> None:
        place, x = int(np.abs(self.world.budgets_ms - budget_ms).argmin()), np.insert(self.x[row], 0, 1.0)
        self.precision[place, choice] += np.outer(x, x)
        self.target[place, choice] += accuracy * (took_ms + self.world.cost_ms <= budget_ms) * x
        self.factor[place, choice] = np.linalg.cholesky(np.linalg.inv(self.precision[place, choice]))


class Static:
    """Budget-aware static, perhaps with a tracker."""

    def __init__(self, world: World, tracks: bool) -> None:
        self.static, self.tracks = TrackedStatic(world.static, LatencyTracker(world.names)), tracks

    def decide(self, row: int, budget_ms: float) -> tuple[int, float]:
        return self.static.decide(budget_ms), 0.0

    def learn(self, row: int, budget_ms: float, choice: int, took_ms: float, accuracy: float) -> None:
        if self.tracks:
            self.static.update(choice, took_ms)


def policy_of(name: str, world: World, config: StreamsConfig, stream: Stream, seed: int) -> Any:
    if name == KNOWING:
        return Knowing(world, stream)
    if name == THOMPSON:
        return ThompsonSampling(world, seed)
    if name in (STATIC, TRACKED_STATIC):
        return Static(world, name == TRACKED_STATIC)
    return Deployed(world, config, seed, name != FROZEN, UpdateConfig() if name == UPDATED else None)


# -- serving -----------------------------------------------------------------------------------------------------------


def serve(policy: Any, world: World, stream: Stream) -> tuple[Array, Array, Array]:
    """Whether each request was answered on time and whether that was feasible, bool [T], and its utility [T]."""
    drifted = stream.offset + stream.noise[:, None]
    took = np.exp(world.log_latency[stream.rows, :, stream.repeats] + drifted)
    feasible = np.exp((world.typical[stream.rows] + drifted).min(1)) <= stream.budgets_ms
    met, utility = np.zeros(len(took), bool), np.zeros(len(took))
    for t, (row, budget) in enumerate(zip(stream.rows.tolist(), stream.budgets_ms.tolist(), strict=True)):
        choice, cost_ms = policy.decide(row, budget)
        took_ms, accuracy = float(took[t, choice]), float(world.accuracy[row, choice] * stream.worth[choice])
        met[t] = took_ms + cost_ms <= budget
        utility[t] = accuracy * met[t]
        policy.learn(row, budget, choice, took_ms, accuracy)
    return met, feasible, utility


def simulate(folder: str, kind: str, name: str, seed: int, config: StreamsConfig) -> dict[str, Any]:
    """One policy on one stream: mean utilities of blocks of `every` requests, and the share of feasible requests that
    were on time."""
    world = world_of(Path(folder), kind)
    stream = draw(kind, world, config.requests, seed)
    if (name, kind) == (KNOWING, HARDLY_PROFILED):
        world = world_of(Path(folder), "")
    policy = policy_of(name, world, config, stream, seed)
    met, feasible, utility = serve(policy, world, stream)
    blocks = [float(block.mean()) for block in np.split(utility, range(config.every, len(utility), config.every))]
    on_time = float((met & feasible).sum() / max(feasible.sum(), 1))
    about = {"kind": kind, "policy": name, "seed": seed, "taken_over": getattr(policy, "taken_over", 0)}
    return about | {"utility": blocks, "on_time": on_time}


def run(config: StreamsConfig) -> list[str]:
    """Simulate what is missing, and write the page."""
    settings = [
        config.requests,
        config.every,
        config.explore,
        config.trial,
        UpdateConfig(),
        KINDS,
        builtin_profile().digest,
    ]
    folder = folder_for(config.runs, settings)
    for kind in ("", NEW, HARDLY_PROFILED):
        world_of(folder, kind)
    pairs = [(kind, name) for kind in KINDS for name in (*POLICIES, *(LEARNERS if kind in LEARNED else ()))]
    cells = {
        folder / f"{kind}-{name}-{seed}.json": (str(folder), kind, name, seed, config)
        for seed in range(config.seeds)
        for kind, name in pairs
    }
    guard = world_of(folder, "").agent.guard
    assert guard is not None
    write_text(config.out, streams_page(measured("streams", simulate, cells, config.jobs), guard.rows(), config))
    return []


def streams_page(cells: Sequence[Mapping[str, Any]], guard: Sequence[Mapping[str, Any]], config: StreamsConfig) -> str:
    """docs/streams.md, from what `simulate` gives for each kind, policy and seed, and the rows of the guard."""
    frame = pl.DataFrame(cells).sort("seed")

    def values(kind: str, name: str, what: str) -> Array:
        """[seeds], of utility [seeds, blocks]."""
        return np.array(frame.filter(kind=kind, policy=name)[what].to_list())

    def gain(kind: str, name: str, other: str, first: int = 0) -> Mean:
        """In points of utility, after some blocks."""
        return Mean.over(100 * (values(kind, name, "utility") - values(kind, other, "utility"))[:, first:].mean(1))

    def gains(names: Sequence[str], kinds: Sequence[str], other: str, first: int = 0) -> dict[str, dict[str, Mean]]:
        return {name: {kind: gain(kind, name, other, first) for kind in kinds} for name in names}

    shares = {name: {kind: 100 * float(values(kind, name, "on_time").mean()) for kind in KINDS} for name in POLICIES}
    return rendered(
        "streams.md.j2",
        config=config,
        guard=guard,
        kinds=KINDS,
        learned=LEARNED,
        policies=POLICIES,
        known={kind: Mean.over(values(kind, KNOWING, "utility").mean(1)) for kind in KINDS},
        gains=gains(POLICIES[1:], list(KINDS), KNOWING),
        shares=shares,
        distances={kind: shares[TRACKED][kind] - shares[KNOWING][kind] for kind in KINDS},
        costs={kind: gain(kind, TRACKED, FROZEN) for kind in ("as profiled", "no drift")},
        late=gains((FROZEN, TRACKED, *LEARNERS), LEARNED, KNOWING, min(1000, config.requests - 1) // config.every),
        over=gains(LEARNERS, LEARNED, TRACKED),
        quiet={name: gain("no drift", name, FROZEN) for name in LEARNERS},
        taken_over={kind: values(kind, UPDATED, "taken_over").mean() for kind in LEARNED},
    )


if __name__ == "__main__":
    sys.exit(run_from_words("streams", StreamsConfig, run, sys.argv[1:]))
