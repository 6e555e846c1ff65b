"""The training of a selector: each trap of the original, every reward, stopping and going on."""

import copy
import itertools
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from commands import same, stopped_and_resumed
from helpers import Lines, close, equal_states, input_error, small_beams

from knobwise.agents.selector import stages
from knobwise.agents.selector.reward_model import RewardModel, recorded_answers
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import RewardModelConfig, SelectorConfig
from knobwise.agents.selector.training import selector_trainer
from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.agents.training.settings import StageConfig
from knobwise.envs.demonstrations.settings import DemonstrationRewardConfig, GroupConfig
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
    return selector_trainer(stage, table, table.split(0.8, 0.1), start or fresh(table), **options)


def distribution_of(selector, table, rows, temperature=1.0):
    """Of sequences of two, with the embeddings of the table."""
    pool = table.pool[rows]
    return selector.distribution(
        table.queries[rows], table.candidates[pool], pool >= 0, 2, temperature
    )


def one_batch(student):
    next(iter(student.collector))
    return student.buffer[:]


def losses(student, data):
    """Return the losses of a stage as it begins, with diagnostics."""
    student.stage.prepare(0.0, True)
    return student.stage.loss(data)


@pytest.mark.parametrize("live", [False, True])
def test_kl_and_ratio_at_the_first_step_of_grpo(live):
    """Trap 2: old and new log-probs are taken in the same mode, dropout or not."""
    log = Lines()
    trainer("grpo", small_beams(), live=live, log=log, config=replace(SHORT, lr=1e-9)).run()
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
    trainer("rce", data, sft, folder=tmp_path).run()
    rce = load_checkpoint(tmp_path / "last.pt").selector  # whatever validation says of it
    batch = one_batch(trainer("grpo", data, rce, reference=sft))
    old, reference = batch["action_log_prob"], batch["reference_log_prob"]
    for selector, wanted in ((rce, old), (sft, reference)):
        close(distribution_of(selector, table, batch["row"]).log_prob(batch["action"]), wanted)
    assert (old - reference).abs().max() > 1e-3


def test_groups_without_a_sequence_or_with_one_teach_nothing_and_break_nothing():
    """Trap 5: one surviving candidate made a standard deviation, and then every weight, NaN."""
    table, scorer = small_beams(12)
    table.sequences[:4, 1:] = -1
    table.sequences[4:10] = -1
    table.pool[8:10, 1:] = -1  # one candidate
    table.sequences[8:10, 0, 0] = 0
    none = table.sequences[..., 0] < 0
    table.found_by[none] = -1
    for values in table.fields.values():
        values[none] = torch.nan
    split = Split(torch.arange(10), torch.arange(10, 12), torch.arange(0))
    for stage, live in (("sft", False), ("rce", False), ("grpo", False), ("grpo", True)):
        options = {"scorer": scorer, "live": live, "config": SHORT}
        student = selector_trainer(stage, table, split, fresh(table), **options)
        before = copy.deepcopy(student.agent)
        assert all(p.isfinite().all() for p in student.run().parameters())
        if stage == "grpo" and not live:  # of one recorded sequence nothing is learned
            assert equal_states(before, student.agent)


def test_more_ids_than_64():
    """Trap 6: pools and banks of any size."""
    assert trainer("rce", small_beams(16, pool=70)).run().stage == "rce"


@pytest.mark.parametrize("update", ["additive", "convex"])
def test_every_network_learns_to_choose(update):
    data = small_beams(200)
    start = fresh(data[0], SelectorConfig(width=32, heads=2, update=update))
    config = replace(SHORT, epochs=8)
    student = trainer("sft", data, start, groups=GroupConfig("beams"), config=config)
    before = student.validate(False).score
    student.run()
    # the convex update only moves towards what was chosen, and does not look for what is missing
    assert student.state.best.score > before + (0.2 if update == "additive" else 0.1)


def test_post_training_adds_what_imitation_gets_wrong():
    """Beams found by looking at the answer are right by luck as often as not; live draws tell who
    lies. Shuffled rewards: see the learned reward."""
    data = small_beams(400, seed=1)
    sft = trainer("sft", data, groups=GroupConfig("beams"), config=replace(SHORT, epochs=2)).run()
    live = trainer("grpo", data, sft, live=True, config=replace(SHORT, epochs=5, queries=16))
    before = live.validate(False).score
    live.run()
    assert live.state.best.score > before + 0.1


