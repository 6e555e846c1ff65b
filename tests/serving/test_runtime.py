"""`AdaptiveModel`: what is charged to a budget, batches, threads, the cache and the background."""

import math
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import arrays, input_error, small_table, table_of
from PIL import Image
from replayed import Clock, timed_by, untrained
from torch.utils.data import default_collate

from knobwise.agents import PolicyConfig
from knobwise.agents.deployed.budgets import RequestBudgets
from knobwise.agents.deployed.limits import Limits
from knobwise.agents.training.checkpoint import Loaded
from knobwise.common.errors import InputError
from knobwise.envs.tables.profile_table import Knob
from knobwise.profiling.measuring.adaptive_model import Answer, FirstStage, KnobSupport, Request
from knobwise.serving import AdaptiveModel
from knobwise.serving.first_stages import digest_of_request
from knobwise.serving.knob_policy import KnobPolicy
from knobwise.testbeds.elastic.adapter import ElasticAdaptive, request_of
from knobwise.testbeds.elastic.model import ElasticVLM
from knobwise.testbeds.elastic.scenes import draw_samples
from knobwise.testbeds.elastic.settings import ElasticSize

KNOBS = (Knob("max_crops", (1, 6)), Knob("top_k", (1, 3)), Knob("num_active_blocks", (2, 4)))
GRID = torch.cartesian_prod(*[torch.arange(2)] * 3)


def table_like(accuracy, latency_ms, **blocks):
    """Of the eight configurations of the knobs; without the cells whose latency is NaN."""
    changes = {"knobs": KNOBS, "configurations": GRID, "mask": ~latency_ms.isnan()}
    return table_of(accuracy, latency_ms, blocks, **changes)


TABLE = table_like(torch.zeros(1, 8), torch.ones(1, 8))
REQUESTS = [request_of(scene) for scene in draw_samples(16, seed=4)]


@pytest.fixture(scope="module")
def vlm():
    torch.manual_seed(0)
    size = ElasticSize(
        width=16, heads=2, blocks=4, experts=4, expert_width=8, max_top_k=3, max_crops=6, stride=4
    )
    return ElasticAdaptive(ElasticVLM(size).eval(), "tiny")


