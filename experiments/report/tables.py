"""The tables of a run that the terminal and the report share, and how a terminal prints them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from knobwise.experiments.report import words
from knobwise.experiments.report.words import (
    cell,
    difference_cell,
    number,
    policy_name,
    quantity,
    shots_words,
)
from knobwise.experiments.results.problem import (
    DECISION,
    DEMONSTRATIONS,
    Metric,
    problem_of,
    shown_at,
)

if TYPE_CHECKING:
    from rich.console import Console


class Table(NamedTuple):
    """Cells under headings; the text after a line break in a cell is small print."""

    header: list[str]
    rows: list[list[str]]
    strong: Collection[int] = ()
    """The indices of the rows in bold."""
    wordy: Collection[int] = ()
    """The indices of the columns that hold sentences."""


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
    cells = [[policy_name(row["policy"]), *_metrics(results, row, problem.metrics)] for row in rows]
    return Table(["policy", *_names(problem.metrics)], cells, _trained(results, rows))


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
    metrics = [metric for metric in problem_of(results).metrics if metric is not DECISION]
    rows = results.get("by_dataset", [])
    cells = []
    before = None
    for row in rows:
        title = ""
        if row["dataset"] != before:  # the name stands in the first row of a data set
            title = f"{row['dataset']}\n{row['samples']} samples"
        before = row["dataset"]
        cells.append([title, policy_name(row["policy"]), *_metrics(results, row, metrics)])
    return Table(["data set", "policy", *_names(metrics)], cells, _trained(results, rows))


def _names(metrics: Iterable[Metric]) -> list[str]:
    return [metric.name for metric in metrics]


def _metrics(results: Mapping[str, Any], row: words.Row, metrics: Iterable[Metric]) -> list[str]:
    """Return the cells of a row."""
    return [cell(row, metric, words.unit_of(results)) for metric in metrics]


def _trained(results: Mapping[str, Any], rows: Iterable[words.Row]) -> list[int]:
    """Return the indices of the rows of policies that the run trained."""
    trained = problem_of(results).trained
    return [i for i, row in enumerate(rows) if row["policy"] in trained]


def by_budget(results: Mapping[str, Any]) -> Table:
    """Return a row for every policy with a cell for each budget: the score with its interval, and
    in small print what was spent for it."""
    problem = problem_of(results)
    unit = words.unit_of(results)
    budgets = problem.judged_at(results)
    ranked = words.ranked(results, problem.ranked_by)
    cells = []
    for policy in ranked:
        line = [policy_name(policy["policy"])]
        for budget in budgets:
            row = problem.row(results, policy["policy"], budget)
            # the score in large, all else in small print
            score = number(row.get(problem.score), ".3f")
            score += words.interval(row.get(f"{problem.score}_ci95"), ".3f")
            accuracy = number(row.get("accuracy"), ".3f")
            latency = quantity(row.get("latency_ms_mean"), unit)
            if problem.equal_latency:
                parts = [score, latency, number(row.get("over_static_mix"), "+.3f", " over mix")]
                if words.known(row.get("price")):
                    parts.append(f"λ = {row['price']:.3g} per {unit}")
            else:
                on_time = number(row.get("satisfaction"), ".1%", " on time")
                parts = [score, f"{accuracy} · {latency}", on_time]
            line.append("\n".join(parts))
        cells.append(line)
    # the share is the same for all policies
    infeasible = []
    for budget in budgets:
        row = problem.row(results, ranked[0]["policy"], budget)
        infeasible.append(number(row.get("infeasible"), ".1%"))
    if any(words.known(row.get("infeasible")) for row in results["rows"]):
        cells.append(["infeasible\nlate under every configuration", *infeasible])
    header = ["policy", *(quantity(budget, unit) for budget in budgets)]
    return Table(header, cells, _trained(results, ranked))


def at_shots(results: Mapping[str, Any], rows: str = "rows") -> Table:
    """Return the accuracy of every policy at every number of shots, the best at the trained number
    first.

    Args:
        rows: the key of the rows in the results: "rows", "controls" or "votes".
    """
    # policy → row, at the main number of shots and at each
    main = words.rows_at(results, shown_at(results), rows)
    at = [words.rows_at(results, shots, rows) for shots in results["shots"]]
    names = dict.fromkeys(row["policy"] for row in results.get(rows, []))
    order = sorted(names, key=lambda name: -float(main[name]["accuracy"] if name in main else -1))
    accuracy, decision = DEMONSTRATIONS.metrics
    header = ["policy", *_shots(results)]
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


def _shots(results: Mapping[str, Any]) -> list[str]:
    """Return the heads of the columns of numbers of shots."""
    trained = {results["trained_shots"]: " (trained)"}
    return [shots_words(shots) + trained.get(shots, "") for shots in results["shots"]]


def differences(
    results: Mapping[str, Any], policies: Collection[str], against: Collection[str]
) -> Table:
    """Return the differences between selectors at every number of shots, in points, and what they
    show at the one that the page is about."""
    main = shown_at(results)
    # number of shots → (policy, against) → difference
    at = {shots: words.differences_at(results, shots) for shots in (*results["shots"], main)}
    pairs = dict.fromkeys((row["policy"], row["against"]) for row in results["differences"])
    cells = []
    for pair in pairs:
        if pair[0] not in policies or pair[1] not in against:
            continue
        line = ["\nover ".join(policy_name(name, results) for name in pair)]
        for shots in results["shots"]:
            gap = at[shots].get(pair)
            line.append(difference_cell(gap["difference"], gap["ci95"]) if gap else "–")
        gap = at[main].get(pair)
        line.append(words.SIGN_WORDS[words.sign_of(gap["ci95"])] if gap else "")
        cells.append(line)
    return Table(["policy", *_shots(results), f"at {shots_words(main)}"], cells)


# -- guarantees and choices ------------------------------------------------------------------------

PROMISES = {
    "unattainable": "not possible here",
    "too_dear": "would cost too much utility",
    "unshown": "too few held-out requests to tell",
}
"""What the guard found → why a share on time is not guaranteed."""


def guarantees(results: Mapping[str, Any]) -> Table:
    """Return what the guard decided at each budget: who decides and what is guaranteed, or under
    mean budgets a reason for each seed."""
    guard = words.guarantees(results)
    unit = words.unit_of(results)
    cells = []
    for seeds in guard:
        line = [quantity(seeds[0]["budget_ms"], unit)]
        if problem_of(results).equal_latency:
            cells.append([*line, "\n".join(row["reason"] for row in seeds)])
            continue
        # seeds in which the controller decides at this budget
        deployed = [row for row in seeds if row["deployed"]]
        who = f"the controller in {len(deployed)} of {len(seeds)} seeds, else static"
        who = {0: "static", len(seeds): "the controller"}.get(len(deployed), who)
        gain, error = (100 * words.mean_of(seeds, key) for key in ("gain", "gain_se"))
        line += [who, f"{number(gain, '+.1f')} ± {number(error, '.1f')} points"]
        if "level" in seeds[0]:
            line.append(number(words.mean_of(deployed, "margin"), ".0%"))
            line.append(number(words.mean_of(seeds, "satisfaction_deployed"), ".1%"))
            line.append(_promise(seeds))
        cells.append(line)
    if problem_of(results).equal_latency:
        return Table(["mean budget", "decision"], cells, wordy=[1])
    header = ["budget", "who decides", "gain over static"]
    if guard and "level" in guard[0][0]:
        header += ["margin", "on time", f"{100 * guard[0][0]['level']:g}% on time"]
    return Table(header, cells, wordy=[1, 5])


def _promise(seeds: Sequence[words.Row]) -> str:
    """Say whether the share on time is guaranteed at a budget, or in how many seeds why not."""
    reasons = []
    for finding, why in PROMISES.items():
        count = sum(row[finding] for row in seeds)
        if count:
            reasons.append(why + f" ({count} of {len(seeds)} seeds)" * (count < len(seeds)))
    return "; ".join(reasons) or "kept"


SETTINGS = {
    "ridge": "penalty",
    "kernel_ridge": "squared width of the kernel, penalty",
    "knn": "neighbours, whether features are weighted",
    "random_forest": "smallest leaf",
    "gradient_boosting": "number of trees",
}
"""Expert → its settings, in words."""


def chosen(results: Mapping[str, Any]) -> Table:
    """Return the weight of each member of the teacher, and its settings; no rows for a network
    alone."""
    seeds = results["chosen"]
    cells = []
    for name in seeds[0]["weights"]:
        weights = ", ".join(number(seed["weights"][name], ".1%") for seed in seeds)
        values = [seed["settings"][name] for seed in seeds if name in seed["settings"]]
        settings = "\n".join(map(str, dict.fromkeys(values)))
        cells.append([policy_name(name), weights, SETTINGS.get(name, ""), settings])
    # the network is the only member
    if len(cells) < 2:
        cells = []
    header = ["member", "weight, in each seed", "settings", "values, in each seed"]
    return Table(header, cells, wordy=[2, 3])


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

    # small print goes behind the number
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
