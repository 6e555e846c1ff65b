"""A deployed controller in NumPy: it decides as the torch modules do, and refuses the rest."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import arrays, driven_apart, portfolio, small_table
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from replayed import settled_for, untrained
from torch import Tensor

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.judging.baselines import static_of
from knobwise.agents.policy import controller as policy
from knobwise.agents.policy.arrays import digest_of
from knobwise.agents.policy.controller import FORMAT, NumpyController
from knobwise.agents.serving.exploration import near_best
from knobwise.agents.stack.deployed import DeployedController
from knobwise.agents.stack.prices import StaticMix
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.tables.profile_table import ProfileTable

Array = NDArray[Any]
SOURCE = Path(policy.__file__).parent
ROUNDING = 1e-4
"""Of log-probabilities in single precision."""


def gappy(samples: int = 90) -> ProfileTable:
    """A table whose features are heavy-tailed in one column and missing in some places."""
    table = small_table(samples)
    image = table.features["image_features"].clone()
    image[:, 1] = image[:, 1].mul(3).exp()
    image[::4, 2] = torch.nan
    return replace(table, features=table.features | {"image_features": image})


def sparse() -> ProfileTable:
    """Five of twelve configurations, so that there is one head over them."""
    table = small_table(90)
    kept = torch.tensor([0, 3, 5, 6, 11])
    cells = {name: getattr(table, name)[:, kept] for name in ("accuracy", "latency_ms", "mask")}
    return replace(table, configurations=table.configurations[kept], **cells)


TABLES = {
    "small": lambda: small_table(90),
    "gappy": gappy,
    "sparse": sparse,
    "no features": lambda: small_table(90, features=False),
    "portfolio": lambda: portfolio(90),
}
MARGINS = [1.0, 0.9, 0.5, 0.7, 0.6]
DEPLOY = [True, False, True, True, False]


def budgets_of(table: ProfileTable) -> Tensor:
    """From hopeless to generous, and the judged ones."""
    ends = table.latency_ms[table.mask].aminmax()
    more = torch.stack([ends.min / 3, ends.min, ends.max, 3 * ends.max])
    return torch.cat([default_budgets(table), more, torch.tensor([1e-12, 1e-3, 1e9])])


def assert_same(
    agent: DeployedController,
    table: ProfileTable,
    limits: Tensor,
    mask: Tensor | None = None,
) -> None:
    """It decides as the torch modules and the guard's rows have it: float32 limits [N]."""
    light = agent.decider
    blocks = arrays(table)
    allowed = None if mask is None else mask.numpy()
    planned = limits.double()
    deployed = torch.ones(len(limits), dtype=torch.bool)
    rows = agent.settled.guard
    if rows:
        logs = torch.tensor([row["budget_ms"] for row in rows]).double().log()
        nearest = (limits.double().clamp_min(1e-9).log().unsqueeze(1) - logs).abs().argmin(1)
        planned = planned * torch.tensor([row["margin"] for row in rows]).double()[nearest]
        deployed = torch.tensor([row["deployed"] for row in rows])[nearest]
    x = agent.controller.features(table.features, len(limits))
    with torch.no_grad():
        wanted = agent.controller(x, planned.float(), mask).numpy()
    log_probs = light.log_probs(blocks, limits.double().numpy(), allowed)
    np.testing.assert_allclose(log_probs, wanted, atol=ROUNDING, rtol=ROUNDING)
    chosen = light.choose(blocks, limits.double().numpy(), allowed)
    each = np.arange(len(limits))
    close = wanted[each, chosen] >= wanted.max(1) - ROUNDING
    if rows:
        static = static_of(table, torch.arange(table.num_samples))
        fixed = static.choose({}, limits.double().numpy(), allowed)
        close[~deployed] = (chosen == fixed)[~deployed]
    assert close.all()


def one_by_one(light: NumpyController, blocks: dict[str, Array], limits: Array) -> list[int]:
    """The decisions of n requests, each alone."""
    chosen = []
    for row, limit in enumerate(limits.tolist()):
        request = {name: block[row] for name, block in blocks.items()}
        chosen.append(light.decide_index(request, limit))
    return chosen


def assert_alone_as_many(light: NumpyController, blocks: dict[str, Array], limits: Array) -> None:
    """A request alone is decided as among others, up to rounding."""
    alone = np.array(one_by_one(light, blocks, limits))
    many = light.choose(blocks, limits)
    log_probs = light.log_probs(blocks, limits)
    each = np.arange(len(limits))
    close = np.abs(log_probs[each, alone] - log_probs[each, many]) < ROUNDING
    assert (close | (alone == many)).all()
    assert (alone == many).mean() > 0.99


