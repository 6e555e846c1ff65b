"""What holds for every page; the page of a profile, against numbers worked out by hand or the slow
way."""

import json
import re
import shutil
import subprocess
from base64 import b64decode
from dataclasses import replace

import altair as alt
import numpy as np
import polars as pl
import pytest
import torch
from helpers import small_table, table_of
from page_parts import charts_of, points_of, printed, svg_of

from knobwise.envs.tables.profile_table import Knob
from knobwise.experiments.evidence.task import DECISION, GAP, OVER_MIX, UTILITY
from knobwise.experiments.inspection.facts import inspect_table
from knobwise.experiments.inspection.figures import coverage
from knobwise.experiments.inspection.page import lead, print_inspection, write_inspection
from knobwise.experiments.report import charts, page
from knobwise.experiments.report.page import HUE_OF, HUES, Figure, colours_of, specification
from knobwise.experiments.report.tables import Content, Folded, Table, Tile
from knobwise.experiments.wording.words import POLICIES, cell, interval, number, policy_name
from knobwise.testbeds.elastic.adapter import builtin_input

ATTACK = "</script><script>alert(1)</script><!--<script>"
CHROMIUM = shutil.which("chromium")


def test_a_policy_has_the_same_colour_whatever_it_is_drawn_with():
    oracle = "oracle (upper bound)"
    first = colours_of(["learned controller", oracle])
    second = colours_of(["SFT", "run", oracle])
    assert first[oracle] == second[oracle] == HUES[HUE_OF[oracle]]
    assert len({*first.values(), *second.values()}) == 3  # the run may be blue
    assert HUES["grey"] not in colours_of(map(str, range(20))).values()


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
    assert (number(0.004, "+.1f"), number(-0.04, "+.1f"), number(0.05001, "+.1f")) == (
        "0.0",
        "0.0",
        "+0.1",
    )
    assert (number(-1e-9, "+.2f"), interval(None, ".1f")) == ("0.00", "")


# -- a profile -------------------------------------------------------------------------------------


NAN = torch.nan


def by_hand():
    """Four samples, three of the four combinations of two knobs, one hole."""
    accuracy = [[0.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.5, 0.5, NAN], [0.0, 0.0, 1.0]]
    latency = [[10.0, 20.0, 40.0], [10.0, 20.0, 40.0], [30.0, 60.0, NAN], [10.0, 20.0, 40.0]]
    return table_of(
        accuracy,
        latency,
        {"image": torch.tensor([[1.0, 2.0], [1.0, NAN], [1.0, 3.0], [1.0, 4.0]])},
        knobs=(Knob("crops", (2, 6)), Knob("mode", ("fast", "slow"))),
        configurations=torch.tensor([[0, 0], [1, 0], [1, 1]]),
        notes=("1 row was skipped",),
    )


def test_scores_between_0_and_1_are_not_called_right_or_wrong():
    texts = []
    for accuracy in ([[0.0, 1.0], [1.0, 1.0]], [[0.2, 0.5], [0.5, 0.5]]):
        facts = inspect_table(table_of(accuracy, [[1.0, 2.0], [1.0, 2.0]]))
        texts.append(" ".join(printed(print_inspection, facts).split()))
    whole, fractional = texts
    assert "50.0% of the samples are right" in whole
    assert "are right" not in fractional
    assert "15.0 points" in fractional  # the median of 30 and 0


def test_further_costs_stand_beside_settings_and_measuring():
    usd = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0], [3.0, 6.0, NAN], [3.0, 2.0, NAN]])
    facts = inspect_table(replace(by_hand(), costs={"usd": usd}))
    means = [row["cost_usd_mean"] for row in facts["configuration_means"]]
    assert means == [2, 3, 4]
    assert facts["knobs"]["crops"]["cost_usd_mean"] == [2, pytest.approx(20 / 6)]
    point = {"cells": 1, "cost": 2000.0, "costs": {"usd": 8.0}, "utility": 0.55, "static": 0.5}
    point |= {"utility_ci95": [0.5, 0.6], "behind": 0.004, "behind_ci95": [0.001, 0.008]}
    whole = point | {"cells": 3, "costs": {"usd": 20.0}, "behind": 0.0, "behind_ci95": [0.0, 0.0]}
    text = printed(print_inspection, facts | {"learning_curve": [point, whole]})
    assert "mean usd" in text
    for words in ("3.33 USD", "8.00 USD", "20.0 USD", "gains 5.0 over static", "at most 1 point"):
        assert words in text
    # a small grid has no small part
    assert "With 3 configurations" in text


