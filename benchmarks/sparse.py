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

    python benchmarks/sparse.py tune sparse
    python benchmarks/sparse.py run sparse
    python benchmarks/sparse.py table sparse
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import knobwise
from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.calibration.training import distillation_trainer
from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.controller.settings import hidden_for
from knobwise.agents.evaluation.baselines import fit_static
from knobwise.agents.evaluation.evaluation import evaluate_policy
from knobwise.agents.evaluation.policy import Array, Policy
from knobwise.agents.teacher.completed import CompletedTable, completed, estimated
from knobwise.agents.training.controller_stages import ExactGRPO
from knobwise.agents.training.controllers import make_trainer
from knobwise.agents.training.seeding import seeded
from knobwise.agents.training.stage import Validation
from knobwise.agents.training.state import Best
from knobwise.envs.bandit.budgets import default_budgets
from knobwise.envs.bandit.reward import RewardTable
from knobwise.envs.bandit.settings import TRAINING_REWARD
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.experiments.settings.choices import AUTO, DISTILLED_OPTIMISER
from knobwise.losses.settings import LossConfig
from knobwise.profiling.design.cell_design import balanced_cells, with_cells
from knobwise.testbeds.profiles import builtin_profile, ocr_profile, smollm_profile

PROFILES = {"builtin": builtin_profile, "ocr": ocr_profile, "smollm": smollm_profile}
SHARES: tuple[Fraction, ...] = (Fraction(1, 32), Fraction(1, 16), Fraction(1, 4))
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


def read(profile: str) -> ProfileTable:
    """Read a profile by its name, or a table by its path."""
    if profile in PROFILES:
        return PROFILES[profile]()
    features = Path(profile).with_name("features.npz")
    return knobwise.read(profile, features=features if features.exists() else None)


def cells_drawn(share: Fraction, configurations: int) -> float:
    """Return the mean number of cells of a sample, at least 1."""
    return max(1.0, float(share * configurations))


def sparse(whole: ProfileTable, split: Split, share: Fraction, draw: int) -> ProfileTable:
    """Return a table with a share of the cells of the samples to fit on, completed.

    Each sample has at least one. Where the share is no whole number of its cells, some samples
    drawn at random have another.
    """
    fitted = split.fitted
    count = whole.num_configurations
    cells_of_sample = cells_drawn(share, count)
    fewest = int(cells_of_sample)
    fewer, more = (balanced_cells(len(fitted), count, n, draw) for n in (fewest, fewest + 1))
    another = np.random.default_rng(draw).random((len(fitted), 1)) < cells_of_sample - fewest
    cells = torch.ones_like(whole.mask)
    cells[fitted] = more.where(torch.from_numpy(another), fewer)
    weight = torch.ones(whole.mask.shape)
    weight[fitted] = count / cells_of_sample
    table = replace(with_cells(whole, cells), sampling_weight=weight)
    return completed(table, split, folds=POLICY.fold_networks)


class CheckedRewards(RewardTable):
    """Rewards that are doubly robust, or with `measured_only` those of measured cells alone."""

    def __init__(self, table: CompletedTable, measured_only: bool) -> None:
        super().__init__(table, TRAINING_REWARD)
        self.table = table
        self.measured_only = measured_only
        versions = (table.measured, table.predicted)
        self.of_version = {id(v): RewardTable(v, TRAINING_REWARD) for v in versions}

    def all(self, rows: Tensor, budgets_ms: Tensor) -> Tensor:
        def rewards_in(version: ProfileTable) -> Tensor:
            return self.of_version[id(version)].all(rows, budgets_ms)

        if not self.measured_only:
            cells = rows.unsqueeze(1), torch.arange(self.table.num_configurations)
            return estimated(self.table, cells, rewards_in)
        rewards = rewards_in(self.table.measured)
        mean = rewards.nanmean(1, keepdim=True)
        return mean + (self.table.weight[rows] * (rewards - mean)).nan_to_num()


# -- training --------------------------------------------------------------------------------------


class LastGRPO(ExactGRPO):
    """GRPO whose last weights are kept."""

    def is_better(self, validation: Validation, best: Best) -> bool:
        return True


class Imitation:
    """A policy that imitates its teacher, and what GRPO makes of it.

    Args:
        table: the table to learn from.
        split: its samples to fit on; test samples are not used.
        budgets_ms: float [B], those that will be judged.
        factor: on the learning rate.
    """

    def __init__(
        self, table: ProfileTable, split: Split, budgets_ms: Tensor, factor: float = 1.0
    ) -> None:
        inputs = FeatureNormaliser.fit(table, split.fitted).width
        budget_us = 1e3 * float(budgets_ms.min())
        hidden = hidden_for(inputs, table.num_configurations, POLICY.utility_head, budget_us)
        lr = factor * OPTIMISER.pretrain_lr
        trainer = distillation_trainer(
            table,
            split,
            policy=replace(POLICY, hidden=hidden),
            loss=LossConfig(),
            optimiser=replace(OPTIMISER, pretrain_lr=lr, iterations=0),
            budgets_ms=budgets_ms,
        )
        self.agent = trainer.run()
        self.setup = trainer.setup
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
            setup.env.rewards = CheckedRewards(setup.table, way == "measured")
        with seeded(0, "cpu"):
            agent = DeployedController(setup.controller).eval()
            make_trainer(setup, agent, [LastGRPO(setup)]).run()
        return agent


