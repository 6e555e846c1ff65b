"""What the stages of a controller's training share, in the order in which it is made: samples,
networks, the actor, and the environment that it acts in.

Several networks are trained side by side, each on contexts of its own samples: a batch is
[contexts, networks]. With `policy.fold_networks` = 1 there is one; else one for each fold, which is
judged on the fold's samples, and a last one of all samples, which is deployed.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from knobwise.agents.controller.actor import make_actor, make_critic
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.training.checkpoint import load_checkpoint, started_from
from knobwise.agents.training.controller_stages import RCE, ControllerStage, grpo_stage
from knobwise.agents.training.held_out import HeldOut, divided
from knobwise.agents.training.seeding import seeded, weight_sums
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.agents.training.state import Provenance
from knobwise.agents.training.trainer import Trainer
from knobwise.common.errors import InputError
from knobwise.envs.bandit.budgets import default_budgets, judged_values
from knobwise.envs.bandit.contexts import LIMIT_KEYS
from knobwise.envs.bandit.reward_kinds import KINDS
from knobwise.envs.bandit.settings import REWARDS, BalanceConfig, BudgetConfig, RewardConfig
from knobwise.envs.bandit.torchrl_env import ConfigBandit
from knobwise.envs.tables.drift import copies_of, rows_of_copies
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.losses.settings import LossConfig

MAX_NOISE = 1 << 24
"""Numbers that are drawn for `policy.augment`; in larger tables copies share them."""
SPREAD_CELLS = 1 << 22
"""The spread of rewards is measured on at most as many rewards, or one context for each network."""


class ControllerSetup:
    """Everything that a controller is trained with, but for its stages. To be made inside `seeded`.

    Args:
        table: the profile.
        split: fit on `train`, choose on `validation`, or both in folds (`policy.fold_networks`);
            `test` is not used.
        reward: the reward; under a mean budget it is always `priced`.
        budgets_ms: float [B], the budgets of validation; None for the default budgets. Under a
            mean budget, validation uses values of a right answer instead.
        cost_ms: the time that a decision and its features take, which the reward charges.
        init_from: a checkpoint whose heads training starts from, with the statistics that its
            inputs are standardised by (`started_from`); None for fresh weights. Samples that it was
            trained on count as seen.
        fold_seed: seed of the folds; None for `seed`.
        distiller: makes the teacher of the controller; its `make` is called with this right after
            the networks are there. None for nothing.

    Attributes:
        networks: M, the number of networks side by side.
        folds: the rows that each fold's network is fitted on, and those that it is judged on.
        fitted: int64 [n], the rows that the deployed network is fitted on.
        limits: float [B], the judged budgets in ms, or values of a right answer.
        controller, reference: the networks that learn, and a copy for the KL.
        actor, critic: the policy that draws, and for PPO its value network.
        env: where contexts and rewards come from.
        held_out: judges the networks.
        seen: fingerprints of the samples fitted or chosen on, also by the checkpoint started from.
    """

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
        seed: int = 0,
        device: str = "cpu",
        distiller: Any = None,
    ) -> None:
        self.table = table
        self.split = split
        self.policy = policy or PolicyConfig()
        self.loss = loss or LossConfig()
        self.settings = optimiser or OptimiserConfig()
        self.cost_ms = cost_ms
        self.seed = seed
        self.fold_seed = seed if fold_seed is None else fold_seed
        self.device = torch.device(device)
        self.networks = self.policy.networks_trained
        self.constraint = "deadline" if budget is None else budget.constraint
        self.priced = self.constraint == "mean"
        self.limit_key = LIMIT_KEYS[self.constraint]
        if self.priced:
            reward = REWARDS[self.constraint]
            budgets_ms = judged_values(table)
        self.limits = default_budgets(table) if budgets_ms is None else budgets_ms
        # utility under budgets is judged, and the reward under prices
        self.judged_by = "utility"
        if reward is not None:
            self.judged_by = KINDS[reward.kind].judged_by

        # samples: what each network is fitted on, and judged on
        self._seen_before: list[str] = []
        start = None
        if init_from is not None:
            start = load_checkpoint(init_from)
            self._note_samples_of(start.extra, start.profile_digest, init_from)
        self.folds = divided(table, split, self.policy.fold_networks, self.fold_seed)
        network_rows = self.folds[0]
        self.fitted = network_rows[0]
        if len(network_rows) > 1:  # folds, and a last network of all samples
            self.fitted = split.fitted
            network_rows = [*network_rows, self.fitted]

        # networks: fresh, or those of the checkpoint
        controller = Controller.for_table(table, self.fitted, self.policy, self.constraint)
        self.start_sums: list[float] | None = None
        if start is not None:
            controller = started_from(str(init_from), start, controller)
            self.start_sums = weight_sums(controller.state_dict())
        self.controller = controller
        self.distiller = distiller
        if distiller is not None:
            distiller.make(self).to(self.device).eval()
        controller.to(self.device).eval()
        self.reference = copy.deepcopy(controller).requires_grad_(False)

        # the actor, which also sees copies of the samples: on slower machines, with noisy features
        self.drift = 0.0
        if not self.priced and len(controller.network.values):
            self.drift = self.policy.drift
        noisy = self.policy.augment > 0 and controller.normaliser.width > 0
        self.copied, offsets = copies_of(table, self.drift, noisy, seed)
        self.augment = 0.0
        noise = None
        if noisy and self.copied is not table:
            self.augment = self.policy.augment
            count = min(self.copied.num_samples, MAX_NOISE // controller.normaliser.width)
            generator = torch.Generator().manual_seed(seed)
            noise = controller.normaliser.noise(self.augment, max(count, 1), generator)
        self.actor = make_actor(
            controller, table, self.group_size, all_networks=True, offsets=offsets, noise=noise
        ).to(self.device)
        self.critic: Any = None
        if self.loss.objective == "ppo":
            self.critic = make_critic(controller, table, noise).to(self.device)

        # the environment: contexts for all networks in turn, each of its own rows
        self.env = ConfigBandit(
            self.copied,
            batch_size=self.settings.contexts * self.networks,
            group_size=self.group_size,
            budget=budget,
            reward=reward,
            balance=(balance or BalanceConfig()).by,
            rows=[rows_of_copies(rows, table, self.copied) for rows in network_rows],
            seed=seed,
            unprofiled="error",
            action="configuration",
            observe_features=False,
            cost_ms=cost_ms,
            device=self.device,
        )
        self.held_out = HeldOut(
            table,
            self.folds[1],
            self.networks,
            self.limits,
            self.env.rewards,
            self.judged_by,
            self.priced,
            cost_ms,
        )

    @property
    def exact(self) -> bool:
        """True if GRPO weighs all configurations."""
        return self.loss.objective == "exact"

    @property
    def group_size(self) -> int:
        """Draws per context; the exact objective weighs all configurations and needs only one."""
        return 1 if self.exact else self.loss.group_size

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
    def seen(self) -> list[str]:
        """Fingerprints of the samples fitted or chosen on, also by the checkpoint started from."""
        fitted = self.table.fingerprints(self.split.fitted)
        return list(dict.fromkeys([*fitted, *self._seen_before]))

    def held_out_log_probs(self, limit: Tensor) -> Tensor:
        """Return log-probs of the held-out samples under one limit, see `HeldOut.log_probs`."""
        return self.held_out.log_probs(self.actor, limit)

    @torch.no_grad()
    def rewards_in_training(self) -> tuple[Tensor, TensorDict]:
        """Draw contexts that training draws again; return the rewards of their configurations,
        float [n·M, C], −∞ where not profiled, and the contexts."""
        sampler = self.env.contexts
        count = min(SPREAD_CELLS // self.table.num_configurations // self.networks, 1024)
        rows, limits = sampler(max(count, 1) * self.networks)
        sampler.set_back(sampler.before)
        inputs = {"row": rows, self.limit_key: limits}
        contexts = TensorDict(inputs, [len(rows)], device=self.device)
        rewards = self.env.rewards.all(contexts["row"], contexts[self.limit_key])
        return rewards.nan_to_num(-torch.inf), contexts

    def with_rewards(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Return a minibatch with the rewards of all configurations, which are looked up, not
        stored."""
        row = minibatch["row"]
        limit = minibatch[self.limit_key]
        rewards = self.env.rewards.all(row.flatten(), limit.flatten(0, row.ndim - 1))
        return minibatch.copy().set("reward_per_configuration", rewards.view(*row.shape, -1))

    def _note_samples_of(self, extra: Provenance, profile_digest: str, path: str | Path) -> None:
        """Note the samples that a checkpoint was trained on, and take over its folds.

        The folds are taken over if profile and split are the same, so that samples held out of a
        network stay held out of it.

        Raises:
            InputError: the checkpoint was trained on test samples.
        """
        self._seen_before = extra.get("seen", [])
        test = extra.get("test_rows", self.split.train)
        if torch.equal(test, self.split.test) and profile_digest == self.table.digest:
            self.fold_seed = extra.get("fold_seed", self.fold_seed)
            return
        count = len({*self._seen_before} & {*self.table.fingerprints(self.split.test)})
        if count:
            raise InputError(
                f"init_from={path}: was trained on {count} of the test samples of profile "
                f"{self.table.name!r}; split the profile as its run did (split.seed=…)"
            )


