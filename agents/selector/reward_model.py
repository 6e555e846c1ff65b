"""A learned reward: an ensemble predicts if the answer after a sequence of demonstrations is right.

Its members differ by their first weights and by the order in which they see the answers
(Lakshminarayanan, Pritzel and Blundell 2017, "Simple and Scalable Predictive Uncertainty Estimation
Using Deep Ensembles", without the adversarial examples). Where they disagree, the reward is lower
than their mean.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from knobwise.agents.selector.settings import RewardModelConfig
from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_table import BeamTable, bank_rows
from knobwise.envs.demonstrations.settings import DemonstrationRewardConfig, GroupConfig
from knobwise.envs.demonstrations.torchrl_env import Scorer, recorded_groups
from knobwise.losses.dropout import Dropout, dropping_out

BATCH = 256
"""Sequences in a step of a fit."""
CHUNK = 8192
"""Sequences that are predicted at once."""
LR = 2e-3
"""Learning rate of AdamW, which falls linearly to 0 in each fit."""
DROPOUT = 0.2
"""Dropout on the tokens, in a fit only."""
REFIT_EPOCHS = 2
"""Passes over all answered sequences after each round of true calls."""
REWARD = DemonstrationRewardConfig("legacy", information="vqa_correct")
"""The reward of the environment: the predicted `vqa_correct` as it is."""


class Answered(NamedTuple):
    """n sequences whose answers are known."""

    rows: Tensor
    """int64 [n], the queries."""
    sequences: Tensor
    """int64 [n, T], rows of the bank in the order shown, −1 after the end."""
    right: Tensor
    """float32 [n], 1 for a right answer and 0 for a wrong one."""


def recorded_answers(table: BeamTable, rows: Tensor) -> Answered:
    """Return the recorded sequences whose correctness is known, of those that were found without
    the answer in view.

    Args:
        table: the records.
        rows: int64 [n], the queries.

    Raises:
        InputError: there are no such sequences.
    """
    part = recorded_groups(table, GroupConfig("without_beams")).select(rows)
    right = part.fields.get("vqa_correct", torch.full(part.beam_mask.shape, torch.nan))
    query, beam = (part.beam_mask & ~right.isnan()).nonzero(as_tuple=True)
    if not len(query):
        raise InputError(
            f"beam table {table.name!r}: a learned reward needs sequences with vqa_correct that "
            "were found without the answer in view; record some (beams.random, beams.retrieved), "
            "or leave out variants with reward_model"
        )
    sequences = bank_rows(part.pool[query], part.sequences[query, beam])
    return Answered(rows[query], sequences, right[query, beam])


class Member(nn.Module):
    """A member of the ensemble: a recurrent network that predicts the logit of a right answer.

    It reads a query and its demonstrations in their order. A demonstration x moves the state s to
    g·s + (1 − g)·tanh(U[s; x]) with g = sigmoid(W[s; x]).
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(features, width)
        self.candidate = nn.Linear(features, width)
        self.token = nn.Sequential(nn.Linear(3 * width, width), nn.GELU(), Dropout(DROPOUT))
        self.update = nn.Linear(2 * width, 2 * width)
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, query: Tensor, sequences: Tensor, present: Tensor) -> Tensor:
        """Return the logits [n] of right answers.

        Args:
            query: [n, d].
            sequences: [n, T, d], the demonstrations.
            present: bool [n, T], False after the end of a sequence.
        """
        # a token of every demonstration and its query
        query = self.query(query)
        items = self.candidate(sequences)
        repeated = query.unsqueeze(1).expand_as(items)
        tokens = self.token(torch.cat([repeated, items, repeated * items], -1))
        # read the tokens in their order; after the end the state stays
        state = torch.zeros_like(query)
        for token, real in zip(tokens.unbind(1), present.unbind(1), strict=True):
            gate, new = self.update(torch.cat([state, token], -1)).chunk(2, -1)
            moved = torch.lerp(new.tanh(), state, gate.sigmoid())
            state = torch.where(real.unsqueeze(-1), moved, state)
        return self.head(torch.cat([query, state], -1)).squeeze(-1)


