"""Work for other processes, in a module of its own: importing it takes no torch, which each would
load for seconds."""

from knobwise.common.progress import progress


def work(number):
    with progress(f"worker {number}", total=3) as tick:
        for done in range(1, 4):
            tick(done, f"note {number}")
    return number
