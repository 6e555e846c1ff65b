"""Decide for the requests in a file: their features and budgets in, knob values out.

The file is read in batches, so that a long one needs little memory.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import polars as pl

from knobwise.agents.deployed.arrays import Array
from knobwise.agents.deployed.controller import MOST_MS, NumpyController
from knobwise.agents.serving.inputs import limit_of
from knobwise.common.errors import InputError, naming
from knobwise.common.files import written_whole
from knobwise.common.json_text import decoded, encoding_of
from knobwise.common.parquet import decoded_size, refuse_unpacked
from knobwise.common.progress import say
from knobwise.common.text_files import LOOKED_AT, form_of, with_points
from knobwise.envs.readers.feature_columns import encode, number
from knobwise.envs.readers.frames import refuse_lost_digits
from knobwise.envs.tables.columns import FEATURES, Column, columns_of
from knobwise.experiments.evidence.run_folder import checkpoint_at
from knobwise.experiments.settings.options import DecideRun
from knobwise.experiments.wording.words import counted

AT_ONCE = 50_000
"""Rows of a batch."""
SOME_REFUSED = 3
"""The exit status if some rows were refused."""
Batch = tuple[Sequence[int], pl.DataFrame, pl.Series]
"""Some rows of a file: the line, or in Parquet the row, that each begins in, counted from 1; their
values; and what is wrong with each, null for nothing."""


def run(config: DecideRun) -> int:
    """Write the decisions for all requests that can be decided, list the others on stderr, and
    return the exit status: 0, or `SOME_REFUSED`.

    Raises:
        InputError: no such checkpoint or file, a budget that is not positive, or a feature that no
            request has; nothing is written then.
    """
    path = Path(config.requests)
    out = Path(config.out)
    if out.suffix != ".csv" or out.resolve() == path.resolve():
        raise InputError(f"out={out}: must be a .csv file, and not that of the requests")
    controller = _controller_at(config.checkpoint)
    if config.budget_ms is not None:
        limit_of(config.budget_ms, controller.unit)
    knobs = [controller.configuration(i) for i in range(len(controller.configurations))]
    settings = pl.DataFrame(knobs, infer_schema_length=None)
    # the budgets that the controller was judged at, where it has a guard
    calibrated = controller.calibrated
    tried = np.array([0, np.inf]) if calibrated is None else calibrated.budgets_ms
    total = 0
    count = 0
    untried = 0
    with written_whole(out) as temporary, temporary.open("wb") as file:
        for lines, frame, faults in _batches(path):
            with naming(path):
                ids, chosen, faults = _decided(controller, frame, faults, config)
            ids.insert_column(0, pl.Series("line", lines))
            good = faults.is_null()
            decided = pl.concat([ids.filter(good), settings[chosen]], how="horizontal")
            decided.write_csv(file, include_header=not total)
            untried += int((~decided["budget_ms"].is_between(tried.min(), tried.max())).sum())
            # the others are listed, as compilers do
            refused = pl.DataFrame([ids["line"], faults]).filter(~good)
            for line, fault in refused.iter_rows():
                say(f"{path}:{line}: {fault}")
            total += len(good)
            count += len(refused)
        if not total:
            raise InputError(f"{path}: holds no requests")
    print(f"decided: {total - count} of {total} requests, in {out}")
    if untried:
        say(
            f"{counted(int(untried), 'budget')} outside {tried.min():.4g} to {tried.max():.4g} "
            f"{controller.unit}, where the controller was judged: nothing is known about decisions "
            "there"
        )
    return SOME_REFUSED if count else 0


def _controller_at(path: str) -> NumpyController:
    """Load an exported `.npz` or the folder that holds it, which needs no torch; or what a
    checkpoint or a run deploys."""
    exported = Path(path, "controller.npz")
    if exported.exists() and not Path(path, "checkpoints").exists():
        path = str(exported)
    if not path.endswith(".npz"):
        from knobwise.agents.serving.knob_policy import KnobPolicy
        from knobwise.agents.training.checkpoint import load_checkpoint

        return KnobPolicy(load_checkpoint(checkpoint_at(path))).agent.decider
    try:
        return NumpyController.load(path)
    except (OSError, ValueError) as error:
        raise InputError(f"checkpoint={path}: {error}") from error


def _decided(
    controller: NumpyController, frame: pl.DataFrame, fault: pl.Series, config: DecideRun
) -> tuple[pl.DataFrame, Array, pl.Series]:
    """Decide for the rows of a frame.

    Returns:
        What identifies each row, the configurations of those that are not refused, and for each
        row why it is refused, null for nothing.

    Raises:
        InputError: a column is missing, or ids have lost digits.
    """
    faults = [fault]
    blocks = {}
    for name in controller.feature_sizes:
        blocks[name], wrong = _block(controller, frame, name)
        faults.append(wrong)
    limits = _limits(frame, config)
    valid = (limits > 0) & (limits < MOST_MS)
    if controller.mean is not None:
        calibrated = np.isclose(limits.to_numpy()[:, None], controller.mean.budgets_ms, 1e-3, 0)
        valid &= pl.Series(calibrated.any(1))
    reason = pl.lit("budget_ms must be positive, finite and, if budgets are means, calibrated")
    wrong_budget = pl.when(~valid.fill_null(False)).then(reason)
    # the first fault of a row is given
    fault = pl.select(fault=pl.coalesce(*faults, wrong_budget))["fault"]
    good = fault.is_null().to_numpy()
    features = {name: block[good] for name, block in blocks.items()}
    chosen = controller.choose(features, limits.to_numpy()[good])
    names = [frame[name] for name in ("sample_id",) if name in frame.columns]
    for ids in names:
        refuse_lost_digits(ids)
    return pl.DataFrame([*names, limits]), chosen, fault


def _limits(frame: pl.DataFrame, config: DecideRun) -> pl.Series:
    """Return the budget of each row, float64 `budget_ms`; −1 for what is no number, null for
    none."""
    budget = pl.lit(config.budget_ms, pl.Float64)
    if "budget_ms" in frame.columns:
        present = pl.col("budget_ms").cast(pl.String).fill_null("") != ""
        known = number("budget_ms", frame.schema["budget_ms"]).fill_null(-1.0)
        budget = pl.when(present).then(known).otherwise(budget)
    elif config.budget_ms is None:
        raise InputError("no column budget_ms; give budget_ms=…")
    return frame.with_columns(budget_ms=budget)["budget_ms"]


def _block(controller: NumpyController, frame: pl.DataFrame, name: str) -> tuple[Array, pl.Series]:
    """Return a feature block of the rows, and what is wrong with each, null for nothing.

    A block is a column of lists, or named columns, or without names columns such as `name[0]`.
    """
    width = controller.feature_sizes[name]
    columns: Sequence[Column] = [Column(f"{name}[{i}]", None, True) for i in range(width)]
    if name in frame.columns and frame.schema[name].is_nested():
        try:
            lists = frame[name].cast(pl.Array(pl.Float64, width))
        except pl.exceptions.PolarsError as error:
            raise InputError(f"{name} must hold {width} numbers in each row") from error
        values = [lists.arr.get(i).alias(column.name) for i, column in enumerate(columns)]
        frame = pl.DataFrame(values)
    elif name == FEATURES and controller.columns:
        columns = columns_of(controller.columns)
    elif name == "dataset" and controller.datasets:
        # one that training did not see has a place beyond the block
        columns = [Column(name, tuple(controller.datasets), True)]
    elif columns[0].name not in frame.columns:
        raise InputError(
            f"no features {name!r}, whose {width} columns have no names; give a column "
            f"of lists in Parquet, or columns {name}[0], {name}[1], …"
        )
    block, faults = encode(frame, columns)
    return block[:, :width], faults


# -- reading ---------------------------------------------------------------------------------------


def _batches(path: Path) -> Iterator[Batch]:
    """Yield the rows of a file of requests.

    Raises:
        InputError: no such file, or one that cannot be read.
    """
    known = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
    if not path.is_file():
        raise InputError(f"requests={path}: no such file")
    if path.suffix not in known:
        raise InputError(f"requests={path}: must be a file of {', '.join(known)}")
    try:
        if path.suffix == ".parquet":
            yield from _parquet_batches(path)
            return
        with path.open("rb") as begin:
            encoding = encoding_of(begin.read(4))
        with path.open(encoding=encoding.replace("utf-8-sig", "utf-8"), newline="") as file:
            if encoding == "utf-8-sig":
                file.read(1)
            if path.suffix in (".csv", ".tsv"):
                yield from _csv_batches(file)
            else:
                yield from _json_batches(file)
    except UnicodeError as error:
        raise InputError(f"requests={path}: cannot be read ({error}); save it as UTF-8") from error
    except (ValueError, TypeError, csv.Error, pl.exceptions.PolarsError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"requests={path}: cannot be read ({error})") from error


def _csv_batches(file: TextIO) -> Iterator[Batch]:
    """Yield the rows of a CSV; one of another length than the header is at fault."""
    head = list(islice(file, LOOKED_AT))
    separator, skipped = form_of(head)
    reader = csv.reader(chain(head[skipped:], file), strict=True, delimiter=separator)
    header: list[str] = next(reader, [])
    if len(set(header)) < len(header):
        raise csv.Error(f"a column occurs twice: {', '.join(header)}")
    rows = _csv_rows(reader, len(header), skipped)
    noted: set[str] = set()
    while batch := list(islice(rows, AT_ONCE)):
        lines, values, faults = zip(*batch, strict=True)
        frame = pl.DataFrame(values, dict.fromkeys(header, pl.String), orient="row")
        notes = list[str]()
        frame = with_points(frame, separator, notes)
        # other batches have much the same to say
        for note in {*notes} - noted:
            say(note)
        noted.update(notes)
        yield lines, frame, pl.Series("fault", faults, pl.String)


def _csv_rows(reader: Any, width: int, skipped: int) -> Iterator[tuple[int, list[str], str | None]]:
    """Yield the line that each row begins in, its values, and what is wrong with it. The reader
    began after the lines that were skipped."""
    line = reader.line_num + 1 + skipped
    for row in reader:
        fault = None
        # an empty line is no row
        if row and len(row) != width:
            fault = f"has {len(row)} values, but the header {width}"
            row = [""] * width
        if row:
            yield line, row, fault
        line = reader.line_num + 1 + skipped


def _json_batches(file: TextIO) -> Iterator[Batch]:
    """Yield the rows of JSON lines; one that is no object is at fault."""
    numbered = ((number, line) for number, line in enumerate(file, 1) if line.strip())
    while batch := list(islice(numbered, AT_ONCE)):
        rows: list[dict[str, Any]] = []
        faults: list[str | None] = []
        for _, line in batch:
            rows.append({})
            faults.append(None)
            try:
                row = decoded(line)
                if not isinstance(row, dict):
                    raise ValueError(f"it is a {type(row).__name__}")
                rows[-1] = row
            except ValueError as error:
                faults[-1] = f"is not a JSON object ({error})"
        if not any(rows):
            raise ValueError(f"line {batch[0][0]} {faults[0]}")
        frame = pl.DataFrame(rows, infer_schema_length=None)
        yield [number for number, _ in batch], frame, pl.Series("fault", faults, pl.String)


def _parquet_batches(path: Path) -> Iterator[Batch]:
    """Yield the rows of a Parquet file. Raises ValueError if its footer is damaged."""
    scan = pl.scan_parquet(path.absolute(), glob=False)
    size, count = decoded_size(path)
    # a batch takes its share of the memory
    refuse_unpacked(path, size * min(AT_ONCE, count) // max(count, 1))
    for first in range(0, count, AT_ONCE):
        frame = scan.slice(first, AT_ONCE).collect()
        no_faults = pl.repeat(None, len(frame), dtype=pl.String, eager=True)
        yield range(first + 1, first + len(frame) + 1), frame, no_faults
