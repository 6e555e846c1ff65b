"""Judging: choices go to the scorer as rows of the query's own pool, records are looked up, unknown
stays unknown."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.agents.selector import evaluation
from knobwise.agents.selector.actor import SelectorActor
from knobwise.agents.selector.baselines import (
    Kinds,
    marginal_relevance,
    random_places,
    simple_ways,
    voters,
)
from knobwise.agents.selector.evaluation import (
    choose,
    decide_selectors,
    decide_simple,
    decision_us,
    recorded_choices,
)
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_table import BeamTable, bank_rows

QUERIES, PLACES, BANK, BEAMS = 12, 6, 30, 5
KNOWN = [q for q in range(QUERIES - 1) if q != 3]  # those with records of two demonstrations


SIMILAR = ("image_similarity", "question_similarity", "similarity")
KNOWN_ROWS = torch.tensor(KNOWN)


class Sums:
    """A scorer that anyone can follow: right where the rows of the demonstrations and of the query
    sum to a multiple of three; the vote is right where the number of voters is even."""

    def __call__(self, queries, demonstrations):
        return {"vqa_correct": ((queries + demonstrations.clamp_min(0).sum(1)) % 3 == 0).double()}

    def vote(self, queries, demonstrations):
        return ((demonstrations >= 0).sum(1) % 2 == 0).float()


def table(fields=None):
    """Pools of different length; sequences of one and two demonstrations; the last query has no
    beam."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.stack([torch.randperm(BANK, generator=generator)[:PLACES] for _ in range(QUERIES)])
    pool[3, 1:] = -1
    draws = torch.stack(
        [torch.randperm(PLACES, generator=generator)[:2] for _ in range(QUERIES * BEAMS)]
    )
    sequences = draws.view(QUERIES, BEAMS, 2)
    sequences[:, 3:, 1] = -1
    sequences[3] = -1
    sequences[3, 0, 0] = 0
    sequences[-1] = -1
    exists = sequences[..., 0] >= 0
    if fields is None:
        drawn = [torch.rand(QUERIES, BEAMS, generator=generator) for _ in range(2)]
        fields = {"beam_score": drawn[0].round(decimals=1), "vqa_correct": drawn[1].round()}
    return BeamTable(
        name="small",
        query_ids=tuple(map(str, range(QUERIES))),
        pool=pool,
        sequences=sequences,
        fields={name: field.masked_fill(~exists, torch.nan) for name, field in fields.items()},
        found_by=torch.where(exists, 0, -1),
        round=torch.zeros(QUERIES, BEAMS, dtype=torch.int64),
        queries=torch.randn(QUERIES, 4, generator=generator),
        candidates=torch.randn(BANK, 4, generator=generator),
        blocks={"image": (0, 2), "question": (2, 4)},
    )


def actor_of(data, shots=2, **settings):
    torch.manual_seed(0)
    both = data.queries, data.candidates
    made = Selector.fitted(SelectorConfig(width=8, heads=2, **settings), *both)
    return SelectorActor(made, data, shots)


# -- with a scorer ---------------------------------------------------------------------------------


def test_choices_do_not_depend_on_the_batch_and_follow_the_rows_asked_for(monkeypatch):
    data = table()
    actor = actor_of(data)
    everything = choose(actor, torch.arange(QUERIES))
    rows = torch.tensor([7, 3, 0, 11])
    monkeypatch.setattr(evaluation, "BATCH", 3)
    assert torch.equal(choose(actor, rows), everything[rows])
    whole = actor.selector.choose(*actor.inputs(torch.arange(QUERIES)), 2)
    assert torch.equal(everything, whole)
    assert everything[3].tolist() == [0, -1]  # its pool has one candidate


@pytest.mark.parametrize("shots", [1, 2, 3])
def test_a_selector_is_judged_by_what_it_chose_of_each_pool(shots):
    data, rows = table(), torch.arange(1, 9)
    actor = actor_of(data, shots)
    chosen = choose(actor, rows)
    decided = decide_selectors([actor], data, Sums(), rows)
    for row, places, right, shown in zip(
        rows.tolist(), chosen.tolist(), decided.correct[0], decided.demonstrations[0], strict=True
    ):
        of_bank = [int(data.pool[row, place]) for place in places if place >= 0]
        assert [x for x in shown.tolist() if x >= 0] == of_bank
        assert right == ((row + sum(of_bank)) % 3 == 0)


