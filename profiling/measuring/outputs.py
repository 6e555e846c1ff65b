"""Write what was measured of a model: the long table, exp5/exp6 files, and what was measured how, where and on what."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from knobwise.common.files import written_whole
from knobwise.envs.readers.exp_files import write_exp5_exp6
from knobwise.profiling.elastic.outputs import cpu_name
from knobwise.profiling.measuring.adaptive_model import KNOBS, KnobSupport
from knobwise.profiling.measuring.answer_metrics import answer_accuracy
from knobwise.profiling.measuring.figures import profile_figures
from knobwise.profiling.measuring.measuring import EXTRA, TIMES, TOKENS, Plan

SAVES_NOTHING = 0.02
"""A knob that saves less than this share of the time is said to save none."""


def cells_of(plan: Plan, log: pl.DataFrame, metrics: Sequence[str]) -> pl.DataFrame:
    """One row for each pair of sample and configuration, samples outermost: median times and the first answer.

    Columns: `sample`, `configuration` (numbers in the plan), `latency_ms`, `prefill_ms`, `vision_ms`, `decode_ms`, what
    the model adds (medians), `num_*_tokens`, `pred`, `accuracy`, `changed` (repeats that answered something else).

    Args:
        plan: what was asked for.
        log: holds all of it.
        metrics: of each sample.
    """
    measured = plan.of(log).sort("sample", "configuration", "repeat")
    extra = [c for c in measured.columns if c.startswith(EXTRA) and measured[c].is_not_null().any()]
    cells = measured.group_by("sample", "configuration", maintain_order=True).agg(
        *(pl.col(name).median().round(4) for name in TIMES),
        *(pl.col(name).median().alias(name.removeprefix(EXTRA)) for name in extra),
        *(pl.col(name).first().alias(f"num_{name}") for name in TOKENS),
        pl.col("text").first().alias("pred"),
        (pl.col("text") != pl.col("text").first()).sum().alias("changed"),
    )
    said = cells.select("sample", "pred").unique(maintain_order=True)
    accuracy = [
        answer_accuracy(metrics[i], text, plan.items[i].answers, plan.items[i].choices) for i, text in said.rows()
    ]
    return (
        cells.join(said.with_columns(accuracy=pl.Series(accuracy, dtype=pl.Float64)), on=["sample", "pred"], how="left")
        .rename({"total_ms": "latency_ms"})
        .with_columns(
            decode_ms=(pl.col("latency_ms") - pl.col("prefill_ms")).round(4),
            num_total_tokens=pl.sum_horizontal(f"num_{name}" for name in TOKENS),
        )
    )


def long_records(plan: Plan, cells: pl.DataFrame, dataset: str) -> pl.DataFrame:
    """The cells with ids, knobs and data set, as long tables and exp5/exp6 files have them."""
    row, column = cells["sample"].to_numpy(), cells["configuration"].to_numpy()
    ids = [item.id for item in plan.items]
    columns = {"sample_id": ids, "question_id": ids}
    if any(item.image_id for item in plan.items):  # what has none is an image of its own
        columns["image_id"] = [item.image_id or f"of sample {item.id}" for item in plan.items]
    found = [pl.Series(name, values).gather(row) for name, values in columns.items()]
    for knob in KNOBS:
        values = [configuration[knob] for configuration in plan.configurations]
        found.append(pl.Series(knob, values, dtype=pl.Int64).gather(column))
    answers = pl.Series("answers", [list(item.answers) for item in plan.items]).gather(row)
    return (
        pl.DataFrame([*found, answers])
        .hstack(cells.drop("sample", "configuration"))
        .with_columns(dataset=pl.lit(dataset))
    )


def write_vlm_profile(
    out: Path,
    dataset: str,
    plan: Plan,
    log: pl.DataFrame,
    metrics: Sequence[str],
    knobs: Sequence[KnobSupport],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Write `table.parquet`, `exp5/`, `exp6/` and, last, `profile.json`; return what the latter holds.

    Args:
        out: the folder. Files of exp5/exp6 that an earlier call wrote there are removed.
        dataset: its name.
        plan: what was asked for.
        log: holds all of it.
        metrics: of each sample.
        knobs: of the model.
        about: what else is known of the run; `model` and `machine` go into the exp5/exp6 files too.
    """
    cells = cells_of(plan, log, metrics)
    records = long_records(plan, cells, dataset)
    measures = [c for c in records.columns if c.endswith("_ms")]
    keys = [c for c in ("sample_id", "image_id", *KNOBS) if c in records.columns]
    with written_whole(out / "table.parquet") as path:
        columns = pl.col(*keys, "accuracy", *measures, "pred", "dataset")
        records.select(columns).write_parquet(path, compression="zstd", compression_level=19)
    for folder in ("exp5", "exp6"):
        shutil.rmtree(out / folder, ignore_errors=True)
    metadata = {key: about[key] for key in ("split", "model", "machine", "command") if key in about}
    write_exp5_exp6(records, out / "exp5", out / "exp6", dataset, metadata)

    shape = (len(plan.items), len(plan.configurations))
    accuracy, latency = (cells[c].to_numpy().reshape(shape) for c in ("accuracy", "latency_ms"))
    settings = np.array([[configuration[knob] for knob in KNOBS] for configuration in plan.configurations])
    once = plan.of(log).select("repeat", "sample", "configuration", "total_ms").sort(pl.all().exclude("total_ms"))
    times = once["total_ms"].to_numpy().reshape(plan.repeats, *shape)
    spread = float(np.log(times.clip(1e-6)).std(0, ddof=1).mean()) if plan.repeats > 1 else None
    files = ["table.parquet", *(["features.safetensors"] if (out / "features.safetensors").exists() else [])]
    found = {
        "name": dataset,
        **about,
        "samples": shape[0],
        "configurations": shape[1],
        "metrics": {metric: metrics.count(metric) for metric in sorted(set(metrics))},
        "clock": {
            "latency_ms": f"wall, as the model reads it, {time.get_clock_info('perf_counter').implementation}",
            "statistic": f"median of {plan.repeats}",
            "log_spread_of_one_measurement": None if spread is None else round(spread, 4),
            "repeats_that_changed_an_answer": int(cells["changed"].sum()),
        },
        "cost_s": round(float(times.sum()) / 1e3, 1),
        "knobs": knob_report(knobs, settings, latency),
        "by_configuration": by_configuration(records),
        "figures": profile_figures(accuracy, latency, settings, KNOBS),
        "sha256": {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in files},
    }
    with written_whole(out / "profile.json") as path:
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return found


