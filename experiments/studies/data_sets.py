"""Several data sets: one policy for all of them, one for each, or one carried over from the others; and k folds.

    python experiments/studies/data_sets.py key=value …

Measures what is missing and writes docs/data_sets.md, in about five minutes on two cores. Without `paths` it uses a
simulated profile (`knobwise.envs.simulated.calibrated`). The policy is a smaller version of the default: fewer
networks, with the baselines of the table as its experts. All policies are judged on the same held-out fifth of every
data set, under the data set's own five default budgets. Training seeds differ; the split of the samples does not.
"""

from __future__ import annotations

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
from knobwise.envs.configurations.budgets import quantile_budgets
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import RewardConfig
from knobwise.envs.readers.joint import rows_by_dataset, with_dataset_input
from knobwise.envs.simulated.calibrated import CalibratedConfig, simulate_calibrated
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.envs.tables.splits import k_folds, leave_one_out
from knobwise.experiments.command_line.compose import GROUPS
from knobwise.experiments.report.words import STATIC, policy_name
from knobwise.experiments.results.statistics import mean_interval, score_intervals
from knobwise.experiments.settings.profiles import JointProfile, read_profile
from knobwise.experiments.studies.running import folder_for, measured, rendered, run_from_words, write_page

TEST_PARTS = 5
"""The test part is one of so many parts of every data set."""
FITTED = {
    "all": "all data sets",
    "all, told": "all data sets, data set as input",
    "own": "its own data set",
    "others": "the other data sets",
    "others, told": "the other data sets, data set as input",
}
COMPARED = (
    (("policy", "all"), ("policy", "own"), "one policy for all − one for each"),
    (("policy", "all, told"), ("policy", "all"), "one for all: data set as input − without"),
    (("policy", "all, told"), ("policy", "own"), "one for all, data set as input − one for each"),
    (("policy", "others"), ("policy", "own"), "unseen data set − its own policy"),
    (("policy", "others, told"), ("policy", "others"), "unseen data set: data set as input − without"),
    (("policy", "others"), ("static", "own"), "unseen data set − static of the data set"),
    (("policy", "others"), ("static", "others"), "unseen data set − static of the other data sets"),
    (("policy", "all"), ("static", "own"), "one policy for all − static of the data set"),
    (("static", "all"), ("static", "own"), "static of all − static of the data set"),
)
"""Differences: a policy and what it is fitted on, a key of `FITTED`."""
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

    name: str
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
    names = [task.name for task in tasks_of(table, config.folds)]
    cells = {
        folder / f"{name.replace('/', '-')}-{seed}.json": (folder, name, seed, asdict(config))
        for seed in config.seeds
        for name in names
    }
    results = measured("tasks × seeds", measure, cells, config.jobs)
    utilities = {name: results[number :: len(names)] for number, name in enumerate(names)}
    facts = {key: getattr(config, key) for key in ("seeds", "simple", "folds", "members")}
    facts |= {"profile": table.name, "samples": table.num_samples, "configurations": table.num_configurations}
    page = data_sets_page(utilities, facts | {"simulated": not config.paths})
    rich.print(Markdown(page))
    write_page(config.out, page)
    return []


def read_table(config: DataSetsConfig) -> ProfileTable:
    """The given profiles as one, or a simulated one with few configurations and narrow features, which keeps the study
    short."""
    if config.paths:
        return read_profile(JointProfile(paths=config.paths, features=list(config.features) or None))
    simulated = CalibratedConfig(samples=config.samples, grid="27", image_width=48, language_width=64)
    return simulate_calibrated(simulated)


def tasks_of(table: ProfileTable, folds: int) -> list[Task]:
    """Everything that is fitted with each seed.

    Raises:
        InputError: the table has one data set only.
    """
    without = leave_one_out(table)
    base = k_folds(table, TEST_PARTS)[0]
    tests = {name: base.test[places] for name, places in rows_by_dataset(table, base.test).items()}

    def only(rows: Tensor, name: str) -> Tensor:
        return rows[rows_by_dataset(table, rows)[name]]

    tasks = [Task("all", False, base, tests), Task("all, told", True, base, tests)]
    for name, test in tests.items():
        tasks.append(Task(f"own {name}", False, Split(*(only(rows, name) for rows in base)), {name: test}))
    for dataset_input in (False, True):
        for name, test in tests.items():
            words = f"others {name}" + ", told" * dataset_input
            tasks.append(Task(words, dataset_input, without[name]._replace(test=test), {name: test}))
    first = next(iter(tests))
    for number, split in enumerate(k_folds(table, folds)):
        parts = Split(*(only(rows, first) for rows in split))
        tasks.append(Task(f"fold {number} {first}", False, parts, {first: parts.test}))
    return tasks


