"""Ways to serve a queue: tuned rules are the best of those tried, and decisions cost time."""

from __future__ import annotations

import pytest
import torch

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.service.baselines import Service, forecast_of
from knobwise.common.errors import InputError
from knobwise.envs import ProfileTable
from knobwise.envs.service.queue import Forecast, Head
from knobwise.envs.tables.profile_table import Knob


@pytest.fixture
def table() -> ProfileTable:
    """A fast configuration that is right half the time, and a slow one that is always right, with jitter."""
    latency = torch.tensor([[2.0, 6.0]]).repeat(8, 1)
    return ProfileTable(
        name="two",
        knobs=(Knob("size", (1, 2)),),
        configurations=torch.tensor([[0], [1]]),
        accuracy=torch.tensor([[0.5, 1.0]]).repeat(8, 1),
        latency_ms=latency,
        mask=torch.ones(8, 2, dtype=torch.bool),
        sample_ids=tuple("abcdefgh"),
        repeats_ms=latency.unsqueeze(-1) * torch.tensor([0.9, 1.0, 1.1]),
    )


def service_of(table: ProfileTable, cost_ms: float = 0.0) -> Service:
    """It knows the averages and nothing of the request."""
    accuracy, latency, spread = (torch.tensor([each]).repeat(8, 1) for each in ([0.5, 1.0], [2.0, 6.0], [0.1, 0.1]))
    forecast = Forecast(accuracy, latency.log(), spread)
    return Service(table, forecast, torch.arange(8), torch.tensor([9.0]), cost_ms=cost_ms)


def test_rules_are_the_best_of_those_tried(table: ProfileTable) -> None:
    service = service_of(table)
    assert service.service_ms == pytest.approx(6.0 * torch.tensor(0.1**2 / 2).exp().item())  # the slow one fits 9 ms
    traces = service.traces([1.5], 20, seed=0, requests=40)

    def utility(decide: object) -> float:
        return float(service.serve(traces, decide).mean())  # type: ignore[arg-type]

    alone, price, per_waiting = service.tuned(traces)
    best = utility(service.at_price(price, per_waiting))
    assert best >= utility(service.at_price(alone)) >= utility(service.at_price(0.0)) + 0.04


def test_a_price_counts_those_who_wait(table: ProfileTable) -> None:
    service = service_of(table)
    head = Head(torch.tensor([0]), torch.full((1, 3), 20.0), torch.tensor([[0, 1, 2]]))
    # 1 − price · 6 against 0.5 − price · 2: the fast one from 0.125 per ms on
    assert service.at_price(0.05, 0.05)(head).tolist() == [[1, 1, 0]]


def test_a_decision_that_costs_time_is_charged(table: ProfileTable) -> None:
    free, dear = service_of(table), service_of(table, cost_ms=6.0)  # 6 ms and a decision of 6 ms are late for 9 ms
    traces = dear.traces([0.01], 3, seed=0, requests=2)
    free_of_charge, charged = (each.serve(traces, lambda head: torch.ones_like(head.backlog)) for each in (free, dear))
    assert (free_of_charge.mean(), charged.mean()) == (1.0, 0.0)


def test_a_checkpoint_without_a_controller_for_deadlines_is_refused(table: ProfileTable) -> None:
    with pytest.raises(InputError, match="holds a Controller; requests that wait need a controller for deadlines"):
        forecast_of(Controller.for_table(table, torch.arange(8), PolicyConfig(), False), table)
