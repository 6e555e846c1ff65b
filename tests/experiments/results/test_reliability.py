"""Predicted probabilities of being on time, bins of them, and a run at fewer than five budgets."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
import torch
from commands import OPTIMISER, Capture
from helpers import small_table, table_of

from knobwise.__main__ import main
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.judging.baselines import BudgetAwareStatic, Oracle
from knobwise.agents.stack.stacked_controller import fit_stack
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import RewardConfig
from knobwise.envs.readers.long_table import write_features, write_long_table
from knobwise.experiments.results.controllers import judge_deadlines
from knobwise.experiments.results.decisions import FILE, SCHEMA, read_decisions
from knobwise.experiments.results.reliability import expected_in_time, reliability

TABLE = small_table(60)
ROWS = torch.arange(60)


def untrained(**settings: object) -> Controller:
    return Controller.for_table(TABLE, ROWS, PolicyConfig(hidden=8, **settings)).eval()


def test_bins_by_hand() -> None:
    # 20 decisions of two budgets and seeds in any order: ten bins of two, of .05 and .1, .15 and .2, …
    predicted = [0.05 * i for i in range(1, 21)]
    rows = [{"policy": "controller", "expected_in_time": p, "in_time": float(p > 0.5)} for p in reversed(predicted)]
    rows += [{"policy": "oracle", "expected_in_time": None, "in_time": 1.0}]
    bins = reliability(pl.DataFrame(rows))
    assert [row["decisions"] for row in bins] == [2] * 10
    assert [row["expected_in_time"] for row in bins] == pytest.approx([0.075 + 0.1 * i for i in range(10)])
    assert [row["in_time"] for row in bins] == [0.0] * 5 + [1.0] * 5
    few = reliability(pl.DataFrame(rows[:3]))
    assert [row["expected_in_time"] for row in few] == pytest.approx([0.9, 0.95, 1.0])
    assert reliability(pl.DataFrame(rows).with_columns(expected_in_time=pl.lit(None, pl.Float32))) == []


def test_the_probability_is_that_of_the_choice_under_what_is_left_of_the_budget() -> None:
    network = untrained(structure="utility", members=2, experts=("ridge",))
    stack = fit_stack(TABLE, ROWS, network, network.config, default_budgets(TABLE), seed=0)
    left, rows = torch.tensor([8.0, 12.0], dtype=torch.float64), torch.tensor([5, 3, 9])
    chosen = torch.tensor([[0, 11], [4, 2], [7, 7]])
    got = expected_in_time(stack, TABLE, rows, chosen, left)
    assert got is not None
    features = stack.features({name: block[rows] for name, block in TABLE.features.items()}, 3)
    for b in range(2):
        meets = stack.view(features, left[b].float().expand(3)).meets
        torch.testing.assert_close(got[:, b], meets[torch.arange(3), chosen[:, b]])
    alone = untrained(structure="utility", members=1)
    assert expected_in_time(alone, TABLE, rows, chosen, left) is not None
    for policy in (untrained(structure="independent"), Oracle(TABLE, rows)):
        assert expected_in_time(policy, TABLE, rows, chosen, left) is None


@pytest.mark.parametrize("structure", ["utility", "independent"])
def test_only_learned_policies_that_predict_have_it(structure: str) -> None:
    budgets, rewards = default_budgets(TABLE), RewardTable(TABLE, RewardConfig())
    baselines = [BudgetAwareStatic(TABLE, ROWS), Oracle(TABLE, ROWS)]
    policy = untrained(structure=structure)
    results, decisions = judge_deadlines(TABLE, ROWS, budgets, rewards, [policy, policy], [0, 1], baselines)
    known = decisions.drop_nulls("expected_in_time")
    if structure == "utility":
        assert known["policy"].unique().to_list() == ["controller"]
        assert len(known) == 2 * 60 * len(budgets)
        assert sum(row["decisions"] for row in results["reliability"]) == len(known)
    else:
        assert len(known) == 0
        assert "reliability" not in results


def test_older_runs_have_no_such_column(tmp_path: Path) -> None:
    older = pl.DataFrame(schema={name: kind for name, kind in SCHEMA.items() if name != "expected_in_time"})
    older.write_parquet(tmp_path / FILE)
    assert read_decisions(tmp_path).schema == SCHEMA


def test_a_run_at_fewer_budgets_says_so_once_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Three configurations that cost 1, 2 and 4 ms on every sample; in hindsight any of them may be right."""
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    right = (torch.rand(60, 3, generator=generator) < torch.tensor([0.4, 0.6, 0.8])).float()
    table = table_of(right, torch.tensor([[1.0, 2.0, 4.0]]).repeat(60, 1), torch.randn(60, 2, generator=generator))
    write_long_table(table, "t.parquet")
    write_features(table, "f.npz")
    words = ["profile=table", "profile.path=t.parquet", "profile.features=f.npz", "policy=utility", "policy.members=2"]
    assert main(["train", *words, *OPTIMISER, "seeds=[0]", "baselines=false"]) == 0
    printed = capsys.readouterr()
    note = "budgets: 3 of 5 are distinct, because many latencies are equal; budgets_ms sets others"
    assert (printed.out + printed.err).count(note) == 1
    results = json.loads(Path("runs/latest/results.json").read_text())
    assert results["budgets_ms"] == [1, 2, 4]
    policies = [row["policy"] for row in results["rows"]]
    assert all(policies.count(policy) == 1 + 3 for policy in policies)
    assert [row["budget_ms"] for row in results["guard"][0]] == [1, 2, 4]
    assert "Reliability" in Path("runs/latest/report.html").read_text()
