"""docs/data_sets.md and docs/decisions.md from made-up measurements, and how tables are divided for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers import small_table

from knobwise.agents.judging import evaluation
from knobwise.agents.judging.baselines import BestStatic, Oracle
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.envs.configurations.budgets import default_budgets, quantile_budgets
from knobwise.envs.readers.joint import join_tables
from knobwise.envs.simulated.kinds import KINDS
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.experiments.command_line.compose import GROUPS
from knobwise.experiments.studies import data_sets, decisions
from knobwise.experiments.studies.data_sets import DataSetsConfig, data_sets_page, measure, run, tasks_of
from knobwise.experiments.studies.decisions import BASELINES, STUDENT, TEST_SAMPLES, decisions_page
from knobwise.experiments.studies.running import Mean, folder_for

FACTS: dict[str, Any] = {"profile": "joint", "samples": 10, "configurations": 2, "simulated": True}
FACTS |= {"seeds": [0, 1], "simple": ["ridge"], "folds": 2, "members": 3}


def two_tables() -> list[ProfileTable]:
    return [replace(small_table(30, seed=seed), name=name) for seed, name in enumerate("ab")]


def made_up() -> dict[str, list[dict[str, dict[str, list[float]]]]]:
    """The policy gets .6 with its own data set or all, .5 with others'; told or not; static .4, oracle .9."""

    def cell(worth: float, *names: str) -> dict[str, dict[str, list[float]]]:
        got = {"policy": worth, "ridge": worth - 0.1, "static": 0.4, "oracle": 0.9}
        return {policy: {name: [value] * 4 for name in names} for policy, value in got.items()}

    results = {"all": [cell(0.6, "a", "b")] * 2, "all, told": [cell(0.65, "a", "b")] * 2}
    for name in "ab":
        results |= {f"own {name}": [cell(0.6, name)] * 2, f"others {name}": [cell(0.5, name)] * 2}
        results |= {f"others {name}, told": [cell(0.5, name)] * 2}
    return results | {f"fold {number} a": [cell(0.6 + 0.1 * number, "a")] * 2 for number in range(2)}


def test_the_page_of_data_sets_says_what_was_found() -> None:
    page = data_sets_page(made_up(), FACTS)
    assert "| learned policy | all data sets, data set as input | 0.650 [0.650, 0.650] |" in page
    assert "| learned policy | the other data sets | 0.500 [0.500, 0.500] |" in page
    # (.65 − .4)/(.9 − .4)
    assert "| 0.650 | 0.50 [0.50, 0.50] |" in page
    assert "| one for all: data set as input − without | +0.050 [+0.050, +0.050] |" in page
    assert "| unseen data set − its own policy | -0.100 [-0.100, -0.100] |" in page
    assert "| one policy for all − one for each | +0.000 [+0.000, +0.000] |" in page
    # .6 and .7 in the two folds
    assert "| learned policy | 0.650" in page
    assert "± 0.071" in page
    assert "nothing here was measured on a model" in page
    assert "nothing here was measured" not in data_sets_page(made_up(), FACTS | {"simulated": False})
    # static of each data set is what gaps are measured from, and the oracle is fitted on nothing
    lower = made_up()
    for seed in lower["all"]:
        seed["static"] = {name: [0.0] * 4 for name in "ab"}
    assert "| 0.650 | 0.50 [0.50, 0.50] |" in data_sets_page(lower, FACTS)
    assert "| oracle (upper bound) |" in page


def test_what_is_trained_never_sees_what_it_is_judged_on() -> None:
    table = join_tables(two_tables())
    tasks = tasks_of(table, 3)
    assert list(tasks)[:4] == ["all", "all, told", "own a", "own b"]
    for task in tasks.values():
        fitted = torch.cat([task.split.train, task.split.validation])
        judged = torch.cat(list(task.tests.values()))
        assert not torch.isin(judged, fitted).any()
        for name, rows in task.tests.items():
            assert {table.datasets[row] for row in rows.tolist()} == {name}
    assert torch.equal(tasks["own b"].tests["b"], tasks["others b, told"].tests["b"])
    assert {table.datasets[row] for row in tasks["others b"].split.train.tolist()} == {"a"}
    assert {table.datasets[row] for row in tasks["own b"].split.train.tolist()} == {"b"}
    folds = torch.cat([tasks[f"fold {number} a"].tests["a"] for number in range(3)])
    assert torch.equal(folds.sort().values, torch.arange(30))


