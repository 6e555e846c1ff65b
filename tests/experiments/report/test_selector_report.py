"""The selector's report says what results.json says, and is honest where intervals hold 0."""

import functools
import json
import re
from dataclasses import replace

import polars as pl
import pytest
import torch
from helpers import small_beams
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
    titles_of,
)

from knobwise.agents.selector.evaluation import Decided
from knobwise.experiments.report import page
from knobwise.experiments.report.report import print_results, verdict, write_report
from knobwise.experiments.report.result_charts import BEST, KINDS, result_charts, result_images
from knobwise.experiments.report.tables import policies
from knobwise.experiments.report.words import policy_name
from knobwise.experiments.results.problem import CONTROLS, LEARNED
from knobwise.experiments.results.selectors import selector_decisions, selector_results
from knobwise.experiments.settings.beams import SelectorData

SHOTS, SEEDS, QUERIES = (1, 2, 3, 4), (0, 1, 2), 600
TWO = {
    **{"random": 0.21, "image_similarity": 0.12, "question_similarity": 0.25, "similarity": 0.37},
    **{"part_similarity": 0.44, "careful_rule": 0.55, "vote": 0.49},
    **{"best_recorded": 0.99, "oracle": 1.0, "sft": 0.66, "rce": 0.675},
    **{"grpo_recorded": 0.7, "grpo_rounds": 0.86, "grpo_live": 0.92},
    **{"shuffled_recorded": 0.65, "shuffled_live": 0.655},
    **{"hidden_sft": 0.6, "hidden_rce": 0.605, "hidden_live": 0.604},
}
"""Accuracy at two shots, about that of a real run."""
MORE = {1: 0.55, 2: 1.0, 3: 0.99, 4: 0.98}
"""What the number of shots multiplies it by."""


def outcomes(accuracy):
    """A query is easy or hard for all policies alike, and a little differently in each seed."""
    hard = torch.linspace(0, 1, QUERIES, dtype=torch.float64)
    tilt = torch.tensor([[-0.01], [0.0], [0.01]], dtype=torch.float64)
    correct = {}
    for name, share in accuracy.items():
        seeds = 3 if name in (*LEARNED, *CONTROLS, "random") else 1
        for shots in SHOTS:
            limit = share * (MORE[shots] if name not in ("vote", "oracle") else 1)
            right = hard < limit + tilt * (seeds > 1)
            correct.setdefault(name, {})[shots] = right.float()[:seeds]
    return correct


@functools.cache
def table(queries=40):
    return replace(small_beams(queries, pool=3)[0], name="digits <careless>")


def results_of(correct, test=None, hidden=()):
    decided = {}
    for name, by_shots in correct.items():
        micros = 640.0 if name in LEARNED else None
        decided[name] = {
            n: Decided(right, None, decision_us=micros) for n, right in by_shots.items()
        }
    decisions = selector_decisions(decided, table(QUERIES), torch.arange(QUERIES), SEEDS)
    beams = table()
    data = SelectorData(beams, None, None, test or beams, None, None, None, "scorer")
    return selector_results(decisions, data, SEEDS, 2, hidden)


@functools.cache
def written_results(accuracy):
    kept = {name: share for name, share in (TWO | dict(accuracy)).items() if share is not None}
    return json.dumps(results_of(outcomes(kept), test=table(41), hidden=["annotator"]))


def results(**accuracy):
    """A run with these accuracies at two shots; None takes a policy out."""
    return json.loads(written_results(tuple(accuracy.items())))


