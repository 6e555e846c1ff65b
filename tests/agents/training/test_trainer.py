from __future__ import annotations

import copy
import dataclasses
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Lines, blocks, equal_states, member_of, small_table, table_of

from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.controller.networks import WIDEST
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.judging.baselines import BudgetAwareStatic
from knobwise.agents.judging.evaluation import judge
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import judged_worths
from knobwise.envs.configurations.settings import BudgetConfig, RewardConfig
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.losses.settings import LossConfig

UTILITY = RewardConfig(kind="utility")
SHORT = OptimiserConfig(warmup_iterations=8, iterations=12, contexts=32, minibatch=16, epochs=2, evaluate_every=4)
ENSEMBLE = PolicyConfig(structure="utility", members=3, hidden=16)


def watch(student: ControllerTrainer, inspect: Callable[[Any], object]) -> ControllerTrainer:
    """Show every batch to `inspect` before it is learned from."""
    learn = student._learn

    def learned(data: Any) -> Mapping[str, float]:
        inspect(data)
        return learn(data)

    student._learn = learned  # type: ignore[method-assign]
    return student


def trainer(table: ProfileTable, folder: Path | None = None, **settings: object) -> ControllerTrainer:
    options = {"optimiser": SHORT, "reward": UTILITY, "policy": PolicyConfig(hidden=32), **settings}
    return ControllerTrainer(table, table.split(), folder=folder, **options)


@pytest.mark.parametrize("objective", ["exact", "sampled"])
@pytest.mark.parametrize(
    "policy",
    [PolicyConfig(hidden=64), PolicyConfig(structure="utility", members=3, hidden=32, dropout=0.2)],
    ids=["independent", "ensemble"],
)
def test_learns_more_than_budget_aware_static(objective: str, policy: PolicyConfig) -> None:
    table = small_table(1500, holes=0.2)
    optimiser = OptimiserConfig(warmup_iterations=60, iterations=200, contexts=128, minibatch=128, lr=1e-3)
    student = trainer(table, optimiser=optimiser, policy=policy, loss=LossConfig(objective=objective))
    data = table, student.split.test, student.limits, student.env.rewards
    baseline = BudgetAwareStatic(table, student.split.train)
    before, static = (judge(policy, *data).utility.mean() for policy in (student.agent, baseline))
    after = judge(student.run(), *data).utility.mean()
    assert after > static + 0.02
    assert after > before + 0.05


def test_the_same_seed_gives_the_same_controller_and_another_seed_another() -> None:
    first, second, other = (trainer(small_table(80), seed=seed).run() for seed in (3, 3, 4))
    assert equal_states(first, second)
    assert not equal_states(first, other)


def test_a_finished_seed_trains_no_further_and_another_profile_is_refused(tmp_path: Path) -> None:
    table = small_table(60)
    assert not trainer(table, tmp_path).resume(tmp_path / "last.pt")
    trainer(table, tmp_path).run()
    again = trainer(table, tmp_path)
    assert again.resume(tmp_path / "last.pt")
    assert again.finished
    with pytest.raises(InputError, match="another profile"):
        trainer(small_table(60, seed=1), tmp_path).resume(tmp_path / "last.pt")


def test_logs_every_name_of_the_contract() -> None:
    lines = Lines()
    trainer(small_table(60), log=lines, loss=LossConfig(kl_to_ref_coeff=0.1)).run()
    moments = [f"{name}_{moment}" for name in ("Reward", "Accuracy", "Latency") for moment in ("Mean", "Std")]
    wanted = {f"{part}/{name}" for part in ("Train", "Val") for name in ["Loss", *moments, "Budget_Violation_Rate"]}
    others = ["KL", "Clip_Fraction", "ESS", "Entropy", "Zero_Advantage_Fraction", "Ratio_Mean", "Grad_Norm", "LR"]
    assert wanted | {f"Train/{name}" for name in others} <= {name for _, metrics in lines for name in metrics}
    assert lines == sorted(lines, key=lambda line: line[0])


def test_the_first_step_of_grpo_is_on_policy_although_there_is_dropout() -> None:
    lines = Lines()
    optimiser = OptimiserConfig(warmup_iterations=4, iterations=4, contexts=32, minibatch=32, evaluate_every=4)
    policy = PolicyConfig(hidden=32, dropout=0.5)
    trainer(small_table(60), log=lines, optimiser=optimiser, policy=policy, loss=LossConfig(kl_to_ref_coeff=0.1)).run()
    first = next(m for step, m in lines if step == 4 and "Train/KL" in m)
    assert first["Train/KL"] == pytest.approx(0, abs=1e-6)
    assert first["Train/Ratio_Mean"] == pytest.approx(1, abs=1e-5)
    assert first["Train/Clip_Fraction"] == 0


