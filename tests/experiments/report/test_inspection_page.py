"""The page of a profile, and its facts, against numbers worked out by hand or the slow way."""

import re
from base64 import b64decode
from dataclasses import replace

import pytest
import torch
from helpers import small_table, table_of
from page_parts import charts_of, headings_of, points_of, printed, said, svg_of

from knobwise.envs.tables.profile_table import Knob
from knobwise.experiments.inspection.checks import WARNING
from knobwise.experiments.inspection.facts import inspect_table
from knobwise.experiments.report.inspection import (
    contents,
    enough,
    lead,
    print_inspection,
    write_inspection,
)
from knobwise.experiments.report.inspection_figures import coverage
from knobwise.experiments.report.page import specification
from knobwise.testbeds.elastic.adapter import builtin_input

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
    told = []
    for accuracy in ([[0.0, 1.0], [1.0, 1.0]], [[0.2, 0.5], [0.5, 0.5]]):
        facts = inspect_table(table_of(accuracy, [[1.0, 2.0], [1.0, 2.0]]))
        told.append(said(contents(facts)))
    whole, fractional = told
    assert whole["differing"] == {"share": "50.0%"}
    # the median of 30 and 0
    assert fractional["differing_by"] == {"share": "50.0%", "range": "15.0"}
    assert "differing" not in fractional


def test_further_costs_stand_beside_settings_and_measuring():
    usd = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0], [3.0, 6.0, NAN], [3.0, 2.0, NAN]])
    facts = inspect_table(replace(by_hand(), costs={"usd": usd}))
    means = [row["cost_usd_mean"] for row in facts["configuration_means"]]
    assert means == [2, 3, 4]
    assert facts["knobs"]["crops"]["cost_usd_mean"] == [2, pytest.approx(20 / 6)]
    point = {"cells": 1, "cost": 2000.0, "costs": {"usd": 8.0}, "utility": 0.55, "static": 0.5}
    point |= {"utility_ci95": [0.5, 0.6], "behind": 0.004, "behind_ci95": [0.001, 0.008]}
    whole = point | {"cells": 3, "costs": {"usd": 20.0}, "behind": 0.0, "behind_ci95": [0.0, 0.0]}
    facts |= {"learning_curve": [point, whole]}
    text = printed(print_inspection, facts)
    for words in ("mean usd", "3.33 USD", "8.00 USD", "20.0 USD"):
        assert words in text
    rows = [row | {"effort": ""} for row in facts["learning_curve"]]
    told = said([enough(rows, 3)])
    numbers = {"cells": 1, "all": 3, "behind": "0.4", "gain": "5.0", "limit": "1"}
    assert numbers.items() <= told["enough"].items()
    # a small grid has no small part
    assert told["small_grid"] == {"cells": 3}


def curve_of(*points):
    """A learning curve: cells of a sample, and the interval of how far behind all it is."""
    return [
        {"cells": cells, "effort": f"{cells} h", "behind": 0.02, "behind_ci95": list(ci95)}
        for cells, ci95 in points
    ]


@pytest.mark.parametrize(
    ("curve", "name", "fields"),
    [
        # no part of 20 cells is enough
        (curve_of((10, (0.01, 0.02)), (20, (0.0, 0.0))), "not_enough", {"small_grid": ""}),
        (curve_of((5, (0.0, 0.0))), "no_curve", {}),
        (curve_of((5, (-0.01, 0.01)), (10, (0.0, 0.0))), "no_more_cells", {}),
        (
            curve_of((5, (0.01, 0.02)), (10, (0.0, 0.0))),
            "next_doubling",
            {"effort": "10 h", "cells": 20},
        ),
    ],
)
def test_a_learning_curve_says_what_measuring_more_would_bring(curve, name, fields):
    assert fields.items() <= said([enough(curve, 20)])[name].items()


