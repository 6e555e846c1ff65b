"""The trainer: a warm-up, then GRPO, on TorchRL's Collector and ReplayBuffer.

The warm-up is RCE, or regression for a network that predicts outcomes. Of an ensemble all members are trained side by
side, each on contexts of its own samples: a batch is [contexts, members].

One iteration: the collector draws contexts and lets the behaviour policy decide; the buffer takes row numbers, budgets,
actions, log-probs and rewards (no features); the loss goes over it in minibatches; the optimiser steps. Old log-probs
are those of the moment of collection: the policy is never further from its own data than `epochs` passes take it.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement

from knobwise.agents.actor import OutcomesOfRows, make_actor
from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
from knobwise.agents.evaluation import LOGGED, drawn_metrics, judge
from knobwise.agents.networks import UtilityNetwork
from knobwise.agents.policy import Controller
from knobwise.agents.settings import LossConfig, OptimiserConfig, PolicyConfig
from knobwise.agents.targets import rows_of_members
from knobwise.envs.bandit import ConfigBandit
from knobwise.envs.budgets import BudgetConfig, default_budgets, judged_worths, log_measured
from knobwise.envs.errors import InputError
from knobwise.envs.reward import RewardConfig
from knobwise.envs.table import ProfileTable, Split
from knobwise.losses import GRPOLoss, RCELoss, RegressionLoss
from knobwise.losses.actor import ActorLoss, Behaviour
from knobwise.profiling.progress import progress

PRICED_METRICS = ("Reward", "Accuracy", "Latency", "Loss")
"""What is said of a validation under prices."""


class Log(Protocol):
    """Where numbers go: `knobwise.experiments.tracking.Tracker` is one."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...


