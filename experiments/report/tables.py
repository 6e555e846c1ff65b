"""The tables of a run that the terminal and the report share, and how a terminal prints them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable

from knobwise.experiments.report import words
from knobwise.experiments.report.sentences import promise
from knobwise.experiments.report.words import (
    cell,
    difference_cell,
    in_seeds,
    number,
    policy_name,
    quantity,
    shots_words,
)
from knobwise.experiments.results.problem import (
    DECISION,
    FEASIBLE,
    FREE,
    GAP,
    Results,
    Row,
    problem_of,
    shown_at,
)


class Table(NamedTuple):
    """Cells under headings; the text after a line break in a cell is small print."""

    header: list[str]
    rows: list[list[str]]
    strong: Collection[int] = ()
    """The indices of the rows in bold."""
    wordy: Collection[int] = ()
    """The indices of the columns that hold sentences."""


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


NARROW = {"deadline": (0, 1, 3, 6, 8), "mean": (0, 1, 3, 5, 6)}
"""Kind of problem → the columns of `policies` that a terminal always has."""
NARROW_BY_DATASET = {"deadline": (0, 1, 2, 4, 7), "mean": (0, 1, 2, 4)}
"""Kind of problem → the columns of `by_dataset` that a terminal always has."""


def policies(results: Results) -> Table:
    """Return a row for every policy, the best first: its metrics, or its accuracy at every number
    of shots."""
    if not problem_of(results).averaged:
        return by_place(results)
    rows = words.ranked(results)
    lines = [{"policy": policy_name(row["policy"])} | _metrics(results, row) for row in rows]
    return table_of(lines, _trained(results))


def narrow(results: Results) -> Collection[int]:
    """Return the columns of `policies` that a terminal always has."""
    problem = problem_of(results)
    if problem.averaged:
        return NARROW[problem.name]
    # what is judged at the trained number of shots, and at the largest or smallest
    trained = 1 + results["shots"].index(shown_at(results))
    last = len(results["shots"])
    return tuple(dict.fromkeys((0, trained, last)))


def by_dataset(results: Results) -> Table:
    """Return the most important policies in each data set; no rows if there is only one data
    set."""
    lines = []
    for row in results.get("by_dataset", []):
        title = f"{row['dataset']}, {row['samples']} samples"
        line = {"data set": title, "policy": policy_name(row["policy"])} | _metrics(results, row)
        line.pop(DECISION.name)
        lines.append(line)
    return table_of(lines, _trained(results))


def _metrics(results: Results, row: Row) -> dict[str, str]:
    """Return the cells of a row."""
    unit = words.unit_of(results)
    return {metric.name: cell(row, metric, unit) for metric in problem_of(results).metrics}


def _trained(results: Results) -> list[str]:
    """Return the names of the policies that the run trained; of selectors the one that stands for
    the run."""
    problem = problem_of(results)
    if problem.averaged:
        return list(map(policy_name, problem.trained))
    return [policy_name(problem.main_policy(results) or "", results)]


def by_place(results: Results, rows: str = "rows") -> Table:
    """Return a row for every policy, the best first, with a cell for each budget or number of
    shots: the score with its interval, and in small print what was spent for it.

    Args:
        results: the content of `results.json`.
        rows: the key of the rows in the results: "rows", of selectors also "controls" or "votes".
    """
    problem = problem_of(results)
    unit = words.unit_of(results)
    # all metrics but those that need another policy or no budget
    score, *others = [m for m in problem.metrics if m not in (FREE, GAP, FEASIBLE, DECISION)]
    main = words.rows_at(results, problem.main_place(results), rows)
    places = _places(results)
    rows_at = {place: words.rows_at(results, place, rows) for place in places}
    header = ["policy", *places.values()]
    timed = rows == "rows" and not problem.averaged
    if timed:
        header.append(DECISION.name)
    lines = []
    # policies that were not judged at the main place come last
    every = (*words.ranked(results, rows), *results.get(rows, []))
    for policy in dict.fromkeys(row["policy"] for row in every):
        line = [policy_name(policy, results)]
        for at_place in rows_at.values():
            row = at_place.get(policy, {})
            # the score in large, all else in small print
            text = cell(row, score)
            for metric in others:
                text += f"\n{metric.name} {cell(row, metric, unit)}"
            if words.known(row.get("price")):
                text += f"\nλ = {row['price']:.3g} per {unit}"
            line.append(text)
        if timed:
            line.append(cell(main.get(policy, {}), DECISION))
        lines.append(line)
    trained = _trained(results)
    strong = [i for i, (name, *_) in enumerate(lines) if name in trained]
    if FEASIBLE in problem.metrics:
        # the share of infeasible requests is the same for all policies
        firsts = [next(iter(at_place.values())) for at_place in rows_at.values()]
        shares = [number(row.get("infeasible"), ".1%") for row in firsts]
        lines.append(["infeasible\nlate under every configuration", *shares])
    return Table(header, lines, strong)


def _places(results: Results) -> dict[float, str]:
    """Return the budgets or numbers of shots → headings of their columns."""
    key = problem_of(results).place
    places = {row[key] for row in results["rows"]} - {None}
    trained = {results.get("trained_shots"): " (trained)"}
    return {
        place: words.place_words(results, place) + trained.get(place, "")
        for place in sorted(places)
    }


def differences(results: Results, policies: Collection[str], against: Collection[str]) -> Table:
    """Return the differences between selectors at every number of shots, in points, and what they
    show at the one that the page is about."""
    # (policy, against) → number of shots → difference
    pairs: dict[tuple[str, str], dict[float, Row]] = {}
    for row in results["differences"]:
        if row["policy"] in policies and row["against"] in against:
            pairs.setdefault((row["policy"], row["against"]), {})[row["shots"]] = row
    main = shown_at(results)
    lines = []
    for pair, gaps in pairs.items():
        line = {"policy": "\nover ".join(policy_name(name, results) for name in pair)}
        for shots, heading in _places(results).items():
            line[heading] = difference_cell(gaps.get(shots, {}))
        sign = words.sign_of(gaps.get(main, {}).get("ci95"))
        lines.append(line | {f"at {shots_words(main)}": words.SIGN_WORDS[sign]})
    return table_of(lines)


# -- guarantees and choices ------------------------------------------------------------------------


def guarantees(results: Results) -> Table:
    """Return what the guard decided at each budget: who decides and what is guaranteed, or under
    mean budgets a reason for each seed."""
    unit = words.unit_of(results)
    lines = []
    for seeds in words.guarantees(results):
        budget = quantity(seeds[0]["budget_ms"], unit)
        if problem_of(results).equal_latency:
            reasons = "\n".join(row["reason"] for row in seeds)
            lines.append({"mean budget": budget, "decision": reasons})
            continue
        # seeds in which the controller decides at this budget
        deployed = [row for row in seeds if row["deployed"]]
        who = "static"
        if deployed:
            who = f"the controller{in_seeds(len(deployed), len(seeds))}"
        error = words.points(words.mean_of(seeds, "gain_se"), ".1f")
        gained = f"{words.points(words.mean_of(seeds, 'gain'))} ± {error} points"
        line = {"budget": budget, "who decides": who, "gain over static": gained}
        if "level" in seeds[0]:
            line["margin"] = number(words.mean_of(deployed, "margin"), ".0%")
            line["on time"] = number(words.mean_of(seeds, "satisfaction_deployed"), ".1%")
            line[f"{100 * seeds[0]['level']:g}% on time"] = promise(seeds)
        lines.append(line)
    return table_of(lines, wordy=[1, 5])


SETTINGS = {
    "ridge": "penalty",
    "kernel_ridge": "squared width of the kernel, penalty",
    "knn": "neighbours, whether features are weighted",
    "random_forest": "smallest leaf",
    "gradient_boosting": "number of trees",
}
"""Expert → its settings, in words."""


def chosen(results: Results) -> Table:
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


def print_table(console: Console, table: Table, few: Collection[int] = ()) -> None:
    """Print a table. A terminal gets the columns `few`, the most important first, or all, and as
    many others as fit, without small print if need be; a line says what is left out."""
    titles = table.header
    every = range(len(titles))
    few = few or every
    # small print goes behind the number
    cells = []
    for row in table.rows:
        cells.append([text.replace("\n", " ") for text in row])
    header = titles
    columns = set(every)
    left_out = []
    if console.is_terminal:
        if _width([titles, *cells], few) > console.width:
            cells = []
            for row in table.rows:
                cells.append([text.split("\n")[0] for text in row])
            left_out = ["intervals"]
        columns = set()
        # headings of several lines if more columns fit then
        for lines in (titles, [title.replace(" ", "\n") for title in titles]):
            fitting = set[int]()
            for column in (*few, *every):
                if _width([lines, *cells], fitting | {column}) <= console.width:
                    fitting.add(column)
            if len(fitting) > len(columns):
                header = lines
                columns = fitting
        left_out = [titles[i] for i in every if i not in columns] + left_out
    printed = RichTable(box=None, header_style="bold", pad_edge=False)
    wide = Console(file=console.file, width=400)
    if console.is_terminal:
        printed.box = box.SIMPLE_HEAD
        wide = console
    for column in sorted(columns):
        printed.add_column(header[column], justify="right" if column else "left", no_wrap=True)
    for i, line in enumerate(cells):
        visible = [line[column] for column in sorted(columns)]
        printed.add_row(*visible, style="bold" if i in table.strong else None)
    wide.print(printed, markup=False, highlight=False)
    if left_out:
        print_lines(console, [f"left out at {console.width} columns: {', '.join(left_out)}"])


def _width(rows: Iterable[Sequence[str]], columns: Collection[int]) -> int:
    """Return how many characters of a line the columns take, with three between any two."""
    widest = dict.fromkeys(columns, 0)
    for row in rows:
        for column in columns:
            lines = row[column].split("\n")
            widest[column] = max(widest[column], *map(cell_len, lines))
    return sum(widest.values()) + 3 * len(widest) - 1


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
