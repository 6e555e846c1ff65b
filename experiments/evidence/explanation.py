"""Explain why a policy sets the knobs as it does, from its decisions on held-out samples.

Decisions are explained as if they took no time, so that the numbers are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.evaluation.policy import Policy, choices_of
from knobwise.agents.problem import Problem
from knobwise.envs.tables.cells import averages
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.splits import folds_of
from knobwise.experiments.evidence.profile_facts import difficulty_of
from knobwise.experiments.evidence.schema import (
    BestAndWorst,
    Difficulty,
    DifficultyGroup,
    Importance,
    Side,
    SingleDecision,
    Tree,
    TreeRule,
    WhyExplained,
)
from knobwise.experiments.evidence.statistics import (
    ends_of,
    mean_interval,
    resampled_means,
)

if TYPE_CHECKING:
    from sklearn.tree import DecisionTreeClassifier

MAX_SAMPLES = 1000
"""At most this many samples are explained, a random choice of a larger test part."""
SEED = 0
"""The seed of all random numbers of this module."""
REPEATS = 3
"""How often a feature block is shuffled."""
NARROW = 64
"""In blocks of up to this width single columns are shuffled too."""
TOP = 10
"""The most rows of a list."""
TREE = {"max_depth": 3, "max_leaf_nodes": 8, "min_samples_leaf": 0.01, "random_state": SEED}
"""The arguments of scikit-learn's decision tree."""


class Explained:
    """A policy's decisions for n held-out samples under B budgets, and what they are worth: the
    utility, or under mean budgets accuracy − price · latency.

    Args:
        test: int64, the rows to explain.
        budgets_ms: float [B]; of a controller for mean budgets all that it was calibrated for.
        static: what decisions are compared with.
        prices: under mean budgets, float [B].

    Attributes:
        rows: int64 [n], those of `test`, or `MAX_SAMPLES` of them.
        chosen: int64 [n, B], the choices of the policy.
        static: int64 [n, B], the choices of the static policy.
        reads: bool [B], False where the guard decides without features.
    """

    def __init__(
        self,
        problem: Problem,
        test: Tensor,
        policy: DeployedController,
        budgets_ms: Tensor,
        static: Policy,
        prices: Tensor | None = None,
    ) -> None:
        self.table = problem.facts
        self.rule = problem.rule
        self.values = problem.values
        self.cells = problem.cells
        self.policy = policy
        self.budgets_ms = budgets_ms
        self.limits = budgets_ms.double().numpy()
        drawn = torch.randperm(len(test), generator=torch.Generator().manual_seed(SEED))[
            :MAX_SAMPLES
        ]
        self.rows = test[drawn.sort().values]
        self.reads = torch.from_numpy(policy.reads_features(self.limits))
        self.features = problem.facts.blocks(self.rows)
        self.mask = problem.mask[self.rows].numpy()
        self.chosen = self.decided(self.features)
        self.prices = prices
        self.static = choices_of(static, {}, self.limits, self.mask)

    def decided(self, features: Mapping[str, Tensor]) -> Tensor:
        """Return the configurations that the policy chooses by feature blocks [n, d], int64
        [n, B]."""
        blocks = {name: block.numpy() for name, block in features.items()}
        return choices_of(self.policy, blocks, self.limits, self.mask)

    def utility(self, chosen: Tensor, reads: Tensor) -> Tensor:
        """Return the utility of choices, float64 [n, B].

        Args:
            chosen: int64 [n, B].
            reads: bool [B], where the choice needs features, which may cost a first look.
        """
        cells = self.rows.unsqueeze(1), chosen
        accuracy = self.cells.accuracy[cells].double()
        if self.prices is not None:
            return accuracy - self.prices * self.cells.latency_ms[cells].double()
        measured_ms = self.cells.measurements_ms[cells]
        first_look_ms = self.cells.first_look_ms
        if first_look_ms is not None:
            # measurements include the first look: take it off where it is not needed
            measured_ms = measured_ms - (first_look_ms[cells] * ~reads)[..., None]
        return self.rule.mean_utility(accuracy, measured_ms, self.budgets_ms)


def explain_policy(
    explained: Explained, questions: Mapping[str, str], known: bool = True
) -> WhyExplained:
    """Return the entry `explanation` of `results.json`.

    Args:
        questions: by the id of their sample, where they are known.
        known: whether enough of the choices was measured to say what they are worth; else only the
            choices are explained, and what needs their outcomes is empty or null.

    Returns:
        `samples`: their number. `reads`: the budgets at which the policy decides by features.
        `difficulty`, `more_time`, `importance`, `tree`: see `by_difficulty`, `with_more_time`,
        `importance`, `distilled`. `best` and `worst`: see `best_and_worst`.
    """
    extremes: BestAndWorst = {"best": [], "worst": []}
    if known:
        extremes = best_and_worst(explained, questions)
    return {
        "samples": len(explained.rows),
        "reads": explained.budgets_ms[explained.reads].tolist(),
        "difficulty": by_difficulty(explained) if known else {"groups": [], "points": []},
        "more_time": with_more_time(explained) if known else None,
        "importance": importance(explained) if known else [],
        "tree": fit_tree(explained),
        **extremes,
    }


