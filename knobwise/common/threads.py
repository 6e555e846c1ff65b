"""Several calls at once, each in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

J = TypeVar("J")
R = TypeVar("R")


def as_they_end(
    work: Callable[[J], R], jobs: Iterable[J], at_once: int = 1
) -> Iterator[tuple[J, R]]:
    """Yield each job with its result, as they end.

    A job is taken from `jobs` right before it begins. When one fails, no further one begins; those
    at work are yielded, and then the first error is raised. One at a time runs in this thread.

    Args:
        at_once: how many jobs run at the same time, at most.
    """
    if at_once == 1:
        for job in jobs:
            yield job, work(job)
        return
    pool = ThreadPoolExecutor(at_once)
    running: dict[Future[R], J] = {}
    failed: BaseException | None = None
    waiting = iter(jobs)
    try:
        while True:
            while failed is None and len(running) < at_once:
                try:
                    job = next(waiting)
                except StopIteration:
                    break
                running[pool.submit(work, job)] = job
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                if error := future.exception():
                    failed = failed or error
                else:
                    yield job, future.result()
        if failed is not None:
            raise failed
    finally:
        # after Ctrl-C nobody waits for what is at work
        pool.shutdown(wait=False, cancel_futures=True)
