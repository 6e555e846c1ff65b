"""Weights for a stack of predictors, learned from their predictions for samples that they were not
fitted on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.teacher.experts import MeasuredRows
from knobwise.agents.teacher.outcomes import Prediction
from knobwise.common.paired import is_better
from knobwise.envs.bandit.rule_choice import as_rule
from knobwise.envs.bandit.rules import DEADLINES, Rule
from knobwise.envs.tables.splits import Fold

ROUNDS = 15
"""Rounds of greedy selection."""
LEVEL = 0.05
"""The level of the test for a member that decides alone."""


class HeldOutScores(NamedTuple):
    """The expected and the actual utility of every configuration for held-out samples.

    Attributes:
        scores: the utility that each of K members expects, float [B, n, C].
        utility: the actual utility, float [B, n, C]; anything where not profiled.
        mask: bool [n, C], what was profiled.
    """

    scores: list[Tensor]
    utility: Tensor
    mask: Tensor

    @classmethod
    def of_predictions(
        cls,
        predictions: Sequence[Prediction],
        measured: MeasuredRows,
        limits: Tensor,
        rule: Rule | str = DEADLINES,
    ) -> HeldOutScores:
        """Score the predictions of K members for held-out samples under limits [B], and look up
        the actual utility; see `Controller` for `rule`."""
        rule = as_rule(rule)
        scores = [prediction.score(limits.unsqueeze(1), rule) for prediction in predictions]
        by_limit = limits[:, None, None]  # [B, 1, 1], beside outcomes [n, C]
        cells = measured.accuracy, measured.measurements_ms
        return cls(scores, rule.worth(*cells, by_limit), measured.mask)

    def take(self, positions: Tensor) -> HeldOutScores:
        """Return the part for some of the samples, int64 [m]."""
        scores = [score[:, positions] for score in self.scores]
        return HeldOutScores(scores, self.utility[:, positions], self.mask[positions])

    def utility_of_best(self, score: Tensor) -> Tensor:
        """Return the utility of taking the best score [B, n, C] of every sample, float64 [B, n]."""
        chosen = score.masked_fill(~self.mask, -torch.inf).argmax(-1, keepdim=True)
        return self.utility.gather(-1, chosen).squeeze(-1).double()

    def joined(self, weights: Tensor) -> Tensor:
        """Return the scores of all members by these weights [K]: Σ_k w_k·scores_k, [B, n, C]."""
        # members of weight 0 may expect infinite costs
        pairs = zip(weights.tolist(), self.scores, strict=True)
        return torch.stack([weight * score for weight, score in pairs if weight > 0]).sum(0)

    def mean_utility(self, score: Tensor) -> float:
        """Return the mean of `utility_of_best`."""
        return float(self.utility_of_best(score).mean())

    def better_alone(self, joined: Tensor, clusters: Tensor | None = None) -> int | None:
        """Return the member that is worth most alone, if it beats all members together.

        It must be better by more than chance, at a level of 5 % for all members together
        (Bonferroni); else None.

        Args:
            joined: scores [B, n, C] of all members, by weights that have not seen the samples.
            clusters: int64 [n], see `cluster_numbers`; by default each sample is one.
        """
        together = self.utility_of_best(joined).mean(0)
        gains = torch.stack(
            [self.utility_of_best(score).mean(0) - together for score in self.scores]
        )
        best = int(gains.mean(1).argmax())
        if is_better(gains[best], 1 - LEVEL / len(gains), clusters):
            return best
        return None


def stack_weights(held_out: HeldOutScores) -> Tensor:
    """Return weights of K members, float64 [K], not negative, sum 1: the mean of two rules.

    One fits the utility itself: least squares without negative weights, after subtracting each
    sample's mean over its configurations, because only differences inside a sample decide (Breiman
    1996, "Stacked Regressions"). The other fits the decisions: greedy ensemble selection with
    replacement on mean utility, keeping the best prefix (Caruana et al. 2004, "Ensemble Selection
    from Libraries of Models"). Few samples mislead either rule more easily alone.
    """
    return (_least_squares(held_out) + _greedy(held_out)) / 2


def weights_of_folds(held_out: HeldOutScores, folds: Sequence[Fold]) -> tuple[list[Tensor], Tensor]:
    """Weigh the members for each fold by the samples of the other folds.

    Returns:
        weights: of each fold, float64 [K].
        joined: the scores of the samples by the weights of their folds, [B, n, C].
    """
    weights = []
    joined = torch.zeros_like(held_out.scores[0])
    for fit, hold in folds:
        weights.append(stack_weights(held_out.take(torch.from_numpy(fit))))
        held = held_out.take(torch.from_numpy(hold))
        joined[:, hold] = held.joined(weights[-1]).to(joined.dtype)
    return weights, joined


def _least_squares(held_out: HeldOutScores) -> Tensor:
    """Return the weights that fit the utility itself."""
    from scipy.optimize import nnls

    mask = held_out.mask
    count = mask.sum(-1, keepdim=True)

    def inside(values: Tensor) -> Tensor:
        # in float32 members that nearly agree make a matrix that is not positive definite
        kept = values.double().masked_fill(~mask, 0.0)
        return (kept - kept.sum(-1, keepdim=True) / count).masked_fill(~mask, 0.0).flatten()

    columns = torch.stack([inside(score) for score in held_out.scores])
    gram = (columns @ columns.T).numpy()
    wanted = (columns @ inside(held_out.utility)).numpy()
    # the normal equations as least squares: ‖lower.T·w − lower⁻¹·wanted‖²
    lower = np.linalg.cholesky(gram + (1e-9 * np.trace(gram) + 1e-12) * np.eye(len(gram)))
    weights, _ = nnls(lower.T, np.linalg.solve(lower, wanted))
    return _normal(torch.from_numpy(weights))


def _greedy(held_out: HeldOutScores) -> Tensor:
    """Return the weights that fit the decisions: how often each member is selected."""
    counts = torch.zeros(len(held_out.scores), dtype=torch.float64)
    total = torch.zeros_like(held_out.scores[0])
    most = -np.inf
    for _ in range(ROUNDS):
        utility = [held_out.mean_utility(total + score) for score in held_out.scores]
        winner = int(np.argmax(utility))
        counts[winner] += 1
        total = total + held_out.scores[winner]
        if utility[winner] > most + 1e-9:
            most = utility[winner]
            best = counts.clone()
    return _normal(best)


def _normal(weights: Tensor) -> Tensor:
    """Scale weights to sum 1; all equal if they are all 0."""
    if not weights.any():
        weights = torch.ones_like(weights)
    return weights / weights.sum()
