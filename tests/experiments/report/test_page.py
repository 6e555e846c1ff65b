"""What holds for every page and its charts."""

import json
import re
import shutil
import subprocess

import altair as alt
import numpy as np
import polars as pl
import pytest
from page_parts import points_of, svg_of

from knobwise.agents.teacher.regressors import FAMILIES
from knobwise.common.words import format_number
from knobwise.experiments.evidence.task import DECISION, GAP, OVER_MIX, UTILITY
from knobwise.experiments.report import charts, page
from knobwise.experiments.report.page import HUE_OF, HUES, Figure, colours_of, specification
from knobwise.experiments.report.tables import Content, Folded, Table, Tile
from knobwise.experiments.report.words import POLICIES, cell, format_interval, policy_name

ATTACK = "</script><script>alert(1)</script><!--<script>"
CHROMIUM = shutil.which("chromium")


def test_a_policy_has_the_same_colour_whatever_it_is_drawn_with():
    oracle = "oracle (upper bound)"
    first = colours_of(["learned controller", oracle])
    second = colours_of(["SFT", "run", oracle])
    assert first[oracle] == second[oracle] == HUES[HUE_OF[oracle]]
    assert len({*first.values(), *second.values()}) == 3  # the run may be blue
    assert HUES["grey"] not in colours_of(map(str, range(20))).values()


@pytest.mark.parametrize("baseline", [*FAMILIES, "latency_only", "lookup_table", "best_static"])
def test_the_best_baseline_is_told_apart_from_what_is_drawn_beside_it(baseline):
    beside = ("controller", "budget_aware_static", "oracle")
    assert HUE_OF[baseline] not in {HUE_OF[policy] for policy in beside}


def contrast(*colours):
    """Return the ratio of luminances of two colours, as in WCAG 2."""
    shares = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in colours])
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    low, high = np.sort(linear @ [0.2126, 0.7152, 0.0722])
    return (high + 0.05) / (low + 0.05)


def test_every_colour_can_be_seen_on_white_and_on_black():
    for colour in HUES.values():
        assert min(contrast(colour, back) for back in ("#ffffff", "#16181c")) >= 3


def test_every_policy_has_a_name_a_colour_and_a_description():
    assert {tuple(words) for words in POLICIES.values()} == {("name", "colour", "description")}
    assert {words["colour"] for words in POLICIES.values()} <= set(HUES)
    hidden = policy_name("hidden_sft", {"hidden": ["crowd", "image"]})
    assert [hidden, policy_name("my_own")] == ["SFT, crowd and image hidden", "my own"]


def test_a_page_loads_nothing_and_runs_no_code_from_words(tmp_path):
    chart = charts.plane([{"label": ATTACK, "accuracy": 0.5, "latency_ms": 1.0}])
    table = Table([ATTACK], [[ATTACK]])
    blocks = [ATTACK, [ATTACK], {ATTACK: ATTACK}, table]
    tiles = [Tile(ATTACK, ATTACK, ATTACK)]
    details = [Folded(ATTACK, blocks), Folded(ATTACK, [*blocks, "", [], None], open=True)]
    head = (ATTACK, ATTACK, ATTACK, table, [ATTACK], [ATTACK, ""], tiles, details)
    sections = {ATTACK: [Figure(chart, ATTACK), *blocks], "empty": [[], ""]}
    path = page.render_page(tmp_path / "p.html", Content(*head), sections)
    text = path.read_text()
    assert ATTACK not in text
    assert "empty" not in text.split("<main>")[1].split("</main>")[0]
    (embedded,) = re.findall(r'<script type="application/json">(.*?)</script>', text, re.S)
    assert "<" not in embedded
    assert points_of(json.loads(embedded))[0]["label"] == ATTACK
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', text)
    rules = [rule.strip() for rule in policy.split(";")]
    # the page itself; no 'unsafe-eval'
    assert {"default-src 'none'", "script-src 'unsafe-inline'"} <= {*rules}
    assert re.search(r"vegaEmbed\(.*ast: true,.*\);", text, re.S)
    assert not re.search(r"<(link|iframe|script[^>]* src)", text.replace(page._vega(), ""))


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_table_that_is_wider_than_its_place_says_that_it_scrolls(tmp_path):
    blocks = [Table(["a"], [["1"]]), Table([f"column {i}" for i in range(20)], [["1"] * 20])]
    content = Content("page", "name", "", details=[Folded("Tables", blocks, open=True)])
    path = page.render_page(tmp_path / "p.html", content, {})
    options = ["--headless", "--no-sandbox", f"--user-data-dir={tmp_path}/user", "--dump-dom"]
    words = [CHROMIUM, *options, "--window-size=500,800", path.as_uri()]
    shown = subprocess.run(words, capture_output=True, text=True, check=True, timeout=100).stdout
    assert re.findall('<div class="(wide.*?)">', shown) == ["wide", "wide scrolls"]
    assert ".scrolls::before" in shown


