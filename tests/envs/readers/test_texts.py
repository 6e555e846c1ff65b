"""Columns of free text: which columns are, how they are kept, and embeddings of one's own."""

import json
import sys
import time

import numpy as np
import polars as pl
import pytest
import torch
from helpers import input_error

from knobwise.envs import ProfileTable
from knobwise.envs.readers import embeddings
from knobwise.envs.readers.embeddings import embed_texts
from knobwise.envs.readers.feature_columns import fit_column
from knobwise.envs.readers.feature_files import attach_features, features_from, read_features
from knobwise.envs.readers.joint import join_tables
from knobwise.envs.readers.long_table import read_long_table, table_from_frame

PROMPTS = [f"please add {i} and {i + 1} for me" for i in range(6)]


def frame_of(prompts=PROMPTS, **columns):
    """Two settings of a knob for each of these samples."""
    samples = pl.DataFrame({"sample_id": range(len(prompts)), "prompt": prompts, **columns})
    cells = pl.DataFrame({"model": ["small", "large"], "accuracy": [0, 1], "latency_ms": [2, 9]})
    return samples.join(cells, how="cross")


def read(frame, **options):
    return table_from_frame(frame, name="frame", **options)


def test_a_text_column_is_kept_as_it_is_beside_numbers():
    table = read(frame_of(tokens=range(6)), features=["prompt", "tokens"])
    assert table.texts == {"prompt": PROMPTS}
    assert [column.name for column in table.columns] == ["tokens"]
    assert table.features["features"].squeeze(1).tolist() == [*range(6)]
    assert "prompt" in repr(table)
    alone = read(frame_of(), features=["prompt"])
    assert not alone.features
    assert alone.texts == table.texts


def test_auto_takes_prompts_and_questions_but_neither_names_nor_answers():
    ids = [f"user_{i}" for i in range(6)]
    columns = {"question": PROMPTS, "user": ids, "gold": [f"the sum is {i}" for i in range(6)]}
    table = read(frame_of(**columns), features="auto")
    assert table.texts.keys() == {"prompt", "question"}
    assert any("user" in note for note in table.notes)
    with input_error("'user'.*too many"):
        read(frame_of(**columns), features=["user"])


@pytest.mark.parametrize(
    ("values", "free"),
    [
        (PROMPTS, True),
        (["東京は日本の首都ですか", "富士山の高さはいくつ", "二足す二はいくつですか"], True),
        (["one two", "three four", "five six"], False),
        (["yes of course", "yes of course", "no not at all", "no not at all"], False),
        ([f"number {i} of many" for i in range(60)] * 2, True),
    ],
)
def test_text_is_free_where_most_of_many_values_have_several_words(values, free):
    series = pl.Series("column", values)
    if free:
        assert fit_column(series).categories == ()
    elif len(set(values)) == len(values):
        with input_error("too many"):
            fit_column(series)
    else:
        assert fit_column(series).categories


def test_a_missing_text_is_empty_and_long_ones_are_kept_whole(tmp_path):
    prompts = [*PROMPTS[:4], None, "many words " * 10_000]
    table = read(frame_of(prompts), features=["prompt"])
    assert table.texts["prompt"] == [*PROMPTS[:4], "", "many words " * 10_000]
    table.save(tmp_path / "t.safetensors")
    again = ProfileTable.load(tmp_path / "t.safetensors")
    assert again.texts == table.texts
    assert again.digest == table.digest
    assert read(frame_of([*prompts[:5], "other"]), features=["prompt"]).digest != table.digest


def test_chats_of_any_file_are_json(tmp_path):
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    rows = frame_of().drop("prompt").to_dicts()
    for row in rows:
        row["prompt"] = chats[row["sample_id"]]
    # contents of several types, as with an image, which no frame would hold
    path = tmp_path / "t.jsonl"
    parts = [{"role": "user", "content": [{"type": "text", "text": PROMPTS[0]}]}]
    mixed = [row | {"prompt": parts} if row["sample_id"] == 0 else row for row in rows]
    path.write_text("\n".join(map(json.dumps, mixed)))
    pl.DataFrame(rows).write_parquet(tmp_path / "t.parquet")
    for name, first in (("t.jsonl", parts), ("t.parquet", chats[0])):
        table = read_long_table(tmp_path / name, features=["prompt"])
        assert [json.loads(text) for text in table.texts["prompt"]] == [first, *chats[1:]]


