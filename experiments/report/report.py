"""Show finished runs: on the terminal, as a page, and as pictures for W&B; `knobwise compare`.

A page is made from the files in the folders of runs alone (`results.json`, `metrics.csv`,
`config.yaml`, `decisions.parquet`), so it can be written again at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from knobwise.common.files import write_json
from knobwise.experiments.evidence.results import read_results
from knobwise.experiments.evidence.schema import RunResults
from knobwise.experiments.evidence.statistics import Difference
from knobwise.experiments.report.comparison import Comparison, read_comparison
from knobwise.experiments.report.runs import Run
from knobwise.experiments.report.sections import page_content
from knobwise.experiments.report.tables import print_content
from knobwise.experiments.report.words import shown_by
from knobwise.experiments.settings.comparison_options import CompareRun


def write_report(run_folder: str | Path) -> Path:
    """Write `report.html` into the folder of a run and return its path.

    Raises:
        InputError: there is no `results.json`, or it does not hold the results of a run.
    """
    folder = Path(run_folder).resolve()
    run = Run(read_results(folder), f"{folder.parent.name} / {folder.name}", folder)
    return write_page(Comparison([run]), folder / "report.html")


def write_page(comparison: Comparison, path: str | Path) -> Path:
    """Write the page of one run or of several, and return its path."""
    # altair is slow to load
    from knobwise.experiments.report.figures import figures_of
    from knobwise.experiments.report.page import render_page

    figures = {heading: [figure] for heading, figure in figures_of(comparison).items()}
    return render_page(path, page_content(comparison), figures)


def print_results(results: RunResults, console: Console) -> None:
    """Print the table and the verdict; without colours and frames if this is not a terminal."""
    print_comparison(Comparison([Run(results)]), console)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the table, what is open of the details, and the sentences of a page."""
    print_content(console, page_content(comparison))


def result_images(results: RunResults) -> dict[str, bytes]:
    """Draw the figures as pictures (PNG), for W&B: heading → bytes."""
    from knobwise.experiments.report.figures import figures_of
    from knobwise.experiments.report.page import png

    figures = figures_of(Comparison([Run(results)]))
    return {name: png(figure) for name, figure in figures.items()}


# -- knobwise compare ------------------------------------------------------------------------------


def compare(config: CompareRun) -> Comparison:
    """Read runs, print what differs, and write the page and the numbers. Every run is compared with
    the first one; why some are not tested is said.

    Raises:
        InputError: see `read_comparison`; nothing has been written then.
    """
    comparison = read_comparison(config.runs)
    # the page first: it reads further files
    if config.html is not None:
        write_page(comparison, config.html)
    write_json(config.json, json_content(comparison))
    print_comparison(comparison, Console())
    for output, path in (("page", config.html), ("numbers", config.json)):
        if path is not None:
            print(f"{output}: {path}")
    return comparison


def json_content(comparison: Comparison) -> dict[str, object]:
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
        "notes": list(map(str, comparison.notes)),
    }


def _plain(family: Sequence[Difference]) -> list[dict[str, object]]:
    return [asdict(difference) | {"shown": shown_by(difference)} for difference in family]
