"""What W&B's own pages are given: sweep files, which run of a job a sweep then sees, and the saved workspace."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml
from commands import OPTIMISER, TABLE, mistake, write_table
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args
from wandb.sdk.lib.config_util import save_config_file_from_dict
from wandb_stub import ENTITY, WandbStub, forget_wandb, offline_runs
from wandb_workspaces.workspaces import Workspace
from wandb_workspaces.workspaces.internal import View, WorkspaceViewspec

from knobwise.__main__ import main
from knobwise.common.errors import InputError
from knobwise.experiments.command_line.compose import read_settings, schema_of
from knobwise.experiments.settings.options import WorkspaceRun
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.experiments.tracking.tracker import Tracker
from knobwise.experiments.tracking.wandb_run import VARIABLES, SweepJob, sweep_job
from knobwise.experiments.tracking.workspace import view_of

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "experiments" / "tracking" / "wandb_sweeps").glob("*.yaml"))
OF_GROUP = {"policy": "policy.structure", "loss": "loss.objective", "reward": "reward.kind"}
"""Where the name of a group's option stands among the settings."""
KEYS = {"program", "name", "method", "metric", "parameters", "command"}
PARAMETERS = [{"values"}, {"min", "max"}, {"distribution", "min", "max"}]


def sweep(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    return content


def candidates(parameter: dict[str, Any]) -> list[Any]:
    """Every value, or the ends of a range."""
    return parameter["values"] if "values" in parameter else [parameter["min"], parameter["max"]]


def words_of(path: Path, chosen: dict[str, Any]) -> list[str]:
    """The command that W&B's agent makes for these values, by the agent's own code."""
    macros = create_sweep_command_args({"args": {key: {"value": value} for key, value in chosen.items()}})
    macros["env"] = ["/usr/bin/env"]
    words: list[str] = []
    for chunk in create_sweep_command(list(sweep(path)["command"])):
        macro = re.fullmatch(r"\$\{(\w+)\}", chunk)
        words += macros[macro[1]] if macro else [chunk]
    return words


def value_at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def test_there_is_a_file_for_each_main_experiment() -> None:
    assert [path.stem for path in FILES] == ["controller", "grpo", "heads", "selector"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_schema(path: Path) -> None:
    """Of what W&B takes (https://docs.wandb.ai/models/sweeps/sweep-config-keys) that which our files use; the package
    that knows it all runs on the server."""
    config = sweep(path)
    assert config.keys() - {"run_cap"} == KEYS
    assert config["name"] == path.stem
    assert config["method"] in ("grid", "random", "bayes")
    assert config["method"] == "grid" or config["run_cap"] >= 1, "such a sweep never ends"
    assert config["metric"].keys() == {"name", "goal"}
    assert all(isinstance(word, str) for word in [config["program"], *config["command"]])
    assert config["parameters"]
    for key, parameter in config["parameters"].items():
        assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", key)
        assert parameter.keys() in PARAMETERS
        if "values" in parameter:
            assert len(set(map(str, parameter["values"]))) == len(parameter["values"]) > 0
        else:
            assert config["method"] != "grid"
            assert parameter["min"] < parameter["max"]
        if "distribution" in parameter:
            assert parameter["distribution"] == "log_uniform_values"
            assert parameter["min"] > 0
    assert path.read_text().startswith("# ")
    assert f"wandb sweep experiments/tracking/wandb_sweeps/{path.name}" in path.read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_value_is_understood_as_the_agent_passes_it(path: Path) -> None:
    parameters = sweep(path)["parameters"]
    for number in range(max(len(candidates(parameter)) for parameter in parameters.values())):
        chosen = {key: candidates(one)[number % len(candidates(one))] for key, one in parameters.items()}
        words = words_of(path, chosen)
        assert words[:3] == ["/usr/bin/env", "knobwise", "train"]
        config = read_settings(schema_of("train", words[3:]), words[3:])
        assert {key: value_at(config, OF_GROUP.get(key, key)) for key in chosen} == chosen
    wrong = words_of(path, {"no.such.key": 1})[3:]
    with pytest.raises(InputError, match=r"no\.such\.key"):
        read_settings(schema_of("train", wrong), wrong)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_maximised_is_a_validation_score_that_the_metrics_page_explains(path: Path) -> None:
    """tests/test_docs.py holds that page against what runs log, and where."""
    metric = sweep(path)["metric"]
    assert metric["goal"] == "maximize"
    stage = re.fullmatch(r"Val/(\w+)/Accuracy_Mean", metric["name"])
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert ("`Val/<stage>/Accuracy_Mean`" if stage else f"`{metric['name']}`") in page
    config = read_settings(schema_of("train", words := words_of(path, {})[3:]), words)
    assert stage is None or set(config.variants) == {stage[1]}, "this one is trained, and it alone"


# -- which run of a job the sweep sees ---------------------------------------------------------------------------------


def test_no_job_without_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in itertools.product([None, "x"], repeat=2):
        for name, value in zip(VARIABLES, (*given, None), strict=True):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        assert sweep_job() == (SweepJob("x", "x", {}) if all(given) else None)


def test_no_setting_is_lost_where_a_group_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid looks for the word; whoever compares runs looks for the settings."""
    chosen = {"policy": "independent", "optimiser.lr": 0.5}
    asked = tmp_path / "config.yaml"
    save_config_file_from_dict(str(asked), {key: {"value": value} for key, value in chosen.items()})
    for name, value in zip(VARIABLES, ("r1", "s1", str(asked)), strict=True):
        monkeypatch.setenv(name, value)
    settings: dict[str, Any] = {"policy": {"structure": "independent", "hidden": 8}, "optimiser": {"lr": 0.5}}
    settings["seeds"] = [0]
    arguments = {"name": "job", "experiment": "e", "config": settings, "settings": TrackingSettings(mode="offline")}
    config = Tracker(tmp_path, job_type="evaluate", **arguments).about["config"]
    assert {key: value for key, value in config.items() if key.split(".")[0] in settings} == {
        **{"policy": "independent", "policy.structure": "independent", "policy.hidden": 8},
        **{"optimiser": {"lr": 0.5}, "optimiser.lr": 0.5, "seeds": [0]},
    }
    config = Tracker(tmp_path, job_type="train", seed=0, **arguments).about["config"]
    assert settings.items() <= config.items()
    assert "optimiser.lr" not in config


def test_the_sweep_sees_the_run_of_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of an agent, logged offline: the results have its id, sweep and parameters; the seeds are separate runs."""
    write_table(80)
    chosen = {"optimiser.lr": 3e-05, "loss.group_size": 5, "loss.advantage": "zscore"}
    parameters = tmp_path / "wandb" / "sweep-s1" / "config-r1.yaml"
    save_config_file_from_dict(str(parameters), {key: {"value": value} for key, value in chosen.items()})
    words = [word for word in words_of(FILES[1], chosen)[3:] if word != "seeds=[0,1,2]"]
    words += [*TABLE, *OPTIMISER, "optimiser.warmup_iterations=2", "optimiser.iterations=2", "policy.members=2"]
    words += ["seeds=[0,1]", "name=job", "tracking=offline"]
    for name, value in zip((*VARIABLES, "WANDB_PROJECT"), ("r1", "s1", str(parameters), "of-the-agent"), strict=True):
        monkeypatch.setenv(name, value)
    wandb.teardown()  # wandb reads the environment once in the life of a process
    assert main(["train", *words]) == 0
    wandb.teardown()
    run = tmp_path / "runs" / "lean" / "job"
    found = {received.about["displayName"]: received for received in offline_runs(run)}
    assert set(found) == {"job", "job-seed0", "job-seed1"}
    assert {received.about["project"] for received in found.values()} == {"of-the-agent"}
    results = found["job"]
    assert (results.name, results.about["sweep_id"]) == ("r1", "s1")
    assert chosen.items() <= results.config.items()
    scores = json.loads((run / "results.json").read_text())["validation_utility"]
    assert results.summary["Val/Utility"] == pytest.approx(sum(scores) / 2)
    for seed in (0, 1):
        training = found[f"job-seed{seed}"]
        assert training.name != "r1"
        assert not training.about["sweep_id"]
        assert not chosen.keys() & training.config.keys()


# -- knobwise workspace: built and checked without a network, and saved to a small local server ------------------------


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder, no key."""
    monkeypatch.chdir(tmp_path)
    forget_wandb(monkeypatch, tmp_path)


class ViewStub(WandbStub):
    """The server, with views."""

    def __init__(self) -> None:
        super().__init__()
        self.views: dict[str, dict[str, Any]] = {}
        self.projects = {"knobwise", "other"}

    def _View(self, variables: dict[str, Any]) -> dict[str, Any]:
        if variables["projectName"] not in self.projects:
            return {"project": None}
        found = [view for view in self.views.values() if view["name"] == variables["viewName"]]
        return {"project": {"allViews": {"edges": [{"node": view} for view in found]}}}

    def _UpsertView2(self, variables: dict[str, Any]) -> dict[str, Any]:
        identity = variables.get("id") or f"view-{len(self.views)}"
        self.views[identity] = {"id": identity, **variables}
        return {"upsertView": {"view": {"id": identity, "name": variables["name"]}, "inserted": True}}


@pytest.fixture
def stub() -> Iterator[ViewStub]:
    with ViewStub() as server, server.connected():
        yield server


def panels(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for section in spec["section"]["panelBankConfig"]["sections"] for panel in section["panels"]]


def test_without_a_key_it_is_built_and_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["workspace", "json=view.json", "knobs=[size]"]) == 0
    out, err = capsys.readouterr()
    assert "valid" in out
    assert "not saved: there is no W&B key" in out
    assert err == ""
    content = json.loads((tmp_path / "view.json").read_text())
    spec = WorkspaceViewspec.model_validate(content)
    assert json.loads(spec.model_dump_json(by_alias=True, exclude_none=True)) == content
    kinds = {panel["viewType"] for panel in panels(content)}
    charts = {"Scatter Plot", "Run History Line Plot", "Bar Chart", "Parallel Coordinates Plot", "Run Comparer"}
    assert kinds == charts | {"Weave", "Media Browser"}
    (pareto,) = (panel["config"] for panel in panels(content) if panel["viewType"] == "Scatter Plot")
    assert pareto["showMaxYAxisLine"]
    shares = [panel["config"] for panel in panels(content) if panel["config"].get("plotType") == "pct-area"]
    assert [one["metricRegex"] for one in shares] == ["^Knobs/controller/size=.*$", "^Knobs/oracle/size=.*$"]
    grouping = content["section"]["runSets"][0]["grouping"]
    assert grouping == [{"section": "run", "name": "group"}, {"section": "config", "name": "run.value"}]
    named = {"entity": "e", "project": "p", "displayName": "n", "name": "nw-n-v", "id": "i", "spec": content}
    read_back = Workspace._from_model(View.model_validate(named))
    sections = view_of(WorkspaceRun(knobs=["size"])).sections
    assert [len(section.panels) for section in read_back.sections] == [len(section.panels) for section in sections]


def test_every_setting_that_is_shown_exists() -> None:
    content = json.loads(view_of(WorkspaceRun())._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))
    shown = [
        [one["accessor"].removeprefix("config:").replace(".value", "") for one in panel["config"]["columns"]]
        for panel in panels(content)
        if panel["viewType"] == "Parallel Coordinates Plot"
    ]
    assert len(shown) == 2
    for columns, verb in zip(shown, ("train", "train_selector"), strict=True):
        config = read_settings(verb, [])
        assert any(column.startswith("summary:") for column in columns)
        for column in columns:
            value: Any = config
            for part in column.split(".") if not column.startswith("summary:") else ():
                value = getattr(value, part)


def test_a_project_of_the_environment_and_offline_by_wish(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    assert view_of(WorkspaceRun()).project == "theirs"
    assert view_of(WorkspaceRun(project="mine")).project == "mine"
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert main(["workspace"]) == 0
    assert "not saved: WANDB_MODE is offline" in capsys.readouterr().out


def test_with_a_key_it_is_saved_and_replaced(stub: ViewStub, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["workspace", "name='our runs'", "json=view.json"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    ((identity, view),) = stub.views.items()
    assert (view["entityName"], view["projectName"], view["displayName"]) == (ENTITY, "knobwise", "our runs")
    assert view["type"] == "project-view"
    assert json.loads(view["spec"]) == json.loads(Path("view.json").read_text())
    address = f"{stub.url}/{ENTITY}/knobwise?nw={view['name'].removeprefix('nw-').removesuffix('-v')}"
    assert f"saved: {address}" in out
    assert main(["workspace", "name='our runs'", "knobs=[size]"]) == 0
    assert f"saved: {address}" in capfd.readouterr().out
    assert list(stub.views) == [identity]
    assert "size=" in stub.views[identity]["spec"]
    assert main(["workspace", "name=another", "project=other", "entity=team"]) == 0
    assert "/team/other?nw=" in capfd.readouterr().out
    assert len(stub.views) == 2
    assert stub.unknown == []


def test_what_goes_wrong_in_saving_is_said_in_a_line(stub: ViewStub, capfd: pytest.CaptureFixture[str]) -> None:
    stub.refuse = lambda what: what == "UpsertView2"
    for words, message in ((["project=none"], f"there is no project {ENTITY}/none yet"), ([], "did not take the view")):
        assert main(["workspace", *words]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert message in line
    assert stub.views == {}


def test_what_cannot_be_used_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="Emojis are not allowed"):
        view_of(WorkspaceRun(name="fast 🚀"))
    assert "is a folder" in mistake(["workspace", f"json={tmp_path}"], capsys)
    monkeypatch.setenv("WANDB_MODE", "online")
    assert "needs a key" in mistake(["workspace", "json=view.json"], capsys)
    assert not Path("view.json").exists()
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    assert "pip install 'knobwise[workspace]'" in mistake(["workspace", "json=view.json"], capsys)
