"""BeamTable: recorded demonstration sequences and their scores as dense arrays.

The arrays are queries × beams × shots. It is to the selector what `ProfileTable` is to the
controller: every reader ends in it, everything else starts from it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.settings import FIELDS, METHODS
from knobwise.envs.tables.splits import Split, split_groups
from knobwise.envs.tables.tensor_file import check_axes, load_table, row_hashes, save_table

POLICY = METHODS.index("policy")
"""The index of draws of a policy in `METHODS`."""
INTEGERS = ("pool", "sequences", "found_by", "round")
"""Fields of a table that hold integers."""
EMBEDDINGS = ("queries", "candidates")
"""Fields of a table that hold embeddings."""
AXES = {
    "pool": "QN",
    "sequences": "QBT",
    "found_by": "QB",
    "round": "QB",
    "queries": "Qd",
    "candidates": "Md",
    "query_ids": "Q",
    "query_images": "Q",
    "candidate_images": "M",
    "fields": "QB",
}
"""A letter for each axis of a field."""
PADDING = {"sequences": -1, "found_by": -1, "round": 0}
"""Values of the integers of beams where there is none."""


@dataclass(frozen=True, eq=False)
class BeamTable:
    """Q queries, each with a pool of up to N candidates and up to B recorded beams.

    A beam has up to T demonstrations. A query may have one beam or none. Padding is at the end: −1
    in integers, NaN in `fields`, 0 in `round`.

    Raises:
        InputError: if shapes or types do not fit, padding is not at the end, a candidate has no
            embedding, a place is outside its pool or twice in a sequence, a candidate occurs twice
            in a pool or shows the query's own image, an embedding is not finite, or a query id
            occurs twice.
    """

    name: str
    """The name of the data in reports."""
    query_ids: tuple[str, ...]
    """Q ids, unique."""
    pool: Tensor
    """int64 [Q, N]: the row of `candidates` behind each place of the query's pool; −1 where a pool
    is shorter."""
    sequences: Tensor
    """int64 [Q, B, T]: places in the query's own pool; −1 after the end of a sequence, and where
    there is no beam."""
    found_by: Tensor
    """int64 [Q, B]: index into `METHODS`; −1 where there is no beam."""
    round: Tensor
    """int64 [Q, B]: 1, 2, … for draws of a policy, 0 for everything else."""
    queries: Tensor
    """float32 [Q, d]: embeddings of the queries."""
    candidates: Tensor
    """float32 [M, d]: embeddings of the whole bank of candidates, in the same space."""
    fields: dict[str, Tensor] = field(default_factory=dict)
    """float32 [Q, B] under (some of) the names `FIELDS`; NaN where not recorded."""
    query_images: tuple[str, ...] = ()
    """Q ids of the image that each query asks about, "" where unknown; or empty."""
    candidate_images: tuple[str, ...] = ()
    """M ids of the image that each candidate shows, "" where unknown; or empty."""
    blocks: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Columns [from, to) of the embeddings that have a meaning, by name: "image"; "question" (what
    a query asks, what a candidate answers); "annotator" (who made a candidate). Empty if
    unknown."""
    notes: tuple[str, ...] = ()
    """What the reader dropped or noticed, with counts. Not part of the digest."""

    def __post_init__(self) -> None:
        table = f"beam table {self.name!r}"
        self._check_shapes(table)
        for what, wrong in self._problems().items():
            if count := int(wrong.sum()):
                raise InputError(f"{table}: {count} × {what}")

    def _check_shapes(self, table: str) -> None:
        """Raise InputError if shapes, types or names do not fit."""
        # every axis has one length
        lengths = check_axes(table, self, AXES)
        tensors = {name: getattr(self, name) for name in (*INTEGERS, *EMBEDDINGS)}
        for what, values in (tensors | self.fields).items():
            wanted = torch.int64 if what in INTEGERS else torch.float32
            if values.dtype != wanted:
                raise InputError(f"{table}: {what} holds {values.dtype}, expected {wanted}")
        # names of outcomes, queries, and columns
        if unknown := sorted(set(self.fields) - set(FIELDS)):
            raise InputError(
                f"{table}: unknown fields {', '.join(unknown)}; known are {', '.join(FIELDS)}"
            )
        if not lengths["Q"] or len(set(self.query_ids)) != lengths["Q"]:
            raise InputError(f"{table}: is empty (it has no queries), or query ids are not unique")
        for name, (start, stop) in self.blocks.items():
            if not 0 <= start < stop <= lengths["d"]:
                raise InputError(
                    f"{table}: block {name!r} is columns {start} to {stop}, but embeddings are "
                    f"{lengths['d']} wide"
                )

    def _problems(self) -> dict[str, Tensor]:
        """Return what may be wrong with the values, with bool tensors, True where it is."""
        beam = self.beam_mask
        known_method = (self.found_by >= 0) & (self.found_by < len(METHODS))
        fitting_round = (self.round > 0) == (self.found_by == POLICY)
        beyond = self.pool >= len(self.candidates)
        # an unknown image has no number that another has
        of_queries, of_candidates = self.image_numbers
        images = of_candidates[self.pool.clamp(0, len(self.candidates) - 1)]
        problems = {
            "padding inside a pool; it belongs at the end": after_gaps(self.pool_mask),
            f"pool entries beyond the {len(self.candidates)} candidates": beyond,
            "candidates that occur twice in a pool": is_repeated(self.pool),
            "padding inside a sequence; it belongs at the end": after_gaps(self.sequences >= 0),
            "padding between the beams of a query; it belongs at the end": after_gaps(beam),
            "indices outside the query's own pool": self.sequences
            >= self.pool_mask.sum(1)[:, None, None],
            "indices that occur twice in a sequence": is_repeated(self.sequences),
            f"found_by that does not index {METHODS}": beam & ~known_method,
            "rounds that do not fit found_by (draws of a policy count from 1, everything else "
            "has 0)": beam & ~fitting_round,
            "candidates that show their query's own image, which gives the answer away; take "
            "them out of the pool": (images == of_queries.unsqueeze(1)) & self.pool_mask,
        }
        for name, values in self.fields.items():
            problems[f"infinite {name}"] = values.isinf()
        for name in EMBEDDINGS:
            problems[f"{name} with NaN or infinity"] = ~getattr(self, name).isfinite().all(1)
        return problems

    def __repr__(self) -> str:
        return (
            f"BeamTable {self.name!r}: {self.num_queries} queries, {int(self.beam_mask.sum())} "
            f"beams of up to {self.shots} out of {len(self.candidates)} candidates (pools of up "
            f"to {self.pool.shape[1]}); fields: {', '.join(self.fields) or 'none'}"
        )

    @property
    def num_queries(self) -> int:
        return self.sequences.shape[0]

    @property
    def num_beams(self) -> int:
        """The most beams of any query, B (or more: `select` keeps the shape)."""
        return self.sequences.shape[1]

    @property
    def shots(self) -> int:
        """The length of the longest beam, T (or more: `select` keeps the shape)."""
        return self.sequences.shape[2]

    @functools.cached_property
    def pool_mask(self) -> Tensor:
        """A mask, bool [Q, N], that is True where the pool has a candidate."""
        return self.pool >= 0

    @functools.cached_property
    def image_numbers(self) -> tuple[Tensor, Tensor]:
        """A number for the image of each query, int64 [Q], and of each candidate, int64 [M], the
        same for equal images. An unknown image has −1 or −2, so it equals none of the others."""
        queries = self.query_images or ("",) * self.num_queries
        candidates = self.candidate_images or ("",) * len(self.candidates)
        numbers = {image: i for i, image in enumerate((*queries, *candidates)) if image}
        of_queries = torch.tensor([numbers.get(image, -1) for image in queries])
        return of_queries, torch.tensor([numbers.get(image, -2) for image in candidates])

    @functools.cached_property
    def lengths(self) -> Tensor:
        """The number of demonstrations in each beam, int64 [Q, B]; 0 where there is no beam."""
        return (self.sequences >= 0).sum(-1)

    @functools.cached_property
    def beam_mask(self) -> Tensor:
        """A mask, bool [Q, B], that is True where there is a beam."""
        return self.lengths > 0

    @property
    def recorded_lengths(self) -> list[int]:
        """The numbers of demonstrations that its beams have, in order."""
        return self.lengths[self.beam_mask].unique().tolist()

    @functools.cached_property
    def digest(self) -> str:
        """The hash `sha256:…` of the content; it does not depend on name, notes or padding."""
        # sizes without padding
        b = int(self.beam_mask.sum(1).max())
        n = int(self.pool_mask.sum(1).max())
        t = int(self.lengths.max()) if b else 0
        fields = {}
        for name in FIELDS:
            if name in self.fields and not self.fields[name].isnan().all():
                fields[name] = self.fields[name][:, :b]
        sha = hashlib.sha256()
        named = (self.query_images, self.candidate_images)
        images = [images if any(images) else () for images in named]
        sizes = [self.num_queries, n, b, t, *self.candidates.shape]
        blocks = sorted(self.blocks.items())
        sha.update(json.dumps([sizes, self.query_ids, images, list(fields), blocks]).encode())
        integers = (
            self.pool[:, :n],
            self.sequences[:, :b, :t],
            self.found_by[:, :b],
            self.round[:, :b],
        )
        for tensor in (*integers, *fields.values(), self.queries, self.candidates):
            sha.update(np.ascontiguousarray(tensor.numpy()).data)
        return f"sha256:{sha.hexdigest()}"

    @functools.cached_property
    def fingerprints(self) -> list[str]:
        """A short text for each of the Q queries, a hash of its embedding: the same query has the
        same text in every table, whatever its id."""
        return row_hashes(self.queries)

    def select(self, rows: Tensor) -> BeamTable:
        """Return the table of these queries (int64 [n], in this order).

        It has all candidates, and its shape is the same but for the number of queries.
        """
        numbers = torch.arange(self.num_queries)[rows].tolist()
        per_query: dict[str, Any] = {k: getattr(self, k)[rows] for k in (*INTEGERS, "queries")}
        return replace(
            self,
            **per_query,
            fields={name: field[rows] for name, field in self.fields.items()},
            query_ids=tuple(self.query_ids[i] for i in numbers),
            query_images=tuple(self.query_images[i] for i in numbers) if self.query_images else (),
        )

    def with_beams(
        self,
        sequences: Tensor,
        fields: Mapping[str, Tensor],
        found_by: Tensor | int,
        round: Tensor | int = 0,
    ) -> BeamTable:
        """Return the table with more beams after its own, without padding between them.

        Args:
            sequences: int64 [Q, B', T'], with empty rows anywhere.
            fields: float32 [Q, B'] by name; a field that one side lacks is NaN there.
            found_by, round: int64 [Q, B'], or a number for all.
        """
        new = {**fields, "sequences": sequences, "found_by": found_by, "round": round}
        # beams of both sides, [Q, B] and [Q, B']
        masks = (self.beam_mask, (sequences >= 0).any(-1))
        sides: tuple[dict[str, Any], ...] = (self.beams, new)
        shots = max(self.shots, sequences.shape[2])
        # put them side by side, padding what one side lacks
        joined = {}
        for name in sides[0] | new:
            columns = []
            for side, exists in zip(sides, masks, strict=True):
                column = side.get(name, PADDING.get(name, torch.nan))
                if not isinstance(column, Tensor):
                    column = torch.full(exists.shape, column)
                elif name == "sequences":
                    column = pad(column, (0, shots - column.shape[2]), value=-1)
                columns.append(column)
            joined[name] = torch.cat(columns, 1)
        return self.with_only(joined, torch.cat(masks, 1))

    @property
    def beams(self) -> dict[str, Tensor]:
        """What the table knows of beams, [Q, B, …] by name."""
        return {**self.fields, **{name: getattr(self, name) for name in PADDING}}

    def with_only(self, beams: Mapping[str, Tensor], mask: Tensor) -> BeamTable:
        """Return the table with those of these beams that are in the mask, bool [Q, B]."""
        fields = {
            name: closed_up(x, mask, PADDING.get(name, torch.nan)) for name, x in beams.items()
        }
        integers: dict[str, Any] = {name: fields.pop(name) for name in PADDING}
        return replace(self, fields=fields, **integers)

    def split(self, train: float = 0.6, validation: float = 0.2, seed: int = 0) -> Split:
        """Split by query, or by image where images are known; the rest is the test part.

        It is empty if the two shares add up to 1: then the policy is judged on other beams.
        Deterministic in `seed` and in the order of the queries. Raises InputError if the shares
        leave a part empty.
        """
        images = self.query_images or ("",) * self.num_queries
        return split_groups(
            [image or (query,) for image, query in zip(images, self.query_ids, strict=True)],
            train,
            validation,
            seed,
            table=f"beam table {self.name!r}",
            rows="queries",
            allow_no_test=math.isclose(train + validation, 1),
        )

    def save(self, path: str | Path) -> None:
        """Write a `.safetensors` file, integers in the smallest type that holds them."""
        save_table(path, self, **{name: _narrow(getattr(self, name)) for name in INTEGERS})

    @classmethod
    def load(cls, path: str | Path) -> BeamTable:
        """Read a file that `save` wrote. Raises InputError if it is something else."""
        changes: dict[str, Any] = dict.fromkeys(INTEGERS, Tensor.long)
        changes["blocks"] = lambda blocks: {name: tuple(part) for name, part in blocks.items()}
        return load_table(path, "beam table", cls, changes)


