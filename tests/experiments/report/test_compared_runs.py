"""Finding runs and reading what they left; the page of their comparison."""

import html
import itertools
import json
import math
import re
from pathlib import Path

import polars as pl
import pytest
from commands import main, read_json, refused
from helpers import input_error
from page_parts import (
    data_of,
    folded_in,
    points_of,
    rows_of,
    said,
    specifications,
    svg_of,
    titles_of,
)
from polars.testing import assert_frame_equal
from run_folders import BUDGETS, note_metrics, write_run, write_selector_run

from knobwise.common.words import format_number, quantity
from knobwise.experiments.evidence.decisions import read_decisions
from knobwise.experiments.evidence.results import read_results, write_results
from knobwise.experiments.evidence.run_folder import UNFINISHED
from knobwise.experiments.report.between_runs import between_runs
from knobwise.experiments.report.comparison import read_comparison
from knobwise.experiments.report.content import main_table
from knobwise.experiments.report.figures import figures_of
from knobwise.experiments.report.paired import decisions_of
from knobwise.experiments.report.report import write_page
from knobwise.experiments.report.runs import differing_settings, find_runs, read_runs, value_words


def test_runs_are_found_in_folders_in_order_and_once(tmp_path):
    lean = tmp_path / "runs/lean"
    names = ["default", "size-8", "size-16", "size-64"]
    for name in sorted(names):
        write_run(lean / name, decisions=False)
    latest = tmp_path / "runs/latest"
    latest.symlink_to("lean/default")
    wandb = lean / "default/wandb/offline-run-1/files"
    wandb.mkdir(parents=True)
    (wandb / "config.yaml").write_text("{}")
    default, size_8, size_16, size_64 = paths = [lean / name for name in names]
    assert find_runs([str(tmp_path)]) == (paths, [])
    given = [str(size_64), str(lean), str(latest)]
    assert find_runs(given)[0] == [size_64, default, size_8, size_16]
    # unfinished runs are told apart
    (size_8 / "results.json").unlink()
    (size_16 / UNFINISHED).touch()
    assert find_runs([str(tmp_path)]) == ([default, size_64], [str(size_8), str(size_16)])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", b"a: ["),
        ("config.yaml", b"- a"),
        ("config.yaml", b"a: 1\n"),
        ("results.json", b"{"),
        ("results.json", b'{"rows": [{}]}'),
        ("results.json", None),
        ("metrics.csv", b'\x00\xff,,\n1,2,3,4\n"'),
    ],
)
def test_files_that_are_broken_are_named_and_nothing_is_written(home, name, content, capsys):
    write_run(Path("runs/a"))
    broken = write_run(Path("runs/b")) / name
    broken.unlink()
    broken.mkdir() if content is None else broken.write_bytes(content)
    assert f"{broken}: " in refused(["compare", "runs", "json=numbers.json"], capsys)


def changed_rows(**changes):
    return lambda results: {"rows": [row | changes for row in results["rows"]]}


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (changed_rows(policy=["controller"]), "rows[0].policy"),
        (changed_rows(budget_ms="10"), "rows[0].budget_ms"),
        (changed_rows(utility_ci95=[0.1]), "rows[0].utility_ci95"),
        (changed_rows(accuracy=True), "rows[0].accuracy"),
        (lambda results: {"profile": "small"}, "profile"),
        (lambda results: {"seeds": None}, "seeds"),
        (lambda results: {"costs": {"usd": {"limit": "0.2"}}}, "costs.usd.limit"),
        (lambda results: {"guard": [[7]]}, "guard[0][0]"),
    ],
)
def test_results_of_another_form_are_named_with_their_run(home, change, place, capsys):
    """As another version may have written them, checksum and all."""
    write_run(Path("runs/a"))
    folder = write_run(Path("runs/b"))
    results = read_json(folder / "results.json")
    write_results(folder, results | change(results))
    line = refused(["compare", "runs", "json=numbers.json"], capsys)
    assert f"{folder / 'results.json'}: `{place}` " in line


