"""A Qwen3-VL-MoE at random weights: its times are real, its answers are not. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch

from knobwise.common.errors import InputError
from knobwise.profiling.huggingface.families import TOKENS_PER_CROP

PATCH, BLOCKS = 16, 16  # side of a patch in pixels, of which 2 × 2 become a token; decoder blocks
CROP_SIDE = 2 * PATCH * int(TOKENS_PER_CROP**0.5)
"""Side in pixels of a square picture that is one crop."""
_SPECIAL = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<|im_end|>"}
_MARKS = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
_CHAT = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{{ part.text or '<|vision_start|><|image_pad|>"
    "<|vision_end|>' }}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def random_qwen(width: int, crops: int, device: str) -> tuple[Any, Any]:
    """A model in bfloat16, always with the same weights, made on the device itself, and its processor. It never ends an
    answer. No image gets more than `crops`.

    All sizes go with the width of the language model. At 2048 they are those of Qwen3-VL-30B-A3B, but for its 48
    decoder blocks: 11.1 billion weights. Raises InputError for a width that is no multiple of 64.
    """
    if width < 64 or width % 64:
        raise InputError(f"width={width}: must be a multiple of 64")
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(_SPECIAL.values())}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # every word is a token, and all are <unk>
    marks = {name: f"<|{mark}|>" for name, mark in _MARKS.items()}
    special: dict[str, Any] = {**_SPECIAL, "extra_special_tokens": list(marks.values())}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    pixels: dict[str, Any] = {"patch_size": PATCH, "merge_size": 2}
    pixels["size"] = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": crops * CROP_SIDE**2}
    images, videos = transformers.Qwen2VLImageProcessor(**pixels), transformers.Qwen3VLVideoProcessor(**pixels)
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": max(width // 512, 1), "head_dim": 128}
    experts = {"num_experts": max(width // 16, 8), "num_experts_per_tok": 8, "moe_intermediate_size": width * 3 // 8}
    text: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": BLOCKS, **heads, **experts}
    text |= {"vocab_size": width * 151_936 // 2048, "eos_token_id": tokenizer.eos_token_id}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
    depth = max(width * 27 // 2048, 1)
    vision: dict[str, Any] = {"depth": depth, "hidden_size": width * 9 // 16, "num_heads": max(width // 128, 1)}
    vision |= {"intermediate_size": width * 269 // 128, "patch_size": PATCH, "out_hidden_size": width}
    vision["deepstack_visual_indexes"] = sorted({depth * block // 27 for block in (8, 16, 24)})
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision, **ids)
    with torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []), torch.device(device):
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.suppress_tokens = sorted(tokenizer.added_tokens_decoder)
    return model, transformers.Qwen3VLProcessor(images, tokenizer, videos, chat_template=_CHAT)
