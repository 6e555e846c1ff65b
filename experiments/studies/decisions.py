"""Which policy decides best, charged with its own cost: what is deployed, its teacher and every baseline, on the
built-in profile and on simulated tables.

    python experiments/studies/decisions.py key=value …

Measures what is missing and writes docs/decisions.md. Each policy makes all its choices (weights, settings, when to
stop, where to fall back) on samples outside the test part. A simulated table is drawn anew for each seed and judged on
2,000 additional samples; the built-in profile is split anew.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import polars as pl
import torch
from torch import Tensor

from knobwise.agents.judging.baselines import make_baselines
from knobwise.agents.judging.evaluation import judge
from knobwise.agents.predictors.experts import Expert
from knobwise.agents.serving.distillation import StudentConfig, student_of
from knobwise.agents.serving.own_cost import expected_cost_ms, own_cost
from knobwise.agents.stack.stacked_controller import StackedController, fit_stack
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.common.errors import InputError
from knobwise.common.files import write_text
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.readers.builtin import builtin_profile
from knobwise.envs.simulated.kinds import KINDS, SimulatedConfig, simulate
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.experiments.command_line.compose import GROUPS
from knobwise.experiments.report.words import ORACLE, STATIC
from knobwise.experiments.results.controllers import judged_means
from knobwise.experiments.studies.running import Mean, folder_for, measured, rendered, run_from_words
from knobwise.experiments.train.controller import STUDENT_STEPS

TEST_SAMPLES = 2000
STUDENT, TEACHER, UNGUARDED = "student (deployed)", "teacher", "teacher, no guard"
LEARNERS = ("ridge", "kernel_ridge", "knn", "random_forest", "gradient_boosting", "latency_only")
BASELINES = (STATIC, "best_static", "lookup_table", *LEARNERS, "random")
CHARGED, FREE = "utility", "utility_free"
LEAST_HEADROOM = 0.05
"""With less headroom a share of it says nothing; such a table counts in utility only."""
MOST_LOST = 0.5
"""Points that a student may lose to its teacher, as a mean over the tables."""
PARTS = {
    "GRPO after the regression, without experts": ("network", "network, regression only"),
    "experts next to the network": (UNGUARDED, "network"),
    "weights learned out of fold, against equal ones": (UNGUARDED, "teacher, no guard, equal weights"),
    "the guard": (TEACHER, UNGUARDED),
}
"""What each part of the teacher adds: the policy with it, and without."""


@dataclass
class DecisionsConfig:
    """The settings, each as key=value."""

    tables: list[str] = field(default_factory=lambda: ["builtin", *(kind for kind in KINDS if kind != "wide_knobs")])
    """The built-in profile and kinds of simulated tables."""
    seeds: int = 3
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
    folder = folder_for(config.runs, [builtin_profile().digest, KINDS, *groups, StudentConfig(), STUDENT_STEPS])
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
    # the default run: a network, experts and a guard around it, and a student of them all
    trainer, network_seconds = _timed(cell.trained, "auto")
    network, optimiser, config = trainer.agent, trainer.settings, GROUPS["policy"]["auto"]
    expected_ms = expected_cost_ms(table, experts=False)  # of the student, which is deployed
    teacher, seconds = _timed(fit_stack, table, cell.fitted, network, config, cell.budgets, seed, expected_ms)
    seconds += network_seconds
    lessons = StudentConfig(steps=STUDENT_STEPS * (optimiser.warmup_iterations + optimiser.iterations))
    student, more_seconds = _timed(student_of, teacher, table, cell.fitted, seed, lessons)
    cell.judge(STUDENT, student, seconds + more_seconds)
    cell.judge(TEACHER, teacher, seconds, guard=teacher.guard.rows())
    # its parts
    cell.judge(UNGUARDED, _with_weights(teacher, teacher.weights), seconds)
    equal = torch.full_like(teacher.weights, 1 / len(teacher.weights))
    cell.judge("teacher, no guard, equal weights", _with_weights(teacher, equal), seconds)
    cell.judge("network", network, network_seconds)
    warm, seconds = _timed(cell.trained, "utility", iterations=0)
    cell.judge("network, regression only", warm.agent, seconds)
    return {
        "table": name,
        "seed": seed,
        "samples": len(cell.fitted),
        "configurations": table.num_configurations,
        "features": sum(block.shape[1] for block in table.features.values()),
        "policies": cell.policies,
    }


class _Cell:
    """One table with one seed: what each policy got, the time of its decisions, and the CPU seconds of fitting it."""

    def __init__(self, table: ProfileTable, split: Split, seed: int) -> None:
        self.table, self.split, self.seed = table, split, seed
        self.fitted = torch.cat([split.train, split.validation])
        self.budgets = default_budgets(table)
        self.policies: list[dict[str, Any]] = []

    def trained(self, policy: str, **changes: Any) -> ControllerTrainer:
        groups = {"policy": GROUPS["policy"][policy], "reward": GROUPS["reward"]["utility"], "budgets_ms": self.budgets}
        optimiser = replace(GROUPS["optimiser"][policy], **changes)
        trainer = ControllerTrainer(self.table, self.split, optimiser=optimiser, seed=self.seed, **groups)
        trainer.run()
        return trainer

    def judge(self, name: str, policy: Any, seconds: float, **facts: Any) -> None:
        """Charged with its own cost, and for nothing."""
        table, test, budgets = self.table, self.split.test, self.budgets
        own = own_cost(policy, table, test, budgets)
        row = {"policy": name, "decision_us": float(own.decision_us.mean()), "cpu_seconds": seconds, **facts}
        for ending, cost in (("", own.charged_ms), ("_free", None)):
            means = judged_means(judge(policy, table, test, budgets, cost_ms=cost))
            row |= {key + ending: means[key] for key in ("utility", "satisfaction_feasible")}
        self.policies.append(row)


def _timed(fit: Callable[..., Any], *arguments: Any, **settings: Any) -> tuple[Any, float]:
    start = time.process_time()
    result = fit(*arguments, **settings)
    return result, time.process_time() - start


def _with_weights(stack: StackedController, weights: Tensor) -> StackedController:
    experts = [expert for expert in stack.experts if isinstance(expert, Expert)]
    return StackedController(stack.network, experts, weights)


# -- the page ----------------------------------------------------------------------------------------------------------


class MeasuredTable:
    """What was measured on one table with all seeds; `key` is `CHARGED` or `FREE`."""

    def __init__(self, name: str, cells: Sequence[Mapping[str, Any]]) -> None:
        self.name, self.facts = name, cells[0]
        rows = pl.DataFrame([row for cell in cells for row in cell["policies"]], infer_schema_length=None)
        numbers = rows.group_by("policy", maintain_order=True)
        self.utility = {(policy, key): part[key].to_numpy() for (policy,), part in numbers for key in (CHARGED, FREE)}
        """(policy, key) → float64 [seeds]."""
        means = numbers.agg(pl.exclude("guard").fill_nan(None).mean())
        self.means = {row["policy"]: row for row in means.to_dicts()}
        self.headroom = self.lead(ORACLE, STATIC).value
        self.best_baseline = max(BASELINES, key=lambda policy: self.means[policy][CHARGED])
        self.guard = [budget for row in rows["guard"].drop_nulls() for budget in row]

    def gap(self, policy: str, key: str = CHARGED) -> Mean | None:
        """The share of the headroom; None where there is hardly any."""
        if self.headroom < LEAST_HEADROOM:
            return None
        low, high = self.utility[STATIC, key], self.utility[ORACLE, key]
        return Mean.over((self.utility[policy, key] - low) / (high - low))

    def lead(self, policy: str, other: str, key: str = CHARGED) -> Mean:
        """The paired difference in utility."""
        return Mean.over(self.utility[policy, key] - self.utility[other, key])

    def is_first(self, policy: str, key: str = CHARGED) -> bool:
        """Whether no baseline has a higher mean utility."""
        return all(self.lead(other, policy, key).value <= 0 for other in BASELINES)

    def row(self, policy: str) -> dict[str, Any]:
        """What means over tables are taken of; None where it says nothing."""
        row = {key: value for key, value in self.means[policy].items() if key != "policy"}
        for ending, key in (("", CHARGED), ("_free", FREE)):
            gap = self.gap(policy, key)
            row |= {f"lead{ending}": self.lead(policy, STATIC, key).value, f"gap{ending}": gap.value if gap else None}
        return row


def decisions_page(cells: Sequence[Mapping[str, Any]]) -> str:
    """docs/decisions.md, from one measurement for each table and seed."""
    names = dict.fromkeys(cell["table"] for cell in cells)
    tables = [MeasuredTable(name, [cell for cell in cells if cell["table"] == name]) for name in names]
    overview = [
        {"policy": policy, **pl.DataFrame([each.row(policy) for each in tables]).mean().row(0, named=True)}
        for policy in tables[0].means
        if policy != ORACLE
    ]
    losses = {each.name: 100 * each.lead(STUDENT, TEACHER, FREE).value for each in tables}
    return rendered(
        "decisions.md.j2",
        seeds=len({cell["seed"] for cell in cells}),
        tables=tables,
        overview=sorted(overview, key=lambda row: -row["lead"]),
        first=[each.name for each in tables if each.is_first(STUDENT)],
        first_free=[each.name for each in tables if each.is_first(TEACHER, FREE)],
        above=[each.name for each in tables if each.lead(TEACHER, STUDENT).value > 0],
        loss=Mean.over(losses.values()),
        worst=min(losses.items(), key=lambda item: item[1]),
        parts={words: [each.lead(*pair, FREE) for each in tables] for words, pair in PARTS.items()},
        STUDENT=STUDENT,
        TEACHER=TEACHER,
        UNGUARDED=UNGUARDED,
        FREE=FREE,
        MOST_LOST=MOST_LOST,
    )


main = functools.partial(run_from_words, "decisions", DecisionsConfig, run)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
