"""Join a table of scores with one of times: most tools record one of the two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from knobwise.common.errors import InputError
from knobwise.envs.readers.column_names import (
    ANSWERS,
    INDEX,
    JUDGES,
    MEASURED,
    NO_SETTINGS,
    OUTCOMES,
    REPEATS,
    ROW_NUMBERS,
    UNITS,
    list_columns,
    named_like,
)
from knobwise.envs.readers.column_values import holds_no_text
from knobwise.envs.readers.tool_rows import (
    FAILED,
    UNLESS_GIVEN,
    ToolRows,
    as_part,
    given_of,
    named_columns,
    wrong_where,
)

SHARED = 0.5
"""A column that both tables have is a key if so many of its values in either are in the other. The
times of one model out of three are those of this model alone."""
SELDOM_NEW = 0.5
"""A column of settings has at most so many different values for each row."""
EXAMPLES = 3
"""So many keys are shown as examples."""


def join_files(
    parts: Sequence[tuple[str, pl.DataFrame | ToolRows]], choices: dict[str, Any], notes: list[str]
) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Join tables, each with the one before, by the ids and the knobs that both have.

    Args:
        parts: the name and the rows of each file.
        choices: options of `long_table.table_from_frame`; those that tools imply are added.
        notes: takes how many rows met.

    Returns:
        The rows that met, and the options.

    Raises:
        InputError: they share no ids, no rows meet, rows that meet differ in a setting or are of
            several data sets, or a key has several rows in both tables, whose join would pair each
            with each.
    """
    typed = given_of(choices)
    roles: dict[str, Any] = {}
    name, part = parts[0]
    frame = _plain_rows(0, part, roles, typed, notes)
    for number, (other_name, part) in enumerate(parts[1:], 1):
        other = _plain_rows(number, part, roles, typed, notes)
        frame = _joined_pair(name, frame, other_name, other, typed, notes)
        name = f"{name} and {other_name}"
    if not all(isinstance(part, ToolRows) for _, part in parts):
        # the knobs of the other files are unknown
        roles.pop("knobs", None)
    choices = choices | roles | typed
    return _with_failures(frame, choices.get("accuracy", UNLESS_GIVEN["accuracy"])), choices


def _with_failures(frame: pl.DataFrame, accuracy: str) -> pl.DataFrame:
    """Return rows that are wrong where any file says that the answer failed: one that holds times
    alone knows of failures that the scores do not."""
    columns = [name for name in frame.columns if name.startswith(FAILED)]
    # as `table_from_frame` calls it
    accuracy = accuracy if accuracy in frame.columns else "score"
    if columns and accuracy in frame.columns:
        failed = frame.select(pl.any_horizontal(columns).fill_null(False)).to_series()
        frame = frame.with_columns(wrong_where(failed, frame[accuracy]))
    return frame.drop(columns)


def _plain_rows(
    number: int,
    part: pl.DataFrame | ToolRows,
    roles: dict[str, Any],
    typed: dict[str, Any],
    notes: list[str],
) -> pl.DataFrame:
    """Return the rows of a file, with `sample_id`; what a tool's columns mean is added to roles."""
    name = typed.get("id")
    if isinstance(part, ToolRows):
        frame, of_tool = as_part(part, typed, notes)
        knobs = [*roles.get("knobs", ()), *of_tool["knobs"]]
        costs = [*roles.get("costs", ()), *of_tool["costs"]]
        roles.update(of_tool, knobs=list(dict.fromkeys(knobs)), costs=list(dict.fromkeys(costs)))
        kept = {"dataset", "sample_id", "repeat", name, *of_tool["knobs"], *of_tool["costs"]}
        kept |= {*part.accuracies, part.latency, *part.features, *named_columns(typed)}
        failed = {FAILED: f"{FAILED} {number}"}
        part = frame.select(column for column in frame.columns if column in kept | {*failed})
        part = part.rename(failed, strict=False)
    if name in part.columns and name != "sample_id":
        return part.with_columns(pl.col(name).alias("sample_id"))
    return part


