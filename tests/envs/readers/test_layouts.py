"""Files as other programs lay them out: other names of ids and repeats, words for right, wide
tables, ARFF."""

import json

import numpy as np
import polars as pl
import pytest
import torch
from commands import refused, words_of
from helpers import identical, input_error
from hypothesis import given
from hypothesis import strategies as st

import knobwise
from knobwise.envs.readers import column_names
from knobwise.envs.readers.arff import arff_frame
from knobwise.envs.readers.frames import read_frame
from knobwise.envs.readers.long_table import read_long_table, table_from_frame
from knobwise.experiments.settings.profiles import JointProfile, TableProfile, read_profile

NAN = float("nan")


def read(frame, **choices):
    return table_from_frame(frame, name="t", source="t.csv", **choices)


def runs(**columns):
    """Two trials of two modes for two inputs."""
    rows = {
        "uid": np.repeat(["x", "y"], 4),
        "trial": [1, 2, 1, 2, 1, 2, 1, 2],
        "mode": ["fast", "fast", "full", "full"] * 2,
        "accuracy": [0, 1, 1, 1, 0, 0, 1, 0],
        "latency_ms": [10.0, 12.0, 20.0, 20.0, 11.0, 11.0, 30.0, 20.0],
    }
    return pl.DataFrame(rows | columns)


# -- other names of columns ------------------------------------------------------------------------

NAMED = {"id": "uid", "repeat": "trial"}


@pytest.mark.parametrize(
    "trials",
    [
        [1, 2, 1, 2, 1, 2, 1, 2],
        ["9", "10"] * 4,
        ["first", "second"] * 4,
        [False, True] * 4,
        [0.5, None] * 4,
    ],
    ids=["numbers", "text", "names", "flags", "gaps"],
)
def test_ids_and_repeats_have_the_names_that_are_given(tmp_path, trials):
    runs(trial=trials).write_csv(tmp_path / "t.csv")
    for made in (
        read(runs(trial=trials), **NAMED),
        knobwise.read(tmp_path / "t.csv", **NAMED),
        read_profile(TableProfile(path=str(tmp_path / "t.csv"), **NAMED)),
    ):
        assert (made.sample_ids, [knob.name for knob in made.knobs]) == (("x", "y"), ["mode"])
        identical(made.accuracy, [[0.5, 1.0], [0.0, 0.5]])
        order = [[10.0, 12.0], [20.0, 20.0]] if trials[1] else [[12.0, 10.0], [20.0, 20.0]]
        identical(made.measurements_ms[0], order)


def test_columns_of_our_names_are_not_used_where_others_are_named():
    rows = runs(sample_id=range(8), repeat=7, question_id=range(8))
    made = read(rows, **NAMED)
    identical(made.accuracy, read(runs(), **NAMED).accuracy)
    assert [note.split(":")[0] for note in made.notes[:2]] == ["column sample_id", "column repeat"]
    # a key that is used is not noted as unused
    made = read(runs().rename({"uid": "question_id"}), id="question_id", repeat="trial")
    assert made.sample_ids == ("x", "y")
    assert not any("question_id" in note for note in made.notes)


def test_an_id_may_be_the_group_and_is_no_feature():
    made = read(runs(size=[1] * 4 + [2] * 4), **NAMED, group="uid", features="auto")
    assert made.clusters == ("x", "y")
    assert [column.name for column in made.columns] == ["size"]


@pytest.mark.parametrize("suffix", ["csv", "parquet", "npz", "pt", "arff"])
def test_a_feature_file_has_the_same_name_of_ids(tmp_path, suffix):
    path = tmp_path / f"f.{suffix}"
    rows = {"uid": ["y", "x"], "size": [2.0, 1.0]}
    if suffix == "npz":
        np.savez(path, **rows)
    elif suffix == "pt":
        torch.save(rows | {"size": torch.tensor(rows["size"])}, path)
    elif suffix == "arff":
        path.write_text(
            "@attribute uid string\n@attribute trial numeric\n@attribute size real\n"
            "@data\ny,1,2\nx,1,1\n"
        )
    else:
        getattr(pl.DataFrame(rows).with_columns(trial=1), f"write_{suffix}")(path)
    made = read(runs(), **NAMED, features=path)
    (block,) = made.features.values()
    identical(block, [[1.0], [2.0]])
    # a saved table has its own ids, but a file of features may have other names
    read(runs(), **NAMED).save(tmp_path / "t.safetensors")
    profile = {"path": str(tmp_path / "t.safetensors"), **NAMED}
    again = read_profile(TableProfile(**profile, features=str(path)))
    identical([*again.features.values()], [block])
    with input_error(r"profile\.id"):
        read_profile(TableProfile(**profile))


