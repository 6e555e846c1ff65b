"""The files of a request log, as they lie there when somebody reads it: written by several
processes, and perhaps renamed, compressed or cut off since."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from knobwise.agents.learning.request_log import FORMAT, REQUESTS

ROTATED = re.compile(r".*\.jsonl([.-]\d+)?(\.gz)?")
"""Names of files that are read: also those that logrotate numbers or dates, and compresses."""
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)
"""What is raised where compressed data is cut off or damaged."""


def rows_in(folder: Path, kind: str, aside: Counter[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of all files of a kind, each with the name of its file. Count in `aside` the
    lines that are no rows."""
    for path in files_of(folder, kind)[0]:
        for line in _lines_of(path, aside):
            if not line.endswith(b"\n"):
                aside["the truncated last line of a file"] += 1
                continue
            try:
                row = json.loads(line)
                if row["format"] != FORMAT:
                    raise ValueError(line)
            except (LookupError, RecursionError, TypeError, ValueError):
                aside["no row of a log"] += 1
            else:
                yield path.name, row


def _lines_of(path: Path, aside: Counter[str]) -> Iterator[bytes]:
    """Yield the lines of a file as far as it can be unpacked; count the rest in `aside`."""
    with _opened(path) as file:
        try:
            yield from file
        except DAMAGED:
            aside[f"the rest of {path.name}, which is damaged"] += 1


def files_of(folder: Path, kind: str) -> tuple[list[Path], list[Path]]:
    """Return the files of a kind that can be read, in the order of their names, and the others."""
    readable = []
    others = []
    for path in sorted(folder.glob(f"{kind}-*")):
        if not ROTATED.fullmatch(path.name):
            others.append(path)
        # a file that is being compressed is there twice
        elif path.suffix != ".gz" or not path.with_suffix("").exists():
            readable.append(path)
    return readable, others


def _opened(path: Path) -> IO[bytes]:
    """Open a file of a log, which is unpacked as it is read."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def count_lines(folder: Path) -> int:
    """Return how many lines the requests of a log have."""
    count = 0
    for path in files_of(folder, REQUESTS)[0]:
        with _opened(path) as file, contextlib.suppress(*DAMAGED):
            parts = iter(functools.partial(file.read, 1 << 20), b"")
            # what comes before the damage counts
            for part in parts:
                count += part.count(b"\n")
    return count
