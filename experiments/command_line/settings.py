"""Every setting of the command line, for Hydra: config groups, reading `key=value`, help."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from knobwise.agents.controller.heads import HEADS
from knobwise.agents.training.settings import EXPERTS, LossConfig, OptimiserConfig, PolicyConfig
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import BudgetConfig
from knobwise.envs.configurations.reward import RewardConfig
from knobwise.experiments.settings.options import EXPERIMENTS, VERBS
from knobwise.experiments.settings.profiles import PROFILES
from knobwise.experiments.settings.selector_options import SELECTOR_GROUPS
from knobwise.experiments.tracking.tracker import TrackingSettings

CONF = Path(__file__).resolve().parents[1] / "conf"
ABOUT_HYDRA = r"[+~]*hydra[./]"
"""How a word begins that sets something of Hydra's own, such as the launcher of a sweep."""


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
        **{name: PolicyConfig(structure=name) for name in HEADS},
    },
    "loss": {name: LossConfig(objective=name) for name in ("exact", "sampled")},
    # what suits each structure, under its name
    "optimiser": {
        "auto": OptimiserConfig(**_OF_UTILITY),
        "utility": OptimiserConfig(**_OF_UTILITY),
        **{name: OptimiserConfig() for name in HEADS},
    },
    "tracking": {name: TrackingSettings(mode=name) for name in ("auto", "offline", "online", "disabled")},
}
_FIRST = {"profile": "builtin", "budget": "quantiles", "reward": "utility", "policy": "auto", "loss": "exact"}
_FIRST |= {"optimiser": "${policy}", "tracking": "auto", "beams": "builtin"}
_GROUPS_OF = {
    "train": ("profile", "budget", "reward", "policy", "loss", "optimiser", "tracking"),
    "train_selector": ("beams", "tracking"),
    "inspect": ("profile",),
    "evaluate": ("profile", "reward", "beams"),
    "profile": (),
    "export": ("profile",),
    "compare": (),
    "workspace": (),
}
"""Which groups the settings of a verb are put together from."""


def schema_of(verb: str, words: Sequence[str]) -> str:
    """Which of `VERBS` is meant: controllers and selectors are both trained, by experiments with their own settings."""
    named = r"\+*experiment=(?:\w+\()?['\"]?selector"
    selector = verb == "train" and any(re.match(named, word) for word in words)
    return "train_selector" if selector else verb


@cache
def register() -> None:
    """Tell Hydra of the groups and of the verbs."""
    store = ConfigStore.instance()
    for group, options in GROUPS.items():
        for name, node in options.items():
            store.store(group=group, name=name, node=node)
    for verb, node in VERBS.items():
        defaults: list[Any] = [{group: _FIRST[group]} for group in _GROUPS_OF[verb]]
        if verb in EXPERIMENTS:
            defaults.append({"experiment": EXPERIMENTS[verb]})
        store.store(name=f"{verb}_schema", node=node)
        root = {"defaults": [f"{verb}_schema", *defaults, "_self_"], "hydra": HYDRA}
        store.store(name=verb, node=root)


# a run keeps its own folder, and its own config.yaml; Hydra is asked to leave nothing of its own behind
HYDRA = {
    "run": {"dir": "."},
    "sweep": {"dir": "${runs}/multirun", "subdir": "."},
    "sweeper": {"params": {}},
    "output_subdir": None,
    "job": {"chdir": False},
}


def settings_of(config: DictConfig) -> Any:
    """The dataclass instances that a composed config stands for, checked.

    Raises:
        InputError: a value that is missing or of the wrong type.
    """
    try:
        return OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        if isinstance(error, MissingMandatoryValue):
            raise InputError(f"settings: {error.full_key} must be given") from error
        raise InputError(f"settings: {str(error).splitlines()[0]} ({error.full_key})") from error
    except InputError:
        raise
    except ValueError as error:  # what the dataclasses themselves refuse
        raise InputError(f"settings: {error}") from error


def read_settings(verb: str, overrides: list[str]) -> Any:
    """Compose the settings of a verb from `key=value` words.

    Raises:
        InputError: an unknown key or group, a value of the wrong type, a setting that only a sweep has.
    """
    for word in overrides:
        if re.match(ABOUT_HYDRA, word):
            raise InputError(
                f"{word}: launchers and Hydra's other settings are for sweeps; add -m (`knobwise train -m …`)"
            )
        if word.startswith(("-", "+", "~", "=")):
            raise InputError(f"settings: {word!r}: settings are given as key=value, and every key exists already")
    return settings_of(composed(verb, overrides))


def composed(verb: str, overrides: Sequence[str], with_hydra: bool = False) -> DictConfig:
    """What Hydra puts together from `key=value` words, not yet checked; its own settings too when asked for.

    Raises:
        InputError: an unknown key or group, a value of the wrong type.
    """
    register()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose(verb, with_variants(overrides), return_hydra_config=with_hydra)
    except OverrideParseException as error:
        raise InputError(f"settings: {_unreadable(str(error.override).removeprefix('++'))}") from error
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ or error
        lines = f"{error}\n{cause if cause is not error else ''}".split("Config search path")[0].splitlines()
        lines = [line for line in lines if not line.startswith("To append to your config")]
        words = " ".join(dict.fromkeys(line.strip() for line in lines if line.strip()))
        if wrong := re.search(r"Could not override '([^']+)'", words):
            close = get_close_matches(wrong[1], [key for key, _, _ in help_lines(verb)], n=1)
            words = f"there is no {wrong[1]!r}" + (f"; did you mean {close[0]!r}?" if close else "")
        if merged := re.search(r"Error merging override (\S+?)=(.*?) (Invalid|Value) ", words):
            words = _of_another_type(merged[1], merged[2], words)
        if several := re.search(r"Ambiguous value for argument '([^=]+)=(.*?)'(?:\n|\s|$)", words):
            words = _several(verb, *several.groups())
        if empty := re.search(r"override (\S+)=null field '\S+' is not Optional", words):
            words = f"{empty[1]}=null: must have a value"
        shown = "train experiment=selector" if verb == "train_selector" else verb
        raise InputError(f"settings: {words} (`knobwise {shown} --help` lists every key)") from error


