"""What a training is made of, stage by stage, and where its numbers go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tensordict import TensorDictBase

from knobwise.losses.kl_control import KLControl


class Log(Protocol):
    """Where numbers go: `knobwise.experiments.tracking.tracker.Tracker` is one."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...


@dataclass
class Stage:
    """One stage of a training: which loss, for how long, how fast."""

    name: str
    """As the progress bar shows it."""
    loss: Callable[[TensorDictBase], TensorDictBase]
    """Of a minibatch: the sum of the outputs that have a gradient is minimised."""
    iterations: int
    """How many; a stage of none is left out."""
    lr: float
    """Learning rate of AdamW, before the schedule."""
    prepare: Callable[[float, bool], None] = lambda share, logged: None
    """Called before each iteration with the share of the stage that is done and whether diagnostics
    are read."""
    begin: Callable[[], None] = lambda: None
    """Called when the stage begins. The optimiser always starts anew."""
    kl_controls: list[KLControl] = field(default_factory=list)
    """What follows the KL to the reference policy, after each iteration."""
    dropout: bool = False
    """Whether the network learns in train mode. GRPO does not: like the old log-probs, which are
    drawn in eval mode, the new ones are then without dropout, and the ratio is 1 at the first
    step."""
    patience: int = 0
    """Evaluations after this stage's best score after which the stage ends; 0 never ends it
    early."""
    retreat: int = 0
    """Evaluations in a row below the best after which it goes back to the best at half the learning
    rate; 0 never."""
    weight_decay: float | None = None
    """Of AdamW; None for that of the settings."""
    clip_grad: float | None = None
    """Largest norm of the gradient; None for that of the settings."""
    judged: str = "policy"
    """What is judged on held-out data: the `policy`, or the `teacher`."""
