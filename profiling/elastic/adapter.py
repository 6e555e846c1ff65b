"""The elastic model behind the interface of all models with knobs
(`knobwise.profiling.measuring.adaptive_model`)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.profiling.elastic import scenes
from knobwise.profiling.elastic.model import STRIDE, TILE, ElasticVLM, shipped_model
from knobwise.profiling.elastic.scenes import (
    CELL,
    END,
    FILLER,
    MAX_SIDE,
    PROMPT_TOKENS,
    TOKEN,
    WORDS,
    Scenes,
)
from knobwise.profiling.elastic.settings import Configuration
from knobwise.profiling.measuring.adaptive_model import (
    Answer,
    FirstStage,
    KnobSupport,
    Request,
    check_configuration,
    clock_ms,
)
from knobwise.profiling.measuring.questions import VQAItem

_PROMPT_TOKENS = np.float32(PROMPT_TOKENS)
_PROMPT = torch.Size((1, PROMPT_TOKENS))


def _mean_window() -> NDArray[np.float32]:
    """Return the map from a row of an overview's pixels to the mean of its windows: [16, 8]."""
    starts = range(0, TILE - CELL + 1, STRIDE)
    mean = np.zeros((TILE, CELL), np.float32)
    for start in starts:
        for pixel in range(CELL):
            mean[start + pixel, pixel] = 1 / len(starts)
    return mean


_MEAN_WINDOW = _mean_window()

MEASURED = {"max_crops": (2, 4, 8, 12), "top_k": (1, 2, 3, 4), "num_active_blocks": (3, 4, 5, 6)}
"""Values of the knobs in the built-in profile."""


