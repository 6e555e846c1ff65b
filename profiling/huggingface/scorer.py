"""Score demonstrations with a Hugging Face vision-language model: how likely it makes a query's
answers after them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from knobwise.common.checks import at_least
from knobwise.common.errors import InputError
from knobwise.profiling.huggingface.loading import PromptedModel
from knobwise.profiling.measuring.questions import (
    Prompt,
    VQAData,
    VQAItem,
    agreeing,
    prompts_of,
    soft_accuracy,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

MAX_CHOICES = 16
"""The most candidate answers of a query for which the data name no choices."""


class _Candidates(NamedTuple):
    """The C possible answers to a query: their tokens, soft VQA accuracies float32 [C], and which
    is the right one."""

    tokens: list[list[int]]
    accuracy: Tensor
    right: int


class DemonstrationScorer(PromptedModel):
    """What scorers of vision-language models and of language models share.

    Args:
        model, processor, options: as for `PromptedModel`.
        data: the queries, and the bank of their demonstrations.
        batch_size: prompts computed at a time.

    Raises:
        InputError: a batch size below 1.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        processor: ProcessorMixin | PreTrainedTokenizerBase,
        data: VQAData,
        *,
        batch_size: int = 8,
        **options: Any,
    ) -> None:
        at_least("batch_size", batch_size, 1)
        super().__init__(model, processor, **options)
        self.data = data
        self.batch_size = batch_size
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        self._end_tokens = special | self._stops

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the indices of all prompts, in batches of similar length, which need less
        padding."""
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]

    def _logits(self, count: int, **inputs: Any) -> Tensor:
        """Compute the logits of the last `count` tokens, [n, count, V], without a cache."""
        if self.model._supports_logits_to_keep():  # else they fill the memory
            inputs["logits_to_keep"] = count
        return self.model(**inputs, use_cache=False).logits[:, -count:]

    def vote(self, queries: Tensor, demonstrations: Tensor) -> Tensor:
        """As in `Scorer`."""
        return self.data.vote(queries, demonstrations)

    def _text(self, query: int, rows: Sequence[int]) -> str:
        """Return a query with its demonstrations as the model reads them."""
        turns = []
        for shot in [self.data.bank[row] for row in rows]:
            turns += self._turns(shot.question, shot.answer)
        return self._prompt([*turns, *self._turns(self.data.queries[query].question)])

    def _answer_tokens(self, item: VQAItem, answer: str) -> list[int]:
        """Return the tokens of an answer as a demonstration shows it, up to and with the one that
        ends it."""
        before = self._prompt(self._turns(item.question))
        after = self._prompt(self._turns(item.question, answer))
        if not after.startswith(before):  # such as templates that open a part for reasoning
            after = before + " " * (not before[-1:].isspace()) + answer
        if self.chats:
            after = after.rstrip()
        # read in its place, since some tokenizers begin a text with a space; alone where a token
        # spans the border
        texts = [before, after, after[len(before) :]]
        start, whole, tokens = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        if whole[: len(start)] == start:
            tokens = whole[len(start) :]
        for i, token in enumerate(tokens, 1):
            if token in self._end_tokens:
                return tokens[:i]
        if self.chats and self.tokenizer.eos_token_id is not None:
            return [*tokens, self.tokenizer.eos_token_id]
        if not tokens:
            raise InputError(
                f"query {item.id!r}: the answer {answer!r} has no tokens in this model's vocabulary"
            )
        return tokens


class VLMScorer(DemonstrationScorer):
    """How well a vision-language model answers queries after demonstrations: a `Scorer`.

    The demonstrations (image, question, answer) and the query (image, question) become one prompt
    with several images. Every candidate answer is scored by the log-likelihood of its tokens after
    the prompt, up to and with the end of the answer, so that "two" does not also count whatever
    begins with it. The prompt, which is long, is computed once; the answers, which are short,
    continue from its key-value cache. Of `data.queries` and `data.bank`, a call gives:

    - `logprob_score`: ln P(right answer, end of answer | prompt), the sum over its tokens. The
      right answer is the candidate that most reference answers agree with (of equals the first in
      the alphabet).
    - `vqa_gt_prob`: exp of it.
    - `vqa_acc_score`: the soft VQA accuracy of the candidate with the highest such log-likelihood.
    - `vqa_correct`: 1 where no candidate has a higher soft accuracy than that one, else 0.
    - `vqa_rel_score`: P(right answer) / P(most likely candidate), in [0, 1]; 1 where the right
      answer is ranked first.

    The candidates (`VQAData.candidates`) include the right answer, so correctness here is a choice
    among up to `MAX_CHOICES` and higher than that of free generation.

    Arguments are as for `DemonstrationScorer`. The cache of a batch is held once for each
    candidate.

    Raises InputError for sizes that make no sense; when called, for an image that cannot be read, a
    query with one candidate only.
    """

    kind = "AutoModelForImageTextToText"

    reuse_prompt: bool | None = None
    """Whether answers go on from the prompt's cache. None finds out with the first batch: where
    that fails or gives other likelihoods than the whole sequence, each answer is computed with its
    prompt, one at a time, with a warning."""

    @torch.inference_mode()
    def __call__(self, queries: Tensor, demonstrations: Tensor) -> dict[str, Tensor]:
        prompts = prompts_of(queries, demonstrations)
        fields = ("logprob_score", "vqa_gt_prob", "vqa_acc_score", "vqa_correct", "vqa_rel_score")
        scores = torch.empty(len(fields), len(prompts))
        for batch in self._batches([len(rows) for _, rows in prompts]):
            batch_likelihoods = self.log_likelihoods([prompts[i] for i in batch])
            for i, likelihoods in zip(batch, batch_likelihoods, strict=True):
                candidates = self._candidates(prompts[i][0])
                # the answer that the model prefers, and the right one
                first = int(likelihoods.argmax())
                right = likelihoods[candidates.right]
                accuracy = candidates.accuracy[first]
                correct = accuracy == candidates.accuracy.max()
                relative = (right - likelihoods[first]).exp()
                row = [right, right.exp(), accuracy, correct.float(), relative]
                scores[:, i] = torch.stack(row)
        return dict(zip(fields, scores, strict=True))

    def answers(self, query: int) -> tuple[str, ...]:
        """Return the candidate answers of a query, in the order of `log_likelihoods`."""
        return self.data.candidates(query, MAX_CHOICES)

    @torch.inference_mode()
    def log_likelihoods(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Compute ln P of every candidate answer after each prompt, computed as one batch: float32
        [C] each, on the CPU."""
        answers = [self._candidates(query).tokens for query, _ in prompts]
        if self.reuse_prompt is None:
            self.reuse_prompt = self._can_reuse(prompts, answers)
        if self.reuse_prompt:
            return self._after_cache(self._inputs(prompts), answers)
        return list(map(self._whole, prompts, answers))

    def _inputs(self, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """Process the prompts for the model: padded on the left, on its device."""
        images = []
        for query, rows in prompts:
            items = [*(self.data.bank[row] for row in rows), self.data.queries[query]]
            images.append([item.picture() for item in items])
        return self._processed([self._text(query, rows) for query, rows in prompts], images)

    @functools.cached_property
    def _known(self) -> dict[int, _Candidates]:
        """The candidates of the queries so far."""
        return {}

    def _candidates(self, query: int) -> _Candidates:
        if query not in self._known:
            item = self.data.queries[query]
            answers = self.answers(query)
            if len(answers) < 2:
                raise InputError(
                    f"query {item.id!r} has one candidate answer, {answers[0]!r}; give it more in "
                    "`choices`"
                )
            agreed = [agreeing(answer, item.answers) for answer in answers]
            accuracy = torch.tensor([soft_accuracy(answer, item.answers) for answer in answers])
            tokens = [self._answer_tokens(item, answer) for answer in answers]
            self._known[query] = _Candidates(tokens, accuracy, agreed.index(max(agreed)))
        return self._known[query]

    def _can_reuse(self, prompts: Sequence[Prompt], answers: list[list[list[int]]]) -> bool:
        """Return True if the cache gives the first prompt's likelihoods, in its batch, as the whole
        sequences give them."""
        tolerance = 0.3
        if self.model.dtype in (torch.float32, torch.float64):
            tolerance = 1e-3
        wanted = self._whole(prompts[0], answers[0])
        try:
            reused = self._after_cache(self._inputs(prompts), answers)[0]
            difference = float((reused - wanted).abs().max())
            if difference <= tolerance:
                return True
            problem = f"likelihoods differ by {difference:.2g}"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model without a fitting cache may raise
            problem = str(error)
        warnings.warn(
            f"{type(self.model).__name__} cannot continue from a cache ({problem}); every answer "
            "is computed whole",
            stacklevel=4,
        )
        return False

    def _after_cache(
        self, inputs: dict[str, Tensor], answers: list[list[list[int]]]
    ) -> list[Tensor]:
        """Compute log-likelihoods with one pass over n prompts and one over all their R answers.

        Prompts are padded on the left, answers on the right.

        Positions and inputs come from the model's own hooks for generation: they know about left
        padding, images and (Qwen-VL) positions in three dimensions.
        """
        device = self.model.device
        counts = list(map(len, answers))
        flat = [torch.tensor(answer) for answer in chain.from_iterable(answers)]
        tokens = pad_sequence(flat, batch_first=True, padding_value=-1).to(device)
        # the prompt that each answer follows, int64 [R]
        owner = torch.arange(len(answers)).repeat_interleave(torch.tensor(counts)).to(device)
        # the first pass: all prompts, and the first token of every answer
        ids = inputs["input_ids"]
        mask = inputs["attention_mask"]
        rest: dict[str, Any] = {key: value for key, value in inputs.items() if key != "input_ids"}
        rest["position_ids"] = self.model._prepare_position_ids_for_generation(ids, rest)
        if self.model._supports_logits_to_keep():
            rest["logits_to_keep"] = 1
        prompt = self.model(
            **self.model.prepare_inputs_for_generation(
                ids, is_first_iteration=True, use_cache=True, **rest
            )
        )
        total = _log_probs(prompt.logits[owner, -1:], tokens[:, :1])
        if tokens.shape[1] > 1:
            # the second pass: the other tokens, each prompt's cache repeated for its answers
            cache = prompt.past_key_values
            fed = tokens[:, :-1].clamp_min(0)
            # the answers' padding needs no mask: nothing that is scored comes after it
            mask = torch.cat([mask, mask.new_ones(len(mask), fed.shape[1])], 1)
            known = {"attention_mask": mask, "past_key_values": cache}
            positions = self.model._prepare_position_ids_for_generation(ids, known)
            positions = positions[..., -fed.shape[1] :]  # [n or 1, T], or three of them
            positions = positions.expand(*positions.shape[:-2], len(mask), -1)
            cache.reorder_cache(owner)
            follow = self.model.prepare_inputs_for_generation(
                fed,
                past_key_values=cache,
                attention_mask=mask[owner],
                position_ids=positions.index_select(-2, owner),
                use_cache=True,
            )
            total = total + _log_probs(self.model(**follow).logits, tokens[:, 1:])
        return list(total.cpu().split(counts))

    def _whole(self, prompt: Prompt, answers: list[list[int]]) -> Tensor:
        """Compute log-likelihoods [C] after one prompt, prompt and answer as one sequence, without
        cache, batch or padding."""
        inputs = self._inputs([prompt])
        ids = inputs["input_ids"]
        likelihoods = []
        for answer in answers:
            tokens = torch.tensor([answer]).to(ids.device)
            # the last token of the answer is predicted, but never fed
            fed = tokens[:, :-1]
            longer = inputs | {"input_ids": torch.cat([ids, fed], 1)}
            # the mask and the kinds of tokens go on as those of text
            for name, value in inputs.items():
                if value.shape == ids.shape and value is not ids:
                    new = torch.full_like(fed, name == "attention_mask", dtype=value.dtype)
                    longer[name] = torch.cat([value, new], 1)
            likelihoods.append(_log_probs(self._logits(len(answer), **longer), tokens))
        return torch.cat(likelihoods).cpu()


def _log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Compute the sum over L of ln softmax(logits [R, L, V]) at tokens [R, L], where these are not
    −1 → float32 [R]."""
    log_probs = logits.float().log_softmax(-1)
    picked = log_probs.gather(-1, tokens.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return (picked * (tokens >= 0)).sum(-1)
