"""Aims other than utility: a network trained by GRPO on their reward, against predicting outcomes and then choosing the
best expected reward.

    python experiments/studies/aims.py key=value …

Measures what is missing and writes docs/aims.md; run it in the folder above `examples/`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from knobwise.agents.checkpoint import save_checkpoint
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import EXPERTS
from knobwise.agents.judging.evaluation import judge
from knobwise.agents.predictors.experts import Measured, Prediction, fit_experts
from knobwise.agents.stack.stacked_controller import network_outcomes
from knobwise.agents.stack.weights import HeldOut, stack_weights, weighted
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.common.checks import one_of
from knobwise.common.files import write_text
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.readers.builtin import builtin_profile
from knobwise.envs.simulated.kinds import KINDS
from knobwise.experiments.command_line.compose import read_settings
from knobwise.experiments.studies.decisions import DecisionsConfig, table_of
from knobwise.experiments.studies.running import Mean, folder_for, measured, rendered, run_from_words

AIMS = ("late_answers", "worst_lateness", "accuracy_floor")
GRPO, REGRESSION = "network, GRPO", "network, regression only"
RULES = ("two stages, network", "two stages, experts")
Pair = tuple[Prediction, Prediction]
"""Of the samples that were fitted on, out of fold, and of the test samples."""
NODES = torch.special.ndtri((torch.arange(40) + 0.5) / 40)
"""Standard normal values of equal weight, for expectations over ln ms; every fifth for those over accuracies."""


@dataclass
class AimsConfig(DecisionsConfig):
    """The settings of the other study, each as key=value, with defaults of its own."""

    tables: list[str] = field(default_factory=lambda: ["builtin", "portfolio", "heavy_tails"])
    seeds: int = 4
    runs: str = "runs/aims"
    out: str = "docs/aims.md"


def run(config: AimsConfig) -> list[str]:
    """Measure every table with every seed, and write the page. Raises InputError: an unknown table; a reward that
    cannot be used or is not in this folder."""
    for name in config.tables:
        one_of("tables", name, ("builtin", *KINDS))
    table, settings = builtin_profile(), [read_settings("train", [f"experiment=reward_{aim}"]) for aim in AIMS]
    for each in settings:
        RewardTable(table, each.reward)
    kept = [table.digest, KINDS, settings, Path("examples/rewards.py").read_text(encoding="utf-8")]
    folder = folder_for(config.runs, kept)
    cells = {folder / f"{name}-{seed}.json": (name, seed) for name in config.tables for seed in range(config.seeds)}
    write_text(config.out, aims_page(measured("tables × seeds", measure, cells, config.jobs)))
    return []


def worths(rewards: RewardTable, rows: Tensor, budgets_ms: Tensor) -> Tensor:
    """The measured reward of every configuration, [B, n, C], NaN where not profiled."""
    return torch.stack([rewards.all(rows, limit.expand(len(rows))) for limit in budgets_ms])


@torch.no_grad()
def members_mean(network: Controller, x: Tensor) -> Prediction:
    """What the members of a network predict of normalised features [n, width] on average."""
    outcomes = network_outcomes(network, x)
    return Prediction(*(part.mean(0) for part in (outcomes.accuracy, outcomes.log_latency, outcomes.spread)))


def expected(rewards: RewardTable, known: Measured, seen: Prediction, predicted: Prediction) -> Tensor:
    """The expected reward [B, n, C] of predicted outcomes [n, C]: ln ms is normal; the accuracy is independent of it,
    and a draw of 0 or 1 if all of the table's are, else normal with the residual spread of the `seen` samples."""
    assert rewards.function is not None
    right, budgets_ms = predicted.accuracy.clamp(0, 1), known.budgets_ms[:, None, None]
    if known.accuracy[known.mask].unique().tolist() == [0, 1]:
        cases = [(right, torch.ones_like(right)), (1 - right, torch.zeros_like(right))]
    else:
        spread = (known.accuracy - seen.accuracy).square().nanmean(0).sqrt()
        drawn = [(right + z * spread).clamp(0, 1) for z in NODES[2::5]]
        cases = [(torch.tensor(1 / len(drawn)), accuracy) for accuracy in drawn]
    total = torch.zeros(len(budgets_ms), *right.shape)
    for latency_ms in ((predicted.log_latency + z * predicted.spread).exp() for z in NODES):
        for weight, accuracy in cases:
            total += weight * rewards.function(accuracy, latency_ms, budgets_ms, rewards.configurations)
    return total / len(NODES)


