"""Rules of the user's own: what they count, and runs under one from the training to its use."""

import math
import shutil
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from commands import OPTIMISER, TABLE, UNTAUGHT, launch, read_json, refused, words_of, write_table
from helpers import close, small_table

import knobwise
from examples.rules import FallingUtility
from knobwise.agents.deployed import NumpyController
from knobwise.agents.evaluation.baselines import Oracle, fit_static
from knobwise.agents.problem import Problem
from knobwise.agents.teacher.outcomes import Prediction
from knobwise.common.errors import InputError
from knobwise.envs.bandit import rule_choice
from knobwise.envs.bandit.outcomes import Decisions
from knobwise.envs.bandit.rule_choice import rule_of
from knobwise.envs.bandit.rules import DEADLINES, Rule
from knobwise.envs.bandit.settings import BudgetConfig

NAME = "examples.rules:FallingUtility"
OWN = """
import torch
from dataclasses import dataclass
from knobwise.envs.bandit.rules import Rule

class Raises(Rule):
    def utility(self, accuracy, latency_ms, budget_ms):
        raise RuntimeError("boo")

class Wide(Rule):
    def utility(self, accuracy, latency_ms, budget_ms):
        return accuracy.mean()

class NotANumber(Rule):
    def utility(self, accuracy, latency_ms, budget_ms):
        return accuracy * torch.nan

class TooMuch(Rule):
    def utility(self, accuracy, latency_ms, budget_ms):
        return 1.5 + 0 * accuracy

class Falls(Rule):
    def utility(self, accuracy, latency_ms, budget_ms):
        return (accuracy * (latency_ms > budget_ms)).float()

class BadReward(Rule):
    def reward(self, accuracy, latency_ms, budget_ms):
        return accuracy / 0

class Nothing(Rule):
    def allowed(self, table):
        return table.mask & False

class NoMask(Rule):
    def allowed(self, table):
        return 3

class NotARule:
    pass

@dataclass(frozen=True)
class FallingUtility(Rule):
    tau_ms: float = 9.0

class FirstHalf(Rule):
    def allowed(self, table):
        few = torch.arange(table.num_configurations) < table.num_configurations // 2
        return table.mask & few
"""


@pytest.fixture
def own_rules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # what one test gives is not there in the next
    monkeypatch.setattr(rule_choice, "RULES", dict(rule_choice.RULES))
    for name in [name for name in rule_choice.RULES if ":" in name]:
        del rule_choice.RULES[name]
    write_table()
    Path("own_rules.py").write_text(OWN)
    yield
    sys.modules.pop("own_rules", None)


# -- what counts -----------------------------------------------------------------------------------


def test_outcomes_by_hand():
    table = small_table(20)
    problem = Problem(table, table.split(), FallingUtility(tau_ms=5.0))
    rows, limits = torch.arange(20), torch.tensor([8.0, 20.0])
    chosen = torch.full((20, 2), 3)
    judged = problem.outcomes(Decisions(rows, chosen, limits, cost_ms=1.0))
    late = (table.latency_ms[:, 3:4] + 1 - limits).clamp_min(0)
    close(judged.utility, table.accuracy[:, 3:4] * torch.exp(-late / 5))
    # it is rewarded by the same
    close(judged.reward, judged.utility)
    assert torch.equal(judged.on_time, (late == 0).float())


class InPlace(Rule):
    """Writes into all that it is given."""

    def utility(self, accuracy, latency_ms, budget_ms):
        accuracy[latency_ms > budget_ms] = 0.0
        return accuracy

    def allowed(self, table):
        allowed = super().allowed(table)
        allowed[:, -4:] = False
        return allowed


def test_a_rule_that_writes_in_place_changes_no_table():
    table, same = small_table(20), small_table(20)
    rule_choice.try_rule(InPlace(), table)
    limits = torch.full((20, 1), 8.0)
    for name in ("mean_reward", "mean_utility"):
        measured = table.latency_ms if name == "mean_reward" else table.measurements_ms
        once, twice = (getattr(InPlace(), name)(table.accuracy, measured, limits) for _ in range(2))
        assert torch.equal(once, twice)
    allowed = rule_choice.allowed_cells(InPlace(), table)
    assert allowed.sum(1).eq(table.num_configurations - 4).all()
    for name in ("accuracy", "latency_ms", "mask"):
        assert torch.equal(getattr(table, name), getattr(same, name))


