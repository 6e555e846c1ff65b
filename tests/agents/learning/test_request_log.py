"""The log of a deployed controller: what is written, what survives a kill, what is set aside."""

import json
import math
import os
import tracemalloc
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import input_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replayed import Clock, child, logging_model, serve_requests, small_stack

from knobwise.agents.learning.logged import logged_of, read_log
from knobwise.agents.learning.request_log import RequestLog
from knobwise.common.errors import InputError
from knobwise.experiments.inspection.logs import inspect_log
from knobwise.profiling.measuring.adaptive_model import Request
from knobwise.serving.exploration import Exploration
from knobwise.serving.runtime import Runtime


def requests_in(folder):
    """The first file of requests."""
    return min(folder.glob("requests-*.jsonl"))


def served(folder, count, label=True, falls_back=False, **options):
    """A model with a log that has answered so many requests, and its results."""
    agent, table = small_stack(falls_back=falls_back)
    model = logging_model(folder, agent, table, **options)
    return model, serve_requests(model, table, count, label)


def test_an_answers_id_is_looked_for_a_block_at_a_time(tmp_path):
    log = RequestLog(tmp_path)
    # rows that end where blocks do, and across
    for number in range(6_000):
        log.add({"answer": f"a{number % 5_000}", "padding": "x" * (number % 2_000)})
    (path,) = tmp_path.glob("requests-*")
    with path.open("ab") as file:
        # torn
        file.write(b'{"answer":"a4321","id":"x')
    rows = list(map(json.loads, path.read_bytes().splitlines()[:-1]))
    tracemalloc.start()
    for number in (0, 999, 4_321, 4_999):
        name = f"a{number}"
        expected = [row["id"] for row in rows if row["answer"] == name]
        assert log.ids_of_answer(name) == expected
        assert len(expected) == (2 if number < 1_000 else 1)
    assert log.ids_of_answer("a5000") == []
    assert log.ids_of_answer("padding") == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000 < path.stat().st_size
    log.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A log of 40 requests, a third of them explored, all labelled."""
    folder = tmp_path_factory.mktemp("log")
    served(folder, 40, explore=0.3, explore_loss=0.2, seed=0)
    return folder


def checked(folder):
    """A log as a controller that is to learn from it reads it, also as tensors."""
    controller = small_stack()[0].decider
    log = read_log(folder, controller)
    return log, logged_of(log.rows, controller)


def test_a_row_holds_what_the_decision_saw_and_what_came_of_it(tmp_path):
    model, results = served(tmp_path, 30, explore=0.5, explore_loss=0.3, seed=1)
    log, logged = checked(tmp_path)
    assert not log.aside
    assert len({row["id"] for row in log.rows}) == 30
    for name in ("choice", "limit_ms", "met"):
        assert getattr(logged, name).tolist() == [getattr(result, name) for result in results]
    assert logged.answer_ms.tolist() == [result.answer.total_ms for result in results]
    assert logged.accuracy.tolist() == [float(result.answer.text) for result in results]
    # before the first answer there is no drift; after it that of the tracker
    assert (logged.offset[0] == 0).all()
    assert logged.offset[5].tolist() == results[5].drift[0].tolist()
    blocks = [table.features["image_features"].tolist() for table in (logged, model.model.table)]
    assert all(block in blocks[1] for block in blocks[0])


def test_a_new_file_is_begun_after_so_many_rows_and_by_every_start(tmp_path):
    log = RequestLog(tmp_path, rows_per_file=3)
    ids = [log.add({"choice": 0}) for _ in range(7)]
    other = RequestLog(tmp_path)
    ids.append(other.add({"choice": 0}))
    other.label(ids[0], 1)
    log.label(ids[0], 0)
    assert len({*ids}) == 8
    kinds = [path.name.split("-")[0] for path in tmp_path.iterdir()]
    assert (kinds.count("labels"), kinds.count("requests")) == (2, 4)
    with input_error("log="):
        RequestLog(requests_in(tmp_path))


def changed(folder, to, **values):
    """A copy of a log whose first row has other values."""
    path = requests_in(folder)
    lines = path.read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | values)
    (to / path.name).write_text("\n".join(lines) + "\n")
    return to


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        *(("probability", wrong, "chances") for wrong in (0.0, 1.5, 0.123, math.nan)),
        *(("probability", wrong, "damaged") for wrong in (None, "much")),
        ("chances", [], "damaged"),
        ("controller", "0123", "another controller"),
        ("choice", 12, "unknown configuration"),
        ("knobs", {"top_k": 5}, "unknown configuration"),
        ("answer_ms", 10**400, "times"),
        ("limit_ms", float("nan"), "times"),
        ("features", {"image_features": "AAAA"}, "damaged"),
        ("features", {"image_features": "AAAAAA=="}, "features"),
        ("drift", ["AAAAAA==", 1.0], "drift"),
        ("drift", [None, 1.0], "damaged"),
        ("id", 3, "damaged"),
        ("format", "another", "no row"),
    ],
)
def test_rows_that_cannot_be_used_are_set_aside(written, tmp_path, name, value, reason):
    log, _ = checked(changed(written, tmp_path, **{name: value}))
    (line,) = log.lines()
    assert line.startswith("1 ")
    assert reason in line
    assert len(log.rows) == 39


def test_rows_that_say_more_are_read(written, tmp_path):
    log, logged = checked(changed(written, tmp_path, accuracy=None, more=3))
    assert not log.aside
    assert len(logged) == 40


def test_rows_of_several_processes_are_in_the_order_of_their_times(written, tmp_path):
    changed(written, tmp_path, time=1e12)
    ids = [row["id"] for row in read_log(written).rows]
    assert [row["id"] for row in read_log(tmp_path).rows] == [*ids[1:], ids[0]]
    for time in ("now", 10**400):
        changed(written, tmp_path, time=time)
        assert read_log(tmp_path).rows[0]["id"] == ids[0]


def write_labels(folder, labels):
    """Write labels of any kind, as another program may."""
    lines = []
    for name, accuracy in labels:
        label = {"format": "knobwise.RequestLog/1", "id": name, "accuracy": accuracy}
        lines.append(json.dumps(label) + "\n")
    (folder / "labels-0.jsonl").write_text("".join(lines))


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_the_owner_reads_the_files_and_the_folder_is_as_the_umask_has_it(tmp_path, umask):
    before = os.umask(umask)
    try:
        log = RequestLog(tmp_path / "log", rows_per_file=2)
        for _ in range(3):
            log.label(log.add({}), 1.0)
    finally:
        os.umask(before)
    files = [path.stat().st_mode & 0o777 for path in (tmp_path / "log").iterdir()]
    assert files == [0o600] * 4
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o777 & ~umask


def test_the_accuracy_of_a_row_counts_unless_a_label_says_otherwise(written, tmp_path):
    rows = [json.loads(line) for line in requests_in(written).read_text().splitlines()]
    for accuracy, row in zip((0.25, 0.75, -1.0), rows, strict=False):
        row["accuracy"] = accuracy
    (tmp_path / requests_in(written).name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    write_labels(tmp_path, [(rows[1]["id"], 0.5)])
    log, logged = checked(tmp_path)
    accuracies = {row["id"]: row["accuracy"] for row in log.rows}
    assert [accuracies[row["id"]] for row in rows[:4]] == [0.25, 0.5, None, None]
    assert dict(log.aside) == {"a label outside [0, 1]": 1}
    assert int(logged.labelled.sum()) == 2


def test_labels_that_cannot_be_joined_are_set_aside(written, tmp_path):
    changed(written, tmp_path, id="5")
    wrong = [("5", accuracy) for accuracy in (-1.5, math.nan, 10**400)]
    # the latest counts, and may name its request by a number
    write_labels(tmp_path, [("nobody", 1.0), *wrong, ("5", 0.0), (5, 0.25)])
    read = read_log(tmp_path)
    assert dict(read.aside) == {"a label of an unknown request": 1, "a label outside [0, 1]": 3}
    assert read.rows[0]["accuracy"] == 0.25
    with input_error("log="):
        read_log(tmp_path / "nothing")


def test_the_latest_label_counts_whichever_process_wrote_it(tmp_path):
    """Workers begin their files of labels in another order than that of the labels."""
    served(tmp_path, 1, label=False)
    (row,) = read_log(tmp_path).rows
    workers = [RequestLog(tmp_path), RequestLog(tmp_path)]
    for worker, accuracy in ((0, 0.0), (1, 1.0), (0, 0.5)):
        workers[worker].label(row["id"], accuracy)
    assert read_log(tmp_path).rows[0]["accuracy"] == 0.5


@pytest.mark.parametrize("accuracy", [100.0, -0.1, math.nan])
def test_a_label_that_is_no_accuracy_is_refused_at_once(tmp_path, accuracy):
    log = RequestLog(tmp_path)
    with input_error("accuracy"):
        log.label(log.add({}), accuracy)
    assert not [*tmp_path.glob("labels-*")]


def test_of_labels_from_0_to_100_none_counts(written, tmp_path):
    """The wrong answers alone, with 0, would be in [0, 1]."""
    changed(written, tmp_path)
    ids = [row["id"] for row in read_log(written).rows]
    write_labels(tmp_path, zip(ids, [0, 100] * 20, strict=True))
    log = read_log(tmp_path)
    assert [*log.aside.values()] == [40]
    assert {row["accuracy"] for row in log.rows} == {None}


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cut=st.integers(0, 20_000),
    noise=st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 255)), max_size=4),
)
def test_torn_and_mutated_logs_are_read_and_every_row_is_counted(written, tmp_path, cut, noise):
    content = bytearray(requests_in(written).read_bytes()[:cut])
    for position, byte in noise:
        if position < len(content):
            content[position] = byte
    (tmp_path / "requests-0.jsonl").write_bytes(content)
    log, logged = checked(tmp_path)
    whole, _, last = content.rpartition(b"\n")
    lines = whole.count(b"\n") + (b"\n" in content) + bool(last)
    assert len(log.rows) + sum(log.aside.values()) == lines
    assert ((logged.probability > 0) & (logged.probability <= 1)).all()
    assert logged.offset.isfinite().all()


KILLED = """
import json, sys
from knobwise.agents.learning.request_log import RequestLog
log, row = RequestLog(sys.argv[1], rows_per_file=20), json.loads(sys.argv[2])
while True:
    name = log.add(row)
    log.label(name, 1.0)
    print(name, flush=True)
