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
from knobwise.experiments.command_line.settings import GROUPS
from knobwise.experiments.studies import data_sets
from knobwise.experiments.studies.data_sets import DataSetsConfig, main, measure, read_table, run, ways_of
from knobwise.experiments.studies.data_sets_page import lines_of, page_of

FACTS: dict[str, Any] = {"profile": "joint", "samples": 10, "configurations": 2, "simulated": True}
FACTS |= {"seeds": [0, 1], "simple": ["ridge"], "folds": 2, "members": 3}


def two_tables() -> list[ProfileTable]:
    return [replace(small_table(30, seed=seed), name=name) for seed, name in enumerate("ab")]


def made_up() -> dict[str, list[dict[str, dict[str, list[float]]]]]:
    """The policy gets .6 with its own data set or all, .5 with others'; told or not; static .4, oracle .9."""

    def cell(worth: float, *names: str) -> dict[str, dict[str, list[float]]]:
        got = {"policy": worth, "ridge": worth - 0.1, "static": 0.4, "oracle": 0.9}
        return {policy: {name: [value] * 4 for name in names} for policy, value in got.items()}

    found = {"all": [cell(0.6, "a", "b")] * 2, "all, told": [cell(0.65, "a", "b")] * 2}
    for name in "ab":
        found |= {f"own {name}": [cell(0.6, name)] * 2, f"others {name}": [cell(0.5, name)] * 2}
        found |= {f"others {name}, told": [cell(0.5, name)] * 2}
    return found | {f"fold {number} a": [cell(0.6 + 0.1 * number, "a")] * 2 for number in range(2)}


def test_the_page_says_what_was_found() -> None:
    page = page_of(made_up(), FACTS)
    assert "| learned policy | all data sets, told which | 0.650 [0.650, 0.650] |" in page
    assert "| learned policy | the other data sets | 0.500 [0.500, 0.500] |" in page
    # (.65 − .4)/(.9 − .4)
    assert "| 0.650 | 0.50 [0.50, 0.50] |" in page
    assert "| told the data set − not told, one for all | +0.050 [+0.050, +0.050] |" in page
    assert "| never seen the data set − its own policy | -0.100 [-0.100, -0.100] |" in page
    assert "| one policy for all − one for each | +0.000 [+0.000, +0.000] |" in page
    # .6 and .7 in the two folds
    assert "| learned policy | 0.650" in page
    assert "± 0.071" in page
    assert "nothing here was measured on a model" in page
    assert "nothing here was measured" not in page_of(made_up(), FACTS | {"simulated": False})
    # static of each data set is what gaps are measured from, and the oracle is fitted on nothing
    lower = made_up()
    for seed in lower["all"]:
        seed["static"] = {name: [0.0] * 4 for name in "ab"}
    assert "| 0.650 | 0.50 [0.50, 0.50] |" in page_of(lower, FACTS)
    assert any(line.startswith("oracle (upper bound)") for line in lines_of(made_up(), FACTS))


