"""A learned reward: an ensemble predicts whether the answer after a sequence of demonstrations is
right.

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

from knobwise.agents.selector.settings import RewardModelConfig
from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_table import BeamTable, bank_rows
from knobwise.envs.demonstrations.settings import DemonstrationRewardConfig, GroupConfig
from knobwise.envs.demonstrations.torchrl_env import Scorer, recorded_groups

BATCH = 256
CHUNK = 8192
"""Sequences in a step of a fit, and those that are predicted at once."""
LR = 2e-3
DROPOUT = 0.2
"""Learning rate of AdamW, which falls linearly to 0 in each fit."""
REWARD = DemonstrationRewardConfig("legacy", information="vqa_correct")
"""What the environment makes of a predicted `vqa_correct`: the same number."""


class Answered(NamedTuple):
    """n sequences whose answers are known: queries int64 [n]; rows of the bank in their order,
    int64 [n, T], −1 after the end; right answers float32 [n], 0 or 1."""

    rows: Tensor
    sequences: Tensor
    right: Tensor

    def joined(self, other: Answered) -> Answered:
        """These and others, which may be longer or shorter."""
        longest = max(self.sequences.shape[1], other.sequences.shape[1])
        sequences = [
            F.pad(x.sequences, (0, longest - x.sequences.shape[1]), value=-1) for x in (self, other)
        ]
        return Answered(
            torch.cat([self.rows, other.rows]),
            torch.cat(sequences),
            torch.cat([self.right, other.right]),
        )


def recorded_answers(table: BeamTable, rows: Tensor, groups: str) -> Answered:
    """The recorded sequences of queries `rows` that were found by a method of `groups` and recorded
    with their correctness. Raises InputError if there are none."""
    if "vqa_correct" not in table.fields or table.fields["vqa_correct"][rows].isnan().all():
        raise InputError(
            f"beam table {table.name!r}: a learned reward needs sequences recorded as right or "
            "wrong; record "
            "vqa_correct, or leave out variants with reward_model"
        )
    part = recorded_groups(table, GroupConfig(groups)).select(rows)
    right = part.fields["vqa_correct"]
    query, beam = (part.beam_mask & ~right.isnan()).nonzero(as_tuple=True)
    if not len(query):
        raise InputError(
            f"reward_model.recorded={groups}: no such sequence has a known answer; try "
            "reward_model.recorded=all"
        )
    return Answered(
        rows[query], bank_rows(part.pool[query], part.sequences[query, beam]), right[query, beam]
    )


def penalised(probabilities: Tensor, kappa: float) -> Tensor:
    """mean − κ · standard deviation (of the population) over the members: [M, *] → [*]."""
    return probabilities.mean(0) - kappa * probabilities.std(0, correction=0)


class Member(nn.Module):
    """Reads a query, then the demonstrations in their order, and gives the logit of a right answer.

    A demonstration x moves the state s to g·s + (1 − g)·tanh(U[s; x]) with g = sigmoid(W[s; x]).
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(features, width)
        self.candidate = nn.Linear(features, width)
        self.token = nn.Sequential(nn.Linear(3 * width, width), nn.GELU(), nn.Dropout(DROPOUT))
        self.update = nn.Linear(2 * width, 2 * width)
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, query: Tensor, sequences: Tensor, present: Tensor) -> Tensor:
        """[n, d], [n, T, d] and bool [n, T] → [n]."""
        query = self.query(query)
        items = self.candidate(sequences)
        repeated = query.unsqueeze(1).expand_as(items)
        tokens = self.token(torch.cat([repeated, items, repeated * items], -1))
        state = torch.zeros_like(query)
        for token, real in zip(tokens.unbind(1), present.unbind(1), strict=True):
            gate, new = self.update(torch.cat([state, token], -1)).chunk(2, -1)
            state = torch.where(
                real.unsqueeze(-1), torch.lerp(new.tanh(), state, gate.sigmoid()), state
            )
        return self.head(torch.cat([query, state], -1)).squeeze(-1)


