"""results.json of a selector: means, paired differences, and what happens where something is unknown."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from helpers import small_beams
from torch import Tensor

from knobwise.agents.selector.evaluation import Decided
from knobwise.experiments.results.problem import shown_at
from knobwise.experiments.results.selectors import selector_decisions, selector_results
from knobwise.experiments.results.statistics import mean_interval

RCE = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 0], [0, 0, 1, 1]]).float()
SFT = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0]]).float()
NEAR = torch.tensor([[0, 0, 1, 0]]).float()
LIVE = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).float()  # of the first two seeds only


TIMES = {("rce", 2): 12.5}


TABLE, _ = small_beams(7)


def results(correct: dict[str, dict[int, Tensor]], **more: Any) -> dict[str, Any]:
    decided = {
        name: {n: Decided(right, None, decision_us=TIMES.get((name, n))) for n, right in by_shots.items()}
        for name, by_shots in correct.items()
    }
    queries = next(right.shape[1] for by_shots in correct.values() for right in by_shots.values())
    decisions = selector_decisions(decided, small_beams(queries)[0], torch.arange(queries), (4, 5, 6))
    return selector_results(decisions, TABLE, **{"seeds": (4, 5, 6), "trained_shots": 2} | more)


def difference(found: dict[str, Any], policy: str, against: str, shots: int = 2) -> tuple[float, list[float]]:
    rows = [r for r in found["differences"] if (r["policy"], r["against"], r["shots"]) == (policy, against, shots)]
    (row,) = rows
    return row["difference"], row["ci95"]


def test_rows_hold_means_over_queries_and_seeds() -> None:
    found = results({"rce": {2: RCE, 1: SFT}, "similarity": {2: NEAR, 1: NEAR}}, hidden=["annotator"])
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
    sizes = {"samples": 7, "candidates": len(TABLE.candidates)}
    assert found["profile"] == {"name": TABLE.name, "digest": TABLE.digest} | sizes
    head = {key: found[key] for key in ("system", "split", "test_queries", "seeds", "shots", "trained_shots", "hidden")}
    assert head == {
        **{"system": "selector", "split": "test", "test_queries": 4, "seeds": [4, 5, 6], "shots": [1, 2]},
        **{"trained_shots": 2, "hidden": ["annotator"]},
    }
    assert "test_digest" not in found


def test_differences_are_paired_over_queries_and_seeds() -> None:
    found = results({"sft": {2: SFT}, "rce": {2: RCE}, "similarity": {2: NEAR}, "grpo_live": {2: LIVE}})
    assert difference(found, "rce", "sft") == (pytest.approx(3 / 12), pytest.approx(mean_interval(RCE - SFT)))
    # what no seed changes goes with all; fewer seeds go with the same seeds of the other
    assert difference(found, "sft", "similarity")[0] == pytest.approx((SFT - NEAR).mean())
    assert difference(found, "grpo_live", "rce") == (
        pytest.approx((LIVE - RCE[:2]).mean()),
        pytest.approx(mean_interval(LIVE - RCE[:2])),
    )
    assert difference(found, "grpo_live", "similarity")[0] == pytest.approx((LIVE - NEAR).mean())
    one = results({"sft": {2: SFT}, "shuffled_live": {2: RCE[:1]}})
    assert difference(one, "shuffled_live", "sft")[0] == pytest.approx((RCE[:1] - SFT[:1]).mean())


def test_pairing_shows_what_two_intervals_would_not() -> None:
    hard = torch.linspace(0, 1, 400)
    found = results({"sft": {2: (hard < 0.5).float()[None]}, "rce": {2: (hard < 0.53).float()[None]}})
    (sft, rce), (low, _) = (row["accuracy_ci95"] for row in found["rows"]), difference(found, "rce", "sft")[1]
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
    assert {(f"shuffled_{kind}", other) for kind in ("recorded", "live") for other in ("sft", "rce")} <= pairs
    assert {("hidden_rce", "hidden_sft"), ("hidden_live", "hidden_sft")} <= pairs
    assert difference(found, "hidden_live", "hidden_sft") == (0.0, [0.0, 0.0])


def test_a_query_unknown_to_one_policy_is_left_out_for_all() -> None:
    oracle = torch.tensor([[1, 1, torch.nan, 1]])
    rce = RCE.clone()
    rce[1, 0] = torch.nan
    found = results({"rce": {2: rce, 3: RCE}, "oracle": {2: oracle, 3: torch.full((1, 4), torch.nan)}})
    rows = {(row["policy"], row["shots"]): row for row in found["rows"]}
    assert set(rows) == {("rce", 2), ("oracle", 2), ("rce", 3)}  # nothing is known of the oracle at 3
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
    assert [shown_at({"shots": s, "trained_shots": 2}) for s in ([1, 2, 3], [3, 4], [4])] == [2, 3, 4]
