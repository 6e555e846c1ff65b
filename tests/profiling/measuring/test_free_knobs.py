"""Knobs of any name, measured by either clock and served by a controller; which configurations of a
grid are taken."""

import functools
import itertools
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from commands import read_json
from helpers import input_error
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed import Clock, timed_by
from test_vlm_runner import Blurred

from knobwise.agents.deployed.budgets import RequestBudgets
from knobwise.agents.deployed.limits import Limits
from knobwise.envs.readers.long_table import read_long_table
from knobwise.profiling.design.grid_sampling import sample_grid
from knobwise.profiling.measuring.adaptive_model import (
    CLOCKS,
    Answer,
    KnobSupport,
    Request,
    clock_ms,
    clocked_by,
)
from knobwise.profiling.measuring.profiler import profile_vlm
from knobwise.profiling.measuring.questions import VQAItem
from knobwise.profiling.measuring.settings import VLMProfileConfig
from knobwise.serving.adaptive_model import AdaptiveModel

ITEMS = [VQAItem(f"id{n}", n * np.eye(4), "How bright?", (str(n),)) for n in (1, 2, 3)]
KNOBS = {"side": (1, 4), "mode": ("fast", "exact"), "share": (0.5, 1)}
CONFIG = VLMProfileConfig(name="bright", values=KNOBS, repeats=1, warm_up=0)


class Bright(Blurred):
    """Says how bright the corner of an array is; by `spend` an answer with `exact` takes longer."""

    name = "bright"
    knobs = (
        KnobSupport("side", 4, 1, 4, "pixels of a side"),
        KnobSupport("mode", "exact", values=("fast", "exact")),
        KnobSupport("share", 1.0, values=(0.5, 1.0)),
    )

    def __init__(self, spend=None, clock=clock_ms):
        super().__init__()
        self.spend, self.clock = spend, clock

    def _answer(self, request, seen_ms):
        start = self.clock()
        side, mode, _ = self.configuration.values()
        if mode == "exact" and self.spend:
            self.spend()
        took = self.clock() - start
        text = str(int(request.image[0, 0])) if (side, mode) == (4, "exact") else "0"
        return Answer(text, took, took, took, 1, 1, 1)


wall, cpu = Clock(), Clock()


def sleep():
    wall.go_on(0.004)


def spin():
    wall.go_on(0.004)
    cpu.go_on(0.004)


@pytest.fixture(scope="module", autouse=True)
def _clocks():
    """Clocks on which nothing but the model counts."""
    with pytest.MonkeyPatch.context() as patch:
        for name, clock in (("wall", wall), ("cpu", cpu)):
            patch.setitem(CLOCKS, name, functools.partial(_ns, clock))
        yield


def _ns(clock):
    return round(clock() * 1e9)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return profile_vlm(tmp_path_factory.mktemp("free"), Bright(), ITEMS, CONFIG)


def test_knobs_of_any_name_are_columns_of_the_table(out, capsys):
    frame = pl.read_parquet(out / "table.parquet")
    assert len(frame) == frame.select("sample_id", *KNOBS).n_unique() == 3 * 8
    assert set(frame.filter(mode="exact", side=4)["accuracy"]) == {1}
    table = read_long_table(out / "table.parquet", features=out / "features.safetensors")
    assert {knob.name: knob.values for knob in table.knobs} == KNOBS | {"mode": ("exact", "fast")}
    report = read_json(out / "profile.json")["knobs"]
    assert {knob["name"]: tuple(knob["measured"]) for knob in report} == KNOBS
    profile_vlm(out, Bright(), ITEMS, CONFIG)
    assert "no exp5/exp6 files" in capsys.readouterr().out
    assert not (out / "exp5").exists()
    with input_error("clock"):
        profile_vlm(out, Bright(), ITEMS, replace(CONFIG, clock="cpu"))


