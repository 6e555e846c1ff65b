"""The first 200 decisions of five exported controllers, whose arrays are kept beside this file:
deadlines, mean budgets, a promise, texts, and requests for which not everything may be chosen.

`PYTHONPATH=.:tests python tests/golden/decisions.py` trains them anew, which is needed only when
what is exported has another form.
"""

from pathlib import Path

import numpy as np
import polars as pl
from golden.tables import number

import knobwise
from knobwise.agents import NumpyController
from knobwise.agents.deployed.arrays import encode_request

FOLDER = Path(__file__).parent / "controllers"
REQUESTS = 200
BUDGETS = {"between": (45.0, 77.0, 140.0), "beyond": (5.0, 4000.0)}
SMALL = {
    "policy": "utility",
    "policy.hidden": 8,
    "policy.fold_networks": 2,
    "optimiser": {"teacher_iterations": 150, "pretrain_iterations": 300, "iterations": 4},
}
KINDS = {
    "deadline": {"budgets_ms": [50, 90, 160]},
    "mean": {"budgets_ms": [50, 90, 160], "budget": "mean"},
    "promise": {"budgets_ms": [60, 120, 240], "policy.promise": 0.9},
    "text": {"budgets_ms": [50, 90, 160]},
    "holes": {"budgets_ms": [50, 90, 160]},
}
TOPICS = ("add two numbers", "translate this sentence", "write a long proof of the theorem")


def values():
    """Indices of configurations, a character for each request, by controller and budget."""
    made = {}
    for name in KINDS:
        controller = NumpyController.load(FOLDER / f"{name}.npz")
        calibrated = [float(budget) for budget in controller.trained_ms]
        budgets = calibrated if name == "mean" else [*calibrated, *sum(BUDGETS.values(), ())]
        made[name] = {f"{budget:g}": _decided(controller, name, budget) for budget in budgets}
    return made


def _decided(controller, name, budget):
    """The choices of all requests at once, which are those of each alone."""
    # turns of a mix are the same each time
    controller = controller.without_turns()
    requests = [_request(i, name) for i in range(REQUESTS)]
    if name == "text":
        features = {
            "prompt": np.stack([controller.with_blocks(each)["prompt"] for each in requests])
        }
    else:
        rows = [encode_request(controller.columns, each) for each in requests]
        features = {"features": np.stack(rows)}
    mask = None
    if name == "holes":
        choices = range(len(controller.configurations))
        mask = np.array([[(i + c) % 6 == 0 or number(i, c, 7) % 3 > 0 for c in choices]
                         for i in range(REQUESTS)])  # fmt: skip
    chosen = controller.choose(features, np.full(REQUESTS, budget), mask).tolist()
    if mask is None:
        alone = [
            controller.decide_index({key: block[i] for key, block in features.items()}, budget)
            for i in range(REQUESTS)
        ]
        assert alone == chosen
    return "".join(map(str, chosen))


def _request(i, name):
    if name == "text":
        return {"prompt": f"{TOPICS[number(i, 5) % 3]} {number(i, 6)}"}
    return {"words": float(number(i, 3, below=90)), "kind": "ab"[number(i, 4) % 2]}


def rows_of(name, samples=480):
    """A long table: the larger model is better for long prompts and kind b, and slower with them."""
    rows = []
    for i in range(samples):
        words, kind = number(i, 1, below=90), "ab"[number(i, 2) % 2]
        for place, model in enumerate(("small", "medium", "large")):
            for effort in (1, 2):
                if name == "holes" and number(i, place, effort, 3) % 5 == 0:
                    continue
                ability = 20 + 25 * place + 10 * effort + 20 * (kind == "a") - words / 2
                row = {"sample_id": f"q{i}", "model": model, "max_tokens": 64 * effort}
                row |= {"accuracy": float(number(i, place, effort) < ability)}
                row["latency_ms"] = (20 + 30 * place) * effort * (1 + words / 100)
                row["latency_ms"] *= 1 + number(i, place, effort, 9) / 1000
                if name == "text":
                    row["prompt"] = f"{TOPICS[min(words // 30, 2)]} {number(i, 6)}"
                else:
                    row |= {"words": words, "kind": kind}
                rows.append(row)
    return pl.DataFrame(rows)


def main():
    FOLDER.mkdir(exist_ok=True)
    for name, settings in KINDS.items():
        features = ["prompt"] if name == "text" else ["words", "kind"]
        policy = knobwise.fit(rows_of(name), features, **SMALL | settings)
        policy.agent.export(FOLDER / f"{name}.npz")


if __name__ == "__main__":
    main()
