"""What a run deploys: the last network in NumPy, with the fall-back of each budget."""

import copy

import numpy as np
import pytest
import torch
from helpers import arrays, deployed, equal_states, input_error, small_table
from replayed import untrained

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.deployed.controller import NumpyController
from knobwise.agents.training.checkpoint import load_checkpoint, save_checkpoint
from knobwise.envs.bandit.budgets import default_budgets


@pytest.mark.parametrize("table", [small_table(29, holes=0.2), small_table(60, features=False)])
def test_a_loaded_and_an_exported_one_decide_like_the_saved_one(table, tmp_path):
    agent = deployed(table)
    save_checkpoint(tmp_path / "c.pt", agent, table, {})
    loaded = load_checkpoint(tmp_path / "c.pt").controller
    assert equal_states(loaded.controller, agent.controller)
    assert equal_states(loaded.teacher, agent.teacher)
    assert loaded.calibration.guard == agent.calibration.guard
    written = agent.export(tmp_path / "c.npz")
    exported = NumpyController.load(tmp_path / "c.npz")
    assert written.digest == exported.digest == loaded.decider.digest == agent.decider.digest


def test_the_guard_may_be_left_out_and_heads_alone_have_no_teacher():
    table = small_table(40)
    agent = deployed(table, PolicyConfig(hidden=8))
    assert agent.teacher is agent.plain()["teacher"] is None
    assert len(agent.calibration.guard) == len(default_budgets(table))
    unguarded = deployed(table, PolicyConfig(hidden=8, guard=False))
    assert unguarded.calibration.guard == []
    assert unguarded.decider.static is unguarded.decider.guard is None
    assert unguarded.reads_features(np.ones(2)).all()


def test_features_of_another_profile_are_a_mistake_of_the_user():
    # without a teacher, which would refuse them first
    agent = deployed(small_table(40), PolicyConfig(hidden=8))
    features = {"language_features": np.zeros((2, 4), np.float32)}
    with input_error("image_features"):
        agent.choose(features, np.ones(2))


def test_it_decides_by_the_weights_of_the_moment():
    """After a step of an optimiser, in a copy, and without a word about modes."""
    table = small_table(40)
    agent = untrained(table)
    request = arrays(table), np.full(40, 12.0)
    before = agent.choose(*request)
    first = agent.decider
    assert agent.decider is first
    copied = copy.deepcopy(agent)
    optimiser = torch.optim.AdamW(copied.parameters(), lr=0.3)
    for _ in range(3):
        log_probs = copied.controller(
            copied.controller.normaliser(table.features, 40), torch.full((40,), 12.0)
        )
        optimiser.zero_grad()
        log_probs[:, 5].mean().neg().backward()
        optimiser.step()
    assert (copied.choose(*request) == 5).all()
    assert (agent.choose(*request) == before).all()
    assert (before != 5).any()
    assert agent.decider is first
