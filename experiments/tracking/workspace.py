"""`knobwise workspace`: the view of all runs of a project in Weights & Biases, saved where there is a key.

Results are those of the W&B runs that carry them (job type evaluate), training curves those of the seeds (job type
train). The runs stand below their experiment, the seeds of a run below it, and every panel follows that grouping.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.experiments.results.selector_results import GRPO
from knobwise.experiments.settings.options import WorkspaceRun
from knobwise.experiments.tracking.tracker import TrackingSettings, wandb_mode

SHOWN = ("controller", "budget_aware_static", "oracle")
"""Under deadlines: what was learned, what it is held against, the most there is."""
SHOWN_MEAN = ("controller", "static_mix", "best_single", "oracle")
"""The same under mean budgets."""
SHOWN_SELECTOR = (*GRPO, "rce", "sft", "part_similarity", "random")
SETTINGS = {
    **{"policy.structure": "structure", "policy.budget_encoding": "budget encoding", "budget.strategy": "budgets"},
    **{"reward.kind": "reward", "reward.miss": "miss", "loss.objective": "objective", "loss.group_size": "group size"},
    **{"loss.advantage": "advantage", "loss.clip_epsilon": "clip ε", "loss.kl_to_ref_coeff": "KL β"},
    **{"optimiser.lr": "learning rate", "optimiser.iterations": "iterations of GRPO"},
}
"""What the parallel coordinates of controllers go through, and how it is called there."""
SELECTOR_SETTINGS = {
    **{"selector.version": "network", "selector.projection": "projection", "selector.update": "update"},
    **{"reward.mode": "reward", "loss.advantage": "advantage", "loss.group_size": "group size"},
    **{"loss.kl_to_ref_coeff": "KL β", "grpo.lr": "learning rate", "grpo.epochs": "epochs"},
}
LOGARITHMIC = ("optimiser.lr", "grpo.lr")


def workspace(config: WorkspaceRun) -> None:
    """Build the view, check it, write it where a file is named, save it where there is a key, and say what was done.

    A view of the same name that this command saved before is replaced.

    Raises:
        InputError: wandb-workspaces is not installed; W&B cannot be reached or refuses the view; the project is not
            there yet.
    """
    mode = wandb_mode(TrackingSettings())
    view = view_of(config)
    panels = sum(len(section.panels) for section in view.sections)
    print(f"view {config.name!r}: {panels} panels in {len(view.sections)} sections, valid")
    if config.json is not None:
        with written_whole(config.json) as temporary:
            temporary.write_text(view._to_model().spec.model_dump_json(by_alias=True, exclude_none=True, indent=1))
        print(f"written: {config.json}")
    if mode == "online":
        print(f"saved: {_save(view)}")
    elif os.environ.get("WANDB_MODE"):
        print(f"not saved: WANDB_MODE is {os.environ['WANDB_MODE']}; without it the same command saves the view")
    else:
        print(
            "not saved: there is no W&B key; set WANDB_API_KEY or run `wandb login`, then the same command saves the "
            "view. Without an account `knobwise compare RUN RUN …` shows the same"
        )


def view_of(config: WorkspaceRun) -> Any:
    """The view as a `wandb_workspaces.workspaces.Workspace`; nothing is sent.

    Raises:
        InputError: wandb-workspaces is not installed, or refuses a value.
    """
    with _quiet():
        try:
            import wandb_workspaces.workspaces as ws
            from wandb_workspaces.expr import Config, Metric
        except ImportError as error:
            raise InputError("workspace: needs wandb-workspaces; pip install 'knobwise[workspace]'") from error
        sections = [
            _section("Results under deadlines", _deadline_panels(), rows=3),
            _section("What the policy decides", _decision_panels(config.knobs), rows=3),
            _section("Training of controllers", _training_panels(), rows=2),
            _section("Results under mean budgets", _mean_panels(), is_open=False),
            _section("Results of selectors", _selector_panels(), rows=2, is_open=False),
            _section("Training of selectors", _selector_training_panels(), rows=2, is_open=False),
            _section("Runs side by side", _comparison_panels(), columns=1, is_open=False),
        ]
        columns = ("utility", "gap_closed", "satisfaction_feasible", "accuracy", "latency_ms_mean")
        pinned = ["run:displayName", "run:jobType", *(f"summary:Test/controller/{name}" for name in columns)]
        try:
            return ws.Workspace(
                entity=config.entity or "",
                project=config.project or os.environ.get("WANDB_PROJECT") or "knobwise",
                name=config.name,
                sections=sections,
                settings=ws.WorkspaceSettings(x_axis="step", max_runs=40, group_by_prefix="first"),
                runset_settings=ws.RunsetSettings(groupby=[Metric("Group"), Config("run")], pinned_columns=pinned),
            )
        except ValueError as error:
            said = str(error).splitlines()[2].split("[type")[0].strip().removeprefix("Value error, ")
            raise InputError(f"workspace: name={config.name!r}: W&B says {said!r}; choose another") from error


def _section(name: str, panels: list[Any], *, columns: int = 3, rows: int = 1, is_open: bool = True) -> Any:
    import wandb_workspaces.workspaces as ws

    layout = ws.SectionLayoutSettings(columns=columns, rows=rows)
    return ws.Section(name=name, panels=panels, is_open=is_open, layout_settings=layout)


def _deadline_panels() -> list[Any]:
    import wandb_workspaces.reports.v2 as wr

    of_budget = {
        "utility": "Utility against budget",
        "satisfaction": "Share answered in time against budget",
        "satisfaction_feasible": "The same where some configuration is in time",
    }
    return [
        wr.ScatterPlot(
            title="Accuracy against mean latency (ms); the line is the Pareto front",
            x=wr.SummaryMetric("Test/controller/latency_ms_mean"),
            y=wr.SummaryMetric("Test/controller/accuracy"),
            running_ymax=True,
        ),
        _bars("Utility, mean over budgets", [f"Test/{policy}/utility" for policy in SHOWN]),
        _bars("Share of the way from static to the oracle", ["Test/controller/gap_closed"]),
        *(
            _lines(title, [f"Budget/{policy}/{name}" for policy in SHOWN], x="budget_ms", title_x="budget, ms")
            for name, title in of_budget.items()
        ),
        _coordinates("Settings and utility", SETTINGS, ["Test/controller/utility"]),
        wr.WeavePanelSummaryTable(table_name="Test/policies"),
        wr.MediaBrowser(title="Charts of the report", media_keys=["Charts/Utility against budget"], num_columns=1),
    ]


def _decision_panels(knobs: list[str]) -> list[Any]:
    """Shares of 100 %, so of one policy of one run: the first of those that are shown. And the decisions themselves."""
    import wandb_workspaces.reports.v2 as wr

    shares = [
        _lines(
            f"{knob}: share of each value, {policy.replace('_', ' ')}, first run shown",
            [],
            x="budget_ms",
            title_x="budget, ms",
            metric_regex=f"^Knobs/{policy}/{re.escape(knob)}=.*$",
            plot_type="pct-area",
            max_runs_to_show=1,
        )
        for policy in SHOWN[::2]
        for knob in knobs
    ]
    return [*shares, wr.WeavePanelSummaryTable(table_name="Test/decisions")]


def _training_panels() -> list[Any]:
    both = {
        "Utility": ("Utility on validation", ("Val",)),
        "Reward_Mean": ("Reward, drawn in training and on validation", ("Train", "Val")),
        "Accuracy_Mean": ("Accuracy, drawn in training and on validation", ("Train", "Val")),
        "Latency_Mean": ("Latency (ms), drawn in training and on validation", ("Train", "Val")),
        "Budget_Violation_Rate": ("Share of budgets missed", ("Train", "Val")),
        "Loss": ("Loss in training; −reward of the policy on validation", ("Train", "Val")),
    }
    alone = {
        "Entropy": "Entropy, nats",
        "KL": "KL to the end of the warm-up, nats",
        "Clip_Fraction": "Share of draws that the clip stops",
        "Zero_Advantage_Fraction": "Share of groups without a difference",
        "Grad_Norm": "Norm of the gradient",
        "LR": "Learning rate",
    }
    return [
        *(_lines(title, [f"{part}/{name}" for part in parts]) for name, (title, parts) in both.items()),
        *(_lines(title, [f"Train/{name}"]) for name, title in alone.items()),
    ]


def _mean_panels() -> list[Any]:
    budgets = {"accuracy": "Accuracy against budget", "latency_ms_mean": "Mean latency (ms) against budget"}
    return [
        *(
            _lines(title, [f"Budget/{policy}/{name}" for policy in SHOWN_MEAN], x="budget_ms", title_x="budget, ms")
            for name, title in budgets.items()
        ),
        _bars("Accuracy over static configurations at equal mean latency", ["Test/controller/over_static_mix"]),
    ]


def _selector_panels() -> list[Any]:
    import wandb_workspaces.reports.v2 as wr

    return [
        _bars("Accuracy at the shots of training", [f"Test/{policy}/accuracy" for policy in SHOWN_SELECTOR]),
        _lines(
            "Accuracy against shots",
            [f"Shots/{policy}/accuracy" for policy in SHOWN_SELECTOR],
            x="shots",
            title_x="demonstrations",
        ),
        wr.WeavePanelSummaryTable(table_name="Test/differences"),
        _coordinates("Settings and accuracy", SELECTOR_SETTINGS, [f"Test/{policy}/accuracy" for policy in GRPO]),
    ]


def _selector_training_panels() -> list[Any]:
    """One line for each stage, whatever the variants are called."""
    titles = {
        "Val/.+/Accuracy_Mean": "Accuracy on validation",
        "Train/.+/Reward_Mean": "Reward in training",
        "Train/.+/Loss": "Loss in training",
        "Train/.+/KL": "KL to the SFT policy, nats",
        "Train/.+/Entropy": "Entropy, nats",
        "Train/.+/Beta": "β, weight of that KL",
    }
    return [_lines(title, [], metric_regex=f"^{names}$") for names, title in titles.items()]


def _comparison_panels() -> list[Any]:
    import wandb_workspaces.reports.v2 as wr

    return [wr.RunComparer(diff_only=True, layout=wr.Layout(w=24, h=12))]


def _lines(title: str, names: list[Any], *, x: str = "step", **more: Any) -> Any:
    import wandb_workspaces.reports.v2 as wr

    return wr.LinePlot(title=title, x=x, y=names, **{"title_x": "iteration"} | more)


def _bars(title: str, names: list[Any]) -> Any:
    import wandb_workspaces.reports.v2 as wr

    return wr.BarPlot(title=title, metrics=names)


def _coordinates(title: str, settings: dict[str, str], names: list[str]) -> Any:
    import wandb_workspaces.reports.v2 as wr

    columns = [
        wr.ParallelCoordinatesPlotColumn(wr.Config(key), display_name=called, log=key in LOGARITHMIC or None)
        for key, called in settings.items()
    ]
    columns += [wr.ParallelCoordinatesPlotColumn(wr.SummaryMetric(name)) for name in names]
    return wr.ParallelCoordinatesPlot(title=title, columns=columns)


def _save(view: Any) -> str:
    """Save the view, in the place of the one of this name that was saved before; gives its address."""
    with _quiet():
        import wandb
        from wandb.sdk.lib.service.service_connection import WandbApiFailedError
        from wandb_workspaces.workspaces import internal

        try:
            view.entity = view.entity or wandb.Api().default_entity or ""
            if not view.entity:
                raise InputError("workspace: W&B knows no user or team for this key; give entity=NAME")
            # a view is found again by a name of eleven letters and digits, which is its address too
            named = hashlib.sha256(f"knobwise {view.name}".encode()).hexdigest()[:11]
            view._internal_name = internal._url_query_str_to_internal_name(named)
            view._internal_id = _saved_before(view, named)
            return str(view.save().url)
        except (wandb.Error, WandbApiFailedError) as error:
            said = str(error).splitlines()[0]
            raise InputError(f"workspace: W&B did not take the view ({said}); its project is {view.project}") from error


def _saved_before(view: Any, named: str) -> str:
    """The id of the view of this name, empty when there is none yet."""
    from wandb_workspaces.workspaces import internal

    try:
        return str(internal.get_view_dict(view.entity, view.project, named)["id"])
    except ValueError as error:
        if str(error).startswith("Project"):
            raise InputError(
                f"workspace: there is no project {view.entity}/{view.project} yet; the first online run makes it: "
                "knobwise train tracking=online"
            ) from error
        return ""


@contextmanager
def _quiet() -> Iterator[None]:
    """W&B's own lines are kept back: ours say the same."""
    before = os.environ.get("WANDB_SILENT")
    os.environ["WANDB_SILENT"] = "true"  # an empty one makes wandb raise
    try:
        yield
    finally:
        if before is None:
            del os.environ["WANDB_SILENT"]
        else:
            os.environ["WANDB_SILENT"] = before