# -- easy → cheap, hard → costly -------------------------------------------------------------------


def rank_correlation(x: ArrayLike, y: ArrayLike) -> tuple[float | None, list[float] | None]:
    """Return Spearman's rank correlation of x and y, [n] each, and its 95 % bootstrap interval.

    Samples are drawn again, but keep the ranks that they have among all. Both results are None if x
    or y is constant, or empty.
    """
    from scipy.stats import rankdata

    if min(len(np.unique(x)), len(np.unique(y))) < 2:
        return None, None
    # shares of n, so that small numbers are rounded little
    a, b = rankdata([x, y], axis=1) / np.size(x)
    # Pearson's correlation of the ranks, in every draw
    mean_a, mean_b, product, square_a, square_b = resampled_means([a, b, a * b, a * a, b * b]).T
    spread = np.sqrt((square_a - mean_a**2).clip(0) * (square_b - mean_b**2).clip(0))
    drawn = (product - mean_a * mean_b) / np.where(spread > 1e-12, spread, np.nan)
    return float(np.corrcoef(a, b)[0, 1]), ends_of(drawn[:, None])[0]


def by_difficulty(explained: Explained) -> Difficulty:
    """Return how the latency of the choice grows with the difficulty of a sample, which is the
    latency of its cheapest right configuration.

    A sample that is slow under every configuration is both difficult and expensive, whoever
    decides. So the correlation is also given for `static`, and for the setting alone, where a
    configuration costs its mean latency in all samples.

    Returns:
        `unanswered`: the number of samples that no configuration answers right; they are left out.
        `budget_ms`: the last budget at which choices differ, or null. At this budget:
        `correlation`: between difficulty and latency of the choice, with its `ci95`; `static`;
        null where a side is constant; and `setting`, with `setting_ci95`.
        `groups`: for some ten groups of samples from easy to hard, the means `difficulty_ms`,
        `policy_ms`, with its `ci95`, and `static_ms`.
        `points`: difficulty and latency of the choice of each sample, in ms.
    """
    # [n, C] each, and what a configuration costs on average, [C]
    accuracy = explained.cells.accuracy[explained.rows]
    latency_ms = explained.cells.latency_ms[explained.rows]
    cost_ms = averages(explained.cells, explained.rows)[1]
    difficulty = difficulty_of(accuracy, latency_ms)
    known = difficulty.isfinite()
    x = difficulty[known].numpy()
    x_setting = difficulty_of(accuracy, cost_ms.expand_as(accuracy))[known].numpy()
    # latencies of the choices, [samples with a right answer, B]
    policy = latency_ms.gather(1, explained.chosen)[known].numpy()
    static = latency_ms.gather(1, explained.static)[known].numpy()
    setting = cost_ms[explained.chosen[known]].numpy()

    last: Difficulty = {"budget_ms": None, "groups": [], "points": []}
    for b, budget in enumerate(explained.budgets_ms.tolist()):
        by_setting, ci95 = rank_correlation(x_setting, setting[:, b])
        if by_setting is not None:
            last = {"budget_ms": budget, "setting": by_setting, "setting_ci95": ci95}
            last["correlation"], last["ci95"] = rank_correlation(x, policy[:, b])
            last["static"], _ = rank_correlation(x, static[:, b])
            points = np.stack([x, policy[:, b], static[:, b]])
            last["groups"] = _groups(points)
            last["points"] = points[:2].T.round(4).tolist()
    return {"unanswered": int((~known).sum())} | last


def _groups(points: np.ndarray) -> list[DifficultyGroup]:
    """Return the means of some ten groups of equally many samples, from easy to hard.

    Args:
        points: difficulty, latency of the policy's choice and of static's, [3, n].
    """
    # equal difficulties stay in one group
    deciles = np.unique(np.quantile(points[0], np.arange(0.1, 1, 0.1)))
    group_of = np.digitize(points[0], deciles)
    rows: list[DifficultyGroup] = []
    for number in np.unique(group_of):
        group = points[:, group_of == number]
        difficulty_ms, policy_ms, static_ms = group.mean(1).tolist()
        rows.append(
            {
                "difficulty_ms": difficulty_ms,
                "policy_ms": policy_ms,
                "static_ms": static_ms,
                "ci95": mean_interval(group[1]),
            }
        )
    return rows


