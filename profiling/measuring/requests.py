"""Requests to a model and scores of its answers, by the ids of a profile's samples."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence
from typing import Protocol

from knobwise.common.errors import InputError
from knobwise.common.imports import imported, in_a_line
from knobwise.profiling.measuring.adaptive_model import Request
from knobwise.profiling.measuring.answer_metrics import answer_accuracy
from knobwise.profiling.measuring.questions import VQAItem


class Requests(Protocol):
    """Requests whose answers can be scored: a file of questions, or a generator of them, which has
    no end."""

    def ids(self) -> Iterator[str]:
        """Return the ids of the samples, in an order that does not change."""
        ...

    def __contains__(self, sample_id: object) -> bool: ...

    def request(self, sample_id: str) -> Request:
        """Return the request of a sample."""
        ...

    def score(self, sample_id: str, answer: str) -> float:
        """Score an answer in [0, 1]."""
        ...


class Questions:
    """Questions with known answers.

    Args:
        items: with different ids.
        metric: see `VLMProfileConfig.metric`; also `module:function`, a function of the user's own
            of an answer and the right ones (a tuple of texts), which gives its accuracy in [0, 1].
        prompt: how a question is put.

    Raises:
        InputError: a metric that does not fit an item (named), a function that there is not, that
            raises, or that gives anything but a number in [0, 1]; each already for the right
            answers.
    """

    def __init__(
        self, items: Sequence[VQAItem], metric: str = "auto", prompt: str = "{question}{choices}"
    ) -> None:
        self._items = {item.id: item for item in items}
        self._prompt = prompt
        self._key = f"knobs.metric={metric}"
        self._function = None
        if ":" in metric:
            self._function = imported(self._key, metric, "function", "my_module:accuracy")
        self.metrics = {item.id: metric_of(item, metric) for item in items}
        """The name of each sample's metric."""
        for item in items:
            self.score(item.id, item.answer)

    def ids(self) -> Iterator[str]:
        return iter(self._items)

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._items

    def request(self, sample_id: str) -> Request:
        item = self._items[sample_id]
        return Request(item.picture(), question_text(item, self._prompt))

    def score(self, sample_id: str, answer: str) -> float:
        item = self._items[sample_id]
        if self._function is None:
            try:
                return answer_accuracy(self.metrics[sample_id], answer, item.answers, item.choices)
            except InputError as error:
                raise InputError(
                    f"sample {sample_id!r}: {error}; choose another knobs.metric=…"
                ) from error
        try:
            accuracy = float(self._function(answer, item.answers))
        except Exception as error:
            raise InputError(
                f"{self._key}: raises {in_a_line(error)} for sample {sample_id!r}"
            ) from error
        if not 0 <= accuracy <= 1:
            raise InputError(
                f"{self._key}: gives {accuracy} for sample {sample_id!r}; must be between 0 and 1"
            )
        return accuracy


def metric_of(item: VQAItem, metric: str = "auto") -> str:
    """Return the metric of one sample."""
    if metric != "auto":
        return metric
    if item.choices:
        return "choice"
    return "vqa" if len(item.answers) >= 3 else "exact"


def question_text(item: VQAItem, prompt: str = "{question}{choices}") -> str:
    """Return the question of one sample as the model reads it."""
    options = [
        f"\n{letter}. {text}"
        for letter, text in zip(string.ascii_uppercase, item.choices, strict=False)
    ]
    parts = {"{question}": item.question, "{choices}": "".join(options)}
    return re.sub(r"{question}|{choices}", lambda match: parts[match[0]], prompt)
