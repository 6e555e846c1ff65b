"""Infer the role of each column of a long table: key, measurement, knob or feature."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any

import polars as pl

from knobwise.common.errors import InputError
from knobwise.envs.readers.column_names import (
    ANSWERS,
    JUDGES,
    LABELS,
    MEASURED,
    NO_SETTINGS,
    OUTCOMES,
    REPEATS,
    ROW_NUMBERS,
    UNITS,
    list_columns,
    named_like,
    of_configurations,
    plain_name,
    settings_among,
)
from knobwise.envs.readers.column_values import blanks_as_null, holds_no_text
from knobwise.envs.readers.design import (
    Design,
    as_whole_numbers,
    count_distinct,
    differs_in_every_row,
    is_clock,
    numbers_of_rows,
    rows_of_samples,
    varying_among,
)
from knobwise.envs.readers.failures import states_among
from knobwise.envs.readers.feature_columns import AUTO
from knobwise.envs.readers.feature_files import features_in
from knobwise.envs.readers.frames import KEYS
from knobwise.envs.readers.layouts import CONFIGURATION
from knobwise.envs.readers.other_tables import note_log, refuse_log
from knobwise.envs.readers.quantities import measures_with_units
from knobwise.envs.tables.columns import Column

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
        "sampling_probability",
        "sampling_weight",
    }
)
"""Columns of measurements, which are never knobs."""
QUESTION = "question"
"""The one of these that may be a feature."""
MOST_EMPTY = 0.05
"""A column of a sample may be empty in so many of all rows by accident; in more on purpose, as an
error message is where nothing failed."""


def knobs_and_features(
    frame: pl.DataFrame,
    keys: pl.DataFrame,
    knobs: Sequence[str] | None,
    features: Any,
    columns: Sequence[Column],
    other: set[str],
    cost: str,
    notes: list[str],
    some_cells: bool = False,
) -> tuple[Sequence[str], Any]:
    """Return the columns that are knobs, and features, read if they are columns of the frame.

    Args:
        frame, keys: the rows as they were read, and their ids.
        knobs, features, columns: the options of `table_from_frame`.
        other: columns that are neither knobs nor features.
        cost: the one of them that the budget limits; it may be a knob too, as a number of tokens.
        notes: what is noticed.
        some_cells: see `table_from_frame`.

    Raises:
        InputError: columns cannot be what they are named as, or there are no knobs.
    """
    if knobs is None and len(frame) == count_distinct(keys):
        refuse_log(frame, keys, _candidates(frame, other))
    named = [column.name for column in columns]
    if isinstance(features, list):
        named += features
    candidates = [*_candidates(frame, other.union(knobs or ())), QUESTION, *named]
    frame = _filled(frame, keys, [c for c in candidates if c not in other], notes)
    # columns that are features are no knobs
    names: Sequence[str] = ()
    if features == AUTO or isinstance(features, list):
        names = _feature_names(frame, keys, features, columns, knobs, other, notes)
        features = features_in(frame, keys, names, columns, features == AUTO, notes)
    if knobs is None:
        knobs = _find_knobs(frame, keys, {*other, *names}, cost, notes)
    wrong = [k for k in knobs if k not in frame.columns or k in other - {cost}]
    if wrong or not knobs:
        raise InputError(
            f"{list_columns(wrong) or 'no column'} for a knob; its columns are "
            f"{list_columns(frame.columns)}. Name the knobs with knobs=; if there are none, name "
            "the configurations in one column. If each sample has one setting alone, this is a log "
            f"of decisions, and nothing can be replayed. {'; '.join(notes)}"
        )
    if some_cells:
        _refuse_settings(frame, keys, knobs, {*other, *names}, cost)
    else:
        refuse_log(frame, keys, knobs)
        note_log(frame, keys, knobs, notes)
    return knobs, features


def _refuse_settings(
    frame: pl.DataFrame, keys: pl.DataFrame, knobs: Sequence[str], other: set[str], cost: str
) -> None:
    """Raise InputError if a column besides the knobs was set to several values in one cell, whose
    times would be averaged as if they were repeats.

    Args:
        frame, keys, knobs, cost: as in `knobs_and_features`.
        other: columns that are neither knobs nor settings.
    """
    cells = keys.hstack(frame.select(pl.col(knobs).name.prefix("knob ")))
    columns = [
        c for c in _candidates(frame, other.union(knobs)) if not holds_no_text(frame[c].dtype)
    ]
    # measured values hardly ever come back
    columns = [c for c in columns if 2 * frame[c].n_unique() <= len(frame)]
    names, _ = _knobs_by_design(frame, cells, varying_among(frame, cells, columns), cost, [])
    repeats = {cost, *named_like(names, REPEATS, ROW_NUMBERS)}
    settings = [c for c in names if c not in repeats]
    if not settings:
        return
    values = frame[settings[0]].unique().drop_nulls().sort().cast(pl.String).to_list()
    raise InputError(
        f"{list_columns(settings)}: differs between rows with the same sample and knobs "
        f"({settings[0]}: {', '.join(values[:5])}), and times under several settings have no "
        "common mean; keep the rows of one value, the one that is served under. If it is no "
        "setting, leave the column out"
    )


def _filled(
    frame: pl.DataFrame, keys: pl.DataFrame, names: Sequence[str], notes: list[str]
) -> pl.DataFrame:
    """Return a frame in which few empty cells of a column hold what the other rows of their sample
    do, if these have one value; notes count them.

    Args:
        frame, keys: as in `knobs_and_features`.
        names: what may be features.
    """
    columns = [c for c in frame.columns if c in names and not holds_no_text(frame[c].dtype)]
    known = blanks_as_null(frame.select(columns))
    few = [c for c in columns if 0 < known[c].null_count() <= MOST_EMPTY * len(frame)]
    varying = varying_among(known, keys, few, empty=False)
    for name in few:
        # with one value in all samples, empty may be the other value of a knob
        if name in varying or known[name].drop_nulls().n_unique() < 2:
            continue
        of_sample = pl.col(name).drop_nulls().first().over(keys.columns)
        whole = keys.with_columns(known[name]).select(pl.coalesce(name, of_sample))[name]
        if filled := known[name].null_count() - whole.null_count():
            frame = frame.with_columns(whole)
            rows = f"{filled} row{'s' * (filled > 1)}"
            notes.append(f"{name}: empty in {rows}, filled from others of the same sample")
    return frame


def _find_knobs(
    frame: pl.DataFrame, keys: pl.DataFrame, measures: set[str], cost: str, notes: list[str]
) -> list[str]:
    """Return the columns that are knobs by default; note which others might have been.

    A lone column such as `configuration` is a knob if there are no others. Raises InputError if
    one of them must be a measurement, since there are nearly as many configurations as rows.
    """
    columns = _candidates(frame, measures)
    empty = [c for c in columns if frame[c].null_count() == len(frame)]
    nested = [c for c in columns if holds_no_text(frame[c].dtype)]
    # a column with one value for each sample is a property of the sample
    fixed = _constant_columns(frame, keys, columns, True)
    unknown = _unknown_before(frame, keys, fixed)
    varying = [c for c in columns if c not in (*empty, *nested, *fixed)]
    _note_unknown(unknown, notes)
    names, refused = _knobs_by_design(frame, keys, varying, cost, notes)
    labels = []
    # a name of the configuration adds nothing to its knobs
    for label in named_like(names, LABELS) if len(names) > 1 else ():
        others = [c for c in names if c != label]
        if others and count_distinct(frame.select(others)) == count_distinct(frame.select(names)):
            labels.append(label)
            names = others
    # say what was left out, because the guess may be wrong
    reasons = {
        "are empty": empty,
        "hold lists or spans of time": nested,
        "never vary inside a sample (profile.features=auto makes them features)": [
            c for c in fixed if c not in unknown
        ],
        "only repeat the other knobs": labels,
    } | refused
    for reason, left_out in reasons.items():
        if left_out:
            notes.append(f"not knobs, since they {reason}: {list_columns(left_out)}")
    count = count_distinct(frame.select(names))
    sizes_of = {name: frame[name].n_unique() for name in names}
    # a small grid of which few cells were measured has as many
    if 50 < count > len(frame) / 2 and math.prod(sizes_of.values()) > len(frame):
        sizes = ", ".join(f"{name} ({size} values)" for name, size in sizes_of.items())
        raise InputError(
            f"{count} configurations in {len(frame)} rows, so a column taken as a knob "
            f"must be a measurement: {sizes}. Name the knobs with knobs="
        )
    return names


def _knobs_by_design(
    frame: pl.DataFrame, keys: pl.DataFrame, columns: Sequence[str], cost: str, notes: list[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """Return those of these columns that were set on purpose, see `Design`; and the others, by why
    they are no knobs. Notes name those that may be none."""
    numbers = numbers_of_rows(frame, keys, columns)
    repeats = named_like(columns, REPEATS)
    outcomes = named_like(columns, OUTCOMES, MEASURED, ROW_NUMBERS)
    outcomes += [*states_among(frame.select(columns)), *measures_with_units(frame.columns)]
    outcomes = [c for c in columns if c in outcomes or is_clock(frame[c])]
    # whoever writes config/… says that it was set
    set_on_purpose = settings_among(columns)
    numbers, repeats, outcomes = (
        [c for c in group if c not in set_on_purpose] for group in (numbers, repeats, outcomes)
    )
    outcomes = [c for c in outcomes if c not in (*numbers, *repeats)]
    rest = [c for c in columns if c not in (*numbers, *repeats, *outcomes)]
    random = [c for c in rest if c not in set_on_purpose and differs_in_every_row(frame[c])]
    if len(random) < len(rest):
        rest = [c for c in rest if c not in random]
    numbering = [*repeats, *(c for c in ("repeat",) if c in frame.columns)]
    design = Design(frame, keys, [*columns, cost], numbering)
    # a cost that is the same list in every sample was set
    costs = [cost] * (design.size(cost) > 1 and design.regularity(cost) == 1)
    names = design.knobs_among([*rest, *costs])
    complete = [c for c in outcomes if design.is_complete(c, names)]
    if not {*names, *complete} - {cost}:
        # a lone column names the configurations, whatever it is called
        complete = [c for c in (*costs, *repeats, *numbers) if design.is_complete(c, ())][:1]
    if complete:
        notes.append(
            f"knobs, although their names say otherwise, since each sample has all their values: "
            f"{', '.join(complete)}"
        )
    names = [c for c in (*columns, *complete) if c in (*names, *complete)]
    names = list(dict.fromkeys(names))
    unsure = design.suspicious(names)
    if unsure:
        notes.append(
            "knobs that may be outcomes, since hardly a sample has two of their values while the "
            f"other knobs are equal: {', '.join(unsure)} (profile.knobs=[…] says which are knobs)"
        )
    doubtful = named_like(names, NO_SETTINGS, JUDGES)
    if doubtful and len(names) > 1:
        notes.append(
            f"knobs with names of data sets or metrics: {', '.join(doubtful)}. If ids start anew "
            "in each data set, name its column `dataset`; of several metrics keep the rows of one"
        )
    others = [c for c in (*columns, QUESTION) if c not in names and c in frame.columns]
    for name, changing in _parting(frame, keys, names, list(dict.fromkeys(others))):
        notes.append(
            f"knob {name} may be part of the ids: {list_columns(changing)} of a sample changes "
            f"with it alone. If ids start anew in each {name}, rename it to `dataset`"
        )
    numbered = [c for c in repeats if c not in names]
    by_number = _parting(frame, keys, [*names, *numbered], [*rest, *random]) if numbered else []
    for name, changing in by_number:
        if name in numbered and (texts := [c for c in changing if c not in names]):
            notes.append(
                f"{name}: taken as a number of repeats, but {list_columns(texts)} of a sample "
                f"changes with it alone. If ids start anew in each {name}, rename it to `dataset`"
            )
    left_out = {
        "vary from sample to sample under the same settings, as outcomes do": rest,
        "have names or units of outcomes, or say when or how a run ended": outcomes,
        "differ in every row": random,
        "number rows or repeated measurements": [*numbers, *repeats],
    }
    return names, {
        reason: [c for c in group if c not in names] for reason, group in left_out.items()
    }


def _parting(
    frame: pl.DataFrame, keys: pl.DataFrame, knobs: Sequence[str], columns: Sequence[str]
) -> list[tuple[str, list[str]]]:
    """Return the knobs that part a sample into others, with what shows it: columns with one value
    for each sample and value of this knob, of no other knob, and not of this knob by itself."""
    parting = []
    fixed = {}
    for knob in knobs:
        inside = keys.with_columns(frame[knob].alias("knob"))
        # where each cell is a group of its alone, outcomes look fixed too
        several = len(frame) > 1.5 * count_distinct(inside)
        varying = varying_among(frame, inside, columns) if several else columns
        fixed[knob] = {c for c in columns if c not in varying}
    for knob in knobs:
        others = [fixed[other] for other in knobs if other != knob]
        alone = fixed[knob].difference(*others)
        by_itself = (
            varying_among(frame, frame.select(pl.col(knob).alias("knob")), sorted(alone))
            if alone
            else []
        )
        if by_itself:
            parting.append((knob, by_itself))
    return parting


def _feature_names(
    frame: pl.DataFrame,
    keys: pl.DataFrame,
    features: Any,
    columns: Sequence[Column],
    knobs: Sequence[str] | None,
    other: set[str],
    notes: list[str],
) -> list[str]:
    """Return the columns that are to be features: those that a checkpoint knows, those that are
    named, or with `auto` all that are constant inside each sample and known before its answer."""
    names = features
    if columns:
        names = [column.name for column in columns]
    elif features == AUTO:
        candidates = _candidates(frame, other.union(knobs or ()))
        if QUESTION in frame.columns and QUESTION not in other:
            candidates.append(QUESTION)
        constant = _constant_columns(frame, keys, candidates, knobs is None)
        unknown = _unknown_before(frame, keys, constant)
        names = [c for c in constant if c not in unknown]
        _note_unknown(unknown, notes)
    for name in names:
        if name not in frame.columns:
            raise InputError(
                f"features: {name}: there is no such column, but {', '.join(frame.columns)}"
            )
        if name in other or holds_no_text(frame[name].dtype):
            raise InputError(
                f"features: {name} cannot be a feature: in use, or lists; leave it out"
            )
    return names


def _note_unknown(columns: Sequence[str], notes: list[str]) -> None:
    """Note once that these columns, see `_unknown_before`, are neither knobs nor features."""
    note = (
        f"not used, since they hold answers, outcomes or numbers of rows: {list_columns(columns)} "
        "(profile.features=[…] uses the columns that it names)"
    )
    if columns and note not in notes:
        notes.append(note)


def _unknown_before(frame: pl.DataFrame, keys: pl.DataFrame, columns: Sequence[str]) -> list[str]:
    """Return those of these columns, which never vary inside a sample, that hold the right answer,
    an outcome, or the number of the sample: nothing that a request could bring."""
    rows = rows_of_samples(keys)
    samples = keys[rows].cast(pl.String).hstack([frame[c].gather(rows) for c in columns])
    ids = samples["sample_id"]
    numbers = numbers_of_rows(samples, keys[rows], columns)
    numbers += [
        c for c in named_like(columns, ROW_NUMBERS) if not as_whole_numbers(frame[c]).null_count()
    ]
    numbers += [c for c in columns if (samples[c].cast(pl.String) == ids).all()]
    unknown = {*named_like(columns, ANSWERS, OUTCOMES, REPEATS), *numbers, *states_among(samples)}
    if CONFIGURATION in frame.columns:
        configurations = frame[CONFIGURATION].cast(pl.String).unique().drop_nulls().to_list()
        unknown.update(of_configurations(samples, columns, configurations))
    return [c for c in columns if c in unknown]


def _candidates(frame: pl.DataFrame, other: Set[str]) -> list[str]:
    """Return the columns that may be knobs or features: no keys, measurements and times."""
    other = other | KEYS | MEASURES
    other = other | {*named_like(frame.columns, UNITS)}
    return [c for c in frame.columns if c not in other and not plain_name(c).endswith("_ms")]


def _constant_columns(
    frame: pl.DataFrame, keys: pl.DataFrame, names: Sequence[str], with_knobs: bool
) -> list[str]:
    """Return those of these columns that have one value in each sample, but not one in all.

    With one row per sample every column looks like that, so where knobs are among the columns and
    few samples have several rows, there are none.
    """
    rows = keys.group_by(keys.columns).len()["len"]
    # a row may be missing where all samples have two settings
    if with_knobs and len(frame) < 2 * len(rows) and 2 * (rows > 1).sum() < len(rows):
        return []
    names = [c for c in names if not holds_no_text(frame[c].dtype)]
    varying = varying_among(frame, keys, names)
    return [c for c in names if c not in varying and frame[c].n_unique() > 1]
