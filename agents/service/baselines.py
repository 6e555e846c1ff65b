"""Simple ways to serve a queue, tuned on training traces, and what any way gets on traces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from knobwise.agents.judging.baselines import BudgetAwareStatic
from knobwise.agents.service.policy import PricePolicy
from knobwise.envs.service.arrivals import Traces
from knobwise.envs.service.queue import Forecast, Head, Queue
from knobwise.envs.tables.profile_table import ProfileTable

Decide = Callable[[Head], Tensor]
"""Chooses configurations, int64 [P, G]."""
PER_WAITING = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
"""Prices per waiting request that are tried, in utility per mean service."""


class Outcome(NamedTuple):
    """Means over the requests of each trace, float64 [P, G] each."""

    utility: Tensor
    accuracy: Tensor
    latency_ms: Tensor
    waited_ms: Tensor
    satisfaction: Tensor
    """The share on time."""


@dataclass(frozen=True)
class Service:
    """What is the same for everybody who serves: the profile, what is expected of it, servers, and loads.

    `service_ms` is the mean time of a request that does not wait, see `Forecast.service_ms`."""

    table: ProfileTable
    forecast: Forecast
    service_ms: float
    prices: Tensor
    """float [K], in utility per ms."""
    servers: int = 1
    cost_ms: float = 0.0
    """What a decision takes that reads the request."""

    def serve(self, traces: Traces, decide: Decide, group: int = 1, free: bool = False) -> Outcome:
        """Serve P traces, each by G rollouts. `free`: decisions cost nothing."""
        cost_ms, gap_ms = 0.0 if free else self.cost_ms, self.service_ms / self.servers
        queue, served = Queue(self.table, traces, gap_ms, group, self.servers, cost_ms), []
        while not queue.over:
            head = queue.head()
            each = queue.serve(decide(head))
            on_time = each.waited_ms + each.latency_ms <= traces.deadlines_ms[:, queue.place - 1, None]
            served.append((*each[:2], *each[2:], on_time))
        return Outcome(*(torch.stack(part).double().mean(0) for part in zip(*served, strict=True)))

    def at_price(self, price: Tensor | float, per_waiting: Tensor | float = 0.0) -> Decide:
        """price + per_waiting · backlog, in utility per ms; [G] each, or numbers."""
        return lambda head: self.forecast.choose(head.rows, head.left_ms, price + per_waiting * head.backlog)

    def by_policy(self, policy: PricePolicy) -> Decide:
        """The prices of a trained policy."""

        def decide(head: Head) -> Tensor:
            load = self.service_ms / self.servers / head.gap_ms.clamp_min(1e-9)
            price = policy.price(head.left_ms.float(), head.backlog.float(), load.float())
            return self.forecast.choose(head.rows, head.left_ms, price)

        return decide

    def tuned(self, traces: Traces) -> tuple[float, float, float]:
        """The best single price, and the best price and price per waiting request together, on these traces."""
        per_waiting = torch.tensor(PER_WAITING) / self.service_ms
        pairs = torch.cartesian_prod(self.prices, per_waiting)
        utility = self.serve(traces, self.at_price(*pairs.T), len(pairs)).utility.mean(0)
        alone, best = utility[:: len(per_waiting)].argmax(), utility.argmax()
        return float(self.prices[alone]), *pairs[best].tolist()

    def best_static(self, traces: Traces) -> Decide:
        """The one configuration that is best on these traces, among those profiled for all of their samples."""
        every = self.table.mask[traces.rows.unique()].all(0).nonzero().squeeze(1)
        utility = self.serve(traces, lambda head: every.expand(len(head.rows), -1), len(every), True).utility
        best = every[utility.mean(0).argmax()]
        return lambda head: best.expand(head.left_ms.shape)

    def static_by_time_left(self, rows: Tensor) -> Decide:
        """Budget-aware static, fitted on samples int64 [n], under the time left."""
        static = BudgetAwareStatic(self.table, rows)

        def decide(head: Head) -> Tensor:
            mask = self.table.mask[head.rows].unsqueeze(1).expand(*head.left_ms.shape, -1)
            return static.choose({}, head.left_ms.flatten(), mask.flatten(0, 1)).view(head.left_ms.shape)

        return decide
