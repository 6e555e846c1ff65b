"""Find demonstration sequences worth recording, and score them.

They are found by beam search on the information gain, `beam_score` = P(answer | sequence) −
P(answer | zero-shot), and by methods that never see the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from knobwise.envs.demonstrations.settings import METHODS
from knobwise.profiling.demonstrations.scorers import Scorer

Fields = dict[str, Tensor]
"""Scores by name, float32 [n], or [n, B] of B sequences for each query."""
_AT_A_TIME = 16_384  # sequences given to the scorer


class Sequences(NamedTuple):
    """B sequences for each of n queries; rows without a sequence may be anywhere."""

    sequences: Tensor
    """int64 [n, B, T], positions in the queries' pools; −1 after the end of a sequence and where
    there is none."""
    fields: Fields
    """float32 [n, B] under names of `knobwise.envs.demonstrations.beam_table.FIELDS`; NaN where
    there is no sequence."""
    found_by: Tensor
    """int64 [n, B], index into `METHODS`; −1 where there is no sequence."""


def beam_search(
    scorer: Scorer,
    rows: Tensor,
    pool: Tensor,
    shots: int,
    width: int = 5,
    zero_shot: Tensor | None = None,
) -> Sequences:
    """Find, for every length 1 … `shots`, the `width` sequences with the largest information gain.

    Every candidate is tried after every sequence of the length before, so n·N·(1 + width·(shots −
    1)) sequences are scored. None contains a candidate twice; of equally good ones the first in the
    pool continue.

    Args:
        scorer: scores sequences.
        rows: int64 [n], the queries.
        pool: int64 [n, N], rows of the bank, −1 padded.
        shots: the longest length.
        width: sequences kept at each length.
        zero_shot: float32 [n], P(answer) without demonstrations; scored if None.

    Returns:
        B = shots·width sequences at most, shortest first and then best first; fewer where a pool
        has not as many sequences.
    """
    if zero_shot is None:
        zero_shot = probability(scorer, rows)
    step = max(1, _AT_A_TIME // (width * max(1, pool.shape[1])))
    parts = [
        _search(scorer, rows[i], pool[i], shots, width, zero_shot[i])
        for i in torch.arange(len(rows)).split(step)
    ]
    return joined(parts, dim=0)


def _search(
    scorer: Scorer, rows: Tensor, pool: Tensor, shots: int, width: int, zero_shot: Tensor
) -> Sequences:
    """Search for all of these queries at once, one length after another."""
    n, size = pool.shape
    nothing = torch.empty(n, 0, shots, dtype=torch.int64)
    lengths = [Sequences(nothing, {}, torch.empty(n, 0, dtype=torch.int64))]
    sequences = torch.empty(n, 1, 0, dtype=torch.int64)
    alive = torch.ones(n, 1, dtype=torch.bool)
    for length in range(1, shots + 1):
        count = sequences.shape[1]
        # [n, W, N]: which candidate may follow which sequence
        allowed = alive[..., None] & (pool >= 0)[:, None] & ~_taken(sequences, size)
        query, beam, candidate = allowed.nonzero(as_tuple=True)
        if not len(query):
            break
        longer = torch.cat([sequences[query, beam], candidate[:, None]], 1)
        scores = _scored(scorer, rows, pool, query, longer, zero_shot)
        gain = torch.full((n, count * size), -torch.inf)
        # ln P orders sequences as the gain does, without its rounding; a sequence with P = 0 still
        # ranks above none at all
        ln_p = scores["logprob_score"].clamp_min(torch.finfo(torch.float32).min)
        gain[query, beam * size + candidate] = ln_p
        best = gain.argsort(dim=1, descending=True, stable=True)[:, :width]
        alive = allowed.flatten(1).gather(1, best)
        before = sequences.gather(1, (best // size)[..., None].expand(-1, -1, length - 1))
        sequences = torch.cat([before, (best % size)[..., None]], 2).masked_fill(
            ~alive[..., None], -1
        )
        fields = {}
        for name, score in scores.items():
            dense = torch.full((n, count * size), torch.nan)
            dense[query, beam * size + candidate] = score
            fields[name] = dense.gather(1, best)
        found_by = torch.full(best.shape, METHODS.index("beam")).masked_fill(~alive, -1)
        lengths.append(Sequences(sequences, fields, found_by))
    return joined(lengths)


def _taken(sequences: Tensor, size: int) -> Tensor:
    """Mark the candidates that a sequence contains already: bool [n, W, N]."""
    taken = torch.zeros(*sequences.shape[:2], size + 1, dtype=torch.bool)
    return taken.scatter(2, sequences.where(sequences >= 0, size), True)[..., :size]


def retrieved(similarity: Tensor, shots: int, count: int) -> Tensor:
    """Return sequences of the most similar candidates, most similar first: int64 [n, count, T].

    `similarity` is float32 [n, N], −inf where a pool has no candidate.

    The first sequence takes ranks 1 … T, the second ranks 2 … T + 1, and so on, as far as the pool
    goes. A pool with fewer than T candidates gives one shorter sequence.
    """
    ranked = similarity.argsort(dim=1, descending=True, stable=True)
    ranked = ranked.masked_fill(similarity.gather(1, ranked) == -torch.inf, -1)
    windows = pad(ranked, (0, shots + count), value=-1).unfold(1, shots, 1)[:, :count]
    whole = windows[..., -1:] >= 0
    whole[:, :1] = True
    return windows.masked_fill(~whole, -1)


def drawn(pool: Tensor, shots: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw sequences uniformly without replacement: int64 [n, count, T].

    `pool` is int64 [n, N], −1 padded. The draws use the Gumbel-top-k trick (Kool et al. 2019). A
    repeated sequence of a query is left out;
    smaller pools give shorter ones.
    """
    noise = -torch.empty(len(pool), count, pool.shape[1]).exponential_(generator=generator).log()
    best = noise.masked_fill(pool[:, None] < 0, -torch.inf).topk(min(shots, pool.shape[1]))
    return without_repeats(best.indices.masked_fill(best.values == -torch.inf, -1))


