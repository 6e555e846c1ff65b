"""Which policy decides best: every policy and baseline on the built-in profile and on simulated tables.

    python experiments/studies/decisions.py key=value …

Measures what is missing and writes docs/decisions.md. Each policy makes all its choices (weights, settings, when to
stop, where to fall back) on samples outside the test part. A simulated table is drawn anew for each seed and judged on
2,000 additional samples; the built-in profile is split anew.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import t
from torch import Tensor

from knobwise.agents.judging.baselines import make_baselines
from knobwise.agents.judging.evaluation import judge
from knobwise.agents.predictors.experts import Expert
from knobwise.agents.stack.stacked_controller import StackedController, fit_stack
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import RewardConfig
from knobwise.envs.readers.builtin import builtin_profile
from knobwise.envs.simulated.kinds import KINDS, SimulatedConfig, simulate
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.experiments.command_line.compose import GROUPS
from knobwise.experiments.report.words import ORACLE, STATIC
from knobwise.experiments.results.judge import judged_means
from knobwise.experiments.studies.running import folder_for, measured, rendered, run_from_words, write_page
from knobwise.losses.settings import LossConfig

TEST_SAMPLES = 2000
OBJECTIVES = {
    "exact, centred": LossConfig(),
    "exact, z-score": LossConfig(advantage="zscore"),
    "exact, rank": LossConfig(advantage="rank"),
    "exact, unnormalised": LossConfig(advantage="unnormalised"),
    "sampled, G = 5": LossConfig(objective="sampled", group_size=5),
    "sampled, G = 16": LossConfig(objective="sampled", group_size=16),
    "sampled, G = 64": LossConfig(objective="sampled", group_size=64),
}
"""Compared from the same warm start."""
OBJECTIVE_TABLES = ("builtin", "router", "portfolio")
"""Where objectives are compared."""
AUTO, UNGUARDED = "auto", "auto, no guard"
LEARNERS = ("ridge", "kernel_ridge", "knn", "random_forest", "gradient_boosting", "latency_only")
BASELINES = (STATIC, "best_static", "lookup_table", *LEARNERS, "random")
LEAST_HEADROOM = 0.05
"""With less headroom a share of it says nothing; such a table counts in utility only."""
PARTS = {
    "GRPO after the regression, without experts": ("utility network", "utility network, regression only"),
    "experts next to the network": (UNGUARDED, "utility network"),
    "weights learned out of fold, against equal ones": (UNGUARDED, "auto, no guard, equal weights"),
    "the guard": (AUTO, UNGUARDED),
}
"""What each part of the default policy adds: the policy with it, and without."""


@dataclass
class DecisionsConfig:
    """The settings, each as key=value."""

    tables: list[str] = field(default_factory=lambda: ["builtin", *(kind for kind in KINDS if kind != "wide_knobs")])
    """The built-in profile and kinds of simulated tables."""
    seeds: int = 5
    """How many seeds, for tables, splits and training."""
    runs: str = "runs/decisions"
    """Where measurements are kept; a finished one is not repeated."""
    out: str = "docs/decisions.md"
    """The page."""
    jobs: int = 2
    """Processes at the same time, one thread each."""


def run(config: DecisionsConfig) -> list[str]:
    """Measure every table with every seed, and write the page.

    Raises:
        InputError: an unknown table.
    """
    unknown = [name for name in config.tables if name != "builtin" and name not in KINDS]
    if unknown:
        raise InputError(f"tables={unknown}: must be among builtin, {', '.join(KINDS)}")
    # another built-in profile or other default settings are measured anew
    groups = [GROUPS[name] for name in ("policy", "optimiser", "reward")]
    folder = folder_for(config.runs, [builtin_profile().digest, KINDS, *groups, OBJECTIVES])
    # the built-in profile takes longest, so it goes first
    cells = {folder / f"{name}-{seed}.json": (name, seed) for name in config.tables for seed in range(config.seeds)}
    write_page(config.out, decisions_page(measured("tables × seeds", measure, cells, config.jobs)))
    return []


def table_of(name: str, seed: int) -> tuple[ProfileTable, Split]:
    """A table and its parts. A simulated one is fitted on the samples of its kind, and judged on further ones."""
    if name == "builtin":
        table = builtin_profile()
        return table, table.split(seed=seed)
    size = KINDS[name].samples
    table = simulate(SimulatedConfig(name, size + TEST_SAMPLES, seed))
    train = round(0.75 * size)
    return table, Split(torch.arange(train), torch.arange(train, size), torch.arange(size, size + TEST_SAMPLES))


def measure(name: str, seed: int) -> dict[str, Any]:
    """Fit and judge every policy on one table with one seed."""
    table, split = table_of(name, seed)
    measurement = _Measurement(table, split, seed)
    measurement.baselines()
    measurement.default_policy()
    warm = measurement.networks()
    objectives = OBJECTIVES.items() if name in OBJECTIVE_TABLES else ()
    return {
        "table": name,
        "seed": seed,
        "samples": len(measurement.fitted),
        "configurations": table.num_configurations,
        "features": sum(block.shape[1] for block in table.features.values()),
        "policies": measurement.policies,
        "objectives": [{"objective": words, **measurement.objective(warm, loss)} for words, loss in objectives],
    }


class _Measurement:
    """One table with one seed: what each policy got, and the CPU seconds of fitting it."""

    def __init__(self, table: ProfileTable, split: Split, seed: int) -> None:
        self.table, self.split, self.seed = table, split, seed
        self.fitted = torch.cat([split.train, split.validation])
        self.budgets = default_budgets(table)
        self.rewards = RewardTable(table, RewardConfig())
        self.policies: list[dict[str, Any]] = []

    def baselines(self) -> None:
        policies, seconds = _timed(lambda: make_baselines(self.table, self.split, self.seed, self.budgets))
        for policy in policies:
            self.judge(policy.name, policy, seconds)

    def default_policy(self) -> None:
        """With its guard, without it, and without its weights."""
        trainer, network_seconds = _timed(lambda: self.trained("auto"))
        config, network = GROUPS["policy"]["auto"], trainer.agent
        auto, seconds = _timed(lambda: fit_stack(self.table, self.fitted, network, config, self.budgets, self.seed))
        seconds += network_seconds
        guard = None if auto.guard is None else auto.guard.rows()
        self.judge("auto", auto, seconds, chosen=auto.chosen(), guard=guard)
        self.judge("auto, no guard", _with_weights(auto, auto.weights), seconds)
        if auto.experts:
            equal = torch.full_like(auto.weights, 1 / len(auto.weights))
            self.judge("auto, no guard, equal weights", _with_weights(auto, equal), seconds)
        self.judge("utility network", network, network_seconds, stopped_at=trainer.best["iteration"])

    def networks(self) -> ControllerTrainer:
        """Networks of other structures; returns the regression that objectives start from."""
        warm, seconds = _timed(lambda: self.trained("utility", iterations=0))
        self.judge("utility network, regression only", warm.controller, seconds)
        for structure in ("additive", "autoregressive", "independent", "joint"):
            trainer, seconds = _timed(functools.partial(self.trained, structure))
            self.judge(structure, trainer.agent, seconds)
        return warm

    def objective(self, warm: ControllerTrainer, loss: LossConfig) -> dict[str, list[float]]:
        """GRPO alone, from where a warm-up was best: 60 iterations, judged on the test part every 5."""
        settings = replace(warm.settings, warmup_iterations=0, iterations=60, evaluate_every=5, patience=0)
        trainer = self.trainer(warm.policy, settings, loss)
        trainer.agent.load_state_dict(warm.best["state"])
        trainer.log = trajectory = _Trajectory(trainer, self.split.test)
        trainer.run()
        return {"utility": trajectory.utility, "seconds": trajectory.seconds}

    def trained(self, structure: str, **changes: Any) -> ControllerTrainer:
        settings = replace(GROUPS["optimiser"][structure], **changes)
        trainer = self.trainer(GROUPS["policy"][structure], settings, LossConfig())
        trainer.run()
        return trainer

    def trainer(self, policy: Any, settings: OptimiserConfig, loss: LossConfig) -> ControllerTrainer:
        reward = GROUPS["reward"]["utility"]
        return ControllerTrainer(
            self.table,
            self.split,
            policy=policy,
            loss=loss,
            optimiser=settings,
            reward=reward,
            budgets_ms=self.budgets,
            seed=self.seed,
        )

    def judge(self, name: str, policy: Any, seconds: float, **facts: Any) -> None:
        outcome = judge(policy, self.table, self.split.test, self.budgets, self.rewards)
        row = judged_means(outcome)
        numbers = {key: row[key] for key in ("utility", "accuracy", "satisfaction_feasible")}
        self.policies.append({"policy": name, **numbers, "cpu_seconds": seconds, **facts})


def _timed(fit: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    result = fit()
    return result, time.process_time() - start


def _with_weights(stack: StackedController, weights: Tensor) -> StackedController:
    experts = [expert for expert in stack.experts if isinstance(expert, Expert)]
    return StackedController(stack.network, experts, weights)


class _Trajectory:
    """Utility on the test part at every evaluation, and the CPU seconds of training until then."""

    def __init__(self, trainer: ControllerTrainer, test: Tensor) -> None:
        self._trainer, self._test, self._judging = trainer, test, 0.0
        self._start = time.process_time()
        self.utility: list[float] = []
        self.seconds: list[float] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if "Val/Utility" in metrics:
            begun, trainer = time.process_time(), self._trainer
            self.seconds.append(begun - self._start - self._judging)
            judged = judge(trainer.agent, trainer.table, self._test, trainer.limits, trainer.env.rewards)
            self.utility.append(float(judged.utility.mean()))
            self._judging += time.process_time() - begun


# -- the page ----------------------------------------------------------------------------------------------------------


class Mean(NamedTuple):
    """A mean over seeds and half the width of its 95 % interval (Student's t)."""

    value: float
    half: float

    @classmethod
    def over(cls, values: Iterable[float]) -> Mean:
        numbers = np.array(list(values), dtype=float)
        if len(numbers) < 2:
            return cls(float(numbers.mean()), float("nan"))
        error = numbers.std(ddof=1) / np.sqrt(len(numbers))
        return cls(float(numbers.mean()), float(t.ppf(0.975, len(numbers) - 1) * error))

    def words(self, form: str = ".3f") -> str:
        return f"{self.value:z{form}} ± {self.half:{form}}"

    @property
    def sign(self) -> int:
        """1 or −1 where it differs from 0 by more than its interval, else 0."""
        return int(self.value - self.half > 0) - int(self.value + self.half < 0)


class MeasuredTable:
    """What was measured on one table with all seeds."""

    def __init__(self, name: str, cells: Sequence[Mapping[str, Any]]) -> None:
        self.name, self.facts = name, cells[0]
        rows = [{row["policy"]: row for row in cell["policies"]} for cell in cells]
        self.policies = list(rows[0])

        def values(key: str) -> dict[str, np.ndarray]:
            return {policy: np.array([row[policy][key] for row in rows], dtype=float) for policy in rows[0]}

        self.utility = values("utility")
        """Policy → float64 [seeds]."""
        self.mean = {policy: float(each.mean()) for policy, each in self.utility.items()}
        self.seconds = {policy: float(each.mean()) for policy, each in values("cpu_seconds").items()}
        self.feasible = {policy: float(np.nanmean(each)) for policy, each in values("satisfaction_feasible").items()}
        self.headroom = self.mean[ORACLE] - self.mean[STATIC]
        self.best_baseline = max(BASELINES, key=lambda policy: self.mean[policy])
        self.auto_is_first = self.rank(AUTO) == 1
        self.guard = [budget for row in rows for budget in row[AUTO]["guard"] or []]

    def gap(self, policy: str) -> Mean | None:
        """The share of the headroom; None where there is hardly any."""
        if self.headroom < LEAST_HEADROOM:
            return None
        return Mean.over((self.utility[policy] - self.utility[STATIC]) / (self.utility[ORACLE] - self.utility[STATIC]))

    def lead(self, policy: str, other: str) -> Mean:
        """The paired difference in utility."""
        return Mean.over(self.utility[policy] - self.utility[other])

    def rank(self, policy: str) -> int:
        """Among the baselines and `auto`; 1 is best."""
        return 1 + sum(self.mean[other] > self.mean[policy] for other in (AUTO, *BASELINES))


def decisions_page(cells: Sequence[Mapping[str, Any]]) -> str:
    """docs/decisions.md, from one measurement for each table and seed."""
    names = dict.fromkeys(cell["table"] for cell in cells)
    tables = [MeasuredTable(name, [cell for cell in cells if cell["table"] == name]) for name in names]
    parts = {
        words: [each.lead(*pair) for each in tables if {*pair} <= set(each.policies)] for words, pair in PARTS.items()
    }
    return rendered(
        "decisions.md.j2",
        seeds=len({cell["seed"] for cell in cells}),
        tables=tables,
        overview=_overview(tables),
        parts=parts,
        objectives=_objectives([cell["objectives"] for cell in cells if cell["objectives"]]),
        AUTO=AUTO,
        UNGUARDED=UNGUARDED,
    )


def _overview(tables: Sequence[MeasuredTable]) -> list[dict[str, Any]]:
    """Means over tables of every policy but the oracle, best first."""
    rows = []
    for policy in dict.fromkeys(p for each in tables for p in each.policies if p != ORACLE):
        having = [each for each in tables if policy in each.policies]
        means: dict[str, list[float]] = {
            "gap": [gap.value for each in having if (gap := each.gap(policy))],
            "lead": [each.lead(policy, STATIC).value for each in having],
            "rank": [each.rank(policy) for each in having if policy in (AUTO, *BASELINES)],
            "feasible": [each.feasible[policy] for each in having],
            "seconds": [each.seconds[policy] for each in having],
        }
        row = {key: float(np.mean(values)) if values else None for key, values in means.items()}
        rows.append({"policy": policy, **row})
    return sorted(rows, key=lambda row: -row["lead"])


def _objectives(cells: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Gains in utility on the test part after equal updates and after equal CPU time, mean over tables and seeds.

    Args:
        cells: for each table and seed what was measured of every objective.
    """
    rows = []
    for curves in zip(*cells, strict=True):  # one objective, on each table with each seed
        updates, in_time = [], []
        for curve, cell in zip(curves, cells, strict=True):
            # the CPU time that the cheapest objective takes for the same updates
            limit = min(other["seconds"][-1] for other in cell)
            last = int(np.searchsorted(curve["seconds"], limit, side="right")) - 1
            updates.append(curve["utility"][-1] - curve["utility"][0])
            in_time.append(curve["utility"][last] - curve["utility"][0])
        seconds = float(np.mean([curve["seconds"][-1] for curve in curves]))
        gains = {"updates": Mean.over(updates), "in_time": Mean.over(in_time)}
        rows.append({"name": curves[0]["objective"], "seconds": seconds, **gains})
    return rows


def main(words: list[str]) -> int:
    """Run from `key=value` words; returns the exit status."""
    return run_from_words("decisions", DecisionsConfig, run, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
