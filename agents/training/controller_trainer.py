"""The training of a controller: RCE first, or regression for a network that predicts outcomes, then GRPO or
PPO.

Of an ensemble all members are trained side by side, each on contexts of its own samples: a batch is [contexts,
members]. The loop is that of `knobwise.agents.training.loop`.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import ClipPPOLoss

from knobwise.agents.checkpoint import Loaded, load_checkpoint, started_from
from knobwise.agents.controller.actor import Behaviour, OutcomesOfRows, make_actor, make_critic
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.networks import KnobNetwork, UtilityNetwork
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.judging.evaluation import LOGGED, drawn_metrics, for_all, judge
from knobwise.agents.predictors.folds import rows_of_members
from knobwise.agents.training.loop import Trainer
from knobwise.agents.training.optimiser import adamw
from knobwise.agents.training.seeding import seeded
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.agents.training.stage import Stage
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import default_budgets, judged_worths, log_moments, thinned, worth_pairs
from knobwise.envs.configurations.settings import BalanceConfig, BudgetConfig, RewardConfig
from knobwise.envs.configurations.torchrl_env import ConfigBandit
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.losses import GRPOLoss, RCELoss, RegressionLoss
from knobwise.losses.kl_control import weight_control
from knobwise.losses.settings import LossConfig

MOST_JUDGED = 1 << 16
"""Held-out samples that a member is judged on in training."""
PRICED_METRICS = ("Reward", "Accuracy", "Latency", "Loss")
"""What is logged of a validation under prices, where nothing is late."""
JUDGED_STEPS = 4
"""Worths of each kind that validation under weights takes the pairs of."""


class ControllerTrainer(Trainer):
    """Trains one controller with one seed.

    Args:
        split: fit on `train`, choose on `validation`, or both in folds (`policy.members`); `test` is not used.
        reward: under a mean budget and weights it is always `priced`.
        budgets_ms: float [B], what is judged on validation; None for the default budgets. Under a mean budget and
            weights worths are judged instead.
        init_from: a checkpoint whose weights training starts from, with the statistics that its inputs are
            standardised by (`started_from`); None for fresh weights. Samples that it was trained on count as seen.
        seed, device, **options: see `Trainer`, which also takes `folder` and `log`.
    """

    agent: Controller
    env: ConfigBandit
    table: ProfileTable
    loss: LossConfig
    trained_on = "on another profile or with another policy, or from other weights"

    def __init__(
        self,
        table: ProfileTable,
        split: Split,
        *,
        policy: PolicyConfig | None = None,
        loss: LossConfig | None = None,
        optimiser: OptimiserConfig | None = None,
        budgets_ms: Tensor | None = None,
        budget: BudgetConfig | None = None,
        reward: RewardConfig | None = None,
        balance: BalanceConfig | None = None,
        init_from: str | Path | None = None,
        seed: int = 0,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.table, self.split, self.seed = table, split, seed
        self.policy, self.loss = policy or PolicyConfig(), loss or LossConfig()
        by_structure = 0.02 if self.policy.structure == "utility" else 0.0
        self.kl_coeff = by_structure if self.loss.kl_to_ref_coeff is None else self.loss.kl_to_ref_coeff
        self.priced = budget is not None and budget.sense != "deadline"
        weighs = budget is not None and budget.sense == "weights"
        self.cost = table.cost_name if weighs else ""
        by_reward = self.priced or (reward is not None and reward.kind == "function")
        self.judged_by = "reward" if by_reward else "utility"
        self.limits = default_budgets(table) if budgets_ms is None else budgets_ms
        if self.priced:
            reward = RewardConfig(kind="priced")
            self.limits = worth_pairs(table, JUDGED_STEPS) if weighs else judged_worths(table)
        settings, exact = optimiser or OptimiserConfig(), self.loss.objective == "exact"
        group, shape = 1 if exact else self.loss.group_size, (settings.contexts, self.policy.members)
        with seeded(seed, device):
            agent = self._first_network(init_from).to(device).eval()
            self._with_bins = {} if init_from is not None else self._leave_out_bins(agent)
            reference = copy.deepcopy(agent).requires_grad_(False)
            self.actor, frozen = (make_actor(each, table, group).to(device) for each in (agent, reference))
            self.critic = make_critic(agent, table) if self.loss.objective == "ppo" else None
            self.behaviour = Behaviour(self.actor, frozen, self.loss.objective, self.critic)
            env = ConfigBandit(
                table,
                batch_size=math.prod(shape),
                group_size=group,
                budget=budget,
                reward=reward,
                rows=self.member_rows,
                balance=(balance or BalanceConfig()).by,
                seed=seed,
                unprofiled="error",
                lean=True,
                device=torch.device(device),
            )
            stages = self._stages(settings, env)
            stored = {*self.rce.in_keys, *self.grpo.in_keys, "configuration", "state_value", ("next", "reward")}
            options |= {"stored": stored - {"action"}, "shape": shape, "seed": seed, "device": device}
            super().__init__(agent, reference, env, self.behaviour, stages, settings, **options)
            if self.critic is not None:
                self.learned = nn.ModuleList([agent, self.critic])
                self.optimiser = adamw(self.learned, self.settings.weight_decay)

    def _first_network(self, init_from: str | Path | None) -> Controller:
        """What training starts from; notes which samples are fitted and which are held out."""
        self.fold_seed = self.seed
        self.seen_before: list[str] = []
        if init_from is not None:
            start = load_checkpoint(init_from)
            self._note_samples_of(start, init_from)
        self.member_rows, held_out = self.divide()
        self.fitted, self.judged_rows = torch.cat(self.member_rows).unique(), torch.cat(held_out)
        # row i, member m of a block is the i-th sample held out of m, the last one repeated to the end
        longest, members = max(map(len, held_out)), len(held_out)
        self.held_out = torch.stack([torch.cat([r, r[-1:].expand(longest - len(r))]) for r in held_out], 1)
        self.places = torch.cat([torch.arange(len(r)) * members + m for m, r in enumerate(held_out)])
        masks = torch.stack([torch.isin(self.fitted, rows) for rows in self.member_rows])
        fresh = Controller.for_table(self.table, self.fitted, self.policy, self.priced, masks, bool(self.cost))
        self.start_sums = None
        if init_from is None:
            return fresh
        controller = started_from(init_from, start, fresh)
        self.start_sums = [float(values.double().sum()) for values in controller.state_dict().values()]
        network = controller.network
        if isinstance(network, UtilityNetwork):
            network.sharpen(0.0)
        elif isinstance(fresh.network, KnobNetwork):
            network.typical.copy_(fresh.network.typical)  # of this table; decisions do not read it
        return controller

    @staticmethod
    def _leave_out_bins(agent: Controller) -> dict[str, Tensor]:
        """Make a fresh network one without bins; gives its weights with them, nothing where it has none."""
        if not isinstance(agent.network, UtilityNetwork) or not agent.network.edges.numel():
            return {}
        weights = copy.deepcopy(agent.state_dict())
        agent.network.leave_out_bins()
        return weights

    def _note_samples_of(self, start: Loaded, path: str | Path) -> None:
        """Note what a checkpoint was trained on, and take over its folds if profile and split are the same: what was
        held out of a member stays held out of it.

        Raises:
            InputError: test samples are among them.
        """
        self.seen_before = start.extra.get("seen", [])
        same_rows = torch.equal(start.extra.get("test_rows", self.split.train), self.split.test)
        if same_rows and start.profile_digest == self.table.digest:
            self.fold_seed = start.extra.get("fold_seed", self.seed)
        elif count := len({*self.seen_before} & {*self.table.fingerprints(self.split.test)}):
            raise InputError(
                f"init_from={path}: was trained on {count} of the test samples of profile {self.table.name!r}; "
                "split the profile as its run did (split.seed=…)"
            )

    @functools.cached_property
    def seen(self) -> list[str]:
        """Fingerprints of the samples that were fitted or chosen on, also by what training started from."""
        seen = self.table.fingerprints(torch.cat([self.split.train, self.split.validation]))
        return list(dict.fromkeys([*seen, *self.seen_before]))

    def divide(self) -> tuple[list[Tensor], list[Tensor]]:
        """The rows that each member is fitted on, and those that it is judged on."""
        fitted, judged = rows_of_members(self.table, self.split, self.policy.members, self.fold_seed)
        return fitted, [thinned(rows, MOST_JUDGED) for rows in judged]

    # -- stages --------------------------------------------------------------------------------------------------------

    def _stages(self, settings: OptimiserConfig, env: ConfigBandit) -> list[Stage]:
        """The warm-up, and GRPO or PPO."""
        self.rce = RCELoss(self.actor, functional=False).to(env.device)
        band = self.loss.kl_band
        settings_of_loss = self.loss.of_grpo() | {"kl_to_ref_coeff": self.kl_coeff}
        if self.critic is None:
            method = "GRPO"
            self.grpo: Any = GRPOLoss(self.actor, **settings_of_loss, functional=False).to(env.device)
        else:
            method = "PPO"
            self.grpo = self._ppo().to(env.device)
        name, warm_up, grpo = "RCE", self._with_rewards(self.rce), self.grpo.__call__
        if self.loss.objective == "exact":
            grpo = self._with_rewards(self.grpo)
        elif self.loss.objective == "ppo":
            grpo = self._with_advantages
        if self.policy.structure == "utility":
            self.predictor = OutcomesOfRows(self.actor)
            self.regression = RegressionLoss(self.predictor)
            self.log_latency, self.variance = log_moments(self.table.measurements_ms.to(env.device))
            name, warm_up = "regression", self._regress
            grpo = self._and_regression(grpo) if self.loss.regression_coeff > 0 else grpo
        first = Stage(
            *(name, warm_up, settings.warmup_iterations, settings.warmup_lr, self._prepare_warm_up),
            dropout=True,
            patience=settings.warmup_patience,
        )
        with_bins = replace(first, name=f"{name} with bins", begin=self._begin_with_bins)
        return [
            first,
            *([with_bins] if self._with_bins else []),
            Stage(
                *(method, grpo, settings.iterations, settings.lr, self._prepare_grpo, self._begin_grpo),
                kl_controls=[weight_control(self.grpo.kl_to_ref_coeff, band)] if band else [],
                patience=settings.patience,
                retreat=settings.retreat,
            ),
        ]

    def _ppo(self) -> ClipPPOLoss:
        """PPO (Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 9)."""
        return ClipPPOLoss(
            self.actor,
            self.critic,
            clip_epsilon=self.loss.clip_epsilon,
            entropy_coeff=self.loss.entropy_coeff,
            critic_coeff=self.loss.value_coeff,
            loss_critic_type="l2",
            functional=False,
        )

    def _with_advantages(self, minibatch: TensorDictBase) -> TensorDictBase:
        """PPO's loss of a minibatch.

        An episode is one step, so the return of a draw is its reward, and its advantage is reward − V with the V of
        the moment of collection. V is fitted to the mean over the draws of a context, which has the same gradient as
        fitting it to each of them.
        """
        contexts = minibatch.copy()
        rewards = contexts["next", "reward"]  # [P, M, G]
        contexts["action"] = self.agent.configurations[contexts["configuration"]]
        contexts["value_target"] = rewards.mean(-1, keepdim=True)
        advantage = rewards - contexts["state_value"]
        if self.loss.advantage == "zscore":
            advantage = (advantage - advantage.mean()) / advantage.std().clamp_min(self.loss.advantage_std_floor)
        contexts["advantage"] = advantage.unsqueeze(-1)
        return self.grpo(contexts).apply(torch.mean)  # some diagnostics have a number for each draw

    def _prepare_warm_up(self, share: float, watched: bool) -> None:
        start, end, behaviour = self.loss.temperature_start, self.loss.temperature_end, self.behaviour
        self.rce.temperature.fill_(start + (end - start) * share)
        self.rce.diagnostics = behaviour.with_reference = behaviour.with_log_probs = behaviour.drawing = watched

    def _begin_with_bins(self) -> None:
        """The warm-up again, of a network that also reads the features in bins. GRPO goes on from the better."""
        self.agent.load_state_dict(self._with_bins)

    def _begin_grpo(self) -> None:
        """What GRPO starts from becomes the reference.

        Regression goes on fitting after held-out utility has passed its peak, so GRPO starts from that. RCE's end is
        the better start: with its temperature down, the policy is sharp, which costs utility that GRPO wins back.
        """
        if self.policy.structure == "utility":
            self.agent.load_state_dict(self.best["state"])
        self.reference.load_state_dict(self.agent.state_dict())

    def _prepare_grpo(self, share: float, watched: bool) -> None:
        if isinstance(self.agent.network, UtilityNetwork):
            self.agent.network.sharpen(share)
            assert isinstance(self.reference, Controller)
            assert isinstance(self.reference.network, UtilityNetwork)
            self.reference.network.sharpen(share)  # else the KL would count the sharpness
        self.grpo.diagnostics, self.behaviour.with_log_probs = watched, True
        self.behaviour.with_reference = watched or self.kl_coeff > 0
        self.behaviour.drawing = watched or self.loss.objective != "exact"

    def _with_rewards(self, loss: Callable[[TensorDictBase], TensorDictBase]) -> Callable[..., TensorDictBase]:
        """A loss on the rewards of all configurations: looked up here, not stored in the buffer."""

        def looked_up(minibatch: TensorDictBase) -> TensorDictBase:
            minibatch, row, limit = minibatch.copy(), minibatch["row"], minibatch[self.agent.limit_key]
            rewards = self.env.rewards.all(row.flatten(), limit.flatten(0, row.ndim - 1))
            return loss(minibatch.set("reward_per_configuration", rewards.view(*row.shape, -1)))

        return looked_up

    def _and_regression(self, grpo: Callable[[TensorDictBase], TensorDictBase]) -> Callable[..., TensorDictBase]:
        """GRPO and, with its weight, the regression, both from one prediction."""

        def both(minibatch: TensorDictBase) -> TensorDictBase:
            minibatch = self.predictor(minibatch.copy())
            losses = {key: self.loss.regression_coeff * loss for key, loss in self._regress(minibatch).items()}
            return grpo(minibatch).update(losses)

        return both

    def _regress(self, minibatch: TensorDictBase) -> TensorDictBase:
        """The regression on what was measured of these samples, looked up likewise."""
        minibatch, row = minibatch.copy(), minibatch["row"]
        minibatch["accuracy_per_configuration"] = self.env.rewards.accuracy[row]
        minibatch["log_latency_per_configuration"] = self.log_latency[row]
        minibatch["log_latency_variance"] = self.variance[row]
        if self.cost and self.env.rewards.cost is not None:
            minibatch["cost_per_configuration"] = self.env.rewards.cost[row]
        return self.regression(minibatch)

    # -- held-out data -------------------------------------------------------------------------------------------------

    def choose(self, features: Mapping[str, Tensor], limits: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the members choose for the samples held out of them, `judged_rows`; `judge` calls it."""
        return self._held_out[str(limits[0].tolist())].argmax(-1).cpu()

    @torch.no_grad()
    def _held_out_log_probs(self) -> dict[str, Tensor]:
        """[n, C] under each judged limit, in the order of `judged_rows`. Outcomes are predicted once for all limits."""
        rows = self.held_out.flatten()
        contexts: TensorDictBase = TensorDict({"row": rows}, [len(rows)], device=self.device)
        if self.policy.structure == "utility":
            contexts = self.predictor(contexts)
        limits = {
            str(each.tolist()): contexts.copy().set(self.agent.limit_key, for_all(each, rows)) for each in self.limits
        }
        return {limit: self.actor.get_dist(each).log_probs[self.places] for limit, each in limits.items()}

    @functools.cached_property
    def _held_out_rewards(self) -> dict[str, Tensor]:
        """[n, C] under each judged limit, 0 where not profiled."""
        rows, limits = self.judged_rows.to(self.device), self.limits.to(self.device)
        return {str(each.tolist()): self.env.rewards.all(rows, for_all(each, rows)).nan_to_num() for each in limits}

    def _judge(self) -> tuple[float, Mapping[str, float]]:
        """Greedy decisions."""
        self._held_out = self._held_out_log_probs()
        judged = judge(self, self.table, self.judged_rows, self.limits, self.env.rewards)
        score = float(getattr(judged, self.judged_by).mean())
        if self.log is None:
            return score, {}
        metrics = judged.metrics() | {"Loss": self._validation_loss()}
        if self.priced:
            metrics = {name: metrics[name] for name in metrics if name.split("_")[0] in PRICED_METRICS}
        return score, metrics

    def _validation_loss(self) -> float:
        """−E_π[reward] of the policy's own distribution, not of its greedy decisions: what GRPO minimises, without
        baseline, clip and KL. Mean over the held-out samples and the judged limits."""
        rewards, policies = self._held_out_rewards, self._held_out
        limits = map(str, self.limits.tolist())  # the same limit may stand there twice
        return float(torch.stack([-(policies[x].exp() * rewards[x]).sum(-1).mean() for x in limits]).mean())

    def _metrics(self, data: TensorDictBase, outputs: TensorDictBase) -> Mapping[str, float]:
        """What the drawn group got, and the outputs of the loss, under their logged names."""
        data = data.flatten(0, 1).cpu()
        budgets_ms = None if self.priced else data["budget_ms"]
        metrics = drawn_metrics(self.table, data["row"], data["configuration"], data["next", "reward"], budgets_ms)
        metrics |= {name: float(outputs[key]) for key, name in LOGGED.items() if key in outputs}
        if self.stage.kl_controls:
            metrics["Beta"] = float(self.grpo.kl_to_ref_coeff)
        if self.stage is not self.stages[-1]:  # another kind of loss, which has an axis of its own
            metrics[f"{'RCE' if self.stage.name == 'RCE' else 'Regression'}_Loss"] = metrics.pop("Loss")
        return {f"Train/{name}": value for name, value in metrics.items()} | {"Train/LR": self._learning_rate()}

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def provenance(self) -> dict[str, Any]:
        """How the controller came about: from which samples, how good on held-out ones."""
        rows = {f"{part}_rows": rows for part, rows in self.split._asdict().items()}
        return {
            "validation_utility": self.best["score"],
            "iteration": self.best["iteration"],
            "seen": self.seen,
            "fold_seed": self.fold_seed,
            "grpo": self._gained(),
            **rows,
        }

    def _gained(self) -> dict[str, float]:
        """Validation utility where GRPO starts, and of its `best` and `last` evaluation; {} without warm-up or GRPO."""
        begins = self.total - self.settings.iterations
        before = [score for iteration, score in self.scores if iteration <= begins]
        after = [score for iteration, score in self.scores if iteration > begins]
        if not (begins and before and after):
            return {}
        start = max(before) if self.policy.structure == "utility" else before[-1]  # as `_begin_grpo`
        return {"start": start, "best": max(after), "last": after[-1]}

    def training_state(self) -> dict[str, Any]:
        critic = None if self.critic is None else self.critic.state_dict()
        return super().training_state() | {"start": self.start_sums, "critic": critic}

    def _restore(self, loaded: Loaded, state: Mapping[str, Any]) -> bool:
        network = loaded.network
        if (network.config, network.priced, network.cost) != (self.policy, self.priced, self.cost):
            return False
        if state.get("start") != self.start_sums:
            return False
        self.agent.load_state_dict(network.state_dict())
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])
        return True
