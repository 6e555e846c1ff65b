"""What a controller learns from the log of its requests."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import arrays
from replayed import logging_model, serve_requests, small_stack

from knobwise.agents.learning import adaptation
from knobwise.agents.learning import update as update_module
from knobwise.agents.learning.logged import logged_of, read_log
from knobwise.agents.learning.update import update
from knobwise.agents.stack.deployed import DeployedController
from knobwise.common.errors import InputError


@pytest.fixture(autouse=True)
def little_work(monkeypatch):
    monkeypatch.setattr(update_module, "FOLDS", 2)
    monkeypatch.setattr(adaptation, "STEPS", 60)


def slow_crops(values):
    """A drift that no level or single number describes: two of three crops are slower."""
    return 1.0 if values["max_crops"] == 2 else 1.8


def logged_requests(folder, count=700, drifts=True, label=True, tracker=False):
    agent, table = small_stack(300)
    slower = slow_crops if drifts else (lambda values: 1.0)
    options = {"explore": 0.3, "explore_loss": 0.3, "seed": 0, "tracker": tracker}
    model = logging_model(folder, agent, table, slower, **options)
    serve_requests(model, table, count, label)
    return agent, table, logged_of(read_log(folder).rows, agent.decider)


def utility(controller, table):
    """The mean utility of all samples under three budgets."""
    rows = torch.arange(table.num_samples)
    worths = []
    for budget in (8.0, 12.0, 18.0):
        chosen = controller.choose(arrays(table), np.full(len(rows), budget))
        worths.append(table.accuracy[rows, chosen] * (table.latency_ms[rows, chosen] <= budget))
    return torch.stack(worths).mean().item()


def test_latencies_that_drifted_are_learned_and_the_new_controller_takes_over(
    tmp_path,
):
    agent, table, logged = logged_requests(tmp_path, 2800)
    before = agent.decider.digest
    result = update(agent, logged)
    true = np.array([slow_crops(table.configuration(c)) for c in range(12)])
    used = np.bincount(logged.choice, minlength=12) > 30
    assert np.log(result.factors)[used] == pytest.approx(np.log(true)[used], abs=0.25)
    assert list(result.steps) == ["latencies", "accuracies"]
    assert result.better
    assert result.steps["latencies"].better
    there = replace(table, latency_ms=table.latency_ms * torch.from_numpy(true).float())
    assert utility(result.agent, there) > utility(agent, there) + 0.03
    # the old one is as it was
    assert DeployedController.restored(agent.plain()).decider.digest == before
    assert result.agent.decider.digest != before


def test_accuracies_that_fell_are_learned(tmp_path):
    agent, _, logged = logged_requests(tmp_path, drifts=False)
    logged.accuracy[logged.choice >= 8] = 0.0
    logits = np.array(update(agent, logged).logits)
    used = np.bincount(logged.choice, minlength=12) > 20
    fell = np.arange(12) >= 8
    assert (used & fell).any()
    assert (logits[used & fell] < -1).all()
    assert (logits[used & ~fell] > -1).all()


def test_a_stream_without_drift_changes_next_to_nothing(tmp_path):
    agent, table, logged = logged_requests(tmp_path, drifts=False, tracker=True)
    result = update(agent, logged)
    assert abs(np.log(result.factors)).max() < 0.3
    if result.better:
        assert utility(result.agent, table) > utility(agent, table) - 0.005


def test_without_labels_only_latencies_are_learned_and_nothing_takes_over(tmp_path):
    agent, _, logged = logged_requests(tmp_path, count=120, label=False)
    result = update(agent, logged)
    assert list(result.steps) == ["latencies"]
    assert not result.better
    assert result.steps["latencies"].requests == 0
    assert result.steps["latencies"].plain()["bound"] is None


def test_too_few_requests_are_refused(tmp_path):
    agent, _, logged = logged_requests(tmp_path, count=6)
    with pytest.raises(InputError, match="too few"):
        update(agent, logged)
