"""The profile that comes with knobwise keeps what it promises."""

import hashlib
import json
from importlib import resources
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from knobwise.agents.evaluation.baselines import Oracle, PredictThenChoose, fit_static
from knobwise.agents.evaluation.evaluation import evaluate_policy
from knobwise.agents.teacher.experts import Experts
from knobwise.envs import RewardConfig, default_budgets
from knobwise.envs.bandit.reward import RewardTable
from knobwise.experiments.inspection.facts import inspect_table, mean_headroom
from knobwise.testbeds import builtin_profile
from knobwise.testbeds.elastic.adapter import ElasticAdaptive, request_of
from knobwise.testbeds.elastic.scenes import SEED, draw_samples
from knobwise.testbeds.elastic.settings import Configuration

FOLDER = Path(str(resources.files("knobwise.testbeds") / "data" / "builtin"))
KNOBS = list(Configuration._fields)
ABOUT = json.loads((FOLDER / "profile.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def table():
    return pl.read_parquet(FOLDER / "table.parquet").sort("sample_id", *KNOBS)


@pytest.fixture(scope="module")
def arrays(table):
    cells = table.group_by("sample_id", *KNOBS, maintain_order=True).agg(pl.median("accuracy"))
    samples = table["sample_id"].n_unique()
    return {
        "accuracy": cells["accuracy"].to_numpy().reshape(samples, -1),
        "configurations": table.select(KNOBS).unique().sort(KNOBS).to_numpy(),
    }


def test_it_is_small_and_whole():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 4e6
    for name, digest in ABOUT["sha256"].items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest


def test_every_sample_was_measured_at_every_configuration(table):
    samples, configurations = ABOUT["samples"], ABOUT["configurations"]
    repeats = ABOUT["config"]["repeats"]
    for number, least in ((samples, 1500), (configurations, 64), (repeats, 3)):
        assert number >= least
    cells = table.group_by("sample_id", *KNOBS).len()
    assert len(cells) == samples * configurations
    assert set(cells["len"]) == {repeats}
    profile = builtin_profile()
    assert (profile.num_repeats, profile.notes) == (repeats, ())
    assert profile.features_ms == ABOUT["features_ms"] > 0


def test_knobs_and_inputs_move_accuracy_and_latency(table):
    facts = inspect_table(builtin_profile())
    for effect in facts["knobs"].values():
        assert max(effect["accuracy"]) - min(effect["accuracy"]) >= 0.05
        assert max(effect["latency_ms"]) / min(effect["latency_ms"]) >= 1.14
    kinds = pl.read_parquet(FOLDER / "samples.parquet").select("sample_id", "question_type")
    joined = table.join(kinds.cast({"sample_id": pl.Int32}), "sample_id")
    means = joined.group_by("question_type", *KNOBS).agg(pl.mean("accuracy"))
    for _, kind in means.group_by("question_type"):
        assert kind["accuracy"].max() - kind["accuracy"].min() >= 0.05
    assert facts["config_dependent_share"] >= 0.60
    assert facts["latency_cv_within_configuration"] >= 0.24
    static, oracle = mean_headroom(facts)
    assert oracle - static >= 0.15


def test_the_features_say_which_configuration_is_needed(arrays):
    with np.load(FOLDER / "features.npz", allow_pickle=False) as file:
        assert file["sample_id"].tolist() == list(range(len(arrays["accuracy"])))
        for name in ("image_features", "language_features"):
            assert np.isfinite(file[name]).all()
    profile = builtin_profile()
    split, budgets_ms = profile.split(), default_budgets(profile)
    rewards = RewardTable(profile, RewardConfig(kind="utility"))
    rows = split.train
    _, normaliser, (fitted,) = Experts.fit(profile, rows, budgets_ms, ("ridge",), 0)
    ridge = PredictThenChoose("ridge", fitted.expert, normaliser)
    static, learned, best = (
        float(evaluate_policy(policy, profile, split.test, budgets_ms, rewards).utility.mean())
        for policy in (fit_static(profile, rows), ridge, Oracle(profile, split.test))
    )
    assert (learned - static) / (best - static) > 0.08


def test_the_description_of_the_run_is_the_default_configuration():
    assert ABOUT["command"] == "python -m knobwise.testbeds.make.builtin --out DIR"
    model = ElasticAdaptive()
    assert len(model.questions) == ABOUT["samples"]
    knobs = {knob.name: list(knob.values) for knob in builtin_profile().knobs}
    assert {knob: list(values) for knob, values in model.measured.items()} == knobs


def test_the_shipped_model_still_gives_the_recorded_answers_and_features(arrays):
    adapter = ElasticAdaptive()
    model = adapter.model
    features = dict(np.load(FOLDER / "features.npz", allow_pickle=False))
    agree = []
    for i, sample in enumerate(draw_samples(12, SEED)):
        request = request_of(sample)
        image, prompt = request.image, request.question
        for j in range(i % 7, len(arrays["configurations"]), 7):
            setting = Configuration(*map(int, arrays["configurations"][j]))
            text = model.generate(image, model.overview(image), prompt, setting).text
            agree.append((text == sample.answer) == bool(arrays["accuracy"][i, j]))
        for name, block in adapter.first_stage(request).features.items():
            assert np.allclose(features[name][i], block, atol=5e-3, rtol=5e-3)
    # other processors round differently, which may turn a close call
    assert np.mean(agree) > 0.95
