"""Collecting draws of the sampled objective by two of TorchRL's processes, beside one.

A policy draws 16 configurations for each of some contexts of the built-in profile, and takes the
trainer's place in that it sends its weights to the processes after each batch. CPU time is that of
all processes. Medians of five rounds; run it on a quiet machine with two cores:

    python benchmarks/collectors.py [CONTEXTS …]
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from typing import Any

import torch
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.weight_update import SharedMemWeightSyncScheme

from knobwise.agents import Controller, PolicyConfig, make_actor
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


def main(sizes: list[int]) -> None:
    """Print a table."""
    print("| contexts | one collector | two: time | two: CPU time |\n|---|---|---|---|")
    for contexts in sizes:
        alone = measured(contexts, 1)
        both = measured(contexts, 2)
        pairs = zip(alone, both, strict=True)
        ratios = [f"{of_two / of_single:.2f} ×" for of_single, of_two in pairs]
        print(f"| {contexts:,} | {1e3 * alone[0]:.1f} ms | {' | '.join(ratios)} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    main([int(word) for word in sys.argv[1:]] or [*CONTEXTS])
