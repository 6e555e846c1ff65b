"""Pools of candidates, and beam search and its companions, with a scorer small enough to be worked
out by hand."""

import itertools
import math

import pytest
import torch
from helpers import close, input_error
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.profiling.demonstrations import beam_search as search
from knobwise.profiling.demonstrations import pools
from knobwise.profiling.demonstrations.pools import draw_pools, similarity
from knobwise.profiling.demonstrations.scorers import CachedScorer
from knobwise.profiling.demonstrations.settings import SAMPLERS, PoolConfig
from knobwise.profiling.demonstrations.tasks import no_beams

NONE = -1
BLOCKS = {"image": (0, 2), "question": (2, 4)}
# cosines with the query: image 1, .8, .6, 0; question 0, .6, 1, .8 (by triangles of sides 3, 4, 5)
QUERY = torch.tensor([[2.0, 0.0, 0.0, 3.0]])
BANK = torch.tensor(
    [[1.0, 0.0, 1.0, 0.0], [8.0, 6.0, 4.0, 3.0], [3.0, 4.0, 0.0, 5.0], [0.0, 9.0, 0.3, 0.4]]
)


class HandScorer:
    """ln P(answer) = −3 + Σₜ worth[query, demonstration t] / t: order counts, and so does every
    demonstration."""

    def __init__(self, worth, calls=math.inf):
        self.worth, self.calls = torch.as_tensor(worth), calls
        self.scored = []

    def __call__(self, queries, demonstrations):
        if self.calls == 0:  # Ctrl-C after so many calls
            raise KeyboardInterrupt
        self.calls -= 1
        self.scored += map(tuple, torch.cat([queries[:, None], demonstrations], 1).tolist())
        worth = self.worth[queries[:, None], demonstrations].where(demonstrations >= 0, 0.0)
        log_prob = -3 + (worth / torch.arange(1, demonstrations.shape[1] + 1)).sum(1)
        return {
            "logprob_score": log_prob,
            "vqa_gt_prob": log_prob.exp(),
            "vqa_correct": (log_prob > -0.9).float(),
        }

    def vote(self, queries, demonstrations):
        raise AssertionError("finding beams asks for no vote")


def test_beam_search_by_hand():
    """The bank's rows 3, 2, 1, 0 are worth 2, 1, 0, −1 to the query."""
    scorer = HandScorer([[9, 9, 9, 9], [-1, 0, 1, 2]])
    rows, pool = torch.tensor([1]), torch.tensor([[3, 2, 1, 0]])
    # (0, 1) is −3 + 2 + 1/2; (0, 2) and (1, 0) are both −1: the one that begins earlier goes on
    found = search.beam_search(scorer, rows, pool, shots=2, width=2)
    assert found.tolist() == [[[0, 1], [0, 2]]]
    # four single ones, three after each of two
    assert len(scorer.scored) == len(set(scorer.scored)) == 4 + 2 * 3
    assert set(scorer.scored) >= {(1, 3), (1, 3, 2), (1, 2, 0)}


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 99),
    sizes=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    width=st.integers(1, 30),
    shots=st.integers(1, 5),
)
def test_it_never_repeats_a_candidate_and_a_wide_beam_finds_the_best(seed, sizes, width, shots):
    """Pools of 0 to 4, smaller than the beam and than the shots; many sequences are equally
    good."""
    worth = torch.randint(-4, 5, (3, 4), generator=torch.Generator().manual_seed(seed)) / 2
    pool = torch.arange(4).where(torch.arange(4) < torch.tensor(sizes)[:, None], NONE)
    found = search.beam_search(HandScorer(worth), torch.arange(3), pool, shots, width)
    for query, size in enumerate(sizes):
        gains = {
            sequence: float(sum(worth[query, p] / t for t, p in enumerate(sequence, 1)))
            for sequence in itertools.permutations(range(size), min(shots, size))
        }
        sequences = [tuple(p for p in row if p >= 0) for row in found[query].tolist()]
        mine = [gains[sequence] for sequence in sequences if sequence]
        assert len(set(sequences) - {()}) == len(mine)
        if size and width >= 24:  # nothing is ever cut off
            assert mine == pytest.approx(sorted(gains.values(), reverse=True)[:width], abs=1e-5)


def test_an_answer_that_is_impossible_after_everything_still_gives_beams():
    scorer, pool = HandScorer([[-math.inf, -math.inf]]), torch.tensor([[0, 1, NONE]])
    found = search.beam_search(scorer, torch.tensor([0]), pool, 2, 3)
    assert found.tolist() == [[[0, 1], [1, 0], [NONE] * 2]]


def test_retrieved_sequences_by_hand():
    x = -torch.inf
    alike = torch.tensor([[0.1, 0.9, 0.5, 0.7], [0.2, x, x, x], [0.3, 0.6, x, x], [x, x, x, x]])
    assert search.retrieve_sequences(alike, shots=2, count=3).tolist() == [
        [[1, 3], [3, 2], [2, 0]],
        [[0, NONE], [NONE] * 2, [NONE] * 2],
        [[1, 0], [NONE] * 2, [NONE] * 2],
        [[NONE] * 2] * 3,
    ]


def test_draws_are_uniform_without_repeats():
    pool = torch.tensor([[7, 8, NONE, 9]]).expand(4000, 4)
    sequences = search.draw_sequences(pool, 2, 1, torch.Generator().manual_seed(0))[:, 0]
    places, counts = sequences.unique(dim=0, return_counts=True)
    assert places.tolist() == [[0, 1], [0, 3], [1, 0], [1, 3], [3, 0], [3, 1]]
    close(counts / 4000, [1 / 6] * 6, 0.03)


