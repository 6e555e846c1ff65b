"""Write what was measured of a model, how, where and on what, and what each knob saves."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from knobwise.common.files import written_whole
from knobwise.envs.readers.exp_files import write_exp5_exp6
from knobwise.profiling.measuring.adaptive_model import KNOBS, KnobSupport
from knobwise.profiling.measuring.machine import digests, write_json
from knobwise.profiling.measuring.measuring import EXTRA, TIMES, TOKENS, Plan

SAVES_NOTHING = 0.02
"""The share of the time below which a knob is reported to save nothing."""
WINDOW = 51
"""The number of measurements that drift is estimated from, about as many as a tracker remembers."""
CLOCK_NAMES = {
    "wall": f"wall, {time.get_clock_info('perf_counter').implementation}",
    "cpu": f"thread CPU, {time.get_clock_info('thread_time').implementation}",
}
Judge = Callable[[int, str], float]
"""The accuracy of an answer to a sample, by its number in the plan."""


def cells_of(plan: Plan, log: pl.DataFrame, judge: Judge) -> pl.DataFrame:
    """Summarise the repeats: one row for each pair of sample and configuration, samples outermost.

    A row holds the numbers of sample and configuration in the plan; median times, also of what the
    model adds; the first answer and its accuracy; `changed`, how many repeats answered something
    else. The log holds all of the plan; `judge` is called once for each different answer to a
    sample.
    """
    measured = plan.select(log).sort("sample", "configuration", "repeat")
    extra = [c for c in measured.columns if c.startswith(EXTRA) and measured[c].is_not_null().any()]
    cells = measured.group_by("sample", "configuration", maintain_order=True).agg(
        *(pl.col(name).median().round(4) for name in TIMES),
        pl.col("first_look_ms").median().fill_null(0.0).round(4),
        *(pl.col(name).median().alias(name.removeprefix(EXTRA)) for name in extra),
        *(pl.col(name).first().alias(f"num_{name}") for name in TOKENS),
        pl.col("text").first().alias("pred"),
        (pl.col("text") != pl.col("text").first()).sum().alias("changed"),
    )
    if not cells["first_look_ms"].sum():
        cells = cells.drop("first_look_ms")
    answers = cells.select("sample", "pred").unique(maintain_order=True)
    accuracy = pl.Series(
        "accuracy", [judge(i, text) for i, text in answers.rows()], dtype=pl.Float64
    )
    return (
        cells.join(answers.with_columns(accuracy), on=["sample", "pred"], how="left")
        .rename({"total_ms": "latency_ms"})
        .with_columns(
            decode_ms=(pl.col("latency_ms") - pl.col("prefill_ms")).round(4),
            num_total_tokens=pl.sum_horizontal(f"num_{name}" for name in TOKENS),
        )
    )


def without_drift(plan: Plan, log: pl.DataFrame) -> pl.DataFrame:
    """Return the plan's part of a log with the momentary speed of the machine divided out.

    The model is ln ms = cell + level + jitter for each measurement. The level is the running median
    of ln ms − cell over `WINDOW` measurements, shifted to a median of 0; a cell is the median of
    its ln ms − level. The two are estimated in turn. Cells are measured in random order, so every
    running median covers a fair sample of them. With fewer than three repeats a cell is not known
    well enough, and nothing changes.
    """
    if plan.repeats < 3:
        return log
    # back in the order of measuring
    measured = plan.select(log.with_row_index("moment")).sort("moment")
    cells = measured.select(
        cell=pl.struct("sample", "configuration"), ln_ms=pl.col("total_ms").clip(1e-6).log()
    )
    level = pl.Series("level", np.zeros(len(cells)))
    for _ in range(4):
        steady = cells.with_columns(level).with_columns(steady=pl.col("ln_ms") - pl.col("level"))
        deviations = steady.select(pl.col("ln_ms") - pl.col("steady").median().over("cell"))
        running = deviations.to_series().rolling_median(WINDOW, min_samples=1, center=True)
        level = running.alias("level")
        level = level - level.median()
    times = [
        column for column in measured.columns if column.endswith("_ms") and column != "features_ms"
    ]
    corrected = measured.with_columns(pl.col(times) / level.exp())
    return corrected.drop("moment", "sample", "configuration")


def long_records(plan: Plan, cells: pl.DataFrame, dataset: str) -> pl.DataFrame:
    """Return the cells with ids, knobs and data set, as long tables and exp5/exp6 files have
    them."""
    ids = [item.id for item in plan.items]
    columns = {"sample_id": ids, "question_id": ids}
    if any(item.image_id for item in plan.items):  # an item without one has an image of its own
        columns["image_id"] = [item.image_id or f"of sample {item.id}" for item in plan.items]
    samples = pl.DataFrame(columns)[cells["sample"]]
    answers = pl.Series("answers", [list(item.answers) for item in plan.items]).gather(
        cells["sample"]
    )
    settings = plan.settings[cells["configuration"]]
    return pl.concat(
        [samples, settings, answers.to_frame(), cells.drop("sample", "configuration")],
        how="horizontal",
    ).with_columns(dataset=pl.lit(dataset))


def measurements_of(plan: Plan, log: pl.DataFrame, records: pl.DataFrame) -> pl.DataFrame:
    """Return the records of `long_records` with a row for each measurement and a column `repeat`.

    A row has the times of its measurement, and all else from its cell. With a single repeat the
    records stay as they are. The log holds all of the plan.
    """
    if plan.repeats == 1:
        return records
    measured = plan.select(log).sort("sample", "configuration", "repeat")
    rows = records[np.arange(len(records)).repeat(plan.repeats)]
    extra = [
        c
        for c in measured.columns
        if c.startswith(EXTRA) and c.removeprefix(EXTRA) in records.columns
    ]
    times = {column.removeprefix(EXTRA): measured[column] for column in extra}
    times |= {name: measured[name].round(4) for name in TIMES if name in records.columns}
    times["latency_ms"] = measured["total_ms"].round(4)
    rows = rows.with_columns(measured["repeat"].cast(pl.Int32), **times)
    return rows.with_columns(decode_ms=(pl.col("latency_ms") - pl.col("prefill_ms")).round(4))


def write_table(path: Path, columns: pl.DataFrame) -> None:
    """Write a long table."""
    with written_whole(path) as temporary:
        columns.write_parquet(temporary, compression="zstd", compression_level=19)


def write_exp_files(
    out: Path, records: pl.DataFrame, knobs: Sequence[str], metadata: Mapping[str, Any]
) -> str:
    """Write `exp5/` and `exp6/`, replacing those of an earlier call.

    Other knobs than those of these files cannot be written. Return the reason then, else "".
    """
    for folder in ("exp5", "exp6"):
        shutil.rmtree(out / folder, ignore_errors=True)
    if set(knobs) != set(KNOBS) or not all(records[knob].dtype.is_integer() for knob in knobs):
        return (
            f"no exp5/exp6 files: they hold whole numbers of {', '.join(KNOBS)}, and these knobs "
            f"are {', '.join(knobs)}; read table.parquet instead (profile=table)"
        )
    write_exp5_exp6(records, out / "exp5", out / "exp6", records["dataset"][0], metadata)
    return ""


def write_vlm_profile(
    out: Path,
    plan: Plan,
    log: pl.DataFrame,
    judge: Judge,
    knobs: Sequence[KnobSupport],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Write the files of a profile; return what `profile.json` holds.

    The files are `table.parquet`, `samples.parquet` (the questions), `exp5/`, `exp6/` and, last,
    `profile.json`. The log holds all of the plan. `about` is what else is known of the run: `name`
    of the data set; `config`; and `split`, `model`, `machine` and `command`, which go into the
    exp5/exp6 files too.
    """
    cells = cells_of(plan, log, judge)
    records = long_records(plan, cells, about["name"])
    measured = measurements_of(plan, log, records)
    measures = [c for c in records.columns if c.endswith("_ms")]
    keys = [c for c in ("sample_id", "image_id", *plan.knobs, "repeat") if c in measured.columns]
    write_table(
        out / "table.parquet", measured.select(*keys, "accuracy", *measures, "pred", "dataset")
    )
    questions = {
        "sample_id": [item.id for item in plan.items],
        "question": [item.question for item in plan.items],
    }
    write_table(out / "samples.parquet", pl.DataFrame(questions))
    metadata = {key: about[key] for key in ("split", "model", "machine", "command")}
    note = write_exp_files(out, measured, plan.knobs, metadata)

    shape = (len(plan.items), len(plan.configurations))
    latency = cells["latency_ms"].to_numpy().reshape(shape)
    settings = np.array(plan.settings.rows(), dtype=object)
    files = [name for name in ("table.parquet", "features.safetensors") if (out / name).exists()]
    if about["config"]["detrend"]:
        drift = f"divided out, by the running median of {WINDOW}"
    else:
        drift = "left in"
    content = {
        **about,
        "samples": shape[0],
        "configurations": shape[1],
        **({"note": note} if note else {}),
        "clock": {
            "latency_ms": f"{CLOCK_NAMES[plan.clock]}, as the model reads it",
            "statistic": f"median of {plan.repeats}",
            "drift": drift,
            **steadiness(plan, log),
            "repeats_that_changed_an_answer": int(cells["changed"].sum()),
        },
        "features_ms": features_ms(plan, log),
        "cost_s": round(float(plan.select(log)["total_ms"].sum()) / 1e3, 1),
        "knobs": knob_report(knobs, settings, latency),
        "sha256": digests(out, files),
    }
    write_json(out / "profile.json", content)
    return content


