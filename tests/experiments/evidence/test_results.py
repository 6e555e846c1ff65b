"""results.json of controllers: what was chosen, rows by hand, mean budgets end to end, costs that
are no times."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import polars as pl
import pytest
import torch
from commands import OPTIMISER, TABLE, UNTAUGHT, launch, mistake, words_of, write_table
from helpers import (
    WITH_TEACHER,
    Always,
    arrays,
    close,
    deployed,
    driven_apart,
    small_table,
    table_of,
)
from page_parts import said
from ruled import Ruled, ruled_at_means

from knobwise.__main__ import main
from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.calibration.mean_policies import StaticMix
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.evaluation.baselines import Oracle, fit_static
from knobwise.agents.problem import Problem
from knobwise.agents.teacher.regressors import FAMILIES
from knobwise.agents.training.checkpoint import Loaded
from knobwise.common.words import quantity
from knobwise.envs.bandit.budgets import default_budgets, judged_values, mean_budgets
from knobwise.envs.bandit.rules import MeanBudget
from knobwise.envs.readers.long_table import long_frame
from knobwise.envs.tables.profile_table import Split
from knobwise.experiments.evidence.controllers import (
    evaluate_controllers,
    gain_on_held_out,
    held_out_choices,
)
from knobwise.experiments.evidence.decisions import read_decisions
from knobwise.experiments.evidence.evaluate import Deadlines
from knobwise.experiments.evidence.mean_budgets import MeanBudgets, Reference
from knobwise.experiments.report.verdict import shown_by_run

UNTAUGHT_MEAN = words_of(
    "train experiment=mean_budget",
    TABLE,
    UNTAUGHT,
    "optimiser.pretrain_iterations=10 optimiser.iterations=4",
    "split.train=0.3",
)
MEAN = words_of(UNTAUGHT_MEAN, "optimiser.teacher_iterations=4")
SMALL = small_table(60)
BUDGETS = default_budgets(SMALL)
LATE = table_of([[0.5, 1.0], [0.25, 0.75]], [[10.0, 20.0], [30.0, 40.0]])
REFERENCES = [Always(0, "budget_aware_static"), Always(1, "oracle")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with a long table and its features, holes in the grid."""
    monkeypatch.chdir(tmp_path)
    # so many that of half of them, the test part, enough was measured
    write_table(90, holes=0.1)
    return tmp_path


def results_in(path="runs/latest/results.json"):
    return json.loads(Path(path).read_text(), parse_constant=lambda word: pytest.fail(word))


def loaded(controller, **extra):
    return Loaded(controller, "small", "sha256:0", {"iteration": 30} | extra)


@pytest.fixture(scope="module")
def taught():
    """Return what a short training with a teacher deploys."""
    return deployed(SMALL, WITH_TEACHER)


@pytest.fixture(scope="module")
def untrained():
    """Return heads without a teacher and without a guard."""
    return DeployedController(driven_apart(SMALL, PolicyConfig(hidden=8)))


def everything(table):
    """Return a split whose samples are all both fitted and judged."""
    rows = torch.arange(table.num_samples)
    return Split(rows, rows[:0], rows)


def judged(table, choosers, baselines, budgets, **options):
    """Results and decisions under deadlines, on all samples."""
    evaluator = Deadlines(Problem(table, everything(table)), budgets)
    seeds = range(4, 4 + len(choosers))
    return evaluate_controllers(evaluator, choosers, seeds, baselines, **options)


def at_budgets(results):
    return {(row["policy"], row["budget_ms"]): row for row in results["rows"]}


def shares(results, policy):
    """How often it uses each value, by budget, of tables with a single knob."""
    return [use["share"] for use in results["knob_usage"] if use["policy"] == policy]


def test_every_seed_says_what_was_chosen_and_what_its_guard_found(taught, untrained):
    found = held_out_choices([loaded(taught)] * 2)
    (guard, same), (chosen, again) = found["guard"], found["chosen"]
    assert (guard, chosen) == (same, again)
    assert [row["budget_ms"] for row in guard] == BUDGETS.tolist()
    assert chosen["iteration"] == 30
    assert list(chosen["weights"]) == ["network", "ridge"]
    chosen = {"weights": {}, "settings": {}, "iteration": 30, "grpo": {}}
    assert held_out_choices([loaded(untrained)]) == {"guard": [], "chosen": [chosen]}


