"""The report says what results.json says: in words, in tables and in charts."""

import html
import itertools
import json
import math
import re

import numpy as np
import polars as pl
import pytest
from helpers import input_error
from hypothesis import given, settings
from hypothesis import strategies as st
from page_parts import (
    charts_of,
    data_of,
    folded_in,
    headings_of,
    points_of,
    printed,
    report_of,
    rows_of,
    run_folder,
    said,
    specifications,
    svg_of,
)
from run_folders import interval

from knobwise.common.words import quantity
from knobwise.experiments.evidence.results import calibration_error, read_results
from knobwise.experiments.evidence.statistics import pareto_front
from knobwise.experiments.report.choices import explanation
from knobwise.experiments.report.comparison import Comparison
from knobwise.experiments.report.figures import figures_of
from knobwise.experiments.report.report import print_results, write_report
from knobwise.experiments.report.runs import Run
from knobwise.experiments.report.sentences import Sentence
from knobwise.experiments.report.tables import Table
from knobwise.experiments.report.verdict import shown_by_run, verdict
from knobwise.experiments.report.words import policy_name
from knobwise.experiments.train.finish import sign_of_gain

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
CELLS = [
    {"label": label, "knobs": knobs, "accuracy": a, "utility": u, "latency_ms": t}
    for label, knobs, a, u, t in (
        ("a", {"crops": 2, "mode": "fast"}, 0.412, 0.35, 100.0),
        ("b", {"crops": 10, "mode": "<slow>"}, 0.733, 0.45, 400.0),
    )
]
BEST_FIRST = sorted(POLICIES, key=POLICIES.get, reverse=True)


def row(policy, budget, utility):
    gain = utility - 0.5
    numbers = {
        "policy": policy,
        "budget_ms": budget,
        "accuracy": utility + 0.05,
        "reward": utility,
        "latency_ms_mean": 0.8 * (budget or 300.0),
        "decision_us_p50": 12.5,
        "satisfaction": 0.9,
        "satisfaction_feasible": 0.96,
        "infeasible": 0.0 if budget == BUDGETS[1] else 0.04,
    }
    return (
        numbers
        | interval("utility", utility, 0.015)
        | interval("over_static", gain, 0.01)
        | interval("gap_closed", gain / 0.3, 0.1)
    )


def results(changes=None, **utilities):
    """Mean utilities by policy; at the tight budget .1 less, at the loose one .1 more. `changes`
    are to the row of the controller."""
    places = {None: 0.0, BUDGETS[0]: -0.1, BUDGETS[1]: 0.1}
    means = POLICIES | utilities
    rows = [row(p, b, u + d) for b, d in places.items() for p, u in means.items()]
    rows[0] |= changes or {}
    usage = []
    for policy, budget in itertools.product(
        ("controller", "budget_aware_static", "oracle"), BUDGETS
    ):
        for cell, share in zip(CELLS, (0.25, 0.75), strict=True):
            for knob, value in cell["knobs"].items():
                use = {"policy": policy, "budget_ms": budget, "knob": knob}
                usage.append(use | {"value": value, "share": share})
    return {
        "split": "test",
        "seeds": [0, 1],
        "budgets_ms": list(BUDGETS),
        "rows": rows,
        "a key of tomorrow": 1,
        "profile": {"name": "small", "digest": "sha256:0f", "samples": 60, "configurations": 2},
        "configurations": CELLS,
        "knob_usage": usage,
    }


GUARD = {
    "gain": 0.1,
    "gain_se": 0.01,
    "on_time": 0.955,
    "deployed": True,
    "reason": "deployed: better than <static> by +0.100 ± 0.010",
}
FELL_BACK = {"deployed": False}


def with_guard(*seeds, **more):
    """Results of so many seeds, each with what the guard found at the tight and at the loose
    budget, and with a checkpoint of iteration 40 and on."""
    content = results() | {"seeds": [*range(len(seeds))]}
    content |= {"guard": [], "chosen": []}
    for seed, found in enumerate(seeds):
        budgets = zip(BUDGETS, found, strict=True)
        content["guard"].append([GUARD | {"budget_ms": b} | changes for b, changes in budgets])
        weights = {"network": 0.25 + seed / 4, "kernel_ridge": 0.75 - seed / 4}
        chosen = {"weights": weights, "settings": {"kernel_ridge": f"({seed}.0, 0.3)"}}
        content["chosen"].append(chosen | {"iteration": 40 + seed})
    return content | more


