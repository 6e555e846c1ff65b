"""The selector's bandit as a gymnasium environment: one query at a time, for stepping by hand."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.demonstrations.torchrl_env import DemonstrationBandit

Observation = dict[str, NDArray[Any]]


class DemonstrationBanditEnv(gymnasium.Env[Observation, NDArray[Any]]):
    """Choose the demonstrations that a model sees before a query, and see if it answers right.

    A contextual bandit whose action is a whole sequence: a recorded one, or with a scorer any.
    Every episode ends after one step.

    Action space: `MultiDiscrete([N] * shots)`: positions in the query's pool, in order. Repeated
    or empty positions (also −1) are skipped, so a sequence may be shorter. With
    `action="sequence"`, which needs recorded ones, `Discrete(B)`: the index of one of them, which
    `info["action_mask"]` masks exactly.

    Observation space: `Dict` of `query` (`Box` [d], its embedding), `pool` (`Box` [N, d], the
    candidates' embeddings, 0 where there is none) and `mask` (`Box` of int8 [N], 1 where there is
    one).

    Rewards: see `knobwise.envs.demonstrations.reward`; 0 for no demonstration at all.

    Starting state: the next query of a pass over all of them, in a new random order each pass; or
    the one that `reset(options=…)` names by `row` or by `query_id`, outside the passes.

    Info holds numbers alone, because TorchRL reads them all. After reset: `row`
    (`env.unwrapped.table.query_ids[row]` is the query's id), and without a scorer `sequences`, the
    recorded ones, int64 [B, shots] (−1 after the end, and after the last); with `action="sequence"`
    also `action_mask`, int8 [B], 1 for each of them. After a step also `sequence` (what was
    replayed or scored, int64 [shots]), `vqa_correct` (NaN if unknown), and without a scorer
    `oracle_sequence` and `oracle_reward` of the best recorded sequence (−1 and NaN if there is
    none).

    Args:
        table: queries, pools, recorded sequences.
        render_mode: None or "ansi".
        **options: `shots`, `reward`, `rows`, `scorer`, `groups`, `unprofiled`, `action`, as for
            `DemonstrationBandit`.

    Raises:
        InputError: as `DemonstrationBandit`; by `reset`, for options that do not exist; by `step`,
            if the action has another shape, or under `unprofiled="error"` if the sequence was never
            recorded.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(self, table: BeamTable, *, render_mode: str | None = None, **options: Any) -> None:
        self._bandit = DemonstrationBandit(table, **options)
        self.table = self._bandit.table
        self.render_mode = render_mode
        n = self.table.pool.shape[1]
        d = self.table.queries.shape[1]
        # embeddings may have any sign
        bound = float(torch.cat([self.table.queries, self.table.candidates]).abs().amax())
        self.observation_space: Any = spaces.Dict(
            query=spaces.Box(-bound, bound, (d,)),
            pool=spaces.Box(-bound, bound, (n, d)),
            mask=spaces.Box(0, 1, (n,), np.int8),
        )
        self.action_space: Any = spaces.MultiDiscrete([n] * self._bandit.shots)
        if self._bandit.by_index:
            self.action_space = spaces.Discrete(self.table.num_beams)
        self._row: int | None = None
        self._text = ""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Go on to the next query, or to that of `options`; a seed starts the passes anew."""
        super().reset(seed=seed)
        if seed is not None:
            self._bandit.set_seed(seed)
        if options:
            self._row = self._row_of(options)
        else:
            self._row = int(self._bandit.contexts())
        query = self.table.query_ids[self._row]
        self._text = f"Query {query}: which demonstrations will you show?"
        return self._observe(self._row)

    def step(self, action: NDArray[Any]) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Show the demonstrations; the episode ends."""
        if self._row is None:
            raise gymnasium.error.ResetNeeded(
                "call reset() before step(): every episode is one decision"
            )
        outcome = self._bandit.decide(
            torch.tensor([self._row]), torch.as_tensor(np.asarray(action))
        )
        reward = float(outcome.reward)
        correct = float(outcome.correct)
        sequence = outcome.sequences[0, 0].numpy()
        # what was shown, and what came of it
        observation, info = self._observe(self._row)
        info |= {"sequence": sequence, "vqa_correct": correct}
        answer = {1.0: "right", 0.0: "wrong"}.get(correct, "unknown")
        self._text = (
            f"Query {self.table.query_ids[self._row]}, shown {sequence[sequence >= 0].tolist()}: "
            f"answer {answer}, reward {reward:+.3f}."
        )
        # the best recorded sequence, for comparison
        if self._bandit.scorer is None:
            rewards = self._bandit.rewards[self._row]
            rewards = rewards.where(self.table.beam_mask[self._row], torch.nan)
            best = int(rewards.nan_to_num(-torch.inf).argmax())
            oracle = info["sequences"][best].copy()
            info |= {"oracle_sequence": oracle, "oracle_reward": float(rewards[best])}
            places = oracle[oracle >= 0].tolist()
            self._text += f"\nBest recorded: {places}; reward {rewards[best]:+.3f}."
        self._row = None
        return observation, reward, True, False, info

    def render(self) -> str | None:
        """Return the last reset or step in words (`render_mode="ansi"`)."""
        if self.render_mode == "ansi":
            return self._text
        return None

    def _observe(self, row: int) -> tuple[Observation, dict[str, Any]]:
        """Return the observation, and the info that is known before a decision."""
        batch = self._bandit.observe(torch.tensor([row]))
        observed = {name: block[0].numpy() for name, block in batch.items()}
        info: dict[str, Any] = {"row": row}
        if self._bandit.scorer is None:
            info["sequences"] = observed["sequences"]
        if self._bandit.by_index:
            info["action_mask"] = observed["group_mask"].astype(np.int8)
        mask = observed["mask"].astype(np.int8)
        return {"query": observed["query"], "pool": observed["pool"], "mask": mask}, info

    def _row_of(self, options: dict[str, Any]) -> int:
        """Return the row of the query that the options of `reset` name."""
        ids = self.table.query_ids
        match options:
            case {"query_id": query} if len(options) == 1 and query in ids:
                return ids.index(query)
            case {"row": int() | np.integer() as row} if len(options) == 1 and 0 <= row < len(ids):
                return int(row)
        raise InputError(
            f"reset options: {options}; name a query by row, 0 to {len(ids) - 1}, or by query_id "
            f"of beam table {self.table.name!r}"
        )