# -- what GRPO added -------------------------------------------------------------------------------


def test_what_grpo_added_on_held_out_samples_is_paired_by_sample(untrained):
    start = torch.tensor([0.5, 0.25, 0.0, 1.0])
    moved, same, sure = (
        loaded(untrained, grpo_held_out={"start": start, "best": start + gain})
        for gain in (torch.tensor([0.25, 0.0, 0.5, 0.0]), 0.0, 0.1)
    )
    assert gain_on_held_out([moved, same])["held_out"] == pytest.approx((0.75 / 4 + 0) / 2)
    # the same gain everywhere is certain, however much the samples differ
    assert gain_on_held_out([sure])["held_out_ci95"] == pytest.approx([0.1, 0.1])
    assert gain_on_held_out([moved, loaded(untrained)]) == {}


def test_what_grpo_added_to_samples_of_a_cluster_is_drawn_together(untrained):
    # of eight samples four gain; as two clusters either all or none of a draw may
    half = torch.arange(8) < 4
    gains = {"start": torch.zeros(8), "best": 0.5 * half}
    clusters = {"clusters": half.long()}
    alone, together = (
        gain_on_held_out([loaded(untrained, grpo_held_out=each)])
        for each in (gains, gains | clusters)
    )
    assert alone["held_out_ci95"] == pytest.approx([0.0625, 0.4375])
    assert together["held_out_ci95"] == pytest.approx([0.0, 0.5])


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
    reference = Reference(Problem(by_hand(), Split(FITTED, FITTED[:0], TEST), MeanBudget()))
    corners = [(corner["latency_ms"], corner["accuracy"]) for corner in reference.hull()]
    assert corners == [(12, 0.5), (20, 0.5), (44, 0.75)]
    spent = torch.tensor([8.0, 16.0, 32.0, 50.0], dtype=torch.float64)
    mix = [[0, 1], [0.125, 0.875], [0.625, 0.625], [1, 0.5]]
    assert reference.static_mix(spent).T.tolist() == mix
    single = [[0, 1], [0, 1], [0.25, 0.75], [1, 0.5]]
    assert reference.best_single(spent).T.tolist() == single
    # the third gains .25 for 8 ms and .75 for 24 more: no less a ms, so both in one step; the
    # fourth gains nothing
    oracle = reference.oracle(torch.tensor([27.9, 28.0]))
    assert oracle.T.tolist() == [[0, 1], [1, 1]]


def test_rows_of_deadlines_by_hand():
    choosers = [Ruled(Always(1)), Ruled(Always(0))]
    budgets = torch.tensor([5.0, 15.0, 35.0])
    results, _ = judged(LATE, choosers, REFERENCES, budgets, charge=False)
    rows = at_budgets(results)
    names = ("controller", "budget_aware_static", "oracle")
    assert list(rows) == list(itertools.product(names, (None, 5, 15, 35)))
    wanted = {
        ("oracle", 5): {"infeasible": 1, "satisfaction_feasible": None},
        ("oracle", 15): {"infeasible": 0.5, "satisfaction_feasible": 0, "utility": 0},
        ("oracle", None): {
            "accuracy": 0.875,
            "latency_ms_mean": 30,
            "latency_ms_p95": 20 + 0.95 * 20,
            "infeasible": 0.5,
            "satisfaction": 1 / 6,
            "satisfaction_feasible": (0 + 1 / 2) / 2,
            "utility": 1 / 6,
        },
        ("controller", None): {
            "utility": (1 / 6 + 5 / 24) / 2,
            "over_static": (1 / 6 - 5 / 24) / 2,
            "gap_closed": None,  # the "oracle" is worse than static here
        },
        ("controller", 35): {"latency_ms_mean": 25, "over_static": (0.5 - 0.375) / 2},
    }
    for condition, numbers in wanted.items():
        assert {name: rows[condition][name] for name in numbers} == pytest.approx(numbers)
    # a miss costs .2
    assert rows["oracle", None]["reward"] == pytest.approx((1 - 5 * 0.2) / 6, abs=1e-6)
    assert rows["controller", None]["utility_per_seed"] == pytest.approx([1 / 6, 5 / 24])
    assert rows["budget_aware_static", None]["over_static_ci95"] == [0, 0]
    assert shares(results, "controller") == [0.5] * 6
    # on time at 15 ms one answer of the first, at 35 ms both of the first and one of the second
    first, second = results["configurations"]
    assert (first["accuracy"], second["accuracy"]) == (0.375, 0.875)
    assert first["utility"] == pytest.approx((0.25 + 0.375) / 3)
    assert second["utility"] == pytest.approx(0.5 / 3)


