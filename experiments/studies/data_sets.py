"""Several data sets: one policy for all of them, one for each, or one carried over from the others; and k folds.

    python experiments/studies/data_sets.py key=value …

Measures what is missing and writes docs/data_sets.md, in about five minutes on two cores. Without `paths` it uses a
simulated profile (`knobwise.envs.simulated.calibrated`). The policy is a smaller version of the default: fewer
networks, with the baselines of the table as its experts. All policies are judged on the same held-out fifth of every
data set, under the data set's own five default budgets. Training seeds differ; the split of the samples does not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rich
import torch
from rich.markdown import Markdown
from torch import Tensor

from knobwise.agents.controller.settings import EXPERTS
from knobwise.agents.judging.baselines import BudgetAwareStatic, Oracle, PredictThenChoose
from knobwise.agents.judging.evaluation import judge
from knobwise.agents.judging.policy import Policy
from knobwise.agents.predictors.experts import Measured, fit_experts
from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.agents.stack.stacked_controller import fit_stack
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.common.files import write_text
from knobwise.envs.configurations.budgets import quantile_budgets
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import RewardConfig
from knobwise.envs.readers.joint import rows_by_dataset, with_dataset_input
from knobwise.envs.simulated.calibrated import CalibratedConfig, simulate_calibrated
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.envs.tables.splits import k_folds, leave_one_out
from knobwise.experiments.command_line.compose import GROUPS
from knobwise.experiments.report.words import policy_name
from knobwise.experiments.results.statistics import mean_interval, score_intervals
from knobwise.experiments.settings.profiles import JointProfile, read_profile
from knobwise.experiments.studies.running import folder_for, measured, rendered, run_from_words

TEST_PARTS = 5
"""The test part is one of so many parts of every data set."""
Utilities = Mapping[str, Sequence[Mapping[str, Mapping[str, list[float]]]]]
"""Task → for each seed: policy → data set → utility of each test sample."""


@dataclass
class DataSetsConfig:
    """The settings, each as key=value."""

    paths: list[str] = field(default_factory=list)
    """Profiles with the same knobs, as for profile=joint; empty for the simulated one."""
    features: list[str] = field(default_factory=list)
    """Feature files, one for each path; empty if the paths hold their features."""
    samples: int = 400
    """Samples of each simulated data set."""
    simple: list[str] = field(default_factory=lambda: ["ridge", "kernel_ridge"])
    """The baselines next to static, and the experts of the policy: ridge, kernel_ridge, knn, random_forest,
    gradient_boosting."""
    folds: int = 5
    """Number of folds, on the first data set."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Training seeds."""
    members: int = 3
    """Networks in the policy."""
    runs: str = "runs/data_sets"
    """Where measurements are kept; a finished one is not repeated."""
    out: str = "docs/data_sets.md"
    """The page."""
    jobs: int = 2
    """Processes at the same time, one thread each."""

    def __post_init__(self) -> None:
        for name in self.simple:
            one_of("simple", name, EXPERTS)
        if not self.seeds or self.members < 2 or self.samples < 20:
            raise InputError("data_sets: needs seeds, members ≥ 2 and samples ≥ 20")


class Task(NamedTuple):
    """What to fit, and on what to judge it."""

    dataset_input: bool
    """Whether the data set is an input."""
    split: Split
    tests: dict[str, Tensor]
    """Data set → rows."""


def run(config: DataSetsConfig) -> list[str]:
    """Measure every task with every seed, print the page and write it.

    Raises:
        InputError: profiles that cannot be joined, or that have one data set only.
    """
    table = read_table(config)
    fitted = [config.simple, config.members, config.folds, GROUPS["policy"]["utility"], GROUPS["optimiser"]["utility"]]
    folder = folder_for(config.runs, [table.digest, fitted])
    if not (folder / "table.safetensors").exists():
        table.save(folder / "table.safetensors")
    cells = {
        folder / f"{name.replace('/', '-')}-{seed}.json": (folder, name, seed, config)
        for seed in config.seeds
        for name in tasks_of(table, config.folds)
    }
    utilities: dict[str, Any] = {}
    results = measured("tasks × seeds", measure, cells, config.jobs)
    for (_, name, *_), result in zip(cells.values(), results, strict=True):
        utilities.setdefault(name, []).append(result)
    facts = {"profile": table.name, "samples": table.num_samples, "configurations": table.num_configurations}
    page = data_sets_page(utilities, asdict(config) | facts | {"simulated": not config.paths})
    rich.print(Markdown(page))
    write_text(config.out, page)
    return []


def read_table(config: DataSetsConfig) -> ProfileTable:
    """The given profiles as one, or a simulated one with few configurations and narrow features, which keeps the study
    short."""
    if config.paths:
        return read_profile(JointProfile(paths=config.paths, features=list(config.features) or None))
    simulated = CalibratedConfig(samples=config.samples, grid="27", image_width=48, language_width=64)
    return simulate_calibrated(simulated)


