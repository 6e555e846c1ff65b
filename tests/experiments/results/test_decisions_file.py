"""decisions.parquet holds every decision: the numbers of results.json follow from it, and so does nothing else."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from helpers import small_beams, small_table

from knobwise.__main__ import main
from knobwise.agents.judging.baselines import BudgetAwareStatic, Oracle
from knobwise.agents.judging.evaluation import bootstrap, mean_ci95
from knobwise.agents.selector.evaluation import Decided
from knobwise.agents.stack.prices import StaticMix, difference_ci95
from knobwise.common.errors import InputError
from knobwise.envs.readers.long_table import read_long_table, write_features, write_long_table
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.results import decisions_file
from knobwise.experiments.results.decisions_file import CONTROLLER, SELECTOR, read_decisions, write_decisions
from knobwise.experiments.results.selector_results import selector_decisions

TRAIN = ["train", "profile=table", "profile.path=t.parquet", "profile.features=f.npz", "tracking=disabled"]
QUICK = ["optimiser.warmup_iterations=2", "optimiser.iterations=3", "optimiser.contexts=16", "policy.hidden=8"]
LEAN = [*TRAIN, *QUICK, "policy=utility", "seeds=[3,1]"]
SELECT = ["train", "experiment=selector_replay", "beams.path=b.safetensors", "selector.width=16", "selector.heads=2"]
SELECT += ["sft.epochs=1", "rce.epochs=1", "variants.grpo_recorded.epochs=1", "variants.shuffled_recorded=null"]
SELECT += ["tracking=disabled", "seeds=[0,4]", "jobs=1"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    table = small_table(90, holes=0.3)
    write_long_table(table, "t.parquet")
    write_features(table, "f.npz")
    return tmp_path


def results_of(run: str = "runs/latest") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(run) / "results.json").read_text())
    return found


def controller_frame(**columns: Any) -> pl.DataFrame:
    row = {"policy": "controller", "seed": 0, "dataset": None, "sample_id": "a", "budget_ms": 2.0}
    row |= {"configuration": "k=1", "accuracy": 0.5, "latency_ms": 1.0, "in_time": True, "feasible": True}
    return pl.DataFrame([row | {"utility": 0.5} | columns])


def means(frame: pl.DataFrame, values: dict[str, str]) -> dict[tuple[str, float], dict[str, float]]:
    """By policy and budget: means over samples and seeds."""
    columns = [pl.col(column).cast(pl.Float64).mean().alias(name) for name, column in values.items()]
    rows = frame.group_by("policy", "budget_ms").agg(columns).to_dicts()
    return {(row["policy"], row["budget_ms"]): {name: row[name] for name in values} for row in rows}


# -- every number again ------------------------------------------------------------------------------------------------


Sample = tuple[str | None, str]
"""Data set and id."""


def values_of(own: pl.DataFrame, results: dict[str, Any], column: str, order: list[Sample]) -> torch.Tensor:
    """float64 [S, n, B] of one policy's decisions, samples in this order; NaN for null."""
    seeds = results["seeds"] if own["seed"].is_not_null().all() else [None]
    cells = own.select("seed", "dataset", "sample_id", "budget_ms", pl.col(column).cast(pl.Float64))
    by_cell = {
        cell: math.nan if value is None else value for *cell, value in cells.iter_rows() for cell in [tuple(cell)]
    }
    assert len(by_cell) == len(own) == len(seeds) * len(order) * len(results["budgets_ms"])
    return torch.tensor(
        [[[by_cell[seed, *sample, b] for b in results["budgets_ms"]] for sample in order] for seed in seeds]
    ).double()


