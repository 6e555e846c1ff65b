"""A run's `config.yaml` and `results.json` that come from elsewhere: plain values, within bounds."""

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from commands import mistake, words_of
from helpers import input_error
from run_folders import write_run

from knobwise.experiments.command_line.compose import read_settings
from knobwise.experiments.compare.runs import read_settings_of
from knobwise.experiments.evidence import results as report
from knobwise.experiments.settings.config_file import read_settings_file, settings_text

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
    write_config(tmp_path, settings_text(Settings()))
    assert Settings(**read_settings_file(tmp_path / "config.yaml")) == Settings()


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
    written = "profile: {format: table, path: '${oc.env:SECRET}'}"
    write_config(Path("run"), written)
    settings = read_settings("evaluate", ["checkpoint=run"])
    assert settings.profile.path == "${oc.env:SECRET}"
    assert read_settings_of(Path("run"))["profile.path"] == "${oc.env:SECRET}"
    # what the command line says may be
    words = ["checkpoint=run", "profile.path=${oc.env:SECRET}/t.csv"]
    assert read_settings("evaluate", words).profile.path == "hunter2/t.csv"


def test_a_run_does_not_choose_code_that_is_executed(home, capsys):
    written = "beams: {format: files, path: b.json, model: 'os:abort', vlm: {data: q.jsonl}}"
    write_config(Path("run"), written)
    line = mistake(["evaluate", "checkpoint=run"], capsys)
    assert "beams.model=os:abort" in line
    settings = read_settings("evaluate", ["checkpoint=run", "beams.model=mine:Scorer"])
    assert (settings.beams.model, settings.beams.path) == ("mine:Scorer", "b.json")
    write_config(Path("run"), "profile: {format: table, path: t.csv, features_from: 'os:abort'}")
    line = mistake(["evaluate", "checkpoint=run"], capsys)
    assert "profile.features_from=os:abort" in line
    # functions of rewards and advantages are those of the command line alone
    write_config(Path("run"), "reward: {kind: function, function: 'os:abort'}")
    assert read_settings("evaluate", ["checkpoint=run"]).reward.function is None


def test_results_that_are_too_deep_or_too_long_are_refused(home, monkeypatch):
    Path("results.json").write_text('{"rows": [{"policy": "a"}], "x": ' + "[" * 50 + "]" * 50 + "}")
    with input_error("nested too deeply"):
        report.read_results(".")
    monkeypatch.setattr(report, "MAX_BYTES", 100)
    with input_error("more than 100 bytes"):
        report.read_results(".")
