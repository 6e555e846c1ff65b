"""Long tables: a row for each measurement of a (sample, configuration), read into a `ProfileTable`
and written again.

The columns are `sample_id`, one per knob, an accuracy and a latency; optionally `repeat`,
`dataset`, `split`, `image_id`, `question_type`, and `cost.NAME`, a further cost. Measurements of
any system come in this form, and all readers end in `table_from_frame`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.envs.readers.feature_files import Features as Features
from knobwise.envs.readers.feature_files import attach_features as attach_features
from knobwise.envs.readers.feature_files import features_from
from knobwise.envs.readers.feature_files import read_features as read_features
from knobwise.envs.readers.feature_files import write_features as write_features
from knobwise.envs.readers.frames import (
    KEYS,
    PERCENT,
    as_share,
    knob_column,
    name_column,
    number_column,
    read_frame,
)
from knobwise.envs.tables.profile_table import Knob, ProfileTable, median_of

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
BUDGET = "latency_budget"
"""The column that only training examples have, see `_without_budgets`."""
TRAINING_COLUMNS = {
    "latency": "latency_ms",
    "image_feature": "image_features",
    "language_feature": "language_features",
}
"""Their other columns, with the names that we give them."""
COST = "cost."
"""How the name of the column begins that holds a further cost, such as `cost.energy_j`."""
WORD_COLUMNS = {
    "datasets": "dataset",
    "sample_ids": "sample_id",
    "image_ids": "image_id",
    "parts": "split",
    "question_types": "question_type",
}
"""Fields of a `ProfileTable` with a name for each sample, and the columns that hold them."""
PARTS = {
    "train": "train",
    "training": "train",
    **dict.fromkeys(("validation", "val", "valid", "dev"), "validation"),
}
PARTS |= {"test": "test", "testing": "test"}


def read_long_table(path: str | Path, *, name: str | None = None, **choices: Any) -> ProfileTable:
    """Read a long table from CSV, Parquet, JSON or JSON lines (by suffix; text also gzipped) as
    `table_from_frame`; the default name is that of the file. Raises InputError as it does, or if
    the file is not of its kind."""
    name = name or Path(path).name.split(".")[0]
    frame = read_frame(Path(path))
    notes = list[str]()
    if BUDGET in frame.columns:
        try:
            frame, features = _without_budgets(frame, str(path), notes)
        except pl.exceptions.PolarsError as error:
            raise InputError(f"{path}: not training data ({error})") from error
        choices["features"] = choices.get("features") or features
    return table_from_frame(frame, name=name, source=str(path), notes=notes, **choices)


def _without_budgets(
    frame: pl.DataFrame, source: str, notes: list[str]
) -> tuple[pl.DataFrame, Features | None]:
    """Return the measurements of training examples, and the features in them.

    The original system wrote `controller_training_data.json`: the examples of a cell repeat its
    measurement for each latency budget, and hold the features of the sample; the knobs stand in
    `config`.

    Raises:
        InputError: features of a sample differ between its examples.
    """
    frame = frame.unnest(pl.selectors.struct()).rename(TRAINING_COLUMNS, strict=False)
    vectors = [name for name in ("image_features", "language_features") if name in frame.columns]
    features = None
    if vectors:
        samples = frame.select("sample_id", *vectors).unique(maintain_order=True)
        features = features_from(samples.to_dict(as_series=False), source)
    measured = frame.drop(BUDGET, pl.selectors.nested())
    is_first = pl.col(BUDGET).eq_missing(pl.col(BUDGET).first().over(measured.columns))
    once = measured.filter(frame.select(is_first).to_series())
    notes.append(
        f"{len(frame) - len(once)} examples repeat a measurement for another {BUDGET}: it is read "
        "once"
    )
    return once, features


def table_from_frame(
    frame: pl.DataFrame,
    *,
    name: str,
    knobs: Sequence[str] | None = None,
    accuracy: str = "accuracy",
    accuracy_unit: str = "share",
    latency: str = "latency_ms",
    unit: str = "ms",
    features: str | Path | Features | None = None,
    source: str = "",
    notes: Sequence[str] = (),
) -> ProfileTable:
    """Make the dense table from one row per (sample, configuration), or several where it was
    measured repeatedly.

    A row without accuracy or latency (null) counts as missing, and a cell without rows is not
    profiled. Samples are sorted by data set and id, configurations by knob value, the measurements
    of a cell by `repeat`, or without that column by size; the order of the rows does not matter.
    Where they differ in accuracy, it is their mean.

    Args:
        frame: `sample_id`, the knobs, an accuracy in [0, 1] (`score` if there is no `accuracy`), a
            cost ≥ 0; optionally `repeat` (numbers that tell the measurements of a cell apart),
            `dataset`, and `image_id`, `split` and `question_type`, constant inside a sample;
            `first_look_ms`, what decisions by features cost on top; and `cost.NAME`, one further
            cost ≥ 0, known in every row.
        knobs: the columns that are knobs. By default every column that is neither a key nor a
            measurement (such as `*_ms`), nor constant inside each sample; without knobs a lone
            column such as `configuration` is one.
        accuracy_unit: `percent` for accuracies in [0, 100].
        latency, unit: the column that the budget limits, a time or any other cost (energy, price),
            and its unit.
        source: the name of the frame in error messages, such as a file name.

    Raises:
        InputError: columns are missing or wrong, values out of range, a measurement occurs twice,
            features do not fit.
    """
    source = source or name
    notes = list(notes)
    score = accuracy not in frame.columns and "score" in frame.columns
    if accuracy == "accuracy" and score:
        accuracy = "score"
    frame, keys, measured = _check_columns(frame, accuracy, accuracy_unit, latency, source, notes)
    if knobs is None:
        columns: Sequence[str] = _find_knobs(frame, keys, {accuracy, latency}, notes)
    else:
        columns = knobs
    _check_knobs(frame, columns, {*keys.columns, accuracy, latency, "repeat"}, source)
    settings, codes = zip(*(knob_column(frame[column], source) for column in columns), strict=True)
    chosen = pl.DataFrame([code.alias(f"knob {k}") for k, code in enumerate(codes)])
    configurations = chosen.unique().sort(chosen.columns)
    samples = _samples(frame.drop(columns), keys, source)
    _refuse_measurement(settings if knobs is None else (), len(configurations), len(frame), source)
    cell = _row_numbers(keys, samples) * len(configurations) + _row_numbers(chosen, configurations)
    times = np.bincount(cell, minlength=len(samples) * len(configurations))
    if times.max() > 1:
        measured = measured.with_columns(cell=cell).sort("cell", "repeat", "latency", "accuracy")
        cell = measured["cell"].to_numpy()
        _refuse_repeated(measured, samples, configurations, settings, source)
        _note_repeated(measured, times, notes)
    accuracies, latencies, repeats = _place_cells(
        measured, cell, times, (len(samples), len(configurations))
    )
    words = {**_names(samples, notes), "name": name, "unit": unit, "notes": tuple(notes)}
    words |= {
        "accuracy": accuracies,
        "latency_ms": latencies,
        "mask": ~accuracies.isnan(),
        "repeats_ms": repeats,
    }
    places = torch.from_numpy(configurations.to_numpy().astype(np.int64))
    table = _with_means(
        ProfileTable(knobs=settings, configurations=places, **words), measured, cell, times
    )
    if features is None:
        return table
    return attach_features(table, features)


def _refuse_measurement(
    settings: Sequence[Knob], configurations: int, rows: int, source: str
) -> None:
    """Raise if one of the columns that were taken as knobs must be a measurement."""
    if not settings or configurations <= 50 or 2 * configurations <= rows:
        return
    sizes = ", ".join(f"{knob.name} ({len(knob.values)} values)" for knob in settings)
    raise InputError(
        f"{source}: {configurations} configurations in {rows} rows, so a column taken as a knob "
        "must be a measurement: "
        f"{sizes}. Name the knobs with knobs="
    )


def long_frame(table: ProfileTable) -> pl.DataFrame:
    """The profiled cells as one row per measurement, the inverse of `table_from_frame`."""
    first_look_ms = table.first_look_ms
    table = table.without_first_look
    row, column, repeat = (~table.measurements_ms.isnan()).nonzero().numpy().T
    words = {column: getattr(table, field) for field, column in WORD_COLUMNS.items()}
    columns = [pl.Series(column, names).gather(row) for column, names in words.items() if names]
    for knob, chosen in zip(table.knobs, table.configurations.numpy().T, strict=True):
        columns.append(pl.Series(knob.name, list(knob.values), strict=False).gather(chosen[column]))
    columns += [pl.Series("repeat", repeat)] if table.num_repeats > 1 else []
    columns.append(pl.Series("accuracy", table.accuracy.numpy()[row, column]))
    columns.append(pl.Series("latency_ms", table.measurements_ms.numpy()[row, column, repeat]))
    further = {"first_look_ms": first_look_ms, f"{COST}{table.cost_name}": table.cost}
    columns += [
        pl.Series(k, values.numpy()[row, column])
        for k, values in further.items()
        if values is not None
    ]
    return pl.DataFrame(columns)


def write_long_table(table: ProfileTable, path: str | Path) -> None:
    """Write every measurement as CSV, Parquet or JSON lines (by suffix). Features go to
    `write_features`."""
    frame = long_frame(table)
    suffix = Path(path).suffix
    writers = {".csv": "write_csv", ".parquet": "write_parquet", ".jsonl": "write_ndjson"}
    if suffix not in writers:
        raise InputError(f"{path}: a table is written as .csv, .parquet or .jsonl")
    with written_whole(path) as temporary:
        getattr(frame, writers[suffix])(temporary)


def _check_columns(
    frame: pl.DataFrame,
    accuracy: str,
    accuracy_unit: str,
    latency: str,
    source: str,
    notes: list[str],
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """The profiled rows, their keys (`dataset` if there is one, and `sample_id`) and their
    measurements: accuracy, latency, `repeat`, null where there is no such column, the first look,
    likewise 0, and the further cost if any."""
    if missing := [c for c in ("sample_id", accuracy, latency) if c not in frame.columns]:
        raise InputError(
            f"{source}: no column {', '.join(missing)}; its columns are "
            f"{', '.join(frame.columns) or 'none'}. A "
            "table needs sample_id, an accuracy and a latency: rename the columns, or give their "
            "names as accuracy=… "
            "and latency=… (on the command line profile.accuracy=… and profile.latency=…)"
        )
    shares = as_share(number_column(frame[accuracy], source), accuracy_unit, source, notes)
    measured = pl.DataFrame(
        {"accuracy": shares, "latency": number_column(frame[latency], source, False)}
    )
    numbered = "repeat" in frame.columns and not frame["repeat"].is_null().all()
    if numbered:
        repeat: pl.Series | pl.Expr = number_column(frame["repeat"], source, False).fill_null(0.0)
    else:
        repeat = pl.lit(None, pl.Float64)
    looked = latency == "latency_ms" and "first_look_ms" in frame.columns
    if looked:
        first_look: pl.Series | pl.Expr = number_column(
            frame["first_look_ms"], source, False
        ).fill_null(0.0)
    else:
        first_look = pl.lit(0.0)
    costs = [c for c in frame.columns if c.startswith(COST) and c not in (accuracy, latency)]
    if len(costs) > 1:
        raise InputError(
            f"{source}: columns {', '.join(costs)}; a profile has one further cost: remove all "
            "but one"
        )
    further = [number_column(frame[c], source, False) for c in costs]
    measured = measured.with_columns(*further, repeat=repeat, first_look=first_look)
    profiled = measured["accuracy"].is_not_null() & measured["latency"].is_not_null()
    if not profiled.all():
        notes.append(f"{(~profiled).sum()} rows without accuracy or latency: not profiled")
        frame = frame.filter(profiled)
        measured = measured.filter(profiled)
    if frame.is_empty():
        raise InputError(f"{source}: no row with both {accuracy} and {latency}")
    keys = pl.DataFrame(
        [name_column(frame[c], source) for c in ("dataset", "sample_id") if c in frame.columns]
    )
    _refuse(
        measured["accuracy"].is_between(-1e-6, 1 + 1e-6).not_(),
        f"{accuracy} outside [0, 1]{PERCENT}",
        keys,
        source,
    )
    _refuse(
        measured["latency"].is_between(0, 3e38).not_(),
        f"{latency} negative, NaN or infinite",
        keys,
        source,
    )
    _refuse(
        measured["first_look"].is_between(0, 3e38).not_(),
        "first_look_ms negative, NaN or infinite",
        keys,
        source,
    )
    for c in costs:
        unfit = measured[c].is_between(0, 3e38).fill_null(False).not_()
        _refuse(unfit, f"{c} missing, negative, NaN or infinite", keys, source)
    return frame, keys, measured


def _place_cells(
    measured: pl.DataFrame, cell: np.ndarray, times: np.ndarray, shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Accuracy and median latency, float32 [N, C], NaN where not profiled, and if cells occur
    repeatedly all latencies [N, C, R]; from the cell number of each row, ascending if some repeat,
    and how often each cell occurs, [N·C]."""
    if times.max() == 1:
        dense = np.full((2, times.size), np.nan, np.float32)
        dense[:, cell] = measured["accuracy"].clip(0, 1), measured["latency"].clip(0)
        accuracy, latency_ms = torch.from_numpy(dense).view(2, *shape).unbind()
        return accuracy, latency_ms, None
    total = np.bincount(cell, measured["accuracy"].clip(0, 1), times.size)
    mean = np.divide(total, times, out=np.full(times.size, np.nan), where=times > 0).astype(
        np.float32
    )
    repeats = np.full((times.size, times.max()), np.nan, np.float32)
    repeats[cell, np.arange(cell.size) - (times.cumsum() - times)[cell]] = measured["latency"].clip(
        0
    )
    repeats_ms = torch.from_numpy(repeats).view(*shape, -1)
    return torch.from_numpy(mean).view(shape), median_of(repeats_ms), repeats_ms


