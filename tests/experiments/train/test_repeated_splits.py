"""`split.repeats`: several random splits are one run with one table, each judged on its own test
samples."""

from contextlib import chdir
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from commands import (
    OPTIMISER,
    TABLE,
    ctrl_c,
    launch,
    read_json,
    refused,
    same,
    words_of,
    write_table,
)
from helpers import small_table
from polars.testing import assert_frame_equal

import knobwise
from knobwise.__main__ import main
from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.judging import baselines
from knobwise.common.errors import InputError
from knobwise.envs.readers.long_table import long_frame
from knobwise.experiments.results.attainable import QUICK
from knobwise.experiments.results.decisions import read_decisions
from knobwise.experiments.train import controller

TRAIN = words_of(
    "train",
    TABLE,
    OPTIMISER,
    "policy=independent seeds=[0,1] baselines=false own_cost=false",
    "tracking.tensorboard=false",
)
RUNS = Path("runs/controller")
SPLITS = [1, 2, 3]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a profile, a run on three splits, and a run on each of them at the same
    budgets."""
    folder = tmp_path_factory.mktemp("splits")
    with chdir(folder):
        write_table(60, holes=0.2)
        launch(TRAIN, "split.seed=1 split.repeats=3 name=three")
        budgets = f"budgets_ms={results_of('three')['budgets_ms']}".replace(" ", "")
        for seed in SPLITS:
            assert main([*TRAIN, f"split.seed={seed}", budgets, f"name=split{seed}"]) == 0
    return folder


@pytest.fixture
def folder(made, monkeypatch):
    monkeypatch.chdir(made)
    return made


def results_of(name):
    return dict(read_json(RUNS / name / "results.json"))


def decisions_of(name):
    return read_decisions(RUNS / name).drop("decision_us")


def test_each_split_is_decided_as_in_a_run_of_its_own(folder):
    decisions = decisions_of("three")
    for number, seed in enumerate(SPLITS):
        own = decisions.filter(pl.col("split") == number).drop("split")
        assert_frame_equal(own, decisions_of(f"split{seed}").drop("split"))


def test_rows_are_means_over_the_splits(folder):
    together, single = results_of("three"), [results_of(f"split{seed}") for seed in SPLITS]
    assert together["split_seeds"] == SPLITS
    assert together["test_samples"] == 36
    parts = zip(*(results["rows"] for results in single), strict=True)
    for row, of_splits in zip(together["rows"], parts, strict=True):
        for name in ("policy", "budget_ms"):
            assert {each[name] for each in of_splits} == {row[name]}
        utilities = [each["utility"] for each in of_splits]
        assert row["utility_per_split"] == pytest.approx(utilities)
        for name in ("utility", "accuracy", "latency_ms_mean", "satisfaction", "infeasible"):
            assert row[name] == pytest.approx(np.mean([each[name] for each in of_splits]))
        low, high = row["utility_ci95"]
        assert low <= row["utility"] <= high
        if row["policy"] == "controller":
            assert np.mean(row["utility_per_seed"]) == pytest.approx(row["utility"])


def test_the_first_split_is_deployed_and_reported(folder):
    together, first = results_of("three"), results_of("split1")
    for name in ("best_seed", "validation_utility", "chosen", "guard"):
        assert together[name] == first[name]
    runs = RUNS / "three", RUNS / "split1"
    best = [load_checkpoint(run / "checkpoints" / "best.pt").controller for run in runs]
    assert same(*(controller.state_dict() for controller in best))
    assert_frame_equal(*(pl.read_csv(run / "metrics.csv") for run in runs))
    reports = [(run / "report.html").read_text() for run in runs]
    assert ["3 splits (36 samples)" in report for report in reports] == [True, False]


def test_no_split_is_fitted_on_what_it_is_judged_on(folder):
    table, decisions, tests = small_table(60), decisions_of("three"), []
    for number, path in enumerate((".", "split1", "split2")):
        extra = load_checkpoint(RUNS / "three" / path / "checkpoints" / "best.pt").extra
        tests.append(set(extra["test_rows"].tolist()))
        fitted = torch.cat([extra["train_rows"], extra["validation_rows"]])
        assert tests[-1].isdisjoint(fitted.tolist())
        judged = decisions.filter(pl.col("split") == number)["sample_id"].unique()
        assert set(judged) == {table.sample_ids[row] for row in tests[-1]}
    assert tests[0] != tests[1] != tests[2]


def test_an_interrupted_run_resumes_split_by_split(folder, capsys):
    words = words_of(TRAIN, "split.seed=1 split.repeats=3 name=killed")
    with ctrl_c(lambda trainer: (trainer.title[:15], trainer.iteration) == ("split 1, seed 1", 6)):
        assert main(words) == 130
    assert not (RUNS / "killed" / "split2").exists()
    finished = RUNS / "killed" / "split1" / "checkpoints" / "seed0" / "last.pt"
    before = finished.stat().st_mtime_ns
    launch(words)
    assert finished.stat().st_mtime_ns == before
    assert_frame_equal(decisions_of("killed"), decisions_of("three"))
    rows = zip(results_of("three")["rows"], results_of("killed")["rows"], strict=True)
    for whole, killed in rows:
        assert whole | {"decision_us_p50": 0} == killed | {"decision_us_p50": 0}


def test_every_split_divides_the_folds_of_its_baselines_anew(folder, monkeypatch):
    seeds, make = [], controller.make_baselines

    def noted(table, split, seed, *rest, **others):
        seeds.append(seed)
        return make(table, split, seed, *rest, **others)

    monkeypatch.setattr(controller, "make_baselines", noted)
    for module in (baselines, controller):  # without the slowest families
        monkeypatch.setattr(module, "FAMILIES", QUICK)
    words = [word for word in TRAIN if not word.startswith(("baselines", "seeds"))]
    launch(words, "seeds=[4] split.repeats=2 name=baselines")
    assert seeds == [4, 5]
    means = [row for row in results_of("baselines")["rows"] if row["budget_ms"] is None]
    rows = {row["policy"]: row for row in means}
    assert len(rows["ridge"]["utility_per_split"]) == 2
    assert len(rows["controller"]["utility_per_seed"]) == 1
    assert "utility_per_seed" not in rows["ridge"]


def test_a_comparison_shows_such_a_run_but_does_not_test_it(folder, capsys):
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
def test_what_cannot_be_repeated_is_refused(folder, words, capsys):
    part = pl.when(pl.col("sample_id").cast(pl.Int64) < 40).then(pl.lit("train"))
    fixed = long_frame(small_table(60)).with_columns(split=part.otherwise(pl.lit("test")))
    fixed.write_parquet("fixed.parquet")
    assert MISTAKES[words] in refused([*TRAIN, *words.split()], capsys)


def test_fit_takes_one_split():
    with pytest.raises(InputError, match=r"split\.repeats"):
        knobwise.fit(small_table(60), policy="independent", **{"split.repeats": 2})
