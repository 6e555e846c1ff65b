"""Show the results of a finished run: in sentences, on the terminal and as `report.html`.

A report is made from the files in the run's folder alone (`results.json`, `metrics.csv`,
`config.yaml`), so it can be written again at any time. This module gathers the numbers; the words
are in `templates/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knobwise.agents.selector.baselines import SIMPLE
from knobwise.common.progress import duration
from knobwise.experiments.report import charts, tables, words
from knobwise.experiments.report import result_charts as drawn
from knobwise.experiments.report.page import render_page
from knobwise.experiments.report.result_charts import result_images as result_images
from knobwise.experiments.report.tables import print_lines, print_table
from knobwise.experiments.report.training_charts import training_curves
from knobwise.experiments.report.words import (
    LEARNED,
    MIX,
    ORACLE,
    SINGLE,
    STATIC,
    TEACHER,
    policy_name,
    quantity,
)
from knobwise.experiments.results.problem import (
    DEADLINE,
    DEMONSTRATIONS,
    MEAN_BUDGET,
    problem_of,
    shown_at,
)

if TYPE_CHECKING:
    from rich.console import Console


def write_report(run_folder: str | Path) -> Path:
    """Write `report.html` into the folder of a run and return its path.

    Raises:
        InputError: there is no `results.json`, or it does not hold the results of a run.
    """
    from knobwise import __version__

    folder = Path(run_folder).resolve()
    results = words.read_results(folder)
    problem = problem_of(results)
    config = folder / "config.yaml"
    figures = list(drawn.result_charts(results).items())
    simple = drawn.baselines(results)
    return render_page(
        folder / "report.html",
        "report.html.j2",
        name=f"{folder.parent.name} / {folder.name}",
        results=results,
        problem=problem,
        verdict=verdict(results, guard=[]),  # guarantees have a section of their own
        tables=tables,
        lead_charts=dict(figures[:1]),
        other_charts=dict(figures[1:]),
        drawing=charts,
        difficulty=drawn.difficulty,
        strongest=policy_name(simple[0], results) if simple else "",
        strongest_key=simple[0] if simple else "",
        shots=None if problem.averaged else shown_at(results),
        simple=SIMPLE,
        curves=training_curves(results, folder / "metrics.csv"),
        command=results.get("command") or f"knobwise train experiment={folder.parent.name}",
        version=__version__,
        duration=duration,
        config=config.read_text(encoding="utf-8") if config.exists() else None,
    )


def print_results(results: Mapping[str, Any], console: Console) -> None:
    """Print the results as a table, and the verdict; without colours and frames if this is no
    terminal."""
    table = tables.policies(results)
    print_table(console, table.header, table.rows, tables.narrow(results), table.strong)
    if results.get("by_dataset"):
        table = tables.by_dataset(results)
        few = tables.NARROW_BY_DATASET[problem_of(results).name]
        print_table(console, table.header, table.rows, few, table.strong)
    print_lines(console, verdict(results))


# -- in sentences ----------------------------------------------------------------------------------


def verdict(results: Mapping[str, Any], **changes: Any) -> list[str]:
    """Say in sentences what the run shows, the most important first; `changes` replace numbers that
    the template needs."""
    problem = problem_of(results).name
    numbers = _NUMBERS[problem](results) | changes
    return words.sentences(f"{problem}.txt.j2", results=results, **numbers)


def on_decisions(results: Mapping[str, Any]) -> str:
    """Compare in a sentence the time of a decision with the latency. Reading features and setting
    knobs do not count, because only a live run measures them. Empty if the time is not known, or if
    the budget limits no time."""
    learned = words.means_of(results).get(LEARNED, {})
    micros = float(learned.get("decision_us_p50") or 0)
    mean = float(learned.get("latency_ms_mean") or 0)
    if words.unit_of(results) != "ms" or not micros > 0 or not mean > 0:
        return ""
    share = micros / 1e3 / mean
    return f"A decision takes {quantity(micros, 'µs')}, {share:.1%} of the mean latency."


def _under_deadlines(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers for `deadline.txt.j2`."""
    ranked = {row["policy"]: row for row in words.ranked(results)}
    learned = ranked.get(LEARNED)
    rivals = [row for name, row in ranked.items() if name not in (LEARNED, TEACHER, STATIC, ORACLE)]
    better = []
    for row in rivals:  # by more than the last digit that is printed
        if learned and round(words.value_of(row) - words.value_of(learned), 3) > 0:
            better.append(row)
    return {
        "learned": learned,
        "teacher": ranked.get(TEACHER),
        "static": ranked.get(STATIC),
        "best": next((row for name, row in ranked.items() if name != ORACLE), None),
        "rivals": rivals,
        "better": better,
        "guard": words.guarantees(results),
    }


def _under_mean_budgets(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers for `mean.txt.j2`."""
    ranked = {row["policy"]: row for row in words.ranked(results, MEAN_BUDGET.ranked_by)}
    if LEARNED not in ranked:
        return {"learned": None}
    budgets = MEAN_BUDGET.judged_at(results)
    tight = [MEAN_BUDGET.row(results, LEARNED, budget) for budget in budgets[:2]]
    # the gain of the oracle over the best single configuration
    most = [row["oracle_accuracy"] - row["accuracy"] + row["over_best_single"] for row in tight]
    rivals = [row for name, row in ranked.items() if name not in (LEARNED, MIX, SINGLE, ORACLE)]
    better = [row["over_static_mix"] > ranked[LEARNED]["over_static_mix"] for row in rivals]
    deployed = []
    for rows in results.get("guard") or []:
        deployed += [row["deployed"] for row in rows]
    return {
        "learned": ranked[LEARNED],
        "budgets": len(budgets),
        "gains": [words.points(row["over_best_single"]) for row in tight],
        "latencies": [quantity(row["latency_ms_mean"], words.unit_of(results)) for row in tight],
        "most": list(map(words.points, most)),
        "rivals": rivals,
        "better": sum(better),
        "deployed": deployed,
    }


def _of_selectors(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers for `selector.txt.j2`."""
    shots = shown_at(results)
    policy = DEMONSTRATIONS.main_policy(results)
    rows = words.rows_at(results, shots)
    at = words.differences_at(results, shots)
    simple = drawn.baselines(results)
    with_accuracy = {
        name: f"{policy_name(name, results)} ({row['accuracy']:.3f})" for name, row in rows.items()
    }
    numbers = {
        "shots": shots,
        "policy": policy,
        "rows": rows,
        "simple": simple,
        "with_accuracy": with_accuracy,
    }
    if policy not in rows:
        return numbers
    rivals = [name for name in simple if (policy, name) in at]
    signs = {name: words.sign_of(at[policy, name]["ci95"]) for name in rivals}
    elsewhere = []
    for other in results["shots"]:
        row = words.rows_at(results, other).get(policy)
        if row and other != results["trained_shots"]:
            elsewhere.append(f"{row['accuracy']:.3f} with {other}")
    return numbers | {
        "at": at,
        "learned": list(dict.fromkeys((policy, *DEMONSTRATIONS.trained))),
        "rivals": rivals,
        "winners": [name for name in rivals if signs[name] < 0],
        "close": [with_accuracy[name] for name in rivals if signs[name] == 0],
        "elsewhere": elsewhere,
    }


_NUMBERS = {
    DEADLINE.name: _under_deadlines,
    MEAN_BUDGET.name: _under_mean_budgets,
    DEMONSTRATIONS.name: _of_selectors,
}
"""Kind of problem → the function that gathers the numbers for its sentences."""
