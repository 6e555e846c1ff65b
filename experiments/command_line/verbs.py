"""The settings of each verb, and words that are read without Hydra, whose import and work take half
of a server's start."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from knobwise.common.errors import InputError
from knobwise.experiments.settings.words import MISSING

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
LIGHT = ("decide", "serve")
"""The verbs that need no torch for an exported controller. Their settings have no config groups."""
PLAIN = {
    int: re.compile(r"0|-?[1-9]\d{0,15}"),
    float: re.compile(r"-?(0|[1-9]\d{0,15})(\.\d{1,15})?"),
    bool: re.compile("true|false"),
    str: re.compile(r"(?!null$)[\w./:@~-]+", re.ASCII | re.IGNORECASE),
}
"""Values that mean the same in any grammar, by what an option holds."""


@cache
def settings_of_verb(verb: str) -> type[DataclassInstance]:
    """Return the dataclass of a verb's settings."""
    module, _, name = VERBS[verb].partition(":")
    settings: type[DataclassInstance] = getattr(import_module(f"knobwise.{module}"), name)
    return settings


def plain_settings(verb: str, words: Sequence[str]) -> Any:
    """Return the settings of a verb of `LIGHT` if all words are an option and a plain value, which
    the settings take; else None: what these words mean, or what is wrong with them, Hydra says."""
    kind: Any = settings_of_verb(verb)
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for word in words:
        key, _, text = word.partition("=")
        held = set(get_args(hints.get(key))) if isinstance(hints.get(key), UnionType) else set()
        (of_type, *others) = held - {NoneType} or {hints.get(key)}
        if key in values or others or of_type not in PLAIN:
            return None
        if not PLAIN[of_type].fullmatch(text):
            return None
        values[key] = text == "true" if of_type is bool else of_type(text)
    try:
        settings = kind(**values)
    except InputError:
        return None
    return None if MISSING in map(str, vars(settings).values()) else settings
