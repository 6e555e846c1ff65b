"""What a person sees: the table of results at the width of the terminal, and the first and last
lines of a run."""

import os
import pty
import re
import shlex
import subprocess
from contextlib import suppress
from io import StringIO

import pytest
from commands import COMMAND, OPTIMISER, TABLE, VARIABLES, visible, words_of, write_table
from rich.console import Console

from knobwise.experiments.evidence.task import DEADLINE
from knobwise.experiments.report.tables import MINOR, Table, print_table

HEADER = ["policy", *(metric.name for metric in DEADLINE.metrics)]
CELLS = {
    "utility": "0.738\n[0.709, 0.765]",
    "gap_closed": "-131%\n[-160%, -103%]",
    "latency_ms_mean": "2.79 ms",
    "satisfaction": "85.4%",
    "satisfaction_feasible": "94.0%",
    "decision_us_p50": "1,410 µs",
}
"""Of other metrics a score."""
VALUES = [CELLS.get(metric.key, "0.787") for metric in DEADLINE.metrics]
ROWS = [["teacher (the stack itself)", *VALUES], ["random", *VALUES]]


def printed(width, terminal=True):
    out = StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    print_table(console, Table(HEADER, ROWS, [0]))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 110, 180])
def test_a_terminal_gets_what_matters_and_says_what_it_leaves_out(width):
    lines = printed(width)
    assert max(map(len, lines)) <= width
    # a line may break inside a title
    *table, last = " ".join(" ".join(lines).split()).partition("(left out")
    text = "".join(table)
    titles = " ".join(title for title in HEADER if title not in MINOR)
    assert set(titles.split()) <= set(text.split())
    for left_out in (*MINOR, "intervals"):
        assert left_out in last
    for values in ("-131%", "85.4%", "1,410 µs"):
        assert values in text
    for values in ("2.79 ms", "94.0%", "[0.709"):
        assert values not in text


def test_a_file_gets_everything():
    text = " ".join(printed(80, terminal=False))
    assert all(title in text for title in HEADER)
    assert "[-160%, -103%]" in text


def test_a_run_in_a_terminal_says_what_it_does_and_what_to_do_next(home):
    write_table(90)
    more = "experiment=lean baselines=false seeds=[0,1] tracking=offline name=a"
    more += " policy.experts=[ridge] policy.fold_networks=2"
    words = words_of("train", TABLE, OPTIMISER, more)
    controller, terminal = pty.openpty()
    environment = {**os.environ, **VARIABLES, "COLUMNS": "80", "TERM": "xterm"}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    with subprocess.Popen([*COMMAND, *words], env=environment, **streams) as run:
        os.close(terminal)
        content = b""
        with suppress(OSError):  # Linux says so that the other side is closed
            while chunk := os.read(controller, 1 << 16):
                content += chunk
    os.close(controller)
    assert run.returncode == 0
    lines = [line.strip() for line in visible(content).split("\n") if line.strip()]
    assert lines[0].startswith("lean: What do the experts add?")
    assert lines[1].startswith("training with seeds=[0, 1]")
    joined = "\n".join(lines)
    assert re.search(r"^seeds .*\d+/\d+ .* left", joined, re.MULTILINE)
    best = r"^seed (\d): best validation utility 0\.\d{4} at iteration \d+ of \d+ "
    seeds = re.findall(rf"{best}\((?:before|during) GRPO\)", joined, re.MULTILINE)
    assert set(seeds) == {"0", "1"}
    last = joined[joined.index("report: ") :].splitlines()
    assert "wandb sync runs/lean/a/wandb/offline-run-*" in " ".join(last)
    assert last[-1].startswith("next: ")
    # 18 samples to judge by show no gain, so it is the profile that one looks at next
    assert " ".join(last).endswith(shlex.join(["knobwise", "inspect", *TABLE]))
