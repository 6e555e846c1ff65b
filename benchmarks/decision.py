"""A decision of what a run deploys, for one request, beside what people would use instead.

The controller is the one that a run on the built-in profile would deploy: 288 features, 64
configurations, a guard and a static policy. The time of a decision does not depend on how long a
network was trained, so none is. Behind a model, a transformer runs before each decision, so that
the caches hold other things, as where a run is served.

A request through `AdaptiveModel` is timed in front of a model that answers at once, so that all of
its time is what the controller costs. In front of the built-in model, the time is that of pooling
the features, as the model itself takes it. Texts are stretches of the guides in docs/.

    python benchmarks/decision.py
"""

from __future__ import annotations

import functools
import itertools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.ensemble import RandomForestRegressor
from sklearn.feature_extraction.text import HashingVectorizer
from timing import Bench, Way
from torch import nn

from knobwise.agents.calibration.deployed_controller import Calibration, DeployedController
from knobwise.agents.calibration.latencies import fit_latency_model
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.controller.settings import PolicyConfig, hidden_for
from knobwise.agents.evaluation.baselines import fit_static
from knobwise.agents.evaluation.texts import encoded_by, fit_encoders
from knobwise.envs import builtin_profile
from knobwise.envs.bandit.budgets import default_budgets
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.profiling.measuring.adaptive_model import Answer, FirstStage, KnobSupport, Request
from knobwise.serving.adaptive_model import AdaptiveModel
from knobwise.serving.onnx_graph import Deployed, OnnxController, write_onnx
from knobwise.testbeds.elastic.adapter import ElasticAdaptive, ElasticRequests
from knobwise.testbeds.simulated.calibrated import SimulatedConfig, simulate

DOCS = Path(__file__).parents[1] / "docs"
TABLE = builtin_profile()
BUDGETS_MS = default_budgets(TABLE).tolist()
FEATURES = torch.cat(list(TABLE.features.values()), 1).numpy()
OUTCOMES = torch.cat([TABLE.accuracy, TABLE.latency_ms], 1).numpy()
"""Accuracies and latencies of all samples, [n, 2 · C]."""
SAMPLES = [
    {name: block[row].numpy() for name, block in TABLE.features.items()} for row in range(256)
]


def deployed_on(table: ProfileTable) -> DeployedController:
    """Return the controller that a run would deploy, untrained, deciding at every budget."""
    rows = torch.arange(table.num_samples)
    budgets_ms = default_budgets(table)
    inputs = FeatureNormaliser.fit(table, rows).width
    hidden = hidden_for(inputs, table.num_configurations, True, 1e3 * float(budgets_ms.min()))
    torch.manual_seed(0)
    config = PolicyConfig(hidden=hidden, drift=0.3, utility_head=True)
    controller = Controller.for_table(table, rows, config).eval()
    guard = [
        {"budget_ms": budget, "margin": 0.97, "deployed": True} for budget in budgets_ms.tolist()
    ]
    latency = fit_latency_model(table, rows, controller.normaliser)
    calibration = Calibration(guard, static=fit_static(table, rows).arrays(), latency=latency)
    return DeployedController(controller, None, calibration)


def in_turn(decide: Callable[[Any, float], object], requests: Sequence[Any] = SAMPLES) -> Way:
    """Return a function that decides on one request after another."""
    number = itertools.count()

    def call() -> object:
        i = next(number)
        return decide(requests[i % len(requests)], BUDGETS_MS[i % len(BUDGETS_MS)])

    return call


# -- what people would use instead -----------------------------------------------------------------


def best_within(outcomes: np.ndarray, budget_ms: float) -> int:
    """Return the configuration of the best accuracy that is expected to be on time, of accuracies
    and latencies [2 · C]."""
    accuracy, latency_ms = np.split(outcomes, 2)
    return int(np.where(latency_ms <= budget_ms, accuracy, -latency_ms).argmax())


def forest() -> Callable[[Any, float], object]:
    """Return the decisions of a random forest that predicts both outcomes of each configuration."""
    model = RandomForestRegressor(100, max_features=0.3, min_samples_leaf=5, random_state=0)
    model.fit(FEATURES, OUTCOMES)

    def decide(features: Any, budget_ms: float) -> int:
        x = np.concatenate(list(features.values()))[None]
        return best_within(model.predict(x)[0], budget_ms)

    return decide


def neighbours() -> Callable[[Any, float], object]:
    """Return the decisions of all samples of the profile, weighted by their similarity."""
    known = FEATURES / np.linalg.norm(FEATURES, axis=1, keepdims=True)

    def decide(features: Any, budget_ms: float) -> int:
        query = np.concatenate(list(features.values()))
        weight = np.exp(10 * (known @ (query / np.linalg.norm(query))))
        return best_within(weight / weight.sum() @ OUTCOMES, budget_ms)

    return decide


def texts_of(words: int) -> list[str]:
    """Return texts of so many words each, for the samples of the profile."""
    guides = "".join(path.read_text() for path in sorted(DOCS.glob("*.md"))).split()
    begins = np.random.default_rng(0).integers(len(guides) - words, size=TABLE.num_samples)
    return [" ".join(guides[begin : begin + words]) for begin in begins.tolist()]


