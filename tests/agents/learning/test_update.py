"""What a controller learns from the log of its requests."""

import functools
import math
import tempfile
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import arrays, input_error, small_table
from replayed import (
    Clock,
    logged_outcomes,
    logging_model,
    serve_requests,
    small_stack,
    timed_by,
    untrained,
)

from knobwise.agents import DeployedController
from knobwise.agents.learning import acceptance, adaptation
from knobwise.agents.learning import update as update_module
from knobwise.agents.learning.logged import Logged, logged_of, read_log
from knobwise.agents.learning.off_policy import decisions, estimate_gain
from knobwise.agents.learning.update import update
from knobwise.common.words import setting
from knobwise.envs import default_budgets
from knobwise.serving.runtime import Runtime


@pytest.fixture(autouse=True)
def little_work(monkeypatch):
    monkeypatch.setattr(adaptation, "STEPS", 60)


def slow_crops(values):
    """A drift that no level or single number describes: two of three crops are slower."""
    return 1.0 if values["max_crops"] == 2 else 1.8


def no_drift(values):
    return 1.0


@functools.cache
def served_requests(count, slower, label, tracker):
    agent, table = small_stack(300)
    options = {"explore": 0.3, "explore_loss": 0.3, "seed": 0, "tracker": tracker}
    with tempfile.TemporaryDirectory() as folder:
        model = logging_model(folder, agent, table, slower, **options)
        serve_requests(model, table, count, label)
        return agent, table, logged_of(read_log(folder).rows, agent.decider)


def logged_requests(count=700, slower=no_drift, label=True, tracker=False):
    agent, table, logged = served_requests(count, slower, label, tracker)
    return agent, table, logged.clone()


def drifted(table):
    """The table on the machine of `slow_crops`."""
    factors = torch.tensor([slow_crops(table.configuration(c)) for c in range(12)])
    return replace(table, latency_ms=table.latency_ms * factors), factors.log().numpy()


def learned(agent):
    """The offsets of ln ms that a controller has learned."""
    return agent.teacher.latency_offset.numpy()


def utility(controller, table):
    """The mean utility of all samples under three budgets."""
    rows = torch.arange(table.num_samples)
    utility = 0.0
    for budget in (8.0, 12.0, 18.0):
        chosen = controller.choose(arrays(table), np.full(len(rows), budget))
        met = table.latency_ms[rows, chosen] <= budget
        utility += float((table.accuracy[rows, chosen] * met).mean()) / 3
    return utility


def test_latencies_that_drifted_are_learned_and_the_new_controller_takes_over():
    agent, table, logged = logged_requests(2800, slow_crops)
    before = agent.decider.digest
    result = update(agent, logged)
    there, offsets = drifted(table)
    used = np.bincount(logged.choice, minlength=12) > 30
    assert learned(result.agent)[used] == pytest.approx(offsets[used], abs=0.25)
    assert list(result.steps) == ["latencies", "accuracies"]
    assert result.better
    assert result.steps["latencies"].better
    assert utility(result.agent, there) > utility(agent, there) + 0.03
    # the old one is as it was
    assert DeployedController.restored(agent.plain()).decider.digest == before
    assert result.agent.decider.digest != before


def test_a_version_whose_choices_often_got_no_answer_waits_for_a_person():
    agent, _, logged = logged_requests(2800, slow_crops)
    best, candidates = update_module._held_out(agent, logged)
    moved = best != candidates["latencies"].choices
    names = update_module.configurations_of(agent.decider)
    attempts = {setting(knobs): Counter({False: 90}) for knobs in names}
    for c in candidates["latencies"].choices[moved].unique().tolist():
        attempts[setting(names[c])] = Counter({False: 50, True: 50})
    waits = update(agent, logged, attempts=attempts)
    assert not waits.better
    assert any("no answer" in line for line in waits.objections["latencies"])
    assert update(agent, logged, accept=True, attempts=attempts).better


