"""Launchers of sweeps: which cannot be used, which Ray cluster is joined, where jobs stand; and one
sweep for the same words in any order."""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import ray
from commands import SIMULATED, Capture, Patch, refused
from omegaconf import DictConfig
from test_sweeps import ADDRESS, finished

from knobwise.__main__ import main
from knobwise.common.errors import InputError
from knobwise.experiments.command_line import sweep_jobs
from knobwise.experiments.command_line.compose import composed
from knobwise.experiments.command_line.sweep import _in_order
from knobwise.experiments.command_line.sweep_jobs import Sweep, check_launcher
from knobwise.experiments.results.sweep_folder import Outcome, read_outcome

SWEEP = ["train", "-m", *SIMULATED, "loss=exact,sampled", "tracking=disabled"]


def trained(config: Any, words: list[str]) -> Path:
    """In the place of a training: one that fails for `sampled`."""
    if config.loss.objective == "sampled":
        raise InputError("not today")
    return finished(Path(config.runs) / "trained")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """An empty folder, and no address of a cluster around."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


def launcher(*words: str) -> DictConfig:
    return composed("train", list(words), with_hydra=True).hydra.launcher


# -- what cannot be used ---------------------------------------------------------------------------


def free_port() -> int:
    """Of this machine, at which nobody answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.mark.parametrize("protocol", ["", "ray://"])
