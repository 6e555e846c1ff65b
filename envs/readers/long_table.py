"""Long tables: one row for each measurement of a (sample, configuration).

This module reads and writes them.

The columns are `sample_id`, one per knob, an accuracy and a latency; optionally `repeat`,
`dataset`, `split`, `image_id` and `question_type`. Measurements of any system come in this form,
and all readers end in `table_from_frame`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.envs.readers.feature_files import Features as Features
from knobwise.envs.readers.feature_files import attach_features as attach_features
from knobwise.envs.readers.feature_files import features_from
from knobwise.envs.readers.feature_files import read_features as read_features
from knobwise.envs.readers.feature_files import write_features as write_features
from knobwise.envs.readers.frames import (
    KEYS,
    PERCENT,
    as_share,
    knob_column,
    name_column,
    number_column,
    read_frame,
)
from knobwise.envs.tables.profile_table import Knob, ProfileTable, median_of

MEASURES = frozenset(
    {
        "accuracy",
        "score",
        "soft_score",
        "pred",
        "prediction",
        "answer",
        "answers",
        "question",
        "repeat",
    }
)
"""Columns of measurements, which are never knobs."""
BUDGET = "latency_budget"
"""The column that only training examples have, see `_without_budgets`."""
TRAINING_COLUMNS = {
    "latency": "latency_ms",
    "image_feature": "image_features",
    "language_feature": "language_features",
}
"""Other columns of training examples, with the names that we give them."""
WORD_COLUMNS = {
    "datasets": "dataset",
    "sample_ids": "sample_id",
    "image_ids": "image_id",
    "parts": "split",
    "question_types": "question_type",
}
"""Fields of a `ProfileTable` with a name for each sample, and the columns that hold them."""
PARTS = {
    "train": "train",
    "training": "train",
    **dict.fromkeys(("validation", "val", "valid", "dev"), "validation"),
}
PARTS |= {"test": "test", "testing": "test"}
"""Spellings in the column `split`, and the parts they stand for."""


class _Rows(NamedTuple):
    """The profiled rows of a long table."""

    frame: pl.DataFrame
    """All columns as they were read."""
    keys: pl.DataFrame
    """`dataset`, if there is one, and `sample_id`, as text."""
    measured: pl.DataFrame
    """Accuracy, latency, `repeat` (null without such a column), `first_look` (0 without one)."""
    source: str
    """The name of the table in error messages."""
    notes: list[str]
    """What was noticed while reading; it grows."""


class _Cells(NamedTuple):
    """Measurements, and the cell of the dense table that each belongs to."""

    measured: pl.DataFrame
    """One row per measurement; if some cell has several, sorted by cell."""
    cell: np.ndarray
    """int64 [rows]: the number of each row's cell, counted sample by sample."""
    times: np.ndarray
    """int64 [N·C]: the number of measurements of each cell."""
    shape: tuple[int, int]
    """(N, C)."""


def read_long_table(path: str | Path, *, name: str | None = None, **choices: Any) -> ProfileTable:
    """Read a long table from CSV, Parquet, JSON or JSON lines (by suffix; text also gzipped).

    Args:
        path: the file.
        name: the table's name, by default that of the file.
        choices: options of `table_from_frame`.

    Raises:
        InputError: if the file is not of its kind, or `table_from_frame` refuses its rows.
    """
    name = name or Path(path).name.split(".")[0]
    frame = read_frame(Path(path))
    notes = list[str]()
    if BUDGET in frame.columns:
        try:
            frame, features = _without_budgets(frame, str(path), notes)
        except pl.exceptions.PolarsError as error:
            raise InputError(f"{path}: not training data ({error})") from error
        choices["features"] = choices.get("features") or features
    return table_from_frame(frame, name=name, source=str(path), notes=notes, **choices)