def tasks_of(table: ProfileTable, folds: int) -> dict[str, Task]:
    """Everything that is fitted with each seed, by name.

    Raises:
        InputError: the table has one data set only.
    """
    without = leave_one_out(table)
    base = k_folds(table, TEST_PARTS)[0]
    tests = {name: base.test[places] for name, places in rows_by_dataset(table, base.test).items()}

    def only(split: Split, name: str) -> Split:
        return Split(*(rows[rows_by_dataset(table, rows)[name]] for rows in split))

    tasks = {"all": Task(False, base, tests), "all, told": Task(True, base, tests)}
    for name, test in tests.items():
        tasks[f"own {name}"] = Task(False, only(base, name), {name: test})
    for name, test in tests.items():
        split = without[name]._replace(test=test)
        tasks |= {f"others {name}": Task(False, split, {name: test})}
        tasks |= {f"others {name}, told": Task(True, split, {name: test})}
    first = next(iter(tests))
    for number, fold in enumerate(k_folds(table, folds)):
        split = only(fold, first)
        tasks[f"fold {number} {first}"] = Task(False, split, {first: split.test})
    return tasks


def measure(folder: Path, name: str, seed: int, config: DataSetsConfig) -> dict[str, Any]:
    """Fit and judge one task with one seed."""
    table = ProfileTable.load(folder / "table.safetensors")
    return utilities_of(table, tasks_of(table, config.folds)[name], seed, config)


def utilities_of(table: ProfileTable, task: Task, seed: int, config: DataSetsConfig) -> dict[str, Any]:
    """{policy: {data set: [utility of each test sample, mean over the data set's budgets]}}."""
    table = with_dataset_input(table) if task.dataset_input else table
    fitted = torch.cat([task.split.train, task.split.validation])
    budgets = quantile_budgets(table.latency_ms[fitted], table.mask[fitted])
    settings = replace(GROUPS["policy"]["utility"], members=config.members, experts=tuple(config.simple))
    groups: dict[str, Any] = {name: GROUPS[name]["utility"] for name in ("optimiser", "reward")}
    trainer = ControllerTrainer(table, task.split, policy=settings, **groups, budgets_ms=budgets, seed=seed)
    policies: dict[str, Policy[Tensor]] = {
        "policy": fit_stack(table, fitted, trainer.run(), settings, budgets, seed),
        "static": BudgetAwareStatic(table, fitted),
    }
    cells, normaliser = Measured.from_table(table, fitted, budgets, seed=0), FeatureNormaliser.fit(table, fitted)
    for fit in fit_experts(table, cells, normaliser, config.simple, seed=0):
        policies[fit.expert.name] = PredictThenChoose(fit.expert.name, fit.expert, normaliser)
    rewards, rows_of = RewardTable(table, RewardConfig()), rows_by_dataset(table, torch.arange(table.num_samples))
    utilities: dict[str, Any] = {name: {} for name in (*policies, "oracle")}
    for dataset, rows in task.tests.items():
        limits = quantile_budgets(table.latency_ms[rows_of[dataset]], table.mask[rows_of[dataset]])
        for name, policy in {**policies, "oracle": Oracle(table, rows)}.items():
            utilities[name][dataset] = judge(policy, table, rows, limits, rewards).utility.mean(1).tolist()
    return utilities


# -- the page ----------------------------------------------------------------------------------------------------------


def data_sets_page(measured: Utilities, facts: Mapping[str, Any]) -> str:
    """docs/data_sets.md.

    Args:
        measured: the utilities.
        facts: profile, samples, configurations, simulated, seeds, simple, folds, members.
    """
    names = list(measured["all"][0]["policy"])

    def by_dataset(policy: str, fitted: str) -> list[np.ndarray]:
        name, _, dataset_input = fitted.partition(",")
        tasks = [name if name == "all" else f"{name} {dataset}" for dataset in names]
        tasks = [f"{task},{dataset_input}" if dataset_input else task for task in tasks]
        return [utilities(measured[task], policy, dataset) for task, dataset in zip(tasks, names, strict=True)]

    def by_fold(policy: str) -> list[np.ndarray]:
        folds = [measured[f"fold {number} {names[0]}"] for number in range(facts["folds"])]
        return [utilities(fold, policy, names[0]) for fold in folds]

    functions: dict[str, Any] = {
        "by_dataset": by_dataset,
        "by_fold": by_fold,
        "gap_closed": gap_closed,
        "spread": spread,
    }
    functions |= {"joined": np.hstack, "paired": zip, "mean_interval": mean_interval, "policy_name": policy_name}
    return rendered("data_sets.md.j2", **facts, names=names, **functions)


def utilities(seeds: Sequence[Mapping[str, Mapping[str, list[float]]]], policy: str, dataset: str) -> np.ndarray:
    """Float64 [S, n]: utility of a policy for the test samples of a data set. The S rows are equal where the seed of
    training changes nothing."""
    return np.array([seed[policy][dataset] for seed in seeds])


def spread(columns: Sequence[np.ndarray]) -> float:
    """The standard deviation of their means."""
    return float(np.std([values.mean() for values in columns], ddof=1))


def gap_closed(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[float, list[float]]:
    """The share of the way from `low` to `high`, float64 [S, n] each, that a policy closes, and its interval."""
    share = (values.mean() - low[0].mean()) / (high[0].mean() - low[0].mean())
    return float(share), score_intervals([(values, low[0], high[0])])[0]["gap_closed_ci95"]


main = functools.partial(run_from_words, "data_sets", DataSetsConfig, run)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