def test_features_in_memory_have_the_name_too():
    made = knobwise.read(runs(), {"uid": ["y", "x"], "size": [[2.0], [1.0]]}, **NAMED)
    identical(made.features["size"], [[1.0], [2.0]])


def test_joined_tables_have_the_names_in_each_file(tmp_path):
    for name in ("a", "b"):
        runs().write_csv(tmp_path / f"{name}.csv")
    paths = [str(tmp_path / f"{name}.csv") for name in ("a", "b")]
    made = read_profile(JointProfile(paths=paths, **NAMED))
    assert (made.datasets, made.sample_ids) == (("a", "a", "b", "b"), ("x", "y", "x", "y"))


# -- words for right -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "right", "accuracy"),
    [
        (["ok", "timeout"], "ok", [1.0, 0.0]),
        (["OK ", "?"], ["ok", "done"], [1.0, NAN]),
        (["true", ""], True, [1.0, NAN]),
        ([5.0, 3.0], [4, 5], [1.0, 0.0]),
        ([True, False], False, [0.0, 1.0]),
    ],
)
def test_words_that_count_as_right(values, right, accuracy):
    """Also where they are columns of a wide table."""
    columns = {"mode": ["a", "b"], "status": values, "latency_ms": [1.0, 2.0]}
    made = read(pl.DataFrame({"sample_id": "x", **columns}), accuracy="status", right=right)
    wanted = torch.tensor([accuracy])
    identical(made.accuracy, wanted[:, ~wanted.isnan()[0]])
    wide = pl.DataFrame({"sample_id": ["x"], "a": values[:1], "b": values[1:]})
    made = read(wide, wide=["a", "b"], wide_latency=[1, 2], right=right)
    identical(made.accuracy, wanted[:, ~wanted.isnan()[0]])


def test_verdicts_are_right_where_the_task_expects_them():
    """A table of BenchExec: task 1 expects false, and one solver says true of everything."""
    rows = [
        ("0.yml", "good", "true", "correct"),
        ("1.yml", "good", "false(unreach-call)", "correct"),
        ("0.yml", "yes", "true", "correct"),
        ("1.yml", "yes", "true", "wrong"),
    ]
    names = ["task", "run set", "status", "category"]
    frame = pl.DataFrame(rows, schema=names, orient="row").with_columns(seconds=1.0)
    options = {"id": "task", "latency": "seconds", "knobs": ["run set"]}
    made = read(frame, accuracy="category", right="correct", **options)
    identical(made.accuracy, [[1.0, 1.0], [1.0, 0.0]])
    made = read(frame, accuracy="status", right="true", **options)
    assert any("1 rows say false(…)" in note for note in made.notes)
    identical(made.accuracy, [[1.0, 1.0], [0.0, 1.0]])
    # plain words of a judge are no verdicts
    judged = frame.with_columns(status=pl.Series(["true", "false", "true", "true"]))
    made = read(judged, accuracy="status", right="true", **options)
    assert not any("false(" in note for note in made.notes)


# -- wide tables -----------------------------------------------------------------------------------

WIDE = {"wide": ["small", "large"], "wide_latency": [12, 30.5]}


def wide(**columns):
    rows = {"prompt": ["a", "b", "c"], "small": [0, 1, None], "large": [1.0, NAN, 0.5]}
    return pl.DataFrame(rows | columns)


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.25, 1.0, NAN, None]), min_size=3, max_size=3),
        min_size=1,
        # five samples with a setting each would be a log of decisions
        max_size=4,
    ).filter(lambda cells: any(x is not None and x == x for row in cells for x in row))
)
def test_a_wide_table_is_the_long_one(cells):
    names = ["m 2", "m 1", "7"]
    columns = dict(zip(names, zip(*cells, strict=True), strict=True))
    rows = pl.DataFrame({"sample_id": range(len(cells)), **columns}, strict=False)
    made = read(rows, wide=names, wide_latency=[2, 1, 7])
    long = rows.unpivot(names, index="sample_id", variable_name="configuration")
    times = {name: float(name[-1]) for name in names}
    long = long.with_columns(
        accuracy=pl.col("value").cast(pl.Float64).fill_nan(None),
        latency_ms=pl.col("configuration").replace_strict(times),
    )
    # where nothing was measured there is no row; with a time it might be one that failed
    long = long.drop("value").drop_nulls("accuracy")
    assert made.digest == read(long, knobs=["configuration"]).digest
    assert int(made.mask.sum()) == sum(x is not None and x == x for row in cells for x in row)


