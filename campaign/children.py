"""Commands in processes of their own, forked from one that has imported everything, which die where
a trial wants."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from itertools import count, dropwhile
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from campaign import ROOT

PRELOADED = [
    "campaign.workloads",
    "campaign.formats",
    "hydra.compose",
    "torch.utils.tensorboard",
    "torchrl.collectors",
    "torchrl.weight_update",
    "knobwise.experiments.train.finish",
    "knobwise.experiments.train.judging",
    "knobwise.experiments.train.selector",
    "knobwise.experiments.report.report",
    "knobwise.experiments.deploy.update",
]
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "POLARS_MAX_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
CHANGES = re.compile(r"os\.(rename|remove|rmdir|mkdir|chmod|symlink|link|truncate)")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
LIMIT_S = 300
ORPHANS_S = 60
"""Processes that a killed command leaves must end by themselves within this time."""
_starting = threading.Lock()


class Ended(NamedTuple):
    """A command that has ended. `status` is −9 if it was killed, None if it was still at work at
    its time limit."""

    status: int
    out: str
    err: str
    seconds: float
    writes: int = 0
    """Changes of files below its folder; 0 for a process that did not come to its end."""

    def __str__(self):
        return f"{self.status} {self.err.strip()[-400:]!r}"

    @property
    def traceback(self):
        expected = (0, 1, 2, 130, 143, -9, None)
        return "Traceback (most recent call last)" in self.err or self.status not in expected

    @property
    def complaint(self):
        """The lines that say what was wrong."""
        lines = self.err.rstrip("\n").split("\n")
        return [*dropwhile(lambda line: not line.startswith("knobwise: "), lines)]


def prepare_server():
    """Import everything once, in the process that the others are forked from."""
    os.environ |= VARIABLES | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
    multiprocessing.set_forkserver_preload(PRELOADED)


def run(
    work,
    folder,
    die_at=0,
    die_after_s=None,
    number=signal.SIGKILL,
    alone=False,
    fresh=False,
    limit_s=LIMIT_S,
):
    """Run a command, or call a function, in a folder.

    Args:
        die_at: killed before the k-th change of a file, in the middle if that is `os.write`; 0 for
            never.
        die_after_s, number: seconds after which it gets this signal, if it is still at work.
        alone: only the process itself is killed, and what it started must notice; else all of its
            session.
        fresh: in a new interpreter, which joblib and Ray start their processes from.
    """
    names = ("out", "err", "writes")
    printed = [Path(tempfile.mkstemp(prefix=f"campaign-{name}-")[1]) for name in names]
    start = time.monotonic()
    process = _started(work, folder, printed, die_at, fresh)
    try:
        if die_after_s is not None and _status(process, die_after_s) is None:
            single = alone or number != signal.SIGKILL
            kill([process.pid] if single else session(process.pid), number)
        status = _status(process, limit_s)
        if status is None or not alone:
            kill(session(process.pid))
        _status(process, ORPHANS_S)
        last = time.monotonic() + ORPHANS_S
        while session(process.pid):
            if time.monotonic() > last:
                status = None
                kill(session(process.pid))
            time.sleep(0.05)
        out, err, writes = (path.read_text(errors="replace") for path in printed)
        return Ended(status, out, err, time.monotonic() - start, int(writes or 0))
    finally:
        for path in printed:
            path.unlink()


def _started(work, folder, printed, die_at, fresh):
    about = work, str(folder), list(map(str, printed)), die_at
    if fresh:
        command = [sys.executable, "-m", "campaign.children", json.dumps(about)]
        return subprocess.Popen(command, cwd=ROOT / "tests")
    process = multiprocessing.get_context("forkserver").Process(target=_work, args=about)
    with _starting:
        process.start()
    return process


def _status(process, seconds):
    """The exit status, as soon as there is one; None after this time without."""
    if isinstance(process, BaseProcess):
        process.join(seconds)
        return process.exitcode
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def session(leader):
    """The living processes of the session that a process began, itself first."""
    living = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, number = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(number) == leader and state not in "ZX":
            living.append(int(path.parent.name))
    return sorted(living, key=lambda process: process != leader)


def kill(processes, number=signal.SIGKILL):
    """Send a signal to those that still live."""
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def _work(work, folder, printed, die_at):
    os.setsid()
    os.chdir(folder)
    os.environ |= VARIABLES
    for number, path in enumerate(printed[:2], 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import knobwise.__main__

    sys.modules["__main__"], sys.argv = knobwise.__main__, [str(knobwise.__main__.__file__)]
    changes = count(1)
    die_at_change(changes, folder, die_at)
    status = 0
    try:
        if callable(work):
            work()
        else:
            sys.argv += work
            status = knobwise.__main__.main(work)
    finally:
        Path(printed[2]).write_text(str(next(changes) - 1))
        sys.stdout.flush()
        sys.stderr.flush()
    sys.exit(status)


def die_at_change(changes, folder, number):
    """Count what this process changes below a folder, and kill it before the change of this
    number."""
    write = os.write

    def watch(event, values):
        if event == "open":
            path, flags = values[0], values[2]
            counted = isinstance(flags, int) and flags & WRITING
        else:
            path, counted = (values or (None,))[0], CHANGES.fullmatch(event)
        if counted and isinstance(path, str | bytes | os.PathLike):
            place = os.path.abspath(os.fsdecode(path))
            if place.startswith(folder + os.sep) and next(changes) == number:
                os.kill(os.getpid(), signal.SIGKILL)

    def written(handle, content):
        if handle > 2 and next(changes) == number:
            write(handle, bytes(content)[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(handle, content)

    sys.addaudithook(watch)
    os.write = written


if __name__ == "__main__":
    _work(*json.loads(sys.argv[1]))
