"""decisions.parquet: every decision of every policy on the held-out samples, and what it got; one schema for all runs.

`results.json` is a summary of these rows. Two runs that were judged on the same samples are compared pair by pair, and
any other question can be answered from them later. A profile may be large: writing and summarising 10^7 decisions stays
below 4 GiB of memory (`benchmarks/decisions.py`). This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from polars.exceptions import PolarsError

from knobwise.common.errors import InputError
from knobwise.common.files import written_whole

FILE = "decisions.parquet"
SCHEMA: dict[str, pl.DataType] = {
    "policy": pl.String(),
    "seed": pl.Int64(),
    "dataset": pl.String(),
    "sample_id": pl.String(),
    "place": pl.Float64(),
    "choice": pl.String(),
    "accuracy": pl.Float32(),
    "latency_ms": pl.Float32(),
    "in_time": pl.Boolean(),
    "feasible": pl.Boolean(),
    "reward": pl.Float32(),
    "score": pl.Float32(),
    "vote": pl.Float32(),
    "decision_us": pl.Float32(),
}
"""One row for each policy, seed, sample and place. A column is null where it is unknown or means nothing:

- `seed`: where no seed changes the policy; `dataset`: where there is only one.
- `place`: the budget in ms, or the number of demonstrations.
- `choice`: the label of the configuration, null where a mixture of two decided (accuracy and latency are then
  expectations); or the bank rows of the demonstrations in the order shown, joined by blanks.
- `accuracy`: of demonstrations 0 or 1, whether the answer was right.
- `in_time`: latency ≤ budget; `feasible`: some profiled configuration meets the budget. Both for deadlines only.
- `score`: what is judged: the utility, or the accuracy.
- `vote`: whether a majority vote of the demonstrations, without the model, would have been right.
- `decision_us`: the median time of a decision of this policy at this place."""


def write_decisions(folder: str | Path, frame: pl.DataFrame) -> None:
    """Write `decisions.parquet` into a run's folder, rows in the order given.

    The columns may be in any order; values are cast, missing columns are null.

    Raises:
        ValueError: columns that are not in `SCHEMA`.
    """
    if unknown := set(frame.columns) - set(SCHEMA):
        raise ValueError(f"decisions have unknown columns {sorted(unknown)}, expected some of {list(SCHEMA)}")
    with written_whole(Path(folder) / FILE) as temporary:
        _complete(frame).write_parquet(temporary, compression="zstd")


def read_decisions(folder: str | Path) -> pl.DataFrame:
    """The decisions of a run, with the columns of `SCHEMA`.

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
    if dict(frame.schema) != SCHEMA:
        raise InputError(f"{path}: does not hold the columns of decisions; run the experiment again")
    return frame


def decision_rows(
    policy: str,
    seed: int | None,
    samples: pl.DataFrame,
    places: Sequence[float],
    columns: Mapping[str, Any],
) -> pl.DataFrame:
    """The decisions of one policy with one seed, with the columns of `SCHEMA`.

    Args:
        seed: None if no seed changes it.
        samples: n rows: `sample_id`, and `dataset` if there are several.
        places: P budgets or numbers of demonstrations.
        columns: by name an array [n, P], NaN where unknown, or a series of n·P values, or one value for all rows.
    """
    repeated = samples[np.repeat(np.arange(len(samples)), len(places))]
    filled: list[pl.Expr | pl.Series] = []
    for name, value in columns.items():
        if value is None or isinstance(value, float):
            filled.append(pl.lit(value, SCHEMA[name]).alias(name))
        else:
            filled.append(pl.Series(name, value if isinstance(value, pl.Series) else np.ravel(value)))
    place = pl.Series("place", np.tile(np.asarray(places, dtype=np.float64), len(samples)))
    return _complete(repeated.with_columns(place, *filled, policy=pl.lit(policy), seed=pl.lit(seed, pl.Int64)))


def _complete(frame: pl.DataFrame) -> pl.DataFrame:
    """All columns of `SCHEMA` in their order; NaN becomes null."""
    columns = []
    for name, dtype in SCHEMA.items():
        column = pl.col(name).cast(dtype) if name in frame.columns else pl.lit(None, dtype).alias(name)
        columns.append(column.fill_nan(None) if dtype.is_float() else column)
    return frame.select(columns)


class DecisionArrays:
    """The decisions of a run as arrays float64 [S, n, P] by policy and column, NaN where nothing is known.

    `samples` (n rows: dataset and sample_id), `policies` and `places` keep the order of the rows.
    """

    def __init__(self, decisions: pl.DataFrame) -> None:
        policies, policy = _numbered(decisions["policy"])
        places, place = _numbered(decisions["place"])
        _, dataset = _numbered(decisions["dataset"])
        _, sample = _numbered(decisions["sample_id"])
        first_rows, sample = _distinct(dataset * decisions.height + sample)
        self.policies: list[str] = policies
        self.places: list[float] = places
        self.samples = decisions.select("dataset", "sample_id")[first_rows]
        self.seeds: dict[str, list[int | None]] = {}
        self._decisions = decisions
        self._rows: dict[str, np.ndarray] = {}
        self._numbers: dict[str, np.ndarray] = {}
        for number, name in enumerate(policies):
            rows = np.flatnonzero(policy == number)
            self.seeds[name], seed = _numbered(decisions["seed"][rows])
            self._rows[name] = rows
            self._numbers[name] = (seed * len(first_rows) + sample[rows]) * len(places) + place[rows]

    def array(self, policy: str, column: str) -> np.ndarray:
        """A column of numbers."""
        values = self._decisions[column][self._rows[policy]].cast(pl.Float64).fill_null(np.nan)
        return self._spread(policy, values.to_numpy())

    def choices(self, policy: str, labels: Sequence[str]) -> np.ndarray:
        """The number of the chosen configuration among `labels`, NaN where a mixture decided."""
        numbers = range(len(labels))
        choice = self._decisions["choice"][self._rows[policy]]
        column = choice.replace_strict(labels, numbers, default=None, return_dtype=pl.Float64)
        return self._spread(policy, column.fill_null(np.nan).to_numpy())

    def _spread(self, policy: str, values: np.ndarray) -> np.ndarray:
        cube = np.full((len(self.seeds[policy]), len(self.samples), len(self.places)), np.nan)
        cube.reshape(-1)[self._numbers[policy]] = values
        return cube


def _numbered(column: pl.Series) -> tuple[list[Any], np.ndarray]:
    """The values of a column in the order of their first rows, and the number of each row's value."""
    numbers = column
    if column.dtype == pl.String:  # interned, which takes far less memory than a join
        numbers = column.cast(pl.Categorical).to_physical()
    rows, numbered = _distinct(numbers.cast(pl.Float64).fill_null(-1.0).to_numpy())
    return column[rows].to_list(), numbered


def _distinct(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first row of each distinct value, ascending, and which of them each row has."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = first.argsort()
    return first[order], order.argsort()[inverse]
