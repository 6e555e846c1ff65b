"""The simple ways to choose demonstrations, which a selector has to beat. None of them looks at the
answer.

Each gives places in the queries' own pools, int64 [Q, T], the best first, −1 if a pool has fewer
candidates.
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
"""Their names in results. `vote` is `voters`, judged without a model (`Scorer.vote`)."""
COSINES = {
    "image_similarity": "image_similarity",
    "question_similarity": "text_similarity",
    "similarity": "mixed",
}
"""The ways that go by a cosine, and its name in
`knobwise.profiling.demonstrations.pools.similarity`."""
BATCH = 1024
"""Queries compared with their pools at a time."""


def simple_ways(table: BeamTable, shots: int, trusted: Tensor | None = None) -> dict[str, Tensor]:
    """The choices of every simple way but `random` that the table supports, by name: int64 [Q, T]
    each.

    `image_similarity` and `question_similarity` need these names in `table.blocks`,
    `part_similarity` parts (see `parts_of`), `careful_rule` parts and `trusted`, bool [M]: whose
    annotators are known, from elsewhere, to be careful.
    """
    ways = {way: best_places(cosines(table, way), shots) for way in ways_by_cosine(table)}
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
    """The places with the highest scores, float [*, N] → int64 [*, T]; of equals the first, −1 for
    what is at −∞."""
    ranked = scores.sort(dim=-1, descending=True, stable=True)
    places = ranked.indices.masked_fill(ranked.values == -torch.inf, -1)[..., :shots]
    return pad(places, (0, shots - places.shape[-1]), value=-1)


def ways_by_cosine(table: BeamTable) -> list[str]:
    """Those of `COSINES` that the table supports."""
    return [
        way
        for way in COSINES
        if way == "similarity" or way.removesuffix("_similarity") in table.blocks
    ]


def cosines(table: BeamTable, way: str) -> Tensor:
    """How similar the candidates of each pool are to their query: float32 [Q, N], −∞ for padding.
    The cosine of the image's or of the question's part of the embeddings; `similarity` is their
    mean, or if the parts are unknown the cosine of the whole embeddings."""
    if way == "similarity" and not {"image", "question"} <= set(table.blocks):
        blocks = {}
    else:
        blocks = table.blocks
    batches = zip(table.queries.split(BATCH), table.pool.split(BATCH), strict=True)
    return torch.cat(
        [
            similarity(queries, table.candidates, pool, blocks, COSINES[way])
            for queries, pool in batches
        ]
    )


# -- questions in parts ----------------------------------------------------------------------------


def parts_of(table: BeamTable) -> tuple[Tensor, Tensor] | None:
    """What every query asks, bool [Q, K], and what every candidate of the bank answers, bool [M,
    K].

    None unless the block `question` is all 0 and 1, and `image` is known too: one column for each
    thing wanted.
    """
    if not {"image", "question"} <= set(table.blocks):
        return None
    columns = slice(*table.blocks["question"])
    wanted = table.queries[:, columns]
    answered = table.candidates[:, columns]
    if any(((block != 0) & (block != 1)).any() for block in (wanted, answered)):
        return None
    return wanted.bool(), answered.bool()


def part_similarity(table: BeamTable, shots: int, trusted: Tensor | None = None) -> Tensor:
    """For each part of the question in turn, again and again, the demonstration of it with the most
    similar image; if no candidate answers the part any more, the one with the most similar image.
    With `trusted` (bool [M]) the most similar trusted one, and others only if none is left."""
    parts = parts_of(table)
    if parts is None:
        raise ValueError(
            f"beam table {table.name!r}: lacks blocks image and question, or question is not 0 "
            "and 1 only"
        )
    wanted, answered = parts
    # cosines are 2 apart at most: steps of 4 are never made up for
    scores = cosines(table, "image_similarity")
    bank = table.pool.clamp_min(0)
    if trusted is not None:
        scores = scores + 4.0 * trusted[bank]
    count = wanted.sum(1)
    order = wanted.int().argsort(dim=1, descending=True, stable=True)
    chosen: list[Tensor] = []
    for shot in range(shots):
        part = order.gather(1, (shot % count.clamp_min(1)).unsqueeze(1))
        fits = answered[bank, part] & (count > 0).unsqueeze(1)
        place = best_places(scores + 8.0 * fits, 1)
        chosen.append(place)
        scores = scores.scatter(1, place.clamp_min(0), -torch.inf)
    return torch.cat(chosen, 1)


def voters(table: BeamTable, each: int = 5) -> Tensor:
    """The demonstrations whose majority is `vote`: for each part asked the `each` with the most
    similar images, or if questions have no known parts, the most similar candidates: int64 [Q, V],
    −1 at the end."""
    parts = parts_of(table)
    if parts is None:
        return best_places(cosines(table, "similarity"), each)
    wanted, answered = parts
    similar = cosines(table, "image_similarity").unsqueeze(1)
    fits = wanted.unsqueeze(2) & answered[table.pool.clamp_min(0)].transpose(1, 2)
    places = best_places(similar.masked_fill(~fits, -torch.inf), each).flatten(1)
    first = (places < 0).int().argsort(dim=1, stable=True)
    width = int((places >= 0).sum(1).max())
    return places.gather(1, first)[:, : max(width, 1)]
