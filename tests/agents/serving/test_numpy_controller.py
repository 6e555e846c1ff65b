from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import small_table
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.heads import HEADS
from knobwise.agents.controller.settings import EXPERTS, PolicyConfig
from knobwise.agents.predictors.folds import folds_of
from knobwise.agents.serving import numpy_controller
from knobwise.agents.serving.export import Agent, agreement, arrays_of, export_numpy, one_by_one, to_numpy
from knobwise.agents.serving.numpy_controller import NumpyController
from knobwise.agents.stack.priced_policy import price_controller, price_stack
from knobwise.agents.stack.stacked_controller import StackedController, fit_stack
from knobwise.envs.configurations.budgets import default_budgets, judged_worths
from knobwise.envs.simulated.kinds import SimulatedConfig, simulate
from knobwise.envs.tables.profile_table import ProfileTable


def driven_apart(table: ProfileTable, config: PolicyConfig, priced: bool = False) -> Controller:
    """A network that was not trained, whose members and configurations differ."""
    torch.manual_seed(0)
    network = Controller.for_table(table, torch.arange(table.num_samples), config, priced).eval()
    for p in network.parameters():
        p.data += 0.3 * torch.randn_like(p)
    return network


def gappy(samples: int = 90) -> ProfileTable:
    """A table whose features are heavy-tailed in one column and missing in some places."""
    table = small_table(samples)
    image = table.features["image_features"].clone()
    image[:, 1] = image[:, 1].mul(3).exp()
    image[::4, 2] = torch.nan
    table.features["image_features"] = image
    return table


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
    "simulated": lambda: simulate(SimulatedConfig(kind="portfolio", samples=90)),
}


def stack_of(table: ProfileTable, **more: object) -> StackedController:
    options = {"structure": "utility", "members": 3, "hidden": 8, "experts": EXPERTS, **more}
    config = PolicyConfig(**options)  # type: ignore[arg-type]
    rows = torch.arange(table.num_samples)
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


def assert_same(agent: Agent, table: ProfileTable, budgets_ms: Tensor | None = None) -> None:
    result = agreement(agent, to_numpy(agent).choose, table, budgets_of(table) if budgets_ms is None else budgets_ms)
    assert result["different"] == 0
    assert result["rounding"] <= 0.01 * result["contexts"]


# -- it decides as the policy does -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("structure", ["utility", *HEADS])
def test_every_structure(structure: str, members: int, name: str) -> None:
    table = TABLES[name]()
    config = PolicyConfig(structure=structure, members=members, hidden=12, layers=3)
    assert_same(driven_apart(table, config), table)


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
def test_bins_and_linear_encoding(members: int) -> None:
    table = small_table(90)
    options = {"hidden": 8, "budget_encoding": "linear"}
    config = PolicyConfig(structure="utility", members=members, **options)  # type: ignore[arg-type]
    controller = driven_apart(table, config)
    assert controller.network.binned
    assert_same(controller, table)


def test_fall_backs_and_prices_of_the_guard() -> None:
    table = small_table(90)
    stack = stack_of(table)
    assert stack.guard is not None
    stack.guard.deploy.copy_(torch.tensor([True, False, True, True, False]))
    stack.guard.miss.copy_(torch.tensor([0.0, 0.0, 0.3, 1e6, 0.0]))
    assert_same(stack, table)
    one = one_by_one(to_numpy(stack))
    assert agreement(stack, one, table, budgets_of(table), samples=30)["different"] == 0


@pytest.mark.parametrize("kind", ["stack", "network", "additive", "no guard"])
def test_mean_budgets(kind: str) -> None:
    table = gappy()
    rows, budgets = torch.arange(table.num_samples), torch.tensor([9.0, 12.0, 16.0])
    structure = "additive" if kind == "additive" else "utility"
    options = {"structure": structure, "members": 3, "hidden": 8, "guard": kind != "no guard"}
    config = PolicyConfig(**options, experts=("ridge", "random_forest") if kind == "stack" else ())  # type: ignore[arg-type]
    network = driven_apart(table, config, priced=True)
    if kind in ("stack", "no guard"):
        agent = price_stack(table, rows, network, config, judged_worths(table), budgets, 0)
    else:
        folds = [tuple(torch.from_numpy(part) for part in fold) for fold in folds_of(table, rows, 0, 3)]
        held_out = torch.cat([hold for _, hold in folds])

        def choose(worth: Tensor) -> Tensor:
            blocks = {name: block[held_out] for name, block in table.features.items()}
            return network.choose(blocks, worth.expand(len(held_out)), table.mask[held_out])

        agent = price_controller(table, network, choose, folds, config, budgets)  # type: ignore[arg-type]
    if agent.guard:
        agent.deployed[:] = torch.tensor([True, False, True])
    blocks = {name: block.numpy() for name, block in table.features.items()}
    light = to_numpy(agent)
    same = total = 0
    for budget in budgets:
        limits = budget.expand(len(rows)).double()
        for mask in (None, torch.rand(table.mask.shape, generator=torch.Generator().manual_seed(0)) < 0.5):
            if mask is not None:
                mask[:, 0] = True
            chosen = light.choose(blocks, limits.numpy(), None if mask is None else mask.numpy())
            same += int((torch.from_numpy(chosen) == agent.choose(table.features, limits, mask)).sum())
            total += len(rows)
    assert same >= total - 2
    with pytest.raises(ValueError, match=r"a mean budget of 50: prices were calibrated for 9, 12, 16 only"):
        light.choose(blocks, np.full(len(rows), 50.0))