def test_simple_ways_are_judged_beside_it():
    """What was shown is said with what came of it, of the rows that were asked for."""
    data, rows = table(), torch.tensor([8, 3, 5])
    results = decide_simple(data, Sums(), 2, rows, seeds=(0, 1, 2))
    assert list(results) == ["random", *SIMILAR, "mmr", "vote", "best_recorded", "oracle"]
    assert results["random"].correct.shape == (3, 3)
    assert results["vote"].correct.tolist() == [[0.0] * 3]  # five voters, or one
    assert results["vote"].demonstrations is None
    for name in ("random", *SIMILAR, "mmr"):
        decided = results[name]
        for demonstrations, right in zip(decided.demonstrations, decided.correct, strict=True):
            assert torch.equal(Sums()(rows, demonstrations)["vqa_correct"].float(), right)
            for row, line in zip(rows, demonstrations, strict=True):
                assert {r for r in line.tolist() if r >= 0} <= set(data.pool[row].tolist())
    oracle = results["oracle"]
    assert oracle.demonstrations[0, 1].tolist() == [-1, -1]  # no sequence of two
    beams = bank_rows(data.pool[[8]], data.sequences[8:9, :3])[0].tolist()
    place = beams.index(oracle.demonstrations[0, 0].tolist())
    assert data.fields["vqa_correct"][8, place] == oracle.correct[0, 0]


def at(degrees):
    """Points on the circle."""
    angles = torch.tensor(degrees, dtype=torch.float32).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], 1)


def without_beams(queries, candidates, pool, **more):
    none = torch.full((len(queries), 0), -1)
    return BeamTable(
        name="by hand",
        query_ids=tuple(map(str, range(len(queries)))),
        pool=pool,
        sequences=none.unsqueeze(2),
        fields={},
        found_by=none,
        round=none,
        queries=queries,
        candidates=candidates,
        **more,
    )


def on_a_circle(candidates):
    """A query at 0 degrees, and its pool at these."""
    return without_beams(at([0.0]), at(candidates), torch.arange(len(candidates)).unsqueeze(0))


def test_marginal_relevance_avoids_what_was_chosen():
    """After 10 degrees, 20 degrees and −20 are as near to the query, but 20 is nearer to 10:
    .7 cos 20 − .3 cos 10 = .362 against .7 cos 20 − .3 cos 30 = .398. 90 degrees adds nothing."""
    data = on_a_circle([90.0, 20.0, -20.0, 10.0])
    assert marginal_relevance(data, 3).tolist() == [[3, 2, 1]]
    # with blocks it compares as `similarity` does, not the columns that no block names
    blocked = dataclasses.replace(
        data,
        queries=torch.cat([data.queries, data.queries, torch.ones(1, 1)], 1),
        candidates=torch.cat([data.candidates, data.candidates, 9 * torch.eye(4)[:, :1]], 1),
        blocks={"image": (0, 2), "question": (2, 4)},
    )
    assert marginal_relevance(blocked, 3).tolist() == [[3, 2, 1]]
    # a pool with too few candidates ends early
    assert marginal_relevance(on_a_circle([50.0, 10.0]), 3).tolist() == [[1, 0, -1]]


def test_the_same_kind_comes_first_and_by_similarity():
    data = on_a_circle([10.0, 80.0, 40.0, 0.0])
    kinds = Kinds(torch.tensor([1]), torch.tensor([0, 1, 1, 0]))
    ways = simple_ways(data, 3, kinds=kinds)
    assert ways["same_kind"].tolist() == [[2, 1, 3]]
    assert ways["similarity"].tolist() == [[3, 0, 2]]
    assert "same_kind" not in simple_ways(data, 3)


def test_kinds_follow_the_rows_that_are_judged():
    data = table()
    kinds = Kinds(torch.arange(QUERIES) % 2, torch.arange(BANK) % 2)
    rows = torch.tensor([8, 5])
    shown = decide_simple(data, Sums(), 1, rows, kinds=kinds)["same_kind"].demonstrations[0, :, 0]
    pools = [[row % 2 for row in data.pool[query].tolist()] for query in rows.tolist()]
    assert 0 in pools[0]
    assert 1 in pools[1]
    assert (shown % 2).tolist() == [0, 1]


def test_a_selector_with_a_strong_prior_starts_from_the_nearest():
    data = table()
    actor = actor_of(data, prior=1e4)
    policy = actor.selector
    plain = dataclasses.replace(data, blocks={})
    nearest = simple_ways(plain, 2)["similarity"]
    assert torch.equal(choose(actor, torch.arange(QUERIES)), nearest)
    # it is trained too, and stored
    dist = policy.distribution(*actor.inputs(torch.arange(QUERIES)), 2)
    dist.log_prob(dist.mode.unsqueeze(1)).sum().backward()
    assert policy.prior.grad is not None
    again = Selector.restored(policy.plain())
    assert again.prior.item() == 1e4
    assert Selector.restored(actor_of(data).selector.plain()).prior is None


