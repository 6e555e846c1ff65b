"""`knobwise profile model=FOLDER data=FILE` with a tiny random model of every family; the
importance of blocks."""

import json

import polars as pl
import pytest
from safetensors.numpy import load_file
from tiny_models import BLOCKS, FAMILIES, TOP_K, picture, saved, tiny_model

from knobwise.__main__ import main
from knobwise.common.errors import InputError
from knobwise.profiling.huggingface.profile import read_importance, weights_digest
from knobwise.profiling.measuring import measuring as vlm_measuring

DENSE = ("smolvlm", "idefics3", "molmo2")


@pytest.fixture
def questions(tmp_path):
    """Four questions about two images, with the answers of three people."""
    for name, size in (("wide", (160, 256)), ("square", (144, 144))):
        picture(0, *size).save(tmp_path / f"{name}.png")
    rows = [
        {
            "id": f"q{n}",
            "image": f"{('wide', 'square')[n % 2]}.png",
            "question": "What?",
            "answers": ["a", "a", "b"],
        }
        for n in range(4)
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_every_family_is_profiled_and_read_back(family, questions, tmp_path, capsys):
    folder, out = saved(tmp_path / family, *tiny_model(family)), tmp_path / "out"
    knobs = ["knobs.max_crops=[1,4]", f"knobs.num_active_blocks=[3,{BLOCKS}]"]
    if family not in DENSE:
        knobs.append(f"knobs.top_k=[1,{TOP_K}]")
    words = [*knobs, "knobs.repeats=1", "knobs.samples=2", "knobs.max_new_tokens=3", "device=cpu"]
    assert main(["profile", f"model={folder}", f"data={questions}", f"out={out}", *words]) == 0

    configurations = 4 if family in DENSE else 8
    table = pl.read_parquet(out / "table.parquet")
    assert len(table) == 2 * configurations
    assert (table["latency_ms"] > table["prefill_ms"]).all()
    features = load_file(out / "features.safetensors")
    assert len(features["image_features"]) == len(features["language_features"]) == 2
    knobs = {knob["name"]: knob for knob in json.loads((out / "profile.json").read_text())["knobs"]}
    assert bool(knobs["top_k"]["note"]) == (family in (*DENSE, "llama4"))
    printed = capsys.readouterr().out
    assert "lacks" in printed or family not in DENSE
    assert f"2 samples × {configurations} configurations" in printed

    read = ["profile=exp5_exp6", f"profile.exp5_dir={out}/exp5", f"profile.exp6_dir={out}/exp6"]
    read += ["profile.dataset_name=questions", f"profile.features={out}/features.safetensors"]
    facts = tmp_path / "facts.json"
    assert main(["inspect", *read, f"json={facts}"]) == 0
    assert json.loads(facts.read_text())["samples"] == 2
    assert json.loads(facts.read_text())["configurations"] == configurations


def test_blocks_are_left_out_by_a_file(questions, tmp_path, monkeypatch):
    folder, by_hand = (
        saved(tmp_path / "model", *tiny_model("llava_next")),
        tmp_path / "by_hand.json",
    )
    by_hand.write_text(json.dumps({"1": 0.0, "2": 9.0, "3": 0.0}))
    words = [
        "profile",
        f"model={folder}",
        f"data={questions}",
        f"out={tmp_path}/out",
        f"importance={by_hand}",
    ]
    words += [
        "knobs.num_active_blocks=[2,4]",
        "knobs.repeats=1",
        "knobs.samples=2",
        "knobs.max_new_tokens=3",
    ]
    kept = []
    measure = vlm_measuring.measure
    monkeypatch.setattr(
        "knobwise.profiling.measuring.profiler.measure",
        lambda vlm, *rest, **more: (
            kept.append(vlm.knobs_of_model.active_blocks(2)) or measure(vlm, *rest, **more)
        ),
    )
    assert main([*words, "device=cpu"]) == 0
    assert kept == [(0, 2)]
    assert json.loads((tmp_path / "out" / "profile.json").read_text())["importance"] == {
        "1": 0.0,
        "2": 9.0,
        "3": 0.0,
    }


def test_mistakes_are_named_and_nothing_is_written(questions, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = saved(tmp_path / "model", *tiny_model("llava_next"))
    for words, message in {
        "model=./nowhere": "./nowhere: no such folder",
        "dtype=float8": "dtype='float8': must be one of",
        "importance=nothing.json": "nothing.json: cannot be read",
        "knobs.num_active_blocks=[0]": "num_active_blocks=0: this model takes 1 to 4",
        "knobs.metric=choice": "q0",
    }.items():
        command = [
            "profile",
            f"model={folder}",
            "data=questions.jsonl",
            "out=out",
            "device=cpu",
            *words.split(),
        ]
        assert main(command) == 2, words
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_other_weights_have_another_digest(tmp_path):
    folder = saved(tmp_path / "model", *tiny_model("llava_next"))
    before = weights_digest(folder)
    assert weights_digest(folder) == before
    path = next(folder.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert weights_digest(folder) != before
    assert weights_digest("org/name", "abc") == "commit:abc"
    # of a large file pieces of all of it
    large = tmp_path / "model" / "large.safetensors"
    seen = []
    for place in (None, 5 << 20, (16 << 20) - (1 << 18)):
        with large.open("wb") as file:
            file.truncate(16 << 20)
            if place is not None:
                file.seek(place)
                file.write(b"1")
        seen.append(weights_digest(folder))
    assert len(set(seen)) == 3


# -- the importance of blocks ----------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    return tmp_path / "importance.json"


def test_the_format_is_a_number_for_each_block(file):
    file.write_text('{"10": 0.25, "4": 0.0156, "5": -1}')
    assert list(read_importance(file).items()) == [(4, 0.0156), (5, -1.0), (10, 0.25)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"), ("{4: 0.1}", "not JSON"), (b"\xff\xfe\x00", "not JSON"),
        ("[0.1, 0.2]", "must hold a number for each " "block"), ("{}", "must hold a number for each " "block"),
        ('{"layer.4": 0.1}', "'layer.4' is not the number of a block"),
        ('{"-1": 0.1}', "'-1' is not the number of a block"),
        ('{"²": 0.1}', "'²' is not the number of a " "block"), ('{"4": 0.1, "4": 0.2}', "the key '4' occurs twice"),
        ('{"4": NaN}', "holds NaN, which is not JSON"),
        ('{"4": 1e999}', "importance of block 4 is " "inf"), ('{"4": "0.1"}', "importance of block 4 is " "'0.1'"),
        ('{"4": true}', "importance of block 4 is " "True"), ('{"4": {"4": 0.1}}', "importance of block 4 is"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_refused(file, text, message):
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=message) as raised:
        read_importance(file)
    assert str(file) in str(raised.value)
