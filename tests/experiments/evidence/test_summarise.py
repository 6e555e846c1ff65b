"""The estimator: means, intervals and ratios of any metric of a table of decisions."""

import numpy as np
import polars as pl
import pytest

from knobwise.experiments.evidence.decisions import decision_rows
from knobwise.experiments.evidence.evaluate import evaluate
from knobwise.experiments.evidence.statistics import mean_interval
from knobwise.experiments.evidence.summarise import summarise, with_references
from knobwise.experiments.evidence.task import (
    ACCURACY,
    DEADLINE,
    FEASIBLE,
    GAP,
    ON_TIME,
    UTILITY,
    Metric,
    over,
)

BUDGETS = [10.0, 20.0]


def decisions_of(scores, **columns):
    """Return decisions whose utility is that of an array [seeds, samples, budgets] for each
    policy; a policy with one seed has none."""
    frames = []
    for policy, of_seeds in scores.items():
        samples = pl.DataFrame({"sample": [f"s{i}" for i in range(len(of_seeds[0]))]})
        for seed, utility in enumerate(of_seeds):
            known = {"utility": utility, "accuracy": utility, **columns}
            number = seed if len(of_seeds) > 1 else None
            frames.append(decision_rows(policy, number, samples, BUDGETS, known))
    return pl.concat(frames)


def by_condition(rows):
    return {(row["policy"], row["condition"]): row for row in rows}


def test_a_mean_is_over_samples_seeds_and_conditions():
    scores = np.random.default_rng(0).random((3, 50, 2)).astype(np.float32)
    rows = by_condition(summarise(decisions_of({"controller": scores}), [UTILITY]))
    assert list(rows) == [("controller", condition) for condition in (None, *BUDGETS)]
    for condition, values in {None: scores.mean(2), 10.0: scores[..., 0]}.items():
        row = rows["controller", condition]
        assert row["utility"] == pytest.approx(values.mean())
        assert row["utility_ci95"] == pytest.approx(mean_interval(values))
        assert row["utility_per_seed"] == pytest.approx(values.mean(1).tolist())
    assert "utility_per_split" not in rows["controller", None]


def test_samples_of_a_cluster_are_drawn_together():
    scores = np.repeat(np.random.default_rng(1).random((1, 10, 2)), 5, axis=1)
    table = decisions_of({"controller": scores})
    cluster = pl.col("sample").str.slice(1).cast(pl.Int64) // 5
    together = table.with_columns(cluster=cluster.cast(pl.String))
    ends = []
    for part in (table, together):
        (row,) = summarise(part, [UTILITY], conditions=False)
        ends.append(np.diff(row["utility_ci95"])[0])
    # fifty samples that are ten, five times each
    assert ends[1] / ends[0] == pytest.approx(5**0.5, rel=0.1)


def test_where_nothing_can_be_gained_nothing_was_closed():
    static = np.random.default_rng(0).random((1, 20, 2)).astype(np.float32)
    best = static.copy()
    best[0, 0] += 0.5  # in about a third of the draws the only sample with a gain is missing
    scores = {"controller": best, "knn": static, "budget_aware_static": static, "oracle": best}
    table = with_references(DEADLINE, decisions_of(scores))
    rows = by_condition(summarise(table, [GAP], conditions=False))
    for policy, share in {"controller": 1, "knn": 0}.items():
        row = rows[policy, None]
        assert row["gap_closed"] == pytest.approx(share)
        assert row["gap_closed_ci95"] == pytest.approx([share, share])


