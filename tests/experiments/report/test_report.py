"""The report says what results.json says: in words, in tables, in charts, and without a network."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_parts import (
    charts_of,
    data_of,
    points_of,
    printed,
    report_of,
    rows_of,
    run_folder,
    specifications,
    svg_of,
)

from knobwise.common.errors import InputError
from knobwise.experiments.report import charts, page
from knobwise.experiments.report.report import on_decisions, print_results, verdict, write_report
from knobwise.experiments.report.result_charts import result_charts
from knobwise.experiments.report.tables import policies
from knobwise.experiments.report.words import calibration_error, policy_name, quantity, read_results
from knobwise.experiments.results.statistics import pareto_front

BUDGETS = (120.0, 480.0)
SHOWN = ("controller", "budget_aware_static", "random_forest", "oracle")
"""In charts; weaker baselines than the forest are in the tables only."""
POLICIES = {
    "controller": 0.6,
    "budget_aware_static": 0.5,
    "random_forest": 0.58,
    "ridge": 0.55,
    "oracle": 0.8,
}


def row(policy: str, budget: float | None, utility: float) -> dict[str, Any]:
    gap = (utility - 0.5) / 0.3
    row = {"policy": policy, "budget_ms": budget, "accuracy": utility + 0.05, "reward": utility}
    row |= {
        "latency_ms_mean": 0.8 * (budget or 300.0),
        "latency_ms_p95": 400.0,
        "decision_us_p50": 12.5,
    }
    row |= {
        "satisfaction": 0.9,
        "satisfaction_feasible": 0.96,
        "infeasible": 0.0 if budget == BUDGETS[1] else 0.04,
    }
    row |= {"utility": utility, "utility_ci95": [utility - 0.015, utility + 0.015]}
    row |= {"over_static": 0.3 * gap, "over_static_ci95": [0.3 * gap - 0.01, 0.3 * gap + 0.01]}
    return row | {"gap_closed": gap, "gap_closed_ci95": [gap - 0.1, gap + 0.1]}


def results(**utilities: float) -> dict[str, Any]:
    """Mean utilities by policy; at the tight budget .1 less, at the loose one .1 more."""
    means = POLICIES | utilities
    rows = [row(p, None, u) for p, u in means.items()]
    rows += [
        row(p, b, u + d)
        for p, u in means.items()
        for b, d in zip(BUDGETS, (-0.1, 0.1), strict=True)
    ]
    settings_ = [{"crops": 2, "mode": "fast"}, {"crops": 10, "mode": "<slow>"}]
    content = {
        "split": "test",
        "seeds": [0, 1],
        "budgets_ms": list(BUDGETS),
        "rows": rows,
        "a key of tomorrow": 1,
    }
    return content | {
        "profile": {"name": "small", "digest": "sha256:0f", "samples": 60, "configurations": 2},
        "configurations": [
            {
                "label": f"crops={k['crops']}",
                "knobs": k,
                "accuracy": a,
                "utility": u,
                "latency_ms": t,
            }
            for k, a, u, t in zip(
                settings_, (0.412, 0.733), (0.35, 0.45), (100.0, 400.0), strict=True
            )
        ],
        "knob_usage": [
            {"policy": p, "budget_ms": b, "knob": name, "value": k[name], "share": share}
            for p in ("controller", "budget_aware_static", "oracle")
            for b in BUDGETS
            for k, share in zip(settings_, (0.25, 0.75), strict=True)
            for name in k
        ],
    }


def guard_row(budget: float, **more: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "budget_ms": budget,
        "level": 0.95,
        "margin": 0.9,
        "gain": 0.1,
        "gain_se": 0.01,
    }
    content |= {
        "unattainable": False,
        "unshown": False,
        "too_dear": False,
        "better": True,
        "deployed": True,
    }
    content |= {
        "satisfaction_before": 0.91,
        "satisfaction_after": 0.955,
        "satisfaction_deployed": 0.955,
    }
    content |= {
        "satisfaction_static": 0.981,
        "reason": "deployed: better than <static> by +0.100 ± 0.010",
    }
    return content | more


FELL_BACK = {
    "deployed": False,
    "better": False,
    "reason": "fell back to static: +0.000 is not above 0",
}
UNATTAINABLE: dict[str, Any] = {"unattainable": True, "margin": 1.0, "satisfaction_deployed": 0.713}
UNATTAINABLE |= {"reason": "deployed: better by far; 95% is unattainable at this budget"}
UNSHOWN = {"unshown": True, "satisfaction_deployed": 23 / 24}
TOO_DEAR = {
    "too_dear": True,
    "margin": 1.0,
    "satisfaction_deployed": 0.9,
    "reason": "deployed; too dear",
}


def with_guard(*seeds: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    """Results of so many seeds, each with what the guard content at the tight and at the loose
    budget."""
    chosen = [
        {
            "weights": {"network": 0.25 + seed / 4, "kernel_ridge": 0.75 - seed / 4},
            "settings": {"kernel_ridge": f"accuracy constant, latency ({seed}.0, 0.3)"},
            "iteration": 40 + seed,
        }
        for seed in range(len(seeds))
    ]
    guard = [
        [guard_row(b, **more) for b, more in zip(BUDGETS, both, strict=True)] for both in seeds
    ]
    return results() | {
        "seeds": list(range(len(seeds))),
        "satisfaction_level": 0.95,
        "guard": guard,
        "chosen": chosen,
    }


@pytest.mark.parametrize(
    ("seeds", "warm_up", "words"),
    [
        (2, 39, None),
        (
            2,
            40,
            "In 1 of 2 seeds GRPO does not improve this policy: the best checkpoint is the one "
            "before GRPO.",
        ),
        (
            2,
            41,
            "GRPO does not improve this policy: in both seeds the best checkpoint is the one "
            "before GRPO.",
        ),
        (
            5,
            44,
            "GRPO does not improve this policy: in all five seeds the best checkpoint is the one "
            "before GRPO.",
        ),
        (1, 40, "GRPO does not improve this policy: the best checkpoint is the one before GRPO."),
    ],
)
def test_the_verdict_says_if_grpo_does_not_improve_the_policy(
    seeds: int, warm_up: int, words: str | None
) -> None:
    content = with_guard(*[({}, {})] * seeds)  # of iterations 40, 41, …
    training = {"warmup_iterations": warm_up, "iterations": 100}
    assert [line for line in verdict(content | {"training": training}) if "GRPO" in line] == (
        [words] if words else []
    )
    assert not any(
        "GRPO" in line for line in verdict(content | {"training": training | {"iterations": 0}})
    )


METRICS = "seed,step,Train/Loss,Train/KL,Val/Loss\n" + "".join(
    f"{seed},{step},{step / 100 + seed},0.01,{'' if step % 50 else step / 100}\n"
    for seed in (0, 1)
    for step in range(1000)
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_folder(
        tmp_path / "controller" / "first", results(), METRICS, "policy:\n  head: <b>utility</b>\n"
    )


def test_training_curves_say_where_grpo_begins(run: Path) -> None:
    assert "where the warm-up ends" not in write_report(run).read_text()
    training = {"warmup_iterations": 600, "iterations": 400}
    text = report_of(run, results() | {"training": training})
    assert "Dashed: where the warm-up ends." in text
    drawn = [spec for spec in charts_of(text) if "training step" in json.dumps(spec)]
    assert [(svg_of(spec).count('stroke-dasharray="5,4"'), spec["title"]) for spec in drawn] == [
        (1, "KL"),
        (1, "loss"),
    ]
    assert "where the warm-up ends" not in report_of(
        run, results() | {"training": training | {"iterations": 0}}
    )


def test_grpo_has_a_curve_of_its_own(run: Path) -> None:
    values = {0: (0.5, 0.55, 0.54, 0.58), 1: (0.5, 0.56, 0.55, 0.50)}
    rows = [
        f"{seed},{10 * i},{value}"
        for seed, curve in values.items()
        for i, value in enumerate(curve)
    ]
    (run / "metrics.csv").write_text("\n".join(["seed,step,Val/Utility", *rows]))
    chosen = [
        {"weights": {"network": 1.0}, "settings": {}, "iteration": 10}
        | {"grpo": {"start": max(curve[:2]), "best": max(curve), "last": curve[-1]}}
        for curve in values.values()
    ]
    training = {"warmup_iterations": 10, "iterations": 20}
    text = report_of(run, results() | {"training": training, "chosen": chosen})
    whole, gained, _ = (spec for spec in charts_of(text) if "training step" in json.dumps(spec))
    parts = {(row["seed"], row["step"]): row["part"] for row in points_of(whole) if "part" in row}
    assert {step for (_, step), part in parts.items() if part == "GRPO"} == {20, 30}
    assert {step for (_, step), part in parts.items() if part == "before GRPO"} == {0, 10}
    points = {
        (row["seed"], row["step"]): row["value"] for row in points_of(gained) if "value" in row
    }
    assert points == pytest.approx(
        {("0", 10): 0, ("0", 20): -1, ("0", 30): 3, ("1", 10): 0, ("1", 20): -1, ("1", 30): -6}
    )


GAIN = {
    "test": 0.0123,
    "test_ci95": [-0.004, 0.03],
    "held_out": 0.02,
    "held_out_ci95": [0.0101, 0.03],
}
"""What GRPO added."""


def test_what_grpo_added_to_the_deployed_policy_is_said_everywhere(run: Path) -> None:
    content = with_guard(({}, {}), ({}, {})) | {
        "training": {"warmup_iterations": 30, "iterations": 100}
    }
    words = (
        "GRPO changes the utility of the deployed controller by +1.23 points (95% interval -0.40 "
        "to 3.00) on test "
        "samples, and by +2.00 points (95% interval 1.01 to 3.00) on held-out samples of the "
        "training."
    )
    assert words in verdict(content | {"grpo_gain": GAIN})
    assert words in printed(print_results, content | {"grpo_gain": GAIN})
    text = report_of(run, content | {"grpo_gain": GAIN})
    assert text.split("<h2>Training</h2>")[1].count(words) == 1
    assert (
        "<b>+1.23 points</b>of utility added by GRPO<small>95% interval -0.40 to 3.00</small>"
        in text
    )
    ppo = {"warmup_iterations": 30, "iterations": 100, "method": "PPO"}
    alone = {key: value for key, value in GAIN.items() if key.startswith("held_out")}
    line = verdict(content | {"grpo_gain": alone, "training": ppo})[-1]
    assert line.startswith("PPO changes the utility of the deployed controller by +2.00 points")
    assert "test samples" not in line
    assert not any("GRPO" in line for line in verdict(content))
    # where all weights that are kept are from before GRPO there is nothing to add
    before = content | {"grpo_gain": GAIN, "training": {"warmup_iterations": 41, "iterations": 100}}
    assert [line.split(":")[0] for line in verdict(before) if "GRPO" in line] == [
        "GRPO does not improve this policy"
    ]


@pytest.mark.parametrize(
    ("teacher", "free", "words"),
    [
        (0.62, 0.6, "The controller is 2.0 points below; a decision takes 12.5 µs."),
        (
            0.57,
            0.61,
            "3.0 points above, and would be 4.0 points above if its own decisions were free; a "
            "decision",
        ),
        (
            0.6,
            0.63,
            "The controller is as good, and would be 3.0 points above if its own decisions were "
            "free;",
        ),
    ],
)
def test_the_verdict_compares_the_controller_with_its_teacher(
    teacher: float, free: float, words: str
) -> None:
    content = results(teacher=teacher)
    content["rows"][0]["utility_free"] = free
    (line,) = [line for line in verdict(content) if "teacher" in line]
    assert line.startswith(
        "The controller learned from a teacher that predicts every outcome. The teacher is too slow"
    )
    assert (
        f"is not charged for its decisions: mean utility {teacher:.3f}. The controller is" in line
    )
    assert words in line
    assert not any("teacher" in line for line in verdict(results()))


def test_only_the_controller_has_a_decision_time_and_a_utility_if_free() -> None:
    content = results()
    for each in content["rows"]:
        each["utility_free"] = each["utility"] + 0.01 if each["policy"] == "controller" else None
        each["decision_us_p50"] = 12.5 if each["policy"] == "controller" else None
    table = policies(content)
    shown = {line[0]: (line[table.header.index("if free")], line[-1]) for line in table.rows}
    assert table.header[-1] == "decision time"
    assert shown.pop("learned controller") == ("0.610", "12.5 µs")
    assert set(shown.values()) == {("–", "–")}


def test_the_report_says_first_what_was_gained_when_and_how_fast(run: Path) -> None:
    ran = {"started": "2026-11-22 14:50", "seconds": 193.2, "commit": "0123456789abcdef-dirty"}
    text = report_of(run, results() | {"run": ran})
    head = text.split("<h1>")[1].split("<h2>")[0]
    assert "2026-11-22 14:50 UTC · took 3 min · commit 012345678-dirty" in head
    assert (
        "<b>+10.0 points</b>of utility against budget-aware static<small>95% interval 9.0 to "
        "11.0</small>" in head
    )
    assert (
        "<b>96.0%</b>on time, where that is possible<small>budget-aware static: 96.0%</small>"
        in head
    )
    assert "<b>12.5 µs</b>for a decision<small>0.0% of the mean latency</small>" in head
    assert re.findall("<p class=lead>(.*?):", head) == [
        "The learned controller is better than budget-aware static"
    ]
    order = (
        "Utility against budget",
        "Late answers counted",
        "On time",
        "Which settings are used",
        "Training",
    )
    headings = re.findall("<h2>(.*?)</h2>", text.replace(page._vega(), ""))
    assert [name for name in headings if name in order] == list(order)
    assert headings[-2:] == ["Tables", "How to reproduce"]


def test_the_report_needs_no_network(run: Path) -> None:
    path = write_report(run)
    text = path.read_text()
    assert read_results(run) == results()
    assert path == run / "report.html"
    assert path.stat().st_size < 2_000_000
    assert "default-src 'none'" in text  # the browser itself refuses to load anything
    assert not re.search(r"<(link|img|iframe|script[^>]* src)", text.replace(page._vega(), ""))
    assert "<b>utility</b>" not in text
    assert "&lt;b&gt;utility" in text
    assert "<slow>" not in re.sub(r"<script type.*?</script>", "", text, flags=re.S)
    assert [p.name for p in run.iterdir() if p.name.startswith(".")] == []


def test_the_report_holds_every_number_of_every_policy(run: Path) -> None:
    text = write_report(run).read_text()
    means, per_budget = rows_of(text)
    order = sorted(POLICIES, key=lambda p: -POLICIES[p])
    infeasible = per_budget.pop()
    assert "infeasible" in infeasible
    assert re.findall(r"<td>([\d.]+%)", infeasible) == ["4.0%", "0.0%"]
    for policy, line, small in zip(order, means, per_budget, strict=True):
        utility = POLICIES[policy]
        assert policy_name(policy) in line
        for cell in (
            f"{utility:.3f}",
            f"[{utility - 0.015:.3f}",
            f"{(utility - 0.5) / 0.3:.0%}",
            "240 ms",
            "12.5 µs",
        ):
            assert cell in line
        for budget, difference in zip(BUDGETS, (-0.1, 0.1), strict=True):
            assert f"<td>{utility + difference:.3f}" in small
            assert quantity(0.8 * budget) in small


def test_every_chart_can_be_drawn_and_holds_the_numbers(run: Path) -> None:
    utility, gain, plane, satisfaction, crops, mode, *training = specs = charts_of(
        write_report(run).read_text()
    )
    assert len(training) == 2
    svg_of(*specs)
    dots = next(rows for rows in data_of(plane) if "label" in rows[0])
    assert [(d["utility"], d["latency_ms"]) for d in dots] == [(0.35, 100.0), (0.45, 400.0)]
    means = next(rows for rows in data_of(plane) if "policy" in rows[0])
    assert {row["name"]: row["utility"] for row in means} == {
        policy_name(p): POLICIES[p] for p in SHOWN
    }
    gains = next(rows for rows in data_of(gain) if "gain" in rows[0])
    loose = {row["name"]: row["gain"] for row in gains if row["budget_ms"] == BUDGETS[1]}
    assert loose == pytest.approx({"learned controller": 20, "random forest": 18})
    lines = max(data_of(utility), key=len)
    content = {(r["name"], r["budget_ms"]): (r["utility"], r["low"], r["high"]) for r in lines}
    per_budget = [
        row for row in results()["rows"] if row["budget_ms"] is not None and row["policy"] in SHOWN
    ]
    assert content == {
        (policy_name(r["policy"]), r["budget_ms"]): (r["utility"], *r["utility_ci95"])
        for r in per_budget
    }
    assert any(rows == [{"level": 0.95}] for rows in data_of(satisfaction))
    shares = [row for spec in (crops, mode) for row in data_of(spec)[0]]
    assert len(shares) == len(results()["knob_usage"]) / 3  # those of the controller
    assert {(r["value"], r["share"]) for r in shares} == {
        ("2", 0.25),
        ("10", 0.75),
        ("fast", 0.25),
        ("<slow>", 0.75),
    }
    outlines = [row for spec in (crops, mode) for row in data_of(spec)[1]]
    assert {(r["policy"], r["value"]) for r in outlines} == {
        ("budget-aware static", v) for v in ("10", "<slow>")
    }


def test_training_curves_are_thinned_but_keep_their_means(run: Path) -> None:
    rest, training = charts_of(write_report(run).read_text())[-2:]
    (points,) = data_of(training)
    train = [p for p in points if p["part"] == "train" and p["seed"] == "1"]
    assert len(train) == 120
    assert np.mean([p["value"] for p in train]) == pytest.approx(1 + 9.99 / 2, abs=0.01)
    validation = [p for p in points if p["part"] == "validation" and p["seed"] == "0"]
    assert [(p["step"], p["value"]) for p in validation] == [
        (s, s / 100) for s in range(0, 1000, 50)
    ]
    assert {p["panel"] for p in data_of(rest)[0]} == {"KL"}


def test_report_is_written_from_the_bare_results(tmp_path: Path) -> None:
    rows = [
        {"policy": "controller", "budget_ms": None, "utility": 0.5},
        {"policy": "mine", "budget_ms": None},
    ]
    text = report_of(tmp_path, {"rows": rows})
    assert "no static policy was judged" in text
    assert charts_of(text) == []


@pytest.mark.parametrize("content", [None, "{", "[]", '{"rows": []}'])
def test_a_folder_without_results_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(InputError, match=r"results\.json"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("controller", "words"),
    [
        (
            0.6,
            "is better than budget-aware static: mean utility 0.600 against 0.500, 33% of the "
            "oracle gap closed",
        ),
        (0.52, "The learned controller is not shown to differ from budget-aware static"),
        (0.4, "is worse than budget-aware static"),
    ],
)
def test_verdict_against_static_follows_the_interval(controller: float, words: str) -> None:
    assert words in verdict(results(controller=controller))[0]


def test_verdict_names_every_baseline_that_is_better() -> None:
    assert verdict(results())[1] == (
        "None of the 2 other baselines does better; "
        "the strongest is random forest (0.580), 0.020 lower, intervals overlap."
    )
    bad = verdict(results(controller=0.5, random_forest=0.6, ridge=0.505))[1]
    assert bad.startswith(
        "2 of 2 other baselines do better than the controller: random forest (0.600), 0.100 "
        "higher, intervals do not "
        "overlap; "
    )
    assert "ridge regression (0.505), 0.005 higher, intervals overlap" in bad


def test_verdict_on_the_budget_and_without_numbers() -> None:
    content = results()
    assert verdict(content)[2] == (
        "The controller is on time for 96.0% of the feasible requests (4.0% of all requests are "
        "infeasible)."
    )
    assert "which meets the 95% asked for" in verdict(content | {"satisfaction_level": 0.95})[2]
    assert "falls short of the 99% asked for" in verdict(content | {"satisfaction_level": 0.99})[2]
    content["rows"][0]["satisfaction_feasible"] = 0.9496  # as it is printed
    assert (
        "for 95.0% of the feasible requests, which meets the 95%"
        in verdict(content | {"satisfaction_level": 0.95})[2]
    )
    content["rows"][0] |= {"gap_closed": math.nan, "satisfaction_feasible": None}
    assert verdict(content)[0].endswith("no interval is known.")
    assert len(verdict(content)) == 2
    first, *_ = verdict({"rows": content["rows"][1:]})
    assert first.startswith("No learned policy was judged. The best is random forest")


def test_verdict_says_where_the_guard_fell_back_and_why() -> None:
    assert len(verdict(with_guard(({}, {})))) == 3
    assert verdict(with_guard((FELL_BACK, {}), (FELL_BACK, {}), ({}, {})))[3:] == [
        "The guard fell back to budget-aware static at 120 ms (2 of 3 seeds): on held-out "
        "samples the policy is not "
        "shown to be better."
    ]
    assert (
        "static at every budget: "
        in verdict(with_guard((FELL_BACK, FELL_BACK), (FELL_BACK, FELL_BACK)))[3]
    )
    safer = verdict(with_guard(({}, FELL_BACK | {"better": True})))[3:]
    assert safer == [
        "The guard fell back to budget-aware static at 480 ms: only static is on time often enough."
    ]


def test_verdict_says_what_is_not_enforced() -> None:
    guard = with_guard(
        (UNATTAINABLE, TOO_DEAR), (UNATTAINABLE | {"satisfaction_deployed": 0.733}, {})
    )
    assert verdict(guard)[3:] == [
        "At 120 ms (72.3% on time), 95% on time is unattainable, so it is not enforced.",
        "At 480 ms (90.0% on time, 1 of 2 seeds), a guarantee of 95% on time would cost too much "
        "utility, so there is "
        "none.",
    ]
    guard = with_guard((UNSHOWN, {}), (UNSHOWN, {}))
    assert verdict(guard)[3:] == [
        "At 120 ms (95.8% on time), held-out requests are too few to guarantee 95% on time."
    ]


def test_report_shows_the_guarantees_and_what_was_chosen(run: Path) -> None:
    assert not re.findall(">(?:Guarantees|What was chosen on)", write_report(run).read_text())
    content = with_guard(
        (UNATTAINABLE, FELL_BACK), (UNATTAINABLE, {"margin": 0.7, "satisfaction_deployed": 0.965})
    )
    text = report_of(run, content)
    guarantees = text.split("<h2>Guarantees</h2>")[1].split("<h2>")[0]
    assert "Where 95% of the feasible requests can be answered on time" in guarantees
    _, tight, loose = re.findall(r"<tr.*?</tr>", guarantees, re.S)
    for cell in (
        "120 ms",
        "the controller<",
        "+10.0 ± 1.0 points",
        "100%",
        "71.3%",
        "not possible here",
    ):
        assert cell in tight
    for cell in ("480 ms", "the controller in 1 of 2 seeds, else static", "70%", "96.0%", "kept"):
        assert cell in loose
    chosen = text.split("<summary>What was chosen on held-out samples</summary>")[1].split(
        "</details>"
    )[0]
    assert (
        "The network of iteration 40, 41 (seeds 0, 1). In its teacher the network and the experts"
        in chosen
    )
    assert "<td>network</td><td>25.0%, 50.0%</td>" in chosen
    assert "<td>kernel ridge</td><td>75.0%, 50.0%</td>" in chosen
    assert (
        "accuracy constant, latency (0.0, 0.3)<small>accuracy constant, latency (1.0, 0.3)"
        in chosen
    )


def test_report_shows_how_reliable_predicted_probabilities_are(run: Path) -> None:
    assert "Reliability" not in write_report(run).read_text()
    places = ((10, 0.72, 0.61), (10, 0.9, 0.95), (20, 0.99, 0.97))
    bins = [{"decisions": n, "expected_in_time": p, "in_time": share} for n, p, share in places]
    assert calibration_error(bins) == pytest.approx((10 * 0.11 + 10 * 0.05 + 20 * 0.02) / 40)
    text = report_of(run, results() | {"reliability": bins})
    figure = text.split("<h2>Reliability</h2>")[1].split("<h2>")[0]
    assert "on average they differ by 5.0 points (expected calibration error)" in figure
    (spec,) = charts_of(figure)
    svg_of(spec)
    diagonal, dots = sorted(data_of(spec), key=len)
    assert diagonal == [{"predicted": end, "observed": end} for end in (0.6, 1.0)]
    assert [(row["decisions"], row["predicted"], row["observed"]) for row in dots] == list(places)


def test_report_of_a_network_alone(run: Path) -> None:
    content = with_guard(({}, {})) | {
        "chosen": [{"weights": {"network": 1.0}, "settings": {}, "iteration": 7}]
    }
    assert "<p>The network of iteration 7 (seeds 0).</p>" in report_of(run, content)


def test_equal_budgets_are_listed_once() -> None:
    content = with_guard((TOO_DEAR, TOO_DEAR))
    for row in [*content["guard"][0], *content["knob_usage"]]:
        row["budget_ms"] = 120.0
    assert verdict(content)[3:] == [
        "At 120 ms (90.0% on time), a guarantee of 95% on time would cost too much utility, so "
        "there is none."
    ]
    usage = specifications(result_charts(content)["Which settings are used"])
    assert sum(row["share"] for spec in usage for row in data_of(spec)[0]) == pytest.approx(
        2
    )  # knobs


def test_results_are_printed_plainly_where_there_is_no_terminal() -> None:
    lines = printed(print_results, results()).splitlines()
    assert [line.split("  ")[0].strip() for line in lines[1:6]] == [
        policy_name(p) for p in sorted(POLICIES, key=lambda p: -POLICIES[p])
    ]
    assert "0.600 [0.585, 0.615]" in lines[2]
    assert lines[6:] == verdict(results())
    for width in (80, 100, 160):
        assert "\x1b[1m" in printed(print_results, results(), width)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_pareto_front_is_what_nothing_else_beats(points: list[tuple[int, int]]) -> None:
    accuracy, latency = np.array(points, dtype=float).T
    front = pareto_front(accuracy, latency)
    for i, (a, t) in enumerate(points):
        beaten = any((b >= a and s <= t) and (b, s) != (a, t) for b, s in points)
        assert not (front[i] and beaten)
        assert beaten or any(front[j] and points[j] == (a, t) for j in range(len(points)))


def test_a_knob_with_many_values_keeps_its_most_used_ones() -> None:
    shares = (np.arange(1, 31) / np.arange(1, 31).sum()).tolist()
    usage = [
        {"policy": "p", "budget_ms": 9.5, "knob": "solver", "value": v, "share": s}
        for v, s in enumerate(shares)
    ]
    (chart,) = charts.knob_usage([("p", "p", {"knob_usage": usage})])
    (rows,) = data_of(page.specification(chart))
    kept = {r["value"]: r["share"] for r in rows}
    assert set(kept) == {*map(str, range(30 - charts.MOST_VALUES, 30)), "other"}
    assert sum(kept.values()) == pytest.approx(1)
    assert sorted(["10", "9", "b", "2.5", "a"], key=charts.in_order) == ["2.5", "9", "10", "a", "b"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0123, "0.0123 ms"),
        (2.5, "2.50 ms"),
        (99.96, "100 ms"),
        (1234.5, "1,234 ms"),
        (None, "–"),
        (math.inf, "–"),
    ],
)
def test_quantity(value: float | None, words: str) -> None:
    assert quantity(value) == words


@pytest.mark.parametrize(
    ("micros", "unit", "words"),
    [
        (40.0, "ms", "A decision takes 40.0 µs, 2.0% of the mean latency."),
        (500.0, "ms", "A decision takes 500 µs, 25.0% of the mean latency."),
        (None, "ms", ""),
        (40.0, "USD", ""),
    ],
)
def test_decision_time_is_compared_with_the_latency(
    micros: float | None, unit: str, words: str
) -> None:
    row = {
        "policy": "controller",
        "budget_ms": None,
        "latency_ms_mean": 2.0,
        "decision_us_p50": micros,
    }
    content = on_decisions({"rows": [row], "unit": unit})
    assert content.startswith(words)
    assert bool(content) == bool(words)
