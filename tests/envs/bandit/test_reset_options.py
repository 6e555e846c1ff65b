"""What a person may choose at a reset, and how what cannot be chosen is refused."""

import math
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
from helpers import input_error, small_table
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.envs import GymWrapper

import knobwise  # noqa: F401  (registers the environment)
from knobwise.envs.bandit.gymnasium_env import ConfigBanditEnv
from knobwise.envs.bandit.gymnasium_vector_env import ConfigBanditVectorEnv
from knobwise.envs.bandit.settings import BudgetConfig

ID = "knobwise/ConfigBandit-v0"
TABLE = small_table()
TWO_SETS = replace(
    TABLE, sample_ids=(*map(str, range(30)),) * 2, datasets=("a",) * 30 + ("b",) * 30
)


@settings(max_examples=20, deadline=None)
@given(row=st.integers(0, 59), budget=st.floats(2**-20, 2**20, width=32), by_id=st.booleans())
def test_the_person_chooses_the_sample_and_its_budget(row, budget, by_id):
    env = ConfigBanditEnv(TABLE)
    sample = {"sample_id": TABLE.sample_ids[row]} if by_id else {"row": row}
    observation, info = env.reset(options={"budget_ms": budget, **sample})
    assert (info["row"], info["budget_ms"], observation["budget_ms"]) == (row, budget, budget)
    assert np.array_equal(observation["image_features"], TABLE.features["image_features"][row])
    *_, info = env.step([0, 0, 0])
    assert info["latency_ms"] == TABLE.latency_ms[row, 0]
    assert info["violation"] == (info["latency_ms"] > budget)


@pytest.mark.parametrize("strategy", ["relative", "quantiles"])
def test_the_seed_fixes_what_is_not_chosen(strategy):
    env = ConfigBanditEnv(TABLE, BudgetConfig(strategy))
    _, drawn = env.reset(seed=3)
    _, by_row = env.reset(seed=3, options={"row": drawn["row"]})
    _, by_budget = env.reset(seed=3, options={"budget_ms": 7.5})
    assert (by_row["row"], by_row["budget_ms"]) == (drawn["row"], drawn["budget_ms"])
    assert (by_budget["row"], by_budget["budget_ms"]) == (drawn["row"], 7.5)
    _, other = env.reset(seed=3, options={"row": 11})
    _, again = env.reset(seed=3, options={"row": 11})
    assert other["row"] == again["row"] == 11
    assert other["budget_ms"] == again["budget_ms"]
    # a choice is for one episode
    env.reset(seed=3, options={"row": 11, "budget_ms": 7.5})
    env.step([0, 0, 0])
    assert len({env.reset()[1]["row"] for _ in range(20)}) > 5


def test_under_a_mean_budget_the_value_is_chosen():
    env = ConfigBanditEnv(TABLE, BudgetConfig(constraint="mean"))
    _, info = env.reset(options={"worth_ms": 40, "row": 2})
    assert info["worth_ms"] == 40
    _, reward, *_, info = env.step([0, 0, 0])
    assert reward == pytest.approx(info["accuracy"] - info["latency_ms"] / 40)
    with input_error("budget_ms"):
        env.reset(options={"budget_ms": 40})


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"budget": 2.0}, "'budget'"),
        *(({"row": wrong}, "row=") for wrong in (60, -1, 1.5, True, [1, 2], [[1]])),
        ({"sample_id": "x"}, "0 samples"),
        ({"sample_id": "7"}, "2 samples"),
        ({"sample_id": "7", "dataset": "c"}, "0 samples"),
        ({"dataset": "a"}, "dataset"),
        ({"row": 3, "sample_id": "7", "dataset": "a"}, "sample_id"),
        *(
            ({"budget_ms": wrong}, "budget_ms=")
            for wrong in (0, -1.0, 1e39, 1e-50, math.nan, math.inf, "fast", True)
        ),
    ],
)
def test_what_cannot_be_chosen_is_refused(options, fault):
    env = ConfigBanditEnv(TWO_SETS)
    with input_error(f"^reset options.*{fault}"):
        env.reset(options=options)
    _, info = env.reset(options={"sample_id": "7", "dataset": "b"})
    assert info["row"] == 37


def test_many_at_once_take_a_single_value_or_each_their_own():
    env = ConfigBanditVectorEnv(3, TWO_SETS, autoreset_mode="Disabled")
    observations, infos = env.reset(options={"row": np.array([4, 5, 6]), "budget_ms": 2.0})
    assert infos["row"].tolist() == [4, 5, 6]
    assert observations["budget_ms"].tolist() == [[2.0], [2.0], [2.0]]
    sample = {"sample_id": "7", "dataset": "b", "budget_ms": [1.0, 2.5, 3.0]}
    observations, infos = env.reset(options=sample)
    assert infos["row"].tolist() == [37, 37, 37]
    assert observations["budget_ms"].tolist() == [[1.0], [2.5], [3.0]]
    with input_error("row="):
        env.reset(options={"row": [1, 2]})
    _, infos = env.reset(options={"row": [7, 8, 9], "reset_mask": np.array([True, False, True])})
    assert infos["row"].tolist() == [7, 37, 9]


def test_torchrl_passes_choices_on():
    wrapped = GymWrapper(gymnasium.make(ID, table=TABLE))
    context = wrapped.reset(options={"row": 5, "budget_ms": 3.0})
    assert context["budget_ms"].item() == 3
    assert np.array_equal(context["image_features"], TABLE.features["image_features"][5])
