"""The base of the native environment: it keeps the contexts that a step decides for."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Composite, MultiCategorical, TensorSpec

from knobwise.common.errors import InputError
from knobwise.envs.configurations.contexts import ContextSampler
from knobwise.envs.configurations.replay import Replay
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.single_step import SingleStepEnv
from knobwise.envs.tables.profile_table import ProfileTable


class ContextEnv(SingleStepEnv):
    """Draw contexts, and keep those of the last reset.

    A step decides for the contexts in the tensordict; where rows or limits are missing, for the
    kept ones. TorchRL's wrappers call `_step`, and a transform may then have changed the limits in
    the tensordict. So kept rows keep their limits there.
    """

    table: ProfileTable
    rewards: RewardTable

    def __init__(self, contexts: ContextSampler, limit_key: str, **options: Any) -> None:
        super().__init__(**options)
        self.contexts = contexts
        self.limit_key = limit_key
        self.current: dict[str, Tensor] = {}  # the contexts to decide for
        self.limits_change = False  # True once a transform changed or removed the limits

    def _about(self) -> str:
        budget = self.contexts.budgets.config
        if budget.sense == "deadline":
            limits = budget.strategy
        else:
            limits = budget.sense
        size = f"{self.table.num_samples} samples × {self.table.num_configurations} configurations"
        return f"{self.table.name!r}: {size}, budget {limits}, reward {self.rewards.config.kind}"

    @abstractmethod
    def _contexts(self, rows: Tensor, limits: Tensor) -> dict[str, Tensor]:
        """Return what every observation of these contexts holds, in tensors that may be shared."""

    @abstractmethod
    def _described(self) -> dict[str, Tensor]:
        """Return what else is observed of the current contexts before a step."""

    @abstractmethod
    def _decide(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Decide for the current contexts and return what `_step` returns."""

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._take_contexts(tensordict)
        return super().step(tensordict)

    def step_and_maybe_reset(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        self._take_contexts(tensordict)
        return tensordict.set("next", self._decide(tensordict)), self._reset()

    # what `state_dict` carries: the state of the generator that contexts are drawn from
    def get_extra_state(self) -> Tensor:
        return self.contexts.generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        self.contexts.generator.set_state(state)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        # contexts are drawn where the table is, so that a seed gives the same ones on every device
        rows, limits = (drawn.to(self.device) for drawn in self.contexts(self.batch_size.numel()))
        wanted = None if tensordict is None else tensordict.get("_reset", None)
        if wanted is not None and self.current:
            # the other contexts go on
            wanted = wanted.reshape(-1)
            rows = rows.where(wanted, self.current["row"])
            limits = limits.where(wanted, self.current[self.limit_key])
        self.current = self._contexts(rows, limits)
        return self._context(self.current | self._described())

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._take_contexts(tensordict, wrapped=True)
        return self._decide(tensordict)

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.contexts.generator.manual_seed(seed)

    def _some_contexts(self) -> dict[str, Tensor]:
        """Return the current contexts; before any reset draw them."""
        if not self.current:
            self._reset()
        return self.current

    def _take_contexts(self, tensordict: TensorDictBase, wrapped: bool = False) -> None:
        """Set the current contexts to those that a step is to decide for.

        If `wrapped`, a transform may have changed the limits in the tensordict. The rows of the
        last reset then keep theirs.
        """
        rows = tensordict.get("row", None)
        limits = tensordict.get(self.limit_key, None)
        if rows is None or limits is None:
            current = self._some_contexts()
        else:
            current = self.current
        rows = current["row"] if rows is None else rows.long()
        limits = None if limits is None else limits.float()
        same_rows = _same(rows, current.get("row"))
        same = same_rows and limits is not None and _same(limits, current.get(self.limit_key))
        if wrapped and same_rows:
            # other limits under the same rows can only come from a transform
            self.limits_change = not same
        elif wrapped and (self.limits_change or limits is None):
            raise InputError(
                "row: the tensordict has other rows than the last reset, and their limits are "
                "unknown, because a "
                f"transform changes or removes {self.limit_key}; reset before each step, and let "
                "no two loops share an "
                "environment"
            )
        elif not same:
            if limits is None:
                limits = current[self.limit_key]
            self.current = self._contexts(rows, limits)


def action_spec(
    replay: Replay, shape: tuple[int, ...], device: torch.device | str | None
) -> TensorSpec:
    """Return the spec of the actions for decisions of this shape, [P] or [P, G]."""
    table = replay.table
    options: dict[str, Any] = {"dtype": torch.int64, "device": device}
    if replay.knob_keys:
        knobs = zip(replay.knob_keys, table.knob_sizes, strict=True)
        specs = {name: Categorical(size, shape=shape, **options) for name, size in knobs}
        return Composite(specs, shape=shape[:1], device=device)
    if replay.action == "knobs":
        sizes = torch.tensor(table.knob_sizes)
        return MultiCategorical(
            sizes, shape=(*shape, len(sizes)), remove_singleton=False, **options
        )
    return Categorical(table.num_configurations, shape=shape, **options)


def _same(first: Tensor, second: Tensor | None) -> bool:
    return first is second or (second is not None and torch.equal(first, second))
