"""Tables as spreadsheets and other programs write them: separators, encodings, decimal commas; and
JSON whose rows stand elsewhere."""

import gzip
import json

import numpy as np
import pytest
import torch
from helpers import identical, input_error

import knobwise
from knobwise.common.text_files import form_of, rows_of_text
from knobwise.envs.readers.feature_files import read_features
from knobwise.envs.readers.frames import Lines, read_frame

ROWS = [
    {
        "sample_id": f"q{10 + i}",
        "mode": mode,
        "accuracy": int(i % 3 == 0 or mode == "full"),
        "ms": ms,
    }
    for i in range(12)
    for mode, ms in (("fast", 12.5 + i), ("full", 60.5 + i))
]
HEAD = ",".join(ROWS[0])
TEXT = "\n".join([HEAD, *(",".join(map(str, row.values())) for row in ROWS)]) + "\n"


def read(path, **options):
    return knobwise.read(path, latency="ms", **options)


def check(table):
    assert table.sample_ids == tuple(f"q{10 + i}" for i in range(12))
    assert [knob.values for knob in table.knobs] == [("fast", "full")]
    assert torch.equal(table.accuracy[:, 1], torch.ones(12))
    assert table.latency_ms[3].tolist() == [15.5, 63.5]


FORMS = {
    "semicolons": TEXT.replace(",", ";"),
    "tabs": TEXT.replace(",", "\t"),
    "bars": TEXT.replace(",", "|"),
    "named": "sep=;\r\n" + TEXT.replace(",", ";").replace("\n", "\r\n"),
    "named in quotes": '"sep=|"\n' + TEXT.replace(",", "|"),
    "old line ends": TEXT.replace("\n", "\r"),
    "decimal commas": TEXT.replace(",", ";").replace(".", ","),
    "decimal commas and tabs": TEXT.replace(",", "\t").replace(".", ","),
    "quoted": TEXT.replace("fast", '"fast"').replace(",", ";"),
}
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-be-with-mark"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("form", FORMS)
def test_a_table_is_read_whatever_a_spreadsheet_made_of_it(form, encoding, tmp_path):
    content = FORMS[form].encode(encoding.removesuffix("-with-mark"))
    if encoding.endswith("mark"):
        content = b"\xfe\xff" + content
    (tmp_path / "t.csv").write_bytes(content)
    table = read(tmp_path / "t.csv")
    check(table)
    noted = [note for note in table.notes if note.endswith("read as points: ms")]
    assert len(noted) == form.startswith("decimal")
    (tmp_path / "t.tsv.gz").write_bytes(gzip.compress(content))
    check(read(tmp_path / "t.tsv.gz"))


@pytest.mark.parametrize(
    ("lines", "form"),
    [
        (["a,b", "1,2"], (",", 0)),
        (["a;b", "1,5;2,5"], (";", 0)),
        (["a,b;c", "1,2;3"], (",", 0)),  # of two that fit, the comma
        (["a,b,c", "x;y,1,2"], (",", 0)),
        (["a", "1"], (",", 0)),
        (["a;b", "1;2;3"], (";", 0)),  # a row of another length, which the parser refuses
        (['"x, y";b', "1,5;2"], (";", 0)),
        (["SEP=\t", "a\tb"], ("\t", 1)),
        ([], (",", 0)),
    ],
)
def test_the_separator(lines, form):
    assert form_of(lines) == form


def test_rows_of_text_by_hand():
    text = 'a|b\n\n1|"x|y""\n\n|z"\n  \n"2"|3|4\n'
    rows = [(1, "a|b", 2), (3, '1|"x|y""\n\n|z"', 2), (6, "  ", 1), (7, '"2"|3|4', 3)]
    assert rows_of_text(text, "|").rows() == rows
    for wrong in ('a\tb\n1\t"x\n2\ty\n', 'a\tb\n5" x\t1\n3" x\t1\n'):
        with pytest.raises(ValueError, match="line 2 "):
            rows_of_text(wrong, "\t")


def test_thousands_beside_clear_decimals_are_decimals(tmp_path):
    text = TEXT.replace(",", ";").replace("12.5", "12,500").replace(".5", ",5")
    (tmp_path / "t.csv").write_text(text)
    check(read(tmp_path / "t.csv"))


