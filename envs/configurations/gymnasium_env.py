"""The same bandit as gymnasium environments: one context at a time for stepping by hand, and many at once."""

from __future__ import annotations

import itertools
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from knobwise.envs.configurations.budgets import BudgetEncoding, worths_range
from knobwise.envs.configurations.contexts import ContextSampler, limit_key
from knobwise.envs.configurations.replay import Replay
from knobwise.envs.configurations.reward import utility
from knobwise.envs.configurations.settings import BudgetConfig, RewardConfig
from knobwise.envs.tables.profile_table import ProfileTable

Observation = dict[str, NDArray[Any]]
Info = dict[str, NDArray[Any]]


class ConfigBanditEnv(gymnasium.Env[Observation, NDArray[Any]]):
    """Choose the knobs of a measured model for one input under a latency budget, and see the outcome.

    Description:
        A contextual bandit that replays a profile: no model runs, every outcome was measured before. Under a mean
        budget (`BudgetConfig(sense="mean")`) no request has a budget of its own; it is limited by the worth of a right
        answer, in ms, and the reward is accuracy − latency/worth.
    Action space:
        `MultiDiscrete(knob sizes)`: for each knob of `env.unwrapped.table.knobs` the index of its value.
    Observation space:
        `Dict` of one `Box` per feature block (`image_features`, `language_features`, …; a missing value is the
        column's median) and `budget`, the budget or worth as `BudgetEncoding` gives it.
    Rewards:
        `knobwise.envs.configurations.reward.reward`; by default `shaped`, under a mean budget `priced`.
    Starting state:
        A random sample and a random budget or worth.
    Episode end:
        After one step, always.
    Info:
        After reset: `sample_id`, `budget_ms`, `mask` (bool [C]: the configurations profiled for the sample; their
        actions are `env.unwrapped.table.configurations[mask]`). After a step also `accuracy`, `latency_ms`,
        `violation`, `configuration` (knob values by name), and the same four with the prefix `oracle_` for the best
        configuration. Under a mean budget there is `worth_ms` instead of `budget_ms` and no `violation`.
    Arguments:
        table: the profile; None for the built-in one. budget, reward: `BudgetConfig`, `RewardConfig`. rows: int64 [n],
        the samples to draw from; None for all. render_mode: None or "ansi".

    Raises:
        InputError: if the reward does not go with the sense of the budget, or an action was never profiled for the
            sample.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(
        self,
        table: ProfileTable | None = None,
        budget: BudgetConfig | None = None,
        reward: RewardConfig | str | None = None,
        rows: Tensor | None = None,
        render_mode: str | None = None,
    ) -> None:
        self._batch = ConfigBanditVectorEnv(1, table, budget, reward, rows)
        self.table, self.render_mode = self._batch.table, render_mode
        self.observation_space = self._batch.single_observation_space
        self.action_space = self._batch.single_action_space
        self._words = "Nothing yet: call reset()."

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw a sample and its budget or worth."""
        super().reset(seed=seed)
        observation, info = map(self._first, self._batch.draw(seed))
        words = "a right answer is worth" if self._batch.priced else "budget"
        limit = f"{words} {info[self._batch.limit_key]:.2f} ms"
        self._request = f"Sample {info['sample_id']}, {limit}"
        self._words = f"{self._request}: what will you set?"
        return observation, info

    def step(self, action: NDArray[Any]) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Set the knobs; the episode ends."""
        observations, rewards, infos = self._batch.decide(action)
        info = self._first(infos)
        for key in ("configuration", "oracle_configuration"):
            values = zip(self.table.knobs, info[key].tolist(), strict=True)
            info[key] = {knob.name: knob.values[value] for knob, value in values}
        reward, chosen, best = float(rewards[0]), self._summary(info, ""), self._summary(info, "oracle_")
        self._words = f"{self._request}.\nChosen: {chosen}; reward {reward:+.3f}.\nOracle: {best}."
        return self._first(observations), reward, True, False, info

    def render(self) -> str | None:
        """The last reset or step in words (`render_mode="ansi"`)."""
        return self._words if self.render_mode == "ansi" else None

    @staticmethod
    def _first(batch: Info) -> dict[str, Any]:
        # copies, because an observation must not share memory with the next one
        return {k: v[0].copy() if isinstance(v[0], np.ndarray) else v[0] for k, v in batch.items()}

    @staticmethod
    def _summary(info: dict[str, Any], prefix: str) -> str:
        knobs = ", ".join(f"{k} = {v}" for k, v in info[f"{prefix}configuration"].items())
        late = {None: "", True: ", over budget", False: ", within budget"}[info.get(f"{prefix}violation")]
        return f"{knobs}: accuracy {info[f'{prefix}accuracy']:.2f}, {info[f'{prefix}latency_ms']:.2f} ms{late}"


class ConfigBanditVectorEnv(VectorEnv[Observation, NDArray[Any], NDArray[Any]]):
    """Many contexts at once, as a gymnasium vector environment that resets in the same step.

    Spaces, rewards and infos are those of `ConfigBanditEnv` with a leading axis `num_envs`; `configuration` in the
    infos holds value indices, int64 [num_envs, K]. `step` returns the observations of the next contexts; those of the
    decisions are in `infos["final_obs"]`, an array of num_envs of them, and their outcomes in `infos["final_info"]`.
    """

    def __init__(
        self,
        num_envs: int = 1,
        table: ProfileTable | None = None,
        budget: BudgetConfig | None = None,
        reward: RewardConfig | str | None = None,
        rows: Tensor | None = None,
        render_mode: str | None = None,
    ) -> None:
        if table is None:
            from knobwise.envs.readers.builtin import builtin_profile

            table = builtin_profile()
        self.table, self.num_envs, self.render_mode = table, num_envs, render_mode
        self.autoreset_mode = AutoresetMode.SAME_STEP  # TorchRL's GymWrapper asks for it here
        self.metadata = {"render_modes": [], "autoreset_mode": self.autoreset_mode}
        self.limit_key = limit_key(budget)
        self.priced = self.limit_key == "worth_ms"
        self._sample_ids = np.array(table.sample_ids, dtype=object)
        self._replay = Replay(table, budget, reward)
        self._contexts = ContextSampler(table, budget or BudgetConfig(), rows, seed=None)
        latencies = table.latency_ms[table.mask]
        self._encoding = BudgetEncoding(worths_range(latencies) if self.priced else latencies)
        # a Box holds no NaN: here, and only here, a missing feature is its column's median
        self._features = {
            name: torch.where(block.isnan(), block.nanmedian(0).values.nan_to_num(), block)
            for name, block in table.features.items()
        }
        boxes = {k: spaces.Box(block.amin(0).numpy(), block.amax(0).numpy()) for k, block in self._features.items()}
        budget_box = spaces.Box(-4.0, 4.0, (self._encoding.width,))
        self.single_observation_space: Any = spaces.Dict({**boxes, "budget": budget_box})
        self.single_action_space: Any = spaces.MultiDiscrete(table.knob_sizes)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self._context: tuple[Tensor, Tensor] | None = None

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw contexts. One seed serves all of them; of a list the first counts."""
        seed = seed[0] if isinstance(seed, list) else seed
        super().reset(seed=seed)
        observations, infos = self.draw(seed)
        return observations, self._with_masks(infos)

    def step(
        self, actions: NDArray[Any]
    ) -> tuple[Observation, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Decide for every context, and go on to new ones."""
        last, rewards, outcomes = self.decide(actions)
        observations, infos = self.draw()
        final_obs = np.empty(self.num_envs, dtype=object)
        rows = zip(*last.values(), strict=True)
        final_obs[:] = list(map(dict, map(zip, itertools.repeat(tuple(last)), rows)))  # one dict for each, in C
        final = {"final_obs": final_obs, "final_info": self._with_masks(outcomes)}
        ended = np.ones(self.num_envs, dtype=bool)
        return observations, rewards, ended, ~ended, self._with_masks({**infos, **final})

    def _with_masks(self, infos: dict[str, Any]) -> dict[str, Any]:
        # gymnasium pairs every info with the mask of the environments that gave it, here always all
        everyone = np.ones(self.num_envs, dtype=bool)
        return {**infos, **{f"_{name}": everyone for name in infos}}

    def draw(self, seed: int | None = None) -> tuple[Observation, Info]:
        """Draw contexts: their observations, and what is known of them before a decision."""
        if seed is not None:
            self._contexts.generator.manual_seed(seed)
        self._context = self._contexts(self.num_envs)
        return self._observe(*self._context), self._describe(*self._context)

    def decide(self, actions: NDArray[Any]) -> tuple[Observation, NDArray[Any], Info]:
        """Decide by actions [num_envs, K]: the same observations again, rewards float32 [num_envs], and infos."""
        if self._context is None:
            raise gymnasium.error.ResetNeeded("call reset() before step(): every episode is one decision")
        rows, limits = self._context
        knobs = torch.as_tensor(np.asarray(actions), dtype=torch.int64).reshape(len(rows), len(self.table.knobs))
        replayed = self._replay(rows, knobs[:, None], limits)
        chosen = replayed.configuration[:, 0]
        info = self._describe(rows, limits)
        for prefix, choice in (("", chosen), ("oracle_", oracle(self.table, rows, limits, self.priced))):
            accuracy, latency = self._replay.rewards.outcome(rows, choice.unsqueeze(1))
            info[f"{prefix}accuracy"] = accuracy.squeeze(1).numpy()
            info[f"{prefix}latency_ms"] = latency.squeeze(1).numpy()
            if not self.priced:
                info[f"{prefix}violation"] = info[f"{prefix}latency_ms"] > info["budget_ms"]
            info[f"{prefix}configuration"] = self.table.configurations.index_select(0, choice).numpy()
        self._context = None
        return self._observe(rows, limits), replayed.reward[:, 0].numpy(), info

    def _observe(self, rows: Tensor, limits: Tensor) -> Observation:
        blocks = {name: block.index_select(0, rows).numpy() for name, block in self._features.items()}
        return {**blocks, "budget": self._encoding(limits).numpy()}

    def _describe(self, rows: Tensor, limits: Tensor) -> Info:
        mask = self.table.mask.index_select(0, rows).numpy()
        return {"sample_id": self._sample_ids[rows.numpy()], self.limit_key: limits.numpy(), "mask": mask}


def oracle(table: ProfileTable, rows: Tensor, limits: Tensor, priced: bool = False) -> Tensor:
    """The best profiled configuration of each sample, int64 [n]: highest utility, then lowest latency. The limits,
    float [n], are budgets in ms; or if `priced`, worths of a right answer in ms, and best is the highest accuracy −
    latency/worth."""
    # an unprofiled cell counts as infinitely late: it gains nothing, and any other cell that gains nothing is faster
    latency = table.latency_ms.index_select(0, rows).nan_to_num(torch.inf)
    accuracy = table.accuracy.index_select(0, rows)
    limits = limits.unsqueeze(1)
    gain = accuracy.nan_to_num() - latency / limits if priced else utility(accuracy, latency, limits)
    return latency.masked_fill(gain < gain.amax(1, keepdim=True), torch.inf).argmin(1)