def test_draws_from_small_pools_are_short_and_different():
    pool = torch.tensor([[4, 5, NONE], [4, NONE, NONE], [NONE] * 3])
    sequences = search.draw_sequences(pool, 2, 40, torch.Generator().manual_seed(0)).tolist()
    first, second, none = (sorted(row for row in query if row[0] >= 0) for query in sequences)
    assert (first, second, none) == ([[0, 1], [1, 0]], [[0, NONE]], [])


def test_nothing_is_scored_twice():
    hand = HandScorer([[2.0, 1.0, 0.5], [0.0, 1.0, 2.0]])
    scorer = CachedScorer(hand)
    rows, pool = torch.tensor([1, 0]), torch.tensor([[2, 1, 0], [0, 1, NONE]])
    search.score(scorer, rows, pool, torch.tensor([[[0, 1]], [[1, NONE]]]))
    # zero-shot too
    assert hand.scored == [(1, 2, 1), (0, 1, -1), (1, -1), (0, -1)]
    again = [[[0, 1, NONE], [0, 1, 2]], [[1, NONE, NONE], [NONE] * 3]]
    second = search.score(scorer, rows, pool, torch.tensor(again))
    assert hand.scored[4:] == [(1, 2, 1, 0)]
    wanted = torch.tensor([[2.5, 2.5], [1.0, torch.nan]]) - 3
    close(second["logprob_score"], wanted)
    close(second["beam_score"], wanted.exp() - math.exp(-3))
    close(second["vqa_correct"], [[1, 1], [0, torch.nan]])
    # twice in one call; what is known from elsewhere
    row, shown = torch.tensor([1, 1]), torch.tensor([[0, 1], [0, 1]])
    scorer(row, shown)
    assert hand.scored[5:] == [(1, 0, 1)]
    scorer.remember(row, shown, {"logprob_score": torch.ones(2)})
    assert scorer(row, shown)["logprob_score"].tolist() == [1, 1]
    assert len(hand.scored) == 6


def pool_of(sampler, queries, bank, size, seed=0, of_bank=False, **more):
    """The pools of a table with these embeddings."""
    names = tuple(map(str, range(len(queries))))
    fields = no_beams(len(queries)) | {"blocks": BLOCKS, "queries": queries, "candidates": bank}
    table = BeamTable("t", names, **fields | more)
    return draw_pools(table, PoolConfig(sampler, size, seed), of_bank)


@pytest.mark.parametrize(
    ("sampler", "wanted"),
    [
        ("image_similarity", [0, 1, 2]),
        ("text_similarity", [2, 3, 1]),
        ("mixed", [2, 1, 0]),
    ],  # mixed: .8, .7, .5, .4
)
def test_the_most_similar_come_first(sampler, wanted):
    assert pool_of(sampler, QUERY, BANK, 3).tolist() == [wanted]


def test_without_known_parts_the_whole_embedding_is_compared():
    wanted = torch.nn.functional.cosine_similarity(QUERY, BANK).argsort(descending=True)
    for sampler in SAMPLERS[1:]:
        assert pool_of(sampler, QUERY, BANK, 4, blocks={}).tolist() == [wanted.tolist()]


def test_the_similarity_of_a_pool():
    pool, x = torch.tensor([[3, 2, -1], [1, -1, -1]]), -torch.inf
    both = QUERY.expand(2, -1)
    for by, wanted in {
        "mixed": [[0.4, 0.8, x], [0.7, x, x]],
        "image_similarity": [[0.0, 0.6, x], [0.8, x, x]],
    }.items():
        close(similarity(both, BANK, pool, BLOCKS, by), wanted)


def test_equals_come_in_random_order():
    pool = pool_of("text_similarity", torch.ones(300, 4), torch.ones(6, 4), 3)
    close(pool.flatten().bincount(minlength=6) / 900, [1 / 6] * 6, 0.05)


@settings(max_examples=25, deadline=None)
@given(
    sampler=st.sampled_from(SAMPLERS),
    images=st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=9),
    size=st.integers(1, 10),
    seed=st.integers(0, 99),
)
def test_neither_a_query_nor_its_image_is_ever_in_its_pool(sampler, images, size, seed):
    """One bank serves as queries too."""
    count = len(images)
    items = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    known = {"query_images": tuple(images), "candidate_images": tuple(images)}
    pool = pool_of(sampler, items, items, size, seed, of_bank=True, **known)
    assert pool.shape == (count, min(size, count))
    for query, row in enumerate(pool.tolist()):
        others = {i for i, image in enumerate(images) if image == "" or image != images[query]}
        allowed = others - {query}
        real = row[: len(allowed)]
        assert row[len(allowed) :] == [-1] * (len(row) - len(real))
        assert set(real) <= allowed
        assert len(set(real)) == len(real)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_seed_decides_and_chunks_do_not_matter(sampler, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    queries, bank = torch.randn(40, 4, generator=generator), torch.randn(64, 4, generator=generator)
    first, again, other = (pool_of(sampler, queries, bank, 7, seed) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert torch.equal(first, other) == (sampler != "random")
    monkeypatch.setattr(pools, "_CELLS", 3 * 64)
    assert torch.equal(first, pool_of(sampler, queries, bank, 7, 3))


def test_a_part_that_the_embeddings_lack_is_named():
    with input_error("question"):
        pool_of("mixed", QUERY, BANK, 2, blocks={"image": (0, 2)})
