from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import small_table, table_of
from rich.console import Console

from knobwise.agents.baselines import BudgetAwareStatic, Oracle, Random
from knobwise.envs.reward import RewardConfig, RewardTable
from knobwise.envs.table import ProfileTable
from knobwise.experiments import by_dataset
from knobwise.experiments.by_dataset import StaticPerDataset
from knobwise.experiments.report import print_results, write_report
from knobwise.experiments.results import results_of


def two_sets() -> ProfileTable:
    """In data set a configuration 1 is right, in b configuration 0 in three of four; all take 1 ms."""
    b = [[1.0, 0.0]] * 3 + [[0.0, 0.0]]
    table = table_of([[0.0, 1.0]] * 6 + b, [[1.0, 1.0]] * 10)
    return replace(table, datasets=("a",) * 6 + ("b",) * 4)


def judged(table: ProfileTable, rows: torch.Tensor) -> dict[str, Any]:
    everything = torch.arange(table.num_samples)
    baselines = [
        BudgetAwareStatic(table, everything),
        StaticPerDataset(table, everything, rows),
        Random(),
        Oracle(table, rows),
    ]
    learned = [Random(1), Random(2)]
    rewards = RewardTable(table, RewardConfig(kind="utility"))
    return results_of(table, rows, torch.tensor([1.0, 2.0]), rewards, learned, [0, 1], baselines)


def test_the_static_way_of_a_data_set_is_fitted_on_it_alone() -> None:
    table = two_sets()
    rows = torch.tensor([9, 0, 6])
    static = StaticPerDataset(table, torch.arange(10), rows)
    assert static.choose({}, torch.full((3,), 2.0), table.mask[rows]).tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match="knows 3 samples"):
        static.choose({}, torch.ones(1), table.mask[:1])
    # of a data set without samples to fit on nothing is known
    other = StaticPerDataset(table, torch.arange(6), rows)
    assert other.choose({}, torch.full((3,), 2.0), table.mask[rows]).tolist() == [1, 1, 1]


def test_every_data_set_has_its_rows() -> None:
    found = judged(two_sets(), torch.arange(10))
    rows = {(row["dataset"], row["policy"]): row for row in found["by_dataset"]}
    order = ["controller", "budget_aware_static", "static_per_dataset", "random", "oracle"]
    assert list(rows) == [(name, policy) for name in "ab" for policy in order]
    assert {(row["dataset"], row["samples"]) for row in found["by_dataset"]} == {("a", 6), ("b", 4)}
    # over both data sets configuration 1 is right in 6 of 10, configuration 0 in 3
    assert rows["a", "budget_aware_static"]["utility"] == 1.0
    assert rows["b", "budget_aware_static"]["utility"] == 0.0
    assert rows["b", "static_per_dataset"]["utility"] == rows["b", "oracle"]["utility"] == 0.75
    assert rows["b", "static_per_dataset"]["gap_closed"] == 1.0
    assert rows["b", "oracle"]["utility_ci95"][0] < 0.75 < rows["b", "oracle"]["utility_ci95"][1]
    means = (row for row in found["rows"] if row["policy"] == "controller" and row["budget_ms"] is None)
    together = next(means)
    parts = [rows[name, "controller"]["utility"] * size for name, size in (("a", 0.6), ("b", 0.4))]
    assert together["utility"] == pytest.approx(sum(parts))
    missing = {"decision_us_p50"}
    assert set(rows["a", "controller"]) - {"dataset", "samples"} == set(together) - missing
    assert json.loads(json.dumps(found)) == found


def test_one_data_set_changes_nothing() -> None:
    found = judged(replace(two_sets(), datasets=()), torch.arange(10))
    assert "by_dataset" not in found
    assert by_dataset.sections(found) == by_dataset.cells(found) == []
    assert "by_dataset" not in judged(two_sets(), torch.arange(6))


def test_the_report_shows_them(tmp_path: Path) -> None:
    found = judged(two_sets(), torch.arange(10))
    (tmp_path / "results.json").write_text(json.dumps(found))
    text = write_report(tmp_path).read_text()
    assert "Data set by data set" in text
    assert "static of its data set" in text
    assert "4 samples" in text
    console = Console(file=io.StringIO(), width=200)
    print_results(found, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "static of its data set" in printed
    assert printed.count("learned controller") >= 3
    wide = by_dataset.cells(found)
    assert [line[0].split("\n")[0] for line in wide] == ["a", "", "", "", "", "b", "", "", "", ""]


def test_a_table_of_one_data_set_with_a_name_is_one_data_set() -> None:
    table = replace(small_table(20), datasets=("only",) * 20)
    assert "by_dataset" not in judged(table, torch.arange(20))
