"""How a tracker follows a machine that is not as fast as its profile: simulated streams of requests.

    python experiments/studies/streams.py checkpoint=runs/latest key=value …

Writes docs/streams.md, in some minutes. Requests are test samples of the built-in profile under its default budgets; an
answer takes one of its measured latencies times a drift and jitter, all drawn. The controller decides by what it
predicts, a teacher by what its student learns, inside its guard.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.serving.distillation import Lessons
from knobwise.agents.serving.export import arrays_of_static, configurations_of
from knobwise.agents.serving.tracker import LatencyTracker, TrackedStatic
from knobwise.agents.stack.stacked_controller import HOPELESS, StackedController
from knobwise.common.errors import InputError
from knobwise.common.files import write_text
from knobwise.common.progress import progress
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.readers.builtin import builtin_profile
from knobwise.experiments.results.run_folder import checkpoint_at
from knobwise.experiments.studies.running import Mean, rendered, run_from_words

Array = NDArray[Any]
Choose = Callable[[Array, Array, Array, Array], tuple[Array, Array, Array]]
"""Rows [S], ln budgets [S], offsets of ln ms [S, C] and factors on its spread [S, 1] → configurations, and mean and
standard deviation of their ln ms, predicted without drift, [S] each."""
Served = dict[str, tuple[Array, Array]]
"""Policy → utility, and the share of feasible requests on time, [S] each."""
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
}
"""Kind of stream → what is drawn."""
KNOWN = "knowing the drift"


@dataclass
class StreamsConfig:
    """The settings, each as key=value."""

    checkpoint: str = "runs/latest"
    """A run on the built-in profile, for what it deploys; or the checkpoint of a student or its teacher."""
    requests: int = 1500
    """Requests of each stream."""
    seeds: int = 20
    """Streams of each kind."""
    out: str = "docs/streams.md"
    """The page."""


class World:
    """What a controller predicts of n test samples, what they take, and static's tables. Raises InputError if the
    checkpoint holds no stack for deadlines, trained on the built-in profile as it is now."""

    def __init__(self, checkpoint: str) -> None:
        loaded, table = load_checkpoint(checkpoint_at(checkpoint)), builtin_profile()
        stack: Any = loaded.controller
        known = isinstance(stack, StackedController) and loaded.profile_digest == table.digest
        if not known or stack.guard is None or stack.static is None:
            raise InputError(f"checkpoint={checkpoint}: needs a guarded stack, trained with profile=builtin as it is")
        test = loaded.extra["test_rows"]
        self.configurations, self.places = configurations_of(table), table.configurations.numpy()
        self.budgets_ms, self.guard = default_budgets(table).double().numpy(), stack.guard.rows()
        self.accuracy = table.accuracy[test].double().numpy()
        self.log_latency = table.measurements_ms[test].double().log().numpy()
        self.typical = table.latency_ms[test].double().log().numpy()
        self.steps = arrays_of_static(stack.static)
        self.static = TrackedStatic(self.steps, LatencyTracker(self.configurations))
        self.logs, self.miss = stack.guard.budgets_ms.log().numpy(), stack.guard.miss.numpy()
        self.deploy = stack.guard.deploy.numpy()
        x = stack.features({name: block[test] for name, block in table.features.items()}, len(test))
        _, *predicted = Lessons.of_teacher(stack, x)
        self.expected, self.mean, self.spread = (part.double().numpy() for part in predicted)

    def by_controller(self, rows: Array, logs: Array, offset: Array, scale: Array) -> tuple[Array, Array, Array]:
        """As `NumpyController` decides under drift."""
        mean, scaled = self.mean[rows] + offset, logs - offset.mean(1)
        meets = ndtr((logs[:, None] - mean) / (scale * self.spread[rows]))
        group = np.abs(scaled[:, None] - self.logs).argmin(1)
        score = (np.clip(self.expected[rows], 1e-3, 1) + self.miss[group][:, None]) * meets
        choice = np.where(meets.max(1) < HOPELESS, mean.argmin(1), score.argmax(1))
        static = self.steps["choices"][np.searchsorted(self.steps["starts"], np.exp(scaled), side="right") - 1]
        deployed = self.deploy[group]
        choice = np.where(deployed, choice, static)
        log_latency = np.where(deployed, self.mean[rows, choice], self.static.log_latency[choice])
        return choice, log_latency, np.where(deployed, self.spread[rows, choice], self.static.spread[choice])

    def by_static(self, rows: Array, logs: Array, offset: Array, scale: Array) -> tuple[Array, Array, Array]:
        choice = self.static.mean_utility(logs, offset, scale).argmax(1)
        return choice, self.static.log_latency[choice], self.static.spread[choice]


# -- streams -----------------------------------------------------------------------------------------------------------


class Stream(NamedTuple):
    """S streams of T requests: rows, which of the measurements, and ln budgets [S, T], drift of ln ms [S, T], the same
    of each configuration [S, C], and jitter and stalls, which nobody can know, [S, T]."""

    rows: Array
    repeats: Array
    logs: Array
    drift: Array
    offset: Array
    noise: Array


def draw(kind: str, world: World, requests: int, seeds: int) -> Stream:
    """Streams of one kind; those of all kinds have the same requests."""
    rng, shape, samples = np.random.default_rng(0), (seeds, requests), len(world.accuracy)
    rounds = range(-(-requests // samples))
    rows = np.stack([np.concatenate([rng.permutation(samples) for _ in rounds])[:requests] for _ in range(seeds)])
    logs, noise, normal = rng.choice(np.log(world.budgets_ms), shape), rng.normal(size=shape), rng.normal(size=shape)
    noise *= {"as profiled": 0.0, "wandering": 0.05}.get(kind, 0.03)
    repeats = rng.integers(world.log_latency.shape[2], size=shape)
    offset, drift = np.zeros((seeds, len(world.configurations))), np.zeros(shape)
    time = np.arange(requests) / requests
    if kind.startswith("×"):
        drift += np.log(float(kind[2:]))
    elif kind in ("step", "ramp"):
        drift += np.log(1.4) * (time if kind == "ramp" else (time >= 1 / 3) & (time < 2 / 3))
    elif kind == "wandering":
        kept = np.exp(-1 / 100)
        drift[:, 0] = normal[:, 0]
        for t in range(1, requests):
            drift[:, t] = kept * drift[:, t - 1] + np.sqrt(1 - kept**2) * normal[:, t]
        drift = np.log(1.08) + 0.05 * drift
    elif kind == "stalls":
        for stream, first in zip(*np.nonzero(rng.random(shape) < 1 / 150), strict=True):
            noise[stream, first : first + rng.geometric(1 / 4)] += np.log(rng.uniform(3, 20))
    elif kind == "values":
        offset = rng.uniform(0, 0.3, (seeds, len(world.places[0]))) @ (world.places / world.places.max(0)).T
    return Stream(rows, repeats, logs, drift, offset, noise)


# -- trackers ----------------------------------------------------------------------------------------------------------


class Frozen:
    """Follows nothing."""

    drift: tuple[Any, float] | None = None

    def update(self, configuration: int, log_latency: float, spread: float, measured_ms: float) -> None: ...


FOLLOWERS: dict[str, Callable[[World], Any]] = {
    "frozen": lambda world: Frozen(),
    "tracked": lambda world: LatencyTracker(world.configurations),
}


def serve(world: World, stream: Stream, choose: Choose, followers: Sequence[Any] | None) -> tuple[Array, Array]:
    """One policy on S streams with a tracker each, None for knowing the drift: utility, and the share of feasible
    requests on time, [S] each."""
    shape, every = stream.rows.shape, np.arange(len(stream.rows))
    utility, met, feasible = (np.zeros(shape) for _ in range(3))
    for t in range(shape[1]):
        rows, logs = stream.rows[:, t], stream.logs[:, t]
        offset, scale = stream.drift[:, t, None] + stream.offset, np.ones((shape[0], 1))
        drifted = offset + stream.noise[:, t, None]
        took = world.log_latency[rows, :, stream.repeats[:, t]] + drifted
        if followers is not None:
            drifts = [follower.drift or (0.0, 1.0) for follower in followers]
            offset = np.stack([np.broadcast_to(each, offset.shape[1]) for each, _ in drifts])
            scale = np.array([factor for _, factor in drifts])[:, None]
        choice, mean, spread = choose(rows, logs, offset, scale)
        taken = took[every, choice]
        met[:, t], feasible[:, t] = taken <= logs, (world.typical[rows] + drifted).min(1) <= logs
        utility[:, t] = world.accuracy[rows, choice] * met[:, t]
        answers = zip(choice.tolist(), mean.tolist(), spread.tolist(), np.exp(taken).tolist(), strict=True)
        for follower, answer in zip(followers or (), answers, strict=False):
            follower.update(*answer)
    return utility.mean(1), (met * feasible).sum(1) / np.maximum(feasible.sum(1), 1)


def served_by_all(world: World, stream: Stream) -> Served:
    """Policy → what `serve` gives for it; knowing the drift first."""
    followed = {name: (world.by_controller, fresh) for name, fresh in FOLLOWERS.items()}
    followed |= {f"static, {name}": (world.by_static, FOLLOWERS[name]) for name in ("frozen", "tracked")}
    by_policy = {KNOWN: serve(world, stream, world.by_controller, None)}
    for name, (choose, fresh) in followed.items():
        by_policy[name] = serve(world, stream, choose, [fresh(world) for _ in stream.rows])
    return by_policy


def run(config: StreamsConfig) -> list[str]:
    """Simulate every kind of stream, and write the page. Raises InputError as `World` does."""
    world, served = World(config.checkpoint), dict[str, Served]()
    with progress("kinds of streams", len(KINDS), 0) as tick:
        for done, kind in enumerate(KINDS, 1):
            served[kind] = served_by_all(world, draw(kind, world, config.requests, config.seeds))
            tick(done, kind)
    write_text(config.out, streams_page(served, world.guard, config))
    return []


def streams_page(served: Mapping[str, Served], guard: Sequence[Mapping[str, Any]], config: StreamsConfig) -> str:
    """docs/streams.md, from what `served_by_all` gives for each kind of stream, and the rows of the guard."""

    def gain(kind: str, policy: str, other: str) -> Mean:
        """In points."""
        return Mean.over(100 * (served[kind][policy][0] - served[kind][other][0]))

    policies = list(served["no drift"])
    shares = {policy: {kind: 100 * float(served[kind][policy][1].mean()) for kind in KINDS} for policy in policies}
    return rendered(
        "streams.md.j2",
        config=config,
        guard=guard,
        kinds=KINDS,
        policies=policies,
        known={kind: Mean.over(served[kind][KNOWN][0]) for kind in KINDS},
        gains={policy: {kind: gain(kind, policy, KNOWN) for kind in KINDS} for policy in policies[1:]},
        shares=shares,
        distances={kind: shares["tracked"][kind] - shares[KNOWN][kind] for kind in KINDS},
        costs={kind: gain(kind, "tracked", "frozen") for kind in ("as profiled", "no drift")},
    )


if __name__ == "__main__":
    sys.exit(run_from_words("streams", StreamsConfig, run, sys.argv[1:]))
