"""Files of recorded beams: the legacy JSON, RL data (read and written), and embeddings.

In both JSON formats the key of a query is its data set index: its row
in the matrix of query embeddings. Ids of candidates are rows of the matrix of candidate embeddings.
The table's notes count what a reader drops.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.common.files import write_text
from knobwise.envs.demonstrations.beam_records import (
    NUMERAL,
    Record,
    Records,
    TrailingQuery,
    as_rl_data,
    beam_file,
    by_query,
    collect,
    outcomes,
    read_json,
    records,
    whole_numbers,
)
from knobwise.envs.demonstrations.beam_table import BeamTable, closed_up, shows_own_image
from knobwise.envs.demonstrations.settings import FIELDS, METHODS
from knobwise.envs.readers.frames import read_frame
from knobwise.envs.tables.tensor_file import read_arrays

Embeddings = str | Path | Tensor
"""A file that `read_embeddings` reads, or the matrix itself."""
Images = str | Path | Sequence[str]
"""The image that each candidate shows: M names ("" if unknown), a JSON list of them, a JSON object
from id to name, or a table file with the columns `id` and `image_id`."""


def read_beam_data(
    path: str | Path,
    embeddings: Embeddings,
    query_embeddings: Embeddings | None = None,
    *,
    trailing_query: TrailingQuery = "auto",
    keep_fallback: bool = False,
    candidate_images: Images | None = None,
    name: str | None = None,
) -> BeamTable:
    """Read recorded beams from a file, or from a folder with one JSON file.

    The content decides which of the two formats it is; instead of an object by query it may be a
    list of records (see `beam_records.by_query`).

    Legacy: `{query: {"id_list": [[id, …], …], "score_list": [score, …]}}`. A query's pool is the
    ids in its beams, scores become `beam_score`, and the method of every beam is `beam`.

    RL data: `{query: {"query": {}, "candidate_pool_ids": [], "pointer_candidates": [{}, …]}}`.
    `pointer` holds places in `candidate_pool_ids` if the row also has `pointer_global`, otherwise
    ids, as the older `pointer_pos` does. The pool of a query without one is the ids in its rows.
    Rows with `eval_failed`, or evaluated in mode `error` or `fallback`, are dropped; a query stays,
    even without any beam.

    Args:
        embeddings, query_embeddings: [M, d] and [n, d]. Without the second (or with an equal
            matrix) queries and candidates are the same items: a query is no candidate of its own,
            and an item's image is known from either side.
        trailing_query: `auto` drops the query's own id at the end of a row of a legacy file,
            `never` takes it for a candidate.
        keep_fallback: keep the rows of RL data whose `vqa_eval_mode` is `fallback`.
        candidate_images: the image that each candidate shows; candidates that show the query's own
            image are dropped. By default as `write_rl_data` noted them.
        name: of the table, by default as `write_rl_data` noted it, or else that of the file.

    Raises:
        InputError: naming the file and the query, if JSON is broken, keys are missing, types are
            wrong, values are not finite, ids are beyond the embeddings or occur twice in a sequence
            or a pool, lists differ in length, a pointer is outside the pool or contradicts
            `pointer_global`, a `gen_method` is unknown, or no beam is left.
    """
    one_of("trailing_query", trailing_query, ("auto", "never"))
    path = beam_file(path)
    counts = Counter[str]()
    content = by_query(path, read_json(path), trailing_query, counts)
    by_key = records(path, content)
    if any(isinstance(record, dict) and "id_list" in record for _, record in by_key):
        content = as_rl_data(path, content, trailing_query)
    kept = collect(path, content, keep_fallback)
    kept.counts.update(counts)
    candidates = _matrix(embeddings, "embeddings")
    queries = candidates
    if query_embeddings is not None:
        queries = _matrix(query_embeddings, "query embeddings")
    return _table(path, content, kept, candidates, queries, candidate_images, name)


def _table(
    path: str | Path,
    content: Any,
    kept: Records,
    candidates: Tensor,
    queries: Tensor,
    images: Images | None,
    name: str | None,
) -> BeamTable:
    """Build the table of these records, without candidates that give the answer away."""
    ids = torch.tensor(kept.queries)
    pool = _padded(kept.pools)
    _check_embeddings(path, ids, pool, queries, candidates)
    saved = _saved_by_us(path, content)
    if images is None:
        images = saved.get("candidate_images", [])
    names = _read_images(images, len(candidates), str(path))
    same_items = torch.equal(queries, candidates)
    query_names = kept.images
    if same_items:
        query_names, names = _images_of_items(kept, names, len(candidates))
    leaks = shows_own_image(pool, query_names, names) | (same_items & (pool == ids[:, None]))
    # drop candidates that give the answer away, and the beams that use them
    owners = torch.tensor(kept.owners, dtype=torch.int64)
    pool, sequences, usable = _without(leaks, pool, owners, _padded(kept.sequences))
    owners = owners[usable]
    beams = owners.bincount(minlength=len(ids))
    notes = [str(note) for note in saved["notes"]]
    counts = {**kept.counts, **_counts(leaks, usable, beams, query_names, names)}
    notes += [f"{count} {what}" for what, count in counts.items() if count]
    if not len(owners):
        raise InputError(f"{path}: no beam is left. {'; '.join(notes)}")
    fields = {field: outcomes(path, kept, field)[usable] for field in FIELDS}
    fields = {field: values for field, values in fields.items() if not values.isnan().all()}
    methods = torch.tensor(kept.methods)[usable]
    return BeamTable(
        name=name or str(saved.get("name") or Path(path).stem),
        query_ids=tuple(map(str, kept.queries)),
        pool=pool,
        sequences=_by_owner(sequences, owners, beams, -1),
        fields={k: _by_owner(values, owners, beams, torch.nan) for k, values in fields.items()},
        found_by=_by_owner(methods[:, 0], owners, beams, -1),
        round=_by_owner(methods[:, 1], owners, beams, 0),
        queries=queries[ids],
        candidates=candidates,
        query_images=tuple(query_names) if any(query_names) else (),
        candidate_images=names if any(names) else (),
        blocks=saved.get("blocks", {}),
        notes=tuple(notes),
    )


def _images_of_items(
    kept: Records, names: tuple[str, ...], num_items: int
) -> tuple[list[str], tuple[str, ...]]:
    """Return the images of queries and of candidates, if both are the same items.

    An image that is known on one side is known on the other.
    """
    if names:
        pairs = zip(kept.images, kept.queries, strict=True)
        return [image or names[query] for image, query in pairs], names
    if any(kept.images):
        known = dict(zip(kept.queries, kept.images, strict=True))
        names = tuple(known.get(item, "") for item in range(num_items))
    return kept.images, names


def _by_owner(values: Tensor, owners: Tensor, beams: Tensor, padding: float) -> Tensor:
    """Return the values of beams [n, …] by query and beam, [Q, B, …], then padding.

    `owners` has the query of each beam, ascending; `beams` is the number of beams of each query.
    """
    # the index of each beam inside its query: its distance from the query's first beam
    beam = torch.arange(len(owners)) - (beams.cumsum(0) - beams)[owners]
    shape = (len(beams), int(beams.max()), *values.shape[1:])
    return torch.full(shape, padding, dtype=values.dtype).index_put((owners, beam), values)


def _counts(
    leaks: Tensor, usable: Tensor, beams: Tensor, query_names: Sequence[str], names: Sequence[str]
) -> dict[str, int]:
    """Return what was dropped or is missing, and how often."""
    num_named = sum(map(bool, query_names))
    return {
        "candidates dropped from pools: they are the query itself or show its image": int(
            leaks.sum()
        ),
        "rows dropped: they use such candidates": int((~usable).sum()),
        "queries of unknown image": query_names.count("") if num_named else 0,
        "queries name their image, candidates do not: none could be dropped for showing it (see "
        "candidate_images)": 0 if any(names) else num_named,
        "queries without any beam": int((beams == 0).sum()),
        "queries with only one beam, which can be compared with no other": int((beams == 1).sum()),
    }


def write_rl_data(
    table: BeamTable, path: str | Path, metadata: Mapping[str, Any] | None = None
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
        "name": table.name,
        "notes": table.notes,
        "candidate_images": table.candidate_images,
    }
    if table.blocks:
        saved["blocks"] = table.blocks
    content: Record = {"_meta": {**(metadata or {}), "knobwise": saved}}
    images = table.query_images or ("",) * table.num_queries
    pools = [_unpadded(pool) for pool in table.pool.tolist()]
    rows = _pointer_rows(table, pools)
    for q, (query, image) in enumerate(zip(table.query_ids, images, strict=True)):
        description: Record = {"question_id": int(query)}
        if image:
            description["image_id"] = image
        content[query] = {
            "query": description,
            "candidate_pool_ids": pools[q],
            "pointer_candidates": rows[q],
        }
    try:
        text = json.dumps(content, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: metadata that JSON cannot hold ({error})") from error
    write_text(path, text)


def _unpadded(numbers: list[int]) -> list[int]:
    return [number for number in numbers if number >= 0]


def _pointer_rows(table: BeamTable, pools: list[list[int]]) -> list[list[Record]]:
    """Return the `pointer_candidates` of each query: an object for each of its beams."""
    # as decimals that are as short as a float32 allows
    fields = {k: x.numpy().astype(str).astype(np.float64).tolist() for k, x in table.fields.items()}
    methods = table.found_by.tolist()
    rounds = table.round.tolist()
    sequences = table.sequences.tolist()
    rows: list[list[Record]] = []
    for q, num_beams in enumerate(table.beam_mask.sum(1).tolist()):
        rows.append([])
        for b in range(num_beams):
            places = _unpadded(sequences[q][b])
            row: Record = {
                "pointer": places,
                "pointer_global": [pools[q][place] for place in places],
                "gen_method": METHODS[methods[q][b]],
            }
            if rounds[q][b]:
                row["round"] = rounds[q][b]
            for name, values in fields.items():
                if not math.isnan(values[q][b]):
                    row[name] = values[q][b]
            rows[q].append(row)
    return rows


def read_embeddings(path: str | Path) -> Tensor:
    """Read float32 [N, d], a row per data set index, from `.safetensors`, `.npz`, `.npy` or `.pt`.

    Of several matrices it is the one named `embeddings`. Raises InputError if there is no such
    file, it is not of its kind, or it holds no matrix of numbers, or NaN or infinity.
    """
    path = Path(path)
    if not path.is_file() or path.suffix not in (".safetensors", ".npz", ".npy", ".pt"):
        raise InputError(
            f"{path}: no such file, or not a .safetensors, .npz, .npy or .pt file of embeddings"
        )
    matrices = {}
    for name, x in read_arrays(path, "embeddings").items():
        if isinstance(x, Tensor) or (isinstance(x, np.ndarray) and x.dtype.kind in "iuf"):
            matrices[name] = torch.as_tensor(x)
    if len(matrices) != 1 and "embeddings" not in matrices:
        raise InputError(
            f"{path}: expected one matrix, or one named embeddings; it holds "
            f"{[*matrices] or 'none'}"
        )
    first = next(iter(matrices.values()))
    return _matrix(matrices.get("embeddings", first), str(path))


def _matrix(embeddings: Embeddings, source: str) -> Tensor:
    """Return embeddings as a checked matrix on the CPU, read from a file if they are a path."""
    if not isinstance(embeddings, Tensor):
        return read_embeddings(embeddings)
    kind = embeddings.dtype
    shape = tuple(embeddings.shape)
    if len(shape) != 2 or 0 in shape or kind.is_complex or kind == torch.bool:
        raise InputError(
            f"{source}: embeddings have shape {shape} of {kind}, expected numbers [N, d]"
        )
    matrix = embeddings.detach().to("cpu", torch.float32).contiguous()
    if count := int((~matrix.isfinite().all(1)).sum()):
        raise InputError(
            f"{source}: {count} of {len(matrix)} embeddings hold NaN or infinite values"
        )
    return matrix


def _padded(rows: list[list[int]]) -> Tensor:
    """Return rows of different lengths as int64 [rows, longest], −1 after the end of a row."""
    longest = max(map(len, rows), default=0)
    padded = [row + [-1] * (longest - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int64).reshape(len(rows), longest)


def _check_embeddings(
    path: str | Path, ids: Tensor, pool: Tensor, queries: Tensor, candidates: Tensor
) -> None:
    """Raise InputError if an id has no embedding, or the two matrices differ in width."""
    for what, rows, count in (
        ("query", ids[:, None], len(queries)),
        ("candidate", pool, len(candidates)),
    ):
        if (beyond := rows >= count).any():
            raise InputError(
                f"{path}: {len(rows[beyond].unique())} {what} ids are beyond the {count} rows of "
                f"the {what} embeddings, such as {rows[beyond][0]} of query "
                f"{ids[beyond.any(1)][0]}; an id is a row number, so give the embeddings of the "
                "whole data set that it counts in"
            )
    if queries.shape[1] != candidates.shape[1]:
        widths = f"query embeddings are {queries.shape[1]} wide, candidates {candidates.shape[1]}"
        raise InputError(f"{path}: {widths}; both must come from the same space")


def _saved_by_us(path: str | Path, content: Any) -> Record:
    """Return what `write_rl_data` noted of the table, if it wrote the file; always with `notes`."""
    meta = content.get("_meta")
    saved = meta.get("knobwise") if isinstance(meta, dict) else None
    if not isinstance(saved, dict):
        return {"notes": []}
    if not isinstance(images := saved.get("candidate_images", []), list):
        raise InputError(
            f"{path}: candidate_images holds {images!r}, expected a list with a name for each "
            "candidate"
        )
    blocks = saved.get("blocks", {})
    if not isinstance(blocks, dict) or not all(
        isinstance(x, list) and len(x) == 2 for x in blocks.values()
    ):
        raise InputError(f"{path}: blocks holds {blocks!r}, expected columns [from, to] by name")
    # JSON has no tuples
    columns = {
        name: tuple(whole_numbers(str(path), f"block {name!r}", x)) for name, x in blocks.items()
    }
    notes = saved.get("notes")
    if not isinstance(notes, list):
        notes = []
    return {**saved, "blocks": columns, "notes": notes}


def _without(
    dropped: Tensor, pool: Tensor, owners: Tensor, sequences: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return pools and sequences without some candidates.

    Args:
        dropped: bool [Q, N], candidates to drop.
        pool: int64 [Q, N].
        owners: int64 [n], the query of each sequence.
        sequences: int64 [n, T], places in the pools.

    Returns: the pools; the sequences that use no dropped candidate; and which these are, bool [n].
    """
    used = sequences >= 0
    places = sequences.clamp_min(0)
    usable = ~(dropped[owners[:, None], places] & used).any(1)
    # the places of the remaining candidates move forward
    moved = (~dropped).cumsum(1) - 1
    sequences = moved[owners[:, None], places].masked_fill(~used, -1)[usable]
    return closed_up(pool, (pool >= 0) & ~dropped, -1), sequences, usable