def follows_from_decisions(results: dict[str, Any], found: pl.DataFrame, tables: list[ProfileTable]) -> None:
    """Every number of `rows`, `by_dataset`, `configurations` and `knob_usage` but for rewards, prices, times and what
    mixtures of other configurations would have got; intervals are drawn again."""
    wholes = {table.name if len(tables) > 1 else None: table for table in tables}
    judged = found.unique(["dataset", "sample_id"])
    order = sorted(
        judged.select("dataset", "sample_id").iter_rows(),
        key=lambda sample: (list(wholes).index(sample[0]), wholes[sample[0]].sample_ids.index(sample[1])),
    )
    assert len(order) == results["test_samples"]
    mean = results.get("sense") == "mean"
    by_policy = {
        (policy, column): values_of(own, results, column, order)
        for (policy,), own in found.group_by("policy")
        for column in ("accuracy", "utility", "latency_ms", "in_time", "feasible")
    }
    for row in [*results["rows"], *results.get("by_dataset", [])]:
        samples = [place for place, sample in enumerate(order) if row.get("dataset") in (None, sample[0])]
        budgets = slice(None)
        if row["budget_ms"] is not None:
            place = results["budgets_ms"].index(row["budget_ms"])
            budgets = slice(place, place + 1)

        def values(column: str, policy: str = row["policy"], samples: Any = samples, b: Any = budgets) -> torch.Tensor:
            return by_policy[policy, column][:, samples][..., b]

        utility, latency = values("utility"), values("latency_ms")
        expected = {"accuracy": float(values("accuracy").mean()), "utility": float(utility.mean())}
        expected["latency_ms_mean"] = float(latency.mean())
        if len(utility) > 1:
            expected["utility_per_seed"] = utility.mean((1, 2)).tolist()
        if mean:
            own = utility.mean(-1)
            expected |= dict.fromkeys(("utility_ci95", "accuracy_ci95"), difference_ci95(own, 0 * own[0]))
            if row["budget_ms"] is not None and "dataset" not in row:  # the static mix lies on the hull
                hull = [[corner[name] for corner in results["static_hull"]] for name in ("latency_ms", "accuracy")]
                there = np.interp(expected["latency_ms_mean"], np.maximum.accumulate(hull[0]), hull[1])
                expected["over_static_mix"] = expected["accuracy"] - float(there)
            mix = values("utility", "static_mix")
            expected["over_static_mix_at_budget"] = float(utility.mean() - mix.mean())
            expected["over_static_mix_at_budget_ci95"] = difference_ci95(own, mix[0].mean(-1))
        else:
            late, there = 1 - values("in_time"), values("feasible")
            expected |= {"satisfaction": 1 - float(late.mean()), "infeasible": 1 - float(there.mean())}
            shares = [float(1 - late[..., b][there[..., b] > 0].mean()) for b in range(late.shape[-1])]
            known = [share for share in shares if not math.isnan(share)]
            expected["satisfaction_feasible"] = sum(known) / len(known) if known else None
            ends = [values("utility", policy)[0].mean(-1) for policy in ("budget_aware_static", "oracle")]
            expected |= bootstrap(utility.mean(-1), *ends)
            between = float((ends[1] - ends[0]).mean())
            expected["gap_closed"] = float(utility.mean() - ends[0].mean()) / between if between else 0.0
        if row["latency_ms_p95"] is not None and row["budget_ms"] is not None:
            expected["latency_ms_p95"] = float(latency[..., 0].quantile(0.95, 1).mean())
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-5, abs=2e-6), (row["policy"], row["budget_ms"], name)

    single = found.filter(pl.col("configuration").is_not_null())
    knobs = {one["label"]: one["knobs"] for one in results["configurations"]}
    for use in results["knob_usage"]:
        own = single.filter(policy=use["policy"], budget_ms=use["budget_ms"])
        if len(own) == len(found.filter(policy=use["policy"], budget_ms=use["budget_ms"])):  # no mixture decided
            share = sum(knobs[label][use["knob"]] == use["value"] for label in own["configuration"]) / len(own)
            assert use["share"] == pytest.approx(share)


