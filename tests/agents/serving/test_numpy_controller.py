from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import math
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import driven_apart, portfolio, small_table, table_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.networks import BINS, WIDEST
from knobwise.agents.controller.settings import EXPERTS, PolicyConfig
from knobwise.agents.judging.baselines import BudgetAwareStatic
from knobwise.agents.serving import numpy_controller
from knobwise.agents.serving.distillation import StudentConfig, student_of
from knobwise.agents.serving.export import Agent, Decide, arrays_of, export_numpy, one_by_one, parity, to_numpy
from knobwise.agents.serving.numpy_controller import Array, NumpyController
from knobwise.agents.stack.guard import Guard
from knobwise.agents.stack.priced_policy import price_stack
from knobwise.agents.stack.stacked_controller import StackedController, fit_stack
from knobwise.envs.configurations.budgets import default_budgets, judged_worths
from knobwise.envs.tables.profile_table import ProfileTable


def gappy(samples: int = 90) -> ProfileTable:
    """A table whose features are heavy-tailed in one column and missing in some places."""
    table = small_table(samples)
    image = table.features["image_features"].clone()
    image[:, 1] = image[:, 1].mul(3).exp()
    image[::4, 2] = torch.nan
    table.features["image_features"] = image
    return table


def many_columns() -> ProfileTable:
    """So many that no network reads them in bins."""
    table = small_table(90)
    columns = torch.randn(90, WIDEST, generator=torch.Generator().manual_seed(0))
    return dataclasses.replace(table, features=table.features | {"more_features": columns})


def slowest_first() -> ProfileTable:
    """So that what is taken where nothing else decides, the first, is not the fastest."""
    table = small_table(90)
    cells = {name: getattr(table, name).flip(1) for name in ("accuracy", "latency_ms", "mask")}
    return dataclasses.replace(table, configurations=table.configurations.flip(0), **cells)


TABLES = {
    "small": lambda: small_table(90),
    "gappy": gappy,
    "slowest first": slowest_first,
    "no features": lambda: small_table(90, features=False),
    "many columns": many_columns,
    "portfolio": lambda: portfolio(90),
}


def stack_of(table: ProfileTable, rows: Tensor | None = None, **more: object) -> StackedController:
    options = {"structure": "utility", "members": 3, "hidden": 8, "experts": EXPERTS, **more}
    config = PolicyConfig(**options)  # type: ignore[arg-type]
    rows = torch.arange(table.num_samples) if rows is None else rows
    return fit_stack(table, rows, driven_apart(table, config), config, default_budgets(table), seed=0)


@functools.cache
def stacked(name: str) -> tuple[ProfileTable, StackedController, NumpyController]:
    """With every expert counting, whatever was best."""
    table = TABLES[name]()
    stack = stack_of(table)
    stack.weights.copy_(torch.ones(len(stack.weights)) / len(stack.weights))
    return table, stack, to_numpy(stack)


def budgets_of(table: ProfileTable) -> Tensor:
    """From hopeless to generous, and the judged ones."""
    ends = table.latency_ms[table.mask].aminmax()
    return torch.cat([default_budgets(table), torch.stack([ends.min / 3, ends.min, ends.max, 3 * ends.max])])


def arrays(features: Mapping[str, Tensor], rows: slice | int = slice(None)) -> dict[str, np.ndarray]:
    return {name: block[rows].numpy() for name, block in features.items()}


def assert_same(agent: Agent, table: ProfileTable, form: Decide | None = None, samples: int | None = None) -> None:
    """The same decisions; the budgets go beyond what can be met, and beyond what float32 distinguishes."""
    budgets_ms = torch.cat([budgets_of(table), torch.tensor([1e-12, 1e-3, 1e9])])
    result = parity(agent, form or to_numpy(agent).choose, table, budgets_ms, "numpy", samples)
    assert result["rounding"] <= 0.01 * result["contexts"]


