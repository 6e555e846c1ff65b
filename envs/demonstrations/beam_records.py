"""Reading the records in a JSON file of recorded beams, strictly.

`beam_files` builds the table from them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_table import POLICY
from knobwise.envs.demonstrations.settings import METHODS

Record = dict[str, Any]
"""An object of a JSON file."""
NUMERAL = re.compile(r"[0-9]{1,18}")
"""A whole number ≥ 0 that fits into int64, as text."""
TrailingQuery = Literal["auto", "never"]


def read_json(path: str | Path) -> Any:
    """Return the content of a JSON file.

    Raises InputError if there is no such file, it is not JSON or cut off, holds NaN or infinity, or
    an object has a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> Record:
        record = dict(pairs)
        if len(record) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise InputError(
                f"{path}: the key {twice!r} occurs twice in one object (a query id?); keep only one"
            )
        return record

    def refuse(constant: str) -> None:
        raise InputError(
            f"{path}: holds {constant}, which is not JSON; write null for a missing value"
        )

    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        if not text.strip():
            raise InputError(f"{path}: is empty")
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON, or cut off ({error}); write the file again") from error


def beam_file(path: str | Path) -> Path:
    """Return the file, or the only JSON file in a folder.

    Raises InputError if the folder does not hold exactly one.
    """
    if Path(path).is_dir():
        files = sorted(Path(path).glob("*.json"))
    else:
        files = [Path(path)]
    if len(files) != 1:
        names = ", ".join(file.name for file in files[:5]) or "none"
        raise InputError(
            f"{path}: is a folder with {len(files)} JSON files ({names}); give the path of one file"
        )
    return files[0]


def by_query(
    path: str | Path, content: Any, trailing_query: TrailingQuery, counts: Counter[str]
) -> Any:
    """Return a list of records as an object by query; any other content as it is.

    A record names its query as `query_id`. If none does, it is the id that ends all rows of a
    record, as beam generators write it, or else the position in the list, which is counted. Raises
    InputError if it is no list of records, some of them name no query, or two the same.
    """
    if not isinstance(content, list):
        return content
    if not content or not all(isinstance(record, dict) for record in content):
        raise InputError(
            f"{path}: holds no queries; expected a list of objects with query_id, or {{query id: "
            "{…}}"
        )
    keys = [record.get("query_id") for record in content]
    if all(key is None for key in keys):
        # an id that ends every row of a record is its query
        last = [_last_ids(record) for record in content]
        repeated = max(map(len, last)) > 1
        if trailing_query == "auto" and repeated and all(len(set(ids)) < 2 for ids in last):
            keys = [ids[0] if ids else None for ids in last]
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
    key, count = Counter(map(str, keys)).most_common(1)[0]
    if count > 1:
        raise InputError(f"{path}: {count} records of the list are of query {key}; keep only one")
    return dict(zip(map(str, keys), content, strict=True))


def _last_ids(record: Record) -> list[str]:
    """Return the ids at the end of the rows of a legacy record."""
    rows = record.get("id_list")
    if not isinstance(rows, list):
        return []
    return [str(row[-1]) for row in rows if isinstance(row, list) and row]


def records(path: str | Path, content: Any) -> Iterator[tuple[str, Any]]:
    """Return the records with their query keys, without `_meta`.

    Raises InputError if there are none.
    """
    if not isinstance(content, dict) or not content.keys() - {"_meta"}:
        raise InputError(f"{path}: holds no queries; expected an object {{query id: {{…}}}}")
    return ((key, record) for key, record in content.items() if key != "_meta")


def whole_numbers(where: str, what: str, values: Any) -> list[int]:
    """Return a list of whole numbers ≥ 0. Raises InputError, with `where` and `what`, for others.

    A string of digits counts as a whole number, a float does not.
    """
    if isinstance(values, list):
        # nearly always all are numbers, which need no parsing
        whole = {*map(type, values)} <= {int}
        if whole and min(values, default=0) >= 0 and max(values, default=0) < 1 << 62:
            return values
        texts = [str(value) if type(value) in (int, str) else "" for value in values]
        if all(NUMERAL.fullmatch(text) for text in texts):
            return [int(text) for text in texts]
        pairs = zip(values, texts, strict=True)
        values = next(value for value, text in pairs if not NUMERAL.fullmatch(text))
    raise InputError(f"{where}: {what} holds {values!r}, expected a list of ids, whole numbers ≥ 0")


