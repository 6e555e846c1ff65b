"""The tracker of drifting latencies: its formulae by hand, what it follows and what it
withstands."""

import itertools
import json
import logging
import math

import numpy as np
import pytest
from helpers import arrays, input_error, small_table
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed import Clock, ReplayedModel, serve_requests, small_stack, timed_by

from knobwise.agents.deployed.arrays import configurations_of
from knobwise.agents.learning.logged import read_log
from knobwise.common.words import setting
from knobwise.envs import default_budgets
from knobwise.profiling.measuring.adaptive_model import Request
from knobwise.serving import AdaptiveModel
from knobwise.serving.tracker import (
    CLIP,
    CLIPPED_SQUARE,
    FIRST_SPREAD,
    MAX_OFFSET,
    SHIFT_AFTER,
    SPREAD_GAIN,
    VALUE_SPREAD,
    WANDER,
    LatencyTracker,
)

GRID = [{"a": a, "b": b, "c": c} for a in (1, 2) for b in (1, 2, 3) for c in (5, 6)]
SLOW = np.array([values["b"] == 3 for values in GRID])
SPREAD = 0.05


def offsets_of(tracker):
    return tracker.drift[0]


def follow(tracker, residuals, seed=0, slow_b3=0.0):
    """Let a tracker see these residuals of ln ms, at random configurations of the grid, of which
    those with b = 3 take longer."""
    chosen = np.random.default_rng(seed).integers(len(GRID), size=len(residuals)).tolist()
    for c, residual in zip(chosen, residuals, strict=True):
        tracker.update(c, 1.0, SPREAD, math.exp(1.0 + residual + slow_b3 * SLOW[c]))


def followed(residuals):
    tracker = LatencyTracker(GRID)
    follow(tracker, residuals)
    return tracker


def noise(n, seed=1):
    return SPREAD * np.random.default_rng(seed).normal(size=n)


# -- the formulae ----------------------------------------------------------------------------------


def test_a_level_alone_is_updated_as_by_hand():
    tracker = LatencyTracker([{}, {}])  # no knob that differs: the scalar filter
    assert tracker.drift is None
    level = 0.0
    variance = FIRST_SPREAD**2
    square = 1.0
    for residual in (0.3, 0.28, 0.9):  # the last is clipped
        tracker.update(0, 2.0, 0.1, math.exp(2.0 + residual))
        variance += WANDER**2
        total = variance + square * 0.1**2
        z = min(max((residual - level) / math.sqrt(total), -CLIP), CLIP)
        level += variance / math.sqrt(total) * z
        variance -= variance**2 / total
        square *= 1 + SPREAD_GAIN * (z * z / CLIPPED_SQUARE - 1)
        np.testing.assert_allclose(offsets_of(tracker), level)
        assert tracker.factors()["spread"] == pytest.approx(math.sqrt(square))
    assert z == CLIP
    assert tracker.answers == 3


def test_the_first_answer_is_shared_between_level_and_values_by_their_variances():
    tracker = LatencyTracker([{"a": 1}, {"a": 2}])
    tracker.update(1, 0.0, 0.1, math.exp(0.2))
    level = FIRST_SPREAD**2 + WANDER**2
    value = VALUE_SPREAD**2
    step = 0.2 / (level + value + 0.01)
    np.testing.assert_allclose(offsets_of(tracker), [level * step, (level + value) * step])
    assert tracker.names == ["level", "a=1", "a=2"]


def test_the_constant_is_the_mean_of_a_clipped_square():
    draws = np.random.default_rng(0).normal(size=2_000_000)
    assert np.minimum(draws**2, CLIP**2).mean() == pytest.approx(CLIPPED_SQUARE, abs=2e-3)


# -- what it follows -------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.4, 1 / 1.4, 5.0])
def test_a_shift_of_the_level_is_followed_within_some_dozens_of_answers(factor):
    tracker = followed(noise(300))
    assert tracker.level == pytest.approx(0, abs=0.03)
    follow(tracker, math.log(factor) + noise(36, 3), seed=2)
    assert tracker.level == pytest.approx(math.log(factor), abs=0.07)


@pytest.mark.parametrize(
    ("scale", "spread", "tolerance"), [(1, 1, 0.2), (2, 2, 0.4), (0, 0.25, 0), (40, 3, 0)]
)
def test_the_spread_is_followed_and_bounded(scale, spread, tolerance):
    found = followed(scale * noise(400)).factors()["spread"]
    assert found == pytest.approx(spread, abs=tolerance)


