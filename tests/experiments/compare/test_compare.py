"""`knobwise compare`: what it says of runs, on the terminal, as JSON and through the command
line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from commands import TABLE, mistake, write_table
from page_parts import printed
from rich.text import Text
from run_folders import write_run, write_selector_run

from knobwise.__main__ import main
from knobwise.common.errors import InputError
from knobwise.experiments.compare.charts import order
from knobwise.experiments.compare.compare import numbers, write_comparison
from knobwise.experiments.compare.comparison import Comparison, comparison_of
from knobwise.experiments.compare.words import (
    method,
    print_comparison,
    results_cells,
    settings_cells,
    verdict,
)
from knobwise.experiments.report import charts
from knobwise.experiments.results.run_folder import UNFINISHED

PAIR: dict[str, dict[str, Any]] = {"a": {}, "b": {"gain": 0.3}}
"""Two runs of which the second has more."""
ALONE = (
    "No run is called the highest: no other run is known to have been "
    "judged on the same test {} as a."
)


def sweep(folder: Path, count: int) -> Path:
    """Runs of which each has more than the one before, none on the first half."""
    for size in range(count):
        gain = max(0.0, 0.05 * (size - count // 2))
        write_run(
            folder / f"loss.group_size-{size}", gain=gain, settings={"loss": {"group_size": size}}
        )
    return folder


def compared(folder: Path, runs: dict[str, dict[str, Any]], write: Any = write_run) -> Comparison:
    """Runs in folders of these names, written with these settings."""
    return comparison_of([str(write(folder / name, **settings)) for name, settings in runs.items()])


def change_results(run: Path, **changes: object) -> None:
    results = json.loads((run / "results.json").read_text())
    (run / "results.json").write_text(json.dumps(results | changes))


def rows_of(comparison: Comparison) -> list[dict[str, str]]:
    """The table of runs, a row each, by head."""
    head, lines = results_cells(comparison)
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_two_runs_and_what_differs(tmp_path: Path) -> None:
    larger = {"gain": 0.3, "settings": {"loss": {"group_size": 64}}}
    comparison = compared(tmp_path / "lean", {"default": {}, "loss.group_size-64": larger})
    assert settings_cells(comparison) == (
        ["setting", "group_size=8", "group_size=64"],
        [["loss.group_size", "8", "64"]],
    )
    best, against = verdict(comparison)
    utility = [run.row("controller", None)["utility"] for run in comparison.runs]
    assert best == f"The highest is group_size=64: utility {utility[1]:.3f}, mean over 2 budgets."
    (one,) = comparison.differences
    assert one.difference == pytest.approx(utility[1] - utility[0])
    gap, low, high = (f"{100 * value:+.1f}" for value in (one.difference, *one.ci95))
    assert against.startswith(
        f"group_size=64 is better than group_size=8: {gap} points [{low}, {high}], p "
    )
    assert "utility, mean over 2 budgets, on the same 60 test samples" in method(comparison)
    assert "one seed" not in method(comparison)
    lines = rows_of(comparison)
    assert [line["run"] for line in lines] == [
        *("group_size=8", "group_size=64", "budget-aware static", "oracle (upper bound)")
    ]
    assert [line["shown"] for line in lines] == ["reference", "better", "", ""]
    assert lines[1]["utility"].startswith(f"{utility[1]:.3f}\n[")
    assert lines[1]["difference, points"] == f"{gap}\n[{low}, {high}]"
    text = printed(print_comparison, comparison)
    for words in ("loss.group_size", "better", f"{utility[1]:.3f}", "Holm"):
        assert words in text


def test_the_first_run_is_what_the_others_are_held_against(tmp_path: Path) -> None:
    comparison = compared(tmp_path, PAIR)
    reverse = comparison_of([str(run.folder) for run in comparison.runs[::-1]])
    better, worse = comparison.differences[0], reverse.differences[0]
    assert (better.run, better.against, better.sign) == ("b", "a", 1)
    assert (worse.run, worse.against, worse.sign) == ("a", "b", -1)
    assert better.difference == pytest.approx(-worse.difference)


def test_of_many_runs_it_is_said_how_many_are_better(tmp_path: Path) -> None:
    comparison = comparison_of([str(sweep(tmp_path / "lean", 10))])
    assert [run.label for run in comparison.runs] == [f"group_size={size}" for size in range(10)]
    signs = [one.sign for one in comparison.differences]
    assert signs[:5] == [0] * 5
    assert signs[-1] == 1
    best, counted, first = verdict(comparison)
    assert best.startswith("The highest is group_size=9: ")
    better = signs.count(1)
    assert (
        counted == f"Tested against group_size=0: 9 runs, {better} better, 0 worse, "
        f"{9 - better} not shown to differ."
    )
    assert first.startswith("group_size=9 is better than group_size=0: ")
    assert comparison.ranking()[0] == 9
    head, lines = settings_cells(comparison)
    assert head == ["run", "loss.group_size"]
    assert lines[3] == ["group_size=3", "3"]
    assert "differs: loss.group_size (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)" in printed(
        print_comparison, comparison
    )
    # more comparisons, more caution
    alone = comparison_of(
        [str(tmp_path / "lean" / f"loss.group_size-{size}") for size in (0, 9)]
    ).differences[0]
    assert comparison.differences[-1].p == alone.p
    assert comparison.differences[-1].p_holm == pytest.approx(9 * alone.p)


def test_the_same_run_twice_differs_in_nothing(tmp_path: Path) -> None:
    comparison = compared(tmp_path, {"default": {}, "default-2": {}})
    assert comparison.settings == {}
    _, same, nothing = verdict(comparison)
    assert same == "default-2 got the same as default on every sample."
    assert nothing.startswith("The settings are the same")


def test_older_runs_are_shown_and_not_tested(tmp_path: Path) -> None:
    first, old = (
        write_run(tmp_path / "lean" / "a"),
        write_run(tmp_path / "lean" / "b", gain=0.4, decisions=False),
    )
    stopped = write_run(tmp_path / "lean" / "c")
    (stopped / UNFINISHED).touch()
    comparison = comparison_of([str(tmp_path)])
    assert [run.folder for run in comparison.runs] == [first, old]
    assert comparison.differences == []
    assert comparison.notes == [
        f"Left out because not finished: {stopped}.",
        "b has no decisions.parquet, so it is shown but not tested.",
    ]
    assert rows_of(comparison)[1]["shown"] == "not tested"
    assert method(comparison) == ""
    text = " ".join(printed(print_comparison, comparison).split())
    assert "Nothing could be tested against a." in text
    assert ALONE.format("samples at the same budgets") in text


def test_some_of_the_budgets(tmp_path: Path) -> None:
    folders = [str(run.folder) for run in compared(tmp_path, PAIR).runs]
    comparison = comparison_of(folders, [20.0])
    assert comparison.places == [20.0]
    for run, row in zip(comparison.runs, comparison.rows, strict=True):
        at = run.row("controller", 20.0)
        assert row["utility"] == at["utility"]
        low, high = (run.row(n, 20.0)["utility"] for n in ("budget_aware_static", "oracle"))
        assert row["gap_closed"] == pytest.approx((at["utility"] - low) / (high - low))
        assert "utility_ci95" not in row
    assert comparison.differences[0].difference == comparison.by_place[0].difference
    with pytest.raises(InputError, match=r"was not judged at 15, only at 10, 20"):
        comparison_of(folders, [15.0])


def test_mean_budgets_are_compared_at_equal_mean_latency(tmp_path: Path) -> None:
    comparison = compared(
        tmp_path, {"a": {"sense": "mean"}, "b": {"sense": "mean", "gain": 0.3, "spent": 1.0}}
    )
    assert verdict(comparison)[0].startswith("The highest is b: over static mix +0.")
    lines = rows_of(comparison)
    assert [line["run"] for line in lines] == ["a", "b", "static mix", "oracle (upper bound)"]
    assert lines[1]["over static mix"].startswith("+0.")
    accuracies = [run.row("controller", None)["accuracy"] for run in comparison.runs]
    assert comparison.differences[0].difference == pytest.approx(
        accuracies[1] - accuracies[0] - 0.02
    )


def test_selectors_by_the_furthest_trained_and_stage_by_stage(tmp_path: Path) -> None:
    runs = {"a": {"wrong": 0.6}, "b": {"wrong": 0.2, "form": "grpo_live"}}
    comparison = compared(tmp_path, runs, write_selector_run)
    assert comparison.main == 2
    assert "A run with one seed" in method(comparison)
    assert comparison.policies == ["grpo_recorded", "grpo_live"]
    assert re.fullmatch(r"The highest is b: accuracy 0\.\d+, at 2 shots\.", verdict(comparison)[0])
    assert "b is better than a: +" in verdict(comparison)[1]
    assert " points [" in verdict(comparison)[1]
    assert [(one.policy, one.against_policy, one.difference) for one in comparison.by_policy] == [
        ("sft", "sft", 0)
    ]
    assert [one.place for one in comparison.by_place] == [1, 2]
    assert "1 shot" in rows_of(comparison)[0]
    assert [line["policy"] for line in rows_of(comparison)] == [
        "GRPO on recorded groups",
        "GRPO on live draws",
    ]
    with pytest.raises(InputError, match="budgets_ms: selectors"):
        comparison_of([str(tmp_path)], [1.0])


def test_a_narrow_terminal_has_fewer_columns(tmp_path: Path) -> None:
    comparison = comparison_of([str(sweep(tmp_path / "lean", 3))])
    narrow, wide = (
        Text.from_ansi(printed(print_comparison, comparison, width)).plain for width in (100, 200)
    )
    assert re.search(r"left out at 100 columns: .*mean latency", narrow)
    assert narrow.count("mean latency") == 1
    assert "no difference shown" in narrow
    assert "mean latency" in wide
    assert max(map(len, narrow.splitlines())) <= 100


# -- through the command line ----------------------------------------------------------------------


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def folder(empty: Path) -> Path:
    """The current one, with two runs."""
    for name in "ab":
        write_run(Path("runs/lean") / name)
    return empty


@pytest.mark.usefixtures("empty")
def test_the_verb_prints_and_writes_page_and_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    sweep(Path("runs/lean"), 3)
    assert main(["compare", "runs/lean", "json=numbers.json"]) == 0
    text = capsys.readouterr().out
    assert "page: comparison.html" in text
    assert Path("comparison.html").stat().st_size > 500_000
    comparison, content = comparison_of(["runs/lean"]), json.loads(Path("numbers.json").read_text())
    assert (content["kind"], content["reference"]) == ("deadline", "group_size=0")
    assert [run["label"] for run in content["runs"]] == [run.label for run in comparison.runs]
    assert content["settings"] == {"loss.group_size": ["0", "1", "2"]}
    assert [row["p_holm"] for row in content["differences"]] == [
        row.p_holm for row in comparison.differences
    ]
    assert {row["shown"] for row in content["differences"]} <= {
        "better",
        "worse",
        "no difference shown",
    }
    assert len(content["differences_per_place"]) == 4
    odd = Path("runs/lean/a = 'b', c")
    write_run(odd)
    assert main(["compare", "runs/lean/loss.group_size-2", str(odd), "html=null"]) == 0
    assert "a = 'b', c" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give runs, or a folder with runs in it"),
        (["nowhere"], "nowhere: no such folder"),
        (["runs/lean/a"], "compare: two runs are needed, runs/lean/a is the only finished run"),
        (["runs"], "is a run of selectors"),
        (["runs/lean/a", "runs/lean/b", "budgets_ms=[3]"], "was not judged at 3"),
        (
            ["runs/lean/a", "runs/lean/b", "budgets_ms=[]"],
            "budgets_ms=[]: give at least one budget",
        ),
        (["-m", "runs/lean"], "-m: options are key=value"),
        (["html=x.html", "runs=[]"], "give runs, or a folder with runs in it"),
        (
            ["runs/lean/a", "runs/lean/b", "html=/proc/page.html"],
            "/proc/page.html: cannot be written",
        ),
        (["runs/lean/a", "runs/lean/b", "html=runs"], "html=runs: is a folder"),
        (["runs/lean/a", "runs/lean/b", "colour=red"], "colour=red: there is no such option"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_and_nothing_is_written(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_selector_run(Path("runs/selector/a"))
    assert message in mistake(["compare", *words], capsys)
    assert [path.name for path in folder.iterdir()] == ["runs"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("results.json", b"{", "results.json: not the results of a run (Expecting"),
        ("results.json", b'{"rows": [{}]}', "results.json: not the results of a run: `rows`"),
        ("results.json", None, "results.json: cannot be read (Is a directory)"),
        ("metrics.csv", b'\x00\xff,,\n1,2,3,4\n"', "metrics.csv: cannot be read"),
    ],
)
def test_broken_files_are_named_and_nothing_is_written(
    folder: Path, name: str, content: bytes | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = folder / "runs" / "lean" / "b" / name
    broken.unlink()
    broken.mkdir() if content is None else broken.write_bytes(content)
    assert message in mistake(["compare", "runs", "json=numbers.json"], capsys)
    assert [path.name for path in folder.iterdir()] == ["runs"]


@pytest.mark.parametrize("step", ["begin", "0.5"])
def test_steps_that_are_no_numbers_are_left_out(tmp_path: Path, step: str) -> None:
    runs = [write_run(tmp_path / name) for name in "ab"]
    with (runs[1] / "metrics.csv").open("a") as file:
        file.write(f"0,{step},0.9,2.0,\n")
    change_results(runs[0], profile=None, chosen=[{}, {}])
    assert (
        "Training"
        in write_comparison(comparison_of([str(tmp_path)]), tmp_path / "page.html").read_text()
    )


def test_another_profile_is_shown_with_its_own_numbers_and_not_the_highest(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, gain=gain) for name, gain in (("a", 0.0), ("b", 0.1))]
    runs.append(write_run(tmp_path / "c", gain=0.5, budgets=(1.0, 2.0), digest="sha256:z"))
    (runs[1] / "config.yaml").unlink()
    comparison = comparison_of(list(map(str, runs)))
    b, c = (run.label for run in comparison.runs[1:])
    utility = {line["run"]: line["utility"] for line in rows_of(comparison)}
    assert float(utility[c].split()[0]) > float(utility[b].split()[0])
    a = comparison.runs[0].label
    assert verdict(comparison)[0].startswith(
        f"Of the 2 runs judged on the same test samples at the same budgets as {a}, the highest "
        f"is {b}:"
    )
    assert f"{b}: without config.yaml the settings are unknown." in comparison.notes
    assert (
        f"{c}: means are over budgets that {comparison.runs[0].label} was not judged at."
        in comparison.notes
    )
    assert any(
        note.startswith(f"{c} was judged on other measurements") for note in comparison.notes
    )


@pytest.mark.parametrize(
    ("write", "first", "second", "data"),
    [
        (write_selector_run, {}, {"first": 30}, "queries at the same numbers of shots"),
        (write_selector_run, {}, {"first": 100}, "queries at the same numbers of shots"),
        (write_selector_run, {}, {"queries": 40}, "queries at the same numbers of shots"),
        (write_selector_run, {}, {"unknown": 5}, "queries at the same numbers of shots"),
        (write_selector_run, {}, {"digest": "sha256:z"}, "queries at the same numbers of shots"),
        (
            write_run,
            {"samples": range(60)},
            {"samples": range(30, 90)},
            "samples at the same budgets",
        ),
        (
            write_run,
            {"samples": range(60)},
            {"samples": range(60, 120)},
            "samples at the same budgets",
        ),
        (
            write_run,
            {"sense": "mean"},
            {"sense": "mean", "samples": range(30, 90)},
            "samples at the same mean budgets",
        ),
        (write_run, {}, {"budgets": (30.0, 40.0)}, "samples at the same budgets"),
        (write_run, {}, {"budgets": (10.0,)}, "samples at the same budgets"),
    ],
)
def test_of_runs_judged_on_different_data_none_is_called_the_highest(
    tmp_path: Path, write: Any, first: dict[str, Any], second: dict[str, Any], data: str
) -> None:
    """Neither in the sentences nor on the page, whichever run comes first and whatever they got.
    Runs like the first one are still ranked among themselves."""
    better = {"wrong": 0.1} if write is write_selector_run else {"gain": 0.5}
    pair = [
        str(write(tmp_path / name, **values))
        for name, values in (("a", first), ("b", second | better))
    ]
    comparison = comparison_of(pair)
    assert (comparison.comparable, comparison.ranking()) == ([0], [0])
    for text in (
        " ".join(printed(print_comparison, comparison).split()),
        " ".join(verdict(comparison)),
    ):
        assert ALONE.format(data) in text
        assert "highest is" not in text
    page = write_comparison(comparison, tmp_path / "page.html").read_text()
    assert ALONE.format(data) in page
    assert "highest is" not in page
    assert "which not every run was" in page
    # at the budgets of the first run alone the other one may be judged alike
    alike = [0, 1] if second.get("budgets") == (10.0,) else [0]
    assert comparison_of(pair[::-1]).comparable == alike
    if write is write_run and "sense" not in first:
        assert comparison_of(pair, [10.0]).ranking() == alike[::-1]
    three = comparison_of([*pair, str(write(tmp_path / "c", **first | better))])
    assert three.ranking() == [2, 0]
    assert verdict(three)[0].startswith(
        f"Of the 2 runs judged on the same test {data} as a, the highest is c: "
    )
    assert numbers(three)["comparable"] == ["a", "c"]


def test_colours_are_for_runs_judged_alike(tmp_path: Path) -> None:
    for name in "abcde":
        write_run(
            tmp_path / name, gain=0.5 * (name != "a"), samples=range(60 if name in "ab" else 50)
        )
    comparison = comparison_of([str(tmp_path)])
    assert order(comparison) == ["a", "b", charts.OTHER]
    page = write_comparison(comparison, tmp_path / "page.html").read_text()
    assert (
        "In colour: the first run and the best other judged on the same samples; grey: 3 more."
        in page
    )


def test_what_is_best_on_validation_stands_for_a_selector(tmp_path: Path) -> None:
    runs = [
        write_selector_run(tmp_path / "a"),
        write_selector_run(tmp_path / "b", form="own_only", shots=(2,)),
    ]
    for best, stands in (("own_only", "own_only"), (None, "sft"), ("gone", "sft")):
        change_results(runs[1], best_policy=best)
        comparison = comparison_of([str(tmp_path)])
        assert comparison.policies == ["grpo_recorded", stands]
    assert any(
        note.endswith("not judged at 1 of the numbers of shots.") for note in comparison.notes
    )


def test_where_grpo_added_nothing_is_said(tmp_path: Path) -> None:
    stages = {"training": {"warmup_iterations": 150, "iterations": 300}}
    kept = {"a": (150, 140), "b": (150, 160), "c": (160, 200), "d": (150, 150)}
    for name, iterations in kept.items():  # the last one has no GRPO
        chosen = [{"iteration": iteration} for iteration in iterations]
        change_results(write_run(tmp_path / name), chosen=chosen, **(stages if name != "d" else {}))
    assert comparison_of([str(tmp_path)]).notes == [
        "GRPO does not improve the policy; the best checkpoint is the one before GRPO: a in 2 of "
        "2 seeds; b in 1 of "
        "2 seeds."
    ]


@pytest.mark.usefixtures("empty")
def test_real_runs_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    write_table(90)
    words = [
        *TABLE,
        "policy=utility",
        "policy.hidden=8",
        "policy.guard=false",
        "optimiser.warmup_iterations=3",
    ]
    words += [
        "optimiser.contexts=16",
        "optimiser.evaluate_every=3",
        "seeds=[0,1]",
        "tracking=disabled",
    ]
    words += ["optimiser.lr=0"]  # so that GRPO cannot improve the policy
    for iterations in (0, 6):
        assert main(["train", *words, "baselines=false", f"optimiser.iterations={iterations}"]) == 0
    capsys.readouterr()
    assert main(["compare", "runs", "json=numbers.json"]) == 0
    content = json.loads(Path("numbers.json").read_text())
    assert [run["label"] for run in content["runs"]] == ["iterations=0", "iterations=6"]
    (note,) = content["notes"]
    assert re.fullmatch(
        r"GRPO does not improve the policy; .*: iterations=6 in \d of 2 seeds\.", note
    )
    utilities = [run["row"]["utility"] for run in content["runs"]]
    (one,) = content["differences"]
    assert one["difference"] == pytest.approx(utilities[1] - utilities[0], abs=1e-6)
    assert one["samples"] == 18
    per_budget = [d["difference"] for d in content["differences_per_place"]]
    assert sum(per_budget) / len(per_budget) == pytest.approx(one["difference"], abs=1e-6)
    assert re.search(r"optimiser\.iterations\s+0\s+6", capsys.readouterr().out)
