"""`knobwise profile complete=RUN` from end to end, on a model with knobs that answers at once."""

import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from commands import launch, read_json, refused

from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.experiments.evidence.decisions import read_decisions
from knobwise.experiments.settings.config_file import read_settings_file, to_yaml
from knobwise.profiling.measuring.adaptive_model import (
    Answer,
    FirstStage,
    KeepsConfiguration,
    KnobSupport,
)
from knobwise.profiling.measuring.questions import VQAItem

QUICK = [
    "policy=utility",
    "seeds=[0]",
    "optimiser.teacher_iterations=4",
    "optimiser.pretrain_iterations=4",
    "optimiser.iterations=2",
    "own_cost=false",
    "tracking=disabled",
]
MEASURE = ["profile", "model=test_complete:Sizes", "out=part", "knobs.repeats=1"]
VALUES = "knobs.values={size: [1, 2, 3, 4, 5, 6]}"
SPARSE = [VALUES, "knobs.per_sample=2", "knobs.whole_test=false"]
RUN = "runs/controller/r"


class Sizes(KeepsConfiguration):
    """A model that is right if it is as large as the question is hard; slower when larger."""

    name = "sizes"
    dataset = "counts"
    knobs = (KnobSupport("size", 4, 1, 6, "parts"),)
    configuration = {}
    questions = tuple(VQAItem(f"q{n}", None, f"what is {n}", (str(n % 5),)) for n in range(60))
    asked = 0

    def first_stage(self, request, features=True):
        digit = float(request.question.split()[-1]) % 5
        return FirstStage(request, {"text": np.float32([digit])}, digit, 1.0, 0.0)

    def answer(self, stages, configuration):
        with self.set_knobs(configuration):
            return [self._answer(stage) for stage in stages]

    def _answer(self, stage):
        Sizes.asked += 1
        size = self.configuration["size"]
        time = 10.0 * size + stage.kept / 10
        text = str(int(stage.kept)) if stage.kept < size else "?"
        return Answer(text, time, time / 2, 0.0, 1, 1, 1)


@pytest.fixture
def trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "test_complete", sys.modules[__name__])
    launch(MEASURE, SPARSE)
    table = "part/table.parquet", "part/features.safetensors"
    paths = [f"profile.path={table[0]}", f"profile.features={table[1]}"]
    launch("train profile=table", paths, QUICK, "name=r")
    return tmp_path


def test_what_is_chosen_is_measured_and_decides(trained):
    before = load_checkpoint(f"{RUN}/checkpoints/best.pt")
    results = read_json(f"{RUN}/results.json")
    learned = results["rows"][0]
    assert learned["effective_cells"] < results["test_samples"]
    # of so few nothing is known, of what is deployed neither
    assert learned["measured_decisions"] < learned["decisions"] == results["test_samples"]
    for row in results["rows"]:
        assert (row["utility"], row["utility_ci95"], row["satisfaction"]) == (None, None, None)
    assert not any(row["deployed"] for row in results["guard"][0])
    assert not {"validation_utility", "attainable", "reliability"} & results.keys()
    assert "held_out" not in results.get("grpo_gain", {})
    decisions = read_decisions(RUN)
    assert decisions["sampling_weight"].unique().sort().to_list()[:2] == [0.0, 3.0]

    asked = Sizes.asked
    launch(MEASURE, f"complete={RUN}")
    part = pl.read_parquet("part/table.parquet")
    assert Sizes.asked > asked
    # what was measured for judging stands for itself, all else for 6 of 2 cells
    assert set(part["sampling_weight"]) == {1.0, 3.0}
    after = load_checkpoint(f"{RUN}/checkpoints/best.pt")
    judged = before.controller.calibration.judged
    count = len(judged["rows"])
    calibration = after.controller.calibration
    for row in (*calibration.guard, *calibration.guard_if_free):
        assert row["effective_cells"] == pytest.approx(count)
    for name, values in before.network.state_dict().items():
        torch.testing.assert_close(after.network.state_dict()[name], values)
    # by hand: the gain at a budget is the mean difference of what was measured
    table = {(row["sample_id"], row["size"]): row for row in part.iter_rows(named=True)}
    ids = sorted({row["sample_id"] for row in part.iter_rows(named=True)})

    def utility(sample, column, budget_ms):
        cell = table[ids[sample], int(column) + 1]
        return cell["accuracy"] * (cell["latency_ms"] <= budget_ms)

    row = after.controller.calibration.guard[1]
    choices = zip(judged["rows"], judged["chosen"][:, 1], judged["static"][:, 1], strict=True)
    gains = []
    for sample, chosen, static in choices:
        of_policy = utility(sample, chosen, row["budget_ms"])
        gains.append(of_policy - utility(sample, static, row["budget_ms"]))
    assert row["gain"] == pytest.approx(np.mean(gains))

    # once more changes nothing
    asked = Sizes.asked
    launch(MEASURE, f"complete={RUN}")
    assert Sizes.asked == asked
    again = load_checkpoint(f"{RUN}/checkpoints/best.pt").controller.calibration.guard
    assert again == after.controller.calibration.guard

    # every decision of the controller and of static on test samples is measured now
    launch(f"evaluate checkpoint={RUN} own_cost=false decisions=d.parquet json=again.json")
    by_name = {row["policy"]: row for row in reversed(read_json("again.json")["rows"])}
    for policy in ("controller", "budget_aware_static"):
        assert by_name[policy]["measured_decisions"] == by_name[policy]["decisions"]
        assert 0 <= by_name[policy]["utility"] <= 1
    judged = pl.read_parquet("d.parquet")
    for policy in ("controller", "budget_aware_static"):
        weights = judged.filter(policy=policy)["sampling_weight"]
        assert set(weights) == {1.0}
    # the same command without it keeps the cells
    launch(MEASURE, SPARSE)
    kept = pl.read_parquet("part/table.parquet")
    assert kept.equals(part)


def test_mistakes(trained, capsys):
    assert "nowhere" in refused([*MEASURE, "complete=nowhere"], capsys)
    other = ["profile", "model=test_complete:Sizes", "out=other", "knobs.repeats=1"]
    assert "profile.json" in refused([*other, f"complete={RUN}"], capsys)
    launch(other, SPARSE, "knobs.samples=40")
    assert "other samples" in refused([*other, f"complete={RUN}"], capsys)
    # code that a run names is not executed
    content = read_settings_file(Path(RUN, "config.yaml"))
    content["profile"]["features_from"] = "os:abort"
    Path(RUN, "config.yaml").write_text(to_yaml(content))
    assert "os:abort" in refused([*MEASURE, f"complete={RUN}"], capsys)
    # nothing is left to measure for a run on a whole profile
    launch(other, [VALUES])
    whole = ["profile.path=other/table.parquet", "profile.features=other/features.safetensors"]
    launch("train profile=table", whole, QUICK, "name=w")
    assert "nothing to measure" in refused([*other, "complete=runs/controller/w"], capsys)


def test_a_profile_measured_in_part_is_served_live(trained, capsys):
    profile = "profile.path=part/table.parquet profile.features=part/features.safetensors"
    live = "live=true model=test_complete:Sizes profile=table stream.requests=12 json=live.json"
    launch(f"evaluate checkpoint={RUN}", live, profile)
    assert "predictions" in capsys.readouterr().err
    results = read_json("live.json")
    assert {"controller", "budget_aware_static"} <= {row["policy"] for row in results["rows"]}
    replayed = [row["replay"] for row in results["live"]["agreement"]]
    assert np.isfinite(replayed).all()