# -- it decides as the policy does -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("structure", ["utility", "independent"])
def test_every_structure(structure: str, members: int, name: str) -> None:
    table = TABLES[name]()
    config = PolicyConfig(structure=structure, members=members, hidden=12, layers=3)
    assert_same(driven_apart(table, config), table)


@pytest.mark.parametrize("name", ["small", "gappy"])
@pytest.mark.parametrize(("structure", "members"), [("utility", 1), ("utility", 2), ("independent", 1)])
def test_projected_features_and_a_wide_encoding(structure: str, members: int, name: str) -> None:
    table = TABLES[name]()
    config = PolicyConfig(structure=structure, members=members, hidden=12, project=3, budget_width=32)
    controller = driven_apart(table, config)
    assert_same(controller, table)
    assert_same(controller, table, one_by_one(to_numpy(controller)), 20)
    assert arrays_of(controller)["normaliser.projection"].shape[1] == 3


def test_a_student_and_experts_read_projected_features() -> None:
    table, rows = small_table(90), torch.arange(90)
    stack = stack_of(table, project=3)
    stack.weights.copy_(torch.ones(len(stack.weights)) / len(stack.weights))
    assert_same(stack, table)
    student = student_of(stack, table, rows, 0, StudentConfig(requests=64, steps=10))
    assert student.network.network.skip.weight.shape[1] == 3 * (1 + BINS * student.network.network.reads_bins)
    assert_same(student, table)
    assert_same(student, table, one_by_one(to_numpy(student)), 20)


@pytest.mark.parametrize("name", TABLES)
def test_every_expert_beside_the_network(name: str) -> None:
    table, stack, _ = stacked(name)
    kinds = {type(r).__name__ for expert in stack.experts for _, r in expert.named_children()}
    assert name == "no features" or kinds >= {"Linear", "Trees"}
    assert_same(stack, table)


@pytest.mark.parametrize("expert", EXPERTS)
def test_one_expert_alone(expert: str) -> None:
    table = gappy()
    stack = stack_of(table, experts=(expert,))
    stack.weights.copy_(torch.tensor([0.0, 1.0]))
    assert_same(stack, table)
    stack.guard = None
    assert_same(stack, table)


@pytest.mark.parametrize("members", [1, 3])
def test_bins_and_the_budget_as_a_single_number(members: int) -> None:
    config = PolicyConfig(structure="utility", members=members, hidden=8, budget_width=1)
    controller = driven_apart(small_table(90), config)
    assert controller.network.reads_bins
    assert_same(controller, small_table(90))
    controller.network.leave_out_bins()
    assert_same(controller, small_table(90))


def test_fall_backs_and_prices_of_the_guard() -> None:
    table = small_table(90)
    stack = stack_of(table)
    assert stack.guard is not None
    stack.guard.deploy.copy_(torch.tensor([True, False, True, True, False]))
    stack.guard.miss.copy_(torch.tensor([0.0, 0.0, 0.3, 1e6, 0.0]))
    assert_same(stack, table)
    assert_same(stack, table, one_by_one(to_numpy(stack)), samples=30)