def follows_from_selections(results: dict[str, Any], found: pl.DataFrame, order: list[int]) -> None:
    """Every number of `rows`, `controls` and `differences` of a selector but for times, over queries that are all
    known."""
    queries = [str(row) for row in sorted(order)]
    values: dict[tuple[str, int], torch.Tensor] = {}
    for (policy, shots), own in found.group_by("policy", "shots"):
        by_seed = [own.filter(pl.col("seed").eq_missing(seed)) for seed in own["seed"].unique(maintain_order=True)]
        right = [dict(one.select("sample_id", "correct").iter_rows()) for one in by_seed]
        values[policy, shots] = torch.tensor([[one[q] for q in queries] for one in right], dtype=torch.float64)
    rows = [*results["rows"], *results["controls"]]
    assert {(row["policy"], row["shots"]) for row in rows} == values.keys()
    for row in rows:
        own = values[row["policy"], row["shots"]]
        assert row["queries"] == len(queries)
        assert row["accuracy"] == pytest.approx(float(own.mean()))
        assert row["accuracy_ci95"] == pytest.approx(mean_ci95(own).tolist())
        assert row.get("accuracy_per_seed", [row["accuracy"]]) == pytest.approx(own.mean(1).tolist())
    assert results["differences"]
    for pair in results["differences"]:
        first, second = (values[pair[name], pair["shots"]] for name in ("policy", "against"))
        apart = first - second
        assert pair["difference"] == pytest.approx(float(apart.mean()))
        assert pair["ci95"] == pytest.approx(mean_ci95(apart).tolist())


# -- the file ----------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_back_in_order(tmp_path: Path) -> None:
    rows = [controller_frame(sample_id=s, seed=k, budget_ms=b) for b in (2.0, 1.0) for k in (1, 0) for s in "ba"]
    write_decisions(tmp_path, pl.concat(rows).select(sorted(CONTROLLER)))
    found = read_decisions(tmp_path)
    assert dict(found.schema) == CONTROLLER
    keys = list(found.select("seed", "sample_id", "budget_ms").iter_rows())
    assert keys == [(k, s, b) for k in (0, 1) for s in "ab" for b in (1.0, 2.0)]


def test_other_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="decisions have the columns"):
        write_decisions(tmp_path, controller_frame().drop("feasible"))
    assert not list(tmp_path.iterdir())


def test_what_is_no_file_of_decisions_is_an_error_for_a_person(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"decisions\.parquet: no such file; run the experiment again"):
        read_decisions(tmp_path)
    (tmp_path / decisions_file.FILE).write_bytes(b"PAR1 but not really")
    with pytest.raises(InputError, match=r"decisions\.parquet: cannot be read"):
        read_decisions(tmp_path)
    controller_frame().drop("seed").write_parquet(tmp_path / decisions_file.FILE)
    with pytest.raises(InputError, match="does not hold the columns of decisions"):
        read_decisions(tmp_path)


# -- what a run writes -------------------------------------------------------------------------------------------------


def test_results_are_means_of_the_decisions(folder: Path) -> None:
    assert main(LEAN) == 0
    results, found = results_of(), read_decisions("runs/latest")
    assert dict(found.schema) == CONTROLLER
    policies = {row["policy"] for row in results["rows"]}
    seeds = {name: {3, 1} if name == "controller" else {None} for name in policies}
    assert {p: set(found.filter(policy=p)["seed"]) for p in policies} == seeds
    assert len(found) == (len(policies) + 1) * results["test_samples"] * 5
    assert found.select(pl.struct("policy", "seed", "sample_id", "budget_ms").is_unique().all()).item()

    shares = {"accuracy": "accuracy", "satisfaction": "in_time", "utility": "utility", "latency_ms_mean": "latency_ms"}
    judged = means(found, shares)
    possible = means(found.filter("feasible"), {"satisfaction_feasible": "in_time"})
    for row in results["rows"]:
        if row["budget_ms"] is not None:
            key = row["policy"], row["budget_ms"]
            assert judged[key] == pytest.approx({name: row[name] for name in shares}, rel=1e-6)
            assert possible[key]["satisfaction_feasible"] == pytest.approx(row["satisfaction_feasible"], rel=1e-6)
    follows_from_decisions(results, found, [read_long_table("t.parquet", features="f.npz")])
    # row by row: what the profile says of the configuration
    table = read_long_table("t.parquet", features="f.npz")
    labels = {table.label(c): c for c in range(table.num_configurations)}
    rows, chosen = found["sample_id"].to_list(), found["configuration"].to_list()
    cells = [table.sample_ids.index(s) for s in rows], [labels[c] for c in chosen]
    assert table.accuracy[cells].tolist() == found["accuracy"].to_list()
    assert table.latency_ms[cells].tolist() == found["latency_ms"].to_list()
    late = found.filter(~pl.col("in_time"))
    assert len(late)
    assert (late["utility"] == 0).all()
    assert (late["latency_ms"] > late["budget_ms"]).all()


