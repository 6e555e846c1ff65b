from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
import transformers
from helpers import small_beams
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.selector.clip_encoder import ClipEncoder, ClipItems
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.agents.training.selector_trainer import SelectorTrainer
from knobwise.agents.training.settings import StageConfig
from knobwise.common.errors import InputError

QUERY_ITEMS, CANDIDATE_ITEMS = torch.tensor([0, 1, 2]), torch.tensor([2, 3, 4, 5, 6])
POOL = torch.tensor([[0, 1, 2], [2, 1, 3], [4, -1, -1]])


def clip() -> nn.Module:
    torch.manual_seed(0)
    layers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = {"vocab_size": 50, "max_position_embeddings": 6, "eos_token_id": 49, "bos_token_id": 48, "pad_token_id": 0}
    images = {"image_size": 16, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=layers | words, vision_config=layers | images, projection_dim=12)
    return transformers.CLIPModel(config).eval()


def items(count: int = 7) -> ClipItems:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(1, 48, (count, 6), generator=generator)
    words[:, 4] = 49
    words[:, 5] = 0
    return ClipItems(torch.randn(count, 3, 16, 16, generator=generator), words, (words > 0).long())


def encoder() -> ClipEncoder:
    model = clip()
    torch.manual_seed(1)
    return ClipEncoder(model, items(), QUERY_ITEMS, CANDIDATE_ITEMS).eval()


def trained() -> ClipEncoder:
    made = encoder()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def frozen_embeddings() -> Tensor:
    """[7, 12], from the image's and the text's own towers."""
    model, (images, words, mask) = clip(), items()
    with torch.no_grad():
        image = model.get_image_features(images).pooler_output
        text = model.get_text_features(words, mask).pooler_output
    return (image / image.norm(dim=-1, keepdim=True) + text / text.norm(dim=-1, keepdim=True)) / 2


def test_before_any_step_the_embeddings_are_those_of_the_frozen_clip_and_zeros_of_nothing() -> None:
    for made in (encoder(), encoder().train()):
        query, pool = made.both(torch.arange(3), POOL)
        wanted = frozen_embeddings()
        assert query.dtype == torch.float32
        torch.testing.assert_close(query, wanted[QUERY_ITEMS])
        torch.testing.assert_close(pool[POOL >= 0], wanted[CANDIDATE_ITEMS[POOL[POOL >= 0]]])
        assert (pool[POOL < 0] == 0).all()
        query, pool = made.both(torch.tensor([-1, -1]), torch.full((2, 3), -1))
        assert torch.equal(query, torch.zeros(2, 12))
        assert torch.equal(pool, torch.zeros(2, 3, 12))


def test_stored_embeddings_are_those_of_the_encoder() -> None:
    made = trained()
    query, pool = made.both(torch.arange(3), POOL)
    made.train()
    stored = made.stored()
    assert made.training
    for result, wanted in zip(stored.both(torch.arange(3), POOL), (query, pool), strict=True):
        torch.testing.assert_close(result, wanted)
        assert not result.requires_grad
    assert (query - frozen_embeddings()[QUERY_ITEMS]).abs().max() > 1e-2


def test_every_distinct_item_is_encoded_once() -> None:
    made, sizes = encoder(), []  # how many items each call of CLIP gets
    made.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    made.both(torch.arange(3), POOL)  # items 0, 1, 2 as queries; 2, 3, 4, 5, 6 in pools
    made.both(torch.tensor([1, 1, 1, -1]), torch.full((4, 1), -1))
    selector = Selector(SelectorConfig(width=8, heads=2), 12)
    query, pool = made.both(torch.arange(3), POOL)
    dist = selector.distribution(query, pool, POOL >= 0, 2, group_size=12)
    dist.log_prob(dist.sample()).sum().backward()
    assert sizes == [7, 1, 7]