@pytest.mark.parametrize("way", ["setting", "variable", "auto"])
def test_a_cluster_that_does_not_answer_is_one_line_before_anything_is_made(
    protocol: str, way: str, folder: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    address = f"{protocol}127.0.0.1:{free_port()}"
    words = {"setting": [ADDRESS + address], "variable": [], "auto": [f"{ADDRESS}auto"]}[way]
    if way != "setting":
        monkeypatch.setenv("RAY_ADDRESS", address)
    line = refused([*SWEEP, "hydra/launcher=ray", *words], capsys)
    key = ADDRESS if way == "setting" else "RAY_ADDRESS="
    assert (
        line
        == f"knobwise: {key}{address}: no Ray cluster answers at {address} (Connection refused)"
    )


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("auto", ConnectionError("Could not find any running Ray instance.\nPlease")),
        ("auto", RuntimeError("Version mismatch")),
        ("6379", ValueError("no such thing")),
    ],
)
def test_what_ray_says_of_a_cluster_is_one_line(
    address: str, error: Exception, folder: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr(ray, "init", Mock(side_effect=error))
    line = refused([*SWEEP, "hydra/launcher=ray", ADDRESS + address], capsys)
    assert line.startswith(
        f"knobwise: {ADDRESS}{address}: no Ray cluster answers at {address} as it should ("
    )
    assert str(error).splitlines()[0] in line


# -- which Ray -------------------------------------------------------------------------------------


@pytest.fixture
def listening() -> Iterator[str]:
    """The address of somebody who accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("way", ["setting", "variable"])
def test_a_cluster_is_joined_without_a_word_on_its_memory(
    way: str, folder: Path, listening: str, monkeypatch: Patch
) -> None:
    """`ray.init` refuses `object_store_memory`, which Hydra's launcher sets where it is the one
    that calls it."""
    monkeypatch.setattr(ray, "init", init := Mock())
    if way == "variable":
        monkeypatch.setenv("RAY_ADDRESS", listening)
        check_launcher(launcher("hydra/launcher=ray"))
        init.assert_called_once_with(address=None)
        return
    check_launcher(
        launcher(
            "hydra/launcher=ray", ADDRESS + listening, "+hydra.launcher.ray.init.namespace=mine"
        )
    )
    init.assert_called_once_with(address=listening, namespace="mine")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    check_launcher(launcher("hydra/launcher=ray", ADDRESS + listening))
    init.assert_called_once()


@pytest.mark.parametrize("words", [[], [f"{ADDRESS}local"]])
def test_without_an_address_ray_is_our_own(words: list[str], folder: Path) -> None:
    config = launcher("hydra/launcher=ray", *words)
    check_launcher(config)
    assert config.ray.init.address == "local"


JOBLIB = "hydra/launcher=joblib"


@pytest.mark.parametrize(
    "words", [["hydra/launcher=basic"], [JOBLIB], [JOBLIB, "hydra.launcher.n_jobs=-2"]]
)
def test_other_launchers_are_left_as_they_are(words: list[str]) -> None:
    config = launcher(*words)
    check_launcher(config)
    assert config == launcher(*words)


# -- the order of words ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "ordered"),
    [
        (["-m", "policy.hidden=8,16", "loss=exact"], ["-m", "loss=exact", "policy.hidden=8,16"]),
        (["policy.hidden=8", "policy=utility"], ["policy=utility", "policy.hidden=8"]),
        (["b=2", "a=1", "b=1"], ["a=1", "b=2", "b=1"]),
        (["b.c=1", "b={c: 2}", "a=1"], ["b.c=1", "b={c: 2}", "a=1"]),
    ],
)
def test_words_are_put_in_order_where_none_depends_on_it(
    words: list[str], ordered: list[str]
) -> None:
    assert _in_order(words) == ordered


def test_the_same_words_in_another_order_are_the_same_sweep(
    folder: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr(sweep_jobs, "train", trained)
    for words in (SWEEP[2:], SWEEP[:1:-1]):
        assert main(["train", *words, "-m"]) == 2
    assert "finished before and not run again: 1 of them" in capsys.readouterr().err
    assert len(list(Path("runs/multirun/controller").iterdir())) == 1


# -- what is said ----------------------------------------------------------------------------------


def swept(folder: Path, outcomes: list[Outcome | None], at_once: bool = True) -> Sweep:
    """A sweep whose jobs fare as it is said."""
    jobs = [["loss=exact", f"policy.hidden={number}"] for number in range(len(outcomes))]
    sweep = Sweep(folder, jobs, [], in_turn=not at_once)
    for number, outcome in enumerate(outcomes, 1):
        if outcome is not None:
            outcome.write(folder, number)
    return sweep


@pytest.mark.parametrize("at_once", [True, False])
def test_a_stopped_sweep_says_where_its_jobs_stand(at_once: bool, folder: Path) -> None:
    outcomes = [
        Outcome("finished", "r"),
        Outcome("failed", error="x"),
        Outcome("stopped", error="at 3 of 4"),
        None,
    ]
    sweep = swept(folder, [*outcomes, Outcome("stopped")], at_once)
    stop = KeyboardInterrupt()
    sweep.add_notes(stop)
    first, *others = stop.__notes__
    assert first == "1 of 5 jobs are finished, 1 failed, 2 stopped"
    stopped = ["job 3 of 5 (policy.hidden=2): at 3 of 4", "job 5 of 5 (policy.hidden=4): stopped"]
    assert others == (stopped if at_once else [])


def outcome_of(error: BaseException, folder: Path, monkeypatch: Patch, elsewhere: bool) -> Outcome:
    """The outcome of a job whose training raises this."""
    monkeypatch.setattr(sweep_jobs, "train", Mock(side_effect=error))
    sweep = Sweep(folder, [[]], [None], in_turn=False)
    if elsewhere:
        sweep.launcher = ("elsewhere", 1)
    sweep.run(1)
    outcome = read_outcome(folder, 1)
    assert outcome is not None
    return outcome


def test_a_job_that_is_stopped_elsewhere_keeps_what_it_had_to_say(
    folder: Path, monkeypatch: Patch
) -> None:
    stop = KeyboardInterrupt()
    stop.add_note("last.pt holds iteration 3 of 4")
    stop.add_note("it is in runs/x")
    outcome = outcome_of(stop, folder, monkeypatch, elsewhere=True)
    assert (outcome.state, outcome.error) == (
        "stopped",
        "last.pt holds iteration 3 of 4; it is in runs/x",
    )


@pytest.mark.parametrize(("number", "crashed"), [(errno.ENOSPC, True), (errno.EACCES, False)])
def test_a_disk_that_refuses_a_job_is_a_line(
    number: int, crashed: bool, folder: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    error = OSError(number, os.strerror(number), "last.pt")
    outcome = outcome_of(error, folder, monkeypatch, elsewhere=False)
    assert (outcome.state, outcome.crashed) == ("failed", crashed)
    assert str(outcome.error).startswith(f"last.pt: {os.strerror(number)}; ")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("columns", [80, 400])
def test_paths_are_whole_however_narrow_the_terminal(
    columns: int, folder: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    runs = [finished(folder / "runs" / ("a-long-name_" * 8 + str(number))) for number in range(2)]
    swept(folder, [Outcome("finished", str(run.absolute()), 3.0) for run in runs]).report()
    _, *lines, _ = capsys.readouterr().out.splitlines()
    for number, (run, line) in enumerate(zip(runs, lines, strict=True), 1):
        assert re.fullmatch(
            rf"{number} +policy.hidden={number - 1} +utility .* +3 s +{os.path.relpath(run)}", line
        )