def test_facts_worked_out_by_hand(monkeypatch):
    budgets = torch.tensor([10.0, 25.0, 40.0])
    name = "knobwise.experiments.inspection.facts.default_budgets"
    monkeypatch.setattr(name, lambda table: budgets)
    facts = inspect_table(by_hand())
    wanted = {
        "samples": 4,
        "configurations": 3,
        "grid": 4,
        "coverage": pytest.approx(11 / 12),
        "config_dependent_share": 0.5,  # the first and the last
        "fractional": True,
        "accuracy_range": 0.5,  # of 1, 0, 0, 1
        "median_latency_ms": 20.0,
        "repeated_share": 0.0,
        # latencies 10, 10, 30, 10: mean 15, deviation √75; twice as long: the same ratio; 40, 40,
        # 40: none
        "latency_cv_within_configuration": pytest.approx((2 * 75**0.5 / 15 + 0) / 3),
        "pareto": [0, 1, 2],
        "features": {"image": 2},
        "digest": by_hand().digest,
        "notes": ["1 row was skipped"],
    }
    assert wanted.items() <= facts.items()
    crops, mode = facts["knobs"].values()
    assert (crops["values"], mode["values"]) == ([2, 6], ["fast", "slow"])
    assert crops["accuracy"] == pytest.approx([1.5 / 4, 5.5 / 7])
    assert crops["latency_ms"] == pytest.approx([60 / 4, 240 / 7])
    assert mode["accuracy"] == pytest.approx([4 / 8, 1.0])
    for part in ("4 samples", "8.3%", "12.5%", "1 of 2 columns"):
        assert part in " ".join(facts["faults"] + facts["warnings"])
    # at 10 ms only the first configuration is in time, for three samples: 0 + 1 + 0 of four
    # at 25 ms the second is right for the first two of four; at 40 ms the third for all three it
    # was profiled for, and the other sample gets the second one, late
    assert facts["headroom"] == {
        "budgets_ms": [10.0, 25.0, 40.0],
        "budget_aware_static": [1 / 4, 2 / 4, 3 / 4],
        "oracle": [1 / 4, 2 / 4, 3.5 / 4],
        "feasible": [0.75, 0.75, 1.0],
        "static_choice": [by_hand().label(c) for c in range(3)],
    }
    assert [row["samples"] for row in facts["configuration_means"]] == [4, 4, 3]
    assert facts["configuration_means"][0]["latency_ms_quantiles"] == pytest.approx(
        [10.0, 10.0, 27.0]
    )
    # from easy to hard: right in 10 ms, in 20, and in 30 (half right)
    assert [row["needed_ms"] for row in facts["examples"]] == [10.0, 20.0, 30.0, 40.0]
    assert [row["sample_id"] for row in facts["examples"]] == ["1", "0", "2", "3"]


SOUND = small_table(250)


def idle_knob():
    """Return a table with a knob that changes nothing."""
    twice = torch.arange(12).repeat_interleave(2)
    cells = {name: getattr(SOUND, name)[:, twice] for name in ("accuracy", "latency_ms", "mask")}
    colour = torch.tensor([[0], [1]]).repeat(12, 1)
    return replace(
        SOUND,
        configurations=torch.cat([SOUND.configurations[twice], colour], 1),
        knobs=(*SOUND.knobs, Knob("colour", ("blue", "red"))),
        **cells,
    )