# -- it decides as the policy does -----------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("members", [1, 2])
def test_every_table(members: int, name: str) -> None:
    table = TABLES[name]()
    agent = untrained(table, PolicyConfig(members=members, hidden=12, layers=3))
    for budget in budgets_of(table):
        limits = budget.expand(table.num_samples)
        assert_same(agent, table, limits)
        assert_same(agent, table, limits, table.mask)
    limits = budgets_of(table).repeat(9)[: table.num_samples].double().numpy()
    assert_alone_as_many(agent.decider, arrays(table), limits)


@pytest.mark.parametrize("name", ["small", "gappy"])
@pytest.mark.parametrize("width", [1, 4, 32])
def test_projected_features_and_other_encodings(width: int, name: str) -> None:
    table = TABLES[name]()
    config = PolicyConfig(members=2, hidden=12, project=3, budget_width=width)
    agent = untrained(table, config)
    limits = budgets_of(table).repeat(9)[:90]
    assert_same(agent, table, limits)
    assert_alone_as_many(agent.decider, arrays(table), limits.double().numpy())
    assert agent.arrays()["normaliser.projection"].shape[1] == 3


@pytest.mark.parametrize("name", ["small", "no features", "sparse"])
def test_fall_backs_and_margins_of_the_guard(name: str) -> None:
    table = TABLES[name]()
    budgets = len(default_budgets(table))
    agent = untrained(table, None, MARGINS[:budgets], DEPLOY[:budgets])
    for budget in budgets_of(table):
        assert_same(agent, table, budget.expand(90))
        assert_same(agent, table, budget.expand(90), table.mask)
    limits = budgets_of(table).repeat(9)[:90].double().numpy()
    assert_alone_as_many(agent.decider, arrays(table), limits)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    holes=st.sampled_from([0.0, 0.4]),
    features=st.booleans(),
    layers=st.integers(1, 3),
    members=st.sampled_from([1, 3]),
    width=st.sampled_from([1, 6, 9]),
    guarded=st.booleans(),
)
def test_random_tables(
    seed: int,
    holes: float,
    features: bool,
    layers: int,
    members: int,
    width: int,
    guarded: bool,
) -> None:
    table = small_table(20, seed, holes, features)
    config = PolicyConfig(members=members, hidden=8, layers=layers, budget_width=width)
    generator = torch.Generator().manual_seed(seed)
    margins = (0.5 + torch.rand(5, generator=generator) / 2).tolist() if guarded else None
    deploy = (torch.rand(5, generator=generator) < 0.6).tolist() if guarded else None
    agent = untrained(table, config, margins, deploy)
    limits = 60 ** (1.2 * torch.rand(20, generator=generator))
    assert_same(agent, table, limits)
    assert_same(agent, table, limits, table.mask)


@functools.cache
def guarded() -> tuple[ProfileTable, DeployedController]:
    table = gappy()
    return table, untrained(table, None, MARGINS, DEPLOY)


@settings(max_examples=30, deadline=None)
@given(
    budget=st.floats(1e-3, 1e4),
    row=st.integers(0, 89),
    share=st.floats(0.1, 1.0),
)
def test_one_is_decided_as_many_and_inside_its_mask(budget: float, row: int, share: float) -> None:
    table, agent = guarded()
    light = agent.decider
    blocks = arrays(table, torch.tensor([row, row]))
    limits = np.full(2, budget)
    first, second = light.choose(blocks, limits)
    assert first == second
    request = arrays(table, torch.tensor([row]))
    alone = light.decide({name: block[0] for name, block in request.items()}, budget)
    assert alone == table.configuration(first) == light.configuration(first)
    mask = np.random.default_rng(row).random((1, 12)) < share
    mask[0, row % 12] = True
    chosen = light.choose(request, limits[:1], mask)
    assert mask[0, chosen[0]]
    if mask[0, first]:
        assert chosen[0] == first


