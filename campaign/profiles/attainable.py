"""How often the interval of `attainable` holds the truth, on profiles of known truth, by hand:
`python -m campaign.profiles.attainable [tables [samples]]` (100 tables of 300 samples of each
kind). Prints a table.

The truth is what the estimate is about: the gain of the policies of the folds over the static
choices of the folds, on 20,000 new inputs, by the probabilities that the outcomes are drawn from. A
Bayes policy knows these probabilities for every input.
"""

import sys

import numpy as np
import torch
from helpers import table_of

from knobwise.agents.evaluation.baselines import fit_static
from knobwise.agents.teacher.experts import Experts
from knobwise.envs import default_budgets
from knobwise.experiments.inspection.attainable import (
    QUICK,
    WAYS,
    attainable_by,
    quick_predictions,
    quick_stack,
)

KINDS = ("Bernoulli", "noise-free", "nothing to gain")
CONFIGURATIONS = 8
NEW = 20_000


class World:
    """Probabilities and latencies that depend on four features of an input, two of which matter."""

    def __init__(self, kind, seed):
        self.kind = kind
        self.draws = torch.Generator().manual_seed(seed)
        self.level = torch.linspace(-1, 1.2, CONFIGURATIONS)
        self.slopes = 1.2 * torch.randn(2, CONFIGURATIONS, generator=self.draws)
        if kind == "nothing to gain":
            self.slopes = torch.zeros_like(self.slopes)

    def inputs(self, count):
        """Features, right probabilities and mean ln latencies of new inputs."""
        x = torch.randn(count, 4, generator=self.draws)
        signal = x[:, :2] @ self.slopes
        slower = 0.0 if self.kind == "nothing to gain" else 0.3 * x[:, 2:3]
        return x, torch.sigmoid(self.level + signal), slower + self.level

    @property
    def jitter(self):
        return 1e-6 if self.kind == "noise-free" else 0.1

    def table(self, count):
        """A profile of new inputs."""
        x, right, log_latency = self.inputs(count)
        noise = torch.randn(right.shape, generator=self.draws)
        accuracy = torch.bernoulli(right, generator=self.draws)
        if self.kind == "noise-free":
            accuracy = right
        return table_of(accuracy, (log_latency + self.jitter * noise).exp(), x, name=self.kind)

    def utility(self, right, log_latency, budgets_ms):
        """The expected utility of every configuration, [B, n, C]."""
        gaps = (budgets_ms.log()[:, None, None] - log_latency) / self.jitter
        return right * torch.special.ndtr(gaps)


def truth_of(world, table, experts, budgets_ms, learned):
    """The mean over the folds of what their policies truly gain, and what a Bayes policy gains."""
    x, right, log_latency = world.inputs(NEW)
    utility = world.utility(right, log_latency, budgets_ms)
    spreads = [prediction.spread for prediction in quick_predictions(experts)]
    weights, _ = quick_stack(experts, budgets_ms)
    normal = experts.normaliser({"x": x}, NEW)
    gains = []
    for fold, (fit, _) in enumerate(experts.measured.folds):
        static = fit_static(table, experts.measured.rows[fit]).choose({}, budgets_ms.numpy())
        static = torch.from_numpy(static)
        # what the stack of this fold scores for every input, [B, NEW, C]
        scores = 0
        for weight, fitted, spread in zip(
            weights[fold].tolist(), experts.of_families(QUICK), spreads, strict=True
        ):
            prediction = fitted.of_folds[fold](normal)._replace(spread=spread)
            scores = scores + weight * prediction.score(budgets_ms.unsqueeze(1))
        decides = torch.tensor(learned[fold]).unsqueeze(1)
        chosen = torch.where(decides, scores.argmax(2), static.unsqueeze(1))
        of_static = utility.mean(1).gather(1, static.unsqueeze(1)).mean()
        of_policy = utility.gather(2, chosen.unsqueeze(2)).mean()
        gains.append([float(of_policy - of_static), float(utility.amax(2).mean() - of_static)])
    sizes = [len(hold) for _, hold in experts.measured.folds]
    return np.average(gains, axis=0, weights=sizes)


def trial(kind, seed, samples):
    """The estimate on a new profile, the truth, and what a Bayes policy gains."""
    world = World(kind, seed)
    table = world.table(samples)
    budgets_ms = default_budgets(table)
    samples = torch.arange(samples)
    experts = Experts.fit(table, samples, budgets_ms[:0], QUICK, seed, ways=WAYS, on_all=False)
    estimate = attainable_by(table, experts, budgets_ms)
    return estimate, *truth_of(world, table, experts, budgets_ms, estimate["learned"])


def main(tables=100, samples=300):
    print("| profile | interval holds the truth | estimate | truth | Bayes policy |")
    print("|---|---|---|---|---|")
    for kind in KINDS:
        held = 0
        means = []
        for seed in range(int(tables)):
            estimate, truth, bayes = trial(kind, seed, int(samples))
            low, high = estimate["gain_ci95"]
            # to half of the last digit that is printed
            held += low - 0.0005 <= truth <= high + 0.0005
            means.append([estimate["gain"], truth, bayes])
        points = " | ".join(f"{100 * mean:+.2f}" for mean in np.mean(means, 0))
        print(f"| {kind} | {held} of {tables} | {points} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
