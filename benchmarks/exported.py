"""Time of one decision by torch, NumPy, ONNX float32 and ONNX int8, in median µs at batch 1 on one CPU thread.

Of the default stack, of a student of it, of the lean network, and of the controller of 2,848 features (768 + 2,048 +
32) and 240 configurations with one head per knob; requests have a budget of their own each. What a decision costs does
not depend on how long a controller was trained: all are fitted or set up here, in about a minute. The ways take turns,
so that what else the machine does meets all alike; beside the median stands the fastest tenth. The last figure is what
reading the first layer's weights costs alone (a product of 2,848 × 256), below which no form can come.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from knobwise.agents.controller.controller import Controller
from knobwise.agents.serving.distillation import StudentConfig, student_of
from knobwise.agents.serving.export import Agent, to_numpy
from knobwise.agents.serving.onnx_graph import export_onnx, onnx_session
from knobwise.agents.stack.stacked_controller import fit_stack
from knobwise.agents.training.settings import EXPERTS, PolicyConfig
from knobwise.envs import builtin_profile
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.tables.profile_table import Knob, ProfileTable

BAR_US = 60.0
BLOCKS = {"image_features": 768, "language_features": 2048, "data_set": 32}
KNOBS = (
    Knob("max_crops", tuple(range(2, 14, 2))),
    Knob("top_k", (4, 8, 12, 16, 20)),
    Knob("num_active_blocks", tuple(range(12, 20))),
)


def wide_table(samples: int = 300) -> ProfileTable:
    """Random values of the right shapes; nothing is learned from them but means."""
    generator = torch.Generator().manual_seed(0)
    grid = torch.cartesian_prod(*(torch.arange(len(knob.values)) for knob in KNOBS))
    return ProfileTable(
        name="wide",
        knobs=KNOBS,
        configurations=grid,
        accuracy=torch.rand(samples, len(grid), generator=generator),
        latency_ms=500 + 1500 * torch.rand(samples, len(grid), generator=generator),
        mask=torch.ones(samples, len(grid), dtype=torch.bool),
        sample_ids=tuple(map(str, range(samples))),
        features={name: torch.randn(samples, size, generator=generator) for name, size in BLOCKS.items()},
    )


def built_in() -> tuple[ProfileTable, dict[str, Agent]]:
    """The three controllers of the built-in profile."""
    table = builtin_profile()
    split = table.split()
    rows = torch.cat([split.train, split.validation])
    torch.manual_seed(0)
    config = PolicyConfig(structure="utility", members=5, hidden=96, dropout=0.2, experts=EXPERTS)
    network = Controller.for_table(table, rows, config).eval()
    stack = fit_stack(table, rows, network, config, default_budgets(table), seed=0)
    lean = PolicyConfig(structure="utility", members=1, hidden=96, dropout=0.2)
    student = student_of(stack, table, rows, 0, StudentConfig(steps=1))
    return table, {
        "default stack": stack,
        "student": student,
        "lean utility": Controller.for_table(table, rows, lean).eval(),
    }


def ways_of(agent: Agent, table: ProfileTable, folder: Path, int8: bool) -> dict[str, Callable[[int], object]]:
    """For each form a function that decides for request number i."""
    generator = torch.Generator().manual_seed(1)
    count = table.num_samples
    budgets = default_budgets(table)[torch.randint(5, (count,), generator=generator)]
    budgets = budgets * (0.9 + 0.2 * torch.rand(count, generator=generator))
    blocks = {name: block.numpy() for name, block in table.features.items()}
    limits = budgets.tolist()
    controller = to_numpy(agent)
    one = [{name: block[row] for name, block in blocks.items()} for row in range(count)]
    tensors: list[Mapping[str, Tensor]] = [
        {name: block[row : row + 1] for name, block in table.features.items()} for row in range(count)
    ]
    ways: dict[str, Callable[[int], object]] = {
        "torch": lambda i: agent.choose(tensors[i], budgets[i : i + 1]),
        "NumPy": lambda i: controller.decide(one[i], limits[i]),
    }
    feeds = [
        {**{name: block[row : row + 1] for name, block in blocks.items()}, "budget_ms": np.float32([limits[row]])}
        for row in range(count)
    ]
    for form in ("ONNX float32", "ONNX int8") if int8 else ("ONNX float32",):
        path = folder / f"{form}.onnx"
        export_onnx(agent, path, int8=form.endswith("int8"))
        session = onnx_session(path)
        ways[form] = lambda i, session=session: session.run(None, feeds[i])  # type: ignore[misc]
    return ways


def measure(ways: Mapping[str, Callable[[int], object]], requests: int, rounds: int) -> dict[str, list[float]]:
    """µs of every call; the ways take turns after a few requests each."""
    micros: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, decide in ways.items():
            for _ in range(10):
                i = (len(micros[name]) * 7 + number) % requests
                start = time.perf_counter_ns()
                decide(i)
                if number:  # the first round warms up
                    micros[name].append((time.perf_counter_ns() - start) / 1e3)
    return micros


def tell(title: str, micros: Mapping[str, list[float]]) -> dict[str, float]:
    """Print and return the medians."""
    median = {name: statistics.median(values) for name, values in micros.items()}
    print(f"{title}:")
    for name, values in micros.items():
        tenth = statistics.quantiles(values, n=10)[0]
        ratio = f"torch / {name} = {median['torch'] / median[name]:.1f}"
        print(f"  {name:14s} median {median[name]:8.1f} µs   fastest tenth {tenth:8.1f} µs   {ratio}")
    return median


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60, help="ten decisions of each form a round")
    parser.add_argument("--only", default="", help="only what has this in its name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    threadpool_limits(1)  # NumPy's products; with more threads one of this size is slower
    wide = wide_table()
    additive = Controller.for_table(wide, torch.arange(wide.num_samples), PolicyConfig()).eval()
    table, agents = built_in() if options.only not in "2,848 features" or not options.only else (wide, {})
    cases = [(table, name, agent) for name, agent in agents.items()]
    cases.append((wide, "2,848 features, 240 configurations", additive))
    medians = {}
    for of, name, agent in cases:
        if options.only in name:
            with tempfile.TemporaryDirectory() as folder:
                ways = ways_of(agent, of, Path(folder), int8=True)
                medians[name] = tell(name, measure(ways, of.num_samples, options.rounds))
    x, weight = np.ones((1, 2848), np.float32), np.ones((2848, 256), np.float32)
    product = measure({"torch": lambda i: x @ weight}, 1, options.rounds)["torch"]
    print(f"2,848 × 256 product alone: median {statistics.median(product):.1f} µs")
    ours = medians.get("2,848 features, 240 configurations")
    if ours:
        print(f"2,848 features by NumPy: {ours['NumPy']:.1f} µs; bar {BAR_US:.0f} µs")
