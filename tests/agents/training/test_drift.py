"""Drift in training: machines on which some knob values are slower than in the profile."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import TAUGHT, arrays, controller_trainer, repeated, small_table

from knobwise.agents.controller.networks import drift_inputs, drift_values
from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.agents.training import imitation
from knobwise.agents.training.settle import deployed_by, latency_of
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.configurations.drift import COPIES, drawn_drift, drifted_copies
from knobwise.losses.settings import LossConfig

GRID = small_table(12).configurations
DRIFTING = replace(TAUGHT, experts=(), drift=0.4)


def generator():
    return torch.Generator().manual_seed(0)


def test_half_of_the_machines_are_as_profiled_and_offsets_have_no_level():
    offsets = drawn_drift(GRID, 0.4, (2000,), generator())
    assert offsets is not None
    assert offsets.shape == (2000, 12)
    torch.testing.assert_close(offsets.mean(1), torch.zeros(2000), atol=1e-6, rtol=0)
    still = (offsets == 0).all(1)
    assert float(still.double().mean()) == pytest.approx(0.5, abs=0.04)
    drifted = offsets[~still]
    # what a configuration is off by is the sum over its knobs: without interactions
    effect = drifted.reshape(-1, 3, 2, 2)
    mixed = effect[:, :, 1, 1] - effect[:, :, 1, 0] - effect[:, :, 0, 1] + effect[:, :, 0, 0]
    torch.testing.assert_close(mixed, torch.zeros_like(mixed), atol=1e-5, rtol=0)
    # of sizes that differ from machine to machine, the largest near the one asked for
    spread = drifted.std(1)
    assert spread.quantile(0.95) > 5 * spread.quantile(0.05)
    assert 0.05 < float(spread.mean()) < 0.4
    assert drawn_drift(GRID, 0.0, (3,), generator()) is None


@pytest.mark.parametrize("several", [False, True])
def test_copies_are_the_samples_on_other_machines(several):
    table = small_table(30, holes=0.2)
    table = repeated(table) if several else table
    drifted, offset = drifted_copies(table, 0.4, seed=0)
    assert offset is not None
    assert drifted.num_samples == len(offset) == 30 * (1 + COPIES)
    assert drifted.features == {}
    assert len(set(drifted.sample_ids)) == drifted.num_samples
    for k in range(1 + COPIES):
        rows = torch.arange(30) + 30 * k
        factors = offset[rows].exp()
        assert (factors == 1).all() == (k == 0)
        torch.testing.assert_close(drifted.accuracy[rows], table.accuracy, equal_nan=True)
        wanted = table.latency_ms * factors
        torch.testing.assert_close(drifted.latency_ms[rows], wanted, equal_nan=True)
        measured = table.measurements_ms * factors.unsqueeze(-1)
        torch.testing.assert_close(drifted.measurements_ms[rows], measured, equal_nan=True)
        assert torch.equal(drifted.mask[rows], table.mask)
    same, nothing = drifted_copies(table, 0.0, seed=0)
    assert same is table
    assert nothing is None


def test_what_heads_are_told_of_it_by_hand():
    # three values of one knob, and another that never varies
    configurations = torch.tensor([[0, 0], [1, 0], [2, 0], [0, 0]])
    values = drift_values(configurations, 0.3)
    offset = torch.tensor([0.4, 0.0, -0.4, 0.8])  # mean .2
    wanted = torch.tensor([0.6 - 0.2, 0.0 - 0.2, -0.4 - 0.2])
    torch.testing.assert_close(values @ offset, wanted)
    assert drift_values(configurations, 0.0).shape == (0, 4)
    assert drift_values(torch.arange(65).unsqueeze(1), 0.3).shape == (0, 65)


def trainer(table, sense="deadline"):
    loss = LossConfig(objective="sampled", group_size=3)
    return controller_trainer(table, DRIFTING, sense, loss=loss)


def test_grpo_learns_on_copies_of_its_own_samples_and_is_told_their_drift():
    table = small_table(60, holes=0.2)
    student = trainer(table)
    n = table.num_samples
    learn, batches = student._learn, []

    def learned(data):
        if data is not None:
            batches.append(data.clone())
        return learn(data)

    student._learn = learned
    student.run()
    rows = torch.cat([batch["row"] for batch in batches])
    for network, fitted in enumerate(student.network_rows):
        seen = rows[:, network]
        assert set((seen % n).tolist()) == set(fitted.tolist())
        assert float((seen < n).double().mean()) == pytest.approx(0.5, abs=0.1)
    # the latencies that it is rewarded for are those of the copy
    last = batches[-1]
    offset = drifted_copies(table, student.drift, student.seed)[1]
    row, chosen = last["row"].unsqueeze(-1), last["configuration"]
    taken = table.latency_ms[row % n, chosen] * offset[row, chosen].exp()
    in_time = taken <= last["budget_ms"].unsqueeze(-1)
    missed = torch.tensor(-0.2)
    wanted = torch.where(in_time, table.accuracy[row % n, chosen], missed)
    torch.testing.assert_close(last["next", "reward"], wanted)
    # and what draws reads how much slower knob values are there
    contexts = last.select("row", "budget_ms")
    log_probs = student.actor.get_dist(contexts).log_probs
    network = student.agent.controller.network
    sample = last["row"].T % n
    x = student.all_features[sample]
    limits, mask = last["budget_ms"].T, table.mask[sample]
    drift = drift_inputs(offset[last["row"].T], network.values)
    told = network(x, limits, mask, drift).transpose(0, 1)
    torch.testing.assert_close(log_probs, told)


def test_heads_imitate_what_the_teacher_makes_of_a_drift(monkeypatch):
    table = small_table(60)
    student = trainer(table)
    drawn = []
    monkeypatch.setattr(
        imitation,
        "drawn_drift",
        lambda *settings: drawn.append(drawn_drift(*settings)) or drawn[-1],
    )
    student.run()
    lessons, teacher = student.lessons, student.taught_by.teacher
    names = "x", "limit", "worth", "by_value"
    x, limits, worths, told = (lessons[name][-1, :40] for name in names)
    x = x[:, 0]
    offsets = drawn[-1][:40]
    torch.testing.assert_close(told, drift_inputs(offsets, student.agent.controller.network.values))
    with torch.no_grad():
        still = teacher.mixture(x)
        wanted = []
        for place in range(limits.shape[1]):
            log_latency = still.members.log_latency + offsets[:, place]
            moved = still.members._replace(log_latency=log_latency)
            wanted.append(still._replace(members=moved).score(limits[:, place]))
    # but where nothing is likely to be on time
    hopeful = worths.amax(-1) > 0.02
    hopeful &= worths.amin(-1) >= 0
    torch.testing.assert_close(worths[hopeful], torch.stack(wanted, 1)[hopeful])
    assert student._draw_lessons(9)["by_value"].shape == (3, 9, told.shape[-1])


def test_what_is_judged_and_deployed_does_not_drift():
    table = small_table(60)
    student = trainer(table)
    student.run()
    limit = default_budgets(table)[2]
    assert int(student.held_out.max()) < table.num_samples
    # a drift of the first knob's last value changes what is chosen, away from it
    agent = deployed_by(student, student.limits)
    limits = np.full(60, float(limit))
    request = arrays(table), limits, None
    plain = agent.decider.log_probs(*request)
    still = agent.decider.log_probs(*request, (np.zeros(12), 1.0))
    np.testing.assert_allclose(still, plain, atol=1e-5)
    offset = np.where(GRID[:, 0].numpy() == 2, 0.5, -0.25)
    moved = agent.decider.log_probs(*request, (offset, 1.0))
    assert np.abs(np.exp(moved) - np.exp(plain)).max() > 1e-3
    guard = agent.decider.guard
    under = limits * np.exp(-offset.mean()) * guard.margin[guard.groups(limits)]
    network = agent.controller
    x = network.normaliser(table.features, 60)
    with torch.no_grad():
        told = torch.tensor(offset).float().expand(60, -1)
        by_hand = network(x, torch.tensor(under).float(), None, told)
    np.testing.assert_allclose(moved, by_hand, atol=1e-3)


def test_under_a_mean_budget_nothing_drifts():
    student = trainer(small_table(40), "mean")
    assert student.drift == 0
    assert student.drifted is student.table


@pytest.mark.parametrize("features", [False, True])
def test_answers_as_in_the_profile_show_no_drift(features):
    """Measurements are skewed: on average they take longer, in logarithm too, than their median."""
    table = small_table(80, features=features)
    stalls = 1 + torch.empty(80, 12, 7).exponential_(4, generator=generator())
    skewed = table.latency_ms.unsqueeze(-1) * stalls
    table = replace(table, latency_ms=skewed.median(-1).values, repeats_ms=skewed)
    rows = torch.arange(80)
    normaliser = FeatureNormaliser.fit(table, rows)
    latency = latency_of(table, rows, normaliser)
    x = normaliser(table.features, 80).numpy()
    logs = np.log(skewed.double().numpy())
    expected = np.tile(latency["bias"], (80, 1))
    if features:
        expected += x @ latency["weight"]
    residuals = logs - expected[..., None]
    assert np.abs(residuals.mean((0, 2))).max() < 1e-3
    np.testing.assert_allclose(latency["spread"], residuals.std((0, 2)), rtol=1e-3)
    assert np.log(np.median(skewed, -1)).mean() < logs.mean() - 0.01
