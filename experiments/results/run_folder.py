"""The folder of a run: its name, its lock, how a stopped run resumes, and the link to the latest
run."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from filelock import lock_descriptor
from omegaconf import OmegaConf

from knobwise.common.checks import folder_name
from knobwise.common.errors import InputError
from knobwise.common.files import FULL, is_cut_short, locked, replace_link, sync, write_text
from knobwise.common.progress import say

UNFINISHED = ".unfinished"
"""A locked file in a run's folder until its last step is done."""
VERSION = "controller.pt"
"""The checkpoint in a version that `knobwise update` wrote."""
LONGEST_NAME = 120
"""The most characters of the name of a folder."""
LEFT_OUT_OF_NAME = ("experiment", "name", "runs", "tracking", "device", "threads", "jobs")
"""Settings that do not change the results, or have their place in the path."""


def checkpoint_at(path: str | Path) -> Path:
    """Return the checkpoint at a path: the file itself, that of a version of `knobwise update`, or
    that of a run's best seed on validation.

    Raises:
        InputError: a run that is not finished.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    if (path / VERSION).exists():
        return path / VERSION
    if (path / UNFINISHED).exists():
        raise InputError(f"{path}: the run is not finished; repeat its command to resume it")
    return path / "checkpoints" / "best.pt"


@contextlib.contextmanager
def claim(config: Any, overrides: list[str]) -> Iterator[Path]:
    """Lock the folder of this run until the block ends: a new one, or the folder of the same run if
    it was stopped. After success `runs/latest` points at it.

    Args:
        config: settings with `runs`, `experiment` and `name`.
        overrides: the words of the command line, for the run's name.

    Raises:
        InputError: a name that is not a folder's, another process is at work in it, or
            `runs/latest` is not a link.
    """
    for key, name in (("name", config.name), ("experiment", config.experiment)):
        if name is not None:
            folder_name(key, name)
    latest = Path(config.runs) / "latest"
    if latest.exists() and not latest.is_symlink():
        raise InputError(f"{latest} is not a link; move it away, or choose another runs=…")
    # the settings say whether an unfinished folder is of this run
    first = _preferred(config, overrides)
    with claim_folder(first, "config.yaml", OmegaConf.to_yaml(asdict(config))) as folder:
        try:
            yield folder
        except KeyboardInterrupt as stop:
            stop.add_note(f"what is finished is kept in {folder}")
            raise
        with locked(latest.parent):
            replace_link(latest, folder.absolute().relative_to(latest.parent.absolute()))


def _preferred(config: Any, overrides: list[str]) -> Path:
    """Return the folder of a run, if no other run has taken it."""
    return Path(config.runs) / config.experiment / (config.name or run_name(overrides))


def _candidates(first: Path) -> Iterator[Path]:
    """Yield `first`, `first-2`, `first-3` and so on."""
    yield first
    for number in itertools.count(2):
        yield first.with_name(f"{first.name}-{number}")


@contextlib.contextmanager
def claim_folder(first: Path, file: str, words: str) -> Iterator[Path]:
    """Lock a folder for the work that `words` describe until the block ends: `first`, or `first-2`
    and so on if that is taken. An unfinished folder of the same work is continued.

    Args:
        first: the preferred path.
        file: its name in the folder holds `words`.
        words: equal for equal work.

    Raises:
        InputError: another process is at work in it, or it cannot be written.
    """
    with _written_in(first.parent):
        first.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        for folder in _candidates(first):
            lock = _made(folder, file, words) or _taken_up(folder, file, words)
            if lock is not None:
                held.enter_context(lock)
                break
        if not (folder / file).exists() or (folder / file).read_bytes() != words.encode():
            say(f"{folder / file}: is missing or damaged; it is written again, and the run goes on")
            write_text(folder / file, words)
        yield folder
        (folder / UNFINISHED).unlink()
        sync(folder)


@contextlib.contextmanager
def _written_in(folder: Path) -> Iterator[None]:
    """Raise InputError if the block cannot write in the folder; an error of a full disk stays."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise
        raise InputError(
            f"{folder}: cannot be written ({error.strerror}); choose another runs=…"
        ) from error


def _made(folder: Path, file: str, words: str) -> TextIO | None:
    """Make the folder with its lock and its words at once, so that no other process sees half of
    it, and return the lock; None if the folder exists."""
    with locked(folder.parent):
        for unfinished in folder.parent.glob(".new-*"):  # of a process that was killed
            shutil.rmtree(unfinished, ignore_errors=True)
        if folder.exists():
            return None
        with _written_in(folder.parent):
            half_made = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
        # the lock holds a digest of the words, in case that their file is damaged
        lock = (half_made / UNFINISHED).open("w")
        try:
            lock_descriptor(lock.fileno())
            lock.write(_digest(words))
            lock.flush()
            write_text(half_made / file, words)
            sync(half_made / UNFINISHED)
            umask = os.umask(0)  # mkdtemp makes private folders
            os.umask(umask)
            half_made.chmod(0o777 & ~umask)
            half_made.rename(folder)
            sync(folder.parent)
        except OSError:
            lock.close()
            shutil.rmtree(half_made)
            raise
    return lock


def _digest(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()


def _taken_up(folder: Path, file: str, words: str) -> TextIO | None:
    """Lock an unfinished folder of the same work and return the lock; None for any other folder.
    After a power cut the file may be cut short, or end in zeros."""
    saved = b""
    if (folder / file).exists():
        saved = (folder / file).read_bytes()
    if saved != words.encode() and not is_cut_short(saved, words):
        return None
    try:
        lock = (folder / UNFINISHED).open("r+")
    except OSError:  # it is finished
        return None
    if saved != words.encode() and lock.read() not in ("", _digest(words)):
        lock.close()
        return None
    if not lock_descriptor(lock.fileno(), blocking=False):
        lock.close()
        raise InputError(
            f"{folder}: another process is training this run; give yours another name=…"
        )
    if (folder / UNFINISHED).exists():
        return lock
    lock.close()  # it has just been finished
    return None


def command_of(overrides: list[str]) -> str:
    """Return the command with these words, as a shell takes it."""
    return shlex.join(["knobwise", "train", *overrides])


def finished_run(config: Any, overrides: list[str], digest: str) -> Path | None:
    """Return the finished run of these settings on the data with this digest, None if there is
    none."""
    settings = OmegaConf.to_yaml(asdict(config))
    for folder in itertools.takewhile(Path.exists, _candidates(_preferred(config, overrides))):
        results = folder / "results.json"
        if (folder / UNFINISHED).exists() or not results.exists():
            continue
        # damaged files are those of another run
        with contextlib.suppress(OSError, ValueError):
            is_same = (folder / "config.yaml").read_text(encoding="utf-8") == settings
            if is_same and json.loads(results.read_bytes())["profile"]["digest"] == digest:
                return folder
    return None


def run_name(overrides: list[str]) -> str:
    """Return a readable name, equal for equal words: the changed settings, or `default`. In a long
    name a digest replaces the end."""
    # the words in order, so that equal settings have equal names
    parts = []
    for word in sorted(overrides):
        key, _, value = word.partition("=")
        if key.lstrip("+~").split(".")[0] not in LEFT_OUT_OF_NAME:
            short = f"{key}={Path(value).name}"  # the last part of a path
            parts.append(re.sub(r"[^\w.,=-]+", "-", short).replace("=", "-").strip("-"))
    name = "_".join(parts)
    if len(name) > LONGEST_NAME:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name[: LONGEST_NAME - len(digest) - 1]}-{digest}"
    return name or "default"