def on_texts(words: int) -> tuple[Way, Callable[[], dict[str, Way]]]:
    """Return the decision on a text of so many words; and scikit-learn's hash of one alone."""
    texts = texts_of(words)
    table = replace(TABLE, features={}, texts={"prompt": texts})
    encoders = fit_encoders(table, table.split())
    agent = deployed_on(encoded_by(table, encoders))
    agent.calibration.texts = {name: {**each.arrays} for name, each in encoders.items()}
    requests = [{"prompt": text} for text in texts]
    vectoriser = HashingVectorizer(analyzer="char_wb", ngram_range=(3, 3))

    def peers() -> dict[str, Way]:
        hashed = in_turn(
            lambda request, budget_ms: vectoriser.transform([request["prompt"]]), requests
        )
        return {"scikit-learn's hash of the text alone": hashed}

    return in_turn(agent.decider.decide_index, requests), peers


def peers_of(agent: DeployedController, folder: Path) -> dict[str, Way]:
    """Return other ways to decide, by name."""
    write_onnx(Deployed(agent), folder / "controller.onnx")
    onnx = OnnxController(folder / "controller.onnx")
    return {
        "a forest of scikit-learn": in_turn(forest()),
        "weighted neighbours in NumPy": in_turn(neighbours()),
        "the same controller in ONNX runtime": in_turn(onnx.decide_index),
    }


# -- in front of a model ---------------------------------------------------------------------------


class InstantModel:
    """Answers at once; it says that an answer took what the first sample's did."""

    name = "instant"

    def __init__(self) -> None:
        self.knobs = tuple(
            KnobSupport(knob.name, knob.values[-1], values=knob.values) for knob in TABLE.knobs
        )
        labels = [str(TABLE.configuration(c)) for c in range(TABLE.num_configurations)]
        self.latency_ms = dict(zip(labels, TABLE.latency_ms[0].tolist(), strict=True))

    def first_stage(self, request: Request, features: bool = True) -> FirstStage:
        return FirstStage(request, SAMPLES[request.image], None, 0.0, 0.0)

    def answer(self, stages: Any, configuration: Any) -> list[Answer]:
        ms = self.latency_ms[str(dict(configuration))]
        answer = Answer(
            text="",
            total_ms=ms,
            prefill_ms=ms,
            vision_ms=0.0,
            vision_tokens=1,
            language_tokens=1,
            output_tokens=1,
        )
        return [answer] * len(stages)


def time_serving(bench: Bench, agent: DeployedController, folder: Path) -> None:
    """Time requests with and without a tracker, a log and a cache, beside the model alone."""
    configuration = TABLE.configuration(0)
    bare = InstantModel()

    def alone(request: Request, budget_ms: float) -> object:
        return bare.answer([bare.first_stage(request)], configuration)

    requests = [Request(row, "what?") for row in range(len(SAMPLES))]
    options: dict[str, dict[str, Any]] = {
        "nothing else": {"tracker": False},
        "a tracker": {},
        "a tracker and a log": {"log": folder / "log"},
        # the tracker would change between two equal requests
        "a cache of decisions": {"tracker": False, "cache": 1000},
    }
    for name, chosen in options.items():
        with AdaptiveModel(InstantModel(), agent, **chosen) as model:
            bench.line(
                f"a request through AdaptiveModel, {name}",
                "µs",
                in_turn(model.answer, requests),
                lambda: {"the model alone": in_turn(alone, requests)},
                target="≤ 300 µs",
            )


def time_features(bench: Bench) -> None:
    """Time the features that the built-in model pools, right after it has answered."""
    model = ElasticAdaptive()
    full = dict(model.configuration)
    questions = [ElasticRequests().request(str(row)) for row in range(32)]
    pooled = []
    for request in questions * 5:
        stage = model.first_stage(request)
        pooled.append(stage.extra_ms * 1e3)
        model.answer([stage], full)
    bench.tell(
        "features of the built-in model, right after an answer",
        "µs",
        statistics.median(pooled[len(questions) :]),
        target="≤ 40 µs, so that features and decision take 100",
    )


def main() -> None:
    """Time decisions alone, then in front of models."""
    bench = Bench()
    agent = deployed_on(TABLE)
    controller = agent.decider
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    transformer = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()
    x = torch.zeros(1, 32, 128)
    drift = np.random.default_rng(0).normal(0.1, 0.05, TABLE.num_configurations), 1.2

    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        folder = Path(name)
        peers = functools.cache(functools.partial(peers_of, agent, folder))
        ours = in_turn(controller.decide_index)
        bench.line("a decision, in a loop", "µs", ours, peers, target="≤ 20 µs")
        under_drift = in_turn(lambda x, ms: controller.decide_expected(x, ms, drift))
        bench.line("a decision under drift, in a loop", "µs", under_drift)
        before = functools.partial(transformer, x)
        behind = "a decision, right after a transformer"
        bench.line(behind, "µs", ours, peers, target="≤ 60 µs", before=before)
        for words in (60, 2000):
            of_text, hashes = on_texts(words)
            bench.line(
                f"a decision on a text of {words:,} words, in a loop",
                "µs",
                of_text,
                hashes,
                target="≤ 150 µs" if words == 60 else "",
            )
            bench.line(
                f"a decision on a text of {words:,} words, right after a transformer",
                "µs",
                of_text,
                before=before,
            )
        time_serving(bench, agent, folder)
    time_features(bench)
    wide = simulate(SimulatedConfig(samples=100, image_width=768, language_width=2080))
    features = {name: block[0].numpy() for name, block in wide.features.items()}
    decide = functools.partial(deployed_on(wide).decider.decide_index, features, 60.0)
    bench.line("a decision on 2,848 features, 240 configurations", "µs", decide)


if __name__ == "__main__":
    main()
