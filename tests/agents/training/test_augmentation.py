"""Data augmentation: noise on the features, drawn anew wherever a network drops out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import same, stopped_and_resumed
from helpers import (
    BRIEF,
    WITH_TEACHER,
    arrays,
    close,
    equal_states,
    gappy_table,
    input_error,
    small_table,
    trainer_on,
)

from knobwise.agents import PolicyConfig, load_checkpoint
from knobwise.agents.calibration.calibrate import calibrate_controller
from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.controller.settings import FEW, MANY, MANY_FEATURES, regularised
from knobwise.losses import dropping_out
from knobwise.losses.settings import LossConfig

ALONE = PolicyConfig(hidden=8, dropout=0.0, augment=0.2)
"""Three independent heads that learn from rewards alone, on features with noise."""
WAYS = {
    "alone": ALONE,
    "folds": replace(ALONE, fold_networks=2),
    "taught": replace(WITH_TEACHER, augment=0.2),
    "drifting": replace(WITH_TEACHER, experts=(), drift=0.4, augment=0.2),
    "projected": replace(ALONE, project=4),
}
SAMPLED = LossConfig(objective="sampled", group_size=3)
COLD = replace(BRIEF, pretrain_iterations=0, teacher_iterations=0)


def trainer(name="alone", samples=60, constraint="deadline", **settings):
    settings = {"loss": SAMPLED} | settings
    return trainer_on(small_table(samples), WAYS[name], constraint, **settings)


def inputs_of(student):
    """The module that looks the features of rows up."""
    return student.setup.actor.module[0].module


def collected(student):
    """What the last stage of a training that has not begun draws first."""
    student.policy.stage = student.stages[-1]
    next(iter(student.collector))
    return student.buffer[:]


def test_noise_has_its_size_where_a_feature_varies_and_is_0_elsewhere():
    table = gappy_table()
    table.features["image_features"][:, 0] = 7.0  # never varies
    normaliser = FeatureNormaliser.fit(table, torch.arange(90))
    x = torch.zeros(2, 10_000, normaliser.width)
    noise = normaliser.noise_like(x, 0.3, torch.Generator().manual_seed(0)).flatten(0, 1)
    values = sum(normaliser.sizes.values())
    assert normaliser.width == values + 1  # one column says where a value is missing
    close(noise[:, [0, values]], torch.zeros(20_000, 2))
    close(noise[:, 1:values].std(0), torch.full((values - 1,), 0.3), within=0.01)
    close(noise.mean(0), torch.zeros(normaliser.width), within=0.01)


@pytest.mark.parametrize("constraint", ["deadline", "mean"])
@pytest.mark.parametrize("name", WAYS)
def test_a_loss_that_drops_out_sees_other_noise_each_time_and_nothing_else_does(name, constraint):
    student = trainer(name, constraint=constraint)
    inputs = inputs_of(student)
    count = student.setup.copied.num_samples
    rows = torch.arange(count)
    plain = student.setup.rows.all_features.repeat(count // 60, 1)
    close(inputs.features_of(rows), plain)
    with dropping_out():
        first, second = inputs.features_of(rows) - plain, inputs.features_of(rows) - plain
    assert float(first.std()) == pytest.approx(0.2, rel=0.1)
    assert not torch.equal(first, second)
    close(inputs.features_of(rows), plain)


@pytest.mark.parametrize("name", WAYS)
def test_without_dropout_in_its_loss_the_ratio_is_1_at_the_first_step(name):
    loss = replace(SAMPLED, dropout=False)
    student = trainer(name, optimiser=COLD, loss=loss)
    data = collected(student)
    new = student.setup.actor.get_dist(data).log_prob_of_index(data["configuration"])
    assert torch.equal(new, data["action_log_prob"])
    with dropping_out(student.stages[-1].dropout):
        out = student.stages[-1].grpo(data)
    assert float(out["ratio_mean"]) == pytest.approx(1.0, abs=1e-6)


def test_from_a_cold_start_grpo_drops_out_in_its_loss_alone():
    student = trainer("folds", optimiser=COLD)
    warm = trainer("folds")
    taught = trainer("taught")
    assert student.stages[-1].dropout
    assert not warm.stages[-1].dropout
    assert not taught.stages[-1].dropout
    assert trainer("folds", loss=replace(SAMPLED, dropout=True)).stages[-1].dropout
    # what is noted of the draws is without noise, and the loss is with it
    data = collected(student)
    noted = student.setup.actor.get_dist(data).log_prob_of_index(data["configuration"])
    assert torch.equal(noted, data["action_log_prob"])
    with dropping_out(student.stages[-1].dropout):
        off = student.stages[-1].grpo(data)["ratio_mean"] - 1
    assert abs(float(off)) > 1e-4


def test_from_a_cold_start_the_policy_is_kept_wide():
    def weight(name, **settings):
        return float(trainer(name, **settings).stages[-1].grpo.entropy_coeff)

    assert weight("alone", optimiser=COLD) == pytest.approx(0.3)
    assert weight("alone") == 0
    assert weight("taught") == 0
    assert weight("alone", optimiser=COLD, loss=replace(SAMPLED, entropy_coeff=0.05)) == (
        pytest.approx(0.05)
    )


@pytest.mark.parametrize(
    ("features", "wanted"), [(0, FEW), (MANY_FEATURES - 1, FEW), (MANY_FEATURES, MANY)]
)
def test_dropout_and_noise_follow_the_number_of_features_where_none_is_named(features, wanted):
    config = regularised(PolicyConfig(dropout=None, augment=None), features)
    assert (config.dropout, config.augment) == wanted
    named = regularised(PolicyConfig(dropout=0.5, augment=0.0), features)
    assert (named.dropout, named.augment) == (0.5, 0.0)


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
    # equal requests, equal decisions
    decider = calibrate_controller(student.setup, student.setup.limits).decider
    limits = np.full(60, float(limit))
    first, second = (decider.log_probs(arrays(student.table), limits) for _ in range(2))
    np.testing.assert_array_equal(first, second)


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
    rows = torch.arange(20).unsqueeze(1).expand(-1, 3)
    regression = noisy.stages[0]
    drawn = next(regression.minibatches(noisy.buffer))
    batch = drawn[:20].set("row", rows)
    seen = []
    network = noisy.setup.distiller.teacher.network
    hook = network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    assert regression.dropout
    with dropping_out(regression.dropout):
        regression.loss(batch)
    hook.remove()
    off = seen[0][0] - noisy.setup.rows.all_features[:20]
    assert float(off.std()) == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize("objective", ["sampled", "exact", "ppo"])
def test_a_stopped_training_ends_bit_for_bit_as_without_the_stop(objective, tmp_path):
    loss = LossConfig(objective=objective, dropout=True)
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


def test_without_features_there_is_nothing_to_augment():
    student = trainer_on(small_table(60, features=False), ALONE, loss=SAMPLED)
    assert student.setup.augment == 0
    plain = trainer_on(small_table(60, features=False), replace(ALONE, augment=0.0), loss=SAMPLED)
    assert equal_states(student.run(), plain.run())


@pytest.mark.parametrize("size", [-0.1, float("inf"), float("nan")])
def test_a_size_that_is_none_is_refused(size):
    with input_error("policy.augment"):
        PolicyConfig(augment=size)
