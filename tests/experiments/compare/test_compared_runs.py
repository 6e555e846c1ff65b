"""Finding runs, reading what they left, naming them by what differs; the page of their
comparison."""

from __future__ import annotations

import copy
import itertools
import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from commands import Capture, mistake
from omegaconf import OmegaConf
from page_parts import charts_of, data_of, points_of, rows_of, specifications, svg_of, titles_of
from run_folders import BUDGETS, write_run, write_selector_run

from knobwise.__main__ import main
from knobwise.common.errors import InputError
from knobwise.experiments.compare.charts import COLOURED, comparison_charts, order
from knobwise.experiments.compare.compare import write_comparison
from knobwise.experiments.compare.comparison import Comparison, comparison_of
from knobwise.experiments.compare.paired import decisions_of
from knobwise.experiments.compare.runs import differing, find_runs, read_runs, value_words
from knobwise.experiments.report import charts, page
from knobwise.experiments.report.words import read_results, write_results
from knobwise.experiments.results.decisions import read_decisions
from knobwise.experiments.results.run_folder import UNFINISHED


def test_runs_are_found_in_folders_in_order_and_once(tmp_path: Path) -> None:
    names = ("loss.group_size-64", "loss.group_size-8", "default", "loss.group_size-16")
    written = {name: write_run(tmp_path / "runs" / "lean" / name) for name in names}
    (tmp_path / "runs" / "latest").symlink_to("lean/default")
    wandb = tmp_path / "runs" / "lean" / "default" / "wandb" / "offline-run-1" / "files"
    wandb.mkdir(parents=True)
    (wandb / "config.yaml").write_text("{}")
    found, unfinished = find_runs([str(tmp_path)])
    order = ("default", "loss.group_size-8", "loss.group_size-16", "loss.group_size-64")
    assert found == [written[name] for name in order]
    assert unfinished == []
    last, whole = written["loss.group_size-64"], tmp_path / "runs" / "lean"
    assert find_runs([str(last), str(whole), str(tmp_path / "runs" / "latest")])[0] == [
        last,
        *found[:-1],
    ]


def test_unfinished_runs_are_told_apart(tmp_path: Path) -> None:
    done, stopped, judged = (write_run(tmp_path / name) for name in "abc")
    (stopped / "results.json").unlink()
    (judged / UNFINISHED).touch()
    assert find_runs([str(tmp_path)]) == ([done], [str(stopped), str(judged)])


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_folders_without_runs_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=name):
        find_runs([str(tmp_path / name)])


def test_files_that_are_broken_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    (run / "config.yaml").write_text("a: [")
    with pytest.raises(InputError, match=r"config\.yaml: cannot be read"):
        read_runs([run])
    (run / "config.yaml").write_text("- a")
    with pytest.raises(InputError, match=r"config\.yaml: holds no settings"):
        read_runs([run])
    (run / "config.yaml").unlink()
    (run / "decisions.parquet").write_text("x")
    (one,) = read_runs([run])
    assert one.settings == {}
    assert one.decisions is None
    assert "cannot be read" in one.missing


def test_runs_of_different_systems_are_refused(tmp_path: Path) -> None:
    controller, selector = write_run(tmp_path / "a"), write_selector_run(tmp_path / "b")
    mean = write_run(tmp_path / "c", sense="mean")
    with pytest.raises(
        InputError, match=r"/b: is a run of selectors, .*/a one of controllers under deadlines"
    ):
        read_runs([controller, selector])
    with pytest.raises(InputError, match="controllers under mean budgets"):
        read_runs([controller, mean])


def test_settings_that_differ_without_where_runs_are_kept() -> None:
    one = {"name": "a", "runs": "x", "tracking.mode": "auto", "loss.group_size": 8, "seeds": [0, 1]}
    other = {
        **one,
        "name": "b",
        "runs": "y",
        "tracking.mode": "disabled",
        "seeds": [0],
        "loss.kl_band": None,
    }
    assert differing([one, other]) == {"seeds": ["[0,1]", "[0]"], "loss.kl_band": ["–", "none"]}
    assert [value_words(v) for v in (1e-5, 0.25, True, None, "a", [])] == [
        "1e-05",
        "0.25",
        "true",
        "none",
        "a",
        "[]",
    ]


