"""Data set by data set: the simple way that knows which one a request is from, and how a report shows what each got."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl
import torch
from torch import Tensor

from knobwise.agents.judging.baselines import BudgetAwareStatic
from knobwise.envs.readers.joint import rows_by_dataset
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.report import page
from knobwise.experiments.report.verdict import Row, interval, number, policy_name, unit_of

if TYPE_CHECKING:
    import altair as alt

HEADER = ["data set", "policy", "utility", "gap closed", "accuracy", "mean latency", "in time", "where possible"]
HEADER_OF_MEANS = ["data set", "policy", "accuracy", "mean latency", "over static mix", "over best single"]
HEADER_OF_MEANS += ["gap closed"]


class StaticPerDataset:
    """Budget-aware static, fitted on each data set for itself: what recognising the data set is worth without looking
    at the request. A data set without samples to fit on gets the static way of all.

    Like the oracle it can only choose for exactly the rows that it was given, in their order.

    Args:
        table: the profile.
        fitted: int64, the rows that it is fitted on.
        test: int64 [n], the rows that it will be asked about.

    Raises:
        ValueError: asked about another number of samples.
    """

    name = "static_per_dataset"

    def __init__(self, table: ProfileTable, fitted: Tensor, test: Tensor) -> None:
        own, self._count = rows_by_dataset(table, fitted), len(test)
        self._parts = [
            (places, BudgetAwareStatic(table, fitted[own[name]] if name in own else fitted))
            for name, places in rows_by_dataset(table, test).items()
        ]

    def choose(self, features: Mapping[str, Tensor], budgets_ms: Tensor, mask: Tensor) -> Tensor:
        if len(mask) != self._count:
            raise ValueError(f"it knows {self._count} samples and was asked about {len(mask)}")
        chosen = torch.empty(len(mask), dtype=torch.int64)
        for places, static in self._parts:
            chosen[places] = static.choose({}, budgets_ms[places], mask[places])
        return chosen


def columns(results: Mapping[str, Any]) -> tuple[list[str], tuple[int, ...]]:
    """The headings of the table, and which columns a narrow terminal shows."""
    return (HEADER_OF_MEANS, (0, 1, 2, 3, 4)) if _of_means(results) else (HEADER, (0, 1, 2, 3, 7))


def _of_means(results: Mapping[str, Any]) -> bool:
    """Whether the budgets limit the mean over requests."""
    return results.get("sense") == "mean"


def cells(results: Mapping[str, Any]) -> list[list[str]]:
    """One line for each data set and policy, under `columns`; [] where there is one data set only."""
    lines, cells_of = [], _cells_of_means if _of_means(results) else judged_cells
    before = None
    for row in results.get("by_dataset", []):
        title = f"{row['dataset']}\n{row['samples']} samples" if row["dataset"] != before else ""
        before = row["dataset"]
        lines.append([title, *cells_of(row, unit_of(results))])
    return lines


def judged_cells(row: Row, unit: str) -> list[str]:
    """What a policy got, from its name to its share in time, in words."""
    return [
        policy_name(row["policy"]),
        number(row.get("utility"), ".3f") + interval(row.get("utility_ci95"), ".3f"),
        number(row.get("gap_closed"), ".0%") + interval(row.get("gap_closed_ci95"), ".0%"),
        number(row.get("accuracy"), ".3f"),
        page.quantity(row.get("latency_ms_mean"), unit),
        number(row.get("satisfaction"), ".1%"),
        number(row.get("satisfaction_feasible"), ".1%"),
    ]


def _cells_of_means(row: Row, unit: str) -> list[str]:
    return [
        policy_name(row["policy"]),
        number(row.get("accuracy"), ".3f") + interval(row.get("accuracy_ci95"), ".3f"),
        page.quantity(row.get("latency_ms_mean"), unit),
        *(
            f"{row[over]:+z.3f}" + interval(row.get(f"{over}_ci95"), ".3f")
            for over in ("over_static_mix", "over_best_single")
        ),
        number(row.get("gap_closed"), ".0%") + interval(row.get("gap_closed_ci95"), ".0%"),
    ]


def sections(results: Mapping[str, Any]) -> list[str]:
    """Heading, words, chart (under deadlines) and table for a report; [] where there is one data set only."""
    lines = cells(results)
    if not lines:
        return []
    strong = [i for i, row in enumerate(results["by_dataset"]) if row["policy"] == "controller"]
    if _of_means(results):
        words = (
            "Means over the budgets. A budget limits the mean over all data sets; how much of it is spent on which one "
            "is the policy's choice. Each is compared at what it spent on a data set: with the static mix of all data "
            "sets, the best single configuration, and, for the gap, the oracle that spend as much there. Of the other "
            "simple ways the best one of each data set is shown, as found on these very samples."
        )
        parts = ["<h2>Data set by data set</h2>", f"<p>{words}</p>"]
        return [*parts, page.table(HEADER_OF_MEANS, lines, strong)]
    words = (
        "Means over the budgets. Gap closed is between the static way of all data sets and the oracle, in this data "
        "set. Of the other simple ways the best one of each data set is shown, as found on these very samples."
    )
    return [
        "<h2>Data set by data set</h2>",
        f"<p>{words}</p>",
        page.figure(_chart(results), "A dot is a mean utility, the line its 95% interval."),
        page.table(HEADER, lines, strong),
    ]


def _chart(results: Mapping[str, Any]) -> alt.LayerChart:
    from knobwise.experiments.report import charts

    rows = [
        {"dataset": row["dataset"], "policy": shown(row["policy"]), "utility": row["utility"]}
        | dict(zip(("low", "high"), row["utility_ci95"], strict=True))
        for row in results["by_dataset"]
    ]
    return charts.by_dataset(pl.DataFrame(rows), list(dict.fromkeys(row["policy"] for row in rows)))


def shown(policy: str) -> str:
    """A policy in the legend: the best of the other simple ways is another one in each data set."""
    known = ("controller", "budget_aware_static", "static_per_dataset", "oracle")
    return policy_name(policy) if policy in known else "best other simple way"
