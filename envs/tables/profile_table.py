"""ProfileTable: measurements as dense arrays, samples × configurations.

Every reader (`knobwise.envs.readers`) ends in this class; everything else starts from it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.common.words import spelled
from knobwise.envs.tables.action_index import ActionIndex
from knobwise.envs.tables.columns import FEATURES, Column, columns_of
from knobwise.envs.tables.splits import Split, split_fixed, split_groups
from knobwise.envs.tables.tensor_file import check_axes, load_table, row_hashes, save_table
from knobwise.envs.tables.units import MS, check_kept

KnobValue = bool | int | float | str


@dataclass(frozen=True)
class Knob:
    """A setting of the measured system that can take several values."""

    name: str
    values: tuple[KnobValue, ...]
    """Every value in the profile: numbers in ascending order, False before True, the tiers low,
    medium, high in this order, other names alphabetically."""

    @property
    def spelled(self) -> tuple[str, tuple[KnobValue, ...]]:
        """The name, and the values with True and False as text: what it has in common with itself
        in files and controllers of earlier versions, for which these were names."""
        return self.name, tuple(map(spelled, self.values))


@dataclass(frozen=True, eq=False)
class ProfileTable:
    """Facts: measured accuracy and latency of N samples under C configurations of K knobs.

    A cell that was not profiled has `mask` False and NaN in `accuracy` and `latency_ms`, so that
    a mistaken read propagates NaN. Every configuration and every sample has at least one profiled
    cell.

    Raises:
        InputError: if shapes do not fit, a profiled cell is not finite, a latency is negative or
            not the median of its repeats, an accuracy is outside [0, 1], ids or configurations
            occur twice, a sample or a configuration has no profiled cell, or the unit is one of
            time other than ms.
    """

    WORDS: ClassVar = ("datasets", "image_ids", "clusters", "parts", "question_types")
    """Fields with a name for each sample, which may be empty."""
    OPTIONAL: ClassVar = ("repeats_ms", "first_look_ms", "sampling_weight")
    """Tensors that may be None."""
    AXES: ClassVar = {
        **dict.fromkeys(("accuracy", "latency_ms", "mask", *OPTIONAL), "NC"),
        **dict.fromkeys(("sample_ids", "texts", *WORDS), "N"),
        "knobs": "K",
        "configurations": "CK",
        "repeats_ms": "NCR",
        "features": "N_",
        "costs": "NC",
    }
    """A letter for each axis of a field."""
    name: str
    """The profile's name in reports."""
    knobs: tuple[Knob, ...]
    """The K knobs, K ≥ 1. A system without knobs has one whose values name its configurations."""
    configurations: Tensor
    """int64 [C, K]: for each configuration the index of each knob's value in `Knob.values`."""
    accuracy: Tensor
    """float32 [N, C], in [0, 1]; NaN where not profiled."""
    latency_ms: Tensor
    """float32 [N, C], milliseconds, ≥ 0, the median of each cell's measurements; NaN where not
    profiled."""
    mask: Tensor
    """bool [N, C]: True where the cell was profiled."""
    sample_ids: tuple[str, ...]
    """N ids, unique inside a data set."""
    features: dict[str, Tensor] = field(default_factory=dict)
    """Named blocks, float32 [N, d]. NaN means missing. May be empty: a policy then sees only the
    budget. A block with the name of a text is what encodes this text."""
    columns: tuple[Column, ...] = ()
    """What the block `features` holds, if its columns have names. Not part of the digest."""
    texts: dict[str, list[str]] = field(default_factory=dict)
    """Columns of free text, or of chats as JSON, N each: features once they are encoded by what was
    fitted on training samples, see `features`."""
    datasets: tuple[str, ...] = ()
    """N data set names; empty means one data set with the table's name."""
    image_ids: tuple[str, ...] = ()
    """N ids of the image behind each sample, or empty. Samples of one image are never split
    apart."""
    clusters: tuple[str, ...] = ()
    """N names of what a sample belongs to, such as a document or a user, or empty. Samples of one
    cluster are never split apart, of whatever data set they are."""
    parts: tuple[str, ...] = ()
    """N of the names train, validation, test if the file fixes the split; else empty."""
    question_types: tuple[str, ...] = ()
    """N kinds of question, or empty. Not an input of policies; training can draw them evenly."""
    notes: tuple[str, ...] = ()
    """What the reader skipped or could not join, with counts. Not part of the digest."""
    unit: str = MS
    """ms, since times are kept in it; or the unit of another cost that stands for latency, such as
    USD: `latency_ms`, `repeats_ms` and all budgets are then in it. Not part of the digest."""
    features_ms: float = 0.0
    """Time to compute a request's features, ms, which policies that read them are charged. Not part
    of the digest."""
    repeats_ms: Tensor | None = None
    """float32 [N, C, R], every measurement of each cell, NaN after its last; None if each cell was
    measured once."""
    first_look_ms: Tensor | None = None
    """float32 [N, C], 0 where not profiled, None for nothing: the part of `latency_ms` that reading
    a request for its features adds. It is 0 where the answer continues from that reading."""
    sampling_weight: Tensor | None = None
    """float32 [N, C], how many cells a measured cell stands for: 1 / the probability with which it
    was drawn, 0 if it was chosen by what was measured before. None where nothing was drawn, or
    nobody knows."""
    costs: dict[str, Tensor] = field(default_factory=dict)
    """Further costs by name, such as `usd`, float32 [N, C] ≥ 0: means over the measurements of a
    cell, NaN where unknown."""

    def __post_init__(self) -> None:
        name = f"profile {self.name!r}"
        # every axis has one length
        check_axes(name, self, self.AXES)
        n, c = self.accuracy.shape
        if n == 0 or c == 0 or not self.knobs:
            raise InputError(f"{name} is empty: {n} samples, {c} configurations")
        check_kept(name, self.unit)
        for what, count in self._count_problems().items():
            if count:
                raise InputError(f"{name}: {count} × {what}")

    def _count_problems(self) -> Counter[str]:
        """Return what may be wrong with the content, and how often it occurs."""
        ids = set(zip(self.dataset_names, self.sample_ids, strict=True))
        different = len(self.configurations.unique(dim=0))
        counts = Counter[str]()
        counts["configurations without any profiled sample"] = int((~self.mask.any(0)).sum())
        counts["sample ids that are not unique inside a data set"] = self.num_samples - len(ids)
        counts["configuration that occurs twice"] = self.num_configurations - different
        # in pieces, because a table mapped from a file may be larger than the memory
        tensors = self.accuracy, self.latency_ms, self.mask, self.measurements_ms
        pieces = [x.split(1 << 16) for x in tensors]
        for accuracy, latency, mask, repeats in zip(*pieces, strict=True):
            problems = {
                "accuracy that is NaN or infinite": mask & ~accuracy.isfinite(),
                "latency_ms that is NaN or infinite": mask & ~latency.isfinite(),
                "negative latency_ms": mask & (latency < 0),
                "accuracy outside [0, 1]": mask & ((accuracy < 0) | (accuracy > 1)),
                "samples without any profiled configuration": ~mask.any(1),
                "unprofiled cells that are not NaN": ~mask & ~(accuracy.isnan() & latency.isnan()),
            }
            if self.repeats_ms is not None:
                missing = repeats.isnan()
                median = median_of(repeats)
                same = torch.isclose(median, latency, rtol=1e-5, atol=0.0, equal_nan=True)
                problems |= {
                    "repeats_ms that are infinite or negative": (repeats < 0) | repeats.isinf(),
                    "repeats_ms after NaN, which may only follow the last of a cell": (
                        missing[..., :-1] & ~missing[..., 1:]
                    ),
                    "latency_ms that is not the median_of repeats_ms": ~same,
                }
            for what, wrong in problems.items():
                counts[what] += int(wrong.sum())
        # what only some tables have
        if self.first_look_ms is not None:
            counts["first_look_ms that is not at least 0"] = int((~(self.first_look_ms >= 0)).sum())
        return counts

    def __repr__(self) -> str:
        wide = (f"{name} {block.shape[1]} wide" for name, block in self.features.items())
        blocks = ", ".join([*wide, *(self.texts.keys() - self.features.keys())])
        times = f", up to {self.num_repeats} times" * (self.num_repeats > 1)
        return (
            f"ProfileTable {self.name!r}: {self.num_samples} samples × {self.num_configurations} "
            f"configurations of {', '.join(knob.name for knob in self.knobs)}; "
            f"{self.mask.double().mean():.1%} profiled{times}; "
            f"features: {blocks or 'none'}"
        )

    @property
    def num_samples(self) -> int:
        return self.accuracy.shape[0]

    @property
    def num_configurations(self) -> int:
        return self.accuracy.shape[1]

    @property
    def num_repeats(self) -> int:
        """The most measurements of a cell, R."""
        return self.measurements_ms.shape[-1]

    @property
    def measurements_ms(self) -> Tensor:
        """Every measurement of each cell, float32 [N, C, R], NaN after its last.

        It is a view of a tensor of the table.
        """
        if self.repeats_ms is None:
            return self.latency_ms.unsqueeze(-1)
        return self.repeats_ms

    @property
    def dataset_names(self) -> tuple[str, ...]:
        """The data set of each sample, N names."""
        return self.datasets or (self.name,) * self.num_samples

    @property
    def split_keys(self) -> list[tuple[str, str]]:
        """What each sample may not be split from: samples with the same key, N pairs. They are of
        one cluster, or of one image of a data set."""
        if self.clusters:
            return [("", cluster) for cluster in self.clusters]
        return list(zip(self.dataset_names, self.image_ids or self.sample_ids, strict=True))

    @property
    def knob_sizes(self) -> list[int]:
        """The number of values of each knob: `nvec` of the action space."""
        return [len(knob.values) for knob in self.knobs]

    def configuration(self, index: int) -> dict[str, KnobValue]:
        """Return the knob values of configuration `index`, by knob name."""
        codes = self.configurations[index].tolist()
        return {knob.name: knob.values[code] for knob, code in zip(self.knobs, codes, strict=True)}

    def label(self, index: int) -> str:
        """Return configuration `index` as text, for tables and plots."""
        knobs = self.configuration(index)
        return " ".join(f"{name}={spelled(value)}" for name, value in knobs.items())

    @functools.cached_property
    def find(self) -> ActionIndex:
        """The index of configurations by knob values: int64 [*, K] → int64 [*].

        It is −1 where no such configuration exists.
        """
        return ActionIndex(self.configurations)

    @functools.cached_property
    def digest(self) -> str:
        """The hash `sha256:…` of the content: measurements, features, names.

        It does not depend on the file that the content comes from, or on what encodes its texts.
        """
        sha = hashlib.sha256()
        # a text that is encoded stays what it was
        blocks = {name: block for name, block in self.features.items() if name not in self.texts}
        # names first, then tensors
        text: list[object] = [
            [knob.spelled for knob in self.knobs],
            self.sample_ids,
            self.datasets,
            self.image_ids,
            self.parts,
            list(blocks),
        ]
        # parts that a table may lack count only where they exist
        if self.question_types:
            text.append(self.question_types)
        named = {"clusters": self.clusters, "costs": [*self.costs], "texts": self.texts}
        text += [[name, names] for name, names in named.items() if names]
        if self.repeats_ms is not None:
            text.append(self.num_repeats)
        sha.update(json.dumps(text).encode())
        tensors = [self.configurations, self.mask, self.accuracy, self.latency_ms]
        tensors += [getattr(self, name) for name in self.OPTIONAL]
        for tensor in (*tensors, *blocks.values(), *self.costs.values()):
            if tensor is not None:
                sha.update(np.ascontiguousarray(tensor.numpy()).data)
        return f"sha256:{sha.hexdigest()}"

    def split(self, train: float = 0.6, validation: float = 0.2, seed: int = 0) -> Split:
        """Split by sample, or by image or cluster where these are known.

        `train` and `validation` are shares; the rest is the test part. If the file fixes a split
        (`parts`), that one is used; if it has no validation part, one is taken from its training
        part. The same `seed` and order of samples give the same split.

        Raises InputError if the shares leave a part empty, or if the fixed split lacks a part or
        divides the samples of an image or cluster between parts.
        """
        keys = self.split_keys
        name = f"profile {self.name!r}"
        weighted = bool(self.clusters)
        if self.parts:
            return split_fixed(self.parts, keys, train, validation, seed, name, weighted)
        return split_groups(keys, train, validation, seed, table=name, weighted=weighted)

    def blocks(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the feature blocks [n, d] of these samples (int64 [n]), by name."""
        return {name: block[rows] for name, block in self.features.items()}

    def block_columns(self, block: str) -> tuple[Column, ...]:
        """Return what a feature block holds; a column without a name is `block[0]`, …"""
        if block == FEATURES and self.columns:
            return self.columns
        width = self.features[block].shape[1]
        return tuple(Column(f"{block}[{i}]", None, True) for i in range(width))

    def fingerprints(self, rows: Tensor) -> list[str]:
        """Return a short text for each of these samples (int64 [n]).

        The text identifies the input of the sample: the same input has the same text in every
        table. It is a hash of the features; without features it is the data set and the id. Named
        columns are often few, and equal for different inputs, so the id is added to their hash.
        """
        if not self.features:
            datasets = self.datasets or ("",) * self.num_samples
            return [f"{datasets[row]}/{self.sample_ids[row]}" for row in rows.tolist()]
        joined = torch.cat([*self.blocks(rows).values()], 1)
        hashes = row_hashes(joined)
        if self.columns:
            return [f"{hashes[i]}/{self.sample_ids[row]}" for i, row in enumerate(rows.tolist())]
        return hashes

    def save(self, path: str | Path) -> None:
        """Write a `.safetensors` file, which `load` maps into memory instead of copying."""
        save_table(path, self)

    @classmethod
    def load(cls, path: str | Path) -> ProfileTable:
        """Read a file that `save` wrote; the tensors stay mapped to it.

        Raises InputError if the file is something else.
        """
        changes = {
            "knobs": lambda knobs: tuple(Knob(name, tuple(values)) for name, values in knobs),
            "columns": columns_of,
        }
        return load_table(path, "table", cls, changes)


def median_of(repeats_ms: Tensor) -> Tensor:
    """Compute the median of each cell's measurements, [*, R] → [*].

    It is the mean of the middle two where their number is even. NaN stands for no measurement.
    """
    if repeats_ms.shape[-1] == 1:
        return repeats_ms.squeeze(-1).clone()
    ordered = repeats_ms.sort(-1).values  # NaN last
    count = (~ordered.isnan()).sum(-1, keepdim=True)
    low = ((count - 1) // 2).clamp_min(0)
    high = (count // 2).clamp_max(ordered.shape[-1] - 1)
    return torch.lerp(ordered.gather(-1, low), ordered.gather(-1, high), 0.5).squeeze(-1)
