"""What holds for every page; the page of a profile, against numbers worked out by hand or the slow
way."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import small_table, table_of
from jinja2 import ChoiceLoader, DictLoader
from page_parts import charts_of, points_of, printed, svg_of

from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.tables.profile_table import Knob, ProfileTable
from knobwise.experiments.report import charts, page
from knobwise.experiments.report.inspection import inspect_table, print_inspection, write_inspection
from knobwise.experiments.report.page import HUE_OF, HUES, domain
from knobwise.experiments.report.words import POLICIES, cell, interval, number, policy_name
from knobwise.experiments.results.problem import DECISION, GAP, OVER_MIX, UTILITY

ATTACK = "</script><script>alert(1)</script><!--<script>"


def test_a_policy_has_the_same_colour_whatever_it_is_drawn_with() -> None:
    first, second = (
        domain([*names, "oracle (upper bound)"])
        for names in (["learned controller"], ["SFT", "a run"])
    )
    light, dark = (theme["range"]["category"] for theme in page.THEMES.values())
    assert len(first) == len(second) == len(light) == len(dark)
    place = first.index("oracle (upper bound)")
    assert second.index("oracle (upper bound)") == place
    assert (light[place], dark[place]) == tuple(HUES[HUE_OF["oracle (upper bound)"]])
    assert HUE_OF["oracle (upper bound)"] != HUE_OF["learned controller"]
    assert second.index("a run") not in (place, second.index("SFT"), list(HUES).index("grey"))
    assert domain(["others", *map(str, range(20))])[list(HUES).index("grey")] == "others"


def test_every_policy_has_a_name_a_colour_and_a_description() -> None:
    assert {tuple(words) for words in POLICIES.values()} == {("name", "colour", "description")}
    assert {words["colour"] for words in POLICIES.values()} <= set(HUES)
    assert HUE_OF[policy_name("ridge")] == POLICIES["ridge"]["colour"]
    assert (
        policy_name("hidden_sft", {"hidden": ["crowd", "image"]}) == "SFT, crowd and image hidden"
    )
    assert policy_name("my_own") == "my own"


def test_no_text_leaves_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = """{% from "parts.html.j2" import figure, folded, table %}
    {{ figure(chart, words) }}{{ table([words], [[words]]) }}{{ folded(words, "<i>x</i>" | safe) }}"""
    pages = page.templates()
    monkeypatch.setattr(
        pages, "loader", ChoiceLoader([DictLoader({"attack": template}), pages.loader])
    )
    chart = charts.plane([{"label": ATTACK, "accuracy": 0.5, "latency_ms": 1.0}])
    text = page.render_page(tmp_path / "page.html", "attack", chart=chart, words=ATTACK).read_text()
    assert ATTACK not in text
    assert "<i>x</i>" in text
    (embedded,) = re.findall(r'<script type="application/json">(.*?)</script>', text, re.S)
    assert "<" not in embedded
    assert "\\u003c/script\\u003e" in embedded
    assert points_of(json.loads(embedded))[0]["label"] == ATTACK


def test_a_page_runs_no_code_from_words_and_loads_nothing(tmp_path: Path) -> None:
    text = page.render_page(tmp_path / "page.html", "page.html.j2", title="t").read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', text)
    sources = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert sources["default-src"] == "'none'"
    assert sources["script-src"] == "'unsafe-inline'"  # the page itself; no 'unsafe-eval'
    assert re.search(r"vegaEmbed\(.*ast: true,.*\);", text, re.S)


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (UTILITY, "0.500\n[0.400, 0.600]"),
        (GAP, "12%"),
        (OVER_MIX, "+0.010\n[-0.010, 0.030]"),
        (DECISION, "12.5 µs"),
    ],
)
def test_cells(metric: object, text: str) -> None:
    row = {
        "utility": 0.5,
        "utility_ci95": [0.4, 0.6],
        "gap_closed": 0.12,
        "gap_closed_ci95": [1, 1],
    }
    row |= {"over_static_mix": 0.01, "over_static_mix_ci95": [-0.01, 0.03], "decision_us_p50": 12.5}
    assert cell(row, metric) == text  # type: ignore[arg-type]
    assert (number(None, ".1%"), number(-1e-9, "+.2f"), interval(None, ".1f")) == ("–", "+0.00", "")


# -- a profile -------------------------------------------------------------------------------------


NAN = torch.nan


def by_hand() -> ProfileTable:
    """Four samples, three of the four combinations of two knobs, one hole."""
    accuracy = [[0.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.5, 0.5, NAN], [0.0, 0.0, 1.0]]
    latency = [[10.0, 20.0, 40.0], [10.0, 20.0, 40.0], [30.0, 60.0, NAN], [10.0, 20.0, 40.0]]
    return replace(
        table_of(accuracy, latency),
        knobs=(Knob("crops", (2, 6)), Knob("mode", ("fast", "slow"))),
        configurations=torch.tensor([[0, 0], [1, 0], [1, 1]]),
        features={"image": torch.tensor([[1.0, 2.0], [1.0, NAN], [1.0, 3.0], [1.0, 4.0]])},
        notes=("1 row was skipped",),
    )


def test_facts_worked_out_by_hand() -> None:
    facts = inspect_table(by_hand())
    assert (facts["samples"], facts["configurations"], facts["grid"]) == (4, 3, 4)
    assert facts["coverage"] == pytest.approx(11 / 12)
    assert facts["config_dependent_share"] == 0.5  # the first and the last
    # latencies 10, 10, 30, 10: mean 15, deviation √75; twice as long: the same ratio; 40, 40, 40:
    # none
    assert facts["latency_cv_within_configuration"] == pytest.approx((2 * 75**0.5 / 15 + 0) / 3)
    assert facts["knobs"]["crops"]["values"] == [2, 6]
    assert facts["knobs"]["crops"]["accuracy"] == pytest.approx([1.5 / 4, 5.5 / 7])
    assert facts["knobs"]["crops"]["latency_ms"] == pytest.approx([60 / 4, 240 / 7])
    assert facts["knobs"]["mode"]["values"] == ["fast", "slow"]
    assert facts["knobs"]["mode"]["accuracy"] == pytest.approx([4 / 8, 1.0])
    assert facts["pareto"] == [0, 1, 2]
    assert facts["features"] == [{"name": "image", "width": 2, "missing": 0.125, "constant": 1}]
    assert facts["digest"] == by_hand().digest
    assert facts["notes"] == ["1 row was skipped"]
    warnings = " ".join(facts["warnings"])
    assert "Only 4 samples" in warnings
    assert "8.3% of the cells were not profiled" in warnings
    assert "12.5% of the values are missing" in warnings
    assert "1 of 2 columns never vary" in warnings


def test_headroom_worked_out_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = torch.tensor([10.0, 25.0, 40.0])
    monkeypatch.setattr(
        "knobwise.experiments.report.inspection.default_budgets", lambda table: budgets
    )
    facts = inspect_table(by_hand())
    # at 10 ms only the first configuration is in time, for three samples: 0 + 1 + 0 of four
    # at 25 ms the second is right for the first two of four; at 40 ms the third for all three it
    # was profiled for
    assert facts["headroom"] == {
        "budgets_ms": [10.0, 25.0, 40.0],
        "budget_aware_static": pytest.approx([1 / 4, 2 / 4, 1.0]),
        "oracle": pytest.approx([1 / 4, 2 / 4, 3.5 / 4]),
    }
    assert [c["label"] for c in facts["static_choices"]] == [by_hand().label(i) for i in range(3)]
    assert facts["feasible_share"] == [0.75, 0.75, 1.0]


@pytest.mark.parametrize("holes", [0.0, 0.5])
def test_facts_agree_with_the_slow_way(holes: float) -> None:
    table = small_table(40, seed=3, holes=holes)
    facts, budgets = inspect_table(table), default_budgets(table).tolist()
    cells = [(i, c) for i in range(40) for c in range(12) if table.mask[i, c]]
    for place, knob in enumerate(table.knobs):
        for v in range(len(knob.values)):
            of_value = [(i, c) for i, c in cells if table.configurations[c, place] == v]
            for name in ("accuracy", "latency_ms"):
                expected = np.mean([float(getattr(table, name)[cell]) for cell in of_value])
                assert facts["knobs"][knob.name][name][v] == pytest.approx(expected)
    for b, budget in enumerate(budgets):
        utility = {
            cell: float(table.accuracy[cell]) * (float(table.latency_ms[cell]) <= budget)
            for cell in cells
        }
        static = max(
            np.mean([u for (_, c), u in utility.items() if c == chosen]) for chosen in range(12)
        )
        oracle = np.mean(
            [max(u for (i, _), u in utility.items() if i == sample) for sample in range(40)]
        )
        assert facts["headroom"]["budget_aware_static"][b] == pytest.approx(static)
        assert facts["headroom"]["oracle"][b] == pytest.approx(oracle)
    spread = [table.latency_ms[table.mask[:, c], c].numpy() for c in range(12)]
    expected = np.mean([x.std() / x.mean() for x in spread])
    assert facts["latency_cv_within_configuration"] == pytest.approx(expected, rel=1e-5)
    assert json.loads(json.dumps(facts, allow_nan=False))["samples"] == 40


def changed(**what: Any) -> ProfileTable:
    return replace(small_table(250), **what)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (changed(features={}), "No features"),
        (changed(accuracy=torch.ones(250, 12)), "Accuracy hardly depends on the configuration"),
        (changed(accuracy=torch.ones(250, 12)), "choosing per input can gain next to nothing"),
        (
            changed(latency_ms=torch.arange(1.0, 13).repeat(250, 1)),
            "Latency is the same for every sample",
        ),
        (changed(), ""),
    ],
)
def test_the_warnings_name_what_is_wrong_with_a_profile(table: ProfileTable, words: str) -> None:
    warnings = inspect_table(table).pop("warnings")
    assert any(words in line for line in warnings) if words else warnings == []


def test_a_knob_without_effect_is_named() -> None:
    table = small_table(250)
    twice = torch.tensor(
        [[*row, extra] for row in table.configurations.tolist() for extra in (0, 1)]
    )
    columns = {
        k: getattr(table, k).repeat_interleave(2, 1) for k in ("accuracy", "latency_ms", "mask")
    }
    knobs = (*table.knobs, Knob("colour", ("blue", "red")))
    facts = inspect_table(replace(table, configurations=twice, knobs=knobs, **columns))
    assert facts["warnings"] == ["Knob colour changes neither accuracy nor latency on average."]


def one_knob() -> ProfileTable:
    accuracy, latency = torch.rand(2, 20, 201, generator=torch.Generator().manual_seed(0)).tolist()
    knobs = (Knob("solver", tuple(f"<s{i:03d}>" for i in range(201))),)
    table = table_of(accuracy, latency)
    return replace(table, name="<solvers>", knobs=knobs, latency_ms=1e5 * table.latency_ms)


@pytest.mark.parametrize(
    ("table", "figures"), [(by_hand(), 8), (small_table(30, holes=0.4), 12), (one_knob(), 5)]
)
def test_page_is_whole_and_its_charts_can_be_drawn(
    table: ProfileTable, figures: int, tmp_path: Path
) -> None:
    path = write_inspection(inspect_table(table), tmp_path / "new" / "profile.html")
    text = path.read_text()
    assert path.stat().st_size < 2_000_000
    assert "default-src 'none'" in text
    specs = charts_of(text)
    assert len(specs) == figures  # the last is the coverage, where there are holes
    for spec in specs:
        svg_of(spec, theme="light")
    seen = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert table.digest in seen
    assert "<solvers>" not in seen
    assert "<s001>" not in seen


def test_facts_are_printed_plainly_where_there_is_no_terminal() -> None:
    facts = inspect_table(by_hand())
    text = printed(print_inspection, facts)
    size = "4 samples × 3 configurations (of 4 combinations of knob values)"
    assert all(words in text for words in (size, "91.7% of the cells", facts["digest"]))
    for line in (*facts["warnings"], *facts["notes"]):
        assert f"- {line}" in text
    assert re.search(r"crops +6 +0\.786 +34\.3 ms", text)
    assert "Notes of the reader" in text
