"""The selector's report says what results.json says, and is honest where intervals hold 0."""

import functools
import itertools
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
from knobwise.experiments.compare.comparison import Comparison
from knobwise.experiments.compare.runs import Run
from knobwise.experiments.evidence.selectors import (
    Demonstrations,
    selector_decisions,
    selector_results,
)
from knobwise.experiments.evidence.task import CONTROLS, LEARNED
from knobwise.experiments.report import page
from knobwise.experiments.report.content import main_table
from knobwise.experiments.report.figures import figures_of
from knobwise.experiments.report.report import (
    print_results,
    result_images,
    verdict,
    write_report,
)
from knobwise.experiments.settings.beams import SelectorData
from knobwise.experiments.wording.words import policy_name

SEEDS, QUERIES = (0, 1, 2), 600
LIVE = "GRPO on live draws"
TWO = {
    "random": 0.21,
    "image_similarity": 0.12,
    "question_similarity": 0.25,
    "similarity": 0.37,
    "part_similarity": 0.44,
    "careful_rule": 0.55,
    "vote": 0.49,
    "best_recorded": 0.99,
    "oracle": 1.0,
    "sft": 0.66,
    "rce": 0.675,
    "grpo_recorded": 0.7,
    "grpo_rounds": 0.86,
    "grpo_live": 0.92,
    "shuffled_recorded": 0.65,
    "shuffled_live": 0.655,
    "hidden_sft": 0.6,
    "hidden_rce": 0.605,
    "hidden_live": 0.604,
}
"""Accuracy at two shots, about that of a real run."""
MORE = {1: 0.55, 2: 1.0, 3: 0.99, 4: 0.98}
"""What the number of shots multiplies it by."""


def outcomes(accuracy):
    """A query is easy or hard for all policies alike, and a little differently in each seed."""
    hard = torch.linspace(0, 1, QUERIES, dtype=torch.float64)
    tilt = torch.tensor([[-0.01], [0.0], [0.01]], dtype=torch.float64)
    decided = {}
    for name, share in accuracy.items():
        several = name in (*LEARNED, *CONTROLS, "random")
        micros = 640.0 if name in LEARNED else None
        decided[name] = {}
        for shots, more in MORE.items():
            limit = share * (more if name not in ("vote", "oracle") else 1)
            right = hard < limit + (tilt if several else tilt[1:2])
            decided[name][shots] = Decided(right.float(), None, decision_us=micros)
    return decided


@functools.cache
def table(queries=40):
    return replace(small_beams(queries, pool=3)[0], name="digits <careless>")


def results_of(decided):
    evaluator = Demonstrations(table(QUERIES), torch.arange(QUERIES), tuple(MORE))
    decisions = selector_decisions(evaluator, decided, SEEDS)
    data = SelectorData(table(), None, None, table(41), None, None, None, "scorer")
    return selector_results(decisions, data, SEEDS, 2, ["annotator"])


def one(content):
    """A comparison of one run, without files."""
    return Comparison([Run(content)])


@functools.cache
def written_results(accuracy):
    kept = {name: share for name, share in (TWO | dict(accuracy)).items() if share is not None}
    return json.dumps(results_of(outcomes(kept)))


def results(**accuracy):
    """Return a run with these accuracies at two shots; None takes a policy out."""
    return json.loads(written_results(tuple(accuracy.items())))