def test_the_temperature_of_rce_falls_and_that_of_sft_is_infinite():
    data = small_beams()
    rce, sft = trainer("rce", data), trainer("sft", data, groups=GroupConfig("beams"))
    for student, share, wanted in ((rce, 0.0, 2.0), (rce, 1.0, 0.5), (sft, 0.0, torch.inf)):
        student.stage.prepare(share, True)
        temperature = float(student.stage.imitation.temperature)
        temperature /= student.stage.reward_spread or 1.0
        assert temperature == pytest.approx(wanted)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    data = small_beams()
    trainer("sft", data, folder=tmp_path).run()
    slower = trainer("sft", data, config=replace(SHORT, lr=1e-4))
    for other in (slower, trainer("rce", data), trainer("sft", small_beams(seed=5))):
        with input_error("name"):
            other.resume(tmp_path / "last.pt")
    learned(data, folder=tmp_path).run()
    for model in (replace(TINY, members=2), replace(TINY, calls=10)):
        with input_error("name"):
            learned(data, model).resume(tmp_path / "last.pt")


def test_without_a_scorer_recorded_sequences_judge():
    student = trainer("grpo", small_beams(60), scorer=None, log=Lines())
    student.run()
    rewards = student.env.rewards[student.setup.split.validation]
    assert rewards.amin(1).mean() < student.state.best.score <= rewards.amax(1).mean() + 1e-6


def test_only_training_queries_are_fitted_on():
    """Neither validation nor test queries are drawn, also where all are in one table."""
    for stage, live in (("sft", False), ("grpo", True)):
        student = trainer(stage, small_beams(40), live=live)
        seen = torch.cat([student.env.reset()["row"] for _ in range(12)])
        assert set(seen.tolist()) == set(student.setup.split.train.tolist())


def test_query_and_pool_are_encoded_once_for_all_sequences(monkeypatch):
    """Trap 11: not once for each beam."""
    student = trainer("grpo", small_beams(40))
    network = student.kept.network
    encode = Mock(side_effect=network.encode)
    monkeypatch.setattr(network, "encode", encode)
    batch = one_batch(student)
    assert batch["action"].shape[1] == 6
    assert encode.call_count == 1
    student.stage.prepare(0.0, False)
    student.stage.loss(batch)
    # where diagnostics are read, once more, for the draws that the KL is taken over
    losses(student, batch)
    assert [call.args[1].shape[:2] for call in encode.call_args_list] == [(8, 8)] * 4


def test_the_last_epoch_is_kept_where_that_is_asked_for(tmp_path):
    config = replace(SHORT, epochs=3, keep="last")
    student = trainer("rce", small_beams(), config=config, folder=tmp_path)
    student.run()
    assert student.state.best.iteration == student.total
    assert load_checkpoint(tmp_path / "best.pt").extra["epoch"] == 3


def test_with_old_log_probs_of_many_steps_the_ratio_moves_and_the_clip_acts():
    log, config = Lines(), replace(SHORT, collected=96, lr=3e-2, lr_warmup=0.5)
    student = trainer("grpo", small_beams(120), config=config, log=log)
    assert (student.settings.contexts, student.settings.minibatch) == (96, 8)
    student.run()
    assert max(log.values("Train/Clip_Fraction")) > 0


def test_the_start_is_not_closest_to_itself():
    config = replace(SHORT, keep="best_kl")
    student = trainer("grpo", small_beams(), config=config)
    student.run()
    assert student.state.best.iteration > 0
    with input_error("sft.keep"):
        trainer("sft", small_beams(), config=config)


# -- which sequences teach, and how far the policy may go ------------------------------------------


def test_only_the_best_get_a_gradient_under_the_curriculum(monkeypatch):
    """Trap 4: their advantages are those of the whole group."""
    monkeypatch.setattr(stages, "CURRICULUM_TOP", 1)
    student = trainer("grpo", small_beams(40), loss=SelectorLossConfig(curriculum=0.5))
    batch = one_batch(student)
    # by hand: minus the advantage of the best of each group in the whole group; ratios are 1
    reward = batch["next", "reward"]
    spread = reward.std(-1, correction=0).clamp_min(0.1)
    advantage = (reward.amax(-1) - reward.mean(-1)) / spread
    objective = losses(student, batch)["loss_objective"].detach()
    close(objective, -advantage.mean())
    student.stage.prepare(0.5, True)
    assert student.stage.grpo.top is None


