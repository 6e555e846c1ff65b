"""Several rows of a cell that are no repeated measurements: an answer that was judged in several
ways, and different samples whose ids restart."""

from __future__ import annotations

from collections.abc import Sequence, Set

import polars as pl

from knobwise.common.errors import InputError
from knobwise.envs.readers.column_values import holds_no_text
from knobwise.envs.readers.outcome_columns import (
    JUDGES,
    MEASURED,
    OUTCOMES,
    REPEATS,
    as_whole_numbers,
    named_like,
)

EXAMPLES = 4
"""So many values are named."""
SETTINGS = 1.5
"""A sample has rows of more settings than this, on average; an answer has one."""
RESTARTED = 0.5
"""More of the ids stand for several samples, where they restart."""


def refuse_judges(
    frame: pl.DataFrame,
    rows: pl.DataFrame,
    keys: Sequence[str],
    knobs: Sequence[str],
    used: Set[str],
) -> None:
    """Raise InputError if a column such as `scorer` says by what an answer was judged: rows that
    differ in it and in their accuracy took the same time to the last digit.

    Args:
        frame, rows: all columns as they were read; `keys` and `latency`.
        keys: the columns of rows that are the ids.
        knobs: columns of the frame, of which some may be such a column.
        used: columns that are something else by an option, or a knob because somebody said so.
    """
    for name in named_like([c for c in frame.columns if c not in used], JUDGES):
        if holds_no_text(frame.schema[name]):
            continue
        others = [f"knob {knob}" for knob in knobs if knob != name]
        settings = [frame[knob].alias(f"knob {knob}") for knob in knobs if knob != name]
        table = rows.select(*keys, "latency").with_columns(*settings, frame[name].alias("judge"))
        times = table.group_by(*keys, *others, "judge").agg(pl.col("latency").sort())
        judged = times.group_by(*keys, *others).agg(pl.len(), pl.col("latency").n_unique())
        several = judged.filter(pl.col("len") > 1)
        if len(several) and (several["latency"] == 1).all():
            values = frame[name].drop_nulls().unique(maintain_order=True).to_list()
            listed = ", ".join(map(str, values[:EXAMPLES])) + ", …" * (len(values) > EXAMPLES)
            raise InputError(
                f"column {name!r} is by what answers were judged ({listed}), not a setting: rows "
                f"that differ in it took the same time. Keep the rows of one, such as those with "
                f"{name} {values[0]}, in a file of their own; or give each a column, of which "
                f"accuracy=… chooses one. If it was set, knobs=[…] says so"
            )


def check_ids(
    frame: pl.DataFrame, keys: pl.DataFrame, knobs: Sequence[str], used: Set[str], notes: list[str]
) -> None:
    """Refuse ids that restart, so that one of them stands for several samples: a column such as
    `question` has values that each belong to one id and to several settings, and parts the rows of
    each cell.

    Ids that are no numbers from 0 or 1 on may be of samples in several wordings: that is noted.

    Args:
        frame, keys: all columns as they were read, and the ids.
        knobs: columns of the frame.
        used: columns that are something else by an option.
        notes: what is noticed.

    Raises:
        InputError: with a column that would part the samples.
    """
    settings = frame.select(pl.col(knobs).name.prefix("knob "))
    cells = keys.hstack(settings)
    if not cells.is_duplicated().any():
        return
    columns = [c for c in frame.columns if c not in (*keys.columns, *knobs, *used)]
    measured = named_like(columns, OUTCOMES, MEASURED, REPEATS)
    columns = [c for c in columns if c not in measured and not holds_no_text(frame.schema[c])]
    names = [c for c in columns if _names_samples(frame[c], keys, cells)]
    if not names:
        return
    inside = keys.with_columns(frame[names[0]].alias("name"))
    # of columns that part the ids, those that hardly vary are better names of data sets
    parting = [
        c
        for c in columns
        if c not in names
        and not cells.with_columns(frame[c].alias("part")).is_duplicated().any()
        and keys.with_columns(frame[c].alias("part")).n_unique() == inside.n_unique()
    ]
    several = inside.unique().group_by(keys.columns).len().filter(pl.col("len") > 1)
    sample = several.sort("sample_id")["sample_id"][0]
    words = (
        f"id {sample} and {len(several) - 1} others stand for several samples, of different "
        f"{names[0]}"
    )
    advice = f"profile.id={names[0]} tells them apart"
    if parting:
        advice = f"rename {parting[0]} to `dataset`, in which ids start anew"
    numbers = as_whole_numbers(keys["sample_id"])
    if not numbers.null_count() and numbers.min() in (0, 1):
        raise InputError(f"{words}: {advice}. If they are repeats, profile.repeat=… numbers them")
    notes.append(f"{words}, taken for repeated measurements: if they are not, {advice}")


def _names_samples(names: pl.Series, keys: pl.DataFrame, cells: pl.DataFrame) -> bool:
    """Return whether the values of a column are of samples: each belongs to one id and to several
    settings, ids have several, and no cell has two rows of one."""
    if names.null_count():
        return False
    pairs = keys.with_columns(names.alias("name"))
    samples = pairs.unique()
    if samples["name"].n_unique() < len(samples):
        return False
    measured = cells.with_columns(names.alias("name"))
    several = samples.group_by(keys.columns).len()["len"] > 1
    return (
        not measured.is_duplicated().any()
        and len(measured) > SETTINGS * len(samples)
        and several.sum() > RESTARTED * len(several)
    )
