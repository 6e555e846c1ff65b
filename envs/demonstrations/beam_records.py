"""Reading the queries and beams in a JSON file of recorded beams, strictly.

`beam_files` builds the table from them.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from knobwise.common.errors import InputError
from knobwise.common.json_text import read_json
from knobwise.envs.demonstrations.settings import FIELDS, METHODS

Record = dict[str, Any]
"""An object of a JSON file."""
NUMERAL = re.compile(r"[0-9]{1,18}")
"""A whole number ≥ 0 that fits into int64, as text."""


class Beam(NamedTuple):
    """A recorded sequence of demonstrations."""

    ids: list[int]
    """Ids of the candidates, in the order shown."""
    found_by: int
    """Index into `METHODS`."""
    round: int
    """1, 2, … for draws of a policy, else 0."""
    outcomes: list[float]
    """A value for each of `FIELDS`, NaN where not recorded."""


class Query(NamedTuple):
    """A query of a file, with its pool and its beams."""

    id: int
    image: str
    """The image that it asks about, "" if unknown."""
    pool: list[int]
    """Ids of its candidates."""
    beams: list[Beam]


def beam_file(path: str | Path) -> Path:
    """Return the file, or the only JSON file in a folder.

    Raises InputError if the folder does not hold exactly one.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    files = sorted(path.glob("*.json"))
    if len(files) != 1:
        raise InputError(f"{path}: is a folder with {len(files)} JSON files; give the path of one")
    return files[0]


def read_queries(path: Path, counts: Counter[str]) -> tuple[list[Query], object]:
    """Return the queries of a file, and its `_meta`, None without one.

    What is dropped or noticed is counted in `counts`. Raises InputError as `read_beam_data`.
    """
    content = read_json(path)
    meta = None
    records: list[tuple[object, Any]] = []
    # a list of records, or an object by query
    if isinstance(content, list) and all(isinstance(record, dict) for record in content):
        records += zip(_keys_of(path, content, counts), content, strict=True)
    elif isinstance(content, dict):
        meta = content.pop("_meta", None)
        records += content.items()
    if not records:
        raise InputError(
            f"{path}: holds no queries; expected {{query id: {{…}}}}, or a list with query_id"
        )
    queries = [_read_query(f"{path}: query {key}", key, record, counts) for key, record in records]
    # JSON keys 7 and 07 are different, but the same row
    number, times = Counter(query.id for query in queries).most_common(1)[0]
    if times > 1:
        raise InputError(f"{path}: {times} records are of query {number}; keep only one")
    return queries, meta


def _keys_of(path: Path, records: list[Record], counts: Counter[str]) -> list[object]:
    """Return the query of each record in a list.

    A record names its query as `query_id`. If none does, it is the id that ends all rows of a
    record, as beam generators write it, or else the position in the list, which is counted. Raises
    InputError if only some records name their query.
    """
    keys = [record.get("query_id") for record in records]
    if all(key is None for key in keys):
        last = [_last_ids(record) for record in records]
        # a single row proves nothing: its last id may be a demonstration
        repeated = max(map(len, last), default=0) > 1
        if repeated and all(len(set(ids)) < 2 for ids in last):
            keys = [next(iter(ids), None) for ids in last]
        else:
            keys = [*range(len(keys))]
            counts[
                "records name no query: their positions in the list, from 0, are taken as rows"
            ] += len(keys)
    if None in keys:
        raise InputError(
            f"{path}: record {keys.index(None)} of the list names no query, but others do; add "
            "query_id"
        )
    return keys


def _last_ids(record: Record) -> list[str]:
    """Return the ids at the end of the rows of a legacy record."""
    rows = record.get("id_list")
    if not isinstance(rows, list):
        return []
    return [str(row[-1]) for row in rows if isinstance(row, list) and row]


def whole_numbers(where: str, what: str, values: Any) -> list[int]:
    """Return a list of whole numbers ≥ 0. Raises InputError, with `where` and `what`, for others.

    A string of digits counts as a whole number, a float does not.
    """
    # anything but a list is wrong as a whole
    wrong = [values]
    if isinstance(values, list):
        whole = [type(x) in (int, str) and NUMERAL.fullmatch(str(x)) for x in values]
        wrong = [x for x, fits in zip(values, whole, strict=True) if not fits]
    if wrong:
        raise InputError(
            f"{where}: {what} holds {wrong[0]!r}, expected a list of ids, whole numbers ≥ 0"
        )
    return [*map(int, values)]


def _legacy_rows(
    where: str, query: int, lists: list[Any], scores: list[Any], counts: Counter[str]
) -> list[Record]:
    """Convert the beams of a legacy record to rows of RL data.

    Raises InputError if an id is not valid, or a score is null.
    """
    rows = []
    for number, (values, score) in enumerate(zip(lists, scores, strict=True)):
        ids = whole_numbers(where, f"row {number} of id_list", values)
        if score is None:
            raise InputError(f"{where}: score {number} of score_list is null; every beam has one")
        # beam generators write the query itself behind its demonstrations
        if ids[-1:] == [query]:
            ids.pop()
            counts["rows end with the query's own id, which is no demonstration"] += 1
        rows.append({"pointer": ids, "gen_method": "beam", "beam_score": score})
    return rows


