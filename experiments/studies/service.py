"""Requests that wait for one another: what the price of a millisecond brings, under constant and changing loads.

    python -m knobwise.experiments.studies.service checkpoint=runs/latest key=value …

Trains `experiment=service` on top of a controller, unless `run` names a finished run of it, and writes docs/service.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from knobwise.common.errors import InputError
from knobwise.common.files import write_text
from knobwise.experiments.command_line.compose import read_settings
from knobwise.experiments.command_line.sweep_jobs import train
from knobwise.experiments.report import words
from knobwise.experiments.results.problem import SERVICE, problem_of
from knobwise.experiments.studies.running import rendered, run_from_words


@dataclass
class ServiceStudyConfig:
    """The settings, each as key=value."""

    checkpoint: str = "runs/latest"
    """The controller: a checkpoint, or the folder of a run."""
    run: str | None = None
    """The folder of a finished run of experiment=service; None trains one."""
    train: list[str] = field(default_factory=list)
    """Further words of its command, such as seeds=[0]."""
    out: str = "docs/service.md"
    """The page."""


def run(config: ServiceStudyConfig) -> list[str]:
    """Train where there is no run, and write the page. Raises InputError: the run is of another experiment; or as
    `knobwise train` does."""
    folder: Any = config.run
    if folder is None:
        command = ["experiment=service", f"checkpoint={config.checkpoint}", *config.train]
        folder = train(read_settings("train_service", command), command)
    results = words.read_results(folder)
    if problem_of(results) is not SERVICE:
        raise InputError(f"run={folder}: is no run of experiment=service")
    write_text(config.out, service_page(results))
    return []


def service_page(results: dict[str, Any]) -> str:
    """docs/service.md, from the results of a run."""
    over = {(row["against"], row["load"]): row for row in results["differences"]}
    constant = [load for load in results["loads"] if (f"price_backlog_at_{load}", load) in over]
    changing = [load for load in results["loads"] if load not in constant]
    at = {(row["policy"], row["load"]): row for row in results["rows"]}
    return rendered(
        "service.md.j2",
        results=results,
        at=at,
        over=over,
        constant=constant,
        changing=changing,
        policies=[row["policy"] for row in words.ranked(results)],
        words=words,
    )


if __name__ == "__main__":
    sys.exit(run_from_words("service", ServiceStudyConfig, run, sys.argv[1:]))
