"""Mistakes on the command line, each as one line with what may be meant."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from knobwise.common.errors import InputError
from knobwise.envs.readers.folders import is_table
from knobwise.experiments.command_line.flags import in_our_words, meaning_of
from knobwise.experiments.command_line.registry import config_groups, names_of_choices, options_in
from knobwise.experiments.command_line.verbs import settings_of_verb
from knobwise.experiments.settings.words import nearest_options, shell_word

FILES = {"profile": "table", "trained_on": "table", "beams": "files"}
"""Groups of what is read, and their choice for a file of any name."""

MERGING = r"Error merging override (\S+)\s+"
LISTED = MERGING + r"Cannot convert 'list' to string.*"
PLAINER = {
    r"Could not override '([^']+)': Key '[^']+' not in '\w+'": r"no option '\1'",
    MERGING + r"Value .* could not be converted to Integer": r"\1: must be a whole number",
    MERGING + r"Value .* could not be converted to Float": r"\1: must be a number",
    MERGING + r"Value .* is not a valid bool.*": r"\1: must be true or false",
    MERGING + r"Invalid type assigned: .*": r"\1: cannot be set as a whole; set an option in it",
    MERGING + r"Invalid value assigned: .* is not a ListConfig.*": r"\1: must be a list",
    LISTED.replace(r"\S+", r"profile\.features=\S+"): (
        r"\1: must be one file, which may name the data set of each sample in `dataset`"
    ),
    LISTED: r"\1: must be a single value, not a list",
}
"""What Hydra and OmegaConf say → the same without names of classes."""
UNKNOWN_CHOICE = re.compile(r"In '[^']*': Could not find '(.+)/([^/]+)'\s+Available.*?:(.*)", re.S)

IN_MAPPING = re.compile(
    r"Could not override '([^']+)\.([^'.]+)(?:\.[^']*)?': Key '\2' is not in struct"
)
"""An entry of an option that takes all its entries at once, such as `loss.settings`."""


@contextmanager
def explain_mistakes(
    verb: str, arguments: Sequence[str], *errors: type[Exception]
) -> Iterator[None]:
    """Raise InputError, with a suggestion, where Hydra refuses the arguments of a verb, or one of
    these errors is raised."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, *errors) as error:
        # lines about our dataclasses and where Hydra looks for files help nobody
        technical = r"(?m)^\s*(full_key|\w+_type|Config search path|provider|To append)\b.*"
        text = re.sub(technical, "", f"{error}\n{error.__cause__ or ''}").strip()
        # a line that ends in a full stop or a colon is explained by the next one
        text = re.sub(r"[.:]\s*\n\s*", ": ", text)
        for pattern, words in PLAINER.items():
            text = re.sub(pattern, words, text)
        if unknown := UNKNOWN_CHOICE.match(text):
            group, value, choices = unknown.groups()
            text = f"{group}={value}: no such choice; choose one of {', '.join(choices.split())}"
        if entry := IN_MAPPING.match(text):
            raise InputError(_whole_mapping(entry[1], entry[2], arguments)) from error
        lone = [word for word in arguments if "=" not in word and not word.startswith(("~", "-"))]
        if lone:
            text = f"{lone[0]}: is no option, which is key=value"
        elif isinstance(error, errors):
            # such an error does not say which word it means
            text = f"{' '.join(arguments)}: {text}"
        raise InputError(text + _suggestion(verb, arguments)) from error


def _whole_mapping(key: str, name: str, arguments: Sequence[str]) -> str:
    """Say how an option takes the entries that the arguments set by themselves, as that of this
    name."""
    settings = [word.lstrip("+~").partition("=")[::2] for word in arguments]
    entries = {
        option.removeprefix(f"{key}."): value
        for option, value in settings
        if option.startswith(f"{key}.")
    }
    # an experiment may set it too
    entries = entries or {name: "VALUE"}
    whole = [value[1:-1] for option, value in settings if option == key]
    (first, *_) = entries.values()
    if len(entries) == 1 and not whole and not set("[({'\"") & {*first}:
        # of a sweep; a list has commas of its own
        mappings = [f"{{{name}:{value}}}" for value in first.split(",")]
    else:
        mappings = [f"{{{','.join([*whole, *map(':'.join, entries.items())])}}}"]
    words = shell_word(key, ",".join(mappings))
    return f"{key}.{name}: {key} takes all its entries at once; did you mean {words}?"


def _suggestion(verb: str, arguments: Sequence[str]) -> str:
    """Return `; did you mean …?` for the first argument with an unknown key or choice, or ""."""
    if not arguments:
        return ""
    groups = {**config_groups(verb), "experiment": None}
    # the choices that have each option; "" for all
    choices: dict[str, list[str]] = {}
    for option in options_in(settings_of_verb(verb)(), groups):
        choices.setdefault(option.key, []).append(option.choice)
    names = list(choices)
    for argument in arguments:
        key, _, value = argument.lstrip("+~-").partition("=")
        is_run = "checkpoint" in names and os.path.isdir(argument)
        if is_table(key) or (os.path.exists(argument) and not is_run):
            # the file or folder alone
            value = argument
            key = "profile"
        choosing = [f"{name}={argument}" for name in groups if argument in names_of_choices(name)]
        if is_run:
            # the folder of a run alone
            close = [shell_word("checkpoint", argument)]
        elif choosing:
            # a choice without its group
            close = choosing
        elif key in FILES and (Path(value).suffix or os.path.isdir(value)):
            close = [f"{key}={FILES[key]} {shell_word(f'{key}.path', value)}"]
        elif key in groups:
            close = [f"{key}={name}" for name in get_close_matches(value, names_of_choices(key), 2)]
        elif key not in names and (words := in_our_words(verb, key, value)):
            # a name of the original's scripts
            return f"; did you mean {words}{meaning_of(words)}?"
        elif needed := _choice_with(key, choices.get(key, []), groups, arguments):
            close = [f"{needed} {argument}"]
        else:
            close = [f"{name}={value}" for name in nearest_options(key, names)]
        if close and argument not in close and ("," not in value or os.path.exists(value)):
            return f"; did you mean {' or '.join(dict.fromkeys(close))}?"
    return ""


def _choice_with(
    key: str, choices: Sequence[str], groups: Mapping[str, str | None], arguments: Sequence[str]
) -> str:
    """Return the choice of a group that an option needs, such as `profile=table`; "" if it needs
    none, or the arguments choose one."""
    group = key.partition(".")[0]
    chosen = any(argument.startswith(f"{group}=") for argument in arguments)
    if chosen or not choices or {"", f"{group}={groups.get(group)}"} & {*choices}:
        return ""
    usual = f"{group}={FILES.get(group)}"
    return usual if usual in choices else choices[0]
