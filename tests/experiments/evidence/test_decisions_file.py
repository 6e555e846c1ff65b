"""decisions.parquet holds every decision, and results.json is its summary."""

import itertools
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from commands import OPTIMISER, REPLAY, TABLE, launch, words_of, write_table
from helpers import input_error, small_beams

from knobwise.agents.selector.evaluation import Decided
from knobwise.envs.readers.long_table import read_long_table
from knobwise.experiments.evidence.decisions import (
    BEFORE,
    FILE,
    IF_FREE,
    SCHEMA,
    array_of,
    decision_rows,
    read_decisions,
    splits_of,
    write_decisions,
)
from knobwise.experiments.evidence.results import read_results
from knobwise.experiments.evidence.selectors import (
    Demonstrations,
    selector_decisions,
    selector_results,
)
from knobwise.experiments.evidence.statistics import mean_interval
from knobwise.experiments.evidence.task import shown_at
from knobwise.experiments.settings.beams import SelectorData

BEAMS, _ = small_beams(7)
LEAN = words_of("train policy=utility seeds=[3,1] own_cost=false", TABLE, OPTIMISER)
SELECT = words_of(
    REPLAY,
    "sft.epochs=1 variants.grpo_recorded.epochs=1 variants.shuffled_recorded=null seeds=[0,4] jobs=1",
)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*words):
    """Return results and decisions of a run."""
    launch(*words)
    return read_results("runs/latest"), read_decisions("runs/latest")


def frame(conditions, **columns):
    samples = pl.DataFrame({"sample": ["b", "a"]})
    rows = [decision_rows("controller", seed, samples, conditions, columns) for seed in (1, 0)]
    return pl.concat(rows)


def test_rows_are_read_back_in_the_order_written():
    accuracy = np.array([[0.1, 0.2], [0.3, np.nan]])
    rows = frame([2.0, 1.0], accuracy=accuracy, feasible=None, decision_us=1.5)
    write_decisions(".", rows.select(sorted(SCHEMA)).drop("vote"))
    found = read_decisions(".")
    assert found.equals(rows)
    assert dict(found.schema) == SCHEMA
    conditions = found["seed", "sample", "condition"].rows()
    assert conditions[:3] == [(1, "b", 2.0), (1, "b", 1.0), (1, "a", 2.0)]
    assert found["accuracy"].to_list() == pytest.approx([0.1, 0.2, 0.3, None] * 2)
    assert found["feasible"].is_null().all()
    assert set(found["decision_us"]) == {1.5}


def test_what_is_no_file_of_decisions_is_an_error_for_a_person():
    with input_error(FILE):
        read_decisions(".")
    Path(FILE).write_bytes(b"PAR1 but not really")
    with input_error(FILE):
        read_decisions(".")
    frame([1.0]).drop("seed").write_parquet(FILE)
    with input_error("seed"):
        read_decisions(".")


def test_arrays_are_seeds_by_samples_by_conditions():
    values = [[0, 1], [2, np.nan], [4, 5], [6, 7]]
    first, second = (
        frame([2.0, 1.0], accuracy=np.array(part)) for part in (values[:2], values[2:])
    )
    # of two splits the samples of the second follow those of the first, seed by seed
    both = pl.concat([first.with_columns(split=0), second.with_columns(split=1)])
    for rows, wanted in ((first, values[:2]), (both, values)):
        np.testing.assert_equal(array_of(rows, "controller", "accuracy"), [wanted] * 2)

    def numbers(rows):
        keys = ("split", "dataset", "sample", "cluster")
        return splits_of(rows.select(keys).unique(maintain_order=True))

    assert numbers(first) is None
    assert numbers(both).tolist() == [[0, 0, 1, 1], [0, 1, 0, 1]]
    # samples of a cluster have one number, also where there is a single split
    alike = first.with_columns(cluster=pl.lit("a"))
    assert numbers(alike).tolist() == [[0, 0], [0, 0]]
    # those of none are not one more cluster
    together = pl.Series(["u", "u", None, None])
    mixed = pl.DataFrame({"sample": [*"abcd"], "cluster": together})
    mixed = mixed.with_columns(split=pl.lit(None, pl.Int64), dataset=pl.lit("", pl.String))
    assert splits_of(mixed).tolist() == [[0, 0, 0, 0], [0, 0, 1, 2]]


