"""decisions.parquet holds every decision, and results.json is its summary."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from commands import TABLE, write_table
from helpers import small_beams

from knobwise.__main__ import main
from knobwise.agents.judging.baselines import static_of
from knobwise.agents.judging.policy import choices_of, requests_of
from knobwise.agents.selector.evaluation import Decided
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
from knobwise.experiments.settings.beams import SelectorData

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
    """The current one, with a table and beams."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        write_table(90, holes=0.3)
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


def test_rows_are_read_back_in_the_order_written(tmp_path):
    accuracy = np.array([[0.1, 0.2], [0.3, np.nan]])
    rows = frame([2.0, 1.0], accuracy=accuracy, feasible=None, decision_us=1.5)
    write_decisions(tmp_path, rows.select(sorted(SCHEMA)).drop("vote"))
    found = read_decisions(tmp_path)
    assert found.equals(rows)
    assert dict(found.schema) == SCHEMA
    assert found.select("seed", "sample_id", "place").rows()[:3] == [
        (1, "b", 2.0),
        (1, "b", 1.0),
        (1, "a", 2.0),
    ]
    assert found["accuracy"].to_list() == pytest.approx([0.1, 0.2, 0.3, None] * 2)
    assert found["feasible"].is_null().all()
    assert set(found["decision_us"]) == {1.5}


def test_what_is_no_file_of_decisions_is_an_error_for_a_person(tmp_path):
    with pytest.raises(InputError, match=FILE):
        read_decisions(tmp_path)
    (tmp_path / FILE).write_bytes(b"PAR1 but not really")
    with pytest.raises(InputError, match=FILE):
        read_decisions(tmp_path)
    # files of earlier versions know no clusters
    frame([1.0]).drop("cluster").write_parquet(tmp_path / FILE)
    assert read_decisions(tmp_path)["cluster"].is_null().all()
    frame([1.0]).drop("seed").write_parquet(tmp_path / FILE)
    with pytest.raises(InputError, match="seed"):
        read_decisions(tmp_path)


def test_arrays_are_seeds_by_samples_by_places():
    first = frame([2.0, 1.0], accuracy=np.array([[0.0, 1.0], [2.0, np.nan]]))
    wanted = [[[0, 1], [2, np.nan]]] * 2
    np.testing.assert_equal(array_of(first, "controller", "accuracy"), wanted)
    keys = ("split", "dataset", "sample_id", "cluster")
    assert splits_of(first.select(keys).unique()) is None
    # of two splits the samples of the second follow those of the first, seed by seed
    second = frame([2.0, 1.0], accuracy=np.array([[4.0, 5.0], [6.0, 7.0]]))
    both = pl.concat([first.with_columns(split=0), second.with_columns(split=1)])
    wanted = [[[0, 1], [2, np.nan], [4, 5], [6, 7]]] * 2
    np.testing.assert_equal(array_of(both, "controller", "accuracy"), wanted)
    samples = both.select(keys).unique(maintain_order=True)
    assert splits_of(samples).tolist() == [[0, 0, 1, 1], [0, 1, 0, 1]]
    # samples of a cluster have one number, also where there is a single split
    alike = first.select(keys).unique(maintain_order=True).with_columns(cluster=pl.lit("a"))
    assert splits_of(alike).tolist() == [[0, 0], [0, 0]]


def test_results_are_means_of_the_decisions(folder):
    results, found = run(*LEAN, *TABLE)
    policies = {row["policy"] for row in results["rows"]}
    seeds = {name: {3, 1} if name in ("controller", "teacher") else {None} for name in policies}
    assert {p: set(found.filter(policy=p)["seed"]) for p in policies} == seeds
    assert len(found) == (len(policies) + 2) * results["test_samples"] * 5
    assert found.select("policy", "seed", "sample_id", "place").is_unique().all()
    for row in results["rows"]:
        if row["budget_ms"] is not None:
            part = found.filter(policy=row["policy"], place=row["budget_ms"])
            assert row["utility"] == pytest.approx(part["score"].mean(), rel=1e-5)
    # row by row: what the profile says of the configuration
    table, fitted, test = profile()
    labels = {table.label(c): c for c in range(table.num_configurations)}
    rows = [table.sample_ids.index(sample) for sample in found["sample_id"]]
    cells = rows, [labels[choice] for choice in found["choice"]]
    assert table.accuracy[cells].tolist() == found["accuracy"].to_list()
    assert table.latency_ms[cells].tolist() == found["latency_ms"].to_list()
    on_time = (found["latency_ms"] <= found["place"]).cast(pl.Float32)
    assert (found["in_time"] == on_time).all()
    assert (found["score"] == found["accuracy"] * on_time).all()

    # without baselines and the other seed, what is left decides the same
    few, kept = run(*LEAN, *TABLE, "baselines=false", "seeds=[3]")
    left = {"controller", "teacher", "budget_aware_static", "oracle"}
    assert {row["policy"] for row in few["rows"]} == left
    same = found.filter(pl.col("policy").is_in(left), pl.col("seed").fill_null(3) == 3)
    assert kept.drop("decision_us").equals(same.drop("decision_us"))
    features, mask = requests_of(table, test)
    choices = choices_of(static_of(table, fitted), features, np.array(few["budgets_ms"]), mask)
    decided = kept.filter(policy="budget_aware_static")["choice"].to_list()
    assert decided == [table.label(c) for c in choices.flatten().tolist()]


