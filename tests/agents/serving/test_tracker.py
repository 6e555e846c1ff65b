"""The tracker of drifting latencies: its formulae by hand, what it follows and what it
withstands."""

from __future__ import annotations

import itertools
import json
import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import small_table
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed import small_stack, untrained

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.judging.baselines import static_of
from knobwise.agents.policy.controller import NumpyController
from knobwise.agents.serving.adaptive_model import AdaptiveModel
from knobwise.agents.serving.tracker import (
    CLIP,
    CLIPPED_SQUARE,
    FIRST_SPREAD,
    MOST_OFFSET,
    SHIFT_AFTER,
    SPREAD_GAIN,
    VALUE_SPREAD,
    WANDER,
    LatencyTracker,
    TrackedStatic,
)
from knobwise.agents.stack.deployed import DeployedController
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.profiling.elastic.adapter import ElasticAdaptive, request_of
from knobwise.profiling.elastic.model import ElasticVLM
from knobwise.profiling.elastic.scenes import draw_samples
from knobwise.profiling.elastic.settings import ElasticSize
from knobwise.profiling.measuring.adaptive_model import Answer, Request

GRID = [
    dict(zip("abc", values, strict=True)) for values in itertools.product((1, 2), (1, 2, 3), (5, 6))
]
SPREAD = 0.05


def level_of(tracker: LatencyTracker) -> float:
    return math.log(tracker.factors()["level"])


def followed(residuals: Any, seed: int = 0) -> LatencyTracker:
    """A tracker that has seen these residuals of ln ms, at random configurations of the grid."""
    tracker, rng = LatencyTracker(GRID), np.random.default_rng(seed)
    for residual in residuals:
        tracker.update(int(rng.integers(len(GRID))), 1.0, SPREAD, math.exp(1.0 + residual))
    return tracker


def noise(n: int, seed: int = 1) -> Any:
    return SPREAD * np.random.default_rng(seed).normal(size=n)


# -- the formulae ----------------------------------------------------------------------------------


def test_a_level_alone_is_updated_as_by_hand() -> None:
    tracker = LatencyTracker([{}, {}])  # no knob that differs: the scalar filter
    assert tracker.drift is None
    level, variance, square = 0.0, FIRST_SPREAD**2, 1.0
    for residual in (0.3, 0.28, 0.9):  # the last is clipped
        tracker.update(0, 2.0, 0.1, math.exp(2.0 + residual))
        noise = square * 0.1**2
        variance += WANDER**2
        total = variance + noise
        z = (residual - level) / math.sqrt(total)
        z = min(max(z, -CLIP), CLIP)
        level += variance / math.sqrt(total) * z
        variance -= variance**2 / total
        square *= 1 + SPREAD_GAIN * (z * z / CLIPPED_SQUARE - 1)
        assert tracker.drift is not None
        np.testing.assert_allclose(tracker.drift[0], level)
        assert tracker.drift[1] == pytest.approx(math.sqrt(square))
    assert z == CLIP
    assert tracker.answers == 3


def test_the_first_answer_is_shared_between_level_and_values_by_their_variances() -> None:
    tracker = LatencyTracker([{"a": 1}, {"a": 2}])
    tracker.update(1, 0.0, 0.1, math.exp(0.2))
    noise = 0.01
    level, value = FIRST_SPREAD**2 + WANDER**2, VALUE_SPREAD**2
    step = 0.2 / (level + value + noise)
    assert tracker.drift is not None
    np.testing.assert_allclose(tracker.drift[0], [level * step, (level + value) * step])
    assert tracker.names == ["level", "a=1", "a=2"]


def test_the_constant_is_the_mean_of_a_clipped_square() -> None:
    draws = np.random.default_rng(0).normal(size=2_000_000)
    assert np.minimum(draws**2, CLIP**2).mean() == pytest.approx(CLIPPED_SQUARE, abs=2e-3)


