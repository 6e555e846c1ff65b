"""How a tracker follows a machine that is not as fast as its profile, on simulated streams of requests.

    python experiments/studies/streams.py checkpoint=runs/latest/checkpoints/best.pt key=value …

Simulates what is missing and writes docs/streams.md, in some minutes on two cores. Requests are test samples of the
built-in profile under its default budgets; an answer takes its profiled latency, times a drift, times jitter, all drawn.
The controller is what `checkpoint` predicts (of a stack the moments of its mixture, as its student is taught), inside
its guard. One tracker is in the product, `knobwise.agents.serving.tracker`; the others were tried for comparison.
"""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.judging.baselines import BudgetAwareStatic
from knobwise.agents.serving.export import arrays_of_static, configurations_of
from knobwise.agents.serving.tracker import CLIP, CLIPPED_SQUARE, SCALES, LatencyTracker, TrackedStatic
from knobwise.agents.stack.stacked_controller import HOPELESS, StackedController
from knobwise.common.errors import InputError
from knobwise.common.files import write_text
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.readers.builtin import builtin_profile
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.studies.decisions import Mean
from knobwise.experiments.studies.running import folder_for, measured, rendered, run_from_words

Array = NDArray[Any]
JITTER = 0.03
"""Standard deviation of ln ms from one answer to the next."""
KNOWN = "knowing the drift"
AIMS = {"on time": 0.02, "behind": 0.015, "cost": 0.001}
"""The tracker's share of feasible requests on time is at most this far below the level, its utility below that of
knowing the drift, and without drift and jitter below that of the frozen controller."""


@dataclass
class StreamsConfig:
    """The settings, each as key=value."""

    checkpoint: str = "runs/latest/checkpoints/best.pt"
    """A stack or its student, trained on the built-in profile."""
    requests: int = 1500
    """Requests of each stream."""
    seeds: int = 20
    """Streams of each kind, side by side."""
    runs: str = "runs/streams"
    """Where simulations are kept; a finished one is not repeated."""
    out: str = "docs/streams.md"
    """The page."""
    jobs: int = 2
    """Processes at the same time, one thread each."""


def run(config: StreamsConfig) -> list[str]:
    """Simulate every kind of stream, and write the page.

    Raises:
        InputError: no stack, or one that was not trained on the built-in profile as it is now.
    """
    World.load(config.checkpoint)
    content = hashlib.sha256(Path(config.checkpoint).read_bytes()).hexdigest()
    folder = folder_for(config.runs, [content, config.requests, config.seeds])
    cells = {folder / f"{kind}.json": (kind, config.checkpoint, config.requests, config.seeds) for kind in KINDS}
    write_text(config.out, streams_page(measured("streams", simulate, cells, config.jobs)))
    return []


# -- streams -----------------------------------------------------------------------------------------------------------


class Stream(NamedTuple):
    """S streams of T requests: rows of the test part and ln budgets [S, T], the drift of ln ms over time [S, T] and of
    each configuration [S, C], and what nobody can know of an answer, jitter and stalls [S, T]."""

    rows: Array
    log_budgets: Array
    level: Array
    offset: Array
    noise: Array