def _with_means(
    table: ProfileTable, measured: pl.DataFrame, cell: np.ndarray, times: np.ndarray
) -> ProfileTable:
    """The table with the mean further cost of each cell, and its mean first look added to its
    times, where the rows have these; arguments as in `_place_cells`."""

    def mean_of(column: str) -> Tensor:
        total = np.bincount(cell, measured[column], times.size)
        return torch.from_numpy(total / np.maximum(times, 1)).float().view(table.mask.shape)

    for column in (c for c in measured.columns if c.startswith(COST)):
        cost = mean_of(column).masked_fill(~table.mask, torch.nan)
        table = replace(table, cost=cost, cost_name=column.removeprefix(COST))
    paid = mean_of("first_look")
    if not paid.any():
        return table
    if table.repeats_ms is None:
        repeats_ms = None
    else:
        repeats_ms = table.repeats_ms + paid.unsqueeze(-1)
    return replace(
        table, latency_ms=table.latency_ms + paid, repeats_ms=repeats_ms, first_look_ms=paid
    )


def _refuse_repeated(
    measured: pl.DataFrame,
    samples: pl.DataFrame,
    configurations: pl.DataFrame,
    knobs: Sequence[Knob],
    source: str,
) -> None:
    """Raise if measurements of a cell cannot be told apart by `repeat`, or without it by accuracy
    and latency."""
    numbered = measured["repeat"].null_count() == 0
    if numbered:
        keys = ["cell", "repeat"]
    else:
        keys = ["cell", "latency", "accuracy"]
    if not _as_above(measured, keys).any():
        return
    same = (
        measured.group_by(keys)
        .len()
        .filter(pl.col("len") > 1)
        .sort("len", "cell", descending=[True, False])
    )
    sample, configuration = divmod(same["cell"][0], len(configurations))
    setting = zip(knobs, configurations.row(configuration), strict=True)
    pair = " ".join(
        (str(samples["sample_id"][sample]), *(f"{k.name}={k.values[v]}" for k, v in setting))
    )
    if numbered:
        alike = "with the same `repeat`"
    else:
        alike = "with the same accuracy and latency"
    raise InputError(
        f"{source}: {same['cell'].n_unique()} (sample, configuration) pairs occur more than once "
        f"{alike}, such as "
        f"{pair}, {same['len'][0]} times. Remove the copies; or number the measurements of each "
        "pair in a column "
        "`repeat`. Ids must be unique inside a data set (do they restart in every batch or on "
        "every rank?), and every "
        "knob needs a column"
    )


