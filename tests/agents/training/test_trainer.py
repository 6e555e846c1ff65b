from __future__ import annotations

import copy
import dataclasses
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Lines, arrays, equal_states, member_of, small_table, table_of
from torch import Tensor

from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.controller.networks import BEYOND, WIDEST
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.judging.baselines import static_of
from knobwise.agents.judging.evaluation import judge
from knobwise.agents.stack.deployed import DeployedController
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.agents.training.settle import deployed_by
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import judged_worths
from knobwise.envs.configurations.settings import BudgetConfig, RewardConfig
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.losses.settings import LossConfig

UTILITY = RewardConfig(kind="utility")
SHORT = OptimiserConfig(
    teacher_iterations=8,
    warmup_iterations=8,
    iterations=12,
    contexts=32,
    minibatch=16,
    epochs=2,
    evaluate_every=4,
)
HEADS = PolicyConfig(members=3, hidden=16)
TAUGHT = PolicyConfig(teacher=True, members=3, hidden=16, teacher_hidden=16)
POLICIES = {"one": PolicyConfig(hidden=32), "folds": HEADS, "taught": TAUGHT}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def watch(student: ControllerTrainer, inspect: Callable[[Any], object]) -> ControllerTrainer:
    """Show every batch to `inspect` before it is learned from."""
    learn = student._learn

    def learned(data: Any) -> Mapping[str, float]:
        inspect(data)
        return learn(data)

    student._learn = learned  # type: ignore[method-assign]
    return student


def trainer(
    table: ProfileTable, folder: Path | None = None, **settings: object
) -> ControllerTrainer:
    options = {"optimiser": SHORT, "reward": UTILITY, "policy": POLICIES["one"], **settings}
    return ControllerTrainer(table, table.split(), folder=folder, **options)  # type: ignore[arg-type]


def killed_at(student: ControllerTrainer, iteration: int) -> None:
    """Train until this iteration, which is lost."""
    learn = student._learn

    def learned(data: Any) -> Mapping[str, float]:
        if student.iteration == iteration:
            raise KeyboardInterrupt
        return learn(data)

    student._learn = learned  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        student.run()


def scored(student: ControllerTrainer, *scores: float) -> None:
    """Let its evaluations give these scores."""
    numbers = iter(scores)

    def judged() -> tuple[float, Mapping[str, float]]:
        student.scores_now = torch.zeros(len(student.judged_rows))
        return next(numbers), {}

    student._judge = judged  # type: ignore[method-assign]


@pytest.mark.parametrize("objective", ["exact", "sampled"])
@pytest.mark.parametrize("name", ["one", "taught"])
def test_learns_more_than_budget_aware_static(objective: str, name: str) -> None:
    table = small_table(1500, holes=0.2)
    policies = {
        "one": PolicyConfig(hidden=64),
        "taught": PolicyConfig(teacher=True, members=3, hidden=32, dropout=0.2),
    }
    optimiser = OptimiserConfig(
        teacher_iterations=40,
        warmup_iterations=60,
        iterations=200,
        contexts=128,
        minibatch=128,
        lr=1e-3,
    )
    loss = LossConfig(objective=objective)
    student = trainer(table, optimiser=optimiser, policy=policies[name], loss=loss)
    data = table, student.split.test, student.limits, student.env.rewards
    static = judge(static_of(table, student.split.train), *data).utility.mean()
    before = judge(student.agent, *data).utility.mean()
    after = judge(student.run(), *data).utility.mean()
    assert after > static + 0.02
    assert after > before + 0.05


@every_policy
def test_the_same_seed_gives_the_same_controller_and_another_seed_another(
    policy: PolicyConfig,
) -> None:
    about = {"policy": policy}
    first, second, other = (
        trainer(small_table(80), seed=seed, **about).run() for seed in (3, 3, 4)
    )
    assert equal_states(first, second)
    assert not equal_states(first.controller, other.controller)


