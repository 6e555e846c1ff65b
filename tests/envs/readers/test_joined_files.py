"""A table of scores and one of times, joined."""

import json
from pathlib import Path

import polars as pl
import pytest
from helpers import identical, input_error

import knobwise

DATA = Path(__file__).parents[2] / "data"
SCORES = [
    {
        "id": f"q{n}",
        "model": model,
        "level": level,
        "text": f"what is item {n}",
        "score": (n + level) % 2,
    }
    for n in range(6)
    for model in ("small", "large")
    for level in (1, 9)
]


def times(rows=SCORES, repeats=1):
    return [
        {"id": row["id"], "model": row["model"], "level": float(row["level"]), "seconds": at + r}
        for at, row in enumerate(rows)
        for r in range(repeats)
    ]


OPTIONS = {"id": "id", "accuracy": "score", "latency": "seconds", "unit": "s"}


def read(folder, scores, other, **options):
    (folder / "scores.jsonl").write_text("\n".join(map(json.dumps, scores)))
    pl.DataFrame(other).write_csv(folder / "times.csv")
    paths = [folder / "scores.jsonl", folder / "times.csv"]
    return knobwise.read(paths, **OPTIONS | options)


def test_rows_meet_by_id_and_knobs(tmp_path):
    made = read(tmp_path, SCORES, times()[::-1], features=["text"])
    assert made.num_samples == 6
    assert {knob.name for knob in made.knobs} == {"model", "level"}
    assert made.mask.all()
    cell = next(k for k in range(4) if made.label(k) == "model=small level=9")
    # row 1 of the scores is q0, small, 9
    assert made.latency_ms[0, cell] == 1000
    assert made.accuracy[0, cell] == 1
    assert any("joined by sample_id, model, level: 24 rows met; 0 rows" in n for n in made.notes)


def test_rows_that_meet_none_are_counted(tmp_path):
    extra = [{"id": "q9", "model": "small", "level": 1, "seconds": 3.0}]
    made = read(tmp_path, SCORES, times()[2:] + extra)
    assert int(made.mask.sum()) == 22
    (note,) = [note for note in made.notes if "rows met" in note]
    assert "22 rows met; 2 rows of scores.jsonl and 1 of times.csv met none" in note


@pytest.mark.parametrize("several", ["scores", "times"])
def test_repeats_of_one_table_take_what_the_other_has_once(tmp_path, several):
    scores = [row | {"trial": t} for row in SCORES for t in (0, 1)]
    if several == "scores":
        made = read(tmp_path, scores, times(), repeat="trial")
    else:
        made = read(tmp_path, SCORES, times(repeats=2))
    assert (made.num_samples, made.num_configurations, made.num_repeats) == (6, 4, 2)


def test_cross_product_is_refused(tmp_path):
    """The times lack a knob that the scores have, and have a repeat that these lack."""
    other = [{name: row[name] for name in ("id", "model", "seconds")} for row in times()]
    with input_error("several rows in scores.jsonl and in times.csv.*each pairs with each.*level"):
        read(tmp_path, SCORES, other)


def test_id_that_one_table_lacks_is_named(tmp_path):
    with input_error("scores.jsonl: no column doc"):
        read(tmp_path, SCORES, times(), id="doc")


def test_times_of_google_benchmark_meet_scores(tmp_path):
    """Its names hold the arguments, which are the id and the knob here."""
    scores = [
        {"doc": doc, "level": level, "accuracy": doc % 2 if level == 1 else 1}
        for doc in (0, 1)
        for level in (1, 9)
    ]
    (tmp_path / "scores.jsonl").write_text("\n".join(map(json.dumps, scores)))
    paths = [tmp_path / "scores.jsonl", DATA / "google_benchmark.json"]
    made = knobwise.read(paths, id="doc")
    assert (made.num_samples, made.num_configurations, made.num_repeats) == (2, 2, 3)
    assert [knob.name for knob in made.knobs] == ["level"]
    rows = json.loads(paths[1].read_text())["benchmarks"]
    runs = [r for r in rows if r["run_name"] == "z/doc:1/level:9" and r["run_type"] == "iteration"]
    wanted = [row["real_time"] / 1000 for row in runs]
    assert made.measurements_ms[1, 1].tolist() == pytest.approx(wanted)
    identical(made.accuracy, [[0.0, 1.0], [1.0, 1.0]])


def test_ids_that_never_meet_are_shown(tmp_path):
    other = [row | {"id": f"doc {row['id']}"} for row in times()]
    with input_error("no row of scores.jsonl meets.*q0/.*doc q0"):
        read(tmp_path, SCORES, other)


def test_cost_in_both_is_refused(tmp_path):
    scores = [row | {"seconds": 1.0} for row in SCORES]
    with input_error("both have seconds"):
        read(tmp_path, scores, times())


