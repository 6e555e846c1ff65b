"""Work in several processes: what comes back, and how it ends when it is stopped."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from commands import Capture, wait_for

from knobwise.common.errors import InputError
from knobwise.common.interruption import stopped_by_signals
from knobwise.common.processes import in_processes

LONG_S = 60


pytestmark = pytest.mark.usefixtures("_signals_arrive")


def work(folder: Path, what: str) -> str:
    """Leaves a file with its process's number, and does what it is told."""
    (folder / what).write_text(str(os.getpid()))
    if what == "wrong":
        raise InputError("something wrong")
    if what.startswith("long"):
        try:
            time.sleep(LONG_S)
        except KeyboardInterrupt as stop:
            stop.add_note(f"{what} was saved")
            raise
    return f"{what} done"


def test_each_piece_is_done_once_by_another_process(tmp_path: Path, capsys: Capture) -> None:
    in_processes("pieces", work, [(tmp_path, name) for name in ("a", "b", "c")], 2, done=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
    assert str(os.getpid()) not in {path.read_text() for path in tmp_path.iterdir()}
    assert "pieces: 7/7" in capsys.readouterr().err


def test_nothing_to_do_starts_no_process(tmp_path: Path) -> None:
    in_processes("pieces", work, [], 2, done=4)


def test_a_signal_to_this_process_stops_all_and_what_waits_is_not_begun(tmp_path: Path) -> None:
    def press() -> None:
        wait_for(lambda: len(list(tmp_path.iterdir())) >= 2)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as stop, stopped_by_signals():
        in_processes("pieces", work, [(tmp_path, f"long {number}") for number in range(4)], 2)
    thread.join()
    assert time.monotonic() - start < LONG_S
    assert stop.value.args == (signal.SIGINT,)
    begun = sorted(path.name for path in tmp_path.iterdir())
    assert len(begun) < 4
    assert {f"{name} was saved" for name in begun[:2]} <= set(stop.value.__notes__)


def test_a_worker_that_a_scheduler_stops_stops_all(tmp_path: Path) -> None:
    def stop() -> None:
        wait_for(lambda: (tmp_path / "long 0").exists() and (tmp_path / "long 0").read_text())
        time.sleep(0.1)
        os.kill(int((tmp_path / "long 0").read_text()), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as stopped:
        in_processes("pieces", work, [(tmp_path, "long 0"), (tmp_path, "long 1")], 2)
    thread.join()
    assert stopped.value.args == (signal.SIGTERM,)
    assert "long 0 was saved" in stopped.value.__notes__


def test_an_error_stops_the_others(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(InputError, match="something wrong"):
        in_processes("pieces", work, [(tmp_path, "long 0"), (tmp_path, "wrong")], 2)
    assert time.monotonic() - start < LONG_S
