"""`split.repeats`: several random splits are one run with one table, each judged on its own test
samples. `profile.group` from a CSV to decisions: the split of a run, its resumption, its evaluation
and its intervals keep whole what belongs together."""

from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import polars as pl
import pytest
import torch
from commands import (
    TABLE,
    UNTAUGHT,
    ctrl_c,
    launch,
    read_json,
    refused,
    same,
    words_of,
    write_table,
)
from helpers import input_error, small_table
from polars.testing import assert_frame_equal

import knobwise
from knobwise.__main__ import main
from knobwise.agents.calibration import ways
from knobwise.agents.evaluation import baselines
from knobwise.agents.teacher import regressors
from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.envs.bandit.rules import Deadline
from knobwise.envs.readers.long_table import long_frame, read_long_table
from knobwise.experiments.evidence.decisions import read_decisions
from knobwise.experiments.inspection.attainable import QUICK

TRAIN = words_of(
    "train",
    TABLE,
    UNTAUGHT,
    "policy=independent seeds=[0,1] baselines=false own_cost=false",
    "tracking.tensorboard=false",
)
GROUPED = "profile.path=t.csv profile.group=user profile.features=[length]"
RUNS = Path("runs/controller")
SPLITS = [1, 2, 3]


@pytest.fixture(scope="module", autouse=True)
def _made(tmp_path_factory):
    """Work in a folder with a profile, a run on three splits, and a run on each of them at the same
    budgets; with a CSV of 12 users, and a run on it."""
    with chdir(tmp_path_factory.mktemp("splits")):
        write_table(60)
        launch(TRAIN, "split.seed=1 split.repeats=3 name=three")
        budgets = f"budgets_ms={results_of('three')['budgets_ms']}".replace(" ", "")
        for seed in SPLITS:
            launch(TRAIN, [budgets], f"split.seed={seed} name=split{seed}")
        users = tuple(f"u{row % 12}" for row in range(60))
        frame = long_frame(replace(small_table(60), clusters=users)).rename({"cluster": "user"})
        length = pl.col("sample_id").cast(pl.Int64) % 7
        frame.with_columns(length=length).write_csv("t.csv")
        launch(TRAIN, GROUPED, "seeds=[0] name=whole")
        yield


def results_of(name):
    return read_json(RUNS / name / "results.json")


def extra_of(name, path="."):
    """Return what a run wrote into its best checkpoint."""
    return load_checkpoint(RUNS / name / path / "checkpoints" / "best.pt").extra


def decisions_of(name):
    return read_decisions(RUNS / name).drop("decision_us")


def test_each_split_is_decided_as_in_a_run_of_its_own():
    decisions = decisions_of("three")
    for number, seed in enumerate(SPLITS):
        own = decisions.filter(pl.col("split") == number).drop("split")
        assert_frame_equal(own, decisions_of(f"split{seed}").drop("split"))


def test_rows_are_means_over_the_splits():
    together = results_of("three")
    assert together["split_seeds"] == SPLITS
    assert together["test_samples"] == 36
    parts = [pl.DataFrame(results_of(f"split{seed}")["rows"]) for seed in SPLITS]
    for number, row in enumerate(together["rows"]):
        of_splits = pl.concat(part[number] for part in parts)
        for name in ("policy", "budget_ms"):
            assert of_splits[name].unique().to_list() == [row[name]]
        assert row["utility_per_split"] == pytest.approx(of_splits["utility"].to_list())
        for name in ("utility", "accuracy", "latency_ms_mean", "satisfaction", "infeasible"):
            assert row[name] == pytest.approx(of_splits[name].mean())
        low, high = row["utility_ci95"]
        assert low <= row["utility"] <= high
        if row["policy"] == "controller":
            assert np.mean(row["utility_per_seed"]) == pytest.approx(row["utility"])


def test_the_first_split_is_deployed_and_reported():
    together, first = results_of("three"), results_of("split1")
    for name in ("best_seed", "validation_utility", "chosen", "guard"):
        assert together[name] == first[name]
    runs = RUNS / "three", RUNS / "split1"
    best = [load_checkpoint(run / "checkpoints" / "best.pt").controller for run in runs]
    assert same(*(controller.state_dict() for controller in best))
    assert_frame_equal(*(pl.read_csv(run / "metrics.csv") for run in runs))
    reports = [(run / "report.html").read_text() for run in runs]
    assert ["36 samples in 3 splits" in report for report in reports] == [True, False]


def test_no_split_is_fitted_on_what_it_is_judged_on():
    tests = []
    for number, path in enumerate((".", "split1", "split2")):
        rows = extra_of("three", path)
        fitted = torch.cat([rows["train_rows"], rows["validation_rows"]])
        assert not torch.isin(rows["test_rows"], fitted).any()
        judged = decisions_of("three").filter(split=number)["sample"].cast(pl.Int64)
        tests.append({*judged})
        assert tests[-1] == {*rows["test_rows"].tolist()}
    assert tests[0] != tests[1] != tests[2]


def test_an_interrupted_run_resumes_split_by_split():
    words = words_of(TRAIN, "split.seed=1 split.repeats=3 name=killed")
    with ctrl_c(
        lambda trainer: (trainer.title[:15], trainer.state.iteration) == ("split 1, seed 1", 6)
    ):
        assert main(words) == 130
    assert not (RUNS / "killed" / "split2").exists()
    finished = RUNS / "killed" / "split1" / "checkpoints" / "seed0" / "last.pt"
    before = finished.stat().st_mtime_ns
    launch(words)
    assert finished.stat().st_mtime_ns == before
    assert_frame_equal(decisions_of("killed"), decisions_of("three"))
    whole, killed = (pl.DataFrame(results_of(name)["rows"]) for name in ("three", "killed"))
    assert_frame_equal(killed.drop("decision_us_p50"), whole.drop("decision_us_p50"))