# -- what it follows -------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.4, 1 / 1.4, 5.0])
def test_a_shift_of_the_level_is_followed_within_some_dozens_of_answers(factor: float) -> None:
    steady = followed(noise(300))
    assert level_of(steady) == pytest.approx(0, abs=0.03)
    rng = np.random.default_rng(2)
    for residual in math.log(factor) + noise(36, 3):
        steady.update(int(rng.integers(len(GRID))), 1.0, SPREAD, math.exp(1.0 + residual))
    assert level_of(steady) == pytest.approx(math.log(factor), abs=0.07)


def test_the_spread_is_followed_and_bounded() -> None:
    assert followed(noise(400)).factors()["spread"] == pytest.approx(1, abs=0.2)
    assert followed(2 * noise(400)).factors()["spread"] == pytest.approx(2, abs=0.4)
    assert followed(0 * noise(400)).factors()["spread"] == 0.25
    assert followed(40 * noise(400)).factors()["spread"] == 3.0


def test_a_knob_value_that_is_slower_gets_an_offset_that_fades_without_it() -> None:
    tracker, rng, jitter = LatencyTracker(GRID), np.random.default_rng(0), noise(3000)
    for residual in jitter[:1500]:
        place = int(rng.integers(len(GRID)))
        tracker.update(
            place, 1.0, SPREAD, math.exp(1.1 + residual + 0.15 * (GRID[place]["b"] == 3))
        )
    offset, _ = tracker.drift or (np.zeros(0), 0.0)
    slow = np.array([values["b"] == 3 for values in GRID])
    assert offset[slow].mean() - offset[~slow].mean() == pytest.approx(0.15, abs=0.03)
    assert tracker.factors()["b=3"] > 1.05 > tracker.factors()["b=1"]
    assert offset[slow].std() < 0.02  # a and c make no difference
    for residual in jitter[1500:]:
        place = int(rng.integers(len(GRID)))
        tracker.update(place, 1.0, SPREAD, math.exp(1.1 + residual))
    offset, _ = tracker.drift or (np.zeros(0), 0.0)
    assert abs(offset[slow].mean() - offset[~slow].mean()) < 0.03


# -- what it withstands ----------------------------------------------------------------------------


def test_one_stall_does_no_harm_and_a_burst_no_lasting_one() -> None:
    steady, stalled = (followed(np.append(noise(300), last)) for last in ([0.0], [math.log(50)]))
    assert abs(level_of(stalled) - level_of(steady)) < 0.02
    burst = np.concatenate([noise(300), np.full(SHIFT_AFTER + 2, math.log(20)), noise(30, 5)])
    assert level_of(followed(burst)) == pytest.approx(0, abs=0.05)


def test_times_that_are_none_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    tracker = followed(noise(10))
    before = tracker.state()
    for measured in (math.nan, 0.0, -1.0, math.inf, -math.inf):
        tracker.update(0, 1.0, SPREAD, measured)
    tracker.update(0, math.nan, SPREAD, 1.0)
    tracker.update(0, 1.0, math.nan, 1.0)
    assert sum(tracker.ignored.values()) == 7
    assert tracker.state() == before | {"ignored": tracker.ignored}
    assert len(caplog.records) == 1
    assert len(caplog.text.splitlines()) == 1


times = st.one_of(
    st.floats(),
    st.sampled_from([0.0, -1.0, math.nan, math.inf, 1e-300, 1e300]),
    st.floats(0.1, 10.0),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, len(GRID) - 1), times, st.floats(0.0, 5.0)), max_size=200))
def test_whatever_is_measured_the_state_stays_finite_and_the_offsets_bounded(
    cells: list[Any],
) -> None:
    logging.disable(logging.WARNING)
    try:
        tracker = LatencyTracker(GRID)
        for configuration, measured, spread in cells:
            tracker.update(configuration, 1.0, spread, measured)
    finally:
        logging.disable(logging.NOTSET)
    assert tracker.answers + sum(tracker.ignored.values()) == len(cells)
    offset, scale = tracker.drift or (np.zeros(1), 1.0)
    assert (np.abs(offset) <= 3 * MOST_OFFSET).all()
    assert 0.25 <= scale <= 3.0
    LatencyTracker(GRID).restore(json.loads(json.dumps(tracker.state())))  # which checks the rest


