"""The part of a controller's training that judges networks on held-out samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from knobwise.agents.checkpoint import Loaded
from knobwise.agents.controller.actor import Actor
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.evaluation.evaluation import Judged, moments, outcomes_of
from knobwise.agents.teacher.folds import folds_of
from knobwise.agents.training.loop import Trainer
from knobwise.common.errors import InputError
from knobwise.envs.bandit.budgets import thinned
from knobwise.envs.bandit.reward import RewardTable
from knobwise.envs.bandit.torchrl_env import ConfigBandit
from knobwise.envs.tables.profile_table import ProfileTable

MOST_JUDGED = 1 << 16
"""Held-out samples that a network is judged on in training."""
PRICED_METRICS = ("Reward", "Accuracy", "Latency", "Loss")
"""What is logged of a validation under prices, where nothing is late."""


class JudgedTrainer(Trainer):
    """A training whose networks are judged on samples that they were not fitted on.

    Attributes:
        networks: M, the number of networks trained side by side; those of the folds come first.
        judged_rows: int64 [n], all held-out samples, fold by fold.
        held_out: int64 [longest, M], the samples held out of each network, filled up by row 0.
        places: the places of `judged_rows` in `held_out`, int64 [n] twice: row and column.
        limits: [B], budgets in ms or worths.
        scores_before: where GRPO begins after a warm-up, the mean score over the limits of each of
            `judged_rows`, float [n]; else None.
    """

    actor: Actor
    env: ConfigBandit
    table: ProfileTable
    policy: PolicyConfig
    grpo: Any
    sense: str
    priced: bool
    cost_ms: float
    fold_seed: int
    networks: int
    judged_rows: Tensor
    held_out: Tensor
    places: tuple[Tensor, Tensor]
    limits: Tensor
    seen_before: list[str]
    scores_before: Tensor | None = None
    kept = (*Trainer.kept, "scores_before")
    trained_on = "on another profile or with another policy, or from other weights"

    # -- samples -----------------------------------------------------------------------------------

    def _note_held_out(self, held_out: list[Tensor]) -> None:
        """Lay out the samples that each network is judged on, in a column for each network.

        Args:
            held_out: the rows held out of each fold, int64 [n] each.
        """
        self.judged_rows = torch.cat(held_out)
        columns = pad_sequence(held_out, padding_value=-1)
        network, position = (columns.T >= 0).nonzero(as_tuple=True)
        self.places = position, network
        # the network of all samples is not judged: its column is a filler
        columns = columns.clamp_min(0)
        self.held_out = functional.pad(columns, (0, self.networks - len(held_out)))

    @property
    def all_features(self) -> Tensor:
        """Normalised features of the table, [N, width]."""
        features: Tensor = self.actor.module[0].module.all_features
        return features

    def _note_samples_of(self, start: Loaded, path: str | Path) -> None:
        """Note the samples that a checkpoint was trained on, and take over its folds.

        The folds are taken over if profile and split are the same, so that samples held out of a
        network stay held out of it.

        Raises:
            InputError: the checkpoint was trained on test samples.
        """
        self.seen_before = start.extra.get("seen", [])
        test = start.extra.get("test_rows", self.split.train)
        if torch.equal(test, self.split.test) and start.profile_digest == self.table.digest:
            self.fold_seed = start.extra.get("fold_seed", self.fold_seed)
            return
        count = len({*self.seen_before} & {*self.table.fingerprints(self.split.test)})
        if count:
            raise InputError(
                f"init_from={path}: was trained on {count} of the test samples of profile "
                f"{self.table.name!r}; split the profile as its run did (split.seed=…)"
            )

    @functools.cached_property
    def seen(self) -> list[str]:
        """Fingerprints of the samples fitted or chosen on, also by the checkpoint started from."""
        fitted = self.table.fingerprints(self.split.fitted)
        return list(dict.fromkeys([*fitted, *self.seen_before]))

    def divide(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the rows that each fold's network is fitted on, and those it is judged on.

        Raises:
            InputError: there are fewer samples (or images) than members.
        """
        members = self.policy.members
        if members == 1:
            return [self.split.train], [thinned(self.split.validation, MOST_JUDGED)]
        rows = self.split.fitted
        folds = folds_of(self.table, rows, self.fold_seed, members)
        if len(folds) < members:
            raise InputError(
                f"policy.members={members}: profile {self.table.name!r} has only {len(folds)} "
                "samples (or images) outside its test part; use fewer members"
            )
        fitted, held_out = zip(*folds, strict=True)
        judged = [thinned(rows[hold], MOST_JUDGED) for hold in held_out]
        return [rows[fit] for fit in fitted], judged

    # -- held-out data -----------------------------------------------------------------------------

    @torch.no_grad()
    def held_out_log_probs(self, limit: Tensor) -> Tensor:
        """Return each network's log-probs for the samples held out of it, under one limit.

        Returns:
            Float [n, C], in the order of `judged_rows`.
        """
        rows = self.held_out.flatten()
        inputs = {"row": rows, self.agent.controller.limit_key: limit.expand(len(rows))}
        contexts = TensorDict(inputs, [len(rows)], device=self.device)
        log_probs = self.actor.get_dist(contexts).log_probs
        return log_probs.unflatten(0, self.held_out.shape)[self.places]

    @torch.no_grad()
    def _teacher_log_probs(self, limit: Tensor) -> Tensor:
        """Return log-probs like those of `held_out_log_probs`, but by the teacher's networks."""
        teacher = self.agent.teacher
        rows = self.held_out[:, : teacher.members].T
        predicted = teacher.network(self.all_features[rows]).predicted()
        scores = self.policy.sharpness * predicted.score(limit.to(self.device), self.sense)
        mask = self.table.mask[rows].to(self.device)
        scores = scores.masked_fill(~mask, -torch.inf).transpose(0, 1)  # [longest, M, C]
        return scores[self.places].log_softmax(-1)

    @functools.cached_property
    def _held_out_rewards(self) -> Tensor:
        """Rewards of held-out samples under each judged limit, [B, n, C], 0 where not profiled."""
        rows = self.judged_rows.to(self.device)
        limits = self.limits.to(self.device)
        rewards = [self.env.rewards.all(rows, limit.expand(len(rows))) for limit in limits]
        return torch.stack(rewards).nan_to_num().cpu()

    @functools.cached_property
    def free_rewards(self) -> RewardTable:
        """Rewards that do not charge the cost of a decision; judging takes it off the budgets."""
        return RewardTable(self.table, self.env.rewards.config, self.device)

    def _judge(self) -> tuple[float, Mapping[str, float]]:
        """Return the mean score of greedy decisions on held-out samples, and metrics to log."""
        # where a stage begins, the stage before it is judged
        log_probs = self.held_out_log_probs
        if self.stage_at(max(self.iteration - 1, 0)).judged == "teacher":
            log_probs = self._teacher_log_probs
        policies = self._policies(log_probs)
        judged = self._outcomes(policies)
        scores = getattr(judged, self.judged_by)
        self.by_sample = scores.mean(1)
        metrics: dict[str, float] = {}
        if self.log is not None:
            # GRPO's objective without baseline, clip and KL
            expected = (policies.exp() * self._held_out_rewards).sum(-1).mean(1)
            metrics = judged.metrics() | {"Loss": -float(expected.mean())}
        if self.priced:
            metrics = {k: x for k, x in metrics.items() if k.split("_")[0] in PRICED_METRICS}
        return float(scores.mean()), metrics

    def _policies(self, log_probs: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the log-probs that a function gives for each judged limit, [B, n, C]."""
        return torch.stack([log_probs(limit).cpu() for limit in self.limits])

    def _outcomes(self, policies: Tensor) -> Judged:
        """Look up the outcomes of greedy decisions by log-probs [B, n, C]."""
        chosen = policies.argmax(-1).T
        return outcomes_of(
            self.table, self.judged_rows, chosen, self.limits, self.free_rewards, self.cost_ms
        )

    def _metrics(self, data: TensorDictBase) -> dict[str, float]:
        """Return metrics of the drawn groups under their logged names."""
        data = data.flatten(0, 1).cpu()
        table = self.env.table
        cells = data["row"].unsqueeze(1), data["configuration"]
        accuracy = table.accuracy[cells]
        latency = table.latency_ms[cells]
        reward = data["next", "reward"]
        metrics = moments({"Reward": reward, "Accuracy": accuracy, "Latency": latency})
        if not self.priced:
            late = latency > data["budget_ms"].unsqueeze(1)
            metrics["Budget_Violation_Rate"] = float(late.float().mean())
        if self.stage.kl_controls:
            metrics["Beta"] = float(self.grpo.kl_to_ref_coeff)
        return metrics

    @property
    def patience(self) -> int:
        """Iterations of the last stage without a better score after which it ends; 0 for all of
        them."""
        return self.stages[-1].patience * self.settings.evaluate_every

    # -- checkpoints -------------------------------------------------------------------------------

    def provenance(self) -> dict[str, Any]:
        """Return how the controller came about: from which samples, how good on held-out ones."""
        before = self.scores_before
        return {
            "validation_utility": self.best["score"],
            "iteration": self.best["iteration"],
            "reward_spread": self.reward_spread,
            "grpo": {} if before is None else {"start": float(before.mean())},
            "seen": self.seen,
            "fold_seed": self.fold_seed,
            "grpo_held_out": self._gained_by_sample(),
            **{f"{part}_rows": rows for part, rows in self.split._asdict().items()},
        }

    @property
    def kept_is_of_grpo(self) -> bool:
        """True if the weights that are kept are GRPO's, and not from before it."""
        return bool(self.best["iteration"] > self.stages[-1].start)

    def _gained_by_sample(self) -> dict[str, Tensor]:
        """Return the scores of each held-out sample where GRPO starts and of the kept weights.

        If the kept weights are from before GRPO, it added nothing, and both are their scores.

        Returns:
            Mean scores over the limits, [n], under `start` and `best`; {} without warm-up or GRPO.
        """
        if self.scores_before is None:
            return {}
        best = self.best["by_sample"]
        start = self.scores_before if self.kept_is_of_grpo else best
        return {"start": start, "best": best}