STAGES = ("sft", "rce", "grpo_live", "shuffled_live")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The report of a run of stages one after the other, each logged under its own name."""
    logged = []
    for seed, (stage, name), step in itertools.product(SEEDS, enumerate(STAGES), range(20)):
        values = {f"Train/{name}/Loss": 1 / (step + 1), f"Val/{name}/Reward_Mean": step / 100}
        logged.append({"seed": seed, "step": 100 * stage + step} | values)
    metrics = pl.DataFrame(logged, infer_schema_length=None).write_csv()
    folder = tmp_path_factory.mktemp("runs") / "selector" / "first"
    return write_report(run_folder(folder, results(), metrics, {"version": "v2"})).read_text()


def test_the_page_holds_all_sections(text):
    headings = re.findall(r"<h2>(.*?)</h2>", text.replace(page._vega(), ""))
    assert headings == [
        *("What it shows", "Accuracy by number of shots", "Training, on validation queries"),
        "Details",
    ]
    for part in (
        "<summary>Every number of shots</summary>",
        "<summary>Differences</summary>",
        "<summary>Negative controls</summary>",
        "<b>+37.0 points</b>of accuracy against careful",
        "<b>0.920</b>",
        "<b>640 µs</b>",
        "digits &lt;careless&gt;: 40 samples",
        "judged on 600 queries",
        "bank of 12",
        "seeds 0, 1, 2",
        "train experiment=selector",
        results()["profile"]["digest"],
        "version: v2",
    ):
        assert part in text
    svg_of(*charts_of(text))


def test_every_number_of_every_policy_is_in_its_table(text):
    content = results()
    first, *at_shots, differences, controls = rows_of(text)
    judged = zip(sorted(MORE), at_shots, strict=True)
    for shots, lines in ((2, first), *judged):
        rows = [row for row in content["rows"] if row["shots"] == shots]
        values = [float(re.findall(r"<td>([\d.]+)<", line)[0]) for line in lines]
        assert sorted(values) == sorted(round(row["accuracy"], 3) for row in rows)
        for row in rows:
            low, high = row["accuracy_ci95"]
            cell = f"<td>{row['accuracy']:.3f}<small>[{low:.3f}, {high:.3f}]</small></td>"
            assert cell in "".join(lines)
    assert len(controls) == len(content["controls"])
    for row, line in zip(content["differences"], differences, strict=True):
        low, high = (f"{100 * end:z.1f}" for end in row["ci95"])
        assert f"<td>{row['shots']}</td>" in line
        assert f"<td>{100 * row['difference']:z.1f}<small>[{low}" in line
        assert policy_name(row["policy"], content) in line
    assert "class=strong" in first[[LIVE in line for line in first].index(True)]


def test_training_is_shown_stage_by_stage(text):
    curves = [spec for spec in charts_of(text) if "title" in spec]
    titles = [" ".join(title) for title in titles_of(curves)]
    # controls are no stages
    assert titles == ["sft: reward, mean", "rce: reward, mean", "grpo live: reward, mean"]
    steps = sorted({p["step"] for p in points_of(curves[1]) if "step" in p})
    assert steps == [*range(100, 120)]


def test_the_charts_hold_the_numbers():
    content = results()
    (figure,) = figures_of(one(content)).values()
    dots, lines = specifications(figure)
    assert {(p["name"], p["value"]) for p in points_of(dots)} == {
        (policy_name(row["policy"], content), row["accuracy"])
        for row in [*content["rows"], *content["controls"]]
        if row["shots"] == 2
    }
    points = max(data_of(lines), key=len)
    assert {(p["policy"], p["shots"], p["accuracy"]) for p in points} == {
        (policy_name(row["policy"]), row["shots"], row["accuracy"])
        for row in content["rows"]
        if row["policy"] in ("grpo_live", "rce", "sft", "careful_rule")
    }
    assert [{"shots": 2}] in data_of(lines)
    assert all(png.startswith(b"\x89PNG") for png in result_images(content).values())


def test_one_number_of_shots_needs_no_chart_over_shots(tmp_path):
    content = results() | {"shots": [4]}
    for key in ("rows", "controls", "differences"):
        content[key] = [row for row in content[key] if row["shots"] == 4]
    (figure,) = figures_of(one(content)).values()
    assert len(figure.charts) == 1
    assert main_table(one(content)).header == ["policy", "accuracy", "decision time"]
    assert report_of(tmp_path, content)


def test_baselines_alone_make_a_report(tmp_path):
    content = results(**dict.fromkeys((*LEARNED, *CONTROLS)))
    text = report_of(tmp_path, content)
    assert re.search(r"<p class=lead>[^<]*careful-annotator rule \(0.550 \[", text)
    assert main_table(one(content)).strong == []
    assert not re.findall("<summary>(?:Negative controls|Differences)", text)


EVEN = {"grpo_live": 0.675, "careful_rule": 0.675}
"""No interval excludes 0."""


@pytest.mark.parametrize(
    ("accuracy", "line"),
    [
        ({}, r"With 2 shots.*GRPO on live draws answers 92.0% .* of 600.* \+37.0 .*rule \(0.550"),
        ({}, r"GRPO on live draws is better than RCE: \+24.5 "),
        ({}, r"GRPO on live draws is better than SFT: \+26.0 "),
        ({}, "Of 7 simple .*than 7 and worse than 0"),
        (EVEN, r".*GRPO on live draws and RCE: 0.0"),
        ({"grpo_live": 0.6}, "GRPO on live draws is worse than RCE: -7.5"),
        ({"careful_rule": 0.97, "vote": 0.95}, "Of 7 .*than 5 and worse than 2"),
        ({"shuffled_live": 0.8}, r"shuffled, live draws is better than SFT: \+14.0 .*control"),
        ({"shuffled_live": 0.67}, r"shuffled, live draws is worse than RCE: -0.5 .*control"),
        (
            {"hidden_live": 0.7},
            r"GRPO, annotator hidden is better than SFT, .*: \+10.0 .*control",
        ),
    ],
)
def test_the_verdict_says_what_is_shown_and_which_are_controls(accuracy, line):
    assert any(re.match(line, each) for each in verdict(results(**accuracy)))


def test_what_limits_the_results_is_said(tmp_path):
    recorded = verdict(results() | {"judged_by": "recorded"})
    assert len(recorded) == len(verdict(results())) + 1
    assert recorded[1] not in verdict(results())
    decided = outcomes(TWO)
    for by_shots in decided.values():
        by_shots[4].correct[:, :10] = torch.nan
    assert "590 with 4" in report_of(tmp_path, results_of(decided))


def test_a_terminal_shows_the_table_and_the_verdict():
    text = printed(print_results, results(), 80)
    assert f"\x1b[1m{LIVE}" in text
    _, *lines = printed(print_results, results()).splitlines()
    assert lines[len(main_table(one(results())).rows) :] == verdict(results())
