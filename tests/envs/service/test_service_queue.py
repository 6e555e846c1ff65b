"""The queue and its two environments: hand-computed waits, equal groups, and inputs that are refused."""

from __future__ import annotations

import math
from pathlib import Path

import gymnasium
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.envs.utils import check_env_specs

from knobwise.common.errors import InputError
from knobwise.envs import ProfileTable, ServiceQueue, ServiceQueueEnv
from knobwise.envs.service.arrivals import Load, Traces, TraceSampler
from knobwise.envs.service.queue import Forecast, Queue
from knobwise.envs.tables.profile_table import Knob

FAST, SLOW = 2.0, 6.0


def table_of(repeats: int = 1) -> ProfileTable:
    """Four samples, a fast configuration that is right half the time, and a slow one that is always right."""
    latency = torch.tensor([[FAST, SLOW]]).repeat(4, 1)
    measured = latency.unsqueeze(-1) * torch.linspace(0.9, 1.1, repeats) if repeats > 1 else None
    return ProfileTable(
        name="two",
        knobs=(Knob("size", (1, 2)),),
        configurations=torch.tensor([[0], [1]]),
        accuracy=torch.tensor([[0.5, 1.0]]).repeat(4, 1),
        latency_ms=latency,
        mask=torch.ones(4, 2, dtype=torch.bool),
        sample_ids=("a", "b", "c", "d"),
        repeats_ms=measured,
    )


def traces_of(arrivals: list[float], deadline: float = 10.0) -> Traces:
    times = torch.tensor([arrivals], dtype=torch.float64)
    zeros = torch.zeros(times.shape, dtype=torch.int64)
    return Traces(zeros, times, torch.full_like(times, deadline), zeros)


def test_waits_follow_lindley_by_hand() -> None:
    queue = Queue(table_of(), traces_of([0.0, 1.0, 3.0, 30.0]), gap_ms=4.0)
    waits, backlogs, utilities = [], [], []
    for choice in (1, 1, 0, 1):
        head = queue.head()
        served = queue.serve(torch.tensor([[choice]]))
        waits.append(served.waited_ms.item())
        backlogs.append(head.backlog.item())
        utilities.append(served.utility.item())
    # 6 ms from 0; 1 waits till 6, ends at 12; 3 waits till 12 (9 ms, 2 more are late for 10); 30 finds it empty
    assert waits == [0.0, 5.0, 9.0, 0.0]
    assert backlogs == [0, 1, 0, 0]  # at 0, 6, 12, 30: behind the second waits the third
    assert utilities == [1.0, 0.0, 0.0, 1.0]  # 5 + 6 > 10, 9 + 2 > 10
    assert queue.over


def test_two_servers_serve_two_at_once_and_the_cost_of_decisions_counts() -> None:
    queue = Queue(table_of(), traces_of([0.0, 0.0, 0.0]), gap_ms=4.0, servers=2, cost_ms=0.5)
    served = [queue.serve(torch.tensor([[choice]])) for choice in (1, 0, 0)]
    assert [each.waited_ms.item() for each in served] == [0.0, 0.0, 2.5]  # the second server is free after 2 + 0.5
    assert served[0].latency_ms.item() == 6.5


def test_the_recent_gap_knows_only_what_has_arrived() -> None:
    queue = Queue(table_of(), traces_of([0.0, 8.0, 100.0]), gap_ms=4.0)
    assert queue.head().gap_ms.item() == 4.0
    queue.serve(torch.tensor([[1]]))
    assert queue.head().gap_ms.item() == 4.0 + (8.0 - 4.0) / 2


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 1)), min_size=1, max_size=12))
def test_a_server_never_serves_two_and_never_idles_while_one_waits(requests: list[tuple[float, int]]) -> None:
    arrivals = torch.tensor([gap for gap, _ in requests], dtype=torch.float64).cumsum(0).tolist()
    queue, free = Queue(table_of(), traces_of(arrivals), gap_ms=4.0), 0.0
    for arrival, (_, choice) in zip(arrivals, requests, strict=True):
        served = queue.serve(torch.tensor([[choice]]))
        begins = max(arrival, free)
        assert served.waited_ms.item() == pytest.approx(begins - arrival)
        free = begins + (SLOW if choice else FAST)
        assert served.utility.item() == ((1.0 if choice else 0.5) if free - arrival <= 10.0 else 0.0)


def test_a_price_makes_the_choice_faster_and_the_hopeless_fastest() -> None:
    forecast = Forecast(torch.tensor([[0.5, 1.0]]), torch.tensor([[FAST, SLOW]]).log(), torch.full((1, 2), 0.1))
    left = torch.tensor([[20.0, 20.0, 3.0, -1.0]])
    chosen = forecast.choose(torch.tensor([0]), left, torch.tensor([[0.0, 0.2, 0.0, 0.0]]))
    # 1 − 0.2·6 < 0.5 − 0.2·2; in 3 ms only the fast one is on time; after the deadline the fastest
    assert chosen.tolist() == [[1, 0, 0, 0]]


