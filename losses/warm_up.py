"""The loss of the warm-up before GRPO.

RCE imitates the softmax of the rewards; with an infinite temperature it imitates all alternatives
alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, dispatch
from tensordict.utils import NestedKey
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.losses.actor_loss import ActorLoss, configuration_log_probs
from knobwise.losses.functional import reward_weighted_cross_entropy
from knobwise.losses.guards import Keys, Read, is_finite


class RCELoss(ActorLoss):
    """Minimise RCE: the cross-entropy of a policy to softmax(reward/τ) over the configurations.

    All profiled configurations of a context take part. With `recorded` the recorded actions of its
    group do instead, for contexts with more alternatives than can be listed:
    −Σ_b softmax(reward/τ)_b ln π(b).

    Args:
        actor_network: a module whose `get_dist(tensordict)` gives a distribution with `log_probs`
            [P, C], or with `recorded` with `log_prob(action)` [P, G]; or a `CompositeDistribution`,
            see `ActorLoss`.
        recorded: imitate `action` instead of every configuration.
        temperature: τ, in units of reward; may be changed between steps (it falls during the
            warm-up); infinite for a plain mean, supervised fine-tuning.
        reduction, functional: see `ActorLoss`.

    Outputs: `loss_rce`; and as a diagnostic the `entropy` of the policy.
    """

    @dataclass
    class _AcceptedKeys:
        """Keys of the tensordict.

        Attributes:
            reward_per_configuration: float [P, C], NaN where not profiled.
            action: with `recorded`, the actions of the group, [P, G, …], or for a composite a list
                of keys.
            reward: with `recorded`, float [P, G].
            group_mask: with `recorded`, bool [P, G], which of the actions exist.
        """

        reward_per_configuration: NestedKey = "reward_per_configuration"
        action: Keys = "action"
        reward: NestedKey = ("next", "reward")
        group_mask: NestedKey = "group_mask"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    out_keys = ["loss_rce", "entropy"]
    _schedulable_buffers = frozenset({"temperature"})
    temperature: Tensor

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        *,
        recorded: bool = False,
        temperature: float = 1.0,
        reduction: str | None = None,
        functional: bool = True,
    ) -> None:
        super().__init__(actor_network, reduction=reduction, functional=functional)
        if not temperature > 0:
            raise InputError(f"RCELoss: temperature={temperature}: must be positive")
        self.recorded = recorded
        self._register(temperature=temperature)
        self._forward_value_estimator_keys()

    def _loss_keys(self) -> list[Keys]:
        keys = self.tensor_keys
        if self.recorded:
            return [keys.action, keys.reward, keys.group_mask]
        return [keys.reward_per_configuration]

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the loss of contexts, [P], with the keys above and those that the actor reads."""
        keys = self.tensor_keys
        reward_key = keys.reward if self.recorded else keys.reward_per_configuration
        rewards = self._required(tensordict, reward_key, "the rewards")
        dist = self._distribution(tensordict)
        if self.recorded:
            log_probs = self._log_prob(dist, tensordict)
            mask = self._required(tensordict, keys.group_mask, "which of the actions exist")
        else:
            log_probs = configuration_log_probs(dist)
            mask = ~rewards.isnan()
        loss = reward_weighted_cross_entropy(log_probs, rewards, self.temperature, mask)
        out = {"loss_rce": self._reduce_loss(loss, tensordict)}
        if not is_finite(out["loss_rce"]):
            read = Read(reward_key, rewards.masked_fill(~mask, 0.0))
            self._refuse(tensordict, [read], [out["loss_rce"]])
        if self.diagnostics:
            with torch.no_grad():
                out["entropy"] = self._entropy(dist, loss.ndim).mean()
        return TensorDict(out, batch_size=[])
