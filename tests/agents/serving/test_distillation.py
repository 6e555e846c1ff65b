from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from helpers import small_table, two_kinds
from test_numpy_controller import driven_apart, gappy, slowest_first
from test_numpy_controller import stack_of as numpy_stack_of

from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import EXPERTS, PolicyConfig
from knobwise.agents.serving.distillation import StudentConfig, composed, student_of
from knobwise.agents.serving.export import agreement, to_numpy
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.configurations.reward import utility
from knobwise.envs.tables.profile_table import ProfileTable

SHORT = StudentConfig(hidden=16, requests=600, steps=200, minibatch=64)


FEW = StudentConfig(hidden=8, requests=60, steps=5)
stack_of = functools.partial(numpy_stack_of, dropout=0.0)


@functools.cache
def taught() -> tuple[ProfileTable, StackedController, Controller]:
    """Two kinds of samples: what is best depends on which it is, and the features show it."""
    table, rows = two_kinds(240, shown=True), torch.arange(160)
    teacher = stack_of(table, rows, experts=("ridge",))
    teacher.weights.copy_(torch.tensor([0.0, 1.0]))  # the network beside it was not trained
    return table, teacher, student_of(teacher, table, rows, seed=0, config=SHORT)


def test_a_student_learns_what_its_teacher_knows() -> None:
    table, teacher, student = taught()
    test, budget = torch.arange(160, 240), torch.tensor(15.0)
    features, limits = {"x": table.features["x"][test]}, budget.expand(80)
    chosen = [one.choose(features, limits) for one in (teacher, student)]
    assert float((chosen[0] == chosen[1]).float().mean()) > 0.9
    cells = (values[test].gather(1, chosen[1][:, None]) for values in (table.accuracy, table.latency_ms))
    assert float(utility(*cells, budget).mean()) > 0.9  # one configuration for all gets about 0.5


def test_a_student_is_one_light_network_that_saves_loads_and_exports(tmp_path: Path) -> None:
    table, _, student = taught()
    assert (student.config.members, student.config.hidden, student.config.structure) == (1, 16, "joint")
    save_checkpoint(tmp_path / "student.pt", student, table, {})
    loaded = load_checkpoint(tmp_path / "student.pt").controller
    limits = default_budgets(table)[1].expand(240)
    assert torch.equal(loaded.choose(table.features, limits), student.choose(table.features, limits))
    assert agreement(student, to_numpy(student).choose, table, default_budgets(table))["different"] == 0


def test_the_same_seed_gives_the_same_student_whatever_was_drawn_before() -> None:
    table, rows = small_table(60), torch.arange(40)
    teacher = stack_of(table, rows, experts=("ridge",))
    states = []
    for seed in (3, 3, 4):
        torch.rand(3)
        states.append(student_of(teacher, table, rows, seed, FEW).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["network.layers.0.weight"], states[2]["network.layers.0.weight"])


def test_rows_that_are_not_given_are_not_looked_at() -> None:
    table, rows = small_table(60), torch.arange(40)
    teacher = stack_of(table, rows, experts=("ridge",))
    first = student_of(teacher, table, rows, 0, FEW).state_dict()
    for values in (table.accuracy, table.latency_ms, *table.features.values()):
        values[40:] = 0.5
    second = student_of(teacher, table, rows, 0, FEW).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_predictions_of_some_requests_are_those_of_the_stack() -> None:
    for table in (gappy(), small_table(90, features=False)):
        stack = stack_of(table, torch.arange(90), experts=EXPERTS)
        stack.weights.copy_(torch.ones(len(stack.weights)) / len(stack.weights))
        x = stack.features(table.features, 90)
        rows, limits = torch.tensor([5, 3, 80]), torch.tensor([9.0, 15.0, 30.0])
        wanted = stack.view(x[rows], limits)
        for mine, own in zip(stack.predictions(x).take(rows).view(limits), wanted, strict=True):
            torch.testing.assert_close(mine, own, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("deploy", [True, False])
@pytest.mark.parametrize("price", [0.0, 0.3, 1e6])
def test_what_a_teacher_prefers_most_is_what_the_stack_chooses(deploy: bool, price: float) -> None:
    table = slowest_first()
    stack = stack_of(table, torch.arange(90), experts=("ridge", "knn"))
    assert stack.guard is not None
    stack.guard.deploy[1:] = deploy
    stack.guard.miss[:] = price
    limits = torch.cat([stack.guard.budgets_ms.float().repeat(17), torch.tensor([1e-3] * 5)])
    prefers = stack.preference(stack.view(stack.features(table.features, 90), limits), limits).argmax(1)
    assert torch.equal(prefers, stack.choose(table.features, limits))


def test_composed_requests_are_between_samples_block_by_block() -> None:
    x = torch.arange(5.0)[:, None] + torch.zeros(5, 3)
    made = composed(x, [1, 2], 400, torch.Generator().manual_seed(0))
    assert made.shape == (400, 3)
    assert torch.equal(made[:, 1], made[:, 2])  # of one block
    assert float(made.min()) >= 0
    assert float(made.max()) <= 4
    crossed, mixed = (made[:, 0] != made[:, 1]).float().mean(), (made != made.round()).any(1).float().mean()
    assert 0.3 < crossed < 0.8
    assert 0.3 < mixed < 0.6
    assert composed(torch.zeros(5, 0), [], 7, torch.Generator()).shape == (7, 0)


@pytest.mark.parametrize("features", [True, False])
def test_whatever_the_table(features: bool) -> None:
    table = small_table(60, holes=0.3, features=features)
    teacher = stack_of(table, torch.arange(45), experts=("ridge",))
    student = student_of(teacher, table, torch.arange(45), 0, StudentConfig(hidden=8, requests=80, steps=5))
    chosen = student.choose(table.features, torch.full((60,), 15.0), table.mask)
    assert bool(table.mask[torch.arange(60), chosen].all())


def test_only_deadlines_are_taught() -> None:
    table = small_table(60)
    config = PolicyConfig(structure="utility", members=2, hidden=8)
    priced = StackedController(driven_apart(table, config, priced=True), [], torch.ones(1))
    with pytest.raises(InputError, match="only a controller for deadlines"):
        student_of(priced, table, torch.arange(40), 0)