def _joined_pair(
    name: str,
    frame: pl.DataFrame,
    other_name: str,
    other: pl.DataFrame,
    typed: dict[str, Any],
    notes: list[str],
) -> pl.DataFrame:
    """Return the rows of two tables that meet; of columns that both have, those of the first."""
    for each_name, each in ((name, frame), (other_name, other)):
        if "sample_id" not in each.columns:
            raise InputError(
                f"{each_name}: no column {typed.get('id') or 'sample_id'} to join by; its columns "
                f"are {list_columns(each.columns)}. Both files need the same ids, under the name "
                "that id=… gives (on the command line profile.id=…)"
            )
    # its ids stand under our name, too
    if typed.get("id") not in (None, "sample_id"):
        other = other.drop(typed["id"], strict=False)
    keys = _keys(frame, other, typed)
    both = [c for c in frame.columns if c in other.columns and c not in keys]
    for role in ("accuracy", "latency"):
        column = typed.get(role, UNLESS_GIVEN[role])
        if column in both:
            raise InputError(
                f"{name} and {other_name} both have {column}: if each is of another setting, such "
                "as a model, write one file of both, with a column that names the setting; else "
                "remove it from one of them, or rename it"
            )
    left = frame.with_columns(_as_text(frame, keys))
    right = other.with_columns(_as_text(other, keys))
    temporary = [_key(key) for key in keys]
    if "knobs" not in typed:
        settings = _may_be_settings(left, right, both, typed)
        _refuse_other_settings(name, left, other_name, right, keys, settings)
    right = right.drop(both)
    _refuse_pairs(name, left, other_name, right, keys)
    met = left.join(right.drop(keys), on=temporary, how="inner", maintain_order="left_right")
    alone = len(left.join(right, on=temporary, how="anti"))
    alone_there = len(right.join(left, on=temporary, how="anti"))
    if met.is_empty():
        raise InputError(
            f"no row of {name} meets one of {other_name} by {', '.join(keys)}: there is "
            f"{_examples(left, temporary)} in one, {_examples(right, temporary)} in the other"
        )
    _refuse_datasets(name, left, other_name, right, met, temporary)
    notes.append(
        f"{name} and {other_name} are joined by {', '.join(keys)}: {len(met)} rows met; {alone} "
        f"rows of {name} and {alone_there} of {other_name} met none"
        + f" (both have {list_columns(both)}: taken from {name})"
        * bool(both)
    )
    return met.drop(temporary)


def _keys(frame: pl.DataFrame, other: pl.DataFrame, typed: dict[str, Any]) -> list[str]:
    """Return the columns to join by: ids, and the knobs and repeats that both tables have."""
    both = [c for c in frame.columns if c in other.columns]
    ids = [c for c in ("dataset", "sample_id") if c in both]
    repeats = [c for c in both if c in ("repeat", typed.get("repeat"))]
    if "knobs" in typed:
        return [*ids, *(c for c in both if c in typed["knobs"]), *repeats]
    measured = named_like(both, OUTCOMES, MEASURED)
    used = {*ids, *repeats, *measured, typed.get("id"), *filter(None, map(_name, typed.values()))}
    columns = [c for c in both if c not in used and not holds_no_text(frame.schema[c])]
    return [*ids, *(c for c in columns if _shares_values(frame, other, c)), *repeats]


def _may_be_settings(
    left: pl.DataFrame, right: pl.DataFrame, columns: Sequence[str], typed: dict[str, Any]
) -> list[str]:
    """Return those of these columns that may hold settings: a few values that recur, and no
    property of the sample, whatever each table calls it."""
    no_settings = named_like(
        columns,
        *(OUTCOMES, MEASURED, ANSWERS, REPEATS, ROW_NUMBERS, UNITS, INDEX, NO_SETTINGS, JUDGES),
    )
    ids = [c for c in (_key("dataset"), _key("sample_id")) if c in left.columns]
    settings = []
    for column in columns:
        if column in {*no_settings, *named_columns(typed)}:
            continue
        tables = [each for each in (left, right) if not holds_no_text(each.schema[column])]
        if len(tables) < 2:
            continue
        counts = [each[column].drop_nulls().n_unique() for each in tables]
        recur = all(
            count <= max(1, SELDOM_NEW * len(each))
            for count, each in zip(counts, tables, strict=True)
        )
        of_sample = all(
            each.select(*ids, column).n_unique() == each.select(ids).n_unique() for each in tables
        )
        if recur and not (of_sample and max(counts) > 1):
            settings.append(column)
    return settings


