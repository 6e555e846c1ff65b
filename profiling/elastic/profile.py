"""Profile the elastic model: train it, measure it, write the profile. One call, which can be interrupted at any time.

profile_elastic("out")  →  out/table.parquet  features.npz  samples.parquet  profile.json  elastic.safetensors
                           out/exp5/…  out/exp6/…  (the same measurements as exp5/exp6 files)
                           out/state/…  (what an interrupted run goes on from; may be removed afterwards)
"""

from __future__ import annotations

import itertools
import shutil
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from knobwise.common.files import written_whole
from knobwise.profiling.elastic.measuring import Measurements, claim, measure, one_thread
from knobwise.profiling.elastic.model import Configuration, ElasticSize, ElasticVLM
from knobwise.profiling.elastic.outputs import cpu_name, write_profile
from knobwise.profiling.elastic.scenes import draw_samples
from knobwise.profiling.elastic.training import TrainingConfig, train
from knobwise.profiling.measuring.figures import describe

MODEL_FILE = "elastic.safetensors"


@dataclass
class ElasticProfileConfig:
    """What ``profile_elastic`` measures."""

    samples: int = 2000
    """Scenes, each with one question, made of digit images that training never saw."""
    repeats: int = 3
    """Measurements per (sample, configuration); the median is kept."""
    seed: int = 1
    """Seeds the scenes and the order of measuring."""
    max_crops: tuple[int, ...] = (2, 4, 8, 12)
    """Values of the first knob: caps on the tiles of an image."""
    top_k: tuple[int, ...] = (1, 2, 3, 4)
    """Values of the second knob: experts per token."""
    num_active_blocks: tuple[int, ...] = (3, 4, 5, 6)
    """Values of the third knob: blocks that run."""
    model: str = ""
    """Weights (.safetensors) to measure; ``shipped`` for those that come with knobwise; empty trains a new model."""
    exp_json: bool = True
    """Whether to write exp5/exp6 files too; they are some hundred times larger than the table."""
    quick: bool = False
    """A trial run in a minute: at most 32 samples, 1 repeat, 40 training steps. The figures mean nothing."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """How the model is trained."""
    size: ElasticSize = field(default_factory=ElasticSize)
    """How large the model is."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.repeats < 1:
            raise ValueError(
                f"elastic.samples and elastic.repeats must be positive, not {self.samples} and {self.repeats}"
            )
        for name in Configuration._fields:
            values = tuple(int(v) for v in getattr(self, name))
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} needs at least one value and no value twice, not {values}")
            setattr(self, name, values)

    @property
    def configurations(self) -> list[Configuration]:
        """Every combination of the knobs' values."""
        return [Configuration(*c) for c in itertools.product(self.max_crops, self.top_k, self.num_active_blocks)]


def profile_elastic(out_dir: str | Path, config: ElasticProfileConfig | None = None) -> Path:
    """Train (or load) the elastic model, measure every configuration, write the profile, and return its folder.

    Calling it again with the same ``config`` after an interruption goes on where it stopped. Everything runs on one
    torch thread. Raises ``ValueError`` for settings that the model cannot run, or if ``out_dir`` holds another run.
    """
    config = config or ElasticProfileConfig()
    if config.quick:
        training = replace(config.training, steps=min(config.training.steps, 40))
        config = replace(config, samples=min(config.samples, 32), repeats=1, training=training)
    probe = ElasticVLM(config.size) if not config.model else ElasticVLM.load(_weights(config.model))
    for configuration in config.configurations:
        probe.check(configuration)

    out, state = Path(out_dir), Path(out_dir) / "state"
    # latencies of two machines or two versions of torch must not end up in one table
    where = {"cpu": cpu_name(), "torch": torch.__version__}
    claim(state / "config.json", where | {k: v for k, v in asdict(config).items() if k != "exp_json"})
    with one_thread():
        about = _profile(out, state, config)
    print(describe(about["figures"]))
    return out


def _profile(out: Path, state: Path, config: ElasticProfileConfig) -> dict[str, Any]:
    path = out / MODEL_FILE
    if not path.exists():
        if config.model:
            with written_whole(path) as temporary:
                shutil.copyfile(_weights(config.model), temporary)
        else:
            train(config.training, config.size, state / "training.pt").save(path)
    # measured as it will be loaded: with weights rounded to half precision
    model = ElasticVLM.load(path)
    samples = draw_samples(config.samples, config.seed)
    measured = Measurements.open(state, config.repeats, config.samples, len(config.configurations))
    measure(model, samples, config.configurations, measured, config.seed)
    return write_profile(out, config, model, samples, measured)


def shipped_model() -> ElasticVLM:
    """The trained model that the built-in profile was measured on."""
    return ElasticVLM.load(_weights("shipped"))


def _weights(model: str) -> Path:
    if model == "shipped":
        return Path(str(resources.files("knobwise.profiling") / "data" / MODEL_FILE))
    path = Path(model)
    if not path.exists():
        raise ValueError(f"model={model}: no such file")
    return path