def test_only_lora_weights_learn() -> None:
    made = encoder()
    names = [name for name, parameter in made.model.named_parameters() if parameter.requires_grad]
    # A and B of 4 projections in 2 layers of 2 towers
    assert len(names) == 2 * 4 * 2 * 2
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    # a LoRA A gets no gradient while its B is 0: look after a step away from the start
    made = trained()
    before = {name: p.clone() for name, p in made.model.named_parameters()}
    selector = Selector(SelectorConfig(width=8, heads=2), 12)
    optimiser = torch.optim.SGD([*made.parameters(), *selector.parameters()], 0.1)
    query, pool = made.both(torch.arange(3), POOL)
    dist = selector.distribution(query, pool, POOL >= 0, 2)
    (-dist.log_prob(torch.tensor([[2, 0], [1, 2], [0, -1]])).sum()).backward()
    optimiser.step()
    changed = {name for name, p in made.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == set(names)


def test_lora_weights_are_saved_and_loaded_alone(tmp_path: Path) -> None:
    made = trained()
    save_file(made.lora_state(), tmp_path / "lora.safetensors")
    state = load_file(tmp_path / "lora.safetensors")
    assert sum(value.numel() for value in state.values()) == 16 * 2 * 16 * 16
    assert copy.deepcopy(made).items is made.items, "pictures are too large to be copied"
    other = encoder()
    assert (other.both(torch.arange(3), POOL)[0] - made.both(torch.arange(3), POOL)[0]).abs().max() > 1e-2
    other.load_lora_state(state)
    assert torch.equal(other.both(torch.arange(3), POOL)[0], made.both(torch.arange(3), POOL)[0])


def test_lora_weights_that_do_not_fit_are_refused() -> None:
    made, state = encoder(), trained().lora_state()
    name = next(iter(state))
    missing = {k: v for k, v in state.items() if k != name}
    for wrong in (missing, state | {"other": state[name]}, state | {name: state[name][:3]}):
        with pytest.raises(InputError, match="another CLIP model or rank"):
            made.load_lora_state(wrong)


def test_weights_from_a_folder(tmp_path: Path) -> None:
    clip().save_pretrained(tmp_path / "clip")
    made = ClipEncoder.pretrained(tmp_path / "clip", items(), QUERY_ITEMS, CANDIDATE_ITEMS).eval()
    torch.testing.assert_close(made.both(torch.arange(3), POOL)[0], frozen_embeddings()[QUERY_ITEMS])
    with pytest.raises(InputError, match="not a CLIP model that can be loaded"):
        ClipEncoder.pretrained(tmp_path / "nothing", items(), QUERY_ITEMS, CANDIDATE_ITEMS)


def test_mistakes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="none of the layers q_proj, k_proj"):
        ClipEncoder(nn.Sequential(nn.Linear(2, 2)), items(), QUERY_ITEMS, CANDIDATE_ITEMS)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=r"pip install knobwise\[models\]"):
        encoder()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install knobwise\[models\]"):
        ClipEncoder.pretrained("clip", items(), QUERY_ITEMS, CANDIDATE_ITEMS)


def test_a_selector_and_its_clip_are_trained_together(tmp_path: Path) -> None:
    """v2_lora: SFT, then GRPO on live draws; of CLIP the LoRA weights alone move, and the first KL is 0."""
    table, scorer = small_beams(12, pool=3)
    rows = torch.arange(table.num_queries + len(table.candidates))
    model = clip()
    torch.manual_seed(1)
    made = ClipEncoder(model, items(len(rows)), rows[:12], rows[12:]).eval()
    stored = made.stored()
    start = Selector.fitted(SelectorConfig(width=16, heads=2), stored.query_table, stored.candidate_table)
    config = StageConfig(epochs=1, lr=1e-2, queries=4)
    for stage, live in (("sft", False), ("grpo", True)):
        before = {name: p.detach().clone() for name, p in made.named_parameters()}
        start_encoder = made
        options = {"embeddings": made, "scorer": scorer, "live": live, "config": config, "folder": tmp_path / stage}
        student = SelectorTrainer(stage, table, table.split(0.7, 0.2), start, **options)
        if live:
            next(iter(student.collector))
            student.stage.prepare(0.0, True)
            first = student.stage.loss(student.buffer[:])
            assert float(first["kl_to_ref"]) == pytest.approx(0, abs=1e-6)
        start, made = student.run(), student.agent.embeddings
        assert isinstance(made, ClipEncoder)
        assert all(torch.equal(p, before[name]) for name, p in start_encoder.named_parameters())
        moved = {name for name, p in made.named_parameters() if not torch.equal(p, before[name])}
        last = load_checkpoint(tmp_path / stage / "last.pt").extra["training"]["agent"]
        kept = {n for n in before if f"embeddings.{n}" in last}
        assert kept == {f"model.{name}" for name in made.lora_state()}, "CLIP itself stays out of checkpoints"
        assert all("lora" in name for name in kept)
        assert moved <= {n for n in kept if not torch.equal(last[f"embeddings.{n}"], before[n])} != set()
    best = load_checkpoint(tmp_path / "grpo" / "best.pt")
    made.load_lora_state(best.extra["lora"])
