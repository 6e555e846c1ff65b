"""What runs and inspections note of a profile, without any policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from knobwise.envs.bandit.rules import DEADLINES, Rule
from knobwise.envs.tables.cells import Cells
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.units import unit_in
from knobwise.experiments.evidence.schema import ConfigurationRow, CostFacts, ProfileFacts

if TYPE_CHECKING:
    from knobwise.envs.demonstrations.beam_table import BeamTable

RIGHT = 0.5
"""A configuration is right for a sample from this accuracy on."""


def profile_of(table: ProfileTable | BeamTable) -> ProfileFacts:
    """Return name, digest and sizes of a profile or of beams."""
    facts: ProfileFacts = {"name": table.name, "digest": table.digest}
    if isinstance(table, ProfileTable):
        return facts | {"samples": table.num_samples, "configurations": table.num_configurations}
    return facts | {"samples": table.num_queries, "candidates": len(table.candidates)}


def costs_of(
    table: ProfileTable, limits: Mapping[str, float] | None = None
) -> dict[str, CostFacts]:
    """Return what is known of a table's further costs, and limits on them, by name."""
    costs: dict[str, CostFacts] = {}
    for name in table.costs:
        costs[name] = {}
        if unit := unit_in(name):
            costs[name]["unit"] = unit
        if limits and name in limits:
            costs[name]["limit"] = limits[name]
    return costs


def configuration_rows(
    table: ProfileTable,
    rows: Tensor,
    budgets: Sequence[float] = (),
    cells: Cells | None = None,
    rule: Rule = DEADLINES,
) -> list[ConfigurationRow]:
    """Return the means of every configuration that some of these samples (int64 [n]) may have, with
    the mean utility over the budgets if there are any.

    Args:
        cells: what counts of the table; None for all that it has.
        rule: what decisions are worth.
    """
    counted: Cells = table if cells is None else cells
    # how right an answer is does not depend on what it costs
    accuracy = table.accuracy[rows].where(counted.mask[rows], torch.nan)
    columns = {"accuracy": accuracy, "latency_ms": counted.latency_ms[rows]}
    if budgets:
        # [n, C, B]; what was not profiled has no utility
        utility = rule.mean_utility(
            counted.accuracy[rows][..., None],
            counted.measurements_ms[rows][..., None, :],
            torch.tensor(budgets),
        ).mean(-1)
        columns["utility"] = utility.where(counted.mask[rows], torch.nan)
    # a cell stands for others that were not drawn, unless values beside it were predicted
    weight = torch.ones(accuracy.shape)
    if cells is None and table.sampling_weight is not None:
        weight = table.sampling_weight[rows]
    means = {}
    for name, values in columns.items():
        total = weight.where(~values.isnan(), 0.0).sum(0)
        means[name] = ((weight * values).nansum(0) / total).tolist()
    # the rest was never measured
    configurations: list[ConfigurationRow] = []
    for c, label in enumerate(map(table.label, range(table.num_configurations))):
        if counted.mask[rows, c].any():
            row: ConfigurationRow = {"label": label, "knobs": table.configuration(c)}
            known = {name: values[c] for name, values in means.items()}
            configurations.append(cast("ConfigurationRow", row | known))
    return configurations


def difficulty_of(accuracy: Tensor, latency_ms: Tensor) -> Tensor:
    """Return the latency of the cheapest right configuration of each sample, [n].

    Accuracy and latency are [n, C]. Where no configuration is right the result is infinite.
    """
    return latency_ms.where(accuracy >= RIGHT, torch.inf).amin(1)  # NaN is not right
