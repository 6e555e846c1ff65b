"""A worker: a process with a replica of a model, which does one job after another."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from knobwise.common.errors import InputError

GPUS = "CUDA_VISIBLE_DEVICES"
"""The environment variable by which Ray gives GPUs to a worker."""


class ModelWorker:
    """The class of the actor. Its calls run one after the other, in one thread.

    A model is loaded by a call and not when the actor is made, so that a mistake comes back as the
    error that it is.
    """

    def __init__(self) -> None:
        self._always = ExitStack()
        self._loaded: Any = None
        self._work: Callable[[Any], Any] = print

    def load(self, folder: str, gpus: int, load: Callable[[], object]) -> dict[str, object]:
        """Load a replica; return what times depend on besides the model.

        Args:
            folder: the one that the command was given in, for relative paths and code of the
                user's own.
            gpus: how many GPUs the worker owns; it sees no others.
            load: makes the replica.

        Raises:
            InputError: there is no such folder on this machine; see also `load`.
        """
        if not Path(folder).is_dir():
            raise InputError(
                f"workers: {platform.node()} has no folder {folder}; all machines need the folder "
                "that the command is given in"
            )
        os.chdir(folder)
        # as in the process of the command, also for functions that only a setting names
        if folder not in sys.path:
            sys.path.insert(0, folder)
        if not gpus:
            os.environ[GPUS] = ""
        # torch reads the environment when it is first used
        from knobwise.profiling.measuring.machine import machine, one_thread

        self._always.enter_context(one_thread())
        self._loaded = load()
        host = {"host": platform.node(), **machine()}
        if gpus:
            host["gpus"] = os.environ.get(GPUS, "")
        return host

    def ask(self, question: Callable[[Any], Any]) -> Any:
        """Return what a function makes of the replica."""
        return question(self._loaded)

    def begin(self, begin: Callable[..., Callable[[Any], Any]], content: Any, number: int) -> None:
        """Prepare for jobs, see `Work.begin`."""
        self._work = begin(self._loaded, content, number)

    def do(self, job: Any) -> Any:
        """Do one job, and return its result."""
        return self._work(job)
