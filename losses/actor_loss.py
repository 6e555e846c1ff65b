"""What the loss modules share: one actor, the keys they read, and the behaviour policy that writes them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase, TensorDictParams
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.objectives import LossModule


class ActorLoss(LossModule):
    """A loss of one actor.

    Args:
        actor_network: a module with `get_dist(tensordict)`.
        reduction: `mean`, `sum` or `none` over contexts.
        functional: keep the parameters apart from the module, as TorchRL does (needed under vmap); off is faster.

    Attributes:
        diagnostics: whether `forward` also gives what is for the eye only; off where nobody looks is faster.
    """

    actor_network: ProbabilisticTensorDictSequential
    actor_network_params: TensorDictParams
    target_actor_network_params: TensorDictParams

    def __init__(
        self, actor_network: ProbabilisticTensorDictSequential, *, reduction: str = "mean", functional: bool = True
    ) -> None:
        super().__init__()
        self._forward_pre_hooks.clear()  # TorchRL looks there for target networks that nobody updates; we have none
        self._functional = functional
        self._in_keys: list[NestedKey] | None = None
        self.reduction = reduction
        self.diagnostics = True
        if functional:
            self.convert_to_functional(actor_network, "actor_network")
        else:
            self.actor_network = actor_network
            self.actor_network_params = None

    @property
    def functional(self) -> bool:
        """Whether the parameters stand apart from the module."""
        return self._functional

    def _forward_value_estimator_keys(self, **kwargs: object) -> None:
        self._in_keys = None

    def reset_parameters_recursive(self) -> None:
        """Draw the actor's parameters anew."""
        if self.functional:
            super().reset_parameters_recursive()
        else:  # TorchRL looks only at modules that stand apart from their parameters
            self.actor_network.reset_parameters_recursive()

    @abstractmethod
    def _own_keys(self) -> list[NestedKey]:
        """The keys that the loss reads beside those of the actor."""

    @property
    def in_keys(self) -> list[NestedKey]:
        """Everything that `forward` reads."""
        if self._in_keys is None:
            self._in_keys = list(dict.fromkeys([*self.actor_network.in_keys, *self._own_keys()]))
        return self._in_keys

    @in_keys.setter
    def in_keys(self, values: list[NestedKey]) -> None:
        self._in_keys = values

    def _distribution(self, tensordict: TensorDictBase) -> Any:
        if not self.functional:
            return self.actor_network.get_dist(tensordict)
        with self.actor_network_params.to_module(self.actor_network):
            return self.actor_network.get_dist(tensordict)


def is_zero(coefficient: Tensor) -> bool:
    """Whether a term with this coefficient (a single number) need not be computed. Under vmap that is not known."""
    try:
        return not coefficient
    except RuntimeError:
        return False


class Behaviour(TensorDictModuleBase):
    """The policy that collects: draws, and writes down what `GRPOLoss` has to know of the moment of drawing.

    Writes `action` int64 [P, G, K], `configuration` int64 [P, G], and for `sampled` `action_log_prob` and
    `reference_log_prob` [P, G], for `exact` `behaviour_log_probs` and `reference_log_probs` [P, C].

    Args:
        actor: a module whose `get_dist(tensordict)` gives a distribution over `configurations` with `sample_index()`,
            `log_prob_of_index(index)` and `log_probs` [P, C].
        reference: the same of the reference policy.
        objective: `sampled` or `exact`.

    Attributes:
        with_reference: whether the reference is asked at all; off where neither a penalty nor a log needs it is faster.
    """

    def __init__(
        self, actor: ProbabilisticTensorDictSequential, reference: ProbabilisticTensorDictSequential, objective: str
    ) -> None:
        super().__init__()
        self.in_keys, self.out_keys = actor.in_keys, ["action"]
        self.actor, self.reference, self.objective = actor, reference, objective
        self.with_reference = True

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        dist = self.actor.get_dist(tensordict)
        index = dist.sample_index()
        tensordict["action"], tensordict["configuration"] = dist.configurations[index], index
        exact = self.objective == "exact"
        told = {"behaviour_log_probs" if exact else "action_log_prob": dist}
        if self.with_reference:
            told["reference_log_probs" if exact else "reference_log_prob"] = self.reference.get_dist(tensordict)
        for key, policy in told.items():
            tensordict[key] = policy.log_probs if exact else policy.log_prob_of_index(index)
        return tensordict
