"""Torch's random generators: seeded for a while, kept and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


@contextlib.contextmanager
def seeded(seed: int, device: str | torch.device) -> Iterator[None]:
    """Seed torch's global generators, which all draws come from, and restore them after the
    block."""
    device = torch.device(device)
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(seed)
        yield


def random_state(device: torch.device) -> list[Tensor]:
    """Return the state of the CPU's generator and, if the GPU is used, of the GPU's."""
    state = [torch.get_rng_state()]
    if device.type == "cuda":
        state.append(torch.cuda.get_rng_state(device))
    return state


def set_random_state(state: list[Tensor], device: torch.device) -> None:
    """Put back the state that `random_state` returned."""
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)


def weight_sums(weights: Mapping[str, torch.Tensor]) -> list[float]:
    """Return the sum of each weight tensor; a checkpoint of other sums has another start."""
    return [float(weight.detach().double().sum()) for weight in weights.values()]
