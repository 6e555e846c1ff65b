"""Training with GRPO on draws of two processes (`collectors=2`), beside one.

Collecting: a policy draws 16 configurations for each of some contexts of the built-in profile, and
takes the trainer's place in that it sends its weights to the processes after each batch.
Iterations: what a training takes between two evaluations, whole, with 8 draws for each context, a
KL to the reference, and minibatches of a quarter of the contexts. CPU time is that of all
processes. Medians of five rounds; run it on a quiet machine with two cores:

    python benchmarks/collectors.py [CONTEXTS …]
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.weight_update import SharedMemWeightSyncScheme

from knobwise.agents import (
    Controller,
    LossConfig,
    OptimiserConfig,
    PolicyConfig,
    distillation_trainer,
    make_actor,
)
from knobwise.envs import ConfigBandit
from knobwise.testbeds import builtin_profile

GROUP = 16
ROUNDS = 5
CONTEXTS = (256, 4_096, 16_384, 65_536)


def environment(contexts: int, seed: int) -> ConfigBandit:
    """Make the bandit of a process."""
    options: dict[str, Any] = {"action": "configuration", "observe_features": False}
    options |= {"batch_size": contexts, "group_size": GROUP, "seed": seed}
    return ConfigBandit(builtin_profile(), **options)


def cpu_s(processes: list[int]) -> float:
    """Return the CPU seconds of this process and others so far."""
    ticks = 0
    for process in processes:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def measured(contexts: int, workers: int) -> tuple[float, float]:
    """Return wall and CPU seconds of a batch."""
    table = builtin_profile()
    controller = Controller.for_table(table, table.split().train, PolicyConfig(hidden=64)).eval()
    policy = make_actor(controller, table, GROUP, action="configuration")
    settings: dict[str, Any] = {"frames_per_batch": contexts, "total_frames": -1}
    settings["auto_register_policy_transforms"] = False
    if workers == 1:
        collector: Any = Collector(environment(contexts, 0), policy, **settings)
    else:
        makers = [functools.partial(environment, contexts // workers, k) for k in range(workers)]
        schemes = {"policy": SharedMemWeightSyncScheme()}
        collector = MultiSyncCollector(makers, policy, weight_sync_schemes=schemes, **settings)
    batches = iter(collector)
    # processes start, and buffers are made
    next(batches)
    next(batches)
    processes = [child.pid for child in multiprocessing.active_children() if child.pid]
    count = max(4, 20 * 4_096 // contexts)
    times = []
    for _ in range(ROUNDS):
        wall = time.perf_counter()
        cpu = cpu_s(processes)
        for _ in range(count):
            next(batches)
            if workers > 1:
                collector.update_policy_weights_()
        spent = time.perf_counter() - wall, cpu_s(processes) - cpu
        times.append([seconds / count for seconds in spent])
    collector.shutdown()
    walls, cpus = zip(*times, strict=True)
    return statistics.median(walls), statistics.median(cpus)


class Clock:
    """A training's log, which notes the time at every evaluation."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Note wall and CPU time, of this process and those that draw."""
        if "Train/Actions_Per_Second" in metrics:
            processes = [child.pid for child in multiprocessing.active_children() if child.pid]
            self.times.append((time.perf_counter(), cpu_s(processes)))


def iterated(contexts: int, workers: int) -> tuple[float, float]:
    """Return wall and CPU seconds of an iteration of GRPO."""
    table = builtin_profile()
    count = max(4, 5 * 4_096 // contexts)
    clock = Clock()
    trainer = distillation_trainer(
        table,
        table.split(),
        policy=PolicyConfig(hidden=64),
        loss=LossConfig(objective="sampled", kl_to_ref_coeff=1.0),
        optimiser=OptimiserConfig(
            pretrain_iterations=0,
            iterations=count * (ROUNDS + 2),
            contexts=contexts,
            minibatch=contexts // 4,
            evaluate_every=count,
            patience=0,
        ),
        collectors=workers,
        log=clock,
    )
    trainer.run()
    # processes start in the first round
    rounds = itertools.pairwise(clock.times[1:])
    walls, cpus = zip(*(numpy.subtract(after, before) for before, after in rounds), strict=True)
    return statistics.median(walls) / count, statistics.median(cpus) / count


def main(sizes: list[int]) -> None:
    """Print a table."""
    print("| contexts | collecting | two: time | CPU time | iteration | two: time | CPU time |")
    print("|---|---|---|---|---|---|---|")
    for contexts in sizes:
        cells = [f"{contexts:,}"]
        for timed in (measured, iterated):
            alone = timed(contexts, 1)
            both = timed(contexts, 2)
            cells.append(f"{1e3 * alone[0]:.1f} ms")
            cells += [
                f"{of_two / of_single:.2f} ×" for of_single, of_two in zip(alone, both, strict=True)
            ]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    main([int(word) for word in sys.argv[1:]] or [*CONTEXTS])