def test_conditional_training_leaves_out_groups_with_few_right_sequences():
    loss = SelectorLossConfig(min_positive=0.5, kl_to_ref_coeff=0.0)
    student = trainer("grpo", small_beams(40), loss=loss)
    batch = one_batch(student)
    right = (batch["next", "vqa_correct"] > 0.5).float().mean(-1)
    few = batch[right < 0.5]
    assert 0 < len(few) < len(batch)
    for data, teaches in ((few, False), (batch, True)):
        losses(student, data)["loss_objective"].backward()
        gradients = [p.grad for p in student.agent.parameters() if p.grad is not None]
        assert any(bool(gradient.any()) for gradient in gradients) == teaches
    table, _ = small_beams()
    unanswered = replace(table, fields={"beam_score": table.fields["beam_score"]})
    with input_error("min_positive"):
        trainer("grpo", (unanswered, None), loss=loss)


def test_the_weight_of_the_kl_and_the_temperature_follow_the_kl():
    band = (0.0, 1e-6)  # any KL is above it
    loss = SelectorLossConfig(kl_to_ref_coeff=0.1, kl_band=band, temperature_band=band)
    log = Lines()
    student = trainer("grpo", small_beams(), loss=loss, log=log, config=replace(SHORT, epochs=3))
    student.run()
    assert log.values("Train/Beta")[-1] > 0.1
    assert log.values("Train/Temperature")[-1] < 1
    coefficients = [float(student.stage.grpo.kl_to_ref_coeff), float(student.agent.temperature)]
    assert student.training_state().stages[-1]["coefficients"] == pytest.approx(coefficients)


@pytest.mark.parametrize("stage", ["rce", "grpo"])
@pytest.mark.parametrize("advantage", ["zscore", "centred", "rank"])
def test_scores_in_another_unit_give_the_same_run(stage, advantage):
    """Beams with scores alone, as of 0.04 ± 0.004, and 25 times as large; `auto` takes α."""
    table, _ = small_beams()
    scores = 0.04 + 0.004 * table.fields["beam_score"]
    data = replace(table, fields={"beam_score": scores}), None
    logs = []
    for reward in (DemonstrationRewardConfig(), DemonstrationRewardConfig(alpha=25)):
        log = Lines()
        loss = SelectorLossConfig(advantage=advantage, kl_band=(0.01, 0.1))
        trainer(stage, data, reward=reward, loss=loss, log=log).run()
        logs.append(log)
    small, large = logs
    names = ["Train/Loss", "Val/KL"]
    if stage == "grpo":
        names += ["Train/Advantage_Std", "Train/Policy_Loss", "Train/Beta"]
    for name in names:
        assert large.values(name) == pytest.approx(small.values(name), rel=1e-3, abs=1e-5)
    spread = small.values("Train/Reward_Spread")[0]
    assert spread < 0.004
    assert large.values("Train/Reward_Spread")[0] == pytest.approx(25 * spread, rel=1e-3)
    if stage == "grpo" and advantage == "zscore":
        assert min(small.values("Train/Advantage_Std")) > 0.7


def test_positive_sequences_are_those_above_a_threshold():
    """Beams without right answers: a query teaches if enough of its scores are above a number."""
    table, _ = small_beams(40)
    data = replace(table, fields={"beam_score": table.fields["beam_score"]}), None
    loss = SelectorLossConfig(min_positive=0.5, positive_above=0.3, kl_to_ref_coeff=0.0)
    student = trainer("grpo", data, loss=loss)
    batch = one_batch(student)
    share = (batch["next", "reward"] > 0.3).float().mean(-1)
    few = batch[share < 0.5]
    assert 0 < len(few) < len(batch)
    for part, teaches in ((few, False), (batch, True)):
        student.agent.zero_grad()
        losses(student, part)["loss_objective"].backward()
        gradients = [p.grad for p in student.agent.parameters() if p.grad is not None]
        assert any(bool(gradient.any()) for gradient in gradients) == teaches