def _as_above(rows: pl.DataFrame, columns: Sequence[str]) -> np.ndarray:
    """bool [n]: which rows have the same values in these columns as the row above them."""
    same = [values[1:] == values[:-1] for values in (rows[column].to_numpy() for column in columns)]
    return np.append(False, np.logical_and.reduce(same))


def _note_repeated(measured: pl.DataFrame, times: np.ndarray, notes: list[str]) -> None:
    """Note what was taken as repeated measurements of a cell without being numbered, and where
    accuracies differ."""
    if measured["repeat"].null_count():
        notes.append(
            f"{(times > 1).sum()} cells occur up to {times.max()} times: taken as repeated "
            "measurements"
        )
    differ = _as_above(measured, ["cell"]) & ~_as_above(measured, ["accuracy"])
    if differ.any():
        count = len(np.unique(measured["cell"].to_numpy()[differ]))
        notes.append(f"{count} cells differ in accuracy between measurements: the mean is used")


def _refuse(bad: pl.Series, what: str, keys: pl.DataFrame, source: str) -> None:
    """Raise if a row is bad, with the number of such rows and the first of them."""
    if bad.any():
        first = ", ".join(
            f"{k} {v}" for k, v in keys.row(int(bad.arg_max() or 0), named=True).items()
        )
        raise InputError(
            f"{source}: {bad.sum()} rows with {what}, the first at {first}. Fix or remove them"
        )