@pytest.mark.parametrize("name", ["gappy", "no features", "slowest first"])
@settings(max_examples=15, deadline=None)
@given(budget=st.floats(1e-3, 1e4), row=st.integers(0, 89), share=st.floats(0.1, 1.0))
def test_one_request_is_decided_as_many_are_and_never_outside_its_mask(
    name: str, budget: float, row: int, share: float
) -> None:
    table, stack, light = stacked(name)
    block = {key: values[row].numpy() for key, values in table.features.items()}
    many = {key: values[None] for key, values in block.items()}
    limits = np.array([budget], np.float32)
    of_torch = int(stack.choose({k: torch.from_numpy(v) for k, v in many.items()}, torch.from_numpy(limits))[0])
    assert light.decide(block, budget) == table.configuration(of_torch) == light.configuration(of_torch)
    two = {key: np.repeat(values, 2, 0) for key, values in many.items()}
    assert light.choose(two, np.repeat(limits, 2)).tolist() == [of_torch, of_torch]
    mask = torch.rand(1, light.configurations.shape[0], generator=torch.Generator().manual_seed(row)) < share
    mask[0, row % mask.shape[1]] = True
    chosen = light.choose(many, limits, mask.numpy())
    assert mask[0, chosen[0]]
    tensors = {key: torch.from_numpy(values) for key, values in many.items()}
    assert chosen.tolist() == stack.choose(tensors, torch.from_numpy(limits), mask).tolist()


@pytest.mark.parametrize("structure", ["utility", *HEADS])
def test_no_structure_leaves_the_mask(structure: str) -> None:
    table = small_table(60)
    controller = driven_apart(table, PolicyConfig(structure=structure, members=2, hidden=8))
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(table.mask.shape, generator=generator) < 0.4
    mask[:, 3] = True
    limits = default_budgets(table)[2].expand(60)
    blocks = {name: block.numpy() for name, block in table.features.items()}
    chosen = to_numpy(controller).choose(blocks, limits.numpy(), mask.numpy())
    assert chosen.tolist() == controller.choose(table.features, limits, mask).tolist()


def test_more_requests_than_are_decided_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table, _, light = stacked("small")
    blocks = {name: block.numpy() for name, block in table.features.items()}
    limits, mask = np.full(90, 15.0), np.ones((90, 12), bool)
    together = light.choose(blocks, limits, mask)
    monkeypatch.setattr(numpy_controller, "AT_ONCE", 7)
    assert light.choose(blocks, limits, mask).tolist() == together.tolist()
    none = {name: block[:0] for name, block in blocks.items()}
    assert light.choose(none, limits[:0]).shape == (0,)


def test_the_normal_distribution() -> None:
    z = np.random.default_rng(0).uniform(-10, 10, 2000)
    exact = [0.5 * math.erfc(-one / math.sqrt(2)) for one in z]
    np.testing.assert_allclose(numpy_controller._ndtr(z), exact, atol=3.1e-8)


# -- one request through a plain network -------------------------------------------------------------------------------


def with_column(table: ProfileTable, kind: str) -> ProfileTable:
    image = table.features["image_features"]
    if kind == "constant":
        image[:, 1] = 7.0
    if kind == "far from 0":
        image[:, 1] += 1e4
    return table


@pytest.mark.parametrize("kind", ["", "constant", "far from 0"])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("structure", ["additive", "joint"])
def test_the_short_way_decides_as_the_policy(structure: str, layers: int, kind: str) -> None:
    table = with_column(small_table(60), kind)
    controller = driven_apart(table, PolicyConfig(structure=structure, hidden=12, layers=layers))
    light = to_numpy(controller)
    assert light._fast is not None
    ends = torch.tensor([1e-12, 1e-3, 1e9])
    result = agreement(controller, one_by_one(light), table, torch.cat([budgets_of(table), ends]))
    assert result["different"] == 0
    assert result["rounding"] <= 0.01 * result["contexts"]


