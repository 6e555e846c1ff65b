"""decisions.parquet: every decision of every policy on the held-out samples. `results.json` is a
summary of these rows.

Writing and summarising 10^7 decisions takes less than 4 GiB of memory. This module imports no
torch, which is slow to load.
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
from knobwise.common.parquet import read_parquet

FILE = "decisions.parquet"
SAMPLE = ("split", "dataset", "sample_id")
"""The columns that tell samples apart; a sample is judged once in each split that tests it."""
SCHEMA: dict[str, pl.DataType] = {
    "policy": pl.String(),
    "split": pl.Int64(),
    "seed": pl.Int64(),
    "dataset": pl.String(),
    "sample_id": pl.String(),
    "place": pl.Float64(),
    "choice": pl.String(),
    "accuracy": pl.Float32(),
    "latency_ms": pl.Float32(),
    "in_time": pl.Float32(),
    "expected_in_time": pl.Float32(),
    "feasible": pl.Boolean(),
    "reward": pl.Float32(),
    "score": pl.Float32(),
    "score_free": pl.Float32(),
    "vote": pl.Float32(),
    "decision_us": pl.Float32(),
}
"""The columns of `decisions.parquet`, with a row for each policy, seed, sample and place. A column
is null where it is unknown or means nothing:

- `split`: its number, counted from 0; null where there is only one (`split.repeats`).
- `seed`: null where no seed changes the policy; `dataset`: null where there is only one.
- `place`: the budget in ms, or the number of demonstrations.
- `choice`: the label of the configuration, null where a mixture of two decided (accuracy and
  latency are then expectations); or the bank rows of the demonstrations in the order shown, joined
  by blanks.
- `accuracy`: of demonstrations 0 or 1, whether the answer was right.
- `in_time`: the share of the cell's measurements that meet the budget, with the policy's own cost;
  `feasible`: some profiled configuration meets the budget. Both for deadlines only.
- `expected_in_time`: the probability of being on time that a controller's teacher predicts for its
  choice.
- `score`: what is judged: the utility, or the accuracy; `score_free`: of a policy that is charged
  its own cost, the utility if it cost nothing.
- `vote`: whether a majority vote of the demonstrations, without the model, would have been right.
- `decision_us`: the median time of a decision of this policy at this place, for controllers and
  selectors only.
"""


def write_decisions(folder: str | Path, frame: pl.DataFrame) -> None:
    """Write `decisions.parquet` into a run's folder, rows in the order given.

    The columns may be in any order; values are cast, missing columns are null.

    Raises:
        ValueError: columns that are not in `SCHEMA`.
    """
    if unknown := set(frame.columns) - set(SCHEMA):
        raise ValueError(
            f"decisions have unknown columns {sorted(unknown)}, expected some of {list(SCHEMA)}"
        )
    with written_whole(Path(folder) / FILE) as temporary:
        _complete(frame).write_parquet(temporary, compression="zstd")


def read_decisions(folder: str | Path) -> pl.DataFrame:
    """Read the decisions of a run, with the columns of `SCHEMA`.

    Raises:
        InputError: no such file, or not one that `write_decisions` wrote.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise InputError(f"{path}: no such file; run the experiment again")
    try:
        frame = read_parquet(path)
        if set(SCHEMA) - set(frame.columns):
            raise InputError(
                f"{path}: does not hold the columns of decisions; run the experiment again"
            )
        return _complete(frame)
    except InputError:
        raise
    except (PolarsError, OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); run the experiment again") from error