def test_knobs_with_listed_values_are_measured_at_all_of_them(tmp_path, capsys):
    folder = profile_vlm(tmp_path, Bright(), ITEMS, replace(CONFIG, values={}))
    first, *_ = capsys.readouterr().out.splitlines()
    frame = pl.read_parquet(folder / "table.parquet")
    # `side` is a range, of which only the default is known
    settings = {*frame.select("side", "mode", "share").iter_rows()}
    assert settings == {(4, mode, share) for mode in ("fast", "exact") for share in (0.5, 1.0)}
    assert len(frame) == 3 * 4
    said = "4 configurations of 3 samples, once each: side=4 alone (knobs.values={side: […]} for"
    assert said in first
    assert "mode=fast, exact; share=0.5, 1.0" in first


def test_the_first_line_says_which_part_of_a_grid_is_measured(tmp_path, capsys):
    config = replace(CONFIG, values={"side": (1, 2, 3), "mode": ("fast",)}, count=4, repeats=2)
    profile_vlm(tmp_path, Bright(), ITEMS, config)
    assert "4 of 6 configurations of 3 samples, 2 times each" in capsys.readouterr().out


class Odd(Bright):
    """A profile has columns of that name already."""

    knobs = (KnobSupport("dataset", 1, 1, 2),)


class Cached(Bright):
    """May take what it knows already, and how much, or everything."""

    knobs = (KnobSupport("cache", False, values=(False, True, 8, "all")),)

    def _answer(self, request, seen_ms):
        assert self.configuration["cache"] in (False, True)
        return Answer("1", 0.0, 0.0, 0.0, 1, 1, 1)


def test_true_and_false_are_measured_and_read_as_such(tmp_path):
    config = replace(CONFIG, values={"cache": [True, False]})
    table = read_long_table(profile_vlm(tmp_path, Cached(), ITEMS, config) / "table.parquet")
    assert [*map(repr, table.knobs[0].values)] == ["False", "True"]


@pytest.mark.parametrize(
    ("model", "changes", "named"),
    [
        (Bright(), {"values": {"size": [1]}}, "size"),
        (Bright(), {"values": {"mode": ["slow"]}}, "mode"),
        (Bright(), {"values": {"side": [5]}}, "side"),
        (Bright(), {"values": {"side": [1.5]}}, "side"),
        (Bright(), {"values": {"side": 4}}, "side"),
        # a column has one type
        (Cached(), {"values": {"cache": [True, 8]}}, "cache"),
        (Cached(), {"values": {"cache": [True, "all"]}}, "cache"),
        (Cached(), {"values": {"cache": ["true", "false"]}}, "quotes"),
        (Odd(), {"values": {}}, "dataset"),
        (Bright(), {"values": {}, "top_k": (1,)}, "top_k"),
        (Bright(), {"values": {"top_k": [2]}, "top_k": (1,)}, "top_k"),
        # a clock of its own
        (Bright(sleep, lambda: wall() * 1e3), {"clock": "cpu"}, "clock_ms"),
    ],
)
def test_knobs_values_and_clocks_that_are_refused_are_named(tmp_path, model, changes, named):
    with input_error(named):
        profile_vlm(tmp_path / "out", model, ITEMS, replace(CONFIG, **changes))
    assert "clock" in changes or not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("spend", "clock", "counted"),
    [(sleep, "wall", True), (sleep, "cpu", False), (spin, "cpu", True)],
)
def test_the_wall_clock_counts_sleep_and_the_cpu_clock_does_not(tmp_path, spend, clock, counted):
    config = replace(CONFIG, values={"mode": ["exact"]}, clock=clock, repeats=2)
    profile_vlm(tmp_path, Bright(spend), ITEMS, config)
    latency = pl.read_parquet(tmp_path / "table.parquet")["latency_ms"]
    assert latency.to_list() == pytest.approx([4.0 * counted] * len(latency), abs=0.1)
    assert read_json(tmp_path / "profile.json")["clock"]["latency_ms"].startswith(clock)


def test_clocks_are_nested_and_restored():
    start = clock_ms()
    with clocked_by("cpu"):
        before = clock_ms()
        with clocked_by("wall"):
            seen = clock_ms()
            sleep()
            assert clock_ms() - seen == pytest.approx(4, abs=0.1)
        assert clock_ms() - before < 0.1
        spin()
        assert clock_ms() - before == pytest.approx(4, abs=0.1)
    # outside, it is the true one
    assert clock_ms() >= start
    for wrong in (clocked_by, lambda clock: VLMProfileConfig(clock=clock)):
        with input_error("sun"):
            wrong("sun")


