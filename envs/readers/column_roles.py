"""What the columns of a long table are: keys and measurements, knobs, or features of samples."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import polars as pl

from knobwise.common.errors import InputError
from knobwise.envs.readers.feature_columns import AUTO, encode_samples, fit_column
from knobwise.envs.readers.feature_files import Features, features_from
from knobwise.envs.readers.frames import KEYS
from knobwise.envs.tables.columns import FEATURES, Column

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
    }
)
"""Columns of measurements, which are never knobs."""


def keys_of(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the ids of rows: `dataset`, if there is one, and `sample_id`."""
    return rows.select(c for c in ("dataset", "sample_id") if c in rows.columns)


def knobs_and_features(
    frame: pl.DataFrame,
    keys: pl.DataFrame,
    knobs: Sequence[str] | None,
    features: Any,
    columns: Sequence[Column],
    other: set[str],
    notes: list[str],
) -> tuple[Sequence[str], Any]:
    """Return the columns that are knobs, and features, read if they are columns of the frame.

    Args:
        frame, keys: the rows as they were read, and their ids.
        knobs, features, columns: the options of `table_from_frame`.
        other: columns that are neither knobs nor features.
        notes: what is noticed.

    Raises:
        InputError: columns cannot be what they are named as, or there are no knobs.
    """
    # columns that are features are no knobs
    names: Sequence[str] = ()
    if features == AUTO or isinstance(features, list):
        names = _feature_names(frame, keys, features, columns, knobs, other)
        features = _features_in(frame, keys, names, columns, features == AUTO, notes)
    if knobs is None:
        knobs = _find_knobs(frame, keys, {*other, *names}, notes)
    wrong = [k for k in knobs if k not in frame.columns or k in other]
    if wrong or not knobs:
        raise InputError(
            f"{', '.join(wrong) or 'no column'} for a knob; its columns are "
            f"{', '.join(frame.columns)}. Name the knobs with knobs=; if there are none, name the "
            "configurations in one column"
        )
    return knobs, features


def _find_knobs(
    frame: pl.DataFrame, keys: pl.DataFrame, measures: set[str], notes: list[str]
) -> list[str]:
    """Return the columns that are knobs by default; note which others might have been.

    A lone column such as `configuration` is a knob if there are no others. Raises InputError if
    one of them must be a measurement, since there are nearly as many configurations as rows.
    """
    columns = _candidates(frame, measures)
    nested = [c for c in columns if frame[c].dtype.is_nested()]
    # a column with one value for each sample is a property of the sample
    fixed = _constant_columns(frame, keys, columns, True)
    names = [c for c in columns if c not in (*nested, *fixed)]
    labels = []
    # a name of the configuration adds nothing to its knobs
    for label in (c for c in names if c.startswith("config") and len(names) > 1):
        others = [c for c in names if c != label]
        if frame.select(others).n_unique() == frame.select(names).n_unique():
            labels.append(label)
            names = others
    # say what was left out, because the guess may be wrong
    reasons = {
        "hold lists": nested,
        "never vary inside a sample (profile.features=auto makes them features)": fixed,
        "only repeat the other knobs": labels,
    }
    for reason, refused in reasons.items():
        if refused:
            notes.append(f"not knobs, since they {reason}: {', '.join(refused)}")
    count = frame.select(names).n_unique()
    if 50 < count > len(frame) / 2:
        sizes = ", ".join(f"{name} ({frame[name].n_unique()} values)" for name in names)
        raise InputError(
            f"{count} configurations in {len(frame)} rows, so a column taken as a knob "
            f"must be a measurement: {sizes}. Name the knobs with knobs="
        )
    return names


def _feature_names(
    frame: pl.DataFrame,
    keys: pl.DataFrame,
    features: Any,
    columns: Sequence[Column],
    knobs: Sequence[str] | None,
    other: set[str],
) -> list[str]:
    """Return the columns that are to be features: those that a checkpoint knows, those that are
    named, or with `auto` all that are constant inside each sample."""
    names = features
    if columns:
        names = [column.name for column in columns]
    elif features == AUTO:
        candidates = _candidates(frame, other.union(knobs or ()))
        names = _constant_columns(frame, keys, candidates, knobs is None)
    for name in names:
        if name not in frame.columns:
            raise InputError(
                f"features: {name}: there is no such column, but {', '.join(frame.columns)}"
            )
        if name in other or frame[name].dtype.is_nested():
            raise InputError(
                f"features: {name} cannot be a feature: in use, or lists; leave it out"
            )
    return names


def _features_in(
    frame: pl.DataFrame,
    keys: pl.DataFrame,
    names: Sequence[str],
    columns: Sequence[Column],
    auto: bool,
    notes: list[str],
) -> Features:
    """Return the features in these columns of a frame.

    Args:
        frame, keys: as in `knobs_and_features`.
        columns: what they hold, if a checkpoint knows it; else it is fitted.
        auto: whether columns that cannot be features are left out, with a note.

    Raises:
        InputError: a column varies inside a sample, or cannot be a feature.
    """
    if varying := _varying(frame, keys, names):
        raise InputError(
            f"features: {', '.join(varying)} varies inside a sample, so nobody knows it when the "
            "knobs are set; leave it out"
        )
    samples = keys.hstack(frame.select(names)).unique(maintain_order=True)
    fitted = list(columns)
    if not columns:
        for name in names:
            try:
                fitted.append(fit_column(samples[name]))
            except InputError as error:
                if not auto:
                    raise
                notes.append(f"not a feature: {error}")
    if not fitted:
        raise InputError(
            "features: no column varies between samples but not inside them; name the "
            f"columns, features=[…], and the knobs, knobs=[…] ({'; '.join(notes)})"
        )
    notes.append(f"features: {', '.join(str(column) for column in fitted)}")
    block = encode_samples(samples, fitted)
    ids = {name: samples[name].to_numpy() for name in keys.columns}
    return features_from({**ids, FEATURES: block})._replace(columns=tuple(fitted))


def _candidates(frame: pl.DataFrame, other: Set[str]) -> list[str]:
    """Return the columns that may be knobs or features: no keys, measurements and times."""
    other = other | KEYS | MEASURES
    return [c for c in frame.columns if c not in other and not c.endswith("_ms")]


def _varying(frame: pl.DataFrame, keys: pl.DataFrame, names: Sequence[str]) -> list[str]:
    """Return those of these columns that have several values in a sample."""
    spread = keys.hstack(frame.select(names)).group_by(keys.columns).agg(pl.col(names).n_unique())
    return [name for name in names if (spread[name] > 1).any()]


def _constant_columns(
    frame: pl.DataFrame, keys: pl.DataFrame, names: Sequence[str], with_knobs: bool
) -> list[str]:
    """Return those of these columns that have one value in each sample, but not one in all.

    With one row per sample every column looks like that, so where knobs are among the columns there
    are none then.
    """
    if with_knobs and len(frame) < 2 * keys.n_unique():
        return []
    names = [c for c in names if not frame[c].dtype.is_nested()]
    varying = _varying(frame, keys, names)
    return [c for c in names if c not in varying and frame[c].n_unique() > 1]
