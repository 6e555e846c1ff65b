"""Knobs of Hugging Face models, on tiny random ones of every family: what was set is what runs, and
all is restored; models by their folder, and the importance of their blocks."""

import json
from itertools import chain, combinations

import polars as pl
import pytest
import tiny_models
import torch
import transformers
from commands import refused, words_of
from helpers import input_error
from tiny_models import FAMILIES, blocks_of, picture, saved, tiny_model, watched

from knobwise.profiling.huggingface.knobs import HuggingFaceKnobs, read_importance
from knobwise.profiling.huggingface.loading import weights_digest
from knobwise.profiling.huggingface.model import HuggingFaceModel
from knobwise.profiling.measuring.adaptive_model import Request
from knobwise.profiling.measuring.settings import VLMProfileConfig
from knobwise.profiling.models import load_model

# default and most of max_crops, the unit it counts, the least number of blocks (those always run)
SUPPORT = {
    "llama4": (4, 4, "tiles", 2),
    "aria": (4, 16, "490 pixels", 1),
    "llava_next": (4, 4, "tiles", 1),
    "qwen3_vl_moe": (4, 4, "4096 pixels", 1),
    "qwen3_5_moe": (4, 4, "4096 pixels", 2),
    "glm4v_moe": (4, 4, "4096 pixels", 1),
    "gemma4": (4, 16, "units of 70", 2),
    "smolvlm": (9, 9, "tiles", 1),
    "idefics3": (9, 9, "tiles", 1),
    "molmo2": (6, 6, "tiles", 1),
}
DENSE = ("smolvlm", "idefics3", "molmo2")
RESOLUTION = ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe")
# height and width of an image; by max_crops the crops that the vision tower sees, the overview
# among them where there is one, or the patches of 4 × 4 pixels of a family with a resolution
SEEN = {
    "llama4": ((40, 200), {1: 1, 2: 3, 3: 4, 4: 5}),
    "aria": ((480, 3800), {1: 1, 3: 1, 4: 1, 7: 1, 8: 2, 12: 3, 16: 4}),
    "llava_next": ((500, 700), {1: 2, 2: 3, 3: 3, 4: 5}),
    # 3 → 88 × 128 pixels: √(350,000 / 12,288) = 5.34, 500 / 5.34 = 93.7 → 88, 700 / 5.34 = 131.2 →
    # 128
    **dict.fromkeys(RESOLUTION, ((500, 700), {1: 216, 2: 468, 3: 704, 4: 936})),
    # 1 → 56 × 72 pixels: √(4,480 / 350,000) = 0.1131, 56.6 → 56, 79.2 → 72
    "gemma4": ((500, 700), {1: 252, 2: 560, 3: 560, 4: 1064, 8: 2240, 16: 4368}),
    **dict.fromkeys(("smolvlm", "idefics3"), ((500, 700), {1: 1, 3: 1, 4: 5, 8: 5, 9: 10})),
    "molmo2": ((40, 200), {1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 6: 7}),
}


def leaving_out(vlm, blocks):
    """A context that the model runs in without these blocks."""
    importance = {block: float(block not in blocks) for block in range(4)}
    knobs = HuggingFaceKnobs(vlm.model, vlm.processor, importance)
    return knobs.set({"num_active_blocks": 4 - len(blocks)})


def asked(vlm, *sizes):
    """What the processor makes of a question about an image of each size, padded on the left."""
    requests = []
    for number, (height, width) in enumerate(sizes):
        image = picture(height * width, height, width)
        requests.append(Request(image, "How many dogs?" + " And cats?" * number))
    return vlm.inputs(requests)


@torch.inference_mode()
def generated(model, inputs, use_cache):
    """Four tokens of each answer, int64 [n, 4], and what they were chosen by, [n, 4, V]."""
    found = model.generate(
        **inputs,
        min_new_tokens=4,
        max_new_tokens=4,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        use_cache=use_cache,
    )
    return found.sequences[:, -4:], torch.stack(found.logits, 1)


