"""What the loss modules share: one actor, and the keys they read."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import nullcontext
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictParams
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.objectives import LossModule


class ActorLoss(LossModule):
    """A loss of one actor.

    Args:
        actor_network: a module with `get_dist(tensordict)`.
        reduction: `mean`, `sum` or `none` over contexts; None for `mean`.
        functional: keep the parameters apart from the module, as TorchRL does (needed under vmap); off is faster.

    Attributes:
        diagnostics: whether `forward` also gives diagnostics; without them it is faster.
    """

    functional = True
    actor_network: ProbabilisticTensorDictSequential
    actor_network_params: TensorDictParams
    target_actor_network_params: TensorDictParams

    def __init__(
        self, actor_network: ProbabilisticTensorDictSequential, *, reduction: str | None = None, functional: bool = True
    ) -> None:
        super().__init__()
        self._forward_pre_hooks.clear()  # TorchRL looks there for target networks that nobody updates; we have none
        self.functional, self.reduction, self.diagnostics = functional, reduction or "mean", True
        if functional:
            self.convert_to_functional(actor_network, "actor_network")
        else:
            self.actor_network = actor_network
            self.actor_network_params = None

    def _forward_value_estimator_keys(self, **kwargs: object) -> None:
        self.in_keys = list(dict.fromkeys([*self.actor_network.in_keys, *self._loss_keys()]))

    def reset_parameters_recursive(self) -> None:
        """Draw the actor's parameters anew."""
        if self.functional:
            super().reset_parameters_recursive()
        else:  # TorchRL looks only at modules that stand apart from their parameters
            self.actor_network.reset_parameters_recursive()

    @abstractmethod
    def _loss_keys(self) -> list[NestedKey]:
        """The keys that the loss reads beside those of the actor."""

    def _distribution(self, tensordict: TensorDictBase) -> Any:
        with self.actor_network_params.to_module(self.actor_network) if self.functional else nullcontext():
            return self.actor_network.get_dist(tensordict)


def is_zero(coefficient: Tensor) -> bool:
    """Whether a term with this coefficient (a single number) need not be computed. Under `torch.compile` and vmap that
    is not known, and the term is computed."""
    if torch.compiler.is_compiling():
        return False
    try:
        return not coefficient
    except RuntimeError:
        return False
