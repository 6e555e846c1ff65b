"""results.json of controllers: what was chosen, rows by hand, mean budgets end to end, costs that
are no times."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import polars as pl
import pytest
import torch
from commands import OPTIMISER, TABLE, Capture, mistake, write_table
from helpers import TAUGHT, Always, arrays, deployed, small_table, table_of
from ruled import Array, Features, Ruled, ruled_at_means

from knobwise.__main__ import main
from knobwise.agents.checkpoint import Loaded, load_checkpoint, save_checkpoint
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.judging.baselines import Oracle, static_of
from knobwise.agents.predictors.experts import Measured, fit_experts
from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.agents.stack.deployed import DeployedController
from knobwise.agents.stack.prices import StaticMix, mean_budgets
from knobwise.envs.configurations.budgets import default_budgets, judged_worths
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import RewardConfig
from knobwise.envs.readers.long_table import long_frame, write_features, write_long_table
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.report.report import verdict
from knobwise.experiments.results.controllers import (
    held_out_choices,
    judge_deadlines,
    judge_mean_budgets,
)
from knobwise.experiments.results.equal_latency import Reference
from knobwise.experiments.results.gains import gain_on_held_out
from knobwise.experiments.results.reliability import expected_in_time, reliability

QUICK = [
    *(*OPTIMISER, "optimiser.warmup_iterations=10", "optimiser.iterations=4", "seeds=[0,1]"),
    *("experiment=mean_budget", "policy.experts=[ridge,knn]"),
]
EXTRA = {"iteration": 30}
SMALL = small_table(60)
POLICIES = [
    *(
        "controller",
        "static_mix",
        "best_single",
        "latency_only",
        "ridge",
        "kernel_ridge",
        "knn",
        "random_forest",
    ),
    *("gradient_boosting", "oracle"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a long table and its features, holes in the grid."""
    monkeypatch.chdir(tmp_path)
    write_table(90, holes=0.1)
    return tmp_path


def results_in(path: str) -> Any:
    return json.loads(Path(path).read_text(), parse_constant=lambda word: pytest.fail(word))


def taught(**settings: Any) -> DeployedController:
    """What a short training with a teacher deploys."""
    return deployed(SMALL, dataclasses.replace(TAUGHT, **settings))


def untrained() -> DeployedController:
    """Heads without a teacher and without a guard."""
    config = PolicyConfig(hidden=8)
    return DeployedController(Controller.for_table(SMALL, torch.arange(60), config)).eval()


def loaded(controller: DeployedController, **extra: Any) -> Loaded:
    return Loaded(controller, "small", "sha256:0", EXTRA | extra)


def test_every_seed_says_what_was_chosen_and_what_its_guard_found(tmp_path: Path) -> None:
    controller = taught(level=0.8)
    save_checkpoint(tmp_path / "best.pt", controller, SMALL, EXTRA)
    found = held_out_choices([loaded(controller), load_checkpoint(tmp_path / "best.pt")])
    assert found["satisfaction_level"] == 0.8
    first, second = found["guard"]
    assert first == second
    assert [row["budget_ms"] for row in first] == default_budgets(SMALL).tolist()
    assert found["chosen"][0] == found["chosen"][1]
    assert found["chosen"][0]["iteration"] == 30
    assert list(found["chosen"][0]["weights"]) == ["network", "ridge"]
    assert json.loads(json.dumps(found)) == found


def test_without_a_guard_no_level_was_asked_for() -> None:
    network_alone = taught(guard=False, experts=())
    for controller, weights in ((network_alone, {"network": 1.0}), (untrained(), {})):
        chosen = {"weights": weights, "settings": {}, "iteration": 30, "grpo": {}}
        assert held_out_choices([loaded(controller)]) == {"guard": [], "chosen": [chosen]}


# -- what GRPO added -------------------------------------------------------------------------------


