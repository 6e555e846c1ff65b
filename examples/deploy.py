"""A trained controller in front of a model that really runs: features, decision, knobs set, answer.

    python examples/deploy.py runs/latest

The model is the elastic vision-language model that the built-in profile measures. Train a
controller for it with `knobwise train`.
"""

import sys

import torch

import knobwise
from knobwise.serving import AdaptiveModel
from knobwise.testbeds.elastic.adapter import ElasticAdaptive, request_of
from knobwise.testbeds.elastic.scenes import draw_samples


def main(run: str = "runs/latest", requests: int = 6) -> list[bool]:
    """Serve a few requests under different budgets; return which were answered on time."""
    torch.set_num_threads(1)
    model = AdaptiveModel(ElasticAdaptive(), knobwise.load(run))
    scenes = [request_of(scene) for scene in draw_samples(requests, seed=3)]
    budgets_ms = [(20.0, 40.0, 60.0)[i % 3] for i in range(requests)]
    results = model.generate(scenes, budgets_ms=budgets_ms)
    for request, result in zip(scenes, results, strict=True):
        state = "on time" if result.met else "late"
        time = f"{result.total_ms:.2f} of {result.budget_ms:.0f} ms ({state})"
        print(f"{request.question!r}: {result.answer.text!r}, {time}, with {result.configuration}")
    return [result.met for result in results]


if __name__ == "__main__":
    main(*sys.argv[1:2])