@pytest.mark.parametrize(
    ("table", "wanted"),
    [
        (replace(SOUND, features={}), ["No features"]),
        (replace(SOUND, accuracy=torch.ones(250, 12)), ["Accuracy hardly", "The oracle"]),
        (replace(SOUND, latency_ms=torch.arange(1.0, 13).repeat(250, 1)), ["Latency is the same"]),
        (idle_knob(), ["Knob colour"]),
        (SOUND, []),
    ],
)
def test_the_warnings_name_what_is_wrong_with_a_profile(table, wanted):
    for line, start in zip(inspect_table(table)["warnings"], wanted, strict=True):
        assert line.startswith(start)


def one_knob():
    accuracy, latency = torch.rand(2, 20, 201, generator=torch.Generator().manual_seed(0))
    knobs = (Knob("solver", tuple(f"<s{i:03d}>" for i in range(201))),)
    return table_of(accuracy, 1e5 * latency, name="<solvers>", knobs=knobs)


@pytest.mark.parametrize(
    ("table", "figures"), [(by_hand(), 8), (small_table(30, holes=0.4), 12), (one_knob(), 5)]
)
def test_page_is_whole_and_its_charts_can_be_drawn(table, figures, tmp_path):
    path = write_inspection(inspect_table(table), tmp_path / "new" / "profile.html")
    text = path.read_text()
    assert path.stat().st_size < 2_000_000
    specs = charts_of(text)
    assert len(specs) == figures  # the last is the coverage, where there are holes
    svg_of(*specs)
    seen = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert table.digest in seen
    assert not re.search("<s(olvers|001)>", seen)


def test_the_coverage_of_two_knobs_by_hand():
    facts = inspect_table(by_hand())
    (chart,) = coverage(facts["knobs"], facts["configuration_means"], facts["samples"])
    shares = {(row["x"], row["y"]): row["share"] for row in points_of(specification(chart))}
    assert shares == {("2", "fast"): 1.0, ("6", "fast"): 1.0, ("6", "slow"): 0.75}


def test_the_page_of_the_built_in_profile_shows_samples(tmp_path):
    facts = inspect_table(small_table(30)) | {"name": "builtin"}
    text = write_inspection(facts, tmp_path / "profile.html").read_text()
    pictures = re.findall(r'<img src="data:image/png;base64,(.*?)" alt="(.*?)">', text)
    assert len(pictures) == len(facts["examples"]) == 6
    for (picture, question), example in zip(pictures, facts["examples"], strict=True):
        drawn = builtin_input(example["sample_id"])
        assert question == drawn[0]
        assert b64decode(picture).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (replace(small_table(30), features={}), "Nothing can be gained without features: a policy"),
        (
            replace(small_table(30), clusters=("a",) * 30),
            "There are too few samples to tell what your features can predict",
        ),
    ],
)
def test_the_first_sentence_says_why_nothing_can_be_learned(table, words):
    facts = inspect_table(table)
    assert facts["attainable"] is None
    assert lead(facts).startswith(words)


def test_an_oracle_that_gains_nothing_has_no_part_that_is_noise():
    """Of what it gains more, a part may be noise."""
    said = []
    for accuracy in ([[1.0, 1.0]] * 4, [[1.0, 0.0], [0.0, 1.0]] * 2):
        facts = inspect_table(table_of(accuracy, [[10.0, 11.0]] * 4))
        said.append(lead(facts).rpartition("An oracle")[2])
    assert "0.0 points" in said[0]
    assert "part of that" not in said[0]
    assert "part of that" in said[1]


def test_facts_are_printed_plainly_where_there_is_no_terminal():
    facts = inspect_table(by_hand())
    text = printed(print_inspection, facts)
    lines = [facts[key][0] for key in ("faults", "warnings", "notes")]
    for part in ("4 samples × 3 configurations (of 4", "91.7%", facts["digest"], *lines):
        assert part in text
    assert re.search(r"crops +6 +0\.786 +34\.3 ms", text)


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
