"""Files of recorded beams: the legacy JSON, RL data (read and written), and embeddings.

In both JSON formats the key of a query is its row in the matrix of query embeddings. The id of a
candidate is its row in the matrix of candidate embeddings. A reader counts what it drops in the
table's notes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from knobwise.common.errors import InputError
from knobwise.common.files import write_text
from knobwise.common.json_text import encode_json
from knobwise.envs.demonstrations.beam_records import (
    NUMERAL,
    Query,
    Record,
    beam_file,
    read_queries,
)
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.demonstrations.settings import FIELDS, METHODS
from knobwise.envs.readers.feature_files import read_feature_arrays

Embeddings = str | Path | Tensor
"""A file that `read_embeddings` reads, or the matrix itself."""


def read_beam_data(
    path: str | Path,
    embeddings: Embeddings,
    query_embeddings: Embeddings | None = None,
    name: str | None = None,
) -> BeamTable:
    """Read recorded beams from a file, or from a folder with one JSON file.

    The content shows which of the two formats it is. Both may also be a list of records instead of
    an object by query, see `beam_records.read_queries`.

    Legacy: `{query: {"id_list": [[id, …], …], "score_list": [score, …]}}`. A query's pool is all
    ids in its beams. A row may end with the query's own id, which is left out. Scores become
    `beam_score`, and the method of every beam is `beam`.

    RL data: `{query: {"query": {}, "candidate_pool_ids": [], "pointer_candidates": [{}, …]}}`. In a
    row with `pointer_global`, `pointer` holds places in `candidate_pool_ids`; in a row without it,
    `pointer` holds ids. `pointer_pos` is an older name of `pointer`. If a query has no
    `candidate_pool_ids`, its pool is all ids in its rows. Rows with `eval_failed`, or evaluated in
    mode `error` or `fallback`, are dropped. A query stays even if it has no row left.

    Args:
        embeddings: of the candidates, [M, d].
        query_embeddings: of the queries, [n, d]. If there are none, or they equal `embeddings`,
            queries and candidates are the same items. Then a query is never its own candidate, and
            an item has the same image on both sides. Candidates that show the query's own image are
            dropped; `write_rl_data` notes the images of a bank of its own.
        name: of the table, by default as `write_rl_data` noted it, otherwise the file's name.

    Raises:
        InputError: JSON is broken, keys are missing, types are wrong, values are not finite, ids
            are beyond the embeddings or occur twice in a sequence or a pool, lists differ in
            length, a pointer is outside the pool or contradicts `pointer_global`, a `gen_method` is
            unknown, or no beam is left. The message names the file and the query.
    """
    path = beam_file(path)
    counts = Counter[str]()
    queries, meta = read_queries(path, counts)
    saved = _saved_by_us(path, meta)
    if name is not None:
        saved["name"] = name
    bank = read_embeddings(embeddings)
    features = bank if query_embeddings is None else read_embeddings(query_embeddings)
    return _table(path, queries, saved, features, bank, counts)


def _table(
    path: Path,
    queries: list[Query],
    saved: Record,
    features: Tensor,
    bank: Tensor,
    counts: Counter[str],
) -> BeamTable:
    """Build the table of these queries, without candidates that give the answer away.

    Args:
        saved: what is known about the table, see `_saved_by_us`.
        features: [n, d], the embeddings of the queries, by id.
        bank: [M, d], the embeddings of the candidates.
        counts: what was dropped so far.
    """
    _check_rows(path, queries, len(features), len(bank))
    images = tuple(map(str, saved["candidate_images"]))
    if len(images) not in (0, len(bank)):
        raise InputError(
            f"{path}: _meta.knobwise names the images of {len(images)} candidates, but there are "
            f"{len(bank)} embeddings; give those that were written with it"
        )
    # if the embeddings are equal, queries are items of the bank: where one side lacks the image of
    # an item, it takes that of the other
    same_items = torch.equal(features, bank)
    if same_items:
        if not images:
            known = {query.id: query.image for query in queries}
            images = tuple(known.get(item, "") for item in range(len(bank)))
        queries = [query._replace(image=query.image or images[query.id]) for query in queries]
    queries = [_without_leaks(query, images, same_items, counts) for query in queries]
    _count(queries, images, counts)
    # after the earlier notes, what was dropped and what is missing
    notes = [str(note) for note in saved["notes"]]
    notes += [f"{count} {what}" for what, count in counts.items() if count]
    if not any(query.beams for query in queries):
        raise InputError(f"{path}: no beam is left. {'; '.join(notes)}")
    query_images = tuple(query.image for query in queries)
    return BeamTable(
        name=str(saved.get("name") or path.stem),
        query_ids=tuple(str(query.id) for query in queries),
        queries=features[[query.id for query in queries]],
        candidates=bank,
        query_images=query_images if any(query_images) else (),
        candidate_images=images if any(images) else (),
        blocks=saved["blocks"],
        notes=tuple(notes),
        **_arrays(queries),
    )


def _arrays(queries: list[Query]) -> dict[str, Any]:
    """Return pools, sequences and outcomes as the tensors of a table, which has a beam."""
    # beams of all queries, one after the other
    sizes = [len(query.beams) for query in queries]
    places = []
    for query in queries:
        place = {candidate: i for i, candidate in enumerate(query.pool)}
        places += [[place[i] for i in beam.ids] for beam in query.beams]
    beams = [beam for query in queries for beam in query.beams]
    found_by, rounds = torch.tensor([(beam.found_by, beam.round) for beam in beams]).unbind(1)
    # float32 [n, number of fields]
    outcomes = torch.tensor([beam.outcomes for beam in beams], dtype=torch.float32)

    def by_query(values: Tensor, padding: float) -> Tensor:
        # values of all beams, [n, …] → [Q, B, …]
        return pad_sequence(list(values.split(sizes)), True, padding)

    return {
        "pool": _padded([query.pool for query in queries]),
        "sequences": by_query(_padded(places), -1),
        "fields": {
            field: by_query(values, torch.nan)
            for field, values in zip(FIELDS, outcomes.unbind(1), strict=True)
            if not values.isnan().all()
        },
        "found_by": by_query(found_by, -1),
        "round": by_query(rounds, 0),
    }


def _padded(rows: list[list[int]]) -> Tensor:
    """Return rows of different lengths as int64 [rows, longest], −1 after the end of a row."""
    return pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], True, -1)


def _check_rows(path: Path, queries: list[Query], features: int, bank: int) -> None:
    """Raise InputError if an id has no embedding."""
    for query in queries:
        largest = max(query.pool, default=-1)
        for what, number, rows in (("query", query.id, features), ("candidate", largest, bank)):
            if number >= rows:
                raise InputError(
                    f"{path}: query {query.id}: {what} id {number} is beyond the {rows} rows of "
                    f"the {what} embeddings; an id is a row number, so give the embeddings of the "
                    "whole data set that it counts in"
                )


def _without_leaks(
    query: Query, images: tuple[str, ...], same_items: bool, counts: Counter[str]
) -> Query:
    """Return the query without candidates that give the answer away, and the beams that use them.

    These are the query itself, if it is an item of the bank, and those that show its image.
    """
    leaks = {query.id} if same_items else set()
    if images and query.image:
        leaks.update(i for i in query.pool if images[i] == query.image)
    pool = [i for i in query.pool if i not in leaks]
    beams = [beam for beam in query.beams if leaks.isdisjoint(beam.ids)]
    counts["candidates dropped from pools: they are the query itself or show its image"] += len(
        query.pool
    ) - len(pool)
    counts["rows dropped: they use such candidates"] += len(query.beams) - len(beams)
    return query._replace(pool=pool, beams=beams)


def _count(queries: list[Query], images: tuple[str, ...], counts: Counter[str]) -> None:
    """Count what is missing."""
    named = sum(bool(query.image) for query in queries)
    if named:
        counts["queries of unknown image"] = len(queries) - named
    if not any(images):
        counts["queries name their image, candidates do not: none could be dropped for that"] = (
            named
        )
    sizes = Counter(len(query.beams) for query in queries)
    counts["queries without any beam"] = sizes[0]
    counts["queries with only one beam, which can be compared with no other"] = sizes[1]


def _saved_by_us(path: Path, meta: object) -> Record:
    """Return what `write_rl_data` noted of the table, if it wrote the file."""
    saved: Record = {"notes": [], "candidate_images": [], "blocks": {}}
    if isinstance(meta, dict):
        # a foreign `_meta` says nothing; our own may have been edited
        try:
            saved |= meta.get("knobwise", {})
            saved |= {name: list(saved[name]) for name in ("notes", "candidate_images")}
            columns = saved["blocks"].items()
            saved["blocks"] = {name: (int(start), int(stop)) for name, (start, stop) in columns}
        except (AttributeError, TypeError, ValueError) as error:
            raise InputError(
                f"{path}: _meta.knobwise is not what knobwise writes ({error}): notes and "
                "candidate_images are lists, blocks are columns [from, to] by name"
            ) from error
    return saved


def write_rl_data(
    table: BeamTable, path: str | Path, metadata: Mapping[str, object] | None = None
) -> None:
    """Write RL data, from which `read_beam_data` makes the same table with the same embeddings.

    The metadata is added to `_meta`, such as the model that scored the beams. Raises InputError,
    before anything is written, if query ids are not rows of the query embeddings, or JSON cannot
    hold the metadata.
    """
    if wrong := [query for query in table.query_ids if not NUMERAL.fullmatch(query)]:
        raise InputError(
            f"{path}: {len(wrong)} query ids of beam table {table.name!r} are not row numbers "
            f"({wrong[0]!r}); in RL data the id of a query is its row in the query embeddings. "
            "Save the table as .safetensors instead"
        )
    saved: Record = {
        name: getattr(table, name) for name in ("name", "notes", "candidate_images", "blocks")
    }
    content: Record = {"_meta": {**(metadata or {}), "knobwise": saved}}
    # an object for each query, in the order of the table
    pools = table.pool.tolist()
    rows = _pointer_rows(table, pools)
    for q, query in enumerate(table.query_ids):
        description: Record = {"question_id": int(query)}
        if table.query_images and table.query_images[q]:
            description["image_id"] = table.query_images[q]
        content[query] = {
            "query": description,
            "candidate_pool_ids": [i for i in pools[q] if i >= 0],
            "pointer_candidates": rows[q],
        }
    write_text(path, encode_json(content, path))


def _pointer_rows(table: BeamTable, pools: list[list[int]]) -> list[list[Record]]:
    """Return the `pointer_candidates` of each query: an object for each of its beams."""
    columns = {name: values.tolist() for name, values in table.beams.items()}
    for name, values in table.fields.items():
        # as decimals that are as short as a float32 allows
        columns[name] = values.numpy().astype(str).astype(np.float64).tolist()
    rows: list[list[Record]] = [[] for _ in pools]
    # an object for each beam
    for q, b in table.beam_mask.nonzero().tolist():
        beam = {name: values[q][b] for name, values in columns.items()}
        places = [place for place in beam.pop("sequences") if place >= 0]
        row: Record = {
            "pointer": places,
            "pointer_global": [pools[q][place] for place in places],
            "gen_method": METHODS[beam.pop("found_by")],
        }
        # only draws of a policy have a round
        beam["round"] = beam["round"] or math.nan
        rows[q].append(row | {name: x for name, x in beam.items() if not math.isnan(x)})
    return rows


def read_embeddings(embeddings: Embeddings) -> Tensor:
    """Return embeddings as float32 [N, d] on the CPU, a row per data set index.

    Files are `.safetensors`, `.npz`, `.npy` or `.pt`; of several matrices in a file it is the one
    named `embeddings`. Raises InputError if there is no such file, it is not of its kind, or it
    holds no matrix of numbers, or NaN or infinity.
    """
    source = "embeddings"
    if not isinstance(embeddings, Tensor):
        source = str(embeddings)
        # arrays of numbers alone: a file may hold names too
        matrices = {}
        for name, x in read_feature_arrays(Path(embeddings), "embeddings").items():
            if isinstance(x, Tensor) or (isinstance(x, np.ndarray) and x.dtype.kind in "iuf"):
                matrices[name] = torch.as_tensor(x)
        if len(matrices) != 1 and "embeddings" not in matrices:
            raise InputError(
                f"{source}: expected one matrix, or one named embeddings; it holds "
                f"{[*matrices] or 'none'}"
            )
        embeddings = matrices.get("embeddings", next(iter(matrices.values())))
    # numbers, all of them finite
    matrix = embeddings.detach().to("cpu", torch.float32).contiguous()
    if matrix.ndim != 2 or not matrix.numel() or not matrix.isfinite().all():
        raise InputError(
            f"{source}: embeddings are {embeddings.dtype} {[*matrix.shape]}; expected finite "
            "numbers [N, d]"
        )
    return matrix
