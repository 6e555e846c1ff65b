"""Several data sets: one policy for all of them, one for each, or one carried over from the others; and k folds.

    python experiments/studies/data_sets.py key=value …

measures what is not measured yet and writes docs/data_sets.md, some five minutes on two cores. Without paths it takes
a simulated profile (`knobwise.envs.simulated.calibrated`). The policy is the default one made smaller: fewer networks,
and the simple ways of the table as its experts. All are judged on the same held-out fifth of every data set, under the
data set's own five default budgets; training seeds differ, the division of the samples does not.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from threadpoolctl import threadpool_limits
from torch import Tensor

from knobwise.agents.controller.controller import Controller
from knobwise.agents.judging.baselines import BudgetAwareStatic, Oracle, PredictThenChoose
from knobwise.agents.judging.evaluation import Chooses, judge
from knobwise.agents.predictors.experts import Measured, fit_experts
from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.agents.stack.stacked_controller import fit_stack
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.agents.training.settings import EXPERTS, one_of
from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.common.interruption import status_of, stopped_by_signals
from knobwise.common.processes import in_processes
from knobwise.envs.configurations.budgets import quantile_budgets
from knobwise.envs.configurations.reward import RewardConfig, RewardTable
from knobwise.envs.readers.joint import rows_by_dataset, with_dataset_input
from knobwise.envs.simulated.calibrated import CalibratedConfig, simulate_calibrated
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.envs.tables.splits import k_folds, leave_one_out
from knobwise.experiments.command_line.settings import GROUPS
from knobwise.experiments.settings.profiles import JointProfile, read_profile
from knobwise.experiments.studies.data_sets_page import lines_of, page_of

ROWS_PER_TEST = 5
"""One of so many parts of every data set is the test part."""


@dataclass
class DataSetsConfig:
    """The settings, each as key=value."""

    paths: list[str] = field(default_factory=list)
    """Profiles with the same knobs, as for profile=joint; none for the simulated one."""
    features: list[str] = field(default_factory=list)
    """Feature files, one for each path; none where the paths have them inside."""
    samples: int = 400
    """Samples of each simulated data set."""
    simple: list[str] = field(default_factory=lambda: ["ridge", "kernel_ridge"])
    """The simple ways beside static, and experts of the policy: ridge, kernel_ridge, knn, random_forest,
    gradient_boosting."""
    folds: int = 5
    """k, on the first data set."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Training seeds."""
    members: int = 3
    """Networks of the policy."""
    runs: str = "runs/data_sets"
    """Where each measurement is kept; what is there is not measured again."""
    out: str = "docs/data_sets.md"
    """The page."""
    jobs: int = 2
    """Processes at once, one thread each."""

    def __post_init__(self) -> None:
        for name in self.simple:
            one_of("simple", name, EXPERTS)
        if not self.seeds or self.members < 2 or self.samples < 20:
            raise InputError("data_sets: needs seeds, members ≥ 2 and samples ≥ 20")


class Way(NamedTuple):
    """One thing to train, and what it is judged on."""

    name: str
    told: bool
    """Whether the data set is an input."""
    split: Split
    tests: dict[str, Tensor]
    """Data set → rows."""


def run(config: DataSetsConfig) -> Path:
    """Train everything with every seed, print the table, and write the page; gives its path.

    Raises:
        InputError: profiles that cannot be joined, or of one data set only.
    """
    table = read_table(config)
    folder = folder_of(table, config)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "table.safetensors").exists():
        table.save(folder / "table.safetensors")
    names = [way.name for way in ways_of(table, config.folds)]
    wanted = [(name, seed) for seed in config.seeds for name in names]
    missing = [cell for cell in wanted if not _file(folder, *cell).exists()]
    done = len(wanted) - len(missing)
    in_processes("ways × seeds", measure, [(folder, *cell, asdict(config)) for cell in missing], config.jobs, done)
    found = {name: [json.loads(_file(folder, name, seed).read_text()) for seed in config.seeds] for name in names}
    facts = {"profile": table.name, "samples": table.num_samples, "configurations": table.num_configurations}
    facts |= {"simulated": not config.paths, "seeds": config.seeds, "simple": config.simple, "folds": config.folds}
    facts["members"] = config.members
    print("\n".join(lines_of(found, facts)))
    with written_whole(config.out) as temporary:
        temporary.write_text(page_of(found, facts), encoding="utf-8")
    return Path(config.out)


def folder_of(table: ProfileTable, config: DataSetsConfig) -> Path:
    """Where measurements are kept: another profile, or other settings of what is fitted, are other measurements."""
    fitted = [config.simple, config.members, config.folds, GROUPS["policy"]["utility"], GROUPS["optimiser"]["utility"]]
    return Path(config.runs) / hashlib.sha256(repr([table.digest, fitted]).encode()).hexdigest()[:12]


