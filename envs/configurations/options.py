"""What a person chooses when they reset an environment: the sample, and the budget or worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.envs.tables.profile_table import ProfileTable


def chosen_context(
    options: Mapping[str, Any], table: ProfileTable, limit_key: str, count: int
) -> tuple[Tensor | None, Tensor | None]:
    """Read the options of `reset` for `count` contexts: rows int64 [count] and limits float32 [count], in ms, each None
    if it is to be drawn.

    The options are `row` or `sample_id` (with `dataset`, where data sets share ids), and `budget_ms`, or under a mean
    budget `worth_ms`; a single value holds for every context, else there is one for each. Raises InputError for other
    options, an unknown sample, or a limit that is not positive and finite.
    """
    allowed = ("row", "sample_id", "dataset", limit_key)
    if unknown := [name for name in options if name not in allowed]:
        raise InputError(f"reset options: {unknown[0]!r} is not among them; allowed are {', '.join(allowed)}")
    if ("sample_id" in options and "row" in options) or ("dataset" in options and "sample_id" not in options):
        raise InputError("reset options: name the sample by row, or by sample_id (with dataset where ids repeat)")
    values = {name: _for_each(name, value, count) for name, value in options.items()}
    rows = limits = None
    if "row" in values:
        rows = torch.tensor([_row(value, table) for value in values["row"]])
    elif "sample_id" in values:
        datasets = values.get("dataset", [None] * count)
        rows = torch.tensor([_row_of_id(*pair, table) for pair in zip(values["sample_id"], datasets, strict=True)])
    if limit_key in values:
        limits = torch.tensor([_limit(limit_key, value) for value in values[limit_key]])
    return rows, limits


def _for_each(name: str, value: Any, count: int) -> NDArray[np.object_]:
    array = np.asarray(value, dtype=object)
    if array.shape not in ((), (count,)):
        expected = f"expected a single value or {count}, one for each environment"
        raise InputError(f"reset options: {name} has shape {array.shape}; {expected}")
    return np.broadcast_to(array, count)


def _row(value: Any, table: ProfileTable) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < table.num_samples:
        raise InputError(f"reset options: row={value!r}; the rows of {table.name!r} are 0 to {table.num_samples - 1}")
    return int(value)


def _row_of_id(sample_id: Any, dataset: str | None, table: ProfileTable) -> int:
    places = zip(table.sample_ids, table.dataset_names, strict=True)
    rows = [row for row, (known, name) in enumerate(places) if known == str(sample_id) and dataset in (None, name)]
    if len(rows) == 1:
        return rows[0]
    what = f"reset options: sample_id={str(sample_id)!r}" + (f" of data set {dataset!r}" if dataset else "")
    if rows:
        raise InputError(f"{what} occurs in {', '.join(table.datasets[row] for row in rows)}; add dataset=…")
    raise InputError(f"{what} is not in {table.name!r}; its {table.num_samples} ids begin with {table.sample_ids[:3]}")


def _limit(name: str, value: Any) -> float:
    try:
        limit = float(value)
    except (TypeError, ValueError):
        limit = 0.0
    if not torch.finfo(torch.float32).tiny <= limit <= torch.finfo(torch.float32).max:
        raise InputError(f"reset options: {name}={value!r}; it must be a positive, finite number")
    return limit