def test_rollouts_of_a_trace_differ_by_their_actions_only() -> None:
    env = ServiceQueue(table_of(5), batch_size=3, group_size=4, requests=20, loads=(0.9, "bursts 0.4 1.5"), seed=1)
    check_env_specs(env, seed=0)
    env.set_seed(3)
    data = env.rollout(20, policy=lambda td: td.set("action", env.action_spec.zero()))
    assert (data["next", "reward"] == data["next", "reward"][:, :1]).all()
    assert data["next", "done"][:, :, -1].all()
    assert not data["next", "done"][:, :, :-1].any()
    env.set_seed(3)
    again = env.rollout(20, policy=lambda td: td.set("action", env.action_spec.rand()))
    assert (again["row"] == data["row"]).all()
    assert (again["left_ms"] != data["left_ms"]).any()


def test_equal_seeds_give_equal_traces_and_set_back_draws_them_again() -> None:
    about = {"requests": 7, "gap_ms": 2.0, "deadlines_ms": torch.tensor([5.0])}
    first, second = (TraceSampler(table_of(), ["ramp 0.3 1.3", 0.9], seed=4, **about) for _ in range(2))
    drawn = first(4)
    assert all(map(torch.equal, drawn, second(4)))
    before = first.before
    assert not torch.equal(first(4).arrivals_ms, drawn.arrivals_ms)
    first.set_back(before)
    assert all(map(torch.equal, first(4), drawn))


@pytest.mark.parametrize("load", ["0.5", "ramp 0.25 0.75", "bursts 0.5 0.5"])
def test_arrivals_have_their_load(load: str) -> None:
    times = Load.parse(load).arrivals(20_000, 2.0, torch.Generator().manual_seed(0))
    share = 2.0 * len(times) / float(times[-1])
    expected = 0.5 if "ramp" not in load else 0.5 / math.log(3)  # the mean of 1/load from 0.25 to 0.75 is 2·ln 3
    assert share == pytest.approx(expected, rel=0.05)


def test_recorded_arrivals_are_replayed_or_scaled(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.txt"
    path.write_text("\n".join(str(1e12 + 5 * i) for i in range(30)))
    draw = torch.Generator().manual_seed(0)
    assert Load.parse(f"recorded {path}").arrivals(4, 2.0, draw).tolist() == [0.0, 5.0, 10.0, 15.0]
    assert Load.parse(f"recorded {path} 0.5").arrivals(3, 2.0, draw).tolist() == [0.0, 4.0, 8.0]
    with pytest.raises(InputError, match="only 30 arrivals were recorded"):
        Load.parse(f"recorded {path}").arrivals(31, 2.0, draw)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("0\n5\n4\n", "arrival 3 comes before the one above it"),
        ("-1\n5\n", "arrival 1 is negative"),
        ("0\nnan\n", "arrival 2 is not a finite number"),
        ("", "holds no arrivals"),
        ("0\nsoon\n", "arrivals are numbers"),
    ],
)
def test_recorded_arrivals_that_cannot_be(tmp_path: Path, lines: str, words: str) -> None:
    path = tmp_path / "arrivals.txt"
    path.write_text(lines)
    with pytest.raises(InputError, match=words):
        Load.parse(f"recorded {path}")
    with pytest.raises(InputError, match="cannot be read"):
        Load.parse(f"recorded {tmp_path / 'none.txt'}")


@pytest.mark.parametrize("load", [0, -0.5, "nan", "inf", "ramp 0.5 0", "ramp 0.5", "recorded", "poisson", "often", ""])
def test_loads_that_cannot_be(load: str | float) -> None:
    with pytest.raises(InputError, match="load"):
        Load.parse(load)


@pytest.mark.parametrize(
    "about",
    [{"servers": 0}, {"requests": 0}, {"loads": []}, {"deadlines_ms": torch.tensor([0.0])}, {"batch_size": 2}],
)
def test_settings_that_cannot_be(about: dict[str, object]) -> None:
    with pytest.raises(InputError):
        ServiceQueueEnv(table_of(), **about)


def test_a_trace_of_arrivals_that_go_back_is_refused() -> None:
    with pytest.raises(InputError, match="arrival 2 comes before"):
        Queue(table_of(), traces_of([3.0, 1.0]), gap_ms=4.0)


def test_actions_that_cannot_be() -> None:
    env = ServiceQueue(table_of(), requests=1, seed=0)
    state = env.reset()
    with pytest.raises(InputError, match="index of a price"):
        env.step(state.set("action", torch.full((1, 1), 99)))
    env.step(state.set("action", torch.zeros(1, 1, dtype=torch.int64)))
    with pytest.raises(InputError, match="the trace has ended"):
        env.step(state)
    with pytest.raises(InputError, match="from 0 to 1"):
        Queue(table_of(), traces_of([1.0]), gap_ms=4.0).serve(torch.tensor([[2]]))


def test_stepped_by_hand() -> None:
    env = gymnasium.make("knobwise/ServiceQueue-v0", table=table_of(5), requests=3, render_mode="ansi")
    check_env(env.unwrapped, skip_render_check=True)
    observation, info = env.reset(seed=0)
    assert observation["utility"].shape == observation["latency_ms"].shape == (2,)
    assert info["sample_id"] in "abcd"
    rewards, over = [], False
    while not over:
        observation, reward, over, _, info = env.step(env.action_space.sample())
        rewards.append(reward)
        assert "ms left" in str(env.render())
    assert len(rewards) == 3
    assert set(rewards) <= {0.0, 0.5, 1.0}
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)
