"""The table of sentences, `templates/sentences.yaml`, and a line that is said by its name in it.

What is said when is decided where the numbers are: in `verdict` for a run, `between_runs` and
`comparison` for several, `choices` for a controller's decisions, `inspection` for a profile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from knobwise.envs.tables.cost_words import in_words

TEMPLATES = Path(__file__).with_name("templates")


@functools.cache
def texts(name: str = "texts") -> dict[str, Any]:
    """Return the content of `templates/NAME.yaml`: headings, captions and explanations, or with
    "sentences" what is said."""
    # libyaml, where it is there, is ten times as fast
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = (TEMPLATES / f"{name}.yaml").read_text(encoding="utf-8")
    read: dict[str, Any] = yaml.load(text, loader)
    return read


class Sentence:
    """A sentence, or a part of one, with what is filled in.

    Args:
        name: in `templates/sentences.yaml`.
        fields: numbers and names in words, and parts that are sentences of the table too.
    """

    def __init__(self, name: str, /, **fields: object) -> None:
        self.name = name
        self.fields = fields

    def __str__(self) -> str:
        return str(texts("sentences")[self.name].format(**self.fields))

    def __repr__(self) -> str:
        return f"Sentence({self.name!r}, {self.fields})"


def write_sentences(sentences: Iterable[Sentence], unit: str = "ms") -> list[str]:
    """Write sentences out; what they say of latencies is said of costs in this unit."""
    return [in_words(str(sentence), unit) for sentence in sentences]
