"""Columns that say by their values how a run ended, whatever they are called: `state` in tables of
Optuna and MLflow, `status` in those of solvers.

Nobody can set how a run ends, so such a column is an outcome.
"""

from __future__ import annotations

import re

import polars as pl

from knobwise.envs.readers.column_values import glimpse

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