# -- runs ------------------------------------------------------------------------------------------


def judged(policy: Policy, whole: ProfileTable, rows: Tensor, budgets_ms: Tensor) -> Tensor:
    """Return the utility of samples, the mean over the budgets, float [n]."""
    return evaluate_policy(policy, whole, rows, budgets_ms).utility.mean(1)


def utilities(profile: str, share: Fraction, draw: int) -> Values:
    """Return the utility of each test sample by every way, float [n], and `rows`, int64 [n]."""
    whole = read(profile)
    split = whole.split(seed=draw % SPLITS)
    budgets_ms = default_budgets(whole)
    table = whole
    ways = WAYS[:1]
    if share < 1:
        table = sparse(whole, split, share, draw)
        ways = WAYS
    imitation = Imitation(table, split, budgets_ms, TUNED["imitation"])
    policies: dict[str, Policy] = {
        "static_of_whole": fit_static(whole, split.fitted),
        "static": fit_static(table, split.fitted),
        "teacher": imitation.teacher,
        "imitation": imitation.agent.decider,
    }
    for way in ways:
        policies[way] = imitation.improved(way, TUNED[way]).decider
    judged_by = {
        way: judged(policy, whole, split.test, budgets_ms) for way, policy in policies.items()
    }
    return {"rows": split.test, **judged_by}


def tune(folder: Path) -> None:
    """Try the learning rates of all ways, by the validation samples of the whole profile."""
    whole = read("builtin")
    split = whole.split(seed=TUNING_DRAW % SPLITS)
    budgets_ms = default_budgets(whole)
    table = sparse(whole, split, Fraction(1, 16), TUNING_DRAW)
    scores: dict[str, dict[float, float]] = {way: {} for way in TUNED}

    def score(way: str, factor: float, agent: DeployedController) -> float:
        value = float(judged(agent.decider, whole, split.validation, budgets_ms).mean())
        scores[way][factor] = value
        write_line(folder / "tuning.jsonl", {"way": way, "factor": factor, "utility": value})
        return value

    tried = {factor: Imitation(table, split, budgets_ms, factor) for factor in FACTORS}
    best = max(FACTORS, key=lambda factor: score("imitation", factor, tried[factor].agent))
    for way, factor in itertools.product(WAYS, FACTORS):
        score(way, factor, tried[best].improved(way, factor))
    for way, of_factor in scores.items():
        print(way, max(of_factor, key=of_factor.__getitem__), of_factor)


def cases(profiles: list[str]) -> Iterator[tuple[int, str, Fraction]]:
    """Yield draws, profiles and shares, draw by draw; the whole profiles once for each split."""
    for draw, profile in itertools.product(range(DRAWS), profiles):
        shares = SHARES
        if draw < SPLITS:
            shares = (*SHARES, Fraction(1))
        for share in shares:
            yield draw, profile, share


def run(folder: Path, profiles: list[str]) -> None:
    """Run all cases that the folder does not hold."""
    for draw, profile, share in cases(profiles):
        path = path_of(folder, profile, share, draw)
        if path.exists():
            continue
        began = time.perf_counter()
        values = utilities(profile, share, draw)
        for way, of_samples in values.items():
            about = {"profile": profile, "share": str(share), "split": draw % SPLITS, "draw": draw}
            if way != "rows":
                about |= {"way": way, "utility": float(of_samples.double().mean())}
                write_line(folder / "results.jsonl", about)
        np.savez(path, **{way: of_samples.numpy() for way, of_samples in values.items()})
        print(path.stem, round(time.perf_counter() - began), "s", flush=True)


def path_of(folder: Path, profile: str, share: Fraction, draw: int) -> Path:
    """Return where the utilities of a case are kept."""
    return folder / f"{Path(profile).name}-{share.denominator}-{draw}.npz"


def write_line(path: Path, about: dict[str, Any]) -> None:
    """Append a line of JSON."""
    with path.open("a") as file:
        file.write(json.dumps(about) + "\n")


# -- tables ----------------------------------------------------------------------------------------


