"""Rows of files whose tool is known, and with it what their columns mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import polars as pl

from knobwise.common.errors import InputError
from knobwise.envs.readers.column_names import ANSWERS, named_like
from knobwise.envs.readers.column_values import number_column
from knobwise.envs.tables.units import MS

ANSWER = re.compile(r"answers?")
"""One more name of the right answer, where it belongs to a sample."""
FAILED = "answer failed"
"""The column, true or false, that says which answers failed."""
CACHED = "cached"
"""The column, true or false, that says which answers came from a cache of the tool."""
LATER = 1.001
"""What failed takes so many times as long as the slowest answer, so that it meets no budget that
only the answers meet."""
UNLESS_GIVEN = {"accuracy": "accuracy", "latency": "latency_ms", "unit": MS}
"""Options that have these values where nobody gave them."""
NAMING_COLUMNS = (
    "id",
    "repeat",
    "knobs",
    "accuracy",
    "latency",
    "costs",
    "features",
    "group",
    "time",
)
"""Options that name columns."""
ONLY_TIMES = "if every answer counts as right, add a column accuracy that is 1 throughout"
"""What makes a profile of times alone."""
LONGEST_VALUE = 40
"""Longer knob values, such as prompts, are cut in notes."""


class ToolRows(NamedTuple):
    """One row for each answer that a tool recorded."""

    tool: str
    """Its name, for messages."""
    frame: pl.DataFrame
    """`sample_id`, optionally `dataset` and `FAILED`, and columns with the names of the tool."""
    knobs: Sequence[str]
    """Columns of what was set; those with one value throughout are no knobs."""
    accuracies: Sequence[str]
    """Columns of accuracies. Of several, the user chooses one."""
    latency: str
    """The column of times; "" where there are none."""
    units: dict[str, str]
    """Units of columns that a budget may limit."""
    features: Sequence[str] = ()
    """Columns that are known before the answer, and belong to the sample."""
    costs: Sequence[str] = ()
    """Columns of further costs."""
    repeat: Sequence[str] = ()
    """Columns that number the answers of a sample under one setting."""


def as_table(
    rows: ToolRows, choices: dict[str, Any], notes: list[str]
) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Return rows and options for `long_table.table_from_frame`.

    Failed answers count as wrong, and as later than the slowest answer. What is neither in use nor
    known before the answer is left out.

    Args:
        rows: as a tool's reader returns them.
        choices: the options of the user, which go before what the tool's columns mean.
        notes: what is noticed.

    Raises:
        InputError: an option names a column that is not there, or the file lacks scores or times.
    """
    typed = given_of(choices)
    named = named_columns(typed)
    if unknown := [name for name in named if name not in rows.frame.columns]:
        raise InputError(
            f"no column {', '.join(unknown)}; a file of {rows.tool} has "
            f"{', '.join(name for name in rows.frame.columns if name != FAILED)}"
        )
    if "accuracy" not in typed:
        _refuse_without_accuracy(rows)
    if "latency" not in typed and not rows.latency:
        raise InputError(
            f"a file of {rows.tool} holds scores alone, and no times: join it with a file of times "
            "for each id and setting, profile.path=[scores,times.csv]"
        )
    frame, roles = as_part(rows, typed, notes)
    kept = {
        *("dataset", "sample_id", "repeat", *rows.features, *named),
        *(roles["accuracy"], roles["latency"], *roles["knobs"], *roles["costs"]),
    }
    return frame.select(name for name in frame.columns if name in kept), choices | roles