def unknown(*policies, measured=0):
    """Results of a run that measured so many of 40 decisions of these policies: what rests on them
    is not known."""
    content = results() | {"test_samples": 40}
    counts = {"measured_decisions": measured, "decisions": 40}
    kept = ("policy", "budget_ms", "decision_us_p50")
    for row in content["rows"]:
        if row["policy"] in policies:
            row |= {key: None for key in row if key not in kept} | counts
        elif "budget_aware_static" in policies:
            row |= {key: None for key in row if key.startswith(("over_static", "gap_closed"))}
    return content


def trained(warm_up, iterations=100, **more):
    return {"training": {"warmup_iterations": warm_up, "iterations": iterations} | more}


GAIN = {
    "test": 0.0123,
    "test_ci95": [-0.004, 0.03],
    "held_out": 0.02,
    "held_out_ci95": [0.0101, 0.03],
}
"""What GRPO added."""
HELD_OUT = {key: GAIN[key] for key in ("held_out", "held_out_ci95")}
"""The same where the policy before it was not judged on test samples."""
NOT_KNOWN = {"over_static_ci95": None, "gap_closed_ci95": None, "satisfaction_feasible": None}
PAIR = ({}, {})


def test_faults_of_the_profile_are_repeated(tmp_path):
    warning = "3 latencies are 0 (nearly certain)."
    assert warning in report_of(tmp_path, results() | {"warnings": [warning]})


def drawn(content):
    """The figures of one run without files: heading → figure."""
    return figures_of(Comparison([Run(content)]))


def promised(*rows, needed=59):
    """Results with what was promised at so many budgets: whether it is kept, and broken."""
    facts = []
    for budget, (kept, broken) in zip(BUDGETS, rows, strict=False):
        row = {"policy": "controller", "budget_ms": budget, "promise": 0.95, "kept": kept}
        row |= {"broken": broken, "held_out_requests": 58, "requests_needed": needed}
        row |= {"rule": "the policy", "held_out": 0.98, "held_out_bound": 0.96, "seed": 0}
        facts.append(row | {"test": 0.97, "test_ci95": [0.93, 0.99], "accuracy": 0.61})
    content = results()
    low = [row for row in content["rows"] if row["policy"] == "budget_aware_static"]
    content["rows"] += [row | {"policy": "static_under_promise"} for row in low]
    return content | {"promises": facts}


def going_on(content):
    """The same where the rule of the smallest budget decides at all."""
    for row in content["promises"]:
        row["rule_ms"] = BUDGETS[0]
    return content


def attainable(low, attained=None):
    estimate = {"gain": 0.024, "gain_ci95": [low, 0.046], "samples": 48, "policies": [["ridge"]]}
    return results({"attained": attained}) | {"attainable": estimate}


def stopped_at(*ended):
    steps = {"warmup_iterations": 200, "iterations": 400, "method": "GRPO", "patience": 120}
    return results() | {"training": steps | {"ended_at": list(ended)}}


def gains(test, held_out):
    """What GRPO or PPO added on the test samples, and on held-out ones."""
    on = Sentence("gained_on_test", gain=test), Sentence("gained_on_held_out", gain=held_out)
    return ", ".join(map(str, on))


