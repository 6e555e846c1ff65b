"""What the loss modules share: one actor, what it may draw from, and the keys they read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from tensordict.nn import CompositeDistribution, ProbabilisticTensorDictSequential, TensorDictParams
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor
from torchrl.objectives import LossModule

from knobwise.losses.functional import entropy

Keys: TypeAlias = NestedKey | list[NestedKey]
"""A key, or a list of one for each knob."""


class ActorLoss(LossModule):
    """A loss of one actor.

    The actor may draw each knob under its own key, by a `CompositeDistribution` of categoricals. As in TorchRL's own
    losses the keys of draws and log-probs are then lists, read from the actor or set by `set_keys(action=[…],
    sample_log_prob=[…])`; one key of the summed log-prob may stand for its list.

    Args:
        actor_network: a module with `get_dist(tensordict)`.
        configurations: int64 [C, K], columns in the order of the action keys; for a loss over all configurations of a
            `CompositeDistribution`.
        reduction: `mean`, `sum` or `none` over contexts; None for `mean`.
        functional: keep the parameters apart from the module, as TorchRL does (needed under vmap); off is faster.

    Attributes:
        diagnostics: whether `forward` also gives diagnostics; without them it is faster.
    """

    functional = True
    configurations: Tensor | None
    actor_network: ProbabilisticTensorDictSequential
    actor_network_params: TensorDictParams
    target_actor_network_params: TensorDictParams

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        *,
        configurations: Tensor | None = None,
        reduction: str | None = None,
        functional: bool = True,
    ) -> None:
        super().__init__()
        self._forward_pre_hooks.clear()  # TorchRL looks there for target networks that nobody updates; we have none
        self.functional, self.reduction, self.diagnostics = functional, reduction or "mean", True
        if functional:
            self.convert_to_functional(actor_network, "actor_network")
        else:
            self.actor_network = actor_network
            self.actor_network_params = None
        self.register_buffer("configurations", configurations, persistent=False)
        drawn = getattr(actor_network, "dist_sample_keys", ["action"])
        if drawn != ["action"]:
            for name, keys in {"action": drawn, "sample_log_prob": actor_network.log_prob_keys}.items():
                if hasattr(self.tensor_keys, name):
                    setattr(self.tensor_keys, name, keys if len(keys) > 1 else keys[0])

    def _forward_value_estimator_keys(self, **kwargs: object) -> None:
        keys = [each for keys in self._loss_keys() for each in _listed(keys)]
        self.in_keys = list(dict.fromkeys([*self.actor_network.in_keys, *keys]))

    def reset_parameters_recursive(self) -> None:
        """Draw the actor's parameters anew."""
        if self.functional:
            super().reset_parameters_recursive()
        else:  # TorchRL looks only at modules that stand apart from their parameters
            self.actor_network.reset_parameters_recursive()

    @abstractmethod
    def _loss_keys(self) -> list[Keys]:
        """The keys that the loss reads beside those of the actor."""

    def _distribution(self, tensordict: TensorDictBase, contexts: int) -> Any:
        """The policy in contexts [P], whose number of axes is `contexts`."""
        with self.actor_network_params.to_module(self.actor_network) if self.functional else nullcontext():
            dist = self.actor_network.get_dist(tensordict)
        if not isinstance(dist, CompositeDistribution):
            return dist
        names = [unravel_key(key) for key in _listed(self.tensor_keys.action)]
        if set(names) != set(dist):
            drawn, read = (", ".join(map(str, keys)) for keys in (dist, names))
            raise ValueError(f"the actor draws {drawn}, but the loss reads {read}; call loss.set_keys(action=[…])")
        return KnobProduct([dist[name] for name in names], contexts, self.configurations)

    @staticmethod
    def _action(tensordict: TensorDictBase, keys: Keys) -> Any:
        return [tensordict.get(key) for key in keys] if isinstance(keys, list) else tensordict.get(keys)

    @staticmethod
    def _log_prob(tensordict: TensorDictBase, keys: Keys) -> Any:
        """Of whole actions, the sum over the keys; None if any is missing."""
        each = [tensordict.get(key, None) for key in _listed(keys)]
        return None if any(part is None for part in each) else sum(each[1:], each[0])


class KnobProduct:
    """Independent categoricals, one for each of K knobs, as a distribution over configurations: ln p = Σ_k ln p_k.

    Args:
        parts: K `Categorical`s with the batch [P], or [P, G] where the G draws of a context have equal ones.
        contexts: the number of axes of P.
        configurations: int64 [C, K], which value of each knob; may be None if only draws are asked about.
    """

    def __init__(self, parts: Sequence[Any], contexts: int, configurations: Tensor | None = None) -> None:
        each = [part.logits.log_softmax(-1) for part in parts]
        self._each = [x if x.ndim == contexts + 1 else x[..., 0, :] for x in each]
        self._configurations = configurations

    def log_prob(self, action: Tensor | list[Tensor]) -> Any:
        """Of draws, int64 [P, G] of each knob → [P, G]; or [P], groups of one → [P, 1]."""
        parts = zip(self._each, _listed(action), strict=True)
        return sum(x.gather(-1, value.view(*x.shape[:-1], -1)) for x, value in parts)

    @property
    def log_probs(self) -> Any:
        """Of all configurations, [P, C]. Raises ValueError if it is not known which these are."""
        if self._configurations is None:
            raise ValueError("a CompositeDistribution needs configurations=table.configurations, int64 [C, K]")
        return sum(x[..., value] for x, value in zip(self._each, self._configurations.unbind(1), strict=True))

    def entropy(self) -> Any:
        """[P], in nats."""
        return sum(map(entropy, self._each))


def _listed(each: Any) -> list[Any]:
    return each if isinstance(each, list) else [each]


def is_zero(coefficient: Tensor) -> bool:
    """Whether a term with this coefficient (a single number) need not be computed. Under `torch.compile` and vmap that
    is not known, and the term is computed."""
    if torch.compiler.is_compiling():
        return False
    try:
        return not coefficient
    except RuntimeError:
        return False