def test_a_knob_value_that_is_slower_gets_an_offset_that_fades_without_it():
    tracker = LatencyTracker(GRID)
    jitter = 0.1 + noise(3000)
    follow(tracker, jitter[:1500], slow_b3=0.15)
    offset = offsets_of(tracker)
    assert offset[SLOW].mean() - offset[~SLOW].mean() == pytest.approx(0.15, abs=0.03)
    assert tracker.factors()["b=3"] > 1.05 > tracker.factors()["b=1"]
    assert offset[SLOW].std() < 0.02  # a and c make no difference
    follow(tracker, jitter[1500:], seed=1)
    offset = offsets_of(tracker)
    assert abs(offset[SLOW].mean() - offset[~SLOW].mean()) < 0.03


# -- what it withstands ----------------------------------------------------------------------------


def test_one_stall_does_no_harm_and_a_burst_no_lasting_one():
    steady, stalled = (followed(np.append(noise(300), last)) for last in ([0.0], [math.log(50)]))
    assert abs(stalled.level - steady.level) < 0.02
    burst = np.concatenate([noise(300), np.full(SHIFT_AFTER + 2, math.log(20)), noise(30, 5)])
    assert followed(burst).level == pytest.approx(0, abs=0.05)


def test_times_that_are_none_are_counted_and_logged_once(caplog):
    tracker = followed(noise(10))
    before = tracker.state()
    times = [(1.0, SPREAD, wrong) for wrong in (math.nan, 0.0, -1.0, math.inf, -math.inf)]
    for wrong in (*times, (math.nan, SPREAD, 1.0), (1.0, math.nan, 1.0)):
        tracker.update(0, *wrong)
    assert sum(tracker.ignored.values()) == 7
    assert tracker.state() == before | {"ignored": tracker.ignored}
    assert len(caplog.text.splitlines()) == 1


times = st.one_of(
    st.floats(),
    st.sampled_from([0.0, -1.0, math.nan, math.inf, 1e-300, 1e300]),
    st.floats(0.1, 10.0),
)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, len(GRID) - 1), times, st.floats(0.0, 5.0)), max_size=200))
def test_whatever_is_measured_the_state_stays_finite_and_the_offsets_bounded(cells):
    tracker = LatencyTracker(GRID)
    logging.disable(logging.WARNING)
    for configuration, measured, spread in cells:
        tracker.update(configuration, 1.0, spread, measured)
    logging.disable(logging.NOTSET)
    assert tracker.answers + sum(tracker.ignored.values()) == len(cells)
    offset, scale = tracker.drift or (np.zeros(1), 1.0)
    assert (np.abs(offset) <= 3 * MAX_OFFSET).all()
    assert 0.25 <= scale <= 3.0
    LatencyTracker(GRID).restore(json.loads(json.dumps(tracker.state())))  # which checks the rest


# -- its state -------------------------------------------------------------------------------------


def test_a_state_goes_through_json_and_on_as_before():
    tracker = followed(noise(50) + 0.3)
    other = LatencyTracker(GRID)
    other.restore(json.loads(json.dumps(tracker.state())))
    for _ in range(2):
        assert other.state() == tracker.state()
        np.testing.assert_array_equal(offsets_of(other), offsets_of(tracker))
        tracker.update(3, 1.0, SPREAD, 4.0)
        other.update(3, 1.0, SPREAD, 4.0)
    fresh = LatencyTracker(GRID)
    fresh.restore(LatencyTracker(GRID).state())
    assert fresh.drift is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("controller", "another"),
        ("names", ["level"]),
        ("format", "x"),
        ("mean", [0.0]),
        ("mean", [math.nan] * 8),
        ("variance", [-1.0] * 8),
        ("scale", math.nan),
        ("ignored", 3),
        ("answers", None),
    ],
)
def test_states_of_others_are_refused(name, value):
    tracker = LatencyTracker(GRID)
    with input_error("tracker"):
        tracker.restore(followed(noise(20)).state() | {name: value})
    assert tracker.drift is None