def _without_budgets(
    frame: pl.DataFrame, source: str, notes: list[str]
) -> tuple[pl.DataFrame, Features | None]:
    """Return the measurements of training examples, and the features in them.

    The original system wrote `controller_training_data.json`: the examples of a cell repeat its
    measurement for each latency budget, and hold the features of the sample; the knobs stand in
    `config`.

    Raises:
        InputError: features of a sample differ between its examples.
    """
    frame = frame.unnest(pl.selectors.struct()).rename(TRAINING_COLUMNS, strict=False)
    # the features of a sample stand in each of its examples
    vectors = [name for name in ("image_features", "language_features") if name in frame.columns]
    features = None
    if vectors:
        samples = frame.select("sample_id", *vectors).unique(maintain_order=True)
        features = features_from(samples.to_dict(as_series=False), source)
    measured = frame.drop(BUDGET, pl.selectors.nested())
    # of the rows with equal measurements, keep those of the first budget
    is_first = pl.col(BUDGET).eq_missing(pl.col(BUDGET).first().over(measured.columns))
    once = measured.filter(frame.select(is_first).to_series())
    notes.append(
        f"{len(frame) - len(once)} examples repeat a measurement for another {BUDGET}: it is read "
        "once"
    )
    return once, features


def table_from_frame(
    frame: pl.DataFrame,
    *,
    name: str,
    knobs: Sequence[str] | None = None,
    accuracy: str = "accuracy",
    accuracy_unit: str = "share",
    latency: str = "latency_ms",
    unit: str = "ms",
    features: str | Path | Features | None = None,
    source: str = "",
    notes: Sequence[str] = (),
) -> ProfileTable:
    """Make the dense table from one row per measurement of a (sample, configuration).

    A row without accuracy or latency (null) counts as missing, and a cell without rows is not
    profiled. Samples are sorted by data set and id, configurations by knob value, the measurements
    of a cell by `repeat`, or without that column by size; the order of the rows does not matter.
    Where measurements of a cell differ in accuracy, the table holds their mean.

    Args:
        frame: `sample_id`, the knobs, an accuracy in [0, 1] (`score` if there is no `accuracy`), a
            cost ≥ 0; optionally `repeat` (numbers that tell the measurements of a cell apart),
            `dataset`; `image_id`, `split`, `question_type`, constant inside a sample;
            `first_look_ms`, what decisions by features cost on top.
        knobs: the columns that are knobs. By default every column that is neither a key nor a
            measurement (such as `*_ms`), nor constant inside each sample.
        accuracy_unit: `percent` for accuracies in [0, 100].
        latency, unit: the column that the budget limits, a time or any other cost, and its unit.
        source: the name of the frame in error messages, such as a file name.

    Raises:
        InputError: columns are missing or wrong, values out of range, a measurement occurs twice,
            features do not fit.
    """
    notes = list(notes)
    if accuracy == "accuracy" and accuracy not in frame.columns and "score" in frame.columns:
        accuracy = "score"
    rows = _profiled_rows(frame, accuracy, accuracy_unit, latency, source or name, notes)
    columns = knobs
    if columns is None:
        columns = _find_knobs(rows, {accuracy, latency})
    _check_knobs(rows, columns, {*rows.keys.columns, accuracy, latency, "repeat"})
    table = _dense_table(rows, columns, knobs is None, name=name, unit=unit)
    if features is None:
        return table
    return attach_features(table, features)


