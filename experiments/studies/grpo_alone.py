"""GRPO alone against what a teacher taught, on tables of different shape.

For each table, three splits and three seeds, these ways are trained on the same samples, and judged
on the same test samples at the default budgets, decisions for free:

- `auto`: the teacher taught the heads, then GRPO near them (`policy=auto`);
- `before`: the same heads before GRPO;
- `auto regularised`: GRPO goes on from these heads as it would alone, with dropout and noise in its
  loss and the entropy of a cold start, without the KL to them; the last weights count;
- `grpo`: GRPO alone (`policy=grpo`);
- `teacher`: the teacher as it is, network and predictors;
- `even mixture`: (ln π of auto + ln π of grpo) / 2; `mixture`: with the weight, of `WEIGHTS`, that
  held-out samples prefer.

Each is judged as it decides, and *guarded* by the guard of `policy=auto`, calibrated on held-out
samples.

How they are compared was fixed before the runs:

- The *rival* on a table is the way other than `grpo` with the highest held-out utility, guarded,
  over all its splits and seeds.
- `grpo` is *not inferior* if the lower end of the 95 % interval of (grpo − rival), guarded, in
  utility on test samples, is above −0.01 on each table of more than 500 samples, and above −0.005
  for the mean over all tables. Seeds, splits and samples are resampled together; a sample that
  several splits test is drawn with all of its results.
- If so, and its CPU seconds are at most half of those of `auto`, `policy=grpo` is the default. Else
  the default is the way with the highest mean held-out utility over all tables, or the cheapest of
  those whose test utility is within −0.005 of it by the same interval.

    python experiments/studies/grpo_alone.py run RUNS TABLE … [seeds=0,1,2]
    python experiments/studies/grpo_alone.py table RUNS

A table is builtin, ocr, smollm, calibrated, useless (the same with features that say nothing), a
file that `ProfileTable.load` reads, or a folder with
table.parquet and perhaps features.npz. What is finished is kept, so a stopped command goes on.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import knobwise
from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.calibration.guard import calibrate
from knobwise.agents.calibration.training import distillation_trainer
from knobwise.agents.controller.encoders import TableEncoder
from knobwise.agents.evaluation.baselines import Oracle, fit_static
from knobwise.agents.evaluation.policy import Policy, choices_of, inputs_of_rows
from knobwise.agents.problem import Problem
from knobwise.agents.training.checkpoint import Loaded
from knobwise.agents.training.controllers import ControllerSetup, controller_trainer
from knobwise.agents.training.trainer import Trainer
from knobwise.envs.bandit.outcomes import Decisions
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.settings.choices import (
    AUTO,
    COLD_OPTIMISER,
    DISTILLED_OPTIMISER,
    GRPO,
    SAMPLED,
)
from knobwise.experiments.train.controller import width_for
from knobwise.testbeds.profiles import builtin_profile, ocr_profile, smollm_profile
from knobwise.testbeds.simulated.calibrated import simulate
from knobwise.testbeds.simulated.settings import SimulatedConfig

Array = NDArray[np.float64]
Decide = Callable[[float], Tensor]
"""A limit in ms → log-probs [n, C]."""

SIMULATED = SimulatedConfig(samples=400, grid="27", image_width=48, language_width=64)
PROFILES: dict[str, Callable[[], ProfileTable]] = {
    "builtin": builtin_profile,
    "ocr": ocr_profile,
    "smollm": smollm_profile,
    "calibrated": lambda: simulate(SIMULATED),
    "useless": lambda: simulate(replace(SIMULATED, signal=0.0)),
}
SPLITS = 3
SHARES = (0.6, 0.2)
WEIGHTS = (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0)
"""Weights of GRPO alone in a mixture."""
RESAMPLES = 4000
REFERENCES = ("static", "oracle")
WAYS = ("auto", "before", "auto regularised", "teacher", "even mixture", "mixture", "grpo")


def table_named(name: str) -> ProfileTable:
    """Read a table by its name, see the top."""
    if name in PROFILES:
        return PROFILES[name]()
    if Path(name).is_file():
        return ProfileTable.load(name)
    features = Path(name, "features.npz")
    return knobwise.read(
        Path(name, "table.parquet"), features=features if features.exists() else None
    )


# -- one split and one seed ------------------------------------------------------------------------


class Trained:
    """A way that was trained, and what it chooses.

    Args:
        trainer: its finished training.
        seconds: of the CPU.
    """

    def __init__(self, trainer: Trainer, seconds: float) -> None:
        self.setup: ControllerSetup = trainer.setup
        self.seconds = seconds
        self.order = self.setup.held_out.rows.argsort()
        problem = self.setup.problem
        self.encoder = TableEncoder(self.setup.controller, problem.facts, problem.mask)

    def held_out(self, limit: float) -> Tensor:
        """Log-probs [n, C] of the fitted samples in order, each by the network it was held out
        of."""
        return self.setup.held_out_log_probs(torch.tensor(limit))[self.order]

    @torch.no_grad()
    def test(self, limit: float) -> Tensor:
        """Log-probs [n, C] of the test samples."""
        rows = self.setup.split.test
        return self.encoder(rows, torch.full((len(rows),), limit))


def run_trainer(trainer: Trainer, began: float) -> Trained:
    """Train to the end, and load the weights that are kept."""
    trainer.run()
    return Trained(trainer, time.process_time() - began)


class Unit:
    """What one split and one seed of a table come to.

    Args:
        problem: what is learned.
        seed: of the training.
    """

    def __init__(self, problem: Problem, seed: int) -> None:
        self.problem = problem
        self.budgets_ms = problem.budgets(None)
        self.settings: dict[str, Any] = {"budgets_ms": self.budgets_ms, "seed": seed}
        self.fitted = problem.split.fitted.sort().values

    def results(self) -> dict[str, Array]:
        """Return utilities, means over the budgets: of each way held out [n], and on test samples
        free and guarded [m]; and its CPU seconds."""
        auto, before, regularised = self._taught()
        alone = self._alone()
        statics = [fit_static(self.problem.cells, fit) for fit in auto.setup.folds[0]]
        self.static_held_out = self._of_folds(auto.setup, statics, self.budgets_ms)
        self.static = fit_static(self.problem.cells, self.fitted)
        results: dict[str, Array] = {}
        trained = {"auto": auto, "before": before, "auto regularised": regularised, "grpo": alone}
        for name, way in trained.items():
            results |= self._judged(name, _greedy(way.held_out), _greedy(way.test))
            results[f"{name}/seconds"] = np.array(way.seconds)
        results |= self._teacher(auto.setup)
        results |= self._mixtures(auto, alone)
        unread = torch.zeros(len(self.budgets_ms), dtype=torch.bool)
        for name, policy in (("static", self.static), ("oracle", self._oracle())):
            chosen = self._chosen(policy, self.problem.split.test, self.budgets_ms)
            results[f"{name}/free"] = self._utility(self.problem.split.test, chosen, unread)
        return results | {"test": self.problem.split.test.numpy()}

    # -- training

    def _taught(self) -> tuple[Trained, Trained, Trained]:
        """Train with a teacher; return what it deploys, its heads before GRPO, and what GRPO makes
        of these from there on with what it has from a cold start."""
        began = time.process_time()
        policy = replace(AUTO, hidden=width_for(self.problem, self.budgets_ms, AUTO))
        trainer = distillation_trainer(
            self.problem,
            policy=policy,
            loss=SAMPLED,
            optimiser=DISTILLED_OPTIMISER,
            **self.settings,
        )
        auto = run_trainer(trainer, began)
        setup = auto.setup
        began = time.process_time()
        optimiser = replace(DISTILLED_OPTIMISER, pretrain_iterations=0, patience=0, keep="last")
        loss = replace(SAMPLED, dropout=True, entropy_coeff=0.3, kl_to_ref_coeff=0.0)
        with TemporaryDirectory() as folder:
            path = Path(folder, "before.pt")
            heads = DeployedController(setup.reference)
            facts = self.problem.facts
            Loaded(heads, facts.name, facts.digest, trainer.provenance(trainer)).save(path)
            settings = self.settings | {"policy": replace(policy, dropout=None, augment=None)}
            unlearned = replace(optimiser, iterations=0)
            before, further = (
                controller_trainer(
                    self.problem, loss=loss, optimiser=chosen, init_from=path, **settings
                )
                for chosen in (unlearned, optimiser)
            )
            return auto, Trained(before, 0.0), run_trainer(further, began)

    def _alone(self) -> Trained:
        began = time.process_time()
        trainer = controller_trainer(
            self.problem, policy=GRPO, loss=SAMPLED, optimiser=COLD_OPTIMISER, **self.settings
        )
        return run_trainer(trainer, began)

    # -- judging

    def _judged(
        self, name: str, held_out: Callable[[float], Tensor], test: Callable[[float], Tensor]
    ) -> dict[str, Array]:
        """Return what choices come to: a limit in ms → configurations [n], of held-out and of test
        samples."""
        budgets_ms = self.budgets_ms.tolist()
        rows = self.problem.split.test
        kept, free = (torch.stack([*map(way, budgets_ms)], 1) for way in (held_out, test))
        guard = calibrate(self.problem, self.fitted, self.budgets_ms, self.static_held_out, kept)
        # where the guard lets static decide, no features are waited for
        reads = torch.tensor([row["deployed"] for row in guard])
        held_back = kept.where(reads, self.static_held_out)
        guarded = free.where(reads, self._chosen(self.static, rows, self.budgets_ms))
        return {
            f"{name}/held out": self._utility(self.fitted, kept),
            f"{name}/held out, guarded": self._utility(self.fitted, held_back, reads),
            f"{name}/free": self._utility(rows, free),
            f"{name}/guarded": self._utility(rows, guarded, reads),
        }

    def _teacher(self, setup: ControllerSetup) -> dict[str, Array]:
        fitted = setup.distiller.fitted

        def held_out(limit: float) -> Tensor:
            return self._of_folds(setup, fitted.of_folds, torch.tensor([limit]))[:, 0]

        def test(limit: float) -> Tensor:
            return self._chosen(fitted.teacher, setup.split.test, torch.tensor([limit]))[:, 0]

        return self._judged("teacher", held_out, test)

    def _mixtures(self, auto: Trained, alone: Trained) -> dict[str, Array]:
        def mixed(weight: float) -> tuple[Callable[[float], Tensor], Callable[[float], Tensor]]:
            def lerped(first: Decide, second: Decide) -> Decide:
                return lambda limit: torch.lerp(
                    first(limit).clamp_min(-1e4), second(limit).clamp_min(-1e4), weight
                )

            return _greedy(lerped(auto.held_out, alone.held_out)), _greedy(
                lerped(auto.test, alone.test)
            )

        def score(weight: float) -> float:
            held_out, _ = mixed(weight)
            chosen = torch.stack([held_out(float(budget)) for budget in self.budgets_ms], 1)
            return float(self._utility(self.fitted, chosen).mean())

        best = max(WEIGHTS, key=score)
        results = self._judged("even mixture", *mixed(0.5)) | self._judged("mixture", *mixed(best))
        return results | {"mixture/weight": np.array(best)}

    def _of_folds(
        self, setup: ControllerSetup, policies: Sequence[Policy], limits: Tensor
    ) -> Tensor:
        """Return what the policy of each fold chooses for the samples held out of it, int64 [n, B],
        samples in order."""
        parts = zip(policies, setup.folds[1], strict=True)
        chosen = torch.cat([self._chosen(policy, rows, limits) for policy, rows in parts])
        return chosen[setup.held_out.rows.argsort()]

    def _chosen(self, policy: Policy, rows: Tensor, limits: Tensor) -> Tensor:
        features, mask = inputs_of_rows(self.problem, rows)
        return choices_of(policy, features, limits.double().numpy(), mask)

    def _utility(self, rows: Tensor, chosen: Tensor, reads: Tensor | None = None) -> Array:
        """Return the mean utility over the budgets of choices [n, B]: [n]. `reads`, bool [B], tells
        at which budgets they read features, by default at all."""
        decisions = Decisions(rows, chosen, self.budgets_ms, reads=reads)
        outcomes = self.problem.outcomes(decisions, checked=False)
        return outcomes.utility.mean(1).double().numpy()

    def _oracle(self) -> Policy:
        return Oracle(self.problem.cells, self.problem.split.test, self.problem.rule)


def _greedy(decide: Decide) -> Callable[[float], Tensor]:
    return lambda limit: decide(limit).argmax(-1)


def run(folder: Path, names: Sequence[str], seeds: Sequence[int]) -> None:
    """Train what is missing of each table, all tables for one seed after the other."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for name in names:
            table = None
            for number in range(SPLITS):
                path = folder / f"{Path(name).stem}_{number}_{seed}.npz"
                if path.exists():
                    continue
                table = table or table_named(name)
                problem = Problem.from_table(table, table.split(*SHARES, number))
                results: dict[str, Any] = dict(Unit(problem, seed).results())
                with path.with_suffix(".part").open("wb") as file:
                    np.savez_compressed(file, samples=np.array(table.num_samples), **results)
                os.replace(path.with_suffix(".part"), path)
                print(path, flush=True)


