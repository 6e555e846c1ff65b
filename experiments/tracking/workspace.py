"""`knobwise workspace`: a W&B view of all runs of a project, with the sections of workspace.yaml.

Test scores and training curves come from the W&B runs of job type train, one for each seed and
stage, tables from those of job type evaluate. The view groups runs by experiment, by run and by
stage; every panel follows that grouping.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import yaml  # type: ignore[import-untyped]

from knobwise.common.errors import InputError
from knobwise.common.extras import install_command
from knobwise.common.files import write_text, written_whole
from knobwise.common.progress import say
from knobwise.experiments.settings.comparison_options import WorkspaceRun
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.experiments.tracking.tracker import project_of, wandb_mode
from knobwise.experiments.tracking.wandb_run import environment, reason, step_key

if TYPE_CHECKING:
    import wandb
    from wandb_workspaces.reports.v2.interface import Panel
    from wandb_workspaces.workspaces import Section, Workspace

SAVED = "wandb_views.txt"
"""A file in the folder of all runs: the address of the view of each project, one a line."""
OF_LOGGER = "Over the steps of TorchRL's WandbLogger"
"""The section with a panel for each number of training, for runs that log no `step`: a panel has
one axis."""
PINNED = ("Utility", "Oracle_Gap_Closed", "On_Time_Feasible", "Accuracy", "Latency_Mean")
"""The test scores that are columns of the table of runs."""


def workspace(config: WorkspaceRun) -> None:
    """Build and check the view, write it to `config.json`, and save it to W&B where there is a key,
    in place of the one that `config.runs` has the address of.

    Raises:
        InputError: if wandb-workspaces is not installed, W&B cannot be reached or refuses the view,
            or the project does not exist yet.
    """
    # refused before anything is built
    mode = wandb_mode(TrackingSettings())
    view = view_of(config)
    print("the view is valid")
    if config.json is not None:
        write_text(config.json, json.dumps(asdict(view, dict_factory=_public_fields), indent=1))
        print(f"written: {config.json}")
    if mode == "online":
        print(f"saved: {_save(view, Path(config.runs) / SAVED)}")
    else:
        print(f"not saved: W&B is {mode}; run `wandb login` and unset WANDB_MODE to save the view")


def save_once(settings: TrackingSettings, runs: Path, knobs: list[str]) -> None:
    """Save the view if `runs` has no address of one of this project. If that fails, a line reports
    it, and the run goes on."""
    config = WorkspaceRun(project=settings.project, entity=settings.entity)
    config.knobs = knobs or config.knobs
    try:
        if address := _save(view_of(config), runs / SAVED, replace=False):
            print(f"W&B view of all runs: {address}")
    except Exception as error:
        say(f"{reason(error)}; tracking.workspace=false saves no view")


def _public_fields(fields: list[tuple[str, object]]) -> dict[str, object]:
    """Return the public fields of a part of a view that are not None."""
    return {name: value for name, value in fields if name[0] != "_" and value is not None}


def view_of(config: WorkspaceRun) -> Workspace:
    """Return the view as a `wandb_workspaces.workspaces.Workspace`; nothing is sent.

    Raises:
        InputError: if wandb-workspaces is not installed.
    """
    with environment({"WANDB_SILENT": "true"}):
        try:
            import wandb_workspaces.reports.v2 as wr
            import wandb_workspaces.workspaces as ws
            from wandb_workspaces.expr import Config, Metric
        except ImportError as error:
            raise InputError(
                f"workspace: needs wandb-workspaces; {install_command('workspace')}"
            ) from error
        content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
        content["What the policy decides"]["CustomChart"] = {
            f"Knobs/{knob}": [f"Knobs/{knob}", "budget_ms", "share", "value"]
            for knob in config.knobs
        }
        numbers = [
            number
            for kinds in content.values()
            for title, names in kinds.get("LinePlot", {}).items()
            for number in names or [title]
        ]
        content[OF_LOGGER] = {"LinePlot": {number: step_key(number) for number in numbers}}
        sections = [_section(ws, wr, name, content[name]) for name in content]
        pinned = ["run:displayName", "run:jobType", *(f"summary:Test/{name}" for name in PINNED)]
        return ws.Workspace(
            entity=config.entity or "",
            project=project_of(config.project),
            name="knobwise",
            sections=sections,
            settings=ws.WorkspaceSettings(x_axis="step", max_runs=40, group_by_prefix="first"),
            runset_settings=ws.RunsetSettings(
                groupby=[Metric("Group"), Config("run"), Config("stage")], pinned_columns=pinned
            ),
        )


def _section(
    ws: ModuleType, wr: ModuleType, name: str, kinds: dict[str, dict[str, Any]]
) -> Section:
    """Return a section of workspace.yaml; `ws` is wandb_workspaces.workspaces."""
    panels = []
    for kind, titles in kinds.items():
        panels += [_panel(wr, kind, title, content) for title, content in titles.items()]
    return ws.Section(
        name=name,
        panels=panels,
        is_open=name != OF_LOGGER,
        layout_settings=ws.SectionLayoutSettings(columns=3, rows=math.ceil(len(panels) / 3)),
    )


def _panel(wr: ModuleType, kind: str, title: str, content: Any) -> Panel:
    """Return a panel of workspace.yaml; `wr` is wandb_workspaces.reports.v2. A panel without
    content shows what its title names; the content of a line plot may be its axis."""
    fields: dict[str, object] = {"title": title}
    spread = {"groupby_aggfunc": "mean", "groupby_rangefunc": "stddev"}
    if kind == "ScatterPlot":
        x, y = map(wr.SummaryMetric, content)
        fields |= {"x": x, "y": y, "running_ymax": True}
    elif kind == "LinePlot":
        x, names = (content, None) if isinstance(content, str) else ("step", content)
        fields |= {"x": x, "title_x": "iteration", "y": names or [title]} | spread
    elif kind == "BarPlot":
        fields |= {"metrics": [title], "groupby": wr.Config(content)} | spread
    elif kind == "CustomChart":
        table, *axes = content
        fields = {
            "query": {"summaryTable": {"tableKey": f"{table}_table"}},
            "chart_name": "wandb/line/v0",
            "chart_fields": dict(zip(("x", "y", "stroke"), axes, strict=True)),
            "chart_strings": fields,
        }
    elif kind == "ParallelCoordinatesPlot":
        *settings, score = content
        metrics = [*map(wr.Config, settings), wr.SummaryMetric(score)]
        fields["columns"] = list(map(wr.ParallelCoordinatesPlotColumn, metrics))
    elif kind == "MediaBrowser":
        fields |= {"media_keys": [title], "num_columns": 1}
    elif kind == "WeavePanelSummaryTable":
        fields = {"table_name": title}
    elif kind == "RunComparer":
        fields = {"diff_only": True, "layout": wr.Layout(w=24, h=12)}
    return getattr(wr, kind)(**fields)


def _save(view: Workspace, addresses: Path, replace: bool = True) -> str:
    """Save the view, in place of an earlier one unless `replace` is False, and note its address in
    the file `addresses`; return the address, or "" if the view was not saved."""
    with environment({"WANDB_SILENT": "true"}):  # wandb's own lines say the same as ours
        import wandb
        from wandb.sdk.lib.service.service_connection import WandbApiFailedError
        from wandb_workspaces.workspaces.errors import SpecVersionError

        try:
            api = wandb.Api()
            view.entity = view.entity or api.default_entity or ""
            noted = addresses.read_text().splitlines() if addresses.exists() else []
            earlier = [line for line in noted if _is_of(line, view)]
            if earlier and not replace:
                return ""
            with written_whole(addresses) as temporary:
                _find_project(api, view)
                address = str(_in_place_of(earlier, view).save().url)
                others = [line for line in noted if line not in earlier]
                temporary.write_text("\n".join([*others, address, ""]))
        except (wandb.Error, WandbApiFailedError, SpecVersionError) as error:
            raise InputError(
                f"workspace: W&B did not take the view ({reason(error)}); its project is "
                f"{view.project}"
            ) from error
    return address


def _is_of(address: str, view: Workspace) -> bool:
    """Return True for the address of a view of the same project."""
    return urlsplit(address).path == f"/{view.entity}/{view.project}"


def _find_project(api: wandb.Api, view: Workspace) -> None:
    """Raise InputError if the project of a view does not exist."""
    try:
        api.project(view.project, view.entity).id  # noqa: B018 (it is asked for here)
    except ValueError as error:
        raise InputError(
            f"workspace: there is no project {view.entity}/{view.project} yet; the first online "
            "run creates it: knobwise train tracking=online"
        ) from error


def _in_place_of(addresses: list[str], view: Workspace) -> Workspace:
    """Return the view that was saved at one of these addresses with the content of this one; this
    one if there is none any more."""
    for address in addresses:
        try:
            saved = type(view).from_url(address)
        except ValueError:  # somebody has deleted it
            continue
        saved.sections = view.sections
        saved.settings = view.settings
        saved.runset_settings = view.runset_settings
        return saved
    return view
