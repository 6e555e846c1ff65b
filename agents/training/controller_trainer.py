"""The training of a controller: a warm-up by RCE, or by regression for a network that predicts outcomes, then GRPO.

Of an ensemble all members are trained side by side, each on contexts of its own samples: a batch is [contexts,
members]. The loop is that of `knobwise.agents.training.loop`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
from knobwise.agents.controller.actor import OutcomesOfRows, make_actor
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.networks import UtilityNetwork
from knobwise.agents.judging.evaluation import LOGGED, drawn_metrics, judge
from knobwise.agents.predictors.folds import rows_of_members
from knobwise.agents.training.augmentation import Augmentation, OutcomesOfFeatures
from knobwise.agents.training.loop import Log, Trainer
from knobwise.agents.training.settings import AugmentationConfig, LossConfig, OptimiserConfig, PolicyConfig
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import BudgetConfig, default_budgets, judged_worths, log_measured
from knobwise.envs.configurations.contexts import BalanceConfig, row_weights
from knobwise.envs.configurations.reward import RewardConfig
from knobwise.envs.configurations.torchrl_env import ConfigBandit
from knobwise.envs.readers.joint import DATASET
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.losses import GRPOLoss, RCELoss, RegressionLoss
from knobwise.losses.actor_loss import ActorLoss, Behaviour

PRICED_METRICS = ("Reward", "Accuracy", "Latency", "Loss")
"""What is said of a validation under prices."""


class ControllerTrainer(Trainer):
    """Trains one controller with one seed.

    Args:
        table: the profile.
        split: fit on `train`, choose on `validation`, or both in folds (`policy.members`); `test` is not looked at.
        policy, loss, optimiser, budget, reward: the settings. Under a mean budget the reward is always `priced`.
        budgets_ms: float [B], what is judged on validation; None for the default budgets.
        balance: which samples are drawn how often; None for all alike.
        augmentation: how features are varied in regression; None for not at all.
        seed, folder, log, device: see `Trainer`.
    """

    env: ConfigBandit
    agent: Controller
    reference: Controller

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
        augmentation: AugmentationConfig | None = None,
        seed: int = 0,
        folder: Path | None = None,
        log: Log | None = None,
        device: str = "cpu",
    ) -> None:
        self.table, self.split = table, split
        self.policy, self.loss = policy or PolicyConfig(), loss or LossConfig()
        self.priced = budget is not None and budget.sense == "mean"
        self.budget, self.reward = budget, RewardConfig(kind="priced") if self.priced else reward
        self.balance, self.augments = balance or BalanceConfig(), augmentation or AugmentationConfig()
        self.augments.check(self.policy)
        self.judged_by = "reward" if self.priced else "utility"
        self.limits = (
            judged_worths(table) if self.priced else default_budgets(table) if budgets_ms is None else budgets_ms
        )
        steers = self.loss.kl_band is not None
        super().__init__(
            optimiser or OptimiserConfig(), steers=steers, seed=seed, folder=folder, log=log, device=device
        )

    @property
    def controller(self) -> Controller:
        """What is trained."""
        return self.agent

    @functools.cached_property
    def seen(self) -> list[str]:
        """Fingerprints of the samples that were fitted or chosen on."""
        return self.table.fingerprints(torch.cat([self.split.train, self.split.validation]))

    def divide(self) -> tuple[list[Tensor], list[Tensor]]:
        """The rows that each member is fitted on, and those that it is judged on."""
        return rows_of_members(self.table, self.split, self.policy.members, self.seed)

    def _set_up(self) -> None:
        table, members, contexts = self.table, self.policy.members, self.settings.contexts
        own, held_out = self.divide()
        self.fitted, self.judged_rows = torch.cat(own).unique(), torch.cat(held_out)
        # row i, member m of a block is the i-th sample held out of m, the last one repeated to the end
        longest = max(map(len, held_out))
        self.held_out = torch.stack([torch.cat([r, r[-1:].expand(longest - len(r))]) for r in held_out], 1)
        self.places = torch.cat([torch.arange(len(r)) * members + m for m, r in enumerate(held_out)])
        # in eval mode but for the steps of the warm-up: draws, old log-probs and the new ones of GRPO are all taken
        # without dropout, so that the ratio is 1 at the first step
        mine = torch.stack([torch.isin(self.fitted, rows) for rows in own])
        controller = Controller.for_table(table, self.fitted, self.policy, self.priced, mine)
        self.agent = controller.to(self.device).eval()
        self.reference = copy.deepcopy(self.agent).requires_grad_(False)
        group = self.loss.group_size if self.loss.objective == "sampled" else 1
        self.actor = make_actor(self.agent, table, group).to(self.device)
        self.regresses = self.policy.structure == "utility"
        self.predictor = OutcomesOfRows(self.actor)
        self.regression = RegressionLoss(self.predictor) if self.regresses else None
        self.augmentation: Augmentation | None = None
        if self.augments.active and isinstance(self.agent.network, UtilityNetwork):
            self.augmentation = Augmentation(self.augments, table, self.agent.normaliser)
            self.regression = RegressionLoss(OutcomesOfFeatures(self.agent.network))
        self.rce = RCELoss(self.actor, functional=False)
        self.grpo = GRPOLoss(self.actor, **self.loss.of_grpo(), functional=False).to(self.device)
        self.env = ConfigBandit(
            table,
            batch_size=contexts * members,
            group_size=group,
            budget=self.budget,
            reward=self.reward,
            rows=own,
            seed=self.seed,
            lean=True,
            full_information=not self.regresses or self.loss.objective == "exact",
            weights=row_weights(table, self.balance, self.fitted),
            device=self.device,
        )
        self.log_latency = log_measured(self.env.rewards.latency_ms) if self.regresses else None
        reference = make_actor(self.reference, table, group).to(self.device)
        self.behaviour = Behaviour(self.actor, reference, self.loss.objective)
        kept = {*self.rce.in_keys, *self.grpo.in_keys, "configuration", ("next", "reward")} - {"action"}
        self._collect_with(self.behaviour, kept, (contexts, members))

    @property
    def stage(self) -> str:
        return ("regression" if self.regresses else "RCE") if self.warming_up else "GRPO"

    def _begin_grpo(self) -> None:
        """Regression goes on fitting after held-out utility has passed its peak, so GRPO starts from that. RCE's end is
        the better start: with its temperature down, the policy is sharp, which costs utility that GRPO wins back."""
        if self.regresses and self.best["state"] is not None:
            self.agent.load_state_dict(self.best["state"])
        super()._begin_grpo()

    def iterate(self, stream: Iterator[None]) -> Mapping[str, float]:
        if isinstance(self.agent.network, UtilityNetwork) and not self.warming_up:
            self.agent.network.sharpen(self._share())
        self.behaviour.with_reference = self._watched or self.loss.kl_to_ref_coeff > 0
        return super().iterate(stream)

    def _loss(self) -> ActorLoss:
        if self.warming_up:
            start, end = self.loss.temperature_start, self.loss.temperature_end
            self.rce.temperature.fill_(start + (end - start) * self._share())
        self.agent.train(self.warming_up)
        self.beside_grpo = self.regresses and not self.warming_up and self.loss.regression_coeff > 0
        # what the actor predicted on the way serves the regression too, unless that looks at other features
        self.predictor.after_loss = self.beside_grpo and self.augmentation is None
        return self.rce if self.warming_up else self.grpo

    def _loss_of(self, loss: ActorLoss, minibatch: TensorDictBase) -> TensorDictBase:
        if self.regresses and self.warming_up:
            return self._regress(minibatch)
        out = super()._loss_of(loss, minibatch)
        if self.beside_grpo:
            out.update({k: self.loss.regression_coeff * v for k, v in self._regress(minibatch).items()})
        return out

    def _steer(self, kl: float) -> None:
        assert self.loss.kl_band is not None
        self.grpo.adapt_kl(kl, *self.loss.kl_band)

    def _regress(self, minibatch: TensorDictBase) -> TensorDictBase:
        """The regression on what was measured of these samples; it is looked up here, and not carried in the buffer."""
        assert self.regression is not None
        assert self.log_latency is not None
        row, rewards = minibatch["row"], self.env.rewards
        measured: Mapping[str, Tensor] = {
            "accuracy_per_configuration": rewards.accuracy[row],
            "log_latency_per_configuration": self.log_latency[row],
        }
        inputs = minibatch.select("row")
        if self.augmentation is not None:
            encoded = self.predictor.rows.encode(row).transpose(0, 1)
            inputs["features"], measured = self.augmentation(encoded, row, measured)
        losses: TensorDictBase = self.regression(inputs.update(measured))
        return losses

    def _metrics(self, data: TensorDictBase, seen: TensorDictBase) -> Mapping[str, float]:
        """What the drawn group got, and what the loss module says, under their logged names."""
        data = data.flatten(0, 1).cpu()
        budgets_ms = None if self.priced else data["budget_ms"]
        metrics = drawn_metrics(self.table, data["row"], data["configuration"], data["next", "reward"], budgets_ms)
        metrics |= {name: float(seen[key]) for key, name in LOGGED.items() if key in seen}
        return {f"Train/{name}": value for name, value in metrics.items()} | {"Train/LR": self._learning_rate()}

    # -- what was held out ---------------------------------------------------------------------------------------------

    def choose(self, features: Mapping[str, Tensor], limits: Tensor, mask: Tensor) -> Tensor:
        """What the members choose for the samples held out of them, `judged_rows`; `judge` asks for it."""
        return self._held_out_log_probs(limits[0]).argmax(-1).cpu()

    @torch.no_grad()
    def _held_out_log_probs(self, limit: Tensor) -> Tensor:
        """[n, C], in the order of `judged_rows`."""
        rows = self.held_out.flatten()
        contexts = {"row": rows, self.agent.limit_key: limit.expand(len(rows))}
        return self.actor.get_dist(TensorDict(contexts, [len(rows)], device=self.device)).log_probs[self.places]

    def _judge(self) -> tuple[float, Mapping[str, float]]:
        """Greedy decisions."""
        self.predictor.after_loss = False
        judged = judge(self, self.table, self.judged_rows, self.limits, self.env.rewards)
        score = float((judged.reward if self.priced else judged.utility).mean())
        if self.log is None:
            return score, {}
        metrics = judged.metrics() | {"Loss": self._validation_loss()}
        if self.priced:  # a worth is no deadline: nothing is late
            metrics = {name: metrics[name] for name in metrics if name.split("_")[0] in PRICED_METRICS}
        return score, metrics

    def _validation_loss(self) -> float:
        """−E_π[reward] of the policy's own distribution, not of its greedy decisions: what GRPO minimises, without
        baseline, clip and KL. Mean over the held-out samples and the judged limits."""
        rows, losses = self.judged_rows.to(self.device), []
        for limit in self.limits:
            reward = self.env.rewards.all(rows, limit.to(self.device).expand(len(rows))).nan_to_num()
            losses.append(-(self._held_out_log_probs(limit).exp() * reward).sum(-1).mean())
        return float(torch.stack(losses).mean())

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def provenance(self) -> dict[str, Any]:
        """What a checkpoint says of how its controller came about: from which samples, how good on held-out ones; and
        where the data set is an input, what its columns are."""
        rows = {f"{part}_rows": rows for part, rows in self.split._asdict().items()}
        return {
            "validation_utility": self.best["score"],
            "iteration": self.best["iteration"],
            "seen": self.seen,
            **({"told": sorted(set(self.table.dataset_names))} if DATASET in self.table.features else {}),
            **rows,
        }

    def _save(self, folder: Path) -> None:
        if self.best["iteration"] == self.iteration:
            save_checkpoint(folder / "best.pt", self.agent, self.table, self.provenance())
        self._save_last(folder)

    def _save_last(self, folder: Path) -> None:
        save_checkpoint(folder / "last.pt", self.agent, self.table, {"training": self.training_state()})

    def resume(self, path: Path) -> bool:
        """Go on from a `last.pt`; the end is the same, bit for bit, as without the stop. False when there is none.

        Raises:
            InputError: it belongs to another profile, or to another network.
        """
        if not path.exists():
            return False
        loaded = load_checkpoint(path)
        controller = loaded.controller
        known = isinstance(controller, Controller) and (controller.config, controller.priced) == (
            self.policy,
            self.priced,
        )
        if loaded.profile_digest != self.table.digest or not isinstance(controller, Controller) or not known:
            raise InputError(f"{path}: was trained on another profile or with another policy; choose another name=…")
        self.go_on_from(controller.state_dict(), loaded.extra["training"])
        return True