def test_what_grpo_added_on_held_out_samples_is_paired_by_sample() -> None:
    controller = untrained()
    scores = [torch.tensor([0.5, 0.25, 0.0, 1.0]), torch.tensor([0.75, 0.25, 0.5, 1.0])]
    moved = {"grpo_held_out": {"start": scores[0], "best": scores[1]}}
    same = {"grpo_held_out": {"start": scores[0], "best": scores[0]}}
    found = gain_on_held_out([loaded(controller, **moved), loaded(controller, **same)])
    assert found["held_out"] == pytest.approx((0.75 / 4 + 0) / 2)
    low, high = found["held_out_ci95"]
    assert 0 <= low < found["held_out"] < high <= 0.75 / 2
    one = gain_on_held_out([loaded(controller, **moved)])
    assert one["held_out"] == pytest.approx(0.75 / 4)
    # the same gain everywhere is certain, however much the samples differ
    sure = {"grpo_held_out": {"start": scores[0], "best": scores[0] + 0.1}}
    assert gain_on_held_out([loaded(controller, **sure)])["held_out_ci95"] == pytest.approx(
        [0.1, 0.1]
    )
    assert (
        gain_on_held_out([loaded(controller, **moved), loaded(controller, grpo_held_out={})]) == {}
    )
    assert gain_on_held_out([loaded(controller)]) == {}


def test_what_grpo_added_on_test_samples_is_the_difference_to_the_policy_before() -> None:
    table = table_of([[0.5, 1.0], [0.25, 0.75]], [[10.0, 20.0], [30.0, 40.0]])
    baselines = [Always(0, "budget_aware_static"), Always(1, "oracle")]
    rewards = RewardTable(table, RewardConfig(kind="utility"))
    budgets = torch.tensor([25.0, 45.0])
    about = table, torch.arange(2), budgets, rewards
    after: list[Any] = [Ruled(Always(1)), Ruled(Always(0))]
    before: list[Any] = [Ruled(Always(0)), Ruled(Always(0))]
    results, _ = judge_deadlines(*about, after, [0, 1], baselines, charge=False, before=before)
    # of the first seed the first sample gains .5 at both budgets, the second .5 at the second one
    gain = results["grpo_gain"]
    assert gain["test"] == pytest.approx(((0.5 + 0.5) / 2 + (0.0 + 0.5) / 2) / 2 / 2)
    assert gain["test_ci95"][0] <= gain["test"] <= gain["test_ci95"][1]
    for unknown in ([], [before[0], None]):
        results, _ = judge_deadlines(*about, after, [0, 1], baselines, charge=False, before=unknown)
        assert "grpo_gain" not in results


# -- rows by hand ----------------------------------------------------------------------------------


def by_hand() -> ProfileTable:
    """Two samples to fit on, then two to judge on. On the first two the configurations cost 10, 20,
    40 and get .25, .5, 1; on the last two they cost 12, 20, 44 and get .5, .5, .75."""
    return table_of(
        [[0.0, 0.5, 1.0], [0.5, 0.75, 1.0], [0.0, 0.25, 1.0], [1.0, 0.75, 0.5]],
        [[10.0, 20.0, 40.0], [10.0, 20.0, 40.0], [8.0, 16.0, 40.0], [16.0, 24.0, 48.0]],
    )


FITTED, TEST = torch.tensor([0, 1]), torch.tensor([2, 3])


def test_references_spend_what_the_policy_spent_on_the_test_samples() -> None:
    reference = Reference(by_hand(), FITTED, TEST)
    assert [corner["latency_ms"] for corner in reference.hull()] == [12, 20, 44]
    assert [corner["accuracy"] for corner in reference.hull()] == [0.5, 0.5, 0.75]
    spent = torch.tensor([8.0, 12.0, 16.0, 32.0, 50.0], dtype=torch.float64)
    assert reference.static_mix(spent).T.tolist() == [
        [0, 1],
        [0, 1],
        [0.125, 0.875],
        [0.625, 0.625],
        [1, 0.5],
    ]
    assert reference.best_single(spent).T.tolist() == [
        [0, 1],
        [0, 1],
        [0, 1],
        [0.25, 0.75],
        [1, 0.5],
    ]
    # the third gains .25 for 8 ms and .75 for 24 more: no less a ms, so both in one step; the
    # fourth gains nothing
    oracle = reference.oracle(torch.tensor([12.0, 27.9, 28.0]))
    assert oracle.accuracy.T.tolist() == [[0, 1], [0, 1], [1, 1]]
    assert oracle.latency_ms.T.tolist() == [[8, 16], [8, 16], [40, 16]]