def test_columns_that_are_equal_in_a_whole_wide_table_are_no_knobs():
    rows = wide(version=["v2"] * 3, usd=[0.5] * 3)
    for unmeasured in (["small", "large"], ["small", "none"]):
        frame = rows.with_columns(none=pl.lit(None, pl.Float64))
        table = read(frame, id="prompt", wide=unmeasured, wide_latency=[12, 30])
        assert [knob.name for knob in table.knobs] == ["configuration"]
    hot = pl.concat([wide(heat=[0] * 3), wide(heat=[1] * 3)])
    table = read(hot, id="prompt", **WIDE)
    assert [knob.name for knob in table.knobs] == ["heat", "configuration"]


def test_a_wide_table_from_a_file(tmp_path):
    """Empty cells, `?` and NaN are not measured; times are numbers or columns."""
    (tmp_path / "w.csv").write_text(
        "prompt,small,large,small_ms,large_ms\na,0,1,10,20\nb,?,nan,11,21\nc,1,,12,22\nd,1,0.5,13,\n"
    )
    by_columns = {"wide": ["small", "large"], "wide_latency": ["small_ms", "large_ms"]}
    made = knobwise.read(tmp_path / "w.csv", id="prompt", **by_columns)
    assert (made.sample_ids, made.label(0)) == (("a", "c", "d"), "configuration=large")
    identical(made.accuracy, [[1.0, 0.0], [NAN, 1.0], [NAN, 1.0]])
    identical(made.latency_ms, [[20.0, 10.0], [NAN, 12.0], [NAN, 13.0]])
    mixed = {"wide": ["small", "large"], "wide_latency": [9, "large_ms"]}
    profile = TableProfile(path=str(tmp_path / "w.csv"), id="prompt", **mixed)
    identical(read_profile(profile).latency_ms[0], [20.0, 9.0])
    # a price of each
    priced = {"wide_latency": [0.5, 2], "unit": "USD", "latency": "price"}
    made = knobwise.read(tmp_path / "w.csv", id="prompt", wide=["small", "large"], **priced)
    assert (made.unit, made.latency_ms[0].tolist()) == ("USD", [2.0, 0.5])


@pytest.mark.parametrize(
    ("columns", "words", "factor", "noted"),
    [
        (("small_s", "large_s"), {}, 1000.0, "read in s, kept in ms"),
        (("small_s", "large_s"), {"unit": "msec"}, 1.0, ""),
        (("small_s", "large_s"), {"unit": "min"}, 60_000.0, "read in min, kept in ms"),
        (("small_us", "large_us"), {}, 0.001, "read in us"),
        # the sizes of models, as in YOLO's names
        (("lat_s", "lat_m"), {}, 1.0, "lat_s: read in ms; if it is in another unit"),
        (("small_cost", "large_cost"), {}, 1.0, "small_cost, large_cost: read in ms"),
        (("a_usd_per_hour", "b_usd_per_hour"), {"unit": "USD"}, 1.0, ""),
        (
            ("a_usd_per_hour", "b_usd_per_hour"),
            {},
            1.0,
            "a_usd_per_hour, b_usd_per_hour: read in ms",
        ),
    ],
)
def test_the_unit_of_a_wide_table(columns, words, factor, noted):
    times = dict(zip(columns, ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]), strict=True))
    options = {"id": "prompt", "wide": ["small", "large"], "wide_latency": list(columns)}
    made = read(wide(**times), **options, **words)
    torch.testing.assert_close(made.latency_ms[0], torch.tensor([4.0, 1.0]) * factor)
    assert noted in "\n".join(made.notes)


def test_a_wide_table_with_knobs_and_features():
    rows = pl.concat([wide(tokens=t, length=[1, 2, 3], large=t / 200) for t in (100, 200)])
    rows = rows.with_columns(small=pl.Series([0, 1, 1] * 2))
    for knobs in (None, ["tokens"], ["configuration", "tokens"]):
        made = read(rows, id="prompt", knobs=knobs, features=["length"], **WIDE)
        assert {knob.name for knob in made.knobs} == {"configuration", "tokens"}
        assert made.num_configurations == 4
        identical(made.features["features"], [[1.0], [2.0], [3.0]])


def test_rows_of_a_wide_table_without_ids_are_samples():
    made = read(wide(), **WIDE)
    assert made.sample_ids == ("0", "1", "2")
    assert "sample_id" in made.notes[0]