def test_decision_time_is_that_of_one_choice_on_one_thread():
    actor = actor_of(table())
    threads = torch.get_num_threads()
    actor.train()
    assert 10 < decision_us(actor, torch.arange(QUERIES)) < 1e6
    assert torch.get_num_threads() == threads
    assert actor.selector.training


# -- on what was recorded --------------------------------------------------------------------------


def recorded(data, shots, preference):
    return recorded_choices(data, shots, [preference]).correct[0]


def test_the_recorded_sequence_that_is_preferred_counts():
    data = table()
    preference = torch.rand(QUERIES, BEAMS, generator=torch.Generator().manual_seed(1))
    correct = data.fields["vqa_correct"]
    for shots, columns in ((1, slice(3, 5)), (2, slice(0, 3))):
        results = recorded(data, shots, preference)
        best = preference[:, columns].argmax(1, keepdim=True) + (columns.start or 0)
        wanted = correct.gather(1, best).squeeze(1)
        assert torch.equal(results[KNOWN], wanted[KNOWN])
        assert results[-1].isnan()
    assert recorded(data, 1, preference)[3] == correct[3, 0]
    assert recorded(data, 2, preference)[3].isnan()
    assert recorded(data, 3, preference).isnan().all()


def test_the_oracle_is_right_wherever_any_record_is():
    data = table()
    results = decide_simple(data, None, 2, KNOWN_ROWS)
    right = data.fields["vqa_correct"][KNOWN, :3]
    assert torch.equal(results["oracle"].correct[0], right.amax(1))
    best = data.fields["beam_score"][KNOWN, :3].argmax(1, keepdim=True)
    assert torch.equal(results["best_recorded"].correct[0], right.gather(1, best)[:, 0])


def test_what_has_no_record_of_its_correctness_is_never_counted():
    data = table()
    data.fields["vqa_correct"][0, :2] = torch.nan
    nothing = torch.full((QUERIES, BEAMS), torch.nan)
    assert recorded(data, 2, nothing)[0] == data.fields["vqa_correct"][0, 2]
    data.fields["vqa_correct"][0, 2] = torch.nan
    assert recorded(data, 2, nothing.fill_(-torch.inf))[0].isnan()
    bare = table({"beam_score": torch.zeros(QUERIES, BEAMS)})
    with pytest.raises(InputError, match="vqa_correct"):
        recorded(bare, 2, nothing)
    assert "oracle" not in decide_simple(bare, Sums(), 2, KNOWN_ROWS)


def test_a_selector_without_a_scorer_is_given_what_it_finds_most_probable():
    data, rows = table(), torch.tensor([9, 3, 1, 11])
    actor = actor_of(data)
    results = actor.recorded_log_probs(data, rows)
    assert results.shape == (4, BEAMS)
    alone = actor.selector.distribution(*actor.inputs(rows[:1]), 2)
    each = [alone.log_prob(data.sequences[9, None, b].unsqueeze(1)) for b in range(BEAMS)]
    torch.testing.assert_close(results[0], torch.cat(each).squeeze(1))
    judged = decide_selectors([actor], data, None, rows).correct[0]
    assert judged[0] == data.fields["vqa_correct"][9, results[0, :3].argmax()]
    assert judged[[1, 3]].isnan().all()  # no sequence of two


def test_simple_ways_without_a_scorer():
    decided = decide_simple(table(), None, 2, torch.arange(QUERIES), seeds=(0, 1))
    assert list(decided) == ["random", *SIMILAR, "best_recorded", "oracle"]
    oracle = decided["oracle"].correct[0]
    known = ~oracle.isnan()
    for name, way in decided.items():
        assert way.correct.shape == (1 + (name == "random"), QUERIES)
        assert torch.equal(~way.correct.isnan(), known.expand(way.correct.shape))
        assert (way.correct[:, known] <= oracle[known]).all()


# -- simple ways to choose, by hand ----------------------------------------------------------------


BLOCKS = {"image": (0, 2), "question": (2, 4), "annotator": (4, 5)}


def image(degrees):
    return (3 * at([degrees])[0]).tolist()


