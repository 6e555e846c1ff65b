"""Long tables: one row for each measurement of a (sample, configuration).

This module reads and writes them.

The columns are `sample_id`, one per knob, an accuracy and a latency; optionally `repeat`,
`dataset`, `split`, `image_id` and `question_type`. Measurements of any system come in this form,
and all readers end in `table_from_frame`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError, naming
from knobwise.common.files import written_whole
from knobwise.envs.readers.column_roles import knobs_and_features
from knobwise.envs.readers.column_values import keys_of, spelled_truths
from knobwise.envs.readers.dense_table import WEIGHT, WORD_COLUMNS, dense_fields
from knobwise.envs.readers.design import count_distinct
from knobwise.envs.readers.failures import MISSING_CELLS, cells_as_failed, note_lost_repeats
from knobwise.envs.readers.feature_files import Features, attach_features, features_from
from knobwise.envs.readers.folders import has_no_types
from knobwise.envs.readers.frames import with_chats
from knobwise.envs.readers.layouts import CONFIGURATION, Layout, long_form
from knobwise.envs.readers.measured_rows import (
    check_ranges,
    costs_of_rows,
    profiled_rows,
    refuse_costs,
    times_of_rows,
)
from knobwise.envs.readers.other_tables import check_ids, refuse_judges, refuse_missing
from knobwise.envs.readers.quantities import (
    check_accuracies,
    check_costs,
    in_one_unit,
    note_unit,
    unit_of_wide,
)
from knobwise.envs.readers.repeats import note_late_and_wrong
from knobwise.envs.readers.tool_files import BUDGET, read_files
from knobwise.envs.tables.cells import unread
from knobwise.envs.tables.columns import Column
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.units import MS, kept_as

UNUSED = ("fold", "question_id")
"""Keys that this reader does not use."""
TRAINING_COLUMNS = {
    "latency": "latency_ms",
    "image_feature": "image_features",
    "language_feature": "language_features",
}
"""Other columns of training examples, with the names that we give them."""


def read_long_table(
    path: str | Path | Sequence[str | Path], *, name: str | None = None, **choices: Any
) -> ProfileTable:
    """Read a long table from a file of any format that `frames` reads (by suffix; text also
    gzipped), or the files of a tool that `tool_files` knows.

    Args:
        path: the file, or the folder of a tool; or several, which are stacked if they are of one
            tool, else joined by ids and knobs.
        name: the table's name, by default that of the first file.
        choices: options of `table_from_frame`.

    Raises:
        InputError: if the file is not of its kind, or `table_from_frame` refuses its rows.
    """
    paths = [Path(path)] if isinstance(path, (str, Path)) else [Path(each) for each in path]
    name = name or paths[0].name.split(".")[0]
    notes = list[str]()
    source = ", ".join(map(str, paths))
    with naming(source):
        frame, choices = read_files(paths, choices, notes)
    if BUDGET in frame.columns:
        try:
            with naming(source):
                frame, features = _without_budgets(frame, notes)
        except pl.exceptions.PolarsError as error:
            raise InputError(f"{source}: not training data ({error})") from error
        choices["features"] = choices.get("features") or features
    # nothing else holds the columns, which go one after the other
    held = [frame]
    del frame
    untyped = any(has_no_types(path.name) for path in paths)
    return table_from_frame(held, name=name, source=source, notes=notes, untyped=untyped, **choices)


def _without_budgets(frame: pl.DataFrame, notes: list[str]) -> tuple[pl.DataFrame, Features | None]:
    """Return the measurements of training examples, and the features in them.

    The original system wrote `controller_training_data.json`: the examples of a cell repeat its
    measurement for each latency budget, and hold the features of the sample; the knobs stand in
    `config`.

    Raises:
        InputError: features of a sample differ between its examples.
    """
    frame = frame.unnest(pl.selectors.struct()).rename(TRAINING_COLUMNS, strict=False)
    # the features of a sample stand in each of its examples
    blocks = pl.selectors.by_name("image_features", "language_features", require_all=False)
    samples = frame.select("sample_id", blocks).unique(maintain_order=True)
    features = None
    if samples.width > 1:
        features = features_from(samples.to_dict(as_series=False))
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
    frame: pl.DataFrame | list[pl.DataFrame],
    *,
    name: str,
    knobs: Sequence[str] | None = None,
    accuracy: str = "accuracy",
    accuracy_unit: str = "share",
    latency: str = "latency_ms",
    unit: str = MS,
    costs: Sequence[str] | None = None,
    features: str | Path | Features | list[str] | None = None,
    columns: Sequence[Column] = (),
    group: str | None = None,
    time: str | None = None,
    some_cells: bool = False,
    missing: str = MISSING_CELLS[0],
    untyped: bool = False,
    source: str = "",
    notes: Sequence[str] = (),
    **layout: Any,
) -> ProfileTable:
    """Make the dense table from one row per measurement of a (sample, configuration).

    A row without accuracy or latency (null) counts as missing, and a cell without rows is not
    profiled. Samples are sorted by data set and id, configurations by knob value, the measurements
    of a cell by `repeat`, or else by size. A cell has the mean accuracy of its measurements.

    Args:
        frame: `sample_id`, the knobs, an accuracy in [0, 1] (`score` if there is no `accuracy`), a
            cost ≥ 0; optionally `repeat` (numbers that tell the measurements of a cell apart),
            `dataset`; `image_id`, `split`, `question_type`, constant inside a sample;
            `first_look_ms`, what decisions by features cost on top; `sampling_weight`, how
            many cells a measured one stands for, where some were drawn to be measured. A list with
            the frame alone is emptied, so that the frame takes no memory once it is read.
        knobs: the columns that are knobs. By default every column that is neither a key nor a
            measurement (such as `*_ms`), nor constant inside each sample.
        accuracy_unit: `percent` for accuracies in [0, 100].
        latency, unit: the column that the budget limits, and its unit. A unit of time, such as s or
            min, is converted: the table and all budgets are in ms. Any other, such as USD, is kept,
            and budgets are in it. `ms` leaves it to the name of the column, such as `latency_s`.
        costs: the columns of further costs ≥ 0, such as `usd`, which keep their units. A cell has
            the mean of its measurements.
        features: a feature file, its content, or columns of the frame that are constant inside each
            sample: their names, or `auto` for all columns that can be features and are not knobs.
        columns: what named columns hold, as a checkpoint knows it; by default it is fitted.
        group: the column of what a sample belongs to, such as a document or a user.
        time: the column of when a row was measured; samples are then sorted by their first time.
        some_cells: the rows are a few cells of a profile that is known, measured anew, so one for
            each sample is enough.
        missing: `failed` if cells and repeats without a row failed, as in files of tools that write
            no row for a request that failed: they count as late and wrong, see `cells_as_failed`.
        untyped: the frame is of a file in which all is text, such as CSV: knobs that are `true` or
            `false` in every row are True and False, which in other frames stay text.
        source: the name of the frame in error messages, such as a file name.
        layout: other names of columns, and forms of table; see `Layout`.

    Raises:
        InputError: columns or values that are missing or wrong, or a measurement that occurs twice.
    """
    if isinstance(frame, list):
        frame = frame.pop()
    one_of("missing", missing, MISSING_CELLS)
    notes = list(notes)
    described = Layout(**layout)
    with naming(source or name):
        frame = long_form(with_chats(frame), described, accuracy, latency, notes)
        if described.wide is not None and (knobs or not _varies_in_rows(frame)):
            # what else a row of a wide table holds belongs to its sample
            knobs = [*dict.fromkeys([*(knobs or ()), CONFIGURATION])]
        if accuracy == "accuracy" and accuracy not in frame.columns and "score" in frame.columns:
            accuracy = "score"
        # columns with a role of their own
        needed = [c for c in ("sample_id", accuracy, latency, group, time) if c is not None]
        refuse_missing(needed, accuracy, latency, frame, described)
        costs = list(dict.fromkeys(costs or ()))
        refuse_costs(costs, frame, needed, described)
        other = {*needed, *costs, "dataset", "repeat"} | described.names

        # measurements as numbers
        unit = unit_of_wide(described.wide_latency, unit, notes)
        frame, unit = in_one_unit(frame, latency, unit, notes)
        check_costs(latency, unit, costs, notes)
        kept, factor = kept_as(unit)
        frame, rows = profiled_rows(
            frame,
            ids=described.id or "sample_id",
            accuracy=accuracy,
            accuracy_unit=accuracy_unit,
            latency=latency,
            timed=kept == MS,
            missing=missing,
            notes=notes,
        )
        # loss of 3 is no accuracy out of range
        if described.right is None:
            check_accuracies(described.wide or [accuracy], accuracy_unit, rows, notes)
        check_ranges(rows, accuracy, latency)
        if factor != 1:
            # before they lose digits as float32, so that the table is that of a file in ms
            rows = rows.with_columns(pl.col("latency") * factor)
        note_unit(latency, unit, notes)
        _note_unused(frame, described, notes)
        if time is not None:
            rows = rows.with_columns(times_of_rows(frame[time]))

        # all other columns: knobs, and perhaps features
        as_told = set(knobs or ())
        knobs, blocks = knobs_and_features(
            frame, keys_of(rows), knobs, features, columns, other, latency, notes, some_cells
        )
        if untyped:
            frame = frame.with_columns(spelled_truths(frame[knob]) for knob in knobs)
        refuse_judges(frame, rows, keys_of(rows).columns, knobs, other | as_told)
        if "repeat" not in frame.columns:
            check_ids(frame, keys_of(rows), knobs, other, notes)
        rows = rows.with_columns(costs_of_rows(frame, rows, costs, notes))
        if _are_single(frame, keys_of(rows), knobs):
            # of rows that are alone in their cells nothing else is needed
            words = [*WORD_COLUMNS.values(), group]
            frame = frame.select(c for c in frame.columns if c in (*knobs, *words))
        fields, accuracies = dense_fields(frame, rows, knobs, group, notes)
    table = ProfileTable(name=name, unit=kept, notes=tuple(notes), **fields)
    if not some_cells:
        with naming(source or name):
            table = cells_as_failed(table) if missing == "failed" else note_lost_repeats(table)
        if accuracies is not None:
            table = note_late_and_wrong(table, accuracies)
    if blocks is None:
        return table
    return attach_features(table, blocks, columns, described)


def _are_single(frame: pl.DataFrame, keys: pl.DataFrame, knobs: Sequence[str]) -> bool:
    """Return whether no sample has several rows with the same setting."""
    cells = keys.hstack(frame.select(pl.col(knobs).name.prefix("knob ")))
    return count_distinct(cells) == len(cells)


def _note_unused(frame: pl.DataFrame, layout: Layout, notes: list[str]) -> None:
    """Note the keys of other readers that this one does not use."""
    if unused := [name for name in UNUSED if name in {*frame.columns} - layout.names]:
        notes.append(f"keys that are not used: {', '.join(unused)}")


def _varies_in_rows(frame: pl.DataFrame) -> bool:
    """Return whether a sample of a wide table has several rows, which may have other settings."""
    return frame.select(*keys_of(frame).columns, CONFIGURATION).is_duplicated().any()


def long_frame(table: ProfileTable) -> pl.DataFrame:
    """Return one row per measurement, from which `table_from_frame` makes the same table."""
    first_look_ms = table.first_look_ms
    table = unread(table)
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
    for name, values in table.costs.items():
        columns.append(pl.Series(name, values.numpy()[row, column]).fill_nan(None))
    if table.sampling_weight is not None:
        columns.append(pl.Series(WEIGHT, table.sampling_weight.numpy()[row, column]))
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
