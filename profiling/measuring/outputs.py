"""Write what was measured of a model, how, where and on what, and what each knob saves."""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from knobwise.common.files import written_whole
from knobwise.common.words import spelled
from knobwise.envs.readers.dense_table import WEIGHT
from knobwise.envs.readers.exp_files import write_exp5_exp6
from knobwise.profiling.measuring.adaptive_model import KNOBS, KnobSupport
from knobwise.profiling.measuring.machine import digests, write_readable_json
from knobwise.profiling.measuring.measuring import (
    CELL,
    COLUMNS,
    EXTRA,
    TIMES,
    TOKENS,
    MeasurementPlan,
)
from knobwise.profiling.measuring.requests import question_text

PROBABILITY = "sampling_probability"
DRAWN = (PROBABILITY, WEIGHT)
"""The columns about how a cell was drawn."""
PROMPT = "prompt"
"""The column of questions as they are asked."""
SAVES_NOTHING = 0.02
"""The share of the time below which a knob is reported to save nothing."""


def records_of(plan: MeasurementPlan, log: pl.DataFrame, dataset: str) -> pl.DataFrame:
    """Return what long tables and exp5/exp6 files hold, a row for each measurement; samples
    outermost, then configurations, then repeats.

    A row has its own times, answer, accuracy and numbers of tokens; only the first look is the
    median over the repeats of its sample and configuration. The log holds all of the plan; each
    different answer to a sample is scored once.
    """
    measured = plan.select(log).sort(*CELL, "repeat")
    extra = [c for c in measured.columns if c.startswith(EXTRA) and measured[c].is_not_null().any()]
    rows = measured.select(
        *CELL,
        pl.col("repeat").cast(pl.Int32),
        pl.col("total_ms").round(4).alias("latency_ms"),
        pl.col(TIMES[1:]).round(4),
        pl.median("first_look_ms").over(CELL).fill_null(0.0).round(4),
        pl.col(extra).name.map(lambda name: name.removeprefix(EXTRA)),
        pl.col(TOKENS).name.prefix("num_"),
        pl.col("text").alias("pred"),
        decode_ms=(pl.col("total_ms").round(4) - pl.col("prefill_ms").round(4)).round(4),
    )
    if not rows["first_look_ms"].sum():
        rows = rows.drop("first_look_ms")
    if plan.repeats == 1:
        rows = rows.drop("repeat")
    accuracy = cache(plan.requests.accuracy)  # each different answer is judged once
    failed = "failed" if "failed" in rows.columns else pl.lit(None)
    answers = rows.select(pl.col("sample"), pl.col("pred"), failed).iter_rows()
    items = plan.items
    scores = [accuracy(items[i].id, *answer) for i, *answer in answers]
    rows = rows.with_columns(
        pl.Series("accuracy", scores, pl.Float64),
        num_total_tokens=pl.sum_horizontal(f"num_{name}" for name in TOKENS),
    )
    # a column for each part of a sample, gathered for each measurement
    ids = [item.id for item in items]
    columns: dict[str, list[Any]] = {"sample_id": ids, "question_id": ids}
    if any(item.image_id for item in items):  # an item without one has an image of its own
        columns["image_id"] = [item.image_id or f"of sample {item.id}" for item in items]
    if any(item.question_type for item in items):
        columns["question_type"] = [item.question_type for item in items]
    if plan.parts:
        columns["split"] = list(plan.parts)
    columns["answers"] = [list(item.answers) for item in items]
    parts = [
        pl.DataFrame(columns)[rows["sample"]],
        plan.settings[rows["configuration"]],
        rows,
    ]
    if plan.parts:
        parts.append(_drawn(plan, rows))
    return pl.concat(parts, how="horizontal").with_columns(dataset=pl.lit(dataset))


def _drawn(plan: MeasurementPlan, rows: pl.DataFrame) -> pl.DataFrame:
    """Return how likely the cell of each row was drawn, and how many cells it stands for."""
    cells = tuple(rows.select(CELL).to_numpy().T)
    return pl.DataFrame(
        {PROBABILITY: plan.design.probability[cells], WEIGHT: plan.design.weight[cells]}
    )


def _of_samples(plan: MeasurementPlan, taken: Collection[str]) -> pl.DataFrame:
    """Return the ids of the samples, and the further columns of their data whose names no other
    column of the table has, nor a measurement."""
    ids = pl.DataFrame({"sample_id": [item.id for item in plan.items]}, {"sample_id": pl.String})
    names = {name: None for item in plan.items for name in item.fields}
    for name in names:
        if name in taken or name in COLUMNS or name.endswith("_ms") or name.startswith(EXTRA):
            continue
        values = pl.Series(name, [item.fields.get(name) for item in plan.items])
        # an empty column says nothing
        if values.null_count() < len(values):
            ids = ids.with_columns(values)
    return ids


