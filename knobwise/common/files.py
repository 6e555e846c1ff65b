"""Writing files so that a reader never meets half of one."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import lock_descriptor

from knobwise.common.errors import InputError

FULL_BYTES = 64 * 1024
"""Where a writer failed and less is free than this, the disk is full."""
FULL = (errno.ENOSPC, errno.EDQUOT)
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


def refused_by_system(error: OSError) -> tuple[int, str] | None:
    """The exit status and a line for a full disk (1: nothing that was given is wrong) and for what may not be read or
    written (2); None for any other error, which is one of the program."""
    place = f"{error.filename}: " if error.filename else ""
    if error.errno in FULL:
        return 1, f"{place}{error.strerror}; make room, then give the same command again"
    if error.errno in REFUSED:
        return 2, f"{place}{error.strerror}; choose a place that can be read and written"
    return None


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; rename it into place when the block ends well, remove it when it fails.

    The folder is made when it is missing. The temporary file keeps the suffix, for writers that look at it.

    Raises:
        InputError: nothing can be written there; before the block begins.
        OSError: the disk is full, also where the writer says so by an error of its own, as torch does.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path}: is a folder, cannot be written as a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes private files; what we leave behind should be as readable as any other new file
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    except InputError:
        raise
    except Exception as error:
        if path.parent.exists() and shutil.disk_usage(path.parent).free < FULL_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, whole or not at all; errors as for `written_whole`."""
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process is inside for this folder; others wait. It is made when it is missing. The lock is on the folder
    itself, since files in it may be replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock_descriptor(handle)
        yield
    finally:
        os.close(handle)
