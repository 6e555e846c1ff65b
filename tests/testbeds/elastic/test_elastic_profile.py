"""Profiles of the elastic model: the recipe of the built-in one, which divides out drift of the
machine, and the profiler of all models."""

from functools import partial

import numpy as np
import polars as pl
import pytest
from commands import read_json
from small_elastic import SmallElastic

from knobwise.envs.readers.long_table import read_long_table
from knobwise.experiments.command_line.profile import measure
from knobwise.experiments.settings.options import ProfileRun
from knobwise.profiling.measuring.settings import VLMProfileConfig
from knobwise.testbeds.elastic import profile
from knobwise.testbeds.elastic.model import ElasticVLM
from knobwise.testbeds.elastic.scenes import SEED, draw_sample
from knobwise.testbeds.elastic.settings import Configuration, ElasticSize


def log_of(level):
    """Measurements in random order, of cells with known times, by a machine with this speed."""
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(480) for _ in range(3)])
    cells = zip(profile.MEASURED, np.unravel_index(order, (60, 2, 2, 2)), strict=True)
    true = 10.0 * np.exp(rng.normal(0, 0.4, 480))[order]
    jitter = np.exp(rng.normal(0, 0.01, len(order)))
    # what the reference shows comes and goes with every measurement
    speed = rng.normal(0, 0.2, len(order))
    total = true * jitter * np.exp(speed + level(np.linspace(0, 1, len(order))))
    reference = 4.0 * np.exp(speed / 0.9 + rng.normal(0, 0.01, len(order)))
    times = {"total_ms": total, "prefill_ms": total / 2, profile.REFERENCE: reference}
    return pl.DataFrame(dict(cells) | times | {"true": true})


@pytest.mark.parametrize(
    "level",
    [
        lambda t: 0 * t,
        lambda t: 0.3 * np.sin(9 * t),  # slow swings
        lambda t: np.log(2) * (t > 0.45),  # another machine for more than half of the time
    ],
)
def test_drift_is_divided_out(level):
    steady = profile.without_drift(log_of(level))
    ratio = (steady["total_ms"] / steady["true"]).log()
    assert ratio.std() < 0.025
    # prefill follows
    np.testing.assert_allclose(steady["prefill_ms"], steady["total_ms"] / 2)
    assert abs(ratio.median() - np.median(level(np.linspace(0, 1, 1001)))) < 0.25


def test_the_command_writes_what_the_readers_read(tmp_path, monkeypatch, capsys):
    size = ElasticSize(width=16, heads=2, experts=4, expert_width=8, stride=4)
    tiny = profile.TimedElastic(ElasticVLM(size).eval(), "tiny")
    tiny.measured = {"max_crops": (2, 4), "top_k": (1,), "num_active_blocks": (3, 6)}
    monkeypatch.setattr(profile, "TimedElastic", lambda: tiny)
    monkeypatch.setattr(profile.ElasticRequests, "length", 3)
    monkeypatch.setattr("sys.argv", ["profile", "--out", str(tmp_path)])
    profile.main()
    folder = tmp_path / "builtin"
    assert str(folder) in capsys.readouterr().out
    table = read_long_table(folder / "table.parquet", features=folder / "features.npz")
    assert table.accuracy.shape == (3, 4)
    assert set(table.features) == {"image_features", "language_features"}
    facts = read_json(folder / "profile.json")
    assert facts["features_ms"] > 0
    assert (facts["samples"], facts["configurations"]) == (3, 4)
    samples = pl.read_parquet(folder / "samples.parquet")
    scenes = [draw_sample(i, SEED) for i in range(3)]
    assert samples["question"].to_list() == [scene.question for scene in scenes]


# -- by the profiler of all models -------------------------------------------------------------------

GRID = {"max_crops": (1, 4), "top_k": (1, 2), "num_active_blocks": (3, 4)}
MODEL = "small_elastic:SmallElastic"
FEW = partial(VLMProfileConfig, samples=5, repeats=3, warm_up=0, **GRID)


def measured(folder, **knobs):
    return measure(ProfileRun(model=MODEL, out=str(folder), knobs=FEW(**knobs)))


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
