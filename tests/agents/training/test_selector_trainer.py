"""The training of a selector: each trap of the original, every reward, stopping and going on."""

import copy
import itertools
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from helpers import Lines, equal_states, small_beams

from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.agents.training import selector_trainer
from knobwise.agents.training.selector_trainer import SelectorTrainer
from knobwise.agents.training.settings import StageConfig
from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.settings import GroupConfig
from knobwise.envs.tables.profile_table import Split
from knobwise.losses.settings import SelectorLossConfig

SMALL = SelectorConfig(width=16, heads=2, dropout=0.3)
SHORT = StageConfig(epochs=2, lr=3e-3, queries=8)


def fresh(table, config=SMALL):
    torch.manual_seed(0)
    return Selector.fitted(config, table.queries, table.candidates)


def trainer(stage, data, start=None, **settings):
    table, scorer = data
    options = {"scorer": scorer, "config": SHORT} | settings
    return SelectorTrainer(stage, table, table.split(0.8, 0.1), start or fresh(table), **options)


def distribution_of(selector, table, rows, temperature=1.0):
    """Of sequences of two, with the embeddings of the table."""
    pool = table.pool[rows]
    return selector.distribution(
        table.queries[rows], table.candidates[pool], pool >= 0, 2, temperature
    )


def one_batch(student):
    next(iter(student.collector))
    return student.buffer[:]


def prepared(student, share=0.0):
    """The stage as it is before an iteration whose diagnostics are wanted."""
    student.stage.prepare(share, True)
    return student.stage


@pytest.mark.parametrize("live", [False, True])
def test_kl_and_ratio_at_the_first_step_of_grpo(live):
    """Trap 2: old and new log-probs are taken in the same mode, dropout or not."""
    data, log = small_beams(), Lines()
    student = trainer("grpo", data, live=live, log=log, config=replace(SHORT, lr=1e-9))
    student.run()
    first = next(line for step, line in log if "Train/KL" in line and step == 0)
    assert first["Train/KL"] == pytest.approx(0, abs=1e-6)
    assert first["Train/Ratio_Mean"] == pytest.approx(1, abs=1e-6)
    assert first["Train/Clip_Fraction"] == 0
    assert first["Train/ESS"] == pytest.approx(1, abs=1e-5)


def test_the_behaviour_is_that_of_the_start_and_the_reference_that_of_sft(tmp_path):
    """Trap 3: old log-probs are not those from before RCE, and the KL is not to what GRPO starts
    from."""
    data = table, _ = small_beams()
    sft = fresh(table).eval()
    warm = trainer("rce", data, sft, folder=tmp_path)
    warm.run()
    rce = load_checkpoint(tmp_path / "last.pt").selector  # whatever validation says of it
    student = trainer("grpo", data, rce, reference=sft)
    batch = one_batch(student)
    rows, action = batch["row"], batch["action"]
    for selector, key in ((rce, "action_log_prob"), (sft, "reference_log_prob")):
        torch.testing.assert_close(
            distribution_of(selector, table, rows).log_prob(action), batch[key]
        )
    assert (batch["action_log_prob"] - batch["reference_log_prob"]).abs().max() > 1e-3


def test_groups_without_a_sequence_or_with_one_teach_nothing_and_break_nothing():
    """Trap 5: one surviving candidate made a standard deviation, and then every weight, NaN."""
    table, scorer = small_beams(12)
    sequences, pool = table.sequences.clone(), table.pool.clone()
    sequences[:4, 1:] = -1
    sequences[4:8] = -1
    pool[8:10, 1:] = -1  # one candidate
    sequences[8:10] = -1
    sequences[8:10, 0, 0] = 0
    none = sequences[..., 0] < 0
    found_by = table.found_by.masked_fill(none, -1)
    fields = {name: values.masked_fill(none, torch.nan) for name, values in table.fields.items()}
    holed = replace(table, sequences=sequences, found_by=found_by, fields=fields, pool=pool)
    split = Split(torch.arange(10), torch.arange(10, 12), torch.arange(0))
    for stage, live in (("sft", False), ("rce", False), ("grpo", False), ("grpo", True)):
        options = {"scorer": scorer, "live": live, "config": SHORT}
        student = SelectorTrainer(stage, holed, split, fresh(holed), **options)
        before = copy.deepcopy(student.agent)
        assert all(p.isfinite().all() for p in student.run().parameters())
        if stage == "grpo" and not live:  # of one recorded sequence nothing is learned
            assert equal_states(before, student.agent)