def without_repeats(sequences: Tensor) -> Tensor:
    """Replace every sequence that repeats an earlier one of its query by −1: int64 [n, B, T]."""
    same = (sequences[:, :, None] == sequences[:, None]).all(-1)
    return sequences.masked_fill(same.tril(-1).any(2, keepdim=True), -1)


def probability(scorer: Scorer, rows: Tensor) -> Tensor:
    """Return P(answer) of the queries `rows` without demonstrations: float32 [n]."""
    return scorer(rows, torch.full((len(rows), 1), -1))["vqa_gt_prob"]


def score(
    scorer: Scorer,
    rows: Tensor,
    pool: Tensor,
    sequences: Tensor,
    found_by: str,
    zero_shot: Tensor,
    known: Sequence[Sequences] = (),
) -> Sequences:
    """Score sequences, int64 [n, B, T], each different one once.

    Those that are `known` for their query keep their scores. `rows`, `pool` and `zero_shot` are as
    for `beam_search`; `found_by` is one of METHODS.
    """
    filled = (sequences >= 0).any(2)
    method = torch.full(filled.shape, METHODS.index(found_by)).masked_fill(~filled, -1)
    new = Sequences(sequences, {}, method)
    both = joined([*known, new])
    # the different sequences of each query, and those of them that are not known
    query, beam = (both.sequences >= 0).any(2).nonzero(as_tuple=True)
    is_new = beam >= both.sequences.shape[1] - filled.shape[1]
    keys = torch.cat([query[:, None], both.sequences[query, beam]], 1)
    different, index = keys.unique(dim=0, return_inverse=True)
    missing = torch.ones(len(different), dtype=torch.bool)
    missing[index[~is_new]] = False
    scores = _scored(scorer, rows, pool, different[missing, 0], different[missing, 1:], zero_shot)
    # every score goes from the different sequences to all of them
    fields = {}
    for name in dict.fromkeys([*scores, *both.fields]):
        every = torch.full((len(different),), torch.nan)
        if name in both.fields:
            every[index[~is_new]] = both.fields[name][query[~is_new], beam[~is_new]]
        if name in scores:
            every[missing] = scores[name]
        fields[name] = torch.full(filled.shape, torch.nan)
        fields[name][filled] = every[index[is_new]]
    return new._replace(fields=fields)


def _scored(
    scorer: Scorer, rows: Tensor, pool: Tensor, query: Tensor, sequences: Tensor, zero_shot: Tensor
) -> Fields:
    """Return the scores and the gain of k sequences, int64 [k, T].

    `query`, int64 [k], indexes `rows`, `pool` and `zero_shot`.
    """
    candidates = pool[query[:, None], sequences.clamp_min(0)].masked_fill(sequences < 0, -1)
    if not len(query):
        return {}
    parts = [
        scorer(rows[query[i]], candidates[i]) for i in torch.arange(len(query)).split(_AT_A_TIME)
    ]
    scores = rows_of(parts)
    return scores | {"beam_score": scores["vqa_gt_prob"] - zero_shot[query]}


def rows_of(parts: Sequence[Mapping[str, Tensor]]) -> Fields:
    """Join tensors of further rows below one another, by name."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def joined(parts: Sequence[Sequences], dim: int = 1) -> Sequences:
    """Join sequences of the same queries side by side (dim 1), or those of further queries below
    one another (dim 0)."""
    shots = max(part.sequences.shape[2] for part in parts)
    count = max(part.sequences.shape[1] for part in parts)
    names: Fields = {}
    for part in parts:
        names |= part.fields
    sequences = []
    found_by = []
    fields: dict[str, list[Tensor]] = {name: [] for name in names}
    for part in parts:
        # rows that the part lacks to stand above another
        more = 0 if dim else count - part.sequences.shape[1]
        longer = shots - part.sequences.shape[2]
        sequences.append(pad(part.sequences, (0, longer, 0, more), value=-1))
        found_by.append(pad(part.found_by, (0, more), value=-1))
        nothing = torch.full(part.found_by.shape, torch.nan)
        for name in names:
            fields[name].append(pad(part.fields.get(name, nothing), (0, more), value=torch.nan))
    columns = {name: torch.cat(field, dim) for name, field in fields.items()}
    return Sequences(torch.cat(sequences, dim), columns, torch.cat(found_by, dim))
