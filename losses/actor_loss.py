"""Base class of the losses: it holds the actor network and the TensorDict keys."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictSequential,
    TensorDictParams,
    set_composite_lp_aggregate,
)
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.objectives import LossModule

from knobwise.common.errors import InputError
from knobwise.losses.guards import Keys, Read, listed, named, refuse


class ActorLoss(LossModule):
    """Hold the actor that a loss trains.

    The actor may draw the parts of an action under keys of their own, by a `CompositeDistribution`.
    As in TorchRL's losses the keys of draws and of log-probs are then lists, read from the actor or
    set by `set_keys(action=[…], sample_log_prob=[…])`; the key of the summed log-prob may stand for
    its list.

    Args:
        actor_network: a module with `get_dist(tensordict)`.
        reduction: `mean`, `sum` or `none` over contexts; None for `mean`.
        functional: keep the parameters apart from the module, as TorchRL does (needed under vmap);
            off is faster.

    Attributes:
        diagnostics: if True, the default, `forward` also gives diagnostics; it is faster without.
    """

    actor_network: ProbabilisticTensorDictSequential
    actor_network_params: TensorDictParams | None
    target_actor_network_params: TensorDictParams | None

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        *,
        reduction: str | None = None,
        functional: bool = True,
    ) -> None:
        super().__init__()
        # TorchRL looks there for target networks that nobody updates; we have none
        self._forward_pre_hooks.clear()
        self.reduction = reduction or "mean"
        self.diagnostics = True
        if functional:
            self._unsaved = _unsaved(actor_network)
            self.convert_to_functional(actor_network, "actor_network")
            self.register_state_dict_post_hook(_leave_out)
            self.register_load_state_dict_pre_hook(_fill_in)
        else:
            self.actor_network = actor_network
            self.actor_network_params = None
        # an actor that draws the parts of an action says under which keys
        drawn = getattr(actor_network, "dist_sample_keys", ["action"])
        if drawn != ["action"]:
            self.tensor_keys.action = drawn
            self.tensor_keys.sample_log_prob = actor_network.log_prob_keys

    def _forward_value_estimator_keys(self, **kwargs: object) -> None:
        # each key once, the actor's first
        in_keys = dict.fromkeys(self.actor_network.in_keys)
        for keys in self._loss_keys():
            in_keys |= dict.fromkeys(listed(keys))
        self.in_keys = list(in_keys)

    def _register(self, **coefficients: float | tuple[float, float]) -> None:
        """Make buffers of coefficients, on the device of the actor, as TorchRL's losses do."""
        device = next((values.device for values in self.parameters()), None)
        for name, value in coefficients.items():
            self.register_buffer(
                name, torch.tensor(value, dtype=torch.get_default_dtype(), device=device)
            )

    @abstractmethod
    def _loss_keys(self) -> list[Keys]:
        """Return the keys that the loss reads, without those that only the actor reads."""

    def _distribution(self, tensordict: TensorDictBase) -> Any:
        if self.actor_network_params is None:
            return self.actor_network.get_dist(tensordict)
        # the module borrows the parameters that the optimiser changes
        with self.actor_network_params.to_module(self.actor_network):
            return self.actor_network.get_dist(tensordict)

    def _log_prob(self, dist: Distribution, tensordict: TensorDictBase) -> Tensor:
        """Return ln π of the draws in the tensordict."""
        keys = listed(self.tensor_keys.action)
        for key in keys:
            self._required(tensordict, key, "the draws")
        if not isinstance(dist, CompositeDistribution):
            return dist.log_prob(tensordict.get(keys[0]))
        # one log-prob for the whole action, [P, G], not one for each part
        with set_composite_lp_aggregate(True):
            return dist.log_prob(tensordict.select(*keys).auto_batch_size_())

    @staticmethod
    def _entropy(dist: Distribution, axes: int) -> Tensor:
        """Return the entropy of an action in each context, [P], of as many axes."""
        if isinstance(dist, CompositeDistribution):
            with set_composite_lp_aggregate(False):
                entropy = sum(dist.entropy().values(True, True))
        else:
            entropy = dist.entropy()
        # perhaps one for each draw
        return entropy.flatten(axes).mean(-1) if entropy.ndim > axes else entropy

    @staticmethod
    def _summed(tensordict: TensorDictBase, keys: Keys) -> Tensor | None:
        """Sum what is under these keys; None if any is missing."""
        parts = [tensordict.get(key, None) for key in listed(keys)]
        if any(part is None for part in parts):
            return None
        return sum(parts[1:], parts[0])

    def _required(self, tensordict: TensorDictBase, keys: Keys, meaning: str) -> Tensor:
        """Return what is under a key, or the sum of what is under several.

        Raises:
            InputError: it is missing; `meaning` says what it is.
        """
        values = self._summed(tensordict, keys)
        if values is None:
            missing = [key for key in listed(keys) if tensordict.get(key, None) is None]
            raise InputError(
                f"{type(self).__name__}: the tensordict has no {named(missing)}, {meaning}; "
                "collect it with the draws, or name its key by set_keys"
            )
        return values

    def _refuse(self, tensordict: TensorDictBase, read: list[Read], losses: list[Tensor]) -> None:
        """Refuse what is not finite, see `losses.guards.refuse`."""
        present = tensordict.get(("collector", "mask"), None)  # which contexts are no padding
        refuse(type(self).__name__, read, losses, present)


def _unsaved(network: nn.Module) -> list[str]:
    """Return the names of the buffers that a network does not save, such as the features of a
    table. TorchRL saves every buffer of a functional network."""
    return [
        f"{path}.{name}" if path else name
        for path, module in network.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    ]


def _leave_out(loss: ActorLoss, state: dict[str, Any], prefix: str, *others: Any) -> None:
    for name in loss._unsaved:
        state.pop(f"{prefix}actor_network_params.{name}", None)


def _fill_in(loss: ActorLoss, state: dict[str, Any], prefix: str, *others: Any) -> None:
    # what is not saved stays as it is, also where a state of an earlier version holds it
    assert loss.actor_network_params is not None
    kept = loss.actor_network_params.data.flatten_keys(".")
    for name in loss._unsaved:
        key = f"{prefix}actor_network_params.{name}"
        state.pop(key, None)
        if name in kept.keys():  # noqa: SIM118  (a TensorDict)
            state[key] = kept.get(name)


def configuration_log_probs(dist: Distribution) -> Tensor:
    """Return ln π of all configurations.

    Raises:
        InputError: the distribution is not over known configurations.
    """
    if not hasattr(dist, "log_probs"):
        raise InputError(
            f"{type(dist).__name__}: its configurations are not known; use make_actor(…, "
            "separate=True), or objective=sampled and recorded=True, which need draws alone"
        )
    log_probs: Tensor = dist.log_probs
    return log_probs