def _refuse_other_settings(
    name: str,
    left: pl.DataFrame,
    other_name: str,
    right: pl.DataFrame,
    keys: Sequence[str],
    settings: Sequence[str],
) -> None:
    """Raise InputError if rows that meet differ in a setting that is no key: the times of one
    model would count for another."""
    temporary = [_key(key) for key in keys]
    for column in settings:
        values = [each.select(*temporary, _text(column)).unique() for each in (left, right)]
        met = values[0].join(values[1], on=temporary, suffix=" there")
        if met.filter(pl.col(column) != pl.col(f"{column} there")).is_empty():
            continue
        raise InputError(
            f"rows of {name} and {other_name} that meet by {', '.join(keys)} differ in {column}: "
            f"{_examples(values[0].sort(column), [column])} in one, "
            f"{_examples(values[1].sort(column), [column])} in the other. Write its values alike "
            "in both; if it is no setting, remove it from one of them, or name the settings "
            "(on the command line profile.knobs=[…])"
        )


def _refuse_datasets(
    name: str,
    left: pl.DataFrame,
    other_name: str,
    right: pl.DataFrame,
    met: pl.DataFrame,
    temporary: Sequence[str],
) -> None:
    """Raise InputError if one table alone has data sets, and a row of the other meets several of
    them: ids restart in each, so that it belongs to one of them at most."""
    if ("dataset" in left.columns) == ("dataset" in right.columns):
        return
    several = met.filter(pl.col("dataset").n_unique().over(temporary) > 1)
    if several.is_empty():
        return
    with_names, without = (name, other_name) if "dataset" in left.columns else (other_name, name)
    key = several.select(temporary).row(0)
    datasets = several.join(several.select(temporary).head(1), on=temporary)
    raise InputError(
        f"{'/'.join(map(str, key))} of {without} meets rows of several data sets of {with_names} "
        f"({_examples(datasets, ['dataset'])}), in which ids restart: {without} needs a column "
        "dataset, too"
    )


def _name(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _shares_values(frame: pl.DataFrame, other: pl.DataFrame, column: str) -> bool:
    """Return whether most values of a column in either of two tables are in the other, too."""
    if holds_no_text(other.schema[column]):
        return False
    values = [
        {*each.select(_text(column)).to_series().drop_nulls().unique()} for each in (frame, other)
    ]
    shared = len(values[0] & values[1])
    return any(shared >= SHARED * len(each) for each in values) and shared > 0


def _text(column: str) -> pl.Expr:
    """Return values as text, 7.0 like 7, and True, as pandas writes it to a CSV, like true."""
    text = pl.col(column).cast(pl.String).str.strip_chars()
    text = text.replace({"True": "true", "TRUE": "true", "False": "false", "FALSE": "false"})
    return text.str.replace(r"^(-?\d+)\.0+$", "$1")


def _key(column: str) -> str:
    return f"key {column}"


def _as_text(frame: pl.DataFrame, keys: Sequence[str]) -> list[pl.Expr]:
    """Return the keys of rows as text, under names of their own."""
    for key in keys:
        if holds_no_text(frame.schema[key]):
            raise InputError(f"column {key} holds {frame.schema[key]}: no rows can be joined by it")
    return [_text(key).alias(_key(key)) for key in keys]


def _refuse_pairs(
    name: str, left: pl.DataFrame, other_name: str, right: pl.DataFrame, keys: Sequence[str]
) -> None:
    """Raise InputError if a key has several rows in both tables."""
    temporary = [_key(key) for key in keys]
    several = left.filter(pl.struct(temporary).is_duplicated())
    several_there = right.filter(pl.struct(temporary).is_duplicated())
    common = several.join(several_there, on=temporary, how="semi")
    if common.is_empty():
        return
    alone = [
        c
        for c in (*left.columns, *right.columns)
        if (c in left.columns) != (c in right.columns) and not c.startswith(FAILED)
    ]
    raise InputError(
        f"joined by {', '.join(keys)}, {common.select(temporary).n_unique()} keys have several "
        f"rows in {name} and in {other_name}, such as {_examples(common, temporary)}: each pairs "
        f"with each. Both need the columns that tell their rows apart (knobs, or a number of the "
        f"repeat); in one of them alone are {list_columns(alone)}"
    )


def _examples(frame: pl.DataFrame, columns: Sequence[str]) -> str:
    """Return the first keys of rows."""
    rows = frame.select(columns).unique(maintain_order=True).head(EXAMPLES).rows()
    return ", ".join("/".join(map(str, row)) for row in rows)
