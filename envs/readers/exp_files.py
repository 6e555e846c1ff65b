"""Reading and writing exp5 (accuracy) with exp6 (latency) files, and reading core_exp folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import polars as pl
from polars.selectors import by_name, matches

from knobwise.common.checks import folder_name, one_of
from knobwise.common.errors import InputError
from knobwise.common.files import write_text
from knobwise.common.json_text import encode_json
from knobwise.envs.readers.column_values import check_range, whole_words
from knobwise.envs.readers.configuration_files import (
    IDS,
    KNOBS,
    WORDS,
    keyed,
    read_configurations,
)
from knobwise.envs.readers.feature_files import Features
from knobwise.envs.readers.long_table import table_from_frame
from knobwise.envs.tables.profile_table import ProfileTable

CORE_STAGES = {
    "total": ["T_total"],
    "prefill": ["T_LLM_prefill"],
    "vision_prefill": ["T_vision_total", "T_LLM_prefill"],
}
"""Times that a budget can limit, and the columns of core_exp files that they sum."""
CORE_KNOBS = ("tier", "top_k", "num_active_blocks")


def read_exp5_exp6(
    exp5_dir: str | Path,
    exp6_dir: str | Path,
    dataset_name: str | Sequence[str],
    *,
    latency: Literal["total", "prefill", "decode"] = "total",
    accuracy: str = "score",
    accuracy_unit: str = "share",
    broadcast_latency: bool = False,
    features: str | Path | Features | None = None,
    name: str | None = None,
) -> ProfileTable:
    """Join the accuracy and latency files of one or more data sets, cell by cell.

    Notes count what does not join. The key of a sample is its `question_id` if every row on both
    sides has one, otherwise its `sample_id`. Several rows of a sample in a latency file are
    repeated measurements, see `table_from_frame`. Images and question types come from the accuracy
    files.

    Args:
        exp5_dir, exp6_dir: hold `exp5_accuracy_<data set with dashes>/` and `exp6_latency_<…>/`, or
            `<data set>/`, or the files; or are themselves a file with all configurations, as
            `exp5_accuracy_results.json`.
        latency: which time the budget limits, in ms.
        accuracy: which value of the exp5 rows is the accuracy, such as `soft_score`.
        accuracy_unit: `percent` for accuracies in [0, 100].
        broadcast_latency: if a configuration has only a mean latency, give it to all its samples.

    Raises:
        InputError: naming the file, if there are no files, their JSON, types, values, ids or knobs
            are wrong, or exp5 and exp6 have nothing in common.
    """
    one_of("latency", latency, ("total", "prefill", "decode"))
    datasets = [dataset_name] if isinstance(dataset_name, str) else list(dataset_name)
    notes: list[str] = []
    columns = {"accuracy": [[accuracy]]}
    # join the two kinds of files, one data set after another
    joined = []
    for dataset in datasets:
        times, means = _read_exp6(exp6_dir, dataset, latency, notes)
        scores, _ = read_configurations(
            exp5_dir, "exp5_accuracy", dataset, ["all_samples"], columns, notes, accuracy_unit
        )
        scores, times = keyed([scores, times], KNOBS, dataset, notes)
        times = _broadcast(scores, times, means, broadcast_latency, notes)
        cells = _join(scores, times, dataset, notes)
        if len(datasets) > 1:
            cells = cells.with_columns(dataset=pl.lit(dataset))
        joined.append(cells)
    return table_from_frame(
        whole_words(pl.concat(joined)),
        name=name or "+".join(datasets),
        knobs=KNOBS,
        features=features,
        source=f"{exp5_dir} with {exp6_dir}",
        notes=notes,
    )


def _read_exp6(
    directory: str | Path, dataset: str, stage: str, notes: list[str]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return one row per time, and one row per mean time in a summary.

    Rows of times have ids, knobs, `latency_ms` and file; rows of means have knobs, mean, weight
    and file.
    """
    keys = ("per_sample_latencies", "all_samples")
    columns = {"latency_ms": [[f"T_{stage}_ms", f"latency_{stage}"]]}
    times, summaries = read_configurations(directory, "exp6_latency", dataset, keys, columns, notes)
    # mean times, for configurations without rows
    means = []
    for record in summaries:
        mean = record.get(f"latency_{stage}_ms")
        if mean is None and stage == "total":
            mean = record.get("latency_mean")
        # either a number, or an object of statistics
        if isinstance(mean, dict):
            mean = mean.get("mean")
        if isinstance(mean, int | float):
            count = record.get("num_samples")
            weight = max(count, 1) if isinstance(count, int) else 1
            setting = {key: record[key] for key in (*KNOBS, "file")}
            means.append({**setting, "mean": float(mean), "weight": weight})
    numbers = dict.fromkeys(("mean", "weight"), pl.Float64)
    schema = dict.fromkeys(KNOBS, pl.Int64) | numbers | {"file": pl.String}
    return times, pl.DataFrame(means, schema=schema)


