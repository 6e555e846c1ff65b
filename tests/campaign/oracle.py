"""What measurements say, read from the same bytes by other means: `csv`, `json`, `zipfile` and
NumPy; Parquet by rows, since no other decoder is installed. Each function gives what is wrong with
what the product accepted; "" if nothing.
"""

import csv
import io
import json
import math
import re
import statistics
import struct
import zipfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

NUMERAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
COLUMNS = [
    "sample_id",
    "accuracy",
    "latency_ms",
    "dataset",
    "split",
    "repeat",
    "question_id",
    "image_id",
]
DTYPES = {
    "F32": "<f4",
    "F64": "<f8",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "U8": "u1",
    "U64": "<u8",
    "BOOL": "?",
    "I8": "i1",
}
CORE = ("tier", "top_k", "num_active_blocks")
KNOBS = ("max_crops", "top_k", "num_active_blocks")
Rows = Sequence[Mapping[str, Any]]


class Wrong(Exception):
    """Accepted, and should have been refused."""


def strict(content):
    """JSON; raises Wrong for what is none, and for a key twice."""

    def unique(pairs):
        if len(dict(pairs)) < len(pairs):
            raise Wrong("a key occurs twice in an object")
        return dict(pairs)

    try:
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise Wrong(f"no JSON ({type(error).__name__})") from error