def test_a_whole_study_of_ones_own_profiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = OptimiserConfig(warmup_iterations=2, iterations=1, contexts=16, minibatch=16)
    monkeypatch.setitem(GROUPS["optimiser"], "utility", quick)
    paths = []
    for table in two_tables():
        paths.append(str(tmp_path / f"{table.name}.safetensors"))
        table.save(paths[-1])
    places = {"runs": str(tmp_path), "out": f"{tmp_path}/page.md"}
    config = DataSetsConfig(paths, simple=["ridge"], folds=2, seeds=[0], members=2, jobs=1, **places)
    run(config)
    page = (tmp_path / "page.md").read_text()
    assert "Profile joint (measured): 60 samples × 12 configurations; data sets a, b" in page
    assert len(list(tmp_path.glob("*/*.json"))) == len(tasks_of(data_sets.read_table(config), 2)) == 2 + 2 + 4 + 2
    with monkeypatch.context() as patch:
        patch.setattr(data_sets, "measure", None)  # nothing is measured twice
        run(config)
    assert "seed 0:" not in capsys.readouterr().err  # the study shows its own progress, not that of each training
    (folder,) = {path.parent for path in tmp_path.glob("*/table.safetensors")}
    results = json.loads((folder / "all-0.json").read_text())
    assert set(results) == {"policy", "static", "ridge", "oracle"}
    assert results["oracle"]["a"] >= results["static"]["a"]
    assert measure(folder, "all", 0, config) == results


@pytest.mark.parametrize("name", ["others b", "others b, told", "all, told"])
def test_nothing_of_what_is_judged_is_in_what_is_fitted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GROUPS["optimiser"], "utility", OptimiserConfig(warmup_iterations=2, iterations=1, contexts=16))
    config = DataSetsConfig(simple=["ridge"], members=2)
    tables = two_tables()
    joint = join_tables([tables[0], replace(tables[1], latency_ms=3 * tables[1].latency_ms)])
    made, judge = [], Mock(side_effect=evaluation.judge)

    class Trainer(data_sets.ControllerTrainer):
        def __init__(self, table: ProfileTable, split: Split, **more: Any) -> None:
            super().__init__(table, split, **more)
            made.append(self)

    monkeypatch.setattr(data_sets, "ControllerTrainer", Trainer)
    monkeypatch.setattr(data_sets, "judge", judge)
    task = tasks_of(joint, 2)[name]
    data_sets.utilities_of(joint, task, 0, config)
    (trainer,) = made
    assert ("dataset" in trainer.table.features) == task.dataset_input
    fitted = torch.cat([task.split.train, task.split.validation])
    assert torch.equal(trainer.limits, quantile_budgets(joint.latency_ms[fitted], joint.mask[fitted]))
    limits = {name: default_budgets(replace(table, name=name)) for name, table in zip("ab", tables, strict=True)}
    limits["b"] = default_budgets(replace(tables[1], latency_ms=3 * tables[1].latency_ms))
    judged_at = [(joint.dataset_names[int(call.args[2][0])], call.args[3]) for call in judge.call_args_list]
    assert {name for name, _ in judged_at} == set(task.tests)
    assert all(torch.equal(budgets, limits[name]) for name, budgets in judged_at)


def test_other_settings_are_other_measurements(tmp_path: Path) -> None:
    settings = [["digest", 3, ["ridge"]], ["digest", 4, ["ridge"]], ["digest", 3, ["knn"]], ["digest", 3, ["ridge"]]]
    assert len({folder_for(str(tmp_path), each) for each in settings}) == 3


# -- decisions ---------------------------------------------------------------------------------------------------------


def entry(table: str, seed: int, student: float, loss: float, teacher: float) -> dict[str, Any]:
    """Charged utilities; for nothing the student gets .01 more, and its teacher `loss` points more than that."""
    utility = dict.fromkeys(BASELINES, 0.2) | {"ridge": 0.5, "budget_aware_static": 0.3, "oracle": 0.8}
    utility |= {STUDENT: student, "teacher": teacher}
    parts = {"teacher, no guard": 0.6, "network": 0.5, "network, regression only": 0.5}
    utility |= parts | {"teacher, no guard, equal weights": 0.6}
    free = utility | {STUDENT: student + 0.01, "teacher": student + 0.01 + loss / 100}
    policies: list[dict[str, Any]] = [
        {
            "policy": name,
            "utility": value,
            "utility_free": free[name],
            "satisfaction_feasible": 0.9,
            "satisfaction_feasible_free": 0.95,
            "decision_us": 31.4 if name == STUDENT else 1234.5,
            "cpu_seconds": 2.0,
        }
        for name, value in utility.items()
    ]
    guard = [{"deployed": True, "unattainable": seed == 1, "too_dear": False}]
    next(row for row in policies if row["policy"] == "teacher")["guard"] = guard
    return {"table": table, "seed": seed, "samples": 1234, "configurations": 4, "features": 3, "policies": policies}


def row_of(page: str, section: str, name: str) -> list[str]:
    lines = page.split(f"## {section}\n")[1].split("\n## ")[0].splitlines()
    return next(
        [cell.strip(" *") for cell in line.strip("|").split("|")]
        for line in lines
        if line.split("|")[1:2] and line.split("|")[1].strip(" *") == name
    )


def test_a_mean_with_its_interval_by_hand() -> None:
    mean = Mean.over([0.0, 0.2])  # standard error .1, and Student's t with one degree of freedom is 12.706
    assert mean.value == pytest.approx(0.1)
    assert mean.half == pytest.approx(1.2706, abs=1e-3)
    assert mean.sign == 0
    assert Mean.over([-0.2, -0.2]).sign == -1


