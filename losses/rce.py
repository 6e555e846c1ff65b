"""RCE, the warm-up before GRPO: imitate the softmax of the rewards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, dispatch
from tensordict.utils import NestedKey
from torch import Tensor

from knobwise.losses.actor import ActorLoss
from knobwise.losses.functional import reward_weighted_cross_entropy


class RCELoss(ActorLoss):
    """Reward-weighted cross-entropy to softmax(reward/τ) over every profiled configuration of a context.

    Args:
        actor_network: a module whose `get_dist(tensordict)` gives a distribution with `log_probs` [P, C].
        temperature: τ, in units of reward; may be changed between steps (it falls during the warm-up).
        reduction: `mean`, `sum` or `none` over contexts.
        functional: keep the parameters apart from the module, as TorchRL does (needed under vmap); off is faster.

    Outputs: `loss_rce`; and for the eye `entropy` of the policy.
    """

    @dataclass
    class _AcceptedKeys:
        """Where things stand in the tensordict.

        Attributes:
            reward_per_configuration: float [P, C], NaN where not profiled.
        """

        reward_per_configuration: NestedKey = "reward_per_configuration"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    out_keys = ["loss_rce", "entropy"]
    _schedulable_buffers = frozenset({"temperature"})

    temperature: Tensor

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        *,
        temperature: float = 1.0,
        reduction: str = "mean",
        functional: bool = True,
    ) -> None:
        super().__init__(actor_network, reduction=reduction, functional=functional)
        self.register_buffer("temperature", torch.tensor(float(temperature)))

    def _own_keys(self) -> list[NestedKey]:
        return [self.tensor_keys.reward_per_configuration]

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The loss of a batch of contexts.

        Args:
            tensordict: batch [P] with the keys above and those that the actor reads.
        """
        dist = self._distribution(tensordict)
        rewards = tensordict.get(self.tensor_keys.reward_per_configuration)
        loss = reward_weighted_cross_entropy(dist.log_probs, rewards, self.temperature, ~rewards.isnan())
        out = {"loss_rce": self._reduce_loss(loss, tensordict)}
        if self.diagnostics:
            with torch.no_grad():
                out["entropy"] = dist.entropy().mean()
        return TensorDict(out, batch_size=[])