@pytest.mark.parametrize("missing", ["", "null", "None"])
def test_a_cell_without_accuracy_is_not_profiled(missing, tmp_path):
    (tmp_path / "t.csv").write_text(TEXT.replace("q10,fast,1", f"q10,fast,{missing}"))
    table = read(tmp_path / "t.csv")
    assert table.mask.sum() == 23
    assert not table.mask[0, 0]


DOCUMENTS = {
    "t.json": "\n".join(map(json.dumps, ROWS)),
    "rows.json": json.dumps(ROWS),
    "indented.jsonl": json.dumps(ROWS, indent=1),
    "array.jsonl": json.dumps(ROWS),
    "wrapped.json": json.dumps({"model": "m", "steps": [1, 2], "results": ROWS}),
    "deep.json": json.dumps({"run": {"seed": 1, "data": {"rows": ROWS}}}),
}


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("encoding", ENCODINGS[:3])
def test_rows_are_read_wherever_json_has_them(name, encoding, tmp_path):
    (tmp_path / name).write_bytes(DOCUMENTS[name].encode(encoding))
    table = read(tmp_path / name)
    check(table)
    key = {"wrapped.json": "'results'", "deep.json": "'run.data.rows'"}.get(name)
    assert any(key in note for note in table.notes) if key else not table.notes


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        (
            "t.csv",
            TEXT.replace(",", ";").replace(".5", ",500"),
            "'ms' may be decimal commas or part",
        ),
        ("t.csv", TEXT.replace("12.5", '"12,5"'), "'12,5'.*decimal comma"),
        ("t.csv", TEXT.replace(",", ";").replace("12.5", "12,5"), "'12,5'.*decimal comma"),
        ("t.csv", TEXT.replace("fast,1", "fast,nan"), "accuracy .*NaN.*q10"),
        ("t.csv", TEXT.replace("fast,1", "fast,NaN"), "accuracy .*NaN.*q10"),
        ("t.csv", TEXT.replace(",", " "), "parted by"),
        ("t.csv", TEXT.replace("q10", "ä").encode("latin-1"), "line 2 is not UTF-8"),
        ("t.csv", TEXT.encode("utf-16-le"), ""),  # without a mark
        ("t.json", json.dumps({"train": ROWS, "test": ROWS}), "train, test"),
        (
            "t.json",
            json.dumps({"note": [{"a": 1}], "runs": [{"requests": {"successful": ROWS}}]}),
            rf"{len(ROWS)} that jq .runs\[0\].requests.successful",
        ),
        ("t.csv", "a,a,b,b\n,x,,x\n" + TEXT, "columns occur twice: 'a', 'b'.*several lines"),
        ("t.json", json.dumps({"model": "m", "scores": [1, 2]}), "model, scores.*no list of rows"),
        (
            "t.json",
            json.dumps([{**ROWS[0], "accuracy": float("nan")}, *ROWS[1:]]),
            "accuracy .*NaN.*q10",
        ),
        (
            "t.json",
            json.dumps([{**ROWS[0], "ms": "NaN"}, *ROWS[1:]]),
            "'ms'.*'NaN' in row 1.*60.5 in row 2",
        ),
        ("t.json", json.dumps(ROWS)[:-9], ""),
        ("t.json", "\n".join([*map(json.dumps, ROWS), "{"]), ""),
    ],
)
def test_what_cannot_be_read_for_certain_is_refused_with_its_cause(name, content, fault, tmp_path):
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(content)
    with input_error(f"{name}: .*{fault}"):
        read(tmp_path / name)


def test_features_are_read_in_the_same_forms(tmp_path):
    text = "sample_id;tokens;sharpness\n" + "".join(f"q{10 + i};{i};{i},25\n" for i in range(12))
    (tmp_path / "f.csv").write_bytes(text.encode("utf-16"))
    features = read_features(tmp_path / "f.csv")
    assert features.blocks["features"][3].tolist() == [3, 3.25]
    assert any("sharpness" in note for note in features.notes)
    (tmp_path / "t.csv").write_text(TEXT)
    assert read(tmp_path / "t.csv", features=tmp_path / "f.csv").features["features"].shape == (
        12,
        2,
    )


def test_na_is_missing(tmp_path):
    """As R writes it."""
    text = "sample_id,mode,accuracy,latency_ms\na,x,1,2\na,y,NA,3\nb,x,0,n/a\nb,y,0.5,4\n"
    (tmp_path / "t.csv").write_text(text)
    identical(knobwise.read(tmp_path / "t.csv").accuracy, [[1.0, np.nan], [np.nan, 0.5]])


