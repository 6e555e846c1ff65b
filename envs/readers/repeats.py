"""Rows that measure a cell again: which are repeats and in which order, and which are copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import polars as pl
import torch

from knobwise.common.errors import InputError
from knobwise.envs.bandit.budgets import default_budgets
from knobwise.envs.bandit.reward import expected_utility
from knobwise.envs.readers.column_names import REPEATS, list_columns, named_like
from knobwise.envs.readers.column_values import holds_no_text, number_repeats
from knobwise.envs.tables.profile_table import ProfileTable

RESTART = "do they restart in every batch or on every rank?"
"""What to ask of ids where different samples look like repeats."""
MOST_NUMBERS = 20
"""Settings such as a number of attempts have hardly more values."""
FEWEST_SAMPLES = 20
"""In fewer samples whose accuracy differs, that may be chance."""
BY_CHANCE = 1e-5
"""Accuracies that differ so much by chance are noted."""
WORTH = 0.01
"""Utilities that differ by more are noted."""
SURE = 4
"""They differ by more than so many standard errors, too."""


def repeated_rows(
    frame: pl.DataFrame, rows: pl.DataFrame, knobs: Sequence[str], notes: list[str]
) -> pl.DataFrame:
    """Return rows with their `cell`, cell by cell and in the order of the measurements, without
    copies. Raises InputError if measurements of a cell cannot be told apart.

    Args:
        frame, rows: as in `dense_table.dense_fields`; rows also have their `cell`.
        knobs: columns of the frame.
        notes: what is noticed.
    """
    if "repeat" not in rows.columns:
        rows = rows.with_columns(repeat=pl.lit(None, pl.Float64))
    names = [pl.format("{}={}", pl.lit(knob), knob) for knob in knobs]
    setting = pl.concat_str(names, separator=" ")
    copy = ~pl.struct(pl.all()).is_first_distinct()
    rows = rows.with_columns(frame.select(setting=setting, copy=copy))
    frame, rows = _without_copies(frame, rows, notes)
    # columns that number repeats by their names
    columns = [c for c in named_like(frame.columns, REPEATS) if c not in knobs]
    columns = [c for c in columns if not holds_no_text(frame[c].dtype)]
    for column in columns:
        _note_setting(frame[column], rows, knobs, notes)
    if rows["repeat"].null_count():
        rows = _numbered_rows(frame.select(columns), rows, notes)
    cells = frame.drop(knobs).with_columns(rows["cell"])
    rows = rows.sort("cell", "repeat", "latency", "accuracy")
    _check_repeated(rows, cells, notes)
    return rows


def _without_copies(
    frame: pl.DataFrame, rows: pl.DataFrame, notes: list[str]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return both without rows that are equal to an earlier one in every column of the frame.

    Measurements without numbers may be equal by chance. So copies of those are left out only where
    their cell has no other rows, which changes none of its means.
    """
    certain = pl.col("repeat").is_not_null() | ((~pl.col("copy")).sum().over("cell") == 1)
    left_out = rows.select(pl.col("copy") & certain).to_series()
    if not left_out.any():
        return frame, rows
    notes.append(
        f"copies of other rows, equal in every column, are left out: {left_out.sum()}, such as "
        f"{_cells_of(rows.filter(left_out))}"
    )
    return frame.filter(~left_out), rows.filter(~left_out)


