"""Requests to a model and scores of its answers, by the ids of a profile's samples."""

from __future__ import annotations

import inspect
import itertools
import re
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from knobwise.common.checks import share
from knobwise.common.errors import InputError
from knobwise.common.imports import import_callable, in_a_line
from knobwise.profiling.measuring.adaptive_model import Request
from knobwise.profiling.measuring.answer_metrics import answer_accuracy, without_thoughts
from knobwise.profiling.measuring.questions import VQAItem

PROMPT = "{question}{choices}"


class Requests(ABC):
    """Requests whose answers can be scored: a file of questions, or a generator of them, which has
    no end."""

    prompt = PROMPT
    """How a question is put."""

    @abstractmethod
    def ids(self) -> Iterator[str]:
        """Return the ids of the samples, in an order that does not change."""

    @abstractmethod
    def __contains__(self, sample_id: object) -> bool:
        """Tell whether there is a sample with this id."""

    @abstractmethod
    def item(self, sample_id: str) -> VQAItem:
        """Read the question, its picture and its answers, by the id of the sample."""

    def request(self, sample_id: str) -> Request:
        """Turn a sample into what a model is asked: picture and prompt."""
        item = self.item(sample_id)
        return Request(item.picture(), question_text(item, self.prompt))

    def accuracy(self, sample_id: str, answer: str, failed: float | None = None) -> float:
        """Return the accuracy of an answer: its score, or 0 whatever its text if it `failed` (see
        `Answer.extra`; None where the model does not say). Thoughts are no part of it."""
        return 0.0 if (failed or 0.0) > 0 else self.score(sample_id, without_thoughts(answer))

    def score(self, sample_id: str, answer: str) -> float:
        """Score the text of an answer, without its thoughts, in [0, 1]."""
        item = self.item(sample_id)
        return answer_accuracy(metric_of(item), answer, item.answers, item.choices)


class Questions(Requests):
    """Questions with known answers.

    Args:
        items: with different ids.
        metric: see `VLMProfileConfig.metric`; also `module:function`, a function of the user's own
            of an answer and the right ones (a tuple of texts), which gives its accuracy in [0, 1].
            One that needs a third argument gets the `VQAItem`.
        prompt: how a question is put.

    Raises:
        InputError: a metric that does not fit an item (named), a function that there is not, that
            raises, or that gives anything but a number in [0, 1]; each already for the right
            answers.
    """

    def __init__(
        self, items: Sequence[VQAItem], metric: str = "auto", prompt: str = PROMPT
    ) -> None:
        self._items = {item.id: item for item in items}
        self.prompt = prompt
        self._key = f"knobs.metric={metric}"
        self._function: Callable[..., Any] | None = None
        self._judges_item = False
        if ":" in metric:
            self._function = import_callable(self._key, metric, "function", "my_module:accuracy")
            self._judges_item = _needs_third(self._function)
        # a metric that does not fit is refused here, before anything is measured
        self.metrics = {item.id: metric_of(item, metric) for item in items}
        """The name of each sample's metric."""
        for item in items:
            try:
                self.score(item.id, item.answer)
            except InputError as error:
                raise InputError(
                    f"{error}, in a trial before measuring, with the right answer {item.answer!r} "
                    "as the answer"
                ) from error

    def ids(self) -> Iterator[str]:
        return iter(self._items)

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._items

    def item(self, sample_id: str) -> VQAItem:
        return self._items[sample_id]

    def score(self, sample_id: str, answer: str) -> float:
        item = self.item(sample_id)
        try:
            if self._function is None:
                metric = self.metrics[sample_id]
                accuracy = answer_accuracy(metric, answer, item.answers, item.choices)
            elif self._judges_item:
                accuracy = float(self._function(answer, item.answers, item))
            else:
                accuracy = float(self._function(answer, item.answers))
            share("accuracy", accuracy)
        # code of the user's own may raise anything
        except Exception as error:
            raise InputError(f"{self._key}: {in_a_line(error)} for sample {sample_id!r}") from error
        return accuracy


class DrawnQuestions(Requests, Sequence[VQAItem]):
    """An unlimited, seeded stream of questions (id = index); as a sequence it holds the first
    `length`, the measured ones."""

    length = 2000

    def __init__(self) -> None:
        self._items: dict[int, VQAItem] = {}

    @abstractmethod
    def draw(self, row: int) -> VQAItem:
        """Draw the item with this number, always the same."""

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: Any) -> Any:
        if row >= self.length:
            raise IndexError(row)
        return self.item(row)

    def item(self, row: int | str) -> VQAItem:
        """Return the item with this number, drawn once."""
        if int(row) not in self._items:
            self._items[int(row)] = self.draw(int(row))
        return self._items[int(row)]

    def ids(self) -> Iterator[str]:
        return map(str, itertools.count())

    def __contains__(self, sample_id: object) -> bool:
        return isinstance(sample_id, str) and sample_id.isascii() and sample_id.isdigit()


def _needs_third(function: Callable[..., Any]) -> bool:
    """Return True if a function cannot be called with two arguments, but with three."""
    can = []
    for count in (2, 3):
        try:
            inspect.signature(function).bind(*range(count))
            can.append(True)
        except (TypeError, ValueError):  # too many or too few, or none that Python can see
            can.append(False)
    return can == [False, True]


def metric_of(item: VQAItem, metric: str = "auto") -> str:
    """Return the metric of one sample."""
    if metric != "auto":
        return metric
    if item.choices:
        return "choice"
    if len(item.answers) >= 3:
        return "vqa"
    return item.metric


def question_text(item: VQAItem, prompt: str = PROMPT) -> str:
    """Return the question of one sample as the model reads it."""
    pairs = zip(string.ascii_uppercase, item.choices, strict=False)
    options = "".join(f"\n{letter}. {text}" for letter, text in pairs)
    # both at once, since a question may contain {choices} itself
    parts = {"{question}": item.question, "{choices}": options}
    return re.sub("|".join(parts), lambda match: parts[match[0]], prompt)
