"""The folder of a run: its name, whose it is while it is worked in, and the link to the latest."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from omegaconf import OmegaConf

from knobwise.common.errors import InputError
from knobwise.common.files import FULL, written_whole

UNFINISHED = ".unfinished"
"""Stands in a run's folder, locked, until its last step is done."""
LONGEST_NAME = 120
LEFT_OUT_OF_NAME = ("experiment", "name", "runs", "tracking", "device", "threads", "jobs")


@contextlib.contextmanager
def claim(config: Any, overrides: list[str]) -> Iterator[Path]:
    """The folder of this run, new or that of the same run where it was stopped; ours alone until the block ends. When
    it ended well, `runs/latest` points at it.

    Args:
        config: settings with `runs`, `experiment` and `name`.
        overrides: the words of the command line, for the run's name.

    Raises:
        InputError: a name that is none, another process at work in it, or `runs/latest` is no link.
    """
    for key, given in (("name", config.name), ("experiment", config.experiment)):
        if given is not None and (given in ("", ".", "..") or Path(given).name != given):
            raise InputError(f"{key}={given}: must be the name of one folder; runs=… says where it lies")
    latest = Path(config.runs) / "latest"
    if latest.exists() and not latest.is_symlink():
        raise InputError(f"{latest} is not a link; move it away, or choose another runs=…")
    first = Path(config.runs) / config.experiment / (config.name or run_name(overrides))
    with claim_folder(first, "config.yaml", OmegaConf.to_yaml(asdict(config))) as folder:
        try:
            yield folder
        except KeyboardInterrupt as stop:
            stop.add_note(f"what is finished is kept in {folder}")
            raise
        _point(folder, latest)


@contextlib.contextmanager
def claim_folder(first: Path, file: str, words: str) -> Iterator[Path]:
    """A folder for what is described by `words`: `first`, or where that is taken `first-2` and so on; one in which the
    same was begun and not finished is taken up again. Ours alone until the block ends.

    Args:
        first: its path, if nothing is in the way.
        file: where in it `words` are kept.
        words: what is the same when it is the same.

    Raises:
        InputError: another process is at work in it, or nothing can be written there.
    """
    with _written_in(first.parent):
        first.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        for number in itertools.count(1):
            folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
            lock = _made(folder, file, words) or _taken_up(folder, file, words)
            if lock is not None:
                held.enter_context(lock)
                break
        if not (folder / file).exists():  # it was stopped before this was written
            with written_whole(folder / file) as temporary:
                temporary.write_text(words)
        yield folder
        (folder / UNFINISHED).unlink()


@contextlib.contextmanager
def _written_in(folder: Path) -> Iterator[None]:
    """A block that writes in a folder.

    Raises:
        InputError: nothing can be written there.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise
        raise InputError(f"{folder}: cannot be written ({error.strerror}); choose another runs=…") from error


def _made(folder: Path, file: str, words: str) -> TextIO | None:
    """Make the folder, if there is none, with all that tells others whose it is; they never meet it half made. Gives
    its lock."""
    if folder.exists():
        return None
    with _written_in(folder.parent):
        half_made = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    lock = (half_made / UNFINISHED).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (half_made / file).write_text(words)
        umask = os.umask(0)  # mkdtemp makes private folders
        os.umask(umask)
        half_made.chmod(0o777 & ~umask)
        half_made.rename(folder)
    except OSError:
        lock.close()
        shutil.rmtree(half_made)
        if folder.exists():  # another process was faster
            return None
        raise
    return lock


def _taken_up(folder: Path, file: str, words: str) -> TextIO | None:
    """The lock of a folder where the same was begun and not finished; None when it is something else's."""
    saved = folder / file
    if saved.exists() and saved.read_text() != words:
        return None
    try:
        lock = (folder / UNFINISHED).open("r+")
    except OSError:  # it is finished
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise InputError(f"{folder}: another process is training this run; give yours another name=…") from None
    if (folder / UNFINISHED).exists():
        return lock
    lock.close()  # it was finished in this very moment
    return None


def run_name(overrides: list[str]) -> str:
    """A readable name, the same for the same words: what differs from the defaults, or `default`. Of a long one the end
    is replaced by a digest of all of it."""
    kept = sorted(word for word in overrides if word.lstrip("+~").split("=")[0].split(".")[0] not in LEFT_OUT_OF_NAME)
    short = [word.split("=")[0] + "=" + Path(word.partition("=")[2]).name for word in kept]  # of a path its last part
    name = "_".join(re.sub(r"[^\w.,=-]+", "-", word).replace("=", "-").strip("-") for word in short)
    if len(name) > LONGEST_NAME:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name[: LONGEST_NAME - len(digest) - 1]}-{digest}"
    return name or "default"


def _point(folder: Path, link: Path) -> None:
    """Whoever points last is the latest; runs that end at the same time do not meet each other's link half made."""
    temporary = link.with_name(f".latest-{uuid.uuid4().hex}")
    temporary.symlink_to(folder.absolute().relative_to(link.parent.absolute()))
    temporary.replace(link)
