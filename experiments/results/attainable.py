"""Estimate before any training how much a policy could learn from the features.

Two quick predictors, ridge regression and trees, are fitted in folds. A policy that takes the best
expected utility of what they predict is compared with budget-aware static, each on samples that it
was not fitted on. Static itself is one of the policies, as a controller's guard falls back to it.

*What the estimate is about.* For each fold, the gain on new inputs of the policy that was fitted
without it, over static that was fitted without it; and of these the mean over the folds. It is what
this much data (four fifths of the samples) lets quick policies gain. A policy that knows every true
probability gains more, and so may one that was fitted on more data.

*Why its interval holds.* Given what was fitted, the gains of held-out samples are draws with this
mean, so the paired bootstrap over samples is an interval for it (Bayle et al. 2020,
"Cross-validation Confidence Intervals for Test Error", NeurIPS). A fold is decided, at each budget,
by the policy that gained most in the other folds, so no sample chooses the policy that it judges.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.judging.baselines import static_of
from knobwise.agents.judging.evaluation import outcomes_of
from knobwise.agents.judging.policy import choices_of
from knobwise.agents.predictors.experts import Experts
from knobwise.agents.predictors.outcomes import Prediction, pick
from knobwise.envs.configurations.budgets import LEAST_LATENCY_MS
from knobwise.envs.configurations.reward import expected_utility
from knobwise.envs.tables.profile_table import ProfileTable, median_of
from knobwise.experiments.results.statistics import ends_of, resampled_means

QUICK = ("ridge", "gradient_boosting")
"""The families of the quick predictors."""
POLICIES = ("budget_aware_static", *QUICK, "both")
"""Static, and the quick policies; the last one averages the predictions of the others."""
MOST_SAMPLES = 4000
"""Of larger profiles a random part of this size is used, so that inspection takes seconds."""


def attainable(table: ProfileTable, budgets_ms: Tensor) -> dict[str, Any] | None:
    """Fit the quick predictors on a profile, and return what `attainable_by` does; None without
    features, where nothing can be learned.

    Args:
        budgets_ms: float [B].
    """
    if not table.features:
        return None
    rows = torch.randperm(table.num_samples, generator=torch.Generator().manual_seed(0))
    rows = rows[:MOST_SAMPLES].sort().values
    # without budgets no spread is chosen by its utility, which would flatter
    return attainable_by(table, Experts.fit(table, rows, budgets_ms[:0], QUICK, 0), budgets_ms)


def attainable_by(
    table: ProfileTable, experts: Experts, budgets_ms: Tensor
) -> dict[str, Any] | None:
    """Return what looks learnable from the features: the gain of quick policies over budget-aware
    static out of fold, see above.

    Args:
        table: the profile.
        experts: fitted on some of its samples, among them the families `QUICK`.
        budgets_ms: float [B] that utility is averaged over.

    Returns:
        `gain`: in utility. `gain_ci95`: its 95 % bootstrap interval over samples (or images, or
        clusters). `samples`: how many were used. `policies`: the policy that decided each fold,
        at each budget. None if there are too few samples for two folds.
    """
    folds = experts.measured.folds
    if len(folds) < 2:
        return None
    gains = gains_out_of_fold(table, experts, budgets_ms)
    total = gains.sum(1)
    kept = np.empty(gains.shape[1])
    policies = []
    for _, hold in folds:
        # the best in the other folds at each budget, [B]
        best = (total - gains[:, hold].sum(1)).argmax(0)
        held = np.take_along_axis(gains[:, hold], best[None, None], 0)
        kept[hold] = held[0].mean(1)
        policies.append([POLICIES[policy] for policy in best])
    # samples of one image or cluster are drawn together
    keys = np.array(table.split_keys)[experts.measured.rows.numpy()]
    clusters = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    drawn = resampled_means([kept], splits=np.stack([np.zeros_like(clusters), clusters]))
    return {
        "gain": float(kept.mean()),
        "gain_ci95": ends_of(drawn)[0],
        "samples": len(kept),
        "policies": policies,
    }


def gains_out_of_fold(table: ProfileTable, experts: Experts, budgets_ms: Tensor) -> np.ndarray:
    """Return the utility of each of `POLICIES` minus that of static, both fitted without the fold
    of the sample: float64 [policies, n, B].

    Policies pay for what their features take, `features_ms` and the first look; static does not.
    The other arguments are those of `attainable_by`.
    """
    measured = experts.measured
    rows = measured.rows
    limits = budgets_ms.numpy()
    static = torch.empty(len(rows), len(budgets_ms), dtype=torch.int64)
    for fit, hold in measured.folds:
        policy = static_of(table, rows[fit])
        static[hold] = choices_of(policy, {}, limits, measured.mask[hold].numpy())
    unread = torch.zeros(len(budgets_ms), dtype=torch.bool)
    of_static = outcomes_of(table, rows, static, budgets_ms, reads=unread).utility
    # static gains nothing over itself
    gains = [np.zeros(of_static.shape)]
    for prediction in quick_predictions(experts):
        chosen = quick_choices(prediction, budgets_ms - table.features_ms, measured.mask)
        outcomes = outcomes_of(table, rows, chosen, budgets_ms, cost_ms=table.features_ms)
        gains.append((outcomes.utility - of_static).double().numpy())
    return np.stack(gains)


def quick_predictions(experts: Experts) -> list[Prediction]:
    """Return the predictions out of fold of each of `POLICIES` but static."""
    single = [fitted.out_of_fold for fitted in experts.of_families(QUICK)]
    accuracy = torch.stack([each.accuracy for each in single]).mean(0)
    log_latency = torch.stack([each.log_latency for each in single]).mean(0)
    every = [*single, Prediction(accuracy, log_latency, single[0].spread)]
    # the spread of an expert may have been chosen by utility; that of its residuals was not
    return [
        each._replace(spread=experts.measured.residual_spread(each.log_latency)) for each in every
    ]


def quick_choices(prediction: Prediction, limits: Tensor, mask: Tensor | None) -> Tensor:
    """Return the best expected utility under each limit [B] in ms, int64 [n, B]."""
    columns = []
    for limit in limits.clamp_min(LEAST_LATENCY_MS):
        scores = prediction.score(limit.expand(len(prediction.accuracy)))
        columns.append(pick(scores, prediction.log_latency, mask))
    return torch.stack(columns, 1)


def oracle_of_halves(table: ProfileTable, budgets_ms: Tensor) -> float | None:
    """Return the mean utility of an oracle that chooses by one random half of the repeats of each
    cell and is judged by the other half: what it gains without luck in single latencies.

    Accuracies are the same in both halves, since a profile holds their means. A cell that was
    measured once counts in both. None if no cell was measured repeatedly.
    """
    table = table.without_first_look
    if table.repeats_ms is None:
        return None
    # in random order, and NaN last
    order = torch.rand(table.repeats_ms.shape, generator=torch.Generator().manual_seed(0))
    order = order.masked_fill(table.repeats_ms.isnan(), 2.0).argsort(-1)
    shuffled = table.repeats_ms.gather(-1, order)
    first = shuffled[..., 0::2]
    second = shuffled[..., 1::2]
    second = second.where(~second[..., :1].isnan(), first[..., : second.shape[-1]])
    utilities = []
    for budget in budgets_ms:
        for known, hidden in ((first, second), (second, first)):
            score = expected_utility(table.accuracy, known, budget)
            chosen = pick(score, median_of(known), table.mask).unsqueeze(1)
            utility = expected_utility(table.accuracy, hidden, budget)
            utilities.append(float(utility.gather(1, chosen).double().mean()))
    return float(np.mean(utilities))


def add_shares(results: dict[str, Any]) -> None:
    """Write into the means over the budgets which share of what looked attainable each policy
    gained over static, `attained`; None where nothing looked attainable."""
    estimate = results.get("attainable")
    for row in results["rows"]:
        if estimate and row["budget_ms"] is None:
            row["attained"] = None
            if estimate["gain_ci95"][0] > 0:
                row["attained"] = row["over_static"] / estimate["gain"]
