"""What a run deploys: the last network in NumPy, with the margin and the fall-back of each
budget."""

import functools

import numpy as np
import pytest
import torch
from helpers import arrays, deployed, driven_apart, equal_states, small_table, table_of
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.policy.controller import NumpyController
from knobwise.agents.stack.deployed import DeployedController
from knobwise.envs.configurations.budgets import default_budgets

CHOICES = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]).repeat(20, 1)
TIMES = torch.tensor([[3.0, 5.0, 9.0], [5.0, 3.0, 9.0]]).repeat(20, 1)
TABLES = {
    "complete": lambda: small_table(60),
    "holes": lambda: small_table(60, holes=0.6),
    "one knob": lambda: table_of(CHOICES, TIMES, torch.randn(40, 2)),
    "no features": lambda: small_table(60, holes=0.3, features=False),
    "29 samples": lambda: small_table(29, holes=0.2),
}


@functools.cache
def trained(name):
    """Trained, with a guard that lets the policy decide at every other budget."""
    table = TABLES[name]()
    agent = deployed(table)
    for number, row in enumerate(agent.settled.guard):
        row["deployed"] = number % 2 == 0
        row["margin"] = 1 - 0.1 * number
    return table, agent


def mixed_limits(table):
    """A calibrated budget for each sample, in turns, and a little beside it."""
    budgets = default_budgets(table).double().numpy()
    n = table.num_samples
    return budgets[np.arange(n) % len(budgets)] * np.linspace(0.99, 1.01, n)


@pytest.mark.parametrize("name", TABLES)
def test_it_decides_as_the_network_under_its_guard(name):
    table, agent = trained(name)
    limits = mixed_limits(table)
    n = table.num_samples
    x = agent.controller.features(table.features, n)
    static = agent.decider.static
    assert static is not None
    rows = agent.settled.guard
    group = np.arange(n) % len(rows)
    margins = np.array([row["margin"] for row in rows])[group]
    decides = np.array([row["deployed"] for row in rows])[group]
    with torch.no_grad():
        planned = torch.from_numpy(limits * margins).float()
        log_probs = agent.controller(x, planned, table.mask).numpy()
    mask = table.mask.numpy()
    wanted = np.where(decides, log_probs.argmax(1), static.choose({}, limits, mask))
    chosen = agent.choose(arrays(table), limits, mask)
    assert chosen.tolist() == wanted.tolist()
    np.testing.assert_allclose(
        agent.decider.log_probs(arrays(table), limits, mask), log_probs, atol=1e-4
    )
    assert agent.reads_features(limits).tolist() == decides.tolist()
    assert not decides.all()


@pytest.mark.parametrize("name", TABLES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**20), low=st.floats(0.1, 1.0))
def test_it_never_leaves_the_mask(name, seed, low):
    table, agent = trained(name)
    generator = np.random.default_rng(seed)
    n, c = table.mask.shape
    mask = generator.random((n, c)) < 0.3
    mask[np.arange(n), generator.integers(c, size=n)] = True
    request = arrays(table), low + 60 * generator.random(n), mask
    chosen = agent.choose(*request)
    assert chosen.dtype == np.int64
    assert mask[np.arange(n), chosen].all()
    assert (chosen == agent.choose(*request)).all()


@pytest.mark.parametrize("name", TABLES)
def test_a_loaded_and_an_exported_one_decide_like_the_saved_one(name, tmp_path):
    table, agent = trained(name)
    save_checkpoint(tmp_path / "c.pt", agent, table, {})
    loaded = load_checkpoint(tmp_path / "c.pt").controller
    assert agent.teacher is not None
    assert loaded.teacher is not None
    assert equal_states(loaded.controller, agent.controller)
    assert equal_states(loaded.teacher, agent.teacher)
    assert loaded.teacher.held_out_worth == agent.teacher.held_out_worth
    assert loaded.settled.guard == agent.settled.guard
    written = agent.export(tmp_path / "controller.npz")
    exported = NumpyController.load(tmp_path / "controller.npz")
    assert written.digest == exported.digest == loaded.decider.digest
    limits = mixed_limits(table)
    for mask in (None, table.mask.numpy()):
        wanted = agent.choose(arrays(table), limits, mask).tolist()
        for other in (loaded, exported):
            assert other.choose(arrays(table), limits, mask).tolist() == wanted


def test_only_the_network_of_all_samples_is_exported():
    table = small_table(40)
    controller = driven_apart(table, PolicyConfig(hidden=8, members=3))
    content = DeployedController(controller).arrays()
    weights = controller.network.layers[0].weight
    assert weights.shape[0] == 4
    np.testing.assert_array_equal(content["network.layers.0.weight"], weights[3].detach())
    alone = DeployedController(driven_apart(table, PolicyConfig(hidden=8))).arrays()
    shapes = {
        name: array.shape for name, array in content.items() if name not in ("header", "digest")
    }
    assert shapes == {name: array.shape for name, array in alone.items() if name in shapes}


def test_the_guard_may_be_left_out_and_heads_alone_have_no_teacher():
    table = small_table(40)
    agent = deployed(table, PolicyConfig(hidden=8))
    assert agent.teacher is agent.plain()["teacher"] is None
    assert len(agent.settled.guard) == len(default_budgets(table))
    unguarded = deployed(table, PolicyConfig(hidden=8, guard=False))
    assert unguarded.settled.guard == []
    assert unguarded.decider.static is unguarded.decider.guard is None
    assert unguarded.reads_features(mixed_limits(table)).all()
