"""Torch's random generators: seeded for a while, kept and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


@contextlib.contextmanager
def seeded(seed: int, device: str | torch.device) -> Iterator[None]:
    """Torch's global generators, which all draws come from, are seeded in this block and restored
    after it."""
    device = torch.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def random_state(device: torch.device) -> list[Tensor]:
    """Of the CPU and, where it is used, of the GPU."""
    return [
        torch.get_rng_state(),
        *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else []),
    ]


def set_random_state(state: list[Tensor], device: torch.device) -> None:
    """The inverse of `random_state`."""
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)
