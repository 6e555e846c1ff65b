"""What a power cut leaves of a run's files: it goes on from what came before, says so, and ends
like the unbroken."""

import shutil
from unittest.mock import Mock

import pytest
import torch
from commands import OPTIMISER, REPLAY, TABLE, ctrl_c, same, write_table
from helpers import small_beams

from knobwise.__main__ import main
from knobwise.agents.checkpoint import load_checkpoint

CONTROLLER = [
    *("train", "name=r", "seeds=[0,2]", "policy.members=2", "policy.experts=[]", "baselines=false")
]
CONTROLLER += ["own_cost=false", *TABLE, *OPTIMISER]
COMMANDS = {"controller": CONTROLLER, "selector": [*REPLAY, "name=r"]}
SEED = {"controller": "checkpoints/seed2", "selector": "checkpoints/seed0/sft"}
"""The training that a power cut comes into, or has just come after."""
BLOCK = 4096
CUTS = {
    "empty": lambda whole: b"",
    "half": lambda whole: whole[: len(whole) // 2],
    "last block lost": lambda whole: whole[: (len(whole) - 1) // BLOCK * BLOCK],
    "last block zero": lambda whole: whole[: (len(whole) - 1) // BLOCK * BLOCK].ljust(
        len(whole), b"\0"
    ),
}


FILES = ["last.pt", "best.pt", "config.yaml", "metrics.csv"]
CASES = [
    (system, *case)
    for system, turn in zip(COMMANDS, (0, 1), strict=True)
    for case in zip(FILES, [*CUTS][turn:] + [*CUTS][:turn], strict=True)
]
"""Every file in two ways; `test_files` tells all ways from what is whole."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """For each system a folder with a run that was stopped in the middle, and one with the unbroken
    run."""
    patch, folders = pytest.MonkeyPatch(), {}
    for system, words in COMMANDS.items():
        for kind in ("stopped", "unbroken"):
            folders[f"{system} {kind}"] = folder = tmp_path_factory.mktemp(f"{system}-{kind}")
            patch.chdir(folder)
            write_table()
            small_beams()[0].save("b.safetensors")
            if kind == "unbroken":
                assert main(words) == 0
            else:
                late = {
                    "controller": lambda t: (t.seed, t.stage.name, t.iteration) == (2, "GRPO", 14),
                    "selector": lambda t: t.stages[0].name == "rce",
                }
                with ctrl_c(late[system]):
                    assert main(words) == 130
    patch.undo()
    return folders


def run_in(folder):
    (run,) = (path.parent for path in folder.glob("runs/*/r/config.yaml"))
    return run


def outcome(run):
    """What a run ends in."""
    checkpoints = {
        path.relative_to(run): torch.load(path, weights_only=True) for path in run.rglob("best.pt")
    }
    return checkpoints, (run / "metrics.csv").read_text(), (run / "config.yaml").read_text()


@pytest.mark.parametrize(("system", "file", "cut"), CASES)
def test_a_run_with_a_torn_file_ends_like_the_unbroken_run(
    stopped,
    tmp_path,
    monkeypatch,
    capsys,
    system,
    file,
    cut,
):
    shutil.copytree(stopped[f"{system} stopped"], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    run = run_in(tmp_path)
    torn = run / SEED[system] / file if file.endswith(".pt") else run / file
    torn.write_bytes(CUTS[cut](torn.read_bytes()))
    capsys.readouterr()
    assert main(COMMANDS[system]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert len(said) <= (2 if file == "metrics.csv" else 1)  # a line for each seed
    assert {line.split(":")[0].removeprefix(f"{tmp_path}/") for line in said} == {
        str(torn.relative_to(tmp_path))
    }
    unbroken = run_in(stopped[f"{system} unbroken"])
    assert [path.name for path in run.parent.iterdir()] == ["r"]
    for mine, other in zip(outcome(run), outcome(unbroken), strict=True):
        assert same(mine, other)


def test_a_run_that_was_stopped_before_it_settled_what_it_deploys_ends_like_the_unbroken(
    stopped, tmp_path, monkeypatch
):
    shutil.copytree(stopped["controller stopped"], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(
            "knobwise.experiments.train.controller.deployed_by", Mock(side_effect=KeyboardInterrupt)
        )
        assert main(CONTROLLER) == 130
    run, unbroken = run_in(tmp_path), run_in(stopped["controller unbroken"])
    training = load_checkpoint(run / SEED["controller"] / "last.pt").extra["training"]
    assert training["finished"]
    assert training["best"]["iteration"] < training["iteration"], (
        "the last weights must not be the best for this test"
    )
    assert main(CONTROLLER) == 0
    for mine, other in zip(outcome(run), outcome(unbroken), strict=True):
        assert same(mine, other)