@torch.inference_mode()
def logits(model, inputs):
    return model(**inputs).logits


@pytest.fixture(scope="module", params=FAMILIES)
def vlm(request):
    return HuggingFaceModel(*tiny_model(request.param))


@pytest.fixture(scope="module")
def llava():
    return HuggingFaceModel(*tiny_model("llava_next"))


def test_every_family_says_what_can_be_set_and_why_a_knob_is_lacking(vlm):
    family = vlm.model.config.model_type
    default, most, unit, least = SUPPORT[family]
    assert {knob.name: (knob.default, knob.least, knob.most) for knob in vlm.knobs} == {
        "max_crops": (default, 1, most),
        "top_k": (0, 0, 0) if family in DENSE else (2, 1, 4),
        "num_active_blocks": (4, least, 4),
    }
    assert unit in vlm.knobs[0].sets
    assert vlm.knobs_of_model.always_active == (0, 1)[:least]
    refused = [
        (knob.name, value) for knob in vlm.knobs for value in (knob.least - 1, knob.most + 1)
    ]
    for name, value in (*refused, ("crops", 1)):
        with input_error(name), vlm.set_knobs({name: value}):
            pass
    if family in DENSE:
        assert "no experts" in vlm.knobs[1].note
        with vlm.set_knobs({"top_k": 0}):  # its default: nothing to refuse
            pass


def test_a_router_that_chooses_within_groups_limits_top_k():
    _, top_k, _ = HuggingFaceKnobs(*tiny_model("glm4v_moe", n_group=2, topk_group=1)).knobs
    assert top_k.most == 2


def test_the_vision_tower_sees_what_was_set(vlm):
    size, expected = SEEN[vlm.model.config.model_type]
    rows, tokens = {}, []
    for crops in expected:
        with watched(vlm.model) as seen, vlm.set_knobs({"max_crops": crops}):
            inputs = asked(vlm, size)
            logits(vlm.model, inputs)
        (rows[crops],) = seen["rows"]
        tokens.append(inputs["input_ids"].shape[1])
    assert rows == expected
    # more is never less for the language model
    assert tokens == sorted(tokens)
    assert tokens[-1] > tokens[0]


@pytest.mark.parametrize("size", [(500, 700), (41, 300), (300, 41), (20, 30), (9, 9)])
@pytest.mark.parametrize("family", [*RESOLUTION, "gemma4"])
def test_no_image_has_more_pixels_than_set(family, size):
    vlm = HuggingFaceModel(*tiny_model(family))
    found = []
    for crops in range(1, 5):
        with vlm.set_knobs({"max_crops": crops}):
            inputs = asked(vlm, size)
        if family == "gemma4":
            found.append(int((inputs["image_position_ids"] >= 0).all(-1).sum()) * 256 // 280)
        else:
            found.append(int(inputs["image_grid_thw"].prod()))
        assert found[-1] <= crops * 256
    assert found == sorted(found)


def test_aria_takes_smaller_images_below_its_default():
    vlm = HuggingFaceModel(*tiny_model("aria"))
    for crops, side in {1: 490, 3: 490, 4: 980, 8: 980}.items():
        with vlm.set_knobs({"max_crops": crops}):
            assert asked(vlm, (480, 3800))["pixel_values"].shape[-2:] == (side, side)


def test_knobs_that_are_set_are_not_set_again(llava):
    with llava.set_knobs({"top_k": 1}):
        with input_error("set"), llava.set_knobs({"top_k": 2}):
            pass
        assert blocks_of(llava.model)[0].mlp.gate.top_k == 1
    assert HuggingFaceKnobs(llava.model, llava.processor).knobs == llava.knobs


def assert_cached_is_uncached(vlm):
    """Generation with a cache gives what it gives without, whichever blocks are left out, on a
    batch with padding."""
    inputs = asked(vlm, (20, 30), (20, 30))
    free = [block for block in range(4) if block not in vlm.knobs_of_model.always_active]
    for left_out in chain.from_iterable(combinations(free, size) for size in range(len(free) + 1)):
        with leaving_out(vlm, left_out):
            tokens, by = generated(vlm.model, inputs, True)
            wanted, wanted_by = generated(vlm.model, inputs, False)
        assert torch.equal(tokens, wanted), left_out
        # linear attention sums in another order with a cache, and float32 rounds as the CPU does
        close = 3e-5 * float(wanted_by.abs().max())
        torch.testing.assert_close(by, wanted_by, rtol=1e-5, atol=close)


def test_generation_with_a_cache_gives_what_it_gives_without(vlm):
    assert_cached_is_uncached(vlm)


def test_blocks_that_store_keys_for_others_always_run():
    layers = ["sliding_attention", *["full_attention"] * 3]
    sizes = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256}
    made = tiny_model("gemma4", num_kv_shared_layers=1, layer_types=layers, **sizes)
    vlm = HuggingFaceModel(*made)
    assert vlm.knobs_of_model.always_active == (0, 1, 2)
    assert_cached_is_uncached(vlm)


