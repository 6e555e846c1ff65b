"""`knobwise compare`: what it says of runs, on the terminal, as JSON and through the command
line."""

import re
from pathlib import Path

import pytest
from commands import launch, read_json, refused
from page_parts import printed, said
from run_folders import write_run, write_selector_run

from knobwise.experiments.evidence.results import write_results
from knobwise.experiments.evidence.run_folder import UNFINISHED
from knobwise.experiments.evidence.statistics import sign_of
from knobwise.experiments.report.between_runs import between_runs, method
from knobwise.experiments.report.comparison import read_comparison
from knobwise.experiments.report.content import main_table
from knobwise.experiments.report.report import json_content, print_comparison, write_page
from knobwise.experiments.report.sentences import Sentence


def group_size(size):
    return {"settings": {"loss": {"group_size": size}}}


def sweep(folder, count):
    """Runs of which each has more than the one before, none on the first half."""
    for size in range(count):
        gain = max(0.0, 0.05 * (size - count // 2))
        write_run(folder / f"size-{size}", gain=gain, **group_size(size))


def compared(folder, runs, write=write_run):
    """Runs in folders of these names, written with these settings."""
    for name, settings in runs.items():
        write(folder / name, **settings)
    return read_comparison([str(folder / name) for name in runs])


def change_results(run, **changes):
    write_results(run, read_json(run / "results.json") | changes)


def rows_of(comparison):
    """The table of runs, a row each, by head."""
    table = main_table(comparison)
    return [dict(zip(table.header, line, strict=True)) for line in table.rows]


def test_two_runs_and_what_differs(tmp_path):
    comparison = compared(tmp_path, {"default": {}, "size-64": {"gain": 0.3, **group_size(64)}})
    assert comparison.settings == {"loss.group_size": ["8", "64"]}
    before, after = (run.row("controller", None)["utility"] for run in comparison.runs)
    (one,) = comparison.differences
    assert one.run == "size-64"
    assert one.against == "default"
    assert one.sign == 1
    assert one.difference == pytest.approx(after - before)
    gap, low, high = (f"{100 * value:+.1f}" for value in (one.difference, *one.ci95))
    against, tested = between_runs(comparison)
    assert against.name == "better"
    assert (against.fields["policy"], against.fields["against"]) == ("size-64", "default")
    assert against.fields["gain"].startswith(f"{gap} points [")
    assert (tested.name, tested.fields["sizes"]) == ("method", "60")
    assert tested.fields["comparisons"].startswith("1 ")
    lines = rows_of(comparison)
    assert [line["shown"] for line in lines] == ["–", "better", "–", "–"]
    assert lines[1]["run"] == "size-64"
    assert lines[1]["utility"].startswith(f"{after:.3f}\n[")
    assert lines[1]["gain, points"].startswith(f"{gap} [{low}, {high}]\np ")
    text = printed(print_comparison, comparison)
    for part in ("loss.group_size", str(against), str(tested), f"{after:.3f}"):
        assert part in text


def test_the_share_of_what_looked_attainable_is_a_column_where_it_is_known(tmp_path):
    comparison = compared(tmp_path, {"a": {}, "b": {"gain": 0.3}})
    assert "attained" not in rows_of(comparison)[0]
    rows = comparison.runs[1].results["rows"]
    for row in rows:
        if row["budget_ms"] is None:
            row["attained"] = 0.71
    change_results(tmp_path / "b", rows=rows)
    comparison = read_comparison([str(tmp_path)])
    cells = [row["attained"] for row in rows_of(comparison)]
    assert cells == ["–", "71%", "–", "–"]
    assert json_content(comparison)["runs"][1]["row"]["attained"] == 0.71
    write_page(comparison, tmp_path / "page.html")
    assert "attained" in (tmp_path / "page.html").read_text()


def test_of_many_runs_it_is_said_how_many_are_better(tmp_path):
    sweep(tmp_path, 10)
    comparison = read_comparison([str(tmp_path)])
    signs = [one.sign for one in comparison.differences]
    better = signs.count(1)
    assert signs == [0] * (9 - better) + [1] * better
    assert 0 < better < 5
    (outcomes, *_) = between_runs(comparison)
    # of some the interval excludes 0, but p is not small enough
    unsure = sum(not one.sign and sign_of(one.ci95) > 0 for one in comparison.differences)
    assert unsure
    counts = {"better": better, "worse": 0, "nothing": 9 - better - unsure}
    assert counts.items() <= outcomes.fields.items()
    assert outcomes.fields["runs"].startswith("9 ")
    assert said([outcomes])["borderline"]["count"] == unsure
    # more comparisons, more caution
    (alone,) = read_comparison([str(tmp_path / "size-0"), str(tmp_path / "size-9")]).differences
    last = comparison.differences[-1]
    assert last.p == alone.p
    assert last.p_holm == pytest.approx(9 * alone.p)


def test_the_same_run_twice_differs_in_nothing(tmp_path):
    comparison = compared(tmp_path, {"default": {}, "default-2": {}})
    assert comparison.settings == {}
    assert {"no_difference", "same_options"} <= {*said(between_runs(comparison))}
    assert comparison.differences[0].difference == 0
    assert comparison.differences[0].p == 1
    assert comparison.best() is None


def test_older_runs_are_shown_and_not_tested(tmp_path):
    compared(tmp_path, {"a": {}, "b": {"gain": 0.4, "decisions": False}})
    stopped = write_run(tmp_path / "c")
    (stopped / UNFINISHED).touch()
    comparison = read_comparison([str(tmp_path)])
    assert [run.label for run in comparison.runs] == ["a", "b"]
    assert comparison.differences == []
    assert comparison.comparable == [0]
    left_out, untested = comparison.notes
    assert (left_out.name, left_out.fields["runs"]) == ("unfinished", str(stopped))
    assert (untested.name, untested.fields["run"]) == ("no_decisions", "b")
    assert "decisions.parquet" in untested.fields["missing"]
    assert rows_of(comparison)[1]["shown"] == "–"
    assert method(comparison) == []


@pytest.mark.parametrize("without", ["a", "b"])
def test_where_decisions_are_missing_the_run_without_them_is_to_blame(tmp_path, without):
    runs = {name: {"decisions": name != without, "gain": 0.1} for name in "abc"}
    comparison = compared(tmp_path, runs)
    (unknown,) = [line for line in between_runs(comparison) if line.name == "not_known"]
    assert unknown.fields["blind"] == without
    assert unknown.fields["runs"] == ("b, c" if without == "a" else "b")
    (untested,) = comparison.notes
    assert (untested.name, untested.fields["run"]) == ("no_decisions", without)


def test_runs_at_other_budgets_are_tested_where_both_were_judged(tmp_path):
    comparison = compared(tmp_path, {"a": {}, "b": {"gain": 0.3, "budgets": (20.0, 40.0)}})
    (at_20,) = comparison.by_condition
    assert at_20.condition == 20
    assert comparison.differences[0].difference == at_20.difference
    untested, means = comparison.notes
    left_out = Sentence("conditions_left_out", count=1, conditions="budgets")
    assert (untested.name, untested.fields["parts"]) == ("restricted", str(left_out))
    assert (means.name, means.fields["runs"]) == ("other_budgets", "b")
    assert comparison.rows[1] == comparison.runs[1].row("controller", None)


def test_selectors_by_the_furthest_trained_and_stage_by_stage(tmp_path):
    runs = {"a": {"wrong": 0.6}, "b": {"wrong": 0.2, "form": "grpo_live"}}
    comparison = compared(tmp_path, runs, write_selector_run)
    assert comparison.main == 2
    assert [run.policy for run in comparison.runs] == ["grpo_recorded", "grpo_live"]
    (stage,) = comparison.by_policy
    assert stage.policy == "sft"
    assert stage.against_policy == "sft"
    assert stage.difference == 0
    assert [one.condition for one in comparison.by_condition] == [1, 2]
    names = [line["run"] for line in rows_of(comparison)]
    assert names == ["a", "b"]


def test_the_main_table_of_selectors_has_the_p_of_the_differences_that_are_said(tmp_path):
    runs = {"a": {"wrong": 0.6}, "b": {"wrong": 0.515}}
    for settings in runs.values():
        settings |= {"queries": 80, "shots": (1, 2, 4, 8)}
    comparison = compared(tmp_path, runs, write_selector_run)
    (one,) = comparison.differences
    (among_all,) = (each for each in comparison.by_condition if each.condition == 2)
    assert (one.p_holm, among_all.p_holm) == (one.p, pytest.approx(4 * one.p))
    _, shown = rows_of(comparison)
    assert f"p {one.p_holm:.3f}" in shown["gain, points"]


# -- through the command line ----------------------------------------------------------------------


@pytest.fixture
def folder(home):
    """The current folder, with two runs."""
    sweep(Path("runs/lean"), 2)


def test_the_verb_prints_and_writes_page_and_numbers(folder, capsys):
    odd = "a = 'b', c"
    write_run(Path("runs/lean", odd), gain=0.3)
    launch("compare runs/lean json=numbers.json")
    text = capsys.readouterr().out
    assert odd in text
    assert "page: comparison.html" in text
    assert Path("comparison.html").stat().st_size > 500_000
    comparison = read_comparison(["runs/lean"])
    content = read_json("numbers.json")
    assert content["kind"] == "deadline"
    assert content["reference"] == odd
    assert [run["label"] for run in content["runs"]] == [odd, "size-0", "size-1"]
    assert content["settings"] == {"loss.group_size": ["8", "0", "1"]}
    for name, family in (("", comparison.differences), ("_per_condition", comparison.by_condition)):
        rows = content[f"differences{name}"]
        assert [row["p_holm"] for row in rows] == [one.p_holm for one in family]
        assert {row["shown"] for row in rows} == {"worse"}


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("", "runs"),
        ("html=x.html runs=[]", "give runs"),
        ("nowhere", "nowhere"),
        ("runs/lean/size-0", "finished: runs/lean/size-0"),
        ("runs/empty", "runs/empty"),
        ("runs", "selectors"),
        ("-m runs/lean", "-m"),
        ("runs/lean html=/proc/page.html", "/proc/page.html"),
        ("runs/lean html=runs", "html"),
        ("runs/lean colour=red", "colour"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_and_nothing_is_written(folder, words, fault, capsys):
    write_selector_run(Path("runs/selector/a"))
    Path("runs/empty").mkdir()
    assert fault in refused(["compare", *words.split()], capsys)


@pytest.mark.parametrize("step", ["begin", "0.5"])
def test_steps_that_are_no_numbers_are_left_out(tmp_path, step):
    comparison = compared(tmp_path, {"a": {}, "b": {}})
    with (tmp_path / "b/metrics.csv").open("a") as file:
        file.write(f"0,{step},0.9,2.0,\n")
    change_results(tmp_path / "a", profile=None, chosen=[{}, {}])
    comparison = read_comparison([str(tmp_path)])
    assert "<h2>Training" in write_page(comparison, tmp_path / "page.html").read_text()


def test_another_profile_is_shown_with_its_own_numbers_and_not_the_highest(tmp_path):
    elsewhere = {"gain": 0.5, "budgets": (1.0, 2.0), "digest": "sha256:z"}
    comparison = compared(tmp_path, {"a": {}, "b": {"gain": 0.1}, "c": elsewhere})
    _, b, c = (float(line["utility"].split()[0]) for line in rows_of(comparison)[:3])
    assert c > b
    assert comparison.comparable == [0, 1]
    assert comparison.ranking()[0] == 1
    measured, means = comparison.notes
    assert (measured.name, measured.fields["run"]) == ("other_measurements", "c")
    assert (means.name, means.fields["runs"]) == ("other_budgets", "c")


def test_runs_under_other_limits_are_not_tested(tmp_path):
    """The same answers are worth more where fewer of them are above a limit."""
    compared(tmp_path, {"a": {}, "b": {"gain": 0.1}, "c": {"gain": 0.1}})
    for name, limit in (("a", 0.2), ("b", 0.2), ("c", 0.3)):
        change_results(tmp_path / name, costs={"usd": {"limit": limit}, "tokens": {}})
    comparison = read_comparison([str(tmp_path)])
    assert comparison.comparable == [0, 1]
    assert comparison.notes[0].name == "other_measurements"
    assert comparison.notes[0].fields["run"] == "c"


def test_runs_of_the_same_beams_that_were_judged_in_different_ways_are_not_tested(tmp_path):
    """A model answers other questions than the records do, where it answers other sequences."""
    for name, judge in (("a", "scorer"), ("b", "recorded"), ("c", "scorer")):
        change_results(write_selector_run(tmp_path / name), judged_by=judge)
    comparison = read_comparison([str(tmp_path)])
    assert comparison.comparable == [0, 2]
    assert {each.run for each in comparison.differences} == {"c"}
    (note,) = comparison.notes
    assert (note.name, note.fields["run"]) == ("other_judge", "b")


@pytest.mark.parametrize(
    ("write", "both", "second"),
    [
        (write_selector_run, {}, {"first": 30}),
        (write_selector_run, {}, {"first": 100}),
        (write_selector_run, {}, {"queries": 40}),
        (write_selector_run, {}, {"unknown": 5}),
        (write_selector_run, {}, {"digest": "sha256:z"}),
        (write_run, {}, {"samples": range(30, 90)}),
        (write_run, {}, {"samples": range(60, 120)}),
        (write_run, {"constraint": "mean"}, {"samples": range(30, 90)}),
        (write_run, {}, {"budgets": (30.0, 40.0)}),
        (write_run, {}, {"budgets": (10.0,)}),
    ],
)
def test_of_runs_judged_on_different_data_none_is_called_the_highest(tmp_path, write, both, second):
    """Whichever run comes first and whatever they got. Runs like the first one are still ranked
    among themselves."""
    better = both | ({"wrong": 0.1} if write is write_selector_run else {"gain": 0.5})
    three = compared(tmp_path, {"a": both, "b": better | second, "c": better}, write)
    a, b = (str(tmp_path / name) for name in "ab")
    comparison = read_comparison([a, b])
    assert comparison.comparable == [0]
    assert comparison.ranking() == [0]
    assert comparison.best() is None
    assert read_comparison([b, a]).comparable == [0]
    assert three.ranking() == [2, 0]
    assert three.best() == 2
    assert json_content(three)["comparable"] == ["a", "c"]


def test_what_is_best_on_validation_stands_for_a_selector(tmp_path):
    runs = {"a": {}, "b": {"form": "own_only", "shots": (2,)}}
    compared(tmp_path, runs, write_selector_run)
    for best, stands in (("own_only", "own_only"), (None, "sft"), ("gone", "sft")):
        change_results(tmp_path / "b", best_policy=best)
        comparison = read_comparison([str(tmp_path)])
        assert [run.policy for run in comparison.runs] == ["grpo_recorded", stands]
    left_out = Sentence("conditions_left_out", count=1, conditions="numbers of shots")
    assert comparison.notes[-1].fields["parts"] == str(left_out)


def test_where_grpo_added_nothing_is_said(tmp_path):
    training = {"warmup_iterations": 150, "iterations": 300}
    kept = {"a": (150, 140), "b": (150, 160), "c": (160, 200), "d": (150, 150)}
    for name, iterations in kept.items():
        chosen = [{"iteration": iteration} for iteration in iterations]
        change_results(write_run(tmp_path / name), chosen=chosen, training=training)
    change_results(tmp_path / "d", training=None)  # no GRPO
    (note,) = read_comparison([str(tmp_path)]).notes
    counts = [Sentence("of_seeds", run=run, count=n, seeds=2) for run, n in (("a", 2), ("b", 1))]
    assert note.name == "no_better_checkpoint"
    assert note.fields["runs"] == ", ".join(map(str, counts))


def test_many_runs_with_long_names_fit_a_terminal_of_120_columns(tmp_path):
    for size in (8, 16, 32, 64):
        name = f"optimiser.lr-0.0001_loss.group_size-{size}_policy.hidden-256"
        write_run(tmp_path / name, gain=size / 100, **group_size(size))
    lines = printed(print_comparison, read_comparison([str(tmp_path)]), 120).splitlines()
    assert max(len(re.sub(r"\x1b\[\d+m", "", line)) for line in lines) <= 120
