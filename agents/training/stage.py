"""A stage of a training: what learns, from which data, by which loss."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.data import ReplayBuffer

from knobwise.agents.training.settings import OptimiserConfig
from knobwise.losses.kl_control import KLControl

if TYPE_CHECKING:
    from knobwise.agents.training.state import Best
    from knobwise.agents.training.trainer import Trainer


LOGGED = {
    "loss": "Loss",
    "loss_objective": "Policy_Loss",
    "loss_kl_to_ref": "KL_Loss",
    "loss_critic": "Value_Loss",
    "grad_norm": "Grad_Norm",
    "entropy": "Entropy",
    "kl_to_ref": "KL",
    "clip_fraction": "Clip_Fraction",
    "cut_fraction": "Cut_Fraction",
    "ESS": "ESS",
    "ratio_mean": "Ratio_Mean",
    "mean_ratio": "Ratio_Mean",
    "explained_variance": "Explained_Variance",
    "zero_advantage_fraction": "Zero_Advantage_Fraction",
    "advantage_mean": "Advantage_Mean",
    "advantage_std": "Advantage_Std",
}
"""Diagnostics of the loss modules, and the names that they are logged under."""


class Log(Protocol):
    """A log of metrics, such as `knobwise.experiments.tracking.tracker.Tracker`."""

    def log(self, metrics: Mapping[str, float | Tensor], step: int) -> None:
        """Log numbers of one step, and the distributions of the numbers in tensors [n]."""


class Validation(NamedTuple):
    """Held-out scores of an agent."""

    score: float
    """Higher is better."""
    metrics: Mapping[str, float]
    """What is logged, without `Val/`."""
    by_sample: Tensor | None = None
    """The score of each held-out sample, where they are noted."""
    distributions: Mapping[str, Tensor] = MappingProxyType({})
    """What is logged as histograms, [n] each, without `Val/`."""

    def named(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Put `Val/` before the names of metrics (float) and distributions ([n]), for the log."""
        metrics = {f"Val/{name}": value for name, value in self.metrics.items()}
        return metrics, {f"Val/{name}": values for name, values in self.distributions.items()}


