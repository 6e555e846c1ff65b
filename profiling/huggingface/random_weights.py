"""A Qwen3-VL-MoE at random weights, with a processor that works: its times are real, its answers are not. Nothing is
downloaded."""

from __future__ import annotations

from typing import Any

import torch

from knobwise.common.errors import InputError
from knobwise.profiling.huggingface.families import TOKENS_PER_CROP

PATCH, BLOCKS = 16, 16
"""Side of a patch in pixels, of which 2 × 2 become a token; decoder blocks."""
CROP_SIDE = 2 * PATCH * int(TOKENS_PER_CROP**0.5)
"""Side in pixels of a square picture that is one crop."""
_KNOWN = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<|im_end|>"}
_MARKS = {name: f"<|{name}|>" for name in ("image_pad", "video_pad", "vision_start", "vision_end")}
_CHAT = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def random_qwen(width: int, experts: int, vision_blocks: int, crops: int, device: str, seed: int) -> tuple[Any, Any]:
    """A model in bfloat16 with seeded weights, made on the device itself, and its processor. It never ends an answer.

    Args:
        width: of the language model, a multiple of 64; all other widths go with it, and the vocabulary. At 2048, with 128
            experts and 27 vision blocks, the sizes are those of Qwen3-VL-30B-A3B, with 16 of its 48 decoder blocks:
            11.1 billion weights.
        experts: in each decoder block, at least 8.
        crops: the most crops of an image, of 64 tokens each.

    Raises:
        InputError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise InputError("a Hugging Face model needs: pip install knobwise[models]") from error
    tokenizer = _byte_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in _MARKS.items()}
    pixels: dict[str, Any] = {"patch_size": PATCH, "merge_size": 2, "size": {"shortest_edge": (2 * PATCH) ** 2}}
    pixels["size"]["longest_edge"] = crops * CROP_SIDE**2
    images, videos = transformers.Qwen2VLImageProcessor(**pixels), transformers.Qwen3VLVideoProcessor(**pixels)
    text = {"vocab_size": width * 151_936 // 2048, "hidden_size": width, "num_hidden_layers": BLOCKS, "head_dim": 128}
    text |= {"num_attention_heads": width // 64, "num_key_value_heads": max(width // 512, 1), "num_experts": experts}
    text |= {"num_experts_per_tok": 8, "moe_intermediate_size": width * 3 // 8, "eos_token_id": tokenizer.eos_token_id}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
    vision = {"depth": vision_blocks, "hidden_size": width * 9 // 16, "num_heads": max(width // 128, 1)}
    vision |= {"intermediate_size": width * 269 // 128, "patch_size": PATCH, "out_hidden_size": width}
    vision["deepstack_visual_indexes"] = sorted({vision_blocks * block // 27 for block in (8, 16, 24)})
    config = transformers.Qwen3VLMoeConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
    )
    with torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []), torch.device(device):
        torch.manual_seed(seed)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.suppress_tokens = sorted(tokenizer.added_tokens_decoder)
    return model, transformers.Qwen3VLProcessor(images, tokenizer, videos, chat_template=_CHAT)


def _byte_tokenizer() -> Any:
    """A token for each byte, after the special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*_KNOWN.values(), *_MARKS.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token=_KNOWN["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_KNOWN, extra_special_tokens=list(_MARKS.values()))
