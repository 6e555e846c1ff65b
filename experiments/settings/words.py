"""Words of the command line, printed as a shell and Hydra take them, and text as OmegaConf takes
it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

MISSING: Any = "???"
"""What OmegaConf takes for an option that must be given. Its own name for it would cost readers of
profiles an import of OmegaConf."""
NULL = re.compile("null", re.IGNORECASE)
"""How Hydra writes that an option has no value."""
CALL = re.compile(r"(choice|range|interval|glob|sort|shuffle|tag|str|int|float|bool)\(.*\)", re.S)
"""Hydra's functions, most of which name the values of a sweep."""


def shell_word(key: str, value: object) -> str:
    """Return `key=value` as a shell takes it, and as the command line reads it back: as this very
    text, whether or not there is a file of this name."""
    text = str(value)
    if re.match("['\"]", text) or "${" in text or NULL.fullmatch(text) or CALL.fullmatch(text):
        text = quote_for_hydra(text)
    return shlex.quote(f"{key}={text}")


def quote_for_hydra(text: str) -> str:
    """Return text in quotes that Hydra removes, without interpolations."""
    # settings from Python need no words, and so no Hydra
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(escape_for_yaml(text), Quote.single).with_quotes()


def value_for_hydra(value: object) -> str:
    """Return what JSON holds as Hydra reads it."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {value_for_hydra(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(value_for_hydra, value))}]"
    if isinstance(value, str):
        return quote_for_hydra(value)
    return json.dumps(value)


def escape_for_yaml(text: str) -> str:
    """Return text that OmegaConf reads as this very text, without interpolations."""
    # a backslash takes the meaning of what follows; those before it are doubled
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def plain_values(values: object) -> object:
    """Return values whose text, in lists and mappings too, OmegaConf reads as it is; see
    `escaped`."""
    if isinstance(values, dict):
        return {key: plain_values(value) for key, value in values.items()}
    if isinstance(values, list):
        return [plain_values(value) for value in values]
    return escape_for_yaml(values) if isinstance(values, str) else values


def nearest_options(key: str, options: Iterable[str]) -> list[str]:
    """Return at most two options that may be meant by a key. An option is known by its whole key
    and by the last part of it."""
    names: dict[str, str] = {}
    for option in options:
        names[option] = option
        names.setdefault(option.rpartition(".")[2], option)
    return [names[name] for name in get_close_matches(key, names, 2)]
