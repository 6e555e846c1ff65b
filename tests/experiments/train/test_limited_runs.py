"""A run within limits on further costs: trained, judged, exported, and deciding in NumPy alone."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from commands import OPTIMISER, launch, read_json, refused, words_of
from helpers import input_error, small_table
from replayed import untrained

import knobwise
from knobwise.agents import NumpyController, load_checkpoint
from knobwise.agents.evaluation.limits import fit_bounds
from knobwise.agents.training.checkpoint import Loaded
from knobwise.envs.readers.feature_files import write_features
from knobwise.envs.readers.long_table import write_long_table
from knobwise.experiments.deploy import decide
from knobwise.experiments.evidence.decisions import read_decisions

PROFILE = "profile=table profile.path=t.parquet profile.features=f.npz profile.costs=[usd]"
QUICK = words_of(OPTIMISER, "policy=utility seeds=[0] own_cost=false name=x")
LIMIT = 0.003


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A profile in this folder whose price is that of a configuration alone, known exactly."""
    monkeypatch.chdir(tmp_path)
    table = small_table(120)
    step = 1 + table.configurations.sum(1).float()
    price = (0.001 * step).expand(120, -1).contiguous()
    table = replace(table, costs={"usd": price})
    write_long_table(table, "t.parquet")
    write_features(table, "f.npz")
    return table


def prices_of(table):
    return {table.label(c): float(p) for c, p in enumerate(table.costs["usd"][0])}


def test_a_run_within_limits_from_training_to_numpy(table, tmp_path):
    launch("train", QUICK, PROFILE, f"budget.limits={{usd:{LIMIT}}}")
    run = tmp_path / "runs/controller/x"
    results = read_json(run / "results.json")
    assert results["costs"] == {"usd": {"unit": "USD", "limit": LIMIT}}
    assert {row["cost_usd_over"] for row in results["rows"]} == {0.0}
    # every policy keeps the limit, the oracle and the baselines too
    decisions = read_decisions(run)
    assert {"oracle", "random", "ridge", "budget_aware_static"} <= {*decisions["policy"]}
    assert decisions["cost_usd"].max() <= np.float32(LIMIT)
    assert decisions["cost_usd"].max() > np.float32(LIMIT) / 2
    # it is judged again with the same limits, and gets the same
    launch("evaluate checkpoint=runs/controller/x own_cost=false json=again.json")
    again = read_json("again.json")
    for key in ("utility", "cost_usd_mean", "cost_usd_over"):
        assert [row[key] for row in again["rows"]] == pytest.approx(
            [row[key] for row in results["rows"]], abs=1e-9
        )
    # what is exported decides the same
    launch("export checkpoint=runs/controller/x out=out")
    light = NumpyController.load("out/controller.npz")
    assert light.limits.declared == {"usd": LIMIT}
    test = load_checkpoint(run / "checkpoints/best.pt").extra["test_rows"]
    prices = prices_of(table)
    of_controller = decisions.filter(policy="controller")
    for row in test.tolist()[:8]:
        request = {name: block[row].numpy() for name, block in table.features.items()}
        of_row = of_controller.filter(sample=table.sample_ids[row])
        for budget, choice in of_row.select("condition", "choice").iter_rows():
            index = light.decide_index(request, budget)
            assert table.label(index) == choice
            other = light.decide_index(request, budget, limits={"usd": 0.002})
            assert prices[table.label(other)] <= np.float32(0.002)


def test_a_file_of_requests_is_decided_within_the_limits(table):
    launch("train", QUICK, PROFILE, "baselines=false", f"budget.limits={{usd:{LIMIT}}}")
    blocks = {name: pl.Series(block.tolist()) for name, block in table.features.items()}
    pl.DataFrame({**blocks, "budget_ms": 30.0}).write_parquet("requests.parquet")
    launch("decide requests=requests.parquet checkpoint=runs/controller/x out=d.csv")
    knobs = pl.read_csv("d.csv").select(knob.name for knob in table.knobs)
    prices = prices_of(table)
    for values in knobs.iter_rows(named=True):
        label = " ".join(f"{name}={value}" for name, value in values.items())
        assert prices[label] <= np.float32(LIMIT)


