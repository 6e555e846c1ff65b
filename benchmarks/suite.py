"""Run every benchmark one after the other, and keep what they print in docs/benchmarks.json.

In docs/speed.md each script has its table, under its command. Run it on a quiet machine, and commit
both files:

    python benchmarks/suite.py [SCRIPT …]
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

import torch

from knobwise.profiling.measuring.machine import cpu_name

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parent / "docs/speed.md"
RECORD = FOLDER.parent / "docs/benchmarks.json"
HEAD = "| what | time | ours / theirs [quartiles] | target |\n|---|---|---|---|\n"


def main(scripts: list[str]) -> None:
    """Run these scripts, or all, and write their tables."""
    page = PAGE.read_text()
    record = json.loads(RECORD.read_text())
    for script in scripts or re.findall(r"^`python benchmarks/(\w+)\.py`$", page, re.MULTILINE):
        words = [sys.executable, str(FOLDER / f"{script}.py"), "--rounds=5"]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        lines = done.stdout.splitlines(keepends=True)
        rows = "".join(line for line in lines if line.startswith("| "))
        print(rows)
        cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows.splitlines()]
        record["lines"][script] = cells
        # the table ends with an empty line
        before, command, rest = page.partition(f"`python benchmarks/{script}.py`\n\n")
        after = rest.partition("\n\n")[2]
        page = f"{before}{command}{HEAD}{rows}\n{after}"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    machine = f"{cpu_name()}, {os.cpu_count()} cores, {versions}"
    record |= {"date": time.strftime("%Y-%m-%d"), "machine": machine}
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    measured = f"Measured on {record['date']}: {machine}."
    PAGE.write_text(re.sub("^Measured on .*", measured, page, flags=re.MULTILINE))


if __name__ == "__main__":
    main(sys.argv[1:])