def steadiness(plan: Plan, log: pl.DataFrame) -> dict[str, Any]:
    """Return the spread of a measurement: the standard deviation of the logarithm of a cell's
    times, averaged over the cells; None with a single repeat."""
    logs = pl.col("total_ms").clip(1e-6).log()
    cells = plan.select(log).group_by("sample", "configuration").agg(spread=logs.std(ddof=1))
    spread = None
    if plan.repeats > 1:
        spread = round(float(cells["spread"].to_numpy().mean()), 4)
    return {"log_spread_of_one_measurement": spread}


def features_ms(plan: Plan, log: pl.DataFrame) -> float:
    """Return the median time that the features of a decision take, in ms."""
    return round(float(np.median(plan.select(log)["features_ms"].fill_null(0.0).to_numpy())), 4)


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
    values = [levels(column, knob.values) for column, knob in zip(settings.T, knobs, strict=True)]
    # a knob's least value has no term: it is part of the constant
    terms = [
        column[:, None] == np.array(knob_values[1:])
        for column, knob_values in zip(settings.T, values, strict=True)
    ]
    design = np.hstack([np.ones((len(settings), 1)), *terms]).astype(np.float64)
    fitted = logs @ np.linalg.pinv(design).T  # [N, terms]
    determined = np.linalg.matrix_rank(design) == design.shape[1]
    last = np.cumsum([0, *(term.shape[1] for term in terms)])[1:]
    report = []
    for k, knob in enumerate(knobs):
        row: dict[str, Any] = asdict(knob) | {"available": knob.available, "measured": values[k]}
        if len(values[k]) > 1 and determined:
            row |= _savings(fitted[:, last[k]])
        report.append(row)
    return report


def _savings(slower: NDArray[np.float64]) -> dict[str, Any]:
    """Return what a knob saves, from ln(time at its greatest value / time at its least) [N]."""
    saves = 1 - np.exp(-slower.mean())
    error = np.nan
    if len(slower) > 1:
        error = slower.std(ddof=1) / np.sqrt(len(slower)) * (1 - saves)
    return {
        "saves": round(float(saves), 4),
        "saves_error": None if np.isnan(error) else round(float(error), 4),
        "saves_nothing": bool(saves + 2 * np.nan_to_num(error) < SAVES_NOTHING),
    }


def levels(column: NDArray[Any], order: Sequence[Any] = ()) -> list[Any]:
    """Return the values of a knob that occur: numbers in ascending order, names as in `order`.

    Names that `order` lacks stay in the order of their first occurrence.
    """
    values = list(dict.fromkeys(column.tolist()))
    if not any(isinstance(value, str) for value in values):
        return sorted(values)
    if set(values) <= set(order):
        return sorted(values, key=order.index)
    return values
