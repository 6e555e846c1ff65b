"""The configuration bandit as a gymnasium environment, with one context at a time, to be stepped by
hand. It is a batch of one of `ConfigBanditVectorEnv`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.envs.bandit.gymnasium_vector_env import (
    ConfigBanditVectorEnv,
    Info,
    Inputs,
    Observation,
)
from knobwise.envs.bandit.rendering import View
from knobwise.envs.bandit.settings import BudgetConfig, RewardConfig
from knobwise.envs.tables.profile_table import ProfileTable

ActionMask = NDArray[np.int8] | tuple[NDArray[np.int8], ...] | dict[str, NDArray[np.int8]] | None
"""What `action_space.sample` takes to draw what was profiled; None if it cannot say that."""
_NOTHING: dict[type, Any] = {int: -1, float: np.nan, str: "", bool: False}
"""What stands for a value that is not there yet, by type."""


class ConfigBanditEnv(gymnasium.Env[Observation, Any]):
    """Choose the knobs of a measured model for one input under a latency budget, and see the
    outcome.

    Description:
        A contextual bandit that replays a profile: no model runs, because every outcome was
        measured before. Under a mean budget (`BudgetConfig(constraint="mean")`) a request has no
        budget of its own. It is limited by the value of a right answer, in ms, and the reward is
        accuracy − latency/value.

    Action space:
        `MultiDiscrete(knob sizes)`: for each knob of `env.unwrapped.table.knobs` the index of its
        value; `Discrete` where there is one knob. Under `action_keys="knobs"` a `Dict` with one
        `Discrete` for each knob, by name. Under `action="configuration"` `Discrete(C)`, the index
        of a configuration in `env.unwrapped.table.configurations`.

    Observation space:
        A `Dict` of one `Box` per feature block (`image_features`, `language_features`, …; a missing
        value is the column's median), `budget_ms`, a `Box` of shape (1,) from 0 to the largest that
        is drawn (which contains what `reset(options=…)` chooses beyond too), and `mask`, a `Box` of
        int8 [C], 0 or 1: the configurations that were profiled for the sample (under a rule of
        your own those of them that it allows). Under a mean budget
        there is `worth_ms` instead of `budget_ms`.

    Rewards:
        By default the reward that training uses, see `Replay`. Under `BudgetConfig(limits={…})` an
        answer above a limit on further costs is rewarded like a wrong one, and is a violation.

    Starting state:
        A random sample and a random budget or value, unless `reset(options=…)` chooses them: `row`
        or `sample_id` (with `dataset`, where data sets share ids), `budget_ms` or `worth_ms`.

    Episode end:
        After one step, always.

    Info:
        After reset: `row` of the table, `sample_id`, `budget_ms` or `worth_ms`, `mask` (bool [C]),
        and `action_mask`, for `env.action_space.sample(info["action_mask"])` to draw a profiled
        action (None if no mask of the knobs allows exactly the profiled configurations). After a
        step also `accuracy`, `latency_ms`, `violation` (only under deadlines), `configuration` (the
        knob values that were replayed, by name), and all these with the prefix `oracle_` for the
        best configuration (its median latency, where it was measured repeatedly). Before the step
        these are NaN, −1, False or empty. With `numeric_infos` numbers alone, and outcomes after a
        step alone, as in `ConfigBanditVectorEnv`.

    Args:
        table: the profile. `gymnasium.make` takes the built-in one where none is given.
        budget, reward: see `Replay`.
        rows: int64 [n], the samples to draw from; None for all.
        render_mode: None, "ansi" (words) or "rgb_array" (uint8 [520, 900, 3]), which
            `gymnasium.make` shows in a window for "human".
        numeric_infos: leave out what is not a number, and write configurations as value indices.
            TorchRL needs it in environments that `SyncVectorEnv` or `AsyncVectorEnv` puts side by
            side.
        inputs: a function from a sample id to its question and picture, for rendering.
        options: `unprofiled`, `action`, `action_keys`, `repeats` and `cells`, see `Replay`.

    Raises:
        InputError: a setting, an option of `reset` or an action that does not exist; a limit on a
            cost that the table does not have.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}

    def __init__(
        self,
        table: ProfileTable,
        budget: BudgetConfig | None = None,
        reward: RewardConfig | str | None = None,
        rows: Tensor | Sequence[int] | None = None,
        render_mode: str | None = None,
        inputs: Inputs | None = None,
        numeric_infos: bool = False,
        **options: Any,
    ) -> None:
        if render_mode is not None:
            one_of("render_mode", render_mode, self.metadata["render_modes"])
        # a batch of one
        self._batch = ConfigBanditVectorEnv(1, table, budget, reward, rows, **options)
        self.table = self._batch.table
        self.render_mode = render_mode
        self.numeric_infos = numeric_infos
        self.observation_space = self._batch.single_observation_space
        self.action_space = self._batch.single_action_space
        self._inputs = inputs
        self._last: tuple[dict[str, Any], float | None] | None = None
        self._action_masks: dict[bytes, list[NDArray[np.int8]] | None] = {}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Sample a context (sample, and budget_ms or worth_ms); `options` can fix either."""
        super().reset(seed=seed)
        observations, infos = self._batch.draw(seed, options)
        return self._single(observations, infos, reward=None)

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Set the knobs and end the episode."""
        observations, rewards, infos = self._batch.decide(action)
        reward = rewards[0].item()
        observation, info = self._single(observations, infos, reward)
        return observation, reward, True, False, info

    def render(self) -> str | NDArray[np.uint8] | None:
        """Return the last reset or step in words or as a picture, as `render_mode` says."""
        if self.render_mode is None:
            return None
        if self._last is None:
            raise gymnasium.error.ResetNeeded("call reset() before render()")
        info, reward = self._last
        question = ""
        picture = None
        if self._inputs is not None:
            question, picture = self._inputs(info["sample_id"])
        view = View(self.table.knobs, self.table.unit, info, reward, question, picture)
        return view.words() if self.render_mode == "ansi" else view.image()

    def _single(
        self, observations: Observation, infos: Info, reward: float | None
    ) -> tuple[Observation, dict[str, Any]]:
        """Take the only observation and info out of a batch of one, and keep them for `render`."""
        observation = {name: block[0] for name, block in observations.items()}
        info = {
            name: np.array(value[0]) if value.ndim > 1 else value[0].item()
            for name, value in infos.items()
        }
        # after a step TorchRL looks for the parts of a Dict observation in the infos
        numbers = dict(info) if reward is None else {**info, **observation}
        # what is added from here on is for people
        key = self._batch.limit_key
        mask = observation["mask"].astype(bool)
        info = {
            "action_mask": self._action_mask(mask),
            **info,
            "sample_id": self.table.sample_ids[info["row"]],
            key: observation[key].item(),
            "mask": mask,
        }
        if reward is None:
            info |= self._unknown()
        else:
            for name in ("configuration", "oracle_configuration"):
                values = zip(self.table.knobs, info[name], strict=True)
                info[name] = {knob.name: knob.values[value] for knob, value in values}
        self._last = dict(info), reward  # a copy, because the caller may change theirs
        return observation, numbers if self.numeric_infos else info

    def _unknown(self) -> dict[str, Any]:
        """Return what stands for the outcomes before a decision, so that infos have the same keys
        and types at every step: Minari refuses to record others."""
        out: dict[str, Any] = {}
        for who in ("", "oracle_"):
            out |= {f"{who}accuracy": np.nan, f"{who}latency_ms": np.nan}
            if self._batch.limit_key == "budget_ms":
                out[f"{who}violation"] = False
            out[f"{who}configuration"] = {
                knob.name: _NOTHING.get(type(knob.values[0])) for knob in self.table.knobs
            }
        return out

    def action_masks(self) -> NDArray[np.bool_]:
        """Return what may be chosen in the context at hand, as sb3-contrib's MaskablePPO asks for
        it: bool [C] of configurations, or of all values of all knobs, one knob after the other.

        Raises:
            InputError: no mask of the knobs allows exactly the profiled configurations.
        """
        if self._last is None:
            raise gymnasium.error.ResetNeeded("call reset() before action_masks()")
        masks = self._last[0]["action_mask"]
        if masks is None:
            raise InputError(
                "action_masks: the profiled configurations of this sample are not all "
                "combinations of some values of each knob; take action='configuration'"
            )
        if isinstance(masks, dict):
            masks = tuple(masks.values())
        return np.concatenate(masks if isinstance(masks, tuple) else (masks,)).astype(bool)

    def _action_mask(self, mask: NDArray[np.bool_]) -> ActionMask:
        """Return for each knob the mask of its profiled values, int8 [values], for a mask bool [C];
        of a single knob the mask alone.

        None if not all combinations of these values were profiled, because masks of single knobs
        would then allow too much.
        """
        key = mask.tobytes()
        if key not in self._action_masks:
            # few masks occur, mostly one
            profiled = self.table.configurations.numpy()[mask]
            masks = [np.zeros(size, np.int8) for size in self.table.knob_sizes]
            for knob, values in zip(masks, profiled.T, strict=True):
                knob[values] = 1
            exact = math.prod(map(np.count_nonzero, masks)) == len(profiled)
            self._action_masks[key] = masks if exact else None
        known = self._action_masks[key]
        if known is None:
            return None
        copies = tuple(knob.copy() for knob in known)
        names = self._batch.knob_keys
        if names:
            return dict(zip(names, copies, strict=True))
        return copies if len(copies) > 1 else copies[0]
