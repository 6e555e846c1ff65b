"""What both kinds of tables share: axes that must agree, and one `.safetensors` file: tensors, and a head as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.common.files import written_whole

Table = TypeVar("Table")


def check_axes(table: str, parts: Mapping[str, tuple[Any, str]]) -> dict[str, int]:
    """The length of each axis, from tensors or sequences with a letter for each axis; `_` may have any length. Raises
    InputError if a part has other axes, or an axis has another length than in the parts before it."""
    lengths: dict[str, int] = {}
    for what, (part, axes) in parts.items():
        shape = tuple(part.shape) if isinstance(part, Tensor) else (len(part),)
        if len(shape) != len(axes):
            raise InputError(f"{table}: {what} has shape {shape}, expected [{', '.join(axes)}]")
        expected = tuple(n if axis == "_" else lengths.setdefault(axis, n) for n, axis in zip(shape, axes, strict=True))
        if shape != expected:
            raise InputError(f"{table}: {what} has shape {shape}, expected {expected}")
    return lengths


def write_tensors(path: str | Path, head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors and the head, whole or not at all."""
    # the head is a tensor too: the metadata of safetensors must stay below 100 MB
    encoded = torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)
    with written_whole(path) as temporary:
        save_file({"head": encoded, **{name: tensor.contiguous() for name, tensor in tensors.items()}}, temporary)


def read_table(path: str | Path, kind: str, build: Callable[[dict[str, Any], dict[str, Tensor]], Table]) -> Table:
    """Build a table from the head and the tensors of a file; the tensors stay mapped to it. Raises InputError if there
    is no such file, or if it holds something else."""
    try:
        tensors = tensors_of(path)
        return build(json.loads(tensors.pop("head").numpy().tobytes()), tensors)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except Exception as error:
        raise InputError(f"{path}: not a {kind} saved by knobwise ({error})") from error


def read_arrays(path: Path, kind: str) -> dict[str, Any]:
    """The content of a `.safetensors`, `.npz`, `.npy` or `.pt` file by name; an array without a name is `embeddings`.
    Raises InputError if it cannot be read without executing code in it."""
    try:
        if path.suffix == ".safetensors":
            return tensors_of(path)
        if path.suffix == ".pt":
            content = torch.load(path, map_location="cpu", weights_only=True)
        else:
            content = np.load(path, allow_pickle=False)
        return dict(content) if isinstance(content, Mapping) else {"embeddings": content}
    except Exception as error:
        raise InputError(f"{path}: cannot be read as {kind} without executing code in it ({error})") from error


def tensors_of(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a `.safetensors` file by name."""
    return tensors_and_metadata(path)[0]


def tensors_and_metadata(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a `.safetensors` file by name, and the words in its head."""
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118 (not a dict)


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, by the rest of the name."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
