"""The configuration bandit as gymnasium environments.

`ConfigBanditEnv` has one context at a time, to be stepped by hand. `ConfigBanditVectorEnv` has
many at once.
"""

from __future__ import annotations

import functools
import math
import os
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.envs.configurations.contexts import LIMIT_KEYS, ContextSampler, chosen_context
from knobwise.envs.configurations.rendering import View
from knobwise.envs.configurations.replay import Replay
from knobwise.envs.configurations.reward import RewardTable, expected_utility
from knobwise.envs.configurations.settings import BudgetConfig, RewardConfig
from knobwise.envs.tables.profile_table import ProfileTable

Observation = dict[str, NDArray[Any]]
Info = dict[str, NDArray[Any]]
Inputs = Callable[[str], tuple[str, Any]]
"""A sample id → its question, and its picture as a PIL image or an array (None if it has none)."""
_PROCESS = os.getpid()
"""The process that imported this module; a process forked from it has another id."""


class ConfigBanditEnv(gymnasium.Env[Observation, Any]):
    """Choose the knobs of a measured model for one input under a latency budget, and see the
    outcome.

    Description:
        A contextual bandit that replays a profile: no model runs, because every outcome was
        measured before. Under a mean budget (`BudgetConfig(sense="mean")`) a request has no budget
        of its own. It is limited by the worth of a right answer, in ms, and the reward is
        accuracy − latency/worth.

    Action space:
        `MultiDiscrete(knob sizes)`: for each knob of `env.unwrapped.table.knobs` the index of its
        value. Under `action_keys="knobs"` a `Dict` with one `Discrete` for each knob, by name.
        Under `action="configuration"` `Discrete(C)`, the index of a configuration in
        `env.unwrapped.table.configurations`.

    Observation space:
        A `Dict` of one `Box` per feature block (`image_features`, `language_features`, …; a missing
        value is the column's median), `budget_ms`, a `Box` of shape (), and `mask`,
        `MultiBinary(C)`: the configurations that were profiled for the sample. Under a mean budget
        there is `worth_ms` instead of `budget_ms`.

    Rewards:
        By default the reward that training uses, see `Replay`.

    Starting state:
        A random sample and a random budget or worth, unless `reset(options=…)` chooses them: `row`
        or `sample_id` (with `dataset`, where data sets share ids), `budget_ms` or `worth_ms`.

    Episode end:
        After one step, always.

    Info:
        After reset: `row` of the table, `sample_id`, `budget_ms` or `worth_ms`, `mask` (bool [C]),
        and `action_mask`, for `env.action_space.sample(info["action_mask"])` to draw a profiled
        action (None if no mask of the knobs allows exactly the profiled configurations). After a
        step also `accuracy`, `latency_ms`, `violation` (only under deadlines), `configuration` (the
        knob values that were replayed, by name), and all these with the prefix `oracle_` for the
        best configuration (its median latency, where it was measured repeatedly). With
        `numeric_infos` numbers alone, as in `ConfigBanditVectorEnv`.

    Args:
        table: the profile; None for the built-in one.
        budget, reward: see `Replay`.
        rows: int64 [n], the samples to draw from; None for all.
        render_mode: None, "ansi" (words) or "rgb_array" (uint8 [520, 900, 3]), which
            `gymnasium.make` shows in a window for "human".
        numeric_infos: leave out what is not a number, and write configurations as value indices.
            TorchRL needs it in environments that `SyncVectorEnv` or `AsyncVectorEnv` puts side by
            side.
        inputs: a function from a sample id to its question and picture, for rendering. A text
            `module:function` names such a function for the built-in profile alone.
        options: `unprofiled`, `action`, `action_keys` and `repeats`, see `Replay`.

    Raises:
        InputError: a setting, an option of `reset` or an action that does not exist.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}

    def __init__(
        self,
        table: ProfileTable | None = None,
        budget: BudgetConfig | None = None,
        reward: RewardConfig | str | None = None,
        rows: Tensor | Sequence[int] | None = None,
        render_mode: str | None = None,
        inputs: Inputs | str | None = None,
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
        if self.table.name != "builtin" and not callable(inputs):
            self._inputs = None
        self._last: tuple[dict[str, Any], float | None] | None = None
        self._action_masks: dict[bytes, list[NDArray[np.int8]] | None] = {}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw a sample and its budget or worth, as far as the options do not choose them."""
        super().reset(seed=seed)
        return self._single(*self._batch.draw(seed, options), None)

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Set the knobs and end the episode."""
        observations, rewards, infos = self._batch.decide(action)
        reward = rewards[0].item()
        observation, info = self._single(observations, infos, reward)
        return observation, reward, True, False, info

    def render(self) -> Any:
        """Return the last reset or step in words or as a picture, as `render_mode` says."""
        if self.render_mode is None:
            return None
        if self._last is None:
            raise gymnasium.error.ResetNeeded("call reset() before render()")
        info, reward = self._last
        # a name is looked up only where it is needed
        inputs = self._inputs
        if isinstance(inputs, str):
            inputs = pkgutil.resolve_name(inputs)
        question, picture = inputs(info["sample_id"]) if callable(inputs) else ("", None)
        view = View(self.table.knobs, self.table.unit, info, reward, question, picture)
        return view.words() if self.render_mode == "ansi" else view.image()

    def _single(
        self, observations: Observation, infos: Info, reward: float | None
    ) -> tuple[Observation, dict[str, Any]]:
        """Take the only observation and info out of a batch of one, and keep them for `render`."""
        # copies, because an observation must not share memory with the next one
        observation = {name: np.array(block[0]) for name, block in observations.items()}
        info = {
            name: np.array(value[0]) if value.ndim > 1 else value[0].item()
            for name, value in infos.items()
        }
        # after a step TorchRL looks for the parts of a Dict observation in the infos
        numbers = dict(info) if reward is None else {**info, **observation}
        # what is added from here on is for people
        key = self._batch.limit_key
        mask = observation["mask"].astype(bool)
        info = {"action_mask": self._action_mask(mask)} | info
        info |= {key: observation[key].item(), "mask": mask}
        info["sample_id"] = self.table.sample_ids[info["row"]]
        for name in info.keys() & {"configuration", "oracle_configuration"}:
            values = zip(self.table.knobs, info[name], strict=True)
            info[name] = {knob.name: knob.values[value] for knob, value in values}
        self._last = dict(info), reward  # a copy, because the caller may change theirs
        return observation, numbers if self.numeric_infos else info

    def _action_mask(self, mask: NDArray[np.bool_]) -> Any:
        """Return for each knob the mask of its profiled values, int8 [values], for a mask bool [C].

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
        return dict(zip(names, copies, strict=True)) if names else copies