def test_an_estimated_share_is_cut_off_where_no_share_can_be():
    # doubly robust estimates of single requests, one of which weighs twice
    on_time = np.array([[1.5, 1.5], [1.0, -0.5], [1.0, -0.5]])
    feasible = [[True], [True], [False]]
    utility = np.array([[[1.2, -0.3], [1.1, -0.1], [0.9, -0.2]]])
    table = decisions_of({"controller": utility}, on_time=on_time, feasible=feasible)
    table = with_references(DEADLINE, table)
    rows = by_condition(summarise(table, [UTILITY, ACCURACY, ON_TIME, FEASIBLE]))
    at_10, at_20 = (rows["controller", budget] for budget in BUDGETS)
    assert [at_10[each.key] for each in (UTILITY, ACCURACY, ON_TIME, FEASIBLE)] == [1, 1, 1, 1]
    assert [at_20[each.key] for each in (UTILITY, ACCURACY)] == [0, 0]
    assert at_20["satisfaction"] == pytest.approx(0.5 / 3)
    for row in rows.values():
        assert 0 <= min(row["utility_ci95"]) <= max(row["utility_ci95"]) <= 1
    # the mean is of what was estimated, and cut off once
    assert rows["controller", None]["satisfaction"] == pytest.approx(4 / 6)
    assert rows["controller", None]["utility"] == pytest.approx(2.6 / 6)


# -- what too little was measured of ---------------------------------------------------------------


def measured_at(samples, counts, weight=2.0):
    """The weights of decisions [samples, budgets], of which so many were measured at each budget."""
    return np.where(np.arange(samples)[:, None] < counts, weight, 0.0)


def with_weights(policies, samples):
    """Decisions of policies, of which so many were measured at each of two budgets."""
    frames = []
    for policy, (score, counts) in policies.items():
        utility = np.full((1, samples, 2), score, np.float32)
        weight = measured_at(samples, counts)
        frames.append(decisions_of({policy: utility}, sampling_weight=weight))
    return with_references(DEADLINE, pl.concat(frames))


def test_nothing_is_said_of_decisions_of_which_too_few_were_measured():
    counts = {"controller": [0, 29], "budget_aware_static": [30, 40], "oracle": [40, 40]}
    scores = {"controller": 0.9, "budget_aware_static": 0.5, "oracle": 1.0}
    table = with_weights({name: (scores[name], counts[name]) for name in counts}, 40)
    rows = by_condition(summarise(table, [UTILITY, ACCURACY, GAP, DEADLINE.metrics[-1]]))
    for condition, fewest in {None: 0, 10.0: 0, 20.0: 29}.items():
        row = rows["controller", condition]
        assert (row["measured_decisions"], row["decisions"]) == (fewest, 40)
        for key in ("utility", "utility_ci95", "accuracy", "gap_closed", "gap_closed_ci95"):
            assert row[key] is None
        static = rows["budget_aware_static", condition]
        assert static["utility"] == pytest.approx(0.5)
    assert rows["budget_aware_static", None]["measured_decisions"] == 30


def test_what_is_compared_with_something_unknown_is_not_known():
    counts = {"controller": [40, 40], "budget_aware_static": [40, 3], "oracle": [40, 40]}
    scores = {"controller": 0.75, "budget_aware_static": 0.5, "oracle": 1.0}
    table = with_weights({name: (scores[name], counts[name]) for name in counts}, 40)
    gain = Metric("gain", value=over("utility"))
    rows = by_condition(summarise(table, [UTILITY, gain, GAP]))
    assert rows["controller", 10.0]["gain"] == pytest.approx(0.25)
    assert rows["controller", 10.0]["gap_closed"] == pytest.approx(0.5)
    for condition in (None, 20.0):
        row = rows["controller", condition]
        # its own number is known
        assert row["utility"] == pytest.approx(0.75)
        assert (row["gain"], row["gain_ci95"], row["gap_closed"]) == (None, None, None)


@pytest.mark.parametrize(("samples", "measured"), [(200, 100), (40, 30), (12, 12)])
def test_half_of_many_decisions_and_all_of_a_few_are_enough(samples, measured):
    rows = summarise(with_weights({"controller": (0.8, [measured] * 2)}, samples), [UTILITY])
    for row in rows:
        assert row["utility"] == pytest.approx(0.8)
        assert (row["measured_decisions"], row["decisions"]) == (measured, samples)


def test_a_seed_of_which_nothing_was_measured_makes_the_mean_unknown():
    frames = []
    for seed, count in enumerate([40, 0]):
        one = decisions_of(
            {"controller": np.full((1, 40, 2), 0.5)}, sampling_weight=measured_at(40, [count] * 2)
        )
        frames.append(one.with_columns(seed=pl.lit(seed, pl.Int64)))
    for row in summarise(pl.concat(frames), [UTILITY]):
        assert (row["utility"], row["utility_per_seed"]) == (None, None)
        assert row["measured_decisions"] == 0


