"""The questions that come with knobwise are those that their command makes."""

import polars as pl
import pytest

from knobwise.profiling.measuring.questions import read_vqa_data
from knobwise.profiling.smollm import questions


@pytest.fixture(scope="module")
def frame():
    return questions.questions(questions.kinds())


def test_the_file_is_what_the_command_makes(frame, tmp_path, monkeypatch, capsys):
    out = tmp_path / "questions.csv"
    monkeypatch.setattr("sys.argv", ["questions", "--out", str(out)])
    questions.main()
    assert out.read_bytes() == questions.QUESTIONS_CSV.read_bytes()
    assert str(len(frame)) in capsys.readouterr().out


def test_there_are_many_questions_of_many_kinds_in_a_small_file(frame):
    assert len(frame) >= 1500
    assert frame["question_type"].n_unique() >= 12
    assert questions.QUESTIONS_CSV.stat().st_size < 300_000
    assert frame["id"].is_unique().all()
    data = read_vqa_data(questions.QUESTIONS_CSV, images=False)
    assert len(data.queries) + len(data.bank) == len(frame)


def test_parts_ask_about_different_things():
    """Each thing has a name that occurs in its questions only, so parts can be told apart."""
    things = [f"thing{i}." for i in range(7)]
    kind = questions.Kind("test", ("What is {}", "Name {}"), [(thing, "x") for thing in things])
    frame = questions.questions([kind])
    assert len(frame) == 14
    asked = frame.with_columns(about=pl.col("question").str.extract(r"(thing\d)"))
    parts = asked.group_by("about").agg(pl.col("part").n_unique(), pl.len())
    assert parts["part"].to_list() == [1] * 7
    assert parts["len"].to_list() == [2] * 7
    assert asked["question"].n_unique() == 14
