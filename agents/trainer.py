"""The trainer: warm-up by RCE, then GRPO, on TorchRL's Collector and ReplayBuffer.

One iteration: the collector draws contexts and lets the behaviour policy decide; the buffer takes row numbers, budgets,
actions, log-probs and rewards (no features); the loss goes over it in minibatches; the optimiser steps. Old log-probs
are those of the moment of collection: the policy is never further from its own data than `epochs` passes take it.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
from knobwise.agents.evaluation import judge
from knobwise.agents.policy import ConfigurationCategorical, Controller, make_actor
from knobwise.agents.settings import LossConfig, OptimiserConfig, PolicyConfig
from knobwise.envs.bandit import ConfigBandit
from knobwise.envs.budgets import BudgetConfig, default_budgets
from knobwise.envs.errors import InputError
from knobwise.envs.reward import RewardConfig
from knobwise.envs.table import ProfileTable, Split
from knobwise.losses import GRPOLoss, RCELoss
from knobwise.losses.actor import ActorLoss
from knobwise.profiling.progress import progress


class Log(Protocol):
    """Where numbers go: `knobwise.experiments.tracking.Tracker` is one."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...


class _Behaviour(TensorDictModuleBase):
    """The collection policy in one module: draws, and what the loss needs to know of the moment of drawing."""

    def __init__(
        self, actor: ProbabilisticTensorDictSequential, reference: ProbabilisticTensorDictSequential, objective: str
    ) -> None:
        super().__init__()
        self.in_keys = actor.in_keys
        self.out_keys = ["action"]
        self.actor, self.reference = actor, reference
        self.objective = objective

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.actor.eval()
        dist: ConfigurationCategorical = self.actor.get_dist(tensordict)
        index = dist.sample_index()
        tensordict["action"] = dist.configurations[index]
        reference = self.reference.get_dist(tensordict).log_probs
        if self.objective == "exact":
            tensordict["behaviour_log_probs"], tensordict["reference_log_probs"] = dist.log_probs, reference
        else:
            tensordict["action_log_prob"] = dist.log_prob_of_index(index)
            tensordict["reference_log_prob"] = reference.gather(-1, index)
        return tensordict