def test_rows_of_deadlines_by_hand() -> None:
    table = table_of([[0.5, 1.0], [0.25, 0.75]], [[10.0, 20.0], [30.0, 40.0]])
    policies = [Always(0, "budget_aware_static"), Always(1, "oracle")]
    rewards = RewardTable(table, RewardConfig(kind="utility"))
    choosers: list[Any] = [Ruled(Always(1)), Ruled(Always(0))]
    budgets = torch.tensor([5.0, 15.0, 35.0])
    about = table, torch.arange(2), budgets, rewards, choosers, [4, 5], policies
    results, _ = judge_deadlines(*about, charge=False)
    rows = {(row["policy"], row["budget_ms"]): row for row in results["rows"]}
    assert list(rows) == [
        (n, b) for n in ("controller", "budget_aware_static", "oracle") for b in (None, 5, 15, 35)
    ]
    first, second, mean = (rows["oracle", budget] for budget in (5, 15, None))
    assert (first["infeasible"], first["satisfaction_feasible"]) == (1, None)
    assert (second["infeasible"], second["satisfaction_feasible"], second["utility"]) == (0.5, 0, 0)
    assert (mean["accuracy"], mean["latency_ms_mean"], mean["infeasible"]) == pytest.approx(
        (0.875, 30, 0.5)
    )
    assert mean["satisfaction"] == mean["utility"] == mean["reward"] == pytest.approx(1 / 6)
    assert mean["satisfaction_feasible"] == pytest.approx((0 + 1 / 2) / 2)
    assert mean["latency_ms_p95"] == pytest.approx(20 + 0.95 * 20)
    learned = rows["controller", None]
    assert learned["utility"] == pytest.approx((1 / 6 + (0 + 0.5 / 2 + 0.75 / 2) / 3) / 2)
    assert learned["utility_per_seed"] == pytest.approx([1 / 6, 5 / 24])
    assert learned["gap_closed"] == pytest.approx(0)  # the "oracle" is worse than static here
    assert rows["controller", 35]["latency_ms_mean"] == 25
    assert results["knob_usage"][0].keys() == {"policy", "budget_ms", "knob", "value", "share"}
    assert {use["share"] for use in results["knob_usage"] if use["policy"] == "controller"} == {0.5}
    assert [each["accuracy"] for each in results["configurations"]] == [0.375, 0.875]
    # on time at 15 ms one answer of the first, at 35 ms both of the first and one of the second
    assert [each["utility"] for each in results["configurations"]] == pytest.approx(
        [(0.25 + 0.375) / 3, 0.5 / 3]
    )
    assert learned["over_static"] == pytest.approx((1 / 6 - 5 / 24) / 2)
    assert rows["controller", 35]["over_static"] == pytest.approx((0.5 - 0.375) / 2)
    low, high = learned["over_static_ci95"]
    assert low <= learned["over_static"] <= high
    assert rows["budget_aware_static", None]["over_static_ci95"] == [0, 0]


def by_worth(features: Features, worths: Array, mask: Array | None = None) -> Array:
    """The dearest configuration for whom a right answer is worth 100 ms, else the middle one."""
    return np.where(worths >= 100, 2, 1)


def test_rows_of_mean_budgets_by_hand() -> None:
    table, budgets = by_hand(), torch.tensor([20.0, 50.0])
    learned: Any = ruled_at_means(by_worth, budgets, torch.tensor([8.0, math.inf]))
    about = table, FITTED, TEST, budgets, [learned, learned], [4, 5], []
    results, _ = judge_mean_budgets(*about, charge=False)
    rows = {(row["policy"], row["budget_ms"]): row for row in results["rows"]}
    assert (results["sense"], results["unit"], results["seeds"]) == ("mean", "ms", [4, 5])
    first, second = rows["controller", 20.0], rows["controller", 50.0]
    assert (first["price"], first["worth_ms"], second["price"], second["worth_ms"]) == (
        0.125,
        8,
        0,
        None,
    )
    assert (first["latency_ms_mean"], second["latency_ms_mean"]) == (20, 44)
    assert (first["accuracy"], second["accuracy"]) == (0.5, 0.75)
    assert first["utility"] == first["accuracy"]
    assert first["latency_ms_p95"] == pytest.approx(16 + 0.95 * 8)
    # the middle one is what the static mix is at 20 ms; in hindsight one would give both the
    # cheapest and gain nothing
    assert (first["over_static_mix"], first["over_best_single"], first["oracle_accuracy"]) == (
        0,
        0,
        0.5,
    )
    assert (first["gap_closed"], second["gap_closed"]) == (0, 0)
    assert second["oracle_accuracy"] == 1
    whole = rows["controller", None]
    assert (whole["accuracy"], whole["latency_ms_mean"], whole["price"]) == (0.625, 32, None)
    assert whole["utility_per_seed"] == [0.625, 0.625]
    usage = pl.DataFrame(results["knob_usage"]).pivot(
        "value", index=["policy", "knob", "budget_ms"], values="share"
    )
    used = {row[:3]: row[3:] for row in usage.rows()}
    assert usage.columns[3:] == ["0", "1", "2"]
    assert used["controller", "size", 20] == used["static_mix", "size", 20] == (0, 1, 0)
    assert used["controller", "size", 50] == used["static_mix", "size", 50] == (0, 0, 1)
    assert used["oracle", "size", 50] == (0.5, 0, 0.5)
    assert rows["oracle", 50.0]["gap_closed"] == 1
    assert rows["oracle", 50.0]["over_static_mix"] == pytest.approx(1 - (0.5 + 0.25 * 8 / 24))


