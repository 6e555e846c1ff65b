"""How many requests are under way in a process, in a file that outlives it.

running-…/         one for each server that runs, locked by it and its workers
    open-….bin     one for each worker: how many requests are under way, a number in a mapped file

The kernel keeps what was written when a process is killed by kill −9. The next one counts what was
cut off. The files are in memory where that can be had, as on Linux: a write to a mapped file waits
for the disk while the kernel writes the same page, and with it all streams would.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

COUNT = struct.Struct("<q")
MEMORY = Path("/dev/shm")
"""Where files are in memory."""


class UnderWay:
    """The number of requests under way in one process.

    Args:
        folder: of the server.

    Attributes:
        count: how many there are.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / f"open-{os.getpid()}-{os.urandom(4).hex()}.bin"
        path.write_bytes(COUNT.pack(0))
        # a write to memory, not a call of the system
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), COUNT.size)
        self.count = 0

    def add(self, change: int) -> None:
        """Count a request that begins, 1, or ends, −1."""
        self.count += change
        COUNT.pack_into(self._memory, 0, self.count)


def cut_off(folder: Path, process: str = "*") -> int:
    """Return how many requests were under way in processes that are gone, and forget them.

    Args:
        folder: of a server.
        process: the id of a process; all of them by default.
    """
    total = 0
    for path in folder.glob(f"open-{process}-*.bin"):
        content = path.read_bytes()
        # a disk that was full may have left it empty
        if len(content) == COUNT.size:
            total += COUNT.unpack(content)[0]
        path.unlink()
    return total


def place_of(log: Path) -> Path:
    """Return where servers with a log note what is under way: in memory, or in the log."""
    name = hashlib.sha256(str(log.resolve()).encode()).hexdigest()[:16]
    place = MEMORY / f"knobwise-{os.getuid()}-{name}"
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        # everybody may write there, so another user could have made it first
        if place.stat().st_uid == os.getuid() and not place.is_symlink():
            return place
    except OSError:
        pass
    return log


@contextmanager
def running(log: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folder of a server that runs, and how many requests servers before it with the same
    log left unfinished because they were killed. The folder goes when the block ends.

    Args:
        log: the folder of the log, which exists.
    """
    broken = 0
    place = place_of(log)
    for folder in place.glob("running-*"):
        # of a server that still runs, it is locked
        with _open(folder) as handle:
            if handle is not None and _locks(handle):
                broken += cut_off(folder)
                shutil.rmtree(folder, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(dir=place, prefix="running-"))
    try:
        # forked processes share the lock, which the kernel opens when the last of them is gone
        with _open(folder) as handle:
            if handle is not None:
                _locks(handle)
            yield folder, broken
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        # unless another server with this log is at work
        if place != log:
            with suppress(OSError):
                place.rmdir()


@contextmanager
def _open(folder: Path) -> Iterator[int | None]:
    """Yield a descriptor of a folder; None if it is gone."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)


def _locks(handle: int) -> bool:
    """Lock a folder, and return True unless another process has locked it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