def _dense_table(
    rows: _Rows, columns: Sequence[str], guessed: bool, *, name: str, unit: str
) -> ProfileTable:
    """Return the table with these columns as knobs, which may have been guessed."""
    frame, keys, measured, source, notes = rows
    # each knob is coded by the index of its value
    knobs, codes = zip(*(knob_column(frame[column], source) for column in columns), strict=True)
    chosen = pl.DataFrame([code.alias(f"knob {k}") for k, code in enumerate(codes)])
    configurations = chosen.unique().sort(chosen.columns)
    samples = _samples(frame.drop(columns), keys, source)
    if guessed:
        _refuse_measurement(knobs, len(configurations), len(frame), source)
    # each row belongs to one cell of the dense table
    cell = _row_numbers(keys, samples) * len(configurations) + _row_numbers(chosen, configurations)
    times = np.bincount(cell, minlength=len(samples) * len(configurations))
    if times.max() > 1:
        measured = measured.with_columns(cell=cell).sort("cell", "repeat", "latency", "accuracy")
        cell = measured["cell"].to_numpy()
        _refuse_repeated(measured, samples, configurations, knobs, source)
        _note_repeated(measured, times, notes)
    cells = _Cells(measured, cell, times, (len(samples), len(configurations)))
    # from rows to the dense table
    accuracy, latency_ms, repeats_ms = _place_cells(cells)
    sample_names = _names(samples, notes)
    table = ProfileTable(
        name=name,
        knobs=knobs,
        configurations=torch.from_numpy(configurations.to_numpy().astype(np.int64)),
        accuracy=accuracy,
        latency_ms=latency_ms,
        mask=~accuracy.isnan(),
        notes=tuple(notes),
        unit=unit,
        repeats_ms=repeats_ms,
        **sample_names,
    )
    return _with_first_look(table, cells)


def _refuse_measurement(knobs: Sequence[Knob], configurations: int, rows: int, source: str) -> None:
    """Raise InputError if a column that was taken as a knob must be a measurement.

    There are then nearly as many configurations as rows.
    """
    if configurations <= 50 or 2 * configurations <= rows:
        return
    sizes = ", ".join(f"{knob.name} ({len(knob.values)} values)" for knob in knobs)
    raise InputError(
        f"{source}: {configurations} configurations in {rows} rows, so a column taken as a knob "
        f"must be a measurement: {sizes}. Name the knobs with knobs="
    )


def long_frame(table: ProfileTable) -> pl.DataFrame:
    """Return one row per measurement, from which `table_from_frame` makes the same table."""
    first_look_ms = table.first_look_ms
    table = table.without_first_look
    # the sample, the configuration and the repetition of each measurement
    row, column, repeat = (~table.measurements_ms.isnan()).nonzero().numpy().T
    columns = []
    for field, name in WORD_COLUMNS.items():
        if names := getattr(table, field):
            columns.append(pl.Series(name, names).gather(row))
    for knob, chosen in zip(table.knobs, table.configurations.numpy().T, strict=True):
        columns.append(pl.Series(knob.name, list(knob.values), strict=False).gather(chosen[column]))
    if table.num_repeats > 1:
        columns.append(pl.Series("repeat", repeat))
    columns.append(pl.Series("accuracy", table.accuracy.numpy()[row, column]))
    columns.append(pl.Series("latency_ms", table.measurements_ms.numpy()[row, column, repeat]))
    if first_look_ms is not None:
        columns.append(pl.Series("first_look_ms", first_look_ms.numpy()[row, column]))
    return pl.DataFrame(columns)


def write_long_table(table: ProfileTable, path: str | Path) -> None:
    """Write every measurement as CSV, Parquet or JSON lines (by suffix).

    Features are not in the file; `write_features` writes them.
    """
    frame = long_frame(table)
    suffix = Path(path).suffix
    writers = {".csv": "write_csv", ".parquet": "write_parquet", ".jsonl": "write_ndjson"}
    if suffix not in writers:
        raise InputError(f"{path}: a table is written as .csv, .parquet or .jsonl")
    with written_whole(path) as temporary:
        getattr(frame, writers[suffix])(temporary)


