"""Which policy decides best, charged with its own cost: what is deployed, its teacher and every baseline, on measured
and on simulated tables.

    python experiments/studies/decisions.py key=value …

Measures what is missing and writes docs/decisions.md. Each policy makes all its choices (weights, settings, when to
stop, where to fall back) on samples outside the test part. A simulated table is drawn anew for each seed and judged on
2,000 additional samples; a measured table is split anew.
"""

from __future__ import annotations

import copy
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import EXPERTS
from knobwise.agents.judging.baselines import make_baselines
from knobwise.agents.judging.evaluation import judge
from knobwise.agents.predictors.experts import Expert, Experts
from knobwise.agents.serving.distillation import StudentConfig, student_of
from knobwise.agents.serving.own_cost import expected_cost_ms, own_cost
from knobwise.agents.stack.stacked_controller import StackedController, fit_stack
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.common.errors import InputError
from knobwise.common.files import write_text
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.readers.builtin import builtin_profile, ocr_profile
from knobwise.envs.simulated.kinds import KINDS, SimulatedConfig, simulate
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.experiments.command_line.compose import GROUPS
from knobwise.experiments.report.words import ORACLE, STATIC
from knobwise.experiments.results.controllers import judged_means
from knobwise.experiments.studies.running import Mean, folder_for, measured, rendered, run_from_words
from knobwise.experiments.train.controller import STUDENT_STEPS

FOLDER = Path(__file__).with_name("measured")
MEASURED: dict[str, Callable[[], ProfileTable]] = {
    "builtin": builtin_profile,
    "ocr": ocr_profile,
    **{
        name: functools.partial(ProfileTable.load, FOLDER / f"{name}.safetensors")
        for name in ("python_files", "digits", "breast_cancer", "diabetes")
    },
}
"""How each measured table is read; README.md in the folder says how they were made."""
TEST_SAMPLES = 2000
STUDENT, TEACHER, UNGUARDED = "student (deployed)", "teacher", "teacher, no guard"
WITHOUT_GRPO = ", regression only"
"""Ending of the names of networks and teachers."""
LEARNERS = ("ridge", "kernel_ridge", "knn", "random_forest", "gradient_boosting", "latency_only")
BASELINES = (STATIC, "best_static", "lookup_table", *LEARNERS, "random")
CHARGED, FREE = "utility", "utility_free"
LEAST_HEADROOM = 0.05
"""With less headroom a share of it says nothing; such a table counts in utility only."""
MOST_LOST = 0.5
"""Points that a student may lose to its teacher, as a mean over the tables."""
PARTS = {
    "experts next to the network": (UNGUARDED, "network"),
    "weights learned out of fold, against equal ones": (UNGUARDED, "teacher, no guard, equal weights"),
    "the guard": (TEACHER, UNGUARDED),
    "GRPO, to the network": ("network", "network" + WITHOUT_GRPO),
    "GRPO, to the teacher": (TEACHER, TEACHER + WITHOUT_GRPO),
}
"""What each part adds: the policy with it, and without."""


@dataclass
class DecisionsConfig:
    """The settings, each as key=value."""

    tables: list[str] = field(default_factory=lambda: [*MEASURED, *(kind for kind in KINDS if kind != "wide_knobs")])
    """Measured tables and kinds of simulated ones."""
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
    unknown = [name for name in config.tables if name not in {**MEASURED, **KINDS}]
    if unknown:
        raise InputError(f"tables={unknown}: must be some of {', '.join([*MEASURED, *KINDS])}")
    # other measured tables or other default settings are measured anew
    groups = [GROUPS[name] for name in ("policy", "optimiser", "reward", "loss")]
    digests = [read().digest for read in MEASURED.values()]
    folder = folder_for(config.runs, [digests, KINDS, *groups, StudentConfig(), STUDENT_STEPS])
    # the built-in profile takes longest, so it goes first
    cells = {folder / f"{name}-{seed}.json": (name, seed) for name in config.tables for seed in range(config.seeds)}
    write_text(config.out, decisions_page(measured("tables × seeds", measure, cells, config.jobs)))
    return []


def table_of(name: str, seed: int) -> tuple[ProfileTable, Split]:
    """A table and its parts. A simulated one is fitted on the samples of its kind, and judged on further ones."""
    if name in MEASURED:
        table = MEASURED[name]()
        return table, table.split(seed=seed)
    size = KINDS[name].samples
    table = simulate(SimulatedConfig(name, size + TEST_SAMPLES, seed))
    train = round(0.75 * size)
    return table, Split(torch.arange(train), torch.arange(train, size), torch.arange(size, size + TEST_SAMPLES))