FOREST = "random forest (0.580 [0.565, 0.595])"


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (
            results(),
            {
                "beats": {"gain": "+10.0", "ci95": " [9.0, 11.0]"},
                "scores": {"value": "0.600", "against": "0.500"},
                "gap_closed": {"share": "33%"},
            },
        ),
        (
            results(controller=0.4),
            {"loses": {"gain": "-10.0"}, "scores": {"value": "0.400", "against": "0.500"}},
        ),
        (
            results(NOT_KNOWN),
            {"no_gain": {"gain": "+10.0"}, "scores": {"value": "0.600", "against": "0.500"}},
        ),
        ({"rows": results()["rows"][1:]}, {"no_policy": {}, "best_policy": {"policy": FOREST}}),
        (
            attainable(0.004, 0.71),
            {"learnable": {"gain": "+2.4"}, "share_attained": {"share": "71%"}},
        ),
        # 48 · (2.8 / 2.4)² = 65.3
        (
            attainable(-0.004),
            {
                "perhaps_learnable": {"gain": "+2.4"},
                "needed_to_tell": {"samples": "66"},
                "attained": {"share": ""},
            },
        ),
        # 48 · (10.4 / 2.4)² = 901 = 18.8 · 48, and above 20 · 48 nothing is said
        (attainable(-0.08), {"needed_to_tell": {"samples": "910"}}),
        (attainable(-0.085), {"perhaps_learnable": {"needed": ""}}),
        (results(), {"rivals": {"better": "None", "count": 2, "best": FOREST}}),
        (
            results(controller=0.5, random_forest=0.6, ridge=0.505),
            {"rivals": {"better": 2, "count": 2, "best": "random forest (0.600 [0.585, 0.615])"}},
        ),
        (results(), {"on_time": {"share": "96.0%"}, "too_short": {"share": "4.0%"}}),
        # what would be printed as 0.0% is not said
        (results({"infeasible": 0.0004}), {"on_time": {"too_short": ""}}),
        # rounded once: .8285 · 100 is a little below 82.85
        (results({"satisfaction_feasible": 0.8285}), {"on_time": {"share": f"{0.8285:.1%}"}}),
        (
            promised((True, False), (True, True)),
            {
                "promised": {"promise": "95%", "requests": "58", "budgets": "120 ms and 480 ms"},
                "promise_broken": {"budgets": "480 ms"},
            },
        ),
        (
            promised((False, False), (True, False), needed=50),
            {
                "promised": {"budgets": "480 ms"},
                "not_promised": {"budgets": "120 ms", "bound": "96.0%", "too_few": ""},
            },
        ),
        (
            going_on(promised((True, False), (False, False))),
            {
                "promised": {"budgets": "120 ms"},
                "promise_goes_on": {"budgets": "480 ms"},
            },
        ),
        (
            promised((False, False), (False, False)),
            {
                "not_promised": {"budgets": "120 ms and 480 ms"},
                "too_few_to_promise": {"promise": "95%", "needed": "59"},
            },
        ),
        # judged at other budgets than those of the training
        (promised() | {"promises": []}, {"promised_elsewhere": {}}),
        (
            stopped_at(180, 600),
            {
                "stopped_early": {
                    "seeds": " in 1 of 2 seeds",
                    "iterations": "180",
                    "total": "600",
                    "patience": "120",
                }
            },
        ),
        (stopped_at(180, 200), {"stopped_early": {"seeds": "", "iterations": "180 and 200"}}),
        # of with_guard the kept iterations are 40, 41, …
        (
            with_guard(PAIR, PAIR, **trained(40)),
            {"start_kept": {"method": "GRPO", "seeds": " in 1 of 2 seeds"}},
        ),
        (with_guard(PAIR, PAIR, **trained(41)), {"start_kept": {"seeds": ""}}),
        (
            with_guard(PAIR, PAIR, **trained(30, method="PPO"), grpo_gain=GAIN),
            {
                "changed_nothing": {
                    "method": "PPO",
                    "gains": gains("+1.2 points [-0.4, 3.0]", "+2.0 points [1.0, 3.0]"),
                }
            },
        ),
        (
            with_guard(PAIR, PAIR, **trained(30, method="PPO"), grpo_gain=HELD_OUT),
            {"optimistic": {"method": "PPO", "gain": "+2.0 points [1.0, 3.0]"}},
        ),
        # of a reward that is judged by itself, a number in its own unit
        (
            with_guard(PAIR, PAIR, validation_reward=[3.1, 3.2], grpo_gain=GAIN),
            {
                "changed_nothing": {
                    "score": "reward",
                    "gains": gains("+0.0123 [-0.004, 0.03]", "+0.02 [0.0101, 0.03]"),
                }
            },
        ),
        (
            with_guard((FELL_BACK, {}), (FELL_BACK, {}), PAIR),
            {"fell_back": {"count": "2", "cases": "6", "pairs": "seed–budget pairs"}},
        ),
        (
            with_guard((FELL_BACK, {})),
            {"fell_back": {"count": "1", "cases": "2", "pairs": "budgets"}},
        ),
    ],
)
def test_the_verdict(content, wanted):
    shown = shown_by_run(content)
    told = said(shown)
    for name, fields in wanted.items():
        assert fields.items() <= told[name].items()
    assert verdict(content) == list(map(str, shown))