def test_every_split_divides_the_folds_of_its_baselines_anew(monkeypatch):
    made = Mock(side_effect=baselines.make_baselines)
    of_deadlines = ways.WAYS[Deadline.name]._replace(baselines=made)
    monkeypatch.setitem(ways.WAYS, Deadline.name, of_deadlines)
    for module in (baselines, regressors):  # without the slowest families
        monkeypatch.setattr(module, "FAMILIES", QUICK)
    launch(TRAIN, "baselines=true seeds=[4] split.repeats=2 name=baselines")
    assert [call.args[3] for call in made.call_args_list] == [4, 5]
    rows = {row["policy"]: row for row in results_of("baselines")["rows"]}
    assert len(rows["ridge"]["utility_per_split"]) == 2
    assert len(rows["controller"]["utility_per_seed"]) == 1
    assert "utility_per_seed" not in rows["ridge"]


def test_a_comparison_shows_such_a_run_but_does_not_test_it(capsys):
    for first, second in (("three", "split1"), ("split1", "three")):
        launch("compare", [str(RUNS / first)], [str(RUNS / second)], "html=null")
        printed = capsys.readouterr().out
        assert "three was judged on several splits" in printed
        assert "is the highest" not in printed


MISTAKES = {
    "split.repeats=0": "split.repeats=0",
    "split.repeats=2 split.leave_out=small": "split.leave_out",
    "split.repeats=2 profile.path=fixed.parquet": "'fixed'",
    "split.repeats=2 budget=mean policy=utility": "split.repeats",
    "split.folds=2 budget=mean policy=utility": "split.folds",
    "split.folds=1": "split.folds=1",
    "split.folds=2 split.repeats=2": "without split.repeats",
    "split.folds=61": "split.folds=61",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_what_cannot_be_repeated_is_refused(words, capsys):
    part = pl.when(pl.col("sample_id").cast(pl.Int64) < 40).then(pl.lit("train"))
    fixed = long_frame(small_table(60)).with_columns(split=part.otherwise(pl.lit("test")))
    fixed.write_parquet("fixed.parquet")
    assert MISTAKES[words] in refused(words_of(TRAIN, words), capsys)


def test_fit_takes_one_split():
    with input_error(r"split\.repeats"):
        knobwise.fit(small_table(60), policy="independent", **{"split.repeats": 2})


# -- samples of a user belong together -------------------------------------------------------------


def test_no_user_is_in_two_parts():
    users = np.array(read_long_table("t.csv", group="user").clusters)
    rows = extra_of("whole")
    train, validation, test = (
        {*users[rows[f"{part}_rows"]]} for part in ("train", "validation", "test")
    )
    assert len(train) + len(validation) + len(test) == len(train | validation | test) == 12
    assert {*read_decisions(RUNS / "whole")["cluster"]} == test


def test_a_stopped_run_goes_on_with_the_same_split():
    words = words_of(TRAIN, GROUPED, "seeds=[0] name=stopped")
    with ctrl_c(lambda trainer: trainer.state.iteration == 5):
        assert main(words) != 0
    launch(words)
    rows, whole = extra_of("stopped"), extra_of("whole")
    for part in ("train_rows", "validation_rows", "test_rows"):
        assert torch.equal(rows[part], whole[part])
    assert_frame_equal(decisions_of("stopped"), decisions_of("whole"))


def test_evaluation_judges_the_same_samples(capsys):
    launch("evaluate checkpoint=runs/controller/whole json=again.json own_cost=false")
    assert "not the training profile" not in capsys.readouterr().out
    again, results = read_json("again.json"), results_of("whole")
    assert again["test_samples"] == results["test_samples"] == len(extra_of("whole")["test_rows"])
    assert again["profile"]["digest"] == results["profile"]["digest"]


def test_several_splits_keep_users_whole():
    launch(TRAIN, GROUPED, "seeds=[0] name=repeats split.repeats=2")
    decisions = decisions_of("repeats")["split", "sample", "cluster"].unique()
    every = decisions["sample", "cluster"].unique()
    for part in decisions.partition_by("split"):
        tested = every.filter(pl.col("cluster").is_in(part["cluster"].unique()))
        assert {*tested["sample"]} == {*part["sample"]}


def test_files_without_columns_are_refused(capsys):
    replace(read_long_table("t.csv", group="user"), features={}).save("t.safetensors")
    for words, fault in (
        ("profile=table profile.path=t.safetensors profile.group=user", "profile.group"),
        ("profile=builtin profile.group=user", "group"),
        ("profile=table profile.path=t.csv profile.group=video", "video"),
    ):
        assert fault in refused(words_of("inspect", words), capsys)


def test_runs_that_share_clusters_are_compared_by_them():
    launch(TRAIN, GROUPED, "name=other seeds=[1]")
    launch("compare runs=[runs/controller/whole,runs/controller/other] json=c.json html=null")
    (difference,) = read_json("c.json")["differences"]
    # the signs of k users have 2^k patterns, of which two are as extreme as any
    users = read_decisions(RUNS / "whole")["cluster"].n_unique()
    assert difference["samples"] == results_of("whole")["test_samples"] > users
    assert difference["p"] >= 0.9 * 2 / 2**users