def test_mean_budgets_decide_at_their_worths_and_the_mix_where_they_fell_back() -> None:
    table = gappy()
    rows = torch.arange(90)
    budgets = torch.tensor([9.0, 12.0, 16.0])
    controller = driven_apart(table, PolicyConfig(hidden=8), sense="mean")
    settled = settled_for(table)
    mix = StaticMix.of_table(table, rows, budgets)
    settled.mean = {
        "budgets_ms": budgets.double().numpy(),
        "worths": np.array([15.0, 40.0, 90.0]),
        "deployed": np.array([True, False, True]),
        **{f"mix.{name}": values for name, values in mix.arrays().items()},
    }
    agent = DeployedController(controller, None, settled).eval()
    light = agent.decider
    x = controller.features(table.features, 90)
    some = torch.rand(table.mask.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    some[:, 0] = True
    for group, mask in itertools.product((0, 2), (None, some)):
        worth = torch.full((90,), settled.mean["worths"][group])
        with torch.no_grad():
            wanted = controller(x, worth.float(), mask).numpy()
        allowed = None if mask is None else mask.numpy()
        limits = np.full(90, float(budgets[group]))
        chosen = light.choose(arrays(table), limits, allowed)
        assert (wanted[np.arange(90), chosen] >= wanted.max(1) - ROUNDING).all()
        assert light.reads_features(limits).all()
        assert light.fall_back(limits[0]) is None
    assert_alone_as_many(light, arrays(table), np.tile([9.0, 16.0], 45))
    # the mix takes turns between its sides, one by one and together alike
    share = float(mix.share[1])
    assert 0.01 < share < 0.99
    sides = {int(mix.first[1]), int(mix.second[1])}
    many = light.choose(arrays(table), np.full(90, 12.0))
    assert set(many.tolist()) == sides
    assert (many == int(mix.second[1])).mean() == pytest.approx(share, abs=0.05)
    fresh = NumpyController(agent.arrays())
    assert one_by_one(fresh, arrays(table), np.full(90, 12.0)) == many.tolist()
    assert not light.reads_features(np.full(1, 12.0)).any()
    fallen = fresh.fall_back(12.0)
    assert fallen is not None
    assert fallen[0] in sides
    assert math.isnan(fallen[1])
    masked = light.choose(arrays(table), np.full(90, 12.0), some.numpy())
    assert some.numpy()[np.arange(90), masked].all()
    with pytest.raises(ValueError, match=r"a mean budget of 50: .*calibrated for 9, 12, 16 only"):
        light.choose(arrays(table), np.full(90, 50.0))
    request = {name: block[0] for name, block in arrays(table).items()}
    for budget in (9.0, 12.0):
        with pytest.raises(ValueError, match="for a controller under deadlines"):
            light.decide_index(request, budget, (0.1, 1.0))
        with pytest.raises(ValueError, match="expects no latency of single answers"):
            light.decide_expected(request, budget)
    with pytest.raises(ValueError, match="for a controller under deadlines"):
        light.choose(arrays(table), np.full(90, 9.0), None, (0.1, 1.0))


def test_more_requests_than_are_decided_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table, agent = guarded()
    light = agent.decider
    blocks = arrays(table)
    limits = np.linspace(5, 40, 90)
    mask = np.ones((90, 12), bool)
    together = light.choose(blocks, limits, mask).tolist()
    monkeypatch.setattr(policy, "AT_ONCE", 7)
    assert light.choose(blocks, limits, mask).tolist() == together
    assert light.choose(blocks, limits).tolist() == together
    nobody = torch.arange(0)
    assert light.choose(arrays(table, nobody), limits[:0]).shape == (0,)


def test_threads_share_a_controller_and_what_is_given_is_left_as_it_was() -> None:
    table, _ = guarded()
    light = untrained(table).decider
    linear = light._latency
    linear._columns = np.ones((12, 9), np.float32)  # so that what is expected depends on features
    blocks = arrays(table)
    copied = {name: block.copy() for name, block in blocks.items()}
    limits = np.linspace(5, 40, 90)

    def expected(number: int) -> list[Any]:
        decided = []
        for row in np.random.default_rng(number).permutation(90).tolist():
            request = {name: block[row] for name, block in blocks.items()}
            decided.append((row, light.decide_expected(request, limits[row])))
        return [each for _, each in sorted(decided)]

    alone = expected(0)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(expected, range(16)))
    finally:
        sys.setswitchinterval(before)
    assert all(result == alone for result in results)
    mask = np.ones((90, 12), bool)
    light.choose(blocks, limits, mask)
    for name, block in blocks.items():
        np.testing.assert_array_equal(block, copied[name])
    assert limits.tolist() == np.linspace(5, 40, 90).tolist()
    assert mask.all()