def test_facts_worked_out_by_hand():
    budgets = torch.tensor([10.0, 25.0, 40.0])
    facts = inspect_table(by_hand(), budgets_ms=budgets.tolist())
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
        (replace(SOUND, features={}), ["no_features"]),
        (replace(SOUND, accuracy=torch.ones(250, 12)), ["same_accuracy", "little_headroom"]),
        (replace(SOUND, latency_ms=torch.arange(1.0, 13).repeat(250, 1)), ["same_latency"]),
        (idle_knob(), ["useless_knobs"]),
        (SOUND, []),
    ],
)
def test_the_warnings_name_what_is_wrong_with_a_profile(table, wanted):
    facts = inspect_table(table)
    warnings = [each for each in facts["findings"] if each["kind"] == WARNING]
    assert [each["check"] for each in warnings] == wanted
    assert [each["text"] for each in warnings] == facts["warnings"]
    assert ("colour" in "".join(facts["warnings"])) == (wanted == ["useless_knobs"])


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
    # a section without anything to say is left out
    assert [heading for heading in headings_of(text) if heading not in PERHAPS] == SECTIONS
    assert not re.search("<s(olvers|001)>", seen)


SECTIONS = [
    *("Headroom", "What the profile holds", "Accuracy and latency", "Latency distributions"),
    "Effect of each knob",
]
PERHAPS = ("Certain", "Likely", "Notes", "Coverage")


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
    ("table", "name"),
    [
        (replace(small_table(30), features={}), "no_features"),
        (replace(small_table(30), clusters=("a",) * 30), "few_samples"),
    ],
)
def test_the_first_sentence_says_why_nothing_can_be_learned(table, name):
    facts = inspect_table(table)
    assert facts["attainable"] is None
    assert lead(facts).fields["learnable"].name == name


def test_where_nobody_knows_the_gain_none_is_said_or_drawn(tmp_path):
    """Each of 30 samples has a setting of its own."""
    alone = torch.eye(30, dtype=torch.bool)
    cells = torch.rand(2, 30, 30, generator=torch.Generator().manual_seed(0))
    accuracy, latency = cells.where(alone, NAN)
    facts = inspect_table(table_of(accuracy, 1 + latency, torch.randn(30, 2)), curve=True)
    assert facts["attainable"] is None
    assert facts["learning_curve"] == []
    assert facts["latency_cv_within_configuration"] is None
    assert lead(facts).name == "scattered"
    assert lead(facts).fields == {"count": "1 sample", "samples": "30"}
    assert "mean_utility" not in said(contents(facts))
    for text in (
        printed(print_inspection, facts),
        write_inspection(facts, tmp_path / "profile.html").read_text(),
    ):
        seen = re.sub(r"<script.*?</script>", "", text, flags=re.S)
        assert str(lead(facts)) in seen
        assert not re.search(r"Headroom|oracle would|[Pp]redictable", seen)


@pytest.mark.parametrize("repeats", [1, 4])
def test_what_looks_predictable_is_not_above_what_an_oracle_is_said_to_gain(repeats):
    """Each kind of sample needs its own setting, and as many samples are of each: a static choice
    by other samples is right for fewer than half of those that it is judged on."""
    kind = torch.arange(100) % 2
    accuracy = torch.stack([kind, 1 - kind], 1).float()
    times = 10 + torch.rand(100, 2, repeats, generator=torch.Generator().manual_seed(1))
    facts = inspect_table(table_of(accuracy, times, kind.float().unsqueeze(1)), budgets_ms=[12.0])
    told = said([lead(facts)])
    assert facts["headroom"]["budget_aware_static"] == [0.5]
    gain = float(told["learnable"]["gain"])
    assert 50 < gain <= float(told["headroom"]["most"])
    if repeats > 1:
        assert gain <= float(told["without_noise"]["points"]) <= float(told["headroom"]["most"])


def test_an_oracle_that_gains_nothing_has_no_part_that_is_noise():
    """Of what it gains more, a part may be noise."""
    told = []
    for accuracy in ([[1.0, 1.0]] * 4, [[1.0, 0.0], [0.0, 1.0]] * 2):
        facts = inspect_table(table_of(accuracy, [[10.0, 11.0]] * 4))
        told.append(said([lead(facts)]))
    assert told[0]["headroom"]["most"] == "0.0"
    assert ["part_is_noise" in names for names in told] == [False, True]


def test_facts_are_printed_plainly_where_there_is_no_terminal():
    facts = inspect_table(by_hand())
    text = printed(print_inspection, facts)
    lines = [facts[key][0] for key in ("faults", "warnings", "notes")]
    held = said(contents(facts))["holds"]
    numbers = {"samples": "4", "configurations": "3", "grid": "4", "coverage": "91.7%"}
    assert numbers.items() <= held.items()
    for part in (*map(str, contents(facts)), facts["digest"], *lines):
        assert part in text
    assert re.search(r"crops +6 +0\.786 +34\.3 ms", text)