def test_without_baselines_static_and_oracle_are_left(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LEAN, "baselines=false", "name=few"]) == 0
    shown = capsys.readouterr().out
    assert "budget-aware static" in shown
    assert "forest" not in shown
    assert main([*LEAN, "name=all"]) == 0
    few, every = (results_of(f"runs/controller/{name}") for name in ("few", "all"))
    kept = {"controller", "budget_aware_static", "oracle"}
    assert {row["policy"] for row in few["rows"]} == kept

    def numbers(results: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**row, "decision_us_p50": None} for row in results["rows"] if row["policy"] in kept]

    assert numbers(few) == numbers(every)
    frames = [read_decisions(f"runs/controller/{name}") for name in ("few", "all")]
    assert frames[0].equals(frames[1].filter(pl.col("policy").is_in(kept)))
    table = read_long_table("t.parquet", features="f.npz")
    split, budgets = table.split(), torch.tensor(few["budgets_ms"])
    fitted = torch.cat([split.train, split.validation])
    features = {name: block[split.test] for name, block in table.features.items()}
    for chooser in (BudgetAwareStatic(table, fitted), Oracle(table, split.test)):
        for budget in budgets:
            asked = budget.expand(len(split.test))
            chosen = chooser.choose(features, asked, table.mask[split.test])
            own = frames[0].filter((pl.col("policy") == chooser.name) & (pl.col("budget_ms") == float(budget)))
            labels = dict(zip(own["sample_id"], own["configuration"], strict=True))
            assert [labels[table.sample_ids[i]] for i in split.test] == [table.label(c) for c in chosen]


@pytest.mark.parametrize("baselines", [False, True])
def test_under_mean_budgets_mixtures_are_expectations(folder: Path, baselines: bool) -> None:
    assert main([*LEAN, "budget=mean", f"baselines={str(baselines).lower()}"]) == 0
    results, found = results_of(), read_decisions("runs/latest")
    policies = {row["policy"] for row in results["rows"]}
    few = {"controller", "static_mix", "best_single", "oracle"}
    assert policies == few if not baselines else policies > few
    assert set(found["policy"]) == policies
    assert found["in_time"].is_null().all()
    assert found["feasible"].is_null().all()
    assert (found["utility"] == found["accuracy"]).all()
    follows_from_decisions(results, found, [read_long_table("t.parquet", features="f.npz")])
    singly = {p: found.filter(policy=p)["configuration"].is_not_null().mean() for p in policies}
    assert singly["static_mix"] == 0
    assert singly["best_single"] == singly["oracle"] == 1
    # where the guard fell back the controller is the static mix, which is no single configuration
    fallen = {(found["budget_ms"], s) for s, g in zip([3, 1], results["guard"], strict=True) for found in g}
    assert fallen
    for seed, guard in zip([3, 1], results["guard"], strict=True):
        for entry in guard:
            own = found.filter(pl.col("seed") == seed, pl.col("budget_ms") == entry["budget_ms"])
            assert own["configuration"].is_null().all() == (not entry["deployed"])


def test_a_mixture_has_the_expectation_of_its_two_configurations(folder: Path) -> None:
    assert main([*LEAN, "budget=mean", "baselines=false"]) == 0
    found, results = read_decisions("runs/latest"), results_of()
    table = read_long_table("t.parquet", features="f.npz")
    split = table.split()
    budgets = torch.tensor(results["budgets_ms"], dtype=torch.float64)
    mix = StaticMix(table, torch.cat([split.train, split.validation]), budgets)
    accuracy, _ = mix.expected(table, split.test)
    own = found.filter(policy="static_mix")
    cells = {(row["sample_id"], row["budget_ms"]): row["accuracy"] for row in own.iter_rows(named=True)}
    for i, row in enumerate(split.test.tolist()):
        for b, budget in enumerate(budgets.tolist()):
            assert cells[table.sample_ids[row], budget] == pytest.approx(float(accuracy[i, b]), rel=1e-6)


