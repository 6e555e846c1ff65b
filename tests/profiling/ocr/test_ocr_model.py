"""RapidOCR behind knobs: scenes, the order of reading, answers, and what configurations share."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.common.errors import InputError
from knobwise.profiling.measuring.adaptive_model import Request
from knobwise.profiling.measuring.settings import VLMProfileConfig
from knobwise.profiling.models import load_model
from knobwise.profiling.ocr.adapter import FIRST_SIDE, RapidOCRModel, Work, box_features
from knobwise.profiling.ocr.layout import Line, aspect_of, find_answer, reading_order, shapes
from knobwise.profiling.ocr.scenes import Scenes
from knobwise.profiling.ocr.settings import PASSES, SIDES

GRID = [
    {"side": side, "boxes": boxes, "passes": passes}
    for side, boxes, passes in itertools.product(SIDES, (2, 7), PASSES)
]


@pytest.fixture(scope="module")
def model() -> RapidOCRModel:
    return RapidOCRModel()


def test_a_scene_depends_on_its_number_alone() -> None:
    first, other = Scenes(), Scenes()
    assert other[8].kind  # whatever was drawn before
    scene, again = first[5], other[5]
    assert np.array_equal(scene.image, again.image)
    assert (scene.question, scene.answer) == (again.question, again.answer)
    assert not np.array_equal(scene.image, first[6].image)
    assert [aspect_of(first[row].question) for row in (0, 1, 2, 4)] == [
        "title",
        "beside",
        "code",
        "total",
    ]


def test_scenes_are_requests_without_end() -> None:
    scenes = Scenes()
    assert list(itertools.islice(scenes.ids(), 3)) == ["0", "1", "2"]
    assert "123456" in scenes
    assert "x" not in scenes
    assert 7 not in scenes
    answer = scenes[2].answer
    assert scenes.request("2").question == "What is the code?"
    assert scenes.score("2", answer) == Scenes().score("2", answer.lower()) == 1
    assert scenes.score("2", "") == 0


def line(
    number: int, text: str | None, x: float, y: float, width: float = 60, height: float = 20
) -> Line:
    return Line(number, text, x, y, width, height)


MENU = [
    line(0, "Green Bakery", 100, 10, 150, 40),
    line(1, "Tea", 30, 60),
    line(2, None, 200, 62),
    line(3, None, 30, 90),
    line(4, "Total: 7.50", 60, 120, 120),
    line(5, "Tel. 212-555-0199", 80, 150, 160),
    line(6, "No. AB-1234", 80, 180, 160),
]
UNREAD = {2: "2.50", 3: "Soup"}


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What does the title say?", "Green Bakery"),
        ("What is the price of Tea?", "2.50"),
        ("What stands below Tea?", "Soup"),
        ("What is the price of Honey?", ""),
        ("What is the total?", "7.50"),
        ("What is the phone number?", "212-555-0199"),
        ("Which code is given?", "AB-1234"),
    ],
)
def test_answers_from_what_was_read_and_the_neighbour_that_is_read_for_it(
    question: str, answer: str
) -> None:
    assert find_answer(question, MENU, UNREAD.__getitem__) == answer
    assert find_answer(question, [], UNREAD.__getitem__) == ""


def test_the_neighbour_alone_is_read_too() -> None:
    unread = dict(UNREAD)
    find_answer("What is the total?", MENU, unread.pop)
    assert unread == UNREAD
    find_answer("What stands below Tea?", MENU, unread.pop)
    assert list(unread) == [2]


def test_shapes_and_reading_order() -> None:
    boxes = np.array(
        [
            [[0, 0], [10, 0], [10, 5], [0, 5]],
            [[0, 20], [0, 10], [40, 10], [40, 20]],  # on its side
            [[0, 0], [130, 0], [130, 20], [0, 20]],
        ],
        np.float32,
    )
    placed = shapes(boxes)
    np.testing.assert_allclose(placed[:2], [[5, 2.5, 10, 5, 0], [20, 15, 10, 40, -90]])
    assert reading_order("What does the title say?", placed).tolist() == [1, 2, 0]
    assert reading_order("What is the phone number?", placed)[0] == 2  # 6.5 times as long as tall
    assert reading_order("What is the price of Tea?", placed).tolist() == [2, 1, 0]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 12), st.integers(0, 2**32 - 1))
def test_features_have_a_fixed_length_and_are_finite(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    boxes = rng.uniform(0, 700, (count, 4, 2)).astype(np.float32)
    features = box_features("What is the total?", boxes, rng.uniform(0, 1, count), (720, 960))
    assert features.shape == (57,)
    assert features.dtype == np.float32
    assert np.isfinite(features).all()
    assert features[0] == np.float32(count / 10)


@pytest.mark.parametrize("row", ["0", "4"])  # one stands upside down, one is small
def test_answers_composed_from_shared_steps_are_those_of_straight_runs(
    model: RapidOCRModel, row: str
) -> None:
    scenes = Scenes()
    stage = model.first_stage(scenes.request(row))
    for setting in GRID[::5]:
        with model.set_knobs(setting):
            composed = model.answer_from(stage.kept)
        (straight,) = model.answer(
            [model.first_stage(scenes.request(row), features=False)], setting
        )
        assert composed.text == straight.text
        assert (composed.vision_tokens, composed.language_tokens) == (
            straight.vision_tokens,
            straight.language_tokens,
        )
        assert straight.vision_ms <= straight.total_ms
    best = model.answer([stage], {"boxes": 10})[0].text
    assert scenes.score(row, best) == (0.0 if row == "0" else 1.0)


def test_a_step_that_is_reused_counts_once_in_each_answer(model: RapidOCRModel) -> None:
    stage = model.first_stage(Scenes().request("4"))
    work: Work = stage.kept
    work.results = {
        key: (result, 1e6 if key == ("pixels",) else 1e7)
        for key, (result, _) in work.results.items()
    }
    with model.set_knobs({"side": FIRST_SIDE, "boxes": 2}):
        assert round(model.answer_from(work).total_ms, -5) == 1.1e7
        assert round(model.answer_from(work).total_ms, -5) == 1.1e7
    with model.set_knobs({"side": 416, "boxes": 2}):
        assert round(model.answer_from(work).total_ms, -5) == 1e6


def test_only_the_side_of_the_first_look_continues_from_it(model: RapidOCRModel) -> None:
    stage = model.first_stage(Scenes().request("4"))
    assert set(stage.features) == {"image_features", "language_features"}
    assert stage.unused_ms({"side": FIRST_SIDE}) == 0
    assert (
        stage.unused_ms({"side": 416}) == stage.unused_ms({}) == stage.total_ms - stage.extra_ms > 0
    )
    stage.kept.results = {key: (result, 1e7) for key, (result, _) in stage.kept.results.items()}
    assert model.answer([stage], {"side": FIRST_SIDE, "boxes": 2})[0].total_ms > 1e7
    assert model.answer([stage], {"side": 416, "boxes": 2})[0].total_ms < 1e6


def test_without_features_there_is_no_first_look(model: RapidOCRModel) -> None:
    stage = model.first_stage(Scenes().request("4"), features=False)
    assert (stage.features, stage.total_ms, stage.kept.results) == ({}, 0, {})
    assert stage.unused_ms({"side": 416}) == 0


def test_a_picture_without_text_has_an_empty_answer(model: RapidOCRModel) -> None:
    request = replace(Scenes().request("4"), image=np.zeros((200, 300, 3), np.uint8))
    stage = model.first_stage(request)
    assert not stage.features["image_features"].any()
    assert model.answer([stage], {"side": FIRST_SIDE})[0].text == ""
    with pytest.raises(InputError, match="image: float64 of shape"):
        model.first_stage(Request(np.zeros((200, 300)), "What is the total?"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"side": 300}, "side=300: this model takes 288, 416, 576"),
        ({"boxes": 0}, "boxes=0: this model takes 1 to 100"),
        ({"passes": "third"}, "passes=third: this model takes plain, classify, second"),
        ({"top_k": 2}, "unknown knob 'top_k'"),
    ],
)
def test_values_that_a_knob_does_not_take_are_refused(
    model: RapidOCRModel, setting: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message), model.set_knobs(setting):
        pass


def test_without_its_packages_the_model_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(
        InputError, match=r"^model=ocr: rapidocr is not installed; pip install 'knobwise\[ocr\]'$"
    ):
        load_model("ocr", None, VLMProfileConfig())