def test_stops_early_and_keeps_the_best(tmp_path: Path) -> None:
    optimiser = OptimiserConfig(warmup_iterations=0, iterations=4000, contexts=16, minibatch=16, lr=0.03, patience=2)
    student = trainer(small_table(60), tmp_path, optimiser=optimiser)
    assert equal_states(student.run(), load_checkpoint(tmp_path / "best.pt").controller)
    assert student.iteration < 4000


def test_a_regression_past_its_peak_gives_way_to_the_next_stage() -> None:
    optimiser = dataclasses.replace(SHORT, warmup_iterations=20, warmup_patience=2, patience=2)
    student = trainer(small_table(80), optimiser=optimiser, policy=ENSEMBLE)
    # at 0, 4, 8, 12 without bins; at 24, 28, 32, 36 with bins; at 44, 48 and 52 of GRPO
    scores = iter([0.1, 0.5, 0.4, 0.3, 0.2, 0.35, 0.3, 0.3, 0.6, 0.5, 0.5])
    student._judge = lambda: (next(scores), {})  # type: ignore[method-assign]
    names: dict[int, str] = {}
    watch(student, lambda data: names.update({student.iteration: student.stage.name}))
    student.run()
    assert list(names) == [*range(12), *range(20, 36), *range(40, 52)]
    assert [names[i] for i in (11, 20, 35, 40)] == ["regression", *["regression with bins"] * 2, "GRPO"]
    at = [iteration for iteration, _ in student.scores]
    assert at == [0, 4, 8, 20, 24, 28, 32, 40, 44, 48, 52]
    assert student._gained() == {"start": 0.5, "best": 0.6, "last": 0.5}


def test_a_stop_after_a_regression_that_ended_early_ends_as_without_it(tmp_path: Path) -> None:
    optimiser = dataclasses.replace(SHORT, warmup_iterations=400, warmup_patience=1, warmup_lr=0.03)
    whole, first, again = (
        trainer(small_table(80), tmp_path / name, optimiser=optimiser, policy=ENSEMBLE) for name in "abb"
    )
    whole.run()
    save = first._save

    def saved(judged: bool) -> None:
        save(judged)
        if first.iteration == 400:
            assert first.scores[-2][0] < 396, "the regression must end early for this test"
            raise KeyboardInterrupt

    first._save = saved  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.run()
    assert again.resume(tmp_path / "b" / "last.pt")
    again.run()
    assert equal_states(whole.agent, again.agent)
    assert again.scores == whole.scores


def test_after_evaluations_below_the_best_grpo_goes_back_to_the_best_and_learns_half_as_fast() -> None:
    optimiser = dataclasses.replace(SHORT, iterations=24, patience=0, retreat=2, schedule="constant", lr=1e-3)
    student = trainer(small_table(80), optimiser=optimiser, policy=ENSEMBLE)
    # at 0, 4 … 40: regression, from 8 on with bins, GRPO from 16 on
    scores = iter([0.1, 0.2, 0.3, 0.35, 0.5, 0.6, 0.4, 0.5, 0.7, 0.3, 0.3])
    student._judge = lambda: (next(scores), {})  # type: ignore[method-assign]
    rates: dict[int, float] = {}
    went_back = []
    watch(student, lambda data: rates.update({student.iteration: student._learning_rate()}))
    load = student.agent.load_state_dict

    def loaded(state: Any) -> object:
        went_back.append((student.iteration, student.best["iteration"]))
        return load(state)

    student.agent.load_state_dict = loaded
    student.run()
    # 8, 16: where bins and GRPO begin; 28: .4 and .5 are below .6; 40: the end
    assert went_back == [(8, 8), (16, 16), (28, 20), (40, 32)]
    assert {iteration: rates[iteration] for iteration in (16, 27, 28, 39)} == {16: 1e-3, 27: 1e-3, 28: 5e-4, 39: 5e-4}
    assert student._gained() == {"start": 0.5, "best": 0.7, "last": 0.3}


