"""How networks are judged while they train: on samples that they were not fitted on.

Of several networks (`agents.controller.side_by_side`) those of the folds come first. Each is judged
on its fold's held-out samples, the last on none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from knobwise.agents.controller.actor import Actor
from knobwise.agents.problem import Problem
from knobwise.agents.training.stage import Validation
from knobwise.envs.bandit.outcomes import Decisions, Outcomes
from knobwise.envs.bandit.reward import RewardTable


class HeldOut:
    """The samples that were held out of each network, and what its greedy decisions on them get.

    Args:
        problem: what is learned.
        rows: the rows held out of each fold, int64 [n] each.
        networks: M.
        limits: float [B], the judged budgets in ms, or 1/price under mean budgets.
        rewards: the rewards of training.
        judged_by: `utility` or `reward`, the outcome that is the score.
        cost_ms: the time of a decision. Networks decide for what it leaves of a budget.

    Attributes:
        rows: int64 [n], all held-out samples, fold by fold.
        by_network: int64 [longest, M], the samples held out of each network, filled up by row 0.
        positions: of `rows` in `by_network`, int64 [n] twice: row and column.
    """

    def __init__(
        self,
        problem: Problem,
        rows: Sequence[Tensor],
        networks: int,
        limits: Tensor,
        rewards: RewardTable,
        judged_by: str,
        cost_ms: float = 0.0,
    ) -> None:
        self.problem = problem
        self.limits = limits
        self.rewards = rewards
        self.judged_by = judged_by
        self.cost_ms = cost_ms
        self.left = problem.rule.left(limits, cost_ms)
        self.rows = torch.cat([*rows])
        columns = pad_sequence([*rows], padding_value=-1)
        network, position = (columns.T >= 0).nonzero(as_tuple=True)
        self.positions = position, network
        # the network of all samples is not judged: its column is a filler
        self.by_network = functional.pad(columns.clamp_min(0), (0, networks - len(rows)))

    @torch.no_grad()
    def log_probs(self, actor: Actor, limit: Tensor) -> Tensor:
        """Return each network's log-probs for the samples held out of it, under one limit.

        Returns:
            Float [n, C], in the order of `rows`.
        """
        rows = self.by_network.flatten()
        row_key, limit_key = actor.in_keys
        inputs = {row_key: rows, limit_key: limit.expand(len(rows))}
        contexts = TensorDict(inputs, [len(rows)], device=self.rewards.accuracy.device)
        log_probs = actor.get_dist(contexts).log_probs
        return log_probs.unflatten(0, self.by_network.shape)[self.positions]

    def policies(self, log_probs: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the log-probs that a function gives for what is left of each judged limit,
        [B, n, C]."""
        return torch.stack([log_probs(limit).cpu() for limit in self.left])

    def scores(self, policies: Tensor) -> Tensor:
        """Return the score of each sample by log-probs [B, n, C], the mean over the limits: [n]."""
        scores: Tensor = getattr(self._outcomes(policies), self.judged_by)
        return scores.mean(1)

    def validation(self, policies: Tensor, logged: bool) -> Validation:
        """Judge greedy decisions by log-probs [B, n, C], with metrics if they are logged."""
        judged = self._outcomes(policies)
        scores: Tensor = getattr(judged, self.judged_by)
        metrics: dict[str, float] = {}
        if logged:
            # GRPO's objective without baseline, clip and KL
            expected = (policies.exp() * self._all_rewards).sum(-1).mean(1)
            metrics = judged.metrics() | {"Loss": -float(expected.mean())}
        return Validation(float(scores.mean()), metrics, scores.mean(1))

    def _outcomes(self, policies: Tensor) -> Outcomes:
        """Look up the outcomes of greedy decisions by log-probs [B, n, C]; predictions count."""
        chosen = policies.argmax(-1).T
        return self.problem.outcomes(
            Decisions(self.rows, chosen, self.limits, self.cost_ms),
            rewards=self.rewards,
            checked=False,
        )

    @functools.cached_property
    def _all_rewards(self) -> Tensor:
        """Rewards of held-out samples for what is left of each judged limit, [B, n, C], 0 where not
        profiled."""
        device = self.rewards.accuracy.device
        rows = self.rows.to(device)
        limits = self.left.to(device)
        rewards = [self.rewards.all(rows, limit.expand(len(rows))) for limit in limits]
        return torch.stack(rewards).nan_to_num().cpu()
