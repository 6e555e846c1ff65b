"""Cells without a measurement that count as failures: some tools write no row for a request that
failed, so that the setting which fails most looks best."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import torch

from knobwise.common.errors import InputError
from knobwise.envs.tables.profile_table import ProfileTable

MISSING_CELLS = ("unmeasured", "failed")
"""What cells without a measurement may be."""


def rows_as_failed(measured: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    """Return rows in which those without accuracy or latency are wrong, and as late as the slowest.

    Args:
        measured: `accuracy` and `latency`, float64, null where unknown.
        notes: what is noticed.
    """
    unknown = measured["accuracy"].is_null() | measured["latency"].is_null()
    if not unknown.any() or unknown.all():
        return measured
    notes.append(
        f"missing=failed: {unknown.sum()} rows without accuracy or latency count as late and wrong"
    )
    late = pl.when(unknown).then(pl.col("latency").max()).otherwise("latency")
    wrong = pl.when(unknown).then(0.0).otherwise("accuracy")
    return measured.with_columns(latency=late, accuracy=wrong)


def cells_as_failed(table: ProfileTable) -> ProfileTable:
    """Return the table with accuracy 0, and the largest latency that it has, in each cell that is
    missing, unless its configuration was measured for no sample of that data set.

    Further costs of these cells stay unknown.

    Raises:
        InputError: cells are missing because others were drawn to be measured.
    """
    if table.sampling_weight is not None:
        raise InputError(
            "missing=failed: the cells of this table were drawn to be measured, so those that are "
            "missing did not fail; leave it out"
        )
    failed = ~table.mask & ran(table)
    if not failed.any():
        return table
    late = float(table.latency_ms[table.mask].max())
    changes: dict[str, Any] = {
        "accuracy": table.accuracy.masked_fill(failed, 0.0),
        "latency_ms": table.latency_ms.masked_fill(failed, late),
        "mask": table.mask | failed,
    }
    if table.repeats_ms is not None:
        repeats_ms = table.repeats_ms.clone()
        repeats_ms[..., 0].masked_fill_(failed, late)
        changes["repeats_ms"] = repeats_ms
    counts = failed.sum(0)
    most = counts.argsort(descending=True)[: min(3, int((counts > 0).sum()))].tolist()
    settings = ", ".join(f"{counts[c]} of {table.label(c)}" for c in most)
    note = (
        f"missing=failed: {failed.sum()} cells without a row count as late and wrong ({settings})"
    )
    return replace(table, notes=(*table.notes, note), **changes)


def ran(table: ProfileTable) -> torch.Tensor:
    """Return whether any sample of the cell's data set was measured with its configuration, bool
    [N, C]. If none was, nobody tried."""
    datasets = np.unique(table.dataset_names, return_inverse=True)[1]
    of_dataset = torch.from_numpy(datasets.reshape(-1))
    measured = torch.zeros(int(of_dataset.max()) + 1, table.num_configurations, dtype=torch.long)
    measured.index_add_(0, of_dataset, table.mask.long())
    return measured[of_dataset] > 0
