"""v2_lora: a CLIP model embeds pictures and texts, and learns along with the selector, by LoRA
weights alone.

transformers and peft are needed here and nowhere else in this folder.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from knobwise.common.errors import InputError, Missing
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.profiling.huggingface.loading import load_pretrained

if TYPE_CHECKING:
    from knobwise.profiling.measuring.questions import VQAItem

ADAPTED = ["q_proj", "k_proj", "v_proj", "out_proj"]
"""The layers of CLIP's attention that get LoRA weights."""
LORA: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.1, "target_modules": ADAPTED}
"""Rank, α and dropout, under their names in peft."""
AT_ONCE = 256
"""Most items that go through CLIP together."""


class ClipItems(NamedTuple):
    """Pictures and texts of the queries and candidates of a table, each distinct item once."""

    pixel_values: Tensor
    """float16 [K, 3, H, W]."""
    input_ids: Tensor
    """int64 [K, L]."""
    attention_mask: Tensor
    """int64 [K, L], 0 where a text is padded."""
    queries: Tensor
    """float32 [Q, 1]: the item's number of each query."""
    candidates: Tensor
    """float32 [M, 1]: the item's number of each candidate."""

    @classmethod
    def read(cls, source: str, queries: Sequence[VQAItem], bank: Sequence[VQAItem]) -> ClipItems:
        """Read picture and question of every item as a CLIP model wants them. Long questions are
        cut.

        Raises:
            InputError: see `load_clip`; a picture cannot be read.
        """
        _, processor = load_clip(source)
        distinct = {id(item): item for item in (*queries, *bank)}
        numbers = {key: float(number) for number, key in enumerate(distinct)}
        pixels = []
        for item in distinct.values():
            picture = processor.image_processor(item.picture(), return_tensors="pt")
            pixels.append(picture["pixel_values"].half())
        texts = [item.question for item in distinct.values()]
        words = processor.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        rows = [torch.tensor([[numbers[id(item)]] for item in items]) for items in (queries, bank)]
        return cls(torch.cat(pixels), words["input_ids"], words["attention_mask"], *rows)


def as_read(table: BeamTable, items: ClipItems | None) -> BeamTable:
    """Return the table as a selector reads it: with items, their numbers take the place of
    embeddings."""
    if items is None:
        return table
    return replace(table, queries=items.queries, candidates=items.candidates, blocks={})


def load_clip(source: str) -> tuple[Any, Any]:
    """Load a CLIP model, with LoRA weights that change nothing yet, and its processor.

    The weights of CLIP itself become buffers that no checkpoint holds: only LoRA weights are
    parameters.

    Raises:
        Missing: packages are not installed, or there is no such model, or it is none of CLIP.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model

        model, processor = load_pretrained(source, torch.float32, "AutoModel")
    except ImportError as error:
        raise Missing("encoder=clip needs: pip install 'knobwise[peft]'") from error
    except InputError as error:
        raise Missing(f"encoder.model={source}: {error}") from error
    if model.config.model_type != "clip":
        raise Missing(f"encoder.model={source}: is {model.config.model_type}; give a CLIP model")
    model = inject_adapter_in_model(LoraConfig(**LORA), model)
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if not weight.requires_grad:
                delattr(module, name)
                module.register_buffer(name, weight.detach(), persistent=False)
    return model, processor


class ClipEncoder(nn.Module):
    """Embeds an item as the mean of its picture's and its text's embedding, each of length 1.

    Only LoRA weights learn (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models",
    equation 3). They are drawn from torch's generator; at first they change nothing.

    Args:
        source: folder or name of the CLIP model.
        items: what may be embedded; whoever loads a selector from a checkpoint sets it.
    """

    def __init__(self, source: str, items: ClipItems | None = None) -> None:
        super().__init__()
        self.source = source
        self.items = items
        self.model, _ = load_clip(source)

    def forward(self, numbers: Tensor) -> Tensor:
        """Embed items by their numbers, [*, 1] → [*, d]. Each distinct item is encoded once."""
        if self.items is None:
            raise InputError("the selector's encoder has no pictures and texts; set its `items`")
        distinct, places = numbers.squeeze(-1).long().unique(return_inverse=True)
        encoded = []
        for rows in distinct.split(AT_ONCE):
            pixels, words, mask = (part[rows.cpu()].to(rows.device) for part in self.items[:3])
            output = self.model(pixel_values=pixels.float(), input_ids=words, attention_mask=mask)
            encoded.append((output.image_embeds + output.text_embeds) / 2)
        return F.embedding(places, torch.cat(encoded))

    def __deepcopy__(self, memo: dict[int, Any]) -> ClipEncoder:
        # CLIP's own weights and the pictures are large and never written to: copies share them
        memo |= {id(shared): shared for shared in (self.items, *self.buffers())}
        copied = ClipEncoder.__new__(ClipEncoder)
        copied.__dict__ |= copy.deepcopy(self.__dict__, memo)
        return copied
