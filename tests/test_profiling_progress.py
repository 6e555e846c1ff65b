from __future__ import annotations

import pytest

from knobwise.profiling import progress as module
from knobwise.profiling.progress import progress


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_without_a_terminal_it_says_a_plain_line_once_in_a_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    with progress("measuring", total=100, every_s=60) as tick:
        for done in range(1, 101):
            clock.now += 2
            tick(done, "")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "measuring: 30/100, 2 min left",
        "measuring: 60/100, 80 s left",
        "measuring: 90/100, 20 s left",
        "measuring: 100/100, 0 s left",
    ]


def test_work_from_an_earlier_session_does_not_flatter_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    with progress("training", total=1000, done=900, every_s=0) as tick:
        clock.now += 10
        tick(910, "loss 0.50")
    assert capsys.readouterr().err == "training: 910/1000, 90 s left loss 0.50\n"
