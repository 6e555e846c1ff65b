"""The selector's bandit in gymnasium: what its checker says, and the same queries and rewards as in
TorchRL."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from helpers import five_beams, identical, input_error, small_table
from torchrl.envs import GymWrapper, check_env_specs

from knobwise.envs import DemonstrationBandit, DemonstrationBanditEnv

X, ID = -1, "knobwise/DemonstrationBandit-v0"


def scorer(queries, demonstrations):
    value = (demonstrations + 1).float() @ torch.tensor([1.0, 3.0, 7.0])
    return {"vqa_correct": (queries == 0).float(), "vqa_acc_score": value / 100}


def made(**options):
    return DemonstrationBanditEnv(five_beams(), **options)


ENVIRONMENTS = {
    "configurations": lambda: gymnasium.make("knobwise/ConfigBandit-v0", table=small_table()),
    "recorded": lambda: gymnasium.make(ID, table=five_beams()),
    "penalty": lambda: made(unprofiled="penalty"),
    "by index": lambda: made(action="sequence"),
    "scored": lambda: made(scorer=scorer),
}


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_what_every_environment_keeps(kind):
    """Gymnasium and TorchRL have nothing to complain of, every episode is one decision,
    observations share no memory, and without a seed no two environments draw the same."""
    env, other = (ENVIRONMENTS[kind]().unwrapped for _ in range(2))
    action = np.zeros(env.action_space.shape, dtype=np.int64)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(action)
    drawn = [[str(e.reset()[1]) for _ in range(20)] for e in (env, other)]
    assert drawn[0] != drawn[1]
    first, _ = env.reset()
    second, _, terminated, truncated, _ = env.step(action)
    assert (terminated, truncated) == (True, False)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(action)
    for mine in first.values():
        assert not any(np.shares_memory(mine, theirs) for theirs in second.values())
    assert env.render() is None
    check_env(env, skip_render_check=True)
    for encoding in (False, True):
        check_env_specs(GymWrapper(env, categorical_action_encoding=encoding))


@pytest.mark.parametrize("options", [{}, {"scorer": scorer}], ids=["recorded", "scored"])
def test_queries_and_rewards_are_those_of_torchrl(options):
    env = made(**options)
    native = DemonstrationBandit(five_beams(), seed=7, **options)
    rows = []
    for number in range(10):
        observation, info = env.reset(seed=None if number else 7)
        context = native.reset()
        rows.append(info["row"])
        for name in ("query", "pool", "mask"):
            identical(context[name][0], observation[name].copy())
            observation[name][:] = 9  # a copy
        action = torch.tensor([[1, 0, X]])
        stepped = native.step(context.set("action", action))["next"]
        assert rows[-1] == stepped["row"]
        _, reward, _, _, info = env.step(action[0].numpy())
        assert reward == stepped["reward"]
        np.testing.assert_equal(info["vqa_correct"], stepped["vqa_correct"].item())
    assert sorted(rows[:5]) == sorted(rows[5:]) == list(range(5))


def test_infos_and_render_tell_the_outcome_by_hand():
    """Places chosen before or without a candidate show nothing, and the nearest is replayed."""
    env = made(rows=torch.tensor([4]), render_mode="ansi")
    assert len(str(env.observation_space)) < 240  # fits on a screen
    _, info = env.reset()
    first, second, none = [2, 1, X], [0, 2, X], [X] * 3
    assert (info["row"], info["sequences"].tolist()) == (4, [first, second, none, none])
    assert "Query e" in env.render()
    # right, with a soft accuracy of (17 + 60) / 200; the other is wrong, with .39
    for action, correct, wanted, sequence in (
        ([2, 1, X], 1, 2.385, first),
        ([2, 2, 1], 1, 2.385, first),
        ([2, 7, 0], 1, 2.385, first),
        ([0, 1, X], 0, 0.39, second),
    ):
        env.reset()
        _, reward, _, _, info = env.step(np.array(action))
        assert (reward, info["oracle_reward"]) == pytest.approx((wanted, 2.385))
        assert info["vqa_correct"] == correct
        assert info["sequence"].tolist() == sequence
        assert info["oracle_sequence"].tolist() == first
    for told in ("Query e", "[0, 2]", "wrong", "+0.390", "[2, 1]", "+2.385"):
        assert told in env.render()


def test_a_query_without_candidates_has_reward_0():
    env = made(rows=torch.tensor([2]))
    env.reset()
    _, reward, _, _, info = env.step(np.array([0, 1, 2]))
    assert reward == 0
    assert (info["oracle_sequence"] == X).all()
    assert np.isnan(info["oracle_reward"])


def test_an_index_is_masked_exactly():
    env = made(action="sequence")
    assert env.action_space == gymnasium.spaces.Discrete(4)
    for row, count in ((0, 4), (4, 2), (2, 0)):
        _, info = env.reset(options={"row": row})
        assert (info["action_mask"].dtype, info["action_mask"].sum()) == (np.int8, count)
        action = env.action_space.sample(info["action_mask"])
        _, reward, _, _, after = env.step(action)
        assert after["sequence"].tolist() == info["sequences"][action].tolist()
        assert (reward == 0) == (count == 0)


def test_a_person_chooses_the_query():
    env = made()
    for options in ({"row": 1}, {"query_id": "b"}, {"row": np.int64(1)}):
        observation, info = env.reset(options=options)
        assert info["row"] == 1
        identical(observation["query"], env.table.queries[1])
    rows = [env.reset(seed=None if i else 0)[1]["row"] for i in range(3)]
    env.reset(seed=0)
    env.reset(options={"row": 1})  # outside the passes
    assert [env.reset()[1]["row"] for _ in range(2)] == rows[1:]
    for wrong in (
        {"row": 5},
        {"row": -1},
        {"row": 1.0},
        {"query_id": "q"},
        {"budget_ms": 2.0},
        {"row": 1, "query_id": "b"},
    ):
        with input_error("options"):
            env.reset(options=wrong)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("sync", {}),
        ("sync", {"action": "sequence"}),
        ("sync", {"scorer": scorer}),
        ("async", {"vector_kwargs": {"context": "forkserver"}}),
    ],
)
def test_many_at_once_draw_different_queries(mode, options):
    vector = gymnasium.make_vec(ID, 2, mode, table=five_beams(), **options)
    vector.action_space.seed(0)
    _, infos = vector.reset()
    different = False
    for _ in range(30):  # every other step resets
        first, second = infos["row"]
        different |= first != second
        _, rewards, _, _, infos = vector.step(vector.action_space.sample())
        assert np.isfinite(rewards).all()
    vector.close()
    assert different