# -- more time, other choices ----------------------------------------------------------------------


def with_more_time(explained: Explained) -> dict[str, float] | None:
    """Return how often a larger budget leads to a cheaper or to a worse choice; None where there is
    only one budget.

    A configuration has the mean latency and the mean accuracy of its profiled cells over the
    samples.

    Returns:
        Shares of all pairs of a sample and two neighbouring budgets. `cheaper`: the choice for the
        larger budget has the lower mean latency. `worse`: it has the higher mean latency and the
        lower mean accuracy. `static_cheaper`, `static_worse`: the same for static.
    """
    order = explained.budgets_ms.argsort()
    if len(order) < 2:
        return None
    means = torch.stack(averages(explained.cells, explained.rows))
    shares = {}
    for prefix, chosen in (("", explained.chosen), ("static_", explained.static)):
        # between each budget and the next larger one, [n, B − 1]
        better_by, slower_by = means[:, chosen[:, order]].diff()
        shares[f"{prefix}cheaper"] = float((slower_by < 0).double().mean())
        shares[f"{prefix}worse"] = float(((slower_by > 0) & (better_by < 0)).double().mean())
    return shares


# -- which features matter -------------------------------------------------------------------------


def importance(explained: Explained) -> list[Importance]:
    """Return how much utility the policy loses when features are shuffled among the samples.

    Each feature block is shuffled, and each column of a narrow block; all columns of a text are
    shuffled together. scikit-learn's
    `permutation_importance` shuffles single columns and averages over samples; here the rows of a
    block stay together, and the interval is over samples. All columns are shuffled once, to find
    the `TOP` that matter most; these are then shuffled again.

    Returns:
        The blocks, then the columns, those that lose most first: `name`, `column` (its number, or
        its name if columns have names; null for a block), `lost` and its `ci95`.
    """
    generator = torch.Generator().manual_seed(SEED)
    intact = explained.utility(explained.chosen, explained.reads).mean(1)

    def lost(name: str, where: slice, repeats: int = REPEATS) -> NDArray[np.float64]:
        """Shuffle some columns of a block, and return the utility that each sample loses, [n].

        It is the mean over shuffles and budgets.
        """
        block = explained.features[name]
        losses = torch.zeros_like(intact)
        for _ in range(repeats):
            order = torch.randperm(len(intact), generator=generator)
            shuffled = block.clone()
            shuffled[:, where] = block[order, where]
            chosen = explained.decided(explained.features | {name: shuffled})
            losses += intact - explained.utility(chosen, explained.reads).mean(1)
        return (losses / repeats).numpy()

    blocks = []
    single_columns = []
    for name in explained.features:
        blocks.append((name, None, slice(None)))
        columns = explained.table.block_columns(name)
        start = 0
        for i, column in enumerate(columns):
            stop = start + len(column.labels)
            known = column.name if explained.table.columns else i
            if 1 < len(columns) <= NARROW:
                single_columns.append((name, known, slice(start, stop)))
            start = stop
    if len(single_columns) > TOP:
        single_columns.sort(key=lambda part: -lost(part[0], part[2], 1).mean())
    rows: list[Importance] = []
    for name, key, where in blocks + single_columns[:TOP]:
        loss = lost(name, where)
        rows.append(
            {
                "name": name,
                "column": key,
                "lost": float(loss.mean()),
                "ci95": mean_interval(loss),
            }
        )
    return sorted(rows, key=lambda row: (row["column"] is not None, -row["lost"]))


# -- in a few rules --------------------------------------------------------------------------------


