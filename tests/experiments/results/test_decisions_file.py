"""decisions.parquet holds every decision, and results.json is its summary."""

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from commands import TABLE, write_table
from helpers import small_beams

from knobwise.__main__ import main
from knobwise.agents.judging.baselines import Oracle, static_of
from knobwise.agents.judging.policy import choices_of, requests_of
from knobwise.agents.selector.evaluation import Decided
from knobwise.agents.stack.prices import StaticMix
from knobwise.common.errors import InputError
from knobwise.envs.readers.long_table import read_long_table
from knobwise.experiments.report.words import read_results
from knobwise.experiments.results.decisions import (
    FILE,
    SCHEMA,
    array_of,
    decision_rows,
    read_decisions,
    splits_of,
    write_decisions,
)
from knobwise.experiments.results.problem import shown_at
from knobwise.experiments.results.selectors import selector_decisions, selector_results
from knobwise.experiments.results.statistics import mean_interval

LEAN = [
    *("optimiser.teacher_iterations=2", "optimiser.warmup_iterations=2", "optimiser.iterations=3"),
    *("optimiser.contexts=16", "policy.hidden=8", "policy=utility", "seeds=[3,1]"),
    "own_cost=false",
]
SELECT = [
    *("experiment=selector_replay", "beams.path=b.safetensors", "selector.width=16"),
    *("selector.heads=2", "sft.epochs=1", "rce.epochs=1", "variants.grpo_recorded.epochs=1"),
    *("variants.shuffled_recorded=null", "seeds=[0,4]", "jobs=1", "beams.train=0.6"),
    "beams.validation=0.2",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The current one, with a table, two data sets and beams."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        write_table(90, holes=0.3)
        for seed, prefix in enumerate("ab"):
            write_table(seed=seed, prefix=prefix)
        small_beams(60)[0].save("b.safetensors")
        yield Path.cwd()


def run(*words):
    """Results and decisions."""
    assert main(["train", "tracking=disabled", *words]) == 0
    return read_results("runs/latest"), read_decisions(Path("runs/latest"))


def profile():
    """The table, the rows that policies are fitted on, and those that they are judged on."""
    table = read_long_table("t.parquet", features="f.npz")
    split = table.split()
    return table, torch.cat([split.train, split.validation]), split.test


def frame(places, **columns):
    samples = pl.DataFrame({"sample_id": ["b", "a"]})
    rows = [decision_rows("controller", seed, samples, places, columns) for seed in (1, 0)]
    return pl.concat(rows)


def is_unique(decisions, *keys):
    return not decisions.select(*keys).is_duplicated().any()


def test_rows_are_read_back_in_the_order_written(tmp_path):
    accuracy = np.array([[0.1, 0.2], [0.3, np.nan]])
    rows = frame([2.0, 1.0], accuracy=accuracy, feasible=None, decision_us=1.5)
    write_decisions(tmp_path, rows.select(sorted(SCHEMA)).drop("vote"))
    found = read_decisions(tmp_path)
    assert found.equals(rows)
    assert dict(found.schema) == SCHEMA
    keys = list(found.select("seed", "sample_id", "place").iter_rows())
    assert keys == [(k, s, b) for k in (1, 0) for s in "ba" for b in (2.0, 1.0)]
    assert found["accuracy"].to_list() == pytest.approx([0.1, 0.2, 0.3, None] * 2)
    assert found["feasible"].is_null().all()
    assert set(found["decision_us"]) == {1.5}


def test_other_columns_are_refused(tmp_path):
    with pytest.raises(ValueError, match="shots"):
        write_decisions(tmp_path, frame([1.0]).with_columns(shots=1))
    assert not list(tmp_path.iterdir())


def test_what_is_no_file_of_decisions_is_an_error_for_a_person(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_decisions(tmp_path)
    (tmp_path / FILE).write_bytes(b"PAR1 but not really")
    with pytest.raises(InputError, match="cannot be read"):
        read_decisions(tmp_path)
    frame([1.0]).drop("seed").write_parquet(tmp_path / FILE)
    with pytest.raises(InputError, match="columns"):
        read_decisions(tmp_path)


def test_arrays_are_seeds_by_samples_by_places():
    first = frame([2.0, 1.0], accuracy=np.array([[0.0, 1.0], [2.0, np.nan]]))
    wanted = [[[0, 1], [2, np.nan]]] * 2
    np.testing.assert_equal(array_of(first, "controller", "accuracy"), wanted)
    assert splits_of(first.select("split", "dataset", "sample_id").unique()) is None
    # of two splits the samples of the second follow those of the first, seed by seed
    second = frame([2.0, 1.0], accuracy=np.array([[4.0, 5.0], [6.0, 7.0]]))
    both = pl.concat([first.with_columns(split=0), second.with_columns(split=1)])
    wanted = [[[0, 1], [2, np.nan], [4, 5], [6, 7]]] * 2
    np.testing.assert_equal(array_of(both, "controller", "accuracy"), wanted)
    samples = both.select("split", "dataset", "sample_id").unique(maintain_order=True)
    numbers = splits_of(samples)
    assert numbers is not None
    assert numbers.tolist() == [[0, 0, 1, 1], [0, 1, 0, 1]]


def test_results_are_means_of_the_decisions(folder):
    results, found = run(*LEAN, *TABLE)
    policies = {row["policy"] for row in results["rows"]}
    seeds = {name: {3, 1} if name in ("controller", "teacher") else {None} for name in policies}
    assert {p: set(found.filter(policy=p)["seed"]) for p in policies} == seeds
    assert len(found) == (len(policies) + 2) * results["test_samples"] * 5
    assert is_unique(found, "policy", "seed", "sample_id", "place")
    columns = {"accuracy": "accuracy", "satisfaction": "in_time", "utility": "score"}
    columns |= {"latency_ms_mean": "latency_ms", "reward": "reward"}
    columns |= {"decision_us_p50": "decision_us"}
    for row in results["rows"]:
        if row["budget_ms"] is not None:
            part = found.filter(policy=row["policy"], place=row["budget_ms"])
            wanted = {name: part[column].mean() for name, column in columns.items()}
            wanted["satisfaction_feasible"] = part.filter("feasible")["in_time"].mean()
            for name, mean in wanted.items():
                assert row[name] == (mean and pytest.approx(mean, rel=1e-5)), name
    # row by row: what the profile says of the configuration
    table, fitted, test = profile()
    labels = {table.label(c): c for c in range(table.num_configurations)}
    rows = [table.sample_ids.index(sample) for sample in found["sample_id"]]
    cells = rows, [labels[choice] for choice in found["choice"]]
    assert table.accuracy[cells].tolist() == found["accuracy"].to_list()
    assert table.latency_ms[cells].tolist() == found["latency_ms"].to_list()
    late = found.filter(pl.col("in_time") == 0)
    assert len(late)
    assert (late["score"] == 0).all()
    assert (late["latency_ms"] > late["place"]).all()

    # without baselines static and the oracle are left, with the same decisions
    few, kept = run(*LEAN, *TABLE, "baselines=false")
    left = {"controller", "teacher", "budget_aware_static", "oracle"}
    assert {row["policy"] for row in few["rows"]} == left
    same = found.filter(pl.col("policy").is_in(left))
    assert kept.drop("decision_us").equals(same.drop("decision_us"))
    for policy in (static_of(table, fitted), Oracle(table, test)):
        features, mask = requests_of(table, test)
        choices = choices_of(policy, features, np.array(few["budgets_ms"]), mask)
        decided = kept.filter(policy=policy.name)["choice"].to_list()
        assert decided == [table.label(c) for c in choices.flatten().tolist()]


def test_under_mean_budgets_mixtures_are_expectations(folder):
    results, found = run(*LEAN, *TABLE, "budget=mean", "baselines=false")
    policies = {"controller", "static_mix", "best_single", "oracle"}
    assert {row["policy"] for row in results["rows"]} == set(found["policy"]) == policies
    assert (
        found.select(pl.col("in_time", "feasible", "reward").is_null().all()).row(0) == (True,) * 3
    )
    assert (found["score"] == found["accuracy"]).all()
    singly = {p: found.filter(policy=p)["choice"].is_not_null().mean() for p in policies}
    assert singly["static_mix"] == 0
    assert singly["best_single"] == singly["oracle"] == 1
    # where the guard fell back the controller is the static mix, which is no single configuration
    for seed, guard in zip([3, 1], results["guard"], strict=True):
        assert guard
        for entry in guard:
            rows = found.filter(seed=seed, place=entry["budget_ms"])
            assert rows["choice"].is_null().all() == (not entry["deployed"])
    # a mixture has the expectation of its two configurations
    table, fitted, test = profile()
    budgets = torch.tensor(results["budgets_ms"], dtype=torch.float64)
    accuracy, _ = StaticMix.of_table(table, fitted, budgets).expected(table, test)
    ids = found["sample_id"].unique(maintain_order=True).to_list()
    assert ids == [table.sample_ids[i] for i in test]
    np.testing.assert_allclose(array_of(found, "static_mix", "accuracy")[0], accuracy, rtol=1e-6)


def test_decisions_of_several_data_sets_say_which(folder):
    paths = ["profile.paths=[at.parquet,bt.parquet]", "profile.features=[af.npz,bf.npz]"]
    results, found = run(*LEAN, "profile=joint", *paths, "baselines=false")
    assert set(found["dataset"]) == {"at", "bt"}
    # the same ids stand in both
    assert is_unique(found, "policy", "seed", "dataset", "sample_id", "place")
    for row in results["by_dataset"]:
        part = found.filter(dataset=row["dataset"], policy=row["policy"])
        assert part["score"].mean() == pytest.approx(row["utility"])


def test_recorded_sequences_that_a_selector_prefers(folder):
    results, found = run(*SELECT)
    table, _ = small_beams(60)
    unseeded = {"similarity", "best_recorded", "oracle", "image_similarity"}
    for row in results["rows"]:
        part = found.filter(policy=row["policy"])
        assert part["score"].mean() == pytest.approx(row["accuracy"])
        assert set(part["seed"]) == ({None} if row["policy"] in unseeded else {0, 4})
    # each is a recorded sequence of its query, right or wrong as recorded
    for row in found.iter_rows(named=True):
        query = table.query_ids.index(row["sample_id"])
        shown = [table.pool[query, beam].tolist() for beam in table.sequences[query]]
        recorded = shown.index([int(item) for item in row["choice"].split()])
        right = table.fields["vqa_correct"][query, recorded]
        assert right == row["accuracy"] == row["score"]


def test_what_is_not_known_is_null_and_nothing_known_has_no_rows():
    table, _ = small_beams(4)
    rows, nan = torch.tensor([2, 0]), float("nan")
    shown = torch.tensor([[[7, 3], [-1, -1]], [[5, -1], [6, 1]]])
    vote = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
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
BEAMS, _ = small_beams(7)


def results(correct, **more):
    decided = {}
    for name, by_shots in correct.items():
        decided[name] = {}
        for shots, right in by_shots.items():
            time_us = 12.5 if (name, shots) == ("rce", 2) else None
            decided[name][shots] = Decided(right, None, decision_us=time_us)
    count = right.shape[1]
    decisions = selector_decisions(decided, small_beams(count)[0], torch.arange(count), (4, 5, 6))
    found = selector_results(decisions, BEAMS, **{"seeds": (4, 5, 6), "trained_shots": 2} | more)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    return found


def at_two(**correct):
    return {name: {2: right} for name, right in correct.items()}


def by_shots(found):
    return {(row["policy"], row["shots"]): row for row in found["rows"]}


def differences(found):
    rows = found["differences"]
    return {(row["policy"], row["against"]): (row["difference"], row["ci95"]) for row in rows}


def test_rows_hold_means_over_queries_and_seeds():
    correct = {"rce": {2: RCE, 1: SFT}, "similarity": {2: NEAR, 1: NEAR}}
    found = results(correct, hidden=["annotator"])
    rows = by_shots(found)
    assert list(rows) == [("rce", 1), ("rce", 2), ("similarity", 1), ("similarity", 2)]
    assert rows["rce", 2] == {
        "policy": "rce",
        "shots": 2,
        "accuracy": pytest.approx(7 / 12),
        "accuracy_ci95": pytest.approx(mean_interval(RCE)),
        "accuracy_per_seed": pytest.approx([2 / 4, 3 / 4, 2 / 4]),
        "queries": 4,
        "decision_us_p50": 12.5,
    }
    near = rows["similarity", 2]
    assert near["accuracy"] == 0.25
    assert near["decision_us_p50"] is None
    assert "accuracy_per_seed" not in near
    facts = {"system": "selector", "split": "test", "test_queries": 4, "seeds": [4, 5, 6]}
    facts |= {"shots": [1, 2], "trained_shots": 2, "hidden": ["annotator"]}
    sizes = {"samples": 7, "candidates": len(BEAMS.candidates)}
    facts["profile"] = {"name": BEAMS.name, "digest": BEAMS.digest} | sizes
    assert facts.items() <= found.items()
    assert "test_digest" not in found
    test, _ = small_beams(9)
    found = results(at_two(sft=SFT), test=test, judged_by="recorded")
    assert (found["test_digest"], found["test_candidates"]) == (test.digest, len(test.candidates))
    assert found["judged_by"] == "recorded"


@pytest.mark.parametrize(
    ("policy", "against", "gain"),
    [
        ("rce", "sft", RCE - SFT),
        # what no seed changes goes with all; fewer seeds go with the same seeds of the other
        ("sft", "similarity", SFT - NEAR),
        ("grpo_live", "rce", LIVE - RCE[:2]),
        ("grpo_live", "similarity", LIVE - NEAR),
        ("shuffled_live", "sft", RCE[:1] - SFT[:1]),
    ],
)
def test_differences_are_paired_over_queries_and_seeds(policy, against, gain):
    every = at_two(sft=SFT, rce=RCE, similarity=NEAR, grpo_live=LIVE, shuffled_live=RCE[:1])
    difference, ci95 = differences(results(every))[policy, against]
    assert difference == pytest.approx(gain.mean())
    assert ci95 == pytest.approx(mean_interval(gain))


def test_pairing_shows_what_two_intervals_would_not():
    hard = torch.linspace(0, 1, 400)[None]
    found = results(at_two(sft=(hard < 0.5).float(), rce=(hard < 0.53).float()))
    sft, rce = (row["accuracy_ci95"] for row in found["rows"])
    assert sft[1] > rce[0]
    assert differences(found)["rce", "sft"][1][0] > 0


def test_the_furthest_trained_is_compared_with_every_simple_way():
    simple = ("random", "image_similarity", "vote", "careful_rule")
    correct = at_two(**dict.fromkeys(simple, NEAR))
    assert not results(correct)["differences"]
    for form in ("sft", "rce", "grpo_recorded", "grpo_rounds", "grpo_live"):
        correct = at_two(**{form: RCE}) | correct
        assert {(form, other) for other in simple} <= differences(results(correct)).keys()


def test_controls_stand_apart():
    names = ("shuffled_recorded", "shuffled_live", "hidden_sft", "hidden_rce", "hidden_live")
    found = results(at_two(sft=SFT, rce=RCE, **dict.fromkeys(names, RCE)))
    assert [row["policy"] for row in found["rows"]] == ["sft", "rce"]
    assert [row["policy"] for row in found["controls"]] == list(names)
    pairs = {(name, other) for name in names[:2] for other in ("sft", "rce")}
    pairs |= {("hidden_rce", "hidden_sft"), ("hidden_live", "hidden_sft")}
    assert pairs <= differences(found).keys()
    assert differences(found)["hidden_live", "hidden_sft"] == (0.0, [0.0, 0.0])


def test_a_query_unknown_to_one_policy_is_left_out_for_all():
    nothing = torch.full((1, 4), torch.nan)
    oracle, rce, half, other = nothing.clone(), RCE.clone(), nothing.clone(), nothing.clone()
    oracle[0, [0, 1, 3]] = 1.0
    rce[1, 0] = torch.nan
    rows = by_shots(results({"rce": {2: rce, 3: RCE}, "oracle": {2: oracle, 3: nothing}}))
    # nothing is known of the oracle at 3
    queries = {("rce", 2): 2, ("oracle", 2): 2, ("rce", 3): 4}
    assert {key: row["queries"] for key, row in rows.items()} == queries
    assert rows["rce", 2]["accuracy"] == pytest.approx(RCE[:, [1, 3]].mean())
    # where no query is known to all there is no row
    half[0, :2], other[0, 2:] = 1.0, 1.0
    found = results({"random": {1: half, 2: NEAR}, "vote": {1: other, 2: NEAR}})
    assert {row["shots"] for row in found["rows"]} == {2}
    assert found["shots"] == [2]


def test_sentences_are_about_the_trained_shots_or_the_nearest():
    cases = {(1, 2, 3): 2, (3, 4): 3, (4,): 4}
    for shots, shown in cases.items():
        assert shown_at({"shots": shots, "trained_shots": 2}) == shown
