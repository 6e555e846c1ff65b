"""The configuration bandit as a gymnasium vector environment: many contexts at once."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Sequence
from operator import setitem
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.envs.bandit.contexts import ContextSampler, chosen_context
from knobwise.envs.bandit.replay import Replay
from knobwise.envs.bandit.reward import RewardTable, share_on_time
from knobwise.envs.bandit.rule_choice import RULES, check_limits, rule_of
from knobwise.envs.bandit.settings import BudgetConfig, RewardConfig
from knobwise.envs.tables.cells import Cells
from knobwise.envs.tables.profile_table import ProfileTable

if TYPE_CHECKING:
    from PIL import Image

Observation = dict[str, NDArray[Any]]
Info = dict[str, NDArray[Any]]
Inputs = Callable[[str], tuple[str, "Image.Image | NDArray[Any] | None"]]
"""A sample id → its question, and its picture as a PIL image or an array (None if it has none)."""
_PROCESS = os.getpid()
"""The process that imported this module; a process forked from it has another id."""


def work_alone_if_forked() -> None:
    """Have torch use one thread in a forked process, where it would wait for threads that the fork
    left behind."""
    if os.getpid() != _PROCESS:
        torch.set_num_threads(1)


class LimitBox(spaces.Box):
    """The space of a limit, in ms: its bounds are 0 and the largest limit that is drawn, so that
    wrappers can scale by them. It also contains what `reset(options=…)` may choose beyond."""

    def __init__(self, largest: float) -> None:
        # a bit more, for rounding
        high = min(1.0001 * largest, float(np.finfo(np.float32).max))
        super().__init__(0.0, high, (1,), np.float32)

    def contains(self, x: Any) -> bool:
        # cut down to the bounds, it must be in the box
        return super().contains(np.minimum(x, self.high) if isinstance(x, np.ndarray) else x)


class _Contexts(NamedTuple):
    """The contexts of n environments."""

    rows: Tensor
    """int64 [n]."""
    limits: Tensor
    """float32 [n], in ms."""


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
        num_envs: int,
        table: ProfileTable,
        budget: BudgetConfig | None = None,
        reward: RewardConfig | str | None = None,
        rows: Tensor | Sequence[int] | None = None,
        render_mode: str | None = None,
        inputs: Inputs | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        cells: Cells | None = None,
        **options: Any,
    ) -> None:
        work_alone_if_forked()
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
        self._replay = Replay(table, budget, reward, cells=cells, **options)
        self._mask = self._replay.cells.mask
        self._contexts = ContextSampler(table, budget, rows, seed=None, cells=self._replay.cells)
        # of cells that the caller gives too it is known what they cost
        check_limits(table, budget)
        self._above_limits = rule_of(budget).over(table)
        # a Box holds no NaN: here, and only here, a missing feature is its column's median
        self._features = {
            name: torch.where(block.isnan(), block.nanmedian(0).values.nan_to_num(), block)
            for name, block in table.features.items()
        }
        self.limit_key = rule_of(budget).limit_key
        self.knob_keys = self._replay.actions.keys
        blocks: dict[str, spaces.Space[Any]] = {
            name: _box(block) for name, block in self._features.items()
        }
        blocks[self.limit_key] = LimitBox(self._contexts.budgets.largest)
        # skrl knows no MultiBinary
        blocks["mask"] = spaces.Box(0, 1, (table.num_configurations,), np.int8)
        self.single_observation_space: Any = spaces.Dict(blocks)
        self.single_action_space: Any = self._actions()
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._current: _Contexts | None = None
        # whose episode has ended
        self._over = np.zeros(num_envs, dtype=bool)

    def _actions(self) -> spaces.Space[Any]:
        """Describe the action of one environment: a knob index each (MultiDiscrete, or a Dict by
        knob), or one of C configurations."""
        sizes = self.table.knob_sizes
        if self.knob_keys:
            knobs = zip(self.knob_keys, sizes, strict=True)
            return spaces.Dict({name: spaces.Discrete(size) for name, size in knobs})
        if not self._replay.actions.by_knobs:
            sizes = [self.table.num_configurations]
        # TorchRL's GymWrapper cannot step a MultiDiscrete of one number
        return spaces.Discrete(sizes[0]) if len(sizes) == 1 else spaces.MultiDiscrete(sizes)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw contexts. One seed serves all of them. Of several each environment gets its own, and
        the context that `ConfigBanditEnv` draws by it; what is drawn later follows from the first.

        Raises:
            InputError: there are not as many seeds as environments, or they are no seeds.
        """
        seeds = None
        if isinstance(seed, (Sequence, np.ndarray)):
            seeds = self._seeds(seed)
            seed = None
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
        observations, infos = self.draw(seed, options, mask, seeds)
        return observations, self._with_masks(infos, mask)

    def _seeds(self, seeds: Sequence[int | None] | NDArray[Any]) -> list[int | None]:
        """Return the seeds of all environments, None where one is to draw on."""
        numbers = [None if number is None else int(number) for number in seeds]
        if (
            len(numbers) != self.num_envs
            or min((n for n in numbers if n is not None), default=0) < 0
        ):
            raise InputError(
                f"reset: seed={seeds!r}: must be one seed from 0 on, or {self.num_envs} of them, "
                "one for each environment (None for any)"
            )
        return numbers

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
        seeds: Sequence[int | None] | None = None,
    ) -> tuple[Observation, Info]:
        """Draw contexts and observe them: all, or only the `renewed` ones, bool [num_envs].

        `seeds` are those of the environments, None for one that draws on.
        """
        if seed is not None:
            self._contexts.generator.manual_seed(seed)
        # as many contexts are drawn whatever is chosen, so that a seed stays a seed
        chosen, chosen_limits = chosen_context(
            options or {}, self.table, self.limit_key, self.num_envs
        )
        rows, limits = self._contexts(self.num_envs, chosen)
        if seeds is not None:
            rows, limits = self._by_seeds(seeds, rows, limits, chosen)
        if chosen_limits is not None:
            limits = chosen_limits
        if renewed is not None and self._current is not None:
            new = torch.from_numpy(renewed)
            rows = rows.where(new, self._current.rows)
            limits = limits.where(new, self._current.limits)
        self._current = _Contexts(rows, limits)
        self._over[... if renewed is None else renewed] = False
        return self._described(self._current)

    def _described(self, contexts: _Contexts) -> tuple[Observation, Info]:
        """Return the observations of contexts, and their infos before a decision.

        The arrays are new, because the caller may change them.
        """
        rows, limits = contexts
        # twice as fast as block[rows]
        observations = {
            name: block.index_select(0, rows).numpy() for name, block in self._features.items()
        }
        mask = self._mask.index_select(0, rows).numpy().view(np.int8)
        observations |= {self.limit_key: limits.numpy()[:, None].copy(), "mask": mask}
        infos = {"row": rows.numpy().copy()}
        if not self._replay.actions.by_knobs:
            infos["action_mask"] = mask.copy()
        return observations, infos

    def _by_seeds(
        self, seeds: Sequence[int | None], rows: Tensor, limits: Tensor, chosen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return contexts [n] of which those with a seed are drawn anew by it."""
        generator = self._contexts.generator
        rows = rows.clone()
        limits = limits.clone()
        drawn_on = generator.get_state()
        # the first comes last, so that the generator goes on from it
        for i, seed in reversed([*enumerate(seeds)]):
            if seed is not None:
                generator.manual_seed(seed)
                row = None if chosen is None else chosen[i : i + 1]
                rows[i : i + 1], limits[i : i + 1] = self._contexts(1, row)
        if None in seeds:
            # else the others would draw the same each time
            generator.set_state(drawn_on)
        return rows, limits

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
        rows, limits = self._current
        if not self.knob_keys:
            actions = np.array(actions)  # faster than torch for lists and tuples
        grouped = self._replay.actions.grouped(actions, self.num_envs)
        replayed = self._replay(rows, grouped, limits, self._contexts.generator)
        rewards = self._replay.rewards
        best = oracle(rewards, rows, limits).unsqueeze(1)
        observations, infos = self._described(self._current)
        outcomes = infos | self._outcome(
            "", self._current, replayed.configuration, replayed.accuracy, replayed.latency_ms
        )
        accuracy, latency_ms = rewards.outcome(rows, best)
        outcomes |= self._outcome("oracle_", self._current, best, accuracy, latency_ms)
        self._over[:] = True
        return observations, replayed.reward[:, 0].numpy(), outcomes

    def _outcome(
        self,
        who: str,
        contexts: _Contexts,
        choice: Tensor,
        accuracy: Tensor,
        latency_ms: Tensor,
    ) -> Info:
        """Return decisions [n, 1] and their outcomes as infos, whose names begin with `who`."""
        # NumPy has less overhead than torch for the few numbers of one environment
        took_ms = latency_ms.numpy()[:, 0]
        info = {f"{who}accuracy": accuracy.numpy()[:, 0], f"{who}latency_ms": took_ms}
        if self.limit_key == "budget_ms":
            late = took_ms > contexts.limits.numpy()
            if self._above_limits is not None:
                late |= self._above_limits[contexts.rows, choice[:, 0]].numpy()
            info[f"{who}violation"] = late
        info[f"{who}configuration"] = self._configurations[choice.numpy()[:, 0]]
        return info


def _separate(observations: Observation) -> list[Observation]:
    """Take a batch of observations apart into those of each environment, faster than gymnasium's
    `iterate`."""
    empty = dict.fromkeys(observations)
    separate: list[Any] = [empty.copy() for _ in observations["mask"]]
    for name, values in observations.items():
        # a loop that runs in C
        deque(map(setitem, separate, itertools.repeat(name), values), maxlen=0)
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
    has the highest accuracy − latency/value instead. Of several measurements of a cell the mean
    counts.

    Args:
        rewards: of the table.
        rows: int64 [n], the samples.
        limits: float [n], budgets in ms; under `priced` the value of a right answer in ms.
    """
    # an unprofiled cell counts as infinitely late: it gains nothing, and of the cells that gain
    # nothing it is the slowest
    latency = rewards.latency_ms.index_select(0, rows)
    accuracy = rewards.accuracy.index_select(0, rows)
    if rewards.has_gaps:
        latency.nan_to_num_(torch.inf)
        accuracy.nan_to_num_()
    measured = latency.unsqueeze(-1)
    if rewards.repeats_ms is not None:
        measured = rewards.repeats_ms.index_select(0, rows)
    limits = limits.unsqueeze(1)
    if rewards.rule is not None:
        gain = rewards.rule.mean_utility(accuracy, measured, limits)
    elif not RULES[rewards.kind.constraint].late:
        gain = accuracy - measured.nanmean(-1).nan_to_num(torch.inf) / limits
    else:
        count = rewards.count
        if isinstance(count, Tensor):
            count = count.index_select(0, rows).clamp_min(1)
        # the expected utility, in place
        gain = share_on_time(measured, limits, count).mul_(accuracy)
    beaten = gain.lt_(gain.amax(1, keepdim=True))  # as numbers, which is faster than a conversion
    slowest = torch.finfo(latency.dtype).max
    # NumPy's argmin is five times as fast
    return torch.from_numpy(latency.add_(beaten, alpha=slowest).numpy().argmin(1))
