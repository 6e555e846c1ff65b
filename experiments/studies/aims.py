"""Aims other than utility: a network trained by GRPO on their reward, against predicting the outcomes first and then
choosing the best expected reward.

    python experiments/studies/aims.py key=value …

Measures what is missing and writes docs/aims.md; to be run in the folder above examples/. Every policy is judged by the
mean reward of its choices on samples that nothing was fitted or chosen on.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.checkpoint import save_checkpoint
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import EXPERTS
from knobwise.agents.judging.evaluation import judge
from knobwise.agents.predictors.experts import Measured, Prediction, fit_experts
from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.agents.stack.stacked_controller import network_outcomes
from knobwise.agents.stack.weights import HeldOut, stack_weights, weighted
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.common.files import write_text
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.reward_function import RewardFunction
from knobwise.envs.readers.builtin import builtin_profile
from knobwise.envs.simulated.kinds import KINDS
from knobwise.experiments.command_line.compose import question_of, read_settings
from knobwise.experiments.settings.options import TrainRun
from knobwise.experiments.studies.decisions import table_of
from knobwise.experiments.studies.running import Mean, folder_for, measured, rendered, run_from_words

AIMS = ("late_answers", "worst_lateness", "accuracy_floor")
GRPO, REGRESSION, STATIC = "network, GRPO", "network, regression only", "static"
BY_NETWORK, BY_EXPERTS, ORACLE = "two stages, network", "two stages, stacked experts", "oracle"
RULES = (BY_NETWORK, BY_EXPERTS)
NODES = torch.special.ndtri((torch.arange(40) + 0.5) / 40)
"""Standard normal values of equal weight, for expectations over ln ms."""
FEW_NODES = NODES[2::5]
"""The same for accuracies."""


@dataclass
class AimsConfig:
    """The settings, each as key=value."""

    tables: list[str] = field(default_factory=lambda: ["builtin", "portfolio", "heavy_tails"])
    """The built-in profile and kinds of simulated tables."""
    seeds: int = 5
    """How many seeds, for tables, splits and training."""
    runs: str = "runs/aims"
    """Where measurements are kept; a finished one is not repeated."""
    out: str = "docs/aims.md"
    """The page."""
    jobs: int = 2
    """Processes at the same time, one thread each."""


def run(config: AimsConfig) -> list[str]:
    """Measure every table with every seed, and write the page. Raises InputError: a reward that cannot be used, or that
    is not in this folder."""
    table, settings = builtin_profile(), [settings_of(aim) for aim in AIMS]
    for each in settings:
        RewardTable(table, each.reward)
    kept = [table.digest, KINDS, settings, Path("examples/rewards.py").read_text(encoding="utf-8")]
    folder = folder_for(config.runs, kept)
    cells = {folder / f"{name}-{seed}.json": (name, seed) for name in config.tables for seed in range(config.seeds)}
    write_text(config.out, aims_page(measured("tables × seeds", measure, cells, config.jobs)))
    return []


def settings_of(aim: str) -> TrainRun:
    """Those of the experiment file of this name."""
    settings: TrainRun = read_settings("train", [f"experiment={aim}"])
    return settings


# -- policies ----------------------------------------------------------------------------------------------------------


class AimTrainer(ControllerTrainer):
    """Keeps the weights with the best held-out reward."""

    def _judge(self) -> tuple[float, Mapping[str, float]]:
        judged = judge(self, self.table, self.judged_rows, self.limits, self.env.rewards)
        return float(judged.reward.mean()), {}


class Predicted(NamedTuple):
    """What is known of n requests before deciding: predicted accuracy, mean and standard deviation of ln ms, and the
    standard deviation of the accuracy's residuals, [C] or [n, C] each."""

    outcome: Prediction
    accuracy_spread: Tensor

    def expected(self, reward: RewardFunction, budgets_ms: Tensor, labels: bool) -> Tensor:
        """The expected reward, [B, n, C]: ln ms is normal, the accuracy a draw of 0 or 1 for `labels`, else normal and
        cut to 0 … 1, and both are independent."""
        accuracy, configurations = self.outcome.accuracy.clamp(0, 1), torch.arange(self.outcome.accuracy.shape[1])
        if labels:
            cases = [(accuracy, torch.ones_like(accuracy)), (1 - accuracy, torch.zeros_like(accuracy))]
        else:
            drawn = [(self.outcome.accuracy + z * self.accuracy_spread).clamp(0, 1) for z in FEW_NODES]
            cases = [(torch.tensor(1 / len(drawn)), each) for each in drawn]
        total = torch.zeros(len(budgets_ms), *accuracy.shape)
        for z in NODES:
            latency_ms = (self.outcome.log_latency + z * self.outcome.spread).exp()
            for weight, value in cases:
                total += weight * reward(value, latency_ms, budgets_ms[:, None, None], configurations)
        return total / len(NODES)


