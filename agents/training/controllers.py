"""What the stages of a controller's training share, in the order in which it is made: samples,
networks, the actor, and the environment that it acts in.

There are several networks (`agents.controller.side_by_side`) unless `policy.fold_networks` = 1: one
for each fold, which is judged on the fold's samples, and a last one of all samples.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from knobwise.agents.controller.actor import Actor, make_actor, make_critic
from knobwise.agents.controller.controller import Controller
from knobwise.agents.problem import Problem
from knobwise.agents.training.checkpoint import Loaded, load_checkpoint, started_from
from knobwise.agents.training.controller_settings import ControllerSettings
from knobwise.agents.training.controller_stages import RCE, ControllerStage, grpo_stage
from knobwise.agents.training.held_out import HeldOut
from knobwise.agents.training.samples import refuse_known_samples, samples_of_training
from knobwise.agents.training.seeding import seeded, weight_sums
from knobwise.agents.training.state import Provenance
from knobwise.agents.training.trainer import Trainer
from knobwise.envs.bandit.budgets import MIN_LATENCY_MS
from knobwise.envs.bandit.reward_kinds import KINDS
from knobwise.envs.bandit.settings import BudgetConfig
from knobwise.envs.bandit.torchrl_env import ConfigBandit
from knobwise.envs.tables.drift import Copied, copies_of, rows_of_copies
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.losses.own import OwnLoss

if TYPE_CHECKING:
    from knobwise.agents.training.stage import Log

COLD_ENTROPY = 0.3
"""Weight of the entropy, in units of the spread of rewards, where GRPO starts cold.

