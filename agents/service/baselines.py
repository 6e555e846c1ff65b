"""Prices of time in a queue, tuned on training traces, and the utility that any rule gets on traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from knobwise.agents.serving.distillation import Lessons
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.common.errors import InputError
from knobwise.envs.service.arrivals import Traces, draw_traces
from knobwise.envs.service.queue import Forecast, Head, Queue
from knobwise.envs.tables.profile_table import ProfileTable

Decide = Callable[[Head], Tensor]
"""Chooses configurations, int64 [P, G]."""
PRICES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.28, 0.35, 0.44, 0.55, 0.67, 0.8, 1.0, 1.25, 1.6, 2.2, 3.2)
"""Prices of time that are tried, in utility per mean service."""
PER_WAITING = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
"""Prices per waiting request that are tried, in utility per mean service."""


def forecast_of(agent: Any, table: ProfileTable) -> Forecast:
    """What a controller expects of every sample of a table. Raises InputError: it is none for deadlines that predicts
    outcomes."""
    if not isinstance(agent, StackedController) or agent.priced:
        raise InputError(
            f"checkpoint: holds a {type(agent).__name__}; requests that wait need a controller for deadlines that "
            "predicts outcomes, from knobwise train experiment=controller or experiment=lean"
        )
    _, *predicted = Lessons.of_teacher(agent, agent.features(table.features, table.num_samples))
    return Forecast(*(part.float().where(table.mask, torch.nan) for part in predicted))


@dataclass(frozen=True)
class Service:
    """What is the same for everybody who serves: the profile, what is expected of it, deadlines, and servers."""

    table: ProfileTable
    forecast: Forecast
    fitted: Tensor
    """int64 [n], the samples that the controller was fitted on."""
    deadlines_ms: Tensor
    """float [B], from arrival, drawn evenly."""
    servers: int = 1
    cost_ms: float = 0.0
    """What a decision takes that reads the request."""

    @cached_property
    def service_ms(self) -> float:
        """The mean time of a request that does not wait, see `Forecast.service_ms`."""
        return self.forecast.service_ms(self.fitted, self.deadlines_ms)

    def traces(
        self, loads: Sequence[str | float], count: int, seed: int, rows: Tensor | None = None, requests: int = 200
    ) -> Traces:
        """Traces of these loads in turn, of the samples fitted on or of `rows`."""
        about: dict[str, Any] = {"gap_ms": self.service_ms / self.servers, "deadlines_ms": self.deadlines_ms}
        about |= {"rows": self.fitted if rows is None else rows, "seed": seed, "requests": requests}
        return draw_traces(self.table, loads, count, **about)

    def serve(self, traces: Traces, decide: Decide, group: int = 1) -> Tensor:
        """Mean utility of P traces, each served by G rollouts, float64 [P, G]."""
        queue = Queue(self.table, traces, group, self.servers, self.cost_ms)
        served = []
        while not queue.over:
            served.append(queue.serve(decide(queue.head())))
        return torch.stack(served).double().mean(0)

    def at_price(self, price: Tensor | float, per_waiting: Tensor | float = 0.0) -> Decide:
        """price + per_waiting · backlog, in utility per ms; [G] each, or numbers."""
        return lambda head: self.forecast.choose(head.rows, head.left_ms, price + per_waiting * head.backlog)

    def tuned(self, traces: Traces) -> tuple[float, float, float]:
        """The best single price, and the best price and price per waiting request together, on these traces."""
        prices, per_waiting = (torch.tensor(tried) / self.service_ms for tried in (PRICES, PER_WAITING))
        pairs = torch.cartesian_prod(prices, per_waiting)
        utility = self.serve(traces, self.at_price(*pairs.T), len(pairs)).mean(0)
        alone, best = utility[:: len(per_waiting)].argmax(), utility.argmax()
        return float(prices[alone]), *pairs[best].tolist()
