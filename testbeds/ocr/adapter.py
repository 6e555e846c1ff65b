"""RapidOCR behind the interface of all models with knobs
(`knobwise.profiling.measuring.adaptive_model`).

A detector finds boxes of text, a recogniser reads some of them, and the answer is looked up in what
was read. The first stage is the detector at its smallest side: its boxes tell how large, how many
and how tilted the texts are. Only the configurations with that side continue from it; the others
have paid for a look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knobwise.common.errors import InputError
from knobwise.profiling.measuring.adaptive_model import (
    Answer,
    Configuration,
    FirstStage,
    KeepsConfiguration,
    KnobSupport,
    Request,
    check_configuration,
    clock_ms,
)
from knobwise.testbeds.ocr.layout import (
    ASPECTS,
    Line,
    aspect_of,
    find_answer,
    reading_order,
    shapes,
)
from knobwise.testbeds.ocr.scenes import INSTALL, Scenes

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]
SIDES = (288, 416, 576)
"""Values of the knob `side`; the first stage is the detector at the smallest, in pixels."""
PASSES = ("plain", "classify", "second")
"""Values of the knob `passes`, from the cheapest on."""
SURE = 0.85
"""A text that is read with a lower score than this is read once more, upside down, in the second
pass."""
DESCRIBED = 6
"""Boxes described one by one among the features: the first in reading order."""


@dataclass
class RequestSteps:
    """A request, with the result and the time of each step that was computed for it."""

    request: Request
    results: dict[tuple[Any, ...], tuple[Any, float]] = field(default_factory=dict)
    """By step: its result, and the ms that it took."""
    reused_ms: float = 0.0
    """Time of the steps that were called for and had been computed before."""

    def take(self, step: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """Return the result of a step, computed unless it is there. Steps do not call for one
        another, lest a time be counted twice."""
        if step in self.results:
            result, ms = self.results[step]
            self.reused_ms += ms
            return result
        start = clock_ms()
        result = compute()
        self.results[step] = result, clock_ms() - start
        return result


class RapidOCRModel(KeepsConfiguration):
    """An `AdaptiveVLM`: RapidOCR with the weights in its wheel, on one thread.

    `side` is the longer side to which the picture is scaled for the detector, `boxes` how many of
    the detected boxes are read, in the order that the question suggests, and `passes` how: `plain`;
    `classify`, a classifier turns boxes that stand upside down before they are read; `second`, what
    was read with a low score is read again upside down.

    Raises InputError if the packages are not installed.
    """

    name = "rapidocr"
    dataset = "ocr"
    knobs = (
        KnobSupport(
            "side", SIDES[-1], values=SIDES, sets="pixels of the longer side that the detector sees"
        ),
        KnobSupport("boxes", 10, 1, 100, "detected boxes that are read"),
        KnobSupport(
            "passes", "second", values=PASSES, sets="how boxes that stand upside down are found"
        ),
    )
    measured = {"side": SIDES, "boxes": (2, 4, 7, 10), "passes": PASSES}

    def __init__(self) -> None:
        try:
            import cv2
            from rapidocr import RapidOCR
        except ImportError as error:
            raise InputError(f"model=ocr: {error.name} is not installed; {INSTALL}") from error
        settings = {
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            "Global.log_level": "error",
            "Global.use_preprocess_img": False,
            "Det.limit_type": "max",
        }
        # a detector scales every picture to a side that is fixed when it is made
        self._detectors = {
            side: RapidOCR(params=settings | {"Det.limit_side_len": side}) for side in SIDES
        }
        self._reader = self._detectors[SIDES[0]]
        cv2.setNumThreads(1)
        self.questions = Scenes()
        packages = ("rapidocr", "onnxruntime", "opencv-python-headless", "numpy")
        self.identity = {name: version(name) for name in packages}
        self.configuration = check_configuration(self.knobs, {})

    def first_stage(self, request: Request, features: bool = True) -> FirstStage:
        """Run the detector at side 288, and compute what its boxes and the question tell. Without
        features it does nothing. Raises InputError for an image that is no picture in RGB."""
        steps = RequestSteps(request)
        if not features:
            return FirstStage(request, {}, steps, 0.0, 0.0)
        start = clock_ms()
        pixels = self._pixels(steps)
        boxes, scores = self._detect(steps, pixels, SIDES[0])
        detected = clock_ms()
        blocks = {
            "image_features": box_features(request.question, boxes, scores, pixels.shape[:2]),
            "language_features": question_features(request.question),
        }
        end = clock_ms()
        return FirstStage(
            request,
            blocks,
            kept=steps,
            total_ms=end - start,
            extra_ms=end - detected,
            reused_by=self.reuses_look,
        )

    @staticmethod
    def reuses_look(configuration: Configuration) -> bool:
        """Return True if a configuration continues from the first stage."""
        return configuration.get("side", SIDES[-1]) == SIDES[0]

    def answer(self, stages: Sequence[FirstStage], configuration: Configuration) -> list[Answer]:
        """Answer one request after another. Nothing but the first stage is reused, and that at its
        own side only."""
        answers = []
        for stage in stages:
            steps = RequestSteps(stage.request)
            if self.reuses_look(configuration):
                steps.results |= stage.kept.results
            answers.append(self._answer(steps, configuration))
        return answers

    def answer_all(
        self, stage: FirstStage, configurations: Sequence[Configuration]
    ) -> list[Answer]:
        """Answer a request under several configurations. A step that they share (a detection, a box
        cut out, classified, read) is computed once, and its time counts in every answer."""
        return [self._answer(stage.kept, configuration) for configuration in configurations]

    def _answer(self, steps: RequestSteps, configuration: Configuration) -> Answer:
        """Answer from what has been computed already; its time counts as if computed now."""
        with self.set_knobs(configuration):
            start = clock_ms()
            steps.reused_ms = 0.0
            question = steps.request.question
            pixels = self._pixels(steps)
            boxes, _ = self._detect(steps, pixels, self.configuration["side"])
            detected_ms = clock_ms() - start + steps.reused_ms
            outlines = shapes(boxes)
            order = reading_order(question, outlines).tolist()
            # the text of each box that is read, and whether the box stands upside down
            read = {}

            def read_box(i: int) -> str:
                read[i] = self._read(steps, pixels, boxes, i)
                return read[i][0]

            for i in order[: self.configuration["boxes"]]:
                read_box(i)
            # a picture is upside down if most of its boxes are
            if sum(turned for _, turned in read.values()) > len(read) / 2:
                outlines[:, :2] *= -1
            lines = [Line(i, read.get(i, (None,))[0], *outlines[i, :4]) for i in order]
            text = find_answer(question, lines, read_box)
            total_ms = clock_ms() - start + steps.reused_ms
        return Answer(
            text=text,
            total_ms=total_ms,
            prefill_ms=total_ms,
            vision_ms=detected_ms,
            vision_tokens=len(boxes),
            language_tokens=len(read),
            output_tokens=len(text),
        )

    def _pixels(self, steps: RequestSteps) -> Pixels:
        """Return the picture as OpenCV has it: [h, w, 3], blue first."""
        return steps.take(
            ("pixels",), lambda: np.ascontiguousarray(_rgb(steps.request.image)[:, :, ::-1])
        )

    def _detect(
        self, steps: RequestSteps, pixels: Pixels, side: int
    ) -> tuple[Floats, NDArray[np.float64]]:
        """Return boxes [B, 4, 2] in pixels of the picture, and their scores [B] in another
        order."""

        def detect() -> Any:
            detected = self._detectors[side](pixels, use_det=True, use_cls=False, use_rec=False)
            if detected.boxes is None:
                return np.zeros((0, 4, 2), np.float32), np.zeros(0)
            return np.asarray(detected.boxes, np.float32), np.asarray(detected.scores, np.float64)

        return steps.take(("detect", side), detect)

    def _read(self, steps: RequestSteps, pixels: Pixels, boxes: Floats, i: int) -> tuple[str, bool]:
        """Return the text of a box, and whether the box stands upside down."""
        side = self.configuration["side"]
        passes = self.configuration["passes"]

        def read(crop: Any) -> tuple[str, float]:
            result = self._reader(crop, use_det=False, use_cls=False, use_rec=True)
            if result.txts:
                return str(result.txts[0]), float(result.scores[0])
            return "", 0.0

        def classify() -> bool:
            result = self._reader(crop, use_det=False, use_cls=True, use_rec=False)
            ((label, score),) = result.cls_res
            return label == "180" and score > 0.9

        crop = steps.take(("crop", side, i), lambda: _crop(pixels, boxes[i]))
        # three ways to deal with boxes that stand upside down
        turned = passes == "classify" and steps.take(("class", side, i), classify)
        score = 0.0
        if not turned:
            text, score = steps.take(("read", side, i), lambda: read(crop))
            if passes != "second" or score >= SURE:
                return text, False
        # once more, upside down
        over, certainty = steps.take(
            ("read over", side, i), lambda: read(np.ascontiguousarray(crop[::-1, ::-1]))
        )
        if turned or certainty > score:
            return over, True
        return text, False


def _rgb(image: Any) -> Pixels:
    """Return the pixels [h, w, 3] of a PIL image or an array. Raises InputError for another
    array."""
    if hasattr(image, "convert"):
        image = image.convert("RGB")
    pixels = np.asarray(image)
    if pixels.shape[2:] != (3,) or pixels.dtype != np.uint8:
        raise InputError(
            f"image: {pixels.dtype} of shape {list(pixels.shape)}; this model takes a PIL image"
        )
    return pixels


def _crop(pixels: Pixels, box: Floats) -> Pixels:
    """Return a box [4, 2] cut out upright."""
    from rapidocr.utils.process_img import get_rotate_crop_image

    return np.ascontiguousarray(get_rotate_crop_image(pixels, box))


def box_features(
    question: str, boxes: Floats, scores: NDArray[np.float64], size: tuple[int, ...]
) -> Floats:
    """Compute [57] statistics of detected boxes [B, 4, 2] with scores [B] on a picture of `size`
    (h, w): how many, how tall, long, tilted and sure they are, where they stand; and the same of
    the first boxes in reading order. Heights and lengths are logarithms of pixels, places shares of
    the picture; zeros where there are no boxes."""
    features = np.zeros(21 + 6 * DESCRIBED, np.float32)
    if not len(boxes):
        return features
    outlines = shapes(boxes)
    # all in reading order
    outlines = outlines[reading_order(question, outlines)]
    centre = outlines[:, :2] / size[::-1]
    width, height, angle = outlines[:, 2:].T
    area = width * height / (size[0] * size[1])
    length = np.log((width / height.clip(1)).clip(0.1))
    height = np.log(height.clip(1))
    tilt = np.minimum(np.abs(angle), 45.0) / 45.0
    # of all boxes
    features[:21] = [
        len(boxes) / 10,
        np.log1p(len(boxes)),
        *np.quantile(height, (0, 0.25, 0.5, 0.75, 1)),
        height.std(),
        length.mean(),
        length.max(),
        *centre.mean(0),
        *centre.std(0),
        *centre[np.argmax(height)],
        area.sum(),
        tilt.mean(),
        scores.mean(),
        scores.min(),
        scores.std(),
    ]
    # of the first boxes, one after another
    first = np.column_stack([height, length, centre, np.sqrt(area), tilt])[:DESCRIBED].ravel()
    features[21 : 21 + len(first)] = first
    return features


def question_features(question: str) -> Floats:
    """Describe a question, [8]: which aspect it asks for, its words / 10 and its letters / 50."""
    aspects = [float(aspect_of(question) == aspect) for aspect in ASPECTS]
    return np.array([*aspects, len(question.split()) / 10, len(question) / 50], np.float32)
