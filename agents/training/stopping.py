"""Training that is asked to stop: it ends the iteration that it is in, saves, and says what is kept."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from knobwise.common.interruption import Held, held_back

if TYPE_CHECKING:
    from knobwise.agents.training.loop import Trainer

STOPPING = "stopping after this iteration, which will be saved; once more stops at once"


@contextmanager
def stopping(trainer: Trainer) -> Iterator[Held]:
    """A training that signals do not break, where there is a folder to save in: it is to look at what this gives after
    each iteration. An interruption gets a note on what is kept.

    Raises:
        KeyboardInterrupt: that was asked for.
    """
    # of several processes the one that started them does the talking
    say = STOPPING if multiprocessing.parent_process() is None else ""
    try:
        with held_back(trainer.folder is not None, say) as held:
            yield held
    except KeyboardInterrupt as stop:
        stop.add_note(kept(trainer))
        raise


def kept(trainer: Trainer) -> str:
    """What is on disk of a training, for a person."""
    if trainer.folder is None or trainer.saved is None:
        return f"{trainer.title}: nothing was saved yet"
    last, best = trainer.folder / "last.pt", trainer.best
    where = (
        f"{last} is finished" if trainer.finished else f"{last} holds iteration {trainer.saved:,} of {trainer.total:,}"
    )
    score = f"validation {trainer.judged_by} {best['score']:.4f} at iteration {best['iteration']:,}"
    return f"{trainer.title}: {where}; best.pt beside it the best so far ({score})"