def _several(verb: str, key: str, values: str) -> str:
    """What is wrong with `key=a,b`."""
    usual = next((default for name, default, _ in help_lines(verb) if name == key), "")
    a_list = usual.startswith("[")
    words = f"{key}={values}: " + (f"a list is {key}=[{values}]" if a_list else "takes one value")
    words += f"; -m makes a run for each: knobwise train -m {key}={values}" if verb.startswith("train") else ""
    return words if a_list else f"{words}; a comma inside a text is quoted twice: '{key}=\"a,b\"'"


def _unreadable(word: str) -> str:
    """What is wrong with a word that Hydra's grammar has no place for."""
    if not re.match(r"[+~]*[\w./@-]+=", word):
        return f"{word!r}: is not of the form key=value, such as policy.hidden=48"
    return f"{word!r}: this value cannot be read; one with blanks or brackets is quoted twice: 'key=\"a (1)\"'"


def _of_another_type(key: str, value: str, said: str) -> str:
    """What is wrong with `key=value`, where OmegaConf speaks of types."""
    if "is not a ListConfig" in said:
        return f"{key}={value}: must be a list, {key}=[{value or '…'}]"
    if "is not a subclass of" in said:
        return f"{key}={value}: has settings of its own and is no choice of one; they are called {key}.…"
    wanted = re.search(r"not a valid (\w+)|converted to (\w+)", said)
    kind = {"bool": "true or false", "Integer": "a whole number", "Float": "a number"}
    name = next(filter(None, wanted.groups())) if wanted else ""
    return f"{key}={value}: must be {kind[name]}" if name in kind else said.split(" full_key")[0]


def question_of(experiment: str) -> str:
    """What an experiment asks, from the head of its file."""
    lines = (CONF / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8").splitlines()[1:]
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    return " ".join(line for line in comment if line)


def divided(words: Sequence[str]) -> tuple[list[Override], list[str]]:
    """The run's settings as Hydra reads them, and the words that are about Hydra itself; flags are left out.

    Raises:
        InputError: words that cannot be read, or Ray asked for and not installed.
    """
    given = [word for word in words if not word.startswith("-")]
    about_hydra = [word for word in given if re.match(ABOUT_HYDRA, word)]
    missing = find_spec("ray") is None or find_spec("hydra_plugins.hydra_ray_launcher") is None
    if missing and any(re.match(r"[+]*hydra/launcher=ray", word) for word in about_hydra):
        raise InputError("hydra/launcher=ray: Ray is not installed; `pip install 'knobwise[ray]'` brings it")
    return parsed([word for word in given if word not in about_hydra]), about_hydra


def parsed(words: list[str]) -> list[Override]:
    """`key=value` words as Hydra reads them.

    Raises:
        InputError: one that cannot be read.
    """
    register()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()  # knows what `glob` stands for
            return list(OverridesParser.create(loader).parse_overrides(words))
    except OverrideParseException as error:
        raise InputError(f"settings: {_unreadable(str(error.override))}") from error


def with_variants(words: Sequence[str]) -> list[str]:
    """Variants are named by whoever trains them, so their keys may be new."""
    return [f"++{word}" if re.match(r"variants[.=]", word) else word for word in words]


def field_docs(node: type[Any]) -> dict[str, str]:
    """The docstring under each field of a dataclass and of those it is made from, by name."""
    found: dict[str, str] = {}
    for part in reversed(node.__mro__[:-1]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(part)))
        assert isinstance(tree.body[0], ast.ClassDef)
        previous: ast.stmt | None = None
        for statement in tree.body[0].body:
            if isinstance(previous, ast.AnnAssign) and isinstance(statement, ast.Expr):
                assert isinstance(previous.target, ast.Name)
                assert isinstance(statement.value, ast.Constant)
                found[previous.target.id] = " ".join(str(statement.value.value).split())
            previous = statement
    return found


def help_lines(verb: str) -> list[tuple[str, str, str]]:
    """(key, default, meaning) of every setting of a verb."""
    needed = [f.name for f in fields(VERBS[verb]) if f.default is MISSING and f.name not in _GROUPS_OF[verb]]
    usual = read_settings(verb, [f"{name}=[]" for name in needed])
    for name in needed:
        setattr(usual, name, MISSING)
    return _lines(usual, "", _GROUPS_OF[verb])


def _lines(node: Any, prefix: str, groups: Sequence[str] = ()) -> list[tuple[str, str, str]]:
    docs, lines = field_docs(type(node)), []
    for f in fields(node):
        value, key = getattr(node, f.name), f"{prefix}{f.name}"
        if f.name in groups and f.name in ("profile", "beams"):  # every option has settings of its own
            lines.append((key, _FIRST[f.name], docs[f.name]))
            for option, node_of in GROUPS[f.name].items():
                own = [line for line in _lines(node_of(), f"{key}.") if line[0] != f"{key}.format"]
                lines += [(f"{name} ({key}={option})", usual, meaning) for name, usual, meaning in own]
        elif is_dataclass(value):
            lines.append((key, _FIRST[f.name] if f.name in groups else "", docs[f.name]))
            lines += _lines(value, f"{key}.")
        else:
            usual = "must be given" if value == MISSING else "none" if value is None else str(value)
            lines.append((key, usual, docs[f.name]))
    return lines
