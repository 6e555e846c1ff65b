"""Profile a Hugging Face vision-language model: load it, measure it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_records import read_json
from knobwise.profiling.huggingface.model import HuggingFaceVLM
from knobwise.profiling.measuring.machine import one_thread
from knobwise.profiling.measuring.profiler import profile_vlm
from knobwise.profiling.measuring.questions import read_vqa_data
from knobwise.profiling.measuring.settings import VLMProfileConfig


def profile_hugging_face(
    out: str | Path,
    name_or_path: str,
    data: str | Path,
    config: VLMProfileConfig,
    *,
    importance: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
) -> Path:
    """Measure a model with the questions of a file (`read_vqa_data`), write the profile, and return
    its folder.

    Repeat the call to resume an interrupted run. One thread is used, also for what a GPU waits for.

    Args:
        importance: file of block importance; None leaves out blocks from the end on.
        dtype: of the weights; "auto" as they were saved.
        device: None for the GPU where there is one.

    Raises InputError for files that cannot be read, a model that cannot be loaded or whose knobs
    are not known, and what `profile_vlm` refuses.
    """
    questions = read_vqa_data(data)  # before a large model is loaded
    one_of("dtype", dtype, ("auto", "bfloat16", "float16", "float32"))
    if importance is None:
        known = None
    else:
        known = read_importance(importance)
    config = replace(config, name=config.name or Path(data).name.split(".")[0])
    model = HuggingFaceVLM.load(
        name_or_path,
        device=device,
        dtype=dtype,
        importance=known,
        max_new_tokens=config.max_new_tokens,
    )
    running_on = model.model.device
    with one_thread():  # as it is served live
        about = {
            "weights": weights_digest(
                name_or_path, getattr(model.model.config, "_commit_hash", None)
            ),
            "transformers": version("transformers"),
            "dtype": str(model.model.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(running_on)
            if running_on.type == "cuda"
            else running_on.type,
            "importance": None
            if known is None
            else {str(block): value for block, value in known.items()},
        }
        return profile_vlm(out, model, questions, config, about)


def weights_digest(name_or_path: str | Path, commit: str | None = None) -> str:
    """Return what tells weights from others: the hub's commit, or of a folder a hash of names,
    sizes and 64 pieces (64 kB) of its weight files, evenly spread, since the whole of a large model
    takes minutes to read."""
    files = sorted(Path(name_or_path).glob("*.safetensors"))
    if commit or not files:
        return f"commit:{commit}"
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for start in range(0, size, max(size // 64, 1 << 16)):
                file.seek(start)
                digest.update(file.read(1 << 16))
    return f"sha256:{digest.hexdigest()}"


def read_importance(path: str | Path) -> dict[int, float]:
    """Read how much a model's answers lose without each of its decoder blocks, by block, in
    ascending order of blocks.

    The file is JSON, a number for each block: `{"4": 0.0156, "5": 0.0098, …}`. The larger, the
    later a block is left out; only their order counts. Block 0 and others that always run need no
    number. Raises InputError for no such file, not JSON, anything but a finite number for a block,
    a block given twice.
    """
    content = read_json(path)
    if not isinstance(content, dict) or not content:
        raise InputError(
            f'{path}: must hold a number for each block, such as {{"4": 0.0156, "5": 0.0098}}'
        )
    for block, value in content.items():
        if not block.isascii() or not block.isdigit():
            raise InputError(f"{path}: {block!r} is not the number of a block")
        if type(value) not in (int, float) or not math.isfinite(value):
            raise InputError(
                f"{path}: the importance of block {block} is {value!r}, not a finite number"
            )
    return dict(sorted((int(block), float(value)) for block, value in content.items()))
