"""`Runtime`: the walk of a request, step by step, as whoever serves takes it."""

import asyncio
import json

import numpy as np
import pytest
import torch
from helpers import input_error, small_table
from replayed import Clock, small_stack, timed_by, untrained

from knobwise.agents.calibration.ranges import fit_ranges
from knobwise.agents.deployed.promise import POLICY
from knobwise.agents.evaluation.baselines import fit_static
from knobwise.agents.learning.logged import read_log
from knobwise.serving.runtime import Runtime


def runtime_of(agent, **options):
    return timed_by(Clock(), Runtime(agent, **options))


def features_of(table, row):
    return {name: block[row].numpy() for name, block in table.features.items()}


def rows_in(folder):
    (path,) = folder.glob("requests-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def stack():
    """Deploys the policy at every budget."""
    return small_stack()


def test_a_decision_is_that_of_the_controller_for_what_is_left(stack, tmp_path):
    agent, table = stack
    runtime = runtime_of(agent, log=tmp_path)
    request = runtime.begin(60.0)
    assert request.needs_features
    runtime.now.go_on(0.02)
    decision = runtime.decide(request, features_of(table, 3))
    assert decision.limit_ms == pytest.approx(40, abs=0.01)
    expected = agent.decider.decide_expected(features_of(table, 3), decision.limit_ms)
    assert decision[:3] == expected
    assert decision.configuration == agent.decider.configuration(decision.choice)
    assert not decision.fell_back
    runtime.now.go_on(0.03)
    result = runtime.finish(decision, "an answer")
    assert result.answer == "an answer"
    assert result.answer_ms == pytest.approx(30, abs=0.01)
    assert result.total_ms == pytest.approx(50, abs=0.01)
    assert result.overhead_ms == pytest.approx(20, abs=0.01)
    assert result.met
    (row,) = read_log(tmp_path, agent.decider).rows
    assert row["id"] == result.request_id
    assert "limits" not in row
    # nothing of a request changes once it is made
    with pytest.raises(AttributeError):
        result.total_ms = 0.0


def test_where_the_guard_falls_back_no_features_are_needed():
    agent, table = small_stack(falls_back=True)
    runtime = runtime_of(agent)
    request = runtime.begin(agent.calibration.guard[0]["budget_ms"])
    assert not request.needs_features
    decision = runtime.decide(request)
    assert decision.fell_back
    assert decision.choice == agent.decider.static.single(decision.limit_ms)
    # who has them in any case need not ask
    request = runtime.begin(agent.calibration.guard[0]["budget_ms"], ask_guard=False)
    assert request.needs_features
    assert runtime.decide(request, features_of(table, 0)).choice == decision.choice


def test_waiting_counts_from_the_arrival_on(stack):
    agent, table = stack
    runtime = runtime_of(agent)
    request = runtime.begin(60.0, arrived=runtime.now.now - 0.015)
    decision = runtime.decide(request, features_of(table, 0))
    assert decision.limit_ms == pytest.approx(45, abs=0.01)
    runtime.now.go_on(0.01)
    result = runtime.finish(decision)
    times = result.waited_ms, result.answer_ms, result.total_ms
    assert times == pytest.approx((15, 10, 25), abs=0.02)


def test_the_time_to_the_first_token_may_be_the_one_that_counts(stack):
    agent, table = stack
    runtime = runtime_of(agent)
    request = runtime.begin(40.0)
    decision = runtime.decide(request, features_of(table, 0))
    runtime.now.go_on(0.03)
    first = runtime.now()
    runtime.now.go_on(5.0)
    result = runtime.finish(decision, "a long answer", first)
    assert (result.answer_ms, result.total_ms) == pytest.approx((30, 30), abs=0.02)
    assert result.met
    assert runtime.tracker.answers == 1
    # the rest of the answer is no overhead of the next request
    assert runtime.begin(40.0).budget_ms - runtime.decided.beyond_ms > 39.9


@pytest.mark.parametrize("static", [True, False])
def test_a_request_whose_features_fail_is_answered_and_no_update_learns_from_it(static, tmp_path):
    agent, table = small_stack()
    if not static:
        table = small_table(90)
        agent = untrained(table)
    runtime = runtime_of(agent, log=tmp_path, explore=1.0, explore_loss=1.0, seed=0)
    controller = agent.decider
    for _ in range(20):
        request = runtime.begin(60.0)
        decision = runtime.fail(request)
        runtime.now.go_on(0.01)
        result = runtime.finish(decision)
        limit = decision.limit_ms * controller.factor(request.drift)
        if static:
            assert decision.choice == controller.static.single(limit)
        else:
            missing = {name: np.full(n, np.nan) for name, n in controller.feature_sizes.items()}
            wanted = controller.decide_index(missing, decision.limit_ms, request.drift)
            assert decision.choice == wanted
        assert decision.fell_back
        assert not result.explored
        assert result.met
    log = read_log(tmp_path, controller)
    assert not log.rows
    assert [*log.aside.values()] == [20]
    assert {row["probability"] for row in rows_in(tmp_path)} == {1.0}


def test_further_limits_are_logged_and_checked(stack, tmp_path):
    agent, table = stack
    costs = {name: np.zeros((2, 12)) for name in ("bias", "margin")}
    agent.calibration.costs = costs | {"floor": np.full(2, -10.0)}
    agent.calibration.cost_names = ["tokens", "price"]
    agent.eval()
    runtime = runtime_of(agent, log=tmp_path)
    request = runtime.begin(60.0, {"tokens": 100, "price": np.float32(0.5)})
    decision = runtime.decide(request, features_of(table, 0))
    assert "cheapest" in decision.limits_note
    runtime.finish(decision)
    (row,) = read_log(tmp_path, agent.decider).rows
    assert row["limits"] == {"tokens": 100.0, "price": 0.5}
    assert row["limits_note"] == decision.limits_note
    # a limit that no decision could keep is refused, not only logged
    with input_error("usd"):
        runtime.begin(60.0, {"usd": 1.0})
    for wrong in (0, -1.0, "many", None, float("nan")):
        with input_error("tokens"):
            runtime.begin(60.0, {"tokens": wrong})


def test_an_answer_that_cost_more_than_a_limit_is_over_it_and_counts_as_late(tmp_path):
    agent, table = small_stack()
    costs = {name: np.zeros((1, 12)) for name in ("bias", "margin")}
    agent.calibration.costs = costs | {"floor": np.full(1, -10.0)}
    agent.calibration.cost_names = ["usd"]
    agent.calibration.limits = {"values": {"usd": 2.0}}
    agent.eval()
    runtime = runtime_of(agent, log=tmp_path)
    outcomes = []
    # of limits, the request's own goes first; float32 has 0.3 alike however it was summed
    for limits, known in (
        (None, {"usd": 1.9}),
        (None, {"usd": 2.1}),
        ({"usd": 3.0}, {"usd": 2.1}),
        ({"usd": 0.3}, {"usd": 0.1 + 0.2}),
        ({"usd": 0.3}, {"usd": 0.31, "joule": 1.0}),
        (None, None),
        (None, {"joule": 1e9}),
    ):
        decision = runtime.decide(runtime.begin(60.0, limits), features_of(table, 0))
        result = runtime.finish(decision, costs=known)
        assert result.met
        outcomes.append(result.over_limit)
    assert outcomes == [False, True, False, False, True, None, None]
    assert [row.get("over_limit") for row in rows_in(tmp_path)] == outcomes
    read = read_log(tmp_path, agent.decider)
    assert [row["met"] for row in read.rows] == [not over for over in outcomes]


def test_requests_are_under_way_together_and_may_end_in_any_order(stack, tmp_path):
    agent, table = stack
    runtime = runtime_of(agent, log=tmp_path)

    async def serve(row, order):
        request = runtime.begin(40.0 + row)
        await asyncio.sleep(0)
        decision = runtime.decide(request, features_of(table, row))
        async with asyncio.timeout(60):
            await order[row].wait()
        result = runtime.finish(decision, row)
        if row:
            order[row - 1].set()
        return result

    async def all_of_them():
        order = [asyncio.Event() for _ in range(20)]
        order[-1].set()
        return await asyncio.gather(*(serve(row, order) for row in range(20)))

    results = asyncio.run(all_of_them())
    assert [result.answer for result in results] == [*range(20)]
    for row, result in enumerate(results):
        decided = agent.decider.decide(features_of(table, row), result.limit_ms, result.drift)
        assert result.configuration == decided
    ids = [row["id"] for row in read_log(tmp_path, agent.decider).rows]
    assert ids == [result.request_id for result in reversed(results)]


def test_a_request_without_an_answer_is_counted(stack):
    agent, _ = stack
    runtime = runtime_of(agent)
    runtime.begin(60.0)
    runtime.abandon("the stream", ConnectionError())
    assert runtime.tracker.answers == 0
    assert [*runtime.tracker.ignored.values()] == [1]


def test_clients_that_leave_at_the_deadline_hide_no_slower_model(stack):
    agent, table = stack
    runtime = runtime_of(agent)
    first = runtime.decide(runtime.begin(40.0), features_of(table, 0))
    expected_ms = np.exp(first.log_latency)
    only = np.arange(len(runtime.configurations)) == first.choice
    # whoever leaves before an answer is expected says nothing of it
    runtime.now.go_on(0.9 * expected_ms / 1e3)
    runtime.abandon("the client", "left", overdue=first)
    assert runtime.tracker.answers == 0
    assert sum(runtime.tracker.ignored.values()) == 1
    for row in range(60):
        decision = runtime.decide(runtime.begin(40.0, mask=only), features_of(table, row))
        assert decision.choice == first.choice
        # three times slower, so that nobody sees an answer
        runtime.now.go_on(decision.limit_ms / 1e3)
        assert decision.limit_ms < 3 * expected_ms
        runtime.abandon("the client", ConnectionError(), overdue=decision)
    # until the answer is expected at the deadline
    factor = np.exp(runtime.tracker.drift[0][first.choice])
    assert factor == pytest.approx(40 / expected_ms, rel=0.05)
    assert runtime.tracker.answers > 0
    free = runtime.decide(runtime.begin(40.0), features_of(table, 0))
    assert free.log_latency < first.log_latency


def test_nothing_is_promised_of_what_is_explored_or_outside_the_range_of_training():
    """Also where the draw falls on what the controller chose."""
    table = small_table(40)
    agent = untrained(table)
    calibration = agent.calibration
    everyone = torch.arange(40)
    calibration.static = fit_static(table, everyone).arrays()
    rule = {"promise": 0.95, "kept": True, "probability": 0.0, "configuration": POLICY}
    calibration.promise = [rule | {"budget_ms": 20.0, "planned_ms": 15.0}]
    calibration.guard = []
    calibration.ranges = fit_ranges(table, everyone, agent.controller.normaliser, [])

    def decided(runtime, row, factor=1.0):
        features = {name: factor * block for name, block in features_of(table, row).items()}
        return runtime.decide(runtime.begin(40.0), features)

    runtime = runtime_of(agent, explore=1.0, explore_loss=1.0, seed=0)
    drawn = [decided(runtime, row) for row in range(40)]
    assert any(each.choice == each.best for each in drawn)
    assert [each.promised.share for each in drawn] == [0.0] * 40
    runtime = runtime_of(agent)
    assert {decided(runtime, row).promised.share for row in range(40)} == {0.95}
    decision = decided(runtime, 0, 1000.0)
    assert decision.unlike
    assert decision.promised.share == 0
    assert decision.choice == agent.decider.promise.safest(decision.limit_ms)