def test_what_is_added_between_blocks_is_added_without_them():
    vlm = HuggingFaceModel(*tiny_model("qwen3_vl_moe"))
    inputs = asked(vlm, (20, 30))
    # added to image tokens after blocks 0 and 1
    mergers = vlm.model.model.visual.deepstack_merger_list
    with leaving_out(vlm, [1, 2, 3]):
        before = logits(vlm.model, inputs)
        torch.nn.init.zeros_(mergers[1].linear_fc2.weight)
        assert not torch.equal(logits(vlm.model, inputs), before)


def test_the_least_important_goes_first_but_never_block_0_and_without_importance_the_last_but_one(
    llava,
):
    every = (0, 1, 2, 3)
    for importance, active in (
        (None, [(0,), (0, 3), (0, 1, 3), every]),
        ({0: -1.0, 1: 0.3, 2: 0.7, 3: 0.1}, [(0,), (0, 2), (0, 1, 2), every]),
    ):
        knobs = HuggingFaceKnobs(llava.model, llava.processor, importance)
        assert [knobs.active_blocks(count) for count in (1, 2, 3, 4)] == active


@pytest.mark.parametrize("blocks", [(1, 3), (1, 2, 3, 4)])
def test_an_importance_of_another_model_is_refused(llava, blocks):
    with input_error("1, 2, 3"):
        HuggingFaceKnobs(llava.model, llava.processor, dict.fromkeys(blocks, 0.1))


def test_a_dense_sibling_has_the_image_knob_of_its_family():
    model, processor = tiny_model("qwen2_vl")  # takes no more than 400 pixels
    crops = HuggingFaceKnobs(model, processor).knobs[0]
    assert (crops.default, crops.available) == (1, False)
    processor.image_processor.size["longest_edge"] = 3 * 4096
    vlm = HuggingFaceModel(model, processor)
    assert (vlm.knobs[0].default, vlm.knobs[0].most) == (3, 3)
    for crops, patches in {1: 216, 2: 468, 3: 704}.items():
        with vlm.set_knobs({"max_crops": crops}):
            assert len(asked(vlm, (500, 700))["pixel_values"]) == patches