@pytest.mark.parametrize(
    ("ci95", "sign"),
    [((-0.1, -0.01), -1), ((-0.1, 0.0), 0), ((-0.1, 0.2), 0), ((0.01, 0.1), 1), (None, None)],
)
def test_the_sign_of_a_gain_is_that_of_its_interval(ci95, sign):
    content = results({"over_static": -0.05, "over_static_ci95": ci95})
    assert sign_of_gain(content) == sign
    # without its interval, the verdict goes by that of the gap
    names = {-1: "loses", 0: "no_gain", 1: "beats", None: "beats"}
    assert shown_by_run(content)[0].name == names[sign]


def test_the_verdict_is_silent_on_budgets_that_were_not_judged():
    content = with_guard((FELL_BACK, FELL_BACK))
    for row in content["guard"][0]:
        row["budget_ms"] *= 3
    assert verdict(content) == verdict(with_guard(PAIR))


def test_a_gap_without_width_and_a_gain_that_is_none_need_no_numbers():
    """Neither a share of no gap, nor more samples where no sample differs."""
    nothing = {"over_static": 0.0, "over_static_ci95": [0.0, 0.0]}
    gap = {"gap_closed": None, "gap_closed_ci95": None}
    told = said(shown_by_run(results({**nothing, **gap}) | {"test_samples": 40}))
    assert (told["no_gain"]["gain"], told["no_gain"]["ci95"]) == ("0.0", " [0.0, 0.0]")
    assert {"gap_closed", "too_few_to_tell"}.isdisjoint(told)
    wide = {"over_static": 0.0, "over_static_ci95": [-0.01, 0.01]}
    told = said(shown_by_run(results(wide) | {"test_samples": 40}))
    assert told["too_few_to_tell"]["samples"] == "40"
    once = results(wide) | trained(39, ended_at=[139]) | {"test_samples": 40}
    assert "more_by_folds" in said(shown_by_run(once))
    folds = once | {"split_seeds": [0, 1, 2, 3, 4]}
    assert "more_by_folds" not in said(shown_by_run(folds))


def test_the_verdict_says_nothing_else():
    names = [sentence.name for sentence in shown_by_run(results())]
    assert names == ["beats", "rivals", "on_time"]
    silent = [with_guard(PAIR, PAIR, **more) for more in (trained(39), trained(40, 0), {})]
    for content in (with_guard(PAIR), stopped_at(600, 600), *silent):
        assert [sentence.name for sentence in shown_by_run(content)] == names


def test_what_grpo_added_is_shown_by_test_samples_alone():
    """On held-out samples the best of several evaluations is never below the first."""
    told = said(shown_by_run(with_guard(PAIR, PAIR, **trained(30), grpo_gain=HELD_OUT)))
    assert told.keys().isdisjoint({"raised", "lowered", "changed_nothing"})
    lost = GAIN | {"test": -0.02, "test_ci95": [-0.03, -0.01]}
    told = said(shown_by_run(with_guard(PAIR, PAIR, **trained(30), grpo_gain=lost)))
    assert "lowered" in told
    assert told.keys().isdisjoint({"raised", "optimistic"})


def test_what_grpo_added_is_said_even_if_every_seed_keeps_its_start():
    nothing = {"test": 0.0, "test_ci95": [0.0, 0.0], "held_out": 0.0, "held_out_ci95": [0.0, 0.0]}
    content = with_guard(PAIR, PAIR, **trained(41), grpo_gain=nothing)
    told = said(shown_by_run(content))
    none = "0.0 points [0.0, 0.0]"
    assert told["changed_nothing"]["gains"] == gains(none, none)
    assert told["start_kept"]["method"] == "GRPO"


METRICS = "seed,step,Train/Loss,Train/KL,Val/Loss\n" + "".join(
    f"{seed},{step},{step / 100 + seed},0.01,{'' if step % 50 else step / 100}\n"
    for seed in (0, 1)
    for step in range(1000)
)


@pytest.fixture
def run(tmp_path):
    config = {"policy": {"head": "<b>utility</b>"}}
    return run_folder(tmp_path / "controller" / "first", results(), METRICS, config)


def training_of(text):
    return [spec for spec in charts_of(text) if "training step" in json.dumps(spec)]


