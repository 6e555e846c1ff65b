"""Small functions on arrays that every decision uses."""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Arrays = Mapping[str, Array]

MIN_MS = 1e-9
"""Lower bound that budgets are raised to before their logarithm is taken."""
MAX_BYTES = 512_000_000
"""The most bytes to which the file of a controller may unpack; they have some hundred thousand."""
MAX_FLOAT32 = 3.4e38
"""The largest float32."""
CELLS_AT_ONCE = 1 << 16
"""So many scores at a time stay in the cache while the best of each request is found."""


def digest_of(arrays: Arrays) -> bytes:
    """Return the SHA-256 of the names, types, shapes and bytes of all arrays but `digest`."""
    content = hashlib.sha256()
    for name in sorted(set(arrays) - {"digest"}):
        array = np.ascontiguousarray(arrays[name])
        content.update(f"{name} {array.dtype} {arrays[name].shape} ".encode() + array.tobytes())
    return content.digest()


def below(arrays: Arrays, prefix: str) -> dict[str, Array]:
    """Select the arrays under a dotted prefix, and cut it off: `network.bias` → `bias`."""
    names = [name for name in arrays if name.startswith(prefix)]
    return {name.removeprefix(prefix): arrays[name] for name in names}


def read_arrays(path: str | Path) -> dict[str, Array]:
    """Read the arrays of an `.npz` without executing anything in it. Raises any Exception if it is
    damaged or is no `.npz`."""
    # opened here, since np.load leaves a damaged file open
    with Path(path).open("rb") as opened:
        # np.load would take anything else for a pickle
        if not zipfile.is_zipfile(opened):
            raise ValueError("is damaged, or no .npz; export it again, or restore a copy")
        opened.seek(0)
        return _members(np.load(opened, allow_pickle=False))


def _members(archive: Any) -> dict[str, Array]:
    """Unpack an open `.npz`: array by name. Raises a ValueError if it would fill the memory, or
    holds a name twice."""
    with archive as file:
        # a small file may unpack to more than the memory
        if sum(part.file_size for part in file.zip.infolist()) > MAX_BYTES:
            raise ValueError(f"unpacks to more than {MAX_BYTES:,} bytes")
        if twice := {name for name in file.files if file.files.count(name) > 1}:
            raise ValueError(f"holds {', '.join(sorted(twice))} twice")
        return {name: file[name] for name in file.files}


def check_arrays(arrays: Arrays, form: str) -> tuple[dict[str, Any], str]:
    """Check the arrays of a file; return the content of `header`, and the first 16 digits of their
    digest. Raises a ValueError if the header names another format than `form`, or arrays hold NaN
    or do not match their checksum, the array `digest`."""
    header: dict[str, Any] = {}
    # a header that cannot be read counts as empty
    with suppress(KeyError, TypeError, ValueError):
        header = dict(json.loads(bytes(arrays["header"]).decode()))
    if header.get("format") != form:
        name = form.partition("/")[0]
        if str(header.get("format")).startswith(f"{name}/"):
            raise ValueError(
                f"is of another version (format {header['format']}, not {form}); export it again"
            )
        raise ValueError(f"not an exported controller (expected format {form})")
    digest = digest_of(arrays)
    if "digest" not in arrays or bytes(arrays["digest"]) != digest:
        raise ValueError("is damaged (its checksum does not match); export it again")
    for name, array in arrays.items():
        if array.dtype.kind == "f" and np.isnan(array).any():
            raise ValueError(f"{name} holds NaN; train again")
    return header, digest.hex()[:16]