def test_recorded_sequences_that_a_selector_prefers(folder):
    results, found = run(*SELECT)
    table, _ = small_beams(60)
    seeded = {"sft", "rce", "grpo_recorded", "random"}
    for row in results["rows"]:
        seeds = {0, 4} if row["policy"] in seeded else {None}
        assert set(found.filter(policy=row["policy"])["seed"]) == seeds
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
    columns = ["policy", "seed", "sample_id", "choice", "score", "vote", "decision_us"]
    assert found.select(columns).rows() == [
        ("own", 0, "2", "7 3", 1.0, 1.0, 12.5),
        ("own", 0, "0", None, None, 0.0, 12.5),
        ("own", 4, "2", "5", 0.0, 0.0, 12.5),
        ("own", 4, "0", "6 1", 1.0, 0.0, 12.5),
        ("vote", None, "2", None, 0.0, None, None),
        ("vote", None, "0", None, 1.0, None, None),
    ]
    assert set(found["place"]) == {1}


# -- results.json of a selector: means, paired differences, and what happens where something is unknown

RCE = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 0], [0, 0, 1, 1]]).float()
SFT = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0]]).float()
NEAR = torch.tensor([[0, 0, 1, 0]]).float()
LIVE = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).float()  # of the first two seeds only
BEAMS, _ = small_beams(7)


def results(correct, test=BEAMS, judged_by="scorer", hidden=()):
    decided = {}
    for name, by_shots in correct.items():
        decided[name] = {}
        for shots, right in by_shots.items():
            time_us = 12.5 if (name, shots) == ("rce", 2) else None
            decided[name][shots] = Decided(right, None, decision_us=time_us)
    seeds = (4, 5, 6)
    decisions = selector_decisions(decided, BEAMS, torch.arange(right.shape[1]), seeds)
    data = SelectorData(BEAMS, None, None, test, None, None, None, judged_by)
    return selector_results(decisions, data, seeds, 2, hidden)


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
    assert "accuracy_per_seed" not in rows["similarity", 2]
    facts = {"system": "selector", "split": "test", "test_queries": 4, "seeds": [4, 5, 6]}
    facts |= {"shots": [1, 2], "trained_shots": 2, "hidden": ["annotator"]}
    sizes = {"samples": 7, "candidates": len(BEAMS.candidates)}
    facts["profile"] = {"name": BEAMS.name, "digest": BEAMS.digest} | sizes
    assert facts.items() <= found.items()
    test, _ = small_beams(9)
    found = results(at_two(sft=SFT), test=test, judged_by="recorded")
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
    every = at_two(sft=SFT, rce=RCE, similarity=NEAR, grpo_live=LIVE, shuffled_live=RCE[:1])
    difference, ci95 = differences(results(every))[policy, against]
    assert difference == pytest.approx(gain.mean())
    assert ci95 == pytest.approx(mean_interval(gain))


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


def test_a_query_unknown_to_one_policy_is_left_out_for_all():
    nothing = torch.full((1, 4), torch.nan)
    oracle = nothing.clone()
    rce = RCE.clone()
    oracle[0, [0, 1, 3]] = 1.0
    rce[1, 0] = torch.nan
    rows = by_shots(results({"rce": {2: rce, 3: RCE}, "oracle": {2: oracle, 3: nothing}}))
    # nothing is known of the oracle at 3
    queries = {("rce", 2): 2, ("oracle", 2): 2, ("rce", 3): 4}
    assert {key: row["queries"] for key, row in rows.items()} == queries
    assert rows["rce", 2]["accuracy"] == pytest.approx(RCE[:, [1, 3]].mean())
    # an upper bound that is known for few does not narrow what a model has answered
    few = torch.tensor([[1.0, torch.nan, torch.nan, torch.nan]])
    rows = by_shots(results(at_two(rce=RCE, oracle=few)))
    assert {key: row["queries"] for key, row in rows.items()} == {("rce", 2): 4}
    # where no query is known to all there is no row
    half = torch.tensor([[1.0, 1.0, torch.nan, torch.nan]])
    found = results({"random": {1: half, 2: NEAR}, "vote": {1: half.flip(1), 2: NEAR}})
    assert {row["shots"] for row in found["rows"]} == {2}
    assert found["shots"] == [2]


def test_sentences_are_about_the_trained_shots_or_the_nearest():
    for shots, nearest in {(1, 2, 3): 2, (3, 4): 3}.items():
        assert shown_at({"shots": shots, "trained_shots": 2}) == nearest
