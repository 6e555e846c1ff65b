"""decisions.parquet: every decision of every policy on the held-out samples. `results.json` is a
summary of these rows.

Writing and summarising 10^7 decisions takes less than 4 GiB of memory. This module imports no
torch, which is slow to load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray
from polars.exceptions import PolarsError

from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.common.parquet import read_parquet

if TYPE_CHECKING:
    from torch import Tensor

Columns = Mapping[str, "ArrayLike | Tensor | pl.Series | None"]
"""What is known of decisions, by the name of the column: values for n samples and P conditions, as
an array that broadcasts to [n, P], NaN where unknown, or a series of n·P values; or None."""
FILE = "decisions.parquet"
SAMPLE = ("split", "dataset", "sample", "request")
"""The columns that tell samples apart; a sample is judged once in each split that tests it, and
live once for each request."""
SCHEMA: dict[str, type[pl.DataType]] = {
    "policy": pl.String,
    "seed": pl.Int64,
    "split": pl.Int64,
    "dataset": pl.String,
    "sample": pl.String,
    "cluster": pl.String,
    "condition": pl.Float64,
    "source": pl.String,
    "request": pl.Int64,
    "choice": pl.String,
    "second_choice": pl.String,
    "second_share": pl.Float64,
    "sampling_weight": pl.Float32,
    "accuracy": pl.Float32,
    "latency_ms": pl.Float32,
    "on_time": pl.Float32,
    "expected_on_time": pl.Float32,
    "feasible": pl.Boolean,
    "utility": pl.Float32,
    "reward": pl.Float32,
    "vote": pl.Float32,
    "decision_us": pl.Float32,
    "inference_ms": pl.Float32,
    "overhead_ms": pl.Float32,
}
"""The columns that every `decisions.parquet` has, with a row for each policy, seed, sample and
condition. Others may follow: further costs, as `cost_usd`, and `over_usd`, the share above the
limit. A column is null where it is unknown or means nothing.

The keys:

- `seed`: null where no seed changes the policy.
- `split`: its number, counted from 0; null where there is only one (`split.repeats`).
- `dataset`: null where there is only one.
- `cluster`: what the sample belongs to (`profile.group`, or an image); null where it stands alone,
  but live, and of queries without an image beside others with one, its own id.
- `condition`: the budget in ms, or the number of demonstrations.
- `source`: `replay` where outcomes were looked up, `live` where the model answered.
- `request`: live, its number in the stream, counted from 0; a sample may come several times.

The outcomes:

- `choice`: the label of the configuration; or the bank rows of the demonstrations in the order
  shown, joined by blanks. Where two configurations share the requests, `second_choice` gets the
  part `second_share`, and the outcomes are expectations.
- `sampling_weight`: null where every cell of the profile was measured. Else the outcomes are doubly
  robust estimates, which may lie outside their range: it is how many cells this one stands for, 0
  if it was not measured and its outcomes are predictions.
- `accuracy`: of demonstrations 0 or 1, whether the answer was right.
- `on_time`: the share of the cell's measurements that meet the budget, with the policy's own cost;
  `feasible`: some profiled configuration meets the budget; `utility`: accuracy · on_time. For
  deadlines only.
- `expected_on_time`: the probability of being on time that a controller's teacher predicts for its
  choice.
