"""Files of recorded beams: the legacy JSON, the RL data (read and written), and matrices of embeddings.

In both files the key of a query is its data set index: its row in the matrix of query embeddings. Ids of candidates are
rows of the matrix of candidate embeddings. What a reader drops, it counts in the table's notes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.envs.demonstrations.beam_records import (
    NUMERAL,
    Record,
    TrailingQuery,
    as_rl_data,
    collect,
    outcomes,
    read_json,
    records,
    whole_numbers,
)
from knobwise.envs.demonstrations.beam_table import FIELDS, METHODS, BeamTable, shows_own_image
from knobwise.envs.readers.frames import read_frame

Embeddings = str | Path | Tensor
"""A file that `read_embeddings` reads, or the matrix itself."""
Images = str | Path | Sequence[str]
"""The image that each candidate shows: M names ("" where unknown), a JSON list of them, a JSON object from id to name,
or a table file with the columns `id` and `image_id`."""


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
    """Read recorded beams, legacy or RL data, told apart by the content.

    Args:
        path: the JSON file.
        embeddings: of the candidates, [M, d].
        query_embeddings: of the queries, [n, d]; without them (or with an equal matrix) queries and candidates number
            the same items: then a query is no candidate of its own, and an item's image is known from either side.
        trailing_query: `auto` drops the query's own id where it ends a row of a legacy file, `never` takes it for a
            candidate.
        keep_fallback: keep the rows of RL data whose `vqa_eval_mode` is `fallback`.
        candidate_images: what image each candidate shows, so that those that show the query's own are dropped; by
            default what `write_rl_data` noted.
        name: of the table; by default what `write_rl_data` noted, or the file's.

    Raises:
        InputError: naming the file and the query: broken JSON, missing keys, wrong types, values that are not finite,
            ids that lie beyond the embeddings or stand twice in a sequence or a pool, lists of different lengths, a
            pointer outside the pool or at odds with `pointer_global`, an unknown `gen_method`, no beam left.
    """
    content = read_json(path)
    if any(isinstance(record, dict) and "id_list" in record for _, record in records(path, content)):
        content = as_rl_data(path, content, trailing_query)
    return _table(path, content, embeddings, query_embeddings, keep_fallback, candidate_images, name)


def read_beams(
    path: str | Path,
    embeddings: Embeddings,
    query_embeddings: Embeddings | None = None,
    *,
    trailing_query: TrailingQuery = "auto",
    candidate_images: Images | None = None,
    name: str | None = None,
) -> BeamTable:
    """Read legacy beams, `{query: {"id_list": [[id, …], …], "score_list": [score, …]}}`; see `read_beam_data`.

    A query's pool is the ids seen in its beams. Scores become `beam_score`; every beam was found by `beam`.
    """
    content = as_rl_data(path, read_json(path), trailing_query)
    return _table(path, content, embeddings, query_embeddings, False, candidate_images, name)


def read_rl_data(
    path: str | Path,
    embeddings: Embeddings,
    query_embeddings: Embeddings | None = None,
    *,
    keep_fallback: bool = False,
    candidate_images: Images | None = None,
    name: str | None = None,
) -> BeamTable:
    """Read RL data, `{query: {"query": {}, "candidate_pool_ids": [], "pointer_candidates": [{}, …]}}`; see
    `read_beam_data`.

    `pointer` holds places in `candidate_pool_ids` where `pointer_global` stands beside it, otherwise ids (as the older
    `pointer_pos` does). A query without a pool has the ids seen in its rows. Rows with `eval_failed`, or evaluated in
    mode `error` or `fallback`, are dropped; a query stays, even without any beam.
    """
    return _table(path, read_json(path), embeddings, query_embeddings, keep_fallback, candidate_images, name)


def write_rl_data(table: BeamTable, path: str | Path, metadata: Mapping[str, Any] | None = None) -> None:
    """Write RL data. `read_rl_data` makes the same table of it, given the same embeddings by row.

    Args:
        table: its query ids must be whole numbers, the rows of the query embeddings.
        path: where to.
        metadata: added to `_meta`, such as the model that scored the beams.

    Raises:
        InputError: other query ids, metadata that JSON cannot hold. Nothing has been written then.
    """
    if wrong := [query for query in table.query_ids if not NUMERAL.fullmatch(query)]:
        raise InputError(
            f"{path}: {len(wrong)} query ids of beam table {table.name!r} are no row numbers ({wrong[0]!r}); in RL "
            "data the id of a query is its row in the query embeddings. Save the table as .safetensors instead"
        )
    ours: Record = {"name": table.name, "notes": table.notes, "candidate_images": table.candidate_images}
    ours |= {"blocks": table.blocks} if table.blocks else {}
    content: Record = {"_meta": {**(metadata or {}), "knobwise": ours}}
    # as decimals that are as short as a float32 allows
    fields = {k: x.numpy().astype(str).astype(np.float64).tolist() for k, x in table.fields.items()}
    methods, rounds = table.found_by.tolist(), table.round.tolist()
    images = table.query_images or ("",) * table.num_queries
    pools, sequences = table.pool.tolist(), table.sequences.tolist()
    for q, (query, image) in enumerate(zip(table.query_ids, images, strict=True)):
        pool = [i for i in pools[q] if i >= 0]
        rows = []
        for b in range(int(table.beam_mask[q].sum())):
            places = [place for place in sequences[q][b] if place >= 0]
            row = {"pointer": places, "pointer_global": [pool[place] for place in places]}
            row |= {"gen_method": METHODS[methods[q][b]]} | ({"round": rounds[q][b]} if rounds[q][b] else {})
            rows.append(row | {k: value for k, x in fields.items() if (value := x[q][b]) == value})
        about = {"question_id": int(query)} | ({"image_id": image} if image else {})
        content[query] = {"query": about, "candidate_pool_ids": pool, "pointer_candidates": rows}
    try:
        text = json.dumps(content, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: metadata that JSON cannot hold ({error})") from error
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_embeddings(path: str | Path) -> Tensor:
    """Read float32 [N, d], a row per data set index, from `.safetensors`, `.npz`, `.npy` or `.pt`.

    Of several matrices in the file, it is the one called `embeddings`.

    Raises:
        InputError: no such file, not of its kind, no matrix of numbers, values that are NaN or infinite.
    """
    path, found = Path(path), {}
    if not path.is_file() or path.suffix not in (".safetensors", ".npz", ".npy", ".pt"):
        raise InputError(f"{path}: no such file, or none of .safetensors, .npz, .npy, .pt, which hold embeddings")
    try:
        if path.suffix == ".safetensors":
            with safe_open(str(path), framework="pt") as file:
                found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        elif path.suffix == ".pt":
            found = torch.load(path, map_location="cpu", weights_only=True)
        else:
            found = np.load(path, allow_pickle=False)
        found = dict(found) if isinstance(found, Mapping) else {"embeddings": found}
        found = {key: torch.as_tensor(x) for key, x in found.items() if isinstance(x, Tensor) or x.dtype.kind in "iuf"}
    except Exception as error:
        raise InputError(f"{path}: cannot be read as embeddings without executing code in it ({error})") from error
    if len(found) != 1 and "embeddings" not in found:
        raise InputError(f"{path}: expected one matrix, or one called embeddings; found {[*found] or 'none'}")
    return _matrix(found["embeddings"] if "embeddings" in found else next(iter(found.values())), str(path))


def _matrix(embeddings: Embeddings, source: str) -> Tensor:
    if not isinstance(embeddings, Tensor):
        return read_embeddings(embeddings)
    kind, shape = embeddings.dtype, tuple(embeddings.shape)
    if len(shape) != 2 or 0 in shape or kind.is_complex or kind == torch.bool:
        raise InputError(f"{source}: embeddings have shape {shape} of {kind}, expected numbers [N, d]")
    matrix = embeddings.detach().to("cpu", torch.float32).contiguous()
    if count := int((~matrix.isfinite().all(1)).sum()):
        raise InputError(f"{source}: {count} of {len(matrix)} embeddings hold NaN or infinite values")
    return matrix


# -- from records to the table -----------------------------------------------------------------------------------------


def _padded(rows: list[list[int]]) -> Tensor:
    """int64 [len(rows), longest], −1 after the end of a row."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    padded = np.full((len(rows), lengths.max(initial=0)), -1)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.fromiter(chain.from_iterable(rows), np.int64)
    return torch.from_numpy(padded)


