"""Why a policy sets the knobs as it does: what its decisions on held-out samples show, for `results.json`.

Decisions are explained as if they took no time, so that the figures are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from knobwise.agents.judging.baselines import BudgetAwareStatic, averages
from knobwise.agents.judging.policy import reads_features
from knobwise.agents.predictors.folds import folds_of
from knobwise.agents.stack.priced_policy import PricedChooser
from knobwise.agents.stack.prices import choose_at_price
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.envs.configurations.reward import expected_utility
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.results.statistics import ends_of, mean_interval, mean_intervals, resampled_means

MOST, SEED = 1000, 0
"""Samples that are explained, of a larger test part a random choice; and the seed of all chance here."""
RIGHT = 0.5
"""A configuration is right for a sample from this accuracy on; for accuracies of 0 and 1 that is what the word says."""
REPEATS, NARROW, TOP = 3, 64, 10
"""Shuffles of a block; the widest block whose columns are looked at; and how many rows a list has."""
DEPTH, LEAVES, LEAST_SHARE = 3, 8, 0.01
"""Bounds of the distilled tree: its depth, its leaves, and the share of decisions in a leaf."""
Rows = list[dict[str, Any]]


class Explained:
    """A policy's decisions for n held-out samples under B budgets, and what they are worth.

    Worth is utility; under mean budgets it is accuracy − price · latency.

    Args:
        fitted, test: int64, the rows that static choices are made on, and those to explain.
        budgets_ms: float [B]; of a controller for mean budgets those that it was calibrated for.

    Attributes:
        rows: int64 [n], those of `test`, or `MOST` of them.
        chosen, static: int64 [n, B], the configurations of the policy, and of the best way that is the same for all
            samples: budget-aware static, or the best configuration at the price.
        reads: bool [B], whether the policy decides by features, or the guard does.
    """

    def __init__(self, table: ProfileTable, fitted: Tensor, test: Tensor, policy: Any, budgets_ms: Tensor) -> None:
        self.table, self.policy, self.budgets_ms = table, policy, budgets_ms
        generator = torch.Generator().manual_seed(SEED)
        self.rows = test if len(test) <= MOST else test[torch.randperm(len(test), generator=generator)[:MOST].sort()[0]]
        self.prices = policy.prices[policy.groups(budgets_ms)] if isinstance(policy, PricedChooser) else None
        priced = isinstance(policy, PricedChooser)
        self.reads = policy.deployed[policy.groups(budgets_ms)] if priced else reads_features(policy, budgets_ms)
        self.features = {name: block[self.rows] for name, block in table.features.items()}
        self.mask = table.mask[self.rows]
        self.chosen = self.decided(self.features)
        if self.prices is None:
            fixed: Any = BudgetAwareStatic(table, fitted)
            self.static = torch.stack([fixed.choose({}, b.expand(len(self.rows)), self.mask) for b in budgets_ms], 1)
        else:
            means = [mean.expand(self.mask.shape) for mean in averages(table, fitted)]
            self.static = torch.stack([choose_at_price(*means, price, self.mask) for price in self.prices], 1)

    @torch.no_grad()
    def decided(self, features: Mapping[str, Tensor]) -> Tensor:
        """Configurations for blocks [R·n, d], R times all samples: int64 [R·n, B]."""
        mask = self.mask.repeat(len(next(iter(features.values()), self.mask)) // len(self.mask), 1)
        n, stack = len(mask), getattr(self.policy, "chooser", self.policy)
        limits = self.budgets_ms if self.prices is None else 1 / self.prices
        predicted = stack.predictions(stack.features(features, n)) if isinstance(stack, StackedController) else None
        columns = []
        for budget, limit, reads in zip(self.budgets_ms, limits, self.reads, strict=True):
            if predicted is not None and (reads or self.prices is None):  # predict once for all budgets
                columns.append(stack.choose_from(predicted, limit.expand(n), mask).cpu())
            else:
                columns.append(self.policy.choose(features, budget.expand(n), mask).cpu())
        return torch.stack(columns, 1)

    def worth(self, chosen: Tensor, reads: Tensor | None = None) -> Tensor:
        """int64 [R·n, B] → float64 [R·n, B]; `reads` bool [B], under which budgets the decisions need a first look."""
        at = self.rows.repeat(len(chosen) // len(self.rows)).unsqueeze(1), chosen
        accuracy, measured = self.table.accuracy[at].double(), self.table.measurements_ms[at]
        if self.prices is not None:
            return accuracy - self.prices * self.table.latency_ms[at].double()
        if self.table.first_look_ms is not None:
            measured = measured - (self.table.first_look_ms[at] * ~(self.reads if reads is None else reads))[..., None]
        return expected_utility(accuracy, measured, self.budgets_ms)


def explain_policy(
    table: ProfileTable,
    fitted: Tensor,
    test: Tensor,
    policy: Any,
    budgets_ms: Tensor,
    questions: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The entry `explanation` of `results.json`; `questions` by the id of their sample, other arguments as in
    `Explained`.

    Returns:
        `samples`, explained; `reads`, for each of `budgets_ms` whether the policy decides there by features;
        `difficulty`, see `by_difficulty`; `importance`, see there; `tree`, see `distilled`; `best` and `worst`, the
        decisions that gain and lose most against static.
    """
    explained = Explained(table, fitted, test, policy, budgets_ms)
    return {
        "samples": len(explained.rows),
        "budgets_ms": budgets_ms.tolist(),
        "reads": explained.reads.tolist(),
        "difficulty": by_difficulty(explained),
        "importance": importance(explained) if table.features else [],
        "tree": distilled(explained),
        **best_and_worst(explained, questions or {}),
    }