def write_table(path: Path, columns: pl.DataFrame) -> None:
    """Write a long table."""
    with written_whole(path) as temporary:
        columns.write_parquet(temporary, compression="zstd", compression_level=19)


def write_vlm_profile(
    out: Path,
    plan: MeasurementPlan,
    log: pl.DataFrame,
    knobs: Sequence[KnobSupport],
    facts: Mapping[str, Any],
    further: Sequence[str] = (),
) -> dict[str, Any]:
    """Write the files of a profile; return what `profile.json` holds.

    The files are `table.parquet`, `samples.parquet` (the questions), `exp5/`, `exp6/` and, last,
    `profile.json`. The log holds all of the plan. `facts` is what else is known of the run: `name`
    of the data set; `config`; and `split`, `model` and `machine`, which go into the exp5/exp6 files
    too. These hold whole numbers of `KNOBS` only; for other knobs there are none. `further` are the
    `columns` of the model.
    """
    records = records_of(plan, log, facts["name"])
    table, data_columns = _long_table(plan, records, further)
    write_table(out / "table.parquet", table)
    questions = [(item.id, item.question) for item in plan.items]
    samples = pl.DataFrame(questions, ["sample_id", "question"], orient="row")
    write_table(out / "samples.parquet", samples)
    content = {**facts, "data_columns": data_columns}
    # those of an earlier call are replaced
    for folder in ("exp5", "exp6"):
        shutil.rmtree(out / folder, ignore_errors=True)
    if set(plan.knobs) == set(KNOBS) and all(records[knob].dtype.is_integer() for knob in KNOBS):
        metadata = {key: facts[key] for key in ("split", "model", "machine")}
        write_exp5_exp6(records, out / "exp5", out / "exp6", facts["name"], metadata)
    else:
        content["note"] = (
            f"no exp5/exp6 files: they hold whole numbers of {', '.join(KNOBS)}; read "
            "table.parquet instead (profile=table)"
        )

    measured = plan.select(log)
    latency = _median_latencies(plan, records)
    shape = latency.shape
    if plan.parts:
        # of each other sample, this share of the cells was drawn, all with the same probability
        content["measured"] = {
            "per_sample": plan.config.per_sample,
            "probability": plan.config.per_sample / shape[1],
            "whole": "test" if plan.config.whole_test else None,
        }
    content |= {
        "samples": shape[0],
        "configurations": shape[1],
        "clock": {
            "latency_ms": f"{plan.config.clock}, as the model reads it",
            "statistic": f"median of {plan.repeats}",
            "drift": "left in",
        },
        "features_ms": round(float(np.median(measured["features_ms"].fill_null(0.0))), 4),
        "cost_s": round(float(measured["total_ms"].sum()) / 1e3, 1),
        # samples that were measured whole tell what a knob saves
        "knobs": knob_report(
            knobs, np.array(plan.settings.rows(), object), latency[~np.isnan(latency).any(1)]
        ),
        "sha256": digests(out, ("table.parquet", "features.safetensors")),
    }
    write_readable_json(out / "profile.json", content)
    return content


def _long_table(
    plan: MeasurementPlan, records: pl.DataFrame, further: Sequence[str]
) -> tuple[pl.DataFrame, list[str]]:
    """Return the rows of `table.parquet`, and which of its columns come from the data."""
    wanted = ("sample_id", "image_id", "question_type", "split", *DRAWN)
    keys = [c for c in (*wanted, *plan.knobs, "repeat", "accuracy") if c in records.columns]
    times = [c for c in records.columns if c.endswith("_ms")]
    numbers = [c for c in further if c in records.columns]
    table = records.select(*keys, *times, *numbers, "pred", "dataset")
    known = _of_samples(plan, {*records.columns, *wanted, *further})
    data_columns = known.columns[1:]
    if PROMPT in further:
        prompts = [question_text(item, plan.requests.prompt) for item in plan.items]
        known = known.with_columns(pl.Series(PROMPT, prompts, pl.String))
    return table.join(known, on="sample_id", maintain_order="left"), data_columns


def _median_latencies(plan: MeasurementPlan, records: pl.DataFrame) -> NDArray[np.floating]:
    """Return the median latency of each cell of a plan in ms, [N, C], NaN where not measured."""
    cells = records.group_by(CELL, maintain_order=True).agg(pl.median("latency_ms"))
    latency = np.full((len(plan.items), len(plan.configurations)), np.nan)
    latency[tuple(cells.select(CELL).to_numpy().T)] = cells["latency_ms"].to_numpy()
    return latency


