"""Estimate before any training how much a policy could learn from the features.

Three quick predictors (ridge and kernel ridge regression, trees) are fitted in folds and stacked as
a controller's teacher is. The policy that takes the best score of the stack is compared with
budget-aware static, each on samples that it was not fitted on. Where static was better at a budget,
static decides, as a controller's guard falls back to it. An oracle is compared with the same static
choices on the same samples, so that nothing can gain more. Where most settings were measured on one
or two samples, as in a random search, nobody knows which one is best, and nothing is estimated.

*What the estimate is about.* For each fold, the gain on new inputs of the policy that was fitted
without it, over static that was fitted without it; and of these the mean over the folds. It is what
this much data (four fifths of the samples) lets a quick policy gain. A policy that knows every true
probability gains more, and so may one that was fitted on more data.

*Why its interval holds.* Given what was fitted, the gains of held-out samples are draws with this
mean, so the paired bootstrap over samples is an interval for it (Bayle et al. 2020,
"Cross-validation Confidence Intervals for Test Error", NeurIPS). The other folds weigh the
predictors of a fold and say whether static decides there, so no sample chooses the policy that it
judges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.evaluation.baselines import Oracle, fit_static
from knobwise.agents.evaluation.policy import choices_of
from knobwise.agents.problem import Problem
from knobwise.agents.teacher.beliefs import fit_beliefs
from knobwise.agents.teacher.experts import Experts
from knobwise.agents.teacher.outcomes import Prediction, pick
from knobwise.agents.teacher.regressors import FAMILIES, Family, boosting
from knobwise.agents.teacher.weights import HeldOutScores, weights_of_folds
from knobwise.common.progress import progress
from knobwise.envs.bandit.budgets import MIN_LATENCY_MS, SPARSE
from knobwise.envs.bandit.outcomes import Decisions
from knobwise.envs.bandit.reward import expected_utility
from knobwise.envs.bandit.rules import DEADLINES, Rule
from knobwise.envs.tables.cells import unread
from knobwise.envs.tables.profile_table import ProfileTable, median_of
from knobwise.envs.tables.splits import Fold
from knobwise.experiments.evidence.schema import Attainable, CurvePoint, RunResults
from knobwise.experiments.evidence.statistics import ends_of, resampled_means
from knobwise.profiling.design.cell_design import balanced_cells, with_cells

FEWEST_OF_SETTING = 3
"""Of settings that were measured on fewer samples nobody can choose the best one."""
MAX_ONCE = 0.5
"""Where more of the cells were measured once, most of the luck cannot be told."""
QUICK = ("ridge", "kernel_ridge", "gradient_boosting")
"""The families of the quick predictors."""
WAYS = {
    "ridge": FAMILIES["ridge"],
    "kernel_ridge": FAMILIES["kernel_ridge"]._replace(
        settings=tuple((1.0, alpha) for alpha in (0.1, 0.3, 1.0))
    ),
    "gradient_boosting": Family(partial(boosting, rate=0.2), (40,)),
}
"""How they are fitted before any training, with fewer settings and trees than a teacher's, which
take most of its time."""
MAX_SAMPLES = 4000
"""Of larger profiles a random part of this size is used, so that inspection takes seconds."""
MAX_CELLS = 250_000
"""Samples × configurations; of profiles with more, a smaller part of the samples is used."""
SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4)
"""Shares of the cells that a learning curve is estimated at."""
WIDEST = 512
"""More features than this are replaced by their first `COMPONENTS` principal components: fits take
a time that grows faster than the number of features."""
COMPONENTS = 256


def attainable(table: ProfileTable, budgets_ms: Tensor) -> Attainable | None:
    """Fit the quick predictors on a profile, and return what `attainable_by` does; None without
    features, where nothing can be learned, and where settings were measured on too few samples.

    Args:
        budgets_ms: float [B].
    """
    # known before anything is fitted
    if not table.features or is_scattered(table, torch.arange(table.num_samples)):
        return None
    experts = _quick_experts(table, table, budgets_ms)
    estimate = attainable_by(table, experts, budgets_ms)
    if estimate is not None and experts.normaliser.projection is not None:
        estimate["components"] = experts.normaliser.width
    return estimate


def learning_curve(table: ProfileTable, budgets_ms: Tensor) -> list[CurvePoint]:
    """Estimate what the quick policy would attain if fewer cells of each sample had been measured.

    The cells are drawn at random, balanced over the configurations. Policies and static are fitted
    on them, and judged out of fold on all cells of the profile.

    Where most cells were not measured, the curve goes up to those that were, and policies are
    judged by the completed profile, which the predictor resembles: it may look better than it is.

    Args:
        table: the profile. Few holes stay holes.
        budgets_ms: float [B] that utility is averaged over.

    Returns:
        A point for each of `SHARES` of the cells and for all of them, the fewest first; [] where
        `attainable` is None. `cells`: so many of each sample. `cost`: of measuring them, in the
        unit of latencies; `costs`: further costs. `static`, `utility`: means of static and of the
        quick policy, which falls back to it. `behind`: how much less that is than with all cells,
        paired.
    """
    if not table.features or is_scattered(table, torch.arange(table.num_samples)):
        return []
    points: list[CurvePoint] = []
    attained: list[np.ndarray] = []
    problem = Problem.from_table(table)
    designs = _smaller_designs(table)
    if table.mask.double().mean() < SPARSE:
        problem = replace(problem, beliefs=fit_beliefs(table, problem.split))
    with progress("learning curve", len(designs), quiet_s=2) as tick:
        for done, (count, cells) in enumerate(designs, 1):
            known = with_cells(table, cells)
            experts = _quick_experts(table, known, budgets_ms)
            if len(experts.measured.folds) < 2:
                return []
            policy, static = utilities_out_of_fold(problem, experts, budgets_ms, known)
            gains, _ = _guarded(policy - static, experts.measured.folds)
            attained.append(static.mean(1) + gains)
            utility, ci95 = _interval(attained[-1], table, experts)
            cost = float(known.measurements_ms.double().nansum())
            about: CurvePoint = {"cells": count, "cost": cost, "static": float(static.mean())}
            about["costs"] = {
                name: float(each.double().nansum()) for name, each in known.costs.items()
            }
            points.append({**about, "utility": utility, "utility_ci95": ci95})
            tick(done, f"{count} cells a sample")
        for point, fewer in zip(points, attained, strict=True):
            # on the same samples, so that the interval is a paired one
            behind = attained[-1] - fewer
            point["behind"], point["behind_ci95"] = _interval(behind, table, experts)
    return points


def _smaller_designs(table: ProfileTable) -> list[tuple[int, Tensor]]:
    """Return designs with ever more cells of a sample, up to those of the profile: how many, and
    which, bool [N, C]."""
    samples, most = table.mask.shape
    if table.mask.double().mean() >= SPARSE:
        counts = [max(1, round(share * most)) for share in SHARES]
        counts = [*dict.fromkeys([*counts, most])]
        return [(count, balanced_cells(samples, most, count)) for count in counts]
    # of the measured cells of each sample the first in random order
    most = int(table.mask.sum(1).median())
    order = torch.rand(table.mask.shape, generator=torch.Generator().manual_seed(0))
    rank = order.masked_fill(~table.mask, 2.0).argsort(1).argsort(1)
    counts = [*dict.fromkeys([max(1, most // 4), max(1, most // 2), most])]
    return [(count, table.mask & (rank < count)) for count in counts]


def _quick_experts(table: ProfileTable, known: ProfileTable, budgets_ms: Tensor) -> Experts:
    """Fit the quick predictors on what is known of a profile."""
    most = min(MAX_SAMPLES, max(MAX_CELLS // table.num_configurations, 500))
    rows = torch.randperm(table.num_samples, generator=torch.Generator().manual_seed(0))
    rows = rows[:most].sort().values
    # without budgets no spread is chosen by its utility, which would flatter
    normaliser = _narrowed(table, rows)
    return Experts.fit(
        known,
        rows,
        budgets_ms[:0],
        QUICK,
        0,
        normaliser=normaliser,
        ways=WAYS,
        on_all=False,
    )


def _narrowed(table: ProfileTable, rows: Tensor) -> FeatureNormaliser:
    """Return the normaliser of these rows, which projects very many features onto their principal
    components."""
    normaliser = FeatureNormaliser.fit(table, rows)
    if normaliser.width > WIDEST and len(rows) > COMPONENTS:
        from sklearn.decomposition import PCA

        x = normaliser.of_rows(table, rows).numpy()
        axes = PCA(COMPONENTS, svd_solver="randomized", random_state=0).fit(x).components_
        # each keeps its variance, since the first ones say most
        normaliser.projection = torch.from_numpy(axes.T).float().contiguous()
    return normaliser


def attainable_by(
    table: ProfileTable | Problem, experts: Experts, budgets_ms: Tensor
) -> Attainable | None:
    """Return what looks learnable from the features: the gain of quick policies over budget-aware
    static out of fold, see above.

    Args:
        table: the profile.
        experts: fitted on some of its samples, among them the families `QUICK`.
        budgets_ms: float [B] that utility is averaged over.

    Returns:
        `gain`: in utility. `gain_ci95`: its 95 % bootstrap interval over samples (or images, or
        clusters). `oracle`, `oracle_ci95`: what an oracle gains over the same static choices.
        `samples`: how many were used. `learned`: for each fold, at which budgets the quick policy
        decided, not static. None if there are too few samples for two folds, or settings were
        measured on too few of them.
    """
    problem = Problem.from_table(table)
    folds = experts.measured.folds
    if len(folds) < 2 or is_scattered(problem.facts, experts.measured.rows):
        return None
    policy, static = utilities_out_of_fold(problem, experts, budgets_ms)
    kept, learned = _guarded(policy - static, folds)
    mean, ci95 = _interval(kept, problem.facts, experts)
    # on the resamples of the gain, so that each end of its interval is above that of the gain
    most = (_utilities_of_oracle(problem, experts, budgets_ms) - static).mean(1)
    oracle, oracle_ci95 = _interval(most, problem.facts, experts)
    return {
        "gain": mean,
        "gain_ci95": ci95,
        "oracle": oracle,
        "oracle_ci95": oracle_ci95,
        "samples": len(kept),
        "learned": learned,
    }


def is_scattered(table: ProfileTable, rows: Tensor) -> bool:
    """Return whether most cells of these samples are of settings that hardly any other sample has,
    see `samples_of_setting`. A table of so few samples is small, not scattered."""
    keys = np.array(table.split_keys)[rows.numpy()]
    several = len(np.unique(keys, axis=0)) >= FEWEST_OF_SETTING
    return several and samples_of_setting(table, rows) < FEWEST_OF_SETTING


def samples_of_setting(table: ProfileTable, rows: Tensor) -> int:
    """Return on how many of these samples (or images, or clusters) the setting of a cell was
    measured, the median over the measured cells."""
    keys = np.array(table.split_keys)[rows.numpy()]
    # folds keep samples of one image or cluster together, so they count once
    unit = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    measured = torch.zeros(int(unit.max()) + 1, table.num_configurations)
    measured.index_add_(0, torch.from_numpy(unit), table.mask[rows].float())
    counts = (measured > 0).sum(0).sort().values
    middle = (counts.sum(0, keepdim=True) + 1) // 2
    return int(counts[torch.searchsorted(counts.cumsum(0), middle)])


def _guarded(gains: np.ndarray, folds: Sequence[Fold]) -> tuple[np.ndarray, list[list[bool]]]:
    """Let static decide where the policy gained nothing in the other folds.

    Args:
        gains: of the policy over static, [n, B].
        folds: their positions to fit on and to hold out.

    Returns:
        What is gained then, the mean over the budgets, [n]; and for each fold at which budgets the
        policy decides.
    """
    total = gains.sum(0)
    kept = np.empty(len(gains))
    learned = []
    for _, hold in folds:
        decides = total - gains[hold].sum(0) > 0
        kept[hold] = (gains[hold] * decides).mean(1)
        learned.append(decides.tolist())
    return kept, learned


def _interval(
    values: np.ndarray, table: ProfileTable, experts: Experts
) -> tuple[float, list[float]]:
    """Return the mean of the samples' values [n] and its 95 % bootstrap interval."""
    # samples of one image or cluster are drawn together
    keys = np.array(table.split_keys)[experts.measured.rows.numpy()]
    clusters = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    drawn = resampled_means([values], splits=np.stack([np.zeros_like(clusters), clusters]))
    return float(values.mean()), ends_of(drawn)[0]


