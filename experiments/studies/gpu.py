"""A Hugging Face vision-language model of full width on a GPU: what its knobs cost and save, and a controller in front
of it.

    python -m knobwise.experiments.studies.gpu key=value …

Weights are random: times are measured, accuracies are simulated (`knobwise.envs.simulated.calibrated`). Measures the
model, trains a controller on the table, serves it live by the same model, writes docs/gpu.md. Estimated for one H100 at
0.12 s an answer: 1 minute to make the model, 6 to measure 30 samples × 48 configurations twice, 2 to train and serve.
Repeat the command to resume: nothing is measured twice. A small model on a CPU:

    … device=cpu width=64 experts=32 vision_blocks=2 out=page.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from PIL import Image

from knobwise.agents.serving.export import configurations_of
from knobwise.common.checks import a_device, at_least
from knobwise.common.errors import InputError
from knobwise.common.files import write_text
from knobwise.envs.simulated.calibrated import simulate_calibrated
from knobwise.envs.simulated.settings import CalibratedConfig
from knobwise.experiments.command_line.compose import read_settings
from knobwise.experiments.command_line.sweep_jobs import train
from knobwise.experiments.deploy.live import run_live
from knobwise.experiments.report import words
from knobwise.experiments.results.run_folder import checkpoint_at
from knobwise.experiments.settings.options import LiveConfig
from knobwise.experiments.settings.profiles import read_profile
from knobwise.experiments.studies.running import quiet, rendered, run_from_words
from knobwise.profiling.huggingface.model import HuggingFaceVLM
from knobwise.profiling.huggingface.random_weights import CROP_SIDE, random_qwen
from knobwise.profiling.measuring.adaptive_model import KNOBS, Answer, Configuration, FirstStage
from knobwise.profiling.measuring.machine import one_thread
from knobwise.profiling.measuring.profiler import profile_vlm
from knobwise.profiling.measuring.questions import VQAData, VQAItem
from knobwise.profiling.measuring.requests import Questions
from knobwise.profiling.measuring.settings import VLMProfileConfig

METRIC = "knobwise.experiments.studies.gpu:simulated_accuracy"
SHAPES = ((1.4, 1.0), (1.0, 0.6), (0.6, 0.6), (1.8, 0.5), (0.6, 1.4), (0.4, 0.4))
"""Width and height of pictures, as shares of the side of a square that fills as many crops as there can be."""
LENGTHS = (4, 16, 8, 32)
"""Words of questions."""
WORDS = ("how", "many", "red", "signs", "stand", "left", "behind", "that", "small", "house", "what", "says")
MS = ("vision_ms", "prefill_ms", "decode_ms", "latency_ms")


@dataclass
class GPUStudyConfig:
    """The settings, each as key=value."""

    width: int = 2048
    """Of the language model, a multiple of 64; other widths go with it. 2048 with the defaults below needs 23 GB."""
    experts: int = 128
    """In each of 16 decoder blocks."""
    vision_blocks: int = 27
    """Blocks of the vision tower."""
    device: str = "cuda"
    """cuda, or cpu for a small model."""
    max_crops: list[int] = field(default_factory=lambda: [2, 4, 8, 12])
    """Values to measure, out of those that accuracy is simulated at: 2, 4, … 12."""
    top_k: list[int] = field(default_factory=lambda: [4, 8, 16, 32])
    """Likewise: 4, 8, … 32."""
    num_active_blocks: list[int] = field(default_factory=lambda: [8, 12, 16])
    """Likewise: 8, 10, … 16."""
    samples: int = 30
    """Pictures, each with a question."""
    repeats: int = 2
    """Measurements of each sample with each configuration."""
    new_tokens: int = 4
    """Tokens of every answer; the first comes with the prefill."""
    requests: int = 100
    """Requests that each of four policies serves live."""
    train: list[str] = field(default_factory=list)
    """Further words of the training's command, such as policy=utility."""
    folder: str = "profiles/gpu"
    """Measurements and training."""
    seed: int = 0
    """Of weights, pictures, questions and simulated accuracies."""
    out: str = "docs/gpu.md"
    """The page."""

    def __post_init__(self) -> None:
        a_device("device", self.device)
        for name, least in {"samples": 10, "repeats": 2, "new_tokens": 2, "experts": 8, "vision_blocks": 1}.items():
            at_least(name, getattr(self, name), least)
        if self.width < 64 or self.width % 64:
            raise InputError(f"width={self.width}: must be a multiple of 64")
        if self.device != "cpu" and not torch.cuda.is_available():
            raise InputError(f"device={self.device}: torch finds no GPU here; device=cpu width=64 tries the command")


