"""Every setting of the command line as Hydra's config groups, and the listing of them with default and meaning."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from knobwise.agents.controller.settings import EXPERTS, HEAD_NAMES, PolicyConfig
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.envs.configurations.settings import BudgetConfig, RewardConfig
from knobwise.experiments.settings.options import EXPERIMENTS, VERBS
from knobwise.experiments.settings.profiles import PROFILES
from knobwise.experiments.settings.selector_options import SELECTOR_GROUPS
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.losses.settings import LossConfig

CONF = Path(__file__).resolve().parents[1] / "conf"

_UTILITY: dict[str, Any] = {"structure": "utility", "members": 5, "hidden": 96, "layers": 2, "dropout": 0.2}
_OF_UTILITY: dict[str, Any] = {
    "warmup_iterations": 150,
    "iterations": 50,
    "contexts": 512,
    "minibatch": 128,
    "warmup_lr": 3e-3,
    "lr": 2e-4,
    "weight_decay": 0.05,
    "clip_grad": 5.0,
    "evaluate_every": 10,
}

GROUPS: dict[str, dict[str, Any]] = {
    "profile": PROFILES,
    **SELECTOR_GROUPS,
    "budget": {
        **{name: BudgetConfig(strategy=name) for name in ("quantiles", "relative", "uniform", "fixed")},
        "mean": BudgetConfig(sense="mean"),
    },
    "reward": {"utility": RewardConfig(kind="utility", miss=0.2), "shaped": RewardConfig(kind="shaped")},
    "policy": {
        "auto": PolicyConfig(**_UTILITY, experts=EXPERTS),
        "utility": PolicyConfig(**_UTILITY),
        **{name: PolicyConfig(structure=name) for name in HEAD_NAMES},
    },
    "loss": {name: LossConfig(objective=name) for name in ("exact", "sampled")},
    # what suits each structure, under its name
    "optimiser": {
        "auto": OptimiserConfig(**_OF_UTILITY),
        "utility": OptimiserConfig(**_OF_UTILITY),
        **{name: OptimiserConfig() for name in HEAD_NAMES},
    },
    "tracking": {name: TrackingSettings(mode=name) for name in ("auto", "offline", "online", "disabled")},
}
_DEFAULTS = {"profile": "builtin", "budget": "quantiles", "reward": "utility", "policy": "auto", "loss": "exact"}
_DEFAULTS |= {"optimiser": "${policy}", "tracking": "auto", "beams": "builtin"}
GROUPS_OF = {
    "train": ("profile", "budget", "reward", "policy", "loss", "optimiser", "tracking"),
    "train_selector": ("beams", "tracking"),
    "inspect": ("profile",),
    "evaluate": ("profile", "reward", "beams"),
    "profile": (),
    "export": ("profile",),
    "compare": (),
    "workspace": (),
}
"""The groups in the settings of each verb."""

# a run has its own folder and config.yaml, so Hydra writes none
HYDRA = {
    "run": {"dir": "."},
    "sweep": {"dir": "${runs}/multirun", "subdir": "."},
    "sweeper": {"params": {}},
    "output_subdir": None,
    "job": {"chdir": False},
}
SWEEP = "sweep"
"""The config that Hydra launches the jobs of a sweep by: each job is one value of `job`."""


def schema_of(verb: str, words: Sequence[str]) -> str:
    """The key in `VERBS`: `train` has one schema for controllers and one for selectors, by the experiment's name."""
    selector = r"\+*experiment=(?:\w+\()?['\"]?selector"
    return "train_selector" if verb == "train" and any(re.match(selector, word) for word in words) else verb


@cache
def register() -> None:
    """Tell Hydra the groups and the verbs."""
    store = ConfigStore.instance()
    for group, options in GROUPS.items():
        for name, node in options.items():
            store.store(group=group, name=name, node=node)
    for verb, node in VERBS.items():
        defaults: list[Any] = [{group: _DEFAULTS[group]} for group in GROUPS_OF[verb]]
        if verb in EXPERIMENTS:
            defaults.append({"experiment": EXPERIMENTS[verb]})
        store.store(name=f"{verb}_schema", node=node)
        store.store(name=verb, node={"defaults": [f"{verb}_schema", *defaults, "_self_"], "hydra": HYDRA})
    store.store(name=SWEEP, node={"runs": "runs", "job": 0, "hydra": HYDRA})


def question_of(experiment: str) -> str:
    """The question that an experiment answers, from the head of its file."""
    lines = (CONF / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8").splitlines()[1:]
    end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return " ".join(line.removeprefix("#").strip() for line in lines[:end]).strip()


def experiments() -> list[str]:
    """The names of all experiment files."""
    return sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


# -- the listing -------------------------------------------------------------------------------------------------------


class Option(NamedTuple):
    """One line of help."""

    key: str
    default: str
    meaning: str
    choice: str = ""
    """`profile=table` for an option that only this choice of a group has."""


def field_docs(node: type[Any]) -> dict[str, str]:
    """The docstring below each field of a dataclass and of its bases, by the field's name."""
    docs: dict[str, str] = {}
    for part in reversed(node.__mro__[:-1]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(part)))
        assert isinstance(tree.body[0], ast.ClassDef)
        body = tree.body[0].body
        for statement, text in pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(statement.target, ast.Name)
                assert isinstance(text.value, ast.Constant)
                docs[statement.target.id] = " ".join(str(text.value.value).split())
    return docs


def options_in(settings: Any, groups: Sequence[str] = (), prefix: str = "") -> Iterator[Option]:
    """Every option in an instance of a settings dataclass, with its value there as the default."""
    docs = field_docs(type(settings))
    for f in fields(settings):
        value, key = getattr(settings, f.name), f"{prefix}{f.name}"
        if f.name in groups and f.name in ("profile", "beams"):  # each choice has options of its own
            yield Option(key, _DEFAULTS[f.name], docs[f.name])
            for name, node in GROUPS[f.name].items():
                for option in options_in(node(), prefix=f"{key}."):
                    if option.key != f"{key}.format":
                        yield option._replace(choice=f"{key}={name}")
        elif is_dataclass(value):
            yield Option(key, _DEFAULTS[f.name] if f.name in groups else "", docs[f.name])
            yield from options_in(value, prefix=f"{key}.")
        else:
            default = {MISSING: "must be given", "None": "none"}.get(str(value), str(value))
            yield Option(key, default, docs[f.name])


@cache
def schema_options(verb: str) -> dict[str, Option]:
    """Every option of a verb by its key, with the defaults before groups and experiments are applied."""
    options: dict[str, Option] = {}
    for option in options_in(VERBS[verb](), GROUPS_OF[verb]):
        earlier = options.get(option.key)
        choice = f"{earlier.choice} or {option.choice}" if earlier else option.choice
        options[option.key] = option._replace(choice=choice)
    return options