class _Contexts(NamedTuple):
    """The contexts of n environments."""

    rows: Tensor
    """int64 [n]."""
    limits: Tensor
    """float32 [n], in ms."""
    observations: Observation
    """Before and after a decision."""
    infos: Info
    """Before a decision."""
    oracle: Info
    """The best decision and its outcome."""


class ConfigBanditVectorEnv(VectorEnv[Observation, NDArray[Any], NDArray[Any]]):
    """Decide for many contexts at once, as a gymnasium vector environment.

    Spaces and rewards are those of `ConfigBanditEnv` with a leading axis `num_envs`. All infos are
    numbers, because TorchRL reads them all: `row` in place of `sample_id`; `configuration` as value
    indices, int64 [num_envs, K]; `action_mask`, int8 [num_envs, C], under `action="configuration"`
    only. What the observation holds is not in them. Nothing is rendered; `gymnasium.make_vec(…,
    vectorization_mode="sync")` renders each environment.

    Every episode is one decision, so all of them end together. `autoreset_mode` is gymnasium's:

    - `SAME_STEP` (the default): `step` returns the observations of the next contexts; those of the
      decisions are in `infos["final_obs"]`, an array of num_envs of them, and their outcomes in
      `infos["final_info"]`.
    - `NEXT_STEP`: `step` returns the decisions; the next `step` ignores its actions, draws new
      contexts and returns reward 0, not terminated.
    - `DISABLED`: only `reset` draws new contexts; after the first reset
      `options["reset_mask"]`, bool [num_envs], says for which environments.
    """

    def __init__(
        self,
        num_envs: int = 1,
        table: ProfileTable | None = None,
        budget: BudgetConfig | None = None,
        reward: RewardConfig | str | None = None,
        rows: Tensor | Sequence[int] | None = None,
        render_mode: str | None = None,
        inputs: Inputs | str | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        **options: Any,
    ) -> None:
        if os.getpid() != _PROCESS:
            # torch would wait for its threads, which a fork leaves behind
            torch.set_num_threads(1)
        table = _builtin() if table is None else table
        if not isinstance(table, ProfileTable):
            raise InputError(
                f"table={table!r}: must be a ProfileTable; knobwise.read(FILE) reads it"
            )
        budget = budget or BudgetConfig()
        self.table = table
        self._configurations = table.configurations.numpy()
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.autoreset_mode = AutoresetMode(autoreset_mode)  # TorchRL's GymWrapper asks for it here
        self.metadata = {"render_modes": [], "autoreset_mode": self.autoreset_mode}
        self._replay = Replay(table, budget, reward, **options)
        self._contexts = ContextSampler(table, budget, rows, seed=None)
        # a Box holds no NaN: here, and only here, a missing feature is its column's median
        self._features = {
            name: torch.where(block.isnan(), block.nanmedian(0).values.nan_to_num(), block)
            for name, block in table.features.items()
        }
        self.limit_key = LIMIT_KEYS[budget.sense]
        self.knob_keys = self._replay.knob_keys
        blocks: dict[str, Any] = {name: _box(block) for name, block in self._features.items()}
        blocks[self.limit_key] = spaces.Box(0.0, float(np.finfo(np.float32).max), ())
        blocks["mask"] = spaces.MultiBinary(table.num_configurations)
        self.single_observation_space: Any = spaces.Dict(blocks)
        self.single_action_space: Any = self._actions()
        batched = gymnasium.vector.utils.batch_space
        self.observation_space = batched(self.single_observation_space, num_envs)
        self.action_space = batched(self.single_action_space, num_envs)
        self._current: _Contexts | None = None
        self._over = np.zeros(num_envs, dtype=bool)  # whose episode has ended

    def _actions(self) -> spaces.Space[Any]:
        """Return the space of one action."""
        if self.knob_keys:
            knobs = zip(self.knob_keys, self.table.knob_sizes, strict=True)
            return spaces.Dict({name: spaces.Discrete(size) for name, size in knobs})
        if self._replay.action == "configuration":
            return spaces.Discrete(self.table.num_configurations)
        return spaces.MultiDiscrete(self.table.knob_sizes)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw contexts. One seed serves all of them; of a list of seeds the first counts."""
        seed = seed[0] if isinstance(seed, list) else seed
        super().reset(seed=seed)
        options = dict(options or {})
        mask = None
        if self.autoreset_mode == AutoresetMode.DISABLED and "reset_mask" in options:
            mask = np.asarray(options.pop("reset_mask"))
            if mask.dtype != bool or mask.shape != (self.num_envs,):
                raise InputError(
                    f"reset options: reset_mask is bool [{self.num_envs}], True where a context "
                    "is drawn"
                )
        observations, infos = self.draw(seed, options, mask)
        return observations, self._with_masks(infos, mask)

    def step(
        self, actions: NDArray[Any]
    ) -> tuple[Observation, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Decide for every context, and go on as `autoreset_mode` says."""
        ended = np.ones(self.num_envs, dtype=bool)
        if self.autoreset_mode == AutoresetMode.NEXT_STEP and self._over.all():
            observations, infos = self.draw()
            rewards = np.zeros(self.num_envs, np.float32)
            return observations, rewards, ~ended, ~ended, self._with_masks(infos)
        last, rewards, outcomes = self.decide(actions)
        if self.autoreset_mode != AutoresetMode.SAME_STEP:
            return last, rewards, ended, ~ended, self._with_masks(outcomes)
        observations, infos = self.draw()
        final_obs = np.empty(self.num_envs, dtype=object)
        final_obs[:] = _separate(last)
        # TorchRL looks for the parts of a Dict observation in final_info
        final = {"final_obs": final_obs, "final_info": self._with_masks(outcomes | last)}
        return observations, rewards, ended, ~ended, self._with_masks(infos | final)

    def _with_masks(
        self, infos: dict[str, Any], renewed: NDArray[np.bool_] | None = None
    ) -> dict[str, Any]:
        """Pair every info with the mask of the environments that gave it, as gymnasium does."""
        mask = np.ones(self.num_envs, dtype=bool) if renewed is None else renewed
        return infos | {f"_{name}": mask for name in infos}

    def draw(
        self,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
        renewed: NDArray[np.bool_] | None = None,
    ) -> tuple[Observation, Info]:
        """Draw contexts and observe them: all, or only the `renewed` ones, bool [num_envs]."""
        if seed is not None:
            self._contexts.generator.manual_seed(seed)
        # as many contexts are drawn whatever is chosen, so that a seed stays a seed
        chosen, chosen_limits = chosen_context(
            options or {}, self.table, self.limit_key, self.num_envs
        )
        rows, limits = self._contexts(self.num_envs, chosen)
        if chosen_limits is not None:
            limits = chosen_limits
        if renewed is not None and self._current is not None:
            new = torch.from_numpy(renewed)
            rows = rows.where(new, self._current.rows)
            limits = limits.where(new, self._current.limits)
        self._current = self._look_up(rows, limits)
        self._over[... if renewed is None else renewed] = False
        return _copied(self._current.observations), _copied(self._current.infos)

    def decide(self, actions: Any) -> tuple[Observation, NDArray[Any], Info]:
        """Replay an action for each context.

        Returns:
            the observations once more; rewards, float32 [num_envs]; and the outcomes as infos.
        """
        if self._current is None or self._over.any():
            raise gymnasium.error.ResetNeeded(
                "call reset() before step(): every episode is one decision"
            )
        # actions as [n, 1, K] or [n, 1]
        rows, limits, observations, info, best = self._current
        if not self.knob_keys:
            actions = np.array(actions)  # faster than torch for lists and tuples
        grouped = self._replay.grouped(actions, self.num_envs)
        replayed = self._replay(rows, grouped, limits, self._contexts.generator)
        choice, _, accuracy, latency_ms = replayed
        outcome = self._outcome("", limits, choice, accuracy, latency_ms)
        self._over[:] = True
        rewards = replayed.reward[:, 0].numpy()
        return _copied(observations), rewards, _copied(info | best) | outcome

    def _look_up(self, rows: Tensor, limits: Tensor) -> _Contexts:
        """Return contexts [n] with what is observed of them and the best decisions."""
        # twice as fast as block[rows]
        observations = {
            name: block.index_select(0, rows).numpy() for name, block in self._features.items()
        }
        mask = self.table.mask.index_select(0, rows).numpy().view(np.int8)
        observations |= {self.limit_key: limits.numpy(), "mask": mask}
        infos = {"row": rows.numpy()}
        if self._replay.action == "configuration":
            infos["action_mask"] = mask
        rewards = self._replay.rewards
        best = oracle(rewards, rows, limits).unsqueeze(1)
        outcome = self._outcome("oracle_", limits, best, *rewards.outcome(rows, best))
        return _Contexts(rows, limits, observations, infos, outcome)

    def _outcome(
        self, who: str, limits: Tensor, choice: Tensor, accuracy: Tensor, latency_ms: Tensor
    ) -> Info:
        """Return decisions [n, 1] and their outcomes as infos, whose names begin with `who`."""
        # NumPy has less overhead than torch for the few numbers of one environment
        took_ms = latency_ms.numpy()[:, 0]
        info = {f"{who}accuracy": accuracy.numpy()[:, 0], f"{who}latency_ms": took_ms}
        if self.limit_key == "budget_ms":
            info[f"{who}violation"] = took_ms > limits.numpy()
        info[f"{who}configuration"] = self._configurations[choice.numpy()[:, 0]]
        return info