MORE = {"loss.group_size": 5, "optimiser.lr": 1}


@pytest.mark.parametrize(
    ("runs", "wanted"),
    [
        (
            {"lean/default": {}, "lean/b-5": {"loss.group_size": 5, "device": "cpu"}},
            ["group_size=8", "group_size=5"],
        ),
        # a name that somebody gave says more than settings
        ({"lean/default": {}, "lean/my_best": {"loss.group_size": 5}}, ["default", "my_best"]),
        # as do folders where many settings differ
        (
            {
                "lean/policy-auto": {"policy": {"teacher": False, "hidden": 9}, **MORE},
                "lean/default": {},
            },
            ["policy-auto", "default"],
        ),
        ({"lean/x": {}, "controller/x": {}}, ["lean", "controller"]),
        (
            {"lean/x": {}, "controller/x": {}, "lean/loss.group_size-5": {"loss.group_size": 5}},
            ["lean: x", "controller: x", "lean: loss.group_size-5"],
        ),
        # the same settings again, into the same folder of runs or another one
        (
            {"lean/a-1": {}, "lean/a-1-2": {}, "lean/b-1": {"loss.group_size": 5}},
            ["group_size=8 (a-1)", "group_size=8 (a-1-2)", "group_size=5"],
        ),
        (
            {
                f"{top}/lean/n-{n}": {"loss.group_size": n}
                for top in ("joblib", "ray")
                for n in (5, 8)
            },
            [f"group_size={n} ({top})" for top in ("joblib", "ray") for n in (5, 8)],
        ),
        ({"lean/default": {}, "lean/default-2": {}}, ["default", "default-2"]),
        ({"lean/default": {}, "other/lean/default": {}}, ["default (lean)", "default (other)"]),
        (
            {"lean/default": {}, "other/lean/default": {}, "other/lean/x/default": {}},
            ["default (lean)", "default (other/lean/default)", "default (other/lean/x/default)"],
        ),
    ],
)
def test_labels_are_what_differs_or_the_folder(
    tmp_path: Path, runs: dict[str, dict], wanted: list[str]
) -> None:
    folders = []
    for path, changed in runs.items():
        experiment = "controller" if path.startswith("controller") else "lean"
        nested = OmegaConf.create({"experiment": experiment})
        for key, value in changed.items():
            OmegaConf.update(nested, key, value)
        folders.append(
            write_run(tmp_path / path, settings=OmegaConf.to_container(nested), decisions=False)
        )
    assert [run.label for run in read_runs(folders)] == wanted


def test_decisions_are_the_rows_of_the_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", seeds=(3, 1))
    (run,) = read_runs([folder])
    found = decisions_of(run, "controller")
    assert found is not None
    assert run.decisions is not None
    rows = run.decisions.filter(policy="controller").sort("seed", "sample_id", "place")
    assert found["seed"].unique().sort().to_list() == [1, 3]
    assert found["place"].unique().sort().to_list() == [10, 20]
    assert len(found) == 2 * 60 * 2
    for name in ("seed", "place", "score", "accuracy", "latency_ms"):
        assert found[name].equals(rows[name]), name
    assert found["sample"].to_list() == rows["sample_id"].to_list()
    assert found["score"].mean() == pytest.approx(run.row("controller", None)["utility"])
    assert run.row("controller", 20.0)["budget_ms"] == 20
    assert run.row("nothing", 20.0) == {}
    assert decisions_of(run, "nothing") is None
    whole = pl.read_parquet(folder / "decisions.parquet")
    whole.filter(~((pl.col("sample_id") == "s3") & (pl.col("place") == 10))).write_parquet(
        folder / "decisions.parquet"
    )
    assert decisions_of(read_runs([folder])[0], "controller") is None


