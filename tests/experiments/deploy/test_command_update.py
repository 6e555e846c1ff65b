"""`knobwise update`, through the command line: from a log, and for the hardware that some cells
were timed on."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from commands import OPTIMISER, TABLE, Capture, Patch, mistake, refused, write_table
from helpers import arrays, deployed, driven_apart, small_table
from replayed import logging_model, serve_requests, untrained
from wandb_stub import offline_runs

from knobwise.__main__ import main
from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
from knobwise.agents.judging.evaluation import judge
from knobwise.agents.policy.controller import NumpyController
from knobwise.agents.serving.request_log import RequestLog
from knobwise.agents.stack.deployed import DeployedController
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
            "optimiser.teacher_iterations=60",
            "optimiser.warmup_iterations=150",
            "baselines=false",
        ]
        assert main(["train", *TABLE, *OPTIMISER, *words]) == 0
    return folder


def decides_alike(
    controller: DeployedController, exported: NumpyController, table: ProfileTable
) -> bool:
    """Whether a version's checkpoint and its arrays are the same policy."""
    budgets = default_budgets(table).double().numpy()
    limits = budgets[np.arange(table.num_samples) % len(budgets)]
    both = (each.choose(arrays(table), limits) for each in (controller, exported))
    return controller.decider.digest == exported.digest and np.array_equal(*both)


@pytest.fixture
def folder(trained: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(trained)
    return trained


def timed(cells: pl.DataFrame) -> pl.DataFrame:
    """These cells with the times of the other hardware."""
    measured = pl.read_parquet("t.parquet").with_columns(pl.col("sample_id").cast(pl.String))
    keys = ["sample_id", "max_crops", "top_k", "num_active_blocks"]
    times = (
        cells.select(keys)
        .with_columns(pl.col("sample_id").cast(pl.String))
        .join(measured, on=keys, how="left")
    )
    factor = pl.col("top_k").replace_strict(FACTORS, return_dtype=pl.Float64)
    return times.with_columns(latency_ms=pl.col("latency_ms") * factor)


def test_some_timed_cells_give_a_controller_for_other_hardware(
    folder: Path, capsys: Capture
) -> None:
    loaded = load_checkpoint("runs/latest/checkpoints/best.pt")
    cells = pl.read_parquet("t.parquet").sample(16, seed=0)
    timed(cells).write_csv("timed.csv")
    assert (
        main(["update", *TRAINED_ON, "profile=table", "profile.path=timed.csv", "out=adapted"]) == 0
    )
    printed = capsys.readouterr().out
    assert "16 timed cells: configurations take 2." in printed or "take 1.9" in printed
    adapted = load_checkpoint("adapted/current/controller.pt")
    facts = adapted.extra["adapted"]
    table = read_long_table("t.parquet", features="f.npz")
    factors = torch.tensor([FACTORS[table.configuration(c)["top_k"]] for c in range(12)])
    assert facts["factors"] == pytest.approx(factors.tolist(), rel=0.06)
    assert (facts["timed"], facts["cells"]) == ("timed", 16)
    exported = NumpyController.load("adapted/current/controller.npz")
    assert decides_alike(adapted.controller, exported, table)
    there = replace(table, latency_ms=table.latency_ms * factors)
    test, budgets = loaded.extra["test_rows"], default_budgets(there)
    utility = [
        judge(each.controller, there, test, budgets).metrics()["Utility"]
        for each in (loaded, adapted)
    ]
    assert utility[1] > utility[0] + 0.1
    # it is a checkpoint like any other, but not one to adapt again
    assert main(["export", "checkpoint=adapted/current", *TABLE, "out=exported"]) == 0
    words = ["update", *TRAINED_ON, "profile=builtin", "checkpoint=adapted/current"]
    assert "was already adapted; give the controller as it was trained" in mistake(words, capsys)


def test_what_cannot_be_adapted_to_is_refused_in_a_line(folder: Path, capsys: Capture) -> None:
    measured = pl.read_parquet("t.parquet")
    tables = {
        "other.csv": measured.with_columns(top_k=pl.col("top_k") + 1),
        "strangers.csv": measured.with_columns(
            sample_id=pl.lit("s") + pl.col("sample_id").cast(pl.String)
        ),
        "few.csv": measured.head(3),
        "renamed.csv": measured.rename({"top_k": "experts"}),
        "untimed.csv": measured.with_columns(latency_ms=pl.lit(None)),
    }
    for name, frame in tables.items():
        frame.write_csv(name)
    messages = {
        "other.csv": "12 of its configurations are not in 't'",
        "strangers.csv": "0 of its cells",
        "few.csv": "3 of its cells (sample and configuration) are also in "
        "'t', but at least 5 are needed",
        "renamed.csv": "top_k for a knob",
        "untimed.csv": "no row with both accuracy and latency_ms",
    }
    for name, message in messages.items():
        words = ["update", *TRAINED_ON, "profile=table", f"profile.path={name}", "out=nothing"]
        assert message in refused(words, capsys)
    assert "is another, 'builtin'" in refused(
        ["update", "trained_on=builtin", "profile=builtin"], capsys
    )
    assert (
        "give log=FOLDER, the requests to learn from, or profile=table profile.path=FILE, the cells"
        in refused(["update"], capsys)
    )
    assert "trained_on=table trained_on.path=a.csv" in refused(
        ["update", "trained_on=a.csv"], capsys
    )


def for_mean_budgets(table: ProfileTable) -> DeployedController:
    return deployed(table, budgets_ms=torch.tensor([9.0, 15.0]), sense="mean")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            untrained,
            "has no teacher whose expectations could be adapted; train with policy=auto or "
            "policy=utility",
        ),
        (for_mean_budgets, "decides for mean budgets"),
    ],
)
def test_controllers_without_expectations_to_move_are_refused(
    make: Callable[[ProfileTable], DeployedController], message: str, folder: Path, capsys: Capture
) -> None:
    table = small_table(40)
    save_checkpoint("other.pt", make(table), table, {})
    assert message in refused(
        ["update", "profile=builtin", "checkpoint=other.pt", "out=nothing"], capsys
    )


