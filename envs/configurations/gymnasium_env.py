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
from knobwise.envs.configurations.contexts import ContextSampler, check_profiled, limit_key, reward_under
from knobwise.envs.configurations.reward import RewardTable, utility
from knobwise.envs.configurations.settings import BudgetConfig, RewardConfig
from knobwise.envs.tables.profile_table import ProfileTable

Observation = dict[str, NDArray[Any]]
Info = dict[str, NDArray[Any]]


class _Replay:
    """What both environments share: n contexts at a time, their observations and outcomes."""

    def __init__(
        self, table: ProfileTable | None, budget: BudgetConfig | None, reward: RewardConfig | None, rows: Tensor | None
    ) -> None:
        if table is None:
            from knobwise.envs.readers.builtin import builtin_profile

            table = builtin_profile()
        self.table = table
        self.sample_ids = np.array(table.sample_ids, dtype=object)
        self.limit_key = limit_key(budget)
        self.priced = self.limit_key == "worth_ms"
        self.rewards = RewardTable(table, reward_under(budget, reward))
        # gymnasium expects that without a seed for reset() no two environments draw the same
        self.contexts = ContextSampler(table, budget or BudgetConfig(), rows, seed=torch.Generator().seed())
        latencies = table.latency_ms[table.mask]
        self.encoding = BudgetEncoding(worths_range(latencies) if self.priced else latencies)
        # a Box holds no NaN: here, and only here, a missing feature is its column's median
        self.features = {
            name: torch.where(block.isnan(), block.nanmedian(0).values.nan_to_num(), block)
            for name, block in table.features.items()
        }
        boxes = {
            name: spaces.Box(block.amin(0).numpy(), block.amax(0).numpy()) for name, block in self.features.items()
        }
        self.observation_space: Any = spaces.Dict({**boxes, "budget": spaces.Box(-4.0, 4.0, (self.encoding.width,))})
        self.action_space = spaces.MultiDiscrete(table.knob_sizes)
        self.context: tuple[Tensor, Tensor] | None = None

    def reset(self, count: int, seed: int | None = None) -> tuple[Observation, Info]:
        """Draw `count` contexts: their observations, and what is known of them."""
        if seed is not None:
            self.contexts.generator.manual_seed(seed)
        self.context = self.contexts(count)
        return self.observe(*self.context), self.describe(*self.context)

    def step(self, actions: NDArray[Any]) -> tuple[Observation, NDArray[Any], Info]:
        """Decide by actions [n, K]: the same observations again, rewards float32 [n], and infos."""
        if self.context is None:
            raise gymnasium.error.ResetNeeded("call reset() before step(): every episode is one decision")
        context = self.context
        reward, info = self.outcome(*context, torch.as_tensor(np.asarray(actions), dtype=torch.int64))
        self.context = None
        return self.observe(*context), reward.numpy(), info

    def observe(self, rows: Tensor, limits: Tensor) -> Observation:
        blocks = {name: block.index_select(0, rows).numpy() for name, block in self.features.items()}
        return {**blocks, "budget": self.encoding(limits).numpy()}

    def describe(self, rows: Tensor, limits: Tensor) -> Info:
        """What is known of contexts before a decision."""
        return {
            "sample_id": self.sample_ids[rows.numpy()],
            self.limit_key: limits.numpy(),
            "mask": self.table.mask.index_select(0, rows).numpy(),
        }

    def outcome(self, rows: Tensor, limits: Tensor, actions: Tensor) -> tuple[Tensor, Info]:
        """Rewards float32 [n] and infos for actions int64 [n, K]."""
        chosen = self.table.find(actions.reshape(len(rows), len(self.table.knobs)))
        check_profiled(self.table, rows, chosen[:, None])
        best = oracle(self.table, rows, limits, self.priced)
        info = self.describe(rows, limits)
        for prefix, choice in (("", chosen), ("oracle_", best)):
            accuracy, latency = self.rewards.outcome(rows, choice.unsqueeze(1))
            info[f"{prefix}accuracy"] = accuracy.squeeze(1).numpy()
            info[f"{prefix}latency_ms"] = latency.squeeze(1).numpy()
            if not self.priced:
                info[f"{prefix}violation"] = info[f"{prefix}latency_ms"] > info["budget_ms"]
            info[f"{prefix}configuration"] = self.table.configurations.index_select(0, choice).numpy()
        return self.rewards.chosen(rows, chosen[:, None], limits).squeeze(1), info


def oracle(table: ProfileTable, rows: Tensor, limits: Tensor, priced: bool = False) -> Tensor:
    """The best profiled configuration of each sample, int64 [n]: highest utility, then lowest latency.

    The limits, float [n], are budgets in ms; or if `priced`, worths of a right answer in ms, and best is the highest
    accuracy − latency/worth.
    """
    # an unprofiled cell counts as infinitely late: it gains nothing, and any other cell that gains nothing is faster
    latency = table.latency_ms.index_select(0, rows).nan_to_num(torch.inf)
    accuracy = table.accuracy.index_select(0, rows)
    if priced:
        gain = accuracy.nan_to_num() - latency / limits.unsqueeze(1)
    else:
        gain = utility(accuracy, latency, limits.unsqueeze(1))
    return latency.masked_fill(gain < gain.amax(1, keepdim=True), torch.inf).argmin(1)