def measure(name: str, seed: int) -> dict[str, Any]:
    """Fit and judge every policy on one table with one seed."""
    table, split = table_of(name, seed)
    cell = _Cell(table, split, seed)
    for policy in make_baselines(table, split, seed, cell.budgets, cell.experts):
        cell.judge(policy.name, policy, cell.experts_seconds)
    # a network, experts and a guard around it, with and without GRPO
    teachers: dict[str, tuple[StackedController, float]] = {}
    for stage, (network, seconds) in cell.networks().items():
        cell.judge("network" + stage, network, seconds)
        teacher, more_seconds = _timed(cell.stack, network)
        teachers[stage] = teacher, seconds + cell.experts_seconds + more_seconds
    for ending, (teacher, seconds) in teachers.items():
        assert teacher.guard is not None
        cell.judge(TEACHER + ending, teacher, seconds, guard=teacher.guard.rows())
    # the default run: a student of the teacher
    (teacher, seconds), optimiser = teachers[""], GROUPS["optimiser"]["auto"]
    lessons = StudentConfig(steps=STUDENT_STEPS * (optimiser.warmup_iterations + optimiser.iterations))
    student, more_seconds = _timed(student_of, teacher, table, cell.fitted, seed, lessons)
    cell.judge(STUDENT, student, seconds + more_seconds)
    # its parts
    cell.judge(UNGUARDED, _with_weights(teacher, teacher.weights), seconds)
    equal = torch.full_like(teacher.weights, 1 / len(teacher.weights))
    cell.judge("teacher, no guard, equal weights", _with_weights(teacher, equal), seconds)
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
        self.experts, self.experts_seconds = _timed(Experts.fit, table, self.fitted, self.budgets, EXPERTS, seed)
        self.policies: list[dict[str, Any]] = []

    def networks(self) -> dict[str, tuple[Controller, float]]:
        """The network of the default run after its training and where GRPO begins, each with the CPU seconds until
        then, by the ending of its name."""
        names = {"policy": "auto", "loss": "exact", "optimiser": "auto", "reward": "utility"}
        groups = {group: GROUPS[group][name] for group, name in names.items()}
        start, networks = time.process_time(), {}
        trainer = ControllerTrainer(self.table, self.split, seed=self.seed, budgets_ms=self.budgets, **groups)
        grpo = trainer.stages[-1]

        def begin() -> None:
            grpo.begin()
            networks[WITHOUT_GRPO] = copy.deepcopy(trainer.agent), time.process_time() - start

        trainer.stages[-1] = replace(grpo, begin=begin)
        networks[""] = trainer.run(), time.process_time() - start
        return networks

    def stack(self, network: Controller) -> StackedController:
        """The teacher with this network; its guard knows what its student, which is deployed, is expected to cost."""
        expected_ms = expected_cost_ms(self.table, experts=False)
        about = self.table, self.fitted, network, GROUPS["policy"]["auto"], self.budgets, self.seed
        return fit_stack(*about, expected_ms, self.experts)

    def judge(self, name: str, policy: Any, seconds: float, **facts: Any) -> None:
        """Charged with its own cost, and for nothing."""
        table, test, budgets = self.table, self.split.test, self.budgets
        cost = own_cost(policy, table, test, budgets)
        row = {"policy": name, "decision_us": float(cost.decision_us.mean()), "cpu_seconds": seconds, **facts}
        for ending, charged_ms in (("", cost.charged_ms), ("_free", None)):
            means = judged_means(judge(policy, table, test, budgets, cost_ms=charged_ms))
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
        self.guard = [budget for row in rows.filter(policy=TEACHER)["guard"] for budget in row]

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
        return row | {"gap_measured": row["gap_free"] if self.name in MEASURED else None}


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
        measured=[each.name for each in tables if each.name in MEASURED],
        parts={words: [each.lead(*pair, FREE) for each in tables] for words, pair in PARTS.items()},
        STUDENT=STUDENT,
        TEACHER=TEACHER,
        UNGUARDED=UNGUARDED,
        FREE=FREE,
        LEAST_HEADROOM=LEAST_HEADROOM,
        MOST_LOST=MOST_LOST,
    )


main = functools.partial(run_from_words, "decisions", DecisionsConfig, run)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
