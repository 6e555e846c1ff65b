"""Which rows of a log can be learned from, and which label of a request counts."""

import asyncio
import gzip
import json
import math
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from helpers import input_error, table_of
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed import ReplayedModel, logging_model, serve_requests, small_stack, untrained
from tiny_models import tiny_llama

import knobwise
from knobwise.agents import Selector, SelectorConfig
from knobwise.agents.learning import logged, request_log
from knobwise.agents.learning.logged import read_log
from knobwise.agents.learning.request_log import RequestLog
from knobwise.envs.tables.profile_table import Knob
from knobwise.experiments.inspection.logs import inspect_log
from knobwise.experiments.report.inspection import log_sentences
from knobwise.profiling.measuring.adaptive_model import Request
from knobwise.profiling.measuring.questions import VQAItem
from knobwise.serving import AdaptiveModel
from knobwise.testbeds.smollm.demonstrated_model import DemonstratedModel

BUDGETS = (1e-12, 1e-3, 5.0, 12.0, 900.0)
"""Of which the first are spent before anything is decided."""


# -- what every writer writes ----------------------------------------------------------------------


def by_threads(folder):
    """A callable that answers in threads; a part of the requests is explored, and for a part the
    guard falls back."""
    agent, table = small_stack(falls_back=True)
    serve = knobwise.wrap(lambda row, **knobs: row, agent, features=table.blocks, log=folder)
    serve._exploration.share = 0.4
    with ThreadPoolExecutor(4) as pool:
        [*pool.map(lambda row: serve(row, BUDGETS[row % 5]), range(40))]
    return agent.decider


def by_coroutines(folder):
    agent, table = small_stack()

    async def call(row, **knobs):
        await asyncio.sleep(0)

    async def all_of_them():
        await asyncio.gather(*(serve(row, BUDGETS[row % 5]) for row in range(40)))

    serve = knobwise.wrap(call, agent, features=table.blocks, log=folder, explore=0.3)
    asyncio.run(all_of_them())
    return agent.decider


def by_a_model(folder):
    agent, table = small_stack()
    model = AdaptiveModel(ReplayedModel(table), agent, log=folder, explore=0.3, cache=4)
    for row in range(40):
        model.answer(Request(row % 8, ""), BUDGETS[row % 5])
    return agent.decider


def by_batches(folder):
    """Some requests wait for others, or came long ago."""
    agent, table = small_stack()
    model = AdaptiveModel(ReplayedModel(table), agent, log=folder, explore=0.3)
    requests = [Request(row, "") for row in range(40)]
    now = time.perf_counter()
    model.generate(requests, BUDGETS * 8, [now - row / 10 for row in range(40)])
    model.generate(requests, BUDGETS * 8)
    return agent.decider


class Prepared(ReplayedModel):
    """A first stage takes 500 ms, which an answer counts."""

    first_stage_overlaps = True

    def first_stage(self, request, features=True):
        return replace(super().first_stage(request, features), total_ms=500.0)

    def answer(self, stages, configuration):
        answers = super().answer(stages, configuration)
        return [replace(answer, total_ms=answer.total_ms + 500.0) for answer in answers]


def in_the_background(folder):
    """An answer counts more time than its request takes."""
    agent, table = small_stack()
    with AdaptiveModel(Prepared(table), agent, log=folder) as model:
        for row in range(20):
            request = Request(row, "")
            model.prefetch(request)
            model.answer(request, BUDGETS[row % 5])
    rows = read_log(folder).rows
    # where the stage was not begun in time, the answer runs it
    assert any(row["answer_ms"] > row["total_ms"] + 400 for row in rows)
    return agent.decider


def with_demonstrations(folder):
    torch.manual_seed(0)
    items = [VQAItem(str(n), None, f"What is {n} plus 1?", (str(n + 1),)) for n in range(12)]
    selector = Selector(SelectorConfig(version="v1", width=8), 14)
    model = DemonstratedModel(*tiny_llama(), items, selector, max_new_tokens=2)
    blocks = model.first_stage(Request(None, items[0].question)).features
    features = {name: torch.as_tensor(block).repeat(2, 1) for name, block in blocks.items()}
    knobs = (Knob("shots", (1, 2)),)
    controller = untrained(table_of([[0.0, 1.0]] * 2, [[5.0, 9.0]] * 2, features, knobs=knobs))
    served = AdaptiveModel(model, controller, log=folder, explore=0.3)
    for row in range(10):
        served.answer(Request(None, items[row].question), BUDGETS[row % 5])
    return controller.decider


