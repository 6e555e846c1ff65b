"""Hugging Face models behind the interface of adaptive models, on a tiny random one of every
family, and a language model."""

import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from helpers import close, input_error, needs_gpu
from PIL import Image
from tiny_models import (
    BLOCKS,
    EXPERTS,
    FAMILIES,
    TOP_K,
    picture,
    saved,
    state_of,
    tiny_language_model,
    tiny_model,
    tower_of,
    watched,
)

from knobwise.profiling.huggingface.loading import INSTRUCTION
from knobwise.profiling.huggingface.model import HuggingFaceModel
from knobwise.profiling.measuring.adaptive_model import Request, clocked_by

# raised inside transformers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

GOING_ON = ("llama4", "llava_next", "molmo2")
DENSE = ("smolvlm", "idefics3", "molmo2")


REQUESTS = (
    Request(picture(0), "What is this?"),
    Request(picture(1, 64, 40), "How many red dogs are there?"),
    Request(picture(2, 40, 40), "Why?"),
)


@pytest.fixture(scope="module", params=FAMILIES)
def vlm(request):
    return HuggingFaceModel(*tiny_model(request.param), max_new_tokens=5)


@pytest.fixture(scope="module")
def llava():
    return HuggingFaceModel(*tiny_model("llava_next"), max_new_tokens=5)


def family(vlm):
    return vlm.model.config.model_type


def settings(vlm, more=0):
    """Every knob at its least, or above that."""
    able = [knob for knob in vlm.knobs if knob.available]
    return {knob.name: min(knob.least + more, knob.most) for knob in able}


def without_reuse(stages):
    return [replace(stage, kept=None) for stage in stages]


def texts(answers):
    return [answer.text for answer in answers]


def answered(vlm, request=REQUESTS[0]):
    """The answer to one request by the unchanged model."""
    (answer,) = vlm.answer([vlm.first_stage(request)], {})
    return answer


def test_an_answer_runs_the_blocks_and_experts_that_were_set_on_fewer_crops(vlm):
    stage = vlm.first_stage(Request(picture(0, 160, 256), "Why?"))
    crops = []
    for configuration in (settings(vlm), settings(vlm, 1), {}):
        with watched(vlm.model) as seen:
            (answer,) = vlm.answer([stage], configuration)
        ran = configuration.get("num_active_blocks", BLOCKS)
        assert len(set(seen["blocks"])) == ran
        assert seen["blocks"] == sorted(set(seen["blocks"])) * answer.output_tokens
        # the first block of GLM has no experts
        routed = family(vlm) not in DENSE and ran > (family(vlm) == "glm4v_moe")
        experts = {configuration.get("top_k", TOP_K)} if routed else set()
        assert set().union(*seen["experts"]) == experts
        crops += seen["rows"]
    # every value of it: test_hf_knobs.py
    assert crops == sorted(crops)
    assert crops[0] < crops[2] or family(vlm) == "aria"


@pytest.mark.parametrize("name", ["llava_next", "qwen3_vl_moe", "idefics3", "aria"])
def test_features_are_means_of_the_models_own_first_stage(name):
    vlm = HuggingFaceModel(*tiny_model(name))
    request = REQUESTS[0]
    found = vlm.first_stage(request).features
    with vlm.set_knobs({"max_crops": vlm.knobs[0].least}), torch.no_grad():
        inputs = vlm.inputs([request])
        pixels, options, rows = inputs["pixel_values"], {}, slice(None)
        if name == "llava_next":
            pixels = pixels[0, :1]
        elif name == "idefics3":
            pixels = pixels[0]
        elif name == "aria":  # 40 × 64 leaves the lower of the 5 × 5 patches empty
            shown = torch.arange(5)[None, :, None].expand(1, 5, 5) < 4
            options, rows = {"patch_attention_mask": shown}, slice(20)
        else:
            options = {"grid_thw": inputs["image_grid_thw"]}
        states = tower_of(vlm.model)(pixels, **options).last_hidden_state.flatten(0, -2)[rows]
        letters = f"user: {request.question}\n{INSTRUCTION}<end>\nassistant:"
        words = vlm.model.get_input_embeddings().weight[vlm.tokenizer(letters)["input_ids"]]
    close(states.mean(0), found["image_features"])
    close(words.mean(0), found["language_features"])


def test_features_tell_requests_apart_and_do_not_depend_on_what_was_set_before(vlm):
    one, other = (vlm.first_stage(request).features for request in REQUESTS[:2])
    vlm.answer([vlm.first_stage(REQUESTS[0])], settings(vlm))
    again = vlm.first_stage(REQUESTS[0]).features
    np.testing.assert_equal(again, one)
    for name, values in one.items():
        assert (values.ndim, values.dtype) == (1, np.float32)
        assert np.abs(other[name] - values).max() > 1e-3


