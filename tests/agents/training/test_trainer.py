import copy
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from commands import stopped_and_resumed
from helpers import (
    BRIEF,
    Lines,
    arrays,
    close,
    equal_states,
    input_error,
    needs_gpu,
    network_alone,
    small_table,
    table_of,
    trainer_on,
    watch,
)
from tensordict import TensorDict

from knobwise.agents.calibration.calibrate import calibrate_controller
from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.calibration.training import gained_by_sample
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.evaluation.baselines import fit_static
from knobwise.agents.evaluation.evaluation import evaluate_policy
from knobwise.agents.problem import Problem
from knobwise.agents.teacher.network import BEYOND, WIDEST
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.agents.training.stage import Validation
from knobwise.agents.training.trainer import Best
from knobwise.envs.bandit.budgets import judged_values
from knobwise.envs.bandit.settings import BudgetConfig, RewardConfig
from knobwise.losses.settings import LossConfig

UTILITY = RewardConfig(kind="utility")
SHORT = replace(BRIEF, teacher_iterations=8, iterations=12, minibatch=16, epochs=2)
HEADS = PolicyConfig(fold_networks=3, hidden=16)
WITH_TEACHER = PolicyConfig(teacher=True, fold_networks=3, hidden=16, teacher_hidden=16)
POLICIES = {"one": PolicyConfig(hidden=32), "folds": HEADS, "taught": WITH_TEACHER}


def trainer(table, folder=None, **settings):
    options = {"optimiser": SHORT, "reward": UTILITY, "policy": POLICIES["one"]} | settings
    return trainer_on(table, folder=folder, **options)


def scored(student, *scores):
    """Let its evaluations give these scores."""
    held_out = student.setup.held_out
    by_sample = torch.zeros(len(held_out.rows))
    found = [Validation(score, {}, by_sample) for score in scores]
    held_out.validation = Mock(side_effect=found)


@pytest.mark.parametrize(
    ("objective", "beta", "policy"),
    [
        ("exact", 0.0, {"hidden": 64}),
        # a warm-up as short as this one leaves GRPO much to learn, which β = 10 would hold back
        ("sampled", 1.0, {"teacher": True, "fold_networks": 3, "hidden": 32, "dropout": 0.2}),
    ],
)
def test_learns_more_than_budget_aware_static(objective, beta, policy):
    table = small_table(1500, holes=0.2)
    student = trainer(
        table,
        policy=PolicyConfig(**policy),
        loss=LossConfig(objective=objective, kl_to_ref_coeff=beta),
        optimiser=OptimiserConfig(40, 60, 200, contexts=128, minibatch=128),
    )

    def utility(policy):
        return evaluate_policy(
            policy, table, student.setup.split.test, student.setup.limits
        ).utility.mean()

    def decides(agent):
        return DeployedController(agent) if isinstance(agent, Controller) else agent

    static = utility(fit_static(table, student.setup.split.train))
    before = utility(decides(student.agent))
    assert utility(decides(student.run())) > max(static + 0.02, before + 0.05)


def test_a_finished_seed_trains_no_further_and_another_profile_is_refused(tmp_path):
    table = small_table(60)
    path = tmp_path / "last.pt"
    student = trainer(table, tmp_path)
    assert not student.resume(path)
    student.run()
    again = trainer(table, tmp_path)
    assert again.resume(path)
    assert again.state.finished
    for other, settings in (
        (small_table(60, seed=1), {}),
        (table, {"policy": HEADS}),
        (table, {"constraint": "mean"}),
        (table, {"loss": LossConfig(objective="exact")}),
        (table, {"reward": RewardConfig(kind="shaped")}),
        (table, {"budget": BudgetConfig(strategy="uniform")}),
        (table, {"optimiser": replace(SHORT, iterations=50)}),
        (Problem.from_table(table, table.split(seed=5)), {}),
    ):
        with input_error("name="):
            trainer(other, **settings).resume(path)


@pytest.mark.parametrize("name", POLICIES)
def test_the_first_step_of_grpo_is_on_policy_although_there_is_dropout(name):
    lines = Lines()
    optimiser = replace(SHORT, iterations=4, minibatch=32, epochs=1)
    policy = replace(POLICIES[name], dropout=0.5)
    loss = LossConfig(kl_to_ref_coeff=0.1)
    student = trainer(small_table(60), log=lines, optimiser=optimiser, policy=policy, loss=loss)
    student.run()
    first = next(line for _, line in lines if "Train/KL" in line)
    assert first["Train/KL"] == pytest.approx(0, abs=1e-6)
    assert first["Train/Ratio_Mean"] == pytest.approx(1, abs=1e-5)
    assert first["Train/Clip_Fraction"] == 0