def test_timed_cells_start_it_at_their_median_and_learn_values():
    rng = np.random.default_rng(0)
    cells = rng.integers(len(GRID), size=200)
    ratios = math.log(3) + 0.2 * SLOW[cells] + 0.02 * rng.normal(size=200)
    ratios[:4] = [math.log(90), math.nan, math.inf, -math.inf]
    tracker = followed(noise(30) - 1)
    tracker.warm_start(cells.tolist(), ratios.tolist())
    np.testing.assert_allclose(offsets_of(tracker), math.log(3) + 0.2 * SLOW, atol=0.04)
    assert tracker.factors()["spread"] == 1
    tracker.warm_start([], [])
    assert tracker.drift is None


# -- in front of a model ---------------------------------------------------------------------------


class Failing(ReplayedModel):
    """A model that is slower by a factor, and fails at 0."""

    factor = 1.0

    def __init__(self):
        super().__init__(small_table(200), lambda values: self.factor)

    def answer(self, stages, configuration):
        if self.factor == 0:
            raise RuntimeError("out of memory")
        return super().answer(stages, configuration)


def test_a_model_that_slows_down_is_followed_and_one_that_is_not_tracked_is_not():
    agent, table = small_stack()
    slower = Failing()
    model = timed_by(Clock(), AdaptiveModel(slower, agent))
    frozen = timed_by(Clock(), AdaptiveModel(slower, agent, tracker=False))
    assert model.answer(Request(0, ""), 6.0).drift is None
    slower.factor = 1.5
    assert serve_requests(frozen, table, 40)[-1].drift is None
    assert frozen.tracker.drift is None
    serve_requests(model, table, 40)
    assert model.tracker.factors()["level"] == pytest.approx(1.5, rel=0.1)
    # another goes on with its tracker; a batch is decided under one drift
    drift = model.tracker.drift
    again = timed_by(Clock(), AdaptiveModel(slower, agent, tracker=model.tracker))
    batch = again.generate([Request(row, "") for row in range(16)], 20.0)
    assert all(result.drift is drift for result in batch)
    assert again.tracker.answers == 57
    for row, result in enumerate(batch):
        seen = arrays(table, row), result.limit_ms, drift
        assert model.controller.decide_index(*seen) == result.choice


def test_answers_that_fail_are_counted_and_the_stream_goes_on(caplog, tmp_path):
    """Those that take no time too, see `test_real_servers.py`."""
    agent, _ = small_stack()
    failing = Failing()
    model = timed_by(Clock(), AdaptiveModel(failing, agent, log=tmp_path))
    asked = Request(0, ""), 600.0
    failing.factor = 0.0
    for _ in range(2):
        with pytest.raises(RuntimeError, match="memory"):
            model.answer(*asked)
    failing.factor = 1.0
    answered = model.answer(*asked)
    assert answered.met
    log = read_log(tmp_path, model.controller)
    assert (len(log.rows), log.aside) == (1, {"without an answer": 2})
    assert log.attempts == {setting(answered.configuration): {True: 2, False: 1}}
    assert [*model.tracker.ignored.values()] == [2]
    assert model.tracker.answers == 1
    assert len(caplog.records) == 1
    model.runtime.now = itertools.count(9.0, -1.0).__next__  # a clock that goes back
    assert model.answer(*asked).limit_ms <= 600.0
    assert model.runtime.decided.decision_ms >= 0


def test_following_the_drift_pays_and_costs_little_without():
    """Against a controller that knows the drift, and one that allows for none."""
    agent, table = small_stack(300)
    controller = agent.decider
    rng = np.random.default_rng(0)
    rows = rng.integers(300, size=1000).tolist()
    budgets = rng.choice(default_budgets(table).tolist(), 1000).tolist()

    def utility(factor, drift, tracks=False):
        tracker = LatencyTracker(configurations_of(table))
        utility = 0.0
        for row, budget in zip(rows, budgets, strict=True):
            drift = tracker.drift if tracks else drift
            expected = controller.decide_expected(arrays(table, row), budget, drift)
            took_ms = factor * float(table.latency_ms[row, expected[0]])
            utility += float(table.accuracy[row, expected[0]]) * (took_ms <= budget) / len(rows)
            tracker.update(*expected, took_ms)
        return utility

    for factor in (1.0, 1.4, 0.7):
        known = utility(factor, (math.log(factor), 1.0))
        assert utility(factor, None, tracks=True) > known - 0.03
        if factor > 1:
            assert known - 0.03 > utility(factor, None)
