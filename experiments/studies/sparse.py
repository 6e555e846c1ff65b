"""What GRPO adds to imitation where few cells of a profile were measured.

Of a whole profile, a share of the cells of training and validation samples is kept (the balanced
random design). The table is completed, the teacher is trained on it and imitated, as by
`policy=auto`, but smaller for all ways alike: two folds, three families of predictors, 300
iterations of imitation, 150 of GRPO; without drift; and decisions cost nothing. From the same
weights, and on the same contexts, exact GRPO then learns from one of three rewards:

- `completed`: measured cells as measured, predictions elsewhere;
- `robust`: doubly robust, r̂ + w·(r − r̂) with cross-fitted predictions r̂ and w = 1/probability;
- `measured`: b + w·(r − b) where measured and b elsewhere, b the mean of the context's measured
  cells. With a single cell there is nothing to compare, and it learns nothing.

Each is judged without its guard on the test samples of the whole profile, at its default budgets.
The weights of GRPO that are judged are the last ones: no choice among checkpoints favours any way.

How ways are compared was fixed before the runs:

- All four ways are tuned alike, once: on draw 99 of the built-in profile with 1/16 of the cells,
  the learning rate times 1 or 0.3, by utility on the validation samples of the whole profile.
  `TUNED` holds the result for all runs.
- Five draws of the cells, three shares, three profiles; the seed of the split is the draw modulo 3.
- A way replaces imitation alone as the default on sparse profiles if its pooled gain over
  imitation, the mean over all profiles and shares, has a 95 % interval above 0, and if its point
  estimate is above the others'. Else the plainest way stays: imitation decides alone, and GRPO is
  an option.
  Intervals are bootstraps over draws and test samples.

Beside that, imitation alone is trained on a 64th of the cells. It is judged without and with its
guard, which is calibrated by doubly robust estimates.

    python experiments/studies/sparse.py tune sparse
    python experiments/studies/sparse.py run sparse
    python experiments/studies/sparse_tables.py sparse docs/sparse.svg
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import knobwise
from knobwise.agents.calibration.calibrate import calibrate_controller
from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.calibration.training import distillation_trainer
from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.controller.settings import hidden_for
from knobwise.agents.evaluation.baselines import fit_static
from knobwise.agents.evaluation.evaluation import evaluate_policy
from knobwise.agents.evaluation.policy import Policy
from knobwise.agents.problem import Problem
from knobwise.agents.teacher.beliefs import fit_beliefs
from knobwise.agents.training.controller_stages import ExactGRPO
from knobwise.agents.training.controllers import make_trainer
from knobwise.agents.training.seeding import seeded
from knobwise.agents.training.stage import Validation
from knobwise.agents.training.state import Best
from knobwise.envs.bandit.budgets import default_budgets
from knobwise.envs.bandit.reward import RewardTable
from knobwise.envs.bandit.settings import TRAINING_REWARD
from knobwise.envs.tables.beliefs import Beliefs
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.experiments.settings.choices import AUTO, DISTILLED_OPTIMISER
from knobwise.losses.settings import LossConfig
from knobwise.profiling.design.cell_design import CellDesign, balanced_cells, with_cells
from knobwise.testbeds.profiles import builtin_profile, ocr_profile, smollm_profile

PROFILES = {"builtin": builtin_profile, "ocr": ocr_profile, "smollm": smollm_profile}
SHARES: tuple[Fraction, ...] = (Fraction(1, 32), Fraction(1, 16), Fraction(1, 4))
CURVE: tuple[Fraction, ...] = (Fraction(1, 64), *SHARES)
DRAWS = 5
SPLITS = 3
WAYS: tuple[str, ...] = ("completed", "robust", "measured")
FACTORS = (1.0, 0.3)
TUNED = {"imitation": 0.3, "completed": 0.3, "robust": 0.3, "measured": 0.3}
"""The factor on the learning rate of each way, by `tune`: 0.3 was better than 1 for all four."""
TUNING_DRAW = 99
RESAMPLES = 4000

POLICY = replace(
    AUTO, drift=0.0, fold_networks=2, experts=("ridge", "kernel_ridge", "gradient_boosting")
)
OPTIMISER = replace(DISTILLED_OPTIMISER, pretrain_iterations=300, iterations=150)

Values = dict[str, Tensor]


# -- a profile with holes --------------------------------------------------------------------------


@functools.cache
def profile_named(profile: str) -> ProfileTable:
    """Read a profile by its name, or the table of a folder."""
    if profile in PROFILES:
        return PROFILES[profile]()
    features = Path(profile) / "features.npz"
    table = Path(profile) / "table.parquet"
    return knobwise.read(table, features=features if features.exists() else None)


def name_of(profile: str) -> str:
    """Return the name of a profile, without the path."""
    return Path(profile).name


def cells_drawn(share: Fraction, configurations: int) -> float:
    """Return the mean number of cells of a sample, at least 1."""
    return max(1.0, float(share * configurations))


def drawn_cells(whole: ProfileTable, split: Split, share: Fraction, draw: int) -> CellDesign:
    """Draw a share of the cells of the samples to fit on; those to test on are measured whole.

    Each sample has at least one. Where the share is no whole number of its cells, some samples
    drawn at random have another.
    """
    fitted = split.fitted
    count = whole.num_configurations
    cells_of_sample = cells_drawn(share, count)
    fewest = int(cells_of_sample)
    fewer, more = (balanced_cells(len(fitted), count, n, draw) for n in (fewest, fewest + 1))
    another = np.random.default_rng(draw).random((len(fitted), 1)) < cells_of_sample - fewest
    probability = np.ones(whole.mask.shape)
    drawn = more.where(torch.from_numpy(another), fewer).numpy()
    probability[fitted] = np.where(drawn, cells_of_sample / count, np.nan)
    return CellDesign(probability)


def sparse(whole: ProfileTable, split: Split, design: CellDesign) -> Problem:
    """Return the problem in which only the cells of a design were measured."""
    part = with_cells(whole, torch.from_numpy(design.cells))
    weight = torch.from_numpy(design.weight).float()
    part = replace(part, sampling_weight=weight)
    return Problem(part, split, beliefs=fit_beliefs(part, split, folds=POLICY.fold_networks))


class CheckedRewards(RewardTable):
    """Rewards that are doubly robust, or with `measured_only` those of measured cells alone."""

    def __init__(self, beliefs: Beliefs, measured_only: bool) -> None:
        super().__init__(beliefs.filled, TRAINING_REWARD)
        self.beliefs = beliefs
        self.measured_only = measured_only
        versions = (beliefs.measured, beliefs.predicted)
        self.of_version = {id(v): RewardTable(v, TRAINING_REWARD) for v in versions}

    def all(self, rows: Tensor, budgets_ms: Tensor) -> Tensor:
        def rewards_in(version: ProfileTable) -> Tensor:
            return self.of_version[id(version)].all(rows, budgets_ms)

        if not self.measured_only:
            cells = rows.unsqueeze(1), torch.arange(self.beliefs.weight.shape[1])
            return self.beliefs.estimate(cells, rewards_in)
        rewards = rewards_in(self.beliefs.measured)
        mean = rewards.nanmean(1, keepdim=True)
        return mean + (self.beliefs.weight[rows] * (rewards - mean)).nan_to_num()


# -- training --------------------------------------------------------------------------------------


class LastGRPO(ExactGRPO):
    """GRPO whose last weights are kept."""

    def is_better(self, validation: Validation, best: Best) -> bool:
        return True


class Imitation:
    """A policy that imitates its teacher, and what GRPO makes of it.

    Args:
        problem: what to learn; test samples are not used.
        budgets_ms: float [B], those that will be judged.
        factor: on the learning rate.
    """

    def __init__(self, problem: Problem, budgets_ms: Tensor, factor: float = 1.0) -> None:
        table = problem.facts
        inputs = FeatureNormaliser.fit(table, problem.split.fitted).width
        budget_us = 1e3 * float(budgets_ms.min())
        hidden = hidden_for(inputs, table.num_configurations, POLICY.utility_head, budget_us)
        lr = factor * OPTIMISER.pretrain_lr
        trainer = distillation_trainer(
            problem,
            policy=replace(POLICY, hidden=hidden),
            loss=LossConfig(kl_to_ref_coeff=1.0),
            optimiser=replace(OPTIMISER, pretrain_lr=lr, iterations=0),
            budgets_ms=budgets_ms,
        )
        self.agent = trainer.run()
        self.setup = trainer.setup
        self.deployed = calibrate_controller(self.setup, budgets_ms)
        self.teacher = self.setup.distiller.fitted.teacher
        # its targets are large, and no longer needed
        self.setup.distiller = None

    def improved(self, way: str, factor: float) -> DeployedController:
        """Run GRPO from the weights of imitation, on the rewards of this way."""
        setup = copy.deepcopy(self.setup)
        setup.settings = replace(
            OPTIMISER, lr=factor * OPTIMISER.lr, patience=0, evaluate_every=OPTIMISER.iterations
        )
        if way != "completed":
            beliefs = setup.problem.beliefs
            assert beliefs is not None
            setup.env.rewards = CheckedRewards(beliefs, way == "measured")
        with seeded(0, "cpu"):
            agent = DeployedController(setup.controller).eval()
            make_trainer(setup, agent, [LastGRPO(setup)]).run()
        return agent


# -- runs ------------------------------------------------------------------------------------------


def judged(policy: Policy, whole: ProfileTable, rows: Tensor, budgets_ms: Tensor) -> Tensor:
    """Return the utility of samples, the mean over the budgets, float [n]."""
    return evaluate_policy(policy, whole, rows, budgets_ms).utility.mean(1)


@dataclass(frozen=True)
class Case:
    """A part of a profile that is measured, and learned from.

    Args:
        profile: its name, or the path of a table.
        share: of the cells.
        draw: of the cells.
    """

    profile: str
    share: Fraction
    draw: int

    def path(self, folder: Path) -> Path:
        """Return where the utilities are kept."""
        return folder / f"{name_of(self.profile)}-{self.share.denominator}-{self.draw}.npz"

    @property
    def ways(self) -> Sequence[str]:
        """The rewards that GRPO learns from."""
        if self.profile not in PROFILES:
            return ()
        if self.share == 1:
            return WAYS[:1]
        return WAYS if self.share in SHARES else ()

    def problem(self, whole: ProfileTable, split: Split) -> Problem:
        """Return the problem in which this part is measured."""
        if self.share == 1:
            return Problem(whole, split)
        return sparse(whole, split, drawn_cells(whole, split, self.share, self.draw))


def utilities(case: Case) -> Values:
    """Return the utility of each test sample by every way, float [n]; `rows`, int64 [n]; and
    `share_deployed`, of budgets where the guard lets the policy decide."""
    whole = profile_named(case.profile)
    split = whole.split(seed=case.draw % SPLITS)
    budgets_ms = default_budgets(whole)
    problem = case.problem(whole, split)
    imitation = Imitation(problem, budgets_ms, TUNED["imitation"])
    policies: dict[str, Policy] = {
        "static_of_whole": fit_static(whole, split.fitted),
        "static": fit_static(problem.cells, split.fitted),
        "teacher": imitation.teacher,
        "imitation": imitation.agent.decider,
        "guarded": imitation.deployed.decider,
    }
    for way in case.ways:
        policies[way] = imitation.improved(way, TUNED[way]).decider
    judged_by = {
        way: judged(policy, whole, split.test, budgets_ms) for way, policy in policies.items()
    }
    deployed = [float(row["deployed"]) for row in imitation.deployed.calibration.guard]
    share_deployed = torch.tensor(deployed).mean()
    return {"rows": split.test, "share_deployed": share_deployed, **judged_by}


def tune(folder: Path) -> None:
    """Try the learning rates of all ways, by the validation samples of the whole profile."""
    whole = profile_named("builtin")
    split = whole.split(seed=TUNING_DRAW % SPLITS)
    budgets_ms = default_budgets(whole)
    problem = Case("builtin", Fraction(1, 16), TUNING_DRAW).problem(whole, split)
    scores: dict[str, dict[float, float]] = {way: {} for way in TUNED}

    def score(way: str, factor: float, agent: DeployedController) -> float:
        value = float(judged(agent.decider, whole, split.validation, budgets_ms).mean())
        scores[way][factor] = value
        write_line(folder / "tuning.jsonl", {"way": way, "factor": factor, "utility": value})
        return value

    tried = {factor: Imitation(problem, budgets_ms, factor) for factor in FACTORS}
    best = max(FACTORS, key=lambda factor: score("imitation", factor, tried[factor].agent))
    for way, factor in itertools.product(WAYS, FACTORS):
        score(way, factor, tried[best].improved(way, factor))
    for way, of_factor in scores.items():
        print(way, max(of_factor, key=of_factor.__getitem__), of_factor)


def cases(profiles: list[str]) -> Iterator[Case]:
    """Yield what is to be run, draw by draw; the whole profiles once for each split."""
    for draw, profile in itertools.product(range(DRAWS), profiles):
        count = profile_named(profile).num_configurations
        # those that draw a single cell of each sample are the same
        shares = {cells_drawn(share, count): share for share in CURVE}
        if draw < SPLITS:
            shares[count] = Fraction(1)
        yield from (Case(profile, share, draw) for share in shares.values())


def run(folder: Path, profiles: list[str]) -> None:
    """Run all cases that the folder does not hold."""
    for case in cases(profiles):
        path = case.path(folder)
        if path.exists():
            continue
        began = time.perf_counter()
        values = utilities(case)
        for way, of_samples in values.items():
            about = {"case": path.stem, "way": way, "mean": float(of_samples.double().mean())}
            write_line(folder / "results.jsonl", about)
        arrays: dict[str, Any] = {way: of_samples.numpy() for way, of_samples in values.items()}
        np.savez(path, **arrays)
        print(path.stem, round(time.perf_counter() - began), "s", flush=True)


def write_line(path: Path, about: Mapping[str, object]) -> None:
    """Append a line of JSON."""
    with path.open("a") as file:
        file.write(json.dumps(about) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    command, where, *names = sys.argv[1:]
    FOLDER = Path(where)
    FOLDER.mkdir(parents=True, exist_ok=True)
    match command:
        case "tune":
            tune(FOLDER)
        case "run":
            run(FOLDER, names or [*PROFILES])
