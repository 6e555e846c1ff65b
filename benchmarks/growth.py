"""Time and memory of a training on tables from 10³ to 10⁷ samples × 16 configurations.

Each size runs in a process of its own: the table is split, budgets are chosen, a small network
takes 50 iterations of warm-up and 20 of GRPO, and static is judged. Steps of
training do not depend on the number of samples; splitting, standardising and judging do.

    python benchmarks/growth.py
"""

from __future__ import annotations

import multiprocessing
import resource
import time

import torch
from timing import Bench

from knobwise.agents.calibration.training import distillation_trainer
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.evaluation.baselines import fit_static
from knobwise.agents.evaluation.evaluation import evaluate_policy
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.envs.bandit.budgets import default_budgets
from knobwise.envs.tables.profile_table import Knob, ProfileTable

SIZES = [10**power for power in range(3, 8)]


def table_of(count: int) -> ProfileTable:
    """Return a table of drawn outcomes, in which slower configurations are more accurate."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(count, 16, generator=generator)
    configurations = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    speed = configurations.sum(1).float()
    noise = torch.randn(count, 16, generator=generator)
    return ProfileTable(
        name="drawn",
        knobs=(Knob("a", (1, 2, 3, 4)), Knob("b", (1, 2, 3, 4))),
        configurations=configurations,
        accuracy=(features[:, :1] + 0.3 * speed + noise > 0.5).float(),
        latency_ms=(2 + speed) * (1 + 0.05 * noise.abs()),
        mask=torch.ones(count, 16, dtype=torch.bool),
        sample_ids=tuple(map(str, range(count))),
        features={"features": features},
    )


def train_on(count: int) -> tuple[float, float]:
    """Return the seconds of a training on so many samples, and the most memory in GB."""
    torch.set_num_threads(1)
    table = table_of(count)
    start = time.process_time()
    split = table.split()
    budgets_ms = default_budgets(table)
    optimiser = OptimiserConfig(pretrain_iterations=50, iterations=20)
    policy = PolicyConfig(hidden=32)
    distillation_trainer(
        table, split, policy=policy, optimiser=optimiser, seed=0, budgets_ms=budgets_ms
    ).run()
    evaluate_policy(fit_static(table, split.train), table, split.test, budgets_ms)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return time.process_time() - start, most


if __name__ == "__main__":
    BENCH = Bench()
    # a process of its own for each size
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for size in SIZES:
            seconds, memory = pool.apply(train_on, (size,))
            BENCH.tell(f"training and judging on {size:,} samples", "s", seconds)
            BENCH.tell(f"most memory on {size:,} samples", "GB", memory)
