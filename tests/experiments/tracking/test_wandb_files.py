"""`knobwise workspace`: built and checked without a network, and saved to a small local server."""

import json
import sys
from operator import attrgetter
from pathlib import Path

import pytest
import wandb
from commands import launch, mistake, read_json
from torchrl.record.loggers.wandb import WandbLogger
from wandb_stub import ENTITY, WandbStub, forget_wandb, offline_runs

from knobwise.__main__ import main
from knobwise.agents.training.state import TrainingState
from knobwise.experiments.command_line.compose import read_settings
from knobwise.experiments.settings.comparison_options import WorkspaceRun
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.experiments.tracking.tracker import Tracker
from knobwise.experiments.tracking.workspace import save_once, view_of


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """An empty folder, no key."""
    monkeypatch.chdir(tmp_path)
    forget_wandb(monkeypatch, tmp_path)


@pytest.fixture
def stub():
    with WandbStub() as server, server.connected():
        yield server


def panels(view):
    """The panels that the server has been sent, in order."""
    sections = json.loads(view["spec"])["section"]["panelBankConfig"]["sections"]
    return [panel for section in sections for panel in section["panels"]]


def saved(stub):
    """The identity of the only view that was saved, the view, and its address."""
    ((identity, view),) = stub.views.items()
    name = view["name"].removeprefix("nw-").removesuffix("-v")
    return identity, view, f"{stub.url}/{ENTITY}/knobwise?nw={name}"


def test_without_a_key_it_is_built_and_written(capsys, tmp_path):
    launch("workspace json=view.json knobs=[size]")
    assert capsys.readouterr().err == ""
    content = read_json(tmp_path / "view.json")
    assert content["name"] == content["project"] == "knobwise"
    shown = [panel for section in content["sections"] for panel in section["panels"]]
    # the first panels: which run is better, did it learn, at which budgets
    first = [json.dumps(panel) for panel in shown[:3]]
    for panel, name in zip(first, ("Test/Utility", "Val/Utility", "Test/by_budget"), strict=True):
        assert name in panel
    grouping = content["runset_settings"]["groupby"]
    assert [key["name"] for key in grouping] == ["Group", "run", "stage"]
    launch("workspace json=again.json knobs=[size]")
    assert read_json("again.json") == content
    assert not Path("runs").exists()


def test_what_is_sent_has_every_panel(stub):
    launch("workspace knobs=[size]")
    _, view, _ = saved(stub)
    by_kind = {}
    for panel in panels(view):
        by_kind.setdefault(panel["viewType"], []).append(panel["config"])
    counts = {kind: len(configs) for kind, configs in by_kind.items()}
    assert counts == {
        "Bar Chart": 6,
        "Vega2": 6,
        "Scatter Plot": 1,
        "Parallel Coordinates Plot": 2,
        "Weave": 3,
        "Media Browser": 1,
        "Run History Line Plot": 37 + 49,
        "Run Comparer": 1,
    }
    assert by_kind["Scatter Plot"][0]["showMaxYAxisLine"]
    curves = by_kind["Run History Line Plot"]
    assert {config["groupArea"] for config in by_kind["Bar Chart"] + curves} == {"stddev"}
    # the shares of every run that is selected, from the table of each
    (shares,) = (config for config in by_kind["Vega2"] if "Knobs/" in json.dumps(config))
    assert '"value": "Knobs/size_table"' in json.dumps(shares)
    assert shares["fieldSettings"] == {"x": "budget_ms", "y": "share", "stroke": "value"}
    grouping = json.loads(view["spec"])["section"]["runSets"][0]["grouping"]
    keys = [{"section": "config", "name": f"{key}.value"} for key in ("run", "stage")]
    assert grouping == [{"section": "run", "name": "group"}, *keys]


STEPS = (0, 10, 20)


def our_run(folder):
    with Tracker(
        folder,
        name="ours",
        experiment="e",
        job_type="train",
        config={},
        settings=TrackingSettings(mode="offline", tensorboard=False),
        seed=0,
        state=TrainingState(""),
    ) as log:
        for step in STEPS:
            log.log({"Val/Utility": step / 10}, step)
            log.log({"Train/Loss": float(step)}, step)


def run_of_a_loop_with_wandb(folder):
    with wandb.init(dir=folder, project="knobwise", mode="offline") as run:
        run.define_metric("*", step_metric="step")
        for step in STEPS:
            run.log({"step": step, "Val/Utility": step / 10, "Train/Loss": float(step)})


def run_of_torchrl(folder):
    logger = WandbLogger(
        "theirs", True, folder, project="knobwise", log_env_packages=False, reinit="create_new"
    )
    for step in STEPS:
        logger.log_scalar("Val/Utility", step / 10, step=step)
        logger.log_scalar("Train/Loss", float(step), step=step)
    logger.experiment.finish()