@pytest.mark.parametrize(
    ("rows", "choices", "named"),
    [
        # names of columns
        (
            runs(),
            NAMED | {"id": "run_id"},
            "id=run_id: .*but uid, trial, mode, accuracy, latency_ms$",
        ),
        (runs(), NAMED | {"repeat": "run_id"}, "repeat=run_id: .*but uid, .*, latency_ms$"),
        (runs(trial=1), NAMED, "same repeat"),
        (runs(uid=[2.0**60] * 4 + [2.0**61] * 4), NAMED, "'uid'"),
        # words for right
        (runs(accuracy=["ok", "crash"] * 4), NAMED, "'accuracy'.*right=…"),
        (runs(accuracy=["ok", "crash"] * 4), NAMED | {"right": "fine"}, "right=fine: .*accuracy"),
        (
            runs(accuracy=["ok", "crash"] * 4),
            NAMED | {"right": "ok", "accuracy": "status"},
            "accuracy=status: .*but uid",
        ),
        # wide tables
        (wide(), {"wide": ["small", "large"]}, "wide_latency"),
        (wide(), {"wide_latency": [1, 2]}, "wide="),
        (wide(), WIDE | {"wide_latency": [1]}, r"wide_latency=\[1\]"),
        (wide(), WIDE | {"wide_latency": [1, 2, 3]}, "wide_latency"),
        (wide(), WIDE | {"wide_latency": [1, "large_ms"]}, "wide_latency=large_ms: .*but prompt"),
        (wide(), WIDE | {"wide_latency": [1, True]}, "wide_latency=True"),
        (wide(), WIDE | {"wide_latency": [1, -1]}, "latency_ms"),
        (wide(), WIDE | {"wide_latency": [1, "prompt"]}, "'prompt'"),
        (
            wide(a_s=1.0, b_ms=2.0),
            WIDE | {"wide_latency": ["a_s", "b_ms"]},
            "a_s, b_ms: .*several units, s, ms",
        ),
        (
            wide(a_tokens_per_s=1.0, b_tokens_per_s=2.0),
            WIDE | {"wide_latency": ["a_tokens_per_s", "b_tokens_per_s"]},
            "a_tokens_per_s: lower must be better",
        ),
        (wide(), WIDE | {"wide": ["small", "huge"]}, "wide=huge: .*but prompt, small, large"),
        (wide(), WIDE | {"wide": ["small", "small"]}, "wide="),
        (wide(), WIDE | {"wide": [], "wide_latency": []}, "wide="),
        (wide(), WIDE | {"wide": ["prompt", "small"]}, "'prompt'"),
        (wide(), WIDE | {"accuracy": "prompt"}, "prompt"),
    ],
)
def test_what_is_refused_is_named(rows, choices, named):
    with input_error(rf"^t\.csv: .*{named}"):
        read(rows, **choices)


def test_on_the_command_line_a_wide_table_names_its_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wide().write_csv("w.csv")
    command = "inspect profile=table profile.path=w.csv profile.wide=[small,big]"
    line = refused(words_of(command, "profile.wide_latency=[12,30]"), capsys)
    assert "wide=big" in line
    assert "wide_latency" in refused(words_of(command), capsys)


# -- ARFF ------------------------------------------------------------------------------------------

RUNS = """% a scenario
@RELATION ALGORITHM_RUNS

@ATTRIBUTE instance_id STRING
@ATTRIBUTE repetition NUMERIC
@ATTRIBUTE algorithm {lingeling, 'glu cose'}
@ATTRIBUTE runtime NUMERIC
@ATTRIBUTE runstatus {ok, timeout, memout, not_applicable, crash, other}

@DATA
a/1.cnf, 1, lingeling, 5.0, ok
a/1.cnf, 2, lingeling, 7.0, ok
a/1.cnf, 1, 'glu cose', 900, timeout
% a comment
a/1.cnf, 2, 'glu cose', 800, ok
b.cnf, 1, lingeling, 900, timeout
b.cnf, 1, 'glu cose', ?, memout
"""
VALUES = """@relation values
@attribute instance_id string
@attribute repetition numeric
@attribute 'number of clauses' numeric
@attribute kind {sat,unsat}
@data
b.cnf,1,20,sat
a/1.cnf,1,?,?
c.cnf,1,30,unsat
d.cnf,1,40,sat
"""