def test_more_ids_than_64():
    """Trap 6: pools and banks of any size."""
    data = small_beams(16, pool=70)
    assert len(data[0].candidates) == 280
    assert trainer("rce", data).run().stage == "rce"


@pytest.mark.parametrize("update", ["additive", "convex"])
def test_every_network_learns_to_choose(update):
    data = small_beams(200)
    config = SelectorConfig(width=32, heads=2, update=update)
    student = trainer(
        "sft",
        data,
        fresh(data[0], config),
        groups=GroupConfig("beams"),
        config=replace(SHORT, epochs=8),
    )
    before, _ = student._judge()
    student.run()
    # the convex update only moves towards what was chosen, and does not look for what is missing
    assert student.best["score"] > before + (0.2 if update == "additive" else 0.1)


def test_post_training_adds_what_imitation_gets_wrong():
    """Beams found by looking at the answer are right by luck as often as not; live draws tell who
    lies. Shuffled rewards: see the learned reward."""
    data = small_beams(400, seed=1)
    sft = trainer("sft", data, groups=GroupConfig("beams"), config=replace(SHORT, epochs=2)).run()
    live = trainer("grpo", data, sft, live=True, config=replace(SHORT, epochs=5, queries=16))
    before, _ = live._judge()
    live.run()
    assert live.best["score"] > before + 0.1


def test_the_temperature_of_rce_falls_and_that_of_sft_is_infinite():
    data = small_beams()
    rce, sft = trainer("rce", data), trainer("sft", data, groups=GroupConfig("beams"))
    for student, share, wanted in ((rce, 0.0, 2.0), (rce, 1.0, 0.5), (sft, 0.0, torch.inf)):
        prepared(student, share)
        assert float(student.imitation.temperature) == pytest.approx(wanted)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    data = small_beams()
    trainer("sft", data, folder=tmp_path).run()
    slower = trainer("sft", data, config=replace(SHORT, lr=1e-4))
    for other in (slower, trainer("rce", data), trainer("sft", small_beams(seed=5))):
        with pytest.raises(InputError, match="choose another name"):
            other.resume(tmp_path / "last.pt")


def test_without_a_scorer_recorded_sequences_judge():
    table, _ = small_beams(60)
    log = Lines()
    student = trainer("grpo", (table, None), log=log)
    student.run()
    rows = student.split.validation
    highest = student.env.rewards[rows].amax(1).mean()
    assert student.env.rewards[rows].amin(1).mean() < student.best["score"] <= highest + 1e-6


def test_only_training_queries_are_fitted_on():
    """Neither validation nor test queries are drawn, also where all are in one table."""
    data = small_beams(40)
    for stage, live in (("sft", False), ("grpo", True)):
        student = trainer(stage, data, live=live)
        seen = torch.cat([student.env.reset()["row"] for _ in range(12)])
        assert set(seen.tolist()) == set(student.split.train.tolist())


def test_query_and_pool_are_encoded_once_for_all_sequences(monkeypatch):
    """Trap 11: not once for each beam."""
    student = trainer("grpo", small_beams(40))
    network = student.selector.network
    encode = Mock(side_effect=network.encode)
    monkeypatch.setattr(network, "encode", encode)
    batch = one_batch(student)
    assert batch["action"].shape[1] == 6
    assert encode.call_count == 1
    prepared(student).loss(batch)
    assert [call.args[1].shape[:2] for call in encode.call_args_list] == [(8, 8)] * 2


