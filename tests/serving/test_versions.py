"""Versions of a deployed controller: one serves, whatever is killed, and a process follows it
between two requests."""

import copy

import pytest
from helpers import input_error
from replayed import ReplayedModel, child, serve_requests, small_stack

from knobwise.agents import DeployedController, NumpyController
from knobwise.serving import AdaptiveModel, versions
from knobwise.serving.versions import add_version, serve_version, serving_version


def slower(agent):
    """A controller that decides as if budgets were shorter by a factor of e."""
    controller = copy.deepcopy(agent.controller)
    controller.network.encoding.mean += 1.0
    return DeployedController(controller, agent.teacher, agent.calibration).eval()


def published(folder, agent):
    version = add_version(folder, lambda to: agent.export(to / "controller.npz") and None)
    serve_version(folder, version)
    return version


def test_versions_are_numbered_and_one_serves(tmp_path):
    agent, _ = small_stack()
    assert serving_version(tmp_path) is None
    first = published(tmp_path, agent)
    second = published(tmp_path, slower(agent))
    assert (first.name, second.name, serving_version(tmp_path)) == ("0000", "0001", second)
    serve_version(tmp_path, first)
    assert serving_version(tmp_path) == first

    def failing(folder):
        (folder / "controller.npz").write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        add_version(tmp_path, failing)
    assert {path.name for path in (tmp_path / "versions").iterdir()} == {"0000", "0001"}


def test_a_new_controller_takes_over_between_two_requests(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(versions, "EVERY_S", 0.0)
    agent, table = small_stack()
    first = published(tmp_path, agent)
    model = AdaptiveModel(ReplayedModel(table), agent)
    with input_error("nothing.npz"):
        model.watch(tmp_path / "nothing.npz")
    model.watch(tmp_path / "current")
    serve_requests(model, table, 5)
    drift = model.tracker.drift
    other = slower(agent)
    npz = published(tmp_path, other) / "controller.npz"
    (result,) = serve_requests(model, table, 1)
    assert model.controller.digest == other.decider.digest != agent.decider.digest
    assert result.drift is drift  # what the tracker followed is kept
    assert model.tracker.state()["controller"] == model.controller.digest
    # broken files, and a missing one, are refused in a line each, and once
    for content in (b"half a file", npz.read_bytes()[:-100], b"", None):
        npz.unlink()
        if content is not None:
            npz.write_bytes(content)
        caplog.clear()
        serve_requests(model, table, 3)
        assert len(caplog.records) == 1
        assert str(tmp_path / "current/controller.npz") in caplog.text
        assert model.controller.digest == other.decider.digest
    serve_version(tmp_path, first)
    serve_requests(model, table, 1)
    assert model.controller.digest == agent.decider.digest


SWAPPING = """
import sys
from pathlib import Path
from knobwise.serving.versions import add_version, serve_version
folder, content = Path(sys.argv[1]), [Path(path).read_bytes() for path in sys.argv[2:]]
while True:
    for npz in content:
        write = lambda to: (to / "controller.npz").write_bytes(npz) and None
        serve_version(folder, add_version(folder, write))
        print("served", flush=True)
"""


def test_kill_9_while_swapping_leaves_the_old_or_the_new_controller(tmp_path):
    agent, _ = small_stack()
    agents = {"a.npz": agent, "b.npz": slower(agent)}
    digests = [agents[name].export(tmp_path / name).digest for name in agents]
    current = tmp_path / "out/current/controller.npz"
    with child(SWAPPING, "out", "a.npz", "b.npz", cwd=tmp_path) as process:
        for _ in range(40):
            process.stdout.readline()
            assert NumpyController.load(current).digest in digests
        process.kill()
    assert NumpyController.load(current).digest in digests
    version = published(tmp_path / "out", agent)  # and it goes on, whatever was left behind
    assert serving_version(tmp_path / "out") == version
