"""Why a policy sets the knobs as it does: what its decisions on held-out samples show, for
`results.json`.

Decisions are explained as if they took no time, so that the figures are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from knobwise.agents.judging.baselines import LookupTable, averages, static_of
from knobwise.agents.predictors.folds import folds_of
from knobwise.envs.configurations.reward import expected_utility
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.results.statistics import (
    ends_of,
    mean_interval,
    mean_intervals,
    resampled_means,
)

MOST = 1000
SEED = 0
"""Samples that are explained, of a larger test part a random choice; and the seed of all chance
here."""
RIGHT = 0.5
"""A configuration is right for a sample from this accuracy on."""
REPEATS = 3
NARROW = 64
TOP = 10
"""Shuffles of a block; the widest block whose columns are shuffled too; and how many rows a list
has."""
TREE = {"max_depth": 3, "max_leaf_nodes": 8, "min_samples_leaf": 0.01, "random_state": SEED}
Rows = list[dict[str, Any]]


class Explained:
    """A policy's decisions for n held-out samples under B budgets, and what they are worth:
    utility, or under mean budgets accuracy − price · latency.

    Args:
        fitted, test: int64, the rows that static choices are made on, and those to explain.
        budgets_ms: float [B]; of a controller for mean budgets all that it was calibrated for.

    Attributes:
        rows: int64 [n], those of `test`, or `MOST` of them.
        chosen, static: int64 [n, B], the choices of the policy, and of the static way for deadlines
            or mean budgets.
        reads: bool [B], whether the policy decides by features there, or its guard does without.
    """

    def __init__(
        self, table: ProfileTable, fitted: Tensor, test: Tensor, policy: Any, budgets_ms: Tensor
    ) -> None:
        self.table = table
        self.policy = policy
        self.budgets_ms = budgets_ms
        drawn = torch.randperm(len(test), generator=torch.Generator().manual_seed(SEED))[:MOST]
        self.rows = test[drawn.sort().values]
        limits = budgets_ms.double().numpy()
        self.prices: Tensor | None = None
        if policy.sense == "mean":
            self.prices = 1 / torch.from_numpy(policy.settled.mean["worths"])
        self.reads = torch.from_numpy(policy.reads_features(limits))
        self.features = {name: block[self.rows] for name, block in table.features.items()}
        self.mask = table.mask[self.rows]
        self.chosen = self.decided(self.features)
        static: Any = static_of(table, fitted)
        if self.prices is not None:
            static = LookupTable(table, fitted, 0.0)
        columns = []
        for limit in limits:
            under = np.full(len(self.rows), limit)
            columns.append(torch.from_numpy(static.choose({}, under, self.mask.numpy())))
        self.static = torch.stack(columns, 1)

    def decided(self, features: Mapping[str, Tensor], repeats: int = 1) -> Tensor:
        """Return configurations for blocks [R·n, d], `repeats` times all samples: int64 [R·n,
        B]."""
        mask = self.mask.repeat(repeats, 1).numpy()
        blocks = {name: block.numpy() for name, block in features.items()}
        columns = []
        for limit in self.budgets_ms.double().tolist():
            chosen = self.policy.choose(blocks, np.full(len(mask), limit), mask)
            columns.append(torch.from_numpy(chosen))
        return torch.stack(columns, 1)

    def worth(self, chosen: Tensor, reads: Tensor) -> Tensor:
        """Of choices int64 [R·n, B]: float64 [R·n, B]. `reads` bool [B]: where features cost a
        first look."""
        at = self.rows.repeat(len(chosen) // len(self.rows)).unsqueeze(1), chosen
        accuracy = self.table.accuracy[at].double()
        measured_ms = self.table.measurements_ms[at]
        if self.prices is not None:
            return accuracy - self.prices * self.table.latency_ms[at].double()
        if self.table.first_look_ms is not None:
            measured_ms = measured_ms - (self.table.first_look_ms[at] * ~reads)[..., None]
        return expected_utility(accuracy, measured_ms, self.budgets_ms)


def explain_policy(explained: Explained, questions: Mapping[str, str]) -> dict[str, Any]:
    """The entry `explanation` of `results.json`; `questions` by the id of their sample, where they
    are known.

    Returns:
        `samples`: their number. `reads`: the budgets at which the policy decides by features.
        `difficulty`,
        `more_time`, `importance`, `tree`: see `by_difficulty`, `with_more_time`, `importance`,
        `distilled`. `best` and
        `worst`: see `best_and_worst`.
    """
    return {
        "samples": len(explained.rows),
        "reads": explained.budgets_ms[explained.reads].tolist(),
        "difficulty": by_difficulty(explained),
        "more_time": with_more_time(explained),
        "importance": importance(explained),
        "tree": distilled(explained),
        **best_and_worst(explained, questions),
    }


# -- easy → cheap, hard → costly -------------------------------------------------------------------


def difficulty_of(accuracy: Tensor, latency_ms: Tensor) -> Tensor:
    """The latency of the cheapest right configuration of each sample, [n, C] each → [n]; infinite
    where none is."""
    return latency_ms.where(accuracy >= RIGHT, torch.inf).amin(1)  # NaN is not right


def rank_correlation(x: ArrayLike, y: ArrayLike) -> tuple[float | None, list[float] | None]:
    """Spearman's rank correlation of two [n] and its 95 % bootstrap interval over samples, with the
    ranks that they have among all; None and None where a side is constant."""
    from scipy.stats import rankdata, spearmanr

    if min(len(np.unique(x)), len(np.unique(y))) < 2:
        return None, None
    a, b = (rankdata(side) / len(np.asarray(side)) for side in (x, y))
    mean_a, mean_b, both, square_a, square_b = resampled_means([a, b, a * b, a * a, b * b]).T
    spread = np.sqrt((square_a - mean_a**2).clip(0) * (square_b - mean_b**2).clip(0))
    drawn = (both - mean_a * mean_b) / np.where(spread > 1e-12, spread, np.nan)
    return float(spearmanr(x, y).statistic), ends_of(drawn[:, None])[0]


def by_difficulty(explained: Explained) -> dict[str, Any]:
    """What is spent on easy and on hard samples. A sample is as difficult as the latency of its
    cheapest right configuration.

    A sample that is slow under every configuration is both difficult and expensive, whoever
    decides. So there is also the correlation of `static`, and that of the setting alone, where a
    configuration costs its mean latency in all samples.

    Returns:
        `unanswered`: samples that no configuration answers right, left out. `at`: for each budget
        the `correlation`
        between difficulty and latency of the choice, with its `ci95`; `static`; and `setting`, with
        `setting_ci95`;
        null where one side is constant. `budget_ms`, of the picture: the largest at which choices
        differ, or null.
        `groups`: there, of some ten groups of equal difficulty the means `difficulty_ms`,
        `policy_ms`, with its `ci95`,
        and `static_ms`. `points`: for each sample its difficulty and the latency of the choice.
    """
    accuracy, latency_ms = (
        values[explained.rows] for values in (explained.table.accuracy, explained.table.latency_ms)
    )
    hard = difficulty_of(accuracy, latency_ms)
    cost_ms = averages(explained.table, explained.rows)[1]
    known = hard.isfinite()
    x = hard[known].numpy()
    by_setting = difficulty_of(accuracy, cost_ms.expand_as(accuracy))[known].numpy()
    ours, static = (
        latency_ms.gather(1, c)[known].numpy() for c in (explained.chosen, explained.static)
    )
    settings = cost_ms[explained.chosen[known]].numpy()
    at = []
    for place, budget in enumerate(explained.budgets_ms.tolist()):
        pairs = (x, ours), (x, static), (by_setting, settings)
        (value, ci95), (of_static, _), (setting, setting_ci95) = (
            rank_correlation(a, b[:, place]) for a, b in pairs
        )
        row = {"budget_ms": budget, "correlation": value, "ci95": ci95, "static": of_static}
        at.append(row | {"setting": setting, "setting_ci95": setting_ci95})
    result: dict[str, Any] = {
        "unanswered": int((~known).sum()),
        "at": at,
        "groups": [],
        "points": [],
    }
    drawn = [place for place, row in enumerate(at) if row["setting"] is not None]
    if not drawn:
        return result | {"budget_ms": None}
    y = ours[:, drawn[-1]]
    fixed = static[:, drawn[-1]]
    number = np.digitize(x, np.unique(np.quantile(x, np.arange(0.1, 1, 0.1))))
    for group in (number == each for each in np.unique(number)):
        means = zip(("difficulty_ms", "policy_ms", "static_ms"), (x, y, fixed), strict=True)
        row = {name: float(values[group].mean()) for name, values in means}
        result["groups"].append(row | {"ci95": mean_interval(y[group])})
    points = np.stack([x, y], 1).round(4).tolist()
    return result | {"budget_ms": at[drawn[-1]]["budget_ms"], "points": points}


# -- more time, better choices ---------------------------------------------------------------------


def with_more_time(explained: Explained) -> dict[str, float] | None:
    """Return what choices become from one budget to the next larger one; None where there is one
    budget only.

    A configuration has the mean latency and the mean accuracy of its profiled cells over the
    samples.

    Returns:
        Shares of all pairs of a sample and two neighbouring budgets: `cheaper`, the choice with
        more time has the lower
        mean latency; `worse`, it has the higher one and a lower mean accuracy. `static_cheaper` and
        `static_worse`: the
        same of static.
    """
    order = explained.budgets_ms.argsort()
    if len(order) < 2:
        return None
    accuracy, latency_ms = averages(explained.table, explained.rows)
    shares = {}
    for prefix, chosen in (("", explained.chosen), ("static_", explained.static)):
        slower_by = latency_ms[chosen[:, order]].diff()
        better_by = accuracy[chosen[:, order]].diff()
        shares[f"{prefix}cheaper"] = float((slower_by < 0).double().mean())
        shares[f"{prefix}worse"] = float(((slower_by > 0) & (better_by < 0)).double().mean())
    return shares


# -- which features matter -------------------------------------------------------------------------


def importance(explained: Explained) -> Rows:
    """What a feature block, or a column of a narrow block, is worth: the worth lost when each
    sample gets another's.

    scikit-learn's `permutation_importance` shuffles single columns and averages over samples; here
    the rows of a block stay together, and the interval is over samples. Columns are shuffled once,
    and the first `TOP` then anew.

    Returns: blocks, then columns, by falling loss: `name`, `column` (null for a block), `lost` and
    its `ci95`.
    """
    generator = torch.Generator().manual_seed(SEED)
    before = explained.worth(explained.chosen, explained.reads).mean(1)

    def lost(name: str, column: int | None, repeats: int = REPEATS) -> NDArray[np.float64]:
        """Of each sample, a mean over shuffles and budgets [n]."""
        blocks = {key: block.repeat(repeats, 1) for key, block in explained.features.items()}
        order = torch.cat(
            [torch.randperm(len(before), generator=generator) for _ in range(repeats)]
        )
        if column is None:
            columns: Any = slice(None)
        else:
            columns = [column]
        blocks[name][:, columns] = explained.features[name][order][:, columns]
        worth = explained.worth(explained.decided(blocks, repeats), explained.reads)
        return (before - worth.view(repeats, len(before), -1).mean((0, 2))).numpy()

    widths = {name: block.shape[1] for name, block in explained.features.items()}
    columns = [
        (name, column)
        for name, width in widths.items()
        if 1 < width <= NARROW
        for column in range(width)
    ]
    if len(columns) > TOP:
        columns.sort(key=lambda part: -lost(part[0], part[1], 1).mean())
    parts: list[tuple[str, int | None]] = [*((name, None) for name in widths), *columns[:TOP]]
    losses = [lost(name, column) for name, column in parts]
    rows = [
        {"name": name, "column": column, "lost": float(loss.mean()), "ci95": ci95}
        for (name, column), loss, ci95 in zip(parts, losses, mean_intervals(losses), strict=True)
    ]
    return sorted(rows, key=lambda row: (row["column"] is not None, -row["lost"]))


# -- in a few rules --------------------------------------------------------------------------------


def distilled(explained: Explained) -> dict[str, Any]:
    """A small decision tree over features and budget that sets the knobs much as the policy does
    (scikit-learn's CART, all knobs in one tree).

    Returns:
        `fidelity`: the share of knob values that the tree sets alike on samples that it was not
        fitted on, and its
        `ci95`; `by_budget_alone`: the same of a tree that does not see the features; `exact`: the
        share of decisions in
        which all knobs are alike. `rules`: of each leaf the conditions `when`, [feature, ≤ or >,
        value]; `then`, the
        values of the knobs; its `share` of the decisions, and the share `alike` of the knob values
        there.
    """
    from sklearn.tree import DecisionTreeClassifier

    (n, count), table = explained.chosen.shape, explained.table
    blocks = [block.repeat_interleave(count, 0) for block in explained.features.values()]
    x = torch.cat([explained.budgets_ms.float().repeat(n)[:, None], *blocks], 1).numpy()
    y = table.configurations[explained.chosen.flatten()].numpy()
    tree = DecisionTreeClassifier(**TREE)
    alike = np.zeros((2, *y.shape), bool)
    cells = np.arange(n * count).reshape(n, count)
    for fit, hold in folds_of(table, explained.rows, SEED, 3):
        seen = cells[fit].flatten()
        unseen = cells[hold].flatten()
        for side, width in enumerate((x.shape[1], 1)):
            predicted = tree.fit(x[seen, :width], y[seen]).predict(x[unseen, :width])
            alike[side, unseen] = predicted.reshape(len(unseen), -1) == y[unseen]
    names = [
        "budget",
        *(f"{k}[{i}]" for k, block in explained.features.items() for i in range(block.shape[1])),
    ]
    shares = alike.mean(2).reshape(2, n, count).mean(2)
    return {
        "fidelity": float(shares[0].mean()),
        "ci95": mean_interval(shares[0]),
        "by_budget_alone": float(shares[1].mean()),
        "exact": float(alike[0].all(1).mean()),
        "rules": _rules(tree.fit(x, y), names, table, 0, {}),
    }


def _rules(
    tree: Any, names: list[str], table: ProfileTable, node: int, when: dict[tuple[str, str], float]
) -> Rows:
    """The leaves below a node of a fitted tree, from left to right."""
    inner = tree.tree_
    if inner.children_left[node] >= 0:
        feature = names[inner.feature[node]]
        value = float(inner.threshold[node])
        # a deeper bound on the same feature is the tighter one
        below = _rules(
            tree, names, table, inner.children_left[node], {**when, (feature, "≤"): value}
        )
        return below + _rules(
            tree, names, table, inner.children_right[node], {**when, (feature, ">"): value}
        )
    shares = inner.value[node]  # of each value of each knob
    if len(shares) > 1:
        classes = tree.classes_
    else:
        classes = [tree.classes_]
    then = {
        knob.name: knob.values[int(known[share.argmax()])]
        for knob, known, share in zip(table.knobs, classes, shares, strict=True)
    }
    share = inner.n_node_samples[node] / inner.n_node_samples[0]
    alike = float(shares.max(1).mean())
    return [
        {
            "when": [[*key, v] for key, v in when.items()],
            "then": then,
            "share": float(share),
            "alike": alike,
        }
    ]


# -- single decisions ------------------------------------------------------------------------------


def best_and_worst(explained: Explained, questions: Mapping[str, str]) -> dict[str, Rows]:
    """The `best` and the `worst` decisions by the worth that they `gain` over static, at most one
    of each sample; among equal ones those of the samples that gain or lose most over all
    budgets."""
    reads = explained.reads
    table = explained.table
    ours = explained.worth(explained.chosen, reads)
    static = explained.worth(explained.static, reads & False)
    gains = (ours - static).numpy()
    lists = {}
    for name, sign in (("best", 1), ("worst", -1)):
        place = (sign * gains).argmax(1)
        at = (sign * gains).max(1)
        rows = []
        for i in (
            i for i in np.lexsort((-sign * gains.mean(1), -at))[:TOP].tolist() if at[i] > 1e-9
        ):
            row = int(explained.rows[i])
            budget = float(explained.budgets_ms[place[i]])
            sample = table.sample_ids[row]
            question = questions.get(
                sample, table.question_types[row] if table.question_types else None
            )
            result: dict[str, Any] = {
                "sample_id": sample,
                "dataset": table.dataset_names[row],
                "question": question,
            }
            result |= {"budget_ms": budget, "gain": sign * float(at[i])}
            for who, chosen in (("policy", explained.chosen), ("static", explained.static)):
                c = int(chosen[i, place[i]])
                numbers = {
                    "accuracy": float(table.accuracy[row, c]),
                    "latency_ms": float(table.latency_ms[row, c]),
                }
                result[who] = {"configuration": table.configuration(c), **numbers}
            rows.append(result)
        lists[name] = rows
    return lists
