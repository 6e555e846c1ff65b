"""What a process owes to the one that began its work."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import NamedTuple


class Process(NamedTuple):
    """A process by its machine and its id there."""

    host: str
    id: int

    @classmethod
    def this(cls) -> Process:
        return cls(socket.gethostname(), os.getpid())


def end_with(starter: Process) -> None:
    """Have this process end soon after the one that began the work, or it would go on writing
    beside the work that resumes.

    Nothing happens in that process itself, or on another machine.
    """
    this = Process.this()
    if this.host == starter.host and this.id != starter.id:
        is_child = os.getppid() == starter.id
        threading.Thread(target=_watch, args=(starter.id, is_child), daemon=True).start()


def _watch(starter: int, is_child: bool) -> None:
    """End this process once the starter is gone, which may be so from the beginning."""
    # a child has another parent then; the starter itself may be known until it is waited for
    while os.getppid() == starter if is_child else _exists(starter):
        time.sleep(0.5)
    os._exit(1)


def _exists(process: int) -> bool:
    """Return True if there is a process of this id on this machine."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
