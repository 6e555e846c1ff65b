"""Code that both kinds of tables share: axes that must agree, and `.safetensors` files.

Such a file holds tensors, one of which, `head`, is JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from knobwise.common.errors import Damaged, InputError
from knobwise.common.files import is_damaged, written_whole
from knobwise.common.json_text import RepeatedKeyError, decode_json
from knobwise.common.progress import say

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
DIGEST = "sha256"
"""The key in the metadata of a `.safetensors` file under which the digest of all else stands."""

LONGEST_HEADER = 100_000_000
"""In bytes; safetensors reads no longer ones."""


def row_hashes(values: Tensor) -> list[str]:
    """Return a short text for each row [n, d], the same for rows with the same bits in every
    table."""
    return [hashlib.sha1(row.tobytes()).hexdigest()[:16] for row in values.numpy()]


def check_axes(name: str, table: object, axes_of: Mapping[str, str]) -> dict[str, int]:
    """Return the length of each axis of a table, by its letter.

    Args:
        name: of the table in errors.
        table: the object whose fields are tensors, sequences, or dictionaries of tensors; None and
            what is empty have no axes.
        axes_of: a letter for each axis of a field; `_` may have any length.

    Raises:
        InputError: if a field has other axes, or an axis has another length than in the fields
            before it.
    """
    lengths: dict[str, int] = {}
    for field, axes in axes_of.items():
        value = getattr(table, field)
        parts: dict[str, Any] = {}
        if isinstance(value, dict):
            parts = {f"{field}[{key}]": block for key, block in value.items()}
        elif isinstance(value, Tensor) or value:
            parts = {field: value}
        for what, part in parts.items():
            shape = tuple(part.shape) if isinstance(part, Tensor) else (len(part),)
            fits = len(shape) == len(axes)
            # the first part with an axis decides its length
            for axis, n in zip(axes, shape, strict=False):
                fits &= axis == "_" or lengths.setdefault(axis, n) == n
            if not fits:
                raise InputError(
                    f"{name}: {what} has shape {shape}, expected [{', '.join(axes)}] of {lengths}"
                )
    return lengths


def save_table(path: str | Path, table: DataclassInstance, **changed: Tensor) -> None:
    """Write the fields of a dataclass as `.safetensors`, whole or not at all: tensors, and what is
    in dictionaries of tensors, as tensors, all else as JSON.

    Args:
        changed: tensors that take the place of the table's own.
    """
    head: dict[str, object] = {"format": f"knobwise.{type(table).__name__}/1"}
    tensors = {}
    for f in fields(table):
        value = changed.get(f.name, getattr(table, f.name))
        if isinstance(value, Tensor):
            tensors[f.name] = value
        elif isinstance(value, dict) and isinstance(next(iter(value.values()), None), Tensor):
            tensors |= {f"{f.name}.{key}": part for key, part in value.items()}
        elif value is not None:
            head[f.name] = value
    # the head is a tensor too: the metadata of safetensors must stay below 100 MB
    text = json.dumps(head, default=astuple)
    head_bytes = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    save_tensors(path, {"head": head_bytes, **tensors})


def load_table(
    path: str | Path, what: str, kind: type[T], changes: Mapping[str, Callable[[Any], object]]
) -> T:
    """Read a dataclass from a file of `save_table`; the tensors stay mapped to it. What the file
    lacks gets its default.

    Args:
        path: the file.
        what: the name of its kind, for the message.
        kind: the class.
        changes: functions that return fields from what the file has of them; lists become tuples
            anyway.

    Raises:
        InputError: there is no such file, or it holds something else.
    """
    try:
        tensors = tensors_of(path)
        content = json.loads(tensors.pop("head").numpy().tobytes())
        for key, tensor in tensors.items():
            field, _, part = key.partition(".")
            if part:
                content.setdefault(field, {})[part] = tensor
            else:
                content[field] = tensor
        values = {}
        for name in {f.name for f in fields(kind)} & content.keys():
            value = content[name]
            if name in changes:
                value = changes[name](value)
            elif isinstance(value, list):
                value = tuple(value)
            values[name] = value
        hints = get_type_hints(kind)
        for name, value in values.items():
            if not is_of_type(value, hints[name]):
                raise ValueError(f"{name} is no {hints[name]}")
        return kind(**values)
    except Damaged:
        raise
    except Exception as error:
        raise InputError(f"{path}: not a {what} saved by knobwise ({error})") from error


def is_of_type(value: object, hint: Any) -> bool:
    """Tell whether a value has the type of a field: a class, one of several, or a tuple, list or
    dictionary of one type."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(is_of_type(value, part) for part in parts)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if not isinstance(value, kind):
        return False
    if isinstance(value, dict):
        return all(is_of_type(part, parts[1]) for part in value.values())
    if parts:
        return all(is_of_type(part, parts[0]) for part in value)
    return True


def save_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors, metadata and a digest of both as `.safetensors`, whole or not at all."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    metadata = dict(metadata or {})
    with written_whole(path) as temporary:
        digest = digest_of_tensors(tensors, metadata)
        save_file(tensors, temporary, metadata={**metadata, DIGEST: digest})


def digest_of_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Compute the SHA-256 of all that a file holds: metadata, names, shapes, values."""
    sha = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def tensors_of(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a `.safetensors` file by name."""
    return tensors_and_metadata(path)[0]


def tensors_and_metadata(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a `.safetensors` file by name, and its metadata.

    Raises Damaged if they are not what `save_tensors` wrote, or the file is cut short, and
    InputError if two have the same name. A file from elsewhere holds no digest, so it is not
    checked.
    """
    _refuse_repeated_names(path)
    try:
        with safe_open(str(path), framework="pt") as file:
            # no dict, so it has to be asked for its keys
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = dict(file.metadata() or {})
    except SafetensorError as error:
        # after the 8 bytes of its length, the header of a safetensors file is JSON
        with Path(path).open("rb") as opened:
            if is_damaged(path) or opened.read(9)[8:] == b"{":
                raise Damaged(path) from error
        raise
    if metadata.pop(DIGEST, None) not in (None, digest_of_tensors(tensors, metadata)):
        raise Damaged(path)
    return tensors, metadata


def _refuse_repeated_names(path: str | Path) -> None:
    """Raise InputError if a `.safetensors` file has two tensors of one name, of which its reader
    would take one."""
    with Path(path).open("rb") as file:
        # the length of the header, then the header, which is JSON
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, LONGEST_HEADER))
    try:
        decode_json(header)
    except RepeatedKeyError as error:
        raise InputError(f"{path}: {error}; keep only one") from error
    except ValueError:
        # its reader says what is wrong
        return


def tensors_if_whole(path: Path) -> dict[str, Tensor] | None:
    """Return the tensors of a file of ours by name, None if it is missing or damaged.

    Damage is reported.
    """
    if not path.exists():
        return None
    try:
        return tensors_of(path)
    except (Damaged, SafetensorError):
        say(f"{path}: is damaged, so it is made again")
        return None


def joined_by_name(
    parts: Sequence[Mapping[str, Any]], join: Callable[[list[Any]], Any] = torch.cat
) -> dict[str, Any]:
    """Join what parts with the same keys hold under each key, in the order of the parts.

    Args:
        parts: at least one, with the keys of the first.
        join: makes one value of a list of values, such as `torch.stack`.
    """
    joined = {}
    for name in parts[0]:
        joined[name] = join([part[name] for part in parts])
    return joined


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, by the rest of the name."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
