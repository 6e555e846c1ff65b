"""The one error that a person is meant to read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Something a person gave us is wrong: a file, a folder, a setting.

    The message says what is wrong, where, and what to do about it. The command line prints it
    without a traceback and ends with exit status 2; nothing has been written by then. A message of
    several lines, as other libraries write them, becomes a single line.
    """

    def __init__(self, message: str) -> None:
        super().__init__("; ".join(filter(None, map(str.strip, message.splitlines()))))


class Missing(InputError):
    """A package, or a file of another program, cannot be found.

    The setting that names it is not to blame.
    """


class Damaged(InputError):
    """A file no longer holds what knobwise wrote to it. The error's only argument is the path."""

    def __init__(self, path: object) -> None:
        ValueError.__init__(self, path)

    def __str__(self) -> str:
        return (
            f"{self.args[0]}: is damaged (its checksum does not match); "
            "make it again, or restore a copy"
        )


@contextmanager
def naming(source: object) -> Iterator[None]:
    """Put the name of what is read in the block before the message of an InputError."""
    try:
        yield
    except InputError as error:
        # a message begins without the blanks that a name may begin with
        if str(error).lstrip().startswith(f"{source}: ".lstrip()):
            raise
        raise InputError(f"{source}: {error}") from error
