"""How a state points at candidates: the networks of the selector, behind the interface of
`PointerNetwork`.

A query and its pool are encoded once, whatever the number of sequences: into a start state and one
key for each candidate. A sequence then points (logits = cosine of its state and the keys /
temperature) and moves its state on by the key of what was chosen, with nothing of the pool computed
again. What makes sequences of it stands in `knobwise.agents.selector.sequences`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from knobwise.agents.selector.settings import SelectorConfig

POSITIONS = 32
"""Steps that a causal transformer tells apart; later ones share the position of the last."""


class Encoded(NamedTuple):
    """P queries with their pools, ready to be pointed at: where every sequence of a query starts
    [P, h], keys of length 1, [P, N, h], and which places of the pool hold a candidate, bool [P,
    N]."""

    state: Tensor
    keys: Tensor
    mask: Tensor


def unit(x: Tensor) -> Tensor:
    """Scaled to length 1 along the last axis."""
    return F.normalize(x, dim=-1, eps=1e-6)


class PointerNetwork(nn.Module):
    """v2: one space for queries and candidates, in which a query attends to its pool before it
    points at it.

    J sequences of each query go side by side; their states [P, J, h] are also the directions that
    they point in. The states of another version may be anything [P, J, …] that its `point` makes a
    direction of.
    """

    def __init__(self, config: SelectorConfig, features: int) -> None:
        super().__init__()
        self.temperature = config.temperature
        self.inputs: nn.Module = nn.Linear(features, config.width, bias=False)
        self.layers = nn.ModuleList(CrossAttention(config) for _ in range(config.depth))
        self.query, self.candidate = (inner_projection(config) for _ in range(2))
        self.advance_by = StateUpdate(config)

    def encode(self, query: Tensor, pool: Tensor, mask: Tensor) -> Encoded:
        """Features of queries [P, d] and of their candidates [P, N, d], mask bool [P, N]."""
        state = self.inputs(query)
        items = self.inputs(pool)
        for layer in self.layers:
            state = layer(state, items, mask)
        return Encoded(unit(self.query(state)), unit(self.candidate(items)), mask)

    def start(self, encoded: Encoded, sequences: int) -> Tensor:
        """The state of J sequences in which nothing was chosen yet."""
        return encoded.state.unsqueeze(1).expand(-1, sequences, -1)

    def advance(self, state: Tensor, chosen: Tensor) -> Tensor:
        """The state after candidates with these keys, [P, J, h], were chosen."""
        return self.advance_by(state, chosen)

    def point(self, state: Tensor) -> Tensor:
        """The direction of a state, of length 1, [P, J, h]."""
        return state

    def states(self, encoded: Encoded, chosen: Tensor) -> Tensor:
        """The directions before each step of known sequences, [P, J, T, h], from the keys of what
        they chose in all steps but the last, [P, J, T − 1, h]."""
        states = [self.start(encoded, chosen.shape[1])]
        for keys in chosen.unbind(2):
            states.append(self.advance(states[-1], keys))
        return torch.stack(states, 2)

    def logits(self, states: Tensor, encoded: Encoded) -> Tensor:
        """States [P, *, h] → logits [P, *, N]; places without a candidate are not masked here."""
        flat = states.flatten(1, -2) @ encoded.keys.mT / self.temperature
        return flat.unflatten(1, states.shape[1:-1])


class BiEncoder(PointerNetwork):
    """v1: an MLP for the query and one for the candidates; the logits are bilinear in what they
    give.

    The state s moves on by the key c of what was chosen to norm(a·s + (1 − a)·c), a = sigmoid(a
    learned number), 0.6 at first. With the features' width it has the original's parameters
    (1,054,721 at 512).
    """

    def __init__(self, config: SelectorConfig, features: int) -> None:
        super().__init__(replace(config, version="v2", layers=0, heads=1), features)
        del self.advance_by
        self.inputs = nn.Identity()
        self.query, self.candidate = (two_layers(config, features) for _ in range(2))
        self.gate = nn.Parameter(torch.tensor(0.6).logit())

    def advance(self, state: Tensor, chosen: Tensor) -> Tensor:
        return unit(torch.lerp(chosen, state, self.gate.sigmoid()))


class CausalTransformer(PointerNetwork):
    """v0 and v3: a causal transformer reads [query; chosen; chosen; …] and points with what it read
    last.

    As in GPT-2 (Radford et al. 2019) positions are learned, each block is normalised before, and
    one space holds what is read and what is pointed at. Words are demonstrations: they are made
    from features and not looked up by an index, so that it serves any bank. In v3 the query has
    attended to its pool before. A state is everything read so far, [P, J, t, h].
    """

    def __init__(self, config: SelectorConfig, features: int) -> None:
        if config.version == "v3":
            pool_layers = config.depth
        else:
            pool_layers = 0
        super().__init__(replace(config, version="v2", layers=pool_layers), features)
        del self.advance_by
        self.positions = nn.Parameter(0.02 * torch.randn(POSITIONS, config.width))
        block = nn.TransformerEncoderLayer(
            config.width,
            config.heads,
            4 * config.width,
            config.dropout,
            "gelu",
            batch_first=True,
            norm_first=True,
        )
        norm = nn.LayerNorm(config.width)
        self.blocks = nn.TransformerEncoder(block, config.depth, norm, enable_nested_tensor=False)

    def start(self, encoded: Encoded, sequences: int) -> Tensor:
        return super().start(encoded, sequences).unsqueeze(2)

    def advance(self, state: Tensor, chosen: Tensor) -> Tensor:
        return torch.cat([state, chosen.unsqueeze(2)], 2)

    def point(self, state: Tensor) -> Tensor:
        return self._read(state)[:, :, -1]

    def states(self, encoded: Encoded, chosen: Tensor) -> Tensor:
        return self._read(torch.cat([self.start(encoded, chosen.shape[1]), chosen], 2))

    def _read(self, words: Tensor) -> Tensor:
        """[P, J, t, h] → the direction after each word, [P, J, t, h]."""
        length = words.shape[2]
        steps = torch.arange(length, device=words.device)
        later = steps > steps.unsqueeze(1)
        placed = words + self.positions[steps.clamp_max(POSITIONS - 1)]
        read = self.blocks(placed.flatten(0, 1), mask=later, is_causal=True)
        return unit(read.unflatten(0, words.shape[:2]))


NETWORKS = {"v0": CausalTransformer, "v1": BiEncoder, "v2": PointerNetwork, "v3": CausalTransformer}
"""The network of each `selector.version`."""


class CrossAttention(nn.Module):
    """One query attends to its N candidates; residual and LayerNorm after it (Vaswani et al. 2017,
    equation 1).

    With a single query q the key's matrix is applied to q and not to every candidate, (W_k x)·q =
    x·(W_kᵀ q), and the value's matrix to the mean of the candidates. The key's bias, which
    attention has by custom, would shift all scores alike and cancels in the softmax: it is there,
    and never learns.
    """

    def __init__(self, config: SelectorConfig) -> None:
        super().__init__()
        self.heads = config.heads
        width = config.width
        self.query, self.key, self.value, self.outer = (nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(config.dropout)
        self.norm = nn.LayerNorm(width)

    def forward(self, state: Tensor, items: Tensor, mask: Tensor) -> Tensor:
        """[P, h], [P, N, h] and bool [P, N] → [P, h]."""
        queries, width = state.shape
        size = width // self.heads
        query = self.query(state).view(queries, self.heads, size).transpose(0, 1)
        direction = (query @ self.key.weight.view(self.heads, size, width)).transpose(
            0, 1
        )  # [P, heads, h]
        lowest = torch.finfo(items.dtype).min  # not −inf: a pool may be empty
        scores = (direction @ items.mT / math.sqrt(size)).masked_fill(~mask.unsqueeze(1), lowest)
        seen = (scores.softmax(-1) @ items).transpose(0, 1)  # [heads, P, h]
        value = (
            (seen @ self.value.weight.view(self.heads, size, width).mT)
            .transpose(0, 1)
            .reshape(queries, width)
        )
        return self.norm(state + self.dropout(self.outer(value + self.value.bias)))


class StateUpdate(nn.Module):
    """norm(g·s + (1 − g)·x) with x = c (`convex`) or tanh(U[s; c]) (`additive`), s the state and c
    the chosen key.

    g = sigmoid(W[s; c]), h numbers.
    """

    def __init__(self, config: SelectorConfig) -> None:
        super().__init__()
        self.additive = config.update == "additive"
        self.linear = nn.Linear(2 * config.width, (1 + self.additive) * config.width)

    def forward(self, state: Tensor, chosen: Tensor) -> Tensor:
        """[P, J, h] and [P, J, h] → [P, J, h]."""
        gate, *turned = self.linear(torch.cat([state, chosen], -1)).chunk(1 + self.additive, -1)
        return unit(
            torch.lerp(turned[0].tanh() if self.additive else chosen, state, gate.sigmoid())
        )


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


def two_layers(config: SelectorConfig, features: int) -> nn.Module:
    """d → h, for the query or for the candidates of v1."""
    return nn.Sequential(
        nn.Linear(features, config.width),
        nn.LayerNorm(config.width),
        nn.ReLU(),
        nn.Dropout(config.dropout),
        nn.Linear(config.width, config.width),
        nn.LayerNorm(config.width),
    )