def test_a_mixture_uses_both_of_its_configurations_as_often_as_it_draws_them() -> None:
    table, budgets = by_hand(), torch.tensor([25.0])
    mix = StaticMix.of_table(table, FITTED, budgets)
    fell_back = {"deployed": torch.tensor([False]), "mix": mix}
    learned: Any = ruled_at_means(by_worth, budgets, torch.tensor([math.inf]), **fell_back)
    results, _ = judge_mean_budgets(table, FITTED, TEST, budgets, [learned], [0], [])
    for policy in ("static_mix", "controller"):  # the guard has fallen back to it
        shares = [use["share"] for use in results["knob_usage"] if use["policy"] == policy]
        assert shares == pytest.approx([0, 0.75, 0.25])


def results_of_words(**over: Any) -> dict[str, Any]:
    def row(
        policy: str, budget: float | None, gain: float, single: float, accuracy: float
    ) -> dict[str, Any]:
        numbers = {
            "latency_ms_mean": budget,
            "accuracy": accuracy,
            "oracle_accuracy": 0.9,
            "gap_closed": 0.25,
        }
        numbers |= {"over_static_mix": gain, "over_static_mix_ci95": [gain - 0.01, gain + 0.01]}
        return {"policy": policy, "budget_ms": budget, "over_best_single": single} | numbers

    rows = [
        row("controller", b, 0.04, s, 0.6)
        for b, s in ((None, 0.05), (9.0, 0.03), (2.0, 0.12), (4.0, 0.06))
    ]
    return {"sense": "mean", "rows": [*rows, row("knn", None, 0.02, 0.0, 0.5)], **over}


def test_the_verdict_in_words() -> None:
    first, second, third = verdict(results_of_words())
    assert first == (
        "At the two tightest mean budgets the controller gains +12.0 and +6.0 points of accuracy "
        "over the best single "
        "configuration of equal mean latency (2.00 ms and 4.00 ms); the oracle gains +42.0 and "
        "+36.0."
    )
    assert second.startswith(
        "The learned controller is better than the static mix of equal mean latency: accuracy +4"
    )
    assert third.startswith("None of the 1 other policies that see the input does better")
    guard = [[{"deployed": False}, {"deployed": True}]] * 2
    assert "In 2 of 4 cases" in verdict(results_of_words(guard=guard))[-1]


