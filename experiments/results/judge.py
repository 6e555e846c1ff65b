"""Let every policy of a run decide on the held-out samples: decisions.parquet, and from it results.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
import torch
from torch import Tensor

from knobwise.agents.judging.evaluation import Judged, decision_us, judge_all
from knobwise.agents.judging.policy import Baseline, Policy
from knobwise.agents.selector.baselines import SIMPLE
from knobwise.agents.selector.evaluation import Decided
from knobwise.agents.stack.priced_policy import PricedChooser
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.results.decisions import decision_rows
from knobwise.experiments.results.equal_latency import Reference
from knobwise.experiments.results.problem import DEADLINE, UPPER
from knobwise.experiments.results.summary import deadline_results, mean_results

KNOW_THE_ROWS = ("static_per_dataset", "oracle")
"""They look their choices up, which no request could; their decision times mean nothing."""


def judge_deadlines(
    table: ProfileTable,
    test: Tensor,
    budgets_ms: Tensor,
    rewards: RewardTable,
    controllers: Sequence[Policy[Tensor]],
    seeds: Sequence[int],
    baselines: Sequence[Baseline],
) -> tuple[dict[str, Any], pl.DataFrame]:
    """The contents of `results.json` and of `decisions.parquet`: controllers, one for each of `seeds`, and baselines on
    the same samples under the same deadlines.

    Args:
        test: int64 [n], samples that nothing was fitted or chosen on.
        budgets_ms: float [B].
        rewards: the reward of the column `reward`.
        baselines: `budget_aware_static` and `oracle` must be among them.
    """
    judged = judge_all(table, test, budgets_ms, rewards, controllers, baselines)
    timed = {"controller": controllers[0], **{b.name: b for b in baselines if b.name not in KNOW_THE_ROWS}}
    times = {name: decision_us(policy, table, test, budgets_ms) for name, policy in timed.items()}
    decisions = _controller_decisions(table, test, judged, seeds, times)
    return deadline_results(decisions, table, test, seeds), decisions


def judge_mean_budgets(
    table: ProfileTable,
    fitted: Tensor,
    test: Tensor,
    budgets_ms: Tensor,
    controllers: Sequence[PricedChooser],
    seeds: Sequence[int],
    baselines: Sequence[PricedChooser],
) -> tuple[dict[str, Any], pl.DataFrame]:
    """The same under mean budgets.

    Args:
        fitted: int64, the rows that static policies are chosen on.
        test: int64 [n], samples that nothing was fitted, chosen or calibrated on.
        budgets_ms: float [B].
        baselines: those that look at the request; the static ones and the oracle are added.
    """
    reference = Reference(table, fitted, test)
    judged = reference.judged(budgets_ms, controllers, baselines)
    timed = {"controller": controllers[0], **{baseline.name: baseline for baseline in baselines}}
    times = {name: decision_us(policy, table, test, budgets_ms) for name, policy in timed.items()}
    prices = {name: policy.prices.unsqueeze(0) for name, policy in timed.items()}
    prices["controller"] = torch.stack([controller.prices for controller in controllers])
    decisions = _controller_decisions(table, test, judged, seeds, times)
    return mean_results(decisions, reference, seeds, prices), decisions


def _controller_decisions(
    table: ProfileTable,
    test: Tensor,
    judged: Mapping[str, Sequence[Judged]],
    seeds: Sequence[int],
    times: Mapping[str, float],
) -> pl.DataFrame:
    """The content of `decisions.parquet`, from outcomes by policy and median decision times in µs where known."""
    datasets = [table.datasets[i] for i in test.tolist()] if table.datasets else [None] * len(test)
    ids = [table.sample_ids[i] for i in test.tolist()]
    samples = pl.DataFrame({"sample_id": ids, "dataset": datasets}, schema_overrides={"dataset": pl.String})
    # the last one stands for −1
    labels = pl.Series([*(table.label(c) for c in range(table.num_configurations)), None], dtype=pl.String)
    frames = []
    for policy, outcomes in judged.items():
        for seed, outcome in zip(seeds if policy in DEADLINE.trained else [None], outcomes, strict=True):
            columns = {
                "choice": labels[outcome.chosen.flatten().numpy()],
                "accuracy": outcome.accuracy,
                "latency_ms": outcome.latency_ms,
                "in_time": None if outcome.feasible is None else outcome.met,
                "feasible": outcome.feasible,
                "reward": outcome.reward,
                "score": outcome.utility,
                "decision_us": times.get(policy),
            }
            frames.append(decision_rows(policy, seed, samples, outcome.budgets_ms.tolist(), columns))
    return pl.concat(frames)


def selector_decisions(
    decided: Mapping[str, Mapping[int, Decided]], test: BeamTable, rows: Tensor, seeds: Sequence[int]
) -> pl.DataFrame:
    """The content of `decisions.parquet`. A policy has no rows at a number of shots where nothing is known about it.

    Args:
        decided: by policy and number of shots.
        rows: int64 [n], the judged queries of `test`.
        seeds: of the selectors, and of `random`.
    """
    samples = pl.DataFrame({"sample_id": [test.query_ids[row] for row in rows.tolist()]})
    frames = []
    for policy, by_shots in decided.items():
        for shots, outcome in by_shots.items():
            if outcome.correct.isnan().all():
                continue
            drawn = policy == "random" or policy not in (*SIMPLE, *UPPER)
            for number, seed in enumerate(seeds[: len(outcome.correct)] if drawn else [None]):
                columns = {
                    "accuracy": outcome.correct[number],
                    "score": outcome.correct[number],
                    "choice": None if outcome.demonstrations is None else _words(outcome.demonstrations[number]),
                    "vote": None if outcome.vote is None else outcome.vote[number],
                    "decision_us": outcome.decision_us,
                }
                frames.append(decision_rows(policy, seed, samples, [shots], columns))
    return pl.concat(frames)


def _words(demonstrations: Tensor) -> pl.Series:
    """Rows of the bank, int64 [n, T], −1 after the end, joined by blanks; null where nothing is shown."""
    words = [" ".join(str(row) for row in rows if row >= 0) or None for rows in demonstrations.tolist()]
    return pl.Series(words, dtype=pl.String)
