"""Let selectors decide on held-out queries, and summarise what they decided: decisions.parquet of a
run, and results.json."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import polars as pl
import torch
from torch import Tensor

from knobwise.agents.selector import evaluation
from knobwise.agents.selector.actor import SelectorActor
from knobwise.agents.selector.baselines import SIMPLE
from knobwise.agents.selector.evaluation import Decided
from knobwise.agents.training.checkpoint import Loaded
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.experiments.evidence.decisions import array_of, decision_rows
from knobwise.experiments.evidence.schema import DifferenceRow, PolicyRow, RunResults
from knobwise.experiments.evidence.statistics import mean_intervals
from knobwise.experiments.evidence.summary import profile_of
from knobwise.experiments.evidence.task import CONTROLS, GRPO, LEARNED, TRAINED, UPPER
from knobwise.experiments.settings.beams import SelectorData, hide, table_for


def judge_selectors(
    data: SelectorData,
    trained: Mapping[str, Sequence[Loaded]],
    judged_shots: Sequence[int],
    seeds: Sequence[int],
    trained_shots: int,
    hidden: Mapping[str, list[str]],
    baselines: bool = True,
) -> tuple[RunResults, pl.DataFrame]:
    """Judge selectors on the held-out queries, beside the policies that need no training.

    Args:
        trained: by policy, the checkpoint of each of `seeds`.
        judged_shots: the numbers of demonstrations to judge at.
        trained_shots: how many demonstrations they were trained to choose.
        hidden: by policy, the blocks of the embeddings that it does not see.
        baselines: whether there are other policies.

    Returns:
        The contents of `results.json` and of `decisions.parquet`.
    """
    # policy → number of shots → its choices
    decided: dict[str, dict[int, Decided]] = defaultdict(dict)
    for shots in judged_shots if baselines else ():
        simple = evaluation.decide_simple(
            data.test,
            data.test_scorer,
            shots,
            seeds=seeds,
            rows=data.test_rows,
            trusted=data.trusted,
            kinds=data.kinds,
        )
        for name, outcome in simple.items():
            decided[name][shots] = outcome
    for name, loaded in trained.items():
        decided[name] = _decided(data, loaded, judged_shots, hidden[name])
    decisions = selector_decisions(decided, data.test, data.test_rows, seeds)
    blocks = sorted(set(itertools.chain(*hidden.values())))
    return selector_results(decisions, data, seeds, trained_shots, blocks), decisions


def _decided(
    data: SelectorData, loaded: Sequence[Loaded], judged_shots: Sequence[int], blocks: list[str]
) -> dict[int, Decided]:
    """Return the choices of a policy, of all seeds, by the number of shots.

    Args:
        loaded: the checkpoint of each seed.
        blocks: the blocks of the embeddings that are hidden from the policy.
    """
    test = hide(data.test, blocks)
    scorer = data.test_scorer
    actors = []
    for checkpoint in loaded:
        table = table_for(test, checkpoint, data.items)
        actors.append(SelectorActor(checkpoint.selector, table, judged_shots[0]))
    decided = {}
    for shots in judged_shots:
        # the same embeddings serve every number of shots
        for actor in actors:
            actor.shots = shots
        outcome = evaluation.decide_selectors(actors, test, scorer, data.test_rows)
        if scorer is not None:
            chosen = outcome.demonstrations
            assert chosen is not None
            votes = torch.stack([scorer.vote(data.test_rows, sequences) for sequences in chosen])
            times = evaluation.decision_us(actors[0], data.test_rows)
            outcome = outcome._replace(vote=votes.float().cpu(), decision_us=times)
        decided[shots] = outcome
    return decided


def selector_decisions(
    decided: Mapping[str, Mapping[int, Decided]],
    test: BeamTable,
    rows: Tensor,
    seeds: Sequence[int],
) -> pl.DataFrame:
    """Return the content of `decisions.parquet`. A policy has no rows at a number of shots where
    nothing is known about it.

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
            of_seeds: Sequence[int | None] = seeds
            if policy in {*SIMPLE, *UPPER} - {"random"}:
                of_seeds = [None]
            for i, (seed, right) in enumerate(zip(of_seeds, outcome.correct, strict=False)):
                columns: dict[str, Any] = {"decision_us": outcome.decision_us}
                columns["accuracy"] = columns["score"] = right[:, None]
                if outcome.demonstrations is not None:
                    # rows of the bank, joined by blanks; null where nothing is shown
                    choices = []
                    for bank in outcome.demonstrations[i].tolist():
                        choices.append(" ".join(str(row) for row in bank if row >= 0) or None)
                    columns["choice"] = pl.Series(choices, dtype=pl.String)
                if outcome.vote is not None:
                    columns["vote"] = outcome.vote[i, :, None]
                frames.append(decision_rows(policy, seed, samples, [shots], columns))
    return pl.concat(frames)


