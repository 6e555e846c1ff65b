from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from knobwise.envs.readers.exp_files import read_exp5_exp6
from knobwise.envs.readers.long_table import read_long_table
from knobwise.profiling.elastic import measuring
from knobwise.profiling.elastic.measuring import Measurements, claim, measure
from knobwise.profiling.elastic.model import Configuration, ElasticSize, ElasticVLM
from knobwise.profiling.elastic.outputs import DATASET, command
from knobwise.profiling.elastic.profile import ElasticProfileConfig, profile_elastic
from knobwise.profiling.elastic.scenes import draw_samples
from knobwise.profiling.elastic.training import TrainingConfig

TINY = ElasticSize(width=16, heads=2, blocks=4, experts=4, expert_width=8, max_top_k=2)
CONFIG = ElasticProfileConfig(
    samples=5, repeats=2, max_crops=(1, 4), top_k=(1, 2), num_active_blocks=(3, 4), size=TINY,
    training=TrainingConfig(steps=2, batch_size=4),
)  # fmt: skip


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return profile_elastic(tmp_path_factory.mktemp("profile"), CONFIG)


def test_the_table_has_every_sample_at_every_configuration(out: Path) -> None:
    table = pl.read_parquet(out / "table.parquet")
    keys = ["sample_id", *Configuration._fields]
    assert table.height == table.select(keys).unique().height == 5 * 8
    assert set(table["accuracy"]) <= {0.0, 1.0}
    assert (table["soft_score"] >= table["accuracy"]).all()
    assert (table["latency_ms"] > table["prefill_ms"]).all()
    assert (table["cpu_ms"] > 0).all()


def test_the_exp_files_hold_the_same_profile(out: Path) -> None:
    table = read_long_table(out / "table.parquet", features=out / "features.npz")
    again = read_exp5_exp6(out / "exp5", out / "exp6", DATASET)
    assert [knob.name for knob in table.knobs] == list(Configuration._fields)
    assert table.sample_ids == again.sample_ids
    assert torch.equal(table.accuracy, again.accuracy)
    assert torch.equal(table.latency_ms, again.latency_ms)


def test_every_sample_has_features(out: Path) -> None:
    with np.load(out / "features.npz", allow_pickle=False) as features:
        assert features["sample_id"].tolist() == list(range(5))
        assert features["image_features"].shape == (5, 2 * TINY.width)
        assert features["language_features"].shape == (5, TINY.width)
        assert all(np.isfinite(features[name]).all() for name in features.files)


def test_the_description_fits_the_files(out: Path) -> None:
    about = json.loads((out / "profile.json").read_text())
    for name, digest in about["sha256"].items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    assert (about["samples"], about["configurations"], about["torch"]["threads"]) == (5, 8, 1)


def test_nothing_half_written_is_left(out: Path) -> None:
    assert not [p for p in out.rglob("*") if p.name.startswith(".") or p.suffix == ".partial"]


