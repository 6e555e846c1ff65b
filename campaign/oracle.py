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
from itertools import chain, zip_longest

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
CORE = ("tier", "top_k", "num_active_blocks")
KNOBS = ("max_crops", "top_k", "num_active_blocks")
SIDES = {
    "accuracy": ("exp6", "score", "accuracy"),
    "ms": ("exp5", "T_total_ms", "latency_total", "T_total"),
}
"""What is measured → the experiment that has none of it, and its names, the first that is there."""


MISSING = ("", "?", "null", "none", "na", "n/a", "#n/a")
"""Spellings of no number, as docs/profiles.md lists them."""


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
    return head, [dict(zip_longest(head, line, fillvalue="")) for line in rows]


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
    if text is None or text in MISSING:
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
    endless = isinstance(value, float) and not math.isfinite(value)
    if endless or isinstance(value, list | dict | bytes | None):
        raise Wrong(f"{value!r} as an id or the value of a knob")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        if not NUMERAL.fullmatch(value) or re.match(r"[+-]?0\d", value):
            return value
        value = int(value) if re.fullmatch(r"[+-]?\d+", value) else float(value)
    return str(int(value) if math.isfinite(value) and value == int(value) else value)


def dotted(head, rows):
    """Columns and rows in which the parts of objects have names such as `config.size`."""
    flat, names = [], dict.fromkeys(head)
    for row in rows:
        cells = {}
        for column, value in row.items():
            parts = {column: value}
            if isinstance(value, dict):
                parts = {f"{column}.{part}": inner for part, inner in value.items()}
            cells |= parts
        flat.append(cells)
        names |= dict.fromkeys(cells)
    return [*names], flat


def wrong_table(table, head, rows):
    """A `ProfileTable` against the rows of a long table."""
    if len(set(head)) < len(head):
        raise Wrong("a column occurs twice")
    head, rows = dotted(head, rows)
    knobs = [knob.name for knob in table.knobs]
    accuracy = "accuracy" if "accuracy" in head else "score"
    if {*knobs} & {*COLUMNS, accuracy} or not {*knobs} <= {*head}:
        raise Wrong(f"the knobs {knobs}")
    cells = defaultdict(list)
    for row in rows:
        right, ms = number(row.get(accuracy), True), number(row.get("latency_ms"), False)
        if right is not None and ms is not None:
            key = identity(row["dataset"]) if "dataset" in head else ""
            setting = tuple(name(row.get(knob)) for knob in knobs)
            cells[key, identity(row.get("sample_id")), setting].append((right, ms))
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
        possible = -1.1e-6 <= min(rights) <= max(rights) <= 1 + 1.1e-6
        if not (possible and 0 <= min(times) <= max(times) < 3.5e38):
            return f"{place}: out of range"
        expected = min(max(statistics.fmean(rights), 0), 1), statistics.median(times)
        if not np.allclose(measured[place], expected, rtol=1e-5, atol=1e-6):
            return f"{place}: {measured[place]}, the file says {expected}"
    return ""


def wrong_configurations(table, files, core):
    """A `ProfileTable` against exp5 and exp6 files, or core_exp files."""
    sides = {side: defaultdict(list) for side in SIDES}
    pattern = r"crops(\d+)_topk(\d+)_blocks(\d+)"
    if core:
        pattern = r"tier-([a-z]+)_crops\d+_topk(\d+)_blocks(\d+)"
    documents = {path: strict(content) for path, content in files.items()}
    lists = {path: _rows_of(document) for path, document in documents.items()}
    numbered = all(row.get("question_id") is not None for row in chain(*lists.values()))
    for path, document in documents.items():
        setting = dict(zip(CORE if core else KNOBS, re.search(pattern, path).groups(), strict=True))
        for record in (document, *lists[path], *(document.get("summary") or [])):
            for knob, value in setting.items():
                if knob in record and name(record[knob]) != name(value):
                    raise Wrong(f"{path}: another {knob} inside")
        known = {key for row in lists[path] for key in row}
        for row in lists[path]:
            if core and None in (row.get("accuracy"), row.get("T_total")):
                continue
            sample = identity(row.get("question_id" if numbered else "sample_id"))
            place = "", sample, tuple(map(name, setting.values()))
            for side, (elsewhere, *keys) in SIDES.items():
                if elsewhere in path and not core:
                    continue
                key = next((key for key in keys if key in known), keys[0])
                value = number(row.get(key), side == "accuracy")
                if value is not None:
                    sides[side][place].append(value)
    cells = {}
    for place in sides["accuracy"].keys() & sides["ms"].keys():
        right = statistics.fmean(sides["accuracy"][place])
        cells[place] = [(right, ms) for ms in sides["ms"][place]]
    return _compared(table, cells, False)


