"""Texts as features by a function of the user's own, such as an embedding model."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from platformdirs import user_cache_path
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.common.imports import import_callable, in_a_line, source_file
from knobwise.common.progress import say
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.tensor_file import save_tensors, tensors_if_whole

KEY = "profile.features_from"
TIMED = 9
"""So many texts are given one at a time; the median time is what a request costs."""
NOISE = 0.01
"""Rows of numbers that differ by a larger share of their length are of different functions. In half
precision, and with texts of other lengths beside it, a text gets slightly different numbers."""
AT_ONCE = 256
"""So many are given together otherwise."""

Embed = Callable[[list[str]], Any]


def embed_texts(table: ProfileTable, function: str | Embed) -> ProfileTable:
    """Return a table whose texts are feature blocks that a function computes.

    It is called once for each text: what it returns is kept in the user's cache, as long as its
    module stays the same, and it returns the same for the few texts that are timed, anew each
    time. Its time for one text is added to `features_ms`, for each column of texts.

    Args:
        function: `module:function`, or the function: n texts → numbers [n, d].

    Raises:
        InputError: the table has no texts, there is no such function, or it raises, or returns
            something else.
    """
    if not table.texts:
        raise InputError(f"{KEY}: no feature is text; name the columns with profile.features=[…]")
    path = None
    embed: Any = function
    if isinstance(function, str):
        embed = import_callable(KEY, function, "function", "my_model:embed")
        path = _cache_of(function)
    blocks = {}
    features_ms = table.features_ms
    for name, texts in table.texts.items():
        if name in table.features:
            raise InputError(f"{KEY}: the text {name!r} has the name of a feature block; rename it")
        blocks[name], took_ms = _block(embed, texts, path)
        features_ms += took_ms
    features = table.features | blocks
    return replace(table, features=features, texts={}, features_ms=features_ms)


def _cache_of(function: str) -> Path:
    """Return the file of what a function returned, another one after each change of its module."""
    content = hashlib.sha256(function.encode())
    if source := source_file(function):
        content.update(source.read_bytes())
    return user_cache_path("knobwise") / "features" / f"{content.hexdigest()[:32]}.safetensors"


def _block(embed: Embed, texts: Sequence[str], path: Path | None) -> tuple[Tensor, float]:
    """Return the numbers of texts, float32 [n, d], and the ms that a text alone takes.

    Args:
        path: where they are kept; None for nowhere.
    """
    kept = (tensors_if_whole(path) if path else None) or {}
    # what earlier versions noted
    kept.pop("took_ms", None)
    keys = {text: hashlib.sha256(text.encode("utf-8", "replace")).hexdigest() for text in texts}
    times = []
    computed = {}
    # the first call may load the model
    for text in [*keys][: TIMED + 1]:
        start = time.perf_counter()
        (computed[keys[text]],) = _numbers_of(embed, [text])
        times.append((time.perf_counter() - start) * 1e3)
    if not all(_alike(row, kept[key]) for key, row in computed.items() if key in kept):
        say(f"{KEY}: returns other numbers than those kept in {path}; all texts are computed anew")
        kept = {}
    # the others together, which is faster
    missing = [text for text, key in keys.items() if key not in kept and key not in computed]
    if reused := len(keys) - len(missing) - len(computed):
        say(f"{KEY}: the numbers of {reused} of {len(keys)} texts come from {path}")
    has_new = bool(missing) or not computed.keys() <= kept.keys()
    kept = computed | kept
    for first in range(0, len(missing), AT_ONCE):
        part = missing[first : first + AT_ONCE]
        for text, row in zip(part, _numbers_of(embed, part), strict=True):
            kept[keys[text]] = row
    # a function may depend on the longest of its texts
    widths = sorted({len(kept[key]) for key in keys.values()})
    if len(widths) > 1:
        raise InputError(f"{KEY}: returned {' and '.join(map(str, widths))} numbers for texts")
    if path and has_new:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(path, kept)
    took_ms = float(np.median(times[1:] or times))
    return torch.stack([kept[keys[text]] for text in texts]), took_ms


def _alike(row: Tensor, other: Tensor) -> bool:
    """Tell whether two rows of numbers are the same but for noise, such as that of other batches:
    they differ by little beside their length."""
    if row.shape != other.shape:
        return False
    row, other = row.double(), other.double()
    return bool((row - other).norm() <= NOISE * other.norm())


def _numbers_of(embed: Embed, texts: list[str]) -> Tensor:
    """Return the numbers of n texts, float32 [n, d]. Raises InputError if the function fails."""
    try:
        block = torch.as_tensor(np.asarray(embed(list(texts)))).float()
    except Exception as error:
        raise InputError(f"{KEY}: raises {in_a_line(error)}") from error
    if block.ndim != 2 or len(block) != len(texts) or not block.isfinite().all():
        raise InputError(
            f"{KEY}: must return finite numbers [{len(texts)}, d] for {len(texts)} texts, not "
            f"{list(block.shape)}"
        )
    return block
