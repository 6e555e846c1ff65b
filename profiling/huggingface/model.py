"""Put a Hugging Face model behind its knobs, to measure it or to let a controller set them: a
vision-language model, or a language model without images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.profiling.huggingface.first_stage import (
    SAME_AT_EVERY_SETTING,
    encode_overview,
    going_on_from,
    vision_modules,
)
from knobwise.profiling.huggingface.knobs import HuggingFaceKnobs
from knobwise.profiling.huggingface.loading import GREEDY, PromptedModel, weights_digest
from knobwise.profiling.measuring.adaptive_model import (
    Answer,
    Configuration,
    FirstStage,
    Request,
    clock_ms,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin


class HuggingFaceModel(PromptedModel):
    """An `AdaptiveVLM`: a model of transformers behind its knobs. Not for two threads at once.

    The answer is decoded greedily with the knobs set, and continues from the output of the vision
    tower where the overview is the same at every setting
    (`knobwise.profiling.huggingface.first_stage`). Hooks read the times during that one generation;
    nothing runs twice. A language model has neither image nor `max_crops`.

    A group of requests is answered as one batch, padded on the left; times of an answer are then
    those of the whole batch, so measure one request at a time.

    `processor` and `options` are as for `PromptedModel`, `importance` as for `HuggingFaceKnobs`.
    Raises InputError for a model whose knobs or vision tower are unknown.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        processor: ProcessorMixin | PreTrainedTokenizerBase,
        *,
        importance: Mapping[int, float] | None = None,
        max_new_tokens: int = 32,
        **options: Any,
    ) -> None:
        super().__init__(model, processor, **options)
        self.max_new_tokens = max_new_tokens
        self.importance = importance
        self.knobs_of_model = HuggingFaceKnobs(model, processor, importance)
        self.knobs = self.knobs_of_model.knobs
        self._vision = vision_modules(model) if self.sees else []
        self.end_tokens = self._end_tokens()
        """Each of these ends an answer."""
        self._devices = {part.device for part in model.parameters()}

    @property
    def name(self) -> str:
        """The hub's name of the model, the name of its folder, or else its family."""
        source = self.model.name_or_path
        if Path(source).is_dir():
            source = Path(source).name
        return source or self.model.config.model_type

    @property
    def identity(self) -> dict[str, object]:
        """Fingerprint of the model: weights, versions, and how it runs."""
        device = self.model.device.type
        if device == "cuda":
            device = torch.cuda.get_device_name(self.model.device)
        commit = getattr(self.model.config, "_commit_hash", None)
        return {
            "weights": weights_digest(self.model.name_or_path, commit),
            "transformers": version("transformers"),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": device,
            "importance": self.importance,
        }

    def set_knobs(self, configuration: Configuration) -> AbstractContextManager[None]:
        """Set the knobs inside the context, as `AdaptiveVLM` demands."""
        return self.knobs_of_model.set(configuration)

    @torch.inference_mode()
    def first_stage(self, request: Request, features: bool = True) -> FirstStage:
        """Compute the overview and, from it and the prompt, the features of a decision.

        `image_features` are the vision tower's last hidden states of the overview,
        `language_features` the token embeddings of the prompt without its image; each is the mean
        over tokens, float32 [d]. A language model has the latter only.

        `extra_ms` is all of `total_ms` where answers compute the overview again (see
        `knobwise.profiling.huggingface.first_stage`); else it lacks the vision tower's time.
        Without features nothing is computed yet. Raises InputError if the image is no PIL image or
        the question no text.
        """
        if not features:
            return FirstStage(request, {}, None, 0.0, 0.0)
        start = self._clock()
        self._check([request])
        blocks = {}
        kept = None
        reused_ms = 0.0
        if self.sees:
            with self.set_knobs({"max_crops": self._overview_crops()}):
                inputs = self.inputs([request])
            overview = encode_overview(self.model, inputs, self._clock)
            blocks["image_features"] = overview.pooled().numpy()
            if self.model.config.model_type in SAME_AT_EVERY_SETTING:
                kept = overview
                reused_ms = overview.ms
        blocks["language_features"] = self._language_features(request)
        total = self._clock() - start
        return FirstStage(request, blocks, kept, total, total - reused_ms)

    def _language_features(self, request: Request) -> NDArray[np.float32]:
        """Return the mean embedding of the tokens of a prompt without its image, [d]."""
        prompt = self._text(request.question, image=False)
        options = self._token_options(prompt)
        tokens = self.tokenizer(prompt, return_tensors="pt", **options)["input_ids"]
        embedded = self.model.get_input_embeddings()(tokens.to(self.model.device))[0]
        return embedded.float().mean(0).cpu().numpy()

    @torch.inference_mode()
    def answer(self, stages: Sequence[FirstStage], configuration: Configuration) -> list[Answer]:
        """Answer as one batch, greedily. An answer's `extra` holds `reused_ms`, the first stage's
        part of its times.

        A stage with `kept` None is answered from the start. A stage from a cache, whose times are
        0, adds nothing. Raises InputError for a value that cannot be set, or a request without a
        PIL image or a text.
        """
        if len(stages) > 1 and self.model.config.model_type == "aria":
            # its processor gives every image of a batch as many placeholders as the one with the
            # most crops
            return [self.answer([stage], configuration)[0] for stage in stages]
        if not stages:
            return []
        # stages whose overview the answer can continue from
        going_on = [stage for stage in stages if stage.kept is not None]
        overviews = [stage.kept for stage in going_on]
        first: list[float] = []

        def note_first(*_: object, **__: object) -> bool:  # a stopping criterion that stops nothing
            first[:] = first or [self._clock()]
            return False

        with (
            self.set_knobs(configuration),
            going_on_from(self.model, overviews) as taken,
            self._timed() as spans,
        ):
            start = self._clock()
            inputs = self.inputs([stage.request for stage in stages])
            prepared = self._clock()
            output = self._generate(inputs, note_first)
            total = self._clock() - start
        # times as if the request had gone straight through
        reused = [going_on[index] for index in taken]
        before = sum(stage.total_ms - stage.extra_ms for stage in reused)
        prompts = inputs["input_ids"]
        vision = [0] * len(prompts)
        if self.sees:
            vision = (prompts == self.model.config.image_token_id).sum(1).tolist()
        read = inputs["attention_mask"].sum(1).tolist()
        answers = []
        for i, tokens in enumerate(output[:, prompts.shape[1] :].tolist()):
            text, length = self._decoded(tokens)
            answer = Answer(
                text=text,
                total_ms=before + total,
                prefill_ms=before + first[0] - start,
                vision_ms=before + prepared - start + sum(spans),
                vision_tokens=vision[i],
                language_tokens=read[i] - vision[i],
                output_tokens=length,
                extra={"reused_ms": before},
            )
            answers.append(answer)
        return answers

    def _generate(self, inputs: Mapping[str, Tensor], criterion: Callable[..., bool]) -> Tensor:
        return self.model.generate(
            **inputs,
            **GREEDY,
            max_new_tokens=self.max_new_tokens,
            eos_token_id=self.end_tokens,
            pad_token_id=self.tokenizer.pad_token_id,
            stopping_criteria=[criterion],
        )

    def _decoded(self, tokens: Sequence[int]) -> tuple[str, int]:
        """Return the text of an answer, and the number of its tokens up to the first that ends
        it."""
        lengths = [i for i, token in enumerate(tokens, 1) if token in self.end_tokens]
        length = min(lengths, default=len(tokens))
        text = self.tokenizer.decode(tokens[:length], skip_special_tokens=True).strip()
        if not self.chats:  # a token may hold the end of a line and more
            text = text.partition("\n")[0].rstrip()
        return text, length

    def _text(self, question: str, *, image: bool = True, answer: str | None = None) -> str:
        """Return the prompt as the model reads it, up to where the answer begins.

        With an `answer`, it includes that and what ends it.
        """
        options = {}
        if "enable_thinking" in str(getattr(self.processor, "chat_template", None)):
            options["enable_thinking"] = False  # an answer is too short for reasoning
        return self._prompt(self._turns(question, answer, image=image), image=image, **options)

    def inputs(self, requests: Sequence[Request]) -> dict[str, Tensor]:
        """Process the requests for the model: padded on the left, on its device."""
        self._check(requests)
        texts = [self._text(request.question) for request in requests]
        images = None
        if self.sees:
            images = [[request.image.convert("RGB")] for request in requests]
        return self._processed(texts, images)

    def _check(self, requests: Sequence[Request]) -> None:
        """Raise InputError for a request without a text, or without the image that this model
        sees."""
        for request in requests:
            seen = not self.sees or isinstance(request.image, Image.Image)
            if not seen or not isinstance(request.question, str):
                kinds = type(request.image).__name__, type(request.question).__name__
                needed = "a PIL image and a text" if self.sees else "a text"
                raise InputError(f"a request needs {needed}, has {kinds[0]} and {kinds[1]}")

    def _end_tokens(self) -> list[int]:
        """Return the tokens that end an answer: the ends of text of model and tokenizer, and the
        end of a turn or of a line."""
        end_tokens = {*self._stops, self.tokenizer.eos_token_id}
        # what the template writes after an answer
        after = self._text("What?", answer="Yes").rpartition("Yes")[2]
        tokens = self.tokenizer(after, add_special_tokens=False)["input_ids"]
        known = self.tokenizer.added_tokens_decoder
        turn = [token for token in tokens if token in known and known[token].special]
        return sorted({*end_tokens, *(turn[:1] if self.chats else tokens[-1:])} - {None})

    def _overview_crops(self) -> int:
        """Return the number of crops at which the processor makes the overview."""
        crops = next(knob for knob in self.knobs if knob.name == "max_crops")
        if not crops.available:
            return crops.default
        # a single crop of Llama4 keeps the image's shape, the overview beside several does not
        return min(crops.least + (self.model.config.model_type == "llama4"), crops.most)

    def _clock(self) -> float:
        """Read `clock_ms` after all devices of the model have finished their work."""
        accelerators = [device for device in self._devices if device.type not in ("cpu", "meta")]
        for device in accelerators:
            torch.accelerator.synchronize(device)
        return clock_ms(on_cpu=not accelerators)

    @contextmanager
    def _timed(self) -> Iterator[list[float]]:
        """Yield a list that collects the ms of each call of the vision modules in the context."""
        starts = []
        spans = []
        with ExitStack() as hooks:
            # tower and projector; calls may be nested, so starts are a stack
            for module in self._vision:
                begin = module.register_forward_pre_hook(lambda *_: starts.append(self._clock()))
                end = module.register_forward_hook(
                    lambda *_: spans.append(self._clock() - starts.pop())
                )
                # a hook is removed at the end of its own context
                hooks.enter_context(begin)
                hooks.enter_context(end)
            yield spans