def _copied(blocks: Observation) -> Observation:
    return {name: values.copy() for name, values in blocks.items()}


@functools.cache
def _builtin() -> ProfileTable:
    """Read the built-in profile once.

    A forked process then has it too; it could not read it, because polars would use threads that a
    fork leaves behind.
    """
    from knobwise.envs.readers.builtin import builtin_profile

    return builtin_profile()


def _separate(observations: Observation) -> list[Observation]:
    """Take a batch of observations apart into those of each environment."""
    separate: list[Observation] = [{} for _ in observations["mask"]]
    for name, values in observations.items():
        for i, observation in enumerate(separate):
            # with the dots a number stays an array, of shape (), as its Box has it
            observation[name] = values[i, ...]
    return separate


def _box(block: Tensor) -> spaces.Box:
    """Return the space of a feature block.

    It includes 0, because TorchRL fills in zeros where there is nothing to observe.
    """
    low, high = torch.cat([block.flatten(), torch.zeros(1)]).aminmax()
    return spaces.Box(float(low), float(high) or 1.0, block.shape[1:])


def oracle(rewards: RewardTable, rows: Tensor, limits: Tensor) -> Tensor:
    """Find the best profiled configuration of each sample, int64 [n].

    It has the highest utility, and of equal ones the lowest latency; under the reward `priced` it
    has the highest accuracy − latency/worth instead. Of several measurements of a cell the mean
    counts.

    Args:
        rewards: of the table.
        rows: int64 [n], the samples.
        limits: float [n], budgets in ms; under `priced` the worth of a right answer in ms.
    """
    # an unprofiled cell counts as infinitely late: it gains nothing, and of the cells that gain
    # nothing it is the slowest
    latency = rewards.latency_ms.index_select(0, rows).nan_to_num_(torch.inf)
    measured = latency.unsqueeze(-1)
    if rewards.repeats_ms is not None:
        measured = rewards.repeats_ms.index_select(0, rows)
    accuracy = rewards.accuracy.index_select(0, rows)
    limits = limits.unsqueeze(1)
    if rewards.config.kind == "priced":
        gain = accuracy.nan_to_num() - measured.nanmean(-1).nan_to_num(torch.inf) / limits
    else:
        count = rewards.count
        if isinstance(count, Tensor):
            count = count.index_select(0, rows).clamp_min(1)
        gain = expected_utility(accuracy, measured, limits, count)
    beaten = (gain < gain.amax(1, keepdim=True)).to(latency.dtype)
    slowest = torch.finfo(latency.dtype).max
    # NumPy's argmin is five times as fast
    return torch.from_numpy(latency.add_(beaten, alpha=slowest).numpy().argmin(1))