Without it the policy settles before it has learned: it closes .01 of the gap from static to the
oracle in place of .48 on poppler, and .52 in place of .72 on a portfolio of solvers (qbf16), by
experiments/studies/grpo_parts.py."""
SPREAD_CELLS = 1 << 22
"""The spread of rewards is measured on at most as many rewards, or one context for each network."""


class ControllerSetup:
    """Everything that a controller is trained with, but for its stages. To be made inside `seeded`.

    Args:
        problem: what is learned. Its split says what to fit on, `train`, and to choose on,
            `validation`, or both in folds (`policy.fold_networks`); `test` is not used.
        settings: what it is trained for, and how.
        seed: of the initialisation, the contexts and the draws.
        device: `cpu` or `cuda`.
        distiller: makes the teacher of the controller; its `make` is called with this right after
            the networks are there. None for nothing.

    Attributes:
        policy, loss, settings: of `ControllerSettings`; `settings` are those of the optimiser.
        own_loss: the loss of the user's own, if that is what `loss` names.
        folds: the rows that each fold's network is fitted on, and those that it is judged on.
        fitted: int64 [n], the rows that the deployed network is fitted on.
        limits: float [B], the judged budgets in ms, or values of a right answer.
        controller, reference: the networks that learn, and a copy for the KL.
        copied: the samples with their copies, see `copies_of`.
        drift: the largest size of their drift, in ln ms.
        actor, critic: the policy that draws, and for PPO its value network.
        env: where contexts and rewards come from.
        held_out: judges the networks.
        seen: fingerprints of the samples fitted or chosen on, also by the checkpoint started from.
    """

    def __init__(
        self,
        problem: Problem,
        settings: ControllerSettings,
        *,
        seed: int = 0,
        device: str = "cpu",
        distiller: Any = None,
    ) -> None:
        self.problem = problem
        self.facts = problem.facts
        self.split = problem.split
        self.policy = settings.policy
        self.loss = settings.loss
        # code of the user's own fails first
        self.own_loss = OwnLoss(settings.loss) if settings.loss.is_own else None
        self.settings = settings.optimiser
        self._asked_for = settings
        self.rule = problem.rule
        self.cost_ms = settings.cost_ms
        self.limits = self.rule.judged_limits(problem.values, problem.cells, settings.budgets_ms)
        self.seed = seed
        self.device = torch.device(device)

        # samples: what each network is fitted on, and judged on
        start = None if settings.init_from is None else load_checkpoint(settings.init_from)
        samples = samples_of_training(problem.facts, problem.split, settings, start, seed)
        self.folds = samples.folds
        self.fitted = samples.fitted
        self.fold_seed = samples.fold_seed
        self._seen_before = samples.seen_before

        # networks: those that learn, of the teacher too, and the reference
        self.controller = first_controller(problem, self.fitted, settings, start)
        self.start_sums: list[float] | None = None
        if start is not None:
            self.start_sums = weight_sums(self.controller.state_dict())
            refuse_known_samples(start, problem, samples, settings)
        self.distiller = distiller
        if distiller is not None:
            distiller.make(self).to(self.device).eval()
        self.controller.to(self.device).eval()
        self.reference = copy.deepcopy(self.controller).requires_grad_(False)

        # the actor, which also sees copies of the samples, and where it acts
        self.drift = 0.0
        if self.rule.late and len(self.controller.network.values):
            self.drift = self.policy.drift
        copies = copies_of(problem.values, self.drift, seed, problem.cells)
        self.copied = copies.table
        self.actor, self.critic = self._actor_and_critic(copies)
        self.env = self._environment(copies, samples.by_network, settings)
        self.held_out = HeldOut(
            problem,
            self.folds[1],
            self.networks,
            limits=self.limits,
            rewards=self.env.rewards,
            judged_by=self.judged_by,
            cost_ms=self.cost_ms,
        )

    def _actor_and_critic(self, copies: Copied) -> tuple[Actor, Any]:
        """Return the policy that draws, and for PPO its value network, else None."""
        facts, mask = self.facts, self.problem.mask
        actor = make_actor(
            self.controller,
            facts,
            self.group_size,
            all_networks=True,
            offsets=copies.offsets,
            mask=mask,
        ).to(self.device)
        if self.loss.objective != "ppo":
            return actor, None
        return actor, make_critic(self.controller, facts, mask).to(self.device)

    def _environment(
        self, copies: Copied, rows: Sequence[Tensor], settings: ControllerSettings
    ) -> ConfigBandit:
        """Return where contexts and rewards come from, for each network of its own rows."""
        return ConfigBandit(
            copies.table,
            batch_size=self.settings.contexts * self.networks,
            group_size=self.group_size,
            budget=self._budgets_drawn(settings.budget),
            reward=self.rule.charged(settings.reward),
            balance=settings.balance.by,
            rows=[rows_of_copies(part, self.facts, copies.table) for part in rows],
            seed=self.seed,
            unprofiled="error",
            action="configuration",
            observe_features=False,
            cells=copies.cells,
            device=self.device,
        )

    def _budgets_drawn(self, budget: BudgetConfig) -> BudgetConfig:
        """Return the settings by which training draws budgets; those of `spread` go over what is
        left of the judged ones. Values of a right answer are drawn in one way."""
        if not self.rule.late:
            return budget
        if budget.strategy is None and self.starts_cold:
            budget = replace(budget, strategy="spread")
        if budget.strategy == "spread" and not budget.values_ms:
            left = self.rule.left(self.limits, self.cost_ms)
            # of a budget that a decision takes whole nothing is left to learn for
            left = left[left > MIN_LATENCY_MS] if (left > MIN_LATENCY_MS).any() else self.limits
            budget = replace(budget, values_ms=tuple(left.tolist()))
        return budget

    @property
    def networks(self) -> int:
        """M, the number of networks side by side."""
        return self.policy.networks_trained

    @property
    def judged_by(self) -> str:
        """The score that networks are judged by: utility under budgets, reward under prices."""
        return KINDS[self.env.rewards.config.kind].judged_by

    @property
    def exact(self) -> bool:
        """True if GRPO weighs all configurations."""
        if self.own_loss is not None:
            return self.own_loss.exact
        return self.loss.objective == "exact"

    @property
    def group_size(self) -> int:
        """Draws per context; the exact objective weighs all configurations and needs only one."""
        return 1 if self.exact else self.loss.group_size

    @property
    def augment(self) -> float:
        """The size of the noise on standardised features; 0 without features."""
        augment = self.controller.config.augment or 0.0
        return augment if self.controller.normaliser.width else 0.0

    @property
    def starts_cold(self) -> bool:
        """True if GRPO is all that a policy learns by, without a warm-up or a checkpoint; PPO has
        its value network."""
        warm = self.settings.pretrain_iterations or self.start_sums is not None
        return not warm and self.loss.objective != "ppo"

    @property
    def drops_out(self) -> bool:
        """True if the network drops out in GRPO's loss, as it does in that of the warm-up."""
        if self.loss.dropout is not None:
            return self.loss.dropout
        return self.starts_cold

    @property
    def entropy_coeff(self) -> float:
        """The weight of the entropy in GRPO."""
        if self.loss.entropy_coeff is not None:
            return self.loss.entropy_coeff
        return COLD_ENTROPY if self.starts_cold else 0.0

    @property
    def kl_coeff(self) -> float:
        """The weight of the KL in GRPO."""
        if self.loss.kl_to_ref_coeff is not None:
            return self.loss.kl_to_ref_coeff
        if not self.policy.teacher:
            return 0.0
        # rewards of single samples are noisier than what the teacher has learned from all of them
        learned = KINDS[self.env.rewards.config.kind].learned_by_teacher
        return 10.0 if learned else 1.0

    @property
    def rows(self) -> Any:
        """The encoder of the actor, which looks rows of the table up."""
        return self.actor.module[0].module

    @functools.cached_property
    def over(self) -> Tensor | None:
        """bool [N, C], the answers that cost more than a limit; None without limits."""
        return self.rule.over(self.problem.values)

    @functools.cached_property
    def seen(self) -> list[str]:
        """Fingerprints of the samples fitted, chosen or calibrated on, in this order, also by the
        checkpoint started from."""
        fitted = self.facts.fingerprints(self.split.fitted)
        return list(dict.fromkeys([*fitted, *self.proof, *self._seen_before]))

    @functools.cached_property
    def proof(self) -> list[str]:
        """Fingerprints of the samples that a promise is tested on, and nothing is fitted on."""
        held_back = self.problem.calibration
        return [] if held_back is None else self.facts.fingerprints(held_back)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What a training must agree with to be gone on with, beside the profile."""
        settings = self._asked_for
        aims = (
            self.loss,
            self.env.rewards.config,
            settings.budget,
            settings.balance,
            self.rule.words,
        )
        return self.policy, *aims, self.settings, self.start_sums, self._rows_used

    @property
    def _rows_used(self) -> str:
        """A hash of the rows that each network is fitted and judged on, in order, and of those that
        are left out."""
        rows = [*self.folds[0], *self.folds[1], *self.split]
        if self.problem.calibration is not None:
            rows.append(self.problem.calibration)
        digest = hashlib.sha256()
        for part in rows:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part.to(torch.int64).numpy().tobytes())
        return digest.hexdigest()[:16]

    def held_out_log_probs(self, limit: Tensor) -> Tensor:
        """Return log-probs of the held-out samples under one limit, see `HeldOut.log_probs`."""
        return self.held_out.log_probs(self.actor, limit)

    @torch.no_grad()
    def rewards_in_training(self) -> tuple[Tensor, TensorDict]:
        """Draw contexts that training draws again; return the rewards of their configurations,
        float [n·M, C], −∞ where not profiled, and the contexts."""
        sampler = self.env.contexts
        count = min(SPREAD_CELLS // self.facts.num_configurations // self.networks, 1024)
        rows, limits = sampler(max(count, 1) * self.networks)
        sampler.set_back(sampler.before)
        inputs = {"row": rows, self.rule.limit_key: limits}
        contexts = TensorDict(inputs, [len(rows)], device=self.device)
        rewards = self.env.rewards.all(contexts["row"], contexts[self.rule.limit_key])
        return rewards.nan_to_num(-torch.inf), contexts

    def with_rewards(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Return a minibatch with the rewards of all configurations, which are looked up, not
        stored."""
        row = minibatch["row"]
        limit = minibatch[self.rule.limit_key]
        rewards = self.env.rewards.all(row.flatten(), limit.flatten(0, row.ndim - 1))
        return minibatch.copy().set("reward_per_configuration", rewards.view(*row.shape, -1))


