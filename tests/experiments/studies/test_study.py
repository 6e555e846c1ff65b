"""A study trains what its file lists, keeps what is finished, and compares the runs of a section."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import SIMULATED
from omegaconf import OmegaConf

from knobwise.experiments.command_line.compose import read_settings
from knobwise.experiments.studies import study

TINY = [
    *SIMULATED,
    "baselines=false",
    "policy.members=2",
    "policy.hidden=8",
    "optimiser.teacher_iterations=2",
    "optimiser.warmup_iterations=2",
    "optimiser.iterations=1",
    "optimiser.contexts=16",
    "optimiser.minibatch=16",
]
SHIPPED = sorted(Path(study.__file__).parent.glob("*.yaml"))


@pytest.mark.campaign
def test_a_small_study_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = {
        "lean": {"train": ["experiment=lean name=a", "experiment=lean name=b policy.layers=1"]},
        "alone": {"train": ["experiment=lean name=b policy.layers=1"]},
        "swept": {"train": ["-m experiment=lean name=c policy.layers=1,2"]},
    }
    path = tmp_path / "few.yaml"
    path.write_text(json.dumps({"sections": sections}))
    runs = tmp_path / "runs"
    out = tmp_path / "pages"
    extra = f"words={json.dumps(['tracking=disabled', *TINY])}"
    words = [f"study={path}", f"runs={runs}", f"out={out}", "seeds=[0]", extra]
    runs.mkdir()
    (runs / "multirun").write_text("in the way")
    # what fails does not stop the others
    assert study.main(words) == 1
    assert capsys.readouterr().err.count("failed with status") == 2
    finished = {
        path.parent.name: path.stat().st_mtime_ns for path in runs.glob("lean/*/results.json")
    }
    assert set(finished) == {"a", "b"}
    assert [page.name for page in out.iterdir()] == ["lean.html"]

    (runs / "multirun").unlink()
    assert study.main([*words, "sections=[swept,alone]"]) == 0
    assert {page.name for page in out.iterdir()} == {"lean.html", "swept.html"}
    for name, written in finished.items():
        assert (runs / "lean" / name / "results.json").stat().st_mtime_ns == written
    # what was trained with other seeds is not passed off as this
    assert study.main([*words, "seeds=[0,2]"]) == 2
    assert "seeds" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["sections=[other]", "seeds=[]", "sections=1", "study=x.yaml"])
def test_a_wrong_word_is_named_before_anything_is_run(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study.main([word, f"runs={tmp_path}", f"out={tmp_path / 'pages'}"]) == 2
    message = capsys.readouterr().err
    assert word.split("=")[0] in message
    assert message.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_command_of_our_studies_is_understood(path: Path) -> None:
    for name, section in OmegaConf.load(path).sections.items():
        assert section.title, name
        for command in section.train:
            words = [word for word in command.split() if word != "-m"]
            verb = "train_selector" if "experiment=selector" in command else "train"
            settings = read_settings(verb, words)
            folder = study.folder_of(words, "runs")
            assert folder == Path("runs", settings.experiment, settings.name)