# -- its state -------------------------------------------------------------------------------------


def test_a_state_goes_through_json_and_on_as_before() -> None:
    tracker, other = followed(noise(50) + 0.3), LatencyTracker(GRID)
    other.restore(json.loads(json.dumps(tracker.state())))
    assert other.state() == tracker.state()
    for each in (tracker, other):
        each.update(3, 1.0, SPREAD, 4.0)
    assert other.state() == tracker.state()
    np.testing.assert_array_equal(other.drift[0], tracker.drift[0])  # type: ignore[index]
    fresh = LatencyTracker(GRID)
    fresh.restore(LatencyTracker(GRID).state())
    assert fresh.drift is None


def test_states_of_others_are_refused_in_one_line() -> None:
    state = followed(noise(20)).state()
    wrong: list[Any] = [
        state | {"controller": "another"}, state | {"names": ["level"]}, state | {"format": "x"}, {}, None,
        state | {"mean": [0.0]}, state | {"variance": [-1.0] * 8}, state | {"scale": math.nan},
        state | {"mean": [math.nan] * 8}, state | {"mean": "x"}, state | {"ignored": 3},
    ]  # fmt: skip
    for number, each in enumerate(wrong):
        tracker = LatencyTracker(GRID)
        with pytest.raises(
            InputError,
            match="another controller" if number < 2 else "is not the state of a tracker",
        ) as refused:
            tracker.restore(each)
        assert len(str(refused.value).splitlines()) == 1
        assert tracker.drift is None


def test_digests_are_those_of_what_decides(tmp_path: Any) -> None:
    table = small_table(60)
    first = untrained(table)
    first.export(tmp_path / "controller.npz")
    assert NumpyController.load(tmp_path / "controller.npz").digest == first.decider.digest
    assert untrained(table).decider.digest == first.decider.digest
    others = (
        untrained(table, by=0.31),
        untrained(small_table(59)),
        untrained(table, None, [1.0] * 5),
        untrained(table, None, [1.0, 1.0, 0.97, 1.0, 1.0]),
    )
    digests = {first.decider.digest, *(other.decider.digest for other in others)}
    assert len(digests) == 5


# -- timed cells -----------------------------------------------------------------------------------


def test_timed_cells_start_it_at_their_median_and_learn_values() -> None:
    rng = np.random.default_rng(0)
    places = rng.integers(len(GRID), size=200).tolist()
    ratios = [math.log(3) + 0.2 * (GRID[c]["a"] == 2) + 0.02 * rng.normal() for c in places]
    ratios[:4] = [math.log(90), math.nan, math.inf, -math.inf]
    tracker = followed(noise(30) - 1)
    tracker.warm_start(places, ratios)
    offset, scale = tracker.drift or (np.zeros(0), 0.0)
    slow = np.array([values["a"] == 2 for values in GRID])
    np.testing.assert_allclose(offset[~slow], math.log(3), atol=0.04)
    np.testing.assert_allclose(offset[slow], math.log(3) + 0.2, atol=0.04)
    assert scale == 1
    tracker.warm_start([], [])
    assert tracker.drift is None


# -- static ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table() -> ProfileTable:
    table = small_table(60)
    latency = table.latency_ms.clone()
    latency[1:, 0] = torch.nan  # not profiled in the rows that are fitted on
    latency[3, 1] = torch.nan
    mask = ~latency.isnan()
    return replace(
        table, latency_ms=latency, accuracy=table.accuracy.where(mask, torch.nan), mask=mask
    )