class Resamples:
    """What all cases of a profile got, and resamples of its draws and test samples.

    Args:
        folder: of `run`.
        profile: the profile.
        shares: those whose draws are resampled together; a draw counts if it has all of them.
    """

    def __init__(self, folder: Path, profile: str, shares: Sequence[Fraction]) -> None:
        self.cases: dict[Fraction, list[dict[str, Any]]] = {share: [] for share in shares}
        for draw in range(DRAWS):
            paths = [path_of(folder, profile, share, draw) for share in shares]
            if all(path.exists() for path in paths):
                # the test samples of the whole profile are the same, by the same split
                of_whole = np.load(path_of(folder, profile, Fraction(1), draw % SPLITS))
                for share, path in zip(shares, paths, strict=True):
                    case = dict(np.load(path), imitation_of_whole=of_whole["imitation"])
                    self.cases[share].append(case)
        self.draws = len(self.cases[shares[0]])
        generator = np.random.default_rng(list(profile.encode()))
        table = read(profile)
        self.configurations = table.num_configurations
        count = table.num_samples
        even = np.full(count, 1 / count)
        # how often each resample holds a sample, [R, N], and a draw, [R, D]
        self.samples = generator.multinomial(count, even, RESAMPLES).astype(np.float32)
        of_draws = np.full(self.draws, 1 / self.draws)
        self.of_draws = generator.multinomial(self.draws, of_draws, RESAMPLES)

    def words(self, share: Fraction) -> str:
        """Return a share as the number of cells of a sample."""
        return f"{cells_drawn(share, self.configurations):.3g} of {self.configurations}"

    def mean(self, share: Fraction, way: str) -> float:
        """Return the mean utility of a way, in which all splits count alike."""
        means = [case[way].mean() for case in self.cases[share]]
        return float(np.mean([np.mean(means[split::SPLITS]) for split in range(SPLITS)]))

    def gains(self, share: Fraction, way: str, reference: str) -> Array:
        """Return the mean gain of a way over a reference, first in truth, then in each resample.

        Samples that are in the test part of several draws are resampled together, and the draws of
        all shares too, because the cells of a smaller share are among those of a larger one.
        """
        sums = np.zeros((2, RESAMPLES + 1))
        for draw, case in enumerate(self.cases[share]):
            gained = (case[way] - case[reference]).astype(np.float32)
            weights = self.samples[:, case["rows"]]
            of_draw = self.of_draws[:, draw]
            sums[0] += [gained.sum(), *(of_draw * (weights @ gained))]
            sums[1] += [len(gained), *(of_draw * weights.sum(1))]
        means: Array = sums[0] / sums[1]
        return means


def in_points(gains: Array) -> str:
    """Return the first of gains in points, and the 95 % interval of the others."""
    if not gains.any():
        return "–"
    low, high = np.quantile(gains[1:], [0.025, 0.975])
    # + 0.0 makes 0 of −0
    mean, low, high = (round(100 * float(value), 1) + 0.0 for value in (gains[0], low, high))
    return f"{mean:+.1f} [{low:.1f}, {high:.1f}]".replace("-", "−")


def rows_of(cells: Sequence[Sequence[object]]) -> str:
    """Return rows of a table in Markdown, the first of them its header."""
    lines = [" | ".join(["", *map(str, row), ""]).strip() for row in cells]
    lines.insert(1, "| --- " * len(cells[0]) + "|")
    return "\n".join(lines)


def write_tables(folder: Path, profiles: list[str]) -> None:
    """Print what GRPO adds to imitation, and utility over the share of cells."""
    gained: list[Sequence[object]] = [("profile", "cells of a sample", "draws", *WAYS)]
    listed = ("static", "imitation", WAYS[0], "teacher")
    names = ("profile", "cells of a sample", *listed)
    curves: list[Sequence[object]] = [
        (*names, "imitation − whole static", "imitation − whole imitation")
    ]
    pooled: dict[str, list[Array]] = {way: [] for way in WAYS}
    for profile in profiles:
        resamples = Resamples(folder, profile, SHARES)
        for share in SHARES:
            gains = {way: resamples.gains(share, way, "imitation") for way in WAYS}
            for way, values in gains.items():
                pooled[way].append(values)
            of_ways = map(in_points, gains.values())
            gained.append((profile, resamples.words(share), resamples.draws, *of_ways))
        whole = Resamples(folder, profile, [Fraction(1)])
        for share in (*SHARES, Fraction(1)):
            of_share = whole if share == 1 else resamples
            means = [f"{of_share.mean(share, way):.3f}" for way in listed]
            references = ("static_of_whole", "imitation_of_whole")
            gained_over = [of_share.gains(share, "imitation", other) for other in references]
            curves.append((profile, of_share.words(share), *means, *map(in_points, gained_over)))
    means_of_all = [in_points(np.mean(values, axis=0)) for values in pooled.values()]
    gained.append(("all", "–", "–", *means_of_all))
    print(rows_of(gained), rows_of(curves), sep="\n\n")


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
        case "table":
            write_tables(FOLDER, names or [*PROFILES])