class Cell:
    """One table with one seed, and what predicts its outcomes; `score` says how good choices are."""

    def __init__(self, name: str, seed: int) -> None:
        self.table, self.split = table_of(name, seed)
        self.seed, self.test, self.budgets_ms = seed, self.split.test, default_budgets(self.table)
        self.fitted = torch.cat([self.split.train, self.split.validation])
        accuracy = self.table.accuracy[self.table.mask]
        self.labels = bool(((accuracy == 0) | (accuracy == 1)).all())
        normaliser = FeatureNormaliser.fit(self.table, self.fitted)
        self.measured = Measured.from_table(self.table, self.fitted, self.budgets_ms, seed)
        self.experts = fit_experts(self.table, self.measured, normaliser, EXPERTS, seed)
        self.x = normaliser(self.blocks, len(self.test))

    @property
    def blocks(self) -> dict[str, Tensor]:
        """The features of the test samples."""
        return {name: block[self.test] for name, block in self.table.features.items()}

    def score(self, reward: RewardTable, choice: Tensor) -> float:
        """The mean reward of choices int64 [B, n] on the test samples."""
        return float(self.worth(reward, self.test).gather(2, choice.unsqueeze(2)).mean())

    def worth(self, reward: RewardTable, rows: Tensor) -> Tensor:
        """The measured reward of every configuration, [B, n, C], NaN where not profiled."""
        return torch.stack([reward.all(rows, budget.expand(len(rows))) for budget in self.budgets_ms])

    def best(self, scores: Tensor) -> Tensor:
        """The profiled configuration with the highest of these scores, [B, n or 1, C] → int64 [B, n]."""
        return torch.where(self.table.mask[self.test], scores, -torch.inf).argmax(-1)

    def by_experts(self, reward: RewardTable) -> Tensor:
        """Expected rewards by the experts, weighted by how well each predicts rewards out of fold."""
        assert reward.function is not None
        of_folds, of_test = [], []
        for expert, out_of_fold in self.experts:
            accuracy, log_latency, _ = out_of_fold
            spreads = self.measured.residual_spread(log_latency), self.accuracy_spread(accuracy)
            for predicted, scores in ((out_of_fold, of_folds), (expert(self.x), of_test)):
                known = Predicted(predicted._replace(spread=spreads[0]), spreads[1])
                scores.append(known.expected(reward.function, self.budgets_ms, self.labels))
        worth = self.worth(reward, self.fitted)
        return weighted(of_test, stack_weights(HeldOut(of_folds, worth, self.measured.mask)))

    @torch.no_grad()
    def by_network(self, network: Controller, reward: RewardTable) -> Tensor:
        """Expected rewards by a network's members, each of which counts the same."""
        assert reward.function is not None
        blocks = {name: block[self.fitted] for name, block in self.table.features.items()}
        fitted = network_outcomes(network, network.features(blocks, len(self.fitted))).accuracy.mean(0)
        outcomes = network_outcomes(network, network.features(self.blocks, len(self.test)))
        parts = zip(outcomes.accuracy, outcomes.log_latency, outcomes.spread, strict=True)
        each = [Predicted(Prediction(*part), self.accuracy_spread(fitted)) for part in parts]
        return torch.stack([e.expected(reward.function, self.budgets_ms, self.labels) for e in each]).mean(0)

    def accuracy_spread(self, predicted: Tensor) -> Tensor:
        """Root mean square residual of each configuration's accuracy, [C]."""
        return (self.measured.accuracy - predicted).square().nanmean(0).sqrt()

    def choices(self, network: Controller) -> Tensor:
        mask, n = self.table.mask[self.test], len(self.test)
        return torch.stack([network.choose(self.blocks, budget.expand(n), mask) for budget in self.budgets_ms])


