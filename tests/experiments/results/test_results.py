"""results.json of controllers: what was chosen, rows by hand, mean budgets end to end, costs that
are no times."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import polars as pl
import pytest
import torch
from commands import OPTIMISER, TABLE, mistake, write_table
from helpers import TAUGHT, Always, arrays, deployed, small_table, table_of
from ruled import Ruled, ruled_at_means

from knobwise.__main__ import main
from knobwise.agents.checkpoint import Loaded, load_checkpoint, save_checkpoint
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.judging.baselines import Oracle, static_of
from knobwise.agents.stack.deployed import DeployedController
from knobwise.agents.stack.prices import StaticMix, mean_budgets
from knobwise.envs.configurations.budgets import default_budgets, judged_worths
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import RewardConfig
from knobwise.envs.readers.feature_files import write_features
from knobwise.envs.readers.long_table import long_frame, write_long_table
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.results.controllers import (
    gain_on_held_out,
    held_out_choices,
    judge_on_test,
)
from knobwise.experiments.results.decisions import read_decisions
from knobwise.experiments.results.equal_latency import Reference

QUICK = [
    *(*OPTIMISER, "optimiser.warmup_iterations=10", "optimiser.iterations=4", "seeds=[0,1]"),
    *("experiment=mean_budget", "policy.experts=[ridge,knn]"),
]
EXTRA = {"iteration": 30}
SMALL = small_table(60)
BASELINES = ["latency_only", "ridge", "kernel_ridge", "knn", "random_forest", "gradient_boosting"]
POLICIES = ["controller", "static_mix", "best_single", *BASELINES, "oracle"]
LATE = table_of([[0.5, 1.0], [0.25, 0.75]], [[10.0, 20.0], [30.0, 40.0]])
REFERENCES = [Always(0, "budget_aware_static"), Always(1, "oracle")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with a long table and its features, holes in the grid."""
    monkeypatch.chdir(tmp_path)
    write_table(90, holes=0.1)
    return tmp_path


def results_in(path="runs/latest/results.json"):
    return json.loads(Path(path).read_text(), parse_constant=lambda word: pytest.fail(word))


def taught(**settings):
    """What a short training with a teacher deploys."""
    return deployed(SMALL, dataclasses.replace(TAUGHT, **settings))


def untrained():
    """Heads without a teacher and without a guard."""
    config = PolicyConfig(hidden=8)
    return DeployedController(Controller.for_table(SMALL, torch.arange(60), config)).eval()


def loaded(controller, **extra):
    return Loaded(controller, "small", "sha256:0", EXTRA | extra)


def judged(table, choosers, baselines, budgets, **options):
    """Results and decisions under deadlines, on all samples."""
    rewards = RewardTable(table, RewardConfig(kind="utility"))
    rows = torch.arange(table.num_samples)
    about = table, rows, rows, budgets, choosers, range(4, 4 + len(choosers)), baselines
    return judge_on_test(*about, rewards=rewards, **options)


def at_budgets(results):
    return {(row["policy"], row["budget_ms"]): row for row in results["rows"]}


def shares(results, policy):
    """How often it uses each value, by budget, of tables with a single knob."""
    return [use["share"] for use in results["knob_usage"] if use["policy"] == policy]


def test_every_seed_says_what_was_chosen_and_what_its_guard_found(tmp_path):
    controller = taught(level=0.8)
    save_checkpoint(tmp_path / "best.pt", controller, SMALL, EXTRA)
    found = held_out_choices([loaded(controller), load_checkpoint(tmp_path / "best.pt")])
    assert found["satisfaction_level"] == 0.8
    assert found["guard"][0] == found["guard"][1]
    assert found["chosen"][0] == found["chosen"][1]
    budgets = [row["budget_ms"] for row in found["guard"][0]]
    assert budgets == default_budgets(SMALL).tolist()
    assert found["chosen"][0]["iteration"] == 30
    assert list(found["chosen"][0]["weights"]) == ["network", "ridge"]
    # without a guard no level was asked for
    chosen = {"weights": {}, "settings": {}, "iteration": 30, "grpo": {}}
    assert held_out_choices([loaded(untrained())]) == {"guard": [], "chosen": [chosen]}


