"""A CLIP model that embeds pictures and texts. Its LoRA weights learn together with the selector.

The original system calls this v2_lora. It needs transformers and peft, which nothing else in this
folder needs.
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
from knobwise.common.extras import install_command
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.losses.dropout import drops_out
from knobwise.profiling.huggingface.loading import load_pretrained

if TYPE_CHECKING:
    from knobwise.profiling.measuring.questions import VQAItem

ADAPTED = ["q_proj", "k_proj", "v_proj", "out_proj"]
"""The layers of CLIP's attention that get LoRA weights."""
# rank, α and dropout have their names in peft
LORA: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.1, "target_modules": ADAPTED}
"""Settings of the LoRA weights."""
AT_ONCE = 256
"""Most items in a batch of CLIP."""


class ClipItems(NamedTuple):
    """The pictures and texts of the K distinct items among a table's queries and candidates.

    The first three fields are the inputs of a CLIP model. Indices are floats, because they take the
    place of embeddings (`as_read`).
    """

    pixel_values: Tensor
    """float16 [K, 3, H, W]."""
    input_ids: Tensor
    """int64 [K, L]."""
    attention_mask: Tensor
    """int64 [K, L], 0 where a text is padded."""
    queries: Tensor
    """float32 [Q, 1], the index of each query's item."""
    candidates: Tensor
    """float32 [M, 1], the index of each candidate's item."""

    @classmethod
    def read(cls, source: str, queries: Sequence[VQAItem], bank: Sequence[VQAItem]) -> ClipItems:
        """Read the picture and the question of every item, processed for a CLIP model.

        Long questions are cut.

        Args:
            source: folder or name of the CLIP model.
            queries: the items of the queries.
            bank: the items of the candidates.

        Raises:
            InputError: see `load_clip`; a picture cannot be read.
        """
        _, processor = load_clip(source)
        # an item that is a query and a candidate is read once
        distinct = {id(item): item for item in (*queries, *bank)}
        index_of = {key: float(index) for index, key in enumerate(distinct)}
        pixels = []
        for item in distinct.values():
            picture = processor.image_processor(item.picture(), return_tensors="pt")
            pixels.append(picture["pixel_values"].half())
        # all texts are padded to the longest
        texts = [item.question for item in distinct.values()]
        tokens = processor.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        indices = torch.tensor([index_of[id(item)] for item in (*queries, *bank)]).unsqueeze(1)
        of_queries, of_bank = indices.split([len(queries), len(bank)])
        return cls(
            torch.cat(pixels), tokens["input_ids"], tokens["attention_mask"], of_queries, of_bank
        )


def as_read(table: BeamTable, items: ClipItems | None) -> BeamTable:
    """Return the table as a selector reads it.

    If there are items, their indices replace the embeddings.
    """
    if items is None:
        return table
    return replace(table, queries=items.queries, candidates=items.candidates, blocks={})


def load_clip(source: str) -> tuple[Any, Any]:
    """Load a CLIP model with fresh LoRA weights, which change nothing yet, and its processor.

    Only the LoRA weights are parameters. CLIP's own weights become buffers, which no checkpoint
    holds.

    Args:
        source: folder or name of the CLIP model.

    Raises:
        Missing: packages are not installed, there is no such model, or it is not a CLIP model.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model

        model, processor = load_pretrained(source, torch.float32, "AutoModel")
    except ImportError as error:
        raise Missing(f"encoder=clip needs: {install_command('peft')}") from error
    except InputError as error:
        raise Missing(f"encoder.model={source}: {error}") from error
    if model.config.model_type != "clip":
        raise Missing(f"encoder.model={source}: is {model.config.model_type}; give a CLIP model")
    model = inject_adapter_in_model(LoraConfig(**LORA), model)
    # what does not learn becomes a buffer
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if not weight.requires_grad:
                delattr(module, name)
                module.register_buffer(name, weight.detach(), persistent=False)
    return model, processor


class ClipEncoder(nn.Module):
    """Embeds an item: the mean of the embeddings of its picture and its text, each of length 1.

    Only the LoRA weights learn (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language
    Models", equation 3). They are drawn from torch's generator, and change nothing at first.

    Args:
        source: folder or name of the CLIP model.
        items: the items that can be embedded. A checkpoint does not hold them: set them after
            loading a selector.
    """

    def __init__(self, source: str, items: ClipItems | None = None) -> None:
        super().__init__()
        self.source = source
        self.items = items
        self.model, _ = load_clip(source)

    def forward(self, indices: Tensor) -> Tensor:
        """Embed items by their indices, [*, 1] → [*, d]."""
        if self.items is None:
            raise InputError("the selector's encoder has no pictures and texts; set its `items`")
        self.model.train(drops_out())  # LoRA's dropout goes by this mode
        distinct, positions = indices.squeeze(-1).long().unique(return_inverse=True)
        # each distinct item once, in batches
        encoded = []
        for rows in distinct.split(AT_ONCE):
            pixels, tokens, mask = (part[rows.cpu()].to(rows.device) for part in self.items[:3])
            output = self.model(pixel_values=pixels.float(), input_ids=tokens, attention_mask=mask)
            encoded.append((output.image_embeds + output.text_embeds) / 2)
        return F.embedding(positions, torch.cat(encoded))

    def __deepcopy__(self, memo: dict[int, Any]) -> ClipEncoder:
        # copies share CLIP's own weights and the pictures, which are large and never written to;
        # `deepcopy` keeps what it finds in the memo
        memo |= {id(shared): shared for shared in (self.items, *self.buffers())}
        copied = ClipEncoder.__new__(ClipEncoder)
        copied.__dict__ |= copy.deepcopy(self.__dict__, memo)
        return copied