# -- one stage after the other ---------------------------------------------------------------------


def test_a_stage_past_its_peak_gives_way_to_the_next():
    optimiser = replace(SHORT, teacher_iterations=32, pretrain_iterations=20, patience=2)
    student = trainer(small_table(80), optimiser=optimiser, policy=WITH_TEACHER)
    student.stages[2].patience = 2
    # without bins, at 0, 4 … 28, the patience of a teacher is 6; with bins at 36, 40 … 60
    scores = [0.1, 0.9, 0.4, 0.3, *[0.2] * 4, 0.35, *[0.3] * 6]
    # imitation at 68, 72 and 76, which begins anew; GRPO at 88, 92 and 96
    scored(student, *scores, 0.5, 0.4, 0.4, 0.6, 0.5, 0.5)
    names = watch(student, lambda _: student.stage.name)
    student.run()
    assert names == {
        **dict.fromkeys(range(28), "regression"),
        **dict.fromkeys(range(32, 60), "regression with bins"),
        **dict.fromkeys(range(64, 76), "imitation"),
        **dict.fromkeys(range(84, 96), "GRPO"),
    }
    at = [iteration for iteration, _ in student.state.scores]
    assert at == [*range(0, 32, 4), *range(36, 64, 4), 68, 72, 76, 88, 92, 96]
    assert (student.state.best.score, student.state.best.iteration) == (0.6, 88)
    assert gained_by_sample(student).keys() == {"start", "best", "clusters"}


def test_a_stop_after_a_stage_that_ended_early_ends_as_without_it(tmp_path):
    optimiser = replace(SHORT, teacher_iterations=40, pretrain_iterations=16)

    def impatient(folder):
        student = trainer(small_table(80), folder, optimiser=optimiser, policy=WITH_TEACHER)
        for stage in student.stages[:-2]:
            stage.patience = 1
        return student

    whole, again = stopped_and_resumed(impatient, tmp_path, 80)
    assert [at for at, _ in whole.state.scores if at < 80][-1] < 76, "the stage must end early"
    assert equal_states(whole.agent, again.agent)
    assert again.state.scores == whole.state.scores


@pytest.mark.parametrize("name", ["one", "taught"])
def test_grpo_starts_from_the_end_of_the_warm_up(name):
    student = trainer(small_table(80), policy=POLICIES[name])
    start = copy.deepcopy(student.agent)
    # as if nothing later were as good
    student.state.best = Best(2.0, 0, start.state_dict())
    moved = "network.head.logits.bias"
    if name == "taught":
        moved = f"controller.{moved}"
    begin, began = student.stages[-1].start, []

    def watched(trainer):
        end = copy.deepcopy(student.agent)
        controller = copy.deepcopy(student.setup.controller)
        assert not torch.equal(end.state_dict()[moved], start.state_dict()[moved])
        begin(trainer)
        began.append(student.state.iteration)
        assert equal_states(student.agent, end)
        assert equal_states(student.setup.reference, controller)

    student.stages[-1].start = watched
    student.run()
    assert began == [24 if name == "taught" else 8]
    # a teacher of the reward holds GRPO there, without a teacher nothing does
    assert float(student.stages[-1].grpo.kl_to_ref_coeff) == pytest.approx(
        10 if name == "taught" else 0
    )


@pytest.mark.parametrize(
    ("reward", "constraint", "beta"),
    [("utility", "deadline", 10), ("priced", "mean", 10), ("shaped", "deadline", 1)],
)
def test_grpo_stays_nearer_to_a_teacher_of_its_reward(reward, constraint, beta):
    about = {"reward": RewardConfig(kind=reward), "constraint": constraint}
    student = trainer(small_table(60), policy=WITH_TEACHER, **about)
    assert student.setup.kl_coeff == beta
    own = LossConfig(kl_to_ref_coeff=0.5)
    assert trainer(small_table(60), policy=WITH_TEACHER, loss=own, **about).setup.kl_coeff == 0.5


