"""Vision-language models and language models from a folder or the Hugging Face hub, without running
code of theirs, and their prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.common.extras import install_command

if TYPE_CHECKING:
    from PIL import Image
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

INSTRUCTION = "Answer with a single word or a short phrase."
# for models that were never taught to chat; white space in them is part of the prompt
PLAIN_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}IMAGE Question: {{ "
    "message.content[1].text }} Answer:"
    "{% else %} {{ message.content[0].text }}\n{% endif %}{% endfor %}"
)
# a blank line between demonstrations would be one token at the end of a text, and two inside it
PLAIN_TEXT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}Question: {{ message.content }}\n"
    "Answer:{% else %} {{ message.content }}\n{% endif %}{% endfor %}"
)

GREEDY: dict[str, bool | int | None] = {
    "do_sample": False,
    "num_beams": 1,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "use_cache": True,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
}
"""Settings of `generate` for one greedy answer, whatever a model came with. What its own settings
do to the logits, such as a repetition penalty, they go on doing."""


def load_pretrained(
    name_or_path: str | Path, dtype: str | torch.dtype, kind: str
) -> tuple[PreTrainedModel, ProcessorMixin | PreTrainedTokenizerBase]:
    """Load a model, by a class of transformers, and its processor, or of a language model its
    tokenizer; no code that came with them is executed.

    Raises:
        InputError: transformers is not installed, or there is no such model, or of another kind.
    """
    transformers = _transformers(name_or_path)
    reader = transformers.AutoProcessor
    if kind == "AutoModelForCausalLM":
        reader = transformers.AutoTokenizer
    try:
        processor = reader.from_pretrained(name_or_path, trust_remote_code=False)
        model = getattr(transformers, kind).from_pretrained(
            name_or_path, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
    except Exception as error:  # what is damaged, or does not fit, fails in many ways
        raise _refused(name_or_path, error) from error
    return model, processor


def reads_text_alone(name_or_path: str | Path) -> bool:
    """Return True for a language model that takes no images, by its configuration.

    Raises:
        InputError: transformers is not installed, or there is no such model.
    """
    transformers = _transformers(name_or_path)
    try:
        config = transformers.AutoConfig.from_pretrained(name_or_path, trust_remote_code=False)
    except Exception as error:
        raise _refused(name_or_path, error) from error
    sees = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return not sees and type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING


def _refused(name_or_path: str | Path, error: Exception) -> InputError:
    """Return the error for a model that transformers cannot load."""
    reason = " ".join(str(error).split())
    return InputError(f"{name_or_path}: cannot be loaded as a model of this kind ({reason})")


def _transformers(name_or_path: str | Path) -> ModuleType:
    """Import transformers, to load a model that may exist.

    Raises:
        InputError: transformers is not installed, or the path is no folder.
    """
    try:
        import transformers
    except ImportError as error:
        raise InputError(f"a Hugging Face model needs: {install_command('models')}") from error
    path = Path(name_or_path)
    # what is written like a path is no name of the hub's, which is asked for minutes where it
    # cannot be reached
    is_path = str(path).startswith((".", "/", "~")) or path.exists()
    if is_path and not path.is_dir():
        raise InputError(
            f"{path}: is no folder; a model is a folder, or a name on the Hugging Face hub"
        )
    return transformers


def weights_digest(name_or_path: str | Path, commit: str | None = None) -> str:
    """Return what tells weights from others: the hub's commit, or of a folder a hash of names,
    sizes and 64 pieces (64 kB) of its weight files, evenly spread, since the whole of a large model
    takes minutes to read."""
    # the hub names its versions itself
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


class PromptedModel:
    """A model of transformers with its processor, and how questions become its prompts.

    The model is put into eval mode, and on the device if one is named. Without a chat template the
    prompt is "<image> Question: … Answer:", of a language model the same without the image, and the
    answer ends with its line. A tokenizer without a padding token gets its end token as one.
    `INSTRUCTION` is added to every question of a chat model.

    Args:
        processor: of a vision-language model; of a language model the tokenizer.
        chats: False for prompts that do not follow the chat template where there is one.
    """

    kind = ""
    """The class of transformers that `load` loads a model by; "": the one for this model."""

    def __init__(
        self,
        model: PreTrainedModel,
        processor: ProcessorMixin | PreTrainedTokenizerBase,
        *,
        device: str | torch.device | None = None,
        chats: bool | None = None,
    ) -> None:
        self.model = (model if device is None else model.to(device)).eval()
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.sees = hasattr(processor, "image_processor")
        """True for a model that takes images."""
        has_template = bool(getattr(processor, "chat_template", None))
        self.chats = has_template and chats is not False
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        stops = getattr(model.generation_config, "eos_token_id", None)
        self._stops = set(stops if isinstance(stops, list) else [stops])

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        *arguments: Any,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        **settings: Any,
    ) -> Self:
        """Load model and processor from a folder, offline, or by name from the Hugging Face hub.

        `device` None is the GPU where there is one; `arguments` and `settings` as for the class.

        Raises:
            InputError: transformers is missing, the model does not exist, or it is not of the kind
                that this class loads.
        """
        kind = cls.kind
        if not kind:
            kind = "AutoModelForImageTextToText"
            if reads_text_alone(name_or_path):
                kind = "AutoModelForCausalLM"
        model, processor = load_pretrained(name_or_path, dtype, kind)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(model, processor, *arguments, device=device, **settings)

    def _turns(
        self, question: str, answer: str | None = None, *, image: bool = True
    ) -> list[dict[str, object]]:
        """Return the turns of a question, with its answer where there is one."""
        if self.chats:
            question += f"\n{INSTRUCTION}"
        contents: list[Any] = [question, answer]
        if self.sees:
            contents = [[{"type": "text", "text": text}] for text in contents]
            # the image comes before the question
            if image or not self.chats:
                contents[0].insert(0, {"type": "image"})
        turns = [
            {"role": "user", "content": contents[0]},
            {"role": "assistant", "content": contents[1]},
        ]
        if answer is None:
            return turns[:1]
        return turns

    def _prompt(
        self, turns: Sequence[dict[str, object]], *, image: bool = True, **options: Any
    ) -> str:
        """Return the turns as the model reads them; after a question, up to where the answer
        begins."""
        template = None
        if not self.chats:
            mark = getattr(self.processor, "image_token", None) or "<image>"
            template = PLAIN_TEMPLATE.replace("IMAGE", mark * image)
            if not self.sees:
                template = PLAIN_TEXT_TEMPLATE
        prompt = self.processor.apply_chat_template(
            turns,
            chat_template=template,
            add_generation_prompt=turns[-1]["role"] == "user",
            tokenize=False,
            **options,
        )
        return str(prompt)

    def _token_options(self, text: str) -> dict[str, bool]:
        start = self.tokenizer.bos_token
        if start and text.startswith(start):
            return {"add_special_tokens": False}
        return {}

    def _processed(
        self, texts: list[str], images: list[list[Image.Image]] | None
    ) -> dict[str, Tensor]:
        """Process prompts, with their images if the model sees, for the model: padded on the left,
        on the model's device."""
        options = {
            "padding": True,
            "padding_side": "left",
            "return_tensors": "pt",
            **self._token_options(texts[0]),
        }
        if images is None:
            read = self.tokenizer(texts, **options).to(self.model.device)
            return {name: read[name] for name in ("input_ids", "attention_mask")}
        inputs = self.processor(text=texts, images=images, **options)
        return dict(inputs.to(self.model.device, self.model.dtype))
