"""v2_lora through the command line: a CLIP model in a folder that learns along with the
selector."""

import json
import sys
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import commands
import polars as pl
import pytest
import torch
from commands import launch, mistake, read_json, refused, words_of
from helpers import input_error, small_beams
from polars.testing import assert_frame_equal
from safetensors.torch import save_file
from tiny_models import picture, tiny_clip

from knobwise.__main__ import main
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.agents.training.checkpoint import load_checkpoint, save_checkpoint
from knobwise.envs.demonstrations.beam_files import write_rl_data
from knobwise.experiments.settings.beams import read_data
from knobwise.experiments.settings.selector_options import BeamFiles, ClipLora

CLIP = words_of(
    "encoder=clip encoder.model=clip encoder.data=queries.jsonl", "encoder.bank=bank.jsonl"
)
SHORT = words_of(
    commands.REPLAY,
    "sft.epochs=1 variants.grpo_recorded.epochs=1 variants.shuffled_recorded=null judged_shots=[2]",
)
TRAIN = words_of(SHORT, CLIP, "sft.lr=1e-2 sft.keep=last rce.keep=last grpo.keep=last")
EVALUATE = words_of("evaluate beams=files beams.path=b.safetensors judged_shots=[2]")
SEED = Path("whole/latest/checkpoints/seed0")
LORA = ClipLora(model="clip", data="queries.jsonl", bank="bank.jsonl")


def write_items(path, count, prefix):
    """Write `count` questions about four pictures."""
    rows = []
    for n in range(count):
        question = "How many dogs ?" if n % 3 else "How many cats ?"
        row = {"id": f"{prefix}{n}", "image": f"{n % 4}.png", "answers": ["2"]}
        rows.append(json.dumps(row | {"question": question}))
    Path(path).write_text("\n".join(rows))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Beams as a table that names items by their ids, and as RL data; their items; a CLIP model; a
    finished run."""
    folder = tmp_path_factory.mktemp("clip")
    with chdir(folder):
        table, _ = small_beams(40)
        write_rl_data(table, "f.json")
        save_file({"embeddings": table.candidates}, "c.safetensors")
        save_file({"embeddings": table.queries}, "q.safetensors")
        replace(table, query_ids=tuple(f"q{n}" for n in range(40))).save("b.safetensors")
        write_items("queries.jsonl", 40, "q")
        write_items("bank.jsonl", 32, "c")
        for number in range(4):
            picture(number, 8, 12).save(f"{number}.png")
        tiny_clip("clip")
        launch(TRAIN, "name=x runs=whole")
    return folder


@pytest.fixture
def folder(source, tmp_path, monkeypatch):
    """An empty folder with links to these."""
    monkeypatch.chdir(tmp_path)
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def lora_of(path):
    return dict(load_checkpoint(path / "best.pt").selector.encoder.state_dict())


def test_clip_learns_along_through_all_stages_and_is_judged_again_from_a_checkpoint(folder):
    # CLIP's width, not that of the beams
    assert load_checkpoint(SEED / "sft" / "best.pt").selector.features == 12
    sft, rce, grpo = (lora_of(SEED / stage) for stage in ("sft", "rce", "grpo_recorded"))
    for before, after in ((sft, rce), (rce, grpo)):
        assert not commands.same(before, after)
        # it goes on where it was
        assert all((before[name] - after[name]).abs().max() < 0.1 for name in before)
    again = "beams.train=0.6 beams.validation=0.2 json=again.json"
    launch(EVALUATE, again, CLIP, f"checkpoint={SEED}/grpo_recorded/best.pt")
    trained, judged = (
        {row["policy"]: row["accuracy"] for row in read_json(path)["rows"]}
        for path in ("whole/latest/results.json", "again.json")
    )
    assert judged.items() <= trained.items()
    assert "grpo_recorded" in judged


def test_an_interrupted_run_with_clip_ends_like_any(folder):
    for stage in ("sft", "grpo"):
        with commands.ctrl_c_at(stage, 2):
            assert main([*TRAIN, "name=x"]) == 130
    launch(TRAIN, "name=x")
    runs = Path("runs/latest"), Path("whole/latest")
    best = [load_checkpoint(run / "checkpoints/best.pt").selector for run in runs]
    assert commands.same(*(selector.state_dict() for selector in best))
    assert_frame_equal(*(pl.read_csv(run / "metrics.csv") for run in runs))


def test_a_selector_is_evaluated_with_the_encoder_that_it_was_trained_with(folder, capsys):
    words = [*EVALUATE, f"checkpoint={SEED}/sft/best.pt"]
    launch(words)
    assert "encoder=clip" in mistake([*words, "encoder=stored"], capsys)
    table, _ = small_beams(4)
    selector = Selector(SelectorConfig(), table.queries.shape[-1])
    save_checkpoint("stored.pt", selector, table, {"fitted": []})
    line = mistake([*EVALUATE, "checkpoint=stored.pt", *CLIP], capsys)
    assert "encoder=stored" in line


def test_a_run_with_clip_starts_from_a_checkpoint_with_clip_alone(folder, capsys):
    start = f"init_from={SEED}/sft/best.pt"
    launch(TRAIN, start, "sft.epochs=0 rce.epochs=0")
    taken = lora_of(Path("runs/latest/checkpoints/seed0/sft"))
    assert commands.same(taken, lora_of(SEED / "sft"))
    assert "encoder=clip" in mistake([*SHORT, start], capsys)


def test_items_are_those_of_the_rows_in_json_and_those_of_the_ids_in_a_table(folder):
    lines = Path("queries.jsonl").read_text().splitlines()
    Path("turned.jsonl").write_text("\n".join(lines[::-1]))
    read = []
    for path, data in (("f.json", "queries.jsonl"), ("b.safetensors", "turned.jsonl")):
        beams = BeamFiles(path=path, embeddings="c.safetensors", query_embeddings="q.safetensors")
        items = read_data(beams, replace(LORA, data=data)).items
        read.append(items.pixel_values[items.queries.long().flatten()])
    assert len(read[0].flatten(1).unique(dim=0)) == 4
    assert torch.equal(*read)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("model", None, "encoder.model"),
        ("data", None, "encoder.data"),
        ("data", "none.jsonl", "none.jsonl"),
        ("data", "fewer.jsonl", "'q7'"),
        ("bank", "queries.jsonl", "40 items"),
    ],
)
def test_items_that_do_not_fit_the_beams_are_refused(option, value, message, folder):
    lines = Path("queries.jsonl").read_text().splitlines()
    Path("fewer.jsonl").write_text("\n".join(lines[:7] + lines[8:]))
    with input_error(message):
        read_data(BeamFiles(path="b.safetensors"), replace(LORA, **{option: value}))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("encoder.model=./nowhere", "./nowhere"),
        ("variants={mine:{hidden:[liar]}}", "variants.mine"),
        ("encoder=stored", "encoder.model"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_written(word, message, folder, capsys):
    assert message in refused([*TRAIN, word], capsys)


def test_builtin_beams_and_missing_packages_are_refused(folder, capsys, monkeypatch):
    assert "give beams=files" in refused(["train", "experiment=selector", *CLIP], capsys)
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "pip install -e '.[peft]'" in refused(TRAIN, capsys)
