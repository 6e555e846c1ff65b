"""What a column is: knobs are never left out, outcomes, answers and numbers of rows always, and
notes name them."""

import itertools

import numpy as np
import polars as pl
import pytest
from commands import words_of
from helpers import identical, input_error
from hypothesis import example, given, settings
from hypothesis import strategies as st

from knobwise.envs.readers.long_table import read_long_table, table_from_frame

MODES = {"fast": 12, "mid": 30, "full": 61}


def rows_of(cells, draw=0, **columns):
    """Return the rows of these cells: (number of the sample, {knob: value}); columns are called
    with the draws, the difficulty of the samples and the number of each setting."""
    draws = np.random.default_rng(draw)
    sample = np.array([sample for sample, _ in cells])
    settings_of = [tuple(setting.values()) for _, setting in cells]
    number = np.unique([str(s) for s in settings_of], return_inverse=True)[1]
    hard = draws.random(sample.max() + 1)[sample]
    right = (hard < (number + 1) / (number.max() + 2)).astype(int)
    frame = pl.DataFrame([{"sample_id": f"q{s}"} | setting for s, setting in cells])
    made = {name: make(draws, hard, number) for name, make in columns.items()}
    return frame.with_columns(
        accuracy=right, latency_ms=10.0 + number + draws.random(len(cells)), **made
    )


def grid(*sizes):
    """Return all settings of knobs a, b, … with so many values."""
    values = [range(1, size + 1) for size in sizes]
    return [dict(zip("abcd", chosen, strict=False)) for chosen in itertools.product(*values)]


def full(samples, configurations):
    return [(s, c) for s in range(samples) for c in configurations]


def read(frame, **options):
    return table_from_frame(frame, name="t", **options)


def names_of(table):
    return [knob.name for knob in table.knobs]


def is_named(notes, column):
    return any(column in note for note in notes)


OUTCOMES = {
    "letter": lambda draws, hard, number: draws.choice(list("ABCD"), len(hard)),
    "grade": lambda draws, hard, number: (hard < (number + 1) / (number.max() + 2)).astype(int),
    "rack": lambda draws, hard, number: draws.integers(0, 3, len(hard)),
    "words": lambda draws, hard, number: (100 * hard).astype(int) + number,
    "money": lambda draws, hard, number: draws.random(len(hard)),
}
"""Outcomes whose names say nothing."""
NAMES = (
    "correct, finish_reason, predicted_letter, error, output_tokens, host, seed, run, http_status, "
    "trial, isCorrect, Finish Reason, raw_text, tstamp"
)
ANSWERS = (
    "gold, target, label, reference, ground_truth, expected, gt_answer, y_true, gold_label, "
    "expected_output, seed, finish_reason, correct, answer_idx, correct_option, best_answer, ideal, "
    "multiple_choice_answer, answer_type, correct_choice_idx, correct_answer_index, direct_answers"
)


