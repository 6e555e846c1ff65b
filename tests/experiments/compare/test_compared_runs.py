"""Finding runs, reading what they left, naming them by what differs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from omegaconf import OmegaConf
from run_folders import write_run, write_selector_run

from knobwise.common.errors import InputError
from knobwise.experiments.compare.compared_runs import (
    differing,
    find_runs,
    labels_of,
    outcomes_of,
    read_runs,
    value_words,
)
from knobwise.experiments.results.run_folder import UNFINISHED


def labels(*folders: Path) -> list[str]:
    return [run.label for run in read_runs(folders)]


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
    one = {
        "name": "a",
        "runs": "x",
        "tracking.mode": "auto",
        "loss.group_size": 8,
        "seeds": [0, 1],
        "policy.guard": True,
    }
    other = {**one, "name": "b", "runs": "y", "tracking.mode": "disabled", "seeds": [0], "loss.kl_band": None}
    assert differing([one, other]) == {"seeds": ["[0,1]", "[0]"], "loss.kl_band": ["–", "none"]}
    assert [value_words(v) for v in (1e-5, 0.25, True, None, "a", [])] == ["1e-05", "0.25", "true", "none", "a", "[]"]


def test_few_settings_that_differ_are_the_name(tmp_path: Path) -> None:
    runs = tmp_path / "lean"
    first = write_run(runs / "default")
    second = write_run(runs / "loss.group_size-5", settings={"loss": {"group_size": 5}, "baselines": False})
    assert labels(first, second) == ["group_size=8", "group_size=5"]


def test_names_that_people_gave_stay(tmp_path: Path) -> None:
    first = write_run(tmp_path / "lean" / "default")
    second = write_run(tmp_path / "lean" / "my_best", settings={"loss": {"group_size": 5}})
    assert labels(first, second) == ["default", "my_best"]


def test_experiments_alone_where_every_run_has_another(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name / "x", settings={"experiment": name}) for name in ("lean", "controller")]
    assert labels(*runs) == ["lean", "controller"]
    third = write_run(tmp_path / "lean" / "loss.group_size-5", settings={"loss": {"group_size": 5}})
    assert labels(*runs, third) == ["lean: x", "controller: x", "lean: group_size=5"]


def test_many_settings_are_named_by_the_words_of_the_command_line(tmp_path: Path) -> None:
    joint = {"policy": {"structure": "joint", "hidden": 256}, "optimiser": {"lr": 0.01}, "loss": {"group_size": 5}}
    first = write_run(tmp_path / "lean" / "loss.group_size-5_policy-joint_seeds--0,1", settings=joint)
    second = write_run(tmp_path / "lean" / "loss.group_size-8_seeds--0,1")
    assert labels(first, second) == ["group_size=5, policy=joint", "group_size=8"]


def test_a_name_that_was_cut_does_not_end_in_half_a_word(tmp_path: Path) -> None:
    settings = {f"a{i}.length_of_setting": i for i in range(1, 5)} | {"policy.x": 1}
    name = "_".join(f"a{i}.length_of_setting-{i}" for i in range(1, 5))
    cut = f"{name}_policy-utility_and_half_a_w".ljust(130, "x")[:120]
    other = {key: -value for key, value in settings.items()}
    first, second = labels_of([Path(f"/r/lean/{cut}"), Path("/r/lean/default")], [settings, other])
    assert first.endswith(", a4.length_of_setting=4")
    assert second == "default"


def test_a_sweep_that_was_run_again_has_numbers(tmp_path: Path) -> None:
    names = ["loss.group_size-8_seeds--0,1-48ea4bf0", "loss.group_size-8_seeds--0,1-48ea4bf0-2", "loss.group_size-5"]
    sizes = [8, 8, 5]
    runs = [
        write_run(tmp_path / "lean" / name, settings={"loss": {"group_size": size}})
        for name, size in zip(names, sizes, strict=True)
    ]
    assert labels(*runs) == ["group_size=8", "group_size=8 (2)", "group_size=5"]
    third = write_run(tmp_path / "lean" / f"{names[0]}-3", settings={"loss": {"group_size": 8}})
    assert labels(runs[1], third, runs[2]) == ["group_size=8 (2)", "group_size=8 (3)", "group_size=5"]


def test_the_same_sweep_in_two_folders_is_told_apart_by_them(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / launcher / "lean" / f"loss.group_size-{size}", settings={"loss": {"group_size": size}})
        for launcher in ("joblib", "ray")
        for size in (5, 8)
    ]
    assert labels(*runs) == [f"group_size={n} ({folder})" for folder in ("joblib", "ray") for n in (5, 8)]


def test_runs_that_nothing_tells_apart_have_their_whole_names(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / "lean" / name) for name in ("default", "default-2"))
    assert labels(first, second) == ["default", "default-2"]
    elsewhere = write_run(tmp_path / "other" / "lean" / "default")
    found = labels(first, elsewhere)
    assert len(set(found)) == 2
    assert all(one.endswith("lean/default") for one in found)


def test_outcomes_are_the_rows_of_the_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", seeds=(3, 1))
    (run,) = read_runs([folder])
    found = outcomes_of(run, "controller")
    assert found is not None
    assert (found.seeds, found.places, len(found.samples)) == ((1, 3), (10.0, 20.0), 60)
    assert run.decisions is not None
    for s, seed in enumerate(found.seeds):
        for b, budget in enumerate(found.places):
            rows = run.decisions.filter(policy="controller", seed=seed, budget_ms=budget).sort("sample_id")
            assert rows["sample_id"].to_list() == list(found.samples)
            assert np.array_equal(found.values["utility"][s, :, b], rows["utility"].to_numpy())
    mean = run.row("controller", None)["utility"]
    assert found.values["utility"].mean() == pytest.approx(mean)
    assert run.row("controller", 20.0)["budget_ms"] == 20
    assert run.row("nothing", 20.0) == {}
    assert outcomes_of(run, "nothing") is None


def test_decisions_that_are_not_whole_are_not_used(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    whole = pl.read_parquet(folder / "decisions.parquet")
    whole.filter(~((pl.col("sample_id") == "s3") & (pl.col("budget_ms") == 10))).write_parquet(
        folder / "decisions.parquet"
    )
    (run,) = read_runs([folder])
    assert run.decisions is not None
    assert outcomes_of(run, "controller") is None
