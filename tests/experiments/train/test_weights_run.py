"""budget=weights through the command line: train, report, compare, and mistakes in one line."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from helpers import small_table

import knobwise
from knobwise.__main__ import main
from knobwise.agents.policy.controller import NumpyController
from knobwise.envs.readers.long_table import write_features, write_long_table
from knobwise.experiments.results.decisions import read_decisions

SHORT = [
    *("optimiser.teacher_iterations=8", "optimiser.warmup_iterations=8", "optimiser.iterations=4"),
    *("optimiser.contexts=64", "optimiser.evaluate_every=4"),
    *("policy.hidden=16", "policy.members=2", "tracking=disabled", "seeds=[0,1]"),
]
TABLE = ["profile=table", "profile.path=measured.csv", "profile.features=features.npz"]
CHECKPOINT = "checkpoint=runs/weights/grpo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a table, and with two runs: as taught, and with GRPO."""
    folder, table = tmp_path_factory.mktemp("weights"), small_table(80)
    table = replace(table, cost=60 / table.latency_ms, cost_name="energy_j")
    write_long_table(table, folder / "measured.csv")
    write_features(table, folder / "features.npz")
    write_long_table(small_table(20), folder / "without.csv")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "experiment=weights", *TABLE, *SHORT, "name=grpo"]) == 0
        assert (
            main(
                [
                    "train",
                    "experiment=weights",
                    *TABLE,
                    *SHORT,
                    "name=alone",
                    "optimiser.iterations=0",
                ]
            )
            == 0
        )
    return folder


def test_a_run_leaves_fronts_a_report_and_a_policy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    run = Path("runs/weights/grpo")
    results = json.loads((run / "results.json").read_text())
    assert (results["sense"], results["cost_name"], len(results["worths"])) == (
        "weights",
        "energy_j",
        49,
    )
    means = {row["policy"]: row for row in results["rows"] if row["weights"] is None}
    assert list(means) == ["controller", "static_mix", "oracle"]
    assert means["static_mix"]["hypervolume"] < means["oracle"]["hypervolume"] < 1
    assert (means["static_mix"]["gap_closed"], means["oracle"]["gap_closed"]) == (
        0.0,
        pytest.approx(1.0),
    )
    scores = (
        read_decisions(run)
        .group_by("policy", maintain_order=True)
        .agg(pl.col("score").mean())["score"]
        .to_list()
    )
    assert scores == pytest.approx([row["reward"] for row in means.values()], rel=1e-4)
    page = (run / "report.html").read_text()
    assert "mixtures on the front of the learned controller dominate" in page
    assert "mean energy_j" in page  # the axis of the picture
    policy = knobwise.load(run)
    features = {name: [0.0] * width for name, width in policy.features.items()}
    decision = policy.decide(features, [20.0, 5.0])
    assert decision.keys() == {"max_crops", "top_k", "num_active_blocks"}
    exported = NumpyController.load(run / "controller.npz")
    blocks = {name: np.zeros((1, width), np.float32) for name, width in policy.features.items()}
    (chosen,) = exported.choose(blocks, np.array([[20.0, 5.0]]))
    assert exported.configuration(chosen) == decision


def test_what_is_exported_decides_as_the_run_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert main(["export", CHECKPOINT, *TABLE]) == 0
    facts = json.loads(Path("exported/export.json").read_text())
    assert facts["decision_us_p50"] > 0
    run = NumpyController.load("runs/weights/grpo/controller.npz")
    assert NumpyController.load("exported/controller.npz").digest == run.digest


def test_what_grpo_added_is_known_on_held_out_samples_where_there_was_grpo(folder: Path) -> None:
    results = {}
    for name in ("grpo", "alone"):
        results[name] = json.loads((folder / f"runs/weights/{name}/results.json").read_text())
    assert results["grpo"]["grpo_gain"].keys() == {"held_out", "held_out_ci95"}
    assert "grpo_gain" not in results["alone"]
    page = (folder / "runs/weights/grpo/report.html").read_text()
    assert re.search(
        "GRPO (changes the reward of the deployed controller|does not improve this policy)", page
    )


def test_compare_shows_the_hypervolume_beside_static_mixtures(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["compare", "runs/weights", "html=page.html", "json=numbers.json"]) == 0
    results = json.loads(Path("runs/weights/grpo/results.json").read_text())
    printed = capsys.readouterr().out
    for row in results["rows"]:
        if row["weights"] is None:
            assert f" {row['hypervolume']:.3f} [" in printed
    (difference,) = json.loads(Path("numbers.json").read_text())["differences"]
    assert difference.items() >= {"run": "grpo", "against": "alone", "samples": 16}.items()
    assert "<h2>Fronts</h2>" in Path("page.html").read_text()


def test_the_default_policy_goes_without_experts_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    words = [
        "train",
        "experiment=controller",
        "budget=weights",
        *TABLE,
        *SHORT[:-1],
        "seeds=[0]",
        "name=default",
    ]
    assert main(words) == 0
    assert "budget=weights: the network teaches alone, without experts" in capsys.readouterr().err
    settings = Path("runs/controller/default/config.yaml").read_text()
    assert "experts: []" in settings
    assert "kind: priced" in settings


def test_heads_without_a_teacher_draw_a_front_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    words = [
        "train",
        "experiment=weights",
        *TABLE,
        *SHORT[:-1],
        "seeds=[0]",
        "policy=independent",
        "name=heads",
    ]
    assert main(words) == 0
    results = json.loads(Path("runs/weights/heads/results.json").read_text())
    assert {row["policy"] for row in results["rows"]} == {"controller", "static_mix", "oracle"}
    assert results["chosen"][0]["weights"] == {}


MISTAKES = {
    "train experiment=weights profile=table profile.path=without.csv": "cost.NAME",
    "train experiment=weights budgets_ms=[3]": "budgets_ms: ",
    "train experiment=weights split.repeats=2": "split.repeats: ",
    f"export {CHECKPOINT} onnx=true": "onnx=true",
    f"evaluate {CHECKPOINT}": "budget=weights",
    f"explain {CHECKPOINT} sample=1 budget_ms=5": "budget_ms=5.0",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_refused_in_a_line(
    words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    table = [] if "profile=" in words else TABLE
    assert main([*words.split(), *table]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match("knobwise: ", line)
    assert MISTAKES[words] in line
