"""Write files so that nobody ever reads half of one, not even after a power cut."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import resource
import shutil
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from knobwise.common.errors import InputError

FULL_BYTES = 64 * 1024
"""If a writer failed and less than this is free, the disk counts as full."""
FULL = (errno.ENOSPC, errno.EDQUOT)
LIMITS = dict.fromkeys(FULL, "make room") | {
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "close other programs, which have too many files open",
    errno.ENOMEM: "raise the limit on memory (ulimit -v), or close other programs",
}
"""Advice by the number of the error, where a limit of the system was met."""
MIN_ADDRESSES = 6 * 2**30
"""Address space that the smallest commands take with torch, in bytes: 4.6 to 5.7 GB where there are
two cores. Most of it is reserved and never touched."""
UNPACKED = "KNOBWISE_UNPACKED_MB"
"""The environment variable with the most MB to which a packed file may unpack; 512 without it. A
small file may unpack to more than the memory."""
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)


def refused_by_system(error: OSError) -> tuple[int, str] | None:
    """Return an exit status and a line about an error of the system; None for one of the program.

    The status is 1 where a limit was met, such as a full disk: the input is not to blame. It is 2
    for a path that may not be read or written.
    """
    path = f"{error.filename}: " if error.filename else ""
    if error.errno in LIMITS:
        advice = f"{LIMITS[error.errno]}, then give the same command again"
        return 1, f"{path}{error.strerror}; {advice}"
    if error.errno in REFUSED:
        return 2, f"{path}{error.strerror}; choose a path that can be read and written"
    return None


def system_limit_of(error: BaseException) -> str:
    """Return advice if an error of any library says that a system limit was met; else ""."""
    message = str(error)
    signs = ("failed to map segment", "can't start new thread")
    if isinstance(error, MemoryError) or any(sign in message for sign in signs):
        message = os.strerror(errno.ENOMEM)
    for number, advice in LIMITS.items():
        if os.strerror(number) in message:
            return f"{os.strerror(number)}; {advice}"
    return ""


def sync(path: str | Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock_handle(handle: int, blocking: bool = True) -> bool:
    """Lock an open file or folder until it is closed, also by the end of the process, and return
    True; False if another process has locked it and `blocking` is False."""
    # the import takes long, and most commands lock nothing
    from filelock import lock_descriptor

    return lock_descriptor(handle, blocking=blocking)


def check_address_space() -> None:
    """Refuse to begin under a limit on address space (ulimit -v) that torch and BLAS would meet:
    they end the process then, in words of their own, or hang.

    Raises:
        OSError: less than `MIN_ADDRESSES` bytes are allowed.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= allowed < MIN_ADDRESSES:
        problem = f"{allowed / 2**30:.1f} GiB of addresses are allowed, torch and BLAS take 6"
        raise OSError(errno.ENOMEM, problem)


@contextmanager
def written_whole(path: str | Path, previous: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path for the block to write to.

    If the block ends without an error, its file replaces the one at `path`; else it is removed. The
    folder is made when it is missing. The temporary file has the suffix of `path`. Bytes and name
    are on disk when the context ends. Temporary files that killed processes left are removed.

    Args:
        path: the file to write.
        previous: the path at which the old file is kept; None does not keep it.

    Raises:
        InputError: nothing can be written at `path`; raised before the block begins.
        OSError: the disk is full, or the file too long, whatever error its writer raises then.
    """
    path = Path(path)
    # what cannot be written is refused before the work begins
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
    try:
        # files in use are locked; the lock of a killed process is gone
        lock_handle(handle)
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
        # writers call a full disk by many names
        if path.parent.exists() and shutil.disk_usage(path.parent).free < FULL_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        longest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if temporary.exists() and temporary.stat().st_size >= longest >= 0:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path)) from error
        raise
    finally:
        os.close(handle)
        temporary.unlink(missing_ok=True)


def _keep_as(previous: Path, path: Path) -> None:
    """Give the file at `path` a second name, `previous`.

    Readers find it at `path`, too, until another file replaces it there.
    """
    previous.unlink(missing_ok=True)
    try:
        previous.hardlink_to(path)
    except OSError:  # some file systems have no hard links
        path.replace(previous)


def _remove_abandoned(path: Path) -> None:
    """Remove temporary files of `path` that no living process has locked."""
    # mkstemp puts eight random characters between prefix and suffix
    pattern = f".{glob.escape(path.stem + '-')}????????{glob.escape(path.suffix)}"
    for other in path.parent.glob(pattern):
        with suppress(OSError), other.open() as file:  # it may have been renamed just now
            if lock_handle(file.fileno(), blocking=False):
                other.unlink()


def replace_link(link: Path, target: Path) -> None:
    """Point a link to another target, in one step.

    Only one process may do this at a time (see `locked`), since the unfinished link of a process
    that was killed is removed.
    """
    # a new link takes the name of the old one
    temporary = link.with_name(f".{link.name}-new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
    sync(link.parent)


def most_unpacked() -> int:
    """Return the most bytes to which a packed file may unpack. Raises InputError if the environment
    says anything but a number of MB."""
    megabytes = os.environ.get(UNPACKED, "512")
    if not megabytes.isdecimal():
        raise InputError(f"{UNPACKED}={megabytes}: must be a whole number of MB")
    return int(megabytes) * 1_000_000


def check_unpacked(path: str | Path, size: int) -> None:
    """Refuse a file that unpacks to so many bytes, if these are too many."""
    most = most_unpacked()
    if size > most:
        raise InputError(
            f"{path}: unpacks to more than {most // 1_000_000} MB; {UNPACKED}=… in the "
            "environment allows more"
        )


def is_damaged(path: str | Path) -> bool:
    """Return True for a file that a power cut or a copy has damaged.

    Such a file is empty, or begins with zeros, or is a zip archive (`.pt`, `.npz`) that is not
    whole or does not agree with the checksums inside it. Any other file gives False.

    Raises:
        InputError: it would unpack to more than the limit, or holds two members of one name, of
            which readers take one.
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        begin = file.read(4)
        if begin != b"PK\3\4":
            return not begin.strip(b"\0")
        try:
            with zipfile.ZipFile(file) as archive:
                # an array may be stored with and without the suffix
                names = Counter(name.removesuffix(".npy") for name in archive.namelist())
                twice = [name for name, count in names.items() if count > 1]
                if twice:
                    raise InputError(f"{path}: {twice[0]!r} is in it twice; keep only one")
                unpacked = sum(part.file_size for part in archive.infolist())
                # those of torch are not packed, and may be large
                if unpacked > os.fstat(file.fileno()).st_size:
                    check_unpacked(path, unpacked)
                return archive.testzip() is not None
        except InputError:
            raise
        except Exception:  # whatever a damaged directory makes of the rest
            return True


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_cut_short(content: bytes, text: str) -> bool:
    """Return True if a power cut may have left `content` in a file that was to hold `text`.

    Such content is the beginning of the text, with or without zeros after it.
    """
    begin = content.rstrip(b"\0")
    whole = text.encode()
    return len(begin) < len(whole) and whole.startswith(begin)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, whole or not at all; errors as for `written_whole`."""
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path | None, content: object) -> None:
    """Write content as a JSON file, whole or not at all; errors as for `written_whole`. Without a
    path nothing is written."""
    if path is not None:
        write_text(path, json.dumps(content, indent=1))


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Let only one process at a time run a block for this folder, which is made when it is missing.

    The lock is on the folder itself, since files in it may be replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock_handle(handle)
        yield
    finally:
        os.close(handle)
