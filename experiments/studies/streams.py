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
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from scipy.signal import lfilter
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA

from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
from knobwise.agents.learning.settings import UpdateConfig
from knobwise.agents.learning.update import update
from knobwise.agents.predictors.experts import Experts
from knobwise.agents.serving.distillation import StudentConfig, student_of
from knobwise.agents.serving.exploration import Exploration
from knobwise.agents.serving.export import arrays_of_static, configurations_of, to_numpy
from knobwise.agents.serving.numpy_controller import Drift, Expected, NumpyController
from knobwise.agents.serving.own_cost import EXPECTED_US, expected_cost_ms
from knobwise.agents.serving.request_log import Logged
from knobwise.agents.serving.tracker import LatencyTracker, TrackedStatic
from knobwise.agents.stack.stacked_controller import StackedController, fit_stack
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.common.files import write_text
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.readers.builtin import builtin_profile
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.experiments.command_line.compose import GROUPS
from knobwise.experiments.studies.running import Mean, folder_for, measured, rendered, run_from_words
from knobwise.experiments.train.controller import STUDENT_STEPS

Array = NDArray[Any]
NEW = "new questions"
KINDS = {
    "as profiled": "neither drift nor jitter beyond that of the measurements",
    "no drift": "jitter of 3 % on top, as in all that follow",
    "× 1.05": "slower all the time",
    "× 1.15": "slower all the time",
    "× 1.40": "slower all the time",
    "step": "× 1.40 in the second third",
    "ramp": "from × 1 to × 1.40",
    "wandering": "around × 1.08 by 5 %, forgotten within 100 requests; jitter of 5 %",
    "stalls": "one answer in 150 begins a burst of 4 on average that take 3 to 20 times as long",
    "values": "each knob slows down with its value, by up to × 1 to 1.35",
    "worse answers": "× 1.3, and a third of the configurations lose a quarter of their accuracy",
    NEW: "after a third of the stream every second question is of a kind that the controller was not trained on",
}
"""Kind of stream → what is drawn."""
KNOWING, FROZEN, TRACKED = "knowing", "frozen", "tracked"
STATIC, TRACKED_STATIC = "static, frozen", "static, tracked"
UPDATED, GRPO, THOMPSON = "updated", "updated with GRPO", "Thompson sampling"
POLICIES = (KNOWING, FROZEN, TRACKED, STATIC, TRACKED_STATIC)
LEARNERS = (UPDATED, GRPO, THOMPSON)
LEARNED = ("no drift", "× 1.40", "values", "worse answers", NEW)
"""The streams on which a controller learns from its log."""
QUESTION_KINDS = 4
"""Clusters of the questions' features (k-means); one of the controllers was not trained on the first."""


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


# -- the world ---------------------------------------------------------------------------------------------------------


class World:
    """n test samples of the built-in profile, and a controller for them."""

    def __init__(self, agent: StackedController, table: ProfileTable, test: torch.Tensor, kinds: Array) -> None:
        assert agent.static is not None
        self.agent, self.names = agent, configurations_of(table)
        self.places = table.configurations.numpy()
        self.budgets_ms = default_budgets(table).double().numpy()
        self.accuracy = table.accuracy[test].double().numpy()
        self.log_latency = table.measurements_ms[test].double().log().numpy()
        self.typical = table.latency_ms[test].double().log().numpy()
        self.blocks = {name: block[test].numpy() for name, block in table.features.items()}
        self.cost_ms, self.decision_ms = expected_cost_ms(table, experts=False), EXPECTED_US["network"] / 1e3
        self.is_new = kinds[test.numpy()] == 0
        self.static, self.table = arrays_of_static(agent.static), table
        self.fitted = np.setdiff1d(np.arange(table.num_samples), test.numpy())

    def features(self, row: Any) -> dict[str, Array]:
        """Of one row, or of several."""
        return {name: block[row] for name, block in self.blocks.items()}


def trained(path: Path, table: ProfileTable, split: Split) -> StackedController:
    """What `knobwise train` deploys after training on a split, from a file where there is one."""
    if not path.exists():
        budgets, fitted = default_budgets(table), torch.cat([split.train, split.validation])
        names = {"policy": "auto", "loss": "exact", "optimiser": "auto", "reward": "utility"}
        groups: Any = {group: GROUPS[group][name] for group, name in names.items()}
        network = ControllerTrainer(table, split, seed=0, budgets_ms=budgets, **groups).run()
        experts = Experts.fit(table, fitted, budgets, groups["policy"].experts, 0)
        cost_ms = expected_cost_ms(table, experts=False)
        stack = fit_stack(table, fitted, network, groups["policy"], budgets, 0, cost_ms, experts)
        steps = STUDENT_STEPS * (groups["optimiser"].warmup_iterations + groups["optimiser"].iterations)
        save_checkpoint(path, student_of(stack, table, fitted, 0, StudentConfig(steps=steps)), table, {})
    agent = load_checkpoint(path).controller
    assert isinstance(agent, StackedController)
    return agent


