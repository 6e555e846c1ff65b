"""The selector's report says what results.json says, and is honest where intervals hold 0."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    svg_of,
    titles_of,
)
from torch import Tensor

from knobwise.agents.selector.evaluation import Decided
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.experiments.report import charts, page
from knobwise.experiments.report.report import print_results, verdict, write_report
from knobwise.experiments.report.result_charts import BEST, result_charts, result_images
from knobwise.experiments.report.tables import policies
from knobwise.experiments.results.problem import CONTROLS, LEARNED
from knobwise.experiments.results.selectors import selector_decisions, selector_results

SHOTS, SEEDS, QUERIES = (1, 2, 3, 4), (0, 1, 2), 600
TWO = {
    **{"random": 0.21, "image_similarity": 0.12, "question_similarity": 0.25, "similarity": 0.37},
    **{
        "part_similarity": 0.44,
        "careful_rule": 0.55,
        "vote": 0.49,
        "best_recorded": 0.99,
        "oracle": 1.0,
    },
    **{"sft": 0.66, "rce": 0.675, "grpo_recorded": 0.7, "grpo_rounds": 0.86, "grpo_live": 0.92},
    **{
        "shuffled_recorded": 0.65,
        "shuffled_live": 0.655,
        "hidden_sft": 0.6,
        "hidden_rce": 0.605,
        "hidden_live": 0.604,
    },
}
"""Accuracy at two shots, about that of a real run."""
MORE = {1: 0.55, 2: 1.0, 3: 0.99, 4: 0.98}
"""What the number of shots multiplies it by."""


def outcomes(accuracy: dict[str, float], queries: int = QUERIES) -> dict[str, dict[int, Tensor]]:
    """A query is easy or hard for all policies alike, and a little differently in each seed."""
    hard = torch.linspace(0, 1, queries, dtype=torch.float64)
    tilt = torch.tensor([[-0.01], [0.0], [0.01]], dtype=torch.float64)
    several = (*LEARNED, *CONTROLS, "random")
    return {
        name: {
            shots: (
                hard
                < share * (MORE[shots] if name not in ("vote", "oracle") else 1)
                + tilt * (name in several)
            ).float()[: 3 if name in several else 1]
            for shots in SHOTS
        }
        for name, share in accuracy.items()
    }


@functools.cache
def table(queries: int = 40) -> BeamTable:
    return replace(small_beams(queries, pool=3)[0], name="digits <careless>")


def results_of(correct: dict[str, dict[int, Tensor]], **more: Any) -> dict[str, Any]:
    decided = {
        name: {
            n: Decided(right, None, decision_us=640.0 if name in LEARNED else None)
            for n, right in by_shots.items()
        }
        for name, by_shots in correct.items()
    }
    decisions = selector_decisions(decided, table(QUERIES), torch.arange(QUERIES), SEEDS)
    return selector_results(decisions, table(), seeds=SEEDS, trained_shots=2, **more)


@functools.cache
def written_results(accuracy: tuple[tuple[str, float | None], ...]) -> str:
    kept = {name: share for name, share in (TWO | dict(accuracy)).items() if share is not None}
    return json.dumps(results_of(outcomes(kept), test=table(41), hidden=["annotator"]))


def results(**accuracy: float | None) -> dict[str, Any]:
    """A run with these accuracies at two shots; None takes a policy out."""
    content: dict[str, Any] = json.loads(written_results(tuple(accuracy.items())))
    return content


STAGES = ("sft", "rce", "grpo_live", "shuffled_live")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Stages one after the other, each logged under its own name."""
    logged = [
        {"seed": seed, "step": 100 * number + step}
        | {f"Train/{stage}/Loss": 1 / (step + 1), f"Val/{stage}/Reward_Mean": step / 100}
        for seed in SEEDS
        for number, stage in enumerate(STAGES)
        for step in range(20)
    ]
    metrics = pl.DataFrame(logged, infer_schema_length=None).write_csv()
    return run_folder(
        tmp_path / "selector" / "first", results(), metrics, "selector:\n  version: v2\n"
    )


def test_the_page_holds_all_sections(run: Path) -> None:
    text = write_report(run).read_text()
    headings = re.findall(r"<h2>(.*?)</h2>", text.replace(page._vega(), ""))
    parts = [
        "Accuracy with 2 shots",
        "What the run shows",
        "Accuracy against shots",
        "Training",
        "Tables",
    ]
    assert headings == [*parts, "How to reproduce"]
    folded = ["Every policy, by the number of demonstrations", "Differences", "Controls"]
    assert all(f"<summary>{title}</summary>" in text for title in folded)
    assert "<b>92.0%</b>of the answers are right, with GRPO on live draws" in text
    assert "<b>+37.0 points</b>against careful-annotator rule" in text
    assert "digits &lt;careless&gt;: 40 queries, 12 candidates" in text
    assert (
        "judged on 600 held-out queries, with their own bank of 12 candidates · seeds 0, 1, 2"
        in text
    )
    assert "knobwise train experiment=selector" in text
    assert results()["profile"]["digest"] in text
    assert "version: v2" in text
    for spec in charts_of(text):
        svg_of(spec)


