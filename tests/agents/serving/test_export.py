from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import driven_apart, equal_states, otherwise, small_table, table_of, two_kinds
from hypothesis import given, settings
from hypothesis import strategies as st
from test_numpy_controller import gappy, slowest_first, stack_of, stacked

from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
from knobwise.agents.controller.settings import EXPERTS, PolicyConfig
from knobwise.agents.judging.baselines import BudgetAwareStatic
from knobwise.agents.judging.evaluation import judge
from knobwise.agents.serving.distillation import AT_ONCE, Lessons, StudentConfig, composed, student_of
from knobwise.agents.serving.export import (
    arrays_of,
    arrays_of_static,
    contexts_of,
    export_numpy,
    one_by_one,
    parity,
    to_numpy,
)
from knobwise.agents.serving.numpy_controller import NumpyController
from knobwise.agents.stack.priced_policy import PricedChooser, price_stack
from knobwise.agents.stack.priced_policy import taught as taught_at_prices
from knobwise.agents.stack.prices import StaticMix, mean_budgets
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import default_budgets, judged_worths
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.deploy.export import run
from knobwise.experiments.settings.options import ExportRun
from knobwise.experiments.settings.profiles import TableProfile

# -- what a form is made of --------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6), holes=st.sampled_from([0.0, 0.5]), count=st.integers(2, 6), samples=st.integers(1, 9)
)
def test_static_steps_are_what_static_chooses(seed: int, holes: float, count: int, samples: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # few values, so that equals are many
    accuracy = torch.randint(3, (samples, count), generator=generator) / 2
    latency = torch.randint(1, 6, (samples, count), generator=generator).float()
    hole = torch.rand(samples, count, generator=generator) < holes
    hole[torch.arange(max(samples, count)) % samples, torch.arange(max(samples, count)) % count] = False
    cells = (values.masked_fill(hole, torch.nan).tolist() for values in (accuracy, latency))
    static = BudgetAwareStatic(table_of(*cells), torch.arange(samples))
    steps = arrays_of_static(static)
    budgets = torch.linspace(0.25, 6.75, 27)
    place = np.searchsorted(steps["starts"], budgets.double().numpy(), side="right") - 1
    everything = torch.ones(len(budgets), count, dtype=torch.bool)
    assert steps["choices"][place].tolist() == static.choose({}, budgets, everything).tolist()


def test_experts_that_do_not_count_stay_out_of_the_file() -> None:
    stack = stack_of(small_table(90))
    stack.weights.copy_(torch.tensor([0.5, 0.0, 0.0, 0.5, 0.0, 0.0]))
    numbers = {name.split(".")[1] for name in arrays_of(stack) if name.startswith("experts.")}
    assert numbers == {"2"}


def test_prices_must_be_calibrated_and_a_mix_needs_no_features() -> None:
    table = small_table(90, features=False)
    network = driven_apart(table, PolicyConfig(structure="utility", hidden=8), priced=True)
    with pytest.raises(InputError, match="prices are not calibrated"):
        to_numpy(network)
    budgets = torch.tensor([12.0])
    mix = StaticMix(table, torch.arange(90), budgets)
    stack = StackedController(network, [], torch.ones(1))
    chooser = PricedChooser("controller", stack, budgets, torch.tensor([0.01]), mix, [{"deployed": False}])
    light = to_numpy(chooser)
    assert 0.01 < float(mix.share) < 0.99
    assert {light.decide_index({}, 12.0) for _ in range(100)} == {int(mix.first[0]), int(mix.second[0])}


# -- parity ------------------------------------------------------------------------------------------------------------


def test_a_form_that_decides_otherwise_is_refused() -> None:
    table, stack, light = stacked("small")
    budgets = contexts_of(stack, table)
    result = parity(stack, light.choose, table, budgets, "c.npz")
    assert result["contexts"] == 90 * len(budgets)
    assert result["same"] + result["rounding"] == result["contexts"]
    other = to_numpy(stack_of(table, hidden=12, experts=("ridge",)))
    with pytest.raises(InputError, match=r"x\.npz: decides differently from the controller in \d+ of 450 contexts"):
        parity(stack, other.choose, table, budgets, "x.npz")


def test_equal_scores_are_rounding_and_others_are_not() -> None:
    table = small_table(60)
    controller = driven_apart(table, PolicyConfig(hidden=8))
    head = controller.network.head.logits
    sizes = table.configurations.amax(0) + 1
    best, first = table.configurations[:2], sizes.cumsum(0) - sizes
    head.weight.data.zero_()
    head.bias.data.zero_()
    head.bias.data[..., (best + first).flatten().unique()] = 50.0  # the first two are always best, and equal
    budgets = default_budgets(table)[:2]
    result = parity(controller, lambda blocks, limits: np.full(60, 1), table, budgets, "second")
    assert result == {"contexts": 120, "same": 0, "rounding": 120}
    with pytest.raises(InputError, match="third: decides differently from the controller in 120 of 120 contexts"):
        parity(controller, lambda blocks, limits: np.full(60, 2), table, budgets, "third")


def test_budgets_that_are_compared_are_the_judged_and_the_calibrated() -> None:
    table, stack, _ = stacked("small")
    assert stack.guard is not None
    both = {*default_budgets(table).tolist(), *stack.guard.budgets_ms.float().tolist()}
    assert contexts_of(stack, table).tolist() == sorted(both)
    assert contexts_of(stack.network, table).tolist() == default_budgets(table).unique().tolist()


# -- the command -------------------------------------------------------------------------------------------------------


@functools.cache
def trained() -> tuple[ProfileTable, StackedController]:
    table = small_table(80)
    return table, stack_of(table, rows=torch.arange(64), members=2, experts=("ridge", "knn"))


@pytest.fixture
def order(tmp_path: Path) -> ExportRun:
    """To export a checkpoint to the folder `out`."""
    table, stack = trained()
    table.save(tmp_path / "table.safetensors")
    rows = dict(zip(("train_rows", "validation_rows", "test_rows"), torch.arange(80).split([48, 16, 16]), strict=True))
    saved = ProfileTable.load(tmp_path / "table.safetensors")
    save_checkpoint(tmp_path / "best.pt", stack, saved, {"seen": [], **rows})
    profile = TableProfile(path=str(tmp_path / "table.safetensors"))
    return ExportRun(str(tmp_path / "best.pt"), profile, out=str(tmp_path / "out"))


@pytest.mark.parametrize("form", ["choose", "decide_index"])
def test_nothing_is_written_when_a_form_disagrees(form: str, order: ExportRun, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(NumpyController, form)
    monkeypatch.setattr(NumpyController, form, lambda *arguments: (right(*arguments) + 1) % 12)
    with pytest.raises(InputError, match=r"controller\.npz.*: decides differently .* nothing was written"):
        run(order)
    assert not Path(order.out).exists()


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    _, stack, _ = stacked("small")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        export_numpy(stack, tmp_path / "file" / "c.npz")
    export_numpy(stack, tmp_path / "c.npz")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "c.npz"}


# -- students ----------------------------------------------------------------------------------------------------------


SHORT = StudentConfig(requests=1000, steps=400, minibatch=64)
FEW = StudentConfig(requests=60, steps=5)


@functools.cache
def taught() -> tuple[ProfileTable, StackedController, StackedController]:
    """Two kinds of samples: what is best depends on which it is, and the features show it."""
    table, rows = two_kinds(240, shown=True), torch.arange(160)
    teacher = stack_of(table, rows, experts=("ridge", "gradient_boosting"))
    teacher.weights.copy_(torch.tensor([0.0, 0.5, 0.5]))  # the network beside them was not trained
    return table, teacher, student_of(teacher, table, rows, seed=0, config=SHORT)


def test_a_student_predicts_and_decides_as_its_teacher_on_samples_that_neither_saw() -> None:
    table, teacher, student = taught()
    test, budgets = torch.arange(160, 240), default_budgets(table)
    x = teacher.features({"x": table.features["x"][test]}, 80)
    lessons, learned = (Lessons.of_teacher(agent, x) for agent in (teacher, student))
    assert float((lessons.accuracy - learned.accuracy).abs().mean()) < 0.03
    assert float((lessons.log_latency - learned.log_latency).abs().mean()) < 0.05
    assert float((lessons.spread / learned.spread).log().abs().mean()) < 0.2
    of_teacher, of_student = (judge(agent, table, test, budgets).utility.mean() for agent in (teacher, student))
    assert float(of_teacher) > 0.7  # one configuration for all gets about 0.5
    assert float(of_student) > float(of_teacher) - 0.005


def test_lessons_are_the_moments_of_the_mixture() -> None:
    table = gappy()
    stack = stack_of(table, torch.arange(90), experts=EXPERTS)
    stack.weights.copy_(torch.tensor([0.5, 0.1, 0.1, 0.1, 0.1, 0.1]))
    x = stack.features(table.features, 90).repeat(AT_ONCE // 90 + 1, 1)
    lessons = Lessons.of_teacher(stack, x)
    with torch.no_grad():
        predicted = stack.predictions(x)
    assert predicted.outcomes is not None
    # draws of the mixture: a member by its weight, then ln ms by its normal distribution
    generator = torch.Generator().manual_seed(0)
    means = torch.stack([*predicted.outcomes.log_latency, *(p.log_latency for p in predicted.experts)])[:, 1]
    spreads = [*predicted.outcomes.spread[:, 1], *(p.spread for p in predicted.experts)]
    member = torch.tensor([0.5 / 3] * 3 + [0.1] * 5).multinomial(200_000, True, generator=generator)
    draws = means[member, 4] + torch.stack(spreads)[member, 4] * torch.randn(200_000, generator=generator)
    assert float(lessons.log_latency[1, 4]) == pytest.approx(float(draws.mean()), abs=0.01)
    assert float(lessons.spread[1, 4]) == pytest.approx(float(draws.std()), rel=0.02)
    last = AT_ONCE - AT_ONCE % 90  # the requests are labelled in two parts
    torch.testing.assert_close(lessons.spread[last : last + 90], lessons.spread[:90])


def test_a_student_is_one_light_network_that_saves_loads_and_exports(tmp_path: Path) -> None:
    table, teacher, student = taught()
    network = student.network
    assert (len(student.experts), network.config.members, network.config.structure) == (0, 1, "utility")
    assert not network.network.residual.weight.any()  # type: ignore[union-attr]
    assert student.guard is teacher.guard
    save_checkpoint(tmp_path / "student.pt", student, table, {})
    loaded = load_checkpoint(tmp_path / "student.pt").controller
    limits = default_budgets(table)[1].expand(240)
    assert torch.equal(loaded.choose(table.features, limits), student.choose(table.features, limits))
    light = to_numpy(student)
    assert light._fast is not None
    for form in (light.choose, one_by_one(light)):
        parity(student, form, table, default_budgets(table), "student")


def test_the_same_seed_gives_the_same_student_whatever_was_drawn_before_or_stands_in_other_rows() -> None:
    table, rows = small_table(60), torch.arange(40)
    teacher = stack_of(table, rows, experts=("ridge",))
    students = []
    for seed in (3, 3, 4):
        torch.rand(3)
        students.append(student_of(teacher, table, rows, seed, FEW))
    assert equal_states(students[0], students[1])
    first, other = (student.state_dict()["network.network.layers.0.weight"] for student in (students[0], students[2]))
    assert not torch.equal(first, other)
    # other rows are not looked at
    assert equal_states(students[0], student_of(teacher, otherwise(table, torch.arange(40, 60)), rows, 3, FEW))


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


def test_composed_requests_are_between_samples_in_every_column() -> None:
    x = torch.arange(5.0)[:, None] + torch.zeros(5, 21)
    made = composed(x, [1, 20], 400, torch.Generator().manual_seed(0))
    assert made.shape == (400, 21)
    assert 0 <= float(made.min()) < float(made.max()) <= 4
    second = made[:, 1:]  # a block
    kinds = torch.tensor([len(set(row)) for row in second.tolist()])
    assert set(kinds.tolist()) == {1, 2}  # of one request, or columns of two
    crossed = (made[:, 0] != second.mode(1).values).float().mean()
    mixed = (made != made.round()).any(1).float().mean()
    for share, least, most in ((crossed, 0.3, 0.9), (mixed, 0.3, 0.8), ((kinds == 2).float().mean(), 0.2, 0.5)):
        assert least < float(share) < most
    assert composed(torch.zeros(5, 0), [], 7, torch.Generator()).shape == (7, 0)


@pytest.mark.parametrize("features", [True, False])
def test_whatever_the_table(features: bool) -> None:
    table = small_table(60, holes=0.3, features=features)
    teacher = stack_of(table, torch.arange(45), experts=("ridge",))
    student = student_of(teacher, table, torch.arange(45), 0, FEW)
    chosen = student.choose(table.features, torch.full((60,), 15.0), table.mask)
    assert bool(table.mask[torch.arange(60), chosen].all())


def test_a_student_for_mean_budgets_keeps_them_at_prices_of_its_own() -> None:
    table, rows = small_table(240), torch.arange(160)
    config = PolicyConfig(structure="utility", members=3, hidden=8, experts=("ridge", "gradient_boosting"))
    budgets = mean_budgets(table, rows)
    network = driven_apart(table, config, priced=True)
    teacher = price_stack(table, rows, network, config, judged_worths(table), budgets, 0)
    assert isinstance(teacher.chooser, StackedController)
    student = taught_at_prices(teacher, student_of(teacher.chooser, table, rows, 0, SHORT), table, rows, cost_ms=0.5)
    assert student.guard == teacher.guard
    chosen = student.decided(table, rows)
    spent = table.latency_ms[rows].double().gather(1, chosen).mean(0) + 0.5
    assert (spent <= 1.01 * budgets).all()  # a worth in single precision may take a step of a sample more
    assert not teacher.prices.equal(student.prices)
    light = to_numpy(student)
    assert light._fast is not None
    for form in (light.choose, one_by_one(light)):
        counts = parity(student, form, table, budgets.float(), "student")
        assert counts["same"] > 0.95 * counts["contexts"]
