"""What a controller's training knows of held-out data: who is judged on which samples, and how."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from knobwise.agents.checkpoint import Loaded
from knobwise.agents.controller.actor import Actor
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.judging.evaluation import (
    LOGGED,
    Judged,
    drawn_metrics,
    for_all,
    outcomes_of,
)
from knobwise.agents.predictors.folds import rows_of_members
from knobwise.agents.stack.deployed import DeployedController
from knobwise.agents.training.loop import Trainer
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import thinned
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.torchrl_env import ConfigBandit
from knobwise.envs.tables.profile_table import ProfileTable, Split

MOST_JUDGED = 1 << 16
"""Held-out samples that a network is judged on in training."""
PRICED_METRICS = ("Reward", "Accuracy", "Latency", "Loss")
"""What is logged of a validation under prices, where nothing is late."""


class JudgedTrainer(Trainer):
    """A training whose networks are judged on the samples of a profile that they were not fitted
    on.

    Attributes:
        networks: M, how many are trained side by side; those of the folds come first.
        judged_rows: int64 [n], all held-out samples, one fold after the other.
        held_out: int64 [longest, M], the samples held out of each network, the last one repeated.
        places: int64 [n], where those of `judged_rows` are in `held_out`, flattened.
        limits: [B], what is judged: budgets in ms or worths; under weights pairs [B, 2].
        scores_now, scores_kept, scores_before: mean score over the limits of each of `judged_rows`,
            float [n], of the latest evaluation, of what is kept, and where GRPO begins; None before
            there is any.
    """

    agent: DeployedController
    actor: Actor
    critic: Any
    env: ConfigBandit
    table: ProfileTable
    split: Split
    policy: PolicyConfig
    grpo: Any
    sense: str
    priced: bool
    cost_ms: float
    fold_seed: int
    networks: int
    judged_rows: Tensor
    held_out: Tensor
    places: Tensor
    limits: Tensor
    seen_before: list[str]
    start_sums: list[float] | None
    scores_now: Tensor | None = None
    scores_kept: Tensor | None = None
    scores_before: Tensor | None = None
    trained_on = "on another profile or with another policy, or from other weights"

    # -- samples -----------------------------------------------------------------------------------

    def _note_held_out(self, held_out: list[Tensor]) -> None:
        """Lay out the samples that each network is judged on, a list for each fold."""
        self.judged_rows = torch.cat(held_out)
        longest = max(map(len, held_out))
        columns = [torch.cat([r, r[-1:].expand(longest - len(r))]) for r in held_out]
        # the network of all samples is not judged
        columns += columns[:1] * (self.networks - len(columns))
        self.held_out = torch.stack(columns, 1)
        places = [torch.arange(len(r)) * self.networks + m for m, r in enumerate(held_out)]
        self.places = torch.cat(places)

    @property
    def all_features(self) -> Tensor:
        """Normalised features of the table, [N, width]."""
        features: Tensor = self.actor.module[0].module.all_features
        return features

    def _note_samples_of(self, start: Loaded, path: str | Path) -> None:
        """Note what a checkpoint was trained on, and take over its folds if profile and split are
        the same: what was held out of a network stays held out of it.

        Raises:
            InputError: test samples are among them.
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
        """Fingerprints of the samples that were fitted or chosen on, also by what training started
        from."""
        rows = torch.cat([self.split.train, self.split.validation])
        return list(dict.fromkeys([*self.table.fingerprints(rows), *self.seen_before]))

    def divide(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the rows that each network of a fold is fitted on, and those it is judged on."""
        members = self.policy.members
        fitted, judged = rows_of_members(self.table, self.split, members, self.fold_seed)
        return fitted, [thinned(rows, MOST_JUDGED) for rows in judged]

    # -- held-out data -----------------------------------------------------------------------------

    @torch.no_grad()
    def held_out_log_probs(self, limit: Tensor) -> Tensor:
        """Return what the networks make of the samples held out of them under a limit, [n, C], in
        the order of `judged_rows`."""
        rows = self.held_out.flatten()
        under = {"row": rows, self.agent.controller.limit_key: for_all(limit, rows)}
        contexts = TensorDict(under, [len(rows)], device=self.device)
        return self.actor.get_dist(contexts).log_probs[self.places]

    @torch.no_grad()
    def _teacher_log_probs(self, limit: Tensor) -> Tensor:
        """Return the same of the networks of the teacher."""
        teacher = self.agent.teacher
        assert teacher is not None
        rows = self.held_out[:, : teacher.members].T
        predicted = teacher.network(self.all_features[rows]).predicted()
        limits = limit.to(self.device).expand(*rows.shape, *limit.shape)
        scores = self.policy.sharpness * predicted.score(limits, self.sense)
        mask = self.table.mask[rows].to(self.device)
        scores = scores.masked_fill(~mask, -torch.inf)
        padded = scores.new_zeros(self.networks, *scores.shape[1:])
        padded[: teacher.members] = scores
        return padded.transpose(0, 1).flatten(0, 1)[self.places].log_softmax(-1)

    @functools.cached_property
    def _held_out_rewards(self) -> list[Tensor]:
        """[n, C] under each judged limit, 0 where not profiled."""
        rows = self.judged_rows.to(self.device)
        limits = self.limits.to(self.device)
        return [self.env.rewards.all(rows, for_all(each, rows)).nan_to_num() for each in limits]

    @functools.cached_property
    def free_rewards(self) -> RewardTable:
        """The rewards without what a decision costs, which is taken off the budgets in judging."""
        return RewardTable(self.table, self.env.rewards.config, self.device)

    def _judge(self) -> tuple[float, Mapping[str, float]]:
        """Judge greedy decisions."""
        # where a stage begins, it is the one before that is judged
        of_teacher = self._stage_and_start(max(self.iteration - 1, 0))[0].judged == "teacher"
        if of_teacher:
            log_probs = self._teacher_log_probs
        else:
            log_probs = self.held_out_log_probs
        policies = [log_probs(limit).cpu() for limit in self.limits]
        judged = self._outcomes(policies)
        scores = getattr(judged, self.judged_by)
        self.scores_now = scores.mean(1)
        score = float(scores.mean())
        if self.log is None:
            return score, {}
        losses = []
        for policy, rewards in zip(policies, self._held_out_rewards, strict=True):
            losses.append(-(policy.exp() * rewards.cpu()).sum(-1).mean())
        # what GRPO minimises, without baseline, clip and KL
        metrics = judged.metrics() | {"Loss": float(torch.stack(losses).mean())}
        if self.priced:
            kept = [name for name in metrics if name.split("_")[0] in PRICED_METRICS]
            metrics = {name: metrics[name] for name in kept}
        return score, metrics

    def _outcomes(self, policies: list[Tensor]) -> Judged:
        """Look up what greedy decisions get, from log-probs [n, C] under each judged limit."""
        chosen = torch.stack([each.argmax(-1) for each in policies], 1)
        cost_ms = torch.full((len(self.limits),), self.cost_ms)
        about = self.table, self.judged_rows, chosen, self.limits, self.free_rewards
        return outcomes_of(*about, cost_ms)

    def _is_better(self, score: float, metrics: Mapping[str, float]) -> bool:
        better = super()._is_better(score, metrics)
        if better:
            self.scores_kept = self.scores_now
        return better

    def _note_scores_before_grpo(self) -> None:
        """Note what each held-out sample gets where GRPO begins."""
        policies = [self.held_out_log_probs(limit).cpu() for limit in self.limits]
        self.scores_before = getattr(self._outcomes(policies), self.judged_by).mean(1)

    def _metrics(self, data: TensorDictBase, outputs: TensorDictBase) -> Mapping[str, float]:
        """Return what the drawn group got, and the outputs of the loss, under their logged
        names."""
        data = data.flatten(0, 1).cpu()
        if self.priced:
            budgets_ms = None
        else:
            budgets_ms = data["budget_ms"]
        drawn = data["row"], data["configuration"], data["next", "reward"]
        metrics = drawn_metrics(self.env.table, *drawn, budgets_ms)
        for key, name in LOGGED.items():
            if key in outputs:
                metrics[name] = float(outputs[key])
        if self.stage.kl_controls:
            metrics["Beta"] = float(self.grpo.kl_to_ref_coeff)
        if self.stage is not self.stages[-1]:  # another kind of loss, which has an axis of its own
            word = self.stage.name.split()[0]
            metrics[f"{word if word == 'RCE' else word.title()}_Loss"] = metrics.pop("Loss")
        logged = {f"Train/{name}": value for name, value in metrics.items()}
        return logged | {"Train/LR": self._learning_rate()}

    # -- checkpoints -------------------------------------------------------------------------------

    def provenance(self) -> dict[str, Any]:
        """Return how the controller came about: from which samples, how good on held-out ones."""
        rows = {f"{part}_rows": rows for part, rows in self.split._asdict().items()}
        return {
            "validation_utility": self.best["score"],
            "iteration": self.best["iteration"],
            "seen": self.seen,
            "fold_seed": self.fold_seed,
            "grpo": self._gained(),
            "grpo_held_out": self._gained_by_sample(),
            **rows,
        }

    def _gained(self) -> dict[str, float]:
        """Return the validation score where GRPO starts, and of its `best` and `last` evaluation;
        {} without warm-up or GRPO."""
        begins = self.total - self.settings.iterations
        before = [score for iteration, score in self.scores if iteration <= begins]
        after = [score for iteration, score in self.scores if iteration > begins]
        if not (begins and before and after):
            return {}
        return {"start": before[-1], "best": max(after), "last": after[-1]}

    @property
    def kept_is_of_grpo(self) -> bool:
        """Whether the weights that are kept are of GRPO, and not from before it."""
        return bool(self.best["iteration"] > self.total - self.settings.iterations)

    def _gained_by_sample(self) -> dict[str, Tensor]:
        """Return the mean score over the limits of each held-out sample, [n], where GRPO starts and
        of the `best` weights, which are kept; {} without warm-up or GRPO.

        Where these are from before GRPO, it added nothing to them, and both are theirs.
        """
        if not self._gained() or self.scores_before is None or self.scores_kept is None:
            return {}
        if self.kept_is_of_grpo:
            start = self.scores_before
        else:
            start = self.scores_kept
        return {"start": start, "best": self.scores_kept}

    def training_state(self) -> dict[str, Any]:
        if self.critic is None:
            critic = None
        else:
            critic = self.critic.state_dict()
        by_sample = {"before": self.scores_before, "kept": self.scores_kept}
        state = {"start": self.start_sums, "critic": critic, "scores_by_sample": by_sample}
        return super().training_state() | state

    def _restore(self, loaded: Loaded, state: Mapping[str, Any]) -> bool:
        agent = loaded.controller
        controller = agent.controller
        if (controller.config, controller.sense) != (self.policy, self.sense):
            return False
        if state.get("start") != self.start_sums:
            return False
        self.agent.load_state_dict(agent.state_dict())
        by_sample = state.get("scores_by_sample", {})
        self.scores_before = by_sample.get("before")
        self.scores_kept = by_sample.get("kept")
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])
        return True
