"""Draw each query's pool: the candidates that its demonstrations are chosen from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.profiling.demonstrations.settings import PoolConfig

Blocks = Mapping[str, tuple[int, int]]
"""The range of columns of an embedding that describes each part: `image`, `question`, …; {} where
unknown."""
_COMPARED = {
    "text_similarity": ("question",),
    "image_similarity": ("image",),
    "mixed": ("image", "question"),
}
_CELLS = 1 << 24  # of the table queries × candidates at a time


class Kinds(NamedTuple):
    """The kinds of questions, as numbers. An unknown kind has −1 or −2, so it equals no other."""

    queries: Tensor
    """int64 [Q], −1 where unknown."""
    candidates: Tensor
    """int64 [M], −2 where unknown."""


def draw_pools(table: BeamTable, config: PoolConfig, of_bank: bool = False) -> Tensor:
    """Draw a pool for every query of a table, int64 [Q, N] rows of its bank, N = min(size, M); −1
    at the end where too few are left.

    `random` draws without replacement; the others take the most similar first, by the cosine of the
    question's part of the embedding (`text_similarity`), of the image's (`image_similarity`), or
    the mean of both cosines (`mixed`). Where the parts are unknown the whole embedding is compared.
    Equal ones (to about 1e-6) come in random order.

    Candidates that show the query's image are left out. So is the query itself where the queries
    are the items of the bank (`of_bank`). Raises InputError for a part that is compared but not
    among the table's blocks.
    """
    # a query and a candidate are compared by inner products of these parts
    sampler = config.sampler or "mixed"
    queries = table.queries
    candidates = table.candidates
    if sampler != "random":
        query_parts, candidate_parts = (
            scale_for_similarity(x, sampler, table.blocks) for x in (queries, candidates)
        )
    query_image, candidate_image = table.image_numbers
    generator = torch.Generator().manual_seed(config.seed)
    candidate_rows = torch.arange(len(candidates))
    pools = []
    for rows in torch.arange(len(queries)).split(max(1, _CELLS // len(candidates))):
        # the random key decides among equals
        key = torch.rand(len(rows), len(candidates), generator=generator)
        if sampler != "random":
            key = query_parts[rows] @ candidate_parts.T + 1e-6 * key
        # [rows, candidates]
        left_out = query_image[rows, None] == candidate_image
        if of_bank:
            left_out |= rows[:, None] == candidate_rows
        best = key.masked_fill(left_out, -torch.inf).topk(min(config.size, len(candidates)))
        pools.append(best.indices.masked_fill(best.values == -torch.inf, -1))
    return torch.cat(pools)


def similarity(
    queries: Tensor, candidates: Tensor, pool: Tensor, blocks: Blocks, by: str = "mixed"
) -> Tensor:
    """Compute the mean cosine of queries, [n, d], and the candidates of their pools, int64 [n, N]
    rows of [M, d] → float32 [n, N].

    `by` is a sampler other than `random`: which parts are compared. −inf where a pool has no
    candidate.
    """
    query_parts = scale_for_similarity(queries, by, blocks)
    candidate_parts = scale_for_similarity(candidates, by, blocks)
    return (
        (candidate_parts[pool] @ query_parts[:, :, None])
        .squeeze(2)
        .masked_fill(pool < 0, -torch.inf)
    )


def best_places(scores: Tensor, shots: int) -> Tensor:
    """Return the places with the highest scores, float [*, N] → int64 [*, T].

    Of equal scores the first place wins. A place with score −∞ becomes −1.
    """
    ranked = scores.sort(dim=-1, descending=True, stable=True)
    places = ranked.indices.masked_fill(ranked.values == -torch.inf, -1)[..., :shots]
    return pad(places, (0, shots - places.shape[-1]), value=-1)


def scale_for_similarity(embeddings: Tensor, by: str, blocks: Blocks) -> Tensor:
    """Scale and select the parts of embeddings [n, d] that are compared, [n, d'], so that inner
    products are mean cosines of the parts."""
    if not blocks:
        return normalize(embeddings, dim=1)
    if missing := [name for name in _COMPARED[by] if name not in blocks]:
        raise InputError(
            f"{by} compares {missing[0]}, but the embeddings have only {', '.join(blocks)}"
        )
    parts = [normalize(embeddings[:, slice(*blocks[name])], dim=1) for name in _COMPARED[by]]
    return torch.cat(parts, 1) / len(parts) ** 0.5