def test_a_scenario_of_aslib(tmp_path):
    """A time-out has the cut-off as its time, and is wrong; a run without a time is not known."""
    (tmp_path / "algorithm_runs.arff").write_text(RUNS)
    (tmp_path / "feature_values.arff").write_text(VALUES)
    made = read_profile(
        TableProfile(
            path=str(tmp_path / "algorithm_runs.arff"),
            features=str(tmp_path / "feature_values.arff"),
            id="instance_id",
            repeat="repetition",
            knobs=["algorithm"],
            latency="runtime",
            accuracy="runstatus",
            right="ok",
        )
    )
    assert made.sample_ids == ("a/1.cnf", "b.cnf")
    assert made.knobs[0].values == ("glu cose", "lingeling")
    identical(made.accuracy, [[0.5, 1.0], [NAN, 0.0]])
    identical(made.latency_ms, [[850.0, 6.0], [NAN, 900.0]])
    assert [column.name for column in made.columns] == ["number of clauses", "kind"]
    values = made.features["features"]
    # the value that two samples have, and a place for all others; then what is missing
    assert values[1].tolist()[0] == 20.0
    assert values[0].isnan().tolist()[0]
    assert any("1 rows without" in note for note in made.notes)


NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8
)


@given(st.lists(st.tuples(NAMES, NAMES | st.none()), max_size=6), st.sampled_from("'\""))
def test_whatever_is_quoted_is_read_back(tmp_path_factory, rows, quote):
    def quoted(name):
        if name is None:
            return "?"
        return quote + name.replace("\\", "\\\\").replace(quote, f"\\{quote}") + quote

    path = tmp_path_factory.mktemp("arff") / "t.arff"
    lines = [", ".join(map(quoted, row)) for row in rows]
    head = ["@relation x", f"@attribute {quoted('the id')} string", "@ATTRIBUTE b\tstring", "@data"]
    path.write_text("\r\n".join([*head, *lines]), encoding="utf-8")
    frame = read_frame(path)
    assert frame.columns == ["the id", "b"]
    assert frame.rows() == rows


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "@data"),
        ("@attribute a string\n", "@data"),
        ("@data\n1\n", "attributes"),
        ("@attribute a string\n@attribute a real\n@data\n1,2\n", "twice: a"),
        ("@attribute a\n@data\n1\n", "@attribute a"),
        ("@attribute a string\n@data\nx\n\n1,2\n", "line 3.* 2 values for 1"),
        ("@attribute a string\n@data\n{0 x}\n", "sparse"),
        ("@attribute a string\n@data\n'x\n", "quotes"),
    ],
)
def test_arff_that_is_refused(tmp_path, text, fault):
    (tmp_path / "t.arff").write_text(text)
    with input_error(rf"t\.arff: cannot be read as arff.*{fault}"):
        read_frame(tmp_path / "t.arff")


@pytest.mark.parametrize("suffix", ["arff", "csv", "jsonl"])
def test_tables_of_too_many_columns_are_refused(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(column_names, "MOST_COLUMNS", 5)
    for count in (5, 6):
        names = [f"c{i}" for i in range(count)]
        values = ",".join("1" * count)
        declared = "".join(f"@attribute {name} numeric\n" for name in names)
        texts = {
            "arff": f"{declared}@data\n{values}\n",
            "csv": f"{','.join(names)}\n{values}\n",
            "jsonl": json.dumps(dict.fromkeys(names, 1)),
        }
        path = tmp_path / f"t{count}.{suffix}"
        path.write_text(texts[suffix])
    assert read_frame(tmp_path / f"t5.{suffix}").width == 5
    with input_error(rf"t6\.{suffix}: more than 5 columns"):
        read_frame(tmp_path / f"t6.{suffix}")


def test_too_many_attributes_are_refused_before_rows_are_read(monkeypatch):
    monkeypatch.setattr(column_names, "MOST_COLUMNS", 1)
    with input_error("more than 1 columns"):
        arff_frame("@attribute a numeric\n@attribute b numeric\n@data\n{sparse\n")


# -- a missing value -------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_question_marks_are_missing(tmp_path, suffix):
    rows = runs(size=["?"] * 4 + ["3"] * 4, kind=["u"] * 4 + ["?"] * 4).to_dicts()
    rows[0]["accuracy"] = rows[2]["latency_ms"] = "?"
    for row in rows:
        row |= {key: str(row[key]) for key in ("accuracy", "latency_ms")}
    path = tmp_path / f"t.{suffix}"
    if suffix == "csv":
        pl.DataFrame(rows).write_csv(path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    made = read_long_table(path, **NAMED, features=["size"])
    identical(made.accuracy, [[1.0, 1.0], [0.0, 0.5]])
    identical(made.features["features"], [[NAN], [3.0]])
    assert made.columns[0].gaps
