"""Show the content of the log of a deployed controller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from knobwise.agents.learning.logged import read_log
from knobwise.experiments.report.tables import print_lines, print_table

if TYPE_CHECKING:
    from rich.console import Console


def inspect_log(folder: str) -> dict[str, Any]:
    """Return the facts about a log, as plain values for JSON.

    Returns:
        `requests`: their number. `on_time`, `labelled`, `explored`: shares of them, the last of
        those that were not answered by the best choice. `accuracy`: mean over the labelled.
        `configurations`: label → requests. `controllers`: digest → requests. `set_aside`: reason →
        rows.

    Raises:
        InputError: there is no log in the folder.
    """
    log = read_log(folder)
    rows = log.rows
    count = max(len(rows), 1)
    accuracies = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    labels = []
    for row in rows:
        labels.append(", ".join(f"{name}={value}" for name, value in row["knobs"].items()))
    return {
        "log": folder,
        "requests": len(rows),
        "on_time": sum(row["met"] for row in rows) / count,
        "labelled": len(accuracies) / count,
        "explored": sum(row["choice"] != row["best"] for row in rows) / count,
        "accuracy": sum(accuracies) / len(accuracies) if accuracies else None,
        "configurations": dict(Counter(labels).most_common()),
        "controllers": dict(Counter(row["controller"] for row in rows)),
        "set_aside": dict(log.aside),
    }


def print_log(facts: Mapping[str, Any], console: Console) -> None:
    """Print the facts in words and a table."""
    accuracy = ""
    if facts["accuracy"] is not None:
        accuracy = f", of which {facts['accuracy']:.1%} are right"
    lines = [
        f"{facts['log']}: {facts['requests']:,} requests by {len(facts['controllers'])} "
        "controllers",
        f"{facts['on_time']:.1%} on time, {facts['labelled']:.1%} labelled{accuracy}, "
        f"{facts['explored']:.1%} explored",
    ]
    for reason, count in sorted(facts["set_aside"].items()):
        lines.append(f"{count:,} set aside: {reason}")
    print_lines(console, lines)
    total = facts["requests"]
    used = facts["configurations"].items()
    cells = [[label, f"{count:,}", f"{count / total:.1%}"] for label, count in used]
    print_table(console, ["configuration", "requests", "share"], cells, range(3))
