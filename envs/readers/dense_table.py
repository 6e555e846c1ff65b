"""From rows to the dense table: each row is a measurement of a cell (sample, configuration).

The rows come from `knobwise.envs.readers.long_table`, with numbers for what was measured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import torch

from knobwise.common.errors import InputError
from knobwise.envs.readers.column_values import keys_of, knob_column, name_column
from knobwise.envs.readers.design import AT_ONCE, MOST_PLACES, rows_of_samples
from knobwise.envs.readers.repeats import repeated_rows
from knobwise.envs.tables.profile_table import Knob, median_of

WEIGHT = "sampling_weight"
"""The column of how many cells a measured cell stands for."""
COST = "cost "
"""Further costs are kept under this and the name of their column."""
CLUSTER = "cluster"
"""The column of clusters that `long_frame` writes; when read, `group` names one."""
TIME = "measured_at"
"""The column of when a row was measured."""
WORD_COLUMNS = {
    "datasets": "dataset",
    "sample_ids": "sample_id",
    "image_ids": "image_id",
    "clusters": CLUSTER,
    "parts": "split",
    "question_types": "question_type",
}
"""Fields of a `ProfileTable` with a name for each sample, and the columns that hold them."""
PARTS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "val", "valid", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Spellings in the column `split`, and the parts they stand for."""
FEW_PLACES = 1 << 16
"""A list of so many places is small, however few rows there are."""
ZERO_WIDTH = "[\u200b-\u200d\u2060\ufeff]"
"""Characters that nobody sees."""


