"""Folders where a table is wanted."""

import pytest
from commands import refused, words_of
from helpers import input_error

import knobwise


@pytest.fixture
def multirun(tmp_path):
    """A multirun of two jobs, as Hydra lays it out."""
    folder = tmp_path / "multirun/2026-01-31/10-00-00"
    for number, model in enumerate(("small", "large")):
        job = folder / str(number)
        (job / ".hydra").mkdir(parents=True)
        (job / ".hydra/overrides.yaml").write_text(f"- model={model}\n")
        (job / "results.csv").write_text("sample_id,accuracy,latency_ms\nq1,1,2\n")
    (folder / "multirun.yaml").write_text("hydra: {}\n")
    return tmp_path / "multirun"


@pytest.mark.parametrize("inside", ["", "2026-01-31/10-00-00", "2026-01-31/10-00-00/0"])
def test_a_multirun_of_hydra_is_named_with_its_settings(multirun, inside, capsys, monkeypatch):
    monkeypatch.chdir(multirun.parent)
    path = f"multirun/{inside}".rstrip("/")
    line = refused(words_of(f"inspect profile=table profile.path={path}"), capsys)
    assert line.startswith(f"knobwise: {path}: ")
    for word in ("Hydra", ".hydra/overrides.yaml", "results.csv"):
        assert word in line
    with input_error("Hydra"):
        knobwise.read(path)


def test_another_folder_is_named_with_the_tables_in_it(tmp_path):
    (tmp_path / "t.csv").write_text("")
    (tmp_path / "u.arff.gz").write_text("")
    for other in ("notes.txt", "notes.txt.gz"):
        (tmp_path / other).write_text("")
    with input_error(r"give a file, such as t\.csv, u\.arff\.gz \("):
        knobwise.read(tmp_path)
    with input_error("folder"):
        knobwise.read(tmp_path / "..")
