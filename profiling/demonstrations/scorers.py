"""How well a model answers queries after demonstrations: the protocol. The scorer of Hugging Face
models is in `knobwise.profiling.huggingface.scorer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from knobwise.envs.demonstrations.beam_table import BeamTable, bank_rows
from knobwise.envs.tables.tensor_file import joined_by_name

SCORES = ("logprob_score", "vqa_gt_prob", "vqa_correct", "vqa_acc_score", "vqa_rel_score")
"""What a scorer gives."""
Fields = dict[str, Tensor]
"""Scores by name."""
Ask = Callable[[Tensor, Tensor], Fields]
"""Scores queries after demonstrations, as a `Scorer` does."""


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


class CachedScorer:
    """Asks a scorer, and never twice for the same sequence of a query."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.known: dict[tuple[int, ...], dict[str, float]] = {}

    def __call__(self, queries: Tensor, demonstrations: Tensor) -> Fields:
        keys = self._keys(queries, demonstrations)
        new = list({key: i for i, key in enumerate(keys) if key not in self.known}.values())
        if new:
            scores_of_new = self.scorer(queries[new], demonstrations[new])
            self.remember(queries[new], demonstrations[new], scores_of_new)
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
    """Return what a table knows of the queries `rows`, int64 [n], for `CachedScorer.remember`.

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