def _find_knobs(
    frame: pl.DataFrame, keys: pl.DataFrame, measures: set[str], notes: list[str]
) -> list[str]:
    """The columns that are knobs by default; notes which others might have been."""
    columns = [
        c for c in frame.columns if c not in KEYS | MEASURES | measures and not c.endswith("_ms")
    ]
    columns = [c for c in columns if not c.startswith(COST)]
    nested = [c for c in columns if frame[c].dtype.is_nested()]
    names = [c for c in columns if c not in nested]
    samples = keys.hstack(frame.select(names)).group_by(keys.columns)
    spread = samples.agg(pl.col(names).n_unique())
    fixed = []
    if len(frame) >= 2 * len(
        spread
    ):  # with one row per sample every column looks like a property of the sample
        fixed = [c for c in names if spread[c].max() == 1 and frame[c].n_unique() > 1]
    names = [c for c in names if c not in fixed]
    labels = []
    for label in (c for c in names if c.startswith("config") and len(names) > 1):
        others = [c for c in names if c != label]
        if frame.select(others).n_unique() == frame.select(names).n_unique():
            labels.append(label)
            names = others
    reasons = {
        "hold lists": nested,
        "never vary inside a sample": fixed,
        "only repeat the other knobs": labels,
    }
    notes += [
        f"not knobs, since they {why}: {', '.join(which)}"
        for why, which in reasons.items()
        if which
    ]
    return names