class ElasticAdaptive:
    """An `AdaptiveVLM`: the elastic model, one request at a time.

    The first stage scales the image down to its overview, which every configuration begins with:
    the answer continues from it, and the features of a decision are computed from it. The mean of
    the overview's tokens is linear in the mean of its windows: the features need none of the tokens
    themselves.

    An image is a PIL image or float [1, 3, h, w] or [3, h, w] in 0–1, a tensor or an array, whose
    sides are 2 to 8 cells of 8 pixels. A question is a text such as `"digit? r1 c2"` or its tokens
    int64 [1, 6].

    `model` None is the one that comes with knobwise.
    """

    def __init__(self, model: ElasticVLM | None = None, name: str = "elastic") -> None:
        self.model = model or shipped_model()
        self.name = name
        self.first_stage_overlaps = True
        """The first stage may run while another thread answers, since it uses no knob."""
        size = self.model.size
        full = self.model.full
        self.knobs = (
            KnobSupport(
                "max_crops",
                full.max_crops,
                1,
                size.max_crops,
                "16-pixel tiles of the image, at most",
            ),
            KnobSupport("top_k", full.top_k, 1, size.max_top_k, "experts for each token"),
            KnobSupport(
                "num_active_blocks", full.num_active_blocks, 2, size.blocks, "blocks that run"
            ),
        )
        self.measured = {
            knob.name: tuple(filter(knob.accepts, MEASURED[knob.name])) for knob in self.knobs
        }
        """Values that a profile measures by default."""
        self.configuration = full
        """The values of the knobs that the model runs with."""
        self._width = self.model.size.width
        # from the overview's pixels to the mean of its tokens: windows averaged along rows and
        # columns, then the stem
        stem = self.model.stem.weight.detach().view(-1, 3, CELL, CELL).numpy()
        path = "yi,xj,ocij->cyxo"
        overview = np.einsum(path, _MEAN_WINDOW, _MEAN_WINDOW, stem, optimize=True)
        self._overview = np.ascontiguousarray(overview.reshape(-1, len(stem)))
        self._words = self.model.words.weight.detach().numpy() / _PROMPT_TOKENS
        self._base: dict[torch.Size, NDArray[np.float32]] = {}
        self._checked: dict[tuple[tuple[str, int], ...], Configuration] = {}

    @cached_property
    def questions(self) -> tuple[VQAItem, ...]:
        """The questions of the built-in profile: 2,000 scenes, one question each, with digits that
        training never saw."""
        drawn = enumerate(scenes.draw_samples(2000, scenes.SEED))
        return tuple(
            VQAItem(str(n), torch.from_numpy(scene.images), question_of(scene), (answer_of(scene),))
            for n, scene in drawn
        )

    @contextmanager
    def set_knobs(self, configuration: Mapping[str, int]) -> Iterator[None]:
        """Set the knobs inside the context, as `AdaptiveVLM` demands."""
        wanted = self._configured(configuration)
        before = self.configuration
        self.configuration = wanted
        try:
            yield
        finally:
            self.configuration = before

    def _configured(self, configuration: Mapping[str, int]) -> Configuration:
        """Check a configuration and fill in defaults; the result is kept, since checking takes
        time."""
        key = tuple(configuration.items())
        wanted = self._checked.get(key)
        if wanted is None:
            wanted = self._checked[key] = Configuration(
                **check_configuration(self.knobs, configuration)
            )
        return wanted

    def first_stage(self, request: Request, features: bool = True) -> FirstStage:
        """Compute the overview, and the features of a decision.

        The built-in profile has the same features, rounded to half precision. Raises InputError for
        an image or a question that the model cannot take.
        """
        start = clock_ms()
        cpu = time.thread_time_ns()
        image = request.image
        prompt = request.question
        if not (
            isinstance(image, Tensor) and image.shape in self._base and image.dtype == torch.float32
        ):
            image = as_image(image)
        if not (
            isinstance(prompt, Tensor) and prompt.shape == _PROMPT and prompt.dtype == torch.int64
        ):
            prompt = as_prompt(prompt)
        overview = self.model.overview(image)
        done = clock_ms()
        cpu_done = time.thread_time_ns()
        kept = image, prompt, overview, (cpu_done - cpu) / 1e6
        if not features:
            return FirstStage(request, {}, kept, done - start, 0.0)
        blocks = self._features(image, overview.numpy(), prompt.numpy()[0])
        end = clock_ms()
        return FirstStage(request, blocks, kept, end - start, end - done)

    def _features(
        self, image: Tensor, overview: NDArray[np.float32], prompt: NDArray[np.int64]
    ) -> dict[str, NDArray[np.float32]]:
        """Compute `ElasticVLM.features` from an overview [1, 3, 16, 16] and a prompt [6].

        It takes as few calls as possible: each takes microseconds right after the model has run.
        """
        base = self._base.get(image.shape)
        width = self._width
        if base is None:
            base = self._base[image.shape] = self._base_of(image)
        joined = base.copy()
        joined[:width] += overview.reshape(-1).dot(self._overview)
        np.add.reduce(self._words.take(prompt, 0), 0, out=joined[2 * width :])
        return {"image_features": joined[: 2 * width], "language_features": joined[2 * width :]}

    def _base_of(self, image: Tensor) -> NDArray[np.float32]:
        """Return all features of a black image of this size, whose windows are 0: [3·width]."""
        nothing = torch.zeros(1, PROMPT_TOKENS, dtype=torch.int64)
        return torch.cat(self.model.features(torch.zeros_like(image), nothing), 1)[0].numpy()

    def answer(
        self, stages: Sequence[FirstStage], configuration: Mapping[str, int]
    ) -> list[Answer]:
        """Decode one answer after another; `extra` holds `cpu_ms`, CPU time over the span of
        `total_ms`."""
        wanted = self._configured(configuration)
        return [self._answer(stage, wanted) for stage in stages]

    def _answer(self, stage: FirstStage, configuration: Configuration) -> Answer:
        image, prompt, overview, cpu_ms = stage.kept
        # clocks around the call: entering and leaving it is the model's own time
        start = clock_ms()
        cpu = time.thread_time_ns()
        run = self.model.generate(image, prompt, configuration, overview)
        done = clock_ms()
        cpu_done = time.thread_time_ns()
        before = stage.total_ms - stage.extra_ms  # 0 for a first stage that comes from a cache
        cpu_ms = (cpu_done - cpu) / 1e6 + (cpu_ms if before > 0 else 0.0)
        return Answer(
            " ".join(WORDS[token] for token in run.tokens if token != END),
            total_ms=before + done - start,
            prefill_ms=before + run.prefill_ms,
            vision_ms=before + run.vision_ms,
            vision_tokens=run.vision_tokens,
            language_tokens=PROMPT_TOKENS,
            output_tokens=len(run.tokens),
            extra={"cpu_ms": cpu_ms},
        )


