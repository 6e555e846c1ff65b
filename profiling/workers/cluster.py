"""Connect to Ray, and refuse workers that could not own what they measure on."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray

from knobwise.common.checks import at_least
from knobwise.common.errors import InputError
from knobwise.common.imports import in_a_line
from knobwise.common.progress import say

ANSWER_S = 10.0
"""Seconds within which a cluster answers."""


@dataclass(frozen=True)
class WorkerOptions:
    """How many workers there are, and what each of them owns."""

    workers: int
    gpus: int = 0
    """GPUs of each worker."""
    address: str | None = None
    """The cluster: auto, or HOST:PORT; None to start Ray on this machine."""
    shares: bool = False
    """Whether workers may share a core, since no wall time is taken."""


@contextmanager
def cluster(options: WorkerOptions) -> Iterator[dict[str, object]]:
    """Connect to Ray, or start it on this machine, for the block.

    Yields the options of an actor that is a worker: the cores and GPUs that it owns, and where it
    may be.

    Raises:
        InputError: no cluster at the address, or one with too few cores or GPUs for so many
            workers.
    """
    at_least("gpus", options.gpus, 0)
    if (options.address or "").startswith("ray://"):
        raise InputError(
            f"ray_address={options.address}: give auto or HOST:PORT, on a machine of the cluster"
        )
    _check_address(options.address)
    started = not ray.is_initialized()
    if started:
        _connect(options)
    try:
        yield _share_of(options, ray.cluster_resources())
    finally:
        if started:
            ray.shutdown()


def _connect(options: WorkerOptions) -> None:
    """Connect to a cluster, or start one on this machine that ends with this process."""
    quiet = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
    if options.address is not None:
        quiet.pop("include_dashboard")
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        # "local" also where another cluster runs on this machine
        ray.init(address=options.address or "local", **quiet)
    except Exception as error:  # a plain one where Ray takes too long to start on a busy machine
        where = "workers" if options.address is None else f"ray_address={options.address}"
        raise InputError(
            f"{where}: Ray cannot be reached or started ({in_a_line(error)}); `ray start --head` "
            "starts a cluster"
        ) from error
    finally:
        # Ray's own handler would end this process without our exit status
        if main and before is not None:
            signal.signal(signal.SIGTERM, before)


def _check_address(address: str | None) -> None:
    """Refuse an address that nothing answers at, which Ray would try for minutes."""
    if address in (None, "auto", "local"):
        return
    host, _, port = str(address).rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError, ValueError) as error:
        raise InputError(
            f"ray_address={address}: no cluster answers there ({in_a_line(error)}); give auto, or "
            "HOST:PORT of a machine where `ray start --head` runs"
        ) from error


def _share_of(options: WorkerOptions, resources: dict[str, float]) -> dict[str, object]:
    """Return what an actor asks for. Raises InputError if there is too little for all of them."""
    workers = options.workers
    cores = int(resources.get("CPU", 0))
    gpus = int(resources.get("GPU", 0))
    if workers * options.gpus > gpus:
        raise InputError(
            f"gpus={options.gpus}: workers={workers} need {workers * options.gpus} GPUs, and Ray "
            f"has {gpus}; a GPU that workers share spoils their times"
        )
    if gpus and not options.gpus:
        say(f"workers see no GPU; gpus=1 gives each of them one of the {gpus} that Ray has")
    share: dict[str, object] = {"num_cpus": 1, "num_gpus": options.gpus, "max_restarts": 0}
    if workers <= cores:
        return share
    if not options.shares:
        raise InputError(
            f"workers={workers}: Ray has {cores} cores, and workers that share one spoil each "
            f"other's wall times; take workers={max(cores, 1)} or knobs.clock=cpu"
        )
    # without a core of its own a worker may be anywhere
    return share | {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
