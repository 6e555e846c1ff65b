"""Versions of a deployed controller on disk, one of which serves; and a process that follows it.

    FOLDER/versions/0000, 0001, …    each written under a temporary name, then renamed
    FOLDER/current                   a link to the one that serves, replaced by a rename

A process that is killed at any moment leaves the old or the new one in place, never half of one.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from knobwise.agents.serving.numpy_controller import NumpyController
from knobwise.common.errors import InputError

CURRENT, VERSIONS, CONTROLLER = "current", "versions", "controller.npz"
EVERY_S = 1.0
"""How often a process looks for a new controller, in seconds."""


def add_version(folder: Path, write: Callable[[Path], None]) -> Path:
    """Add a version whose files `write` makes in the folder that it is given. It does not serve yet. For one process at
    a time: what is unfinished is of a process that was killed, and goes."""
    versions = folder / VERSIONS
    versions.mkdir(parents=True, exist_ok=True)
    for unfinished in versions.glob(".new-*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(dir=versions, prefix=".new-"))
    try:
        write(temporary)
        temporary.chmod(0o755)
        number = 1 + max((int(path.name) for path in versions.glob("[0-9]*")), default=-1)
        return temporary.rename(versions / f"{number:04d}")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def serve(folder: Path, version: Path) -> None:
    """Make a version the one that serves."""
    link = folder / f".{CURRENT}-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(VERSIONS) / version.name)
    link.replace(folder / CURRENT)


def serving(folder: Path) -> Path | None:
    """The version that serves; None before the first."""
    link = folder / CURRENT
    return folder / VERSIONS / link.readlink().name if link.is_symlink() else None


class Watched:
    """A controller's file that others may replace.

    Raises:
        InputError: there is no such file.
    """

    def __init__(self, path: str | Path, controller: NumpyController) -> None:
        path = Path(path)
        self._path = path / CONTROLLER if path.is_dir() else path
        self._mark: tuple[int, int, int] | None = None
        self._looked = -EVERY_S
        if not self._path.exists():
            raise InputError(f"watch: {self._path} does not exist; give a controller.npz, or the folder of one")
        self._wanted = _interface(controller)

    def newer(self, controller: NumpyController) -> NumpyController | None:
        """Another controller than this, where the file was replaced since the last call by one that can be used."""
        if time.monotonic() - self._looked < EVERY_S:
            return None
        self._looked = time.monotonic()
        try:
            state = self._path.stat()
            mark = state.st_ino, state.st_mtime_ns, state.st_size
        except OSError:
            mark = 0, 0, 0
        if mark == self._mark:
            return None
        self._mark = mark
        try:
            new = NumpyController.load(self._path)
            if _interface(new) != self._wanted:
                raise ValueError("its configurations, features or limits are others")
        except (OSError, ValueError) as error:
            log = logging.getLogger(__name__)
            log.warning("watch: %s is refused, the controller at hand goes on: %s", self._path, error)
            return None
        return new if new.digest != controller.digest else None


def _interface(controller: NumpyController) -> tuple[object, ...]:
    """What a controller must share with another that takes its place."""
    configurations = controller.configurations.tolist()
    return controller.knobs, configurations, controller.feature_sizes, controller.header["priced"]
