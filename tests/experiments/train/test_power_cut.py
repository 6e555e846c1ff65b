"""What a power cut leaves of a run's files: it goes on from what came before, says so, and ends
like the unbroken. Rows that metrics.csv lost are missing."""

import csv
import shutil
from contextlib import chdir
from unittest.mock import patch

import pytest
import torch
from commands import OPTIMISER, REPLAY, TABLE, ctrl_c, launch, same, words_of, write_table
from helpers import small_beams

from knobwise.__main__ import main
from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.experiments.train import judging

CONTROLLER = words_of(
    "train name=r seeds=[0,2] policy.fold_networks=2 policy.experts=[] baselines=false"
)
CONTROLLER += ["own_cost=false", *TABLE, *OPTIMISER]
COMMANDS = {"controller": CONTROLLER, "selector": [*REPLAY, "name=r"]}
BLOCK = 4096
CASES = [
    ("controller", "checkpoints/seed2/last.pt", "empty"),
    ("controller", "checkpoints/seed2/best.pt", "half"),
    ("controller", "config.yaml", "last block lost"),
    ("controller", "metrics.csv", "last block zero"),
    ("selector", "checkpoints/seed0/sft/last.pt", "half"),
    ("selector", "checkpoints/seed0/sft/best.pt", "last block lost"),
    ("selector", "config.yaml", "last block zero"),
    ("selector", "metrics.csv", "empty"),
]
"""Every file in two ways, of the training that a power cut comes into, or has just come after;
`test_files` tells all ways from what is whole."""


def torn_by(cut, whole):
    """What a power cut leaves of the content of a file."""
    begin = whole[: (len(whole) - 1) // BLOCK * BLOCK]
    zeros = begin.ljust(len(whole), b"\0")
    half = whole[: len(whole) // 2]
    return {"empty": b"", "half": half, "last block lost": begin, "last block zero": zeros}[cut]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """For each system a folder with a run that was stopped in the middle, and one with the unbroken
    run."""
    late = {
        "controller": lambda t: (t.seed, t.stage.name, t.state.iteration) == (2, "GRPO", 14),
        "selector": lambda t: t.stages[0].name == "rce",
    }
    folders = {}
    for system, words in COMMANDS.items():
        for kind in ("stopped", "unbroken"):
            folders[f"{system} {kind}"] = folder = tmp_path_factory.mktemp(system)
            with chdir(folder):
                write_table()
                small_beams()[0].save("b.safetensors")
                with ctrl_c(late[system] if kind == "stopped" else lambda _: False):
                    assert main(words) == (130 if kind == "stopped" else 0)
    return folders


def run_in(folder):
    (run,) = (path.parent for path in folder.glob("runs/*/r/config.yaml"))
    return run


def outcome(run):
    """What a run ends in."""
    checkpoints = {
        path.relative_to(run): torch.load(path, weights_only=True) for path in run.rglob("best.pt")
    }
    return checkpoints, (run / "config.yaml").read_text()


def rows_of(run):
    """The rows of metrics.csv, each as a set of its numbers."""
    with (run / "metrics.csv").open(newline="") as file:
        return [{cell for cell in row.items() if cell[1]} for row in csv.DictReader(file)]


@pytest.mark.campaign
@pytest.mark.parametrize(("system", "file", "cut"), CASES)
def test_a_run_with_a_torn_file_ends_like_the_unbroken_run(
    stopped, tmp_path, monkeypatch, capsys, system, file, cut
):
    shutil.copytree(stopped[f"{system} stopped"], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    run = run_in(tmp_path)
    torn = run / file
    torn.write_bytes(torn_by(cut, torn.read_bytes()))
    capsys.readouterr()
    launch(COMMANDS[system])
    said = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert 1 <= len(said) <= (2 if file == "metrics.csv" else 1)  # a line for each seed
    assert all(str(torn.relative_to(tmp_path)) in line.split(":")[0] for line in said)
    assert [path.name for path in run.parent.iterdir()] == ["r"]
    unbroken = run_in(stopped[f"{system} unbroken"])
    assert same(outcome(run), outcome(unbroken))
    if file == "metrics.csv":
        left = rows_of(run)
        assert left == [row for row in rows_of(unbroken) if row in left]
        assert 0 < len(left) < len(rows_of(unbroken))
    else:
        assert (run / "metrics.csv").read_text() == (unbroken / "metrics.csv").read_text()


def test_a_run_that_was_stopped_before_it_calibrated_what_it_deploys_ends_like_the_unbroken(
    stopped, tmp_path, monkeypatch
):
    shutil.copytree(stopped["controller stopped"], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    with patch.object(judging, "calibrate_controller", side_effect=KeyboardInterrupt):
        assert main(CONTROLLER) == 130
    run = run_in(tmp_path)
    training = load_checkpoint(run / "checkpoints/seed2/last.pt").extra["training"]
    assert training["finished"]
    # the last weights must not be the best for this test
    assert training["best"]["iteration"] < training["iteration"]
    launch(CONTROLLER)
    unbroken = run_in(stopped["controller unbroken"])
    assert same(outcome(run), outcome(unbroken))
    assert (run / "metrics.csv").read_text() == (unbroken / "metrics.csv").read_text()