def test_requests_that_nothing_keeps_the_limits_for_are_counted(table, capsys, monkeypatch):
    # the price also grows with a feature
    size = table.features["image_features"][:, :1].mul(2).exp()
    table = replace(table, costs={"usd": table.costs["usd"] * size})
    agent = untrained(table, deploy=[True] * 5)
    about = table, torch.arange(120), agent.controller.normaliser
    agent.calibration.costs = fit_bounds(*about, 0.5)
    agent.calibration.cost_names = ["usd"]
    agent.calibration.limits = {"values": {"usd": LIMIT}, "probability": 0.5}
    Loaded(agent, "t", table.digest, {}).save("c.pt")
    blocks = {name: pl.Series(block.tolist()) for name, block in table.features.items()}
    pl.DataFrame({**blocks, "budget_ms": 30.0}).write_parquet("requests.parquet")
    above = 0
    for row in range(120):
        request = {name: block[row].numpy() for name, block in table.features.items()}
        above += "no configuration" in agent.decider.limits_note(request)
    assert 0 < above < 120
    # in several parts
    monkeypatch.setattr(decide, "AT_ONCE", 50)
    capsys.readouterr()
    launch("decide requests=requests.parquet checkpoint=c.pt out=d.csv")
    lines = [line for line in capsys.readouterr().err.splitlines() if "usd=" in line]
    assert len(lines) == 1
    assert f"{above} requests" in lines[0]
    assert f"usd={LIMIT:g}" in lines[0]


def test_a_profile_with_holes_is_trained_and_judged_within_limits(table, tmp_path, monkeypatch):
    # of few samples
    monkeypatch.setattr("knobwise.envs.tables.measured_decisions.FEWEST_MEASURED", 1)
    whole = pl.read_parquet("t.parquet")
    whole.sample(fraction=0.5, seed=0).write_parquet("t.parquet")
    launch("train", QUICK, PROFILE, "baselines=false", f"budget.limits={{usd:{LIMIT}}}")
    rows = read_json(tmp_path / "runs/controller/x/results.json")["rows"]
    assert all(np.isfinite(row["cost_usd_mean"]) for row in rows)
    # prices of cells that nobody measured are predictions, so some are wrong
    assert all(row["cost_usd_mean"] < 1.2 * LIMIT for row in rows)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("budget.limits={eur:1}", "eur"),
        ("budget.limits={usd:-1}", "usd"),
        ("budget.limits={usd:0.003} budget=mean", "mean"),
        ("budget.limits={usd:0.003} budget.limit_probability=1.5", "limit_probability"),
        ("budget.limits=[usd]", "budget.limits"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(table, words, fault, capsys):
    assert fault in refused(words_of("train", QUICK, PROFILE, words), capsys)


def test_the_exported_folder_decides_within_limits_without_this_project(table, tmp_path):
    launch("train", QUICK, PROFILE, "baselines=false", f"budget.limits={{usd:{LIMIT}}}")
    run = tmp_path / "runs/controller/x"
    code = """
import subprocess
import sys
import numpy as np
from policy import NumpyController
light = NumpyController.load("controller.npz")
request = {name: np.zeros(width, np.float32) for name, width in light.feature_sizes.items()}
print(light.decide(request, budget_ms=30.0, limits={"usd": 0.003}))
assert not {"torch", "knobwise"} & sys.modules.keys()
"""
    done = subprocess.check_output([sys.executable, "-c", code], cwd=run, text=True, env={})
    assert "max_crops" in done


def test_fit_takes_limits_as_a_mapping_and_refuses_other_mappings(table):
    quick = {"teacher_iterations": 4, "pretrain_iterations": 4, "iterations": 0}
    options = {"policy": "utility", "optimiser": quick}
    policy = knobwise.fit(table, budget={"limits": {"usd": LIMIT}}, **options)
    assert policy.agent.decider.limits.declared == {"usd": LIMIT}
    for wrong in ({"threads": {"a": 1}}, {"budget": {"limit": {"usd": 1}}}):
        with input_error("no such option"):
            knobwise.fit(table, **options, **wrong)
    with input_error("eur"):
        knobwise.fit(table, budget={"limits": {"eur": 1.0}}, **options)