def test_the_reference_is_as_sharp_as_the_policy() -> None:
    student = trainer(small_table(80), policy=ENSEMBLE)
    student._evaluate()
    grpo = student.stages[-1]
    grpo.begin()
    grpo.prepare(0.7, True)
    assert student.agent.network.sharpness > 20
    assert equal_states(student.agent, student.reference)
    assert student.behaviour.with_reference
    assert float(student.grpo.kl_to_ref_coeff) == pytest.approx(0.02)
    heads = trainer(small_table(80))
    assert float(heads.grpo.kl_to_ref_coeff) == 0
    heads.stages[1].prepare(0.7, False)
    assert not heads.behaviour.with_reference


def test_a_stop_after_going_back_ends_as_without_it(tmp_path: Path) -> None:
    optimiser = dataclasses.replace(SHORT, iterations=40, lr=0.01, retreat=1)
    whole, first, again = (
        trainer(small_table(80), tmp_path / name, optimiser=optimiser, policy=ENSEMBLE) for name in "abb"
    )
    whole.run()
    assert whole.slower < 1
    save = first._save

    def saved(judged: bool) -> None:
        save(judged)
        if first.slower < 1:
            raise KeyboardInterrupt

    first._save = saved  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.run()
    assert again.resume(tmp_path / "b" / "last.pt")
    assert again.slower < 1
    again.run()
    assert equal_states(whole.agent, again.agent)
    assert again.scores == whole.scores


