"""Visual questions and answers from files: the queries, and the bank of items that can serve as
demonstrations."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl
import torch
from PIL import Image
from torch import Tensor

from knobwise.common.errors import InputError, naming
from knobwise.envs.readers.column_values import refuse_lost_digits
from knobwise.envs.readers.frames import read_frame
from knobwise.profiling.measuring.answer_metrics import normalise_answer

Prompt = tuple[int, list[int]]
"""A query's row and its demonstrations' rows, in order."""
PARTS = ("query", "demonstration")
"""What an item of a file may be."""
COLUMNS = {
    *("id", "question_id", "image", "image_path", "question", "answers", "answer"),
    *("image_id", "choices", "question_type", "part"),
}
"""What is read of a file; its other columns are `VQAItem.fields`."""


def soft_accuracy(answer: str, references: Sequence[str]) -> float:
    """Return the VQA accuracy min(1, agreeing / 3) of an answer (Antol et al. 2015, section 3).

    With fewer than three reference answers it is the share that agrees, so 1 or 0 with a single
    one.
    """
    return min(1.0, agreeing(answer, references) / min(3, len(references)))


def agreeing(answer: str, references: Sequence[str]) -> int:
    """Count the reference answers that agree with an answer, all of them `normalised`."""
    return list(map(normalise_answer, references)).count(normalise_answer(answer))


def folded(question: str) -> str:
    """Return what is the same for questions that differ in case or blanks alone, of which each
    gives the other's answer away."""
    return " ".join(question.split()).casefold()


@dataclass(frozen=True)
class VQAItem:
    """One question about one image, with the answers that people gave."""

    id: str
    image: Any
    """A file (`Path`), the bytes of one, a PIL image, or a tensor or array for a model that takes
    such; or what draws a picture by `convert(mode)`. None for a question about no image."""
    question: str
    answers: tuple[str, ...]
    """At least one; data sets like VQA have ten, repeats included."""
    image_id: str = ""
    """Identifies the image, so that a query's own image is never among its demonstrations."""
    choices: tuple[str, ...] = ()
    """The possible answers, where the data name them; at least one is right."""
    question_type: str = ""
    """The kind of the question, for figures by kind."""
    metric: str = "exact"
    """The metric of an item without choices and with fewer than three answers."""
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """What else the data say of it, by column: numbers, texts, truth values or None."""

    @cached_property
    def answer(self) -> str:
        """The most common answer (of equally common ones the first), which the item shows as a
        demonstration."""
        return most_common(self.answers)[0]

    def picture(self) -> Any:
        """Return the image in RGB; a tensor or array as it is. Raises InputError for a file that is
        no image."""
        image = self.image
        if isinstance(image, bytes):
            image = io.BytesIO(image)
        try:
            if isinstance(image, Path | io.BytesIO):
                image = Image.open(image)
            if hasattr(image, "convert"):
                return image.convert("RGB")
            return image
        except (OSError, Image.DecompressionBombError) as error:
            raise InputError(f"image of item {self.id!r}: cannot be read ({error})") from error