@pytest.mark.parametrize(("training", "lines"), [(trained(600), 1), (trained(600, 0), 0), ({}, 0)])
def test_training_curves_are_means_thinned_and_say_where_grpo_begins(run, training, lines):
    logged = [f"{seed},{step},{step / 1e4 + seed}" for seed in (0, 1) for step in range(3000)]
    (run / "metrics.csv").write_text("\n".join(["seed,step,Val/Utility", *logged]))
    specs = training_of(report_of(run, results() | training))
    curve = specs[0]
    assert svg_of(curve).count('stroke-dasharray="5,4"') == lines
    points = pl.DataFrame([point for point in points_of(curve) if "policy" in point])
    assert len(points) == 1000
    # the mean of two seeds, of which the second is 1 higher
    assert points["step", "value"].rows()[:3] == [(0, 0.5), (3, 0.5003), (6, 0.5006)]
    assert (points["high"] - points["low"]).to_list() == pytest.approx([1.0] * 1000)


def test_the_steps_before_the_network_imitates_its_teacher_are_told_apart(run):
    lines = ["seed,step,Val/Utility,Train/Imitation_Loss", "0,0,0.5,", "0,150,0.6,2.0"]
    (run / "metrics.csv").write_text("\n".join([*lines, "0,300,0.7,1.0"]))
    first, *_ = training_of(report_of(run, results() | trained(300)))
    marks = [(point["stage"], point["begins"]) for point in points_of(first) if "stage" in point]
    assert marks == [("imitates its teacher", 150), ("GRPO", 300)]


def test_grpo_has_a_curve_of_its_own(run):
    lines, chosen = ["seed,step,Val/Utility"], []
    for seed, curve in enumerate([(0.5, 0.55, 0.54, 0.58), (0.5, 0.56, 0.55, 0.50)]):
        lines += [f"{seed},{10 * i},{value}" for i, value in enumerate(curve)]
        grpo = {"start": curve[1], "best": max(curve), "last": curve[-1]}
        chosen.append({"weights": {}, "settings": {}, "iteration": 10, "grpo": grpo})
    (run / "metrics.csv").write_text("\n".join(lines))
    content = results() | trained(10, 20) | {"chosen": chosen}
    whole, gained = training_of(report_of(run, content))
    assert {p["step"] for p in points_of(whole) if "policy" in p} == {0, 10, 20, 30}
    points = {p["step"]: (p["low"], p["high"]) for p in points_of(gained) if "policy" in p}
    assert points == {20: pytest.approx((-1, -1)), 30: pytest.approx((-6, 3))}


def test_the_curve_of_what_grpo_gained_is_of_the_reward_where_that_is_judged(run):
    lines = ["seed,step,Val/Utility,Val/Reward_Mean", "0,0,0.5,4.0", "0,10,0.4,6.5", "0,20,0.3,9.0"]
    (run / "metrics.csv").write_text("\n".join(lines))
    chosen = [{"weights": {}, "settings": {}, "iteration": 10, "grpo": {"start": 4.0}}]
    facts = {"validation_reward": [9.0, 9.0], "chosen": chosen}
    *_, gained = training_of(report_of(run, results() | trained(1, 20) | facts))
    points = [(p["step"], p["value"]) for p in points_of(gained) if "policy" in p]
    assert points == [(10, pytest.approx(2.5)), (20, pytest.approx(5.0))]


def test_the_report_says_first_what_was_gained_when_and_how_fast(run):
    ran = {"started": "2026-11-22 14:50", "seconds": 193.2, "commit": "0123456789abcdef-dirty"}
    content = with_guard(PAIR, PAIR, **trained(30), grpo_gain=GAIN, run=ran)
    text = report_of(run, content)
    head = text.split("<h1>")[1].split("<h2>")[0]
    for part in ("14:50 UTC", "3 min", "012345678-dirty"):
        assert part in head
    tiles = re.findall("<b>(.*?)</b>.*?(?:<small>(.*?)</small>)?</div>", head)
    assert tiles == [
        ("+10.0 points", "[9.0, 11.0]"),
        ("96.0%", "budget-aware static: 96.0%"),
        ("12.5 µs", ""),
    ]
    assert "class=unsure" not in head
    assert re.findall("<p class=lead>(.*?)</p>", head) == verdict(content)[:1]
    # the figures, of which there are at most eight, after what is said in words
    assert headings_of(text) == [
        *("What it shows", "Utility against budget", "On time", "Accuracy against mean latency"),
        *("Configurations used", "Details"),
    ]
    (added,) = [each for each in shown_by_run(content) if each.name == "changed_nothing"]
    assert text.count(str(added)) == 1


