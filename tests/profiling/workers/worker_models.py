"""Models whose workers come to grief. Tests copy this file into their folder, from which workers
import it."""

import os
import signal
import time
from pathlib import Path

from knobwise.profiling.measuring.adaptive_model import (
    Answer,
    FirstStage,
    KeepsConfiguration,
    KnobSupport,
    clock_ms,
)
from knobwise.profiling.measuring.questions import VQAItem

SAMPLES = 15
BAD = "sample 7"
"""What the first worker that is asked this does not survive."""


class Counting(KeepsConfiguration):
    """Repeats the number in a question, if its one knob is large enough."""

    name = "counting"
    knobs = (KnobSupport("size", 8, 1, 8),)
    measured = {"size": (2, 4, 8)}

    def __init__(self):
        self.configuration = {"size": 8}
        self.questions = [
            VQAItem(f"{i:02}", None, f"sample {i}", (str(i),)) for i in range(SAMPLES)
        ]

    def first_stage(self, request, features=True):
        return FirstStage(request, {"number": [float(request.question.split()[1])]}, None, 0.0, 0.0)

    def answer(self, stages, configuration):
        return [self._answer(stage.request.question, configuration["size"]) for stage in stages]

    def _answer(self, question, size):
        start = clock_ms()
        number = int(question.split()[1])
        sum(range(500 * size))
        total_ms = clock_ms() - start
        return Answer(str(number if number < 2 * size else -1), total_ms, 0.0, 0.0, 0, 2, 1)


class KilledOnce(Counting):
    """The first worker that is asked `BAD` is killed."""

    def _answer(self, question, size):
        if question == BAD:
            try:
                Path("killed").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super()._answer(question, size)


class KilledAlways(Counting):
    """Every worker that is asked `BAD` is killed."""

    def _answer(self, question, size):
        if question == BAD:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._answer(question, size)


class Failing(Counting):
    """Has no answer to `BAD`."""

    def _answer(self, question, size):
        if question == BAD:
            raise ArithmeticError(question)
        return super()._answer(question, size)


class Slow(Counting):
    """Takes a moment for each answer, and longer for `BAD`."""

    def _answer(self, question, size):
        time.sleep(2.0 if question == BAD else 0.05)
        return super()._answer(question, size)
