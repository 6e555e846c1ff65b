"""Vision-language models and their processors from a folder or the Hugging Face hub, without running code of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from knobwise.common.errors import InputError

GREEDY: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "use_cache": True,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
}
"""Settings of `generate` for one greedy answer, whatever a model came with. What its own settings do to the logits,
such as a repetition penalty, they go on doing."""


def load_pretrained(name_or_path: str | Path, dtype: str | torch.dtype = "auto") -> tuple[Any, Any]:
    """Model and processor from a folder (offline) or by their name on the Hugging Face hub.

    Only models that transformers itself knows and safetensors weights: no code of theirs is executed.

    Raises:
        InputError: transformers is not installed; no such model, or another kind of model.
    """
    try:
        from transformers import AutoModelForImageTextToText, AutoProcessor
    except ImportError as error:
        raise InputError("a Hugging Face model needs: pip install knobwise[models]") from error
    # what is written like a path is no name of the hub's, which is asked for minutes where it cannot be reached
    if str(name_or_path).startswith((".", "/", "~")) and not Path(name_or_path).is_dir():
        raise InputError(f"{name_or_path}: no such folder")
    if Path(name_or_path).is_file():
        raise InputError(f"{name_or_path}: is a file; a model is a folder, or a name on the Hugging Face hub")
    try:
        processor = AutoProcessor.from_pretrained(name_or_path, trust_remote_code=False)
        model = AutoModelForImageTextToText.from_pretrained(
            name_or_path, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
    # what is damaged, or does not fit the configuration, fails in many ways
    except (OSError, ValueError, KeyError, ImportError, TypeError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"{name_or_path}: cannot be loaded as a vision-language model ({' '.join(str(error).split())})"
        ) from error
    return model, processor