def test_a_gain_that_may_be_chance_is_grey(tmp_path):
    content = results({"over_static": 0.017, "over_static_ci95": [-0.013, 0.046]})
    head = report_of(tmp_path, content).split("<h2>")[0]
    assert "<div class=unsure><b>+1.7 points</b>of utility" in head
    assert "<small>[-1.3, 4.6]</small>" in head


def test_the_report_holds_every_number_of_every_policy(run):
    path = write_report(run)
    text = path.read_text()
    assert path == run / "report.html"
    written = read_results(run)
    del written["sha256"]
    assert written == results()
    assert "&lt;b&gt;utility" in text
    assert "<slow>" not in re.sub(r"<script type.*?</script>", "", text, flags=re.S)
    assert folded_in(text) == [
        *("Every budget", *map(quantity, BUDGETS), "What the words mean"),
        *("How to reproduce", "The resolved configuration (config.yaml)"),
    ]
    # the means, then those at each budget
    for table, less in zip(rows_of(text), (0.0, -0.1, 0.1), strict=True):
        for policy, line in zip(BEST_FIRST, table, strict=True):
            utility = POLICIES[policy] + less
            latency = {0.0: "240 ms", -0.1: "96.0 ms", 0.1: "384 ms"}[less]
            numbers = f"{utility:.3f}", f"[{utility - 0.015:.3f}", f"{(utility - 0.5) / 0.3:.0%}"
            cells = (policy_name(policy), *numbers, latency)
            assert [cell for cell in cells if cell not in line] == []


def test_every_chart_can_be_drawn_and_holds_the_numbers(run):
    specs = charts_of(write_report(run).read_text())
    svg_of(*specs)
    utility, gain, satisfaction, plane, *usage = specs[:8]
    # an order, as lines need it, would cut a band into an area for each point
    ordered = {layer["mark"]["type"]: "order" in layer["encoding"] for layer in utility["layer"]}
    assert (ordered["area"], ordered["line"]) == (False, True)

    def data(spec, *columns):
        """Return these columns of the first data of a chart that have them."""
        frames = map(pl.DataFrame, data_of(spec))
        return next(frame[columns].rows() for frame in frames if {*columns} <= {*frame.columns})

    assert data(plane, "label", "accuracy", "latency_ms") == [
        ("a", 0.412, 100.0),
        ("b", 0.733, 400.0),
    ]
    spent = {(policy_name(policy), 0.8 * budget) for policy in SHOWN for budget in BUDGETS}
    assert {*data(plane, "policy", "latency_ms")} == spent
    gains = data(gain, "budget_ms", "policy", "gain")
    loose = {policy: points for budget, policy, points in gains if budget == BUDGETS[1]}
    assert loose == pytest.approx({"learned controller": 20, "random forest": 18})
    assert {*data(utility, "policy", "budget_ms", "utility", "low", "high")} == {
        (policy_name(r["policy"]), r["budget_ms"], r["utility"], *r["utility_ci95"])
        for r in results()["rows"]
        if r["budget_ms"] and r["policy"] in SHOWN
    }
    assert len(data_of(satisfaction)) == 1
    # with a promise there is a dashed line
    (satisfaction,) = specifications(drawn(promised((True, False), (True, True)))["On time"])
    assert [{"level": 0.95}] in data_of(satisfaction)
    used = {(point["policy"], point["value"], point["share"]) for point in points_of(*usage)}
    shares = [("2", 0.25), ("fast", 0.25), ("10", 0.75), ("<slow>", 0.75)]
    policies = ("learned controller", "budget-aware static")
    assert used == {(policy, *share) for policy, share in itertools.product(policies, shares)}


def test_true_is_drawn_as_a_word_beside_numbers():
    content = results()
    # polars makes 1 of True in a column with 2
    for use in content["knob_usage"]:
        if use["knob"] == "mode":
            use["value"] = use["value"] == "fast"
    figure = drawn(content)["Configurations used"]
    values = {point["value"] for point in points_of(*specifications(figure))}
    assert values == {"2", "10", "true", "false"}


def test_report_is_written_from_the_bare_results(tmp_path):
    names = ("controller", "mine")
    rows = [{"policy": name, "budget_ms": None, "utility": 0.5} for name in names]
    assert charts_of(report_of(tmp_path, {"rows": rows})) == []


