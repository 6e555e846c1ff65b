"""The log of a deployed controller: what is written, what survives a kill, what is set aside."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replayed import ReplayedModel, logging_model, serve_requests, small_stack

from knobwise.agents.serving.adaptive_model import AdaptiveModel
from knobwise.agents.serving.exploration import Exploration
from knobwise.agents.serving.export import configurations_of
from knobwise.agents.serving.request_log import RequestLog, logged_of, read_log
from knobwise.common.errors import InputError
from knobwise.profiling.measuring.adaptive_model import Request


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of 40 requests, a third of them explored, all labelled."""
    folder = tmp_path_factory.mktemp("log")
    agent, table = small_stack()
    serve_requests(
        logging_model(folder, agent, table, explore=0.3, explore_loss=0.2, seed=0), table, 40
    )
    return folder


def test_a_row_holds_what_the_decision_saw_and_what_came_of_it(tmp_path: Path) -> None:
    agent, table = small_stack()
    model = logging_model(tmp_path, agent, table, explore=0.5, explore_loss=0.3, seed=1)
    results = serve_requests(model, table, 30)
    names, sizes = configurations_of(agent), agent.controller.normaliser.sizes
    log = read_log(tmp_path, names, {agent.decider.digest}, sizes)
    assert not log.aside
    logged = logged_of(log.rows, 12, sizes)
    assert logged.choice.tolist() == [result.choice for result in results]
    assert logged.answer_ms.tolist() == [result.answer.total_ms for result in results]
    assert logged.limit_ms.tolist() == [result.limit_ms for result in results]
    assert logged.met.tolist() == [result.met for result in results]
    assert logged.accuracy.tolist() == [float(result.answer.text) for result in results]
    assert np.allclose(logged.propensity.sum(1), 1)
    assert len({*logged.ids}) == 30
    # before the first answer there is no drift; after it that of the tracker
    assert (logged.offset[0] == 0).all()
    assert results[5].drift is not None
    assert logged.offset[5].tolist() == results[5].drift[0].tolist()
    rows = [
        table.features["image_features"].numpy() == block
        for block in logged.features["image_features"]
    ]
    assert all(each.all(1).any() for each in rows)


def test_a_new_file_is_begun_after_so_many_rows_and_by_every_start(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, rows_per_file=3)
    ids = [log.add({"choice": 0}) for _ in range(7)]
    other = RequestLog(tmp_path)
    ids.append(other.add({"choice": 0}))
    other.label(ids[0], 1)
    log.label(ids[0], 0)
    assert len({*ids}) == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"labels-{n:06d}.jsonl" for n in range(2)),
        *(f"requests-{n:06d}.jsonl" for n in range(4)),
    ]
    with pytest.raises(InputError, match="cannot be written"):
        RequestLog(tmp_path / "requests-000000.jsonl")


def changed(folder: Path, to: Path, **values: Any) -> Path:
    """A copy of a log whose first row has other values."""
    lines = (folder / "requests-000000.jsonl").read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | values)
    to.mkdir(exist_ok=True)
    (to / "requests-000000.jsonl").write_text("\n".join(lines) + "\n")
    return to


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"probability": None}, "without a probability"),
        ({"probability": 0.0}, "a probability outside (0, 1]"),
        ({"probability": 1.5}, "a probability outside (0, 1]"),
        ({"probability": "much"}, "a probability outside (0, 1]"),
        ({"probability": 0.123}, "a probability that the chances of the draw contradict"),
        ({"chances": [2]}, "a probability that the chances of the draw contradict"),
        ({"controller": "0123"}, "of another controller"),
        ({"choice": 12}, "an unknown configuration"),
        ({"choice": -1}, "an unknown configuration"),
        ({"knobs": {"top_k": 5}}, "an unknown configuration"),
        ({"price": 0.5}, "decided at a price"),
        ({"answer_ms": 0}, "times that are not positive and finite"),
        ({"limit_ms": float("nan")}, "times that are not positive and finite"),
        ({"accuracy": 1.5}, "an accuracy outside [0, 1]"),
        ({"features": {"image_features": "AAAA"}}, "a damaged row"),
        ({"features": {"image_features": "AAAAAA=="}}, "features of other shapes"),
        ({"drift": ["AAAAAA==", 1.0]}, "a drift of another shape"),
        ({"drift": [None, 1.0]}, "a damaged row"),
        ({"id": 3}, "a damaged row"),
        ({"format": "another"}, "no row of a log"),
    ],
)
def test_rows_that_cannot_be_used_are_set_aside(
    written: Path, tmp_path: Path, values: dict[str, Any], reason: str
) -> None:
    agent, _ = small_stack()
    about = configurations_of(agent), {agent.decider.digest}, agent.controller.normaliser.sizes
    log = read_log(changed(written, tmp_path, **values), *about)
    assert dict(log.aside) == {reason: 1}
    assert log.lines() == [f"1 set aside: {reason}"]
    assert len(log.rows) == 39