def test_what_decides_is_what_was_trained_last() -> None:
    table = small_table(80)
    student = trainer(table)
    before = student.agent.decider.digest
    agent = student.run()
    assert agent is student.agent
    assert agent.decider.digest != before
    assert agent.decider.digest == DeployedController(agent.controller).decider.digest


def test_a_finished_seed_trains_no_further_and_another_profile_is_refused(tmp_path: Path) -> None:
    table = small_table(60)
    assert not trainer(table, tmp_path).resume(tmp_path / "last.pt")
    trainer(table, tmp_path).run()
    again = trainer(table, tmp_path)
    assert again.resume(tmp_path / "last.pt")
    assert again.finished
    with pytest.raises(InputError, match="another profile"):
        trainer(small_table(60, seed=1), tmp_path).resume(tmp_path / "last.pt")
    with pytest.raises(InputError, match="with another policy"):
        trainer(table, tmp_path, policy=HEADS).resume(tmp_path / "last.pt")


@pytest.mark.parametrize(
    ("name", "stages"), [("one", {"RCE"}), ("taught", {"Regression", "Imitation"})]
)
def test_logs_every_name_of_the_contract(name: str, stages: set[str]) -> None:
    lines = Lines()
    loss = LossConfig(kl_to_ref_coeff=0.1)
    trainer(small_table(60), log=lines, policy=POLICIES[name], loss=loss).run()
    parts = ("Reward", "Accuracy", "Latency")
    moments = [f"{part}_{moment}" for part in parts for moment in ("Mean", "Std")]
    both = ["Loss", *moments, "Budget_Violation_Rate"]
    wanted = {f"{part}/{name}" for part in ("Train", "Val") for name in both}
    others = ["KL", "Clip_Fraction", "ESS", "Entropy", "Zero_Advantage_Fraction"]
    others += ["Ratio_Mean", "Grad_Norm", "LR", *(f"{stage}_Loss" for stage in stages)]
    names = {name for _, metrics in lines for name in metrics}
    assert wanted | {f"Train/{name}" for name in others} <= names
    assert lines == sorted(lines, key=lambda line: line[0])


@pytest.mark.parametrize("name", POLICIES)
def test_the_first_step_of_grpo_is_on_policy_although_there_is_dropout(name: str) -> None:
    lines = Lines()
    optimiser = dataclasses.replace(SHORT, iterations=4, minibatch=32, epochs=1)
    policy = dataclasses.replace(POLICIES[name], dropout=0.5)
    loss = LossConfig(kl_to_ref_coeff=0.1)
    student = trainer(small_table(60), log=lines, optimiser=optimiser, policy=policy, loss=loss)
    student.run()
    begins = student.total - 4
    (first,) = [m for step, m in lines if step == begins and "Train/KL" in m]
    assert first["Train/KL"] == pytest.approx(0, abs=1e-6)
    assert first["Train/Ratio_Mean"] == pytest.approx(1, abs=1e-5)
    assert first["Train/Clip_Fraction"] == 0


def test_stops_early_and_keeps_the_best(tmp_path: Path) -> None:
    optimiser = OptimiserConfig(
        warmup_iterations=0, iterations=4000, contexts=16, minibatch=16, lr=0.03, patience=2
    )
    student = trainer(small_table(60), tmp_path, optimiser=optimiser)
    assert equal_states(student.run(), load_checkpoint(tmp_path / "best.pt").controller)
    assert student.iteration < 4000


# -- one stage after the other ---------------------------------------------------------------------