# -- what GRPO added -------------------------------------------------------------------------------


def test_what_grpo_added_on_held_out_samples_is_paired_by_sample():
    start = torch.tensor([0.5, 0.25, 0.0, 1.0])
    moved, same, sure = (
        loaded(untrained(), grpo_held_out={"start": start, "best": start + gain})
        for gain in (torch.tensor([0.25, 0.0, 0.5, 0.0]), 0.0, 0.1)
    )
    found = gain_on_held_out([moved, same])
    assert found["held_out"] == pytest.approx((0.75 / 4 + 0) / 2)
    # the same gain everywhere is certain, however much the samples differ
    assert gain_on_held_out([sure])["held_out_ci95"] == pytest.approx([0.1, 0.1])
    assert gain_on_held_out([moved, loaded(untrained())]) == {}


def test_what_grpo_added_on_test_samples_is_the_difference_to_the_policy_before():
    after = [Ruled(Always(1)), Ruled(Always(0))]
    before = [Ruled(Always(0)), Ruled(Always(0))]
    request = LATE, after, REFERENCES, torch.tensor([25.0, 45.0])
    gain = judged(*request, charge=False, before=before)[0]["grpo_gain"]
    # of the first seed the first sample gains .5 at both budgets, the second .5 at the second one
    assert gain["test"] == pytest.approx(((0.5 + 0.5) / 2 + (0.0 + 0.5) / 2) / 2 / 2)
    assert "grpo_gain" not in judged(*request, charge=False, before=[before[0], None])[0]


# -- rows by hand ----------------------------------------------------------------------------------


def by_hand():
    """Two samples to fit on, then two to judge on. On the first two the configurations cost 10, 20,
    40 and get .25, .5, 1; on the last two they cost 12, 20, 44 and get .5, .5, .75."""
    return table_of(
        [[0.0, 0.5, 1.0], [0.5, 0.75, 1.0], [0.0, 0.25, 1.0], [1.0, 0.75, 0.5]],
        [[10.0, 20.0, 40.0], [10.0, 20.0, 40.0], [8.0, 16.0, 40.0], [16.0, 24.0, 48.0]],
    )


FITTED, TEST = torch.tensor([0, 1]), torch.tensor([2, 3])


def test_references_spend_what_the_policy_spent_on_the_test_samples():
    reference = Reference(by_hand(), FITTED, TEST)
    assert [corner["latency_ms"] for corner in reference.hull()] == [12, 20, 44]
    assert [corner["accuracy"] for corner in reference.hull()] == [0.5, 0.5, 0.75]
    spent = torch.tensor([8.0, 12.0, 16.0, 32.0, 50.0], dtype=torch.float64)
    mix = [[0, 1], [0, 1], [0.125, 0.875], [0.625, 0.625], [1, 0.5]]
    assert reference.static_mix(spent).T.tolist() == mix
    single = [[0, 1], [0, 1], [0, 1], [0.25, 0.75], [1, 0.5]]
    assert reference.best_single(spent).T.tolist() == single
    # the third gains .25 for 8 ms and .75 for 24 more: no less a ms, so both in one step; the
    # fourth gains nothing
    oracle = reference.oracle(torch.tensor([12.0, 27.9, 28.0]))
    assert oracle.accuracy.T.tolist() == [[0, 1], [0, 1], [1, 1]]
    assert oracle.latency_ms.T.tolist() == [[8, 16], [8, 16], [40, 16]]


