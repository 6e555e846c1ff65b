"""A selector as a TensorDict policy: queries with their pools in, sequences of demonstrations
out."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType, exploration_type

from knobwise.agents.selector.selector import Selector, StoredEmbeddings
from knobwise.agents.selector.sequences import SequenceDistribution
from knobwise.envs.demonstrations.beam_table import BeamTable


class SelectorActor(TensorDictModuleBase):
    """Reads `row` int64 [P]; writes `action` int64 [P, G, T] and `action_log_prob` [P, G]. Query
    and pool are encoded once for all G. Without a group size the axis G is not there.

    `pool` int64 [Q, N] holds rows of the bank, −1 where a pool is shorter. Without embeddings and
    pool it reads what an environment shows, `query` [*, d], `pool` [*, N, d] and `mask` [*, N], and
    writes [*, (G), T] and [*, (G)]. Under `ExplorationType.DETERMINISTIC` the action is the greedy
    sequence. Logits are divided by `temperature`, a single number, in draws and log-probs alike.
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
        """What the group is drawn from; leading axes of what the environment shows are one."""
        if self.embeddings is None:
            query, candidates, mask = (tensordict[key] for key in self.in_keys)
            query = query.reshape(-1, query.shape[-1])
            mask = mask.bool().reshape(-1, mask.shape[-1])
            candidates = candidates.reshape(-1, *candidates.shape[-2:])
        else:
            rows = tensordict["row"]
            pool = self.pool[rows]
            query, candidates = (x.to(pool.device) for x in self.embeddings.both(rows, pool))
            mask = pool >= 0
        return self.selector.distribution(
            query, candidates, mask, self.shots, self.group_size, self.temperature
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        dist = self.get_dist(tensordict)
        if exploration_type() in (ExplorationType.DETERMINISTIC, ExplorationType.MODE):
            action = dist.mode
            log_prob = dist.log_prob(action)
        else:
            action, log_prob = dist.sample_with_log_prob()
        if self.embeddings is not None:
            leading = tensordict["row"].shape
        else:
            leading = tensordict["query"].shape[:-1]
        tensordict["action"] = action.reshape(leading + action.shape[1:])
        tensordict["action_log_prob"] = log_prob.reshape(leading + log_prob.shape[1:])
        return tensordict

    @torch.no_grad()
    def recorded_log_probs(self, table: BeamTable, rows: Tensor, batch: int = 512) -> Tensor:
        """ln π of the recorded sequences of queries `rows`, float32 [n, B]; longer sequences are
        cut after T, and padding counts 0."""
        parts = []
        device = self.pool.device
        training = self.selector.training
        self.selector.eval()
        for some in rows.split(batch):
            queries = TensorDict({"row": some}, [len(some)], device=device)
            sequences = table.sequences[some, :, : self.shots].to(device)
            parts.append(self.get_dist(queries).log_prob(sequences).cpu())
        self.selector.train(training)
        return torch.cat(parts)


def make_selector_actor(
    selector: Selector, shots: int, group_size: int | None = None
) -> SelectorActor:
    """A policy for every form of the selector's bandit: it reads `query`, `pool` and `mask`, and
    draws sequences of `shots` demonstrations. TorchRL's `GymWrapper` needs
    `categorical_action_encoding=True` for it."""
    return SelectorActor(selector, None, None, shots, group_size)


class SequenceBehaviour(TensorDictModuleBase):
    """The policy that collects: it draws, or where the environment shows `sequences`, replays what
    was recorded. It writes down what the losses have to know of this moment: `action`,
    `action_log_prob`, `reference_log_prob`.

    The KL is taken to `reference`. Imitation needs no log-probs.
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
        recorded = tensordict.get("sequences", None)
        if recorded is not None:
            tensordict["action"] = recorded
            if self.with_log_probs:
                tensordict["action_log_prob"] = self.actor.get_dist(tensordict).log_prob(recorded)
        else:
            self.actor(tensordict)
        if self.with_log_probs:
            dist = self.reference.get_dist(tensordict)
            tensordict["reference_log_prob"] = dist.log_prob(tensordict["action"])
        return tensordict
