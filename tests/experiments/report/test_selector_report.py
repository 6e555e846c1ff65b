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
    titles_of,
)

from knobwise.agents.selector.evaluation import Decided
from knobwise.experiments.evidence.selectors import (
    Demonstrations,
    selector_decisions,
    selector_results,
)
from knobwise.experiments.evidence.task import CONTROLS, LEARNED
from knobwise.experiments.report.comparison import Comparison
from knobwise.experiments.report.content import main_table
from knobwise.experiments.report.figures import figures_of
from knobwise.experiments.report.report import print_results, result_images, write_report
from knobwise.experiments.report.runs import Run
from knobwise.experiments.report.sentences import Sentence
from knobwise.experiments.report.verdict import shown_by_run, verdict
from knobwise.experiments.report.words import policy_name
from knobwise.experiments.settings.beams import SelectorData

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
    assert headings_of(text) == [
        *("What it shows", "Accuracy by number of shots", "Training, on validation queries"),
        "Details",
    ]
    assert folded_in(text) == [
        *("Every number of shots", *(f"{shots} shot{'s' * (shots > 1)}" for shots in MORE)),
        *("Differences", "Negative controls", "What the words mean", "How to reproduce"),
        "The resolved configuration (config.yaml)",
    ]
    for part in (
        "<b>+37.0 points</b>of accuracy against careful",
        "<b>0.920</b>",
        "<b>640 µs</b>",
        "digits &lt;careless&gt;: 40 samples",
        "judged on 600 queries",
        "bank of 12",
        "3 seeds (0, 1, 2)",
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
    told = said(shown_by_run(content))
    assert "no_policy" in told
    assert told["best_baseline"]["policy"].startswith("careful-annotator rule (0.550 [")
    assert main_table(one(content)).strong == []
    assert {"Negative controls", "Differences"}.isdisjoint(folded_in(text))


EVEN = {"grpo_live": 0.675, "careful_rule": 0.675}
"""No interval excludes 0."""


@pytest.mark.parametrize(
    ("accuracy", "name", "fields", "is_control"),
    [
        ({}, "better", (LIVE, "RCE", "+24.5 "), False),
        ({}, "better", (LIVE, "SFT", "+26.0 "), False),
        (EVEN, "no_difference", (LIVE, "RCE", "0.0 "), False),
        ({"grpo_live": 0.6}, "worse", (LIVE, "RCE", "-7.5 "), False),
        (
            {"shuffled_live": 0.8},
            "better",
            ("shuffled, live draws", "SFT", "+14.0 "),
            True,
        ),
        (
            {"shuffled_live": 0.67},
            "worse",
            ("shuffled, live draws", "RCE", "-0.5 "),
            True,
        ),
        (
            {"hidden_live": 0.7},
            "better",
            ("GRPO, annotator hidden", "SFT, annotator hidden", "+10.0 "),
            True,
        ),
    ],
)
def test_the_verdict_says_which_stage_is_better_and_which_are_controls(
    accuracy, name, fields, is_control
):
    policy, against, gain = fields
    (stage,) = [
        sentence
        for sentence in shown_by_run(results(**accuracy))
        if (sentence.fields.get("policy"), sentence.fields.get("against")) == (policy, against)
    ]
    assert stage.name == name
    assert stage.fields["gain"].startswith(gain)
    assert ("control" in said([stage])) == is_control


@pytest.mark.parametrize(
    ("accuracy", "better", "worse"),
    [({}, 7, 0), ({"careful_rule": 0.97, "vote": 0.95}, 5, 2)],
)
def test_the_verdict_says_what_is_answered_and_how_many_baselines_answer_less(
    accuracy, better, worse
):
    told = said(shown_by_run(results(**accuracy)))
    counts = {"count": 7, "better": better, "worse": worse}
    assert told["of_baselines"] == counts
    answers = {"shots": "2 shots", "policy": LIVE, "share": "92.0%", "queries": "600"}
    assert answers.items() <= told["answers"].items()
    if not accuracy:
        assert told["over_best_baseline"]["gain"].startswith("+37.0 ")
        assert told["over_best_baseline"]["baseline"].startswith("careful-annotator rule (0.550")


def test_what_limits_the_results_is_said(tmp_path):
    names = [sentence.name for sentence in shown_by_run(results())]
    recorded = [each.name for each in shown_by_run(results() | {"judged_by": "recorded"})]
    assert recorded == [names[0], "judged_by_recorded", *names[1:]]
    decided = outcomes(TWO)
    for by_shots in decided.values():
        by_shots[4].correct[:, :10] = torch.nan
    content = results_of(decided)
    at_4 = Sentence("left_out_at", queries="590", shots="4 shots")
    assert said(shown_by_run(content))["left_out"] == {"queries": str(at_4), "total": "600"}
    assert str(at_4) in report_of(tmp_path, content)


def test_a_terminal_shows_the_table_and_the_verdict():
    text = printed(print_results, results(), 80)
    assert f"\x1b[1m{LIVE}" in text
    _, *lines = printed(print_results, results()).splitlines()
    assert lines[len(main_table(one(results())).rows) :] == verdict(results())