@pytest.mark.parametrize("kind", ["stack", "no guard"])
def test_mean_budgets(kind: str) -> None:
    table = gappy()
    rows, budgets = torch.arange(table.num_samples), torch.tensor([9.0, 12.0, 16.0])
    experts = ("ridge", "random_forest") * (kind == "stack")
    config = PolicyConfig(structure="utility", members=3, hidden=8, guard=kind != "no guard", experts=experts)
    network = driven_apart(table, config, priced=True)
    agent = price_stack(table, rows, network, config, judged_worths(table), budgets, 0)
    if agent.guard:
        agent.deployed[:] = torch.tensor([True, False, True])
    blocks, light, different = arrays(table.features), to_numpy(agent), 0
    some = torch.rand(table.mask.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    some[:, 0] = True
    for budget, mask in itertools.product(budgets, (None, some)):
        limits = budget.expand(len(rows)).double()
        chosen = light.choose(blocks, limits.numpy(), None if mask is None else mask.numpy())
        different += int((torch.from_numpy(chosen) != agent.choose(table.features, limits, mask)).sum())
    assert different <= 2
    with pytest.raises(ValueError, match=r"a mean budget of 50: prices were calibrated for 9, 12, 16 only"):
        light.choose(blocks, np.full(len(rows), 50.0))


@pytest.mark.parametrize("name", ["gappy", "no features", "slowest first"])
@settings(max_examples=15, deadline=None)
@given(budget=st.floats(1e-3, 1e4), row=st.integers(0, 89), share=st.floats(0.1, 1.0))
def test_one_is_decided_as_many_and_inside_its_mask(name: str, budget: float, row: int, share: float) -> None:
    table, stack, light = stacked(name)
    features, limits = {key: values[[row, row]] for key, values in table.features.items()}, torch.full((2,), budget)
    of_torch = int(stack.choose(features, limits)[0])
    assert light.decide(arrays(features, 0), budget) == table.configuration(of_torch) == light.configuration(of_torch)
    assert light.choose(arrays(features), limits.numpy()).tolist() == [of_torch, of_torch]
    features, limits = {key: values[:1] for key, values in features.items()}, limits[:1]
    mask = torch.rand(1, light.configurations.shape[0], generator=torch.Generator().manual_seed(row)) < share
    mask[0, row % mask.shape[1]] = True
    chosen = light.choose(arrays(features), limits.numpy(), mask.numpy())
    assert mask[0, chosen[0]]
    assert chosen.tolist() == stack.choose(features, limits, mask).tolist()


@pytest.mark.parametrize("structure", ["utility", "independent"])
def test_no_structure_leaves_the_mask(structure: str) -> None:
    table = small_table(60)
    controller = driven_apart(table, PolicyConfig(structure=structure, members=2, hidden=8))
    mask = torch.rand(table.mask.shape, generator=torch.Generator().manual_seed(0)) < 0.4
    mask[:, 3] = True
    limits = default_budgets(table)[2].expand(60)
    chosen = to_numpy(controller).choose(arrays(table.features), limits.numpy(), mask.numpy())
    assert chosen.tolist() == controller.choose(table.features, limits, mask).tolist()


def test_more_requests_than_are_decided_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table, _, light = stacked("small")
    blocks, limits, mask = arrays(table.features), np.full(90, 15.0), np.ones((90, 12), bool)
    together = light.choose(blocks, limits, mask)
    monkeypatch.setattr(numpy_controller, "AT_ONCE", 7)
    assert light.choose(blocks, limits, mask).tolist() == together.tolist()
    assert light.choose(arrays(table.features, slice(0)), limits[:0]).shape == (0,)


def test_the_normal_distribution() -> None:
    z = np.concatenate([np.random.default_rng(0).uniform(-10, 10, 2000), [0.0, 1e9, -1e9]])
    exact = [0.5 * math.erfc(-value / math.sqrt(2)) for value in z]
    for dtype in (np.float32, np.float64):
        np.testing.assert_allclose(numpy_controller._ndtr(z.astype(dtype)), exact, atol=1.1e-7)
    assert np.isnan(numpy_controller._ndtr(np.array([np.nan])))
    assert numpy_controller._ndtr(np.array([numpy_controller.HOPELESS_Z])) == pytest.approx(
        numpy_controller.HOPELESS, abs=1e-7
    )


@pytest.mark.parametrize("short", [True, False])
def test_threads_share_a_controller_and_what_is_given_is_left_as_it_was(short: bool) -> None:
    table, _, light = stacked("gappy")
    light = to_numpy(light_stack(small_table(90))) if short else light
    blocks, limits, mask = copy.deepcopy(arrays(table.features)), np.linspace(5, 40, 90), np.ones((90, 12), bool)
    alone = one_by_one(light)(blocks, limits).tolist()
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(one_by_one(light), [blocks] * 8, [limits] * 8))
    assert all(result.tolist() == alone for result in results)
    light.choose(blocks, limits, mask)
    assert all(np.array_equal(blocks[k], v.numpy(), equal_nan=True) for k, v in table.features.items())
    assert limits.tolist() == np.linspace(5, 40, 90).tolist()
    assert mask.all()