def _table(
    path: str | Path,
    content: Any,
    embeddings: Embeddings,
    query_embeddings: Embeddings | None,
    keep_fallback: bool,
    candidate_images: Images | None,
    name: str | None,
) -> BeamTable:
    found = collect(path, content, keep_fallback)
    candidates = _matrix(embeddings, "embeddings")
    asked = candidates if query_embeddings is None else _matrix(query_embeddings, "query embeddings")
    queries, pool = torch.tensor(found.queries), _padded(found.pools)
    for what, ids, count in (("query", queries[:, None], len(asked)), ("candidate", pool, len(candidates))):
        if (beyond := ids >= count).any():
            raise InputError(
                f"{path}: {len(ids[beyond].unique())} {what} ids are beyond the {count} rows of the {what} embeddings, "
                f"such as {ids[beyond][0]} of query {queries[beyond.any(1)][0]}; an id is a row number, so give the "
                "embeddings of the whole data set that it was counted in"
            )
    if asked.shape[1] != candidates.shape[1]:
        widths = f"query embeddings are {asked.shape[1]} wide, candidates {candidates.shape[1]}"
        raise InputError(f"{path}: {widths}; both must come from the same space")
    same = torch.equal(asked, candidates)
    meta = content.get("_meta")
    ours = meta.get("knobwise") if isinstance(meta, dict) else None
    ours = ours if isinstance(ours, dict) else {}
    blocks = ours.get("blocks", {})
    if not isinstance(blocks, dict) or not all(isinstance(x, list) and len(x) == 2 for x in blocks.values()):
        raise InputError(f"{path}: blocks holds {blocks!r}, expected columns [from, to] by name")
    blocks = {name: tuple(whole_numbers(str(path), f"block {name!r}", columns)) for name, columns in blocks.items()}
    noted = tuple(ours.get("candidate_images", ()))
    shown = _read_images(noted if candidate_images is None else candidate_images, len(candidates), str(path))
    images = found.images
    if same and shown:  # an item has one image, as query and as candidate
        images = [image or shown[query] for image, query in zip(images, found.queries, strict=True)]
    elif same and any(images):
        known = dict(zip(found.queries, images, strict=True))
        shown = tuple(known.get(i, "") for i in range(len(candidates)))

    # candidates that are the query itself or show its image go, and so do the beams that use them
    own = shows_own_image(pool, images, shown) | (pool == queries[:, None] if same else torch.tensor(False))
    owners, sequences = torch.tensor(found.owners, dtype=torch.int64), _padded(found.sequences)
    used = sequences >= 0
    kept = ~(own[owners[:, None], sequences.clamp_min(0)] & used).any(1)
    moved = (~own).cumsum(1) - 1
    sequences = moved[owners[:, None], sequences.clamp_min(0)].masked_fill(~used, -1)[kept]
    left = (pool >= 0) & ~own
    pool = pool.masked_fill(~left, -1).gather(1, (~left).int().argsort(dim=1, stable=True))[:, : int(left.sum(1).max())]
    owners = owners[kept]
    beams = owners.bincount(minlength=len(queries))
    notes = [*map(str, ours.get("notes", ())), *(f"{count} {what}" for what, count in found.said.items())]
    said = {
        "candidates dropped from pools: they are the query itself or show its image": int(own.sum()),
        "rows dropped: they use such candidates": int((~kept).sum()),
        "queries of unknown image": images.count("") if any(images) else 0,
        "queries name their image, candidates do not: none could be dropped for showing it (see candidate_images)": (
            sum(map(bool, images)) if not any(shown) else 0
        ),
        "queries without any beam": int((beams == 0).sum()),
        "queries with one beam only, which nothing is compared with": int((beams == 1).sum()),
    }
    notes += [f"{count} {what}" for what, count in said.items() if count]
    if not len(owners):
        raise InputError(f"{path}: no beam is left. {'; '.join(notes)}")
    slot = torch.arange(len(owners)) - (beams.cumsum(0) - beams)[owners]

    def dense(values: Tensor, padding: float) -> Tensor:
        shape = (len(queries), int(beams.max()), *values.shape[1:])
        return torch.full(shape, padding, dtype=values.dtype).index_put((owners, slot), values)

    fields = {field: outcomes(path, found, field)[kept] for field in FIELDS}
    methods = torch.tensor(found.methods)[kept]
    return BeamTable(
        name=name or str(ours.get("name") or Path(path).stem),
        query_ids=tuple(map(str, found.queries)),
        pool=pool,
        sequences=dense(sequences, -1),
        fields={field: dense(values, torch.nan) for field, values in fields.items() if not values.isnan().all()},
        found_by=dense(methods[:, 0], -1),
        round=dense(methods[:, 1], 0),
        queries=asked[queries],
        candidates=candidates,
        query_images=tuple(images) if any(images) else (),
        candidate_images=shown if any(shown) else (),
        blocks=blocks,
        notes=tuple(notes),
    )


