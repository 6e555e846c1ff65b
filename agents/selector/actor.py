"""A selector as a TensorDict policy, from queries with their pools to sequences of
demonstrations."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.nn.functional import pad

from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.sequences import SequenceDistribution
from knobwise.envs.demonstrations.beam_table import BeamTable

BATCH = 512
"""Queries that are encoded at once."""


class SelectorActor(TensorDictModuleBase):
    """A policy that draws G sequences for each of P queries of a table.

    Reads `row` int64 [P]; writes `action` int64 [P, G, T] and `action_log_prob` [P, G]. Query and
    pool are encoded once for all G. Draws and log-probs alike divide logits by `temperature`, a
    single number.

    Args:
        selector: the selector.
        table: the queries with their pools, and the embeddings that the selector reads.
        shots: T, the demonstrations in a sequence.
        group_size: G.
    """

    in_keys = ["row"]
    out_keys = ["action", "action_log_prob"]
    queries: Tensor
    candidates: Tensor
    pool: Tensor
    temperature: Tensor

    def __init__(
        self, selector: Selector, table: BeamTable, shots: int, group_size: int = 1
    ) -> None:
        super().__init__()
        self.selector = selector
        self.shots = shots
        self.group_size = group_size
        # a row of zeros at the end, which row −1 is
        candidates = pad(table.candidates, (0, 0, 0, 1))
        self.register_buffer("queries", table.queries, persistent=False)
        self.register_buffer("candidates", candidates, persistent=False)
        self.register_buffer("pool", table.pool, persistent=False)
        self.register_buffer("temperature", torch.ones(()), persistent=False)

    def inputs(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the embeddings of queries int64 [P] and of their pools, and which are there."""
        rows = rows.to(self.pool.device)
        pool = self.pool[rows]
        return self.queries[rows], self.candidates[pool], pool >= 0

    def distribution(self, rows: Tensor, temperature: Tensor | float = 1.0) -> SequenceDistribution:
        """Compute the distribution over sequences for queries int64 [P]: logits over the
        temperature."""
        query, pool, mask = self.inputs(rows)
        return self.selector.distribution(query, pool, mask, self.shots, temperature)

    def get_dist(self, tensordict: TensorDictBase) -> SequenceDistribution:
        """Compute the distribution over sequences that a group is drawn from: logits over the
        temperature, for the queries in `row` [P]."""
        return self.distribution(tensordict["row"], self.temperature)

    def policy(self, tensordict: TensorDictBase) -> SequenceDistribution:
        """Compute the distribution over sequences at temperature 1, which is what is deployed, for
        the queries in `row` [P]."""
        return self.distribution(tensordict["row"])

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        dist = self.get_dist(tensordict)
        action, log_prob = dist.sample_with_log_prob(self.group_size)
        tensordict["action"] = action
        tensordict["action_log_prob"] = log_prob
        return tensordict

    @torch.no_grad()
    def recorded_log_probs(self, table: BeamTable, rows: Tensor) -> Tensor:
        """Return ln π of the recorded sequences of queries, float32 [n, B].

        Longer sequences are cut after T, and padding adds 0.

        Args:
            table: the records.
            rows: int64 [n], the queries.
        """
        parts = []
        for part in rows.split(BATCH):
            sequences = table.sequences[part, :, : self.shots].to(self.pool.device)
            dist = self.distribution(part)
            parts.append(dist.log_prob(sequences).cpu())
        return torch.cat(parts)
