"""Writing files so that a reader never meets half of one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from knobwise.envs.errors import InputError


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; rename it into place when the block ends well, remove it when it fails.

    The folder is made when it is missing. The temporary file keeps the suffix, for writers that look at it.

    Raises:
        InputError: nothing can be written there; before the block begins.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path}: is a folder, cannot be written as a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    except OSError as error:
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
    finally:
        temporary.unlink(missing_ok=True)
