"""The selector's bandit as a gymnasium environment: one query at a time, for stepping by hand."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.demonstrations.settings import DemonstrationRewardConfig, GroupConfig
from knobwise.envs.demonstrations.torchrl_env import DemonstrationBandit, Scorer

Observation = dict[str, NDArray[Any]]


class DemonstrationBanditEnv(gymnasium.Env[Observation, NDArray[Any]]):
    """Choose the demonstrations that a model sees before a query, in order, and see whether it answers right.

    Description:
        A contextual bandit whose action is a whole sequence: a recorded one, or with a scorer any.
    Action space:
        `MultiDiscrete([N] * shots)`: places in the query's pool, in order. A repeated place, or one without a candidate
        (also −1), adds no demonstration, so a sequence may be shorter.
    Observation space:
        `Dict` of `query` (`Box` [d], its embedding), `pool` (`Box` [N, d], the candidates' embeddings, 0 where there is
        none) and `mask` (`MultiBinary` N, 1 where there is one).
    Rewards:
        `knobwise.envs.demonstrations.reward`; 0 for no demonstration at all.
    Starting state:
        The next query of a pass over all of them, in a new random order each pass.
    Episode end:
        After one step, always.
    Info:
        After reset: `query_id`, and without a scorer `sequences`, the recorded ones, int64 [n, shots] (−1 after the
        end). After a step also `sequence` (the places used), `vqa_correct` (NaN if unknown), and without a scorer
        `oracle_sequence` and `oracle_reward` of the best recorded sequence, if there is one.
    Arguments:
        table: queries, pools, recorded sequences. shots, reward, rows, scorer, groups: as for `DemonstrationBandit`.
        render_mode: None or "ansi".

    Raises:
        InputError: as `DemonstrationBandit`; by `step`, if the action has another shape, or without a scorer if the
            sequence was never recorded.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(
        self,
        table: BeamTable,
        shots: int | None = None,
        reward: DemonstrationRewardConfig | None = None,
        rows: Tensor | None = None,
        scorer: Scorer | None = None,
        groups: GroupConfig | None = None,
        render_mode: str | None = None,
    ) -> None:
        # gymnasium expects that without a seed for reset() no two environments draw the same
        seed = torch.Generator().seed()
        self._bandit = DemonstrationBandit(
            table, shots=shots, reward=reward, rows=rows, seed=seed, scorer=scorer, groups=groups
        )
        self.table, self.render_mode = self._bandit.table, render_mode
        n, d = self.table.pool.shape[1], self.table.queries.shape[1]
        largest = [float(x.abs().amax()) for x in (self.table.queries, self.table.candidates)]
        query, pool = spaces.Box(-largest[0], largest[0], (d,)), spaces.Box(-largest[1], largest[1], (n, d))
        self.observation_space: Any = spaces.Dict({"query": query, "pool": pool, "mask": spaces.MultiBinary(n)})
        self.action_space = spaces.MultiDiscrete([n] * self._bandit.shots)
        self._row: int | None = None
        self._words = "Nothing yet: call reset()."

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Go on to the next query; a seed starts the passes anew."""
        super().reset(seed=seed)
        if seed is not None:
            self._bandit.set_seed(seed)
        self._row = int(self._bandit.reset()["row"])
        info = self._describe(self._row)
        self._words = f"Query {info['query_id']}: which demonstrations will you show?"
        return self._observe(self._row), info

    def step(self, action: NDArray[Any]) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Show the demonstrations; the episode ends."""
        if self._row is None:
            raise gymnasium.error.ResetNeeded("call reset() before step(): every episode is one decision")
        row, size, places = self._row, int(self.table.pool_mask[self._row].sum()), np.asarray(action)
        if places.shape != self.action_space.shape:
            expected = self.action_space.shape
            raise InputError(f"the action has shape {places.shape}, expected {expected}: places in the pool")
        sequence = list(dict.fromkeys(place for place in places.tolist() if 0 <= place < size))
        group = torch.full(self._bandit.action_spec.shape, -1)  # the other sequences of the group stay empty
        group[0, 0, : len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
        context = self._bandit.observation_spec.zero().update({"row": torch.tensor([row]), "action": group})
        outcome = self._bandit.step(context)["next"]
        reward, correct = float(outcome["reward"][0, 0]), float(outcome["vqa_correct"][0, 0])
        info = self._describe(row) | {"sequence": np.array(sequence, dtype=np.int64), "vqa_correct": correct}
        answer = {1.0: "right", 0.0: "wrong"}.get(correct, "unknown")
        self._words = f"Query {info['query_id']}.\nShown: {sequence}; answer {answer}, reward {reward:+.3f}."
        if self._bandit.scorer is None and len(info["sequences"]):
            rewards = self._bandit.rewards[row][self.table.beam_mask[row]]
            best, most = info["sequences"][int(rewards.argmax())], float(rewards.max())
            info |= {"oracle_sequence": best[best >= 0], "oracle_reward": most}
            self._words += f"\nBest recorded: {best[best >= 0].tolist()}; reward {most:+.3f}."
        self._row = None
        return self._observe(row), reward, True, False, info

    def render(self) -> str | None:
        """The last reset or step in words (`render_mode="ansi"`)."""
        return self._words if self.render_mode == "ansi" else None

    def _observe(self, row: int) -> Observation:
        # copies, because an observation must not share memory with the next one
        query, mask = self.table.queries[row].numpy().copy(), self.table.pool_mask[row]
        pool = self.table.candidates[self.table.pool[row].clamp_min(0)] * mask.unsqueeze(1)
        return {"query": query, "pool": pool.numpy(), "mask": mask.numpy().astype(np.int8)}

    def _describe(self, row: int) -> dict[str, Any]:
        """What is known of the query before a decision."""
        info: dict[str, Any] = {"query_id": self.table.query_ids[row]}
        if self._bandit.scorer is None:
            info["sequences"] = self.table.sequences[row][self.table.beam_mask[row]].numpy()
        return info
