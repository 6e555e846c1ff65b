"""A policy in front of any callable: threads, coroutines, times, logs and failures."""

import asyncio
import functools
import json
import math
import os
import signal
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import polars
import pytest
import torch
from helpers import driven_apart, input_error, small_table
from replayed import Clock, child, small_stack, timed_by, untrained

import knobwise
from knobwise.agents import DeployedController, NumpyController, PolicyConfig
from knobwise.agents.deployed.arrays import configurations_of
from knobwise.agents.learning.logged import logged_of, read_log
from knobwise.agents.learning.request_log import RequestLog
from knobwise.common.words import setting
from knobwise.envs.tables.profile_table import Knob
from knobwise.experiments.inspection.logs import inspect_log
from knobwise.serving.wrapper import wrap

BRIEF = {"teacher_iterations": 30, "pretrain_iterations": 30, "iterations": 0}
BRIEF |= {"contexts": 64, "minibatch": 64, "evaluate_every": 30}
TINY = {"policy": "utility", "policy.guard": False, "policy.hidden": 8, "policy.fold_networks": 2}
TINY["optimiser"] = BRIEF
TABLE = small_table(120)


def features_of(row):
    return {name: block[row].tolist() for name, block in TABLE.features.items()}


@pytest.fixture(scope="module")
def policy():
    return knobwise.fit(TABLE, **TINY)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def wrapped(policy, tmp_path, clock):
    """Puts the policy in front of a callable, timed by the clock, with a log in `tmp_path`."""
    usual = {"policy": policy, "features": features_of, "log": tmp_path}
    return lambda call, **options: timed_by(clock, wrap(call, **usual | options))


def cell(row, knobs):
    """The accuracy, and the time in seconds, of a row of the table under some knobs."""
    place = row, configurations_of(TABLE).index(knobs)
    return float(TABLE.accuracy[place]), float(TABLE.latency_ms[place]) / 1e3


class Model:
    """Answers with the row and its accuracy. By a clock it takes as long as the row does.

    Args:
        together: so many calls go on only once all of them are under way.
    """

    def __init__(self, clock=None, together=1):
        self.clock = clock or Clock()
        self.barrier = threading.Barrier(together, timeout=60)

    def __call__(self, row, **knobs):
        self.barrier.wait()
        return self.answer(row, knobs)

    def answer(self, row, knobs):
        accuracy, seconds = cell(row, knobs)
        self.clock.go_on(seconds)
        return row, accuracy


class AsyncModel(Model):
    """Waits until so many calls are under way."""

    def __init__(self, clock, together=1):
        super().__init__(clock)
        self.left, self.all_begun = together, asyncio.Event()

    async def __call__(self, row, **knobs):
        self.left -= 1
        if self.left <= 0:
            self.all_begun.set()
        await self.all_begun.wait()
        return self.answer(row, knobs)


def looked_at_alone(policy, results):
    """Each decision is that of the policy for this request, with what was left of the budget."""
    for row, result in results:
        assert result.answer[0] == row
        assert result.limit_ms < result.budget_ms
        decided = policy.decide(features_of(row), result.limit_ms, drift=result.drift)
        assert result.configuration == decided
        assert result.answer == (row, cell(row, decided)[0])


def each_label_is_of_its_own_request(folder, policy, results):
    looked_at_alone(policy, results)
    log = read_log(folder, policy.agent.decider)
    assert not log.aside
    rows = {row["id"]: row for row in log.rows}
    assert len(rows) == len(results)
    rows = [rows[result.request_id] for _, result in results]
    for row, (_, result) in zip(rows, results, strict=True):
        outcome = row["accuracy"], row["knobs"], row["total_ms"]
        assert outcome == (result.answer[1], result.configuration, result.total_ms)
    logged = logged_of(rows, policy.agent.decider)
    # where the guard fell back, no features were computed
    wanted = TABLE.blocks([row for row, _ in results])
    for name, block in wanted.items():
        assert torch.equal(logged.features[name][logged.seen], block[logged.seen])


# -- one request -----------------------------------------------------------------------------------


def test_the_answer_is_the_callables_and_the_features_are_taken_off_the_budget(policy, clock):
    def embed(row):
        clock.go_on(0.02)
        return features_of(row)

    serve = timed_by(clock, knobwise.wrap(Model(clock), policy, features=embed, tracker=False))
    assert serve(5, budget_ms=300)[0] == 5
    result = serve.result(7, budget_ms=300)
    assert result.answer[0] == 7
    seconds = cell(7, result.configuration)[1]
    assert result.overhead_ms == pytest.approx(20, abs=0.1)
    assert result.total_ms == pytest.approx(20 + seconds * 1e3, abs=0.1)
    assert result.limit_ms == pytest.approx(280, abs=0.1)
    assert result.met
    looked_at_alone(policy, [(7, result)])
    # the features alone take longer than this budget
    result = serve.result(7, budget_ms=10)
    assert 0 < result.limit_ms < 1e-6
    assert not result.met


