"""The YAML of `config.yaml`: plain values without aliases, and numbers as others read them. Only
what reads or writes such a file imports this, since PyYAML takes as long as a small command."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]

FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
"""Numbers that PyYAML alone takes for text, and others do not."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


class _Loader(yaml.loader.SafeLoader):  # in Python alone: libyaml's would not ask `compose_node`
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # aliases of aliases of lists make gigabytes of a few lines
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("has YAML aliases, which knobwise never writes")
        return super().compose_node(parent, index)


for _kind in (_Dumper, _Loader):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_str)


def written(content: Mapping[str, object]) -> str:
    """Return content as YAML, in its order."""
    text: str = yaml.dump(dict(content), Dumper=_Dumper, allow_unicode=True, sort_keys=False)
    return text


def parsed(text: str | bytes) -> Any:
    """Return the content of a text.

    Raises:
        ValueError, RecursionError, TypeError: it is no YAML of plain values, or has aliases.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
