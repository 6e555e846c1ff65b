"""Finding runs, reading what they left, naming them by what differs."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from omegaconf import OmegaConf
from run_folders import write_run, write_selector_run

from knobwise.common.errors import InputError
from knobwise.experiments.compare.paired import decisions_of
from knobwise.experiments.compare.runs import differing, find_runs, read_runs, value_words
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
    assert find_runs([str(last), str(whole), str(tmp_path / "runs" / "latest")])[0] == [last, *found[:-1]]


def test_unfinished_runs_are_told_apart(tmp_path: Path) -> None:
    done, stopped, judged = (write_run(tmp_path / name) for name in "abc")
    (stopped / "results.json").unlink()
    (judged / UNFINISHED).touch()
    assert find_runs([str(tmp_path)]) == ([done], [str(stopped), str(judged)])


def test_a_sweep_is_found_by_its_own_folder_in_the_order_of_its_jobs(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "b"), write_run(tmp_path / "a")
    sweep = tmp_path / "multirun" / "lean"
    sweep.mkdir(parents=True)
    OmegaConf.save(OmegaConf.create([{"words": []}] * 3), sweep / "jobs.yaml")
    for number, folder in ((1, first), (2, second)):
        (sweep / f"{number}.json").write_text(json.dumps({"state": "finished", "folder": str(folder)}))
    assert find_runs([str(sweep)]) == ([first, second], [f"job 3 of {sweep}"])


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
    with pytest.raises(InputError, match=r"/b: is a run of selectors, .*/a one of controllers under deadlines"):
        read_runs([controller, selector])
    with pytest.raises(InputError, match="controllers under mean budgets"):
        read_runs([controller, mean])


def test_settings_that_differ_without_where_runs_are_kept() -> None:
    one = {"name": "a", "runs": "x", "tracking.mode": "auto", "loss.group_size": 8, "seeds": [0, 1]}
    other = {**one, "name": "b", "runs": "y", "tracking.mode": "disabled", "seeds": [0], "loss.kl_band": None}
    assert differing([one, other]) == {"seeds": ["[0,1]", "[0]"], "loss.kl_band": ["–", "none"]}
    assert [value_words(v) for v in (1e-5, 0.25, True, None, "a", [])] == ["1e-05", "0.25", "true", "none", "a", "[]"]


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
            {"lean/policy-joint": {"policy": {"structure": "joint", "hidden": 9}, **MORE}, "lean/default": {}},
            ["policy-joint", "default"],
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
            {f"{top}/lean/n-{n}": {"loss.group_size": n} for top in ("joblib", "ray") for n in (5, 8)},
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
def test_labels_are_what_differs_or_the_folder(tmp_path: Path, runs: dict[str, dict], wanted: list[str]) -> None:
    folders = []
    for path, changed in runs.items():
        experiment = "controller" if path.startswith("controller") else "lean"
        nested = OmegaConf.create({"experiment": experiment})
        for key, value in changed.items():
            OmegaConf.update(nested, key, value)
        folders.append(write_run(tmp_path / path, settings=OmegaConf.to_container(nested), decisions=False))
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
    whole.filter(~((pl.col("sample_id") == "s3") & (pl.col("place") == 10))).write_parquet(folder / "decisions.parquet")
    assert decisions_of(read_runs([folder])[0], "controller") is None