def _rows_of(document):
    keys = ("all_samples", "per_sample_latencies", "per_sample_results")
    return next((document[key] for key in keys if document.get(key)), [])


def wrong_features(features, content, zipped):
    """`Features` against a file of arrays."""
    arrays = npz_arrays(content) if zipped else safetensors_arrays(content)
    ids = arrays.pop("sample_id")
    ids = ids if isinstance(ids, list) else ids.tolist()
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
        arrays = {n: np.lib.format.read_array(part) for n, part in read.items()}
        return {n.removesuffix(".npy"): array for n, array in arrays.items()}
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError) as error:
        raise Wrong(f"no archive of arrays ({error})") from error


def safetensors_arrays(content):
    size = struct.unpack("<Q", content[:8])[0]
    head = strict(content[8 : 8 + size])
    words = head.pop("__metadata__", None) or {}
    arrays = {}
    for key, about in head.items():
        start, stop = about["data_offsets"]
        part = content[8 + size + start : 8 + size + stop]
        kind, bits = re.fullmatch(r"([A-Z]+)(\d*)", about["dtype"]).groups()
        # such as f4 for F32; BOOL is a byte
        dtype = np.dtype("?" if kind == "BOOL" else f"<{kind.lower()}{int(bits) // 8}")
        arrays[key] = np.frombuffer(part, dtype).reshape(about["shape"])
    if "sample_id" in words:
        arrays["sample_id"] = strict(words["sample_id"].encode())
    return arrays


def wrong_beams(table, content):
    """A `BeamTable` against legacy beams or RL data."""
    document, expected = strict(content), Counter()
    if isinstance(document, list):
        document = {str(record.get("query_id", i)): record for i, record in enumerate(document)}
    for key, record in document.items():
        if key == "_meta":
            continue
        if "id_list" in record:
            for ids, score in zip(record["id_list"], record["score_list"], strict=True):
                ids = ids[:-1] if ids and name(ids[-1]) == name(key) else ids
                expected[_beam(key, ids, number(score, False))] += 1
            continue
        pool = record.get("candidate_pool_ids")
        for row in record.get("pointer_candidates") or ():
            if row.get("eval_failed") or row.get("vqa_eval_mode") in ("error", "fallback"):
                continue
            pointer, ids = row.get("pointer", row.get("pointer_pos")), row.get("pointer_global")
            if None not in (ids, pool, pointer):
                pointed = [int(pool[int(i)]) for i in pointer]
                if pointed != [*map(int, ids)]:
                    raise Wrong("a pointer that contradicts its global one")
            ids = pointer if ids is None else ids
            expected[_beam(key, ids, number(row.get("beam_score"), False))] += 1
    got = Counter()
    scores = table.fields.get("beam_score")
    for query, row in enumerate(table.sequences.tolist()):
        for beam, places in enumerate(row):
            ids = [table.pool[query, place].item() for place in places if place >= 0]
            if ids:
                score = math.nan if scores is None else float(scores[query, beam])
                got[_beam(table.query_ids[query], ids, score)] += 1
    # empty ones are dropped, counted
    expected = Counter({beam: count for beam, count in expected.items() if beam[1]})
    if got == expected:
        return ""
    return f"{(got - expected).total()} beams too many, {(expected - got).total()} missing"


def _beam(query, ids, score):
    rounded = None
    if score is not None and not math.isnan(score):
        rounded = float(f"{np.float32(score):.5g}")
    return name(query), tuple(map(name, ids)), rounded
