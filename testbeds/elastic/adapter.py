"""The elastic model with the interface that all models with knobs have
(`knobwise.profiling.measuring.adaptive_model`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.profiling.measuring.adaptive_model import (
    KNOBS,
    Answer,
    FirstStage,
    KeepsConfiguration,
    KnobSupport,
    Request,
    check_configuration,
    clock_ms,
)
from knobwise.profiling.measuring.questions import VQAItem
from knobwise.profiling.measuring.requests import DrawnQuestions
from knobwise.testbeds.elastic.model import TILE, ElasticVLM, shipped_model, window_starts
from knobwise.testbeds.elastic.scenes import (
    CELL,
    FILLER,
    MAX_SIDE,
    PROMPT_TOKENS,
    SEED,
    TOKEN,
    Floats,
    Scene,
    draw_sample,
)
from knobwise.testbeds.elastic.settings import Configuration

_PROMPT = torch.Size((1, PROMPT_TOKENS))
_EVENLY = np.full(PROMPT_TOKENS, 1 / PROMPT_TOKENS, np.float32)
_SIDES = range(2 * CELL, MAX_SIDE * CELL + 1, CELL)

SETS = ("16-pixel tiles of the image, at most", "experts for each token", "blocks that run")


class ElasticAdaptive(KeepsConfiguration):
    """An `AdaptiveVLM`: the elastic model, one request at a time.

    The first stage scales the image down to an overview, which every configuration needs. The
    answer continues from the overview, and the features of a decision are computed from it. The
    mean of its tokens is linear in the mean of its windows, so the features need no tokens.

    An image is a PIL image, or a tensor or array, float [1, 3, h, w] or [3, h, w] in 0–1. Its sides
    are 2 to 8 cells of 8 pixels. A question is a text such as `"digit? r1 c2"`, or its tokens,
    int64 [1, 6].

    Args:
        model: None for the one that comes with knobwise.
        name: the name of the model in files.
    """

    dataset = "elastic_scenes"
    first_stage_overlaps = True
    """The first stage may run while another thread answers, since it uses no knob."""
    measured = dict(zip(KNOBS, ((2, 4, 8, 12), (1, 2, 3, 4), (3, 4, 5, 6)), strict=True))
    """Values of the knobs in the built-in profile."""

    def __init__(self, model: ElasticVLM | None = None, name: str = "elastic") -> None:
        self.model = model or shipped_model()
        self.name = name
        self.questions = ElasticRequests()
        """The questions of the built-in profile: 1,500 scenes, one question each, with digits that
        training never saw."""
        # the largest value of each knob is the largest in training
        full = self.model.full
        self.knobs = tuple(
            KnobSupport(knob, most, least, most, sets)
            for knob, most, least, sets in zip(KNOBS, full, (1, 1, 2), SETS, strict=True)
        )
        self.configuration = full._asdict()
        # from the overview's pixels to the mean of its tokens: windows averaged along rows and
        # columns, then the stem
        starts = window_starts(self.model.size.stride)
        mean = np.mean([np.eye(TILE, CELL, -start, np.float32) for start in starts], 0)
        stem = self.model.stem.weight.detach().view(-1, 3, CELL, CELL).numpy()
        overview = np.einsum("yi,xj,ocij->cyxo", mean, mean, stem, optimize=True)
        self._overview = np.ascontiguousarray(overview.reshape(-1, len(stem)))
        self._words = self.model.words.weight.detach().numpy()
        self._base: dict[torch.Size, Floats] = {}
        self._checked: dict[tuple[tuple[str, int], ...], Configuration] = {}

    def first_stage(self, request: Request, features: bool = True) -> FirstStage:
        """Compute the overview, and from it the features that a decision needs.

        The built-in profile has the same features, rounded to half precision.

        Args:
            request: the image and the question.
            features: False to leave the features out.

        Raises:
            InputError: the model cannot take the image or the question.
        """
        start = clock_ms()
        image = as_image(request.image)
        prompt = as_prompt(request.question)
        overview = self.model.overview(image)
        overview_ms = clock_ms() - start
        kept = image, prompt, overview
        if not features:
            return FirstStage(request, {}, kept, overview_ms, 0.0)
        blocks = self._features(image, overview.numpy(), prompt.numpy()[0])
        total_ms = clock_ms() - start
        return FirstStage(request, blocks, kept, total_ms, total_ms - overview_ms)

    def _features(
        self, image: Tensor, overview: Floats, prompt: NDArray[np.int64]
    ) -> dict[str, Floats]:
        """Compute the features from an overview [1, 3, 16, 16] and a prompt [6].

        Features of the image, [2·width]: the mean of the overview's tokens, then the grid-size
        token. Features of the language, [width]: the mean of the prompt's word embeddings. There
        are as few calls as possible, since each takes microseconds right after the model has run.
        """
        width = self.model.size.width
        base = self._base.get(image.shape)
        if base is None:
            base = self._base[image.shape] = self._base_of(image)
        joined = base.copy()
        # the pixels add a linear term to the features of a black image
        joined[:width] += overview.reshape(-1).dot(self._overview)
        # a mean as a product, whose code has just run
        _EVENLY.dot(self._words.take(prompt, 0), joined[2 * width :])
        return {"image_features": joined[: 2 * width], "language_features": joined[2 * width :]}

    @torch.inference_mode()
    def _base_of(self, image: Tensor) -> Floats:
        """Return the features of a black image of this size, whose windows are 0, followed by zeros
        for the features of the language: [3·width]."""
        black = torch.zeros_like(image)
        (tokens,) = self.model.first_stage(
            black, self.model.overview(black)
        )  # [1 + windows, width]
        room = torch.zeros_like(tokens[0])
        return torch.cat([tokens[1:].mean(0), tokens[0], room]).numpy()

    def answer(
        self, stages: Sequence[FirstStage], configuration: Mapping[str, int]
    ) -> list[Answer]:
        """Decode one answer after another."""
        key = tuple(configuration.items())
        if key not in self._checked:  # kept, since checking takes time
            values = check_configuration(self.knobs, configuration)
            self._checked[key] = Configuration(**values)
        return [self._answer(stage, self._checked[key]) for stage in stages]

    def _answer(self, stage: FirstStage, configuration: Configuration) -> Answer:
        image, prompt, overview = stage.kept
        # the clocks stand around the call, since entering and leaving it counts as model time
        start = clock_ms()
        answer = self.model.generate(image, overview, prompt, configuration)
        decoded_ms = clock_ms() - start
        before = stage.total_ms - stage.extra_ms  # 0 for a first stage that comes from a cache
        answer.total_ms = before + decoded_ms
        answer.prefill_ms += before
        answer.vision_ms += before
        return answer


def as_image(image: Any) -> Tensor:
    """Return the pixels of a PIL image, a tensor or an array: float32 [1, 3, h, w] in 0–1.

    Raises:
        InputError: it has another shape, or its sides are not 2 to 8 whole cells.
    """
    if hasattr(image, "convert"):
        image = np.moveaxis(np.array(image.convert("RGB")), 2, 0) / np.float32(255)
    if not isinstance(image, Tensor | np.ndarray):
        raise InputError(
            f"image: {type(image).__name__}; a PIL image or pixels [1, 3, h, w] are needed"
        )
    # [3, h, w] or [1, 3, h, w]
    pixels = torch.as_tensor(image)
    if pixels.ndim == 3:
        pixels = pixels.unsqueeze(0)
    if pixels.shape[:2] != (1, 3) or not all(side in _SIDES for side in pixels.shape[2:]):
        raise InputError(
            f"image: of shape {[*pixels.shape]}; this model takes [1, 3, h, w] with sides of "
            f"{_SIDES.start} to {_SIDES[-1]} pixels in steps of {CELL}"
        )
    return pixels.float()


def as_prompt(question: Any) -> Tensor:
    """Return the tokens, int64 [1, 6], of a text such as `"digit? r1 c2"`; tokens stay as they are.

    Raises:
        InputError: a word is unknown, or there are too many.
    """
    if isinstance(question, str):
        # the words, fillers, and at the end the word that asks for an answer
        texts = question.split()
        if not (0 < len(texts) < PROMPT_TOKENS and TOKEN.keys() >= set(texts)):
            raise InputError(
                f"question {question!r}: must be 1 to {PROMPT_TOKENS - 1} known words, as in "
                "'digit? r1 c2'"
            )
        prompt = torch.full(_PROMPT, FILLER)
        prompt[0, : len(texts)] = torch.tensor([TOKEN[text] for text in texts])
        prompt[0, -1] = TOKEN["<answer>"]
        return prompt
    prompt = torch.as_tensor(question)
    if prompt.shape != _PROMPT or prompt.is_floating_point():
        raise InputError(
            f"question: tokens of shape {[*prompt.shape]}; int64 [1, {PROMPT_TOKENS}] is needed"
        )
    return prompt


def request_of(scene: Scene) -> Request:
    """Return a scene as a request, with its pixels and its tokens."""
    return Request(torch.from_numpy(scene.image), as_prompt(scene.question))


class ElasticRequests(DrawnQuestions):
    """The scenes of the built-in profile, and after them new ones without end.

    Args:
        soft: score an answer by its share of right words, not by exact match.
    """

    length = 1500

    def __init__(self, soft: bool = False) -> None:
        super().__init__()
        self.soft = soft

    def draw(self, row: int) -> VQAItem:
        """Draw a scene from the seed that the built-in profile was made with."""
        scene = draw_sample(row, SEED)
        return VQAItem(str(row), torch.from_numpy(scene.image), scene.question, (scene.answer,))

    def request(self, sample_id: str) -> Request:
        item = self.item(sample_id)
        return Request(item.image, as_prompt(item.question))

    def score(self, sample_id: str, answer: str) -> float:
        right = self.item(sample_id).answer.split()
        words = answer.split()
        if self.soft:
            # count the words that are right at their position; the longer text is the whole
            hits = sum(map(str.__eq__, words, right))
            return round(hits / max(len(words), len(right)), 4)
        return float(words == right)


def builtin_input(sample_id: str) -> tuple[str, Floats]:
    """Return the question of a sample of the built-in profile, and its picture [h, w, 3] in 0–1."""
    item = ElasticRequests().item(sample_id)
    return item.question, item.image[0].permute(1, 2, 0).numpy()
