"""The queue that all policies share: requests wait for one another, first come, first served.

With one server the wait follows Lindley's recursion (1952, "The theory of queues with a single server", equation 1):
wait' = max(0, wait + service − gap); with several, a request goes to the server that is free first (Kiefer and
Wolfowitz 1955, "On the theory of queues with many servers"). A configuration is chosen when a server takes the request,
so that its wait is known.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from knobwise.common.checks import at_least
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import log_ms
from knobwise.envs.configurations.reward import RewardTable, utility
from knobwise.envs.configurations.settings import TRAINING_REWARD
from knobwise.envs.service.arrivals import Traces, check_arrivals
from knobwise.envs.tables.profile_table import ProfileTable

HOPELESS = 0.01
"""If no configuration is more likely than this to be on time, the one expected to be fastest is chosen."""


class Forecast(NamedTuple):
    """What is expected of every configuration of every sample, float32 [N, C] each: accuracy, and mean and standard
    deviation of ln ms; NaN where a cell was not profiled."""

    accuracy: Tensor
    log_latency: Tensor
    spread: Tensor

    def latency_ms(self, rows: Tensor) -> Tensor:
        """E[latency] in ms of a log-normal variable, exp(μ + σ²/2): rows int64 [n] → [n, C]."""
        return torch.exp(self.log_latency[rows] + self.spread[rows].square() / 2)

    def meets(self, rows: Tensor, left_ms: Tensor) -> Tensor:
        """The probability to be on time: rows int64 [P], times left float [P, G] → [P, G, C]; 0 if not profiled."""
        mean, spread = self.log_latency[rows].unsqueeze(1), self.spread[rows].unsqueeze(1)
        return torch.special.ndtr((log_ms(left_ms.float()).unsqueeze(-1) - mean) / spread).nan_to_num(0.0)

    def choose(self, rows: Tensor, left_ms: Tensor, price: Tensor | float) -> Tensor:
        """The configuration with the best expected utility − price · expected latency, int64 [P, G]; prices [P, G] in
        utility per ms."""
        meets = self.meets(rows, left_ms)
        price = torch.as_tensor(price, dtype=meets.dtype).unsqueeze(-1)
        worth = self.accuracy[rows].unsqueeze(1).clamp(1e-3, 1.0) * meets - price * self.latency_ms(rows).unsqueeze(1)
        fastest = self.log_latency[rows].nan_to_num(torch.inf).argmin(-1, keepdim=True)
        return torch.where(meets.amax(-1) < HOPELESS, fastest, worth.nan_to_num(-torch.inf).argmax(-1))

    def service_ms(self, rows: Tensor, deadlines_ms: Tensor) -> float:
        """The mean expected latency of what is chosen for these samples, int64 [n], if nothing waits and time costs
        nothing: over deadlines [B]."""
        chosen = self.choose(rows, deadlines_ms.expand(len(rows), -1), 0.0)
        return float(self.latency_ms(rows).gather(1, chosen).double().mean())


class Head(NamedTuple):
    """What is observed of the requests that servers take now: P traces, G rollouts of each."""

    rows: Tensor
    """int64 [P]."""
    left_ms: Tensor
    """float64 [P, G], what waiting left of the deadline; may be negative."""
    backlog: Tensor
    """int64 [P, G], how many wait behind."""


class Queue:
    """G rollouts of each of P traces, request by request: `head`, then `serve`, T times.

    Args:
        group: G. All rollouts of a trace have the same arrivals, deadlines and measurements.
        servers: how many serve the queue.
        cost_ms: what a decision takes, before the request is served.

    Raises:
        InputError: no server, or arrivals as `check_arrivals` refuses them.
    """

    def __init__(
        self, table: ProfileTable, traces: Traces, group: int = 1, servers: int = 1, cost_ms: float = 0.0
    ) -> None:
        at_least("servers", servers, 1)
        check_arrivals(traces.arrivals_ms, "the trace")
        self.traces, self.cost_ms, self.place = traces, cost_ms, 0
        self.rewards = RewardTable(table, TRAINING_REWARD)
        self.free_ms = torch.zeros(len(traces.rows), group, servers, dtype=torch.float64)

    @property
    def over(self) -> bool:
        """Whether all requests were served."""
        return self.place == self.traces.rows.shape[1]

    def head(self) -> Head:
        """The next request of every trace, at the moment when a server takes it. Raises InputError: `over`."""
        if self.over:
            raise InputError("the trace has ended: every request was served")
        arrivals, now = self.traces.arrivals_ms, self.begins_ms()
        arrived = torch.searchsorted(arrivals, now, right=True)
        left = self.traces.deadlines_ms[:, self.place, None] - (now - arrivals[:, self.place, None])
        return Head(self.traces.rows[:, self.place], left, arrived - self.place - 1)

    def begins_ms(self) -> Tensor:
        """When a server takes the next request, float64 [P, G]."""
        return torch.maximum(self.traces.arrivals_ms[:, self.place, None], self.free_ms.amin(-1))

    def serve(self, configuration: Tensor) -> Tensor:
        """Serve the next request of every trace under configurations, int64 [P, G], and return the utilities [P, G].
        Raises InputError: one that does not exist or was never profiled for its sample."""
        rows, begins = self.traces.rows[:, self.place], self.begins_ms()
        repeats = self.traces.repeats[:, self.place, None].expand_as(configuration)
        if not ((configuration >= 0) & (configuration < self.rewards.accuracy.shape[1])).all():
            raise InputError(f"configuration: must be from 0 to {self.rewards.accuracy.shape[1] - 1}")
        accuracy, latency = self.rewards.outcome(rows, configuration, repeats)
        if latency.isnan().any():
            raise InputError("configuration: was never profiled for its sample; choose with Forecast.choose")
        took = latency.double() + self.cost_ms
        waited = begins - self.traces.arrivals_ms[:, self.place, None]
        gained = utility(accuracy, waited + took, self.traces.deadlines_ms[:, self.place, None])
        self.free_ms.scatter_(-1, self.free_ms.argmin(-1, keepdim=True), (begins + took).unsqueeze(-1))
        self.place += 1
        return gained
