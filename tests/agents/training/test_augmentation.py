"""Data augmentation: copies of samples with noise on their features, which training alone sees."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import same, stopped_and_resumed
from helpers import (
    BRIEF,
    WITH_TEACHER,
    arrays,
    batches_of,
    close,
    equal_states,
    gappy_table,
    input_error,
    rows_of_networks,
    small_table,
    trainer_on,
)

from knobwise.agents import PolicyConfig, load_checkpoint
from knobwise.agents.calibration.calibrate import calibrate_controller
from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.envs.bandit.settings import BalanceConfig
from knobwise.envs.tables.drift import COPIES
from knobwise.losses.settings import LossConfig

ALONE = PolicyConfig(hidden=8, dropout=0.0, augment=0.2)
"""Three independent heads that learn from rewards alone, on copies with noise."""
WAYS = {
    "alone": ALONE,
    "folds": replace(ALONE, fold_networks=2),
    "taught": replace(WITH_TEACHER, augment=0.2),
    "drifting": replace(WITH_TEACHER, experts=(), drift=0.4, augment=0.2),
    "projected": replace(ALONE, project=4),
}
SAMPLED = LossConfig(objective="sampled", group_size=3)


def trainer(name="alone", samples=60, constraint="deadline", **settings):
    settings = {"loss": SAMPLED} | settings
    return trainer_on(small_table(samples), WAYS[name], constraint, **settings)


def inputs_of(student):
    """The module that looks the features of rows up."""
    return student.setup.actor.module[0].module


def test_noise_has_its_size_where_a_feature_varies_and_is_0_elsewhere():
    table = gappy_table()
    table.features["image_features"][:, 0] = 7.0  # never varies
    normaliser = FeatureNormaliser.fit(table, torch.arange(90))
    noise = normaliser.noise(0.3, 20_000, torch.Generator().manual_seed(0))
    values = sum(normaliser.sizes.values())
    assert noise.shape == (20_000, normaliser.width)
    assert normaliser.width == values + 1  # one column says where a value is missing
    close(noise[:, [0, values]], torch.zeros(20_000, 2))
    close(noise[:, 1:values].std(0), torch.full((values - 1,), 0.3), within=0.01)
    close(noise.mean(0), torch.zeros(normaliser.width), within=0.01)


@pytest.mark.parametrize("constraint", ["deadline", "mean"])
@pytest.mark.parametrize("name", WAYS)
def test_half_of_what_is_learned_from_has_noise_and_stays_on_its_side_of_the_split(
    name, constraint
):
    student = trainer(name, constraint=constraint)
    rows = torch.cat([batch["row"] for batch in batches_of(student)]).T
    for seen, fitted in zip(rows, rows_of_networks(student.setup), strict=True):
        assert set((seen % 60).tolist()) <= set(fitted.tolist())
        assert float((seen < 60).double().mean()) == pytest.approx(0.5, abs=0.12)
    # every copy has noise of its own, of the size asked for; the samples have none
    inputs = inputs_of(student)
    every = torch.arange(60 * (1 + COPIES))
    close(inputs.features_of(every[:60]), student.setup.rows.all_features)
    off = inputs.features_of(every[60:]) - student.setup.rows.all_features.repeat(COPIES, 1)
    assert float(off.std()) == pytest.approx(0.2, rel=0.1)
    assert len(off.unique(dim=0)) == len(off)
    # accuracy and, without drift, latency of a copy are those of its sample
    copied = student.setup.copied
    assert copied.num_samples == len(every)
    close(copied.accuracy, student.table.accuracy.repeat(1 + COPIES, 1))
    if not student.setup.drift:
        close(copied.latency_ms, student.table.latency_ms.repeat(1 + COPIES, 1))


@pytest.mark.parametrize("name", WAYS)
def test_the_ratio_is_1_at_the_first_step(name):
    student = trainer(name)
    (first, *_) = batches_of(trainer(name, optimiser=replace(BRIEF, iterations=1)))
    student = trainer(name, optimiser=replace(BRIEF, pretrain_iterations=0, teacher_iterations=0))
    student.policy.stage = student.stages[-1]
    next(iter(student.collector))
    data = student.buffer[:]
    assert (data["row"] >= 60).any()
    new = student.setup.actor.get_dist(data).log_prob_of_index(data["configuration"])
    assert torch.equal(new, data["action_log_prob"])
    loss = student.stages[-1].grpo(data)
    assert float(loss["ratio_mean"]) == pytest.approx(1.0, abs=1e-6)
    assert first["row"].shape == data["row"].shape


def test_validation_and_decisions_see_the_samples_as_they_are():
    student = trainer("taught")
    student.run()
    assert int(student.setup.held_out.by_network.max()) < 60
    limit = student.setup.limits[2]
    log_probs = student.setup.held_out_log_probs(limit)
    last = student.setup.controller
    network, place = student.setup.held_out.positions[1], student.setup.held_out.rows
    for number in range(2):
        rows = place[network == number]
        x = last.normaliser.of_rows(student.table, rows).expand(3, -1, -1)
        with torch.no_grad():
            wanted = last.network(x, limit.expand(3, len(rows)), None)[number]
        close(log_probs[network == number], wanted)
    # what is deployed has forgotten the noise: equal requests, equal decisions
    decider = calibrate_controller(student.setup, student.setup.limits).decider
    limits = np.full(60, float(limit))
    first, second = (decider.log_probs(arrays(student.table), limits) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert not [name for name in student.agent.state_dict() if "noise" in name]


def test_the_teacher_and_its_targets_see_noise_too():
    plain = trainer_on(small_table(60), replace(WAYS["taught"], augment=0.0))
    noisy = trainer("taught")
    for student in (plain, noisy):
        student.run()
    # every other request has noise; the draws before it are the same
    off = noisy.setup.distiller.targets["x"][0, :, 0] - plain.setup.distiller.targets["x"][0, :, 0]
    assert float(off[::2].std()) == pytest.approx(0.2, rel=0.15)
    close(off[1::2], torch.zeros_like(off[1::2]))
    # the teacher's regression reads features with noise beside the outcomes of the sample
    rows = torch.arange(60, 80).unsqueeze(1).expand(-1, 3)
    regression = noisy.stages[0]
    drawn = next(regression.minibatches(noisy.buffer))
    batch = drawn[:20].set("row", rows)
    seen = []
    network = noisy.setup.distiller.teacher.network
    hook = network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    regression.loss(batch)
    hook.remove()
    close(seen[0], inputs_of(noisy).features_of(rows.T[:2]))
    assert not torch.equal(seen[0][0], noisy.setup.rows.all_features[:20])


@pytest.mark.parametrize("objective", ["sampled", "exact", "ppo"])
def test_a_stopped_training_ends_bit_for_bit_as_without_the_stop(objective, tmp_path):
    loss = LossConfig(objective=objective)
    optimiser = replace(BRIEF, iterations=12)

    def make(folder):
        return trainer("folds", folder=folder, loss=loss, optimiser=optimiser)

    whole, again = stopped_and_resumed(make, tmp_path, 14)
    assert equal_states(whole.agent, again.agent)
    parts = (load_checkpoint(tmp_path / name / "last.pt") for name in ("whole", "stopped"))
    assert same(*(part.extra["training"] for part in parts))
    # another size is another training
    other = trainer_on(
        small_table(60), replace(WAYS["folds"], augment=0.1), loss=loss, optimiser=optimiser
    )
    with input_error("last.pt"):
        other.resume(tmp_path / "whole/last.pt")


def test_copies_are_balanced_as_their_samples():
    names = ("rare",) * 6 + ("common",) * 54
    table = small_table(60, datasets=names)
    student = trainer_on(table, ALONE, loss=SAMPLED, balance=BalanceConfig("dataset"))
    rows = torch.cat([batch["row"] for batch in batches_of(student)])
    assert float((rows % 60 < 6).double().mean()) == pytest.approx(0.5, abs=0.1)
    assert float((rows < 60).double().mean()) == pytest.approx(0.5, abs=0.1)


def test_a_value_network_sees_the_noise_of_its_policy():
    student = trainer("folds", loss=LossConfig(objective="ppo"))
    rows = torch.arange(60, 63)
    critic = student.setup.critic.module
    close(critic.features_of(rows), inputs_of(student).features_of(rows))


def test_without_features_there_is_nothing_to_augment():
    student = trainer_on(small_table(60, features=False), ALONE, loss=SAMPLED)
    assert student.setup.augment == 0
    assert student.setup.copied is student.table
    plain = trainer_on(small_table(60, features=False), replace(ALONE, augment=0.0), loss=SAMPLED)
    assert equal_states(student.run(), plain.run())


@pytest.mark.parametrize("size", [-0.1, float("inf"), float("nan")])
def test_a_size_that_is_none_is_refused(size):
    with input_error("policy.augment"):
        PolicyConfig(augment=size)
