"""A loss of the user's own, `loss=module:Class`: what its class must be, and what is refused.

The class makes a torch module, such as a `LossModule` of TorchRL, and that is all:

- `Class(actor, **settings)` gets the policy, whose `get_dist(contexts)` gives a distribution with
  `log_prob_of_index(configuration)`, `log_probs` [*, C] of all configurations, −inf where masked,
  and `entropy()` [*]. Of the settings it gets those that its signature names: from `loss.*` the
  arguments of `GRPOLoss` (`advantage`, `advantage_clip`, `advantage_std_floor`,
  `advantage_std_eps`, `clip_epsilon`, `entropy_coeff`, `kl_to_ref_coeff`), and every entry of
  `loss.settings`, its own. A default in the signature counts for the latter alone, since a run has
  a value for each of `loss.*`.
- `module(contexts)` returns a TensorDict, or a dict. The sum of its `loss_…`, a single number each,
  is minimised. All single numbers are logged, those with the names of `GRPOLoss`'s under the same
  names, others under their own, such as `Train/loss_mine`. Under `loss.dropout` `kl_to_ref`, which
  `loss.kl_band` follows, is that of the policy without dropout.

Contexts have one or more leading axes, [*]. They hold what the actor reads; `configuration` int64
[*, G], the draws; `("next", "reward")` [*, G]; and the log-probs of the draws under the policy that
drew them, `action_log_prob` [*, G], and under the reference policy, `reference_log_prob` [*, G].
With a class attribute `exact = True` they hold all configurations instead of draws:
`reward_per_configuration`, `behaviour_log_probs` and `reference_log_probs`, [*, C].

Parameters of the module beside those of the policy, such as a learned baseline, are trained along.
These and its buffers (`register_buffer`) are saved, so that a stopped training goes on as if it had
not been; other attributes are not. The loss is first tried on some contexts, by another module.

Before each step the module's attribute `reward_spread` is the unit of rewards (see `GRPOLoss`), and
`diagnostics` says whether diagnostics are read.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from knobwise.common.errors import InputError
from knobwise.common.imports import import_callable, in_a_line
from knobwise.losses.settings import LossConfig

SEE = "see knobwise.losses.own"


class OwnLoss:
    """A loss of the user's own, by the name of its class.

    Args:
        config: its name, `objective`, and its settings.

    Attributes:
        name: that of the class, for logs.
        exact: whether it reads all configurations instead of draws.

    Raises:
        InputError: there is no such class, or it takes no such setting.
    """

    def __init__(self, config: LossConfig) -> None:
        self.key = f"loss={config.objective}"
        example = "examples.losses:CISPOLoss"
        self._class = import_callable(self.key, config.objective, "class", example)
        self.name = getattr(self._class, "__name__", config.objective)
        self.exact = bool(getattr(self._class, "exact", False))
        self._settings: dict[str, Any] = dict(config.settings or {})
        try:
            parameters = [*inspect.signature(self._class).parameters.values()]
        except (TypeError, ValueError) as error:
            raise InputError(f"{self.key}: {in_a_line(error)}; {SEE}") from error
        named = {
            each.name
            for each in parameters[1:]
            if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)
        }
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        self._taken = None if takes_all else named
        if self._taken is None:
            return
        known = ", ".join(sorted(self._taken)) or "none"
        for name in self._settings:
            if name not in self._taken:
                raise InputError(
                    f"loss.settings: {name}: {config.objective} has no such argument; it takes "
                    f"{known}"
                )
        usual = LossConfig()
        for name, value in config.of_grpo().items():
            if name not in self._taken and value != getattr(usual, name):
                raise InputError(
                    f"loss.{name}={value}: {config.objective} does not take it; leave it out, or "
                    f"add the argument {name}"
                )

    def make(self, actor: Any, settings: Mapping[str, Any]) -> nn.Module:
        """Return the module of an actor, with those of the settings that it takes.

        Raises:
            InputError: the class raises, or makes something else than a module.
        """
        arguments = {
            name: value
            for name, value in settings.items()
            if self._taken is None or name in self._taken
        }
        try:
            module = self._class(actor, **arguments | self._settings)
        except Exception as error:
            raise InputError(
                f"{self.key}: making one raises {in_a_line(error, self._class)}; {SEE}"
            ) from error
        if not isinstance(module, nn.Module):
            raise InputError(
                f"{self.key}: makes a {type(module).__name__}; must be a torch module, such as a "
                f"LossModule of TorchRL; {SEE}"
            )
        return module

    def __call__(self, module: nn.Module, contexts: TensorDictBase) -> TensorDictBase:
        """Return the losses of contexts, and without a gradient the diagnostics.

        Raises:
            InputError: the module raises, returns no TensorDict, no `loss_…`, or one that is no
                single finite number, or none that depends on the policy.
        """
        try:
            out = module(contexts)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"{self.key}: raises {in_a_line(error, self._class)}") from error
        if not isinstance(out, (Mapping, TensorDictBase)):
            raise InputError(
                f"{self.key}: returns a {type(out).__name__}; must return a TensorDict with "
                f"loss_…; {SEE}"
            )
        returned: dict[str, Tensor] = {}
        losses = []
        for name, value in out.items():
            is_loss = str(name).startswith("loss_")
            if is_loss and not (isinstance(value, Tensor) and value.numel() == 1):
                shape = [*value.shape] if isinstance(value, Tensor) else type(value).__name__
                raise InputError(
                    f"{self.key}: returns {name} as {shape}; must be a single number, such as the "
                    "mean over the contexts"
                )
            if not isinstance(value, Tensor) or value.numel() != 1:
                continue
            value = value.reshape(())
            if is_loss:
                losses.append(value)
            returned[str(name)] = value if is_loss else value.detach()
        if not losses:
            keys = ", ".join(map(str, out.keys())) or "nothing"
            raise InputError(f"{self.key}: returns {keys}, but no loss_…, which is minimised")
        if not any(loss.requires_grad for loss in losses):
            raise InputError(
                f"{self.key}: no loss_… has a gradient; compute it from actor.get_dist(contexts)"
            )
        wrong = [
            f"{name} is {float(value.detach()):g}"
            for name, value in returned.items()
            if name.startswith("loss_") and not torch.isfinite(value)
        ]
        if wrong:
            raise InputError(f"{self.key}: {wrong[0]}; must be finite")
        return TensorDict(returned)

    def check(self, module: nn.Module, contexts: TensorDictBase, learning: nn.Module) -> None:
        """Try the loss on contexts, before anything is trained.

        Args:
            learning: what it is to train.

        Raises:
            InputError: see `__call__`; or the loss moves no weight, or moves one to what is not
                finite.
        """
        out = self(module, contexts)
        total: Any = sum(value for value in out.values() if value.requires_grad)
        parameters = [each for each in learning.parameters() if each.requires_grad]
        gradients = [
            each
            for each in torch.autograd.grad(total, parameters, allow_unused=True)
            if each is not None
        ]
        if not gradients:
            raise InputError(
                f"{self.key}: no weight of the policy has a gradient; compute the loss from "
                "actor.get_dist(contexts)"
            )
        if not all(bool(each.isfinite().all()) for each in gradients):
            raise InputError(f"{self.key}: a gradient is not finite, though the loss is")


def own_parameters(module: nn.Module, actor: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a loss that are to learn and are not the policy's, by name."""
    policy = _places(actor)
    return {
        name.replace(".", "_"): values
        for name, values in module.named_parameters()
        if values.requires_grad and _place(values) not in policy
    }


def own_tensors(module: nn.Module, actor: nn.Module) -> dict[str, Tensor]:
    """Return what a loss saves, without gradients, and is not the policy's, by name."""
    policy = _places(actor)
    return {
        name: values.detach()
        for name, values in module.state_dict(keep_vars=True).items()
        if isinstance(values, Tensor) and _place(values) not in policy
    }


def _places(actor: nn.Module) -> set[tuple[int, torch.Size]]:
    return {_place(values) for values in (*actor.parameters(), *actor.buffers())}


def _place(values: Tensor) -> tuple[int, torch.Size]:
    """Return where a tensor lies; a loss may hold the policy's under other names, as TorchRL's
    do."""
    return values.data_ptr(), values.shape