def at_means(budgets, values_ms, seeds, **guard):
    """Return the results of a controller that takes the dearest configuration for whom a right
    answer is worth 100 ms, else the middle one."""
    budgets, values_ms = torch.tensor(budgets), torch.tensor(values_ms)
    learned = ruled_at_means(
        lambda features, values_ms, mask: np.where(values_ms >= 100, 2, 1),
        budgets,
        values_ms,
        **guard,
    )
    problem = Problem(by_hand(), Split(FITTED, FITTED[:0], TEST), MeanBudget())
    evaluator = MeanBudgets(problem, budgets)
    about = evaluator, [learned] * len(seeds), seeds, evaluator.references
    return evaluate_controllers(*about, charge=False)[0]


def test_rows_of_mean_budgets_by_hand():
    results = at_means([20.0, 50.0], [8.0, math.inf], [4, 5])
    assert (results["sense"], results["unit"], results["seeds"]) == ("mean", "ms", [4, 5])
    wanted = {
        # the middle one is what the static mix is at 20 ms; in hindsight one would give both the
        # cheapest and gain nothing
        ("controller", 20.0): {
            "price": 0.125,
            "worth_ms": 8,
            "latency_ms_mean": 20,
            "latency_ms_p95": pytest.approx(16 + 0.95 * 8),
            "accuracy": 0.5,
            "utility": 0.5,
            "over_static_mix": 0,
            "over_best_single": 0,
            "oracle_accuracy": 0.5,
            "gap_closed": None,
        },
        ("controller", 50.0): {
            "price": 0,
            "worth_ms": None,
            "latency_ms_mean": 44,
            "accuracy": 0.75,
            "gap_closed": 0,
            "oracle_accuracy": 1,
        },
        ("controller", None): {
            "accuracy": 0.625,
            "latency_ms_mean": 32,
            "price": None,
            "utility_per_seed": [0.625, 0.625],
        },
        ("oracle", 50.0): {
            "gap_closed": 1,
            "over_static_mix": pytest.approx(1 - (0.5 + 0.25 * 8 / 24)),
        },
    }
    for condition, row in wanted.items():
        assert row.items() <= at_budgets(results)[condition].items()
    for policy in ("controller", "static_mix"):
        assert shares(results, policy) == [0, 1, 0, 0, 0, 1]  # at 20, then at 50 ms
    assert shares(results, "oracle")[3:] == [0.5, 0, 0.5]


def test_a_mixture_uses_both_of_its_configurations_as_often_as_it_draws_them():
    mix = StaticMix.fit(by_hand(), FITTED, torch.tensor([25.0]))
    results = at_means([25.0], [math.inf], [0], deployed=torch.tensor([False]), mix=mix)
    for policy in ("static_mix", "controller"):  # the guard has fallen back to it
        assert shares(results, policy) == pytest.approx([0, 0.75, 0.25])


def test_train_under_mean_budgets(folder):
    launch(MEAN, "policy.experts=[ridge,knn] seeds=[0,1] name=first")
    run = folder / "runs" / "mean_budget" / "first"
    assert "<th>price λ</th>" in (run / "report.html").read_text()
    columns = pl.read_csv(run / "metrics.csv").columns
    assert "Val/Reward_Mean" in columns
    assert not [c for c in columns if "Violation" in c or "Utility" in c]

    results = results_in()
    assert (results["sense"], results["seeds"]) == ("mean", [0, 1])
    rows = at_budgets(results)
    policies = ["controller", "static_mix", "best_single", "latency_only", *FAMILIES, "oracle"]
    assert list(rows) == list(itertools.product(policies, (None, *results["budgets_ms"])))
    for row in rows.values():
        for key in ("utility", "over_static_mix"):
            low, high = row[f"{key}_ci95"]
            assert low - 1e-9 <= row[key] <= high + 1e-9
        assert row["utility"] == row["accuracy"] <= row["oracle_accuracy"] + 0.06  # one exchange
    assert list(results["chosen"][0]["weights"]) == ["network", "ridge", "knn"]
    decisions = read_decisions(run)
    unknown = decisions["on_time", "feasible", "reward", "utility"].null_count()
    assert unknown.row(0) == (len(decisions),) * 4
    # where the guard fell back the controller is the static mix, which is no single configuration
    for seed, guard in enumerate(results["guard"]):
        assert [row["budget_ms"] for row in guard] == results["budgets_ms"]
        for row in guard:
            part = decisions.filter(seed=seed, condition=row["budget_ms"])
            assert part["second_choice"].is_null().all() == row["deployed"]