- `reward`: that of the training, without the policy's own cost.
- `vote`: whether a majority vote of the demonstrations, without the model, would have been right.
- `decision_us`: the median time of a decision, for controllers and selectors only.
- `inference_ms`, `overhead_ms`: live, the model's own time, and what was added to it.
"""
SHARES = ("accuracy", "on_time", "expected_on_time", "utility", "vote", "second_share")
"""The columns whose numbers are from 0 to 1."""
IF_FREE = "if_free"
"""The learned controller if its decisions and features took no time: a policy of its own."""
BEFORE = "before_grpo"
"""The learned controller before GRPO."""


def write_decisions(path: str | Path, frame: pl.DataFrame) -> None:
    """Write decisions to a file, or as `decisions.parquet` into the folder of a run, rows in the
    order given.

    The columns may be in any order; values are cast, missing columns are null.
    """
    path = Path(path)
    if path.is_dir():
        path /= FILE
    with written_whole(path) as temporary:
        _complete(frame).write_parquet(temporary, compression="zstd")


def read_decisions(folder: str | Path) -> pl.DataFrame:
    """Read the decisions of a run, with the columns of `SCHEMA` and perhaps more.

    Raises:
        InputError: no such file, or not one that `write_decisions` wrote; a share or a time that is
            not possible.
    """
    path = Path(folder) / FILE
    try:
        frame = read_parquet(path, limited=False)
        # without one of these it is another file
        frame.select("policy", "seed", "sample", "condition", "accuracy")
        decisions = _complete(frame)
    except (PolarsError, OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); run the experiment again") from error
    # unknown values are null, and pass
    fits = pl.col(*SHARES).is_between(-1e-6, 1 + 1e-6), pl.col("latency_ms").is_between(0, 3.4e38)
    measured = pl.col("sampling_weight").is_null()
    if len(wrong := decisions.filter(measured & ~pl.all_horizontal(*fits))):
        raise InputError(
            f"{path}: holds {len(wrong)} rows with an accuracy, a utility or a share outside "
            "[0, 1], or a negative or infinite time; run the experiment again"
        )
    return decisions


def decision_rows(
    policy: str,
    seed: int | None,
    samples: pl.DataFrame,
    conditions: Sequence[float],
    columns: Columns,
) -> pl.DataFrame:
    """Return the decisions of a policy with one seed, with the columns of `SCHEMA`.

    Args:
        seed: None if no seed changes the policy.
        samples: n rows: `sample`, `dataset` if there are several, `cluster` if there are any.
        conditions: P budgets or numbers of demonstrations.
        columns: their values, see `Columns`.
    """
    rows = samples.join(
        pl.DataFrame({"condition": conditions}), how="cross", maintain_order="left_right"
    )
    # values count samples first, then conditions
    known: dict[str, pl.Expr | pl.Series | None] = {
        "policy": pl.lit(policy),
        "seed": pl.lit(seed, pl.Int64),
        "source": pl.lit("replay"),
    }
    for name, value in columns.items():
        if value is not None and not isinstance(value, pl.Series):
            value = pl.Series(np.broadcast_to(value, (len(samples), len(conditions))).ravel())
        known[name] = value
    return _complete(rows.with_columns(**known))


def _complete(frame: pl.DataFrame) -> pl.DataFrame:
    """Return all columns of `SCHEMA` in their order, then others; NaN becomes null."""
    cast = [pl.col(name).cast(kind) for name, kind in SCHEMA.items() if name in frame.columns]
    known = frame.with_columns(cast).fill_nan(None)
    return pl.concat([pl.DataFrame(schema=SCHEMA), known], how="diagonal")


def array_of(decisions: pl.DataFrame, policy: str, column: str) -> NDArray[np.float64]:
    """Return a column of a policy's decisions as an array [S, n, P], NaN where a value is unknown.

    Seeds, samples and conditions are in the order of the rows.

    Args:
        decisions: of all policies, each with the same samples at every condition.
    """
    values = pl.col(column).cast(pl.Float64).fill_null(np.nan)
    rows = decisions.filter(policy=policy).select("seed", values)
    # with several splits the rows of a seed are not together; `partition_by` joins them
    seeds = [seed[column].to_numpy() for seed in rows.partition_by("seed", maintain_order=True)]
    return np.stack(seeds).reshape(len(seeds), -1, decisions["condition"].n_unique())


def splits_of(samples: pl.DataFrame) -> NDArray[np.int64] | None:
    """Return the split and a number of each of n samples, [2, n]; None if there is only one split,
    and no sample belongs to a cluster.

    The number says which sample or cluster it is: a sample that several splits judge has one number
    in all.

    Args:
        samples: n rows with the columns `SAMPLE` and `cluster`.
    """
    alone = samples["cluster"].is_null().all()
    if samples["split"].has_nulls() and alone:
        return None
    # a sample that belongs to no cluster is one of its own
    itself = pl.when(pl.col("cluster").is_null()).then(pl.struct("dataset", "sample"))
    # they are numbered in the order of their first rows
    first = pl.col("index").first().over("cluster", itself)
    number = first.rank("dense").cast(pl.Int64) - 1
    split = pl.col("split").fill_null(0)
    return samples.with_row_index().select(split, number).to_numpy().T
