import threading
import time

import pytest
import torch
from helpers import input_error
from PIL import Image
from test_runtime import REQUESTS, ByFeatures, Noting, by_limit, requests_of, vlm

from knobwise.agents import AdaptiveModel
from knobwise.agents.serving.first_stages import content_of
from knobwise.common.errors import InputError
from knobwise.profiling.measuring.adaptive_model import Request

__all__ = ["vlm"]


class Counting(ByFeatures):
    """Counts its decisions."""

    decisions = 0

    def decide_expected(self, features, limit, drift):
        self.decisions += 1
        return super().decide_expected(features, limit, drift)


def counts(recent):
    summary = recent.summary()
    return summary["hits"], summary["misses"]


# -- the cache -------------------------------------------------------------------------------------


def test_equal_requests_share_features_and_decisions(vlm):
    """And get the same answers, see `test_k14_…` of the contract."""
    controller = Counting()
    model = AdaptiveModel(vlm, controller, tracker=False, cache=3)
    copies = [Request(request.image.clone(), request.question.clone()) for request in REQUESTS[:3]]
    for request in (*REQUESTS[:3], *copies):
        model.answer(request, 9e3)
    assert controller.decisions == 3
    for recent in (model.cached_features, model.cached_decisions):
        assert counts(recent) == (3, 3)
        assert 0 < recent.summary()["miss_us"] < 1e5
    model.answer(REQUESTS[0], 8e3)  # another budget
    assert controller.decisions == 4
    assert counts(model.cached_features) == (4, 3)


def test_the_least_recently_used_leaves_first(vlm):
    model = AdaptiveModel(vlm, ByFeatures(), cache=2)
    for place in (0, 1, 0, 2, 0, 1):  # the last has left for 2
        model.answer(REQUESTS[place], 50.0)
    assert counts(model.cached_features) == (2, 4)
    assert len(model.cached_features) == 2


def test_a_decision_is_made_anew_when_what_it_followed_from_has_changed():
    controller = Counting()
    model = AdaptiveModel(Noting(), controller, cache=4)
    (request,) = requests_of("a")
    asked = request, 9e3
    for _ in range(3):  # the tracker learns from each answer
        model.answer(*asked)
    assert (controller.decisions, counts(model.cached_features)) == (3, (2, 1))
    still = AdaptiveModel(Noting(), controller, tracker=False, cache=4)
    still.answer(*asked)
    still.answer(*asked)
    assert controller.decisions == 4
    still.tracker.warm_start([0] * 20, [0.3] * 20)
    still.answer(*asked)
    controller.digest = "a new controller"
    still.answer(*asked)
    still.answer(*asked, time.perf_counter() - 0.5)  # 8.5 s are left instead of 9 s
    assert controller.decisions == 7


def test_kept_features_cost_less_than_those_that_are_computed():
    model = by_limit(Noting(total_ms=21.0, extra_ms=20.0), tracker=False, cache=4)
    first, again = (model.answer(requests_of("a")[0], 90.0) for _ in range(2))
    assert first.overhead_ms > 20
    assert again.overhead_ms < 20
    assert first.limit_ms < 70 < again.limit_ms
    # the kept features serve batches too
    kept, computed = model.generate(requests_of("a", "b"), 90.0)
    assert kept.overhead_ms + 15 < computed.overhead_ms


def test_content_tells_requests_apart():
    def content(image, question="a"):
        return content_of(Request(image, question))

    gray = Image.new("L", (2, 2), 7)
    zeros = torch.zeros(2, 3)
    images = zeros, zeros.T, zeros.long(), gray, gray.convert("RGB"), Image.new("L", (2, 2), 8)
    assert len({content(zeros, "b"), *map(content, images)}) == 7
    assert content(gray.copy()) == content(gray)
    assert content(zeros.numpy()) == content(zeros)
    with input_error("cache"):
        content(lambda: 0)
    with input_error("cache"):
        by_limit(Noting(), cache=-1)


# -- in the background -----------------------------------------------------------------------------


class Stepping(Noting):
    """Notes when first stages begin and end; they take 30 ms. Fails on request."""

    def __init__(self, overlaps):
        super().__init__((0.03, 0.06), total_ms=30.0)
        self.first_stage_overlaps, self.beside = overlaps, False

    def first_stage(self, request, features=True):
        if request.question == "no picture":
            raise InputError("no picture")
        stage = super().first_stage(request, features)
        self.beside |= bool(self.running)
        return stage


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_stage_is_prepared_beside_an_answer_only_if_the_model_allows_it(overlaps):
    noting = Stepping(overlaps)
    first, second = requests_of("a", "b")
    with by_limit(noting, tracker=False) as model:
        answering = threading.Thread(target=model.answer, args=(first, 900.0))
        answering.start()
        while not noting.running:
            time.sleep(0.001)
        model.prefetch(second)
        answering.join()
        time.sleep(0.05)
        result = model.answer(second, 900.0)
    assert noting.beside == overlaps
    assert result.prepared_ms == pytest.approx(30, abs=20)
    assert result.total_ms == pytest.approx(result.overhead_ms + 3 - result.prepared_ms)
    assert result.answer.text == "to b"


def test_a_mistake_in_the_background_is_raised_by_the_answer_and_close_ends_the_thread():
    model = by_limit(Stepping(True))
    wrong, right = requests_of("no picture", "a")
    with model:
        model.prefetch(wrong)
        time.sleep(0.01)
        with input_error("no picture"):
            model.answer(wrong, 90.0)
        assert model.answer(right, 90.0).prepared_ms == 0
    with pytest.raises(RuntimeError, match="shutdown"):
        model.prefetch(right)
    with input_error("clock=wall"):
        by_limit(Noting(), clock="cpu").prefetch(right)