@pytest.mark.parametrize(
    ("column", "noted", "ms"),
    [
        ("seconds", True, 1e3),
        ("latency_s", True, 1e3),
        ("durationUs", True, 1e-3),
        ("latency_nanos", True, 1e-6),
        ("wall_nsec_p50", True, 1e-6),
        ("usd", True, 1),
        ("time_ms", False, 1),
        # before a statistic
        ("latency_s_mean", True, 1e3),
        ("latencySecondsP50", True, 1e3),
        ("seconds_total", True, 1e3),
        ("wall_clock_s.mean", True, 1e3),
        ("latency_s_min", True, 1e3),
        ("latency_ms_min", False, 1),
        ("latency_mean", False, 1),
        ("mins", True, 6e4),
        # may be a minimum, and anything
        ("t_min", True, 1),
        ("duration_min_mean", True, 1),
        ("elapsed_h", True, 1),
        # a price
        ("cost_per_hour", True, 1),
    ],
)
def test_a_unit_in_the_name_of_the_latency_is_read_and_noted(tmp_path, column, noted, ms):
    (tmp_path / "t.csv").write_text(f"sample_id,mode,accuracy,{column}\na,x,1,2\na,y,0,3\n")
    table = knobwise.read(tmp_path / "t.csv", latency=column)
    assert any(column in note for note in table.notes) is noted
    identical(table.latency_ms, np.float32([[2 * ms, 3 * ms]]))
    in_s = knobwise.read(tmp_path / "t.csv", latency=column, unit="d")
    identical(in_s.latency_ms, [[1.728e8, 2.592e8]])


@pytest.mark.parametrize(
    ("times", "refused"),
    [
        (["1.250", "850", "1.400", "900"], True),
        # seconds with milliseconds, whole ones, and ends that are no 0
        (["1.250", "850.000", "1.400", "900.000"], False),
        (["1.250", "8", "1.400", "9"], False),
        (["1.251", "850", "1.4", "900"], False),
        (["0.250", "850", "0.400", "900"], False),
    ],
)
def test_points_that_part_thousands_are_refused(tmp_path, times, refused):
    ids = [("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")]
    rows = [f"{name};{mode};1;{time}" for (name, mode), time in zip(ids, times, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(["sample_id;mode;accuracy;latency_ms", *rows]))
    if refused:
        with input_error("'latency_ms' seem to part thousands, as in 1.250 beside 850"):
            knobwise.read(tmp_path / "t.csv")
    else:
        made = knobwise.read(tmp_path / "t.csv")
        identical(made.latency_ms.flatten(), np.float32(times))


# -- lines before the header -----------------------------------------------------------------------

PREAMBLES = {
    "comments": "# made by a tool 1.2\n# on host a, at noon\n",
    "a comment and an empty line": "# made by a tool 1.2, on host a\n\n",
    "a run": "2026-01-01T00:00:00\nRunning ./bench\nLoad Average: 1.02, 0.9, 0.5\n",
    "sentences": "Results of Monday, with small and large\n",
}


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("preamble", PREAMBLES)
def test_lines_before_the_header_are_left_out_and_noted(preamble, separator, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(PREAMBLES[preamble] + TEXT.replace(",", separator))
    table = read(path)
    check(table)
    line = PREAMBLES[preamble].count("\n") + 1
    assert any(f"line {line}" in note for note in table.notes)
    # a row of requests is named by its line in the file
    place = Lines()
    read_frame(path, lines=place)
    assert list(place.numbers) == list(range(line + 1, line + 25))


def test_a_header_below_many_lines_is_named(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("".join(f"log {n}\n" for n in range(30)) + TEXT)
    with input_error("t.csv.*line 31"):
        read(path)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        # R leaves out the name of its row numbers
        (f"{HEAD}\n" + "".join(f"{n},q{n},fast,1,{n}.5\n" for n in range(9)), "line 2"),
        # text alone does not tell which row has the names
        ("a,b,c\n" + "x,y,z,w\nu,v,s,t\nk,l,m,n\n", "line 2"),
    ],
)
def test_a_row_that_is_longer_than_the_header_is_named(text, line, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with input_error(f"t.csv.*{line}"):
        read(path)