def _read_query(where: str, key: object, record: Any, counts: Counter[str]) -> Query:
    """Read a query of either format, keeping the valid rows and counting the dropped ones."""
    number = whole_numbers(where, "its key", [key])[0]
    # the rows, and what is said of the query
    match record:
        case {"id_list": list(lists), "score_list": list(scores)} if len(lists) == len(scores):
            rows = _legacy_rows(where, number, lists, scores, counts)
            record = {}
        case {"pointer_candidates": list(rows)} if "id_list" not in record and all(
            isinstance(row, dict) for row in rows
        ):
            pass
        case _:
            raise InputError(
                f"{where}: expected id_list and score_list, two lists with an entry per beam, or "
                "pointer_candidates, a list of objects"
            )
    query = record.get("query") or {}
    if not isinstance(query, dict) or type(query.get("image_id")) not in (int, str, type(None)):
        raise InputError(
            f"{where}: query must be an object in which image_id is a name or a whole number"
        )
    image = query.get("image_id")
    # the pool, and the candidates of every row
    pool = record.get("candidate_pool_ids")
    if pool is not None:
        pool = whole_numbers(where, "candidate_pool_ids", pool)
    chosen = [_chosen(f"{where}, row {i}", row, pool) for i, row in enumerate(rows)]
    # without a pool every candidate that was ever chosen is in it
    if pool is None:
        pool = list(dict.fromkeys(chain.from_iterable(chosen)))
        counts["queries without a pool: the ids in their rows are taken as the pool"] += 1
    known = set(pool)
    if len(known) < len(pool):
        raise InputError(f"{where}: an id occurs twice in candidate_pool_ids; keep each id once")
    # keep what was evaluated, and read its outcomes
    beams = []
    for i, (row, ids) in enumerate(zip(rows, chosen, strict=True)):
        at = f"{where}, row {i}"
        if reason := _why_dropped(at, row, ids):
            counts[f"rows dropped: {reason}"] += 1
            continue
        if wrong := [i for i in ids if i not in known or ids.count(i) > 1]:
            raise InputError(
                f"{at}: id {wrong[0]} is twice in the row, or not in candidate_pool_ids; fix or "
                "remove the row"
            )
        outcomes = [_outcome(at, name, row.get(name)) for name in FIELDS]
        found_by, number_of_round = _method(at, row)
        beams.append(Beam(ids, found_by=found_by, round=number_of_round, outcomes=outcomes))
    return Query(number, "" if image is None else str(image), pool, beams)


def _chosen(where: str, row: Record, pool: list[int] | None) -> list[int]:
    """Return the ids of the candidates of a row.

    Raises InputError if its places in the pool name other candidates than its ids.
    """
    pointer = row.get("pointer", row.get("pointer_pos"))
    ids = row.get("pointer_global")
    if ids is None:
        return whole_numbers(where, "pointer", pointer)
    ids = whole_numbers(where, "pointer_global", ids)
    # ids and places in the pool must agree
    if pool is not None and pointer is not None:
        places = whole_numbers(where, "pointer", pointer)
        if [pool[place] for place in places if place < len(pool)] != ids:
            raise InputError(
                f"{where}: pointer {places} and pointer_global {ids} name different candidates; "
                f"pointer indexes candidate_pool_ids, 0 to {len(pool) - 1}"
            )
    return ids


def _why_dropped(where: str, row: Record, ids: list[int]) -> str:
    """Return the reason to drop a row, empty if it is kept."""
    failed = row.get("eval_failed")
    mode = row.get("vqa_eval_mode") or ""
    if failed not in (None, 0, 1) or not isinstance(mode, str):
        raise InputError(
            f"{where}: eval_failed is {failed!r}, vqa_eval_mode {mode!r}; expected true or false, "
            "and a name"
        )
    if failed:
        return "eval_failed"
    if mode.lower() in ("error", "fallback"):
        return f"vqa_eval_mode {mode.lower()}"
    return "" if ids else "without demonstrations"


def _method(where: str, row: Record) -> tuple[int, int]:
    """Return the method that found the row's beam, as an index into METHODS, and its round."""
    method = row.get("gen_method")
    draws = method == "policy"
    number = row.get("round")
    if number is None:
        number = int(draws)
    rounds = whole_numbers(where, "round", [number])
    if method not in METHODS or draws != (rounds[0] > 0):
        raise InputError(
            f"{where}: gen_method is {method!r}, round {number!r}; known are {', '.join(METHODS)}, "
            "and only draws of a policy have a round, from 1"
        )
    return METHODS.index(method), rounds[0]


def _outcome(where: str, name: str, value: Any) -> float:
    """Return a recorded outcome, NaN for null.

    Raises InputError if it is not a finite number, or `vqa_correct` neither 0 nor 1.
    """
    if value is None:
        return float("nan")
    if name == "vqa_correct":
        fits = value in (0, 1)
    else:
        fits = type(value) in (int, float) and abs(value) < 3.4e38
    if not fits:
        raise InputError(
            f"{where}: {name} is {value!r}, expected a finite number or null, for vqa_correct 0 or "
            "1 (soft scores are vqa_acc_score)"
        )
    return float(value)
