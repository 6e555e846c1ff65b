from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from helpers import small_table

from knobwise.agents.baselines import BudgetAwareStatic
from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.evaluation import judge
from knobwise.agents.settings import LossConfig, OptimiserConfig, PolicyConfig
from knobwise.agents.trainer import Trainer
from knobwise.envs.errors import InputError
from knobwise.envs.reward import RewardConfig
from knobwise.envs.table import ProfileTable

UTILITY = RewardConfig(kind="utility")
SHORT = OptimiserConfig(warmup_iterations=8, iterations=12, contexts=32, minibatch=16, epochs=2, evaluate_every=4)
NAMES = ["Reward_Mean", "Reward_Std", "Accuracy_Mean", "Accuracy_Std", "Latency_Mean", "Latency_Std"]


class Lines:
    """A log that keeps what it gets."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.lines.append((step, dict(metrics)))


def trainer(table: ProfileTable, folder: Path | None = None, **settings: object) -> Trainer:
    options = {"optimiser": SHORT, "reward": UTILITY, "policy": PolicyConfig(hidden=32), **settings}
    return Trainer(table, table.split(), folder=folder, **options)  # type: ignore[arg-type]


def equal_states(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("objective", ["exact", "sampled"])
def test_learns_more_than_budget_aware_static(objective: str) -> None:
    table = small_table(1500, holes=0.2)
    optimiser = OptimiserConfig(warmup_iterations=60, iterations=200, contexts=128, minibatch=128, lr=1e-3)
    policy = PolicyConfig(head="joint", hidden=64)
    student = trainer(table, optimiser=optimiser, policy=policy, loss=LossConfig(objective=objective))
    before = judge(student.controller, table, student.split.test, student.budgets, student.env.rewards)
    after = judge(student.run(), table, student.split.test, student.budgets, student.env.rewards)
    static = BudgetAwareStatic(table, student.split.train)
    baseline = judge(static, table, student.split.test, student.budgets, student.env.rewards)
    assert after.utility.mean() > baseline.utility.mean() + 0.02
    assert after.utility.mean() > before.utility.mean() + 0.05


def test_the_same_seed_gives_the_same_controller_and_another_seed_another() -> None:
    table = small_table(80)
    first, second, other = (trainer(table, seed=seed) for seed in (3, 3, 4))
    for each in (first, second, other):
        each.run()
    assert equal_states(first.controller, second.controller)
    assert not equal_states(first.controller, other.controller)


@pytest.mark.parametrize(("objective", "stop"), itertools.product(["exact", "sampled"], [2, 9, 17]))
def test_a_run_that_was_stopped_ends_bit_for_bit_like_one_that_was_not(
    tmp_path: Path, objective: str, stop: int
) -> None:
    table = small_table(80, holes=0.2)
    loss = LossConfig(objective=objective, kl_to_ref_coeff=0.01, kl_band=(0.01, 0.1))
    whole = trainer(table, tmp_path / "whole", loss=loss)
    whole.run()

    stopped = trainer(table, tmp_path / "stopped", loss=loss)
    learn = stopped._learn

    def killed(data):  # type: ignore[no-untyped-def]
        if stopped.iteration == stop:
            raise KeyboardInterrupt
        return learn(data)

    stopped._learn = killed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    resumed = trainer(table, tmp_path / "stopped", loss=loss)
    assert resumed.resume(tmp_path / "stopped" / "last.pt")
    assert resumed.iteration == stop // 4 * 4
    resumed.run()
    assert equal_states(whole.controller, resumed.controller)
    last = [torch.load(tmp_path / name / "last.pt", weights_only=True) for name in ("whole", "stopped")]
    for name, value in last[0]["state"].items():
        assert torch.equal(value, last[1]["state"][name])
    assert last[0]["extra"]["training"]["iteration"] == last[1]["extra"]["training"]["iteration"]


def test_resuming_a_finished_seed_trains_no_further(tmp_path: Path) -> None:
    table = small_table(60)
    trainer(table, tmp_path).run()
    again = trainer(table, tmp_path)
    assert again.resume(tmp_path / "last.pt")
    assert again.finished


def test_resuming_on_another_profile_is_refused(tmp_path: Path) -> None:
    trainer(small_table(60), tmp_path).run()
    with pytest.raises(InputError, match="another profile"):
        trainer(small_table(60, seed=1), tmp_path).resume(tmp_path / "last.pt")


def test_nothing_to_resume(tmp_path: Path) -> None:
    assert not trainer(small_table(60), tmp_path).resume(tmp_path / "last.pt")


def test_logs_every_name_of_the_contract() -> None:
    lines = Lines()
    trainer(small_table(60), log=lines, loss=LossConfig(kl_to_ref_coeff=0.1)).run()
    seen = {name for _, metrics in lines.lines for name in metrics}
    wanted = {f"{part}/{name}" for part in ("Train", "Val") for name in ["Loss", *NAMES, "Budget_Violation_Rate"]}
    own = ["KL", "Clip_Fraction", "ESS", "Entropy", "Zero_Advantage_Fraction", "Ratio_Mean", "Grad_Norm", "LR"]
    assert wanted | {f"Train/{name}" for name in own} <= seen
    steps = [step for step, _ in lines.lines]
    assert steps == sorted(steps)


def test_the_first_step_of_grpo_is_on_policy_although_there_is_dropout() -> None:
    lines = Lines()
    optimiser = OptimiserConfig(warmup_iterations=4, iterations=4, contexts=32, minibatch=32, evaluate_every=4)
    policy = PolicyConfig(hidden=32, dropout=0.5)
    trainer(small_table(60), log=lines, optimiser=optimiser, policy=policy, loss=LossConfig(kl_to_ref_coeff=0.1)).run()
    first = next(m for step, m in lines.lines if step == 4 and "Train/KL" in m)
    assert first["Train/KL"] == pytest.approx(0, abs=1e-6)
    assert first["Train/Ratio_Mean"] == pytest.approx(1, abs=1e-5)
    assert first["Train/Clip_Fraction"] == 0


def test_stops_early_and_keeps_the_best(tmp_path: Path) -> None:
    optimiser = OptimiserConfig(warmup_iterations=0, iterations=4000, contexts=16, minibatch=16, lr=0.03, patience=2)
    student = trainer(small_table(60), tmp_path, optimiser=optimiser)
    best = student.run()
    assert student.iteration < 4000
    assert equal_states(load_checkpoint(tmp_path / "best.pt").controller, best)


def test_unprofiled_configurations_are_never_drawn() -> None:
    table = small_table(80, holes=0.6)
    drawn = []
    student = trainer(table, loss=LossConfig(objective="sampled", group_size=5))
    learn = student._learn

    def watch(data):  # type: ignore[no-untyped-def]
        drawn.append(table.mask[data["row"][:, None], table.find(data["action"])])
        return learn(data)

    student._learn = watch  # type: ignore[method-assign]
    student.run()
    assert torch.stack(drawn).all()
    assert drawn[0].shape == (32, 5)


def test_a_profile_without_features_trains() -> None:
    trainer(small_table(60, features=False)).run()


def test_bad_settings() -> None:
    with pytest.raises(InputError, match="schedule"):
        OptimiserConfig(schedule="linear")
    with pytest.raises(InputError, match="minibatch"):
        OptimiserConfig(minibatch=0)
    with pytest.raises(InputError, match="clip_grad"):
        OptimiserConfig(clip_grad=-1.0)
    with pytest.raises(InputError, match="kl_band"):
        LossConfig(kl_band=(0.2, 0.1))
    with pytest.raises(InputError, match="std_floor"):
        LossConfig(advantage_std_floor=0.0)
    with pytest.raises(InputError, match="head"):
        trainer(small_table(60), policy=PolicyConfig(head="tree"))


def test_validation_is_on_the_budgets_asked_for() -> None:
    lines = Lines()
    trainer(small_table(60), log=lines, budgets_ms=torch.tensor([1e-3])).run()
    assert all(m["Val/Utility"] == 0 for _, m in lines.lines if "Val/Utility" in m)


def test_kl_to_the_warmed_up_policy_is_logged_also_when_it_costs_nothing() -> None:
    lines = Lines()
    trainer(small_table(60), log=lines, loss=LossConfig(kl_to_ref_coeff=0.0)).run()
    after = [m["Train/KL"] for step, m in lines.lines if step > 8 and "Train/KL" in m]
    assert min(after) > 0


def test_the_random_state_of_the_caller_is_left_alone() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    trainer(small_table(60)).run()
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_trains_and_resumes_on_a_gpu(tmp_path: Path) -> None:
    table = small_table(60)
    first = trainer(table, tmp_path, device="cuda", loss=LossConfig(objective="sampled"))
    first.run()
    assert first.controller.configurations.device.type == "cuda"
    assert trainer(table, tmp_path, device="cuda", loss=LossConfig(objective="sampled")).resume(tmp_path / "last.pt")
