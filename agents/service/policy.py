"""The price of a millisecond, from the time left, the backlog and the recent load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn

OBSERVED = ("left_ms", "backlog", "load")
"""What the policy reads of a request, as `ServiceQueue` observes it."""
SPREAD = (1.5, 0.5)
"""Standard deviation of the draws at the beginning and the end of training, in levels. It is not learned: free logits
of single levels stop exploring long before they know which one is best."""
SCALE = 4.0
"""Levels for one unit of the network's output."""


class PricePolicy(nn.Module):
    """A price and a price per waiting request, and a network that shifts their sum by levels, of K rising prices. Draws
    are normal around the level, cut to the levels.

    Args:
        prices: float [K], in utility per ms.
        service_ms: mean time of a request, the unit of the time left.
        rule: the price and the price per waiting request that training starts from.
    """

    prices: Tensor

    def __init__(self, prices: Tensor, service_ms: float, rule: tuple[float, float], hidden: int = 64) -> None:
        super().__init__()
        self.service_ms, self.start, self.hidden, self.spread = service_ms, rule, hidden, SPREAD[0]
        self.register_buffer("prices", prices)
        last = nn.Linear(hidden, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.network = nn.Sequential(nn.Linear(4, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), last)

    def level(self, left_ms: Tensor, backlog: Tensor, load: Tensor) -> Tensor:
        """Where between the prices the best one lies, a real number, below 0 and above K − 1 beyond them, [*]."""
        start = (self.start[0] + self.start[1] * backlog).clamp(self.prices[0], self.prices[-1])
        above = torch.searchsorted(self.prices, start.contiguous()).clamp_min(1)
        below = self.prices[above - 1]
        place = above - 1 + (start - below) / (self.prices[above] - below)
        x = [(left_ms / self.service_ms).clamp(-1, 6), backlog.clamp_max(10) / 3, (backlog > 0).float()]
        shift = self.network(torch.stack([*x, load.clamp_max(3)], -1)).squeeze(-1)
        return place + SCALE * shift

    def forward(self, left_ms: Tensor, backlog: Tensor, load: Tensor) -> Tensor:
        """Float [*] each → logits [*, K]."""
        levels = torch.arange(len(self.prices), device=left_ms.device)
        return -0.5 * ((levels - self.level(left_ms, backlog, load).unsqueeze(-1)) / self.spread).square()

    @torch.no_grad()
    def price(self, left_ms: Tensor, backlog: Tensor, load: Tensor) -> Tensor:
        """The price at the level, in utility per ms, [*]."""
        level = self.level(left_ms, backlog, load).clamp(0, len(self.prices) - 1)
        below = level.long().clamp_max(len(self.prices) - 2)
        return torch.lerp(self.prices[below], self.prices[below + 1], level - below)

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
        linear = [layer for layer in self.network if isinstance(layer, nn.Linear)]
        layers = [(each.weight.detach().numpy(), each.bias.detach().numpy()) for each in linear]
        prices, service_ms, levels = self.prices.numpy(), self.service_ms, np.arange(len(self.prices))

        def choose(left_ms: float, backlog: float, load: float, utility: Any, latency_ms: Any) -> int:
            left = min(max(left_ms / service_ms, -1.0), 6.0)
            x = np.array([left, min(backlog, 10) / 3, backlog > 0, min(load, 3.0)], np.float32)
            for weight, bias in layers[:-1]:
                x = weight @ x + bias
                x = x / (1 + np.exp(-x))
            weight, bias = layers[-1]
            start = np.interp(self.start[0] + self.start[1] * backlog, prices, levels)
            price = np.interp(start + SCALE * float((weight @ x + bias)[0]), levels, prices)
            return int((utility - price * latency_ms).argmax())

        return choose

    def plain(self) -> dict[str, Any]:
        """Tensors and plain values, for a checkpoint."""
        about = {"service_ms": self.service_ms, "rule": list(self.start), "hidden": self.hidden}
        return about | {"state": self.state_dict()}

    @classmethod
    def restored(cls, plain: dict[str, Any]) -> Self:
        """The inverse of `plain`, in eval mode."""
        about = plain["service_ms"], tuple(plain["rule"]), plain["hidden"]
        policy = cls(plain["state"]["prices"], *about)
        policy.load_state_dict(plain["state"])
        return policy.eval()
