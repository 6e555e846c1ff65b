"""The contextual bandit that replays a profile, as a native batched TorchRL environment.

Every episode is one decision. A group of actions for one context is an axis of the action, so one
forward pass of a policy serves all its draws. In training, observations hold row numbers only:
features are looked up where they are encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Categorical, Composite, MultiCategorical, TensorSpec, Unbounded

from knobwise.common.errors import InputError
from knobwise.envs.bandit.budgets import DRAWN_BY
from knobwise.envs.bandit.contexts import ContextSampler
from knobwise.envs.bandit.faster import copy_when_changed
from knobwise.envs.bandit.replay import Replay
from knobwise.envs.bandit.rule_choice import rule_of
from knobwise.envs.bandit.settings import BudgetConfig, RewardConfig
from knobwise.envs.bandit.single_step import SingleStepEnv, batch_shape, one_axis
from knobwise.envs.tables.cells import Cells
from knobwise.envs.tables.profile_table import ProfileTable

OUTCOMES = ("accuracy", "latency_ms")
"""What is observed of a decision."""


class ConfigurationSpec(Categorical):
    """An index of a configuration. It equals another of its size and shape whatever is masked.

    TorchRL's `ActionMask` masks the copy of a wrapper for the contexts at hand. The action that the
    environment takes stays what it was, so `TransformedEnv.rand_action`, which compares the two,
    may draw by the environment's own.
    """

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ConfigurationSpec):
            return bool(super().__eq__(other))
        specs = self.clone(), other.clone()
        for spec in specs:
            spec.update_mask(None)
        return bool(Categorical.__eq__(*specs))


class ConfigBandit(SingleStepEnv):
    """Decide for P contexts at once: one decision for each, or a group of G.

    Observation: `row` int64 [P], the row of the table, and `budget_ms` float32 [P]; under a mean
    budget `worth_ms` in its place. With `observe_features=False`, as in the training loop, that is
    all. Otherwise there are also the feature blocks [P, d], `mask` bool [P, C] (the configurations
    profiled for the sample; under a rule of your own those of them that it allows), and of the
    actions `accuracy` and `latency_ms`, float32 [P, G], 0 before the step. With
    `full_information=True` there is also `reward_per_configuration` float32 [P, C], means over
    repeated measurements, NaN where `mask` is False.

    Action: `action` int64 [P, G, K], for each knob the index of its value; or in another form, see
    `envs.bandit.actions`.

    Reward: float32 [P, G].

    With `group_size=None` actions and outcomes have no axis G, and the reward is [P, 1]. Where a
    context has one decision, actions may have that axis or lack it.

    The features and the mask that `reset` and `step` return are the caller's: to change them in
    place changes nothing else, neither those of another step nor what the next one returns. Tensors
    of equal content share their memory until then. Only `resize_` is not for them, which torch
    refuses.

    `step` uses `row` and the limit in the tensordict. If they are missing it uses those of the last
    reset, or draws new ones if there was none. Inside TorchRL's wrappers
    (`TransformedEnv`, `SerialEnv`, …) the rows of the last reset always keep its limits, because a
    transform may have changed those in the tensordict.

    Args:
        batch_size: P, or a shape of contexts as in TorchRL, in the place of [P]; `[]` is a single
            context without an axis.
        group_size: G.
        budget, reward: see `Replay`.
        rows: int64 [n], the samples to draw from (the training split), None for all. Of several
            lists each is drawn from in turn, see `RowSampler`.
        seed: of the contexts; None for a fresh one from torch's generator, see `fresh_seed`.
        observe_features: False leaves features, mask and outcomes out of the observations.
        full_information: add the rewards of all configurations to the observations.
        balance: how often each sample is drawn, see `BalanceConfig`.
        cells: what counts of the table, such as `Problem.cells`; None for what counts under the
            budget. An answer above a limit on further costs then counts as a wrong one, and a rule
            of your own says what may be chosen.
        options: `unprofiled`, `action`, `action_keys` and `repeats`, see `Replay`;
            measurements are drawn from the generator of the contexts. Under `nearest`, the default,
            any policy may play; with `action="configuration"` and without an axis G, TorchRL's
            `ActionMask(mask_key="mask")` makes random ones draw profiled configurations only.

    Raises:
        InputError: `action_keys="knobs"` with `action="configuration"`, or with a knob that is
            called like another key; a limit on a cost that the table does not have. Raised by
            `step`: an action is outside its range or of another
            shape, or under `unprofiled="error"` was never profiled for its sample; or the
            tensordict has other rows than the last reset, and a transform changes or removes the
            limits.

    Examples:
        >>> from knobwise.envs import ConfigBandit
        >>> from knobwise.testbeds import builtin_profile
        >>> env = ConfigBandit(builtin_profile(), batch_size=4, group_size=2, seed=0)
        >>> env.rollout(1)["next", "reward"].shape
        torch.Size([4, 1, 2])
    """

    def __init__(
        self,
        table: ProfileTable,
        *,
        batch_size: int | Sequence[int] = 1,
        group_size: int | None = None,
        budget: BudgetConfig | None = None,
        reward: RewardConfig | str | None = None,
        rows: Tensor | Sequence[Tensor] | None = None,
        seed: int | None = None,
        observe_features: bool = True,
        full_information: bool = False,
        device: torch.device | str | None = None,
        balance: str = "none",
        cells: Cells | None = None,
        **options: Any,
    ) -> None:
        budget = budget or BudgetConfig()
        super().__init__(device=device, batch_size=batch_shape(batch_size))
        self.table = table
        self.replay = Replay(table, budget, reward, device=device, cells=cells, **options)
        self.cells = self.replay.cells
        self.rewards = self.replay.rewards
        self.contexts = ContextSampler(table, budget, rows, seed, balance, self.cells)
        self.limit_key = rule_of(budget).limit_key
        self.observe_features = observe_features
        self.full_information = full_information
        self.current: dict[str, Tensor] = {}  # the contexts to decide for
        # the rows that features were last looked up for, and what was there
        self._rows: Tensor | None = None
        self._blocks: dict[str, Tensor] = {}
        self.limits_change = False  # True once a transform changed or removed the limits
        self.decisions = (self.batch_size.numel(), group_size or 1)
        self.outcome_shape = self.decisions if group_size else self.decisions[:1]
        self._set_outcome_specs(group_size or 1)
        self.action_spec = self._actions().to(self.device)
        specs = self._observations()
        self.observation_spec = Composite(specs, shape=self.batch_size).to(self.device)
        if taken := {*specs, "reward", "done", "terminated"} & {*self.replay.actions.keys}:
            raise InputError(
                f"action_keys=knobs: knob {min(taken)} is called like another key; use "
                "action_keys=action"
            )

    def _actions(self) -> TensorSpec:
        """Describe an action in the form that `replay` reads."""
        sizes = self.table.knob_sizes
        shape = (*self.batch_size, *self.outcome_shape[1:])
        form = self.replay.actions
        if form.keys:
            knobs = zip(form.keys, sizes, strict=True)
            specs = {name: Categorical(size, shape) for name, size in knobs}
            return Composite(specs, shape=self.batch_size)
        if form.by_knobs:
            return MultiCategorical(sizes, (*shape, len(sizes)), remove_singleton=False)
        return ConfigurationSpec(self.table.num_configurations, shape)

    def _observations(self) -> dict[str, TensorSpec]:
        """Describe each key that a reset writes, by its shape for P contexts."""
        batch = self.batch_size
        c = self.table.num_configurations
        specs: dict[str, TensorSpec] = {"row": Categorical(self.table.num_samples, batch)}
        # what is a float, by its shape for each context
        shapes: dict[str, tuple[int, ...]] = {self.limit_key: ()}
        if self.full_information:
            shapes["reward_per_configuration"] = (c,)
        if self.observe_features:
            shapes |= {name: block.shape[1:] for name, block in self.table.features.items()}
            shapes |= dict.fromkeys(OUTCOMES, self.outcome_shape[1:])
            specs["mask"] = Binary(c, (*batch, c), dtype=torch.bool)
        return specs | {name: Unbounded((*batch, *shape)) for name, shape in shapes.items()}

    def _about(self) -> str:
        budget = self.contexts.budgets.config
        limits = budget.constraint
        if rule_of(budget).late:
            limits = budget.strategy or DRAWN_BY
        size = f"{self.table.num_samples} samples × {self.table.num_configurations} configurations"
        return f"{self.table.name!r}: {size}, budget {limits}, reward {self.rewards.config.kind}"

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Draw uniformly among the configurations profiled for each sample."""
        if tensordict is None:
            tensordict = TensorDict(batch_size=self.batch_size, device=self.device)
        if "row" not in tensordict and not self.current:
            self._reset()
        rows = one_axis(tensordict.get("row", self.current.get("row")).long())
        # draw n evenly and take the n-th of the profiled configurations, which is much faster than
        # torch.multinomial
        counts = self.cells.mask[rows.cpu()].cumsum(1, dtype=torch.int32)
        action = torch.searchsorted(counts, (torch.rand(self.decisions) * counts[:, -1:]).int() + 1)
        action = action.view((*self.batch_size, *self.outcome_shape[1:]))
        return tensordict.update(self.replay.actions.written(action.to(rows.device)))

    # -- one decision ------------------------------------------------------------------------------

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        # contexts are drawn where the table is, so that a seed gives the same ones on every device
        rows, limits = (drawn.to(self.device) for drawn in self.contexts(self.batch_size.numel()))
        # a partial reset draws as many contexts, and keeps some of the old ones
        wanted = None if tensordict is None else tensordict.get("_reset", None)
        if wanted is not None and self.current:
            # the other contexts go on
            wanted = wanted.reshape(-1)
            rows = rows.where(wanted, self.current["row"])
            limits = limits.where(wanted, self.current[self.limit_key])
        self._set_contexts(rows, limits)
        content = self._described()
        if self.observe_features:
            content |= {name: torch.zeros(self.outcome_shape).to(self.device) for name in OUTCOMES}
        return self._with_end(content, ended=False)

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.contexts.generator.manual_seed(seed)

    # what `state_dict` carries: the state of the generator that contexts are drawn from
    def get_extra_state(self) -> Tensor:
        return self.contexts.generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        self.contexts.generator.set_state(state)

    def _set_contexts(self, rows: Tensor, limits: Tensor) -> None:
        """Decide for these contexts from now on; where wanted, compute all their rewards."""
        self.current = {"row": rows, self.limit_key: limits}
        if self.full_information:
            self.current["reward_per_configuration"] = self.rewards.all(rows, limits)

    def _take_contexts(self, tensordict: TensorDictBase, wrapped: bool = False) -> None:
        """Set the current contexts to those that a step is to decide for.

        The last reset fills in what the tensordict lacks. If `wrapped`, a transform may have
        changed or removed the limits in the tensordict. The rows of the last reset then keep the
        limits of that reset, and other rows are refused, because their limits are unknown.
        """
        no_limits = self.limit_key not in tensordict
        if not self.current and (no_limits or "row" not in tensordict):
            self._reset()
        old_rows = self.current.get("row")
        old_limits = self.current.get(self.limit_key)
        rows = one_axis(tensordict.get("row", old_rows).long())
        limits = one_axis(tensordict.get(self.limit_key, old_limits).float())
        same_rows = _same(rows, old_rows)
        same = same_rows and not no_limits and _same(limits, old_limits)
        if wrapped and same_rows:
            # if the limits of the same rows differ, or are gone, that is the work of a transform
            self.limits_change = not same
        elif wrapped and (self.limits_change or no_limits):
            raise InputError(
                "row: the tensordict has other rows than the last reset, and their limits are "
                f"unknown, because a transform changes or removes {self.limit_key}; reset before "
                "each step, and let no two loops share an environment"
            )
        elif not same:
            # the tensordict's own may be changed in place
            self._set_contexts(rows.clone(), limits.clone())

    def _decide(self, tensordict: TensorDictBase) -> TensorDictBase:
        rows = self.current["row"]
        if len(self.batch_size) > 1:
            tensordict = tensordict.select(*self.action_keys).reshape(-1)
        # actions as [P, G, K] or [P, G], whatever keys and axes the policy left out
        form = self.replay.actions
        actions = tensordict if form.keys else tensordict["action"]
        action = form.grouped(actions, *self.decisions)
        limits = self.current[self.limit_key]
        replayed = self.replay(rows, action, limits, self.contexts.generator)
        content = self._described() | {"reward": replayed.reward}
        if self.observe_features:
            for name in OUTCOMES:
                content[name] = getattr(replayed, name).view(self.outcome_shape)
        return self._with_end(content, ended=True)

    def _described(self) -> dict[str, Tensor]:
        """Return the current contexts, with `observe_features` also their features and masks.

        All that is returned is new, because transforms and policies may change in place what they
        get; those who do not pay for no copy of what is large.
        """
        contexts = {
            name: copy_when_changed(values) if values.ndim > 1 else values.clone()
            for name, values in self.current.items()
        }
        if not self.observe_features:
            return contexts
        # not those that were returned, which may have been changed too
        rows = self.current["row"]
        if not _same(rows, self._rows):
            self._rows = rows.clone()
            at = rows.cpu()
            blocks = {**self.table.features, "mask": self.cells.mask}
            self._blocks = {
                name: block.index_select(0, at).to(self.device) for name, block in blocks.items()
            }
        return contexts | {name: copy_when_changed(block) for name, block in self._blocks.items()}


def _same(first: Tensor, second: Tensor | None) -> bool:
    return first is second or (second is not None and torch.equal(first, second))
