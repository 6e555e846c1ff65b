"""The profile of RapidOCR: measured, interrupted, resumed; and read where its packages are
missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import OPTIMISER, Capture, main, mistake

from knobwise.common.errors import InputError
from knobwise.envs.readers.builtin import ocr_profile
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.profiling.ocr import profile
from knobwise.profiling.ocr.profile import profile_ocr
from knobwise.profiling.ocr.settings import OCRProfileConfig

SMALL: dict[str, Any] = {
    "side": (288, 416),
    "boxes": (2,),
    "passes": ("plain",),
}
LOG = Path("state") / "measured.jsonl"


def test_a_kill_costs_no_scene_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "STRAIGHT_EVERY", 2)
    profile_ocr(tmp_path, OCRProfileConfig(samples=1, **SMALL))
    first = (tmp_path / LOG).read_bytes()
    (tmp_path / LOG).write_bytes(first + b'{"scene":1,"kind":"pri')  # what a kill leaves
    profile_ocr(tmp_path, OCRProfileConfig(samples=2, **SMALL))
    log = (tmp_path / LOG).read_bytes()
    assert log.startswith(first)
    assert [json.loads(line)["scene"] for line in log.splitlines()] == [0, 1]
    assert ProfileTable.load(tmp_path / "table.safetensors").sample_ids == ("0", "1")
    composition = json.loads((tmp_path / "profile.json").read_text())["composition"]
    assert (composition["scenes"], composition["straight_answers"], composition["same_text"]) == (
        1,
        2,
        1,
    )
    with pytest.raises(InputError, match="other settings"):
        profile_ocr(tmp_path, OCRProfileConfig(samples=2, **SMALL | {"boxes": (3,)}))


def test_the_table_charges_the_look_to_whom_it_does_not_serve_and_has_no_drift(
    tmp_path: Path,
) -> None:
    """Logged by hand: 200 scenes, in the second half of which the machine takes twice as long for
    all."""
    profile_ocr(tmp_path, OCRProfileConfig(samples=1, **SMALL))
    line = json.loads((tmp_path / LOG).read_text())
    with (tmp_path / LOG).open("a") as log:
        for row in range(1, 200):
            slow = 2 if row >= 100 else 1
            times = {
                "total_ms": [100 * slow, 140 * slow],
                "unused_ms": [0, 30 * slow],
                "detector_ms": 25 * slow,
            }
            log.write(
                json.dumps(line | times | {"scene": row, "accuracy": [0.5, 1], "straight": []})
                + "\n"
            )
    profile_ocr(tmp_path, OCRProfileConfig(samples=200, **SMALL))
    table = ProfileTable.load(tmp_path / "table.safetensors")
    assert [table.label(c) for c in range(2)] == [
        f"side={side} boxes=2 passes=plain" for side in (288, 416)
    ]
    usual = torch.tensor([100, 170.0])
    middle = table.latency_ms[120] / usual
    torch.testing.assert_close(table.latency_ms[30:90], (usual * middle).expand(60, 2))
    torch.testing.assert_close(table.latency_ms[110:180], (usual * middle).expand(70, 2))
    assert table.first_look_ms is not None
    torch.testing.assert_close(table.first_look_ms[30], torch.tensor([0, 30.0]) * middle)
    torch.testing.assert_close(
        table.without_first_look.latency_ms[30], torch.tensor([100, 140.0]) * middle
    )
    assert table.features_ms == line["features_ms"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["profile", "model=ocr", "ocr.side=[300]"], "side=300: this model takes 288, 416, 576"),
        (
            ["profile", "model=ocr", "ocr.boxes=[]"],
            "ocr.boxes=[]: needs at least one value and none twice",
        ),
        (
            ["profile", "model=ocr", "ocr.passes=[plain,plain]"],
            "needs at least one value and none twice",
        ),
        (["profile", "model=ocr", "data=questions.jsonl"], "model=ocr makes its own questions"),
        (
            ["profile", "model=elastic", "ocr.samples=5"],
            "ocr: is for model=ocr, not for model=elastic",
        ),
        (["profile", "model=ocr", "knobs.repeats=1"], "knobs: is for model=elastic"),
    ],
)
def test_settings_that_cannot_be_measured(
    words: list[str], message: str, tmp_path: Path, capsys: Capture
) -> None:
    assert message in mistake([*words, f"out={tmp_path / 'out'}"], capsys)
    assert not (tmp_path / "out").exists()


def test_the_shipped_profile_is_read_and_trained_on_without_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rapidocr", "cv2", "onnxruntime", "font_source_sans_pro", "font_source_serif_pro"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(tmp_path)
    words = [
        *OPTIMISER,
        "optimiser.warmup_iterations=2",
        "optimiser.iterations=2",
        "policy=utility",
    ]
    words += ["policy.members=2", "seeds=[0]", "baselines=false", "own_cost=false"]
    assert main(["train", "profile=ocr", *words]) == 0
    assert list(tmp_path.glob("runs/**/best.pt"))


def test_the_shipped_profile_is_what_its_description_says() -> None:
    table = ocr_profile()
    folder = Path(__file__).resolve().parents[3] / "envs" / "data" / "ocr"
    about = json.loads((folder / "profile.json").read_text())
    assert (table.num_samples, table.num_configurations) == (
        about["samples"],
        about["configurations"],
    )
    assert about["samples"] >= 1500
    assert about["composition"]["median_relative_error"] <= 0.05
    assert about["composition"]["same_text"] == 1
    assert about["command"].startswith("knobwise profile model=ocr out=DIR")
    assert table.features_ms == about["features_ms"]
    assert table.first_look_ms is not None
    side = np.array([table.configuration(c)["side"] for c in range(table.num_configurations)])
    assert ((table.first_look_ms.numpy() > 0) == (side != 288)).all()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 4e6
