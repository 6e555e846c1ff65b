"""The networks of the selector, whose states point at candidates; see `PointerNetwork` for their
interface.

A query and its pool are encoded once, whatever the number of sequences: into a start state and a
key for each candidate. In each step a sequence points at a candidate (logits = cosine of its state
and the keys / temperature) and updates its state by the key of the chosen candidate, without
encoding the pool again. `knobwise.agents.selector.sequences` draws sequences by these networks.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from knobwise.agents.selector.settings import SelectorConfig
from knobwise.losses.dropout import Dropout, drops_out

POSITIONS = 32
"""Learned positions of a causal transformer; later steps share the last one."""


class Encoded(NamedTuple):
    """P queries with their encoded pools of N places."""

    state: Tensor
    """[P, h], the start state of every sequence of a query."""
    keys: Tensor
    """[P, N, h], a key of length 1 for each candidate."""
    mask: Tensor
    """bool [P, N], True where a place holds a candidate."""
    prior: Tensor | None = None
    """[P, N], added to the logits of every step."""


def unit(x: Tensor) -> Tensor:
    """Scale vectors along the last axis to length 1."""
    return F.normalize(x, dim=-1, eps=1e-6)


class PointerNetwork(nn.Module):
    """The network of v2: queries and candidates share a space, in which a query attends to its pool
    before it points at a candidate.

    J sequences of each query run side by side. Their states [P, J, h] are also the directions that
    they point in. Other versions may have states of another shape [P, J, …], which their `point`
    turns into directions.
    """

    def __init__(self, config: SelectorConfig, features: int) -> None:
        super().__init__()
        self.temperature = config.temperature
        self.inputs: nn.Module = nn.Linear(features, config.width, bias=False)
        self.layers = nn.ModuleList(CrossAttention(config) for _ in range(config.depth))
        self.query, self.candidate = (inner_projection(config) for _ in range(2))
        self.advance_by = StateUpdate(config)

    def encode(self, query: Tensor, pool: Tensor, mask: Tensor) -> Encoded:
        """Encode features of queries [P, d] and of their candidates [P, N, d], mask bool [P, N]."""
        # both into the space of the network
        state = self.inputs(query)
        items = self.inputs(pool)
        for layer in self.layers:
            state = layer(state, items, mask)
        return Encoded(unit(self.query(state)), unit(self.candidate(items)), mask)

    def start(self, encoded: Encoded, sequences: int) -> Tensor:
        """Repeat the encoded queries for J sequences: the state before the first step, [P, J,
        h]."""
        return encoded.state.unsqueeze(1).expand(-1, sequences, -1)

    def advance(self, state: Tensor, chosen: Tensor) -> Tensor:
        """Update the state after a step: keys of the chosen candidates [P, J, h] → state [P, J,
        h]."""
        return self.advance_by(state, chosen)

    def point(self, state: Tensor) -> Tensor:
        """Return the direction that a state points in, of length 1, [P, J, h]."""
        return state

    def states(self, encoded: Encoded, chosen: Tensor) -> Tensor:
        """Return the direction before each step of known sequences, [P, J, T, h].

        Args:
            encoded: the queries and their pools.
            chosen: keys of the candidates chosen in all steps but the last, [P, J, T − 1, h].
        """
        # step by step; subclasses may read all at once
        states = [self.start(encoded, chosen.shape[1])]
        for keys in chosen.unbind(2):
            states.append(self.advance(states[-1], keys))
        return torch.stack(states, 2)

    def logits(self, states: Tensor, encoded: Encoded) -> Tensor:
        """Return logits [P, *, N] of states [P, *, h], without masking empty places."""
        flat = states.flatten(1, -2) @ encoded.keys.mT / self.temperature
        if encoded.prior is not None:
            flat = flat + encoded.prior.unsqueeze(1)
        return flat.unflatten(1, states.shape[1:-1])


class BiEncoder(PointerNetwork):
    """The network of v1: an MLP for the query and one for the candidates; logits are bilinear in
    their outputs.

    The key c of the chosen candidate moves the state s to norm(a·s + (1 − a)·c), where a is the
    sigmoid of a learned number and 0.6 at first. At the width of the features it has as many
    parameters as the original (1,054,721 at 512).
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
    """The network of v0 and v3: a causal transformer reads [query; chosen; chosen; …], and its last
    output points at the next candidate.

    As in GPT-2 (Radford et al. 2019) positions are learned, each block normalises its input, and
    inputs and outputs share a space. Its tokens are demonstrations, made from features instead of
    looked up by an index, so that it serves any bank. In v3 the query first attends to its pool. A
    state is the sequence of all tokens so far, [P, J, t, h].
    """

    def __init__(self, config: SelectorConfig, features: int) -> None:
        layers = config.depth if config.version == "v3" else 0
        super().__init__(replace(config, version="v2", layers=layers), features)
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

    def _read(self, tokens: Tensor) -> Tensor:
        """Return the direction after each token, [P, J, t, h] → [P, J, t, h]."""
        steps = torch.arange(tokens.shape[2], device=tokens.device)
        later = steps > steps.unsqueeze(1)  # tokens that a step must not see
        inputs = tokens + self.positions[steps.clamp_max(POSITIONS - 1)]
        self.blocks.train(drops_out())  # torch's own blocks go by their mode
        outputs = self.blocks(inputs.flatten(0, 1), mask=later, is_causal=True)
        return unit(outputs.unflatten(0, tokens.shape[:2]))