def csv_rows(content):
    try:
        lines = list(csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise Wrong(f"no CSV ({error})") from error
    head, rows = lines[0], [line for line in lines[1:] if line]
    if any(len(line) > len(head) for line in rows):
        raise Wrong("a row has more cells than there are columns")
    return head, [
        dict(zip(head, [*line, *[""] * (len(head) - len(line))], strict=True)) for line in rows
    ]


def json_rows(content):
    rows = [strict(line) for line in content.split(b"\n") if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise Wrong("a line that holds no object")
    return list(dict.fromkeys(key for row in rows for key in row)), rows


def parquet_rows(content):
    frame = pl.read_parquet(
        io.BytesIO(content), parallel="none", use_statistics=False, low_memory=True
    )
    return frame.columns, frame.to_dicts()


def number(value, logical):
    """A measurement; None where it is missing."""
    text = value.strip().lower() if isinstance(value, str) else value
    if text is None or text == "":
        return None
    if text in ("true", "false") or isinstance(text, bool):
        if not logical:
            raise Wrong(f"{value!r} as a time")
        return float(text in ("true", True))
    if (isinstance(text, str) and not NUMERAL.fullmatch(text)) or not isinstance(
        text, str | int | float
    ):
        raise Wrong(f"{value!r} as a number")
    if not math.isfinite(float(text)):
        raise Wrong(f"{value!r} as a measurement")
    return float(text)


def identity(value):
    """An id: the text 7.0 is another one than 7, the number 7.0 is not."""
    return value if isinstance(value, str) else name(value)


def name(value):
    """The value of a knob: 7, 7.0 and the numeral 7 are one."""
    if (
        value is None
        or (isinstance(value, float) and not math.isfinite(value))
        or isinstance(value, list | dict | bytes)
    ):
        raise Wrong(f"{value!r} as an id or the value of a knob")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        if not NUMERAL.fullmatch(value) or re.match(r"[+-]?0\d", value):
            return value
        value = int(value) if re.fullmatch(r"[+-]?\d+", value) else float(value)
    return str(int(value) if math.isfinite(value) and value == int(value) else value)


def wrong_table(table, head, rows):
    """A `ProfileTable` against the rows of a long table."""
    if len(set(head)) < len(head):
        raise Wrong("a column occurs twice")
    knobs, accuracy = (
        [knob.name for knob in table.knobs],
        "accuracy" if "accuracy" in head else "score",
    )
    if {*knobs} & {*COLUMNS, accuracy} or not {*knobs} <= {*head}:
        raise Wrong(f"the knobs {knobs}")
    cells = defaultdict(list)
    for row in rows:
        right, ms = number(row.get(accuracy), True), number(row.get("latency_ms"), False)
        if right is not None and ms is not None:
            key = identity(row["dataset"]) if "dataset" in head else ""
            cells[
                key, identity(row.get("sample_id")), tuple(name(row.get(knob)) for knob in knobs)
            ].append((right, ms))
    return _compared(table, cells, "dataset" in head)


def _compared(table, cells, named):
    measured = {}
    for row, column in table.mask.nonzero().tolist():
        setting = tuple(name(value) for value in table.configuration(column).values())
        place = table.dataset_names[row] if named else "", table.sample_ids[row], setting
        measured[place] = float(table.accuracy[row, column]), float(table.latency_ms[row, column])
    if measured.keys() != cells.keys():
        return f"{len(measured.keys() ^ cells.keys())} cells too many or missing"
    for place, values in cells.items():
        rights, times = zip(*values, strict=True)
        if not all(-1.1e-6 <= right <= 1 + 1.1e-6 for right in rights) or not all(
            0 <= ms < 3.5e38 for ms in times
        ):
            return f"{place}: out of range"
        expected = min(max(statistics.fmean(rights), 0), 1), statistics.median(times)
        if not np.allclose(measured[place], expected, rtol=1e-5, atol=1e-6):
            return f"{place}: {measured[place]}, the file says {expected}"
    return ""


def wrong_configurations(table, files, core):
    """A `ProfileTable` against exp5 and exp6 files, or core_exp files."""
    sides = {
        "accuracy": defaultdict(list),
        "ms": defaultdict(list),
    }
    pattern = (
        r"tier-([a-z]+)_crops\d+_topk(\d+)_blocks(\d+)"
        if core
        else r"crops(\d+)_topk(\d+)_blocks(\d+)"
    )
    documents = {path: strict(content) for path, content in files.items()}
    lists = {path: next(iter(_rows_of(document)), []) for path, document in documents.items()}
    by = (
        "question_id"
        if all(row.get("question_id") is not None for rows in lists.values() for row in rows)
        else ""
    )
    for path, document in documents.items():
        match = re.search(pattern, path)
        assert match
        setting = dict(zip(CORE if core else KNOBS, match.groups(), strict=True))
        for record in (document, *lists[path], *(document.get("summary") or [])):
            if any(
                name(record[knob]) != name(value)
                for knob, value in setting.items()
                if knob in record
            ):
                raise Wrong(f"{path}: another {list(setting)} inside")
        for row in lists[path]:
            if core and None in (row.get("accuracy"), row.get("T_total")):
                continue
            place = "", identity(row.get(by or "sample_id")), tuple(map(name, setting.values()))
            for side, keys in (
                ("accuracy", ("score", "accuracy")),
                ("ms", ("T_total_ms", "latency_total", "T_total")),
            ):
                if (side == "accuracy" and not core and "exp6" in path) or (
                    side == "ms" and "exp5" in path
                ):
                    continue
                key = next(
                    (key for key in keys if any(key in other for other in lists[path])), keys[0]
                )
                value = number(row.get(key), side == "accuracy")
                if value is not None:
                    sides[side][place].append(value)
    both = sides["accuracy"].keys() & sides["ms"].keys()
    cells = {}
    for place in both:
        rights, times = sides["accuracy"][place], sides["ms"][place]
        cells[place] = [(statistics.fmean(rights), ms) for ms in times]
    return _compared(table, cells, False)


def _rows_of(document):
    keys = ("all_samples", "per_sample_latencies", "per_sample_results")
    return (document[key] for key in keys if document.get(key))


def wrong_features(features, content, zipped):
    """`Features` against a file of arrays."""
    arrays, words = npz_arrays(content) if zipped else safetensors_arrays(content)
    ids = words["sample_id"] if "sample_id" in words else arrays.pop("sample_id").tolist()
    arrays.pop("sample_id", None)
    arrays.pop("dataset", None)
    if [identity(value) for value in ids] != list(features.sample_ids):
        return "other ids"
    if arrays.keys() != features.blocks.keys():
        return f"blocks {list(features.blocks)}, the file has {list(arrays)}"
    for key, block in features.blocks.items():
        with np.errstate(over="ignore", invalid="ignore"):
            values = arrays[key].reshape(len(ids), -1).astype(np.float32)
        if not np.array_equal(values, block.numpy(), equal_nan=True) or np.isinf(values).any():
            return f"other numbers in {key}"
    return ""


def npz_arrays(content):
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if len(set(archive.namelist())) < len(archive.namelist()):
                raise Wrong("an array occurs twice")
            read = {n: io.BytesIO(archive.read(n)) for n in archive.namelist()}
        return {
            n.removesuffix(".npy"): np.lib.format.read_array(part) for n, part in read.items()
        }, {}
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError) as error:
        raise Wrong(f"no archive of arrays ({error})") from error


def safetensors_arrays(content):
    size = struct.unpack("<Q", content[:8])[0]
    head = strict(content[8 : 8 + size])
    words = {
        key: text
        for key, text in (head.pop("__metadata__", None) or {}).items()
        if key == "sample_id"
    }
    words = {key: strict(text.encode()) for key, text in words.items()}
    arrays = {}
    for key, about in head.items():
        start, stop = about["data_offsets"]
        part = content[8 + size + start : 8 + size + stop]
        arrays[key] = np.frombuffer(part, DTYPES[about["dtype"]]).reshape(about["shape"])
    return arrays, words


def wrong_beams(table, content):
    """A `BeamTable` against legacy beams or RL data."""
    document, expected = strict(content), Counter[Any]()
    if isinstance(document, list):
        document = {str(record.get("query_id", i)): record for i, record in enumerate(document)}
    for key, record in document.items():
        if key == "_meta":
            continue
        if "id_list" in record:
            for ids, score in zip(record["id_list"], record["score_list"], strict=True):
                ids = ids[:-1] if ids and name(ids[-1]) == name(key) else ids
                expected[name(key), tuple(map(name, ids)), _rounded(number(score, False))] += 1
            continue
        pool = record.get("candidate_pool_ids")
        for row in record.get("pointer_candidates") or ():
            if row.get("eval_failed") or row.get("vqa_eval_mode") in ("error", "fallback"):
                continue
            pointer, ids = row.get("pointer", row.get("pointer_pos")), row.get("pointer_global")
            if None not in (ids, pool, pointer) and [int(pool[int(i)]) for i in pointer] != [
                int(i) for i in ids
            ]:
                raise Wrong("a pointer that contradicts its global one")
            ids = pointer if ids is None else ids
            score = row.get("beam_score")
            expected[
                name(key),
                tuple(map(name, ids)),
                _rounded(None if score is None else number(score, False)),
            ] += 1
    got = Counter[Any]()
    scores = table.fields.get("beam_score")
    for query, row in enumerate(table.sequences.tolist()):
        for beam, places in enumerate(row):
            ids = [table.pool[query, place].item() for place in places if place >= 0]
            if ids:
                score = None if scores is None else float(scores[query, beam])
                got[name(table.query_ids[query]), tuple(map(name, ids)), _rounded(score)] += 1
    expected = Counter(
        {beam: count for beam, count in expected.items() if beam[1]}
    )  # empty ones are dropped, counted
    return (
        ""
        if got == expected
        else f"{(got - expected).total()} beams too many, {(expected - got).total()} missing"
    )


def _rounded(score):
    return None if score is None or math.isnan(score) else float(f"{np.float32(score):.5g}")