def test_results_are_means_of_the_decisions():
    write_table(90, holes=0.3)
    results, found = run(LEAN, "unprofiled=forbid")
    policies = {row["policy"] for row in results["rows"]}
    seeds = {name: {3, 1} if name in ("controller", "teacher") else {None} for name in policies}
    # what costs nothing, and what GRPO started from, are policies without rows in the results
    seeds |= {name: {3, 1} for name in (IF_FREE, BEFORE)}
    assert {p: set(found.filter(policy=p)["seed"]) for p in found["policy"].unique()} == seeds
    assert len(found) == (len(policies) + 6) * results["test_samples"] * 5
    assert found["policy", "seed", "sample", "condition"].is_unique().all()
    for row in results["rows"]:
        if row["budget_ms"] is not None:
            part = found.filter(policy=row["policy"], condition=row["budget_ms"])
            assert row["utility"] == pytest.approx(part["utility"].mean(), rel=1e-5)
    # row by row: what the profile says of the configuration
    table = read_long_table("t.parquet", features="f.npz")
    labels = [table.label(c) for c in range(12)]
    rows = [table.sample_ids.index(sample) for sample in found["sample"]]
    cells = rows, [labels.index(choice) for choice in found["choice"]]
    assert table.accuracy[cells].tolist() == found["accuracy"].to_list()
    assert table.latency_ms[cells].tolist() == found["latency_ms"].to_list()
    on_time = (found["latency_ms"] <= found["condition"]).cast(pl.Float32)
    assert (found["on_time"] == on_time).all()
    assert (found["utility"] == found["accuracy"] * on_time).all()

    # without baselines and the other seed, what is left decides the same
    few, kept = run(LEAN, "unprofiled=forbid baselines=false seeds=[3]")
    left = {"controller", "teacher", "budget_aware_static", "oracle"}
    assert {row["policy"] for row in few["rows"]} == left
    left |= {IF_FREE, BEFORE}
    same = found.filter(pl.col("policy").is_in(left), pl.col("seed").fill_null(3) == 3)
    assert kept.drop("decision_us").equals(same.drop("decision_us"))


def test_recorded_sequences_that_a_selector_prefers():
    table, _ = small_beams(60)
    table.save("b.safetensors")
    results, found = run(SELECT)
    seeded = {"sft", "rce", "grpo_recorded", "random"}
    for row in results["rows"]:
        seeds = {0, 4} if row["policy"] in seeded else {None}
        assert set(found.filter(policy=row["policy"])["seed"]) == seeds
    # each is a recorded sequence of its query, right or wrong as recorded
    for row in found.iter_rows(named=True):
        query = table.query_ids.index(row["sample"])
        shown = table.pool[query][table.sequences[query]].tolist()
        recorded = shown.index([int(item) for item in row["choice"].split()])
        right = table.fields["vqa_correct"][query, recorded]
        assert right == row["accuracy"]


def test_what_is_not_known_is_null_and_nothing_known_has_no_rows():
    right = torch.tensor([[1.0, torch.nan], [0.0, 1.0]])
    shown = torch.tensor([[[7, 3], [-1, -1]], [[5, -1], [6, 1]]])
    vote = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    decided = {
        "own": {1: Decided(right, shown, vote, 12.5), 3: Decided(right * torch.nan, shown)},
        "vote": {1: Decided(right[1:], None)},
    }
    evaluator = Demonstrations(BEAMS, torch.tensor([2, 0]), (1, 3))
    found = selector_decisions(evaluator, decided, [0, 4])
    columns = ["policy", "seed", "sample", "choice", "accuracy", "vote", "decision_us"]
    assert found[columns].rows() == [
        ("own", 0, "2", "7 3", 1.0, 1.0, 12.5),
        ("own", 0, "0", None, None, 0.0, 12.5),
        ("own", 4, "2", "5", 0.0, 0.0, 12.5),
        ("own", 4, "0", "6 1", 1.0, 0.0, 12.5),
        ("vote", None, "2", None, 0.0, None, None),
        ("vote", None, "0", None, 1.0, None, None),
    ]
    assert set(found["condition"]) == {1}


# -- results.json of a selector: means, paired differences, and what happens where something is unknown

RCE = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 0], [0, 0, 1, 1]]).float()
SFT = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0]]).float()
NEAR = torch.tensor([[0, 0, 1, 0]]).float()
LIVE = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).float()  # of the first two seeds only