# how far the image is turned from that of the query, what the demonstration answers, its annotator
ITEMS = [
    (10, "a", 1),
    (20, "b", 0),
    (0, "a", 0),
    (80, "b", 1),
    (30, "a", 1),
    (40, "b", 0),
    (60, "a", 0),
]
CANDIDATES = torch.tensor(
    [[*image(turn), answers == "a", answers == "b", who] for turn, answers, who in ITEMS]
)
# the first asks both, the second a, the third b of a short pool, the fourth has nothing to choose
# from
BY_HAND = torch.tensor([[*image(0), a, b, 0] for a, b in ((1, 1), (1, 0), (0, 1), (1, 1))])
POOL = torch.tensor(
    [[0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0], [3, 0, -1, -1, -1, -1, -1], [-1] * 7]
)


def by_hand(queries=BY_HAND, pool=POOL, blocks=BLOCKS):
    return without_beams(queries, CANDIDATES, pool, blocks=blocks)


@pytest.mark.parametrize(
    ("way", "shots", "wanted"),
    [
        ("image_similarity", 3, [[2, 0, 1], [2, 0, 1], [0, 3, -1], [-1] * 3]),
        ("question_similarity", 2, [[0, 1], [6, 4], [3, 0], [-1] * 2]),  # of equals the first
        # the mean of both cosines; b of the third query: cos 80° + 1 = 1.17 against cos 10° + 0 =
        # .98
        ("similarity", 2, [[2, 0], [2, 0], [3, 0], [-1] * 2]),
        # the parts in turn; a is answered four times, then what has the most similar image
        ("part_similarity", 4, [[2, 1, 0, 5], [2, 0, 4, 6], [3, 0, -1, -1], [-1] * 4]),
        ("part_similarity", 5, [[2, 1, 0, 5, 4], [2, 0, 4, 6, 1], [3, 0, -1, -1, -1], [-1] * 5]),
        # who is trusted among those that answer
        ("careful_rule", 4, [[0, 3, 4, 1], [0, 4, 2, 6], [3, 0, -1, -1], [-1] * 4]),
    ],
)
def test_simple_ways_by_hand(way, shots, wanted):
    places = simple_ways(by_hand(), shots, trusted=CANDIDATES[:, 4].bool())[way]
    assert bank_rows(by_hand().pool, places).tolist() == wanted


def test_ways_that_need_blocks_or_trust_are_left_out_without_them():
    assert "careful_rule" not in simple_ways(by_hand(), 2)
    mixed = simple_ways(by_hand(blocks={}), 2)
    assert set(mixed) == {"similarity", "mmr"}
    whole = torch.cosine_similarity(BY_HAND[1], CANDIDATES, dim=-1)
    assert POOL[1][mixed["similarity"][1]].tolist() == whole.topk(2).indices.tolist()
    # parts are known only where every column is a thing asked
    for other in (by_hand(blocks={}), by_hand(BY_HAND * 0.5), by_hand(blocks={"question": (2, 4)})):
        assert "part_similarity" not in simple_ways(other, 2)


def test_voters_are_the_nearest_few_of_each_part():
    rows = bank_rows(by_hand().pool, voters(by_hand(), each=3))
    assert rows.tolist() == [[2, 0, 4, 1, 5, 3], [2, 0, 4, -1, -1, -1], [3] + [-1] * 5, [-1] * 6]
    assert voters(by_hand(blocks={})).shape == (4, 5)
    # a query that asks nothing known gets similar images
    nothing = by_hand(BY_HAND * torch.tensor([1.0, 1, 0, 0, 1]))
    places = simple_ways(nothing, 3)["part_similarity"]
    assert POOL[0][places[0]].tolist() == [2, 0, 1]


@given(st.integers(1, 9), st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_every_way_takes_each_candidate_once_and_no_padding(shots, seed):
    data = by_hand()
    ways = simple_ways(data, shots, trusted=CANDIDATES[:, 4].bool())
    for places in [*ways.values(), random_places(data, shots, seed)]:
        assert places.shape == (4, shots)
        for row, size in zip(places.tolist(), data.pool_mask.sum(1).tolist(), strict=True):
            real, padding = row[: min(shots, size)], row[min(shots, size) :]
            assert len(set(real)) == len(real)
            assert all(0 <= place < size for place in real)
            assert set(padding) <= {-1}


def test_random_follows_its_seed_and_is_uniform():
    many = by_hand(BY_HAND[:1].expand(3500, -1), POOL[:1].expand(3500, -1))
    places = random_places(many, 2, seed=1)
    assert torch.equal(places, random_places(many, 2, seed=1))
    assert not torch.equal(places, random_places(many, 2, seed=2))
    counts = torch.bincount(places[:, 1], minlength=7)
    assert ((counts - 500).abs() < 5 * 500**0.5).all()
