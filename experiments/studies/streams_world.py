"""Streams of requests to simulate: what changes beside the profile, and the controllers that meet it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.signal import lfilter
from sklearn.cluster import KMeans

from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
from knobwise.agents.predictors.experts import Experts
from knobwise.agents.serving.distillation import StudentConfig, student_of
from knobwise.agents.serving.export import arrays_of_static, configurations_of
from knobwise.agents.serving.own_cost import EXPECTED_US, expected_cost_ms
from knobwise.agents.stack.stacked_controller import StackedController, fit_stack
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.readers.builtin import builtin_profile
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.experiments.command_line.compose import GROUPS
from knobwise.experiments.train.controller import STUDENT_STEPS

Array = NDArray[Any]


NEW, HARDLY_PROFILED = "new questions", "new configurations"
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
    HARDLY_PROFILED: "a quarter of the configurations were measured on 20 samples only; knowing has all measurements",
}
"""Kind of stream → what is drawn."""
QUESTION_KINDS = 4
"""Clusters of the questions' features (k-means); one of the controllers was not trained on the first."""
SAMPLES = 20
"""What new configurations were measured on."""


class World:
    """n test samples of the built-in profile, and a controller for them."""

    def __init__(
        self, agent: StackedController, table: ProfileTable, profiled: ProfileTable, test: torch.Tensor, kinds: Array
    ) -> None:
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
        self.static, self.profiled = arrays_of_static(agent.static), profiled
        self.fitted = np.setdiff1d(np.arange(table.num_samples), test.numpy())

    def features(self, row: Any) -> dict[str, Array]:
        """Of one row, or of several."""
        return {name: block[row] for name, block in self.blocks.items()}


def trained(path: Path, table: ProfileTable, split: Split, budgets: torch.Tensor) -> StackedController:
    """What `knobwise train` deploys after training on a split, from a file where there is one."""
    if not path.exists():
        fitted = torch.cat([split.train, split.validation])
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
def world_of(folder: Path, kind: str) -> World:
    """With the controller of a kind of stream, which was trained on everything but what is new."""
    table = builtin_profile()
    split, questions = table.split(), table.features["language_features"].numpy()
    kinds = KMeans(QUESTION_KINDS, n_init=1, random_state=0).fit_predict(questions)
    name, profiled, part = "all", table, split
    if kind == NEW:
        known = torch.from_numpy(kinds != 0)
        name, part = "without", Split(*(rows[known[rows]] for rows in split))
    elif kind == HARDLY_PROFILED:
        name, profiled = "few", hardly_profiled(table, split.train)
    agent = trained(folder / f"{name}.pt", profiled, part, default_budgets(table))
    return World(agent, table, profiled, split.test, kinds)


def hardly_profiled(table: ProfileTable, rows: torch.Tensor) -> ProfileTable:
    """The table where every fourth configuration was measured on the first of some rows only."""
    mask = table.mask.clone()
    mask[:, ::4] = False
    mask[rows[:SAMPLES]] = table.mask[rows[:SAMPLES]]
    cells = {name: getattr(table, name).clone() for name in ("accuracy", "latency_ms", "repeats_ms")}
    for values in cells.values():
        values[~mask] = torch.nan
    return replace(table, mask=mask, **cells)


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