@cache
def world_of(folder: Path, new: bool) -> World:
    """With a controller trained on all kinds of questions, or on all but the first."""
    table = builtin_profile()
    split, questions = table.split(), table.features["language_features"].numpy()
    kinds = KMeans(QUESTION_KINDS, n_init=1, random_state=0).fit_predict(questions)
    known = torch.from_numpy(kinds != 0)
    part = Split(*(rows[known[rows]] for rows in split)) if new else split
    return World(trained(folder / f"{'without' if new else 'all'}.pt", table, part), table, split.test, kinds)


class Stream(NamedTuple):
    """T requests: rows, which of the measurements, and budgets in ms, [T]; what can be known, offsets of ln ms [T, C]
    and factors of the accuracy of each configuration [C]; and jitter and stalls of ln ms, [T]."""

    rows: Array
    repeats: Array
    budgets_ms: Array
    offset: Array
    worth: Array
    noise: Array


def draw(kind: str, world: World, requests: int, seed: int) -> Stream:
    """A stream of one kind; those of all kinds but new questions have the same requests."""
    rng, count, time = np.random.default_rng(seed), len(world.names), np.arange(requests) / requests
    rows, budgets = rng.integers(len(world.accuracy), size=requests), rng.choice(world.budgets_ms, requests)
    repeats, noise = rng.integers(world.log_latency.shape[2], size=requests), rng.normal(size=requests)
    noise *= {"as profiled": 0.0, "wandering": 0.05}.get(kind, 0.03)
    drift, offset, worth = np.zeros(requests), np.zeros(count), np.ones(count)
    if kind.startswith("×"):
        drift += np.log(float(kind[2:]))
    elif kind in ("step", "ramp"):
        drift += np.log(1.4) * (time if kind == "ramp" else (time >= 1 / 3) & (time < 2 / 3))
    elif kind == "wandering":
        kept, normal = np.exp(-1 / 100), rng.normal(size=requests)
        normal[1:] *= np.sqrt(1 - kept**2)
        drift = np.log(1.08) + 0.05 * lfilter([1.0], [1.0, -kept], normal)
    elif kind == "stalls":
        for first in np.flatnonzero(rng.random(requests) < 1 / 150):
            noise[first : first + rng.geometric(1 / 4)] += np.log(rng.uniform(3, 20))
    elif kind == "values":
        offset = world.places / world.places.max(0) @ rng.uniform(0, 0.3, world.places.shape[1])
    elif kind == "worse answers":
        drift += np.log(1.3)
        worth[rng.permutation(count)[: count // 3]] = 0.75
    elif kind == NEW:
        known, new = (rng.choice(np.flatnonzero(world.is_new == side), requests) for side in (False, True))
        rows = np.where((time >= 1 / 3) & (rng.random(requests) < 0.5), new, known)
    return Stream(rows, repeats, budgets, drift[:, None] + offset, worth, noise)


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
        fitted, joined = world.fitted, torch.cat(list(world.table.features.values()), 1).numpy()
        components = PCA(self.COMPONENTS, whiten=True, random_state=0).fit(joined[fitted])
        self.x = components.transform(np.concatenate(list(world.blocks.values()), 1))
        profiled = components.transform(joined[fitted])
        width, count = self.COMPONENTS + 1, len(world.names)
        shape = len(world.budgets_ms), count, width
        self.precision = np.tile(np.eye(width), (*shape[:2], 1, 1))
        self.target = np.zeros(shape)
        x, share = np.insert(profiled, 0, 1.0, 1), self.PROFILED / len(fitted)
        latency = world.table.measurements_ms[fitted].numpy()
        for place, budget in enumerate(world.budgets_ms):
            utility = world.table.accuracy[fitted].numpy() * (latency <= budget).mean(-1)
            self.precision[place] += share * x.T @ x
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
    learning = {UPDATED: UpdateConfig(steps=0), GRPO: UpdateConfig()}.get(name)
    return Deployed(world, config, seed, name != FROZEN, learning)


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
    world = world_of(Path(folder), kind == NEW)
    stream = draw(kind, world, config.requests, seed)
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
    for new in (False, True):
        world_of(folder, new)
    pairs = [(kind, name) for kind in KINDS for name in (*POLICIES, *(LEARNERS if kind in LEARNED else ()))]
    cells = {
        folder / f"{kind}-{name}-{seed}.json": (str(folder), kind, name, seed, config)
        for seed in range(config.seeds)
        for kind, name in pairs
    }
    guard = world_of(folder, False).agent.guard
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
        grpo={kind: gain(kind, GRPO, UPDATED) for kind in LEARNED},
        taken_over={kind: values(kind, GRPO, "taken_over").mean() for kind in LEARNED},
    )


if __name__ == "__main__":
    sys.exit(run_from_words("streams", StreamsConfig, run, sys.argv[1:]))