def test_every_number_of_every_policy_is_in_its_table(run: Path) -> None:
    text, content = write_report(run).read_text(), results()
    judged, differences, simple, controls, of_controls = rows_of(text)
    for lines, rows in ((judged, content["rows"]), (controls, content["controls"])):
        assert len(lines) == len(rows) / len(SHOTS)
        accuracies = sorted(
            (round(row["accuracy"], 3) for row in rows if row["shots"] == 2), reverse=True
        )
        assert [float(re.findall(r"<td>([\d.]+)<", line)[1]) for line in lines] == accuracies
        for row in rows:
            low, high = row["accuracy_ci95"]
            words = f"<td>{row['accuracy']:.3f}<small>[{low:.3f}, {high:.3f}]</small></td>"
            assert sum(words in line for line in lines) >= 1
    assert len(differences + simple + of_controls) == len(content["differences"]) / len(SHOTS)
    rce = next(line for line in differences if "<td>RCE<small>over SFT" in line)
    row = next(
        r
        for r in content["differences"]
        if (r["policy"], r["against"], r["shots"]) == ("rce", "sft", 2)
    )
    assert f"<td>{100 * row['difference']:+.1f}<small>[{100 * row['ci95'][0]:+.1f}, " in rce
    assert rce.endswith("<td>better</td></tr>")
    (strong,) = (line for line in judged if "class=strong" in line)
    assert "GRPO on live draws" in strong
    assert "640 µs" in strong


def test_training_is_shown_stage_by_stage(run: Path) -> None:
    curves = [spec for spec in charts_of(write_report(run).read_text()) if "title" in spec]
    shown, rest = curves[:3], curves[3:]
    assert titles_of(shown) == [f"{stage}: reward, mean" for stage in ("sft", "rce", "grpo live")]
    assert [p["step"] for p in points_of(shown[1]) if p["seed"] == "0"] == [*range(100, 120)]
    folded = {
        "shuffled live: reward, mean",
        *(f"{stage.replace('_', ' ')}: loss" for stage in STAGES),
    }
    assert set(titles_of(rest)) == folded


def test_the_charts_hold_the_numbers() -> None:
    content = results()
    drawn = result_charts(content)
    bars, lines = (page.specification(chart) for chart in drawn.values())
    (bar,) = data_of(bars)
    at_two = [row for row in [*content["rows"], *content["controls"]] if row["shots"] == 2]
    assert sorted(b["value"] for b in bar) == sorted(row["accuracy"] for row in at_two)
    assert [b["value"] for b in bar] == sorted((b["value"] for b in bar), reverse=True)
    assert {b["kind"] for b in bar} == {
        "learned",
        "simple baseline",
        "sees the answer",
        "control",
        BEST,
    }
    assert [b["name"] for b in bar if b["kind"] == BEST] == ["GRPO on live draws"]
    axis = bars["layer"][0]["encoding"]["x"]["scale"]["domain"]
    assert axis[0] == min(b["low"] for b in bar)  # where differences are visible, not at 0
    points = max(data_of(lines), key=len)
    assert len(points) == len(content["rows"])  # no controls
    named = {p["policy"]: p["name"] for p in points if p["policy"] != charts.OTHER}
    assert set(named) == {"GRPO on live draws", "RCE", "SFT", "careful-annotator rule"}
    assert any(rows == [{"shots": 2}] for rows in data_of(lines))
    assert all(png.startswith(b"\x89PNG") for png in result_images(content).values())


def test_one_number_of_shots_needs_no_chart_over_shots(tmp_path: Path) -> None:
    content = results()
    for key in ("rows", "controls", "differences"):
        content[key] = [row for row in content[key] if row["shots"] == 4]
    content["shots"] = [4]
    assert list(result_charts(content)) == ["Accuracy with 4 shots"]
    assert verdict(content)[0].startswith("With 4 shots, GRPO on live draws answers")
    assert policies(content).header == ["policy", "4 shots", "decision time"]
    assert report_of(tmp_path, content)


def test_baselines_alone_make_a_report(tmp_path: Path) -> None:
    content = results(**dict.fromkeys((*LEARNED, *CONTROLS)))
    text = report_of(tmp_path, content)
    assert (
        "No learned policy was judged. The best simple baseline is careful-annotator rule (0.550)."
        in text
    )
    assert policies(content).strong == []
    assert "<h2>Controls" not in text
    assert "<h2>Differences" not in text