def _profiled_rows(
    frame: pl.DataFrame,
    accuracy: str,
    accuracy_unit: str,
    latency: str,
    source: str,
    notes: list[str],
) -> _Rows:
    """Return the rows that have an accuracy and a latency, or raise InputError."""
    if missing := [c for c in ("sample_id", accuracy, latency) if c not in frame.columns]:
        raise InputError(
            f"{source}: no column {', '.join(missing)}; its columns are "
            f"{', '.join(frame.columns) or 'none'}. A table needs sample_id, an accuracy and a "
            "latency: rename the columns, or give their names as accuracy=… and latency=… (on the "
            "command line profile.accuracy=… and profile.latency=…)"
        )
    # every measurement as a number
    shares = as_share(number_column(frame[accuracy], source), accuracy_unit, source, notes)
    latencies = number_column(frame[latency], source, False)
    measured = pl.DataFrame({"accuracy": shares, "latency": latencies}).with_columns(
        _optional_measurements(frame, latency, source)
    )
    # a row that lacks one of the two says nothing
    profiled = measured["accuracy"].is_not_null() & measured["latency"].is_not_null()
    if not profiled.all():
        notes.append(f"{(~profiled).sum()} rows without accuracy or latency: not profiled")
        frame = frame.filter(profiled)
        measured = measured.filter(profiled)
    if frame.is_empty():
        raise InputError(f"{source}: no row with both {accuracy} and {latency}")
    keys = pl.DataFrame(
        [name_column(frame[c], source) for c in ("dataset", "sample_id") if c in frame.columns]
    )
    rows = _Rows(frame, keys, measured, source, notes)
    _check_ranges(rows, accuracy, latency)
    return rows


def _optional_measurements(
    frame: pl.DataFrame, latency: str, source: str
) -> list[pl.Series | pl.Expr]:
    """Return `repeat` and `first_look` of each row."""
    repeat: pl.Series | pl.Expr = pl.lit(None, pl.Float64)
    if "repeat" in frame.columns and not frame["repeat"].is_null().all():
        repeat = number_column(frame["repeat"], source, False).fill_null(0.0)
    first_look: pl.Series | pl.Expr = pl.lit(0.0)
    # a first look is a time, so it cannot be added to another cost
    if latency == "latency_ms" and "first_look_ms" in frame.columns:
        first_look = number_column(frame["first_look_ms"], source, False).fill_null(0.0)
    return [repeat.alias("repeat"), first_look.alias("first_look")]


def _check_ranges(rows: _Rows, accuracy: str, latency: str) -> None:
    """Raise InputError if a measurement is out of its range."""
    shares = rows.measured["accuracy"].is_between(-1e-6, 1 + 1e-6)
    _refuse(shares.not_(), f"{accuracy} outside [0, 1]{PERCENT}", rows)
    for column, name in (("latency", latency), ("first_look", "first_look_ms")):
        times = rows.measured[column].is_between(0, 3e38)
        _refuse(times.not_(), f"{name} negative, NaN or infinite", rows)


