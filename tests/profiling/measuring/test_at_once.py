"""Several requests at once: each result with its job, and nothing lost when one fails."""

import threading

import pytest

from knobwise.profiling.measuring.measuring import as_they_end


@pytest.mark.parametrize("at_once", [1, 3])
def test_every_job_comes_with_its_result(at_once):
    ended = dict(as_they_end(lambda job: job * job, range(20), at_once))
    assert ended == {job: job * job for job in range(20)}


def test_so_many_are_at_work_at_once_and_no_more():
    together = threading.Barrier(3, timeout=20)
    taken = []

    def jobs():
        for job in range(9):
            taken.append(job)
            yield job

    ended = as_they_end(lambda job: together.wait(), jobs(), 3)
    next(ended)
    # only what was at work has been taken from the jobs
    assert len(taken) <= 5
    assert len(list(ended)) == 8


@pytest.mark.parametrize("at_once", [1, 2])
def test_after_a_failure_none_begins_and_what_is_at_work_is_kept(at_once):
    failed = threading.Event()
    begun = []

    def work(job):
        begun.append(job)
        if job == 3:
            failed.set()
            raise ValueError(job)
        if job == 4:
            failed.wait(20)
        return job

    results = []
    ended = as_they_end(work, range(100), at_once)
    with pytest.raises(ValueError, match="3"):
        results.extend(job for job, _ in ended)
    assert sorted(results) == [job for job in sorted(begun) if job != 3]
    assert len(begun) < 100
