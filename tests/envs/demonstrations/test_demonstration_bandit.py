"""The selector's bandit: groups of recorded sequences, rewards looked up and scored, contexts in
passes."""

from dataclasses import replace
from functools import partial
from itertools import permutations, takewhile

import pytest
import torch
from helpers import close, five_beams, identical, input_error, small_table
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.collectors import Collector
from torchrl.envs import (
    CatTensors,
    Compose,
    ExcludeTransform,
    ParallelEnv,
    SerialEnv,
    TransformedEnv,
    check_env_specs,
)

from knobwise.envs import ConfigBandit, DemonstrationBandit, DemonstrationRewardConfig, GroupConfig
from knobwise.envs.demonstrations.beam_table import bank_rows
from knobwise.envs.demonstrations.passes import Passes
from knobwise.envs.demonstrations.settings import FIELDS, MODES
from knobwise.envs.demonstrations.torchrl_env import recorded_groups

X = -1
ROW = torch.tensor([0])
replayed_or_live = pytest.mark.parametrize("live", [False, True])
SEQUENCES = five_beams().sequences


class CountingScorer:
    """P(true answer) from the rows alone, order included; remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, queries, demonstrations):
        self.asked += map(tuple, torch.cat([queries[:, None], demonstrations], 1).tolist())
        scale = torch.tensor([1.0, 3.0, 7.0])[: demonstrations.shape[1]]
        probability = torch.sigmoid(((demonstrations + 1) * scale).sum(1).sin() + queries)
        return dict.fromkeys(FIELDS[1:], probability) | {"vqa_correct": (probability > 0.7).float()}


def bandit(live=False, **words):
    """Scored, or by default replaying whole groups."""
    words = {"scorer": CountingScorer()} | words if live else words | {"group_size": "all"}
    return DemonstrationBandit(five_beams(), **words)


def bandit_of(kind, **words):
    """Each of the three TorchRL bandits: of configurations, and of recorded and scored
    demonstrations."""
    if kind == "configurations":
        return ConfigBandit(small_table(holes=0.3), full_information=True, **words)
    return bandit(
        kind == "scored",
        reward=DemonstrationRewardConfig("hard_plus_soft_v2", shuffled=True),
        **words,
    )


@pytest.mark.parametrize("mode", MODES)
@replayed_or_live
@pytest.mark.parametrize("control", [False, True])
def test_specs_hold_and_rewards_are_finite_in_every_mode(mode, live, control):
    reward = DemonstrationRewardConfig(mode, shuffled=control)
    check_env_specs(env := bandit(live, batch_size=4, group_size=3, reward=reward), seed=0)
    out = env.rollout(5, break_when_any_done=False)
    following = out["next"]
    assert following["reward"].isfinite().all()
    empty = out["row"] == 2  # no candidate
    assert empty.any()
    assert not following["reward"][empty].any()
    assert following["vqa_correct"][empty].isnan().all()
    assert following["done"].all()


@pytest.mark.parametrize("kind", ["configurations", "recorded", "scored"])
def test_what_all_bandits_keep(kind):
    """`step_and_maybe_reset` steps and resets, and a seed gives the same whenever it is set, also
    on a device that is named."""
    one, named, reseeded = (
        bandit_of(kind, batch_size=5, group_size=3, seed=seed, device=device)
        for seed, device in ((3, None), (3, "cpu"), (0, None))
    )
    reseeded.set_seed(3)
    before = one.reset()
    context = one.rand_action(before.clone())
    stepped, following = one.step_and_maybe_reset(context.clone())
    for env in (named, reseeded):
        identical(env.reset(), before)
        identical(env.step(context.clone()), stepped)
        identical(env.reset(), following)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [3, 0, 3, 0, 3]])
def test_recorded_sequences_give_their_recorded_rewards_in_any_order(order):
    """Of two equal recordings each has its own."""
    again = {name: torch.full((5, 1), 0.5) for name in FIELDS}
    table = five_beams().with_beams(SEQUENCES[:, :1], again, 4, 3)
    env = DemonstrationBandit(table, batch_size=5, group_size="all")
    context = env.reset()
    rows = context["row"]
    identical(context["group_mask"], table.beam_mask[rows])
    out = env.step(context.set("action", context["sequences"][:, order]))["next"]
    correct, soft = (
        table.fields[name][rows][:, order] for name in ("vqa_correct", "vqa_acc_score")
    )
    identical(out["reward"], (2 * correct + soft).nan_to_num())
    identical(out["vqa_correct"], correct)
    identical(out["row"], rows)


@pytest.mark.parametrize(
    ("live", "row", "wrong"),
    [
        (False, 3, [0, 1, X]),
        *[(False, 4, wrong) for wrong in ([1, 2, X], [2, 1, 0], [2, X, X])],
        *[(True, 4, wrong) for wrong in ([0, 4, X], [2, 2, X], [X, 1, X], [-2, 0, X], [3, 0, X])],
    ],
)
def test_what_was_never_recorded_or_does_not_exist_is_refused_with_its_query(live, row, wrong):
    env = bandit(live, group_size=4, rows=torch.tensor([row]), unprofiled="error")
    action = SEQUENCES[[row]].clone()
    action[0, 1] = torch.tensor(wrong)
    with input_error(f"1 of .*query {'abcde'[row]}"):
        env.step(env.reset().set("action", action))


@replayed_or_live
@pytest.mark.parametrize(
    "words", [{}, {"batch_size": 4, "observe_features": False}, {"batch_size": 4, "group_size": 3}]
)
def test_the_environment_makes_its_observation_itself(live, words):
    env = DemonstrationBandit(five_beams(), scorer=CountingScorer() if live else None, **words)
    assert env.rand_step()["next", "done"].all()  # before any reset it is for new queries
    context = env.reset()
    action = env.rand_action()["action"]
    decided = context.clone().set("action", action)
    whole = env.step(decided)["next"]
    assert whole["reward"].shape == (*env.batch_size, words.get("group_size", 1))
    # without `row` the queries are those of the last reset
    for kept in (["row", "action"], ["action"]):
        identical(env.step(decided.select(*kept))["next"], whole)
    identical(env.rand_step()["next", "row"], context["row"])
    check_env_specs(env, return_contiguous=False)


@replayed_or_live
def test_transforms_and_a_random_policy_of_torchrl(live):
    made = partial(bandit, live, batch_size=4, group_size=2, seed=0)
    changes = Compose(CatTensors(["query", "mask"], "joined"), ExcludeTransform("row"))
    check_env_specs(joined := TransformedEnv(made(), changes))
    for env in (joined, SerialEnv(2, made)):
        collector = Collector(env, None, frames_per_batch=40, total_frames=80)
        assert all(data["next", "reward"].isfinite().all() for data in collector)
        collector.shutdown()


@pytest.mark.parametrize("vector", [SerialEnv, partial(ParallelEnv, mp_start_method="forkserver")])
def test_workers_draw_different_queries(vector):
    env = vector(2, partial(DemonstrationBandit, five_beams(), batch_size=50))
    first, second = env.reset()["row"]
    env.close()
    assert not torch.equal(first, second)


def test_without_a_seed_torch_seeds():
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append([bandit(batch_size=50).reset()["row"] for _ in range(2)])
    identical(*drawn)
    assert not torch.equal(*drawn[0])


@pytest.mark.parametrize("serial", [False, True])
def test_the_state_of_the_passes_can_be_saved(serial):
    made = partial(bandit, batch_size=3, reward=DemonstrationRewardConfig(shuffled=True))
    env, other = (SerialEnv(2, made) if serial else made() for _ in range(2))

    def played(each):
        torch.manual_seed(0)
        return each.rollout(4, break_when_any_done=False)

    env.rollout(3, break_when_any_done=False)
    state = env.state_dict()
    wanted = played(env)
    other.reset()
    other.load_state_dict(state)
    result = played(other)
    for key in ("row", ("next", "reward")):
        identical(result[key], wanted[key])


def test_a_penalty_is_1_below_the_worst_of_the_group():
    env = DemonstrationBandit(five_beams(), rows=ROW, unprofiled="penalty")
    outcome = env.decide(ROW, torch.tensor([[3, 1, X]]))
    assert outcome.sequences[0, 0].tolist() == [3, 1, 0]
    assert (outcome.reward, outcome.correct) == (env.rewards[0].min() - 1, 0.0)


NEAREST = DemonstrationBandit(five_beams(), batch_size=5, seed=0)


@given(
    action=st.lists(st.lists(st.integers(-2, 5), min_size=3, max_size=3), min_size=5, max_size=5)
)
@settings(max_examples=60)
def test_the_nearest_is_the_longest_common_start(action):
    outcome, table = NEAREST.decide(torch.arange(5), torch.tensor(action)), NEAREST.table
    for row, places in enumerate(action):
        recorded = table.sequences[row][table.beam_mask[row]].tolist()
        used = [place for place in dict.fromkeys(places) if 0 <= place < table.pool_mask[row].sum()]
        reward, best = 0.0, [X] * 3
        if used and recorded:
            whole = used + [X] * (3 - len(used))
            keys = []
            for sequence in recorded:
                same = takewhile(lambda pair: pair[0] == pair[1], zip(sequence, whole, strict=True))
                keys.append((len(list(same)), sum(place >= 0 for place in sequence)))
            number = keys.index(max(keys))
            reward, best = float(NEAREST.rewards[row, number]), recorded[number]
            assert best == whole or whole not in recorded
        assert (float(outcome.reward[row]), outcome.sequences[row, 0].tolist()) == (reward, best)
        assert bool(outcome.correct[row].isnan()) == (best == [X] * 3)


def test_an_action_may_be_the_index_of_a_recorded_sequence():
    env = bandit(batch_size=5, action="sequence")
    assert "5 queries, recorded sequences" in repr(env)
    check_env_specs(env)
    context = env.reset()
    places = torch.arange(4).expand(5, 4)
    out = env.step(context.set("action", places))["next"]
    # 0 beyond the recorded ones
    assert torch.equal(out["reward"], env.rewards[context["row"]])
    with input_error("0 to 3"):
        env.step(context.set("action", places + 1))


@pytest.mark.parametrize("group_size", [None, 1, 2])
def test_actions_may_lack_the_axis_of_a_group_of_one_and_nothing_else(group_size):
    env = DemonstrationBandit(five_beams(), batch_size=5, group_size=group_size)
    context = env.rand_action(env.reset())
    wanted = env.step(context.clone())["next"]
    action = context["action"]
    assert wanted["vqa_correct"].shape == action.shape[:-1]
    if group_size != 2:
        for shape in [(5, 3), (5, 1, 3)]:
            identical(env.step(context.clone().set("action", action.view(shape)))["next"], wanted)
    for shape in ((5, 3, 3), (5, 2), (5, 1, 2)):
        with input_error("the action"):
            env.step(context.set("action", torch.zeros(shape, dtype=torch.int64)))


@pytest.mark.parametrize("mode", MODES)
def test_what_was_not_recorded_is_said_when_the_environment_is_made(mode):
    config = DemonstrationRewardConfig(mode)
    table = five_beams()
    for name in config.needs:
        hole = table.fields[name].clone()
        hole[4, 1] = torch.nan
        absent = {k: v for k, v in table.fields.items() if k != name}
        for fields, place in (
            (absent, f"7 of .* {name}, .*{mode} needs.*query a"),
            (absent | {name: hole}, f"1 of .* {name}, .*query e"),
        ):
            with input_error(place):
                DemonstrationBandit(replace(table, fields=fields), reward=config)


def test_beams_with_scores_alone_have_a_reward_and_an_unknown_correctness():
    table = five_beams()
    score = table.fields["beam_score"]
    env = DemonstrationBandit(replace(table, fields={"beam_score": score}), group_size="all")
    outcome = env.decide(ROW, table.sequences[:1])
    identical(outcome.reward, score[:1])
    assert outcome.correct.isnan().all()


@pytest.mark.parametrize(
    ("groups", "shots", "kept"),
    [
        ({}, None, [[0, 1, 2, 3], [0], [], [], [0, 1]]),
        ({}, 2, [[0, 3], [], [], [], [0, 1]]),
        ({"methods": "beams"}, None, [[0], [], [], [], [0]]),
        ({"methods": "without_beams"}, None, [[1, 2, 3], [0], [], [], [1]]),
        ({"methods": "own"}, None, [[2, 3], [], [], [], [1]]),
        ({"methods": "own", "rounds": 1}, None, [[3], [], [], [], [1]]),
        ({"rounds": 1}, None, [[0, 1, 3], [0], [], [], [0, 1]]),
    ],
)
def test_groups(groups, shots, kept):
    """`kept` are the beams of each query, by their numbers in the table."""
    whole = five_beams()
    groups = GroupConfig(**groups)
    table = recorded_groups(whole, groups, shots)
    assert table.num_beams == max(map(len, kept))
    assert table.shots == table.lengths.max()
    for query, beams in enumerate(kept):
        assert int(table.beam_mask[query].sum()) == len(beams)
        for name, values in whole.beams.items():
            wanted = values[query, beams]
            if name == "sequences":
                wanted = wanted[:, : table.shots]
            identical(table.beams[name][query, : len(beams)], wanted)
    env = DemonstrationBandit(whole, groups=groups, shots=shots)
    identical(env.sequences, table.sequences)


def test_groups_that_make_no_sense():
    with input_error("groups.methods"):
        GroupConfig("beam")


@pytest.mark.parametrize(
    ("live", "options", "field"),
    [
        (False, {"groups": GroupConfig("own"), "shots": 4}, "shots=4"),
        (False, {"rows": ROW[:0]}, "queries"),
        (True, {"shots": 0}, "shots=0"),
        (True, {"batch_size": 0}, "batch_size=0"),
        (False, {"unprofiled": "never"}, "unprofiled"),
        (True, {"group_size": "all"}, "group_size=all"),
        (True, {"action": "sequence"}, "action=sequence"),
    ],
)
def test_settings_that_make_no_sense(live, options, field):
    with input_error(field):
        bandit(live, **options)


def test_a_scorer_needs_candidates_and_no_recorded_sequence():
    none = torch.full((5, 0), X)
    nothing = {"sequences": none[..., None], "fields": {}, "found_by": none, "round": none}
    table = replace(five_beams(), **nothing)
    options = {"batch_size": 3, "group_size": 2, "shots": 2, "scorer": CountingScorer()}
    check_env_specs(DemonstrationBandit(table, **options), seed=0)
    with input_error("pools"):
        DemonstrationBandit(replace(table, pool=none), **options)


def test_a_scorer_is_given_the_rows_behind_the_places_once_each():
    env = bandit(True, group_size=3, shots=2)
    row = torch.tensor([4])
    # places chosen before or without a candidate add nothing
    outcome = env.decide(row, torch.tensor([[[2, 2], [7, -5], [0, 2]]]))
    again = env.decide(row, torch.tensor([[[2, X], [X, 2], [2, X]]]))
    assert sorted(env.scorer.asked) == [(4, 0, X), (4, 0, X), (4, 6, 0)]
    identical(again.reward, outcome.reward[:, [0, 0, 0]])
    scored = CountingScorer()(torch.tensor([4, 4]), torch.tensor([[0, X], [6, 0]]))
    (first, first_soft), (second, second_soft) = zip(
        *(scored[name].tolist() for name in ("vqa_correct", "vqa_acc_score")), strict=True
    )
    close(outcome.reward, [[2 * first + first_soft, 0.0, 2 * second + second_soft]], within=1e-6)
    assert outcome.reward[0, 1] == 0
    identical(outcome.correct, [[first, torch.nan, second]])


def test_information_is_the_gain_over_no_demonstration_asked_once():
    env = bandit(True, batch_size=5, reward=DemonstrationRewardConfig("legacy"))
    for _ in range(3):
        context = env.rand_action(env.reset())
        rows = context["row"]
        action = env.closed_up(rows, context["action"].unsqueeze(1)).squeeze(1)
        reward = env.step(context)["next", "reward"].squeeze(1)
        bank = bank_rows(five_beams().pool[rows], action)
        shown, nothing = (CountingScorer()(rows, x)["vqa_gt_prob"] for x in (bank, bank * 0 - 1))
        close(reward, (shown - nothing).where(action[:, 0] >= 0, 0.0))
    zero_shot = [query for query, *rest in env.scorer.asked if rest == [X] * 3]
    assert sorted(zero_shot) == [*range(5)]


def test_a_scorer_that_does_not_give_what_the_mode_is_made_of():
    def probability(queries, demonstrations):
        return {"vqa_gt_prob": torch.ones(len(queries))}

    with input_error("vqa_correct"):
        bandit(True, rows=ROW, scorer=probability).rollout(1)
    legacy = bandit(True, rows=ROW, scorer=probability, reward=DemonstrationRewardConfig("legacy"))
    assert legacy.rollout(1)["next", "vqa_correct"].isnan().all()


def test_live_shuffles_change_from_draw_to_draw_and_come_again_with_the_contexts():
    config = DemonstrationRewardConfig("legacy", information="vqa_acc_score", shuffled=True)
    env = bandit(True, group_size=6, rows=torch.tensor([4]), shots=3, reward=config)
    action = torch.tensor([[*permutations(range(3))]])

    def drawn(times):
        steps = [env.step(env.reset().set("action", action)) for _ in range(times)]
        return torch.cat([step["next", "reward"] for step in steps])

    rewards = drawn(4)
    assert len(rewards.unique(dim=0)) > 2
    assert len(rewards.sort().values.unique(dim=0)) == 1
    env.contexts.drawn = 2
    identical(drawn(2), rewards[2:])


@given(
    rows=st.integers(1, 12),
    count=st.integers(1, 30),
    seed=st.integers(0, 2**62),
    batches=st.integers(1, 6),
)
@settings(max_examples=40)
def test_every_pass_has_each_row_once(rows, count, seed, batches):
    numbers = torch.arange(rows) * 3 + 1
    passes = Passes(numbers, count, seed)
    drawn = torch.cat([passes() for _ in range(batches)])
    assert len(drawn) == count * batches
    for order in drawn.split(rows):
        assert len(order.unique()) == len(order)
        assert torch.isin(order, numbers).all()
    passes.set_back(passes.before)
    identical(passes(), drawn[-count:])


def test_passes_come_in_other_orders():
    same, other = Passes(torch.arange(50), 50, 0), Passes(torch.arange(50), 50, 1)
    identical(same(), Passes(torch.arange(50), 50, 0)())
    assert len({tuple(drawn().tolist()) for drawn in (same, other, same)}) == 3
