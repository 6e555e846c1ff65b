"""End to end, through the command line."""

import math
from pathlib import Path

import commands
import polars as pl
import pytest
import torch
from commands import OPTIMISER, TABLE, launch, read_json, words_of
from helpers import portfolio, table_of
from polars.testing import assert_frame_equal

from knobwise.agents import load_checkpoint
from knobwise.agents.controller.settings import EXPERTS
from knobwise.envs.readers.feature_files import write_features
from knobwise.envs.readers.long_table import long_frame, read_long_table
from knobwise.experiments.settings.config_file import read_settings_file, to_yaml

POLICIES = words_of("""
    controller teacher budget_aware_static best_static lookup_table latency_only ridge
    kernel_ridge gaussian_process knn random_forest gradient_boosting random oracle
""")
QUICK = [*OPTIMISER, "seeds=[0,1]"]
LEAN = words_of(QUICK, "policy=utility seeds=[0] baselines=false")
"""Where it does not matter what is trained: one network, no experts."""


MOST_TESTED = ["split.train=0.3"]
"""With the holes in the table, fewer than 30 decisions of a fifth of the samples were measured."""


@pytest.fixture
def folder(home):
    """An empty folder with a long table and its features, holes in the grid."""
    commands.write_table(90, holes=0.1)
    return home


def test_train_leaves_what_the_contract_says(folder):
    launch("train", TABLE, QUICK, MOST_TESTED, "tracking=offline name=first")
    run = folder / "runs/controller/first"
    assert (folder / "runs/latest").resolve() == run
    for name in ("config.yaml", "report.html", "metrics.csv", "checkpoints/last.pt"):
        assert (run / name).stat().st_size > 0
    assert list((run / "tensorboard").rglob("events.*"))
    assert list((run / "wandb").rglob("*.wandb"))

    results = read_json(run / "results.json")
    digest = read_long_table("t.parquet", features="f.npz").digest
    profile = {"name": "t", "digest": digest, "samples": 90, "configurations": 12}
    assert results["profile"] == profile
    assert results["split"] == "test"
    assert results["seeds"] == [0, 1]
    assert len(results["budgets_ms"]) == 5
    means = {row["policy"]: row for row in results["rows"] if row["budget_ms"] is None}
    assert list(means) == POLICIES
    assert len(results["rows"]) == 6 * len(POLICIES)
    assert means["oracle"]["gap_closed"] == pytest.approx(1)
    assert means["budget_aware_static"]["gap_closed"] == pytest.approx(0)
    bound = {r["budget_ms"]: r["utility"] for r in results["rows"] if r["policy"] == "oracle"}
    for row in results["rows"]:
        # the table has holes, and estimates of what was not measured may exceed the possible
        estimated = row["effective_cells"] is not None
        assert row["utility"] <= bound[row["budget_ms"]] + (0.02 if estimated else 1e-9)
        low, high = row["utility_ci95"]
        assert low - 1e-9 <= row["utility"] <= high + 1e-9
        learned = row["policy"] == "controller"
        assert (row["decision_us_p50"] is not None) == (row["utility_free"] is not None) == learned
    best_seed = load_checkpoint(run / "checkpoints/best.pt").extra
    assert best_seed["validation_utility"] == max(results["validation_utility"])
    shares = pl.DataFrame(results["knob_usage"]).filter(policy="controller", knob="top_k")["share"]
    assert shares.sum() == pytest.approx(5)
    for rows in results["guard"]:
        assert [row["budget_ms"] for row in rows] == results["budgets_ms"]
    for chosen in results["chosen"]:
        assert list(chosen["weights"]) == ["network", *EXPERTS]
        assert list(chosen["settings"]) == list(EXPERTS)
        assert chosen["iteration"] in (12, 16, 20)  # of heads, after 8 of the teacher
        assert chosen["grpo"].keys() == {"start"}