def test_going_on_from_the_first_stage_changes_nothing_but_the_work(vlm):
    stages = [vlm.first_stage(request) for request in REQUESTS[:2]]
    goes_on = family(vlm) in GOING_ON
    assert [stage.kept is not None for stage in stages] == [goes_on] * 2
    for configuration, group in itertools.product(({}, settings(vlm, 1)), (stages[:1], stages)):
        with watched(vlm.model) as seen:
            answers = vlm.answer(group, configuration)
        with watched(vlm.model) as afresh:
            wanted = vlm.answer(without_reuse(group), configuration)
        assert texts(answers) == texts(wanted)
        torch.testing.assert_close(seen["logits"], afresh["logits"], rtol=1e-4, atol=1e-4)
        assert seen["rows"] == afresh["rows"]
        assert sum(afresh["computed"]) - sum(seen["computed"]) == len(group) * goes_on
        share = sum(stage.total_ms - stage.extra_ms for stage in group)
        assert (share > 0) == goes_on
        for answer, fresh in zip(answers, wanted, strict=True):
            assert fresh.extra == {"reused_ms": 0}
            assert answer.extra["reused_ms"] == pytest.approx(share)


def test_an_image_asked_about_twice_is_known_once(llava):
    stages = [llava.first_stage(replace(REQUESTS[0], question=text)) for text in ("Why?", "Who?")]
    with watched(llava.model) as seen:
        answers = llava.answer(stages, {})
    assert texts(answers) == texts(llava.answer(without_reuse(stages), {}))
    assert sum(seen["rows"]) - sum(seen["computed"]) == 2


def test_tiles_that_look_like_the_overview_are_computed_all_the_same(llava):
    # else an image of one colour would be measured as faster than it is without a first stage
    stage = llava.first_stage(Request(Image.new("RGB", (64, 64), "white"), "Why?"))
    with watched(llava.model) as seen:
        (answer,) = llava.answer([stage], {})
    assert (seen["rows"], seen["computed"]) == ([5], [4])
    assert [answer.text] == texts(llava.answer(without_reuse([stage]), {}))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "CMYK"])
def test_a_picture_of_any_mode_and_size_is_asked_about_as_in_rgb(llava, mode):
    for size in ((1, 1), (1, 50), (64, 40)):
        image = picture(0, *size).convert(mode)
        found, wanted = (
            answered(llava, Request(shown, "Où est-ce? 🙂"))
            for shown in (image, image.convert("RGB"))
        )
        assert (found.text, found.vision_tokens) == (wanted.text, wanted.vision_tokens)


def test_a_batch_answers_as_one_by_one(vlm):
    stages = [vlm.first_stage(request) for request in REQUESTS]
    for configuration in ({}, settings(vlm)):
        together = vlm.answer(stages, configuration)
        alone = [vlm.answer([stage], configuration)[0] for stage in stages]
        for one, other in zip(together, alone, strict=True):
            times = {"total_ms": 0, "prefill_ms": 0, "vision_ms": 0, "extra": {}}
            assert replace(one, **times) == replace(other, **times)
        assert len({answer.language_tokens for answer in alone}) == 3
    assert vlm.answer([], {}) == []


def test_times_are_in_order(vlm):
    start = vlm._clock()
    stage = vlm.first_stage(REQUESTS[0])
    assert 0 < stage.extra_ms <= stage.total_ms < vlm._clock() - start
    assert (stage.extra_ms < stage.total_ms) == (family(vlm) in GOING_ON)
    start = vlm._clock()
    (answer,) = vlm.answer([stage], {})
    assert 0 < answer.vision_ms < answer.prefill_ms < answer.total_ms
    assert answer.total_ms < vlm._clock() - start + answer.extra["reused_ms"]
    # a first stage that comes from a cache took no time
    (cached,) = vlm.answer([replace(stage, total_ms=0.0, extra_ms=0.0)], {})
    assert (cached.text, cached.extra) == (answer.text, {"reused_ms": 0})


def test_times_hold_what_is_used_again_of_the_first_stage_and_nothing_else_of_it(llava):
    stages = [replace(llava.first_stage(REQUESTS[0]), total_ms=1e8, extra_ms=4e7)]
    (answer,), (fresh,) = (llava.answer(group, {}) for group in (stages, without_reuse(stages)))
    assert 6e7 < answer.vision_ms < answer.total_ms < 6.1e7
    assert fresh.total_ms < 1e6


def test_a_forward_of_the_towers_own_is_restored(llava, monkeypatch):
    tower = tower_of(llava.model)
    # as tools do that spread a model over devices
    monkeypatch.setattr(tower, "forward", own := tower.forward)
    answered(llava)
    assert vars(tower)["forward"] is own