@pytest.mark.parametrize(
    ("logs", "axes"),
    [
        (our_run, {"step", "{}/step"}),
        (run_of_a_loop_with_wandb, {"step"}),
        (run_of_torchrl, {"{}/step"}),
    ],
)
def test_the_view_draws_over_either_column_of_steps(tmp_path, monkeypatch, logs, axes):
    """Of the files of a real run; a panel draws the rows that hold its axis."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    # TorchRL's logger is offline by WANDB_MODE alone, which wandb reads once in a process
    wandb.teardown()
    logs(tmp_path)
    (run,) = offline_runs(tmp_path)
    panels = [panel for section in view_of(WorkspaceRun()).sections for panel in section.panels]
    plots = [panel for panel in panels if type(panel).__name__ == "LinePlot"]
    for name, scale in (("Val/Utility", 0.1), ("Train/Loss", 1.0)):
        drawn = {}
        for panel in plots:
            rows = [row for row in run.rows if {name, panel.x} <= row.keys()]
            if name in panel.y and rows:
                assert panel.x not in drawn
                drawn[panel.x] = [(row[panel.x], row[name]) for row in rows]
        points = [(step, pytest.approx(scale * step)) for step in STEPS]
        assert drawn == {axis.format(name.split("/")[0]): points for axis in axes}


def test_every_setting_that_is_shown_exists(stub):
    launch("workspace")
    _, view, _ = saved(stub)
    plots = [panel for panel in panels(view) if panel["viewType"] == "Parallel Coordinates Plot"]
    for plot, verb in zip(plots, ("train", "train_selector"), strict=True):
        config = read_settings(verb, [])
        columns = [column["accessor"].replace(".value", "") for column in plot["config"]["columns"]]
        *settings, score = columns
        assert score.startswith("summary:")
        for setting in settings:
            attrgetter(setting.removeprefix("config:"))(config)


def test_a_project_of_the_environment_and_offline_by_wish(monkeypatch, capsys):
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    assert view_of(WorkspaceRun()).project == "theirs"
    assert view_of(WorkspaceRun(project="mine")).project == "mine"
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    launch("workspace")
    assert "not saved: W&B is offline" in capsys.readouterr().out


def test_with_a_key_it_is_saved_and_replaced(stub, capfd):
    launch("workspace")
    out, err = capfd.readouterr()
    assert err == ""
    identity, view, address = saved(stub)
    wanted = {"entityName": ENTITY, "projectName": "knobwise", "displayName": "knobwise"}
    assert view.items() >= (wanted | {"type": "project-view"}).items()
    assert f"saved: {address}" in out
    launch("workspace knobs=[size]")
    assert f"saved: {address}" in capfd.readouterr().out
    assert list(stub.views) == [identity]
    assert "Knobs/size_table" in stub.views[identity]["spec"]
    # another project has its own
    launch("workspace project=other entity=team")
    assert "/team/other?nw=" in capfd.readouterr().out
    assert len(stub.views) == 2
    # what somebody has deleted is made anew
    del stub.views[identity]
    launch("workspace")
    _, again = stub.views
    assert stub.views[again]["projectName"] == "knobwise"
    noted = Path("runs/wandb_views.txt").read_text().splitlines()
    names = [stub.views[key]["name"].removeprefix("nw-").removesuffix("-v") for key in stub.views]
    assert [address.split("nw=")[1] for address in noted] == names
    assert stub.unknown == []


def test_the_first_online_run_saves_the_view_and_no_other_touches_it(stub, tmp_path, capfd):
    save_once(TrackingSettings(), tmp_path / "runs", ["size"])
    identity, view, address = saved(stub)
    assert address in capfd.readouterr().out
    assert "Knobs/size_table" in view["spec"]
    # people may have changed it
    save_once(TrackingSettings(), tmp_path / "runs", ["width"])
    assert stub.views == {identity: view}
    assert capfd.readouterr() == ("", "")
    # a run does not fail by it
    stub.refuse = lambda what: what == "UpsertView2"
    stub.views.clear()
    save_once(TrackingSettings(project="other"), tmp_path / "runs", ["size"])
    (line,) = capfd.readouterr().err.splitlines()
    assert "tracking.workspace=false" in line


def test_what_goes_wrong_in_saving_is_said_in_a_line(stub, capfd):
    stub.refuse = lambda what: what == "UpsertView2"
    for words, message in (
        (["project=none"], f"there is no project {ENTITY}/none yet"),
        ([], "did not take the view"),
    ):
        assert main(["workspace", *words]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert message in line
    assert stub.views == {}


def test_what_cannot_be_used_is_refused(capsys, monkeypatch, tmp_path):
    assert "cannot be written" in mistake(["workspace", f"json={tmp_path}"], capsys)
    monkeypatch.setenv("WANDB_MODE", "online")
    assert "needs a key" in mistake(["workspace", "json=view.json"], capsys)
    assert not Path("view.json").exists()
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    assert "pip install -e '.[workspace]'" in mistake(["workspace", "json=view.json"], capsys)
