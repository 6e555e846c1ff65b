"""Profiles of a part of the cells: interrupted, out of time, and with cells that are sure."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from commands import read_json, refused
from helpers import input_error

from knobwise.envs.readers.long_table import read_long_table
from knobwise.profiling.measuring.adaptive_model import (
    Answer,
    FirstStage,
    KeepsConfiguration,
    KnobSupport,
)
from knobwise.profiling.measuring.measuring import LOG, read_measurements
from knobwise.profiling.measuring.profiler import profile_vlm
from knobwise.profiling.measuring.questions import VQAItem
from knobwise.profiling.measuring.settings import VLMProfileConfig

ITEMS = tuple(VQAItem(f"q{n}", None, f"what is {n}", (str(n % 5),)) for n in range(30))
CONFIG = VLMProfileConfig(
    name="counts",
    values={"size": [1, 2, 3, 4], "mode": ["fast", "exact"]},
    per_sample=2,
    repeats=1,
    warm_up=0,
)
TESTED = 6
DRAWN = TESTED * 8 + (30 - TESTED) * 2


class Stop(BaseException):
    """What an interrupt raises."""


class Counting(KeepsConfiguration):
    """A model that says the last digit of a question, if it is large enough; slower when larger."""

    name = "counting"
    knobs = (
        KnobSupport("size", 4, 1, 4, "parts"),
        KnobSupport("mode", "exact", sets="how", values=("fast", "exact")),
    )
    configuration = {}

    def __init__(self, stop_after=None):
        self.asked = []
        self.stop_after = stop_after

    def first_stage(self, request, features=True):
        digit = float(request.question.split()[-1]) % 5
        return FirstStage(request, {"text": np.float32([digit])}, digit, 1.0, 1.0)

    def answer(self, stages, configuration):
        with self.set_knobs(configuration):
            return [self._answer(stage) for stage in stages]

    def _answer(self, stage):
        if len(self.asked) == self.stop_after:
            raise Stop
        size, mode = self.configuration.values()
        self.asked.append((stage.request.question, size, mode))
        right = stage.kept <= size + (mode == "exact")
        time = 10.0 * size + (mode == "exact") + stage.kept / 10
        return Answer(str(int(stage.kept)) if right else "?", time, time / 2, 0.0, 1, 1, 1)


def profile(out, config=CONFIG, model=None, **options):
    model = model or Counting()
    profile_vlm(out, model, ITEMS, config, **options)
    return model


def cells_of(out):
    table = pl.read_parquet(out / "table.parquet")
    return table.select("sample_id", "size", "mode", "sampling_probability").sort(pl.all())


def largest_of(out):
    """What `profile_vlm` is told to measure too: the largest configuration of each sample."""
    table = read_long_table(out / "table.parquet")
    cells = torch.zeros_like(table.mask)
    sizes = [float(table.configuration(c)["size"]) for c in range(table.num_configurations)]
    cells[:, int(np.argmax(sizes))] = True
    return table, cells


def test_an_interrupted_profile_goes_on_with_the_same_cells(tmp_path):
    asked = profile(tmp_path / "whole").asked
    assert len(asked) == len(set(asked)) == DRAWN
    with pytest.raises(Stop):
        profile(tmp_path / "part", model=Counting(DRAWN - 5))
    assert len(read_measurements(tmp_path / "part/state" / LOG)) == DRAWN - 5
    assert len(profile(tmp_path / "part").asked) == 5
    assert cells_of(tmp_path / "part").equals(cells_of(tmp_path / "whole"))
    # again: nothing is measured
    assert profile(tmp_path / "part", model=Counting(0)).asked == []
    # the readers do not take what is said of the draw for a knob
    read = read_long_table(tmp_path / "whole/table.parquet")
    assert {knob.name for knob in read.knobs} == {"size", "mode"}


def test_time_runs_out(tmp_path, capsys):
    seconds = iter(range(10_000))
    # a second for each look at the clock: before all that was drawn is measured
    early = replace(CONFIG, max_hours=10 / 3600)
    with input_error("knobs.max_hours"):
        profile(tmp_path, early, clock_s=lambda: next(seconds))
    assert len(read_measurements(tmp_path / "state" / LOG)) == 9
    assert not (tmp_path / "profile.json").exists()
    hours = replace(CONFIG, max_hours=(DRAWN + 10) / 3600)
    model = profile(tmp_path, hours, clock_s=lambda: next(seconds))
    assert len(model.asked) == DRAWN - 9
    assert "is reached" not in capsys.readouterr().out
    # and among the cells that are sure
    hours = replace(CONFIG, max_hours=10 / 3600)
    model = profile(
        tmp_path, hours, needed=lambda: largest_of(tmp_path), clock_s=lambda: next(seconds)
    )
    assert len(model.asked) == 9
    assert f"{DRAWN + 9} of" in capsys.readouterr().out
    cells = cells_of(tmp_path)
    assert len(cells) == DRAWN + 9
    # the same command goes on
    profile(tmp_path, replace(CONFIG, max_hours=0))
    sure = cells_of(tmp_path).filter(size=4, mode="exact")
    assert len(sure) == len(ITEMS)


def test_samples_to_test_on_can_be_measured_in_part(tmp_path):
    profile(tmp_path, replace(CONFIG, whole_test=False))
    table = pl.read_parquet(tmp_path / "table.parquet")
    assert table.group_by("sample_id").len()["len"].unique().item() == 2
    tested = table.filter(split="test")
    assert (tested["sampling_probability"] < 1).all()
    assert read_json(tmp_path / "profile.json")["measured"]["whole"] is None


@pytest.mark.parametrize(
    "values",
    [
        {"size": [1, 2, 3, 4], "mode": [False, True]},
        {"size": [1, 2.5, 3, 4], "mode": ["7", "No"]},
    ],
)
def test_configurations_are_told_apart_whatever_their_values(tmp_path, values):
    model = Counting()
    model.knobs = tuple(
        KnobSupport(name, given[-1], sets="how", values=tuple(given))
        for name, given in values.items()
    )
    config = replace(CONFIG, values=values)
    profile(tmp_path, config, model)
    drawn = {*model.asked}
    profile(tmp_path, config, model, needed=lambda: largest_of(tmp_path))
    added = [asked for asked in model.asked if asked not in drawn]
    assert added
    assert len({(size, mode) for _, size, mode in added}) == 1
    assert {size for _, size, _ in added} == {4}


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("knobs.per_sample=1 knobs.whole_test=false", "knobs.whole_test"),
        ("knobs.per_sample=2 knobs.max_hours=-1", "knobs.max_hours"),
        ("knobs.per_sample=2 knobs.max_hours=nan", "knobs.max_hours"),
    ],
)
def test_mistakes_are_refused(words, field, capsys, home):
    words = f"profile model=elastic out=p knobs.samples=9 {words}"
    assert field in refused(words.split(), capsys)