def _check_knobs(frame: pl.DataFrame, knobs: Sequence[str], other: set[str], source: str) -> None:
    wrong = [k for k in knobs if k not in frame.columns or k in other]
    if wrong or not knobs:
        raise InputError(
            f"{source}: {', '.join(wrong) or 'no column'} for a knob; its columns are "
            f"{', '.join(frame.columns)}. Name "
            "the knobs with knobs=; if there are none, name the configurations in one column"
        )


def _samples(frame: pl.DataFrame, keys_of_rows: pl.DataFrame, source: str) -> pl.DataFrame:
    """One row per sample, sorted by data set, then whole-number ids by size, then the other ids by
    name."""
    optional = [c for c in ("image_id", "split", "question_type") if c in frame.columns]
    extra = [name_column(frame[c], source) for c in optional if not frame[c].is_null().all()]
    rows = keys_of_rows.with_columns(extra)
    keys = keys_of_rows.columns
    samples = rows.unique()
    n = rows.select(keys).n_unique()
    for column in rows.columns[len(keys) :]:
        if (more := rows.select(*keys, column).n_unique() - n) > 0:
            raise InputError(
                f"{source}: {column} must be the same in all rows of a sample; it differs {more} "
                "times"
            )
    if "split" in samples.columns:
        words = samples["split"].str.to_lowercase()
        if unknown := sorted(set(words) - set(PARTS)):
            raise InputError(
                f"{source}: split {', '.join(unknown[:5])} is unknown; known are {', '.join(PARTS)}"
            )
        samples = samples.with_columns(words.replace_strict(PARTS))
    number = pl.col("sample_id").cast(pl.Int64, strict=False)
    return samples.sort(*keys[:-1], number, "sample_id", nulls_last=True)


def _names(samples: pl.DataFrame, notes: list[str]) -> dict[str, Any]:
    """The fields of a table with a name for each sample."""
    names = {column: tuple(samples[column]) for column in samples.columns}
    if (
        len(set(names.get("split", ()))) == 1
    ):  # this is the samples' origin, and does not divide them
        notes.append(
            f"every sample is in split {names.pop('split')[0]!r}: the samples are divided anew"
        )
    return {field: names.get(column, ()) for field, column in WORD_COLUMNS.items()}


def _row_numbers(rows: pl.DataFrame, index: pl.DataFrame) -> np.ndarray:
    """int64 [len(rows)]: which row of `index` has these values."""
    numbered = index.select(rows.columns).with_row_index("place")
    places = rows.join(numbered, on=rows.columns, how="left", maintain_order="left")["place"]
    return places.to_numpy().astype(np.int64)
