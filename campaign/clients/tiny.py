"""Tiny language models of random weights, for servers that load files."""

import gguf
import numpy as np
from tiny_models import tiny_llama

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
WIDTH, INNER, HEADS, BLOCKS, CONTEXT = 32, 64, 2, 2, 2048
END = "<|im_end|>"
TOKENS = [END, *map(chr, range(33, 127)), "Ġ", "Ċ", "ab"]
"""Characters as GPT-2 writes bytes: a space is Ġ, a new line is Ċ."""
SETTINGS = {
    "context_length": CONTEXT,
    "embedding_length": WIDTH,
    "block_count": BLOCKS,
    "feed_forward_length": INNER,
    "head_count": HEADS,
    "head_count_kv": HEADS,
    "layer_norm_rms_eps": 1e-5,
    "rope_freq_base": 1e4,
    "vocab_size": len(TOKENS),
    "tokenizer_model": "gpt2",
    "tokenizer_pre": "smollm",
    "token_list": TOKENS,
    "token_types": [gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(TOKENS) - 1),
    "token_merges": ["a b"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "chat_template": TEMPLATE,
}


def write_folder(folder, seed):
    """Write a model as a folder that transformers loads."""
    model, tokenizer = tiny_llama(seed)
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_gguf(path, seed):
    """Write a model as a file that llama.cpp loads."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in SETTINGS.items():
        getattr(writer, f"add_{name}")(value)
    shapes = {"token_embd": (len(TOKENS), WIDTH), "output_norm": (WIDTH,)}
    for block in range(BLOCKS):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{block}.{part}"] = WIDTH, WIDTH
        shapes[f"blk.{block}.ffn_gate"] = shapes[f"blk.{block}.ffn_up"] = INNER, WIDTH
        shapes[f"blk.{block}.ffn_down"] = WIDTH, INNER
        shapes[f"blk.{block}.attn_norm"] = shapes[f"blk.{block}.ffn_norm"] = (WIDTH,)
    draw = np.random.default_rng(seed)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.standard_normal(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