# -- one request through a single network that predicts outcomes -------------------------------------------------------


def light_stack(table: ProfileTable, **guard: list[float]) -> StackedController:
    """One network without experts and residual, inside a guard."""
    network = driven_apart(table, PolicyConfig(structure="utility", hidden=12))
    for part in (network.network.residual.weight, network.network.residual.bias):  # type: ignore[union-attr]
        part.data.zero_()
    calibrated = Guard(5)
    calibrated.budgets_ms.copy_(default_budgets(table))
    for name, values in guard.items():
        getattr(calibrated, name).copy_(torch.tensor(values))
    static = BudgetAwareStatic(table, torch.arange(table.num_samples))
    return StackedController(network, [], torch.ones(1), calibrated, static).eval()


GUARDS: dict[str, dict[str, list[float]]] = {
    "prices": {"miss": [0.0, 0.05, 0.3, 2.0, 1e6]},
    "fall-backs": {"miss": [0.3, 0.0, 0.0, 0.3, 0.0], "deploy": [1, 0, 1, 0, 1]},
}
DRIFTS = [None, (0.3, 1.0), (-1.2, 0.4), (np.linspace(-0.5, 0.8, 12), 2.0)]


@pytest.mark.parametrize("name", ["small", "slowest first"])
@pytest.mark.parametrize("guard", [*GUARDS, None])
def test_the_short_way_inside_a_guard_decides_as_the_long_way_and_the_policy(guard: str | None, name: str) -> None:
    table = TABLES[name]()
    stack = light_stack(table, **GUARDS.get(guard or "", {}))
    if guard is None:
        stack.guard = stack.static = None
    short, long = to_numpy(stack), to_numpy(stack)
    assert short._fast is not None
    long._fast = None
    assert_same(stack, table, one_by_one(short), samples=30)
    for drift, budget, row in itertools.product(DRIFTS, [*budgets_of(table).tolist(), 1e-9, 1e9], range(12)):
        decided = [light.decide_expected(arrays(table.features, row), budget, drift) for light in (short, long)]
        assert decided[0] == pytest.approx(decided[1], rel=1e-5)
        many = {key: block[[row, row]] for key, block in arrays(table.features).items()}
        assert short.choose(many, np.full(2, budget), drift=drift).tolist() == [decided[0][0]] * 2


@pytest.mark.parametrize("column", [(1.0, 0.0), (0.0, 7.0), (1.0, 1e4)], ids=["", "constant", "far from 0"])
def test_the_short_way_sees_what_is_missing_and_what_is_far_out(column: tuple[float, float]) -> None:
    table, new, (factor, added) = small_table(60), small_table(60, seed=1), column
    table.features["image_features"][:, 1].mul_(factor).add_(added)
    stack = light_stack(table, miss=[0.0, 0.05, 0.3, 2.0, 0.0])
    for number, block in enumerate(new.features.values()):
        block[::3, number] = torch.nan
        block[1::3, number] = 1e6
        block[2::3, number] = -1e6
    new.features["image_features"][5] = torch.nan
    light = to_numpy(stack)
    assert light._fast is not None
    for each in (table, new):
        parity(stack, one_by_one(light), each, budgets_of(table), "one by one")
    blocks = arrays(new.features)
    decided = one_by_one(light)(blocks, np.full(60, 15.0))
    doubles = {name: block.astype(np.float64) for name, block in blocks.items()}
    assert one_by_one(light)(doubles, np.full(60, 15.0)).tolist() == decided.tolist()