def test_all_cells_are_read_by_the_knobs_of_the_controller(folder: Path, capsys: Capture) -> None:
    """Other columns may look like knobs."""
    every = timed(pl.read_parquet("t.parquet")).with_columns(watts=pl.int_range(pl.len()))
    every.write_csv("all.csv")
    assert main(["update", *TRAINED_ON, "profile=table", "profile.path=all.csv", "out=every"]) == 0
    assert f"{120 * 12} timed cells" in capsys.readouterr().out
    factors = load_checkpoint("every/current/controller.pt").extra["adapted"]["factors"]
    assert np.log(factors).mean() == pytest.approx(math.log(12) / 2, abs=0.01)


def test_a_log_gives_versions_of_which_the_better_serves_and_rollback_goes_back(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    table = read_long_table("t.parquet", features="f.npz")
    log, out = f"log={tmp_path / 'log'}", f"out={tmp_path / 'out'}"
    current, quick = (
        tmp_path / "out" / "current",
        ["learning.folds=2", "learning.confidence=0.8"],
    )

    def slower(values: object) -> float:
        return 1.0 if dict(values)["top_k"] == 4 else 3.0  # type: ignore[call-overload]

    agent = load_checkpoint("runs/latest/checkpoints/best.pt").controller
    options = {"explore": 0.4, "explore_loss": 0.4, "seed": 0, "tracker": False}
    model = logging_model(tmp_path / "log", agent, table, slower, **options)
    serve_requests(model, table, 700)
    RequestLog(tmp_path / "log").label("nobody", 1.0)
    assert main(["inspect", log, f"json={tmp_path / 'facts.json'}"]) == 0
    printed = capsys.readouterr().out
    assert "700 requests by 1 controllers" in printed
    assert "100.0% labelled" in printed
    assert "1 set aside: a label of an unknown request" in printed
    assert json.loads((tmp_path / "facts.json").read_text())["set_aside"] == {
        "a label of an unknown request": 1
    }

    assert main(["update", log, out, *quick]) == 0
    printed = capsys.readouterr().out
    assert "0001: serves now" in printed
    assert "offsets of latencies" in printed
    facts = json.loads((current / "update.json").read_text())
    assert (facts["before"], facts["better"], facts["requests"]) == ("0000", True, 700)
    assert any(
        step["better"] and step["doubly_robust"]["difference"][0] > 0
        for step in facts["steps"].values()
    )
    updated = load_checkpoint(current / "controller.pt")
    serving = NumpyController.load(current / "controller.npz")
    assert decides_alike(updated.controller, serving, table)
    model.watch(current)
    assert model.controller.digest == serving.digest
    serve_requests(model, table, 60, seed=1)

    # the log now holds requests of both versions; the old checkpoint is not what serves any more
    assert "serves another controller" in mistake(["update", log, out, *quick], capsys)
    assert main(["update", log, out, *quick, f"checkpoint={current}"]) == 0
    assert "760 requests" in capsys.readouterr().out
    assert (tmp_path / "out" / "versions" / "0002").exists()  # whether it serves or not
    before = json.loads((current / "update.json").read_text())["before"]
    assert main(["update", "rollback=true", out]) == 0
    assert current.resolve().name == before
    while json.loads((current / "update.json").read_text())["before"] is not None:
        assert main(["update", "rollback=true", out]) == 0
    assert (
        NumpyController.load(current / "controller.npz").digest
        == NumpyController.load(tmp_path / "out" / "versions" / "0000" / "controller.npz").digest
    )
    assert "0000 is the first version" in mistake(["update", "rollback=true", out], capsys)
    # a log of another controller is refused, with the reason
    other = DeployedController(
        driven_apart(table, agent.controller.config), agent.teacher, agent.settled
    ).eval()
    save_checkpoint(tmp_path / "else.pt", other, table, {})
    assert (
        main(["update", log, f"out={tmp_path / 'else'}", f"checkpoint={tmp_path / 'else.pt'}"]) == 2
    )
    captured = capsys.readouterr()
    assert "760 set aside: of another controller" in captured.out
    assert "no request in it can be used" in captured.err


def test_updates_go_on_while_the_log_grows(
    folder: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    table = read_long_table("t.parquet", features="f.npz")
    agent = load_checkpoint("runs/latest/checkpoints/best.pt").controller
    model = logging_model(
        tmp_path / "log", agent, table, lambda values: 1.0, explore=0.4, explore_loss=0.4, seed=0
    )
    serve_requests(model, table, 40)
    polls = iter((30, 15, None))

    def served_between_polls(seconds: float) -> None:
        """As if requests were served by another process; ends by Ctrl-C."""
        if (count := next(polls)) is None:
            raise KeyboardInterrupt
        serve_requests(model, table, count, seed=1)

    monkeypatch.setattr("knobwise.experiments.deploy.update.sleep", served_between_polls)
    words = [
        "update",
        f"log={tmp_path / 'log'}",
        f"out={tmp_path / 'out'}",
        "every=40",
        "learning.folds=2",
    ]
    words.append("tracking=offline")
    assert main(words) == 130
    out = tmp_path / "out" / "versions"
    updates = [json.loads((path / "update.json").read_text()) for path in sorted(out.iterdir())]
    # of 40 requests, and of 85; not of 70, as fewer than 40 were new
    assert [facts.get("requests") for facts in updates] == [None, 40, 85]
    # each is a step of one run, which a later session continues; it does not repeat the last
    logged = pl.read_csv(tmp_path / "out" / "metrics.csv")
    assert logged["step"].to_list() == [1, 2]
    assert logged["Log/Requests"].to_list() == [40, 85]
    latest = updates[-1]["steps"]["latencies"]["doubly_robust"]["difference"][0]
    assert logged["Update/Gain_latencies"][-1] == pytest.approx(latest)
    assert 0 < logged["Log/On_Time"][-1] <= 1
    polls = iter((40, None))
    assert main([*words, f"checkpoint={tmp_path / 'out' / 'current'}"]) == 130
    assert pl.read_csv(tmp_path / "out" / "metrics.csv")["step"].to_list() == [1, 2, 3]
    sessions = offline_runs(tmp_path / "out")
    assert len({session.name for session in sessions}) == 1
    assert sorted(row["step"] for session in sessions for row in session.history) == [1, 2, 3]


@pytest.mark.campaign
def test_a_killed_update_leaves_what_served(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    table = read_long_table("t.parquet", features="f.npz")
    agent = load_checkpoint("runs/latest/checkpoints/best.pt").controller
    model = logging_model(
        tmp_path / "log", agent, table, lambda values: 1.0, explore=0.4, explore_loss=0.4, seed=0
    )
    serve_requests(model, table, 60)
    out, words = (
        tmp_path / "out",
        [f"log={tmp_path / 'log'}", f"out={tmp_path / 'out'}", "learning.folds=2"],
    )
    killing = (
        "import os, signal, sys\n"
        "from knobwise.__main__ import main\n"
        "from knobwise.agents.stack.deployed import DeployedController\n"
        "write, left = DeployedController.export, [int(sys.argv.pop(1))]\n"
        "def killed(*arguments):\n"
        "    write(*arguments)\n"
        "    left[0] -= 1\n"
        "    if not left[0]: os.kill(os.getpid(), signal.SIGKILL)\n"
        "DeployedController.export = killed\n"
        "main(sys.argv[1:])\n"
    )
    for writes in (1, 2):  # while the first version is written, and while the update is
        command = [sys.executable, "-c", killing, str(writes), "update", *words]
        assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
        if writes == 2:
            assert (
                NumpyController.load(out / "current" / "controller.npz").digest
                == model.controller.digest
            )
    for _ in range(2):  # given again, it has nothing to add
        assert main(["update", *words]) == 0
        assert (
            NumpyController.load(out / "current" / "controller.npz").digest
            == model.controller.digest
        )
        assert sorted(path.name for path in (out / "versions").iterdir()) == ["0000", "0001"]
        assert not [path for path in out.rglob(".*") if path.name not in (".lock",)]
    arrays = out / "versions" / "0001" / "controller.npz"
    arrays.write_bytes(arrays.read_bytes()[:999])
    assert main(["update", *words]) == 0
    assert f"{arrays}: is damaged; the version is made again" in capsys.readouterr().err
    NumpyController.load(out / "versions" / "0002" / "controller.npz")


def test_mistakes_of_an_update_are_one_line(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    for words, message in (
        ([f"log={tmp_path}"], "no requests-….jsonl in it; give the folder of AdaptiveModel(log=…)"),
        (["log=a", "profile=builtin"], "give log=FOLDER"),
        (["rollback=true", "out=nothing"], "it holds no version to roll back from"),
        (["log=a", "learning.confidence=2"], "learning.confidence=2.0: must be at least 0.5"),
        (["log=a", "every=0"], "every=0: must be at least 1"),
        (["log=a", "learning.steps=100"], "learning.steps=100: there is no such option"),
    ):
        assert message in refused(["update", *words], capsys)
    assert "no requests-….jsonl in it" in mistake(["inspect", "log=nothing"], capsys)