def test_train_under_mean_budgets(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *TABLE, *QUICK, "tracking=offline", "name=first"]) == 0
    run = folder / "runs" / "mean_budget" / "first"
    printed = capsys.readouterr().out
    assert "tightest mean budgets" in printed
    assert "static mix" in printed
    page = (run / "report.html").read_text()
    for words in (
        "budget by budget",
        "mean latency spent",
        "over the static mix",
        "held-out samples",
        "λ =",
    ):
        assert words in page
    assert list((run / "wandb").rglob("*.wandb"))
    assert "kind: priced" in (run / "config.yaml").read_text()
    columns = pl.read_csv(run / "metrics.csv").columns
    assert "Val/Reward_Mean" in columns
    assert not [c for c in columns if "Violation" in c or "Utility" in c]

    results = results_in(str(run / "results.json"))
    assert (results["sense"], results["seeds"], len(results["budgets_ms"])) == ("mean", [0, 1], 5)
    assert [row["policy"] for row in results["rows"] if row["budget_ms"] is None] == POLICIES
    assert len(results["rows"]) == 6 * len(POLICIES)
    for row in results["rows"]:
        low, high = row["utility_ci95"]
        assert low - 1e-9 <= row["utility"] == row["accuracy"] <= high + 1e-9
        assert row["accuracy"] <= row["oracle_accuracy"] + 0.06  # one exchange of 18 samples
        low, high = row["over_static_mix_ci95"]
        assert low - 1e-9 <= row["over_static_mix"] <= high + 1e-9
        if row["policy"] == "static_mix":
            assert row["over_static_mix"] == pytest.approx(0, abs=0.05)  # holes let shares differ
        if row["policy"] == "oracle":
            assert row["gap_closed"] == pytest.approx(1)
    assert [len(rows) for rows in results["guard"]] == [5, 5]
    assert list(results["chosen"][0]["weights"]) == ["network", "ridge", "knn"]

    decider = load_checkpoint(run / "checkpoints" / "best.pt").controller.decider
    assert decider.mean is not None
    assert decider.mean.budgets_ms.tolist() == results["budgets_ms"]


def test_a_network_without_guard_under_chosen_mean_budgets_and_evaluated_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["policy=utility", "policy.members=3", "policy.guard=false"]
    quick = [word for word in QUICK if not word.startswith(("policy.experts", "seeds"))]
    assert (
        main(
            [
                "train",
                *TABLE,
                *quick,
                *words,
                "seeds=[3]",
                "budgets_ms=[12.0,20.0]",
                "own_cost=false",
            ]
        )
        == 0
    )
    results = results_in("runs/latest/results.json")
    assert results["budgets_ms"] == [12, 20]
    at = {row["budget_ms"]: row for row in results["rows"] if row["policy"] == "controller"}
    assert at[12.0]["price"] >= at[20.0]["price"]
    assert at[12.0]["latency_ms_mean"] <= at[20.0]["latency_ms_mean"]
    assert not results["guard"]
    assert main(["evaluate", *TABLE, "baselines=false", "json=again.json", "own_cost=false"]) == 0
    again = results_in("again.json")
    before = {(row["policy"], row["budget_ms"]): row for row in results["rows"]}
    assert {row["policy"] for row in again["rows"]} == {
        "controller",
        "static_mix",
        "best_single",
        "oracle",
    }
    for row in again["rows"]:
        for key in ("accuracy", "latency_ms_mean", "over_static_mix", "price", "gap_closed_ci95"):
            assert row[key] == before[row["policy"], row["budget_ms"]][key], (row["policy"], key)
    assert "calibrated for 12, 20 only" in mistake(["evaluate", *TABLE, "budgets_ms=[1.5]"], capsys)
    alone = ["policy=utility", "policy.members=1"]
    message = "policy.members=1: policy.teacher=true needs at least 2"
    assert message in mistake(["train", *TABLE, *quick, *alone], capsys)
    # heads that learn from rewards alone need neither
    assert (
        main(["train", *TABLE, *quick, "policy=independent", "policy.experts=[]", "seeds=[0]"]) == 0
    )
    results = results_in("runs/latest/results.json")
    assert (results["sense"], results["guard"], results["chosen"][0]["weights"]) == ("mean", [], {})


def test_a_run_under_mean_budgets_that_was_stopped_before_its_worths_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", *TABLE, *QUICK, "seeds=[0]", "name=x"]
    with monkeypatch.context() as patch:
        patch.setattr(
            "knobwise.agents.training.settle.worths_for", Mock(side_effect=KeyboardInterrupt)
        )
        assert main(words) == 130
    unpriced = "checkpoint=runs/mean_budget/x/checkpoints/seed0/best.pt"
    assert "not calibrated yet" in mistake(["evaluate", *TABLE, unpriced], capsys)
    assert main(words) == 0
    assert main(["evaluate", *TABLE, unpriced, "baselines=false"]) == 0
    assert Path("runs/mean_budget/x/report.html").exists()


# -- reliability, and fewer than five budgets ------------------------------------------------------


