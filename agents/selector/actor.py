"""A selector as a TensorDict policy: row numbers of queries in, groups of demonstration sequences out."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from knobwise.agents.selector.clip_encoder import Embeddings
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.sequences import SequenceDistribution
from knobwise.envs.demonstrations.beam_table import BeamTable


class SelectorActor(TensorDictModuleBase):
    """Reads `row` int64 [P]; writes `action` int64 [P, G, T] and `action_log_prob` [P, G]. Query and pool are encoded
    once for all G.

    `pool` int64 [Q, N] holds rows of the bank, −1 where a pool is shorter. The logits are divided by `temperature`, in
    draws and log-probs alike.
    """

    in_keys = ["row"]
    out_keys = ["action", "action_log_prob"]
    pool: Tensor

    def __init__(
        self, selector: Selector, embeddings: Embeddings, pool: Tensor, shots: int, group_size: int = 1
    ) -> None:
        super().__init__()
        self.selector, self.embeddings = selector, embeddings
        self.shots, self.group_size, self.temperature = shots, group_size, 1.0
        self.register_buffer("pool", pool, persistent=False)

    def get_dist(self, tensordict: TensorDictBase) -> SequenceDistribution:
        """What the group is drawn from."""
        rows = tensordict["row"]
        pool = self.pool[rows]
        query, candidates = (x.to(pool.device) for x in self.embeddings.both(rows, pool))
        return self.selector.distribution(query, candidates, pool >= 0, self.shots, self.group_size, self.temperature)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["action"], tensordict["action_log_prob"] = self.get_dist(tensordict).sample_with_log_prob()
        return tensordict

    @torch.no_grad()
    def recorded_log_probs(self, table: BeamTable, rows: Tensor, batch: int = 512) -> Tensor:
        """ln π of the recorded sequences of queries `rows`, float32 [n, B]; longer sequences are cut after T, and
        padding counts 0."""
        parts, device, training = [], self.pool.device, self.selector.training
        self.selector.eval()
        for some in rows.split(batch):
            queries = TensorDict({"row": some}, [len(some)], device=device)
            sequences = table.sequences[some, :, : self.shots].to(device)
            parts.append(self.get_dist(queries).log_prob(sequences).cpu())
        self.selector.train(training)
        return torch.cat(parts)


class SequenceBehaviour(TensorDictModuleBase):
    """The policy that collects: it draws, or where the environment shows `sequences`, replays what was recorded. It
    writes down what the losses have to know of this moment: `action`, `action_log_prob`, `reference_log_prob`.

    The KL is taken to `reference`. Imitation needs no log-probs.
    """

    def __init__(self, actor: SelectorActor, reference: SelectorActor, with_log_probs: bool = True) -> None:
        super().__init__()
        self.in_keys, self.out_keys = actor.in_keys, ["action"]
        self.actor, self.reference, self.with_log_probs = actor, reference, with_log_probs

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