def test_rows_of_deadlines_by_hand():
    choosers = [Ruled(Always(1)), Ruled(Always(0))]
    budgets = torch.tensor([5.0, 15.0, 35.0])
    results, _ = judged(LATE, choosers, REFERENCES, budgets, charge=False)
    rows = at_budgets(results)
    names = ("controller", "budget_aware_static", "oracle")
    assert list(rows) == list(itertools.product(names, (None, 5, 15, 35)))
    first, second, mean = (rows["oracle", budget] for budget in (5, 15, None))
    assert {"infeasible": 1, "satisfaction_feasible": None}.items() <= first.items()
    numbers = {"infeasible": 0.5, "satisfaction_feasible": 0, "utility": 0}
    assert numbers.items() <= second.items()
    numbers = {"accuracy": 0.875, "latency_ms_mean": 30, "infeasible": 0.5, "satisfaction": 1 / 6}
    numbers |= {"utility": 1 / 6, "reward": 1 / 6, "satisfaction_feasible": (0 + 1 / 2) / 2}
    numbers["latency_ms_p95"] = 20 + 0.95 * 20
    assert {name: mean[name] for name in numbers} == pytest.approx(numbers)
    learned, large = rows["controller", None], rows["controller", 35]
    assert learned["utility"] == pytest.approx((1 / 6 + (0 + 0.5 / 2 + 0.75 / 2) / 3) / 2)
    assert learned["utility_per_seed"] == pytest.approx([1 / 6, 5 / 24])
    assert learned["gap_closed"] == pytest.approx(0)  # the "oracle" is worse than static here
    assert large["latency_ms_mean"] == 25
    assert shares(results, "controller") == [0.5] * 6
    assert [each["accuracy"] for each in results["configurations"]] == [0.375, 0.875]
    # on time at 15 ms one answer of the first, at 35 ms both of the first and one of the second
    utilities = [each["utility"] for each in results["configurations"]]
    assert utilities == pytest.approx([(0.25 + 0.375) / 3, 0.5 / 3])
    assert learned["over_static"] == pytest.approx((1 / 6 - 5 / 24) / 2)
    assert large["over_static"] == pytest.approx((0.5 - 0.375) / 2)
    assert rows["budget_aware_static", None]["over_static_ci95"] == [0, 0]


def by_worth(features, worths, mask=None):
    """The dearest configuration for whom a right answer is worth 100 ms, else the middle one."""
    return np.where(worths >= 100, 2, 1)


def test_rows_of_mean_budgets_by_hand():
    table, budgets = by_hand(), torch.tensor([20.0, 50.0])
    learned = ruled_at_means(by_worth, budgets, torch.tensor([8.0, math.inf]))
    about = table, FITTED, TEST, budgets, [learned, learned], [4, 5], []
    results, _ = judge_on_test(*about, charge=False)
    rows = at_budgets(results)
    assert (results["sense"], results["unit"], results["seeds"]) == ("mean", "ms", [4, 5])
    first, second, whole = (rows["controller", budget] for budget in (20.0, 50.0, None))
    # the middle one is what the static mix is at 20 ms; in hindsight one would give both the
    # cheapest and gain nothing
    wanted = {"price": 0.125, "worth_ms": 8, "latency_ms_mean": 20, "accuracy": 0.5, "utility": 0.5}
    wanted |= {"latency_ms_p95": pytest.approx(16 + 0.95 * 8), "over_static_mix": 0}
    wanted |= {"over_best_single": 0, "oracle_accuracy": 0.5, "gap_closed": 0}
    assert wanted.items() <= first.items()
    wanted = {"price": 0, "worth_ms": None, "latency_ms_mean": 44, "accuracy": 0.75}
    assert (wanted | {"gap_closed": 0, "oracle_accuracy": 1}).items() <= second.items()
    wanted = {"accuracy": 0.625, "latency_ms_mean": 32, "price": None}
    assert (wanted | {"utility_per_seed": [0.625, 0.625]}).items() <= whole.items()
    for policy in ("controller", "static_mix"):
        assert shares(results, policy) == [0, 1, 0, 0, 0, 1]  # at 20, then at 50 ms
    assert shares(results, "oracle")[3:] == [0.5, 0, 0.5]
    assert rows["oracle", 50.0]["gap_closed"] == 1
    assert rows["oracle", 50.0]["over_static_mix"] == pytest.approx(1 - (0.5 + 0.25 * 8 / 24))


