"""A selector as a TensorDict policy, from queries with their pools to sequences of
demonstrations."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType, exploration_type

from knobwise.agents.selector.selector import Selector, StoredEmbeddings
from knobwise.agents.selector.sequences import SequenceDistribution
from knobwise.envs.demonstrations.beam_table import BeamTable

BATCH = 512
"""Queries that are encoded at once."""


class SelectorActor(TensorDictModuleBase):
    """A policy that draws G sequences for each of P queries.

    Reads `row` int64 [P]; writes `action` int64 [P, G, T] and `action_log_prob` [P, G]. Query and
    pool are encoded once for all G. Under `ExplorationType.DETERMINISTIC` the action is the greedy
    sequence. Draws and log-probs alike divide logits by `temperature`, a single number.

    Without embeddings and pool it reads `query` [*, d], `pool` [*, N, d] and `mask` [*, N] from the
    environment, and writes [*, (G), T] and [*, (G)].

    Args:
        selector: the selector.
        embeddings: embeddings of all queries and candidates, or None.
        pool: int64 [Q, N], the rows of each query's candidates in the bank, −1 where a pool is
            shorter; or None.
        shots: T, the demonstrations in a sequence.
        group_size: G; None leaves out the axis G.
    """

    out_keys = ["action", "action_log_prob"]
    pool: Tensor
    temperature: Tensor

    def __init__(
        self,
        selector: Selector,
        embeddings: StoredEmbeddings | None,
        pool: Tensor | None,
        shots: int,
        group_size: int | None = 1,
    ) -> None:
        super().__init__()
        if embeddings is None:
            self.in_keys = ["query", "pool", "mask"]
        else:
            self.in_keys = ["row"]
        self.selector = selector
        self.embeddings: Any = embeddings
        self.shots = shots
        self.group_size = group_size
        self.register_buffer("pool", pool, persistent=False)
        self.register_buffer("temperature", torch.ones(()), persistent=False)

    def get_dist(self, tensordict: TensorDictBase) -> SequenceDistribution:
        """Return the distribution that the group is drawn from.

        Leading axes of what the environment shows are flattened to one.
        """
        # embeddings from the environment, or stored ones by row
        if self.embeddings is not None:
            return self._distribution(*self.inputs(tensordict["row"]))
        query, candidates, mask = (tensordict[key] for key in self.in_keys)
        query = query.reshape(-1, query.shape[-1])
        candidates = candidates.reshape(-1, *candidates.shape[-2:])
        return self._distribution(query, candidates, mask.bool().reshape(-1, mask.shape[-1]))

    def inputs(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return stored embeddings of queries int64 [P] and of their pools, and which are there."""
        pool = self.pool[rows]
        return *self.embeddings.both(rows, pool), pool >= 0

    def _distribution(self, query: Tensor, pool: Tensor, mask: Tensor) -> SequenceDistribution:
        settings = self.shots, self.group_size, self.temperature
        return self.selector.distribution(query, pool, mask, *settings)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        # draw, or take the greedy sequence
        dist = self.get_dist(tensordict)
        if exploration_type() in (ExplorationType.DETERMINISTIC, ExplorationType.MODE):
            action = dist.mode
            log_prob = dist.log_prob(action)
        else:
            action, log_prob = dist.sample_with_log_prob()
        leading = (
            tensordict["mask"].shape[:-1] if self.embeddings is None else tensordict["row"].shape
        )
        # as many leading axes as the environment has
        tensordict["action"] = action.reshape(leading + action.shape[1:])
        tensordict["action_log_prob"] = log_prob.reshape(leading + log_prob.shape[1:])
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
            parts.append(self._distribution(*self.inputs(part)).log_prob(sequences).cpu())
        return torch.cat(parts)


def make_selector_actor(
    selector: Selector, shots: int, group_size: int | None = None
) -> SelectorActor:
    """Return a policy for every form of the selector's bandit.

    It reads `query`, `pool` and `mask`, and draws sequences of `shots` demonstrations. TorchRL's
    `GymWrapper` needs `categorical_action_encoding=True` for it.
    """
    return SelectorActor(selector, None, None, shots, group_size)


class SequenceBehaviour(TensorDictModuleBase):
    """The policy that collects data: it draws sequences, or replays the recorded `sequences` if the
    environment shows them.

    It writes `action`, `action_log_prob` and `reference_log_prob` as they are at collection.

    Args:
        actor: the policy that draws.
        reference: the policy that the KL is taken to.
        with_log_probs: False where the loss needs no log-probs, as in imitation.
    """

    def __init__(
        self, actor: SelectorActor, reference: SelectorActor, with_log_probs: bool = True
    ) -> None:
        super().__init__()
        self.in_keys = actor.in_keys
        self.out_keys = ["action"]
        self.actor = actor
        self.reference = reference
        self.with_log_probs = with_log_probs

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        # replay records, or draw
        recorded = tensordict.get("sequences", None)
        if recorded is not None:
            tensordict["action"] = recorded
            if self.with_log_probs:
                tensordict["action_log_prob"] = self.actor.get_dist(tensordict).log_prob(recorded)
        else:
            self.actor(tensordict)
        # what the KL is taken to
        if self.with_log_probs:
            dist = self.reference.get_dist(tensordict)
            tensordict["reference_log_prob"] = dist.log_prob(tensordict["action"])
        return tensordict