def decision_rows(
    policy: str,
    seed: int | None,
    samples: pl.DataFrame,
    places: Sequence[float],
    columns: Mapping[str, Any],
) -> pl.DataFrame:
    """Return the decisions of a policy with one seed, with the columns of `SCHEMA`.

    Args:
        seed: None if no seed changes it.
        samples: n rows: `sample_id`, and `dataset` if there are several.
        places: P budgets or numbers of demonstrations.
        columns: by name an array [n, P], NaN where unknown, or a series of n·P values, or one value
            for all rows, or None.
    """
    rows = samples.join(pl.DataFrame({"place": places}), how="cross", maintain_order="left_right")
    known = []
    for name, value in columns.items():
        if value is not None:
            if not isinstance(value, pl.Series):
                value = np.broadcast_to(np.ravel(value), len(rows))
            known.append(pl.Series(name, value))
    return _complete(rows.with_columns(*known, policy=pl.lit(policy), seed=pl.lit(seed, pl.Int64)))


def _complete(frame: pl.DataFrame) -> pl.DataFrame:
    """Return all columns of `SCHEMA` in their order; NaN becomes null."""
    columns = []
    for name, dtype in SCHEMA.items():
        if name in frame.columns:
            column = pl.col(name).cast(dtype)
        else:
            column = pl.lit(None, dtype).alias(name)
        columns.append(column.fill_nan(None) if dtype.is_float() else column)
    return frame.select(columns)


class DecisionArrays:
    """The decisions of a run as arrays float64 [S, n, P] by policy and column, NaN where nothing is
    known.

    Attributes:
        policies: in the order of the rows.
        places: P budgets or numbers of shots, in the order of the rows.
        samples: n rows with the columns `SAMPLE`, in the order of the rows.
        seeds: by policy its S seeds.
    """

    def __init__(self, decisions: pl.DataFrame) -> None:
        self.policies: list[str] = decisions["policy"].unique(maintain_order=True).to_list()
        self.places: list[float] = decisions["place"].unique(maintain_order=True).to_list()
        self.samples = decisions.select(SAMPLE).unique(maintain_order=True)
        self.seeds: dict[str, list[int | None]] = {}
        self._decisions = decisions
        self._rows: dict[str, np.ndarray] = {}
        self._cells: dict[str, np.ndarray] = {}
        # a cell is a sample at a place; a policy has it once for each seed
        cell = _number(*SAMPLE) * len(self.places) + _number("place")
        cells = (
            decisions.select("policy", *SAMPLE, "place", "seed")
            .with_row_index()
            .with_columns(cell=cell)
        )
        for policy in self.policies:
            part = cells.filter(pl.col("policy") == policy)
            self.seeds[policy] = part["seed"].unique(maintain_order=True).to_list()
            seed = part.select(_number("seed")).to_series()
            offset = seed * len(self.samples) * len(self.places)
            self._rows[policy] = part["index"].to_numpy()
            self._cells[policy] = (offset + part["cell"]).to_numpy()

    @property
    def splits(self) -> np.ndarray | None:
        """Split and number of each of the n samples, int64 [2, n]. A sample that several splits
        judge has the same number in all of them. None where there is only one split."""
        if self.samples["split"].has_nulls():
            return None
        numbers = self.samples.with_row_index().select(
            "split", number=_number("dataset", "sample_id")
        )
        return numbers.to_numpy().T

    def array(self, policy: str, column: str) -> np.ndarray:
        """Return a column of numbers, float64 [S, n, P]."""
        return self._spread(policy, self._decisions[column][self._rows[policy]])

    def choices(self, policy: str, labels: Sequence[str]) -> np.ndarray:
        """Return the index of the chosen configuration among `labels`, float64 [S, n, P], NaN where
        a mixture decided."""
        choice = self._decisions["choice"][self._rows[policy]]
        return self._spread(policy, choice.replace_strict(labels, range(len(labels)), default=None))

    def _spread(self, policy: str, values: pl.Series) -> np.ndarray:
        cube = np.full((len(self.seeds[policy]), len(self.samples), len(self.places)), np.nan)
        cube.reshape(-1)[self._cells[policy]] = values.cast(pl.Float64).fill_null(np.nan).to_numpy()
        return cube


def _number(*keys: str) -> pl.Expr:
    """Number the values of these columns from 0, in the order of their first rows, and return the
    number of each row."""
    return pl.col("index").first().over(keys).rank("dense").cast(pl.Int64) - 1