def as_part(
    rows: ToolRows, typed: dict[str, Any], notes: list[str]
) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Return rows, and the options that they imply, beside those that are given; the file may hold
    scores or times alone."""
    latency = typed.get("latency") or rows.latency
    roles: dict[str, Any] = {
        "knobs": that_vary(rows.frame, rows.knobs),
        "costs": [name for name in rows.costs if name != latency],
    }
    if len(rows.accuracies) == 1:
        roles["accuracy"] = rows.accuracies[0]
    if latency:
        roles["latency"] = latency
        roles["unit"] = rows.units.get(latency, MS)
    roles |= typed
    notes.append(
        f"a file of {rows.tool}: knobs {', '.join(roles['knobs'])}, accuracy "
        f"{roles.get('accuracy')}, cost {latency or None} in {roles.get('unit')}"
    )
    frame = rows.frame
    if FAILED in frame.columns:
        frame = _with_failures(frame, roles, rows.tool, notes)
    if "repeat" not in typed:
        frame = _with_repeats(frame, roles["knobs"], rows.repeat)
    return frame, roles


def given_of(choices: dict[str, Any]) -> dict[str, Any]:
    """Return the options that somebody gave, whose values are not the usual ones."""
    return {
        name: value
        for name, value in choices.items()
        if value is not None and value != UNLESS_GIVEN.get(name)
    }


def _refuse_without_accuracy(rows: ToolRows) -> None:
    """Raise InputError if there is no column of accuracies, or several."""
    if len(rows.accuracies) > 1:
        raise InputError(
            f"{rows.tool} judged each answer in several ways: {', '.join(rows.accuracies)}; "
            f"accuracy=… chooses one (on the command line profile.accuracy={rows.accuracies[0]})"
        )
    if not rows.accuracies:
        raise InputError(
            f"a file of {rows.tool} holds times alone, and no accuracy: join it with a file of "
            f"scores for each id and setting, profile.path=[scores.csv,times] ({ONLY_TIMES})"
        )


def named_columns(typed: dict[str, Any]) -> list[str]:
    """Return the columns that options of the user name."""
    named = [column.name for column in typed.get("columns", ())]
    for option in NAMING_COLUMNS:
        value = typed.get(option)
        # features may also be a file, its content, or auto
        if isinstance(value, str) and option != "features":
            named.append(value)
        elif isinstance(value, (list, tuple)):
            named += value
    return named


def _with_failures(
    frame: pl.DataFrame, roles: dict[str, Any], tool: str, notes: list[str]
) -> pl.DataFrame:
    """Return rows where failed answers are late and wrong: accuracy 0 and a time just above that of
    the slowest answer, since nobody knows when they were given up; their further costs are
    unknown."""
    failed = frame[FAILED].fill_null(False)
    if not failed.any():
        return frame
    answered = ~failed
    counts = counted_by_setting(frame.filter(failed), roles["knobs"])
    note = f"{failed.sum()} of {len(frame)} answers failed ({counts}): they count as wrong"
    changed: list[pl.Expr | pl.Series] = [
        pl.when(answered).then(name).alias(name) for name in roles["costs"]
    ]
    latency = roles.get("latency")
    if latency in frame.columns:
        times = number_column(frame[latency], False)
        longest: Any = times.filter(answered).max()
        if longest is None:
            longest = times.max() or 0.0
        late = LATER * longest
        changed.append(pl.when(answered).then(times).otherwise(late).alias(latency))
        note += (
            f", and as later than the slowest answer ({latency} {late:g}), since {tool} does not "
            "tell the time after which they were given up"
        )
    accuracy = roles.get("accuracy")
    if accuracy in frame.columns:
        changed.append(wrong_where(failed, frame[accuracy]))
    notes.append(note)
    return frame.with_columns(changed)


def without_cached(
    frame: pl.DataFrame, knobs: Sequence[str], tool: str, advice: str, notes: list[str]
) -> pl.DataFrame:
    """Return rows without answers from the cache of a tool: copies, whose times are not the
    model's.

    Raises InputError if nothing else is there.
    """
    cached = frame.filter(CACHED)
    if cached.is_empty():
        return frame
    if len(cached) == len(frame):
        raise InputError(
            f"all {len(cached)} answers came from {tool}'s cache, so that their times are not "
            f"those of the model; {advice}"
        )
    counts = counted_by_setting(cached, that_vary(frame, knobs))
    notes.append(
        f"{len(cached)} answers came from {tool}'s cache ({counts}): copies, whose times are not "
        f"those of the model, so they are left out; {advice}"
    )
    return frame.filter(~pl.col(CACHED))


def wrong_where(failed: pl.Series, accuracy: pl.Series) -> pl.Series:
    """Return accuracies that are 0 where the answer failed, whatever a score or a word says."""
    if accuracy.dtype in (pl.String, pl.Categorical, pl.Enum):
        # no word that counts as right
        return accuracy.cast(pl.String).zip_with(~failed, pl.Series(["0"]))
    return accuracy.cast(pl.Float64).zip_with(~failed, pl.Series([0.0]))


def _with_repeats(
    frame: pl.DataFrame, knobs: Sequence[str], numbers: Sequence[str]
) -> pl.DataFrame:
    """Return rows with `repeat` if there are several for a sample and setting: the number that the
    tool gave them if it tells them apart, else their order."""
    cell = [name for name in ("dataset", "sample_id", *knobs) if name in frame.columns]
    if not frame.select(cell).is_duplicated().any():
        return frame
    if len(numbers) == 1 and not frame.select(*cell, *numbers).is_duplicated().any():
        return frame.with_columns(pl.col(numbers[0]).alias("repeat"))
    if numbers:
        frame = frame.sort(numbers, maintain_order=True)
    return frame.with_columns(repeat=pl.int_range(pl.len()).over(cell))


def counted_by_setting(frame: pl.DataFrame, knobs: Sequence[str]) -> str:
    """Return how many rows there are of each setting, for a note."""
    counts = frame.group_by(list(knobs), maintain_order=True).len().sort("len", descending=True)
    names = []
    for row in counts.head(4).iter_rows(named=True):
        values = [f"{knob}={_shortened(row[knob])}" for knob in knobs]
        names.append(f"{' '.join(values)}: {row['len']}")
    return "; ".join(names) + "; …" * (len(counts) > 4)


def _shortened(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def known_before(columns: Sequence[str], prefix: str, notes: list[str]) -> list[str]:
    """Return the columns that begin so, but for those named like the right answer, which a note
    names."""
    names = {name.removeprefix(prefix): name for name in columns if name.startswith(prefix)}
    answers = {*named_like(list(names), ANSWERS, ANSWER)}
    if answers:
        listed = ", ".join(names[name] for name in sorted(answers))
        notes.append(f"no features, since they hold answers: {listed} (features=[…] names them)")
    return [names[name] for name in names if name not in answers]


def that_vary(frame: pl.DataFrame, columns: Sequence[str]) -> list[str]:
    """Return those of these columns that have several values; the first if none has."""
    several = [name for name in columns if frame[name].n_unique() > 1]
    return several or list(columns[:1])
