"""How well a model answers queries after demonstrations: the protocol, and the scorer of the
built-in task's learner (that of Hugging Face models is in
`knobwise.profiling.huggingface.scorer`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from knobwise.envs.demonstrations.beam_table import BeamTable, bank_rows
from knobwise.envs.tables.tensor_file import joined_by_name
from knobwise.profiling.demonstrations.canvases import Bank, Queries
from knobwise.profiling.demonstrations.learner import Learner

SCORES = ("logprob_score", "vqa_gt_prob", "vqa_correct", "vqa_acc_score", "vqa_rel_score")
"""What a scorer gives."""
Fields = dict[str, Tensor]
"""Scores by name."""
Ask = Callable[[Tensor, Tensor], Fields]
"""Scores queries after demonstrations, as a `Scorer` does."""
CHUNK = 1024
"""Sequences that the learner reads at a time."""


class Scorer(Protocol):
    """What beam search, environments and evaluation need from a model."""

    def __call__(self, queries: Tensor, demonstrations: Tensor) -> Fields:
        """Score queries, int64 [n], rows of the query set, after demonstrations, int64 [n, T], rows
        of the bank in the order shown, −1 for none at the end (all −1: zero-shot); each row on its
        own.

        Returns:
            float32 [n] each, on the CPU: `logprob_score`, ln P(right answer); `vqa_gt_prob`, exp of
            it; `vqa_correct`,
            0 or 1; `vqa_acc_score`, soft accuracy, 0 to 1; `vqa_rel_score`, P(right answer) /
            P(likeliest answer).
        """
        ...

    def vote(self, queries: Tensor, demonstrations: Tensor) -> Tensor:
        """Return 1 where the demonstrations' most common answer is right, else 0, without any
        model: float32 [n].

        Of equally common ones the first counts; without demonstrations it is wrong. Arguments as
        above.
        """
        ...


class Remembering:
    """Asks a scorer, and never twice for the same sequence of a query."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.known: dict[tuple[int, ...], dict[str, float]] = {}

    def __call__(self, queries: Tensor, demonstrations: Tensor) -> Fields:
        keys = self._keys(queries, demonstrations)
        new = list({key: i for i, key in enumerate(keys) if key not in self.known}.values())
        if new:
            arguments = queries[new], demonstrations[new]
            self.remember(*arguments, self.scorer(*arguments))
        scores = [self.known[key] for key in keys]
        return joined_by_name(scores, torch.tensor)

    def remember(self, queries: Tensor, demonstrations: Tensor, scores: Fields) -> None:
        """Keep scores that are known already, float32 [n] each."""
        columns = [field.tolist() for field in scores.values()]
        keys = self._keys(queries, demonstrations)
        for key, *row in zip(keys, *columns, strict=True):
            self.known[key] = dict(zip(scores, row, strict=True))

    def vote(self, queries: Tensor, demonstrations: Tensor) -> Tensor:
        """As in `Scorer`."""
        return self.scorer.vote(queries, demonstrations)

    @staticmethod
    def _keys(queries: Tensor, demonstrations: Tensor) -> list[tuple[int, ...]]:
        keys = []
        for numbers in torch.cat([queries[:, None], demonstrations], 1).tolist():
            keys.append(tuple(row for row in numbers if row >= 0))
        return keys


def recorded_scores(
    table: BeamTable, rows: Tensor, names: Iterable[str]
) -> tuple[Tensor, Tensor, Fields]:
    """Return what a table knows of the queries `rows`, int64 [n], for `Remembering.remember`.

    It is the queries [k], demonstrations [k, T] and scores [k] of every recorded sequence of which
    all the scores `names` are known.
    """
    whole = table.beam_mask[rows]
    for name in names:
        whole = whole & table.fields[name][rows].isfinite()
    row, beam = whole.nonzero(as_tuple=True)
    query = rows[row]
    demonstrations = bank_rows(table.pool[query], table.sequences[query, beam])
    return query, demonstrations, {name: table.fields[name][query, beam] for name in names}


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
