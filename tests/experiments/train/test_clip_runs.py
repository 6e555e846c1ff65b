"""v2_lora through the command line: a CLIP model in a folder that learns along with the selector."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import commands
import polars as pl
import pytest
import torch
from commands import Capture, Patch, mistake, refused
from helpers import small_beams
from polars.testing import assert_frame_equal
from safetensors.torch import save_file
from tiny_models import picture, tiny_clip

from knobwise.__main__ import main
from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.selector.clip_encoder import ClipEncoder
from knobwise.envs.demonstrations.beam_files import write_rl_data
from knobwise.experiments.settings.beams import read_data
from knobwise.experiments.settings.encoder import ClipLora, read_encoder
from knobwise.experiments.settings.selector_options import BeamFiles

CLIP = ["encoder=clip", "encoder.folder=clip", "encoder.data=queries.jsonl", "encoder.bank=bank.jsonl"]
SHORT = ["sft.epochs=2", "variants.grpo_recorded.epochs=2", "variants.shuffled_recorded=null", "sft.lr=1e-2"]
TRAIN = [*commands.REPLAY, *CLIP, *SHORT, "sft.keep=last", "rce.keep=last", "grpo.keep=last"]
SEED = Path("whole/latest/checkpoints/seed0")


def write_items(path: str, count: int, prefix: str) -> None:
    """`count` questions about four pictures."""
    rows = [
        {"id": f"{prefix}{n}", "image": f"{n % 4}.png", "question": f"How many {'dogs' if n % 3 else 'cats'} ?"}
        | {"answers": ["2"], "image_id": f"{prefix}{n % 20}"}
        for n in range(count)
    ]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beams as a table that names items by their ids, and as RL data; their items; a CLIP model; a finished run."""
    folder = tmp_path_factory.mktemp("clip")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        table, _ = small_beams(60)
        write_rl_data(table, "f.json")
        save_file({"embeddings": table.candidates}, "c.safetensors")
        save_file({"embeddings": table.queries}, "q.safetensors")
        names = {"query_ids": tuple(f"q{n}" for n in range(60)), "query_images": tuple(f"q{n % 20}" for n in range(60))}
        replace(table, **names).save("b.safetensors")
        write_items("queries.jsonl", 60, "q")
        write_items("bank.jsonl", 32, "c")
        for number in range(4):
            picture(number, 8, 12).save(f"{number}.png")
        tiny_clip("clip")
        assert main([*TRAIN, "name=x", "runs=whole"]) == 0
    return folder


@pytest.fixture
def folder(source: Path, tmp_path: Path, monkeypatch: Patch) -> Path:
    """An empty folder with links to these."""
    monkeypatch.chdir(tmp_path)
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def accuracies(path: str) -> dict[tuple[str, int], float]:
    rows: list[dict[str, Any]] = json.loads(Path(path).read_text())["rows"]
    return {(row["policy"], row["shots"]): row["accuracy"] for row in rows}


def lora_of(path: Path) -> dict[str, torch.Tensor]:
    return dict(load_checkpoint(path / "best.pt").extra["lora"])


def test_clip_learns_along_through_all_stages_and_is_judged_again_from_a_checkpoint(folder: Path) -> None:
    assert load_checkpoint(SEED / "sft" / "best.pt").selector.features == 12, "CLIP's width, not that of the beams"
    lora = [lora_of(SEED / stage) for stage in ("sft", "rce", "grpo_recorded")]
    for before, after in itertools.pairwise(lora):
        assert any(not torch.equal(before[name], after[name]) for name in before)
        assert all((before[name] - after[name]).abs().max() < 0.1 for name in before), "a stage starts from the last"
    reference = load_checkpoint(SEED / "grpo_recorded" / "last.pt").extra["training"]["reference"]
    assert all(torch.equal(reference[f"embeddings.model.{name}"], value) for name, value in lora[0].items())
    assert pl.read_csv("whole/latest/metrics.csv")["Val/grpo_recorded/KL"].drop_nulls()[0] > 0

    again = ["evaluate", "beams=files", "beams.path=b.safetensors", "beams.train=0.6", "beams.validation=0.2"]
    again += [f"checkpoint={SEED}/grpo_recorded/best.pt", "json=again.json"]
    assert main([*again, *CLIP]) == 0
    trained, judged = accuracies("whole/latest/results.json"), accuracies("again.json")
    assert ("grpo_recorded", 2) in judged
    assert all(trained[key] == value for key, value in judged.items())


