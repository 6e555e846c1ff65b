"""Drift in training: machines on which some knob values are slower than in the profile."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import (
    WITH_TEACHER,
    arrays,
    batches_of,
    close,
    repeated,
    rows_of_networks,
    small_table,
    trainer_on,
)

from knobwise.agents.calibration.calibrate import calibrate_controller
from knobwise.agents.calibration.latencies import fit_latency_model
from knobwise.agents.controller.drift import drift_inputs, drift_values
from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.teacher import distillation
from knobwise.envs.bandit.budgets import default_budgets
from knobwise.envs.tables.drift import COPIES, copies_of, drawn_drift
from knobwise.losses.settings import LossConfig

GRID = small_table(12).configurations
DRIFTING = replace(WITH_TEACHER, experts=(), drift=0.4)


def generator():
    return torch.Generator().manual_seed(0)


def test_half_of_the_machines_are_as_profiled_and_offsets_have_no_level():
    offsets = drawn_drift(GRID, 0.4, (2000,), generator())
    assert offsets.shape == (2000, 12)
    close(offsets.mean(1), torch.zeros(2000), within=1e-6)
    still = (offsets == 0).all(1)
    assert float(still.double().mean()) == pytest.approx(0.5, abs=0.04)
    drifted = offsets[~still]
    # what a configuration is off by is the sum over its knobs: without interactions
    mixed = drifted.reshape(-1, 3, 2, 2).diff(dim=2).diff(dim=3)
    close(mixed, torch.zeros_like(mixed), within=1e-5)
    # of sizes that differ from machine to machine, the largest near the one asked for
    spread = drifted.std(1)
    assert spread.quantile(0.95) > 5 * spread.quantile(0.05)
    assert 0.05 < float(spread.mean()) < 0.4
    assert drawn_drift(GRID, 0.0, (3,), generator()) is None


@pytest.mark.parametrize("several", [False, True])
def test_copies_are_the_samples_on_other_machines(several):
    table = small_table(30, holes=0.2)
    table = repeated(table) if several else table
    drifted, cells, offset = copies_of(table, 0.4, seed=0)
    assert cells is drifted
    assert drifted.num_samples == len(offset) == 30 * (1 + COPIES)
    assert drifted.features == {}
    assert len(set(drifted.sample_ids)) == drifted.num_samples
    for k, factors in enumerate(offset.exp().split(30)):
        rows = torch.arange(30) + 30 * k
        assert (factors == 1).all() == (k == 0)
        close(drifted.accuracy[rows], table.accuracy)
        close(drifted.latency_ms[rows], table.latency_ms * factors)
        close(drifted.measurements_ms[rows], table.measurements_ms * factors.unsqueeze(-1))
        assert torch.equal(drifted.mask[rows], table.mask)
    assert copies_of(table, 0.0, seed=0) == (table, table, None)


def test_what_heads_are_told_of_it_by_hand():
    # three values of one knob, and another that never varies
    configurations = torch.tensor([[0, 0], [1, 0], [2, 0], [0, 0]])
    values = drift_values(configurations, 0.3)
    offset = torch.tensor([0.4, 0.0, -0.4, 0.8])  # mean .2
    close(values @ offset, [0.6 - 0.2, 0.0 - 0.2, -0.4 - 0.2])
    assert drift_values(configurations, 0.0).shape == (0, 4)
    assert drift_values(torch.arange(65).unsqueeze(1), 0.3).shape == (0, 65)


def trainer(table, constraint="deadline"):
    loss = LossConfig(objective="sampled", group_size=3)
    return trainer_on(table, DRIFTING, constraint, loss=loss)


def test_grpo_learns_on_copies_of_its_own_samples_and_is_told_their_drift():
    table = small_table(60, holes=0.2)
    student = trainer(table)
    batches = batches_of(student)
    rows = torch.cat([batch["row"] for batch in batches]).T
    for seen, fitted in zip(rows, rows_of_networks(student.setup), strict=True):
        assert set((seen % 60).tolist()) == set(fitted.tolist())
        assert float((seen < 60).double().mean()) == pytest.approx(0.5, abs=0.1)
    # the latencies that it is rewarded for are those of the copy
    last = batches[-1]
    row, limits, chosen = last["row"], last["budget_ms"], last["configuration"]
    offset = copies_of(table, student.setup.drift, student.seed).offsets[row]
    cell = row.unsqueeze(-1) % 60, chosen
    on_time = table.latency_ms[cell] * offset.gather(-1, chosen).exp() <= limits.unsqueeze(-1)
    close(last["next", "reward"], torch.where(on_time, table.accuracy[cell], -0.2))
    # and what draws reads how much slower knob values are there
    network = student.setup.controller.network
    sample = row.T % 60
    drift = drift_inputs(offset.transpose(0, 1), network.values)
    log_probs = network(
        student.setup.rows.all_features[sample], limits.T, table.mask[sample], drift
    )
    contexts = last.select("row", "budget_ms")
    close(student.setup.actor.get_dist(contexts).log_probs, log_probs.transpose(0, 1))


def test_heads_imitate_what_the_teacher_makes_of_a_drift(monkeypatch):
    table = small_table(60)
    student = trainer(table)
    drawn = []

    def noted(*settings):
        drawn.append(drawn_drift(*settings))
        return drawn[-1]

    monkeypatch.setattr(distillation, "drawn_drift", noted)
    student.run()
    names = "x", "limit", "utility", "by_value"
    x, limits, utility, told = (student.setup.distiller.targets[name][-1, :40] for name in names)
    offsets = drawn[-1][:40]
    close(told, drift_inputs(offsets, student.setup.controller.network.values))
    with torch.no_grad():
        still = student.setup.distiller.fitted.teacher.mixture(x[:, 0])
        wanted = []
        for limit, offset in zip(limits.T, offsets.unbind(1), strict=True):
            moved = still.members._replace(log_latency=still.members.log_latency + offset)
            wanted.append(still._replace(members=moved).score(limit))
    # but where nothing is likely to be on time
    hopeful = (utility.amax(-1) > 0.02) & (utility.amin(-1) >= 0)
    close(utility[hopeful], torch.stack(wanted, 1)[hopeful])
    drawn = next(student.stages[-2].minibatches(student.buffer))
    assert drawn["by_value"].shape == (3, 32, told.shape[-1])


def test_what_is_judged_does_not_drift_and_what_is_deployed_reads_a_drift():
    table = small_table(60)
    student = trainer(table)
    student.run()
    assert int(student.setup.held_out.by_network.max()) < 60
    # a drift of the first knob's last value changes what is chosen, away from it
    decider = calibrate_controller(student.setup, student.setup.limits).decider
    limits = np.full(60, float(default_budgets(table)[2]))
    offset = np.where(GRID[:, 0].numpy() == 2, 0.5, -0.25)
    plain, still, moved = (
        decider.log_probs(arrays(table), limits, None, drift)
        for drift in (None, (np.zeros(12), 1.0), (offset, 1.0))
    )
    np.testing.assert_allclose(still, plain, atol=1e-5)
    assert np.abs(np.exp(moved) - np.exp(plain)).max() > 1e-3


def test_under_a_mean_budget_nothing_drifts():
    student = trainer(small_table(40), "mean")
    assert student.setup.drift == 0
    assert student.setup.copied is student.table


@pytest.mark.parametrize("features", [False, True])
def test_answers_as_in_the_profile_show_no_drift(features):
    """Measurements are skewed: on average they take longer, in logarithm too, than their median."""
    table = small_table(80, features=features)
    stalls = 1 + torch.empty(80, 12, 7).exponential_(4, generator=generator())
    skewed = table.latency_ms.unsqueeze(-1) * stalls
    median = skewed.median(-1).values
    table = replace(table, latency_ms=median, repeats_ms=skewed)
    rows = torch.arange(80)
    normaliser = FeatureNormaliser.fit(table, rows)
    latency = fit_latency_model(table, rows, normaliser)
    residuals = skewed.double().log().numpy() - latency["bias"][:, None]
    if features:
        x = normaliser(table.features, 80).numpy()
        residuals -= (x @ latency["weight"])[..., None]
    assert np.abs(residuals.mean((0, 2))).max() < 1e-3
    np.testing.assert_allclose(latency["spread"], residuals.std((0, 2)), rtol=1e-3)
    assert median.log().mean() < skewed.log().mean() - 0.01
