"""What a controller learns from the log of its requests."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import arrays
from replayed import logged_outcomes, logging_model, serve_requests, small_stack

from knobwise.agents.learning import adaptation, doubts
from knobwise.agents.learning import update as update_module
from knobwise.agents.learning.logged import Logged, logged_of, read_log
from knobwise.agents.learning.off_policy import decisions
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


def learned(agent):
    """The offsets of ln ms that a controller has learned."""
    return agent.teacher.latency_offset.numpy()


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
    assert learned(result.agent)[used] == pytest.approx(np.log(true)[used], abs=0.25)
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
    logits = update_module.learn(agent, logged)["accuracies"].teacher.accuracy_logits.numpy()
    used = np.bincount(logged.choice, minlength=12) > 20
    fell = np.arange(12) >= 8
    assert (used & fell).any()
    assert (logits[used & fell] < -1).all()
    assert (logits[used & ~fell] > -1).all()


def test_a_stream_without_drift_changes_next_to_nothing(tmp_path):
    agent, table, logged = logged_requests(tmp_path, drifts=False, tracker=True)
    result = update(agent, logged)
    assert abs(learned(result.agent)).max() < 0.3
    if result.better:
        assert utility(result.agent, table) > utility(agent, table) - 0.005


def test_without_labels_latencies_alone_are_learned_and_judged_by_times(tmp_path):
    agent, table, logged = logged_requests(tmp_path, count=1400, label=False)
    few = update(agent, logged[:60])
    assert list(few.steps) == ["latencies"]
    assert few.steps["latencies"].requests == 60
    assert not few.better
    result = update(agent, logged)
    assert list(result.steps) == [*result.doubts] == ["latencies"]
    assert result.better
    true = [slow_crops(table.configuration(c)) for c in range(12)]
    there = replace(table, latency_ms=table.latency_ms * torch.tensor(true))
    assert utility(result.agent, there) > utility(agent, there) + 0.03


def test_no_label_talks_the_latencies_into_anything(tmp_path):
    agent, _, logged = logged_requests(tmp_path, drifts=False)
    steps = []
    for labels in (logged.accuracy, torch.full_like(logged.accuracy, torch.nan)):
        logged.accuracy = labels
        steps.append(update(agent, logged).steps["latencies"])
    assert steps[0] == steps[1]


# -- what speaks against a log ---------------------------------------------------------------------


def always_right(folder):
    """A log in which the smallest configuration is said to be always right."""
    agent, table, logged = logged_requests(folder, 1400, drifts=False)
    logged.accuracy[logged.choice == 0] = 1.0
    return agent, table, logged


def test_labels_that_contradict_the_profile_are_named_and_wait_to_be_accepted(tmp_path):
    agent, table, logged = always_right(tmp_path)
    result = update(agent, logged)
    assert result.steps["accuracies"].better
    assert not result.better
    assert result.loss == 0
    doubts = " ".join(result.doubts["accuracies"])
    labels = logged.accuracy[logged.choice == 0]
    assert str(table.configuration(0)) in doubts
    assert f"{len(labels)} labels" in doubts
    assert "1.00" in doubts
    accepted = update(agent, logged, accept=True)
    assert accepted.better
    assert accepted.doubts == result.doubts
    # a harm indeed
    assert utility(accepted.agent, table) < utility(agent, table) - 0.02


def test_losses_add_up_until_somebody_accepts_an_update(tmp_path, monkeypatch):
    agent, _, logged = always_right(tmp_path)

    def allow(loss):
        for module in (doubts, update_module):
            monkeypatch.setattr(module, "MOST_LOSS", loss)

    allow(1.0)
    first = update(agent, logged)
    assert first.better
    assert first.loss > 0.01
    # as much again is no more allowed
    allow(1.5 * first.loss)
    assert update(agent, logged).better
    assert not update(agent, logged, loss=first.loss).better
    accepted = update(agent, logged, accept=True, loss=first.loss)
    assert (accepted.better, accepted.loss) == (True, 0.0)
    # by what labels have taught, the new choices are better; by the profile they are not
    assert first.agent.teacher.accuracy_logits.any()
    chosen = [decisions(each.decider, logged) for each in (agent, first.agent)]
    lost = [update_module._loss(each, logged, *chosen) for each in (agent, first.agent)]
    assert lost[0] > 0.01
    assert lost[1] == pytest.approx(lost[0], abs=0.02)


def labelled(choice, accuracy, propensity):
    """Requests of which only choices, labels and chances matter."""
    return logged_outcomes(choice, [propensity] * len(choice), accuracy)


NAMES = [{"size": value} for value in "abcd"]


def test_the_reasons_by_hand():
    choice = torch.arange(4).repeat_interleave(20)
    right = torch.ones(80).double()
    expected = torch.full((80,), 0.5).double()
    own = labelled(choice, right, [0.7, 0.1, 0.1, 0.1])
    assert doubts.doubted_labels(NAMES, own, expected, 0.004) == []
    # 20 right answers where 10 are expected: z = 10/√5
    loses, *named = doubts.doubted_labels(NAMES, own, expected, 0.02)
    assert "2.0 points" in loses
    assert len(named) == 4
    assert all("20 labels" in line and "0.50" in line for line in named)
    # 12 of them are no more than chance
    chance = (torch.arange(80) % 20 < 12).double()
    assert (
        len(doubts.doubted_labels(NAMES, labelled(choice, chance, [1.0, 0, 0, 0]), expected, 0.02))
        == 1
    )
    # two configurations only
    (few,) = doubts.doubted_labels(NAMES, own[:40], expected[:40], 0.0)
    assert "2 configurations" in few
    # only what was explored
    (explored,) = doubts.doubted_labels(NAMES, own[20:], expected[20:], 0.0)
    assert "chose itself" in explored


def test_times_of_a_configuration_that_contradict_those_of_the_others_are_named():
    grid = torch.cartesian_prod(torch.arange(2), torch.arange(2))
    choice = torch.arange(4).repeat(30)
    noise = 0.05 * torch.randn(120, generator=torch.Generator().manual_seed(0)).double()
    # a drift that follows a knob is none
    ratios = noise + 0.8 * grid[choice, 0]
    assert doubts.doubted_times(NAMES, grid, choice, ratios) == []
    ratios[choice == 3] -= 2.3
    lines = doubts.doubted_times(NAMES, grid, choice, ratios)
    assert any("{'size': 'd'}, 30 answers" in line for line in lines)
    # a configuration that is alone is not compared
    alone = choice == 3
    assert doubts.doubted_times(NAMES, grid, choice[alone], ratios[alone]) == []


def test_a_gain_that_has_passed_waits_to_be_accepted(tmp_path):
    agent, _, logged = logged_requests(tmp_path, 2800)
    _, _, normal = logged_requests(tmp_path / "later", 2800, drifts=False)
    passed = Logged.cat([logged, normal])
    result = update(agent, passed)
    if result.steps["latencies"].better:
        assert any("later half" in doubt for doubt in result.doubts["latencies"])
    assert not result.better


def test_too_few_requests_are_refused(tmp_path):
    agent, _, logged = logged_requests(tmp_path, count=6)
    with pytest.raises(InputError, match="too few"):
        update(agent, logged)
