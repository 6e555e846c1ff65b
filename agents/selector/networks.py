"""How a state points at candidates: the networks of the selector, behind one interface.

A query and its pool are encoded once, whatever the number of sequences: into a start state and one key for each
candidate. A sequence then points (logits = cosine of its state and the keys / temperature) and moves its state on by
the key of what was chosen, with nothing of the pool computed again. `v0` is a causal transformer over what was chosen,
`v1` a bi-encoder, `v2` lets the query attend to its pool first. What makes sequences of it stands in
`knobwise.agents.selector.sequences`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from knobwise.agents.selector.settings import SelectorConfig
from knobwise.common.errors import InputError

LONGEST = 32
"""Most shots that `v0` has positions for; the others know no such bound."""


class Encoded(NamedTuple):
    """P queries with their pools, ready to be pointed at: where every sequence of a query starts [P, h], keys of length
    1, [P, N, h], and which places of the pool hold a candidate, bool [P, N]."""

    state: Tensor
    keys: Tensor
    mask: Tensor


def unit(x: Tensor) -> Tensor:
    """Scaled to length 1 along the last axis."""
    return F.normalize(x, dim=-1, eps=1e-6)


class PointerNetwork(nn.Module):
    """What sequences need to know of a network. J sequences of each query go side by side.

    A state is any tensor [P, J, …] of the network's own; a direction [P, J, h] is what it points with.
    """

    inputs: nn.Module
    layers: nn.ModuleList
    query: nn.Module
    candidate: nn.Module
    advance_by: nn.Module

    def __init__(self, config: SelectorConfig) -> None:
        super().__init__()
        self.temperature = config.temperature

    def encode(self, query: Tensor, pool: Tensor, mask: Tensor) -> Encoded:
        """Features of queries [P, d] and of their candidates [P, N, d], mask bool [P, N]."""
        state, items = self.inputs(query), self.inputs(pool)
        for layer in self.layers:
            state = layer(state, items, mask)
        return Encoded(unit(self.query(state)), unit(self.candidate(items)), mask)

    def advance(self, state: Tensor, chosen: Tensor) -> Tensor:
        """The state after candidates with these keys, [P, J, h], were chosen."""
        return self.advance_by(state, chosen)

    def start(self, encoded: Encoded, sequences: int) -> Tensor:
        """The state of J sequences in which nothing was chosen yet."""
        return encoded.state.unsqueeze(1).expand(-1, sequences, -1)

    def point(self, state: Tensor) -> Tensor:
        """The direction [P, J, h] of a state."""
        return state

    def directions(self, encoded: Encoded, chosen: Tensor) -> Tensor:
        """The directions before each step of known sequences, [P, J, T, h], from the keys of what they chose in all
        steps but the last, [P, J, T − 1, h]."""
        states = [self.start(encoded, chosen.shape[1])]
        for keys in chosen.unbind(2):
            states.append(self.advance(states[-1], keys))
        return torch.stack([self.point(state) for state in states], 2)

    def logits(self, directions: Tensor, encoded: Encoded) -> Tensor:
        """Directions [P, *, h] → logits [P, *, N]; places without a candidate are not masked here."""
        flat = directions.flatten(1, -2) @ encoded.keys.mT / self.temperature
        return flat.unflatten(1, directions.shape[1:-1])


class BiEncoder(PointerNetwork):
    """v1: two networks, one for the query and one for its candidates."""

    def __init__(self, config: SelectorConfig, features: int) -> None:
        super().__init__(config)
        self.inputs, self.layers = nn.Identity(), nn.ModuleList()
        self.query, self.candidate = (self._projection(config, features) for _ in range(2))
        self.advance_by = StateUpdate(config, scalar_gate=True)

    @staticmethod
    def _projection(config: SelectorConfig, features: int) -> nn.Module:
        if config.projection == "linear":
            return nn.Linear(features, config.width)
        return nn.Sequential(
            nn.Linear(features, config.width),
            nn.LayerNorm(config.width),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.width, config.width),
            nn.LayerNorm(config.width),
        )


class CrossAttentive(PointerNetwork):
    """v2: one space for both, in which the query attends to its pool before it points at it."""

    def __init__(self, config: SelectorConfig, features: int) -> None:
        super().__init__(config)
        self.inputs = nn.Linear(features, config.width, bias=False)
        self.layers = nn.ModuleList(CrossAttention(config) for _ in range(config.layers))
        self.query, self.candidate = (inner_projection(config) for _ in range(2))
        self.advance_by = StateUpdate(config, scalar_gate=False)


class CausalTransformer(PointerNetwork):
    """v0: a causal language model whose words are the demonstrations, [query; chosen; chosen; …].

    As GPT-2 (Radford et al. 2019) it is normalised before each block and points with the embeddings that it reads. They
    are made from features and not looked up by index, so that it serves any bank. The state is the tokens so far;
    `config.update` plays no part.
    """

    def __init__(self, config: SelectorConfig, features: int) -> None:
        super().__init__(config)
        width = config.width
        self.inputs, self.layers = nn.Linear(features, width, bias=False), nn.ModuleList()
        self.query, self.candidate = (inner_projection(config) for _ in range(2))
        self.positions = nn.Parameter(torch.randn(LONGEST, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, config.heads, 4 * width, config.dropout, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, config.layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def start(self, encoded: Encoded, sequences: int) -> Tensor:
        return super().start(encoded, sequences).unsqueeze(2)

    def point(self, state: Tensor) -> Tensor:
        return self._read(state)[:, :, -1]

    def advance(self, state: Tensor, chosen: Tensor) -> Tensor:
        return torch.cat([state, chosen.unsqueeze(2)], 2)

    def directions(self, encoded: Encoded, chosen: Tensor) -> Tensor:
        return self._read(torch.cat([self.start(encoded, chosen.shape[1]), chosen], 2))

    def _read(self, tokens: Tensor) -> Tensor:
        """All tokens at once: [P, J, t, h] → the direction after each of them, [P, J, t, h]."""
        length = tokens.shape[2]
        if length > LONGEST:
            raise InputError(
                f"shots={length}: selector.version=v0 has positions for {LONGEST}; ask for fewer, or use v2"
            )
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        read = self.blocks((tokens + self.positions[:length]).flatten(0, 1), mask=causal, is_causal=True)
        return unit(read.unflatten(0, tokens.shape[:2]))


class CrossAttention(nn.Module):
    """One query attends to its N candidates; residual and LayerNorm after it (Vaswani et al. 2017, equation 1).

    With a single query q the key's matrix is applied to q and not to every candidate, (W_k x)·q = x·(W_kᵀ q), and the
    value's matrix to the mean of the candidates. The key's bias, which attention has by custom, would shift all scores
    alike and cancels in the softmax: it is there, and never learns.
    """

    def __init__(self, config: SelectorConfig) -> None:
        super().__init__()
        self.heads, width = config.heads, config.width
        self.query, self.key, self.value, self.outer = (nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(config.dropout)
        self.norm = nn.LayerNorm(width)

    def forward(self, state: Tensor, items: Tensor, mask: Tensor) -> Tensor:
        """[P, h], [P, N, h] and bool [P, N] → [P, h]."""
        queries, width = state.shape
        size = width // self.heads
        query = self.query(state).view(queries, self.heads, size).transpose(0, 1)
        direction = (query @ self.key.weight.view(self.heads, size, width)).transpose(0, 1)  # [P, heads, h]
        lowest = torch.finfo(items.dtype).min  # not −inf: a pool may be empty
        scores = (direction @ items.mT / math.sqrt(size)).masked_fill(~mask.unsqueeze(1), lowest)
        seen = (scores.softmax(-1) @ items).transpose(0, 1)  # [heads, P, h]
        value = (seen @ self.value.weight.view(self.heads, size, width).mT).transpose(0, 1).reshape(queries, width)
        return self.norm(state + self.dropout(self.outer(value + self.value.bias)))


class StateUpdate(nn.Module):
    """norm(g·s + (1 − g)·x) with x = c (`convex`) or tanh(U[s; c]) (`additive`), s the state and c the chosen key.

    g = sigmoid(W[s; c]), h numbers; with `scalar_gate` the sigmoid of a single learned number, .6 at first.
    """

    def __init__(self, config: SelectorConfig, scalar_gate: bool) -> None:
        super().__init__()
        self.additive = config.update == "additive"
        self.parts = int(not scalar_gate) + int(self.additive)
        self.linear = nn.Linear(2 * config.width, self.parts * config.width) if self.parts else None
        self.gate = nn.Parameter(torch.tensor(0.6).logit()) if scalar_gate else None

    def forward(self, state: Tensor, chosen: Tensor) -> Tensor:
        """[P, J, h] and [P, J, h] → [P, J, h]."""
        parts: tuple[Tensor, ...] = ()
        if self.linear is not None:
            parts = self.linear(torch.cat([state, chosen], -1)).chunk(self.parts, -1)
        gate = (parts[0] if self.gate is None else self.gate).sigmoid()
        return unit(torch.lerp(parts[-1].tanh() if self.additive else chosen, state, gate))


def inner_projection(config: SelectorConfig) -> nn.Module:
    """h → h, for the query or for the candidates."""
    width = config.width
    if config.projection == "linear":
        linear = nn.Linear(width, width, bias=False)
        with torch.no_grad():  # near the identity: before training, alike is what points at alike
            linear.weight.copy_(torch.eye(width) + 0.01 * torch.randn(width, width))
        return linear
    return nn.Sequential(
        nn.Linear(width, 2 * width),
        nn.GELU(),
        nn.LayerNorm(2 * width),
        nn.Dropout(config.dropout),
        nn.Linear(2 * width, width, bias=False),
    )


def pointer_network(config: SelectorConfig, features: int) -> PointerNetwork:
    """The network of a version, for embeddings of width `features`."""
    versions = {"v0": CausalTransformer, "v1": BiEncoder, "v2": CrossAttentive}
    return versions[config.version](config, features)