def test_a_network_without_guard_under_chosen_mean_budgets_and_evaluated_again(folder, capsys):
    alone = "policy=utility policy.fold_networks=3 policy.guard=false budgets_ms=[12.0,20.0]"
    launch(MEAN, alone, "own_cost=false seeds=[3]")
    results = results_in()
    assert (results["budgets_ms"], results["guard"]) == ([12, 20], [])
    before = at_budgets(results)
    # what was spent is printed for each budget, and said where it is too much
    printed = capsys.readouterr().out
    for budget in (12, 20):
        spent = before["controller", budget]
        low, high = spent["latency_ms_mean_ci95"]
        assert low < spent["latency_ms_mean"] < high
        assert quantity(spent["latency_ms_mean"]) in printed.split("mean budget  ")[1]
    for budget, above in ((12, 1e-6), (20, -1e-6)):
        before["controller", budget]["latency_ms_mean_ci95"] = [budget + above, 30]
    spent = said(shown_by_run(results))["overspends"]["budgets"]
    assert "12.0 ms" in spent
    assert "20.0 ms" not in spent
    launch("evaluate baselines=false json=again.json own_cost=false", TABLE)
    again = at_budgets(results_in("again.json"))
    assert {policy for policy, _ in again} == {"controller", "static_mix", "best_single", "oracle"}
    for condition, row in again.items():
        for key in ("accuracy", "latency_ms_mean", "over_static_mix", "price", "gap_closed_ci95"):
            assert row[key] == before[condition][key], (condition, key)
    assert "budgets_ms" in mistake(["evaluate", *TABLE, "budgets_ms=[1.5]"], capsys)
    assert "policy.fold_networks" in mistake(
        [*MEAN, "policy=utility", "policy.fold_networks=1"], capsys
    )
    # heads that learn from rewards alone need neither
    launch(UNTAUGHT_MEAN, "policy=independent policy.experts=[] seeds=[0]")
    results = results_in()
    assert (results["sense"], results["guard"], results["chosen"][0]["weights"]) == ("mean", [], {})


def test_a_run_under_mean_budgets_that_was_stopped_before_its_prices_goes_on(
    folder, monkeypatch, capsys
):
    words = [*MEAN, "seeds=[0]", "name=x"]
    with monkeypatch.context() as patch:
        calibrated = "knobwise.agents.calibration.plans.calibrated_values"
        patch.setattr(calibrated, Mock(side_effect=KeyboardInterrupt))
        assert main(words) == 130
    evaluate = ["evaluate", *TABLE, "checkpoint=runs/mean_budget/x/checkpoints/seed0/best.pt"]
    assert "best.pt" in mistake(evaluate, capsys)
    launch(words)
    launch(evaluate, "baselines=false")


# -- reliability, and fewer than five budgets ------------------------------------------------------


def test_predicted_probabilities_are_those_of_the_choices_under_what_is_left_of_the_budget(
    taught, untrained
):
    rows = torch.arange(60)
    baselines = [fit_static(SMALL, rows), Oracle(SMALL, rows)]
    results, decisions = judged(SMALL, [taught], baselines, BUDGETS, charge=False)
    # at fewer budgets the decisions are the same
    _, few = judged(SMALL, [taught], baselines, BUDGETS[1::2], charge=False)
    whole = decisions.filter(pl.col("condition").is_in(few["condition"].unique()))
    assert few.drop("decision_us").equals(whole.drop("decision_us"))
    known = decisions.drop_nulls("expected_on_time")
    assert set(known["policy"]) == {"controller"}
    moments = taught.teacher.moments(taught.controller.normaliser(SMALL.features, 60))
    # the normal distribution of ln ms, at each choice
    labels = [SMALL.label(c) for c in range(12)]
    chosen = known["choice"].replace_strict(labels, range(12)).to_torch().view(60, -1)
    distance = BUDGETS.log() - moments.log_latency.gather(1, chosen)
    wanted = torch.special.ndtr(distance / moments.spread.expand(60, -1).gather(1, chosen))
    expected = known["expected_on_time"].to_torch()
    close(expected, wanted.flatten())
    # ten bins of equally many, by rising probability
    bins = pl.DataFrame(results["reliability"])
    assert bins["decisions"].to_list() == [30] * 10
    order = expected.argsort(stable=True)
    for column in ("expected_in_time", "in_time"):
        means = known[column.replace("in_time", "on_time")].to_torch()[order].view(10, 30).mean(1)
        assert bins[column].to_list() == pytest.approx(means.tolist())
    without, decisions = judged(SMALL, [untrained], baselines, BUDGETS)
    assert "reliability" not in without
    assert decisions["expected_on_time"].is_null().all()


