"""Keep the features of samples on disk, so that a kill does not lose them.

They are computed once for each image, question and model. In the end they are written as one file
that `knobwise.envs.readers.feature_files` reads. Its metadata holds the content key of each sample.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor

from knobwise.common.errors import Damaged, InputError
from knobwise.common.progress import say
from knobwise.envs.tables.tensor_file import save_tensors, tensors_and_metadata
from knobwise.profiling.measuring.questions import VQAItem

Blocks = dict[str, Tensor]
"""The features of one sample: float [d] by name."""

CHUNK = 64
# does not match what another process is writing, or what a kill left half written
_PARTS = "[0-9]*.safetensors"


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
    """Features by content key, in memory and in part files. After every `CHUNK` of samples a part
    file is written.

    Args:
        folder: of the part files; only one process may write to it.
        keys: the content keys of all samples. Features of other samples are ignored.
        known: feature files, and folders with the parts of other processes. They are only read. If
            several hold the same sample, the last one counts. Paths that do not exist are ignored.
    """

    def __init__(self, folder: Path, keys: Collection[str], known: Sequence[Path] = ()) -> None:
        self.folder = folder
        self._wanted = frozenset(keys)
        self._blocks: dict[str, Blocks] = {}
        self._new: list[str] = []
        # a new part never replaces one of an earlier session
        parts = sorted(self.folder.glob(_PARTS))
        self._next = int(parts[-1].stem) + 1 if parts else 0
        for path in (*known, *parts):  # a later file replaces the features of an earlier one
            if path.is_file():
                self._read(path)
            for part in sorted(path.glob(_PARTS)):
                self._read(part)

    def __contains__(self, key: str) -> bool:
        return key in self._blocks

    def add(self, key: str, features: Mapping[str, NDArray[np.float32]], name: str) -> None:
        """Keep the features of a sample, and drop its earlier ones if there are any.

        Args:
            key: the content key of the sample.
            features: float [d] by block name.
            name: of the sample, for messages.

        Raises:
            InputError: no features, values that are not finite, or other blocks or widths than
                those of the other samples.
        """
        blocks = {}
        for block, values in sorted(features.items()):
            blocks[block] = torch.tensor(values, dtype=torch.float32).flatten()
            if not blocks[block].isfinite().all():
                raise InputError(f"features of sample {name}: {block} are not all finite")
        widths = _widths(blocks)
        # any sample that is kept already tells the usual widths
        usual = _widths(next(iter(self._blocks.values()), blocks))
        if widths != usual or not widths:
            raise InputError(
                f"features of sample {name}: widths are {widths}, but those of the others {usual}"
            )
        self._blocks[key] = blocks
        # a full chunk goes to disk
        self._new.append(key)
        if len(self._new) >= CHUNK:
            self.flush()

    def flush(self) -> None:
        """Write what was added since the last part as a new part."""
        if self._new:
            path = self.folder / f"{self._next:06d}.safetensors"
            self._save(path, list(dict.fromkeys(self._new)), {})
            self._next += 1
            self._new = []

    def write(self, path: Path, keys: Sequence[str], sample_ids: Sequence[str]) -> None:
        """Write one feature file with a row for each sample, in this order. Raises InputError if
        features of a sample are missing."""
        if missing := [name for key, name in zip(keys, sample_ids, strict=True) if key not in self]:
            raise InputError(
                f"{path}: no features for {len(missing)} samples, such as {', '.join(missing[:5])}"
            )
        self._save(path, keys, {"sample_id": json.dumps(list(sample_ids))})

    def _save(self, path: Path, keys: Sequence[str], metadata: dict[str, str]) -> None:
        stacked = {}
        for name in self._blocks[keys[0]]:
            stacked[name] = torch.stack([self._blocks[key][name] for key in keys])
        save_tensors(path, stacked, {**metadata, "key": json.dumps(list(keys))})

    def _read(self, path: Path) -> None:
        try:
            blocks, metadata = tensors_and_metadata(path)
            keys = json.loads(metadata.get("key", "null"))
        except Damaged:
            say(f"{path}: is damaged; its features are computed again")
            return
        except (SafetensorError, OSError, ValueError) as error:
            raise InputError(f"{path}: cannot be read as features ({error})") from error
        # a feature file from elsewhere says nothing about its images
        if not isinstance(keys, list):
            raise InputError(
                f"{path}: its features have no content keys, so none of them can be reused"
            )
        # row i belongs to content key i
        for i, key in enumerate(keys):
            if key in self._wanted:
                self._blocks[key] = {name: rows[i] for name, rows in sorted(blocks.items())}


def _widths(blocks: Blocks) -> dict[str, int]:
    return {block: len(values) for block, values in blocks.items()}
