"""The tables of a run, for its report and for the terminal: cells in words, under their headings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from knobwise.experiments.report import words
from knobwise.experiments.report.words import Row, cell, interval, known, number, policy_name, quantity, shots_words
from knobwise.experiments.results.problem import DECISION, DEMONSTRATIONS, problem_of, shown_at

if TYPE_CHECKING:
    from rich.console import Console


class Table(NamedTuple):
    """Cells under headings; what follows a line break in a cell is small print."""

    header: list[str]
    rows: list[list[str]]
    strong: list[int] = []
    """Numbers of the rows that stand out."""
    words: list[int] = []
    """Numbers of the columns that hold sentences."""


NARROW = {"deadline": (0, 1, 2, 6), "mean": (0, 1, 3, 5)}
"""Columns of `policies` for a narrow terminal."""
NARROW_BY_DATASET = {"deadline": (0, 1, 2, 3, 7), "mean": (0, 1, 2, 3, 4)}
SETTINGS = {
    "ridge": "penalty",
    "kernel_ridge": "squared width of the kernel, penalty",
    "knn": "neighbours, whether features are weighted",
    "random_forest": "smallest leaf",
    "gradient_boosting": "number of trees",
}
"""The settings of each expert in a stack."""


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


def learned_name(results: Mapping[str, Any]) -> str:
    """The name of the policy that stands for the run; empty if nothing was trained."""
    policy = problem_of(results).main_policy(results)
    return "" if policy is None else policy_name(policy, results)


def per_budget(results: Mapping[str, Any]) -> Table:
    """Every policy at every budget."""
    problem, unit = problem_of(results), words.unit_of(results)
    budgets, at = words.budgets_of(results), words.at_budgets(results)
    names = [row["policy"] for row in words.ranked(results, problem.ranked_by)]
    write = _mean_budget_cell if problem.equal_latency else _deadline_cell
    cells = [[policy_name(name), *(write(at.get((name, budget), {}), unit) for budget in budgets)] for name in names]
    if any(known(row.get("infeasible")) for row in at.values()):
        shares = [number(at.get((names[0], budget), {}).get("infeasible"), ".1%") for budget in budgets]
        cells.append(["infeasible\nlate under every configuration", *shares])
    strong = [place for place, name in enumerate(names) if name in problem.trained]
    return Table(["policy", *(quantity(budget, unit) for budget in budgets)], cells, strong)


def _deadline_cell(row: Row, unit: str) -> str:
    utility = number(row.get("utility"), ".3f") + interval(row.get("utility_ci95"), ".3f")
    quality = f"{number(row.get('accuracy'), '.3f')} · {quantity(row.get('latency_ms_mean'), unit)}"
    return f"{utility}\n{quality}\n{number(row.get('satisfaction'), '.1%', ' on time')}"


def _mean_budget_cell(row: Row, unit: str) -> str:
    accuracy = number(row.get("accuracy"), ".3f") + interval(row.get("accuracy_ci95"), ".3f")
    over = number(row.get("over_static_mix"), "+.3f", " over mix")
    price = f"\nλ = {row['price']:.3g} per {unit}" if known(row.get("price")) else ""
    return f"{accuracy}\n{quantity(row.get('latency_ms_mean'), unit)}\n{over}{price}"


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


# -- the guard and the stack -------------------------------------------------------------------------------------------


def guard(results: Mapping[str, Any]) -> Table:
    """What the guard found and decided, budget by budget; no rows without a guard."""
    unit, budgets = words.unit_of(results), words.guarantees(results)
    if problem_of(results).equal_latency:
        cells = [
            [quantity(rows[0]["budget_ms"], unit), "\n".join(str(row["reason"]) for row in rows)] for rows in budgets
        ]
        return Table(["mean budget", "decision"], cells, words=[1])
    header = ["budget", "on time before", "after", "static", "price κ", "gain over static", "decision"]
    cells = []
    for rows in budgets:
        shares = (words.mean_of(rows, f"satisfaction_{when}") for when in ("before", "deployed", "static"))
        on_time = [number(share, ".1%") for share in shares]
        gain = f"{words.mean_of(rows, 'gain'):+z.3f}\n± {words.mean_of(rows, 'gain_se'):.3f}"
        price = number(words.mean_of(rows, "miss_price"), ".3g")
        cells.append([quantity(rows[0]["budget_ms"], unit), *on_time, price, gain, _decision(rows)])
    return Table(header, cells, words=[len(header) - 1])


def _decision(rows: Sequence[Row]) -> str:
    """The guard's decision and its reason; if the seeds differ, the number of seeds for each, and a reason of each."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        title = "deployed" if row["deployed"] else "fell back"
        title += ", unattainable" * row["unattainable"] + ", too dear" * row["too_dear"]
        groups.setdefault(title, []).append(row)
    reasons = [group[0]["reason"] for group in groups.values()]
    if len(groups) == 1:
        return str(reasons[0]).replace("; ", "\n", 1)
    counts = "; ".join(f"{title}: {len(group)} of {len(rows)} seeds" for title, group in groups.items())
    return "\n".join([counts, *reasons])