@pytest.mark.parametrize("name", ["gappy", "many columns", "no features"])
def test_gaps_go_the_short_way_and_what_has_no_features_the_long_one(name: str) -> None:
    table = TABLES[name]()
    stack = light_stack(table, **GUARDS["prices"])
    light = to_numpy(stack)
    assert (light._fast is None) == (name == "no features")
    assert_same(stack, table, one_by_one(light), samples=20)


@pytest.mark.parametrize("short", [True, False])
def test_a_fall_back_runs_no_network_and_expects_what_static_does(short: bool) -> None:
    table = small_table(60)
    light = to_numpy(light_stack(table, deploy=[0, 0, 0, 0, 0]))
    if not short:
        light._fast = None
    assert light._utility is not None
    light._utility.outcomes = None  # type: ignore[assignment,method-assign]
    static = BudgetAwareStatic(table, torch.arange(60))
    for budget in budgets_of(table).tolist():
        index, log_latency, spread = light.decide_expected(arrays(table.features, 0), budget)
        assert index == int(static.choose({}, torch.tensor([budget])))
        assert light.fall_back(budget) == (index, log_latency, spread)
        logs = table.latency_ms[:, index].double().log().numpy()
        assert (log_latency, spread) == pytest.approx((logs.mean(), logs.std()), rel=1e-5)
    assert light.decide_expected(arrays(table.features, 0), 15.0, (math.log(2), 1.0))[0] == int(
        static.choose({}, torch.tensor([7.5]))
    )
    assert to_numpy(light_stack(table, deploy=[1, 1, 1, 1, 1])).fall_back(15.0) is None
    some = to_numpy(light_stack(table, deploy=[1, 1, 0, 1, 1]))
    falls_back = [some.fall_back(budget) is not None for budget in budgets_of(table).tolist()]
    assert 0 < sum(falls_back) < len(falls_back)


def test_ties_go_to_the_fastest_by_the_short_way_too() -> None:
    table = slowest_first()
    stack = light_stack(table, miss=[0.0, 0.0, 0.3, 0.3, 0.3])
    for part in stack.network.network.parameters():
        part.data.zero_()
    bias = stack.network.network.outcome_head.bias.data[0, 0]  # type: ignore[union-attr]
    bias[12:24] = torch.linspace(3, 2, 12)  # all equally accurate; the last is the fastest
    bias[24:] = -2.0
    request = arrays(table.features, 0)
    for guarded in (True, False):
        if not guarded:
            stack.guard = stack.static = None
        short, long = to_numpy(stack), to_numpy(stack)
        long._fast = None
        for budget, drift in ((1e6, None), (1e6, (0.1, 1.0)), (1e-3, None), (15.0, (np.linspace(0, -2, 12), 1.0))):
            assert short.decide_index(request, budget, drift) == long.decide_index(request, budget, drift)
        # the guard prefers the likeliest to be on time, and all are certain
        assert short.decide_index(request, 1e6) == (0 if guarded else 11)


# -- a machine that is not as fast as the profile's --------------------------------------------------------------------


def by_hand() -> NumpyController:
    """Accuracies .6, .8, .9 at 10, 20 and 40 ms with a spread of .1, whatever the request."""
    cells = torch.tensor([[0.6, 0.8, 0.9]]), torch.tensor([[10.0, 20.0, 40.0]])
    table = table_of(*(values.expand(20, 3).clone() for values in cells), torch.randn(20, 1))
    network = Controller.for_table(table, torch.arange(20), PolicyConfig(structure="utility", hidden=2))
    for part in network.network.parameters():
        part.data.zero_()
    outcomes = torch.stack([cells[0][0].logit(), cells[1][0].log(), torch.full((3,), math.log(0.1))])
    network.network.outcome_head.bias.data[0, 0] = outcomes.flatten()  # type: ignore[union-attr]
    return to_numpy(StackedController(network, [], torch.ones(1)).eval())


