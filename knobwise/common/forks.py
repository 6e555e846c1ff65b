"""Locks and files in processes that are forked from others.

A fork copies a lock that another thread holds, and nobody releases the copy. An open file is shared
with the other process, and so is all that was counted in it.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """What holds locks or files that a forked process must not share."""

    def after_fork(self) -> None:
        """Renew them, in the new process."""


FORKED: weakref.WeakSet[Forked] = weakref.WeakSet()
"""The living objects whose `after_fork` is called first of all in a forked process."""


def _renew() -> None:
    for living in FORKED:
        living.after_fork()


os.register_at_fork(after_in_child=_renew)
