"""What a process owes to the one that started it."""

from __future__ import annotations

import os
import threading
import time


def end_with(parent: int) -> None:
    """Have this process end soon after its parent, or it would go on writing beside the work that
    resumes.

    Args:
        parent: the id of the process that began the work. Nothing happens where that is this
            process, or not the one that started it, such as on another machine.
    """
    if os.getppid() == parent:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    """End this process once another one is its parent."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