class Stage(ABC):
    """One stage of a training.

    In each iteration the trainer calls `prepare`; lets the collector draw contexts, for which
    `collect` decides; takes the loss of every minibatch; and calls `after` with the mean of what
    the losses returned.

    Args:
        module: what learns.
        settings: the optimiser.

    Attributes:
        iterations: how many; a stage of 0 is left out.
        lr: the learning rate of AdamW, before the schedule.
        reward_spread: how much rewards of a context typically differ, the unit of whatever is
            relative to rewards; None where nothing is learned from rewards.
        kl_controls: coefficients that follow the KL to a reference policy.
        watched: True in an iteration whose diagnostics are read.
        first: the iteration of the whole training that it begins in; the trainer sets it.
    """

    name: str
    """The name that the progress bar shows."""
    loss_name = "Loss"
    """The name that the loss is logged under."""
    dropout = False
    """True if the network drops out where the loss is computed. What is drawn and judged never
    does."""
    collects = True
    """False if it draws its own minibatches; contexts are then collected only where diagnostics are
    read."""
    logs_all = False
    """True if all that the loss returns is logged, also what `LOGGED` does not name."""
    stored: Collection[Any] = ()
    """The collected keys that go into the buffer."""
    scores_before: Tensor | None = None
    """Where it begins after another stage, the score of each held-out sample, where that is
    noted."""

    def __init__(
        self,
        module: nn.Module,
        settings: OptimiserConfig,
        *,
        iterations: int,
        lr: float,
        weight_decay: float | None = None,
        clip_grad: float | None = None,
        patience: int = 0,
    ) -> None:
        self.module = module
        self.settings = settings
        self.iterations = iterations
        self.lr = lr
        self.weight_decay = settings.weight_decay if weight_decay is None else weight_decay
        self.clip_grad = settings.clip_grad if clip_grad is None else clip_grad
        self.patience = patience
        """The stage ends this many evaluations after its best score; 0 never ends it early."""
        self.reward_spread: float | None = None
        self.kl_controls: list[KLControl] = []
        self.watched = True
        self.first = 0

    # -- what a stage does, in the order of an iteration -------------------------------------------

    def start(self, trainer: Trainer) -> None:  # noqa: B027 (most stages need nothing)
        """Called when the stage begins, before its optimiser is made."""

    def prepare(self, share: float, watched: bool) -> None:
        """Called before each iteration, with the share of the stage that is done."""
        self.watched = watched

    @abstractmethod
    def collect(self, contexts: TensorDictBase) -> TensorDictBase:
        """Decide for freshly drawn contexts, and write down what the losses need."""

    def minibatches(self, buffer: ReplayBuffer) -> Iterator[TensorDictBase]:
        """Split the collected contexts, in random order, into minibatches of
        `settings.minibatch`."""
        return iter(buffer.sample().split(self.settings.minibatch))

    @abstractmethod
    def loss(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Return the loss: the sum of the outputs with a gradient is minimised, others are
        diagnostics."""

    def after(self, outputs: TensorDictBase) -> None:
        """Called after an iteration that was watched, with the mean outputs of the losses."""
        for control in self.kl_controls:
            control.step(float(outputs["kl_to_ref"]))

    @abstractmethod
    def metrics(self, data: TensorDictBase) -> dict[str, float]:
        """Return metrics of collected contexts, to log beside the outputs of the loss."""

    def validate(self, trainer: Trainer) -> Validation:
        """Judge the agent on held-out data."""
        return trainer.validate(trainer.log is not None)

    def is_better(self, validation: Validation, best: Best) -> bool:
        """Compare scores: True if the weights just validated replace the best."""
        return self.settings.keep == "last" or validation.score > best.score

    def is_past_its_peak(self, iteration: int, scores: list[tuple[int, float]]) -> bool:
        """Return True if its score has not improved within `patience` evaluations.

        Args:
            iteration: the present one.
            scores: iteration and score of every evaluation.
        """
        scored = [(score, -at) for at, score in scores if at > self.first]
        patience = self.patience * self.settings.evaluate_every
        return bool(scored) and 0 < patience <= iteration + max(scored)[1]

    def state_dict(self) -> dict[str, Any]:
        """Collect what a resumed training needs beside the weights that learn: spread of rewards,
        coefficients under control."""
        coefficients = [float(control.coefficient) for control in self.kl_controls]
        return {"reward_spread": self.reward_spread, "coefficients": coefficients}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.reward_spread = state["reward_spread"]
        for control, value in zip(self.kl_controls, state["coefficients"], strict=True):
            control.coefficient.fill_(value)

    # -- its length and its optimiser --------------------------------------------------------------

    @property
    def end(self) -> int:
        """The iteration of the whole training that the next stage begins in."""
        return self.first + self.iterations

    def share(self, iteration: int) -> float:
        """Compute how much of the stage is done at an iteration of the whole training, 0 … 1."""
        return (iteration - self.first) / max(self.iterations, 1)

    def optimiser(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return a fresh AdamW for the parameters of a module; biases do not decay."""
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": self.weight_decay},
            {"params": [], "weight_decay": 0.0},
        ]
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                # True is 1, the group without decay
                groups[name.endswith("bias")]["params"].append(parameter)
        return torch.optim.AdamW(groups, lr=0.0, fused=True)

    def learning_rate(self, iteration: int) -> float:
        """Return the learning rate in an iteration: a linear rise, then a cosine to 0, as the
        settings say."""
        share = self.share(iteration)
        if self.settings.schedule == "constant":
            return self.lr
        if share + 1e-2 < self.settings.lr_warmup:
            return self.lr * (share + 1e-2) / self.settings.lr_warmup
        return self.lr * 0.5 * (1 + math.cos(math.pi * share))


class StagePolicy(TensorDictModuleBase):
    """The collector's policy; it delegates to the current stage."""

    def __init__(self, stage: Stage, in_keys: Sequence[Any]) -> None:
        super().__init__()
        self.in_keys = list(in_keys)
        self.out_keys = ["action"]
        self.stage = stage

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.stage.collect(tensordict)
