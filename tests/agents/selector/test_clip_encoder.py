"""v2_lora: a tiny CLIP model that learns along with a selector."""

import copy
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from commands import stopped_and_resumed
from helpers import close, equal_states, input_error, small_beams
from safetensors.torch import load_file
from tiny_models import picture, tiny_clip

from knobwise.agents.selector.clip_encoder import ClipEncoder, ClipItems, as_read, load_clip
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.agents.selector.training import selector_trainer
from knobwise.agents.training.checkpoint import load_checkpoint, save_checkpoint
from knobwise.agents.training.settings import StageConfig
from knobwise.profiling.measuring.questions import VQAItem

QUESTIONS = ("How many dogs ?", "What color is it ?", "How many cats ?")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("models") / "clip")
    tiny_clip(folder)
    return folder


def vqa_items(count, first=0):
    numbers = range(first, first + count)
    return [VQAItem(f"i{n}", picture(n, 8, 12), QUESTIONS[n % 3], ("2",)) for n in numbers]


@pytest.fixture(scope="module")
def items(source):
    """Three queries; the first is a candidate too."""
    queries = vqa_items(3)
    return ClipItems.read(source, queries, [queries[0], *vqa_items(4, 3)])


@pytest.fixture(scope="module")
def beams(source):
    """Beams of twelve queries and candidates that are named by their items' numbers."""
    table, scorer = small_beams(12, pool=3)
    items = ClipItems.read(source, vqa_items(12), vqa_items(12, 12))
    return as_read(table, items), scorer, items


def changed(source, items):
    """An encoder whose LoRA weights do something."""
    torch.manual_seed(0)
    encoder = ClipEncoder(source, items).eval()
    for weight in encoder.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    return encoder


def test_items_are_read_once_and_named_by_number(items):
    assert items.pixel_values.shape == (7, 3, 8, 8)
    assert items.queries.flatten().tolist() == [0, 1, 2]
    assert items.candidates.flatten().tolist() == [0, 3, 4, 5, 6]


def test_before_any_step_the_embeddings_are_those_of_clip(source, items):
    model = transformers.CLIPModel.from_pretrained(source).eval()
    # of every item, from the image's and the text's own towers of the model as it was saved
    image = model.get_image_features(items.pixel_values.float()).pooler_output
    text = model.get_text_features(items.input_ids, items.attention_mask).pooler_output
    wanted = (torch.nn.functional.normalize(image) + torch.nn.functional.normalize(text)) / 2
    numbers = torch.tensor([[6, 0], [0, 2]])
    for training in (False, True):
        encoder = ClipEncoder(source, items).train(training)
        close(encoder(numbers.unsqueeze(2).float()), wanted[numbers])


def test_only_lora_weights_learn_and_are_saved(source, items):
    encoder = changed(source, items)
    # two towers of one layer, four matrices of 16 × 16, rank 16: two matrices of 16 × 16 each
    assert sum(weight.numel() for weight in encoder.parameters()) == 2 * 4 * 2 * 16 * 16
    assert set(encoder.state_dict()) == {name for name, _ in encoder.named_parameters()}
    assert all("lora" in name for name in encoder.state_dict())
    saved = load_file(Path(source) / "model.safetensors")
    buffers = encoder.model.named_buffers()
    plain = {name.replace("base_layer.", ""): value for name, value in buffers}
    assert all(torch.equal(plain[name], value) for name, value in saved.items())


def test_a_copy_shares_what_is_large_and_nothing_that_learns(source, items):
    encoder = changed(source, items)
    twin = copy.deepcopy(encoder)
    assert twin.items is encoder.items
    assert all(a is b for a, b in zip(twin.buffers(), encoder.buffers(), strict=True))
    assert torch.equal(twin(items.queries), encoder(items.queries))
    next(twin.parameters()).data += 1.0
    assert not torch.equal(next(twin.parameters()), next(encoder.parameters()))


def selector_of(table, encoder):
    config = SelectorConfig(width=8, heads=2)
    return Selector.fitted(config, table.queries, table.candidates, encoder)


def test_a_checkpoint_holds_the_models_name_and_gives_the_same_log_probs(source, beams, tmp_path):
    table, _, items = beams
    made = selector_of(table, changed(source, items)).eval()
    assert made.features == 12
    save_checkpoint(tmp_path / "c.pt", made, table, {})
    plain = torch.load(tmp_path / "c.pt", weights_only=True)["controller"]
    assert plain["encoder"] == source
    assert {name for name in plain["state"] if name.startswith("encoder.")} == {
        f"encoder.{name}" for name in made.encoder.state_dict()
    }
    loaded = load_checkpoint(tmp_path / "c.pt").selector
    batch = (table.queries, table.candidates[table.pool], table.pool_mask)
    with input_error("items"):
        loaded.choose(*batch, 2)
    loaded.encoder.items = items
    wanted = made.distribution(*batch, 2)
    result = loaded.distribution(*batch, 2)
    greedy = wanted.mode.unsqueeze(1)
    assert torch.equal(result.log_prob(greedy), wanted.log_prob(greedy))


def test_a_selector_and_its_clip_are_trained_together_and_resume_alike(source, beams, tmp_path):
    """Both learn, what they start from stays, and an interruption changes nothing."""
    table, scorer, items = beams
    start = selector_of(table, changed(source, items))
    before = copy.deepcopy(start)
    config = StageConfig(epochs=2, lr=1e-2, queries=4, keep="last")
    options = {"scorer": scorer, "live": True, "config": config}

    def trainer(folder):
        split = table.split(0.7, 0.2)
        return selector_trainer("grpo", table, split, start, folder=folder, **options)

    whole, resumed = (each.kept for each in stopped_and_resumed(trainer, tmp_path, 3))
    assert equal_states(start, before)
    for part in ("encoder", "network"):
        assert not equal_states(getattr(whole, part), getattr(start, part))
    assert equal_states(resumed, whole)


def test_a_moved_model_and_missing_packages_are_named(source, beams, tmp_path, monkeypatch):
    table, _, items = beams
    moved, other = tmp_path / "moved", tmp_path / "other"
    for folder in (moved, other):
        shutil.copytree(source, folder)
    selector = selector_of(table, changed(str(moved), items))
    save_checkpoint(tmp_path / "c.pt", selector, table, {})
    shutil.rmtree(moved)
    with input_error(r"encoder\.model=.*moved"):
        load_checkpoint(tmp_path / "c.pt")
    config = other / "config.json"
    config.write_text(config.read_text().replace(': "clip"', ': "siglip"'))
    with input_error(r"encoder\.model="):
        load_clip(str(other))
    monkeypatch.setitem(sys.modules, "peft", None)
    with input_error(r"pip install .*peft"):
        load_clip(source)