def test_accuracies_that_fell_are_learned():
    agent, _, logged = logged_requests()
    logged.accuracy[logged.choice >= 8] = 0.0
    logits = update_module.learn(agent, logged)["accuracies"].teacher.accuracy_logits.numpy()
    used = np.bincount(logged.choice, minlength=12) > 20
    fell = np.arange(12) >= 8
    assert (used & fell).any()
    assert (logits[used & fell] < -1).all()
    assert (logits[used & ~fell] > -1).all()


def test_a_stream_without_drift_changes_next_to_nothing():
    agent, table, logged = logged_requests(tracker=True)
    result = update(agent, logged)
    assert abs(learned(result.agent)).max() < 0.3
    if result.better:
        assert utility(result.agent, table) > utility(agent, table) - 0.005


def test_without_labels_latencies_alone_are_learned_and_judged_by_times():
    agent, table, logged = logged_requests(1400, slow_crops, label=False)
    few = update(agent, logged[:60])
    assert list(few.steps) == ["latencies"]
    assert few.steps["latencies"].requests == 60
    assert not few.better
    result = update(agent, logged)
    assert list(result.steps) == [*result.objections] == ["latencies"]
    assert result.better
    there, _ = drifted(table)
    assert utility(result.agent, there) > utility(agent, there) + 0.03


@pytest.mark.parametrize("falls_back", [False, True])
def test_times_that_were_learned_are_not_learned_again_from_the_same_log(falls_back):
    agent, table = small_stack(200, falls_back)
    with tempfile.TemporaryDirectory() as folder:
        model = logging_model(folder, agent, table, lambda values: 2.0, tracker=False)
        serve_requests(model, table, 300, label=False)
        logged = logged_of(read_log(folder).rows, agent.decider)
    assert bool(logged.seen.all()) != falls_back
    once = update_module.learn(agent, logged)["latencies"]
    assert learned(once) == pytest.approx(np.full(12, np.log(2)), abs=0.2)
    # the next update reads these requests too, as those of an earlier version
    twice = update_module.learn(once, logged)["latencies"]
    assert learned(twice) == pytest.approx(learned(once), abs=0.1)


def test_no_label_talks_the_latencies_into_anything():
    agent, _, logged = logged_requests()
    steps = []
    for labels in (logged.accuracy, torch.full_like(logged.accuracy, torch.nan)):
        logged.accuracy = labels
        steps.append(update(agent, logged).steps["latencies"])
    assert steps[0] == steps[1]


# -- what speaks against a log ---------------------------------------------------------------------


def test_losses_add_up_until_somebody_accepts_an_update(monkeypatch):
    agent, _, logged = logged_requests(1400)
    logged.accuracy[logged.choice == 0] = 1.0

    def allow(loss):
        for module in (acceptance, update_module):
            monkeypatch.setattr(module, "MAX_LOSS", loss)

    allow(1.0)
    first = update(agent, logged)
    assert first.better
    assert first.loss > 0.01
    # as much again is no more allowed
    allow(1.5 * first.loss)
    assert update(agent, logged).better
    waiting = update(agent, logged, loss=first.loss)
    assert waiting.steps["accuracies"].better
    assert (waiting.better, waiting.loss) == (False, first.loss)
    accepted = update(agent, logged, accept=True, loss=first.loss)
    assert (accepted.better, accepted.loss) == (True, 0.0)
    # by what labels have taught, the new choices are better; by the profile they are not
    assert first.agent.teacher.accuracy_logits.any()
    chosen = [decisions(each.decider, logged) for each in (agent, first.agent)]
    lost = [update_module._loss(each, logged, *chosen) for each in (agent, first.agent)]
    assert lost[0] > 0.01
    assert lost[1] == pytest.approx(lost[0], abs=0.02)


NAMES = [{"size": value} for value in "abcd"]