def fit_tree(explained: Explained) -> Tree:
    """Fit a small decision tree that imitates the policy from the features and the budget.

    It is scikit-learn's CART, with all knobs in one tree.

    Returns:
        `fidelity`: the share of knob values in which tree and policy agree, on samples that the
        tree was not fitted on, and its `ci95`. `by_budget_alone`: this share for a tree that does
        not see the features. `beyond_budget`: by how much the first is larger, on the same samples,
        with its `beyond_budget_ci95`. `exact`: the share of decisions that agree in all knobs.
        `rules`, one for each leaf. `when`: its conditions, [feature, ≤ or >, value]. `then`: the
        values of the knobs. `share`: its share of the decisions. `alike`: the share of the knob
        values in which it agrees with the policy.
    """
    from sklearn.tree import DecisionTreeClassifier

    table = explained.table
    n, count = explained.chosen.shape
    # a row for each decision: the budgets of a sample stand next to each other
    names = ["budget"]
    columns = [explained.budgets_ms.float().repeat(n)[:, None]]
    for name, block in explained.features.items():
        for column in table.block_columns(name):
            names += column.labels
        columns.append(block.repeat_interleave(count, 0))
    x = torch.cat(columns, 1).numpy()
    y = table.configurations[explained.chosen.flatten()].numpy()
    tree = DecisionTreeClassifier(**TREE)
    # [2, decisions, knobs]: with all features, and with the budget alone, which is the first column
    alike = np.zeros((2, *y.shape), bool)
    cells = np.arange(n * count).reshape(n, count)
    for fit, hold in folds_of(table, explained.rows, SEED, 3):
        seen = cells[fit].flatten()
        unseen = cells[hold].flatten()
        for side, width in enumerate((len(names), 1)):
            predicted = tree.fit(x[seen, :width], y[seen]).predict(x[unseen, :width])
            alike[side, unseen] = predicted.reshape(len(unseen), -1) == y[unseen]

    # the share of agreeing knobs of each sample, over its budgets, [2, n]
    shares = alike.reshape(2, n, -1).mean(2)
    fidelity, by_budget_alone = shares.mean(1).tolist()
    return {
        "fidelity": fidelity,
        "ci95": mean_interval(shares[0]),
        "by_budget_alone": by_budget_alone,
        "beyond_budget": fidelity - by_budget_alone,
        "beyond_budget_ci95": mean_interval(shares[0] - shares[1]),
        "exact": float(alike[0].all(1).mean()),
        "rules": _rules(tree.fit(x, y), names, table, 0, {}),
    }


def _rules(
    tree: DecisionTreeClassifier,
    names: list[str],
    table: ProfileTable,
    node: int,
    when: dict[tuple[str, str], float],
) -> list[TreeRule]:
    """Return the rules of the leaves below a node of a fitted tree, from left to right.

    Args:
        when: the conditions that lead to the node, (feature, ≤ or >) → value.
    """
    # an inner node splits on a feature; a leaf is a rule
    inner = tree.tree_
    if inner.children_left[node] >= 0:
        feature = names[inner.feature[node]]
        value = float(inner.threshold[node])
        rules: list[TreeRule] = []
        for sign, children in (("≤", inner.children_left), (">", inner.children_right)):
            # a deeper bound on the same feature is the tighter one and replaces the other
            below = {**when, (feature, sign): value}
            rules += _rules(tree, names, table, children[node], below)
        return rules
    shares = inner.value[node]  # [knobs, values]
    classes = tree.classes_
    if len(shares) == 1:  # for a single knob scikit-learn gives its classes alone
        classes = [classes]
    then = {}
    for knob, known, share in zip(table.knobs, classes, shares, strict=True):
        then[knob.name] = knob.values[int(known[share.argmax()])]
    rule: TreeRule = {
        "when": [(*key, value) for key, value in when.items()],
        "then": then,
        "share": float(inner.n_node_samples[node] / inner.n_node_samples[0]),
        "alike": float(shares.max(1).mean()),
    }
    return [rule]


# -- single decisions ------------------------------------------------------------------------------


def best_and_worst(explained: Explained, questions: Mapping[str, str]) -> BestAndWorst:
    """Return the `best` and the `worst` decisions, by the utility that they `gain` over static.

    There is at most one for each sample. Of equal gains those come first whose sample gains most
    (or loses most) over all budgets.
    """
    policy = explained.utility(explained.chosen, explained.reads)
    static = explained.utility(explained.static, explained.reads & False)  # it reads no features
    gains = (policy - static).numpy()
    lists: BestAndWorst = {"best": [], "worst": []}
    for decisions, signed in ((lists["best"], gains), (lists["worst"], -gains)):
        most = signed.max(1)
        for i in np.lexsort((-signed.mean(1), -most))[:TOP].tolist():
            if most[i] > 1e-9:
                b = int(signed[i].argmax())
                decisions.append(_decision(explained, questions, i, b, float(gains[i, b])))
    return lists


def _decision(
    explained: Explained, questions: Mapping[str, str], i: int, b: int, gain: float
) -> SingleDecision:
    """Return the decision for sample i and budget b: what policy and static choose and get."""
    table = explained.table
    row = int(explained.rows[i])
    sample = table.sample_ids[row]
    question = questions.get(sample)
    if question is None and table.question_types:
        question = table.question_types[row]

    def side(chosen: Tensor) -> Side:
        c = int(chosen[i, b])
        return {
            "configuration": table.configuration(c),
            "accuracy": float(explained.values.accuracy[row, c]),
            "latency_ms": float(explained.cells.latency_ms[row, c]),
        }

    return {
        "sample_id": sample,
        "dataset": table.dataset_names[row],
        "question": question,
        "budget_ms": float(explained.budgets_ms[b]),
        "policy": side(explained.chosen),
        "static": side(explained.static),
        "gain": gain,
    }
