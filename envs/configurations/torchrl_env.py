"""The contextual bandit that replays a profile, as a native batched TorchRL environment.

Every episode is one decision. A group of actions for one context is an axis of the action, so one
forward pass of a policy serves all its draws. In training, observations hold row numbers only:
features are looked up where they are encoded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Categorical, Composite, TensorSpec, Unbounded

from knobwise.common.errors import InputError
from knobwise.envs.configurations.context_env import ContextEnv, action_spec
from knobwise.envs.configurations.contexts import ContextSampler, limit_key
from knobwise.envs.configurations.replay import Replay
from knobwise.envs.configurations.settings import BudgetConfig, RewardConfig
from knobwise.envs.tables.profile_table import ProfileTable


class ConfigBandit(ContextEnv):
    """Decide for P contexts at once: one decision for each, or a group of G.

    Observation: `row` int64 [P], the row of the table, and `budget_ms` float32 [P]; under a mean
    budget `worth_ms` in its place. With `lean=True`, as in the training loop, that is all.
    Otherwise there are also the feature blocks [P, d], `mask` bool [P, C] (the configurations
    profiled for the sample), and of the actions `accuracy` and `latency_ms`, float32 [P, G], 0
    before the step. With `full_information=True` there is also `reward_per_configuration` float32
    [P, C], means over repeated measurements, NaN if not profiled.

    Action: `action` int64 [P, G, K], for each knob the index of its value. Under
    `action_keys="knobs"` each knob has a key of its own (`max_crops`, …), int64 [P, G], as
    `make_actor(…, separate=True)` draws them. Under `action="configuration"` `action` is [P, G],
    the index of a configuration.

    Reward: float32 [P, G].

    With `group_size=None` actions and outcomes have no axis G, and the reward is [P, 1]. Where a
    context has one decision, actions may have that axis or lack it.

    A step decides for the contexts in the tensordict. Where rows or limits are missing, it decides
    for those of the last reset, or before any reset for new ones. Inside TorchRL's wrappers
    (`TransformedEnv`, `SerialEnv`, …) the rows of the last reset always keep its limits, because a
    transform may have changed those in the tensordict.

    Args:
        batch_size, group_size: P, G.
        budget, reward, unprofiled, action, action_keys, repeats, cost_ms: see `Replay`;
            measurements are drawn from the generator of the contexts. Under `nearest`, the default,
            any policy may play; with `action="configuration"` and without an axis G, TorchRL's
            `ActionMask(mask_key="mask")` makes random ones draw profiled configurations only.
        rows: int64 [n], the samples to draw from (the training split), None for all. From M such
            lists contexts are drawn in turn, context i from list i mod M.
        balance: how often each sample is drawn, see `BalanceConfig`.
        seed: of the contexts; None for a fresh one from torch's generator, see `fresh_seed`.
        lean: leave features, mask and outcomes out of the observations.
        full_information: add the rewards of all configurations to the observations.

    Raises:
        InputError: `action_keys="knobs"` with `action="configuration"`, or with a knob that is
            called like another key. Raised by `step`: an action is outside its range or of another
            shape, or under `unprofiled="error"` was never profiled for its sample; or the
            tensordict has other rows than the last reset, and a transform changes or removes the
            limits.

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
        action_keys: str = "action",
        lean: bool = False,
        full_information: bool = False,
        device: torch.device | str | None = None,
        repeats: str = "draw",
        balance: str = "none",
        cost_ms: float = 0.0,
    ) -> None:
        contexts = ContextSampler(table, budget or BudgetConfig(), rows, seed, balance)
        super().__init__(contexts, limit_key(budget), device=device, batch_size=[batch_size])
        self.table = table
        self.lean = lean
        self.full_information = full_information
        self.replay = Replay(
            table, budget, reward, unprofiled, action, device, repeats, action_keys, cost_ms
        )
        self.rewards = self.replay.rewards
        self.outcomes = ["accuracy", "latency_ms"]
        self.decisions = (batch_size, group_size or 1)
        self.outcome_shape: tuple[int, ...] = self.decisions
        if group_size is None:
            self.outcome_shape = (batch_size,)
        self._set_outcome_specs(*self.decisions)
        self.action_spec = action_spec(self.replay, self.outcome_shape, device)
        specs = self._observation_specs()
        self.observation_spec = Composite(specs, shape=(batch_size,), device=device)
        if taken := {*specs, "reward", "done", "terminated"} & {*self.replay.knob_keys}:
            raise InputError(
                f"action_keys=knobs: knob {min(taken)} is called like another key; use "
                "action_keys=action"
            )

    def _observation_specs(self) -> dict[str, TensorSpec]:
        """Return the spec of each part of an observation."""

        def floats(*shape: int) -> TensorSpec:
            return Unbounded(shape=shape, device=self.device)

        p = self.decisions[0]
        c = self.table.num_configurations
        row = Categorical(self.table.num_samples, shape=(p,), dtype=torch.int64, device=self.device)
        specs = {"row": row, self.limit_key: floats(p)}
        if self.full_information:
            specs["reward_per_configuration"] = floats(p, c)
        if not self.lean:
            for name, block in self.table.features.items():
                specs[name] = floats(p, block.shape[1])
            specs["mask"] = Binary(shape=(p, c), dtype=torch.bool, device=self.device)
            for name in self.outcomes:
                specs[name] = floats(*self.outcome_shape)
        return specs

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Draw uniformly among the configurations profiled for each sample."""
        if tensordict is None:
            out = TensorDict(batch_size=self.batch_size, device=self.device)
        else:
            out = tensordict
        if "row" in out:
            rows = out["row"].long()
        else:
            rows = self._some_contexts()["row"]
        # draw n evenly and take the n-th of the profiled configurations, which is much faster than
        # torch.multinomial
        counts = self.table.mask[rows.cpu()].cumsum(1, dtype=torch.int32)
        drawn = torch.searchsorted(counts, (torch.rand(self.decisions) * counts[:, -1:]).int() + 1)
        if self.replay.action == "knobs":
            action = self.table.configurations[drawn]
        else:
            action = drawn
        if keys := self.replay.knob_keys:
            columns = action.to(rows.device).view(*self.outcome_shape, len(keys)).unbind(-1)
            return out.update(dict(zip(keys, columns, strict=True)))
        return out.set("action", action.view(self.action_spec.shape).to(rows.device))

    def _decide(self, tensordict: TensorDictBase) -> TensorDictBase:
        rows = self.current["row"]
        limits = self.current[self.limit_key]
        # actions as [P, G, K] or [P, G], whatever keys and axes the policy left out
        if self.replay.knob_keys:
            action = self.replay.side_by_side(tensordict)
        else:
            action = tensordict["action"]
        action = self.replay.grouped(action, *self.decisions)
        replayed = self.replay(rows, action, limits, self.contexts.generator)
        changed = self._described()
        if not self.lean:
            outcome = self.replay.outcome(rows, replayed)
            for name, values in zip(self.outcomes, outcome, strict=True):
                changed[name] = values.view(self.outcome_shape)
        return self._outcome(self.current, replayed.reward, changed)

    def _contexts(self, rows: Tensor, limits: Tensor) -> dict[str, Tensor]:
        """Return the rows and limits, and where wanted the reward of every configuration."""
        out = {"row": rows, self.limit_key: limits}
        if self.full_information:
            out["reward_per_configuration"] = self.rewards.all(rows, limits)
        return out

    def _described(self) -> dict[str, Tensor]:
        """Return the features, masks and outcomes (still 0) of the current contexts.

        Nothing if `lean`. The tensors are new, because transforms and policies may change in place
        what they get.
        """
        if self.lean:
            return {}
        blocks = {**self.table.features, "mask": self.table.mask}
        rows = self.current["row"].cpu()
        out = {name: block[rows].to(self.device) for name, block in blocks.items()}
        if self.replay.action == "configuration":
            # TransformedEnv.rand_action wants this spec to equal the one that ActionMask masks
            mask = out["mask"]
            self.action_spec.update_mask(mask if self.action_spec.ndim == 1 else mask.unsqueeze(1))
        return out | {name: self.observation_spec[name].zero() for name in self.outcomes}
