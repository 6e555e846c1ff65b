"""Profile a Hugging Face vision-language model: load it, find out which blocks matter if asked to, measure it."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from knobwise.common.errors import InputError
from knobwise.common.files import locked
from knobwise.profiling.huggingface.block_importance import AnswerLikelihood, measure_importance, read_importance
from knobwise.profiling.huggingface.model import HuggingFaceVLM
from knobwise.profiling.measuring.adaptive_model import Request
from knobwise.profiling.measuring.machine import one_thread
from knobwise.profiling.measuring.profiler import chosen_configurations, profile_vlm, question_text
from knobwise.profiling.measuring.questions import VQAData, read_vqa_data
from knobwise.profiling.measuring.settings import VLMProfileConfig

IMPORTANCE_FILE = "importance.json"
IMPORTANCE_SAMPLES = 32
"""Questions that the importance of blocks is measured with."""


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
    """Measure a model with the questions of a file (`read_vqa_data`), write the profile, and return its folder.

    Args:
        out: the folder; repeat the call to resume an interrupted run.
        importance: file of block importance; "measure" makes `out`/importance.json first; None leaves out blocks from
            the end on.
        dtype: of the weights; "auto" as they were saved.
        device: None for the GPU where there is one. On a CPU one thread is used.

    Raises:
        InputError: files that cannot be read, a model that cannot be loaded or whose knobs are not known, what
            `profile_vlm` refuses.
    """
    questions = read_vqa_data(data)  # before a large model is loaded
    if dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise InputError(f"dtype={dtype!r} is unknown; known are auto, bfloat16, float16, float32")
    known = None if importance in (None, "measure") else read_importance(importance)
    config = replace(config, name=config.name or Path(data).name.split(".")[0])
    model = HuggingFaceVLM.load(
        name_or_path, device=device, dtype=dtype, importance=known, max_new_tokens=config.max_new_tokens
    )
    running_on = model.model.device
    if config.clock == "cpu" and running_on.type != "cpu":
        raise InputError(f"knobs.clock=cpu: the model runs on {running_on}, whose work is no CPU time")
    device_name = torch.cuda.get_device_name(running_on) if running_on.type == "cuda" else running_on.type
    with one_thread() if running_on.type == "cpu" else nullcontext():
        if importance == "measure":
            chosen_configurations(model.knobs, config)  # refuse settings before this takes minutes
            known = _measured(Path(out) / IMPORTANCE_FILE, model, questions, config)
            model = HuggingFaceVLM(model.model, model.processor, importance=known, max_new_tokens=config.max_new_tokens)
        about = {
            "weights": weights_digest(name_or_path, getattr(model.model.config, "_commit_hash", None)),
            "transformers": version("transformers"),
            "dtype": str(model.model.dtype).removeprefix("torch."),
            "device": device_name,
            "importance": None if known is None else {str(block): value for block, value in known.items()},
        }
        return profile_vlm(out, model, questions, config, about)


def weights_digest(name_or_path: str | Path, commit: str | None = None) -> str:
    """What tells weights from others: the hub's commit, or of a folder a hash of names, sizes and 64 pieces (64 kB) of
    its weight files, evenly spread, since the whole of a large model takes minutes to read."""
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


def _measured(path: Path, model: HuggingFaceVLM, data: VQAData, config: VLMProfileConfig) -> dict[int, float]:
    """Importance by the likelihood of the model's own answers to the first questions; measured once for a folder."""
    with locked(path.parent):  # processes that share a folder must leave out the same blocks
        if path.exists():
            return read_importance(path)
        requests = [
            Request(item.picture(), question_text(item, config.prompt)) for item in data.queries[:IMPORTANCE_SAMPLES]
        ]
        inputs = [model.inputs([request]) for request in requests]
        score = AnswerLikelihood(model.model, inputs, max_new_tokens=config.max_new_tokens, end_tokens=model.end_tokens)
        return measure_importance(model.knobs_of_model, score, path)
