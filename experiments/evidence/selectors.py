"""Let selectors decide on held-out queries, and summarise what they decided: decisions.parquet of a
run, and results.json."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import polars as pl
import torch
from torch import Tensor

from knobwise.agents.selector import evaluation
from knobwise.agents.selector.actor import SelectorActor
from knobwise.agents.selector.baselines import SIMPLE
from knobwise.agents.selector.evaluation import Decided
from knobwise.agents.training.checkpoint import Loaded
from knobwise.common.progress import progress
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.experiments.evidence.decisions import SAMPLE, Columns
from knobwise.experiments.evidence.evaluate import evaluate
from knobwise.experiments.evidence.profile_facts import profile_of
from knobwise.experiments.evidence.schema import DifferenceRow, PolicyRow, RunResults
from knobwise.experiments.evidence.summarise import summarise
from knobwise.experiments.evidence.task import (
    CONTROLS,
    DECISION,
    DEMONSTRATIONS,
    GRPO,
    LEARNED,
    TRAINED,
    UPPER,
    Metric,
)
from knobwise.experiments.settings.beams import SelectorData, hide, table_for


class Judged(NamedTuple):
    """A policy that was let decide: what it chose with one seed."""

    decided: Mapping[int, Decided]
    """By the number of shots."""
    seed: int
    """The position of the seed among those of `decided`."""


class Demonstrations:
    """The evaluator of demonstrations: policies are `Judged`.

    Args:
        test: the queries and their pools.
        rows: int64 [n], the queries that are judged.
        shots: the numbers of demonstrations.
    """

    task = DEMONSTRATIONS

    def __init__(self, test: BeamTable, rows: Tensor, shots: Sequence[int]) -> None:
        names: dict[str, Any] = {"sample": test.query_ids, "cluster": None}
        if test.query_images:
            # where the image is unknown, a query stands alone
            pairs = zip(test.query_ids, test.query_images, strict=True)
            names["cluster"] = [f"image {image}" if image else query for query, image in pairs]
        self.samples = pl.DataFrame(names)[rows.numpy()]
        self.conditions = list(map(float, shots))

    def outcomes(self, policy: Judged, cost_ms: Tensor | float = 0.0) -> Columns:
        """See `Evaluator`; NaN and null at numbers of shots of which nothing is known."""
        n = len(self.samples)
        shape = n, len(self.conditions)
        columns = {name: np.full(shape, np.nan) for name in ("accuracy", "vote", "decision_us")}
        choices = np.full(shape, None, object)
        for b, shots in enumerate(self.conditions):
            decided = policy.decided.get(int(shots))
            if decided is None:
                continue
            columns["accuracy"][:, b] = decided.correct[policy.seed]
            if decided.vote is not None:
                columns["vote"][:, b] = decided.vote[policy.seed]
            if decided.decision_us is not None:
                columns["decision_us"][:, b] = decided.decision_us
            if decided.demonstrations is not None:
                # rows of the bank, joined by blanks; null where nothing is shown
                for i, bank in enumerate(decided.demonstrations[policy.seed].tolist()):
                    choices[i, b] = " ".join(str(row) for row in bank if row >= 0) or None
        return {**columns, "choice": pl.Series(choices.ravel().tolist(), dtype=pl.String)}


def evaluate_selectors(
    data: SelectorData,
    trained: Mapping[str, Sequence[Loaded]],
    *,
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
    # a model answers what was not recorded, which may take hours
    done, steps = 0, len(judged_shots) * (baselines + len(trained))
    with progress("choosing", steps, quiet_s=2) as tick:
        for shots in judged_shots if baselines else ():
            simple = evaluation.decide_baselines(
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
            done += 1
            tick(done, f"baselines, shots={shots}")
        for name, loaded in trained.items():
            for shots, outcome in _decided(data, loaded, judged_shots, hidden[name]):
                decided[name][shots] = outcome
                done += 1
                tick(done, f"{name}, shots={shots}")
    evaluator = Demonstrations(data.test, data.test_rows, judged_shots)
    decisions = selector_decisions(evaluator, decided, seeds)
    blocks = sorted(set(itertools.chain(*hidden.values())))
    return selector_results(decisions, data, seeds, trained_shots, blocks), decisions


def _decided(
    data: SelectorData, loaded: Sequence[Loaded], judged_shots: Sequence[int], blocks: list[str]
) -> Iterator[tuple[int, Decided]]:
    """Yield each number of shots with the choices of a policy, of all seeds.

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
    for shots in judged_shots:
        # the same embeddings serve every number of shots
        for actor in actors:
            actor.shots = shots
        outcome = evaluation.decide_selectors(actors, test, scorer, data.test_rows)
        if scorer is not None:
            chosen = outcome.demonstrations
            assert chosen is not None
            votes = torch.stack([scorer.vote(data.test_rows, sequences) for sequences in chosen])
            times = evaluation.selector_decision_us(actors[0], data.test_rows)
            outcome = outcome._replace(vote=votes.float().cpu(), decision_us=times)
        yield shots, outcome


