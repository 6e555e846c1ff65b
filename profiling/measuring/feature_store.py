"""Features of samples on disk: taken once for each image, question and model, kept through a kill, written as one file.

The file is a feature file as `knobwise.envs.readers.feature_files` reads it, float32 or half precision, with one more
list in its metadata: the content key of each sample. A sample whose key stands there is not computed again.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.common.progress import progress
from knobwise.profiling.measuring.questions import VQAItem

Blocks = dict[str, Tensor]
"""The features of one sample: float [d] by name."""

_PARTS = "[0-9]*.safetensors"  # not what another process is writing, or a kill left half written


def image_digests(items: Sequence[VQAItem]) -> list[str]:
    """SHA-256 of what each image is: the bytes of its file, or the pixels of a picture in RGB, as models are shown it.

    Raises:
        InputError: a file cannot be read.
    """

    @cache  # many questions are asked about one image
    def of_file(path: Path) -> str:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path}: the image cannot be read ({error.strerror})") from error
        return of_bytes(content, str(path))

    def of_bytes(content: bytes, where: str) -> str:
        try:
            with Image.open(io.BytesIO(content)):  # reads the head only, enough to recognise an image
                return hashlib.sha256(content).hexdigest()
        except (OSError, Image.DecompressionBombError) as error:
            raise InputError(f"{where}: is no image that can be read") from error

    def digest(image: Any) -> str:
        if isinstance(image, Path):
            return of_file(image)
        if isinstance(image, Tensor | np.ndarray):
            array = np.asarray(image)
            return hashlib.sha256(f"{array.dtype} {array.shape} ".encode() + array.tobytes()).hexdigest()
        if isinstance(image, Image.Image):
            pixels = image.convert("RGB")  # of a palette the bytes alone say nothing
            return hashlib.sha256(f"{pixels.size} ".encode() + pixels.tobytes()).hexdigest()
        if not isinstance(image, bytes):
            raise InputError(f"an image of type {type(image).__name__}: cannot be hashed; use an array")
        return of_bytes(image, "an image given as bytes")

    return [digest(item.image) for item in items]


def content_keys(images: Sequence[str], questions: Sequence[str], model: str) -> list[str]:
    """For each sample a hash of its image, of its question as it is asked, and of the model.

    `images` are `image_digests`; `model` tells this model from others, its weights included.
    """
    parts = zip(images, questions, strict=True)
    return [hashlib.sha256(json.dumps([*part, model]).encode()).hexdigest()[:32] for part in parts]


class FeatureStore:
    """Features by content key, in memory and in part files; what is added is on disk after each `chunk` of samples.

    Args:
        folder: of the part files; made when needed. One process writes there.
        keys: of all samples; what files hold of others is passed over.
        known: feature files and folders of parts of others, read and left as they are, a later one before an earlier;
            those that do not exist are passed over.
        half: keep half precision.
        chunk: samples in a part.
    """

    def __init__(
        self,
        folder: str | Path,
        keys: Collection[str],
        known: Sequence[str | Path] = (),
        half: bool = False,
        chunk: int = 64,
    ) -> None:
        self.folder, self.chunk = Path(folder), chunk
        self.dtype = torch.float16 if half else torch.float32
        self._wanted = frozenset(keys)
        self._blocks: dict[str, Blocks] = {}
        self._new: list[str] = []
        parts = sorted(self.folder.glob(_PARTS))
        self._next = int(parts[-1].stem) + 1 if parts else 0
        for path in map(Path, known):
            for file in sorted(path.glob(_PARTS)) if path.is_dir() else [path] * path.exists():
                self._read(file)
        for part in parts:  # the latest wins
            self._read(part)

    def __contains__(self, key: str) -> bool:
        return key in self._blocks

    def __getitem__(self, key: str) -> Blocks:
        return self._blocks[key]

    def add(self, key: str, features: Mapping[str, NDArray[np.float32]], name: str = "") -> None:
        """Keep the features of a sample, in the place of those that were there.

        Args:
            features: float [d] each, of the same names and widths for all samples.
            name: of the sample, for error messages.

        Raises:
            InputError: other names or widths than before, values that are not finite, or too large for half precision.
        """
        blocks = {k: torch.tensor(v, dtype=self.dtype).flatten() for k, v in sorted(features.items())}
        if not blocks:
            raise InputError(f"features of sample {name or key}: there are none")
        for block, values in blocks.items():
            if not values.isfinite().all():
                fit = bool(np.isfinite(features[block]).all())
                why = "do not fit into half precision; keep them in float32" if fit else "are not all finite"
                raise InputError(f"features of sample {name or key}: {block} {why}")
        if self._blocks and (usual := _widths(next(iter(self._blocks.values())))) != _widths(blocks):
            raise InputError(f"features of sample {name or key}: widths {_widths(blocks)}, of the others {usual}")
        self._blocks[key] = blocks
        self._new.append(key)
        if len(self._new) >= self.chunk:
            self.flush()

    def flush(self) -> None:
        """Put what was added since on disk, as one more part."""
        if self._new:
            keys = list(dict.fromkeys(self._new))
            self._save(self.folder / f"{self._next:06d}.safetensors", keys, {})
            self._next, self._new = self._next + 1, []

    def write(self, path: str | Path, keys: Sequence[str], sample_ids: Sequence[str]) -> None:
        """Write one feature file with a row for each sample, in this order.

        Raises:
            InputError: samples whose features are not here.
        """
        if missing := [name for key, name in zip(keys, sample_ids, strict=True) if key not in self]:
            raise InputError(f"{path}: no features for {len(missing)} samples, such as {', '.join(missing[:5])}")
        self._save(Path(path), keys, {"sample_id": json.dumps(list(sample_ids))})

    def _save(self, path: Path, keys: Sequence[str], words: dict[str, str]) -> None:
        stacked = {
            name: torch.stack([self._blocks[key][name] for key in keys]).to(self.dtype)
            for name in self._blocks[keys[0]]
        }
        with written_whole(path) as temporary:
            save_file(stacked, temporary, metadata={**words, "key": json.dumps(list(keys))})

    def _read(self, path: Path) -> None:
        try:
            with safe_open(str(path), framework="pt") as file:
                keys = json.loads((file.metadata() or {}).get("key", "null"))
                blocks = {name: file.get_tensor(name) for name in sorted(file.keys())}
        except (SafetensorError, OSError, ValueError) as error:
            raise InputError(f"{path}: cannot be read as features ({error})") from error
        if not isinstance(keys, list):
            raise InputError(f"{path}: its features have no content keys, so nothing can be taken over from it")
        if self.dtype == torch.float32 and any(rows.dtype != torch.float32 for rows in blocks.values()):
            return  # what was rounded cannot be had back: as if it were not there
        for i, key in enumerate(keys):
            if key in self._wanted:
                self._blocks[key] = {name: rows[i].to(self.dtype) for name, rows in blocks.items()}


def collect_features(
    store: FeatureStore,
    items: Sequence[VQAItem],
    keys: Sequence[str],
    take: Callable[[VQAItem], Mapping[str, NDArray[np.float32]]],
    force: bool = False,
) -> int:
    """Compute the features that the store lacks, or all of them, and return how many that were.

    Repeat the call to resume it after a kill; with `force` it begins again.

    `keys` are the `content_keys` of the items; `take` computes the features of one.
    """
    wanted = {key: i for i, key in enumerate(keys) if force or key not in store}
    with progress("features", len(wanted), quiet_s=5) as tick:
        for done, (key, i) in enumerate(wanted.items(), 1):
            store.add(key, take(items[i]), items[i].id)
            tick(done, "")
    store.flush()
    return len(wanted)


def _widths(blocks: Blocks) -> dict[str, int]:
    return {name: values.numel() for name, values in blocks.items()}
