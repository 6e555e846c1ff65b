"""Writing files so that a reader never meets half of one, not even after a power cut."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import tempfile
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import lock_descriptor

from knobwise.common.errors import InputError

WINDOWS = os.name == "nt"
"""Windows flushes no folders, and renames no open files."""
FULL_BYTES = 64 * 1024
"""Where a writer failed and less is free than this, the disk is full."""
FULL = (errno.ENOSPC, errno.EDQUOT)
LIMITS = dict.fromkeys(FULL, "make room") | {
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "close other programs, which have too many files open",
    errno.ENOMEM: "raise the limit on memory (ulimit -v), or close other programs",
}
"""What helps where the system has no more of something."""
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)


def refused_by_system(error: OSError) -> tuple[int, str] | None:
    """The exit status and a line for a full disk and other limits (1: nothing that was given is
    wrong) and for what may not be read or written (2); None for any other error, which is one of
    the program."""
    if error.filename:
        place = f"{error.filename}: "
    else:
        place = ""
    if error.errno in LIMITS:
        return (
            1,
            f"{place}{error.strerror}; {LIMITS[error.errno]}, then give the same command again",
        )
    if error.errno in REFUSED:
        return 2, f"{place}{error.strerror}; choose a path that can be read and written"
    return None


def limit_of(error: BaseException) -> str:
    """What helps where an error, of whatever library, says that a limit of the system was met; else
    ""."""
    no_memory = isinstance(error, MemoryError) or "failed to map segment" in str(error)
    if no_memory:
        words = os.strerror(errno.ENOMEM)
    else:
        words = str(error)
    return next(
        (f"{os.strerror(n)}; {help}" for n, help in LIMITS.items() if os.strerror(n) in words), ""
    )


def sync(path: str | Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on disk."""
    if WINDOWS and Path(path).is_dir():
        return
    handle = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def longest_file() -> int:
    """The most bytes that a file may have (ulimit -f); -1 where the system has no such limit."""
    try:
        import resource
    except ImportError:  # Windows
        return -1
    return resource.getrlimit(resource.RLIMIT_FSIZE)[0]


@contextmanager
def written_whole(path: str | Path, previous: Path | None = None) -> Iterator[Path]:
    """Give a temporary path beside `path`; rename it into place when the block ends well, remove it
    when it fails.

    The folder is made when it is missing. The temporary file keeps the suffix, for writers that
    look at it. Its bytes are on disk before it is renamed, and its name is when the block has
    ended. What killed writers of `path` left goes.

    Args:
        previous: where the present file is kept; None replaces it.

    Raises:
        InputError: nothing can be written there; before the block begins.
        OSError: the disk is full, or the file longer than allowed, also where the writer says so by
            an error of its own, as torch does.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path}: is a folder, so it cannot be written as a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(
            dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix
        )
    except OSError as error:
        if error.errno in FULL:
            raise
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    temporary = Path(name)
    holder = os.fdopen(handle)
    try:
        if WINDOWS:
            holder.close()
        else:
            lock_descriptor(
                handle
            )  # ours are those that are locked; the lock of a killed process is gone
            _remove_abandoned(path)
        yield temporary
        # mkstemp makes private files; what we leave behind should be as readable as any other new
        # file
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        sync(temporary)
        if previous is not None and path.exists():
            _keep_as(previous, path)
        temporary.replace(path)
        sync(path.parent)
    except InputError:
        raise
    except Exception as error:
        if path.parent.exists() and shutil.disk_usage(path.parent).free < FULL_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        if temporary.exists() and temporary.stat().st_size >= longest_file() >= 0:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path)) from error
        raise
    finally:
        holder.close()
        temporary.unlink(missing_ok=True)


def _keep_as(previous: Path, path: Path) -> None:
    """Give a file a second name, so that a reader finds it under its own until that is
    another's."""
    previous.unlink(missing_ok=True)
    try:
        previous.hardlink_to(path)
    except OSError:  # there are file systems without such links
        path.replace(previous)


def _remove_abandoned(path: Path) -> None:
    for other in path.parent.glob(
        f".{glob.escape(path.stem + '-')}????????{glob.escape(path.suffix)}"
    ):
        with suppress(OSError), other.open() as file:  # it may have been renamed just now
            if lock_descriptor(file.fileno(), blocking=False):
                other.unlink()


def replace_link(link: Path, target: Path) -> None:
    """Let a link lead elsewhere, at once. For one process at a time, see `locked`: what others have
    begun goes."""
    for abandoned in link.parent.glob(f".{glob.escape(link.name)}-*"):
        abandoned.unlink()
    temporary = link.with_name(f".{link.name}-{uuid.uuid4().hex}")
    temporary.symlink_to(target)
    temporary.replace(link)
    sync(link.parent)


def is_damaged(path: str | Path) -> bool:
    """Whether a file is empty or begins with zeros, as after a power cut, or is a zip archive
    (`.pt`, `.npz`) that is not whole, or does not agree with the checksums inside it. False for any
    other file.

    Raises:
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        begin = file.read(4)
        if begin != b"PK\3\4":
            return not begin.strip(b"\0")
        try:
            with zipfile.ZipFile(file) as archive:
                return archive.testzip() is not None
        except Exception:  # whatever a damaged directory makes of the rest
            return True


def is_cut_short(content: bytes, text: str) -> bool:
    """Whether a power cut may have left this of a text: its beginning, or zeros after that."""
    return len(begin := content.rstrip(b"\0")) < len(text.encode()) and text.encode().startswith(
        begin
    )


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, whole or not at all; errors as for `written_whole`."""
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process is inside for this folder; others wait. It is made when it is missing. The
    lock is on the folder itself, since files in it may be replaced; on Windows, which opens no
    folders, on the file `.lock` in it."""
    folder.mkdir(parents=True, exist_ok=True)
    if WINDOWS:
        handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)
    else:
        handle = os.open(folder, os.O_RDONLY)
    try:
        lock_descriptor(handle)
        yield
    finally:
        os.close(handle)
