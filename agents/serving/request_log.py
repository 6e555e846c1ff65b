"""The log of a deployed controller: what it did, request by request, in files.

A folder holds `requests-….jsonl` with a line for each request and `labels-….jsonl` with accuracies
that became known later. No other process writes to these files, and each line is a single write. If
the process is killed, the kernel keeps what was written: kill -9 costs at most one line. A row that
cannot be written, such as on a full disk, leaves nothing behind.
`knobwise.agents.learning.logged` reads the log.
"""

from __future__ import annotations

import base64
import errno
import itertools
import json
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knobwise.agents.deployed.arrays import Arrays
from knobwise.agents.deployed.controller import Drift, NumpyController
from knobwise.common.checks import share
from knobwise.common.errors import InputError
from knobwise.common.forks import FORKED

FORMAT = "knobwise.RequestLog/1"
REQUESTS = "requests"
LABELS = "labels"
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""On Linux, what tells one start of this machine from another."""


@dataclass(slots=True)
class Result:
    """A request under a budget, from its arrival to its answer."""

    budget_ms: float
    controller: NumpyController = field(repr=False)
    """The controller that decides."""
    drift: Drift
    """The drift that the decision allows for: offsets of ln ms [C] and the factor on their spread;
    None for no drift."""
    explored: bool
    """True if the configuration is drawn."""
    overhead: Any = field(repr=False)
    """The `Overhead` of decisions of this kind."""
    limit_ms: float = 0.0
    """What was left of the budget for the answer, when the decision was made."""
    features: Arrays = field(default_factory=dict, repr=False)
    """Blocks [d]; {} where the guard falls back before they are computed."""
    best: int = 0
    """The choice of the controller, before anything is drawn."""
    expected: Any = None
    """The configuration to answer with, as `Expected`; None before the decision."""
    answer: Any = None
    """The `Answer` of a model, or whatever a callable returned."""
    answer_ms: float = math.nan
    """The time of the answer itself, as the tracker and the log have it."""
    total_ms: float = math.nan
    """waited_ms + overhead_ms − prepared_ms + the time of the answer; NaN if the model gave a time
    that is not possible."""
    waited_ms: float = 0.0
    """The time from its arrival to its end that was not spent on it; 0 if the arrival is
    unknown."""
    overhead_ms: float = 0.0
    """The time that the controller adds: features, decision, setting knobs, tracking, and the calls
    between them; also a first look that the answer does not continue from."""
    decision_us: float = 0.0
    """The time in which the whole batch was decided, a part of the overhead."""
    prepared_ms: float = 0.0
    """The time of the first stage that passed before the answer was asked for, see
    `AdaptiveModel.prefetch`."""
    request_id: str | None = None
    """The id of its row in the log; None without a log."""

    @property
    def looks(self) -> bool:
        """True if features are wanted."""
        return self.expected is None or self.explored

    @property
    def choice(self) -> int:
        """The controller's index of the configuration."""
        return self.expected[0]

    @property
    def configuration(self) -> dict[str, Any]:
        """The knobs of the answer."""
        return self.controller.configuration(self.choice)

    @property
    def met(self) -> bool:
        """True if the request was answered on time."""
        return self.total_ms <= self.budget_ms  # not if that is NaN


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
        """Begin without files, under a name that no other process has."""
        self.close()
        self._lock = threading.Lock()
        self._boot = BOOT.read_text().strip() if BOOT.exists() else ""
        self._process = os.urandom(8).hex()
        self._requests = itertools.count()
        self._rows: Counter[str] = Counter()
        self.lost = 0
        """Rows that could not be written, such as on a full disk, or that were in a file when it
        was removed. The requests were answered all the same."""

    def add(self, row: Mapping[str, Any]) -> str:
        """Write a row, see `row_of`. Return its id; a row without an id gets a new one."""
        request_id = row.get("id") or f"{self._process}-{next(self._requests)}"
        self._write(REQUESTS, {"time": time.time(), **row, "id": request_id})
        return request_id

    def label(self, request_id: str, accuracy: float) -> None:
        """Write the accuracy of an answer, 0 to 1, once it is known.

        Of several labels of a request the one sent last counts, also if the clock was set back
        between them. Raises InputError for any other accuracy."""
        share("label: accuracy", accuracy)
        # all processes of a machine share the time since its start, which nobody can set
        sent = {"time": time.time(), "boot": self._boot, "since_boot_s": time.monotonic()}
        self._write(LABELS, {**sent, "id": request_id, "accuracy": float(accuracy)})

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
        self._files[kind] = os.open(path, flags, 0o666)

    def _write(self, kind: str, row: Mapping[str, Any]) -> None:
        line = json.dumps({"format": FORMAT, **row}, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            try:
                if kind in self._files and not os.fstat(self._files[kind]).st_nlink:
                    self._lose(self._rows[kind], "their file was removed")
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
                self._lose(1, error)

    def _lose(self, rows: int, reason: object) -> None:
        if rows and not self.lost:
            logging.getLogger(__name__).warning(
                "log=%s: rows are lost (%s); these and later ones are counted", self.folder, reason
            )
        self.lost += rows


def row_of(result: Result, chances: Mapping[int, float]) -> dict[str, Any]:
    """Return a row of the log in plain values.

    `beside_ms` is the time of all but the answer, by which a reader sees whether the other two
    times of a row still belong together. It is negative where a first stage that the answer counts
    was prepared before the request came.

    Args:
        result: the request and its answer.
        chances: configuration → probability, for all that could have been drawn.
    """
    drift = None
    if result.drift is not None:
        drift = [packed(result.drift[0]), float(result.drift[1])]
    return {
        "controller": result.controller.digest,
        "choice": result.choice,
        "knobs": result.configuration,
        "probability": chances[result.choice],
        "among": list(chances),
        "chances": list(chances.values()),
        "best": result.best,
        "budget_ms": float(result.budget_ms),
        "limit_ms": float(result.limit_ms),
        "features": {name: packed(block) for name, block in result.features.items()} or None,
        "log_latency": result.expected[1],
        "drift": drift,
        "answer_ms": result.answer_ms,
        "beside_ms": result.total_ms - result.answer_ms,
        "total_ms": result.total_ms,
        "met": bool(result.met),
    }


def packed(values: NDArray[Any]) -> str:
    """Return values as float32 in base64."""
    return base64.b64encode(np.asarray(values, np.float32).tobytes()).decode()


def unpacked(text: Any) -> NDArray[Any]:
    """Return what `packed` wrote. Raises TypeError or ValueError for anything else."""
    return np.frombuffer(base64.b64decode(text, validate=True), np.float32)
