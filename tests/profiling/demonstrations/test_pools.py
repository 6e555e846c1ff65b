"""The four samplers of pools: what they take, what they leave out, and that chunks do not matter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.common.errors import InputError
from knobwise.profiling.demonstrations import pools
from knobwise.profiling.demonstrations.pools import draw_pools, similarity
from knobwise.profiling.demonstrations.settings import SAMPLERS

BLOCKS = {"image": (0, 2), "question": (2, 4)}
# cosines with the query: image 1, .8, .6, 0; question 0, .6, 1, .8 (by triangles of sides 3, 4, 5)
QUERY = torch.tensor([[2.0, 0.0, 0.0, 3.0]])
BANK = torch.tensor([[1.0, 0.0, 1.0, 0.0], [8.0, 6.0, 4.0, 3.0], [3.0, 4.0, 0.0, 5.0], [0.0, 9.0, 0.3, 0.4]])


@pytest.mark.parametrize(
    ("sampler", "wanted"),
    [("image_similarity", [0, 1, 2]), ("text_similarity", [2, 3, 1]), ("mixed", [2, 1, 0])],  # mixed: .8, .7, .5, .4
)
def test_the_most_similar_come_first(sampler, wanted):
    assert draw_pools(sampler, QUERY, BANK, 3, blocks=BLOCKS).tolist() == [wanted]


def test_without_known_parts_the_whole_embedding_is_compared():
    whole = torch.nn.functional.cosine_similarity(QUERY, BANK)
    for sampler in SAMPLERS[1:]:
        assert draw_pools(sampler, QUERY, BANK, 4).tolist() == [whole.argsort(descending=True).tolist()]


def test_the_similarity_of_a_pool():
    pool = torch.tensor([[3, 2, -1], [1, -1, -1]])
    both = QUERY.expand(2, -1)
    for by, wanted in (
        ("mixed", [[0.4, 0.8, -torch.inf], [0.7, -torch.inf, -torch.inf]]),
        ("image_similarity", [[0.0, 0.6, -torch.inf], [0.8, -torch.inf, -torch.inf]]),
    ):
        assert torch.allclose(similarity(both, BANK, pool, BLOCKS, by), torch.tensor(wanted))


def test_more_than_the_bank_has_gives_shorter_pools():
    pool = draw_pools("image_similarity", QUERY, BANK, 9, blocks=BLOCKS, itself=torch.tensor([1]))
    assert pool.tolist() == [[0, 2, 3, -1]]
    own = draw_pools("random", QUERY, BANK, 4, query_images=("a",), candidate_images=("a",) * 4)
    assert own.tolist() == [[-1] * 4]


def test_equals_come_in_random_order():
    queries, bank = torch.ones(300, 4), torch.ones(6, 4)
    pool = draw_pools("text_similarity", queries, bank, 3, blocks=BLOCKS)
    share = pool.flatten().bincount(minlength=6) / 900
    assert ((share - 1 / 6).abs() < 0.05).all()


def test_images_that_are_unknown_are_nobodys():
    pool = draw_pools("random", QUERY, BANK, 4, query_images=("",), candidate_images=("", "a", "", "b"))
    assert sorted(pool[0].tolist()) == [0, 1, 2, 3]


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
    pool = draw_pools(
        sampler, items, items, size, blocks=BLOCKS, query_images=images, candidate_images=images,
        itself=torch.arange(count), seed=seed,
    )  # fmt: skip
    assert pool.shape == (count, min(size, count))
    for query, row in enumerate(pool.tolist()):
        real = [i for i in row if i >= 0]
        allowed = {i for i in range(count) if i != query and not (images[i] and images[i] == images[query])}
        assert row == real + [-1] * (len(row) - len(real))
        assert len(set(real)) == len(real) == min(size, len(allowed))
        assert set(real) <= allowed


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_seed_decides_and_chunks_do_not_matter(sampler, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    queries, bank = torch.randn(40, 4, generator=generator), torch.randn(64, 4, generator=generator)
    first = draw_pools(sampler, queries, bank, 7, blocks=BLOCKS, seed=3)
    assert torch.equal(first, draw_pools(sampler, queries, bank, 7, blocks=BLOCKS, seed=3))
    assert torch.equal(first, draw_pools(sampler, queries, bank, 7, blocks=BLOCKS, seed=4)) == (sampler != "random")
    monkeypatch.setattr(pools, "_CELLS", 3 * 64)
    assert torch.equal(first, draw_pools(sampler, queries, bank, 7, blocks=BLOCKS, seed=3))


def test_mistakes():
    with pytest.raises(InputError, match="'nearest' is unknown; known are random"):
        draw_pools("nearest", QUERY, BANK, 2)
    with pytest.raises(InputError, match="at least one candidate"):
        draw_pools("random", QUERY, BANK, 0)
    with pytest.raises(InputError, match="mixed compares question, but the embeddings have only image"):
        draw_pools("mixed", QUERY, BANK, 2, blocks={"image": (0, 2)})