def test_bins_of_predicted_probabilities_by_hand() -> None:
    rows = [
        {"policy": "controller", "expected_in_time": 0.05 * i, "in_time": float(i > 10)}
        for i in range(20, 0, -1)
    ]
    rows += [{"policy": "oracle", "expected_in_time": None, "in_time": 1.0}]
    bins = reliability(pl.DataFrame(rows))  # ten bins of two, of .05 and .1, .15 and .2, …
    assert [row["expected_in_time"] for row in bins] == pytest.approx(
        [0.075 + 0.1 * i for i in range(10)]
    )
    assert [(row["decisions"], row["in_time"]) for row in bins] == [(2, 0)] * 5 + [(2, 1)] * 5
    assert [row["decisions"] for row in reliability(pl.DataFrame(rows[:3]))] == [1] * 3


def test_a_predicted_probability_is_that_of_the_choice_under_what_is_left_of_the_budget() -> None:
    controller = taught()
    assert controller.teacher is not None
    left, rows = torch.tensor([8.0, 12.0]).double(), torch.tensor([5, 3, 9])
    chosen = torch.tensor([[0, 11], [4, 2], [7, 7]])
    features = controller.controller.features(
        {name: block[rows] for name, block in SMALL.features.items()}, 3
    )
    moments = controller.teacher.moments(features)
    # the normal distribution of ln ms, at each choice
    columns = []
    for place, limit in enumerate(left):
        at = torch.arange(3), chosen[:, place]
        distance = (limit.log() - moments.log_latency[at]) / moments.spread[at]
        columns.append(torch.special.ndtr(distance).float())
    wanted = torch.stack(columns, 1)
    torch.testing.assert_close(expected_in_time(controller, SMALL, rows, chosen, left), wanted)


@pytest.mark.parametrize("has_teacher", [True, False])
def test_only_policies_with_a_teacher_have_such_probabilities(has_teacher: bool) -> None:
    rows, budgets = torch.arange(60), default_budgets(SMALL)
    policy = taught() if has_teacher else untrained()
    baselines = [static_of(SMALL, rows), Oracle(SMALL, rows)]
    rewards = RewardTable(SMALL, RewardConfig())
    results, decisions = judge_deadlines(
        SMALL, rows, budgets, rewards, [policy, policy], [0, 1], baselines
    )
    known = decisions.drop_nulls("expected_in_time")
    assert known["policy"].to_list() == ["controller"] * (2 * 60 * len(budgets) * has_teacher)
    assert sum(row["decisions"] for row in results.get("reliability", [])) == len(known)


def test_only_the_controller_is_charged_and_timed() -> None:
    rows, budgets = torch.arange(60), default_budgets(SMALL)
    table = dataclasses.replace(SMALL, features_ms=3.0)
    baselines = [static_of(table, rows), Oracle(table, rows)]
    rewards = RewardTable(table, RewardConfig(kind="utility"))
    policy = taught(guard=False)
    results, decisions = judge_deadlines(table, rows, budgets, rewards, [policy], [0], baselines)
    means = {row["policy"]: row for row in results["rows"] if row["budget_ms"] is None}
    assert means.keys() == {"controller", "teacher", "budget_aware_static", "oracle"}
    learned = means.pop("controller")
    assert learned["utility"] < learned["utility_free"]
    assert learned["decision_us_p50"] > 0
    for row in means.values():
        assert row["utility_free"] is row["decision_us_p50"] is None
    charged = decisions.filter(
        pl.col("decision_us").is_not_null() | pl.col("score_free").is_not_null()
    )
    assert set(charged["policy"]) == {"controller"}
    # the teacher pays neither for its decisions nor for the features that it reads
    assert policy.teacher is not None
    of_teacher = decisions.filter(policy="teacher", place=float(budgets[2])).sort(
        pl.col("sample_id").cast(int)
    )
    chosen = policy.teacher.choose(
        arrays(table), np.full(60, float(budgets[2])), table.mask.numpy()
    )
    latency_ms = table.latency_ms[rows, torch.from_numpy(chosen)]
    assert of_teacher["latency_ms"].to_list() == latency_ms.tolist()