@dataclass(frozen=True)
class VQAData:
    """Queries, and the bank that their demonstrations come from; scorers get row numbers of
    both."""

    queries: tuple[VQAItem, ...]
    bank: tuple[VQAItem, ...]

    def candidates(self, row: int, most: int) -> tuple[str, ...]:
        """Return the possible answers to query `row`, in alphabetical order, so that a tie favours
        none.

        They are all its `choices`, where the data name some. Else they are at most `most` of: its
        reference answers; the bank's answers to questions that begin with the same two words ("How
        many", "What color"); the bank's other answers. Each group begins with the most common.
        Spellings that are `normalised` alike count once.
        """
        item = self.queries[row]
        if item.choices:
            return tuple(sorted(most_common(item.choices)))
        alike = self._answers_by_start.get(_start(item.question), ())
        spelling: dict[str, str] = {}
        for answer in (*most_common(item.answers), *alike, *self._answers_by_start[None]):
            if len(spelling) == most:
                break
            # the first spelling of an answer stays
            spelling.setdefault(normalise_answer(answer), answer)
        return tuple(sorted(spelling.values()))

    def vote(self, queries: Tensor, demonstrations: Tensor) -> Tensor:
        """Return 1 where the most common answer of the demonstrations is right, else 0: float32
        [n]. It is right where none of the reference answers has a higher soft accuracy.

        `queries` is int64 [n], `demonstrations` int64 [n, T], −1 padded.
        """
        right = torch.zeros(len(queries))
        for i, (query, rows) in enumerate(prompts_of(queries, demonstrations)):
            if rows:
                references = self.queries[query].answers
                voted, *_ = most_common([self.bank[row].answer for row in rows])
                best = max(soft_accuracy(answer, references) for answer in references)
                right[i] = float(soft_accuracy(voted, references) == best)
        return right

    @cached_property
    def _answers_by_start(self) -> dict[str | None, tuple[str, ...]]:
        """The bank's answers by the first two words of their question; under None all of them."""
        groups: dict[str | None, list[str]] = {None: []}
        for item in self.bank:
            groups[None].append(item.answer)
            groups.setdefault(_start(item.question), []).append(item.answer)
        return {start: most_common(answers) for start, answers in groups.items()}


def prompts_of(queries: Tensor, demonstrations: Tensor) -> list[Prompt]:
    """Return each query, int64 [n], with its demonstrations, int64 [n, T], −1 padded."""
    pairs = zip(queries.tolist(), demonstrations.tolist(), strict=True)
    return [(query, [row for row in rows if row >= 0]) for query, rows in pairs]


def most_common(answers: Sequence[str]) -> tuple[str, ...]:
    """Return the different answers, each in its first spelling, the most common first.

    Equally common ones keep their order.
    """
    counts = Counter(map(normalise_answer, answers))
    spelling = {normalise_answer(answer): answer for answer in reversed(answers)}
    return tuple(spelling[plain] for plain, _ in counts.most_common())


def _start(question: str) -> str:
    """Return the first two words of a question."""
    return " ".join(question.lower().split()[:2])


def read_vqa_data(
    path: str | Path, bank: str | Path | None = None, images: bool | None = True
) -> VQAData:
    """Read queries and bank from tables, such as JSON lines.

    Each row is an item with these columns:

    - `id` (or `question_id`)
    - `image` (or `image_path`): a path, relative to the file. In Parquet also the bytes of an image
      file, alone or in a struct {bytes, path} as Hugging Face datasets write them
    - `question`
    - `answers` (or `answer`): a text, a list of texts, or the {"answer": …} of VQA's annotations
    - `image_id`, optional: else the whole path, or a hash of the bytes, identifies the image
    - `choices`, optional: a list of texts
    - `question_type`, optional: the kind of question
    - `part`, optional: `query`, or `demonstration` for an item of the bank
    - any other of numbers, texts or truth values: see `VQAItem.fields`

    Without `bank`, and without parts in the file, each item is both a query and a possible
    demonstration.

    Without `images` these are not read, and items with the same question, whatever its case and
    blanks, count as one image. None: an item may have an image.

    Raises:
        InputError: no such file, another kind of file, or a row (named) that lacks a column,
            repeats an id, names a missing image, or whose choices include none of its answers.
    """
    parts, queries = _items(Path(path), images)
    if bank is not None:
        if any(parts):
            raise InputError(f"{path}: has parts already; leave out the other bank, {bank}")
        return VQAData(queries, _items(Path(bank), images)[1])
    if not any(parts):
        return VQAData(queries, queries)
    if unknown := set(parts) - set(PARTS):
        raise InputError(f"{path}: part is {unknown.pop()!r}, not {' or '.join(PARTS)}")
    items_of = {}
    for name in PARTS:
        items_of[name] = tuple(itertools.compress(queries, [part == name for part in parts]))
        if not items_of[name]:
            raise InputError(f"{path}: no item has part={name}")
    return VQAData(queries=items_of["query"], bank=items_of["demonstration"])


