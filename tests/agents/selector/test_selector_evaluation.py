"""Judging: choices go to the scorer as rows of the query's own pool, records are looked up, unknown
stays unknown."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers import close, input_error
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.agents.selector import evaluation
from knobwise.agents.selector.actor import SelectorActor
from knobwise.agents.selector.baselines import (
    Kinds,
    marginal_relevance,
    random_places,
    selector_baselines,
    voters,
)
from knobwise.agents.selector.evaluation import (
    choose,
    decide_baselines,
    decide_selectors,
    recorded_choices,
    selector_decision_us,
)
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.envs.demonstrations.beam_table import BeamTable, bank_rows

QUERIES, PLACES, BANK, BEAMS = 12, 6, 30, 5
ALL = torch.arange(QUERIES)
KNOWN = ALL[(ALL != 3) & (ALL < QUERIES - 1)]
"""Those with records of two demonstrations."""
SIMILAR = ("image_similarity", "question_similarity", "similarity")
BLOCKS = {"image": (0, 2), "question": (2, 4)}


class Sums:
    """A scorer that anyone can follow: right where the rows of the demonstrations and of the query
    sum to a multiple of three; the vote is right where the number of voters is even."""

    def __call__(self, queries, demonstrations):
        return {"vqa_correct": ((queries + demonstrations.clamp_min(0).sum(-1)) % 3 == 0).double()}

    def vote(self, queries, demonstrations):
        return ((demonstrations >= 0).sum(1) % 2 == 0).float()


def beams(queries, candidates, pool, blocks, sequences=None, **fields):
    """A table without recorded sequences by default."""
    if sequences is None:
        sequences = torch.full((len(queries), 0, 1), -1)
    exists = sequences[..., 0] >= 0
    return BeamTable(
        name="by hand",
        query_ids=tuple(map(str, range(len(queries)))),
        pool=pool,
        sequences=sequences,
        fields={name: field.masked_fill(~exists, torch.nan) for name, field in fields.items()},
        found_by=torch.where(exists, 0, -1),
        round=0 * exists,
        queries=queries,
        candidates=candidates,
        blocks=blocks,
    )


# pools of different length; sequences of one and two demonstrations; the last query has no beam
torch.manual_seed(0)
POOLS = torch.rand(QUERIES, BANK).argsort(1)[:, :PLACES]
POOLS[3, 1:] = -1
SEQUENCES = torch.rand(QUERIES, BEAMS, PLACES).argsort(2)[..., :2]
SEQUENCES[:, 3:, 1] = -1
SEQUENCES[[3, -1]] = -1
SEQUENCES[3, 0, 0] = 0
SCORE, CORRECT = torch.rand(2, QUERIES, BEAMS)
FIELDS = {"beam_score": SCORE.round(decimals=1), "vqa_correct": CORRECT.round()}
TABLE = beams(torch.randn(QUERIES, 4), torch.randn(BANK, 4), POOLS, BLOCKS, SEQUENCES, **FIELDS)


def actor_of(shots=2, **settings):
    config = SelectorConfig(width=8, heads=2, **settings)
    return SelectorActor(Selector.fitted(config, TABLE.queries, TABLE.candidates), TABLE, shots)


# -- with a scorer ---------------------------------------------------------------------------------


def test_choices_do_not_depend_on_the_batch_and_follow_the_rows_asked_for(monkeypatch):
    actor = actor_of()
    everything = choose(actor, ALL)
    rows = torch.tensor([7, 3, 0, 11])
    monkeypatch.setattr(evaluation, "BATCH", 3)
    assert torch.equal(choose(actor, rows), everything[rows])
    assert torch.equal(everything, actor.selector.choose(*actor.inputs(ALL), 2))
    assert everything[3].tolist() == [0, -1]  # its pool has one candidate


@pytest.mark.parametrize("shots", [1, 2, 3])
def test_a_selector_is_judged_by_what_it_chose_of_each_pool(shots):
    rows = torch.arange(1, 9)
    actor = actor_of(shots)
    chosen = choose(actor, rows)
    decided = decide_selectors([actor], TABLE, Sums(), rows)
    of_bank = TABLE.pool[rows].gather(1, chosen.clamp_min(0)).where(chosen >= 0, -1)
    assert torch.equal(decided.demonstrations, of_bank[None])
    right = (rows + of_bank.clamp_min(0).sum(1)) % 3 == 0
    assert torch.equal(decided.correct, right[None].float())


def test_simple_ways_are_judged_beside_it():
    """What was shown is said with what came of it, of the rows that were asked for."""
    rows = torch.tensor([8, 3, 5])
    results = decide_baselines(TABLE, Sums(), 2, rows, seeds=(0, 1, 2))
    assert list(results) == [
        "random",
        *SIMILAR,
        "similarity_last",
        "mmr",
        "vote",
        "best_recorded",
        "oracle",
    ]
    assert results["random"].correct.shape == (3, 3)
    assert results["vote"].correct.tolist() == [[0.0] * 3]  # five voters, or one
    assert results["vote"].demonstrations is None
    for name in ("random", *SIMILAR, "similarity_last", "mmr"):
        shown = results[name].demonstrations
        assert torch.equal(Sums()(rows, shown)["vqa_correct"].float(), results[name].correct)
        # of the queries' own pools
        assert (shown.unsqueeze(-1) == TABLE.pool[rows].unsqueeze(1)).any(-1).all()
    (shown,), (correct,) = results["oracle"].demonstrations, results["oracle"].correct
    assert shown[1].tolist() == [-1, -1]  # no sequence of two
    recorded_places = bank_rows(TABLE.pool[[8]], TABLE.sequences[8:9, :3])[0].tolist()
    place = recorded_places.index(shown[0].tolist())
    assert TABLE.fields["vqa_correct"][8, place] == correct[0]


def at(degrees):
    """Points on the circle."""
    angles = torch.tensor(degrees, dtype=torch.float32).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], 1)


def on_a_circle(candidates):
    """A query at 0 degrees, and its pool at these."""
    return beams(at([0.0]), at(candidates), torch.arange(len(candidates)).unsqueeze(0), {})


def test_marginal_relevance_avoids_what_was_chosen():
    """After 10 degrees, 20 degrees and −20 are as near to the query, but 20 is nearer to 10:
    .7 cos 20 − .3 cos 10 = .362 against .7 cos 20 − .3 cos 30 = .398. 90 degrees adds nothing."""
    data = on_a_circle([90.0, 20.0, -20.0, 10.0])
    assert marginal_relevance(data, 3).tolist() == [[3, 2, 1]]
    # with blocks it compares as `similarity` does, not the columns that no block names
    blocked = replace(
        data,
        queries=torch.cat([data.queries, data.queries, torch.ones(1, 1)], 1),
        candidates=torch.cat([data.candidates, data.candidates, 9 * torch.eye(4)[:, :1]], 1),
        blocks=BLOCKS,
    )
    assert marginal_relevance(blocked, 3).tolist() == [[3, 2, 1]]
    # a pool with too few candidates ends early
    assert marginal_relevance(on_a_circle([50.0, 10.0]), 3).tolist() == [[1, 0, -1]]


def test_the_same_kind_comes_first_and_by_similarity():
    data = on_a_circle([10.0, 80.0, 40.0, 0.0])
    kinds = Kinds(torch.tensor([1]), torch.tensor([0, 1, 1, 0]))
    ways = selector_baselines(data, 3, kinds=kinds)
    assert ways["same_kind"].tolist() == [[2, 1, 3]]
    assert ways["similarity"].tolist() == [[3, 0, 2]]
    assert ways["similarity_last"].tolist() == [[2, 0, 3]]
    # a pool with too few candidates ends early
    assert selector_baselines(on_a_circle([50.0, 10.0]), 3)["similarity_last"].tolist() == [
        [0, 1, -1]
    ]
    assert "same_kind" not in selector_baselines(data, 3)


def test_kinds_follow_the_rows_that_are_judged():
    kinds, rows = Kinds(ALL % 2, torch.arange(BANK) % 2), torch.tensor([8, 5])
    shown = decide_baselines(TABLE, Sums(), 1, rows, kinds=kinds)["same_kind"].demonstrations[
        0, :, 0
    ]
    # both pools have both kinds
    assert (TABLE.pool[rows] % 2).float().std(1).all()
    assert (shown % 2).tolist() == [0, 1]


def test_a_selector_with_a_strong_prior_starts_from_the_nearest():
    actor = actor_of(prior=1e4)
    nearest = selector_baselines(replace(TABLE, blocks={}), 2)["similarity"]
    assert torch.equal(choose(actor, ALL), nearest)
    # it is trained too, and stored
    policy, dist = actor.selector, actor.get_dist({"row": ALL})
    dist.log_prob(dist.mode.unsqueeze(1)).sum().backward()
    assert policy.prior.grad is not None
    assert Selector.restored(policy.plain()).prior.item() == 1e4
    assert Selector.restored(actor_of().selector.plain()).prior is None


def test_decision_time_is_that_of_one_choice_on_one_thread():
    actor = actor_of()
    threads = torch.get_num_threads()
    actor.train()
    assert selector_decision_us(actor, ALL) > 0
    assert torch.get_num_threads() == threads
    assert actor.selector.training


# -- on what was recorded --------------------------------------------------------------------------


def recorded(data, shots, preference):
    return recorded_choices(data, shots, [preference]).correct[0]


def test_the_recorded_sequence_that_is_preferred_counts():
    preference = torch.rand(QUERIES, BEAMS)
    correct = TABLE.fields["vqa_correct"]
    for shots, columns in ((1, slice(3, 5)), (2, slice(0, 3))):
        results = recorded(TABLE, shots, preference)
        best = preference[KNOWN, columns].argmax(1)
        assert torch.equal(results[KNOWN], correct[KNOWN, columns][range(len(KNOWN)), best])
        assert results[-1].isnan()
    assert recorded(TABLE, 1, preference)[3] == correct[3, 0]
    assert recorded(TABLE, 2, preference)[3].isnan()
    assert recorded(TABLE, 3, preference).isnan().all()


def test_what_has_no_record_of_its_correctness_is_never_counted():
    data = copy.deepcopy(TABLE)
    data.fields["vqa_correct"][0, :2] = torch.nan
    nothing = torch.full((QUERIES, BEAMS), torch.nan)
    assert recorded(data, 2, nothing)[0] == data.fields["vqa_correct"][0, 2]
    data.fields["vqa_correct"][0, 2] = torch.nan
    assert recorded(data, 2, nothing.fill_(-torch.inf))[0].isnan()
    bare = replace(data, fields={"beam_score": data.fields["beam_score"]})
    with input_error("vqa_correct"):
        recorded(bare, 2, nothing)
    assert "oracle" not in decide_baselines(bare, Sums(), 2, KNOWN)


def test_a_selector_without_a_scorer_is_given_what_it_finds_most_probable():
    rows = torch.tensor([9, 3, 1, 11])
    actor = actor_of()
    results = actor.recorded_log_probs(TABLE, rows)
    assert results.shape == (4, BEAMS)
    alone = actor.get_dist({"row": rows[:1]})
    each = [alone.log_prob(sequence[None, None]) for sequence in TABLE.sequences[9]]
    close(results[0], torch.cat(each).squeeze(1))
    judged = decide_selectors([actor], TABLE, None, rows).correct[0]
    assert judged[0] == TABLE.fields["vqa_correct"][9, results[0, :3].argmax()]
    assert judged[[1, 3]].isnan().all()  # no sequence of two


def test_simple_ways_without_a_scorer_and_the_oracle_is_right_wherever_any_record_is():
    decided = decide_baselines(TABLE, None, 2, ALL, seeds=(0, 1))
    assert list(decided) == ["random", *SIMILAR, "best_recorded", "oracle"]
    right = TABLE.fields["vqa_correct"][KNOWN, :3]
    assert torch.equal(decided["oracle"].correct[0, KNOWN], right.amax(1))
    best = TABLE.fields["beam_score"][KNOWN, :3].argmax(1)
    assert torch.equal(decided["best_recorded"].correct[0, KNOWN], right[range(len(KNOWN)), best])
    for name, way in decided.items():
        assert way.correct.shape == (1 + (name == "random"), QUERIES)
        assert way.correct[:, [3, -1]].isnan().all()  # no sequence of two
        assert (way.correct[:, KNOWN] <= right.amax(1)).all()


# -- simple ways to choose, by hand ----------------------------------------------------------------


TRUSTED = torch.tensor([1, 0, 0, 1, 1, 0, 0])
"""The annotators of the demonstrations."""
ANSWERS_A = torch.tensor([1, 0, 1, 0, 1, 0, 1])
"""The others answer b."""
TURNED = 3 * at([10, 20, 0, 80, 30, 40, 60])
"""The images, by how far they are turned from that of the query."""
CANDIDATES = torch.cat([TURNED, torch.stack([ANSWERS_A, 1 - ANSWERS_A, TRUSTED], 1)], 1)
# the first asks both, the second a, the third b of a short pool, the fourth has nothing to choose
# from
BY_HAND = torch.tensor([[3.0, 0, a, b, 0] for a, b in ((1, 1), (1, 0), (0, 1), (1, 1))])
POOL = torch.tensor(
    [[0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0], [3, 0, -1, -1, -1, -1, -1], [-1] * 7]
)


def by_hand(queries=BY_HAND, pool=POOL, blocks=BLOCKS):
    return beams(queries, CANDIDATES, pool, blocks)


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
    places = selector_baselines(by_hand(), shots, trusted=TRUSTED.bool())[way]
    assert bank_rows(by_hand().pool, places).tolist() == wanted


def test_ways_that_need_blocks_or_trust_are_left_out_without_them():
    assert "careful_rule" not in selector_baselines(by_hand(), 2)
    mixed = selector_baselines(by_hand(blocks={}), 2)
    assert set(mixed) == {"similarity", "similarity_last", "mmr"}
    whole = torch.cosine_similarity(BY_HAND[1], CANDIDATES, dim=-1)
    assert POOL[1][mixed["similarity"][1]].tolist() == whole.topk(2).indices.tolist()
    # parts are known only where every column is a thing asked
    for other in (by_hand(blocks={}), by_hand(BY_HAND * 0.5), by_hand(blocks={"question": (2, 4)})):
        assert "part_similarity" not in selector_baselines(other, 2)


def test_voters_are_the_nearest_few_of_each_part():
    rows = bank_rows(by_hand().pool, voters(by_hand(), each=3))
    assert rows.tolist() == [[2, 0, 4, 1, 5, 3], [2, 0, 4, -1, -1, -1], [3] + [-1] * 5, [-1] * 6]
    assert voters(by_hand(blocks={})).shape == (4, 5)
    # a query that asks nothing known gets similar images
    nothing = by_hand(BY_HAND * torch.tensor([1.0, 1, 0, 0, 1]))
    places = selector_baselines(nothing, 3)["part_similarity"]
    assert POOL[0][places[0]].tolist() == [2, 0, 1]


@given(st.integers(1, 9), st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_every_way_takes_each_candidate_once_and_no_padding(shots, seed):
    data = by_hand()
    ways = selector_baselines(data, shots, trusted=TRUSTED.bool())
    for places in [*ways.values(), random_places(data, shots, seed)]:
        assert places.shape == (4, shots)
        for row, size in zip(places.tolist(), (7, 7, 2, 0), strict=True):
            length = min(shots, size)
            assert len(set(row[:length]) & set(range(size))) == length
            assert row[length:] == [-1] * (shots - length)


def test_random_follows_its_seed_and_is_uniform():
    many = by_hand(BY_HAND[:1].expand(3500, -1), POOL[:1].expand(3500, -1))
    places = random_places(many, 2, seed=1)
    assert torch.equal(places, random_places(many, 2, seed=1))
    assert not torch.equal(places, random_places(many, 2, seed=2))
    counts = torch.bincount(places[:, 1], minlength=7)
    assert ((counts - 500).abs() < 5 * 500**0.5).all()
