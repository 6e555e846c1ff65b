"""Replay a profile: give a decision the outcome that was measured.

The TorchRL and the gymnasium environments share this module.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.common.memory import keep_freed_memory
from knobwise.envs.bandit.actions import ActionForm
from knobwise.envs.bandit.contexts import reward_for
from knobwise.envs.bandit.faster import any_nan
from knobwise.envs.bandit.reward import RewardTable
from knobwise.envs.bandit.rule_choice import counted_cells, rule_of
from knobwise.envs.bandit.settings import BudgetConfig, RewardConfig
from knobwise.envs.tables.cells import Cells
from knobwise.envs.tables.profile_table import ProfileTable

KEPT = 48 << 20
"""Bytes of freed memory that are kept from step to step."""
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
        action, action_keys: the form of an action, see `envs.bandit.actions`.
        repeats: the measurement of a cell that a decision gets. `draw`: one at random; `median`:
            the median latency. Accuracies are means in either case.
        device: where decisions arrive; None for where the table is.
        cells: what counts of the table; None for what counts under the budget, see
            `counted_cells`.

    Raises:
        TypeError: another argument.
        InputError: a setting that does not exist, a reward that does not go with the
            constraint of the budget, or `action_keys="knobs"` with `action="configuration"`;
            without `cells` a limit on a cost that the table does not have.
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
        cells: Cells | None = None,
        **unknown: Any,
    ) -> None:
        for name in unknown:
            # by these words TorchRL's `GymEnv` knows that it has no frameskip
            raise TypeError(f"the environment got an unexpected keyword argument {name!r}")
        one_of("repeats", repeats, REPEATS)
        one_of("unprofiled", unprofiled, UNPROFILED)
        # the next step allocates what this one frees
        keep_freed_memory(KEPT)
        self.table = table
        self.unprofiled = unprofiled
        # everything lies on the device where decisions arrive
        budget = budget or BudgetConfig()
        config = reward_for(budget, reward)
        self.cells = counted_cells(table, budget) if cells is None else cells
        rule = rule_of(budget)
        self.rewards = RewardTable(table, config, device, repeats, self.cells, rule)
        self.actions = ActionForm(table, action, action_keys, device)

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
        # look the cell of each decision up
        configuration, unknown = self.actions.configuration_of(action)
        repeat = self.rewards.draw(configuration, generator)
        accuracy, latency_ms = self.rewards.outcome(rows, configuration, repeat)
        # where it is empty, take another
        missing = self._missing(accuracy, unknown)
        if missing is not None:
            nearest = self._nearest(rows, self.actions.knobs_of(action), missing)
            configuration = configuration.masked_scatter(missing, nearest)
            accuracy, latency_ms = self.rewards.outcome(rows, configuration, repeat)
        del repeat  # what follows takes its memory
        reward = self.rewards.reward_of(accuracy, latency_ms, limits.unsqueeze(-1), configuration)
        if missing is not None and self.unprofiled == "penalty":
            at = missing.nonzero()[:, 0]
            accuracy = accuracy.masked_fill(missing, 0.0)
            profiled = self.rewards.all(rows[at], limits[at]).nan_to_num(torch.inf)
            reward = reward.masked_scatter(missing, profiled.amin(1) - 1)
        return Outcome(configuration, reward, accuracy, latency_ms)

    def _missing(self, accuracy: Tensor, unknown: Tensor | None) -> Tensor | None:
        """Return which decisions were never profiled for their sample, bool [P, G]; None if all
        were, as mostly.

        Args:
            accuracy: of their cells, float [P, G], NaN where empty.
            unknown: bool [P, G], the decisions that are no configuration; None for none.
        """
        if unknown is not None:
            return unknown | accuracy.isnan()
        if self.rewards.has_gaps and any_nan(accuracy):
            return accuracy.isnan()
        return None

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
        every = self.actions.configurations
        steps = torch.cdist(knobs[missing].float(), every.float(), p=1)
        steps = steps.masked_fill(self.rewards.accuracy[rows[at]].isnan(), torch.inf)
        return steps.argmin(1)