def test_where_the_guard_falls_back_no_features_are_computed(tmp_path):
    agent, table = small_stack(falls_back=True)
    looked = []

    def embed(row):
        looked.append(row)
        return table.blocks(row)

    serve = wrap(Model(), agent, features=embed, log=tmp_path)
    budgets = [row["budget_ms"] for row in agent.calibration.guard]
    result = serve.result(3, budgets[0] + 1)
    assert not looked
    (row,) = read_log(tmp_path, serve.controller).rows
    assert row["features"] is None
    assert result.choice == serve.controller.static.single(result.limit_ms)
    serve(3, budgets[-1] + 100)
    assert looked == [3]


def test_named_columns_and_no_features_at_all():
    samples = {"sample_id": range(8), "kind": 4 * ["easy"] + 4 * ["hard"], "tokens": range(8)}
    cells = polars.DataFrame({"size": [1, 2], "accuracy": [0, 1], "latency_ms": [2.0, 9.0]})
    rows = polars.DataFrame(samples).join(cells, how="cross")
    named = knobwise.fit(rows, ["kind", "tokens"], **TINY)
    call = Mock(return_value="yes")
    # the request holds what the policy reads, and more
    serve = wrap(call, named, features=lambda request: request)
    assert serve({"kind": "easy", "tokens": 3, "text": "?"}, budget_ms=20.0) == "yes"
    with input_error("tokens"):
        serve({"kind": "easy"}, budget_ms=20.0)
    call.assert_called_once()
    serve = wrap(Model(), untrained(small_table(40, features=False)), tracker=False)
    assert serve(4, 50.0)[0] == 4


def test_a_block_that_lacks_what_no_training_sample_lacked_goes_to_static_and_is_counted(tmp_path):
    agent, _ = small_stack()
    missing = {name: [math.nan] * block.shape[1] for name, block in TABLE.features.items()}

    def embed(row):
        return missing if row % 2 else features_of(row)

    serve = wrap(Model(), agent, features=embed, log=tmp_path, tracker=False)
    for row in range(6):
        result = serve.result(row, 300.0)
        assert result.unlike == bool(row % 2)
        if result.unlike:
            assert result.choice == serve.controller.static.single(result.limit_ms)
    assert serve.unlike == 3
    assert inspect_log(str(tmp_path))["unlike"] == 3


def test_explored_requests_are_drawn_among_what_is_nearly_as_good(wrapped, tmp_path):
    serve = wrapped(Mock(), explore=0.5, explore_loss=1.0, seed=0, tracker=False)
    choices = [serve.result(row, 15.0).choice for row in range(60)]
    rows = read_log(tmp_path, serve.controller).rows
    assert [row["choice"] for row in rows] == choices
    assert 15 < sum(row["choice"] != row["best"] for row in rows) < 45


# -- many requests ---------------------------------------------------------------------------------


def test_threads_share_it_and_each_label_is_of_its_own_request(wrapped, policy, clock, tmp_path):
    serve = wrapped(Model(clock, together=8))  # they are in flight together

    def label(row):
        result = serve.result(row, 40.0 + row)
        serve.log.label(result.request_id, result.answer[1])
        return row, result

    with ThreadPoolExecutor(8) as pool:
        results = [*pool.map(label, range(120))]
    each_label_is_of_its_own_request(tmp_path, policy, results)
    assert serve.tracker.answers == 120


def test_coroutines_are_in_flight_together_and_wait_without_a_lock(
    wrapped, policy, clock, tmp_path
):
    async def embed(row):
        await asyncio.sleep(0)
        return features_of(row)

    serve = wrapped(AsyncModel(clock, together=60), features=embed)

    async def label(row):
        result = await serve.result(row, budget_ms=60.0 + row)
        serve.log.label(result.request_id, result.answer[1])
        return row, result

    async def all_of_them():
        return await asyncio.gather(*(label(row) for row in range(60)))

    results = asyncio.run(all_of_them())
    # the time of each is that until its answer is there
    for row, result in results:
        assert result.total_ms >= cell(row, result.configuration)[1] * 1e3
    each_label_is_of_its_own_request(tmp_path, policy, results)
    assert asyncio.run(serve(3, budget_ms=50.0))[0] == 3
    assert serve.tracker.answers == 61


