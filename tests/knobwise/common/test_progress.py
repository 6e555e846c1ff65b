"""What a person sees of long work: lines, bars, and what several processes do and leave when they
are stopped."""

import multiprocessing
import os
import pty
import re
import sys
import termios
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout, suppress
from types import SimpleNamespace

import pytest
from commands import visible
from pieces import work

from knobwise.common import progress as module
from knobwise.common.progress import progress


@pytest.fixture
def clock(monkeypatch):
    output = SimpleNamespace(now=0.0)
    output.monotonic = lambda: output.now
    monkeypatch.setattr(module, "time", output)
    return output


class Terminal:
    """A pseudo-terminal. Each test puts it in the place of stderr: pytest puts its stderr there
    after the fixtures."""

    def __init__(self):
        self.reader, writer = pty.openpty()
        termios.tcsetwinsize(writer, (24, 100))
        os.set_blocking(self.reader, False)
        self.stderr = os.fdopen(writer, "w", buffering=1)

    def visible(self):
        """What was written since the last call."""
        output = b""
        with suppress(BlockingIOError):
            while part := os.read(self.reader, 65536):
                output += part
        return visible(output)


@pytest.fixture
def terminal(monkeypatch):
    output = Terminal()
    for name, value in {"TERM": "xterm", "COLUMNS": "100", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    yield output
    output.stderr.close()
    os.close(output.reader)


# -- without a terminal ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "ticks", "lines"),
    [
        (
            {"total": 100, "every_s": 60},
            [(2, done) for done in range(1, 101)],
            ["30/100, 2 min left", "60/100, 80 s left", "90/100, 20 s left", "100/100, done in 3 min"],
        ),
        ({"total": 2, "every_s": float("inf")}, [(1, 1), (1, 2), (1, 2)], ["2/2, done in 2 s"]),
        ({"total": 4, "every_s": 0}, [(0.9, 3)], ["3/4, 1 s left"]),
        ({"total": 1000, "done": 900, "every_s": 0}, [(10, 910)], ["910/1000, 90 s left"]),
        ({"total": 4, "quiet_s": 2}, [(0.025, 4)], []),
        ({"total": 4, "quiet_s": 2}, [(3, 4)], ["4/4, done in 3 s"]),
        ({"total": 10}, [(3600, 1)], ["1/10, 9.0 h left"]),
    ],
    ids=["now and then", "the end once", "no 0 s", "resumed", "short", "longer", "hours"],
)  # fmt: skip
def test_without_a_terminal_it_says_a_plain_line_now_and_then(
    settings, ticks, lines, capsys, clock
):
    with progress("work", **settings) as tick:
        for seconds, done in ticks:
            clock.now += seconds
            tick(done, "loss 0.50")
    assert capsys.readouterr().err.splitlines() == [f"work: {line} · loss 0.50" for line in lines]


def test_a_stderr_that_is_gone_does_not_matter(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    broken, closed = os.fdopen(writer, "w", buffering=1), open(os.devnull, "w")  # noqa: SIM115
    closed.close()
    for gone in (None, closed, broken):
        monkeypatch.setattr(sys, "stderr", gone)
        with progress("training", total=3, every_s=0) as tick:
            for done in range(1, 4):
                tick(done, "")
    with pytest.raises(BrokenPipeError):  # what was to be survived
        broken.close()


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE", "TERM"])
def test_forced_colours_make_no_terminal_and_a_dumb_one_gets_plain_lines(
    name, terminal, clock, monkeypatch, capsys
):
    monkeypatch.setenv(name, "dumb" if name == "TERM" else "1")
    stderr = terminal.stderr if name == "TERM" else sys.stderr
    with redirect_stderr(stderr), progress("training", total=2) as tick:
        tick(2, "")
    lines = capsys.readouterr().err + terminal.visible()
    assert lines.strip() == "training: 2/2, done in 0 s"


# -- in a terminal ---------------------------------------------------------------------------------


def test_a_bar_says_title_count_time_left_and_the_note(terminal, clock):
    with redirect_stderr(terminal.stderr), progress("seed=[3]", total=400, done=100) as tick:
        assert re.search(r"seed=\[3\] .* 100/400 time left unknown", terminal.visible())
        clock.now += 10
        tick(300, "[red]GRPO[/] · best validation utility 0.6431")  # no markup
        visible = terminal.visible()
        assert re.search(r"seed=\[3\] [━╸╺]+ 300/400 5 s left \[red\]GRPO\[/\] · best", visible)
        assert max(map(len, visible.splitlines())) <= 100


def test_a_finished_bar_stays_with_the_time_that_it_took(terminal, clock):
    with redirect_stderr(terminal.stderr), progress("measuring", total=2) as tick:
        for done in (1, 2):
            clock.now += 0.01  # too soon to be drawn anew
            tick(done, "last")
    assert "2/2 done in 0 s last" in terminal.visible().splitlines()[-2]


def test_a_bar_within_a_bar_goes_when_it_is_done(terminal, clock):
    with redirect_stderr(terminal.stderr), progress("seeds", total=2) as outer:
        for seed in range(2):
            with progress(f"seed {seed}", total=2) as inner:
                clock.now += 1
                inner(1, "")
                lines = terminal.visible()
                assert "seeds" in lines
                assert f"seed {seed} " in lines
            clock.now += 1
            outer(seed + 1, "")
            assert re.search(rf"seeds [━╸╺]+ {seed + 1}/2", terminal.visible())
    assert "seed 1" not in terminal.visible()


def test_what_goes_into_a_file_stays_there_while_a_bar_is_drawn(terminal, clock, tmp_path):
    out, bar = (tmp_path / "out").open("w"), progress("measuring", total=2)
    with out, redirect_stdout(out), redirect_stderr(terminal.stderr), bar as tick:
        tick(1, "")
        print("result 0.5")
    assert (tmp_path / "out").read_text() == "result 0.5\n"
    assert "result" not in terminal.visible()


def test_a_terminal_that_goes_away_does_not_matter(monkeypatch):
    gone = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", gone.stderr)
    done = 0
    with progress("outer", total=1), progress("training", total=3) as tick:
        tick(1, "")
        assert "training" in gone.visible()
        os.close(gone.reader)
        time.sleep(0.11)  # so that it is drawn anew
        for done in (2, 3):
            tick(done, "")
    assert done == 3
    with progress("again", total=1) as tick:
        tick(1, "")
    with pytest.raises(OSError, match="Input/output error"):  # what was to be survived
        gone.stderr.close()


# -- of several processes --------------------------------------------------------------------------


def test_another_process_writes_plain_lines(terminal, capfd):
    with (
        redirect_stderr(terminal.stderr),
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        assert pool.submit(work, 4).result() == 4
    assert re.search(
        r"^worker 4: 3/3, done in \d+ s · note 4$", capfd.readouterr().err, re.MULTILINE
    )
    assert terminal.visible() == ""
