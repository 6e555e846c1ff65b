"""Say what got slower, or faster, from one commit to another by more than its noise.

    python benchmarks/compare.py OLD NEW [SCRIPT …] [--rounds=7]

The scripts are those of this checkout. Each commit is checked out beside this one. Processes take
turns, one of OLD and one of NEW in each round; who was second is first in the next. They time our
ways alone. A line is NEW's time / OLD's, the median with its quartiles; it is slower or faster
where both quartiles are on one side of 1 by more than 3 %. A script that fails on one of the
commits is named, and what it printed before on both is compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from timing import ratios

FOLDER = Path(__file__).resolve().parent
SCRIPTS = ("environment", "loss", "loop", "decision", "selector")
NOISE = 0.03


def times_of(script: str, tree: Path) -> dict[str, float]:
    """Run a script on the code in a folder, and return the time that each line says.

    If the script fails, a line says so, and the lines before count.
    """
    words = [sys.executable, str(FOLDER / f"{script}.py"), "--ours", "--rounds=3"]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(
        words, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(f"{script}, {tree.name}: {done.stderr.strip().splitlines()[-1]}", flush=True)
    # commands that are timed say something, too
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    rows = [line.split("|") for line in lines]
    return {what.strip(): float(time.split()[0]) for _, what, time, *_ in rows}


def verdict_of(what: str, old: list[float], new: list[float]) -> str:
    """Compare the times of a line, and say whether they differ by more than noise."""
    low, ratio, high = ratios(new, old)
    verdict = "same"
    if low > 1 + NOISE:
        verdict = "SLOWER"
    elif high < 1 - NOISE:
        verdict = "faster"
    times = f"{statistics.median(old):.4g} → {statistics.median(new):.4g}"
    return f"{verdict:7s} {what}: {times}, ratio {ratio:.3g} [{low:.3g}, {high:.3g}]"


def compare(script: str, trees: dict[str, Path], rounds: int) -> int:
    """Time a script on both commits, and return how many of its lines got slower."""
    times: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in trees}
    order = list(trees)
    for _ in range(rounds):
        for name in order:
            for what, time in times_of(script, trees[name]).items():
                times[name][what].append(time)
        # a machine that gets slower or faster favours neither
        order.reverse()
    slower = 0
    for what in times["old"].keys() & times["new"].keys():
        line = verdict_of(what, times["old"][what], times["new"][what])
        slower += line.startswith("SLOWER")
        print(line, flush=True)
    return slower


def main() -> int:
    """Compare two commits; the exit status is 1 if anything got slower."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", default=SCRIPTS)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    git = ["git", "-C", str(FOLDER), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        trees = {name: Path(folder) / name for name in ("old", "new")}
        try:
            for name, tree in trees.items():
                commit = getattr(options, name)
                subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
            slower = [compare(script, trees, options.rounds) for script in options.scripts]
        finally:
            for tree in trees.values():
                subprocess.run([*git, "remove", "--force", str(tree)], check=False)
    return int(any(slower))


if __name__ == "__main__":
    sys.exit(main())
