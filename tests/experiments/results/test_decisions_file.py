"""decisions.parquet holds every decision, and results.json is its summary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from commands import TABLE, write_table
from helpers import small_beams
from torch import Tensor

from knobwise.__main__ import main
from knobwise.agents.judging.baselines import Oracle, static_of
from knobwise.agents.judging.policy import requests_of
from knobwise.agents.selector.evaluation import Decided
from knobwise.agents.stack.prices import StaticMix
from knobwise.common.errors import InputError
from knobwise.envs.readers.long_table import read_long_table
from knobwise.experiments.report.words import read_results
from knobwise.experiments.results import decisions as decisions_file
from knobwise.experiments.results.decisions import (
    SCHEMA,
    DecisionArrays,
    decision_rows,
    read_decisions,
    write_decisions,
)
from knobwise.experiments.results.problem import shown_at
from knobwise.experiments.results.selectors import selector_decisions, selector_results
from knobwise.experiments.results.statistics import mean_interval

QUICK = [
    "optimiser.teacher_iterations=2",
    "optimiser.warmup_iterations=2",
    "optimiser.iterations=3",
    "optimiser.contexts=16",
    "policy.hidden=8",
]
LEAN = [*QUICK, "policy=utility", "seeds=[3,1]", "own_cost=false"]
SELECT = [
    "experiment=selector_replay",
    "beams.path=b.safetensors",
    "selector.width=16",
    "selector.heads=2",
]
SELECT += [
    "sft.epochs=1",
    "rce.epochs=1",
    "variants.grpo_recorded.epochs=1",
    "variants.shuffled_recorded=null",
]
SELECT += ["seeds=[0,4]", "jobs=1", "beams.train=0.6", "beams.validation=0.2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current one, with a table, two data sets and beams."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        write_table(90, holes=0.3)
        for seed, prefix in enumerate("ab"):
            write_table(seed=seed, prefix=prefix)
        small_beams(60)[0].save("b.safetensors")
        yield Path.cwd()


def run(*words: str) -> tuple[dict[str, Any], pl.DataFrame]:
    """Results and decisions."""
    assert main(["train", "tracking=disabled", *words]) == 0
    return read_results("runs/latest"), read_decisions(Path("runs/latest"))


def frame(places: list[float], **columns: Any) -> pl.DataFrame:
    samples = pl.DataFrame({"sample_id": ["b", "a"]})
    return pl.concat(
        [decision_rows("controller", seed, samples, places, columns) for seed in (1, 0)]
    )


def test_rows_are_read_back_in_the_order_written(tmp_path: Path) -> None:
    rows = frame(
        [2.0, 1.0], accuracy=np.array([[0.1, 0.2], [0.3, np.nan]]), feasible=None, decision_us=1.5
    )
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
    with pytest.raises(
        InputError, match=r"decisions\.parquet: no such file; run the experiment again"
    ):
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
    rows = pl.concat(
        [
            rows,
            decision_rows(
                "oracle", None, pl.DataFrame({"sample_id": ["a"]}), [1.0], {"score": 1.0}
            ),
        ]
    )
    arrays = DecisionArrays(rows)
    assert (arrays.policies, arrays.places) == (["controller", "oracle"], [2, 1])
    assert arrays.samples["sample_id"].to_list() == ["b", "a"]
    assert arrays.seeds == {"controller": [1, 0], "oracle": [None]}
    assert arrays.array("controller", "accuracy").tolist() == [[[0, 1], [2, 3]]] * 2
    np.testing.assert_equal(arrays.choices("controller", ["k=1", "k=2"])[0], [[0, 1], [np.nan, 0]])
    np.testing.assert_equal(arrays.array("oracle", "score"), [[[np.nan, np.nan], [np.nan, 1]]])
    reverse = DecisionArrays(rows.reverse()).array("controller", "accuracy")
    np.testing.assert_equal(reverse, arrays.array("controller", "accuracy")[:, ::-1, ::-1])


def test_results_are_means_of_the_decisions(folder: Path) -> None:
    results, found = run(*LEAN, *TABLE)
    policies = {row["policy"] for row in results["rows"]}
    seeds = {name: {3, 1} if name in ("controller", "teacher") else {None} for name in policies}
    assert {p: set(found.filter(policy=p)["seed"]) for p in policies} == seeds
    assert len(found) == (len(policies) + 2) * results["test_samples"] * 5
    assert found.select(pl.struct("policy", "seed", "sample_id", "place").is_unique().all()).item()
    shares = {
        "accuracy": "accuracy",
        "satisfaction": "in_time",
        "utility": "score",
        "latency_ms_mean": "latency_ms",
    }
    shares |= {"reward": "reward", "decision_us_p50": "decision_us"}
    means = found.group_by("policy", "place").agg(
        *(pl.col(column).cast(pl.Float64).mean().alias(name) for name, column in shares.items()),
        pl.col("in_time").filter("feasible").cast(pl.Float64).mean().alias("satisfaction_feasible"),
    )
    judged = {(row["policy"], row["place"]): row for row in means.to_dicts()}
    for row in results["rows"]:
        if row["budget_ms"] is not None:
            for name in (*shares, "satisfaction_feasible"):
                wanted = judged[row["policy"], row["budget_ms"]][name]
                assert row[name] == (None if wanted is None else pytest.approx(wanted, rel=1e-6)), (
                    name
                )
    # row by row: what the profile says of the configuration
    table = read_long_table(folder / "t.parquet", features=folder / "f.npz")
    labels = {table.label(c): c for c in range(table.num_configurations)}
    ids, chosen = found["sample_id"].to_list(), found["choice"].to_list()
    cells = [table.sample_ids.index(s) for s in ids], [labels[c] for c in chosen]
    assert table.accuracy[cells].tolist() == found["accuracy"].to_list()
    assert table.latency_ms[cells].tolist() == found["latency_ms"].to_list()
    late = found.filter(pl.col("in_time") == 0)
    assert len(late)
    assert (late["score"] == 0).all()
    assert (late["latency_ms"] > late["place"]).all()

    # without baselines static and the oracle are left, with the same decisions
    few, kept = run(*LEAN, *TABLE, "baselines=false")
    assert {row["policy"] for row in few["rows"]} == {
        "controller",
        "teacher",
        "budget_aware_static",
        "oracle",
    }
    rows = {(row["policy"], row["budget_ms"]): row for row in results["rows"]}
    for row in few["rows"]:
        for name, value in rows[row["policy"], row["budget_ms"]].items():
            assert name == "decision_us_p50" or row[name] == (
                value if value is None else pytest.approx(value)
            ), name
    same = found.filter(pl.col("policy").is_in(kept["policy"].unique()))
    assert kept.drop("decision_us").equals(same.drop("decision_us"))
    split = table.split()
    fitted = torch.cat([split.train, split.validation])
    features, mask = requests_of(table, split.test)
    for policy in (static_of(table, fitted), Oracle(table, split.test)):
        for budget in few["budgets_ms"]:
            limits = np.full(len(split.test), budget)
            rows = kept.filter((pl.col("policy") == policy.name) & (pl.col("place") == budget))
            choices = dict(rows.select("sample_id", "choice").iter_rows())
            expected = [table.label(c) for c in policy.choose(features, limits, mask)]
            assert [choices[table.sample_ids[i]] for i in split.test] == expected


def test_under_mean_budgets_mixtures_are_expectations(folder: Path) -> None:
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
            rows = found.filter(pl.col("seed") == seed, pl.col("place") == entry["budget_ms"])
            assert rows["choice"].is_null().all() == (not entry["deployed"])
    # a mixture has the expectation of its two configurations
    table = read_long_table(folder / "t.parquet", features=folder / "f.npz")
    split = table.split()
    budgets = torch.tensor(results["budgets_ms"], dtype=torch.float64)
    mix = StaticMix.of_table(table, torch.cat([split.train, split.validation]), budgets)
    accuracy, _ = mix.expected(table, split.test)
    arrays = DecisionArrays(found)
    assert arrays.samples["sample_id"].to_list() == [table.sample_ids[i] for i in split.test]
    np.testing.assert_allclose(arrays.array("static_mix", "accuracy")[0], accuracy, rtol=1e-6)


def test_decisions_of_several_data_sets_say_which(folder: Path) -> None:
    joint = [
        "profile=joint",
        "profile.paths=[at.parquet,bt.parquet]",
        "profile.features=[af.npz,bf.npz]",
    ]
    results, found = run(*LEAN, *joint, "baselines=false")
    assert set(found["dataset"]) == {"at", "bt"}
    # the same ids stand in both
    assert found.select(
        pl.struct("policy", "seed", "dataset", "sample_id", "place").is_unique().all()
    ).item()
    means = found.group_by("dataset", "policy").agg(pl.col("score").cast(pl.Float64).mean())
    wanted = {(row["dataset"], row["policy"]): row["utility"] for row in results["by_dataset"]}
    assert {
        (dataset, policy): score for dataset, policy, score in means.iter_rows()
    } == pytest.approx(wanted)


def test_recorded_sequences_that_a_selector_prefers(folder: Path) -> None:
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
        recorded = [
            " ".join(str(int(table.pool[query, p])) for p in beam)
            for beam in table.sequences[query]
        ]
        assert (
            table.fields["vqa_correct"][query, recorded.index(row["choice"])]
            == row["accuracy"]
            == row["score"]
        )


def test_what_is_not_known_is_null_and_nothing_known_has_no_rows() -> None:
    table, _ = small_beams(4)
    rows, nan = torch.tensor([2, 0]), float("nan")
    shown, vote = (
        torch.tensor([[[7, 3], [-1, -1]], [[5, -1], [6, 1]]]),
        torch.tensor([[1.0, 0.0], [0.0, 0.0]]),
    )
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


# -- results.json of a selector: means, paired differences, and what happens where something is unknown

RCE = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 0], [0, 0, 1, 1]]).float()
SFT = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0]]).float()
NEAR = torch.tensor([[0, 0, 1, 0]]).float()
LIVE = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).float()  # of the first two seeds only
TIMES = {("rce", 2): 12.5}
BEAMS, _ = small_beams(7)


def results(correct: dict[str, dict[int, Tensor]], **more: Any) -> dict[str, Any]:
    decided = {
        name: {
            n: Decided(right, None, decision_us=TIMES.get((name, n)))
            for n, right in by_shots.items()
        }
        for name, by_shots in correct.items()
    }
    queries = next(right.shape[1] for by_shots in correct.values() for right in by_shots.values())
    decisions = selector_decisions(
        decided, small_beams(queries)[0], torch.arange(queries), (4, 5, 6)
    )
    return selector_results(decisions, BEAMS, **{"seeds": (4, 5, 6), "trained_shots": 2} | more)


def difference(
    found: dict[str, Any], policy: str, against: str, shots: int = 2
) -> tuple[float, list[float]]:
    wanted = (policy, against, shots)
    (row,) = (
        row
        for row in found["differences"]
        if (row["policy"], row["against"], row["shots"]) == wanted
    )
    return row["difference"], row["ci95"]


def test_rows_hold_means_over_queries_and_seeds() -> None:
    found = results(
        {"rce": {2: RCE, 1: SFT}, "similarity": {2: NEAR, 1: NEAR}}, hidden=["annotator"]
    )
    assert json.loads(json.dumps(found)) == found
    rows = {(row["policy"], row["shots"]): row for row in found["rows"]}
    assert list(rows) == [("rce", 1), ("rce", 2), ("similarity", 1), ("similarity", 2)]
    rce, near = rows["rce", 2], rows["similarity", 2]
    assert rce["accuracy"] == pytest.approx(7 / 12)
    assert rce["accuracy_per_seed"] == pytest.approx([2 / 4, 3 / 4, 2 / 4])
    assert rce["decision_us_p50"] == 12.5
    assert rce["accuracy_ci95"] == pytest.approx(mean_interval(RCE))
    assert near["accuracy"] == 0.25
    assert "accuracy_per_seed" not in near
    assert near["decision_us_p50"] is None
    assert {row["queries"] for row in found["rows"]} == {4}
    sizes = {"samples": 7, "candidates": len(BEAMS.candidates)}
    assert found["profile"] == {"name": BEAMS.name, "digest": BEAMS.digest} | sizes
    head = {
        key: found[key]
        for key in ("system", "split", "test_queries", "seeds", "shots", "trained_shots", "hidden")
    }
    assert head == {
        **{
            "system": "selector",
            "split": "test",
            "test_queries": 4,
            "seeds": [4, 5, 6],
            "shots": [1, 2],
        },
        **{"trained_shots": 2, "hidden": ["annotator"]},
    }
    assert "test_digest" not in found


def test_differences_are_paired_over_queries_and_seeds() -> None:
    found = results(
        {"sft": {2: SFT}, "rce": {2: RCE}, "similarity": {2: NEAR}, "grpo_live": {2: LIVE}}
    )
    assert difference(found, "rce", "sft") == (
        pytest.approx(3 / 12),
        pytest.approx(mean_interval(RCE - SFT)),
    )
    # what no seed changes goes with all; fewer seeds go with the same seeds of the other
    assert difference(found, "sft", "similarity")[0] == pytest.approx((SFT - NEAR).mean())
    assert difference(found, "grpo_live", "rce") == (
        pytest.approx((LIVE - RCE[:2]).mean()),
        pytest.approx(mean_interval(LIVE - RCE[:2])),
    )
    assert difference(found, "grpo_live", "similarity")[0] == pytest.approx((LIVE - NEAR).mean())
    found = results({"sft": {2: SFT}, "shuffled_live": {2: RCE[:1]}})
    assert difference(found, "shuffled_live", "sft")[0] == pytest.approx((RCE[:1] - SFT[:1]).mean())


def test_pairing_shows_what_two_intervals_would_not() -> None:
    hard = torch.linspace(0, 1, 400)
    found = results(
        {"sft": {2: (hard < 0.5).float()[None]}, "rce": {2: (hard < 0.53).float()[None]}}
    )
    (sft, rce), (low, _) = (
        (row["accuracy_ci95"] for row in found["rows"]),
        difference(found, "rce", "sft")[1],
    )
    assert sft[1] > rce[0]
    assert low > 0


def test_the_furthest_trained_is_compared_with_every_simple_way() -> None:
    simple = {name: {2: NEAR} for name in ("random", "image_similarity", "vote", "careful_rule")}
    for form in ("sft", "rce", "grpo_recorded", "grpo_rounds", "grpo_live"):
        simple = {form: {2: RCE}} | simple
        found = results(simple)
        against = {row["against"] for row in found["differences"] if row["policy"] == form}
        assert against >= {"random", "image_similarity", "vote", "careful_rule"}
    assert not results({"random": {2: NEAR}, "vote": {2: NEAR}})["differences"]


def test_controls_stand_apart() -> None:
    names = ("shuffled_recorded", "shuffled_live", "hidden_sft", "hidden_rce", "hidden_live")
    found = results({"sft": {2: SFT}, "rce": {2: RCE}} | {name: {2: RCE} for name in names})
    assert [row["policy"] for row in found["rows"]] == ["sft", "rce"]
    assert [row["policy"] for row in found["controls"]] == list(names)
    pairs = {(row["policy"], row["against"]) for row in found["differences"]}
    assert {
        (f"shuffled_{kind}", other) for kind in ("recorded", "live") for other in ("sft", "rce")
    } <= pairs
    assert {("hidden_rce", "hidden_sft"), ("hidden_live", "hidden_sft")} <= pairs
    assert difference(found, "hidden_live", "hidden_sft") == (0.0, [0.0, 0.0])


def test_a_query_unknown_to_one_policy_is_left_out_for_all() -> None:
    oracle = torch.tensor([[1, 1, torch.nan, 1]])
    rce = RCE.clone()
    rce[1, 0] = torch.nan
    found = results(
        {"rce": {2: rce, 3: RCE}, "oracle": {2: oracle, 3: torch.full((1, 4), torch.nan)}}
    )
    rows = {(row["policy"], row["shots"]): row for row in found["rows"]}
    assert set(rows) == {
        ("rce", 2),
        ("oracle", 2),
        ("rce", 3),
    }  # nothing is known of the oracle at 3
    assert rows["rce", 2]["queries"] == rows["oracle", 2]["queries"] == 2
    assert rows["rce", 2]["accuracy"] == pytest.approx(RCE[:, [1, 3]].mean())
    assert rows["rce", 3]["queries"] == 4
    json.dumps(found, allow_nan=False)


def test_where_no_query_is_known_to_all_there_is_no_row() -> None:
    nothing = torch.full((1, 4), torch.nan)
    half, other = nothing.clone(), nothing.clone()
    half[0, :2], other[0, 2:] = 1.0, 1.0
    found = results({"random": {1: half, 2: NEAR}, "vote": {1: other, 2: NEAR}})
    assert {row["shots"] for row in found["rows"]} == {2}
    assert found["shots"] == [2]


def test_the_held_out_bank_is_named() -> None:
    test, _ = small_beams(9)
    found = results({"sft": {2: SFT}}, test=test, judged_by="recorded")
    assert (found["test_digest"], found["test_candidates"]) == (test.digest, len(test.candidates))
    assert found["judged_by"] == "recorded"


def test_sentences_are_about_the_trained_shots_or_the_nearest() -> None:
    assert [shown_at({"shots": s, "trained_shots": 2}) for s in ([1, 2, 3], [3, 4], [4])] == [
        2,
        3,
        4,
    ]