@pytest.mark.parametrize("short", [True, False])
def test_drift_by_hand(short: bool) -> None:
    light = by_hand()
    assert light._fast is not None
    light._fast = light._fast if short else None
    x = {"x": np.zeros(1, np.float32)}
    # at 22 ms: .6·1, .8·Φ(ln 1.1/.1 = .953) = .664, 0
    assert light.decide_expected(x, 22.0) == pytest.approx((1, math.log(20), 0.1), abs=1e-6)
    # slower by 1.2: .6·1, .8·Φ(−.870) = .154; what is expected stays that of the profile
    assert light.decide_expected(x, 22.0, (math.log(1.2), 1.0)) == pytest.approx((0, math.log(10), 0.1), abs=1e-6)
    # only the second is slower by 1.2, or only the third is faster by 2
    assert light.decide_index(x, 22.0, (np.array([0.0, math.log(1.2), 0.0]), 1.0)) == 0
    assert light.decide_index(x, 22.0, (np.array([0.0, 0.0, -math.log(2)]), 1.0)) == 2
    # four times the spread: .6·Φ(1.97) = .585, .8·Φ(.238) = .475
    assert light.decide_index(x, 22.0, (0.0, 4.0)) == 0
    # nothing is likely to be on time at 7 ms, so the fastest: the second, where it is three times as fast
    assert light.decide_index(x, 5.0) == 0
    assert light.decide_index(x, 5.0, (np.array([0.0, -math.log(3), 0.0]), 1.0)) == 1


@pytest.mark.parametrize("name", ["small", "no features"])
@settings(max_examples=20, deadline=None)
@given(budget=st.floats(1.0, 100.0), offset=st.floats(-2.0, 2.0), row=st.integers(0, 89))
def test_the_same_offset_everywhere_is_another_budget(name: str, budget: float, offset: float, row: int) -> None:
    table, _, light = stacked(name)
    request, limits = arrays(table.features, row), np.full(1, budget)
    wanted = light.decide_expected(request, budget * math.exp(-offset))
    for drift in ((offset, 1.0), (np.full(12, offset), 1.0)):
        assert light.decide_expected(request, budget, drift) == wanted
        chosen = light.choose_expected({key: block[None] for key, block in request.items()}, limits, drift=drift)
        assert [float(values[0]) for values in chosen] == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["gappy", "no features"])
def test_what_a_stack_expects_is_the_mixture_of_its_members(name: str) -> None:
    table, stack, _ = stacked(name)
    stack = copy.deepcopy(stack)
    stack.guard.deploy.fill_(True)  # a fall-back to static expects nothing of this request
    light = to_numpy(stack)
    with torch.no_grad():
        predicted = stack.predictions(stack.features(table.features, 90))
    assert predicted.outcomes is not None
    parts = [(member.log_latency, member.spread) for member in predicted.experts]
    parts += list(zip(predicted.outcomes.log_latency, predicted.outcomes.spread, strict=True))
    weights = [*predicted.weights[1:], *[predicted.weights[0] / 3] * 3]
    mean = sum(w * mu.double() for w, (mu, _) in zip(weights, parts, strict=True))
    square = sum(w * (mu.double() ** 2 + sigma.double() ** 2) for w, (mu, sigma) in zip(weights, parts, strict=True))
    chosen, log_latency, spread = light.choose_expected(arrays(table.features), np.full(90, 15.0))
    rows = np.arange(90)
    np.testing.assert_allclose(log_latency, mean[rows, chosen], rtol=1e-5)  # type: ignore[index]
    np.testing.assert_allclose(spread, (square - mean**2).sqrt()[rows, chosen], rtol=1e-4)  # type: ignore[operator]


def test_heads_that_predict_no_latency_expect_what_is_typical() -> None:
    table = small_table(60, holes=0.2)
    light = to_numpy(Controller.for_table(table, torch.arange(40), PolicyConfig(hidden=8)).eval())
    logs = table.latency_ms[:40].log()
    assert light.typical is not None
    np.testing.assert_allclose(light.typical[0], logs.nanmean(0), atol=0.05)
    spread = (logs - logs.nanmean(0)).square().nanmean(0).sqrt()
    np.testing.assert_allclose(light.typical[1], spread, rtol=0.15)
    request = arrays(table.features, 0)
    index, *expected = light.decide_expected(request, 15.0, (0.2, 3.0))
    assert index == light.decide_index(request, 15.0 * math.exp(-0.2))
    assert expected == pytest.approx([values[index] for values in light.typical])