def test_the_verdict_of_a_good_run() -> None:
    says = verdict(results())
    assert says[0].startswith(
        "With 2 shots, GRPO on live draws answers 92.0% of 600 held-out queries correctly (95% "
    )
    gains = [re.sub(r" \(95% interval [^)]*\)", "", words) for words in says[1:6]]
    assert gains == [
        "GRPO on live draws is better than RCE: +24.5 points; it is better than SFT: +26.0 points.",
        "GRPO on rounds of draws is better than RCE: +18.5 points; it is better than SFT: +20.0 "
        "points.",
        "GRPO on recorded groups is better than RCE: +2.5 points; it is better than SFT: +4.0 "
        "points.",
        "RCE is better than SFT: +1.5 points.",
        "GRPO on live draws is better than all 7 simple baselines; over the strongest, "
        "careful-annotator rule (0.550): "
        "+37.0 points.",
    ]
    alone = verdict(results() | {"judged_by": "recorded"})[0]
    assert alone.startswith(
        "No scorer was available, so every policy was given the recorded sequence"
    )
    assert (
        len(
            [
                words
                for words in says
                if words.startswith("Control: shuffled") and "no gain" in words
            ]
        )
        == 2
    )
    further = (
        "Trained only with 2 shots, GRPO on live draws reaches 0.507 with "
        "1, 0.910 with 3 and 0.902 with 4."
    )
    assert says[-1] == further


EVEN = {"grpo_live": 0.675, "careful_rule": 0.675}
"""No interval excludes 0."""
SIMPLE = {"careful_rule": 0.97, "vote": 0.95}
"""Two simple baselines win."""


@pytest.mark.parametrize(
    ("accuracy", "words"),
    [
        (EVEN, r"GRPO on live draws is not shown to differ from RCE: \+0.0 points \(95% interval"),
        (
            EVEN,
            r"GRPO on live draws is not shown to differ from careful-annotator rule \(0.675\); ",
        ),
        ({"grpo_live": 0.6}, r"GRPO on live draws is worse than RCE: -7.5 points \(95% interval "),
        (SIMPLE, "^2 of the 7 simple baselines do better than GRPO on live draws: "),
        (SIMPLE, r"careful-annotator rule \(0.970\), by 5.0 points; vote without a model"),
        (SIMPLE, r"vote without a model \(0.950\), by 3.0 points\.$"),
        (
            {"shuffled_live": 0.8},
            r"shuffled rewards on live draws against SFT: \+14.0 points .*, an unexpected gain",
        ),
        (
            {"shuffled_live": 0.67},
            r"on live draws against SFT: \+1.0 .*but -0.5 against RCE, its start: no gain",
        ),
        ({"shuffled_live": 0.66}, r"against SFT: \+0.0 points .*, no gain, as expected"),
        (
            {"hidden_live": 0.6},
            "without the annotator, GRPO against SFT: .0.0 points .*the gain vanishes",
        ),
        (
            {"hidden_live": 0.7},
            r"GRPO against SFT: \+10.0 points .*with it, \+26.0: the gain shrinks, but part of it",
        ),
        (
            {"hidden_live": 0.86},
            "the gain does not vanish, so it is not shown to come from the annotator",
        ),
        ({"grpo_live": 0.66, "hidden_live": 0.6}, "there is no gain that could vanish"),
    ],
)
def test_the_verdict_says_what_is_shown_and_whether_controls_behave(
    accuracy: dict[str, float], words: str
) -> None:
    assert any(re.search(words, sentence) for sentence in verdict(results(**accuracy)))


def test_queries_that_were_left_out_are_counted(run: Path) -> None:
    correct = outcomes(TWO)
    for by_shots in correct.values():
        by_shots[4][:, :10] = torch.nan
    text = report_of(run, results_of(correct))
    assert (
        "for lack of a recorded sequence: 590 with 4. Every policy was judged on the same ones."
        in text
    )
    assert "own bank" not in text


def test_results_are_printed_without_cutting_anything_off() -> None:
    content = results()
    lines = printed(print_results, content).splitlines()
    assert lines[0].split("  ")[0] == "policy"
    assert lines[0].endswith("decision time")
    assert [line.split("  ")[0] for line in lines[1:15]] == [
        row[0] for row in policies(content).rows
    ]
    assert lines[15:] == verdict(content)
    for width in (80, 100, 140):
        text = printed(print_results, content, width)
        assert "\x1b[1mGRPO on live draws" in text
        assert "2 shots (trained)" in text
