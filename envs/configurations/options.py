"""The options of `reset`, by which a person chooses the sample, and the budget or worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.envs.tables.profile_table import ProfileTable


def chosen_context(
    options: Mapping[str, Any], table: ProfileTable, limit_key: str, count: int
) -> tuple[Tensor | None, Tensor | None]:
    """Read the options of `reset` for `count` contexts.

    The options are `row` or `sample_id` (with `dataset`, where data sets share ids), and
    `budget_ms`, or under a mean budget `worth_ms`. A single row, budget or worth holds for every
    context; else there is one for each.

    Returns:
        rows int64 [count], and limits float32 [count] in ms; None for what is to be drawn.

    Raises:
        InputError: another option, an unknown sample, or a limit that is not positive and finite.
    """
    allowed = ("row", "sample_id", "dataset", limit_key)
    if unknown := [name for name in options if name not in allowed]:
        raise InputError(
            f"reset options: {unknown[0]!r} is unknown; known are {', '.join(allowed)}"
        )
    by_id = "sample_id" in options
    if ("row" in options and by_id) or ("dataset" in options and not by_id):
        raise InputError(
            "reset options: name the sample by row, or by sample_id (with dataset where ids repeat)"
        )
    rows = options.get("row")
    limits = options.get(limit_key)
    # check each option, and turn it into a tensor
    if by_id:
        rows = _row_of_id(str(options["sample_id"]), options.get("dataset"), table)
    if rows is not None:
        last = table.num_samples - 1
        rows = _numbers(
            "row", rows, (count,), "iu", 0, last, f"must be a row of {table.name!r}, 0 to {last}"
        ).long()
    if limits is not None:
        bounds = torch.finfo(torch.float32)
        needs = "must be a positive, finite number"
        limits = _numbers(
            limit_key, limits, (count,), "iuf", bounds.tiny, bounds.max, needs
        ).float()
    return rows, limits


def _numbers(
    name: str, value: Any, shape: tuple[int, ...], kinds: str, low: float, high: float, needs: str
) -> Tensor:
    """Return the value of an option as a tensor of this shape, whose first axis it may lack.

    Its numbers must be of one of these kinds of NumPy types, and lie between low and high.
    """
    array = np.asarray(value)
    valid = array.dtype.kind in kinds and array.shape in (shape, shape[1:])
    if not valid or not low <= array.min() <= array.max() <= high:
        raise InputError(
            f"reset options: {name}={value!r}: {needs}; give one for all environments, or "
            f"{shape[0]}"
        )
    return torch.from_numpy(np.broadcast_to(array, shape).copy())


def _row_of_id(sample_id: str, dataset: str | None, table: ProfileTable) -> int:
    names = enumerate(zip(table.sample_ids, table.dataset_names, strict=True))
    rows = [
        row
        for row, (known, known_set) in names
        if known == sample_id and dataset in (None, known_set)
    ]
    if len(rows) != 1:
        raise InputError(
            f"reset options: {len(rows)} samples of {table.name!r} have sample_id={sample_id!r} "
            "and "
            f"dataset={dataset!r} (None is any); the first ids are {table.sample_ids[:3]}"
        )
    return rows[0]