def results(correct, test=BEAMS, judged_by="scorer", hidden=()):
    """Return results from right answers [seeds, 4] by policy, and by number of shots, or at two."""
    decided = {}
    for name, answers in correct.items():
        by_shots = answers if isinstance(answers, dict) else {2: answers}
        decided[name] = {
            shots: Decided(right, None, decision_us=12.5 if name == "rce" else None)
            for shots, right in by_shots.items()
        }
    seeds = (4, 5, 6)
    judged = sorted({shots for by_shots in decided.values() for shots in by_shots})
    evaluator = Demonstrations(BEAMS, torch.arange(4), judged)
    decisions = selector_decisions(evaluator, decided, seeds)
    data = SelectorData(BEAMS, None, None, test, None, None, None, judged_by)
    return selector_results(decisions, data, seeds, 2, hidden)


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
    assert rows["similarity", 2].keys() == rows["rce", 2].keys() - {"accuracy_per_seed"}
    assert rows["similarity", 2]["decision_us_p50"] is None
    facts = {
        "system": "selector",
        "seeds": [4, 5, 6],
        "shots": [1, 2],
        "hidden": ["annotator"],
        "profile": {"name": BEAMS.name, "digest": BEAMS.digest, "samples": 7, "candidates": 32},
    }
    assert facts.items() <= found.items()
    test, _ = small_beams(9)
    found = results({"sft": SFT}, test=test, judged_by="recorded")
    assert (found["test_digest"], found["test_candidates"]) == (test.digest, len(test.candidates))


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
    every = {"sft": SFT, "rce": RCE, "similarity": NEAR, "grpo_live": LIVE}
    difference, ci95 = differences(results(every | {"shuffled_live": RCE[:1]}))[policy, against]
    assert difference == pytest.approx(gain.mean())
    assert ci95 == pytest.approx(mean_interval(gain))


def test_the_furthest_trained_is_compared_with_every_simple_way():
    simple = ("random", "image_similarity", "vote", "careful_rule")
    correct = dict.fromkeys(simple, NEAR)
    assert not results(correct)["differences"]
    for form in ("sft", "rce", "grpo_recorded", "grpo_rounds", "grpo_live"):
        correct = {form: RCE} | correct
        assert {(form, other) for other in simple} <= differences(results(correct)).keys()


def test_controls_stand_apart():
    names = ["shuffled_recorded", "shuffled_live", "hidden_sft", "hidden_rce", "hidden_live"]
    found = results(dict.fromkeys(["sft", "rce", *names], RCE))
    assert [row["policy"] for row in found["rows"]] == ["sft", "rce"]
    assert [row["policy"] for row in found["controls"]] == names
    pairs = {*itertools.product(names[:2], ("sft", "rce"))}
    pairs |= {*itertools.product(names[3:], names[2:3])}
    assert pairs <= differences(found).keys()


def test_a_query_unknown_to_one_policy_is_left_out_for_all():
    def known(*queries):
        right = torch.full((1, 4), torch.nan)
        right[0, queries] = 1.0
        return right

    rce = RCE.clone()
    rce[1, 0] = torch.nan
    # nothing is known of the oracle at 3; an upper bound that is known for few does not narrow what
    # a model has answered
    oracle = {2: known(0, 1, 3), 3: known(), 4: known(0)}
    rows = by_shots(results({"rce": {2: rce, 3: RCE, 4: RCE}, "oracle": oracle}))
    queries = {("rce", 2): 2, ("rce", 3): 4, ("rce", 4): 4, ("oracle", 2): 2}
    assert {key: row["queries"] for key, row in rows.items()} == queries
    assert rows["rce", 2]["accuracy"] == pytest.approx(RCE[:, [1, 3]].mean())
    # where no query is known to all there is no row
    found = results({"random": {1: known(0, 1), 2: NEAR}, "vote": {1: known(2, 3), 2: NEAR}})
    assert {row["shots"] for row in found["rows"]} == {2}
    assert found["shots"] == [2]


def test_sentences_are_about_the_trained_shots_or_the_nearest():
    for shots, nearest in {(1, 2, 3): 2, (3, 4): 3}.items():
        assert shown_at({"shots": shots, "trained_shots": 2}) == nearest