def _items(path: Path, images: bool | None) -> tuple[list[Any], tuple[VQAItem, ...]]:
    """Read the items of a file, and the part of each."""
    items: dict[str, VQAItem] = {}
    frame = read_frame(path)
    with naming(path):
        for name in {"id", "question_id"}.intersection(frame.columns):
            refuse_lost_digits(frame[name])
    rows = frame.to_dicts()
    if not rows:
        raise InputError(f"{path}: holds no items")
    plain = frame.select(pl.selectors.numeric() | pl.selectors.string() | pl.selectors.boolean())
    further = [name for name in plain.columns if name not in COLUMNS]
    for index, row in enumerate(rows, 1):
        where = f"{path}, row {index}"
        item = _item(path, row, where, images, further)
        if items.setdefault(item.id, item) is not item:
            raise InputError(f"{where}: the id {item.id!r} occurs twice; ids must be unique")
    return [row.get("part") for row in rows], tuple(items.values())


def _item(
    path: Path, row: Mapping[str, Any], where: str, images: bool | None, further: Sequence[str]
) -> VQAItem:
    """Read one item from a row of a file; `where` names the row in messages, `further` what else is
    kept of it."""
    if images is None:
        images = any(row.get(key) for key in ("image", "image_path"))

    def value(*spellings: str) -> Any:
        for key in spellings:
            if row.get(key) not in (None, "", []):
                return row[key]
        raise InputError(f"{where}: has no {' or '.join(spellings)}")

    # the required columns
    item_id = value("id", "question_id")
    question = value("question")
    source = _image(path, value("image", "image_path"), where) if images else None
    for key, part, kind in (
        ("id", item_id, str | int),
        ("question", question, str),
        ("image", source, bytes | Path if images else type(None)),
    ):
        if not isinstance(part, kind):
            raise InputError(f"{where}: {key} is of type {type(part).__name__}")
    # answers and choices are compared as scorers compare them
    answers = _texts(value("answers", "answer"), where, "answers")
    choices: tuple[str, ...] = ()
    if row.get("choices"):
        choices = _texts(row["choices"], where, "choices")
        if not any(agreeing(choice, answers) for choice in choices):
            raise InputError(
                f"{where}: none of its choices {[*choices]} is one of its answers {[*answers]}"
            )
    image_id = row.get("image_id")
    if image_id is None:
        image_id = folded(question) if source is None else _identity_of(source)
    return VQAItem(
        id=str(item_id),
        image=source,
        question=question,
        answers=answers,
        image_id=str(image_id),
        choices=choices,
        question_type=str(row.get("question_type") or ""),
        fields={name: row[name] for name in further},
    )


def _image(path: Path, written: Any, where: str) -> Any:
    """Return the image that a row of a file names: the bytes, or the path of a file that is there;
    anything else as it is."""
    # as datasets of Hugging Face hold images
    if isinstance(written, Mapping):
        written = written.get("bytes") or written.get("path")
    if not isinstance(written, str):
        return written
    file = path.parent / written
    # unlike Path.is_file, it takes a path of any length
    if not os.path.isfile(file):
        raise InputError(f"{where}: no image file {file}")
    return file


def _identity_of(image: bytes | Path) -> str:
    """Return what tells an image from others: the same file, or the same bytes, is the same."""
    if isinstance(image, Path):
        return str(image.resolve())
    return hashlib.sha256(image).hexdigest()


def _texts(value: Any, where: str, what: str) -> tuple[str, ...]:
    """Read a text, a list of texts, or a list of {"answer": …}; `what` names them in messages."""
    values = value
    if not isinstance(value, list):
        values = [value]
    texts = [v.get("answer") if isinstance(v, Mapping) else v for v in values]
    if not all(isinstance(text, str | int | float) and str(text).strip() for text in texts):
        raise InputError(f"{where}: {what} must be texts, and none of them empty")
    # a column that holds 3 and 4.5 holds 3.0 and 4.5
    exact = [int(x) if isinstance(x, float) and x.is_integer() else x for x in texts]
    return tuple(str(text).strip() for text in exact)
