"""The contextual bandit that replays a profile, as a native batched TorchRL environment: every episode is one decision.

A group of actions for one context is an axis of the action, so one forward pass of a policy serves all its draws. In
training, observations hold row numbers only: features are looked up where they are encoded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Categorical, Composite, MultiCategorical, Unbounded

from knobwise.common.errors import InputError
from knobwise.envs.configurations.contexts import ContextSampler, limit_key
from knobwise.envs.configurations.replay import Replay
from knobwise.envs.configurations.settings import BudgetConfig, RewardConfig
from knobwise.envs.single_step import SingleStepEnv
from knobwise.envs.tables.profile_table import ProfileTable


class ConfigBandit(SingleStepEnv):
    """P contexts at once, and for each one decision or a group of G.

    Observation: `row` int64 [P] (row of the table), `budget_ms` float32 [P], or under a mean budget `worth_ms`; with
    `lean=True`, as in the training loop, nothing else. Otherwise also the feature blocks [P, d], `mask` bool [P, C]
    (the configurations profiled for the sample), and `accuracy` and `latency_ms` float32 [P, G] of the actions, 0
    before the step. With `full_information=True` also `reward_per_configuration` float32 [P, C], NaN if not profiled.

    Action: `action` int64 [P, G, K], for each knob the index of its value; under `action="configuration"` [P, G], the
    index of a configuration. Reward: float32 [P, G]. With `group_size=None` actions and outcomes have no axis G, and
    the reward is [P, 1]. Where a context has one decision, actions may have that axis or lack it.

    A step decides for the contexts in the tensordict; where rows or limits are missing, for those of the last reset,
    or before any reset for new ones. Inside TorchRL's wrappers (`TransformedEnv`, `SerialEnv`, …) the rows of the last
    reset always keep its limits, because a transform may have changed those in the tensordict.

    Args:
        batch_size, group_size: P, G.
        budget, reward, unprofiled, action: see `Replay`. A random policy lives under `nearest`, the default;
            with `action="configuration"` TorchRL's `ActionMask(mask_key="mask")` keeps it to profiled configurations.
        rows: int64 [n], the samples to draw from (the training split); None for all. From M such lists contexts are
            drawn in turn, context i from list i mod M.
        seed: of the contexts; None for a fresh one from torch's generator, see `fresh_seed`.
        weights: float [N], how often each row is drawn relative to the others; None for evenly.

    Raises:
        InputError: by `step`, if an action is outside its range or of another shape, or under `unprofiled="error"`
            was never profiled for its sample; also if the tensordict has other rows than the last reset, and a
            transform changes or removes the limits.

    Examples:
        >>> from knobwise.envs import ConfigBandit, builtin_profile
        >>> env = ConfigBandit(builtin_profile(), batch_size=4, group_size=2, seed=0)
        >>> env.rollout(1)["next", "reward"].shape
        torch.Size([4, 1, 2])
    """

    def __init__(
        self,
        table: ProfileTable,
        *,
        batch_size: int = 1,
        group_size: int | None = None,
        budget: BudgetConfig | None = None,
        reward: RewardConfig | str | None = None,
        rows: Tensor | Sequence[Tensor] | None = None,
        seed: int | None = None,
        unprofiled: str = "nearest",
        action: str = "knobs",
        lean: bool = False,
        full_information: bool = False,
        weights: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(device=device, batch_size=[batch_size])
        self.table, self.lean, self.full_information = table, lean, full_information
        self.limit_key = limit_key(budget)
        self.replay = Replay(table, budget, reward, unprofiled, action, device)
        self.rewards = self.replay.rewards
        self.contexts = ContextSampler(table, budget or BudgetConfig(), rows, seed, weights)
        self.last: dict[str, Tensor] = {}  # the observation of the contexts to decide for, before the step
        self.limits_change = False  # whether a transform was seen to change or remove limits
        p, c, sizes = batch_size, table.num_configurations, table.knob_sizes
        self.group = (p,) if group_size is None else (p, group_size)
        knobs = (len(sizes),) if action == "knobs" else ()
        self.grouped = torch.Size((p, group_size or 1, *knobs))
        self._set_outcome_specs(*self.grouped[:2])
        if action == "knobs":
            self.action_spec = MultiCategorical(
                torch.tensor(sizes),
                shape=(*self.group, *knobs),
                dtype=torch.int64,
                remove_singleton=False,
                device=device,
            )
        else:
            self.action_spec = Categorical(c, shape=self.group, dtype=torch.int64, device=device)
        observation: dict[str, Unbounded | Binary | Categorical] = {
            "row": Categorical(table.num_samples, shape=(p,), dtype=torch.int64, device=device),
            self.limit_key: Unbounded(shape=(p,), device=device),
        }
        if full_information:
            observation["reward_per_configuration"] = Unbounded(shape=(p, c), device=device)
        if not lean:
            for name, block in table.features.items():
                observation[name] = Unbounded(shape=(p, block.shape[1]), device=device)
            observation["mask"] = Binary(shape=(p, c), dtype=torch.bool, device=device)
            observation["accuracy"] = Unbounded(shape=self.group, device=device)
            observation["latency_ms"] = Unbounded(shape=self.group, device=device)
        self.observation_spec = Composite(observation, shape=(p,), device=device)

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._take_contexts(tensordict)
        return super().step(tensordict)

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        self._take_contexts(tensordict)
        return tensordict.set("next", self._decide(tensordict)), self._reset()

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Draw uniformly among the configurations profiled for each sample."""
        out = TensorDict(batch_size=self.batch_size, device=self.device) if tensordict is None else tensordict
        rows = out["row"].long() if "row" in out else self._last()["row"]
        # configuration n + 1 of those profiled for the sample, n drawn evenly: much faster than torch.multinomial
        counts = self.table.mask[rows.cpu()].cumsum(1, dtype=torch.int32)
        drawn = torch.searchsorted(counts, (torch.rand(self.grouped[:2]) * counts[:, -1:]).int() + 1)
        action = self.table.configurations[drawn] if self.replay.action == "knobs" else drawn
        return out.set("action", action.view(self.action_spec.shape).to(rows.device))

    def get_extra_state(self) -> Tensor:
        """What `state_dict` carries: the state of the generator that contexts are drawn from."""
        return self.contexts.generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        self.contexts.generator.set_state(state)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        # contexts are drawn where the table is, so that a seed gives the same ones on every device
        rows, limits = (drawn.to(self.device) for drawn in self.contexts(self.batch_size.numel()))
        wanted = None if tensordict is None else tensordict.get("_reset", None)
        if wanted is not None and self.last:  # the others go on
            rows = rows.where(wanted.view(-1), self.last["row"])
            limits = limits.where(wanted.view(-1), self.last[self.limit_key])
        self.last = self._observed(rows, limits)
        return self._emitted(self._context(self.last))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._take_contexts(tensordict, wrapped=True)
        return self._decide(tensordict)

    def _decide(self, tensordict: TensorDictBase) -> TensorDictBase:
        rows, limits = self.last["row"], self.last[self.limit_key]
        replayed = self.replay(rows, self._grouped(tensordict["action"]), limits)
        changed = {}
        if not self.lean:
            accuracy, latency_ms = self.replay.outcome(rows, replayed)
            changed = {"accuracy": accuracy.view(self.group), "latency_ms": latency_ms.view(self.group)}
        return self._emitted(self._outcome(self.last, replayed.reward, changed))

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.contexts.generator.manual_seed(seed)

    def _observed(self, rows: Tensor, limits: Tensor) -> dict[str, Tensor]:
        """The observation of these contexts before the step."""
        out = {"row": rows, self.limit_key: limits}
        if self.full_information:
            out["reward_per_configuration"] = self.rewards.all(rows, limits)
        if not self.lean:
            blocks, at = {**self.table.features, "mask": self.table.mask}, rows.cpu()
            out |= {name: block[at].to(self.device) for name, block in blocks.items()}
            out |= {name: self.observation_spec[name].zero() for name in ("accuracy", "latency_ms")}
            if self.replay.action == "configuration":  # where TorchRL's ActionMask looks whether its mask is ours
                self.action_spec.update_mask(out["mask"].view(-1, *[1] * (len(self.group) - 1), out["mask"].shape[1]))
        return out

    def _emitted(self, tensordict: TensorDictBase) -> TensorDictBase:
        """A copy, because whoever gets it may change it in place; not in training, where nobody does."""
        return tensordict if self.lean else tensordict.clone()

    def _last(self) -> dict[str, Tensor]:
        if not self.last:
            self._reset()
        return self.last

    def _take_contexts(self, tensordict: TensorDictBase, wrapped: bool = False) -> None:
        """Note which contexts to decide for. `wrapped`: a transform may have changed the tensordict."""
        rows, limits = tensordict.get("row", None), tensordict.get(self.limit_key, None)
        last = self.last if rows is not None and limits is not None else self._last()
        rows = last["row"] if rows is None else rows.long()
        same_rows = _same(rows, last.get("row"))
        same_limits = limits is not None and _same(limits := limits.float(), last.get(self.limit_key))
        if wrapped and same_rows:
            self.limits_change = not same_limits
        elif wrapped and (self.limits_change or limits is None):
            raise InputError(
                "row: the tensordict has other rows than the last reset, and their limits are unknown, because a "
                f"transform changes or removes {self.limit_key}; reset before each step, and let no two loops share an "
                "environment"
            )
        elif not (same_rows and same_limits):
            self.last = self._observed(rows, last[self.limit_key] if limits is None else limits)

    def _grouped(self, action: Tensor) -> Tensor:
        """Actions with the group axis, int64 [P, G, K] or [P, G]."""
        shapes = [self.grouped, self.grouped[:1] + self.grouped[2:]] if self.grouped[1] == 1 else [self.grouped]
        if action.shape not in shapes or action.is_floating_point():
            raise InputError(f"action: is {action.dtype} {[*action.shape]}, must be int64 {[*self.action_spec.shape]}")
        return action.long().view(self.grouped)


def _same(first: Tensor, second: Tensor | None) -> bool:
    return first is second or (second is not None and torch.equal(first, second))
