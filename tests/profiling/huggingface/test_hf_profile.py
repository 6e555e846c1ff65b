"""Hugging Face models by their folder, and the importance of their blocks."""

import json

import polars as pl
import pytest
from commands import mistake
from helpers import input_error
from tiny_models import picture, saved, tiny_model

from knobwise.profiling.huggingface.knobs import read_importance
from knobwise.profiling.huggingface.loading import weights_digest
from knobwise.profiling.measuring.settings import VLMProfileConfig
from knobwise.profiling.models import load_model


@pytest.fixture
def questions(tmp_path):
    """Four questions about an image."""
    picture(0).save(tmp_path / "wide.png")
    path = tmp_path / "questions.jsonl"
    rows = {"id": range(4), "image": "wide.png", "question": "What?", "answer": "a"}
    pl.DataFrame(rows).write_ndjson(path)
    return path


def test_blocks_are_left_out_by_a_file(questions, file, tmp_path):
    folder = saved(tmp_path / "model", *tiny_model("llava_next"))
    importance = {"1": 0.0, "2": 9.0, "3": 0.0}
    file.write_text(json.dumps(importance))
    words = str(folder), str(questions), VLMProfileConfig(max_new_tokens=3)
    model, items = load_model(*words, importance=str(file), device="cpu")
    assert (model.name, len(items)) == ("model", 4)
    assert model.knobs_of_model.active_blocks(2) == (0, 2)
    by_number = {int(block): value for block, value in importance.items()}
    facts = {"importance": by_number, "device": "cpu", "dtype": "float32"}
    assert model.identity.items() >= facts.items()
    assert model.identity["weights"] == weights_digest(folder)


@pytest.mark.parametrize(
    ("option", "fault"),
    {
        "model=./nowhere": "./nowhere",
        "dtype=float8": "dtype",
        "importance=nothing.json": "nothing.json",
    }.items(),
)
def test_mistakes_are_named_and_nothing_is_written(
    questions, tmp_path, monkeypatch, capsys, option, fault
):
    monkeypatch.chdir(tmp_path)
    folder = saved(tmp_path / "model", *tiny_model("llava_next"))
    words = [f"model={folder}", "data=questions.jsonl", "out=out", "device=cpu", option]
    assert fault in mistake(["profile", *words], capsys)
    assert not (tmp_path / "out").exists()


def test_other_weights_have_another_digest(tmp_path):
    folder = saved(tmp_path / "model", *tiny_model("llava_next"))
    seen = [weights_digest(folder)]
    assert weights_digest(folder) == seen[0]
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"1")
    seen.append(weights_digest(folder))
    assert weights_digest("org/name", "abc") == "commit:abc"
    # of a large file pieces of all of it
    for place in (0, 5 << 20, (16 << 20) - (1 << 18)):
        with (folder / "large.safetensors").open("wb") as file:
            file.truncate(16 << 20)
            file.seek(place)
            file.write(b"1")
        seen.append(weights_digest(folder))
    assert len(set(seen)) == 5


# -- the importance of blocks ----------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    return tmp_path / "importance.json"


def test_the_format_is_a_number_for_each_block(file):
    file.write_text('{"10": 0.25, "4": 0.0156, "5": -1}')
    assert list(read_importance(file).items()) == [(4, 0.0156), (5, -1.0), (10, 0.25)]


@pytest.mark.parametrize(
    ("text", "fault"),
    {
        None: "read",
        "{4: 0.1}": "JSON",
        b"\xff\xfe\x00": "JSON",
        "[0.1, 0.2]": "block",
        '{"layer.4": 0.1}': "layer.4",
        '{"-1": 0.1}': "-1",
        '{"4": 0.1, "4": 0.2}': "'4'",
        '{"4": NaN}': "nan",
        '{"4": 1e999}': "inf",
        '{"4": true}': "True",
        '{"4": {"4": 0.1}}': "block '4'",
    }.items(),
)
def test_a_file_that_is_wrong_is_refused(file, text, fault):
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with input_error(rf"importance\.json.*{fault}"):
        read_importance(file)
