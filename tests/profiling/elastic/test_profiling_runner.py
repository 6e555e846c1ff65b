"""The profile that the elastic model gets: measured by the profiler of all models."""

import json
import shutil
from functools import partial

import polars as pl
import pytest
import torch

from knobwise.envs.readers.exp_files import read_exp5_exp6
from knobwise.envs.readers.long_table import read_long_table
from knobwise.experiments.command_line.profile import measure
from knobwise.experiments.settings.options import ProfileRun
from knobwise.profiling.elastic.adapter import ElasticAdaptive
from knobwise.profiling.elastic.settings import Configuration, ElasticSize
from knobwise.profiling.measuring.settings import VLMProfileConfig

GRID = {"max_crops": (1, 4), "top_k": (1, 2), "num_active_blocks": (3, 4)}
FEW = partial(VLMProfileConfig, samples=5, repeats=3, warm_up=0, **GRID)


@pytest.mark.parametrize("wrong", [{"width": 10, "heads": 4}, {"blocks": 1}, {"max_top_k": 9}])
def test_impossible_sizes_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ElasticSize(**wrong)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return measure(ProfileRun(out=str(tmp_path_factory.mktemp("profile")), knobs=FEW()))


def test_the_table_has_every_sample_at_every_configuration_and_can_be_read_in_every_form(out):
    rows = pl.read_parquet(out / "table.parquet")
    keys = ["sample_id", *Configuration._fields, "repeat"]
    assert rows.height == rows.select(keys).unique().height == 5 * 8 * 3
    assert set(rows["accuracy"]) <= {0.0, 1.0}
    assert (rows["latency_ms"] > 0).all()
    right = {item.id: item.answers[0] for item in ElasticAdaptive().questions}
    assert [right[i] == text for i, text in rows.select("sample_id", "pred").iter_rows()] == rows[
        "accuracy"
    ].to_list()
    table = read_long_table(out / "table.parquet", features=out / "features.safetensors")
    again = read_exp5_exp6(out / "exp5", out / "exp6", "elastic_scenes")
    assert [knob.name for knob in table.knobs] == list(Configuration._fields)
    assert table.sample_ids == again.sample_ids
    assert torch.equal(table.accuracy, again.accuracy)
    assert torch.equal(table.repeats_ms, again.repeats_ms)
    assert {name: block.shape for name, block in table.features.items()} == {
        "image_features": (5, 192),
        "language_features": (5, 96),
    }
    assert all(block.isfinite().all() for block in table.features.values())


def test_the_command_measures_the_same_again(out):
    about = json.loads((out / "profile.json").read_text())
    assert about["command"] == (
        "knobwise profile model=elastic out=DIR knobs.name=elastic_scenes knobs.samples=5 "
        "knobs.max_crops=[1,4] "
        "knobs.top_k=[1,2] knobs.num_active_blocks=[3,4] knobs.warm_up=0"
    )
    assert (about["samples"], about["configurations"], about["machine"]["threads"]) == (5, 8, 1)
    assert about["clock"]["drift"] == "left in"


def test_drift_is_divided_out_of_every_time(out, tmp_path):
    """From a log of equal times, in which the machine was slower by 1.5 in the second half."""
    drifted = shutil.copytree(out, tmp_path / "drifted")
    log = drifted / "state" / "measured-0.jsonl"
    rows = pl.read_ndjson(log)
    slower = pl.when(pl.int_range(pl.len()) < 60).then(1.0).otherwise(1.5)
    times = {"total_ms": 4.0, "extra.cpu_ms": 4.0, "prefill_ms": 2.0, "vision_ms": 1.0}
    rows.with_columns(slower.mul(ms).alias(name) for name, ms in times.items()).write_ndjson(log)
    measure(ProfileRun(out=str(drifted), knobs=FEW()))
    before = pl.read_parquet(drifted / "table.parquet")
    about = measure(ProfileRun(out=str(drifted), knobs=FEW(detrend=True))) / "profile.json"
    steady = pl.read_parquet(drifted / "table.parquet")
    assert (
        json.loads(about.read_text())["clock"]["drift"]
        == "divided out, by the running median of 51"
    )
    assert steady.drop(pl.selectors.ends_with("_ms")).equals(
        before.drop(pl.selectors.ends_with("_ms"))
    )
    change = steady["latency_ms"] / before["latency_ms"]
    assert change.quantile(0.75) / change.quantile(0.25) == pytest.approx(1.5)
    assert steady["latency_ms"].quantile(0.25) == pytest.approx(steady["latency_ms"].quantile(0.75))
    assert (steady["cpu_ms"] / before["cpu_ms"] / change - 1).abs().max() < 0.01


def test_without_values_the_grid_of_the_built_in_profile_is_measured(tmp_path):
    knobs = VLMProfileConfig(samples=1, repeats=1, warm_up=0, top_k=(2,))
    rows = pl.read_parquet(measure(ProfileRun(out=str(tmp_path), knobs=knobs)) / "table.parquet")
    assert rows.height == 4 * 4
    assert set(rows["max_crops"]) == {2, 4, 8, 12}
    assert set(rows["top_k"]) == {2}


def test_cpu_time_can_be_the_latency(tmp_path):
    knobs = FEW(repeats=1, clock="cpu")
    table = pl.read_parquet(measure(ProfileRun(out=str(tmp_path), knobs=knobs)) / "table.parquet")
    assert (table["latency_ms"] / table["cpu_ms"] - 1).abs().median() < 0.05
    assert json.loads((tmp_path / "profile.json").read_text())["clock"]["latency_ms"].startswith(
        "thread CPU"
    )
