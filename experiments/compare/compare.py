"""knobwise compare: show finished runs side by side on the terminal, as a page and as JSON, from
their folders alone.

Every run is compared with the first one. Runs that were judged on the same samples are tested in
pairs (`knobwise.experiments.compare.paired`). All other runs are shown untested, with the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from knobwise.common.errors import InputError
from knobwise.common.files import write_json
from knobwise.experiments.compare import words
from knobwise.experiments.compare.comparison import Comparison
from knobwise.experiments.compare.runs import find_runs
from knobwise.experiments.evidence.results import read_results
from knobwise.experiments.evidence.statistics import Difference
from knobwise.experiments.report.tables import Folded, reworded
from knobwise.experiments.settings.options import CompareRun
from knobwise.experiments.wording.words import number, shown_by


def compare(config: CompareRun) -> Comparison:
    """Read runs, print what differs, and write the page and the numbers.

    Raises:
        InputError: see `Comparison`; nothing has been written then.
    """
    try:
        return _compare(config)
    except InputError:
        raise
    except Exception as error:
        # results of earlier versions hold no checksum that shows damage
        finished, _ = find_runs(config.runs)
        for run in finished:
            if "sha256" not in read_results(run):
                raise InputError(
                    f"{run}/results.json: does not hold results ({error}); "
                    "train or judge the run again"
                ) from error
        raise


def _compare(config: CompareRun) -> Comparison:
    comparison = Comparison(config.runs)
    # the page first: it reads further files
    if config.html is not None:
        write_comparison(comparison, config.html)
    write_json(config.json, numbers(comparison))
    words.print_comparison(comparison, Console())
    for output, path in (("page", config.html), ("numbers", config.json)):
        if path is not None:
            print(f"{output}: {path}")
    return comparison


def write_comparison(comparison: Comparison, path: str | Path) -> Path:
    """Write the page and return its path."""
    from knobwise.experiments.compare.charts import comparison_charts, forest  # altair is slow
    from knobwise.experiments.report.page import render_page

    runs = comparison.runs
    task = comparison.task
    # the first sentence stands at the head of the page
    lead, *sentences = words.verdict(comparison)
    main = words.condition_name(comparison, comparison.main)
    corrected = "p is corrected for the number of comparisons in this table."
    about_conditions = (
        f"{task.score.capitalize()} with its interval; below it the difference to the first run "
        f"in points, with its interval. {corrected}"
    )
    every_run = [ABOUT[task.name], words.results_cells(comparison), words.method(comparison)]
    tables: dict[str, list[Any]] = {
        f"Every run, {main}": every_run,
        f"Per {task.condition_words[0]}": [about_conditions, words.scores_by_condition(comparison)],
    }
    if comparison.by_policy:
        about = f"The same for every policy that both runs trained, {main}. {corrected}"
        tables["Stage by stage"] = [about, words.stages(comparison)]
    folders = {run.label: f"{run.folder} · {run.results.get('command', '')}" for run in runs}
    tables["The runs: folders and commands"] = [folders]
    settings = [words.settings_cells(comparison)] if comparison.settings else []
    sections = {
        "Differences": [forest(comparison)] if comparison.differences else [],
        "What the runs show": [sentences + comparison.notes],
        "What differs in the settings": settings,
        **{name: [figure] for name, figure in comparison_charts(comparison).items()},
        "Tables": list(itertools.starmap(Folded, tables.items())),
    }
    return render_page(
        path,
        "knobwise comparison",
        f"{len(runs)} runs",
        reworded(sections, comparison.unit),
        facts=[_facts(comparison)],
        lead=lead,
    )


ABOUT = {
    "deadline": "Means over the budgets. Utility is the accuracy of an answer on time, and 0 for a "
    "late one; attained: the share of the gain that looked predictable from the features.",
    "mean": "Means over the mean budgets. Accuracy is compared with the static mix of equal mean "
    "latency.",
    "selector": "Share of held-out queries answered right, by the policy that was best on "
    "validation.",
}
"""Kind of task → what the table of runs holds."""


def _facts(comparison: Comparison) -> str:
    """Say what the runs were judged on."""
    reference = comparison.reference
    samples = comparison.task.samples
    profile = (reference.results.get("profile") or {}).get("name", "unnamed")
    judged = number(reference.results.get(f"test_{samples}"), ",.0f")
    conditions = ", ".join(
        words.condition_name(comparison, condition) for condition in comparison.conditions
    )
    facts = (
        f"compared with {reference.label} · profile {profile} · judged on {judged} test {samples} "
        f"at {conditions}"
    )
    alike = len(comparison.comparable)
    if alike < len(comparison.runs):
        facts += f"; so were {alike} of {len(comparison.runs)} runs"
    return facts


def numbers(comparison: Comparison) -> dict[str, Any]:
    """Return the content of the JSON file. Differences are `run` − `against`; `condition` is a
    budget in ms or a number of shots, None for the mean over budgets."""
    runs = []
    for run, row in zip(comparison.runs, comparison.rows, strict=True):
        about = {
            "label": run.label,
            "folder": str(run.folder),
            "experiment": run.settings.get("experiment"),
            "profile": run.results.get("profile"),
            "seeds": run.results.get("seeds"),
            "policy": run.policy,
            "row": row,
        }
        runs.append(about)
    return {
        "kind": comparison.task.name,
        "reference": comparison.reference.label,
        "conditions": comparison.conditions,
        "main_condition": comparison.main,
        "runs": runs,
        "settings": comparison.settings,
        "comparable": [comparison.runs[i].label for i in comparison.comparable],
        "differences": _plain(comparison.differences),
        "differences_per_condition": _plain(comparison.by_condition),
        "differences_of_policies": _plain(comparison.by_policy),
        "notes": comparison.notes,
    }


def _plain(family: Sequence[Difference]) -> list[dict[str, Any]]:
    return [asdict(difference) | {"shown": shown_by(difference)} for difference in family]
