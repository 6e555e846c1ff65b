from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from knobwise.common.errors import InputError
from knobwise.envs.readers.builtin import builtin_profile
from knobwise.profiling.elastic.adapter import ElasticAdaptive, as_image, as_prompt, question_of, request_of
from knobwise.profiling.elastic.model import ElasticVLM
from knobwise.profiling.elastic.scenes import END, WORDS, draw_samples, to_words
from knobwise.profiling.elastic.settings import Configuration, ElasticSize
from knobwise.profiling.measuring.adaptive_model import KNOBS, Request

SCENES = draw_samples(12, seed=1)


@pytest.fixture(scope="module")
def shipped():
    return ElasticAdaptive()


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    size = ElasticSize(width=16, heads=2, blocks=4, experts=4, expert_width=8, max_top_k=3, max_crops=6)
    return ElasticAdaptive(ElasticVLM(size).eval(), "tiny")


def straight(vlm, scene, configuration):
    request = request_of(scene)
    run = vlm.model.generate(request.image, request.question, Configuration(**configuration))
    return [WORDS[token] for token in run.tokens if token != END]


def test_it_has_the_knobs_of_its_size(tiny):
    assert [(k.name, k.least, k.most) for k in tiny.knobs] == [*zip(KNOBS, (1, 1, 2), (6, 3, 4), strict=True)]
    assert [k.default for k in tiny.knobs] == [6, 3, 4]


@pytest.mark.parametrize("configuration", [(1, 1, 2), (3, 2, 3), (6, 3, 4)])
def test_going_on_from_the_first_stage_answers_as_going_straight_through(tiny, configuration):
    setting = Configuration(*configuration)._asdict()
    stages = [tiny.first_stage(request_of(scene)) for scene in SCENES]
    answers = tiny.answer(stages, setting)
    assert [a.text.split() for a in answers] == [straight(tiny, scene, setting) for scene in SCENES]
    again = tiny.answer(stages, setting)  # what a first stage keeps is not used up
    assert [a.text for a in again] == [a.text for a in answers]


def test_tokens_embedded_after_an_overview_are_those_embedded_at_once(tiny):
    for request in map(request_of, SCENES):
        with torch.inference_mode():
            at_once = tiny.model.prefix(request.image, request.question, 4)
            in_two = tiny.model.prefix(request.image, request.question, 4, tiny.model.overview(request.image))
        assert torch.equal(at_once, in_two)


def test_features_and_accuracy_are_those_of_the_built_in_profile(shipped):
    table = builtin_profile()
    agree = []
    for i, scene in enumerate(SCENES):
        stage = shipped.first_stage(request_of(scene))
        for name, block in stage.features.items():
            assert block.dtype == np.float32
            # another processor may round the last bit of a half otherwise
            assert np.allclose(block, table.features[name][i], atol=2e-3, rtol=2e-3)
        for c in range(i % 9, table.num_configurations, 9):
            text = shipped.answer([stage], table.configuration(c))[0].text
            agree.append((text.split() == to_words(scene.answers[0])) == bool(table.accuracy[i, c]))
    assert np.mean(agree) > 0.95


def test_an_answer_says_what_it_cost(tiny):
    stage = tiny.first_stage(request_of(SCENES[0]))
    assert 0 < stage.extra_ms < stage.total_ms
    (answer,) = tiny.answer([stage], {"max_crops": 2, "top_k": 1, "num_active_blocks": 2})
    assert stage.total_ms - stage.extra_ms < answer.vision_ms < answer.prefill_ms <= answer.total_ms
    rows, columns = (side // 8 for side in SCENES[0].images.shape[2:])
    assert answer.vision_tokens == 10 + 9 * (1 if max(rows, columns) <= 2 else 2)
    assert answer.language_tokens == 6
    assert 1 <= answer.output_tokens <= 9
    assert answer.extra["cpu_ms"] > 0
    # a first stage that was kept costs nothing, and a fresh one all that it took
    long = replace(stage, total_ms=1000.0, extra_ms=1.0, kept=(*stage.kept[:3], 1e6))
    (fresh,), (kept,) = (tiny.answer([one], {}) for one in (long, replace(long, total_ms=1.0)))
    for took in (fresh.total_ms, fresh.prefill_ms, fresh.vision_ms):
        assert 999 < took < 1999
    assert fresh.extra["cpu_ms"] >= 1e6
    assert kept.total_ms < 999
    assert kept.extra["cpu_ms"] < 1e6


def test_pixels_of_another_type_are_answered_alike(tiny):
    request = request_of(SCENES[0])
    first, other = (tiny.first_stage(r) for r in (request, Request(request.image.double(), request.question)))
    assert all(np.array_equal(first.features[name], block) for name, block in other.features.items())
    assert tiny.answer([first], {})[0].text == tiny.answer([other], {})[0].text


def test_knobs_are_restored_whatever_happens(tiny):
    assert tiny.configuration == (6, 3, 4)
    with tiny.set_knobs({"top_k": 1}):
        assert tiny.configuration == (6, 1, 4)  # what is not named has its default
        with pytest.raises(ZeroDivisionError), tiny.set_knobs({"num_active_blocks": 2}):
            assert 1 / (tiny.configuration.num_active_blocks - 2)
        assert tiny.configuration == (6, 1, 4)
    assert tiny.configuration == (6, 3, 4)
    (answer,) = tiny.answer([tiny.first_stage(request_of(SCENES[1]))], {})
    assert answer.text.split() == straight(tiny, SCENES[1], tiny.model.full._asdict())


@pytest.mark.parametrize("wrong", [{"top_k": 4}, {"max_crops": 0}, {"depth": 2}])
def test_values_that_cannot_be_set_are_refused(tiny, wrong):
    with pytest.raises(InputError, match=next(iter(wrong))), tiny.set_knobs(wrong):
        pass
    assert tiny.configuration == tiny.model.full


def test_pictures_and_words_are_understood(shipped):
    agree = []
    for scene in SCENES:
        picture = Image.fromarray((scene.images[0].transpose(1, 2, 0) * 255).round().astype(np.uint8))
        words = question_of(scene)
        assert torch.equal(as_prompt(words), torch.from_numpy(scene.prompts))
        assert torch.equal(as_prompt(scene.prompts), torch.from_numpy(scene.prompts))
        assert torch.allclose(as_image(picture), as_image(scene.images), atol=0.5 / 255 + 1e-6)
        given = [shipped.first_stage(r) for r in (Request(picture, words), request_of(scene))]
        first, second = shipped.answer(given, {})
        agree.append(first.text == second.text)
    assert np.mean(agree) > 0.8  # 256 shades each way may turn a close call


@pytest.mark.parametrize(
    ("image", "question", "message"),
    [
        (torch.zeros(1, 3, 20, 16), "digit? r0 c0", "sides of 16 to 64"),
        (np.zeros((1, 1, 16, 16), np.float32), "digit? r0 c0", r"\[1, 3, h, w\]"),
        ("cat.jpg", "digit? r0 c0", "str; a PIL image"),
        (torch.zeros(1, 3, 16, 16), "what is this", "unknown word 'what'"),
        (torch.zeros(1, 3, 16, 16), "", "1 to 5 words"),
        (torch.zeros(1, 3, 16, 16), torch.zeros(1, 5, dtype=torch.int64), r"int64 \[1, 6\]"),
        (torch.zeros(1, 3, 16, 16), 1.5, r"int64 \[1, 6\]"),
    ],
)
def test_what_the_model_cannot_take_is_refused(tiny, image, question, message):
    with pytest.raises(InputError, match=message):
        tiny.first_stage(Request(image, question))
