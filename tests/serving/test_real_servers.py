"""What happens to servers: forks, full disks, folders that others remove, models that misbehave."""

import json
import math
import resource
import shutil
from dataclasses import replace

import numpy as np
import pytest
from helpers import arrays, input_error, small_table
from replayed import ReplayedModel, child, logging_model, serve_requests, untrained

from knobwise.agents.learning.logged import read_log
from knobwise.agents.learning.request_log import RequestLog
from knobwise.profiling.measuring.adaptive_model import Request

# -- forks -----------------------------------------------------------------------------------------

FORKED = """
import os, signal, sys, threading
from helpers import small_table
from replayed import logging_model, untrained
from knobwise.profiling.measuring.adaptive_model import Request

table = small_table(30)
model = logging_model(sys.argv[1], untrained(table), table, explore=0.5, cache=4)
answer, begun, goes_on = model.model.answer, threading.Event(), threading.Event()

def waiting(*arguments):
    begun.set()
    goes_on.wait()
    return answer(*arguments)

def serve(worker):
    for row in range(20):
        result = model.answer(Request(row, ""), 100.0 + worker)
        model.log.label(result.request_id, worker / 10)

model.answer(Request(0, ""), 100.0)
# another thread answers, and a lock is held, while processes are forked
model.model.answer = waiting
thread = threading.Thread(target=model.answer, args=(Request(0, ""), 100.0))
thread.start()
begun.wait()
children = []
with model.cached_decisions.lock:
    for worker in (1, 2, 3):
        children.append(os.fork())
        if not children[-1]:
            signal.alarm(60)
            model.model.answer = answer
            model.prefetch(request := Request(0, ""))
            model.answer(request, 100.0 + worker)
            serve(worker)
            os._exit(model.log.lost)
goes_on.set()
thread.join()
serve(0)
for process in children:
    print(os.waitpid(process, 0)[1])
"""


@pytest.mark.campaign
def test_forked_processes_answer_and_each_label_is_of_its_own_request(tmp_path):
    with child(FORKED, tmp_path) as process:
        printed, _ = process.communicate(timeout=120)
    assert printed.split() == ["0", "0", "0"]
    log = read_log(tmp_path)
    assert not log.aside
    workers = [round(row["budget_ms"] - 100) for row in log.rows]
    assert [workers.count(worker) for worker in range(4)] == [22, 21, 21, 21]
    for worker, row in zip(workers, log.rows, strict=True):
        assert row["accuracy"] in (None, worker / 10)
    assert sum(row["accuracy"] is not None for row in log.rows) == 80


# -- disks -----------------------------------------------------------------------------------------