def test_rows_of_earlier_versions_with_a_column_for_a_price_are_read(
    written: Path, tmp_path: Path
) -> None:
    agent, _ = small_stack()
    log = read_log(changed(written, tmp_path / "now"))
    earlier = read_log(changed(written, tmp_path / "then", price=None))
    assert "price" not in log.rows[0]
    assert earlier.rows[0].pop("price") is None
    assert (earlier.rows, earlier.aside) == (log.rows, log.aside)
    assert len(logged_of(earlier.rows, 12, agent.controller.normaliser.sizes).ids) == 40


def test_labels_that_cannot_be_joined_are_set_aside(written: Path, tmp_path: Path) -> None:
    changed(written, tmp_path)
    first = json.loads((tmp_path / "requests-000000.jsonl").read_text().splitlines()[0])["id"]
    log = RequestLog(tmp_path)
    for request_id, accuracy in (
        ("nobody", 1.0),
        (first, 1.5),
        (first, float("nan")),
        (first, 0.0),
        (first, 0.25),
    ):
        log.label(request_id, accuracy)
    read = read_log(tmp_path)
    assert dict(read.aside) == {"a label of an unknown request": 1, "a label outside [0, 1]": 2}
    assert read.rows[0]["accuracy"] == 0.25  # the latest
    with pytest.raises(InputError, match="give the folder of AdaptiveModel"):
        read_log(tmp_path / "nothing")


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    cut=st.integers(0, 20_000),
    noise=st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 255)), max_size=4),
)
def test_torn_and_mutated_logs_are_read_and_every_row_is_counted(
    written: Path, tmp_path: Path, cut: int, noise: list[tuple[int, int]]
) -> None:
    agent, _ = small_stack(20)
    content = bytearray((written / "requests-000000.jsonl").read_bytes()[:cut])
    for place, byte in noise:
        if place < len(content):
            content[place] = byte
    (tmp_path / "requests-000000.jsonl").write_bytes(content)
    log = read_log(tmp_path, configurations_of(agent), None, agent.controller.normaliser.sizes)
    assert len(log.rows) + sum(log.aside.values()) == content.count(b"\n") + (
        bool(content) and content[-1] != 10
    )
    logged = logged_of(log.rows, 12, agent.controller.normaliser.sizes)
    assert ((logged.probability > 0) & (logged.probability <= 1)).all()
    assert np.isfinite(logged.offset).all()


KILLED = """
import json, sys
from knobwise.agents.serving.request_log import RequestLog
log, row = RequestLog(sys.argv[1], rows_per_file=20), json.loads(sys.argv[2])
while True:
    name = log.add(row)
    log.label(name, 1.0)
    print(name, flush=True)
"""


def test_kill_9_while_logging_loses_no_answered_request(written: Path, tmp_path: Path) -> None:
    row = json.loads((written / "requests-000000.jsonl").read_text().splitlines()[0])
    row |= {"id": None}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED, str(tmp_path), json.dumps(row)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        answered = [process.stdout.readline().strip() for _ in range(50)]
        os.kill(process.pid, signal.SIGKILL)
        answered += [line.strip() for line in process.stdout if line.endswith("\n")]
    log = read_log(tmp_path)
    ids = [row["id"] for row in log.rows]
    assert ids[: len(answered)] == answered
    assert len(ids) <= len(answered) + 1
    assert sum(row["accuracy"] is None for row in log.rows) <= 1
    # the log goes on in another file, also after a torn line
    with (tmp_path / "requests-000000.jsonl").open("ab") as file:
        file.write(b'{"torn')
    agent, table = small_stack()
    serve_requests(logging_model(tmp_path, agent, table), table, 3)
    again = read_log(tmp_path)
    assert dict(again.aside) == {"the torn last line of a file": 1}
    assert len(again.rows) == len(log.rows) + 3


