"""What became of a promise on the test samples, budget by budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.stats import beta

from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.calibration.promise import (
    PromiseRow,
    deciding,
    late,
    requests_needed,
    requests_of,
)
from knobwise.agents.deployed.controller import NumpyController
from knobwise.agents.deployed.promise import POLICY
from knobwise.agents.evaluation.own_cost import OwnCost
from knobwise.agents.evaluation.policy import (
    allowed_in_service,
    choices_of,
    inputs_of_rows,
    reads_features,
)
from knobwise.common.progress import say
from knobwise.envs.bandit.budgets import MIN_LATENCY_MS
from knobwise.experiments.evidence.evaluate import OnTable
from knobwise.experiments.evidence.schema import Interval, PromiseFacts


def promises_on_test(
    evaluator: OnTable,
    controllers: Sequence[DeployedController],
    seeds: Sequence[int],
    costs: Mapping[int | None, OwnCost],
) -> list[PromiseFacts]:
    """Return what was promised at each judged budget, and the share on time on independent test
    requests: of single configurations, then of each controller.

    They choose as in service, also what was not measured: that counts as late. A promise is
    *broken* if the upper end of the exact 95 % interval of that share is below it, even if all that
    was not measured had been on time.
    """
    rows: list[PromiseFacts] = []
    static = controllers[0].static_under_promise
    if static is not None:
        promised = controllers[0].calibration.promise_of_static
        free = [0.0] * len(evaluator.conditions)
        rows += _judged(evaluator, static.name, static, controllers[0].decider, promised, free)
    for seed, controller in zip(seeds, controllers, strict=True):
        promised = controller.calibration.promise
        cost_ms = costs[seed].charged_ms.tolist()
        decider = controller.decider
        outside = share_outside(evaluator, decider)
        for row in _judged(evaluator, "controller", decider, decider, promised, cost_ms):
            rows.append({**row, "seed": seed, "outside": outside})
    return rows


def share_outside(evaluator: OnTable, decider: NumpyController) -> float:
    """Return the share of test requests that are outside the range of training, of which nothing is
    promised, and say it; 0 for a controller without ranges."""
    if decider.low is None or decider.high is None:
        return 0.0
    features, _ = inputs_of_rows(evaluator.problem, evaluator.rows)
    outside = decider.outside(features, len(evaluator.rows)).values()
    share = float(np.mean(np.logical_or.reduce([np.zeros(len(evaluator.rows), bool), *outside])))
    judged = int((np.isfinite(decider.low) | np.isfinite(decider.high)).sum())
    say(
        f"promised where all features are in the range of training, widened by "
        f"{decider.header['margin']:.2g} of it: {judged:,} of {len(decider.low):,} numbers have "
        f"one, and {share:.1%} of the test requests are outside"
    )
    return share


def _judged(
    evaluator: OnTable,
    name: str,
    policy: Any,
    decider: NumpyController,
    promised: Sequence[PromiseRow],
    costs_ms: Sequence[float],
) -> Iterator[PromiseFacts]:
    """Yield a row for each budget that a policy was calibrated for and is judged at; the `decider`
    knows the limits on further costs."""
    # predicted times show nothing
    problem = replace(evaluator.problem, beliefs=None)
    requests = requests_of(problem, evaluator.rows)
    features, _ = inputs_of_rows(problem, requests.rows)
    mask = allowed_in_service(decider, problem, requests.rows)
    pairs = zip(promised, deciding(promised), strict=True)
    by_budget = {f"{row['budget_ms']:.6g}": (row, decides) for row, decides in pairs}
    for budget, cost_ms in zip(evaluator.conditions, costs_ms, strict=True):
        if (pair := by_budget.get(f"{budget:.6g}")) is None:
            continue
        row, decides = pair
        left = np.array([max(budget - cost_ms, MIN_LATENCY_MS)])
        chosen = choices_of(policy, features, left, mask)
        reads = torch.from_numpy(reads_features(policy, left))
        too_late = late(problem, requests, chosen, budget - cost_ms * float(reads), reads)
        hits, count = int((~too_late).sum()), len(requests.rows)
        ci95 = exact_interval(hits, count)
        accuracy = problem.values.accuracy[requests.rows, chosen[:, 0]].double()
        unmeasured = int(accuracy.isnan().sum())
        yield {
            "policy": name,
            "budget_ms": budget,
            "promise": row["promise"],
            "kept": row["kept"],
            "rule": rule_words(decides, evaluator.labels.to_list()),
            "rule_ms": budget if decides is row else decides["budget_ms"],
            "held_out": row["on_time"],
            "held_out_bound": row["bound"],
            "held_out_requests": row["requests"],
            "requests_needed": requests_needed(row["promise"]),
            "expected_accuracy": row["expected_accuracy"],
            "test": hits / max(count, 1),
            "test_ci95": ci95,
            "test_requests": count,
            "accuracy": float(accuracy.nan_to_num().mean()),
            "broken": decides["kept"]
            and exact_interval(hits + unmeasured, count)[1] < row["promise"],
        }


def exact_interval(hits: int, count: int) -> Interval:
    """Return the exact 95 % interval of a share (Clopper and Pearson 1934)."""
    low = beta.ppf(0.025, hits, count - hits + 1) if hits else 0.0
    high = beta.ppf(0.975, hits + 1, count - hits) if hits < count else 1.0
    return [float(low), float(high)]


def rule_words(row: PromiseRow, labels: Sequence[str]) -> str:
    """Say what decides at a budget."""
    if row["configuration"] != POLICY:
        return labels[row["configuration"]]
    if not row["probability"]:
        return "the policy"
    return f"the policy, among what it expects in time with {100 * row['probability']:g}%"
