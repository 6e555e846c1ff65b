"""Keep the features of samples on disk, so that a kill does not lose them.

They are computed once for each image, question and model. In the end they are written as one file
that `knobwise.envs.readers.feature_files` reads.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.envs.tables.tensor_file import save_tensors, tensors_if_whole, tensors_of
from knobwise.profiling.measuring.questions import VQAItem


def image_digests(items: Sequence[VQAItem]) -> list[str]:
    """Return the SHA-256 of each image.

    The bytes of a file are hashed, and of a picture its pixels in RGB, as models see them. Raises
    InputError if a file cannot be read."""
    digest = cache(_file_digest)  # many questions are asked about one image
    return [
        digest(item.image) if isinstance(item.image, Path) else _digest(item.image)
        for item in items
    ]


def _file_digest(path: Path) -> str:
    try:
        return _digest(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"{path}: the image cannot be read ({error.strerror})") from error


def _digest(image: Any, where: str = "an image given as bytes") -> str:
    if image is None:
        return ""
    if hasattr(image, "digest"):
        return str(image.digest)
    if isinstance(image, bytes):
        content = image
        try:
            Image.open(io.BytesIO(image)).close()  # reads the head only, enough to know an image
        except (OSError, Image.DecompressionBombError) as error:
            raise InputError(f"{where}: is no image that can be read") from error
    elif isinstance(image, Image.Image):
        pixels = image.convert("RGB")  # the bytes of a palette image do not say its colours
        content = f"{pixels.size} ".encode() + pixels.tobytes()
    elif isinstance(image, Tensor | np.ndarray):
        array = np.asarray(image)
        content = f"{array.dtype} {array.shape} ".encode() + array.tobytes()
    else:
        raise InputError(f"an image of type {type(image).__name__}: cannot be hashed; use an array")
    return hashlib.sha256(content).hexdigest()


def content_keys(images: Sequence[str], questions: Sequence[str], model: str) -> list[str]:
    """Return a key for each sample: a hash of its image, its question and the model.

    Args:
        images: the `image_digests` of the samples.
        questions: their questions, as the model reads them.
        model: a text that tells the model from others, its weights included.
    """
    parts = zip(images, questions, strict=True)
    return [hashlib.sha256(json.dumps([*part, model]).encode()).hexdigest()[:32] for part in parts]


class FeatureStore:
    """Features by content key, each in a file of its own, in a folder that processes may share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._widths: dict[str, int] = {}

    def __contains__(self, key: str) -> bool:
        return tensors_if_whole(self._path(key)) is not None

    def add(self, key: str, features: Mapping[str, NDArray[np.float32]], name: str) -> None:
        """Keep the features of a sample, in place of its earlier ones if there are any.

        Args:
            key: the content key of the sample.
            features: float [d] by block name.
            name: of the sample, for messages.

        Raises:
            InputError: no features, values that are not finite, or other blocks or widths than
                those of the samples before.
        """
        blocks = {}
        for block, values in sorted(features.items()):
            blocks[block] = torch.tensor(values, dtype=torch.float32).flatten()
            if not blocks[block].isfinite().all():
                raise InputError(f"features of sample {name}: {block} are not all finite")
        widths = {block: len(values) for block, values in blocks.items()}
        # the first sample tells the usual widths
        self._widths = self._widths or widths
        if widths != self._widths or not widths:
            raise InputError(
                f"features of sample {name}: widths are {widths}, but those of the others "
                f"{self._widths}"
            )
        save_tensors(self._path(key), blocks)

    def write(self, path: Path, keys: Sequence[str], sample_ids: Sequence[str]) -> None:
        """Write one feature file with a row for each sample, in this order. Raises InputError if
        features of a sample are missing."""
        if missing := [name for key, name in zip(keys, sample_ids, strict=True) if key not in self]:
            raise InputError(
                f"{path}: no features for {len(missing)} samples, such as {', '.join(missing[:5])}"
            )
        rows = [tensors_of(self._path(key)) for key in keys]
        stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        save_tensors(path, stacked, {"sample_id": json.dumps(list(sample_ids))})

    def _path(self, key: str) -> Path:
        # in folders of some hundred files, since a write looks through its folder
        return self.folder / key[:2] / f"{key}.safetensors"