def test_the_script_of_the_charts_leaves_nothing_in_the_home(tmp_path, monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    assert "vegaEmbed" in page._vega.__wrapped__()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("metric", "value", "ci95", "text"),
    [
        (UTILITY, 0.5, [0.4, 0.6], "0.500\n[0.400, 0.600]"),
        (GAP, 0.12, [1, 1], "12%"),
        (OVER_MIX, 0.01, [-0.01, 0.03], "+0.010\n[-0.010, 0.030]"),
        (DECISION, 12.5, None, "12.5 µs"),
    ],
)
def test_cells(metric, value, ci95, text):
    assert cell({metric.key: value, f"{metric.key}_ci95": ci95}, metric) == text
    assert cell({}, metric) == "–"


def test_numbers_without_a_value_or_that_round_to_nothing():
    assert (
        format_number(0.004, "+.1f"),
        format_number(-0.04, "+.1f"),
        format_number(0.05001, "+.1f"),
    ) == (
        "0.0",
        "0.0",
        "+0.1",
    )
    assert (format_number(-1e-9, "+.2f"), format_interval(None, ".1f")) == ("0.00", "")


# -- charts ----------------------------------------------------------------------------------------


def test_dots_are_on_their_lines():
    names = ["a", "<b>'", 'c"']
    columns = {"budget_ms": [1.0, 2.0] * 3, "utility": [0.5, 0.7] * 3}
    rows = pl.DataFrame({"policy": [n for n in names for _ in range(2)], **columns})
    spec = page.specification(charts.by_condition(rows, "budget_ms", "utility", "utility"))
    alt.Chart.from_dict(spec)
    svg = svg_of(spec)
    dots = re.findall(r'translate\(([\d.]+),([\d.]+)\)" d="M3.87', svg)
    (ends,) = set(re.findall(r'line mark" d="M([\d.]+),([\d.]+)L([\d.]+),([\d.]+)"', svg))
    places = {(round(float(x)), round(float(y))) for x, y in dots}
    x, y, last_x, last_y = map(float, ends)
    assert places == {(x, y), (last_x, last_y)}


def test_names_get_other_hues_and_numbers_go_from_dark_to_light():
    rows = {"policy": ["a", "b", "a", "b"], "value": ["10", "9", "fast", "slow"]}
    rows |= {"knob": ["n", "n", "mode", "mode"], "condition": ["1"] * 4, "share": [1.0] * 4}
    drawn = charts.knob_usage(pl.DataFrame(rows), ["a", "b"], "budget")
    scales = [specification(chart)["layer"][0]["encoding"]["color"]["scale"] for chart in drawn]
    # a row a knob, a column a run, with one scale in a row
    assert [scale["domain"] for scale in scales] == [["9", "10"]] * 2 + [["fast", "slow"]] * 2
    assert [scale["scheme"] for scale in scales] == ["viridis"] * 2 + ["tableau10"] * 2


def test_a_legend_names_what_has_a_line_alone():
    columns = {"budget_ms": [1.0, 1.0], "utility": [0.5, None]}
    rows = pl.DataFrame({"policy": ["a", "b"], **columns})
    spec = specification(charts.by_condition(rows, "budget_ms", "utility", "utility"))
    assert {tuple(e["encoding"]["color"]["scale"]["domain"]) for e in spec["layer"]} == {("a",)}


def test_a_band_is_an_area_over_all_budgets():
    """An order, as lines need it, would cut it into an area for each point, which shows nothing."""
    columns = {"budget_ms": [1.0, 2.0, 3.0], "utility": [0.1, 0.2, 0.3], "low": [0.0, 0.1, 0.2]}
    rows = pl.DataFrame({**columns, "high": [0.2, 0.3, 0.4], "policy": "a"})
    x = alt.X("budget_ms:Q")
    y = alt.Y("utility:Q", title="utility", scale=alt.Scale(zero=False))
    channels = {}
    for layer in charts.lines(rows, x, y):
        spec = layer.to_dict()
        channels.setdefault(spec["mark"]["type"], []).append(spec["encoding"].keys())
    assert {"x", "y", "y2", "color"} == channels["area"][0]
    assert all("order" in of_line for of_line in channels["line"])
