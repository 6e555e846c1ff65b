"""Whether torch.compile pays: a plain network and the exact loss of one minibatch, eager against compiled.

Prints ms of CPU time for each forward and backward on one thread (interleaved), how long compiling took on the clock,
and after how many optimiser steps that is earned back. A run of the default length takes some two thousand steps.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from knobwise.agents.controller.controller import Controller
from knobwise.agents.training.settings import OptimiserConfig, PolicyConfig
from knobwise.envs import builtin_profile
from knobwise.losses.functional import clipped_surrogate, expectation

ROUNDS, CALLS = 15, 20
STEPS = OptimiserConfig()


def main() -> None:
    torch.manual_seed(0)
    table = builtin_profile()
    controller = Controller.for_table(table, table.split().train, PolicyConfig(structure="additive")).eval()
    rows = torch.randint(table.num_samples, (STEPS.minibatch,))
    features = controller.features({name: block[rows] for name, block in table.features.items()}, len(rows))
    budgets = table.latency_ms[rows, 0]
    with torch.no_grad():
        old = controller(features, budgets)
    advantage = torch.randn(old.shape)

    def loss(features: Tensor, budgets: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        surrogate, _ = clipped_surrogate(controller(features, budgets), old, advantage, 0.2)
        return -expectation(surrogate, old.exp()).mean()

    def step(way: Callable[..., Tensor]) -> float:
        start = time.process_time()
        for _ in range(CALLS):
            controller.zero_grad()
            way(features, budgets, old, advantage).backward()
        return (time.process_time() - start) / CALLS * 1e3

    compiled = torch.compile(loss)
    start = time.perf_counter()
    compiled(features, budgets, old, advantage).backward()
    cost = time.perf_counter() - start
    times = [(step(loss), step(compiled)) for _ in range(ROUNDS)][1:]
    eager, fast = (statistics.median(values) for values in zip(*times, strict=True))
    print(f"minibatch of {STEPS.minibatch}: eager {eager:.3f} ms, compiled {fast:.3f} ms; ratio {fast / eager:.3f}")
    earned = cost / (eager - fast) * 1e3 if eager > fast else float("inf")
    print(f"compiling took {cost:.1f} s (cold or warm cache), earned back after {earned:,.0f} optimiser steps")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if any(map(shutil.which, ("c++", "g++", "clang++"))):
        main()
    else:
        print("torch.compile needs a C++ compiler, and there is none here")
