"""A study trains what its file lists, keeps what is finished, and compares the runs of a section."""

import json
from pathlib import Path

import pytest
from commands import SIMULATED, words_of

from knobwise.experiments.command_line.compose import read_settings
from knobwise.experiments.command_line.registry import schema_of
from knobwise.experiments.studies import study

TINY = words_of(SIMULATED, """
    baselines=false policy.fold_networks=2 policy.hidden=8 optimiser.teacher_iterations=2
    optimiser.pretrain_iterations=2 optimiser.iterations=1 optimiser.contexts=16
    optimiser.minibatch=16 tracking=disabled
""")  # fmt: skip
SHIPPED = sorted(Path(study.__file__).parent.glob("*.yaml"))


@pytest.mark.campaign
def test_a_small_study_from_the_command_line(tmp_path, capsys):
    study_file = {
        "profiles": {"a": "policy.layers=1"},
        "sections": {
            "lean": [
                "experiment=lean name=a policy.layers=1",
                "experiment=lean name=b policy.layers=1",
            ],
            "alone": {"profiles": ["a"], "train": ["experiment=lean"]},
            "swept": ["experiment=lean name=c policy.layers=1,2"],
        },
    }
    path, runs, out = (tmp_path / name for name in ("few.yaml", "runs", "pages"))
    path.write_text(json.dumps(study_file))
    words = [
        f"study={path}",
        f"runs={runs}",
        f"out={out}",
        "seeds=[0]",
        f"words={json.dumps(TINY)}",
    ]
    assert study.main([*words, "sections=[lean,alone_a,swept]"]) == 0
    written = {run: run.stat().st_mtime_ns for run in runs.glob("lean/*/results.json")}
    assert {run.parent.name for run in written} == {"a", "b", "c", "c-2"}
    pages = {page.name for page in out.iterdir()}
    assert pages == {"lean.html", "lean.json", "swept.html", "swept.json"}
    # what is finished is kept
    assert study.main([*words, "sections=[swept,alone_a]"]) == 0
    for run, time in written.items():
        assert run.stat().st_mtime_ns == time
    # what was trained with other seeds is not passed off as this
    assert study.main([*words, "sections=[lean]", "seeds=[0,2]"]) == 2
    assert "seeds" in capsys.readouterr().err


def test_the_runs_of_a_sweep_are_those_of_its_name_also_with_brackets(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(study, "knobwise", lambda *words: commands.append(words) or [])
    folder = tmp_path / "lean"
    for name in ("c[1]", "c[1]-2", "c1"):
        (folder / name).mkdir(parents=True)
    config = study.StudyConfig(runs=str(tmp_path), out=str(tmp_path / "pages"))
    assert not study.run_section(config, "swept", ["experiment=lean name=c[1]"])
    assert commands[-1][1:3] == (str(folder / "c[1]"), str(folder / "c[1]-2"))


@pytest.mark.parametrize("word", ["sections=[other]", "seeds=[]", "sections=1", "study=x.yaml"])
def test_a_wrong_word_is_named_before_anything_is_run(word, tmp_path, capsys):
    assert study.main([word, f"runs={tmp_path}", f"out={tmp_path / 'pages'}"]) == 2
    message = capsys.readouterr().err
    assert word.split("=")[0] in message
    assert message.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_command_of_our_studies_is_understood(path):
    for commands in study.sections_of(str(path)).values():
        for command in commands:
            words = command.split()
            settings = read_settings(schema_of("train", words), words)
            folder = study.folder_of(words, "runs")
            assert folder == Path("runs", settings.experiment, settings.name)
