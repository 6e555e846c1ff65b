"""What each command does with a run of GRPO alone (`policy=grpo`), which has no teacher."""

from contextlib import chdir
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from commands import launch, read_json, refused, same, stopped_and_resumed, words_of, write_table
from helpers import arrays, small_table

import knobwise
from knobwise.agents import NumpyController
from knobwise.agents.training.controllers import controller_trainer
from knobwise.envs.bandit.settings import BudgetConfig
from knobwise.experiments.settings.choices import COLD_OPTIMISER, GRPO

PROFILE = words_of("profile=table profile.path=t.parquet profile.features=f.npz")
SHORT = words_of("""
    policy=grpo policy.hidden=8 policy.fold_networks=2 optimiser.iterations=12 optimiser.contexts=16
    optimiser.minibatch=16 seeds=[0] baselines=false own_cost=false tracking=disabled
""")
KINDS = {
    "deadlines": PROFILE,
    "mean": words_of(PROFILE, "budget=mean"),
    "limited": words_of(
        "profile=table profile.path=u.parquet profile.features=f.npz",
        "profile.costs=[usd] budget.limits={usd:0.06}",
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def run(request, tmp_path_factory):
    """The path of a run, of deadlines, of mean budgets and under a limit, beside its profile and
    requests, in the current folder."""
    with chdir(tmp_path_factory.mktemp(request.param)):
        write_table(60)
        table = pl.read_parquet("t.parquet")
        usd = pl.col("latency_ms") * pl.col("top_k") / 1000
        table.with_columns(usd=usd).write_parquet("u.parquet")
        blocks = arrays(small_table(60), slice(0, 5))
        columns = {
            f"{name}[{i}]": column for name, x in blocks.items() for i, column in enumerate(x.T)
        }
        pl.DataFrame(columns).write_csv("requests.csv")
        launch("train", KINDS[request.param], SHORT, f"name={request.param}")
        yield f"runs/controller/{request.param}"


@pytest.fixture
def budget_ms(run):
    """One that it is calibrated for."""
    return read_json(f"{run}/results.json")["budgets_ms"][2]


def test_it_decides_the_same_as_a_checkpoint_in_a_file_and_exported(run, budget_ms):
    launch("decide requests=requests.csv", f"checkpoint={run} budget_ms={budget_ms}")
    launch("export", f"checkpoint={run} out=exported")
    exported, loaded = NumpyController.load("exported/controller.npz"), knobwise.load(run).agent
    for controller in (exported, loaded.decider):
        # a file begins with the first turn of a static mix, others with any
        controller.budgets.start_over(1)
    blocks, limits = arrays(small_table(60), slice(0, 5)), np.full(5, budget_ms)
    chosen = exported.choose(blocks, limits)
    np.testing.assert_array_equal(loaded.choose(blocks, limits), chosen)
    decided = pl.read_csv("decisions.csv").select(knob.name for knob in small_table(1).knobs)
    configurations = [list(each.values()) for each in knobwise.load(run).configurations]
    assert [list(row) for row in decided.rows()] == [configurations[c] for c in chosen]


def test_what_it_would_have_been_taught_is_not_claimed(run, budget_ms):
    launch("explain", f"checkpoint={run} json=run.json")
    launch("explain", f"checkpoint={run} sample=3 budget_ms={budget_ms} json=one.json")
    explained = read_json("one.json")
    # nothing expects an accuracy or a time; what was measured stands beside
    wanted = {"configuration", "probability", "measured"}
    assert all(row.keys() == wanted for row in explained["expected"])
    results = read_json(f"{run}/results.json")
    assert "teacher" not in {row["policy"] for row in results["rows"]}


def test_it_is_judged_again_as_it_was(run):
    before = read_json(f"{run}/results.json")["rows"]
    launch("evaluate", f"checkpoint={run} baselines=false own_cost=false json=again.json")
    after = read_json("again.json")["rows"]
    score = {(row["policy"], row["budget_ms"]): row["utility"] for row in before}
    assert {(row["policy"], row["budget_ms"]): row["utility"] for row in after} == score


@pytest.mark.parametrize("what", ["log=requests", "profile=table profile.path=t.parquet"])
def test_an_update_is_refused_with_the_policy_that_can_learn(run, what, capsys):
    words = words_of("update", f"checkpoint={run} out=updated", what)
    assert "policy=auto" in refused(words, capsys)


def test_it_heeds_the_speed_of_the_machine_under_deadlines(run, budget_ms):
    agent = knobwise.load(run).agent
    features, limits = arrays(small_table(60)), np.full(60, budget_ms)

    def log_probs(offset):
        drift = np.full(len(agent.configurations), offset), 1.0
        return agent.decider.log_probs(features, limits, drift=drift)

    if agent.rule.kind == "mean":
        with pytest.raises(ValueError, match="under deadlines"):
            log_probs(1.0)
    else:
        assert not np.array_equal(log_probs(0.0), log_probs(1.0))


@pytest.mark.parametrize("constraint", ["deadline", "mean"])
def test_a_training_that_was_stopped_ends_as_if_it_never_was(constraint, tmp_path):
    table = small_table(60)
    few = replace(COLD_OPTIMISER, iterations=12, contexts=16, minibatch=16, evaluate_every=4)

    def make(folder):
        return controller_trainer(
            table,
            table.split(),
            policy=replace(GRPO, hidden=8, fold_networks=2),
            optimiser=few,
            budget=BudgetConfig(constraint=constraint),
            folder=folder,
        )

    whole, again = stopped_and_resumed(make, tmp_path, 7)
    assert same(whole.state.best.state, again.state.best.state)
    assert whole.state.best.iteration == 12
