"""Knobs of Hugging Face models, on tiny random ones of every family: what was set is what runs, and
all is restored."""

from itertools import chain, combinations

import pytest
import tiny_models
import torch
import transformers
from helpers import input_error
from tiny_models import FAMILIES, blocks_of, picture, tiny_model, watched

from knobwise.profiling.huggingface.knobs import HuggingFaceKnobs

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


def leaving_out(model, processor, blocks):
    """A context that the model runs in without these blocks."""
    importance = {block: float(block not in blocks) for block in range(4)}
    knobs = HuggingFaceKnobs(model, processor, importance)
    return knobs.set({"num_active_blocks": 4 - len(blocks)})


def asked(processor, *sizes):
    """What the processor makes of a question about each image; of different lengths, padded on the
    left."""
    texts = []
    for number, _ in enumerate(sizes):
        text = {"type": "text", "text": "How many dogs?" + " And cats?" * number}
        messages = [{"role": "user", "content": [{"type": "image"}, text]}]
        texts.append(processor.apply_chat_template(messages, add_generation_prompt=True))
    images = [[picture(height * width, height, width)] for height, width in sizes]
    inputs = processor(
        text=texts, images=images, padding=True, padding_side="left", return_tensors="pt"
    )
    return dict(inputs.to(torch.float32))


@torch.inference_mode()
def generated(model, inputs, use_cache):
    """Four tokens of each answer, int64 [n, 4], and what they were chosen by, [n, 4, V]."""
    length = {"min_new_tokens": 4, "max_new_tokens": 4, "do_sample": False}
    kept = {"output_logits": True, "return_dict_in_generate": True}
    found = model.generate(**inputs, **length, **kept, use_cache=use_cache)
    return found.sequences[:, -4:], torch.stack(found.logits, 1)


@torch.inference_mode()
def logits(model, inputs):
    return model(**inputs).logits


def with_knobs(family):
    model, processor = tiny_model(family)
    return model, processor, HuggingFaceKnobs(model, processor)


@pytest.fixture(scope="module", params=FAMILIES)
def made(request):
    return request.param, *with_knobs(request.param)


@pytest.fixture(scope="module")
def llava():
    return with_knobs("llava_next")


def test_every_family_says_what_can_be_set_and_why_a_knob_is_lacking(made):
    family, _, _, knobs = made
    default, most, unit, least = SUPPORT[family]
    assert {knob.name: (knob.default, knob.least, knob.most) for knob in knobs.knobs} == {
        "max_crops": (default, 1, most),
        "top_k": (0, 0, 0) if family in DENSE else (2, 1, 4),
        "num_active_blocks": (4, least, 4),
    }
    assert unit in knobs.knobs[0].sets
    assert knobs.always_active == (0, 1)[:least]
    # values out of range are refused
    for knob in knobs.knobs:
        for value in (knob.least - 1, knob.most + 1):
            with input_error(knob.name), knobs.set({knob.name: value}):
                pass
    if family in DENSE:
        assert "no experts" in knobs.knobs[1].note
        with input_error("lacks the knob"), knobs.set({"top_k": 1}):
            pass
        with knobs.set({"top_k": 0}):  # its default: nothing to refuse
            pass
    with input_error("'crops'"), knobs.set({"crops": 1}):
        pass


def test_a_router_that_chooses_within_groups_limits_top_k():
    knobs = HuggingFaceKnobs(*tiny_model("glm4v_moe", n_group=2, topk_group=1))
    assert knobs.knobs[1].most == 2


def test_the_vision_tower_sees_what_was_set(made):
    family, model, processor, knobs = made
    size, expected = SEEN[family]
    rows, tokens = {}, []
    for crops in expected:
        with watched(model) as seen, knobs.set({"max_crops": crops}):
            inputs = asked(processor, size)
            logits(model, inputs)
        (rows[crops],) = seen["rows"]
        tokens.append(inputs["input_ids"].shape[1])
    assert rows == expected
    # more is never less for the language model
    assert tokens == sorted(tokens)
    assert tokens[-1] > tokens[0]


