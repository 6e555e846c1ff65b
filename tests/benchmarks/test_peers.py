"""Other libraries beside ours, in this environment, which has one of them."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import small_table, table_of

from knobwise.agents.evaluation.evaluation import evaluate_policy

ROOT = Path(__file__).resolve().parents[2]
BRIEF = {
    "policy": "utility",
    "policy.hidden": 8,
    "policy.fold_networks": 2,
    "optimiser": {"teacher_iterations": 2, "pretrain_iterations": 2, "iterations": 0},
}


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/peers"))
    import peers

    monkeypatch.setattr(peers, "SIMPLE", {"kernel_ridge": "kernel ridge, ours"})
    return peers


def test_a_library_pays_for_the_features_that_it_read(peers):
    look = torch.tensor([[3.0, 0.0]])
    table = table_of([[1.0, 1.0]], [[4.0, 6.0]], torch.zeros(1, 1), first_look_ms=look)
    budgets_ms = np.array([3.0, 5.0, 7.0])
    policy = peers.Replayed("a library", np.array([[0, 0, 1]]), budgets_ms)
    judged = evaluate_policy(policy, table, torch.arange(1), torch.from_numpy(budgets_ms))
    assert judged.latency_ms.tolist() == [[4.0, 4.0, 6.0]]
    assert judged.utility.tolist() == [[0.0, 1.0, 1.0]]


@pytest.mark.campaign
def test_a_library_is_judged_beside_ours_on_the_same_samples(peers, tmp_path):
    first = peers.Unit(small_table(60), 0, tmp_path / "0", **BRIEF)
    second = peers.Unit(small_table(60), 1, tmp_path / "1", first.budgets_ms.tolist(), **BRIEF)
    units = [first, second]
    for unit in units:
        unit.learn()
        unit.let_choose("extra-trees", sys.executable)
    rows = {row[0]: row[1:] for row in peers.judged(units, ["extra-trees", "LightGBM"])}
    ours = rows["ours, decisions free"]
    assert ours[2] == ""  # not compared with itself
    for name in ("extra-trees", "kernel ridge, ours"):
        utility, _, difference, seconds, micros, *_ = rows[name]
        middle = float(difference.split()[0].replace("−", "-"))
        assert middle == pytest.approx(float(utility) - float(ours[0]), abs=0.11)
        assert float(utility) <= float(rows["oracle"][0])
        assert float(seconds.replace(",", "")) > 0
        assert float(micros.replace(",", "")) > 0
    assert rows["oracle"][1] == "100 %"
    assert rows["budget aware static"][1] == "0 %"
    # it was not run
    assert rows["LightGBM"][1:] == [""] * (len(peers.HEADS) - 1)

    # what it learned from says nothing of test samples but their features
    data = np.load(tmp_path / "0/data.npz")
    assert len(data["utility"]) == len(data["x"]) == len(data["held_out"]) == 48
    assert len(data["test_x"]) == 12
    result = first.result("extra-trees")
    assert result["chosen"].shape == (12, len(first.budgets_ms))
    # scikit-learn takes scipy along, of which alone are 50 MB
    assert result["installed_mb"] > 50
    assert result["imported_mb"] > 5