class RewardModel:
    """An ensemble of `Member`s, computed side by side on the CPU.

    It sees what the answering model sees: the query and its demonstrations in their order, not the
    rest of the pool.

    Args:
        config: the settings.
        mean: [d], the mean that embeddings are standardised by.
        scale: [d], the standard deviation that embeddings are standardised by.
    """

    def __init__(self, config: RewardModelConfig, mean: Tensor, scale: Tensor) -> None:
        self.config = config
        self.mean = mean
        self.scale = scale
        # the weights of all members are stacked, [M, …] each
        members = [Member(len(mean), config.width) for _ in range(config.members)]
        self.network = members[0]
        self.weights, _ = stack_module_state(members)
        self.answered: Answered | None = None

    def learn(self, table: BeamTable, answered: Answered, epochs: int) -> float:
        """Learn from new answers and from all answers before.

        Returns:
            The mean cross-entropy in the last epoch.
        """
        if self.answered is not None:
            # all sequences are padded to the longest
            answered = Answered(
                torch.cat([self.answered.rows, answered.rows]),
                pad_sequence([*self.answered.sequences, *answered.sequences], True, -1),
                torch.cat([self.answered.right, answered.right]),
            )
        self.answered = answered
        optimiser = torch.optim.AdamW(self.weights.values(), lr=LR)
        count = len(answered.right)
        for epoch in range(epochs):
            # each member sees the answers in an order of its own
            order = torch.stack([torch.randperm(count) for _ in range(self.config.members)])
            total = 0.0
            # a batch is int64 [M, b]: which answers each member learns from
            for start, batch in zip(range(0, count, BATCH), order.split(BATCH, 1), strict=True):
                optimiser.param_groups[0]["lr"] = LR * (1 - (epoch + start / count) / epochs)
                rows = answered.rows[batch]
                # a step of all members at once
                logits = self._logits(table, rows, answered.sequences[batch], learning=True)
                right = answered.right[batch]
                loss = F.binary_cross_entropy_with_logits(logits, right, reduction="none").mean(1)
                optimiser.zero_grad()
                loss.sum().backward()
                optimiser.step()
                total += float(loss.detach().mean()) * batch.shape[1]
        return total / count

    def _logits(self, table: BeamTable, rows: Tensor, sequences: Tensor, learning: bool) -> Tensor:
        """Return logits [M, n] of right answers; each member reads its own sequences.

        Args:
            table: the queries and the bank.
            rows: int64 [M, n], the queries.
            sequences: int64 [M, n, T], rows of the bank.
            learning: True for dropout.
        """
        # standardised embeddings, [M, n, d] and [M, n, T, d]
        query = (table.queries[rows] - self.mean) / self.scale
        demonstrations = (table.candidates[sequences.clamp_min(0)] - self.mean) / self.scale

        def member(weights: dict[str, Tensor], *inputs: Tensor) -> Tensor:
            logits: Tensor = functional_call(self.network, weights, inputs)
            return logits

        with dropping_out(learning):
            return vmap(member, randomness="different")(
                self.weights, query, demonstrations, sequences >= 0
            )

    @torch.no_grad()
    def probabilities(self, table: BeamTable, rows: Tensor, sequences: Tensor) -> Tensor:
        """Return each member's probability of a right answer, [M, n].

        Args:
            table: the queries and the bank.
            rows: int64 [n], the queries.
            sequences: int64 [n, T], rows of the bank, −1 after the end.
        """
        members = self.config.members
        parts = []
        for queries, drawn in zip(rows.split(CHUNK), sequences.split(CHUNK), strict=True):
            logits = self._logits(
                table,
                queries.expand(members, -1),
                drawn.expand(members, -1, -1),
                learning=False,
            )
            parts.append(logits.sigmoid())
        return torch.cat(parts, 1)

    def score(self, table: BeamTable, rows: Tensor, sequences: Tensor) -> dict[str, Tensor]:
        """Return mean − standard deviation (of the population) of the members' probabilities as
        `vqa_correct`, float [n].

        With `table` bound, this is a scorer for the environment.
        """
        predicted = self.probabilities(table, rows, sequences)
        return {"vqa_correct": predicted.mean(0) - predicted.std(0, correction=0)}

    def correct(
        self, table: BeamTable, rows: Tensor, drawn: Tensor, scorer: Scorer
    ) -> dict[str, float]:
        """Have the scorer answer one draw of each query, and learn from the n answers.

        It is the draw that the members disagree most about.

        Args:
            table: the queries and the bank.
            rows: int64 [n], the queries.
            drawn: int64 [n, G, T], G draws of each query, rows of the bank.
            scorer: answers, in n true calls.

        Returns:
            Metrics to log.
        """
        # predict all draws, [M, n, G]
        queries, group, shots = drawn.shape
        repeated = rows.repeat_interleave(group)
        predicted = self.probabilities(table, repeated, drawn.reshape(-1, shots))
        predicted = predicted.unflatten(1, (queries, group))
        most_disputed = torch.arange(queries), predicted.std(0, correction=0).argmax(1)
        sequences = drawn[most_disputed]
        # ask about the most disputed draw of each query
        right = scorer(rows, sequences)["vqa_correct"].float().cpu()
        loss = self.learn(table, Answered(rows, sequences, right), REFIT_EPOCHS)
        expected = predicted.mean(0)[most_disputed].mean()
        return {
            "Asked_Right": float(right.mean()),
            "Asked_Expected": float(expected),
            "Reward_Model_Loss": loss,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the weights and the answers learned from, for a checkpoint."""
        assert self.answered is not None
        weights = {name: weight.detach() for name, weight in self.weights.items()}
        return {"weights": weights, "answered": tuple(self.answered)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.weights = {name: weight.requires_grad_() for name, weight in state["weights"].items()}
        self.answered = Answered(*state["answered"])