# -- the table -------------------------------------------------------------------------------------


class TableResults:
    """All results of a table: of each split and seed that is finished, in the order of `units`.

    Args:
        files: split and seed → the file.
    """

    def __init__(self, name: str, files: dict[tuple[int, int], Path]) -> None:
        self.name = name
        self.units = sorted(files)
        self.results = {unit: dict(np.load(files[unit])) for unit in self.units}
        self.samples = int(self.results[self.units[0]]["samples"])

    def mean(self, key: str) -> float:
        """Return the mean over splits and seeds of the mean over samples."""
        return float(np.mean([self.results[unit][key].mean() for unit in self.units]))

    def gap(self, key: str) -> float:
        """Return the share of the gap from static (0) to the oracle (1)."""
        static, oracle = self.mean("static/free"), self.mean("oracle/free")
        return (self.mean(key) - static) / (oracle - static)

    def held_out(self, way: str) -> float:
        """Return the held-out utility of a way as it would be deployed."""
        return self.mean(f"{way}/held out, guarded")

    def seconds(self, way: str) -> float:
        """Return the mean CPU seconds of a training."""
        return self.mean(f"{way}/seconds")

    def resampled(self, first: str, second: str) -> Array:
        """Return differences in utility, first that of the data, then those of resamples, where
        seeds, splits and samples are drawn together, float [1 + RESAMPLES]."""
        draws = np.random.default_rng(0)
        seeds, splits = (sorted({unit[part] for unit in self.units}) for part in (1, 0))
        # by seed, split and sample; NaN where a split does not test a sample
        cube = np.full((len(seeds), len(splits), self.samples), np.nan)
        for split, seed in self.units:
            results = self.results[split, seed]
            place = seeds.index(seed), splits.index(split)
            cube[place][results["test"]] = results[first] - results[second]
        known = ~np.isnan(cube)
        sums = np.nan_to_num(cube)
        differences = [sums.sum() / known.sum()]
        even = np.full(self.samples, 1 / self.samples)
        for _ in range(RESAMPLES):
            weight = draws.multinomial(self.samples, even)
            chosen = np.ix_(
                draws.integers(len(seeds), size=len(seeds)),
                draws.integers(len(splits), size=len(splits)),
            )
            count = (known[chosen] @ weight).sum()
            differences.append((sums[chosen] @ weight).sum() / max(count, 1))
        return np.array(differences)


