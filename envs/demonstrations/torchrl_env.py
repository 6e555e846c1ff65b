"""The bandit of the selector, as a native batched TorchRL environment.

Every episode is one decision. Without a scorer the sequences are recorded ones and their rewards
are looked up; with one they are scored when drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Bounded, Categorical, Composite, TensorSpec, Unbounded

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.envs.bandit.contexts import fresh_seed
from knobwise.envs.bandit.replay import UNPROFILED
from knobwise.envs.bandit.single_step import SingleStepEnv, batch_shape, one_axis
from knobwise.envs.demonstrations.beam_table import POLICY, BeamTable, bank_rows
from knobwise.envs.demonstrations.passes import Passes
from knobwise.envs.demonstrations.reward import (
    coherence_and_diversity,
    demonstration_reward,
    shuffle,
)
from knobwise.envs.demonstrations.settings import (
    GROUPS,
    LEVELS,
    METHODS,
    DemonstrationRewardConfig,
    GroupConfig,
)
from knobwise.envs.tables.tensor_file import joined_by_name

Scorer = Callable[[Tensor, Tensor], dict[str, Tensor]]
"""A function that scores sequences of demonstrations.

Its arguments, on the CPU, are the rows of the queries, int64 [n], and the rows of their
demonstrations in the bank, int64 [n, T] (−1 after the end; all −1: no demonstration). It returns
float [n], on any device, under names of `knobwise.envs.demonstrations.settings.FIELDS`."""


def recorded_groups(table: BeamTable, groups: GroupConfig, shots: int | None = None) -> BeamTable:
    """Return the table with only the beams that form the groups, without gaps.

    B is the size of the largest group. With `shots`, only sequences of this length are kept. Raises
    InputError if there are none.
    """
    wanted = torch.tensor([method in GROUPS[groups.methods] for method in METHODS])
    # found_by is −1 without a beam, but the mask excludes it
    kept = table.beam_mask & wanted[table.found_by]
    if groups.rounds is not None:
        kept &= (table.found_by != POLICY) | (table.round > table.round.max() - groups.rounds)
    if shots is not None:
        kept &= table.lengths == shots
    if not kept.any():
        methods = table.found_by[table.beam_mask].unique().tolist()
        found_by = ", ".join(METHODS[method] for method in methods)
        raise InputError(
            f"beam table {table.name!r} has no sequence for "
            f"groups.methods={groups.methods} and shots={shots}; it has sequences of "
            f"{table.recorded_lengths} demonstrations, found by {found_by or 'none'}; imitated=all "
            "and groups=all of a variant take every sequence"
        )
    longest = int(table.lengths[kept].max())
    return table.with_only(table.beams | {"sequences": table.sequences[..., :longest]}, kept)


class SequenceOutcome(NamedTuple):
    """The sequences that were replayed or scored, and their results."""

    sequences: Tensor
    """int64 [P, G, T]: places in the pool, −1 after the end."""
    reward: Tensor
    """float32 [P, G]."""
    correct: Tensor
    """float32 [P, G]: 1 if the answer was right, else 0; NaN if unknown."""


class DemonstrationBandit(SingleStepEnv):
    """P queries at once, G ordered sequences of demonstrations for each.

    Observation: `row` int64 [P] (row of the table) and `vqa_correct` float32 [P, G]: whether the
    answer after each sequence is right; 0 before the step, NaN if not recorded or without a
    sequence. Unless `observe_features=False`, as in the training loop, also the embeddings `query`
    [P, d] and `pool` [P, N, d], 0 where there is no candidate, and `mask` bool [P, N], True where
    there is one.
    Without a scorer also `sequences` int64 [P, B, T], the recorded sequences of the query's group,
    −1 after the end, and `group_mask` bool [P, B], True for each of them.

    Action: `action` int64 [P, G, T], ordered places in the query's pool, −1 after the end; all −1
    is no sequence. With `action="sequence"` int64 [P, G], the index of a recorded sequence of the
    query; an index beyond them is no sequence. A step whose tensordict has no `row` is for the
    queries of the last reset, or before any for new ones. Reward: float32 [P, G], 0 for no
    sequence.

    Args:
        batch_size: P, or a shape of queries as in TorchRL, in the place of [P]; `[]` is a single
            query without an axis.
        group_size: G; "all" takes all recorded sequences of the query, so that G is B, the widest
            recorded group. None for no group axis: the action is [P, T] or [P], `vqa_correct` [P],
            the reward [P, 1].
        shots: T with a scorer, by default the table's; without one, use recorded sequences of this
            length only, by default all.
        rows: int64 [n], the queries to draw from (the training split); None for all. They come in
            passes, see `Passes`; set `contexts.drawn` back to repeat them.
        seed: of the contexts and of shuffled rewards; None for a fresh one.
        scorer: scores sequences as they are drawn, by rows of this table; None replays recorded
            ones.
        unprofiled: what happens to a sequence that was never recorded. `nearest`: the query's
            recorded sequence with the longest common start is replayed in its place; of several the
            one with the most demonstrations, then the first. `penalty`: the same, but `vqa_correct`
            is 0 and the reward 1 below the worst of the query's group. `error`: InputError. Except
            under `error` a place without a candidate, or chosen before, adds no demonstration, and
            a query without recorded sequences gets none.
        action: `places` or `sequence`.

    Raises:
        InputError: if the settings do not fit the table, or a field that the reward needs was not
            recorded; by `step`, if an action has another shape, or under `error` for a sequence
            never recorded or not in the query's pool.
    """

    def __init__(
        self,
        table: BeamTable,
        *,
        batch_size: int | Sequence[int] = 1,
        group_size: int | str | None = None,
        shots: int | None = None,
        reward: DemonstrationRewardConfig | None = None,
        rows: Tensor | None = None,
        seed: int | None = None,
        scorer: Scorer | None = None,
        groups: GroupConfig | None = None,
        unprofiled: str = "nearest",
        action: str = "places",
        observe_features: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(device=device, batch_size=batch_shape(batch_size))
        count = self.batch_size.numel()
        one_of("unprofiled", unprofiled, UNPROFILED)
        one_of("action", action, ("places", "sequence"))
        if scorer is None:
            table = recorded_groups(table, groups or GroupConfig(), shots)
            shots = table.shots
        elif group_size == "all" or action == "sequence":
            raise InputError(
                "action=sequence and group_size=all are for recorded sequences; leave out the "
                "scorer"
            )
        # defaults depend on the table
        group_size = table.num_beams if group_size == "all" else group_size
        shots = table.shots if shots is None else shots
        rows = torch.arange(table.num_queries) if rows is None else rows
        group: tuple[Any, ...] = () if group_size is None else (group_size,)
        candidates = int(table.pool_mask.sum())
        if min(shots, *group, len(rows), candidates) < 1:
            raise InputError(
                f"shots={shots}, group_size={group_size}, {len(rows)} queries to draw from, "
                f"{candidates} candidates in all pools: all must be ≥ 1"
            )
        self.table = table
        self.scorer = scorer
        self.reward_config = (reward or DemonstrationRewardConfig()).resolved(table.fields)
        self.unprofiled = unprofiled
        self.by_index = action == "sequence"
        self.observe_features = observe_features
        self.shots = shots
        self.contexts = Passes(rows, count, fresh_seed() if seed is None else seed)
        self._rows: Tensor | None = None  # the queries of the last reset
        self._set_data()
        self._set_specs(group)

    def _set_data(self) -> None:
        """Copy what a step reads to the device."""
        table = self.table
        device = self.device
        self.queries = table.queries.to(device)
        self.pool = table.pool.to(device)
        self.candidates = table.candidates.to(device)
        if self.scorer is None:
            self.sequences = table.sequences.to(device)
            self.group_mask = table.beam_mask.to(device)
            self.rewards = self._recorded_rewards().to(device)
            unknown = torch.full(table.beam_mask.shape, torch.nan)
            self.correct = table.fields.get("vqa_correct", unknown).to(device)
        else:
            # filled as soon as a reward asks for it
            self.without_demonstrations = torch.full((table.num_queries,), torch.nan, device=device)

    def _set_specs(self, group: tuple[Any, ...]) -> None:
        """Describe the tensors; `group` is the group axis, empty for none."""
        batch = self.batch_size
        table = self.table
        n = self.pool.shape[1]
        d = self.queries.shape[1]
        # −1 is padding
        places = functools.partial(Bounded, -1, n - 1, dtype=torch.int64)
        observation: dict[str, TensorSpec] = {
            "row": Categorical(table.num_queries, batch),
            "vqa_correct": Unbounded((*batch, *group)),
        }
        if self.observe_features:
            observation |= {
                "query": Unbounded((*batch, d)),
                "pool": Unbounded((*batch, n, d)),
                "mask": Binary(n, (*batch, n), dtype=torch.bool),
            }
        if self.scorer is None:
            b = table.num_beams
            observation |= {
                "sequences": places((*batch, b, table.shots)),
                "group_mask": Binary(b, (*batch, b), dtype=torch.bool),
            }
        self.observation_spec = Composite(observation, shape=batch).to(self.device)
        action: TensorSpec = places((*batch, *group, self.shots))
        if self.by_index:
            action = Categorical(table.num_beams, (*batch, *group))
        self.action_spec = action.to(self.device)
        self._set_outcome_specs(group[0] if group else 1)
        # of each context, along one axis
        self.outcome_shape = (batch.numel(), *group)

    def _about(self) -> str:
        source = "recorded sequences" if self.scorer is None else "sequences scored as drawn"
        return f"{self.table.name!r}: {self.table.num_queries} queries, {source}"

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        self._rows = self.contexts().to(self.device)
        correct = torch.zeros(self.outcome_shape, device=self.device)
        return self._with_end(self.observe(self._rows) | {"vqa_correct": correct}, ended=False)

    def _decide(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self._rows is None and "row" not in tensordict:
            self._reset()
        rows = one_axis(tensordict.get("row", self._rows).long())
        outcome = self.decide(rows, tensordict["action"])
        correct = outcome.correct.view(self.outcome_shape)
        changed = {"vqa_correct": correct, "reward": outcome.reward}
        return self._with_end(self.observe(rows) | changed, ended=True)

    def observe(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the observations of queries int64 [P], except `vqa_correct`.

        The tensors are new, so that transforms may change them.
        """
        out = {"row": rows}
        if self.observe_features:
            pool = self.pool[rows]
            mask = pool >= 0
            candidates = self.candidates[pool.clamp_min(0)].masked_fill(~mask.unsqueeze(2), 0.0)
            out |= {"query": self.queries[rows], "pool": candidates, "mask": mask}
        if self.scorer is None:
            out |= {"sequences": self.sequences[rows], "group_mask": self.group_mask[rows]}
        return out

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.set_extra_state({"seed": seed, "drawn": 0})

    def get_extra_state(self) -> dict[str, int]:
        """Return the seed of the passes and the number of batches drawn, for `state_dict`."""
        return {"seed": self.contexts.seed, "drawn": self.contexts.drawn}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Go on from a state of `get_extra_state`."""
        self.contexts.seed = state["seed"]
        self.contexts.drawn = state["drawn"]
        if self.scorer is None and self.reward_config.shuffled:
            self.rewards = self._recorded_rewards().to(self.rewards.device)

    def decide(self, rows: Tensor, action: Tensor) -> SequenceOutcome:
        """Replay or score actions for queries int64 [P]. Raises InputError as `step`.

        The class describes the shapes of actions; if G is 1 they may lack the group axis.
        """
        spec = self.action_spec.shape
        fits = action.numel() == spec.numel()
        if not self.by_index:
            fits = fits and action.shape[-1] == self.shots
        if not fits or action.is_floating_point():
            raise InputError(
                f"the action is {action.dtype} {[*action.shape]}, must be int64 {[*spec]}"
            )
        # from here on there is a group axis, of length 1 for a single action
        if self.by_index:
            index = action.long().reshape(len(rows), self.group_size)
            most = self.table.num_beams - 1
            if not torch.equal(index, index.clamp(0, most)):
                raise InputError(
                    f"action: indices of recorded sequences are 0 to {most}, got {action.tolist()}"
                )
            action = self.sequences[rows].take_along_dim(index.unsqueeze(-1), 1)
        action = action.long().reshape(len(rows), self.group_size, self.shots)
        return (self._replayed if self.scorer is None else self._scored)(rows, action)

    def closed_up(self, rows: Tensor, places: Tensor) -> Tensor:
        """Return the sequences that remain of places, int64 [P, G, T].

        A place without a candidate, or chosen before, adds no demonstration.
        """
        sizes = (self.pool[rows] >= 0).sum(1)[:, None, None]
        before = (places.unsqueeze(-1) == places.unsqueeze(-2)).tril(-1).any(-1)
        used = (places >= 0) & (places < sizes) & ~before
        order = (~used).int().argsort(dim=-1, stable=True)
        return places.masked_fill(~used, -1).gather(-1, order)

    def _recorded_rewards(self) -> Tensor:
        """Compute the reward of every recorded sequence, float32 [Q, B]; 0 where there is none."""
        table = self.table
        # in pieces, because the embeddings of all sequences may need more than the memory
        parts = zip(table.pool.split(256), table.sequences.split(256), strict=True)
        levels = [self._levels(table.candidates, pool, sequences) for pool, sequences in parts]
        queries = torch.arange(table.num_queries)
        reward = self._reward(queries, table.fields | joined_by_name(levels), table.lengths)
        if self.reward_config.shuffled:
            return shuffle(reward, table.beam_mask, self._generator(self.contexts.seed))
        return reward

    def _reward(self, rows: Tensor, fields: dict[str, Tensor], lengths: Tensor) -> Tensor:
        """Compute the rewards of sequences of queries `rows`, [P, G], before they are shuffled.

        Raises InputError if a sequence lacks a field that the reward needs.
        """
        mask = lengths > 0
        unknown = torch.full(mask.shape, torch.nan, device=mask.device)
        for name in self.reward_config.needs:
            absent = mask & fields.get(name, unknown).isnan()
            self._refuse(
                absent,
                rows,
                f"lack {name}, which reward.mode={self.reward_config.mode} needs; record it or "
                "have it scored, leave them out, or choose another mode",
            )
        return demonstration_reward(fields, lengths, mask, self.reward_config)

    def _levels(self, candidates: Tensor, pool: Tensor, sequences: Tensor) -> dict[str, Tensor]:
        """Return coherence and diversity, [P, G], of sequences int64 [P, G, T] in pools [P, N].

        The result is empty if the reward does not need them.
        """
        if set(LEVELS).isdisjoint(self.reward_config.signal_names):
            return {}
        embeddings = candidates[bank_rows(pool, sequences).clamp_min(0)]
        levels = coherence_and_diversity(embeddings, (sequences >= 0).sum(-1))
        return dict(zip(LEVELS, levels, strict=True))

    def _replayed(self, rows: Tensor, action: Tensor) -> SequenceOutcome:
        """Look up the recorded sequences, or the nearest ones where `unprofiled` allows it."""
        recorded = self.sequences[rows]
        rewards = self.rewards[rows]
        correct = self.correct[rows]
        if torch.equal(action, recorded):
            return SequenceOutcome(recorded, rewards, correct)
        if self.unprofiled != "error":
            action = self.closed_up(rows, action)
        exists = self.group_mask[rows]
        empty = (action < 0).all(-1)
        index, exact = self._nearest(action, recorded, exists)
        unknown = ~empty & ~exact
        if self.unprofiled == "error":
            problem = "were never recorded; unprofiled=nearest replays the nearest that were"
            self._refuse(unknown, rows, problem)
        # without demonstrations or recorded sequences there is no reward
        none = empty | ~exists.any(1, keepdim=True)
        sequences = recorded.take_along_dim(index.unsqueeze(-1), 1)
        reward = rewards.gather(1, index)
        right = correct.gather(1, index)
        if self.unprofiled == "penalty":
            worst = rewards.masked_fill(~exists, torch.inf).amin(1, keepdim=True)
            reward = torch.where(unknown, worst - 1, reward)
            right = right.masked_fill(unknown, 0.0)
        return SequenceOutcome(
            sequences.masked_fill(none.unsqueeze(-1), -1),
            reward.masked_fill(none, 0.0),
            right.masked_fill(none, torch.nan),
        )

    def _nearest(self, action: Tensor, recorded: Tensor, exists: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of the nearest recorded sequence, int64 [P, G], and True if it is equal.

        Recorded sequences are int64 [P, B, T], where bool [P, B] says that they exist. The nearest
        one has the longest common start, then the most demonstrations.
        """
        # the −1 at the end counts as common, so that equal sequences have T entries in common
        common = (action.unsqueeze(2) == recorded.unsqueeze(1)).cumprod(-1).sum(-1)
        lengths = (recorded >= 0).sum(-1)
        nearness = common * (self.shots + 1) + lengths.unsqueeze(1)
        most, index = nearness.masked_fill(~exists.unsqueeze(1), -1).max(2)
        return index, most >= self.shots * (self.shots + 1)

    def _scored(self, rows: Tensor, action: Tensor) -> SequenceOutcome:
        """Score the sequences that the actions amount to."""
        sequences = self.closed_up(rows, action)
        if self.unprofiled == "error":
            problem = "hold a place outside the pool, a place twice, or −1 before the end"
            self._refuse((action != sequences).any(-1), rows, problem)
        fields = self._scores(rows, sequences)
        lengths = (sequences >= 0).sum(-1)
        reward = self._reward(rows, fields, lengths)
        if self.reward_config.shuffled:
            generator = self._generator(self.contexts.seed, self.contexts.drawn)
            reward = shuffle(reward, lengths > 0, generator)
        correct = fields.get("vqa_correct", torch.full_like(reward, torch.nan))
        return SequenceOutcome(sequences, reward, correct)

    def _scores(self, rows: Tensor, sequences: Tensor) -> dict[str, Tensor]:
        """Score sequences int64 [P, G, T]: float32 [P, G] by field, NaN without demonstrations."""
        assert self.scorer is not None
        pool = self.pool[rows]
        mask = sequences[..., 0] >= 0
        # a sequence that was drawn twice is scored once
        queries = rows[:, None, None].expand(*mask.shape, 1)
        drawn = torch.cat([queries, bank_rows(pool, sequences)], 2)[mask]
        distinct, inverse = drawn.unique(dim=0, return_inverse=True)
        distinct = distinct.cpu()
        scores = dict.fromkeys(self.reward_config.needs, torch.empty(0))
        if len(distinct):
            scores = self.scorer(distinct[:, 0], distinct[:, 1:])
        unknown = torch.full(mask.shape, torch.nan, device=mask.device)
        fields = self._levels(self.candidates, pool, sequences)
        for name, value in scores.items():
            values = value.to(mask.device, torch.float32)[inverse]
            fields[name] = unknown.masked_scatter(mask, values)
        # the information gain is the probability of the answer minus that without demonstrations
        needed = "beam_score" in self.reward_config.needs and "beam_score" not in fields
        if needed and "vqa_gt_prob" in fields:
            baseline = self._score_without_demonstrations(rows)[:, None]
            fields["beam_score"] = fields["vqa_gt_prob"] - baseline
        return fields

    def _score_without_demonstrations(self, rows: Tensor) -> Tensor:
        """Return P(true answer) without any demonstration, float32 [P], scored once per query."""
        assert self.scorer is not None
        known = self.without_demonstrations
        new = rows[known[rows].isnan()].unique()
        if len(new):
            none = torch.full((len(new), self.shots), -1)
            known[new] = self.scorer(new.cpu(), none)["vqa_gt_prob"].to(new.device, torch.float32)
        return known[rows]

    def _refuse(self, wrong: Tensor, rows: Tensor, problem: str) -> None:
        """Raise InputError if any sequence is wrong, bool [P, G], and name the first query."""
        if wrong.any():
            query = self.table.query_ids[rows[wrong.any(1)][0]]
            raise InputError(
                f"beam table {self.table.name!r}: {int(wrong.sum())} of {wrong.numel()} sequences "
                f"{problem} (the first: query {query})"
            )

    @staticmethod
    def _generator(*seeds: int) -> torch.Generator:
        seed = int(np.random.SeedSequence(seeds).generate_state(1)[0])
        return torch.Generator().manual_seed(seed)
