"""What decides where a share on time is promised, by hand and for many requests as for one."""

import math

import numpy as np
import pytest
import torch
from helpers import arrays, identical, small_table
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed import untrained

from knobwise.agents.calibration.latencies import fit_latency_model
from knobwise.agents.deployed.controller import NumpyController
from knobwise.agents.deployed.promise import POLICY, LatencyModel, Promise, Promised
from knobwise.agents.deployed.text import BITS
from knobwise.agents.evaluation.baselines import fit_static
from knobwise.serving.proxy.promises import CAUSES, PromiseWindow, fewest_kept

SAMPLES = 60
TABLE = small_table(SAMPLES)


def row(budget_ms, configuration, probability=0.0, kept=True):
    return {
        "budget_ms": budget_ms,
        "planned_ms": 0.98 * budget_ms,
        "promise": 0.95,
        "kept": kept,
        "configuration": configuration,
        "probability": probability,
    }


def promised(*rows, texts=None, ranges=None):
    """A controller with these rules, whose latencies depend on its features."""
    agent = untrained(TABLE)
    everyone = torch.arange(SAMPLES)
    calibration = agent.calibration
    calibration.latency = fit_latency_model(TABLE, everyone, agent.controller.normaliser)
    calibration.static = fit_static(TABLE, everyone).arrays()
    calibration.promise = list(rows)
    calibration.texts = texts or {}
    calibration.ranges = ranges or {}
    return NumpyController(agent.arrays())


RULES = row(10.0, 3, kept=False), row(14.0, POLICY, 0.9), row(20.0, 5), row(30.0, POLICY)


def test_each_budget_has_its_rule_and_what_is_between_that_of_the_next_smaller():
    light = promised(*RULES)
    request = {name: block[0] for name, block in arrays(TABLE).items()}
    promise = light.promise
    # 9.8 ms are enough for the first, and below nothing is promised
    safest = promise.safest(9.7)
    share = light.static.on_time(9.7)
    assert share[safest] == share.max()
    assert light.decide_index(request, 9.7) == safest
    assert [light.decide_index(request, ms) for ms in (9.81, 10.0)] == [3, 3]
    # nothing is promised at 10 ms, and more is left
    share = light.static.on_time(13.7)
    assert share[3] < share.max() == share[light.decide_index(request, 13.7)]
    assert [light.decide_index(request, ms) for ms in (19.61, 29.3)] == [5, 5]
    assert light.promised(9.7) == Promised(0.0, 0.0)
    assert light.promised(9.81) == Promised(10.0, 0.0)
    assert light.promised(20.0) == Promised(20.0, 0.95)
    # slower by a half it is as if there were 20 ms of 30
    slower = math.log(1.5), 1.0
    assert light.promised(30.0, slower) == Promised(20.0, 0.95)
    assert light.decide_index(request, 30.0, slower) == 5
    limits = np.array([9.7, 9.81, 13.72, 13.73, 20.0, 300.0])
    assert light.reads_features(limits).tolist() == [False, False, True, True, False, True]
    # where the policy decides, it plans with what was promised for, whatever more there is
    identical(
        light.choose(arrays(TABLE), np.full(SAMPLES, 300.0)),
        light.choose(arrays(TABLE), np.full(SAMPLES, 29.4)),
    )


def test_nothing_is_promised_at_a_whole_budget_below_that_of_the_rule():
    """Of 14 ms 13.72 are planned with: enough to decide by that rule if so much is left, but of a
    whole budget a decision takes some."""
    light = promised(*RULES)
    budgets = np.array([9.7, 10.0, 13.72, np.float32(14.0 - 1e-6), 14.0, 19.7, 20.0, 29.9, 300.0])
    shares = light.promise.shares_at(budgets)
    assert shares.tolist() == [0, 0, 0, 0.95, 0.95, 0, 0.95, 0, 0.95]
    assert light.promised(13.72).share == 0.95


