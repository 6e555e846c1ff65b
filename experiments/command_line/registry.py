"""What there is to choose from: config groups and options of the verbs, and the experiments. The
settings of one verb are imported alone."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from knobwise.experiments.command_line.verbs import settings_of_verb
from knobwise.experiments.settings.choices import CHOICES, CONF, experiments

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

READERS = {
    "profile": "profiles:PROFILES",
    "trained_on": "profiles:PROFILES",
    "beams": "selector_options:BEAMS",
    "encoder": "selector_options:ENCODERS",
}
"""The groups whose choices have options of their own: where these are, as module:name in
`knobwise.experiments.settings`."""


@cache
def readers_of(group: str) -> Mapping[str, type[DataclassInstance]]:
    """Return the choices of a group that have options of their own: a dataclass for each name."""
    if group not in READERS:
        return {}
    module, _, name = READERS[group].partition(":")
    choices = getattr(import_module(f"knobwise.experiments.settings.{module}"), name)
    readers: Mapping[str, type[DataclassInstance]] = choices
    return readers


def schema_of(verb: str, arguments: Sequence[str]) -> str:
    """Return the key of a verb in `VERBS`. `train` has two, one for controllers and one for
    selectors; the name of the experiment decides."""
    selects = any(
        re.match(r"\+*experiment=(?:\w+\()?['\"]?selector", argument) for argument in arguments
    )
    if verb == "train" and selects:
        return "train_selector"
    return verb


@cache
def config_groups(verb: str) -> dict[str, str | None]:
    """Return the groups in the settings of a verb with their default choices."""
    defaults = OmegaConf.load(CONF / f"{verb}.yaml").defaults
    groups = [entry for entry in defaults if OmegaConf.is_dict(entry)]
    # a choice may be that of another group, ${policy}
    choices: Any = OmegaConf.to_container(OmegaConf.merge({}, *groups), resolve=True)
    return {group: choice for group, choice in choices.items() if not group.startswith("override ")}


@cache
def register_settings(verb: str) -> None:
    """Tell Hydra the settings of a verb, and the choices of its groups but the experiments.

    Nothing else, since Hydra copies all that it was told for each composition.
    """
    store = ConfigStore.instance()
    store.store(name=f"{verb}_schema", node=settings_of_verb(verb))
    for group in config_groups(verb):
        choices = readers_of(group) or CHOICES.get(group, {})
        for name, node in choices.items():
            store.store(group=group, name=name, node=node)


def names_of_choices(group: str) -> list[str]:
    """Return the names of all choices of a config group, the experiments included."""
    if group == "experiment":
        return experiments()
    return sorted(readers_of(group) or CHOICES[group])


def question_of_experiment(experiment: str) -> str:
    """Return the question that an experiment answers, from the comment below the first line of its
    file; "" without such a file."""
    path = CONF / "experiment" / f"{experiment}.yaml"
    if not path.exists():
        return ""
    # the first line is Hydra's package
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.removeprefix("#").strip() for line in comment)


class Option(NamedTuple):
    """An option as one line of help."""

    key: str
    default: str
    meaning: str
    choice: str = ""
    """The choice of a group that alone has this option, such as `profile=table`; "" for none."""


def field_docs(node: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass and of its bases, by field name."""
    docs = {}
    for part in reversed(node.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        for statement, text in itertools.pairwise(definition.body):  # type: ignore[attr-defined]
            if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Expr):
                docs[ast.unparse(statement.target)] = " ".join(ast.literal_eval(text.value).split())
    return docs


def options_in(
    settings: DataclassInstance, groups: Mapping[str, str | None], prefix: str = ""
) -> Iterator[Option]:
    """Yield every option in an instance of a settings dataclass, with its value as the default;
    for a group the default is its choice in `groups`."""
    docs = field_docs(type(settings))
    for f in fields(settings):
        value = getattr(settings, f.name)
        key = f"{prefix}{f.name}"
        meaning = docs[f.name]
        # the entries of a dict explain themselves
        known = [f"`{word}`: {kind.meaning}" for word, kind in f.metadata.get("words", {}).items()]
        if known:
            meaning = f"{meaning} {'; '.join(known)}."
        words = {MISSING: "must be given", "None": "none", "": "empty"}
        default = words.get(str(value), str(value))
        # parts of the value, by the choice that has them; "" for all
        nested = {}
        if is_dataclass(value) and not isinstance(value, type):
            default = ""
            nested[""] = value
        if f.name in groups and f.name != "experiment":
            default = groups[f.name] or "none"
            meaning = f"Group: {', '.join(names_of_choices(f.name))}. {meaning}"
            for name, reader in readers_of(f.name).items():
                nested[f"{key}={name}"] = reader()
        yield Option(key, default, meaning)
        for choice, part in nested.items():
            for option in options_in(part, {}, f"{key}."):
                if option.key != f"{key}.format":
                    yield option._replace(choice=choice)