def stacked(rewards: RewardTable, known: Measured, by_experts: Sequence[Pair]) -> Tensor:
    """The expected reward by all experts, weighted by how well each predicts rewards out of fold."""
    held_out = [expected(rewards, known, out_of_fold, out_of_fold) for out_of_fold, _ in by_experts]
    weights = stack_weights(HeldOut(held_out, worths(rewards, known.rows, known.budgets_ms), known.mask))
    return weighted([expected(rewards, known, *pair) for pair in by_experts], weights)


def measure(name: str, seed: int) -> dict[str, Any]:
    """Fit and judge every policy on one table with one seed: mean rewards × 100 by aim and policy."""
    table, split = table_of(name, seed)
    rows, test, budgets_ms = torch.cat([split.train, split.validation]), split.test, default_budgets(table)
    configs = {aim: read_settings("train", [f"experiment=reward_{aim}"]) for aim in AIMS}
    policy, optimiser = configs[AIMS[0]].policy, configs[AIMS[0]].optimiser
    shared: dict[str, Any] = {"policy": policy, "budgets_ms": budgets_ms, "seed": seed}
    first = ControllerTrainer(table, split, optimiser=replace(optimiser, iterations=0), **shared)
    network = first.run()
    tuned = {}
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(start := Path(folder) / "start.pt", network, table, first.provenance())
        for aim, config in configs.items():
            optimiser = replace(config.optimiser, warmup_iterations=0)
            options = {"optimiser": optimiser, "loss": config.loss, "reward": config.reward, "init_from": start}
            tuned[aim] = ControllerTrainer(table, split, **shared, **options).run()
    known = Measured.from_table(table, rows, budgets_ms, seed)
    seen, new = (network.features({k: v[part] for k, v in table.features.items()}, len(part)) for part in (rows, test))
    by_network, by_experts = (members_mean(network, seen), members_mean(network, new)), list[Pair]()
    for expert, out_of_fold in fit_experts(table, known, network.normaliser, EXPERTS, seed):
        spread = known.residual_spread(out_of_fold.log_latency)
        by_experts.append((out_of_fold._replace(spread=spread), expert(new)._replace(spread=spread)))
    results = {}
    for aim, config in configs.items():
        rewards = RewardTable(table, config.reward)
        policies = {REGRESSION: network, GRPO: tuned[aim]}
        judged = {key: judge(policy, table, test, budgets_ms, rewards).reward for key, policy in policies.items()}
        scores = expected(rewards, known, *by_network), stacked(rewards, known, by_experts)
        for rule, score in zip(RULES, scores, strict=True):
            chosen = score.masked_fill(~table.mask[test], -torch.inf).argmax(-1, keepdim=True)
            judged[rule] = worths(rewards, test, budgets_ms).gather(2, chosen)
        results[aim] = {key: 100 * float(reward.mean()) for key, reward in judged.items()}
    return {"table": name, "seed": seed, "rewards": results}


def aims_page(cells: Sequence[Mapping[str, Any]]) -> str:
    """docs/aims.md, from one measurement for each table and seed."""
    values: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    for cell in cells:
        for aim in AIMS:
            values.setdefault((aim, cell["table"]), []).append(cell["rewards"][aim])
    policies = list(cells[0]["rewards"][AIMS[0]])
    means = {place: {key: Mean.over(each[key] for each in rows) for key in policies} for place, rows in values.items()}
    leads = {
        other: {place: Mean.over(each[GRPO] - each[other] for each in rows) for place, rows in values.items()}
        for other in (REGRESSION, *RULES)
    }
    seeds = len({cell["seed"] for cell in cells})
    return rendered("aims.md.j2", seeds=seeds, means=means, leads=leads, policies=policies, RULES=RULES)


if __name__ == "__main__":
    sys.exit(run_from_words("aims", AimsConfig, run, sys.argv[1:]))
