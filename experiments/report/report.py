"""Show finished runs: on the terminal, as a page, and as pictures for W&B.

A page is made from the files in the folders of runs alone (`results.json`, `metrics.csv`,
`config.yaml`, `decisions.parquet`), so it can be written again at any time.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from knobwise.experiments.compare.comparison import Comparison
from knobwise.experiments.compare.runs import Run
from knobwise.experiments.evidence.results import read_results
from knobwise.experiments.evidence.schema import RunResults
from knobwise.experiments.report.content import content_of
from knobwise.experiments.report.details import details
from knobwise.experiments.report.tables import print_content
from knobwise.experiments.wording.sentences import verdict as verdict


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

    sections = {heading: [figure] for heading, figure in figures_of(comparison).items()}
    content = content_of(comparison)._replace(details=details(comparison))
    return render_page(path, content, sections)


def print_results(results: RunResults, console: Console) -> None:
    """Print the table and the verdict; without colours and frames if this is not a terminal."""
    print_comparison(Comparison([Run(results)]), console)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the table, what is open of the details, and the sentences of a page."""
    print_content(console, content_of(comparison)._replace(details=details(comparison)))


def result_images(results: RunResults) -> dict[str, bytes]:
    """Draw the figures as pictures (PNG), for W&B: heading → bytes."""
    from knobwise.experiments.report.figures import figures_of
    from knobwise.experiments.report.page import png

    figures = figures_of(Comparison([Run(results)]))
    return {name: png(figure) for name, figure in figures.items()}
