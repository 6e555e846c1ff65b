"""Latency of requests to the built-in elastic model, in ms, with and without `AdaptiveModel.prefetch`.

Requests come 2 ms after the answer to the one before. Their first stage is prepared not at all, beside the answer to
the one before, or in the pause after it. Medians are over 500 requests each; the three take turns after 20 requests, in
another order each time. Torch runs on one thread.

    python benchmarks/prefetch.py
"""

from __future__ import annotations

import random
import statistics
import time

import torch
from exported import student_on

from knobwise.agents.serving.adaptive_model import AdaptiveModel
from knobwise.envs import builtin_profile
from knobwise.profiling.elastic.adapter import ElasticAdaptive, request_of
from knobwise.profiling.elastic.scenes import draw_samples


def serve(model: AdaptiveModel, when: str) -> list[float]:
    """Answer the requests, and return how long each took in ms."""
    took = []
    for number, request in enumerate(REQUESTS):
        if when == "in the pause":
            model.prefetch(request)
        time.sleep(0.002)
        start = time.perf_counter()
        if when == "beside":
            model.prefetch(REQUESTS[(number + 1) % len(REQUESTS)])
        model.answer(request, 6.0)
        took.append((time.perf_counter() - start) * 1e3)
    return took


if __name__ == "__main__":
    torch.set_num_threads(1)
    REQUESTS = [request_of(scene) for scene in draw_samples(20, seed=1)]
    took: dict[str, list[float]] = {"never": [], "beside": [], "in the pause": []}
    with AdaptiveModel(ElasticAdaptive(), student_on(builtin_profile()), tracker=False) as model:
        serve(model, "never")
        for _ in range(25):
            for when in random.sample([*took], 3):
                took[when] += serve(model, when)
    for when, times in took.items():
        p95 = statistics.quantiles(times, n=20)[-1]
        print(f"prepared {when:12s} median {statistics.median(times):.3f} ms, p95 {p95:.3f} ms")