def test_a_stage_past_its_peak_gives_way_to_the_next() -> None:
    optimiser = dataclasses.replace(
        SHORT, teacher_iterations=32, warmup_iterations=20, warmup_patience=2, patience=2
    )
    student = trainer(small_table(80), optimiser=optimiser, policy=TAUGHT)
    # without bins, at 0, 4 … 28, the patience of a teacher is 6; with bins at 36, 40 … 60
    scores = [0.1, 0.9, 0.4, 0.3, 0.2, 0.2, 0.2, 0.2, 0.35, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3]
    # imitation at 68, 72 and 76, which begins anew; GRPO at 88, 92 and 96
    scored(student, *scores, 0.5, 0.4, 0.4, 0.6, 0.5, 0.5)
    names: dict[int, str] = {}
    watch(student, lambda data: names.update({student.iteration: student.stage.name}))
    student.run()
    assert list(names) == [*range(28), *range(32, 60), *range(64, 76), *range(84, 96)]
    stages = [names[i] for i in (27, 32, 59, 64, 75, 84)]
    assert stages == ["regression", *["regression with bins"] * 2, *["imitation"] * 2, "GRPO"]
    at = [iteration for iteration, _ in student.scores]
    before_grpo = [*range(0, 28, 4), *range(32, 60, 4), 64, 68, 72, 84]
    assert at == [*before_grpo, 88, 92, 96]
    assert (student.best["score"], student.best["iteration"]) == (0.6, 88)
    assert student._gained() == {"start": 0.4, "best": 0.6, "last": 0.5}


@pytest.mark.parametrize("stage", ["regression", "imitation"])
def test_a_stop_after_a_stage_that_ended_early_ends_as_without_it(
    stage: str, tmp_path: Path
) -> None:
    optimiser = dataclasses.replace(SHORT, teacher_iterations=40, warmup_iterations=16)
    begins = 80
    if stage == "imitation":
        changes = {"warmup_iterations": 100, "warmup_patience": 1, "warmup_lr": 0.05}
        optimiser = dataclasses.replace(optimiser, **changes)
        begins = 180
    students = []
    for name in "abb":
        student = trainer(small_table(80), tmp_path / name, optimiser=optimiser, policy=TAUGHT)
        if stage == "regression":
            for each in student.stages[:2]:
                each.patience = 1
        students.append(student)
    whole, first, again = students
    whole.run()
    save = first._save

    def saved(judged: bool) -> None:
        save(judged)
        if first.iteration == begins:
            assert first.scores[-2][0] < begins - 4, "the stage must end early for this test"
            raise KeyboardInterrupt

    first._save = saved  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.run()
    assert again.resume(tmp_path / "b" / "last.pt")
    again.run()
    assert equal_states(whole.agent, again.agent)
    assert again.scores == whole.scores


EXPERTS = dataclasses.replace(TAUGHT, members=2, experts=("ridge", "random_forest"), drift=0.3)
SAMPLED = LossConfig(objective="sampled", group_size=4)
STAGES = ("regression", "regression with bins", "imitation", "GRPO")


def in_four_stages(folder: Path, experts: bool) -> ControllerTrainer:
    policy = EXPERTS if experts else TAUGHT
    return trainer(small_table(60, holes=0.2), folder, policy=policy, loss=SAMPLED)


@pytest.fixture(scope="module", params=[False, True], ids=["network", "experts"])
def unstopped(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bool, ControllerTrainer, Path]:
    """Whether its teacher has experts, and learns of drift; a training that was not stopped; its
    folder."""
    folder = tmp_path_factory.mktemp("unstopped")
    student = in_four_stages(folder, request.param)
    student.run()
    return request.param, student, folder


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("iteration", [1, 6], ids=["just begun", "later"])
def test_killed_in_any_stage_it_ends_as_without(
    stage: str, iteration: int, unstopped: tuple[bool, ControllerTrainer, Path], tmp_path: Path
) -> None:
    experts, whole, folder = unstopped
    iteration += STAGES.index(stage) * 8
    first, again = (in_four_stages(tmp_path, experts) for _ in range(2))
    assert first._stage_and_start(iteration)[0].name == stage
    killed_at(first, iteration)
    assert again.resume(tmp_path / "last.pt")
    assert again.iteration == iteration - iteration % 4
    again.run()
    ends = [deployed_by(student, student.limits) for student in (whole, again)]
    assert equal_states(*ends)
    assert ends[0].settled.guard == ends[1].settled.guard
    assert ends[0].decider.digest == ends[1].decider.digest
    assert again.scores == whole.scores
    worths = [student.taught_by.teacher.held_out_worth for student in (whole, again)]
    assert worths[0] == worths[1]
    for name in ("best.pt", "last.pt"):
        kept = [load_checkpoint(place / name).controller for place in (folder, tmp_path)]
        assert equal_states(*kept)


