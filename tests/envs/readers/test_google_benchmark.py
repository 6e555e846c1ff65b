"""Results of google-benchmark, which hold times alone."""

import json
from pathlib import Path

import pytest
from helpers import input_error

import knobwise
from knobwise.envs.readers.google_benchmark import read_google_benchmark
from knobwise.envs.readers.tool_files import tool_of

DATA = Path(__file__).parents[2] / "data"


@pytest.mark.parametrize("suffix", ["json", "csv"])
def test_right_reading_of_a_real_file(suffix):
    path = DATA / f"google_benchmark.{suffix}"
    assert tool_of(path) == "google-benchmark"
    rows = read_google_benchmark([path], [])
    frame = rows.frame
    # 2 documents × 2 levels × 3 repetitions, without means, medians, deviations and their ratio
    assert len(frame) == 12
    assert sorted(frame["repeat"].unique()) == [0, 1, 2]
    assert sorted(rows.knobs) == ["doc", "level"]
    assert frame["real_time"].is_between(0.2, 0.6).all()
    if suffix == "csv":
        # in µs
        assert frame["real_time"][0] == pytest.approx(0.226842)


def test_nanoseconds_are_the_default(tmp_path):
    rows = [{"name": "z", "run_name": "z", "run_type": "iteration", "real_time": 2e6}]
    path = tmp_path / "b.json"
    path.write_text(json.dumps({"context": {}, "benchmarks": rows}))
    assert read_google_benchmark([path], []).frame["real_time"].to_list() == [2.0]


def test_times_alone_are_no_profile():
    with input_error("times alone, and no accuracy.*profile.path="):
        knobwise.read(DATA / "google_benchmark.json")
