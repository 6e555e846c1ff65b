"""Latency of requests to the built-in elastic model, in ms, with and without
`AdaptiveModel.prefetch`.

A request comes 2 ms after the answer to the last one. Its first stage is never prepared, or it is
prepared beside the last answer, or in the pause after it. These three ways take turns, 20 requests
at a time. Each median is over 500 requests. Torch runs on one thread.

    python benchmarks/prefetch.py
"""

from __future__ import annotations

import statistics
import time

import torch
from decision import deployed_on

from knobwise.envs import builtin_profile
from knobwise.serving.adaptive_model import AdaptiveModel
from knobwise.testbeds.elastic.adapter import ElasticAdaptive, ElasticRequests

REQUESTS = [ElasticRequests().request(str(number)) for number in range(20)]


def serve(model: AdaptiveModel, when: str) -> list[float]:
    """Answer the requests, and return how long each took in ms.

    `when` the first stage is prepared: `never`, `beside` the last answer, or `in the pause`."""
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
    took = {"never": [], "beside": [], "in the pause": []}
    with AdaptiveModel(ElasticAdaptive(), deployed_on(builtin_profile()), tracker=False) as model:
        serve(model, "never")  # warms up
        for _ in range(25):
            for when, times in took.items():
                times += serve(model, when)
    for when, times in took.items():
        print(f"prepared {when:12s} median {statistics.median(times):.3f} ms")