def test_prefill_ends_with_the_first_token_and_vision_with_the_projector(llava, monkeypatch):
    stage, ticks = llava.first_stage(REQUESTS[0]), itertools.count()
    monkeypatch.setattr(llava, "_clock", lambda: float(next(ticks)))
    (answer,) = llava.answer(without_reuse([stage]), {})
    # start 0, prepared 1, tower 2 to 3, projector 4 to 5, first token 6, end 7
    assert (answer.vision_ms, answer.prefill_ms, answer.total_ms) == (1 + 1 + 1, 6, 7)


def test_the_clock_waits_for_every_device_of_the_model(llava, monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    llava._clock()
    assert waited == []
    devices = {torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)}
    monkeypatch.setattr(llava, "_devices", devices)
    llava._clock()
    assert set(waited) == devices - {torch.device("cpu")}
    with clocked_by("cpu"), input_error("clock=cpu"):
        llava._clock()


@needs_gpu
def test_times_cover_the_work_of_a_gpu():
    """Kernels run on after the call that started them: the clock must not be read before they have
    finished."""
    vlm = HuggingFaceModel(*tiny_model("qwen3_vl_moe"), max_new_tokens=3, device="cuda")
    answered(vlm)  # what is loaded at the first call counts nowhere
    matrix, spans = torch.rand(4096, 4096, device="cuda"), []

    def busy(*_):
        spans.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        spans[-1][0].record()
        for _ in range(50):
            torch.mm(matrix, matrix)
        spans[-1][1].record()

    next(tower_of(vlm.model).children()).register_forward_hook(busy)
    stage = vlm.first_stage(REQUESTS[0])
    (answer,) = vlm.answer([stage], {})
    torch.cuda.synchronize()
    in_stage, in_answer = (start.elapsed_time(end) for start, end in spans)
    assert stage.total_ms >= in_stage
    assert in_answer <= answer.vision_ms <= answer.prefill_ms < answer.total_ms


def test_everything_is_restored(vlm):
    # at its first call transformers installs hooks of its own, which stay
    stage = vlm.first_stage(REQUESTS[0])
    inputs, before = vlm.inputs(REQUESTS[:1]), state_of(vlm.model, vlm.processor)
    with torch.no_grad():
        logits = vlm.model(**inputs).logits
    vlm.answer([stage], settings(vlm))
    assert state_of(vlm.model, vlm.processor) == before
    failing = vlm.model.get_output_embeddings().register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        vlm.answer([stage], settings(vlm))
    failing.remove()
    assert state_of(vlm.model, vlm.processor) == before
    with torch.no_grad():
        assert torch.equal(vlm.model(**inputs).logits, logits)


def test_an_answer_ends_with_the_end_of_the_text_the_turn_or_the_line():
    model, processor = tiny_model("llava_next")
    tokenizer = processor.tokenizer
    free = answered(vlm := HuggingFaceModel(model, processor, max_new_tokens=5))
    assert tokenizer.convert_ids_to_tokens(vlm.end_tokens) == ["</s>", "<end>"]
    assert free.output_tokens == len(free.text) == 5
    stop = free.text[2]
    model.generation_config.eos_token_id = [3, tokenizer.convert_tokens_to_ids(stop)]
    stopped = answered(HuggingFaceModel(model, processor, max_new_tokens=5))
    assert stopped.text == free.text[: free.text.index(stop) + 1]
    assert stopped.output_tokens == len(stopped.text)
    processor.chat_template = None
    plain = HuggingFaceModel(tiny_model("llava_next")[0], processor, max_new_tokens=5)
    assert tokenizer.convert_ids_to_tokens(plain.end_tokens) == ["</s>", "Ċ"]
    assert plain._text("Why?") == "<image> Question: Why? Answer:"
    assert answered(plain).language_tokens == len(" Question: What is this? Answer:")


def test_a_model_that_can_reason_is_told_to_answer_at_once(llava):
    model, processor = tiny_model("llava_next")
    processor.chat_template += "{% if not enable_thinking | default(true) %}<s>{% endif %}"
    vlm = HuggingFaceModel(model, processor)
    assert vlm._text("Why?") == f"user: <image>Why?\n{INSTRUCTION}<end>\nassistant:<s>"
    assert llava._text("Why?").endswith("assistant:")
    # a template that writes the token texts begin with gets no second one
    assert llava._token_options("<s>user: ") == {"add_special_tokens": False}
    assert llava._token_options("user: ") == {}


def test_decoding_is_greedy_whatever_the_model_came_with(llava):
    model, processor = tiny_model("llava_next")
    model.generation_config.update(
        do_sample=True,
        temperature=9.0,
        num_beams=4,
        use_cache=False,
        num_return_sequences=2,
        return_dict_in_generate=True,
    )
    vlm = HuggingFaceModel(model, processor, max_new_tokens=5)
    with watched(vlm.model) as seen:
        texts = {answered(vlm).text for _ in range(3)}
    with watched(llava.model) as wanted:
        assert texts == {answered(llava).text}
    assert len(seen["logits"]) == 3 * len(wanted["logits"])


