"""docs/decisions.md from made-up measurements, and how tables are divided for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import small_table

from knobwise.agents.judging import evaluation
from knobwise.agents.judging.baselines import BestStatic, Oracle
from knobwise.agents.serving.own_cost import OwnCost
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.simulated.kinds import KINDS
from knobwise.experiments.command_line.compose import GROUPS
from knobwise.experiments.studies import decisions
from knobwise.experiments.studies.decisions import BASELINES, MEASURED, STUDENT, TEST_SAMPLES, decisions_page
from knobwise.experiments.studies.running import Mean, folder_for


def test_other_settings_are_other_measurements(tmp_path: Path) -> None:
    settings = [["digest", 3, ["ridge"]], ["digest", 4, ["ridge"]], ["digest", 3, ["knn"]], ["digest", 3, ["ridge"]]]
    assert len({folder_for(str(tmp_path), each) for each in settings}) == 3


# -- decisions ---------------------------------------------------------------------------------------------------------


def entry(table: str, seed: int, student: float, loss: float, teacher: float) -> dict[str, Any]:
    """Charged utilities; for nothing the student gets .01 more, and its teacher `loss` points more than that."""
    utility = dict.fromkeys(BASELINES, 0.2) | {"ridge": 0.5, "budget_aware_static": 0.3, "oracle": 0.8}
    utility |= {STUDENT: student, "teacher": teacher}
    parts = {"teacher, no guard": 0.6, "network": 0.5, "network, regression only": 0.5}
    utility |= parts | {"teacher, no guard, equal weights": 0.6, "teacher, regression only": 0.3}
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
    assert row == [STUDENT, "+0.200", "+0.210", "0.400", "0.420", "–", "90.0%", "31", "2.0"]
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


def test_what_grpo_adds_and_what_is_measured() -> None:
    cells = [entry(table, seed, 0.6, 0.2, 0.3) for table in ("builtin", "digits", "router") for seed in range(2)]
    for cell in cells[2:4]:  # .1 less on the second table
        next(row for row in cell["policies"] if row["policy"] == "network")["utility_free"] = 0.4
    page = decisions_page(cells)
    assert "Measured: builtin, digits (" in page
    assert "- GRPO, to the network: -0.0333 (0 / 1 of 3)" in page
    assert "- GRPO, to the teacher: +0.3120 (3 / 0 of 3)" in page  # .612 for nothing, against .3
    # (.5 − .3)/.5 and (.4 − .3)/.5
    row = row_of(page, "All tables", "network")
    assert (row[4], row[5]) == ("0.333", "0.300")


def test_measured_tables_are_split_anew_for_each_seed() -> None:
    for name, read in MEASURED.items():
        (table, split), (_, other) = (decisions.table_of(name, seed) for seed in range(2))
        assert table.digest == read().digest
        assert len(split.test) == pytest.approx(table.num_samples / 5, abs=1)
        assert set(split.test.tolist()) != set(other.test.tolist())
        assert table.mask.all()
    assert sum(path.stat().st_size for path in decisions.FOLDER.iterdir()) < 1_000_000


def test_a_policy_is_charged_its_own_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    table = small_table(60)
    split, budgets = table.split(), default_budgets(table)
    cost = OwnCost(torch.full((5,), 1000.0), torch.full((5,), 1.5))
    monkeypatch.setattr(decisions, "own_cost", lambda *_: cost)  # clocks differ from run to run
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
    assert {"deployed", "unattainable", "too_dear"} <= set(policies["teacher"]["guard"][0])


def test_a_mistake_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert decisions.main(["tables=[builtin,ruoter]", f"runs={tmp_path}/runs", f"out={tmp_path}/page.md"]) == 2
    assert "ruoter" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert decisions.main(["sed=1"]) == 2
