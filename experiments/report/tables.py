"""The parts of a page that need no browser, and how a terminal prints them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from markupsafe import Markup
from rich.console import Console
from rich.table import Table as RichTable

from knobwise.common.words import format_number, points, quantity, setting
from knobwise.envs.tables.cost_words import in_words
from knobwise.envs.tables.units import TIMES
from knobwise.experiments.evidence.schema import RunResults
from knobwise.experiments.evidence.statistics import sign_of
from knobwise.experiments.evidence.task import TASKS, Row
from knobwise.experiments.report.sentences import texts
from knobwise.experiments.report.words import format_interval, policy_name, span

if TYPE_CHECKING:
    from knobwise.experiments.report.page import Figure


Block = Union[str, list[str], dict[str, str], "Table", "Folded", "Figure"]
"""A part of a page: a paragraph, a list, terms with their meanings, and so on."""


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
    blocks: Sequence[Block]
    open: bool = False
    """Whether they can be seen at once, on a terminal too."""


class Content(NamedTuple):
    """What a page says besides its figures; a terminal prints the open parts of it."""

    kind: str
    """What the page is, such as "run report"."""
    name: str
    """Of what it is about."""
    lead: str
    """The answer, in a sentence."""
    table: Table | None = None
    sentences: list[str] = []
    facts: list[str] = []
    """In small print under the name, a line each."""
    tiles: list[Tile] = []
    details: list[Folded] = []


def table_of(
    lines: Sequence[Mapping[str, str]], strong: Collection[str] = (), wordy: Collection[int] = ()
) -> Table:
    """Return a table from its lines, heading → cell; without lines it has no headings. A line that
    holds a name in `strong` is in bold."""
    rows = [list(line.values()) for line in lines]
    bold = [i for i, row in enumerate(rows) if not set(strong).isdisjoint(row)]
    return Table([*lines[0]] if lines else [], rows, bold, wordy)


WORDY = ("words", "setting")
"""How a column is written that holds more than a number or a name."""


def records(
    rows: Sequence[Row],
    name: str,
    unit: str = "ms",
    results: RunResults | None = None,
) -> Table:
    """Return a row for each record, with the columns that `texts.yaml` lists under this name.

    A column is `key`, `key how` or `key/interval how`. A key may lead into a record in the record,
    as in `policy.accuracy`; how is a format such as `.2f`, or one of the words in `_formatted`.
    Policies are named as in these results.
    """
    columns = texts()["tables"][name]
    wordy = [i for i, column in enumerate(columns.values()) if column.endswith(WORDY)]
    lines = []
    for row in rows:
        line = {}
        for heading, column in columns.items():
            keys, _, how = column.partition(" ")
            key, _, interval_key = keys.partition("/")
            value: Any = row
            for part in key.split("."):
                value = (value or {}).get(part)
            if how == "policy":
                value = policy_name(value, results)
            line[heading] = _formatted(value, row.get(interval_key), how, unit)
        lines.append(line)
    return table_of(lines, wordy=wordy)


def _formatted(value: Any, ci95: Sequence[float] | None, how: str, unit: str) -> str:
    """Return the text of a cell: a value, and its interval if it has one."""
    match how:
        case _ if value is None or value == "":
            return "–"
        case "setting":
            return setting(value)
        case "quantity":
            return quantity(value, unit) + format_interval(ci95, ".3g")
        case "points":
            return points(value, ".1f") + span(ci95).replace(" ", "\n", 1)
        case "" | "policy" | "words":
            return str(value)
    return format_number(value, how) + format_interval(ci95, how)


def gain_tile(meaning: str, difference: float | None, ci95: Sequence[float] | None) -> Tile:
    """Return the tile of a difference, in points, with its interval."""
    return Tile(f"{points(difference)} points", meaning, span(ci95).strip(), not sign_of(ci95))


OURS = ("policy", "decision")
"""The columns whose cells hold our words, and no names of the profile."""


def reword_costs(block: Any, unit: str) -> Any:
    """Return a block of a page, or several of them, with what is said of latencies said of costs in
    this unit, see `knobwise.envs.tables.cost_words.in_words`. Charts say it themselves."""
    if unit in TIMES or isinstance(block, Markup):
        return block
    if isinstance(block, str):
        return in_words(block, unit)
    if isinstance(block, dict):
        return {in_words(key, unit): reword_costs(value, unit) for key, value in block.items()}
    if isinstance(block, Table):
        ours = [column for column, title in enumerate(block.header) if title in OURS]
        rows = [list(row) for row in block.rows]
        for row, column in itertools.product(rows, ours):
            row[column] = in_words(row[column], unit)
        return block._replace(header=reword_costs(block.header, unit), rows=rows)
    if isinstance(block, list):
        return [reword_costs(part, unit) for part in block]
    if hasattr(block, "_asdict"):
        return block._replace(**reword_costs(block._asdict(), unit))
    return block


# -- on the terminal -------------------------------------------------------------------------------

METRICS = itertools.chain.from_iterable(task.metrics for task in TASKS.values())
MINOR = tuple(dict.fromkeys(metric.name for metric in METRICS if metric.minor))
"""The columns that a terminal leaves out."""


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


def print_sections(console: Console, sections: Mapping[str, Sequence[Block | None]]) -> None:
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


def print_content(console: Console, content: Content) -> None:
    """Print the table, what is open of the details, the answer and the sentences."""
    if content.table is not None:
        print_table(console, content.table)
    for part in content.details:
        if part.open:
            print_sections(console, {part.title: part.blocks})
    print_lines(console, [content.lead, *content.sentences])
