"""Other libraries beside ours: each learns from the same samples of a table, and all are judged on
the same test samples at the same budgets.

    python benchmarks/peers.py [--peers=PYTHON] [--keep=FOLDER] [--only=NAME,…] [TABLE …]

A table is what experiments/studies/grpo_alone.py takes; by default the built-in profile, RapidOCR
and Python files. Each is split three times. Ours is `policy=auto` with seed 0, as deployed, with
its guard; the simple ways are those of our evaluation. benchmarks/peers/choose.py says how each
library learns. It runs in an environment of benchmarks/peers/requirements.txt, which is made, or in
that of PYTHON. What is finished is kept in FOLDER, so a stopped command goes on from there.

All use one thread, and CPU time is what is timed. A way that takes more than ten minutes of it on a
split is ended, and its row says so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timing import cpu_seconds  # first, since it sets one thread, for the libraries' processes too

sys.path.append(str(Path(__file__).resolve().parent / "peers"))

import numpy as np
import polars as pl
import torch
from choose import CPU_SECONDS, LIBRARIES, decision_us, imported_mb, installed_mb

from knobwise.agents.evaluation.baselines import PredictThenChoose
from knobwise.agents.evaluation.own_cost import own_costs
from knobwise.agents.evaluation.policy import choices_of, inputs_of_rows
from knobwise.agents.problem import Problem
from knobwise.agents.teacher.experts import Experts
from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.evidence.controllers import LEARNED, evaluator_of
from knobwise.experiments.evidence.decisions import IF_FREE
from knobwise.experiments.evidence.evaluate import alone, evaluate
from knobwise.experiments.evidence.summarise import summarise, with_references, with_score_of
from knobwise.experiments.evidence.task import DEADLINE, GAP, UTILITY, Metric, over
from knobwise.experiments.settings.values import training_settings
from knobwise.experiments.studies.grpo_alone import table_named
from knobwise.experiments.train.controller import ControllerExperiment
from knobwise.experiments.train.judging import calibrate_trained, copy_policy

FOLDER = Path(__file__).resolve().parent
TABLES = ("builtin", "ocr", "experiments/studies/measured/python_files.safetensors")
SPLITS = 3
SIMPLE = {"gaussian_process": "Gaussian process, ours", "kernel_ridge": "kernel ridge, ours"}
"""Simple ways of our own evaluation, and their names in the table."""
OVER_OURS = Metric("over_ours", value=over("utility", "of_ours"))
HEADS = (
    "utility", "gap closed", "− ours", "training CPU s", "µs a decision", "MB to install",
    "MB to import",
)  # fmt: skip


@dataclass
class Replayed:
    """A policy that repeats choices [m, B] for the test samples, in their order, at budgets [B]."""

    name: str
    chosen: np.ndarray
    budgets_ms: np.ndarray
    informed = True
    """What chose read the features, so it pays for a first look as ours does."""

    def choose(self, features: Any, limits: np.ndarray, mask: Any = None) -> np.ndarray:
        return self.chosen[:, np.abs(self.budgets_ms - limits[0]).argmin()]


class Unit:
    """One split of a table: what each way learns on it and chooses.

    Args:
        number: of the split, counted from 0.
        folder: of what is finished; it may be empty.
        budgets_ms: [B]; None for those that suit the table.
        options: of our training, as `knobwise.fit` takes them.
    """

    def __init__(
        self,
        table: ProfileTable,
        number: int,
        folder: Path,
        budgets_ms: list[float] | None = None,
        **options: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.number = number
        self.began = cpu_seconds()
        settings = {
            "tracking": "disabled",
            "baselines": False,
            "seeds": [0],
            "split.seed": number,
            "budgets_ms": budgets_ms,
            **options,
        }
        self.experiment = ControllerExperiment(training_settings(settings), table)
        self.experiment.prepare()
        (self.training,) = self.experiment.splits
        self.problem: Problem = self.training.problem
        self.budgets_ms = self.training.budgets_ms
        if not self.problem.mask.all():
            sys.exit(
                f"{table.name}: has cells that nobody measured; the libraries need all of them"
            )

    def learn(self) -> None:
        """Train ours and the simple ways, and write what the libraries learn from."""
        if not (self.folder / "ours.npz").exists():
            self._train()
        for family in SIMPLE:
            if not (self.folder / f"{family}.npz").exists():
                self._fit(family)
        split = self.problem.split
        fitted, test = split.fitted, split.test
        cells = self.problem.cells
        utility = self.problem.rule.mean_utility(
            cells.accuracy[fitted][..., None],
            cells.measurements_ms[fitted][..., None, :],
            self.budgets_ms.float(),
        )
        facts = self.problem.facts
        normaliser = self.training.trainers[0].setup.controller.normaliser
        np.savez(
            self.folder / "data.npz",
            x=normaliser.of_rows(facts, fitted).numpy(),
            test_x=normaliser.of_rows(facts, test).numpy(),
            held_out=torch.isin(fitted, split.validation).numpy(),
            utility=utility.numpy(),
            knobs=facts.configurations.numpy(),
            budgets_ms=self.budgets_ms.numpy(),
        )

    def _train(self) -> None:
        """Train `policy=auto`, and export it; its decisions are timed as those of others."""
        (trainer,) = self.training.trainers
        trainer.run()
        deployed = calibrate_trained(self.training, trainer)
        seconds = cpu_seconds() - self.began
        deployed.save(self.folder / "ours.pt")
        exported = self.folder / "exported"
        exported.mkdir(exist_ok=True)
        decider = deployed.controller.export(exported / "controller.npz")
        copy_policy(exported)
        features, _ = inputs_of_rows(self.problem, self.problem.split.test)
        requests = [
            {name: block[i] for name, block in features.items()}
            for i in range(len(self.problem.split.test))
        ]
        budgets = self.budgets_ms.tolist()
        np.savez(
            self.folder / "ours.npz",
            seconds=seconds,
            micros=decision_us(
                lambda i, b: decider.decide_index(requests[i], budgets[b]),
                np.arange(len(requests)),
                len(budgets),
            ),
            installed_mb=sum(path.stat().st_size for path in exported.rglob("*.*")) / 1e6,
            imported_mb=imported_mb("policy", str(exported)),
        )

    def _fit(self, family: str) -> None:
        """Fit a simple way of our evaluation, which chooses its settings out of fold."""
        problem = self.problem
        began = cpu_seconds()
        _, normaliser, (fitted,) = Experts.fit(
            problem.facts, problem.split.fitted, self.budgets_ms, (family,), self.number,
            rule=problem.rule,
        )  # fmt: skip
        policy = PredictThenChoose(family, fitted.expert, normaliser, rule=problem.rule)
        seconds = cpu_seconds() - began
        features, mask = inputs_of_rows(problem, problem.split.test)
        budgets = self.budgets_ms.double().numpy()

        def decide(i: int, b: int) -> np.ndarray:
            request = {name: block[i : i + 1] for name, block in features.items()}
            return policy.choose(request, budgets[b : b + 1], mask[i : i + 1])

        np.savez(
            self.folder / f"{family}.npz",
            chosen=choices_of(policy, features, budgets, mask).numpy(),
            seconds=seconds,
            micros=decision_us(decide, np.arange(len(mask)), len(budgets)),
            installed_mb=np.nan,
            imported_mb=np.nan,
        )

    def let_choose(self, name: str, python: str) -> None:
        """Let a library learn and choose, in a process of its own; what ends it is noted."""
        target, failed = (self.folder / f"{name}{suffix}" for suffix in (".npz", ".failed"))
        if target.exists() or failed.exists():
            return
        words = [python, FOLDER / "peers/choose.py", name, self.folder / "data.npz", target]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"over {CPU_SECONDS} CPU s"])[-1]
            failed.write_text(last)
            print(f"{name}, split {self.number}: {last}", file=sys.stderr)

    def decisions(self, names: Sequence[str]) -> pl.DataFrame:
        """Return the decisions of ours, charged and free, of these ways, static and the oracle."""
        agent = load_checkpoint(self.folder / "ours.pt").controller
        evaluator = evaluator_of(self.problem, self.budgets_ms)
        static, *_, oracle = evaluator.references
        budgets = self.budgets_ms.double().numpy()
        others = [Replayed(name, self.result(name)["chosen"], budgets) for name in names]
        policies = {
            LEARNED: {0: evaluator.ways.deployed(agent)},
            IF_FREE: {0: agent.if_free},
            **alone([static, *others, oracle]),
        }
        (cost,) = own_costs([agent.decider], evaluator.table, evaluator.rows, evaluator.budgets_ms)
        decisions = evaluate(evaluator, policies, {LEARNED: {0: cost}})
        return decisions.with_columns(split=pl.lit(self.number, pl.Int64))

    def result(self, name: str) -> dict[str, Any]:
        """Return what a way left."""
        return dict(np.load(self.folder / f"{name}.npz"))


def judged(units: Sequence[Unit], libraries: Sequence[str]) -> list[list[str]]:
    """Return the rows of a table's ways, see `HEADS`; means over the splits."""
    known = [*SIMPLE, *libraries]
    known = [name for name in known if all((u.folder / f"{name}.npz").exists() for u in units)]
    decisions = pl.concat([unit.decisions(known) for unit in units])
    decisions = with_score_of(decisions, IF_FREE, "utility", "of_ours")
    compared = with_references(DEADLINE, decisions)
    scores = {
        row["policy"]: row
        for row in summarise(compared, [UTILITY, GAP, OVER_OURS], conditions=False)
    }
    words = {LEARNED: "ours, charged for its decisions", IF_FREE: "ours, decisions free", **SIMPLE}
    rows = []
    for name in [LEARNED, IF_FREE, DEADLINE.low, *SIMPLE, *libraries, DEADLINE.high]:
        head = words.get(name, name.replace("_", " "))
        if name not in scores:
            notes = [unit.folder / f"{name}.failed" for unit in units]
            reasons = {path.read_text() for path in notes if path.exists()} or {"not run"}
            rows.append([head, "; ".join(sorted(reasons)), *[""] * (len(HEADS) - 1)])
            continue
        rows.append([head, *cells_of(scores[name]), *costs_of_way(name, units)])
    return rows


