"""How often a promise is broken where the truth is known.

A policy is trained once in each simulated world: GRPO alone, on 600 samples of a VLM whose features
say half of what there is to know, or nothing, or whose samples come in clusters of four that take
alike. Then the samples that a promise is calibrated on are drawn from 20,000 others, 500 times, and
the share on time of what would be deployed is that of all of these: the truth. A promise is
*broken* if it was made and the truth is below it; for the rule that was tested at a budget that may
be in 5 % of the draws. Where none passes, that of a smaller budget goes on with its promise, which
may be one that another brings, and what is said at a budget may be wrong more often: the column
"said wrongly" counts that.

    python experiments/studies/promise_truth.py [draws=500]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from knobwise.agents.calibration.latencies import fit_latency_model
from knobwise.agents.calibration.promise import (
    Decide,
    IndependentRequests,
    PromiseRow,
    deciding,
    late,
    requests_of,
    trials_of,
    with_smaller,
)
from knobwise.agents.controller.encoders import TableEncoder
from knobwise.agents.deployed.promise import POLICY, LatencyModel
from knobwise.agents.evaluation.baselines import fit_static
from knobwise.agents.problem import Problem
from knobwise.agents.training.controllers import controller_trainer
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.envs.tables.splits import cluster_numbers
from knobwise.experiments.settings.choices import COLD_OPTIMISER, GRPO, SAMPLED
from knobwise.testbeds.simulated.calibrated import simulate
from knobwise.testbeds.simulated.settings import SimulatedConfig

FITTED = 600
SIZES = (40, 59, 300, 1200)
PROMISES = (0.9, 0.95, 0.99)
CLUSTER = 4
WORLD = SimulatedConfig(
    datasets=("text_vqa",), samples=20600, grid="27", image_width=16, language_width=16
)


@dataclass
class World:
    """What is known of a simulated world once its policy is trained.

    Attributes:
        problem: split into fitted samples and, as test samples, all others.
        budgets_ms: float [B].
        decide: a limit in ms and a quantile → choices int64 [N] for all samples.
    """

    problem: Problem
    budgets_ms: Tensor
    decide: Callable[[float, float], Tensor]

    def for_rows(self, rows: Tensor) -> Decide:
        """Return what decides for some samples."""
        return lambda limit_ms, quantile: self.decide(limit_ms, quantile)[rows]


def clustered(table: ProfileTable) -> ProfileTable:
    """Return the table with samples that take alike in clusters of four: neighbours in the order of
    their mean latency, among the fitted samples and among the others."""
    names = [""] * table.num_samples
    fitted, others = torch.arange(table.num_samples).split([FITTED, table.num_samples - FITTED])
    for part, rows in (("f", fitted), ("o", others)):
        ranked = rows[table.latency_ms[rows].mean(1).argsort()]
        for place, row in enumerate(ranked.tolist()):
            names[row] = f"{part}{place // CLUSTER}"
    return replace(table, clusters=tuple(names))


def trained(table: ProfileTable) -> World:
    """Train a policy on the first samples."""
    fitted, others = torch.arange(table.num_samples).split([FITTED, table.num_samples - FITTED])
    split = Split(fitted[: FITTED * 3 // 4], fitted[FITTED * 3 // 4 :], others)
    problem = Problem.from_table(table, split)
    # where most answers are on time, so that candidates are near the promises
    quantiles = torch.tensor([0.8, 0.95, 0.98, 0.995])
    budgets_ms = table.latency_ms[fitted].flatten().quantile(quantiles)
    policy = replace(GRPO, fold_networks=1)
    trainer = controller_trainer(
        problem.facts,
        Split(fitted, split.validation, others),
        policy=policy,
        loss=SAMPLED,
        optimiser=COLD_OPTIMISER,
        budgets_ms=budgets_ms,
    )
    trainer.run()
    controller = trainer.setup.controller
    latency = LatencyModel(fit_latency_model(table, fitted, controller.normaliser))
    encoder = TableEncoder(controller, table, problem.mask)
    rows = torch.arange(table.num_samples)
    x = controller.normaliser.of_rows(table, rows).numpy()
    known: dict[tuple[float, float], Tensor] = {}

    @torch.no_grad()
    def decide(limit_ms: float, quantile: float) -> Tensor:
        key = limit_ms, quantile
        if key not in known:
            log_probs = encoder(rows, torch.full((len(rows),), limit_ms)).numpy()
            allowed = latency.within(x, limit_ms, quantile)
            chosen = np.where(allowed, log_probs, -np.inf).argmax(1)
            known[key] = torch.from_numpy(chosen)
        return known[key]

    return World(problem, budgets_ms, decide)


def broken_in(world: World, size: int, draws: int) -> dict[float, tuple[float, ...]]:
    """Return for each promise, as shares of the draws: how often that of a budget's own rule was
    broken, the largest over the budgets and the mean; how often what is said at a budget is wrong,
    that of a rule that goes on too, the largest; and how often a rule passed, the mean."""
    problem = world.problem
    fitted, others = problem.split.fitted, problem.split.test
    static = fit_static(problem.cells, fitted)
    everyone = IndependentRequests(others, torch.full((len(others),), 0.5, dtype=torch.float64))
    random = np.random.default_rng(0)
    truths: dict[tuple[float, float, int, float], float] = {}
    made = {promise: np.zeros((draws, len(world.budgets_ms))) for promise in PROMISES}
    broken = {promise: np.zeros((draws, len(world.budgets_ms))) for promise in PROMISES}
    wrong = {promise: np.zeros((draws, len(world.budgets_ms))) for promise in PROMISES}

    def truth(rule: PromiseRow, limit_ms: float) -> float:
        # a rule that goes on plans with less than there is
        configuration = rule["configuration"]
        quantile = float(ndtri(rule["probability"]))
        key = limit_ms, rule["planned_ms"], configuration, quantile
        if key not in truths:
            chosen = torch.full((len(others),), configuration)
            if configuration == POLICY:
                chosen = world.decide(rule["planned_ms"], quantile)[others]
            reads = torch.tensor([configuration == POLICY])
            answers = late(problem, everyone, chosen.unsqueeze(1), limit_ms, reads)
            truths[key] = 1 - float(answers.double().mean())
        return truths[key]

    budgets = with_smaller(problem, fitted, world.budgets_ms)
    clusters = cluster_numbers(problem.facts, others)
    names = torch.arange(int(clusters.max()) + 1)
    per_cluster = len(others) / len(names)
    for draw in range(draws):
        drawn = random.choice(len(names), round(size / per_cluster), replace=False)
        rows = others[torch.isin(clusters, torch.from_numpy(drawn))]
        requests = requests_of(problem, rows, draw)

        about = problem, fitted, requests, torch.tensor([*budgets]).double(), static
        rules = world.for_rows(fitted), world.for_rows(requests.rows)
        trials = trials_of(*about, *rules)
        for promise in PROMISES:
            rows_of_budgets = [each.row(promise) for each in trials]
            pairs = zip(rows_of_budgets, deciding(rows_of_budgets), strict=True)
            wanted = [
                pair for pair, is_wanted in zip(pairs, budgets.values(), strict=True) if is_wanted
            ]
            for place, (row, decides) in enumerate(wanted):
                made[promise][draw, place] = row["kept"]
                below = decides["kept"] and truth(decides, row["planned_ms"]) < promise
                wrong[promise][draw, place] = below
                broken[promise][draw, place] = below and decides is row
    return {
        promise: (
            float(broken[promise].mean(0).max()),
            float(broken[promise].mean()),
            float(wrong[promise].mean(0).max()),
            float(made[promise].mean()),
        )
        for promise in PROMISES
    }


def main(words: list[str]) -> None:
    """Print a table, see the top."""
    draws = int((words or ["draws=500"])[0].removeprefix("draws="))
    torch.set_num_threads(1)
    worlds = {
        "features that say half": simulate(WORLD),
        "useless features": simulate(replace(WORLD, signal=0.0)),
    }
    worlds["clusters of four"] = clustered(worlds["features that say half"])
    allowed = 0.05 + 2 * (0.05 * 0.95 / draws) ** 0.5
    print(f"share of {draws} draws with a broken promise, allowed for a tested rule: {allowed:.3f}")
    heads = [
        "world",
        "held back",
        "promise",
        "broken, largest",
        "broken, mean",
        "said wrongly, largest",
    ]
    heads.append("promised")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name, table in worlds.items():
        world = trained(table)
        for size in SIZES:
            for promise, numbers in broken_in(world, size, draws).items():
                cells = [name, str(size), f"{promise:g}", *(f"{each:.3f}" for each in numbers)]
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
