"""Time of one decision for one request, in median µs of CPU time on one thread: the controller and every baseline.

A request is the features of one sample of the built-in profile and a budget. What a decision costs does not depend on
how long the controller was trained, so it is a fresh one. Also prints the ratio to the fastest baseline that reads the
features, and how many decisions a second the controller takes in batches.
"""

from __future__ import annotations

import statistics
import time

import torch

from knobwise.agents.controller.controller import Controller
from knobwise.agents.judging.baselines import make_baselines
from knobwise.agents.training.settings import PolicyConfig
from knobwise.envs import builtin_profile

ROUNDS, CALLS, BATCH = 7, 40, 1_024
READS_FEATURES = ("knn", "ridge", "random_forest")

if __name__ == "__main__":
    torch.set_num_threads(1)
    table = builtin_profile()
    split = table.split()
    controller = Controller.for_table(table, split.train, PolicyConfig()).eval()
    choosers = {"controller": controller, **{each.name: each for each in make_baselines(table, split)}}
    choosers.pop("oracle")  # it looks the outcome up
    budget = table.latency_ms[split.train].median().expand(1)
    requests = [
        ({name: block[row : row + 1] for name, block in table.features.items()}, budget, table.mask[row : row + 1])
        for row in split.test[:CALLS].tolist()
    ]
    micros: dict[str, list[float]] = {name: [] for name in choosers}
    for _ in range(ROUNDS):
        for name, chooser in choosers.items():
            for request in requests if name != "random_forest" else requests[:4]:
                start = time.process_time_ns()
                chooser.choose(*request)
                micros[name].append((time.process_time_ns() - start) / 1e3)
    median = {name: statistics.median(values) for name, values in micros.items()}
    for name, value in median.items():
        print(f"{name}: {value:.0f} µs a decision")
    fastest = min((name for name in READS_FEATURES if name in median), key=lambda name: median[name])
    print(f"ratio controller / {fastest}: {median['controller'] / median[fastest]:.3f}")
    rows = torch.arange(BATCH) % table.num_samples
    many = ({name: block[rows] for name, block in table.features.items()}, budget.expand(BATCH), table.mask[rows])
    rates = []
    for _ in range(20):
        start = time.process_time()
        controller.choose(*many)
        rates.append(BATCH / (time.process_time() - start))
    print(f"controller in batches of {BATCH}: {statistics.median(rates) / 1e3:.0f} k decisions a second")