@pytest.mark.parametrize(
    ("factor", "added"),
    [(1.0, 0.0), (0.0, 7.0), (1.0, 1e4)],
    ids=["", "constant", "far from 0"],
)
def test_a_request_alone_may_have_gaps_and_be_far_out(factor: float, added: float) -> None:
    table = small_table(60)
    table.features["image_features"][:, 1].mul_(factor).add_(added)
    light = untrained(table).decider
    new = small_table(60, seed=1)
    for number, block in enumerate(new.features.values()):
        block[::3, number] = torch.nan
        block[1::3, number] = 1e6
        block[2::3, number] = -1e6
    new.features["image_features"][5] = torch.nan
    limits = np.full(60, 15.0)
    for each in (table, new):
        assert_alone_as_many(light, arrays(each), limits)
    blocks = arrays(new)
    doubles = {name: block.astype(np.float64) for name, block in blocks.items()}
    assert one_by_one(light, doubles, limits) == one_by_one(light, blocks, limits)


def test_a_fall_back_runs_no_network_and_expects_what_static_does() -> None:
    table = small_table(60)
    light = untrained(table, None, [1.0] * 5, [False] * 5).decider
    light._heads = None  # type: ignore[assignment]
    static = static_of(table, torch.arange(60))
    request = {name: block[0] for name, block in arrays(table).items()}
    for budget in budgets_of(table).tolist():
        index, log_latency, spread = light.decide_expected(request, budget)
        assert index == static.single(budget) == light.decide_index(request, budget)
        assert light.fall_back(budget) == (index, log_latency, spread)
        logs = table.latency_ms[:, index].double().log().numpy()
        assert (log_latency, spread) == pytest.approx((logs.mean(), logs.std()), rel=1e-5)
    assert not light.reads_features(budgets_of(table).numpy()).any()
    slower = light.decide_expected(request, 15.0, (math.log(2), 1.0))
    assert slower[0] == static.single(7.5)
    assert untrained(table, None, [1.0] * 5, [True] * 5).decider.fall_back(15.0) is None
    assert untrained(table).decider.fall_back(15.0) is None
    some = untrained(table, None, MARGINS, DEPLOY).decider
    budgets = budgets_of(table).double().numpy()
    falls_back = [some.fall_back(budget) is not None for budget in budgets.tolist()]
    assert 0 < sum(falls_back) < len(falls_back)
    assert some.reads_features(budgets).tolist() == np.logical_not(falls_back).tolist()


# -- a machine that is not as fast as the profile's ------------------------------------------------


def arrays_by_hand(**header: Any) -> dict[str, Array]:
    """Two configurations: the second has the logit silu(z) under a budget that is z doublings above
    20 ms, the first has 0. So the second is chosen above 20 ms. The one feature moves its expected
    latency."""
    about = {
        "format": FORMAT,
        "knobs": [["size", ["small", "large"]]],
        "features": {"x": 1},
        "clip": 5.0,
        "layers": 1,
        "heads": "knobs",
        "budget_width": 1,
        "drift_values": 0,
        "sharpness": 40.0,
        "datasets": [],
        "limit": "budget_ms",
        "guard": False,
        **header,
    }
    made: dict[str, Any] = {
        "configurations": np.array([[0], [1]]),
        "normaliser.mean": np.zeros(1, np.float32),
        "normaliser.scale": np.ones(1, np.float32),
        "normaliser.median": np.zeros(1, np.float32),
        "normaliser.unit": np.ones(1, np.float32),
        "normaliser.heavy": np.zeros(1, bool),
        "normaliser.has_missing": np.zeros(1, bool),
        "network.layers.0.weight": np.array([[0.0], [1.0]], np.float32),
        "network.layers.0.bias": np.array([[0.0]], np.float32),
        "network.layers.1.weight": np.array([[0.0, 1.0]], np.float32),
        "network.layers.1.bias": np.array([[0.0, 0.0]], np.float32),
        "network.encoding.mean": np.array(math.log(20)),
        "network.encoding.scale": np.array(math.log(2)),
        "network.encoding.frequencies": np.zeros(0),
        "latency.bias": np.array([2.0, 3.0], np.float32),
        "latency.spread": np.array([0.125, 0.25], np.float32),
        "latency.weight": np.array([[0.0, 0.5]], np.float32),
        "header": np.frombuffer(json.dumps(about).encode(), np.uint8),
    }
    return made


