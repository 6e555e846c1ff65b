"""Median time of a decision by what a run deploys, in µs, for one request on one CPU thread.

A small table, the built-in profile with 288 features and 64 configurations, and a wide one with
2,848 features (768 + 2,080) and 240 configurations. Networks are as wide as a run would choose them
by the smallest budget. The time of a decision does not depend on how long a network was trained, so
none is; the guard lets them decide at every budget, because static costs next to nothing.

In a loop, one decision follows another; under drift it also says what it expects of the latency,
and reads how much slower knob values are here than in the profile. Behind a model, a transformer
runs before each decision, as where a run is served: the caches then hold other things. The forms
take turns, so that whatever else the machine does meets all alike; the fastest tenth is printed
next to the median. With a number, so many rounds of ten decisions:

    python benchmarks/exported.py [200]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig, hidden_for
from knobwise.agents.judging.baselines import static_of
from knobwise.agents.policy.controller import NumpyController
from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.agents.serving.own_cost import own_costs
from knobwise.agents.stack.deployed import DeployedController, Settled
from knobwise.agents.training.settle import latency_of
from knobwise.envs import builtin_profile
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.simulated.calibrated import SimulatedConfig, simulate
from knobwise.envs.tables.profile_table import ProfileTable

LOOP = "in a loop"
DRIFT = "in a loop, under drift"
MODEL = "behind a model"
SMALL = "288 features, 64 configurations"
BARS_US = {(SMALL, LOOP): 20.0, (SMALL, MODEL): 60.0}
"""Most µs of a decision."""


def deployed_on(table: ProfileTable) -> NumpyController:
    """Return the controller that a run would deploy, untrained."""
    rows = torch.arange(table.num_samples)
    budgets_ms = default_budgets(table)
    inputs = FeatureNormaliser.fit(table, rows).width
    hidden = hidden_for(inputs, table.num_configurations, 1e3 * float(budgets_ms.min()))
    torch.manual_seed(0)
    controller = Controller.for_table(table, rows, PolicyConfig(hidden=hidden, drift=0.3)).eval()
    guard = []
    for budget in budgets_ms.tolist():
        guard.append({"budget_ms": budget, "margin": 0.97, "deployed": True})
    latency = latency_of(table, rows, controller.normaliser)
    settled = Settled(guard, static=static_of(table, rows).arrays(), latency=latency)
    print(f"{inputs} inputs, {hidden} wide, {len(budgets_ms)} budgets")
    return DeployedController(controller, None, settled).decider


def forms_of(
    controller: NumpyController, table: ProfileTable
) -> dict[str, Callable[[int], object]]:
    """Return by name functions that decide on request number i, each under its own budget."""
    generator = np.random.default_rng(1)
    count = table.num_samples
    limits = generator.choice(default_budgets(table).double().numpy(), count)
    limits = (limits * generator.uniform(0.9, 1.1, count)).tolist()
    drift = generator.normal(0.1, 0.05, table.num_configurations), 1.2
    samples = []
    for row in range(count):
        samples.append({name: block[row].numpy() for name, block in table.features.items()})
    return {
        LOOP: lambda i: controller.decide(samples[i], limits[i]),
        DRIFT: lambda i: controller.decide_expected(samples[i], limits[i], drift),
    }


def measure(
    forms: Mapping[str, Callable[[int], object]], requests: int, rounds: int
) -> dict[str, list[float]]:
    """Return µs of every call; the forms take turns after a few requests each."""
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


def main(rounds: int = 200) -> None:
    """Print the times of both tables, and beside them the bars."""
    torch.set_num_threads(1)
    threadpool_limits(1)  # NumPy's products; with more threads one of this size is slower
    wide = simulate(SimulatedConfig(samples=100, image_width=768, language_width=2080))
    tables = {SMALL: builtin_profile(), "2,848 features, 240 configurations": wide}
    for title, table in tables.items():
        print(f"{title}: ", end="")
        controller = deployed_on(table)
        times = {}
        for form, micros in measure(forms_of(controller, table), table.num_samples, rounds).items():
            fastest = statistics.quantiles(micros, n=10)[0]
            times[form] = (
                f"median {statistics.median(micros):6.1f} µs   fastest tenth {fastest:6.1f} µs"
            )
        budgets_ms = default_budgets(table)
        (cost,) = own_costs([controller], table, torch.arange(100), budgets_ms)
        times[MODEL] = f"median {float(cost.decision_us.median()):6.1f} µs"
        for form, text in times.items():
            bar = BARS_US.get((title, form))
            note = "" if bar is None else f"   bar {bar:.0f} µs"
            print(f"  {form:24s} {text}{note}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