def utilities_out_of_fold(
    problem: Problem,
    experts: Experts,
    budgets_ms: Tensor,
    known: ProfileTable | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the utilities of the quick policy and of static, both fitted without the fold of the
    sample: float64 [n, B] each.

    The policy pays for what its features take, `features_ms` and the first look; static does not.

    Args:
        problem: what is decided; predictions count.
        experts: fitted on some of its samples.
        budgets_ms: float [B].
        known: the cells of the profile that experts and static are fitted on; None for all.
    """
    measured = experts.measured
    rows = measured.rows
    mask = problem.mask[rows]
    static = torch.empty(len(rows), len(budgets_ms), dtype=torch.int64)
    for fit, hold in measured.folds:
        policy = fit_static(known or problem.cells, rows[fit], problem.rule)
        static[hold] = choices_of(policy, {}, budgets_ms.numpy(), mask[hold].numpy())
    reads = torch.zeros(len(budgets_ms), dtype=torch.bool)
    by_static = Decisions(rows, static, budgets_ms, reads=reads)
    of_static = problem.outcomes(by_static, checked=False).utility
    features_ms = problem.facts.features_ms
    _, scores = quick_stack(experts, budgets_ms - features_ms, problem.rule)
    # among equal scores the fastest on average
    slow = measured.latency_ms.nanmean(0)
    chosen = torch.stack([pick(score, slow, mask) for score in scores], 1)
    decisions = Decisions(rows, chosen, budgets_ms, features_ms)
    outcomes = problem.outcomes(decisions, checked=False)
    return outcomes.utility.double().numpy(), of_static.double().numpy()


def _utilities_of_oracle(problem: Problem, experts: Experts, budgets_ms: Tensor) -> np.ndarray:
    """Return the utilities of the oracle, which reads no features: float64 [n, B]."""
    rows = experts.measured.rows
    oracle = Oracle(problem.cells, rows, problem.rule)
    chosen = oracle.choose_each({}, budgets_ms.numpy(), problem.mask[rows].numpy())
    reads = torch.zeros(len(budgets_ms), dtype=torch.bool)
    decisions = Decisions(rows, torch.from_numpy(chosen), budgets_ms, reads=reads)
    return problem.outcomes(decisions, checked=False).utility.double().numpy()


def quick_stack(
    experts: Experts, limits: Tensor, rule: Rule = DEADLINES
) -> tuple[list[Tensor], Tensor]:
    """Stack the quick predictors under limits [B] in ms.

    Returns:
        weights: of each fold, float64 [predictors].
        scores: of every configuration for every sample, out of fold, [B, n, C].
    """
    predictions = quick_predictions(experts)
    limits = limits.clamp_min(MIN_LATENCY_MS)
    held_out = HeldOutScores.of_predictions(predictions, experts.measured, limits, rule)
    return weights_of_folds(held_out, experts.measured.folds)


def quick_predictions(experts: Experts) -> list[Prediction]:
    """Return the predictions out of fold of each family of `QUICK`, [n, C]."""
    predictions = []
    for fitted in experts.of_families(QUICK):
        prediction = fitted.out_of_fold
        # the spread may have been chosen by utility; that of the residuals was not
        spread = experts.measured.residual_spread(prediction.log_latency)
        predictions.append(prediction._replace(spread=spread))
    return predictions


def oracle_of_halves(table: ProfileTable, budgets_ms: Tensor) -> float | None:
    """Return the mean utility of an oracle that chooses by one random half of the repeats of each
    cell and is judged by the other half: what it gains without luck in single latencies.

    Accuracies are the same in both halves, since a profile holds their means. A cell that was
    measured once counts in both and keeps its luck. None if more than half of the cells were
    measured once.
    """
    table = unread(table)
    if table.repeats_ms is None or repeated_share(table) < 1 - MAX_ONCE:
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


def repeated_share(table: ProfileTable) -> float:
    """Return the share of the profiled cells that were measured more than once."""
    times = (~table.measurements_ms.isnan()).sum(-1)
    return float((times > 1).sum() / (times > 0).sum())


def add_shares(results: RunResults) -> None:
    """Write into the means over the budgets which share of what looked attainable each policy
    gained over static, `attained`; None where nothing looked attainable, or it is not known."""
    estimate = results.get("attainable")
    for row in results["rows"]:
        if estimate and row["budget_ms"] is None:
            row["attained"] = None
            gained = row["over_static"]
            if estimate["gain_ci95"][0] > 0 and gained is not None:
                row["attained"] = gained / estimate["gain"]