def test_the_last_epoch_is_kept_where_that_is_asked_for(tmp_path):
    student = trainer(
        "rce", small_beams(), config=replace(SHORT, epochs=3, keep="last"), folder=tmp_path
    )
    student.run()
    assert student.best["iteration"] == student.total
    assert load_checkpoint(tmp_path / "best.pt").extra["epoch"] == 3


def test_with_old_log_probs_of_many_steps_the_ratio_moves_and_the_clip_acts():
    data, log = small_beams(120), Lines()
    config = replace(SHORT, collected=96, queries=8, lr=3e-2, rise=0.5)
    student = trainer("grpo", data, config=config, log=log)
    assert student.settings.contexts == 96
    assert student.settings.minibatch == 8
    student.run()
    assert max(log.values("Train/Clip_Fraction")) > 0


def test_the_start_is_not_closest_to_itself():
    student = trainer("grpo", small_beams(), config=replace(SHORT, keep="best_kl"))
    student.run()
    assert student.best["iteration"] > 0
    with pytest.raises(InputError, match=r"sft\.keep=best_kl"):
        trainer("sft", small_beams(), config=replace(SHORT, keep="best_kl"))


# -- which sequences teach, and how far the policy may go ------------------------------------------


def test_only_the_best_get_a_gradient_under_the_curriculum(
    monkeypatch,
):
    """Trap 4: their advantages are those of the whole group."""
    monkeypatch.setattr(selector_trainer, "CURRICULUM_TOP", 1)
    loss = SelectorLossConfig(curriculum=0.5)
    student = trainer("grpo", small_beams(40), loss=loss)
    student.grpo.kl_to_ref_coeff.zero_()
    batch = one_batch(student)

    def gradient():
        gradients = [p.grad for p in student.agent.parameters() if p.grad is not None]
        learned = torch.cat([gradient.flatten() for gradient in gradients])
        student.agent.zero_grad()
        return learned

    prepared(student).loss(batch)["loss_objective"].backward()
    learned = gradient()
    # by hand: −ln π of the best of each group times its advantage in the whole group
    reward = batch["next", "reward"]
    best = reward.argmax(-1, keepdim=True)
    spread = reward.std(-1, keepdim=True, correction=0).clamp_min(0.1)
    advantage = (reward - reward.mean(-1, keepdim=True)) / spread
    log_prob = student.agent.get_dist(batch).log_prob(batch["action"])
    (-(advantage * log_prob).gather(-1, best)).mean().backward()
    torch.testing.assert_close(learned, gradient(), rtol=1e-4, atol=1e-6)
    prepared(student, 0.5)
    assert student.grpo.top is None


def test_conditional_training_leaves_out_groups_with_few_right_sequences():
    loss = SelectorLossConfig(min_positive=0.5, kl_to_ref_coeff=0.0)
    student = trainer("grpo", small_beams(40), loss=loss)
    batch = one_batch(student)
    right = (batch["next", "vqa_correct"] > 0.5).float().mean(-1)
    few = batch[right < 0.5]
    assert 0 < len(few) < len(batch)
    stage = prepared(student)
    for data, teaches in ((few, False), (batch, True)):
        stage.loss(data)["loss_objective"].backward()
        gradients = [p.grad for p in student.agent.parameters() if p.grad is not None]
        assert any(bool(gradient.any()) for gradient in gradients) == teaches
    table, _ = small_beams()
    unanswered = replace(table, fields={"beam_score": table.fields["beam_score"]})
    with pytest.raises(InputError, match="min_positive"):
        trainer("grpo", (unanswered, None), loss=loss)


def test_the_weight_of_the_kl_and_the_temperature_follow_the_kl():
    band = (0.0, 1e-6)  # any KL is above it
    loss = SelectorLossConfig(kl_to_ref_coeff=0.1, kl_band=band, temperature_band=band)
    data, log = small_beams(), Lines()
    student = trainer("grpo", data, loss=loss, log=log, config=replace(SHORT, epochs=3))
    student.run()
    assert log.values("Train/Beta")[-1] > 0.1
    assert log.values("Train/Temperature")[-1] < 1
    assert student.training_state()["coefficients"] == [
        pytest.approx(float(student.grpo.kl_to_ref_coeff)),
        pytest.approx(float(student.agent.temperature)),
    ]