def test_texts_of_a_feature_file_and_of_memory_follow_the_samples(tmp_path):
    table = read(frame_of().drop("prompt"))
    shuffled = pl.DataFrame({"sample_id": range(6), "prompt": PROMPTS})[::-1]
    shuffled.write_csv(tmp_path / "f.csv")
    for features in (
        read_features(tmp_path / "f.csv"),
        features_from({"sample_id": [*range(5, -1, -1)], "prompt": PROMPTS[::-1]}),
    ):
        assert attach_features(table, features).texts == {"prompt": PROMPTS}
    with input_error("'prompt' are 2 texts"):
        features_from({"sample_id": [1, 2, 3], "prompt": ["a b c", "d e f"]})


def test_joined_tables_have_the_same_texts():
    tables = [read(frame_of(dataset=[name] * 6), features=["prompt"]) for name in ("a", "b")]
    joined = join_tables(tables, "both")
    assert joined.texts == {"prompt": PROMPTS * 2}
    tables[1] = read(frame_of(dataset=["b"] * 6), features=None)
    with input_error("the same"):
        join_tables(tables, "both")


def lengths(texts):
    lengths.calls.append(list(texts))
    return [[len(text), text.count(" ")] for text in texts]


def test_a_function_is_called_once_for_each_text(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(embeddings, "user_cache_path", lambda name: tmp_path)
    monkeypatch.setattr(embeddings, "TIMED", 2)
    lengths.calls = []
    table = read(frame_of([*PROMPTS[:5], PROMPTS[0]]), features=["prompt"])
    name = f"{__name__}:lengths"
    sys.modules.setdefault(__name__, sys.modules[lengths.__module__])
    first = embed_texts(table, name)
    wanted = torch.tensor([[len(text), 6] for text in table.texts["prompt"]]).float()
    assert torch.equal(first.features["prompt"], wanted)
    assert first.features_ms > 0
    assert not first.texts
    # three alone, to time them, and the others together
    assert [len(call) for call in lengths.calls] == [1, 1, 1, 2]
    again = embed_texts(table, name)
    # only those that are timed anew
    assert [len(call) for call in lengths.calls[4:]] == [1, 1, 1]
    assert "the numbers of 2 of 5 texts come from" in capsys.readouterr().err
    assert torch.equal(again.features["prompt"], wanted)
    assert again.features_ms > 0
    # a new text is computed alone, without timing
    embed_texts(read(frame_of(), features=["prompt"]), name)
    assert lengths.calls[7:] == [[text] for text in (*PROMPTS[:3], PROMPTS[5])]


def test_a_function_that_returns_other_numbers_is_called_for_all_texts_anew(
    tmp_path, monkeypatch, capsys
):
    """Such as an encoder with other weights, from another file than the function's own."""
    monkeypatch.setattr(embeddings, "user_cache_path", lambda name: tmp_path)
    monkeypatch.setattr(embeddings, "TIMED", 1)
    sys.modules.setdefault(__name__, sys.modules[lengths.__module__])
    table = read(frame_of(), features=["prompt"])
    wanted = torch.tensor([[len(text), 6] for text in table.texts["prompt"]]).float()

    def embedded(factor, slept_s=0.0):
        def embed(texts):
            time.sleep(slept_s)
            return [[factor * len(text), factor * text.count(" ")] for text in texts]

        monkeypatch.setattr(sys.modules[__name__], "lengths", embed)
        made = embed_texts(table, f"{__name__}:lengths")
        return made, "computed anew" in capsys.readouterr().err

    assert not embedded(1.0)[1]
    # floating noise leaves the numbers as they were kept, and its time is that of now
    made, anew = embedded(1 + 1e-4, 0.02)
    assert (made.features["prompt"].tolist(), anew) == (wanted.tolist(), False)
    assert made.features_ms >= 20
    made, anew = embedded(2.0)
    assert (made.features["prompt"].tolist(), anew) == ((2 * wanted).tolist(), True)
    assert not embedded(2.0)[1]


@pytest.mark.parametrize(
    ("returned", "field"),
    [
        (lambda texts: np.zeros(len(texts)), "must return"),
        (lambda texts: [[float("nan")]] * len(texts), "must return"),
        (lambda texts: 1 / 0, "ZeroDivisionError"),
        (lambda texts: [[0.0] * len(text) for text in texts], "numbers for texts|inhomogeneous"),
    ],
)
def test_a_function_that_returns_something_else_is_refused(returned, field):
    table = read(frame_of(["a b c", *PROMPTS[1:]]), features=["prompt"])
    with input_error(f"features_from.*({field})"):
        embed_texts(table, returned)
    with input_error("features_from: no feature is text"):
        embed_texts(read(frame_of()), returned)