def test_a_run_at_fewer_budgets_says_so_once(folder: Path, capsys: Capture) -> None:
    """Three configurations that cost 1, 2 and 4 ms on every sample."""
    table = table_of(
        torch.rand(60, 3), torch.tensor([[1.0, 2.0, 4.0]]).repeat(60, 1), torch.randn(60, 2)
    )
    write_long_table(table, "t.parquet")
    write_features(table, "f.npz")
    words = [
        *TABLE,
        *OPTIMISER,
        "policy=utility",
        "policy.members=2",
        "seeds=[0]",
        "baselines=false",
    ]
    assert main(["train", *words]) == 0
    printed = "".join(capsys.readouterr())
    assert (
        printed.count(
            "budgets: only 3 of 5 are distinct, because many latencies are equal; budgets_ms "
            "sets others"
        )
        == 1
    )
    results = results_in("runs/latest/results.json")
    assert results["budgets_ms"] == [row["budget_ms"] for row in results["guard"][0]] == [1, 2, 4]
    policies = [row["policy"] for row in results["rows"]]
    assert all(policies.count(policy) == 1 + 3 for policy in policies)
    assert "<h2>Reliability</h2>" in Path("runs/latest/report.html").read_text()


# -- costs that are no times -----------------------------------------------------------------------


SCALE = 2.0**-20
"""A millionth, and exact in floating point."""


def in_two_units() -> tuple[ProfileTable, ProfileTable]:
    """The same costs in ms and in USD; a sixth of the configurations is free."""
    table = small_table(90)
    cost = table.latency_ms.masked_fill((table.configurations[:, :2] == 0).all(1), 0.0)
    return dataclasses.replace(table, latency_ms=cost), dataclasses.replace(
        table, latency_ms=SCALE * cost, unit="USD"
    )


def test_nothing_depends_on_the_unit() -> None:
    ms, usd = in_two_units()
    rows = torch.arange(90)
    # the tightest is that of the free ones, as little as a budget can be
    assert default_budgets(usd).tolist()[1:] == pytest.approx(
        (SCALE * default_budgets(ms)).tolist()[1:]
    )
    assert mean_budgets(usd, rows).tolist() == pytest.approx(
        (SCALE * mean_budgets(ms, rows)).tolist()
    )
    assert judged_worths(usd).tolist() == pytest.approx((SCALE * judged_worths(ms)).tolist())
    of_units = []
    for table, scale in ((ms, 1.0), (usd, SCALE)):
        measured = Measured.from_table(table, rows, default_budgets(table), seed=0)
        normaliser = FeatureNormaliser.fit(table, rows)
        expert = fit_experts(table, measured, normaliser, ["ridge"], seed=0)[0].expert
        prediction = expert(normaliser(table.features))
        assert (
            prediction.latency_ms[:, 0].max() < 0.3 * scale * ms.latency_ms[ms.latency_ms > 0].min()
        )
        torch.manual_seed(0)
        controller = Controller.for_table(table, rows, PolicyConfig(hidden=8), sense="mean")
        worths = scale * torch.linspace(1, 900, 90)
        encoded = controller.network.encoding(worths)
        start = controller(controller.features(table.features), worths)
        of_units.append(
            (prediction.accuracy, prediction.log_latency - math.log(scale), encoded, start)
        )
    for in_ms, in_usd in zip(*of_units, strict=True):
        torch.testing.assert_close(in_ms, in_usd, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("sense", ["mean_budget", "controller"])
def test_a_price_in_usd_takes_the_place_of_latency(folder: Path, sense: str) -> None:
    _, table = in_two_units()
    long_frame(table).rename({"latency_ms": "price_usd"}).write_parquet("usd.parquet")
    words = ["profile=table", "profile.path=usd.parquet", "profile.features=f.npz"]
    words += ["profile.latency=price_usd", "profile.unit=USD"]
    assert main(["train", *words, *QUICK, f"experiment={sense}", "seeds=[0]"]) == 0
    results = results_in("runs/latest/results.json")
    assert results["unit"] == "USD"
    assert max(results["budgets_ms"]) < 1e-4
    paid = {
        row["policy"]: row["latency_ms_mean"] for row in results["rows"] if row["budget_ms"] is None
    }
    assert all(0 <= spent < 1e-4 for spent in paid.values())  # some configurations are free
    assert paid["controller"] > 0
    page = Path("runs/latest/report.html").read_text()
    assert "e-05 USD" in page
    assert "mean latency (USD)" in page
    assert "0 ms" not in page


def test_the_unit_stays_with_a_saved_table(tmp_path: Path) -> None:
    for unit in ("ms", "J"):
        dataclasses.replace(small_table(10), unit=unit).save(tmp_path / "t.safetensors")
        assert ProfileTable.load(tmp_path / "t.safetensors").unit == unit
