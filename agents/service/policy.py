"""The price of a millisecond, from the time left, the backlog and the recent load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn

from knobwise.agents.serving.distillation import Lessons
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.common.errors import InputError
from knobwise.envs.service.queue import Forecast
from knobwise.envs.tables.profile_table import ProfileTable

OBSERVED = ("left_ms", "backlog", "load")
"""What the policy reads of a request, as `ServiceQueue` observes it."""
SPREAD = 1.5
"""Standard deviation of the draws, in levels. Fixed: free logits of single levels stop exploring long before they know
which one is best."""
SCALE = 4.0
"""Levels for one unit of the network's output."""


class PricePolicy(nn.Module):
    """A network that predicts a level among K rising prices; draws are normal around it, cut to the levels.

    Args:
        prices: float [K], in utility per ms.
        service_ms: mean time of a request, the unit of the time left.
    """

    prices: Tensor

    def __init__(self, prices: Tensor, service_ms: float, hidden: int = 64) -> None:
        super().__init__()
        self.service_ms, self.hidden = service_ms, hidden
        self.register_buffer("prices", prices)
        first, second, last = nn.Linear(4, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.network = nn.Sequential(first, nn.SiLU(), second, nn.SiLU(), last)

    def level(self, left_ms: Tensor, backlog: Tensor, load: Tensor) -> Tensor:
        """The best level, a real number, [*]."""
        left = (left_ms / self.service_ms).clamp(-1, 6)
        x = torch.stack([left, backlog.clamp_max(10) / 3, (backlog > 0).float(), load.clamp_max(3)], -1)
        return len(self.prices) / 3 + SCALE * self.network(x).squeeze(-1)

    def forward(self, left_ms: Tensor, backlog: Tensor, load: Tensor) -> Tensor:
        """Float [*] each → logits [*, K]."""
        distance = torch.arange(len(self.prices), device=left_ms.device) - self.level(left_ms, backlog, load)[..., None]
        return -0.5 * (distance / SPREAD).square()

    @torch.no_grad()
    def price(self, left_ms: Tensor, backlog: Tensor, load: Tensor) -> Tensor:
        """The most probable price, in utility per ms, [*]."""
        return self.prices[self(left_ms, backlog, load).argmax(-1)]

    def actor(self) -> ProbabilisticTensorDictSequential:
        """The policy as TorchRL wants it: it draws `action`."""
        draw = ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
            log_prob_key="action_log_prob",
        )
        return ProbabilisticTensorDictSequential(TensorDictModule(self, [*OBSERVED], ["logits"]), draw)

    def rule(self) -> Callable[[float, float, float, NDArray[Any], NDArray[Any]], int]:
        """The decision for one request, in NumPy: time left in ms, how many wait behind, the recent load, and of each
        configuration the expected utility under the time left and the expected latency in ms, [C] each → its index."""
        layers = [
            (m.weight.detach().numpy(), m.bias.detach().numpy()) for m in self.network if isinstance(m, nn.Linear)
        ]
        prices, service_ms = self.prices.numpy(), self.service_ms

        def choose(left_ms: float, backlog: float, load: float, utility: Any, latency_ms: Any) -> int:
            left = min(max(left_ms / service_ms, -1.0), 6.0)
            x = np.array([left, min(backlog, 10) / 3, backlog > 0, min(load, 3.0)], np.float32)
            for weight, bias in layers[:-1]:
                x = weight @ x + bias
                x = x / (1 + np.exp(-x))
            weight, bias = layers[-1]
            level = round(len(prices) / 3 + SCALE * float((weight @ x + bias)[0]))
            return int((utility - prices[min(max(level, 0), len(prices) - 1)] * latency_ms).argmax())

        return choose

    def plain(self) -> dict[str, Any]:
        """Tensors and plain values, for a checkpoint."""
        return {"service_ms": self.service_ms, "hidden": self.hidden, "state": self.state_dict()}

    @classmethod
    def restored(cls, plain: dict[str, Any]) -> Self:
        """The inverse of `plain`, in eval mode."""
        policy = cls(plain["state"]["prices"], plain["service_ms"], plain["hidden"])
        policy.load_state_dict(plain["state"])
        return policy.eval()


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
