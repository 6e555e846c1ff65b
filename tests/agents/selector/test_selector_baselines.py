"""Simple ways to choose, on pools small enough to choose by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knobwise.agents.selector.baselines import (
    best_places,
    part_similarity,
    parts_of,
    random_places,
    simple_ways,
    voters,
)
from knobwise.envs.demonstrations.beam_table import BeamTable

BLOCKS = {"image": (0, 2), "question": (2, 4), "annotator": (4, 5)}


def image(degrees: float) -> list[float]:
    angle = torch.deg2rad(torch.tensor(degrees))
    return [float(angle.cos()) * 3, float(angle.sin()) * 3]


# how far the image is turned from that of the query, what the demonstration answers, its annotator
BANK = [(10, "a", 1), (20, "b", 0), (0, "a", 0), (80, "b", 1), (30, "a", 1), (40, "b", 0), (60, "a", 0)]
CANDIDATES = torch.tensor([[*image(turn), answers == "a", answers == "b", who] for turn, answers, who in BANK])
# the first asks both, the second a, the third b of a short pool, the fourth has nothing to choose from
QUERIES = torch.tensor([[*image(0), a, b, 0] for a, b in ((1, 1), (1, 0), (0, 1), (1, 1))])
POOL = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0], [3, 0, -1, -1, -1, -1, -1], [-1] * 7])


def table(queries: Tensor = QUERIES, pool: Tensor = POOL, blocks: dict[str, tuple[int, int]] = BLOCKS) -> BeamTable:
    q = len(queries)
    return BeamTable(
        name="by hand",
        query_ids=tuple(map(str, range(q))),
        pool=pool,
        sequences=torch.full((q, 0, 2), -1),
        fields={},
        found_by=torch.full((q, 0), -1),
        round=torch.zeros(q, 0, dtype=torch.int64),
        queries=queries,
        candidates=CANDIDATES,
        blocks=blocks,
    )


def chosen(way: str, shots: int, **more: Tensor) -> list[list[int]]:
    """Rows of the bank."""
    data = table()
    places = simple_ways(data, shots, **more)[way]  # type: ignore[arg-type]
    assert places.shape == (4, shots)
    return data.pool.gather(1, places.clamp_min(0)).masked_fill(places < 0, -1).tolist()


def test_image_similarity_takes_the_nearest_images() -> None:
    assert chosen("image_similarity", 3) == [[2, 0, 1], [2, 0, 1], [0, 3, -1], [-1, -1, -1]]


def test_question_similarity_goes_by_the_question_alone_and_of_equals_takes_the_first() -> None:
    assert chosen("question_similarity", 2) == [[0, 1], [6, 4], [3, 0], [-1, -1]]


def test_similarity_is_the_mean_of_both_cosines() -> None:
    # b of the third query: cos 80° + 1 = 1.17 against cos 10° + 0 = .98
    assert chosen("similarity", 2) == [[2, 0], [2, 0], [3, 0], [-1, -1]]
    mixed = simple_ways(table(blocks={}), 2)
    assert set(mixed) == {"random", "similarity"}
    whole = torch.cosine_similarity(QUERIES[1], CANDIDATES, dim=-1)
    assert POOL[1][mixed["similarity"][1]].tolist() == whole.topk(2).indices.tolist()


def test_part_similarity_serves_the_parts_in_turn() -> None:
    assert chosen("part_similarity", 4) == [[2, 1, 0, 5], [2, 0, 4, 6], [3, 0, -1, -1], [-1] * 4]
    # a is answered four times, then what has the most similar image
    assert chosen("part_similarity", 5)[1] == [2, 0, 4, 6, 1]


def test_careful_rule_prefers_who_is_trusted_among_those_that_answer() -> None:
    trusted = CANDIDATES[:, 4].bool()
    assert chosen("careful_rule", 4, trusted=trusted) == [[0, 3, 4, 1], [0, 4, 2, 6], [3, 0, -1, -1], [-1] * 4]
    assert "careful_rule" not in simple_ways(table(), 2)


def test_voters_are_the_nearest_few_of_each_part() -> None:
    data = table()
    places = voters(data, each=3)
    rows = data.pool.gather(1, places.clamp_min(0)).masked_fill(places < 0, -1)
    assert rows.tolist() == [[2, 0, 4, 1, 5, 3], [2, 0, 4, -1, -1, -1], [3] + [-1] * 5, [-1] * 6]
    assert voters(table(blocks={})).shape == (4, 5)


def test_parts_are_known_only_where_every_column_is_a_thing_asked() -> None:
    asked, answered = parts_of(table()) or pytest.fail("there are parts")
    assert asked.tolist() == [[True, True], [True, False], [False, True], [True, True]]
    assert answered[:3].tolist() == [[True, False], [False, True], [True, False]]
    for other in (table(blocks={}), table(QUERIES * 0.5), table(blocks={"question": (2, 4)})):
        assert parts_of(other) is None
        assert "part_similarity" not in simple_ways(other, 2)
        with pytest.raises(ValueError, match="no blocks"):
            part_similarity(other, 2)


def test_a_query_that_asks_nothing_known_gets_similar_images() -> None:
    nothing = table(QUERIES * torch.tensor([1.0, 1, 0, 0, 1]))
    assert POOL[0][part_similarity(nothing, 3)[0]].tolist() == [2, 0, 1]


@given(st.integers(1, 9), st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_every_way_takes_each_candidate_once_and_no_padding(shots: int, seed: int) -> None:
    data = table()
    for places in simple_ways(data, shots, seed=seed, trusted=CANDIDATES[:, 4].bool()).values():
        assert places.shape == (4, shots)
        for row, size in zip(places.tolist(), data.pool_mask.sum(1).tolist(), strict=True):
            real, padding = row[: min(shots, size)], row[min(shots, size) :]
            assert len(set(real)) == len(real)
            assert all(0 <= place < size for place in real)
            assert set(padding) <= {-1}


def test_random_follows_its_seed_and_is_uniform() -> None:
    many = dataclasses.replace(
        table(QUERIES[:1].expand(3500, -1), POOL[:1].expand(3500, -1)), query_ids=tuple(map(str, range(3500)))
    )
    places = random_places(many, 2, seed=1)
    assert torch.equal(places, random_places(many, 2, seed=1))
    assert not torch.equal(places, random_places(many, 2, seed=2))
    counts = torch.bincount(places[:, 1], minlength=7)
    assert ((counts - 500).abs() < 5 * 500**0.5).all()


def test_best_places_are_padded_where_too_few_are_left() -> None:
    scores = torch.tensor([[0.5, -torch.inf, 0.7], [-torch.inf] * 3])
    assert best_places(scores, 4).tolist() == [[2, 0, -1, -1], [-1] * 4]
