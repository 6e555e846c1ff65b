"""docs/decisions.md from made-up measurements, and how tables are divided for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from knobwise.agents.judging.baselines import Oracle
from knobwise.envs.simulated.kinds import KINDS
from knobwise.experiments.command_line.compose import GROUPS
from knobwise.experiments.studies import decisions
from knobwise.experiments.studies.decisions import BASELINES, TEST_SAMPLES, Mean, decisions_page
from knobwise.experiments.studies.running import folder_for
from knobwise.losses.settings import LossConfig


def test_other_settings_are_other_measurements(tmp_path: Path) -> None:
    settings = [["digest", 3, ["ridge"]], ["digest", 4, ["ridge"]], ["digest", 3, ["knn"]], ["digest", 3, ["ridge"]]]
    assert len({folder_for(str(tmp_path), each) for each in settings}) == 3


# -- decisions ---------------------------------------------------------------------------------------------------------


def entry(table: str, seed: int, auto: float, ridge: float) -> dict[str, Any]:
    utility = dict.fromkeys(BASELINES, 0.2) | {"ridge": ridge, "budget_aware_static": 0.3, "oracle": 0.8}
    utility |= {"auto": auto, "auto, no guard": auto, "utility network": 0.4, "utility network, regression only": 0.4}
    guard = [{"deployed": True, "unattainable": seed == 1, "too_dear": False}]
    policies = [
        {"policy": name, "utility": value, "accuracy": 0.9, "satisfaction_feasible": 0.9, "cpu_seconds": 2.0}
        for name, value in utility.items()
    ]
    next(row for row in policies if row["policy"] == "auto")["guard"] = guard
    objectives = [
        {"objective": "slow", "utility": [0.5, 0.51, 0.52 + seed / 100], "seconds": [0.0, 2.0, 4.0]},
        {"objective": "fast", "utility": [0.5, 0.5, 0.51], "seconds": [0.0, 1.0, 2.0]},
    ]
    sizes = {"samples": 100, "configurations": 4, "features": 3}
    return {"table": table, "seed": seed, **sizes, "policies": policies, "objectives": objectives}


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
    cells = [entry("one", 0, 0.6, 0.5), entry("one", 1, 0.6, 0.5), entry("two", 0, 0.4, 0.5), entry("two", 1, 0.4, 0.5)]
    page = decisions_page(cells)
    # gap closed (.6 − .3)/.5 and (.4 − .3)/.5; first on the one table, second on the other
    assert row_of(page, "All tables", "auto") == ["auto", "0.400", "+0.200", "1.5", "90.0%", "2.0"]
    assert "`auto` is first on 1 of 2 tables (one)." in page
    assert "On two, ridge leads by 0.100 ± 0.000, more than the interval." in page
    assert "- experts next to the network: +0.1000 (1 / 0 of 2)" in page
    assert row_of(page, "What the guard decides", "one")[:4] == ["one", "2/2", "1/2", "0/2"]
    # after equal updates .02 and .03; the fast one takes 2 s, by when the slow one had gained .01
    slow = row_of(page, "Objectives", "slow")
    assert (slow[1].split()[0], slow[2].split()[0], slow[3]) == ("0.0250", "0.0100", "4.0")


def test_a_simulated_table_is_judged_on_samples_beyond_its_own() -> None:
    table, split = decisions.table_of("few_samples", 0)
    size = KINDS["few_samples"].samples
    assert table.num_samples == size + TEST_SAMPLES
    assert torch.equal(torch.cat(split), torch.arange(table.num_samples))
    assert (len(split.train) + len(split.validation), len(split.test)) == (size, TEST_SAMPLES)


def test_every_policy_and_objective_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = {"warmup_iterations": 2, "iterations": 1, "contexts": 16, "minibatch": 16}
    optimisers = {name: replace(each, **quick) for name, each in GROUPS["optimiser"].items()}
    monkeypatch.setitem(GROUPS, "optimiser", optimisers)
    monkeypatch.setitem(GROUPS["policy"], "auto", replace(GROUPS["policy"]["auto"], members=2, experts=("ridge",)))
    fixed = {"TEST_SAMPLES": 100, "OBJECTIVE_TABLES": ("few_samples",), "OBJECTIVES": {"exact": LossConfig()}}
    fixed["make_baselines"] = lambda table, split, *rest: [Oracle(table, split.test)]
    for name, value in fixed.items():
        monkeypatch.setattr(decisions, name, value)
    cell = decisions.measure("few_samples", 1)
    utility = {row["policy"]: row["utility"] for row in cell["policies"]}
    structures = {"independent", "utility network"}
    assert {pair for pairs in decisions.PARTS.values() for pair in pairs} | structures < set(utility)
    assert max(utility.values()) == utility["oracle"]
    (objective,) = cell["objectives"]
    assert len(objective["utility"]) == len(objective["seconds"]) > 60 // 5


def test_a_mistake_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert decisions.main(["tables=[builtin,ruoter]", f"runs={tmp_path}/runs", f"out={tmp_path}/page.md"]) == 2
    assert "ruoter" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert decisions.main(["sed=1"]) == 2