def as_image(image: Any) -> Tensor:
    """Return the pixels of a PIL image, a tensor or an array: float32 [1, 3, h, w] in 0–1.

    Raises InputError for another shape, or a size that is no grid of 2 to 8 cells each way.
    """
    if isinstance(image, np.ndarray):
        image = torch.from_numpy(image)
    elif not isinstance(image, Tensor):
        if not hasattr(image, "convert"):
            raise InputError(
                f"image: {type(image).__name__}; a PIL image or pixels [1, 3, h, w] are needed"
            )
        image = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1) / 255
    if image.ndim == 4:
        pixels = image
    else:
        pixels = image.unsqueeze(0)
    shape = tuple(pixels.shape)
    if len(shape) != 4 or shape[:2] != (1, 3) or not all(side in _SIDES for side in shape[2:]):
        raise InputError(
            f"image: of shape {list(shape)}; this model takes [1, 3, h, w] with sides of "
            f"{_SIDES.start} to {_SIDES[-1]} pixels in steps of {CELL}"
        )
    return pixels.float()


_SIDES = range(2 * CELL, MAX_SIDE * CELL + 1, CELL)


def as_prompt(question: Any) -> Tensor:
    """Return the tokens of a text such as `"digit? r1 c2"`, or of tokens: int64 [1, 6].

    Raises InputError for an unknown word, or too many.
    """
    if isinstance(question, str):
        words = question.split()
        if unknown := [word for word in words if word not in TOKEN]:
            raise InputError(
                f"question {question!r}: unknown word {unknown[0]!r}; an example is 'digit? r1 c2'"
            )
        if not 1 <= len(words) < PROMPT_TOKENS:
            raise InputError(f"question {question!r}: 1 to {PROMPT_TOKENS - 1} words are needed")
        tokens = [TOKEN[word] for word in words]
        tokens += [FILLER] * (PROMPT_TOKENS - 1 - len(tokens))
        return torch.tensor([[*tokens, TOKEN["<answer>"]]])
    if isinstance(question, Tensor):
        prompt = question
    else:
        prompt = torch.as_tensor(np.asarray(question))
    if prompt.numel() != PROMPT_TOKENS or prompt.is_floating_point():
        raise InputError(
            f"question: tokens of shape {list(prompt.shape)}; int64 [1, {PROMPT_TOKENS}] is needed"
        )
    return prompt.reshape(1, PROMPT_TOKENS)


def request_of(scene: Scenes) -> Request:
    """Return a scene as a request, with its pixels and its tokens."""
    return Request(torch.from_numpy(scene.images), torch.from_numpy(scene.prompts))


def question_of(scene: Scenes) -> str:
    """Return the question of a scene in words, which `as_prompt` reads."""
    words = [WORDS[token] for token in scene.prompts[0]]
    return " ".join(word for word in words if word[0] not in "·<")


def answer_of(scene: Scenes) -> str:
    """Return the right answer to the question of a scene."""
    return " ".join(scenes.to_words(scene.answers[0]))


def builtin_input(sample_id: str) -> tuple[str, NDArray[np.float32]]:
    """Return the question of a sample of the built-in profile, and its picture [h, w, 3] in 0–1.

    They are drawn again from the seed that the profile was made with.
    """
    scene = scenes.draw_sample(int(sample_id), scenes.SEED)
    return question_of(scene), scene.images[0].transpose(1, 2, 0)


class ElasticRequests:
    """The scenes of the built-in profile, and after them fresh ones without end.

    An id is the number of a scene.

    Args:
        soft: answers are scored by their share of right words, not by exact match.
    """

    def __init__(self, soft: bool = False) -> None:
        self.soft = soft
        self._scenes = dict[str, Scenes]()

    def ids(self) -> Iterator[str]:
        return map(str, itertools.count())

    def __contains__(self, sample_id: object) -> bool:
        return isinstance(sample_id, str) and sample_id.isascii() and sample_id.isdigit()

    def request(self, sample_id: str) -> Request:
        return request_of(self._scene(sample_id))

    def score(self, sample_id: str, answer: str) -> float:
        words = answer.split()
        right = scenes.to_words(self._scene(sample_id).answers[0])
        if self.soft:
            return round(scenes.share_of_right(words, right), 4)
        return float(words == right)

    def _scene(self, sample_id: str) -> Scenes:
        if sample_id not in self._scenes:
            self._scenes[sample_id] = scenes.draw_sample(int(sample_id), scenes.SEED)
        return self._scenes[sample_id]
