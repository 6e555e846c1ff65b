"""The TorchRL side that both bandits share: every episode is one decision."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Unbounded
from torchrl.envs import EnvBase

from knobwise.common.errors import InputError


def batch_shape(batch_size: int | Sequence[int]) -> torch.Size:
    """Return a `batch_size` as TorchRL has it; a number is one axis.

    Raises:
        InputError: it is no shape, or holds no context.
    """
    sizes = batch_size if isinstance(batch_size, Sequence) else [batch_size]
    try:
        shape = torch.Size(sizes)
    except TypeError:
        shape = torch.Size([0])
    if min(shape, default=1) < 1:
        raise InputError(
            f"batch_size={batch_size!r}: must be a number of contexts from 1 on, or a shape of "
            "such numbers; [] is a single context"
        )
    return shape


def one_axis(values: Tensor) -> Tensor:
    """Return contexts [*batch] along one axis, [P]."""
    return values if values.ndim == 1 else values.reshape(-1)


class SingleStepEnv(EnvBase):
    """P contexts at once, a group of G actions for each and a reward per action; every episode ends
    after one step.

    A `batch_size` of any number of axes is as in TorchRL: `[]` is a single context without an axis,
    `[8]` is P = 8, `[2, 4]` too. Bandits compute with the one axis P.
    """

    def _set_outcome_specs(self, group: int) -> None:
        shape = self.batch_size
        self.reward_spec = Unbounded(shape=(*shape, group), device=self.device)
        self.done_spec = Binary(shape=(*shape, 1), dtype=torch.bool, device=self.device)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._about()}, batch "
            f"{self.batch_size.numel()}, group {self.group_size})"
        )

    @abstractmethod
    def _about(self) -> str:
        """Describe the table, the budgets and the reward."""

    @property
    def group_size(self) -> int:
        return self.reward_spec.shape[-1]

    def _with_end(self, content: dict[str, Tensor], ended: bool) -> TensorDict:
        """Return what `_reset` or `_step` is to return, from tensors [P, …].

        Every episode ends with its step.
        """
        shape = (*self.batch_size, 1)
        if len(self.batch_size) != 1:
            content = {
                name: values.reshape((*self.batch_size, *values.shape[1:]))
                for name, values in content.items()
            }
        done = torch.full(shape, ended, dtype=torch.bool, device=self.device)
        content = {**content, "done": done, "terminated": done}
        return TensorDict(content, batch_size=self.batch_size, device=self.device)

    def _take_contexts(self, tensordict: TensorDictBase, wrapped: bool = False) -> None:
        """Take over the contexts that a step is to decide for; nothing unless a bandit keeps some.

        Args:
            tensordict: what the step gets.
            wrapped: whether the step may come from a wrapper, and not from the user.
        """

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Look up the outcome and reward of the actions in the tensordict."""
        self._take_contexts(tensordict)
        # TorchRL steps some of the contexts alone
        if "_step" in tensordict:
            return super().step(tensordict)
        self._assert_tensordict_shape(tensordict)
        outcome = self._decide(tensordict)
        before = tensordict.get("next", None)
        if before is not None:
            # as in TorchRL, what an outcome lacks stays
            outcome.update(before.exclude(*outcome.keys()))
        return tensordict.set("next", outcome)

    def step_and_maybe_reset(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Step, then draw the next contexts. Every episode ends with its step, so `done` need not
        be checked."""
        self._take_contexts(tensordict)
        return tensordict.set("next", self._decide(tensordict)), self._reset()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._take_contexts(tensordict, wrapped=True)
        return self._decide(tensordict)

    @abstractmethod
    def _decide(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return what follows from the actions, for the contexts that were taken over."""

    def rollout(
        self, *args: Any, break_when_any_done: bool | None = None, **options: Any
    ) -> TensorDictBase:
        """Play as many steps as are asked for; TorchRL's default, to stop when an episode ends,
        would play one."""
        return super().rollout(*args, break_when_any_done=bool(break_when_any_done), **options)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As in `nn.Module`; an empty state, which a collector saves of an environment without
        transforms, fits too, but then other contexts are drawn, of which it warns."""
        if strict and not state_dict:  # an EnvCreator, which is not strict, begins so
            warnings.warn(
                f"{type(self).__name__}: TorchRL saved nothing of an environment without "
                "transforms, so other contexts are drawn than where it was saved; use "
                "TransformedEnv(env, ContextState()) there and here",
                stacklevel=2,
            )
        return super().load_state_dict(state_dict, strict and bool(state_dict), assign)
