"""`python -m campaign.updates 40`: so many replays of each kind of log, one after the other.

A controller serves requests of a small simulated table, `knobwise update` learns from the log, and
the true outcomes of all samples judge what would serve then. It fails if poisoned logs are taken
over, or a sound one makes decisions worse.
"""

import sys
import time

from campaign.updates.kinds import POISONED, SOUND
from campaign.updates.replays import GAIN, WORSE, replay

MOST_WRONG = 0.01
"""Of all replays of poisoned logs, so many at most may be taken over and lose."""


def table_of(kinds, replays, seed, accepts):
    """Replay kinds, print a line for each, and return all replays."""
    header = ["kind", "took over", "wrongly", "change"]
    if accepts:
        header += ["accepted", "wrongly", "change"]
    print_line(header)
    everything = []
    for kind in kinds:
        many = [replay(kind, seed + i, accepts) for i in range(replays)]
        everything += many
        cells = [kind]
        for taken, change in (("better", "change"), ("accepted", "possible"))[: 1 + accepts]:
            changes = [getattr(each, change) for each in many]
            wrongly = sum(points < WORSE for points in changes)
            mean = f"{sum(changes) / replays:+.1f}"
            cells += [sum(getattr(each, taken) for each in many), wrongly, mean]
        print_line(cells)
    return everything


def print_line(cells):
    """Print a line of the table, as Markdown has it."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def main(replays="10", seed="0"):
    start = time.perf_counter()
    poisoned = table_of(POISONED, int(replays), int(seed), accepts=False)
    wrongly = sum(each.change < WORSE for each in poisoned)
    print(f"poisoned: worse by more than {-WORSE} points in {wrongly} of {len(poisoned)} replays")
    sound = table_of(SOUND, int(replays), int(seed), accepts=True)
    gains = [each for each in sound if each.possible >= GAIN]
    taken = sum(each.change >= GAIN for each in gains)
    print(f"sound with {GAIN} points or more to gain: taken in {taken} of {len(gains)} replays")
    print(f"{time.perf_counter() - start:.0f} s")
    worse = any(each.change < WORSE for each in sound)
    return worse or wrongly > MOST_WRONG * len(poisoned)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