def measured_in(folder: Path) -> list[TableResults]:
    """Read all results in a folder, by the name of the table."""
    tables: dict[str, dict[tuple[int, int], Path]] = {}
    for path in sorted(folder.glob("*.npz")):
        name, split, seed = path.stem.rsplit("_", 2)
        tables.setdefault(name, {})[int(split), int(seed)] = path
    return [TableResults(name, files) for name, files in tables.items()]


def rival_of(table: TableResults) -> str:
    """Return the way other than GRPO alone that held-out samples choose for a table."""
    return max((way for way in WAYS if way != "grpo"), key=table.held_out)


def with_interval(differences: Array) -> str:
    """Write a difference in points, with its 95 % interval."""
    low, high = np.percentile(differences[1:], (2.5, 97.5))
    words = f"{100 * differences[0]:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
    return words.replace("-", "−")


def print_table(tables: Sequence[TableResults]) -> None:
    """Print shares of the gap by way, free and guarded, the test against the rival, and the CPU
    seconds; then what the rule says."""
    heads = [*WAYS, "rival", "grpo − rival, points", "s auto", "s grpo"]
    for kind in ("guarded", "free"):
        print(f"\n{kind}\n\n| table | runs | {' | '.join(heads)} |")
        print("|---" * (len(heads) + 2) + "|")
        pooled = []
        for table in tables:
            rival = rival_of(table)
            differences = table.resampled(f"grpo/{kind}", f"{rival}/{kind}")
            pooled.append(differences)
            cells = [table.name.replace("_", " "), str(len(table.units))]
            cells += [f"{100 * table.gap(f'{way}/{kind}'):.0f}" for way in WAYS]
            cells += [rival, with_interval(differences)]
            cells += [f"{table.seconds(way):.0f}" for way in ("auto", "grpo")]
            print(f"| {' | '.join(cells)} |".replace(" -", " −"))
            if kind == "guarded" and table.samples > 500 and below(differences, 0.01):
                print(f"*{table.name}: not shown to be within a point*")
        means = [
            f"{100 * np.mean([table.gap(f'{way}/{kind}') for table in tables]):.1f}" for way in WAYS
        ]
        together = np.mean(pooled, 0)
        seconds = [f"{np.mean([t.seconds(way) for t in tables]):.0f}" for way in ("auto", "grpo")]
        row = ["mean", "", *means, "", with_interval(together), *seconds]
        print(f"| {' | '.join(row)} |".replace(" -", " −"))
        if kind == "guarded" and below(together, 0.005):
            print("*all tables: not shown to be within half a point*")
    against_today(tables)