GUARDED = {
    "guard.budgets_ms": np.array([10.0, 40.0, 160.0]),
    "guard.margin": np.array([1.0, 0.5, 1.0]),
    "guard.deploy": np.array([True, True, False]),
    "static.latency_ms": np.array([10.0, 30.0]),
    "static.sorted_ms": np.array([[5.0, 20.0], [10.0, 90.0]]),
    "static.running": np.array([[0.0, 0.2, 0.4], [0.0, 0.1, 0.9]]),
}
X = {"x": np.array([2.0], np.float32)}
MANY = {"x": np.array([[2.0], [2.0]], np.float32)}


def test_drift_by_hand() -> None:
    light = NumpyController(arrays_by_hand())
    assert light.decide(X, 22.0) == {"size": "large"}
    assert light.decide_expected(X, 22.0) == (1, 4.0, 0.25)
    assert light.decide_expected(X, 18.0) == (0, 2.0, 0.125)
    # slower by 1.2 it is as if there were 18.3 ms; what is expected stays that of the profile
    assert light.decide_expected(X, 22.0, (math.log(1.2), 1.0)) == (0, 2.0, 0.125)
    assert light.decide_index(X, 18.0, (-math.log(1.2), 1.0)) == 1
    # of offsets by configuration the mean counts, and the spread does not
    assert light.decide_index(X, 22.0, (np.array([0.0, 2 * math.log(1.2)]), 1.0)) == 0
    assert light.decide_index(X, 22.0, (np.array([-1.0, 1.0]), 3.0)) == 1
    drift = np.array([0.3, -0.1]), 0.5
    chosen, mean, spread = light.choose_expected(MANY, np.array([22.0, 20.5]), None, drift)
    assert chosen.tolist() == [0, 0]  # 22·e^−0.1 = 19.9
    assert (mean.tolist(), spread.tolist()) == ([2.0, 2.0], [0.125, 0.125])
    assert light.expected_of(X, 1) == (1, 4.0, 0.25)
    # whatever the offset, budgets stay finite
    assert light.decide_index(X, 22.0, (-1e300, 1.0)) == 1
    assert light.decide_index(X, 22.0, (1e300, 1.0)) == 0


def test_margins_and_fall_backs_by_hand() -> None:
    """10 and 40 ms meet at 20 ms, 40 and 160 ms at 80 ms."""
    light = NumpyController(arrays_by_hand(guard=True) | GUARDED)
    # half of 39 ms is too little for the large one, half of 41 ms is enough
    assert [light.decide_index(X, budget) for budget in (19.0, 39.0, 41.0)] == [0, 0, 1]
    # above 80 ms static decides: ¼ of its budget would do for the policy
    assert light.fall_back(79.0) is None
    index, log_latency, spread = light.decide_expected(X, 81.0)
    assert index == 0  # 0.4, and 0.1 for the other
    assert log_latency == pytest.approx(math.log(10))
    assert spread == pytest.approx(math.log(2))
    assert light.decide_index(X, 90.0) == 1  # 0.9
    # a drift moves both, the guard's budgets and static's: 160/4 = 40, and 360/4 = 90
    assert light.decide_index(X, 160.0, (math.log(4), 1.0)) == 0
    assert light.decide_index(X, 170.0, (math.log(4), 1.0)) == 1
    assert light.fall_back(330.0, (math.log(4), 1.0)) == (index, log_latency, spread)
    assert light.decide_index(X, 361.0, (math.log(4), 1.0)) == 1
    limits = np.array([19.0, 39.0, 41.0, 81.0, 90.0])
    blocks = {"x": np.full((5, 1), 2.0)}
    chosen, mean, spreads = light.choose_expected(blocks, limits)
    assert chosen.tolist() == [0, 0, 1, 0, 1]
    assert mean.tolist() == pytest.approx([2, 2, 4, math.log(10), math.log(30)])
    assert spreads.tolist() == pytest.approx([0.125, 0.125, 0.25, math.log(2), math.log(3)])
    only = np.array([[False, True]] * 5)
    assert light.choose(blocks, limits, only).tolist() == [1] * 5
    assert light.reads_features(limits).tolist() == [True, True, True, False, False]


