"""What a table looks like that lacks the columns it needs, and which options would read it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import polars as pl

from knobwise.common.errors import InputError
from knobwise.envs.readers.column_values import holds_no_text, number_column
from knobwise.envs.readers.frames import KEYS
from knobwise.envs.readers.layouts import Layout
from knobwise.envs.readers.outcome_columns import (
    ERRORS,
    REPEATS,
    ROW_NUMBERS,
    list_columns,
    named_like,
)
from knobwise.envs.readers.tool_rows import ONLY_TIMES

SCORES = re.compile(
    r"(.*_)?(acc(uracy)?|score|(in)?correct|right|pass(ed)?|success(ful)?|solved|exact_match|em|f1"
    r"|reward|grade|rating|verdict)(_.*)?"
)
"""Names of scores."""
TIMES = re.compile(
    r"(.*_)?(times?|duration|latency|runtime|elapsed|wall|seconds|mean|median|min|max|stddev|user"
    r"|system|cpu|runs|rounds)(_(s|sec|ms|us|ns))?"
)
"""Names of times, and of what benchmarks say of them."""
MOSTLY = 0.5
"""A score has so large a share of its values at 0 and 1, if it is seldom partly right."""


def refuse_missing(
    needed: Sequence[str], accuracy: str, latency: str, frame: pl.DataFrame, layout: Layout
) -> None:
    """Raise InputError if a table lacks one of the columns that it needs, with the options that
    would read what looks like them.

    Args:
        needed: names of columns, among them the next two.
        accuracy, latency: those of the accuracy, and of what the budget limits.
        frame: the rows in the form that the layout says.
        layout: other names of columns.
    """
    missing = [column for column in needed if column not in frame.columns]
    if not missing:
        return
    # what the layout names stands under our names too
    copies = {"sample_id", "repeat"} if layout.names else set()
    columns = [c for c in frame.columns if c not in copies - layout.names]
    words = f"no column {', '.join(missing)}; its columns are {list_columns(columns) or 'none'}. "
    if accuracy in missing:
        others = [c for c in columns if c not in (*needed, *KEYS, *layout.names)]
        words += _instead_of_accuracy(frame, others, [c for c in columns if c == latency])
    words += (
        "A table needs sample_id, an accuracy and a latency: rename the columns, or give their "
        "names as id=…, accuracy=… and latency=… (on the command line profile.id=…, "
        "profile.accuracy=… and profile.latency=…)"
    )
    if frame.width == 1 and frame.dtypes[0] == pl.String:
        words += ". Values are parted by a comma, semicolon, tab or |"
    raise InputError(words)


def _instead_of_accuracy(frame: pl.DataFrame, columns: Sequence[str], times: Sequence[str]) -> str:
    """Return sentences about columns that may hold the accuracies; or, where none does, about
    tables of times, of which one may be known; "" where there is nothing to say."""
    used = named_like(columns, ERRORS, REPEATS, ROW_NUMBERS)
    columns = [c for c in columns if c not in used]
    judged = [c for c in columns if _is_judged(frame[c])]
    scores = [c for c in named_like(columns, SCORES) if not holds_no_text(frame.schema[c])]
    models = [c for c in judged if c not in scores or len(judged) == len(scores) > 1]
    words = ""
    if len(models) > 1 and _has_one_row_each(frame):
        costs = _costs_of(frame, models)
        words = (
            f"Columns of 0 and 1, or of shares, are {', '.join(models)}: if each is a model or a "
            f"setting, profile.wide=[{','.join(models)}] reads them, with a time or a price for "
            f"each, as a number or a column: profile.wide_latency=[{','.join(costs)}] "
            "(profile.unit=USD for prices). "
        )
    if likely := list(dict.fromkeys([*scores, *(c for c in judged if c not in models)])):
        words += f"profile.accuracy=… may be {', '.join(likely)}. "
    for name in named_like(columns, TIMES):
        if frame.schema[name].is_nested() or _is_number(frame[name]):
            times = [*times, name]
    if not words and times:
        in_lists = any(frame.schema[c].is_nested() for c in times)
        words = (
            f"It seems to hold times alone ({', '.join(times)}) and no score: join it with a file "
            "of scores for each id and setting, profile.path=[scores.csv,times.csv]; or "
            f"{ONLY_TIMES}. " + "Write a row for each time of a list. " * in_lists
        )
    return words


def _numbers(series: pl.Series) -> pl.Series | None:
    """Return a column as numbers, None if it holds anything else."""
    if holds_no_text(series.dtype):
        return None
    try:
        return number_column(series)
    except InputError:
        return None


def _is_number(series: pl.Series) -> bool:
    return _numbers(series) is not None


def _is_judged(series: pl.Series) -> bool:
    """Return whether a column holds truth values, or shares of which most are 0 or 1, of both."""
    numbers = _numbers(series)
    if numbers is None or numbers.drop_nans().drop_nulls().n_unique() < 2:
        return False
    known = numbers.drop_nans().drop_nulls()
    judged = known.is_in([0.0, 1.0]).sum()
    return bool(known.is_between(0, 1).all()) and judged >= MOSTLY * len(known)


def _has_one_row_each(frame: pl.DataFrame) -> bool:
    """Return whether no sample has two rows, as far as ids are known."""
    return "sample_id" not in frame.columns or frame["sample_id"].n_unique() == len(frame)


def _costs_of(frame: pl.DataFrame, models: Sequence[str]) -> list[str]:
    """Return for each of these columns the only one of numbers that has its name, or `…`."""
    costs = {model: list[str]() for model in models}
    for column in frame.columns:
        about = [model for model in models if model in column and model != column]
        # gpt-4-turbo is no gpt-4
        if about and column not in models and _is_number(frame[column]):
            costs[max(about, key=len)].append(column)
    return [columns[0] if len(columns) == 1 else "…" for columns in costs.values()]