def _wandering(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """8 % slower on average, a normal process of 5 % around it that forgets within 100 requests."""
    kept, level = np.exp(-1 / 100), np.empty(shape)
    level[:, 0] = rng.normal(size=shape[0])
    for t in range(1, shape[1]):
        level[:, t] = kept * level[:, t - 1] + np.sqrt(1 - kept**2) * rng.normal(size=shape[0])
    return np.log(1.08) + 0.05 * level


def _stalls(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Bursts of 4 answers on average, one in 150 answers begins one, that take 3 to 20 times as long."""
    stalls = np.zeros(shape)
    for stream, first in zip(*np.nonzero(rng.random(shape) < 1 / 150), strict=True):
        stalls[stream, first : first + rng.geometric(1 / 4)] = np.log(rng.uniform(3, 20))
    return stalls


KINDS: dict[str, str] = {
    "as profiled": "neither drift nor jitter",
    "jitter": "no drift",
    "slower by 1.05": "all the time",
    "slower by 1.15": "all the time",
    "slower by 1.40": "all the time",
    "step": "slower by 1.40 in the second third",
    "ramp": "from 1 to 1.40",
    "wandering": "around 1.08 by 5 %, forgotten within 100 requests; jitter 5 %",
    "stalls": "bursts of 4 answers on average that take 3 to 20 times as long, each 150 answers",
    "values": "each knob is slower the higher its value, by up to 1 to 1.35, drawn for each knob",
}
"""Kind of stream → what drifts; jitter is 3 % where nothing else is said."""


def draw(kind: str, world: World, requests: int, seeds: int) -> Stream:
    """Streams of one kind; the same requests for all kinds."""
    rng = np.random.default_rng(0)
    shape, samples = (seeds, requests), len(world.accuracy)
    rounds = range(-(-requests // samples))
    rows = np.stack([np.concatenate([rng.permutation(samples) for _ in rounds])[:requests] for _ in range(seeds)])
    log_budgets, noise = rng.choice(np.log(world.budgets_ms), shape), rng.normal(size=shape)
    rng = np.random.default_rng([1, *kind.encode()])
    level, offset, time = np.zeros(shape), np.zeros((seeds, world.accuracy.shape[1])), np.arange(requests) / requests
    noise *= {"as profiled": 0.0, "wandering": 0.05}.get(kind, JITTER)
    if kind.startswith("slower"):
        level += np.log(float(kind.split()[-1]))
    elif kind == "step":
        level += np.log(1.4) * ((time >= 1 / 3) & (time < 2 / 3))
    elif kind == "ramp":
        level += np.log(1.4) * time
    elif kind == "wandering":
        level = _wandering(rng, shape)
    elif kind == "stalls":
        noise += _stalls(rng, shape)
    elif kind == "values":
        places = world.places / np.maximum(world.places.max(0), 1)
        offset = rng.uniform(0, 0.3, (seeds, places.shape[1])) @ places.T
    return Stream(rows, log_budgets, level, offset, noise)


# -- policies ----------------------------------------------------------------------------------------------------------


class World:
    """Test samples of the built-in profile, n × C, and what a controller predicts of them."""

    def __init__(self, stack: StackedController, table: ProfileTable, test: torch.Tensor, fitted: torch.Tensor) -> None:
        self.digest, self.configurations = table.digest, configurations_of(table)
        self.places, self.budgets_ms = table.configurations.numpy(), default_budgets(table).double().numpy()
        self.accuracy = table.accuracy[test].double().numpy()
        self.log_latency = table.latency_ms[test].double().log().numpy()
        self.static = arrays_of_static(BudgetAwareStatic(table, fitted))
        with torch.no_grad():
            x = stack.features({name: block[test] for name, block in table.features.items()}, len(test))
            predictions = stack.predictions(x)
        weights, parts = list(predictions.weights), [(p.accuracy, p.log_latency, p.spread) for p in predictions.experts]
        if (members := predictions.outcomes) is not None:
            each = list(zip(members.accuracy, members.log_latency, members.spread, strict=True))
            parts, weights = each + parts, [weights[0] / len(each)] * len(each) + weights[1:]
        moments = [(a, mean, s.square() + mean.square()) for a, mean, s in parts]
        self.expected, self.mean, square = (
            sum(w * part.double() for w, part in zip(weights, column, strict=True)).numpy()
            for column in zip(*moments, strict=True)
        )
        self.spread = np.sqrt(np.maximum(square - self.mean**2, 1e-6))
        guard = stack.guard
        self.level = guard.level if guard else float("nan")
        self.logs = guard.budgets_ms.log().numpy() if guard else np.zeros(1)
        self.miss = guard.miss.numpy() if guard else np.zeros(1)
        self.deploy = guard.deploy.numpy() if guard else np.ones(1, bool)

    @classmethod
    def load(cls, checkpoint: str) -> World:
        """Raises InputError as `run` does."""
        loaded, table = load_checkpoint(checkpoint), builtin_profile()
        stack, rows = loaded.controller, loaded.extra
        usable = isinstance(stack, StackedController) and not stack.priced and "test_rows" in rows
        if not usable or loaded.profile_digest != table.digest:
            raise InputError(f"checkpoint={checkpoint}: needs a stack for deadlines, trained with profile=builtin")
        assert isinstance(stack, StackedController)
        return cls(stack, table, rows["test_rows"], torch.cat([rows["train_rows"], rows["validation_rows"]]))

    def choose(self, rows: Array, logs: Array, offset: Array, scale: Array) -> tuple[Array, Array, Array]:
        """Decisions of the controller, as `NumpyController` makes them under drift: rows and ln budgets [S], offsets
        [S, C], scales [S, 1] → configurations, predicted means and spreads, [S] each."""
        mean, mean_offset = self.mean[rows] + offset, offset.mean(1)
        meets = ndtr((logs[:, None] - mean) / (scale * self.spread[rows]))
        group = np.abs((logs - mean_offset)[:, None] - self.logs).argmin(1)
        score = (np.clip(self.expected[rows], 1e-3, 1) + self.miss[group][:, None]) * meets
        static = np.searchsorted(self.static["starts"], np.exp(logs - mean_offset), side="right") - 1
        choice = np.where(self.deploy[group], score.argmax(1), self.static["choices"][static])
        choice = np.where(meets.max(1) < HOPELESS, mean.argmin(1), choice)
        return choice, self.mean[rows, choice], self.spread[rows, choice]


# -- trackers ----------------------------------------------------------------------------------------------------------


class Frozen:
    """Follows nothing."""

    drift: tuple[Any, float] | None = None

    def update(self, configuration: int, log_latency: float, spread: float, measured_ms: float) -> None: ...


class Weighted(Frozen):
    """Exponentially weighted mean and spread of clipped residuals (Roberts 1959, "Control Chart Tests Based on Geometric
    Moving Averages")."""

    def __init__(self, gain: float = 1 / 25) -> None:
        self.gain = gain
        self.drift: tuple[float, float] = (0.0, 1.0)

    def update(self, configuration: int, log_latency: float, spread: float, measured_ms: float) -> None:
        mean, scale = self.drift
        z = float(np.clip((np.log(measured_ms) - log_latency - mean) / (scale * spread), -CLIP, CLIP))
        mean += self.gain * z * scale * spread
        self.drift = mean, float(np.clip(scale * (1 + self.gain * (z * z / CLIPPED_SQUARE - 1)) ** 0.5, *SCALES))


class Conformal(Frozen):
    """Adaptive conformal inference (Gibbs and Candès 2021, "Adaptive Conformal Inference Under Distribution Shift",
    equation 2): α ← α + γ·(1 − level − late), where an answer is late beyond the 1 − α quantile q of the latest 100
    standardised residuals. The offset puts the predicted quantile of the level there."""

    def __init__(self, level: float = 0.95, gamma: float = 0.005) -> None:
        self.level, self.gamma, self.alpha = level, gamma, 1 - level
        self.latest: deque[float] = deque(maxlen=100)
        self.quantile = self.expected = float(ndtri(level))
        self.spread = 0.0

    def update(self, configuration: int, log_latency: float, spread: float, measured_ms: float) -> None:
        z = (float(np.log(measured_ms)) - log_latency) / spread
        self.alpha += self.gamma * (1 - self.level - (z > self.quantile))
        self.latest.append(z)
        self.spread += (spread - self.spread) / len(self.latest)
        share = min(max(1 - self.alpha, 0.0), 1.0)
        self.quantile = sorted(self.latest)[min(int(share * len(self.latest)), len(self.latest) - 1)]
        self.drift = (self.quantile - self.expected) * self.spread, 1.0


CONTROLLERS: dict[str, Callable[[World], Any]] = {
    "frozen": lambda world: Frozen(),
    "tracked": lambda world: LatencyTracker(world.configurations),
    "level only": lambda world: LatencyTracker([{}] * len(world.configurations)),
    "weighted": lambda world: Weighted(),
    "conformal": lambda world: Conformal(),
}
STATICS = {"static, frozen": CONTROLLERS["frozen"], "static, tracked": CONTROLLERS["tracked"]}


def simulate(kind: str, checkpoint: str, requests: int, seeds: int) -> dict[str, Any]:
    """Every policy on streams of one kind: policy → utility and share of feasible requests on time, [S] each."""
    world = World.load(checkpoint)
    stream = draw(kind, world, requests, seeds)
    static = TrackedStatic(world.static, LatencyTracker(world.configurations))

    def by_static(rows: Array, logs: Array, offset: Array, scale: Array) -> tuple[Array, Array, Array]:
        choice = static.mean_utility(logs, offset, scale).argmax(1)
        return choice, static.log_latency[choice], static.spread[choice]

    policies: dict[str, Any] = {KNOWN: serve(world, stream, world.choose, None)}
    for name, fresh in CONTROLLERS.items():
        policies[name] = serve(world, stream, world.choose, [fresh(world) for _ in range(seeds)])
    policies["static, knowing the drift"] = serve(world, stream, by_static, None)
    for name, fresh in STATICS.items():
        policies[name] = serve(world, stream, by_static, [fresh(world) for _ in range(seeds)])
    return {"kind": kind, "level": world.level, "requests": requests, "policies": policies}


def serve(
    world: World, stream: Stream, choose: Callable[..., tuple[Array, Array, Array]], trackers: Sequence[Any] | None
) -> dict[str, list[float]]:
    """One policy on S streams side by side, with a tracker each; None knows the drift."""
    seeds, requests = stream.rows.shape
    utility, met, feasible = (np.zeros((seeds, requests)) for _ in range(3))
    offset, scale, every = stream.offset, np.ones((seeds, 1)), np.arange(seeds)
    for t in range(requests):
        rows, logs, level = stream.rows[:, t], stream.log_budgets[:, t], stream.level[:, t, None]
        if trackers is None:
            offset = level + stream.offset
        else:
            drifts = [tracker.drift or (0.0, 1.0) for tracker in trackers]
            offset = np.stack([np.broadcast_to(o, stream.offset.shape[1]) for o, _ in drifts])
            scale = np.array([s for _, s in drifts])[:, None]
        choice, mean, spread = choose(rows, logs, offset, scale)
        took = world.log_latency[rows] + level + stream.offset + stream.noise[:, t, None]
        met[:, t], feasible[:, t] = took[every, choice] <= logs, took.min(1) <= logs
        utility[:, t] = world.accuracy[rows, choice] * met[:, t]
        measured_ms = np.exp(took[every, choice]).tolist()
        cells = zip(choice.tolist(), mean.tolist(), spread.tolist(), measured_ms, strict=True)
        for tracker, cell in zip(trackers or (), cells, strict=trackers is not None):
            tracker.update(*cell)
    shares = (met * feasible).sum(1) / np.maximum(feasible.sum(1), 1)
    return {"utility": utility.mean(1).tolist(), "feasible": shares.tolist()}


# -- the page ----------------------------------------------------------------------------------------------------------


def streams_page(cells: Sequence[Mapping[str, Any]]) -> str:
    """docs/streams.md, from one simulation for each kind."""

    def mean(cell: Mapping[str, Any], policy: str, key: str, against: str = "") -> Mean:
        values = np.array(cell["policies"][policy][key])
        return Mean.over(values - np.array(cell["policies"][against][key]) if against else values)

    level, first = cells[0]["level"], cells[0]
    missed = [c["kind"] for c in cells if mean(c, "tracked", "feasible").value < level - AIMS["on time"]]
    behind = [c["kind"] for c in cells if mean(c, "tracked", "utility", KNOWN).value < -AIMS["behind"]]
    cost = mean(first, "tracked", "utility", "frozen")
    return rendered(
        "streams.md.j2",
        cells=cells,
        kinds=KINDS,
        policies=list(first["policies"]),
        seeds=len(first["policies"][KNOWN]["utility"]),
        level=level,
        mean=mean,
        missed=missed,
        behind=behind,
        cost=cost,
        AIMS=AIMS,
        KNOWN=KNOWN,
    )


if __name__ == "__main__":
    from knobwise.experiments.studies import streams  # processes look it up by this name

    sys.exit(run_from_words("streams", StreamsConfig, streams.run, sys.argv[1:]))
