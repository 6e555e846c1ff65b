"""Several networks side by side: M of them in one module, each fitted on samples of its own.

Every parameter has a first axis M, so a layer of all networks is one batched product. There are
several where each is judged on samples that were held out of it (`policy.fold_networks`); the last,
which is fitted on all samples, is deployed. With M = 1 this is a plain network.

In training each context belongs to one network. They are drawn for the networks in turn: element i
of a flat batch is for network i mod M, and a buffer holds [P, M]. `ContextSampler` draws them so,
and `by_network` and `in_turn` convert between the two orders.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class StackedLinear(nn.Module):
    """M linear layers side by side: [M, n, inputs] → [M, n, outputs]; `zero` starts them at 0."""

    def __init__(self, networks: int, inputs: int, outputs: int, zero: bool = False) -> None:
        super().__init__()
        bound = 0.0 if zero else max(inputs, 1) ** -0.5
        self.weight = nn.Parameter(torch.empty(networks, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(networks, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


def by_network(values: Tensor, networks: int) -> Tensor:
    """Return numbers of contexts in turn, [*], as those of each network, [M, n]."""
    return values.reshape(-1, networks).T.contiguous()


def in_turn(values: Tensor, shape: torch.Size) -> Tensor:
    """Return what each network computed, [M, n, C], for contexts in turn, [*shape, C]."""
    return values.transpose(0, 1).reshape(*shape, -1)


def for_each(values: Tensor | None, shape: torch.Size, networks: int) -> Tensor | None:
    """Return numbers of requests, [*shape, …], for every network alike, [M, n, …]; None for
    None."""
    if values is None:
        return None
    n = math.prod(shape)
    rest = values.shape[len(shape) :]
    return values.reshape(n, *rest).expand(networks, n, *rest)
