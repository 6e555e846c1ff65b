"""`knobwise adapt`, through the command line: a controller for the hardware that some cells were timed on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from commands import OPTIMISER, TABLE, Capture, Patch, mistake, refused, write_table
from helpers import driven_apart, small_table

from knobwise.__main__ import main
from knobwise.agents.checkpoint import Agent, load_checkpoint, save_checkpoint
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.judging.evaluation import judge
from knobwise.agents.serving.export import parity
from knobwise.agents.serving.numpy_controller import NumpyController
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.readers.long_table import read_long_table
from knobwise.envs.tables.profile_table import ProfileTable

TRAINED_ON = ["trained_on=table", "trained_on.path=t.parquet", "trained_on.features=f.npz"]
FACTORS = {4: 2.0, 8: 6.0}
"""By top_k: how many times as long the other hardware takes."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profile and a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_table(120)
        words = [
            "policy=utility",
            "policy.members=2",
            "seeds=[0]",
            "name=run",
            "optimiser.warmup_iterations=60",
            "baselines=false",
        ]
        assert main(["train", *TABLE, *OPTIMISER, *words]) == 0
    return folder


@pytest.fixture
def folder(trained: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(trained)
    return trained


def timed(cells: pl.DataFrame) -> pl.DataFrame:
    """These cells with the times of the other hardware."""
    measured = pl.read_parquet("t.parquet").with_columns(pl.col("sample_id").cast(pl.String))
    keys = ["sample_id", "max_crops", "top_k", "num_active_blocks"]
    times = cells.select(keys).with_columns(pl.col("sample_id").cast(pl.String)).join(measured, on=keys, how="left")
    factor = pl.col("top_k").replace_strict(FACTORS, return_dtype=pl.Float64)
    return times.with_columns(latency_ms=pl.col("latency_ms") * factor)


def test_some_timed_cells_give_a_controller_for_other_hardware(folder: Path, capsys: Capture) -> None:
    loaded = load_checkpoint("runs/latest/checkpoints/best.pt")
    cells = pl.read_parquet("t.parquet").sample(16, seed=0)
    timed(cells).write_csv("timed.csv")
    assert main(["adapt", *TRAINED_ON, "profile=table", "profile.path=timed.csv", "out=adapted"]) == 0
    printed = capsys.readouterr().out
    assert "16 timed cells: configurations take 2." in printed or "take 1.9" in printed
    adapted = load_checkpoint("adapted/controller.pt")
    facts = adapted.extra["adapted"]
    table = read_long_table("t.parquet", features="f.npz")
    factors = torch.tensor([FACTORS[table.configuration(c)["top_k"]] for c in range(12)])
    assert facts["factors"] == pytest.approx(factors.tolist(), rel=0.06)
    assert (facts["timed"], facts["cells"]) == ("timed", 16)
    numpy = NumpyController.load("adapted/controller.npz")
    parity(adapted.controller, numpy.choose, table, default_budgets(table), "adapted")
    there = replace(table, latency_ms=table.latency_ms * factors)
    test, budgets = loaded.extra["test_rows"], default_budgets(there)
    utility = [judge(each.controller, there, test, budgets).metrics()["Utility"] for each in (loaded, adapted)]
    assert utility[1] > utility[0] + 0.1
    # it is a checkpoint like any other, but not one to adapt again
    assert main(["export", "checkpoint=adapted/controller.pt", *TABLE, "out=exported"]) == 0
    words = ["adapt", *TRAINED_ON, "profile=builtin", "checkpoint=adapted/controller.pt"]
    assert "was adapted before; give the controller as it was trained" in mistake(words, capsys)


def test_what_cannot_be_adapted_to_is_refused_in_a_line(folder: Path, capsys: Capture) -> None:
    measured = pl.read_parquet("t.parquet")
    tables = {
        "other.csv": measured.with_columns(top_k=pl.col("top_k") + 1),
        "strangers.csv": measured.with_columns(sample_id=pl.lit("s") + pl.col("sample_id").cast(pl.String)),
        "few.csv": measured.head(3),
        "renamed.csv": measured.rename({"top_k": "experts"}),
        "untimed.csv": measured.with_columns(latency_ms=pl.lit(None)),
    }
    for name, frame in tables.items():
        frame.write_csv(name)
    messages = {
        "other.csv": "12 of its configurations are none of 't'",
        "strangers.csv": "0 of its cells",
        "few.csv": "3 of its cells (sample and configuration) are in 't' too, at least 5 are needed",
        "renamed.csv": "top_k for a knob",
        "untimed.csv": "no row with both accuracy and latency_ms",
    }
    for name, message in messages.items():
        words = ["adapt", *TRAINED_ON, "profile=table", f"profile.path={name}", "out=nothing"]
        assert message in refused(words, capsys)
    assert "is another, 'builtin'" in refused(["adapt", "profile=builtin"], capsys)
    assert "profile: name what was timed on the other hardware" in refused(["adapt"], capsys)
    assert "trained_on=table trained_on.path=a.csv" in refused(["adapt", "trained_on=a.csv"], capsys)


def knobs(table: ProfileTable) -> Agent:
    return driven_apart(table, PolicyConfig(hidden=8))


def priced(table: ProfileTable) -> Agent:
    return driven_apart(table, PolicyConfig(structure="utility", hidden=8), priced=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (knobs, "policy.structure=independent predicts no latencies that could be adapted; train with policy=auto"),
        (priced, "decides for mean budgets"),
    ],
)
def test_controllers_without_latencies_to_move_are_refused(
    make: Callable[[ProfileTable], Agent], message: str, folder: Path, capsys: Capture
) -> None:
    table = small_table(40)
    save_checkpoint("other.pt", make(table), table, {})
    assert message in refused(["adapt", "profile=builtin", "checkpoint=other.pt", "out=nothing"], capsys)


def test_all_cells_are_read_by_the_knobs_of_the_controller(folder: Path, capsys: Capture) -> None:
    """Other columns may look like knobs."""
    every = timed(pl.read_parquet("t.parquet")).with_columns(watts=pl.int_range(pl.len()))
    every.write_csv("all.csv")
    assert main(["adapt", *TRAINED_ON, "profile=table", "profile.path=all.csv", "out=every"]) == 0
    assert f"{120 * 12} timed cells" in capsys.readouterr().out
    factors = load_checkpoint("every/controller.pt").extra["adapted"]["factors"]
    assert np.log(factors).mean() == pytest.approx(math.log(12) / 2, abs=0.01)
