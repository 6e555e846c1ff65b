"""The queue: hand-computed waits, equal traces, and inputs that are refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.common.errors import InputError
from knobwise.envs import ProfileTable
from knobwise.envs.service.arrivals import Load, Traces, draw_traces
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
    queue = Queue(table_of(), traces_of([0.0, 1.0, 3.0, 30.0]))
    waits, backlogs, utilities = [], [], []
    for choice in (1, 1, 0, 1):
        head = queue.head()
        waits.append(10.0 - head.left_ms.item())
        backlogs.append(head.backlog.item())
        utilities.append(queue.serve(torch.tensor([[choice]])).item())
    # 6 ms from 0; 1 waits till 6, ends at 12; 3 waits till 12 (9 ms, 2 more are late for 10); 30 finds it empty
    assert waits == [0.0, 5.0, 9.0, 0.0]
    assert backlogs == [0, 1, 0, 0]  # at 0, 6, 12, 30: behind the second waits the third
    assert utilities == [1.0, 0.0, 0.0, 1.0]  # 5 + 6 > 10, 9 + 2 > 10
    assert queue.over


def test_two_servers_serve_two_at_once_and_the_cost_of_decisions_counts() -> None:
    queue = Queue(table_of(), traces_of([0.0, 0.0, 0.0]), servers=2, cost_ms=0.5)
    left = []
    for choice in (1, 0, 0):
        left.append(queue.head().left_ms.item())
        queue.serve(torch.tensor([[choice]]))
    assert left == [10.0, 10.0, 7.5]  # the second server is free after 2 + 0.5
    assert sorted(queue.free_ms.flatten().tolist()) == [5.0, 6.5]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 1)), min_size=1, max_size=12))
def test_a_server_never_serves_two_and_never_idles_while_one_waits(requests: list[tuple[float, int]]) -> None:
    arrivals = torch.tensor([gap for gap, _ in requests], dtype=torch.float64).cumsum(0).tolist()
    queue, free = Queue(table_of(), traces_of(arrivals)), 0.0
    for arrival, (_, choice) in zip(arrivals, requests, strict=True):
        begins = max(arrival, free)
        assert 10.0 - queue.head().left_ms.item() == pytest.approx(begins - arrival)
        gained = queue.serve(torch.tensor([[choice]])).item()
        free = begins + (SLOW if choice else FAST)
        assert gained == ((1.0 if choice else 0.5) if free - arrival <= 10.0 else 0.0)


def test_a_price_makes_the_choice_faster_and_the_hopeless_fastest() -> None:
    forecast = Forecast(torch.tensor([[0.5, 1.0]]), torch.tensor([[FAST, SLOW]]).log(), torch.full((1, 2), 0.1))
    left = torch.tensor([[20.0, 20.0, 3.0, -1.0]])
    chosen = forecast.choose(torch.tensor([0]), left, torch.tensor([[0.0, 0.2, 0.0, 0.0]]))
    # 1 − 0.2·6 < 0.5 − 0.2·2; in 3 ms only the fast one is on time; after the deadline the fastest
    assert chosen.tolist() == [[1, 0, 0, 0]]


def test_equal_seeds_give_equal_traces() -> None:
    about = {"requests": 7, "gap_ms": 2.0, "deadlines_ms": torch.tensor([5.0]), "rows": torch.arange(4)}
    first, again, other = (draw_traces(table_of(), ["ramp 0.3 1.3", 0.9], 4, seed=seed, **about) for seed in (4, 4, 5))
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first.arrivals_ms, other.arrivals_ms)


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


def test_a_trace_of_arrivals_that_go_back_is_refused() -> None:
    with pytest.raises(InputError, match="arrival 2 comes before"):
        Queue(table_of(), traces_of([3.0, 1.0]))


def test_what_cannot_be_served() -> None:
    table, usual = table_of(), {"requests": 3, "gap_ms": 2.0, "deadlines_ms": torch.tensor([5.0]), "seed": 0}
    usual |= {"rows": torch.arange(4)}
    queue = Queue(table, traces_of([1.0]))
    with pytest.raises(InputError, match="from 0 to 1"):
        queue.serve(torch.tensor([[2]]))
    queue.serve(torch.tensor([[1]]))
    with pytest.raises(InputError, match="the trace has ended"):
        queue.head()
    with pytest.raises(InputError, match="servers=0"):
        Queue(table, traces_of([1.0]), servers=0)
    for loads, about in (([], {}), ([0.5], {"requests": 0}), ([0.5], {"deadlines_ms": torch.tensor([0.0])})):
        with pytest.raises(InputError):
            draw_traces(table, loads, 2, **{**usual, **about})