def test_what_is_trained_never_sees_what_it_is_judged_on() -> None:
    table = join_tables(two_tables())
    ways = {way.name: way for way in ways_of(table, 3)}
    assert list(ways)[:4] == ["all", "all, told", "own a", "own b"]
    for way in ways.values():
        fitted = torch.cat([way.split.train, way.split.validation])
        judged = torch.cat(list(way.tests.values()))
        assert not torch.isin(judged, fitted).any()
        for name, rows in way.tests.items():
            assert {table.datasets[row] for row in rows.tolist()} == {name}
    assert torch.equal(ways["own b"].tests["b"], ways["others b, told"].tests["b"])
    assert {table.datasets[row] for row in ways["others b"].split.train.tolist()} == {"a"}
    assert {table.datasets[row] for row in ways["own b"].split.train.tolist()} == {"b"}
    folds = torch.cat([ways[f"fold {number} a"].tests["a"] for number in range(3)])
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
    config = DataSetsConfig(
        paths=paths, simple=["ridge"], folds=2, seeds=[0], members=2, runs=str(tmp_path), out=str(tmp_path / "page.md")
    )
    measured = []

    def here(title: str, work: Any, pieces: list[Any], jobs: int, done: int) -> None:
        for piece in pieces:
            measured.append(work(*piece))

    monkeypatch.setattr(data_sets, "in_processes", here)
    page = run(config).read_text()
    assert "Profile joint (measured): 60 samples × 12 configurations; data sets a, b" in page
    assert len(measured) == len(ways_of(read_table(config), 2)) == 2 + 2 + 4 + 2
    run(config)
    assert len(measured) == 10  # nothing is measured twice
    assert "seed 0:" not in capsys.readouterr().err  # the study tells how far it is, not each training
    (folder,) = {path.parent for path in tmp_path.glob("*/table.safetensors")}
    found = json.loads((folder / "all-0.json").read_text())
    assert set(found) == {"policy", "static", "ridge", "oracle"}
    assert found["oracle"]["a"] >= found["static"]["a"]
    assert measure(folder, "all", 0, vars(config)) == "all, seed 0"
    assert json.loads((folder / "all-0.json").read_text()) == found


@pytest.mark.parametrize("name", ["others b", "others b, told", "all, told"])
def test_nothing_of_what_is_judged_is_in_what_is_fitted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GROUPS["optimiser"], "utility", OptimiserConfig(warmup_iterations=2, iterations=1, contexts=16))
    config = DataSetsConfig(simple=["ridge"], members=2)
    tables = two_tables()
    joint = join_tables([tables[0], replace(tables[1], latency_ms=3 * tables[1].latency_ms)])
    made, asked = [], []

    class Trainer(data_sets.ControllerTrainer):
        def __init__(self, table: ProfileTable, split: Split, **more: Any) -> None:
            super().__init__(table, split, **more)
            made.append(self)

    def judge(chooser: Any, table: ProfileTable, rows: torch.Tensor, budgets: torch.Tensor, *more: Any) -> Any:
        asked.append((table.dataset_names[int(rows[0])], budgets))
        return evaluation.judge(chooser, table, rows, budgets, *more)

    monkeypatch.setattr(data_sets, "ControllerTrainer", Trainer)
    monkeypatch.setattr(data_sets, "judge", judge)
    way = next(way for way in ways_of(joint, 2) if way.name == name)
    data_sets.measured(joint, way, 0, config)
    (trainer,) = made
    assert ("dataset" in trainer.table.features) == way.told
    fitted = torch.cat([way.split.train, way.split.validation])
    assert torch.equal(trainer.limits, quantile_budgets(joint.latency_ms[fitted], joint.mask[fitted]))
    own = {name: default_budgets(replace(table, name=name)) for name, table in zip("ab", tables, strict=True)}
    own["b"] = default_budgets(replace(tables[1], latency_ms=3 * tables[1].latency_ms))
    assert {name for name, _ in asked} == set(way.tests)
    assert all(torch.equal(budgets, own[name]) for name, budgets in asked)


def test_other_settings_are_other_measurements(tmp_path: Path) -> None:
    table = join_tables(two_tables())
    plain = DataSetsConfig(runs=str(tmp_path))
    changed = [replace(plain, members=4), replace(plain, folds=3), replace(plain, simple=["knn"])]
    folders = {data_sets.folder_of(table, config) for config in (plain, *changed)}
    assert len(folders) == 4
    assert data_sets.folder_of(table, replace(plain, seeds=[5], jobs=1, out="x.md")) in folders


def test_a_mistake_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["simple=[forest]"]) == 2
    assert "simple='forest'" in capsys.readouterr().err
    two_tables()[0].save(tmp_path / "a.safetensors")
    assert main([f"paths=[{tmp_path}/a.safetensors]", f"runs={tmp_path}"]) == 2
    assert "has one data set" in capsys.readouterr().err
    assert main(["sed=1"]) == 2