NETWORKS = {"v0": CausalTransformer, "v1": BiEncoder, "v2": PointerNetwork, "v3": CausalTransformer}
"""The network of each `selector.version`."""


class CrossAttention(nn.Module):
    """Attention of a query to its N candidates, followed by residual and LayerNorm (Vaswani et al.
    2017, equation 1).

    Since there is a single query q, the key's matrix is applied to q instead of every candidate,
    (W_k x)·q = x·(W_kᵀ q), and the value's matrix to the weighted mean of the candidates. The key
    has a bias by custom, but it would shift all scores alike and cancel in the softmax: it is never
    used, and never learns.
    """

    def __init__(self, config: SelectorConfig) -> None:
        super().__init__()
        self.heads = config.heads
        width = config.width
        self.query, self.key, self.value, self.outer = (nn.Linear(width, width) for _ in range(4))
        self.dropout = Dropout(config.dropout)
        self.norm = nn.LayerNorm(width)

    def forward(self, state: Tensor, items: Tensor, mask: Tensor) -> Tensor:
        """Return new states [P, h].

        Args:
            state: [P, h], the queries.
            items: [P, N, h], their candidates.
            mask: bool [P, N], True where a place holds a candidate.
        """
        queries, width = state.shape
        size = width // self.heads
        # matrices by head
        key_weight = self.key.weight.view(self.heads, size, width)
        value_weight = self.value.weight.view(self.heads, size, width)
        query = self.query(state).view(queries, self.heads, size).transpose(0, 1)
        direction = (query @ key_weight).transpose(0, 1)  # [P, heads, h]
        lowest = torch.finfo(items.dtype).min  # not −inf: a pool may be empty
        scores = (direction @ items.mT / math.sqrt(size)).masked_fill(~mask.unsqueeze(1), lowest)
        attended = (scores.softmax(-1) @ items).transpose(0, 1)  # [heads, P, h]
        value = (attended @ value_weight.mT).transpose(0, 1).reshape(queries, width)
        return self.norm(state + self.dropout(self.outer(value + self.value.bias)))


class StateUpdate(nn.Module):
    """The update of a state s by the chosen key c, to norm(g·s + (1 − g)·x).

    x is c (`convex`) or tanh(U[s; c]) (`additive`). The gate g = sigmoid(W[s; c]) has h values.
    """

    def __init__(self, config: SelectorConfig) -> None:
        super().__init__()
        self.additive = config.update == "additive"
        self.linear = nn.Linear(2 * config.width, (1 + self.additive) * config.width)

    def forward(self, state: Tensor, chosen: Tensor) -> Tensor:
        """Return new states [P, J, h] from states [P, J, h] and chosen keys [P, J, h]."""
        # gate, and for `additive` the target
        outputs = self.linear(torch.cat([state, chosen], -1))
        if not self.additive:
            return unit(torch.lerp(chosen, state, outputs.sigmoid()))
        gate, target = outputs.chunk(2, -1)
        return unit(torch.lerp(target.tanh(), state, gate.sigmoid()))


def inner_projection(config: SelectorConfig) -> nn.Module:
    """Make a projection h → h, for the query or for the candidates: linear near the identity, or
    two layers with GELU."""
    width = config.width
    if config.projection == "linear":
        linear = nn.Linear(width, width, bias=False)
        # near the identity, so that before training a query points at similar candidates
        with torch.no_grad():
            linear.weight.copy_(torch.eye(width) + 0.01 * torch.randn(width, width))
        return linear
    return nn.Sequential(
        nn.Linear(width, 2 * width),
        nn.GELU(),
        nn.LayerNorm(2 * width),
        Dropout(config.dropout),
        nn.Linear(2 * width, width, bias=False),
    )


def two_layers(config: SelectorConfig, features: int) -> nn.Module:
    """Make a projection d → h of two layers with ReLU, for the query or for the candidates of
    v1."""
    return nn.Sequential(
        nn.Linear(features, config.width),
        nn.LayerNorm(config.width),
        nn.ReLU(),
        Dropout(config.dropout),
        nn.Linear(config.width, config.width),
        nn.LayerNorm(config.width),
    )