# -- easy → cheap, hard → costly ---------------------------------------------------------------------------------------


def difficulty_of(accuracy: Tensor, latency_ms: Tensor) -> Tensor:
    """The latency of the cheapest right configuration of each sample, [n, C] each → [n]; infinite where none is."""
    return latency_ms.where(accuracy >= RIGHT, torch.inf).amin(1)  # NaN is not right


def rank_correlation(x: ArrayLike, y: ArrayLike) -> tuple[float | None, list[float] | None]:
    """Spearman's rank correlation of two [n] and its 95 % bootstrap interval over samples, with the ranks that they
    have among all; None and None where a side is constant."""
    from scipy.stats import rankdata, spearmanr

    if min(len(np.unique(x)), len(np.unique(y))) < 2:
        return None, None
    a, b = (rankdata(side) / len(np.asarray(side)) for side in (x, y))
    mean_a, mean_b, *products = resampled_means([a, b, a * b, a * a, b * b]).T
    both, square_a, square_b = products
    spread = np.sqrt((square_a - mean_a**2).clip(0) * (square_b - mean_b**2).clip(0))
    drawn = (both - mean_a * mean_b) / np.where(spread > 1e-12, spread, np.nan)
    return float(spearmanr(x, y).statistic), ends_of(drawn[:, None])[0]


def by_difficulty(explained: Explained) -> dict[str, Any]:
    """What is spent on easy and on hard samples. A sample is as difficult as the latency of its cheapest right
    configuration.

    A sample that is slow under every configuration is both difficult and expensive, whoever decides. So there is also
    the correlation of `static`, and that of the setting alone, for which a configuration costs the same in all samples:
    its mean latency.

    Returns:
        `unanswered`: samples that no configuration answers right, left out. `at`: for each budget the `correlation`
        between difficulty and latency of the choice, with its `ci95`; `static`; and `setting`, with `setting_ci95`. One
        of something constant is null. `budget_ms`, of the picture: the largest at which choices differ. `groups`:
        there, of some ten groups of equal difficulty the means `difficulty_ms`, `policy_ms`, with its `ci95`, and
        `static_ms`. `points`: for each sample its difficulty and the latency of the choice.
    """
    accuracy, latency_ms = (values[explained.rows] for values in (explained.table.accuracy, explained.table.latency_ms))
    hard = difficulty_of(accuracy, latency_ms)
    known, cost_ms = hard.isfinite(), averages(explained.table, explained.rows)[1]
    x, by_setting = hard[known].numpy(), difficulty_of(accuracy, cost_ms.expand_as(accuracy))[known].numpy()
    ours, static = (latency_ms.gather(1, c)[known].numpy() for c in (explained.chosen, explained.static))
    settings, at = cost_ms[explained.chosen[known]].numpy(), []
    for place, budget in enumerate(explained.budgets_ms.tolist()):
        pairs = (x, ours), (x, static), (by_setting, settings)
        (value, ci95), (of_static, _), (setting, setting_ci95) = (rank_correlation(a, b[:, place]) for a, b in pairs)
        row = {"budget_ms": budget, "correlation": value, "ci95": ci95, "static": of_static}
        at.append(row | {"setting": setting, "setting_ci95": setting_ci95})
    result: dict[str, Any] = {"unanswered": int((~known).sum()), "at": at}
    drawn = [place for place, row in enumerate(at) if row["setting"] is not None]
    if not drawn:
        return result | {"budget_ms": None, "groups": [], "points": []}
    y, fixed = ours[:, drawn[-1]], static[:, drawn[-1]]
    number = np.digitize(x, np.unique(np.quantile(x, np.arange(0.1, 1, 0.1))))
    groups = []
    for group in (number == each for each in np.unique(number)):
        means = zip(("difficulty_ms", "policy_ms", "static_ms"), (x, y, fixed), strict=True)
        groups.append({name: float(values[group].mean()) for name, values in means} | {"ci95": mean_interval(y[group])})
    points = np.stack([x, y], 1).round(4).tolist()
    return result | {"budget_ms": at[drawn[-1]]["budget_ms"], "groups": groups, "points": points}


