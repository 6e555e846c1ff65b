"""A model with knobs that answers from a profile, and the log of a controller in front of it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import driven_apart, small_table

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.judging.baselines import BudgetAwareStatic
from knobwise.agents.serving.adaptive_model import AdaptiveModel
from knobwise.agents.stack.guard import Guard
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.profiling.measuring.adaptive_model import Answer, FirstStage, KnobSupport, Request

Factors = Callable[[Mapping[str, int]], float]


class ReplayedModel:
    """Answers a request, whose image is a row of a table, in the time of its cell times a factor."""

    name = "replayed"

    def __init__(self, table: ProfileTable, slower: Factors = lambda values: 1.0) -> None:
        self.table, self.slower = table, slower
        self.knobs = tuple(KnobSupport(knob.name, knob.values[-1], values=knob.values) for knob in table.knobs)
        self.columns = {tuple(table.configuration(c).items()): c for c in range(table.num_configurations)}

    def first_stage(self, request: Request, features: bool = True) -> FirstStage:
        blocks = {name: block[request.image].numpy() for name, block in self.table.features.items()}
        return FirstStage(request, blocks if features else {}, None, 0.0, 0.0)

    def answer(self, stages: Sequence[FirstStage], configuration: Mapping[str, int]) -> list[Answer]:
        column = self.columns[tuple(configuration.items())]
        times = [float(self.table.latency_ms[s.request.image, column]) * self.slower(configuration) for s in stages]
        right = [str(float(self.table.accuracy[s.request.image, column])) for s in stages]
        return [Answer(text, ms, ms, 0.0, 1, 1, 1) for text, ms in zip(right, times, strict=True)]


def small_stack(samples: int = 200, falls_back: bool = False) -> tuple[StackedController, ProfileTable]:
    """A controller that knows the means of a small table, and nothing beyond; with a guard that falls back at
    every budget but the largest, or at none."""
    table = small_table(samples)
    network = driven_apart(table, PolicyConfig(structure="utility", hidden=8, layers=1), by=0.0)
    network.network.residual.requires_grad_(False).weight.zero_()  # type: ignore[operator, union-attr]
    network.network.residual.bias.zero_()  # type: ignore[operator, union-attr]
    budgets = default_budgets(table)
    guard = Guard(len(budgets))
    guard.budgets_ms.copy_(budgets)
    guard.deploy[: len(budgets) - 1] = not falls_back
    static = BudgetAwareStatic(table, torch.arange(samples))
    return StackedController(network, [], torch.ones(1), guard, static).eval(), table


def serve_requests(
    model: AdaptiveModel, table: ProfileTable, count: int, label: bool = True, seed: int = 0
) -> list[Any]:
    """Let a model answer random rows under random default budgets, and label the answers."""
    generator = np.random.default_rng(seed)
    budgets = (default_budgets(table) + 1).tolist()  # the controller's own time comes on top
    results = []
    for row, budget in zip(
        generator.integers(table.num_samples, size=count), generator.choice(budgets, count), strict=True
    ):
        results.append(model.answer(Request(int(row), ""), float(budget)))
        if label and model.log is not None:
            model.log.label(results[-1].request_id, float(results[-1].answer.text))
    return results


def logging_model(
    folder: Path, agent: Any, table: ProfileTable, slower: Factors = lambda values: 1.0, **options: Any
) -> AdaptiveModel:
    return AdaptiveModel(ReplayedModel(table, slower), agent, log=folder, **options)
