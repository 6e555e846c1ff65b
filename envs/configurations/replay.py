"""Replay a profile: give a decision the outcome that was measured.

The TorchRL and the gymnasium environments share this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.envs.configurations.contexts import reward_under
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import BudgetConfig, RewardConfig
from knobwise.envs.tables.profile_table import ActionIndex, ProfileTable

ACTIONS = ("knobs", "configuration")
"""Kinds of actions: for each knob the index of its value, or the index of a configuration of the
table."""
UNPROFILED = ("nearest", "error", "penalty")
"""Ways to treat an action that was never profiled for its sample, see `Replay`."""
REPEATS = ("draw", "median")
"""Ways to choose among a cell's measurements, see `Replay`."""


class Outcome(NamedTuple):
    """The outcome of decisions, [P, G] each."""

    configuration: Tensor
    """int64, the configuration of the table that was replayed."""
    reward: Tensor
    """float32."""
    missing: Tensor | None
    """bool, True for actions that were never profiled for their sample; None if all were."""
    repeat: Tensor | None = None
    """int64, the measurement that was drawn, see `RewardTable.outcome`; None if it is the median,
    or the only one."""


class Replay:
    """Look decisions up in a profile.

    Args:
        table: the profile.
        budget: settings; None for deadlines.
        reward: settings, or the kind of a reward. The default is the reward of training, utility
            with a cost of 0.2 for a late answer; under a mean budget it is `priced`.
        unprofiled: what happens to an action that was never profiled for its sample. `nearest`
            replays the nearest profiled configuration of the sample, by steps of knob values; if
            several are equally near, the first in the table. `penalty` does so too, but the
            accuracy is 0, and the reward is 1 below that of the sample's worst profiled
            configuration. `error` raises InputError.
        action: one of `ACTIONS`.
        action_keys: `action` for one tensor; `knobs` for a key for each knob, its name.
        repeats: the measurement of a cell that a decision gets. `draw`: one at random; `median`:
            the median latency. Accuracies are means in either case.
        device: where decisions arrive; None for where the table is.
        cost_ms: the time that a decision and its features take; it is added to every latency.

    Raises:
        InputError: a setting that does not exist, a reward that does not go with the sense of the
            budget, or `action_keys="knobs"` with `action="configuration"`.
    """

    def __init__(
        self,
        table: ProfileTable,
        budget: BudgetConfig | None = None,
        reward: RewardConfig | str | None = None,
        unprofiled: str = "nearest",
        action: str = "knobs",
        device: torch.device | str | None = None,
        repeats: str = "draw",
        action_keys: str = "action",
        cost_ms: float = 0.0,
    ) -> None:
        one_of("action_keys", action_keys, ("action", "knobs"))
        one_of("repeats", repeats, REPEATS)
        one_of("unprofiled", unprofiled, UNPROFILED)
        one_of("action", action, ACTIONS)
        self.table = table
        self.unprofiled = unprofiled
        self.action = action
        self.knob_keys: list[str] = []
        if action_keys == "knobs":
            one_of("action_keys=knobs: action", action, ["knobs"])
            self.knob_keys = [knob.name for knob in table.knobs]
        self.rewards = RewardTable(table, reward_under(budget, reward), device, repeats, cost_ms)
        if device is None:
            self.find = table.find
        else:
            self.find = ActionIndex(table.configurations).to(device)
        self.configurations = table.configurations.to(device)
        names = ["the configuration"]
        sizes = [table.num_configurations]
        if action == "knobs":
            names = [f"knob {knob.name}" for knob in table.knobs]
            sizes = list(table.knob_sizes)
        self.names = names
        self.sizes = torch.tensor(sizes, device=self.configurations.device)

    def __call__(
        self, rows: Tensor, action: Tensor, limits: Tensor, generator: torch.Generator | None = None
    ) -> Outcome:
        """Decide for P contexts.

        Args:
            rows: int64 [P].
            action: int64 [P, G, K], or under `action="configuration"` [P, G].
            limits: float32 [P], in ms.
            generator: draws a measurement for each decision, where cells have several.

        Raises:
            InputError: an action outside its range; under `error` an action that was never profiled
                for its sample.
        """
        if self.action == "knobs":
            configuration = self.find(action)
        else:
            self._refuse_outside(action.unsqueeze(-1))
            configuration = action
        # cells differ in how many measurements they have, so draw a large number modulo that
        repeat = None
        if self.rewards.repeats_ms is not None:
            repeat = torch.randint(1 << 62, configuration.shape, generator=generator).to(
                configuration.device
            )
        reward = self.rewards.chosen(rows, configuration, limits, repeat)
        # configurations that were not profiled are −1 or have the reward NaN
        if not ((configuration.amin() < 0) | reward.sum().isnan()):
            return Outcome(configuration, reward, None, repeat)
        return self._with_unprofiled(rows, action, configuration, limits, repeat)

    def side_by_side(self, actions: Mapping[str, Any] | Any) -> Tensor:
        """Stack the values of knobs that have their own keys, [*] each → [*, K].

        Raises:
            InputError: not every knob has a value, or their shapes differ.
        """
        try:
            return torch.stack([torch.as_tensor(actions[key]) for key in self.knob_keys], -1)
        except (IndexError, KeyError, RuntimeError, TypeError) as error:
            raise InputError(
                f"action: must have {', '.join(self.knob_keys)}, all of one shape; {error}"
            ) from error

    def grouped(self, action: Tensor, contexts: int, group: int = 1) -> Tensor:
        """Return actions with all axes that decisions have; axes of length 1 may be missing.

        Raises:
            InputError: actions of another shape, or that are not whole numbers.
        """
        if self.action == "knobs":
            shape: tuple[int, ...] = (contexts, group, len(self.sizes))
        else:
            shape = (contexts, group)
        axes = [size for size in action.shape if size != 1]
        same = axes == [size for size in shape if size != 1]
        if not same or action.dtype == torch.bool or action.is_floating_point():
            if self.action == "knobs":
                wanted = f"{len(self.sizes)} indices, one for each knob"
            else:
                wanted = "one index"
            if contexts * group > 1:
                wanted += f", for each of {contexts} × {group} decisions"
            raise InputError(
                f"action: is {action.dtype} {[*action.shape]}; must be int64 {[*shape]}: {wanted}"
            )
        return action.long().reshape(shape)

    def outcome(self, rows: Tensor, replayed: Outcome) -> tuple[Tensor, ...]:
        """Return accuracy and latency in ms of these decisions, float32 [P, G] each."""
        accuracy, latency_ms = self.rewards.outcome(rows, replayed.configuration, replayed.repeat)
        if replayed.missing is not None and self.unprofiled == "penalty":
            accuracy = accuracy.masked_fill(replayed.missing, 0.0)
        return accuracy, latency_ms

    def _with_unprofiled(
        self,
        rows: Tensor,
        action: Tensor,
        configuration: Tensor,
        limits: Tensor,
        repeat: Tensor | None,
    ) -> Outcome:
        """Decide where some actions were never profiled for their sample, as `unprofiled` says."""
        mask = ~self.rewards.accuracy.index_select(0, rows).isnan()
        missing = (configuration < 0) | ~mask.gather(1, configuration.clamp_min(0))
        if self.action == "knobs":
            knobs = action
            self._refuse_outside(knobs)
        else:
            knobs = self.configurations[action]
        if self.unprofiled == "error" and missing.any():
            sample = self.table.sample_ids[int(rows[missing.any(1)][0])]
            raise InputError(
                f"{int(missing.sum())} of the actions were never profiled for their sample (the "
                "first: sample "
                f"{sample!r} of {self.table.name!r}); `mask` says which configurations were, and "
                "unprofiled=nearest "
                "replays the nearest of them"
            )
        # the context of each missing action, [m], and its steps to every configuration, [m, C]
        at = missing.nonzero()[:, 0]
        steps = torch.cdist(knobs[missing].float(), self.configurations.float(), p=1)
        nearest = steps.masked_fill(~mask[at], torch.inf).argmin(1)
        configuration = configuration.masked_scatter(missing, nearest)
        reward = self.rewards.chosen(rows, configuration, limits, repeat)
        if self.unprofiled == "penalty":
            profiled = self.rewards.all(rows[at], limits[at]).nan_to_num(torch.inf)
            reward = reward.masked_scatter(missing, profiled.amin(1) - 1)
        return Outcome(configuration, reward, missing, repeat)

    def _refuse_outside(self, indices: Tensor) -> None:
        """Refuse indices that no value has, int64 [P, G, K], or no configuration, [P, G, 1]."""
        outside = (indices < 0) | (indices >= self.sizes)
        if outside.any():
            p, g, k = outside.nonzero()[0].tolist()
            name = self.names[k]
            size = int(self.sizes[k])
            raise InputError(
                f"action: {name} has no index {int(indices[p, g, k])}; its {size} values have "
                f"indices 0 to {size - 1}"
            )