def test_stopped_by_a_signal_where_the_heads_begin_it_ends_as_without(tmp_path: Path) -> None:
    """There nothing is kept yet, also where the checkpoint of the best teacher is lost."""
    students = [trainer(small_table(60), tmp_path / name, policy=TAUGHT) for name in "abb"]
    whole, first, again = students
    end = whole.run()
    learn = first._learn

    def learned(data: Any) -> Mapping[str, float]:
        out = learn(data)
        if first.iteration == 16:
            first.iteration += 1
            first._save(judged=False)
            raise KeyboardInterrupt
        return out

    first._learn = learned  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.run()
    assert first.best["state"] is None
    (tmp_path / "b" / "best.pt").unlink()
    assert again.resume(tmp_path / "b" / "last.pt")
    assert again.iteration == 17
    assert equal_states(again.run(), end)
    best = [load_checkpoint(tmp_path / name / "best.pt").controller for name in "ab"]
    assert equal_states(*best)


@pytest.mark.parametrize("name", ["one", "taught"])
def test_grpo_starts_from_the_end_of_the_warm_up(name: str) -> None:
    student = trainer(small_table(80), policy=POLICIES[name])
    start = copy.deepcopy(student.agent)
    # as if nothing later were as good
    student.best = {"score": 2.0, "iteration": 0, "state": start.state_dict()}
    moved = "controller.network.head.logits.bias"
    begin, began = student.stages[-1].begin, []

    def watched() -> None:
        end = copy.deepcopy(student.agent)
        assert not torch.equal(end.state_dict()[moved], start.state_dict()[moved])
        begin()
        began.append(student.iteration)
        assert equal_states(student.agent, end)
        assert equal_states(student.reference, end.controller)

    student.stages[-1].begin = watched
    student.run()
    assert began == [24 if name == "taught" else 8]


def test_imitation_starts_from_the_best_teacher_and_leaves_it_alone() -> None:
    student = trainer(small_table(80), policy=TAUGHT)
    # at 0, 4 … 36: the teacher was best at 12
    scored(student, 0.1, 0.2, 0.3, 0.5, 0.4, 0.1, 0.2, 0.1, 0.3, 0.2)
    kept: dict[int, Any] = {}
    watch(
        student, lambda data: kept.update({student.iteration: copy.deepcopy(student.agent.teacher)})
    )
    agent = student.run()
    assert agent.teacher is not None
    assert equal_states(kept[12], kept[16])
    assert not equal_states(kept[12], kept[15])
    for iteration in (20, 24, 35):
        assert equal_states(kept[iteration], kept[12])
    assert equal_states(agent.teacher, kept[12])
    # and from there on the heads are judged, whose best was of GRPO
    assert student.best["iteration"] == 32
    assert equal_states(student.taught_by.teacher.network, kept[12].network)


def test_the_reference_is_where_grpo_starts() -> None:
    student = trainer(small_table(80), policy=TAUGHT)
    student._evaluate()
    grpo = student.stages[-1]
    for p in student.agent.controller.parameters():
        p.data += 0.1
    assert not equal_states(student.agent.controller, student.reference)
    grpo.begin()
    grpo.prepare(0.7, True)
    assert equal_states(student.agent.controller, student.reference)
    assert student.behaviour.with_reference
    assert float(student.grpo.kl_to_ref_coeff) == pytest.approx(0.1)
    heads = trainer(small_table(80))
    assert float(heads.grpo.kl_to_ref_coeff) == 0
    heads.stages[1].prepare(0.7, False)
    assert not heads.behaviour.with_reference


