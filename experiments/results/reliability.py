"""Reliability: predicted probabilities of being on time against the shares that were."""

from __future__ import annotations

from typing import Any

import polars as pl
import torch
from torch import Tensor

from knobwise.agents.stack.deployed import DeployedController
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.results.problem import DEADLINE

BINS = 10


@torch.no_grad()
def expected_in_time(
    controller: DeployedController,
    table: ProfileTable,
    rows: Tensor,
    chosen: Tensor,
    left_ms: Tensor,
) -> Tensor | None:
    """Return the probability that what a controller chose is on time, as its teacher expects it.

    Args:
        rows: int64 [n], samples.
        chosen: int64 [n, B], configurations.
        left_ms: [B], what its own cost leaves of the budgets.

    Returns:
        float [n, B]; None without a teacher.
    """
    if controller.teacher is None:
        return None
    blocks = {name: block[rows] for name, block in table.features.items()}
    moments = controller.teacher.moments(controller.controller.features(blocks, len(rows)))
    columns = []
    for place, limit in enumerate(left_ms):
        meets = moments.meets(limit.float().expand(len(rows)))
        columns.append(meets.gather(1, chosen[:, [place]]))
    return torch.cat(columns, 1)


def reliability(decisions: pl.DataFrame) -> list[dict[str, Any]]:
    """Return the learned policy's decisions, all budgets and seeds together, in ten bins of equally
    many and of rising probability: how many `decisions`, and the means of `expected_in_time` and
    `in_time`. [] if it predicts none."""
    known = decisions.filter(policy=DEADLINE.trained[0]).drop_nulls("expected_in_time")
    number = pl.int_range(pl.len()) * BINS // pl.len()
    means = pl.col("expected_in_time", "in_time").cast(pl.Float64).mean()
    bins = (
        known.sort("expected_in_time", maintain_order=True)
        .group_by(number.alias("bin"), maintain_order=True)
        .agg(pl.len().alias("decisions"), means)
    )
    return bins.drop("bin").to_dicts()
