"""`config.yaml`, the resolved settings in the folder of a run, with their checksum: plain values,
which may come from elsewhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knobwise.common.errors import InputError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

NAME = "config.yaml"
CHECKSUM = "sha256"
"""The key under which the checksum of all other settings stands."""
MAX_BYTES = 200_000
"""The longest file that is read; those of runs have some 5,000 bytes."""


def settings_text(config: DataclassInstance) -> str:
    """Return an instance of a settings dataclass as YAML, with its checksum; `${` in it is only
    text."""
    return to_yaml(asdict(config))


def to_yaml(content: Mapping[str, object]) -> str:
    """Return settings by group as YAML, with their checksum."""
    from knobwise.experiments.settings import plain_yaml

    text = plain_yaml.written(content)
    # of the values that a reader finds, so that other spellings and comments are no damage
    digest = _digest(plain_yaml.parsed(text))
    return f"{text}{CHECKSUM}: '{digest}'\n"


def _digest(content: Mapping[str, object]) -> str:
    """Return the SHA-256 of settings, apart from their checksum. Raises a TypeError for what JSON
    cannot hold: bytes, sets and the like are no settings."""
    plain = {key: value for key, value in content.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def read_settings_file(path: Path) -> dict[str, Any]:
    """Read a `config.yaml` as plain values. Nothing in it is resolved or executed, so that a file
    from elsewhere cannot read the environment.

    Raises:
        InputError: it cannot be read, is not YAML of plain values, holds no settings, is larger
            than settings are, or does not match its checksum.
    """
    from knobwise.experiments.settings import plain_yaml

    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ValueError(f"has more than {MAX_BYTES:,} bytes, so it holds no settings")
        content = plain_yaml.parsed(text)
        digest = _digest(content) if isinstance(content, dict) else None
    except (OSError, RecursionError, TypeError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds no settings")
    if content.pop(CHECKSUM, None) != digest:
        raise InputError(
            f"{path}: is not as the run wrote it (its checksum is missing or does not match); "
            "restore it, and give other settings on the command line"
        )
    return content


def flatten_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings by dotted key; an empty group stays a value."""
    flat = {}
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            for name, leaf in flatten_keys(value).items():
                flat[f"{key}.{name}"] = leaf
        else:
            flat[str(key)] = value
    return flat


def of_run(checkpoint: str, key: str) -> Any:
    """Read a setting from the `config.yaml` of the run that a folder or a file in it belongs to;
    None without one.

    Raises:
        InputError: see `read_settings_file`.
    """
    path = config_of(checkpoint)
    if not path.is_file():
        return None
    value: Any = read_settings_file(path)
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def config_of(checkpoint: str) -> Path:
    """Return where the settings of a run are, that a folder or a file in it belongs to."""
    path = Path(checkpoint)
    # a checkpoint lies some levels below its run, and a copy may lie beside its settings; further
    # up, a config.yaml may be that of another program
    for folder in (path, *path.parents):
        known = folder in (path, path.parent) or (folder / "checkpoints").is_dir()
        if known and (folder / NAME).is_file():
            return folder / NAME
    return path / NAME
