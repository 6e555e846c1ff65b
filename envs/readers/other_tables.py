"""Tables that are no profile as they stand, and which options or which other file would be one:
columns are missing, the rows are a log of decisions, an answer was judged in several ways, or the
ids of different samples restart."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set

import polars as pl

from knobwise.common.errors import InputError
from knobwise.envs.readers.column_names import (
    ERRORS,
    JUDGES,
    MEASURED,
    OUTCOMES,
    REPEATS,
    ROW_NUMBERS,
    list_columns,
    named_like,
)
from knobwise.envs.readers.column_values import holds_no_text, number_column
from knobwise.envs.readers.design import (
    COMPLETE,
    Design,
    as_whole_numbers,
    count_distinct,
    samples_varying,
    varying_among,
)
from knobwise.envs.readers.frames import KEYS
from knobwise.envs.readers.layouts import Layout
from knobwise.envs.readers.tool_rows import ONLY_TIMES
from knobwise.envs.tables.units import own_unit

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
IDS = re.compile(r"(.*_)?u?u?id")
"""Names of ids."""
MOSTLY = 0.5
"""A score has so large a share of its values at 0 and 1, if it is seldom partly right."""
MIN_SAMPLES = 5
"""Fewer samples with a setting each may be a first try, and more are a log of decisions."""
MOST_REPEATS = 10
"""Whoever has a setting more often is a user, not a sample that was measured."""
BY_CHANCE = 0.01
"""A log has samples with equal settings by chance less often."""
EXAMPLES = 4
"""So many values are named."""
SETTINGS = 1.5
"""A sample has rows of more settings than this, on average; an answer has one."""
RESTARTED = 0.5
"""More of the ids stand for several samples, where they restart."""


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
    if "sample_id" in missing and (ids := named_like(columns, IDS)):
        words += f"profile.id=… may be {', '.join(ids)}. "
    others = [c for c in columns if c not in (*needed, *KEYS, *layout.names)]
    instead = ""
    if accuracy in missing:
        instead = _instead_of_accuracy(frame, others, [c for c in columns if c == latency])
    words += instead
    # no numbers of users or runs
    times = [c for c in named_like(others, TIMES) if frame.schema[c].is_float() or own_unit(c)]
    times = [c for c in times if _is_number(frame[c])]
    # of a table of models, or of times alone, all is said
    if latency in missing and times and (not instead or "profile.accuracy=" in instead):
        words += f"profile.latency=… may be {', '.join(times)}. "
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


def refuse_log(frame: pl.DataFrame, keys: pl.DataFrame, knobs: Sequence[str]) -> None:
    """Raise InputError if settings differ between samples, but inside none."""
    if not knobs or all(frame[knob].n_unique() < 2 for knob in knobs):
        return
    if count_distinct(keys) < MIN_SAMPLES:
        return
    if not varying_among(frame, keys, knobs):
        if other_ids := _ids_of_a_design(frame, knobs):
            name, setting = other_ids
            raise InputError(
                f"one setting for each sample_id, but each {name} has all of {setting}: if {name} "
                f"tells samples apart, give it as id={name} (on the command line profile.id={name})"
            )
        raise InputError(
            "one setting for each sample: this is a log of decisions, not a profile: nothing can "
            f"be replayed. Measure each sample under several settings ({', '.join(knobs[:5])})"
        )


def _ids_of_a_design(frame: pl.DataFrame, knobs: Sequence[str]) -> tuple[str, str] | None:
    """Return the column, if there is one, whose values nearly all have the same settings, as
    samples of a profile have and those of a log have not; and the column of these settings. Of
    several it is the one with most values, and before others one with a name of ids."""
    columns = [c for c in frame.columns if c != "sample_id" and not holds_no_text(frame[c].dtype)]
    sizes = {c: frame[c].n_unique() for c in columns}
    named = named_like(columns, ROW_NUMBERS)
    columns = [c for c in columns if MIN_SAMPLES <= sizes[c] <= len(frame) / 2]
    for name in sorted(columns, key=lambda c: (-sizes[c], c not in named)):
        settings = [k for k in knobs if k != name and 1 < sizes.get(k, 0) < sizes[name]]
        design = Design(frame, frame.select(pl.col(name).alias("sample_id")), settings, ())
        for setting in settings:
            # each sample has each setting once, or as often as it was repeated
            often = len(frame) / (sizes[name] * sizes[setting])
            chance = sizes[setting] ** -sizes[name]
            regular = design.regularity(setting) >= COMPLETE
            if regular and often <= MOST_REPEATS and chance < BY_CHANCE:
                return name, setting
    return None


def note_log(
    frame: pl.DataFrame, keys: pl.DataFrame, knobs: Sequence[str], notes: list[str]
) -> None:
    """Note if most samples have one setting alone, as in a log of decisions with retries."""
    several = samples_varying(frame, keys, knobs)
    count = count_distinct(keys)
    differ = any(frame[knob].n_unique() > 1 for knob in knobs)
    if count >= MIN_SAMPLES and 2 * several < count and differ:
        notes.append(
            f"{several} of {count} samples have more than one setting: for the others, as in "
            "a log of decisions, nothing else can be replayed"
        )


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
    if count_distinct(cells) == len(cells):
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
