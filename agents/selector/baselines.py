"""Simple ways to choose demonstrations, which a selector has to beat. None of them looks at the
answer.

Each returns places in the queries' own pools, int64 [Q, T], the best first unless its name says
else, −1 if a pool has fewer candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.profiling.demonstrations.pools import (
    Kinds,
    best_places,
    scale_for_similarity,
    similarity,
)

SIMPLE = (
    "random",
    "image_similarity",
    "question_similarity",
    "similarity",
    "similarity_last",
    "mmr",
    "part_similarity",
    "careful_rule",
    "vote",
)
"""The names of the simple ways in results. `vote` is `voters`, judged without a model
(`Scorer.vote`). `same_kind` is no simple way: no policy knows the kinds."""
COSINES = {
    "image_similarity": "image_similarity",
    "question_similarity": "text_similarity",
    "similarity": "mixed",
}
"""The ways that go by a cosine, with the name of that cosine in
`knobwise.profiling.demonstrations.pools.similarity`."""
RELEVANCE = 0.7
"""λ of maximal marginal relevance."""
BATCH = 1024
"""Queries compared with their pools at a time."""


def selector_baselines(
    table: BeamTable, shots: int, trusted: Tensor | None = None, kinds: Kinds | None = None
) -> dict[str, Tensor]:
    """Return the choices of every simple way that the table supports, except `random`.

    `image_similarity` needs a block `image` in `table.blocks`, `question_similarity` a block
    `question`, `part_similarity` parts (see `parts_of_questions`), `careful_rule` parts and
    `trusted`, and `same_kind` the kinds.

    Args:
        table: the queries and their pools.
        shots: T.
        trusted: bool [M], the candidates whose annotators are known to be careful; None if that is
            not known.
        kinds: of the questions of the table and of the bank; None if they are not known.

    Returns:
        Places int64 [Q, T], by the name of the way.
    """
    ways = {way: best_places(cosines(table, way), shots) for way in cosine_baselines(table)}
    # language models may be right more often where the nearest stands beside the query
    ways["similarity_last"] = in_reverse(ways["similarity"])
    ways["mmr"] = marginal_relevance(table, shots)
    if kinds is not None:
        # cosines differ by at most 2
        same = kinds.queries.unsqueeze(1) == kinds.candidates[table.pool.clamp_min(0)]
        ways["same_kind"] = best_places(cosines(table, "similarity") + 4.0 * same, shots)
    parts = parts_of_questions(table)
    if parts is not None:
        ways["part_similarity"] = part_similarity(table, parts, shots)
        if trusted is not None:
            ways["careful_rule"] = part_similarity(table, parts, shots, trusted)
    return ways


def in_reverse(places: Tensor) -> Tensor:
    """Return places [Q, T] from the last to the first, −1 at the end all the same."""
    reverse = places.flip(1)
    known_first = (reverse < 0).int().argsort(dim=1, stable=True)
    return reverse.gather(1, known_first)


def random_places(table: BeamTable, shots: int, seed: int = 0) -> Tensor:
    """Draw from each pool without replacement, every candidate with the same probability."""
    # the order of random keys is a random order
    keys = torch.rand(table.pool.shape, generator=torch.Generator().manual_seed(seed))
    return best_places(keys.masked_fill(~table.pool_mask, -torch.inf), shots)


def marginal_relevance(table: BeamTable, shots: int) -> Tensor:
    """Choose one demonstration after the other by maximal marginal relevance, λ · similarity to the
    query − (1 − λ) · highest similarity to those chosen (Carbonell & Goldstein 1998, "The Use of
    MMR"), with λ = `RELEVANCE`. The best comes first. Both similarities are that of the way
    `similarity`, see `cosines`.

    Returns:
        Places int64 [Q, T].
    """
    chosen = []
    # inner products of these are the cosines
    candidates = scale_for_similarity(table.candidates, "mixed", _both_blocks(table))
    similar = cosines(table, "similarity")
    batches = zip(table.pool.split(BATCH), similar.split(BATCH), strict=True)
    for pool, relevance in batches:
        embedded = candidates[pool.clamp_min(0)]  # [b, N, d]
        redundancy = torch.zeros_like(relevance)
        left = relevance.clone()  # −∞ once chosen
        places = []
        for _ in range(shots):
            score = RELEVANCE * left - (1 - RELEVANCE) * redundancy
            best = best_places(score, 1)
            places.append(best)
            inside = best.clamp_min(0)
            left = left.scatter(1, inside, -torch.inf)
            latest = embedded.gather(1, inside.unsqueeze(2).expand(-1, -1, embedded.shape[2]))
            to_latest = (embedded @ latest.mT).squeeze(2)
            redundancy = to_latest if len(places) == 1 else redundancy.maximum(to_latest)
        chosen.append(torch.cat(places, 1))
    return torch.cat(chosen)


def cosine_baselines(table: BeamTable) -> list[str]:
    """Return the ways of `COSINES` that the table supports."""
    known = {"similarity"} | {f"{block}_similarity" for block in table.blocks}
    return [way for way in COSINES if way in known]


def cosines(table: BeamTable, way: str) -> Tensor:
    """Return the cosine of every candidate and its query, float32 [Q, N], −∞ for padding.

    It is taken of the image's or of the question's part of the embeddings. `similarity` is the mean
    of both, or if the parts are unknown the cosine of the whole embeddings.
    """
    blocks = _both_blocks(table) if way == "similarity" else table.blocks
    batches = zip(table.queries.split(BATCH), table.pool.split(BATCH), strict=True)
    return torch.cat(
        [
            similarity(queries, table.candidates, pool, blocks, COSINES[way])
            for queries, pool in batches
        ]
    )


def _both_blocks(table: BeamTable) -> dict[str, tuple[int, int]]:
    """Return the blocks of the embeddings; {} unless there are those of image and question."""
    return table.blocks if {"image", "question"} <= set(table.blocks) else {}


# -- questions in parts ----------------------------------------------------------------------------


def parts_of_questions(table: BeamTable) -> tuple[Tensor, Tensor] | None:
    """Return the parts that every query asks and that every candidate of the bank answers.

    A part is a column of the block `question`. The result is None unless that block is all 0 and 1
    and there is a block `image` too.

    Returns:
        Parts of the queries, bool [Q, K], and of the candidates, bool [M, K]; or None.
    """
    if not _both_blocks(table):
        return None
    # what is asked, and what is answered
    columns = slice(*table.blocks["question"])
    wanted = table.queries[:, columns]
    answered = table.candidates[:, columns]
    if any(((block != 0) & (block != 1)).any() for block in (wanted, answered)):
        return None
    return wanted.bool(), answered.bool()


def part_similarity(
    table: BeamTable,
    parts: tuple[Tensor, Tensor],
    shots: int,
    trusted: Tensor | None = None,
) -> Tensor:
    """Choose for each part of the question in turn the demonstration with the most similar image.

    If no candidate is left that answers the part, the most similar image of all is chosen.

    Args:
        table: the queries and their pools.
        parts: of the queries and of the candidates, see `parts_of_questions`.
        shots: T; with more shots than parts the turns start over.
        trusted: bool [M], candidates that come before all others; None for no difference.

    Returns:
        Places int64 [Q, T].
    """
    wanted, answered = parts
    # cosines differ by at most 2: +4 for trust outweighs them, +8 for the part outweighs both
    scores = cosines(table, "image_similarity")
    bank = table.pool.clamp_min(0)
    if trusted is not None:
        scores = scores + 4.0 * trusted[bank]
    count = wanted.sum(1)
    # the parts that a query asks, before the others
    order = wanted.int().argsort(dim=1, descending=True, stable=True)
    # one shot after the other; what was chosen is out
    chosen: list[Tensor] = []
    for shot in range(shots):
        part = order.gather(1, (shot % count.clamp_min(1)).unsqueeze(1))
        fits = answered[bank, part] & (count > 0).unsqueeze(1)
        best = best_places(scores + 8.0 * fits, 1)
        chosen.append(best)
        scores = scores.scatter(1, best.clamp_min(0), -torch.inf)
    return torch.cat(chosen, 1)


def voters(table: BeamTable, each: int = 5) -> Tensor:
    """Return the demonstrations whose majority is `vote`, int64 [Q, V], −1 at the end.

    They are those with the most similar images for each part that the query asks, or if questions
    have no known parts the most similar candidates.

    Args:
        table: the queries and their pools.
        each: the number of demonstrations for each part.
    """
    parts = parts_of_questions(table)
    if parts is None:
        return best_places(cosines(table, "similarity"), each)
    wanted, answered = parts
    # for each part asked: the most similar candidates that answer it, [Q, K, N] → [Q, K · each]
    similar = cosines(table, "image_similarity").unsqueeze(1)
    fits = wanted.unsqueeze(2) & answered[table.pool.clamp_min(0)].transpose(1, 2)
    places = best_places(similar.masked_fill(~fits, -torch.inf), each).flatten(1)
    # move the −1 of parts with few candidates to the end, and cut columns of −1 alone
    order = (places < 0).int().argsort(dim=1, stable=True)
    width = int((places >= 0).sum(1).max())
    return places.gather(1, order)[:, : max(width, 1)]