@pytest.mark.parametrize(
    "write",
    [by_threads, by_coroutines, by_a_model, by_batches, in_the_background, with_demonstrations],
)
def test_no_row_that_a_server_wrote_is_set_aside(write, tmp_path):
    """By true clocks, whatever they say."""
    controller = write(tmp_path)
    log = read_log(tmp_path, controller)
    assert not log.aside
    assert len(log.rows) in (10, 20, 40, 80)


# -- rows that contradict themselves ---------------------------------------------------------------


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The rows of a log of 60 requests, of which some are late."""
    folder = tmp_path_factory.mktemp("rows")
    agent, table = small_stack()
    model = logging_model(folder, agent, table, lambda values: 1.6, tracker=False)
    serve_requests(model, table, 60, label=False)
    rows = read_log(folder).rows
    assert 5 < sum(row["met"] for row in rows) < 55
    return rows


def read(folder, rows):
    """A log with these rows as its controller reads it."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "requests-0.jsonl").write_text(text)
    return read_log(folder, small_stack()[0].decider)


def met_inverted(row):
    return {"met": not row["met"]}


def times(factor, *names):
    return lambda row: {name: row[name] * factor for name in names}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (met_inverted, "`met`"),
        (lambda row: {"met": True, "total_ms": row["budget_ms"] * 3}, "times"),
        (lambda row: {"budget_ms": row["total_ms"] * (0.5 if row["met"] else 2)}, "`met`|times"),
        (times(1e-3, "answer_ms"), "times"),
        (times(1e3, "answer_ms"), "times"),
        (times(0.5, "answer_ms"), "times"),
        (times(1e-3, "total_ms"), "times"),
        (times(1e-3, "answer_ms", "total_ms"), "times"),
        (times(1e3, "limit_ms"), "times"),
        (times(1e-3, "budget_ms"), "times"),
        *((lambda row, wrong=wrong: {"total_ms": wrong}, "times") for wrong in (-1, math.nan, "5")),
        (lambda row: {"total_ms": None}, "times"),
        (lambda row: {"beside_ms": math.inf}, "times"),
        (lambda row: {"beside_ms": "0"}, "times"),
        (lambda row: {"beside_ms": None}, "times"),
    ],
)
@pytest.mark.parametrize("every", [1, 3])
def test_rows_that_contradict_themselves_are_set_aside_and_counted(
    rows, tmp_path, change, reason, every
):
    changed = [row | change(row) if not n % every else row for n, row in enumerate(rows)]
    log = read(tmp_path, changed)
    assert log.aside.total() == 60 // every
    assert all(re.search(reason, each) for each in log.aside)
    assert [row["id"] for row in log.rows] == [r["id"] for n, r in enumerate(rows) if n % every]


def test_of_answers_that_nobody_waited_for_those_count_that_were_still_to_come_at_the_deadline(
    rows, tmp_path
):
    """From nine tenths of a budget on."""
    late = [row for row in rows if not row["met"]][:3]
    early = [row for row in rows if row["total_ms"] < 0.85 * row["budget_ms"]][:2]
    between = [row for row in rows if 0.9 < row["total_ms"] / row["budget_ms"] < 1][:1]
    assert (len(late), len(early), len(between)) == (3, 2, 1)
    changed = [row | {"abandoned": True, "met": False} for row in late + early + between]
    (tmp_path / "labels-0.jsonl").write_text(
        json.dumps({"format": request_log.FORMAT, "id": late[0]["id"], "accuracy": 1.0}) + "\n"
    )
    log = read(tmp_path, [*changed, late[0] | {"id": "answered"}])
    assert len(log.rows) == 5
    assert log.aside == {
        "left before the deadline": 2,
        "a label of an answer that nobody waited for": 1,
    }
    arrays = logged.logged_of(log.rows, small_stack()[0].decider)
    assert arrays.abandoned.sum() == 4
    assert not arrays.labelled.any()
    # what was answered is not both abandoned and on time
    log = read(tmp_path, [row | {"abandoned": True, "met": True} for row in late])
    assert log.aside.total() == 4