def with_inner(request: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Return a request with the values of these names, where they stand inside objects: that of
    `usage.tokens` is 3 in {"usage": {"tokens": 3}}, as tables of nested objects name it. A value of
    that very name goes first; in an object that is None all is None."""
    inner = {}
    for name in names:
        if name not in request:
            with suppress(KeyError):
                inner[name] = _inner(request, name)
    return {**request, **inner} if inner else request


def _inner(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a dotted name; raises a KeyError where there is none."""
    if name in values:
        return values[name]
    dot = name.find(".")
    while dot >= 0:
        # a key may have dots of its own
        inside = values.get(name[:dot], ())
        if inside is None:
            return None
        if isinstance(inside, Mapping):
            with suppress(KeyError):
                return _inner(inside, name[dot + 1 :])
        dot = name.find(".", dot + 1)
    raise KeyError(name)


def encode_request(columns: Iterable[Any], request: Mapping[str, Any]) -> Array:
    """Encode the named features of one request as float32 [d]: numbers as they are, text one-hot,
    unseen text in its column's last slot. Names may reach into objects, see `with_inner`. Raises a
    ValueError if a value is absent or of another kind, or missing (None, NaN, "", "?") although no
    sample of the training lacked it."""
    block: list[float] = []
    for name, texts, gaps in columns:
        if name not in request:
            request = with_inner(request, [name])
        if name not in request:
            names = ", ".join(column[0] for column in columns)
            raise ValueError(f"features: {name!r} is absent; give {names}, None where unknown")
        value = request[name]
        if isinstance(value, str):
            value = value.strip()
            value = None if value in ("", "?") else value
        number = math.nan if value is None else as_number(value)
        if number is not None and math.isnan(number):
            if not gaps:
                raise ValueError(f"features: {name!r} is missing, but no training sample lacked it")
            value = ""
        if texts is None:
            if number is None or abs(number) > MAX_FLOAT32:
                raise ValueError(f"features: {name!r} must be a finite number, not {short(value)}")
            block.append(number)
        else:
            if not isinstance(value, str):
                raise ValueError(f"features: {name!r} must be text, not {short(value)}")
            block += [value == text for text in texts]
            block.append(value not in texts)
    return np.array(block, np.float32)


def as_number(value: Any) -> float | None:
    """Return a single number as a float: of Python, NumPy or torch, with gradients or without. A
    truth value is 0 or 1. Return None for anything else."""
    if getattr(value, "shape", None) == () and not isinstance(value, np.generic):
        # an array or a tensor without axes
        value = value.item()
    if not isinstance(value, (Real, Decimal, np.bool_)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def as_limit(value: Any, name: str = "budget_ms") -> float:
    """Return a budget as a float. Raises a ValueError with its name if it is no single number; a
    truth value is none."""
    if type(value) is float:
        return value
    number = None
    # of Python, NumPy or torch
    kind = str(getattr(value, "dtype", type(value).__name__))
    if not kind.endswith("bool"):
        number = as_number(value)
    if number is None:
        raise ValueError(f"{name} must be a number, not {short(value)}")
    return number


def as_numbers(what: str, values: object, truths: bool = False) -> Array:
    """Return numbers as an array: lists, arrays, or tensors, with gradients or without. Raises a
    ValueError that begins with `what` if these are no numbers; truth values are 0 and 1 if
    `truths`, and else none."""
    numbers = values
    if hasattr(values, "detach"):
        numbers = values.detach().cpu()
        # NumPy has no bfloat16
        numbers = (numbers.float() if numbers.is_floating_point() else numbers).numpy()
    array: Any = None
    if isinstance(values, (list, tuple)) and not truths and bool in map(type, values):
        # NumPy would make a number of it
        raise ValueError(f"{what} must be numbers, not {short(values)}")
    with suppress(Exception):  # whatever makes no array
        array = np.asarray(numbers)
        if array.dtype == object and None not in map(as_number, array.ravel()):
            array = array.astype(np.float64)
    if array is None or array.dtype.kind not in ("biuf" if truths else "iuf"):
        raise ValueError(f"{what} must be numbers, not {short(values)}")
    return array


def short(value: object) -> str:
    """Shorten the repr of a value to one line of at most 80 characters, for a message."""
    line = " ".join(repr(value).split())
    return line if len(line) < 80 else f"{line[:77]}…"


def configurations_of(controller: Any) -> list[dict[str, Any]]:
    """Return the values that each of a controller's or a table's configurations gives the knobs."""
    return [controller.configuration(i) for i in range(len(controller.configurations))]


def as_measured(limits: Array) -> Array:
    """Return limits in the precision of measurements, float32, as float64: what costs exactly a
    limit is within it, which a double may miss by a rounding error."""
    return np.minimum(limits, MAX_FLOAT32).astype(np.float32).astype(np.float64)


def log_ms(limits: Array) -> Array:
    """Return the natural logarithm of limits in ms, in their precision."""
    return np.log(np.maximum(limits, limits.dtype.type(MIN_MS)))


def log_measured(measured_ms: Array) -> Array:
    """Return the natural logarithm of measurements in ms. A 0, as timers report it for very short
    times, counts as a tenth of the smallest above 0, as in `envs.bandit.budgets.log_measured`."""
    least = measured_ms.min(initial=np.inf, where=measured_ms > 0)
    return np.log(np.maximum(measured_ms, least / 10 if np.isfinite(least) else MIN_MS))


def pick(scores: Array, slow: Array, mask: Array | None) -> Array:
    """Return the best score [n, C] inside the mask, among equal ones the fastest: int64 [n]. `slow`
    is [n, C] or [C], any monotone scale of latency, finite inside the mask. The mask is bool [n, C]
    or None for everything; raises a ValueError if it leaves a request nothing."""
    most = CELLS_AT_ONCE
    if scores.size <= most and slow.size <= most and (mask is None or mask.size <= most):
        return _pick(scores, slow, mask)
    parts = []
    wide = np.broadcast_arrays(*((scores, slow) if mask is None else (scores, slow, mask)))
    at_once = max(1, most // scores.shape[-1])
    for first in range(0, len(wide[0]), at_once):
        part = [each[first : first + at_once] for each in wide]
        # most requests may have everything
        if mask is not None and part[-1].all():
            part.pop()
        parts.append(_pick(*part))
    return np.concatenate(parts)


def pick_by_group(scores: Array, slow: Array, group: Array, mask: Array | None) -> Array:
    """Return what `pick` does for requests of which many have the same scores.

    Arguments are the scores [G, C] of each group, `slow` [C], and the group int64 [n] and the mask
    bool [n, C] of each request."""
    chosen = pick(scores, slow, None)[group]
    if mask is None:
        return chosen
    # most requests may have the best of all
    rest = np.flatnonzero(~mask[np.arange(len(mask)), chosen])
    if len(rest):
        chosen[rest] = pick(scores[group[rest]], slow, mask[rest])
    return chosen


def _pick(scores: Array, slow: Array, mask: Array | None = None) -> Array:
    if mask is not None:
        if not mask.any(1).all():
            raise ValueError("the mask leaves a request without any configuration")
        scores = np.where(mask, scores, -np.inf)
        slow = np.where(mask, slow, np.inf)
    # all best scores, of which the fastest is taken
    best = scores == scores.max(1, keepdims=True)
    return np.where(best, slow, np.inf).argmin(1)
