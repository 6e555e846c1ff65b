"""decisions.parquet holds every decision, and results.json is its summary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from helpers import small_beams, small_table

from knobwise.__main__ import main
from knobwise.agents.judging.baselines import BudgetAwareStatic, Oracle
from knobwise.agents.selector.evaluation import Decided
from knobwise.agents.stack.prices import StaticMix
from knobwise.common.errors import InputError
from knobwise.envs.readers.long_table import read_long_table, write_features, write_long_table
from knobwise.experiments.results import decisions as decisions_file
from knobwise.experiments.results.decisions import (
    SCHEMA,
    DecisionArrays,
    decision_rows,
    read_decisions,
    write_decisions,
)
from knobwise.experiments.results.selectors import selector_decisions

QUICK = ["optimiser.warmup_iterations=2", "optimiser.iterations=3", "optimiser.contexts=16", "policy.hidden=8"]
LEAN = ["train", "tracking=disabled", *QUICK, "policy=utility", "seeds=[3,1]"]
SELECT = ["train", "experiment=selector_replay", "beams.path=b.safetensors", "selector.width=16", "selector.heads=2"]
SELECT += ["sft.epochs=1", "rce.epochs=1", "variants.grpo_recorded.epochs=1", "variants.shuffled_recorded=null"]
SELECT += ["tracking=disabled", "seeds=[0,4]", "jobs=1", "beams.train=0.6", "beams.validation=0.2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[dict[str, Any], pl.DataFrame]]:
    """Trains in a folder with a table, two data sets and beams; gives results and decisions."""
    folder = tmp_path_factory.mktemp("runs")
    for name, table in (("t", small_table(90, holes=0.3)), ("a", small_table(60)), ("b", small_table(60, seed=1))):
        write_long_table(table, folder / f"{name}.parquet")
        write_features(table, folder / f"{name}.npz")
    small_beams(60)[0].save(folder / "b.safetensors")

    def train(*words: str) -> tuple[dict[str, Any], pl.DataFrame]:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            assert main(list(words)) == 0
        return json.loads((folder / "runs/latest/results.json").read_text()), read_decisions(folder / "runs/latest")

    train.folder = folder  # type: ignore[attr-defined]
    return train


@pytest.fixture
def folder(run: Any) -> Path:
    return run.folder  # type: ignore[no-any-return]


TABLE = ["profile=table", "profile.path=t.parquet", "profile.features=t.npz"]


def frame(places: list[float], **columns: Any) -> pl.DataFrame:
    samples = pl.DataFrame({"sample_id": ["b", "a"]})
    return pl.concat([decision_rows("controller", seed, samples, places, columns) for seed in (1, 0)])


# -- the file ----------------------------------------------------------------------------------------------------------


def test_rows_are_read_back_in_the_order_written(tmp_path: Path) -> None:
    rows = frame([2.0, 1.0], accuracy=np.array([[0.1, 0.2], [0.3, np.nan]]), feasible=None, decision_us=1.5)
    write_decisions(tmp_path, rows.select(sorted(SCHEMA)).drop("vote"))
    found = read_decisions(tmp_path)
    assert found.equals(rows)
    assert dict(found.schema) == SCHEMA
    keys = list(found.select("seed", "sample_id", "place").iter_rows())
    assert keys == [(k, s, b) for k in (1, 0) for s in "ba" for b in (2.0, 1.0)]
    assert found["accuracy"].to_list() == pytest.approx([0.1, 0.2, 0.3, None] * 2)
    assert found["feasible"].is_null().all()
    assert set(found["decision_us"]) == {1.5}


def test_other_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown columns \['shots'\]"):
        write_decisions(tmp_path, frame([1.0]).with_columns(shots=1))
    assert not list(tmp_path.iterdir())


def test_what_is_no_file_of_decisions_is_an_error_for_a_person(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"decisions\.parquet: no such file; run the experiment again"):
        read_decisions(tmp_path)
    (tmp_path / decisions_file.FILE).write_bytes(b"PAR1 but not really")
    with pytest.raises(InputError, match=r"decisions\.parquet: cannot be read"):
        read_decisions(tmp_path)
    frame([1.0]).drop("seed").write_parquet(tmp_path / decisions_file.FILE)
    with pytest.raises(InputError, match="does not hold the columns of decisions"):
        read_decisions(tmp_path)


def test_arrays_do_not_depend_on_the_order_of_the_rows() -> None:
    labels = pl.Series(["k=1", "k=2", None, "k=1"])
    rows = frame([2.0, 1.0], accuracy=np.arange(4.0).reshape(2, 2), choice=labels)
    rows = pl.concat([rows, decision_rows("oracle", None, pl.DataFrame({"sample_id": ["a"]}), [1.0], {"score": 1.0})])
    arrays = DecisionArrays(rows)
    assert (arrays.policies, arrays.places, arrays.samples["sample_id"].to_list()) == (
        ["controller", "oracle"],
        [2, 1],
        ["b", "a"],
    )
    assert arrays.seeds == {"controller": [1, 0], "oracle": [None]}
    assert arrays.array("controller", "accuracy").tolist() == [[[0, 1], [2, 3]]] * 2
    np.testing.assert_equal(arrays.choices("controller", ["k=1", "k=2"])[0], [[0, 1], [np.nan, 0]])
    np.testing.assert_equal(arrays.array("oracle", "score"), [[[np.nan, np.nan], [np.nan, 1]]])
    other = DecisionArrays(rows.reverse())
    np.testing.assert_equal(
        other.array("controller", "accuracy"), arrays.array("controller", "accuracy")[:, ::-1, ::-1]
    )


# -- what a run writes -------------------------------------------------------------------------------------------------


def test_results_are_means_of_the_decisions(run: Any, folder: Path) -> None:
    results, found = run(*LEAN, *TABLE)
    policies = {row["policy"] for row in results["rows"]}
    seeds = {name: {3, 1} if name == "controller" else {None} for name in policies}
    assert {p: set(found.filter(policy=p)["seed"]) for p in policies} == seeds
    assert len(found) == (len(policies) + 1) * results["test_samples"] * 5
    assert found.select(pl.struct("policy", "seed", "sample_id", "place").is_unique().all()).item()
    shares = {"accuracy": "accuracy", "satisfaction": "in_time", "utility": "score", "latency_ms_mean": "latency_ms"}
    shares |= {"reward": "reward", "decision_us_p50": "decision_us"}
    means = found.group_by("policy", "place").agg(
        *(pl.col(column).cast(pl.Float64).mean().alias(name) for name, column in shares.items()),
        pl.col("in_time").filter("feasible").mean().alias("satisfaction_feasible"),
    )
    judged = {(row["policy"], row["place"]): row for row in means.to_dicts()}
    for row in results["rows"]:
        if row["budget_ms"] is not None:
            for name in (*shares, "satisfaction_feasible"):
                wanted = judged[row["policy"], row["budget_ms"]][name]
                assert row[name] == (None if wanted is None else pytest.approx(wanted, rel=1e-6)), name
    # row by row: what the profile says of the configuration
    table = read_long_table(folder / "t.parquet", features=folder / "t.npz")
    labels = {table.label(c): c for c in range(table.num_configurations)}
    ids, chosen = found["sample_id"].to_list(), found["choice"].to_list()
    cells = [table.sample_ids.index(s) for s in ids], [labels[c] for c in chosen]
    assert table.accuracy[cells].tolist() == found["accuracy"].to_list()
    assert table.latency_ms[cells].tolist() == found["latency_ms"].to_list()
    late = found.filter(~pl.col("in_time"))
    assert len(late)
    assert (late["score"] == 0).all()
    assert (late["latency_ms"] > late["place"]).all()

    # without baselines static and the oracle are left, with the same decisions
    few, kept = run(*LEAN, *TABLE, "baselines=false")
    assert {row["policy"] for row in few["rows"]} == {"controller", "budget_aware_static", "oracle"}
    rows = {(row["policy"], row["budget_ms"]): row for row in results["rows"]}
    for row in few["rows"]:
        for name, value in rows[row["policy"], row["budget_ms"]].items():
            assert name == "decision_us_p50" or row[name] == (value if value is None else pytest.approx(value)), name
    same = found.filter(pl.col("policy").is_in(kept["policy"].unique()))
    assert kept.drop("decision_us").equals(same.drop("decision_us"))
    split, budgets = table.split(), torch.tensor(few["budgets_ms"])
    fitted = torch.cat([split.train, split.validation])
    features = {name: block[split.test] for name, block in table.features.items()}
    for policy in (BudgetAwareStatic(table, fitted), Oracle(table, split.test)):
        for budget in budgets:
            limits = budget.expand(len(split.test))
            own = kept.filter((pl.col("policy") == policy.name) & (pl.col("place") == float(budget)))
            choices = dict(zip(own["sample_id"], own["choice"], strict=True))
            expected = [table.label(c) for c in policy.choose(features, limits, table.mask[split.test])]
            assert [choices[table.sample_ids[i]] for i in split.test] == expected


def test_under_mean_budgets_mixtures_are_expectations(run: Any, folder: Path) -> None:
    results, found = run(*LEAN, *TABLE, "budget=mean", "baselines=false")
    policies = {"controller", "static_mix", "best_single", "oracle"}
    assert {row["policy"] for row in results["rows"]} == set(found["policy"]) == policies
    assert found["in_time"].is_null().all()
    assert found["feasible"].is_null().all()
    assert found["reward"].is_null().all()
    assert (found["score"] == found["accuracy"]).all()
    singly = {p: found.filter(policy=p)["choice"].is_not_null().mean() for p in policies}
    assert singly["static_mix"] == 0
    assert singly["best_single"] == singly["oracle"] == 1
    # where the guard fell back the controller is the static mix, which is no single configuration
    for seed, guard in zip([3, 1], results["guard"], strict=True):
        assert guard
        for entry in guard:
            own = found.filter(pl.col("seed") == seed, pl.col("place") == entry["budget_ms"])
            assert own["choice"].is_null().all() == (not entry["deployed"])
    # a mixture has the expectation of its two configurations
    table = read_long_table(folder / "t.parquet", features=folder / "t.npz")
    split = table.split()
    budgets = torch.tensor(results["budgets_ms"], dtype=torch.float64)
    mix = StaticMix(table, torch.cat([split.train, split.validation]), budgets)
    accuracy, _ = mix.expected(table, split.test)
    arrays = DecisionArrays(found)
    assert arrays.samples["sample_id"].to_list() == [table.sample_ids[i] for i in split.test]
    np.testing.assert_allclose(arrays.array("static_mix", "accuracy")[0], accuracy, rtol=1e-6)


def test_decisions_of_several_data_sets_say_which(run: Any) -> None:
    joint = ["profile=joint", "profile.paths=[a.parquet,b.parquet]", "profile.features=[a.npz,b.npz]"]
    results, found = run(*LEAN, *joint, "baselines=false")
    assert set(found["dataset"]) == {"a", "b"}
    # the same ids stand in both
    assert found.select(pl.struct("policy", "seed", "dataset", "sample_id", "place").is_unique().all()).item()
    means = found.group_by("dataset", "policy").agg(pl.col("score").cast(pl.Float64).mean())
    wanted = {(row["dataset"], row["policy"]): row["utility"] for row in results["by_dataset"]}
    assert {(dataset, policy): score for dataset, policy, score in means.iter_rows()} == pytest.approx(wanted)


# -- of a selector -----------------------------------------------------------------------------------------------------


def test_recorded_sequences_that_a_selector_prefers(run: Any) -> None:
    results, found = run(*SELECT)
    table, _ = small_beams(60)
    rows = {row["policy"]: row["accuracy"] for row in results["rows"]}
    judged = found.group_by("policy").agg(pl.col("score").cast(pl.Float64).mean())
    assert dict(judged.iter_rows()) == pytest.approx(rows)
    seeds = {p: set(found.filter(policy=p)["seed"]) for p in rows}
    unseeded = {"similarity", "best_recorded", "oracle", "image_similarity"}
    assert seeds == {p: {None} if p in unseeded else {0, 4} for p in rows}
    # each is a recorded sequence of its query, right or wrong as recorded
    for row in found.iter_rows(named=True):
        query = table.query_ids.index(row["sample_id"])
        shown = [" ".join(str(int(table.pool[query, p])) for p in beam) for beam in table.sequences[query]]
        assert table.fields["vqa_correct"][query, shown.index(row["choice"])] == row["accuracy"] == row["score"]


def test_what_is_not_known_is_null_and_nothing_known_has_no_rows() -> None:
    table, _ = small_beams(4)
    rows, nan = torch.tensor([2, 0]), float("nan")
    shown, vote = torch.tensor([[[7, 3], [-1, -1]], [[5, -1], [6, 1]]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    decided = {
        "own": {
            1: Decided(torch.tensor([[1.0, nan], [0.0, 1.0]]), shown, vote, 12.5),
            3: Decided(torch.full((2, 2), nan), torch.full((2, 2, 3), -1)),
        },
        "vote": {1: Decided(torch.tensor([[0.0, 1.0]]), None)},
    }
    found = selector_decisions(decided, table, rows, [0, 4])
    columns = ["policy", "seed", "place", "sample_id", "choice", "score", "vote", "decision_us"]
    assert found.select(columns).rows() == [
        ("own", 0, 1, "2", "7 3", 1.0, 1.0, 12.5),
        ("own", 0, 1, "0", None, None, 0.0, 12.5),
        ("own", 4, 1, "2", "5", 0.0, 0.0, 12.5),
        ("own", 4, 1, "0", "6 1", 1.0, 0.0, 12.5),
        ("vote", None, 1, "2", None, 0.0, None, None),
        ("vote", None, 1, "0", None, 1.0, None, None),
    ]
