"""The tables of a run that the terminal and the report share, and how a terminal prints them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from knobwise.experiments.report import words
from knobwise.experiments.report.words import cell, policy_name, shots_words
from knobwise.experiments.results.problem import DECISION, DEMONSTRATIONS, problem_of, shown_at

if TYPE_CHECKING:
    from rich.console import Console


class Table(NamedTuple):
    """Cells under headings; the text after a line break in a cell is small print."""

    header: list[str]
    rows: list[list[str]]
    strong: list[int] = []
    """The indices of the rows in bold."""


NARROW = {"deadline": (0, 1, 3, 6, 8), "mean": (0, 1, 3, 5, 6)}
"""Kind of problem → the columns of `policies` that a terminal always has, the most important
first."""
NARROW_BY_DATASET = {"deadline": (0, 1, 2, 4, 7), "mean": (0, 1, 2, 4)}
"""Kind of problem → the columns of `by_dataset` that a terminal always has."""


def policies(results: Mapping[str, Any]) -> Table:
    """Return a row for every policy, the best first: its metrics, or its accuracy at every number
    of shots."""
    problem = problem_of(results)
    if not problem.averaged:
        return at_shots(results)
    rows = words.ranked(results, problem.ranked_by)
    unit = words.unit_of(results)
    cells = []
    for row in rows:
        values = [cell(row, metric, unit) for metric in problem.metrics]
        cells.append([policy_name(row["policy"]), *values])
    strong = [i for i, row in enumerate(rows) if row["policy"] in problem.trained]
    return Table(["policy", *(metric.name for metric in problem.metrics)], cells, strong)


def narrow(results: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the columns of `policies` that a terminal always has."""
    if problem_of(results).averaged:
        return NARROW[problem_of(results).name]
    trained = 1 + results["shots"].index(shown_at(results))
    last = len(results["shots"])
    return tuple(dict.fromkeys((0, trained, last if trained != last else 1)))


def by_dataset(results: Mapping[str, Any]) -> Table:
    """Return the most important policies in each data set; no rows if there is only one data
    set."""
    problem = problem_of(results)
    unit = words.unit_of(results)
    metrics = [metric for metric in problem.metrics if metric is not DECISION]
    rows = results.get("by_dataset", [])
    cells = []
    before = None
    for row in rows:
        title = ""
        if row["dataset"] != before:  # the name stands in the first row of a data set
            title = f"{row['dataset']}\n{row['samples']} samples"
        before = row["dataset"]
        values = [cell(row, metric, unit) for metric in metrics]
        cells.append([title, policy_name(row["policy"]), *values])
    strong = [i for i, row in enumerate(rows) if row["policy"] in problem.trained]
    return Table(["data set", "policy", *(metric.name for metric in metrics)], cells, strong)


def at_shots(results: Mapping[str, Any], rows: str = "rows") -> Table:
    """Return the accuracy of every policy at every number of shots, the best at the trained number
    first.

    Args:
        rows: the key of the rows in the results: "rows", "controls" or "votes".
    """
    header = ["policy"]
    for shots in results["shots"]:
        trained = " (trained)" if shots == results["trained_shots"] else ""
        header.append(shots_words(shots) + trained)
    main = words.rows_at(results, shown_at(results), rows)
    at = [words.rows_at(results, shots, rows) for shots in results["shots"]]
    names = dict.fromkeys(row["policy"] for row in results.get(rows, []))
    order = sorted(names, key=lambda name: -float(main[name]["accuracy"] if name in main else -1))
    accuracy, decision = DEMONSTRATIONS.metrics
    cells = []
    for name in order:
        values = [cell(by_policy.get(name, {}), accuracy) for by_policy in at]
        if rows == "rows":
            values.append(cell(main.get(name, {}), decision))
        cells.append([policy_name(name, results), *values])
    if rows == "rows":
        header.append(decision.name)
    policy = DEMONSTRATIONS.main_policy(results)
    return Table(header, cells, [i for i, name in enumerate(order) if name == policy])


# -- on the terminal -------------------------------------------------------------------------------


def print_table(
    console: Console,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    few: Sequence[int],
    strong: Collection[int] = (),
) -> None:
    """Print a table, with the rows `strong` in bold. A terminal gets the columns `few` and as many
    others as fit, without small print if need be; a line says what is left out."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    cells = []
    for row in rows:
        cells.append([text.replace("\n", " ") for text in row])
    columns = list(range(len(header)))
    left_out = ""
    if not console.is_terminal:
        table = Table(box=None, header_style="bold", pad_edge=False)
        wide = Console(file=console.file, width=400)
    else:
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        wide = console
        if _width(header, cells, columns) > console.width:
            header, cells, columns, left_out = _narrowed(header, rows, cells, few, console.width)
    for column in sorted(columns):
        table.add_column(header[column], justify="right" if column else "left", no_wrap=True)
    for i, line in enumerate(cells):
        visible = [line[column] for column in sorted(columns)]
        table.add_row(*visible, style="bold" if i in strong else None)
    wide.print(table, markup=False, highlight=False)
    print_lines(console, [left_out])


def _narrowed(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    cells: list[list[str]],
    few: Sequence[int],
    width: int,
) -> tuple[Sequence[str], list[list[str]], list[int], str]:
    """Return header, cells and columns that fit into a width, and a line on what is left out.

    Args:
        rows: the cells as they were given.
        cells: the cells with their small print behind the number.
        few: the columns that are kept in any case.
    """
    names = []
    if _width(header, cells, few) > width:
        cells = []
        for row in rows:
            cells.append([text.split("\n")[0] for text in row])
        names = ["intervals"]
    # headings of several lines if more columns fit then
    columns = _fitting(header, cells, few, width)
    broken = [title.replace(" ", "\n") for title in header]
    with_broken = _fitting(broken, cells, few, width)
    if len(with_broken) > len(columns):
        header = broken
        columns = with_broken
    columns = columns or list(few)
    names = [title.replace("\n", " ") for i, title in enumerate(header) if i not in columns] + names
    left_out = f"left out at {width} columns: {', '.join(names)}" if names else ""
    return header, cells, columns, left_out


def _fitting(
    header: Sequence[str], rows: Sequence[Sequence[str]], few: Sequence[int], width: int
) -> list[int]:
    """Return the columns `few`, and as many others as fit beside them; none if `few` do not fit."""
    if _width(header, rows, few) > width:
        return []
    columns = list(few)
    for column in set(range(len(header))) - set(few):
        if _width(header, rows, [*columns, column]) <= width:
            columns.append(column)
    return columns


def _width(header: Sequence[str], rows: Sequence[Sequence[str]], columns: Collection[int]) -> int:
    """Return how many characters of a line the columns take, with three between any two."""
    from rich.cells import cell_len

    widest = []
    for column in columns:
        lines = "\n".join([header[column], *(row[column] for row in rows)]).split("\n")
        widest.append(max(map(cell_len, lines)))
    return sum(widest) + 3 * len(widest) - 1


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print sentences; only a terminal breaks long ones."""
    for line in filter(None, lines):
        console.print(line, markup=False, highlight=False, soft_wrap=not console.is_terminal)
