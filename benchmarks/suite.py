"""Run every benchmark one after the other, and keep what they print in docs/benchmarks.json.

The table of docs/speed.md has a part for each script. Run it on a quiet machine, and commit both
files:

    python benchmarks/suite.py [SCRIPT …]
    python benchmarks/suite.py --page    # the tables anew, from docs/benchmarks.json
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from knobwise.profiling.measuring.machine import cpu_name

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parent / "docs/speed.md"
RECORD = FOLDER.parent / "docs/benchmarks.json"
HEAD = "| what | time | target | ours / theirs [quartiles] |\n|---|---|---|---|\n"


def main(scripts: list[str]) -> None:
    """Run these scripts, or all, and write their tables."""
    record = json.loads(RECORD.read_text())
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    machine = f"{cpu_name()}, {os.cpu_count()} cores, {versions}"
    for script in scripts or list(record["lines"]):
        words = [sys.executable, str(FOLDER / f"{script}.py"), "--rounds=5"]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        lines = done.stdout.splitlines(keepends=True)
        rows = "".join(line for line in lines if line.startswith("| "))
        print(rows)
        cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows.splitlines()]
        record["lines"][script] = cells
        record |= {"date": time.strftime("%Y-%m-%d"), "machine": machine}
        # after each, as the whole takes a quarter of an hour
        RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        write_page(record)


def write_page(record: dict[str, Any]) -> None:
    """Write the table of a record into the page."""
    rows = HEAD
    for script, lines in record["lines"].items():
        rows += f"| **`{script}.py`** | | | |\n{rows_of(lines)}"
    before, _, rest = PAGE.read_text().partition(HEAD)
    # the table ends with an empty line
    _, _, after = f"\n{rest}".partition("\n\n")
    page = f"{before}{rows}\n{after}"
    measured = f"Measured on {record['date']}: {record['machine']}."
    PAGE.write_text(re.sub("^Measured on .*", measured, page, flags=re.MULTILINE))


def rows_of(lines: list[list[str]]) -> str:
    """Return the rows of a table; what others take is a ratio in the row of ours."""
    rows = list[list[str]]()
    for what, took, ratio, target in lines:
        if what.startswith("… beside "):
            against = f"{ratio.replace(' ×', '')} × {what.removeprefix('… beside ')}"
            rows[-1][3] += f"; {against}" if rows[-1][3] else against
        else:
            rows.append([what, took, target, ratio])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    if sys.argv[1:] == ["--page"]:
        write_page(json.loads(RECORD.read_text()))
    else:
        main(sys.argv[1:])
