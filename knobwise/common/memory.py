"""What the C library does with memory that was freed."""

from __future__ import annotations

import ctypes
from contextlib import suppress

TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
"""Options of `mallopt`, by glibc's malloc.h."""
LARGEST_MMAP_THRESHOLD = 32 << 20
"""Bytes; glibc takes no more."""
_kept = 0


def keep_freed_memory(size: int) -> None:
    """Tell glibc to keep so many bytes of freed memory for this process.

    By default it gives large blocks, and what is free at the end of its heap, back to the system,
    depending on what was freed before. What is allocated next then begins with page faults: they
    take up to a fifth of a model's time, and a third of a step's. Whoever asks for most is heard;
    other C libraries are left as they are.
    """
    global _kept
    if size <= _kept:
        return
    _kept = size
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(TRIM_THRESHOLD, size)
        libc.mallopt(MMAP_THRESHOLD, min(size, LARGEST_MMAP_THRESHOLD))
