"""RapidOCR behind the interface of all models with knobs
(`knobwise.profiling.measuring.adaptive_model`).

A detector finds boxes of text, a recogniser reads some of them, and the answer is looked up in what
was read. The first stage is the detector at its smallest side: its boxes tell how large, how many
and how tilted the texts are. Only the configurations with that side continue from it; the others
have paid for a look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knobwise.common.errors import InputError
from knobwise.profiling.measuring.adaptive_model import (
    Answer,
    Configuration,
    FirstStage,
    KnobSupport,
    Request,
    check_configuration,
    clock_ms,
)
from knobwise.profiling.ocr.layout import (
    ASPECTS,
    Line,
    aspect_of,
    find_answer,
    reading_order,
    shapes,
)
from knobwise.profiling.ocr.scenes import INSTALL
from knobwise.profiling.ocr.settings import PASSES, SIDES

FIRST_SIDE = SIDES[0]
"""Side of the detector in the first stage, in pixels."""
_SURE = 0.85
"""A text that is read with a lower score than this is read once more, upside down, in the second
pass."""
_DESCRIBED = 6
"""Boxes described one by one among the features: the first in reading order."""


@dataclass
class Work:
    """A request, with what has been computed for it so far."""

    request: Request
    results: dict[tuple[Any, ...], tuple[Any, float]] = field(default_factory=dict)
    """What each step gave and the ms that it took."""
    reused_ms: float = 0.0
    """Time of the steps that were called for and had been computed before."""

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """[h, w, 3], blue first, as OpenCV has them: the result of a step of `_detect`."""
        return self.results["pixels",][0]

    def step(self, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """Return the result of a step, computed unless it is there. Steps do not call for one
        another, lest a time be counted twice."""
        if key in self.results:
            result, ms = self.results[key]
            self.reused_ms += ms
            return result
        start = clock_ms()
        result = compute()
        self.results[key] = result, clock_ms() - start
        return result


class RapidOCRModel:
    """An `AdaptiveVLM`: RapidOCR with the weights in its wheel, on one thread.

    `side` is the longer side to which the picture is scaled for the detector, `boxes` how many of
    the detected boxes are read, in the order that the question suggests, and `passes` how: `plain`;
    `classify`, a classifier turns boxes that stand upside down before they are read; `second`, what
    was read with a low score is read again upside down.

    Raises InputError if the packages are not installed.
    """

    name = "rapidocr"
    knobs = (
        KnobSupport(
            "side", SIDES[-1], values=SIDES, sets="pixels of the longer side that the detector sees"
        ),
        KnobSupport("boxes", 10, least=1, most=100, sets="detected boxes that are read"),
        KnobSupport(
            "passes",
            "second",
            values=PASSES,
            sets="how boxes that stand upside down are dealt with",
        ),
    )

    def __init__(self) -> None:
        try:
            import cv2
            from rapidocr import RapidOCR
        except ImportError as error:
            raise InputError(f"model=ocr: {error.name} is not installed; {INSTALL}") from error
        threads = {
            f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")
        }
        how = {
            **threads,
            "Global.log_level": "error",
            "Global.use_preprocess_img": False,
            "Det.limit_type": "max",
        }
        self._detectors = {
            side: RapidOCR(params={**how, "Det.limit_side_len": side}) for side in SIDES
        }
        self._reader = self._detectors[FIRST_SIDE]
        cv2.setNumThreads(1)
        self._setting = check_configuration(self.knobs, {})

    @contextmanager
    def set_knobs(self, configuration: Configuration) -> Iterator[None]:
        """Set the knobs inside the context, as `AdaptiveVLM` demands."""
        before = self._setting
        self._setting = check_configuration(self.knobs, configuration)
        try:
            yield
        finally:
            self._setting = before

    def first_stage(self, request: Request, features: bool = True) -> FirstStage:
        """Run the detector at side 288, and compute what its boxes and the question tell. Without
        features it does nothing. Raises InputError for an image that is no picture in RGB."""
        start = clock_ms()
        work = Work(request)
        if not features:
            return FirstStage(request, {}, work, 0.0, 0.0)
        boxes, scores = self._detect(work, FIRST_SIDE)
        done = clock_ms()
        blocks = {
            "image_features": box_features(request.question, boxes, scores, work.pixels.shape[:2])
        }
        blocks["language_features"] = question_features(request.question)
        end = clock_ms()
        return FirstStage(request, blocks, work, end - start, end - done, self.reuses_look)

    @staticmethod
    def reuses_look(configuration: Configuration) -> bool:
        """Return True if a configuration continues from the first stage."""
        return configuration.get("side", SIDES[-1]) == FIRST_SIDE

    def answer(self, stages: Sequence[FirstStage], configuration: Configuration) -> list[Answer]:
        """Answer one request after another. Nothing but the first stage is reused, and that at its
        own side only."""
        reused = self.reuses_look(configuration)
        with self.set_knobs(configuration):
            return [
                self.answer_from(Work(s.request, dict(s.kept.results) if reused else {}))
                for s in stages
            ]

    def answer_from(self, work: Work) -> Answer:
        """Answer with the present knobs, from what has been computed already; its time counts as if
        computed now."""
        start = clock_ms()
        work.reused_ms = 0.0
        question = work.request.question
        side = self._setting["side"]
        passes = self._setting["passes"]
        boxes, _ = self._detect(work, side)
        detected_ms = clock_ms() - start + work.reused_ms
        placed = shapes(boxes)
        order = reading_order(question, placed).tolist()
        read = {
            i: self._read(work, side, boxes[i], i, passes) for i in order[: self._setting["boxes"]]
        }
        over = sum(turned for _, _, turned in read.values()) > len(read) / 2
        placed[:, :2] *= -1 if over else 1
        lines = [Line(i, read[i][0] if i in read else None, *placed[i, :4]) for i in order]

        def read_too(i: int) -> str:
            read[i] = self._read(work, side, boxes[i], i, passes)
            return read[i][0]

        text = find_answer(question, lines, read_too)
        total_ms = clock_ms() - start + work.reused_ms
        return Answer(text, total_ms, total_ms, detected_ms, len(boxes), len(read), len(text))

    def _detect(self, work: Work, side: int) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """Return boxes [B, 4, 2] in pixels of the picture, and their scores [B] in another
        order."""

        def detect() -> Any:
            detected = self._detectors[side](
                work.pixels, use_det=True, use_cls=False, use_rec=False
            )
            if detected.boxes is None:
                return np.zeros((0, 4, 2), np.float32), np.zeros(0)
            return np.asarray(detected.boxes, np.float32), np.asarray(detected.scores, np.float64)

        work.step(("pixels",), lambda: np.ascontiguousarray(_rgb(work.request.image)[:, :, ::-1]))
        return work.step(("detect", side), detect)

    def _read(
        self, work: Work, side: int, box: Any, number: int, passes: str
    ) -> tuple[str, float, bool]:
        """Return the text of a box, its score, and whether the box stands upside down."""

        def read(pixels: Any) -> tuple[str, float]:
            result = self._reader(pixels, use_det=False, use_cls=False, use_rec=True)
            if result.txts:
                return (str(result.txts[0]), float(result.scores[0]))
            return ("", 0.0)

        def classify(pixels: Any) -> bool:
            ((label, score),) = self._reader(
                pixels, use_det=False, use_cls=True, use_rec=False
            ).cls_res
            return label == "180" and score > 0.9

        pixels = work.step(("crop", side, number), lambda: _crop(work.pixels, box))
        turned = passes == "classify" and work.step(
            ("class", side, number), lambda: classify(pixels)
        )
        if not turned:
            text, score = work.step(("read", side, number), lambda: read(pixels))
            if passes != "second" or score >= _SURE:
                return text, score, False
        over = ("read over", side, number)
        other, certainty = work.step(over, lambda: read(np.ascontiguousarray(pixels[::-1, ::-1])))
        if turned or certainty > score:
            return (other, certainty, True)
        return (text, score, False)


def _rgb(image: Any) -> NDArray[np.uint8]:
    pixels = np.asarray(image.convert("RGB") if hasattr(image, "convert") else image)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        raise InputError(
            f"image: {pixels.dtype} of shape {list(pixels.shape)}; this model takes a PIL image"
        )
    return pixels


def _crop(pixels: NDArray[np.uint8], box: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return a box [4, 2] cut out upright."""
    from rapidocr.utils.process_img import get_rotate_crop_image

    return np.ascontiguousarray(get_rotate_crop_image(pixels, box))