def test_decisions_of_several_data_sets_say_which(folder: Path) -> None:
    for seed, name in enumerate("ab"):
        write_long_table(small_table(60, seed=seed), f"{name}.parquet")
        write_features(small_table(60, seed=seed), f"{name}.npz")
    words = [w for w in LEAN if not w.startswith("profile")] + ["profile=joint"]
    words += ["profile.paths=[a.parquet,b.parquet]", "profile.features=[a.npz,b.npz]"]
    for name, baselines in (("all", "true"), ("few", "false")):
        assert main([*words, f"baselines={baselines}", f"name={name}"]) == 0
        found = read_decisions(f"runs/controller/{name}")
        assert set(found["dataset"]) == {"a", "b"}
        # the same ids stand in both
        assert found.select(pl.struct("policy", "seed", "dataset", "sample_id", "budget_ms").is_unique().all()).item()
        tables = [replace(read_long_table(f"{d}.parquet", features=f"{d}.npz"), name=d) for d in "ab"]
        follows_from_decisions(results_of(f"runs/controller/{name}"), found, tables)


# -- of a selector -----------------------------------------------------------------------------------------------------


def test_recorded_sequences_that_a_selector_prefers(folder: Path) -> None:
    table, _ = small_beams(60)
    table.save("b.safetensors")
    assert main([*SELECT, "beams.train=0.6", "beams.validation=0.2"]) == 0
    results, found = results_of(), read_decisions("runs/latest")
    assert dict(found.schema) == SELECTOR
    rows = {row["policy"]: row["accuracy"] for row in results["rows"]}
    judged = found.group_by("policy").agg(pl.col("correct").cast(pl.Float64).mean())
    assert dict(judged.iter_rows()) == pytest.approx(rows)
    follows_from_selections(results, found, [table.query_ids.index(q) for q in found["sample_id"].unique()])
    seeds = {p: set(found.filter(policy=p)["seed"]) for p in rows}
    unseeded = {"similarity", "best_recorded", "oracle", "image_similarity"}
    assert seeds == {p: {None} if p in unseeded else {0, 4} for p in rows}
    # each is a recorded sequence of its query, right or wrong as recorded
    for row in found.iter_rows(named=True):
        query = table.query_ids.index(row["sample_id"])
        shown = [[str(int(table.pool[query, p])) for p in beam] for beam in table.sequences[query]]
        assert table.fields["vqa_correct"][query, shown.index(row["demonstrations"])] == row["correct"]


def test_what_is_not_known_is_null_and_nothing_known_has_no_rows() -> None:
    table, _ = small_beams(4)
    rows, nan = torch.tensor([2, 0]), float("nan")
    decided = {
        "own": {
            1: Decided(torch.tensor([[1.0, nan], [0.0, 1.0]]), torch.tensor([[[7], [-1]], [[5], [6]]])),
            3: Decided(torch.full((2, 2), nan), torch.full((2, 2, 3), -1)),
        },
        "vote": {1: Decided(torch.tensor([[0.0, 1.0]]), None)},
    }
    assert selector_decisions(decided, table, rows, [0, 4]).rows(named=True) == [
        {"policy": policy, "seed": seed, "shots": 1, "sample_id": query, "demonstrations": shown, "correct": correct}
        for policy, seed, query, shown, correct in (
            ("own", 0, "2", ["7"], 1.0),
            ("own", 0, "0", None, None),
            ("own", 4, "2", ["5"], 0.0),
            ("own", 4, "0", ["6"], 1.0),
            ("vote", None, "2", None, 0.0),
            ("vote", None, "0", None, 1.0),
        )
    ]
