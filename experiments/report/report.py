"""The results of a finished run, on the terminal and as `report.html`.

Reads only the files that the run left in its folder (`results.json`, `metrics.csv`, `config.yaml`), so that a report
can be written again at any time. The words of the page are in `templates/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knobwise.agents.selector.baselines import SIMPLE
from knobwise.experiments.report import charts, tables, words
from knobwise.experiments.report import result_charts as drawn
from knobwise.experiments.report.page import render_page
from knobwise.experiments.report.result_charts import result_images as result_images
from knobwise.experiments.report.tables import print_lines, print_table
from knobwise.experiments.report.verdicts import verdict
from knobwise.experiments.results.problem import problem_of, shown_at

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
    return render_page(
        folder / "report.html",
        "report.html.j2",
        name=f"{folder.parent.name} / {folder.name}",
        results=results,
        problem=problem,
        verdict=verdict(results),
        tables=tables,
        charts=drawn.result_charts(results),
        drawing=charts,
        strongest=drawn.strongest(results),
        shots=None if problem.averaged else shown_at(results),
        simple=SIMPLE,
        curves=drawn.training_curves(folder / "metrics.csv", words.grpo_begins(results)),
        command=results.get("command") or f"knobwise train experiment={folder.parent.name}",
        version=__version__,
        config=config.read_text(encoding="utf-8") if config.exists() else None,
    )


def print_results(results: Mapping[str, Any], console: Console) -> None:
    """The results as a table, and the verdict; without colours and frames if this is no terminal."""
    table = tables.policies(results)
    print_table(console, table.header, table.rows, tables.narrow(results), table.strong)
    if results.get("by_dataset"):
        table = tables.by_dataset(results)
        few = tables.NARROW_BY_DATASET[problem_of(results).name]
        print_table(console, table.header, table.rows, few, table.strong)
    print_lines(console, verdict(results))