def test_tracked_static_decides_by_the_part_of_a_budget_that_the_level_leaves(
    table: ProfileTable,
) -> None:
    static = static_of(table, torch.arange(1, 60))
    configurations = [table.configuration(c) for c in range(table.num_configurations)]
    tracked = TrackedStatic(static, LatencyTracker(configurations))
    budgets = np.linspace(0.5, 60, 300)
    assert [tracked.decide(budget) for budget in budgets.tolist()] == static.choose(
        {}, budgets
    ).tolist()
    # twice as slow here, and half of the configurations a little more
    tracked.tracker.warm_start(range(12), np.log(2) + 0.02 * (np.arange(12) % 2))
    offset, _ = tracked.tracker.drift or (np.zeros(0), 0.0)
    assert np.ptp(offset) > 0.001
    assert tracked.tracker.level == pytest.approx(offset.mean(), abs=1e-6)
    limits = budgets * math.exp(-tracked.tracker.level)
    assert [tracked.decide(budget) for budget in budgets.tolist()] == static.choose(
        {}, limits
    ).tolist()


def test_static_learns_from_its_own_answers(table: ProfileTable) -> None:
    configurations = [table.configuration(c) for c in range(table.num_configurations)]
    static = static_of(table, torch.arange(1, 60))
    tracked = TrackedStatic(static, LatencyTracker(configurations))
    budget = float(table.latency_ms.nanmedian())
    before = tracked.decide(budget)
    for _ in range(60):
        choice = tracked.decide(budget)
        tracked.update(choice, 3 * math.exp(static.log_latency[choice]))
    assert tracked.tracker.factors()["level"] == pytest.approx(3, rel=0.1)
    assert static.log_latency[tracked.decide(budget)] < static.log_latency[before]


# -- in front of a model ---------------------------------------------------------------------------


class Slower(ElasticAdaptive):
    """The elastic model with the times of a table, times a factor; some answers fail."""

    factor: float = 1.0
    took: float | None = None

    def answer(self, stages: Any, configuration: Any) -> list[Answer]:
        if self.factor == 0:
            raise RuntimeError("out of memory")
        ms = self.factor * math.exp(0.2 * sum(configuration.values()))
        return [replace(a, total_ms=self.took or ms) for a in super().answer(stages, configuration)]


@pytest.fixture(scope="module")
def served() -> tuple[Slower, DeployedController, list[Request]]:
    torch.manual_seed(0)
    size = ElasticSize(
        width=16, heads=2, blocks=4, experts=4, expert_width=8, max_top_k=3, max_crops=6
    )
    vlm = Slower(ElasticVLM(size).eval(), "tiny")
    requests = [request_of(scene) for scene in draw_samples(16, seed=4)]
    table = small_table(16)
    knobs = tuple(
        replace(knob, name=name, values=values)
        for knob, name, values in zip(
            (table.knobs * 3)[:3],
            ("max_crops", "top_k", "num_active_blocks"),
            ((1, 6), (1, 3), (2, 4)),
            strict=True,
        )
    )
    configurations = torch.cartesian_prod(*[torch.arange(2)] * 3)
    sums = torch.tensor(
        [sum(knobs[k].values[i] for k, i in enumerate(row)) for row in configurations.tolist()]
    )
    latency = (0.2 * sums).exp().expand(16, -1).clone()
    stages = [vlm.first_stage(request) for request in requests]
    blocks = {
        name: torch.tensor(np.stack([stage.features[name] for stage in stages]))
        for name in stages[0].features
    }
    mask = torch.ones_like(latency, dtype=torch.bool)
    accuracy = sums.expand(16, -1) / 20
    profile = ProfileTable(
        "timed", knobs, configurations, accuracy, latency, mask, tuple(map(str, range(16))), blocks
    )
    return vlm, untrained(profile, PolicyConfig(hidden=8, layers=1)), requests


