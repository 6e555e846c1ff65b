"""Run every benchmark one after the other, and keep what they say in docs/benchmarks.json.

docs/speed.md holds the tables between two comments; they are written from the JSON. Run it on a
quiet machine, and commit both files:

    python benchmarks/suite.py [--rounds=5] [SCRIPT …]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SCRIPTS = {
    "environment": "Environments",
    "loss": "GRPOLoss",
    "loop": "Training",
    "decision": "Decisions",
    "selector": "Demonstrations",
    "reading": "Reading",
    "commands": "Commands",
    "growth": "Growth",
}
"""Script → title of its table."""
FOLDER = Path(__file__).resolve().parent
DOCS = FOLDER.parent / "docs"
RECORD = DOCS / "benchmarks.json"
PAGE = DOCS / "speed.md"
BEGIN = "<!-- tables of benchmarks.json -->"
END = "<!-- end of tables -->"
Lines = list[dict[str, Any]]


def machine() -> str:
    """Return what this machine is: processor, cores, Python and torch."""
    import torch

    from knobwise.profiling.measuring.machine import cpu_name

    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{cpu_name()}, {os.cpu_count()} cores, {versions}"


def run(script: str, rounds: int) -> Lines:
    """Run a benchmark in a process of its own, show what it prints, and return its lines."""
    words = [sys.executable, str(FOLDER / f"{script}.py"), "--json", f"--rounds={rounds}"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    for line in lines:
        print("  " + row_of(line), flush=True)
    return lines


def row_of(line: dict[str, Any]) -> str:
    """Return a line as a row of a table in Markdown."""
    if "peer" in line:
        low, ratio, high = line["ratio"]
        ours = f"{ratio:g} × [{low:g}, {high:g}]"
        return f"| … beside {line['peer']} | {line['value']:g} {line['unit']} | {ours} | |"
    return f"| {line['what']} | {line['value']:g} {line['unit']} | | {line.get('target', '')} |"


def page(record: dict[str, Any]) -> str:
    """Return the tables in Markdown."""
    parts = [f"Measured on {record['date']}: {record['machine']}."]
    for script, lines in record["lines"].items():
        head = f"### {SCRIPTS[script]}\n\n`python benchmarks/{script}.py`\n"
        titles = "| what | time | ours / theirs [quartiles] | target |\n|---|---|---|---|"
        rows = [row_of(line) for line in lines]
        parts.append("\n".join([head, titles, *rows]))
    return "\n\n".join(parts)


def main() -> None:
    """Run the scripts, then write the record and the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=", ".join(SCRIPTS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    record: dict[str, Any] = {"lines": {}}
    if RECORD.exists():
        record = json.loads(RECORD.read_text())
    start = time.perf_counter()
    for script in options.scripts or SCRIPTS:
        print(f"== {script}", flush=True)
        record["lines"][script] = run(script, options.rounds)
    record["lines"] = {name: record["lines"][name] for name in SCRIPTS if name in record["lines"]}
    record |= {"date": time.strftime("%Y-%m-%d"), "machine": machine()}
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")

    # the tables stand between two comments of the page
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{page(record)}\n\n{END}{after}")
    print(f"{time.perf_counter() - start:.0f} s; see {RECORD.name} and {PAGE.name}")


if __name__ == "__main__":
    main()