def _broadcast(
    scores: pl.DataFrame, times: pl.DataFrame, means: pl.DataFrame, wanted: bool, notes: list[str]
) -> pl.DataFrame:
    """Return the times, if wanted also those of configurations that have only a mean time.

    Such a configuration gives its mean to all its scores.
    """
    means = means.join(times, on=KNOBS, how="anti")
    # several files of a configuration count by their number of samples
    mean = (pl.col("mean") * pl.col("weight")).sum() / pl.col("weight").sum()
    means = means.group_by(KNOBS).agg(mean.alias("latency_ms"), pl.col("file").first())
    if means.is_empty():
        return times
    notes.append(
        f"{means.height} configurations have only a mean latency: broadcast_latency={wanted}"
    )
    if not wanted:
        return times
    check_range(means, "latency_ms", "mean latency_ms")
    spread = scores.drop("file").join(means, on=KNOBS)
    return pl.concat([times, spread.select(times.columns)])


def _join(
    scores: pl.DataFrame, times: pl.DataFrame, dataset: str, notes: list[str]
) -> pl.DataFrame:
    """Return the cells that have a score and a time; note how many have only one of them."""
    on = ["sample_id", *KNOBS]
    cells = scores.drop("repeat").join(times.select(*on, "repeat", "latency_ms"), on=on)
    # what each side has alone
    for name, side, other in (("exp5", scores, times), ("exp6", times, scores)):
        alone = side.join(other, on=on, how="anti").unique(on)
        if alone.height:
            settings = alone.select(KNOBS).unique().sort(KNOBS)
            example = "/".join(map(str, settings.row(0)))
            notes.append(
                f"{dataset}: {alone.height} cells of {settings.height} configurations (such as "
                f"{example}) are only in {name}, so they count as not profiled"
            )
    if cells.is_empty():
        ids = [sorted(side["sample_id"].unique())[:3] for side in (scores, times)]
        raise InputError(
            f"{dataset}: exp5 and exp6 have no (sample, configuration) pair in common; exp5 has "
            f"ids such as {ids[0]}, exp6 {ids[1]}. {'; '.join(notes)}"
        )
    return cells