def test_only_the_controller_is_charged_and_timed():
    table, rows = replace(SMALL, features_ms=3.0), torch.arange(60)
    baselines = [fit_static(table, rows), Oracle(table, rows)]
    policy = deployed(SMALL, replace(WITH_TEACHER, guard=False))
    results, decisions = judged(table, [policy], baselines, BUDGETS)
    means = {policy: row for (policy, budget), row in at_budgets(results).items() if not budget}
    learned = means.pop("controller")
    assert learned["utility"] < learned["utility_free"]
    assert learned["decision_us_p50"] > 0
    assert means.keys() == {"teacher", "budget_aware_static", "oracle"}
    for row in means.values():
        assert row["utility_free"] is row["decision_us_p50"] is None
    assert set(decisions.drop_nulls("decision_us")["policy"]) == {"controller"}
    # the teacher pays neither for its decisions nor for the features that it reads
    budget = float(BUDGETS[2])
    of_teacher = decisions.filter(policy="teacher", condition=budget)
    chosen = policy.teacher.choose(arrays(table), np.full(60, budget), table.mask.numpy())
    assert of_teacher["latency_ms"].to_list() == table.latency_ms[rows, chosen].tolist()


def test_a_run_at_fewer_budgets_says_so_once(folder, capsys):
    """Three configurations that cost 1, 2 and 4 ms on every sample."""
    cost = torch.tensor([[1.0, 2.0, 4.0]]).repeat(60, 1)
    table_of(torch.rand(60, 3), cost, torch.randn(60, 2)).save("t.safetensors")
    words = "train policy=utility policy.fold_networks=2 seeds=[0] baselines=false"
    launch(words, "profile=table profile.path=t.safetensors", OPTIMISER)
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
    table.latency_ms[:, (table.configurations[:, :2] == 0).all(1)] = 0.0
    return table, replace(table, latency_ms=SCALE * table.latency_ms, unit="USD")


def test_nothing_depends_on_the_unit():
    rows = torch.arange(90)
    of_units = []
    for table, scale in zip(in_two_units(), (1.0, SCALE), strict=True):
        # the tightest budget is that of the free ones, as little as a budget can be
        budgets = default_budgets(table)[1:], mean_budgets(table, rows), judged_values(table)
        controller = driven_apart(table, PolicyConfig(hidden=8), constraint="mean", by=0.0)
        values_ms = scale * torch.linspace(1, 900, 90)
        start = controller(controller.normaliser(table.features), values_ms)
        of_units.append([start, *(limits / scale for limits in budgets)])
    torch.testing.assert_close(*of_units, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "words",
    [
        "experiment=mean_budget profile.path=t.safetensors profile.features=null",
        "experiment=controller profile.path=usd.parquet profile.latency=price_usd profile.unit=USD",
    ],
)
def test_a_price_in_usd_takes_the_place_of_latency(folder, words):
    _, table = in_two_units()
    table.save("t.safetensors")
    long_frame(table).rename({"latency_ms": "price_usd"}).write_parquet("usd.parquet")
    launch(MEAN, words, "seeds=[0]")
    results = results_in()
    assert results["unit"] == "USD"
    rows = at_budgets(results)
    # some configurations are free
    assert min(row["latency_ms_mean"] for row in rows.values()) >= 0
    assert max(results["budgets_ms"] + [row["latency_ms_mean"] for row in rows.values()]) < 1e-4
    assert rows["controller", None]["latency_ms_mean"] > 0
    page = Path("runs/latest/report.html").read_text()
    assert "mean cost (USD)" in page
    assert "latency (USD)" not in page
    assert "0 ms" not in page