def after_gaps(used: Tensor) -> Tensor:
    """Return True where a used entry follows an unused one: bool [*, n] → bool [*, n − 1]."""
    return used[..., 1:] & ~used[..., :-1]


def is_repeated(numbers: Tensor) -> Tensor:
    """Return True for each number ≥ 0 that occurs again in its row: int64 [*, n] → bool [*, n − 1].

    The result follows the sorted numbers.
    """
    ordered = numbers.sort(-1).values
    return (ordered[..., 1:] >= 0) & (ordered[..., 1:] == ordered[..., :-1])


def closed_up(x: Tensor, mask: Tensor, padding: float) -> Tensor:
    """Return the entries of x [Q, B, …] in `mask`, bool [Q, B], at the front of their rows.

    Padding follows. Rows are no longer than the fullest one needs.
    """
    # a stable sort keeps the order of the entries
    order = (~mask).int().argsort(dim=1, stable=True)[:, : int(mask.sum(1).max())]
    if x.ndim == 3:
        mask = mask.unsqueeze(2)
        order = order.unsqueeze(2)
    padded = torch.tensor(padding)
    return x.to(padded.dtype).where(mask, padded).take_along_dim(order, 1)


def bank_rows(pool: Tensor, sequences: Tensor) -> Tensor:
    """Return the rows of the bank at these places, int64 [n, *, T], in pools int64 [n, N].

    −1 stays −1.
    """
    rows = pool.gather(1, sequences.clamp_min(0).flatten(1))
    return rows.view(sequences.shape).masked_fill(sequences < 0, -1)


def _narrow(x: Tensor) -> Tensor:
    """Return integers ≥ −1 in the smallest signed type that holds them all."""
    numbers = x.numpy()
    kind = np.min_scalar_type(-1 - int(numbers.max(initial=0)))
    return torch.from_numpy(numbers.astype(kind))
