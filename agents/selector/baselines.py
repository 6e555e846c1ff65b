"""The simple ways to choose demonstrations, which a selector has to beat. None of them looks at the answer.

All give places in the queries' own pools, int64 [Q, T], the best first, −1 where a pool has fewer candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.profiling.demonstrations.pools import similarity

SIMPLE = (
    "random",
    "image_similarity",
    "question_similarity",
    "similarity",
    "part_similarity",
    "careful_rule",
    "vote",
)
"""What they are called in results. `vote` is `voters`, judged without a model (`Scorer.vote`)."""
BATCH = 1024
"""Queries compared with their pools at a time."""


def simple_ways(table: BeamTable, shots: int, *, seed: int = 0, trusted: Tensor | None = None) -> dict[str, Tensor]:
    """The choice of every simple way that the table has what it takes for, by name: int64 [Q, T] each.

    `image_similarity`, `question_similarity`: `table.blocks` name these columns. `part_similarity`: see `parts_of`.
    `careful_rule`: that, and `trusted` is given.

    Args:
        table: queries and their pools; recorded beams are not looked at.
        shots: T.
        seed: of `random`.
        trusted: bool [M], the candidates whose annotators are known, from outside, to be careful.
    """
    ways = {"random": random_places(table, shots, seed)}
    if "image" in table.blocks:
        ways["image_similarity"] = best_places(image_similarity(table), shots)
    if "question" in table.blocks:
        ways["question_similarity"] = best_places(question_similarity(table), shots)
    ways["similarity"] = best_places(mixed_similarity(table), shots)
    if parts_of(table) is not None:
        ways["part_similarity"] = part_similarity(table, shots)
        if trusted is not None:
            ways["careful_rule"] = part_similarity(table, shots, trusted)
    return ways


def random_places(table: BeamTable, shots: int, seed: int = 0) -> Tensor:
    """Drawn from the pool without replacement, every candidate as likely."""
    keys = torch.rand(table.pool.shape, generator=torch.Generator().manual_seed(seed))
    return best_places(keys.masked_fill(~table.pool_mask, -torch.inf), shots)


def best_places(scores: Tensor, shots: int) -> Tensor:
    """The places with the highest scores, float [*, N] → int64 [*, T]; of equals the first, −1 for what is at −∞."""
    ranked = scores.sort(dim=-1, descending=True, stable=True)
    places = ranked.indices.masked_fill(ranked.values == -torch.inf, -1)[..., :shots]
    return pad(places, (0, shots - places.shape[-1]), value=-1)


# -- how similar the candidates of a pool are: float32 [Q, N], −∞ where there is none ----------------------------------


def image_similarity(table: BeamTable) -> Tensor:
    """Cosine of the image's part of the embeddings."""
    return _similarity(table, "image_similarity")


def question_similarity(table: BeamTable) -> Tensor:
    """Cosine of the question's part of the embeddings."""
    return _similarity(table, "text_similarity")


def mixed_similarity(table: BeamTable) -> Tensor:
    """Mean of both cosines; that of the whole embeddings where the parts are not known."""
    return _similarity(table, "mixed")


def _similarity(table: BeamTable, by: str) -> Tensor:
    blocks = {} if by == "mixed" and not {"image", "question"} <= set(table.blocks) else table.blocks
    batches = zip(table.queries.split(BATCH), table.pool.split(BATCH), strict=True)
    return torch.cat([similarity(queries, table.candidates, pool, blocks, by) for queries, pool in batches])


# -- questions in parts ------------------------------------------------------------------------------------------------


def parts_of(table: BeamTable) -> tuple[Tensor, Tensor] | None:
    """What every query asks, bool [Q, K], and what every candidate of the bank answers, bool [M, K].

    None unless the block `question` is all 0 and 1, and `image` is known too: one column for each thing asked.
    """
    if not {"image", "question"} <= set(table.blocks):
        return None
    columns = slice(*table.blocks["question"])
    asked, answered = table.queries[:, columns], table.candidates[:, columns]
    if any(((block != 0) & (block != 1)).any() for block in (asked, answered)):
        return None
    return asked.bool(), answered.bool()


def part_similarity(table: BeamTable, shots: int, trusted: Tensor | None = None) -> Tensor:
    """For each part of the question in turn, again and again, the demonstration of it with the most similar image.

    With `trusted` (bool [M]) the most similar of those, and of the others only where none is left. Where nothing
    answers the part any more, what has the most similar image.
    """
    parts = parts_of(table)
    if parts is None:
        raise ValueError(f"beam table {table.name!r}: no blocks image and question, or question is not all 0 and 1")
    asked, answered = parts
    # cosines are 2 apart at most: steps of 4 are never made up for
    scores, bank = image_similarity(table), table.pool.clamp_min(0)
    if trusted is not None:
        scores = scores + 4.0 * trusted[bank]
    count, order = asked.sum(1), asked.int().argsort(dim=1, descending=True, stable=True)
    chosen: list[Tensor] = []
    for shot in range(shots):
        part = order.gather(1, (shot % count.clamp_min(1)).unsqueeze(1))
        fits = answered[bank, part] & (count > 0).unsqueeze(1)
        place = best_places(scores + 8.0 * fits, 1)
        chosen.append(place)
        scores = scores.scatter(1, place.clamp_min(0), -torch.inf)
    return torch.cat(chosen, 1)


def voters(table: BeamTable, each: int = 5) -> Tensor:
    """The demonstrations whose majority is `vote`: for each part asked the `each` with the most similar images.

    int64 [Q, V], −1 at the end. Where questions have no known parts, the most similar altogether.
    """
    parts = parts_of(table)
    if parts is None:
        return best_places(mixed_similarity(table), each)
    asked, answered = parts
    near = image_similarity(table).unsqueeze(1)
    fits = asked.unsqueeze(2) & answered[table.pool.clamp_min(0)].transpose(1, 2)
    places = best_places(near.masked_fill(~fits, -torch.inf), each).flatten(1)
    first = (places < 0).int().argsort(dim=1, stable=True)
    width = int((places >= 0).sum(1).max())
    return places.gather(1, first)[:, : max(width, 1)]
