"""Profile a Hugging Face vision-language model: load it, find out which blocks matter if asked to, measure it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.common.files import locked
from knobwise.common.progress import progress
from knobwise.envs.demonstrations.beam_records import read_json
from knobwise.profiling.huggingface.knobs import HuggingFaceKnobs
from knobwise.profiling.huggingface.loading import GREEDY, log_probs_of_answer
from knobwise.profiling.huggingface.model import HuggingFaceVLM
from knobwise.profiling.measuring.adaptive_model import Request
from knobwise.profiling.measuring.machine import one_thread, write_json
from knobwise.profiling.measuring.profiler import chosen_configurations, profile_vlm
from knobwise.profiling.measuring.questions import VQAData, read_vqa_data
from knobwise.profiling.measuring.requests import question_text
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

    Repeat the call to resume an interrupted run. On a CPU one thread is used.

    Args:
        importance: file of block importance; "measure" makes `out`/importance.json first; None leaves out blocks from
            the end on.
        dtype: of the weights; "auto" as they were saved.
        device: None for the GPU where there is one.

    Raises InputError for files that cannot be read, a model that cannot be loaded or whose knobs are not known, and
    what `profile_vlm` refuses.
    """
    questions = read_vqa_data(data)  # before a large model is loaded
    one_of("dtype", dtype, ("auto", "bfloat16", "float16", "float32"))
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


def read_importance(path: str | Path) -> dict[int, float]:
    """How much a model's answers lose without each of its decoder blocks, by block, in ascending order of blocks.

    The file is JSON, a number for each block: `{"4": 0.0156, "5": 0.0098, …}`. The larger, the later a block is left
    out; only their order counts. Block 0 and others that always run need no number. Raises InputError for no such file,
    not JSON, anything but a finite number for a block, a block given twice.
    """
    content = read_json(path)
    if not isinstance(content, dict) or not content:
        raise InputError(f'{path}: must hold a number for each block, such as {{"4": 0.0156, "5": 0.0098}}')
    for block, value in content.items():
        if not block.isascii() or not block.isdigit():
            raise InputError(f"{path}: {block!r} is not the number of a block")
        if type(value) not in (int, float) or not math.isfinite(value):
            raise InputError(f"{path}: the importance of block {block} is {value!r}, not a finite number")
    return dict(sorted((int(block), float(value)) for block, value in content.items()))


def measure_importance(
    knobs: HuggingFaceKnobs, score: Callable[[], float], path: str | Path | None = None
) -> dict[int, float]:
    """How much a score drops when one block alone is left out: score of the whole model − score without the block.

    `score` says how good the model is as it is now, the more the better, such as `AnswerLikelihood`; it is called once
    for the whole model and once for each block that can be left out. `path` gets what `read_importance` reads. Raises
    InputError for a score that is not finite, and knobs that are set.
    """
    blocks = [block for block in range(knobs.knobs[2].default) if block not in knobs.always_active]

    def scored(where: str) -> float:
        if not math.isfinite(value := score()):
            raise InputError(f"the score {where} is {value}, not a finite number")
        return float(value)

    whole = scored("of the whole model")
    importance: dict[int, float] = {}
    with progress("block importance", len(blocks), quiet_s=5.0) as tick:
        for done, block in enumerate(blocks, 1):
            with knobs.leaving_out([block]):
                importance[block] = whole - scored(f"without block {block}")
            tick(done, "")
    if path is not None:
        write_json(Path(path), {str(block): drop for block, drop in importance.items()})
    return importance


class AnswerLikelihood:
    """The mean log-likelihood of the answers that a model, as it is now, gives greedily: a score for
    `measure_importance`.

    (1/N) Σ_i (1/T_i) Σ_t ln P(answer_it | prompt_i, answer_i,<t), in nats per token; long answers count no more than
    short ones.

    The model is in eval mode; `prompts` are N times what the processor makes of one text and its images, `input_ids`
    int64 [1, L], … on the model's device; `end_tokens` end an answer, None for the model's own.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Any,
        prompts: Sequence[Mapping[str, Tensor]],
        max_new_tokens: int = 16,
        end_tokens: Sequence[int] | None = None,
    ) -> None:
        self.model, self.prompts = model, prompts
        options = GREEDY | ({} if end_tokens is None else {"eos_token_id": list(end_tokens)})
        outputs = [model.generate(**prompt, **options, max_new_tokens=max_new_tokens) for prompt in prompts]
        lengths = [prompt["input_ids"].shape[1] for prompt in prompts]
        self.answers = [output[0, length:] for output, length in zip(outputs, lengths, strict=True)]
        """The tokens of each, int64 [T]."""

    @torch.inference_mode()
    def __call__(self) -> float:
        pairs = zip(self.prompts, self.answers, strict=True)
        return float(torch.stack([log_probs_of_answer(self.model, *pair).mean() for pair in pairs]).mean())