def test_a_full_disk_loses_rows_and_no_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, table = small_stack()
    model = logging_model(tmp_path, agent, table)
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, line: write(handle, line[: len(line) // 2]))
    serve_requests(model, table, 2, label=False)
    monkeypatch.undo()
    serve_requests(model, table, 3, label=False)
    log = read_log(tmp_path)
    assert model.log is not None
    assert model.log.lost == 2
    assert len(log.rows) == 3
    assert dict(log.aside) == {"the torn last line of a file": 2}


@pytest.mark.parametrize("together", [False, True])
def test_the_logged_probability_is_that_of_the_draws(tmp_path: Path, together: bool) -> None:
    """The same request, again and again: the shares of the configurations are the logged
    chances."""
    agent, table = small_stack()
    model = logging_model(
        tmp_path, agent, table, explore=0.4, explore_loss=0.3, seed=2, tracker=False
    )
    request, budget = Request(3, ""), 60_000.0
    if together:
        model.generate([request] * 400, budget)
    else:
        for _ in range(400):
            model.answer(request, budget)
    logged = logged_of(read_log(tmp_path).rows, 12, agent.controller.normaliser.sizes)
    chances = logged.propensity[0]
    assert (chances > 0).sum() > 2
    assert chances.max() > 0.6
    assert np.bincount(logged.choice, minlength=12) / 400 == pytest.approx(chances, abs=0.08)
    assert (logged.choice == chances.argmax()).mean() < 0.95


def test_a_fall_back_explores_by_what_static_knows_and_only_then_computes_features(
    tmp_path: Path,
) -> None:
    agent, table = small_stack(falls_back=True)
    model = logging_model(tmp_path, agent, table, explore=0.3, explore_loss=0.2, seed=0)
    serve_requests(model, table, 150)
    rows = read_log(tmp_path).rows
    fallen = [row for row in rows if row["features"] is None]
    explored = [row for row in rows if row["choice"] != row["best"]]
    assert len(fallen) > 60
    assert explored
    assert all(row["choice"] == row["best"] for row in fallen)
    assert all(row["features"] is not None for row in explored)
    assert all(len(row["among"]) >= 1 and sum(row["chances"]) == pytest.approx(1) for row in rows)


def test_exploration_stays_within_its_loss_and_wrong_options_are_refused(tmp_path: Path) -> None:
    agent, table = small_stack()
    model = logging_model(
        tmp_path, agent, table, explore=1.0, explore_loss=0.1, seed=0, tracker=False
    )
    controller = model.controller
    counts = []
    for result in serve_requests(model, table, 60, label=False):
        row = next(row for row in read_log(tmp_path).rows if row["id"] == result.request_id)
        logged = logged_of([row], 12, agent.controller.normaliser.sizes)
        limit = np.array([result.limit_ms])
        (log_probs,) = controller.log_probs(logged.features, limit)
        assert log_probs[row["best"]] == log_probs.max()
        # the policy was taught softmax(40 · utility)
        near = log_probs >= log_probs.max() - 40 * 0.1
        assert near[result.choice]
        counts.append(int(near.sum()))
        assert row["among"] == np.flatnonzero(near).tolist()
        assert row["chances"] == pytest.approx([1 / near.sum()] * near.sum())
    assert 1 < max(counts) < 12
    for options in ({"explore": 1.5}, {"explore": 0.1, "explore_loss": -1.0}):
        with pytest.raises(InputError, match="explore"):
            AdaptiveModel(ReplayedModel(table), agent, **options)


def test_logging_and_exploration_are_not_touched_where_they_are_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def touched(*_: Any, **__: Any) -> None:
        raise AssertionError("called")

    for where, name in ((Exploration, "draw"), (Exploration, "turn"), (RequestLog, "add")):
        monkeypatch.setattr(where, name, touched)
    agent, table = small_stack()
    assert (
        len(serve_requests(AdaptiveModel(ReplayedModel(table), agent), table, 20, label=False))
        == 20
    )
    with pytest.raises(AssertionError, match="called"):
        serve_requests(
            AdaptiveModel(ReplayedModel(table), agent, explore=0.5), table, 1, label=False
        )