def cells_of(score: dict[str, Any]) -> list[str]:
    """Write utility, gap closed and the difference from ours with its interval, in hundredths."""
    points = (score["over_ours"], *score["over_ours_ci95"])
    middle, low, high = (f"{100 * value:+.1f}".replace("-", "−") for value in points)
    gap = "" if score["gap_closed"] is None else f"{100 * score['gap_closed']:.0f} %"
    difference = "" if not any(points) else f"{middle} [{low}, {high}]"
    return [f"{100 * score['utility']:.1f}", gap.replace("-", "−"), difference]


def costs_of_way(name: str, units: Sequence[Unit]) -> list[str]:
    """Write CPU seconds, µs, and MB of a way, means over the splits; nothing of static and
    oracle."""
    if name in (DEADLINE.low, DEADLINE.high, IF_FREE):
        return [""] * 4
    results = [unit.result("ours" if name == LEARNED else name) for unit in units]
    keys = ("seconds", "micros", "installed_mb", "imported_mb")
    means = [float(np.mean([result[key] for result in results])) for key in keys]
    return ["" if np.isnan(mean) else f"{mean:,.{0 if mean >= 10 else 1}f}" for mean in means]


def environment(folder: Path) -> str:
    """Return the Python of a new environment with the libraries, or of that made before."""
    python = folder / "environment/bin/python"
    if not (folder / "environment/finished").exists():
        venv.create(folder / "environment", with_pip=True, clear=True)
        needed = str(FOLDER / "peers/requirements.txt")
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", needed], check=True)
        (folder / "environment/finished").touch()
    return str(python)