def controller_of(names):
    """Chooses the configurations in turn."""
    turns = itertools.cycle((0, 1))
    controller = SimpleNamespace(
        knobs=names,
        configurations=np.array([[0, 0, 0], [1, 1, 1]]),
        configuration=lambda index: {name: values[index] for name, values in names.items()},
        digest="in turn",
        unit="ms",
        feature_sizes={"x": 1},
        texts={},
        columns=(),
        header={"limit": "budget_ms"},
        fall_back=lambda limit, drift, limits, mask: None,
        limits=Limits({}, None),
        limits_note=lambda features, limits: "",
        is_unlike=lambda features: False,
        budgets=RequestBudgets(),
        decide_expected=lambda blocks, limit, drift, limits, mask: (next(turns), 0.0, 0.1),
        settled=lambda limit, drift: controller,
    )
    return controller


@pytest.mark.parametrize(("clock", "counted"), [("wall", True), ("cpu", False)])
def test_requests_are_timed_by_the_clock_that_is_chosen(clock, counted):
    by = {"wall": wall, "cpu": cpu}[clock]
    model = timed_by(by, AdaptiveModel(Bright(sleep), controller_of(KNOBS), clock=clock))
    requests = [Request(item.image, item.question) for item in ITEMS]
    first, second = (model.answer(requests[0], 3.5) for _ in range(2))
    assert first.configuration == {"side": 1, "mode": "fast", "share": 0.5}
    assert (first.answer.text, second.answer.text) == ("0", "1")
    for result in (second, model.generate(requests, 3.5)[1]):
        assert result.configuration["mode"] == "exact"
        assert (result.answer.total_ms > 3.9) == counted
        assert result.met == (not counted)
    if clock == "cpu":
        with input_error("arrivals"):
            model.answer(requests[0], 9.0, 1.0)
        with input_error("arrivals"):
            model.generate(requests, 9.0, [1.0] * 3)


def test_a_controller_of_other_knobs_and_a_clock_that_there_is_not_are_refused():
    with input_error("clock=sun"):
        AdaptiveModel(Bright(), controller_of(KNOBS), clock="sun")
    with input_error("mode=slow"):
        AdaptiveModel(Bright(), controller_of(KNOBS | {"mode": ("slow", "exact")}))


# -- grids -----------------------------------------------------------------------------------------


@st.composite
def grids(draw):
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    values = {f"knob {k}": draw(st.permutations(range(2, 2 + n))) for k, n in enumerate(sizes)}
    return values, draw(st.integers(0, math.prod(sizes))), draw(st.integers(0, 2**32))


@settings(max_examples=60, deadline=None)
@given(grid=grids())
def test_the_count_is_exact_and_the_draw_repeats(grid):
    values, count, seed = grid
    chosen = sample_grid(values, count, seed)
    cells = [tuple(c.values()) for c in chosen]
    every = [*itertools.product(*map(sorted, values.values()))]
    # in the order of the grid; 0 is all of it
    assert cells == [cell for cell in every if cell in cells]
    assert len(cells) == (count or len(every))
    assert all(list(c) == list(values) for c in chosen)
    assert chosen == sample_grid(values, count, seed)


def test_a_latin_hypercube_spreads_over_every_knob_by_its_seed():
    grid = {"max_crops": range(6), "top_k": range(8), "num_active_blocks": range(4)}
    chosen = sample_grid(grid, 24, 3)
    for knob, values in grid.items():
        times = Counter(c[knob] for c in chosen)
        # 24 points are 24/n in each of n values; only a point that fell on another's place may have
        # moved away
        assert all(abs(times[value] - 24 / len(values)) <= 2 for value in values)
    assert chosen != sample_grid(grid, 24, 1)


@pytest.mark.parametrize("values", [{}, {"a": ()}])
def test_a_grid_without_knobs_or_values_is_refused(values):
    with input_error("at least one"):
        sample_grid(values)
