"""Score demonstrations with a Hugging Face language model: how likely it gives a query's answers
after them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from knobwise.profiling.huggingface.scorer import DemonstrationScorer
from knobwise.profiling.measuring.questions import most_common, prompts_of, soft_accuracy


class _Fed(NamedTuple):
    """A prompt and one of its right answers, which the model reads together."""

    prompt_index: int
    """The position of the prompt in the call."""
    prompt: list[int]
    answer: list[int]
    """Tokens up to and with the one that ends the answer."""
    accuracy: float
    """The soft VQA accuracy of the answer."""


class TextScorer(DemonstrationScorer):
    """How well a language model answers queries after demonstrations: a `Scorer`.

    The demonstrations (question, answer) and the query (question) become one prompt, which is fed
    together with each right answer of the query. One pass tells how likely the answer is, and
    whether greedy decoding gives it: it does where each token of the answer, up to and with its
    end, is the most likely one. Images of items are left out. A call gives:

    - `logprob_score`: ln P(right answer, end of answer | prompt), the sum over its tokens. The
      right answer is the most common reference answer.
    - `vqa_gt_prob`: exp of it.
    - `vqa_correct`: 1 where greedy decoding gives a reference answer, spelled as the data have it.
    - `vqa_acc_score`: the soft VQA accuracy of that answer, 0 for any other.
    - `vqa_rel_score`: the product of P(token of the right answer) / P(most likely token), in
      [0, 1]; 1 where greedy decoding gives the right answer.

    Raises InputError for sizes that make no sense.
    """

    kind = "AutoModelForCausalLM"

    @torch.inference_mode()
    def __call__(self, queries: Tensor, demonstrations: Tensor) -> dict[str, Tensor]:
        prompts = prompts_of(queries, demonstrations)
        rows = []
        for prompt_index, (query, shots) in enumerate(prompts):
            text = self._text(query, shots)
            prompt = self.tokenizer(text, **self._token_options(text))["input_ids"]
            # the most common right answer comes first
            item = self.data.queries[query]
            for answer in most_common(item.answers):
                tokens = self._answer_tokens(item, answer)
                rows.append(_Fed(prompt_index, prompt, tokens, soft_accuracy(answer, item.answers)))
        read = torch.empty(3, len(rows))
        for batch in self._batches([len(row.prompt) + len(row.answer) for row in rows]):
            read[:, batch] = self._read([rows[i] for i in batch])
        log_prob, of_likeliest, greedy = read
        # [rows] → [n]: the first answer's numbers, and the best answer that is given
        owner = torch.tensor([row.prompt_index for row in rows])
        first = torch.searchsorted(owner, torch.arange(len(prompts)))
        accuracy = greedy * torch.tensor([row.accuracy for row in rows])
        nothing = torch.zeros(len(prompts))
        right = log_prob[first]
        return {
            "logprob_score": right,
            "vqa_gt_prob": right.exp(),
            "vqa_acc_score": nothing.scatter_reduce(0, owner, accuracy, "amax"),
            "vqa_correct": nothing.scatter_reduce(0, owner, greedy, "amax"),
            "vqa_rel_score": (right - of_likeliest[first]).exp(),
        }

    def _read(self, batch: Sequence[_Fed]) -> Tensor:
        """Compute for each row ln P(answer), ln P of the most likely tokens in its place, and 1
        where these are the answer: float32 [3, n]."""
        # padded on the left, so that all answers end in the last column; their last token is
        # predicted, but never fed
        fed = [torch.tensor([*row.prompt, *row.answer[:-1]]) for row in batch]
        present = [torch.ones_like(tokens) for tokens in fed]
        answers = [torch.tensor(row.answer) for row in batch]
        tokens = pad_sequence(fed, True, self.tokenizer.pad_token_id or 0, "left")
        mask = pad_sequence(present, True, 0, "left")
        wanted = pad_sequence(answers, True, -1, "left")  # [n, L]
        options = {"input_ids": tokens, "attention_mask": mask}
        if "position_ids" in inspect.signature(self.model.forward).parameters:
            options["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
        options = {name: value.to(self.model.device) for name, value in options.items()}
        log_probs = self._logits(wanted.shape[1], **options).float().log_softmax(-1).cpu()
        picked = log_probs.gather(-1, wanted.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        likeliest = log_probs.amax(-1)
        inside = wanted >= 0
        greedy = ((picked == likeliest) | ~inside).all(1)
        return torch.stack([(picked * inside).sum(1), (likeliest * inside).sum(1), greedy.float()])
