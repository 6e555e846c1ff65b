"""A Hugging Face vision-language model of full width on a GPU: what its knobs cost, and a controller in front of it.

    python -m knobwise.experiments.studies.gpu key=value …

Weights are random: times are measured, accuracies simulated (`knobwise.envs.simulated.calibrated`). Measures the model,
trains a controller on the table, serves it live by the same model, writes docs/gpu.md. Estimated for one H100 at 0.12 s
an answer: 1 minute to make the model, 6 to measure 30 samples × 48 configurations twice, 1.5 to train and serve. Repeat
the command to resume. A CPU takes a small model: device=cpu width=64 knobs.top_k=[4,8] out=FILE.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from PIL import Image

from knobwise.agents.serving.export import configurations_of
from knobwise.common.checks import a_device
from knobwise.common.errors import InputError
from knobwise.common.files import write_text
from knobwise.envs.simulated.calibrated import simulate_calibrated
from knobwise.envs.simulated.settings import CalibratedConfig
from knobwise.experiments.command_line.compose import read_settings
from knobwise.experiments.command_line.sweep_jobs import train
from knobwise.experiments.deploy.live import run_live
from knobwise.experiments.report import words
from knobwise.experiments.settings.options import LiveConfig
from knobwise.experiments.settings.profiles import read_profile
from knobwise.experiments.studies.running import quiet, rendered, run_from_words
from knobwise.profiling.huggingface.model import HuggingFaceVLM
from knobwise.profiling.huggingface.random_weights import CROP_SIDE, random_qwen
from knobwise.profiling.measuring.adaptive_model import KNOBS, Answer, Configuration
from knobwise.profiling.measuring.machine import one_thread
from knobwise.profiling.measuring.profiler import profile_vlm
from knobwise.profiling.measuring.questions import VQAData, VQAItem
from knobwise.profiling.measuring.requests import Questions
from knobwise.profiling.measuring.settings import VLMProfileConfig

PICTURES = ((1.4, 1.0, 4), (1.0, 0.6, 16), (0.6, 0.6, 8), (1.8, 0.5, 32), (0.6, 1.4, 4), (0.4, 0.4, 16))
"""Width and height, as shares of the side of a square that fills all crops; words of the question."""
MEASURED: Any = {"samples": 30, "metric": "exact", "repeats": 2, "max_new_tokens": 4}
MEASURED |= {"max_crops": (2, 4, 8, 12), "top_k": (4, 8, 16, 32), "num_active_blocks": (8, 12, 16)}
MS = ("vision_ms", "prefill_ms", "decode_ms", "latency_ms")


@dataclass
class GPUStudyConfig:
    """The settings, each as key=value."""

    width: int = 2048
    """Of the language model, a multiple of 64; all other sizes go with it. The default needs 24 GB."""
    device: str = "cuda"
    """cuda, or cpu for a small model."""
    knobs: VLMProfileConfig = field(default_factory=lambda: VLMProfileConfig("gpu", **MEASURED))
    """What is measured. Accuracy is simulated at max_crops 2, 4, … 12, top_k 4, 8, … 32, blocks 8, 10, … 16."""
    stream: LiveConfig = field(default_factory=lambda: LiveConfig(100, fixed=1, calibration=60, warm_up=2))
    """The requests that are served live."""
    train: list[str] = field(default_factory=list)
    """Further words of the training's command, such as optimiser.iterations=50."""
    folder: str = "profiles/gpu"
    """For measurements and training."""
    out: str = "docs/gpu.md"
    """The page."""

    def __post_init__(self) -> None:
        a_device("device", self.device, usable=True)


def run(config: GPUStudyConfig) -> list[str]:
    """Measure, train, serve and write the page. Raises InputError: a value of a knob that was not simulated, or as
    `random_qwen`, `profile_vlm`, `knobwise train` and `run_live`."""
    folder, items, device = Path(config.folder), questions(config.knobs), config.device
    with one_thread():
        made = random_qwen(config.width, max(config.knobs.max_crops), device)
        model = RandomVLM(*made, max_new_tokens=config.knobs.max_new_tokens)
        about = {"width": config.width, "device": device, "transformers": version("transformers")}
        profile_vlm(folder, model, VQAData(items, items), config.knobs, about)
    # without its guard, which after so few samples would mostly leave the features out
    command = ["profile=table", "profile.name=simulated-accuracy", "policy=utility", "policy.guard=false", "seeds=[0]"]
    command += [f"profile.path={folder / 'table.parquet'}", f"profile.features={folder / 'features.safetensors'}"]
    command += [f"runs={folder}", "name=controller", "tracking=disabled", f"device={device.partition(':')[0]}"]
    settings = read_settings("train", command := [*command, *config.train])
    checkpoint = train(settings, command) / "checkpoints" / "best.pt"
    with quiet():  # its sentences take the answers for real
        live = run_live(checkpoint, read_profile(settings.profile), model, Questions(items, "exact"), config.stream)
    profile = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    write_text(config.out, gpu_page(profile, pl.read_parquet(folder / "table.parquet"), live))
    return []


class RandomVLM(HuggingFaceVLM):
    """A model at random weights. Its answers name the configuration that gave them, by which they are right or not."""

    def answer(self, stages: Any, configuration: Configuration) -> list[Answer]:
        return [replace(answer, text=str(configuration)) for answer in super().answer(stages, configuration)]


def questions(measured: VLMProfileConfig) -> tuple[VQAItem, ...]:
    """Pictures of several shapes with questions of several lengths. The right answers are the configurations whose
    simulated answer is. Raises InputError for a value of a knob that was not simulated."""
    simulated = simulate_calibrated(CalibratedConfig(("text_vqa",), measured.samples or 0))
    for knob in simulated.knobs:
        values = getattr(measured, knob.name)
        if not values or not set(values) <= set(knob.values):
            raise InputError(f"knobs.{knob.name}={list(values)}: must be some of {list(knob.values)}")
    keys = list(map(str, configurations_of(simulated)))
    rng, side, items = np.random.default_rng(0), CROP_SIDE * max(measured.max_crops) ** 0.5, []
    for i, accuracy in enumerate(simulated.accuracy.tolist()):
        width, height, length = PICTURES[i % len(PICTURES)]
        pixels = rng.integers(0, 256, (int(height * side), int(width * side), 3), dtype=np.uint8)
        right = [key for key, value in zip(keys, accuracy, strict=True) if value > 0]
        items.append(VQAItem(str(i), Image.fromarray(pixels), "sign " * length, tuple(right or ["none"])))
    return tuple(items)


def gpu_page(profile: dict[str, Any], table: pl.DataFrame, live: dict[str, Any]) -> str:
    """docs/gpu.md, from `profile.json`, the long table and the results of the live stream."""
    cells = table.group_by("sample_id", *KNOBS).agg(pl.col(MS).median(), jitter=pl.col("latency_ms").log().std())
    means = {knob: cells.group_by(knob).agg(pl.col(MS).mean()).sort(knob).to_dicts() for knob in KNOBS}
    jitter = cells["jitter"].median(), cells["jitter"].quantile(0.95, "linear")
    return rendered("gpu.md.j2", profile=profile, live=live, means=means, jitter=jitter, words=words)


if __name__ == "__main__":
    sys.exit(run_from_words("gpu", GPUStudyConfig, run, sys.argv[1:]))
