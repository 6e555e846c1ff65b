"""Profiles of the elastic model by the profiler of all models."""

from functools import partial

import polars as pl
import pytest
from commands import read_json
from small_elastic import SmallElastic

from knobwise.envs.readers.long_table import read_long_table
from knobwise.experiments.command_line.profile import measure_profile
from knobwise.experiments.settings.measuring_options import ProfileRun
from knobwise.profiling.measuring.settings import VLMProfileConfig
from knobwise.testbeds.elastic.settings import Configuration

GRID = {"max_crops": (1, 4), "top_k": (1, 2), "num_active_blocks": (3, 4)}
MODEL = "small_elastic:SmallElastic"
FEW = partial(VLMProfileConfig, samples=5, repeats=3, warm_up=0, **GRID)


def measured(folder, **knobs):
    return measure_profile(ProfileRun(model=MODEL, out=str(folder), knobs=FEW(**knobs)))


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("profile"))


def test_the_table_has_every_sample_at_every_configuration(out):
    rows = pl.read_parquet(out / "table.parquet")
    keys = ["sample_id", *Configuration._fields, "repeat"]
    assert len(rows) == rows.select(keys).n_unique() == 5 * 8 * 3
    assert (rows["latency_ms"] > 0).all()
    model = SmallElastic()
    for row in rows.iter_rows(named=True):
        item = model.questions.item(row["sample_id"])
        assert row["accuracy"] == (row["pred"] == item.answer)
        # what the model answers outside of the profiler too
        stage = model.first_stage(model.questions.request(item.id))
        (answer,) = model.answer([stage], {knob: row[knob] for knob in GRID})
        assert answer.text == row["pred"]
    table = read_long_table(out / "table.parquet", features=out / "features.safetensors")
    for name, width in {"image_features": 192, "language_features": 96}.items():
        assert table.features[name].isfinite().sum() == 5 * width


def test_the_settings_are_those_that_measure_the_same_again(out):
    facts = read_json(out / "profile.json")
    wanted = {"name": "elastic_scenes", "samples": 5, "max_crops": [1, 4], "warm_up": 0}
    assert facts["config"].items() >= wanted.items()
    assert facts.items() >= {"class": MODEL, "samples": 5, "configurations": 8}.items()
    assert facts["machine"]["threads"] == 1
    assert facts["clock"]["drift"] == "left in"


def test_without_values_the_grid_of_the_built_in_profile_is_measured(tmp_path):
    others = dict.fromkeys(("max_crops", "num_active_blocks"), ())
    out = measured(tmp_path, samples=1, repeats=1, top_k=(2,), **others)
    rows = pl.read_parquet(out / "table.parquet")
    assert len(rows) == 4 * 4
    assert set(rows["max_crops"]) == {2, 4, 8, 12}
    assert set(rows["top_k"]) == {2}
