"""Reference results: what is run, what is kept, and what stops it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from knobwise.common.errors import InputError
from knobwise.experiments.command_line.compose import read_settings
from knobwise.experiments.command_line.sweep_jobs import train as train_controller
from knobwise.experiments.studies.page import StudyRun
from knobwise.experiments.studies.study import ReferenceConfig, check, main, plan, read_study, train, train_or_note
from knobwise.experiments.studies.study import training_settings as settings_of

TINY = ["profile=simulated", "profile.kind=router", "profile.samples=60", "policy.members=2", "policy.hidden=8"]
TINY += ["optimiser.warmup_iterations=2", "optimiser.iterations=1", "optimiser.contexts=16", "optimiser.minibatch=16"]

HEADS = ("additive", "autoregressive", "independent", "joint")
OTHER_HEADS = [f"heads/reference-builtin-policy-{name}" for name in HEADS]


@pytest.fixture
def few(tmp_path: Path) -> str:
    """A study of two experiments that share a variant, on a small table, without selectors."""
    path = tmp_path / "few.yaml"
    sections = {name: {"title": name, "profiles": ["builtin"]} for name in ("lean", "heads")}
    profiles = {name: {"name": "built-in", "words": TINY} for name in ("builtin", "calibrated")}
    path.write_text(json.dumps({"profiles": profiles, "controllers": sections, "selectors": {}}))
    return str(path)


def test_a_small_study_from_the_command_line(few: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, out = tmp_path / "runs", tmp_path / "page.md"
    words = ["seeds=[0,1]", f"study={few}", f"runs={runs}", f"out={out}", "jobs=1"]
    runs.mkdir()
    (runs / "heads").write_text("in the way")
    # a run that fails does not stop the others
    assert main(words) == 1
    failed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("reference: ")]
    assert [line.split(": ")[1] for line in failed] == [f"{runs}/{folder}" for folder in OTHER_HEADS]
    assert [path.parent.name for path in runs.glob("*/*/results.json")] == ["reference-builtin"]
    assert "**Not complete: 4 runs are not finished.**" in out.read_text()

    first = runs / "lean" / "reference-builtin" / "results.json"
    before = first.stat().st_mtime_ns
    (runs / "heads").unlink()
    assert main([*words, "experiments=[heads]"]) == 0
    page = out.read_text()
    assert "Not complete" not in page
    # the shared variant is run once, and stands in both sections
    assert sorted(str(path.parent.relative_to(runs)) for path in runs.glob("*/*/results.json")) == [
        *OTHER_HEADS,
        "lean/reference-builtin",
    ]
    assert first.stat().st_mtime_ns == before
    results = json.loads(first.read_text())
    assert {row["policy"] for row in results["rows"]} == {"controller", "budget_aware_static", "oracle"}
    (utility,) = (r["utility"] for r in results["rows"] if r["policy"] == "controller" and r["budget_ms"] is None)
    lines = page.splitlines()
    assert any(line.startswith(f"| built-in | `lean` | {utility:.3f}") for line in lines)
    assert any(line.startswith(f"| built-in | `policy=utility` | {utility:.3f}") for line in lines)
    assert any(line.startswith("- Built-in: against `policy=utility`: ") for line in lines)
    assert "validation" not in capsys.readouterr().err  # the study tells how far it is, not each training
    # what was made with other settings is not passed off as this
    assert main(["seeds=[0,2]", *words[1:]]) == 2
    assert "seeds" in capsys.readouterr().err
    assert out.read_text() == page


def test_a_wrong_word_is_named_before_anything_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("experiments=[other]", "profiles=[other]", "seeds=[]", "jobs=0", "sections=1", "study=x.yaml"):
        assert main([word, f"runs={tmp_path}", f"out={tmp_path / 'page.md'}"]) == 2
        message = capsys.readouterr().err
        assert word.split("=")[0] in message
        assert message.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_default_variant_is_what_the_file_sets(few: str, tmp_path: Path) -> None:
    runs = list(plan(ReferenceConfig(runs=str(tmp_path)), read_study(few)))
    assert [(run.experiment, run.variant, run.default) for run in runs] == [
        ("lean", "", True),
        ("heads", "policy=utility", True),
        *(("heads", f"policy={name}", False) for name in HEADS),
    ]
    assert runs[1].folder == runs[0].folder
    work, planned = pickle.loads(pickle.dumps((train_or_note, runs[2])))  # for other processes
    assert (work, planned[:-1]) == (train_or_note, runs[2][:-1])
    assert {run.profile for run in runs} == {"builtin"}


def test_a_finished_run_is_checked_by_its_settings(tmp_path: Path) -> None:
    words = ["experiment=mean_budget", "policy=utility", *TINY, "seeds=[0]"]
    where = ["name=one", f"runs={tmp_path}", "tracking=disabled", "baselines=false"]
    folder = train_controller(read_settings("train", [*words, *where]), words)
    made = StudyRun("mean_budget", "builtin", "", True, folder, words, settings_of("train", words))
    check(made)  # the run has put its own reward into config.yaml
    other = made._replace(settings=settings_of("train", [*words, "optimiser.lr=0.5"]))
    with pytest.raises(InputError, match=r"optimiser\.lr="):
        check(other)


def test_a_selector_that_others_are_training_is_left_to_them(tmp_path: Path) -> None:
    folder, words = tmp_path / "selector_kl" / "reference", ["experiment=selector_kl", "seeds=[0]"]
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("jobs: 2\n")
    with pytest.raises(InputError, match="was begun with jobs=2"):
        train(StudyRun("selector_kl", "beams", "", True, folder, words, {}))
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]