class Trainer:
    """Trains one controller with one seed.

    Args:
        table: the profile.
        split: fit on `train`, choose on `validation`, or both in folds (`policy.members`); `test` is not looked at.
        policy, loss, optimiser, budget, reward: the settings. Under a mean budget the reward is always `priced`.
        budgets_ms: float [B], what is judged on validation; None for the default budgets.
        seed: of initialisation, contexts, draws.
        folder: where `best.pt` and `last.pt` go; None keeps nothing.
        log: where metrics go; None for nowhere.
        device: `cpu` or `cuda`.
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
        seed: int = 0,
        folder: Path | None = None,
        log: Log | None = None,
        device: str = "cpu",
    ) -> None:
        self.table, self.split, self.seed, self.folder, self.log = table, split, seed, folder, log
        self.policy, self.loss = policy or PolicyConfig(), loss or LossConfig()
        self.settings, self.device = optimiser or OptimiserConfig(), torch.device(device)
        self.priced = budget is not None and budget.sense == "mean"
        if self.priced:
            reward = RewardConfig(kind="priced")
        self.limits = (
            judged_worths(table) if self.priced else default_budgets(table) if budgets_ms is None else budgets_ms
        )
        with self._own_random():
            torch.manual_seed(seed)
            self._set_up(budget, reward)
            self._random = self._random_state()

    def _own_random(self) -> AbstractContextManager[None]:
        """Draws, dropout and minibatches come from torch's generators, which we borrow and give back as they were."""
        return torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else [])

    def _random_state(self) -> list[Tensor]:
        on_gpu = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [torch.get_rng_state(), *on_gpu]

    @functools.cached_property
    def seen(self) -> list[str]:
        """Fingerprints of the samples that were fitted or chosen on."""
        return self.table.fingerprints(torch.cat([self.split.train, self.split.validation]))

    def divide(self) -> tuple[list[Tensor], list[Tensor]]:
        """The rows that each member is fitted on, and those that it is judged on."""
        return rows_of_members(self.table, self.split, self.policy.members, self.seed)

    def _set_up(self, budget: BudgetConfig | None, reward: RewardConfig | None) -> None:
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
        self.controller = controller.to(self.device).eval()
        self.reference = copy.deepcopy(self.controller).requires_grad_(False)
        group = self.loss.group_size if self.loss.objective == "sampled" else 1
        self.actor = make_actor(self.controller, table, group).to(self.device)
        self.regresses = self.policy.structure == "utility"
        self.predictor = OutcomesOfRows(self.actor)
        self.regression = RegressionLoss(self.predictor) if self.regresses else None
        self.rce = RCELoss(self.actor, functional=False)
        names = "objective clip_epsilon entropy_coeff kl_to_ref_coeff advantage advantage_std_floor advantage_clip"
        settings = {name: getattr(self.loss, name) for name in names.split()}
        self.grpo = GRPOLoss(self.actor, **settings, functional=False).to(self.device)
        self.env = ConfigBandit(
            table,
            batch_size=contexts * members,
            group_size=group,
            budget=budget,
            reward=reward,
            rows=own,
            seed=self.seed,
            lean=True,
            full_information=not self.regresses or self.loss.objective == "exact",
            device=self.device,
        )
        self.log_latency = log_measured(self.env.rewards.latency_ms) if self.regresses else None
        self.buffer = ReplayBuffer(
            storage=LazyTensorStorage(contexts, device=self.device),
            sampler=SamplerWithoutReplacement(),
            batch_size=contexts,
        )
        reference = make_actor(self.reference, table, group).to(self.device)
        self.behaviour = Behaviour(self.actor, reference, self.loss.objective)
        kept = {*self.rce.in_keys, *self.grpo.in_keys, "configuration", ("next", "reward")} - {"action"}
        self.collector = Collector(
            self.env,
            self.behaviour,
            replay_buffer=self.buffer,
            extend_buffer=True,
            postproc=lambda data: data.squeeze(-1).select(*kept, strict=False).unflatten(0, (contexts, members)),
            frames_per_batch=contexts * members,
            total_frames=-1,
            trust_policy=True,
            use_buffers=False,
            track_traj_ids=False,
            auto_register_policy_transforms=False,
        )
        self.iteration, self.finished = 0, False
        self.best: dict[str, Any] = {"utility": -math.inf, "iteration": -1, "state": None}
        self.optimiser = self._new_optimiser()

    # -- stages --------------------------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """Iterations of both stages."""
        return self.settings.warmup_iterations + self.settings.iterations

    @property
    def warming_up(self) -> bool:
        return self.iteration < self.settings.warmup_iterations

    @property
    def _watched(self) -> bool:
        """Whether anybody looks at the numbers of this iteration: the log, or the steering of β."""
        return self.loss.kl_band is not None or self.iteration % self.settings.evaluate_every == 0

    def _new_optimiser(self) -> torch.optim.Optimizer:
        weights = [p for name, p in self.controller.named_parameters() if not name.endswith("bias")]
        biases = [p for name, p in self.controller.named_parameters() if name.endswith("bias")]
        groups: list[dict[str, Any]] = [
            {"params": weights, "weight_decay": self.settings.weight_decay},
            {"params": biases},
        ]
        return torch.optim.AdamW(groups, lr=0.0, weight_decay=0.0, fused=True)

    def _share(self) -> float:
        """How far the stage has come, 0 … 1."""
        warmup, total = self.settings.warmup_iterations, self.total
        return self.iteration / warmup if self.warming_up else (self.iteration - warmup) / max(total - warmup, 1)

    def _learning_rate(self) -> float:
        lr = self.settings.warmup_lr if self.warming_up else self.settings.lr
        if self.settings.schedule == "constant":
            return lr
        share, rise = self._share(), 0.05
        return lr * (share + 1e-2) / rise if share + 1e-2 < rise else lr * 0.5 * (1 + math.cos(math.pi * share))

    def _begin_grpo(self) -> None:
        """What GRPO starts from becomes the reference, and the optimiser forgets the warm-up.

        Regression goes on fitting after held-out utility has passed its peak, so GRPO starts from that. RCE's end is
        the better start: with its temperature down, the policy is sharp, which costs utility that GRPO wins back.
        """
        if self.regresses and self.best["state"] is not None:
            self.controller.load_state_dict(self.best["state"])
        self.reference.load_state_dict(self.controller.state_dict())
        self.optimiser = self._new_optimiser()

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> Controller:
        """Train to the end, or until validation utility has stopped rising; gives the best controller, in eval mode."""
        stream = iter(self.collector)
        with self._own_random(), progress(f"seed {self.seed}", self.total, self.iteration) as tick:
            torch.set_rng_state(self._random[0])
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(self._random[1], self.device)
            while not self.finished:
                self.finished = self.iteration == self.total
                if self.finished or self.iteration % self.settings.evaluate_every == 0:
                    self._evaluate()
                if self.finished:
                    break
                if self.iteration == self.settings.warmup_iterations:
                    self._begin_grpo()
                metrics = self.iterate(stream)
                if self.log is not None and metrics:
                    self.log.log(metrics, self.iteration)
                self.iteration += 1
                stage = ("regression" if self.regresses else "RCE") if self.warming_up else "GRPO"
                judged = "reward" if self.priced else "utility"
                tick(self.iteration, f"{stage} · best validation {judged} {self.best['utility']:.4f}")
        self.collector.shutdown()
        self.controller.load_state_dict(self.best["state"])
        return self.controller.eval()

    def iterate(self, stream: Iterator[None]) -> dict[str, float]:
        """One iteration on contexts that the collector draws into the buffer; gives what is to be logged."""
        if isinstance(self.controller.network, UtilityNetwork) and not self.warming_up:
            self.controller.network.sharpen(self._share())
        self.behaviour.with_reference = self._watched or self.loss.kl_to_ref_coeff > 0
        self.buffer.empty()
        next(stream)
        return self._learn(self.buffer[:])

    def _learn(self, data: TensorDictBase) -> dict[str, float]:
        """One iteration on freshly collected contexts, batch [P, M]."""
        loss: ActorLoss = self.rce if self.warming_up else self.grpo
        if self.warming_up:
            start, end = self.loss.temperature_start, self.loss.temperature_end
            self.rce.temperature.fill_(start + (end - start) * self._share())
        for group in self.optimiser.param_groups:
            group["lr"] = self._learning_rate()
        loss.diagnostics = self._watched
        self.controller.train(self.warming_up)
        outputs: list[TensorDictBase] = []
        beside = self.regresses and not self.warming_up and self.loss.regression_coeff > 0
        self.predictor.after_loss = beside
        for _ in range(self.settings.epochs):
            for minibatch in self.buffer.sample().split(self.settings.minibatch):
                out = self._regress(minibatch) if self.regresses and self.warming_up else loss(minibatch)
                if beside:
                    out.update({k: self.loss.regression_coeff * v for k, v in self._regress(minibatch).items()})
                total = functools.reduce(torch.add, (value for value in out.values() if value.requires_grad))
                self.optimiser.zero_grad()
                total.backward()
                norm = nn.utils.clip_grad_norm_(self.controller.parameters(), self.settings.clip_grad)
                self.optimiser.step()
                if loss.diagnostics:
                    outputs.append(out.detach().set("loss", total.detach()).set("grad_norm", norm))
        self.controller.eval()
        self.predictor.after_loss = False
        if not self._watched:
            return {}
        seen: TensorDict = lazy_stack(outputs).mean(0)
        if self.loss.kl_band is not None and not self.warming_up:
            self.grpo.adapt_kl(float(seen["kl_to_ref"]), *self.loss.kl_band)
        return {} if self.iteration % self.settings.evaluate_every else self._metrics(data, seen)

    def _regress(self, minibatch: TensorDictBase) -> TensorDictBase:
        """The regression on what was measured of these samples; it is looked up here, and not carried in the buffer."""
        assert self.regression is not None
        assert self.log_latency is not None
        row, rewards = minibatch["row"], self.env.rewards
        measured = {
            "accuracy_per_configuration": rewards.accuracy[row],
            "log_latency_per_configuration": self.log_latency[row],
        }
        losses: TensorDictBase = self.regression(minibatch.select("row").update(measured))
        return losses

    def _metrics(self, data: TensorDictBase, seen: TensorDict) -> dict[str, float]:
        """What the drawn group got, and what the loss module says, under their logged names."""
        data = data.flatten(0, 1).cpu()
        budgets_ms = None if self.priced else data["budget_ms"]
        metrics = drawn_metrics(self.table, data["row"], data["configuration"], data["next", "reward"], budgets_ms)
        metrics |= {name: float(seen[key]) for key, name in LOGGED.items() if key in seen}
        return {f"Train/{name}": value for name, value in metrics.items()} | {"Train/LR": self._learning_rate()}

    def choose(self, features: Mapping[str, Tensor], limits: Tensor, mask: Tensor) -> Tensor:
        """What the members choose for the samples held out of them, `judged_rows`; `judge` asks for it."""
        return self._held_out_log_probs(limits[0]).argmax(-1).cpu()

    @torch.no_grad()
    def _held_out_log_probs(self, limit: Tensor) -> Tensor:
        """[n, C], in the order of `judged_rows`."""
        rows = self.held_out.flatten()
        contexts = {"row": rows, self.controller.limit_key: limit.expand(len(rows))}
        return self.actor.get_dist(TensorDict(contexts, [len(rows)], device=self.device)).log_probs[self.places]

    def _evaluate(self) -> None:
        """Judge greedy decisions on what was held out, keep the best, say when it is time to stop, save."""
        judged = judge(self, self.table, self.judged_rows, self.limits, self.env.rewards)
        utility = float((judged.reward if self.priced else judged.utility).mean())
        if utility > self.best["utility"]:
            state = {name: value.detach().clone() for name, value in self.controller.state_dict().items()}
            self.best = {"utility": utility, "iteration": self.iteration, "state": state}
        since = self.iteration - max(self.best["iteration"], self.settings.warmup_iterations)
        self.finished |= 0 < self.settings.patience * self.settings.evaluate_every <= since
        if self.log is not None:
            metrics = judged.metrics() | {"Loss": self._validation_loss()}
            if self.priced:  # a worth is no deadline: nothing is late
                metrics = {name: metrics[name] for name in metrics if name.split("_")[0] in PRICED_METRICS}
            self.log.log({f"Val/{name}": value for name, value in metrics.items()}, self.iteration)
        if self.folder is not None:
            self._save(self.folder)

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
        """What a checkpoint says of how its controller came about: from which samples, how good on held-out ones."""
        rows = {f"{part}_rows": rows for part, rows in self.split._asdict().items()}
        return {
            "validation_utility": self.best["utility"],
            "iteration": self.best["iteration"],
            "seen": self.seen,
            **rows,
        }

    def _save(self, folder: Path) -> None:
        if self.best["iteration"] == self.iteration:
            save_checkpoint(folder / "best.pt", self.controller, self.table, self.provenance())
        state = {
            "iteration": self.iteration,
            "finished": self.finished,
            "best": self.best,
            "reference": self.reference.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "kl_to_ref_coeff": float(self.grpo.kl_to_ref_coeff),
            "contexts": self.env.contexts.before,
            "random": self._random_state(),
        }
        save_checkpoint(folder / "last.pt", self.controller, self.table, {"training": state})

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
        state = loaded.extra["training"]
        self.controller.load_state_dict(controller.state_dict())
        self.reference.load_state_dict(state["reference"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.grpo.kl_to_ref_coeff = state["kl_to_ref_coeff"]
        self.env.contexts.generator.set_state(state["contexts"])
        self.collector.reset()
        self._random = state["random"]
        self.iteration, self.finished, self.best = state["iteration"], state["finished"], state["best"]
        return True