def first_controller(
    problem: Problem, fitted: Tensor, settings: ControllerSettings, start: Loaded | None = None
) -> Controller:
    """Return the controller that training starts from: fresh, or with the weights of a checkpoint.

    Args:
        problem: what is learned.
        fitted: int64 [n], the rows that statistics of a fresh one are taken from.
        settings: the policy, the constraint, and where the checkpoint was.
        start: the checkpoint; None for fresh weights.

    Raises:
        InputError: the checkpoint does not fit, see `started_from`.
    """
    fresh = Controller.for_table(
        problem.facts, fitted, settings.policy, problem.rule, problem.cells
    )
    if start is None:
        return fresh
    return started_from(str(settings.init_from), start, fresh)


def controller_trainer(
    table: ProfileTable | Problem,
    split: Split | None = None,
    *,
    seed: int = 0,
    device: str = "cpu",
    folder: Path | None = None,
    log: Log | None = None,
    **settings: Any,
) -> Trainer:
    """Return the training of a controller that learns from rewards alone: RCE, then GRPO or PPO.

    With a teacher (`policy.teacher`) it is `agents.calibration.training.distillation_trainer`.

    Args:
        table: the profile, or the problem.
        split: of a profile, see `ControllerSetup`; a problem has its own.
        settings: see `ControllerSettings`.
        seed, device, folder, log: see `Trainer`.
    """
    problem = Problem.from_table(table, split, settings.get("budget"))
    with seeded(seed, device):
        setup = ControllerSetup(problem, ControllerSettings(**settings), seed=seed, device=device)
        stages = [RCE(setup), grpo_stage(setup)]
        return make_trainer(setup, setup.controller, stages, folder, log)


