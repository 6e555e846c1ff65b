from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import small_table

from knobwise.agents.judging import evaluation
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.envs.configurations.budgets import default_budgets, quantile_budgets
from knobwise.envs.readers.joint import join_tables
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.experiments.command_line.compose import GROUPS
from knobwise.experiments.studies import data_sets
from knobwise.experiments.studies.data_sets import DataSetsConfig, data_sets_page, main, measure, run, tasks_of
from knobwise.experiments.studies.running import folder_for

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


def test_the_page_says_what_was_found() -> None:
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
    made, judged_at = [], []

    class Trainer(data_sets.ControllerTrainer):
        def __init__(self, table: ProfileTable, split: Split, **more: Any) -> None:
            super().__init__(table, split, **more)
            made.append(self)

    def judge(chooser: Any, table: ProfileTable, rows: torch.Tensor, budgets: torch.Tensor, *more: Any) -> Any:
        judged_at.append((table.dataset_names[int(rows[0])], budgets))
        return evaluation.judge(chooser, table, rows, budgets, *more)

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
    assert {name for name, _ in judged_at} == set(task.tests)
    assert all(torch.equal(budgets, limits[name]) for name, budgets in judged_at)


def test_other_settings_are_other_measurements(tmp_path: Path) -> None:
    settings = [["digest", 3, ["ridge"]], ["digest", 4, ["ridge"]], ["digest", 3, ["knn"]], ["digest", 3, ["ridge"]]]
    assert len({folder_for(str(tmp_path), each) for each in settings}) == 3


def test_a_mistake_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["simple=[forest]"]) == 2
    assert "simple='forest'" in capsys.readouterr().err
    two_tables()[0].save(tmp_path / "a.safetensors")
    assert main([f"paths=[{tmp_path}/a.safetensors]", f"runs={tmp_path}"]) == 2
    assert "has one data set" in capsys.readouterr().err
    assert main(["sed=1"]) == 2