def knob_report(
    knobs: Sequence[KnobSupport], settings: NDArray[Any], latency_ms: NDArray[np.floating]
) -> list[dict[str, Any]]:
    """Describe each knob of this model, and report how much time it saves.

    `saves` is the share of the time that a knob's least measured value saves against its greatest
    (for names: the first against the last), the other knobs being equal. It comes from a linear
    fit to the logarithms of each sample's times, with a term for each value of each knob; on a full
    grid that is the mean over the other knobs. `saves_error` is its standard error over the
    samples. `saves_nothing` is true if `saves` plus two errors is below `SAVES_NOTHING`.

    Args:
        knobs: the K knobs of the model.
        settings: [C, K], the values of the knobs, in their order.
        latency_ms: [N, C].
    """
    logs = np.log(latency_ms.astype(np.float64).clip(1e-6))
    report = []
    # a knob's least value has no term: it is part of the constant
    terms = [np.ones(len(settings), bool)]
    last = []
    for column, knob in zip(settings.T, knobs, strict=True):
        values = values_in_order(knob, column.tolist())
        terms += [column == value for value in values[1:]]
        last.append(len(terms) - 1)
        report.append(asdict(knob) | {"available": knob.available, "measured": values})
    design = np.stack(terms, 1).astype(np.float64)
    # else no sample, or too few configurations, were measured to tell the knobs apart
    if len(logs) and np.linalg.matrix_rank(design) == design.shape[1]:
        fitted = logs @ np.linalg.pinv(design).T  # [N, terms]
        for row, term in zip(report, last, strict=True):
            if len(row["measured"]) > 1:
                row |= _savings(fitted[:, term])
    return report


def line_of_plan(plan: MeasurementPlan, knobs: Sequence[KnobSupport]) -> str:
    """Return a line that says what will be measured: how many configurations, and the values of
    each knob."""
    values = {
        name: plan.settings[name].unique(maintain_order=True).to_list() for name in plan.knobs
    }
    grid = math.prod(map(len, values.values()))
    count = len(plan.configurations)
    whole = f"{count}" if count == grid else f"{count} of {grid}"
    samples = len(plan.items)
    cells = int(plan.design.cells.sum())
    line = f"measures {whole} configurations of {samples:,} samples"
    if cells < count * samples:
        line += f" in part ({cells:,} of {count * samples:,} cells)"
    often = "once" if plan.repeats == 1 else f"{plan.repeats} times"
    line += f", {often} each: "
    parts = []
    for knob in knobs:
        part = f"{knob.name}={', '.join(map(str, map(spelled, values[knob.name])))}"
        if knob.available and len(values[knob.name]) == 1:
            more = f"knobs.values={{{knob.name}: […]}}"
            if knob.name in KNOBS:
                more = f"knobs.{knob.name}=[…]"
            part += f" alone ({more} for more)"
        parts.append(part)
    return line + "; ".join(parts)


def knob_lines(profile: Mapping[str, Any]) -> list[str]:
    """Return what each knob of a profile saves, a line each, and the profile's remarks and note."""
    lines = []
    for knob in profile["knobs"]:
        text = f"{knob['name']}: {knob['sets']}"
        if not knob["available"] and knob["values"]:
            text += f"; {spelled(knob['values'][0])} is its only value"
        elif not knob["available"]:
            text = f"{knob['name']}: this model lacks it"
        elif "saves" in knob:
            least, *_, greatest = map(spelled, knob["measured"])
            saves = "SAVES NO TIME here:" if knob["saves_nothing"] else "saves"
            error = 2 * (knob["saves_error"] or 0)
            text += (
                f"; {saves} {knob['saves']:.1%} ± {error:.1%} of the time, from {greatest} down to "
                f"{least}"
            )
        lines.append(f"{text} ({knob['note']})" if knob["note"] else text)
    if names := profile.get("data_columns"):
        lines.append(
            f"columns of the data that the table keeps: {', '.join(names)}; those that are known "
            "before an answer can be features (profile.features=[…])"
        )
    lines += profile.get("remarks", ())
    if "note" in profile:
        lines.append(profile["note"])
    return lines


def _savings(slower: NDArray[np.float64]) -> dict[str, Any]:
    """Return what a knob saves, from ln(time at its greatest value / time at its least) [N]."""
    # a ratio of times is a difference of their logarithms
    saves = 1 - np.exp(-slower.mean())
    error = None
    if len(slower) > 1:
        error = round(float(slower.std(ddof=1) / np.sqrt(len(slower)) * (1 - saves)), 4)
    nothing = bool(saves + 2 * (error or 0.0) < SAVES_NOTHING)
    return {"saves": round(float(saves), 4), "saves_error": error, "saves_nothing": nothing}


def values_in_order(knob: KnobSupport, values: Iterable[Any]) -> list[Any]:
    """Return the different values of a knob from one end to the other: names as the knob has them,
    numbers ascending."""
    named = any(isinstance(value, str) for value in knob.values)
    return sorted(set(values), key=knob.values.index if named else None)