def test_half_of_what_a_run_logged_is_told_from_all_of_it(home, capsys):
    write_run(Path("runs/a"))
    folder = write_run(Path("runs/b"))
    metrics = folder / "metrics.csv"
    whole = metrics.read_text()
    note_metrics(folder)
    assert main(["compare", "runs", "json=numbers.json"]) == 0
    lines = whole.splitlines(keepends=True)
    metrics.write_text("".join(lines[: len(lines) // 2 + 1]))
    assert f"{metrics}: " in refused(["compare", "runs", "json=other.json"], capsys)
    metrics.unlink()
    assert main(["compare", "runs", "json=other.json"]) == 0


def test_settings_that_differ_without_where_runs_are_kept():
    one = {"name": "a", "runs": "x", "tracking.mode": "auto", "loss.group_size": 8, "seeds": [0, 1]}
    other = one | {"name": "b", "runs": "y", "tracking.mode": "online", "seeds": [0]}
    other["loss.kl_band"] = None
    assert differing_settings([one, other]) == {
        "seeds": ["[0,1]", "[0]"],
        "loss.kl_band": ["–", "null"],
    }
    values = {1e-5: "1e-05", 0.25: "0.25", True: "true", None: "null", "a": "a"}
    assert [value_words(value) for value in values] == list(values.values())


@pytest.mark.parametrize(
    ("runs", "wanted"),
    [
        ("lean/default lean/b-5", "default b-5"),
        ("lean/x controller/x controller/y", "lean/x controller/x controller/y"),
        ("lean/x other/lean/x", "lean/x other/lean/x"),
    ],
)
def test_runs_are_called_by_their_folders(tmp_path, runs, wanted):
    folders = [write_run(tmp_path / run, decisions=False) for run in runs.split()]
    assert [run.label for run in read_runs(folders)] == wanted.split()


MADE = "-made-of-the-words-of-the-command"


@pytest.mark.parametrize(
    ("commands", "wanted", "shared"),
    [
        (
            ["seeds=[0] baselines=false", "seeds=[0] baselines=false policy=ridge"],
            ["default", "policy=ridge"],
            "seeds=[0] baselines=false",
        ),
        # in any order; a setting that changes no result is in no name
        (
            ["loss.lr=1 seeds=[0] jobs=2", "seeds=[0] loss.group_size=16 loss.lr=2"],
            ["loss.lr=1", "loss.group_size=16 loss.lr=2"],
            "seeds=[0]",
        ),
        # two of the same words go by their folders, as does what is longer than its folder's name
        (
            ["seeds=[0]", "seeds=[0]", "seeds=[0] policy=ridge"],
            ["run-0", "run-1", "policy=ridge"],
            "seeds=[0]",
        ),
        (["a=1", f"a=1 b={'long' * 9}"], ["default", "run-1"], "a=1"),
        (["a=1", "a=1"], ["run-0", "run-1"], ""),
        (["a=1", "a=2"], ["run-0", "run-1"], ""),
        (["a=1 'torn", "a=1"], ["run-0", "run-1"], ""),
    ],
)
def test_what_nobody_named_is_called_by_what_differs(tmp_path, commands, wanted, shared):
    for i, words in enumerate(commands):
        folder = write_run(tmp_path / f"run-{i}{MADE}")
        command = f"knobwise train experiment=lean {words}"
        write_results(folder, read_json(folder / "results.json") | {"command": command})
    chosen = write_run(tmp_path / "mine")
    command = "knobwise train name=mine a=1"
    write_results(chosen, read_json(chosen / "results.json") | {"command": command})
    comparison = compared(tmp_path)
    labels = [run.label.removesuffix(MADE) for run in comparison.runs]
    assert sorted(labels) == sorted([*wanted, "mine"])
    notes = said(comparison.notes)
    assert notes.get("shared_words", {"words": ""})["words"] == shared


def test_decisions_are_the_rows_of_the_file(tmp_path):
    folder = write_run(tmp_path / "a", seeds=(3, 1))
    (run,) = read_runs([folder])
    rows = run.decisions.filter(policy="controller").sort("seed", "sample", "condition")
    names = ["seed", "sample", "condition", "utility", "accuracy", "latency_ms"]
    decisions = decisions_of(run, "controller").rename({"sample": "sample"})
    assert_frame_equal(decisions.select(names), rows.select(names))
    assert len(decisions) == 2 * 60 * 2
    assert set(decisions["condition"]) == {10, 20}
    assert run.row("controller", 20.0)["budget_ms"] == 20
    assert decisions["utility"].mean() == pytest.approx(run.row("controller", None)["utility"])
    assert run.row("nothing", 20.0) == {}
    assert decisions_of(run, "nothing") is None
    file = folder / "decisions.parquet"
    whole = pl.read_parquet(file)
    whole.filter((pl.col("sample") != "s3") | (pl.col("condition") != 10)).write_parquet(file)
    write_results(folder, read_json(folder / "results.json"))
    assert decisions_of(read_runs([folder])[0], "controller") is None
    whole.with_columns(accuracy=pl.lit("high")).write_parquet(file)
    with input_error(r"decisions\.parquet") as error:
        read_decisions(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("utility", 7.0),
        ("utility", -0.5),
        ("utility", math.inf),
        ("accuracy", 1.01),
        ("accuracy", -1.0),
        ("on_time", 2.0),
        ("latency_ms", -1.0),
        ("latency_ms", math.inf),
    ],
)
def test_decisions_with_numbers_that_are_not_possible_are_refused(tmp_path, column, value):
    folder = write_run(tmp_path / "a")
    file = folder / "decisions.parquet"
    whole = pl.read_parquet(file)
    last = pl.int_range(pl.len()) == pl.len() - 1
    changed = pl.when(last).then(value).otherwise(column).alias(column)
    whole.with_columns(changed.cast(whole.schema[column])).write_parquet(file)
    # whose checksum is that of the changed file
    write_results(folder, read_json(folder / "results.json"))
    with input_error("1 rows"):
        read_decisions(folder)
    (run,) = read_runs([folder])
    assert run.decisions is None
    assert "decisions.parquet" in run.missing


def test_a_name_with_brackets_is_no_pattern(tmp_path):
    """`a[1]` would match `a1`."""
    for name, gain, utility in (("a1", 0, 0.4), ("a[1]", 0.4, 0.6)):
        folder = write_run(tmp_path / name, gain=gain)
        metrics = f"seed,step,Val/Utility\n0,0,{utility}\n1,0,{utility}\n"
        (folder / "metrics.csv").write_text(metrics)
    comparison = read_comparison([str(tmp_path)])
    assert [run.label for run in comparison.runs] == ["a1", "a[1]"]
    assert comparison.differences[0].difference > 0.1
    curves = drawn(comparison)["Training, on validation samples"]
    values = {p["policy"]: p["value"] for p in points_of(*curves) if "panel" in p}
    assert values == {"a1": 0.4, "a[1]": 0.6}


# -- the page: every number of every run, charts that can be drawn ---------------------------------


def runs(folder, count, **more):
    """A folder with runs that differ in a setting and in what they gain."""
    for n in range(count):
        write_run(folder / f"size-{n}", gain=n / 20, settings={"loss": {"group_size": n}}, **more)
    return folder


def drawn(comparison):
    return {name: specifications(figure) for name, figure in figures_of(comparison).items()}


def compared(folder):
    return read_comparison([str(folder)])


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three runs under deadlines."""
    return compared(runs(tmp_path_factory.mktemp("three"), 3))


def test_the_page_holds_every_number(tmp_path, three):
    text = write_page(three, tmp_path / "page.html").read_text()
    assert "train &lt;script&gt;" in text
    assert folded_in(text) == [
        *("Options that differ", "Every budget", *map(quantity, BUDGETS)),
        *("What the words mean", "How to reproduce"),
    ]
    means, settings, *per_budget = rows_of(text)
    assert re.findall(r"<td.*?>(.*?)</td>", settings[0]) == ["loss.group_size", "0", "1", "2"]
    for i, run in enumerate(three.runs):
        tables = dict(zip((None, *BUDGETS), (means, *per_budget), strict=True))
        for condition, table in tables.items():
            assert f"<td>{run.label}<" in table[i]
            assert f"<td>{run.row('controller', condition)['utility']:.3f}" in table[i]
            for one in (*three.differences, *three.by_condition):
                if (one.run, one.condition) == (run.label, condition):
                    ends = (one.difference, *one.ci95)
                    gap, low, high = (format_number(100 * value, "+.1f") for value in ends)
                    assert f">{gap} [{low}, {high}]<" in table[i]


def test_charts_can_be_drawn_and_hold_the_numbers(three):
    specs = drawn(three)
    for spec in specs.values():
        svg_of(*spec)
    labels = {run.label for run in three.runs}
    scores, gains = specs["Utility against budget"]
    lines = [row for row in points_of(scores) if "policy" in row]
    utilities = {(row["policy"], row["budget_ms"]): row["utility"] for row in lines}
    for run, budget in itertools.product(three.runs, BUDGETS):
        assert utilities[run.label, budget] == run.row("controller", budget)["utility"]
        oracle = three.runs[0].row("oracle", budget)["utility"]
        assert utilities["oracle (upper bound)", budget] == oracle
    differences = {
        (row["policy"], row["budget_ms"], row["gain"], row["low"], row["high"])
        for row in points_of(gains)
        if "gain" in row
    }
    assert differences == {
        (one.run, one.condition, *(100 * value for value in (one.difference, *one.ci95)))
        for one in three.by_condition
    }
    usage = specs["Configurations used"]
    # a row a knob, a column a run
    titles = [(title["text"], title["subtitle"]) for title in titles_of(usage)]
    assert titles == [(["crops"], [run.label]) for run in three.runs]
    assert {row["policy"] for row in points_of(*usage)} == labels


def test_curves_are_means_over_seeds_and_say_where_grpo_begins(tmp_path):
    runs(tmp_path, 2)
    first, second = tmp_path / "size-0", tmp_path / "size-1"
    for folder, iterations in ((first, 20), (second, 0)):
        training = {"warmup_iterations": 10, "iterations": iterations}
        write_results(folder, read_json(folder / "results.json") | {"training": training})
    with (first / "metrics.csv").open("a") as file:
        file.write("0,30,0.9,2.0,\n")  # one seed that went on is no mean over seeds
    (second / "metrics.csv").write_text("seed,step,Val/Utility\n0,0,0.4\n1,0,0.6\n")
    curves = drawn(compared(tmp_path))["Training, on validation samples"]
    points = [point for point in points_of(*curves) if "panel" in point]
    means = {
        (p["step"], p["value"], p["low"], p["high"]) for p in points if p["policy"] == "size-0"
    }
    assert means == {(0, 0.51, 0.5, 0.52), (10, 0.61, 0.6, 0.62), (20, 0.71, 0.7, 0.72)}
    assert titles_of(curves) == [["utility (0 to 1)"]]
    assert svg_of(*curves).count('stroke-dasharray="5,4"') == 1


def test_of_many_runs_a_few_are_drawn_and_all_are_in_the_tables(tmp_path):
    comparison = compared(runs(tmp_path, 12))
    named = ["size-0", "size-9", "size-10", "size-11"]
    assert [run.label for run in comparison.drawn()] == named
    specs = drawn(comparison)
    lines = data_of(*specs["Utility against budget"])[0]
    references = {"budget-aware static", "oracle (upper bound)"}
    assert {row["policy"] for row in lines} == {*named, *references}
    used = {row["policy"] for row in points_of(*specs["Configurations used"])}
    assert used == set(named)
    text = write_page(comparison, tmp_path / "page.html").read_text()
    assert "<h1>12 runs</h1>" in text
    assert all(f"<td>{run.label}<" in text for run in comparison.runs)


@pytest.mark.parametrize("missing", ["metrics.csv", "config.yaml", "decisions.parquet"])
def test_what_is_missing_from_a_folder_is_left_out(tmp_path, missing):
    runs(tmp_path, 2)
    for folder in tmp_path.iterdir():
        (folder / missing).unlink()
    comparison = compared(tmp_path)
    text = write_page(comparison, tmp_path / "page.html").read_text()
    assert ("<h2>Training" in text) == (missing != "metrics.csv")
    assert (comparison.runs[0].settings == {}) == (missing == "config.yaml")
    notes = said(comparison.notes)
    assert ("no_settings" in notes) == (missing == "config.yaml")
    assert ("no_decisions" in notes) == (missing == "decisions.parquet")
    # without their options it is not known whether they are the same
    assert "same_options" not in said(between_runs(comparison))
    assert all(html.escape(str(note)) in text for note in comparison.notes)


def test_mean_budgets_and_selectors_have_charts_of_their_own(tmp_path):
    mean = compared(runs(tmp_path / "m", 2, constraint="mean"))
    table = main_table(mean)
    names = ["size-0", "size-1", "static mix", "oracle (upper bound)"]
    assert [line[0].split("\n")[0] for line in table.rows] == names
    assert table.rows[1][table.header.index("over static mix")].startswith("+0.")
    # it is no part of the difference
    assert table.rows[1][table.header.index("decision time")] == "12.0 µs"
    assert list(drawn(mean)) == [
        "Accuracy over the static mix, by mean budget",
        "Accuracy against mean latency",
        "Configurations used",
        "Training, on validation samples",
    ]
    for name, share in {"a": 0.6, "b": 0.3}.items():
        write_selector_run(tmp_path / "s" / name, wrong=share)
    comparison = compared(tmp_path / "s")
    scores, training = drawn(comparison).values()
    svg_of(*scores, *training)
    assert titles_of(training) == [["sft: accuracy, mean (0 to 1)"]]
    at_shots = [p for p in points_of(*scores) if "policy" in p and "accuracy" in p]
    lines = {(p["policy"], p["shots"]): p["accuracy"] for p in at_shots}
    for run, shots in itertools.product(comparison.runs, (1, 2)):
        assert lines[run.label, shots] == run.row("grpo_recorded", shots)["accuracy"]
    text = write_page(comparison, tmp_path / "page.html").read_text()
    assert folded_in(text) == [
        *("Every number of shots", "1 shot", "2 shots", "Stage by stage"),
        *("What the words mean", "How to reproduce"),
    ]
    (stages,) = [rows for rows in rows_of(text) if "<td>b</td>" in rows[0]]
    (stage,) = comparison.by_policy
    assert f"<td>{format_number(100 * stage.difference, '.1f')}<" in stages[0]


# -- damage ----------------------------------------------------------------------------------------


def test_results_and_decisions_that_are_not_as_written_are_refused(tmp_path):
    folder = write_run(tmp_path / "a")
    write_results(folder, read_results(folder))
    whole = read_results(folder)
    damages = [{key: wrong} for key in whole for wrong in (7, "x")]
    damages.append({"rows": [whole["rows"][0] | {"utility": None}, *whole["rows"][1:]]})
    for damage in damages:
        (folder / "results.json").write_text(json.dumps(whole | damage))
        with input_error(r"results\.json"):
            read_results(folder)
    (folder / "results.json").write_text(json.dumps(whole, indent=1))
    file = folder / "decisions.parquet"
    decisions = bytearray(file.read_bytes())
    decisions[99] ^= 1
    file.write_bytes(decisions)
    with input_error(r"decisions\.parquet"):
        read_results(folder)


def test_results_without_a_checksum_are_refused(tmp_path, monkeypatch, capsys):
    # where nothing else writes
    monkeypatch.chdir(tmp_path)
    folder = write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    whole = read_json(folder / "results.json")
    del whole["sha256"]
    (folder / "results.json").write_text(json.dumps(whole))
    line = refused(["compare", str(tmp_path), f"html={tmp_path / 'page.html'}"], capsys)
    assert f"{folder}/results.json" in line
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("unknown", ["a", "b"])
def test_a_run_of_which_too_little_was_measured_is_not_compared(tmp_path, unknown):
    for name, gain in (("a", 0.0), ("b", 0.3)):
        write_run(tmp_path / name, gain=gain)
    results = read_results(tmp_path / unknown)
    for row in results["rows"]:
        if row["policy"] == "controller":
            row |= {key: None for key in row if key not in ("policy", "budget_ms")}
            row |= {"measured_decisions": 29, "decisions": 60}
    write_results(tmp_path / unknown, results)
    comparison = read_comparison([str(tmp_path / "a"), str(tmp_path / "b")])
    assert comparison.differences == comparison.by_condition == []
    assert said(comparison.notes)["not_known_of"]["run"] == unknown
    assert write_page(comparison, tmp_path / "page.html").exists()
    (line,) = [row for row in main_table(comparison).rows if row[0] == unknown]
    assert "not known: 29 of 60 decisions were measured" in line