def test_the_temperature_follows_the_kl_of_the_policy_and_not_the_one_it_makes():
    """A policy that has not moved has a KL of 0 at every temperature; then the temperature rises to
    its end, where it used to swing about 1."""
    band = (0.01, 0.1)
    loss = SelectorLossConfig(temperature_band=band)
    log = Lines()
    config = replace(SHORT, epochs=12, lr=1e-9)
    trainer("grpo", small_beams(), loss=loss, log=log, config=config).run()
    temperatures = log.values("Train/Temperature")
    assert temperatures == sorted(temperatures)
    assert temperatures[-1] == pytest.approx(2.0)
    for name in ("Train/KL", "Train/KL_Loss", "Val/KL"):
        assert log.values(name) == pytest.approx([0.0] * len(log.values(name)), abs=1e-6)


@pytest.mark.parametrize("band", ["kl_band", "temperature_band"])
@pytest.mark.parametrize("live", [False, True])
def test_a_band_holds_the_kl_of_the_policy_and_not_that_of_records_or_of_hotter_draws(band, live):
    data = table, _ = small_beams()
    sft = fresh(table).eval()
    hasty = replace(SHORT, epochs=6, lr=3e-2, keep="last")
    grpo = trainer("grpo", data, sft, config=hasty).run()
    loss = SelectorLossConfig(**{band: (0.01, 0.1)}, group_size=400)
    student = trainer("grpo", data, grpo, reference=sft, live=live, loss=loss)
    if band == "temperature_band":
        student.agent.temperature.fill_(2.0)
    batch = one_batch(student)
    # by hand: over every sequence that the policy may draw
    every = PAIRS.expand(len(batch), -1, -1)
    dists = [distribution_of(selector, table, batch["row"]) for selector in (grpo, sft)]
    ours, theirs = (dist.log_prob(every).detach() for dist in dists)
    kl = float((ours.exp() * (ours - theirs)).sum(-1).mean())
    assert float(losses(student, batch)["kl_to_ref"]) == pytest.approx(kl, rel=0.1)


def test_a_band_that_nothing_leaves_changes_nothing():
    """The draws for it come from a generator of their own."""
    data = small_beams()
    wide = SelectorLossConfig(kl_band=(0.0, 1e9))
    agents = [trainer("grpo", data, loss=loss).run() for loss in (None, wide)]
    assert equal_states(*agents)


def test_the_temperature_is_that_of_log_probs():
    student = trainer("grpo", small_beams(40))
    batch = one_batch(student)
    student.agent.temperature.fill_(2.0)
    flat = student.agent.get_dist(batch).log_prob(batch["action"])
    dist = distribution_of(student.kept, student.table, batch["row"], temperature=2.0)
    close(flat, dist.log_prob(batch["action"]))
    assert not torch.allclose(flat, batch["action_log_prob"])


# -- what is logged --------------------------------------------------------------------------------


PAIRS = torch.tensor(list(itertools.permutations(range(8), 2)))
"""Every sequence of two from a pool of eight."""


@pytest.mark.parametrize(("stage", "temperature"), [("sft", torch.inf), ("rce", 0.5)])
def test_validation_loss_of_imitation_is_its_cross_entropy_on_held_out_queries(stage, temperature):
    log, data = Lines(), small_beams()
    table, _ = data
    start, sft = fresh(table).eval(), trainer("sft", data).run()
    loss = SelectorLossConfig(group_size=400)
    student = trainer(stage, data, start, reference=sft, log=log, loss=loss)
    student.run()
    rows = student.setup.split.validation
    dists = [distribution_of(selector, table, rows) for selector in (start, sft)]
    log_probs = dists[0].log_prob(student.env.sequences[rows]).detach()
    scores = student.env.rewards[rows] / (student.stage.reward_spread or 1.0)
    weight = torch.softmax(scores / temperature, -1)
    first, *others = log.values("Val/Loss")
    assert first == pytest.approx(-float((weight * log_probs).sum(-1).mean()), abs=1e-5)
    assert len(others) == SHORT.epochs
    if stage == "sft":
        assert not log.values("Val/KL")
    else:
        every = PAIRS.expand(len(rows), -1, -1)
        ours, theirs = (dist.log_prob(every).detach() for dist in dists)
        kl = float((ours.exp() * (ours - theirs)).sum(-1).mean())
        assert log.values("Val/KL")[0] == pytest.approx(kl, rel=0.2)