@pytest.mark.parametrize("awaits", [False, True])
def test_the_tracker_follows_a_callable_that_becomes_twice_as_slow(wrapped, clock, awaits):
    slower = 1.0

    def call(row, **knobs):
        clock.go_on(cell(row, knobs)[1] * slower)

    async def later(row, **knobs):
        await asyncio.sleep(0)
        call(row, **knobs)

    serve = wrapped(later if awaits else call)
    levels = []
    for slower in (1.0, 2.0):
        for row in range(60):
            result = serve.result(row, 60.0)
            result = asyncio.run(result) if awaits else result
            took_s = cell(row, result.configuration)[1] * slower
            assert result.total_ms == pytest.approx(took_s * 1e3, abs=0.1)
        levels.append(serve.tracker.factors()["level"])
    assert 0.8 < levels[0] < 1.25
    assert levels[1] / levels[0] == pytest.approx(2, rel=0.15)


# -- what goes wrong -------------------------------------------------------------------------------


def test_errors_pass_through_and_only_those_of_the_call_are_logged(wrapped, tmp_path):
    def embed(row):
        return features_of(row) | {"image_features": [1.0]} if row == 2 else features_of(row)

    call = Mock(side_effect=[KeyError("no such request"), 3])
    serve = wrapped(call, features=embed)
    with pytest.raises(KeyError, match="no such request"):
        serve(1, 30.0)
    with input_error("image_features"):
        serve(2, 30.0)
    with pytest.raises(IndexError):
        serve(1000, 30.0)
    for budget in (0, -1.0, 1e31, math.inf, math.nan):
        with input_error("budget_ms"):
            serve(3, budget)
    log = read_log(tmp_path)
    assert (log.rows, log.aside) == ([], {"without an answer": 1})
    assert serve.tracker.answers == 0
    assert sum(serve.tracker.ignored.values()) == 1
    assert serve(3, 30.0) == 3
    assert len(read_log(tmp_path).rows) == 1


@pytest.mark.parametrize("awaits", [False, True])
def test_settings_that_fail_are_counted_in_the_log(wrapped, clock, tmp_path, awaits):
    """Those with the most crops fail; an interrupt is the fault of none."""
    most = TABLE.knobs[0].values[-1]
    raised = Counter()

    def call(row, **knobs):
        clock.go_on(0.001)
        if row == 40:
            raise KeyboardInterrupt
        failed = knobs["max_crops"] == most
        raised[setting(knobs), failed] += 1
        if failed:
            raise MemoryError("of the user's text")

    async def later(row, **knobs):
        call(row, **knobs)

    serve = wrapped(later if awaits else call, explore=1.0, explore_loss=1.0, seed=0)
    for row in range(41):
        with suppress(MemoryError, KeyboardInterrupt):
            asyncio.run(serve(row, 15.0)) if awaits else serve(row, 15.0)
    attempts = read_log(tmp_path, serve.controller).attempts
    counted = {(name, bad): n for name, by in attempts.items() for bad, n in by.items()}
    assert counted == raised
    failed = sum(n for (_, bad), n in raised.items() if bad)
    assert 0 < failed < 40
    assert serve.tracker.answers == 40 - failed
    without = inspect_log(str(tmp_path))["without_answer"]
    assert sum(each["faults"] for each in without) == failed
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"the call raised MemoryError" in content
    assert b"text" not in content


def test_of_a_request_that_is_cancelled_nothing_is_learned(wrapped, clock, tmp_path):
    model = AsyncModel(clock, together=2)
    serve = wrapped(model)

    async def impatient():
        first = asyncio.create_task(serve(3, 30.0))
        while model.left == 2:
            await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await serve(4, 30.0)

    assert asyncio.run(impatient())[0] == 4
    # cancelled before its deadline, so nobody knows what it would have been
    log = read_log(tmp_path)
    assert (len(log.rows), log.aside) == (1, {"left before the deadline": 1})
    assert serve.tracker.answers == 1


@pytest.mark.parametrize("error", [TimeoutError, asyncio.CancelledError])
def test_a_call_that_runs_out_of_time_is_logged_as_late(wrapped, clock, tmp_path, error):
    def call(row, **knobs):
        clock.go_on(0.031)
        raise error

    with pytest.raises(error):
        wrapped(call)(3, 30.0)
    (row,) = read_log(tmp_path).rows
    assert (row["met"], row["abandoned"]) == (False, True)
    assert row["answer_ms"] == pytest.approx(31, rel=0.01)


async def later(row, **knobs):
    return row


class Stream:
    """Tokens as they come, like those of a client of a language model."""

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration


class AsyncStream:
    def __aiter__(self):
        return self

    async def __anext__(self):
        raise StopAsyncIteration


UNFINISHED = {
    "coroutine": later,
    "generator": lambda row: (row for _ in range(2)),
    "stream": lambda row: Stream(),
    "async stream": lambda row: AsyncStream(),
    "future": lambda row: Future(),
}


