"""BeamTable: demonstration sequences that were tried, and how well each did, dense, as queries × beams × shots.

This is the start of the selector's way of the data, as `ProfileTable` is of the controller's. Every reader
(`knobwise.envs.demonstrations.beam_files`) ends in this class; environments, rewards and selectors start from it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.envs.tables.profile_table import Split

FIELDS = ("beam_score", "logprob_score", "vqa_correct", "vqa_acc_score", "vqa_gt_prob", "vqa_rel_score")
"""What can be recorded of a beam: information gain, log-probability of the answer, right or wrong (0 or 1), soft
accuracy, probability of the true answer, relevance."""
METHODS = ("beam", "sample", "retrieval", "random", "policy")
"""How a beam can have been found. `beam` looked at the answer; none of the others did."""
POLICY = METHODS.index("policy")
GROUPS = {"all": METHODS, "without_beams": METHODS[1:], "own": ("policy",), "beams": ("beam",)}
"""Methods by name. `without_beams`: nothing that was found by looking at the answer; `own`: draws of a policy only."""
WORDS = ("query_ids", "query_images", "candidate_images", "notes")
INTEGERS = ("pool", "sequences", "found_by", "round")


@dataclass(frozen=True, eq=False)
class BeamTable:
    """Q queries, each with its own pool of N candidates at most and B recorded beams of T demonstrations at most.

    Padding stands at the end: −1 in integers, NaN in `fields`, 0 in `round`. A query may have one beam or none.

    Raises:
        InputError: shapes or types that do not fit, padding that is not at the end, a candidate without embedding, a
            place outside its pool or twice in a sequence, a candidate that stands twice in a pool or shows the query's
            own image, embeddings that are not finite, query ids that occur twice.
    """

    name: str
    """How the data are called in reports."""
    query_ids: tuple[str, ...]
    """Q ids, unique."""
    pool: Tensor
    """int64 [Q, N]: the row of `candidates` behind each place of the query's pool; −1 where a pool is shorter."""
    sequences: Tensor
    """int64 [Q, B, T]: places in the query's own pool; −1 after the end of a sequence, and where there is no beam."""
    fields: dict[str, Tensor]
    """float32 [Q, B] under (some of) the names `FIELDS`; NaN where not recorded."""
    found_by: Tensor
    """int64 [Q, B]: index into `METHODS`; −1 where there is no beam."""
    round: Tensor
    """int64 [Q, B]: 1, 2, … for draws of a policy, 0 for everything else."""
    queries: Tensor
    """float32 [Q, d]: embeddings of the queries."""
    candidates: Tensor
    """float32 [M, d]: embeddings of the whole bank of candidates, in the same space."""
    query_images: tuple[str, ...] = ()
    """Q ids of the image that each query asks about, "" where unknown; or empty."""
    candidate_images: tuple[str, ...] = ()
    """M ids of the image that each candidate shows, "" where unknown; or empty."""
    blocks: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Columns [from, to) of the embeddings that mean something, by name: "image"; "question" (what a query asks, what a
    candidate answers); "annotator" (who made a candidate). Empty where unknown."""
    notes: tuple[str, ...] = ()
    """What the reader dropped or noticed, counted, in words. Not part of the digest."""

    def __post_init__(self) -> None:
        where = f"beam table {self.name!r}"
        for what, axes in {"pool": "QN", "sequences": "QBT", "queries": "Qd", "candidates": "Md"}.items():
            if (tensor := getattr(self, what)).ndim != len(axes):
                raise InputError(f"{where}: {what} has shape {tuple(tensor.shape)}, expected [{', '.join(axes)}]")
        q, b, d, m = len(self.pool), self.sequences.shape[1], self.queries.shape[1], len(self.candidates)
        outcomes = {f"fields[{name}]": field for name, field in self.fields.items()}
        shapes = {
            "query_ids": ((len(self.query_ids),), (q,)),
            "sequences": (tuple(self.sequences.shape[:2]), (q, b)),
            "queries": (tuple(self.queries.shape), (q, d)),
            "candidates": (tuple(self.candidates.shape), (m, d)),
            **{k: (tuple(getattr(self, k).shape), (q, b)) for k in ("found_by", "round")},
            **{k: (tuple(field.shape), (q, b)) for k, field in outcomes.items()},
            "query_images": ((len(self.query_images),), (q if self.query_images else 0,)),
            "candidate_images": ((len(self.candidate_images),), (m if self.candidate_images else 0,)),
        }
        for what, (shape, wanted) in shapes.items():
            if shape != wanted:
                raise InputError(f"{where}: {what} has shape {shape}, expected {wanted}")
        types = {k: (getattr(self, k).dtype, torch.int64) for k in INTEGERS}
        types |= {k: (getattr(self, k).dtype, torch.float32) for k in ("queries", "candidates")}
        types |= {k: (field.dtype, torch.float32) for k, field in outcomes.items()}
        for what, (dtype, right) in types.items():
            if dtype != right:
                raise InputError(f"{where}: {what} holds {dtype}, expected {right}")
        if unknown := sorted(set(self.fields) - set(FIELDS)):
            raise InputError(f"{where}: unknown fields {', '.join(unknown)}; known are {', '.join(FIELDS)}")
        if q == 0:
            raise InputError(f"{where} is empty: it has no queries")
        if len(set(self.query_ids)) != q:
            raise InputError(f"{where}: query ids are not unique")
        for name, (start, stop) in self.blocks.items():
            if not 0 <= start < stop <= d:
                raise InputError(f"{where}: block {name!r} is columns {start} to {stop}, but embeddings are {d} wide")
        used, real, beam = self.sequences >= 0, self.pool_mask, self.beam_mask
        recorded = torch.stack([~field.isnan() for field in self.fields.values()] or [beam]).any(0)
        sorted_pool, sorted_places = self.pool.sort(1).values, self.sequences.sort(2).values
        twice_in_pool = (sorted_pool[:, 1:] >= 0) & (sorted_pool[:, 1:] == sorted_pool[:, :-1])
        twice_in_beam = (sorted_places[..., 1:] >= 0) & (sorted_places[..., 1:] == sorted_places[..., :-1])
        problems = {
            "numbers below −1 in pool or sequences": torch.cat(
                [(self.pool < -1).ravel(), (self.sequences < -1).ravel()]
            ),
            "padding inside a pool: it stands at the end": real[:, 1:] & ~real[:, :-1],
            f"pool entries beyond the {m} candidates": self.pool >= m,
            "candidates that stand twice in a pool": twice_in_pool,
            "padding inside a sequence: it stands at the end": used[..., 1:] & ~used[..., :-1],
            "padding between the beams of a query: it stands at the end": beam[:, 1:] & ~beam[:, :-1],
            "places outside the query's own pool": self.sequences >= real.sum(1)[:, None, None],
            "places that stand twice in a sequence": twice_in_beam,
            f"found_by that is no index into {METHODS}": beam & ((self.found_by < 0) | (self.found_by >= len(METHODS))),
            "rounds that do not fit found_by (draws of a policy count from 1, all else has 0)": beam
            & ((self.round < 0) | ((self.round > 0) != (self.found_by == POLICY))),
            "outcomes, found_by or round where there is no beam": ~beam
            & (recorded | (self.found_by != -1) | (self.round != 0)),
            **{f"infinite {what}": field.isinf() for what, field in outcomes.items()},
            "query embeddings that are NaN or infinite": ~self.queries.isfinite().all(1),
            "candidate embeddings that are NaN or infinite": ~self.candidates.isfinite().all(1),
        }
        for what, wrong in problems.items():
            if count := int(wrong.sum()):
                raise InputError(f"{where}: {count} × {what}")
        own = shows_own_image(self.pool, self.query_images, self.candidate_images)
        if count := int(own.sum()):
            raise InputError(
                f"{where}: {count} candidates show their query's own image, which gives the answer away; take them out "
                "of the pool"
            )

    def __repr__(self) -> str:
        return (
            f"BeamTable {self.name!r}: {self.num_queries} queries, {int(self.beam_mask.sum())} beams of up to "
            f"{self.shots} out of {len(self.candidates)} candidates (pools of up to {self.pool.shape[1]}); "
            f"fields: {', '.join(self.fields) or 'none'}"
        )

    # -- size ----------------------------------------------------------------------------------------------------------

    @property
    def num_queries(self) -> int:
        return self.sequences.shape[0]

    @property
    def num_beams(self) -> int:
        """B, the beams of the query that has most (or more, where a selection of queries kept the shape)."""
        return self.sequences.shape[1]

    @property
    def shots(self) -> int:
        """T, the demonstrations of the longest beam (or more, as `num_beams`)."""
        return self.sequences.shape[2]

    @functools.cached_property
    def pool_mask(self) -> Tensor:
        """bool [Q, N]: True where the pool has a candidate."""
        return self.pool >= 0

    @functools.cached_property
    def lengths(self) -> Tensor:
        """int64 [Q, B]: the demonstrations of each beam, 0 where there is no beam."""
        return (self.sequences >= 0).sum(-1)

    @functools.cached_property
    def beam_mask(self) -> Tensor:
        """bool [Q, B]: True where there is a beam."""
        return self.lengths > 0

    @functools.cached_property
    def digest(self) -> str:
        """`sha256:…` of the content, whatever its name, its notes and how much padding it has."""
        b, n = int(self.beam_mask.sum(1).max()), int(self.pool_mask.sum(1).max())
        t = int(self.lengths.max()) if b else 0
        fields = {name: self.fields[name] for name in FIELDS if name in self.fields}
        fields = {name: field[:, :b] for name, field in fields.items() if not field.isnan().all()}
        sha = hashlib.sha256()
        images = [images if any(images) else () for images in (self.query_images, self.candidate_images)]
        sizes = [self.num_queries, n, b, t, *self.candidates.shape]
        blocks = sorted(self.blocks.items())
        sha.update(json.dumps([sizes, self.query_ids, images, list(fields), blocks]).encode())
        integers = (self.pool[:, :n], self.sequences[:, :b, :t], self.found_by[:, :b], self.round[:, :b])
        for tensor in (*integers, *fields.values(), self.queries, self.candidates):
            sha.update(np.ascontiguousarray(tensor.numpy()).data)
        return f"sha256:{sha.hexdigest()}"

    # -- other tables out of this one ----------------------------------------------------------------------------------

    def select(self, rows: Tensor) -> BeamTable:
        """The table of these queries (int64 [n], in this order), with all candidates and in unchanged shape."""
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
        self, sequences: Tensor, fields: Mapping[str, Tensor], found_by: Tensor | int, round: Tensor | int = 0
    ) -> BeamTable:
        """The table with more beams after those it has; padding between them is closed up.

        Args:
            sequences: int64 [Q, B', T'], places in the pools; −1 as in `BeamTable.sequences`, empty rows anywhere.
            fields: float32 [Q, B'] by name; what one side does not record is NaN there.
            found_by: int64 [Q, B'] or one for all.
            round: int64 [Q, B'] or one for all.
        """
        if sequences.ndim != 3 or len(sequences) != self.num_queries:
            raise InputError(
                f"beam table {self.name!r}: beams to add have shape {tuple(sequences.shape)}, expected "
                f"[{self.num_queries}, B, T]"
            )
        added, shots = (sequences >= 0).any(-1), max(self.shots, sequences.shape[2])
        mask = torch.cat([self.beam_mask, added], 1)
        first = (~mask).int().argsort(dim=1, stable=True)[:, : int(mask.sum(1).max())]

        def join(old: Tensor | None, new: Tensor | int | None, padding: float) -> Tensor:
            kind = torch.float32 if padding != padding else torch.int64
            filled = torch.as_tensor(padding if new is None else new, dtype=kind)
            if filled.ndim and filled.shape != added.shape:
                raise InputError(
                    f"beam table {self.name!r}: what is recorded of beams to add has shape {tuple(filled.shape)}, "
                    f"expected {tuple(added.shape)}"
                )
            filled = torch.where(added, filled, padding).to(kind)
            before = torch.full(self.beam_mask.shape, padding, dtype=kind) if old is None else old
            return torch.cat([before, filled], 1).gather(1, first)

        places = [pad(x, (0, shots - x.shape[2]), value=-1) for x in (self.sequences, sequences)]
        names = dict.fromkeys([*self.fields, *fields])
        return replace(
            self,
            sequences=torch.cat(places, 1).gather(1, first[..., None].expand(-1, -1, shots)),
            fields={name: join(self.fields.get(name), fields.get(name), torch.nan) for name in names},
            found_by=join(self.found_by, found_by, -1),
            round=join(self.round, round, 0),
        )

    def split(self, train: float = 0.6, validation: float = 0.2, seed: int = 0) -> Split:
        """Split by query, or by image where images are known; the rest is the test part. There is none when the two
        shares add up to 1: then other beams are judged on.

        Deterministic in `seed` and in the order of the queries.

        Raises:
            InputError: shares that leave a part empty.
        """
        images = self.query_images or ("",) * self.num_queries
        units = [("image", image) if image else ("query", q) for image, q in zip(images, self.query_ids, strict=True)]
        numbers: dict[tuple[str, str], int] = {}
        unit = torch.tensor([numbers.setdefault(u, len(numbers)) for u in units])
        count = len(numbers)
        first, second = round(train * count), round((train + validation) * count)
        whole = math.isclose(train + validation, 1)
        if not 0 < first < second <= count - (not whole):
            raise InputError(
                f"beam table {self.name!r}: shares train={train}, validation={validation} leave a part of its {count} "
                "queries (or images) empty; each of train, validation and the rest must get at least one"
            )
        shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        place = shuffled.argsort()[unit]
        parts = [place < first, (place >= first) & (place < second), place >= second]
        return Split(*(part.nonzero().squeeze(1) for part in parts))

    # -- on disk -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, float16: bool = False) -> None:
        """Write one `.safetensors` file, integers in the smallest type that holds them.

        Args:
            path: where to.
            float16: write embeddings in half the space, rounded: another digest.

        Raises:
            InputError: embeddings that float16 cannot hold.
        """
        kind = torch.float16 if float16 else torch.float32
        embeddings = {"queries": self.queries.to(kind), "candidates": self.candidates.to(kind)}
        if not all(block.isfinite().all() for block in embeddings.values()):
            raise InputError(f"{path}: embeddings hold values too large for float16; save them as float32")
        head = {"format": "knobwise.BeamTable/1", "name": self.name, "blocks": self.blocks}
        head |= {k: list(getattr(self, k)) for k in WORDS}
        # the head is a tensor too: what safetensors calls metadata must stay below 100 MB
        tensors = {"head": torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)}
        tensors |= {f"fields.{name}": field.contiguous() for name, field in self.fields.items()}
        tensors |= {name: _narrow(getattr(self, name)) for name in INTEGERS}
        tensors |= {name: block.contiguous() for name, block in embeddings.items()}
        with written_whole(path) as temporary:
            save_file(tensors, temporary)

    @classmethod
    def load(cls, path: str | Path) -> BeamTable:
        """Read what `save` wrote.

        Raises:
            InputError: no such file, or another kind of file.
        """
        try:
            with safe_open(str(path), framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            head: dict[str, Any] = json.loads(tensors.pop("head").numpy().tobytes())
            parts: dict[str, Any] = {k: tuple(head[k]) for k in WORDS} | {"name": head["name"]}
            parts["blocks"] = {name: (start, stop) for name, (start, stop) in head["blocks"].items()}
            parts |= {name: tensors[name].long() for name in INTEGERS}
            parts |= {name: tensors[name].float() for name in ("queries", "candidates")}
            parts["fields"] = {k.removeprefix("fields."): v for k, v in tensors.items() if k.startswith("fields.")}
            return cls(**parts)
        except FileNotFoundError:
            raise InputError(f"{path}: no such file") from None
        except Exception as error:
            raise InputError(f"{path}: not a beam table that knobwise saved ({error})") from error


def shows_own_image(pool: Tensor, query_images: Sequence[str], candidate_images: Sequence[str]) -> Tensor:
    """bool [Q, N]: True where a candidate of the pool (int64 [Q, N]) shows the image that the query asks about.

    Unknown images, named "", are nobody's; without images on either side all is False.
    """
    if not query_images or not candidate_images:
        return torch.zeros_like(pool, dtype=torch.bool)
    names, codes = np.unique(np.array([*query_images, *candidate_images], dtype=object), return_inverse=True)
    known = torch.from_numpy(names != "")
    query, candidate = torch.from_numpy(codes).split([len(query_images), len(candidate_images)])
    return (candidate[pool.clamp_min(0)] == query[:, None]) & known[query][:, None] & (pool >= 0)


def _narrow(x: Tensor) -> Tensor:
    """The same integers in the smallest signed type that holds them all."""
    low, high = (int(x.min()), int(x.max())) if x.numel() else (0, 0)
    kinds = (torch.int8, torch.int16, torch.int32)
    fitting = (kind for kind in kinds if torch.iinfo(kind).min <= low and high <= torch.iinfo(kind).max)
    return x.to(next(fitting, torch.int64)).contiguous()