@given(
    sizes=st.sampled_from([(3,), (2, 3), (4, 4), (2, 2, 2), (8,)]),
    chosen=st.sets(st.sampled_from(sorted(OUTCOMES)), min_size=1),
    holes=st.sampled_from([0, 0, 0.2]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=30, deadline=None)
def test_outcomes_are_left_out_of_any_grid_whatever_their_names(sizes, chosen, holes, seed):
    draws = np.random.default_rng(seed)
    cells = [cell for cell in full(120, grid(*sizes)) if draws.random() >= holes]
    data = rows_of(cells, seed, **{name: OUTCOMES[name] for name in chosen})
    table = read(data)
    assert names_of(table) == list("abcd"[: len(sizes)])
    assert all(is_named(table.notes, name) for name in chosen)
    assert table.mask.double().mean() > 0.9 - holes
    assert table.digest == read(data.drop(chosen)).digest


@given(
    sizes=st.sampled_from([(4, 4, 4), (8, 8), (2, 4, 2, 4), (64,), (3, 2)]),
    shape=st.sampled_from([(20, 2), (12, 4), (60, 2), (60, 4), (300, 2), (300, 4)]),
    seed=st.integers(0, 2**32),
)
@example(sizes=(4, 4, 4), shape=(60, 2), seed=7945)
@settings(max_examples=60, deadline=None)
def test_knobs_of_sparse_profiles_are_never_left_out(sizes, shape, seed):
    draws = np.random.default_rng(seed)
    samples, count = shape
    settings_of = grid(*sizes)
    cells = [
        (s, settings_of[c])
        for s in range(samples)
        for c in draws.choice(len(settings_of), count, replace=False)
    ]
    assert names_of(read(rows_of(cells, seed))) == list("abcd"[: len(sizes)])


NESTED = [
    {"a": "x", "b": 1, "c": 1},
    {"a": "x", "b": 2, "c": 1},
    {"a": "x", "b": 3, "c": 1},
    {"a": "y", "b": 0, "c": 1},
    {"a": "y", "b": 0, "c": 2},
    {"a": "z", "b": 0, "c": 0},
]


@given(share=st.sampled_from([1, 0.9, 0.5]), seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_knobs_that_vary_only_under_another_one_are_kept(share, seed):
    draws = np.random.default_rng(seed)
    cells = [cell for cell in full(100, NESTED) if draws.random() < share]
    outcomes = {name: OUTCOMES[name] for name in ("grade", "money")}
    assert names_of(read(rows_of(cells, seed))) == ["a", "b", "c"]
    assert names_of(read(rows_of(cells, seed, **outcomes))) == ["a", "b", "c"]


def test_sparse_profiles_lose_their_outcomes():
    draws = np.random.default_rng(0)
    chosen = [draws.choice(64, 8, replace=False) for _ in range(300)]
    settings_of = grid(4, 4, 4)
    cells = [(s, settings_of[c]) for s in range(300) for c in chosen[s]]
    table = read(rows_of(cells, grade=OUTCOMES["grade"], rack=OUTCOMES["rack"]))
    assert names_of(table) == ["a", "b", "c"]
    assert is_named(table.notes, "grade, rack")


def modes(samples=40, **columns):
    return rows_of(full(samples, [{"mode": mode} for mode in MODES]), **columns)


@pytest.mark.parametrize("name", ["模式", "größe", "k%", "%", "rank", "max_tokens", "timeout_s"])
def test_names_in_any_script_are_names_of_knobs(name):
    draws = np.random.default_rng(0)
    cells = [(s, {name: v, "b": b}) for s in range(30) for v in (1, 2, 3) for b in (1, 2)]
    cells = [cell for cell in cells if draws.random() < 0.6]
    assert names_of(read(rows_of(cells))) == [name, "b"]


def constant(value):
    return lambda draws, hard, number: np.full(len(hard), value)


@pytest.mark.parametrize("name", NAMES.split(", "))
@pytest.mark.parametrize("samples", [3, 40])
def test_names_of_outcomes_help_where_there_are_few_rows(name, samples):
    """An outcome that hardly varies cannot be told from a knob with one value."""
    for make in (OUTCOMES["rack"], constant("stop")):
        table = read(modes(samples, **{name: make}))
        assert names_of(table) == ["mode"]
        assert is_named(table.notes, name)
        used = read(modes(samples, **{name: make}), knobs=["mode", name])
        assert names_of(used) == ["mode", name]


def test_what_every_sample_has_in_all_values_is_a_knob_whatever_its_name():
    cells = [{"mode": mode, "output_tokens": n} for mode in MODES for n in (8, 16)]
    table = read(rows_of(full(30, cells)))
    assert names_of(table) == ["mode", "output_tokens"]
    assert is_named(table.notes, "output_tokens")
    # runs are measurements of the same setting, unless nothing else differs
    cells = [{"mode": mode, "run": n} for mode in MODES for n in (8, 16)]
    table = read(rows_of(full(30, cells)))
    assert (names_of(table), table.num_repeats) == (["mode"], 2)
    assert is_named(table.notes, "run")
    table = read(rows_of(full(30, [{"run": "base"}, {"run": "new"}])))
    assert names_of(table) == ["run"]


@pytest.mark.parametrize("name", ["task", "metric", "dataset_name", "judge", "Subject"])
def test_data_sets_and_metrics_that_look_like_knobs_are_noted(name):
    """Ids that start anew in each task are those of the same samples under several settings."""
    cells = [{name: part, "mode": mode} for part in ("arc", "mmlu") for mode in MODES]
    table = read(rows_of(full(20, cells)))
    assert names_of(table) == [name, "mode"]
    assert is_named(table.notes, name)
    # if it is a column of data sets, the samples are different ones
    known = read(rows_of(full(20, cells)).rename({name: "dataset"}))
    assert (names_of(known), known.num_samples) == (["mode"], 40)
    # alone it names the configurations
    alone = read(rows_of(full(20, [{name: part} for part in ("arc", "mmlu")])))
    assert (names_of(alone), alone.notes) == ([name], ())


def test_outcomes_of_numbered_runs_are_left_out():
    cells = [{"mode": mode, "run": n} for mode in MODES for n in range(3)]
    table = read(rows_of(full(40, cells), rack=OUTCOMES["rack"], grade=OUTCOMES["grade"]))
    assert (names_of(table), table.num_repeats) == (["mode"], 3)


def test_an_index_of_pandas_is_no_knob_in_a_table_of_any_size():
    for name, samples in itertools.product(("", "Unnamed: 0", "__index_level_0__"), (2, 40)):
        frame = modes(samples).with_row_index("row").rename({"row": name})
        table = read(frame.select(name, pl.exclude(name)))
        assert (names_of(table), table.mask.all()) == (["mode"], True)
    # a running number needs no name
    table = read(modes(samples).with_row_index("x"))
    assert names_of(table) == ["mode"]
    assert is_named(table.notes, "x")


def per_sample(values):
    """Return a column that has one value for each of 40 samples under three modes."""
    return np.repeat(values, 3)


@pytest.mark.parametrize("name", ANSWERS.split(", "))
def test_answers_are_no_features_unless_they_are_named(name):
    letters = per_sample(np.random.default_rng(1).choice(list("ABCD"), 40))
    frame = modes().with_columns(
        pl.Series("tokens", per_sample(np.arange(40) ** 2 % 37)), pl.Series(name, letters)
    )
    table = read(frame, features="auto")
    assert [column.name for column in table.columns] == ["tokens"]
    assert is_named([n for n in table.notes if not n.startswith("features:")], name)
    assert is_named(read(frame).notes, name)
    table = read(frame, features=["tokens", name])
    assert [column.name for column in table.columns] == ["tokens", name]


@pytest.mark.parametrize("name", ["idx", "index", "row", "x"])
def test_numbers_of_samples_are_no_features(name):
    frame = modes().with_columns(pl.Series("tokens", per_sample(np.arange(40) ** 2 % 37)))
    for numbers in (np.arange(40), np.arange(7, 47), np.arange(40)[::-1]):
        numbered = frame.with_columns(pl.Series(name, per_sample(numbers)))
        table = read(numbered, features="auto")
        assert [column.name for column in table.columns] == ["tokens"]
        assert is_named(table.notes, name)
    # nor is a copy of the ids
    copied = frame.with_columns(pl.col("sample_id").str.slice(1).cast(pl.Int64) * 1000)
    copied = copied.with_columns(key=pl.col("sample_id"))
    table = read(copied, features="auto")
    assert [column.name for column in table.columns] == ["tokens"]


def test_columns_that_cannot_be_told_are_named():
    table = read(modes(4, letter=OUTCOMES["letter"]))
    assert names_of(table) == ["mode", "letter"]
    assert is_named(table.notes, "letter")
    # where all samples have the same settings, nothing is in doubt
    assert read(rows_of(full(4, grid(2, 3)))).notes == ()


@pytest.mark.parametrize("options", [{}, {"knobs": ["mode"]}, {"features": "auto"}])
def test_one_setting_for_each_sample_is_a_log_of_decisions(tmp_path, options):
    frame = modes(40).with_columns(kind=pl.col("sample_id").str.slice(-1))
    frame = frame.filter(pl.int_range(pl.len()) % 3 == pl.int_range(pl.len()) // 3 % 3)
    assert frame["mode"].n_unique() == 3
    for data in (frame, pl.concat([frame, frame.with_columns(pl.col("latency_ms") + 1)])):
        with input_error("log of decisions"):
            read(data, **options | {"knobs": ["mode"]})
    frame.write_csv(tmp_path / "log.csv")
    with input_error(r"log\.csv: .*log of decisions"):
        read_long_table(tmp_path / "log.csv", **options)


def measured_under(name, settings, seed=0):
    """40 questions under each setting; `sample_id` is another one in each row."""
    draws = np.random.default_rng(seed)
    rows = []
    for number, setting in itertools.product(range(40), settings):
        row = {"sample_id": f"{draws.integers(1 << 60):x}", "kind": "xyz"[number % 3]}
        row |= {name: f"d{number}", "words": int(draws.integers(5, 60))} | setting
        rows.append(row | {"accuracy": int(draws.random() < 0.6), "latency_ms": 9 + draws.random()})
    return pl.DataFrame(rows)


@pytest.mark.parametrize("name", ["id", "document", "question_id"])
@pytest.mark.parametrize("options", [{}, {"knobs": ["a"]}, {"features": "auto"}])
def test_ids_that_differ_in_every_row_are_no_log_where_another_column_has_all(name, options):
    frame = measured_under(name, grid(3))
    with input_error(rf"profile\.id={name}\)$"):
        read(frame, **options)
    table = read(frame, id=name)
    assert (table.num_samples, names_of(table)) == (40, ["a"])
    # some requests failed
    with input_error(rf"profile\.id={name}\)$"):
        read(frame.filter(pl.int_range(pl.len()) % 50 > 0), **options)


@pytest.mark.parametrize("users", [5, 20, 150])
def test_a_log_stays_a_log_whoever_sent_the_requests(users):
    for seed in range(20):
        draws = np.random.default_rng(seed)
        log = pl.DataFrame(
            {
                "sample_id": [f"r{number}" for number in range(300)],
                "user": draws.integers(users, size=300),
                "day": draws.integers(7, size=300),
                "a": draws.integers(2 + seed % 3, size=300),
                "accuracy": draws.integers(2, size=300),
                "latency_ms": draws.uniform(9, 10, 300),
            }
        )
        with input_error("log of decisions"):
            read(log)
        # in turns
        turns = log.with_columns(a=pl.int_range(pl.len()) % 3)
        with input_error("log of decisions"):
            read(turns)


def test_a_row_that_failed_is_late_and_wrong():
    """It has no accuracy, but a time and an error; without an error it is not known."""
    frame = pl.DataFrame(
        {
            "sample_id": ["a", "a", "b", "b", "c", "c"],
            "mode": ["fast", "full"] * 3,
            "score": [1.0, None, 0.5, None, None, 1.0],
            "latency_ms": [10.0, 900.0, 11.0, None, 12.0, 60.0],
            "error": [None, "TimeoutError", "", "refused", "", None],
        }
    )
    table = read(frame)
    assert names_of(table) == ["mode"]
    identical(table.accuracy, [[1.0, 0.0], [0.5, np.nan], [np.nan, 1.0]])
    identical(table.latency_ms, [[10.0, 900.0], [11.0, np.nan], [np.nan, 60.0]])
    assert any(note.startswith("2 rows") and "error" in note for note in table.notes)
    assert sum(note.startswith("1 of them") for note in table.notes) == 2
    status = frame.with_columns(error=pl.Series([200, 504, 200, 500, 200, 200]))
    assert read(status.rename({"error": "http_status"})).digest == table.digest
    # where some are empty, pandas writes codes as floats
    codes = frame.with_columns(error=pl.Series([0.0, 1.0, None, 1.0, 0.0, 0.0]))
    assert read(codes.rename({"error": "exit_code"})).digest == table.digest


@pytest.mark.parametrize(
    "name", ["exact_match", "cost_usd", "queue_time", "judge_score", "refused"]
)
def test_names_of_measurements_help_and_may_be_features(name):
    """Under the same settings they are no knobs; what is known of a sample stays a feature."""
    outcome = rows_of(full(4, [{"mode": mode} for mode in "abc"]), **{name: OUTCOMES["letter"]})
    table = read(outcome)
    assert names_of(table) == ["mode"]
    assert is_named(table.notes, name)
    sample = modes(20).with_columns((pl.int_range(pl.len()) // 3 % 7).alias(name))
    assert [column.name for column in read(sample, features="auto").columns] == [name]


@pytest.mark.parametrize(
    "values",
    [
        pl.Series([None] * 24, dtype=pl.String),
        pl.Series([None] * 24),
        pl.Series(range(24)).cast(pl.Duration("ms")),
        pl.Series([b"\xff"] * 24),
    ],
    ids=["text", "null", "spans", "bytes"],
)
def test_empty_columns_and_spans_of_time_are_no_knobs(values):
    table = read(modes(8).head(24).with_columns(values.alias("more")))
    assert names_of(table) == ["mode"]
    assert is_named(table.notes, "more")
    for options in ({"knobs": ["more"]}, {"features": ["more"]}, {"id": "more"}, {"group": "more"}):
        with input_error("more"):
            read(modes(8).head(24).with_columns(values.alias("more")), **options)


def test_few_samples_with_several_settings_are_noted():
    """As a log of decisions has, of which some requests were sent again."""
    frame = modes(20)
    first = frame.unique("sample_id", keep="first", maintain_order=True)
    again = frame.filter(pl.col("mode") == frame["mode"][-1]).head(3)
    log = pl.concat([first, again])
    assert any(note.startswith("3 of 20 samples") for note in read(log).notes)
    assert not any("20 samples" in note for note in read(frame).notes)


def test_rows_without_accuracy_that_took_the_longest_timed_out():
    frame = modes(40).with_columns(pl.col("accuracy").cast(pl.Float64))
    late = pl.int_range(pl.len()).is_in([4, 50, 77])
    late_rows = frame.with_columns(
        accuracy=pl.when(~late).then("accuracy"),
        latency_ms=pl.when(late).then(500.0).otherwise("latency_ms"),
    )
    table = read(late_rows)
    assert table.mask.all()
    identical(table.accuracy[table.latency_ms == 500], [0.0] * 3)
    assert any(note.startswith("3 rows") for note in table.notes)


@pytest.mark.parametrize(
    ("first", "second"),
    [("2", "02"), ("2", " 2"), ("2", "2.0 "), ("s5", "s5 "), ("s5", "S5"), ("s5", "s5\u200b")],
)
def test_names_that_look_alike_are_noted(first, second):
    """The note names the column and both names."""
    for column in ("mode", "sample_id", "dataset"):
        rows = {
            "sample_id": ["x", "x", "y", "y"],
            "mode": ["a", "b", "a", "b"],
            "dataset": ["d"] * 4,
        }
        rows[column] = (
            [first, second, first, second] if column == "mode" else [first] * 2 + [second] * 2
        )
        (note,) = read(pl.DataFrame(rows).with_columns(accuracy=1.0, latency_ms=2.0)).notes
        assert column in note
        assert repr(first) in note
        assert repr(second) in note


def test_a_budget_of_tokens_is_cost_and_knob():
    """As in files with a row for each item and budget."""
    cells = [{"t": t} for t in (128, 256, 512)]
    data = rows_of(full(30, cells), conf=OUTCOMES["money"], letter=OUTCOMES["letter"])
    options = {"latency": "t", "unit": "tokens"}
    table = read(data.drop("latency_ms"), **options)
    assert names_of(table) == ["t"]
    assert is_named(table.notes, "conf")
    identical(table.latency_ms[0], [128, 256, 512])
    assert read(data.drop("latency_ms"), knobs=["t"], **options).digest == table.digest


# -- wide tables -----------------------------------------------------------------------------------


def wide_frame(names, samples=40, **columns):
    """A row for each sample, with the accuracies of two configurations, and a prompt."""
    draws = np.random.default_rng(3)
    frame = pl.DataFrame({"id": [f"q{i}" for i in range(samples)]})
    words = np.array(
        [
            "the",
            "of",
            "and",
            "to",
            "in",
            "is",
            "it",
            "for",
            "on",
            "with",
            "as",
            "by",
            "at",
            "from",
            "this",
            "that",
        ]
    )
    prompts = [" ".join(draws.choice(words, 12)) for _ in range(samples)]
    right = {name: draws.integers(0, 2, samples) for name in names}
    made = {name: pl.Series(make(draws, samples)) for name, make in columns.items()}
    return frame.with_columns(pl.Series("prompt", prompts), **right, **made)


def answers(draws, samples):
    return [" ".join(["so"] * n) for n in draws.integers(1, 40, samples)]


def costs(draws, samples):
    return draws.random(samples)


@pytest.mark.parametrize(
    "names", [("small", "large"), ("small_acc", "large_acc"), ("gpt-4|score", "gpt-3.5|score")]
)
def test_what_a_wide_table_says_of_each_configuration_is_no_feature(names):
    first, second = (name.removesuffix("_acc").removesuffix("|score") for name in names)
    outcomes = {
        f"{first}|answer": answers,
        f"{second}|answer": answers,
        f"usd_{first}": costs,
        f"usd_{second}": costs,
        f"{names[1]}.cost": costs,
        "route": lambda draws, samples: draws.choice([first, second, "none"], samples),
    }
    frame = wide_frame(names, **outcomes, length=lambda draws, samples: draws.random(samples))
    options = {"id": "id", "wide": list(names), "wide_latency": [1, 10], "unit": "USD"}
    table = read(frame, features="auto", **options)
    assert [column.name for column in table.columns] == ["length"]
    assert is_named(table.notes, "prompt (text)")
    for name in outcomes:
        assert is_named([n for n in table.notes if not n.startswith("features:")], name)
    # unless somebody wants it
    assert "route" in [c.name for c in read(frame, features=["route"], **options).columns]


def test_features_of_a_wide_table_may_end_in_the_numbers_of_its_configurations():
    names = ("model_1", "model_2")
    frame = wide_frame(names, feature_1=costs, feature_2=costs, large_print=costs)
    table = read(frame, features="auto", id="id", wide=list(names), wide_latency=[1, 10])
    assert [column.name for column in table.columns] == ["feature_1", "feature_2", "large_print"]


@pytest.mark.parametrize(
    "name",
    words_of(
        "expected_response/value answer/value doc.target metadata.answer outputs.answer"
        " extracted_golds failureReason failure_reason actualOutput best_model"
        " oracle_model_to_route"
    ),
)
def test_answers_in_nested_names_are_no_features(name):
    test_answers_are_no_features_unless_they_are_named(name)


# -- runs and settings -----------------------------------------------------------------------------

RUNS = {
    "of each model": lambda sample, setting: 100 + ("small", "large").index(setting["model"]),
    "of each length": lambda sample, setting: setting["tokens"] // 64,
    "of each sample and model": lambda sample, setting: f"{sample}-{setting['model']}",
    "of each model, twice": lambda sample, setting: f"{setting['model']}-{setting['again']}",
}


@pytest.mark.parametrize("number", RUNS.values(), ids=RUNS.keys())
@pytest.mark.parametrize("name", ["run_id", "seed", "trial_id", "epoch"])
def test_a_run_of_one_setting_hides_no_knob(name, number):
    again = (0, 1) if number is RUNS["of each model, twice"] else (0,)
    cells = [
        {"model": model, "tokens": tokens, "again": turn}
        for model in ("small", "large")
        for tokens in (64, 128)
        for turn in again
    ]
    cells = full(60, cells)
    frame = rows_of(cells, letter=OUTCOMES["letter"], rack=OUTCOMES["rack"]).drop("again")
    frame = frame.with_columns(pl.Series(name, [number(*cell) for cell in cells]))
    table = read(frame)
    assert names_of(table) == ["model", "tokens"]
    assert (table.num_configurations, table.num_repeats) == (4, len(again))


@pytest.mark.parametrize("samples", [5, 12, 40])
def test_a_setting_is_a_knob_whatever_stands_beside_it(samples):
    """The columns of Ray Tune's data frame (2.60.0)."""
    cells = full(samples, [{"config/model": model} for model in ("small", "large")])
    rows = range(len(cells))
    frame = rows_of(cells, **{"config/name": lambda draws, hard, number: number})
    frame = frame.drop("config/name").with_columns(
        pl.Series("trial_id", [f"41bba_{i:05d}" for i in rows]),
        pl.Series("date", [f"2026-11-28_08-{i // 60:02d}-{i % 60:02d}" for i in rows]),
        pl.Series("time_this_iter_s", [0.01 + i / 3 for i in rows]),
        pl.Series("logdir", [f"/runs/41bba_{i:05d}" for i in rows]),
        pl.Series("datetime_start", [f"2026-11-28 08:{i // 60:02d}:{i % 60:02d}" for i in rows]),
    )
    assert names_of(read(frame)) == ["config/model"]


# -- spellings and units ---------------------------------------------------------------------------


def two_settings(values, **columns):
    """Thirty samples under each of these values of a knob."""
    frame = rows_of(full(30, [{"v": value} for value in values]))
    return frame.with_columns(**columns)


@pytest.mark.parametrize(
    ("written", "values"),
    [
        (["3.1", "3.10", "3.2"], ("3.1", "3.10", "3.2")),
        (["0.1", "0.10"], ("0.1", "0.10")),
        (["0.1", "0.2"], (0.1, 0.2)),
        (["8", "16"], (8, 16)),
    ],
)
def test_what_is_served_is_what_was_written(written, values):
    assert read(two_settings(written)).knobs[0].values == values


def test_spellings_of_one_number_are_one_setting_and_said():
    frame = rows_of(full(30, [{"v": value} for value in ("0.001", "2", "3")]))
    spelled = pl.when(pl.int_range(pl.len()) % 2 == 0).then(pl.col("v"))
    other = pl.col("v").replace({"0.001": "1e-3", "2": "2.0"})
    table = read(frame.with_columns(v=spelled.otherwise(other)))
    assert table.knobs[0].values == (0.001, 2, 3)
    assert is_named(table.notes, "0.001, 1e-3")
    assert is_named(table.notes, "2, 2.0")


def test_float32_knobs_are_read_as_they_were_written():
    table = read(two_settings([0.1, 0.7]).with_columns(pl.col("v").cast(pl.Float32)))
    assert table.knobs[0].values == (0.1, 0.7)


UNIT_NAMES = ["time_unit", "unit", "Unit", "timeUnit", "latency_unit", "real_time_unit"]


@pytest.mark.parametrize("name", UNIT_NAMES)
def test_a_column_of_units_is_heeded_row_by_row_and_is_no_knob(name):
    """google-benchmark writes `time_unit`, and each benchmark may have its own."""
    cost = "latency" if name.startswith("latency") else "real_time"
    frame = two_settings(["a", "b"]).rename({"latency_ms": cost})
    whole = read(frame, latency=cost)
    slow = pl.col("v") == "b"
    frame = frame.with_columns(
        pl.when(slow).then(pl.col(cost) / 1e3).otherwise(pl.col(cost) * 1e3).alias(cost),
        pl.when(slow).then(pl.lit("s")).otherwise(pl.lit("us")).alias(name),
    )
    table = read(frame, latency=cost)
    assert names_of(table) == ["v"]
    identical(table.latency_ms, whole.latency_ms)
    assert is_named(table.notes, name)


def test_columns_of_units_that_contradict_are_refused():
    frame = two_settings(["a", "b"]).rename({"latency_ms": "t"})
    named = frame.with_columns(time_unit=pl.lit("s"))
    assert read(named, latency="t", unit="s").unit == "ms"
    for wrong, options in (
        (named, {"unit": "USD"}),
        (named.rename({"t": "t_ms"}), {"latency": "t_ms"}),
        (frame.with_columns(time_unit=pl.col("v").replace({"a": "s", "b": "points"})), {}),
        (frame.with_columns(time_unit=pl.when(pl.col("v") == "a").then(pl.lit("s"))), {}),
    ):
        with input_error("time_unit"):
            read(wrong, **{"latency": "t"} | options)
    # it may be about something else
    other = frame.rename({"t": "latency_ms"}).with_columns(unit=pl.lit("points"))
    assert read(other).unit == "ms"
    prices = frame.with_columns(unit=pl.lit("USD"))
    assert read(prices, latency="t").unit == "USD"


@pytest.mark.parametrize("name", ["exam", "eval_name"])
def test_a_column_that_changes_the_features_of_a_sample_may_be_part_of_its_id(name):
    draws = np.random.default_rng(0)
    rows = []
    for data in ("first", "second"):
        for sample in range(60):
            length = int(draws.integers(10, 500))
            for model in ("fast", "full"):
                row = (sample, data, length, model, int(draws.integers(2)), draws.random())
                rows.append(row)
    columns = ["sample_id", name, "length", "model", "accuracy", "latency_ms"]
    frame = pl.DataFrame(rows, columns, orient="row")
    table = table_from_frame(frame, name="t")
    (note,) = [note for note in table.notes if "part of the ids" in note]
    assert note.startswith(f"knob {name} ")
    assert "length" in note
    # what belongs to the sample changes with no knob
    fixed = frame.with_columns(pl.col("length").first().over("sample_id"))
    notes = table_from_frame(fixed, name="t").notes
    assert not any("part of the ids" in note for note in notes)


def test_one_missing_row_of_two_settings_makes_no_knobs_of_what_belongs_to_samples():
    """With rows for less than two settings of each sample, a prompt was taken for a knob."""
    frame = modes(24).filter(pl.col("mode").is_in(["fast", "full"]))
    frame = frame.with_columns(prompt="what is " + pl.col("sample_id"))
    assert names_of(read(frame)) == ["mode"]
    table = read(frame[1:])
    assert names_of(table) == ["mode"]
    assert table.mask.sum() == 47