# -- which features matter ---------------------------------------------------------------------------------------------


def importance(explained: Explained) -> Rows:
    """The worth that is lost if a feature block, or a column of a narrow block, belongs to another sample.

    scikit-learn's `permutation_importance` shuffles single columns and forgets the samples; here a block keeps its rows
    together, and the interval is over samples. Columns are first shuffled once, and the `TOP` ones then anew.

    Returns: by falling loss: `name`, `column` (null for a whole block), `lost` and its `ci95`.
    """
    generator = torch.Generator().manual_seed(SEED)
    before = explained.worth(explained.chosen).mean(1)

    def lost(part: tuple[str, int | None], repeats: int) -> NDArray[np.float64]:
        """Of each sample, mean over the shuffles and budgets [n]."""
        name, column = part
        blocks = {key: block.repeat(repeats, 1) for key, block in explained.features.items()}
        order = torch.cat([torch.randperm(len(before), generator=generator) for _ in range(repeats)])
        columns = slice(None) if column is None else slice(column, column + 1)
        blocks[name][:, columns] = explained.features[name][order, columns]
        worth = explained.worth(explained.decided(blocks)).view(repeats, len(before), -1)
        return (before - worth.mean((0, 2))).numpy()

    narrow = {name: block.shape[1] for name, block in explained.features.items() if 1 < block.shape[1] <= NARROW}
    columns = [(name, column) for name, width in narrow.items() for column in range(width)]
    if len(columns) > TOP:
        columns.sort(key=lambda part: -lost(part, 1).mean())
    parts: list[tuple[str, int | None]] = [*((name, None) for name in explained.features), *columns[:TOP]]
    losses = [lost(part, REPEATS) for part in parts]
    rows = [
        {"name": name, "column": column, "lost": float(loss.mean()), "ci95": ci95}
        for (name, column), loss, ci95 in zip(parts, losses, mean_intervals(losses), strict=True)
    ]
    return sorted(rows, key=lambda row: (row["column"] is not None, -row["lost"]))


# -- in a few rules ----------------------------------------------------------------------------------------------------


def distilled(explained: Explained) -> dict[str, Any]:
    """A small decision tree over features and budget that sets the knobs much as the policy does (scikit-learn's CART,
    all knobs in one tree).

    Returns:
        `fidelity`: the share of knob values that the tree sets alike on samples that it was not fitted on, and its
        `ci95`; `by_budget_alone`: the same of a tree that does not see the features; `exact`: the share of decisions in
        which all knobs are alike. `rules`: of each leaf the conditions `when`, [feature, ≤ or >, value]; `then`, the
        values of the knobs; its `share` of the decisions, and the share `alike` of the knob values there.
    """
    from sklearn.tree import DecisionTreeClassifier

    (n, count), table = explained.chosen.shape, explained.table
    blocks = [block.repeat_interleave(count, 0) for block in explained.features.values()]
    x = torch.cat([explained.budgets_ms.float().repeat(n)[:, None], *blocks], 1).numpy()
    y = table.configurations[explained.chosen.flatten()].numpy()
    tree = DecisionTreeClassifier(
        max_depth=DEPTH, max_leaf_nodes=LEAVES, min_samples_leaf=LEAST_SHARE, random_state=SEED
    )
    alike = np.zeros((2, *y.shape), bool)
    cells = np.arange(n * count).reshape(n, count)
    for fit, hold in folds_of(table, explained.rows, SEED, 3):
        seen, unseen = cells[fit].flatten(), cells[hold].flatten()
        for side, width in enumerate((x.shape[1], 1)):
            predicted = tree.fit(x[seen, :width], y[seen]).predict(x[unseen, :width])
            alike[side, unseen] = predicted.reshape(len(unseen), -1) == y[unseen]
    names = ["budget", *(f"{k}[{i}]" for k, block in explained.features.items() for i in range(block.shape[1]))]
    shares = alike.mean(2).reshape(2, n, count).mean(2)
    return {
        "fidelity": float(shares[0].mean()),
        "ci95": mean_interval(shares[0]),
        "by_budget_alone": float(shares[1].mean()),
        "exact": float(alike[0].all(1).mean()),
        "rules": _rules(tree.fit(x, y), names, table, 0, {}),
    }


