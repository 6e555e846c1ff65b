"""Replay a profile: give a decision the outcome that was measured.

The TorchRL and the gymnasium environments share this module.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.envs.bandit.contexts import reward_for
from knobwise.envs.bandit.reward import RewardTable
from knobwise.envs.bandit.rules import rule_of
from knobwise.envs.bandit.settings import BudgetConfig, RewardConfig
from knobwise.envs.tables.cells import Cells
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
    accuracy: Tensor
    """float32."""
    latency_ms: Tensor
    """float32, of the measurement that was drawn, or the median."""


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
        cells: what counts of the table; None for all that it has.

    Raises:
        TypeError: another argument.
        InputError: a setting that does not exist, a reward that does not go with the
            constraint of the budget, or `action_keys="knobs"` with `action="configuration"`.
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
        cells: Cells | None = None,
        **unknown: Any,
    ) -> None:
        for name in unknown:
            # by these words TorchRL's `GymEnv` knows that it has no frameskip
            raise TypeError(f"the environment got an unexpected keyword argument {name!r}")
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
        # everything lies on the device where decisions arrive
        rule = rule_of(budget or BudgetConfig())
        config = reward_for(budget or BudgetConfig(), reward)
        self.rewards = RewardTable(table, config, device, repeats, cost_ms, cells, rule)
        self.find = ActionIndex(table.configurations).to(device)
        self.configurations = table.configurations.to(device)
        # how many values there are of each part of an action
        self.sizes = {"the configuration": table.num_configurations}
        if action == "knobs":
            self.sizes = {f"knob {knob.name}": len(knob.values) for knob in table.knobs}

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
        by_knobs = self.action == "knobs"
        configuration = self.find(action) if by_knobs else action
        # values that no knob has are found as −1 too, so that most steps need this one number;
        # it takes long to compare tensors with numbers, and aminmax is slower than both
        lowest = int(configuration.amin())
        highest = 0 if by_knobs else int(configuration.amax())
        if lowest < 0 or highest >= self.table.num_configurations:
            self._refuse_outside(action if by_knobs else action.unsqueeze(-1))
        repeat = self.rewards.draw(configuration, generator)
        inside = configuration if lowest >= 0 else configuration.clamp_min(0)
        accuracy, latency_ms = self.rewards.outcome(rows, inside, repeat)
        # configurations that were never profiled at all are −1; a sum shows whether a cell is NaN
        missing = None
        if lowest < 0 or (self.rewards.has_gaps and math.isnan(accuracy.sum())):
            missing = (configuration < 0) | accuracy.isnan()
            knobs = action if by_knobs else self.configurations[action]
            nearest = self._nearest(rows, knobs, missing)
            configuration = configuration.masked_scatter(missing, nearest)
            accuracy, latency_ms = self.rewards.outcome(rows, configuration, repeat)
        del repeat, inside  # what follows takes their memory
        reward = self.rewards.reward_of(accuracy, latency_ms, limits.unsqueeze(-1), configuration)
        if missing is not None and self.unprofiled == "penalty":
            at = missing.nonzero()[:, 0]
            accuracy = accuracy.masked_fill(missing, 0.0)
            profiled = self.rewards.all(rows[at], limits[at]).nan_to_num(torch.inf)
            reward = reward.masked_scatter(missing, profiled.amin(1) - 1)
        return Outcome(configuration, reward, accuracy, latency_ms)

    def _nearest(self, rows: Tensor, knobs: Tensor, missing: Tensor) -> Tensor:
        """Find the profiled configuration nearest to each missing action, or under `error` refuse.

        Rows int64 [P], actions int64 [P, G, K], missing bool [P, G] with m True → int64 [m].
        """
        at = missing.nonzero()[:, 0]  # the context of each missing action
        if self.unprofiled == "error":
            sample = self.table.sample_ids[int(rows[at[0]])]
            raise InputError(
                f"{len(at)} of the actions were never profiled for their sample (the first: "
                f"sample {sample!r} of {self.table.name!r}); `mask` says which configurations "
                "were, and unprofiled=nearest replays the nearest of them"
            )
        # the steps of each missing action to every configuration, [m, C]
        steps = torch.cdist(knobs[missing].float(), self.configurations.float(), p=1)
        steps = steps.masked_fill(self.rewards.accuracy[rows[at]].isnan(), torch.inf)
        return steps.argmin(1)

    def grouped(self, actions: Any, contexts: int, group: int = 1) -> Tensor:
        """Return actions with all axes that decisions have; axes of length 1 may be missing.

        Knobs that have their own keys, [*] each, are put side by side, [*, K].

        Raises:
            InputError: actions of another shape, or that are not whole numbers; or a knob is
                missing.
        """
        try:
            if self.knob_keys:
                actions = torch.stack([torch.as_tensor(actions[key]) for key in self.knob_keys], -1)
            action = torch.as_tensor(actions)
        except (IndexError, KeyError, RuntimeError, TypeError) as error:
            raise InputError(
                f"action: must be {', '.join(self.sizes)}; names need action_keys='knobs'; {error}"
            ) from error
        shape = [contexts, group]
        if self.action == "knobs":
            shape.append(len(self.sizes))
        wanted = [size for size in shape if size != 1]
        other = wanted != [*action.squeeze().shape]
        if other or action.dtype == torch.bool or action.is_floating_point():
            raise InputError(
                f"action: is {action.dtype} {[*action.shape]}; must be int64 {wanted}: the index "
                f"of a value of {' and of '.join(self.sizes)}, for each decision"
            )
        # axes of length 1 come back
        return action.long().reshape(shape)

    def _refuse_outside(self, indices: Tensor) -> None:
        """Refuse indices that no value has, int64 [P, G, K], or no configuration, [P, G, 1]."""
        for values, (name, size) in zip(indices.unbind(-1), self.sizes.items(), strict=True):
            outside = values[(values < 0) | (values >= size)].tolist()
            if outside:
                raise InputError(
                    f"action: {name} has no index {outside[0]}; its indices are 0 to {size - 1}"
                )