@pytest.mark.parametrize("answer", UNFINISHED.values(), ids=UNFINISHED)
@pytest.mark.parametrize("awaits", [False, True])
def test_what_is_no_answer_yet_is_refused(wrapped, tmp_path, answer, awaits):
    async def call(row, **knobs):
        return answer(row)

    serve = wrapped(call if awaits else lambda row, **knobs: answer(row))
    with input_error("no answer yet"):
        asyncio.run(serve(3, 30.0)) if awaits else serve(3, 30.0)
    assert not read_log(tmp_path).rows
    assert serve.tracker.answers == 0


WHOLE = ["text", b"bytes", [1], (1,), {"a": 1}, {1}, range(2), None, 3, torch.ones(2), TABLE]
WHOLE += [torch.ones(2).numpy(), polars.DataFrame({"a": [1]}), {"a": 1}.items(), Path()]


@pytest.mark.parametrize("answer", WHOLE, ids=lambda answer: type(answer).__name__)
def test_whole_answers_pass_although_they_can_be_iterated_over(wrapped, answer):
    assert wrapped(lambda row, **knobs: answer)(3, 30.0) is answer


def test_partials_of_coroutine_functions_are_awaited(wrapped):
    assert asyncio.run(wrapped(functools.partial(later))(3, 30.0)) == 3


def test_what_cannot_work_is_refused_before_a_log_begins(wrapped, tmp_path):
    async def embed(row):
        return features_of(row)

    def too_few(row, top_k):
        return row

    table = small_table(40, features=False)
    mean = DeployedController(driven_apart(table, PolicyConfig(hidden=8), constraint="mean"))
    refused = {
        "features=FUNCTION": {"features": None},
        "max_crops": {"call": too_few},
        "must be a function": {"call": "model"},
        "async": {"features": embed},
        "no policy": {"policy": "runs/latest"},
        "budget=mean": {"policy": mean},
        "another controller": {"tracker": wrap(Model(), untrained(table)).tracker},
        "explore=": {"explore": 2.0},
        "explore_loss": {"explore_loss": -1.0},
    }
    for word, options in refused.items():
        with input_error(word):
            wrapped(**{"call": Model(), "log": tmp_path / "log"} | options)
    assert not [*tmp_path.iterdir()]
    (tmp_path / "file").write_text("")
    with input_error("log="):
        wrapped(Model(), log=tmp_path / "file")


# -- processes -------------------------------------------------------------------------------------


def test_a_forked_process_answers_although_a_lock_was_held(wrapped, tmp_path):
    serve = wrapped(Model(), log=RequestLog(tmp_path))
    with serve._lock:
        process = os.fork()
        if not process:
            signal.alarm(30)
            serve.log.label(serve.result(3, 30.0).request_id, 0.25)
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7
    serve.log.label(serve.result(4, 30.0).request_id, 0.75)
    log = read_log(tmp_path)
    assert sorted(row["accuracy"] for row in log.rows) == [0.25, 0.75]


WITHOUT_TORCH = """
import json, sys
import knobwise
from knobwise.agents import NumpyController

features = json.loads(sys.argv[2])
controller = NumpyController.load(sys.argv[1])
serve = knobwise.wrap(lambda request, **knobs: knobs, controller, features=features.get)
print(json.dumps(serve("a", budget_ms=30.0)))
print("torch" in sys.modules)
"""


def test_an_exported_controller_serves_without_torch_and_is_replaced(wrapped, policy, tmp_path):
    path = tmp_path / "controller.npz"
    policy.agent.export(path)
    with child(WITHOUT_TORCH, path, json.dumps({"a": features_of(3)})) as process:
        printed, _ = process.communicate(timeout=60)
    knobs, with_torch = printed.splitlines()
    assert json.loads(knobs) in policy.configurations
    assert with_torch == "False"
    # a new version takes over between two requests
    serve = wrapped(Mock(), policy=NumpyController.load(path))
    serve.watch(path)
    digest = serve.controller.digest
    serve(3, 30.0)
    new = untrained(TABLE, None, [1.0] * 5).export(path)
    serve._watched._looked = -math.inf
    serve(3, 30.0)
    assert serve.controller.digest == new.digest != digest


def test_true_and_false_reach_the_callable_as_such(tmp_path):
    table = small_table(40, features=False)
    table = replace(table, knobs=(*table.knobs[:2], Knob("cache", (False, True))))
    untrained(table).export(tmp_path / "controller.npz")
    controller = NumpyController.load(tmp_path / "controller.npz")
    seen = set()
    serve = wrap(lambda _, max_crops, top_k, cache: seen.add(type(cache)), controller)
    serve(0, budget_ms=50.0)
    assert seen == {bool}