def below(differences: Array, margin: float) -> bool:
    """Tell whether the lower end of the 95 % interval is not above −margin."""
    return float(np.percentile(differences[1:], 2.5)) <= -margin


def against_today(tables: Sequence[TableResults]) -> None:
    """Print each way − auto, guarded, as a mean over the tables, in points and in shares of the
    gap."""
    print("\n| way | − auto, points | − auto, share of the gap | mean held-out utility |")
    print("|---|---|---|---|")
    for way in WAYS:
        points = [table.resampled(f"{way}/guarded", "auto/guarded") for table in tables]
        gaps = [table.mean("oracle/free") - table.mean("static/free") for table in tables]
        shares = [each / gap for each, gap in zip(points, gaps, strict=True)]
        held_out = np.mean([table.held_out(way) for table in tables])
        cells = [with_interval(np.mean(each, 0)) for each in (points, shares)]
        print(f"| {way} | {cells[0]} | {cells[1]} | {held_out:.4f} |")


def main(words: list[str]) -> None:
    """Run a command, see the top."""
    match words:
        case ["run", folder, *rest]:
            seeds = [word.removeprefix("seeds=") for word in rest if word.startswith("seeds=")]
            numbers = [int(seed) for seed in (seeds or ["0,1,2"])[0].split(",")]
            run(Path(folder), [word for word in rest if not word.startswith("seeds=")], numbers)
        case ["table", folder]:
            print_table(measured_in(Path(folder)))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