def test_an_answer_above_a_limit_counts_as_late_and_its_share_is_said(rows, tmp_path):
    in_time = [row for row in rows if row["met"]][:4]
    over = [row | {"over_limit": n == 1} for n, row in enumerate(in_time[:3])]
    log = read(tmp_path, [*over, in_time[3]])
    assert not log.aside
    assert [row["met"] for row in log.rows] == [True, False, True, True]
    arrays = logged.logged_of(log.rows, small_stack()[0].decider)
    assert arrays.met.tolist() == [True, False, True, True]
    facts = inspect_log(str(tmp_path))
    assert facts["over_limit"] == {"known": 3, "over": 1}
    assert facts["on_time"] == 0.75
    (sentence,) = [each for each in log_sentences(facts) if each.name == "over_limit"]
    assert sentence.fields == {"share": "33.3%", "answers": "3 answers"}
    # a log that does not say it reads as before
    read(tmp_path, in_time)
    facts = inspect_log(str(tmp_path))
    assert (facts["over_limit"]["known"], facts["on_time"]) == (0, 1.0)
    assert "over_limit" not in [each.name for each in log_sentences(facts)]
    assert read(tmp_path, [in_time[0] | {"over_limit": 1}]).aside == {"a damaged row": 1}


def test_times_that_were_rounded_are_no_contradiction(rows, tmp_path):
    rounded = []
    for row in rows:
        rounded.append({k: round(v, 2) if k.endswith("_ms") else v for k, v in row.items()})
    # on the limit itself, rounding decides
    total = rounded[0]["total_ms"]
    for met in (True, False):
        rounded[0] |= {"met": met, "budget_ms": total, "limit_ms": total}
        assert not read(tmp_path, rounded).aside


# -- labels ----------------------------------------------------------------------------------------


class Day:
    """A time of day that is set back, as `time.time` and `time.time_ns` read it."""

    def __init__(self, monkeypatch):
        self.now = 1e9
        monkeypatch.setattr(request_log.time, "time", lambda: self.now)
        monkeypatch.setattr(request_log.time, "time_ns", lambda: round(self.now * 1e9))

    def set_back(self):
        self.now -= 3600


def test_of_two_labels_the_one_sent_later_counts_though_the_clock_was_set_back(
    rows, tmp_path, monkeypatch
):
    day = Day(monkeypatch)
    read(tmp_path, rows)
    first, second, third = (row["id"] for row in rows[:3])
    logs = [RequestLog(tmp_path), RequestLog(tmp_path)]
    # one process, two that take turns, and one that begins later
    for turn, accuracy in enumerate((0.0, 0.25, 0.5, 0.75)):
        logs[0].label(first, accuracy)
        logs[turn % 2].label(second, accuracy)
        day.set_back()
    logs.append(RequestLog(tmp_path))
    logs[0].label(third, 0.0)
    logs[2].label(third, 1.0)
    accuracies = {row["id"]: row["accuracy"] for row in read_log(tmp_path).rows}
    assert [accuracies[name] for name in (first, second, third)] == [0.75, 0.75, 1.0]


def test_labels_of_other_programs_count_by_their_order_in_a_file_and_between_files_by_time(
    rows, tmp_path
):
    read(tmp_path, rows)
    first, second = (row["id"] for row in rows[:2])
    written = {
        "b": [(first, 0.0, 300), (first, 0.5, 100)],
        "a": [(second, 1.0, 500)],
        "c": [(second, 0.0, 400)],
    }
    for file, labels in written.items():
        lines = []
        for name, accuracy, moment in labels:
            about = {"format": request_log.FORMAT, "time": moment, "id": name, "boot": None}
            lines.append(json.dumps(about | {"accuracy": accuracy}) + "\n")
        (tmp_path / f"labels-{file}.jsonl").write_text("".join(lines))
    accuracies = {row["id"]: row["accuracy"] for row in read_log(tmp_path).rows}
    assert (accuracies[first], accuracies[second]) == (0.5, 1.0)


# -- long logs -------------------------------------------------------------------------------------


def write_log(folder, rows, labels, files):
    """Write requests and labels to a few files each, in turn."""
    for kind, lines in (("requests", rows), ("labels", labels)):
        for file in range(files):
            text = "".join(json.dumps(line) + "\n" for line in lines[file::files])
            (folder / f"{kind}-{file}.jsonl").write_text(text)