def test_a_mixture_uses_both_of_its_configurations_as_often_as_it_draws_them():
    table, budgets = by_hand(), torch.tensor([25.0])
    mix = StaticMix.of_table(table, FITTED, budgets)
    fell_back = {"deployed": torch.tensor([False]), "mix": mix}
    learned = ruled_at_means(by_worth, budgets, torch.tensor([math.inf]), **fell_back)
    results, _ = judge_on_test(table, FITTED, TEST, budgets, [learned], [0], [])
    for policy in ("static_mix", "controller"):  # the guard has fallen back to it
        assert shares(results, policy) == pytest.approx([0, 0.75, 0.25])


def test_train_under_mean_budgets(folder):
    assert main(["train", *TABLE, *QUICK, "name=first"]) == 0
    run = folder / "runs" / "mean_budget" / "first"
    page = (run / "report.html").read_text()
    for words in ("mean latency spent", "over the static mix", "held-out samples", "λ ="):
        assert words in page
    assert "kind: priced" in (run / "config.yaml").read_text()
    columns = pl.read_csv(run / "metrics.csv").columns
    assert "Val/Reward_Mean" in columns
    assert not [c for c in columns if "Violation" in c or "Utility" in c]

    results = results_in()
    assert (results["sense"], results["seeds"]) == ("mean", [0, 1])
    rows = at_budgets(results)
    assert list(rows) == list(itertools.product(POLICIES, (None, *results["budgets_ms"])))
    for (policy, _), row in rows.items():
        for key in ("utility", "over_static_mix"):
            low, high = row[f"{key}_ci95"]
            assert low - 1e-9 <= row[key] <= high + 1e-9
        assert row["utility"] == row["accuracy"] <= row["oracle_accuracy"] + 0.06  # one exchange
        if policy == "static_mix":
            assert row["over_static_mix"] == pytest.approx(0, abs=0.05)  # holes let shares differ
        if policy == "oracle":
            assert row["gap_closed"] == pytest.approx(1)
    assert [len(rows) for rows in results["guard"]] == [5, 5]
    assert list(results["chosen"][0]["weights"]) == ["network", "ridge", "knn"]
    decider = load_checkpoint(run / "checkpoints" / "best.pt").controller.decider
    assert decider.mean.budgets_ms.tolist() == results["budgets_ms"]

    decisions = read_decisions(run)
    columns = decisions.select("in_time", "feasible", "reward")
    assert columns.null_count().row(0) == (len(decisions),) * 3
    assert (decisions["score"] == decisions["accuracy"]).all()
    # where the guard fell back the controller is the static mix, which is no single configuration
    for seed, guard in zip([0, 1], results["guard"], strict=True):
        for entry in guard:
            choices = decisions.filter(seed=seed, place=entry["budget_ms"])["choice"]
            assert choices.is_null().all() == (not entry["deployed"])


def test_a_network_without_guard_under_chosen_mean_budgets_and_evaluated_again(folder, capsys):
    quick = [word for word in QUICK if not word.startswith(("policy.experts", "seeds"))]
    train = ["train", *TABLE, *quick]
    alone = ["policy=utility", "policy.members=3", "policy.guard=false", "seeds=[3]"]
    assert main([*train, *alone, "budgets_ms=[12.0,20.0]", "own_cost=false"]) == 0
    results = results_in()
    assert results["budgets_ms"] == [12, 20]
    before = at_budgets(results)
    tight, loose = before["controller", 12.0], before["controller", 20.0]
    assert tight["price"] >= loose["price"]
    assert tight["latency_ms_mean"] <= loose["latency_ms_mean"]
    assert not results["guard"]
    assert main(["evaluate", *TABLE, "baselines=false", "json=again.json", "own_cost=false"]) == 0
    again = at_budgets(results_in("again.json"))
    assert {policy for policy, _ in again} == {"controller", "static_mix", "best_single", "oracle"}
    for place, row in again.items():
        for key in ("accuracy", "latency_ms_mean", "over_static_mix", "price", "gap_closed_ci95"):
            assert row[key] == before[place][key], (place, key)
    assert "budgets_ms" in mistake(["evaluate", *TABLE, "budgets_ms=[1.5]"], capsys)
    assert "policy.members" in mistake([*train, "policy=utility", "policy.members=1"], capsys)
    # heads that learn from rewards alone need neither
    assert main([*train, "policy=independent", "policy.experts=[]", "seeds=[0]"]) == 0
    results = results_in()
    assert (results["sense"], results["guard"], results["chosen"][0]["weights"]) == ("mean", [], {})


