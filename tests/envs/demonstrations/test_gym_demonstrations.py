"""The selector's bandit in gymnasium: what its checker says, and the same queries and rewards as in
TorchRL."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from helpers import small_table
from torch import Tensor
from torchrl.envs import GymWrapper, check_env_specs

import knobwise  # noqa: F401  (registers the environments)
from knobwise.common.errors import InputError
from knobwise.envs.configurations.gymnasium_env import ConfigBanditEnv
from knobwise.envs.configurations.settings import BudgetConfig
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.demonstrations.gymnasium_env import DemonstrationBanditEnv
from knobwise.envs.demonstrations.settings import DemonstrationRewardConfig
from knobwise.envs.demonstrations.torchrl_env import DemonstrationBandit

X, ID = -1, "knobwise/DemonstrationBandit-v0"


def beams(queries: int = 3) -> BeamTable:
    """Pools of two; all of the four sequences are recorded, with soft accuracies .1, .2, .3, .4 in
    the first query, and the last query has an empty pool."""
    sequences = torch.tensor([[0, X], [1, X], [0, 1], [1, 0]]).expand(queries, 4, 2).clone()
    pool = torch.stack([torch.arange(queries), torch.arange(queries) + 1], 1)
    sequences[-1], pool[-1] = X, X
    there = sequences[..., 0] >= 0
    accuracy = torch.arange(1.0, 4 * queries + 1).reshape(queries, 4) / 10
    found_by = torch.zeros(queries, 4, dtype=torch.int64).masked_fill(~there, X)
    return BeamTable(
        name="twos",
        query_ids=tuple(f"q{i}" for i in range(queries)),
        pool=pool,
        sequences=sequences,
        fields={
            "vqa_correct": torch.tensor([0.0, 1.0, 0.0, 1.0]).where(there, torch.nan),
            "vqa_acc_score": accuracy.where(there, torch.nan),
        },
        found_by=found_by,
        round=found_by.clamp_min(0),
        queries=torch.eye(queries) - 0.5,
        candidates=torch.arange(queries * (queries + 1.0)).reshape(queries + 1, queries),
    )


def sparse() -> BeamTable:
    """The last sequence, [1, 0], was never recorded."""
    table = beams()
    kept = {name: column[:, :3] for name, column in table.beams.items()}
    return table.with_only(kept, table.beam_mask[:, :3])


def scorer(queries: Tensor, demonstrations: Tensor) -> dict[str, Tensor]:
    value = (demonstrations + 1).float() @ torch.tensor([1.0, 3.0])
    return {"vqa_correct": (queries == 0).float(), "vqa_acc_score": value / 100}


def made(**words: Any) -> DemonstrationBanditEnv:
    return DemonstrationBanditEnv(beams(), **words)


ENVIRONMENTS: dict[str, Callable[[], Any]] = {
    "configurations": lambda: gymnasium.make("knobwise/ConfigBandit-v0", table=small_table()),
    "worths": lambda: ConfigBanditEnv(small_table(), BudgetConfig(sense="mean")),
    "without features": lambda: ConfigBanditEnv(small_table(features=False)),
    "recorded": lambda: gymnasium.make(ID, table=beams()),
    "sparse": lambda: gymnasium.make(ID, table=sparse()),
    "penalty": lambda: DemonstrationBanditEnv(sparse(), unprofiled="penalty"),
    "by index": lambda: DemonstrationBanditEnv(sparse(), action="sequence"),
    "scored": lambda: made(scorer=scorer),
}


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_what_every_environment_keeps(kind: str) -> None:
    """Gymnasium and TorchRL have nothing to complain of, every episode is one decision,
    observations share no memory, and without a seed no two environments draw the same."""
    env = ENVIRONMENTS[kind]().unwrapped
    check_env(env, skip_render_check=True)
    check_env_specs(GymWrapper(env))
    check_env_specs(GymWrapper(env, categorical_action_encoding=True))
    env, other = (ENVIRONMENTS[kind]().unwrapped for _ in range(2))
    action = np.zeros(env.action_space.shape, dtype=np.int64)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(action)
    first, _ = env.reset()
    second, _, terminated, truncated, _ = env.step(action)
    assert (terminated, truncated) == (True, False)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(action)
    for mine in first.values():
        assert not any(np.shares_memory(mine, theirs) for theirs in second.values())
    drawn = [[str(e.reset()[1]) for _ in range(20)] for e in (env, other)]
    assert drawn[0] != drawn[1]
    assert env.render() is None


@pytest.mark.parametrize("live", [False, True])
def test_queries_and_rewards_are_those_of_torchrl(live: bool) -> None:
    words: dict[str, Any] = {
        "reward": DemonstrationRewardConfig("hard_plus_soft_v2"),
        "scorer": scorer if live else None,
    }
    env, native, table, rows = made(**words), DemonstrationBandit(beams(), **words), beams(), []
    native.set_seed(7)
    for number in range(6):
        observation, info = env.reset(seed=7 if number == 0 else None)
        context = native.reset()
        row = int(context["row"])
        rows.append(row)
        assert info["row"] == row
        assert np.array_equal(observation["query"], table.queries[row].numpy())
        for place, candidate in enumerate(table.pool[row].tolist()):
            shown = table.candidates[candidate] if candidate >= 0 else torch.zeros(3)
            assert np.array_equal(observation["pool"][place], shown.numpy())
        assert observation["mask"].tolist() == table.pool_mask[row].int().tolist()
        action = torch.tensor([[1, 0]])
        stepped = native.step(context.set("action", action))["next"]
        _, reward, _, _, info = env.step(np.array([1, 0]))
        assert reward == float(stepped["reward"])
        assert info["vqa_correct"] == float(stepped["vqa_correct"]) or row == 2
    assert sorted(rows[:3]) == sorted(rows[3:]) == [0, 1, 2]


def test_infos_and_render_tell_the_outcome_by_hand() -> None:
    env = made(rows=torch.tensor([0]), render_mode="ansi")
    assert len(str(env.observation_space)) < 240  # fits on a screen
    _, info = env.reset()
    assert (info["row"], info["sequences"].tolist()) == (0, [[0, X], [1, X], [0, 1], [1, 0]])
    assert "q0" in str(env.render())
    _, reward, _, _, info = env.step(np.array([0, 1]))
    assert reward == pytest.approx(0.3)
    assert (info["sequence"].tolist(), info["vqa_correct"]) == ([0, 1], 0.0)
    assert (info["oracle_sequence"].tolist(), info["oracle_reward"]) == ([1, 0], pytest.approx(2.4))
    for told in ("q0", "[0, 1]", "wrong", "+0.300", "[1, 0]", "+2.400"):
        assert told in str(env.render())


@pytest.mark.parametrize(
    ("action", "shown"),
    [([1, 1], [1, X]), ([0, 5], [0, X]), ([X, 1], [1, X]), ([1, 0], [1, 0]), ([7, X], [X, X])],
)
def test_a_place_chosen_before_or_without_candidate_shows_nothing(
    action: list[int], shown: list[int]
) -> None:
    env = made(rows=torch.tensor([0]))
    env.reset()
    _, reward, _, _, info = env.step(np.array(action))
    assert info["sequence"].tolist() == shown
    wanted = {(1, X): 2.2, (0, X): 0.1, (1, 0): 2.4, (X, X): 0.0}
    assert reward == pytest.approx(wanted[tuple(shown)])


def test_a_query_without_candidates_has_reward_0() -> None:
    env = made(rows=torch.tensor([2]))
    observation, info = env.reset()
    assert not observation["pool"].any()
    assert (info["sequences"] == X).all()
    _, reward, _, _, info = env.step(np.array([0, 1]))
    assert (reward, info["sequence"].tolist()) == (0.0, [X, X])
    assert np.isnan(info["vqa_correct"])
    assert np.isnan(info["oracle_reward"])
    assert info["oracle_sequence"].tolist() == [X, X]


def test_what_was_never_recorded_is_refused_by_name_and_so_is_an_action_of_another_width() -> None:
    env = DemonstrationBanditEnv(sparse(), rows=torch.tensor([1]), unprofiled="error")
    env.reset()
    with pytest.raises(InputError, match=r"query q1 .*\[1, 0\]"):
        env.step(np.array([1, 0]))
    env.reset()[0]["query"][:] = 9  # a copy
    assert not (env.table.queries == 9).any()
    with pytest.raises(InputError, match="the action"):
        env.step(np.array([0, 1, 1]))


def test_the_nearest_recorded_sequence_is_replayed_and_named() -> None:
    for unprofiled, wanted in (("nearest", (2.6, 1.0)), ("penalty", (-0.5, 0.0))):
        env = DemonstrationBanditEnv(sparse(), rows=torch.tensor([1]), unprofiled=unprofiled)
        env.reset()
        _, reward, _, _, info = env.step(np.array([1, 0]))  # recorded are [0], [1] (right), [0, 1]
        assert info["sequence"].tolist() == [1, X]
        assert (reward, info["vqa_correct"]) == (pytest.approx(wanted[0]), wanted[1])


def test_an_index_is_masked_exactly() -> None:
    env = DemonstrationBanditEnv(sparse(), action="sequence")
    assert env.action_space == gymnasium.spaces.Discrete(3)
    env.action_space.seed(0)
    for row, count in ((0, 3), (2, 0)):
        drawn = set()
        for _ in range(40):
            _, info = env.reset(options={"row": row})
            assert (info["action_mask"].dtype, info["action_mask"].sum()) == (np.int8, count)
            action = env.action_space.sample(info["action_mask"])
            _, reward, _, _, after = env.step(action)
            assert after["sequence"].tolist() == info["sequences"][action].tolist()
            drawn.add(round(reward, 5))
        assert drawn == ({0.1, 2.2, 0.3} if row == 0 else {0.0})
    env.reset()
    with pytest.raises(InputError, match="0 to 2"):
        env.step(3)


@pytest.mark.parametrize("live", [False, True])
def test_a_person_chooses_the_query(live: bool) -> None:
    env = made(scorer=scorer if live else None)
    for options in ({"row": 1}, {"query_id": "q1"}, {"row": np.int64(1)}):
        observation, info = env.reset(options=options)
        assert info["row"] == 1
        assert np.array_equal(observation["query"], env.table.queries[1].numpy())
    rows = [env.reset(seed=0 if i == 0 else None)[1]["row"] for i in range(3)]
    env.reset(seed=0)
    env.reset(options={"row": 1})  # outside the passes
    assert [env.reset()[1]["row"] for _ in range(2)] == rows[1:]
    wrong = ({"row": 3}, {"row": -1}, {"row": 1.0}, {"query_id": "q9"}, {"budget_ms": 2.0})
    for options in (*wrong, {"row": 1, "query_id": "q1"}):
        with pytest.raises(InputError, match="options"):
            env.reset(options=options)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("sync", "places"), ("sync", "sequence"), ("sync", "scored"), ("async", "places")],
)
def test_many_at_once_draw_different_queries_and_live(mode: str, kind: str) -> None:
    words: dict[str, Any] = {"scorer": scorer} if kind == "scored" else {"action": kind}
    words |= {"vector_kwargs": {"context": "forkserver"}} if mode == "async" else {}
    vector = gymnasium.make_vec(ID, 2, mode, table=sparse(), **words)
    rows = []
    vector.action_space.seed(0)
    _, infos = vector.reset()
    for _ in range(30):  # every other step resets
        rows.append(infos["row"].tolist())
        _, rewards, _, _, infos = vector.step(vector.action_space.sample())
        assert np.isfinite(rewards).all()
    vector.close()
    assert any(first != second for first, second in rows)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_a_vector_environment_passes_through_torchrl(mode: AutoresetMode) -> None:
    vector = gymnasium.make_vec(
        ID, 3, "sync", vector_kwargs={"autoreset_mode": mode}, table=sparse()
    )
    env = GymWrapper(vector, categorical_action_encoding=True)
    check_env_specs(env)
    assert env.rollout(4, break_when_any_done=False)["next", "done"].all()
