"""Profiles that are measured in rounds: chosen, noted, interrupted, and out of time."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from commands import read_json, refused
from helpers import input_error

from knobwise.agents.evaluation.informative_cells import outlook_of
from knobwise.envs.readers.long_table import read_long_table
from knobwise.profiling.measuring.adaptive_model import (
    Answer,
    FirstStage,
    KeepsConfiguration,
    KnobSupport,
)
from knobwise.profiling.measuring.cell_design import Outlook
from knobwise.profiling.measuring.measuring import LOG, read_measurements
from knobwise.profiling.measuring.profiler import profile_vlm
from knobwise.profiling.measuring.questions import VQAItem
from knobwise.profiling.measuring.settings import VLMProfileConfig

ITEMS = tuple(VQAItem(f"q{n}", None, f"what is {n}", (str(n % 5),)) for n in range(30))
CONFIG = VLMProfileConfig(
    name="counts",
    values={"size": [1, 2, 3, 4], "mode": ["fast", "exact"]},
    per_sample=2,
    rounds=3,
    repeats=1,
    warm_up=0,
)
TESTED = 6
FIRST = TESTED * 8 + (30 - TESTED) * 2


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


class Together(Counting):
    """It answers all configurations from one stage."""

    def answer_all(self, stage, configurations):
        return [self.answer([stage], each)[0] for each in configurations]


def by_size(table):
    """Choose large configurations; the gain grows and grows."""
    score = table.configurations.double().sum(1).expand(table.accuracy.shape).clone()
    score[table.split().test] = -torch.inf
    latency_ms = table.latency_ms.double().nanmean(0).expand_as(score)
    return Outlook(score, latency_ms, float(table.mask.sum()))


def profile(out, config=CONFIG, model=None, **options):
    model = model or Counting()
    profile_vlm(out, model, ITEMS, config, **{"choose": by_size, **options})
    return model


def cells_of(out):
    table = pl.read_parquet(out / "table.parquet")
    return table.select("sample_id", "size", "mode", "sampling_probability", "measured_round").sort(
        pl.all()
    )


@pytest.mark.parametrize("model", [Counting, Together])
def test_each_round_takes_as_long_as_the_first_and_is_reported(tmp_path, model):
    asked = profile(tmp_path, model=model()).asked
    assert len(asked) == len(set(asked))
    table = pl.read_parquet(tmp_path / "table.parquet")
    facts = read_json(tmp_path / "profile.json")["measured"]
    assert facts["per_sample"] == 2
    assert facts["whole"] == "test"
    assert facts["rounds"][0]["cells"] == FIRST
    assert facts["ended"] == "knobs.rounds are done"
    for number, each in enumerate(facts["rounds"], 1):
        mine = table.filter(measured_round=number)
        drawn = mine.filter(pl.col("sampling_probability") < 1)
        assert (len(mine), len(drawn)) == (each["cells"], each["at_random"])
        assert drawn["sampling_probability"].unique().to_list() == [each["probability"]]
        np.testing.assert_allclose(mine["latency_ms"].sum() / 1e3, each["seconds"], atol=0.06)
    # with the stages, 1 ms each, or 1 ms for a sample
    first = table.filter(pl.col("measured_round") == 1, pl.col("split") != "test")
    second = table.filter(measured_round=2)
    spent = []
    for part in (first, second):
        stages = len(part) if model is Counting else part["sample_id"].n_unique()
        spent.append(part["latency_ms"].sum() + stages)
    assert 0.85 * spent[0] < spent[1] < 1.1 * spent[0]
    # samples to test on were whole from the first, and the readers see neither column as a knob
    assert set(table.filter(split="test")["measured_round"]) == {1}
    read = read_long_table(tmp_path / "table.parquet")
    assert {knob.name for knob in read.knobs} == {"size", "mode"}
    # large ones were chosen
    chosen = table.filter(pl.col("measured_round") > 1, pl.col("sampling_probability") == 1)
    assert chosen["size"].mean() > 3.3


def test_an_interrupted_round_goes_on_with_the_same_cells(tmp_path):
    profile(tmp_path / "whole")
    with pytest.raises(Stop):
        profile(tmp_path / "part", model=Counting(FIRST + 5))
    log = read_measurements(tmp_path / "part/state" / LOG)
    assert len(log) == FIRST + 5
    # the profile of the first round is there
    assert len(pl.read_parquet(tmp_path / "part/table.parquet")) == FIRST

    def refuse(table):
        assert (table.mask.sum() > FIRST + 5).item()
        return by_size(table)

    profile(tmp_path / "part", choose=refuse)
    assert cells_of(tmp_path / "part").equals(cells_of(tmp_path / "whole"))
    whole = read_json(tmp_path / "whole/profile.json")
    part = read_json(tmp_path / "part/profile.json")
    assert part["measured"] == whole["measured"]
    # again: nothing is measured
    assert profile(tmp_path / "part", model=Counting(0)).asked == []
    # a round more keeps those that were
    profile(tmp_path / "part", replace(CONFIG, rounds=4))
    longer = cells_of(tmp_path / "part").filter(pl.col("measured_round") < 4)
    assert longer.equals(cells_of(tmp_path / "whole"))
    # with other samples the rounds would be others
    with input_error("state/rounds.json"):
        profile(tmp_path / "part", replace(CONFIG, per_sample=3))


def test_it_ends_when_the_estimated_gain_stops_growing(tmp_path):
    gains = iter((0.1, 0.2, 0.2, 0.5))
    many = replace(CONFIG, rounds=9)
    profile(tmp_path, many, choose=lambda table: by_size(table)._replace(gain=next(gains)))
    facts = read_json(tmp_path / "profile.json")["measured"]
    assert [each["gain"] for each in facts["rounds"]] == [0.1, 0.2, 0.2]
    assert "gain" in facts["ended"]
    # or when nothing is left
    profile(tmp_path / "all", replace(CONFIG, rounds=99))
    assert (read_long_table(tmp_path / "all/table.parquet").mask).all()


def test_time_runs_out_inside_a_round(tmp_path):
    seconds = iter(range(10_000))
    # a second for each look at the clock: in the first round, and in the second
    early = replace(CONFIG, max_hours=10 / 3600)
    with input_error("knobs.max_hours"):
        profile(tmp_path, early, clock_s=lambda: next(seconds))
    assert len(read_measurements(tmp_path / "state" / LOG)) == 9
    assert not (tmp_path / "profile.json").exists()
    hours = replace(CONFIG, max_hours=(FIRST + 10) / 3600)
    model = profile(tmp_path, hours, clock_s=lambda: next(seconds))
    assert FIRST < len(model.asked) + 9 < FIRST + 20
    facts = read_json(tmp_path / "profile.json")["measured"]
    assert len(facts["rounds"]) == 2
    assert "max_hours" in facts["ended"]
    cells = cells_of(tmp_path)
    assert len(cells) == len(model.asked) + 9
    # fewer were drawn than if it had been complete
    drawn = cells.filter(pl.col("measured_round") == 2, pl.col("sampling_probability") < 1)
    profile(tmp_path, replace(CONFIG, max_hours=0))
    profile(tmp_path / "other")
    whole = cells_of(tmp_path)
    assert whole.equals(cells_of(tmp_path / "other"))
    all_drawn = whole.filter(pl.col("measured_round") == 2, pl.col("sampling_probability") < 1)
    share = len(drawn) / len(all_drawn)
    np.testing.assert_allclose(
        drawn["sampling_probability"], all_drawn["sampling_probability"][0] * share
    )


def test_samples_to_test_on_can_be_measured_in_part(tmp_path):
    profile(tmp_path, replace(CONFIG, whole_test=False))
    table = pl.read_parquet(tmp_path / "table.parquet")
    assert table.filter(measured_round=1).group_by("sample_id").len()["len"].unique().item() == 2
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
    profile(tmp_path, replace(CONFIG, values=values), model)
    table = pl.read_parquet(tmp_path / "table.parquet")
    chosen = table.filter(pl.col("measured_round") > 1, pl.col("sampling_probability") == 1)
    assert chosen["size"].mean() > 3.3


def test_the_rounds_of_the_command_line(tmp_path):
    """With what it chooses by."""
    profile(tmp_path, choose=outlook_of)
    facts = read_json(tmp_path / "profile.json")["measured"]
    assert 2 <= len(facts["rounds"]) <= 3
    assert (pl.read_parquet(tmp_path / "table.parquet")["measured_round"] > 1).any()


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("knobs.rounds=0 knobs.per_sample=2", "knobs.rounds"),
        ("knobs.rounds=2", "knobs.rounds"),
        ("knobs.per_sample=1 knobs.whole_test=false", "knobs.whole_test"),
        ("knobs.rounds=2 knobs.per_sample=2 knobs.max_hours=-1", "knobs.max_hours"),
        ("knobs.rounds=2 knobs.per_sample=2 knobs.max_hours=nan", "knobs.max_hours"),
    ],
)
def test_mistakes_are_refused(words, field, capsys, home):
    words = f"profile model=elastic out=p knobs.samples=9 {words}"
    assert field in refused(words.split(), capsys)
