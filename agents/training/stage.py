"""The stages that a training is made of, and the interface of the log that its metrics go to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import nn

from knobwise.agents.training.settings import OptimiserConfig
from knobwise.losses.kl_control import KLControl


class Log(Protocol):
    """A log of metrics, such as `knobwise.experiments.tracking.tracker.Tracker`."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...


@dataclass
class Stage:
    """One stage of a training: its loss, its length and its learning rate."""

    name: str
    """The name that the progress bar shows."""
    loss: Callable[[TensorDictBase], TensorDictBase]
    """The loss of a minibatch: the sum of its outputs that have a gradient is minimised."""
    iterations: int
    """Number of iterations; a stage of 0 is left out."""
    lr: float
    """Learning rate of AdamW, before the schedule."""
    weight_decay: float
    """Weight decay of AdamW."""
    clip_grad: float
    """Largest norm of the gradient."""
    prepare: Callable[[float, bool], None]
    """Called before each iteration with the share of the stage that is done, and True if
    diagnostics are read."""
    begin: Callable[[], object] = lambda: None
    """Called when the stage begins. The optimiser always starts anew."""
    kl_controls: list[KLControl] = field(default_factory=list)
    """Coefficients that follow the KL to the reference policy, after each iteration."""
    draw: Callable[[int], TensorDictBase] | None = None
    """Draws a minibatch of so many contexts, for a stage that learns from something else than what
    is collected. It collects only where diagnostics are read."""
    dropout: bool = False
    """True if the network drops out where the loss is computed. GRPO learns without: the old
    log-probs are drawn without dropout, so the new ones are computed without it, and the ratio is 1
    at the first step."""
    patience: int = 0
    """The stage ends this many evaluations after its best score; 0 never ends it early."""
    loss_name: str = "Loss"
    """The name that the loss is logged under."""
    judged: str = "policy"
    """Which network is judged on held-out data: that of the `policy` or of the `teacher`."""
    start: int = 0
    """The iteration of the whole training that it begins in; the trainer fills it in."""

    @property
    def end(self) -> int:
        """The iteration of the whole training that the next stage begins in."""
        return self.start + self.iterations

    def share(self, iteration: int) -> float:
        """Return the share of the stage that is done, 0 … 1."""
        return (iteration - self.start) / max(self.iterations, 1)

    def optimiser(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return a fresh AdamW for the parameters that learn; biases do not decay."""
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": self.weight_decay},
            {"params": [], "weight_decay": 0.0},
        ]
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                # True is 1, the group without decay
                groups[name.endswith("bias")]["params"].append(parameter)
        return torch.optim.AdamW(groups, lr=0.0, fused=True)

    def learning_rate(self, iteration: int, settings: OptimiserConfig) -> float:
        """Return the learning rate in an iteration: a linear rise, then a cosine to 0, as the
        settings say."""
        share = self.share(iteration)
        if settings.schedule == "constant":
            return self.lr
        if share + 1e-2 < settings.rise:
            return self.lr * (share + 1e-2) / settings.rise
        return self.lr * 0.5 * (1 + math.cos(math.pi * share))