"""


def test_kill_9_while_logging_loses_no_answered_request(written, tmp_path):
    row = json.loads(requests_in(written).read_text().splitlines()[0]) | {"id": None}
    with child(KILLED, tmp_path, json.dumps(row)) as process:
        answered = [process.stdout.readline().strip() for _ in range(50)]
        process.kill()
        answered += [line.strip() for line in process.stdout if line.endswith("\n")]
    log = read_log(tmp_path)
    ids = [row["id"] for row in log.rows]
    assert ids[: len(answered)] == answered
    assert len(ids) <= len(answered) + 1
    assert sum(row["accuracy"] is None for row in log.rows) <= 1
    # the log goes on in another file, also after a torn line
    with requests_in(tmp_path).open("ab") as file:
        file.write(b'{"torn')
    served(tmp_path, 3)
    again = read_log(tmp_path)
    assert again.aside.total() == 1
    assert len(again.rows) == len(log.rows) + 3


@pytest.mark.parametrize("together", [False, True])
def test_the_logged_probability_is_that_of_the_draws(tmp_path, together):
    """The same request, again and again: the shares of the configurations are the logged
    chances."""
    options = {"explore": 0.4, "explore_loss": 0.3, "seed": 2, "tracker": False}
    model, _ = served(tmp_path, 0, **options)
    requests = [Request(3, "")] * 400
    if together:
        model.generate(requests, 60_000.0)
    else:
        for request in requests:
            model.answer(request, 60_000.0)
    _, logged = checked(tmp_path)
    chances = logged.propensity[0]
    assert (chances > 0).sum() > 2
    assert chances.max() > 0.6
    shares = logged.choice.bincount(minlength=12) / 400
    torch.testing.assert_close(shares.double(), chances, atol=0.08, rtol=0)
    assert shares[chances.argmax()] < 0.95


def test_a_fall_back_explores_by_what_static_knows_and_only_then_computes_features(tmp_path):
    served(tmp_path, 150, falls_back=True, explore=0.3, explore_loss=0.2, seed=0)
    rows = read_log(tmp_path).rows
    assert len(rows) == 150
    explored = [row for row in rows if row["choice"] != row["best"]]
    assert explored
    assert all(row["features"] is not None for row in explored)
    assert sum(row["features"] is None for row in rows) > 60


def test_the_guard_is_asked_once_for_a_request_with_its_whole_budget(tmp_path):
    # √(8 · 10) is 8.9, less than what a decision and its features leave of 10 ms
    agent, table = small_stack()
    rows = [{"budget_ms": 8.0, "deployed": False}, {"budget_ms": 10.0, "deployed": True}]
    agent.calibration.guard = rows
    agent = type(agent)(agent.controller, agent.teacher, agent.calibration)
    runtime = Runtime(agent, log=tmp_path, explore=0.5, seed=0, tracker=False)
    runtime.now = Clock()
    features = {name: block[0].numpy() for name, block in table.features.items()}
    for budget_ms, spent_ms in ((10.0, 1.5), (8.0, 0.0)):
        for _ in range(20):
            request = runtime.begin(budget_ms)
            assert (request.static is None) == (budget_ms == 10.0)
            decision = runtime.decide(request, features, spent_ms)
            by_policy = agent.without_fallback.decide_index(features, decision.limit_ms)
            by_static = agent.decider.static.single(decision.limit_ms)
            assert decision.best == (by_policy if budget_ms == 10.0 else by_static)
            runtime.finish(decision)
    log = read_log(tmp_path)
    assert len(log.rows) + log.aside.total() == 40


def test_static_s_second_choice_is_drawn_where_nothing_else_is_close_by_hand(tmp_path):
    agent, table = small_stack(falls_back=True)
    budget = 7.0
    decider = agent.decider
    utility = decider.static.mean_utility(np.array([budget]))[0]
    second, best = utility.argsort()[-2:]
    lost = float(utility[best] - utility[second])
    # half of what the second choice loses: it may be drawn in half of the explored requests
    options = {"explore": 0.4, "explore_loss": lost / 2, "seed": 0, "tracker": False}
    runtime = Runtime(agent, log=tmp_path, **options)
    runtime.now = Clock()
    features = {name: block[0].numpy() for name, block in table.features.items()}
    explored = 0
    for _ in range(1000):
        request = runtime.begin(budget)
        decision = runtime.decide(request, features)
        explored += request.explored
        runtime.finish(decision)
    rows = read_log(tmp_path, decider).rows
    assert len(rows) == 1000
    for row in rows:
        # what is left of the budget differs by microseconds
        utility = decider.static.mean_utility(np.array([row["limit_ms"]]))[0]
        drawn = 0.4 * (lost / 2) / (utility[best] - utility[second])
        chances = dict(zip(row["among"], row["chances"], strict=True))
        assert chances == pytest.approx({second: drawn, best: 1 - drawn})
        assert drawn == pytest.approx(0.2, abs=0.02)
        # features are there only where they were needed
        assert (row["features"] is not None) == row["explored"]
    share = np.mean([row["choice"] == second for row in rows])
    assert share == pytest.approx(0.2, abs=0.04)
    # the log counts what was drawn, perhaps the best, as the server does
    assert explored == pytest.approx(400, abs=50)
    assert inspect_log(str(tmp_path))["explored"] == explored / 1000
    # inverse propensities give the share of each choice its true value, 1
    logged = logged_of(rows, decider)
    weights = 1 / logged.probability
    for choice in (second, best):
        assert float((weights * (logged.choice == choice)).mean()) == pytest.approx(1, abs=0.2)


def test_logging_and_exploration_are_not_touched_where_they_are_off(monkeypatch):
    for where, name in ((Exploration, "draw"), (RequestLog, "add")):
        monkeypatch.setattr(where, name, Mock(side_effect=AssertionError("called")))
    _, results = served(None, 20)
    assert len(results) == 20
    with pytest.raises(AssertionError, match="called"):
        served(None, 9, explore=0.99)


def test_a_folder_that_is_missing_is_not_one_without_requests(tmp_path):
    problems = []
    for name in ("missing", "empty"):
        if name == "empty":
            (tmp_path / name).mkdir()
        with pytest.raises(InputError, match=f"log=.*{name}") as error:
            read_log(tmp_path / name)
        problems.append(str(error.value).replace(name, ""))
    assert "requests-" not in problems[0]
    assert "requests-" in problems[1]