def measure(folder: Path, name: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Fit and judge one task with one seed."""
    config, table = DataSetsConfig(**settings), ProfileTable.load(folder / "table.safetensors")
    task = next(task for task in tasks_of(table, config.folds) if task.name == name)
    return utilities_of(table, task, seed, config)


def utilities_of(table: ProfileTable, task: Task, seed: int, config: DataSetsConfig) -> dict[str, Any]:
    """{policy: {data set: [utility of each test sample, mean over the data set's budgets]}}."""
    table = with_dataset_input(table) if task.dataset_input else table
    fitted = torch.cat([task.split.train, task.split.validation])
    budgets = quantile_budgets(table.latency_ms[fitted], table.mask[fitted])
    settings = replace(GROUPS["policy"]["utility"], members=config.members, experts=tuple(config.simple))
    trainer = ControllerTrainer(
        table,
        task.split,
        policy=settings,
        optimiser=GROUPS["optimiser"]["utility"],
        reward=GROUPS["reward"]["utility"],
        budgets_ms=budgets,
        seed=seed,
    )
    policies: dict[str, Policy[Tensor]] = {
        "policy": fit_stack(table, fitted, trainer.run(), settings, budgets, seed),
        "static": BudgetAwareStatic(table, fitted),
    }
    cells, normaliser = Measured.from_table(table, fitted, budgets, seed=0), FeatureNormaliser.fit(table, fitted)
    for fit in fit_experts(table, cells, normaliser, config.simple, seed=0):
        policies[fit.expert.name] = PredictThenChoose(fit.expert.name, fit.expert, normaliser)
    rewards, everything = RewardTable(table, RewardConfig()), torch.arange(table.num_samples)
    utilities: dict[str, Any] = {name: {} for name in (*policies, "oracle")}
    for dataset, rows in task.tests.items():
        of_dataset = everything[rows_by_dataset(table, everything)[dataset]]
        limits = quantile_budgets(table.latency_ms[of_dataset], table.mask[of_dataset])
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
        return [utilities(measured, fitted, policy, name) for name in names]

    def by_fold(policy: str) -> list[np.ndarray]:
        seeds_of_folds = [measured[f"fold {number} {names[0]}"] for number in range(facts["folds"])]
        return [np.array([seed[policy][names[0]] for seed in seeds]) for seeds in seeds_of_folds]

    policies = [(policy, fitted) for policy in ("policy", *facts["simple"]) for fitted in FITTED]
    policies += [("static", fitted) for fitted in ("own", "all", "others")] + [("oracle", "all")]
    return rendered(
        "data_sets.md.j2",
        **facts,
        names=names,
        policies=_rows({pair: by_dataset(*pair) for pair in policies}, ("static", "own"), ("oracle", "all")),
        differences={
            words: [a - b for a, b in zip(by_dataset(*pair), by_dataset(*other), strict=True)]
            for pair, other, words in COMPARED
        },
        by_fold=_rows(
            {(policy, "own"): by_fold(policy) for policy in ("policy", *facts["simple"], "static", "oracle")},
            ("static", "own"),
            ("oracle", "own"),
        ),
        concatenated=lambda columns: np.concatenate(columns, 1),
        mean_interval=mean_interval,
    )


def utilities(measured: Utilities, fitted: str, policy: str, dataset: str) -> np.ndarray:
    """Float64 [S, n]: utility of a policy, fitted on a key of `FITTED`, for the test samples of a data set.

    The S rows are equal where the seed of training changes nothing.
    """
    name, _, with_input = fitted.partition(",")
    task = fitted if name == "all" else f"{name} {dataset}" + (f",{with_input}" if with_input else "")
    return np.array([seed[policy][dataset] for seed in measured[task]])


def _rows(
    columns: Mapping[tuple[str, str], list[np.ndarray]], low: tuple[str, str], high: tuple[str, str]
) -> list[dict[str, Any]]:
    """For each policy its columns, float64 [S, n], the spread between them, and the share of the way from `low` to
    `high` that it closes."""
    every = {pair: np.concatenate(values, 1) for pair, values in columns.items()}
    references = every[low][0], every[high][0]
    rows = []
    for pair, values in every.items():
        gap = (values.mean() - references[0].mean()) / (references[1].mean() - references[0].mean())
        ci95 = score_intervals([(values, *references)])[0]["gap_closed_ci95"]
        rows.append(
            {
                "policy": policy_name({"policy": "learned policy", "static": STATIC}.get(pair[0], pair[0])),
                "fitted": "" if pair == high else FITTED[pair[1]],
                "columns": columns[pair],
                "all": values,
                "spread": float(np.std([each.mean() for each in columns[pair]], ddof=1)),
                "gap": {low: "0", high: "1"}.get(pair, f"{gap:z.2f} [{ci95[0]:z.2f}, {ci95[1]:z.2f}]"),
            }
        )
    return rows


def main(words: list[str]) -> int:
    """Run from `key=value` words; returns the exit status."""
    return run_from_words("data_sets", DataSetsConfig, run, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
