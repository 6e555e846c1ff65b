"""What a controller adds to a request, as a share of the elastic model's own time: features, decision, setting knobs.

Every request is served by the controller in front of the model, and some requests later by the model alone at the
configuration that was chosen, so that both meet caches filled by other requests. The difference is the whole overhead;
its parts, as the runtime measures them, are printed next to it. The time of a decision does not depend on how long a
controller was trained, so these are fresh ones, first a student as a run deploys it; exported or trained ones can be
given:

    python benchmarks/overhead.py [controller.npz | best.pt …]

Times are CPU times of the thread. The machine must be quiet all the same: what other processes push out of the caches
takes several times as long.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from exported import student_on
from threadpoolctl import threadpool_limits

from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.serving.adaptive_model import AdaptiveModel, Result
from knobwise.agents.serving.export import to_numpy
from knobwise.agents.serving.numpy_controller import NumpyController
from knobwise.envs import builtin_profile
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.profiling.elastic.adapter import ElasticAdaptive, request_of
from knobwise.profiling.elastic.scenes import draw_samples
from knobwise.profiling.elastic.settings import Configuration, ElasticProfileConfig

REQUESTS, REPEATS, BEHIND, BAR = 150, 5, 10, 0.04


def controllers(table: ProfileTable, paths: Iterable[str]) -> dict[str, Any]:
    """Fresh controllers and those at the paths, all in NumPy."""
    rows = table.split().train
    network = {"structure": "utility", "hidden": 96, "layers": 2, "dropout": 0.2}
    single, five = (Controller.for_table(table, rows, PolicyConfig(**network, members=m)).eval() for m in (1, 5))
    fresh: dict[str, Any] = {"student, exported": to_numpy(student_on(table))}
    fresh |= {"one network, exported": to_numpy(single), "five networks, exported": to_numpy(five)}
    for path in paths:
        exported = path.endswith(".npz")
        fresh[path] = NumpyController.load(path) if exported else to_numpy(load_checkpoint(path).controller)
    return fresh


if __name__ == "__main__":
    torch.set_num_threads(1)
    threadpool_limits(1)  # as `knobwise evaluate live=true` does: products of this size are slower on two threads
    gc.disable()  # as `knobwise live` does: it would interrupt random requests
    table, vlm = builtin_profile(), ElasticAdaptive()
    rows = table.split().test[:REQUESTS].tolist()
    scenes = draw_samples(max(rows) + 1, ElasticProfileConfig().seed)
    requests = [request_of(scenes[row]) for row in rows]
    rng = np.random.default_rng(0)
    budgets = rng.choice(default_budgets(table).numpy(), len(rows)).tolist()
    for name, controller in controllers(table, sys.argv[1:]).items():
        model = AdaptiveModel(vlm, controller)
        took = np.zeros((2, len(rows), REPEATS))
        results: list[Result] = []
        for repeat in range(-1, REPEATS):  # the first round warms up
            waiting: list[tuple[int, Configuration]] = []
            for i in [*rng.permutation(len(rows)).tolist(), *[None] * BEHIND]:
                if i is not None:
                    start = time.thread_time_ns()
                    results.append(model.answer(requests[i], budgets[i]))
                    took[1, i, repeat] = (time.thread_time_ns() - start) / 1e9
                    waiting.append((i, Configuration(**results[-1].configuration)))
                if i is None or len(waiting) > BEHIND:
                    place, configuration = waiting.pop(int(rng.integers(len(waiting))))
                    start = time.thread_time_ns()
                    vlm.model.generate(requests[place].image, requests[place].question, configuration)
                    took[0, place, repeat] = (time.thread_time_ns() - start) / 1e9
        inference, served = np.median(took, 2).mean(1)
        share = (served - inference) / inference
        decision = statistics.median(r.decision_us for r in results)
        others = statistics.median(r.overhead_ms * 1e3 - r.decision_us for r in results)
        print(
            f"{name}: model alone {inference * 1e3:.2f} ms; overhead {(served - inference) * 1e6:.0f} µs = {share:.1%} "
            f"({'within' if share <= BAR else 'above'} {BAR:.0%}); by the clock a decision {decision:.0f} µs, features "
            f"and knobs {others:.0f} µs"
        )