def test_the_reasons_by_hand():
    choice = torch.arange(4).repeat_interleave(20)
    right = torch.ones(80).double()
    expected = torch.full((80,), 0.5).double()
    own = logged_outcomes(choice, [[0.7, 0.1, 0.1, 0.1]] * 80, right)
    assert acceptance.objections_to_labels(NAMES, own, expected, 0.004) == []
    # 20 right answers where 10 are expected: z = 10/√5
    loses, *named = acceptance.objections_to_labels(NAMES, own, expected, 0.02)
    assert "2.0 points" in loses
    assert len(named) == 4
    assert all("20 labels" in line and "0.50" in line for line in named)
    # 12 of them are no more than chance
    chance = logged_outcomes(choice, own.propensity.tolist(), torch.arange(80) % 20 < 12)
    assert len(acceptance.objections_to_labels(NAMES, chance, expected, 0.02)) == 1
    # two configurations only
    (few,) = acceptance.objections_to_labels(NAMES, own[:40], expected[:40], 0.0)
    assert "2 configurations" in few
    # only what was explored
    (explored,) = acceptance.objections_to_labels(NAMES, own[20:], expected[20:], 0.0)
    assert "only 0" in explored


def test_times_of_a_configuration_that_contradict_those_of_the_others_are_named():
    grid = torch.cartesian_prod(torch.arange(2), torch.arange(2))
    choice = torch.arange(4).repeat(30)
    noise = 0.05 * torch.randn(120).double()
    # a drift that follows a knob is none
    ratios = noise + 0.8 * grid[choice, 0]
    assert acceptance.objections_to_times(NAMES, grid, choice, ratios) == []
    ratios[choice == 3] -= 2.3
    lines = acceptance.objections_to_times(NAMES, grid, choice, ratios)
    assert any("{'size': 'd'}" in line and " 30 " in line for line in lines)
    # a configuration that is alone is not compared
    alone = choice == 3
    assert acceptance.objections_to_times(NAMES, grid, choice[alone], ratios[alone]) == []


def test_a_gain_that_has_passed_waits_to_be_accepted():
    agent, _, logged = logged_requests(2800, slow_crops)
    _, _, normal = logged_requests(2800)
    passed = Logged.cat([logged, normal])
    result = update(agent, passed)
    if result.steps["latencies"].better:
        assert any("later half" in objection for objection in result.objections["latencies"])
    assert not result.better


def test_answers_that_nobody_waited_for_count_as_late():
    """The slower half of the settings takes half as long again, and whoever is not answered at its
    deadline leaves. In the log alone every answer is on time."""
    agent, table = small_stack(300)
    slow = table.latency_ms.nanmean(0).argsort()[-6:]
    factors = torch.ones(12).index_fill(0, slow, 1.5)
    random = np.random.default_rng(0)
    budgets = default_budgets(table).tolist()
    with tempfile.TemporaryDirectory() as folder:
        options = {"log": folder, "explore": 0.3, "seed": 0, "tracker": False}
        runtime = timed_by(Clock(1e-9), Runtime(agent, **options))
        for row in random.integers(300, size=900).tolist():
            features = {name: block[row].numpy() for name, block in table.features.items()}
            decision = runtime.decide(runtime.begin(random.choice(budgets)), features)
            noise = math.exp(0.4 * random.standard_normal())
            took_ms = float(table.latency_ms[row, decision.choice] * factors[decision.choice])
            late = took_ms * noise > decision.limit_ms
            runtime.now.go_on(min(took_ms * noise, decision.limit_ms) / 1e3)
            if late:
                runtime.give_up(decision)
            else:
                result = runtime.finish(decision)
                right = float(table.accuracy[row, decision.choice])
                runtime.log.label(result.request_id, right)
        logged = logged_of(read_log(folder).rows, agent.decider)
    assert 200 < logged.abandoned.sum() < 450
    assert not logged.met[logged.abandoned].any()
    assert logged.met[~logged.abandoned].all()
    # what is learned: who answered in time was quick, by two ways of counting the others
    after, only = (
        learned(update_module.learn(agent, part)[update_module.LATENCIES])
        for part in (logged, logged[~logged.abandoned])
    )
    truth = factors.log().numpy()
    assert np.abs(after - truth).mean() < 0.6 * np.abs(only - truth).mean()
    # and what is judged: the controller that is sure of slow settings is the worse one
    quick = update_module.adapt_latency(
        agent,
        adaptation.Offsets(-0.3 * torch.ones(12).double(), torch.zeros(12).double(), None),
        update_module._features(agent, logged),
    )
    old, new = (decisions(each.decider, logged) for each in (agent, quick))
    expected = update_module._expected_utility(agent, logged)
    counted = update_module._with_abandoned(logged)
    gain, without = (
        estimate_gain(each[each.labelled], *(v[each.labelled] for v in (expected, old, new))).gain
        for each in (counted, logged)
    )
    assert gain < without - 0.01


