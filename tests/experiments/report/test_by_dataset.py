"""Results within each data set, in the numbers, the report and on the terminal."""

import json
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from commands import OPTIMISER, launch, read_json
from helpers import Always, close, small_table, table_of
from page_parts import printed, report_of
from ruled import Ruled, ruled_at_means

from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.evaluation.baselines import Oracle, Random, StaticPerDataset, fit_static
from knobwise.agents.problem import Problem
from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.envs.bandit.budgets import default_budgets
from knobwise.envs.bandit.rules import MeanBudget
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.experiments.evidence.controllers import evaluate_controllers
from knobwise.experiments.evidence.evaluate import Deadlines
from knobwise.experiments.evidence.mean_budgets import MeanBudgets
from knobwise.experiments.evidence.results import read_results
from knobwise.experiments.report.content import by_dataset
from knobwise.experiments.report.report import print_results

TWO_SETS = table_of(
    [[0.0, 1.0]] * 6 + [[1.0, 0.0]] * 3 + [[0.0, 0.0]],
    [[1.0, 1.0]] * 10,
    datasets=tuple("aaaaaabbbb"),
)
"""In data set a configuration 1 is right, in b configuration 0 in three of four; all take 1 ms."""


class Worst:
    """Named before `random` and never better: configuration 0 of a, 1 of b, never right."""

    name = "knn"

    def choose(self, features, budgets_ms, mask=None):
        return (np.arange(len(budgets_ms)) >= 6).astype(np.int64)


def judged(table, rows):
    everything = torch.arange(table.num_samples)
    problem = Problem(table, Split(everything, everything[:0], rows))
    fitted = [fit_static(table, everything), StaticPerDataset(problem)]
    baselines = [*fitted, Random(), Worst(), Oracle(table, rows)]
    learned = [Ruled(Random(1)), Ruled(Random(2))]
    split = Split(everything, everything[:0], rows)
    evaluator = Deadlines(Problem(table, split), torch.tensor([1.0, 2.0]))
    return evaluate_controllers(evaluator, learned, [0, 1], baselines, charge=False)[0]


def judged_at_means():
    """Configuration 0 takes 1 ms and is right for b only, 1 takes 3 ms, in b 5, and is right for a
    only. The controller takes 1 for all, `knn` 0."""
    accuracy = [[0.0, 1.0]] * 6 + [[1.0, 0.0]] * 2
    latency = [[1.0, 3.0]] * 6 + [[1.0, 5.0]] * 2
    table, rows = table_of(accuracy, latency, datasets=tuple("aaaaaabb")), torch.arange(8)
    budgets, values_ms = torch.tensor([[2.0, 4.0], [5.0, 9.0]])
    learned = ruled_at_means(Always(1), budgets, values_ms)
    other = ruled_at_means(Always(0), budgets, values_ms).under_mean_budgets()
    other.name = "knn"
    problem = Problem(table, Split(rows, rows[:0], rows), MeanBudget())
    evaluator = MeanBudgets(problem, budgets)
    first, second, last = evaluator.references
    baselines = [first, second, other, last]
    results, _ = evaluate_controllers(evaluator, [learned] * 2, [0, 1], baselines, charge=False)
    return results | {"guard": [], "chosen": []}


def by_set(results, others, in_b):
    """Return what gives the numbers of a policy in a and b under a key; check that its rows are
    theirs."""
    rows = pl.DataFrame(results["by_dataset"], infer_schema_length=None)
    policies = ["controller", *others, "oracle"]
    order = [("a", 6, policy) for policy in policies] + [("b", in_b, policy) for policy in policies]
    assert rows["dataset", "samples", "policy"].rows() == order
    assert json.loads(json.dumps(results)) == results
    return lambda policy, key: rows.filter(policy=policy)[key].to_list()


def test_the_static_way_of_a_data_set_is_fitted_on_it_alone():
    # of a data set without samples to fit on nothing is known
    for samples, choices in ((10, [0, 1, 0]), (6, [1, 1, 1])):
        rows = torch.arange(samples)
        split = Split(rows, rows[:0], torch.tensor([9, 0, 6]))
        static = StaticPerDataset(Problem(TWO_SETS, split))
        assert static.choose({}, np.full(3, 2.0), np.ones((3, 2), bool)).tolist() == choices


def test_every_data_set_has_its_rows():
    results = judged(TWO_SETS, torch.arange(10))
    of = by_set(results, ["budget_aware_static", "static_per_dataset", "random"], 4)
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
        (replace(TWO_SETS, datasets=()), 10),
        (TWO_SETS, 6),
        (replace(small_table(20), datasets=("only",) * 20), 20),
    ],
)
def test_one_data_set_changes_nothing(table, rows):
    results = judged(table, torch.arange(rows))
    assert "by_dataset" not in results
    assert by_dataset(results).rows == []


def test_under_mean_budgets_every_data_set_is_compared_at_what_was_spent_on_it():
    of = by_set(judged_at_means(), ["static_mix", "best_single", "knn"], 2)
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
    results = judged_at_means() if mean else judged(TWO_SETS, torch.arange(10))
    table = by_dataset(results)
    assert [line[0][0] for line in table.rows] == [*"aaaaabbbbb"]
    assert {len(line) for line in table.rows} == {len(table.header)}
    text = report_of(tmp_path, results)
    section = text.split("<summary>Every data set")[1].split("</details>")[0]
    assert section.count("class=strong><td>") == 2
    for text in (section, printed(print_results, results)):
        assert text.count(table.rows[2][1]) >= 2
        assert f"{2 if mean else 4} samples" in text


@pytest.fixture
def joint(tmp_path, monkeypatch):
    """Two data sets, the second three times as slow."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        table = small_table(40, seed, name=name)
        table.latency_ms.mul_(1 + 2 * seed)
        table.save(f"{name}.safetensors")
    return "profile=joint profile.paths=[a.safetensors,b.safetensors] baselines=false"


def test_a_data_set_that_is_left_out_gives_neither_samples_nor_budgets(joint):
    words = "train policy=utility policy.fold_networks=2 seeds=[0] split.leave_out=b"
    launch(words, joint, OPTIMISER)
    results, table = read_results("runs/latest"), ProfileTable.load("a.safetensors")
    assert results["test_samples"] == 40
    assert results["budgets_ms"] == pytest.approx(default_budgets(table).tolist())
    assert "by_dataset" not in results
    loaded = load_checkpoint("runs/latest/checkpoints/best.pt")
    first, rows = torch.arange(40), loaded.extra
    fitted = torch.cat([rows["train_rows"], rows["validation_rows"]])
    assert torch.equal(fitted.sort().values, first)
    assert rows["test_rows"].min() == 40
    close(loaded.network.normaliser.mean, FeatureNormaliser.fit(table, first).mean)
    launch("evaluate json=again.json", joint)
    assert read_json("again.json")["budgets_ms"] == results["budgets_ms"]