def test_the_page_of_decisions_by_hand() -> None:
    cells = [entry("first", seed, 0.6, 0.2, 0.3) for seed in range(2)]
    cells += [entry("second", seed, 0.4, 0.6, 0.45) for seed in range(2)]
    page = decisions_page(cells)
    # gap closed (.6 − .3)/.5 and (.4 − .3)/.5, for nothing .62 and .22
    row = row_of(page, "All tables", STUDENT)
    assert row == [STUDENT, "+0.200", "+0.210", "0.400", "0.420", "90.0%", "31", "2.0"]
    assert row_of(page, "All tables", "ridge")[-2] == "1,234"
    assert "all charged, the student is first on 1 of 2 tables (first). On second, ridge is ahead by 0.100" in page
    assert "is ahead by 0.100 ± 0.000.\n" in page
    # for nothing the teacher gets .612 and .416; charged it is above its student on the second
    assert "all free, its teacher is first on 1 of 2 tables (first). If both are charged" in page
    assert "the teacher is above its student on 1 of 2 tables (second).\n" in page
    # −.2 and −.6: standard error .2
    assert "free: -0.40 ± 2.54 points as a mean over the tables" in page
    assert "the worst table is second with -0.60 points. That is within the 0.5 points" in page
    assert "- experts next to the network: +0.1000 (2 / 0 of 2)" in page
    guard = row_of(page, "What the guard decides", "first")
    assert guard == ["first", "2/2", "1/2", "0/2", "95.0%", "95.0%", "0.012 ± 0.000"]
    assert "1,234 samples × 4 configurations" in page
    worse = decisions_page([entry("first", seed, 0.6, 0.7, 0.3) for seed in range(2)])
    assert "with -0.70 points. That is more than the 0.5 points" in worse
    assert "all charged, the student is first on 1 of 1 tables (first).\n" in worse


def test_a_policy_is_charged_its_own_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    table = replace(small_table(60), features_ms=0.5)
    split, budgets = table.split(), default_budgets(table)
    monkeypatch.setattr(decisions, "decision_us", lambda *_: torch.full((5,), 1000.0))  # clocks differ from run to run
    cell, policy = decisions._Cell(table, split, 0), BestStatic(table, split.train, budgets)
    cell.judge("best_static", policy, 2.0)
    (row,) = cell.policies
    for ending, cost in (("", torch.full((5,), 1.5)), ("_free", None)):
        utility = evaluation.judge(policy, table, split.test, budgets, cost_ms=cost).utility
        assert row[f"utility{ending}"] == pytest.approx(float(utility.mean()))
    assert row["utility"] < row["utility_free"]
    assert row["decision_us"] == 1000


def test_a_simulated_table_is_judged_on_samples_beyond_its_own() -> None:
    table, split = decisions.table_of("few_samples", 0)
    size = KINDS["few_samples"].samples
    assert table.num_samples == size + TEST_SAMPLES
    assert torch.equal(torch.cat(split), torch.arange(table.num_samples))
    assert (len(split.train) + len(split.validation), len(split.test)) == (size, TEST_SAMPLES)


def test_every_policy_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = {"warmup_iterations": 2, "iterations": 1, "contexts": 16, "minibatch": 16}
    optimisers = {name: replace(each, **quick) for name, each in GROUPS["optimiser"].items()}
    monkeypatch.setitem(GROUPS, "optimiser", optimisers)
    monkeypatch.setitem(GROUPS["policy"], "auto", replace(GROUPS["policy"]["auto"], members=2, experts=("ridge",)))
    monkeypatch.setattr(decisions, "TEST_SAMPLES", 100)
    monkeypatch.setattr(decisions, "make_baselines", lambda table, split, *rest: [Oracle(table, split.test)])
    cell = decisions.measure("few_samples", 1)
    policies = {row["policy"]: row for row in cell["policies"]}
    parts = {policy for pair in decisions.PARTS.values() for policy in pair}
    assert set(policies) == parts | {STUDENT, "oracle"}
    assert max(row["utility"] for row in policies.values()) == policies["oracle"]["utility"]
    assert policies["oracle"]["decision_us"] == 0 < policies[STUDENT]["decision_us"]
    assert policies[STUDENT]["cpu_seconds"] > policies["teacher"]["cpu_seconds"]
    assert {"deployed", "unattainable", "too_dear"} <= set(policies["teacher"]["guard"][0])


def test_a_mistake_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert decisions.main(["tables=[builtin,ruoter]", f"runs={tmp_path}/runs", f"out={tmp_path}/page.md"]) == 2
    assert "ruoter" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert data_sets.main(["simple=[forest]"]) == 2
    assert "simple='forest'" in capsys.readouterr().err
    two_tables()[0].save(tmp_path / "a.safetensors")
    assert data_sets.main([f"paths=[{tmp_path}/a.safetensors]", f"runs={tmp_path}"]) == 2
    assert "has one data set" in capsys.readouterr().err
    assert [study.main(["sed=1"]) for study in (decisions, data_sets)] == [2, 2]