def run(config: GPUStudyConfig) -> list[str]:
    """Measure, train, serve and write the page. Raises InputError: a value of a knob that was not simulated, or as
    `profile_vlm`, `knobwise train` and `run_live`."""
    folder, items = Path(config.folder), questions(config)
    settings: dict[str, Any] = {knob: getattr(config, knob) for knob in KNOBS} | {"repeats": config.repeats}
    measured = VLMProfileConfig("gpu", metric=METRIC, max_new_tokens=config.new_tokens, seed=config.seed, **settings)
    with one_thread():
        sizes = {name: getattr(config, name) for name in ("width", "experts", "vision_blocks", "device", "seed")}
        model = RandomVLM(*random_qwen(**sizes, crops=max(config.max_crops)), max_new_tokens=config.new_tokens)
        about = {"sizes": sizes, "device": config.device, "transformers": version("transformers")}
        profile_vlm(folder, model, VQAData(items, items), measured, about)
    command = [
        "profile=table",
        "name=controller",
        f"runs={folder}",
        "seeds=[0]",
        "tracking=disabled",
        "policy=utility",
        "policy.guard=false",
    ]
    command += [f"profile.path={folder / 'table.parquet'}", f"profile.features={folder / 'features.safetensors'}"]
    command += ["profile.name=simulated-accuracy", f"device={config.device.partition(':')[0]}", *config.train]
    training = read_settings("train", command)
    checkpoint = checkpoint_at(train(training, command))
    stream = LiveConfig(requests=config.requests, fixed=1, calibration=60, warm_up=2, seed=config.seed)
    with quiet():  # it takes the answers for real
        live = run_live(checkpoint, read_profile(training.profile), model, Questions(items, METRIC), stream)
    profile = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    write_text(config.out, gpu_page(profile, pl.read_parquet(folder / "table.parquet"), live))
    return []


class RandomVLM(HuggingFaceVLM):
    """A model at random weights, whose answers name the configuration that gave them, as accuracy is simulated by it."""

    @property
    def name(self) -> str:
        return f"{super().name} at random weights"

    def answer(self, stages: Sequence[FirstStage], configuration: Configuration) -> list[Answer]:
        return [replace(answer, text=_key(configuration)) for answer in super().answer(stages, configuration)]


def _key(configuration: Configuration) -> str:
    return " ".join(f"{knob}={configuration[knob]}" for knob in KNOBS)


def simulated_accuracy(answer: str, simulated: Sequence[str]) -> float:
    """What was simulated for the configuration that an answer names; `simulated` has "configuration: accuracy"."""
    accuracy = dict(each.split(": ") for each in simulated)
    return float(accuracy[answer.partition(": ")[0]])


def questions(config: GPUStudyConfig) -> tuple[VQAItem, ...]:
    """Pictures of several shapes with questions of several lengths; in the place of right answers the simulated
    accuracy of every configuration. Raises InputError for a value of a knob that was not simulated."""
    settings = CalibratedConfig(("text_vqa",), config.samples, image_width=0, language_width=0, seed=config.seed)
    simulated = simulate_calibrated(settings)
    for knob in simulated.knobs:
        if unknown := set(getattr(config, knob.name)) - set(knob.values):
            known = ", ".join(map(str, knob.values))
            raise InputError(f"{knob.name}={min(unknown)}: accuracy is simulated at {known} only")
    keys = list(map(_key, configurations_of(simulated)))
    rng, side = np.random.default_rng(config.seed), CROP_SIDE * max(config.max_crops) ** 0.5
    items = []
    for i, accuracy in enumerate(simulated.accuracy.tolist()):
        width, height = (int(side * share) for share in SHAPES[i % len(SHAPES)])
        picture = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        question = " ".join(rng.choice(WORDS, LENGTHS[i % len(LENGTHS)]))
        answers = tuple(f"{key}: {value:.2f}" for key, value in zip(keys, accuracy, strict=True))
        items.append(VQAItem(str(i), picture, f"{question}?", answers))
    return tuple(items)


def gpu_page(profile: dict[str, Any], table: pl.DataFrame, live: dict[str, Any]) -> str:
    """docs/gpu.md, from `profile.json`, the long table and the results of the live stream."""
    cells = table.group_by("sample_id", *KNOBS).agg(pl.col(MS).median(), jitter=pl.col("latency_ms").log().std())
    marginal = {knob: cells.group_by(knob).agg(pl.col(MS).mean()).sort(knob).to_dicts() for knob in KNOBS}
    by_configuration = cells.group_by(KNOBS).agg(pl.col(MS).mean()).sort("latency_ms").to_dicts()
    jitter = cells["jitter"].median(), cells["jitter"].quantile(0.95, "linear")
    return rendered(
        "gpu.md.j2",
        profile=profile,
        live=live,
        marginal=marginal,
        jitter=jitter,
        extremes=(by_configuration[0], by_configuration[-1]),
        words=words,
    )


if __name__ == "__main__":
    sys.exit(run_from_words("gpu", GPUStudyConfig, run, sys.argv[1:]))