def test_a_policy_takes_the_best_of_what_it_expects_in_time_by_hand():
    model = LatencyModel(
        {
            "bias": np.log([4.0, 8.0, 16.0]).astype(np.float32),
            "spread": np.array([0.1, 0.5, 0.1], np.float32),
            "weight": np.array([[1.0, 0.0, 0.0]], np.float32),
        }
    )
    x = np.array([[0.0], [1.0]], np.float32)
    # e·4 ms are above 10 ms; at two spreads so are 8·e ms
    assert model.within(x, 10.0, 0.0).tolist() == [[True, True, False], [False, True, False]]
    assert model.within(x, 10.0, 2.0).tolist() == [[True, False, False], [True, False, False]]
    # where nothing is expected in time the one that is nearest to that: ln(10.87/1) < ln(8e)
    assert model.within(x, 1.0, 0.0).tolist() == [[True, False, False], [False, True, False]]
    mask = np.array([False, False, True])
    assert model.within(x, 10.0, 0.0, mask).tolist() == [[False, False, True]] * 2
    assert model.within(x, 10.0, -np.inf, mask).tolist() == [[False, False, True]] * 2
    # the mean offset, .5, is in the limit already: the others are faster than that, 16/√e < 10
    drift = np.array([0.0, 1.5, 0.0], np.float32), 2.0
    assert model.within(x[:1], 10.0, 0.0, None, drift).tolist() == [[True, False, True]]
    # twice as uncertain: 4·e^(−.5 + 2·.1·2) and 9.7·e^.4
    assert model.within(x[:1], 10.0, 2.0, None, drift).tolist() == [[True, False, False]]
    for index in range(3):
        fits = model.fits(index, x[0], 10.0, 0.4)
        assert fits == model.within(x, 10.0, 0.4)[0, index]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-1, 11), st.floats(0, 0.999), st.booleans()), min_size=4, max_size=4
    ),
    st.integers(0, 10**6),
    st.booleans(),
    st.booleans(),
)
def test_one_by_one_and_together_they_decide_alike(rules, seed, masked, drifts):
    made = [row(ms, *rule) for ms, rule in zip((8.0, 12.0, 18.0, 27.0), rules, strict=True)]
    light = promised(*made)
    draws = np.random.default_rng(seed)
    limits = np.exp(draws.uniform(math.log(5), math.log(60), SAMPLES))
    mask = draws.random((SAMPLES, 12)) < 0.4 if masked else None
    if masked:
        mask[np.arange(SAMPLES), draws.integers(12, size=SAMPLES)] = True
    drift = (draws.normal(0, 0.1, 12).astype(np.float32), 1.5) if drifts else None
    blocks = arrays(TABLE)
    together = light.choose(blocks, limits, mask, drift)
    for number, limit in enumerate(limits.tolist()):
        request = {name: block[number] for name, block in blocks.items()}
        of_request = None if mask is None else mask[number]
        index, mean, spread = light.decide_expected(request, limit, drift, mask=of_request)
        assert index == together[number]
        if mask is None:
            assert light.decide_index(request, limit, drift) == index
        else:
            assert mask[number, index]
        assert np.isfinite([mean, spread]).all()


def test_a_promise_looks_broken_only_where_chance_is_less_than_five_per_cent():
    # of 20 answers .95 gives 16 or fewer in 1.6 %, 17 or fewer in 7.5 %
    assert fewest_kept(20, 0.95) == 17
    assert fewest_kept(0, 0.95) == 0
    window = PromiseWindow()
    assert math.isnan(window.share)
    for number in range(20):
        window.add(number >= 3)
    assert (window.share, window.cause(0.95, 1.0)) == (0.85, None)
    for _ in range(4):
        window.add(False)
    assert window.cause(0.95, 1.0) == "other_requests"
    assert window.cause(0.95, 1.3) == "slower_machine"
    assert {*CAUSES} == {"other_requests", "slower_machine"}
    # 44 in a row at a share of .95 have 10.5 %, 45 have 9.9 %
    window.add(False)
    for _ in range(44):
        window.add(True)
    assert window.cause(0.95, 1.0) == "other_requests"
    window.add(True)
    assert (window.share, window.cause(0.95, 1.0)) == (62 / 70, None)
    window.add(False)
    assert window.cause(0.95, 1.0) == "other_requests"
    # what is long ago no longer counts
    for _ in range(200):
        window.add(True)
    assert (window.share, window.cause(0.95, 1.3)) == (1.0, None)


