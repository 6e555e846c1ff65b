"""Say what got slower, or faster, from one commit to another by more than its noise.

    python benchmarks/compare.py OLD NEW [SCRIPT …] [--rounds=7]

The scripts are those of this checkout (all that can run on both commits, unless some are named).
Each commit is checked out beside this one. Processes take turns, one of OLD and one of NEW in each
round; who was second is first in the next. They time our ways alone. A line is NEW's time / OLD's,
the median with its quartiles; it is slower or faster where both quartiles are on one side of 1 by
more than 3 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from timing import quartiles

FOLDER = Path(__file__).resolve().parent
SCRIPTS = ("environment", "loss", "loop", "decision", "selector")
NOISE = 0.03
Times = dict[str, list[float]]


def checked_out(commit: str, folder: Path) -> Path:
    """Check a commit out into a new folder."""
    git = ["git", "-C", str(FOLDER), "worktree", "add", "--quiet", "--detach"]
    done = subprocess.run([*git, str(folder), commit], check=False)
    if done.returncode:
        sys.exit(f"{commit}: git cannot check it out")
    return folder


def add_times(script: str, tree: Path, times: Times) -> str:
    """Run a script on the code in a folder, add its times by line, and return what went wrong."""
    words = [sys.executable, str(FOLDER / f"{script}.py"), "--ours", "--json", "--rounds=3"]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(
        words, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    for text in done.stdout.splitlines():
        line = json.loads(text)
        times.setdefault(f"{line['what']} [{line['unit']}]", []).append(line["value"])
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    return ""


def verdict_of(what: str, old: list[float], new: list[float]) -> str:
    """Compare the times of a line, and say whether they differ by more than noise."""
    pairs = zip(new, old, strict=False)
    low, ratio, high = quartiles([after / before for after, before in pairs])
    verdict = "same"
    if low > 1 + NOISE:
        verdict = "SLOWER"
    elif high < 1 - NOISE:
        verdict = "faster"
    times = f"{statistics.median(old):.4g} → {statistics.median(new):.4g}"
    return f"{verdict:7s} {what}: {times}, ratio {ratio} [{low}, {high}]"


def main() -> int:
    """Compare two commits; the exit status is 1 if anything got slower."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help="such as environment")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    slower = 0
    with tempfile.TemporaryDirectory() as folder:
        trees = {}
        try:
            for name, commit in (("old", options.old), ("new", options.new)):
                trees[name] = checked_out(commit, Path(folder) / name)
            for script in options.scripts or SCRIPTS:
                times: dict[str, Times] = {"old": {}, "new": {}}
                faults = dict.fromkeys(trees, "")
                order = list(trees)
                for _ in range(options.rounds):
                    for name in order:
                        faults[name] = add_times(script, trees[name], times[name])
                    # a machine that gets slower or faster favours neither
                    order.reverse()
                    if any(faults.values()) and not all(times.values()):
                        break
                for name, fault in faults.items():
                    if fault:
                        print(f"{script}, {name}: {fault}", flush=True)
                for what in times["old"].keys() & times["new"].keys():
                    line = verdict_of(what, times["old"][what], times["new"][what])
                    slower += line.startswith("SLOWER")
                    print(line, flush=True)
        finally:
            for tree in trees.values():
                remove = ["git", "-C", str(FOLDER), "worktree", "remove", "--force", str(tree)]
                subprocess.run(remove, check=False)
    return min(slower, 1)


if __name__ == "__main__":
    sys.exit(main())
