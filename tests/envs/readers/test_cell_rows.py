"""Rows of a cell that are no repeats: answers judged twice, and ids that restart."""

import random

import polars as pl
import pytest
from commands import refused, words_of
from helpers import input_error

import knobwise

MODELS = ("small", "large")


# -- one scorer of two -----------------------------------------------------------------------------


def judged(column="scorer", other_times=False, **more):
    """12 samples × 2 models, each answer judged by exact and by f1."""
    draw = random.Random(0)
    rows = []
    for n in range(12):
        for model in MODELS:
            time = draw.uniform(10, 50)
            for scorer in ("exact", "f1"):
                score = draw.choice([0, 1]) if scorer == "exact" else round(draw.random(), 2)
                rows.append(
                    {"sample_id": n, "model": model, column: scorer, "score": score}
                    | {"latency_ms": time + other_times * draw.random()}
                    | more
                )
    return pl.DataFrame(rows)


@pytest.mark.parametrize("column", ["scorer", "metric", "judge_model"])
@pytest.mark.parametrize("knobs", [None, ["model"]])
def test_of_two_scorers_one_must_be_chosen(column, knobs):
    frame = judged(column)
    with input_error(f"{column}.*exact.*f1"):
        knobwise.read(frame, knobs=knobs)
    made = knobwise.read(frame.filter(pl.col(column) == "exact"), knobs=knobs)
    assert (made.num_samples, made.num_configurations, made.num_repeats) == (12, 2, 1)


def test_the_column_of_scorers_is_named_on_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    judged().write_csv("t.csv")
    line = refused(words_of("inspect profile=table profile.path=t.csv"), capsys)
    assert line.startswith("knobwise: t.csv: ")
    assert "'scorer'" in line


def test_what_takes_its_own_time_or_is_named_is_a_setting():
    assert knobwise.read(judged(other_times=True)).num_configurations == 4
    assert knobwise.read(judged(), knobs=["model", "scorer"]).num_configurations == 4
    # one scorer judged all
    one = judged().filter(pl.col("scorer") == "f1")
    assert knobwise.read(one).num_configurations == 2


# -- ids that restart ------------------------------------------------------------------------------


def restarted(first=0, **columns):
    """Three files of 8 questions × 2 models, whose ids begin anew in each."""
    draw = random.Random(1)
    rows = []
    for file in range(3):
        for n in range(8):
            for model in MODELS:
                row = {"id": n + first, "model": model, "accuracy": draw.choice([0, 1])}
                row |= {name: value(file, n) for name, value in columns.items()}
                rows.append(row | {"latency_ms": draw.uniform(10, 40)})
    return pl.DataFrame(rows)


def question(file, n):
    return f"what is {8 * file + n}"


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", ["question", "prompt"])
def test_ids_that_stand_for_several_questions_are_refused(first, name):
    frame = restarted(first, **{name: question})
    with input_error(rf"id {first} .*profile\.id={name}"):
        knobwise.read(frame, id="id", knobs=["model"])
    made = knobwise.read(frame, id=name, knobs=["model"])
    assert (made.num_samples, made.num_repeats) == (24, 1)


def test_the_column_that_parts_them_is_named():
    frame = restarted(question=question, origin=lambda file, n: f"{file}.jsonl")
    with input_error("origin.*dataset"):
        knobwise.read(frame, id="id", knobs=["model"])
    made = knobwise.read(frame.rename({"origin": "dataset"}), id="id", knobs=["model"])
    assert made.num_samples == 24
    # as a knob it changes the question, which a note says
    made = knobwise.read(frame, id="id")
    assert any("origin" in note and "question" in note for note in made.notes)


@pytest.mark.parametrize("name", ["shard", "batch_id", "file"])
def test_a_knob_named_like_a_part_of_the_data_is_noted(name):
    made = knobwise.read(restarted(**{name: lambda file, n: file}), id="id")
    assert any(name in note and "dataset" in note for note in made.notes)


def test_rows_that_nothing_else_tells_apart_name_the_column_that_does():
    frame = restarted(shard=lambda file, n: file).with_columns(accuracy=1.0, latency_ms=5.0)
    made = knobwise.read(frame, id="id", knobs=["model"])
    assert made.num_repeats == 3
    assert any("shard" in note and "dataset" in note for note in made.notes)
    with input_error("shard would tell them apart"):
        knobwise.read(frame.with_columns(repeat=0), id="id", knobs=["model"])


def test_repeats_and_wordings_are_none():
    repeated = restarted(trial=lambda file, n: file, question=lambda file, n: f"what is {n}")
    assert knobwise.read(repeated, id="id").num_repeats == 3
    # rows without any such column are repeats
    assert knobwise.read(restarted(), id="id").num_repeats == 3
    # ids that are names may be of questions in several wordings
    worded = restarted(prompt=question).with_columns(id="q" + pl.col("id").cast(pl.String))
    made = knobwise.read(worded, id="id", knobs=["model"])
    assert made.num_repeats == 3
    assert any("profile.id=prompt" in note for note in made.notes)
    # who numbers them knows
    numbered = restarted(prompt=question, trial=lambda file, n: file)
    assert knobwise.read(numbered, id="id", knobs=["model"], repeat="trial").num_repeats == 3