class ByFeatures:
    """Any of eight configurations, by a sum of what it sees; notes the times that it was left,
    and expects 3 ms."""

    knobs = KNOBS
    digest = "by features"
    header = {"limit": "budget_ms"}
    unit = "ms"
    configurations = GRID
    feature_sizes = {"image_features": 32, "language_features": 16}
    texts = {}
    budgets = RequestBudgets()
    columns = ()
    limits = Limits({}, None)

    def __init__(self):
        self.left_ms = []

    def configuration(self, index):
        return TABLE.configuration(index)

    def settled(self, limit, drift):
        return self

    def limits_note(self, features, limits):
        return ""

    def is_unlike(self, features):
        return False

    def fall_back(self, limit, drift, limits, mask):
        return None

    def choose(self, features, limit):
        seen = np.concatenate(list(features.values())).astype(np.float64).sum()
        return int(seen * 1e3 // 1) % 8

    def decide_expected(self, features, limit, drift, limits=None, mask=None):
        if drift is not None:
            limit *= math.exp(-drift[0].mean())
        self.left_ms.append(limit)
        return self.choose(features, limit), math.log(3), 0.05


class Slow(ByFeatures):
    """A decision takes 2 ms longer than the next, by a clock; the first takes 20 ms, the tenth and
    later ones 2."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def choose(self, features, limit):
        self.clock.go_on(max(0.002, 0.022 - 0.002 * len(self.left_ms)))
        return 0


class ByLimit(ByFeatures):
    """The largest configuration where there are 5 ms left, else the smallest."""

    def choose(self, features, limit):
        return 7 if limit >= 5 else 0


class Noting:
    """An adaptive model that notes what it was asked to do.

    Args:
        takes_s: how long a first stage, and setting the knobs, take by its clock.
        answer_ms: how long an answer takes by the model's own account.
        uncounted_ms: how much of the time it says that nobody is to pay for.
        stage: what is different about its first stages.
    """

    name = "noting"
    knobs = tuple(KnobSupport(knob.name, knob.values[-1], 0, 9) for knob in KNOBS)

    def __init__(self, takes_s=(0.0, 0.001), answer_ms=3.0, uncounted_ms=0.0, **stage):
        self.takes_s, self.answer_ms, self.stage = takes_s, answer_ms, stage
        self.uncounted_ms = uncounted_ms
        self.clock = Clock()
        self.running = []
        self.groups = []

    @contextmanager
    def set_knobs(self, configuration):
        assert not self.running, "knobs were set twice at once"
        self.running.append(dict(configuration))
        try:
            yield
        finally:
            self.running.pop()

    def first_stage(self, request, features=True):
        self.clock.go_on(self.takes_s[0])
        if not features:
            return FirstStage(request, {}, None, total_ms=1.0, extra_ms=0.0)
        blocks = {"image_features": np.zeros(32, np.float32)}
        times = {"total_ms": 2.0, "extra_ms": 1.0}
        return FirstStage(request, blocks, None, **times | self.stage)

    def answer(self, stages, configuration):
        with self.set_knobs(configuration):
            questions = [stage.request.question for stage in stages]
            self.groups.append((dict(configuration), questions))
            self.clock.go_on(self.takes_s[1])
            times = self.answer_ms, 2.0, 1.0
            more = {"uncounted_ms": self.uncounted_ms}
            return [Answer(f"to {a}", *times, 1, 1, 1, **more) for a in questions]


def adaptive(model, controller, **options):
    """A controller in front of a `Noting` model, timed by the model's clock."""
    return timed_by(model.clock, AdaptiveModel(model, controller, **options))


def by_limit(model, **options):
    return adaptive(model, ByLimit(), **options)


def requests_of(*questions):
    return [Request(torch.zeros(1), question) for question in questions]


@pytest.mark.parametrize("together", [False, True])
def test_a_first_look_is_charged_where_the_answer_does_not_continue_from_it(together):
    # a first look of 1 ms beside 1 ms of pooling
    model = by_limit(Noting(reused_by=lambda configuration: configuration["max_crops"] == 1))
    seen = []
    model.tracker.update = lambda choice, mean, spread, ms: seen.append((choice, ms))
    requests, budgets = requests_of("a", "b"), [4.9, 900.0]
    if together:
        small, large = model.generate(requests, budgets)
    else:
        small, large = map(model.answer, requests, budgets)
    assert (small.configuration["max_crops"], large.configuration["max_crops"]) == (1, 6)
    assert seen == [(0, 3.0), (7, 4.0)]
    for result, added in ((small, 1.0), (large, 2.0)):
        assert result.overhead_ms >= added
        assert result.total_ms == pytest.approx(result.overhead_ms + 3.0)


def test_a_batch_is_answered_in_groups_the_most_urgent_first_and_put_back_in_order():
    model = by_limit(Noting())
    results = model.generate(requests_of("a", "b", "c", "d"), [20.0, 5.5, 30.0, 4.0])
    small, large = map(TABLE.configuration, (0, 7))
    assert model.model.groups == [(small, ["d", "b"]), (large, ["a", "c"])]
    assert [result.answer.text for result in results] == ["to a", "to b", "to c", "to d"]
    assert [result.choice for result in results] == [7, 0, 7, 0]


def test_what_a_decision_costs_is_charged_to_the_budget():
    noting = Noting()
    controller = Slow(noting.clock)
    model = adaptive(noting, controller)
    first, second, late = (model.answer(requests_of("a")[0], ms) for ms in (50.0, 50.0, 3.5))
    # the features first; before the first decision none was measured yet
    assert first.limit_ms == pytest.approx(49.0)
    assert first.decision_us == pytest.approx(20e3, abs=10)
    assert first.overhead_ms == pytest.approx(21.0, abs=0.1)
    assert first.total_ms == pytest.approx(first.overhead_ms + 3.0)
    assert first.met
    assert second.limit_ms == pytest.approx(50.0 - first.overhead_ms)
    assert controller.left_ms == pytest.approx([r.limit_ms for r in (first, second, late)])
    # a budget that is spent before the decision is still decided under
    assert 0 < late.limit_ms < 1e-6
    assert not late.met


def test_the_model_is_charged_for_nothing_that_the_controller_took():
    # 500 and 1 ms pass, of which it says that the answer took 3
    noting = Noting((0.5, 0.001))
    model = by_limit(noting)
    result = model.answer(requests_of("a")[0], 60_000.0)
    assert result.overhead_ms == pytest.approx(500 + 1 - 3, abs=0.1)
    assert result.total_ms == pytest.approx(result.overhead_ms + 3.0)
    later = model.answer(requests_of("b")[0], 60_000.0)
    assert later.limit_ms == pytest.approx(60_000 - result.overhead_ms)
    arrived = model.answer(requests_of("c")[0], 60_000.0, noting.clock.now)
    assert arrived.waited_ms == pytest.approx(0, abs=0.1)  # not a second time
    assert arrived.limit_ms == pytest.approx(60_000 - 500, abs=2)


@pytest.mark.parametrize(
    ("together", "waits_ms", "added_ms"), [(1, 4990.0, 7.0), (2, 2490.0, 13.0)]
)
def test_waits_of_a_model_for_a_rate_limit_are_no_cost_of_deciding(together, waits_ms, added_ms):
    # 5 s pass; an answer takes 3 ms beside its waits, and its features 1
    noting = Noting((0.0, 5.0), uncounted_ms=waits_ms)
    model = by_limit(noting)
    requests = requests_of("a", "b")[:together]
    for result in model.generate(requests, 60_000.0):
        assert result.overhead_ms == pytest.approx(added_ms, abs=0.1)
        assert result.total_ms == pytest.approx(added_ms + 3, abs=0.1)
    # later budgets lose none of it
    later = model.answer(requests_of("c")[0], 60_000.0)
    assert later.limit_ms == pytest.approx(60_000 - added_ms, abs=0.1)
    # but who has come and waits is answered no sooner
    arrived = model.generate(requests, 60_000.0, [noting.clock.now] * together)
    assert [result.total_ms for result in arrived] == pytest.approx([5000] * together, abs=0.1)


def test_a_fall_back_needs_no_features_and_does_not_pay_for_them():
    class FallingBack(ByLimit):
        """To the smallest configuration below 10 ms."""

        def fall_back(self, limit, drift, limits, mask):
            return (0, math.log(3), 0.05) if limit < 10 else None

    model = adaptive(Noting(), FallingBack())
    (request,) = requests_of("a")
    # 1 ms for features, which only a decision by features takes off its budget
    cheap = model.answer(request, 9.0)
    dear = model.answer(request, 90.0)
    assert (cheap.choice, dear.choice) == (0, 7)
    assert (cheap.limit_ms, dear.limit_ms) == pytest.approx((9.0, 89.0))
    assert model.answer(request, 9.0).overhead_ms < 1.0 < dear.overhead_ms


def test_waiting_counts_from_the_arrival_on():
    noting = Noting()
    model = by_limit(noting)
    now = noting.clock.now
    waited, fresh = model.generate(requests_of("a", "b"), 60_000.0, arrived=[now - 59, now])
    assert waited.waited_ms == pytest.approx(59_000, abs=3)
    assert waited.limit_ms == pytest.approx(999, abs=0.1)
    assert fresh.limit_ms == pytest.approx(59_999, abs=0.1)
    assert waited.total_ms == pytest.approx(waited.waited_ms + waited.overhead_ms + 3.0)
    assert model.generate(requests_of("c"), 10.0)[0].waited_ms == 0


def test_calibration_finds_the_ratio_of_two_machines():
    noting = Noting()
    samples = dict(enumerate(requests_of(*"abcdef")))
    # of a machine that is four times as slow as the one in `Noting`
    latency_ms = torch.full((6, 8), 12.0)
    latency_ms[0, 0] = torch.nan
    table = table_like(latency_ms * 0, latency_ms)
    model = by_limit(noting)
    assert model.calibrate(table, samples, cells=5, warm_up=2) == pytest.approx(0.25)
    assert model.tracker.factors()["level"] == pytest.approx(0.25)
    assert [len(questions) for _, questions in noting.groups] == [1] * 7
    # it is slow at first
    times = iter([100.0] * 5 + [3.0] * 5)
    answer = noting.answer
    noting.answer = lambda *given: [replace(a, total_ms=next(times)) for a in answer(*given)]
    again = by_limit(noting)
    assert again.calibrate(table, samples, cells=5, warm_up=5) == pytest.approx(0.25)
    for wrong in ((table, {}), (small_table(20), samples)):
        with input_error("profile"):
            model.calibrate(*wrong)


def test_threads_share_a_model_without_mixing_knobs():
    # this model sees for itself that knobs are set by one thread at a time
    noting = by_limit(Noting())
    with ThreadPoolExecutor(8) as pool:
        groups = pool.map(lambda a: noting.generate(requests_of(a, a), 9.0), "abcdefgh")
    texts = [[result.answer.text for result in group] for group in groups]
    assert texts == [[f"to {a}"] * 2 for a in "abcdefgh"]


@pytest.mark.parametrize("budget", [9, np.float32(9), np.array(9.0), torch.tensor(9.0), [9, 9]])
def test_a_budget_may_be_any_kind_of_number(budget):
    results = by_limit(Noting()).generate(requests_of("a", "b"), budget)
    assert [result.budget_ms for result in results] == [9.0, 9.0]


def test_the_median_of_the_latest_decisions_is_charged():
    noting = Noting()
    model = adaptive(noting, Slow(noting.clock))
    took_us = [model.answer(request, 50.0).decision_us for request in requests_of(*"abcdefg")]
    assert model.runtime.decided.decision_ms * 1e3 == pytest.approx(statistics.median(took_us))
    # the first is the longest; the median is neither the mean nor the most
    assert model.runtime.decided.decision_ms * 1e3 == pytest.approx(14e3, abs=10)
    took_us += [model.answer(request, 50.0).decision_us for request in requests_of(*["h"] * 121)]
    assert model.runtime.decided.decision_ms * 1e3 == pytest.approx(statistics.median(took_us[64:]))


def test_a_batch_is_charged_for_knobs_and_for_waiting_but_not_for_its_first_stages_twice():
    noting = Noting((0.4, 0.02), 402.0, total_ms=400.0)
    model = by_limit(noting)
    arrived = [noting.clock.now] * 2
    for result in model.generate(requests_of("a", "b"), 60_000.0, arrived):
        # 20 ms for knobs, of which each answer counts 2, and 1 ms for features
        assert result.overhead_ms == pytest.approx(20 - 2 * 2, abs=1.1)
        # 1 ms for features, and the first stage of the other request, but not its own
        assert result.limit_ms == pytest.approx(60_000 - 1 - 400, abs=0.1)


def test_each_request_gets_what_the_controller_decides_for_it_in_every_form(vlm):
    stages = [vlm.first_stage(request) for request in REQUESTS]
    accuracy, latency = torch.rand(2, len(REQUESTS), 8)
    latency = (1 + GRID.sum(1)) * (1 + latency)
    blocks = default_collate([stage.features for stage in stages])
    table = table_like(accuracy.round(), latency, **blocks)
    agent = untrained(table, PolicyConfig(hidden=8, layers=1))
    for form in (agent, agent.decider, KnobPolicy(Loaded(agent, "t", "", {}))):
        results = AdaptiveModel(vlm, form).generate(REQUESTS, latency.mean(1).tolist())
        choices = [result.choice for result in results]
        limits = [result.limit_ms for result in results]
        assert choices == agent.choose(arrays(table), limits).tolist()
        assert len(set(choices)) > 1
        for stage, result in zip(stages, results, strict=True):
            assert result.configuration == table.configuration(result.choice)
            (answer,) = vlm.answer([stage], result.configuration)
            assert result.answer.text == answer.text
    assert tuple(vlm.configuration.values()) == vlm.model.full


def test_a_controller_whose_knobs_the_model_cannot_set_is_refused(vlm):
    table = table_of([[1.0]], [[2.0]], knobs=(Knob("top_k", (4,)),))
    with input_error("top_k=4"):
        AdaptiveModel(vlm, untrained(table))


def test_wrong_budgets_and_arrivals_are_refused():
    model = adaptive(Noting(), ByFeatures())
    for wrong in ([[1.0]], [1.0, [0.0]]):
        with input_error("2 requests"):
            model.generate(REQUESTS[:2], *wrong)
    for budget in (0.0, -1.0, 1e31, math.nan, math.inf):
        for requests in (REQUESTS[:1], REQUESTS[:2]):
            with input_error("budget"):
                model.generate(requests, budget)
    assert model.generate([], 1.0) == []


# -- first stages: the cache --------------------------------------------------------------------------


def counts(recent):
    summary = recent.summary()
    return summary["hits"], summary["misses"]


def test_equal_requests_share_features_and_decisions(vlm):
    """And get the same answers, see `test_k14_…` of the contract."""
    controller = ByFeatures()
    model = timed_by(Clock(), AdaptiveModel(vlm, controller, tracker=False, cache=3))
    copies = [Request(request.image.clone(), request.question.clone()) for request in REQUESTS[:3]]
    for request in (*REQUESTS[:3], *copies):
        model.answer(request, 9e6)
    assert len(controller.left_ms) == 3
    for recent in (model.cached_features, model.cached_decisions):
        assert counts(recent) == (3, 3)
        assert recent.summary()["miss_us"] > 0
    model.answer(REQUESTS[0], 8e6)  # another budget
    assert len(controller.left_ms) == 4
    assert counts(model.cached_features) == (4, 3)


def test_the_least_recently_used_leaves_first(vlm):
    model = AdaptiveModel(vlm, ByFeatures(), cache=2)
    for place in (0, 1, 0, 2, 0, 1):  # the last has left for 2
        model.answer(REQUESTS[place], 50.0)
    assert counts(model.cached_features) == (2, 4)
    assert len(model.cached_features) == 2


def test_a_decision_is_made_anew_when_what_it_followed_from_has_changed():
    controller = ByFeatures()
    model = adaptive(Noting(), controller, cache=4)
    (request,) = requests_of("a")
    asked = request, 9e3
    for _ in range(3):  # the tracker learns from each answer
        model.answer(*asked)
    assert (len(controller.left_ms), counts(model.cached_features)) == (3, (2, 1))
    noting = Noting()
    still = adaptive(noting, controller, tracker=False, cache=4)
    still.answer(*asked)
    still.answer(*asked)
    assert len(controller.left_ms) == 4
    still.tracker.warm_start([0] * 20, [0.3] * 20)
    still.answer(*asked)
    controller.digest = "a new controller"
    still.answer(*asked)
    still.answer(*asked, noting.clock.now - 0.5)  # 8.5 s are left instead of 9 s
    assert len(controller.left_ms) == 7


def test_kept_features_cost_less_than_those_that_are_computed():
    model = by_limit(Noting(total_ms=21.0, extra_ms=20.0), tracker=False, cache=4)
    first, again = (model.answer(requests_of("a")[0], 90.0) for _ in range(2))
    assert first.overhead_ms == pytest.approx(20, abs=0.1)
    assert again.overhead_ms < 0.1
    assert first.limit_ms == pytest.approx(70, abs=0.1)
    assert again.limit_ms == pytest.approx(90, abs=0.1)
    # the kept features serve batches too
    kept, computed = model.generate(requests_of("a", "b"), 90.0)
    assert kept.overhead_ms + 15 < computed.overhead_ms


def test_content_tells_requests_apart():
    def content(image, question="a"):
        return digest_of_request(Request(image, question))

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


# -- first stages in the background -----------------------------------------------------------------------------


WAIT_S = 60
"""The most time that a thread waits for another."""


class Stepping(Noting):
    """Its first stages say that they take 30 ms. Answers of the first request wait for the stage of
    another, if both may run at once. Fails on request."""

    def __init__(self, overlaps):
        super().__init__((0.0, 0.0), total_ms=30.0)
        self.first_stage_overlaps, self.beside = overlaps, False
        self.answers, self.staged, self.prefetched = (threading.Event() for _ in range(3))

    def first_stage(self, request, features=True):
        if request.question != "a":
            self.beside |= bool(self.running)
            self.staged.set()
        if request.question == "no picture":
            raise InputError("no picture")
        return super().first_stage(request, features)

    def answer(self, stages, configuration):
        if stages[0].request.question == "a":
            with self.set_knobs(configuration):
                self.answers.set()
                assert self.prefetched.wait(WAIT_S)
                assert not self.first_stage_overlaps or self.staged.wait(WAIT_S)
        return super().answer(stages, configuration)


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_stage_is_prepared_beside_an_answer_only_if_the_model_allows_it(overlaps):
    noting = Stepping(overlaps)
    first, second = requests_of("a", "b")
    with by_limit(noting, tracker=False) as model:
        answering = threading.Thread(target=model.answer, args=(first, 900.0))
        answering.start()
        assert noting.answers.wait(WAIT_S)
        model.prefetch(second)
        noting.prefetched.set()
        answering.join()
        assert noting.staged.wait(WAIT_S)
        result = model.answer(second, 900.0)
    assert noting.beside == overlaps
    assert result.prepared_ms == pytest.approx(30, abs=0.1)
    assert result.total_ms == pytest.approx(result.overhead_ms + 3 - result.prepared_ms)
    assert result.answer.text == "to b"


def test_a_mistake_in_the_background_is_raised_by_the_answer_and_close_ends_the_thread():
    noting = Stepping(True)
    model = by_limit(noting)
    noting.prefetched.set()
    wrong, right = requests_of("no picture", "a")
    with model:
        model.prefetch(wrong)
        assert noting.staged.wait(WAIT_S)
        with input_error("no picture"):
            model.answer(wrong, 90.0)
        assert model.answer(right, 90.0).prepared_ms == 0
    with pytest.raises(RuntimeError, match="shutdown"):
        model.prefetch(right)
    with input_error("clock=wall"):
        by_limit(Noting(), clock="cpu").prefetch(right)
