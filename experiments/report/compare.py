"""knobwise compare: show finished runs side by side on the terminal, as a page and as JSON, from
their folders alone.

Every run is compared with the first one. Runs that were judged on the same samples are tested in
pairs (`knobwise.experiments.compare.paired`). All other runs are shown untested, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from knobwise.common.files import write_json
from knobwise.experiments.compare.comparison import Comparison, read_comparison
from knobwise.experiments.evidence.statistics import Difference
from knobwise.experiments.report.report import print_comparison, write_page
from knobwise.experiments.settings.options import CompareRun
from knobwise.experiments.wording.words import shown_by


def compare(config: CompareRun) -> Comparison:
    """Read runs, print what differs, and write the page and the numbers.

    Raises:
        InputError: see `read_comparison`; nothing has been written then.
    """
    comparison = read_comparison(config.runs)
    # the page first: it reads further files
    if config.html is not None:
        write_page(comparison, config.html)
    write_json(config.json, numbers(comparison))
    print_comparison(comparison, Console())
    for output, path in (("page", config.html), ("numbers", config.json)):
        if path is not None:
            print(f"{output}: {path}")
    return comparison


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
