"""The study of a model of full width, at a tiny width from end to end; its page from a table made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
import torch

from knobwise.envs.simulated.calibrated import simulate_calibrated
from knobwise.envs.simulated.settings import CalibratedConfig
from knobwise.experiments.studies.gpu import GPUStudyConfig, gpu_page, run
from knobwise.experiments.studies.running import run_from_words
from knobwise.profiling.huggingface.random_weights import random_qwen
from knobwise.profiling.measuring.adaptive_model import KNOBS

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # inside transformers

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TINY = ["width=64", "knobs.max_crops=[2]", "knobs.top_k=[8]", "knobs.num_active_blocks=[8,16]", "knobs.samples=10"]
SHORT = ["optimiser.warmup_iterations=4", "optimiser.iterations=2", "baselines=false"]
SERVED = ["knobs.max_new_tokens=2", "stream.requests=5", "stream.calibration=2", "stream.warm_up=0"]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command leaves on a device."""
    folder = tmp_path_factory.mktemp("gpu")
    places = [f"folder={folder}", f"out={folder / 'page.md'}", f"stream.json={folder / 'live.json'}"]
    command = [f"device={request.param}", *TINY, *SERVED, *places, f"train=[{','.join(SHORT)}]"]
    assert run_from_words("gpu", GPUStudyConfig, run, command) == 0
    return folder


def test_from_the_model_to_the_page(folder: Path) -> None:
    live, table = json.loads((folder / "live.json").read_text()), pl.read_parquet(folder / "table.parquet")
    assert len(table) == 10 * 2 * 2
    assert (table["prefill_ms"] > table["vision_ms"]).all()
    assert (table["decode_ms"] > 0).all()
    blocks = table.group_by("num_active_blocks").agg(pl.col("latency_ms").median()).sort("num_active_blocks")
    assert blocks["latency_ms"][0] < blocks["latency_ms"][1]
    # the controller reads features, and what it decided is replayed with the accuracy that it got
    assert live["overhead"]["features_and_knobs_us_p50"] > 0
    assert {row["agrees"] for row in live["agreement"] if row["what"] == "accuracy"} == {True}
    page = (folder / "page.md").read_text()
    assert "accuracy is **simulated**" in page
    assert "| policy | on time | simulated accuracy | utility (simulated) | mean ms |" in page
    assert page.count("\n| learned controller |") == page.count("\n| budget-aware static |") == 2
    assert ("so these times say nothing about a GPU" in page) == (
        json.loads((folder / "profile.json").read_text())["device"] == "cpu"
    )


def test_accuracy_is_that_of_the_simulation(folder: Path) -> None:
    simulated = simulate_calibrated(CalibratedConfig(("text_vqa",), 10))
    settings = [
        tuple(knob.values[i] for knob, i in zip(simulated.knobs, row, strict=True)) for row in simulated.configurations
    ]
    for row in pl.read_parquet(folder / "table.parquet").to_dicts():
        column = settings.index(tuple(row[knob] for knob in KNOBS))
        assert row["accuracy"] == float(simulated.accuracy[int(row["sample_id"]), column] > 0)


def test_the_page_has_the_means_of_the_table(folder: Path) -> None:
    """Two samples × two values of top_k × two repeats. A cell counts with the median of its repeats."""
    times = {("a", 4): (10, 30), ("a", 8): (40, 40), ("b", 4): (30, 50), ("b", 8): (80, 80)}
    rows = [
        {"sample_id": sample, "max_crops": 2, "top_k": top_k, "num_active_blocks": 16, "repeat": repeat,
         "latency_ms": float(ms), "prefill_ms": ms / 2, "decode_ms": ms / 2, "vision_ms": ms / 10}
        for (sample, top_k), pair in times.items() for repeat, ms in enumerate(pair)
    ]  # fmt: skip
    profile, live = (json.loads((folder / f"{name}.json").read_text()) for name in ("profile", "live"))
    page = gpu_page(profile, pl.DataFrame(rows), live)
    assert "\n| 4 | 3.00 | 15.00 | 15.00 | 30.00 |\n| 8 | 6.00 | 30.00 | 30.00 | 60.00 |\n" in page
    assert "\n| 16 | 4.50 | 22.50 | 22.50 | 45.00 |\n" in page
    # deviations of ln ms: ln 3/√2 = 77.7 %, ln(5/3)/√2 = 36.1 %, and twice 0
    assert "differ by a standard deviation of 18.1% at the median of the cells, 71.4% at the 95th percentile" in page


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["width=100"], "width=100: must be a multiple of 64"),
        (
            ["knobs.max_crops=[3]"],
            "knobs.max_crops=[3]: must be some of [2, 4, 6, 8, 10, 12]",
        ),
        (["knobs.top_k=[]"], "knobs.top_k=[]: must be some of [4, 8, "),
        (["knobs.top_k=[4,32]"], "top_k=32: this model takes 1 to 8 (experts for each token)"),
        (["knobs.repeats=0"], "knobs.repeats=0: must be at least 1"),
        (["knobs.samples=0"], "knobs.samples=0: must be at least 1"),
        (["device=tpu"], "device=tpu: must be cpu or cuda"),
        (["device=cuda:x"], "device=cuda:x: must be cpu or cuda"),
        (["device=cuda:99"], "device=cuda:99: torch finds no such GPU here; device=cpu works everywhere"),
        (["depth=3"], "Key 'depth' not in 'GPUStudyConfig'"),
        (["width=wide"], "Value 'wide'"),
    ],
)
def test_mistakes(words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["device=cpu", *TINY, f"folder={tmp_path}", f"out={tmp_path / 'page.md'}", *words]
    assert run_from_words("gpu", GPUStudyConfig, run, command) == 2
    (message,) = capsys.readouterr().err.strip().splitlines()
    assert message.startswith(f"gpu: {line}")
    assert not list(tmp_path.iterdir())


def test_the_full_width_has_the_published_sizes() -> None:
    model, _ = random_qwen(2048, 12, "meta")  # no memory is taken
    text, vision = model.config.text_config, model.config.vision_config
    assert (text.vocab_size, text.num_attention_heads, text.num_key_value_heads) == (151_936, 32, 4)
    assert (text.num_experts, text.moe_intermediate_size, text.num_hidden_layers) == (128, 768, 16)
    assert (vision.depth, vision.hidden_size, vision.num_heads, vision.intermediate_size) == (27, 1152, 16, 4304)
    assert vision.deepstack_visual_indexes == [8, 16, 24]
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e9, 1) == 11.1
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
