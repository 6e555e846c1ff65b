"""GRPO in expectation over every configuration, as a TorchRL loss module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from tensordict.utils import NestedKey

from knobwise.losses.actor_loss import configuration_log_probs
from knobwise.losses.grpo import Group, GroupLoss
from knobwise.losses.guards import Keys, is_zero


class ExactGRPOLoss(GroupLoss):
    """GRPO in expectation over all C configurations, weighted by the behaviour policy.

    It is the objective of `GRPOLoss` without sampling noise, possible because a profile knows the
    reward of every configuration; see `GroupLoss` for formula, settings and outputs.

    Args:
        actor_network: a module whose `get_dist(tensordict)` gives a distribution with `log_probs`
            [P, C], −inf where masked, and `entropy()` [P].
    """

    @dataclass
    class _AcceptedKeys:
        """Keys of the tensordict.

        Attributes:
            reward_per_configuration: float [P, C]; anything where not profiled.
            behaviour_log_probs: float [P, C], the behaviour policy's, −inf where masked.
            reference_log_probs: float [P, C]; may be missing when β = 0.
        """

        reward_per_configuration: NestedKey = "reward_per_configuration"
        behaviour_log_probs: NestedKey = "behaviour_log_probs"
        reference_log_probs: NestedKey = "reference_log_probs"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    exact = True

    def __init__(self, actor_network: ProbabilisticTensorDictSequential, **settings: Any) -> None:
        super().__init__(actor_network, **settings)
        self._forward_value_estimator_keys()

    @property
    def _keys(self) -> tuple[Keys, Keys, Keys]:
        keys = self.tensor_keys
        return keys.reward_per_configuration, keys.behaviour_log_probs, keys.reference_log_probs

    def _loss_keys(self) -> list[Keys]:
        return [*self._keys]

    def _group(self, tensordict: TensorDictBase) -> Group:
        """Return the groups of all configurations, J = C."""
        keys = self.tensor_keys
        dist = self._distribution(tensordict)
        reward = self._required(tensordict, keys.reward_per_configuration, "all rewards")
        old = self._required(tensordict, keys.behaviour_log_probs, "all old log-probs")
        reference = tensordict.get(keys.reference_log_probs, None)
        log_prob = configuration_log_probs(dist)
        weight = old.exp().detach()
        return self._unmasked(Group(dist, log_prob, old, reference, reward, weight))

    def _unmasked(self, group: Group) -> Group:
        """Put finite numbers in the place of what is masked, which has weight 0 because the
        behaviour policy never chooses it: 0 · ∞ would get into values and gradients."""
        _, log_prob, old, reference, reward, _ = group
        impossible = old == -torch.inf
        # the objective alone can do with log π = −∞, and is faster without this
        if self.diagnostics or not is_zero(self.kl_to_ref_coeff):
            log_prob = log_prob.masked_fill(impossible, 0.0)
            if reference is not None:
                reference = reference.masked_fill(impossible, torch.finfo(old.dtype).min)
        return group._replace(
            log_prob=log_prob,
            old=old.masked_fill(impossible, 0.0),
            reference=reference,
            reward=reward.masked_fill(impossible, 0.0),
        )
