"""The log of a deployed controller: what it did, request by request, in files.

A folder holds `requests-….jsonl` with a line for each request and `labels-….jsonl` with accuracies
that became known later. Only their owner may read them. No other process writes to them, and each
line is a single write. If the process is killed, the kernel keeps what was written: kill -9 costs
at most one line. A row that cannot be written, such as on a full disk, leaves nothing behind.
`knobwise.agents.learning.logged` reads the log.
"""

from __future__ import annotations

import base64
import errno
import itertools
import json
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knobwise.common.checks import share
from knobwise.common.errors import InputError
from knobwise.common.forks import FORKED

FORMAT = "knobwise.RequestLog/1"
REQUESTS = "requests"
LABELS = "labels"
ID = re.compile(r"([0-9a-f]{16})-[0-9]+")
"""What `RequestLog.new_id` makes: the process, and the number of the request in it."""
LOOKED_AT = 64_000_000
"""Bytes of the newest files in which an answer's own id is looked for."""
BLOCK = 65_536
"""Bytes that are read at a time."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""On Linux, what tells one start of this machine from another."""


class RequestLog:
    """Write the log in a folder.

    Threads may share this object. Processes may share the folder: each writes to files of its own,
    and so does one that is forked. The ids of its requests begin with random bytes.

    Args:
        folder: made when it is missing, also if others remove it. Each start begins a new file.
        rows_per_file: rows after which another file is begun.

    Raises:
        InputError: nothing can be written there.
    """

    def __init__(self, folder: str | Path, rows_per_file: int = 10_000) -> None:
        self.folder = Path(folder)
        self._rows_per_file = rows_per_file
        self._files: dict[str, int] = {}
        self.after_fork()
        FORKED.add(self)
        try:
            self._begin(REQUESTS)
        except OSError as error:
            raise InputError(f"log={folder}: cannot be written ({error.strerror})") from error

    def after_fork(self) -> None:
        """Reopen under a process-unique file name after a fork."""
        self.close()
        self._lock = threading.Lock()
        self._boot = BOOT.read_text().strip() if BOOT.exists() else ""
        self._process = os.urandom(8).hex()
        self._requests = itertools.count()
        self._rows: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()

    @property
    def lost(self) -> int:
        """Rows that could not be written, such as on a full disk, or that were in a file when it
        was removed. The requests were answered all the same."""
        return self._lost[REQUESTS]

    @property
    def lost_labels(self) -> int:
        """Labels that were lost in the same ways."""
        return self._lost[LABELS]

    def new_id(self) -> str:
        """Return an id that no other request has."""
        return f"{self._process}-{next(self._requests)}"

    def add(self, row: Mapping[str, Any]) -> str:
        """Write a row, in plain values. Return its id; a row without an id gets a new one."""
        request_id = row.get("id") or self.new_id()
        self._write(REQUESTS, {"time": time.time(), **row, "id": request_id})
        return request_id

    def label(self, request_id: str, accuracy: float) -> bool:
        """Write the accuracy of an answer, 0 to 1, once it is known; return whether it was written.

        Of several labels of a request the one sent last counts, also if the clock was set back
        between them. Raises InputError for any other accuracy."""
        share("label: accuracy", accuracy)
        # all processes of a machine share the time since its start, which nobody can set
        sent = {"time": time.time(), "boot": self._boot, "since_boot_s": time.monotonic()}
        return self._write(LABELS, {**sent, "id": request_id, "accuracy": float(accuracy)})

    def knows(self, request_id: str) -> bool | None:
        """Tell whether `new_id` may have made an id for this log: False for another form; None for
        that of a process, such as one long gone, of which the folder holds no file."""
        match = ID.fullmatch(request_id)
        if match is None:
            return False
        process = match[1]
        if process == self._process or any(self.folder.glob(f"{REQUESTS}-*-{process}.jsonl*")):
            return True
        return None

    def ids_of_answer(self, answer_id: str) -> list[str]:
        """Return the ids of the requests whose answer has this id of its own, which is in a row as
        `answer`. Of a long log the newest files are read, `LOOKED_AT` bytes."""
        needle = json.dumps({"answer": answer_id}, separators=(",", ":"))[1:-1].encode()
        ids = []
        left = LOOKED_AT
        newest_first = sorted(self.folder.glob(f"{REQUESTS}-*.jsonl"), reverse=True)
        for path in newest_first:
            if left <= 0:
                break
            try:
                left -= path.stat().st_size
                rows = [json.loads(line) for line in _lines_with(needle, path)]
            except FileNotFoundError:
                # others may move files away
                continue
            ids += [row["id"] for row in rows if row.get("answer") == answer_id]
        return ids

    def close(self) -> None:
        """Close the files; nothing can be written any more."""
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()

    def _begin(self, kind: str) -> None:
        """Create the next file, for this process alone."""
        if kind in self._files:
            os.close(self._files.pop(kind))
        self._rows[kind] = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        # sorted by name, files are in the order in which they were begun
        path = self.folder / f"{kind}-{time.time_ns()}-{self._process}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        # requests and answers are for who runs this, whatever the umask lets others read
        self._files[kind] = os.open(path, flags, 0o600)

    def _write(self, kind: str, row: Mapping[str, Any]) -> bool:
        line = json.dumps({"format": FORMAT, **row}, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            try:
                if kind in self._files and not os.fstat(self._files[kind]).st_nlink:
                    self._lose(kind, self._rows[kind], "their file was removed")
                    self._rows[kind] = self._rows_per_file
                if kind not in self._files or self._rows[kind] >= self._rows_per_file:
                    self._begin(kind)
                handle = self._files[kind]
                written = os.write(handle, line)
                if written < len(line):
                    # the next row must not continue half a line
                    os.ftruncate(handle, os.fstat(handle).st_size - written)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._rows[kind] += 1
            except OSError as error:
                self._lose(kind, 1, error)
                return False
        return True

    def _lose(self, kind: str, rows: int, reason: object) -> None:
        """Count rows of `requests-…` or `labels-…`; of each kind the first ones are said."""
        if rows and not self._lost[kind]:
            logging.getLogger(__name__).warning(
                "log=%s: %s are lost (%s); these and later ones are counted",
                self.folder,
                "rows" if kind == REQUESTS else kind,
                reason,
            )
        self._lost[kind] += rows


def _lines_with(needle: bytes, path: Path) -> Iterator[bytes]:
    """Yield the whole lines of a file that hold some bytes. A block of it is in memory at a time,
    since many may look at once."""
    rest = b""
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            whole, _, rest = (rest + block).rpartition(b"\n")
            if needle in whole:
                yield from (line for line in whole.split(b"\n") if needle in line)


def pack_floats(values: NDArray[Any]) -> str:
    """Return values as float32 in base64."""
    return base64.b64encode(np.asarray(values, np.float32).tobytes()).decode()


def unpack_floats(text: Any) -> NDArray[Any]:
    """Return what `pack_floats` wrote. Raises TypeError or ValueError for anything else."""
    return np.frombuffer(base64.b64decode(text, validate=True), np.float32)