def test_validation_loss_of_grpo_is_minus_the_reward_that_the_policy_expects():
    data = table, scorer = small_beams()
    start = fresh(table).eval()
    log, live = Lines(), Lines()
    student = trainer("grpo", data, start, log=log)
    student.run()
    rows = student.setup.split.validation
    dist = distribution_of(start, table, rows)
    weight = dist.log_prob(student.env.sequences[rows]).softmax(-1).detach()
    wanted = -float((weight * student.env.rewards[rows]).sum(-1).mean())
    assert log.values("Val/Loss")[0] == pytest.approx(wanted, abs=1e-5)
    first, *_, last = log.values("Val/KL")
    assert first == pytest.approx(0, abs=1e-6)
    assert last > 0
    # draws of the policy: their mean reward is near the exact one
    options = {"live": True, "loss": SelectorLossConfig(group_size=400), "log": live}
    trainer("grpo", data, start, config=replace(SHORT, epochs=0), **options).run()
    every = PAIRS.expand(len(rows), -1, -1)
    pairs = table.pool[rows].gather(1, every.flatten(1)).view(-1, 2)
    fields = scorer(rows.repeat_interleave(len(PAIRS)), pairs)
    reward = 2 * fields["vqa_correct"] + fields["vqa_acc_score"]
    weight = dist.log_prob(every).exp().flatten().detach()
    assert live.values("Val/Loss") == [pytest.approx(-float(weight @ reward) / len(rows), abs=0.1)]


@pytest.mark.parametrize(("stage", "live"), [("rce", False), ("grpo", False), ("grpo", True)])
def test_logging_changes_nothing(stage, live):
    data = small_beams()
    agents = [trainer(stage, data, live=live, log=log).run() for log in (None, Lines())]
    assert equal_states(*agents)


# -- GRPO on a learned reward: true calls are counted, a control gains nothing, a stop changes nothing

TINY = RewardModelConfig(width=16, members=3, calls=50)
THREE = replace(SHORT, epochs=3, keep="last")


def learned(data, model_config=TINY, **settings):
    """Return a trainer with a learned reward, which knows what was recorded of training queries."""
    table, _ = data
    start = fresh(table, SelectorConfig(width=16, heads=2))
    model = RewardModel(model_config, start.mean, start.scale)
    model.learn(table, recorded_answers(table, table.split(0.8, 0.1).train), model_config.epochs)
    return trainer("grpo", data, start, **{"config": THREE, "reward_model": model} | settings)


@pytest.mark.parametrize("calls", [0, 1, 50])
def test_true_calls_are_counted_exactly(calls):
    """The scorer answers what training asks, and judges the validation queries after each epoch;
    nothing else."""
    table, scorer = small_beams()
    counted, log = Mock(side_effect=scorer), Lines()
    student = learned((table, counted), replace(TINY, calls=calls), log=log)
    student.run()
    validation = set(student.setup.split.validation.tolist())
    answered = [call.args[0].tolist() for call in counted.call_args_list]
    training = [rows for rows in answered if not validation.issuperset(rows)]
    assert sum(map(len, training)) == student.setup.calls == calls
    assert sum(map(len, answered)) - calls == (THREE.epochs + 1) * len(validation)
    assert log.values("Train/True_Calls") == [calls * epoch // 3 for epoch in (1, 2, 3)]
    assert not log.values("Train/Accuracy_Mean")
    known = student.setup.reward_model.answered.rows
    assert len(known) == 4 * len(student.setup.split.train) + calls


def test_the_learned_reward_teaches_and_the_shuffled_one_does_not():
    data = small_beams(300, seed=1)
    config, model = replace(THREE, epochs=5, queries=16), replace(TINY, calls=300)
    for shuffled in (False, True):
        reward = DemonstrationRewardConfig(shuffled=shuffled)
        student = learned(data, model, config=config, reward=reward)
        before = student.validate(False).score
        student.run()
        gain = student.state.best.score - before
        assert gain < 0.1 if shuffled else gain > 0.15


@pytest.mark.parametrize("stop", [4, 6])
def test_a_stop_changes_nothing(stop, tmp_path):
    """Neither in the iteration in which true calls were made, nor between two of them."""
    data = small_beams()
    both = stopped_and_resumed(lambda folder: learned(data, folder=folder), tmp_path, stop)
    assert equal_states(*(each.agent for each in both))
    assert same(*(each.setup.reward_model.state_dict() for each in both))
    assert [each.setup.calls for each in both] == [TINY.calls] * 2


def test_true_calls_need_a_scorer():
    recorded, _ = small_beams()
    with input_error(r"reward_model\.calls=50"):
        learned((recorded, None))
    student = learned((recorded, None), replace(TINY, calls=0))
    student.run()
    assert student.setup.calls == 0