def test_files_of_two_settings_are_to_be_one_table(tmp_path):
    with input_error("column that names the setting"):
        read(tmp_path, times(SCORES[::2]), times(SCORES[1::2]))


def test_scores_of_lm_eval_and_times_of_aiperf_have_one_knob_that_varies():
    """One request failed in AIPerf; what its records say of a request was not set."""
    table = knobwise.read(
        [DATA / "lm_eval.jsonl.gz", DATA / "aiperf.jsonl.gz"],
        id="doc_id",
        accuracy="exact_match",
        latency="metrics.request_latency.value",
    )
    varying = {knob.name: knob.values for knob in table.knobs if len(knob.values) > 1}
    processor = "metadata.record_processor_id"
    assert {*varying} == {"model", processor}
    assert table.num_configurations == 2
    small, large = (varying["model"].index(name) for name in ("small", "large"))
    codes = table.configurations[:, [knob.name for knob in table.knobs].index("model")].tolist()
    small, large = codes.index(small), codes.index(large)
    assert table.mask.sum(0)[[small, large]].tolist() == [24, 23]
    means = [table.accuracy[table.mask[:, c], c].mean().item() for c in (small, large)]
    assert means == pytest.approx([15 / 24, 21 / 23])
    # the server slept 20 and 60 ms
    assert 20 < table.latency_ms[:, small].median() < 40 < 60 < table.latency_ms[1, large] < 100


def test_other_columns_of_both_are_those_of_the_first(tmp_path):
    other = [row | {"text": "other"} for row in times()]
    made = read(tmp_path, SCORES, other, features=["text"])
    identical(made.mask.sum(), 24)
    assert any("both have text: taken from scores.jsonl" in note for note in made.notes)


@pytest.mark.parametrize("few", ["scores", "times"])
def test_what_is_of_one_setting_meets_the_rows_of_this_setting_alone(tmp_path, few):
    """One of three models has times, or scores: the others have no cell of their own."""
    models = [
        {"id": f"q{n}", "model": model, "score": n % 2, "seconds": at + n}
        for n in range(6)
        for at, model in enumerate(("small", "mid", "large"))
    ]
    small = [row for row in models if row["model"] == "small"]
    scores = [{name: row[name] for name in ("id", "model", "score")} for row in models]
    other = [{name: row[name] for name in ("id", "model", "seconds")} for row in models]
    if few == "times":
        other = other[::3]
    else:
        scores = scores[::3]
    made = read(tmp_path, scores, other)
    (note,) = [note for note in made.notes if "rows met" in note]
    lone = (12, 0) if few == "times" else (0, 12)
    assert f"by sample_id, model: 6 rows met; {lone[0]} rows" in note
    assert f"and {lone[1]} of times.csv met none" in note
    assert made.num_configurations == 1
    identical(made.latency_ms, [[1000.0 * row["seconds"]] for row in small])


@pytest.mark.parametrize("times_of", [["openai/small"], ["openai/small", "openai/large"]])
def test_settings_that_are_called_otherwise_in_the_other_file_are_refused(tmp_path, times_of):
    scores = [{"id": row["id"], "model": row["model"], "score": 1} for row in SCORES[::2]]
    other = [
        {"id": f"q{n}", "model": model, "seconds": 1.0} for n in range(6) for model in times_of
    ]
    with input_error("differ in model: large, small in one, openai/.*alike in both"):
        read(tmp_path, scores, other)


def test_one_row_that_meets_several_data_sets_is_refused(tmp_path):
    scores = [
        {"dataset": name, "id": str(n), "model": model, "score": n % 2}
        for name in ("gsm", "mmlu")
        for n in range(6)
        for model in ("small", "large")
    ]
    other = [row | {"seconds": at} for at, row in enumerate(scores)]
    made = read(tmp_path, scores, [{k: v for k, v in row.items() if k != "score"} for row in other])
    assert made.num_samples == 12
    names = ("id", "model", "seconds")
    with input_error("0/small of times.csv meets .*scores.jsonl .gsm, mmlu.*column dataset"):
        read(tmp_path, scores, [{name: row[name] for name in names} for row in other[:12]])
    # ids of one data set each do not restart
    for row in scores:
        row["id"] += row["dataset"]
    alone = [row | {"seconds": 1.0} for row in scores]
    made = read(tmp_path, scores, [{name: row[name] for name in names} for row in alone])
    assert made.num_samples == 12


def test_true_of_pandas_meets_true_of_json(tmp_path):
    scores = [row | {"cache": row["model"] == "small"} for row in SCORES]
    other = [row | {"cache": str(row["model"] == "small")} for row in times()]
    made = read(tmp_path, scores, other)
    assert made.mask.all()
    (cache,) = [knob for knob in made.knobs if knob.name == "cache"]
    assert [*map(repr, cache.values)] == ["False", "True"]