class ConfigBanditEnv(gymnasium.Env[Observation, NDArray[Any]]):
    """Choose the knobs of a measured model for one input under a latency budget, and see the outcome.

    Under a mean budget (`BudgetConfig(sense="mean")`) no request has a budget of its own; it is limited by the worth of
    a right answer, in ms, and the reward is accuracy − latency/worth.

    Description:
        A contextual bandit that replays a profile: no model runs, every outcome was measured before.
    Action space:
        `MultiDiscrete(knob sizes)`: for each knob of `env.unwrapped.table.knobs` the index of its value.
    Observation space:
        `Dict` of one `Box` per feature block (`image_features`, `language_features`, …; a missing value is the
        column's median) and `budget`, the encoded budget or worth
        (`knobwise.envs.configurations.budgets.BudgetEncoding`).
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
        configuration. Under a mean budget there is `worth_ms` instead of `budget_ms` and no `violation`, and the best
        configuration is the one with the highest accuracy − latency/worth.
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
        reward: RewardConfig | None = None,
        rows: Tensor | None = None,
        render_mode: str | None = None,
    ) -> None:
        self._replay = _Replay(table, budget, reward, rows)
        self.table = self._replay.table
        self.observation_space = self._replay.observation_space
        self.action_space = self._replay.action_space
        self.render_mode = render_mode
        self._words = "Nothing yet: call reset()."

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw a sample and its budget or worth."""
        super().reset(seed=seed)
        observation, info = map(self._first, self._replay.reset(1, seed))
        self._words = f"{self._request(info)}: what will you set?"
        return observation, info

    def step(self, action: NDArray[Any]) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Set the knobs; the episode ends."""
        observations, rewards, infos = self._replay.step(action)
        info = self._first(infos)
        for key in ("configuration", "oracle_configuration"):
            values = zip(self.table.knobs, info[key].tolist(), strict=True)
            info[key] = {knob.name: knob.values[value] for knob, value in values}
        self._words = self._summary(info, float(rewards[0]))
        return self._first(observations), float(rewards[0]), True, False, info

    def render(self) -> str | None:
        """The last reset or step in words (`render_mode="ansi"`)."""
        return self._words if self.render_mode == "ansi" else None

    @staticmethod
    def _first(batch: Info) -> dict[str, Any]:
        # copies, because an observation must not share memory with the next one
        return {k: v[0].copy() if isinstance(v[0], np.ndarray) else v[0] for k, v in batch.items()}

    @staticmethod
    def _request(info: dict[str, Any]) -> str:
        if "worth_ms" in info:
            return f"Sample {info['sample_id']}, a right answer is worth {info['worth_ms']:.2f} ms"
        return f"Sample {info['sample_id']}, budget {info['budget_ms']:.2f} ms"

    @classmethod
    def _summary(cls, info: dict[str, Any], reward: float) -> str:
        def words(prefix: str) -> str:
            knobs = ", ".join(f"{k} = {v}" for k, v in info[f"{prefix}configuration"].items())
            outcome = f"{knobs}: accuracy {info[f'{prefix}accuracy']:.2f}, {info[f'{prefix}latency_ms']:.2f} ms"
            if "worth_ms" in info:
                return outcome
            return f"{outcome}, {'over budget' if info[f'{prefix}violation'] else 'within budget'}"

        return f"{cls._request(info)}.\nChosen: {words('')}; reward {reward:+.3f}.\nOracle: {words('oracle_')}."


class ConfigBanditVectorEnv(VectorEnv[Observation, NDArray[Any], NDArray[Any]]):
    """Many contexts at once, as a gymnasium vector environment that resets in the same step.

    Spaces, rewards and infos are those of `ConfigBanditEnv` with a leading axis `num_envs`; `configuration` in the
    infos holds value indices, int64 [num_envs, K]. `step` returns the observations of the next contexts; those of the
    decisions are in `infos["final_obs"]` (an array of num_envs observations, as gymnasium keeps them), their outcomes
    in `infos["final_info"]`.
    """

    def __init__(
        self,
        num_envs: int = 1,
        table: ProfileTable | None = None,
        budget: BudgetConfig | None = None,
        reward: RewardConfig | None = None,
        rows: Tensor | None = None,
        render_mode: str | None = None,
    ) -> None:
        self._replay = _Replay(table, budget, reward, rows)
        self.table = self._replay.table
        self.num_envs, self.render_mode = num_envs, render_mode
        self.autoreset_mode = AutoresetMode.SAME_STEP  # TorchRL's GymWrapper asks for it here
        self.metadata = {"render_modes": [], "autoreset_mode": self.autoreset_mode}
        self.single_observation_space = self._replay.observation_space
        self.single_action_space = self._replay.action_space
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw contexts. One seed serves all of them; of a list the first counts."""
        seed = seed[0] if isinstance(seed, list) else seed
        super().reset(seed=seed)
        observations, infos = self._replay.reset(self.num_envs, seed)
        return observations, self._with_masks(infos)

    def step(
        self, actions: NDArray[Any]
    ) -> tuple[Observation, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Decide for every context, and go on to new ones."""
        last, rewards, outcomes = self._replay.step(actions)
        observations, infos = self._replay.reset(self.num_envs)
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