def _read_images(images: Images, count: int, source: str) -> tuple[str, ...]:
    """Return the image of each of `count` candidates, "" if unknown; or none at all."""
    names: Any = images
    if isinstance(images, str | Path):
        source = str(images)
        if source.endswith(".json"):
            names = read_json(source)
        else:
            frame = read_frame(Path(source))
            if not {"id", "image_id"} <= {*frame.columns} or frame["id"].is_duplicated().any():
                raise InputError(
                    f"{source}: expected the image of each candidate: columns id (each once) and "
                    "image_id"
                )
            names = dict(frame.select("id", "image_id").iter_rows())
    if isinstance(names, dict):
        by_id = dict(zip(whole_numbers(source, "id", [*names]), names.values(), strict=True))
        if beyond := [i for i in by_id if i >= count]:
            raise InputError(
                f"{source}: names the image of candidate {beyond[0]}, but there are {count} "
                "embeddings"
            )
        names = [by_id.get(i) for i in range(count)]
    known = isinstance(names, list | tuple)
    if not known or not {*map(type, names)} <= {str, int, type(None)}:
        raise InputError(
            f"{source}: expected the image of each candidate: a list of names, or names by id"
        )
    if names and len(names) != count:
        raise InputError(
            f"{source}: names the images of {len(names)} candidates, but there are {count} "
            "embeddings"
        )
    return tuple("" if image is None else str(image) for image in names)