def test_imitation_starts_from_the_best_teacher_and_leaves_it_alone():
    student = trainer(small_table(80), policy=WITH_TEACHER)
    # at 0, 4 … 36: the teacher was best at 12
    scored(student, 0.1, 0.2, 0.3, 0.5, 0.4, 0.1, 0.2, 0.1, 0.3, 0.2)
    kept = watch(student, lambda _: copy.deepcopy(student.setup.distiller.teacher))
    agent = student.run()
    best = kept[12]
    assert not equal_states(kept[15], best)
    for teacher in (kept[16], kept[20], kept[24], kept[35], agent.teacher):
        assert equal_states(teacher, best)
    # and from there on the heads are judged, whose best was of GRPO
    assert student.state.best.iteration == 32
    assert equal_states(student.setup.distiller.fitted.teacher.network, best.network)


@pytest.mark.parametrize("bent", [True, False])
def test_heads_are_taught_by_the_better_of_two_regressions_with_bins_and_without(bent):
    """On one table the right configuration hangs on whether a feature is near 0, on the other on a
    sum of many."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(300, 1 if bent else 100, generator=generator)
    hard = features.abs() < 0.6 if bent else features.sum(1, keepdim=True) > 0
    table = table_of(torch.cat([~hard, hard], 1).float(), torch.full((300, 2), 5.0), features)
    brief = OptimiserConfig(80, 4, 1, contexts=128, minibatch=64, epochs=2, evaluate_every=8)
    policy = PolicyConfig(
        teacher=True, fold_networks=2, hidden=4, teacher_hidden=4, layers=1, teacher_dropout=0.0
    )
    student = trainer(table, policy=policy, optimiser=brief)
    agent = student.run()
    without = max(score for iteration, score in student.state.scores if iteration <= 80)
    with_bins = max(score for iteration, score in student.state.scores if 80 < iteration <= 160)
    reads_bins = bool((agent.teacher.network.edges < BEYOND).any())
    assert reads_bins == (with_bins > without) == bent


def test_wide_tables_are_not_tried_with_bins():
    feature = torch.randn(30, WIDEST + 1, generator=torch.Generator().manual_seed(0))
    table = table_of(torch.ones(30, 2), torch.full((30, 2), 5.0), feature)
    student = trainer(table, policy=WITH_TEACHER)
    assert [stage.name for stage in student.stages] == ["regression", "imitation", "GRPO"]
    assert student.setup.distiller.teacher.network.edges.numel() == 0


def test_without_a_warm_up_there_is_no_teacher():
    optimiser = replace(SHORT, pretrain_iterations=0)
    student = trainer(small_table(60), policy=WITH_TEACHER, optimiser=optimiser)
    agent = student.run()
    assert student.total == 12
    assert isinstance(agent, Controller)
    assert calibrate_controller(student.setup, student.setup.limits).teacher is None


# -- rewards ---------------------------------------------------------------------------------------


def test_training_on_a_reward_function_is_judged_by_the_reward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = "f = lambda accuracy, latency_ms, budget_ms, knobs: -latency_ms"
    Path("aim_of_speed.py").write_text(code)
    reward = RewardConfig(kind="function", function="aim_of_speed:f")
    student = trainer(small_table(60), tmp_path, reward=reward, policy=WITH_TEACHER)
    student.run()
    rows = student.setup.held_out.rows[:, None]
    chosen = [student.setup.held_out_log_probs(limit).argmax(-1) for limit in student.setup.limits]
    latency_ms = student.table.latency_ms[rows, torch.stack(chosen, 1)]
    assert student.state.best.score == pytest.approx(-float(latency_ms.mean()), rel=1e-5)
    # the guard compares utilities, which are not what it was trained for
    assert calibrate_controller(student.setup, student.setup.limits).calibration.guard == []


def test_under_a_mean_budget_values_are_drawn_and_rewards_are_priced():
    lines, table = Lines(), small_table(60)
    loss = LossConfig(objective="exact")
    student = trainer(table, policy=HEADS, constraint="mean", loss=loss, log=lines)

    def priced(data):
        cell = data["row"], data["configuration"].squeeze(-1)
        wanted = table.accuracy[cell] - table.latency_ms[cell] / data["worth_ms"]
        close(data["next", "reward"].squeeze(-1), wanted)

    watch(student, priced)
    best = DeployedController(student.run())
    assert best.controller.limit_key == "worth_ms"
    assert torch.equal(student.setup.limits, judged_values(table))
    assert not lines.values("Train/Budget_Violation_Rate")
    choices = [best.choose(arrays(table), np.full(60, value)) for value in (1.0, 1e4)]
    little, much = (table.latency_ms[range(60), chosen].mean() for chosen in choices)
    assert little < much


def test_what_is_logged_of_draws_counts_each_measurement_of_their_cells():
    nan = torch.nan
    cells = torch.tensor([[[2.0, 6.0, 10.0], [1.0, 9.0, nan]], [[4.0, nan, nan], [3.0, 5.0, 7.0]]])
    table = table_of([[0.5, 1.0], [0.0, 1.0]] * 10, cells.repeat(10, 1, 1))
    stage = trainer(table).stages[-1]
    data = TensorDict({"row": torch.tensor([[0], [1]]), "budget_ms": torch.tensor([[6.0], [4.5]])})
    data["configuration"] = torch.tensor([[[0, 1]], [[0, 1]]])
    data["next"] = TensorDict({"reward": torch.zeros(2, 1, 2)}, [2, 1])
    data.batch_size = [2, 1]
    metrics = stage.metrics(data)
    assert metrics["Budget_Violation_Rate"] == pytest.approx((1 / 3 + 1 / 2 + 0 + 2 / 3) / 4)
    # means 6, 5, 4, 5; inside the cells 32/3, 16, 0, 8/3
    assert metrics["Latency_Mean"] == pytest.approx(5.0)
    assert metrics["Latency_Std"] == pytest.approx((2 / 3 + (32 / 3 + 16 + 8 / 3) / 4) ** 0.5)


def scaled(unit):
    """The shaped reward in another unit: every weight is multiplied."""
    names = ("alpha", "beta", "gamma", "delta", "epsilon")
    plain = RewardConfig(kind="shaped")
    return RewardConfig(kind="shaped", **{name: unit * getattr(plain, name) for name in names})


@pytest.mark.parametrize("policy", ["folds", "taught"])
@pytest.mark.parametrize(
    "loss",
    [
        LossConfig(objective="sampled", kl_band=(0.01, 0.1), entropy_coeff=0.01),
        LossConfig(objective="exact", advantage="zscore", kl_to_ref_coeff=0.1),
        LossConfig(objective="ppo", advantage="zscore"),
    ],
)
def test_rewards_in_another_unit_give_the_same_run(loss, policy):
    """To the bit where the unit is a power of two, else but for rounding."""
    logs = []
    for unit in (1.0, 32.0, 1 / 25):
        log = Lines()
        settings = {"policy": POLICIES[policy], "reward": scaled(unit), "loss": loss, "log": log}
        trainer(small_table(60), **settings).run()
        logs.append(log)
        spread = log.values("Train/Reward_Spread")[-1]
        assert spread == pytest.approx(unit * logs[0].values("Train/Reward_Spread")[-1], rel=1e-3)
    plain, power, other = logs
    assert plain.values("Train/Grad_Norm")[-1] > 0
    for name in ("Train/Policy_Loss", "Train/Grad_Norm", "Train/Entropy", "Val/Utility"):
        assert power.values(name) == plain.values(name)
        assert other.values(name) == pytest.approx(plain.values(name), rel=1e-2, abs=1e-3)


# -- networks side by side -------------------------------------------------------------------------


def photographed(samples=90, holes=0.3):
    """Three samples of each image."""
    images = tuple(str(i // 3) for i in range(samples))
    return replace(small_table(samples, holes=holes), image_ids=images)


def test_every_sample_but_the_test_ones_is_held_out_of_one_network():
    student = trainer(photographed(), policy=HEADS, seed=4)
    known = torch.cat(student.setup.split[:2]).sort().values
    fitted, held_out = student.setup.folds
    for rows, hold in zip(fitted, held_out, strict=True):
        assert torch.equal(torch.cat([rows, hold]).sort().values, known)
        # images are kept together
        assert not torch.isin(rows // 3, hold // 3).any()
    assert torch.equal(student.setup.held_out.rows, torch.cat(held_out))
    assert torch.equal(student.setup.held_out.rows.sort().values, known)
    assert student.setup.networks == 4
    with input_error("fold_networks"):
        trainer(small_table(60), policy=PolicyConfig(fold_networks=60))


def test_a_single_network_is_fitted_on_train_and_judged_on_validation():
    student = trainer(small_table(60))
    assert torch.equal(student.setup.fitted, student.setup.split.train)
    assert torch.equal(student.setup.held_out.rows, student.setup.split.validation)
    assert student.setup.networks == 1


@pytest.mark.parametrize("name", ["folds", "taught"])
@torch.no_grad()
def test_networks_are_judged_on_what_was_held_out_of_them_by_hand(name):
    """The heads, or where there is a teacher first its networks."""
    table = photographed()
    student = trainer(table, policy=POLICIES[name])
    torch.manual_seed(0)
    for p in student.agent.parameters():
        p.add_(0.3 * torch.randn_like(p))
    utilities = []
    for number, hold in enumerate(student.setup.folds[1]):
        alone = DeployedController(network_alone(student.setup.controller, number))
        mask = table.mask[hold]
        for budget in student.setup.limits:
            limits = budget.expand(len(hold))
            if name == "folds":
                chosen = alone.choose(arrays(table, hold), limits.numpy(), mask.numpy())
            else:
                x = student.setup.rows.all_features[hold].expand(3, -1, -1)
                scores = (
                    student.setup.distiller.teacher.network(x).predicted().score(limits)[number]
                )
                chosen = scores.masked_fill(~mask, -torch.inf).argmax(1)
            at = hold, chosen
            utilities += (table.accuracy[at] * (table.latency_ms[at] <= budget)).tolist()
    student._evaluate(student.stage)
    assert student.state.best.score == pytest.approx(np.mean(utilities), abs=1e-6)


@pytest.mark.parametrize("name", ["folds", "taught"])
def test_what_was_measured_of_a_fold_changes_every_network_but_that_of_the_fold(name):
    policy = replace(POLICIES[name], dropout=0.0, teacher_dropout=0.0)
    limits = torch.tensor([8.0, 15.0])
    students = []
    # with and without the outcomes turned round of the samples that are held out of the second
    # network; as the teacher starts at the means of its table, that is the same for both
    for turned in (False, True):
        student = trainer(photographed(holes=0.0), policy=policy, budgets_ms=limits)
        for stage in student.stages:
            stage.clip_grad = 1e9  # the norm is that of all networks together
        if turned:
            hold = student.setup.folds[1][1]
            known = [student.env.rewards]
            # the teacher learns from what was measured, not from the rewards
            known += [stage for stage in student.stages if hasattr(stage, "accuracy")]
            for each in known:
                each.accuracy = each.accuracy.clone()
                each.accuracy[hold] = 1 - each.accuracy[hold]
        # through all stages, without a choice among checkpoints
        stream = iter(student.collector)
        torch.manual_seed(0)
        for iteration in range(student.total):
            student.state.iteration = iteration
            stage = student.policy.stage = student.stage
            if iteration == stage.first:
                student.optimiser = stage.optimiser(stage.module)
            student._train_step(stage, stream)
        student.collector.shutdown()
        students.append(student)
    for number in range(4):
        pair = (network_alone(student.setup.controller, number) for student in students)
        # the second, and not the last, which learns from all
        assert equal_states(*pair) == (number == 1)
        if name == "taught":
            targets = (student.setup.distiller.targets["utility"][number] for student in students)
            assert torch.equal(*targets) == (number == 1)
    if name == "taught":
        assert torch.equal(*(student.setup.distiller.targets["x"] for student in students))


# -- the rest --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        (OptimiserConfig, "minibatch", 0),
        (OptimiserConfig, "teacher_iterations", -1),
        (OptimiserConfig, "clip_grad", -1.0),
        (PolicyConfig, "sharpness", 0.0),
        (PolicyConfig, "teacher_dropout", 1.0),
        (PolicyConfig, "promise", 1.0),
    ],
)
def test_settings_that_cannot_be_used_are_named(group, name, value):
    with input_error(name):
        group(**{name: value})


def test_validation_is_on_the_budgets_asked_for_and_the_kl_is_logged_also_when_it_costs_nothing():
    lines = Lines()
    loss = LossConfig(kl_to_ref_coeff=0.0)
    trainer(small_table(60), log=lines, loss=loss, budgets_ms=torch.tensor([1e-3])).run()
    assert set(lines.values("Val/Utility")) == {0}
    assert min(m["Train/KL"] for step, m in lines if step > 8 and "Train/KL" in m) > 0


def test_the_random_state_of_the_caller_is_left_alone():
    before = torch.get_rng_state()
    trainer(small_table(60, features=False), policy=WITH_TEACHER).run()
    assert torch.equal(torch.get_rng_state(), before)


@needs_gpu
@pytest.mark.parametrize("objective", ["exact", "sampled"])
@pytest.mark.parametrize("name", ["one", "taught"])
def test_trains_and_resumes_on_a_gpu(objective, name, tmp_path):
    settings = {"loss": LossConfig(objective=objective), "policy": POLICIES[name]}
    first, again = (trainer(small_table(60), tmp_path, device="cuda", **settings) for _ in range(2))
    assert first.run().configurations.is_cuda
    assert again.resume(tmp_path / "last.pt")