def _place_cells(cells: _Cells) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return mean accuracy and median latency of each cell, and all its latencies.

    Returns:
        float32 [N, C], [N, C] and [N, C, R], NaN where not measured; None instead of the last if no
        cell was measured repeatedly.
    """
    measured, cell, times, shape = cells
    if times.max() == 1:
        dense = np.full((2, times.size), np.nan, np.float32)
        dense[:, cell] = measured["accuracy"].clip(0, 1), measured["latency"].clip(0)
        accuracy, latency_ms = torch.from_numpy(dense).view(2, *shape).unbind()
        return accuracy, latency_ms, None
    # the mean accuracy of each cell
    total = np.bincount(cell, measured["accuracy"].clip(0, 1), times.size)
    mean = np.full(times.size, np.nan)
    np.divide(total, times, out=mean, where=times > 0)
    # rows are sorted by cell, so a row's repetition is its distance from the cell's first row
    repetition = np.arange(cell.size) - (times.cumsum() - times)[cell]
    repeats = np.full((times.size, times.max()), np.nan, np.float32)
    repeats[cell, repetition] = measured["latency"].clip(0)
    repeats_ms = torch.from_numpy(repeats).view(*shape, -1)
    accuracy = torch.from_numpy(mean.astype(np.float32)).view(shape)
    return accuracy, median_of(repeats_ms), repeats_ms


def _with_first_look(table: ProfileTable, cells: _Cells) -> ProfileTable:
    """Return the table with the mean first look of each cell added to its times; 0 adds nothing."""
    measured, cell, times, shape = cells
    total = np.bincount(cell, measured["first_look"], times.size)
    first_look_ms = torch.from_numpy(total / np.maximum(times, 1)).float().view(shape)
    if not first_look_ms.any():
        return table
    repeats_ms = table.repeats_ms
    if repeats_ms is not None:
        repeats_ms = repeats_ms + first_look_ms.unsqueeze(-1)
    return replace(
        table,
        latency_ms=table.latency_ms + first_look_ms,
        repeats_ms=repeats_ms,
        first_look_ms=first_look_ms,
    )


def _refuse_repeated(
    measured: pl.DataFrame,
    samples: pl.DataFrame,
    configurations: pl.DataFrame,
    knobs: Sequence[Knob],
    source: str,
) -> None:
    """Raise InputError if measurements of a cell cannot be told apart.

    `repeat` tells them apart, or without it accuracy and latency do.
    """
    numbered = measured["repeat"].null_count() == 0
    if numbered:
        keys = ["cell", "repeat"]
        alike = "with the same `repeat`"
    else:
        keys = ["cell", "latency", "accuracy"]
        alike = "with the same accuracy and latency"
    if not _as_above(measured, keys).any():
        return
    # name the pair that occurs most often
    same = (
        measured.group_by(keys)
        .len()
        .filter(pl.col("len") > 1)
        .sort("len", "cell", descending=[True, False])
    )
    sample, configuration = divmod(same["cell"][0], len(configurations))
    codes = configurations.row(configuration)
    setting = [f"{k.name}={k.values[v]}" for k, v in zip(knobs, codes, strict=True)]
    pair = " ".join([str(samples["sample_id"][sample]), *setting])
    raise InputError(
        f"{source}: {same['cell'].n_unique()} (sample, configuration) pairs occur more than once "
        f"{alike}, such as {pair}, {same['len'][0]} times. Remove the copies; or number the "
        "measurements of each pair in a column `repeat`. Ids must be unique inside a data set (do "
        "they restart in every batch or on every rank?), and every knob needs a column"
    )


def _as_above(rows: pl.DataFrame, columns: Sequence[str]) -> np.ndarray:
    """Return True for each row with the same values in these columns as the row above it.

    Returns: bool [n].
    """
    same = np.ones(len(rows) - 1, dtype=bool)
    for column in columns:
        values = rows[column].to_numpy()
        same &= values[1:] == values[:-1]
    return np.append(False, same)


def _note_repeated(measured: pl.DataFrame, times: np.ndarray, notes: list[str]) -> None:
    """Note how many cells were measured repeatedly without numbers, or differ in accuracy."""
    if measured["repeat"].null_count():
        notes.append(
            f"{(times > 1).sum()} cells occur up to {times.max()} times: taken as repeated "
            "measurements"
        )
    differ = _as_above(measured, ["cell"]) & ~_as_above(measured, ["accuracy"])
    if differ.any():
        count = len(np.unique(measured["cell"].to_numpy()[differ]))
        notes.append(f"{count} cells differ in accuracy between measurements: the mean is used")


def _refuse(bad: pl.Series, what: str, rows: _Rows) -> None:
    """Raise InputError if a row is bad, with the number of such rows and the first of them."""
    if bad.any():
        keys = rows.keys.row(int(bad.arg_max() or 0), named=True)
        first = ", ".join(f"{k} {v}" for k, v in keys.items())
        raise InputError(
            f"{rows.source}: {bad.sum()} rows with {what}, the first at {first}. Fix or remove them"
        )


def _find_knobs(rows: _Rows, measures: set[str]) -> list[str]:
    """Return the columns that are knobs by default; note which others might have been.

    A lone column such as `configuration` is a knob if there are no others.
    """
    frame = rows.frame
    # leave out keys, measurements and lists
    other = KEYS | MEASURES | measures
    columns = [c for c in frame.columns if c not in other and not c.endswith("_ms")]
    nested = [c for c in columns if frame[c].dtype.is_nested()]
    names = [c for c in columns if c not in nested]
    # a column with one value for each sample is a property of the sample
    samples = rows.keys.hstack(frame.select(names)).group_by(rows.keys.columns)
    spread = samples.agg(pl.col(names).n_unique())
    fixed = []
    # with one row per sample every column looks like a property of the sample
    if len(frame) >= 2 * len(spread):
        fixed = [c for c in names if spread[c].max() == 1 and frame[c].n_unique() > 1]
    names = [c for c in names if c not in fixed]
    labels = []
    # a name of the configuration adds nothing to its knobs
    for label in (c for c in names if c.startswith("config") and len(names) > 1):
        others = [c for c in names if c != label]
        if frame.select(others).n_unique() == frame.select(names).n_unique():
            labels.append(label)
            names = others
    # say what was left out, because the guess may be wrong
    reasons = {
        "hold lists": nested,
        "never vary inside a sample": fixed,
        "only repeat the other knobs": labels,
    }
    for reason, refused in reasons.items():
        if refused:
            rows.notes.append(f"not knobs, since they {reason}: {', '.join(refused)}")
    return names


def _check_knobs(rows: _Rows, knobs: Sequence[str], other: set[str]) -> None:
    """Raise InputError if there is no knob, or one is missing or another column."""
    columns = rows.frame.columns
    wrong = [k for k in knobs if k not in columns or k in other]
    if wrong or not knobs:
        raise InputError(
            f"{rows.source}: {', '.join(wrong) or 'no column'} for a knob; its columns are "
            f"{', '.join(columns)}. Name the knobs with knobs=; if there are none, name the "
            "configurations in one column"
        )


def _samples(frame: pl.DataFrame, keys_of_rows: pl.DataFrame, source: str) -> pl.DataFrame:
    """Return one row per sample, with its key, image, part and question type.

    Samples are sorted by data set, then whole-number ids by size, then the other ids by name.
    Raises InputError if a sample's rows differ, or a part is unknown.
    """
    # further names of a sample, which must be the same in all its rows
    optional = [c for c in ("image_id", "split", "question_type") if c in frame.columns]
    extra = [name_column(frame[c], source) for c in optional if not frame[c].is_null().all()]
    rows = keys_of_rows.with_columns(extra)
    keys = keys_of_rows.columns
    samples = rows.unique()
    n = rows.select(keys).n_unique()
    # a column that varies inside a sample makes more distinct rows than there are samples
    for column in rows.columns[len(keys) :]:
        if (more := rows.select(*keys, column).n_unique() - n) > 0:
            raise InputError(
                f"{source}: {column} must be the same in all rows of a sample; it differs {more} "
                "times"
            )
    # several spellings stand for the same part
    if "split" in samples.columns:
        splits = samples["split"].str.to_lowercase()
        if unknown := sorted(set(splits) - set(PARTS)):
            raise InputError(
                f"{source}: split {', '.join(unknown[:5])} is unknown; known are {', '.join(PARTS)}"
            )
        samples = samples.with_columns(splits.replace_strict(PARTS))
    # ids that are no whole numbers become null, and come last
    number = pl.col("sample_id").cast(pl.Int64, strict=False)
    return samples.sort(*keys[:-1], number, "sample_id", nulls_last=True)


def _names(samples: pl.DataFrame, notes: list[str]) -> dict[str, Any]:
    """Return the fields of a `ProfileTable` that hold a name for each sample."""
    names = {column: tuple(samples[column]) for column in samples.columns}
    # one split for all is where the samples come from, and does not divide them
    if len(set(names.get("split", ()))) == 1:
        notes.append(
            f"every sample is in split {names.pop('split')[0]!r}: the samples are divided anew"
        )
    return {field: names.get(column, ()) for field, column in WORD_COLUMNS.items()}


def _row_numbers(rows: pl.DataFrame, index: pl.DataFrame) -> np.ndarray:
    """Return the number of the row of `index` that has the values of each row, int64 [rows]."""
    numbered = index.select(rows.columns).with_row_index("number")
    numbers = rows.join(numbered, on=rows.columns, how="left", maintain_order="left")["number"]
    return numbers.to_numpy().astype(np.int64)