def test_rules_are_read_from_what_was_written(tmp_path):
    agent = untrained(TABLE)
    agent.calibration.static = fit_static(TABLE, torch.arange(SAMPLES)).arrays()
    agent.calibration.promise = list(RULES)
    written = agent.export(tmp_path / "c.npz")
    read = NumpyController.load(tmp_path / "c.npz")
    assert read.digest == written.digest
    assert isinstance(read.promise, Promise)
    assert read.promise.fixed.tolist() == [3, POLICY, 5, POLICY]
    assert read.promise.quantiles.tolist()[:3] == pytest.approx(
        [-math.inf, 1.2816, -math.inf], abs=1e-4
    )


def test_texts_unlike_those_of_training_get_what_decides_for_all():
    (*_, name) = TABLE.features
    plain = {
        "slots": np.zeros(1 << BITS, np.int16),
        "weights": np.zeros(1, np.float32),
        "projection": np.zeros((1, 0), np.float32),
        "limits": np.array([0.0, 0.0, np.inf]),
        "messages": np.array(0),
    }
    decider = promised(row(20.0, 5), row(40.0, POLICY), texts={name: plain})
    request = {each: block[0] for each, block in arrays(TABLE).items()}
    request[name] = np.full_like(request[name], np.nan)
    many = {each: block[None] for each, block in request.items()}
    safest = decider.promise.safest(45.0)
    assert safest != 5
    for budget_ms, wanted in ((25.0, 5), (45.0, safest)):
        assert decider.decide_index(request, budget_ms) == wanted
        assert decider.choose(many, np.array([budget_ms])).tolist() == [wanted]


def test_outside_the_range_of_training_the_safest_decides():
    """Where a single configuration decides for all it does so for these, too."""
    values = np.concatenate([*arrays(TABLE).values()], 1)
    ends = {"low": values.min(0), "high": values.max(0), "margin": np.array(0.0)}
    rules = row(20.0, 5), row(40.0, POLICY)
    decider = promised(*rules, ranges=ends)
    before = promised(*rules)
    blocks = arrays(TABLE)
    limits = np.full(SAMPLES, 45.0)
    assert not decider.unlike(blocks, SAMPLES).any()
    identical(decider.choose(blocks, limits), before.choose(blocks, limits))
    (name, _) = TABLE.features
    safest = decider.promise.safest(45.0)
    assert safest != 5
    for number in (ends["low"][2] - 0.01, ends["high"][2] + 0.01, -1e30, np.nan):
        request = {each: block[0].copy() for each, block in blocks.items()}
        request[name][2] = number
        many = {each: block[None] for each, block in request.items()}
        assert decider.is_unlike(request)
        assert decider.unlike(many, 1).tolist() == [True]
        assert list(decider.outside(many, 1)) == [f"{name}[2]"] * (not np.isnan(number))
        for budget_ms, wanted in ((25.0, 5), (45.0, safest)):
            assert decider.decide_index(request, budget_ms) == wanted
            assert decider.decide_expected(request, budget_ms)[0] == wanted
            assert decider.choose(many, np.array([budget_ms])).tolist() == [wanted]
            assert decider.decides_by_static(request, budget_ms)
    # files of earlier versions have no ranges
    assert before.low is None
    assert before.outside(many, 1) == {}
    request[name][2] = 1e30
    assert not before.is_unlike(request)


def test_a_range_that_does_not_reach_to_0_is_tried_inside(tmp_path):
    width = sum(block.shape[1] for block in arrays(TABLE).values())
    ends = {"low": np.full(width, 2.0), "high": np.full(width, 3.0), "margin": np.array(0.1)}
    agent = untrained(TABLE)
    agent.calibration.ranges = {name: value.astype(np.float32) for name, value in ends.items()}
    written = agent.export(tmp_path / "c.npz")
    read = NumpyController.load(tmp_path / "c.npz")
    assert read.digest == written.digest
    assert read.header["margin"] == pytest.approx(0.1)
    identical(read.low, np.full(width, 2.0, np.float32))
    agent.calibration.ranges["low"] = np.zeros(width + 1, np.float32)
    unfit = agent.arrays()
    with pytest.raises(ValueError, match="broadcast"):
        NumpyController(unfit)
