"""The training of a controller, in stages of one loop:

1. a teacher, by regression on what was measured;
2. the heads imitate what the teacher makes of requests, or without one the rewards, by RCE;
3. GRPO, or PPO, on the reward that is charged.

Several networks are trained side by side, each on contexts of its own samples: a batch is
[contexts, networks]. A network of a fold is judged on samples that neither it nor its teacher was
fitted on. The last network learns from all samples. The loop is that of
`knobwise.agents.training.loop`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn import functional
from torchrl.objectives import ClipPPOLoss

from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.checkpoint import load_checkpoint, started_from
from knobwise.agents.controller.actor import Behaviour, make_actor, make_critic
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.teacher.distillation import lessons_of
from knobwise.agents.teacher.experts import Experts
from knobwise.agents.teacher.teacher import Fitted, Teacher, fit_teacher
from knobwise.agents.training.judged_trainer import JudgedTrainer
from knobwise.agents.training.loop import NOTHING
from knobwise.agents.training.seeding import seeded, weight_sums
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.agents.training.stage import Stage
from knobwise.envs.bandit.budgets import default_budgets, judged_worths, log_moments
from knobwise.envs.bandit.drift import copies_of, rows_of_copies
from knobwise.envs.bandit.reward_kinds import KINDS
from knobwise.envs.bandit.settings import REWARDS, BalanceConfig, BudgetConfig, RewardConfig
from knobwise.envs.bandit.torchrl_env import ConfigBandit
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.losses import GRPOLoss, RCELoss
from knobwise.losses.functional import (
    STD_FLOOR,
    even_weight,
    regression_losses,
    reward_spread,
    reward_weighted_cross_entropy,
)
from knobwise.losses.kl_control import weight_control
from knobwise.losses.settings import LossConfig

VALUE_COEFF = 1.0
"""Weight of the squared error of PPO's value network."""
VALUE_UNIT = 3.0
"""PPO's rewards and values are in units of so many spreads of rewards: the value network begins at
0, and what it learns is near 1."""
RCE_TEMPERATURES = 3.0, 0.6
"""τ of the RCE warm-up at its beginning and its end, in units of the spread of rewards; it falls
linearly."""
SPREAD_CELLS = 1 << 22
"""The spread of rewards is measured on at most as many rewards, or one context for each network."""
# settings of the teacher's regression, as in `Stage`
TEACHER_LR = 3e-3
TEACHER_DECAY = 0.05
TEACHER_CLIP = 5.0
TEACHER_PATIENCE = 6

MOST_NOISE = 1 << 24
"""Numbers that are drawn for `policy.augment`; in larger tables copies share them."""

STORED = ("row", "configuration", "state_value", ("next", "reward"))
"""Collected keys that go into the buffer, with those that the losses read."""


