"""The tables of a run that the terminal and the report share, and how a terminal prints them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup
from rich.console import Console
from rich.table import Table as RichTable

from knobwise.envs.tables.cost_words import in_words
from knobwise.envs.tables.units import TIMES
from knobwise.experiments.evidence.results import (
    differences_at,
    guard_by_budget,
    known,
    mean_of,
    ranked,
    rows_at,
    unit_of,
)
from knobwise.experiments.evidence.schema import PolicyRow, PolicyRows, RunResults
from knobwise.experiments.evidence.task import (
    DECISION,
    FEASIBLE,
    FREE,
    GAP,
    LATENCY,
    shown_at,
    task_of,
)
from knobwise.experiments.wording import words
from knobwise.experiments.wording.sentences import promise
from knobwise.experiments.wording.words import (
    cell,
    difference_cell,
    number,
    policy_name,
    quantity,
    shots_words,
)


class Table(NamedTuple):
    """Cells under headings; the text after a line break in a cell is small print."""

    header: list[str]
    rows: list[list[str]]
    strong: Collection[int] = ()
    """The indices of the rows in bold."""
    wordy: Collection[int] = ()
    """The indices of the columns that hold sentences."""


class Tile(NamedTuple):
    """A number to be seen first on a page."""

    value: str
    meaning: str
    detail: str = ""
    """Its interval, or another number, in small print."""
    unsure: bool = False
    """Whether it may be chance: then it is grey, and its interval as large."""


class Folded(NamedTuple):
    """Blocks of a page behind a title that opens them with a click."""

    title: str
    blocks: Sequence[Any]


def table_of(
    lines: Sequence[Mapping[str, str]], strong: Collection[str] = (), wordy: Collection[int] = ()
) -> Table:
    """Return a table from its lines, heading → cell; without lines it has no headings. A line that
    holds a name in `strong` is in bold."""
    rows = [list(line.values()) for line in lines]
    bold = [i for i, row in enumerate(rows) if not set(strong).isdisjoint(row)]
    return Table([*lines[0]] if lines else [], rows, bold, wordy)


def gain_tile(meaning: str, difference: Any, ci95: Any) -> Tile:
    """Return the tile of a difference, in points, with its interval."""
    interval = words.span(ci95).strip()
    return Tile(f"{words.points(difference)} points", meaning, interval, not words.sign_of(ci95))


MINOR = (FREE.name, LATENCY.name, FEASIBLE.name)
"""The columns that a terminal leaves out."""
OURS = ("policy", "decision")
"""The columns whose cells hold our words, and no names of the profile."""


def reworded(block: Any, unit: str) -> Any:
    """Return a block of a page, or several of them, with what is said of latencies said of costs in
    this unit, see `knobwise.envs.tables.cost_words.in_words`."""
    if unit in TIMES or isinstance(block, Markup):
        return block
    if isinstance(block, str):
        return in_words(block, unit)
    if isinstance(block, dict):
        return {in_words(key, unit): reworded(value, unit) for key, value in block.items()}
    if isinstance(block, Table):
        ours = [column for column, title in enumerate(block.header) if title in OURS]
        rows = [list(row) for row in block.rows]
        for row, column in itertools.product(rows, ours):
            row[column] = in_words(row[column], unit)
        return block._replace(header=reworded(block.header, unit), rows=rows)
    if isinstance(block, list):
        return [reworded(part, unit) for part in block]
    # a `Folded`, a `Tile` or a `Figure`, whose charts say it themselves
    if hasattr(block, "_asdict"):
        parts = block._asdict().items()
        words = {name: part for name, part in parts if name == "blocks" or isinstance(part, str)}
        return block._replace(**reworded(words, unit))
    return block


def policies(results: RunResults) -> Table:
    """Return a row for every policy, the best first: its metrics, or its accuracy at every number
    of shots."""
    if not task_of(results).averaged:
        return by_condition(results)
    rows = ranked(results)
    lines = [{"policy": policy_name(row["policy"])} | _metrics(results, row) for row in rows]
    return reworded(table_of(lines, _trained(results)), unit_of(results))


def by_dataset(results: RunResults) -> Table:
    """Return the most important policies in each data set; no rows if there is only one data
    set."""
    lines = []
    for row in results.get("by_dataset", []):
        title = f"{row['dataset']}, {row['samples']} samples"
        line = {"data set": title, "policy": policy_name(row["policy"])} | _metrics(results, row)
        line.pop(DECISION.name)
        lines.append(line)
    return reworded(table_of(lines, _trained(results)), unit_of(results))


def _metrics(results: RunResults, row: PolicyRow) -> dict[str, str]:
    """Return the cells of a row."""
    unit = unit_of(results)
    metrics = task_of(results).metrics
    # what is no time is not charged for decisions, so that they are free in any case
    metrics = tuple(metric for metric in metrics if metric is not FREE or unit in TIMES)
    return {metric.name: cell(row, metric, unit) for metric in metrics}


def _trained(results: RunResults) -> list[str]:
    """Return the names of the policies that the run trained; of selectors the one that stands for
    the run."""
    task = task_of(results)
    if task.averaged:
        return list(map(policy_name, task.trained))
    return [policy_name(task.main_policy(results) or "", results)]


def by_condition(results: RunResults, rows: PolicyRows = "rows") -> Table:
    """Return a row for every policy, the best first, with a cell for each budget or number of
    shots: the score with its interval, and in small print what was spent for it.

    Args:
        results: the content of `results.json`.
        rows: the key of the rows in the results: "rows", of selectors also "controls" or "votes".
    """
    unit = unit_of(results)
    # all metrics but those that need another policy or no budget
    others = (FREE, GAP, FEASIBLE, DECISION)
    metrics = [metric for metric in task_of(results).metrics if metric not in others]
    # policies that were not judged at the main condition come last
    judged = (*ranked(results, rows), *results.get(rows, []))
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in judged):
        line = {"policy": policy_name(policy, results)}
        for condition, heading in _condition_headings(results).items():
            row = rows_at(results, condition, rows).get(policy, {})
            # the score in large, all else in small print
            text = [f"{metric.name} {cell(row, metric, unit)}" for metric in metrics[1:]]
            if known(row.get("price")):
                text.append(f"λ = {row['price']:.3g} per {unit}")
            text = [in_words(part, unit) for part in text]
            line[heading] = "\n".join([cell(row, metrics[0]), *text])
        lines.append(line)
    return reworded(table_of(lines, _trained(results)), unit)


def _condition_headings(results: RunResults) -> dict[float, str]:
    """Return the budgets or numbers of shots → headings of their columns."""
    key = task_of(results).condition
    conditions = list(filter(known, {row.get(key) for row in results["rows"]}))
    trained: dict[float | None, str] = {results.get("trained_shots"): " (trained)"}
    return {
        condition: words.condition_words(results, condition) + trained.get(condition, "")
        for condition in sorted(conditions)
    }


def differences(results: RunResults) -> Table:
    """Return the differences between selectors at every number of shots, in points, and what they
    show at the one that the page is about."""
    main = shown_at(results)
    lines = []
    for pair in dict.fromkeys((row["policy"], row["against"]) for row in results["differences"]):
        line = {"policy": "\nover ".join(policy_name(name, results) for name in pair)}
        for shots, heading in _condition_headings(results).items():
            gap = differences_at(results, int(shots)).get(pair, {})
            line[heading] = difference_cell(gap)
            if shots == main:
                outcome = words.SIGN_WORDS[words.sign_of(gap.get("ci95"))]
        lines.append(line | {f"at {shots_words(main)}": outcome})
    return table_of(lines)


# -- guarantees and choices ------------------------------------------------------------------------


def guarantees(results: RunResults) -> Table:
    """Return what the guard decided at each budget in each seed, and what is guaranteed."""
    lines = []
    for seeds in guard_by_budget(results):
        line = {"budget": quantity(seeds[0]["budget_ms"], unit_of(results))}
        line["decision"] = "\n".join(row["reason"] for row in seeds)
        if "level" in seeds[0]:
            deployed = [row for row in seeds if row["deployed"]]
            line["margin"] = number(mean_of(deployed, "margin"), ".0%")
            line["on time"] = number(mean_of(seeds, "satisfaction_deployed"), ".1%")
            line[f"{100 * seeds[0]['level']:g}% on time"] = promise(seeds)
        lines.append(line)
    return reworded(table_of(lines, wordy=[1, 4]), unit_of(results))


SETTINGS = {
    "ridge": "penalty",
    "kernel_ridge": "squared width of the kernel, penalty",
    "knn": "neighbours, whether features are weighted",
    "random_forest": "smallest leaf",
    "gradient_boosting": "number of trees",
}
"""Expert → its settings, in words."""


def chosen(results: RunResults) -> Table:
    """Return the weight of each member of the teacher, and its settings; no rows for a network
    alone."""
    seeds = results["chosen"]
    lines = []
    for name in seeds[0]["weights"]:
        values = [str(seed["settings"][name]) for seed in seeds if name in seed["settings"]]
        line = {"member": policy_name(name)}
        line["weight, in each seed"] = ", ".join(f"{seed['weights'][name]:.1%}" for seed in seeds)
        line["settings"] = SETTINGS.get(name, "")
        line["values, in each seed"] = "\n".join(dict.fromkeys(values))
        lines.append(line)
    # the network may be the only member
    return table_of(lines if len(lines) > 1 else [], wordy=[2, 3])


# -- on the terminal -------------------------------------------------------------------------------


def print_table(console: Console, table: Table) -> None:
    """Print a table; a terminal gets no small print, and no columns in `MINOR`, and is told so."""
    printed = RichTable(
        box=None, header_style="bold", pad_edge=False, collapse_padding=console.is_terminal
    )
    columns = list(range(len(table.header)))
    minor = {*MINOR, *(in_words(title, "") for title in MINOR)}
    wide = Console(file=console.file, width=400)
    if console.is_terminal:
        columns = [column for column in columns if table.header[column] not in minor]
        wide = console
    for column in columns:
        title = table.header[column]
        if column == 0:  # it names the row
            printed.add_column(title, overflow="fold", no_wrap=True)
        else:
            printed.add_column(title, overflow="fold", justify="right")
    for i, row in enumerate(table.rows):
        cells = [row[column] for column in columns]
        if console.is_terminal:
            cells = [text.split("\n")[0] for text in cells]
        # small print goes behind the number
        visible = [text.replace("\n", " ") for text in cells]
        printed.add_row(*visible, style="bold" if i in table.strong else None)
    wide.print(printed, markup=False, highlight=False)
    left_out = [title for title in table.header if title in minor]
    if "\n" in "".join(itertools.chain(*table.rows)):
        left_out.append("intervals")
    if console.is_terminal and left_out:
        print_lines(console, [f"(left out, but not in a file or pipe: {', '.join(left_out)})"])


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print sentences; only a terminal breaks long ones."""
    for line in filter(None, lines):
        console.print(line, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def print_sections(console: Console, sections: Mapping[str, Sequence[Any]]) -> None:
    """Print the sentences and tables of a page, see `knobwise.experiments.report.page`: heading →
    blocks. A list of sentences has a dash before each."""
    for heading, blocks in sections.items():
        if any(blocks):
            console.print(f"\n{heading}", style="bold", markup=False, highlight=False)
        for block in blocks:
            if isinstance(block, Table):
                print_table(console, block)
            elif isinstance(block, Folded):
                print_sections(console, {block.title: block.blocks})
            elif isinstance(block, str):
                print_lines(console, [block])
            elif isinstance(block, list):
                print_lines(console, [f"- {line}" for line in block])
