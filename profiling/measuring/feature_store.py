"""Keep the features of samples on disk, so that a kill does not lose them.

They are computed once for each image and question. In the end they are written as one file
that `knobwise.envs.readers.feature_files` reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from knobwise.common.errors import InputError
from knobwise.envs.tables.tensor_file import (
    joined_by_name,
    save_tensors,
    tensors_if_whole,
    tensors_of,
)
from knobwise.profiling.measuring.questions import VQAItem


def content_keys(items: Sequence[VQAItem], questions: Sequence[str]) -> tuple[str, ...]:
    """Return a key for each sample: a hash of its picture's pixels, as models see them, and of its
    question, as the model reads it. Raises InputError if an image cannot be read."""
    pictures: dict[Any, bytes] = {}  # many questions are asked about one image
    keys = []
    for item, question in zip(items, questions, strict=True):
        name = item.image if isinstance(item.image, Path) else item.id
        if name not in pictures:
            picture = item.picture()
            pixels = np.asarray("" if picture is None else picture)
            if pixels.dtype.hasobject:
                kind = type(picture).__name__
                raise InputError(f"image of item {item.id!r}: {kind} is no picture and no array")
            head = f"{pixels.dtype} {pixels.shape} ".encode()
            pictures[name] = hashlib.sha256(head + pixels.tobytes()).digest()
        keys.append(hashlib.sha256(pictures[name] + question.encode()).hexdigest()[:32])
    return tuple(keys)


class FeatureStore:
    """Features by content key, each in a file of its own, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __contains__(self, key: str) -> bool:
        return tensors_if_whole(self._path(key)) is not None

    def add(self, key: str, features: Mapping[str, NDArray[np.float32]], name: str) -> None:
        """Keep the features of a sample.

        Args:
            key: the content key of the sample.
            features: float [d] by block name.
            name: of the sample, for messages.

        Raises:
            InputError: no features, or values that are not finite.
        """
        blocks = {}
        for block, values in features.items():
            blocks[block] = torch.tensor(values, dtype=torch.float32).flatten()
        if not blocks or not all(values.isfinite().all() for values in blocks.values()):
            raise InputError(f"features of sample {name}: {list(blocks)} are not all finite")
        save_tensors(self._path(key), blocks)

    def write(self, path: Path, keys: Sequence[str], sample_ids: Sequence[str]) -> None:
        """Write one feature file with a row for each sample, in this order. Raises InputError if
        samples have other blocks or widths than others."""
        rows = [tensors_of(self._path(key)) for key in keys]
        widths = {tuple(sorted((block, len(v)) for block, v in row.items())) for row in rows}
        if len(widths) > 1:
            raise InputError(f"features of some samples have other names or widths: {widths}")
        stacked = joined_by_name(rows, torch.stack)
        save_tensors(path, stacked, {"sample_id": json.dumps(list(sample_ids))})

    def _path(self, key: str) -> Path:
        # in folders of some hundred files, since a write looks through its folder
        return self.folder / key[:2] / f"{key}.safetensors"