def main() -> None:
    """Run the command, see the top."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", default=TABLES)
    parser.add_argument("--peers", metavar="PYTHON")
    parser.add_argument("--keep", metavar="FOLDER", type=Path)
    parser.add_argument("--only", metavar="NAME,…", default=",".join(LIBRARIES))
    options = parser.parse_args()
    libraries = options.only.split(",")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        python = options.peers or environment(folder)
        print(f"To train, ours needs {installed_mb(('knobwise',)):,.0f} MB of packages.")
        for name in options.tables:
            print(f"\n{Path(name).stem}\n\n| | {' | '.join(HEADS)} |")
            print("|---" * (len(HEADS) + 1) + "|", flush=True)
            for row in judged(units_of(name, folder, libraries, python), libraries):
                print(f"| {' | '.join(row)} |", flush=True)


def units_of(name: str, folder: Path, libraries: Sequence[str], python: str) -> list[Unit]:
    """Return the splits of a table, on which every way has learned and chosen."""
    table = table_named(name)
    units: list[Unit] = []
    for number in range(SPLITS):
        # the later ones are judged at the same budgets
        budgets_ms = units[0].budgets_ms.tolist() if units else None
        unit = Unit(table, number, folder / f"{Path(name).stem}_{number}", budgets_ms)
        unit.learn()
        for library in libraries:
            unit.let_choose(library, python)
        units.append(unit)
    return units


if __name__ == "__main__":
    main()
