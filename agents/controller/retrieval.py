"""Retrieval: what came of the most similar training samples, by attention with a learned metric."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from knobwise.agents.controller.heads import MemberLinear
from knobwise.envs.configurations.budgets import log_ms

WIDTH = 16


class Retrieval(nn.Module):
    """Attention over R remembered samples, w = softmax(−‖Wx − Wx_i‖²), and a gate that says how much it counts.

    A member never retrieves what was held out of it, and no sample retrieves itself: in training it is left out.

    Args:
        features: d.
        configurations: C.
        members: M.
        samples: R.
    """

    points: Tensor
    accuracy: Tensor
    log_latency: Tensor
    usable: Tensor

    def __init__(self, features: int, configurations: int, members: int, samples: int) -> None:
        super().__init__()
        self.metric = MemberLinear(members, features, WIDTH)
        self.gate = nn.Parameter(torch.full((members, 1, 1), -1.0))
        self.register_buffer("points", torch.zeros(samples, features))
        self.register_buffer("accuracy", torch.zeros(samples, configurations))
        self.register_buffer("log_latency", torch.zeros(samples, configurations))
        self.register_buffer("usable", torch.zeros(members, samples, dtype=torch.bool))

    @torch.no_grad()
    def remember(self, x: Tensor, accuracy: Tensor, latency_ms: Tensor, own: Tensor) -> None:
        """Keep R of n samples: features [n, d], accuracy and latency [n, C] (NaN where not profiled), and own bool
        [M, n], which of them each member is fitted on. Holes are filled with the configuration's mean."""
        kept = torch.randperm(len(x))[: len(self.points)]
        log_latency = log_ms(latency_ms)
        for target, values in ((self.accuracy, accuracy), (self.log_latency, log_latency)):
            target[: len(kept)] = torch.where(values.isnan(), values.nanmean(0).nan_to_num(), values)[kept]
        self.points[: len(kept)] = x[kept]
        self.usable[:, : len(kept)] = own[:, kept]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features [M, n, d] → how much it counts [M, n, 1], 0 where nothing may be retrieved; accuracy and log-latency
        [M, n, C]."""
        members = len(self.usable)
        asked, known = self.metric(x), self.metric(self.points.expand(members, -1, -1))
        squares = asked.square().sum(-1, keepdim=True) + known.square().sum(-1).unsqueeze(1)
        distance = (squares - 2 * asked @ known.transpose(1, 2)).clamp_min(0)
        itself = (self._mark(x).unsqueeze(-1) - self._mark(self.points)).abs() < 1e-9
        allowed = self.usable.unsqueeze(1) & ~itself
        weights = (-distance).masked_fill(~allowed, -1e9).softmax(-1)
        share = self.gate.sigmoid() * allowed.any(-1, keepdim=True)
        return share, weights @ self.accuracy, weights @ self.log_latency

    @staticmethod
    def _mark(x: Tensor) -> Tensor:
        """One number by which the same features are known again, [*, d] → float64 [*]."""
        places = torch.arange(1, x.shape[-1] + 1, dtype=torch.float64, device=x.device)
        return (x.double() * (places * 0.6180339887).frac()).sum(-1)
