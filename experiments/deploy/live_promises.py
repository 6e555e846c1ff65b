"""Whether a promised share on time was kept live, and on a machine that becomes slower."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from knobwise.agents.deployed.controller import NumpyController
from knobwise.experiments.deploy.live_results import Record, Stream
from knobwise.experiments.evidence.promises import exact_interval
from knobwise.experiments.evidence.schema import KeptRow
from knobwise.profiling.measuring.adaptive_model import (
    AdaptiveVLM,
    Answer,
    Configuration,
    FirstStage,
    clock_ms,
)

WINDOWS = 4
"""The parts of a stream that a promise is judged in."""


class Slowed:
    """A model whose answers can be made to take longer, by waiting.

    Args:
        model: answers.

    Attributes:
        factor: how many times as long answers take.
    """

    def __init__(self, model: AdaptiveVLM) -> None:
        self.model = model
        self.factor = 1.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def answer(self, stages: Sequence[FirstStage], configuration: Configuration) -> list[Answer]:
        """Answer, see `AdaptiveVLM.answer`, and wait."""
        start = clock_ms()
        answers = self.model.answer(stages, configuration)
        if self.factor == 1:
            return answers
        answered = clock_ms()
        counted_ms = answered - start - sum(answer.uncounted_ms for answer in answers)
        until = answered + (self.factor - 1) * counted_ms
        while clock_ms() < until:
            time.sleep(0)  # a CPU clock has to go on
        waited_ms = clock_ms() - answered
        return [replace(answer, total_ms=answer.total_ms + waited_ms) for answer in answers]


def kept_live(
    controller: NumpyController,
    stream: Stream,
    policies: Sequence[str],
    served: Record,
    judged: Sequence[str],
) -> list[KeptRow]:
    """Return the share on time of the requests for which one was promised, a row for each judged
    policy and part of the stream; [] without a promise.

    Args:
        judged: names of some policies.
    """
    if controller.promise is None:
        return []
    took_ms = served["inference_ms"] + served["overhead_ms"]
    rows: list[KeptRow] = []
    for policy in judged:
        place = list(policies).index(policy)
        met = took_ms[place] <= stream.budgets_ms
        # what the controller promised at that moment, with the drift that it knew of
        moments = zip(served["limit_ms"][place].tolist(), served["drift"][place], strict=True)
        promises = [controller.promised(limit_ms, drift) for limit_ms, drift in moments]
        shares = np.array([each.share if each else 0.0 for each in promises])
        for number, part in enumerate(np.array_split(np.arange(len(met)), WINDOWS)):
            promised = part[shares[part] > 0]
            if not len(promised):
                continue
            hits = int(met[promised].sum())
            ci95 = exact_interval(hits, len(promised))
            promise = float(shares[promised].max())
            rows.append(
                {
                    "policy": policy,
                    "window": number + 1,
                    "promise": promise,
                    "requests": len(promised),
                    "on_time": hits / len(promised),
                    "ci95": ci95,
                    "broken": ci95[1] < promise,
                }
            )
    return rows