def test_an_interrupted_run_with_clip_ends_like_any(folder: Path) -> None:
    for stage, iteration in (("rce", 2), ("grpo", 7)):
        with commands.ctrl_c(lambda t, at=(stage, iteration): (t.stage.name, t.iteration) == at):
            assert main([*TRAIN, "name=x"]) == 130
    assert main([*TRAIN, "name=x"]) == 0
    first, second = (load_checkpoint(f"{runs}/latest/checkpoints/best.pt") for runs in ("runs", "whole"))
    assert commands.same(first.extra["lora"], second.extra["lora"])
    assert commands.same(first.selector.state_dict(), second.selector.state_dict())
    assert_frame_equal(*(pl.read_csv(f"{runs}/latest/metrics.csv") for runs in ("runs", "whole")))


def test_what_was_trained_with_clip_goes_on_with_it_alone(folder: Path, capsys: Capture) -> None:
    none, start = ["sft.epochs=0", "rce.epochs=0", "variants.grpo_recorded.epochs=0"], SEED.resolve() / "sft"
    assert main([*TRAIN, *none, f"init_from={start}/best.pt", "name=more"]) == 0
    assert commands.same(lora_of(Path("runs/latest/checkpoints/seed0/grpo_recorded")), lora_of(start))
    stored = [*commands.REPLAY, *SHORT, f"init_from={start}/best.pt", "name=other"]
    assert "reads embeddings 12 wide" in mistake(stored, capsys)
    stored = ["evaluate", "beams=files", "beams.path=b.safetensors", f"checkpoint={start}/best.pt"]
    assert "was trained with encoder=clip" in mistake(stored, capsys)


def test_items_are_those_of_the_rows_in_json_and_those_of_the_ids_in_a_table(folder: Path) -> None:
    lines = Path("queries.jsonl").read_text().splitlines()
    (folder / "turned.jsonl").write_text("\n".join(lines[::-1]))
    files = {"embeddings": "c.safetensors", "query_embeddings": "q.safetensors"}
    embedded = {}
    for path, data in (("f.json", "queries"), ("b.safetensors", "queries"), ("b.safetensors", "turned")):
        beams = BeamFiles(path=path, **files)
        config = ClipLora(folder="clip", data=f"{data}.jsonl", bank="bank.jsonl")
        encoder = read_encoder(config, beams, read_data(beams).table)
        assert isinstance(encoder, ClipEncoder)
        embedded[path, data] = encoder.stored().query_table
    assert len(embedded["f.json", "queries"].unique(dim=0)) > 4
    for other in (("b.safetensors", "queries"), ("b.safetensors", "turned")):
        torch.testing.assert_close(embedded[other], embedded["f.json", "queries"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["encoder.folder=nowhere"], "encoder.folder=nowhere: no such folder"),
        (["encoder.folder=empty"], "empty: not a CLIP model that can be loaded"),
        (["encoder.data=none.jsonl"], "none.jsonl: no such file"),
        (["encoder.data=lost.jsonl"], "lost.jsonl, row 3: no image file lost.png"),
        (["encoder.data=fewer.jsonl"], "fewer.jsonl: has no item for query 'q7' of 'small beams'"),
        (["encoder.data=others.jsonl"], "item 'q5' shows image q0, and in 'small beams' q5"),
        (["encoder.bank=queries.jsonl"], "queries.jsonl: has 60 items for 32 candidates"),
        (["variants={mine:{hidden:[liar]}}"], "no block of CLIP's embeddings can be hidden"),
        (["encoder=stored"], "encoder.folder=clip: is an option of encoder=clip; give that too"),
    ],
    ids=lambda value: None if isinstance(value, str) else value[0],
)
def test_a_mistake_is_refused_before_anything_is_written(
    words: list[str], message: str, folder: Path, capsys: Capture
) -> None:
    rows = [json.loads(line) for line in Path("queries.jsonl").read_text().splitlines()]
    changes = {"fewer": rows[:7] + rows[8:], "lost": [*rows[:2], rows[2] | {"image": "lost.png"}, *rows[3:]]}
    changes["others"] = [*rows[:5], rows[5] | {"image_id": "q0"}, *rows[6:]]
    for name, changed in changes.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
    Path("empty").mkdir()
    assert message in refused([*TRAIN, *words], capsys)


def test_builtin_beams_and_missing_packages_are_refused(folder: Path, capsys: Capture, monkeypatch: Patch) -> None:
    words = ["train", "experiment=selector", "encoder=clip", "encoder.folder=clip", "encoder.data=queries.jsonl"]
    left_out = [f"variants.{name}=null" for name in ("hidden_live", "grpo_live", "shuffled_live")]
    assert "give beams=files" in refused([*words, *left_out], capsys)
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "pip install knobwise[models]" in refused(TRAIN, capsys)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install knobwise[models]" in refused(TRAIN, capsys)