@pytest.mark.parametrize("policy", [PolicyConfig(hidden=32), ENSEMBLE], ids=["independent", "ensemble"])
def test_training_on_a_reward_function_is_judged_by_the_reward(
    policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("aim_of_speed.py").write_text("def f(accuracy, latency_ms, budget_ms, knobs):\n    return -latency_ms\n")
    reward = RewardConfig(kind="function", function="aim_of_speed:f")
    student = trainer(small_table(60), tmp_path, reward=reward, policy=policy)
    best = student.run()
    judged = judge(student, student.table, student.judged_rows, student.limits, student.env.rewards)
    assert float(judged.reward.mean()) == pytest.approx(student.best["score"], rel=1e-5)
    assert equal_states(best, load_checkpoint(tmp_path / "best.pt").controller)


@pytest.mark.parametrize("policy", [PolicyConfig(hidden=32), ENSEMBLE], ids=["one", "ensemble"])
def test_unprofiled_configurations_are_never_drawn(policy: PolicyConfig) -> None:
    table = small_table(80, holes=0.6)
    drawn: list[torch.Tensor] = []
    student = trainer(table, loss=LossConfig(objective="sampled", group_size=5), policy=policy)
    watch(student, lambda data: drawn.append(table.mask[data["row"].unsqueeze(-1), data["configuration"]])).run()
    assert torch.stack(drawn).all()
    assert drawn[0].shape == (32, policy.members, 5)


# -- an ensemble -------------------------------------------------------------------------------------------------------


def photographed(samples: int = 90, holes: float = 0.3) -> ProfileTable:
    """Three samples of each image."""
    return dataclasses.replace(small_table(samples, holes=holes), image_ids=tuple(str(i // 3) for i in range(samples)))


def test_every_sample_but_the_test_ones_is_held_out_of_one_member() -> None:
    student = trainer(photographed(), policy=ENSEMBLE, seed=4)
    known = torch.cat([student.split.train, student.split.validation])
    fitted, held_out = student.divide()
    assert sorted(torch.cat(held_out).tolist()) == sorted(known.tolist())
    for rows, hold in zip(fitted, held_out, strict=True):
        assert sorted([*rows.tolist(), *hold.tolist()]) == sorted(known.tolist())
        assert not set((rows // 3).tolist()) & set((hold // 3).tolist())  # images are kept together
    assert student.judged_rows.tolist() == torch.cat(held_out).tolist()
    assert student.held_out.flatten()[student.places].tolist() == student.judged_rows.tolist()
    # the block [longest, M] that the members judge side by side: column m holds what was held out of m, then padding
    for number, hold in enumerate(held_out):
        column = student.held_out[:, number]
        assert column[: len(hold)].tolist() == hold.tolist()
        assert set(column[len(hold) :].tolist()) <= {int(hold[-1])}
        assert student.judged_rows[student.places % 3 == number].tolist() == hold.tolist()


def test_one_member_is_fitted_on_train_and_judged_on_validation() -> None:
    student = trainer(small_table(60), policy=PolicyConfig(structure="utility", hidden=16))
    assert torch.equal(student.fitted, student.split.train)
    assert torch.equal(student.judged_rows, student.split.validation)


def test_members_are_judged_on_what_was_held_out_of_them_by_hand() -> None:
    table = photographed()
    student = trainer(table, policy=ENSEMBLE)
    torch.manual_seed(0)
    for p in student.agent.parameters():
        p.data += 0.3 * torch.randn_like(p)
    total, count = 0.0, 0
    for number, hold in enumerate(student.divide()[1]):
        member = member_of(student.agent, number)
        for budget in student.limits:
            chosen = member.choose(blocks(table, hold), budget.expand(len(hold)), table.mask[hold])
            total += float((table.accuracy[hold, chosen] * (table.latency_ms[hold, chosen] <= budget)).sum())
            count += len(hold)
    student._evaluate()
    assert student.best["score"] == pytest.approx(total / count, abs=1e-6)


def test_a_budget_given_twice_counts_twice() -> None:
    table, lines = photographed(), Lines()
    student = trainer(table, policy=ENSEMBLE, budgets_ms=torch.tensor([8.0, 8.0, 15.0]), log=lines)
    alone = [trainer(table, policy=ENSEMBLE, budgets_ms=torch.tensor([ms]), log=Lines()) for ms in (8.0, 15.0)]
    (few, few_metrics), (many, many_metrics) = (each._judge() for each in alone)
    score, metrics = student._judge()
    assert score == pytest.approx((2 * few + many) / 3)
    assert metrics["Loss"] == pytest.approx((2 * few_metrics["Loss"] + many_metrics["Loss"]) / 3, rel=1e-5)


def test_contexts_of_a_member_are_never_those_held_out_of_it() -> None:
    table = photographed()
    student = trainer(table, policy=ENSEMBLE)
    fitted, held_out = student.divide()
    rows: list[torch.Tensor] = []
    watch(student, lambda data: rows.append(data["row"].clone())).run()
    for number in range(3):
        seen = set(torch.cat(rows)[:, number].tolist())
        assert not seen & set(held_out[number].tolist())
        assert seen == set(fitted[number].tolist())


def test_a_sample_is_learned_from_by_no_member_that_it_is_held_out_of() -> None:
    # from one start, with and without one sample's outcomes turned round: the members that it is held out of end alike
    table = photographed(holes=0.0)
    ends = []
    optimiser = dataclasses.replace(SHORT, clip_grad=1e9)  # the norm is that of all members together
    for turned in (False, True):
        student = trainer(table, policy=dataclasses.replace(ENSEMBLE, dropout=0.0), optimiser=optimiser)
        row = int(student.divide()[1][1][0])  # held out of the second member
        if turned:
            student.env.rewards.accuracy = student.env.rewards.accuracy.clone()
            student.env.rewards.accuracy[row] = 1 - student.env.rewards.accuracy[row]
        stream = iter(student.collector)
        torch.manual_seed(0)
        for _ in range(12):  # of the warm-up and of GRPO
            student.iterate(stream)
            student.iteration += 1
        ends.append([member_of(student.agent, number) for number in range(3)])
    same = [equal_states(a, b) for a, b in zip(*ends, strict=True)]
    assert same == [False, True, False]


def test_more_members_than_samples_are_refused() -> None:
    with pytest.raises(InputError, match=r"policy\.members=60: .* has only 48 samples"):
        trainer(small_table(60), policy=PolicyConfig(structure="utility", members=60))


def test_under_a_mean_budget_worths_are_drawn_and_rewards_are_priced() -> None:
    lines = Lines()
    student = trainer(small_table(60), policy=ENSEMBLE, budget=BudgetConfig(sense="mean"), log=lines)

    def priced(data: Any) -> None:
        rows, chosen, worth = data["row"], data["configuration"].squeeze(-1), data["worth_ms"]
        wanted = student.table.accuracy[rows, chosen] - student.table.latency_ms[rows, chosen] / worth
        torch.testing.assert_close(data["next", "reward"].squeeze(-1), wanted)

    best = watch(student, priced).run()
    assert best.limit_key == "worth_ms"
    assert torch.equal(student.limits, judged_worths(student.table))
    assert not lines.values("Train/Budget_Violation_Rate")
    cheap, dear = (best.choose(student.table.features, torch.full((60,), worth)) for worth in (1.0, 1e4))
    rows = torch.arange(60)
    assert student.table.latency_ms[rows, cheap].mean() < student.table.latency_ms[rows, dear].mean()


@pytest.mark.parametrize("structure", ["independent", "utility"])
def test_grpo_starts_from_the_best_of_the_regression_and_from_the_end_of_rce(structure: str) -> None:
    student = trainer(small_table(80), policy=PolicyConfig(structure=structure, hidden=16))
    regresses = structure == "utility"
    moved = "network.outcome_head.bias" if regresses else "network.head.logits.bias"
    start = copy.deepcopy(student.agent)
    student.best = {"score": 2.0, "iteration": 0, "state": start.state_dict()}  # as if nothing later were as good
    begin, began = student.stages[-1].begin, []

    def watched() -> None:
        end = copy.deepcopy(student.agent)
        assert not torch.equal(end.state_dict()[moved], start.state_dict()[moved])
        begin()
        began.append(student.iteration)
        for network in (student.agent, student.reference):
            assert equal_states(network, start if regresses else end)

    student.stages[-1].begin = watched
    student.run()
    assert began == [16 if regresses else 8]


@pytest.mark.parametrize("bent", [True, False])
def test_grpo_goes_on_from_the_better_of_two_regressions_with_bins_and_without(bent: bool) -> None:
    """On one table the right configuration hangs on whether a feature is near 0, on the other on a sum of many."""
    features = torch.randn(300, 1 if bent else 100, generator=torch.Generator().manual_seed(0))
    hard = (features.abs() < 0.6) if bent else features.sum(1, keepdim=True) > 0
    table = table_of(torch.cat([~hard, hard], 1).float(), torch.full((300, 2), 5.0), features)
    brief = dataclasses.replace(SHORT, warmup_iterations=40, iterations=1, contexts=128, warmup_lr=1e-2)
    policy = PolicyConfig(structure="utility", hidden=4, layers=1, dropout=0.0)
    student = trainer(table, policy=policy, optimiser=brief)
    student.run()
    names = [stage.name for stage in student.stages]
    assert names == ["regression", "regression with bins", "GRPO"]
    without = max(score for iteration, score in student.scores if iteration <= 40)
    with_bins = max(score for iteration, score in student.scores if 40 < iteration <= 80)
    assert student.agent.network.reads_bins == (with_bins > without) == bent


def test_wide_tables_are_not_tried_with_bins() -> None:
    feature = torch.randn(30, WIDEST + 1, generator=torch.Generator().manual_seed(0))
    table = table_of(torch.ones(30, 2), torch.full((30, 2), 5.0), feature)
    student = trainer(table, policy=PolicyConfig(structure="utility", hidden=4))
    assert [stage.name for stage in student.stages] == ["regression", "GRPO"]
    assert not student.agent.network.reads_bins


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        (OptimiserConfig, "schedule", "linear"),
        (OptimiserConfig, "minibatch", 0),
        (OptimiserConfig, "clip_grad", -1.0),
        (LossConfig, "advantage_std_floor", 0.0),
        (PolicyConfig, "structure", "tree"),
    ],
)
def test_bad_settings(group: Any, key: str, value: object) -> None:
    with pytest.raises(InputError, match=re.escape(f".{key}={value!r}")):
        group(**{key: value})


def test_validation_is_on_the_budgets_asked_for_and_the_kl_is_logged_also_when_it_costs_nothing() -> None:
    lines = Lines()
    loss = LossConfig(kl_to_ref_coeff=0.0)
    trainer(small_table(60), log=lines, loss=loss, budgets_ms=torch.tensor([1e-3])).run()
    assert set(lines.values("Val/Utility")) == {0}
    assert min(m["Train/KL"] for step, m in lines if step > 8 and "Train/KL" in m) > 0


@pytest.mark.parametrize("features", [True, False])
def test_the_random_state_of_the_caller_is_left_alone(features: bool) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    trainer(small_table(60, features=features)).run()
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("objective", ["exact", "sampled"])
@pytest.mark.parametrize("policy", [PolicyConfig(hidden=32), ENSEMBLE], ids=["independent", "ensemble"])
def test_trains_and_resumes_on_a_gpu(objective: str, policy: PolicyConfig, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": "cuda", "loss": LossConfig(objective=objective), "policy": policy}
    first, again = (trainer(small_table(60), tmp_path, **settings) for _ in range(2))
    assert first.run().configurations.device.type == "cuda"
    assert again.resume(tmp_path / "last.pt")


def test_a_regression_that_ends_early_ends_the_training_where_there_is_no_grpo() -> None:
    optimiser = dataclasses.replace(SHORT, warmup_iterations=20, warmup_patience=1, iterations=0)
    student = trainer(small_table(80, features=False), optimiser=optimiser, policy=ENSEMBLE)
    scores = iter([0.1, 0.5, 0.4])
    student._judge = lambda: (next(scores), {})  # type: ignore[method-assign]
    student.run()
    assert [iteration for iteration, _ in student.scores] == [0, 4, 8]
    assert student._gained() == {}