def test_the_configurations_that_lose_little_by_hand() -> None:
    light = NumpyController(arrays_by_hand(guard=True) | GUARDED)
    # at 40 ms half of it is planned with, where both are equal; at 79 ms the large one is at
    # silu(log₂ 1.975) = 0.7169 logits, or 0.01792 of utility, above the other
    logit = math.log2(1.975)
    worth = logit / (1 + math.exp(-logit)) / 40
    assert near_best(light, X, 40.0, 1e-9) == [0, 1]
    assert near_best(light, X, 79.0, 0.99 * worth) == [1]
    assert near_best(light, X, 79.0, 1.01 * worth) == [0, 1]
    assert near_best(light, X, 79.0, 0.0) == [1]
    assert near_best(light, X, 158.0, 0.99 * worth, (math.log(2), 1.0)) == [1]
    # without features by the mean utility of static: 0.4 and 0.1 at 81 ms
    assert near_best(light, None, 81.0, 0.29) == [0]
    assert near_best(light, None, 81.0, 0.31) == [0, 1]
    assert near_best(light, None, 324.0, 0.29, (math.log(4), 1.0)) == [0]
    assert light.expected_of(None, 1) == pytest.approx((1, math.log(30), math.log(3)))


def test_heads_that_know_the_drift_by_hand() -> None:
    """Beside the budget they read 1.5 times how much slower the second configuration is than the
    first, which counts as so many doublings less."""
    about = {
        "values": np.array([[-1.5, 1.5]]),
        "network.layers.0.weight": np.array([[0.0], [1.0], [-1.0]], np.float32),
    }
    light = NumpyController(arrays_by_hand(drift_values=1) | about)
    assert light.decide_index(X, 19.0) == 0
    faster = np.array([0.2, -0.2])
    slower = np.array([-0.2, 0.2])
    # 1.5·0.4 = 0.6: the second is chosen from 13.2 ms on, or from 30.3 ms
    for drift, least in ((faster, 20 / 2**0.6), (slower, 20 * 2**0.6)):
        for factor, chosen in ((0.99, 0), (1.01, 1)):
            assert light.decide_index(X, factor * least, (drift, 1.0)) == chosen
            limits = np.full(2, factor * least)
            assert light.choose(MANY, limits, None, (drift, 1.0)).tolist() == [chosen] * 2
            # what all have in common is taken off the budget, and nothing else
            more = drift + math.log(3), 1.0
            assert light.decide_expected(X, 3 * factor * least, more)[0] == chosen
            near = near_best(light, X, factor * least, 0.0, (drift, 1.0))
            assert near == [chosen]
    # a number is the same for all
    assert light.decide_index(X, 19.0, (-0.1, 1.0)) == 1
    assert light.decide_index(X, 19.0) == 0


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(["small", "gappy", "sparse", "no features"]),
    members=st.sampled_from([1, 2]),
)
def test_a_drift_is_read_as_by_the_torch_modules(seed: int, name: str, members: int) -> None:
    table = TABLES[name]()
    config = PolicyConfig(hidden=8, members=members, drift=0.3)
    agent = untrained(table, config)
    count = table.num_configurations
    generator = np.random.default_rng(seed)
    offset = generator.normal(0.1, 0.3, count).astype(np.float32)
    limits = generator.uniform(3, 60, 90)
    light = agent.decider
    x = agent.controller.features(table.features, 90)
    level = float(offset.mean())
    planned = torch.from_numpy(limits * math.exp(-level)).float()
    with torch.no_grad():
        every = torch.from_numpy(offset).expand(90, -1)
        wanted = agent.controller(x, planned, None, every).numpy()
        still = agent.controller(x, planned).numpy()
    drift = offset, 1.0
    log_probs = light.log_probs(arrays(table), limits, None, drift)
    np.testing.assert_allclose(log_probs, wanted, atol=ROUNDING, rtol=ROUNDING)
    assert np.abs(wanted - still).max() > 10 * ROUNDING
    chosen = light.choose(arrays(table), limits, None, drift)
    for row in range(0, 90, 9):
        request = {key: block[row] for key, block in arrays(table).items()}
        alone = light.decide_index(request, limits[row], drift)
        assert abs(log_probs[row, alone] - log_probs[row, chosen[row]]) < ROUNDING


