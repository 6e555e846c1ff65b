"""Versions of a deployed controller: one serves, whatever is killed, and a process follows it
between two requests."""

import copy
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from replayed import ReplayedModel, logging_model, serve_requests, small_stack

from knobwise.agents.learning.off_policy import decisions
from knobwise.agents.policy.controller import NumpyController
from knobwise.agents.serving import versions
from knobwise.agents.serving.adaptive_model import AdaptiveModel
from knobwise.agents.serving.request_log import logged_of, read_log
from knobwise.agents.serving.versions import add_version, serve, serving, try_out
from knobwise.agents.stack.deployed import DeployedController
from knobwise.common.errors import InputError
from knobwise.profiling.measuring.adaptive_model import Request


def slower(agent: DeployedController, by: float) -> DeployedController:
    """A controller that decides as if budgets were shorter by a factor of e^`by`."""
    controller = copy.deepcopy(agent.controller)
    controller.network.encoding.mean += by
    return DeployedController(controller, agent.teacher, agent.settled).eval()


def published(folder: Path, agent: DeployedController) -> Path:
    version = add_version(folder, lambda to: agent.export(to / "controller.npz") and None)
    serve(folder, version)
    return version


def test_versions_are_numbered_and_one_serves(tmp_path: Path) -> None:
    agent, _ = small_stack()
    assert serving(tmp_path) is None
    first, second = published(tmp_path, agent), published(tmp_path, slower(agent, 1.0))
    assert (first.name, second.name, serving(tmp_path)) == ("0000", "0001", second)
    serve(tmp_path, first)
    assert serving(tmp_path) == first

    def failing(folder: Path) -> None:
        (folder / "controller.npz").write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        add_version(tmp_path, failing)
    assert sorted(path.name for path in (tmp_path / "versions").iterdir()) == ["0000", "0001"]


def test_a_new_controller_takes_over_between_two_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "EVERY_S", 0.0)
    agent, table = small_stack()
    published(tmp_path, agent)
    model = AdaptiveModel(ReplayedModel(table), agent, tracker=True)
    model.watch(tmp_path / "current")
    serve_requests(model, table, 5)
    old, drift = model.controller, model.tracker.drift
    assert drift is not None
    other = slower(agent, 1.0)
    published(tmp_path, other)
    (result,) = serve_requests(model, table, 1)
    assert model.controller.digest == other.decider.digest != old.digest
    assert result.drift is drift  # what the tracker followed is kept
    assert model.tracker.state()["controller"] == model.controller.digest
    # broken files are refused in a line each, and once
    npz = tmp_path / "versions" / "0001" / "controller.npz"
    for content in (b"half a file", npz.read_bytes()[:-100], b""):
        npz.unlink()
        npz.write_bytes(content)
        caplog.clear()
        serve_requests(model, table, 3)
        assert [record.message.split(" is refused")[0] for record in caplog.records] == [
            f"watch: {tmp_path / 'current' / 'controller.npz'}"
        ]
        assert model.controller.digest == other.decider.digest
    npz.unlink()
    caplog.clear()
    serve_requests(model, table, 2)
    assert len(caplog.records) == 1
    assert model.controller.digest == other.decider.digest
    serve(tmp_path, tmp_path / "versions" / "0000")
    serve_requests(model, table, 1)
    assert model.controller.digest == old.digest
    with pytest.raises(InputError, match="does not exist"):
        model.watch(tmp_path / "nothing.npz")


def test_a_candidate_on_trial_decides_its_share_of_the_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "EVERY_S", 0.0)
    agent, table = small_stack()
    published(tmp_path, agent)
    model = logging_model(tmp_path / "log", agent, table, seed=0, tracker=False)
    model.watch(tmp_path / "current", trial=0.4)
    serve_requests(model, table, 20)
    cautious = slower(agent, 1.0)
    version = add_version(tmp_path, lambda to: cautious.export(to / "controller.npz") and None)
    try_out(tmp_path, version)
    serve_requests(model, table, 400, seed=1)
    assert model.controller.digest == agent.decider.digest  # it does not serve
    try_out(tmp_path, None)
    serve_requests(model, table, 20, seed=2)
    rows = read_log(tmp_path / "log").rows
    assert [row["tried"] is not None for row in rows] == [False] * 20 + [True] * 400 + [False] * 20
    assert all(row["probability"] == 1 for row in rows if row["tried"] is None)
    apart = [row for row in rows[20:420] if row["tried"] != row["best"]]
    assert len(apart) > 100
    for row in apart:
        assert dict(zip(row["among"], row["chances"], strict=True)) == pytest.approx(
            {row["best"]: 0.6, row["tried"]: 0.4}
        )
    assert np.mean([row["choice"] == row["tried"] for row in apart]) == pytest.approx(0.4, abs=0.08)
    # both decide as they would alone
    decided = {"best": agent.decider, "tried": cautious.decider}
    logged = logged_of(rows, 12, agent.controller.normaliser.sizes, model.controller.digest)
    for name, controller in decided.items():
        chosen = decisions(controller, logged.take(np.arange(20, 420)))
        assert np.array_equal(chosen, getattr(logged, name)[20:420])
    # of a controller that serves no more, trials do not count
    assert (logged_of(rows, 12, agent.controller.normaliser.sizes, "another").tried == -1).all()
    serve(tmp_path, version)
    assert not (tmp_path / "candidate").exists()
    batch = model.generate([Request(row, "") for row in range(3)], 12.0)
    assert len(batch) == 3
    for wrong in (-0.1, 1.1):
        with pytest.raises(InputError, match=r"trial=.*: must be from 0 to 1"):
            model.watch(tmp_path / "current", trial=wrong)
    with pytest.raises(InputError, match=r"controller\.npz is a file"):
        model.watch(tmp_path / "current" / "controller.npz", trial=0.5)


SWAPPING = """
import sys
from pathlib import Path
from knobwise.agents.serving.versions import add_version, serve
folder, content = Path(sys.argv[1]), [Path(each).read_bytes() for each in sys.argv[2:]]
while True:
    for each in content:
        serve(folder, add_version(folder, lambda to: (to / "controller.npz").write_bytes(each) and None))
        print("served", flush=True)
"""


def test_kill_9_while_swapping_leaves_the_old_or_the_new_controller(tmp_path: Path) -> None:
    agent, _ = small_stack()
    paths = [tmp_path / "a.npz", tmp_path / "b.npz"]
    digests = set()
    for by, path in zip((0.0, 1.0), paths, strict=True):
        digests.add(slower(agent, by).export(path).digest)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    folder = tmp_path / "out"
    command = [sys.executable, "-c", SWAPPING, str(folder), *map(str, paths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for _ in range(40):
            process.stdout.readline()
            assert NumpyController.load(folder / "current" / "controller.npz").digest in digests
        os.kill(process.pid, signal.SIGKILL)
    assert NumpyController.load(folder / "current" / "controller.npz").digest in digests
    version = published(folder, agent)  # and it goes on, whatever was left behind
    assert serving(folder) == version
