"""Reliability: predicted probabilities of being on time against the shares that were."""

from __future__ import annotations

from typing import Any

import polars as pl
import torch
from torch import Tensor

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.networks import UtilityNetwork
from knobwise.agents.stack.stacked_controller import MemberPredictions, StackedController
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.results.problem import DEADLINE

BINS = 10


@torch.no_grad()
def expected_in_time(policy: Any, table: ProfileTable, rows: Tensor, chosen: Tensor, left_ms: Tensor) -> Tensor | None:
    """The probability that what a policy chose is on time, as it predicts it: samples int64 [n], configurations int64
    [n, B], what its own cost leaves of the budgets [B] in ms → float [n, B]. None if it predicts no latencies."""
    if not isinstance(policy, StackedController | Controller):
        return None
    features = policy.features({name: block[rows] for name, block in table.features.items()}, len(rows))
    if isinstance(policy, StackedController):
        predicted = policy.predictions(features)
    elif isinstance(policy.network, UtilityNetwork):
        predicted = MemberPredictions.from_features(policy, [], [1.0], features)
    else:
        return None
    meets = [predicted.view(limit.float().expand(len(rows))).meets for limit in left_ms]
    return torch.cat([each.gather(1, chosen[:, [place]]) for place, each in enumerate(meets)], 1)


def reliability(decisions: pl.DataFrame) -> list[dict[str, Any]]:
    """The learned policy's decisions, all budgets and seeds together, in ten bins of equally many and of rising
    probability: how many `decisions`, and the means of `expected_in_time` and `in_time`. [] if it predicts none."""
    known = decisions.filter(pl.col("policy") == DEADLINE.trained[0]).drop_nulls("expected_in_time")
    place = pl.int_range(pl.len()) * BINS // pl.len()
    ordered = known.sort("expected_in_time", maintain_order=True).with_columns(bin=place)
    means = [pl.col(name).cast(pl.Float64).mean() for name in ("expected_in_time", "in_time")]
    return ordered.group_by("bin", maintain_order=True).agg(pl.len().alias("decisions"), *means).drop("bin").to_dicts()
