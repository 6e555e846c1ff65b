"""`profile.group` from a CSV to decisions: the split of a run, its resumption, its evaluation and
its intervals keep whole what belongs together."""

from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from commands import OPTIMISER, ctrl_c, launch, read_json, refused, words_of
from helpers import small_table

from knobwise.__main__ import main
from knobwise.agents.checkpoint import load_checkpoint
from knobwise.envs.readers.long_table import long_frame, read_long_table
from knobwise.experiments.results.decisions import read_decisions
from knobwise.experiments.results.statistics import paired, resampled_means

PROFILE = words_of("profile=table profile.path=t.csv profile.group=user profile.features=[length]")
TRAIN = words_of(
    "train",
    PROFILE,
    OPTIMISER,
    "policy=independent seeds=[0] baselines=false own_cost=false tracking.tensorboard=false",
)
RUNS = Path("runs/controller")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a CSV of 12 users, and a run on it."""
    folder = tmp_path_factory.mktemp("users")
    with chdir(folder):
        table = small_table(60)
        users = tuple(f"u{row % 12}" for row in range(60))
        frame = long_frame(replace(table, clusters=users)).rename({"cluster": "user"})
        length = pl.col("sample_id").cast(pl.Int64) % 7
        frame.with_columns(length=length).write_csv("t.csv")
        launch(TRAIN, "name=whole")
    return folder


@pytest.fixture
def folder(made, monkeypatch):
    monkeypatch.chdir(made)
    return made


def rows_of(run):
    """The rows of each part, as the checkpoint keeps them."""
    extra = load_checkpoint(next((RUNS / run).rglob("best.pt"))).extra
    return [extra[f"{part}_rows"].tolist() for part in ("train", "validation", "test")]


def test_no_user_is_in_two_parts(folder):
    users = np.array(read_long_table("t.csv", group="user").clusters)
    train, validation, test = (set(users[rows]) for rows in rows_of("whole"))
    assert len(train) + len(validation) + len(test) == len(train | validation | test) == 12
    decisions = read_decisions(RUNS / "whole")
    assert set(decisions["cluster"]) == test


def test_a_stopped_run_goes_on_with_the_same_split(folder):
    with ctrl_c(lambda trainer: trainer.iteration == 5):
        assert main([*TRAIN, "name=stopped"]) != 0
    launch(TRAIN, "name=stopped")
    assert rows_of("stopped") == rows_of("whole")
    first, second = (read_decisions(RUNS / name) for name in ("whole", "stopped"))
    assert first.drop("decision_us").equals(second.drop("decision_us"))


def test_evaluation_judges_the_same_samples(folder, capsys):
    launch("evaluate checkpoint=runs/controller/whole json=again.json own_cost=false")
    assert "not the training profile" not in capsys.readouterr().out
    again = read_json("again.json")
    results = read_json(RUNS / "whole" / "results.json")
    assert again["test_samples"] == results["test_samples"] == len(rows_of("whole")[2])
    assert again["profile"]["digest"] == results["profile"]["digest"]


def test_several_splits_keep_users_whole(folder):
    launch(TRAIN, "name=repeats split.repeats=2")
    users = dict(read_decisions(RUNS / "repeats").select("sample_id", "cluster").iter_rows())
    for part in read_decisions(RUNS / "repeats").partition_by("split"):
        tested = set(part["cluster"])
        assert {sample for sample in users if users[sample] in tested} == set(part["sample_id"])


def test_files_without_columns_are_refused(folder, capsys):
    table = replace(read_long_table("t.csv", group="user"), features={})
    table.save("t.safetensors")
    words = words_of("inspect profile=table profile.path=t.safetensors profile.group=user")
    assert "profile.group" in refused(words, capsys)
    assert "group" in refused(words_of("inspect profile=builtin profile.group=user"), capsys)
    assert "video" in refused(
        words_of("inspect profile=table profile.path=t.csv profile.group=video"), capsys
    )


def test_runs_that_share_clusters_are_compared_by_them(folder):
    launch(TRAIN, "name=other seeds=[1]")
    launch("compare runs=[runs/controller/whole,runs/controller/other] json=c.json html=null")
    (difference,) = read_json("c.json")["differences"]
    # the signs of k users have 2^k patterns, of which two are as extreme as any
    users = read_decisions(RUNS / "whole")["cluster"].n_unique()
    assert difference["samples"] == len(rows_of("whole")[2]) > users
    assert difference["p"] >= 0.9 * 2 / 2**users


def test_draws_of_clusters_are_those_of_one_sample_each():
    draws = np.random.default_rng(0)
    values = draws.normal(size=(1, 30, 3))
    other = draws.normal(size=(1, 30, 3))
    # each sample three times: a draw of clusters has all copies or none
    clusters = np.tile(np.arange(30), 3)
    copied, others = (np.tile(each, (1, 3, 1)) for each in (values, other))
    splits = np.stack([np.zeros(90, int), clusters])
    once = resampled_means([values[..., 0]])
    np.testing.assert_allclose(resampled_means([copied[..., 0]], splits=splits), once)
    alone = np.array(paired(values, other, True))
    np.testing.assert_allclose(np.array(paired(copied, others, True, clusters)), alone, rtol=1e-9)
    # as if all copies were samples, the interval is narrower by √3
    wrong = np.array(paired(copied, others, True))
    widths = (alone[:, 2] - alone[:, 1]) / (wrong[:, 2] - wrong[:, 1])
    assert widths == pytest.approx(np.full(3, 3**0.5), rel=0.1)
