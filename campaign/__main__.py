"""`python -m campaign kills=200 inputs=20000 seed=0 folder=runs/campaign jobs=1 only=`: repeat it
to go on.

`only` is a part of a kind's name, such as `mutation` or `kill: update`. Each trial is a line in
`trials.jsonl`.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from pathlib import Path

from campaign import ROOT, children
from campaign.formats import FORMATS, OUTCOMES, Mutations
from campaign.kills import BY_NAME, kill_trial, reference_of
from campaign.limits import LIMITS, limit_trial
from campaign.workloads import WORKLOADS
from knobwise.common.progress import progress

DEFAULTS = {
    "kills": 200,
    "inputs": 20_000,
    "seed": 0,
    "folder": "runs/campaign",
    "jobs": 1,
    "only": "",
}
CHUNK = 250
COLUMNS = {
    "fine": "fine",
    "refused": "refused in one line",
    "vague": "refused otherwise",
    "traceback": "tracebacks",
    "hang": "hangs",
    "wrong": "wrong accepts",
    "unlike": "unlike the unbroken run",
    "leftovers": "leftovers",
}


def _rows(path):
    """What the lines of a file hold; none where there is no file."""
    return map(json.loads, path.read_text().splitlines()) if path.exists() else ()


class Campaign:
    """The trials, and what came of those that were made.

    Args:
        folder: of `trials.jsonl`, and of the files of trials while they run.
    """

    def __init__(self, kills, inputs, seed, folder, only):
        self.seed, self.folder = seed, Path(folder).absolute()
        self.work, self.path = self.folder / "work", self.folder / "trials.jsonl"
        self._lock, self._references = threading.Lock(), {}
        self._making = {workload.name: threading.Lock() for workload in WORKLOADS}
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)
        plan = Counter()
        for i in range(kills):
            kind = "torn" if i // len(WORKLOADS) % 3 == 2 else "kill"
            plan[f"{kind}: {WORKLOADS[i % len(WORKLOADS)].name}"] += 1
        for number, name in enumerate(FORMATS):
            plan[f"mutation: {name}"] = inputs // len(FORMATS) + (number < inputs % len(FORMATS))
        plan |= {f"limit: {name}": 1 for name in LIMITS}
        self.plan = {kind: count for kind, count in plan.items() if only in kind and count}
        self.made = {}
        for trial in _rows(self.path):
            if trial["seed"] == seed and trial["number"] < self.plan.get(trial["kind"], 0):
                self.made[trial["kind"], trial["number"]] = trial["outcome"], trial["note"]

    def run(self, jobs):
        """Make the trials that are missing."""
        total = sum(self.plan.values())
        with (
            progress("campaign", total, len(self.made), every_s=30) as tick,
            ThreadPoolExecutor(jobs) as pool,
        ):
            for future in [pool.submit(work) for work in self._works()]:
                while not future.done():
                    time.sleep(0.5)
                    tick(len(self.made), f"{len(self.broken())} not as promised")
                future.result()
        shutil.rmtree(self.work, ignore_errors=True)

    def _works(self):
        kills, rest = [], []
        for kind, count in self.plan.items():
            what, _, name = kind.partition(": ")
            missing = [number for number in range(count) if (kind, number) not in self.made]
            if what == "mutation":
                parts = (missing[i : i + CHUNK] for i in range(0, len(missing), CHUNK))
                rest += [(part[0], partial(self._mutations, kind, name, part)) for part in parts]
            elif what == "limit":
                rest += [(CHUNK, partial(self._limit, kind, name)) for _ in missing]
            else:
                kills += [(number, partial(self._kill, kind, name, number)) for number in missing]
        # all kinds in turn, so that a campaign that is stopped has seen something of each
        for works in (kills, rest):
            yield from (work for _, work in sorted(works, key=itemgetter(0)))

    def _folder(self, kind, number):
        return self.work / f"{kind} {number}".replace(":", "").replace("/", " ")

    def _kill(self, kind, name, number):
        workload = BY_NAME[name]
        with self._making[name]:
            if name not in self._references:
                self._references[name] = reference_of(workload, self.work / f"reference {name}")
        folder = self._folder(kind, number)
        draw = random.Random(f"{self.seed} {kind} {number}")
        about = workload, self._references[name], folder, draw, kind.startswith("torn")
        self._note(kind, number, *kill_trial(*about))
        shutil.rmtree(folder, ignore_errors=True)

    def _limit(self, kind, name):
        self._note(kind, 0, *limit_trial(name, self._folder(kind, 0)))

    def _mutations(self, kind, name, numbers):
        """In a process of its own, so that a crash costs one trial."""
        while numbers:
            folder = self._folder(kind, numbers[0])
            folder.mkdir(parents=True)
            end = children.run(Mutations(name, self.seed, numbers), folder, limit_s=1800)
            made = list(_rows(folder / "outcomes.jsonl"))
            for trial in made:
                self._note(kind, *trial)
            numbers = numbers[len(made) :]
            if end.status == 1:
                raise RuntimeError(f"{kind}: {end.err}")
            if numbers:
                note = f"the process ended with {end.status}: {end.err[-300:]}"
                self._note(kind, numbers.pop(0), "traceback", note)
            shutil.rmtree(folder)

    def _note(self, kind, number, outcome, note):
        trial = {"seed": self.seed, "kind": kind, "number": number, "outcome": outcome}
        with self._lock, self.path.open("a") as file:
            file.write(json.dumps(trial | {"note": note}) + "\n")
            self.made[kind, number] = outcome, note

    def table(self):
        """A row for each kind, in Markdown."""
        counts = defaultdict(Counter)
        for (kind, _), (outcome, _) in sorted(self.made.items()):
            for row in (kind, f"**all: {kind.partition(':')[0]}**"):
                counts[row][outcome] += 1
        rows = [["kind", "trials", *COLUMNS.values()], ["---"] * (len(COLUMNS) + 2)]
        sums = sorted(counts.keys() - self.plan.keys())
        for kind in (kind for kind in [*self.plan, *sums] if kind in counts):
            rows.append([kind, counts[kind].total(), *(counts[kind][name] for name in COLUMNS)])
        return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)

    def broken(self):
        """The trials that did not end as promised."""
        return [
            f"{kind} {number}: {outcome}: {note}"
            for (kind, number), (outcome, note) in sorted(self.made.items())
            if outcome not in ("fine", "refused")
        ]


def main(words):
    given = dict(word.partition("=")[::2] for word in words)
    if unknown := given.keys() - DEFAULTS.keys():
        known = ", ".join(DEFAULTS)
        print(f"campaign: no option {', '.join(unknown)}; known are {known}", file=sys.stderr)
        return 2
    children.prepare_server()
    # numbers where the defaults are numbers
    values = {name: type(usual)(given.get(name, usual)) for name, usual in DEFAULTS.items()}
    jobs = values.pop("jobs")
    campaign = Campaign(**values)
    if not campaign.plan:
        print(f"campaign: no kind of trial has {values['only']!r} in its name", file=sys.stderr)
        return 2
    campaign.run(jobs)
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    seen = f"Commit {commit}, seed {campaign.seed}.\n\n{campaign.table()}\n"
    broken = campaign.broken()
    (campaign.folder / "table.md").write_text(seen)
    (campaign.folder / "broken.txt").write_text("".join(f"{line}\n" for line in broken))
    print(f"{seen}\n{len(broken)} trials did not end as promised, see broken.txt")
    return bool(broken)


assert {*OUTCOMES} <= {*COLUMNS}
if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "disabled")
    sys.exit(main(sys.argv[1:]))
