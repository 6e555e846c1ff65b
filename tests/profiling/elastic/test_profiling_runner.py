"""The profile that the elastic model gets."""

import hashlib
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch

from knobwise.envs.readers.exp_files import read_exp5_exp6
from knobwise.envs.readers.long_table import read_long_table
from knobwise.profiling.elastic import profile
from knobwise.profiling.elastic.model import ElasticVLM
from knobwise.profiling.elastic.profile import DATASET, command, profile_elastic
from knobwise.profiling.elastic.settings import Configuration, ElasticProfileConfig, ElasticSize
from knobwise.profiling.measuring.measuring import read_logs

CONFIG = ElasticProfileConfig(samples=5, repeats=2, max_crops=(1, 4), top_k=(1, 2), num_active_blocks=(3, 4))


@pytest.mark.parametrize("wrong", [{"width": 10, "heads": 4}, {"blocks": 1}, {"max_top_k": 9}])
def test_impossible_sizes_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ElasticSize(**wrong)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return profile_elastic(tmp_path_factory.mktemp("profile"), CONFIG)


def test_the_table_has_every_sample_at_every_configuration(out):
    table = pl.read_parquet(out / "table.parquet")
    keys = ["sample_id", *Configuration._fields, "repeat"]
    assert table.height == table.select(keys).unique().height == 5 * 8 * 2
    log = read_logs(out / "state").sort(pl.col("sample_id").cast(pl.Int32), *keys[1:])
    assert table["latency_ms"].to_list() == pytest.approx(log["total_ms"].to_list(), rel=6e-4)  # 4 digits
    assert set(table["accuracy"]) <= {0.0, 1.0}
    assert (table["soft_score"] >= table["accuracy"]).all()
    first = table.filter(repeat=0)  # which has the medians of the other times; the other rows have none
    assert table.drop_nulls().equals(first)
    assert table.filter(repeat=1).select("cpu_ms", "prefill_ms").null_count().row(0) == (40, 40)
    medians = log.group_by(keys[:-1], maintain_order=True).agg(pl.median("extra.cpu_ms", "prefill_ms"))
    assert first["cpu_ms"].to_list() == pytest.approx(medians["extra.cpu_ms"].to_list(), rel=6e-4)
    assert first["prefill_ms"].to_list() == pytest.approx(medians["prefill_ms"].to_list(), rel=6e-4)
    assert (table["latency_ms"] > 0).all()


def test_the_exp_files_hold_the_same_profile_and_every_sample_has_features(out):
    table = read_long_table(out / "table.parquet", features=out / "features.npz")
    again = read_exp5_exp6(out / "exp5", out / "exp6", DATASET)
    assert [knob.name for knob in table.knobs] == list(Configuration._fields)
    assert table.sample_ids == again.sample_ids
    assert torch.equal(table.accuracy, again.accuracy)
    assert torch.equal(table.repeats_ms, again.repeats_ms)
    assert table.num_repeats == 2
    with np.load(out / "features.npz", allow_pickle=False) as features:
        assert features["sample_id"].tolist() == list(range(5))
        assert (features["image_features"].shape, features["language_features"].shape) == ((5, 192), (5, 96))
        assert all(np.isfinite(features[name]).all() for name in features.files)


def test_the_description_fits_the_files(out):
    about = json.loads((out / "profile.json").read_text())
    for name, digest in about["sha256"].items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    assert (about["samples"], about["configurations"], about["torch"]["threads"]) == (5, 8, 1)
    assert not [p for p in out.rglob("*") if p.name.startswith(".") or p.suffix == ".partial"]
    with pytest.raises(ValueError, match="samples: 5 → 6"):  # another run in the same folder
        profile_elastic(out, replace(CONFIG, samples=6))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"top_k": (1, 5)}, "top_k=5: this model takes 1 to 4"),
        ({"num_active_blocks": (1,)}, "num_active_blocks=1: this model takes 2 to 6"),
        ({"max_crops": ()}, "max_crops needs at least one value"),
        ({"top_k": (1, 1)}, "no value twice"),
        ({"clock": "sun"}, "must be one of wall, cpu"),
        ({"samples": 0}, "elastic.samples=0: must be at least 1"),
    ],
)
def test_impossible_settings_are_refused_before_anything_is_written(tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        profile_elastic(tmp_path / "out", replace(CONFIG, **wrong))
    assert not (tmp_path / "out").exists()


def test_an_interrupted_measurement_resumes_and_measures_nothing_twice(out, tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "_WARM_UP_ROUNDS", 0)
    runs, generate = [], ElasticVLM.generate
    config = replace(CONFIG, exp_json=False)

    def counted(self, image, prompt, configuration, overview):
        if len(runs) == 20:
            runs.append(None)
            raise KeyboardInterrupt
        runs.append((prompt.tolist(), image.shape, configuration))
        return generate(self, image, prompt, configuration, overview)

    monkeypatch.setattr(ElasticVLM, "generate", counted)
    with pytest.raises(KeyboardInterrupt):
        profile_elastic(tmp_path, config)
    log = tmp_path / "state" / "measured-0.jsonl"
    measured = log.read_bytes()
    assert measured.count(b"\n") == 20
    profile_elastic(tmp_path, config)
    assert log.read_bytes().startswith(measured)
    assert log.read_bytes().count(b"\n") == 2 * 5 * 8 == len(runs) - 1
    assert set(Counter(str(run) for run in runs if run).values()) == {2}  # the two repeats
    profile_elastic(tmp_path, config)
    assert len(runs) == 2 * 5 * 8 + 1


def test_cpu_time_can_be_the_latency(out, tmp_path):
    config = replace(CONFIG, exp_json=False, repeats=1, clock="cpu")
    table = pl.read_parquet(profile_elastic(tmp_path, config) / "table.parquet")
    assert (table["latency_ms"] / table["cpu_ms"] - 1).abs().median() < 0.05
    assert json.loads((tmp_path / "profile.json").read_text())["clock"]["latency_ms"].startswith("thread CPU")
    with pytest.raises(ValueError, match="clock: cpu → None"):
        profile_elastic(tmp_path, replace(config, clock="wall"))


def test_the_command_names_what_is_not_the_default():
    assert command(ElasticProfileConfig()) == "knobwise profile model=elastic out=DIR"
    assert command(CONFIG) == (
        "knobwise profile model=elastic out=DIR elastic.samples=5 elastic.repeats=2 elastic.max_crops=[1,4] "
        "elastic.top_k=[1,2] elastic.num_active_blocks=[3,4]"
    )
