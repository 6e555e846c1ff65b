"""Docstrings as the API reference reads them: parameters that share a line, `seed, device: …`, get
one each."""

import re
from typing import Any

import griffe

SHARED = re.compile(r"^( +)(\**\w+(?:, \**\w+)+):(.*(?:\n\1 +\S.*)*)", re.MULTILINE)
"""Names before a colon, and their text, whose next lines are indented further."""


class SharedParameters(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **about: Any) -> None:
        if obj.docstring is not None and "Args:\n" in obj.docstring.value:
            obj.docstring.value = SHARED.sub(split, obj.docstring.value)


def split(match: re.Match[str]) -> str:
    indent, names, text = match.groups()
    return "\n".join(f"{indent}{name}:{text}" for name in names.split(", "))
