"""Versions of a deployed controller on disk, one of which serves; and a process that follows it.

    FOLDER/versions/0000, 0001, …    each written under a temporary name, then renamed
    FOLDER/current                   a link to the one that serves, replaced by a rename

A process that is killed at any moment leaves the old or the new one in place, never half of one.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from shlex import quote

from knobwise.agents.deployed.controller import NumpyController
from knobwise.common.errors import InputError
from knobwise.common.files import replace_link, sync

CURRENT = "current"
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
        latest = max((int(path.name) for path in versions_in(folder)), default=-1)
        # the version is there at once, and whole
        version = temporary.rename(versions / f"{latest + 1:04d}")
        sync(versions)
        return version
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def serve_version(folder: Path, version: Path) -> None:
    """Make a version the one that serves."""
    replace_link(folder / CURRENT, Path(VERSIONS) / version.name)


def serving_version(folder: Path) -> Path | None:
    """Return the version that serves; None before the first.

    Raises:
        InputError: something else stands where the link belongs, or the version is not there.
    """
    link = folder / CURRENT
    if link.is_symlink():
        version = folder / VERSIONS / link.readlink().name
        if not version.is_dir():
            advice = advice_on_versions(folder)
            raise InputError(f"{link}: leads to {version}, which is gone; {advice}")
        return version
    if link.exists():
        raise InputError(
            f"{link}: is no link to a version; move it away, then `{_linking(folder)}`"
        )
    return None


def versions_in(folder: Path) -> list[Path]:
    """Return the version folders, oldest first; other folders, such as copies, are ignored."""
    whole = [path for path in (folder / VERSIONS).glob("[0-9]*") if path.name.isdecimal()]
    return sorted(whole, key=lambda path: int(path.name))


def advice_on_versions(folder: Path) -> str:
    """Return advice on how to let any version serve by hand."""
    names = ", ".join(path.name for path in versions_in(folder)) or "none"
    return f"restore a copy, or {_linking(folder)}, where NUMBER is any of {names}"


def _linking(folder: Path) -> str:
    """Return advice with the command that lets a version serve."""
    return f"choose a version by `ln -sfn {VERSIONS}/NUMBER {quote(str(folder / CURRENT))}`"


class Watched:
    """A controller's file that others may replace.

    Args:
        path: of the file, or of its folder.
        like: a controller that the new one must be able to take the place of.

    Raises:
        InputError: there is no such file.
    """

    def __init__(self, path: Path, like: NumpyController) -> None:
        if path.is_dir():
            path /= CONTROLLER
        if not path.exists():
            raise InputError(
                f"watch: {path} does not exist; give a controller.npz, or the folder of one"
            )
        self._path = path
        self.controller = like
        """The latest controller that could be used."""
        self._mark: tuple[int, ...] = ()
        self._looked = -EVERY_S

    def refresh(self) -> None:
        """Read the file if it was replaced, but look only once in `EVERY_S`.

        A file that cannot be used is refused in a line, once.
        """
        if time.monotonic() - self._looked < EVERY_S:
            return
        self._looked = time.monotonic()
        try:
            state = self._path.stat()
            mark = state.st_ino, state.st_mtime_ns, state.st_size
        except OSError:
            # a file that is missing is refused once, too
            mark = 0, 0, 0
        if mark == self._mark:
            return
        self._mark = mark
        try:
            new = NumpyController.load(self._path)
            if _interface(new) != _interface(self.controller):
                raise ValueError("its configurations, features or limits differ")
            self.controller = new
        except (OSError, ValueError) as error:
            message = "watch: %s is refused, and the present controller stays: %s"
            logging.getLogger(__name__).warning(message, self._path, error)


def _interface(controller: NumpyController) -> tuple[object, ...]:
    """Return the facts that a controller must share with another that takes its place."""
    configurations = controller.configurations.tolist()
    limit = controller.header["limit"], controller.unit
    return controller.knobs, configurations, controller.feature_sizes, *limit