def test_a_profile_that_was_measured_whole_has_no_counts():
    (row, *_) = summarise(decisions_of({"controller": np.ones((1, 5, 2))}), [UTILITY])
    assert "measured_decisions" not in row


# -- what somebody adds ----------------------------------------------------------------------------


def test_a_column_more_is_a_metric_more():
    """The 95 % quantile of latencies: no interval, an aggregation of the samples."""
    latency_ms = np.arange(101.0)[:, None] * [1.0, 2.0]
    table = decisions_of({"controller": np.ones((1, 101, 2))}, latency_ms=latency_ms)
    p95 = Metric("p95", "p95", unit="ms", aggregate=pl.quantile("latency_ms", 0.95, "linear"))
    rows = by_condition(summarise(table, [p95]))
    assert [row["p95"] for row in rows.values()] == [pytest.approx(142.5), 95, 190]


def test_a_metric_more_has_its_interval():
    """Regret: what the oracle has more, sample by sample."""
    scores = np.random.default_rng(0).random((2, 40, 2)).astype(np.float32)
    best = scores.max(0, keepdims=True)
    table = decisions_of({"controller": scores, "budget_aware_static": scores[:1], "oracle": best})
    regret = Metric("regret", "regret", value=pl.col("of_upper_bound") - pl.col("utility"))
    rows = by_condition(summarise(with_references(DEADLINE, table), [regret], conditions=False))
    values = (best - scores).astype(float).mean(2)
    assert rows["controller", None]["regret"] == pytest.approx(values.mean())
    assert rows["controller", None]["regret_ci95"] == pytest.approx(mean_interval(values))
    assert rows["oracle", None]["regret"] == 0


def test_a_share_of_a_gap_is_as_sure_as_the_gain_that_it_is_made_of():
    scores = np.random.default_rng(0).random((3, 40, 1)) * [[[0.2]], [[0.6]], [[1.0]]]
    static = np.full((1, 40, 1), 0.25)
    table = {"controller": scores, "budget_aware_static": static, "oracle": static + 0.5}
    gain = Metric("gain", value=over("utility"))
    rows = summarise(with_references(DEADLINE, decisions_of(table)), [gain, GAP], conditions=False)
    row = by_condition(rows)["controller", None]
    assert row["gap_closed"] == pytest.approx(row["gain"] / 0.5)
    assert row["gap_closed_ci95"] == pytest.approx([end / 0.5 for end in row["gain_ci95"]])


class Tokens:
    """An evaluator whose conditions are numbers of tokens: an answer is cut at the limit. A policy
    is the number of tokens of its answers."""

    samples = pl.DataFrame({"sample": ["a", "b", "c"]})
    conditions = [100.0, 1000.0]
    task = None

    def outcomes(self, policy, cost_ms=0.0):
        whole = np.minimum.outer(np.array([50.0, 500.0, 5000.0]) * policy, self.conditions)
        answered = whole < self.conditions
        return {"accuracy": answered, "tokens": whole}


def test_a_condition_of_another_kind_is_an_evaluator_more():
    table = evaluate(Tokens(), {"short": {None: 1.0}, "long": {0: 2.0, 1: 4.0}})
    metrics = [
        Metric("accuracy", value=pl.col("accuracy")),
        Metric("tokens", aggregate=pl.mean("tokens")),
    ]
    rows = by_condition(summarise(table, metrics))
    accuracy = {key: row["accuracy"] for key, row in rows.items()}
    assert accuracy["short", 100.0] == pytest.approx(1 / 3)
    assert accuracy["short", 1000.0] == pytest.approx(2 / 3)
    # twice as long only the shortest fits, and at the larger limit that one alone
    assert accuracy["long", None] == pytest.approx(((0 + 0) / 2 + (1 / 3 + 1 / 3) / 2) / 2)
    assert rows["short", 1000.0]["tokens"] == pytest.approx((50 + 500 + 1000) / 3)