def test_a_run_under_mean_budgets_that_was_stopped_before_its_worths_goes_on(
    folder, monkeypatch, capsys
):
    words = ["train", *TABLE, *QUICK, "seeds=[0]", "name=x"]
    worths = "knobwise.agents.training.settle.worths_for"
    with monkeypatch.context() as patch:
        patch.setattr(worths, Mock(side_effect=KeyboardInterrupt))
        assert main(words) == 130
    unpriced = "checkpoint=runs/mean_budget/x/checkpoints/seed0/best.pt"
    assert "best.pt" in mistake(["evaluate", *TABLE, unpriced], capsys)
    assert main(words) == 0
    assert main(["evaluate", *TABLE, unpriced, "baselines=false"]) == 0


# -- reliability, and fewer than five budgets ------------------------------------------------------


def test_predicted_probabilities_are_those_of_the_choices_under_what_is_left_of_the_budget():
    rows, budgets = torch.arange(60), default_budgets(SMALL)
    controller = taught()
    baselines = [static_of(SMALL, rows), Oracle(SMALL, rows)]
    results, decisions = judged(SMALL, [controller], baselines, budgets, charge=False)
    # at fewer budgets the decisions are the same
    _, few = judged(SMALL, [controller], baselines, budgets[1::2], charge=False)
    whole = decisions.filter(pl.col("place").is_in(few["place"].unique()))
    assert few.drop("decision_us").equals(whole.drop("decision_us"))
    known = decisions.drop_nulls("expected_in_time")
    assert set(known["policy"]) == {"controller"}
    moments = controller.teacher.moments(controller.controller.normaliser(SMALL.features, 60))
    # the normal distribution of ln ms, at each choice
    labels = [SMALL.label(c) for c in range(12)]
    chosen = known["choice"].replace_strict(labels, range(12)).to_torch().view(60, -1)
    distance = budgets.log() - moments.log_latency.gather(1, chosen)
    wanted = torch.special.ndtr(distance / moments.spread.expand(60, -1).gather(1, chosen))
    expected = known["expected_in_time"].to_torch()
    torch.testing.assert_close(expected, wanted.flatten())
    # ten bins of equally many, by rising probability
    bins = results["reliability"]
    assert [row["decisions"] for row in bins] == [30] * 10
    means = expected.sort().values.view(10, 30).mean(1)
    assert [row["expected_in_time"] for row in bins] == pytest.approx(means.tolist())
    order = expected.argsort(stable=True)
    on_time = known["in_time"].to_torch()[order].view(10, 30).mean(1)
    assert [row["in_time"] for row in bins] == pytest.approx(on_time.tolist())
    without, decisions = judged(SMALL, [untrained()], baselines, budgets)
    assert "reliability" not in without
    assert decisions["expected_in_time"].is_null().all()


def test_only_the_controller_is_charged_and_timed():
    rows, budgets = torch.arange(60), default_budgets(SMALL)
    table = dataclasses.replace(SMALL, features_ms=3.0)
    baselines = [static_of(table, rows), Oracle(table, rows)]
    policy = taught(guard=False)
    results, decisions = judged(table, [policy], baselines, budgets)
    means = {row["policy"]: row for row in results["rows"] if row["budget_ms"] is None}
    assert means.keys() == {"controller", "teacher", "budget_aware_static", "oracle"}
    learned = means.pop("controller")
    assert learned["utility"] < learned["utility_free"]
    assert learned["decision_us_p50"] > 0
    for row in means.values():
        assert row["utility_free"] is row["decision_us_p50"] is None
    for column in ("decision_us", "score_free"):
        assert set(decisions.drop_nulls(column)["policy"]) == {"controller"}
    # the teacher pays neither for its decisions nor for the features that it reads
    budget = float(budgets[2])
    of_teacher = decisions.filter(policy="teacher", place=budget)
    chosen = policy.teacher.choose(arrays(table), np.full(60, budget), table.mask.numpy())
    latency_ms = table.latency_ms[rows, torch.from_numpy(chosen)]
    assert of_teacher["latency_ms"].to_list() == latency_ms.tolist()


