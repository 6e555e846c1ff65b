"""The tables of a run that the terminal and the report share: cells in words, under their
headings."""

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


NARROW = {"deadline": (0, 1, 3, 6, 8), "mean": (0, 1, 3, 5, 6), "weights": (0, 1, 4, 2)}
"""Columns of `policies` that a terminal always has, the most important first."""
NARROW_BY_DATASET = {"deadline": (0, 1, 2, 4, 7), "mean": (0, 1, 2, 4)}


def policies(results: Mapping[str, Any]) -> Table:
    """Every policy, the best first: its metrics, or its accuracy at every number of shots."""
    problem = problem_of(results)
    if not problem.averaged:
        return at_shots(results)
    rows = words.ranked(results, problem.ranked_by)
    unit = words.unit_of(results)
    cells = [
        [policy_name(row["policy"]), *(cell(row, metric, unit) for metric in problem.metrics)]
        for row in rows
    ]
    strong = [place for place, row in enumerate(rows) if row["policy"] in problem.trained]
    return Table(["policy", *(metric.name for metric in problem.metrics)], cells, strong)


def narrow(results: Mapping[str, Any]) -> tuple[int, ...]:
    """The columns of `policies` that a terminal always has."""
    if problem_of(results).averaged:
        return NARROW[problem_of(results).name]
    trained = 1 + results["shots"].index(shown_at(results))
    last = len(results["shots"])
    return tuple(dict.fromkeys((0, trained, last if trained != last else 1)))


def by_dataset(results: Mapping[str, Any]) -> Table:
    """The most important policies in each data set; no rows if there is one data set only."""
    problem = problem_of(results)
    cells = []
    before = None
    metrics = [metric for metric in problem.metrics if metric is not DECISION]
    rows = results.get("by_dataset", [])
    for row in rows:
        if row["dataset"] != before:
            title = f"{row['dataset']}\n{row['samples']} samples"
        else:
            title = ""
        before = row["dataset"]
        cells.append(
            [
                title,
                policy_name(row["policy"]),
                *(cell(row, m, words.unit_of(results)) for m in metrics),
            ]
        )
    strong = [place for place, row in enumerate(rows) if row["policy"] in problem.trained]
    return Table(["data set", "policy", *(metric.name for metric in metrics)], cells, strong)


def at_shots(results: Mapping[str, Any], rows: str = "rows") -> Table:
    """Accuracy of every policy (or control, or vote) at every number of shots, the best at the
    trained one first."""
    trained = results["trained_shots"]
    main = words.rows_at(results, shown_at(results), rows)
    header = [
        "policy",
        *(f"{shots_words(n)}{' (trained)' * (n == trained)}" for n in results["shots"]),
    ]
    at = [words.rows_at(results, shots, rows) for shots in results["shots"]]
    names = dict.fromkeys(row["policy"] for row in results.get(rows, []))
    order = sorted(names, key=lambda name: -float(main[name]["accuracy"] if name in main else -1))
    accuracy, decision = DEMONSTRATIONS.metrics
    cells = [
        [policy_name(name, results), *(cell(by.get(name, {}), accuracy) for by in at)]
        for name in order
    ]
    if rows == "rows":
        header.append(decision.name)
        cells = [
            [*line, cell(main.get(name, {}), decision)]
            for line, name in zip(cells, order, strict=True)
        ]
    policy = DEMONSTRATIONS.main_policy(results)
    return Table(header, cells, [place for place, name in enumerate(order) if name == policy])


# -- on the terminal -------------------------------------------------------------------------------


def print_table(
    console: Console,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    few: Sequence[int],
    strong: Collection[int] = (),
) -> None:
    """Print a table, in bold the rows `strong`. A terminal gets the columns `few` and as many
    others as fit, without small print if need be; a line says what is left out."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    terminal = console.is_terminal
    table = Table(box=box.SIMPLE_HEAD if terminal else None, header_style="bold", pad_edge=False)
    width = console.width if terminal else 400
    cells = [[cell.replace("\n", " ") for cell in row] for row in rows]
    columns = list(range(len(header)))
    left_out = ""
    if terminal and _width(header, cells, columns) > width:
        short = [[cell.split("\n")[0] for cell in row] for row in rows]
        if not (_width(header, cells, few) <= width):
            cells = short
        headers = header, [title.replace(" ", "\n") for title in header]
        header, columns = max(
            ((h, _fitting(h, cells, few, width)) for h in headers), key=lambda each: len(each[1])
        )
        columns = columns or list(few)
        names = [
            header[column].replace("\n", " ")
            for column in range(len(header))
            if column not in columns
        ]
        names += ["intervals"] if cells is short else []
        if names:
            left_out = f"left out at {width} columns: {', '.join(names)}"
        else:
            left_out = ""
    for column in sorted(columns):
        table.add_column(header[column], justify="right" if column else "left", no_wrap=True)
    for place, line in enumerate(cells):
        table.add_row(
            *(line[column] for column in sorted(columns)), style="bold" if place in strong else None
        )
    if terminal:
        wide = console
    else:
        wide = Console(file=console.file, width=width)
    wide.print(table, markup=False, highlight=False)
    print_lines(console, [left_out])


def _fitting(
    header: Sequence[str], rows: Sequence[Sequence[str]], few: Sequence[int], width: int
) -> list[int]:
    """The columns `few`, and as many others as fit beside them; none if these do not."""
    if _width(header, rows, few) <= width:
        columns = list(few)
    else:
        columns = []
    for column in set(range(len(header))) - set(few) if columns else ():
        columns += [column] if _width(header, rows, [*columns, column]) <= width else []
    return columns


def _width(header: Sequence[str], rows: Sequence[Sequence[str]], columns: Collection[int]) -> int:
    """How many characters of a line the columns take, three of them between any two."""
    from rich.cells import cell_len

    widest = [
        max(cell_len(part) for line in [header, *rows] for part in line[c].split("\n"))
        for c in columns
    ]
    return sum(widest) + 3 * len(widest) - 1


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print sentences; only a terminal breaks long ones."""
    for line in filter(None, lines):
        console.print(line, markup=False, highlight=False, soft_wrap=not console.is_terminal)