def experts(chosen: Sequence[Mapping[str, Any]]) -> Table:
    """The settings that each expert of the stack got in each seed."""
    cells = [
        [policy_name(name), SETTINGS.get(name, ""), "\n".join(dict.fromkeys(seed["settings"][name] for seed in chosen))]
        for name in chosen[0]["weights"]
        if name in chosen[0]["settings"]
    ]
    return Table(["expert", "settings", "values, in each seed"], cells, words=[1, 2])


# -- demonstrations ----------------------------------------------------------------------------------------------------


def at_shots(results: Mapping[str, Any], rows: str = "rows") -> Table:
    """Accuracy of every policy (or control, or vote) at every number of shots, the best at the trained one first."""
    trained, main = results["trained_shots"], words.rows_at(results, shown_at(results), rows)
    header = [f"{shots_words(n)}{' (trained)' * (n == trained)}" for n in results["shots"]]
    at = {shots: words.rows_at(results, shots, rows) for shots in results["shots"]}
    names = dict.fromkeys(row["policy"] for row in results.get(rows, []))
    order = sorted(names, key=lambda name: -float(main[name]["accuracy"] if name in main else -1))
    accuracy = DEMONSTRATIONS.metrics[0]
    cells = [
        [
            policy_name(name, results),
            *(cell(at[shots].get(name, {}), accuracy) for shots in results["shots"]),
            *([cell(main.get(name, {}), DECISION)] if rows == "rows" else []),
        ]
        for name in order
    ]
    policy = DEMONSTRATIONS.main_policy(results)
    strong = [place for place, name in enumerate(order) if name == policy]
    return Table(["policy", *header, *([DECISION.name] if rows == "rows" else [])], cells, strong)


def differences(results: Mapping[str, Any], include: Callable[[str, str], bool]) -> Table:
    """Differences at every number of shots, in points, of the pairs (policy, compared with) to include; the last column
    says what they show."""
    at = {shots: words.differences_at(results, shots) for shots in results["shots"]}
    main = at[shown_at(results)]
    pairs = dict.fromkeys((row["policy"], row["against"]) for row in results.get("differences", []))
    cells = []
    for pair in pairs:
        if not include(*pair):
            continue
        rows = [at[shots].get(pair) for shots in results["shots"]]
        line = ["–" if row is None else words.difference_cell(row["difference"], row["ci95"]) for row in rows]
        result = words.SIGN_WORDS[words.sign_of(main[pair]["ci95"])] if pair in main else ""
        cells.append([f"{policy_name(pair[0], results)}\nover {policy_name(pair[1], results)}", *line, result])
    shots = at_shots(results).header[1:-1]
    return Table(["policy", *shots, f"at {shots_words(shown_at(results))}"], cells)


# -- on the terminal --------------------------------------------------------------------------------------------------


def print_table(
    console: Console,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    few: Sequence[int],
    learned: str = "",
    strong: int = 0,
) -> None:
    """Print a table: on a narrow terminal the columns `few`, in bold the rows with `learned` in column `strong`."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    terminal = console.is_terminal
    table = Table(box=box.SIMPLE_HEAD if terminal else None, header_style="bold", pad_edge=False)
    width = console.width if terminal else 400
    columns = range(len(header)) if width >= 140 else few if width >= 90 else few[:3]
    for column in columns:
        table.add_column(header[column], justify="right" if column else "left", no_wrap=True)
    for row in rows:
        cells = [text.replace("\n", " ") for text in row]
        bold = bool(learned) and row[strong] == learned
        table.add_row(*(cells[column] for column in columns), style="bold" if bold else None)
    wide = console if terminal else Console(file=console.file, width=width)
    wide.print(table, markup=False, highlight=False)


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print sentences; only a terminal breaks long ones."""
    for line in filter(None, lines):
        console.print(line, markup=False, highlight=False, soft_wrap=not console.is_terminal)
