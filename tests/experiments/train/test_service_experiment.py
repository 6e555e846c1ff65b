"""`knobwise train experiment=service` on top of a small stack: its run, its stop, its page, and its mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
import torch
from commands import TABLE, Capture, Patch, ctrl_c, mistake, write_table
from helpers import driven_apart

from knobwise.__main__ import main
from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.common.errors import InputError
from knobwise.experiments.compare.runs import read_runs
from knobwise.experiments.settings.profiles import TableProfile, read_profile
from knobwise.experiments.studies.service import ServiceStudyConfig, run

WORDS = [
    *("train", "experiment=service", "checkpoint=stack.pt", *TABLE, "seeds=[0,1]", "tracking=disabled", "name=r"),
    *("loads=[0.8,bursts 0.3 1.3]", "judged_loads=[0.9,ramp 0.3 1.3]", "tuned_at=[0.9]", "requests=20", "traces=6"),
    *("optimiser.iterations=4", "optimiser.contexts=4", "optimiser.evaluate_every=2", "loss.group_size=4"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A folder with a profile and a controller for it."""
    monkeypatch.chdir(tmp_path)
    write_table()
    table = read_profile(TableProfile(path="t.parquet", features="f.npz"))
    network = driven_apart(table, PolicyConfig(structure="utility", members=2, hidden=16, layers=1))
    rows = {name: torch.arange(60)[part] for name, part in (("train", slice(36)), ("validation", slice(36, 48)))}
    extra = {f"{name}_rows": each for name, each in rows.items()} | {"test_rows": torch.arange(48, 60)}
    save_checkpoint("stack.pt", StackedController(network, [], torch.ones(1)), table, extra)
    save_checkpoint("heads.pt", Controller.for_table(table, torch.arange(60), PolicyConfig(), False), table, extra)
    return tmp_path


def test_a_run_and_its_page(folder: Path, capsys: Capture) -> None:
    assert main(WORDS) == 0
    printed = capsys.readouterr().out
    assert "price by GRPO" in printed
    assert "over the price by backlog tuned at this very load" in printed
    path = Path("runs/service/r")
    results = json.loads((path / "results.json").read_text())
    policies = {row["policy"] for row in results["rows"]}
    assert {"price_grpo", "price_backlog", "price_backlog_at_0.9", "myopic", "best_static"} <= policies
    assert results["loads"] == ["0.9", "ramp 0.3 1.3"]
    frame = pl.read_parquet(path / "decisions.parquet")
    for row in results["rows"]:
        part = frame.filter(pl.col("policy") == row["policy"])
        part = part if row["load"] is None else part.filter(pl.col("dataset") == row["load"])
        assert part["score"].mean() == pytest.approx(row["utility"], abs=1e-6)
    for row in results["differences"]:
        each = [
            next(r for r in results["rows"] if (r["policy"], r["load"]) == (p, row["load"]))["utility"]
            for p in (row["policy"], row["against"])
        ]
        assert row["difference"] == pytest.approx(each[0] - each[1])
        assert row["ci95"][0] <= row["difference"] <= row["ci95"][1]
    page = (path / "report.html").read_text()
    assert "Utility against load" in page
    assert {file.name for file in path.iterdir()} >= {"config.yaml", "metrics.csv", "checkpoints"}
    with pytest.raises(InputError, match="its report compares them"):
        read_runs([path])
    assert run(ServiceStudyConfig(run=str(path), out="service.md")) == []
    written = Path("service.md").read_text()
    assert "| price by GRPO |" in written
    assert "GRPO minus this rule" in written


def test_a_stopped_run_ends_as_one_that_was_not(folder: Path) -> None:
    assert main(WORDS) == 0
    stopped = [*WORDS, "runs=others"]
    with ctrl_c(lambda trainer: trainer.seed == 1 and trainer.iteration == 3):
        assert main(stopped) == 130
    assert (folder / "others/service/r/.unfinished").exists()
    assert main(stopped) == 0
    for name in ("seed0/best.pt", "seed1/last.pt"):
        first, second = (
            load_checkpoint(f"{runs}/service/r/checkpoints/{name}").agent.state_dict() for runs in ("runs", "others")
        )
        assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["checkpoint=heads.pt"], "holds a Controller; requests that wait need a controller for deadlines"),
        (["checkpoint=none.pt"], "no such checkpoint"),
        (["profile.path=ot.parquet", "profile.features=of.npz"], "was trained on"),
        (["servers=0"], "servers=0: must be at least 1"),
        (["loads=[0]"], "load 0: must be positive"),
        (["judged_loads=[recorded none.txt]"], "none.txt: cannot be read"),
        (["judged_loads=[recorded back.txt]"], "back.txt: arrival 2 comes before the one above it"),
        (["tuned_at=[-1]"], "tuned_at=-1.0: must be positive"),
        (["loads=[]"], "at least one is needed"),
        (["loss.discount=1.5"], "discount"),
    ],
)
def test_mistakes(words: list[str], message: str, folder: Path, capsys: Capture) -> None:
    write_table(seed=1, prefix="o")
    (folder / "back.txt").write_text("5\n4\n")
    assert message in mistake([*WORDS, *words], capsys)
    assert not (folder / "runs").exists()
