"""Decide for the requests in a file: their features and budgets in, knob values out.

The file is read in batches, so that a long one needs little memory.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import polars as pl

from knobwise.agents.policy.arrays import Array
from knobwise.agents.policy.controller import MOST_MS, NumpyController
from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.common.json_text import decoded
from knobwise.common.progress import say
from knobwise.envs.readers.feature_columns import encode, number
from knobwise.envs.tables.columns import FEATURES, Column, columns_of
from knobwise.experiments.results.run_folder import checkpoint_at
from knobwise.experiments.settings.options import DecideRun

AT_ONCE = 50_000
"""Rows of a batch."""
MOST_LISTED = 20
"""Refused rows that are listed where no file is to hold them."""
SOME_REFUSED = 3
"""The exit status if some rows were refused."""


class Batch(NamedTuple):
    """Some rows of a file.

    Attributes:
        lines: the line, or in Parquet the row, that each begins in, counted from 1.
        frame: their values.
        faults: what is wrong with each, null for nothing.
    """

    lines: Sequence[int]
    frame: pl.DataFrame
    faults: pl.Series


def run(config: DecideRun) -> int:
    """Write the decisions for all requests that can be decided, list the others, and return the
    exit status: 0, or `SOME_REFUSED`.

    Raises:
        InputError: no such checkpoint or file, a budget that is not positive, or a feature that no
            request has; nothing is written then.
    """
    path = Path(config.requests)
    out = Path(config.out)
    if out.suffix != ".csv" or out.resolve() == path.resolve():
        raise InputError(f"out={out}: must be a .csv file, and not that of the requests")
    if config.budget_ms is not None and not 0 < config.budget_ms < MOST_MS:
        raise InputError(f"budget_ms={config.budget_ms}: must be a positive number of ms")
    controller = _controller_at(config.checkpoint)
    knobs = [controller.configuration(i) for i in range(len(controller.configurations))]
    settings = pl.DataFrame(knobs, infer_schema_length=None)
    total = 0
    count = 0
    listed: list[pl.DataFrame] = []
    with written_whole(out) as temporary, temporary.open("wb") as file:
        for batch in _batches(path):
            ids, chosen, faults = _decided(controller, batch, config)
            good = faults.is_null()
            frame = pl.concat([ids.filter(good), settings[chosen]], how="horizontal")
            frame.write_csv(file, include_header=not total)
            total += len(good)
            # only what will be listed is kept
            wrong = pl.DataFrame({"line": batch.lines, "reason": faults}).filter(~good)
            if config.refused is not None or count < MOST_LISTED:
                listed.append(wrong)
            count += len(wrong)
        if not total:
            raise InputError(f"{path}: holds no requests")
    print(f"decided: {total - count} of {total} requests, in {out}")
    _list_refused(pl.concat(listed), count, config)
    return SOME_REFUSED if count else 0


def _list_refused(wrong: pl.DataFrame, count: int, config: DecideRun) -> None:
    """Write the refused rows to a file, or the first of them to stderr."""
    if config.refused is not None:
        with written_whole(config.refused) as temporary:
            wrong.write_csv(temporary)
        print(f"refused: {count} requests, listed in {config.refused}")
        return
    for line, reason in wrong.head(MOST_LISTED).iter_rows():
        say(f"{config.requests}:{line}: {reason}")
    if count > MOST_LISTED:
        say(f"and {count - MOST_LISTED} more; refused=FILE lists all")


def _controller_at(path: str) -> NumpyController:
    """Load an exported `.npz`, which needs no torch, or what a checkpoint or a run deploys."""
    if not path.endswith(".npz"):
        from knobwise.agents.checkpoint import load_checkpoint
        from knobwise.agents.serving.knob_policy import KnobPolicy

        return KnobPolicy(load_checkpoint(checkpoint_at(path))).agent.decider
    try:
        return NumpyController.load(path)
    except (OSError, ValueError) as error:
        raise InputError(f"checkpoint={path}: {error}") from error


# -- decisions -------------------------------------------------------------------------------------


def _decided(
    controller: NumpyController, batch: Batch, config: DecideRun
) -> tuple[pl.DataFrame, Array, pl.Series]:
    """Decide for the rows of a batch.

    Returns:
        What identifies each row, the configurations of those that are not refused, and for each
        row why it is refused, null for nothing.
    """
    frame = batch.frame
    faults = [batch.faults]
    blocks = {}
    for name in controller.feature_sizes:
        blocks[name], wrong = _block(controller, frame, name, config.requests)
        faults.append(wrong)
    limits = _limits(frame, config)
    valid = (limits > 0) & (limits < MOST_MS)
    reason = "budget_ms must be positive and finite"
    if controller.mean is not None:
        calibrated = controller.mean.budgets_ms
        close = np.isclose(limits.to_numpy()[:, None], calibrated, rtol=1e-3, atol=0.0)
        valid &= pl.Series(close.any(1))
        reason = f"budget_ms must be one of {', '.join(f'{b:.4g}' for b in calibrated)}"
    missing = pl.when(limits.is_null()).then(pl.lit("has no budget_ms"))
    faults.append(pl.select(missing.when(~valid).then(pl.lit(reason))).to_series())
    # the first fault of a row is given
    first = pl.select(pl.coalesce(faults)).to_series()
    good = first.is_null().to_numpy()
    features = {name: block[good] for name, block in blocks.items()}
    chosen = controller.choose(features, limits.to_numpy()[good])
    ids = pl.DataFrame({"line": batch.lines, "budget_ms": limits})
    if "sample_id" in frame.columns:
        ids.insert_column(1, frame["sample_id"])
    return ids, chosen, first


def _limits(frame: pl.DataFrame, config: DecideRun) -> pl.Series:
    """Return the budget of each row, float64; −1 for what is no number, null for none."""
    if "budget_ms" not in frame.columns:
        if config.budget_ms is None:
            raise InputError(f"{config.requests}: no column budget_ms; give budget_ms=…")
        return pl.repeat(config.budget_ms, len(frame), dtype=pl.Float64, eager=True)
    written = pl.col("budget_ms").cast(pl.String).fill_null("") != ""
    budget = number("budget_ms", frame.schema["budget_ms"]).fill_null(-1.0)
    default = pl.lit(config.budget_ms, pl.Float64)
    return frame.select(pl.when(written).then(budget).otherwise(default)).to_series()


def _block(
    controller: NumpyController, frame: pl.DataFrame, name: str, source: str
) -> tuple[Array, pl.Series]:
    """Return a feature block of the rows, and what is wrong with each, null for nothing.

    A block has a column of lists, named columns, or without names columns such as `name[0]`.
    """
    width = controller.feature_sizes[name]
    columns = [Column(f"{name}[{i}]", None, True) for i in range(width)]
    fits = pl.Series([True]).new_from_index(0, len(frame))
    if name in frame.columns and frame.schema[name].is_nested():
        lists = pl.col(name).cast(pl.List(pl.Float64), strict=False)
        fits = frame.select(lists.list.len() == width).to_series().fill_null(False)
        places = []
        for i, column in enumerate(columns):
            places.append(lists.list.get(i, null_on_oob=True).alias(column.name))
        frame = frame.select(places)
    elif name == FEATURES and controller.columns:
        columns = list(columns_of(controller.columns))
    elif name == "dataset" and controller.datasets:
        # one that training did not see has a place beyond the block
        columns = [Column(name, tuple(controller.datasets), True)]
    elif columns[0].name not in frame.columns:
        raise InputError(
            f"{source}: no features {name!r}: the controller knows no names for its {width} "
            f"columns; give a column of lists (Parquet, JSON lines), or {name}[0], {name}[1], …"
        )
    block, faults = encode(frame, columns, source)
    uneven = pl.when(~fits).then(pl.lit(f"{name} must have {width} numbers"))
    return block[:, :width], pl.select(pl.coalesce(uneven, faults)).to_series()


# -- reading ---------------------------------------------------------------------------------------


def _batches(path: Path) -> Iterator[Batch]:
    """Yield the rows of a CSV, JSON lines or Parquet file; text may be gzipped.

    Raises:
        InputError: no such file, or one that cannot be read.
    """
    if not path.is_file():
        raise InputError(f"requests={path}: no such file")
    name = path.name.removesuffix(".gz")
    try:
        if path.suffix in (".parquet", ".pq"):
            yield from _parquet_batches(path)
        elif name.endswith((".csv", ".jsonl", ".ndjson")):
            opened: Any = gzip.open if path.suffix == ".gz" else open
            with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
                yield from (_csv_batches if name.endswith(".csv") else _json_batches)(file)
        else:
            raise InputError(f"requests={path}: must be .csv, .jsonl, .ndjson or .parquet")
    except (OSError, EOFError, UnicodeError, csv.Error, pl.exceptions.PolarsError) as error:
        raise InputError(f"requests={path}: cannot be read ({error})") from error


def _csv_batches(file: TextIO) -> Iterator[Batch]:
    """Yield the rows of a CSV; one of another length than the header is at fault."""
    reader = csv.reader(file, strict=True)
    header = next(reader, [])
    if twice := [name for name in header if header.count(name) > 1]:
        raise csv.Error(f"the column {twice[0]!r} occurs twice")
    rows = _csv_rows(reader, header)
    while batch := list(islice(rows, AT_ONCE)):
        lines, values, faults = zip(*batch, strict=True)
        columns = dict(zip(header, zip(*values, strict=True), strict=True))
        frame = pl.DataFrame(columns, schema=dict.fromkeys(header, pl.String))
        yield Batch(lines, frame, pl.Series(faults, dtype=pl.String))


def _csv_rows(reader: Any, header: list[str]) -> Iterator[tuple[int, list[str], str | None]]:
    """Yield the line that each row begins in, its values, and what is wrong with it."""
    line = reader.line_num + 1
    for row in reader:
        fault = None
        if row and len(row) != len(header):
            fault = f"has {len(row)} values, but the header {len(header)}"
            row = [""] * len(header)
        # an empty line is no row
        if row:
            yield line, row, fault
        line = reader.line_num + 1


def _json_batches(file: TextIO) -> Iterator[Batch]:
    """Yield the rows of JSON lines; one that is no object is at fault."""
    rows = _json_rows(file)
    while batch := list(islice(rows, AT_ONCE)):
        lines, values, faults = zip(*batch, strict=True)
        columns = {}
        for name in dict.fromkeys(chain(*values)):
            columns[name] = [row.get(name) for row in values]
        yield Batch(lines, pl.DataFrame(columns, strict=False), pl.Series(faults, dtype=pl.String))


def _json_rows(file: TextIO) -> Iterator[tuple[int, dict[str, Any], str | None]]:
    """Yield the number of each line, its object, and what is wrong with it."""
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        row: Any = None
        fault = "is not a JSON object"
        try:
            row = decoded(text)
        except ValueError as error:
            fault = f"is not JSON ({error})"
        if isinstance(row, dict):
            yield line, row, None
        else:
            yield line, {}, fault


def _parquet_batches(path: Path) -> Iterator[Batch]:
    """Yield the rows of a Parquet file."""
    scan = pl.scan_parquet(path, glob=False)
    count = scan.select(pl.len()).collect().item()
    for first in range(0, count, AT_ONCE):
        frame = scan.slice(first, AT_ONCE).collect()
        lines = range(first + 1, first + len(frame) + 1)
        yield Batch(lines, frame, pl.repeat(None, len(frame), dtype=pl.String, eager=True))
