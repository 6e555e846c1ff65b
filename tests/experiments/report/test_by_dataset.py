"""Results within each data set, in the numbers, the report and on the terminal."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import OPTIMISER
from helpers import Always, small_table, table_of
from page_parts import printed, report_of
from ruled import Ruled, ruled_at_means

from knobwise.__main__ import main
from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.judging.baselines import Oracle, Random, StaticPerDataset, static_of
from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.agents.stack.prices import MeanBudgetPolicy
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import RewardConfig
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.report.report import print_results
from knobwise.experiments.report.tables import by_dataset
from knobwise.experiments.report.words import read_results
from knobwise.experiments.results.controllers import judge_on_test


def two_sets():
    """In data set a configuration 1 is right, in b configuration 0 in three of four; all take 1
    ms."""
    b = [[1.0, 0.0]] * 3 + [[0.0, 0.0]]
    table = table_of([[0.0, 1.0]] * 6 + b, [[1.0, 1.0]] * 10)
    return replace(table, datasets=("a",) * 6 + ("b",) * 4)


class Worst:
    """Named before `random` and never better: configuration 0 of a, 1 of b, never right."""

    name = "knn"

    def choose(self, features, budgets_ms, mask=None):
        return (np.arange(len(budgets_ms)) >= 6).astype(np.int64)


def judged(table, rows):
    everything = torch.arange(table.num_samples)
    fitted = [static_of(table, everything), StaticPerDataset(table, everything, rows)]
    baselines = [*fitted, Random(), Worst(), Oracle(table, rows)]
    learned = [Ruled(Random(1)), Ruled(Random(2))]
    rewards = RewardTable(table, RewardConfig(kind="utility"))
    budgets = torch.tensor([1.0, 2.0])
    about = table, everything, rows, budgets, learned, [0, 1], baselines
    return judge_on_test(*about, charge=False, rewards=rewards)[0]


def judged_at_means():
    """Configuration 0 takes 1 ms and is right for b only, 1 takes 3 ms, in b 5, and is right for a
    only. The controller takes 1 for all, `knn` 0."""
    table = table_of([[0.0, 1.0]] * 6 + [[1.0, 0.0]] * 2, [[1.0, 3.0]] * 6 + [[1.0, 5.0]] * 2)
    table = replace(table, datasets=("a",) * 6 + ("b",) * 2)
    budgets = torch.tensor([2.0, 4.0])
    worths = torch.tensor([5.0, 9.0])
    learned = ruled_at_means(Always(1), budgets, worths)
    other = MeanBudgetPolicy(
        "knn", lambda features, group, mask: np.zeros(len(mask), np.int64), budgets, worths
    )
    everything = torch.arange(8)
    about = table, everything, everything, budgets, [learned] * 2, [0, 1], [other]
    return judge_on_test(*about, charge=False)[0] | {"guard": [], "chosen": []}


def by_set(results, others, sizes):
    """Key → data set and policy → the number; the rows are checked to be those of a and b."""
    rows = results["by_dataset"]
    order = ["controller", *others, "oracle"]
    assert [(row["dataset"], row["policy"]) for row in rows] == [
        *(("a", policy) for policy in order),
        *(("b", policy) for policy in order),
    ]
    assert {(row["dataset"], row["samples"]) for row in rows} == sizes
    assert json.loads(json.dumps(results)) == results
    return lambda policy, key: [row[key] for row in rows if row["policy"] == policy]


def test_the_static_way_of_a_data_set_is_fitted_on_it_alone():
    table = two_sets()
    rows = torch.tensor([9, 0, 6])
    mask = table.mask[rows].numpy()
    static = StaticPerDataset(table, torch.arange(10), rows)
    assert static.choose({}, np.full(3, 2.0), mask).tolist() == [0, 1, 0]
    # of a data set without samples to fit on nothing is known
    other = StaticPerDataset(table, torch.arange(6), rows)
    assert other.choose({}, np.full(3, 2.0), mask).tolist() == [1, 1, 1]


def test_every_data_set_has_its_rows():
    results = judged(two_sets(), torch.arange(10))
    others = ["budget_aware_static", "static_per_dataset", "random"]
    of = by_set(results, others, {("a", 6), ("b", 4)})
    # over both data sets configuration 1 is right in 6 of 10, configuration 0 in 3
    assert of("budget_aware_static", "utility") == [1.0, 0.0]
    assert of("static_per_dataset", "utility") == of("oracle", "utility") == [1.0, 0.75]
    assert of("static_per_dataset", "gap_closed")[1] == 1.0
    low, high = of("oracle", "utility_ci95")[1]
    assert low < 0.75 < high
    together = results["rows"][0]
    assert together["utility"] == pytest.approx(np.dot([0.6, 0.4], of("controller", "utility")))


@pytest.mark.parametrize(
    ("table", "rows"),
    [
        (replace(two_sets(), datasets=()), 10),
        (two_sets(), 6),
        (replace(small_table(20), datasets=("only",) * 20), 20),
    ],
)
def test_one_data_set_changes_nothing(table, rows):
    results = judged(table, torch.arange(rows))
    assert "by_dataset" not in results
    assert by_dataset(results).rows == []


def test_under_mean_budgets_every_data_set_is_compared_at_what_was_spent_on_it():
    others = ["static_mix", "best_single", "knn"]
    of = by_set(judged_at_means(), others, {("a", 6), ("b", 2)})
    assert of("controller", "accuracy") == [1, 0]
    assert of("knn", "accuracy") == [0, 1]
    assert of("controller", "latency_ms_mean") == [3, 5]
    # over all, 1 is right for six of eight: at what it takes the static mix is it, and in b 0 would
    # have been right
    assert of("controller", "over_static_mix") == [0, 0]
    assert of("controller", "oracle_accuracy") == [1, 1]
    # over all 1 takes 3.5 ms: at a budget of 2 ms two fifths of the static mix are 1, at 4 ms all
    # of it
    assert of("static_mix", "latency_ms_mean") == pytest.approx([2.4, 3.8])
    assert of("static_mix", "accuracy") == pytest.approx([0.7, 0.3])


@pytest.mark.parametrize("mean", [False, True])
def test_the_report_and_the_terminal_show_them(mean, tmp_path):
    results = judged_at_means() if mean else judged(two_sets(), torch.arange(10))
    table = by_dataset(results)
    assert [line[0].split(",")[0] for line in table.rows] == ["a"] * 5 + ["b"] * 5
    assert {len(line) for line in table.rows} == {len(table.header)}
    section = report_of(tmp_path, results).split("<h2>Data set by data set")[1].split("<h2>")[0]
    assert section.count("class=strong><td>") == 2
    other = table.rows[2][1]
    for text in (section, printed(print_results, results)):
        assert text.count(other) >= 2
        assert f"{results['by_dataset'][-1]['samples']} samples" in text


@pytest.fixture
def joint(tmp_path, monkeypatch):
    """Two data sets, the second three times as slow."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        table = replace(small_table(40, seed=seed), name=name)
        table = replace(table, latency_ms=table.latency_ms * (1 + 2 * seed))
        table.save(f"{name}.safetensors")
    return "profile.paths=[a.safetensors,b.safetensors]"


def test_a_data_set_that_is_left_out_gives_neither_samples_nor_budgets(joint):
    words = ["policy=utility", "policy.members=2", *OPTIMISER, "seeds=[0]", "split.leave_out=b"]
    assert main(["train", "profile=joint", joint, "baselines=false", *words]) == 0
    results, table = read_results(Path("runs/latest")), ProfileTable.load("a.safetensors")
    assert results["test_samples"] == 40
    assert results["budgets_ms"] == pytest.approx(default_budgets(table).tolist())
    assert "by_dataset" not in results
    loaded = load_checkpoint("runs/latest/checkpoints/best.pt")
    fitted = torch.cat([loaded.extra["train_rows"], loaded.extra["validation_rows"]])
    assert sorted(fitted.tolist()) == list(range(40))
    assert loaded.extra["test_rows"].min() == 40
    normaliser = FeatureNormaliser.fit(table, torch.arange(40))
    torch.testing.assert_close(loaded.network.normaliser.mean, normaliser.mean)
    assert main(["evaluate", "profile=joint", joint, "baselines=false", "json=again.json"]) == 0
    assert json.loads(Path("again.json").read_text())["budgets_ms"] == results["budgets_ms"]
