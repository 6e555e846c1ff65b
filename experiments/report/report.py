"""The results of a finished run, on the terminal and as `report.html`.

Reads only the files that the run left in its folder (`results.json`, `metrics.csv`, `config.yaml`), so that a report
can be written again at any time. The words of the page are in `templates/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knobwise.agents.selector.baselines import SIMPLE
from knobwise.experiments.report import result_charts as drawn
from knobwise.experiments.report import tables, words
from knobwise.experiments.report.page import render_page
from knobwise.experiments.report.result_charts import result_images as result_images
from knobwise.experiments.report.tables import print_lines
from knobwise.experiments.report.tables import print_table as print_table
from knobwise.experiments.report.training_curves import training_curves
from knobwise.experiments.report.verdicts import verdict
from knobwise.experiments.report.words import POLICIES, listed, policy_name, quantity, shots_words
from knobwise.experiments.results.problem import CONTROLS, LEARNED, problem_of, shown_at

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
    problem, config = problem_of(results), folder / "config.yaml"
    name = f"{folder.parent.name} / {folder.name}"
    sections = _of_budgets(results) if problem.averaged else _of_shots(results)
    return render_page(
        folder / "report.html",
        "report.html.j2",
        title=f"knobwise: {name}",
        name=name,
        problem=problem,
        facts=facts(results),
        verdict=verdict(results),
        results=results,
        charts=drawn.result_charts(results),
        grpo_begins=words.grpo_begins(results),
        curves=training_curves(folder / "metrics.csv", words.grpo_begins(results)),
        command=results.get("command") or f"knobwise train experiment={folder.parent.name}",
        version=__version__,
        config=config.read_text(encoding="utf-8") if config.exists() else None,
        **sections,
    )


def print_results(results: Mapping[str, Any], console: Console) -> None:
    """The results as a table, and the verdict; without colours and frames if this is no terminal."""
    learned, table = tables.learned_name(results), tables.policies(results)
    print_table(console, table.header, table.rows, tables.narrow(results), learned)
    if results.get("by_dataset"):
        table = tables.by_dataset(results)
        few = tables.NARROW_BY_DATASET[problem_of(results).name]
        print_table(console, table.header, table.rows, few, learned, strong=1)
    print_lines(console, verdict(results))


def facts(results: Mapping[str, Any]) -> list[str]:
    """What was judged, and on which data."""
    profile, seeds = results.get("profile", {}), ", ".join(map(str, results.get("seeds", [])))
    if problem_of(results).averaged:
        return [
            f"profile {profile.get('name', 'unnamed')}: {profile.get('samples', '?')} samples × "
            f"{profile.get('configurations', '?')} configurations",
            f"judged on the {results.get('split', 'test')} split ({results.get('test_samples', '?')} samples)",
            f"seeds {seeds}",
            f"budgets {', '.join(quantity(budget, words.unit_of(results)) for budget in words.budgets_of(results))}",
        ]
    bank = f", with their own bank of {results['test_candidates']:,} candidates" if "test_candidates" in results else ""
    return [
        f"trained on {profile.get('name', 'unnamed')}: {profile.get('samples', 0):,} queries, "
        f"{profile.get('candidates', 0):,} candidates",
        f"judged on {results['test_queries']:,} held-out queries{bank}",
        f"seeds {seeds}",
        f"shots {', '.join(map(str, results['shots']))}, trained with {results['trained_shots']}",
    ]


def _of_budgets(results: Mapping[str, Any]) -> dict[str, Any]:
    """What the sections of the template need, if budgets limit latency."""
    chosen, several = results.get("chosen") or [], bool(results.get("by_dataset"))
    guard, mean = words.guarantees(results), problem_of(results).equal_latency
    stacked = bool(chosen) and len(chosen[0]["weights"]) > 1
    return {
        "policies": tables.policies(results),
        "descriptions": _descriptions(results),
        "per_budget": tables.per_budget(results),
        "by_dataset": tables.by_dataset(results) if several else None,
        "dataset_chart": drawn.by_dataset(results) if several and not mean else None,
        "guard": tables.guard(results) if guard else None,
        "level": f"{100 * guard[0][0]['level']:g}%" if guard and "level" in guard[0][0] else "",
        "chosen": chosen,
        "seeds": results.get("seeds", range(len(chosen))),
        "weights": drawn.weights(results) if stacked else None,
        "experts": tables.experts(chosen) if stacked else None,
    }


def _of_shots(results: Mapping[str, Any]) -> dict[str, Any]:
    """What the sections of the template need, if demonstrations are chosen."""
    learned = tables.differences(results, lambda policy, against: policy in LEARNED and against in LEARNED)
    left_out = {row["shots"]: row.get("queries") or results["test_queries"] for row in results["rows"]}
    fewer = [f"{count:,} with {shots}" for shots, count in left_out.items() if count < results["test_queries"]]
    return {
        "policies": tables.policies(results),
        "descriptions": _descriptions(results),
        "shots": shots_words(shown_at(results)),
        "fewer": listed(fewer) if fewer else "",
        "learned": learned if learned.rows else None,
        "against_simple": tables.differences(results, lambda policy, against: against in SIMPLE),
        "votes": tables.at_shots(results, "votes") if results.get("votes") else None,
        "controls": tables.at_shots(results, "controls") if results.get("controls") else None,
        "of_controls": tables.differences(results, lambda policy, against: policy in CONTROLS),
        "hidden": listed(results.get("hidden") or ["information"]),
        "chosen": [],
    }


def _descriptions(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and description of every policy in the tables."""
    names = dict.fromkeys(row["policy"] for row in problem_of(results).rows(results))
    hidden = listed(results.get("hidden") or ["information"])
    return [
        (policy_name(name, results), POLICIES[name]["description"].format(hidden=hidden))
        for name in names
        if name in POLICIES
    ]
