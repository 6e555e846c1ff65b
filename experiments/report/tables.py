"""The tables of a run that the terminal and the report share: cells in words, under their headings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from knobwise.experiments.report import words
from knobwise.experiments.report.words import cell, policy_name, shots_words
from knobwise.experiments.results.problem import DECISION, DEMONSTRATIONS, problem_of, shown_at

if TYPE_CHECKING:
    from rich.console import Console


class Table(NamedTuple):
    """Cells under headings; what follows a line break in a cell is small print."""

    header: list[str]
    rows: list[list[str]]
    strong: list[int] = []
    """Numbers of the rows that stand out."""


NARROW = {"deadline": (0, 1, 2, 6), "mean": (0, 1, 3, 5), "weights": (0, 1, 2, 4)}
"""Columns of `policies` for a narrow terminal."""
NARROW_BY_DATASET = {"deadline": (0, 1, 2, 3, 7), "mean": (0, 1, 2, 3, 4)}


def policies(results: Mapping[str, Any]) -> Table:
    """Every policy, the best first: its metrics, or its accuracy at every number of shots."""
    problem = problem_of(results)
    if not problem.averaged:
        return at_shots(results)
    rows, unit = words.ranked(results, problem.ranked_by), words.unit_of(results)
    cells = [[policy_name(row["policy"]), *(cell(row, metric, unit) for metric in problem.metrics)] for row in rows]
    strong = [place for place, row in enumerate(rows) if row["policy"] in problem.trained]
    return Table(["policy", *(metric.name for metric in problem.metrics)], cells, strong)


def narrow(results: Mapping[str, Any]) -> tuple[int, ...]:
    """The columns of `policies` for a narrow terminal."""
    if problem_of(results).averaged:
        return NARROW[problem_of(results).name]
    trained, last = 1 + results["shots"].index(shown_at(results)), len(results["shots"])
    return tuple(dict.fromkeys((0, trained, last if trained != last else 1)))


def by_dataset(results: Mapping[str, Any]) -> Table:
    """The most important policies in each data set; no rows if there is one data set only."""
    problem, cells, before = problem_of(results), [], None
    metrics = [metric for metric in problem.metrics if metric is not DECISION]
    rows = results.get("by_dataset", [])
    for row in rows:
        title = f"{row['dataset']}\n{row['samples']} samples" if row["dataset"] != before else ""
        before = row["dataset"]
        cells.append([title, policy_name(row["policy"]), *(cell(row, m, words.unit_of(results)) for m in metrics)])
    strong = [place for place, row in enumerate(rows) if row["policy"] in problem.trained]
    return Table(["data set", "policy", *(metric.name for metric in metrics)], cells, strong)


def at_shots(results: Mapping[str, Any], rows: str = "rows") -> Table:
    """Accuracy of every policy (or control, or vote) at every number of shots, the best at the trained one first."""
    trained, main = results["trained_shots"], words.rows_at(results, shown_at(results), rows)
    header = ["policy", *(f"{shots_words(n)}{' (trained)' * (n == trained)}" for n in results["shots"])]
    at = [words.rows_at(results, shots, rows) for shots in results["shots"]]
    names = dict.fromkeys(row["policy"] for row in results.get(rows, []))
    order = sorted(names, key=lambda name: -float(main[name]["accuracy"] if name in main else -1))
    accuracy, decision = DEMONSTRATIONS.metrics
    cells = [[policy_name(name, results), *(cell(by.get(name, {}), accuracy) for by in at)] for name in order]
    if rows == "rows":
        header.append(decision.name)
        cells = [[*line, cell(main.get(name, {}), decision)] for line, name in zip(cells, order, strict=True)]
    policy = DEMONSTRATIONS.main_policy(results)
    return Table(header, cells, [place for place, name in enumerate(order) if name == policy])


# -- on the terminal --------------------------------------------------------------------------------------------------


def print_table(
    console: Console,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    few: Sequence[int],
    strong: Collection[int] = (),
) -> None:
    """Print a table: on a narrow terminal the columns `few`, in bold the rows `strong`."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    terminal = console.is_terminal
    table = Table(box=box.SIMPLE_HEAD if terminal else None, header_style="bold", pad_edge=False)
    width = console.width if terminal else 400
    columns = range(len(header)) if width >= 140 else few if width >= 90 else few[:3]
    for column in columns:
        table.add_column(header[column], justify="right" if column else "left", no_wrap=True)
    for place, row in enumerate(rows):
        cells = [row[column].replace("\n", " ") for column in columns]
        table.add_row(*cells, style="bold" if place in strong else None)
    wide = console if terminal else Console(file=console.file, width=width)
    wide.print(table, markup=False, highlight=False)


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print sentences; only a terminal breaks long ones."""
    for line in filter(None, lines):
        console.print(line, markup=False, highlight=False, soft_wrap=not console.is_terminal)
