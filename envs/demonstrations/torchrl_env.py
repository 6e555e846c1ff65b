"""The bandit of the selector, as a native batched TorchRL environment: every episode is one decision.

Without a scorer the sequences are recorded ones and their rewards are looked up; with one they are scored when drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.functional import pad
from torchrl.data import Binary, Bounded, Categorical, Composite, Unbounded

from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_table import POLICY, BeamTable, after_gaps, closed_up, repeated
from knobwise.envs.demonstrations.reward import coherence_and_diversity, demonstration_reward, shuffle
from knobwise.envs.demonstrations.settings import METHODS, DemonstrationRewardConfig, GroupConfig
from knobwise.envs.single_step import SingleStepEnv

Scorer = Callable[[Tensor, Tensor], dict[str, Tensor]]
"""Rows of the queries int64 [n], rows of their demonstrations in the bank int64 [n, T] (−1 after the end, all −1: no
demonstration), on the CPU → float [n] under names of `knobwise.envs.demonstrations.beam_table.FIELDS`, anywhere."""


def recorded_groups(table: BeamTable, groups: GroupConfig, shots: int | None = None) -> BeamTable:
    """The table with only the beams that form the groups, without gaps; B is the size of the largest group. With
    `shots`, only sequences of this length are kept. Raises InputError if there are none."""
    wanted = torch.tensor([method in groups.methods for method in METHODS])
    kept = table.beam_mask & wanted[table.found_by]  # found_by is −1 without a beam, but the mask excludes it
    if groups.rounds is not None:
        kept &= (table.found_by != POLICY) | (table.round > table.round.max() - groups.rounds)
    if shots is not None:
        kept &= table.lengths == shots
    if not kept.any():
        lengths, methods = (x[table.beam_mask].unique().tolist() for x in (table.lengths, table.found_by))
        wanted_shots, found_by = "any" if shots is None else shots, ", ".join(METHODS[i] for i in methods) or "none"
        raise InputError(
            f"beam table {table.name!r} has no sequence for groups.methods={', '.join(groups.methods)} and shots="
            f"{wanted_shots}; it has sequences of {lengths} demonstrations, found by {found_by}"
        )
    return replace(
        table,
        sequences=closed_up(table.sequences[..., : int(table.lengths[kept].max())], kept, -1),
        fields={name: closed_up(x, kept, torch.nan) for name, x in table.fields.items()},
        found_by=closed_up(table.found_by, kept, -1),
        round=closed_up(table.round, kept, 0),
    )


class Passes:
    """Draws batches of `count` rows out of int64 [n], pass after pass: every pass has each row once, in a new random
    order, the same on every device. A batch may end in the next pass. `drawn` counts the batches. The seed is ≥ 0."""

    def __init__(self, rows: Tensor, count: int, seed: int) -> None:
        self.rows, self.count, self.seed = rows.cpu(), count, seed
        self.drawn = 0

    def __call__(self) -> Tensor:
        n, start = len(self.rows), self.drawn * self.count
        self.drawn += 1
        orders = [_order(self.seed, number, n) for number in range(start // n, (start + self.count - 1) // n + 1)]
        return self.rows[torch.cat(orders)[start % n :][: self.count]]

    @property
    def before(self) -> int:
        """`set_back` to it draws the last batch again."""
        return max(self.drawn - 1, 0)

    def set_back(self, before: int) -> None:
        """Return to an earlier value of `before`: the batches drawn after it come again."""
        self.drawn = before


@functools.lru_cache(maxsize=16)
def _order(seed: int, number: int, count: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, number]).permutation(count))


class DemonstrationBandit(SingleStepEnv):
    """P queries at once, G ordered sequences of demonstrations for each.

    Observation: `row` int64 [P] (row of the table) and `vqa_correct` float32 [P, G]: whether the answer after each
    sequence is right; 0 before the step, NaN if not recorded or without a sequence. Without a scorer also `sequences`
    int64 [P, G, T], the recorded sequences of the query's group, −1 after the end, and `group_mask` bool [P, G], True
    for each of them.

    Action: `action` int64 [P, G, T], ordered places in the query's pool, −1 after the end; all −1 is no sequence.
    Reward: float32 [P, G], 0 for no sequence.

    Args:
        batch_size, group_size: P, and with a scorer G. Without one G is B, the widest recorded group.
        shots: T with a scorer, by default the table's; without one, use recorded sequences of this length only, by
            default all.
        rows: int64 [n], the queries to draw from (the training split); None for all. They come in passes, see `Passes`;
            set `contexts.drawn` back to repeat them.
        seed: of the contexts and of shuffled rewards.
        scorer: scores sequences as they are drawn, by rows of this table; None replays recorded ones.

    Raises:
        InputError: if the settings do not fit the table, or a field that the reward needs was not recorded; by `step`,
            if a sequence was never recorded (without a scorer) or is not in the query's pool.
    """

    def __init__(
        self,
        table: BeamTable,
        *,
        batch_size: int = 1,
        group_size: int = 1,
        shots: int | None = None,
        reward: DemonstrationRewardConfig | None = None,
        rows: Tensor | None = None,
        seed: int = 0,
        scorer: Scorer | None = None,
        groups: GroupConfig | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(device=device, batch_size=[batch_size])
        rows = torch.arange(table.num_queries) if rows is None else rows
        if not len(rows):
            raise InputError("the environment got no queries to draw from")
        self.scorer, self.reward_config = scorer, (reward or DemonstrationRewardConfig()).resolved(table.fields)
        if scorer is None:
            table = recorded_groups(table, groups or GroupConfig(), shots)
            group_size = table.num_beams
        shots = table.shots if scorer is None or shots is None else shots
        if min(shots, group_size, batch_size) < 1:
            raise InputError(f"shots={shots}, group_size={group_size}, batch_size={batch_size}: all must be ≥ 1")
        if not table.pool_mask.any():
            raise InputError(f"beam table {table.name!r}: the pools of all queries are empty")
        self.table, self.shots = table, shots
        self.contexts = Passes(rows, batch_size, seed)
        self.pool, self.candidates = table.pool.to(device), table.candidates.to(device)
        p, g, t, n = batch_size, group_size, shots, table.pool.shape[1]
        observation: dict[str, Unbounded | Binary | Bounded | Categorical] = {
            "row": Categorical(table.num_queries, shape=(p,), dtype=torch.int64, device=device),
            "vqa_correct": Unbounded(shape=(p, g), device=device),
        }
        places = functools.partial(Bounded, -1, n - 1, shape=(p, g, t), dtype=torch.int64, device=device)
        if scorer is None:
            self.sequences, self.group_mask = table.sequences.to(device), table.beam_mask.to(device)
            self.rewards = self._recorded_rewards(seed).to(device)
            correct = table.fields.get("vqa_correct")
            self.correct = (torch.full_like(self.rewards, torch.nan) if correct is None else correct).to(device)
            observation["sequences"] = places()
            observation["group_mask"] = Binary(shape=(p, g), dtype=torch.bool, device=device)
        else:
            self.without_demonstrations = torch.full((table.num_queries,), torch.nan, device=device)
        self.observation_spec = Composite(observation, shape=(p,), device=device)
        self.action_spec = places()
        self._set_outcome_specs(p, g)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        rows = self.contexts().to(self.device)
        out = {"row": rows, "vqa_correct": self.observation_spec["vqa_correct"].zero()}
        if self.scorer is None:
            out |= {"sequences": self.sequences[rows], "group_mask": self.group_mask[rows]}
        return self._context(out)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        rows, action = tensordict["row"], tensordict["action"]
        reward, correct = self._replayed(rows, action) if self.scorer is None else self._scored(rows, action)
        return self._outcome(tensordict, reward, {"vqa_correct": correct})

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Draw evenly among the query's recorded sequences, or with a scorer from its pool without replacement."""
        if tensordict is None or "row" not in tensordict:
            return super().rand_action(tensordict)
        rows, (p, g, t) = tensordict["row"], self.action_spec.shape
        if self.scorer is None:
            drawn = (torch.rand(p, g, device=rows.device) * self.group_mask[rows].sum(1, keepdim=True)).long()
            return tensordict.set("action", self.sequences[rows].gather(1, drawn[..., None].expand(p, g, t)))
        keys = torch.rand(p, g, self.pool.shape[1], device=rows.device)
        best = keys.masked_fill((self.pool[rows] < 0)[:, None], -1.0).topk(min(t, keys.shape[2]))
        places = best.indices.masked_fill(best.values < 0, -1)
        return tensordict.set("action", pad(places, (0, t - places.shape[2]), value=-1))

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.contexts.seed, self.contexts.drawn = seed, 0

    def _recorded_rewards(self, seed: int) -> Tensor:
        """The reward of every recorded sequence, float32 [Q, B]; 0 where there is none."""
        table, config = self.table, self.reward_config
        for name in config.needs:
            absent = table.beam_mask & table.fields.get(name, torch.full(table.beam_mask.shape, torch.nan)).isnan()
            if count := int(absent.sum()):
                query = table.query_ids[int(absent.any(1).nonzero()[0])]
                raise InputError(
                    f"reward.mode={config.mode} needs {name}, which {count} of {int(table.beam_mask.sum())} sequences "
                    f"of beam table {table.name!r} lack (the first: query {query}); record it, leave out those "
                    "sequences, or choose another mode"
                )
        fields = dict(table.fields)
        if config.needs_embeddings:  # in pieces: [Q, B, T, d] may be larger than the memory
            queries = zip(table.pool.split(256), table.sequences.split(256), strict=True)
            pieces = [self._level(*parts, table.candidates) for parts in queries]
            fields["coherence"], fields["diversity"] = (torch.cat(piece) for piece in zip(*pieces, strict=True))
        reward = demonstration_reward(fields, table.lengths, table.beam_mask, config)
        return shuffle(reward, table.beam_mask, self._generator(seed)) if config.shuffled else reward

    def _replayed(self, rows: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """The recorded reward and correctness of each sequence, float32 [P, G]."""
        recorded, rewards, correct = self.sequences[rows], self.rewards[rows], self.correct[rows]
        same = (action == recorded).all(-1)
        if same.all():
            return rewards, correct
        match = (action.unsqueeze(2) == recorded.unsqueeze(1)).all(-1)
        empty = (action < 0).all(-1)
        if (unknown := ~match.any(2) & ~empty).any():
            query = self.table.query_ids[int(rows[unknown.any(1)][0])]
            raise InputError(
                f"{int(unknown.sum())} of the sequences were never recorded for their query (the first: query {query} "
                f"of {self.table.name!r}, places {action[unknown][0].tolist()}); `sequences` says which were"
            )
        place = torch.where(same, torch.arange(same.shape[1], device=same.device), match.int().argmax(2))
        return rewards.gather(1, place).where(~empty, 0.0), correct.gather(1, place).where(~empty, torch.nan)

    def _scored(self, rows: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Reward and correctness of each sequence, float32 [P, G]."""
        assert self.scorer is not None
        pool, used = self.pool[rows], action >= 0
        self._check(rows, action, pool)
        mask, config = used[..., 0], self.reward_config
        # the same sequence drawn twice is scored once
        drawn = torch.cat([rows[:, None, None].expand(*mask.shape, 1), _demonstrations(pool, action)], 2)[mask]
        distinct, inverse = drawn.unique(dim=0, return_inverse=True)
        distinct = distinct.cpu()
        scores = dict.fromkeys(config.needs, torch.empty(0))
        if len(distinct):
            scores = self.scorer(distinct[:, 0], distinct[:, 1:])
        fields = {}
        for name, value in scores.items():
            fields[name] = torch.full(mask.shape, torch.nan, device=mask.device)
            fields[name][mask] = value.to(mask.device, torch.float32)[inverse]
        if "beam_score" in config.needs and "beam_score" not in fields and "vqa_gt_prob" in fields:
            fields["beam_score"] = fields["vqa_gt_prob"] - self._score_without_demonstrations(rows)[:, None]
        if config.needs_embeddings:
            fields["coherence"], fields["diversity"] = self._level(pool, action, self.candidates)
        reward = demonstration_reward(fields, used.sum(-1), mask, config)
        if reward.isnan().any():
            unknown = next(name for name in config.needs if fields[name][mask].isnan().any())
            raise InputError(f"reward.mode={config.mode} needs {unknown}, for which the scorer returned NaN")
        if config.shuffled:
            reward = shuffle(reward, mask, self._generator(self.contexts.seed, self.contexts.drawn))
        return reward, fields.get("vqa_correct", torch.full_like(reward, torch.nan))

    def _score_without_demonstrations(self, rows: Tensor) -> Tensor:
        """P(true answer) without any demonstration, float32 [P], scored once per query."""
        assert self.scorer is not None
        known = self.without_demonstrations
        if len(new := rows[known[rows].isnan()].unique()):
            none = torch.full((len(new), self.shots), -1)
            known[new] = self.scorer(new.cpu(), none)["vqa_gt_prob"].to(new.device, torch.float32)
        return known[rows]

    def _check(self, rows: Tensor, action: Tensor, pool: Tensor) -> None:
        wrong = (action < -1) | (action >= (pool >= 0).sum(1)[:, None, None])
        wrong[..., 1:] |= after_gaps(action >= 0) | repeated(action)
        if (bad := wrong.any(-1)).any():
            query = self.table.query_ids[int(rows[bad.any(1)][0])]
            raise InputError(
                f"{int(bad.sum())} of the sequences do not exist (the first: query {query} of {self.table.name!r}, "
                f"places {action[bad][0].tolist()}): a place outside the pool, the same twice, or −1 before the end"
            )

    @staticmethod
    def _level(pool: Tensor, sequences: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """Coherence and diversity of sequences int64 [P, G, T] from pools int64 [P, N], float32 [P, G] each."""
        bank = _demonstrations(pool, sequences)
        return coherence_and_diversity(candidates[bank.clamp_min(0)], (sequences >= 0).sum(-1))

    @staticmethod
    def _generator(*seeds: int) -> torch.Generator:
        return torch.Generator().manual_seed(int(np.random.SeedSequence(seeds).generate_state(1)[0]))


def _demonstrations(pool: Tensor, sequences: Tensor) -> Tensor:
    """Rows of the bank, int64 [P, G, T], behind places in pools, int64 [P, N]; −1 stays."""
    rows = pool[:, None].expand(-1, sequences.shape[1], -1).gather(2, sequences.clamp_min(0))
    return rows.masked_fill(sequences < 0, -1)
