"""The settings that `key=value` words stand for. Hydra composes them; each mistake becomes one line that says what is
wrong and what is probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import BooleanNode, DictConfig, FloatNode, IntegerNode, ListConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from knobwise.common.errors import InputError
from knobwise.experiments.command_line.groups import (
    CONF,
    GROUPS,
    GROUPS_OF,
    experiments,
    field_docs,
    question_of,
    register,
    schema_of,
    schema_options,
)

__all__ = ["CONF", "GROUPS", "composed", "field_docs", "parsed", "question_of", "read_settings", "schema_of"]

ABOUT_HYDRA = r"[+~]*hydra[./]"
"""The start of a word that sets an option of Hydra itself, such as the launcher of a sweep."""
READERS = {"profile": "table", "beams": "files"}
"""The choice of each group that reads a file."""
TYPES = {BooleanNode: "true or false", IntegerNode: "a whole number", FloatNode: "a number"}


def read_settings(verb: str, words: Sequence[str]) -> Any:
    """The settings of a verb, as an instance of its dataclass.

    Raises:
        InputError: an unknown key or group, a value of the wrong type or a missing one, an option of sweeps.
    """
    for word in words:
        if re.match(ABOUT_HYDRA, word):
            raise InputError(
                f"{word}: launchers and Hydra's other options are for sweeps; add -m (knobwise train -m …)"
            )
    check_flags(verb, words)
    try:
        return OmegaConf.to_object(composed(verb, words))
    except MissingMandatoryValue as error:
        raise InputError(f"{error.full_key} must be given") from error
    except OmegaConfBaseException as error:
        raise InputError(f"{error.full_key}: {_first_line(error)}") from error
    except ValueError as error:  # a dataclass refuses a value
        raise InputError(str(error)) from error


def composed(verb: str, words: Sequence[str], with_hydra: bool = False) -> DictConfig:
    """The config that Hydra composes, unchecked; with Hydra's own options if `with_hydra`.

    Raises:
        InputError: an unknown key or group, a value of the wrong type.
    """
    with _explaining(verb, words):
        return compose(verb, with_variants(words), return_hydra_config=with_hydra)


def parsed(words: Sequence[str]) -> list[Override]:
    """`key=value` words as Hydra reads them.

    Raises:
        InputError: a word that cannot be read.
    """
    with _explaining("train", words):
        loader = GlobalHydra.instance().config_loader()  # knows what `glob` stands for
        return list(OverridesParser.create(loader).parse_overrides(list(words)))


@contextmanager
def _explaining(verb: str, words: Sequence[str]) -> Iterator[None]:
    """A block in which Hydra knows all settings, and whose errors become an InputError."""
    register()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise InputError(_explained(verb, words, error)) from error


def with_variants(words: Sequence[str]) -> list[str]:
    """Variants have names of the user's choice, so their keys may be new to Hydra."""
    return [f"++{word}" if re.match(r"variants[.=]", word) else word for word in words]


# -- mistakes ----------------------------------------------------------------------------------------------------------


def _listed_by(verb: str) -> str:
    command = "train experiment=selector" if verb == "train_selector" else verb
    return f"(`knobwise {command} --help` lists every option)"


def _did_you_mean(suggestions: Iterable[str], end: str = "") -> str:
    """`; did you mean a or b?`, or `end` where there is nothing to suggest."""
    text = " or ".join(suggestions)
    return f"; did you mean {text}?" if text else end


def _nearest(key: str, keys: Sequence[str]) -> list[str]:
    """Keys that a mistyped one may stand for: spelt almost alike, else with the same last part (`optimiser.lr` for
    `lr`), else spelt somewhat alike."""
    same_end = [name for name in keys if "." in name and name.split(".")[-1] == key.split(".")[-1]]
    alike = get_close_matches(key, keys, n=1, cutoff=0.8)
    return alike or same_end[:3] or get_close_matches(key, keys, n=1)


