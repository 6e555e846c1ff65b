"""The settings of every verb of the command line. Those of one verb are imported alone."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

VERBS = {
    "train": "experiments.settings.options:TrainRun",
    "train_selector": "experiments.settings.selector_options:SelectorRun",
    "inspect": "experiments.settings.measuring_options:InspectRun",
    "evaluate": "experiments.settings.deployment_options:EvaluateRun",
    "explain": "experiments.settings.deployment_options:ExplainRun",
    "profile": "experiments.settings.measuring_options:ProfileRun",
    "export": "experiments.settings.deployment_options:ExportRun",
    "decide": "experiments.settings.deployment_options:DecideRun",
    "update": "experiments.settings.deployment_options:UpdateRun",
    "serve": "serving.proxy.settings:ServeRun",
    "compare": "experiments.settings.comparison_options:CompareRun",
    "workspace": "experiments.settings.comparison_options:WorkspaceRun",
}
"""The dataclass of each verb, as module:name. `train` has two, for controllers and for
selectors."""


@cache
def settings_of_verb(verb: str) -> type[DataclassInstance]:
    """Return the dataclass of a verb's settings."""
    module, _, name = VERBS[verb].partition(":")
    settings: type[DataclassInstance] = getattr(import_module(f"knobwise.{module}"), name)
    return settings