def as_rl_data(path: str | Path, content: Any, trailing_query: TrailingQuery) -> Record:
    """Convert legacy beams to RL data without pools.

    Raises InputError if a list is missing, lengths differ, an id is not valid, or a score is null.
    """
    converted: Record = {}
    dropped = 0
    for key, record in records(path, content):
        where = f"{path}: query {key}"
        match record:
            case {"id_list": list(lists), "score_list": list(scores)} if len(lists) == len(scores):
                rows = []
                query = whole_numbers(where, "its key", [key])[0]
            case _:
                raise InputError(
                    f"{where}: expected id_list and score_list, two lists with an entry per beam"
                )
        for number, (values, score) in enumerate(zip(lists, scores, strict=True)):
            ids = whole_numbers(where, f"row {number} of id_list", values)
            if score is None:
                raise InputError(
                    f"{where}: score {number} of score_list is null; every beam has a score"
                )
            # beam generators write the query itself behind its demonstrations
            if trailing_query == "auto" and ids[-1:] == [query]:
                ids = ids[:-1]
                dropped += 1
            rows.append({"pointer": ids, "gen_method": "beam", "beam_score": score})
        converted[key] = {"pointer_candidates": rows}
    notes = []
    if dropped:
        notes.append(f"{dropped} rows end with the query's own id, which is no demonstration")
    return {"_meta": {"knobwise": {"notes": notes}}, **converted}


class Records(NamedTuple):
    """The records of a file: three lists per query, then four per beam."""

    queries: list[int]
    """Ids of the queries."""
    images: list[str]
    """The image of each query, "" if unknown."""
    pools: list[list[int]]
    """Ids of the candidates in each query's pool."""
    owners: list[int]
    """The index in `queries` of each beam's query, ascending."""
    sequences: list[list[int]]
    """Places in the owner's pool."""
    methods: list[tuple[int, int]]
    """Index into `METHODS`, and round of a policy."""
    rows: list[Record]
    """The beams as they were read."""
    counts: Counter[str]
    """What was dropped or noticed, and how often."""


def collect(path: str | Path, content: Any, keep_fallback: bool) -> Records:
    """Read RL data, keeping the valid rows and counting the dropped ones.

    Raises InputError as `read_beam_data`.
    """
    kept = Records([], [], [], [], [], [], [], Counter())
    for owner, (key, record) in enumerate(records(path, content)):
        where = f"{path}: query {key}"
        rows, image = _rows_and_image(where, record)
        pool = record.get("candidate_pool_ids")
        if pool is not None:
            pool = whole_numbers(where, "candidate_pool_ids", pool)
        chosen = [_chosen(f"{where}, row {number}", row, pool) for number, row in enumerate(rows)]
        # without a pool every candidate that was ever chosen is in it
        if pool is None:
            pool = list(dict.fromkeys(chain.from_iterable(chosen)))
            kept.counts["queries without a pool: the ids in their rows are taken as the pool"] += 1
        place = {candidate: i for i, candidate in enumerate(pool)}
        if len(place) < len(pool):
            raise InputError(
                f"{where}: an id occurs twice in candidate_pool_ids; keep each id once"
            )
        for number, (row, ids) in enumerate(zip(rows, chosen, strict=True)):
            at = f"{where}, row {number}"
            if reason := _why_dropped(at, row, ids, keep_fallback):
                kept.counts[f"rows dropped: {reason}"] += 1
                continue
            _check_ids(at, ids, place)
            kept.owners.append(owner)
            kept.sequences.append([place[i] for i in ids])
            kept.methods.append(_method(at, row))
            kept.rows.append(row)
        kept.queries.append(whole_numbers(where, "its key", [key])[0])
        kept.images.append(image)
        kept.pools.append(pool)
    # JSON keys 7 and 07 are different, but the same row
    query, count = Counter(kept.queries).most_common(1)[0]
    if count > 1:
        raise InputError(
            f"{path}: query {query} occurs {count} times, spelled differently; keep only one"
        )
    return kept


def _rows_and_image(where: str, record: Any) -> tuple[list[Record], str]:
    """Return the rows of a query, and its image, "" if unknown."""
    rows = None
    query: Any = None
    if isinstance(record, dict):
        rows = record.get("pointer_candidates")
        query = record.get("query") or {}
    objects = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    if rows is None or not objects or not isinstance(query, dict):
        raise InputError(
            f"{where}: expected an object with pointer_candidates, a list of objects (or [])"
        )
    image = query.get("image_id")
    if type(image) not in (int, str, type(None)):
        raise InputError(f"{where}: image_id is {image!r}, expected a name or a whole number")
    return rows, "" if image is None else str(image)