@pytest.mark.parametrize("name", ["llama4", "llava_next", "qwen3_vl_moe", "molmo2"])
def test_half_precision(name):
    model, processor = tiny_model(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vlm = HuggingFaceModel(model.bfloat16(), processor, max_new_tokens=3, device=device)
    stage = vlm.first_stage(REQUESTS[0])
    wanted = HuggingFaceModel(*tiny_model(name)).first_stage(REQUESTS[0])
    for feature, values in wanted.features.items():
        np.testing.assert_allclose(stage.features[feature], values, rtol=0.1, atol=0.1)
    (answer,) = vlm.answer([stage], {})
    assert [answer.text] == texts(vlm.answer(without_reuse([stage]), {}))
    assert (answer.extra["reused_ms"] > 0) == (name in GOING_ON)


def test_what_cannot_be_loaded_is_said(llava, tmp_path, monkeypatch):
    def refused(fault="cannot be loaded"):
        with input_error(fault):
            HuggingFaceModel.load(tmp_path)

    refused()
    saved(tmp_path, llava.model, llava.processor)
    next(tmp_path.glob("*.safetensors")).write_bytes(b"no weights")
    refused()
    transformers.LlamaConfig().save_pretrained(tmp_path)  # another kind of model
    refused()
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused("pip install")


# -- a language model without images -----------------------------------------------------------------


@pytest.fixture(scope="module")
def language():
    return HuggingFaceModel(*tiny_language_model(), max_new_tokens=5)


WHAT, WHY = (Request(None, question) for question in ("What is this?", "Why?"))


def said(model, requests, **configuration):
    stages = [model.first_stage(request, features=False) for request in requests]
    return texts(model.answer(stages, configuration))


def test_knobs_of_a_language_model_are_experts_and_blocks(language):
    crops, top_k, blocks = language.knobs
    assert not crops.available
    assert "image" in crops.note
    assert (top_k.least, top_k.default, top_k.most) == (1, TOP_K, EXPERTS)
    assert (blocks.least, blocks.most) == (1, BLOCKS)
    with input_error("max_crops"):
        said(language, [WHY], max_crops=2)


def test_features_of_a_language_model_are_the_mean_embedding_of_the_prompt(language):
    stage = language.first_stage(WHAT)
    prompt = "Question: What is this?\nAnswer:"
    ids = language.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    wanted = language.model.get_input_embeddings().weight[ids].mean(0)
    assert set(stage.features) == {"language_features"}
    close(wanted, stage.features["language_features"])
    # nothing of it serves the answer
    assert stage.extra_ms == stage.total_ms > 0


def test_answers_of_a_language_model_are_those_of_plain_generation(language):
    prompt = "Question: Why?\nAnswer:"
    inputs = language.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    tokens = language.model.generate(**inputs, max_new_tokens=5, do_sample=False)[0]
    length = inputs["input_ids"].shape[1]
    plain = language.tokenizer.decode(tokens[length:], skip_special_tokens=True)
    answer = answered(language, WHY)
    assert answer.text == plain.strip().partition("\n")[0].rstrip()
    assert (answer.vision_tokens, answer.language_tokens) == (0, length)
    assert 0 <= answer.vision_ms <= answer.prefill_ms <= answer.total_ms


def test_a_language_model_answers_a_batch_as_one_request_after_the_other(language):
    for configuration in ({}, {"top_k": 1, "num_active_blocks": 2}):
        alone = [
            text for request in (WHAT, WHY) for text in said(language, [request], **configuration)
        ]
        assert said(language, [WHAT, WHY], **configuration) == alone


def test_a_block_that_is_left_out_does_not_count(language):
    left_out, _ = tiny_language_model()
    active = language.knobs_of_model.active_blocks(3)
    left_out.model.layers = torch.nn.ModuleList(left_out.model.layers[i] for i in active)
    left_out.config.num_hidden_layers = 3
    for i, block in enumerate(left_out.model.layers):
        block.self_attn.layer_idx = i
    smaller = HuggingFaceModel(left_out, language.processor, max_new_tokens=5)
    requests = [WHAT, WHY]
    assert said(language, requests, num_active_blocks=3) == said(smaller, requests)


@pytest.mark.parametrize(
    ("name", "image", "question", "needed"),
    [
        ("llava", "a.png", "Why?", "PIL image and a text"),
        ("llava", picture(0), 3, "PIL image and a text"),
        ("language", None, 3, "needs a text"),
    ],
)
def test_what_is_no_picture_or_no_text_is_said(request, name, image, question, needed):
    with input_error(needed):
        request.getfixturevalue(name).first_stage(Request(image, question))
