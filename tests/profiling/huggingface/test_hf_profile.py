"""`knobwise profile model=FOLDER data=FILE` with a tiny random model of every family, as its user types it."""

import json

import numpy as np
import polars as pl
import pytest
from PIL import Image
from safetensors.numpy import load_file
from tiny_models import BLOCKS, FAMILIES, TOP_K, tiny_model

from knobwise.__main__ import main
from knobwise.profiling.huggingface.profile import weights_digest
from knobwise.profiling.measuring import measuring as vlm_measuring

DENSE = ("smolvlm", "idefics3", "molmo2")


@pytest.fixture
def questions(tmp_path):
    """Four questions about two images, with the answers of three people."""
    rng = np.random.default_rng(0)
    for name, shape in (("wide", (160, 256, 3)), ("square", (144, 144, 3))):
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(tmp_path / f"{name}.png")
    rows = [
        {"id": f"q{n}", "image": f"{('wide', 'square')[n % 2]}.png", "question": "What?", "answers": ["a", "a", "b"]}
        for n in range(4)
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def saved(family, folder):
    for part in tiny_model(family):
        part.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_every_family_is_profiled_and_read_back(family, questions, tmp_path, capsys):
    folder, out = saved(family, tmp_path / family), tmp_path / "out"
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
    told = {knob["name"]: knob for knob in json.loads((out / "profile.json").read_text())["knobs"]}
    assert bool(told["top_k"]["note"]) == (family in (*DENSE, "llama4"))
    said = capsys.readouterr().out
    assert "lacks" in said or family not in DENSE

    read = ["profile=exp5_exp6", f"profile.exp5_dir={out}/exp5", f"profile.exp6_dir={out}/exp6"]
    read += ["profile.dataset_name=questions", f"profile.features={out}/features.safetensors"]
    facts = tmp_path / "facts.json"
    assert main(["inspect", *read, f"json={facts}"]) == 0
    assert json.loads(facts.read_text())["samples"] == 2
    assert json.loads(facts.read_text())["configurations"] == configurations


def test_importance_is_measured_once_and_then_used(questions, tmp_path, monkeypatch):
    folder, out = saved("llava_next", tmp_path / "model"), tmp_path / "out"
    words = ["profile", f"model={folder}", f"data={questions}", f"out={out}", "importance=measure", "device=cpu"]
    words += ["knobs.num_active_blocks=[2,4]", "knobs.repeats=1", "knobs.samples=2", "knobs.max_new_tokens=3"]
    assert main(words) == 0
    importance = json.loads((out / "importance.json").read_text())
    assert importance.keys() == {"1", "2", "3"}
    by_hand = tmp_path / "by_hand.json"
    by_hand.write_text(json.dumps({"1": 0.0, "2": 0.0, "3": 9.0}))
    kept = []
    measure = vlm_measuring.measure
    monkeypatch.setattr(
        "knobwise.profiling.measuring.profiler.measure",
        lambda vlm, *rest, **more: kept.append(vlm.knobs_of_model.active_blocks(2)) or measure(vlm, *rest, **more),
    )
    assert main(words) == 0  # nothing is left to measure, importance among it
    most = max(importance, key=lambda block: importance[block])
    others = [word for word in words if not word.startswith(("out", "importance"))]
    assert main([*others, f"out={tmp_path}/b", f"importance={by_hand}"]) == 0
    assert kept == [(0, int(most)), (0, 3)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=nothing.jsonl"], "nothing.jsonl"),
        (["data=questions.jsonl", "model=./nowhere"], "./nowhere: no such folder"),
        (["data=questions.jsonl", "dtype=float8"], "dtype='float8' is unknown"),
        (["data=questions.jsonl", "importance=nothing.json"], "nothing.json: cannot be read"),
        (["data=questions.jsonl", "knobs.top_k=[9]"], "top_k=9: this model takes 1 to 4"),
        (["data=questions.jsonl", "knobs.num_active_blocks=[0]"], "num_active_blocks=0: this model takes 1 to 4"),
        (["data=questions.jsonl", "importance=measure", "knobs.num_active_blocks=[5]"], "num_active_blocks=5"),
        (["data=questions.jsonl", "knobs.metric=bleu"], "metric='bleu': must be one of"),
        (["data=questions.jsonl", "knobs.shards=3", "knobs.shard=3"], "shard must be 0 to 2"),
        (["data=questions.jsonl", "knobs.metric=choice"], "q0"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(words, message, questions, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = saved("llava_next", tmp_path / "model")
    assert main(["profile", f"model={folder}", "out=out", "device=cpu", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_other_weights_have_another_digest(tmp_path):
    folder = saved("llava_next", tmp_path / "model")
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
