"""RapidOCR behind knobs: scenes, the order of reading, answers, and what configurations share."""

import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers import input_error
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.profiling.measuring.adaptive_model import Request
from knobwise.testbeds.ocr.adapter import PASSES, SIDES, RapidOCRModel, box_features
from knobwise.testbeds.ocr.layout import Line, aspect_of, find_answer, reading_order, shapes
from knobwise.testbeds.ocr.scenes import Scenes, draw_scene

GRID = [
    {"side": side, "boxes": boxes, "passes": passes}
    for side, boxes, passes in itertools.product(SIDES, (2, 7), PASSES)
][::5]
SCENES = Scenes()


@pytest.fixture(scope="module")
def model():
    return RapidOCRModel()


def test_a_scene_depends_on_its_number_alone():
    scene, other, again = map(draw_scene, (5, 6, 5))
    np.testing.assert_equal(again, scene)
    assert not np.array_equal(scene.image, other.image)
    aspects = [aspect_of(draw_scene(row).question) for row in (0, 1, 2, 4)]
    assert aspects == ["title", "beside", "code", "total"]


def test_scenes_are_requests_without_end():
    assert list(itertools.islice(SCENES.ids(), 3)) == ["0", "1", "2"]
    assert [name in SCENES for name in ("123456", "x", 7)] == [True, False, False]
    item = SCENES[2]
    assert SCENES.request("2").question == item.question == "What is the code?"
    assert SCENES.score("2", item.answer.lower()) == 1
    assert SCENES.score("2", "") == 0
    assert np.array_equal(item.picture(), draw_scene(2).image)


def line(box, text, x, y, width=60, height=20):
    return Line(box, text, x, y, width, height)


MENU = [
    line(0, "Green Bakery", 100, 10, 150, 40),
    line(1, "Tea", 30, 60),
    line(2, None, 200, 62),
    line(3, None, 30, 90),
    line(4, "Total: 7.50", 60, 120, 120),
    line(5, "Tel. 212-555-0199", 80, 150, 160),
    line(6, "No. AB-1234", 80, 180, 160),
]


@pytest.mark.parametrize(
    ("question", "answer", "left"),
    [
        ("What does the title say?", "Green Bakery", [2, 3]),
        ("What is the price of Tea?", "2.50", [3]),  # the neighbour alone is read for it
        ("What stands below Tea?", "Soup", [2]),
        ("What is the price of Honey?", "", [2, 3]),
        ("What is the total?", "7.50", [2, 3]),
        ("What is the phone number?", "212-555-0199", [2, 3]),
        ("Which code is given?", "AB-1234", [2, 3]),
    ],
)
def test_answers_from_what_was_read(question, answer, left):
    unread = {2: "2.50", 3: "Soup"}
    assert find_answer(question, MENU, unread.pop) == answer
    assert list(unread) == left
    assert find_answer(question, [], unread.pop) == ""


def test_shapes_and_reading_order():
    boxes = [
        [[0, 0], [10, 0], [10, 5], [0, 5]],
        [[0, 20], [0, 10], [40, 10], [40, 20]],  # on its side
        [[0, 0], [130, 0], [130, 20], [0, 20]],
    ]
    outlines = shapes(np.array(boxes, np.float32))
    np.testing.assert_allclose(outlines[:2], [[5, 2.5, 10, 5, 0], [20, 15, 10, 40, -90]])
    for question, order in {
        "What does the title say?": [1, 2, 0],
        "What is the phone number?": [2, 0, 1],  # 6.5, 2 and 0.25 times as long as tall
        "What is the price of Tea?": [2, 1, 0],
    }.items():
        assert reading_order(question, outlines).tolist() == order


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 12), st.integers(0, 2**32 - 1))
def test_features_have_a_fixed_length_and_are_finite(count, seed):
    rng = np.random.default_rng(seed)
    boxes = rng.uniform(0, 700, (count, 4, 2)).astype(np.float32)
    features = box_features("What is the total?", boxes, rng.uniform(0, 1, count), (720, 960))
    assert (features.shape, features.dtype) == ((57,), np.float32)
    assert np.isfinite(features).all()
    assert features[0] == np.float32(count / 10)


@pytest.mark.parametrize("row", ["0", "4"])  # one stands upside down, one is small
def test_answers_from_shared_steps_are_those_of_straight_runs(model, row):
    request = SCENES.request(row)
    composed = model.answer_all(model.first_stage(request), GRID)
    for configuration, shared in zip(GRID, composed, strict=True):
        stage = model.first_stage(request, features=False)
        (straight,) = model.answer([stage], configuration)
        assert straight.vision_ms <= straight.total_ms
        times = {"total_ms": 0, "prefill_ms": 0, "vision_ms": 0}
        assert replace(shared, **times) == replace(straight, **times)
    best = model.answer([model.first_stage(request)], {"boxes": 10})[0].text
    assert SCENES.score(row, best) == (0.0 if row == "0" else 1.0)


def test_a_step_that_is_reused_counts_once_in_each_answer(model):
    stage = model.first_stage(SCENES.request("4"))
    times = {("pixels",): 1e6, ("detect", SIDES[0]): 1e7}
    results = stage.kept.results
    results |= {step: (results[step][0], ms) for step, ms in times.items()}
    small = {"side": SIDES[0], "boxes": 2}
    answers = model.answer_all(stage, [small, small, small | {"side": 416}])
    assert [round(answer.total_ms, -5) for answer in answers] == [1.1e7, 1.1e7, 1e6]


def test_only_the_side_of_the_first_look_continues_from_it(model):
    stage = model.first_stage(SCENES.request("4"))
    assert set(stage.features) == {"image_features", "language_features"}
    assert stage.unused_ms({"side": SIDES[0]}) == 0
    looked_ms = stage.total_ms - stage.extra_ms
    assert stage.unused_ms({"side": 416}) == stage.unused_ms({}) == looked_ms > 0
    stage.kept.results = {step: (result, 1e7) for step, (result, _) in stage.kept.results.items()}
    assert model.answer([stage], {"side": SIDES[0], "boxes": 2})[0].total_ms > 1e7
    assert model.answer([stage], {"side": 416, "boxes": 2})[0].total_ms < 1e6
    # without features there is no first look
    stage = model.first_stage(SCENES.request("4"), features=False)
    assert (stage.features, stage.total_ms, stage.kept.results) == ({}, 0, {})
    assert stage.unused_ms({"side": 416}) == 0


def test_a_picture_without_text_has_an_empty_answer(model):
    request = replace(SCENES.request("4"), image=np.zeros((200, 300, 3), np.uint8))
    stage = model.first_stage(request)
    assert not stage.features["image_features"].any()
    assert model.answer([stage], {"side": SIDES[0]})[0].text == ""
    with input_error("float64"):
        model.first_stage(Request(np.zeros((200, 300)), "What is the total?"))


def test_without_its_packages_the_model_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with input_error("rapidocr .* pip install"):
        RapidOCRModel()