@pytest.mark.parametrize("structure", ["additive", "joint"])
def test_the_short_way_sees_what_is_missing_and_what_is_far_out(structure: str) -> None:
    table = small_table(60)
    controller = driven_apart(table, PolicyConfig(structure=structure, hidden=12))
    new = small_table(60, seed=1)
    for number, block in enumerate(new.features.values()):
        block[::3, number] = torch.nan
        block[1::3, number] = 1e6
        block[2::3, number] = -1e6
    new.features["image_features"][5] = torch.nan
    light = to_numpy(controller)
    assert agreement(controller, one_by_one(light), new, budgets_of(table))["different"] == 0
    blocks = {name: block.numpy() for name, block in new.features.items()}
    decided = one_by_one(light)(blocks, np.full(60, 15.0))
    assert len(set(decided.tolist())) > 1
    doubles = {name: block.astype(np.float64) for name, block in blocks.items()}
    assert one_by_one(light)(doubles, np.full(60, 15.0)).tolist() == decided.tolist()


@pytest.mark.parametrize("name", ["gappy", "no features", "simulated"])
@pytest.mark.parametrize("structure", ["additive", "joint"])
def test_what_is_not_plain_goes_the_long_way(structure: str, name: str) -> None:
    table = TABLES[name]()
    controller = driven_apart(table, PolicyConfig(structure=structure, hidden=12))
    light = to_numpy(controller)
    assert light._fast is None
    assert agreement(controller, one_by_one(light), table, budgets_of(table), samples=20)["different"] == 0
    assert to_numpy(driven_apart(table, PolicyConfig(structure=structure, hidden=12, members=2)))._fast is None


def test_threads_share_a_controller() -> None:
    table, _, stack = stacked("gappy")
    plain = to_numpy(driven_apart(small_table(90), PolicyConfig(structure="joint", hidden=12)))
    for light, features in ((stack, table.features), (plain, small_table(90).features)):
        blocks = {name: block.numpy() for name, block in features.items()}
        request = blocks, np.linspace(5, 40, 90)
        alone = one_by_one(light)(*request).tolist()
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(one_by_one(light), [blocks] * 8, [request[1]] * 8))
        assert all(result.tolist() == alone for result in results)


def test_what_is_given_is_left_as_it_was() -> None:
    table, _, stack = stacked("gappy")
    plain = to_numpy(driven_apart(small_table(90), PolicyConfig(structure="joint", hidden=12)))
    for light in (stack, plain):
        blocks = {name: block.numpy().copy() for name, block in table.features.items()}
        limits, mask = np.full(90, 15.0, np.float32), np.ones((90, 12), bool)
        light.choose(blocks, limits, mask)
        light.decide({name: block[1] for name, block in blocks.items()}, 15.0)
        assert all(np.array_equal(blocks[k], v.numpy(), equal_nan=True) for k, v in table.features.items())
        assert (limits == 15).all()
        assert mask.all()


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_copied_module_and_a_file_are_enough(tmp_path: Path) -> None:
    table, stack, light = stacked("gappy")
    export_numpy(stack, tmp_path / "controller.npz")
    shutil.copy(numpy_controller.__file__, tmp_path)
    np.savez(tmp_path / "requests.npz", **{name: block.numpy() for name, block in table.features.items()})
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


def test_wrong_requests_are_refused_in_words() -> None:
    table, _, light = stacked("small")
    block = {name: values[0].numpy() for name, values in table.features.items()}
    wrong = {
        r"block 'language_features' must have shape \(4,\), got nothing": {"image_features": block["image_features"]},
        r"block 'image_features' must have shape \(4,\), got \(3,\)": {**block, "image_features": np.zeros(3)},
        r"block 'image_features' must have shape \(4,\), got \(4, 1\)": {k: v[:, None] for k, v in block.items()},
    }
    for message, features in wrong.items():
        with pytest.raises(ValueError, match=message):
            light.decide(features, 10.0)
    many = {name: values[None] for name, values in block.items()}
    for budget in (0.0, -1.0, math.nan, math.inf, 1e300):
        with pytest.raises(ValueError, match="must be positive and finite"):
            light.decide(block, budget)
        with pytest.raises(ValueError, match="must be positive and finite"):
            light.choose(many, np.array([budget]))
    assert light.decide(block, 1e-300) == light.configuration(int(light.choose(many, np.array([1e-300]))[0]))
    with pytest.raises(ValueError, match=r"budgets must have shape \[n\], got \(\)"):
        light.choose(many, np.array(10.0))
    with pytest.raises(ValueError, match=r"mask must have shape \(1, 12\), got \(12,\)"):
        light.choose(many, np.array([10.0]), np.ones(12, bool))
    with pytest.raises(ValueError, match=r"must have shape \(2, 4\), got \(1, 4\)"):
        light.choose(many, np.array([1.0, 2.0]))
    with pytest.raises(ValueError, match="without any configuration"):
        light.choose(many, np.array([10.0]), np.zeros((1, 12), bool))


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
