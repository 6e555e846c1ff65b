"""Runs that start from a checkpoint, through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from commands import TABLE, Capture, Patch, ctrl_c, mistake, same, write_table
from helpers import small_beams
from polars.testing import assert_frame_equal

from knobwise.__main__ import main
from knobwise.agents.checkpoint import load_checkpoint

TRAIN = [
    *("train", *TABLE, "policy=additive", "seeds=[0]"),
    *("policy.hidden=16", "policy.dropout=0", "baselines=false", "tracking=disabled", "optimiser.contexts=32"),
    *("optimiser.evaluate_every=3", "optimiser.warmup_iterations=0", "optimiser.iterations=9"),
]
WARM = [*TRAIN, "optimiser.warmup_iterations=60", "optimiser.warmup_lr=0.01", "optimiser.iterations=0", "name=warm"]
START = "init_from=runs/controller/warm/checkpoints/best.pt"
SHORT = ["sft.queries=8", "rce.queries=8", "grpo.queries=8", "rce.epochs=1", "grpo.epochs=2", "seeds=[0]"]
BEAMS = [
    *("train", "experiment=selector_replay", "beams.path=b.safetensors", "beams.train=0.6", "beams.validation=0.2"),
    *("selector.width=16", "selector.heads=2", "tracking=disabled", *SHORT, "variants.shuffled_recorded=null"),
]
SFT = "init_from=runs/selector_replay/warm/checkpoints/seed0/sft/epoch2.pt"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profile, another one, beams, and a finished run of a controller and of a selector."""
    folder = tmp_path_factory.mktemp("starts")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_table()
        write_table(50, seed=1, prefix="other-")
        small_beams(60)[0].save("b.safetensors")
        assert main(WARM) == 0
        assert main([*BEAMS, "sft.epochs=2", "name=warm"]) == 0
    return folder


@pytest.fixture
def folder(made: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(made)
    return made


def state(path: str, kind: str = "controller") -> dict[str, Any]:
    agent = getattr(load_checkpoint(path), kind)
    return dict(agent.state_dict())


def interrupted(words: list[str], iteration: int, stage: str) -> None:
    """Run the command until Ctrl-C in this iteration of a stage."""
    with ctrl_c(lambda trainer: (trainer.stage.name, trainer.iteration) == (stage, iteration)):
        assert main(words) == 130


def test_grpo_alone_from_an_rce_checkpoint_also_after_an_interruption(folder: Path) -> None:
    words = [*TRAIN, START]
    assert main([*words, "name=whole"]) == 0
    interrupted([*words, "name=killed"], 7, "GRPO")
    assert main([*words, "name=killed"]) == 0
    runs = [f"runs/controller/{name}" for name in ("whole", "killed")]
    for name in ("best.pt", "last.pt"):
        assert same(*(state(f"{run}/checkpoints/{name}") for run in runs))
    assert_frame_equal(*(pl.read_csv(f"{run}/metrics.csv") for run in runs))
    start, last = load_checkpoint(START.removeprefix("init_from=")), load_checkpoint(f"{runs[0]}/checkpoints/last.pt")
    assert start.extra["iteration"] > 0
    assert same(last.extra["training"]["reference"], start.controller.state_dict())
    results = json.loads(Path(runs[0], "results.json").read_text())
    assert results["training"] == {"warmup_iterations": 0, "iterations": 9}


def test_fine_tuning_on_another_profile(folder: Path, capsys: Capture) -> None:
    words = [*TRAIN, START, "profile.path=other-t.parquet", "profile.features=other-f.npz", "name=other"]
    assert main(words) == 0
    assert "left out" not in capsys.readouterr().err
    trained = load_checkpoint("runs/latest/checkpoints/best.pt")
    assert trained.profile_digest != load_checkpoint("runs/controller/warm/checkpoints/best.pt").profile_digest


def test_test_samples_that_the_start_was_trained_on_are_left_out(folder: Path, capsys: Capture) -> None:
    assert main([*TRAIN, START, "split.seed=5", "name=split"]) == 0
    assert "of the 12 test samples, which are left out" in capsys.readouterr().err
    extra = load_checkpoint("runs/latest/checkpoints/best.pt").extra
    assert 0 < len(extra["test_rows"]) < 12


def test_rce_and_grpo_from_an_sft_checkpoint_also_after_an_interruption(folder: Path) -> None:
    words = [*BEAMS, SFT, "sft.epochs=0"]
    assert main([*words, "name=whole"]) == 0
    interrupted([*words, "name=killed"], 3, "rce")
    assert main([*words, "name=killed"]) == 0
    seeds = [f"runs/selector_replay/{name}/checkpoints/seed0" for name in ("whole", "killed")]
    assert same(state(SFT.removeprefix("init_from="), "selector"), state(f"{seeds[0]}/sft/best.pt", "selector"))
    for name in ("rce", "grpo_recorded"):
        assert same(*(state(f"{seed}/{name}/last.pt", "selector") for seed in seeds))
    # SFT goes on where the checkpoint ended
    assert main([*BEAMS, SFT, "sft.epochs=1", "name=more"]) == 0
    first = "runs/selector_replay/more/checkpoints/seed0/sft/epoch0.pt"
    assert same(state(first, "selector"), state(SFT.removeprefix("init_from="), "selector"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*TRAIN, START, "policy.hidden=8"], "was trained with policy.hidden=16"),
        ([*TRAIN, "init_from=none.pt"], "none.pt: no such checkpoint"),
        ([*BEAMS, START], "holds a controller"),
        ([*BEAMS, SFT, "beams.split_seed=3"], "that this run holds out"),
    ],
)
def test_what_differs_is_one_line_and_nothing_is_written(
    folder: Path, words: list[str], message: str, capsys: Capture
) -> None:
    assert message in mistake([*words, "name=refused"], capsys)
    assert not list(folder.glob("runs/*/refused"))