def controller_trainer(
    table: ProfileTable,
    split: Split,
    *,
    seed: int = 0,
    device: str = "cpu",
    folder: Path | None = None,
    log: Any = None,
    **settings: Any,
) -> Trainer:
    """Return the training of a controller that learns from rewards alone: RCE, then GRPO or PPO.

    With a teacher (`policy.teacher`) it is `agents.calibration.training.distillation_trainer`.

    Args:
        table, split, settings: see `ControllerSetup`.
        seed, device, folder, log: see `Trainer`.
    """
    with seeded(seed, device):
        setup = ControllerSetup(table, split, seed=seed, device=device, **settings)
        stages = [RCE(setup), grpo_stage(setup)]
        return make_trainer(setup, setup.controller, stages, folder, log)


def make_trainer(
    setup: ControllerSetup,
    agent: nn.Module,
    stages: list[ControllerStage],
    folder: Path | None = None,
    log: Any = None,
) -> Trainer:
    """Return the trainer of a controller's stages. To be called inside the `seeded` of the setup.

    Args:
        agent: what checkpoints hold: the controller, or it and what teaches it.
    """
    return Trainer(
        agent,
        stages,
        setup.env,
        table=setup.table,
        settings=setup.settings,
        shape=(setup.settings.contexts, setup.networks),
        reads=setup.actor.in_keys,
        validate=lambda logged: setup.held_out.validation(
            setup.held_out.policies(setup.held_out_log_probs), logged
        ),
        judged_by=setup.judged_by,
        identity=(setup.policy, setup.constraint, setup.start_sums),
        trained_on="another profile, policy or starting checkpoint",
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
        "reward_spread": trainer.stages[-1].reward_spread,
        "seen": setup.seen,
        "fold_seed": setup.fold_seed,
        "train_rows": setup.split.train,
        "validation_rows": setup.split.validation,
        "test_rows": setup.split.test,
    }