def by_configuration(records: pl.DataFrame) -> list[dict[str, Any]]:
    """Accuracy and, for each time, mean and percentiles over the samples, in ms."""
    rows = []
    for _, cells in records.group_by(KNOBS, maintain_order=True):
        row = {knob: cells[knob][0] for knob in KNOBS} | {"accuracy": round(_mean(cells["accuracy"]), 4)}
        for name in ("latency", "vision", "prefill", "decode"):
            values = cells[f"{name}_ms"].to_numpy()
            percentiles = {f"P{p}": round(float(np.percentile(values, p)), 3) for p in (50, 95, 99)}
            row[f"{name}_ms"] = {"mean": round(float(values.mean()), 3), **percentiles}
        row["output_tokens"] = round(_mean(cells["num_output_tokens"]), 2)
        rows.append(row)
    return rows


def knob_report(
    knobs: Sequence[KnobSupport], settings: NDArray[np.integer], latency_ms: NDArray[np.floating]
) -> list[dict[str, Any]]:
    """What each knob is on this model and what it saves, measured.

    `saves` is the share of the time that a knob's least measured value saves against its greatest, the others being
    equal: from the logarithms of the times of each sample, fitted as a sum of one term for each value of each knob
    (on a full grid that is the mean over the others). `saves_error` is its standard error over the samples.
    `saves_nothing` is whether it stays under `SAVES_NOTHING`, two errors added.

    Args:
        knobs: of the model, in the order of the columns of `settings`.
        settings: [C, K] values.
        latency_ms: [N, C].
    """
    logs = np.log(latency_ms.astype(np.float64).clip(1e-6))
    values = [np.unique(column) for column in settings.T]
    terms = [settings[:, [k]] == of_knob[1:] for k, of_knob in enumerate(values)]
    design = np.hstack([np.ones((len(settings), 1)), *terms]).astype(np.float64)
    fitted = logs @ np.linalg.pinv(design).T  # [N, terms]; a knob's least value is the one without a term
    determined = np.linalg.matrix_rank(design) == design.shape[1]
    last = np.cumsum([0, *(term.shape[1] for term in terms)])[1:]
    report = []
    for k, knob in enumerate(knobs):
        row: dict[str, Any] = asdict(knob) | {"available": knob.available, "measured": values[k].tolist()}
        if len(values[k]) > 1 and determined:
            slower = fitted[:, last[k]]
            saves = 1 - np.exp(-slower.mean())
            error = slower.std(ddof=1) / np.sqrt(len(slower)) * (1 - saves) if len(slower) > 1 else np.nan
            row["saves"] = round(float(saves), 4)
            row["saves_error"] = None if np.isnan(error) else round(float(error), 4)
            row["saves_nothing"] = bool(saves + 2 * np.nan_to_num(error) < SAVES_NOTHING)
        report.append(row)
    return report


def describe_knobs(report: Sequence[Mapping[str, Any]]) -> str:
    """A line for each knob; ± is two standard errors."""
    lines = []
    for row in report:
        note = f" ({row['note']})" if row["note"] else ""
        if not row["available"]:
            lines.append(f"{row['name']}: this model lacks it{note}")
        elif "saves" not in row:
            why = f"measured at {row['measured'][0]} only" if len(row["measured"]) == 1 else "too few configurations"
            lines.append(f"{row['name']}: {row['sets']}; what it saves is not known, {why}{note}")
        else:
            error = "" if row["saves_error"] is None else f" ± {200 * row['saves_error']:.1f}"
            share = f"{100 * row['saves']:.1f} %{error}"
            told = f"saves {share} of the time"
            if row["saves_nothing"]:
                told = f"SAVES NO TIME here: {share}"
            elif row["saves"] <= 2 * (row["saves_error"] or 0):
                told = f"no saving shown by so few samples: {share}"
            ends = f"from {row['measured'][-1]} down to {row['measured'][0]}"
            lines.append(f"{row['name']}: {row['sets']}; {told}, {ends}{note}")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What latencies depend on besides the model: processor, accelerator, versions, threads."""
    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _mean(values: pl.Series) -> float:
    return float(values.to_numpy().mean())