def write_exp5_exp6(
    frame: pl.DataFrame,
    exp5_dir: str | Path,
    exp6_dir: str | Path,
    dataset_name: str,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write one accuracy file and one latency file per configuration.

    `read_exp5_exp6` reads them. The latency files have a row for each measurement, the accuracy
    files one for each sample.

    Args:
        frame: one row per measurement: `sample_id`, the knobs max_crops, top_k and
            num_active_blocks (whole numbers), `accuracy`, `latency_ms`; optionally `repeat`,
            `soft_score`, `prefill_ms`, `decode_ms`, `num_*_tokens`, `question_id`, `image_id`,
            `question_type`, `pred`, `answers`. Rows without accuracy or latency are left out.
        metadata: added to the `config` of every file: the machine, the model, the split of the data
            set.

    Raises:
        InputError: if a table would refuse the frame, it has other knobs, or JSON cannot hold the
            metadata. Nothing is written then.
    """
    frame, config = _to_write(frame, dataset_name, metadata)
    # the names that the profilers write
    frame = frame.with_columns(T_total_ms="latency_ms", score="accuracy")
    frame = frame.rename({"prefill_ms": "T_prefill_ms", "decode_ms": "T_decode_ms"}, strict=False)
    dashed = dataset_name.replace("_", "-")
    for _, cells in frame.group_by(KNOBS, maintain_order=True):
        setting = cells.row(0, named=True)
        stem = "crops{max_crops}_topk{top_k}_blocks{num_active_blocks}.json".format(**setting)
        scores, latencies = _contents(cells, config)
        for path, content in (
            (Path(exp5_dir) / f"exp5_accuracy_{dashed}" / f"exp5_accuracy_results_{stem}", scores),
            (Path(exp6_dir) / f"exp6_latency_{dashed}" / f"exp6_latency_{stem}", latencies),
        ):
            write_text(path, encode_json(content, path))


def _contents(
    cells: pl.DataFrame, config: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of the accuracy file and of the latency file of one configuration."""
    stages = [stage for stage in ("total", "prefill", "decode") if f"T_{stage}_ms" in cells.columns]
    exp5 = by_name(*WORDS, "score", "soft_score", "pred", "answers", require_all=False)
    exp6 = by_name(*IDS, *KNOBS, "repeat", "accuracy", require_all=False)
    exp6 |= matches(r"^T_|^num_(vision|language|output|total)_tokens$")
    # an accuracy file has one row per sample, with its mean score
    samples = cells.with_columns(score=pl.col("score").mean().over("sample_id"))
    samples = samples.unique("sample_id", keep="first", maintain_order=True)
    setting = cells.row(0, named=True)
    summary = {knob: setting[knob] for knob in KNOBS}
    summary |= {"accuracy": samples["score"].mean(), "num_samples": samples.height}
    times = {f"latency_{stage}_ms": _spread(cells[f"T_{stage}_ms"]) for stage in stages}
    scores = {
        "summary": [summary],
        "all_samples": samples.select(exp5).to_dicts(),
        "config": config,
    }
    latencies = {
        "summary": [summary | times],
        "per_sample_latencies": cells.select(exp6).to_dicts(),
        "per_sample_predictions": [],
        "config": {"batch_size": 1, **config},
    }
    return scores, latencies


def _to_write(
    frame: pl.DataFrame, dataset_name: str, metadata: Mapping[str, Any] | None
) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Return the profiled rows, with null for NaN, and the `config` of the files.

    Raises InputError for what could not be read again.
    """
    source = "the frame for exp5 and exp6 files"
    folder_name("name", dataset_name)
    # refuses what is no table
    table = table_from_frame(frame, name=dataset_name, knobs=KNOBS, source=source)
    values = [value for knob in table.knobs for value in knob.values]
    # True is no number of experts
    whole = all(type(value) is int and value >= 0 for value in values)
    if not whole or len(set(table.dataset_names)) > 1:
        raise InputError(
            f"{source}: has data sets {sorted(set(table.dataset_names))} and knob values {values}; "
            f"it must hold one data set, and whole numbers ≥ 0 for {', '.join(KNOBS)}"
        )
    encode_json(metadata, source)
    frame = frame.drop_nulls(["accuracy", "latency_ms"]).with_columns(pl.col(KNOBS).cast(pl.Int64))
    # JSON has no NaN
    frame = frame.with_columns(pl.selectors.float().fill_nan(None))
    return frame, {**(metadata or {}), "dataset_name": dataset_name}


def _spread(times: pl.Series) -> dict[str, Any]:
    """Return mean, standard deviation and percentiles under the names of a latency summary."""
    percentiles = {f"P{p}": times.quantile(p / 100, "linear") for p in (50, 95, 99)}
    return {"mean": times.mean(), "std": times.std(ddof=0), **percentiles}


def read_core_exp(
    directory: str | Path,
    dataset_name: str,
    *,
    latency: Literal["total", "prefill", "vision_prefill"] = "total",
    accuracy_unit: str = "share",
    features: str | Path | Features | None = None,
    name: str | None = None,
) -> ProfileTable:
    """Read core_exp files, each with the accuracies and times of one configuration.

    They are in `directory` or its folder `<data set with dashes>`. The knobs are tier, top_k and
    num_active_blocks. `latency` is the time that the budget limits, in ms. Raises InputError as
    `read_exp5_exp6`.
    """
    one_of("latency", latency, CORE_STAGES)
    notes: list[str] = []
    columns = {
        "accuracy": [["accuracy"]],
        "latency_ms": [[stage] for stage in CORE_STAGES[latency]],
    }
    cells, _ = read_configurations(
        directory, "", dataset_name, ["per_sample_results"], columns, notes, accuracy_unit
    )
    return table_from_frame(
        whole_words(keyed([cells], CORE_KNOBS, dataset_name, notes)[0]),
        name=name or dataset_name,
        knobs=CORE_KNOBS,
        features=features,
        source=str(directory),
        notes=notes,
    )