def selector_results(
    decisions: pl.DataFrame,
    data: SelectorData,
    seeds: Sequence[int],
    trained_shots: int,
    hidden: Sequence[str],
) -> RunResults:
    """Return the content of `results.json` of a selector: means over queries and seeds, and
    intervals over both.

    Every comparison is on the same queries: at a number of shots, a query for which something is
    unknown about some policy is left out for all. A policy about which nothing is known at a number
    of shots has no row for it, nor has an upper bound that is known for less than half of the
    queries that a model has answered.

    Args:
        decisions: of `selector_decisions`; trained policies are compared seed by seed.
        data: what the selectors were trained and judged on.
        seeds: of the selectors.
        trained_shots: how many demonstrations they were trained to choose.
        hidden: the blocks of the embeddings that the controls `hidden_…` did not see.
    """
    rows, differences = _demonstration_rows(decisions, "accuracy")
    votes, _ = _demonstration_rows(decisions, "vote")
    results: RunResults = {
        "system": "selector",
        "profile": profile_of(data.table),
        "split": "test",
        "test_queries": decisions["sample_id"].n_unique(),
        "seeds": list(seeds),
        "shots": sorted({row["shots"] for row in rows}),
        "trained_shots": trained_shots,
        "judged_by": data.judged_by,
        "hidden": list(hidden),
        "rows": [row for row in rows if row["policy"] not in CONTROLS],
        "differences": differences,
        "controls": [row for row in rows if row["policy"] in CONTROLS],
    }
    if data.test is not data.table:
        results["test_digest"] = data.test.digest
        results["test_candidates"] = len(data.test.candidates)
    if votes:
        results["votes"] = votes
    return results


def _demonstration_rows(
    decisions: pl.DataFrame, column: str
) -> tuple[list[PolicyRow], list[DifferenceRow]]:
    """Return rows, policy by policy, and differences, at every number of shots.

    Args:
        column: of the decisions, 1 where the answer, or the vote, was right.
    """
    rows: list[PolicyRow] = []
    differences: list[DifferenceRow] = []
    known = pl.col(column).is_not_null()
    ordered = decisions.sort("condition", maintain_order=True)
    for part in ordered.partition_by("condition", maintain_order=True):
        shots = int(part["condition"][0])
        # without policies about which nothing is known
        part = part.filter(known.any().over("policy"))
        # few recorded sequences of this length must not narrow what a model has answered
        share = known.mean().over("policy")
        few = pl.col("policy").is_in(UPPER) & (share < share.max() / 2)
        part = part.filter(~few)
        # without queries that are unknown to any policy left
        part = part.filter(known.all().over("sample_id"))
        policies = part["policy"].unique(maintain_order=True)
        answers = {policy: array_of(part, policy, column)[..., 0] for policy in policies}
        intervals = mean_intervals(list(answers.values()))
        for (policy, right), interval in zip(answers.items(), intervals, strict=True):
            row: PolicyRow = {
                "policy": policy,
                "shots": shots,
                "accuracy": float(right.mean()),
                "accuracy_ci95": interval,
                "queries": right.shape[1],
                "decision_us_p50": None,
            }
            if column == "accuracy":
                times = part.filter(policy=policy)["decision_us"].cast(pl.Float64)
                row["decision_us_p50"] = cast("float | None", times.mean())
            if len(right) > 1:
                row["accuracy_per_seed"] = right.mean(1).tolist()
            rows.append(row)
        differences += _differences(answers, shots)
    # rows stand policy by policy
    order = decisions["policy"].unique(maintain_order=True).to_list()
    return sorted(rows, key=lambda row: order.index(row["policy"])), differences


def _differences(known: Mapping[str, np.ndarray], shots: int) -> list[DifferenceRow]:
    """Return the differences policy − against, query by query and seed by seed, of all pairs that
    are known."""
    variants = [policy for policy in known if policy not in (*TRAINED, *SIMPLE, *UPPER)]
    wanted = [
        # what starts from RCE or SFT, and the controls that must not beat them
        *itertools.product((*GRPO, *CONTROLS[:3], *variants), ("rce", "sft")),
        ("rce", "sft"),
        *itertools.product(("hidden_rce", "hidden_live"), ("hidden_sft",)),
        # one form of post-training with another
        ("grpo_live", "grpo_rounds"),
        *itertools.product(variants[1:], variants[:1]),
        *itertools.product((*LEARNED, *variants), SIMPLE),
    ]
    # only those of which both are known
    pairs = [pair for pair in wanted if known.keys() >= set(pair)]
    gains = [_paired(known, *pair) for pair in pairs]
    rows: list[DifferenceRow] = []
    for (policy, against), gain, ci95 in zip(pairs, gains, mean_intervals(gains), strict=True):
        row: DifferenceRow = {"policy": policy, "against": against, "shots": shots}
        rows.append(row | {"difference": float(gain.mean()), "ci95": ci95})
    return rows


def _paired(known: Mapping[str, np.ndarray], policy: str, against: str) -> np.ndarray:
    """Return policy − against, [S, q], for the seeds that both have. A policy that no seed changes
    is compared with every seed of the other."""
    pair = (policy, against)
    seeds = [len(known[name]) for name in pair if len(known[name]) > 1 or name in TRAINED]
    # the seeds that both were trained with come first
    first, second = (known[name][: min(seeds, default=1)] for name in pair)
    return first - second
