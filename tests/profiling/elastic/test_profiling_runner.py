"""The profile that the elastic model gets: measured by the profiler of all models."""

import json
from functools import partial

import polars as pl
import pytest
from small_elastic import SmallElastic

from knobwise.envs.readers.long_table import read_long_table
from knobwise.experiments.command_line.profile import measure
from knobwise.experiments.settings.options import ProfileRun
from knobwise.profiling.elastic.settings import Configuration
from knobwise.profiling.measuring.settings import VLMProfileConfig

GRID = {"max_crops": (1, 4), "top_k": (1, 2), "num_active_blocks": (3, 4)}
MODEL = "small_elastic:SmallElastic"
FEW = partial(VLMProfileConfig, samples=5, repeats=3, warm_up=0, **GRID)


def measured(folder, **knobs):
    """Profile; return the table and `profile.json`."""
    folder = measure(ProfileRun(model=MODEL, out=str(folder), knobs=FEW(**knobs)))
    facts = json.loads((folder / "profile.json").read_text())
    return pl.read_parquet(folder / "table.parquet"), facts


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return measure(
        ProfileRun(model=MODEL, out=str(tmp_path_factory.mktemp("profile")), knobs=FEW())
    )


def test_the_table_has_every_sample_at_every_configuration(out):
    rows = pl.read_parquet(out / "table.parquet")
    keys = ["sample_id", *Configuration._fields, "repeat"]
    assert rows.height == rows.select(keys).unique().height == 5 * 8 * 3
    assert (rows["latency_ms"] > 0).all()
    model = SmallElastic()
    right = {item.id: item.answers[0] for item in model.questions}
    correct = [right[i] == text for i, text in rows.select("sample_id", "pred").iter_rows()]
    assert correct == rows["accuracy"].to_list()
    # what the model answers outside of the profiler too
    for row in rows.filter(repeat=0).iter_rows(named=True):
        stage = model.first_stage(model.questions.request(row["sample_id"]))
        (answer,) = model.answer([stage], {knob: row[knob] for knob in GRID})
        assert answer.text == row["pred"]
    table = read_long_table(out / "table.parquet", features=out / "features.safetensors")
    shapes = {name: tuple(block.shape) for name, block in table.features.items()}
    assert shapes == {"image_features": (5, 192), "language_features": (5, 96)}
    assert all(block.isfinite().all() for block in table.features.values())


def test_the_settings_are_those_that_measure_the_same_again(out):
    facts = json.loads((out / "profile.json").read_text())
    wanted = {"name": "elastic_scenes", "samples": 5, "max_crops": [1, 4], "warm_up": 0}
    assert facts["config"].items() >= wanted.items()
    assert facts["class"] == MODEL
    assert (facts["samples"], facts["configurations"], facts["machine"]["threads"]) == (5, 8, 1)
    assert facts["clock"]["drift"] == "left in"


def test_without_values_the_grid_of_the_built_in_profile_is_measured(tmp_path):
    others = dict.fromkeys(("max_crops", "num_active_blocks"), ())
    rows, _ = measured(tmp_path, samples=1, repeats=1, top_k=(2,), **others)
    assert len(rows) == 4 * 4
    assert set(rows["max_crops"]) == {2, 4, 8, 12}
    assert set(rows["top_k"]) == {2}
