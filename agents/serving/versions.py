"""Versions of a deployed controller on disk, one of which serves; and a process that follows it.

    FOLDER/versions/0000, 0001, …    each written under a temporary name, then renamed
    FOLDER/current                   a link to the one that serves, replaced by a rename
    FOLDER/candidate                 a link to one that is worth a trial, if there is one

A process that is killed at any moment leaves the old or the new one in place, never half of one.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from knobwise.agents.policy.controller import NumpyController
from knobwise.common import checks
from knobwise.common.errors import InputError
from knobwise.common.files import replace_link, sync

CURRENT = "current"
CANDIDATE = "candidate"
VERSIONS = "versions"
CONTROLLER = "controller.npz"
EVERY_S = 1.0
"""How often a process checks for a new controller, in seconds."""


def add_version(folder: Path, write: Callable[[Path], None]) -> Path:
    """Add a version, which does not serve yet, and return its folder.

    Only one process may do this at a time: unfinished versions belong to processes that were
    killed, and are removed.

    Args:
        write: makes the files of the version in the folder that it gets.
    """
    versions = folder / VERSIONS
    versions.mkdir(parents=True, exist_ok=True)
    for unfinished in versions.glob(".new-*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(dir=versions, prefix=".new-"))
    try:
        write(temporary)
        temporary.chmod(0o755)
        latest = max((int(path.name) for path in versions.glob("[0-9]*")), default=-1)
        version = temporary.rename(versions / f"{latest + 1:04d}")
        sync(versions)
        return version
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def serve(folder: Path, version: Path) -> None:
    """Make a version the one that serves; no other is on trial any more."""
    replace_link(folder / CURRENT, Path(VERSIONS) / version.name)
    try_out(folder, None)


def try_out(folder: Path, version: Path | None) -> None:
    """Put a version on trial in the place of any other, or end the trial."""
    if version is None:
        (folder / CANDIDATE).unlink(missing_ok=True)
    else:
        replace_link(folder / CANDIDATE, Path(VERSIONS) / version.name)


def serving(folder: Path) -> Path | None:
    """Return the version that serves; None before the first."""
    link = folder / CURRENT
    if link.is_symlink():
        return folder / VERSIONS / link.readlink().name
    return None


class Watched:
    """A controller's file that others may replace, and the candidate beside `current`.

    Args:
        path: of the file, or of its folder.
        like: a controller that both must be able to take the place of.
        trial: the share of the requests that a candidate decides.

    Raises:
        InputError: there is no such file, a share outside [0, 1], a trial beside a file.
    """

    def __init__(self, path: Path, like: NumpyController, trial: float = 0.0) -> None:
        checks.share("watch: trial", trial)
        self._paths = [path / CONTROLLER if path.is_dir() else path]
        if not self._paths[0].exists():
            raise InputError(
                f"watch: {self._paths[0]} does not exist; give a controller.npz, or the folder of "
                "one"
            )
        if trial and not path.is_dir():
            raise InputError(
                f"watch: trial={trial}: give the folder `current` beside the candidate; {path} is "
                "a file"
            )
        if trial:
            self._paths.append(path.parent / CANDIDATE / CONTROLLER)
        self.controller = like
        """The latest controller that could be used."""
        self.trial = trial
        self._interface = _interface(like)
        self.candidate: NumpyController | None = None
        """The controller on trial, another than `controller`."""
        self._marks: list[tuple[int, ...]] = [(), ()]
        self._looked = -EVERY_S

    def refresh(self) -> None:
        """Read the files that were replaced; at most once in `EVERY_S`."""
        if time.monotonic() - self._looked < EVERY_S:
            return
        self._looked = time.monotonic()
        for i, path in enumerate(self._paths):
            try:
                state = path.stat()
                mark = state.st_ino, state.st_mtime_ns, state.st_size
            except OSError:
                mark = 0, 0, 0
            if mark == self._marks[i]:
                continue
            self._marks[i] = mark
            if i == 0:
                self.controller = self._read(path) or self.controller
            elif any(mark):
                self.candidate = self._read(path)
            else:
                self.candidate = None
        if self.candidate is not None and self.candidate.digest == self.controller.digest:
            self.candidate = None

    def _read(self, path: Path) -> NumpyController | None:
        try:
            new = NumpyController.load(path)
            if _interface(new) != self._interface:
                raise ValueError("its configurations, features or limits differ")
        except (OSError, ValueError) as error:
            log = logging.getLogger(__name__)
            log.warning("watch: %s is refused, and the present controller goes on: %s", path, error)
            return None
        return new


def _interface(controller: NumpyController) -> tuple[object, ...]:
    """Return the facts that a controller must share with another that takes its place."""
    configurations = controller.configurations.tolist()
    return controller.knobs, configurations, controller.feature_sizes, controller.header["limit"]