# -- the page: every number of every run, charts that can be drawn, nothing from a network ---------


def runs(folder: Path, count: int, **more: Any) -> list[str]:
    names = [folder / "lean" / f"loss.group_size-{n}" for n in range(count)]
    settings = [{"loss": {"group_size": n}} for n in range(count)]
    return [
        str(write_run(names[n], gain=n / 20, settings=settings[n], **more)) for n in range(count)
    ]


def drawn(comparison: Comparison) -> dict[str, list[dict[str, Any]]]:
    return {name: specifications(figure) for name, figure in comparison_charts(comparison).items()}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Three runs under deadlines."""
    return comparison_of(runs(tmp_path_factory.mktemp("three"), 3))


def test_the_page_is_one_file_and_holds_every_number(tmp_path: Path, three: Comparison) -> None:
    comparison, path = three, write_comparison(three, tmp_path / "page.html")
    text = path.read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"<(link|img|iframe|script[^>]* src)", text.replace(page._vega(), ""))
    assert "<script>" not in text.split("<main>")[1].split("<script")[0]
    assert "train &lt;script&gt;" in text
    settings, means, per_budget = rows_of(text)
    assert "loss.group_size</td><td>0</td><td>1</td><td>2" in settings[0]
    for i, run in enumerate(comparison.runs):
        assert f"{run.label}</td>" in means[i]
        assert f"<td>{run.row('controller', None)['utility']:.3f}" in means[i]
        for budget in BUDGETS:
            assert f"<td>{run.row('controller', budget)['utility']:.3f}" in per_budget[i]
    for rows, family in ((means, comparison.differences), (per_budget, comparison.by_place)):
        for one in family:
            row = next(line for line in rows if f"{one.run}</td>" in line)
            gap, low, high = (f"{100 * value:+.1f}" for value in (one.difference, *one.ci95))
            assert re.search(
                rf"(<td>|<small>){re.escape(gap)}\b.*?<small>\[{re.escape(low)}, "
                rf"{re.escape(high)}\]",
                row,
            )


def test_every_chart_can_be_drawn_in_both_themes(three: Comparison) -> None:
    specs = drawn(three)
    assert len(specs) == 4
    for spec in specs.values():
        for theme in page.THEMES:
            svg_of(*spec, theme=theme)


def test_charts_hold_the_numbers_under_the_names_of_the_runs(three: Comparison) -> None:
    comparison, specs = three, drawn(three)
    labels = {run.label for run in comparison.runs}
    lines = points_of(*specs["Utility by budget"])
    for run in comparison.runs:
        found = {row["budget_ms"]: row["utility"] for row in lines if row.get("name") == run.label}
        assert found == {budget: run.row("controller", budget)["utility"] for budget in BUDGETS}
    quiet = {(row["policy"], row["budget_ms"]): row["utility"] for row in lines if "name" in row}
    oracle = {
        ("oracle (upper bound)", b): comparison.runs[0].row("oracle", b)["utility"] for b in BUDGETS
    }
    assert quiet.items() >= oracle.items()
    usage = specs["Which settings are used"]
    assert {title for spec in usage for title in spec["title"]} == labels
    assert {row["run"] for row in points_of(*usage)} == labels


def test_curves_are_means_over_seeds_with_the_lowest_and_highest(tmp_path: Path) -> None:
    folders = runs(tmp_path, 2)
    with (Path(folders[0]) / "metrics.csv").open("a") as file:
        file.write("0,30,0.9,2.0,\n")  # one seed that went on is no mean over seeds
    curves = drawn(comparison_of(folders))["Training, on validation samples"]
    points = points_of(*curves)
    curve = [p for p in points if p["name"] == "group_size=0" and p["panel"] == "utility (0 to 1)"]
    assert [(p["step"], p["mean"], p["low"], p["high"]) for p in curve] == [
        *((0, 0.51, 0.5, 0.52), (10, 0.61, 0.6, 0.62), (20, 0.71, 0.7, 0.72))
    ]
    assert {p["panel"] for p in points} == set(titles_of(curves)) == {"utility (0 to 1)"}


def test_curves_say_where_grpo_begins_and_a_single_point_is_a_dot(tmp_path: Path) -> None:
    warm_ups = {"a": 10, "b": None}
    folders = []
    for name, begins in warm_ups.items():  # that of b is all of its training
        training = {"warmup_iterations": 10, "iterations": 0 if begins is None else 20}
        folders.append(write_run(tmp_path / name, settings={"optimiser": training}))
        results = json.loads((folders[-1] / "results.json").read_text())
        (folders[-1] / "results.json").write_text(json.dumps(results | {"training": training}))
    (folders[1] / "metrics.csv").write_text("seed,step,Val/Utility\n0,0,0.4\n1,0,0.6\n")
    comparison = comparison_of(list(map(str, folders)))
    assert (
        "Dashed: where GRPO begins."
        in write_comparison(comparison, tmp_path / "page.html").read_text()
    )
    curves = drawn(comparison)["Training, on validation samples"]
    points = [point for point in points_of(*curves) if "panel" in point]
    names = [run.label for run in comparison.runs]
    assert {(p["name"], p["grpo"], p["alone"]) for p in points} == {
        (names[0], 10, False),
        (names[1], None, True),
    }
    assert svg_of(*curves).count('stroke-dasharray="5,4"') == 1


def test_of_many_runs_a_few_have_colours_and_all_are_in_the_tables(tmp_path: Path) -> None:
    folders = runs(tmp_path, 12)
    comparison = comparison_of(folders)
    named = order(comparison)
    assert named == ["group_size=0", "group_size=9", "group_size=10", "group_size=11", charts.OTHER]
    assert len(named) == COLOURED + 1
    specs = drawn(comparison)
    lines = [row for row in points_of(*specs["Utility by budget"]) if "name" in row]
    references = {"budget-aware static", "oracle (upper bound)"}
    assert {row["name"] for row in lines} == {run.label for run in comparison.runs} | references
    assert {row["policy"] for row in lines} == set(named) | references
    assert {row["run"] for row in points_of(*specs["Which settings are used"])} == set(named) - {
        charts.OTHER
    }
    text = write_comparison(comparison, tmp_path / "page.html").read_text()
    assert "<h1>lean: 12 runs</h1>" in text
    assert "the first run and the 3 best others judged on the same samples; grey: 8 more" in text
    assert all(f"{run.label}</td>" in text for run in comparison.runs)
    assert "<details><summary>Per budget" in text
    (forest,) = (spec for spec in charts_of(text) if "shown" in str(spec))
    rows = next(rows for rows in data_of(forest) if "shown" in rows[0])
    assert [(r["name"], r["value"], r["low"], r["high"]) for r in rows] == [
        (one.run, *(100 * value for value in (one.difference, *one.ci95)))
        for one in comparison.differences
    ]


@pytest.mark.parametrize("missing", ["metrics.csv", "config.yaml", "decisions.parquet"])
def test_what_is_missing_from_a_folder_is_left_out(tmp_path: Path, missing: str) -> None:
    folders = runs(tmp_path, 2)
    for folder in folders:
        (Path(folder) / missing).unlink()
    text = write_comparison(comparison_of(folders), tmp_path / "page.html").read_text()
    assert ("Training, on validation" in text) == (missing != "metrics.csv")
    assert ("<p>Nothing that is known.</p>" in text) == (missing == "config.yaml")
    assert "The settings are the same" not in text
    tested = missing != "decisions.parquet"
    assert ["sign-flip" in text, "it is shown but not tested." in text] == [tested, not tested]
    assert ("not tested</td>" in text) != tested


def test_mean_budgets_and_selectors_have_pages_of_their_own(tmp_path: Path) -> None:
    mean = comparison_of(runs(tmp_path / "m", 2, sense="mean"))
    assert set(drawn(mean)) == {
        *(
            "Over static mix by mean budget",
            "Which settings are used",
            "Training, on validation samples",
        ),
    }
    folders = [
        str(write_selector_run(tmp_path / "s" / name, wrong=wrong))
        for name, wrong in (("a", 0.6), ("b", 0.3))
    ]
    comparison = comparison_of(folders)
    specs = drawn(comparison)
    assert set(specs) == {"Accuracy by number of shots", "Training, on validation queries"}
    lines = [row for row in points_of(*specs["Accuracy by number of shots"]) if "name" in row]
    for run in comparison.runs:
        found = {row["shots"]: row["accuracy"] for row in lines if row["name"] == run.label}
        assert found == {n: run.row("grpo_recorded", n)["accuracy"] for n in (1, 2)}
    assert titles_of(specs["Training, on validation queries"]) == ["sft: accuracy, mean (0 to 1)"]
    text = write_comparison(comparison, tmp_path / "page.html").read_text()
    for title in ("Per number of shots", "Stage by stage", "GRPO on recorded groups"):
        assert title in text
    assert "without experts or guard" not in text
    for spec in specs.values():
        svg_of(*spec)


# -- damage ----------------------------------------------------------------------------------------


def test_results_and_decisions_that_are_not_as_written_are_refused(
    tmp_path: Path, capsys: Capture
) -> None:
    folder, other = (
        write_run(tmp_path / "runs" / "r"),
        write_run(tmp_path / "runs" / "other", gain=0.1),
    )
    results = json.loads((folder / "results.json").read_text())
    write_results(folder, results)
    assert read_results(folder)["rows"] == results["rows"]
    assert len(read_decisions(folder))
    whole, decisions = (
        json.loads((folder / "results.json").read_text()),
        (folder / "decisions.parquet").read_bytes(),
    )
    for key, wrong in itertools.product(whole, (7, "x", None, [], {})):
        if whole[key] != wrong:
            (folder / "results.json").write_text(json.dumps(whole | {key: wrong}))
            assert "results.json: " in mistake(["compare", str(folder), str(other)], capsys)
    for row, wrong in ((0, "x"), (1, None), (2, [1])):
        rows = copy.deepcopy(whole["rows"])
        rows[row]["utility"] = wrong
        (folder / "results.json").write_text(json.dumps(whole | {"rows": rows}))
        assert "results.json: is damaged" in mistake(["compare", str(folder), str(other)], capsys)
    (folder / "results.json").write_text(json.dumps(whole, indent=1))
    (folder / "decisions.parquet").write_bytes(
        decisions[:99] + bytes([decisions[99] ^ 1]) + decisions[100:]
    )
    assert "decisions.parquet: does not match its checksum in" in mistake(
        ["compare", str(folder), str(other)], capsys
    )


def test_results_without_a_checksum_that_hold_other_types_are_refused_in_a_line(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, other = (
        write_run(tmp_path / "runs" / "r"),
        write_run(tmp_path / "runs" / "other", gain=0.1),
    )
    whole = json.loads((folder / "results.json").read_text())
    whole.pop("sha256", None)
    refused = 0
    for key, wrong in itertools.product(whole["rows"][0], (None, [1], {}, "x")):
        rows = [row | {key: wrong} for row in copy.deepcopy(whole["rows"])]
        (folder / "results.json").write_text(json.dumps(whole | {"rows": rows}))
        status = main(["compare", str(folder), str(other)])
        lines = capsys.readouterr().err.strip().splitlines()
        assert (status, len(lines)) in ((0, 0), (2, 1)), (key, wrong, lines)
        refused += status == 2
    assert refused


def test_decisions_of_another_type_are_refused_in_a_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "r")
    frame = pl.read_parquet(folder / "decisions.parquet")
    frame.with_columns(accuracy=pl.lit("high")).write_parquet(folder / "decisions.parquet")
    with pytest.raises(InputError, match=r"decisions\.parquet: cannot be read") as refused:
        read_decisions(folder)
    assert "\n" not in str(refused.value)
