"""Results of google-benchmark, which hold times alone."""

import json
from pathlib import Path

import pytest
from helpers import identical, input_error

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


@pytest.mark.parametrize("typed", [True, False])
def test_run_type_goes_before_the_name(tmp_path, typed):
    """A benchmark of one's own may be called like a statistic; a CSV has no run_type."""
    rows = [
        {"name": f"pack/mode:{mode}", "run_type": kind, "real_time": 2e6}
        for mode, kind in (
            ("fast", "iteration"),
            ("rate_max", "iteration"),
            ("x_mean", "aggregate"),
        )
    ]
    if not typed:
        rows = [{name: row[name] for name in ("name", "real_time")} for row in rows]
    path = tmp_path / "b.json"
    path.write_text(json.dumps({"context": {}, "benchmarks": rows}))
    frame = read_google_benchmark([path], []).frame
    assert frame["mode"].to_list() == ["fast", "rate_max"][: 1 + typed]


def test_times_alone_are_no_profile():
    with input_error("times alone, and no accuracy.*profile.path="):
        knobwise.read(DATA / "google_benchmark.json")


@pytest.mark.parametrize("right", [None, "yes"])
def test_failed_and_skipped_runs_beside_scores(tmp_path, right):
    """The scores were made elsewhere, and do not know that a run failed here."""
    rows = [
        {
            "name": f"z/doc:{doc}/level:{level}",
            "run_type": "iteration",
            "repetition_index": repeat,
            "real_time": 1000.0 * level + doc,
            "cpu_time": 1.0,
            "time_unit": "us",
        }
        for doc in range(4)
        for level in (1, 9)
        for repeat in (0, 1)
    ]
    at = {row["name"]: row for row in rows if row["repetition_index"] == 1}
    none = {"real_time": 0.0, "cpu_time": 0.0, "iterations": 0}
    at["z/doc:0/level:9"].update(none, error_occurred=True, error_message="no memory")
    for row in rows:
        if row["name"] == "z/doc:1/level:9":
            row.update(none, skipped=True, skip_message="too large")
    (tmp_path / "b.json").write_text(json.dumps({"context": {}, "benchmarks": rows}))
    yes = right or 1
    scores = [{"doc": doc, "level": level, "score": yes} for doc in range(4) for level in (1, 9)]
    (tmp_path / "s.jsonl").write_text("\n".join(map(json.dumps, scores)))
    paths = [tmp_path / "s.jsonl", tmp_path / "b.json"]
    made = knobwise.read(paths, id="doc", accuracy="score", right=right)
    # one repeat of two failed
    identical(made.accuracy[0], [1.0, 0.5])
    identical(made.mask[1], [True, False])
    identical(made.accuracy[2:], [[1.0, 1.0]] * 2)
    # the slowest answer took 9.003 ms
    times = made.measurements_ms[0, 1].sort().values.tolist()
    assert times == pytest.approx([9.0, 1.001 * 9.003])
    assert any("1 of 16 answers failed (doc=0 level=9: 1)" in note for note in made.notes)
    assert any("2 runs were skipped" in note for note in made.notes)
    assert [knob.name for knob in made.knobs] == ["level"]
