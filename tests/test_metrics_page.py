"""docs/metrics.md explains every name that a run logs, and no other: names are read from small real runs."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from helpers import small_beams, small_table
from wandb_stub import offline_runs

from knobwise.__main__ import main
from knobwise.envs.readers.long_table import write_features, write_long_table
from knobwise.experiments.report.words import read_results
from knobwise.experiments.settings.options import WorkspaceRun
from knobwise.experiments.tracking.workspace import view_of

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "metrics.md").read_text()
NAMED = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
ROWS_TOO = ("controls", "votes", "by_dataset")
"""Lists whose rows have the columns of `rows`."""
SHORT = [
    *("optimiser.warmup_iterations=2", "optimiser.iterations=2", "optimiser.contexts=32", "optimiser.minibatch=16"),
    *("optimiser.evaluate_every=2", "policy.hidden=16", "seeds=[0,1]", "tracking=offline"),
]
TABLE = ["profile=table", "profile.path=measured.csv", "profile.features=features.npz"]
JOINT = ["profile=joint", "profile.paths=[one.safetensors,two.safetensors]"]
SELECTOR = [
    *("selector.width=16", "selector.heads=2", "sft.epochs=1", "rce.epochs=1", "grpo.epochs=1", "tracking=offline"),
    *("sft.queries=64", "jobs=1"),
]
RUNS = {
    "guarded": ["policy=utility", "policy.members=2", *TABLE, *SHORT],
    "sampled": ["policy=additive", "loss=sampled", "baselines=false", *TABLE, *SHORT],
    "data_sets": ["policy=utility", "policy.members=2", *JOINT, *SHORT],
    "mean": ["budget=mean", "policy=utility", "policy.members=2", *TABLE, *SHORT],
    "live": [
        *("experiment=selector", *SELECTOR, "seeds=[0]", "judged_shots=[1,2]", "variants.hidden_live.epochs=1"),
        *(f"variants.{name}=null" for name in ("grpo_recorded", "grpo_rounds", "shuffled_recorded", "shuffled_live")),
        "variants.grpo_live.epochs=1",
    ],
    "replay": ["experiment=selector_replay", "beams.path=beams.safetensors", *SELECTOR, "seeds=[0,1]"]
    + [f"variants.{name}.epochs=1" for name in ("grpo_recorded", "shuffled_recorded")],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Small runs of every kind, logged offline, by name."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("metrics")
        patch.chdir(home)
        patch.delenv("WANDB_API_KEY", raising=False)
        patch.setenv("NETRC", str(home / "netrc"))
        table = small_table(80)
        write_long_table(table, "measured.csv")
        write_features(table, "features.npz")
        table.save("one.safetensors")
        replace(small_table(80, seed=1), name="other").save("two.safetensors")
        small_beams(60)[0].save("beams.safetensors")
        for name, words in RUNS.items():
            assert main(["train", *words, f"name={name}"]) == 0, name
        yield {name: next((home / "runs").glob(f"*/{name}")) for name in RUNS}


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def explains_each(explained: list[str], logged: set[str]) -> None:
    """Every logged name is explained by exactly one line, where `<…>` stands for any word, and every line is about a
    name that is logged."""
    lines = {name: re.compile("[^/]+".join(map(re.escape, re.split(r"<\w+>", name)))) for name in explained}
    assert len(lines) == len(explained), "a name is explained twice"
    by_name = {name: [line for line, form in lines.items() if form.fullmatch(name)] for name in logged}
    assert {name for name, found in by_name.items() if len(found) != 1} == set()
    assert set(explained) - {line for found in by_name.values() for line in found} == set()


@cache
def logged_to_wandb(run: Path) -> dict[str, set[str]]:
    """Names in history and summary of every W&B run of a folder, by the name of the W&B run."""
    found: dict[str, set[str]] = {}
    for one in offline_runs(run):
        keys = {key for row in one.history for key in row} | set(one.summary)
        # of a table, a picture, a page several values are logged, under its name and a dot
        names = {re.sub(r"^(Test/\w+|Charts/[^/.]+|report)\.\w+$", r"\1", key) for key in keys if key[0] != "_"}
        found[one.about["displayName"]] = names
    return found


@pytest.fixture(scope="module")
def names(runs: dict[str, Path]) -> set[str]:
    """Every name that is logged to W&B, but for the axes."""
    found: set[str] = set()
    for name, run in runs.items():
        by_run = logged_to_wandb(run)
        assert set(by_run) == {name, *(f"{name}-seed{seed}" for seed in read_results(run)["seeds"])}
        found |= {key for keys in by_run.values() for key in keys}
    axes = {"step", "budget_ms", "shots"}
    assert axes <= found
    return found - axes


def test_every_logged_name_is_explained_and_no_other(names: set[str]) -> None:
    explained = NAMED.findall(section("Training")) + NAMED.findall(section("Results"))
    policies = set(NAMED.findall(section("Results").split("| policy |")[1]))
    explained = [name for name in explained if name not in policies]
    assert {"Train/Loss", "Val/<stage>/Accuracy_Mean", "Budget/<policy>/<column>"} <= set(explained)
    tables = {name for name in explained if re.fullmatch(r"Test/\w+", name)}
    explains_each(explained, names)
    columns = {name.removeprefix("rows.") for name in NAMED.findall(section("results.json"))}
    for name in names - tables:
        if name.startswith(("Test/", "Budget/", "Shots/")):
            assert re.sub(r"_(low|high)$", "", name.split("/")[2]) in columns, name


def test_every_name_in_the_workspace_is_logged(names: set[str]) -> None:
    spec = view_of(WorkspaceRun())._to_model().spec.model_dump(by_alias=True, exclude_none=True)
    wanted: set[str] = set()
    for section in spec["section"]["panelBankConfig"]["sections"]:
        for panel in section["panels"]:
            config = panel["config"]
            wanted |= {*config.get("metrics", []), *config.get("mediaKeys", [])}
            axes = [config.get("yAxis", ""), *(column["accessor"] for column in config.get("columns", []))]
            axes += [config["xAxis"]] if config.get("xAxis") not in ("step", "budget_ms", "shots", None) else []
            wanted |= {axis.removeprefix("summary:") for axis in axes if axis.startswith("summary:")}
            if "metricRegex" in config:
                assert any(re.search(config["metricRegex"], name) for name in names), config["metricRegex"]
            if panel["viewType"] == "Weave":
                (table,) = re.findall(r"Test/\w+", json.dumps(config))
                wanted.add(table)
    pinned = spec["section"]["runSets"][0]["runFeed"]["columnPinned"]
    wanted |= {column.removeprefix("summary:") for column in pinned if column.startswith("summary:")}
    variants = re.compile(r"(Test|Shots)/grpo_\w+/accuracy")  # not every variant is trained here
    assert len(wanted) > 50
    assert {name for name in wanted - names if not variants.fullmatch(name)} == set()


def test_metrics_csv_holds_the_training_names(runs: dict[str, Path], names: set[str]) -> None:
    found = {name for run in runs.values() for name in pl.read_csv(run / "metrics.csv", n_rows=0).columns}
    assert found == {"seed", "step", *(name for name in names if name.startswith(("Train/", "Val/")))}


def test_every_policy_is_explained_and_no_other(runs: dict[str, Path]) -> None:
    found = {row["policy"] for run in runs.values() for row in read_results(run)["rows"]}
    variants = {name for run in runs.values() for name in read_results(run).get("variants", [])}
    found |= {row["policy"] for run in runs.values() for row in read_results(run).get("controls", [])}
    assert found - variants == set(NAMED.findall(section("Results").split("| policy |")[1]))


def columns_of(value: Any) -> set[str]:
    """Names of the columns of a list of rows, also where there is such a list for each seed."""
    if isinstance(value, list):
        return {name for one in value for name in (one if isinstance(one, dict) else columns_of(one))}
    return set()


def test_every_name_of_results_json_is_explained_and_no_other(runs: dict[str, Path]) -> None:
    found: set[str] = set()
    of_rows = {column for run in runs.values() for column in columns_of(read_results(run)["rows"])}
    for run in runs.values():
        for name, value in read_results(run).items():
            columns = set(value) if name == "profile" else columns_of(value)
            columns -= of_rows if name in ROWS_TOO else set()
            found |= {f"{name}.{column}" for column in columns} | ({name} if name != "profile" else set())
    explains_each(NAMED.findall(section("results.json")), found)


def test_every_column_of_decisions_is_explained_and_no_other(runs: dict[str, Path]) -> None:
    found = {column for run in runs.values() for column in pl.read_parquet_schema(run / "decisions.parquet")}
    explains_each(NAMED.findall(section("decisions.parquet")), found)


def test_the_run_of_the_results_holds_the_validation_score(runs: dict[str, Path]) -> None:
    """A sweep looks at it, and settings are chosen by it."""
    expected = {
        "guarded": "Val/Utility",
        "sampled": "Val/Utility",
        "mean": "Val/Reward_Mean",
        "live": "Val/hidden_live/Accuracy_Mean",
        "replay": "Val/grpo_recorded/Accuracy_Mean",
    }
    for name, metric in expected.items():
        assert metric in logged_to_wandb(runs[name])[name]