def test_of_repeats_the_mean_counts():
    rule = FallingUtility(tau_ms=2.0)
    measured = torch.tensor([[4.0, 8.0, torch.nan], [3.0, 3.0, 3.0], [torch.nan] * 3])
    worth = rule.mean_utility(torch.tensor([0.5, 1.0, torch.nan]), measured, torch.tensor(6.0))
    close(worth, torch.tensor([0.25 * (1 + math.exp(-1)), 1.0, 0.0]))


def test_what_is_expected_is_a_mean_over_the_predicted_latency():
    # for a rule that says nothing, the deadline's own formula, but for the quantiles
    shape = torch.linspace(1, 3, 5).expand(2, 5)
    predicted = Prediction(torch.full((2, 5), 0.8), shape, torch.full((2, 5), 0.4))
    limits = torch.tensor([6.0, 12.0])
    close(predicted.score(limits, Rule()), predicted.score(limits, DEADLINES), within=0.8 / 16)
    # of the third configuration, with ln ms around 2
    drawn = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    latency_ms = (2.0 + 0.4 * drawn).exp()
    wanted = 0.8 * torch.exp(-(latency_ms - 6.0).clamp_min(0) / 5).mean()
    close(predicted.score(limits, FallingUtility())[0, 2], wanted, within=5e-3)


def test_static_and_oracle_are_those_of_the_rule():
    table = small_table(200, seed=3)
    rule = FallingUtility(tau_ms=20.0)
    rows = torch.arange(200)
    static = fit_static(table, rows, rule)
    budgets = np.geomspace(4.0, 40.0, 7)
    means = [
        rule.mean_utility(table.accuracy, table.measurements_ms, torch.tensor(limit)).mean(0)
        for limit in budgets
    ]
    wanted = torch.stack(means).double()
    close(torch.from_numpy(static.mean_utility(budgets)), wanted, within=5e-3)
    chosen = torch.from_numpy(static.choose({}, budgets))
    gained = wanted.gather(1, chosen.unsqueeze(1)).squeeze(1)
    assert (gained > wanted.amax(1) - 5e-3).all()
    assert [static.single(float(limit)) for limit in budgets] == chosen.tolist()
    # what the tracker expects is still a latency
    close(torch.from_numpy(static.log_latency).float(), table.latency_ms.log().mean(0), within=1e-3)
    oracle = Oracle(table, rows, rule).choose({}, np.full(200, 6.0))
    worth = rule.mean_utility(table.accuracy, table.measurements_ms, torch.tensor(6.0))
    assert torch.equal(worth[rows, torch.from_numpy(oracle)], worth.amax(1))


def test_settings_are_its_numbers(own_rules):
    rule = rule_of(BudgetConfig(constraint=NAME, settings={"tau_ms": 3.0}))
    assert rule.words == f"{NAME} (tau_ms=3.0)"
    assert rule_of(BudgetConfig(constraint=NAME)).tau_ms == 5.0


# -- runs ------------------------------------------------------------------------------------------

RUN = words_of("train baselines=false seeds=[0]", TABLE, f"budget={NAME}")
GIVEN = f"rule={NAME}"


@pytest.mark.parametrize("policy", ["independent", "auto"])
def test_a_run_from_training_to_use(own_rules, capsys, policy):
    quick = UNTAUGHT if policy == "independent" else OPTIMISER
    launch(RUN, quick, f"budget.settings={{tau_ms:9}} name=own policy={policy}")
    results = read_json("runs/controller/own/results.json")
    assert results["rule"] == {"name": NAME, "numbers": {"tau_ms": 9}}
    rows = {row["policy"]: row for row in results["rows"] if row["budget_ms"] is None}
    # late answers are worth something
    static = rows["budget_aware_static"]
    assert static["utility"] <= rows["oracle"]["utility"]
    assert rows["oracle"]["satisfaction"] < 1
    run = "checkpoint=runs/controller/own"
    # nothing is imported because a file names it
    forget()
    assert NAME in refused(words_of("evaluate", run), capsys)
    assert "examples.rules" not in sys.modules
    with pytest.raises(InputError, match="rule="):
        knobwise.load("runs/controller/own")
    requests(Path("requests.csv"))
    for verb in ("export out=e", "decide requests=requests.csv", "explain sample=0 budget_ms=9"):
        assert GIVEN in refused(words_of(verb, run), capsys)
    # another one is not the run's
    assert NAME in refused(words_of("evaluate rule=own_rules:FirstHalf", run), capsys)
    # given again, all is as it was
    launch("evaluate own_cost=false json=again.json", run, GIVEN)
    again = {r["policy"]: r for r in read_json("again.json")["rows"] if r["budget_ms"] is None}
    for name in ("budget_aware_static", "oracle"):
        assert again[name]["utility"] == rows[name]["utility"]
    launch("export out=e", run, GIVEN)
    launch("decide requests=requests.csv out=d.csv", run, GIVEN)
    launch("decide requests=requests.csv out=n.csv checkpoint=e/controller.npz")
    assert pl.read_csv("d.csv").equals(pl.read_csv("n.csv"))
    launch("explain sample=0 budget_ms=9", run, GIVEN)
    assert NAME in refused(words_of("update log=served", run, GIVEN), capsys)
    loaded = knobwise.load("runs/controller/own", rule=FallingUtility)
    assert loaded.agent.rule.tau_ms == 9
    with pytest.raises(InputError, match="NumpyController"):
        knobwise.load("e/controller.npz")
    exported = NumpyController.load("e/controller.npz")
    features = {name: np.zeros(width) for name, width in exported.feature_sizes.items()}
    assert loaded.decide(features, 9.0) == exported.decide(features, 9.0)


