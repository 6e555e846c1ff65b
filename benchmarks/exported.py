"""Median time of a decision by torch and NumPy, in µs at batch 1 on one CPU thread.

For the default stack, its student, which a run deploys, the lean network, and a student with 2,848 features (768 +
2,080) and 240 configurations; every request has its own budget. NumPy decides with normalisation and guard, and under
drift with the offset of each configuration that a tracker of latencies knows. The time of a decision does not depend on
how long a controller was trained, so all are fitted or set up here, in about a minute. The forms take turns, so that
whatever else the machine does meets all alike; the fastest tenth is printed next to the median. With a number, so many
rounds of ten decisions:

    python benchmarks/exported.py [60]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import EXPERTS, PolicyConfig
from knobwise.agents.serving.distillation import StudentConfig, student_of
from knobwise.agents.serving.export import Agent, to_numpy
from knobwise.agents.stack.stacked_controller import StackedController, fit_stack
from knobwise.envs import builtin_profile
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.simulated.calibrated import SimulatedConfig, simulate
from knobwise.envs.tables.profile_table import ProfileTable

STUDENT, WIDE = "student, 288 features, 64 configurations", "student, 2,848 features, 240 configurations"
BARS_US = {STUDENT: 30.0, WIDE: 60.0}
"""Most µs of a decision under drift."""


def student_on(table: ProfileTable) -> StackedController:
    """A student as `knobwise train` deploys it, hardly trained: its decisions take as long. Its guard lets it decide at
    every budget; a fall-back to static costs next to nothing."""
    rows, config = torch.arange(table.num_samples), PolicyConfig(structure="utility", members=2, hidden=8)
    network = Controller.for_table(table, rows, config).eval()
    stack = fit_stack(table, rows, network, config, default_budgets(table), seed=0)
    student = student_of(stack, table, rows, 0, StudentConfig(requests=100, steps=1))
    assert student.guard is not None
    student.guard.deploy.fill_(True)
    return student


def built_in() -> tuple[ProfileTable, dict[str, Agent]]:
    """The three controllers of the built-in profile."""
    table = builtin_profile()
    split = table.split()
    rows = torch.cat([split.train, split.validation])
    torch.manual_seed(0)
    config = PolicyConfig(structure="utility", members=5, hidden=96, dropout=0.2, experts=EXPERTS)
    network = Controller.for_table(table, rows, config).eval()
    stack = fit_stack(table, rows, network, config, default_budgets(table), seed=0)
    lean = Controller.for_table(table, rows, replace(config, members=1, experts=())).eval()
    return table, {"default stack": stack, STUDENT: student_on(table), "lean utility": lean}


def forms_of(agent: Agent, table: ProfileTable) -> dict[str, Callable[[int], object]]:
    """For each form a function that decides on request number i."""
    generator = torch.Generator().manual_seed(1)
    count = table.num_samples
    budgets = default_budgets(table)
    budgets = budgets[torch.randint(len(budgets), (count,), generator=generator)]
    budgets = budgets * (0.9 + 0.2 * torch.rand(count, generator=generator))
    limits, controller = budgets.tolist(), to_numpy(agent)
    drift = np.random.default_rng(0).normal(0.1, 0.05, table.num_configurations), 1.2
    tensors = [{name: block[row : row + 1] for name, block in table.features.items()} for row in range(count)]
    samples = [{name: block[0].numpy() for name, block in request.items()} for request in tensors]
    return {
        "torch": lambda i: agent.choose(tensors[i], budgets[i : i + 1]),
        "NumPy": lambda i: controller.decide(samples[i], limits[i]),
        "NumPy under drift": lambda i: controller.decide_expected(samples[i], limits[i], drift),
    }


def measure(forms: Mapping[str, Callable[[int], object]], requests: int, rounds: int) -> dict[str, list[float]]:
    """µs of every call; the forms take turns after a few requests each."""
    micros: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(rounds + 1):
        for name, decide in forms.items():
            for _ in range(10):
                i = (len(micros[name]) * 7 + number) % requests
                start = time.perf_counter_ns()
                decide(i)
                if number:  # the first round warms up
                    micros[name].append((time.perf_counter_ns() - start) / 1e3)
    return micros


def show(title: str, micros: Mapping[str, list[float]]) -> dict[str, float]:
    """Print and return the medians."""
    median = {name: statistics.median(values) for name, values in micros.items()}
    first, *_ = median
    print(f"{title}:")
    for name, values in micros.items():
        print(f"  {name:19s} median {median[name]:8.1f} µs   fastest tenth", end=" ")
        print(
            f"{statistics.quantiles(values, n=10)[0]:8.1f} µs   {first} / {name} = {median[first] / median[name]:.1f}"
        )
    return median


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 60  # ten decisions of each form a round
    torch.set_num_threads(1)
    threadpool_limits(1)  # NumPy's products; with more threads one of this size is slower
    table, agents = built_in()
    wide = simulate(SimulatedConfig(samples=100, image_width=768, language_width=2080))
    cases = [*((table, name, agent) for name, agent in agents.items()), (wide, WIDE, student_on(wide))]
    for table, name, agent in cases:
        median = show(name, measure(forms_of(agent, table), table.num_samples, rounds))
        if name in BARS_US:
            print(f"  a decision under drift: {median['NumPy under drift']:.1f} µs; bar {BARS_US[name]:.0f} µs")