def test_a_model_that_slows_down_is_followed_and_one_that_is_not_tracked_is_not(
    served: Any,
) -> None:
    vlm, controller, requests = served
    vlm.factor, vlm.took = 1.0, None
    model, frozen = (AdaptiveModel(vlm, controller, tracker=tracker) for tracker in (True, False))
    first = model.answer(requests[0], 6.0)
    assert first.drift is None
    vlm.factor = 1.5
    for each in (model, frozen):
        results = [each.answer(requests[i % 16], 60.0) for i in range(40)]
    assert frozen.tracker.drift is None
    assert results[-1].drift is None
    assert model.tracker.factors()["level"] == pytest.approx(1.5, rel=0.1)
    batch = model.generate(requests, 60.0)
    assert all(result.drift is batch[0].drift for result in batch)
    assert model.tracker.answers == 57
    limits = [result.limit_ms for result in batch]
    blocks = [vlm.first_stage(request).features for request in requests]
    alone = [
        model.controller.decide_index(*each, batch[0].drift)
        for each in zip(blocks, limits, strict=True)
    ]
    assert [result.choice for result in batch] == alone


def test_answers_that_fail_or_take_no_time_are_counted_and_the_stream_goes_on(
    served: Any, caplog: pytest.LogCaptureFixture
) -> None:
    vlm, controller, requests = served
    vlm.factor, vlm.took = 1.0, None
    model = AdaptiveModel(vlm, controller)
    before = model.answer(requests[0], 600.0)
    for vlm.took in (math.nan, -3.0, math.inf):
        assert model.answer(requests[0], 600.0).choice == before.choice
    vlm.factor, vlm.took = 0.0, None
    for _ in range(2):
        with pytest.raises(RuntimeError, match="memory"):
            model.answer(requests[0], 600.0)
    vlm.factor = 1.0
    after = model.answer(requests[0], 600.0)
    assert after.met
    assert math.isfinite(after.limit_ms)
    assert sorted(model.tracker.ignored.values()) == [2, 3]
    assert model.tracker.answers == 2
    assert len(caplog.records) == 2
    model._now = iter([6.0, 5.0, 4.0, 3.0, 2.0]).__next__  # a clock that goes back
    assert model.answer(requests[0], 600.0).limit_ms <= 600.0
    assert model.decision_us >= 0


def test_a_tracker_goes_on_with_its_controller_only(served: Any) -> None:
    vlm, controller, requests = served
    vlm.factor, vlm.took = 2.0, None
    model = AdaptiveModel(vlm, controller)
    for request in requests:
        model.answer(request, 60.0)
    again = AdaptiveModel(vlm, controller)
    again.tracker.restore(json.loads(json.dumps(model.tracker.state())))
    assert again.answer(requests[0], 6.0).choice == model.answer(requests[0], 6.0).choice
    assert AdaptiveModel(vlm, controller, tracker=model.tracker).tracker is model.tracker
    with pytest.raises(InputError, match="another controller"):
        AdaptiveModel(vlm, controller, tracker=LatencyTracker(model.configurations, "another"))


def test_following_the_drift_pays_and_costs_little_without() -> None:
    """Against a controller that knows the drift, and one that allows for none."""
    agent, table = small_stack(300)
    controller, budgets = agent.decider, default_budgets(table).tolist()
    configurations = [table.configuration(c) for c in range(table.num_configurations)]

    def utility(factor: float, drift: Any, tracker: LatencyTracker | None = None) -> float:
        rng, worth = np.random.default_rng(0), []
        for row, budget in zip(
            rng.integers(300, size=1000).tolist(), rng.choice(budgets, 1000), strict=True
        ):
            features = {name: block[row].numpy() for name, block in table.features.items()}
            expected = controller.decide_expected(
                features, budget, tracker.drift if tracker else drift
            )
            took_ms = factor * float(table.latency_ms[row, expected[0]])
            worth.append(float(table.accuracy[row, expected[0]]) * (took_ms <= budget))
            if tracker:
                tracker.update(*expected, took_ms)
        return float(np.mean(worth))

    for factor in (1.0, 1.4, 0.7):
        known, frozen = (utility(factor, drift) for drift in ((math.log(factor), 1.0), None))
        tracked = utility(factor, None, LatencyTracker(configurations))
        assert tracked > known - 0.03
        if factor > 1:
            assert known - 0.03 > frozen