@pytest.mark.parametrize("bent", [True, False])
def test_heads_are_taught_by_the_better_of_two_regressions_with_bins_and_without(
    bent: bool,
) -> None:
    """On one table the right configuration hangs on whether a feature is near 0, on the other on a
    sum of many."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(300, 1 if bent else 100, generator=generator)
    hard = features.abs() < 0.6
    if not bent:
        hard = features.sum(1, keepdim=True) > 0
    table = table_of(torch.cat([~hard, hard], 1).float(), torch.full((300, 2), 5.0), features)
    changes = {"teacher_iterations": 80, "warmup_iterations": 4, "iterations": 1}
    brief = dataclasses.replace(SHORT, **changes, contexts=128, minibatch=64, evaluate_every=8)
    policy = PolicyConfig(
        teacher=True, members=2, hidden=4, teacher_hidden=4, layers=1, teacher_dropout=0.0
    )
    student = trainer(table, policy=policy, optimiser=brief)
    agent = student.run()
    names = [stage.name for stage in student.stages]
    assert names == ["regression", "regression with bins", "imitation", "GRPO"]
    without = max(score for iteration, score in student.scores if iteration <= 80)
    with_bins = max(score for iteration, score in student.scores if 80 < iteration <= 160)
    assert agent.teacher is not None
    reads_bins = bool((agent.teacher.network.edges < BEYOND).any())
    assert reads_bins == (with_bins > without) == bent


def test_wide_tables_are_not_tried_with_bins() -> None:
    feature = torch.randn(30, WIDEST + 1, generator=torch.Generator().manual_seed(0))
    table = table_of(torch.ones(30, 2), torch.full((30, 2), 5.0), feature)
    student = trainer(table, policy=TAUGHT)
    assert [stage.name for stage in student.stages] == ["regression", "imitation", "GRPO"]
    assert student.agent.teacher is not None
    assert student.agent.teacher.network.edges.numel() == 0


def test_without_a_warm_up_there_is_no_teacher() -> None:
    optimiser = dataclasses.replace(SHORT, warmup_iterations=0)
    student = trainer(small_table(60), policy=TAUGHT, optimiser=optimiser)
    agent = student.run()
    assert student.total == 12
    assert agent.teacher is None
    assert deployed_by(student, student.limits).teacher is None


def test_a_warm_up_that_ends_early_ends_the_training_where_there_is_no_grpo() -> None:
    optimiser = dataclasses.replace(SHORT, warmup_iterations=20, warmup_patience=1, iterations=0)
    student = trainer(small_table(80, features=False), optimiser=optimiser, policy=HEADS)
    scored(student, 0.1, 0.5, 0.4)
    student.run()
    assert [iteration for iteration, _ in student.scores] == [0, 4, 8]
    assert student._gained() == {}


# -- rewards ---------------------------------------------------------------------------------------


@every_policy
def test_training_on_a_reward_function_is_judged_by_the_reward(
    policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = "def f(accuracy, latency_ms, budget_ms, knobs):\n    return -latency_ms\n"
    Path("aim_of_speed.py").write_text(code)
    reward = RewardConfig(kind="function", function="aim_of_speed:f")
    student = trainer(small_table(60), tmp_path, reward=reward, policy=policy)
    best = student.run()
    rows, rewards = student.judged_rows, []
    for limit in student.limits:
        chosen = student.held_out_log_probs(limit).argmax(-1, keepdim=True)
        rewards.append(student.env.rewards.chosen(rows, chosen, limit.expand(len(rows))))
    mean = float(torch.stack(rewards).mean())
    assert mean == pytest.approx(student.best["score"], rel=1e-5)
    assert equal_states(best, load_checkpoint(tmp_path / "best.pt").controller)
    # the guard compares utilities, which are not what it was trained for
    assert deployed_by(student, student.limits).settled.guard == []


@every_policy
def test_unprofiled_configurations_are_never_drawn(policy: PolicyConfig) -> None:
    table = small_table(80, holes=0.6)
    drawn: list[Tensor] = []
    student = trainer(table, loss=LossConfig(objective="sampled", group_size=5), policy=policy)

    def note(data: Any) -> None:
        drawn.append(table.mask[data["row"].unsqueeze(-1), data["configuration"]])

    watch(student, note).run()
    assert torch.stack(drawn).all()
    assert drawn[0].shape == (32, policy.members_trained, 5)


def test_under_a_mean_budget_worths_are_drawn_and_rewards_are_priced() -> None:
    lines = Lines()
    sense = BudgetConfig(sense="mean")
    student = trainer(small_table(60), policy=HEADS, budget=sense, log=lines)

    def priced(data: Any) -> None:
        rows, chosen, worth = data["row"], data["configuration"].squeeze(-1), data["worth_ms"]
        accuracy, ms = student.table.accuracy[rows, chosen], student.table.latency_ms[rows, chosen]
        torch.testing.assert_close(data["next", "reward"].squeeze(-1), accuracy - ms / worth)

    best = watch(student, priced).run()
    assert best.controller.limit_key == "worth_ms"
    assert torch.equal(student.limits, judged_worths(student.table))
    assert not lines.values("Train/Budget_Violation_Rate")
    rows, spent = torch.arange(60), []
    for worth in (1.0, 1e4):
        chosen = best.choose(arrays(student.table), np.full(60, worth))
        spent.append(float(student.table.latency_ms[rows, torch.from_numpy(chosen)].mean()))
    assert spent[0] < spent[1]


# -- networks side by side -------------------------------------------------------------------------


def photographed(samples: int = 90, holes: float = 0.3) -> ProfileTable:
    """Three samples of each image."""
    images = tuple(str(i // 3) for i in range(samples))
    return dataclasses.replace(small_table(samples, holes=holes), image_ids=images)


def test_every_sample_but_the_test_ones_is_held_out_of_one_network() -> None:
    student = trainer(photographed(), policy=HEADS, seed=4)
    known = torch.cat([student.split.train, student.split.validation])
    fitted, held_out = student.divide()
    assert sorted(torch.cat(held_out).tolist()) == sorted(known.tolist())
    for rows, hold in zip(fitted, held_out, strict=True):
        assert sorted([*rows.tolist(), *hold.tolist()]) == sorted(known.tolist())
        # images are kept together
        assert not set((rows // 3).tolist()) & set((hold // 3).tolist())
    assert student.judged_rows.tolist() == torch.cat(held_out).tolist()
    laid_out = student.held_out.flatten()[student.places]
    assert laid_out.tolist() == student.judged_rows.tolist()
    # the block [longest, M] that the networks judge side by side: column m holds what was held out
    # of m, then padding; the last network is not judged
    assert student.networks == student.held_out.shape[1] == 4
    for number, hold in enumerate(held_out):
        column = student.held_out[:, number]
        assert column[: len(hold)].tolist() == hold.tolist()
        assert set(column[len(hold) :].tolist()) <= {int(hold[-1])}
        mine = student.judged_rows[student.places % 4 == number]
        assert mine.tolist() == hold.tolist()
    assert not (student.places % 4 == 3).any()


def test_a_single_network_is_fitted_on_train_and_judged_on_validation() -> None:
    student = trainer(small_table(60), policy=PolicyConfig(hidden=16))
    assert torch.equal(student.fitted, student.split.train)
    assert torch.equal(student.judged_rows, student.split.validation)
    assert student.networks == 1


def test_networks_are_judged_on_what_was_held_out_of_them_by_hand() -> None:
    table = photographed()
    student = trainer(table, policy=HEADS)
    torch.manual_seed(0)
    for p in student.agent.parameters():
        p.data += 0.3 * torch.randn_like(p)
    total, count = 0.0, 0
    for number, hold in enumerate(student.divide()[1]):
        alone = DeployedController(member_of(student.agent.controller, number))
        for budget in student.limits.tolist():
            limits = np.full(len(hold), budget)
            chosen = alone.choose(arrays(table, hold), limits, table.mask[hold].numpy())
            at = hold, torch.from_numpy(chosen)
            total += float((table.accuracy[at] * (table.latency_ms[at] <= budget)).sum())
            count += len(hold)
    student._evaluate()
    assert student.best["score"] == pytest.approx(total / count, abs=1e-6)


@torch.no_grad()
def test_teachers_are_judged_on_what_was_held_out_of_them_by_hand() -> None:
    table = photographed()
    student = trainer(table, policy=TAUGHT)
    teacher = student.agent.teacher
    assert teacher is not None
    torch.manual_seed(0)
    for p in teacher.parameters():
        p.data += 0.3 * torch.randn_like(p)
    total, count = 0.0, 0
    for number, hold in enumerate(student.divide()[1]):
        x = student.all_features[hold]
        predicted = teacher.network(x.expand(3, -1, -1)).take(number).predicted()
        for budget in student.limits:
            score = predicted.score(budget.expand(len(hold)))
            chosen = score.masked_fill(~table.mask[hold], -torch.inf).argmax(1)
            met = table.latency_ms[hold, chosen] <= budget
            total += float((table.accuracy[hold, chosen] * met).sum())
            count += len(hold)
    student._evaluate()
    assert student.best["score"] == pytest.approx(total / count, abs=1e-6)


def test_a_budget_given_twice_counts_twice() -> None:
    table, lines = photographed(), Lines()
    about = {"policy": HEADS, "log": lines}
    student = trainer(table, budgets_ms=torch.tensor([8.0, 8.0, 15.0]), **about)
    alone = [trainer(table, budgets_ms=torch.tensor([ms]), **about) for ms in (8.0, 15.0)]
    (few, few_metrics), (many, many_metrics) = (each._judge() for each in alone)
    score, metrics = student._judge()
    assert score == pytest.approx((2 * few + many) / 3)
    mean = (2 * few_metrics["Loss"] + many_metrics["Loss"]) / 3
    assert metrics["Loss"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("policy", [HEADS, TAUGHT], ids=["folds", "taught"])
def test_contexts_of_a_network_are_never_those_held_out_of_it_and_the_last_one_has_all(
    policy: PolicyConfig,
) -> None:
    table = photographed()
    student = trainer(table, policy=policy)
    fitted, held_out = student.divide()
    rows: list[Tensor] = []
    watch(student, lambda data: rows.append(data["row"].clone())).run()
    for number in range(3):
        seen = set(torch.cat(rows)[:, number].tolist())
        assert not seen & set(held_out[number].tolist())
        assert seen == set(fitted[number].tolist())
    known = torch.cat([student.split.train, student.split.validation])
    assert set(torch.cat(rows)[:, 3].tolist()) == set(known.tolist())


def ends_of(table: ProfileTable, policy: PolicyConfig, limits: Tensor) -> list[ControllerTrainer]:
    """From one start, with and without the outcomes of the samples turned round that are held out
    of the second network, trained through all stages, without a choice among checkpoints."""
    trained = []
    for turned in (False, True):
        # the norm is that of all networks together
        optimiser = dataclasses.replace(SHORT, clip_grad=1e9)
        student = trainer(table, policy=policy, optimiser=optimiser, budgets_ms=limits)
        for stage in student.stages:
            stage.clip_grad = 1e9
        if turned:
            hold = student.divide()[1][1]
            for rewards in (student.env.rewards, student.free_rewards):
                rewards.accuracy = rewards.accuracy.clone()
                rewards.accuracy[hold] = 1 - rewards.accuracy[hold]
        stream = iter(student.collector)
        torch.manual_seed(0)
        for iteration in range(student.total):
            student.iteration = iteration
            student.iterate(stream)
        student.collector.shutdown()
        trained.append(student)
    return trained


@pytest.mark.parametrize("name", ["folds", "taught"])
def test_what_was_measured_of_a_fold_changes_every_network_but_that_of_the_fold(name: str) -> None:
    policy = dataclasses.replace(POLICIES[name], dropout=0.0, teacher_dropout=0.0)
    table = photographed(holes=0.0)
    # as the teacher starts at the means of its table, that is the same for both
    first, second = ends_of(table, policy, torch.tensor([8.0, 15.0]))
    networks = [
        [member_of(student.agent.controller, number) for number in range(4)]
        for student in (first, second)
    ]
    same = [equal_states(a, b) for a, b in zip(*networks, strict=True)]
    # the second, and not the last, which learns from all
    assert same == [False, True, False, False]
    if name == "taught":
        lessons = first.lessons, second.lessons
        assert torch.equal(lessons[0].x, lessons[1].x)
        known = [
            torch.equal(a, b) for a, b in zip(lessons[0].worths, lessons[1].worths, strict=True)
        ]
        assert known == [False, True, False, False]


def test_more_members_than_samples_are_refused() -> None:
    with pytest.raises(InputError, match=r"policy\.members=60: .* has only 48 samples"):
        trainer(small_table(60), policy=PolicyConfig(members=60))


# -- the rest --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        (OptimiserConfig, "schedule", "linear"),
        (OptimiserConfig, "minibatch", 0),
        (OptimiserConfig, "teacher_iterations", -1),
        (OptimiserConfig, "clip_grad", -1.0),
        (LossConfig, "advantage_std_floor", 0.0),
        (PolicyConfig, "budget_encoding", "tree"),
        (PolicyConfig, "sharpness", 0.0),
        (PolicyConfig, "teacher_dropout", 1.0),
        (PolicyConfig, "level", 1.0),
    ],
)
def test_bad_settings(group: Any, key: str, value: object) -> None:
    with pytest.raises(InputError, match=re.escape(f".{key}={value!r}")):
        group(**{key: value})


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"policy\.members=1: policy\.teacher=true needs at least 2"
    ):
        PolicyConfig(teacher=True)
    with pytest.raises(InputError, match=r"policy\.experts \(ridge\): need policy\.teacher=true"):
        PolicyConfig(members=2, experts=("ridge",))


def test_validation_is_on_the_budgets_asked_for_and_the_kl_is_logged_also_when_it_costs_nothing() -> (
    None
):
    lines = Lines()
    loss = LossConfig(kl_to_ref_coeff=0.0)
    trainer(small_table(60), log=lines, loss=loss, budgets_ms=torch.tensor([1e-3])).run()
    assert set(lines.values("Val/Utility")) == {0}
    assert min(m["Train/KL"] for step, m in lines if step > 8 and "Train/KL" in m) > 0


@pytest.mark.parametrize("features", [True, False])
@pytest.mark.parametrize("name", ["one", "taught"])
def test_the_random_state_of_the_caller_is_left_alone(features: bool, name: str) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    trainer(small_table(60, features=features), policy=POLICIES[name]).run()
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("objective", ["exact", "sampled"])
@pytest.mark.parametrize("name", ["one", "taught"])
def test_trains_and_resumes_on_a_gpu(objective: str, name: str, tmp_path: Path) -> None:
    loss = LossConfig(objective=objective)
    settings: dict[str, Any] = {"device": "cuda", "loss": loss, "policy": POLICIES[name]}
    first, again = (trainer(small_table(60), tmp_path, **settings) for _ in range(2))
    assert first.run().configurations.device.type == "cuda"
    assert again.resume(tmp_path / "last.pt")
