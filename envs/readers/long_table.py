"""Long tables and features: files in, one `ProfileTable` out; and the way back.

A long table has one row per (sample, configuration): `sample_id`, one column per knob, an accuracy and a cost;
optionally `dataset`, `split`, `image_id`, `question_type`. That is how measurements of any system come in. All readers
end in `table_from_frame`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
import torch

from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.envs.readers.feature_files import Features, attach_features, read_features, write_features
from knobwise.envs.readers.frames import KEYS, knob_column, name_column, number_column, read_frame
from knobwise.envs.tables.profile_table import ProfileTable

__all__ = [
    "Features",
    "attach_features",
    "long_frame",
    "read_features",
    "read_long_table",
    "table_from_frame",
    "write_features",
    "write_long_table",
]

MEASURES = frozenset({"accuracy", "score", "soft_score", "pred", "prediction", "answer", "answers", "question"})
PARTS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "val", "valid", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}


def read_long_table(
    path: str | Path,
    *,
    features: str | Path | Features | None = None,
    name: str | None = None,
    knobs: Sequence[str] | None = None,
    accuracy: str = "accuracy",
    latency: str = "latency_ms",
    unit: str = "ms",
) -> ProfileTable:
    """Read a long table from CSV, Parquet or JSON lines (by suffix; CSV and JSON lines also gzipped).

    The arguments are those of `table_from_frame`; the table is called as the file unless `name` says otherwise.

    Raises:
        InputError: no such file, not of its kind, or anything that `table_from_frame` refuses.
    """
    name = name or Path(path).name.split(".")[0]
    return table_from_frame(
        read_frame(Path(path)),
        name=name,
        knobs=knobs,
        accuracy=accuracy,
        latency=latency,
        unit=unit,
        features=features,
        source=str(path),
    )


def table_from_frame(
    frame: pl.DataFrame,
    *,
    name: str,
    knobs: Sequence[str] | None = None,
    accuracy: str = "accuracy",
    latency: str = "latency_ms",
    unit: str = "ms",
    features: str | Path | Features | None = None,
    source: str = "",
    notes: Sequence[str] = (),
) -> ProfileTable:
    """Make the dense table from one row per (sample, configuration).

    A row without accuracy or latency (null) is an unprofiled cell, like a row that is not there. Samples come out
    sorted by data set and id, configurations by knob value, whatever the order of the rows.

    Args:
        frame: `sample_id`, the knobs, an accuracy in [0, 1] (`score` serves where `accuracy` is missing), a cost ≥ 0;
            optionally `dataset`, and `image_id`, `split` and `question_type`, constant inside a sample.
        knobs: the columns that are knobs. By default every column that is neither a key nor a measurement (such as
            `*_ms`), nor constant inside each sample; without knobs a lone column such as `configuration` is one.
        accuracy: the column to maximise.
        latency: the column that the budget limits: a time, or any other cost (energy, price).
        unit: what that column is in, and with it the budgets.
        features: a feature file, or what `read_features` gave.
        source: what to call the frame in error messages; a file name.
        notes: what the caller skipped already.

    Raises:
        InputError: missing or wrong columns, values out of range, a cell that stands twice, features that do not fit.
    """
    source, said = source or name, list(notes)
    if accuracy == "accuracy" and accuracy not in frame.columns and "score" in frame.columns:
        accuracy = "score"
    if missing := [c for c in ("sample_id", accuracy, latency) if c not in frame.columns]:
        raise InputError(
            f"{source}: no column {', '.join(missing)}; its columns are {', '.join(frame.columns) or 'none'}. A "
            "table needs sample_id, an accuracy and a latency: rename columns, or name them with accuracy=, latency="
        )
    measured = pl.DataFrame(
        {"accuracy": number_column(frame[accuracy], source), "latency": number_column(frame[latency], source)}
    )
    profiled = measured["accuracy"].is_not_null() & measured["latency"].is_not_null()
    if not profiled.all():
        said.append(f"{(~profiled).sum()} rows without accuracy or latency: not profiled")
        frame, measured = frame.filter(profiled), measured.filter(profiled)
    if frame.is_empty():
        raise InputError(f"{source}: no row with both {accuracy} and {latency}")
    keys = pl.DataFrame([name_column(frame[c], source) for c in ("dataset", "sample_id") if c in frame.columns])
    _refuse(measured["accuracy"].is_between(-1e-6, 1 + 1e-6).not_(), f"{accuracy} outside [0, 1]", keys, source)
    _refuse(measured["latency"].is_between(0, 3e38).not_(), f"{latency} negative, NaN or infinite", keys, source)
    by_default = knobs is None
    if knobs is None:
        knobs, skipped = _find_knobs(frame, keys, {accuracy, latency})
        said += skipped
    wrong = [k for k in knobs if k not in frame.columns or k in {*keys.columns, accuracy, latency}]
    if wrong or not knobs:
        raise InputError(
            f"{source}: {', '.join(wrong) or 'no column'} for a knob; its columns are {', '.join(frame.columns)}. Name "
            "the knobs with knobs=; where there are none, name the configurations in one column"
        )
    found, codes = zip(*(knob_column(frame[column], source) for column in knobs), strict=True)
    settings = pl.DataFrame([code.alias(f"knob {k}") for k, code in enumerate(codes)])
    configurations = settings.unique().sort(settings.columns)
    optional = [c for c in ("image_id", "split", "question_type") if c in frame.columns and c not in knobs]
    extra = [c for c in optional if not frame[c].is_null().all()]
    extras = [name_column(frame[c], source) for c in extra]
    samples = _samples(keys.with_columns(extras), keys.columns, source)
    n, c = len(samples), len(configurations)
    if by_default and c > 50 and 2 * c > len(frame):
        sizes = ", ".join(f"{knob.name} ({len(knob.values)} values)" for knob in found)
        raise InputError(
            f"{source}: {c} configurations in {len(frame)} rows, so a column taken as a knob must be a measurement: "
            f"{sizes}. Name the knobs with knobs="
        )
    cell = _row_numbers(keys, samples) * c + _row_numbers(settings, configurations)
    times = np.bincount(cell)
    if times.max() > 1:
        sample, configuration = divmod(int(times.argmax()), c)
        setting = zip(found, configurations.row(configuration), strict=True)
        where = " ".join((str(samples["sample_id"][sample]), *(f"{k.name}={k.values[v]}" for k, v in setting)))
        raise InputError(
            f"{source}: {(times > 1).sum()} (sample, configuration) pairs occur more than once, such as {where}, there "
            f"{times.max()} times. Ids must be unique inside a data set (do they restart in every batch or on "
            "every rank?), and every knob a column"
        )
    dense = {measure: np.full(n * c, np.nan, np.float32) for measure in measured.columns}
    for measure, values in dense.items():
        values[cell] = measured[measure].clip(0, 1 if measure == "accuracy" else None)
    parts = tuple(samples["split"]) if "split" in samples.columns else ()
    if len(set(parts)) == 1:  # it tells where the samples come from, not how to divide them
        said.append(f"every sample is in split {parts[0]!r}: the samples are divided anew")
        parts = ()
    table = ProfileTable(
        name=name,
        knobs=found,
        configurations=torch.from_numpy(configurations.to_numpy().astype(np.int64)),
        accuracy=torch.from_numpy(dense["accuracy"].reshape(n, c)),
        latency_ms=torch.from_numpy(dense["latency"].reshape(n, c)),
        mask=torch.from_numpy(~np.isnan(dense["accuracy"]).reshape(n, c)),
        sample_ids=tuple(samples["sample_id"]),
        datasets=tuple(samples["dataset"]) if "dataset" in samples.columns else (),
        image_ids=tuple(samples["image_id"]) if "image_id" in samples.columns else (),
        parts=parts,
        question_types=tuple(samples["question_type"]) if "question_type" in samples.columns else (),
        notes=tuple(said),
        unit=unit,
    )
    return table if features is None else attach_features(table, features)


def long_frame(table: ProfileTable) -> pl.DataFrame:
    """The profiled cells as one row per (sample, configuration): what `table_from_frame` makes the same table of."""
    row, column = table.mask.nonzero().numpy().T
    words = {
        "dataset": table.datasets,
        "sample_id": table.sample_ids,
        "image_id": table.image_ids,
        "split": table.parts,
        "question_type": table.question_types,
    }
    columns = [pl.Series(key, values).gather(row) for key, values in words.items() if values]
    for knob, chosen in zip(table.knobs, table.configurations.numpy().T, strict=True):
        columns.append(pl.Series(knob.name, list(knob.values), strict=False).gather(chosen[column]))
    columns += [pl.Series(m, getattr(table, m).numpy()[row, column]) for m in ("accuracy", "latency_ms")]
    return pl.DataFrame(columns)


def write_long_table(table: ProfileTable, path: str | Path) -> None:
    """Write the profiled cells as CSV, Parquet or JSON lines (by suffix). Features go to `write_features`."""
    frame, suffix = long_frame(table), Path(path).suffix
    if suffix not in (".csv", ".parquet", ".jsonl"):
        raise InputError(f"{path}: a table is written as .csv, .parquet or .jsonl")
    with written_whole(path) as temporary:
        if suffix == ".csv":
            frame.write_csv(temporary)
        elif suffix == ".parquet":
            frame.write_parquet(temporary)
        else:
            frame.write_ndjson(temporary)


def _refuse(bad: pl.Series, what: str, keys: pl.DataFrame, source: str) -> None:
    """Raise where a row is bad, with the number of such rows and the first of them."""
    if bad.any():
        first = ", ".join(f"{k} {v}" for k, v in keys.row(int(bad.arg_max() or 0), named=True).items())
        raise InputError(f"{source}: {bad.sum()} rows with {what}, the first at {first}. Mend them or leave them out")


def _find_knobs(frame: pl.DataFrame, keys: pl.DataFrame, taken: set[str]) -> tuple[list[str], list[str]]:
    """The columns that are knobs by default, and in words which others might have been."""
    names = [c for c in frame.columns if c not in KEYS | MEASURES | taken and not c.endswith("_ms")]
    nested = [c for c in names if frame[c].dtype.is_nested()]
    names = [c for c in names if c not in nested]
    samples = keys.hstack(frame.select(names)).group_by(keys.columns)
    spread = samples.agg(pl.col(names).n_unique())
    fixed = []
    if len(frame) >= 2 * len(spread):  # with one row for each sample every column looks like a property of the sample
        fixed = [c for c in names if spread[c].max() == 1 and frame[c].n_unique() > 1]
    names = [c for c in names if c not in fixed]
    labels = []
    for label in (c for c in names if c.startswith("config") and len(names) > 1):
        others = [c for c in names if c != label]
        if frame.select(others).n_unique() == frame.select(names).n_unique():
            labels.append(label)
            names = others
    reasons = {"hold lists": nested, "never vary inside a sample": fixed, "only repeat the other knobs": labels}
    return names, [f"not knobs, since they {why}: {', '.join(which)}" for why, which in reasons.items() if which]


def _samples(rows: pl.DataFrame, keys: list[str], source: str) -> pl.DataFrame:
    """One row for each sample, sorted: by data set, then whole-number ids by size, then the other ids by name."""
    samples, n = rows.unique(), rows.select(keys).n_unique()
    for column in rows.columns[len(keys) :]:
        if (more := rows.select(*keys, column).n_unique() - n) > 0:
            raise InputError(f"{source}: {column} must be the same in all rows of a sample; {more} times it changes")
    if "split" in samples.columns:
        words = samples["split"].str.to_lowercase()
        if unknown := sorted(set(words) - set(PARTS)):
            raise InputError(f"{source}: split {', '.join(unknown[:5])} is unknown; known are {', '.join(PARTS)}")
        samples = samples.with_columns(words.replace_strict(PARTS))
    number = pl.col("sample_id").cast(pl.Int64, strict=False)
    return samples.sort(*keys[:-1], number, "sample_id", nulls_last=True)


def _row_numbers(rows: pl.DataFrame, index: pl.DataFrame) -> np.ndarray:
    """int64 [len(rows)]: which row of `index` has these values."""
    numbered = index.select(rows.columns).with_row_index("place")
    places = rows.join(numbered, on=rows.columns, how="left", maintain_order="left")["place"]
    return places.to_numpy().astype(np.int64)
