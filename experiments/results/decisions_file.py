"""decisions.parquet: what every policy decided for every held-out sample, and what came of it.

Numbers in `results.json` are means of these rows. Two runs that were judged on the same samples are compared by them
pair by pair (`knobwise compare`), and any other question can be asked of them afterwards.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl
from polars.exceptions import PolarsError

from knobwise.common.errors import InputError
from knobwise.common.files import written_whole

FILE = "decisions.parquet"
CONTROLLER: dict[str, pl.DataType] = {
    "policy": pl.String(),
    "seed": pl.Int64(),
    "dataset": pl.String(),
    "sample_id": pl.String(),
    "budget_ms": pl.Float64(),
    "configuration": pl.String(),
    "accuracy": pl.Float32(),
    "latency_ms": pl.Float32(),
    "in_time": pl.Boolean(),
    "feasible": pl.Boolean(),
    "utility": pl.Float32(),
}
"""One row for each policy, seed, test sample and budget. `seed` is null of what no seed changes, `dataset` where there
is one data set. `configuration` is null where a mixture of two decided, and accuracy and latency are then expectations;
`feasible`: some profiled configuration meets the budget; it and `in_time` are null under mean budgets."""
SELECTOR: dict[str, pl.DataType] = {
    "policy": pl.String(),
    "seed": pl.Int64(),
    "sample_id": pl.String(),
    "shots": pl.Int64(),
    "demonstrations": pl.List(pl.String()),
    "correct": pl.Float32(),
}
"""One row for each policy, seed, held-out query and number of shots. `demonstrations` are the rows of the candidates in
the bank that the queries were judged with, in the order shown; null where none are shown, or not one sequence of this
length was recorded. `correct` is 0 or 1, null where nothing is known."""
OUTCOMES = ("configuration", "accuracy", "latency_ms", "in_time", "feasible", "utility", "demonstrations", "correct")


def write_decisions(folder: str | Path, frame: pl.DataFrame) -> None:
    """Write `decisions.parquet` into a run's folder, sorted by everything that is not an outcome.

    Args:
        folder: of the run.
        frame: with exactly the columns of `CONTROLLER` or of `SELECTOR`, in any order; values are cast.

    Raises:
        ValueError: other columns.
    """
    schema = next((wanted for wanted in (CONTROLLER, SELECTOR) if set(wanted) == set(frame.columns)), None)
    if schema is None:
        raise ValueError(f"decisions have the columns {frame.columns}, expected {list(CONTROLLER)} or {list(SELECTOR)}")
    whole = frame.select(list(schema)).cast(dict(schema))  # type: ignore[arg-type]
    keys = [name for name in schema if name not in OUTCOMES]
    with written_whole(Path(folder) / FILE) as temporary:
        whole.sort(keys, maintain_order=True).write_parquet(temporary, compression="zstd")


def read_decisions(folder: str | Path) -> pl.DataFrame:
    """The decisions of a run, with the columns of `CONTROLLER` or of `SELECTOR`.

    Raises:
        InputError: no such file, or not one that `write_decisions` wrote.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise InputError(f"{path}: no such file; run the experiment again, older runs have none")
    try:
        frame = pl.read_parquet(path)
    except (PolarsError, OSError) as error:
        raise InputError(f"{path}: cannot be read ({str(error).splitlines()[0]}); run the experiment again") from error
    if dict(frame.schema) not in (CONTROLLER, SELECTOR):
        raise InputError(f"{path}: does not hold the columns of decisions; run the experiment again")
    return frame
