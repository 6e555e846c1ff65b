"""Results of google-benchmark, which hold times alone: its JSON and its CSV.

Read from files of version 1.9.5.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from knobwise.common.errors import InputError
from knobwise.envs.readers.raw_files import json_in, text_in
from knobwise.envs.readers.tool_rows import FAILED, ToolRows
from knobwise.envs.tables.units import TIMES

TOOL = "google-benchmark"
HEADER = re.compile(r"^name,iterations,real_time,cpu_time,time_unit,", re.MULTILINE)
"""The header of its CSV, which stands below the context of the run."""
BEGINS = re.compile(
    rf'\{{\s*"context":\s*\{{.*"benchmarks"|(.*\n)?{HEADER.pattern.removeprefix("^")}', re.DOTALL
)
"""How its files begin: the JSON, or the CSV."""
AGGREGATE = re.compile(r".*_(mean|median|stddev|cv|min|max|BigO|RMS)")
"""Names of rows that summarise the others."""
ARGUMENT = re.compile(r"([^:/]+):([^:/]+)")


def read_google_benchmark(paths: Sequence[Path], notes: list[str]) -> ToolRows:
    """Return one row per repetition: `real_time` and `cpu_time` in ms, and the arguments in the
    name of the benchmark (`family/doc:0/level:1`), each as a column; the means, medians and
    deviations among the rows are left out.

    Raises:
        InputError: a file has no row of measurements, or one in a unit that is no time.
    """
    records = []
    skipped = 0
    for path in paths:
        for row in _rows(path):
            factor = TIMES.get(row.get("time_unit") or "ns")
            if factor is None:
                raise InputError(f"{path}: {row['name']} has the unit {row['time_unit']}")
            name = row.get("run_name") or row["name"]
            # what SkipWithMessage left out did not fail, but the JSON gives it a time of 0
            ran = not _is_true(row.get("skipped"))
            skipped += not ran
            records.append(
                {
                    "name": name,
                    "repetition_index": row.get("repetition_index"),
                    "real_time": _times(row.get("real_time"), factor) if ran else None,
                    "cpu_time": _times(row.get("cpu_time"), factor) if ran else None,
                    FAILED: _is_true(row.get("error_occurred")),
                    **dict(ARGUMENT.findall(name)),
                }
            )
    if not records:
        raise InputError(f"{paths[0]}: no single runs; without --benchmark_report_aggregates_only")
    frame = pl.DataFrame(records, infer_schema_length=None)
    if skipped:
        notes.append(f"{skipped} runs were skipped, with a message: they are not measured")
    if frame["repetition_index"].null_count():
        # a CSV has no numbers of the repetitions
        frame = frame.with_columns(repetition_index=pl.int_range(pl.len()).over("name"))
    if frame.n_unique("repetition_index") > 1:
        frame = frame.with_columns(pl.col("repetition_index").alias("repeat"))
    known = ("name", "repetition_index", "real_time", "cpu_time", "repeat", FAILED)
    return ToolRows(
        TOOL,
        frame,
        knobs=[name for name in frame.columns if name not in known] or ["name"],
        accuracies=[],
        latency="real_time",
        units={},
        repeat=["repetition_index"],
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of single runs in a file."""
    if path.name.removesuffix(".gz").endswith(".csv"):
        text = text_in(path)
        header = HEADER.search(text)
        rows: list[Any] = list(csv.DictReader(io.StringIO(text[header.start() if header else 0 :])))
    else:
        document = json_in(path)
        rows = document.get("benchmarks") or [] if isinstance(document, dict) else []
    if any(not isinstance(row, dict) or "name" not in row for row in rows):
        raise InputError(f"{path}: a row has no name; is it a file of {TOOL}?")
    return [row for row in rows if _is_single(row)]


def _is_single(row: dict[str, Any]) -> bool:
    """Return whether a row is of a single run; names tell where no `run_type` does, as in a CSV."""
    if "run_type" in row:
        return bool(row["run_type"] == "iteration")
    return not AGGREGATE.fullmatch(row["name"])


def _is_true(value: Any) -> bool:
    """Return whether a field is true, which a CSV holds as text."""
    return str(value).lower() == "true"


def _times(value: Any, factor: float) -> float | None:
    """Return a time in ms, None where there is none."""
    try:
        return float(value) * factor
    except (TypeError, ValueError):
        return None