def _numbered_rows(columns: pl.DataFrame, rows: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    """Return rows with the numbers of the first of these columns that tells the rows of each cell
    apart as their `repeat`; as they are, if none does."""
    for column in columns:
        cells = rows.select("cell").with_columns(column)
        if not column.null_count() and not cells.is_duplicated().any():
            notes.append(f"{column.name}: numbers the measurements of a cell, as a repeat does")
            return rows.with_columns(number_repeats(column).alias("repeat"))
    return rows


def _note_setting(
    column: pl.Series, rows: pl.DataFrame, knobs: Sequence[str], notes: list[str]
) -> None:
    """Note if the accuracy of a cell differs with what should number its measurements, more than by
    chance: then it may be a setting, such as a number of attempts."""
    number = column.alias("number")
    if not 1 < number.n_unique() <= MOST_NUMBERS:
        return
    inside = pl.col("accuracy") - pl.col("accuracy").mean().over("cell")
    several = pl.col("number").n_unique().over("cell") > 1
    keys = [c for c in ("dataset", "sample_id") if c in rows.columns]
    cells = rows.with_columns(number).with_columns(beyond=inside).filter(several)
    # the settings of a sample have much in common, so each sample counts once
    samples = cells.group_by(*keys, "number").agg(pl.col("beyond").mean())
    beyond = pl.col("beyond")
    of_numbers = samples.group_by("number").agg(
        count=pl.len(),
        differ=(beyond.abs() > 1e-9).sum(),
        times=beyond.mean().abs() / (beyond.std() / pl.len().sqrt()).clip(1e-9),
    )
    of_numbers = of_numbers.filter(pl.col("differ") >= FEWEST_SAMPLES)
    if of_numbers.is_empty():
        return
    # here, since few tables have such columns and SciPy takes long to import
    from scipy.special import stdtr

    chance = 2 * stdtr(of_numbers["count"].to_numpy() - 1, -of_numbers["times"].to_numpy())
    if chance.min() * number.n_unique() < BY_CHANCE:
        means = cells.group_by("number").agg(pl.col("accuracy").mean()).sort("number").rows()
        levels = ", ".join(f"{mean:.2f} at {value}" for value, mean in means)
        notes.append(
            f"{column.name}: taken as a number of repeats, but accuracy differs with it "
            f"({levels}). If it is a setting, such as a number of attempts, make it a knob, with "
            f"profile.knobs=[{','.join([*knobs, column.name])}]"
        )


def _check_repeated(rows: pl.DataFrame, cells: pl.DataFrame, notes: list[str]) -> None:
    """Note how many cells were measured repeatedly without numbers, or differ in accuracy.

    `repeat` tells measurements of a cell apart, or without it any column does. Raises InputError if
    nothing does, with the columns beside the `cell` of all rows that would.
    """
    same = "the same repeat"
    copies = rows.filter(_as_above("cell", "repeat"))
    if rows["repeat"].null_count():
        same = "the same latency, accuracy and other columns"
        copies = rows.filter("copy")
        times = rows["cell"].value_counts()["count"].to_numpy()
        if times.max() > 1:
            notes.append(
                f"{(times > 1).sum()} cells occur up to {times.max()} times: taken as repeated "
                f"measurements. Ids must be unique inside a data set ({RESTART}){_parting(cells)}"
            )
    if copies.height:
        raise InputError(
            f"{copies['cell'].n_unique()} (sample, configuration) pairs occur more than once with "
            f"{same}, such as {_cells_of(copies)}; remove the copies, or number the measurements "
            f"of each pair in a column `repeat`. Ids must be unique inside a data set ({RESTART}), "
            f"and every knob needs a column{_parting(cells)}"
        )
    other = ~_as_above("accuracy")
    differ = rows.filter(_as_above("cell"), other)
    if len(differ):
        notes.append(
            f"{differ['cell'].n_unique()} cells differ in accuracy between measurements, such as "
            f"{_cells_of(differ)}: the mean is used"
        )
    same_time = rows.filter(_as_above("cell", "latency"), other)
    if len(same_time):
        notes.append(
            f"{same_time['cell'].n_unique()} of them have two accuracies at the same latency, such "
            f"as {_cells_of(same_time)}: one may be a mistake"
        )


def note_late_and_wrong(table: ProfileTable, accuracies: torch.Tensor) -> ProfileTable:
    """Return the table with a note if the measurements that are late are mostly those that are
    wrong, or right: the utility, mean accuracy × share in time, is then not that of a measurement.

    Args:
        table: as it was read.
        accuracies: float32 [N, C, R], of each measurement; those that have none are wrong.
    """
    times_ms = table.measurements_ms
    accuracies = accuracies.nan_to_num()
    differ = (accuracies - table.accuracy.unsqueeze(-1)).abs() > WORTH
    if not (differ & ~times_ms.isnan()).any():
        return table
    most = WORTH
    note = ""
    known = table.mask.sum(0)
    count = (~times_ms.isnan()).sum(-1).clamp_min(1)
    for budget_ms in default_budgets(table):
        singly = (accuracies * (times_ms <= budget_ms)).sum(-1) / count
        usual = expected_utility(table.accuracy, times_ms, budget_ms)
        beyond = (singly - usual).sum(0) / known
        deviations = (singly - usual - beyond).masked_fill(~table.mask, 0.0)
        by_chance = SURE * deviations.square().sum(0).sqrt() / known
        size = beyond.abs().where(beyond.abs() > by_chance, 0.0)
        if size.max() > most:
            most = float(size.max())
            place = int(size.argmax())
            note = (
                f"{float(singly.sum(0)[place] / known[place]):.1%} of the measurements of "
                f"{table.label(place)} are right and within {budget_ms:.6g} {table.unit}, but it "
                f"counts as {float(usual.sum(0)[place] / known[place]):.1%}: mean accuracy × share "
                "in time, as if late ones were right as often. Give each measurement an id of its "
                "own and the old id to group=COLUMN (on the command line profile.group=COLUMN) to "
                "count them one by one"
            )
    return replace(table, notes=(*table.notes, note)) if note else table


def _parting(cells: pl.DataFrame) -> str:
    """Name the columns that have another value in each row of a cell, but several rows with each;
    "" for none."""
    names = [
        name
        for name, dtype in cells.schema.items()
        if name != "cell"
        and not holds_no_text(dtype)
        and 1 < 2 * cells[name].n_unique() <= len(cells)
        and not cells.select("cell", name).is_duplicated().any()
    ]
    if not names:
        return ""
    columns = list_columns(names)
    return f"; {columns} would tell them apart, renamed to `dataset` if ids restart in each"


def _as_above(*columns: str) -> pl.Expr:
    """Return whether a row has the same values in these columns as the row above it."""
    return pl.all_horizontal(pl.col(columns) == pl.col(columns).shift()).fill_null(False)


def _cells_of(rows: pl.DataFrame) -> str:
    """Name the first cells that rows are of, by sample and setting."""
    cells = rows.unique("cell", maintain_order=True)["sample_id", "setting"].rows()
    names = [f"{sample} ({setting})" for sample, setting in cells[:3]]
    return f"of sample {', '.join(names)}{', …' * (len(cells) > 3)}"