class Trainer:
    """Trains one controller with one seed.

    Args:
        table: the profile.
        split: fit on `train`, choose on `validation`; `test` is not looked at.
        policy, loss, optimiser, budget, reward: the settings.
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
        self.budgets = default_budgets(table) if budgets_ms is None else budgets_ms
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

    def _set_up(self, budget: BudgetConfig | None, reward: RewardConfig | None) -> None:
        table, split = self.table, self.split
        self.controller = Controller.for_table(table, split.train, self.policy).to(self.device)
        self.reference = copy.deepcopy(self.controller).requires_grad_(False).eval()
        group = self.loss.group_size if self.loss.objective == "sampled" else 1
        self.actor = make_actor(self.controller, table, group).to(self.device)
        self.rce = RCELoss(self.actor, functional=False)
        self.grpo = GRPOLoss(
            self.actor,
            objective=self.loss.objective,
            clip_epsilon=self.loss.clip_epsilon,
            entropy_coeff=self.loss.entropy_coeff,
            kl_to_ref_coeff=self.loss.kl_to_ref_coeff,
            advantage=self.loss.advantage,
            advantage_std_floor=self.loss.advantage_std_floor,
            advantage_clip=self.loss.advantage_clip,
            functional=False,
        ).to(self.device)
        self.env = ConfigBandit(
            table,
            batch_size=self.settings.contexts,
            group_size=group,
            budget=budget,
            reward=reward,
            rows=split.train,
            seed=self.seed,
            lean=True,
            full_information=self.settings.warmup_iterations > 0 or self.loss.objective == "exact",
            device=self.device,
        )
        self.buffer = ReplayBuffer(
            storage=LazyTensorStorage(self.settings.contexts, device=self.device),
            sampler=SamplerWithoutReplacement(),
            batch_size=min(self.settings.minibatch, self.settings.contexts),
        )
        self.collector = Collector(
            self.env,
            _Behaviour(self.actor, make_actor(self.reference, table).to(self.device), self.loss.objective),
            frames_per_batch=self.settings.contexts,
            total_frames=-1,
            reset_at_each_iter=True,
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

    def _new_optimiser(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.controller.parameters(), lr=0.0, weight_decay=self.settings.weight_decay, fused=True
        )

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
        """The warmed-up policy becomes the reference, and the optimiser forgets the warm-up."""
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
                metrics = self._learn(next(stream).squeeze(-1))
                if self.log is not None and metrics:
                    self.log.log(metrics, self.iteration)
                self.iteration += 1
                stage = "RCE" if self.warming_up else "GRPO"
                tick(self.iteration, f"{stage} · best validation utility {self.best['utility']:.4f}")
        self.collector.shutdown()
        self.controller.load_state_dict(self.best["state"])
        return self.controller.eval()

    def _learn(self, data: TensorDictBase) -> dict[str, float]:
        """One iteration on freshly collected contexts, batch [P]."""
        loss: ActorLoss = self.rce if self.warming_up else self.grpo
        if self.warming_up:
            start, end = self.loss.temperature_start, self.loss.temperature_end
            self.rce.temperature.fill_(start + (end - start) * self._share())
        # draws, old log-probs and new ones are all taken without dropout, so that the ratio is 1 at the first step
        self.controller.train(self.warming_up)
        for group in self.optimiser.param_groups:
            group["lr"] = self._learning_rate()
        self.buffer.empty()
        self.buffer.extend(data.select(*loss.in_keys, "action", ("next", "reward"), strict=False))
        outputs: list[TensorDictBase] = []
        for _ in range(self.settings.epochs):
            for minibatch in self.buffer:
                out = loss(minibatch)
                total = torch.stack([value for key, value in out.items() if key.startswith("loss_")]).sum()
                self.optimiser.zero_grad(set_to_none=True)
                total.backward()
                norm = nn.utils.clip_grad_norm_(self.controller.parameters(), self.settings.clip_grad)
                self.optimiser.step()
                outputs.append(out.detach().set("loss", total.detach()).set("grad_norm", norm))
        seen: TensorDict = lazy_stack(outputs).mean(0)
        if self.loss.kl_band is not None and not self.warming_up:
            self.grpo.adapt_kl(float(seen["kl_to_ref"]), *self.loss.kl_band)
        if self.iteration % self.settings.evaluate_every:
            return {}
        return self._metrics(data, seen)

    def _metrics(self, data: TensorDictBase, seen: TensorDict) -> dict[str, float]:
        """What the drawn group got, and what the loss module says, under their logged names."""
        rows, chosen = data["row"].cpu(), self.table.find(data["action"].cpu())
        accuracy, latency = self.table.accuracy[rows[:, None], chosen], self.table.latency_ms[rows[:, None], chosen]
        late = (latency > data["budget_ms"].cpu()[:, None]).float()
        names = {
            "kl_to_ref": "KL",
            "clip_fraction": "Clip_Fraction",
            "ESS": "ESS",
            "entropy": "Entropy",
            "zero_advantage_fraction": "Zero_Advantage_Fraction",
            "ratio_mean": "Ratio_Mean",
            "grad_norm": "Grad_Norm",
            "loss": "Loss",
        }
        metrics = {f"Train/{name}": float(seen[key]) for key, name in names.items() if key in seen}
        for name, values in (("Reward", data["next", "reward"]), ("Accuracy", accuracy), ("Latency", latency)):
            metrics[f"Train/{name}_Mean"], metrics[f"Train/{name}_Std"] = float(values.mean()), float(values.std())
        metrics["Train/Budget_Violation_Rate"] = float(late.mean())
        metrics["Train/LR"] = self._learning_rate()
        return metrics

    def _evaluate(self) -> None:
        """Judge greedy decisions on the validation split, keep the best, say when it is time to stop, save."""
        judged = judge(self.controller, self.table, self.split.validation, self.budgets, self.env.rewards)
        utility = float(judged.utility.mean())
        if utility > self.best["utility"]:
            state = {name: value.detach().clone() for name, value in self.controller.state_dict().items()}
            self.best = {"utility": utility, "iteration": self.iteration, "state": state}
        since = self.iteration - max(self.best["iteration"], self.settings.warmup_iterations)
        self.finished |= 0 < self.settings.patience * self.settings.evaluate_every <= since
        if self.log is not None:
            metrics = judged.metrics() | {"Loss": self._validation_loss()}
            self.log.log({f"Val/{name}": value for name, value in metrics.items()}, self.iteration)
        if self.folder is not None:
            self._save(self.folder)

    @torch.no_grad()
    def _validation_loss(self) -> float:
        """−E_π[reward] of the policy's own distribution, not of its greedy decisions: what GRPO minimises, without
        baseline, clip and KL. Mean over the validation samples and the judged budgets."""
        rows, losses = self.split.validation, []
        self.controller.eval()
        for budget in self.budgets:
            contexts = {"row": rows, "budget_ms": budget.expand(len(rows))}
            dist = self.actor.get_dist(TensorDict(contexts, [len(rows)], device=self.device))
            reward = self.env.rewards.all(rows, contexts["budget_ms"]).nan_to_num().to(self.device)
            losses.append(-(dist.log_probs.exp() * reward).sum(-1).mean())
        return float(torch.stack(losses).mean())

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _save(self, folder: Path) -> None:
        if self.best["iteration"] == self.iteration:
            extra = {"validation_utility": self.best["utility"], "seen": self.seen}
            extra |= {f"{part}_rows": rows for part, rows in self.split._asdict().items()}
            save_checkpoint(folder / "best.pt", self.controller, self.table, extra)
        state = {
            "iteration": self.iteration,
            "finished": self.finished,
            "best": self.best,
            "reference": self.reference.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "kl_to_ref_coeff": float(self.grpo.kl_to_ref_coeff),
            "contexts": self.env.contexts.generator.get_state(),
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
        if loaded.profile_digest != self.table.digest or loaded.controller.config != self.policy:
            raise InputError(f"{path}: was trained on another profile or with another policy; choose another name=…")
        state = loaded.extra["training"]
        self.controller.load_state_dict(loaded.controller.state_dict())
        self.reference.load_state_dict(state["reference"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.grpo.kl_to_ref_coeff = state["kl_to_ref_coeff"]
        self.env.contexts.generator.set_state(state["contexts"])
        self._random = state["random"]
        self.iteration, self.finished, self.best = state["iteration"], state["finished"], state["best"]
        return True