def make_trainer(
    setup: ControllerSetup,
    agent: nn.Module,
    stages: list[ControllerStage],
    folder: Path | None = None,
    log: Log | None = None,
) -> Trainer:
    """Return the trainer of a controller's stages. To be called inside the `seeded` of the setup.

    Args:
        agent: what checkpoints hold: the controller, or it and what teaches it.
    """
    return Trainer(
        agent,
        stages,
        setup.env,
        table=setup.facts,
        settings=setup.settings,
        shape=(setup.settings.contexts, setup.networks),
        reads=setup.actor.in_keys,
        validate=lambda logged: setup.held_out.validation(
            setup.held_out.policies(setup.held_out_log_probs), logged
        ),
        # where cells are missing it rests on predictions, also where it says how training goes
        judged_by=f"predicted {setup.judged_by}" if setup.problem.beliefs else setup.judged_by,
        identity=setup.identity,
        trained_on="another profile, split, policy, loss, reward, budget, optimiser or start",
        provenance=provenance,
        setup=setup,
        seed=setup.seed,
        folder=folder,
        log=log,
        device=setup.device,
    )


def provenance(trainer: Trainer) -> Provenance:
    """Return the checkpoint's metadata: split rows, kept iteration, held-out scores, reward
    spread."""
    setup: ControllerSetup = trainer.setup
    best = trainer.state.best
    return {
        "validation_utility": best.score,
        "judged_by": setup.judged_by,
        "iteration": best.iteration,
        "method": trainer.stages[-1].name,
        "reward_spread": trainer.stages[-1].reward_spread,
        "seen": setup.seen,
        "proof": setup.proof,
        "fold_seed": setup.fold_seed,
        "train_rows": setup.split.train,
        "validation_rows": setup.split.validation,
        "test_rows": setup.split.test,
    }