class RewardModel:
    """An ensemble of `Member`s, computed as one on the CPU, for embeddings with this mean and
    scale, [d]. It sees what the answering model sees: the query and its demonstrations in their
    order, not the rest of the pool."""

    def __init__(self, config: RewardModelConfig, mean: Tensor, scale: Tensor) -> None:
        self.config = config
        self.mean = mean
        self.scale = scale
        members = [Member(len(mean), config.width) for _ in range(config.members)]
        self.network, (self.weights, _) = members[0], stack_module_state(members)
        self.answered: Answered | None = None

    def learn(self, table: BeamTable, answered: Answered, epochs: int) -> float:
        """Go several times over these answers and all those before them; gives the mean
        cross-entropy of the last."""
        self.answered = answered = (
            answered if self.answered is None else self.answered.joined(answered)
        )
        optimiser = torch.optim.AdamW(self.weights.values(), lr=LR)
        count = len(answered.right)
        loss = torch.zeros(())
        for epoch in range(epochs):
            order = torch.stack([torch.randperm(count) for _ in range(self.config.members)])
            total = 0.0
            for start, places in zip(range(0, count, BATCH), order.split(BATCH, 1), strict=True):
                optimiser.param_groups[0]["lr"] = LR * (1 - (epoch + start / count) / epochs)
                logits = self._logits(
                    table, answered.rows[places], answered.sequences[places], learning=True
                )
                loss = F.binary_cross_entropy_with_logits(
                    logits, answered.right[places], reduction="none"
                ).mean(1)
                optimiser.zero_grad()
                loss.sum().backward()
                optimiser.step()
                total += float(loss.detach().mean()) * places.shape[1]
        return total / count

    def _logits(
        self, table: BeamTable, rows: Tensor, sequences: Tensor, learning: bool = False
    ) -> Tensor:
        """int64 [M, n] and [M, n, T] → [M, n], each member its own sequences."""
        query = (table.queries[rows] - self.mean) / self.scale
        demonstrations = (table.candidates[sequences.clamp_min(0)] - self.mean) / self.scale
        self.network.train(learning)

        def member(weights: dict[str, Tensor], *inputs: Tensor) -> Tensor:
            logits: Tensor = functional_call(self.network, weights, inputs)
            return logits

        return vmap(member, randomness="different")(
            self.weights, query, demonstrations, sequences >= 0
        )

    @torch.no_grad()
    def probabilities(self, table: BeamTable, rows: Tensor, sequences: Tensor) -> Tensor:
        """P(right answer) by each member, [M, n]: queries of a table, int64 [n], after rows of its
        bank, int64 [n, T], −1 after the end."""
        members = self.config.members
        parts = [
            self._logits(table, some.expand(members, -1), seen.expand(members, -1, -1)).sigmoid()
            for some, seen in zip(rows.split(CHUNK), sequences.split(CHUNK), strict=True)
        ]
        return torch.cat(parts, 1)

    def score(self, table: BeamTable, rows: Tensor, sequences: Tensor) -> dict[str, Tensor]:
        """The penalised probability as `vqa_correct`, float [n]: with a table bound, a scorer for
        the environment."""
        return {
            "vqa_correct": penalised(self.probabilities(table, rows, sequences), self.config.kappa)
        }

    def correct(
        self, table: BeamTable, rows: Tensor, drawn: Tensor, scorer: Scorer
    ) -> dict[str, float]:
        """Answer one of G draws of each query really, where the members disagree most, and learn
        from it: n true calls. Queries are int64 [n], draws rows of the bank, int64 [n, G, T]. Gives
        what is logged of it."""
        queries, group, shots = drawn.shape
        predicted = self.probabilities(
            table, rows.repeat_interleave(group), drawn.reshape(-1, shots)
        )
        predicted = predicted.unflatten(1, (queries, group))
        place = predicted.std(0, correction=0).argmax(1)
        each = torch.arange(queries)
        right = scorer(rows, drawn[each, place])["vqa_correct"].float().cpu()
        loss = self.learn(
            table, Answered(rows, drawn[each, place], right), self.config.refit_epochs
        )
        expected = predicted.mean(0)[each, place].mean()
        return {
            "Asked_Right": float(right.mean()),
            "Asked_Expected": float(expected),
            "Reward_Model_Loss": loss,
        }

    def state(self) -> dict[str, Any]:
        """What it learned, for a checkpoint."""
        assert self.answered is not None
        weights = {name: weight.detach() for name, weight in self.weights.items()}
        return {"weights": weights, "answered": tuple(self.answered)}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.weights = {name: weight.requires_grad_() for name, weight in state["weights"].items()}
        self.answered = Answered(*state["answered"])