def test_a_wrong_drift_is_refused_in_words() -> None:
    table, _, light = stacked("small")
    request = arrays(table.features, 0)
    spoilt = np.zeros(12)
    spoilt[3] = np.nan
    for drift in ((math.nan, 1.0), (0.0, 0.0), (0.0, math.inf), (np.zeros(3), 1.0), (spoilt, 1.0)):
        with pytest.raises(ValueError, match=r"must be a finite offset, a number or \[12\], and a scale above 0"):
            light.decide_index(request, 15.0, drift)
    rows, budgets = torch.arange(90), torch.tensor([9.0, 12.0])
    config = PolicyConfig(structure="utility", members=3, hidden=8, guard=False)
    network = driven_apart(table, config, priced=True)
    priced = to_numpy(price_stack(table, rows, network, config, judged_worths(table), budgets, 0))
    with pytest.raises(ValueError, match="for a controller under deadlines"):
        priced.decide_index(request, 9.0, (0.1, 1.0))
    with pytest.raises(ValueError, match="mean budgets predicts no spread"):
        priced.decide_expected(request, 9.0)


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_copied_module_and_a_file_are_enough(tmp_path: Path) -> None:
    table, stack, light = stacked("gappy")
    export_numpy(stack, tmp_path / "controller.npz")
    shutil.copy(numpy_controller.__file__, tmp_path)
    np.savez(tmp_path / "requests.npz", **arrays(table.features))
    script = """
import json, sys
import numpy as np
from numpy_controller import NumpyController
light, blocks = NumpyController.load("controller.npz"), dict(np.load("requests.npz"))
first = light.decide({name: block[0] for name, block in blocks.items()}, 15.0)
others = [name for name in ("torch", "knobwise", "scipy") if name in sys.modules]
print(json.dumps([light.choose(blocks, np.full(90, 15.0)).tolist(), first, others]))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    chosen, first, others = json.loads(done.stdout)
    assert others == []
    assert chosen == stack.choose(table.features, torch.full((90,), 15.0)).tolist()
    assert first == light.configuration(chosen[0])


def test_what_it_says_of_itself() -> None:
    table, _, light = stacked("small")
    assert light.knobs == {"max_crops": (2, 6, 10), "top_k": (4, 8), "num_active_blocks": (12, 16)}
    assert light.configurations.tolist() == table.configurations.tolist()
    assert light.feature_sizes == {"image_features": 4, "language_features": 4}
    assert [light.configuration(c) for c in range(12)] == [table.configuration(c) for c in range(12)]
    light.configuration(0)["top_k"] = 99
    assert light.configuration(0)["top_k"] == 4


def test_wrong_features_budgets_and_masks_are_refused_in_words() -> None:
    table, _, light = stacked("small")
    block, many = arrays(table.features, 0), arrays(table.features, slice(1))
    for message, features in (
        (r"'language_features' must have shape \(4,\), got nothing", {"image_features": block["image_features"]}),
        (r"'image_features' must have shape \(4,\), got \(3,\)", {**block, "image_features": np.zeros(3)}),
        (r"'image_features' must have shape \(4,\), got \(4, 1\)", {k: v[:, None] for k, v in block.items()}),
    ):
        with pytest.raises(ValueError, match=f"block {message}"):
            light.decide(features, 10.0)
    for budget in (0.0, -1.0, math.nan, math.inf, 1e300):
        with pytest.raises(ValueError, match="must be positive and finite"):
            light.decide(block, budget)
        with pytest.raises(ValueError, match="must be positive and finite"):
            light.choose(many, np.array([budget]))
    assert light.decide(block, 1e-300) == light.configuration(int(light.choose(many, np.array([1e-300]))[0]))
    for message, *wrong in (
        (r"budgets must have shape \[n\], got \(\)", np.array(10.0)),
        (r"mask must have shape \(1, 12\), got \(12,\)", np.array([10.0]), np.ones(12, bool)),
        (r"must have shape \(2, 4\), got \(1, 4\)", np.array([1.0, 2.0])),
        ("without any configuration", np.array([10.0]), np.zeros((1, 12), bool)),
    ):
        with pytest.raises(ValueError, match=message):
            light.choose(many, *wrong)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "other.npz", header=np.zeros(3, np.uint8))
    np.savez(tmp_path / "pickled.npz", header=np.array([{}], object))
    arrays = arrays_of(stacked("small")[1])
    arrays.pop("network.skip.weight")
    np.savez(tmp_path / "incomplete.npz", **arrays)
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match=path.name):
            NumpyController.load(path)
    with pytest.raises(FileNotFoundError):
        NumpyController.load(tmp_path / "nothing.npz")


MUTATIONS: dict[str, Callable[[Array], Array]] = {
    "half": lambda array: array[: len(array) // 2],
    "turned": lambda array: array[::-1],
    "NaN": lambda array: np.where(np.arange(array.size).reshape(array.shape) == array.size // 2, np.nan, array),
    "flat": lambda array: array.reshape(-1),
    "one more": lambda array: np.concatenate([array, array[-1:]]),
    "another type": lambda array: array.astype(np.float16 if array.dtype.kind == "f" else np.int8),
}


@pytest.mark.parametrize("earlier", [False, True])
def test_damaged_arrays_are_refused_on_loading_or_by_an_earlier_version_decide(tmp_path: Path, earlier: bool) -> None:
    table, stack, _ = stacked("small")
    whole, path = arrays_of(stack), tmp_path / "c.npz"
    if earlier:  # without a digest
        whole.pop("digest")
    np.savez(path, **whole)
    requests, limits = arrays(table.features), np.full(90, 15.0)
    assert NumpyController.load(path).choose(requests, limits).shape == (90,)
    refused = 0
    for name, mutation in itertools.product(sorted(set(whole) - {"digest"}), MUTATIONS):
        array = whole[name]
        mutated = MUTATIONS[mutation](array) if array.ndim and array.size else array
        if mutated.tobytes() == array.tobytes() and (mutated.dtype, mutated.shape) == (array.dtype, array.shape):
            continue
        np.savez(path, **{**whole, name: mutated})
        controller, message = loaded(path)
        assert re.fullmatch(rf"({re.escape(str(path))}: .*)?", message)
        assert message or earlier, (name, mutation)
        if controller is not None:
            assert controller.choose(requests, limits).max() < 12
        refused += bool(message)
    assert refused > 100


def loaded(path: Path) -> tuple[NumpyController | None, str]:
    """The controller in a file, or why it is refused."""
    try:
        return NumpyController.load(path), ""
    except ValueError as error:
        return None, str(error)


def test_a_file_that_is_cut_anywhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    export_numpy(stacked("small")[1], path)
    content = path.read_bytes()
    for length in range(0, len(content), max(1, len(content) // 300)):
        path.write_bytes(content[:length])
        controller, message = loaded(path)
        assert controller is None
        assert message.startswith(f"{path}: ")
    with pytest.raises(FileNotFoundError):
        NumpyController.load(tmp_path / "none.npz")


def test_a_flipped_bit_in_a_file_is_noticed(tmp_path: Path) -> None:
    _, stack, light = stacked("small")
    path, draw, refused = tmp_path / "c.npz", random.Random(0), 0
    export_numpy(stack, path)
    whole = path.read_bytes()
    for place in draw.sample(range(len(whole)), 150):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << draw.randrange(8)]) + whole[place + 1 :])
        controller, _ = loaded(path)
        assert controller is None or controller.digest == light.digest  # where nobody reads
        refused += controller is None
    assert refused > 130