def selector_decisions(
    evaluator: Demonstrations, decided: Mapping[str, Mapping[int, Decided]], seeds: Sequence[int]
) -> pl.DataFrame:
    """Return the content of `decisions.parquet`. A policy has no rows at a number of shots where
    nothing is known about it.

    Args:
        decided: by policy and number of shots.
        seeds: of the selectors, and of `random`.
    """
    policies: dict[str, dict[int | None, Judged]] = {}
    for name, by_shots in decided.items():
        of_seeds: Sequence[int | None] = seeds
        if name in {*SIMPLE, *UPPER} - {"random"}:
            of_seeds = [None]
        # some policies have fewer seeds
        count = min(len(outcome.correct) for outcome in by_shots.values())
        policies[name] = {seed: Judged(by_shots, i) for i, seed in enumerate(of_seeds[:count])}
    known = pl.col("accuracy").is_not_null().any().over("policy", "condition")
    return evaluate(evaluator, policies).filter(known)


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
    rows, differences = demonstration_rows(decisions, "accuracy")
    votes, _ = demonstration_rows(decisions, "vote")
    results: RunResults = {
        "system": "selector",
        "profile": profile_of(data.table),
        "split": "test",
        "test_queries": decisions["sample"].n_unique(),
        "seeds": list(seeds),
        "shots": sorted({row["shots"] for row in rows}),
        "trained_shots": trained_shots,
        "judged_by": data.judged_by,
        "hidden": list(hidden),
        "rows": [row for row in rows if row["policy"] not in CONTROLS],
        "differences": differences,
        "controls": [row for row in rows if row["policy"] in CONTROLS],
    }
    if data.has_own_test:
        results["test_digest"] = data.test.digest
        results["test_candidates"] = len(data.test.candidates)
    if votes:
        results["votes"] = votes
    return results


def demonstration_rows(
    decisions: pl.DataFrame, column: str
) -> tuple[list[PolicyRow], list[DifferenceRow]]:
    """Return rows, policy by policy, and differences, at every number of shots.

    Args:
        column: of the decisions, 1 where the answer, or the vote, was right.
    """
    rows: list[dict[str, Any]] = []
    differences: list[DifferenceRow] = []
    scored = Metric("accuracy", value=pl.col(column), in_parts=True)
    metrics = [scored, DECISION] if column == "accuracy" else [scored]
    ordered = decisions.sort("condition", maintain_order=True)
    for part in ordered.partition_by("condition", maintain_order=True):
        part = known_to_all(part, column)
        shots = int(part["condition"][0]) if len(part) else 0
        for row in summarise(part, metrics, over_conditions=False):
            row |= {"shots": shots, "queries": part["sample"].n_unique()}
            del row["condition"]
            rows.append({"decision_us_p50": None, **row})
        differences += _differences(part, column, shots)
    # rows stand policy by policy
    order = decisions["policy"].unique(maintain_order=True).to_list()
    rows.sort(key=lambda row: order.index(row["policy"]))
    return cast("list[PolicyRow]", rows), differences


def known_to_all(decisions: pl.DataFrame, column: str) -> pl.DataFrame:
    """Return the decisions at one number of shots that can be compared: of the queries for which a
    column is known of every policy.

    Policies about which nothing is known are left out, and so are upper bounds that are known for
    less than half of the queries that a model has answered: few recorded sequences of this length
    must not narrow what is compared.
    """
    known = pl.col(column).is_not_null()
    part = decisions.filter(known.any().over("policy"))
    share = known.mean().over("policy")
    few = pl.col("policy").is_in(UPPER) & (share < share.max() / 2)
    part = part.filter(~few)
    return part.filter(known.all().over("sample"))


def _differences(decisions: pl.DataFrame, column: str, shots: int) -> list[DifferenceRow]:
    """Return the differences policy − against, query by query and seed by seed, of all pairs that
    are known."""
    known = decisions["policy"].unique(maintain_order=True).to_list()
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
    pairs = [pair for pair in wanted if set(pair) <= set(known)]
    frames = [_paired_with(decisions, column, policy, against) for policy, against in pairs]
    if not frames:
        return []
    gain = Metric("difference", value=pl.col(column) - pl.col("against"))
    rows: list[DifferenceRow] = []
    gains = summarise(pl.concat(frames, how="diagonal"), [gain], over_conditions=False)
    for (policy, against), row in zip(pairs, gains, strict=True):
        pair: DifferenceRow = {"policy": policy, "against": against, "shots": shots}
        rows.append(pair | {"difference": row["difference"], "ci95": row["difference_ci95"]})
    return rows


def _paired_with(decisions: pl.DataFrame, column: str, policy: str, against: str) -> pl.DataFrame:
    """Return the decisions of a policy beside the scores of another one, for the seeds that both
    have. A policy that no seed changes is compared with every seed of the other."""
    part = decisions.filter(policy=policy)
    other = decisions.filter(policy=against).select(*SAMPLE, "seed", against=column)
    keys = [*SAMPLE, "seed"]
    if part["seed"].has_nulls():
        part = part.drop("seed")
        keys = list(SAMPLE)
    elif other["seed"].has_nulls():
        other = other.drop("seed")
        keys = list(SAMPLE)
    both = part.join(other, on=keys, nulls_equal=True, maintain_order="left")
    return both.with_columns(policy=pl.lit(f"{policy} {against}"))