def test_a_run_at_fewer_budgets_says_so_once(folder, capsys):
    """Three configurations that cost 1, 2 and 4 ms on every sample."""
    cost = torch.tensor([[1.0, 2.0, 4.0]]).repeat(60, 1)
    table = table_of(torch.rand(60, 3), cost, torch.randn(60, 2))
    write_long_table(table, "t.parquet")
    write_features(table, "f.npz")
    words = ["policy=utility", "policy.members=2", "seeds=[0]", "baselines=false"]
    assert main(["train", *TABLE, *OPTIMISER, *words]) == 0
    assert "".join(capsys.readouterr()).count("only 3 of 5") == 1
    results = results_in()
    assert results["budgets_ms"] == [row["budget_ms"] for row in results["guard"][0]] == [1, 2, 4]
    policies = {"controller", "teacher", "budget_aware_static", "oracle"}
    assert {row["policy"] for row in results["rows"]} == policies
    assert "<h2>Reliability</h2>" in Path("runs/latest/report.html").read_text()


# -- costs that are no times -----------------------------------------------------------------------


SCALE = 2.0**-20
"""A millionth, and exact in floating point."""


def in_two_units():
    """The same costs in ms and in USD; a sixth of the configurations is free."""
    table = small_table(90)
    cost = table.latency_ms.masked_fill((table.configurations[:, :2] == 0).all(1), 0.0)
    return dataclasses.replace(table, latency_ms=cost), dataclasses.replace(
        table, latency_ms=SCALE * cost, unit="USD"
    )


def test_nothing_depends_on_the_unit():
    rows = torch.arange(90)
    of_units = []
    for table, scale in zip(in_two_units(), (1.0, SCALE), strict=True):
        # the tightest budget is that of the free ones, as little as a budget can be
        budgets = default_budgets(table)[1:], mean_budgets(table, rows), judged_worths(table)
        torch.manual_seed(0)
        controller = Controller.for_table(table, rows, PolicyConfig(hidden=8), sense="mean")
        worths = scale * torch.linspace(1, 900, 90)
        start = controller(controller.normaliser(table.features), worths)
        of_units.append([start, *(limits / scale for limits in budgets)])
    for first, second in zip(*of_units, strict=True):
        torch.testing.assert_close(first, second, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("sense", ["mean_budget", "controller"])
def test_a_price_in_usd_takes_the_place_of_latency(folder, sense):
    _, table = in_two_units()
    table.save("t.safetensors")
    assert ProfileTable.load("t.safetensors").unit == "USD"
    long_frame(table).rename({"latency_ms": "price_usd"}).write_parquet("usd.parquet")
    words = ["profile=table", "profile.path=usd.parquet", "profile.features=f.npz"]
    words += ["profile.latency=price_usd", "profile.unit=USD"]
    assert main(["train", *words, *QUICK, f"experiment={sense}", "seeds=[0]"]) == 0
    results = results_in()
    assert results["unit"] == "USD"
    assert max(results["budgets_ms"]) < 1e-4
    means = [row for row in results["rows"] if row["budget_ms"] is None]
    paid = {row["policy"]: row["latency_ms_mean"] for row in means}
    assert all(0 <= spent < 1e-4 for spent in paid.values())  # some configurations are free
    assert paid["controller"] > 0
    page = Path("runs/latest/report.html").read_text()
    assert "mean latency (USD)" in page
    assert "0 ms" not in page
