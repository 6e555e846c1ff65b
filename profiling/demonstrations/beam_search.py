"""Find demonstration sequences worth recording, and score them.

They are found by beam search on the information gain, `beam_score` = P(answer | sequence) −
P(answer | zero-shot), and by methods that never see the answer.

A pool holds the candidates of a query: int64 [n, N], rows of the bank, −1 padded. Each of n queries
has B sequences: int64 [n, B, T], places in the query's pool. A place is −1 after the end of a
sequence; a sequence that does not exist holds −1 alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from knobwise.envs.demonstrations.beam_table import bank_rows
from knobwise.profiling.demonstrations.pools import best_places
from knobwise.profiling.demonstrations.scorers import Ask, Fields


def beam_search(scorer: Ask, rows: Tensor, pool: Tensor, shots: int, width: int) -> Tensor:
    """Find the `width` sequences of `shots` candidates with the largest information gain.

    Every candidate is tried after every sequence of the length before, so up to n·N·(1 +
    width·(shots − 1)) sequences are scored. No sequence contains a candidate twice. Of equally good
    sequences those are kept whose candidates come first in the pool. A pool of fewer candidates
    gives shorter sequences.

    Args:
        scorer: scores sequences.
        rows: int64 [n], the queries.
        pool: int64 [n, N], their pools.
        shots: the longest length T.
        width: sequences kept at each length.

    Returns:
        int64 [n, width, T], the longest, best first.
    """
    n, size = pool.shape
    sequences = torch.full((n, width, shots), -1)
    # the search begins with one empty sequence for each query
    alive = torch.zeros(n, width, dtype=torch.bool)
    alive[:, :1] = True
    for length in range(shots):
        # [n, W, N]: which candidate may follow which sequence
        taken = (sequences[..., None] == torch.arange(size)).any(2)
        allowed = alive[..., None] & (pool >= 0)[:, None] & ~taken
        query, beam, candidate = allowed.nonzero(as_tuple=True)
        if not len(query):
            break
        longer = sequences[query, beam]
        longer[:, length] = candidate
        demonstrations = bank_rows(pool[query], longer[:, : length + 1])
        ln_p = scorer(rows[query], demonstrations)["logprob_score"]
        gain = torch.full(allowed.shape, -torch.inf)
        # ln P orders sequences as the gain does, without its rounding; P = 0 becomes finite, to
        # rank above sequences that are not allowed
        gain[query, beam, candidate] = ln_p.clamp_min(torch.finfo(torch.float32).min)
        best = gain.flatten(1).argsort(dim=1, descending=True, stable=True)[:, :width]
        alive = allowed.flatten(1).gather(1, best)
        before = sequences.gather(1, (best // size)[..., None].expand(-1, -1, shots))
        before[..., length] = best % size
        # a query whose candidates are used up keeps its sequences
        grown = before.masked_fill(~alive[..., None], -1)
        sequences = grown.where(alive.any(1)[:, None, None], sequences)
    return sequences


def retrieve_sequences(similarity: Tensor, shots: int, count: int) -> Tensor:
    """Return sequences of the most similar candidates, most similar first: int64 [n, count, T].

    `similarity` is float32 [n, N], −inf where a pool has no candidate.

    The first sequence takes ranks 1 … T, the second ranks 2 … T + 1, and so on, as far as the pool
    goes. A pool with fewer than T candidates gives one shorter sequence.
    """
    windows = best_places(similarity, shots + count).unfold(1, shots, 1)[:, :count]
    whole = windows[..., -1:] >= 0
    whole[:, :1] = True
    return windows.masked_fill(~whole, -1)


def draw_sequences(pool: Tensor, shots: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw sequences uniformly without replacement: int64 [n, count, T].

    `pool` is int64 [n, N], −1 padded. The draws use the Gumbel-top-k trick (Kool et al. 2019). If a
    query draws a sequence twice, the second is left out. A pool of fewer than T candidates gives
    shorter sequences.
    """
    noise = -torch.empty(len(pool), count, pool.shape[1]).exponential_(generator=generator).log()
    sequences = best_places(noise.masked_fill(pool[:, None] < 0, -torch.inf), shots)
    # a repetition equals an earlier one of its query
    same = (sequences[:, :, None] == sequences[:, None]).all(-1)
    return sequences.masked_fill(same.tril(-1).any(2, keepdim=True), -1)


def score(scorer: Ask, rows: Tensor, pool: Tensor, sequences: Tensor) -> Fields:
    """Score sequences, int64 [n, B, T], of the queries `rows`.

    Returns:
        Each score by its name, float32 [n, B], NaN where there is no sequence. The names are those
        of `knobwise.envs.demonstrations.beam_table.FIELDS`.
    """
    shape = sequences.shape[:2]
    query = torch.arange(len(rows)).repeat_interleave(shape[1])
    scores = scorer(rows[query], bank_rows(pool[query], sequences.flatten(0, 1)))
    zero_shot = scorer(rows, torch.full((len(rows), 1), -1))["vqa_gt_prob"]
    scores["beam_score"] = scores["vqa_gt_prob"] - zero_shot[query]
    nothing = (sequences < 0).all(2)
    return {name: x.view(shape).masked_fill(nothing, torch.nan) for name, x in scores.items()}