def _read_images(images: Images, count: int, source: str) -> tuple[str, ...]:
    """The image of each of `count` candidates, "" where unknown; or none at all."""
    found: Any = images
    if isinstance(images, str | Path):
        source = str(images)
        if source.endswith(".json"):
            found = read_json(source)
        else:
            frame = read_frame(Path(source))
            if not {"id", "image_id"} <= {*frame.columns} or frame["id"].is_duplicated().any():
                raise InputError(f"{source}: expected the image of each candidate: columns id (each once) and image_id")
            found = dict(frame.select("id", "image_id").iter_rows())
    if isinstance(found, dict):
        by_id = dict(zip(whole_numbers(source, "id", [*found]), found.values(), strict=True))
        if beyond := [i for i in by_id if i >= count]:
            raise InputError(f"{source}: names the image of candidate {beyond[0]}, but there are {count} embeddings")
        found = [by_id.get(i) for i in range(count)]
    if not isinstance(found, list | tuple) or not all(type(image) in (str, int, type(None)) for image in found):
        raise InputError(f"{source}: expected the image of each candidate: a list of names, or names by id")
    if found and len(found) != count:
        raise InputError(f"{source}: names the images of {len(found)} candidates, but there are {count} embeddings")
    return tuple("" if image is None else str(image) for image in found)