def check_flags(verb: str, words: Sequence[str], allowed: Sequence[str] = ()) -> None:
    """Refuse `--key value`, `+key=value` and the like.

    Raises:
        InputError: with the same as key=value, where the key is known.
    """
    for position, word in enumerate(words):
        if not word.startswith(("-", "+", "~")) or word in allowed or re.match(r"[+~]+(hydra|variants)[./]", word):
            continue
        key, equals, value = word.lstrip("-+~").partition("=")
        following = words[position + 1] if position + 1 < len(words) else "-"
        if not equals:
            value = "true" if "=" in following or following.startswith("-") else following
        known = list(schema_options(verb)) if word.startswith("-") and len(key) > 1 else []
        same = _nearest(key.replace("-", "_"), known)
        hint = f": try {' or '.join(f'{name}={value}' for name in same)}" if same else f" {_listed_by(verb)}"
        if word in ("-m", "--multirun"):
            hint = "; only knobwise train has sweeps"
        raise InputError(f"{word}: options are key=value, not --flags{hint}")


def _explained(verb: str, words: Sequence[str], error: Exception) -> str:
    """One line for what Hydra or OmegaConf refuse in the words of a command."""
    if isinstance(error, OverrideParseException):
        return _unreadable(str(error.override).removeprefix("++"))
    overrides = OverridesParser.create().parse_overrides(list(words))
    for override in overrides:
        word, key = str(override.input_line), override.key_or_group
        value = word.partition("=")[2]
        choices = experiments() if key == "experiment" else GROUPS[key] if key in GROUPS_OF[verb] else None
        if not key:
            return _unreadable(word)
        if override.is_sweep_override():
            return _several_values(verb, key, value)
        if choices is not None and value.strip("'\"") not in choices:
            return _no_such_choice(key, value.strip("'\""), choices)
        if choices is None and key not in schema_options(verb) and not re.match(r"hydra[./]|variants[.]", key):
            suggestions = [f"{name}={value}" for name in _nearest(key, list(schema_options(verb)))]
            return f"{word}: there is no such option{_did_you_mean(suggestions, f' {_listed_by(verb)}')}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return _no_such_choice(group, choice, error.options or ())
    cause = error.__cause__ or error
    full_key = str(getattr(cause, "full_key", "") or "").split("[")[0]
    word = next((str(o.input_line).lstrip("+") for o in reversed(overrides) if o.key_or_group == full_key), full_key)
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and full_key in schema_options(verb):
        return f"{word}: is an option of {schema_options(verb)[full_key].choice}; give that too"
    return _wrong_type(word, cause) if isinstance(cause, ValidationError) else _first_line(cause)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]


def _unreadable(word: str) -> str:
    """What is wrong with a word that Hydra's grammar cannot read."""
    if not re.match(r"[+~]*[\w./@-]+=", word):
        return f"{word!r}: is not of the form key=value, such as policy.hidden=48"
    return f"{word!r}: this value cannot be read; quote one with blanks or brackets twice: 'key=\"a (1)\"'"


def _several_values(verb: str, key: str, values: str) -> str:
    """What is wrong with `key=a,b` outside a sweep."""
    sweep = f"; -m makes a run for each: knobwise train -m {key}={values}" if verb.startswith("train") else ""
    default = schema_options(verb)[key].default if key in schema_options(verb) else ""
    if default.startswith(("[", "(")):
        return f"{key}={values}: a list is {key}=[{values}]{sweep}"
    return f"{key}={values}: takes one value{sweep}; quote a comma inside a text twice: '{key}=\"a,b\"'"


def _no_such_choice(group: str, choice: str, choices: Iterable[str]) -> str:
    """What is wrong with `group=choice`; a file may be meant to be read."""
    if group in READERS and (Path(choice).suffix or "/" in choice):
        return f"{group}={choice}: is a file; did you mean {group}={READERS[group]} {group}.path={choice}?"
    names = list(choices)
    suggestions = [f"{group}={name}" for name in get_close_matches(choice, names, n=1)]
    problem = f"does not exist{_did_you_mean(suggestions)}" if suggestions else f"must be one of {', '.join(names)}"
    return f"{group}={choice}: {problem}"


def _wrong_type(word: str, cause: ValidationError) -> str:
    """What is wrong with `key=value`, by the node of OmegaConf that it was meant for."""
    key, _, value = word.partition("=")
    node = cause.child_node
    if cause.value is None:
        return f"{key}=null: must have a value"
    if isinstance(node, DictConfig):
        return f"{word}: {key} is a section; its options are {key}.…"
    if isinstance(node, ListConfig) or "ListConfig" in _first_line(cause):  # a list that is null has no such node
        return f"{word}: must be a list, {key}=[{value or '…'}]"
    kind = next((name for kind, name in TYPES.items() if isinstance(node, kind)), None)
    return f"{word}: must be {kind}" if kind else f"{word}: {_first_line(cause)}"