@settings(max_examples=25, deadline=None)
@given(
    budget=st.floats(1.0, 100.0),
    offset=st.floats(-2.0, 2.0),
    row=st.integers(0, 89),
    loss=st.floats(0, 0.5),
)
def test_the_same_offset_everywhere_is_another_budget(
    budget: float,
    offset: float,
    row: int,
    loss: float,
) -> None:
    table, agent = guarded()
    light = agent.decider
    many = arrays(table, torch.tensor([row]))
    request = {name: block[0] for name, block in many.items()}
    moved = budget * math.exp(-offset)
    wanted = light.decide_expected(request, moved)
    near = near_best(light, request, moved, loss)
    for drift in ((offset, 1.0), (np.full(12, offset), 1.0)):
        assert light.decide_expected(request, budget, drift) == wanted
        chosen = light.choose_expected(many, np.full(1, budget), None, drift)
        assert [float(values[0]) for values in chosen] == pytest.approx(wanted)
        assert near_best(light, request, budget, loss, drift) == near


def test_a_wrong_drift_is_refused_in_words() -> None:
    table, agent = guarded()
    request = {name: block[0] for name, block in arrays(table).items()}
    spoilt = np.zeros(12)
    spoilt[3] = np.nan
    words = r"must be a finite offset, a number or \[12\], and a scale above 0"
    wrong = ((math.nan, 1.0), (0.0, 0.0), (0.0, math.inf), (np.zeros(3), 1.0), (spoilt, 1.0))
    for drift in wrong:
        with pytest.raises(ValueError, match=words):
            agent.decider.decide_index(request, 15.0, drift)
        with pytest.raises(ValueError, match=words):
            agent.decider.choose(arrays(table), np.full(90, 15.0), None, drift)


# -- the folder ------------------------------------------------------------------------------------


def test_it_imports_nothing_but_numpy_and_what_comes_with_python() -> None:
    for path in SOURCE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert not isinstance(node, ast.ImportFrom) or node.level < 2, path
            tops = {name.split(".")[0] for name in names}
            assert tops <= {"numpy", *sys.stdlib_module_names}, path