def test_inspect_shows_how_much_repeated_measurements_vary(folder, capsys):
    # ln ms varies by √2·.05 in a cell of two measurements .1 apart; configurations are ln 4 apart
    ms = [math.exp(base + shift) for base in (0, math.log(4)) for shift in (0, 0.1)]
    columns = {"sample_id": [*"aaaabbbb"], "size": 2 * [1, 1, 4, 4], "repeat": 4 * [0, 1]}
    columns |= {"accuracy": 2 * [0.0, 0.0, 1.0, 1.0], "latency_ms": 2 * ms}
    frame = pl.DataFrame(columns)
    frame.write_csv("repeats.csv")
    words = "inspect profile=table json=facts.json html=page.html"
    launch(words, "profile.path=repeats.csv")
    facts = read_json("facts.json")
    assert facts["latency_jitter_within_cell"] == pytest.approx(0.1 / math.sqrt(2), rel=1e-4)
    spread = facts["latency_spread_between_configurations"]
    assert spread == pytest.approx(math.log(4) / math.sqrt(2), rel=1e-2)
    for text in (capsys.readouterr().out, Path("page.html").read_text()):
        assert "7.1%" in text
    frame.filter(repeat=0).drop("repeat").write_csv("once.csv")
    launch(words, "profile.path=once.csv")
    assert read_json("facts.json")["latency_jitter_within_cell"] is None


def test_inspect_estimates_the_gain_at_budgets_of_ones_own(folder, capsys):
    launch("inspect", TABLE, "budgets_ms=[30,12.5] json=facts.json")
    facts = read_json("facts.json")
    assert facts["headroom"]["budgets_ms"] == [30.0, 12.5]
    assert len(facts["headroom"]["oracle"]) == 2
    # two budgets are what was asked for
    assert "default budgets" not in " ".join(facts["warnings"])
    assert "12.5" in capsys.readouterr().out
    for wrong in ("[]", "[0]", "[10,-1]"):
        words = words_of("inspect", TABLE, f"budgets_ms={wrong}")
        assert "budgets_ms" in commands.refused(words, capsys)
    for word in ("budgets_ms=[30]", "learning_curve=true", "html=page.html"):
        assert word[:5] in commands.refused(["inspect", "log=requests", word], capsys)


@pytest.mark.campaign
def test_inspect_says_how_many_cells_are_enough(folder, capsys):
    launch("inspect", TABLE, "learning_curve=true json=facts.json html=page.html")
    curve = read_json("facts.json")["learning_curve"]
    enough = next(point for point in curve if point["behind_ci95"][1] <= 0.01)
    says = f"{enough['cells']} of {curve[-1]['cells']} cells a sample are enough"
    if enough is curve[-1]:
        says = "No part of the cells is enough"
    assert says in " ".join(capsys.readouterr().out.split())
    page = Path("page.html").read_text()
    assert "How much to measure" in page
    assert "cells of a sample" in page  # the axis of the figure
    launch("inspect", TABLE, "json=facts.json")
    assert read_json("facts.json")["learning_curve"] == []


@pytest.mark.parametrize("unprofiled", ["predict", "forbid"])
def test_evaluate_repeats_what_training_reported(unprofiled, folder, capsys):
    """On the profile of the run, which need not be given."""
    launch("train", TABLE, QUICK, MOST_TESTED, f"seeds=[0] own_cost=false unprofiled={unprofiled}")
    trained = read_json("runs/latest/results.json")
    numbers = words_of("policy budget_ms utility accuracy latency_ms_mean satisfaction")
    rows = pl.DataFrame(trained["rows"]).select(numbers)
    for checkpoint in ("runs/latest/checkpoints/best.pt", "runs/latest"):
        words = f"checkpoint={checkpoint} json=again.json own_cost=false unprofiled={unprofiled}"
        launch("evaluate", words)
        again = read_json("again.json")
        assert_frame_equal(pl.DataFrame(again["rows"]).select(numbers), rows, check_exact=True)
        assert again["guard"] == trained["guard"]
        assert again["chosen"] == trained["chosen"]
        # predictions are no evidence of what GRPO gained on held-out samples
        gain = again.get("grpo_gain", {})
        assert ("held_out" in gain) == (unprofiled == "forbid")
        assert gain.items() <= trained["grpo_gain"].items()
    # an option of the profile changes that of the run
    launch("evaluate json=slower.json profile.features_ms=1000")
    slower = read_json("slower.json")
    assert slower["profile"]["digest"] == trained["profile"]["digest"]
    assert slower["rows"] != again["rows"]
    for word, fault in (("pth=x", "profile.pth"), ("features_ms=x", "features_ms=x")):
        assert fault in commands.refused(["evaluate", f"profile.{word}"], capsys)
    settings = Path("runs/latest/config.yaml")
    # as of another version, which had other readers
    content = read_settings_file(settings)
    content["profile"]["format"] = "calibrated"
    settings.write_text(to_yaml(content))
    assert "profile=calibrated" in commands.refused(["evaluate"], capsys)