STAGES = ("sft", "rce", "grpo_live", "shuffled_live")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The report of a run of stages one after the other, each logged under its own name."""
    logged = [
        {"seed": seed, "step": 100 * stage + step}
        | {f"Train/{name}/Loss": 1 / (step + 1), f"Val/{name}/Reward_Mean": step / 100}
        for seed in SEEDS
        for stage, name in enumerate(STAGES)
        for step in range(20)
    ]
    metrics = pl.DataFrame(logged, infer_schema_length=None).write_csv()
    folder = tmp_path_factory.mktemp("runs") / "selector" / "first"
    return write_report(run_folder(folder, results(), metrics, "version: v2\n")).read_text()


def test_the_page_holds_all_sections(text):
    headings = re.findall(r"<h2>(.*?)</h2>", text.replace(page._vega(), ""))
    assert headings == [
        *("Accuracy with 2 shots", "What the run shows", "Accuracy against shots", "Training"),
        *("Tables", "How to reproduce"),
    ]
    folded = ["Every policy, by the number of demonstrations", "Differences", "Controls"]
    assert all(f"<summary>{title}</summary>" in text for title in folded)
    for part in (
        *("<b>+37.0 points</b>of accuracy against careful", "<b>0.920</b>", "<b>640 µs</b>"),
        "digits &lt;careless&gt;: 40 queries",
        *("600 held-out", "bank of 12", "seeds 0, 1, 2", "train experiment=selector"),
        *(results()["profile"]["digest"], "version: v2"),
    ):
        assert part in text
    svg_of(*charts_of(text))


def test_every_number_of_every_policy_is_in_its_table(text):
    content = results()
    judged, differences, controls = rows_of(text)
    for lines, rows in ((judged, content["rows"]), (controls, content["controls"])):
        at_two = sorted(-round(row["accuracy"], 3) for row in rows if row["shots"] == 2)
        assert [-float(re.findall(r"<td>([\d.]+)<", line)[1]) for line in lines] == at_two
        for row in rows:
            low, high = row["accuracy_ci95"]
            cell = f"<td>{row['accuracy']:.3f}<small>[{low:.3f}, {high:.3f}]</small></td>"
            assert cell in "".join(lines)
    assert len(differences) == len(content["differences"]) / len(SHOTS)
    line = next(line for line in differences if "<td>RCE<small>over SFT" in line)
    (gap,) = (
        row
        for row in content["differences"]
        if (row["policy"], row["against"], row["shots"]) == ("rce", "sft", 2)
    )
    assert f"<td>{100 * gap['difference']:+.1f}<small>[{100 * gap['ci95'][0]:+.1f}, " in line
    assert line.endswith("<td>better</td></tr>")
    (strong,) = (line for line in judged if "class=strong" in line)
    assert "GRPO on live draws" in strong


def test_training_is_shown_stage_by_stage(text):
    curves = [spec for spec in charts_of(text) if "title" in spec]
    shown, rest = curves[:3], curves[3:]
    assert titles_of(shown) == [f"{stage}: reward, mean" for stage in ("sft", "rce", "grpo live")]
    assert [p["step"] for p in points_of(shown[1]) if p["seed"] == "0"] == [*range(100, 120)]
    losses = {f"{stage.replace('_', ' ')}: loss" for stage in STAGES}
    assert set(titles_of(rest)) == {"shuffled live: reward, mean", *losses}


def test_the_charts_hold_the_numbers():
    content = results()
    drawn = result_charts(content)
    (dots,), (lines,) = map(specifications, drawn.values())
    (dot,) = data_of(dots)
    at_two = [row for row in [*content["rows"], *content["controls"]] if row["shots"] == 2]
    assert {(d["name"], d["value"]) for d in dot} == {
        (policy_name(row["policy"], content), row["accuracy"]) for row in at_two
    }
    kinds = {d["name"]: d["kind"] for d in dot}
    assert set(kinds.values()) == set(KINDS)
    assert [name for name, kind in kinds.items() if kind == BEST] == ["GRPO on live draws"]
    colours = dots["layer"][0]["encoding"]["color"]["scale"]
    assert colours["range"][colours["domain"].index(BEST)] == page.HUES["blue"]
    points = max(data_of(lines), key=len)
    named = ("GRPO on live draws", "RCE", "SFT", "careful-annotator rule")
    assert {(p["policy"], p["shots"], p["accuracy"]) for p in points} == {
        (policy_name(row["policy"]), row["shots"], row["accuracy"])
        for row in content["rows"]
        if policy_name(row["policy"]) in named
    }
    assert [{"shots": 2}] in data_of(lines)
    assert all(png.startswith(b"\x89PNG") for png in result_images(content).values())


def test_one_number_of_shots_needs_no_chart_over_shots(tmp_path):
    content = results() | {"shots": [4]}
    for key in ("rows", "controls", "differences"):
        content[key] = [row for row in content[key] if row["shots"] == 4]
    assert list(result_charts(content)) == ["Accuracy with 4 shots"]
    assert policies(content).header == ["policy", "4 shots"]
    assert report_of(tmp_path, content)


def test_baselines_alone_make_a_report(tmp_path):
    content = results(**dict.fromkeys((*LEARNED, *CONTROLS)))
    text = report_of(tmp_path, content)
    assert "careful-annotator rule (0.550 [" in text.split("<p class=lead>")[1].split("</p>")[0]
    assert policies(content).strong == []
    assert not re.findall("<summary>(?:Controls|Differences)", text)


EVEN = {"grpo_live": 0.675, "careful_rule": 0.675}
"""No interval excludes 0."""
LIVE = "GRPO on live draws"
CONTROL = "Control: shuffled rewards on live draws"
HIDDEN = "Control: without the annotator"


@pytest.mark.parametrize(
    ("accuracy", "start", "holds"),
    [
        ({}, "With 2 shots", "GRPO on live draws answers 92.0% of 600"),
        ({}, LIVE, r"is better than RCE: \+24.5 .*; it is better than SFT: \+26.0"),
        ({}, "Of 7 simple", r"than 7 and worse than 0; .* rule \(0.550 .*\): \+37.0"),
        ({}, "Trained only with 2", "0.507 with 1, 0.910 with 3 and 0.902 with 4"),
        (EVEN, LIVE, r"shows no difference from RCE: \+0.0"),
        ({"grpo_live": 0.6}, LIVE, "is worse than RCE: -7.5"),
        ({"careful_rule": 0.97, "vote": 0.95}, "Of 7", "than 5 and worse than 2; .*: -5.0"),
        ({"shuffled_live": 0.8}, CONTROL, r"\+14.0 .*an unexpected gain"),
        ({"shuffled_live": 0.67}, CONTROL, r"\+1.0 .* SFT, -0.5 .* RCE, no gain"),
        ({"hidden_live": 0.6}, HIDDEN, "SFT: .0.0 .* vanishes"),
        ({"hidden_live": 0.7}, HIDDEN, r"SFT: \+10.0 .*with it, \+26.0: .* does not vanish"),
        ({"grpo_live": 0.66, "hidden_live": 0.6}, HIDDEN, "no gain that could"),
    ],
)
def test_the_verdict_says_what_is_shown_and_whether_controls_behave(accuracy, start, holds):
    lines = [line for line in verdict(results(**accuracy)) if line.startswith(start)]
    assert any(re.search(holds, line) for line in lines)


def test_what_limits_the_results_is_said(tmp_path):
    recorded = verdict(results() | {"judged_by": "recorded"})
    assert len(recorded) == len(verdict(results())) + 1
    assert "does not say" in recorded[0]
    correct = outcomes(TWO)
    for by_shots in correct.values():
        by_shots[4][:, :10] = torch.nan
    assert "590 with 4" in report_of(tmp_path, results_of(correct))


def test_a_narrow_terminal_keeps_the_number_of_shots_in_training():
    text = printed(print_results, results(), 80)
    assert "2 shots (trained)" in text
    assert "\x1b[1mGRPO on live draws" in text


def test_results_are_printed_where_there_is_no_terminal():
    content = results()
    lines = printed(print_results, content).splitlines()
    names = [row[0] for row in policies(content).rows]
    assert [line.split("  ")[0] for line in lines[1 : len(names) + 1]] == names
    assert lines[len(names) + 1 :] == verdict(content)
