"""What is typed on the command line, in Hydra's grammar: options that are text, such as paths and
names, hold what was typed, whatever this grammar makes of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hydra.errors import HydraException

from knobwise.common.errors import InputError
from knobwise.experiments.settings.words import CALL, NULL, quote_for_hydra

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TEXT = "text"
TEXTS = "a list of texts"
ANY = "any"
NONE = "none"
"""What an option may hold; see `kinds_of_options`."""
KINDS = "kinds"
"""The key of the same in the metadata of a field, whose annotation cannot say it: OmegaConf has no
union of text and lists."""
INTERPOLATION = re.compile(r"\$\{([\w.]*:?)")
MAX_PARTS = 9
"""The most parts between commas that are tried as one name."""
Kinds = Mapping[str, set[str]]


def kinds_of_options(
    settings: DataclassInstance, groups: Mapping[str, Mapping[str, type[DataclassInstance]]]
) -> dict[str, set[str]]:
    """Return what the options in an instance of a settings dataclass may hold, by their keys: text,
    lists of texts, anything, nothing; an empty set for options of other kinds.

    Args:
        groups: the dataclasses that each config group chooses from.
    """
    kinds: dict[str, set[str]] = {}
    hints = get_type_hints(type(settings))
    for f in fields(settings):
        value = getattr(settings, f.name)
        parts = [value] if is_dataclass(value) and not isinstance(value, type) else []
        for choice in groups.get(f.name, {}).values():
            parts.append(choice())
        for part in parts:
            for key, held in kinds_of_options(part, groups).items():
                kinds.setdefault(f"{f.name}.{key}", set()).update(held)
        types = {hints[f.name]}
        if isinstance(hints[f.name], UnionType):
            types = {*get_args(hints[f.name])}
        meanings = {
            str: TEXT,
            list[str]: TEXTS,
            list[str | None]: TEXTS,
            Any: ANY,
            type(None): NONE,
        }
        if f.name not in ("experiment", *groups):
            kinds[f.name] = {kind for of_type, kind in meanings.items() if of_type in types}
            kinds[f.name] |= f.metadata.get(KINDS, set())
    return kinds


def literal(arguments: Sequence[str], kinds: Kinds, sweep: bool = False) -> list[str]:
    """Return words in Hydra's grammar, in which text is what was typed.

    A file that exists is taken by its name. Other text may be in quotes, or hold interpolations of
    options and of resolvers; `null` is no value where there may be none.

    Args:
        kinds: what options may hold, see `kinds_of_options`.
        sweep: whether commas part the values of a sweep.

    Raises:
        InputError: text that is not in UTF-8.
    """
    words = []
    for word in arguments:
        key, equals, value = word.partition("=")
        held = kinds.get(key.lstrip("+"), set())
        if equals and value and held & {TEXT, TEXTS}:
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise InputError(
                    f"{word!a}: is not in UTF-8; rename the file, or the folder"
                ) from error
            word = f"{key}={_value(value, held, kinds, sweep)}"
        words.append(word)
    return words


def _value(text: str, held: set[str], kinds: Kinds, sweep: bool) -> str:
    """Return what was typed as the value of an option in Hydra's grammar."""
    if os.path.lexists(text) and TEXT in held:
        return _text(text)
    if _means_more(text, kinds) or (NONE in held and NULL.fullmatch(text)):
        return text
    if text[0] == "[" and text[-1] == "]" and held & {TEXTS, ANY}:
        # quotes, or lists and objects inside it
        if re.search("['\"]|(?<!\\$)\\{|\\[.*\\[", text) and _parsed(text) is not None:
            return text
        names = []
        for part in _split(text[1:-1]):
            name = part if os.path.lexists(part) else part.strip()
            names += [_value(name, {TEXT, NONE}, kinds, False)] if name else []
        return f"[{','.join(names)}]"
    if TEXT not in held:
        return text
    if sweep and "," in text:
        if re.search("['\"]", text) and _parsed(text) is not None:
            return text
        return ",".join(_value(part, held, kinds, False) for part in _split(text) if part)
    return _text(text)


def _text(text: str) -> str:
    """Return text as it is if Hydra takes it so, or in quotes."""
    # a name that Hydra would read as a number or true is no text to it
    if "${" not in text and type(_parsed(text)) is str and _parsed(text) == text:
        return text
    return quote_for_hydra(text)


def _means_more(text: str, kinds: Kinds) -> bool:
    """Return True for text in quotes, for a function of Hydra, and for interpolations of options or
    resolvers."""
    parsed = _parsed(text)
    if isinstance(parsed, QuotedString) or (parsed is not None and CALL.fullmatch(text)):
        return True
    # commas and the like may have backslashes before them
    if isinstance(parsed, str) and os.path.lexists(parsed):
        return True
    names = INTERPOLATION.findall(text)
    known = {"", *(key.partition(".")[0] for key in kinds)}
    return bool(names) and all(":" in name or name.partition(".")[0] in known for name in names)


def _parsed(text: str) -> object:
    """Return the value that Hydra reads; None if its grammar refuses it."""
    try:
        return OverridesParser.create().parse_override(f"key={text}")._value
    except HydraException:
        return None


def _split(text: str) -> Iterator[str]:
    """Yield the parts of text between commas; a file that exists may have commas in its name."""
    pieces = text.split(",")
    first = 0
    while first < len(pieces):
        longest = min(len(pieces), first + MAX_PARTS)
        names = (",".join(pieces[first:end]) for end in range(longest, first + 1, -1))
        name = next(filter(os.path.lexists, names), pieces[first])
        yield name
        first += name.count(",") + 1