def _rules(tree: Any, names: list[str], table: ProfileTable, node: int, when: dict[tuple[str, str], float]) -> Rows:
    """The leaves below a node of a fitted tree, from left to right; two with the same choice become a single rule."""
    inner = tree.tree_
    conditions, counts = [[*key, value] for key, value in when.items()], inner.n_node_samples
    if inner.children_left[node] < 0:
        shares = inner.value[node]  # of each value of each knob
        classes = tree.classes_ if len(shares) > 1 else [tree.classes_]
        values = [int(known[share.argmax()]) for known, share in zip(classes, shares, strict=False)]
        then = {knob.name: knob.values[value] for knob, value in zip(table.knobs, values, strict=True)}
        share, alike = float(counts[node] / counts[0]), float(shares.max(1).mean())
        return [{"when": conditions, "then": then, "share": share, "alike": alike}]
    feature, value = names[inner.feature[node]], float(inner.threshold[node])
    sides = (("≤", inner.children_left[node]), (">", inner.children_right[node]))
    # a deeper bound on the same feature is the tighter one
    left, right = (_rules(tree, names, table, child, {**when, (feature, sign): value}) for sign, child in sides)
    if len(left) == len(right) == 1 and left[0]["then"] == right[0]["then"]:
        share = left[0]["share"] + right[0]["share"]
        alike = sum(rule["share"] * rule["alike"] for rule in left + right) / share
        return [{"when": conditions, "then": left[0]["then"], "share": share, "alike": alike}]
    return left + right


# -- single decisions --------------------------------------------------------------------------------------------------


def best_and_worst(explained: Explained, questions: Mapping[str, str]) -> dict[str, Rows]:
    """The `best` and the `worst` decisions against static, by the worth gained, of each sample at most one; among equal
    ones those whose samples gain or lose most over all budgets."""
    ours = explained.worth(explained.chosen)
    static = explained.worth(explained.static, torch.zeros_like(explained.reads))
    gains = (ours - static).numpy()
    lists = {}
    for name, sign in (("best", 1), ("worst", -1)):
        place = (sign * gains).argmax(1)
        at = gains[np.arange(len(gains)), place]
        order = np.lexsort((-sign * gains.mean(1), -sign * at))
        chosen = [sample for sample in order[:TOP].tolist() if sign * at[sample] > 1e-9]
        lists[name] = [
            _decision(explained, questions, sample, int(place[sample]), float(at[sample])) for sample in chosen
        ]
    return lists


def _decision(
    explained: Explained, questions: Mapping[str, str], sample: int, place: int, gain: float
) -> dict[str, Any]:
    table, row = explained.table, int(explained.rows[sample])
    budget, sample_id = float(explained.budgets_ms[place]), table.sample_ids[row]
    result: dict[str, Any] = {
        "sample_id": sample_id,
        "dataset": table.dataset_names[row],
        "budget_ms": budget,
        "gain": gain,
    }
    result["question"] = questions.get(sample_id, table.question_types[row] if table.question_types else None)
    for who, chosen in (("policy", explained.chosen), ("static", explained.static)):
        choice = int(chosen[sample, place])
        numbers = {"accuracy": table.accuracy[row, choice], "latency_ms": table.latency_ms[row, choice]}
        result[who] = {"choice": table.label(choice)} | {key: float(value) for key, value in numbers.items()}
    return result
