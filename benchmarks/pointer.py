"""What it costs a selector to learn from a query's beams: pool encoded once, against once for every beam.

The same weights, the same beams of 2–4 shots and the same loss, forward and backward, on one thread: once through
`SequenceDistribution`, once as it is written down straightforwardly, with query and pool repeated for every beam,
torch's own attention, and step after step. The log-probs are asserted to be equal. Prints CPU milliseconds per query of
each and the ratio, for the original's network (width 256) and for the default one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from knobwise.agents.selector.networks import CrossAttention, CrossAttentive, SelectorConfig
from knobwise.agents.selector.sequences import SequenceDistribution

FEATURES, POOL, BEAMS, SHOTS = 512, 64, 12, 4
ROUNDS, SECONDS = 15, 0.25
NETWORKS = {
    "original": SelectorConfig(width=256, projection="linear", update="convex"),
    "default": SelectorConfig(),
}


def attended(layer: CrossAttention, state: Tensor, items: Tensor, mask: Tensor) -> Tensor:
    """What our layer computes, as torch's attention writes it down."""
    query, key, value = (
        linear(x).unflatten(-1, (layer.heads, -1)).transpose(1, 2)
        for linear, x in ((layer.query, state.unsqueeze(1)), (layer.key, items), (layer.value, items))
    )
    read = F.scaled_dot_product_attention(query, key, value, mask[:, None, None])
    return layer.norm(state + layer.outer(read.transpose(1, 2).flatten(1)))


def beams_of(queries: int) -> Tensor:
    """int64 [P, BEAMS, SHOTS]: different places, 2 to 4 of them."""
    sequences = torch.rand(queries, BEAMS, POOL).argsort(-1)[..., :SHOTS]
    lengths = torch.randint(2, SHOTS + 1, (queries, BEAMS, 1))
    return sequences.masked_fill(torch.arange(SHOTS) >= lengths, -1)


def ways(config: SelectorConfig, queries: int) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)
    network = CrossAttentive(config, FEATURES).eval()
    query, pool = torch.randn(queries, FEATURES), torch.randn(queries, POOL, FEATURES)
    mask, beams = torch.ones(queries, POOL, dtype=torch.bool), beams_of(queries)

    def once() -> Tensor:
        dist = SequenceDistribution(network, network.encode(query, pool, mask), SHOTS, BEAMS)
        return dist.log_prob(beams)

    def per_beam() -> Tensor:
        each_query, each_pool, available = (x.repeat_interleave(BEAMS, 0) for x in (query, pool, mask))
        state, items = network.inputs(each_query), network.inputs(each_pool)
        for layer in network.layers:
            state = attended(layer, state, items, available)
        state, keys = (F.normalize(x, dim=-1) for x in (network.query(state), network.candidate(items)))
        row, total = torch.arange(len(state)), torch.zeros(len(state))
        for places in beams.flatten(0, 1).unbind(-1):
            logits = (keys @ state.unsqueeze(-1)).squeeze(-1) / config.temperature
            place = places.clamp_min(0)
            log_prob = logits.masked_fill(~available, -torch.inf).log_softmax(-1)[row, place]
            total = total + torch.where(places < 0, 0.0, log_prob)
            available = available.scatter(-1, place.unsqueeze(-1), False)
            state = network.advance(state, keys[row, place])
        return total.unflatten(0, (queries, BEAMS))

    torch.testing.assert_close(once(), per_beam(), atol=1e-4, rtol=1e-5)
    old, advantage = once().detach(), torch.randn(queries, BEAMS)

    def step(log_probs: Callable[[], Tensor]) -> Callable[[], None]:
        def learn() -> None:
            network.zero_grad()
            ratio = (log_probs() - old).exp()
            (-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()).backward()

        return learn

    return {"once": step(once), "per beam": step(per_beam)}


def milliseconds(call: Callable[[], None], queries: int, calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - start) / calls / queries * 1e3


def compare(name: str, config: SelectorConfig, queries: int) -> None:
    both = ways(config, queries)
    calls = {}
    for way, call in both.items():
        call()
        calls[way] = max(1, int(SECONDS * 1e3 / queries / milliseconds(call, queries, 1)))
    times: dict[str, list[float]] = {way: [] for way in both}
    for _ in range(ROUNDS):
        for way, call in both.items():
            times[way].append(milliseconds(call, queries, calls[way]))
    once, per_beam = (torch.tensor(values) for values in times.values())
    print(
        f"{name}, {queries} queries at once, {POOL} candidates × {FEATURES}, {BEAMS} beams: encoded once "
        f"{once.median():.2f} ms per query, per beam {per_beam.median():.2f} ms; "
        f"ratio per beam / once {(per_beam / once).median():.1f}",
        flush=True,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    for NAME, CONFIG in NETWORKS.items():
        for QUERIES in (1, 32):
            compare(NAME, CONFIG, QUERIES)
