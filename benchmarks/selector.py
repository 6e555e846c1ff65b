"""A choice of demonstrations for one query, beside the nearest ones.

The pool has 64 candidates with embeddings 64 wide. The selector is the default one, untrained: its
time does not depend on training.

    python benchmarks/selector.py
"""

from __future__ import annotations

import functools

import torch
from timing import Bench
from torch import Tensor
from torch.nn import functional

from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import SelectorConfig

POOL = 64
WIDTH = 64


def nearest(query: Tensor, pool: Tensor, shots: int) -> Tensor:
    """Return the candidates with the largest cosine."""
    return functional.cosine_similarity(query.unsqueeze(1), pool, dim=-1).topk(shots).indices


if __name__ == "__main__":
    BENCH = Bench()
    torch.manual_seed(0)
    QUERY = torch.randn(1, WIDTH)
    CANDIDATES = torch.randn(1, POOL, WIDTH)
    MASK = torch.ones(1, POOL, dtype=torch.bool)
    SELECTOR = Selector(SelectorConfig(), WIDTH).eval()
    with torch.inference_mode():
        for shots in (2, 4):
            simple = {"nearest": functools.partial(nearest, QUERY, CANDIDATES, shots)}
            ours = functools.partial(SELECTOR.choose, QUERY, CANDIDATES, MASK, shots)
            BENCH.line(f"a choice of {shots} demonstrations of {POOL}", "µs", ours, simple.copy)
