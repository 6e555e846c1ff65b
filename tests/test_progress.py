from __future__ import annotations

import pytest

from knobwise.envs import progress as module
from knobwise.envs.progress import progress


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


@pytest.mark.parametrize("terminal", [False, True])
def test_short_work_says_nothing_and_longer_work_does(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")
    for seconds, says in ((0.1, False), (3.0, True)):
        with progress("reading", total=4, quiet_s=2) as tick:
            for done in range(1, 5):
                clock.now += seconds / 4
                tick(done, "")
        assert ("reading" in capsys.readouterr().err) == says
