"""A run's `config.yaml` and `results.json` that come from elsewhere: plain values, within bounds."""

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from commands import mistake, words_of
from helpers import input_error
from run_folders import write_run

from knobwise.experiments.command_line.compose import read_settings
from knobwise.experiments.evidence import results as report
from knobwise.experiments.report.runs import read_settings_of
from knobwise.experiments.settings.config_file import (
    of_run,
    read_settings_file,
    settings_text,
    to_yaml,
)

LEVELS = []
for last, name in itertools.pairwise("abcdefghi"):
    LEVELS.append(f"{name}: &{name} [{', '.join(['*' + last] * 9)}]")
BOMB = "\n".join(["a: &a [x, x, x, x, x, x, x, x, x]", *LEVELS])
"""Some 500 bytes that stand for 9⁹ values."""


@dataclass
class Settings:
    """Values that YAML may take for something else."""

    name: str = "a${b"
    path: str = "${oc.env:HOME}/\\${x}"
    number: str = "1e5"
    date: str = "2026-01-31"
    word: str = "on"
    empty: str = ""
    rate: float = 1e-5
    none: str | None = None
    seeds: list[int] = field(default_factory=lambda: [0, 1])
    by_name: dict[str, float] = field(default_factory=lambda: {"ü": 0.5})


def write_config(folder, text):
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(text)
    return folder


def test_settings_are_read_as_they_were(tmp_path):
    path = write_config(tmp_path, settings_text(Settings())) / "config.yaml"
    assert Settings(**read_settings_file(path)) == Settings()
    # a comment, another order of the keys and other quotes are no other settings
    text = path.read_text()
    path.write_text("# mine\n" + text.replace("'2026-01-31'", '"2026-01-31"'))
    assert Settings(**read_settings_file(path)) == Settings()


def test_settings_that_were_changed_or_cut_short_are_refused(tmp_path):
    whole = settings_text(Settings())
    changed = {whole.replace("1.0e-05", "1.0e-04"), whole.replace("- 1\n", ""), whole + "more: 1\n"}
    lines = whole.splitlines(keepends=True)
    cut = {"".join(lines[:count]) for count in range(len(lines))}
    assert len(changed - {whole}) == 3
    for text in changed | cut:
        write_config(tmp_path, text)
        with input_error(r"config\.yaml: "):
            read_settings_file(tmp_path / "config.yaml")


def test_an_edited_config_is_refused_where_it_is_read(home, capsys):
    path = write_run(Path("runs/a")) / "config.yaml"
    write_run(Path("runs/b"))
    path.write_text(path.read_text().replace("name: a", "name: c"))
    for words in ("evaluate", "export", "explain", "update log=x"):
        line = mistake([*words_of(words), "checkpoint=runs/a"], capsys)
        assert "runs/a/config.yaml: is not as the run wrote it" in line
    assert "runs/a/config.yaml" in mistake(["compare", "runs"], capsys)


def test_the_config_of_another_program_above_a_copied_checkpoint_is_not_read(home):
    Path("config.yaml").write_text("profile: dev\n")
    Path("copied/deep").mkdir(parents=True)
    assert of_run("copied/deep/best.pt", "profile") is None


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        "a: &a {b: *a}",
        "[" * 3000,
        "a: !!binary aGVsbG8=",
        "a: !!python/object/apply:os.abort []",
        f"a: {'x' * 300_000}",
    ],
)
def test_a_file_from_elsewhere_is_refused_quickly(text, home, capsys):
    write_config(Path("run"), text)
    for words in ("evaluate", "export", "explain", "update log=x"):
        assert "run/config.yaml: cannot be read" in mistake(
            [*words_of(words), "checkpoint=run"], capsys
        )
    (write_run(Path("runs/a")) / "config.yaml").write_text(text)
    write_run(Path("runs/b"))
    assert "runs/a/config.yaml: cannot be read" in mistake(["compare", "runs"], capsys)
    # who names the data needs no such file
    words = ["checkpoint=run", "profile=table", "profile.path=t.csv"]
    assert read_settings("evaluate", words).profile.path == "t.csv"


def test_nothing_in_it_is_resolved(home, monkeypatch, capsys):
    monkeypatch.setenv("SECRET", "hunter2")
    written = {"profile": {"format": "table", "path": "${oc.env:SECRET}"}}
    write_config(Path("run"), to_yaml(written))
    settings = read_settings("evaluate", ["checkpoint=run"])
    assert settings.profile.path == "${oc.env:SECRET}"
    assert read_settings_of(Path("run"))["profile.path"] == "${oc.env:SECRET}"
    # what the command line says may be
    words = ["checkpoint=run", "profile.path=${oc.env:SECRET}/t.csv"]
    assert read_settings("evaluate", words).profile.path == "hunter2/t.csv"


def test_a_run_does_not_choose_code_that_is_executed(home, capsys):
    beams = {"format": "files", "path": "b.json", "model": "os:abort", "vlm": {"data": "q.jsonl"}}
    write_config(Path("run"), to_yaml({"beams": beams}))
    line = mistake(["evaluate", "checkpoint=run"], capsys)
    assert "beams.model=os:abort" in line
    settings = read_settings("evaluate", ["checkpoint=run", "beams.model=mine:Scorer"])
    assert (settings.beams.model, settings.beams.path) == ("mine:Scorer", "b.json")
    profile = {"format": "table", "path": "t.csv", "features_from": "os:abort"}
    write_config(Path("run"), to_yaml({"profile": profile}))
    line = mistake(["evaluate", "checkpoint=run"], capsys)
    assert "profile.features_from=os:abort" in line
    # functions of rewards and advantages are those of the command line alone
    reward = {"kind": "function", "function": "os:abort"}
    write_config(Path("run"), to_yaml({"reward": reward}))
    assert read_settings("evaluate", ["checkpoint=run"]).reward.function is None


def test_results_that_are_too_deep_or_too_long_are_refused(home, monkeypatch):
    deep = json.loads("[" * 50 + "]" * 50)
    report.write_results(Path(), {"rows": [{"policy": "a"}], "x": deep})
    with input_error("nested too deeply"):
        report.read_results(".")
    monkeypatch.setattr(report, "MAX_BYTES", 100)
    with input_error("more than 100 bytes"):
        report.read_results(".")