def measure(name: str, seed: int) -> dict[str, Any]:
    """Fit and judge every policy on one table with one seed: mean rewards by aim and policy."""
    cell, rewards = Cell(name, seed), dict[str, dict[str, float]]()
    with tempfile.TemporaryDirectory() as folder:
        shared = {"budgets_ms": cell.budgets_ms, "seed": seed}
        settings = settings_of(AIMS[0])
        optimiser = replace(settings.optimiser, iterations=0)
        first = ControllerTrainer(cell.table, cell.split, policy=settings.policy, optimiser=optimiser, **shared)
        first.run()
        save_checkpoint(start := Path(folder) / "start.pt", first.trained, cell.table, first.provenance())
        for aim in AIMS:
            settings = settings_of(aim)
            shared |= {name: getattr(settings, name) for name in ("policy", "loss", "reward")}
            shared |= {"optimiser": replace(settings.optimiser, warmup_iterations=0), "init_from": start}
            reward = RewardTable(cell.table, settings.reward)
            trained = AimTrainer(cell.table, cell.split, **shared).run()
            static = cell.worth(reward, cell.fitted).nanmean(1, keepdim=True).nan_to_num(-torch.inf)
            choices = {
                STATIC: cell.best(static),
                REGRESSION: cell.choices(first.trained),
                GRPO: cell.choices(trained),
                BY_NETWORK: cell.best(cell.by_network(first.trained, reward)),
                BY_EXPERTS: cell.best(cell.by_experts(reward)),
                ORACLE: cell.best(cell.worth(reward, cell.test)),
            }
            rewards[aim] = {policy: cell.score(reward, choice) for policy, choice in choices.items()}
    return {"table": name, "seed": seed, "rewards": rewards}


# -- the page ----------------------------------------------------------------------------------------------------------


def aims_page(cells: Sequence[Mapping[str, Any]]) -> str:
    """docs/aims.md, from one measurement for each table and seed."""
    tables = list(dict.fromkeys(cell["table"] for cell in cells))

    def values(aim: str, table: str, policy: str) -> list[float]:
        return [100 * cell["rewards"][aim][policy] for cell in cells if cell["table"] == table]

    def lead(aim: str, table: str, other: str) -> Mean:
        """GRPO minus another policy, paired by seed."""
        return Mean.over(np.subtract(values(aim, table, GRPO), values(aim, table, other)))

    places = [(aim, table) for aim in AIMS for table in tables]
    leads = {other: {place: lead(*place, other) for place in places} for other in (STATIC, REGRESSION, *RULES)}
    policies = list(cells[0]["rewards"][AIMS[0]])
    return rendered(
        "aims.md.j2",
        seeds=len({cell["seed"] for cell in cells}),
        questions={aim: question_of(aim).partition("? ")[0] + "?" for aim in AIMS},
        means={place: {policy: Mean.over(values(*place, policy)) for policy in policies} for place in places},
        leads=leads,
        signs={other: [mean.sign for mean in of_places.values()] for other, of_places in leads.items()},
        policies=policies,
        GRPO=GRPO,
        RULES=RULES,
    )


if __name__ == "__main__":
    sys.exit(run_from_words("aims", AimsConfig, run, sys.argv[1:]))