def dense_fields(
    frame: pl.DataFrame,
    rows: pl.DataFrame,
    columns: Sequence[str],
    group: str | None,
    notes: list[str],
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Return the fields of a `ProfileTable`, all but its name, unit, notes and features; and the
    accuracy of each measurement, float32 [N, C, R], None where every cell has one.

    Args:
        frame: all columns of the measurements, as they were read.
        rows: for each of them the ids (`dataset`, if there is one, and `sample_id`), `accuracy`
            and `latency`; perhaps `repeat`, `first_look`, `weight`, further costs under `COST` and
            their name, and `TIME`.
        columns: those of the frame that are knobs.
        group: the column of what a sample belongs to.
        notes: what is noticed.

    Raises:
        InputError: a measurement occurs twice, or what belongs to a sample differs in its rows.
    """
    knobs, chosen = _coded_knobs(frame.select(columns), notes)
    configurations = chosen[rows_of_samples(chosen)].sort(chosen.columns)
    samples = _samples_in_order(frame.drop(columns), rows, group, notes)
    # each row belongs to one cell of the dense table
    shape = len(samples), len(configurations)
    cells = _Cells(shape, _cells_of(keys_of(rows), samples, chosen, configurations))
    accuracies = None
    if not cells.are_single:
        rows = repeated_rows(frame, rows.with_columns(cell=cells.of_row), columns, notes)
        cells = _Cells(shape, rows["cell"].to_numpy())
        accuracies = cells.repeated(rows["accuracy"].clip(0, 1))
    fields = {
        "knobs": knobs,
        "configurations": torch.from_numpy(configurations.to_numpy().astype(np.int64)),
        **_measured_fields(rows, cells),
        **_names(samples, notes),
    }
    return fields, accuracies


@dataclass(frozen=True)
class _Cells:
    """Where rows stand in the dense table of N samples and C configurations."""

    shape: tuple[int, int]
    """N and C."""
    of_row: np.ndarray
    """The cell of each row, [rows]; cells are numbered sample by sample."""

    @functools.cached_property
    def are_single(self) -> bool:
        """Whether no cell has several rows."""
        seen = np.zeros(math.prod(self.shape), bool)
        for part in _parts(self.of_row.size):
            seen[self.of_row[part]] = True
        return int(seen.sum()) == self.of_row.size

    def means(self, values: pl.Series) -> torch.Tensor:
        """Return the mean of each cell's values that are known, float32 [N, C], NaN where there are
        none."""
        of_row = self.of_row
        if values.null_count():
            of_row = of_row[values.is_not_null().to_numpy()]
            values = values.drop_nulls()
        if self.are_single:
            # a single value is its mean
            return self._placed(of_row, values).view(self.shape)
        times = np.bincount(of_row, minlength=math.prod(self.shape))
        if times.max(initial=0) <= 1:
            return self._placed(of_row, values).view(self.shape)
        sums = np.bincount(of_row, values, times.size)
        means = (sums / np.where(times, times, np.nan)).astype(np.float32)
        return torch.from_numpy(means).view(self.shape)

    def repeated(self, values: pl.Series) -> torch.Tensor:
        """Return all values of each cell, float32 [N, C, R], filled up by NaN. Where a cell has
        several rows, they are neighbours."""
        if self.are_single:
            return self._placed(self.of_row, values).view(*self.shape, 1)
        times = np.bincount(self.of_row, minlength=math.prod(self.shape))
        repeats = np.full((times.size, times.max()), np.nan, np.float32)
        # each row is numbered from the first of its cell
        first_of_cell = times.cumsum() - times
        position = np.arange(self.of_row.size) - first_of_cell[self.of_row]
        repeats[self.of_row, position] = values.to_numpy()
        return torch.from_numpy(repeats).view(*self.shape, -1)

    def _placed(self, of_row: np.ndarray, values: pl.Series) -> torch.Tensor:
        """Return the value of each cell, float32 [N·C], NaN where there is none."""
        placed = np.full(math.prod(self.shape), np.nan, np.float32)
        for part in _parts(of_row.size):
            placed[of_row[part]] = values[part].to_numpy()
        return torch.from_numpy(placed)


def _parts(count: int) -> Iterator[slice]:
    """Yield so many rows in parts, since what picks some of them is copied in 64 bits."""
    for start in range(0, count, AT_ONCE):
        yield slice(start, min(start + AT_ONCE, count))


def _coded_knobs(columns: pl.DataFrame, notes: list[str]) -> tuple[tuple[Knob, ...], pl.DataFrame]:
    """Return the knobs in these columns, and the columns with each value as its index."""
    knobs, codes = zip(*(knob_column(column) for column in columns), strict=True)
    for knob in knobs:
        _note_look_alikes(f"knob {knob.name}", knob.values, notes)
        _note_equal_numbers(columns[knob.name], knob, notes)
    return knobs, pl.DataFrame([code.alias(f"knob {k}") for k, code in enumerate(codes)])


def _note_look_alikes(what: str, values: Sequence[Any], notes: list[str]) -> None:
    """Note if two of these values, each given once, differ only in spaces, zeros in front or at the
    end, capitals, or forms of a character."""
    names = pl.Series("value", list(map(str, values)), pl.String).to_frame()
    text = pl.col("value").str.normalize("NFKC").str.replace_all(ZERO_WIDTH, "")
    text = text.str.strip_chars().str.to_lowercase().str.replace_all(r"\s+", " ")
    text = text.str.replace(r"^([+-]?)0+(\d+(?:\.\d*)?)$", "$1$2")
    text = text.str.replace(r"^([+-]?\d+\.\d*?)0+$", "$1").str.strip_chars_end(".")
    alike = names.group_by(text.alias("text")).agg("value").filter(pl.col("value").list.len() > 1)
    if alike.height:
        first, second, *_ = alike.sort("text")["value"][0].sort()
        more = f", and {alike.height - 1} more" * (alike.height > 1)
        notes.append(
            f"{what}: {first!r} and {second!r}{more} look alike, but are read as different; mend "
            "them if they are the same"
        )


def _note_equal_numbers(column: pl.Series, knob: Knob, notes: list[str]) -> None:
    """Note if several spellings in a column, such as 1 and 1.0, are read as one value of a knob."""
    if column.dtype != pl.String:
        return
    spellings: dict[Any, list[str]] = {}
    for text in column.unique().sort():
        value = text if text in knob.values else float(text)
        spellings.setdefault(value, []).append(text)
    for value, texts in spellings.items():
        if len(texts) > 1:
            notes.append(
                f"knob {knob.name}: {', '.join(texts)} are read as the same number {value:g}"
            )


def _samples_in_order(
    frame: pl.DataFrame, rows: pl.DataFrame, group: str | None, notes: list[str]
) -> pl.DataFrame:
    """Return one row per sample as `_samples` does, sorted by the first time of each if rows have
    times."""
    keys = keys_of(rows)
    samples = _samples(frame, keys, group)
    for name in keys.columns:
        _note_look_alikes(name, samples[name].unique().to_list(), notes)
    if TIME not in rows.columns:
        return samples
    first = rows.group_by(keys.columns).agg(pl.col(TIME).min())
    samples = samples.join(first, on=keys.columns, how="left", maintain_order="left")
    return samples.sort(TIME, maintain_order=True).drop(TIME)


def _samples(frame: pl.DataFrame, keys: pl.DataFrame, group: str | None) -> pl.DataFrame:
    """Return one row per sample, with its key, image, part, question type and cluster.

    Samples are sorted by data set, then whole-number ids by size, then the other ids by name.
    Raises InputError if a sample's rows differ, a part is unknown, or an image is in several
    clusters.
    """
    # further names of a sample, which must be the same in all its rows
    optional = [c for c in ("image_id", "split", "question_type") if c in frame.columns]
    extra = [name_column(frame[c]) for c in optional if not frame[c].is_null().all()]
    if group is not None:
        extra.append(name_column(frame[group]).alias(CLUSTER))
    samples = keys.with_columns(extra).unique() if extra else keys[rows_of_samples(keys)]
    # a column that varies inside a sample makes more distinct rows than there are samples
    for column in extra:
        if samples.select(*keys.columns, column.name).n_unique() > keys.n_unique():
            name = f"group={group}" if column.name == CLUSTER else column.name
            raise InputError(f"{name} must be the same in all rows of a sample")
    if group is not None:
        unit = [c for c in ("dataset", "image_id") if c in samples.columns]
        if "image_id" in unit and samples.n_unique([*unit, CLUSTER]) > samples.n_unique(unit):
            raise InputError(f"group={group} must be the same in all rows of an image")
    # several spellings stand for the same part
    if "split" in samples.columns:
        splits = samples["split"].str.to_lowercase()
        if unknown := sorted(set(splits) - set(PARTS)):
            raise InputError(
                f"split {', '.join(unknown[:5])} is unknown; known are {', '.join(PARTS)}"
            )
        samples = samples.with_columns(splits.replace_strict(PARTS))
    # ids that are no whole numbers become null, and come last
    number = pl.col("sample_id").cast(pl.String).cast(pl.Int64, strict=False)
    return samples.sort(*keys.columns[:-1], number, "sample_id", nulls_last=True)


def _measured_fields(rows: pl.DataFrame, cells: _Cells) -> dict[str, Any]:
    """Return the fields of a `ProfileTable` that hold what was measured in each cell."""
    repeats_ms = cells.repeated(rows["latency"].clip(0))
    accuracy = cells.means(rows["accuracy"].clip(0, 1))
    latency_ms = median_of(repeats_ms)
    first_look_ms = None
    # most tables have no first look
    if "first_look" in rows.columns and (rows["first_look"] != 0).any():
        first_look_ms = cells.means(rows["first_look"]).nan_to_num(0.0)
        latency_ms += first_look_ms
    fields: dict[str, Any] = {
        "accuracy": accuracy,
        "latency_ms": latency_ms,
        "mask": ~accuracy.isnan(),
    }
    if "weight" in rows.columns and (rows["weight"] != 1).any():
        fields[WEIGHT] = cells.means(rows["weight"]).nan_to_num(0.0)
    if first_look_ms is not None:
        fields["first_look_ms"] = first_look_ms
    costs = [name for name in rows.columns if name.startswith(COST)]
    if costs:
        fields["costs"] = {name.removeprefix(COST): cells.means(rows[name]) for name in costs}
    if repeats_ms.shape[-1] > 1:
        fields["repeats_ms"] = repeats_ms
        if first_look_ms is not None:
            fields["repeats_ms"] = repeats_ms + first_look_ms.unsqueeze(-1)
    return fields


def _names(samples: pl.DataFrame, notes: list[str]) -> dict[str, Any]:
    """Return the fields of a `ProfileTable` that hold a name for each sample."""
    names = {column: tuple(samples[column]) for column in samples.columns}
    # one split for all is where the samples come from, and does not divide them
    if len(set(names.get("split", ()))) == 1:
        notes.append(
            f"every sample is in split {names.pop('split')[0]!r}: the samples are divided anew"
        )
    return {field: names.get(column, ()) for field, column in WORD_COLUMNS.items()}


def _cells_of(
    keys: pl.DataFrame, samples: pl.DataFrame, chosen: pl.DataFrame, configurations: pl.DataFrame
) -> np.ndarray:
    """Return the number of each row's cell, int64 or if that will do uint32 [rows].

    Args:
        keys, chosen: the ids and the configuration of each row.
        samples, configurations: all of them, in order.
    """
    kind = pl.UInt32 if len(samples) * len(configurations) < 1 << 32 else pl.Int64
    cell = _row_numbers(keys, samples).cast(kind) * len(configurations)
    return (cell + _row_numbers(chosen, configurations).cast(kind)).to_numpy()


def _row_numbers(rows: pl.DataFrame, index: pl.DataFrame) -> pl.Series:
    """Return the number of the row of `index` that has the values of each row, whole numbers."""
    index = index.select(rows.columns)
    joint = _joint_numbers(rows, index)
    if joint is None:
        numbered = index.with_row_index("number")
        return rows.join(numbered, on=rows.columns, how="left", maintain_order="left")["number"]
    of_rows, of_index, count = joint
    # the codes of names are places in a list of numbers
    places = np.zeros(count, np.uint32)
    places[of_index.to_numpy()] = np.arange(len(index), dtype=np.uint32)
    return pl.Series(places).gather(of_rows)


def _joint_numbers(
    rows: pl.DataFrame, index: pl.DataFrame
) -> tuple[pl.Series, pl.Series, int] | None:
    """Return a number from 0 on for each row, equal where their values are, the same of `index`,
    and how many there may be; None if these are many, or values are neither codes nor names of a
    list."""
    of_rows = of_index = pl.Series([0], dtype=pl.UInt32)
    count = 1
    for name, dtype in rows.schema.items():
        if isinstance(dtype, pl.Enum):
            size = len(dtype.categories)
        elif dtype == pl.UInt32 and not index.is_empty():
            size = int(index[name].max()) + 1  # type: ignore[arg-type]
        else:
            return None
        count *= size
        if count > max(MOST_PLACES * len(rows), FEW_PLACES):
            return None
        of_rows = of_rows * size + rows[name].to_physical().cast(pl.UInt32)
        of_index = of_index * size + index[name].to_physical().cast(pl.UInt32)
    return of_rows, of_index, count