@pytest.mark.parametrize("content", [None, "{", "[]", '{"rows": []}'])
def test_a_folder_without_results_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with input_error(r"results\.json"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_report_shows_the_guard_and_what_was_chosen(run):
    loose = {"on_time": 0.965}
    content = with_guard((FELL_BACK, FELL_BACK), (FELL_BACK, loose))
    tables = rows_of(report_of(run, content))
    cells = [re.findall(r"<td.*?>(.*?)</td>", line) for line in tables[3]]
    reason = html.escape(GUARD["reason"])
    assert cells == [
        ["120 ms", "0", reason, "95.5%"],
        ["480 ms", "0", reason, "95.5%"],
        ["120 ms", "1", reason, "95.5%"],
        ["480 ms", "1", reason, "96.5%"],
    ]
    chosen = [re.findall(r"<td.*?>(.*?)</td>", line) for line in tables[4]]
    about = "squared width of the kernel, penalty"
    assert chosen == [
        ["network", "0", "40", "25.0%", "–", "–"],
        ["kernel ridge", "0", "40", "75.0%", about, "(0.0, 0.3)"],
        ["network", "1", "41", "50.0%", "–", "–"],
        ["kernel ridge", "1", "41", "50.0%", about, "(1.0, 0.3)"],
    ]


def test_report_shows_how_reliable_predicted_probabilities_are():
    places = [(10, 0.72, 0.61), (10, 0.9, 0.95), (20, 0.99, 0.97)]
    bins = [{"decisions": n, "expected_in_time": p, "in_time": share} for n, p, share in places]
    assert calibration_error(bins) == pytest.approx((10 * 0.11 + 10 * 0.05 + 20 * 0.02) / 40)
    figure = drawn(results() | {"reliability": bins})["Reliability"]
    assert "5.0" in figure.caption
    (spec,) = specifications(figure)
    svg_of(spec)
    diagonal, dots = sorted(data_of(spec), key=len)
    assert diagonal == [{"predicted": end, "observed": end} for end in (0.61, 1.0)]
    assert pl.DataFrame(dots)["decisions", "predicted", "observed"].rows() == places


def test_equal_budgets_are_listed_once():
    content = promised((True, False), (True, False))
    for row in [*content["promises"], *content["knob_usage"]]:
        row["budget_ms"] = 120.0
    assert said(shown_by_run(content))["promised"]["budgets"] == "120 ms"
    usage = points_of(*specifications(drawn(content)["Configurations used"]))
    # over both knobs
    assert sum(r["share"] for r in usage if r["policy"] == "learned controller") == pytest.approx(2)


def test_bars_that_add_up_to_a_little_more_than_all_have_the_scale_of_the_others():
    content = results()
    for row in content["knob_usage"][:4]:
        row["share"] *= 1 + 1e-12
    specs = specifications(drawn(content)["Configurations used"])
    tops = [re.findall(r'translate\(([^)]*)\)"[^>]*>100%<', svg_of(spec)) for spec in specs]
    assert len(tops) == 4
    assert tops == tops[:1] * 4 != [[]] * 4


def test_what_is_lost_without_a_feature_has_no_plus_sign():
    feature = {"name": "image", "column": None, "lost": 0.0684, "ci95": [0.0561, 0.0797]}
    idle = feature | {"name": "text", "lost": -0.002, "ci95": [-0.004, 0.001]}
    table = explained(importance=[feature, idle])[0]
    assert table.rows == [["image", "6.8\n[5.6, 8.0]"], ["text", "-0.2\n[-0.4, 0.1]"]]


def explained(importance=(), tree=None):
    """The tables that explain a policy of which nothing else is known."""
    tree = tree or {"fidelity": 0.5, "ci95": [0.4, 0.6], "by_budget_alone": 0.5, "rules": []}
    why = {"samples": 9, "reads": [], "importance": importance, "tree": tree, "best": []}
    why |= {"worst": [], "difficulty": {"groups": [], "unanswered": 0}}
    blocks = explanation(results() | {"explanation": why})
    return [block for block in blocks if isinstance(block, Table)]


PAIRED = {"beyond_budget": 0.05, "beyond_budget_ci95": [0.01, 0.09]}
"""That features explain more, though each share alone is less certain."""


@pytest.mark.parametrize(
    ("feature", "low", "paired", "tables"),
    [
        ("length", 0.79, PAIRED, 1),
        ("length", 0.81, PAIRED | {"beyond_budget_ci95": [-0.01, 0.11]}, 0),
        ("language_features[888]", 0.81, PAIRED, 0),
        # results of before 0.2
        ("length", 0.81, {}, 1),
        ("length", 0.79, {}, 0),
    ],
)
def test_rules_are_shown_if_they_beat_the_budget_and_their_columns_have_names(
    feature, low, paired, tables
):
    when = [[feature, "≤", 0.508], ["budget", ">", 20.0]]
    rule = {"when": when, "then": {"crops": 2}, "share": 0.25, "alike": 0.9}
    tree = {"fidelity": 0.85, "ci95": [low, 0.9], "by_budget_alone": 0.8, "rules": [rule]} | paired
    shown = explained(tree=tree)
    assert len(shown) == tables
    for table in shown:
        assert table.rows == [["length ≤ 0.508 and budget > 20.0 ms", "crops=2", "25%", "90%"]]


def test_counts_of_a_thousand_and_more_have_a_comma(run):
    profile = {"name": "large", "samples": 20000, "configurations": 1024}
    content = with_guard(PAIR, profile=profile, test_samples=3000, test_clusters=1500)
    content["chosen"][0]["iteration"] = 1150
    text = report_of(run, content)
    for part in (
        "20,000 samples",
        "1,024 conf",
        "3,000 samples of 1,500 groups",
        "<td>1,150</td>",
    ):
        assert part in text


def test_results_are_printed_on_a_terminal_and_on_none():
    assert "\x1b[1mlearned controller" in printed(print_results, results(), 80)
    _, *lines = printed(print_results, results()).splitlines()
    names = [line.split("  ")[0].strip() for line in lines[:5]]
    assert names == [policy_name(policy) for policy in BEST_FIRST]
    assert "0.600 [0.585, 0.615]" in lines[1]
    assert lines[5:] == verdict(results())


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_pareto_front_is_what_nothing_else_beats(points):
    front = pareto_front(*np.array(points, dtype=float).T)
    kept = [point for point, on_front in zip(points, front, strict=True) if on_front]
    # of equal points one is kept
    assert sorted(kept) == sorted(
        (a, t)
        for a, t in set(points)
        if not any(b >= a and s <= t and (b, s) != (a, t) for b, s in points)
    )


def test_quantities_have_three_digits():
    values = 0.0123, 2.5, 99.96, 1234.5, None, math.inf
    wanted = ["0.0123 ms", "2.50 ms", "100 ms", "1,234 ms", "–", "–"]
    assert [quantity(value) for value in values] == wanted


# -- where nothing was measured --------------------------------------------------------------------


@pytest.mark.parametrize("policies", [["controller"], ["budget_aware_static"], [*POLICIES]])
def test_nothing_is_claimed_of_what_was_not_measured(tmp_path, policies):
    content = unknown(*policies)
    by_name = said(shown_by_run(content))
    assert not {"beats", "loses", "no_gain", "on_time", "rivals"} & by_name.keys()
    assert "0 of 40" in by_name["not_known_gain"]["counts"]
    page = report_of(tmp_path, content)
    # a line in the table of the page for each, and one at each budget
    assert page.count("not known: 0 of 40 decisions were measured") >= 3 * len(policies)
    shown = printed(print_results, content)
    assert shown.count("not known: 0 of 40") >= len(policies)
    drawn = {
        point["policy"]
        for chart in charts_of(page)
        for points in chart.get("datasets", {}).values()
        for point in points
        if "policy" in point and ("utility" in point or "accuracy" in point or "gain" in point)
    }
    assert drawn.isdisjoint(map(policy_name, policies))


def test_a_guard_that_knew_nothing_says_so_of_static_too():
    """The sentence about static follows from what the guard's rows hold of it."""
    nothing = {"deployed": False, "gain": None, "gain_se": None, "on_time": None}
    for static, words in ((None, 1), (0.5, 0)):
        content = with_guard([nothing | {"utility_static": static}] * 2)
        by_name = said(shown_by_run(content))
        assert by_name["fell_back_unknown"]["count"] == "2"
        assert ("static_unknown" in by_name) == bool(words)
        assert "fell_back" not in by_name


def test_half_measured_decisions_keep_their_numbers():
    content = unknown()
    for row in content["rows"]:
        row |= {"measured_decisions": 30, "decisions": 60, "effective_cells": 25.0}
    content["test_samples"] = 60
    by_name = said(shown_by_run(content))
    assert {"beats", "estimated"} <= by_name.keys()