def test_a_copied_folder_and_a_file_are_enough(tmp_path: Path) -> None:
    table, agent = guarded()
    agent.export(tmp_path / "controller.npz")
    shutil.copytree(SOURCE, tmp_path / "policy", ignore=shutil.ignore_patterns("__pycache__"))
    np.savez(tmp_path / "requests.npz", **arrays(table))
    script = """
import json
import sys
for name in ("knobwise", "torch", "tensordict", "scipy", "sklearn"):
    sys.modules[name] = None  # whoever imports it fails
import numpy as np
from policy import NumpyController
light = NumpyController.load("controller.npz")
blocks = dict(np.load("requests.npz"))
first = light.decide({name: block[0] for name, block in blocks.items()}, 15.0)
print(json.dumps([light.choose(blocks, np.linspace(5, 40, 90)).tolist(), first, light.digest]))
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)
    chosen, first, digest = json.loads(done.stdout)
    light = agent.decider
    assert chosen == light.choose(arrays(table), np.linspace(5, 40, 90)).tolist()
    assert first == light.decide({name: block[0] for name, block in arrays(table).items()}, 15.0)
    assert digest == light.digest


# -- what it says, and what it refuses -------------------------------------------------------------


def test_what_it_says_of_itself() -> None:
    table = small_table(30)
    light = untrained(table).decider
    assert light.knobs == {"max_crops": (2, 6, 10), "top_k": (4, 8), "num_active_blocks": (12, 16)}
    assert light.configurations.tolist() == table.configurations.tolist()
    assert light.feature_sizes == {"image_features": 4, "language_features": 4}
    assert (light.datasets, light.guard, light.static, light.mean) == ([], None, None, None)
    for c in range(12):
        assert light.configuration(c) == table.configuration(c)
    light.configuration(0)["top_k"] = 99
    assert light.configuration(0)["top_k"] == 4


def test_wrong_features_budgets_and_masks_are_refused_in_words() -> None:
    table = small_table(30)
    light = untrained(table).decider
    many = arrays(table, torch.arange(1))
    block = {name: values[0] for name, values in many.items()}
    image = {"image_features": block["image_features"]}
    narrow = {**block, "image_features": np.zeros(3)}
    columns = {name: values[:, None] for name, values in block.items()}
    for message, features in (
        (r"'language_features' must have shape \(4,\), got nothing", image),
        (r"'image_features' must have shape \(4,\), got \(3,\)", narrow),
        (r"'image_features' must have shape \(4,\), got \(4, 1\)", columns),
    ):
        with pytest.raises(ValueError, match=f"block {message}"):
            light.decide(features, 10.0)
    for budget in (0.0, -1.0, math.nan, math.inf, 1e300):
        with pytest.raises(ValueError, match="must be positive and finite"):
            light.decide(block, budget)
        with pytest.raises(ValueError, match="must be positive and finite"):
            light.choose(many, np.array([budget]))
    least = int(light.choose(many, np.array([1e-300]))[0])
    assert light.decide(block, 1e-300) == light.configuration(least)
    for message, *wrong in (
        (r"budgets must have shape \('n',\), got \(\)", np.array(10.0)),
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
    made = arrays_by_hand()
    np.savez(tmp_path / "earlier.npz", **arrays_by_hand(format="knobwise.NumpyController/2"))
    made.pop("network.layers.1.weight")
    np.savez(tmp_path / "incomplete.npz", **made)
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match=path.name):
            NumpyController.load(path)
    with pytest.raises(ValueError, match=r"earlier\.npz: not an exported controller"):
        NumpyController.load(tmp_path / "earlier.npz")
    with pytest.raises(FileNotFoundError):
        NumpyController.load(tmp_path / "nothing.npz")


def spoilt(array: Array) -> Array:
    """The array with one NaN."""
    place = np.arange(array.size).reshape(array.shape)
    return np.where(place == array.size // 2, np.nan, array)


MUTATIONS: dict[str, Callable[[Array], Array]] = {
    "half": lambda array: array[: len(array) // 2],
    "turned": lambda array: array[::-1],
    "NaN": spoilt,
    "flat": lambda array: array.reshape(-1),
    "one more": lambda array: np.concatenate([array, array[-1:]]),
    "another type": lambda array: array.astype(np.float16 if array.dtype.kind == "f" else np.int8),
}


def loaded(path: Path) -> tuple[NumpyController | None, str]:
    """The controller in a file, or why it is refused."""
    try:
        return NumpyController.load(path), ""
    except ValueError as error:
        return None, str(error)


@pytest.mark.parametrize("digest", [True, False])
def test_damaged_arrays_are_refused_on_loading_or_without_a_digest_decide(
    tmp_path: Path,
    digest: bool,
) -> None:
    table, agent = guarded()
    whole = agent.arrays()
    assert bytes(whole["digest"]) == digest_of(whole)
    path = tmp_path / "c.npz"
    if not digest:
        whole.pop("digest")
    np.savez(path, **whole)
    limits = np.full(90, 15.0)
    assert NumpyController.load(path).choose(arrays(table), limits).shape == (90,)
    refused = 0
    for name, mutation in itertools.product(sorted(set(whole) - {"digest"}), MUTATIONS):
        array = whole[name]
        mutated = MUTATIONS[mutation](array) if array.ndim and array.size else array
        alike = (mutated.dtype, mutated.shape) == (array.dtype, array.shape)
        if alike and mutated.tobytes() == array.tobytes():
            continue
        np.savez(path, **{**whole, name: mutated})
        controller, message = loaded(path)
        assert re.fullmatch(rf"({re.escape(str(path))}: .*)?", message)
        assert message or not digest, (name, mutation)
        if controller is not None:
            assert controller.choose(arrays(table), limits).max() < 12
        refused += bool(message)
    assert refused > (100 if digest else 30)


def test_a_file_that_is_cut_anywhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    guarded()[1].export(path)
    content = path.read_bytes()
    for length in range(0, len(content), max(1, len(content) // 300)):
        path.write_bytes(content[:length])
        controller, message = loaded(path)
        assert controller is None
        assert message.startswith(f"{path}: ")
    with pytest.raises(FileNotFoundError):
        NumpyController.load(tmp_path / "none.npz")


def test_a_flipped_bit_in_a_file_is_noticed(tmp_path: Path) -> None:
    agent = untrained(gappy(), PolicyConfig(hidden=64), MARGINS, DEPLOY)
    light = agent.decider
    path = tmp_path / "c.npz"
    assert agent.export(path).digest == light.digest
    whole = path.read_bytes()
    draw = random.Random(0)
    refused = 0
    for place in draw.sample(range(len(whole)), 150):
        flipped = bytes([whole[place] ^ 1 << draw.randrange(8)])
        path.write_bytes(whole[:place] + flipped + whole[place + 1 :])
        controller, _ = loaded(path)
        # where nobody reads, nothing changes
        assert controller is None or controller.digest == light.digest
        refused += controller is None
    assert refused > 130