@settings(max_examples=15)
@given(st.integers(1, 80), st.integers(1, 4), st.lists(st.integers(0, 59), max_size=40))
def test_a_part_of_a_long_log_is_read_as_a_log_of_these_requests_is(rows, most, files, labelled):
    labels = []
    for turn, row in enumerate(labelled):
        about = {"format": request_log.FORMAT, "time": turn, "id": rows[row]["id"]}
        labels.append(about | {"accuracy": turn / 40})
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        write_log(folder, rows, labels, files)
        patch.setattr(logged, "MAX_ROWS", most)
        part = read_log(folder)
        assert len(part.rows) + part.aside.total() == len(rows)
        assert bool(part.aside) == (most < len(rows))
        # the same again, without the others
        ids = {row["id"] for row in part.rows}
        of_part = ([each for each in lines if each["id"] in ids] for lines in (rows, labels))
        write_log(folder, *of_part, files)
        patch.setattr(logged, "MAX_ROWS", len(rows))
        whole = read_log(folder)
    assert whole == (part.rows, Counter(), part.attempts)


def test_a_controller_of_many_configurations_reads_fewer_requests(rows, tmp_path, monkeypatch):
    controller = small_stack()[0].decider
    monkeypatch.setattr(logged, "MAX_CELLS", 20 * len(controller.configurations))
    log = read(tmp_path, rows)
    (reason,) = log.aside
    assert "one request in 3" in reason
    assert len(read_log(tmp_path).rows) == 60
    assert 5 < len(log.rows) < 35


def test_lines_that_are_no_rows_are_counted_and_a_last_one_that_is_cut_off_too(rows, tmp_path):
    lines = [json.dumps(row) for row in rows[:3]]
    text = "\n".join([*lines[:2], "", "{", "[]", lines[2][:50]])
    (tmp_path / "requests-0.jsonl").write_text(text)
    log = read_log(tmp_path)
    assert [row["id"] for row in log.rows] == [row["id"] for row in rows[:2]]
    assert sorted(log.aside.values()) == [1, 3]


# -- files that were compressed --------------------------------------------------------------------


def rotate(path, name=None):
    """Compress a file, as logrotate does."""
    packed = path.with_name(name or f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return packed


@pytest.fixture
def labelled_log(tmp_path):
    """A log of 30 requests and their labels, in three files of each kind."""
    agent, table = small_stack()
    log = RequestLog(tmp_path, rows_per_file=10)
    serve = knobwise.wrap(lambda row, **knobs: row, agent, features=table.blocks, log=log)
    for row in range(30):
        log.label(serve.result(row, 12.0).request_id, 0.5)
    log.close()
    return tmp_path


def test_a_log_whose_files_were_compressed_is_read_as_before(labelled_log, monkeypatch):
    whole = read_log(labelled_log)
    assert (len(whole.rows), whole.aside) == (30, Counter())
    first, second, _ = sorted(labelled_log.glob("requests-*"))
    rotate(first)
    rotate(second, f"{second.name}.2.gz")
    first, second, _ = sorted(labelled_log.glob("labels-*"))
    rotate(first)
    second.rename(labelled_log / f"{second.name}-20261130")
    assert read_log(labelled_log) == whole
    facts = inspect_log(labelled_log)
    assert (facts["requests"], facts["set_aside"]) == (30, {})
    # its lines count towards what is read at most
    monkeypatch.setattr(logged, "MAX_ROWS", 10)
    assert 0 < len(read_log(labelled_log).rows) < 25


def test_a_file_that_is_being_compressed_counts_once(labelled_log):
    whole = read_log(labelled_log)
    for path in [*labelled_log.glob("*.jsonl")]:
        text = path.read_bytes()
        rotate(path)
        path.write_bytes(text)
    assert read_log(labelled_log) == whole


def test_files_of_a_log_that_cannot_be_read_are_named(labelled_log):
    first, second, third = sorted(labelled_log.glob("requests-*"))
    packed = rotate(first)
    # the end is missing
    packed.write_bytes(packed.read_bytes()[:-40])
    second.rename(labelled_log / f"{second.name}.zst")
    third.rename(labelled_log / f"{third.name}.gz")
    log = read_log(labelled_log)
    assert 0 < len(log.rows) < 10
    for name in (packed.name, f"{second.name}.zst", f"{third.name}.gz"):
        assert sum(name in reason for reason in log.aside) == 1
    for path in labelled_log.glob("requests-*.gz"):
        path.unlink()
    with input_error(f"{second.name}.zst"):
        read_log(labelled_log)
