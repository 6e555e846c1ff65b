"""The training loop that controller and selector share, on TorchRL's Collector and ReplayBuffer.

One iteration: the collector draws contexts and lets the behaviour policy decide; the buffer takes row numbers, actions,
log-probs and rewards (no features); the loss goes over it in minibatches; the optimiser steps. Old log-probs are those
of the moment of collection: the policy is never further from its own data than `epochs` passes take it.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import EnvBase

from knobwise.agents.training.settings import OptimiserConfig
from knobwise.agents.training.stopping import stopping
from knobwise.common.interruption import Held
from knobwise.common.progress import progress
from knobwise.losses import GRPOLoss
from knobwise.losses.actor_loss import ActorLoss


class Log(Protocol):
    """Where numbers go: `knobwise.experiments.tracking.tracker.Tracker` is one."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...


class Trainer(ABC):
    """Trains one agent with one seed. What is trained, on what, and how it is judged is said by the classes below it.

    Args:
        settings: of the optimiser.
        steers: whether `_steer` wants the KL of every iteration of GRPO.
        seed: of initialisation, contexts, draws.
        folder: where `best.pt` and `last.pt` go; None keeps nothing.
        log: where metrics go; None for nowhere.
        device: `cpu` or `cuda`.
    """

    agent: nn.Module
    """What is trained; in eval mode whenever it draws, is judged, or is trained by GRPO."""
    reference: nn.Module
    """What the KL is taken to."""
    env: EnvBase
    grpo: GRPOLoss
    judged_by: str
    """What `_judge` gives, in a word."""

    def __init__(
        self,
        settings: OptimiserConfig,
        *,
        steers: bool = False,
        seed: int = 0,
        folder: Path | None = None,
        log: Log | None = None,
        device: str = "cpu",
    ) -> None:
        self.settings, self.steers, self.seed, self.folder, self.log = settings, steers, seed, folder, log
        self.device, self.title = torch.device(device), f"seed {seed}"
        self.iteration, self.finished = 0, False
        self.best: dict[str, Any] = {"score": -math.inf, "iteration": -1, "state": None}
        self.saved: int | None = None  # the iteration that `last.pt` holds
        self._held = Held()
        with self._own_random():
            torch.manual_seed(seed)
            self._set_up()
            self.optimiser = self._new_optimiser()
            self._random = self._random_state()

    def _own_random(self) -> AbstractContextManager[None]:
        """Draws, dropout and minibatches come from torch's generators, which we borrow and give back as they were."""
        return torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else [])

    def _random_state(self) -> list[Tensor]:
        on_gpu = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [torch.get_rng_state(), *on_gpu]

    def _collect_with(
        self, behaviour: Callable[..., TensorDictBase], kept: Collection[Any], shape: tuple[int, ...]
    ) -> None:
        """Collector and buffer; of what is collected the keys in `kept` go into the buffer, a batch of this shape."""
        self.buffer = ReplayBuffer(
            storage=LazyTensorStorage(shape[0], device=self.device),
            sampler=SamplerWithoutReplacement(),
            batch_size=shape[0],
        )
        self.collector = Collector(
            self.env,
            behaviour,
            replay_buffer=self.buffer,
            extend_buffer=True,
            postproc=lambda data: data.squeeze(-1).select(*kept, strict=False).unflatten(0, shape),
            frames_per_batch=math.prod(shape),
            total_frames=-1,
            trust_policy=True,
            use_buffers=False,
            track_traj_ids=False,
            auto_register_policy_transforms=False,
        )

    # -- what is trained, and how it is judged -------------------------------------------------------------------------

    @abstractmethod
    def _set_up(self) -> None:
        """Make `agent`, `reference`, `env`, `grpo` and, by `_collect_with`, collector and buffer."""

    @property
    @abstractmethod
    def stage(self) -> str:
        """What happens in this iteration, in a word."""

    @abstractmethod
    def _loss(self) -> ActorLoss:
        """The loss of this iteration, with what is scheduled in it set."""

    @abstractmethod
    def _judge(self) -> tuple[float, Mapping[str, float]]:
        """How good the agent is on what was held out, higher is better, and what is to be logged of it."""

    @abstractmethod
    def _metrics(self, data: TensorDictBase, seen: TensorDictBase) -> Mapping[str, float]:
        """What is to be logged of an iteration: of the contexts collected, and of the outputs of the loss."""

    @abstractmethod
    def _save(self, folder: Path) -> None:
        """After judging: write `best.pt` when this iteration is the best, then `last.pt` by `_save_last`."""

    @abstractmethod
    def _save_last(self, folder: Path) -> None:
        """Write `last.pt` with `training_state()`: what goes on from there ends as it would have here."""

    def _begin_grpo(self) -> None:
        """What GRPO starts from becomes the reference, and the optimiser forgets the warm-up."""
        self.reference.load_state_dict(self.agent.state_dict())
        self.optimiser = self._new_optimiser()

    @abstractmethod
    def _steer(self, kl: float) -> None:
        """Follow the KL to the reference, in nats, where `steers` asked for it."""

    def _loss_of(self, loss: ActorLoss, minibatch: TensorDictBase) -> TensorDictBase:
        outputs: TensorDictBase = loss(minibatch)
        return outputs

    # -- stages --------------------------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """Iterations of both stages."""
        return self.settings.warmup_iterations + self.settings.iterations

    @property
    def warming_up(self) -> bool:
        return self.iteration < self.settings.warmup_iterations

    @property
    def _logged(self) -> bool:
        return self.iteration % self.settings.evaluate_every == 0

    @property
    def _watched(self) -> bool:
        """Whether anybody looks at the numbers of this iteration."""
        return self.steers or self._logged

    def _new_optimiser(self) -> torch.optim.Optimizer:
        named = [(name, p) for name, p in self.agent.named_parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {
                "params": [p for name, p in named if not name.endswith("bias")],
                "weight_decay": self.settings.weight_decay,
            },
            {"params": [p for name, p in named if name.endswith("bias")]},
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
        share, rise = self._share(), self.settings.rise
        return lr * (share + 1e-2) / rise if share + 1e-2 < rise else lr * 0.5 * (1 + math.cos(math.pi * share))

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> Any:
        """Train to the end, or until what was held out stops gaining; gives the best, in eval mode. See `stopping`."""
        stream = iter(self.collector)
        with stopping(self) as self._held, self._own_random(), progress(self.title, self.total, self.iteration) as tick:
            torch.set_rng_state(self._random[0])
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(self._random[1], self.device)
            while not self.finished:
                self.finished = self.iteration == self.total
                if self.finished or self._logged:
                    self._evaluate()
                if self.finished:
                    break
                if self._held.asked is not None:
                    self._keep(self._save_last)
                    self._held.check()
                if self.iteration == self.settings.warmup_iterations:
                    self._begin_grpo()
                metrics = self.iterate(stream)
                if self.log is not None and metrics:
                    self.log.log(metrics, self.iteration)
                tick(self.iteration + 1, f"{self.stage} · best validation {self.judged_by} {self.best['score']:.4f}")
                self.iteration += 1
        self.collector.shutdown()
        self.agent.load_state_dict(self.best["state"])
        return self.agent.eval()

    def iterate(self, stream: Iterator[None]) -> Mapping[str, float]:
        """One iteration on contexts that the collector draws into the buffer; gives what is to be logged."""
        self.buffer.empty()
        next(stream)
        return self._learn(self.buffer[:])

    def _learn(self, data: TensorDictBase) -> Mapping[str, float]:
        """One iteration on freshly collected contexts."""
        loss = self._loss()
        for group in self.optimiser.param_groups:
            group["lr"] = self._learning_rate()
        loss.diagnostics = self._watched
        outputs: list[TensorDictBase] = []
        for _ in range(self.settings.epochs):
            for minibatch in self.buffer.sample().split(self.settings.minibatch):
                out = self._loss_of(loss, minibatch)
                total = functools.reduce(torch.add, (value for value in out.values() if value.requires_grad))
                self.optimiser.zero_grad()
                total.backward()
                norm = nn.utils.clip_grad_norm_(self.agent.parameters(), self.settings.clip_grad)
                self.optimiser.step()
                if loss.diagnostics:
                    outputs.append(out.detach().set("loss", total.detach()).set("grad_norm", norm))
        self.agent.eval()
        if not self._watched:
            return {}
        seen: TensorDict = lazy_stack(outputs).mean(0)
        if loss is self.grpo and self.steers:
            self._steer(float(seen["kl_to_ref"]))
        return self._metrics(data, seen) if self._logged else {}

    def _evaluate(self) -> None:
        """Judge what was held out, keep the best, say when it is time to stop, save."""
        score, metrics = self._judge()
        if self._is_best(score):
            state = {name: value.detach().clone() for name, value in self.agent.state_dict().items()}
            self.best = {"score": score, "iteration": self.iteration, "state": state}
        since = self.iteration - max(self.best["iteration"], self.settings.warmup_iterations)
        self.finished |= 0 < self.settings.patience * self.settings.evaluate_every <= since
        if self.log is not None:
            self.log.log({f"Val/{name}": value for name, value in metrics.items()}, self.iteration)
        self._keep(self._save)

    def _keep(self, save: Callable[[Path], None]) -> None:
        if self.folder is not None:
            with self._held.undisturbed():
                save(self.folder)
                self.saved = self.iteration

    def _is_best(self, score: float) -> bool:
        return score > float(self.best["score"])

    # -- stopping and going on -----------------------------------------------------------------------------------------

    def training_state(self) -> dict[str, Any]:
        """What `last.pt` holds beside the agent: tensors and plain values."""
        return {
            "iteration": self.iteration,
            "finished": self.finished,
            "best": self.best,
            "reference": self.reference.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "kl_to_ref_coeff": float(self.grpo.kl_to_ref_coeff),
            "contexts": self.env.contexts.before,
            "random": self._random_state(),
        }

    def go_on_from(self, agent: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Go on from what `training_state` gave; the end is the same, bit for bit, as without the stop."""
        self.agent.load_state_dict(agent)
        self.reference.load_state_dict(state["reference"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.grpo.kl_to_ref_coeff = state["kl_to_ref_coeff"]
        self.env.contexts.set_back(state["contexts"])
        self.collector.reset()
        self._random = state["random"]
        self.iteration, self.finished, self.best = state["iteration"], state["finished"], state["best"]
        self.saved = self.iteration