def test_an_unknown_family_gets_what_can_be_found():
    # whose blocks hand on tuples
    text = {name: value for name, value in tiny_models.TEXT.items() if name != "head_dim"}
    small = {"channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": []}
    config = transformers.ChameleonConfig(
        **text | {"vocab_size": 64, "vocabulary_map": {"<image>": 60}},
        vq_config=small | {"base_channels": 32},
    )
    model = tiny_models.seeded(transformers.ChameleonForConditionalGeneration, config)
    knobs = HuggingFaceKnobs(model, None)
    crops, top_k, blocks = knobs.knobs
    assert (crops.available, top_k.available) == (False, False)
    assert "'chameleon'" in crops.note
    assert (blocks.least, blocks.most) == (1, 4)
    inputs = {"input_ids": torch.arange(5, 25).reshape(2, 10)}
    wanted = logits(model, inputs)
    with knobs.set({"num_active_blocks": 2}):
        assert not torch.equal(logits(model, inputs), wanted)
        cached, uncached = (generated(model, inputs, cache)[1] for cache in (True, False))
        torch.testing.assert_close(cached, uncached, rtol=1e-5, atol=1e-4)
    assert torch.equal(logits(model, inputs), wanted)


def test_a_model_without_a_decoder_is_refused():
    model = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**tiny_models.VISION))
    with input_error("'clip_vision_model'"):
        HuggingFaceKnobs(model, None)


# -- models by their folder, and the importance of their blocks -----------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a model and four questions about an image."""
    monkeypatch.chdir(tmp_path)
    picture(0).save("wide.png")
    rows = {"id": range(4), "image": "wide.png", "question": "What?", "answer": "a"}
    pl.DataFrame(rows).write_ndjson("questions.jsonl")
    return saved(tmp_path / "model", *tiny_model("llava_next"))


def test_blocks_are_left_out_by_a_file(folder, file):
    importance = {1: 0.0, 2: 9.0, 3: 0.0}
    file.write_text(json.dumps(importance))
    asked = str(folder), "questions.jsonl", VLMProfileConfig(max_new_tokens=3)
    model, items = load_model(*asked, importance=str(file), device="cpu")
    assert (model.name, len(items)) == ("model", 4)
    assert model.knobs_of_model.active_blocks(2) == (0, 2)
    facts = {"importance": importance, "device": "cpu", "dtype": "float32"}
    assert model.identity.items() >= (facts | {"weights": weights_digest(folder)}).items()


@pytest.mark.parametrize(
    ("option", "fault"),
    {
        "model=./nowhere": "./nowhere",
        "dtype=float8": "dtype",
        "importance=nothing.json": "nothing.json",
    }.items(),
)
def test_mistakes_are_named_and_nothing_is_written(folder, capsys, option, fault):
    words = words_of("profile model=model data=questions.jsonl out=out device=cpu", option)
    assert fault in refused(words, capsys)


def test_other_weights_have_another_digest(folder):
    seen = {weights_digest(folder), weights_digest(folder)}
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"1")
    seen.add(weights_digest(folder))
    assert weights_digest("org/name", "abc") == "commit:abc"
    # of a large file pieces of all of it
    for place in (0, 5 << 20, (16 << 20) - (1 << 18)):
        content = bytearray(16 << 20)
        content[place] = 1
        (folder / "large.safetensors").write_bytes(content)
        seen.add(weights_digest(folder))
    assert len(seen) == 5


@pytest.fixture
def file(tmp_path):
    return tmp_path / "importance.json"


def test_the_format_is_a_number_for_each_block(file):
    file.write_text('{"10": 0.25, "4": 0.0156, "5": -1}')
    assert list(read_importance(file).items()) == [(4, 0.0156), (5, -1.0), (10, 0.25)]


@pytest.mark.parametrize(
    ("text", "fault"),
    {
        "{4: 0.1}": "JSON",
        "[0.1, 0.2]": "block",
        '{"layer.4": 0.1}': "layer.4",
        '{"-1": 0.1}': "-1",
        '{"4": NaN}': "nan",
        '{"4": 1e999}': "inf",
        '{"4": true}': "True",
        '{"4": {"4": 0.1}}': "block '4'",
    }.items(),
)
def test_a_file_that_is_wrong_is_refused(file, text, fault):
    file.write_text(text)
    with input_error(f"importance.json.*{fault}"):
        read_importance(file)