def _check_ids(where: str, ids: list[int], place: Mapping[int, int]) -> None:
    """Raise InputError if an id occurs twice in a sequence, or has no place in the pool."""
    if len(set(ids)) == len(ids) and place.keys() >= set(ids):
        return
    wrong = next(i for i in ids if i not in place or ids.count(i) > 1)
    if wrong in place:
        problem = "occurs twice in the sequence"
    else:
        problem = "is not in candidate_pool_ids"
    raise InputError(f"{where}: id {wrong} {problem}; fix or remove the row")


def _chosen(where: str, row: Record, pool: list[int] | None) -> list[int]:
    """Return the ids of the candidates of a row.

    Raises InputError if its places are outside the pool, or name other candidates than its ids.
    """
    pointer = row.get("pointer", row.get("pointer_pos"))
    ids = row.get("pointer_global")
    if ids is None:
        return whole_numbers(where, "pointer", pointer)
    ids = whole_numbers(where, "pointer_global", ids)
    if pool is not None and pointer is not None:
        places = whole_numbers(where, "pointer", pointer)
        if outside := [place for place in places if place >= len(pool)]:
            raise InputError(
                f"{where}: pointer {outside[0]} is outside the pool of {len(pool)} candidates"
            )
        if [pool[place] for place in places] != ids:
            raise InputError(
                f"{where}: pointer {places} and pointer_global {ids} name different candidates; "
                "pointer indexes candidate_pool_ids from 0"
            )
    return ids


def _why_dropped(where: str, row: Record, ids: list[int], keep_fallback: bool) -> str:
    """Return the reason to drop a row, empty if it is kept."""
    failed = row.get("eval_failed")
    mode = row.get("vqa_eval_mode")
    if failed not in (None, 0, 1) or not isinstance(mode, str | None):
        raise InputError(
            f"{where}: eval_failed is {failed!r}, vqa_eval_mode {mode!r}; expected true or false, "
            "and a name"
        )
    mode = (mode or "").lower()
    if failed:
        return "eval_failed"
    if mode == "error":
        return "vqa_eval_mode error"
    if mode == "fallback" and not keep_fallback:
        return "vqa_eval_mode fallback (see keep_fallback)"
    return "" if ids else "without demonstrations"


def _method(where: str, row: Record) -> tuple[int, int]:
    """Return the method that found the row's beam, as an index into METHODS, and its round."""
    method = row.get("gen_method")
    written = row.get("round")
    if method in METHODS[:POLICY] and not written:
        return METHODS.index(method), 0
    if isinstance(method, str):
        kind, _, number = method.partition("-")
    else:
        kind, _, number = ("", "", "")
    if kind not in METHODS or (number and kind != "policy"):
        raise InputError(
            f"{where}: gen_method is {method!r}; known are {', '.join(METHODS)} and policy-<round>"
        )
    # the round may be part of the name, as in policy-3
    known = [x for x in (number, written) if x not in ("", None)]
    rounds = set(whole_numbers(where, "round", known))
    round = max(rounds, default=int(kind == "policy"))
    if len(rounds) > 1 or (round > 0) != (kind == "policy"):
        raise InputError(
            f"{where}: gen_method {method!r} with round {written!r}; draws of a policy count from "
            "round 1"
        )
    return METHODS.index(kind), round


def outcomes(path: str | Path, kept: Records, name: str) -> Tensor:
    """Return the field of this name for each beam, float32 [beams], NaN where not recorded.

    Raises InputError if a value is not a finite number, or `vqa_correct` neither 0 nor 1.
    """
    values: list[Any] = [row.get(name) for row in kept.rows]
    for value, owner in zip(values, kept.owners, strict=True):
        if name == "vqa_correct":
            fits = value in (0, 1)
            wanted = "0 or 1 (soft scores are vqa_acc_score)"
        else:
            fits = type(value) in (int, float) and abs(value) < 3.4e38
            wanted = "a finite number, or null"
        if value is not None and not fits:
            raise InputError(
                f"{path}: query {kept.queries[owner]}: {name} is {value!r}, expected {wanted}"
            )
    return torch.from_numpy(np.array(values, dtype=np.float64).astype(np.float32))
