"""Judge the demonstrations that policies choose: does a model that sees them answer rightly?

A scorer asks the model. Without a scorer a policy is judged on recorded sequences: for each query,
on the sequence of the right length that it prefers. There are few to choose from, and some of them
may have been found by looking at the answer. Such numbers compare policies, but do not show what
they would reach.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from knobwise.agents.selector.actor import BATCH, SelectorActor
from knobwise.agents.selector.baselines import (
    Kinds,
    cosine_baselines,
    cosines,
    random_places,
    selector_baselines,
    voters,
)
from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_table import BeamTable, bank_rows
from knobwise.profiling.measuring.machine import one_thread

if TYPE_CHECKING:
    from knobwise.profiling.demonstrations.scorers import Ask, Scorer

REPEATS = 30
"""Choices that are timed."""
LOWEST = torch.finfo(torch.float32).min
"""The lowest finite float32."""


class Decided(NamedTuple):
    """The demonstrations chosen for n queries by S seeds, and the correctness of the answers."""

    correct: Tensor
    """float32 [S, n], 0 or 1, NaN where unknown; S = 1 if no seed changes the policy."""
    demonstrations: Tensor | None
    """int64 [S, n, T], rows of the bank in the order shown, −1 after the end, and where nothing was
    recorded; None for `vote`, which chooses no sequence."""
    vote: Tensor | None = None
    """float32 [S, n], 1 if a majority vote of the demonstrations is right."""
    decision_us: float | None = None
    """Median time of a decision, in µs."""


def decide_selectors(
    actors: Sequence[SelectorActor], table: BeamTable, scorer: Scorer | None, rows: Tensor
) -> Decided:
    """Judge S selectors on held-out queries.

    Without a scorer they are judged on recorded sequences, with NaN where there are none.

    Args:
        actors: the selectors, each with its embeddings and the pools of the table; all choose T
            demonstrations.
        table: the queries and their pools.
        scorer: a scorer of this table; None for recorded sequences.
        rows: int64 [n], the queries.
    """
    if scorer is None:
        preferences = [actor.recorded_log_probs(table, rows) for actor in actors]
        return recorded_choices(table.select(rows), actors[0].shots, preferences)
    # greedy choices, answered by the scorer
    choices = [choose(actor, rows) for actor in actors]
    return judged_choices(table, scorer, choices, rows)


def decide_baselines(
    table: BeamTable,
    scorer: Scorer | None,
    shots: int,
    rows: Tensor,
    *,
    seeds: Sequence[int] = (0,),
    trusted: Tensor | None = None,
    kinds: Kinds | None = None,
) -> dict[str, Decided]:
    """Judge every policy that needs no training, and return the results by name.

    `vote` is the same for every number of shots. `best_recorded` and `oracle` choose among the
    recorded sequences of this length. Without a scorer there is no `vote`, no `part_similarity` and
    no `careful_rule`.

    Args:
        table: the queries and their pools.
        scorer: a scorer of this table; None for recorded sequences.
        shots: T.
        seeds: seeds of `random`; for the other policies S = 1.
        rows: int64 [n], the queries.
        trusted, kinds: see `selector_baselines`; kinds are those of all queries.
    """
    part = table.select(rows)
    if scorer is None:
        decided = _recorded_baselines(part, shots, seeds)
    else:
        if kinds is not None:
            kinds = kinds._replace(queries=kinds.queries[rows])
        drawn = [random_places(part, shots, seed) for seed in seeds]
        decided = {"random": judged_choices(table, scorer, drawn, rows)}
        for name, places in selector_baselines(part, shots, trusted, kinds).items():
            decided[name] = judged_choices(table, scorer, [places], rows)
        # the majority of the most similar demonstrations
        voted = scorer.vote(rows, bank_rows(table.pool[rows], voters(part))).float().cpu()
        decided["vote"] = Decided(voted.unsqueeze(0), None)
    # upper bounds, among recorded sequences
    if "vqa_correct" in part.fields:
        for score in ("vqa_gt_prob", "logprob_score", "beam_score"):
            if score in part.fields:
                decided["best_recorded"] = recorded_choices(part, shots, [part.fields[score]])
        decided["oracle"] = recorded_choices(part, shots, [part.fields["vqa_correct"]])
    return decided


# -- with a scorer ---------------------------------------------------------------------------------


@torch.no_grad()
def choose(actor: SelectorActor, rows: Tensor) -> Tensor:
    """Choose greedily for queries `rows`, int64 [n].

    Returns:
        Places in the queries' pools, int64 [n, T], −1 after the end.
    """
    choices = []
    for part in rows.split(BATCH):
        query, pool, mask = actor.inputs(part)
        choices.append(actor.selector.choose(query, pool, mask, actor.shots).cpu())
    return torch.cat(choices)


@torch.no_grad()
def draw(actor: SelectorActor, rows: Tensor, count: int) -> Tensor:
    """Draw `count` sequences for each of the queries `rows`, int64 [n].

    Returns:
        Places in the queries' pools, int64 [n, count, T], −1 after the end.
    """
    draws = []
    for part in rows.split(BATCH):
        draws.append(actor.distribution(part).sample_with_log_prob(count)[0].cpu())
    return torch.cat(draws)


def judged_choices(
    table: BeamTable, scorer: Ask, choices: Sequence[Tensor], rows: Tensor
) -> Decided:
    """Judge the choices of S seeds for queries `rows`, int64 [n].

    A choice is int64 [n, T], places in the queries' pools, −1 after the end.
    """
    demonstrations = [bank_rows(table.pool[rows], places) for places in choices]
    correct = [scorer(rows, chosen)["vqa_correct"].float().cpu() for chosen in demonstrations]
    return Decided(torch.stack(correct), torch.stack(demonstrations))


def selector_decision_us(actor: SelectorActor, rows: Tensor) -> float:
    """Measure the median time of a greedy choice for a single query, in µs, on one CPU thread.

    The selector's network encodes the query and its pool within this time. Their embeddings are
    looked up before.
    """
    selector = copy.deepcopy(actor.selector).cpu()
    times = []
    with one_thread():
        for i in range(REPEATS + 3):  # the first ones are slower
            row = rows[i % len(rows)].reshape(1)
            query, pool, mask = (x.cpu() for x in actor.inputs(row))
            start = time.perf_counter()
            selector.choose(query, pool, mask, actor.shots)
            times.append(time.perf_counter() - start)
    return float(torch.tensor(times[3:]).median()) * 1e6


# -- on recorded sequences -------------------------------------------------------------------------


def recorded_choices(table: BeamTable, shots: int, preferences: Sequence[Tensor]) -> Decided:
    """Return the preferred recorded sequence of T demonstrations for each query.

    In the result `correct` is NaN for queries without a sequence of this length that was recorded
    with its correctness.

    Args:
        table: the records of Q queries.
        shots: T.
        preferences: S preferences, float [Q, B] each, a value for each recorded sequence. NaN is
            the lowest, and among equals the first wins.

    Raises:
        InputError: the table has no `vqa_correct`.
    """
    if "vqa_correct" not in table.fields:
        raise InputError(
            f"beam table {table.name!r}: without vqa_correct nothing tells whether an answer was "
            "right; record it, or judge with a scorer"
        )
    correct = table.fields["vqa_correct"]
    fits = (table.lengths == shots) & ~correct.isnan()
    # preferences are finite, so that a sequence that fits ranks before all that do not
    ranked = torch.stack([*preferences]).float().nan_to_num(nan=LOWEST, neginf=LOWEST)
    best = ranked.masked_fill(~fits, -torch.inf).argmax(2)  # [S, Q]
    queries = torch.arange(table.num_queries)
    unknown = ~fits.any(1)
    right = correct[queries, best].masked_fill(unknown, torch.nan)
    places = table.sequences[queries, best, :shots].masked_fill(unknown.unsqueeze(1), -1)
    demonstrations = bank_rows(table.pool, places.transpose(0, 1)).transpose(0, 1)
    return Decided(right, demonstrations)


def _recorded_baselines(table: BeamTable, shots: int, seeds: Sequence[int]) -> dict[str, Decided]:
    """Return what `random` and the ways by cosine choose among recorded sequences, by name."""
    shape = table.beam_mask.shape
    # random preferences, one for each seed
    drawn = [torch.rand(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    decided = {"random": recorded_choices(table, shots, drawn)}
    for name in cosine_baselines(table):
        # the sum over the sequence; an end adds nothing
        cosine = cosines(table, name).gather(1, table.sequences.clamp_min(0).flatten(1))
        similarity = cosine.view(table.sequences.shape)
        preference = similarity.masked_fill(table.sequences < 0, 0.0).sum(-1)
        decided[name] = recorded_choices(table, shots, [preference])
    return decided
