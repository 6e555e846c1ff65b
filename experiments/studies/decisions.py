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
import polars as pl
import torch
from scipy.stats import sem, t
from torch import Tensor

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.judging.baselines import make_baselines
from knobwise.agents.judging.evaluation import judge
from knobwise.agents.predictors.experts import Expert
from knobwise.agents.stack.stacked_controller import StackedController, fit_stack
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.common.errors import InputError
from knobwise.common.files import write_text
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import RewardConfig
from knobwise.envs.readers.builtin import builtin_profile
from knobwise.envs.simulated.kinds import KINDS, SimulatedConfig, simulate
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.experiments.command_line.compose import GROUPS
from knobwise.experiments.report.words import ORACLE, STATIC, sign_of
from knobwise.experiments.results.controllers import judged_means
from knobwise.experiments.studies.running import folder_for, measured, rendered, run_from_words
from knobwise.losses.settings import LossConfig

TEST_SAMPLES = 2000
OBJECTIVES = {
    "exact, centred": LossConfig(),
    "exact, z-score": LossConfig(advantage="zscore"),
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
    write_text(config.out, decisions_page(measured("tables × seeds", measure, cells, config.jobs)))
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
    cell = _Cell(table, split, seed)
    policies, seconds = _timed(make_baselines, table, split, seed, cell.budgets)
    for policy in policies:
        cell.judge(policy.name, policy, seconds)
    # the default policy with its guard, without it, and without its weights
    trainer, network_seconds = _timed(cell.trained, AUTO)
    config, network = GROUPS["policy"][AUTO], trainer.agent
    auto, seconds = _timed(fit_stack, table, cell.fitted, network, config, cell.budgets, seed)
    seconds += network_seconds
    guard = None if auto.guard is None else auto.guard.rows()
    cell.judge(AUTO, auto, seconds, chosen=auto.chosen(), guard=guard)
    cell.judge(UNGUARDED, _with_weights(auto, auto.weights), seconds)
    if auto.experts:
        equal = torch.full_like(auto.weights, 1 / len(auto.weights))
        cell.judge("auto, no guard, equal weights", _with_weights(auto, equal), seconds)
    cell.judge("utility network", network, network_seconds, stopped_at=trainer.best["iteration"])
    # networks of other structures; objectives start from the regression
    warm, seconds = _timed(cell.trained, "utility", iterations=0)
    cell.judge("utility network, regression only", warm.agent, seconds)
    trainer, seconds = _timed(cell.trained, "independent")
    cell.judge("independent", trainer.agent, seconds)
    objectives = OBJECTIVES.items() if name in OBJECTIVE_TABLES else ()
    return {
        "table": name,
        "seed": seed,
        "samples": len(cell.fitted),
        "configurations": table.num_configurations,
        "features": sum(block.shape[1] for block in table.features.values()),
        "policies": cell.policies,
        "objectives": [{"objective": words, **cell.objective(warm, loss)} for words, loss in objectives],
    }


class _Cell:
    """One table with one seed: what each policy got, and the CPU seconds of fitting it."""

    def __init__(self, table: ProfileTable, split: Split, seed: int) -> None:
        self.table, self.split, self.seed = table, split, seed
        self.fitted = torch.cat([split.train, split.validation])
        self.budgets = default_budgets(table)
        self.policies: list[dict[str, Any]] = []

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

    def trainer(self, policy: PolicyConfig, settings: OptimiserConfig, loss: LossConfig) -> ControllerTrainer:
        rest = {"reward": GROUPS["reward"]["utility"], "budgets_ms": self.budgets, "seed": self.seed}
        return ControllerTrainer(self.table, self.split, policy=policy, loss=loss, optimiser=settings, **rest)

    def judge(self, name: str, policy: Any, seconds: float, **facts: Any) -> None:
        rewards = RewardTable(self.table, RewardConfig())
        row = judged_means(judge(policy, self.table, self.split.test, self.budgets, rewards))
        numbers = {key: row[key] for key in ("utility", "accuracy", "satisfaction_feasible")}
        self.policies.append({"policy": name, **numbers, "cpu_seconds": seconds, **facts})


def _timed(fit: Callable[..., Any], *arguments: Any, **settings: Any) -> tuple[Any, float]:
    start = time.process_time()
    result = fit(*arguments, **settings)
    return result, time.process_time() - start


def _with_weights(stack: StackedController, weights: Tensor) -> StackedController:
    experts = [expert for expert in stack.experts if isinstance(expert, Expert)]
    return StackedController(stack.network, experts, weights)


class _Trajectory:
    """Utility on the test part at every evaluation, and the CPU seconds of training until then."""

    def __init__(self, trainer: ControllerTrainer, test: Tensor) -> None:
        self._trainer, self._test, self._start = trainer, test, time.process_time()
        self.utility: list[float] = []
        self.seconds: list[float] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if "Val/Utility" in metrics:
            begun, trainer = time.process_time(), self._trainer
            self.seconds.append(begun - self._start)
            judged = judge(trainer.agent, trainer.table, self._test, trainer.limits, trainer.env.rewards)
            self.utility.append(float(judged.utility.mean()))
            self._start += time.process_time() - begun  # judging is no training


# -- the page ----------------------------------------------------------------------------------------------------------


class Mean(NamedTuple):
    """A mean over seeds and half the width of its 95 % interval (Student's t), NaN for one seed."""

    value: float
    half: float

    @classmethod
    def over(cls, values: Iterable[float]) -> Mean:
        numbers = np.array(list(values), dtype=float)
        half = t.ppf(0.975, len(numbers) - 1) * sem(numbers) if len(numbers) > 1 else np.nan
        return cls(float(numbers.mean()), float(half))

    def words(self, form: str = ".3f") -> str:
        return f"{self.value:z{form}} ± {self.half:{form}}"

    @property
    def sign(self) -> int:
        """1 or −1 where it differs from 0 by more than its interval, else 0."""
        return sign_of((self.value - self.half, self.value + self.half))


class MeasuredTable:
    """What was measured on one table with all seeds."""

    def __init__(self, name: str, cells: Sequence[Mapping[str, Any]]) -> None:
        self.name, self.facts = name, cells[0]
        rows = pl.DataFrame([row for cell in cells for row in cell["policies"]], infer_schema_length=None)
        numbers = rows.group_by("policy", maintain_order=True)
        self.utility = {policy: part["utility"].to_numpy() for (policy,), part in numbers}
        """Policy → float64 [seeds]."""
        means = numbers.agg(pl.col("utility", "satisfaction_feasible", "cpu_seconds").fill_nan(None).mean())
        self.means = {row["policy"]: row for row in means.to_dicts()}
        self.headroom = self.lead(ORACLE, STATIC).value
        self.best_baseline = max(BASELINES, key=lambda policy: self.means[policy]["utility"])
        self.guard = [budget for row in rows["guard"].drop_nulls() for budget in row]

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
        return 1 + sum(self.lead(other, policy).value > 0 for other in (AUTO, *BASELINES))

    def row(self, policy: str) -> dict[str, Any]:
        """What means over tables are taken of; None where it says nothing."""
        gap = self.gap(policy)
        ranked = policy in (AUTO, *BASELINES)
        return {
            "gap": gap.value if gap else None,
            "lead": self.lead(policy, STATIC).value,
            "rank": self.rank(policy) if ranked else None,
            "feasible": self.means[policy]["satisfaction_feasible"],
            "seconds": self.means[policy]["cpu_seconds"],
        }


def decisions_page(cells: Sequence[Mapping[str, Any]]) -> str:
    """docs/decisions.md, from one measurement for each table and seed."""
    names = dict.fromkeys(cell["table"] for cell in cells)
    tables = [MeasuredTable(name, [cell for cell in cells if cell["table"] == name]) for name in names]
    names = dict.fromkeys(policy for each in tables for policy in each.means if policy != ORACLE)
    policies = {policy: [each for each in tables if policy in each.means] for policy in names}
    overview = [
        {"policy": policy, **pl.DataFrame([each.row(policy) for each in having]).mean().row(0, named=True)}
        for policy, having in policies.items()
    ]
    return rendered(
        "decisions.md.j2",
        seeds=len({cell["seed"] for cell in cells}),
        tables=tables,
        first=[each.name for each in tables if each.rank(AUTO) == 1],
        overview=sorted(overview, key=lambda row: -row["lead"]),
        parts={
            words: [each.lead(*pair) for each in tables if {*pair} <= each.means.keys()]
            for words, pair in PARTS.items()
        },
        objectives=_objectives([cell["objectives"] for cell in cells if cell["objectives"]]),
        AUTO=AUTO,
        UNGUARDED=UNGUARDED,
    )


def _objectives(cells: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Gains in utility on the test part after equal updates and after equal CPU time, mean over tables and seeds.

    Args:
        cells: for each table and seed what was measured of every objective.
    """
    # the CPU time that the cheapest objective takes for the same updates
    limits = [min(curve["seconds"][-1] for curve in cell) for cell in cells]
    rows = []
    for curves in zip(*cells, strict=True):  # one objective, on each table with each seed
        gains = [np.subtract(curve["utility"], curve["utility"][0]) for curve in curves]
        steps = [np.searchsorted(curve["seconds"], limit, "right") for curve, limit in zip(curves, limits, strict=True)]
        rows.append(
            {
                "name": curves[0]["objective"],
                "seconds": float(np.mean([curve["seconds"][-1] for curve in curves])),
                "updates": Mean.over(gain[-1] for gain in gains),
                "in_time": Mean.over(gain[step - 1] for gain, step in zip(gains, steps, strict=True)),
            }
        )
    return rows


main = functools.partial(run_from_words, "decisions", DecisionsConfig, run)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