def rows_in(folder):
    """The rows of a folder, each line of which must be whole."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def test_rows_are_lost_counted_said_once_and_begin_no_files_and_all_is_answered(tmp_path, caplog):
    model = serving(tmp_path)
    # a limit at which the system writes a part of a line, then nothing, as on a full disk
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    serve_requests(model, model.model.table, 30, label=False)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    kept = len(rows_in(tmp_path))
    assert 0 < kept < 10
    assert model.log.lost == 30 - kept
    serve_requests(model, model.model.table, 1, label=False)
    assert len(rows_in(tmp_path)) == kept + 1
    assert len([*tmp_path.iterdir()]) == 1
    assert len(caplog.records) == 1


def test_labels_are_counted_apart_from_rows_and_whoever_sends_one_knows(tmp_path, caplog):
    log = RequestLog(tmp_path)
    ids = [log.add({}) for _ in range(3)]
    assert log.label(ids[0], 0.5)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, before[1]))
    written = [log.label(name, 0.5) for name in ids * 2]
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert written == sorted(written, reverse=True)
    assert 0 < sum(written) < 6
    assert (log.lost, log.lost_labels) == (0, written.count(False))
    assert log.label(ids[0], 1.0)
    (file,) = tmp_path.glob("labels-*")
    labels = [json.loads(line) for line in file.read_text().splitlines()]
    assert [label["accuracy"] for label in labels] == [0.5] * (1 + sum(written)) + [1.0]
    assert len(caplog.records) == 1


def test_rows_of_a_file_that_others_remove_are_lost_and_the_log_goes_on(tmp_path, caplog):
    folder = tmp_path / "logs/today"
    log = RequestLog(folder, rows_per_file=4)
    ids = [log.add({}) for _ in range(7)]
    shutil.rmtree(folder)
    ids += [log.add({}) for _ in range(2)]
    assert log.lost == 3
    assert [row["id"] for row in rows_in(folder)] == ids[7:]
    assert len({*ids}) == 9
    # where it cannot be made again, every row is lost
    shutil.rmtree(folder.parent)
    folder.parent.write_text("a file")
    for _ in range(10):
        log.add({})
    assert log.lost == 3 + 2 + 10
    folder.parent.unlink()
    log.add({})
    assert len(rows_in(folder)) == 1
    assert len(caplog.records) == 1


# -- models ----------------------------------------------------------------------------------------


def serving(folder, part="answer", change=lambda value: value):
    """A controller in front of a model whose first stages, or answers, are changed."""
    table = small_table(30)
    model = logging_model(folder, untrained(table), table)
    right = getattr(model.model, part)
    setattr(model.model, part, lambda *about: change(right(*about)))
    return model


@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        ("answer", lambda answers: None, "2 Answer"),
        ("answer", lambda answers: answers[1:], "2 Answer"),
        ("answer", lambda answers: ["yes", "no"], "2 Answer"),
        ("first_stage", lambda stage: None, "FirstStage"),
        ("first_stage", lambda stage: stage.features, "FirstStage"),
    ],
)
def test_a_model_that_returns_something_else_is_refused(tmp_path, part, change, named):
    model = serving(tmp_path, part, change)
    with input_error(named):
        model.generate([Request(3, "")] * 2, 600.0)
    assert not rows_in(tmp_path)
    with input_error(named.replace("2", "1")):
        model.calibrate(model.model.table, {3: Request(3, "")}, cells=2, warm_up=0)


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        *(("answer", {"total_ms": wrong}) for wrong in (-1.0, 0.0, math.nan, math.inf)),
        *(("first_stage", {"extra_ms": wrong}) for wrong in (-1e9, math.nan, -math.inf, math.inf)),
        ("first_stage", {"total_ms": math.nan, "extra_ms": math.nan}),
        ("first_stage", {"total_ms": -5.0, "reused_by": lambda configuration: False}),
    ],
)
@pytest.mark.parametrize("tracks", [False, True])
def test_an_answer_without_a_possible_time_is_never_on_time_and_teaches_nothing(
    tmp_path, part, changes, tracks
):
    """The answer itself is good."""

    def change(value):
        if part == "answer":
            return [replace(answer, **changes) for answer in value]
        return replace(value, **changes)

    model = serving(tmp_path, part, change)
    model._tracks = tracks
    before = model.tracker.state()
    (result,) = serve_requests(model, model.model.table, 1, label=False)
    assert math.isnan(result.total_ms)
    assert not result.met
    assert not rows_in(tmp_path)
    assert sum(model.tracker.ignored.values()) == 1
    assert model.tracker.state() | {"ignored": {}} == before
    # what comes after it is served as ever
    model.model = ReplayedModel(model.model.table)
    (result,) = serve_requests(model, model.model.table, 1, label=False)
    assert 0 < result.total_ms < math.inf
    assert 0 < result.limit_ms <= result.budget_ms
    assert len(rows_in(tmp_path)) == 1


# -- features --------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, 1j])
def test_features_that_are_infinite_or_complex_are_refused_in_every_form(wrong):
    table = small_table(30)
    controller = untrained(table).decider
    features = arrays(table, 3)
    image = features["image_features"]
    features["image_features"] = np.where([0, 1, 0, 0], wrong, image)
    many = {name: block[None] for name, block in features.items()}
    with pytest.raises(ValueError, match="image_features"):
        controller.choose(many, np.ones(1))
    with pytest.raises((ValueError, TypeError), match=r"image_features|complex"):
        controller.decide(features, 10.0)
    # large numbers are no infinities
    features["image_features"] = np.full_like(image, 1e30)
    assert controller.decide(features, 10.0) in map(controller.configuration, range(12))