def test_the_temperature_is_that_of_log_probs():
    data = small_beams(40)
    student = trainer("grpo", data)
    batch = one_batch(student)
    student.agent.temperature.fill_(2.0)
    flat = student.agent.get_dist(batch).log_prob(batch["action"])
    dist = distribution_of(student.selector, data[0], batch["row"], temperature=2.0)
    torch.testing.assert_close(flat, dist.log_prob(batch["action"]))
    assert not torch.allclose(flat, batch["action_log_prob"])


# -- what is logged --------------------------------------------------------------------------------


PAIRS = torch.tensor(list(itertools.permutations(range(8), 2)))
"""Every sequence of two from a pool of eight."""


@torch.no_grad()
def exact_kl(policy, reference, table, rows):
    every = PAIRS.expand(len(rows), -1, -1)
    ours, theirs = (
        distribution_of(selector, table, rows).log_prob(every) for selector in (policy, reference)
    )
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())


@pytest.mark.parametrize(("stage", "temperature"), [("sft", torch.inf), ("rce", 0.5)])
def test_validation_loss_of_imitation_is_its_cross_entropy_on_held_out_queries(stage, temperature):
    data, log = small_beams(), Lines()
    table, _ = data
    start, sft = fresh(table).eval(), trainer("sft", data).run()
    student = trainer(
        stage, data, start, reference=sft, log=log, loss=SelectorLossConfig(group_size=400)
    )
    student.run()
    rows = student.split.validation
    sequences, rewards = student.env.sequences[rows], student.env.rewards[rows]
    log_probs = distribution_of(start, table, rows).log_prob(sequences).detach()
    weight = torch.softmax(rewards / temperature, -1)
    first = next(line for step, line in log if "Val/Loss" in line)
    assert first["Val/Loss"] == pytest.approx(float(-(weight * log_probs).sum(-1).mean()), abs=1e-5)
    if stage == "sft":
        assert "Val/KL" not in first
    else:
        assert first["Val/KL"] == pytest.approx(exact_kl(start, sft, table, rows), rel=0.2)
    assert len(log.values("Val/Loss")) == 1 + SHORT.epochs


def test_validation_loss_of_grpo_is_minus_the_reward_that_the_policy_expects():
    data = table, scorer = small_beams()
    start = fresh(table).eval()
    log, live = Lines(), Lines()
    student = trainer("grpo", data, start, log=log)
    student.run()
    rows = student.split.validation
    dist = distribution_of(start, table, rows)
    weight = dist.log_prob(student.env.sequences[rows]).softmax(-1).detach()
    wanted = -float((weight * student.env.rewards[rows]).sum(-1).mean())
    assert log.values("Val/Loss")[0] == pytest.approx(wanted, abs=1e-5)
    assert log.values("Val/KL")[0] == pytest.approx(0, abs=1e-6)
    assert log.values("Val/KL")[-1] > 0
    # draws of the policy: their mean reward is near the exact one
    options = {"live": True, "loss": SelectorLossConfig(group_size=400), "log": live}
    trainer("grpo", data, start, config=replace(SHORT, epochs=0), **options).run()
    every = PAIRS.expand(len(rows), -1, -1)
    pairs = table.pool[rows].gather(1, every.flatten(1)).view(-1, 2)
    fields = scorer(rows.repeat_interleave(every.shape[1]), pairs)
    reward = (2 * fields["vqa_correct"] + fields["vqa_acc_score"]).view(len(rows), -1)
    wanted = -float((dist.log_prob(every).detach().exp() * reward).sum(-1).mean())
    assert live.values("Val/Loss") == pytest.approx([wanted], abs=0.1)


@pytest.mark.parametrize("live", [False, True])
def test_logging_changes_nothing(live):
    data = small_beams()
    for stage in ("rce", "grpo") if not live else ("grpo",):
        silent, logged = (trainer(stage, data, live=live, log=log) for log in (None, Lines()))
        assert equal_states(silent.run(), logged.run())