def box_features(
    question: str, boxes: NDArray[np.float32], scores: NDArray[np.float64], size: tuple[int, ...]
) -> NDArray[np.float32]:
    """Compute [57] statistics of detected boxes [B, 4, 2] with scores [B] on a picture of `size`
    (h, w): how many, how tall, long, tilted and sure they are, where they stand; and the same of
    the first boxes in reading order. Heights and lengths are logarithms of pixels, places shares of
    the picture; zeros where there are no boxes."""
    placed = shapes(boxes)
    placed = placed[reading_order(question, placed)]
    height = np.log(placed[:, 3].clip(1))
    length = np.log((placed[:, 2] / placed[:, 3].clip(1)).clip(0.1))
    x = placed[:, 0] / size[1]
    y = placed[:, 1] / size[0]
    area = placed[:, 2] * placed[:, 3] / (size[0] * size[1])
    tilt = np.minimum(np.abs(placed[:, 4]), 45.0) / 45.0
    described = np.stack([height, length, x, y, np.sqrt(area), tilt], 1)
    first = np.zeros((_DESCRIBED, described.shape[1]))
    first[: len(described)] = described[:_DESCRIBED]
    if not len(placed):
        return np.zeros(21 + first.size, np.float32)
    tallest = int(np.argmax(height))
    overall = [
        len(placed) / 10,
        np.log1p(len(placed)),
        *np.quantile(height, (0, 0.25, 0.5, 0.75, 1)),
        height.std(),
    ]
    overall += [
        length.mean(),
        length.max(),
        x.mean(),
        y.mean(),
        x.std(),
        y.std(),
        x[tallest],
        y[tallest],
    ]
    overall += [area.sum(), tilt.mean(), scores.mean(), scores.min(), scores.std()]
    return np.array([*overall, *first.ravel()], np.float32)


def question_features(question: str) -> NDArray[np.float32]:
    """Describe a question, [8]: what it is about, its words / 10 and its letters / 50."""
    about = [float(aspect_of(question) == aspect) for aspect in ASPECTS]
    return np.array([*about, len(question.split()) / 10, len(question) / 50], np.float32)