def read_table(config: DataSetsConfig) -> ProfileTable:
    """The profiles of the settings as one, or the simulated one, with few configurations and narrow features so that
    the study stays short."""
    if config.paths:
        return read_profile(JointProfile(paths=config.paths, features=list(config.features) or None))
    simulated = CalibratedConfig(samples=config.samples, grid="27", image_width=48, language_width=64)
    return simulate_calibrated(simulated)


def _file(folder: Path, name: str, seed: int) -> Path:
    return folder / f"{name.replace('/', '-')}-{seed}.json"


def ways_of(table: ProfileTable, folds: int) -> list[Way]:
    """Everything that is trained with each seed.

    Raises:
        InputError: one data set only.
    """
    carried = leave_one_out(table)
    base = k_folds(table, ROWS_PER_TEST)[0]
    tests = {name: base.test[places] for name, places in rows_by_dataset(table, base.test).items()}

    def only(rows: Tensor, name: str) -> Tensor:
        return rows[rows_by_dataset(table, rows)[name]]

    ways = [Way("all", False, base, tests), Way("all, told", True, base, tests)]
    for name, test in tests.items():
        ways.append(Way(f"own {name}", False, Split(*(only(rows, name) for rows in base)), {name: test}))
    for told in (False, True):
        for name, test in tests.items():
            words = f"others {name}" + ", told" * told
            ways.append(Way(words, told, carried[name]._replace(test=test), {name: test}))
    first = next(iter(tests))
    for number, split in enumerate(k_folds(table, folds)):
        parts = Split(*(only(rows, first) for rows in split))
        ways.append(Way(f"fold {number} {first}", False, parts, {first: parts.test}))
    return ways


def measure(folder: Path, name: str, seed: int, settings: dict[str, Any]) -> str:
    """Train and judge one way with one seed, and keep what every test sample got."""
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    config = DataSetsConfig(**settings)
    table = ProfileTable.load(folder / "table.safetensors")
    way = next(way for way in ways_of(table, config.folds) if way.name == name)
    with threadpool_limits(1):
        found = measured(table, way, seed, config)
    with written_whole(_file(folder, name, seed)) as temporary:
        temporary.write_text(json.dumps(found))
    return f"{name}, seed {seed}"


def measured(table: ProfileTable, way: Way, seed: int, config: DataSetsConfig) -> dict[str, Any]:
    """{policy: {data set: [utility of each test sample, mean over the data set's budgets]}}."""
    table = with_dataset_input(table) if way.told else table
    fitted = torch.cat([way.split.train, way.split.validation])
    budgets = quantile_budgets(table.latency_ms[fitted], table.mask[fitted])
    policy, optimiser = GROUPS["policy"]["utility"], GROUPS["optimiser"]["utility"]
    policy = replace(policy, members=config.members, experts=tuple(config.simple))
    trainer = ControllerTrainer(
        table,
        way.split,
        policy=policy,
        optimiser=optimiser,
        reward=GROUPS["reward"]["utility"],
        budgets_ms=budgets,
        seed=seed,
    )
    choosers: dict[str, Chooses] = {
        "policy": fit_stack(table, fitted, _run(trainer), policy, budgets, seed),
        "static": BudgetAwareStatic(table, fitted),
    }
    cells, normaliser = Measured.of(table, fitted, budgets, seed=0), FeatureNormaliser.fit(table, fitted)
    for one in fit_experts(table, cells, normaliser, config.simple, seed=0):
        choosers[one.expert.name] = PredictThenChoose(one.expert.name, one.expert, normaliser)
    rewards, everything = RewardTable(table, RewardConfig()), torch.arange(table.num_samples)
    found: dict[str, Any] = {name: {} for name in (*choosers, "oracle")}
    for dataset, rows in way.tests.items():
        own = everything[rows_by_dataset(table, everything)[dataset]]
        asked = quantile_budgets(table.latency_ms[own], table.mask[own])
        for name, chooser in {**choosers, "oracle": Oracle(table, rows)}.items():
            found[name][dataset] = judge(chooser, table, rows, asked, rewards).utility.mean(1).tolist()
    return found


def _run(trainer: ControllerTrainer) -> Controller:
    """Train without lines in between: the study's own progress is said by another process."""
    with redirect_stderr(StringIO()):
        controller: Controller = trainer.run()
    return controller


def main(words: Sequence[str]) -> int:
    """`python experiments/studies/data_sets.py key=value …`."""
    try:
        schema = OmegaConf.structured(DataSetsConfig)
        merged = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.from_cli(list(words))))
        assert isinstance(merged, DataSetsConfig)
        with stopped_by_signals():
            print(f"page: {run(merged)}")
    except (InputError, OmegaConfBaseException) as error:
        print(f"data_sets: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print("data_sets: stopped; the same command measures what is missing", file=sys.stderr)
        return status_of(stop)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
