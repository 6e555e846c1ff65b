"""How well the learner of the built-in task answers queries after demonstrations."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from knobwise.profiling.demonstrations.scorers import Fields
from knobwise.testbeds.canvases.canvases import Bank, Queries
from knobwise.testbeds.canvases.learner import Learner

CHUNK = 1024
"""Sequences that the learner reads at a time."""


class LearnerScorer:
    """How well the learner answers the queries of the built-in task: a `Scorer`.

    A query with two questions is answered when both are: `logprob_score` is the sum over the
    questions asked, `vqa_acc_score` the share answered right, `vqa_rel_score` the mean of P(right
    label) / P(likeliest label). `vote` counts, for each question asked, the demonstrations of this
    question.

    Canvases are seen once, when the scorer is made; only labels depend on the query. `CHUNK`
    sequences are computed at a time.
    """

    @torch.inference_mode()
    def __init__(self, learner: Learner, queries: Queries, bank: Bank) -> None:
        self.learner = learner.eval()
        numbers = queries.questions, queries.values, queries.labels
        self.questions, self.values, self.labels = map(torch.from_numpy, numbers)
        self.question = torch.from_numpy(bank.question)
        self.value = torch.from_numpy(bank.value)
        images = torch.from_numpy(queries.images)[:, None].expand(-1, self.questions.shape[1], -1)
        self._query_tokens = learner.see(images, self.questions.clamp_min(0))  # [Q, 2, width]
        self._bank_tokens = learner.see(torch.from_numpy(bank.images), self.question)  # [M, width]

    def __call__(self, queries: Tensor, demonstrations: Tensor) -> Fields:
        # row, part: each question asked is one sequence of the learner
        row, part = (self.questions[queries] >= 0).nonzero().unbind(1)
        chunks = [
            self._answer(queries[r], p, demonstrations[r])
            for r, p in zip(row.split(CHUNK), part.split(CHUNK), strict=True)
        ]
        # log-probability, right, relative and the number of parts, summed over a query's questions
        outcomes = torch.cat([torch.cat(chunks, 1), torch.ones(1, len(row))])
        log_prob, right, relative, parts = torch.zeros(4, len(queries)).index_add_(1, row, outcomes)
        return {
            "logprob_score": log_prob,
            "vqa_gt_prob": log_prob.exp(),
            "vqa_acc_score": right / parts,
            "vqa_correct": (right == parts).float(),
            "vqa_rel_score": relative / parts,
        }

    def vote(self, queries: Tensor, demonstrations: Tensor) -> Tensor:
        question = self.question.tolist()
        value = self.value.tolist()
        parts = self.questions[queries].tolist()
        answers = self.values[queries].tolist()
        right = torch.ones(len(queries))
        for i, rows in enumerate(demonstrations.tolist()):
            for part in parts[i]:
                # of equally common answers the first counts; without votes nothing is right
                votes = Counter(value[row] for row in rows if row >= 0 and question[row] == part)
                winner, _ = next(iter(votes.most_common(1)), (-1, 0))
                if part >= 0 and winner != answers[i][part]:
                    right[i] = 0
        return right

    @torch.inference_mode()
    def _answer(self, queries: Tensor, part: Tensor, demonstrations: Tensor) -> Tensor:
        """[3, n]: ln P(right label), whether that is the likeliest, and their ratio, for one
        question each."""
        real = demonstrations.clamp_min(0)
        labels = self.labels[queries[:, None], self.question[real], self.value[real]]
        labels = torch.where(demonstrations < 0, -1, labels)
        logits = self.learner(self._query_tokens[queries, part], self._bank_tokens[real], labels)
        question = self.questions[queries, part]
        label = self.labels[queries, question, self.values[queries, question]]
        log_probs = logits.log_softmax(1)
        right = log_probs.gather(1, label[:, None])[:, 0]
        likeliest = log_probs.max(1).values
        return torch.stack([right, (right == likeliest).float(), (right - likeliest).exp()])
