"""What holds for every page: colours, escaping, nothing from a network."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from jinja2 import ChoiceLoader, DictLoader
from page_parts import points_of

from knobwise.experiments.report import charts, page
from knobwise.experiments.report.page import HUE_OF, HUES, domain
from knobwise.experiments.report.words import POLICIES, cell, interval, number, policy_name
from knobwise.experiments.results.problem import DECISION, GAP, OVER_MIX, UTILITY

ATTACK = "</script><script>alert(1)</script><!--"


def test_a_policy_has_the_same_colour_whatever_it_is_drawn_with() -> None:
    first, second = (domain([*names, "oracle (upper bound)"]) for names in (["learned controller"], ["SFT", "a run"]))
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
    assert policy_name("hidden_sft", {"hidden": ["crowd", "image"]}) == "SFT, crowd and image hidden"
    assert policy_name("my_own") == "my own"


def test_no_text_leaves_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = """{% from "parts.html.j2" import figure, folded, table %}
    {{ figure(chart, words) }}{{ table([words], [[words]]) }}{{ folded(words, "<i>x</i>" | safe) }}"""
    pages = page.templates()
    monkeypatch.setattr(pages, "loader", ChoiceLoader([DictLoader({"attack": template}), pages.loader]))
    chart = charts.plane([{"label": ATTACK, "accuracy": 0.5, "latency_ms": 1.0}])
    text = page.render_page(tmp_path / "page.html", "attack", chart=chart, words=ATTACK).read_text()
    assert ATTACK not in text
    assert "<i>x</i>" in text
    (embedded,) = re.findall(r'<script type="application/json">(.*?)</script>', text, re.S)
    assert "<" not in embedded
    assert "\\u003c/script\\u003e" in embedded
    assert points_of(json.loads(embedded))[0]["label"] == ATTACK


@pytest.mark.parametrize(
    ("metric", "text"),
    [(UTILITY, "0.500\n[0.400, 0.600]"), (GAP, "12%"), (OVER_MIX, "+0.010\n[-0.010, 0.030]"), (DECISION, "12.5 µs")],
)
def test_cells(metric: object, text: str) -> None:
    row = {"utility": 0.5, "utility_ci95": [0.4, 0.6], "gap_closed": 0.12, "gap_closed_ci95": [1, 1]}
    row |= {"over_static_mix": 0.01, "over_static_mix_ci95": [-0.01, 0.03], "decision_us_p50": 12.5}
    assert cell(row, metric) == text  # type: ignore[arg-type]
    assert (number(None, ".1%"), number(-1e-9, "+.2f"), interval(None, ".1f")) == ("–", "+0.00", "")