@pytest.mark.parametrize("size", [(500, 700), (41, 300), (300, 41), (20, 30), (9, 9)])
@pytest.mark.parametrize("family", [*RESOLUTION, "gemma4"])
def test_no_image_has_more_pixels_than_set(family, size):
    _, processor, knobs = with_knobs(family)
    found = []
    for crops in range(1, 5):
        with knobs.set({"max_crops": crops}):
            inputs = asked(processor, size)
        if family == "gemma4":
            found.append(int((inputs["image_position_ids"] >= 0).all(-1).sum()) * 256 // 280)
        else:
            found.append(int(inputs["image_grid_thw"].prod()))
        assert found[-1] <= crops * 256
    assert found == sorted(found)


def test_aria_takes_smaller_images_below_its_default():
    _, processor, knobs = with_knobs("aria")
    for crops, side in {1: 490, 3: 490, 4: 980, 8: 980}.items():
        with knobs.set({"max_crops": crops}):
            assert asked(processor, (480, 3800))["pixel_values"].shape[-2:] == (side, side)


def test_knobs_that_are_set_are_not_set_again(llava):
    model, processor, knobs = llava
    with knobs.set({"top_k": 1}):
        with input_error("set"), knobs.set({"top_k": 2}):
            pass
        assert blocks_of(model)[0].mlp.gate.top_k == 1
    assert HuggingFaceKnobs(model, processor).knobs == knobs.knobs


def assert_cached_is_uncached(model, processor, knobs):
    """Generation with a cache gives what it gives without, whichever blocks are left out, on a
    batch with padding."""
    inputs = asked(processor, (20, 30), (20, 30))
    free = [block for block in range(4) if block not in knobs.always_active]
    for left_out in chain.from_iterable(combinations(free, size) for size in range(len(free) + 1)):
        with leaving_out(model, processor, left_out):
            tokens, by = generated(model, inputs, True)
            wanted, wanted_by = generated(model, inputs, False)
        assert torch.equal(tokens, wanted), left_out
        # linear attention sums in another order with a cache, and float32 rounds as the CPU does
        close = 3e-5 * float(wanted_by.abs().max())
        torch.testing.assert_close(by, wanted_by, rtol=1e-5, atol=close)


def test_generation_with_a_cache_gives_what_it_gives_without(made):
    assert_cached_is_uncached(*made[1:])


def test_blocks_that_store_keys_for_others_always_run():
    layers = ["sliding_attention", *["full_attention"] * 3]
    sizes = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256}
    model, processor = tiny_model("gemma4", num_kv_shared_layers=1, layer_types=layers, **sizes)
    knobs = HuggingFaceKnobs(model, processor)
    assert knobs.always_active == (0, 1, 2)
    assert_cached_is_uncached(model, processor, knobs)


def test_what_is_added_between_blocks_is_added_without_them():
    model, processor = tiny_model("qwen3_vl_moe")
    inputs = asked(processor, (20, 30))
    mergers = model.model.visual.deepstack_merger_list  # added to image tokens after blocks 0 and 1
    with leaving_out(model, processor, [1, 2, 3]):
        before = logits(model, inputs)
        torch.nn.init.zeros_(mergers[1].linear_fc2.weight)
        assert not torch.equal(logits(model, inputs), before)


def test_the_least_important_goes_first_but_never_block_0_and_without_importance_the_last_but_one(
    llava,
):
    model, processor, knobs = llava
    every = (0, 1, 2, 3)
    assert [*map(knobs.active_blocks, (1, 2, 3, 4))] == [(0,), (0, 3), (0, 1, 3), every]
    knobs = HuggingFaceKnobs(model, processor, {0: -1.0, 1: 0.3, 2: 0.7, 3: 0.1})
    assert [*map(knobs.active_blocks, (1, 2, 3, 4))] == [(0,), (0, 2), (0, 1, 2), every]


@pytest.mark.parametrize("blocks", [(1, 3), (1, 2, 3, 4)])
def test_an_importance_of_another_model_is_refused(llava, blocks):
    with input_error("1, 2, 3"):
        HuggingFaceKnobs(*llava[:2], dict.fromkeys(blocks, 0.1))


def test_a_dense_sibling_has_the_image_knob_of_its_family():
    model, processor = tiny_model("qwen2_vl")  # takes no more than 400 pixels
    crops = HuggingFaceKnobs(model, processor).knobs[0]
    assert (crops.default, crops.available) == (1, False)
    processor.image_processor.size["longest_edge"] = 3 * 4096
    knobs = HuggingFaceKnobs(model, processor)
    assert (knobs.knobs[0].default, knobs.knobs[0].most) == (3, 3)
    patches = []
    for number in (1, 2, 3):
        with knobs.set({"max_crops": number}):
            patches.append(len(asked(processor, (500, 700))["pixel_values"]))
    assert patches == [216, 468, 704]


def test_an_unknown_family_gets_what_can_be_found():
    # whose blocks hand on tuples
    config = transformers.ChameleonConfig(
        **{name: value for name, value in tiny_models.TEXT.items() if name != "head_dim"},
        vocab_size=64,
        vq_config={
            "base_channels": 32,
            "channel_multiplier": [1],
            "num_res_blocks": 1,
            "attn_resolutions": [],
        },
        vocabulary_map={"<image>": 60},
    )
    torch.manual_seed(0)
    model = transformers.ChameleonForConditionalGeneration(config).eval()
    knobs = HuggingFaceKnobs(model, None)
    crops, top_k, blocks = knobs.knobs
    assert (crops.available, top_k.available) == (False, False)
    for words in ("'chameleon'", "known are llama4, aria", "AdaptiveVLM"):
        assert words in crops.note
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
    with input_error(r"'clip_vision_model' cannot be found; known are llama4, .*AdaptiveVLM"):
        HuggingFaceKnobs(model, None)
