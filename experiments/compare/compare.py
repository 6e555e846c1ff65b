"""knobwise compare: show finished runs side by side on the terminal, as a page and as JSON, from
their folders alone.

Every run is compared with the first one. Runs that were judged on the same samples are tested in
pairs (`knobwise.experiments.compare.paired`). All other runs are shown untested, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from knobwise.common.errors import InputError
from knobwise.common.files import write_text
from knobwise.experiments.compare import words
from knobwise.experiments.compare.comparison import Comparison, comparison_of
from knobwise.experiments.compare.runs import find_runs
from knobwise.experiments.report.words import SIGN_WORDS, read_results
from knobwise.experiments.results.statistics import Difference
from knobwise.experiments.settings.options import CompareRun


def compare(config: CompareRun) -> Comparison:
    """Read runs, print what differs, and write the page and the numbers.

    Raises:
        InputError: see `comparison_of`; nothing has been written then.
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
    from rich.console import Console

    comparison = comparison_of(config.runs, config.budgets_ms)
    lines = []
    # the page first: it reads further files
    writers = {"page": (config.html, write_comparison), "numbers": (config.json, write_numbers)}
    for output, (path, write) in writers.items():
        if path is not None:
            replaced = " (the earlier one is replaced)" if Path(path).exists() else ""
            lines.append(f"{output}: {path}{replaced}")
            write(comparison, path)
    words.print_comparison(comparison, Console())
    for line in lines:
        print(line)
    return comparison


def write_comparison(comparison: Comparison, path: str | Path) -> Path:
    """Write the page and return its path."""
    from knobwise.experiments.compare import charts  # imports altair, which is slow
    from knobwise.experiments.report.page import render_page

    return render_page(path, "compare.html.j2", charts=charts, comparison=comparison, words=words)


def write_numbers(comparison: Comparison, path: str | Path) -> None:
    write_text(path, json.dumps(numbers(comparison), indent=1))


def numbers(comparison: Comparison) -> dict[str, Any]:
    """Return the content of the JSON file. Differences are `run` − `against`; `place` is a budget
    in ms or a number of shots, None for the mean over budgets."""
    return {
        "kind": comparison.problem.name,
        "reference": comparison.reference.label,
        "places": comparison.places,
        "main_place": comparison.main,
        "runs": [
            {
                "label": run.label,
                "folder": str(run.folder),
                "experiment": run.experiment,
                "profile": run.results.get("profile"),
                "seeds": run.results.get("seeds"),
                "policy": run.policy,
                "row": dict(row),
            }
            for run, row in zip(comparison.runs, comparison.rows, strict=True)
        ],
        "settings": comparison.settings,
        "comparable": [comparison.runs[i].label for i in comparison.comparable],
        "differences": _plain(comparison.differences),
        "differences_per_place": _plain(comparison.by_place),
        "differences_of_policies": _plain(comparison.by_policy),
        "notes": comparison.notes,
    }


def _plain(family: Sequence[Difference]) -> list[dict[str, Any]]:
    return [asdict(difference) | {"shown": SIGN_WORDS[difference.sign]} for difference in family]
