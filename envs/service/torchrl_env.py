"""Requests that wait for one another, as a native batched TorchRL environment: an episode is one trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.service.arrivals import TraceSampler
from knobwise.envs.service.queue import Forecast, Head, Queue
from knobwise.envs.tables.profile_table import ProfileTable

PRICES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.28, 0.35, 0.44, 0.55, 0.67, 0.8, 1.0, 1.25, 1.6, 2.2, 3.2)
"""Of the time that a server needs for a request on average, in utility."""


class ServiceQueue(EnvBase):
    """P traces of requests at once, each served by G rollouts: choose the price of a millisecond for every request.

    Requests wait for one another, first come, first served; deadlines count from arrival. The configuration of a
    request is the one with the best expected utility under the time left − price · expected latency. All rollouts of a
    trace have the same arrivals, deadlines and measurements: they are the group of GRPO.

    Observation, of the request that a server takes now, [P, G] each: `row` int64, of the table; `left_ms` float32, what
    waiting left of its deadline, negative where it is late already; `waited_ms`, `backlog`, how many wait behind, and
    `load`, the recent load, 1 being what the servers can serve, float32. After a step also `latency_ms` and `accuracy`
    of the request served, before it 0.

    Action: `action` int64 [P, G], the index of a price. Reward: utility, float32 [P, G, 1]: the accuracy if the answer
    came before the deadline, else 0. An episode ends with its trace.

    Args:
        table: the profile. forecast: what is expected of each sample; None for averages over `rows`, which know nothing
            of the request.
        batch_size, group_size: P, G.
        loads: of the traces in turn, see `Load`.
        requests, servers, rows, seed: T, the number of servers; see `TraceSampler`.
        deadlines_ms: float [B], drawn evenly; None for twice the default budgets of the table.
        prices: float [K], in utility per mean service; None for `PRICES`.
        cost_ms: what a decision takes.

    Raises:
        InputError: a setting that cannot work; by `step`, an action that is no price, or a trace that has ended.

    Examples:
        >>> from knobwise.envs import ServiceQueue, builtin_profile
        >>> env = ServiceQueue(builtin_profile(), batch_size=3, group_size=2, requests=5, seed=0)
        >>> env.rollout(9)["next", "reward"].shape
        torch.Size([3, 2, 5, 1])
    """

    def __init__(
        self,
        table: ProfileTable,
        forecast: Forecast | None = None,
        *,
        batch_size: int = 1,
        group_size: int = 1,
        loads: Sequence[str | float] = (0.75,),
        requests: int = 200,
        servers: int = 1,
        deadlines_ms: Tensor | None = None,
        prices: Sequence[float] | None = None,
        rows: Tensor | None = None,
        seed: int | None = None,
        cost_ms: float = 0.0,
    ) -> None:
        super().__init__(batch_size=(batch_size, group_size))
        rows = torch.arange(table.num_samples) if rows is None else rows
        deadlines = 2 * default_budgets(table) if deadlines_ms is None else deadlines_ms
        self.table, self.forecast = table, Forecast.of_averages(table, rows) if forecast is None else forecast
        self.servers, self.cost_ms = servers, cost_ms
        self.service_ms = self.forecast.service_ms(rows, deadlines)
        self.gap_ms = self.service_ms / max(servers, 1)
        self.prices = torch.as_tensor(PRICES if prices is None else prices) / self.service_ms
        about: dict[str, Any] = {"requests": requests, "gap_ms": self.gap_ms, "deadlines_ms": deadlines}
        self.contexts = TraceSampler(table, loads, rows=rows, seed=seed, **about)
        shape = self.batch_size
        self.action_spec = Categorical(len(self.prices), shape=shape, dtype=torch.int64)
        self.reward_spec = Unbounded(shape=(*shape, 1))
        self.done_spec = Binary(shape=(*shape, 1), dtype=torch.bool)
        names = ("left_ms", "waited_ms", "backlog", "load", "latency_ms", "accuracy")
        self.observation_spec = Composite({name: Unbounded(shape=shape) for name in names}, shape=shape)
        self.observation_spec["row"] = Categorical(table.num_samples, shape=shape, dtype=torch.int64)
        self.queue = self._new_queue()

    def _new_queue(self) -> Queue:
        traces, group = self.contexts(self.batch_size[0]), self.batch_size[1]
        return Queue(self.table, traces, self.gap_ms, group, self.servers, self.cost_ms)

    def _observed(self, head: Head, reward: Tensor, **outcome: Tensor) -> TensorDict:
        over = torch.full((*self.batch_size, 1), self.queue.over)
        content: dict[str, Any] = {
            "row": head.rows.unsqueeze(1).repeat(1, self.batch_size[1]),
            "left_ms": head.left_ms.float(),
            "waited_ms": head.waited_ms.float(),
            "backlog": head.backlog.float(),
            "load": (self.gap_ms / head.gap_ms.clamp_min(1e-9)).float(),
            **outcome,
            "reward": reward,
            "done": over,
            "terminated": over.clone(),
        }
        return TensorDict(content, batch_size=self.batch_size)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        wanted = None if tensordict is None else tensordict.get("_reset", None)
        if wanted is not None and not wanted.all():
            raise InputError("reset: all traces of a ServiceQueue begin and end together")
        self.queue = self._new_queue()
        nothing = torch.zeros(self.batch_size)
        before = {"latency_ms": nothing, "accuracy": nothing.clone()}
        return self._observed(self.queue.head(), nothing.unsqueeze(-1), **before).exclude("reward")

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = tensordict["action"]
        if not ((action >= 0) & (action < len(self.prices))).all():
            raise InputError(f"action: must be the index of a price, from 0 to {len(self.prices) - 1}")
        head = self.queue.head()
        served = self.queue.serve(self.forecast.choose(head.rows, head.left_ms, self.prices[action]))
        after = head if self.queue.over else self.queue.head()
        outcome = {"latency_ms": served.latency_ms.float(), "accuracy": served.accuracy}
        return self._observed(after, served.utility.unsqueeze(-1), **outcome)

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.contexts.generator.manual_seed(seed)
