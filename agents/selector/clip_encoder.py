"""v2_lora: in place of `StoredEmbeddings` a CLIP encoder that is trained together with the selector, through LoRA
weights alone. transformers and peft are needed here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from knobwise.agents.selector.selector import StoredEmbeddings
from knobwise.common.errors import InputError

if TYPE_CHECKING:
    from knobwise.profiling.measuring.questions import VQAItem

ADAPTED = ("q_proj", "k_proj", "v_proj", "out_proj")
"""The layers of CLIP's attention that get LoRA weights."""
LORA: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.1}
"""Of peft. Because of the dropout old and new log-probs must be taken in the same mode."""
AT_ONCE = 256
"""Most items that go through CLIP together."""


class ClipItems(NamedTuple):
    """Images [M, 3, H, W], of any floating type (float16 takes half the memory), with their texts, int64 [M, L], and
    where these are not padded, as a CLIPProcessor gives them."""

    pixel_values: Tensor
    input_ids: Tensor
    attention_mask: Tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> ClipItems:
        return self  # large, and never written to: copies of an encoder share them

    @classmethod
    def read(cls, folder: str | Path, items: Sequence[VQAItem]) -> ClipItems:
        """Image, in float16, and question of each item, by the processor in a folder; long questions are cut. Raises
        InputError: there is no such processor, transformers is missing, an image cannot be read."""
        with _loading(folder):
            from transformers import AutoProcessor

            processor = AutoProcessor.from_pretrained(folder)
        pictures = (processor.image_processor(item.picture(), return_tensors="pt") for item in items)
        pixels = torch.cat([picture["pixel_values"].half() for picture in pictures])
        texts = [item.question for item in items]
        words = processor.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        return cls(pixels, words["input_ids"], words["attention_mask"])


@contextmanager
def _loading(source: str | Path) -> Iterator[None]:
    """A block that loads something of CLIP; its errors become an InputError."""
    try:
        yield
    except ImportError as error:
        raise InputError(f"CLIP needs transformers and peft ({error}): pip install knobwise[models]") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{source}: not a CLIP model that can be loaded ({error})") from error


class ClipEncoder(nn.Module):
    """Embeds an item as the mean of its image's and its text's embedding of length 1, in the space of both.

    Only the LoRA weights learn (Hu et al. 2021, "LoRA", equation 3); at first they change nothing. Each distinct item
    of a batch is encoded once, however many pools and sequences it is in.

    Args:
        model: a transformers CLIPModel; it is changed in place.
        items: everything that may be embedded.
        query_items, candidate_items: int64 [Q] and [M], the item of each query and of each candidate of the bank; they
            may share items.

    Raises:
        InputError: peft is not installed, or the model has none of the layers.
    """

    query_items: Tensor
    candidate_items: Tensor

    def __init__(self, model: Any, items: ClipItems, query_items: Tensor, candidate_items: Tensor) -> None:
        super().__init__()
        with _loading("peft"):
            from peft import LoraConfig, inject_adapter_in_model
        try:
            self.model: Any = inject_adapter_in_model(LoraConfig(**LORA, target_modules=list(ADAPTED)), model)
        except ValueError as error:
            raise InputError(f"LoRA on CLIP: this model has none of the layers {', '.join(ADAPTED)}") from error
        self.frozen = {name for name, p in self.model.named_parameters() if not p.requires_grad}
        self.register_state_dict_post_hook(_without_frozen)
        self.register_load_state_dict_post_hook(_expect_no_frozen)
        self.items = items
        self.width: int = model.config.projection_dim
        self.register_buffer("query_items", query_items, persistent=False)
        self.register_buffer("candidate_items", candidate_items, persistent=False)

    @classmethod
    def pretrained(
        cls, source: str | Path, items: ClipItems, query_items: Tensor, candidate_items: Tensor
    ) -> ClipEncoder:
        """With the weights of a folder, or of a model on the Hugging Face hub, in float32. Without such a model, or
        without transformers, an `InputError`."""
        with _loading(source):
            from transformers import CLIPModel

            model = CLIPModel.from_pretrained(source, dtype=torch.float32)
        return cls(model, items, query_items, candidate_items)

    def both(self, rows: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of queries, int64 [P], and of candidates, int64 [P, N] → [P, width] and [P, N, width]; zeros for row −1.

        An item that is a query here and a candidate there is encoded once.
        """
        query, candidates = _items_of(self.query_items, rows), _items_of(self.candidate_items, pool)
        embedded = self._embedded(torch.cat([query.unsqueeze(1), candidates], 1))
        return embedded[:, 0], embedded[:, 1:]

    @torch.no_grad()
    def stored(self) -> StoredEmbeddings:
        """Everything embedded once with the present weights, without dropout: to fit a selector on, and to judge."""
        training = self.training
        self.eval()
        stored = StoredEmbeddings(self._embedded(self.query_items), self._embedded(self.candidate_items))
        self.train(training)
        return stored

    def lora_state(self) -> dict[str, Tensor]:
        """The LoRA weights by name, ready for safetensors. The weights of CLIP itself are not among them."""
        state = self.state_dict().items()
        return {name.removeprefix("model."): weight.cpu().clone().contiguous() for name, weight in state}

    def load_lora_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `lora_state`. Weights that are missing, too many, or of another shape are an `InputError`."""
        try:
            self.load_state_dict({f"model.{name}": weight for name, weight in state.items()})
        except RuntimeError as error:
            raise InputError(f"LoRA weights: they belong to another CLIP model or rank ({error})") from error

    def _embedded(self, items: Tensor) -> Tensor:
        """int64 [*], −1 for none → float32 [*, width]."""
        distinct, place = items.unique(return_inverse=True)
        real = distinct[distinct >= 0]
        parts = [self._encoded(part) for part in real.split(AT_ONCE) if len(part)]
        encoded = torch.cat([torch.zeros(len(distinct) - len(real), self.width, device=items.device), *parts])
        return F.embedding(place, encoded)

    def _encoded(self, items: Tensor) -> Tensor:
        """int64 [n] → float32 [n, width]."""
        images, texts, mask = (part[items.to(part.device)].to(items.device) for part in self.items)
        out = self.model(pixel_values=images.to(self.model.dtype), input_ids=texts, attention_mask=mask)
        return (out.image_embeds + out.text_embeds).float() / 2  # CLIP has brought both to length 1


def _without_frozen(encoder: ClipEncoder, state: dict[str, Any], prefix: str, _: Any) -> None:
    """The weights of CLIP itself never change: they stay out of checkpoints."""
    for name in encoder.frozen:
        state.pop(f"{prefix}model.{name}", None)


def _expect_no_frozen(encoder: ClipEncoder, keys: Any) -> None:
    keys.missing_keys[:] = [key for key in keys.missing_keys if key.partition("model.")[2] not in encoder.frozen]


def _items_of(items: Tensor, rows: Tensor) -> Tensor:
    rows = rows.to(items.device)
    return torch.where(rows < 0, -1, items[rows.clamp_min(0)])


Embeddings = StoredEmbeddings | ClipEncoder
"""Both give `both(rows, pool)`: rows of queries, int64 [P], and of candidates, int64 [P, N] → [P, d] and [P, N, d]."""