class ControllerTrainer(JudgedTrainer):
    """Trains one controller with one seed.

    Args:
        split: fit on `train`, choose on `validation`, or both in folds (`policy.members`); `test`
            is not used.
        reward: the reward; under a mean budget it is always `priced`.
        budgets_ms: float [B], the budgets of validation; None for the default budgets. Under a
            mean budget, validation uses worths instead.
        cost_ms: the time that a decision and its features take, which the reward charges.
        init_from: a checkpoint whose heads training starts from, with the statistics that its
            inputs are standardised by (`started_from`); None for fresh weights. Samples that it was
            trained on count as seen.
        fold_seed: seed of the folds; None for `seed`.
        experts: returns the teacher's experts, fitted on the training and validation samples; None
            fits them here.
        seed, device, **options: see `Trainer`, which also takes `folder` and `log`.
    """

    reference: Controller
    loss: LossConfig

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
        cost_ms: float = 0.0,
        init_from: str | Path | None = None,
        fold_seed: int | None = None,
        experts: Callable[[], Experts] | None = None,
        seed: int = 0,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        settings = optimiser or OptimiserConfig()
        super().__init__(table, split, settings, seed=seed, device=device, **options)
        # the settings
        self.policy = policy or PolicyConfig()
        self.loss = loss or LossConfig()
        self.cost_ms = cost_ms
        self.fold_seed = seed if fold_seed is None else fold_seed
        self._experts = experts
        self.networks = self.policy.members_trained
        self.teaches = self.policy.teacher and settings.warmup_iterations > 0
        self.sense = "deadline" if budget is None else budget.sense
        self.priced = self.sense == "mean"
        if self.priced:
            reward = REWARDS[self.sense]
            budgets_ms = judged_worths(table)
        self.limits = default_budgets(table) if budgets_ms is None else budgets_ms
        # utility under budgets is judged, and the reward under prices
        self.judged_by = "utility"
        if reward is not None:
            self.judged_by = KINDS[reward.kind].judged_by
        # the networks, the environment that they act in, and the stages
        with seeded(seed, device):
            agent = self._first_agent(init_from).to(device).eval()
            reference = self._build_policies(agent.controller)
            env = self._environment(budget, reward, balance)
            stages = self._stages(agent)
            self._assemble(
                agent,
                reference,
                env,
                self.behaviour,
                stages,
                identity=(self.policy, self.sense, self.start_sums),
                stored={*self.rce.in_keys, *self.grpo.in_keys, *STORED} - {"action"},
                shape=(settings.contexts, self.networks),
                critic=self.critic,
            )

    @property
    def _group_size(self) -> int:
        """Draws per context; the exact objective weighs all configurations and needs only one."""
        return 1 if self.loss.objective == "exact" else self.loss.group_size

    @property
    def kl_coeff(self) -> float:
        """The weight of the KL in GRPO."""
        if self.loss.kl_to_ref_coeff is not None:
            return self.loss.kl_to_ref_coeff
        return 1.0 if self.policy.teacher else 0.0

    def _environment(
        self,
        budget: BudgetConfig | None,
        reward: RewardConfig | None,
        balance: BalanceConfig | None,
    ) -> ConfigBandit:
        """Return the environment: contexts for all networks in turn, each of its own rows."""
        return ConfigBandit(
            self.copied,
            batch_size=self.settings.contexts * self.networks,
            group_size=self._group_size,
            budget=budget,
            reward=reward,
            balance=(balance or BalanceConfig()).by,
            rows=[rows_of_copies(rows, self.table, self.copied) for rows in self.network_rows],
            seed=self.seed,
            unprofiled="error",
            action="configuration",
            lean=True,
            cost_ms=self.cost_ms,
            device=self.device,
        )

    # -- the networks ------------------------------------------------------------------------------

    def _first_agent(self, init_from: str | Path | None) -> DeployedController:
        """Return the agent that training starts from; note the fitted and the held-out samples."""
        # folds of a checkpoint are taken over before the samples are divided
        self.seen_before = []
        start = None
        if init_from is not None:
            start = load_checkpoint(init_from)
            self._note_samples_of(start, init_from)
        fitted, held_out = self.divide()
        self.fitted = fitted[0]
        self.network_rows = fitted
        if len(fitted) > 1:  # folds, and a last network of all samples
            self.fitted = self.split.fitted
            self.network_rows = [*fitted, self.fitted]
        self._note_held_out(held_out)
        # fresh networks, or those of the checkpoint
        controller = Controller.for_table(self.table, self.fitted, self.policy, self.sense)
        self.start_sums: list[float] | None = None
        if start is not None:
            controller = started_from(str(init_from), start, controller)
            self.start_sums = weight_sums(controller.state_dict())
        teacher = None
        if self.teaches:
            masks = torch.stack([torch.isin(self.fitted, rows) for rows in fitted])
            teacher = Teacher.for_table(
                self.table, self.fitted, self.policy, controller.normaliser, masks, self.sense
            )
        return DeployedController(controller, teacher)

    def _build_policies(self, controller: Controller) -> Controller:
        """Build the actor, the behaviour policy and, for PPO, a critic; return the reference."""
        reference = copy.deepcopy(controller).requires_grad_(False)
        # networks also learn from copies of the samples: on slower or faster machines
        self.drift = 0.0
        if not self.priced and len(controller.network.values):
            self.drift = self.policy.drift
        noisy = self.policy.augment > 0 and controller.normaliser.width > 0
        self.copied, offsets = copies_of(self.table, self.drift, noisy, self.seed)
        # and from features with noise
        self.augment = 0.0
        noise = None
        if noisy and self.copied is not self.table:
            self.augment = self.policy.augment
            count = min(self.copied.num_samples, MOST_NOISE // controller.normaliser.width)
            generator = torch.Generator().manual_seed(self.seed)
            noise = controller.normaliser.noise(self.augment, max(count, 1), generator)
        self.actor = make_actor(
            controller, self.table, self._group_size, members=True, offsets=offsets, noise=noise
        ).to(self.device)
        self.critic = None
        if self.loss.objective == "ppo":
            self.critic = make_critic(controller, self.table, noise)
        self.behaviour = Behaviour(self.actor, reference, self.loss.objective, self.critic)
        return reference

    # -- stages ------------------------------------------------------------------------------------

    def _stages(self, agent: DeployedController) -> list[Stage]:
        """Return the teacher's stages, where there is one, the warm-up, and GRPO or PPO."""
        settings = self.settings
        self.rce = RCELoss(self.actor, functional=False).to(self.device)
        warm_up = Stage(
            "RCE",
            lambda minibatch: self.rce(self._with_rewards(minibatch)),
            settings.warmup_iterations,
            settings.warmup_lr,
            settings.weight_decay,
            settings.clip_grad,
            self._prepare_warm_up,
            self._begin_rce,
            dropout=True,
            loss_name="RCE_Loss",
        )
        stages: list[Stage] = []
        if agent.teacher is not None:
            stages = self._teacher_stages(agent.teacher)
            warm_up.name = "imitation"
            warm_up.loss_name = "Imitation_Loss"
            warm_up.loss = self._imitate
            warm_up.draw = self._draw_lessons
            warm_up.begin = self._begin_imitation
        return [*stages, warm_up, self._last_stage()]

    def _last_stage(self) -> Stage:
        """Return the stage of GRPO, or of PPO (Schulman et al. 2017, "Proximal Policy Optimization
        Algorithms", equation 9)."""
        loss = self.loss
        stage = Stage(
            "GRPO",
            lambda minibatch: self.grpo(minibatch),
            self.settings.iterations,
            self.settings.lr,
            self.settings.weight_decay,
            self.settings.clip_grad,
            self._prepare_grpo,
            self._begin_grpo,
            patience=self.settings.patience,
        )
        if loss.objective == "ppo":
            stage.name = "PPO"
            stage.loss = self._with_advantages
            self.grpo = ClipPPOLoss(
                self.actor,
                self.critic,
                clip_epsilon=loss.clip_epsilon,
                entropy_coeff=loss.entropy_coeff,
                critic_coeff=VALUE_COEFF,
                loss_critic_type="l2",
                functional=False,
            ).to(self.device)
            return stage
        if loss.objective == "exact":
            stage.loss = lambda minibatch: self.grpo(self._with_rewards(minibatch))
        coefficients = loss.of_grpo() | {"kl_to_ref_coeff": self.kl_coeff}
        self.grpo = GRPOLoss(self.actor, **coefficients, functional=False).to(self.device)
        if loss.kl_band:
            stage.kl_controls = [weight_control(self.grpo.kl_to_ref_coeff, loss.kl_band)]
        return stage

    def _teacher_stages(self, teacher: Teacher) -> list[Stage]:
        """Return the regression, and where bins of the features are tried another with them."""
        measurements_ms = self.table.measurements_ms.to(self.all_features.device)
        self.log_latency, self.variance = log_moments(measurements_ms)
        first = Stage(
            "regression",
            self._regress,
            self.settings.teacher_iterations,
            TEACHER_LR,
            TEACHER_DECAY,
            TEACHER_CLIP,
            self._prepare_warm_up,
            draw=self._draw_rows,
            dropout=True,
            patience=TEACHER_PATIENCE,
            loss_name="Regression_Loss",
            judged="teacher",
        )
        if not teacher.network.edges.numel():
            return [first]
        with_bins = copy.deepcopy(teacher.state_dict())
        begin = functools.partial(teacher.load_state_dict, with_bins)
        teacher.network.leave_out_bins()
        return [first, replace(first, name="regression with bins", begin=begin)]

    # -- what happens where a stage begins, and before each iteration ------------------------------

    def _begin_imitation(self) -> None:
        """Load the best teacher; from here on the heads are judged and kept."""
        if self.best["state"] is not None:
            self.agent.load_state_dict(self.best["state"])
        self.best = NOTHING

    def _begin_rce(self) -> None:
        """Measure how much rewards differ among the better half of each context's configurations.

        What is far too late would hide the differences between those that compete.
        """
        rewards, _ = self._rewards_in_training()
        count = (rewards > -torch.inf).sum(-1)
        rank = rewards.argsort(-1, descending=True).argsort(-1)
        better = even_weight(rank < (count.unsqueeze(-1) + 1) // 2)
        self._note_spread(rewards, better)

    def _begin_grpo(self) -> None:
        """Measure how much rewards differ between the policy's draws, and take the end of the
        warm-up as the reference.

        At the end of the warm-up the temperature is low and the policy is sharp. RCE's best
        held-out state may have been better, but GRPO soon makes up for that.
        """
        rewards, contexts = self._rewards_in_training()
        self._note_spread(rewards, self.actor.get_dist(contexts).log_probs.exp())
        self.reference.load_state_dict(self.agent.controller.state_dict())
        # the score of each held-out sample where GRPO begins
        if self.stages[-1].start:
            outcomes = self._outcomes(self._policies(self.held_out_log_probs))
            self.scores_before = getattr(outcomes, self.judged_by).mean(1)

    @torch.no_grad()
    def _rewards_in_training(self) -> tuple[Tensor, TensorDict]:
        """Draw contexts that training draws again; return the rewards of their configurations,
        float [n·M, C], −∞ where not profiled, and the contexts."""
        sampler = self.env.contexts
        count = min(SPREAD_CELLS // self.table.num_configurations // self.networks, 1024)
        rows, limits = sampler(max(count, 1) * self.networks)
        sampler.set_back(sampler.before)
        inputs = {"row": rows, self.agent.controller.limit_key: limits}
        contexts = TensorDict(inputs, [len(rows)], device=self.device)
        rewards = self.env.rewards.all(*contexts.values())
        return rewards.nan_to_num(-torch.inf), contexts

    @torch.no_grad()
    def _note_spread(self, rewards: Tensor, weight: Tensor) -> None:
        """Set the unit of rewards to their spread under these weights, both [n, C], unless the
        settings name a unit."""
        spread = reward_spread(rewards.where(weight > 0, 0.0), weight)
        # without differences any unit will do
        self.reward_spread = self.loss.reward_spread or float(spread) or 1.0

    def _prepare_warm_up(self, share: float, watched: bool) -> None:
        """Set RCE's temperature; without diagnostics nothing has to be drawn."""
        start, end = RCE_TEMPERATURES
        temperature = start + (end - start) * share
        self.rce.temperature.fill_(temperature * (self.reward_spread or 1.0))
        behaviour = self.behaviour
        self.rce.diagnostics = watched
        behaviour.with_reference = behaviour.with_log_probs = behaviour.drawing = watched

    def _prepare_grpo(self, share: float, watched: bool) -> None:
        """Let the behaviour policy compute only what this iteration reads."""
        self.grpo.diagnostics = watched
        self.grpo.reward_spread = self.reward_spread
        self.behaviour.with_log_probs = True
        self.behaviour.with_reference = watched or self.kl_coeff > 0
        self.behaviour.drawing = watched or self.loss.objective != "exact"

    # -- losses of a minibatch ---------------------------------------------------------------------

    def _draw_rows(self, contexts: int) -> TensorDictBase:
        """Draw rows of the networks' samples, [n, M], in the place of collected contexts."""
        rows = self.env.contexts.draw_rows(contexts * self.networks).to(self.device)
        return TensorDict({"row": rows.view(contexts, self.networks)}, [contexts])

    def _regress(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Return the regression's loss on the measurements of the drawn samples."""
        rewards = self.env.rewards
        row = minibatch["row"][:, : self.agent.teacher.members].T  # [M, n]
        predicted = self.agent.teacher.network(self.actor.module[0].module.features_of(row))
        row = row % self.table.num_samples  # row i + k·N is a copy of sample i
        measured = (rewards.accuracy, self.log_latency, self.variance)
        cells = [functional.embedding(row, values) for values in measured]
        wrong, off = regression_losses(predicted, *cells)
        return TensorDict({"loss_accuracy": wrong.mean(), "loss_latency": off.mean()})

    def _draw_lessons(self, contexts: int) -> TensorDictBase:
        """Draw random lessons for each network, [M, n], in the place of collected contexts."""
        members, requests, limits = self.lessons.shape
        request = torch.randint(requests, (members, contexts))
        limit = torch.randint(limits, (members, contexts))
        drawn = self.lessons[torch.arange(members).unsqueeze(1), request, limit]
        return drawn.to(self.device)

    def _imitate(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Return the heads' cross-entropy to the teacher on lessons.

        The target is softmax(sharpness · the teacher's expected worths).
        """
        inputs = minibatch["x"], minibatch["limit"], None, minibatch.get("by_value", None)
        log_probs = self.agent.controller.network(*inputs)
        temperature = 1 / self.policy.sharpness
        loss = reward_weighted_cross_entropy(log_probs, minibatch["worth"], temperature)
        return TensorDict({"loss_imitation": loss.mean()})

    def _with_rewards(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Return a minibatch with the rewards of all configurations, which are looked up, not
        stored."""
        row = minibatch["row"]
        limit = minibatch[self.agent.controller.limit_key]
        rewards = self.env.rewards.all(row.flatten(), limit.flatten(0, row.ndim - 1))
        return minibatch.copy().set("reward_per_configuration", rewards.view(*row.shape, -1))

    def _with_advantages(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Return PPO's loss of a minibatch.

        An episode is one step, so the return of a draw is its reward. Its advantage is reward − V,
        with V as it was at collection. V is fitted to the mean reward of a context's draws, which
        has the same gradient as fitting it to each draw.
        """
        contexts = minibatch.copy()
        unit = VALUE_UNIT * (self.reward_spread or 1.0)
        rewards = contexts["next", "reward"] / unit  # [P, M, G]
        contexts["action"] = self.agent.configurations[contexts["configuration"]]
        contexts["value_target"] = rewards.mean(-1, keepdim=True)
        advantage = rewards - contexts["state_value"]
        if self.loss.advantage == "zscore":
            floor = STD_FLOOR / VALUE_UNIT
            if self.loss.advantage_std_floor is not None:
                floor = self.loss.advantage_std_floor / unit
            std = advantage.std().clamp_min(floor) + self.loss.advantage_std_eps / unit
            advantage = (advantage - advantage.mean()) / std
        contexts["advantage"] = advantage.unsqueeze(-1)
        return self.grpo(contexts).apply(torch.mean)  # some diagnostics come for each draw

    # -- the teacher and its lessons ---------------------------------------------------------------

    @functools.cached_property
    def taught_by(self) -> Fitted:
        """The teachers of all samples and of the folds, on the CPU, fitted from the trained
        network."""
        teacher = copy.deepcopy(self.agent.teacher).cpu()
        experts = None
        # shared experts read features by the statistics of this profile, not of a checkpoint
        if self._experts is not None and self.start_sums is None:
            experts = self._experts()
        return fit_teacher(
            self.table, self.fitted, teacher, self.policy, self.limits, self.fold_seed, experts
        )

    @functools.cached_property
    def lessons(self) -> TensorDict:
        """The lessons that the heads imitate."""
        settings = self.settings
        draws = settings.warmup_iterations * settings.epochs * settings.contexts
        values = self.agent.controller.network.values.cpu()
        about = self.taught_by, self.table, self.limits, draws, self.seed
        return lessons_of(*about, self.drift, values, self.augment)
