"""A language model of real size behind `knobwise profile`: what its settings take on a device.

The architecture is that of a published model and the weights are random, so the answers are noise
and the times are real. The tokenizer knows a hundred characters, one token each.

    python benchmarks/language_model.py [device=cuda] [shape=qwen2.5-7b] [tokens=4,16,64]

A row is a setting: the median time of an answer, and its share of the time that all blocks take for
as many new tokens. The weights (bfloat16, 15 GB of the largest) go into a temporary folder. On a
CPU one thread measures, as always in `knobwise profile`.
"""

from __future__ import annotations

import contextlib
import csv
import io
import random
import string
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import polars as pl
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from knobwise.__main__ import main as knobwise

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3.2-1b": (
        "LlamaConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-7b": (
        "Qwen2Config",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
    ),
    # a mixture: 64 experts, of which a token uses 8
    "olmoe-7b": (
        "OlmoeConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "vocab_size": 50304,
        },
    ),
    "tiny": (
        "OlmoeConfig",
        {
            "hidden_size": 32,
            "intermediate_size": 16,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "vocab_size": 500,
        },
    ),
}
"""Shapes of published models, and one to try the script with."""
PROMPT = 256
"""Characters, and so tokens, of a question."""
SAMPLES = 4


def save_model(folder: Path, shape: str, device: str) -> dict[str, str]:
    """Save a new model with random weights and its tokenizer; return the values to measure."""
    kind, settings = SHAPES[shape]
    config = getattr(transformers, kind)(**settings, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokens = ["<pad>", "</s>", "<s>", "Ġ", "Ċ", *sorted(set(string.printable.strip()))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    letters = Tokenizer(models.BPE(vocabulary, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    ).save_pretrained(folder)
    # a quarter, half and all of the blocks; of experts likewise
    values = {"num_active_blocks": settings["num_hidden_layers"]}
    if "num_experts_per_tok" in settings:
        values["top_k"] = settings["num_experts_per_tok"]
    return {name: f"[{most // 4},{most // 2},{most}]" for name, most in values.items()}


def write_questions(path: Path) -> None:
    """Write questions of drawn letters, whose answers nobody knows."""
    drawn = random.Random(0)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "question", "answers"])
        for number in range(SAMPLES):
            question = "".join(drawn.choices(string.ascii_lowercase + "    ", k=PROMPT))
            rows.writerow([number, question, "none"])


def measure(folder: Path, values: dict[str, str], device: str, tokens: str) -> None:
    """Profile the saved model with answers of so many tokens, and print a row a setting."""
    out = folder.with_name(f"profile-{tokens}")
    words = [f"model={folder}", f"data={folder.with_name('questions.csv')}", f"out={out}"]
    words += [f"knobs.{name}={listed}" for name, listed in values.items()]
    words += [f"device={device}", "knobs.repeats=1", f"knobs.max_new_tokens={tokens}"]
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        assert knobwise(["profile", *words]) == 0
    seconds = time.perf_counter() - start
    cells = pl.read_parquet(out / "table.parquet")
    total_s = cells["latency_ms"].sum() / 1e3
    medians = cells.group_by(*values).agg(pl.col("latency_ms").median()).sort(*values)
    most = medians["latency_ms"].max()
    for row in medians.iter_rows(named=True):
        setting = ", ".join(f"{name} {row[name]}" for name in values)
        took = row["latency_ms"]
        print(f"| {setting}, {tokens} new tokens | {took:.4g} ms | {took / most:.2f} |")
    speed = f"{len(cells) / total_s:.3g} cells a second while answering"
    print(f"{len(cells)} cells in {seconds:.0f} s, loading included; {speed}", flush=True)


def main(words: list[str]) -> None:
    """Make the model, and measure it once for each length of answers."""
    options = {"device": "cuda", "shape": "qwen2.5-7b", "tokens": "4,16,64"}
    options |= dict(word.split("=", 1) for word in words)
    device = options["device"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / f"random-{options['shape']}"
        values = save_model(folder, options["shape"], device)
        write_questions(folder.with_name("questions.csv"))
        for tokens in options["tokens"].split(","):
            measure(folder, values, device, tokens)


if __name__ == "__main__":
    main(sys.argv[1:])
