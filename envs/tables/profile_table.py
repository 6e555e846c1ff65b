"""ProfileTable: what was measured, dense, as samples × configurations.

Every reader (`knobwise.envs.readers`) ends in this class; environments, baselines, policies, evaluation start from it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from knobwise.common.errors import InputError
from knobwise.common.files import written_whole

KnobValue = int | float | str


@dataclass(frozen=True)
class Knob:
    """One thing that can be set on the measured system."""

    name: str
    values: tuple[KnobValue, ...]
    """Every value that occurs in the profile: numbers in ascending order, the tiers low, medium, high in this order,
    other names in the order of the alphabet."""


class Split(NamedTuple):
    """Row numbers of a table, int64, disjoint: fit on `train`, choose on `validation`, report on `test`."""

    train: Tensor
    validation: Tensor
    test: Tensor


class ActionIndex(nn.Module):
    """Finds configurations by their knob values, also where most combinations of values do not exist.

    Args:
        configurations: int64 [C, K], for each configuration the index of each knob's value.

    Shapes: forward takes int64 [*, K] and gives int64 [*], −1 where no configuration has these values.
    """

    codes: Tensor
    order: Tensor

    def __init__(self, configurations: Tensor) -> None:
        super().__init__()
        # a knob's value is a digit; one more at either end of the digits stands for all values that do not exist (the
        # lower one is −1: what is below 0 then counts from the end of `order`, and meets nothing else there)
        self.most = int(configurations.max()) + 1
        base, width = self.most + 2, configurations.shape[1]
        self.dense = base**width <= 1 << 20
        self.strides = [base**knob for knob in range(width)]
        if base**width >= 1 << 62:  # more combinations than int64 can number: hash them instead
            self.strides = torch.randint(1 << 62, (width,), generator=torch.Generator().manual_seed(0)).tolist()
        codes, order = self._code(configurations).sort()
        if self.dense:
            codes, order = codes[:0], torch.full((base**width,), -1).scatter_(0, codes, order)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("order", order, persistent=False)

    def _code(self, actions: Tensor) -> Tensor:
        digits = actions.clamp(-1, self.most).unbind(-1)
        code = digits[0] * self.strides[0]
        for digit, stride in zip(digits[1:], self.strides[1:], strict=True):
            code = torch.add(code, digit, alpha=stride)
        return code

    def forward(self, actions: Tensor) -> Tensor:
        code = self._code(actions)
        if self.dense:
            return self.order.take(code)
        place = torch.searchsorted(self.codes, code).clamp_max(len(self.codes) - 1)
        return torch.where(self.codes[place] == code, self.order[place], -1)


@dataclass(frozen=True, eq=False)
class ProfileTable:
    """Measured accuracy and latency of N samples under C configurations of K knobs.

    A cell that was not profiled has `mask` False and NaN in `accuracy` and `latency_ms`, so that a mistake which reads
    it is loud. Every configuration has at least one profiled cell, and so has every sample.

    Raises:
        InputError: shapes that do not fit, a profiled cell that is not finite, a negative latency, an accuracy outside
            [0, 1], duplicate ids or configurations, a sample or a configuration without any profiled cell.
    """

    WORDS: ClassVar = ("datasets", "image_ids", "parts", "question_types")
    name: str
    """How the profile is called in reports."""
    knobs: tuple[Knob, ...]
    """The K knobs, K ≥ 1. A system without knobs has one that names its configurations."""
    configurations: Tensor
    """int64 [C, K]: for each configuration the index of each knob's value in `Knob.values`."""
    accuracy: Tensor
    """float32 [N, C], in [0, 1]; NaN where not profiled."""
    latency_ms: Tensor
    """float32 [N, C], milliseconds, ≥ 0; NaN where not profiled."""
    mask: Tensor
    """bool [N, C]: True where the cell was profiled."""
    sample_ids: tuple[str, ...]
    """N ids, unique inside a data set."""
    features: dict[str, Tensor] = field(default_factory=dict)
    """Named blocks, float32 [N, d]. NaN means missing. May be empty: a policy can then see the budget only."""
    datasets: tuple[str, ...] = ()
    """N data set names; empty means one data set, called as the table is."""
    image_ids: tuple[str, ...] = ()
    """N ids of the image behind each sample, or empty. Samples of one image are never split apart."""
    parts: tuple[str, ...] = ()
    """N names out of train, validation, test when the file fixed the split; else empty."""
    question_types: tuple[str, ...] = ()
    """N kinds of question, or empty. No input of a policy: for drawing them evenly in training."""
    notes: tuple[str, ...] = ()
    """What the reader skipped or could not join, counted, in words. Not part of the digest."""
    unit: str = "ms"
    """What `latency_ms` and budgets are in, for reports: another cost may stand for latency. Not part of the digest."""

    def __post_init__(self) -> None:
        if self.accuracy.ndim != 2:
            raise InputError(f"profile {self.name!r}: accuracy has shape {tuple(self.accuracy.shape)}, expected [N, C]")
        n, c = self.accuracy.shape
        shapes = {
            "latency_ms": (tuple(self.latency_ms.shape), (n, c)),
            "mask": (tuple(self.mask.shape), (n, c)),
            "configurations": (tuple(self.configurations.shape), (c, len(self.knobs))),
            "sample_ids": ((len(self.sample_ids),), (n,)),
            **{f"features[{k}]": ((f.shape[0], f.ndim), (n, 2)) for k, f in self.features.items()},
            **{k: ((len(v),), (n,)) for k in self.WORDS if (v := getattr(self, k))},
        }
        for what, (found, wanted) in shapes.items():
            if found != wanted:
                raise InputError(f"profile {self.name!r}: {what} has shape {found}, expected {wanted}")
        if n == 0 or c == 0 or not self.knobs:
            raise InputError(f"profile {self.name!r} is empty: {n} samples, {c} configurations")
        # in pieces, because a table that is mapped from a file may be larger than the memory
        pieces = [x.split(1 << 18) for x in (self.accuracy, self.latency_ms, self.mask)]
        problems: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
            "accuracy that is NaN or infinite": lambda a, t, m: m & ~a.isfinite(),
            "latency_ms that is NaN or infinite": lambda a, t, m: m & ~t.isfinite(),
            "negative latency_ms": lambda a, t, m: m & (t < 0),
            "accuracy outside [0, 1]": lambda a, t, m: m & ((a < 0) | (a > 1)),
            "samples without any profiled configuration": lambda a, t, m: ~m.any(1),
            "cells not profiled that are not NaN": lambda a, t, m: ~m & ~(a.isnan() & t.isnan()),
        }
        counts = {"configurations without any profiled sample": int((~self.mask.any(0)).sum())}
        counts |= {w: sum(int(bad(*p).sum()) for p in zip(*pieces, strict=True)) for w, bad in problems.items()}
        for what, count in counts.items():
            if count:
                raise InputError(f"profile {self.name!r}: {count} × {what}")
        names = zip(self.datasets, self.sample_ids, strict=True) if self.datasets else self.sample_ids
        if len(set(names)) != n:
            raise InputError(f"profile {self.name!r}: sample ids are not unique inside a data set")
        if len(self.configurations.unique(dim=0)) != c:
            raise InputError(f"profile {self.name!r}: the same configuration stands in it twice")

    def __repr__(self) -> str:
        blocks = ", ".join(f"{name} {block.shape[1]} wide" for name, block in self.features.items())
        return (
            f"ProfileTable {self.name!r}: {self.num_samples} samples × {self.num_configurations} configurations of "
            f"{', '.join(knob.name for knob in self.knobs)}; {self.mask.double().mean():.1%} profiled; "
            f"features: {blocks or 'none'}"
        )

    # -- size and names ------------------------------------------------------------------------------------------------

    @property
    def num_samples(self) -> int:
        return self.accuracy.shape[0]

    @property
    def num_configurations(self) -> int:
        return self.accuracy.shape[1]

    @property
    def dataset_names(self) -> tuple[str, ...]:
        """The data set of each sample, N names."""
        return self.datasets or (self.name,) * self.num_samples

    @property
    def knob_sizes(self) -> list[int]:
        """How many values each knob has: `nvec` of the action space."""
        return [len(knob.values) for knob in self.knobs]

    def configuration(self, index: int) -> dict[str, KnobValue]:
        """The knob values of configuration `index`, by knob name."""
        chosen = self.configurations[index].tolist()
        return {knob.name: knob.values[value] for knob, value in zip(self.knobs, chosen, strict=True)}

    def label(self, index: int) -> str:
        """Configuration `index` in words, for tables and plots."""
        return " ".join(f"{name}={value}" for name, value in self.configuration(index).items())

    @functools.cached_property
    def find(self) -> ActionIndex:
        """Actions int64 [*, K] → configuration indices int64 [*], −1 where no such configuration exists."""
        return ActionIndex(self.configurations)

    @functools.cached_property
    def digest(self) -> str:
        """`sha256:…` of the content (measurements, features, names), whatever file it came from."""
        sha = hashlib.sha256()
        names = [[k.name, list(k.values)] for k in self.knobs]
        text = [names, self.sample_ids, self.datasets, self.image_ids, self.parts, list(self.features)]
        text += [self.question_types] if self.question_types else []
        sha.update(json.dumps(text).encode())
        for tensor in (self.configurations, self.mask, self.accuracy, self.latency_ms, *self.features.values()):
            sha.update(np.ascontiguousarray(tensor.numpy()).data)
        return f"sha256:{sha.hexdigest()}"

    def split(self, train: float = 0.6, validation: float = 0.2, seed: int = 0) -> Split:
        """Split by sample, or by image where images are known; the rest is the test part.

        A split that the file fixed (`parts`) is used as it is; where it has train and test only, validation comes out
        of train. Deterministic in `seed` and in the order of the samples.

        Raises:
            InputError: shares that leave a part empty.
        """
        if self.parts:
            fixed = Split(*(torch.tensor([i for i, p in enumerate(self.parts) if p == w]) for w in Split._fields))
            missing = [part for part, rows in fixed._asdict().items() if not len(rows)]
            if missing == ["validation"]:
                place, count = self._shuffled(fixed.train, seed)
                first = round(train / (train + validation) * count)
                if 0 < first < count:
                    return Split(fixed.train[place < first], fixed.train[place >= first], fixed.test)
            if missing:
                raise InputError(
                    f"profile {self.name!r} fixes its split, but no sample is in: {', '.join(missing)}. Name the parts "
                    "train, validation and test, or leave the column `split` out"
                )
            parts_of: dict[tuple[str, str], set[str]] = {}
            for unit, part in zip(self._units, self.parts, strict=True):
                parts_of.setdefault(unit, set()).add(part)
            torn = [unit for unit, parts in parts_of.items() if len(parts) > 1]
            if torn:
                raise InputError(
                    f"profile {self.name!r}: {len(torn)} images stand in several parts of its split (the first: "
                    f"{torn[0][1]!r}); give all samples of an image the same `split`"
                )
            return fixed
        place, count = self._shuffled(torch.arange(self.num_samples), seed)
        first, second = round(train * count), round((train + validation) * count)
        if not 0 < first < second < count:
            raise InputError(
                f"profile {self.name!r}: shares train={train}, validation={validation} leave a part of its {count} "
                "samples (or images) empty; each of train, validation and the rest must get at least one"
            )
        parts = [(place < first), (place >= first) & (place < second), place >= second]
        return Split(*(part.nonzero().squeeze(1) for part in parts))

    @property
    def _units(self) -> list[tuple[str, str]]:
        """What must not be split apart: the (data set, image) of each sample, or (data set, sample)."""
        return list(zip(self.dataset_names, self.image_ids or self.sample_ids, strict=True))

    def fingerprints(self, rows: Tensor) -> list[str]:
        """One short text for each of these samples (int64 [n]) by which the same input is known again in another
        table: a hash of its features, or without features its data set and id."""
        if not self.features:
            return [f"{self.datasets[row] if self.datasets else ''}/{self.sample_ids[row]}" for row in rows.tolist()]
        joined = torch.cat([block[rows] for block in self.features.values()], 1).contiguous().numpy()
        return [hashlib.sha1(row.tobytes()).hexdigest()[:16] for row in joined]

    def _shuffled(self, rows: Tensor, seed: int) -> tuple[Tensor, int]:
        """The place of each row's image (or sample) in a random order, int64 [len(rows)], and how many there are."""
        units = self._units
        numbers: dict[tuple[str, str], int] = {}
        unit_of_row = torch.tensor([numbers.setdefault(units[row], len(numbers)) for row in rows.tolist()])
        place = torch.empty(len(numbers), dtype=torch.int64)
        place[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))] = torch.arange(len(numbers))
        return place[unit_of_row], len(numbers)

    # -- on disk -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write one `.safetensors` file, which `load` maps into memory instead of copying it there."""
        head = {
            "format": "knobwise.ProfileTable/1",
            "name": self.name,
            "unit": self.unit,
            "knobs": [[k.name, list(k.values)] for k in self.knobs],
            **{k: list(getattr(self, k)) for k in ("sample_ids", *self.WORDS, "notes")},
        }
        # the head is a tensor too: what safetensors calls metadata must stay below 100 MB
        tensors = {"head": torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)}
        tensors |= {f"features.{name}": block.contiguous() for name, block in self.features.items()}
        for name in ("configurations", "accuracy", "latency_ms", "mask"):
            tensors[name] = getattr(self, name).contiguous()
        with written_whole(path) as temporary:
            save_file(tensors, temporary)

    @classmethod
    def load(cls, path: str | Path) -> ProfileTable:
        """Read what `save` wrote; the tensors stay mapped to the file.

        Raises:
            InputError: no such file, or another kind of file.
        """
        try:
            with safe_open(str(path), framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            head: dict[str, Any] = json.loads(tensors.pop("head").numpy().tobytes())
            words: dict[str, Any] = {k: tuple(head.get(k, ())) for k in (*cls.WORDS, "notes")}
            words["sample_ids"] = tuple(head["sample_ids"])
            for name in ("configurations", "accuracy", "latency_ms", "mask"):
                words[name] = tensors[name]
        except FileNotFoundError:
            raise InputError(f"{path}: no such file") from None
        except Exception as error:
            raise InputError(f"{path}: not a table that knobwise saved ({error})") from error
        return cls(
            name=head["name"],
            unit=head.get("unit", "ms"),
            knobs=tuple(Knob(name, tuple(values)) for name, values in head["knobs"]),
            **words,
            features={k.removeprefix("features."): v for k, v in tensors.items() if k.startswith("features.")},
        )