def test_runs_under_one_rule_are_compared_without_its_code(own_rules, capsys):
    run = words_of("train experiment=lean baselines=false seeds=[0]", TABLE, f"budget={NAME}")
    for name, tau_ms in {"a": 9, "c": 1}.items():
        launch(run, UNTAUGHT, f"name={name} budget.settings={{tau_ms:{tau_ms}}}")
    forget()
    shutil.copytree("runs/lean/a", "runs/lean/same")
    launch("compare runs/lean/a runs/lean/same html=null")
    # a run under deadlines has none
    launch(run[:-1], UNTAUGHT, "name=plain")
    given = words_of("evaluate checkpoint=runs/lean/plain", GIVEN)
    assert "deadline" in refused(given, capsys)
    # their numbers mean different things
    assert "tau_ms=1" in refused(words_of("compare runs/lean/a runs/lean/c html=null"), capsys)


def test_a_class_of_the_same_name_in_another_module_is_said(own_rules, capsys):
    forget()
    rule_choice.take_rule("own_rules:FallingUtility", "rule")
    rule_choice._note_moved.cache_clear()
    taken = rule_choice.rule_named(NAME, {"tau_ms": 2})
    assert taken.name == "own_rules:FallingUtility"
    printed = capsys.readouterr().err
    assert NAME in printed
    assert taken.name in printed


def forget():
    """Make this process one to which no rule was given."""
    for name in [name for name in rule_choice.RULES if ":" in name]:
        del rule_choice.RULES[name]
    sys.modules.pop("examples.rules", None)


def requests(path):
    """Write a file of requests, whose features are all 0."""
    widths = {name: block.shape[1] for name, block in small_table(2).features.items()}
    columns = {f"{name}[{i}]": [0.0, 1.0] for name, n in widths.items() for i in range(n)}
    pl.DataFrame({**columns, "budget_ms": [6.0, 20.0]}).write_csv(path)


def test_only_what_it_allows_is_chosen(own_rules):
    launch(
        words_of("train experiment=lean baselines=false seeds=[0] policy=independent", TABLE),
        UNTAUGHT,
        "budget=own_rules:FirstHalf name=own",
    )
    frame = pl.read_parquet("runs/lean/own/decisions.parquet")
    table = small_table(60)
    allowed = {table.label(c) for c in range(table.num_configurations // 2)}
    assert {*frame.filter(pl.col("policy") != "if_free")["choice"]} <= allowed


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("budget=own_rules:Raises", "boo"),
        ("budget=own_rules:Wide", "utility: returns []"),
        ("budget=own_rules:NotANumber", "finite"),
        ("budget=own_rules:TooMuch", "from 0 to 1"),
        ("budget=own_rules:Falls", "larger budget"),
        ("budget=own_rules:BadReward", "reward"),
        ("budget=own_rules:Nothing", "allowed"),
        ("budget=own_rules:NoMask", "allowed"),
        ("budget=own_rules:NotARule", "Rule"),
        ("budget=own_rules:Absent", "Absent"),
        ("budget=absent:Rule", "absent"),
        (f"budget={NAME} budget.settings={{tau:5}}", "tau_ms"),
        (f"budget={NAME} budget.settings=5", "budget.settings"),
        (f"budget={NAME} budget.settings={{tau_ms:half}}", "tau_ms=half"),
        (f"budget={NAME} budget.settings={{tau_ms:0}}", "utility"),
        ("budget.settings={tau_ms:5}", "budget.settings"),
        (f"budget={NAME} reward=shaped", "reward"),
    ],
)
def test_what_is_refused_before_anything_is_written(own_rules, capsys, words, part):
    line = refused(words_of("train experiment=lean", TABLE, UNTAUGHT, words), capsys)
    assert part in line
    assert not Path("runs").exists()