def test_late_answers_are_as_often_labelled_as_others_by_hand():
    logged = logged_outcomes([0] * 10, [[1.0]] * 10, [1, math.nan, math.nan, 0] + [math.nan] * 6)
    logged.abandoned[4:] = True
    # two of the four that were answered, so three of six
    counted = update_module._with_abandoned(logged)
    assert counted.labelled.tolist() == [True, False, False, True, *[False, True] * 3]
    assert counted.accuracy[4:].nansum() == 0
    logged.accuracy[:4] = math.nan
    assert not update_module._with_abandoned(logged).labelled.any()


def test_times_that_are_only_known_to_be_longer_are_estimated():
    """Of a normal distribution around 0.3 that is cut off at 0.2."""
    normal = torch.distributions.Normal(0.3, 0.4)
    ratios = normal.icdf((torch.arange(2000).double() + 0.5) / 2000)
    logged = logged_outcomes([0] * 2000, [[1.0]] * 2000, [math.nan] * 2000)
    logged.abandoned[:] = ratios > 0.2
    least = ratios.clamp_max(0.2)
    assert least.mean() < 0.1
    now = least
    for _ in range(60):
        now = update_module._waited_for(least, logged, now.mean().expand(2000), now)
    assert (now[~logged.abandoned] == least[~logged.abandoned]).all()
    assert now[logged.abandoned].min() > 0.2
    assert now.mean() == pytest.approx(0.3, abs=0.08)
    # one step by hand: of a standard normal the upper half has the mean √(2/π)
    (step,) = update_module._waited_for(
        torch.zeros(1).double(), logged[-1:], torch.zeros(1).double(), torch.ones(1).double()
    )
    assert float(step) == pytest.approx(math.sqrt(2 / math.pi))


def test_an_update_asks_the_guard_as_serving_did(tmp_path):
    """Static decides at a budget near what features leave of the next larger one."""
    table = small_table(300)
    agent = untrained(table, deploy=(0, 0, 0, 0, 1))
    *_, small, budget = default_budgets(table).tolist()
    runtime = timed_by(Clock(1e-9), Runtime(agent, log=tmp_path, tracker=False))
    for row in range(40):
        features = {name: block[row].numpy() for name, block in table.features.items()}
        request = runtime.begin(budget)
        assert request.needs_features
        # until the smaller budget is the nearer one
        runtime.now.go_on((budget - small) / 1e3)
        decision = runtime.decide(request, features)
        runtime.now.go_on(0.001)
        runtime.finish(decision)
    rows = read_log(tmp_path, agent.decider).rows
    logged = logged_of(rows, agent.decider)
    assert decisions(agent.decider, logged).tolist() == [row["best"] for row in rows]
    assert all(row["guard_ms"] == pytest.approx(budget, abs=0.01) for row in rows)
    # a log that does not say what was left is taken as if nothing had waited
    for row in rows:
        del row["guard_ms"]
    assert logged_of(rows, agent.decider).guard_ms.tolist() == [row["budget_ms"] for row in rows]


def test_too_few_requests_are_refused():
    agent, _, logged = logged_requests(6)
    with input_error("too few"):
        update(agent, logged)