def test_a_finished_profile_is_not_measured_again(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = pl.read_parquet(out / "table.parquet")
    measured = measuring.Measurements.open(out / "state", 2, 5, 8).total_ms.copy()
    profile_elastic(out, CONFIG)
    assert np.array_equal(measured, measuring.Measurements.open(out / "state", 2, 5, 8).total_ms)
    assert before.equals(pl.read_parquet(out / "table.parquet"))


def test_another_run_in_the_same_folder_is_refused(out: Path) -> None:
    with pytest.raises(ValueError, match="samples: 5 → 6"):
        profile_elastic(out, replace(CONFIG, samples=6))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"top_k": (1, 3)}, "top_k must be 1 to 2"),
        ({"num_active_blocks": (1,)}, "num_active_blocks must be 2 to 4"),
        ({"max_crops": ()}, "max_crops needs at least one value"),
        ({"top_k": (1, 1)}, "no value twice"),
        ({"samples": 0}, "elastic.samples and elastic.repeats"),
        ({"model": "nowhere.safetensors"}, "no such file"),
    ],
)
def test_impossible_settings_are_refused_before_anything_is_written(
    tmp_path: Path, wrong: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        profile_elastic(tmp_path / "out", replace(CONFIG, **wrong))  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_an_interrupted_measurement_goes_on_and_measures_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_WARM_UP_ROUNDS", 0)
    torch.manual_seed(0)
    model, samples, configurations = ElasticVLM(TINY).eval(), draw_samples(4, seed=0), CONFIG.configurations
    runs, generate = [], ElasticVLM.generate

    def counted(self, image, prompt, configuration):  # type: ignore[no-untyped-def]
        if len(runs) == 20:
            runs.append(None)
            raise KeyboardInterrupt
        runs.append((prompt.tolist(), image.shape, configuration))
        return generate(self, image, prompt, configuration)

    monkeypatch.setattr(ElasticVLM, "generate", counted)
    with pytest.raises(KeyboardInterrupt):
        measure(model, samples, configurations, Measurements.open(tmp_path, 1, 4, 8), seed=0)
    half = Measurements.open(tmp_path, 1, 4, 8)
    kept = half.total_ms.copy()
    assert half.done == 20
    measure(model, samples, configurations, half, seed=0)
    assert half.done == 32 == len(runs) - 1
    assert np.array_equal(half.total_ms[np.isfinite(kept)], kept[np.isfinite(kept)])
    assert len({str(run) for run in runs if run}) == 32


def test_a_killed_measurement_goes_on_from_what_it_measured(tmp_path: Path) -> None:
    """SIGKILL in the middle of measuring: everything finished before it is on disk and stays as it is."""
    ElasticVLM(TINY).save(tmp_path / "model.safetensors")
    script = (
        "import itertools, sys, torch; from pathlib import Path; torch.set_num_threads(1)\n"
        "from knobwise.profiling.elastic.measuring import *\n"
        "from knobwise.profiling.elastic.scenes import draw_samples\n"
        "settings = [Configuration(*c) for c in itertools.product((1, 4), (1, 2), (3, 4))]\n"
        "model, state = ElasticVLM.load(Path('model.safetensors')), Measurements.open(Path('.'), 90, 40, 8)\n"
        "measure(model, draw_samples(40, 1), settings, state, 1)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL, cwd=tmp_path, env=environment)
    times, deadline = tmp_path / "total_ms.npy", time.monotonic() + 60
    while not (times.exists() and np.isfinite(np.load(times, mmap_mode="r")).sum() > 100):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = np.load(times)
    done = np.isfinite(before)
    assert 100 < done.sum() < before.size
    state = Measurements.open(tmp_path, 90, 40, 8)
    # what was in flight has no total time, so it is measured again; the rest is complete
    assert np.isfinite(state.prefill_ms[done]).all()
    assert np.isfinite(state.cpu_ms[done]).all()
    state.total_ms[tuple(np.argwhere(~done)[5:].T)] = 1.0  # leave five to do, to keep the test short
    measure(ElasticVLM.load(tmp_path / "model.safetensors"), draw_samples(40, 1), CONFIG.configurations, state, 1)
    assert state.done == before.size
    assert np.array_equal(state.total_ms[done], before[done])


def test_claims_hold(tmp_path: Path) -> None:
    claim(tmp_path / "c.json", {"a": (1, 2)})
    claim(tmp_path / "c.json", {"a": (1, 2)})
    with pytest.raises(ValueError, match=r"a: \[1, 2\] → 3"):
        claim(tmp_path / "c.json", {"a": 3})


def test_the_command_names_what_is_not_the_default() -> None:
    assert command(ElasticProfileConfig()) == "knobwise profile model=elastic out=DIR"
    assert command(replace(CONFIG, size=ElasticSize())) == (
        "knobwise profile model=elastic out=DIR elastic.samples=5 elastic.repeats=2 elastic.max_crops=[1,4] "
        "elastic.top_k=[1,2] elastic.num_active_blocks=[3,4] elastic.training.steps=2 elastic.training.batch_size=4"
    )