def test_evaluating_on_another_profile_leaves_out_what_was_trained_on(folder, capsys):
    launch("train", TABLE, LEAN, "split.seed=3")
    slower = pl.read_parquet("t.parquet").with_columns(pl.col("latency_ms") * 2)
    slower.write_parquet("slower.parquet")
    launch("evaluate", TABLE, "profile.path=slower.parquet json=e.json baselines=false")
    table = read_long_table("t.parquet", features="f.npz")
    seen = torch.cat(table.split(seed=3)[:2])
    new = int((~torch.isin(table.split().test, seen)).sum())
    assert f"{new} of its 18" in capsys.readouterr().out
    assert read_json("e.json")["test_samples"] == new


SAVED = words_of("profile=table profile.path=saved.safetensors", QUICK, "seeds=[0]")


def save_noise(latency_range, latency_noise, samples=200):
    """A table in which features tell nothing: more compute is as much better for one sample as for
    another."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, samples, 6, generator=generator)
    accuracy = (torch.linspace(0.2, 0.8, 6) + 0.05 * noise[0]).clamp(0, 1)
    latency_ms = (torch.linspace(1, 1 + latency_range, 6) + latency_noise * noise[1]).exp()
    features = torch.randn(samples, 3, generator=generator)
    table_of(accuracy, latency_ms, features).save("saved.safetensors")


def test_without_headroom_the_guard_falls_back_and_says_so(folder, capsys):
    save_noise(latency_range=2, latency_noise=0.02)
    launch("train", SAVED, "own_cost=false")
    results = read_json("runs/latest/results.json")
    (rows,) = results["guard"]
    fallen = [row for row in rows if not row["deployed"]]
    assert len(fallen) >= 3
    named = {(row["policy"], row["budget_ms"]): row["utility"] for row in results["rows"]}
    for row in fallen:
        assert "static" in row["reason"]
        budget = row["budget_ms"]
        assert named["controller", budget] == named["budget_aware_static", budget]
    assert f" {len(fallen)} of 5 budgets" in capsys.readouterr().out


def test_a_promise_that_nothing_keeps_is_not_made(folder, capsys):
    save_noise(latency_range=0, latency_noise=0.8, samples=400)
    promised = "policy.promise=0.95"
    for command in (["train", *SAVED, promised], ["evaluate", *SAVED[:2], "baselines=false"]):
        launch(command)
        assert "No promise at" in capsys.readouterr().out
    results = read_json("runs/latest/results.json")
    assert results["guard"] == []
    rows = [row for row in results["promises"] if row["policy"] == "controller"]
    assert [row["budget_ms"] for row in rows] == results["budgets_ms"]
    for row in rows[:-1]:
        assert not row["kept"]
        assert row["held_out_bound"] < 0.95


def test_a_table_without_knobs(folder):
    table = portfolio(300)
    name = pl.format("solver-{}", "size").alias("configuration")
    long_frame(table).select("sample_id", name, "accuracy", "latency_ms").write_csv("solvers.csv")
    write_features(table, "instances.npz")
    words = """
        profile=table profile.path=solvers.csv profile.features=instances.npz baselines=false
        policy.experts=[ridge] policy.fold_networks=2 seeds=[0] optimiser.pretrain_iterations=200
        unprofiled=forbid
    """
    launch("train", QUICK, words)
    results = read_json("runs/latest/results.json")
    assert results["profile"]["samples"] == 300
    assert results["profile"]["configurations"] == 37
    means = {row["policy"]: row["utility"] for row in results["rows"] if row["budget_ms"] is None}
    assert means["controller"] > means["budget_aware_static"] + 0.05
