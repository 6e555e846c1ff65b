"""Code of the user's own, named as `module:name`."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from knobwise.common.errors import InputError


def import_callable(key: str, name: str, kind: str, example: str) -> Any:
    """Import the callable that `module:name` names.

    Modules are looked for in the current folder first, as by `python -m`.

    Args:
        key: the setting that names it, for the messages.
        kind: what it should be, such as function.

    Raises:
        InputError: another form of name, no such module, a module that raises, nothing callable of
            this name.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise InputError(f"{key}: must be module:name, such as {example}")
    folder = _from_current_folder()
    try:
        code = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{key}: importing {module}, in {folder} or installed, raises {in_a_line(error)}"
        ) from error
    value = getattr(code, attribute, None)
    if not callable(value):
        raise InputError(f"{key}: {getattr(code, '__file__', module)} has no {kind} {attribute}")
    return value


def instance(
    key: str, code: Callable[..., Any], members: Iterable[str], protocol: type[Any], *arguments: Any
) -> Any:
    """Make an instance of a class of the user's own.

    Args:
        key: the setting that names the class, for the messages.
        members: what the instance must have.
        protocol: the class that describes them.

    Raises:
        InputError: the class raises, or a member is missing (named).
    """
    try:
        value = code(*arguments)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{key}: making one raises {in_a_line(error, code)}") from error
    for member in members:
        if not hasattr(value, member):
            raise InputError(
                f"{key}: has no {member}; see {protocol.__module__}.{protocol.__name__}"
            )
    return value


def source_file(name: str) -> Path | None:
    """Return the file of the module in `module:name`, which need not be imported; None where there
    is none."""
    module = name.partition(":")[0]
    _from_current_folder()
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        with suppress(ImportError, ValueError):
            file = getattr(find_spec(module), "origin", None)
    return Path(file) if file and Path(file).is_file() else None


def _from_current_folder() -> str:
    """Have modules looked for in the current folder first, as `python -m` does; return it."""
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    return folder


def in_a_line(error: BaseException, code: Any = None) -> str:
    """Return the kind of an error and the first line of its message; for a function or class of the
    user's own, `code`, also the last line of its file that the error came through."""
    message = f"{type(error).__name__}: {error}".splitlines()[0]
    module = sys.modules.get(getattr(code, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    return f"{message} ({Path(file).name}, line {lines[-1]})" if file and lines else message
