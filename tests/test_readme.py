"""The snippets of the README and of the guides run as they stand; training only shorter."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from helpers import small_beams, small_table
from PIL import Image
from tiny_models import tiny_model

from knobwise.__main__ import main
from knobwise.envs.demonstrations.beam_files import write_rl_data
from knobwise.envs.readers.exp_files import write_exp5_exp6
from knobwise.envs.readers.long_table import long_frame, write_features, write_long_table
from knobwise.experiments.command_line.compose import read_settings, schema_of
from knobwise.experiments.command_line.sweep import jobs_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = {"data_sets.md", "decisions.md", "results.md"}  # pages of figures, without anything to type
GUIDES = ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")) if p.name not in RESULTS)]
SHORTER = [
    *("optimiser.warmup_iterations=4", "optimiser.iterations=4", "optimiser.contexts=32", "optimiser.evaluate_every=4"),
    *("tracking=disabled", "seeds=[0]"),
]
SHORTER_SELECTOR = [
    *("sft.epochs=1", "rce.epochs=1", "grpo.epochs=1", "judged_shots=[2]", "tracking=disabled", "seeds=[0]"),
    *(f"variants.{name}.epochs=1" for name in ("grpo_rounds", "grpo_live")),
    *(f"variants.{name}=null" for name in ("shuffled_live", "hidden_live")),
]


def blocks(guide: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / guide).read_text(), re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a profile in every form that the guides speak of."""
    monkeypatch.chdir(tmp_path)
    table = small_table(80)
    write_exp5_exp6(long_frame(table), "exp5", "exp6", "text_vqa")
    write_long_table(table, "measured.csv")
    write_features(table, "features.npz")
    other = small_table(80, seed=1)
    write_long_table(other, "other.csv")
    write_features(other, "other.npz")
    beams, _ = small_beams(30)
    write_rl_data(beams, "beams.json")
    np.savez("embeddings.npz", embeddings=beams.candidates.numpy())
    for part in tiny_model("llava_next"):
        part.save_pretrained("model")
    Image.effect_noise((64, 40), 50).save("image.png")
    asked = [{"id": n, "image": "image.png", "question": f"What {n}?", "answers": ["a"]} for n in range(2)]
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    return tmp_path


LEAN = ["policy=utility", "policy.hidden=16", "policy.members=2", "baselines=false"]
SHORTER_LIVE = ["stream.requests=6", "stream.calibration=6", "stream.warm_up=1", "stream.student=false"]


def shortened(words: list[str]) -> list[str]:
    if words[0] == "evaluate" and "live=true" in words:
        return words + SHORTER_LIVE
    if words[0] == "export":
        return [word for word in words if word != "student=true"]  # its fitting takes half a minute
    if words[0] != "train" or any(word.startswith("-") for word in words):
        return words
    if any(word.startswith("experiment=selector") for word in words):
        return words + [word for word in SHORTER_SELECTOR if "experiment=selector" in words or "variants" not in word]
    # experts and baselines on all of the built-in profile take half a minute
    lean = LEAN if "profile=builtin" in words else []
    return [word for word in words if not word.startswith("seeds=")] + lean + SHORTER


@pytest.mark.parametrize("guide", GUIDES)
def test_every_command_of_a_guide(guide: str, folder: Path) -> None:
    lines = [line for block in blocks(guide, "bash") for line in block.splitlines() if line.startswith("knobwise ")]
    assert lines
    for line in lines:
        if " -m " in line:  # every combination trained would take minutes: that all of them are understood is enough
            words = shlex.split(line, comments=True)[2:]
            schema = schema_of("train", words)
            assert all(read_settings(schema, job) for job in jobs_of(schema, words))
            continue
        words = shlex.split(line, comments=True)[1:]
        # README commands on the built-in profile stand in for themselves elsewhere; here a small table is enough
        own = any(word.startswith(("profile=", "experiment=selector")) for word in words)
        if words[0] == "train" and not own and "--help" not in words:
            words += ["profile=table", "profile.path=measured.csv"]
        assert main(shortened(words)) == 0, line


@pytest.mark.parametrize("guide", GUIDES)
def test_every_python_snippet_of_a_guide(guide: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snippets = blocks(guide, "python")
    if any("runs/latest" in snippet for snippet in snippets):
        assert main(["train", "experiment=controller", *LEAN, *SHORTER]) == 0
    for line in blocks(guide, "bash"):
        if "knobwise profile model=learner" in line:
            assert main(shlex.split(line)[1:]) == 0
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, guide, "exec"), names)
    assert capsys.readouterr().out
