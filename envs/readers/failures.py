"""Answers that failed, and runs that ended in another way than they should.

Columns say so by their values, whatever they are called: `state` in tables of Optuna and MLflow,
`status` in those of solvers. Nobody can set how a run ends, so such a column is an outcome. Some
tools write no row for a request that failed, so that the setting which fails most looks best; what
is missing then counts as a failure if the user says so.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import torch

from knobwise.common.errors import InputError
from knobwise.envs.readers.column_names import ERRORS, named_like
from knobwise.envs.readers.column_values import glimpse, holds_no_text
from knobwise.envs.tables.profile_table import ProfileTable, median_of
from knobwise.envs.tables.time_outs import time_outs

ENDED = re.compile(r"ok|success(ful)?|succeeded|completed?|finished|done|terminated|passed")
"""Words of runs that did all they should, in lower case."""
UNENDED = re.compile(r"pruned|skipped|pending|queued|waiting|running|cancell?ed")
"""Words of runs that were not to end, or have not yet, in lower case."""
FAILED = re.compile(
    r"fail(ed|ure)?|errors?|errored|crash(ed)?|timed?[ _-]?out|killed|abort(ed)?"
    r"|mem(ory)?[ _-]?out|out[ _-]of[ _-]memory|oom"
)
"""Words of runs that failed, in lower case."""
KINDS = (ENDED, UNENDED, FAILED)
MOST_WORDS = 20
"""A column with more different values tells something else."""
FINE = {"", "none", "null", "nan", "na", "n/a", "false", "0", "no", "okay"}
"""Values of such a column where nothing failed, in lower case."""
FINE_WORDS = rf"^(2\d\d|{ENDED.pattern}|{UNENDED.pattern})$"
"""More of them: 200 and its like, and words for runs."""
MOST_ANSWERED = 0.5
"""Such a value is none of a failure if a larger share of its rows took time and are right."""
MISSING_CELLS = ("unmeasured", "failed")
"""What cells without a measurement may be."""
REPEATED = 0.05
"""Measurements are repeated if so many samples have several of a cell."""
MOST_NAMED = 3
"""A note names so many settings."""


def states_among(frame: pl.DataFrame) -> list[str]:
    """Return the columns in which all values, empty ones aside, say how a run ended."""
    return [
        name
        for name, dtype in frame.schema.items()
        if dtype in (pl.String, pl.Categorical, pl.Enum)
        and _are_states(glimpse(frame[name]))
        and _are_states(frame[name])
    ]


def _are_states(column: pl.Series) -> bool:
    values = column.unique().drop_nulls()
    if len(values) > MOST_WORDS:
        return False
    words = [word for value in values if (word := str(value).strip().lower())]
    known = all(any(kind.fullmatch(word) for kind in KINDS) for word in words)
    return known and bool(words)


def note_unended(
    frame: pl.DataFrame, accuracy: pl.Series, latency: pl.Series, notes: list[str]
) -> None:
    """Note how many rows are measurements of runs that did not end, as a column says.

    Args:
        frame: rows.
        accuracy, latency: what they hold, null where unknown.
        notes: what is noticed.
    """
    measured = accuracy.is_not_null() & latency.is_not_null()
    for name in states_among(frame.drop(accuracy.name, strict=False)):
        words = frame[name].cast(pl.String).str.strip_chars()
        unended = words.str.to_lowercase().str.contains(rf"^({UNENDED.pattern})$") & measured
        if unended.any():
            listed = ", ".join(words.filter(unended.fill_null(False)).unique().sort())
            notes.append(
                f"{unended.sum()} rows have {accuracy.name} and a time, but {name} says {listed}: "
                "if that is what an unfinished run had, leave it out"
            )


def failures(
    frame: pl.DataFrame, accuracy: pl.Series, latency: pl.Series, notes: list[str]
) -> pl.Series:
    """Return which rows have no accuracy because the answer failed, bool [n]; notes count them.

    A column of errors, or of how a run ended, says so; or several rows without accuracy took
    equally long, as long as none with accuracy, or as long as other time-outs.
    """
    failed = _none_of(frame)
    unscored = accuracy.is_null()
    # most tables have a score in every row
    signs = _signs(frame, unscored, accuracy, latency) if unscored.any() else {}
    for sign, rows in signs.items():
        new = unscored & rows & ~failed
        if new.any():
            timed = " if they have a time" * bool((new & latency.is_null()).any())
            notes.append(
                f"{new.sum()} rows without {accuracy.name} {sign}: they count as wrong{timed}"
            )
        failed |= new
    note_unended(frame, accuracy, latency, notes)
    return failed


def _none_of(frame: pl.DataFrame) -> pl.Series:
    return pl.repeat(False, len(frame), dtype=pl.Boolean, eager=True)


def _signs(
    frame: pl.DataFrame, unscored: pl.Series, accuracy: pl.Series, latency: pl.Series
) -> dict[str, pl.Series]:
    """Return what tells of a failure, and for each the rows that it may have, bool [n]."""
    signs = {f"failed, as {name} says": ~_is_fine(text) for name, text in _statuses(frame).items()}
    longest = float(np.max(latency.fill_null(0).to_numpy(), initial=0))
    slowest = (latency == longest).fill_null(False)
    if 1 < slowest.sum() == (slowest & unscored).sum() and not unscored.all():
        signs[f"took {longest:g}, which is longest, as time-outs do"] = slowest
    times = latency.cast(pl.Float64).fill_null(float("nan")).to_numpy()
    late = time_outs(times, (accuracy.fill_null(0.0) == 0).to_numpy()) & unscored.to_numpy()
    if late.any():
        signs[f"took {times[late].min():g} or a little longer, as time-outs do"] = pl.Series(late)
    return signs


def is_crashed(
    frame: pl.DataFrame, accuracy: pl.Series, latency: pl.Series, notes: list[str]
) -> pl.Series:
    """Return which rows failed before they took any time or cost, whatever accuracy they have, bool
    [n]; notes count those that have more than 0.

    A column of errors says so, by a value that hardly any answer has: right, and not for nothing.
    """
    failed = _none_of(frame)
    nothing = (latency == 0).fill_null(True)
    if not nothing.any():
        return failed
    right = (accuracy > 0).fill_null(False)
    for name, status in _statuses(frame.drop(accuracy.name, strict=False)).items():
        rows = pl.DataFrame({"status": status, "answered": right & ~nothing})
        seldom = rows.select(pl.col("answered").mean().over("status") <= MOST_ANSWERED)["answered"]
        # a fraction is a measure of errors
        fraction = (status.cast(pl.Float64, strict=False) % 1 != 0).fill_null(False)
        new = nothing & seldom & ~(_is_fine(status) | fraction | failed)
        if scored := (new & right & (latency == 0)).sum():
            notes.append(
                f"{scored} rows that took nothing, but have an {accuracy.name} above 0, failed, as "
                f"{name} says: they count as wrong"
            )
        failed |= new
    return failed


def _statuses(frame: pl.DataFrame) -> dict[str, pl.Series]:
    """Return the columns that say whether an answer failed, as text in lower case; "" is empty."""
    statuses = {}
    for name in dict.fromkeys([*named_like(frame.columns, ERRORS), *states_among(frame)]):
        if not holds_no_text(frame[name].dtype):
            text = frame[name].cast(pl.String).str.strip_chars().str.to_lowercase().fill_null("")
            # a code is a float where others are empty
            statuses[name] = text.str.replace(r"^(\d+)\.0+$", "$1")
    return statuses


def _is_fine(status: pl.Series) -> pl.Series:
    """Return where a column of `_statuses` says that nothing failed, bool [n]."""
    return status.is_in(list(FINE)) | status.str.contains(FINE_WORDS)


def rows_as_failed(measured: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    """Return rows in which those without accuracy or latency are wrong, and as late as the slowest.

    Args:
        measured: `accuracy` and `latency`, float64, null where unknown.
        notes: what is noticed.
    """
    unknown = measured["accuracy"].is_null() | measured["latency"].is_null()
    if not unknown.any() or unknown.all():
        return measured
    notes.append(
        f"missing=failed: {unknown.sum()} rows without accuracy or latency count as late and wrong"
    )
    late = pl.when(unknown).then(pl.col("latency").max()).otherwise("latency")
    wrong = pl.when(unknown).then(0.0).otherwise("accuracy")
    return measured.with_columns(latency=late, accuracy=wrong)


def cells_as_failed(table: ProfileTable) -> ProfileTable:
    """Return the table with each measurement that has no row as a failure: wrong, and as late as
    the latest. A cell that lacks some of its repeats keeps the others.

    A configuration that was measured for no sample of a data set stays unmeasured there. Further
    costs of what failed stay unknown.

    Raises:
        InputError: cells are missing because others were drawn to be measured.
    """
    if table.sampling_weight is not None:
        raise InputError(
            "missing=failed: the cells of this table were drawn to be measured, so those that are "
            "missing did not fail; leave it out"
        )
    count, lacking = _counts_of_rows(table)
    if not lacking.any():
        return table
    times_ms = table.measurements_ms
    place = torch.arange(times_ms.shape[-1])
    due = (count + lacking).unsqueeze(-1)
    failed = (place >= count.unsqueeze(-1)) & (place < due)
    times_ms = times_ms.masked_fill(failed, float(times_ms.nan_to_num().max()))
    right = table.accuracy.nan_to_num() * count / (count + lacking)
    changes: dict[str, Any] = {
        "accuracy": right.where(lacking > 0, table.accuracy),
        "latency_ms": median_of(times_ms).where(lacking > 0, table.latency_ms),
        "mask": table.mask | (lacking > 0),
    }
    if table.repeats_ms is not None:
        changes["repeats_ms"] = times_ms
    what = "cells" if table.repeats_ms is None else "measurements"
    note = (
        f"missing=failed: {lacking.sum()} {what} without a row count as late and wrong "
        f"({_named_settings(table, count, lacking)})"
    )
    return replace(table, notes=(*table.notes, note), **changes)


def note_lost_repeats(table: ProfileTable) -> ProfileTable:
    """Return the table with a note if cells lack rows that other cells of their data set have, as
    where a tool writes none for a request that failed."""
    # what was drawn to be measured need not have failed
    if table.repeats_ms is None or table.sampling_weight is not None:
        return table
    count, lacking = _counts_of_rows(table)
    # nor what was left out whole
    if not ((lacking > 0) & (count > 0)).any():
        return table
    note = (
        f"repeats that lack a row: {_named_settings(table, count, lacking)}. If these requests "
        "failed, they were late and wrong, and what fails most looks best: in a long table "
        "missing=failed (on the command line profile.missing=failed) counts them so"
    )
    return replace(table, notes=(*table.notes, note))


def _counts_of_rows(table: ProfileTable) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many measurements each cell has, and how many more it should have, int64 [N, C]
    each.

    It should have as many as any cell of at least `REPEATED` of the samples of its data set, since
    more are of ids that occur twice. Where its configuration never ran, it lacks none.
    """
    count = (~table.measurements_ms.isnan()).sum(-1)
    due = torch.zeros(table.num_samples, dtype=torch.long)
    datasets = np.array(table.dataset_names)
    for dataset in np.unique(datasets):
        rows = torch.from_numpy(datasets == dataset)
        most = count[rows].amax(1).sort(descending=True).values
        due[rows] = most[math.ceil(REPEATED * len(most)) - 1]
    return count, (due.unsqueeze(1) - count).clamp_min(0) * ran(table)


def _named_settings(table: ProfileTable, count: torch.Tensor, lacking: torch.Tensor) -> str:
    """Say how many rows are lacking of the configurations that lack most, see `_counts_of_rows`."""
    lost = lacking.sum(0)
    whole = lost + count.sum(0)
    most = lost.argsort(descending=True, stable=True)[: int((lost > 0).sum())].tolist()
    settings = [f"{table.label(c)}: {lost[c]} of {whole[c]}" for c in most[:MOST_NAMED]]
    return "; ".join(settings) + "; …" * (len(most) > MOST_NAMED)


def ran(table: ProfileTable) -> torch.Tensor:
    """Return whether any sample of the cell's data set was measured with its configuration, bool
    [N, C]. If none was, nobody tried."""
    datasets = np.unique(table.dataset_names, return_inverse=True)[1]
    of_dataset = torch.from_numpy(datasets.reshape(-1))
    measured = torch.zeros(int(of_dataset.max()) + 1, table.num_configurations, dtype=torch.long)
    measured.index_add_(0, of_dataset, table.mask.long())
    return measured[of_dataset] > 0
